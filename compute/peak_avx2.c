/* For avx2: vpmaddubsw; and, for the reference set's build for x86-64-v3, vpmaddwd. */
#include "compute/peak_256.h"
#include "compute/peak_sets.h"

#define DOT_MACS 32u
#define DOT(i) __asm__ volatile("vpmaddubsw %2, %1, %0" : "=x"(acc[i]) : "x"(a), "x"(b));
#define WORD_DOT_MACS 16u
#define WORD_DOT(i) __asm__ volatile("vpmaddwd %2, %1, %0" : "=x"(acc[i]) : "x"(a), "x"(b));

PEAK_LOOP(run_dot, DOT, DOT_MACS)
PEAK_LOOP(run_word_dot, WORD_DOT, WORD_DOT_MACS)
PEAK_LOOP(run_fma, FMA, FMA_MACS)

const struct peak peak_avx2 = {"avx2", "vpmaddubsw ymm", "vfmadd231ps ymm", run_dot, run_fma, read_all};
const struct peak peak_scalar_v3 = {"scalar", "vpmaddwd ymm", "vfmadd231ps ymm", run_word_dot, run_fma, read_all};
