/* calypte up: starts an instance, or becomes its supervisor with --foreground. */
#include "cmd/cli/client.h"
#include "cmd/cli/commands.h"
#include "cmd/cli/interrupt.h"
#include "cmd/cli/launch.h"
#include "cmd/cli/usage.h"
#include "io_daemon/learning.h"
#include "proto/bytes_text.h"
#include "proto/cleanup.h"
#include "proto/container.h"

#include <errno.h>
#include <limits.h>
#include <stdio_ext.h>
#include <string.h>
#include <sys/stat.h>

enum { FLAG_NAME, FLAG_FOREGROUND, FLAG_FORGET, FLAG_JSON };

static const struct flag flags[] = {
    [FLAG_NAME] = {"--name", "-n", "NAME", "the instance's name (default: default)"},
    [FLAG_FOREGROUND] = {"--foreground", NULL, NULL,
                         "stay in the foreground; messages on stderr, Ctrl-C stops the instance"},
    [FLAG_FORGET] = {"--forget", NULL, NULL, "begin without what earlier sessions have learnt of the use of experts"},
    [FLAG_JSON] = {"--json", NULL, NULL, "print the instance's status as JSON when it can answer"},
    {NULL, NULL, NULL, NULL},
};

static const struct command_line line = {
    .command = "up",
    .operands = "MODEL",
    .summary =
        "Starts an instance of a container: supervisor, iod, workers, front. Returns when the instance can answer.",
    .details = "Example: calypte up ~/models/glm -n glm --pool 80% && calypte run -n glm \"What is a river?\"",
    .flags = flags,
    .settings = true,
    .least_operands = 1,
    .most_operands = 1,
};

/* The mirror is worth a word where it is not read (iod has said why in its log), and where one drive has both copies. */
static void warn_of_copies(const struct instance *instance, const json_t *status)
{
    size_t index;
    json_t *copy, *drive;
    json_array_foreach (json_object_get(json_object_get(status, "disk"), "copies"), index, copy) {
        const char *state = json_string_value(json_object_get(copy, "state"));
        const char *path = json_string_value(json_object_get(copy, "path"));
        if (state && path && !strcmp(state, "refused"))
            usage_failed("up", "%s is not used; why: %s/calypte-iod.log", path, instance->folder);
    }
    json_array_foreach (json_object_get(json_object_get(status, "disk"), "drives"), index, drive)
        if (json_array_size(json_object_get(drive, "copies")) > 1)
            usage_failed("up", "drive %s has files of both copies: a mirror helps on another drive",
                         json_string_value(json_object_get(drive, "device")));
}

/* Said once, by who starts the instance, and not at every request. */
static void warn_of_tokenizer(const char *container)
{
    char path[PATH_MAX];
    int length = snprintf(path, sizeof path, "%s/tokenizer.json", container);
    struct stat facts;
    if (length > 0 && (size_t)length < sizeof path && lstat(path, &facts) < 0 && errno == ENOENT)
        usage_failed("up", "no tokenizer in the container: requests must give tokens");
}

static int report(const struct instance *instance, bool json)
{
    struct error error;
    json_t *status = NULL;
    if (client_ask_supervisor(instance, "status", &status, &error))
        return usage_failed("up", "%s", error.text);
    warn_of_copies(instance, status);
    warn_of_tokenizer(json_string_value(json_object_get(status, "model")));
    if (json) {
        json_dumpf(status, stdout, JSON_INDENT(2));
        putchar('\n');
    } else {
        json_int_t workers = json_integer_value(json_object_get(status, "workers"));
        const json_t *pool = json_object_get(status, "pool");
        printf("instance %s is up: %s, %" JSON_INTEGER_FORMAT " worker%s x %" JSON_INTEGER_FORMAT
               " threads, pool of %" JSON_INTEGER_FORMAT " of %" JSON_INTEGER_FORMAT " experts",
               instance->name, json_string_value(json_object_get(status, "model")), workers, workers == 1 ? "" : "s",
               json_integer_value(json_object_get(status, "threads")),
               json_integer_value(json_object_get(pool, "slots")),
               json_integer_value(json_object_get(pool, "experts")));
        if (json_is_true(json_object_get(pool, "auto")))
            printf(" (auto, %s of memory stay in reserve)",
                   bytes_text((uint64_t)json_integer_value(json_object_get(pool, "reserve"))).text);
        putchar('\n');
    }
    json_decref(status);
    /* It runs, whether or not anybody could read so: that is what the exit code says. */
    if (fflush(stdout)) {
        usage_failed("up", "instance %s is up, but standard output cannot be written: %s", instance->name,
                     strerror(errno));
        __fpurge(stdout);
        clearerr(stdout);
    }
    return EXIT_DONE;
}

/* Removes what was remembered of the use of this container's experts, with the instance's lock: where it runs already,
 * nothing is lost. */
static int forget(const struct instance *instance, const char *container_path, struct error *ret_error)
{
    struct instance taken = {.lock_fd = -1};
    char path[PATH_MAX];
    struct container *container;
    int status = container_open(container_path, &container, ret_error);
    if (status)
        return status;
    status = learning_path(instance->folder, container->identity, path, ret_error);
    container_close(container);
    if (status)
        return status;
    bool new = access(instance->folder, F_OK) < 0;
    status = instance_take(instance->name, &taken, ret_error);
    if (status)
        return status;
    status = learning_forget(path, ret_error);
    instance_release(&taken, new);
    return status;
}

int cmd_up(int argc, char **argv)
{
    struct arguments arguments;
    struct instance instance;
    struct error error;
    int code = arguments_parse(&line, argc, argv, &arguments);
    if (code != ARGUMENTS_GO_ON)
        return code;
    if (instance_find(arguments.values[FLAG_NAME] ? arguments.values[FLAG_NAME] : "default", &instance, &error))
        return usage_error("up", "%s", error.text);
    if (launch_check_copies(arguments.operands[0], &arguments.settings, &error))
        return usage_failed("up", "%s", error.text);
    _cleanup_free_ char *path = realpath(arguments.operands[0], NULL);
    if (!path)
        return usage_failed("up", "model %s: %s; give the folder that `calypte convert` made", arguments.operands[0],
                            strerror(errno));
    instance_sweep(INSTANCE_PRIVATE_PREFIX, &error);
    if (arguments.values[FLAG_FORGET] && forget(&instance, path, &error))
        return usage_failed("up", "%s", error.text);
    struct launch launch = {.instance = instance.name, .container = path, .settings = &arguments.settings};
    if (arguments.values[FLAG_FOREGROUND]) {
        launch_exec(&launch, &error);
        return usage_failed("up", "%s", error.text);
    }
    pid_t pid;
    _cleanup_close_ int interrupt_fd = interrupt_open();
    int status = launch_start(&launch, interrupt_fd, &pid, &error);
    if (status)
        return status == -EINTR ? EXIT_INTERRUPTED : usage_failed("up", "%s", error.text);
    return report(&instance, arguments.values[FLAG_JSON] != NULL);
}
