#include "cmd/supervisor/orphans.h"

#include "cmd/supervisor/process.h"
#include "proto/cleanup.h"

#include <ctype.h>
#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>

#define END_MS 20000 /* a killed process with gigabytes of pages and reads in flight needs its time */

static void close_dirp(DIR **directory)
{
    if (*directory)
        closedir(*directory);
}

struct arguments {
    char text[4097];
    size_t size; /* strings one after another, the last terminated; 0: gone, or a zombie, which holds nothing */
};

static void read_arguments(pid_t pid, struct arguments *ret_arguments)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/cmdline", pid);
    _cleanup_close_ int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t size = fd < 0 ? -1 : read(fd, ret_arguments->text, sizeof ret_arguments->text - 1);
    ret_arguments->size = size < 0 ? 0 : (size_t)size;
    ret_arguments->text[ret_arguments->size] = '\0';
}

/* What follows `flag` among the arguments, or "". */
static const char *argument(const struct arguments *arguments, const char *flag)
{
    const char *end = arguments->text + arguments->size, *previous = "";
    for (const char *at = arguments->text; at < end; previous = at, at += strlen(at) + 1)
        if (!strcmp(previous, flag))
            return at;
    return "";
}

/* Only the programs that the supervisor starts have this name and these arguments; a debugger that was given them has
 * another name. */
static bool is_child(const struct arguments *arguments, const char *name)
{
    const char *slash = strrchr(arguments->text, '/'), *program = slash ? slash + 1 : arguments->text;
    return !strncmp(program, "calypte-", strlen("calypte-")) && !strcmp(argument(arguments, "--instance"), name) &&
           *argument(arguments, "--rundir") && *argument(arguments, "--parent");
}

static int end_one(pid_t pid, const char *name, const char *folder, struct error *ret_error)
{
    struct arguments arguments;
    _cleanup_close_ int fd = (int)syscall(SYS_pidfd_open, pid, 0);
    /* With the descriptor in hand the number cannot be given to another process: look again now. */
    read_arguments(pid, &arguments);
    if (fd < 0 || !is_child(&arguments, name))
        return 0;
    if (strcmp(argument(&arguments, "--rundir"), folder))
        return error_set(ret_error, EBUSY,
                         "an instance %s runs with the folder %s (process %d), and shared memory knows only one of "
                         "that name: give this one another with -n",
                         name, argument(&arguments, "--rundir"), pid);
    pid_t parent = (pid_t)atoi(argument(&arguments, "--parent"));
    if (parent != getpid() && process_look(pid).parent == parent) /* no orphan */
        return error_set(ret_error, EBUSY,
                         "instance %s still runs, though its folder %s was removed: end its supervisor first (kill %d)",
                         name, folder, parent);
    if (syscall(SYS_pidfd_send_signal, fd, SIGKILL, NULL, 0) < 0 && errno != ESRCH)
        return error_set(ret_error, errno, "cannot end process %d, left by a dead instance %s: %s", pid, name,
                         strerror(errno));
    struct pollfd poll_fd = {.fd = fd, .events = POLLIN};
    int ready;
    do
        ready = poll(&poll_fd, 1, END_MS);
    while (ready < 0 && errno == EINTR);
    if (ready == 0)
        return error_set(ret_error, ETIMEDOUT,
                         "process %d, left by a dead instance %s, does not end after SIGKILL: see "
                         "/proc/%d/stack, or give this instance another name with -n",
                         pid, name, pid);
    return 0;
}

int orphans_end(const char *name, const char *folder, struct error *ret_error)
{
    _cleanup_(close_dirp) DIR *directory = opendir("/proc");
    if (!directory)
        return error_set(ret_error, errno, "cannot read /proc: %s", strerror(errno));
    struct dirent *entry;
    int status = 0;
    while (!status && (entry = readdir(directory))) {
        pid_t pid = isdigit((unsigned char)entry->d_name[0]) ? (pid_t)atoi(entry->d_name) : 0;
        struct arguments arguments;
        if (pid <= 0)
            continue;
        read_arguments(pid, &arguments);
        if (is_child(&arguments, name))
            status = end_one(pid, name, folder, ret_error);
    }
    return status;
}
