/* What a child of the supervisor inherits: its arguments and its file descriptors, all here, nothing else.
 *
 *   calypte-iod --instance NAME --rundir DIR --parent PID --notify-fd N --doorbell-fd N
 *   calypte-worker ... --index N        calypte-front ... --wake-fd N
 *
 * notify-fd: the write end of a pipe. The child writes one line, `ready\n` or `failed: TEXT\n`, when it knows. It may be absent (-1):
 * a process that is started by hand says the same on stderr.
 * doorbell-fd: iod's eventfd (iod waits on it, workers write it). wake-fd: the front's eventfd, written by the supervisor when `epoch`
 * or `serving` changed. Facts are read from the control segment. */
#pragma once

#include "proto/error.h"

#include <stdint.h>

struct heritage {
    const char *instance; /* points into argv */
    const char *rundir;   /* the instance's own folder: sockets, pid files, logs */
    int32_t parent;       /* pid of the supervisor, 0: none */
    int notify_fd, doorbell_fd, wake_fd;
    uint32_t index; /* worker number */
};

/* Parses argv. -EINVAL with a line naming the argument. */
int heritage_parse(int argc, char **argv, struct heritage *ret_heritage, struct error *ret_error);

/* Makes the process end when the supervisor does (PR_SET_PDEATHSIG, and a check that it still lives). */
int heritage_bind_life(const struct heritage *heritage, struct error *ret_error);

/* Tells the supervisor, once: NULL is `ready`, a text is `failed: TEXT`. Closes the pipe. */
void heritage_notify(struct heritage *heritage, const char *failure);
