/* What the sets with 512-bit registers have in common. */
#pragma once

#include <immintrin.h>

#define VECTOR __m512i
#define FMA_MACS 16u
#define FMA(i) __asm__ volatile("vfmadd231ps %2, %1, %0" : "+v"(acc[i]) : "v"(a), "v"(b));
#define LOAD(p) _mm512_load_si512((const void *)(p))
#define OR _mm512_or_si512
#define FOLD(x) ((uint64_t)_mm512_reduce_or_epi64(x))

#include "compute/peak_loops.h"
