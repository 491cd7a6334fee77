/* calypte-supervisor: keeps one instance. `calypte up` starts it.
 *
 *   calypte-supervisor --instance NAME --container PATH [--set NAME=VALUE]... [--notify-fd N] [--parent PID]
 *                      [--foreground]
 *
 * notify-fd: as in proto/heritage.h. parent: end when that process does. foreground: messages stay on stderr, else they
 * go to supervisor.log in the instance's folder. */
#include "cmd/supervisor/instance.h"
#include "cmd/supervisor/supervise.h"
#include "proto/cleanup.h"
#include "proto/settings.h"

#include <fcntl.h>
#include <getopt.h>
#include <limits.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

struct options {
    const char *instance, *container;
    int notify_fd, parent;
    bool foreground;
    struct settings settings;
};

static int take_setting(struct settings *settings, const char *text, struct error *ret_error)
{
    char name[SETTING_TEXT_MAX];
    const char *equals = strchr(text, '=');
    if (!equals || (size_t)(equals - text) >= sizeof name)
        return error_set(ret_error, EINVAL, "--set %s: NAME=VALUE is expected", text);
    memcpy(name, text, (size_t)(equals - text));
    name[equals - text] = '\0';
    return settings_set(settings, name, equals + 1, SOURCE_FLAG, "--set", ret_error);
}

static int parse_options(int argc, char **argv, struct options *ret, struct error *ret_error)
{
    static const struct option flags[] = {{"instance", required_argument, NULL, 'i'},
                                          {"container", required_argument, NULL, 'c'},
                                          {"set", required_argument, NULL, 's'},
                                          {"notify-fd", required_argument, NULL, 'n'},
                                          {"parent", required_argument, NULL, 'p'},
                                          {"foreground", no_argument, NULL, 'f'},
                                          {NULL, 0, NULL, 0}};
    int flag, status = 0;
    ret->notify_fd = -1;
    settings_init(&ret->settings);
    opterr = 0;
    while (!status && (flag = getopt_long(argc, argv, "", flags, NULL)) != -1)
        switch (flag) {
        case 'i': ret->instance = optarg; break;
        case 'c': ret->container = optarg; break;
        case 's': status = take_setting(&ret->settings, optarg, ret_error); break;
        case 'n': ret->notify_fd = atoi(optarg); break;
        case 'p': ret->parent = atoi(optarg); break;
        case 'f': ret->foreground = true; break;
        default:
            status = error_set(ret_error, EINVAL, "%s: unknown argument or no value; `calypte up` starts this program",
                               argv[optind - 1]);
        }
    if (!status && (!ret->instance || !ret->container))
        status =
            error_set(ret_error, EINVAL, "--instance and --container are needed; `calypte up` starts this program");
    if (!status && ret->notify_fd >= 0 && fcntl(ret->notify_fd, F_SETFD, FD_CLOEXEC) < 0)
        status = error_set(ret_error, EINVAL, "--notify-fd: descriptor %d is not open", ret->notify_fd);
    return status;
}

/* Before any thread exists, so that all inherit it: signals arrive at the signalfd only. */
static void block_signals(void)
{
    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, SIGCHLD);
    sigaddset(&signals, SIGTERM);
    sigaddset(&signals, SIGINT);
    sigaddset(&signals, SIGHUP);
    sigaddset(&signals, SIGPIPE);
    sigprocmask(SIG_BLOCK, &signals, NULL);
}

/* A private instance ends with the command that started it. */
static int bind_life(pid_t parent, struct error *ret_error)
{
    if (!parent)
        return 0;
    if (prctl(PR_SET_PDEATHSIG, SIGTERM) < 0)
        return error_set(ret_error, errno, "cannot ask to end with process %d: %s", parent, strerror(errno));
    return getppid() == parent ? 0
                               : error_set(ret_error, ESRCH, "process %d, which started this one, has ended", parent);
}

static int find_programs(char ret_folder[PATH_MAX], struct error *ret_error)
{
    ssize_t length = readlink("/proc/self/exe", ret_folder, PATH_MAX - 1);
    if (length <= 0)
        return error_set(ret_error, errno, "cannot read /proc/self/exe: %s", strerror(errno));
    ret_folder[length] = '\0';
    *strrchr(ret_folder, '/') = '\0';
    return 0;
}

static int make_plan(const struct options *options, struct plan *ret_plan, struct error *ret_error)
{
    struct container *container = NULL;
    struct machine machine = {0};
    _cleanup_free_ char *path = realpath(options->container, NULL);
    if (!path)
        return error_set(ret_error, errno, "model %s: %s", options->container, strerror(errno));
    int status = container_open(path, &container, ret_error);
    if (!status)
        status = machine_read("", &machine, ret_error);
    if (!status)
        status = plan_make(&options->settings, container, &machine, ret_plan, ret_error);
    bool private = !strncmp(options->instance, INSTANCE_PRIVATE_PREFIX, strlen(INSTANCE_PRIVATE_PREFIX));
    if (!status && private && ret_plan->facts.learning == LEARNING_ON)
        ret_plan->facts.learning = LEARNING_READ; /* it leaves nothing behind */
    machine_free(&machine);
    if (container)
        container_close(container);
    return status;
}

static void redirect_to_log(const struct instance *instance)
{
    char path[108];
    instance_path(instance, "supervisor.log", path);
    int fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0)
        return; /* the messages stay where they went before */
    dup2(fd, STDOUT_FILENO);
    dup2(fd, STDERR_FILENO);
    close(fd);
}

static void write_pid_file(const struct instance *instance)
{
    char path[108];
    instance_path(instance, "supervisor.pid", path);
    _cleanup_fclose_ FILE *stream = fopen(path, "we");
    if (stream)
        fprintf(stream, "%d\n", getpid());
}

/* Everything between taking the lock and giving it back. *ret_served: the instance was able to answer. */
static int keep(const struct options *options, struct instance *instance, struct heritage *starter, bool *ret_served,
                struct error *ret_error)
{
    char programs[PATH_MAX];
    struct supervisor *supervisor = calloc(1, sizeof *supervisor);
    if (!supervisor)
        return error_set(ret_error, ENOMEM, "out of memory");
    *supervisor = (struct supervisor){
        .instance = instance, .settings = &options->settings, .starter = *starter, .programs = programs, .log = stderr};
    int status = find_programs(programs, ret_error);
    if (!status)
        status = instance_clean(instance, ret_error);
    if (!status && !options->foreground)
        redirect_to_log(instance);
    if (!status) {
        write_pid_file(instance);
        status = make_plan(options, &supervisor->plan, ret_error);
    }
    if (!status) {
        status = supervisor_start(supervisor, ret_error);
        if (!status)
            status = supervisor_run(supervisor, ret_error);
        supervisor_end(supervisor);
    }
    *starter = supervisor->starter;
    *ret_served = supervisor->served;
    free(supervisor);
    return status;
}

int main(int argc, char **argv)
{
    struct options options = {0};
    struct instance instance = {.lock_fd = -1};
    struct error error = {""};
    bool served = false;
    block_signals();
    close_range(3, ~0u, CLOSE_RANGE_CLOEXEC); /* children inherit what they are given, and nothing that we were */
    int status = parse_options(argc, argv, &options, &error);
    struct heritage starter = {
        .instance = options.instance, .notify_fd = options.notify_fd, .doorbell_fd = -1, .wake_fd = -1};
    if (!status)
        status = bind_life(options.parent, &error);
    if (!status)
        status = instance_take(options.instance, &instance, &error);
    if (!status)
        status = keep(&options, &instance, &starter, &served, &error);
    bool gave_up = status && served;
    if (gave_up)
        instance_clean(&instance, NULL); /* but for the logs: somebody will want to know why */
    instance_release(&instance, !gave_up);
    if (status && starter.notify_fd >= 0)
        heritage_notify(&starter, error.text);
    else if (status)
        fprintf(stderr, "calypte: %s\n", error.text);
    return status ? EXIT_FAILURE : EXIT_SUCCESS;
}
