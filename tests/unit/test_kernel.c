/* Every kernel set against a plain second implementation of compute/README.md, bit for bit, on many shapes. */
#include "compute/cpu.h"
#include "compute/kernel.h"
#include "compute/kernel_amx.h"
#include "compute/kernel_avx512.h"
#include "compute/math.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define SETS 10u

static const struct kernel_set *sets[SETS];
static uint32_t set_count;

static uint64_t seed = 88172645463325252u;

static uint32_t random_bits(void)
{
    seed ^= seed << 13;
    seed ^= seed >> 7;
    seed ^= seed << 17;
    return (uint32_t)(seed >> 32);
}

/* Roughly normal, with a few values far out, as activations have them. */
static float random_value(void)
{
    float sum = 0.0f;
    for (int i = 0; i < 4; i++)
        sum += (float)(int32_t)random_bits() * 0x1p-31f;
    return random_bits() % 97 == 0 ? sum * 30.0f : sum;
}

static float *random_vector(size_t n)
{
    float *x = calloc(n ? n : 1, sizeof *x);
    for (size_t i = 0; i < n; i++)
        x[i] = random_value();
    return x;
}

static uint16_t *random_scales(size_t n)
{
    uint16_t *scales = calloc(n, sizeof *scales);
    for (size_t i = 0; i < n; i++)
        scales[i] = math_f32_to_f16(random_value() * 0.01f);
    return scales;
}

/* ---- the second implementation: one number at a time ---- */

/* Weight (row, column) of a matrix [n, k] as proto/weights.h says. */
static int weight_at(const uint8_t *quanta, enum weight_format format, uint32_t k, uint32_t row, uint32_t column)
{
    size_t block = (size_t)(row / 16) * (k / 64) + column / 64;
    uint32_t r = row % 16, c = column % 64;
    if (format == WEIGHT_INT8)
        return (int8_t)quanta[block * 1024 + c / 4 * 64 + r * 4 + c % 4];
    uint8_t byte = quanta[block * 512 + c % 32 / 4 * 64 + r * 4 + c % 4];
    return (c < 32 ? byte % 16 : byte / 16) - 8;
}

static float scale_at(const uint16_t *scales, uint32_t k, uint32_t row, uint32_t group)
{
    return math_f16_to_f32(scales[((size_t)(row / 16) * (k / 64) + group) * 16 + row % 16]);
}

static void naive_quantise(const float *x, uint32_t k, int8_t *q, float *scales)
{
    for (uint32_t g = 0; g < k / 64; g++) {
        float most = 0.0f;
        for (int i = 0; i < 64; i++)
            most = fmaxf(most, fabsf(x[g * 64 + i]));
        scales[g] = most > 0x1p-120f ? most / 127.0f : 0.0f;
        for (int i = 0; i < 64; i++)
            q[g * 64 + i] = most <= 0x1p-120f ? 0 : (int8_t)rintf(x[g * 64 + i] * (127.0f / most));
    }
}

static void naive_sums(const int8_t *q, uint32_t k, int32_t *sums)
{
    memset(sums, 0, k / 64 * sizeof *sums);
    for (uint32_t i = 0; i < k; i++)
        sums[i / 64] += q[i];
}

static float naive_int8(const uint8_t *quanta, const uint16_t *scales, enum weight_format format, uint32_t k,
                        uint32_t row, const int8_t *q, const float *xs, int exponent)
{
    float sum = 0.0f;
    for (uint32_t g = 0; g < k / 64; g++) {
        int dot = 0;
        for (uint32_t c = g * 64; c < g * 64 + 64; c++)
            dot += weight_at(quanta, format, k, row, c) * q[c];
        float scaled = (float)dot * scale_at(scales, k, row, g);
        sum = fmaf(scaled, xs[g], sum);
    }
    return ldexpf(sum, exponent);
}

static float naive_f32(const uint8_t *quanta, const uint16_t *scales, enum weight_format format, uint32_t k,
                       uint32_t row, const float *x, int exponent)
{
    float sum = 0.0f;
    for (uint32_t g = 0; g < k / 64; g++) {
        float group = 0.0f;
        for (uint32_t c = g * 64; c < g * 64 + 64; c++)
            group = fmaf((float)weight_at(quanta, format, k, row, c), x[c], group);
        sum = fmaf(group, scale_at(scales, k, row, g), sum);
    }
    return ldexpf(sum, exponent);
}

static float naive_tree(float *lane)
{
    for (int step = 8; step > 0; step /= 2)
        for (int l = 0; l < step; l++)
            lane[l] = lane[l] + lane[l + step];
    return lane[0];
}

static float naive_dot(const float *x, const float *y, uint32_t n)
{
    float lane[16] = {0};
    for (uint32_t i = 0; i < (n + 15) / 16 * 16; i++)
        lane[i % 16] = i < n ? fmaf(x[i], y[i], lane[i % 16]) : fmaf(0.0f, 0.0f, lane[i % 16]);
    return naive_tree(lane);
}

static float naive_sum(const float *x, uint32_t n)
{
    float lane[16] = {0};
    for (uint32_t i = 0; i < n; i++)
        lane[i % 16] = lane[i % 16] + x[i];
    return naive_tree(lane);
}

/* ---- tests ---- */

static void test_quantise(void **state)
{
    (void)state;
    for (uint32_t k = 64; k <= 640; k += 64)
        for (uint32_t s = 0; s < set_count; s++) {
            float *x = random_vector(k), scales[10], want_scales[10];
            int8_t q[640], want[640];
            int32_t sums[10], want_sums[10];
            for (int i = 0; i < 64; i++)
                x[i] = k == 128 ? 0.0f : x[i];
            sets[s]->quantise(x, k, q, scales, sums);
            naive_quantise(x, k, want, want_scales);
            assert_memory_equal(q, want, k);
            assert_memory_equal(scales, want_scales, k / 64 * sizeof(float));
            naive_sums(want, k, want_sums);
            assert_memory_equal(sums, want_sums, k / 64 * sizeof(int32_t));
            for (uint32_t i = 0; i < k; i++) /* within half a step, and a little */
                assert_true(fabsf((float)q[i] * scales[i / 64] - x[i]) <= scales[i / 64] * 0.5001f);
            free(x);
        }
}

static void test_quantise_extremes(void **state)
{
    (void)state;
    float x[64], scale;
    int8_t q[64];
    for (uint32_t s = 0; s < set_count; s++) {
        for (int i = 0; i < 64; i++)
            x[i] = i % 2 ? 1e-40f : -0.0f; /* 127 / absmax is no number any more: counts as 0 */
        sets[s]->quantise(x, 64, q, &scale, NULL);
        for (int i = 0; i < 64; i++)
            assert_int_equal(q[i], 0);
        for (int i = 0; i < 64; i++)
            x[i] = i == 3 ? -3e38f : 1e38f;
        sets[s]->quantise(x, 64, q, &scale, NULL);
        assert_int_equal(q[3], -127);
        assert_int_equal(q[4], 42);
    }
}

/* What is no number is not lost among those that are: the scale says so, and with it every product. */
static void test_quantise_no_number(void **state)
{
    (void)state;
    for (uint32_t s = 0; s < set_count; s++) {
        for (int place = 0; place < 64; place++) {
            float x[64], scale;
            int8_t q[64];
            for (int i = 0; i < 64; i++)
                x[i] = i == place ? (place % 2 ? -NAN : NAN) : (float)i * 1e30f;
            sets[s]->quantise(x, 64, q, &scale, NULL);
            assert_true(isnan(scale));
            x[place] = place % 2 ? INFINITY : -INFINITY;
            sets[s]->quantise(x, 64, q, &scale, NULL);
            assert_true(isinf(scale));
        }
    }
}

/* Activations of every kind: each group has a character of its own. */
static void fill_activations(float *x, uint32_t n)
{
    static const float scales[] = {1.0f, 0.0f, -0.0f, 1e-41f, 1e-37f, 1e-12f, 3e15f};
    for (uint32_t g = 0; g < n; g += 64) {
        uint32_t kind = random_bits() % 9;
        for (uint32_t i = g; i < g + 64; i++)
            x[i] = random_value() * scales[kind < 7 ? kind : random_bits() % 7];
        for (uint32_t i = g; kind == 8 && i < g + 64; i++) /* quanta that lie between two */
            x[i] = i == g ? 127.0f : (float)(random_bits() % 255) * 0.5f - 63.5f;
    }
}

#define FUSED 1664u

static void check_quantised(uint32_t set, const char *what, const float *y, uint32_t n, const int8_t *q,
                            const float *scales, const int32_t *sums)
{
    int8_t want[FUSED];
    float want_scales[FUSED / 64];
    int32_t want_sums[FUSED / 64];
    naive_quantise(y, n, want, want_scales);
    naive_sums(want, n, want_sums);
    if (memcmp(q, want, n) != 0 || memcmp(scales, want_scales, n / 64 * sizeof *scales) != 0 ||
        memcmp(sums, want_sums, n / 64 * sizeof *sums) != 0)
        fail_msg("%s, %s of %u: other bits than one step after the other", sets[set]->name, what, n);
    assert_int_equal(q[n], 77); /* and nothing behind */
    assert_true(scales[n / 64] == 0.5f && sums[n / 64] == 12345);
}

/* Quantisation in one pass with what goes before it: the bits of one step after the other. */
static void test_fused(void **state)
{
    (void)state;
    float x[FUSED], other[FUSED], y[FUSED], want[FUSED], scales[FUSED / 64 + 1];
    int8_t q[FUSED + 1];
    int32_t sums[FUSED / 64 + 1];
    for (uint32_t round = 0; round < 150; round++) {
        uint32_t n = 64 * (1 + round % (FUSED / 64));
        fill_activations(x, n);
        fill_activations(other, n);
        for (uint32_t i = 0; i < n; i++) /* a norm's weights; gates */
            other[i] = round % 2 ? random_value() : other[i];
        float eps = round % 3 ? 1e-5f : 1e-30f, rms = 1.0f / sqrtf(naive_dot(x, x, n) / (float)n + eps);
        for (uint32_t s = 0; s < set_count; s++) {
            q[n] = 77;
            scales[n / 64] = 0.5f;
            sums[n / 64] = 12345;
            sets[s]->quantise(x, n, q, scales, sums);
            check_quantised(s, "quantise", x, n, q, scales, sums);

            for (uint32_t i = 0; i < n; i++)
                want[i] = other[i] * (x[i] * rms);
            sets[s]->rmsnorm_quantise(x, other, n, eps, NULL, q, scales, sums);
            check_quantised(s, "rmsnorm_quantise", want, n, q, scales, sums);
            memcpy(y, x, sizeof y);
            sets[s]->rmsnorm_quantise(y, other, n, eps, y, q, scales, sums);
            check_quantised(s, "rmsnorm_quantise in place", want, n, q, scales, sums);
            assert_memory_equal(y, want, n * sizeof *y);

            for (uint32_t i = 0; i < n; i++)
                want[i] = other[i] / (1.0f + math_exp(-other[i])) * x[i];
            sets[s]->swiglu_quantise(other, x, n, q, scales, sums);
            check_quantised(s, "swiglu_quantise", want, n, q, scales, sums);
        }
    }
}

static void check_matmul(enum weight_format format, bool f32, uint32_t blocks, uint32_t k, uint32_t row_count)
{
    size_t bytes = quanta_bytes(format, blocks, k);
    uint8_t *quanta = malloc(bytes);
    for (size_t i = 0; i < bytes; i++)
        quanta[i] = (uint8_t)random_bits();
    if (k % 128 == 0) /* the extremes, at the same sign, must not overflow anything */
        memset(quanta, format == WEIGHT_INT8 ? 0x80 : 0, bytes / 2);
    uint16_t *scales = random_scales((size_t)blocks * (k / 64) * 16);
    float *x = random_vector((size_t)row_count * k), *xs = calloc((size_t)row_count * (k / 64), 4),
          *y = calloc((size_t)row_count * blocks * 16, 4);
    int8_t *q = malloc((size_t)row_count * k);
    int32_t *sums = calloc((size_t)row_count * (k / 64), sizeof *sums);
    int exponent = (int)(random_bits() % 20) - 10;
    struct matmul_row rows[16];
    for (uint32_t r = 0; r < row_count; r++) {
        naive_quantise(x + (size_t)r * k, k, q + (size_t)r * k, xs + (size_t)r * (k / 64));
        if (k % 128 == 0)
            memset(q + (size_t)r * k, r % 2 ? 127 : -127, k);
        naive_sums(q + (size_t)r * k, k, sums + (size_t)r * (k / 64));
        rows[r] = (struct matmul_row){.q = q + (size_t)r * k,
                                      .scales = xs + (size_t)r * (k / 64),
                                      .sums = sums + (size_t)r * (k / 64),
                                      .x = x + (size_t)r * k,
                                      .y = y + (size_t)r * blocks * 16};
    }
    for (uint32_t s = 0; s < set_count; s++) {
        matmul_function *multiply = format == WEIGHT_INT8 ? (f32 ? sets[s]->matmul_int8_f32 : sets[s]->matmul_int8)
                                                          : (f32 ? sets[s]->matmul_int4_f32 : sets[s]->matmul_int4);
        memset(y, 0xff, (size_t)row_count * blocks * 16 * 4);
        multiply(quanta, scales, blocks, k, ldexpf(1.0f, exponent), rows, row_count);
        for (uint32_t r = 0; r < row_count; r++)
            for (uint32_t n = 0; n < blocks * 16; n++) {
                float want = f32 ? naive_f32(quanta, scales, format, k, n, rows[r].x, exponent)
                                 : naive_int8(quanta, scales, format, k, n, rows[r].q, rows[r].scales, exponent);
                if (memcmp(&want, &rows[r].y[n], sizeof want) != 0)
                    fail_msg("set %u, int%d, row %u, n %u: %a, want %a", s, format == WEIGHT_INT8 ? 8 : 4, r, n,
                             (double)rows[r].y[n], (double)want);
            }
    }
    for (uint32_t n = 0; n < blocks * 16 && n < 16; n++) { /* a row of the matrix itself */
        sets[0]->dequantise_row(quanta, scales, format, n, k, ldexpf(1.0f, exponent), x);
        for (uint32_t c = 0; c < k; c++)
            assert_true(x[c] == (float)weight_at(quanta, format, k, n, c) * scale_at(scales, k, n, c / 64) *
                                    ldexpf(1.0f, exponent));
    }
    free(quanta);
    free(scales);
    free(x);
    free(xs);
    free(y);
    free(q);
    free(sums);
}

static void test_matmul(void **state)
{
    (void)state;
    for (uint32_t blocks = 1; blocks <= 3; blocks++)
        for (uint32_t k = 64; k <= 448; k += 64)
            for (uint32_t rows = 1; rows <= 13; rows += 3)
                for (int f32 = 0; f32 < 2; f32++) {
                    check_matmul(WEIGHT_INT8, f32, blocks, k, rows);
                    check_matmul(WEIGHT_INT4, f32, blocks, k, rows);
                }
}

/* Random shapes and extreme values: every set against the reference. */
#define PROPERTY_ROWS 150u
#define PROPERTY_GROUPS 40u
#define PROPERTY_BLOCKS 5u

struct property_case {
    uint8_t quanta[PROPERTY_BLOCKS * PROPERTY_GROUPS * 1024];
    uint16_t scales[PROPERTY_BLOCKS * PROPERTY_GROUPS * 16];
    int8_t q[PROPERTY_ROWS * PROPERTY_GROUPS * 64];
    float x[PROPERTY_ROWS * PROPERTY_GROUPS * 64];
    float x_scales[PROPERTY_ROWS * PROPERTY_GROUPS];
    int32_t sums[PROPERTY_ROWS * PROPERTY_GROUPS];
    float want[PROPERTY_ROWS * PROPERTY_BLOCKS * 16], y[PROPERTY_ROWS * PROPERTY_BLOCKS * 16];
};

/* Each group of weights, and each of activations, has a character of its own. */
static void fill_case(struct property_case *c)
{
    static const float x_scales[] = {0.0f, 0x1p-149f, 1e-38f, 1.0f, 1e-3f, 1e15f};
    for (size_t b = 0; b < PROPERTY_BLOCKS * PROPERTY_GROUPS; b++) {
        uint32_t kind = random_bits() % 6;
        for (size_t i = 0; i < 1024; i++)
            c->quanta[b * 1024 + i] = (uint8_t)(kind == 0 ? 0x80 : kind == 1 ? 0 : kind == 2 ? 0xff : random_bits());
        for (size_t i = 0; i < 16; i++) /* any f16 but infinities and NaN; some zeros and subnormal numbers */
            c->scales[b * 16 + i] = (uint16_t)(random_bits() & (kind == 3 ? 0x83ff : kind == 4 ? 0x8000 : 0xfbff));
    }
    for (size_t g = 0; g < PROPERTY_ROWS * PROPERTY_GROUPS; g++) {
        uint32_t kind = random_bits() % 4;
        for (size_t i = g * 64; i < g * 64 + 64; i++) {
            c->q[i] = (int8_t)(kind == 0 ? 127 : kind == 1 ? -127 : (int)(random_bits() % 255) - 127);
            c->x[i] = kind == 2 ? 0.0f : random_value() * x_scales[random_bits() % 6];
        }
        c->x_scales[g] = x_scales[random_bits() % 6];
        naive_sums(c->q + g * 64, 64, c->sums + g);
    }
}

static void test_matmul_property(void **state)
{
    (void)state;
    struct property_case *c = calloc(1, sizeof *c);
    for (int round = 0; round < 120; round++) {
        if (round % 40 == 0)
            fill_case(c);
        uint32_t kind = random_bits() % 6 % 4; /* int8 activations twice as often */
        enum weight_format format = kind % 2 ? WEIGHT_INT4 : WEIGHT_INT8;
        uint32_t rows = round % 10 == 9 ? PROPERTY_ROWS - random_bits() % 70 : 1 + random_bits() % 70;
        uint32_t blocks = 1 + random_bits() % PROPERTY_BLOCKS;
        uint32_t groups = 1 + random_bits() % PROPERTY_GROUPS, k = groups * 64;
        size_t shift = random_bits() % 16 * groups; /* pointers at odd places */
        struct matmul_row row[PROPERTY_ROWS];
        for (uint32_t s = 0; s < set_count; s++) {
            matmul_function *multiply[] = {sets[s]->matmul_int8, sets[s]->matmul_int4, sets[s]->matmul_int8_f32,
                                           sets[s]->matmul_int4_f32};
            float *y = s == 0 ? c->want : c->y;
            for (uint32_t r = 0; r < rows; r++) {
                size_t at = (r * (size_t)groups + shift) % (PROPERTY_ROWS * (size_t)PROPERTY_GROUPS - groups);
                row[r] = (struct matmul_row){c->q + at * 64, c->x_scales + at, c->sums + at, c->x + at * 64,
                                             y + r * (size_t)PROPERTY_BLOCKS * 16};
            }
            memset(y, 0xff, sizeof c->y);
            multiply[kind](c->quanta, c->scales, blocks, k, 0x1p-3f, row, rows);
            if (memcmp(c->want, c->y, sizeof c->y) != 0 && s > 0)
                fail_msg("set %u (%s), int%d, %s: %u rows, %u block rows, k %u: other bits", s, sets[s]->name,
                         format == WEIGHT_INT8 ? 8 : 4, kind >= 2 ? "f32" : "int8", rows, blocks, k);
        }
    }
    free(c);
}

static void test_linear(void **state)
{
    (void)state;
    static const enum tensor_dtype dtypes[] = {DTYPE_F32, DTYPE_F16, DTYPE_BF16};
    for (int d = 0; d < 3; d++)
        for (uint32_t k = 16; k < 300; k += 19) {
            enum { N = 5 };
            float *w = random_vector((size_t)N * k), *x = random_vector(k), y[N];
            uint16_t *half = calloc((size_t)N * k, 2);
            for (size_t i = 0; i < (size_t)N * k; i++) {
                uint32_t bits;
                memcpy(&bits, &w[i], 4);
                half[i] = dtypes[d] == DTYPE_F16 ? math_f32_to_f16(w[i]) : (uint16_t)(bits >> 16);
                if (dtypes[d] != DTYPE_F32)
                    w[i] = dtypes[d] == DTYPE_F16 ? math_f16_to_f32(half[i]) : math_bf16_to_f32(half[i]);
            }
            for (uint32_t s = 0; s < set_count; s++) {
                const struct matmul_row row = {.x = x, .y = y};
                sets[s]->linear(dtypes[d] == DTYPE_F32 ? (const void *)w : half, dtypes[d], N, k, &row, 1);
                for (uint32_t n = 0; n < N; n++) {
                    float want = naive_dot(w + (size_t)n * k, x, k);
                    assert_memory_equal(&y[n], &want, 4);
                }
            }
            free(w);
            free(x);
            free(half);
        }
}

static void test_norms(void **state)
{
    (void)state;
    for (uint32_t n = 16; n <= 1040; n += 61) {
        float *x = random_vector(n), *w = random_vector(n), *b = random_vector(n), *y = random_vector(n);
        float rms = 1.0f / sqrtf(naive_dot(x, x, n) / (float)n + 1e-5f), mean = naive_sum(x, n) / (float)n;
        for (uint32_t s = 0; s < set_count; s++) {
            sets[s]->rmsnorm(x, w, n, 1e-5f, y);
            for (uint32_t i = 0; i < n; i++)
                assert_true(y[i] == w[i] * (x[i] * rms));
            float *d = calloc(n, 4);
            for (uint32_t i = 0; i < n; i++)
                d[i] = x[i] - mean;
            float scale = 1.0f / sqrtf(naive_dot(d, d, n) / (float)n + 1e-6f);
            sets[s]->layernorm(x, w, b, n, 1e-6f, y);
            for (uint32_t i = 0; i < n; i++)
                assert_true(y[i] == fmaf(d[i] * scale, w[i], b[i]));
            free(d);
        }
        free(x);
        free(w);
        free(b);
        free(y);
    }
}

static void test_pointwise(void **state)
{
    (void)state;
    enum { N = 203, D = 64 };
    float *gate = random_vector(N), *up = random_vector(N), y[N], cos[D / 2], sin[D / 2];
    gate[0] = -200.0f;
    gate[1] = 200.0f;
    for (int j = 0; j < D / 2; j++) {
        double s, c;
        math_sincos(j * 0.7, &s, &c);
        cos[j] = (float)c;
        sin[j] = (float)s;
    }
    for (uint32_t s = 0; s < set_count; s++) {
        sets[s]->swiglu(gate, up, N, y);
        for (int i = 0; i < N; i++) {
            float want = gate[i] / (1.0f + math_exp(-gate[i])) * up[i];
            assert_memory_equal(&y[i], &want, 4);
        }
        sets[s]->sigmoid(gate, N, y);
        for (int i = 0; i < N; i++)
            assert_true(y[i] == 1.0f / (1.0f + math_exp(-gate[i])));
        memcpy(y, up, sizeof y);
        sets[s]->accumulate(0.37f, gate, N, y);
        for (int i = 0; i < N; i++)
            assert_true(y[i] == fmaf(0.37f, gate[i], up[i]));
        sets[s]->add(gate, N, y);
        for (int i = 0; i < N; i++)
            assert_true(y[i] == fmaf(0.37f, gate[i], up[i]) + gate[i]);
        float most = gate[0];
        for (int i = 0; i < N; i++)
            most = fmaxf(most, gate[i]);
        assert_true(sets[s]->maximum(gate, N) == most);
        uint16_t half[N];
        sets[s]->store_f16(gate, N, half);
        sets[s]->load_f16(half, N, y);
        for (int i = 0; i < N; i++)
            assert_true(half[i] == math_f32_to_f16(gate[i]) && y[i] == math_f16_to_f32(half[i]));
        for (int interleave = 0; interleave < 2; interleave++) {
            memcpy(y, up, sizeof y);
            sets[s]->rope(y, cos, sin, D, interleave);
            for (int j = 0; j < D / 2; j++) {
                int a = interleave ? 2 * j : j, b = interleave ? 2 * j + 1 : j + D / 2;
                float first = up[a] * cos[j] - up[b] * sin[j], second = up[a] * sin[j] + up[b] * cos[j];
                assert_true(y[a] == first && y[b] == second);
            }
        }
    }
    free(gate);
    free(up);
}

static void test_attention(void **state)
{
    (void)state;
    enum { HEADS = 3, KV = 80, WIDTH = 112 };
    for (uint32_t count = 1; count <= KEY_BLOCK; count += 7) {
        float *q = random_vector(HEADS * WIDTH), *keys = random_vector((size_t)count * WIDTH),
              *z = random_vector(HEADS * KV);
        float scores[HEADS][100], got[HEADS * KV];
        for (uint32_t s = 0; s < set_count; s++) {
            sets[s]->attention_scores(q, HEADS, keys, count, WIDTH, 0.07f, scores[0], 100);
            memcpy(got, z, sizeof got);
            for (uint32_t h = 0; h < HEADS; h++) {
                float want[KEY_BLOCK];
                for (uint32_t t = 0; t < count; t++) {
                    want[t] = naive_dot(q + h * WIDTH, keys + (size_t)t * WIDTH, WIDTH) * 0.07f;
                    assert_memory_equal(&want[t], &scores[h][t], 4);
                }
                float max = sets[s]->maximum(scores[h], count), sum = sets[s]->softmax_block(scores[h], count, max);
                for (uint32_t t = 0; t < count; t++) {
                    want[t] = math_exp(want[t] - max);
                    assert_true(want[t] == scores[h][t]);
                }
                assert_true(sum == naive_sum(want, count));
            }
            sets[s]->attention_sum(scores[0], 100, HEADS, keys, count, WIDTH, KV, got);
            for (uint32_t h = 0; h < HEADS; h++)
                for (uint32_t j = 0; j < KV; j++) {
                    float block = 0.0f;
                    for (uint32_t t = 0; t < count; t++)
                        block = fmaf(scores[h][t], keys[(size_t)t * WIDTH + j], block);
                    assert_true(got[h * KV + j] == z[h * KV + j] + block);
                }
        }
        free(q);
        free(keys);
        free(z);
    }
}

static void check_index(uint32_t heads, uint32_t dim, uint32_t count)
{
    uint32_t groups = dim / 64;
    float *q = random_vector((size_t)heads * dim), *keys = random_vector((size_t)count * dim),
          *w = random_vector(heads);
    float *qs = random_vector(heads * groups), *ks = random_vector(count * groups), *got = random_vector(count + 1);
    int8_t *qq = malloc((size_t)heads * dim), *qk = malloc((size_t)count * dim);
    int32_t *sums = calloc(heads * groups, sizeof *sums);
    float behind = got[count];
    naive_quantise(q, heads * dim, qq, qs);
    naive_quantise(keys, count * dim, qk, ks);
    if (count % 3 == 0) { /* the extremes must not overflow anything */
        memset(qq, 127, dim);
        memset(qk, count % 2 ? -127 : 127, dim);
    }
    naive_sums(qq, heads * dim, sums);
    const struct index_queries queries = {heads, dim, qq, qs, sums, q, w, 0.09f};
    for (uint32_t s = 0; s < set_count; s++)
        for (int f32 = 0; f32 < 2; f32++) {
            if (f32)
                sets[s]->index_scores_f32(&queries, keys, count, got);
            else
                sets[s]->index_scores(&queries, qk, ks, count, got);
            for (uint32_t t = 0; t < count; t++) {
                float want = 0.0f;
                for (uint32_t h = 0; h < heads; h++) {
                    float dot = naive_dot(q + (size_t)h * dim, keys + (size_t)t * dim, dim);
                    for (uint32_t g = 0; !f32 && g < groups; g++) {
                        int integer = 0;
                        for (uint32_t i = g * 64; i < g * 64 + 64; i++)
                            integer += qq[h * dim + i] * qk[t * dim + i];
                        dot = fmaf((float)integer * qs[h * groups + g], ks[t * groups + g], g == 0 ? 0.0f : dot);
                    }
                    float relu = dot * 0.09f > 0.0f ? dot * 0.09f : 0.0f;
                    want = fmaf(w[h], relu, want);
                }
                if (memcmp(&got[t], &want, sizeof want) != 0)
                    fail_msg("%s, %u heads of %u, key %u of %u: %a, want %a", sets[s]->name, heads, dim, t, count,
                             (double)got[t], (double)want);
            }
            assert_true(got[count] == behind);
        }
    free(q);
    free(keys);
    free(w);
    free(qs);
    free(ks);
    free(got);
    free(qq);
    free(qk);
    free(sums);
}

static void test_index(void **state)
{
    (void)state;
    static const uint32_t counts[] = {1, 9, 15, 16, 17, 31, 33, 37, 64};
    for (uint32_t heads = 1; heads <= 9; heads += 2)
        for (uint32_t dim = 64; dim <= 320; dim += 64)
            for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++)
                check_index(heads, dim, counts[i]);
}

/* By definition: index i is kept when fewer than k others come before it (higher score, or the same and lower
 * index). */
static void test_select(void **state)
{
    (void)state;
    for (uint32_t n = 1; n <= 200; n += 13)
        for (uint32_t k = 0; k <= n; k += 1 + n / 9)
            for (int kind = 0; kind < 3; kind++) {
                float *x = random_vector(n);
                uint32_t *got = calloc(n, sizeof *got);
                for (uint32_t i = 0; i < n; i++) {
                    x[i] = kind == 1 ? (float)(random_bits() % 4) - 1.0f : kind == 2 ? 0.0f : x[i];
                    x[i] = x[i] == 0.0f && random_bits() % 2 ? -0.0f : x[i]; /* equal zeros */
                    x[i] = kind == 1 && random_bits() % 9 == 0 ? -INFINITY : x[i];
                }
                for (uint32_t s = 0; s < set_count; s++) {
                    assert_int_equal(sets[s]->select(x, n, k, got), k);
                    uint32_t next = 0;
                    for (uint32_t i = 0; i < n; i++) {
                        uint32_t before = 0;
                        for (uint32_t j = 0; j < n; j++)
                            before += x[j] > x[i] || (x[j] == x[i] && j < i);
                        if (before < k)
                            assert_int_equal(got[next++], i);
                    }
                    assert_int_equal(next, k);
                }
                free(x);
                free(got);
            }
}

/* Many scores, as a long context has: every set keeps what the reference keeps. */
static void test_select_many(void **state)
{
    (void)state;
    enum { MOST = 40000 };
    float *x = calloc(MOST, sizeof *x);
    uint32_t *want = calloc(MOST, sizeof *want), *got = calloc(MOST, sizeof *got);
    for (int round = 0; round < 60; round++) {
        uint32_t n = 4000 + random_bits() % (MOST - 4000), k = round % 10 == 0 ? n : random_bits() % n;
        for (uint32_t i = 0; i < n; i++) {
            x[i] = random_value();
            if (round % 4 == 1) /* close together: they differ in the last bits only */
                x[i] = 1.0f + (float)(random_bits() % 5000) * 0x1p-23f;
            else if (round % 4 == 2) /* many equal ones */
                x[i] = (float)(random_bits() % 7) - 3.0f;
            else if (round % 4 == 3 && random_bits() % 3 == 0)
                x[i] = random_bits() % 2 ? 0.0f : -0.0f;
        }
        assert_int_equal(sets[0]->select(x, n, k, want), k);
        for (uint32_t s = 1; s < set_count; s++) {
            memset(got, 0xff, MOST * sizeof *got);
            assert_int_equal(sets[s]->select(x, n, k, got), k);
            if (memcmp(got, want, k * sizeof *got) != 0)
                fail_msg("%s, %u of %u: another choice than the reference's", sets[s]->name, k, n);
            assert_true(k == MOST || got[k] == UINT32_MAX);
        }
    }
    free(x);
    free(want);
    free(got);
}

static void test_choose(void **state)
{
    (void)state;
    const struct kernel_set *set;
    struct error error;
    assert_int_equal(kernel_choose(ISA_AUTO, &set, NULL), 0);
    assert_int_equal(kernel_choose(ISA_SCALAR, &set, NULL), 0);
    assert_string_equal(set->name, "scalar");
    assert_int_equal(kernel_choose(ISA_COUNT, &set, &error), -EINVAL);

    assert_int_equal(kernel_choose_for(ISA_AUTO, 0, &set, NULL), 0);
    assert_string_equal(set->name, "scalar");
    assert_int_equal(kernel_choose_for(ISA_AMX, 0, &set, &error), -ENOTSUP);
    assert_non_null(strstr(error.text, "isa=amx"));
    assert_non_null(strstr(error.text, "isa=scalar"));
    assert_null(strchr(error.text, '\n'));
}

#if defined(__x86_64__)
/* Machines that lack one thing. */
static void test_choose_names_what_is_missing(void **state)
{
    (void)state;
    static const struct {
        uint32_t without, isa;
        const char *missing, *best;
    } cases[] = {
        {1u << CPU_AVX2, ISA_AVX2, "lacks AVX2;", "scalar"},
        {1u << CPU_AVX512_VNNI, ISA_AVX512, "lacks AVX512-VNNI;", "avxvnni"},
        {1u << CPU_AVX512_VNNI | 1u << CPU_AVX_VNNI, ISA_AVX512, "lacks AVX512-VNNI;", "avx2"},
        {1u << CPU_ZMM_STATE, ISA_AVX512, "lacks a kernel that saves zmm registers;", "avxvnni"},
        {1u << CPU_AMX_INT8 | 1u << CPU_TILE_PERMISSION, ISA_AMX,
         "lacks AMX-INT8, the kernel's permission to use tiles;", "avx512"},
        {1u << CPU_TILE_STATE, ISA_AMX, "lacks a kernel that saves tile registers;", "avx512"},
    };
    const uint32_t all = (1u << CPU_FEATURES) - 1;
    const struct kernel_set *set;
    assert_int_equal(kernel_choose_for(ISA_AUTO, all, &set, NULL), 0);
    assert_string_equal(set->name, "amx");
    assert_int_equal(kernel_choose_for(ISA_AVX2, all, &set, NULL), 0);
    assert_string_equal(set->name, "avxvnni");
    assert_int_equal(kernel_choose_for(ISA_AVX2, all & ~(1u << CPU_AVX_VNNI), &set, NULL), 0);
    assert_string_equal(set->name, "avx2");
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct error error;
        assert_int_equal(kernel_choose_for(cases[i].isa, all & ~cases[i].without, &set, &error), -ENOTSUP);
        if (!strstr(error.text, cases[i].missing))
            fail_msg("'%s' does not say '%s'", error.text, cases[i].missing);
        assert_int_equal(kernel_choose_for(ISA_AUTO, all & ~cases[i].without, &set, NULL), 0);
        assert_string_equal(set->name, cases[i].best);
    }
}
#endif

/* The sets that run here and the models that do; says what was left out. */
static void find_sets(void)
{
    char missing[256];
    const struct kernel_set *set;
    bool avx512 = false;
    for (uint32_t i = 0; (set = kernel_set_at(i, missing, sizeof missing)); i++) {
        if (missing[0]) {
            print_message("skipped: %s (this machine lacks %s)\n", set->name, missing);
            continue;
        }
        print_message("set %u: %s\n", set_count, set->name);
        sets[set_count++] = set;
#if defined(__x86_64__)
        avx512 = avx512 || set == &kernel_avx512;
#endif
    }
    print_message("set %u: amx over the model of its tiles\n", set_count);
    sets[set_count++] = &kernel_amx_model;
    if (!avx512) {
        print_message("skipped: amx over the model, for AVX-512\n");
        return;
    }
#if defined(__x86_64__)
    print_message("set %u: the same, for AVX-512\n", set_count);
    sets[set_count++] = &kernel_amx_model_avx512;
#endif
}

int main(void)
{
    find_sets();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_quantise),
        cmocka_unit_test(test_quantise_extremes),
        cmocka_unit_test(test_quantise_no_number),
        cmocka_unit_test(test_fused),
        cmocka_unit_test(test_matmul),
        cmocka_unit_test(test_linear),
        cmocka_unit_test(test_norms),
        cmocka_unit_test(test_pointwise),
        cmocka_unit_test(test_attention),
        cmocka_unit_test(test_index),
        cmocka_unit_test(test_select),
        cmocka_unit_test(test_select_many),
        cmocka_unit_test(test_choose),
        cmocka_unit_test(test_matmul_property),
#if defined(__x86_64__)
        cmocka_unit_test(test_choose_names_what_is_missing),
#endif
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
