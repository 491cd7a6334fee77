/* Follows the use log that worker 0 writes: every use of an expert is told to the policy, to the judge of lookaheads, and
 * to what is remembered over sessions. Rows of one step and layer that use the same expert are one use; it is an
 * answer's if any of them is. Thread: the daemon's main. */
#pragma once

#include "io_daemon/guesses.h"
#include "io_daemon/placement.h"
#include "io_daemon/learning.h"

struct follower {
    struct control *control;
    struct placement *placement;
    struct guesses *guesses;
    struct learning *learning; /* NULL: nothing is remembered */
    uint64_t place;            /* in the log */
    /* the use that is being put together, and where it stands */
    uint32_t expert; /* NOBODY: none */
    bool told;       /* to all; what still comes of the same expert and layer is no other use */
    bool prefill, hit;
    bool replay; /* of what a daemon before has counted: for the policy only */
};

/* Begins with what the log still has, so that the policy of a restarted daemon knows what the one before has seen. */
void follower_open(struct control *control, struct placement *placement, struct guesses *guesses,
                   struct learning *learning, struct follower *ret_follower);

/* Reads what is new, at most the length of the log. */
void follower_read(struct follower *follower);
