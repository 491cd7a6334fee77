/* What the sets with 256-bit registers have in common. */
#pragma once

#include <immintrin.h>

#define VECTOR __m256i
#define FMA_MACS 8u
#define FMA(i) __asm__ volatile("vfmadd231ps %2, %1, %0" : "+x"(acc[i]) : "x"(a), "x"(b));
#define LOAD(p) _mm256_load_si256((const __m256i *)(const void *)(p))
#define OR _mm256_or_si256
#define FOLD(x)                                                                                                        \
    ((uint64_t)_mm256_extract_epi64(x, 0) | (uint64_t)_mm256_extract_epi64(x, 1) |                                     \
     (uint64_t)_mm256_extract_epi64(x, 2) | (uint64_t)_mm256_extract_epi64(x, 3))

#include "compute/peak_loops.h"
