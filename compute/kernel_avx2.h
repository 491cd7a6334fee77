/* The two builds of kernel_avx2.c: plain, and with AVX-VNNI. The setting isa=avx2 takes the better one that runs. */
#pragma once

#include "compute/kernel.h"

extern const struct kernel_set kernel_avx2, kernel_avxvnni;
