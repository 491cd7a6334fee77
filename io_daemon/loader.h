/* The I/O daemon without its main: everything that a process must do to be calypte-iod. */
#pragma once

#include "io_daemon/method.h"

struct loader;

struct loader_options {
    const char *instance;
    const char *rundir;             /* where the lock file stands */
    int doorbell_fd;                /* eventfd that workers write; made non-blocking. -1: nobody rings, one is made */
    int stop_fd;                    /* readable: end. -1: never */
    const struct io_method *method; /* NULL: as facts.io says */
    uint64_t in_flight;             /* bytes of a drive, at most; 0: READER_IN_FLIGHT */
    /* a line for the user, without its end; called by the thread that runs the loader */
    void (*log)(const char *line);
};

/* Attaches control and pool, opens the container, loads the dense weights, brings up the first object of the pool: when
 * it returns the instance may use it. Threads: the same one for all three functions. */
int loader_open(const struct loader_options *options, struct loader **ret_loader, struct error *ret_error);

/* Serves until stop_fd is readable (0), or an error that no later request could survive. */
int loader_run(struct loader *loader, struct error *ret_error);

/* Waits for what is in flight, empties the slots that were loading, and lets go. READY slots and dense weights stay in
 * shared memory. */
void loader_close(struct loader *loader);
