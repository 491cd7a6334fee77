#include "shm/uses.h"

static uint64_t pack(const struct use *use)
{
    return (uint64_t)(use->expert & 0xffffff) | (uint64_t)(use->row & 0x1fff) << 24 | (uint64_t)(use->flags & 7) << 37 |
           (uint64_t)(use->step & 0xffffff) << 40;
}

static struct use unpack(uint64_t entry)
{
    return (struct use){.expert = (uint32_t)(entry & 0xffffff),
                        .row = (uint32_t)(entry >> 24 & 0x1fff),
                        .flags = (uint32_t)(entry >> 37 & 7),
                        .step = (uint32_t)(entry >> 40)};
}

void uses_append(struct use_log *log, const struct use *uses, uint32_t count)
{
    uint64_t at = atomic_load_explicit(&log->end, memory_order_relaxed), end = at + count;
    /* A writer that died in the middle has overwritten more than `end` tells: `begun` goes back only where it makes no sense. */
    uint64_t begun = atomic_load_explicit(&log->begun, memory_order_relaxed);
    if (begun < end || begun - at > USE_ENTRIES)
        begun = end;
    atomic_store_explicit(&log->begun, begun, memory_order_relaxed);
    /* A reader that sees one of the new entries also sees `begun`: fence here, acquire fence there. */
    atomic_thread_fence(memory_order_release);
    for (uint32_t i = 0; i < count; i++)
        atomic_store_explicit(&log->entries[(at + i) % USE_ENTRIES], pack(&uses[i]), memory_order_relaxed);
    atomic_store_explicit(&log->end, end, memory_order_release);
}

uint32_t uses_read(const struct use_log *log, uint64_t *place, struct use *ret_uses, uint32_t most, uint64_t *ret_lost)
{
    uint64_t end = atomic_load_explicit(&log->end, memory_order_acquire), at = *place, lost = 0;
    if (at > end || end - at > USE_ENTRIES) {
        uint64_t oldest = end > USE_ENTRIES ? end - USE_ENTRIES : 0;
        lost = at > end ? 0 : oldest - at; /* a log that went back was begun anew */
        at = oldest;
    }
    uint32_t count = end - at < most ? (uint32_t)(end - at) : most;
    for (uint32_t i = 0; i < count; i++)
        ret_uses[i] = unpack(atomic_load_explicit(&log->entries[(at + i) % USE_ENTRIES], memory_order_relaxed));
    /* What the writer may have overwritten meanwhile is dropped from the front. */
    atomic_thread_fence(memory_order_acquire);
    uint64_t begun = atomic_load_explicit(&log->begun, memory_order_relaxed), torn = 0;
    if (begun > at + USE_ENTRIES)
        torn = begun - USE_ENTRIES - at < count ? begun - USE_ENTRIES - at : count;
    for (uint32_t i = 0; torn > 0 && i + torn < count; i++)
        ret_uses[i] = ret_uses[i + torn];
    *place = at + count;
    *ret_lost = lost + torn;
    return count - (uint32_t)torn;
}

uint64_t uses_end(const struct use_log *log)
{
    return atomic_load_explicit(&log->end, memory_order_acquire);
}
