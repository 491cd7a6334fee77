/* Fills segment `dense` (shm/dense.h) from the container's dense files at start. */
#pragma once

#include "io_daemon/copies.h"
#include "io_daemon/verify.h"

struct dense_progress;
struct dense_memory;

struct dense_load {
    const char *instance;
    struct copies *copies;
    struct reader *reader; /* with nothing in flight */
    struct verifier *verifier;
    struct control *control;
    int doorbell_fd;
    bool verify;
    bool hugepages;
    /* while dense_load runs */
    struct dense_progress *progress; /* [dense files] */
    struct dense_memory *memory;
};

/* Leaves a segment that is ready, every tensor verified where `verify` says so; one of the same container that stands
 * already is kept. A file that one copy does not give is read from another; where none does, the segment is removed and
 * the line names file and tensor. -ECANCELED: told to stop. Nothing is in flight when it returns. Thread: main. */
int dense_load(struct dense_load *load, struct error *ret_error);
