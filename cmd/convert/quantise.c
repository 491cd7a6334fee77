#include "cmd/convert/quantise.h"

#include "compute/math.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

#define LANES 16u
#define F16_SIGNIFICAND 2048u /* an f16 holds whole numbers under this exactly */

/* Quanta of a format: [least, most]. A group that a format can hold exactly can be held with the quantum of its
 * largest magnitude in [exact_from, exact_to], because halving the scale doubles a smaller one. */
struct levels {
    float least, most;
    uint32_t exact_from, exact_to;
};

static struct levels levels_of(enum weight_format format)
{
    return format == WEIGHT_INT4 ? (struct levels){-8.0f, 7.0f, 4, 8} : (struct levels){-127.0f, 127.0f, 64, 127};
}

int quantise_exponent(enum weight_format format, float absmax)
{
    if (!(absmax > 0))
        return 0;
    /* absmax = m 2^x, 0.5 <= m < 1. The largest scale is absmax / exact_from, which is put into [2^14, 2^15). */
    int x;
    frexpf(absmax, &x);
    int exponent = x - (format == WEIGHT_INT4 ? 17 : 21);
    return exponent < -126 ? -126 : exponent; /* 2^-126 is the smallest normal f32 */
}

static float largest_magnitude(const float *values)
{
    float most = 0;
    for (uint32_t i = 0; i < BLOCK_COLUMNS; i++) {
        float magnitude = fabsf(values[i]);
        most = magnitude > most ? magnitude : most;
    }
    return most;
}

static float sum_lanes(const float *lanes)
{
    float sum = 0;
    for (uint32_t l = 0; l < LANES; l++)
        sum += lanes[l];
    return sum;
}

/* Quanta for a scale, as whole f32 numbers; returns the sum of squared errors. Lanes, so that the compiler can use
 * vectors without changing the order of the sums. */
static float try_scale(const struct levels *levels, const float *values, float scale, float *ret_quanta)
{
    const float round =
        12582912.0f; /* 1.5 * 2^23: adding and taking it away rounds to the nearest whole number, ties to even */
    float inverse = 1.0f / scale, least = levels->least, most = levels->most;
    float lanes[LANES] = {0};
    for (uint32_t i = 0; i < BLOCK_COLUMNS; i += LANES) {
        for (uint32_t l = 0; l < LANES; l++) {
            float quantum = values[i + l] * inverse;
            quantum = quantum < least ? least : quantum;
            quantum = quantum > most ? most : quantum;
            quantum = (quantum + round) - round;
            float error = values[i + l] - quantum * scale;
            ret_quanta[i + l] = quantum;
            lanes[l] += error * error;
        }
    }
    return sum_lanes(lanes);
}

/* The best scale so far. */
struct choice {
    float error;
    uint16_t scale;
    float quanta[BLOCK_COLUMNS];
};

/* Tries the f16 number nearest to `scale`; a candidate that overflows or vanishes is none. */
static void consider(const struct levels *levels, const float *values, float scale, struct choice *choice)
{
    uint16_t half = math_f32_to_f16(scale);
    float rounded = math_f16_to_f32(half);
    if (rounded == 0 || !isfinite(rounded))
        return;
    float quanta[BLOCK_COLUMNS];
    float error = try_scale(levels, values, rounded, quanta);
    if (error < choice->error) {
        choice->error = error;
        choice->scale = half;
        memcpy(choice->quanta, quanta, sizeof quanta);
    }
}

/* Tries each scale absmax / q which f16 holds exactly: only such a one can reproduce the group. */
static void consider_exact(const struct levels *levels, const float *values, float absmax, bool negative,
                           struct choice *choice)
{
    int exponent;
    uint32_t significand = (uint32_t)(frexpf(absmax, &exponent) * 16777216.0f); /* 24 bits, so this is exact */
    while (significand % 2 == 0)
        significand /= 2;
    if (significand >= F16_SIGNIFICAND * levels->exact_to)
        return;
    for (uint32_t q = levels->exact_to; q >= levels->exact_from && choice->error > 0; q--) {
        uint32_t odd = q;
        while (odd % 2 == 0)
            odd /= 2;
        if (significand % odd != 0 || significand / odd >= F16_SIGNIFICAND)
            continue;
        consider(levels, values, absmax / (float)q, choice);
        if (negative && choice->error > 0)
            consider(levels, values, -absmax / (float)q, choice);
    }
}

/* The scale with the least squared error for the quanta of the best choice; requantised with it, the error can only
 * fall. */
static void refine(const struct levels *levels, const float *values, struct choice *choice)
{
    float up[LANES] = {0}, down[LANES] = {0};
    for (uint32_t i = 0; i < BLOCK_COLUMNS; i += LANES) {
        for (uint32_t l = 0; l < LANES; l++) {
            up[l] += values[i + l] * choice->quanta[i + l];
            down[l] += choice->quanta[i + l] * choice->quanta[i + l];
        }
    }
    float below = sum_lanes(down);
    if (below > 0)
        consider(levels, values, sum_lanes(up) / below, choice);
}

static void choose_int4(const struct levels *levels, const float *values, float absmax, struct choice *choice)
{
    static const float divisors[] = {7.0f, 8.0f, 7.5f, 8.5f, 6.5f, 9.0f, 9.5f, 10.0f};
    for (size_t i = 0; i < sizeof divisors / sizeof divisors[0] && choice->error > 0; i++) {
        consider(levels, values, absmax / divisors[i], choice);
        if (choice->error > 0)
            consider(levels, values, -absmax / divisors[i], choice);
    }
    if (choice->error > 0)
        consider_exact(levels, values, absmax, true, choice);
    for (int round = 0; round < 2 && choice->error > 0; round++)
        refine(levels, values, choice);
}

uint16_t quantise_group(enum weight_format format, const float *values, int8_t *ret_quanta)
{
    struct levels levels = levels_of(format);
    struct choice choice = {.error = INFINITY};
    float absmax = largest_magnitude(values);
    if (absmax > 0 && format == WEIGHT_INT4)
        choose_int4(&levels, values, absmax, &choice);
    else if (absmax > 0) {
        consider(&levels, values, absmax / levels.most, &choice);
        if (choice.error > 0)
            consider_exact(&levels, values, absmax, false, &choice);
    }
    /* A group of zeros, or one so small that no f16 scale is left for it, has scale 0 and quanta 0. */
    for (uint32_t i = 0; i < BLOCK_COLUMNS; i++)
        ret_quanta[i] = (int8_t)choice.quanta[i];
    return choice.scale;
}

/* Puts quantum (row, column) of a block into its place (proto/weights.h). */
static void store_int8(int8_t quanta[BLOCK_ROWS][BLOCK_COLUMNS], uint8_t *ret_block)
{
    for (uint32_t r = 0; r < BLOCK_ROWS; r++) {
        for (uint32_t c = 0; c < BLOCK_COLUMNS; c++)
            ret_block[c / 4 * 64 + r * 4 + c % 4] = (uint8_t)quanta[r][c];
    }
}

static void store_int4(int8_t quanta[BLOCK_ROWS][BLOCK_COLUMNS], uint8_t *ret_block)
{
    for (uint32_t r = 0; r < BLOCK_ROWS; r++) {
        for (uint32_t c = 0; c < BLOCK_COLUMNS / 2; c++) {
            uint8_t low = (uint8_t)(quanta[r][c] + 8), high = (uint8_t)(quanta[r][c + BLOCK_COLUMNS / 2] + 8);
            ret_block[c / 4 * 64 + r * 4 + c % 4] = (uint8_t)(low | high << 4);
        }
    }
}

void quantise_block_row(enum weight_format format, int exponent, const float *rows, uint32_t k, uint8_t *ret_quanta,
                        uint16_t *ret_scales)
{
    /* In two steps, because 2^-exponent alone need not be an f32. */
    float first = ldexpf(1.0f, -exponent / 2), second = ldexpf(1.0f, -exponent - -exponent / 2);
    for (uint32_t b = 0; b < k / BLOCK_COLUMNS; b++) {
        int8_t quanta[BLOCK_ROWS][BLOCK_COLUMNS];
        for (uint32_t r = 0; r < BLOCK_ROWS; r++) {
            const float *source = rows + (size_t)r * k + (size_t)b * BLOCK_COLUMNS;
            float values[BLOCK_COLUMNS];
            for (uint32_t c = 0; c < BLOCK_COLUMNS; c++)
                values[c] = source[c] * first * second;
            ret_scales[(size_t)b * BLOCK_ROWS + r] = quantise_group(format, values, quanta[r]);
        }
        if (format == WEIGHT_INT4)
            store_int4(quanta, ret_quanta + (size_t)b * block_bytes(format));
        else
            store_int8(quanta, ret_quanta + (size_t)b * block_bytes(format));
    }
}
