#include "compute/peak_sets.h"

#include <string.h>

const struct peak *peak_find(const char *set)
{
#if defined(__x86_64__)
    static const struct peak *const peaks[] = {&peak_scalar_v2, &peak_avx2, &peak_avxvnni, &peak_avx512, &peak_amx};
    /* The reference set is compiled twice, and kernel_choose takes the build for x86-64-v3 where it runs. */
    if (!strcmp(set, peak_scalar_v3.set) && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return &peak_scalar_v3;
    for (size_t i = 0; i < sizeof peaks / sizeof peaks[0]; i++)
        if (!strcmp(peaks[i]->set, set))
            return peaks[i];
#else
    (void)set;
#endif
    return NULL;
}
