/* lanes.h for any machine: arrays. */
#pragma once

#define DOT_TILE 2u /* so many rows by so many others have their dot products in registers */

struct lanes {
    float lane[LANES];
};
struct integer_lanes {
    int32_t lane[LANES]; /* a number, two int16 or four bytes each */
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
static inline struct lanes lanes_load_f16(const uint16_t *x)
{
    struct lanes y;
    for (unsigned l = 0; l < LANES; l++)
        y.lane[l] = inline_f16_to_f32(x[l]);
    return y;
}
static inline struct lanes lanes_load_bf16(const uint16_t *x)
{
    struct lanes y;
    for (unsigned l = 0; l < LANES; l++)
        y.lane[l] = inline_bf16_to_f32(x[l]);
    return y;
}
static inline void lanes_store_f16(struct lanes x, uint16_t *ret_y)
{
    for (unsigned l = 0; l < LANES; l++)
        ret_y[l] = inline_f32_to_f16(x.lane[l]);
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
static inline struct lanes lanes_maximum(struct lanes a, struct lanes b) /* a > b ? a : b */
{
    for (unsigned l = 0; l < LANES; l++)
        a.lane[l] = a.lane[l] > b.lane[l] ? a.lane[l] : b.lane[l];
    return a;
}
static inline struct lanes lanes_magnitude(struct lanes x)
{
    for (unsigned l = 0; l < LANES; l++)
        x.lane[l] = float_of_bits(bits_of_float(x.lane[l]) & 0x7fffffffu);
    return x;
}
/* The greater of numbers without a sign, by their bits: beside what is no number, all others are less. */
static inline struct lanes lanes_greater_magnitude(struct lanes a, struct lanes b)
{
    for (unsigned l = 0; l < LANES; l++)
        a.lane[l] = bits_of_float(a.lane[l]) > bits_of_float(b.lane[l]) ? a.lane[l] : b.lane[l];
    return a;
}
static inline float lanes_greatest_magnitude(struct lanes x)
{
    for (unsigned step = LANES / 2; step > 0; step /= 2)
        for (unsigned l = 0; l < step; l++)
            x.lane[l] = bits_of_float(x.lane[l]) > bits_of_float(x.lane[l + step]) ? x.lane[l] : x.lane[l + step];
    return x.lane[0];
}
/* The 16 lanes of a sum as one number: lane l += lane l + 8, then + 4, + 2, + 1. */
static inline float lanes_sum(struct lanes x)
{
    for (unsigned step = LANES / 2; step > 0; step /= 2)
        for (unsigned l = 0; l < step; l++)
            x.lane[l] = x.lane[l] + x.lane[l + step];
    return x.lane[0];
}
static inline void lanes_sum_tile(struct lanes x[DOT_TILE][DOT_TILE], float ret_sums[DOT_TILE][DOT_TILE])
{
    for (unsigned i = 0; i < DOT_TILE; i++)
        for (unsigned j = 0; j < DOT_TILE; j++)
            ret_sums[i][j] = lanes_sum(x[i][j]);
}
static inline float lanes_most(struct lanes x)
{
    float most = x.lane[0];
    for (unsigned l = 1; l < LANES; l++)
        most = x.lane[l] > most ? x.lane[l] : most;
    return most;
}
static inline struct lanes lanes_of_integers(struct integer_lanes x)
{
    struct lanes y;
    for (unsigned l = 0; l < LANES; l++)
        y.lane[l] = (float)x.lane[l];
    return y;
}
/* The nearest whole numbers (ties to even) of 64 numbers from -127 to 127, as bytes; returns their sum. What is no number
 * becomes one from -127 to 127 all the same. */
static inline int32_t lanes_store_bytes(const struct lanes x[64 / LANES], int8_t *ret_y)
{
    int32_t sum = 0;
    for (unsigned i = 0; i < 64; i++) {
        float y = x[i / LANES].lane[i % LANES];
        y = y > -127.0f ? y : -127.0f;
        y = y < 127.0f ? y : 127.0f;
        ret_y[i] = (int8_t)((y + 0x1.8p23f) - 0x1.8p23f);
        sum += ret_y[i];
    }
    return sum;
}

static inline int32_t word_byte(int32_t word, int byte) /* signed */
{
    return (int32_t)((uint32_t)word << (24 - 8 * byte)) >> 24;
}
static inline int32_t word_of_halves(int32_t low, int32_t high)
{
    return (int32_t)(((uint32_t)low & 0xffffu) | (uint32_t)high << 16);
}
static inline struct integer_lanes integers_zero(void)
{
    return (struct integer_lanes){{0}};
}
static inline struct integer_lanes integers_load(const void *x)
{
    struct integer_lanes y;
    memcpy(y.lane, x, sizeof y.lane);
    return y;
}
static inline struct integer_lanes integers_repeat(const int8_t *x) /* four bytes in every lane */
{
    struct integer_lanes y;
    int32_t four;
    memcpy(&four, x, sizeof four);
    for (unsigned l = 0; l < LANES; l++)
        y.lane[l] = four;
    return y;
}
static inline struct integer_lanes integers_even(struct integer_lanes x) /* bytes 0, 2, 4, ... as int16 */
{
    for (unsigned l = 0; l < LANES; l++)
        x.lane[l] = word_of_halves(word_byte(x.lane[l], 0), word_byte(x.lane[l], 2));
    return x;
}
static inline struct integer_lanes integers_odd(struct integer_lanes x)
{
    for (unsigned l = 0; l < LANES; l++)
        x.lane[l] = word_of_halves(word_byte(x.lane[l], 1), word_byte(x.lane[l], 3));
    return x;
}
static inline struct integer_lanes integers_nibbles(struct integer_lanes x,
                                                    int high) /* low or high nibbles less 8, as bytes */
{
    for (unsigned l = 0; l < LANES; l++) {
        uint32_t nibbles = (uint32_t)x.lane[l] >> (high ? 4 : 0) & 0x0f0f0f0fu;
        x.lane[l] =
            (int32_t)(((nibbles | 0x80808080u) - 0x08080808u) ^ 0x80808080u); /* without a borrow between bytes */
    }
    return x;
}
static inline struct integer_lanes integers_dot(struct integer_lanes sum, struct integer_lanes a,
                                                struct integer_lanes b) /* of int16 pairs */
{
    for (unsigned l = 0; l < LANES; l++)
        sum.lane[l] +=
            (int16_t)(a.lane[l] & 0xffff) * (int16_t)(b.lane[l] & 0xffff) + (a.lane[l] >> 16) * (b.lane[l] >> 16);
    return sum;
}
static inline struct integer_lanes integers_byte(struct integer_lanes x, int byte) /* one of four bytes as a number */
{
    for (unsigned l = 0; l < LANES; l++)
        x.lane[l] = word_byte(x.lane[l], byte);
    return x;
}

/* Floats as unsigned integers of the same order; -0 as 0. */
static inline struct integer_lanes lanes_order(struct lanes x)
{
    struct integer_lanes y;
    for (unsigned l = 0; l < LANES; l++)
        y.lane[l] = (int32_t)order_of(x.lane[l]);
    return y;
}
static inline struct integer_lanes integers_set(uint32_t x)
{
    struct integer_lanes y;
    for (unsigned l = 0; l < LANES; l++)
        y.lane[l] = (int32_t)x;
    return y;
}
static inline struct integer_lanes integers_count(uint32_t first) /* first, first + 1, ... */
{
    struct integer_lanes y;
    for (unsigned l = 0; l < LANES; l++)
        y.lane[l] = (int32_t)(first + l);
    return y;
}
static inline struct integer_lanes integers_and(struct integer_lanes a, struct integer_lanes b)
{
    for (unsigned l = 0; l < LANES; l++)
        a.lane[l] &= b.lane[l];
    return a;
}
static inline struct integer_lanes integers_shift_right(struct integer_lanes x, int count) /* unsigned */
{
    for (unsigned l = 0; l < LANES; l++)
        x.lane[l] = (int32_t)((uint32_t)x.lane[l] >> count);
    return x;
}
static inline uint32_t integers_equal(struct integer_lanes a, struct integer_lanes b) /* bit l: lane l of a == b */
{
    uint32_t mask = 0;
    for (unsigned l = 0; l < LANES; l++)
        mask |= (uint32_t)(a.lane[l] == b.lane[l]) << l;
    return mask;
}
static inline uint32_t integers_above(struct integer_lanes a, struct integer_lanes b) /* a > b, unsigned */
{
    uint32_t mask = 0;
    for (unsigned l = 0; l < LANES; l++)
        mask |= (uint32_t)((uint32_t)a.lane[l] > (uint32_t)b.lane[l]) << l;
    return mask;
}
static inline void integers_store(struct integer_lanes x, uint32_t *ret_y)
{
    memcpy(ret_y, x.lane, sizeof x.lane);
}
/* The lanes of the mask, one behind the other; anything after them, up to 16 in all. */
static inline void integers_store_chosen(struct integer_lanes x, uint32_t mask, uint32_t *ret_y)
{
    for (unsigned l = 0, kept = 0; l < LANES; kept += mask >> l & 1, l++)
        ret_y[kept] = (uint32_t)x.lane[l];
}
