/* The experts that a user holds in the pool (`calypte pool --hold`): bits in the control segment, brought to the
 * policy. A held expert is not given up for another; it comes at its next use, or at once where a slot is free. At
 * most half of the slots are held, because a pool of held experts only would serve nobody: of more wishes (the pool has
 * shrunk since) the warmest, chosen when wishes or slots change. `iod_line.held` says how many. Thread: main. */
#pragma once

#include "io_daemon/placement.h"

struct holds {
    struct control *control;
    struct placement *placement;
    struct requests *requests;
    uint64_t *held;        /* [HOLD_WORDS] what the policy has been told */
    uint64_t *keep;        /* [HOLD_WORDS] what it shall be told */
    struct warmth *wishes; /* [experts] what the user wants */
    uint32_t seen, slots;
    bool opened;
};

int holds_open(struct control *control, struct placement *placement, struct requests *requests, struct holds *ret_holds,
               struct error *ret_error);

/* Looks whether the bits or the slots that the pool has have changed. Cheap when not. */
void holds_keep(struct holds *holds, uint32_t slots);
void holds_close(struct holds *holds);
