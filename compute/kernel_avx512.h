/* The AVX-512 VNNI set. */
#pragma once

#include "compute/kernel.h"

extern const struct kernel_set kernel_avx512;
