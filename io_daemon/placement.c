#include "io_daemon/placement.h"

#include <stdlib.h>

/* A lookahead's expert is expected to be used once more at once; in the policy's measure of heat. */
#define ONE_USE 1.0f

#define HEATS_AT_ONCE 4u

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

static void count(_Atomic uint64_t *counter)
{
    atomic_fetch_add_explicit(counter, 1, memory_order_relaxed);
}

/* --- the book --- */

static uint32_t index_of(const struct placement *placement, const struct seat *seat)
{
    return (uint32_t)(seat - placement->seats);
}

/* The two kinds of experts whose slots guesses keep from demands. */
static bool keeps_from_demands(const struct place *place)
{
    return (place->brought == PRIORITY_LOOKAHEAD && (place->state == PLACE_LOADING || place->state == PLACE_READY)) ||
           (place->brought == PRIORITY_WARMUP && place->state == PLACE_LOADING);
}

/* The one place where an expert's place changes: lists and counts follow. */
static void set_place(struct placement *placement, uint32_t expert, uint32_t slot, enum expert_place state,
                      enum priority brought)
{
    struct place *place = &placement->places[expert];
    placement->guesses -= keeps_from_demands(place);
    if (place->state == PLACE_FAILED)
        TAILQ_REMOVE(&placement->failed, &placement->seats[place->slot], link);
    place->slot = slot;
    place->state = (uint8_t)state;
    place->brought = (uint8_t)brought;
    if (state == PLACE_FAILED)
        TAILQ_INSERT_TAIL(&placement->failed, &placement->seats[slot], link);
    placement->guesses += keeps_from_demands(place);
}

static void set_seat(struct placement *placement, uint32_t slot, enum seat_state state, uint32_t expert)
{
    struct seat *seat = &placement->seats[slot];
    if (seat->state == SEAT_FREE)
        TAILQ_REMOVE(&placement->free, seat, link);
    seat->state = state;
    seat->expert = expert;
    if (state == SEAT_FREE)
        TAILQ_INSERT_HEAD(&placement->free, seat, link);
}

static void vacate(struct placement *placement, uint32_t slot)
{
    uint32_t expert = placement->seats[slot].expert;
    if (expert != NOBODY) {
        write_map(placement, expert, POOL_NOWHERE);
        set_place(placement, expert, NOBODY, PLACE_NOWHERE, PRIORITY_DEMAND);
    }
    set_seat(placement, slot, SEAT_AWAY, NOBODY);
}

/* The slot is EMPTY: its expert, if it had one, is nowhere now. */
static void free_seat(struct placement *placement, uint32_t slot)
{
    vacate(placement, slot);
    if (slot < placement->slots && slot < placement->limit)
        set_seat(placement, slot, SEAT_FREE, NOBODY);
}

uint32_t placement_capacity(const struct placement *placement)
{
    return placement->slots < placement->limit ? placement->slots : placement->limit;
}

/* --- start --- */

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
        if (expert < placement->pool->expert_count && placement->places[expert].slot == NOBODY) {
            set_seat(placement, slot, SEAT_TAKEN, expert);
            set_place(placement, expert, slot, PLACE_READY, PRIORITY_DEMAND);
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

struct recovered {
    uint64_t used;
    uint32_t expert;
};

static int compare_recovered(const void *a, const void *b)
{
    const struct recovered *first = a, *second = b;
    return first->used < second->used ? -1 : first->used > second->used;
}

/* Tells the policy of the experts that are there: one use each, in the order of their last. */
static int admit_recovered(struct placement *placement, uint32_t slots, struct error *ret_error)
{
    struct recovered *recovered = calloc((size_t)slots + 1, sizeof(*recovered));
    uint32_t n = 0;
    if (!recovered)
        return error_set(ret_error, ENOMEM, "book of %u slots: out of memory", slots);
    for (uint32_t s = 0; s < slots; s++) {
        if (placement->seats[s].state == SEAT_TAKEN)
            recovered[n++] =
                (struct recovered){atomic_load_explicit(&placement->pool->slots[s].used, memory_order_relaxed),
                                   placement->seats[s].expert};
    }
    qsort(recovered, n, sizeof(*recovered), compare_recovered);
    for (uint32_t i = 0; i < n; i++) {
        lfru_use(placement->lfru, recovered[i].expert, LFRU_DECODE);
        lfru_admit(placement->lfru, recovered[i].expert, LFRU_DECODE);
    }
    free(recovered);
    return 0;
}

int placement_open(struct pool *pool, const struct model_config *config, struct requests *requests,
                   struct iod_line *counters, struct placement *ret_placement, struct error *ret_error)
{
    struct placement *placement = ret_placement;
    *placement = (struct placement){
        .pool = pool, .requests = requests, .counters = counters, .top_k = config->top_k, .limit = pool->slot_count};
    TAILQ_INIT(&placement->free);
    TAILQ_INIT(&placement->failed);
    uint32_t ready = pool_slots_ready(pool);
    int status = lfru_open(pool->expert_count, config->experts, pool->slot_count, &placement->lfru, ret_error);
    placement->seats = calloc(pool->slot_count, sizeof(*placement->seats));
    placement->places = calloc(pool->expert_count, sizeof(*placement->places));
    if (status == 0 && (!placement->seats || !placement->places))
        status = error_set(ret_error, ENOMEM, "book of %u slots: out of memory", pool->slot_count);
    if (status < 0) {
        placement_close(placement);
        return status;
    }
    for (uint32_t e = 0; e < pool->expert_count; e++)
        placement->places[e] = (struct place){.slot = NOBODY, .state = PLACE_NOWHERE, .user = LFRU_DECODE};
    for (uint32_t s = 0; s < pool->slot_count; s++)
        placement->seats[s] = (struct seat){.state = SEAT_AWAY, .expert = NOBODY};
    for (uint32_t s = 0; s < ready; s++)
        recover_slot(placement, s);
    for (uint32_t e = 0; e < pool->expert_count; e++) {
        uint32_t slot = placement->places[e].slot;
        uint64_t entry = POOL_NOWHERE;
        if (slot != NOBODY)
            entry = slot | (uint64_t)slot_generation_of(state_word(placement, slot)) << 32;
        write_map(placement, e, entry);
    }
    status = admit_recovered(placement, ready, ret_error);
    if (status < 0)
        placement_close(placement);
    return status;
}

void placement_close(struct placement *placement)
{
    if (placement->lfru)
        lfru_close(placement->lfru);
    free(placement->seats);
    free(placement->places);
    placement->lfru = NULL;
    placement->seats = NULL;
    placement->places = NULL;
}

/* Into the list of free seats with the EMPTY slots of a range that has become ours; the lowest is given first. */
static void free_range(struct placement *placement, uint32_t first, uint32_t end)
{
    for (uint32_t s = end; s-- > first;) {
        if (placement->seats[s].state == SEAT_AWAY && slot_state_of(state_word(placement, s)) == SLOT_EMPTY)
            free_seat(placement, s);
    }
}

void placement_grow(struct placement *placement, uint32_t slots)
{
    uint32_t before = placement->slots;
    if (slots <= before)
        return;
    placement->slots = slots;
    free_range(placement, before, placement_capacity(placement));
    lfru_resize(placement->lfru, placement_capacity(placement));
}

void placement_end_quarantine(struct placement *placement)
{
    for (uint32_t s = 0; placement->quarantined && s < placement->pool->slot_count; s++) {
        uint64_t word = state_word(placement, s);
        if (placement->seats[s].state == SEAT_AWAY && slot_state_of(word) == SLOT_QUARANTINED &&
            change_state(placement, s, SLOT_QUARANTINED, SLOT_EMPTY, slot_generation_of(word)) == 0)
            free_seat(placement, s);
    }
    placement->quarantined = 0;
}

/* --- giving --- */

static bool owed(const struct placement *placement, uint32_t expert)
{
    const struct slot *slot = &placement->pool->slots[placement->places[expert].slot];
    return requests_owed(placement->requests, expert, atomic_load_explicit(&slot->used, memory_order_relaxed));
}

/* Asked by the policy of an expert that it would give up. */
static bool may_go(void *context, uint32_t expert)
{
    const struct placement *placement = context;
    struct place *place = &placement->places[expert];
    if (place->state != PLACE_READY)
        return false;
    uint64_t word = state_word(placement, place->slot);
    if (slot_state_of(word) != SLOT_READY || slot_pins_of(word) != 0)
        return false;
    place->may_be_owed = place->may_be_owed && owed(placement, expert);
    return !place->may_be_owed;
}

/* Empties the slot of a READY expert. False: pinned since we looked, or scribbled on. */
static bool evict(struct placement *placement, uint32_t expert)
{
    const struct place *place = &placement->places[expert];
    uint32_t slot = place->slot;
    if (change_state(placement, slot, SLOT_READY, SLOT_EMPTY, slot_generation_of(state_word(placement, slot))) < 0)
        return false;
    uint64_t used = atomic_load_explicit(&placement->pool->slots[slot].used, memory_order_relaxed);
    if (used <= newest_tick(placement->requests)) /* else scribbled on */
        requests_gone(placement->requests, expert, used);
    if (place->brought == PRIORITY_LOOKAHEAD)
        count(&placement->counters->guesses_wasted);
    free_seat(placement, slot);
    lfru_evict(placement->lfru, expert);
    count(&placement->counters->evictions);
    return true;
}

/* Puts a free seat at the front: one that failed and that nobody looks at any more, or the policy's victim. False: there
 * is none. */
static bool make_free(struct placement *placement, uint32_t expert, enum priority priority)
{
    struct seat *seat;
    TAILQ_FOREACH (seat, &placement->failed, link) {
        if (index_of(placement, seat) < placement->limit && !owed(placement, seat->expert)) {
            placement_forget_failed(placement, seat->expert);
            return !TAILQ_EMPTY(&placement->free);
        }
    }
    if (priority == PRIORITY_WARMUP)
        return false;
    uint32_t victim;
    while ((victim = lfru_victim(placement->lfru, may_go, placement)) != LFRU_NONE) {
        if (priority == PRIORITY_LOOKAHEAD &&
            lfru_heat(placement->lfru, victim) > lfru_heat(placement->lfru, expert) + ONE_USE)
            return false;
        if (evict(placement, victim) && !TAILQ_EMPTY(&placement->free))
            return true;
        /* else: pinned since we looked, so that the policy names another; or above the limit */
    }
    return false;
}

/* The book has a slot for the expert, but somebody has scribbled on its state. */
static void forget_scribbled(struct placement *placement, uint32_t expert)
{
    if (placement->places[expert].state != PLACE_FAILED)
        lfru_remove(placement->lfru, expert);
    vacate(placement, placement->places[expert].slot);
}

int placement_take(struct placement *placement, uint32_t expert, enum priority priority, struct slot_ref *ret_ref)
{
    bool guess = priority != PRIORITY_DEMAND;
    struct place *place = &placement->places[expert];
    if (place->slot != NOBODY)
        forget_scribbled(placement, expert);
    if (guess && (uint64_t)placement->guesses + placement->top_k >= placement_capacity(placement))
        return priority == PRIORITY_WARMUP && placement->guesses > 0 ? -EBUSY : -ENOSPC;
    if (TAILQ_EMPTY(&placement->free) && !make_free(placement, expert, priority))
        return guess ? -ENOSPC : -EAGAIN;
    uint32_t index = index_of(placement, TAILQ_FIRST(&placement->free));
    struct slot *slot = &placement->pool->slots[index];
    struct slot_ref ref = {.index = index};
    if (slot_change(&slot->state, SLOT_EMPTY, SLOT_LOADING, slot_generation_of(state_word(placement, index)),
                    &ref.generation) < 0) {
        vacate(placement, index); /* scribbled on */
        return -EAGAIN;
    }
    uint64_t tick;
    requests_live(placement->requests, expert, &tick);
    set_seat(placement, index, SEAT_TAKEN, expert);
    set_place(placement, expert, index, PLACE_LOADING, priority);
    place->may_be_owed = tick != 0;
    lfru_admit(placement->lfru, expert, guess ? LFRU_GUESS : (enum lfru_who)place->user);
    if (priority == PRIORITY_LOOKAHEAD)
        count(&placement->counters->guesses_loaded);
    /* Just older than the demand: until a worker pins it with the demand's tick, it is owed. */
    atomic_store_explicit(&slot->used, tick ? tick - 1 : 0, memory_order_relaxed);
    atomic_store_explicit(&slot->expert, expert, memory_order_relaxed);
    write_map(placement, expert, index | (uint64_t)ref.generation << 32);
    *ret_ref = ref;
    return 0;
}

/* A guess was right, or is a guess no more. */
static void redeem(struct placement *placement, uint32_t expert)
{
    const struct place *place = &placement->places[expert];
    if (place->brought == PRIORITY_DEMAND)
        return;
    if (place->brought == PRIORITY_LOOKAHEAD)
        count(&placement->counters->guesses_used);
    set_place(placement, expert, place->slot, (enum expert_place)place->state, PRIORITY_DEMAND);
}

void placement_demand(struct placement *placement, uint32_t expert)
{
    placement->places[expert].may_be_owed = true;
    redeem(placement, expert);
}

void placement_use(struct placement *placement, uint32_t expert, enum lfru_who who)
{
    lfru_use(placement->lfru, expert, who);
    placement->places[expert].user = (uint8_t)who;
    redeem(placement, expert);
}

void placement_publish_heat(struct placement *placement)
{
    for (uint32_t i = 0; i < HEATS_AT_ONCE && i < placement->slots; i++) {
        uint32_t slot = placement->next_heat++ % placement->slots, expert = placement->seats[slot].expert;
        float heat = expert == NOBODY ? 0 : lfru_heat(placement->lfru, expert);
        atomic_store_explicit(&placement->pool->slots[slot].heat, heat, memory_order_relaxed);
    }
}

void placement_hold(struct placement *placement, uint32_t expert, bool held)
{
    if (expert < placement->pool->expert_count)
        lfru_hold(placement->lfru, expert, held);
}

/* Empties the expert's slot if nobody needs it now. */
static void give_up(struct placement *placement, uint32_t expert)
{
    if (placement->places[expert].state == PLACE_FAILED && !owed(placement, expert))
        placement_forget_failed(placement, expert);
    else if (may_go(placement, expert))
        evict(placement, expert);
}

uint32_t placement_limit(struct placement *placement, uint32_t slots)
{
    uint32_t before = placement_capacity(placement);
    slots = slots < placement->pool->slot_count ? slots : placement->pool->slot_count;
    bool raised = slots > placement->limit;
    placement->limit = slots;
    if (raised)
        free_range(placement, before, placement_capacity(placement));
    if (placement_capacity(placement) != before)
        lfru_resize(placement->lfru, placement_capacity(placement));
    uint32_t occupied = 0;
    for (uint32_t s = slots; s < placement->slots; s++) {
        const struct seat *seat = &placement->seats[s];
        if (seat->state == SEAT_FREE)
            vacate(placement, s);
        else if (seat->state == SEAT_TAKEN)
            give_up(placement, seat->expert);
        /* what is AWAY and not EMPTY is quarantined */
        occupied += seat->state != SEAT_AWAY || slot_state_of(state_word(placement, s)) == SLOT_QUARANTINED;
    }
    return occupied;
}

/* --- the end of a load --- */

int placement_finish(struct placement *placement, uint32_t expert, struct slot_ref ref, int code, uint32_t slice)
{
    struct slot *slot = &placement->pool->slots[ref.index];
    if (code) {
        atomic_store_explicit(&slot->error, (uint32_t)code, memory_order_relaxed);
        atomic_store_explicit(&slot->slice, slice, memory_order_relaxed);
    }
    int status = change_state(placement, ref.index, SLOT_LOADING, code ? SLOT_FAILED : SLOT_READY, ref.generation);
    if (status < 0 || code)
        lfru_remove(placement->lfru, expert);
    if (status < 0)
        vacate(placement, ref.index);
    else
        set_place(placement, expert, ref.index, code ? PLACE_FAILED : PLACE_READY,
                  (enum priority)placement->places[expert].brought);
    return status;
}

void placement_abandon(struct placement *placement, uint32_t expert, struct slot_ref ref)
{
    /* Not by way of FAILED: a worker that looks in between would take it for its answer's failure. */
    lfru_remove(placement->lfru, expert);
    if (change_state(placement, ref.index, SLOT_LOADING, SLOT_QUARANTINED, ref.generation) == 0 &&
        change_state(placement, ref.index, SLOT_QUARANTINED, SLOT_EMPTY, ref.generation) == 0)
        free_seat(placement, ref.index);
    else
        vacate(placement, ref.index);
}

enum expert_place placement_find(const struct placement *placement, uint32_t expert)
{
    const struct place *place = &placement->places[expert];
    if (place->state == PLACE_NOWHERE || place->state == PLACE_LOADING)
        return (enum expert_place)place->state;
    enum slot_state shared = slot_state_of(state_word(placement, place->slot));
    bool agrees = shared == (place->state == PLACE_READY ? SLOT_READY : SLOT_FAILED);
    return agrees ? (enum expert_place)place->state : PLACE_NOWHERE;
}

void placement_forget_failed(struct placement *placement, uint32_t expert)
{
    const struct place *place = &placement->places[expert];
    uint32_t slot = place->slot;
    if (place->state != PLACE_FAILED)
        return;
    if (change_state(placement, slot, SLOT_FAILED, SLOT_EMPTY, slot_generation_of(state_word(placement, slot))) == 0)
        free_seat(placement, slot);
    else
        vacate(placement, slot);
}

static int warmest_first(const void *left, const void *right)
{
    const struct warmth *a = left, *b = right;
    if (a->heat != b->heat)
        return a->heat > b->heat ? -1 : 1;
    return a->expert < b->expert ? -1 : a->expert > b->expert;
}

void sort_warmest(struct warmth *experts, uint32_t count)
{
    qsort(experts, count, sizeof(*experts), warmest_first);
}
