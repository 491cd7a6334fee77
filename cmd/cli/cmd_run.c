/* calypte run: one answer, streamed as it comes. */
#include "cmd/cli/client.h"
#include "cmd/cli/commands.h"
#include "cmd/cli/input.h"
#include "cmd/cli/interrupt.h"
#include "cmd/cli/target.h"
#include "cmd/cli/usage.h"
#include "cmd/front/chat.h"
#include "proto/cleanup.h"

#include <inttypes.h>
#include <string.h>
#include <sys/stat.h>

#define NEXT_WAIT_MS 10000 /* the front answers an empty piece after that, so that a lost request is noticed */
#define CANCEL_MS 2000

enum {
    FLAG_NAME,
    FLAG_TOKENS,
    FLAG_JSON,
    FLAG_RAW,
    FLAG_SYSTEM,
    FLAG_MAX_TOKENS,
    FLAG_TEMPERATURE,
    FLAG_TOP_P,
    FLAG_SEED,
    FLAG_STOP,
    FLAG_THINK,
    FLAG_STATS,
};

static const struct flag flags[] = {
    [FLAG_NAME] = {"--name", "-n", "NAME", "ask this running instance (without MODEL and -n: default)"},
    [FLAG_TOKENS] = {"--tokens", NULL, "FILE",
                     "the prompt as decimal token ids separated by white space (-: standard input)"},
    [FLAG_JSON] = {"--json", NULL, NULL, "print the whole answer object when it is complete"},
    [FLAG_RAW] = {"--raw", NULL, NULL, "no chat template: the model goes on with the text"},
    [FLAG_SYSTEM] = {"--system", NULL, "TEXT", "a system message before the prompt"},
    [FLAG_MAX_TOKENS] = {"--max-tokens", NULL, "N", "most tokens of the answer (default: what the context leaves)"},
    [FLAG_TEMPERATURE] = {"--temperature", NULL, "T",
                          "0: always the likeliest token (default); 1: as likely as the model says"},
    [FLAG_TOP_P] = {"--top-p", NULL, "P", "choose among the likeliest tokens that have this probability together"},
    [FLAG_SEED] = {"--seed", NULL, "N", "the same seed gives the same text"},
    [FLAG_STOP] = {"--stop", NULL, "TEXT", "end the answer before this text (repeatable)"},
    [FLAG_THINK] = {"--think", NULL, "HOW",
                    "off (default), on, high or max: the model reasons first, which is shown on stderr"},
    [FLAG_STATS] = {"--stats", NULL, NULL,
                    "lines on stderr: tokens, tokens a second, hit rate, bytes from disk, where the time went"},
    {NULL, NULL, NULL, NULL},
};

static const struct command_line line = {
    .command = "run",
    .operands = "[MODEL] PROMPT",
    .summary = "Answers one prompt. With a MODEL of which no instance runs, one is started for the occasion and "
               "stopped after it.",
    .details = "PROMPT `-` is read from standard input (one newline at its end is dropped, except with --raw). The "
               "settings are for an\n"
               "instance that this command starts. Ctrl-C ends the answer with exit code 130.\n"
               "Examples: calypte run ~/models/glm \"What is a river?\"\n"
               "          calypte run -n glm --temperature 0.7 --seed 1 - < question.txt",
    .flags = flags,
    .settings = true,
    .most_operands = ARGUMENTS_MAX_OPERANDS, /* sort_operands() says what is wrong with more than two */
};

struct run {
    struct arguments arguments;
    const char *model, *prompt; /* NULL: none */
    int interrupt_fd;
    struct target target;
    bool reasoning; /* the last that was printed is the model's reasoning */
};

/* Sorts the operands into MODEL and PROMPT. */
static int sort_operands(struct run *run)
{
    const struct arguments *arguments = &run->arguments;
    size_t count = arguments->operand_count, prompts = arguments->values[FLAG_TOKENS] ? 0 : 1;
    char manifest[4096];
    if (count < prompts)
        return usage_error("run", "a prompt is missing: calypte run [MODEL] PROMPT");
    if (prompts && count > 2)
        return usage_error("run",
                           "%zu arguments, but MODEL and PROMPT are all there are: put quotes around a prompt of "
                           "several words",
                           count);
    if (count > prompts + 1 || (count > prompts && arguments->values[FLAG_NAME]))
        return usage_error("run", "unexpected argument \"%s\": %s", arguments->operands[count - 1],
                           arguments->values[FLAG_NAME] ? "give MODEL or -n, not both"
                                                        : "with --tokens there is no PROMPT");
    run->model = count > prompts ? arguments->operands[0] : NULL;
    run->prompt = prompts ? arguments->operands[count - 1] : NULL;
    if (!run->prompt || run->model || arguments->values[FLAG_NAME])
        return 0;
    snprintf(manifest, sizeof manifest, "%.4000s/calypte.json", run->prompt);
    if (!access(manifest, F_OK))
        return usage_error("run", "a prompt is missing: calypte run %s PROMPT", run->prompt);
    return 0;
}

/* Puts prompt or tokens into the request. */
static int add_prompt(const struct run *run, json_t *request, struct error *ret_error)
{
    _cleanup_free_ char *bytes = NULL;
    json_t *value = NULL;
    size_t size;
    int status;
    if (!run->prompt) {
        status = input_tokens(run->arguments.values[FLAG_TOKENS], &value, ret_error);
    } else if (strcmp(run->prompt, "-")) {
        status = input_text(run->prompt, strlen(run->prompt), "the prompt", &value, ret_error);
    } else {
        status = input_read("-", &bytes, &size, ret_error);
        if (!status && size && bytes[size - 1] == '\n' && !run->arguments.values[FLAG_RAW])
            size--;
        if (!status)
            status = input_text(bytes, size, "-", &value, ret_error);
    }
    return status ? status : json_object_set_new(request, run->prompt ? "prompt" : "tokens", value);
}

/* The request from the flags: 0 and *ret_request, or an exit code. */
static int make_request(const struct run *run, json_t **ret_request)
{
    const struct arguments *arguments = &run->arguments;
    uint64_t max_tokens = 0, seed = 0;
    double temperature = 0, top_p = 1;
    enum chat_think think;
    struct error error;
    if (arguments->values[FLAG_THINK] && chat_think_parse(arguments->values[FLAG_THINK], &think, &error))
        return usage_error("run", "--%s", error.text);
    if (arguments_integer(arguments, FLAG_MAX_TOKENS, 1, INT32_MAX, &max_tokens) ||
        arguments_integer(arguments, FLAG_SEED, 0, INT64_MAX, &seed) ||
        arguments_real(arguments, FLAG_TEMPERATURE, 0, 100, &temperature) ||
        arguments_real(arguments, FLAG_TOP_P, 0, 1, &top_p))
        return EXIT_USAGE;
    json_t *request = json_pack("{s:s}", "op", "submit"), *stops = json_array();
    if (arguments->values[FLAG_MAX_TOKENS])
        json_object_set_new(request, "max_tokens", json_integer((json_int_t)max_tokens));
    if (arguments->values[FLAG_SEED])
        json_object_set_new(request, "seed", json_integer((json_int_t)seed));
    if (arguments->values[FLAG_TEMPERATURE])
        json_object_set_new(request, "temperature", json_real(temperature));
    if (arguments->values[FLAG_TOP_P])
        json_object_set_new(request, "top_p", json_real(top_p));
    if (arguments->values[FLAG_RAW])
        json_object_set_new(request, "raw", json_true());
    if (arguments->values[FLAG_SYSTEM])
        json_object_set_new(request, "system", json_string(arguments->values[FLAG_SYSTEM]));
    if (arguments->values[FLAG_THINK])
        json_object_set_new(request, "think", json_string(arguments->values[FLAG_THINK]));
    for (size_t i = 0; i < arguments->given_count; i++)
        if (arguments->given[i].flag == FLAG_STOP)
            json_array_append_new(stops, json_string(arguments->given[i].value));
    if (json_array_size(stops))
        json_object_set(request, "stop", stops);
    json_decref(stops);
    if (add_prompt(run, request, &error)) {
        json_decref(request);
        return usage_failed("run", "%s", error.text);
    }
    *ret_request = request;
    return 0;
}

/* Joins a piece's text to what the whole answer has of that name. The piece: NULL if it has none. */
static int join_text(json_t *whole, const json_t *piece, const char *name, const json_t **ret_text)
{
    const json_t *text = json_object_get(piece, name), *before = json_object_get(whole, name);
    *ret_text = json_is_string(text) ? text : NULL;
    if (!*ret_text)
        return 0;
    size_t old = json_is_string(before) ? json_string_length(before) : 0, more = json_string_length(text);
    _cleanup_free_ char *joined = malloc(old + more + 1);
    if (!joined)
        return -ENOMEM;
    if (old)
        memcpy(joined, json_string_value(before), old);
    memcpy(joined + old, json_string_value(text), more);
    return json_object_set_new(whole, name, json_stringn(joined, old + more)) ? -ENOMEM : 0;
}

/* Reasoning goes to stderr, dim on a terminal, so that stdout has the answer alone. */
static void print_reasoning(struct run *run, const json_t *text)
{
    const char *value = json_string_value(text);
    if (!text || !*value)
        return;
    bool terminal = isatty(STDERR_FILENO);
    fprintf(stderr, "%s%s%s", terminal ? "\033[2m" : "", value, terminal ? "\033[0m" : "");
    run->reasoning = value[strlen(value) - 1] != '\n';
}

static void end_reasoning(struct run *run)
{
    if (run->reasoning)
        fputc('\n', stderr);
    run->reasoning = false;
}

/* Adds a piece to the whole answer, and prints it unless the answer is wanted as JSON. Ids stand for text that the
 * model has no tokenizer for. Returns 0, or a negative errno: -EPIPE when nobody reads. */
static int take_piece(struct run *run, json_t *whole, const json_t *piece)
{
    const json_t *text, *reasoning;
    json_t *tokens = json_object_get(whole, "tokens");
    int status = join_text(whole, piece, "reasoning", &reasoning);
    if (!status)
        status = join_text(whole, piece, "text", &text);
    if (status)
        return status;
    if (!run->arguments.values[FLAG_JSON]) {
        print_reasoning(run, reasoning);
        if (text && json_string_length(text)) {
            end_reasoning(run);
            fwrite(json_string_value(text), 1, json_string_length(text), stdout);
        }
        size_t index;
        json_t *id;
        if (!text)
            json_array_foreach (json_object_get(piece, "tokens"), index, id)
                printf("%s%" JSON_INTEGER_FORMAT, json_array_size(tokens) + index ? " " : "", json_integer_value(id));
    }
    json_array_extend(tokens, json_object_get(piece, "tokens"));
    errno = 0;
    return fflush(stdout) ? -(errno ? errno : EIO) : 0;
}

/* Where the time of the steps went, in milliseconds a step; parts that took none are left out. */
static void print_parts(const json_t *timing)
{
    const char *name;
    json_t *seconds, *parts = json_object_get(timing, "parts");
    double steps = json_number_value(json_object_get(timing, "steps"));
    if (steps <= 0)
        return;
    fprintf(stderr, "%.0f steps of %.3f ms:", steps,
            1e3 * json_number_value(json_object_get(timing, "steps_s")) / steps);
    json_object_foreach (parts, name, seconds)
        if (json_number_value(seconds) > 0)
            fprintf(stderr, " %.*s %.3f,", (int)strcspn(name, "_"), name, 1e3 * json_number_value(seconds) / steps);
    fprintf(stderr, " of it matmul %.3f; front %.3f between steps\n",
            1e3 * json_number_value(json_object_get(timing, "matmul_s")) / steps,
            1e3 * json_number_value(json_object_get(timing, "front_s")) / steps);
}

static void print_stats(const json_t *answer)
{
    const json_t *usage = json_object_get(answer, "usage"), *timing = json_object_get(answer, "timing");
    fprintf(stderr,
            "prompt %" JSON_INTEGER_FORMAT " tokens, %.1f tok/s; answer %" JSON_INTEGER_FORMAT
            " tokens, %.1f tok/s; first token after %.3f s; hit rate %.1f %%; disk %" JSON_INTEGER_FORMAT " bytes\n",
            json_integer_value(json_object_get(usage, "prompt")),
            json_number_value(json_object_get(timing, "prompt_tokens_per_s")),
            json_integer_value(json_object_get(usage, "answer")),
            json_number_value(json_object_get(timing, "answer_tokens_per_s")),
            json_number_value(json_object_get(timing, "first_token_s")),
            100 * json_number_value(json_object_get(timing, "hit_rate")),
            json_integer_value(json_object_get(timing, "disk_bytes")));
    const json_t *lookahead = json_object_get(timing, "lookahead");
    double asked = json_number_value(json_object_get(lookahead, "asked"));
    double used = json_number_value(json_object_get(lookahead, "used"));
    double missed = json_number_value(json_object_get(lookahead, "missed"));
    if (lookahead)
        fprintf(stderr, "lookahead asked for %.0f experts, %.1f %% of them used, %.1f %% of what was missing\n", asked,
                100 * used / asked, used + missed > 0 ? 100 * used / (used + missed) : 0.0);
    print_parts(timing);
}

/* Takes piece after piece until the answer is done. */
static int stream(struct run *run, struct client *client, const char *id, json_t *whole, struct error *ret_error)
{
    for (bool done = false; !done;) {
        json_t *piece;
        json_t *next = json_pack("{s:s, s:s, s:i}", "op", "next", "id", id, "wait_ms", NEXT_WAIT_MS);
        int status = client_call(client, next, -1, &piece, ret_error);
        if (status)
            return status;
        done = json_is_true(json_object_get(piece, "done"));
        status = take_piece(run, whole, piece);
        json_object_del(piece, "reasoning");
        json_object_del(piece, "text");
        json_object_del(piece, "tokens");
        json_object_del(piece, "done");
        json_object_update(whole, piece);
        json_decref(piece);
        if (status)
            return error_set(ret_error, -status, "cannot write the answer: %s", strerror(-status));
    }
    return 0;
}

static int ask(struct run *run, struct client *client, json_t *request, struct error *ret_error)
{
    json_t *submitted, *whole = json_pack("{s:[]}", "tokens");
    int status = client_call(client, request, -1, &submitted, ret_error);
    if (status) {
        json_decref(whole);
        return status;
    }
    const char *id = json_string_value(json_object_get(submitted, "id"));
    status = id ? stream(run, client, id, whole, ret_error)
                : error_set(ret_error, EBADMSG, "the instance gave the request no id");
    if (status && id && status != -EREMOTEIO &&
        status != -ECONNRESET) { /* interrupted, or nobody reads: nobody wants the rest */
        json_t *cancelled = NULL;
        client->interrupt_fd = -1;
        client_call(client, json_pack("{s:s, s:s}", "op", "cancel", "id", id), CANCEL_MS, &cancelled, NULL);
        json_decref(cancelled);
    }
    if (!run->arguments.values[FLAG_JSON]) {
        end_reasoning(run);
        if (json_array_size(json_object_get(whole, "tokens")))
            putchar('\n');
    } else if (!status) {
        json_dumpf(whole, stdout, JSON_COMPACT);
        putchar('\n');
    }
    if (fflush(stdout) && !status)
        status = error_set(ret_error, errno, "cannot write the answer: %s", strerror(errno));
    if (!status && run->arguments.values[FLAG_STATS])
        print_stats(whole);
    json_decref(whole);
    json_decref(submitted);
    return status;
}

int cmd_run(int argc, char **argv)
{
    struct run run = {.interrupt_fd = -1};
    struct client client = {.channel = NULL};
    struct error error;
    json_t *request = NULL;
    int code = arguments_parse(&line, argc, argv, &run.arguments);
    if (code != ARGUMENTS_GO_ON)
        return code;
    code = sort_operands(&run);
    if (!code && target_check_settings(run.model, &run.arguments.settings, SETTING_COUNT, &error))
        code = usage_error("run", "%s", error.text);
    if (!code)
        code = make_request(&run, &request);
    if (code)
        return code;
    if (!run.arguments.values[FLAG_TOKENS] && target_check_text(run.model, &error)) {
        json_decref(request);
        return usage_failed("run", "%s", error.text);
    }
    _cleanup_close_ int interrupt_fd = interrupt_open();
    run.interrupt_fd = interrupt_fd;
    int status = target_open(run.model, run.arguments.values[FLAG_NAME], &run.arguments.settings, interrupt_fd,
                             &run.target, &error);
    if (!status)
        status = client_open(&run.target.instance, "api.ipc", interrupt_fd, &client, &error);
    if (!status)
        status = ask(&run, &client, request, &error);
    else
        json_decref(request);
    client_close(&client);
    target_close(&run.target);
    if (status)
        return status == -EINTR ? EXIT_INTERRUPTED : usage_failed("run", "%s", error.text);
    return EXIT_DONE;
}
