/* What a pool of some size would have had of a workload, by policy.
 *
 * In the order of the I/O daemon: the policy hears of all uses of a layer; the experts that are there are used; each
 * miss then takes an empty slot or that of a victim, and is used when it has been read. Until then it is no victim; so
 * that misses of a layer may give way to later ones of the same layer, as where a layer uses more than the pool holds.
 * A use is a hit if its expert was resident when the layer began. The pool begins empty. */
#pragma once

#include "cmd/cachesim/workload.h"

#define REPLAY_IN_FLIGHT 2u /* 32 MiB a drive, of GLM-5.2's experts of 19 MB */

enum replay_policy {
    REPLAY_LRU,
    REPLAY_LFU,       /* counts that are never forgotten; of equal ones the least recently used goes */
    REPLAY_LFU_LAYER, /* the same, an equal share of the slots for each layer */
    REPLAY_LFRU,      /* shm/lfru.c, as it stands in the daemon */
    REPLAY_BELADY,    /* what is used again last goes: the most hits that any policy can have, knowing the future */
    REPLAY_POLICIES,
};

const char *replay_policy_name(enum replay_policy policy);

/* Hits of a pool of `slots` (at least 1) with `in_flight` experts read at a time (at least 1). -ENOMEM. Any thread. */
int replay(const struct workload *workload, enum replay_policy policy, uint32_t slots, uint32_t in_flight,
           uint64_t *ret_hits, struct error *ret_error);
