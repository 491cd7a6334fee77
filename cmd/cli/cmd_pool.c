/* calypte pool: how large an instance's pool of experts is and may be, what is hot in it; changes its size. */
#include "cmd/cli/client.h"
#include "cmd/cli/commands.h"
#include "cmd/cli/usage.h"
#include "proto/bytes_text.h"
#include "proto/parse.h"

#include <string.h>

#define SUPERVISOR_MS 10000

enum { FLAG_NAME, FLAG_SIZE, FLAG_HOLD, FLAG_RELEASE, FLAG_JSON };

static const struct flag flags[] = {
    [FLAG_NAME] = {"--name", "-n", "NAME", "the instance's name (default: default)"},
    [FLAG_SIZE] = {"--size", NULL, "SIZE|PCT|auto",
                   "make the pool so large: bytes (64G), a share of the memory that is available (80%), or auto"},
    [FLAG_HOLD] = {"--hold", NULL, "LAYER:EXPERT", "keep this expert in the pool once it is there (repeatable)"},
    [FLAG_RELEASE] = {"--release", NULL, "LAYER:EXPERT|all", "hold it no longer (repeatable)"},
    [FLAG_JSON] = {"--json", NULL, NULL, "print everything as JSON"},
    {NULL, NULL, NULL, NULL},
};

static const struct command_line line = {
    .command = "pool",
    .operands = "",
    .summary = "The pool of experts of a running instance: its size, and what is hot in it. Answers go on while it "
               "grows or shrinks.",
    .details =
        "An `auto` pool leaves a reserve of memory free: it shrinks under memory pressure and grows again when room "
        "appears. One\n"
        "with a size keeps it.\n"
        "A new size is followed in the background: answers go on, and the lines say how far it is. HEAT is how often "
        "the expert\n"
        "was used, uses long ago counted less; LAST TICK when: a tick is a layer of a step.\n"
        "In the JSON, `slots` is the size that is wanted and `standing` what has memory now; `cap` is what `auto` may "
        "have, and\n"
        "`cap_by` what sets that bound (memory, a control group's file, /dev/shm, experts). `last_change` is absent "
        "where the size is that of the start. `used` of a hot expert is "
        "the tick\n"
        "of its last use; `held` lists what was asked for, `held_now` counts what is held of it.",
    .flags = flags,
};

static json_int_t number(const json_t *object, const char *name)
{
    return json_integer_value(json_object_get(object, name));
}

static struct bytes_text bytes(const json_t *object, const char *name)
{
    return bytes_text((uint64_t)number(object, name));
}

static void print_pool(const json_t *pool)
{
    const char *by = json_string_value(json_object_get(pool, "cap_by"));
    size_t index;
    json_t *expert;
    json_int_t standing = number(pool, "standing"), wanted = number(pool, "slots");
    printf("size      %" JSON_INTEGER_FORMAT " slots of %s stand (%s), %" JSON_INTEGER_FORMAT
           " are wanted%s; the model has %" JSON_INTEGER_FORMAT " experts\n",
           standing, bytes(pool, "slot_bytes").text, bytes(pool, "bytes").text, wanted,
           json_is_true(json_object_get(pool, "auto")) ? " (auto)" : "", number(pool, "experts"));
    if (json_is_true(json_object_get(pool, "refused")))
        printf("          memory or /dev/shm had no room for more: enlarge /dev/shm, free memory, or give a smaller "
               "--size\n");
    else if (standing != wanted)
        printf("          it is %s; `calypte pool` shows how far\n", standing < wanted ? "growing" : "shrinking");
    client_print_change(pool);
    printf("room      auto may have %" JSON_INTEGER_FORMAT
           " slots, bounded by %s: %s of memory are free, a reserve of %s is kept; /dev/shm has %s\n",
           number(pool, "cap"), by ? by : "?", bytes(pool, "free").text, bytes(pool, "reserve").text,
           bytes(pool, "shm_free").text);
    printf("slots     %" JSON_INTEGER_FORMAT " ready, %" JSON_INTEGER_FORMAT " loading, %" JSON_INTEGER_FORMAT
           " pinned\n",
           number(pool, "filled"), number(pool, "loading"), number(pool, "pinned"));
    if (json_array_size(json_object_get(pool, "held"))) {
        printf("held      %zu asked for, %" JSON_INTEGER_FORMAT " held now (the warmest, at most half of the slots):",
               json_array_size(json_object_get(pool, "held")), number(pool, "held_now"));
        json_array_foreach (json_object_get(pool, "held"), index, expert)
            printf(" %s", json_string_value(expert));
        printf("\n");
    }
    printf("\n%5s %6s %8s %12s\n", "LAYER", "EXPERT", "HEAT", "LAST TICK");
    json_array_foreach (json_object_get(pool, "hottest"), index, expert)
        printf("%5" JSON_INTEGER_FORMAT " %6" JSON_INTEGER_FORMAT " %8.3f %12" JSON_INTEGER_FORMAT "\n",
               number(expert, "layer"), number(expert, "expert"), json_number_value(json_object_get(expert, "heat")),
               number(expert, "used"));
}

/* The values of a flag that may be given several times; NULL: it was not. */
static json_t *given_list(const struct arguments *arguments, size_t flag)
{
    json_t *list = NULL;
    for (size_t i = 0; i < arguments->given_count; i++) {
        if (arguments->given[i].flag != flag)
            continue;
        list = list ? list : json_array();
        json_array_append_new(list, json_string(arguments->given[i].value));
    }
    return list;
}

/* Asks the supervisor, with the wishes that were given. */
static int ask(const struct instance *instance, const struct arguments *arguments, json_t **ret_answer,
               struct error *ret_error)
{
    struct client client;
    int status = client_open(instance, "supervisor.ipc", -1, &client, ret_error);
    json_t *request = json_pack("{s:s, s:s*, s:o*, s:o*}", "op", "pool", "size", arguments->values[FLAG_SIZE], "hold",
                                given_list(arguments, FLAG_HOLD), "release", given_list(arguments, FLAG_RELEASE));
    if (!status)
        status = client_call(&client, request, SUPERVISOR_MS, ret_answer, ret_error);
    else
        json_decref(request);
    client_close(&client);
    return status;
}

/* Whether a wish can be one at all; whether the instance can fulfil it is for its supervisor to say. */
static int check_size(const char *text)
{
    uint64_t bytes;
    double percent;
    if (!strcmp(text, "auto") || !parse_percent(text, &percent))
        return ARGUMENTS_GO_ON;
    int status = parse_size(text, &bytes);
    if (status == -ERANGE)
        return usage_error("pool", "--size %s is too large: a size is below " PARSE_SIZE_LIMIT, text);
    if (status < 0 || bytes == 0)
        return usage_error(
            "pool", "--size %s: a size (64G, 1.5GiB), a share of the free memory (80%%) or auto is expected", text);
    return ARGUMENTS_GO_ON;
}

int cmd_pool(int argc, char **argv)
{
    struct arguments arguments;
    struct instance instance;
    struct error error;
    json_t *answer = NULL;
    int code = arguments_parse(&line, argc, argv, &arguments);
    if (code != ARGUMENTS_GO_ON)
        return code;
    const char *size = arguments.values[FLAG_SIZE];
    if (size && (code = check_size(size)) != ARGUMENTS_GO_ON)
        return code;
    if (instance_find(arguments.values[FLAG_NAME] ? arguments.values[FLAG_NAME] : "default", &instance, &error))
        return usage_error("pool", "%s", error.text);
    if (ask(&instance, &arguments, &answer, &error))
        return usage_failed("pool", "%s", error.text);
    const json_t *pool = json_object_get(answer, "pool");
    if (arguments.values[FLAG_JSON]) {
        json_dumpf(pool, stdout, JSON_INDENT(2));
        putchar('\n');
    } else
        print_pool(pool);
    json_decref(answer);
    return EXIT_DONE;
}
