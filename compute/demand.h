/* Worker 0's business with iod, a layer at a time: pins the wanted experts that are READY, asks for the others, and publishes them in
 * waves. All other workers read the wave list and map its slots. */
#pragma once

#include "compute/model.h"

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

/* Worker 0's first thread, once a layer, with demand.expert[0 .. wanted) set: pins what is there and asks for the rest. */
void demand_begin(struct model *model, uint32_t layer);

/* Worker 0's first thread: waits until at least one expert is READY and writes the wave (or the failure) into the list. -ESTALE: nothing is
 * written, the step is over. */
int demand_publish_wave(struct model *model, uint32_t layer, struct wave_list *list);

/* Each worker's first thread: reads the list once, checks it, maps its slots. What worker 0 has pinned stays until all are done with it.
 * -EIO: an expert failed, model->failure says which. */
int demand_accept_wave(struct model *model, uint32_t layer, const struct wave_list *list);

/* Worker 0's first thread, after all workers have finished a wave: gives its experts back. */
void demand_retire_wave(struct model *model);
