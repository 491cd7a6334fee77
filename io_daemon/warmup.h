/* Slots that come are filled: when the pool is to grow, the experts that were used most and are not in it are queued, to be
 * read in the background when nothing else is to do. (At the start those of earlier sessions are: loader.c.) Thread: the
 * daemon's main. */
#pragma once

#include "io_daemon/placement.h"

struct warmup {
    struct placement *placement;
    struct requests *requests;
    struct warmth *order; /* [experts] */
    uint32_t slots;       /* that were wanted last */
};

/* `slots`: that are wanted now. */
int warmup_open(struct placement *placement, struct requests *requests, uint32_t slots, struct warmup *ret_warmup,
                struct error *ret_error);
void warmup_close(struct warmup *warmup);

/* So many slots are wanted now: more than before are to be filled. To be called whenever the loop wakes. */
void warmup_keep(struct warmup *warmup, uint32_t slots);
