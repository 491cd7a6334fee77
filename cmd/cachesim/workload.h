/* A trace in memory, as the replay wants it: each expert once a layer of a step, however many rows used it. */
#pragma once

#include "proto/error.h"
#include "proto/trace.h"

#include <stdbool.h>
#include <stdint.h>

#define USED_NEVER UINT32_MAX

struct workload_use {
    uint32_t expert; /* moe_index * experts + expert */
    uint32_t next;   /* the next layer of the workload that uses it, or USED_NEVER */
    bool prefill;    /* no row of an answer used it */
};

struct workload_layer {
    uint64_t first; /* use */
    uint32_t count;
};

struct workload {
    struct trace_header header;
    uint32_t experts;       /* numbers below it */
    uint32_t experts_used;  /* how many different ones occur */
    uint32_t layers_used;   /* MoE layers that occur */
    uint32_t row_experts;   /* the most that one row of a layer used, so top_k: a layer needs as many slots at once */
    uint64_t recorded_hits; /* of the uses: what the traced pool had */
    uint64_t lost;          /* entries that the trace does not have, at most INT64_MAX */
    /* Slots with memory of the traced pool, the fewest and the most: not the same where it was resized. */
    uint32_t least_slots, most_slots;
    uint64_t steps;
    uint32_t layer_count;
    struct workload_layer *layers; /* [layer_count], in the order of use */
    uint64_t use_count;
    struct workload_use *uses; /* [use_count] */
};

/* Reads the trace `path`. A trace without uses is -ENODATA. The caller frees with workload_close. Any thread. */
int workload_read(const char *path, struct workload *ret_workload, struct error *ret_error);
void workload_close(struct workload *workload);
