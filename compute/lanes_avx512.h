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
static inline struct lanes lanes_magnitude(struct lanes x)
{
    return (struct lanes){_mm512_and_ps(x.all, _mm512_castsi512_ps(_mm512_set1_epi32(0x7fffffff)))};
}
/* The greater of numbers without a sign, by their bits: beside what is no number, all others are less. */
static inline struct lanes lanes_greater_magnitude(struct lanes a, struct lanes b)
{
    return (struct lanes){
        _mm512_castsi512_ps(_mm512_max_epi32(_mm512_castps_si512(a.all), _mm512_castps_si512(b.all)))};
}
static inline float lanes_greatest_magnitude(struct lanes x)
{
    return float_of_bits((uint32_t)_mm512_reduce_max_epi32(_mm512_castps_si512(x.all)));
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
/* The nearest whole numbers (ties to even) of 64 numbers from -127 to 127, as bytes; returns their sum. What is no number
 * becomes one from -127 to 127 all the same. */
static inline int32_t lanes_store_bytes(const struct lanes x[64 / LANES], int8_t *ret_y)
{
    /* packing stays inside 128 bits */
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    __m512i low = _mm512_packs_epi32(_mm512_cvtps_epi32(x[0].all), _mm512_cvtps_epi32(x[1].all));
    __m512i high = _mm512_packs_epi32(_mm512_cvtps_epi32(x[2].all), _mm512_cvtps_epi32(x[3].all));
    __m512i bytes = _mm512_max_epi8(_mm512_packs_epi16(low, high), _mm512_set1_epi8(-127));
    _mm512_storeu_si512(ret_y, _mm512_permutexvar_epi32(order, bytes));
    __m512i positive = _mm512_xor_si512(bytes, _mm512_set1_epi8(-128)); /* 128 too much */
    __m512i sum = _mm512_sad_epu8(positive, _mm512_setzero_si512());
    __m256i four = _mm256_add_epi64(_mm512_castsi512_si256(sum), _mm512_extracti64x4_epi64(sum, 1));
    __m128i two = _mm_add_epi64(_mm256_castsi256_si128(four), _mm256_extracti128_si256(four, 1));
    return _mm_cvtsi128_si32(_mm_add_epi64(two, _mm_unpackhi_epi64(two, two))) - 64 * 128;
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

/* Floats as unsigned integers of the same order; -0 as 0. */
static inline struct integer_lanes lanes_order(struct lanes x)
{
    __m512i bits = _mm512_castps_si512(_mm512_add_ps(x.all, _mm512_setzero_ps()));
    __m512i flip = _mm512_or_si512(_mm512_srai_epi32(bits, 31), _mm512_set1_epi32(INT32_MIN));
    return (struct integer_lanes){_mm512_xor_si512(bits, flip)};
}
static inline struct integer_lanes integers_set(uint32_t x)
{
    return (struct integer_lanes){_mm512_set1_epi32((int32_t)x)};
}
static inline struct integer_lanes integers_count(uint32_t first) /* first, first + 1, ... */
{
    return (struct integer_lanes){_mm512_add_epi32(
        _mm512_set1_epi32((int32_t)first), _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15))};
}
static inline struct integer_lanes integers_and(struct integer_lanes a, struct integer_lanes b)
{
    return (struct integer_lanes){_mm512_and_si512(a.all, b.all)};
}
static inline struct integer_lanes integers_shift_right(struct integer_lanes x, int count) /* unsigned */
{
    return (struct integer_lanes){_mm512_srl_epi32(x.all, _mm_cvtsi32_si128(count))};
}
static inline uint32_t integers_equal(struct integer_lanes a, struct integer_lanes b) /* bit l: lane l of a == b */
{
    return _mm512_cmpeq_epi32_mask(a.all, b.all);
}
static inline uint32_t integers_above(struct integer_lanes a, struct integer_lanes b) /* a > b, unsigned */
{
    return _mm512_cmpgt_epu32_mask(a.all, b.all);
}
static inline void integers_store(struct integer_lanes x, uint32_t *ret_y)
{
    _mm512_storeu_si512(ret_y, x.all);
}
/* The lanes of the mask, one behind the other; anything after them, up to 16 in all. */
static inline void integers_store_chosen(struct integer_lanes x, uint32_t mask, uint32_t *ret_y)
{
    _mm512_storeu_si512(ret_y, _mm512_maskz_compress_epi32((__mmask16)mask, x.all));
}
