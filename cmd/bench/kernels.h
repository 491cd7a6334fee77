/* One kernel of one set, ready to be measured. */
#pragma once

#include "cmd/bench/memory.h"
#include "compute/kernel.h"

enum bench_bound {
    BOUND_READ,     /* by the bandwidth of all threads */
    BOUND_READ_ONE, /* of one */
    BOUND_DOT,      /* by the set's dot instruction */
    BOUND_FMA,      /* by its f32 multiply-add */
};

/* What a kernel is measured on: `rows` activation rows; weights [n, k], or what the case says. */
struct bench_case {
    const char *name;
    enum bench_bound bound;
    uint32_t rows, n, k;
    /* Makes what one measurement needs. ret_item_bytes, ret_item_macs: of one item, by all threads. */
    int (*open)(const struct bench_case *which, const struct kernel_set *set, const struct bench_memory *memory,
                void **ret_context, double *ret_item_bytes, double *ret_item_macs, struct error *ret_error);
    bench_work *work;
    void (*close)(void *context);
};

extern const struct bench_case bench_cases[];
extern const size_t bench_case_count;
