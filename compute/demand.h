/* Worker 0's business with iod, a layer at a time: pins the wanted experts that are READY, asks for the others, and publishes them in
 * waves. All other workers read the wave list and map its slots. */
#pragma once

#include "compute/model.h"

/* A sequence with more rows in a step than an answer can have, with its drafts, is a prompt's chunk: nothing in a STEP says which it is,
 * and the last few rows of a prompt may pass for an answer's. */
#define ANSWER_ROWS 8u

static inline bool batch_answers(const struct batch *batch, uint32_t row)
{
    return batch->sequence[row]->rows <= ANSWER_ROWS;
}

/* At the start of an exchange buffer: worker 0 -> all. */
struct wave_reference {
    uint32_t expert, slot, generation;
};

struct wave_list {
    int32_t status; /* 0, or -EIO with the failed expert */
    uint32_t count;
    struct expert_failure failure;
    struct wave_reference expert[MODEL_MAX_EXPERTS];
};
_Static_assert(sizeof(struct wave_list) <= EXCHANGE_WAVE_BYTES, "the wave list has its room at the start of a buffer");

/* Worker 0's first thread, once a layer, with demand.expert[0 .. wanted) and the pairs set: pins what is there, writes the uses into the log,
 * and asks for the rest. No system call where everything is there. */
void demand_begin(struct model *model, const struct batch *batch, uint32_t layer);

/* Worker 0's first thread: asks ahead for experts of the MoE layer that follows the running one, in this order. Returns how many were taken. */
uint32_t demand_guess(struct model *model, uint32_t layer, const uint32_t *experts, uint32_t count);

/* The pool's number of the layer's expert 0; the others follow. */
uint32_t demand_first_id(const struct model *model, uint32_t layer);

/* Worker 0's first thread: waits until at least one expert is READY and writes the wave (or the failure) into the list. -ESTALE: nothing is
 * written, the step is over. */
int demand_publish_wave(struct model *model, uint32_t layer, struct wave_list *list);

/* Each worker's first thread: reads the list once, checks it, maps its slots. What worker 0 has pinned stays until all are done with it.
 * -EIO: an expert failed, model->failure says which. */
int demand_accept_wave(struct model *model, uint32_t layer, const struct wave_list *list);

/* Worker 0's first thread, after all workers have finished a wave: gives its experts back. */
void demand_retire_wave(struct model *model);
