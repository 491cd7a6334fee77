/* Lookahead: the experts that the next MoE layer will likely want are asked of iod while this layer's are on their way.
 *
 * The next layer's norm, router and bias look at the residual stream as it is after this layer's attention. This layer's experts and
 * the next layer's attention are still missing in it, and change few of the choices (README.md has the recall that was measured).
 * Guesses come behind every demand, and no number of an answer depends on them. What it was good for is counted in worker 0's line, enum ahead_count of shm/control.h. */
#pragma once

#include "compute/model.h"

/* Allocates what worker 0 needs for it, unless the setting `prefetch` is off. -ENOMEM. Thread: main. */
int lookahead_open(struct model *model, struct error *ret_error);
void lookahead_close(struct model *model);

/* Decides for a step, whose batches are filled, whether to look ahead, and for which rows: those of answers, the first
 * LOOKAHEAD_ROWS. Thread: main, before the team runs. */
void lookahead_begin(struct model *model);
#define LOOKAHEAD_ROWS 64u

/* All threads of the team, after the layer's demands: asks for the next layer's experts. Does nothing, and waits for nobody, in a
 * step that does not look ahead. */
void lookahead_ask(struct thread *thread, const struct batch *batch, uint32_t layer);

/* Counts an expert that an answer's row wants in this layer. Thread: worker 0's first. */
void lookahead_count(struct model *model, uint32_t layer, uint32_t expert, bool ready);
