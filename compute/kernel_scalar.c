/* The reference kernel set. It is compiled twice from this file, for x86-64-v2 and for x86-64-v3 (KERNEL_SET names the table); both give
 * the same bits, because every sum below has one order, 16 rows or 16 elements are 16 lanes, and contraction is off. */
#include "compute/kernel.h"
#include "compute/kernel_scalar.h"
#include "compute/lanes.h"

#define ALWAYS_INLINE static inline __attribute__((always_inline))
#define TILE_ROWS 4u /* activation rows that share one pass over a block of weights */

static struct lanes load_scales(const uint16_t *scales)
{
    float scale[LANES];
    for (unsigned r = 0; r < BLOCK_ROWS; r++)
        scale[r] = inline_f16_to_f32(scales[r]);
    return lanes_load(scale);
}

/* Quantise: xs = absmax / 127, q = rint(x * (127 / absmax)), all 0 when absmax is 0. */
static void quantise(const float *x, uint32_t k, int8_t *ret_q, float *ret_scales)
{
    const float shift = 0x1.8p23f; /* rounds to the nearest integer, ties to even */
    for (uint32_t g = 0; g < k / GROUP; g++, x += GROUP, ret_q += GROUP) {
        float most = 0.0f;
        for (unsigned i = 0; i < GROUP; i++) {
            float magnitude = float_of_bits(bits_of_float(x[i]) & 0x7fffffffu);
            most = magnitude > most ? magnitude : most;
        }
        float inverse = most > 0.0f ? 127.0f / most : 0.0f;
        ret_scales[g] = most / 127.0f;
        for (unsigned i = 0; i < GROUP; i++) {
            float q = x[i] * inverse;
            q = q < 127.0f ? q : 127.0f; /* also catches infinity and NaN, which no longer are numbers of this model */
            q = q > -127.0f ? q : -127.0f;
            ret_q[i] = (int8_t)(int32_t)((q + shift) - shift);
        }
    }
}

/* One block row times `rows` (a constant, so that the loops are unrolled) activation rows. */
ALWAYS_INLINE void matmul_tile(const uint8_t *quanta, const uint16_t *scales, enum weight_format format, uint32_t k, float factor,
                               const struct matmul_row *row, unsigned rows, size_t y_offset)
{
    struct lanes sum[TILE_ROWS];
    for (unsigned r = 0; r < rows; r++)
        sum[r] = lanes_set(0.0f);
    for (uint32_t g = 0; g < k / GROUP; g++, quanta += block_bytes(format), scales += BLOCK_ROWS) {
        bytes_part dot[TILE_ROWS][PARTS];
        for (unsigned r = 0; r < rows; r++)
            for (unsigned p = 0; p < PARTS; p++)
                dot[r][p] = part_zero();
        for (unsigned line = 0; line < GROUP / 4; line++)
            for (unsigned p = 0; p < PARTS; p++) {
                const uint8_t *from = quanta + (format == WEIGHT_INT4 ? line % 8 : line) * 64 + p * sizeof(bytes_part);
                bytes_part w = part_load(from);
                if (format == WEIGHT_INT4)
                    w = part_nibbles(w, line >= 8);
                bytes_part even = part_even(w), odd = part_odd(w);
                for (unsigned r = 0; r < rows; r++) {
                    bytes_part x = part_repeat(row[r].q + (size_t)g * GROUP + line * 4);
                    dot[r][p] = part_dot(part_dot(dot[r][p], even, part_even(x)), odd, part_odd(x));
                }
            }
        struct lanes scale = load_scales(scales);
        for (unsigned r = 0; r < rows; r++) {
            struct lanes scaled = lanes_multiply(lanes_of_integers(integers_of_parts(dot[r])), scale);
            sum[r] = lanes_fma(scaled, lanes_set(row[r].scales[g]), sum[r]);
        }
    }
    for (unsigned r = 0; r < rows; r++)
        lanes_store(lanes_multiply(sum[r], lanes_set(factor)), row[r].y + y_offset);
}

ALWAYS_INLINE void matmul(const void *quanta, const uint16_t *scales, enum weight_format format, uint32_t blocks, uint32_t k, float factor,
                          const struct matmul_row *rows, uint32_t row_count)
{
    for (uint32_t b = 0; b < blocks; b++) {
        const uint8_t *block = (const uint8_t *)quanta + quanta_bytes(format, b, k);
        const uint16_t *block_scales = scales + scales_bytes(b, k) / 2;
        uint32_t r = 0;
        for (; r + TILE_ROWS <= row_count; r += TILE_ROWS)
            matmul_tile(block, block_scales, format, k, factor, rows + r, TILE_ROWS, (size_t)b * BLOCK_ROWS);
        for (; r < row_count; r++)
            matmul_tile(block, block_scales, format, k, factor, rows + r, 1, (size_t)b * BLOCK_ROWS);
    }
}

static void matmul_int8(const void *quanta, const uint16_t *scales, uint32_t blocks, uint32_t k, float factor, const struct matmul_row *rows,
                        uint32_t row_count)
{
    matmul(quanta, scales, WEIGHT_INT8, blocks, k, factor, rows, row_count);
}

static void matmul_int4(const void *quanta, const uint16_t *scales, uint32_t blocks, uint32_t k, float factor, const struct matmul_row *rows,
                        uint32_t row_count)
{
    matmul(quanta, scales, WEIGHT_INT4, blocks, k, factor, rows, row_count);
}

/* With f32 activations a group is summed column by column from 0, then scaled into the sum. */
ALWAYS_INLINE void matmul_tile_f32(const uint8_t *quanta, const uint16_t *scales, enum weight_format format, uint32_t k, float factor,
                                   const struct matmul_row *row, unsigned rows, size_t y_offset)
{
    struct lanes sum[TILE_ROWS];
    for (unsigned r = 0; r < rows; r++)
        sum[r] = lanes_set(0.0f);
    for (uint32_t g = 0; g < k / GROUP; g++, quanta += block_bytes(format), scales += BLOCK_ROWS) {
        struct lanes group[TILE_ROWS];
        for (unsigned r = 0; r < rows; r++)
            group[r] = lanes_set(0.0f);
        for (unsigned line = 0; line < GROUP / 4; line++) {
            bytes_part w[PARTS];
            for (unsigned p = 0; p < PARTS; p++) {
                w[p] = part_load(quanta + (format == WEIGHT_INT4 ? line % 8 : line) * 64 + p * sizeof(bytes_part));
                if (format == WEIGHT_INT4)
                    w[p] = part_nibbles(w[p], line >= 8);
            }
            for (int c = 0; c < 4; c++) {
                bytes_part column[PARTS];
                for (unsigned p = 0; p < PARTS; p++)
                    column[p] = part_column(w[p], c);
                struct lanes weight = lanes_of_integers(integers_of_parts(column));
                for (unsigned r = 0; r < rows; r++)
                    group[r] = lanes_fma(weight, lanes_set(row[r].x[(size_t)g * GROUP + line * 4 + (unsigned)c]), group[r]);
            }
        }
        struct lanes scale = load_scales(scales);
        for (unsigned r = 0; r < rows; r++)
            sum[r] = lanes_fma(group[r], scale, sum[r]);
    }
    for (unsigned r = 0; r < rows; r++)
        lanes_store(lanes_multiply(sum[r], lanes_set(factor)), row[r].y + y_offset);
}

ALWAYS_INLINE void matmul_f32(const void *quanta, const uint16_t *scales, enum weight_format format, uint32_t blocks, uint32_t k,
                              float factor, const struct matmul_row *rows, uint32_t row_count)
{
    for (uint32_t b = 0; b < blocks; b++) {
        const uint8_t *block = (const uint8_t *)quanta + quanta_bytes(format, b, k);
        const uint16_t *block_scales = scales + scales_bytes(b, k) / 2;
        uint32_t r = 0;
        for (; r + TILE_ROWS <= row_count; r += TILE_ROWS)
            matmul_tile_f32(block, block_scales, format, k, factor, rows + r, TILE_ROWS, (size_t)b * BLOCK_ROWS);
        for (; r < row_count; r++)
            matmul_tile_f32(block, block_scales, format, k, factor, rows + r, 1, (size_t)b * BLOCK_ROWS);
    }
}

static void matmul_int8_f32(const void *quanta, const uint16_t *scales, uint32_t blocks, uint32_t k, float factor,
                            const struct matmul_row *rows, uint32_t row_count)
{
    matmul_f32(quanta, scales, WEIGHT_INT8, blocks, k, factor, rows, row_count);
}

static void matmul_int4_f32(const void *quanta, const uint16_t *scales, uint32_t blocks, uint32_t k, float factor,
                            const struct matmul_row *rows, uint32_t row_count)
{
    matmul_f32(quanta, scales, WEIGHT_INT4, blocks, k, factor, rows, row_count);
}

static void dequantise_row(const void *quanta, const uint16_t *scales, enum weight_format format, uint32_t row, uint32_t k, float factor,
                           float *ret_x)
{
    for (uint32_t c = 0; c < k; c++) {
        const uint8_t *block = (const uint8_t *)quanta + c / GROUP * block_bytes(format);
        uint32_t column = c % GROUP;
        int quantum;
        if (format == WEIGHT_INT4) {
            uint8_t both = block[column % 32 / 4 * 64 + row * 4 + column % 4];
            quantum = (column < 32 ? both & 15 : both >> 4) - 8;
        } else {
            quantum = (int8_t)block[column / 4 * 64 + row * 4 + column % 4];
        }
        ret_x[c] = (float)quantum * inline_f16_to_f32(scales[c / GROUP * BLOCK_ROWS + row]) * factor;
    }
}

/* sum_i x_i y_i: lane l takes elements l, l + 16, ...; zeros fill up the last 16. */
ALWAYS_INLINE float dot_f32(const float *x, const float *y, uint32_t n)
{
    struct lanes sum = lanes_set(0.0f);
    uint32_t i = 0;
    for (; i + LANES <= n; i += LANES)
        sum = lanes_fma(lanes_load(x + i), lanes_load(y + i), sum);
    if (i < n)
        sum = lanes_fma(lanes_load_tail(x + i, n - i, 0.0f), lanes_load_tail(y + i, n - i, 0.0f), sum);
    return lanes_sum(sum);
}

ALWAYS_INLINE float sum_f32(const float *x, uint32_t n)
{
    struct lanes sum = lanes_set(0.0f);
    uint32_t i = 0;
    for (; i + LANES <= n; i += LANES)
        sum = lanes_add(sum, lanes_load(x + i));
    if (i < n)
        sum = lanes_add(sum, lanes_load_tail(x + i, n - i, 0.0f));
    return lanes_sum(sum);
}

static void linear(const void *weights, enum tensor_dtype dtype, uint32_t n, uint32_t k, const float *x, float *ret_y)
{
    for (uint32_t row = 0; row < n; row++) {
        size_t first = (size_t)row * k;
        if (dtype == DTYPE_F32) {
            ret_y[row] = dot_f32((const float *)weights + first, x, k);
            continue;
        }
        const uint16_t *w = (const uint16_t *)weights + first;
        struct lanes sum = lanes_set(0.0f);
        for (uint32_t i = 0; i < k; i += LANES) {
            unsigned count = k - i < LANES ? k - i : LANES;
            float part[LANES] = {0};
            for (unsigned l = 0; l < count; l++)
                part[l] = dtype == DTYPE_BF16 ? inline_bf16_to_f32(w[i + l]) : inline_f16_to_f32(w[i + l]);
            sum = lanes_fma(lanes_load(part), count == LANES ? lanes_load(x + i) : lanes_load_tail(x + i, count, 0.0f), sum);
        }
        ret_y[row] = lanes_sum(sum);
    }
}

static void rmsnorm(const float *x, const float *weight, uint32_t n, float eps, float *ret_y)
{
    float mean = dot_f32(x, x, n) / (float)n;
    float scale = 1.0f / sqrtf(mean + eps);
    for (uint32_t i = 0; i < n; i++)
        ret_y[i] = weight[i] * (x[i] * scale);
}

static void layernorm(const float *x, const float *weight, const float *bias, uint32_t n, float eps, float *ret_y)
{
    float mean = sum_f32(x, n) / (float)n;
    for (uint32_t i = 0; i < n; i++)
        ret_y[i] = x[i] - mean;
    float variance = dot_f32(ret_y, ret_y, n) / (float)n;
    float scale = 1.0f / sqrtf(variance + eps);
    for (uint32_t i = 0; i < n; i++)
        ret_y[i] = __builtin_fmaf(ret_y[i] * scale, weight[i], bias[i]);
}

static void sigmoid(const float *x, uint32_t n, float *ret_y)
{
    for (uint32_t i = 0; i < n; i++)
        ret_y[i] = 1.0f / (1.0f + inline_exp(-x[i]));
}

static void swiglu(const float *gate, const float *up, uint32_t n, float *ret_y)
{
    for (uint32_t i = 0; i < n; i++) {
        float silu = gate[i] / (1.0f + inline_exp(-gate[i]));
        ret_y[i] = silu * up[i];
    }
}

static void rope(float *x, const float *cos, const float *sin, uint32_t d, bool interleave)
{
    uint32_t half = d / 2;
    for (uint32_t j = 0; j < half; j++) {
        float *first = interleave ? x + 2 * j : x + j, *second = interleave ? first + 1 : first + half;
        float a = *first, b = *second;
        *first = a * cos[j] - b * sin[j];
        *second = a * sin[j] + b * cos[j];
    }
}

static void accumulate(float weight, const float *x, uint32_t n, float *y)
{
    for (uint32_t i = 0; i < n; i++)
        y[i] = __builtin_fmaf(weight, x[i], y[i]);
}

static void add(const float *x, uint32_t n, float *y)
{
    for (uint32_t i = 0; i < n; i++)
        y[i] = y[i] + x[i];
}

static void store_f16(const float *x, uint32_t n, uint16_t *ret_y)
{
    for (uint32_t i = 0; i < n; i++)
        ret_y[i] = inline_f32_to_f16(x[i]);
}

static void load_f16(const uint16_t *x, uint32_t n, float *ret_y)
{
    for (uint32_t i = 0; i < n; i++)
        ret_y[i] = inline_f16_to_f32(x[i]);
}

static void attention_scores(const float *q, uint32_t heads, const float *keys, uint32_t count, uint32_t width, float scale,
                             float *ret_scores, size_t score_stride)
{
    for (uint32_t t = 0; t < count; t++)
        for (uint32_t h = 0; h < heads; h++)
            ret_scores[h * score_stride + t] = dot_f32(q + (size_t)h * width, keys + (size_t)t * width, width) * scale;
}

static float maximum(const float *x, uint32_t n)
{
    float most = x[0];
    for (uint32_t i = 1; i < n; i++)
        most = x[i] > most ? x[i] : most;
    return most;
}

static float softmax_block(float *scores, uint32_t count, float max)
{
    for (uint32_t t = 0; t < count; t++)
        scores[t] = inline_exp(scores[t] - max);
    return sum_f32(scores, count);
}

static void attention_sum(const float *p, size_t p_stride, uint32_t heads, const float *keys, uint32_t count, uint32_t width, uint32_t n,
                          float *z)
{
    for (uint32_t h = 0; h < heads; h++)
        for (uint32_t j = 0; j < n; j += LANES) {
            struct lanes sum = lanes_set(0.0f);
            for (uint32_t t = 0; t < count; t++)
                sum = lanes_fma(lanes_set(p[h * p_stride + t]), lanes_load(keys + (size_t)t * width + j), sum);
            float *at = z + (size_t)h * n + j;
            lanes_store(lanes_add(lanes_load(at), sum), at);
        }
}

/* I = fma(w, relu(dot * scale), I), heads ascending. */
ALWAYS_INLINE float index_add(float sum, float w, float dot, float scale)
{
    float scaled = dot * scale;
    return __builtin_fmaf(w, scaled > 0.0f ? scaled : 0.0f, sum);
}

static void index_scores(const int8_t *q, const float *q_scales, const float *w, uint32_t heads, uint32_t dim, float scale,
                         const int8_t *keys, const float *key_scales, uint32_t count, float *ret_scores)
{
    uint32_t groups = dim / GROUP;
    for (uint32_t t = 0; t < count; t++) {
        float sum = 0.0f;
        for (uint32_t h = 0; h < heads; h++) {
            float dot = 0.0f;
            for (uint32_t g = 0; g < groups; g++) {
                const int8_t *a = q + (size_t)h * dim + g * GROUP, *b = keys + (size_t)t * dim + g * GROUP;
                int32_t integer = 0;
                for (unsigned i = 0; i < GROUP; i++)
                    integer += a[i] * b[i];
                dot = __builtin_fmaf((float)integer * q_scales[h * groups + g], key_scales[t * groups + g], dot);
            }
            sum = index_add(sum, w[h], dot, scale);
        }
        ret_scores[t] = sum;
    }
}

static void index_scores_f32(const float *q, const float *w, uint32_t heads, uint32_t dim, float scale, const float *keys, uint32_t count,
                             float *ret_scores)
{
    for (uint32_t t = 0; t < count; t++) {
        float sum = 0.0f;
        for (uint32_t h = 0; h < heads; h++)
            sum = index_add(sum, w[h], dot_f32(q + (size_t)h * dim, keys + (size_t)t * dim, dim), scale);
        ret_scores[t] = sum;
    }
}

/* A float as an unsigned integer of the same order; -0 as 0. */
ALWAYS_INLINE uint32_t order_of(float x)
{
    uint32_t bits = bits_of_float(x + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

/* Finds the k-th largest by its bytes, from the highest down: of the values that agree in the bytes found so far, count the next one. */
static uint32_t select_best(const float *scores, uint32_t n, uint32_t k, uint32_t *ret_index)
{
    if (k == 0)
        return 0;
    uint32_t prefix = 0, mask = 0, wanted = k; /* the wanted-th largest among those that match prefix */
    for (int shift = 24; shift >= 0; shift -= 8) {
        uint32_t count[256] = {0};
        for (uint32_t i = 0; i < n; i++) {
            uint32_t order = order_of(scores[i]);
            if ((order & mask) == prefix)
                count[order >> shift & 255]++;
        }
        uint32_t byte = 255;
        while (byte > 0 && count[byte] < wanted)
            wanted -= count[byte--];
        prefix |= byte << shift;
        mask |= 255u << shift;
    }
    uint32_t kept = 0;
    for (uint32_t i = 0; i < n && kept < k; i++) {
        uint32_t order = order_of(scores[i]);
        if (order > prefix || (order == prefix && wanted > 0)) {
            wanted -= order == prefix;
            ret_index[kept++] = i;
        }
    }
    return kept;
}

const struct kernel_set KERNEL_SET = {
    .name = "scalar",
    .quantise = quantise,
    .matmul_int8 = matmul_int8,
    .matmul_int4 = matmul_int4,
    .matmul_int8_f32 = matmul_int8_f32,
    .matmul_int4_f32 = matmul_int4_f32,
    .linear = linear,
    .dequantise_row = dequantise_row,
    .rmsnorm = rmsnorm,
    .layernorm = layernorm,
    .swiglu = swiglu,
    .sigmoid = sigmoid,
    .rope = rope,
    .accumulate = accumulate,
    .add = add,
    .store_f16 = store_f16,
    .load_f16 = load_f16,
    .attention_scores = attention_scores,
    .maximum = maximum,
    .softmax_block = softmax_block,
    .attention_sum = attention_sum,
    .index_scores = index_scores,
    .index_scores_f32 = index_scores_f32,
    .select = select_best,
};
