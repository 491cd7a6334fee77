/* A loop run by several threads, watched by the caller's. */
#pragma once

#include "proto/error.h"

#include <stdatomic.h>
#include <stddef.h>

/* Set `stop` and every thread ends after the unit it is at. */
struct jobs {
    unsigned threads;
    atomic_bool *stop;
    /* Called in the caller's thread some times a second and at the end. */
    void (*tick)(void *context);
    void *tick_context;
};

/* Calls run(context, i, ...) for each i < count, from up to `threads` threads. When one fails no new ones are begun,
 * and the error with the smallest i is returned. -EINTR after a stop. One caller at a time for each struct jobs. */
int jobs_run(const struct jobs *jobs, size_t count, int (*run)(void *context, size_t index, struct error *ret_error),
             void *context, struct error *ret_error);
