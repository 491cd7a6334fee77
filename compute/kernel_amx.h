/* The AMX set. The models are for tests: the same source over amx_model.h, for any CPU and for one with AVX-512. */
#pragma once

#include "compute/kernel.h"

extern const struct kernel_set kernel_amx, kernel_amx_model, kernel_amx_model_avx512;
