/* What must hold, after every event and at every turn of the daemon. */
#include "tests/simulation/simulation.h"

#include <string.h>
#include <xxhash.h>

uint64_t hash_slot(const struct simulation *sim, uint32_t slot)
{
    uint64_t hash = 0;
    for (uint32_t s = 0; s < EXPERT_SLICES; s++)
        hash = XXH3_64bits_withSeed(pool_slice(&sim->pool, slot, s), SIM_SLICE_BYTES, hash);
    return hash;
}

uint64_t hash_blob(const unsigned char *blob)
{
    uint64_t hash = 0;
    for (uint32_t s = 0; s < EXPERT_SLICES; s++)
        hash = XXH3_64bits_withSeed(blob + s * SIM_SLICE_BYTES, SIM_SLICE_BYTES, hash);
    return hash;
}

void check_slot(const struct simulation *sim, uint32_t slot)
{
    uint32_t expert = atomic_load(&sim->pool.slots[slot].expert);
    if (expert >= SIM_ALL)
        violated(sim, "slot %u is READY and names expert %u", slot, expert);
    for (uint32_t s = 0; s < EXPERT_SLICES; s++)
        if (memcmp(pool_slice(&sim->pool, slot, s), sim->image[expert] + s * SIM_SLICE_BYTES, SIM_SLICE_BYTES) != 0)
            violated(sim, "slot %u is READY, and slice %u of it is not expert %u's", slot, s, expert);
}

/* What worker 0 has pinned stands until it unpins. */
static void check_pins(const struct simulation *sim)
{
    const struct leader *l = &sim->leader;
    bool holds = l->pc >= W_PIN && l->pc <= W_RETIRE;
    for (uint32_t i = 0; holds && i < l->count; i++) {
        if (l->status[i] != WANTED_PINNED)
            continue;
        const struct slot *slot = &sim->pool.slots[l->ref[i].index];
        uint64_t word = atomic_load(&slot->state);
        if (slot_state_of(word) != SLOT_READY || slot_generation_of(word) != l->ref[i].generation ||
            !(slot_pins_of(word) & 1) || atomic_load(&slot->expert) != l->expert[i])
            violated(sim, "expert %u is pinned in slot %u, which is in state %u now", l->expert[i], l->ref[i].index,
                     slot_state_of(word));
        if (l->ref[i].index >= pool_slots_ready(&sim->pool))
            violated(sim, "expert %u is pinned in slot %u, which has no memory any more", l->expert[i],
                     l->ref[i].index);
    }
}

void check_event(struct simulation *sim)
{
    for (uint32_t s = 0; s < sim->plan.slots; s++) {
        uint64_t word = atomic_load(&sim->pool.slots[s].state), before = sim->shadow[s];
        sim->shadow[s] = word;
        bool ready = slot_state_of(word) == SLOT_READY;
        if (ready && (slot_state_of(before) != SLOT_READY || slot_generation_of(word) != slot_generation_of(before)))
            check_slot(sim, s);
    }
    check_pins(sim);
}

static void check_seat(const struct simulation *sim, uint32_t s)
{
    static const enum slot_state states[] = {
        [PLACE_LOADING] = SLOT_LOADING, [PLACE_READY] = SLOT_READY, [PLACE_FAILED] = SLOT_FAILED};
    const struct placement *placement = sim->placement;
    const struct seat *seat = &placement->seats[s];
    enum slot_state state = slot_state_of(atomic_load(&sim->pool.slots[s].state));
    bool ours = s < placement_capacity(placement);
    switch (seat->state) {
    case SEAT_FREE:
        if (!ours || state != SLOT_EMPTY)
            violated(sim, "slot %u is free in the book, and in state %u", s, state);
        break;
    case SEAT_TAKEN:
        if (seat->expert >= SIM_ALL || placement->places[seat->expert].slot != s ||
            placement->places[seat->expert].state == PLACE_NOWHERE ||
            states[placement->places[seat->expert].state] != state)
            violated(sim, "slot %u is expert %u's in the book, and in state %u", s, seat->expert, state);
        break;
    case SEAT_AWAY:
    default:
        if (ours && state != SLOT_QUARANTINED)
            violated(sim, "slot %u is lost: nobody's in the book, and in state %u", s, state);
        break;
    }
}

/* Guesses keep at most what is left beyond top_k slots; the count is made anew. */
static void check_guesses(const struct simulation *sim)
{
    const struct placement *placement = sim->placement;
    uint32_t guesses = 0;
    for (uint32_t e = 0; e < SIM_ALL; e++) {
        const struct place *place = &placement->places[e];
        bool loading = place->state == PLACE_LOADING, ready = place->state == PLACE_READY;
        guesses += (place->brought == PRIORITY_LOOKAHEAD && (loading || ready)) ||
                   (place->brought == PRIORITY_WARMUP && loading);
    }
    if (guesses != placement->guesses)
        violated(sim, "%u slots are kept by guesses, and %u are counted", guesses, placement->guesses);
}

static void check_map(const struct simulation *sim)
{
    for (uint32_t e = 0; e < SIM_ALL; e++) {
        uint32_t slot = sim->placement->places[e].slot;
        uint64_t entry = atomic_load(&sim->pool.map[e]), expected = POOL_NOWHERE;
        if (slot != NOBODY)
            expected = slot | (uint64_t)slot_generation_of(atomic_load(&sim->pool.slots[slot].state)) << 32;
        if (entry != expected)
            violated(sim, "the map says %llx of expert %u, and the book %llx", (unsigned long long)entry, e,
                     (unsigned long long)expected);
    }
}

struct counted {
    const char *name;
    const _Atomic uint64_t *counter;
    uint64_t *happened;
    uint64_t between; /* how many may have been counted and not happened, or the other way, when a daemon dies */
};

#define COUNTED 6

static void list_counters(struct simulation *sim, struct counted ret_counted[static COUNTED])
{
    const struct iod_line *line = &sim->control->iod;
    struct tally *t = &sim->tally;
    const struct counted counted[COUNTED] = {{"loads", &line->loads, &t->loads, 1},
                                             {"failures", &line->failures, &t->failures, 1},
                                             {"evictions", &line->evictions, &t->evictions, 1},
                                             {"reads", &line->reads, &t->reads, SIM_FLYING},
                                             {"load_bytes", &line->load_bytes, &t->bytes, SIM_FLYING * SIM_BLOB_BYTES},
                                             {"verified_bytes", &line->verified_bytes, &t->verified, 0}};
    memcpy(ret_counted, counted, sizeof(counted));
}

static void check_counters(struct simulation *sim, bool died)
{
    struct counted counted[COUNTED];
    list_counters(sim, counted);
    for (uint32_t i = 0; i < COUNTED; i++) {
        uint64_t value = atomic_load(counted[i].counter), happened = *counted[i].happened;
        uint64_t between = value > happened ? value - happened : happened - value;
        if (between > (died ? counted[i].between : 0))
            violated(sim, "%s: counted %llu, happened %llu", counted[i].name, (unsigned long long)value,
                     (unsigned long long)happened);
        *counted[i].happened = value;
    }
}

void check_counters_of_dead(struct simulation *sim)
{
    check_counters(sim, true);
}

void check_turn(struct simulation *sim, bool may_load)
{
    for (uint32_t s = 0; s < sim->plan.slots; s++)
        check_seat(sim, s);
    check_guesses(sim);
    check_map(sim);
    for (uint32_t s = pool_slots_ready(&sim->pool); s < sim->plan.slots; s++)
        if (slot_state_of(atomic_load(&sim->pool.slots[s].state)) != SLOT_EMPTY)
            violated(sim, "slot %u has no memory, and is in state %u", s,
                     slot_state_of(atomic_load(&sim->pool.slots[s].state)));
    check_counters(sim, false);
    drives_check_turn(sim, may_load);
    check_event(sim);
}

/* All work is done and the daemon sleeps. */
void check_end(struct simulation *sim)
{
    uint32_t target = atomic_load(&sim->control->pool_target), ready = pool_slots_ready(&sim->pool);
    for (uint32_t s = 0; s < sim->plan.slots; s++) {
        uint64_t word = atomic_load(&sim->pool.slots[s].state);
        enum slot_state state = slot_state_of(word);
        if (slot_pins_of(word))
            violated(sim, "at the end slot %u is pinned", s);
        if (state == SLOT_LOADING || state == SLOT_QUARANTINED)
            violated(sim, "at the end slot %u is in state %u", s, state);
    }
    const struct placement *placement = sim->placement;
    if (placement->requests->queued[PRIORITY_WARMUP] && !TAILQ_EMPTY(&placement->free) &&
        placement->guesses + SIM_TOP_K < placement_capacity(placement))
        violated(sim, "at the end %u experts wait to be warmed up, and slots are free",
                 placement->requests->queued[PRIORITY_WARMUP]);
    if (ready != target && atomic_load(&sim->control->iod.pool_refused) != target)
        violated(sim, "at the end the pool has %u slots, and %u are wanted", ready, target);
}
