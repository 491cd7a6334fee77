/* Sixteen f32 lanes, and sixteen words of integers beside them: what the kernels are written over (kernel_lanes.h).
 * The same operations in every build; only how they are spelled differs: one register of AVX-512, two of AVX2, or an
 * array that a compiler for any machine makes the best of. Each function is one IEEE operation a lane, so all builds
 * give the same bits. */
#pragma once

#include "compute/math_inline.h"

#define LANES 16u

/* A float as an unsigned integer of the same order; -0 as 0. */
static inline uint32_t order_of(float x)
{
    uint32_t bits = bits_of_float(x + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
    #include "compute/lanes_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
    #include "compute/lanes_avx2.h"
#else
    #include "compute/lanes_array.h"
#endif

/* The last n % 16 elements of a vector; the lanes beyond get `fill`. */
static inline struct lanes lanes_load_tail(const float *x, unsigned count, float fill)
{
    float lane[LANES];
    for (unsigned l = 0; l < LANES; l++)
        lane[l] = l < count ? x[l] : fill;
    return lanes_load(lane);
}
