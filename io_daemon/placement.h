/* Which expert has which slot: the daemon's own book of the pool. The slot table and the map in shared memory are what
 * others see and may be scribbled on; decisions are taken from the book, and a slot whose state word is not what the
 * book says is left alone. Thread: the daemon's main. */
#pragma once

#include "io_daemon/requests.h"
#include "shm/lru.h"
#include "shm/pool.h"

#define NOBODY UINT32_MAX

struct seat {
    uint32_t expert; /* NOBODY: free, quarantined or not ours to use */
    bool loading;    /* reads for it are in flight */
};

struct placement {
    struct pool *pool;
    struct requests *requests;
    struct seat *seats;               /* [slots] */
    uint32_t *where;                  /* [experts] the slot of each, or NOBODY */
    struct lru_candidate *candidates; /* [slots], scratch */
    uint32_t quarantined;
    _Atomic uint64_t *evictions;
};

/* Takes over the pool as it is found: READY slots stay and the map is made to agree with them, FAILED ones are emptied,
 * LOADING ones are quarantined, because reads of a dead predecessor may still land in them. */
int placement_open(struct pool *pool, struct requests *requests, _Atomic uint64_t *evictions,
                   struct placement *ret_placement, struct error *ret_error);
void placement_close(struct placement *placement);

/* Empties the quarantined slots: nothing can land in them any more. */
void placement_end_quarantine(struct placement *placement);

/* Gives an expert that has no slot an empty one, or the one of the expert that the policy gives up: the slot is LOADING
 * and the map says so. -EAGAIN: every slot is pinned, loading or owed. */
int placement_take(struct placement *placement, uint32_t expert, struct slot_ref *ret_ref);

/* Ends a load. `code` 0: READY; else FAILED with that errno and slice. -ESTALE: somebody has scribbled on the slot's
 * state; it is lost to the pool until the next start. */
int placement_finish(struct placement *placement, uint32_t expert, struct slot_ref ref, int code, uint32_t slice);

/* Ends a load that shall leave no trace: the slot is empty again. */
void placement_abandon(struct placement *placement, uint32_t expert, struct slot_ref ref);

enum expert_place { PLACE_NOWHERE, PLACE_LOADING, PLACE_READY, PLACE_FAILED };

/* Where the expert stands now. A FAILED one can be emptied with placement_forget_failed, so that it is loaded once
 * more. */
enum expert_place placement_find(const struct placement *placement, uint32_t expert);
void placement_forget_failed(struct placement *placement, uint32_t expert);
