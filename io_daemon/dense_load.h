/* Fills segment `dense` (shm/dense.h) from the container's dense files at start. */
#pragma once

#include "io_daemon/reader.h"
#include "io_daemon/verify.h"
#include "proto/container.h"
#include "shm/control.h"

struct dense_load {
    const char *instance;
    const struct container *container;
    struct reader *reader; /* with nothing in flight */
    struct verifier *verifier;
    struct control *control;
    int doorbell_fd;
    bool verify;
    bool hugepages, direct; /* direct: cleared when a file could not be opened with O_DIRECT */
};

/* Leaves a segment that is ready, every tensor verified where `verify` says so; one of the same container that stands already is kept. On
 * failure the segment is removed and the line names file and tensor. -ECANCELED: told to stop. Nothing is in flight
 * when it returns. Thread: main. */
int dense_load(struct dense_load *load, struct error *ret_error);
