/* What a pool of some size would have had of a workload, by policy.
 *
 * In the order of the I/O daemon: the policy hears of all uses of a layer; each miss then takes an empty slot or that of a
 * victim when its read begins, `in_flight` of them at once and another whenever one has been read and used. What the layer
 * found is in use until the first read is through, so it is no victim of those that begin at once; what is being read is
 * none until it has been used. Where only such experts are left, reading waits for the first use to end: so a layer may
 * use more than the pool holds, and its misses give way to later ones of its own.
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
