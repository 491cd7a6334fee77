/* The eviction policy: pure functions of numbers, no clock, no I/O, no globals; the pool's owner feeds it and obeys.
 *
 * Least recently used: an expert that no step has touched for longest is the one to give away. `used` is the tick (a
 * count of steps and layers) of its last pin. What must not go (pinned, wanted and not yet fetched, loading) the caller
 * marks as not evictable. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

struct lru_candidate {
    uint64_t used;
    bool evictable;
};

#define LRU_NONE UINT32_MAX

/* Index of the candidate to evict: evictable, smallest `used`, ties to the lower index; LRU_NONE if there is none. */
uint32_t lru_victim(const struct lru_candidate *candidates, uint32_t count);
