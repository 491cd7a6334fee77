/* lanes.h in one register of AVX-512 (F, BW, DQ, VL). */
#pragma once

#include <immintrin.h>

#define DOT_TILE 4u /* so many rows by so many others have their dot products in registers */

struct lanes {
    __m512 all;
};
struct integer_lanes {
    __m512i all; /* a lane: a number or four bytes */
};

static inline struct lanes lanes_set(float x)
{
    return (struct lanes){_mm512_set1_ps(x)};
}
static inline struct lanes lanes_load(const float *x)
{
    return (struct lanes){_mm512_loadu_ps(x)};
}
static inline void lanes_store(struct lanes x, float *ret_y)
{
    _mm512_storeu_ps(ret_y, x.all);
}
static inline struct lanes lanes_load_f16(const uint16_t *x)
{
    return (struct lanes){_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)x))};
}
static inline struct lanes lanes_load_bf16(const uint16_t *x)
{
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(const void *)x));
    return (struct lanes){_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
static inline void lanes_store_f16(struct lanes x, uint16_t *ret_y)
{
    _mm256_storeu_si256((__m256i *)(void *)ret_y, _mm512_cvtps_ph(x.all, _MM_FROUND_TO_NEAREST_INT));
}
static inline struct lanes lanes_fma(struct lanes a, struct lanes b, struct lanes c)
{
    return (struct lanes){_mm512_fmadd_ps(a.all, b.all, c.all)};
}
static inline struct lanes lanes_multiply(struct lanes a, struct lanes b)
{
    return (struct lanes){_mm512_mul_ps(a.all, b.all)};
}
static inline struct lanes lanes_add(struct lanes a, struct lanes b)
{
    return (struct lanes){_mm512_add_ps(a.all, b.all)};
}
static inline struct lanes lanes_maximum(struct lanes a, struct lanes b) /* a > b ? a : b */
{
    return (struct lanes){_mm512_max_ps(a.all, b.all)};
}
static inline struct lanes lanes_minimum(struct lanes a, struct lanes b) /* a < b ? a : b */
{
    return (struct lanes){_mm512_min_ps(a.all, b.all)};
}
static inline struct lanes lanes_magnitude(struct lanes x)
{
    return (struct lanes){_mm512_and_ps(x.all, _mm512_castsi512_ps(_mm512_set1_epi32(0x7fffffff)))};
}
/* The 16 lanes of a sum as one number: lane l += lane l + 8, then + 4, + 2, + 1. */
static inline float lanes_sum(struct lanes x)
{
    __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(x.all), _mm512_extractf32x8_ps(x.all, 1));
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
/* All sums of a tile by the same tree at once: each step puts halves of the lanes of two side by side and adds. Sum
 * [m][l] comes out in lane 4 m + l because step by step m is chosen by the place inside 128 bits, so the first step
 * takes the transposed tile. */
static inline void lanes_sum_tile(struct lanes x[DOT_TILE][DOT_TILE], float ret_sums[DOT_TILE][DOT_TILE])
{
    __m512 eight[8], four[4], two[2];
    for (unsigned i = 0; i < 8; i++) {
        __m512 a = x[i % 2 * 2][i / 2].all, b = x[i % 2 * 2 + 1][i / 2].all;
        eight[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    }
    for (unsigned i = 0; i < 4; i++)
        four[i] = _mm512_add_ps(_mm512_shuffle_f32x4(eight[2 * i], eight[2 * i + 1], 0x88),
                                _mm512_shuffle_f32x4(eight[2 * i], eight[2 * i + 1], 0xdd));
    for (unsigned i = 0; i < 2; i++)
        two[i] = _mm512_add_ps(_mm512_shuffle_ps(four[2 * i], four[2 * i + 1], 0x44),
                               _mm512_shuffle_ps(four[2 * i], four[2 * i + 1], 0xee));
    _mm512_storeu_ps(&ret_sums[0][0],
                     _mm512_add_ps(_mm512_shuffle_ps(two[0], two[1], 0x88), _mm512_shuffle_ps(two[0], two[1], 0xdd)));
}
static inline float lanes_most(struct lanes x)
{
    return _mm512_reduce_max_ps(x.all);
}
static inline struct lanes lanes_of_integers(struct integer_lanes x)
{
    return (struct lanes){_mm512_cvtepi32_ps(x.all)};
}
/* Whole numbers from -128 to 127 as bytes. */
static inline void lanes_store_bytes(struct lanes x, int8_t *ret_y)
{
    _mm_storeu_si128((__m128i *)(void *)ret_y, _mm512_cvtepi32_epi8(_mm512_cvttps_epi32(x.all)));
}

static inline struct integer_lanes integers_load(const void *x)
{
    return (struct integer_lanes){_mm512_loadu_si512(x)};
}
static inline struct integer_lanes integers_byte(struct integer_lanes x, int byte) /* one of four bytes as a number */
{
    return (struct integer_lanes){_mm512_srai_epi32(_mm512_sll_epi32(x.all, _mm_cvtsi32_si128(24 - 8 * byte)), 24)};
}
static inline struct integer_lanes integers_nibbles(struct integer_lanes x,
                                                    int high) /* low or high nibbles less 8, as bytes */
{
    __m512i shifted = high ? _mm512_srli_epi16(x.all, 4) : x.all;
    return (struct integer_lanes){
        _mm512_sub_epi8(_mm512_and_si512(shifted, _mm512_set1_epi8(15)), _mm512_set1_epi8(8))};
}
