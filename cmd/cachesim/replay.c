#include "cmd/cachesim/replay.h"

#include "proto/cleanup.h"
#include "shm/lfru.h"

#include <string.h>

const char *replay_policy_name(enum replay_policy policy)
{
    static const char *const names[REPLAY_POLICIES] = {[REPLAY_LRU] = "LRU",
                                                       [REPLAY_LFU] = "LFU",
                                                       [REPLAY_LFU_LAYER] = "LFU a layer",
                                                       [REPLAY_LFRU] = "LFRU",
                                                       [REPLAY_BELADY] = "Belady"};
    return (unsigned)policy < REPLAY_POLICIES ? names[policy] : "?";
}

/* What the plain policies know of an expert. The one with the least key goes, then the one with the least tie. */
struct resident {
    uint64_t key, tie;
    uint64_t uses;
    uint32_t at; /* its place in the heap, valid while it is there */
    bool resident;
};

/* Slots that are filled and emptied together: the pool, or a layer's share of it. */
struct share {
    uint32_t slots, filled;
    uint32_t count; /* in the heap: residents that the current layer does not use */
    uint32_t *heap; /* [slots], experts; the parent of i is (i - 1) / 2 */
};

static bool goes_before(const struct resident *a, const struct resident *b)
{
    return a->key != b->key ? a->key < b->key : a->tie < b->tie;
}

static void put(struct share *share, struct resident *residents, uint32_t at, uint32_t expert)
{
    share->heap[at] = expert;
    residents[expert].at = at;
}

/* Finds the place of `expert`, from the free place `at` on, up or down. */
static void sift(struct share *share, struct resident *residents, uint32_t at, uint32_t expert)
{
    while (at > 0 && goes_before(&residents[expert], &residents[share->heap[(at - 1) / 2]])) {
        put(share, residents, at, share->heap[(at - 1) / 2]);
        at = (at - 1) / 2;
    }
    for (uint32_t child; (child = 2 * at + 1) < share->count; at = child) {
        if (child + 1 < share->count && goes_before(&residents[share->heap[child + 1]], &residents[share->heap[child]]))
            child++;
        if (!goes_before(&residents[share->heap[child]], &residents[expert]))
            break;
        put(share, residents, at, share->heap[child]);
    }
    put(share, residents, at, expert);
}

static void heap_add(struct share *share, struct resident *residents, uint32_t expert)
{
    sift(share, residents, share->count++, expert);
}

static void heap_take(struct share *share, struct resident *residents, uint32_t expert)
{
    uint32_t last = share->heap[--share->count];
    if (last != expert)
        sift(share, residents, residents[expert].at, last);
}

static void set_key(struct resident *resident, enum replay_policy policy, uint32_t now, uint32_t next)
{
    resident->uses++;
    resident->tie = now;
    if (policy == REPLAY_BELADY)
        resident->key = USED_NEVER - next;
    else
        resident->key = policy == REPLAY_LRU ? now : resident->uses;
}

/* The experts of a layer: hits first, then misses, each in their order. Returns the hits. */
static uint32_t sort_layer(const struct workload *workload, uint32_t layer, const struct resident *residents,
                           uint32_t *ret_experts)
{
    const struct workload_use *uses = &workload->uses[workload->layers[layer].first];
    uint32_t hits = 0, all;
    for (uint32_t i = 0; i < workload->layers[layer].count; i++)
        if (residents[uses[i].expert].resident)
            ret_experts[hits++] = uses[i].expert;
    all = hits;
    for (uint32_t i = 0; i < workload->layers[layer].count; i++)
        if (!residents[uses[i].expert].resident)
            ret_experts[all++] = uses[i].expert;
    return hits;
}

/* One layer of a step. `experts` [experts of a layer] is scratch. Returns the hits. */
static uint32_t replay_layer(const struct workload *workload, enum replay_policy policy, uint32_t layer,
                             uint32_t in_flight, struct share *share, struct resident *residents, uint32_t *experts)
{
    const struct workload_use *uses = &workload->uses[workload->layers[layer].first];
    uint32_t count = workload->layers[layer].count;
    if (share->slots == 0)
        return 0;
    uint32_t hits = sort_layer(workload, layer, residents, experts);
    for (uint32_t i = 0; i < hits; i++)
        heap_take(share, residents, experts[i]);
    for (uint32_t i = 0; i < count; i++)
        set_key(&residents[uses[i].expert], policy, layer, uses[i].next);
    uint32_t held = 0, loading = hits; /* experts[held .. hits - 1] and [loading .. i - 1] cannot go */
    for (uint32_t i = hits; i < count; i++) {
        if (share->filled == share->slots) {
            for (; held < hits && (i - hits >= in_flight || share->count == 0); held++)
                heap_add(share, residents, experts[held]);
            for (; loading < i && (i - loading >= in_flight || share->count == 0); loading++)
                heap_add(share, residents, experts[loading]);
            uint32_t victim = share->heap[0];
            heap_take(share, residents, victim);
            residents[victim].resident = false;
            share->filled--;
        }
        residents[experts[i]].resident = true;
        share->filled++;
    }
    for (; held < hits; held++)
        heap_add(share, residents, experts[held]);
    for (; loading < count; loading++)
        heap_add(share, residents, experts[loading]);
    return hits;
}

/* The pool, or for each layer that occurs an equal share of it: where there are fewer slots than layers, one for each
 * of the first and none for the others. `heaps` [slots]. */
static void divide(const struct workload *workload, enum replay_policy policy, uint32_t slots, uint32_t *heaps,
                   struct share *ret_shares)
{
    uint32_t parts = policy == REPLAY_LFU_LAYER ? workload->layers_used : 1;
    for (uint32_t s = 0; s < parts; s++) {
        uint32_t own = slots / parts + (s < slots % parts);
        ret_shares[s] = (struct share){.slots = own, .heap = heaps};
        heaps += ret_shares[s].slots;
    }
}

static int replay_plain(const struct workload *workload, enum replay_policy policy, uint32_t slots, uint32_t in_flight,
                        uint64_t *ret_hits)
{
    _cleanup_free_ struct resident *residents = calloc(workload->experts, sizeof *residents);
    _cleanup_free_ uint32_t *heaps = calloc(slots, sizeof *heaps);
    _cleanup_free_ uint32_t *experts = calloc(workload->header.experts, sizeof *experts);
    struct share shares[MODEL_MAX_LAYERS];
    uint32_t share_of[MODEL_MAX_LAYERS], shares_given = 0;
    if (!residents || !heaps || !experts)
        return -ENOMEM;
    for (uint32_t l = 0; l < MODEL_MAX_LAYERS; l++)
        share_of[l] = UINT32_MAX;
    divide(workload, policy, slots, heaps, shares);
    *ret_hits = 0;
    for (uint32_t l = 0; l < workload->layer_count; l++) {
        uint32_t layer = workload->uses[workload->layers[l].first].expert / workload->header.experts;
        if (share_of[layer] == UINT32_MAX)
            share_of[layer] = policy == REPLAY_LFU_LAYER ? shares_given++ : 0;
        *ret_hits += replay_layer(workload, policy, l, in_flight, &shares[share_of[layer]], residents, experts);
    }
    return 0;
}

struct lfru_replay {
    const struct workload *workload;
    struct lfru *lfru;
    uint32_t slots, filled, in_flight;
    uint64_t admitted;          /* how many */
    uint64_t used;              /* how many of these have been used */
    uint32_t layer;             /* of the workload */
    bool holds;                 /* what the layer found is still used */
    struct resident *residents; /* key: the number of its admission; tie: the layer that used it last */
};

static bool may_go(void *context, uint32_t expert)
{
    const struct lfru_replay *replay = context;
    const struct resident *resident = &replay->residents[expert];
    return resident->key < replay->used && !(replay->holds && resident->tie == replay->layer);
}

static enum lfru_who who_used(const struct workload_use *use)
{
    return use->prefill ? LFRU_PREFILL : LFRU_DECODE;
}

/* `missed` before it in its layer. */
static void admit(struct lfru_replay *replay, const struct workload_use *use, uint32_t missed)
{
    struct resident *resident = &replay->residents[use->expert];
    if (replay->filled == replay->slots) {
        uint32_t victim;
        if (replay->admitted - replay->used >= replay->in_flight)
            replay->used = replay->admitted - replay->in_flight + 1;
        replay->holds = replay->holds && missed < replay->in_flight;
        while ((victim = lfru_victim(replay->lfru, may_go, replay)) == LFRU_NONE) {
            replay->used += !replay->holds;
            replay->holds = false;
        }
        lfru_evict(replay->lfru, victim);
        replay->residents[victim].resident = false;
        replay->filled--;
    }
    lfru_admit(replay->lfru, use->expert, who_used(use));
    resident->resident = true;
    resident->key = replay->admitted++;
    replay->filled++;
}

/* `missed` [experts of a layer] is scratch. Returns the hits. */
static uint32_t replay_lfru_layer(struct lfru_replay *replay, uint32_t layer, const struct workload_use **missed)
{
    const struct workload_use *uses = &replay->workload->uses[replay->workload->layers[layer].first];
    uint32_t count = replay->workload->layers[layer].count, misses = 0;
    for (uint32_t i = 0; i < count; i++) {
        lfru_use(replay->lfru, uses[i].expert, who_used(&uses[i]));
        replay->residents[uses[i].expert].tie = layer;
        if (!replay->residents[uses[i].expert].resident)
            missed[misses++] = &uses[i];
    }
    replay->used = replay->admitted;
    replay->layer = layer;
    replay->holds = true;
    for (uint32_t i = 0; i < misses; i++)
        admit(replay, missed[i], i);
    return count - misses;
}

static int replay_lfru(const struct workload *workload, uint32_t slots, uint32_t in_flight, uint64_t *ret_hits,
                       struct error *ret_error)
{
    _cleanup_free_ struct resident *residents = calloc(workload->experts, sizeof *residents);
    _cleanup_free_ const struct workload_use **missed = calloc(workload->header.experts, sizeof *missed);
    struct lfru_replay replay = {.workload = workload, .slots = slots, .in_flight = in_flight, .residents = residents};
    if (!residents || !missed)
        return error_set(ret_error, ENOMEM, "replay of %u experts: out of memory", workload->experts);
    int status = lfru_open(workload->experts, workload->header.experts, slots, &replay.lfru, ret_error);
    if (status < 0)
        return status;
    *ret_hits = 0;
    for (uint32_t l = 0; l < workload->layer_count; l++)
        *ret_hits += replay_lfru_layer(&replay, l, missed);
    lfru_close(replay.lfru);
    return 0;
}

int replay(const struct workload *workload, enum replay_policy policy, uint32_t slots, uint32_t in_flight,
           uint64_t *ret_hits, struct error *ret_error)
{
    if (slots > workload->experts)
        slots = workload->experts; /* more change nothing */
    if (policy == REPLAY_LFRU)
        return replay_lfru(workload, slots, in_flight, ret_hits, ret_error);
    if (replay_plain(workload, policy, slots, in_flight, ret_hits) < 0)
        return error_set(ret_error, ENOMEM, "replay of %u experts: out of memory", workload->experts);
    return 0;
}
