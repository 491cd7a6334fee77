#include "compute/cpu.h"

#include <stdbool.h>
#include <stdio.h>

#if defined(__x86_64__)
    #include <cpuid.h>
    #include <sys/syscall.h>
    #include <unistd.h>

    #define PERMISSION_REQUEST 0x1023 /* ARCH_REQ_XCOMP_PERM of arch_prctl(2), asm/prctl.h of Linux 5.16 and later */
    #define TILE_DATA 18              /* its number of the tile registers */
#endif

enum cpuid_register { EAX, EBX, ECX, EDX };

/* Where CPUID says it: Intel SDM, volume 2, CPUID; AMD APM, volume 3, appendix E. Without `name`: not from CPUID. */
static const struct feature {
    const char *name;
    uint32_t leaf, subleaf;
    enum cpuid_register reg;
    uint32_t bit;
} table[CPU_FEATURES] = {
    [CPU_AVX] = {"AVX", 1, 0, ECX, 28},
    [CPU_AVX2] = {"AVX2", 7, 0, EBX, 5},
    [CPU_FMA] = {"FMA", 1, 0, ECX, 12},
    [CPU_F16C] = {"F16C", 1, 0, ECX, 29},
    [CPU_BMI1] = {"BMI1", 7, 0, EBX, 3},
    [CPU_BMI2] = {"BMI2", 7, 0, EBX, 8},
    [CPU_LZCNT] = {"LZCNT", 0x80000001, 0, ECX, 5},
    [CPU_MOVBE] = {"MOVBE", 1, 0, ECX, 22},
    [CPU_AVX_VNNI] = {"AVX-VNNI", 7, 1, EAX, 4},
    [CPU_AVX512F] = {"AVX512F", 7, 0, EBX, 16},
    [CPU_AVX512CD] = {"AVX512CD", 7, 0, EBX, 28},
    [CPU_AVX512BW] = {"AVX512BW", 7, 0, EBX, 30},
    [CPU_AVX512DQ] = {"AVX512DQ", 7, 0, EBX, 17},
    [CPU_AVX512VL] = {"AVX512VL", 7, 0, EBX, 31},
    [CPU_AVX512_VNNI] = {"AVX512-VNNI", 7, 0, ECX, 11},
    [CPU_AMX_TILE] = {"AMX-TILE", 7, 0, EDX, 24},
    [CPU_AMX_INT8] = {"AMX-INT8", 7, 0, EDX, 25},
    [CPU_YMM_STATE] = {.name = "a kernel that saves ymm registers"},
    [CPU_ZMM_STATE] = {.name = "a kernel that saves zmm registers"},
    [CPU_TILE_STATE] = {.name = "a kernel that saves tile registers"},
    [CPU_TILE_PERMISSION] = {.name = "the kernel's permission to use tiles"},
};

#if defined(__x86_64__)
static bool cpuid_has(const struct feature *feature)
{
    uint32_t registers[4];
    return __get_cpuid_count(feature->leaf, feature->subleaf, &registers[EAX], &registers[EBX], &registers[ECX],
                             &registers[EDX]) &&
           registers[feature->reg] >> feature->bit & 1;
}

/* XCR0: which registers the kernel saves. */
static uint64_t saved_state(void)
{
    static const struct feature osxsave = {NULL, 1, 0, ECX, 27};
    uint32_t low, high;
    if (!cpuid_has(&osxsave))
        return 0;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t)high << 32 | low;
}

uint32_t cpu_features(void)
{
    static const struct {
        enum cpu_feature feature;
        uint64_t bits; /* SDM, volume 1, "XCR0" */
    } states[] = {{CPU_YMM_STATE, 0x6}, {CPU_ZMM_STATE, 0xe6}, {CPU_TILE_STATE, 0x60000}};
    uint32_t features = 0;
    for (uint32_t f = 0; f < CPU_FEATURES; f++)
        if (table[f].leaf != 0 && cpuid_has(&table[f]))
            features |= 1u << f;
    uint64_t saved = saved_state();
    for (size_t s = 0; s < sizeof states / sizeof states[0]; s++)
        if ((saved & states[s].bits) == states[s].bits)
            features |= 1u << states[s].feature;
    uint32_t tiles = 1u << CPU_AMX_TILE | 1u << CPU_TILE_STATE;
    if ((features & tiles) == tiles && syscall(SYS_arch_prctl, PERMISSION_REQUEST, TILE_DATA) == 0)
        features |= 1u << CPU_TILE_PERMISSION;
    return features;
}
#else
uint32_t cpu_features(void)
{
    return 0;
}
#endif

void cpu_feature_names(uint32_t features, char *ret_text, size_t size)
{
    size_t used = 0;
    ret_text[0] = '\0';
    for (uint32_t f = 0; f < CPU_FEATURES && used < size; f++)
        if (features >> f & 1)
            used += (size_t)snprintf(ret_text + used, size - used, "%s%s", used ? ", " : "", table[f].name);
}
