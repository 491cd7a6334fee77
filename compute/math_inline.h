/* The functions of math.h that kernels need inside their loops, as code to inline: every instruction set that includes
 * this computes the same bits, because each line is one IEEE operation (+ - * fma, integer shifts) and contraction is
 * off. */
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

static inline float float_of_bits(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline uint32_t bits_of_float(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* e^x as 2^n * e^r, n = x / ln 2 to the nearest integer, |r| <= 0.347: r in two steps (ln 2 = 0x1.62e4p-1 + the rest),
 * e^r by its Taylor polynomial of degree 7 in Horner form, then two exact powers of two, so that a subnormal result is
 * rounded once.
 *
 * No branch but selects: a loop over this function can be made of vectors. */
static inline float inline_exp(float x)
{
    const float shift = 0x1.8p23f;         /* adding and subtracting it rounds to the nearest integer, ties to even */
    float bounded = x < 89.0f ? x : 89.0f; /* one instruction each; NaN is looked at last */
    bounded = bounded > -104.0f ? bounded : -104.0f;
    float n = (bounded * 0x1.715476p+0f + shift) - shift;
    float r = __builtin_fmaf(n, -0x1.62e4p-1f, bounded);
    r = __builtin_fmaf(n, -0x1.7f7d1cp-20f, r);
    float p = 0x1.a01a02p-13f;                 /* 1/7! */
    p = __builtin_fmaf(p, r, 0x1.6c16c2p-10f); /* 1/6! */
    p = __builtin_fmaf(p, r, 0x1.111112p-7f);  /* 1/5! */
    p = __builtin_fmaf(p, r, 0x1.555556p-5f);  /* 1/4! */
    p = __builtin_fmaf(p, r, 0x1.555556p-3f);  /* 1/3! */
    p = __builtin_fmaf(p, r, 0.5f);
    p = __builtin_fmaf(p, r, 1.0f);
    p = __builtin_fmaf(p, r, 1.0f);
    int32_t power = (int32_t)n;
    int32_t half = power >> 1;
    float low = float_of_bits((uint32_t)(half + 127) << 23);
    float high = float_of_bits((uint32_t)(power - half + 127) << 23);
    float y = (p * low) * high; /* of 89 it overflows to infinity, of -104 it rounds to 0 */
    return x != x ? x : y;
}

/* f16 -> f32: shift into place, then times 2^112 (exact, also for subnormals); infinities and NaN get the full
 * exponent. */
static inline float inline_f16_to_f32(uint16_t x)
{
    uint32_t magnitude = (uint32_t)(x & 0x7fffu) << 13;
    uint32_t bits = bits_of_float(float_of_bits(magnitude) * 0x1p112f);
    bits = magnitude >= 0x0f800000u ? magnitude | 0x7f800000u : bits;
    return float_of_bits(bits | (uint32_t)(x & 0x8000u) << 16);
}

static inline float inline_bf16_to_f32(uint16_t x)
{
    return float_of_bits((uint32_t)x << 16);
}

/* f32 -> f16, round to nearest, ties to even. A normal result: add half of the last place less one (and one more where
 * the last bit kept is odd), then cut. A subnormal one: adding 0.5 puts the last place where f32 itself rounds. */
static inline uint16_t inline_f32_to_f16(float x)
{
    uint32_t bits = bits_of_float(x);
    uint32_t sign = bits >> 16 & 0x8000u;
    uint32_t magnitude = bits & 0x7fffffffu;
    uint32_t normal = (magnitude - 0x38000000u + 0x0fffu + (magnitude >> 13 & 1u)) >> 13;
    uint32_t subnormal = bits_of_float(float_of_bits(magnitude) + 0.5f) - 0x3f000000u;
    uint32_t nan = 0x7e00u | (magnitude >> 13 & 0x3ffu);
    uint32_t half = magnitude < 0x38800000u ? subnormal : normal;
    half = magnitude >= 0x477ff000u ? 0x7c00u : half; /* rounds to 65536 or is infinite */
    half = magnitude > 0x7f800000u ? nan : half;
    return (uint16_t)(sign | half);
}
