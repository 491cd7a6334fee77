#include "io_daemon/warmup.h"

#include <stdlib.h>

int warmup_open(struct placement *placement, struct requests *requests, uint32_t slots, struct warmup *ret_warmup,
                struct error *ret_error)
{
    *ret_warmup = (struct warmup){.placement = placement, .requests = requests, .slots = slots};
    ret_warmup->order = calloc(placement->pool->expert_count, sizeof(*ret_warmup->order));
    return ret_warmup->order ? 0 : error_set(ret_error, ENOMEM, "warm-up of the experts: out of memory");
}

void warmup_close(struct warmup *warmup)
{
    free(warmup->order);
    warmup->order = NULL;
}

void warmup_keep(struct warmup *warmup, uint32_t slots)
{
    uint32_t count = 0, before = warmup->slots;
    warmup->slots = slots;
    if (slots <= before)
        return;
    for (uint32_t e = 0; e < warmup->placement->pool->expert_count; e++) {
        float heat = lfru_heat(warmup->placement->lfru, e);
        if (heat > 0 && placement_find(warmup->placement, e) == PLACE_NOWHERE)
            warmup->order[count++] = (struct warmth){heat, e};
    }
    sort_warmest(warmup->order, count);
    for (uint32_t i = 0; i < count; i++)
        requests_warm(warmup->requests, warmup->order[i].expert);
}
