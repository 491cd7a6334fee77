/* For the 256-bit set of CPUs with AVX-VNNI. */
#include "compute/peak_256.h"
#include "compute/peak_sets.h"

#define DOT_MACS 32u
#define DOT(i) __asm__ volatile("%{vex%} vpdpbusd %2, %1, %0" : "+x"(acc[i]) : "x"(a), "x"(b));

PEAK_LOOP(run_dot, DOT, DOT_MACS)
PEAK_LOOP(run_fma, FMA, FMA_MACS)

const struct peak peak_avxvnni = {"avxvnni", "vpdpbusd ymm", "vfmadd231ps ymm", run_dot, run_fma, read_all};
