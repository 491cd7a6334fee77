#include "proto/heritage.h"

#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

/* A decimal number 0 .. most, nothing before or after it. */
static int parse_number(const char *name, const char *text, long most, long *ret_number, struct error *ret_error)
{
    char *end;
    errno = 0;
    long number = strtol(text, &end, 10);
    if (errno != 0 || end == text || *end != 0 || text[0] < '0' || text[0] > '9' || number > most)
        return error_set(ret_error, EINVAL, "%s: \"%s\" is not a number from 0 to %ld", name, text, most);
    *ret_number = number;
    return 0;
}

static int parse_fd(const char *name, const char *text, int *ret_fd, struct error *ret_error)
{
    long fd;
    int status = parse_number(name, text, INT_MAX, &fd, ret_error);
    if (status < 0)
        return status;
    if (fcntl((int)fd, F_GETFD) < 0)
        return error_set(ret_error, EINVAL, "%s: descriptor %ld is not open", name, fd);
    /* The heritage ends here: what this process starts inherits nothing. */
    fcntl((int)fd, F_SETFD, FD_CLOEXEC);
    *ret_fd = (int)fd;
    return 0;
}

static int parse_one(const char *name, const char *value, struct heritage *heritage, struct error *ret_error)
{
    long number;
    int status = 0;
    if (strcmp(name, "--instance") == 0)
        heritage->instance = value;
    else if (strcmp(name, "--rundir") == 0)
        heritage->rundir = value;
    else if (strcmp(name, "--notify-fd") == 0)
        status = parse_fd(name, value, &heritage->notify_fd, ret_error);
    else if (strcmp(name, "--doorbell-fd") == 0)
        status = parse_fd(name, value, &heritage->doorbell_fd, ret_error);
    else if (strcmp(name, "--wake-fd") == 0)
        status = parse_fd(name, value, &heritage->wake_fd, ret_error);
    else if (strcmp(name, "--parent") == 0) {
        status = parse_number(name, value, INT_MAX, &number, ret_error);
        if (status == 0)
            heritage->parent = (int32_t)number;
    } else if (strcmp(name, "--index") == 0) {
        status = parse_number(name, value, INT_MAX, &number, ret_error);
        if (status == 0)
            heritage->index = (uint32_t)number;
    } else
        return error_set(ret_error, EINVAL,
                         "%s: no such argument; `calypte up` starts this program with the right ones", name);
    return status;
}

int heritage_parse(int argc, char **argv, struct heritage *ret_heritage, struct error *ret_error)
{
    struct heritage heritage = {.notify_fd = -1, .doorbell_fd = -1, .wake_fd = -1};
    for (int i = 1; i < argc; i += 2) {
        if (i + 1 >= argc)
            return error_set(ret_error, EINVAL,
                             "%s: its value is missing; `calypte up` starts this program with the right arguments",
                             argv[i]);
        int status = parse_one(argv[i], argv[i + 1], &heritage, ret_error);
        if (status < 0)
            return status;
    }
    if (!heritage.instance || !heritage.rundir)
        return error_set(ret_error, EINVAL, "%s: is missing; `calypte up` starts this program with the right arguments",
                         heritage.instance ? "--rundir" : "--instance");
    *ret_heritage = heritage;
    return 0;
}

int heritage_bind_life(const struct heritage *heritage, struct error *ret_error)
{
    if (heritage->parent == 0)
        return 0;
    if (prctl(PR_SET_PDEATHSIG, SIGKILL) < 0)
        return error_set(ret_error, errno, "cannot ask to end with the supervisor: %s", strerror(errno));
    /* The supervisor may have died before the line above. */
    if (getppid() != heritage->parent)
        return error_set(ret_error, ESRCH, "the supervisor, process %d, has ended", (int)heritage->parent);
    return 0;
}

void heritage_notify(struct heritage *heritage, const char *failure)
{
    char line[sizeof(struct error) + 16];
    if (failure) {
        snprintf(line, sizeof line - 1, "failed: %s", failure);
        for (char *at = line; *at; at++)
            if (*at == '\n')
                *at = ' ';
        strcat(line, "\n"); /* the text was cut one byte early for it */
    } else
        strcpy(line, "ready\n");

    int fd = heritage->notify_fd >= 0 ? heritage->notify_fd : STDERR_FILENO;
    size_t length = strlen(line), written = 0;
    while (written < length) {
        ssize_t more = write(fd, line + written, length - written);
        if (more < 0 && errno != EINTR)
            break; /* nobody reads: the supervisor has ended, and so will this process */
        written += more > 0 ? (size_t)more : 0;
    }
    if (heritage->notify_fd >= 0)
        close(heritage->notify_fd);
    heritage->notify_fd = -1;
}
