/* Weights in the threads' own memory, larger than any cache, and the bandwidth with which they can be read. */
#pragma once

#include "cmd/bench/bench.h"
#include "compute/peak.h"

#define BENCH_WEIGHT_BYTES ((uint64_t)1200 << 20) /* of all threads: over 1 GB of quanta */

/* Each thread has touched its own part first, so that it lies on its node, as a worker's rows do. -EINTR: a signal came. */
struct bench_memory {
    unsigned threads;
    size_t bytes, scale_bytes; /* of a thread's part; scales: f16 from 1/1024 on, a 16th of the quanta */
    uint8_t **quanta;          /* [threads][bytes], every byte from -127 to 127 */
    uint16_t **scales;         /* [threads][scale_bytes / 2] */
};

int bench_memory_open(struct bench_team *team, uint64_t bytes, struct bench_memory *ret_memory,
                      struct error *ret_error);
void bench_memory_close(struct bench_memory *memory);

/* Reading it with the widest loads and the best number of streams. */
struct bench_reading {
    const struct bench_memory *memory;
    const struct peak *peak;
    unsigned streams;
    unsigned readers; /* threads that read; the others look on */
    uint64_t *seen;   /* [threads]: keeps the loads alive */
};

/* Finds the best loop and number of streams, with `readers` of the team's threads, each run taking about `seconds`.
 * -EINTR: a signal came.
 * *ret_load is the load to measure; it points to *ret_reading, which bench_reading_close frees. */
int bench_reading_open(struct bench_team *team, const struct bench_memory *memory, unsigned readers, double seconds,
                       struct bench_reading *ret_reading, struct bench_load *ret_load, struct error *ret_error);
void bench_reading_close(struct bench_reading *reading);
