/* Sixteen f32 lanes, and the exact integer dot product of a weight block: what the kernels of the reference set are made of. The same
 * operations in every build; only how they are spelled differs (a compiler for x86-64-v2 calls fmaf, one for v3 has the instruction). */
#pragma once

#include "compute/math_inline.h"

#if defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#endif

#define LANES 16u

#if defined(__AVX2__) && defined(__FMA__)

struct lanes {
    __m256 part[2];
};
struct integer_lanes {
    __m256i part[2];
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
static inline struct lanes lanes_fma(struct lanes a, struct lanes b, struct lanes c)
{
    return (struct lanes){{_mm256_fmadd_ps(a.part[0], b.part[0], c.part[0]), _mm256_fmadd_ps(a.part[1], b.part[1], c.part[1])}};
}
static inline struct lanes lanes_multiply(struct lanes a, struct lanes b)
{
    return (struct lanes){{_mm256_mul_ps(a.part[0], b.part[0]), _mm256_mul_ps(a.part[1], b.part[1])}};
}
static inline struct lanes lanes_add(struct lanes a, struct lanes b)
{
    return (struct lanes){{_mm256_add_ps(a.part[0], b.part[0]), _mm256_add_ps(a.part[1], b.part[1])}};
}
static inline struct lanes lanes_of_integers(struct integer_lanes x)
{
    return (struct lanes){{_mm256_cvtepi32_ps(x.part[0]), _mm256_cvtepi32_ps(x.part[1])}};
}

#define PARTS 2u
typedef __m256i bytes_part; /* 32 bytes: 4 columns of 8 rows */
static inline bytes_part part_zero(void)
{
    return _mm256_setzero_si256();
}
static inline bytes_part part_load(const void *x)
{
    return _mm256_loadu_si256((const __m256i *)x);
}
static inline bytes_part part_repeat(const int8_t *x)
{
    int32_t four;
    memcpy(&four, x, sizeof four);
    return _mm256_set1_epi32(four);
}
static inline bytes_part part_even(bytes_part x) /* bytes 0, 2, 4, ... as int16 */
{
    return _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8);
}
static inline bytes_part part_odd(bytes_part x)
{
    return _mm256_srai_epi16(x, 8);
}
static inline bytes_part part_nibbles(bytes_part x, int high)
{
    bytes_part shifted = high ? _mm256_srli_epi16(x, 4) : x;
    return _mm256_sub_epi8(_mm256_and_si256(shifted, _mm256_set1_epi8(15)), _mm256_set1_epi8(8));
}
static inline bytes_part part_dot(bytes_part sum, bytes_part a, bytes_part b) /* int32 sum += pairs of int16 */
{
    return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b));
}
static inline bytes_part part_column(bytes_part x, int column) /* one of four bytes as int32 */
{
    return _mm256_srai_epi32(_mm256_sll_epi32(x, _mm_cvtsi32_si128(24 - 8 * column)), 24);
}
static inline struct integer_lanes integers_of_parts(const bytes_part *parts)
{
    return (struct integer_lanes){{parts[0], parts[1]}};
}

#else

struct lanes {
    float lane[LANES];
};
struct integer_lanes {
    int32_t lane[LANES];
};

static inline struct lanes lanes_set(float x)
{
    struct lanes y;
    for (unsigned l = 0; l < LANES; l++)
        y.lane[l] = x;
    return y;
}
static inline struct lanes lanes_load(const float *x)
{
    struct lanes y;
    memcpy(y.lane, x, sizeof y.lane);
    return y;
}
static inline void lanes_store(struct lanes x, float *ret_y)
{
    memcpy(ret_y, x.lane, sizeof x.lane);
}
static inline struct lanes lanes_fma(struct lanes a, struct lanes b, struct lanes c)
{
    for (unsigned l = 0; l < LANES; l++)
        c.lane[l] = __builtin_fmaf(a.lane[l], b.lane[l], c.lane[l]);
    return c;
}
static inline struct lanes lanes_multiply(struct lanes a, struct lanes b)
{
    for (unsigned l = 0; l < LANES; l++)
        a.lane[l] = a.lane[l] * b.lane[l];
    return a;
}
static inline struct lanes lanes_add(struct lanes a, struct lanes b)
{
    for (unsigned l = 0; l < LANES; l++)
        a.lane[l] = a.lane[l] + b.lane[l];
    return a;
}
static inline struct lanes lanes_of_integers(struct integer_lanes x)
{
    struct lanes y;
    for (unsigned l = 0; l < LANES; l++)
        y.lane[l] = (float)x.lane[l];
    return y;
}

#define PARTS 1u
typedef struct {
    int32_t word[LANES];
} bytes_part; /* 64 bytes: 4 columns of 16 rows, a row a word; or two int16 a word; or an int32 */
static inline bytes_part part_zero(void)
{
    return (bytes_part){{0}};
}
static inline bytes_part part_load(const void *x)
{
    bytes_part y;
    memcpy(&y, x, sizeof y);
    return y;
}
static inline bytes_part part_repeat(const int8_t *x)
{
    bytes_part y;
    int32_t four;
    memcpy(&four, x, sizeof four);
    for (unsigned l = 0; l < LANES; l++)
        y.word[l] = four;
    return y;
}
static inline int32_t word_byte(int32_t word, int byte) /* signed */
{
    return (int32_t)((uint32_t)word << (24 - 8 * byte)) >> 24;
}
static inline int32_t word_of_halves(int32_t low, int32_t high)
{
    return (int32_t)(((uint32_t)low & 0xffffu) | (uint32_t)high << 16);
}
static inline bytes_part part_even(bytes_part x)
{
    for (unsigned l = 0; l < LANES; l++)
        x.word[l] = word_of_halves(word_byte(x.word[l], 0), word_byte(x.word[l], 2));
    return x;
}
static inline bytes_part part_odd(bytes_part x)
{
    for (unsigned l = 0; l < LANES; l++)
        x.word[l] = word_of_halves(word_byte(x.word[l], 1), word_byte(x.word[l], 3));
    return x;
}
static inline bytes_part part_nibbles(bytes_part x, int high)
{
    for (unsigned l = 0; l < LANES; l++) {
        uint32_t nibbles = (uint32_t)x.word[l] >> (high ? 4 : 0) & 0x0f0f0f0fu;
        x.word[l] = (int32_t)(((nibbles | 0x80808080u) - 0x08080808u) ^ 0x80808080u); /* bytes less 8, without a borrow between them */
    }
    return x;
}
static inline bytes_part part_dot(bytes_part sum, bytes_part a, bytes_part b)
{
    for (unsigned l = 0; l < LANES; l++)
        sum.word[l] += (int16_t)(a.word[l] & 0xffff) * (int16_t)(b.word[l] & 0xffff) + (a.word[l] >> 16) * (b.word[l] >> 16);
    return sum;
}
static inline bytes_part part_column(bytes_part x, int column)
{
    for (unsigned l = 0; l < LANES; l++)
        x.word[l] = word_byte(x.word[l], column);
    return x;
}
static inline struct integer_lanes integers_of_parts(const bytes_part *parts)
{
    struct integer_lanes y;
    memcpy(y.lane, parts, sizeof y.lane);
    return y;
}
#endif

/* The 16 lanes of a sum as one number: lane l += lane l + 8, then + 4, + 2, + 1. */
static inline float lanes_sum(struct lanes x)
{
    float lane[LANES];
    lanes_store(x, lane);
    for (unsigned step = LANES / 2; step > 0; step /= 2)
        for (unsigned l = 0; l < step; l++)
            lane[l] = lane[l] + lane[l + step];
    return lane[0];
}

/* The last n % 16 elements of a vector; the lanes beyond get `fill`. */
static inline struct lanes lanes_load_tail(const float *x, unsigned count, float fill)
{
    float lane[LANES];
    for (unsigned l = 0; l < LANES; l++)
        lane[l] = l < count ? x[l] : fill;
    return lanes_load(lane);
}
