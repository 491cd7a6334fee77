/* calypte score: negative log-likelihood and perplexity of a text, and the logits behind it. */
#include "cmd/cli/client.h"
#include "cmd/cli/commands.h"
#include "cmd/cli/input.h"
#include "cmd/cli/interrupt.h"
#include "cmd/cli/target.h"
#include "cmd/cli/usage.h"
#include "proto/cleanup.h"

#include <limits.h>
#include <string.h>

enum { FLAG_NAME, FLAG_TEXT, FLAG_TOKENS, FLAG_LOGITS, FLAG_DRAFT_LOGITS, FLAG_JSON };

static const struct flag flags[] = {
    [FLAG_NAME] = {"--name", "-n", "NAME", "use this running instance instead of a MODEL"},
    [FLAG_TEXT] = {"--text", NULL, "FILE", "the text (-: standard input)"},
    [FLAG_TOKENS] = {"--tokens", NULL, "FILE", "decimal token ids separated by white space (-: standard input)"},
    [FLAG_LOGITS] = {"--logits", NULL, "OUT", "write logits [T, vocab] f32; row i is the prediction after token i"},
    [FLAG_DRAFT_LOGITS] = {"--draft-logits", NULL, "OUT",
                           "write the MTP layer's draft_logits [T-1, vocab] f32; row i predicts token i+2"},
    [FLAG_JSON] = {"--json", NULL, NULL, "print {\"tokens\", \"nll\", \"perplexity\", \"seconds\"}"},
    {NULL, NULL, NULL, NULL},
};

static const struct command_line line = {
    .command = "score",
    .operands = "[MODEL] --text FILE | --tokens FILE",
    .summary = "Negative log-likelihood a token and perplexity, teacher forced, in windows of --context tokens.",
    .details = "Each window starts afresh and its first token is not scored. The files are safetensors.",
    .flags = flags,
    .settings = true,
    .most_operands = 1,
};

/* A path that means the same to the front, whose working folder is another. */
static int add_path(json_t *request, const char *field, const char *path, struct error *ret_error)
{
    char folder[PATH_MAX];
    if (!path)
        return 0;
    if (path[0] == '/')
        return json_object_set_new(request, field, json_string(path));
    if (!getcwd(folder, sizeof folder))
        return error_set(ret_error, errno, "cannot find the current folder: %s; give an absolute path",
                         strerror(errno));
    return json_object_set_new(request, field, json_sprintf("%s/%s", folder, path));
}

static int make_request(const struct arguments *arguments, json_t **ret_request, struct error *ret_error)
{
    _cleanup_free_ char *bytes = NULL;
    const char *text = arguments->values[FLAG_TEXT];
    json_t *value = NULL, *request = json_pack("{s:s}", "op", "score");
    size_t size;
    int status;
    if (text) {
        status = input_read(text, &bytes, &size, ret_error);
        if (!status)
            status = input_text(bytes, size, text, &value, ret_error);
    } else
        status = input_tokens(arguments->values[FLAG_TOKENS], &value, ret_error);
    if (!status)
        status = json_object_set_new(request, text ? "text" : "tokens", value);
    uint64_t context = settings_number(&arguments->settings, SETTING_CONTEXT);
    if (!status && context)
        status = json_object_set_new(request, "context", json_integer((json_int_t)context));
    if (!status)
        status = add_path(request, "logits", arguments->values[FLAG_LOGITS], ret_error);
    if (!status)
        status = add_path(request, "draft_logits", arguments->values[FLAG_DRAFT_LOGITS], ret_error);
    if (status) {
        json_decref(request);
        return status;
    }
    *ret_request = request;
    return 0;
}

static void print_score(json_t *score, bool json)
{
    if (json) {
        json_object_del(score, "ok");
        json_dumpf(score, stdout, JSON_COMPACT);
        putchar('\n');
        return;
    }
    printf("%" JSON_INTEGER_FORMAT " tokens scored: nll %.6f a token, perplexity %.4f, in %.2f s\n",
           json_integer_value(json_object_get(score, "tokens")), json_number_value(json_object_get(score, "nll")),
           json_number_value(json_object_get(score, "perplexity")),
           json_number_value(json_object_get(score, "seconds")));
}

int cmd_score(int argc, char **argv)
{
    struct arguments arguments;
    struct target target = {.private_pid = 0};
    struct client client = {.channel = NULL};
    struct error error;
    json_t *request = NULL, *score = NULL;
    int code = arguments_parse(&line, argc, argv, &arguments);
    if (code != ARGUMENTS_GO_ON)
        return code;
    if (!arguments.values[FLAG_TEXT] == !arguments.values[FLAG_TOKENS])
        return usage_error("score", "exactly one of --text FILE and --tokens FILE is needed");
    if (arguments.operand_count && arguments.values[FLAG_NAME])
        return usage_error("score", "unexpected argument \"%s\": give MODEL or -n, not both", arguments.operands[0]);
    if (target_check_settings(arguments.operand_count ? arguments.operands[0] : NULL, &arguments.settings,
                              SETTING_CONTEXT, &error))
        return usage_error("score", "%s", error.text);
    if ((arguments.values[FLAG_TEXT] &&
         target_check_text(arguments.operand_count ? arguments.operands[0] : NULL, &error)) ||
        make_request(&arguments, &request, &error))
        return usage_failed("score", "%s", error.text);
    _cleanup_close_ int interrupt_fd = interrupt_open();
    int status = target_open(arguments.operand_count ? arguments.operands[0] : NULL, arguments.values[FLAG_NAME],
                             &arguments.settings, interrupt_fd, &target, &error);
    if (!status)
        status = client_open(&target.instance, "api.ipc", interrupt_fd, &client, &error);
    if (!status)
        status = client_call(&client, request, -1, &score, &error);
    else
        json_decref(request);
    client_close(&client); /* the front abandons a score whose client has gone */
    target_close(&target);
    if (status)
        return status == -EINTR ? EXIT_INTERRUPTED : usage_failed("score", "%s", error.text);
    print_score(score, arguments.values[FLAG_JSON] != NULL);
    json_decref(score);
    return EXIT_DONE;
}
