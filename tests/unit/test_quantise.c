/* Quantisation: exact where it can be, least squared error among the candidates elsewhere, and the block order. */
#include "cmd/convert/quantise.h"

#include "compute/math.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include <cmocka.h>

#define INT4_BITS 0x5f157afd752f7554ull
#define INT8_BITS 0x4e828d341b798488ull

static uint32_t random_word(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*state >> 33);
}

/* Roughly normal, deviation 1. */
static float random_normal(uint64_t *state)
{
    float sum = 0;
    for (int i = 0; i < 12; i++)
        sum += (float)random_word(state) / 2147483648.0f;
    return sum - 6.0f;
}

static double error_of(const float *values, uint16_t scale, const int8_t *quanta)
{
    double error = 0, s = (double)math_f16_to_f32(scale);
    for (int i = 0; i < 64; i++)
        error += ((double)values[i] - quanta[i] * s) * ((double)values[i] - quanta[i] * s);
    return error;
}

/* Values quantum * scale with an f16 scale stay exact, whichever quantum the largest is and whatever the sign of the
 * scale. */
static void check_exact(enum weight_format format, int least, int most, uint64_t *state)
{
    int8_t quanta[64];
    float values[64];
    /* f16 numbers whose multiples and quarters stay in range: a random significand, exponents 2^-8 .. 2^9. */
    uint16_t half =
        (uint16_t)(random_word(state) % 1024 | (8 + random_word(state) % 16) << 10 | (random_word(state) % 2) << 15);
    float scale = math_f16_to_f32(half);
    for (int i = 0; i < 64; i++)
        values[i] = (float)(least + (int)(random_word(state) % (uint32_t)(most - least + 1))) * scale;
    uint16_t got = quantise_group(format, values, quanta);
    for (int i = 0; i < 64; i++) {
        if ((float)quanta[i] * math_f16_to_f32(got) != values[i])
            fail_msg("quanta %d..%d, scale %a: value %a became %d * %a", least, most, (double)scale, (double)values[i],
                     quanta[i], (double)math_f16_to_f32(got));
    }
}

static void test_exact(void **state)
{
    (void)state;
    uint64_t seed = 1;
    for (int round = 0; round < 200; round++) {
        for (int most = 0; most <= 7; most++) {
            for (int least = -8; least <= 0; least++)
                check_exact(WEIGHT_INT4, least, most, &seed);
        }
        for (int most = 1; most <= 127; most += 3)
            check_exact(WEIGHT_INT8, -(int)(random_word(&seed) % 128), most, &seed);
    }
}

/* Exactness of a whole matrix: f16 scales of very different sizes times one power of two. */
static void test_exact_matrix(void **state)
{
    (void)state;
    static const enum weight_format formats[] = {WEIGHT_INT4, WEIGHT_INT8};
    uint64_t seed = 2;
    for (int power = -60; power <= 40; power += 20) {
        for (int f = 0; f < 2; f++) {
            enum { K = 128 };
            static float rows[BLOCK_ROWS][K];
            uint8_t quanta[K / 64 * 1024];
            uint16_t scales[K / 64 * 16];
            float absmax = 0;
            int reach = formats[f] == WEIGHT_INT4 ? 8 : 127;
            for (uint32_t r = 0; r < BLOCK_ROWS; r++) {
                for (uint32_t g = 0; g < K / 64; g++) {
                    float scale = ldexpf(
                        math_f16_to_f32((uint16_t)((1 + random_word(&seed) % 20) << 10 | random_word(&seed) % 1024)),
                        power);
                    for (uint32_t c = 0; c < 64; c++) {
                        rows[r][g * 64 + c] =
                            (float)((int)(random_word(&seed) % (uint32_t)(2 * reach)) - reach) * scale;
                        absmax = fmaxf(absmax, fabsf(rows[r][g * 64 + c]));
                    }
                    if (formats[f] == WEIGHT_INT8)
                        rows[r][g * 64] = 127 * scale;
                    absmax = fmaxf(absmax, fabsf(rows[r][g * 64]));
                }
            }
            int exponent = quantise_exponent(formats[f], absmax);
            quantise_block_row(formats[f], exponent, &rows[0][0], K, quanta, scales);
            for (uint32_t r = 0; r < BLOCK_ROWS; r++) {
                for (uint32_t c = 0; c < K; c++) {
                    const uint8_t *block = quanta + c / 64 * block_bytes(formats[f]);
                    uint32_t column = c % 64;
                    int quantum;
                    if (formats[f] == WEIGHT_INT8) {
                        quantum = (int8_t)block[column / 4 * 64 + r * 4 + column % 4];
                    } else {
                        uint8_t pair = block[column % 32 / 4 * 64 + r * 4 + column % 4];
                        quantum = (column < 32 ? pair & 15 : pair >> 4) - 8;
                    }
                    float weight = ldexpf((float)quantum * math_f16_to_f32(scales[c / 64 * 16 + r]), exponent);
                    if (weight != rows[r][c])
                        fail_msg("%s, 2^%d: row %u column %u: %a became %a", f ? "int8" : "int4", power, r, c,
                                 (double)rows[r][c], (double)weight);
                }
            }
        }
    }
}

/* No worse than the plain candidates, and on normal data clearly better. */
static void test_least_error(void **state)
{
    (void)state;
    uint64_t seed = 3;
    double ours = 0, plain = 0, power = 0;
    for (int round = 0; round < 2000; round++) {
        float values[64], absmax = 0;
        for (int i = 0; i < 64; i++) {
            values[i] = random_normal(&seed) * 100;
            absmax = fmaxf(absmax, fabsf(values[i]));
            power += (double)values[i] * (double)values[i];
        }
        int8_t quanta[64];
        uint16_t scale = quantise_group(WEIGHT_INT4, values, quanta);
        double error = error_of(values, scale, quanta), best = INFINITY;
        static const float divisors[] = {7, -7, 8, -8};
        for (int d = 0; d < 4; d++) {
            uint16_t half = math_f32_to_f16(absmax / divisors[d]);
            int8_t candidate[64];
            for (int i = 0; i < 64; i++)
                candidate[i] = (int8_t)fmaxf(-8, fminf(7, rintf(values[i] / math_f16_to_f32(half))));
            best = fmin(best, error_of(values, half, candidate));
        }
        if (error > best * 1.000001)
            fail_msg("error %g, a plain candidate has %g", error, best);
        ours += error;
        plain += best;
    }
    assert_true(ours < 0.95 * plain);
    assert_true(sqrt(ours / power) < 0.1);
}

static void test_int8_error(void **state)
{
    (void)state;
    uint64_t seed = 4;
    for (int round = 0; round < 1000; round++) {
        float values[64], absmax = 0;
        for (int i = 0; i < 64; i++) {
            values[i] = random_normal(&seed) * 1000;
            absmax = fmaxf(absmax, fabsf(values[i]));
        }
        int8_t quanta[64];
        uint16_t scale = quantise_group(WEIGHT_INT8, values, quanta);
        float step = math_f16_to_f32(scale);
        assert_true(fabsf(step - absmax / 127) <= absmax / 127 / 2048);
        for (int i = 0; i < 64; i++) {
            assert_in_range(quanta[i] + 127, 0, 254);
            assert_true(fabsf(values[i] - (float)quanta[i] * step) <= 0.57f * step);
        }
    }
}

static void test_edges(void **state)
{
    (void)state;
    float values[64] = {0};
    int8_t quanta[64];
    static const enum weight_format formats[] = {WEIGHT_INT4, WEIGHT_INT8};
    for (int f = 0; f < 2; f++) {
        assert_int_equal(quantise_exponent(formats[f], 0), 0);
        memset(values, 0, sizeof values);
        assert_int_equal(quantise_group(formats[f], values, quanta), 0);
        for (int i = 0; i < 64; i++)
            assert_int_equal(quanta[i], 0);
        /* A group far too small for an f16 scale becomes zeros. */
        values[3] = 1e-12f;
        assert_int_equal(quantise_group(formats[f], values, quanta), 0);
        assert_int_equal(quanta[3], 0);
        /* One value alone, of any size that a float can have, is kept to 2^-10. */
        for (int power = -126; power <= 127; power++) {
            float rows[16][64] = {{0}};
            uint8_t blocks[1024];
            uint16_t scales[16];
            rows[5][9] = ldexpf(-1.3f, power);
            int exponent = quantise_exponent(formats[f], -rows[5][9]);
            assert_in_range(exponent + 126, 0, 252);
            quantise_block_row(formats[f], exponent, &rows[0][0], 64, blocks, scales);
            int quantum = formats[f] == WEIGHT_INT8 ? (int8_t)blocks[9 / 4 * 64 + 5 * 4 + 1]
                                                    : (blocks[9 / 4 * 64 + 5 * 4 + 1] & 15) - 8;
            double weight = ldexp(quantum * (double)math_f16_to_f32(scales[5]), exponent);
            if (fabs(weight / (double)rows[5][9] - 1) > 1.0 / 1024)
                fail_msg("%g became %g", (double)rows[5][9], weight);
        }
    }
}

/* The same bytes on every machine and with every compiler. */
static void test_bits(void **state)
{
    (void)state;
    enum { K = 256 };
    static float rows[BLOCK_ROWS * K];
    static uint8_t quanta[K / 64 * 1024];
    uint16_t scales[K / 64 * 16];
    uint64_t seed = 5, hashes[2];
    static const enum weight_format formats[] = {WEIGHT_INT4, WEIGHT_INT8};
    for (int f = 0; f < 2; f++) {
        XXH3_state_t *hash = XXH3_createState();
        XXH3_64bits_reset(hash);
        for (int round = 0; round < 20; round++) {
            float absmax = 0;
            for (size_t i = 0; i < BLOCK_ROWS * K; i++) {
                rows[i] = random_normal(&seed) * 0.02f;
                absmax = fmaxf(absmax, fabsf(rows[i]));
            }
            quantise_block_row(formats[f], quantise_exponent(formats[f], absmax), rows, K, quanta, scales);
            XXH3_64bits_update(hash, quanta, quanta_bytes(formats[f], 1, K));
            XXH3_64bits_update(hash, scales, sizeof scales);
        }
        hashes[f] = XXH3_64bits_digest(hash);
        XXH3_freeState(hash);
    }
    assert_int_equal(hashes[0], INT4_BITS);
    assert_int_equal(hashes[1], INT8_BITS);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_exact),      cmocka_unit_test(test_exact_matrix), cmocka_unit_test(test_least_error),
        cmocka_unit_test(test_int8_error), cmocka_unit_test(test_edges),        cmocka_unit_test(test_bits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
