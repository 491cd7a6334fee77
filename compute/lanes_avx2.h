/* lanes.h in two registers of AVX2, with FMA and F16C. */
#pragma once

#include <immintrin.h>

#define DOT_TILE 2u /* so many rows by so many others have their dot products in registers */

struct lanes {
    __m256 part[2];
};
struct integer_lanes {
    __m256i part[2]; /* a lane: a number, two int16 or four bytes */
};

static inline struct lanes lanes_set(float x)
{
    return (struct lanes){{_mm256_set1_ps(x), _mm256_set1_ps(x)}};
}
static inline struct lanes lanes_load(const float *x)
{
    return (struct lanes){{_mm256_loadu_ps(x), _mm256_loadu_ps(x + 8)}};
}
static inline void lanes_store(struct lanes x, float *ret_y)
{
    _mm256_storeu_ps(ret_y, x.part[0]);
    _mm256_storeu_ps(ret_y + 8, x.part[1]);
}
static inline struct lanes lanes_load_f16(const uint16_t *x)
{
    return (struct lanes){{_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)x)),
                           _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)(x + 8)))}};
}
static inline __m256 avx2_load_bf16(const uint16_t *x)
{
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(const void *)x));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
static inline struct lanes lanes_load_bf16(const uint16_t *x)
{
    return (struct lanes){{avx2_load_bf16(x), avx2_load_bf16(x + 8)}};
}
static inline void lanes_store_f16(struct lanes x, uint16_t *ret_y)
{
    _mm_storeu_si128((__m128i *)(void *)ret_y, _mm256_cvtps_ph(x.part[0], _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128((__m128i *)(void *)(ret_y + 8), _mm256_cvtps_ph(x.part[1], _MM_FROUND_TO_NEAREST_INT));
}
static inline struct lanes lanes_fma(struct lanes a, struct lanes b, struct lanes c)
{
    return (struct lanes){
        {_mm256_fmadd_ps(a.part[0], b.part[0], c.part[0]), _mm256_fmadd_ps(a.part[1], b.part[1], c.part[1])}};
}
static inline struct lanes lanes_multiply(struct lanes a, struct lanes b)
{
    return (struct lanes){{_mm256_mul_ps(a.part[0], b.part[0]), _mm256_mul_ps(a.part[1], b.part[1])}};
}
static inline struct lanes lanes_add(struct lanes a, struct lanes b)
{
    return (struct lanes){{_mm256_add_ps(a.part[0], b.part[0]), _mm256_add_ps(a.part[1], b.part[1])}};
}
static inline struct lanes lanes_maximum(struct lanes a, struct lanes b) /* a > b ? a : b */
{
    return (struct lanes){{_mm256_max_ps(a.part[0], b.part[0]), _mm256_max_ps(a.part[1], b.part[1])}};
}
static inline struct lanes lanes_magnitude(struct lanes x)
{
    __m256 mask = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    return (struct lanes){{_mm256_and_ps(x.part[0], mask), _mm256_and_ps(x.part[1], mask)}};
}
/* The greater of numbers without a sign, by their bits: beside what is no number, all others are less. */
static inline struct lanes lanes_greater_magnitude(struct lanes a, struct lanes b)
{
    for (unsigned i = 0; i < 2; i++)
        a.part[i] =
            _mm256_castsi256_ps(_mm256_max_epi32(_mm256_castps_si256(a.part[i]), _mm256_castps_si256(b.part[i])));
    return a;
}
static inline float lanes_greatest_magnitude(struct lanes x)
{
    __m256i eight = _mm256_max_epi32(_mm256_castps_si256(x.part[0]), _mm256_castps_si256(x.part[1]));
    __m128i four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    __m128i two = _mm_max_epi32(four, _mm_unpackhi_epi64(four, four));
    return _mm_cvtss_f32(_mm_castsi128_ps(_mm_max_epi32(two, _mm_shuffle_epi32(two, 1))));
}
/* The 16 lanes of a sum as one number: lane l += lane l + 8, then + 4, + 2, + 1. */
static inline float lanes_sum(struct lanes x)
{
    __m256 eight = _mm256_add_ps(x.part[0], x.part[1]);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
static inline void lanes_sum_tile(struct lanes x[DOT_TILE][DOT_TILE], float ret_sums[DOT_TILE][DOT_TILE])
{
    for (unsigned i = 0; i < DOT_TILE; i++)
        for (unsigned j = 0; j < DOT_TILE; j++)
            ret_sums[i][j] = lanes_sum(x[i][j]);
}
static inline float lanes_most(struct lanes x)
{
    __m256 eight = _mm256_max_ps(x.part[0], x.part[1]);
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
static inline struct lanes lanes_of_integers(struct integer_lanes x)
{
    return (struct lanes){{_mm256_cvtepi32_ps(x.part[0]), _mm256_cvtepi32_ps(x.part[1])}};
}
/* The nearest whole numbers (ties to even) of 64 numbers from -127 to 127, as bytes; returns their sum. What is no number
 * becomes one from -127 to 127 all the same. */
static inline int32_t lanes_store_bytes(const struct lanes x[64 / LANES], int8_t *ret_y)
{
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7); /* packing stays inside 128 bits */
    __m256i sum = _mm256_setzero_si256();
    for (unsigned i = 0; i < 2; i++) {
        __m256i low = _mm256_packs_epi32(_mm256_cvtps_epi32(x[2 * i].part[0]), _mm256_cvtps_epi32(x[2 * i].part[1]));
        __m256i high =
            _mm256_packs_epi32(_mm256_cvtps_epi32(x[2 * i + 1].part[0]), _mm256_cvtps_epi32(x[2 * i + 1].part[1]));
        __m256i bytes = _mm256_max_epi8(_mm256_packs_epi16(low, high), _mm256_set1_epi8(-127));
        _mm256_storeu_si256((__m256i *)(void *)(ret_y + 32 * i), _mm256_permutevar8x32_epi32(bytes, order));
        __m256i positive = _mm256_xor_si256(bytes, _mm256_set1_epi8(-128)); /* 128 too much */
        sum = _mm256_add_epi64(sum, _mm256_sad_epu8(positive, _mm256_setzero_si256()));
    }
    __m128i two = _mm_add_epi64(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
    return _mm_cvtsi128_si32(_mm_add_epi64(two, _mm_unpackhi_epi64(two, two))) - 64 * 128;
}

static inline struct integer_lanes integers_zero(void)
{
    return (struct integer_lanes){{_mm256_setzero_si256(), _mm256_setzero_si256()}};
}
static inline struct integer_lanes integers_load(const void *x)
{
    const __m256i *from = x;
    return (struct integer_lanes){{_mm256_loadu_si256(from), _mm256_loadu_si256(from + 1)}};
}
static inline struct integer_lanes integers_repeat(const int8_t *x) /* four bytes in every lane */
{
    int32_t four;
    memcpy(&four, x, sizeof four);
    return (struct integer_lanes){{_mm256_set1_epi32(four), _mm256_set1_epi32(four)}};
}
static inline struct integer_lanes integers_byte(struct integer_lanes x, int byte) /* one of four bytes as a number */
{
    __m128i shift = _mm_cvtsi32_si128(24 - 8 * byte);
    return (struct integer_lanes){{_mm256_srai_epi32(_mm256_sll_epi32(x.part[0], shift), 24),
                                   _mm256_srai_epi32(_mm256_sll_epi32(x.part[1], shift), 24)}};
}
static inline __m256i avx2_nibbles(__m256i x, int high)
{
    return _mm256_sub_epi8(_mm256_and_si256(high ? _mm256_srli_epi16(x, 4) : x, _mm256_set1_epi8(15)),
                           _mm256_set1_epi8(8));
}
static inline struct integer_lanes integers_nibbles(struct integer_lanes x,
                                                    int high) /* low or high nibbles less 8, as bytes */
{
    return (struct integer_lanes){{avx2_nibbles(x.part[0], high), avx2_nibbles(x.part[1], high)}};
}
static inline struct integer_lanes integers_even(struct integer_lanes x) /* bytes 0, 2, 4, ... as int16 */
{
    return (struct integer_lanes){
        {_mm256_srai_epi16(_mm256_slli_epi16(x.part[0], 8), 8), _mm256_srai_epi16(_mm256_slli_epi16(x.part[1], 8), 8)}};
}
static inline struct integer_lanes integers_odd(struct integer_lanes x)
{
    return (struct integer_lanes){{_mm256_srai_epi16(x.part[0], 8), _mm256_srai_epi16(x.part[1], 8)}};
}
static inline struct integer_lanes integers_dot(struct integer_lanes sum, struct integer_lanes a,
                                                struct integer_lanes b) /* of int16 pairs */
{
    return (struct integer_lanes){{_mm256_add_epi32(sum.part[0], _mm256_madd_epi16(a.part[0], b.part[0])),
                                   _mm256_add_epi32(sum.part[1], _mm256_madd_epi16(a.part[1], b.part[1]))}};
}

/* Floats as unsigned integers of the same order; -0 as 0. */
static inline __m256i avx2_order(__m256 x)
{
    __m256i bits = _mm256_castps_si256(_mm256_add_ps(x, _mm256_setzero_ps()));
    return _mm256_xor_si256(bits, _mm256_or_si256(_mm256_srai_epi32(bits, 31), _mm256_set1_epi32(INT32_MIN)));
}
static inline struct integer_lanes lanes_order(struct lanes x)
{
    return (struct integer_lanes){{avx2_order(x.part[0]), avx2_order(x.part[1])}};
}
static inline struct integer_lanes integers_set(uint32_t x)
{
    return (struct integer_lanes){{_mm256_set1_epi32((int32_t)x), _mm256_set1_epi32((int32_t)x)}};
}
static inline struct integer_lanes integers_count(uint32_t first) /* first, first + 1, ... */
{
    __m256i low = _mm256_add_epi32(_mm256_set1_epi32((int32_t)first), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    return (struct integer_lanes){{low, _mm256_add_epi32(low, _mm256_set1_epi32(8))}};
}
static inline struct integer_lanes integers_and(struct integer_lanes a, struct integer_lanes b)
{
    return (struct integer_lanes){{_mm256_and_si256(a.part[0], b.part[0]), _mm256_and_si256(a.part[1], b.part[1])}};
}
static inline struct integer_lanes integers_shift_right(struct integer_lanes x, int count) /* unsigned */
{
    __m128i shift = _mm_cvtsi32_si128(count);
    return (struct integer_lanes){{_mm256_srl_epi32(x.part[0], shift), _mm256_srl_epi32(x.part[1], shift)}};
}
static inline uint32_t avx2_mask(__m256i low, __m256i high)
{
    return (uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(low)) |
           (uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(high)) << 8;
}
static inline uint32_t integers_equal(struct integer_lanes a, struct integer_lanes b) /* bit l: lane l of a == b */
{
    return avx2_mask(_mm256_cmpeq_epi32(a.part[0], b.part[0]), _mm256_cmpeq_epi32(a.part[1], b.part[1]));
}
static inline uint32_t integers_above(struct integer_lanes a, struct integer_lanes b) /* a > b, unsigned */
{
    __m256i sign = _mm256_set1_epi32(INT32_MIN);
    return avx2_mask(_mm256_cmpgt_epi32(_mm256_xor_si256(a.part[0], sign), _mm256_xor_si256(b.part[0], sign)),
                     _mm256_cmpgt_epi32(_mm256_xor_si256(a.part[1], sign), _mm256_xor_si256(b.part[1], sign)));
}
static inline void integers_store(struct integer_lanes x, uint32_t *ret_y)
{
    _mm256_storeu_si256((__m256i *)(void *)ret_y, x.part[0]);
    _mm256_storeu_si256((__m256i *)(void *)(ret_y + 8), x.part[1]);
}
/* Bytes of four words, those of the mask first. */
static inline __m128i avx2_chosen(__m128i x, uint32_t mask)
{
#define WORD(w) 0x03020100u + 0x04040404u * (w)
    static const uint32_t order[16][4] = {
        {0},
        {WORD(0)},
        {WORD(1)},
        {WORD(0), WORD(1)},
        {WORD(2)},
        {WORD(0), WORD(2)},
        {WORD(1), WORD(2)},
        {WORD(0), WORD(1), WORD(2)},
        {WORD(3)},
        {WORD(0), WORD(3)},
        {WORD(1), WORD(3)},
        {WORD(0), WORD(1), WORD(3)},
        {WORD(2), WORD(3)},
        {WORD(0), WORD(2), WORD(3)},
        {WORD(1), WORD(2), WORD(3)},
        {WORD(0), WORD(1), WORD(2), WORD(3)},
    };
#undef WORD
    return _mm_shuffle_epi8(x, _mm_loadu_si128((const __m128i *)(const void *)order[mask & 15]));
}
/* The lanes of the mask, one behind the other; anything after them, up to 16 in all. */
static inline void integers_store_chosen(struct integer_lanes x, uint32_t mask, uint32_t *ret_y)
{
    const __m128i four[] = {_mm256_castsi256_si128(x.part[0]), _mm256_extracti128_si256(x.part[0], 1),
                            _mm256_castsi256_si128(x.part[1]), _mm256_extracti128_si256(x.part[1], 1)};
    for (unsigned i = 0; i < 4; i++) {
        uint32_t before = mask & ((1u << 4 * i) - 1);
        _mm_storeu_si128((__m128i *)(void *)(ret_y + __builtin_popcount(before)), avx2_chosen(four[i], mask >> 4 * i));
    }
}
