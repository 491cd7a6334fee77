#include "shm/lru.h"

uint32_t lru_victim(const struct lru_candidate *candidates, uint32_t count)
{
    uint32_t victim = LRU_NONE;
    for (uint32_t i = 0; i < count; i++) {
        if (candidates[i].evictable && (victim == LRU_NONE || candidates[i].used < candidates[victim].used))
            victim = i;
    }
    return victim;
}
