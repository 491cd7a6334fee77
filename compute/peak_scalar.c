/* For the reference set: pmaddwd, and a multiplication and an addition for want of fma. */
#include "compute/peak_sets.h"

#include <emmintrin.h>

#define VECTOR __m128i
#define DOT_MACS 8u
#define FMA_MACS 4u
#define DOT(i) __asm__ volatile("movdqa %1, %0\n\tpmaddwd %2, %0" : "=&x"(acc[i]) : "x"(a), "x"(b));
#define FMA(i) __asm__ volatile("movaps %1, %0\n\tmulps %2, %0\n\taddps %2, %0" : "=&x"(acc[i]) : "x"(a), "x"(b));
#define LOAD(p) _mm_load_si128((const __m128i *)(const void *)(p))
#define OR _mm_or_si128
#define FOLD(x) ((uint64_t)_mm_cvtsi128_si64(_mm_or_si128(x, _mm_unpackhi_epi64(x, x))))

#include "compute/peak_loops.h"

PEAK_LOOP(run_dot, DOT, DOT_MACS)
PEAK_LOOP(run_fma, FMA, FMA_MACS)

const struct peak peak_scalar_v2 = {"scalar", "pmaddwd xmm", "mulps, addps xmm", run_dot, run_fma, read_all};
