/* Segment `dense`: the resident weights, as the container's dense files have them, behind a directory of their tensors.
 * iod loads it and knows nothing of a model; workers look tensors up by name. Each expert's exponents stand there as
 * tensor `experts.exponents`, I32 [moe_layers, experts, 3]. */
#pragma once

#include "proto/safetensors.h"
#include "shm/segment.h"

#include <stdatomic.h>

struct dense_header {
    struct segment_header segment;
    uint32_t count;         /* W: iod, before ready */
    _Atomic uint32_t ready; /* W: iod, release, once every byte is there and verified; R: all, acquire */
    /* W: iod, before ready: the container's, so that a restarted iod knows whether to keep the bytes */
    uint64_t identity;
    uint64_t tensors_offset; /* struct tensor [count], sorted by name; `offset` is from the start of the segment */
};

struct dense {
    struct segment segment;
    uint32_t count;
    const struct tensor *tensors;
};

/* Maps a ready segment and checks the directory (every tensor inside the segment, names terminated, shapes = bytes). */
int dense_attach(const char *instance, struct dense *ret_dense, struct error *ret_error);
void dense_detach(struct dense *dense);

/* Data of tensor `name` if it has that dtype and shape; NULL and a line in `ret_error` otherwise. dims 1..4. */
const void *dense_find(const struct dense *dense, const char *name, enum tensor_dtype dtype, uint32_t dims,
                       const uint64_t *shape, struct error *ret_error);
