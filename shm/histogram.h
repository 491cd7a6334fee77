/* Counts by powers of two, for latencies in microseconds: bucket b counts values below 2^b and, but for bucket 0, from
 * 2^(b-1) on; the last one everything above. One writer, any reader, at any time. */
#pragma once

#include <stdatomic.h>
#include <stdint.h>

#define HISTOGRAM_BUCKETS 32u

struct histogram {
    _Atomic uint64_t count[HISTOGRAM_BUCKETS]; /* relaxed */
};

/* Constant time. Thread: the one writer. */
static inline void histogram_add(struct histogram *histogram, uint64_t value)
{
    uint32_t bucket = value ? 64u - (uint32_t)__builtin_clzll(value) : 0;
    bucket = bucket < HISTOGRAM_BUCKETS ? bucket : HISTOGRAM_BUCKETS - 1;
    atomic_fetch_add_explicit(&histogram->count[bucket], 1, memory_order_relaxed);
}

/* A value that at least `share` (0 to 1) of all counted ones do not exceed: the upper bound of their bucket, so at most
 * twice too large. 0 when nothing was counted. Any thread. */
static inline uint64_t histogram_percentile(const struct histogram *histogram, double share)
{
    uint64_t counts[HISTOGRAM_BUCKETS], all = 0, below = 0;
    for (uint32_t b = 0; b < HISTOGRAM_BUCKETS; b++)
        all += counts[b] = atomic_load_explicit(&histogram->count[b], memory_order_relaxed);
    for (uint32_t b = 0; b < HISTOGRAM_BUCKETS && all; b++) {
        below += counts[b];
        if ((double)below >= share * (double)all)
            return b ? (UINT64_C(1) << b) - 1 : 0;
    }
    return 0;
}
