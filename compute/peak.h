/* The most that this CPU can do, measured with the instructions of one kernel set: what benchmarks hold the kernels
 * against. Loops without dependencies and without memory for the arithmetic, loops without arithmetic for the
 * memory. Any thread. */
#pragma once

#include <stddef.h>
#include <stdint.h>

struct peak {
    const char *set;       /* name of the kernel set in compute/kernel.h */
    const char *dot, *fma; /* the instructions, for people */
    /* Runs `rounds` rounds and returns the multiply-accumulates made: int8 products into int32 (or on the way
     * there); f32. */
    uint64_t (*run_dot)(uint64_t rounds);
    uint64_t (*run_fma)(uint64_t rounds);
    /* Reads `bytes` (a multiple of 1024, 64-aligned) once, in lines of 64 bytes, as `streams` runs side by side (1,
     * 2, 4 or 8). Returns a number that depends on all of them. */
    uint64_t (*read)(const void *from, size_t bytes, unsigned streams);
};

/* The loops for a kernel set, by its name; NULL where this build has none. The CPU must run the set. */
const struct peak *peak_find(const char *set);
