#include "io_daemon/holds.h"

#include <stdlib.h>
#include <string.h>

int holds_open(struct control *control, struct placement *placement, struct requests *requests, struct holds *ret_holds,
               struct error *ret_error)
{
    *ret_holds = (struct holds){.control = control, .placement = placement, .requests = requests};
    ret_holds->held = calloc(HOLD_WORDS, sizeof(*ret_holds->held));
    ret_holds->keep = calloc(HOLD_WORDS, sizeof(*ret_holds->keep));
    ret_holds->wishes = calloc(placement->pool->expert_count, sizeof(*ret_holds->wishes));
    if (!ret_holds->held || !ret_holds->keep || !ret_holds->wishes)
        return error_set(ret_error, ENOMEM, "book of held experts: out of memory");
    return 0;
}

static bool is_set(const uint64_t *bits, uint32_t expert)
{
    return bits[expert / 64] >> expert % 64 & 1;
}

static void hold_one(struct holds *holds, uint32_t expert, bool held)
{
    if (held == is_set(holds->held, expert))
        return;
    holds->held[expert / 64] ^= UINT64_C(1) << expert % 64;
    placement_hold(holds->placement, expert, held);
    if (held && placement_find(holds->placement, expert) == PLACE_NOWHERE)
        requests_warm(holds->requests, expert);
}

/* Into `keep`: what the user wants, at most so many of it. Returns how many. */
static uint32_t choose(struct holds *holds, uint32_t most)
{
    uint32_t count = 0;
    for (uint32_t e = 0; e < holds->placement->pool->expert_count; e++) {
        uint64_t word = atomic_load_explicit(&holds->control->holds[e / 64], memory_order_relaxed);
        if (word >> e % 64 & 1)
            holds->wishes[count++] = (struct warmth){lfru_heat(holds->placement->lfru, e), e};
    }
    if (count > most) {
        sort_warmest(holds->wishes, count);
        count = most;
    }
    memset(holds->keep, 0, HOLD_WORDS * sizeof(*holds->keep));
    for (uint32_t i = 0; i < count; i++)
        holds->keep[holds->wishes[i].expert / 64] |= UINT64_C(1) << holds->wishes[i].expert % 64;
    return count;
}

void holds_keep(struct holds *holds, uint32_t slots)
{
    uint32_t changed = atomic_load_explicit(&holds->control->holds_changed, memory_order_acquire);
    if (holds->opened && changed == holds->seen && slots == holds->slots)
        return;
    uint32_t count = choose(holds, slots / 2);
    for (uint32_t e = 0; e < holds->placement->pool->expert_count; e++)
        hold_one(holds, e, is_set(holds->keep, e));
    atomic_store_explicit(&holds->control->iod.held, count, memory_order_relaxed);
    holds->opened = true;
    holds->seen = changed;
    holds->slots = slots;
}

void holds_close(struct holds *holds)
{
    free(holds->held);
    free(holds->keep);
    free(holds->wishes);
    holds->held = holds->keep = NULL;
    holds->wishes = NULL;
}
