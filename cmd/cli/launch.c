#include "cmd/cli/launch.h"

#include "cmd/cli/interrupt.h"
#include "proto/cleanup.h"
#include "proto/container.h"

#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

/* Arguments of calypte-supervisor. The settings travel resolved, so that the supervisor reads no files of its own. */
struct supervisor_arguments {
    char program[PATH_MAX];
    char settings[SETTING_COUNT][2 * SETTING_TEXT_MAX];
    char notify[16], parent[16];
    char *argv[2 * SETTING_COUNT + 12];
    int count;
};

static void add(struct supervisor_arguments *arguments, const char *text)
{
    arguments->argv[arguments->count++] = (char *)(uintptr_t)text; /* exec takes char *, and writes to none */
}

static int fill_arguments(const struct launch *launch, int notify_fd, struct supervisor_arguments *arguments,
                          struct error *ret_error)
{
    ssize_t length = readlink("/proc/self/exe", arguments->program, sizeof arguments->program - 1);
    arguments->program[length > 0 ? length : 0] = '\0';
    char *slash = strrchr(arguments->program, '/');
    if (!slash || (size_t)(slash - arguments->program) + sizeof "/calypte-supervisor" > sizeof arguments->program)
        return error_set(ret_error, ENOENT, "cannot find the folder of this program: is /proc mounted?");
    strcpy(slash, "/calypte-supervisor");
    add(arguments, arguments->program);
    add(arguments, "--instance");
    add(arguments, launch->instance);
    add(arguments, "--container");
    add(arguments, launch->container);
    for (int s = 0; s < SETTING_COUNT; s++) {
        snprintf(arguments->settings[s], sizeof arguments->settings[s], "%s=%s", setting_info((enum setting)s)->name,
                 settings_text(launch->settings, (enum setting)s));
        add(arguments, "--set");
        add(arguments, arguments->settings[s]);
    }
    if (notify_fd >= 0) {
        snprintf(arguments->notify, sizeof arguments->notify, "%d", notify_fd);
        add(arguments, "--notify-fd");
        add(arguments, arguments->notify);
    }
    if (launch->private) {
        snprintf(arguments->parent, sizeof arguments->parent, "%d", getpid());
        add(arguments, "--parent");
        add(arguments, arguments->parent);
    }
    return 0;
}

/* Two folders can be one, or a stripe of them: by a link, or a mount. */
static bool same_files(const struct container *a, const struct container *b)
{
    struct stat first, second;
    bool same = false;
    for (uint32_t s = 0; a->expert_count && s < a->stripes && !same; s++)
        same = stat(a->experts[0].stripes[s].header.path, &first) == 0 &&
               stat(b->experts[0].stripes[s].header.path, &second) == 0 && first.st_dev == second.st_dev &&
               first.st_ino == second.st_ino;
    return same;
}

static int check_mirror(const struct container *container, const char *path, struct error *ret_error)
{
    struct container *mirror;
    struct error why;
    int status = container_open(path, &mirror, &why);
    if (status)
        return error_set(ret_error, -status, "the mirror cannot be used: %.800s; or leave --mirror out", why.text);
    if (mirror->identity != container->identity)
        status = error_set(ret_error, ESTALE,
                           "mirror %.400s is another container than %.400s: copy that one (cp -rL), or leave --mirror "
                           "out",
                           path, container->path);
    else if (same_files(container, mirror))
        status =
            error_set(ret_error, EEXIST,
                      "mirror %.400s has files of the container itself: copy it to another drive (cp -rL), or leave "
                      "--mirror out",
                      path);
    container_close(mirror);
    return status;
}

int launch_check_copies(const char *model, const struct settings *settings, struct error *ret_error)
{
    const char *path = settings_text(settings, SETTING_MIRROR);
    struct container *container;
    struct error why;
    if (!path[0])
        return 0;
    int status = container_open(model, &container, &why);
    if (!status) {
        if (settings->values[SETTING_MIRROR].source == SOURCE_FLAG)
            status = check_mirror(container, path, ret_error);
        container_close(container);
        return status;
    }
    if (container_open(path, &container, NULL))
        return error_set(ret_error, -status, "%s", why.text);
    container_close(container);
    return error_set(ret_error, -status, "%.600s; or read its mirror alone, which opens: give %.300s as the MODEL",
                     why.text, path);
}

static int cannot_execute(const char *program, int code, struct error *ret_error)
{
    return error_set(ret_error, code, "cannot start %s: %s", program, strerror(code));
}

int launch_exec(const struct launch *launch, struct error *ret_error)
{
    struct supervisor_arguments arguments = {.count = 0};
    int status = fill_arguments(launch, -1, &arguments, ret_error);
    if (status)
        return status;
    add(&arguments, "--foreground");
    execv(arguments.program, arguments.argv);
    return cannot_execute(arguments.program, errno, ret_error);
}

/* In the child, between fork and exec. Its standard output and error are the instance's log soon; until then they are
 * nobody's, so that a pipe of the caller is not held open. */
static void become_supervisor(const struct supervisor_arguments *arguments, int notify_fd)
{
    int null = open("/dev/null", O_RDWR);
    sigset_t none;
    setsid();
    for (int fd = 0; fd <= 2; fd++)
        dup2(null, fd);
    /* Whatever else the caller had open (a pipe that somebody waits on to end) is not the instance's. */
    close_range(3, (unsigned)notify_fd - 1, 0);
    close_range((unsigned)notify_fd + 1, ~0u, 0);
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    fcntl(notify_fd, F_SETFD, 0);
    execv(arguments->program, arguments->argv);
    int code = errno;
    dprintf(notify_fd, "failed: cannot start %s: %s\n", arguments->program, strerror(code));
    _exit(EXIT_FAILURE);
}

/* Reads the line of the notify pipe. 0: `ready`; -EINTR: a signal; else why not. */
static int await_ready(int notify_fd, int interrupt_fd, struct error *ret_error)
{
    char line[sizeof ret_error->text + 32];
    size_t length = 0;
    while (!memchr(line, '\n', length)) {
        if (interrupt_wait(interrupt_fd, notify_fd, -1) == WAIT_INTERRUPTED)
            return error_set(ret_error, EINTR, "interrupted");
        ssize_t count = read(notify_fd, line + length, sizeof line - 1 - length);
        if (count <= 0)
            return error_set(ret_error, EIO,
                             "the supervisor ended without a word: see the kernel's log (dmesg) for a process that was "
                             "killed for lack of memory");
        length += (size_t)count;
    }
    line[length - 1] = '\0';
    if (!strcmp(line, "ready"))
        return 0;
    return error_set(ret_error, EIO, "%s", !strncmp(line, "failed: ", 8) ? line + 8 : line);
}

int launch_start(const struct launch *launch, int interrupt_fd, pid_t *ret_pid, struct error *ret_error)
{
    int fds[2];
    if (pipe2(fds, O_CLOEXEC) < 0)
        return error_set(ret_error, errno, "cannot make a pipe: %s", strerror(errno));
    /* Not 0 to 2, which the supervisor uses otherwise, even if the caller has closed them. */
    _cleanup_close_ int read_fd = fds[0], low_fd = fds[1], write_fd = fcntl(low_fd, F_DUPFD_CLOEXEC, 3);
    if (write_fd < 0)
        return error_set(ret_error, errno, "cannot make a pipe: %s", strerror(errno));
    close(take_fd(low_fd));
    struct supervisor_arguments arguments = {.count = 0};
    int status = fill_arguments(launch, write_fd, &arguments, ret_error);
    if (status)
        return status;
    pid_t pid = fork();
    if (pid < 0)
        return error_set(ret_error, errno, "cannot start a process: %s", strerror(errno));
    if (pid == 0)
        become_supervisor(&arguments, write_fd);
    close(take_fd(write_fd));
    status = await_ready(read_fd, interrupt_fd, ret_error);
    if (status) {
        launch_stop(pid);
        return status;
    }
    *ret_pid = pid;
    return 0;
}

void launch_stop(pid_t pid)
{
    kill(pid, SIGTERM);
    while (waitpid(pid, NULL, 0) < 0 && errno == EINTR)
        ;
}
