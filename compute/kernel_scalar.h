/* The two builds of kernel_scalar.c. */
#pragma once

#include "compute/kernel.h"

extern const struct kernel_set kernel_scalar_v2, kernel_scalar_v3;
