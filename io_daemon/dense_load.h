/* Fills segment `dense` (shm/dense.h) from the container's dense files at start. */
#pragma once

#include "io_daemon/copies.h"
#include "io_daemon/verify.h"

struct dense_load {
    const char *instance;
    struct copies *copies;
    struct reader *reader;             /* with nothing in flight */
    struct verifier *const *verifiers; /* [drives] */
    struct control *control;
    int doorbell_fd;
    bool verify;
    bool hugepages;
};

/* Leaves a segment that is ready, every tensor verified where `verify` says so; one of the same container that stands
 * already is kept. Each file is read from the copy that will give it first, and one that a copy does not give, or gives damaged, from
 * another; where none does, the segment is removed and the line names file and tensor. -ECANCELED: told to stop. Nothing is in flight
 * when it returns. Thread: main. */
int dense_load(const struct dense_load *load, struct error *ret_error);
