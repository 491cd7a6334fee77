/* calypte down: stops instances, and removes what dead ones left. */
#include "cmd/cli/client.h"
#include "cmd/cli/commands.h"
#include "cmd/cli/usage.h"
#include "proto/cleanup.h"

#include <poll.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>

#define END_MS 30000 /* the supervisor ends its processes in a few seconds, SIGKILL included */

enum { FLAG_NAME, FLAG_ALL };

static const struct flag flags[] = {
    [FLAG_NAME] = {"--name", "-n", "NAME", "the instance's name (default: default)"},
    [FLAG_ALL] = {"--all", NULL, NULL, "stop every instance of this runtime folder, and remove what dead ones left"},
    {NULL, NULL, NULL, NULL},
};

static const struct command_line line = {
    .command = "down",
    .operands = "",
    .summary = "Stops an instance. Returns when none of its processes, sockets and shared memory is left.",
    .flags = flags,
};

/* Waits until the process has ended. */
static int await_end(const struct instance *instance, pid_t pid, struct error *ret_error)
{
    _cleanup_close_ int fd = (int)syscall(SYS_pidfd_open, pid, 0);
    struct pollfd poll_fd = {.fd = fd, .events = POLLIN};
    int ended = fd < 0 && errno == ESRCH;
    if (fd >= 0)
        while ((ended = poll(&poll_fd, 1, END_MS)) < 0 && errno == EINTR)
            ;
    if (ended > 0 || !instance_alive(instance)) /* the lock may be another's by then, started meanwhile */
        return 0;
    return error_set(ret_error, ETIMEDOUT, "instance %s does not end: kill -9 %d, then `calypte down -n %s` again",
                     instance->name, pid, instance->name);
}

/* What a dead instance left is removed under its lock. -ENOENT: there was nothing. */
static int clean_dead(const struct instance *found, struct error *ret_error)
{
    struct instance instance;
    char lock[108];
    instance_path(found, "supervisor.lock", lock);
    if (access(lock, F_OK))
        return instance_missing(found, ret_error);
    int status = instance_take(found->name, &instance, ret_error);
    if (status)
        return status;
    status = instance_clean(&instance, ret_error);
    instance_release(&instance, !status);
    return status;
}

/* An instance that does not take the request is ending, or its supervisor stands still. */
static int await_silent(const struct instance *instance, int asked, struct error *ret_error)
{
    const struct timespec look = {.tv_nsec = 20000000};
    for (int waited_ms = 0; asked != -ETIMEDOUT && waited_ms < END_MS && instance_alive(instance); waited_ms += 20)
        nanosleep(&look, NULL);
    if (!instance_alive(instance))
        return 0;
    char path[108], pid[16] = "";
    instance_path(instance, "supervisor.pid", path);
    _cleanup_fclose_ FILE *file = fopen(path, "re");
    if (file && fgets(pid, sizeof pid, file))
        pid[strspn(pid, "0123456789")] = '\0';
    return error_prefix(ret_error, asked, "instance %s does not end (kill -9 %s, then `calypte down -n %s` again)",
                        instance->name, pid[0] ? pid : "its supervisor", instance->name);
}

static int stop(const struct instance *instance, struct error *ret_error)
{
    json_t *answer = NULL;
    if (!instance_alive(instance))
        return clean_dead(instance, ret_error);
    int status = client_ask_supervisor(instance, "down", &answer, ret_error);
    if (!status)
        status = await_end(instance, (pid_t)json_integer_value(json_object_get(answer, "pid")), ret_error);
    else
        status = await_silent(instance, status, ret_error);
    json_decref(answer);
    return status;
}

struct outcome {
    int code;
};

static int stop_each(const struct instance *instance, void *context)
{
    struct outcome *outcome = context;
    struct error error;
    if (stop(instance, &error))
        outcome->code = usage_failed("down", "%s", error.text);
    return 0;
}

int cmd_down(int argc, char **argv)
{
    struct arguments arguments;
    struct instance instance;
    struct error error;
    int code = arguments_parse(&line, argc, argv, &arguments);
    if (code != ARGUMENTS_GO_ON)
        return code;
    if (arguments.values[FLAG_ALL]) {
        struct outcome outcome = {EXIT_DONE};
        if (instance_each(stop_each, &outcome, &error))
            return usage_failed("down", "%s", error.text);
        return outcome.code;
    }
    if (instance_find(arguments.values[FLAG_NAME] ? arguments.values[FLAG_NAME] : "default", &instance, &error))
        return usage_error("down", "%s", error.text);
    return stop(&instance, &error) ? usage_failed("down", "%s", error.text) : EXIT_DONE;
}
