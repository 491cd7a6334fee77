/* The pool's words: what shm's own functions do to them, and new names for what would grow for ever. */
#include "tests/model-check/steps.h"

static struct slot slots[SLOTS];
static _Atomic uint64_t map[EXPERTS];
struct pool model_pool = {.slots = slots, .map = map, .slot_count = SLOTS, .expert_count = EXPERTS};

void words_expose(const struct state *s)
{
    for (uint32_t slot = 0; slot < SLOTS; slot++) {
        slots[slot].state = s->word[slot];
        slots[slot].used = s->used[slot];
        slots[slot].expert = s->expert[slot];
    }
    for (uint32_t e = 0; e < EXPERTS; e++)
        map[e] = s->map[e];
}

uint32_t generation_of(uint64_t word)
{
    return slot_generation_of(word);
}

bool change(struct state *s, uint32_t slot, enum slot_state from, enum slot_state to)
{
    _Atomic uint64_t word = s->word[slot];
    int status = slot_change(&word, from, to, generation_of(s->word[slot]), NULL);
    s->word[slot] = word;
    return status == 0;
}

bool pin(struct state *s, uint32_t slot, uint32_t generation)
{
    _Atomic uint64_t word = s->word[slot];
    int status = slot_pin(&word, generation, LEADER);
    s->word[slot] = word;
    return status == 0;
}

void unpin(struct state *s, uint32_t slot)
{
    _Atomic uint64_t word = s->word[slot];
    slot_unpin(&word, LEADER);
    s->word[slot] = word;
}

static void rename_generation(uint8_t slot, uint8_t *generation, uint32_t renamed)
{
    if (slot == renamed)
        *generation = *generation == 2;
}

/* After EMPTY -> LOADING the slot's generation is 2 and all that went by 1 is stale: 1 and 0 again. */
void rename_generations(struct state *s)
{
    for (uint32_t slot = 0; slot < SLOTS; slot++) {
        if (generation_of(s->word[slot]) != 2)
            continue;
        s->word[slot] -= UINT64_C(1) << 32;
        for (uint32_t e = 0; e < EXPERTS; e++) {
            if ((uint32_t)s->map[e] == slot)
                s->map[e] = slot | (uint64_t)(s->map[e] >> 32 == 2) << 32;
            rename_generation(s->leader.slot[e], &s->leader.generation[e], slot);
        }
        rename_generation(s->leader.at_slot, &s->leader.at_generation, slot);
    }
}

/* A new tick of the leader, or a new epoch: what was asked before is void. */
void void_requests(struct state *s)
{
    s->iod.live = 0;
    for (uint32_t i = 0; i < s->ring_count; i++)
        s->ring[i] = NONE;
}

void new_tick(struct state *s)
{
    void_requests(s);
    for (uint32_t slot = 0; slot < SLOTS; slot++)
        s->used[slot] = BEFORE;
    s->leader.failed = 0;
}

enum slot_state state_of(const struct state *s, uint32_t slot)
{
    return slot_state_of(s->word[slot]);
}
