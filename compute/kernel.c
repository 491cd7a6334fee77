#include "compute/kernel.h"

#include "compute/cpu.h"
#include "compute/kernel_amx.h"
#include "compute/kernel_avx2.h"
#include "compute/kernel_avx512.h"
#include "compute/kernel_scalar.h"
#include "proto/settings.h"

#define BIT(feature) (1u << CPU_##feature)
/* What the flags in meson.build let a compiler use. */
#define NEEDS_V3                                                                                                       \
    (BIT(AVX) | BIT(AVX2) | BIT(FMA) | BIT(F16C) | BIT(BMI1) | BIT(BMI2) | BIT(LZCNT) | BIT(MOVBE) | BIT(YMM_STATE))
#define NEEDS_AVX512                                                                                                   \
    (NEEDS_V3 | BIT(AVX512F) | BIT(AVX512CD) | BIT(AVX512BW) | BIT(AVX512DQ) | BIT(AVX512VL) | BIT(AVX512_VNNI) |      \
     BIT(ZMM_STATE))
#define NEEDS_AMX (NEEDS_AVX512 | BIT(AMX_TILE) | BIT(AMX_INT8) | BIT(TILE_STATE) | BIT(TILE_PERMISSION))

/* In order of preference, last is best. Two builds of one source serve one setting. */
static const struct candidate {
    enum kernel_isa isa;
    const struct kernel_set *set;
    uint32_t needs;
} candidates[] = {
    {ISA_SCALAR, &kernel_scalar_v2, 0},
#if defined(__x86_64__)
    {ISA_SCALAR, &kernel_scalar_v3, NEEDS_V3},
    {ISA_AVX2, &kernel_avx2, NEEDS_V3},
    {ISA_AVX2, &kernel_avxvnni, NEEDS_V3 | BIT(AVX_VNNI)},
    {ISA_AVX512, &kernel_avx512, NEEDS_AVX512},
    {ISA_AMX, &kernel_amx, NEEDS_AMX},
#endif
};
#define CANDIDATES (sizeof candidates / sizeof candidates[0])

static const char *isa_name(uint32_t isa)
{
    return setting_info(SETTING_ISA)->choices[isa];
}

int kernel_choose_for(uint32_t isa, uint32_t features, const struct kernel_set **ret_set, struct error *ret_error)
{
    if (isa >= ISA_COUNT)
        return error_set(ret_error, EINVAL, "isa number %u is unknown", isa);
    uint32_t best = ISA_SCALAR, missing = 0;
    for (size_t i = CANDIDATES; i-- > 0;) {
        const struct candidate *candidate = &candidates[i];
        uint32_t lacks = candidate->needs & ~features;
        if (lacks == 0 && (isa == ISA_AUTO || candidate->isa == isa)) {
            *ret_set = candidate->set;
            return 0;
        }
        if (lacks == 0 && candidate->isa > best)
            best = candidate->isa;
        if (candidate->isa == isa)
            missing = lacks; /* at the end, of the build that asks for least */
    }
    char names[256];
    cpu_feature_names(missing, names, sizeof names);
    return error_set(ret_error, ENOTSUP,
                     "isa=%s: this machine lacks %s; use isa=auto, or isa=%s, the best that runs here", isa_name(isa),
                     missing ? names : "the x86-64 instructions", isa_name(best));
}

int kernel_choose(uint32_t isa, const struct kernel_set **ret_set, struct error *ret_error)
{
    return kernel_choose_for(isa, cpu_features(), ret_set, ret_error);
}

const struct kernel_set *kernel_set_at(uint32_t index, char *ret_missing, size_t size)
{
    if (index >= CANDIDATES)
        return NULL;
    cpu_feature_names(candidates[index].needs & ~cpu_features(), ret_missing, size);
    return candidates[index].set;
}

uint32_t kernel_sets(const struct kernel_set **ret_sets, uint32_t size)
{
    uint32_t count = 0, features = cpu_features();
    for (size_t i = 0; i < CANDIDATES && count < size; i++)
        if ((candidates[i].needs & ~features) == 0)
            ret_sets[count++] = candidates[i].set;
    return count;
}
