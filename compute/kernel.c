#include "compute/kernel.h"

#include "compute/kernel_scalar.h"

#include <stddef.h>

static bool runs_anywhere(void)
{
    return true;
}

static bool runs_v3(void)
{
#if defined(__x86_64__)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
#else
    return false;
#endif
}

/* In order of preference, last is best. Several entries may serve one setting: the reference is compiled twice. */
static const struct candidate {
    enum kernel_isa isa;
    const struct kernel_set *set;
    bool (*runs)(void);
} candidates[] = {
    {ISA_SCALAR, &kernel_scalar_v2, runs_anywhere},
#ifdef KERNEL_V3
    {ISA_SCALAR, &kernel_scalar_v3, runs_v3},
#endif
};

static const char *const isa_names[ISA_COUNT] = {"auto", "scalar", "avx2", "avx512", "amx"};

int kernel_choose(uint32_t isa, const struct kernel_set **ret_set, struct error *ret_error)
{
    if (isa >= ISA_COUNT)
        return error_set(ret_error, EINVAL, "isa number %u is unknown", isa);
    for (size_t i = sizeof candidates / sizeof candidates[0]; i-- > 0;)
        if ((isa == ISA_AUTO || candidates[i].isa == isa) && candidates[i].runs()) {
            *ret_set = candidates[i].set;
            return 0;
        }
    return error_set(ret_error, ENOTSUP, "isa=%s: this build or this CPU has no such kernel set; use isa=auto", isa_names[isa]);
}

uint32_t kernel_sets(const struct kernel_set **ret_sets, uint32_t size)
{
    uint32_t count = 0;
    for (size_t i = 0; i < sizeof candidates / sizeof candidates[0] && count < size; i++)
        if (candidates[i].runs())
            ret_sets[count++] = candidates[i].set;
    return count;
}
