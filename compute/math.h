/* The transcendental functions of the forward pass and of the sampler. They use nothing but + - * / sqrt and fma, so every CPU and
 * every C library gives the same bits (glibc's own exp, sin and cos change theirs with the CPU). Any thread. */
#pragma once

#include <stdint.h>

/* e^x, within 2 ulp over the whole range; overflow gives infinity, underflow 0 (no denormals lost: gradual), NaN stays NaN. */
float math_exp(float x);

/* base^exponent for base > 0, in f64. Within 4 ulp for the ranges of rope_theta. */
double math_pow(double base, double exponent);

/* Sine and cosine of x radians, |x| < 2^30, within 2 ulp of f64. */
void math_sincos(double x, double *ret_sin, double *ret_cos);

/* f16 <-> f32, round to nearest even, subnormals, infinities and NaN kept. */
uint16_t math_f32_to_f16(float x);
float math_f16_to_f32(uint16_t x);

/* bf16 -> f32, exact. */
float math_bf16_to_f32(uint16_t x);
