/* Starting an instance: `calypte up`, and the private one of `run` and `score`. */
#pragma once

#include "proto/error.h"
#include "proto/settings.h"

#include <stdbool.h>
#include <sys/types.h>

struct launch {
    const char *instance, *container; /* container: an absolute path */
    const struct settings *settings;
    bool private; /* the instance ends with this process */
};

/* An error where a mirror is set and the container `model` does not open (the line names the mirror, if that opens), or
 * where the command line names a mirror that does not open, is another container, or is `model` itself. A mirror from
 * file or environment, which may be older than the failure of its drive, is left to iod: see io_daemon/README.md. */
int launch_check_copies(const char *model, const struct settings *settings, struct error *ret_error);

/* Becomes the supervisor, in the foreground. Returns only on failure. */
int launch_exec(const struct launch *launch, struct error *ret_error);

/* Starts the supervisor in a session of its own and waits until the instance can answer. 0 and *ret_pid, a child of
 * this process;
 * -EINTR: a signal came first (interrupt.h), and the instance has been stopped; else the line with which it failed. */
int launch_start(const struct launch *launch, int interrupt_fd, pid_t *ret_pid, struct error *ret_error);

/* Ends a started instance and waits until nothing is left of it. */
void launch_stop(pid_t pid);
