/* For AVX-512 with VNNI. */
#include "compute/peak_512.h"
#include "compute/peak_sets.h"

#define DOT_MACS 64u
#define DOT(i) __asm__ volatile("vpdpbusd %2, %1, %0" : "+v"(acc[i]) : "v"(a), "v"(b));

PEAK_LOOP(run_dot, DOT, DOT_MACS)
PEAK_LOOP(run_fma, FMA, FMA_MACS)

const struct peak peak_avx512 = {"avx512", "vpdpbusd zmm", "vfmadd231ps zmm", run_dot, run_fma, read_all};
