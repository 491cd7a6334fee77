/* What this CPU can do and this kernel saves for a thread: what decides which kernel sets run. */
#pragma once

#include <stddef.h>
#include <stdint.h>

enum cpu_feature {
    CPU_AVX,
    CPU_AVX2,
    CPU_FMA,
    CPU_F16C,
    CPU_BMI1,
    CPU_BMI2,
    CPU_LZCNT,
    CPU_MOVBE,
    CPU_AVX_VNNI,
    CPU_AVX512F,
    CPU_AVX512CD,
    CPU_AVX512BW,
    CPU_AVX512DQ,
    CPU_AVX512VL,
    CPU_AVX512_VNNI,
    CPU_AMX_TILE,
    CPU_AMX_INT8,
    CPU_YMM_STATE, /* the kernel saves these registers (XCR0) */
    CPU_ZMM_STATE,
    CPU_TILE_STATE,
    CPU_TILE_PERMISSION, /* and lets this process use them */
    CPU_FEATURES
};

/* Bits 1 << feature, from CPUID and XCR0. Where there are tiles, asks the kernel for the permission to use them, which then holds for
 * all threads of the process. 0 on other machines than x86-64. Any thread. */
uint32_t cpu_features(void);

/* The names of a set of features, as "AVX2, FMA"; cut where `size` ends. */
void cpu_feature_names(uint32_t features, char *ret_text, size_t size);
