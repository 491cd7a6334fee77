/* Which expert has which slot: the daemon's own book of the pool. The slot table and the map in shared memory are what
 * others see and may be scribbled on; decisions are taken from the book, and a slot whose state word is not what the
 * book says is left alone. What to give up is the policy's word (shm/lfru.h). Thread: the daemon's main. */
#pragma once

#include "io_daemon/requests.h"
#include "shm/lfru.h"
#include "shm/pool.h"

#include <sys/queue.h>

#define NOBODY UINT32_MAX

enum expert_place { PLACE_NOWHERE, PLACE_LOADING, PLACE_READY, PLACE_FAILED };

/* Of each expert. Eight bytes, because the policy asks of several experts for every victim. */
struct place {
    uint32_t slot; /* NOBODY: nowhere */
    uint8_t state; /* enum expert_place; LOADING: reads for it are in flight */
    /* enum priority: why it was read. A lookahead that was used or demanded since counts as a demand. */
    uint8_t brought;
    uint8_t user;     /* enum lfru_who: who used it last */
    bool may_be_owed; /* a demand came since it was last found not owed */
};

enum seat_state {
    SEAT_AWAY,  /* not ours to give: does not stand yet, quarantined, scribbled on, or at or above the limit */
    SEAT_FREE,  /* EMPTY, in the list of free seats */
    SEAT_TAKEN, /* by an expert; in the list of failed seats if it is FAILED */
};

/* Of each slot. */
struct seat {
    TAILQ_ENTRY(seat) link; /* free, failed */
    enum seat_state state;
    uint32_t expert; /* NOBODY unless taken; places[expert] says the same */
};

TAILQ_HEAD(seat_list, seat);

struct warmth {
    float heat; /* the policy's word */
    uint32_t expert;
};

struct placement {
    struct pool *pool;
    struct requests *requests;
    struct lfru *lfru;
    struct iod_line *counters;
    struct seat *seats;   /* [slots] */
    struct place *places; /* [experts] */
    struct seat_list free, failed;
    uint32_t slots;   /* that stand and are mapped here */
    uint32_t limit;   /* slots from it on are given up */
    uint32_t guesses; /* seats that guesses keep from demands: LOADING ones, and lookaheads that were not used yet */
    uint32_t top_k;   /* experts that one row of a layer needs at once */
    uint32_t quarantined;
    uint32_t next_heat; /* the slot whose heat is published next */
};

/* Takes over the pool as it is found: READY slots stay and the map is made to agree with them, FAILED ones are emptied,
 * LOADING ones are quarantined, because reads of a dead predecessor may still land in them. No slot is given before
 * placement_grow says that it stands. */
int placement_open(struct pool *pool, const struct model_config *config, struct requests *requests,
                   struct iod_line *counters, struct placement *ret_placement, struct error *ret_error);
void placement_close(struct placement *placement);

/* `slots` slots stand and are mapped: those that are new can be given. Never fewer than before (placement_limit). */
void placement_grow(struct placement *placement, uint32_t slots);

/* Slots below this one stand and may be given. */
uint32_t placement_capacity(const struct placement *placement);

/* Slots from `slots` on are emptied as soon as nobody pins, reads or is owed them, and never given again until the limit
 * rises. Returns how many of them are still occupied: call again until it is 0. The limit begins at all slots. */
uint32_t placement_limit(struct placement *placement, uint32_t slots);

/* An expert that is held is not given up for another (the limit does give it up). */
void placement_hold(struct placement *placement, uint32_t expert, bool held);

/* Empties the quarantined slots: nothing can land in them any more. */
void placement_end_quarantine(struct placement *placement);

/* One use of an expert by one layer of one step. */
void placement_use(struct placement *placement, uint32_t expert, enum lfru_who who);

/* Writes the heat of a few experts into their slots, of other ones each time, for tools to look at. */
void placement_publish_heat(struct placement *placement);

/* Gives an expert that has no slot an empty one, or the one of the expert that the policy gives up: the slot is LOADING
 * and the map says so. -EAGAIN: every slot is pinned, loading or owed.
 *
 * Guesses are more modest: they leave demands top_k slots; a lookahead takes the place of no expert that is warmer than
 * its own would be after one use, a warm-up the place of none at all. -ENOSPC where they get nothing for that; -EBUSY: a
 * warm-up may get a slot later. */
int placement_take(struct placement *placement, uint32_t expert, enum priority priority, struct slot_ref *ret_ref);

/* A demand came for an expert, wherever it is. */
void placement_demand(struct placement *placement, uint32_t expert);

/* Ends a load. `code` 0: READY; else FAILED with that errno and slice. -ESTALE: somebody has scribbled on the slot's
 * state; it is lost to the pool until the next start. */
int placement_finish(struct placement *placement, uint32_t expert, struct slot_ref ref, int code, uint32_t slice);

/* Ends a load that shall leave no trace: the slot is empty again. */
void placement_abandon(struct placement *placement, uint32_t expert, struct slot_ref ref);

/* Where the expert stands now. A FAILED one can be emptied with placement_forget_failed, so that it is loaded once
 * more. */
enum expert_place placement_find(const struct placement *placement, uint32_t expert);
void placement_forget_failed(struct placement *placement, uint32_t expert);

/* The warmest first; of those that are alike the lower number. Any thread. */
void sort_warmest(struct warmth *experts, uint32_t count);
