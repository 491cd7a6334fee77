#include "io_daemon/placement.h"

#include <stdlib.h>

/* Sequentially consistent: after the flag `starved` was raised, an unpin is either seen here or rings. */
static uint64_t state_word(const struct placement *placement, uint32_t slot)
{
    return atomic_load(&placement->pool->slots[slot].state);
}

static int change_state(struct placement *placement, uint32_t slot, enum slot_state from, enum slot_state to,
                        uint32_t generation)
{
    return slot_change(&placement->pool->slots[slot].state, from, to, generation, NULL);
}

static void write_map(struct placement *placement, uint32_t expert, uint64_t entry)
{
    /* Pinned readers go by what stands here; an entry that is right already is not touched. */
    if (atomic_load_explicit(&placement->pool->map[expert], memory_order_relaxed) != entry)
        atomic_store_explicit(&placement->pool->map[expert], entry, memory_order_release);
}

static uint64_t newest_tick(const struct requests *requests)
{
    uint64_t newest = 0;
    for (uint32_t w = 0; w < requests->workers; w++) {
        uint64_t tick = atomic_load_explicit(&requests->control->workers[w].tick, memory_order_relaxed);
        newest = tick > newest ? tick : newest;
    }
    return newest;
}

static void recover_slot(struct placement *placement, uint32_t slot)
{
    _Atomic uint64_t *used = &placement->pool->slots[slot].used;
    if (atomic_load_explicit(used, memory_order_relaxed) > newest_tick(placement->requests))
        atomic_store_explicit(used, 0, memory_order_relaxed); /* a pool kept from an instance whose clock ran further */
    uint64_t word = state_word(placement, slot);
    uint32_t generation = slot_generation_of(word);
    uint32_t expert = atomic_load_explicit(&placement->pool->slots[slot].expert, memory_order_relaxed);
    switch (slot_state_of(word)) {
    case SLOT_READY:
        if (expert < placement->pool->expert_count && placement->where[expert] == NOBODY) {
            placement->seats[slot].expert = expert;
            placement->where[expert] = slot;
        } else {
            change_state(placement, slot, SLOT_READY, SLOT_EMPTY, generation);
        }
        break;
    case SLOT_LOADING:
        if (change_state(placement, slot, SLOT_LOADING, SLOT_QUARANTINED, generation) == 0)
            placement->quarantined++;
        break;
    case SLOT_QUARANTINED: placement->quarantined++; break;
    case SLOT_FAILED: change_state(placement, slot, SLOT_FAILED, SLOT_EMPTY, generation); break;
    case SLOT_EMPTY:
    default: break;
    }
}

int placement_open(struct pool *pool, struct requests *requests, _Atomic uint64_t *evictions,
                   struct placement *ret_placement, struct error *ret_error)
{
    struct placement placement = {.pool = pool, .requests = requests, .evictions = evictions};
    placement.seats = calloc(pool->slot_count, sizeof(*placement.seats));
    placement.candidates = calloc(pool->slot_count, sizeof(*placement.candidates));
    placement.where = calloc(pool->expert_count, sizeof(*placement.where));
    if (!placement.seats || !placement.candidates || !placement.where) {
        placement_close(&placement);
        return error_set(ret_error, ENOMEM, "book of %u slots: out of memory", pool->slot_count);
    }
    for (uint32_t e = 0; e < pool->expert_count; e++)
        placement.where[e] = NOBODY;
    for (uint32_t s = 0; s < pool->slot_count; s++)
        placement.seats[s].expert = NOBODY;
    uint32_t ready = pool_slots_ready(pool);
    for (uint32_t s = 0; s < ready; s++)
        recover_slot(&placement, s);
    for (uint32_t e = 0; e < pool->expert_count; e++) {
        uint32_t slot = placement.where[e];
        uint64_t entry = POOL_NOWHERE;
        if (slot != NOBODY)
            entry = slot | (uint64_t)slot_generation_of(state_word(&placement, slot)) << 32;
        write_map(&placement, e, entry);
    }
    *ret_placement = placement;
    return 0;
}

void placement_close(struct placement *placement)
{
    free(placement->seats);
    free(placement->candidates);
    free(placement->where);
    *placement = (struct placement){0};
}

void placement_end_quarantine(struct placement *placement)
{
    for (uint32_t s = 0; placement->quarantined && s < placement->pool->slot_count; s++) {
        uint64_t word = state_word(placement, s);
        if (slot_state_of(word) == SLOT_QUARANTINED)
            change_state(placement, s, SLOT_QUARANTINED, SLOT_EMPTY, slot_generation_of(word));
    }
    placement->quarantined = 0;
}

/* Slots that stand and are mapped here. */
static uint32_t usable_slots(const struct pool *pool)
{
    uint64_t slots = (uint64_t)pool->attached * pool->slots_per_object;
    return slots < pool->slot_count ? (uint32_t)slots : pool->slot_count;
}

static void clear_seat(struct placement *placement, uint32_t slot)
{
    struct seat *seat = &placement->seats[slot];
    if (seat->expert != NOBODY && placement->where[seat->expert] == slot) {
        write_map(placement, seat->expert, POOL_NOWHERE);
        placement->where[seat->expert] = NOBODY;
    }
    *seat = (struct seat){.expert = NOBODY};
}

static bool evictable(const struct placement *placement, uint32_t slot, uint64_t word)
{
    enum slot_state state = slot_state_of(word);
    return placement->seats[slot].expert != NOBODY &&
           ((state == SLOT_READY && slot_pins_of(word) == 0) || state == SLOT_FAILED);
}

/* Looks at every usable slot: the first EMPTY one, or NOBODY and the candidates for eviction. */
static uint32_t survey_slots(struct placement *placement, uint32_t count)
{
    for (uint32_t s = 0; s < count; s++) {
        uint64_t word = state_word(placement, s);
        struct lru_candidate *candidate = &placement->candidates[s];
        candidate->evictable = false;
        if (placement->seats[s].loading)
            continue;
        if (slot_state_of(word) == SLOT_EMPTY)
            return s;
        candidate->used = atomic_load_explicit(&placement->pool->slots[s].used, memory_order_relaxed);
        candidate->evictable = evictable(placement, s, word);
    }
    return NOBODY;
}

/* Empties the slot that the policy gives up. NOBODY: there is none. Whether a slot is owed is asked of the chosen one
 * only: few are. */
static uint32_t evict_one(struct placement *placement, uint32_t count)
{
    uint32_t victim;
    while ((victim = lru_victim(placement->candidates, count)) != LRU_NONE) {
        struct lru_candidate *candidate = &placement->candidates[victim];
        candidate->evictable = false;
        if (requests_owed(placement->requests, placement->seats[victim].expert, candidate->used))
            continue;
        uint64_t word = state_word(placement, victim);
        enum slot_state state = slot_state_of(word);
        if ((state == SLOT_READY || state == SLOT_FAILED) &&
            change_state(placement, victim, state, SLOT_EMPTY, slot_generation_of(word)) == 0) {
            clear_seat(placement, victim);
            if (state == SLOT_READY)
                atomic_fetch_add_explicit(placement->evictions, 1, memory_order_relaxed);
            return victim;
        } /* else: pinned since we looked */
    }
    return NOBODY;
}

int placement_take(struct placement *placement, uint32_t expert, struct slot_ref *ret_ref)
{
    uint32_t count = usable_slots(placement->pool);
    uint32_t index = survey_slots(placement, count);
    if (index == NOBODY)
        index = evict_one(placement, count);
    if (index == NOBODY)
        return -EAGAIN;
    struct slot *slot = &placement->pool->slots[index];
    struct slot_ref ref = {.index = index};
    if (slot_change(&slot->state, SLOT_EMPTY, SLOT_LOADING, slot_generation_of(state_word(placement, index)),
                    &ref.generation) < 0)
        return -EAGAIN; /* scribbled on between the look and the change */
    uint64_t tick;
    requests_live(placement->requests, expert, &tick);
    clear_seat(placement, index);
    placement->seats[index] = (struct seat){.expert = expert, .loading = true};
    placement->where[expert] = index;
    /* Just older than the demand: until a worker pins it with the demand's tick, it is owed. */
    atomic_store_explicit(&slot->used, tick ? tick - 1 : 0, memory_order_relaxed);
    atomic_store_explicit(&slot->expert, expert, memory_order_relaxed);
    write_map(placement, expert, index | (uint64_t)ref.generation << 32);
    *ret_ref = ref;
    return 0;
}

int placement_finish(struct placement *placement, uint32_t expert, struct slot_ref ref, int code, uint32_t slice)
{
    struct slot *slot = &placement->pool->slots[ref.index];
    placement->seats[ref.index].loading = false;
    if (code) {
        atomic_store_explicit(&slot->error, (uint32_t)code, memory_order_relaxed);
        atomic_store_explicit(&slot->slice, slice, memory_order_relaxed);
    }
    int status = change_state(placement, ref.index, SLOT_LOADING, code ? SLOT_FAILED : SLOT_READY, ref.generation);
    if (status < 0) {
        write_map(placement, expert, POOL_NOWHERE);
        placement->where[expert] = NOBODY;
        placement->seats[ref.index].expert = NOBODY;
    }
    return status;
}

void placement_abandon(struct placement *placement, uint32_t expert, struct slot_ref ref)
{
    if (placement_finish(placement, expert, ref, ECANCELED, 0) == 0)
        placement_forget_failed(placement, expert);
}

enum expert_place placement_find(const struct placement *placement, uint32_t expert)
{
    uint32_t slot = placement->where[expert];
    if (slot == NOBODY)
        return PLACE_NOWHERE;
    if (placement->seats[slot].loading)
        return PLACE_LOADING;
    switch (slot_state_of(state_word(placement, slot))) {
    case SLOT_READY: return PLACE_READY;
    case SLOT_FAILED: return PLACE_FAILED;
    case SLOT_EMPTY:
    case SLOT_LOADING:
    case SLOT_QUARANTINED:
    default: return PLACE_NOWHERE;
    }
}

void placement_forget_failed(struct placement *placement, uint32_t expert)
{
    uint32_t slot = placement->where[expert];
    if (slot == NOBODY)
        return;
    change_state(placement, slot, SLOT_FAILED, SLOT_EMPTY, slot_generation_of(state_word(placement, slot)));
    clear_seat(placement, slot);
}
