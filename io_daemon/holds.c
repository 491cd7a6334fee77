#include "io_daemon/holds.h"

#include <stdlib.h>

int holds_open(struct control *control, struct placement *placement, struct requests *requests, struct holds *ret_holds,
               struct error *ret_error)
{
    *ret_holds = (struct holds){.control = control, .placement = placement, .requests = requests};
    ret_holds->held = calloc(HOLD_WORDS, sizeof(*ret_holds->held));
    return ret_holds->held ? 0 : error_set(ret_error, ENOMEM, "book of held experts: out of memory");
}

static void hold_one(struct holds *holds, uint32_t expert, bool held)
{
    uint64_t bit = UINT64_C(1) << expert % 64;
    if (held == ((holds->held[expert / 64] & bit) != 0))
        return;
    holds->held[expert / 64] ^= bit;
    placement_hold(holds->placement, expert, held);
    if (held && placement_find(holds->placement, expert) == PLACE_NOWHERE)
        requests_warm(holds->requests, expert);
}

void holds_keep(struct holds *holds, uint32_t slots)
{
    uint32_t changed = atomic_load_explicit(&holds->control->holds_changed, memory_order_acquire), held = 0;
    if (holds->opened && changed == holds->seen && slots == holds->slots)
        return;
    for (uint32_t e = 0; e < holds->placement->pool->expert_count; e++) {
        uint64_t word = atomic_load_explicit(&holds->control->holds[e / 64], memory_order_relaxed);
        bool wanted = (word >> e % 64 & 1) && held < slots / 2;
        held += wanted;
        hold_one(holds, e, wanted);
    }
    holds->opened = true;
    holds->seen = changed;
    holds->slots = slots;
}

void holds_close(struct holds *holds)
{
    free(holds->held);
    holds->held = NULL;
}
