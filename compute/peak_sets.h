/* The builds of peak_<set>.c. */
#pragma once

#include "compute/peak.h"

extern const struct peak peak_scalar_v2, peak_scalar_v3, peak_avx2, peak_avxvnni, peak_avx512, peak_amx;
