/* Segment `exchange`: where the workers put their rows of a vector so that all may read the whole, and the logits.
 *
 * Two buffers alternate; exchange number n of an epoch uses buffer n % 2 and ends with the barrier: a worker stores its
 * rows, then its own line (epoch, sequence), then reads all lines until each has come so far, spinning briefly where
 * facts.spin allows, then on a futex. Buffer n % 2 may be written again after barrier n + 1: by then all have read it.
 * It is an interface with two methods: shared memory inside a machine now, messages between machines later; `struct
 * exchange_method` is the place. */
#pragma once

#include "shm/control.h"

struct exchange_layout {
    size_t buffer_bytes;                  /* of one buffer: the widest exchange of max_rows rows */
    size_t buffers, logits, draft_logits; /* byte offsets; logits: f32 [logit_rows][vocab] */
    size_t segment_bytes;
};

void exchange_layout(const struct facts *facts, struct exchange_layout *ret_layout);

/* Index candidates a row that one worker publishes at most: index_topk, or 0 where no selection is ever needed. */
size_t exchange_candidates(const struct facts *facts);

/* Room for worker 0's wave list at the start of a buffer: a count and MODEL_MAX_EXPERTS references. */
#define EXCHANGE_WAVE_BYTES 16384u

struct exchange {
    struct segment segment;
    struct exchange_layout layout;
    struct control *control;
    uint32_t workers, self, spin;
    uint32_t epoch, sequence; /* of this worker, private */
    const struct exchange_method *method;
};

struct exchange_method {
    const char *name;
    /* Ends exchange number exchange->sequence + 1: what this worker stored is visible to all, and what all stored is
     * visible to it. 0, or -ESTALE when the epoch was raised (abandon the step). Thread: the team's first. */
    int (*barrier)(struct exchange *exchange);
};
extern const struct exchange_method exchange_shared_memory;

int exchange_attach(const char *instance, const struct facts *facts, struct control *control, uint32_t self,
                    struct exchange *ret_exchange, struct error *ret_error);
void exchange_detach(struct exchange *exchange);

/* Begins a new epoch: sequence 0, the line says so. */
void exchange_reset(struct exchange *exchange, uint32_t epoch);

/* The buffer of the exchange that the next barrier ends. */
static inline void *exchange_buffer(const struct exchange *exchange)
{
    return (char *)exchange->segment.base + exchange->layout.buffers +
           ((exchange->sequence + 1) % 2) * exchange->layout.buffer_bytes;
}

/* Logits in the mapped segment (front and worker 0 use the same). */
static inline float *exchange_logits(const struct segment *segment, const struct exchange_layout *layout, int draft)
{
    return (float *)(void *)((char *)segment->base + (draft ? layout->draft_logits : layout->logits));
}
