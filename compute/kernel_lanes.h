/* The functions of a kernel set that are the same in all of them, written over lanes.h. Each kernel_<set>.c includes
 * this once and is compiled with its own flags; it adds what really differs: integer matrix products and index scores.
 *
 * Loops over elements that are independent are left to the compiler to vectorise; sums are in lanes, so that their
 * order is the same everywhere: element i in lane i % 16, zeros fill up the last 16, one reduction tree (lanes_sum). */
#pragma once

#include "compute/kernel.h"
#include "compute/lanes.h"

#define ALWAYS_INLINE static inline __attribute__((always_inline))

/* One group: xs = absmax / 127, q = rint(x * (127 / absmax)), all 0 when absmax is 0 (or so small that 127 / absmax is no
 * f32). Where a value is no number xs is none either, so that no product with the group is. */
ALWAYS_INLINE void quantise_group(const struct lanes x[GROUP / LANES], int8_t *ret_q, float *ret_scale,
                                  int32_t *ret_sum)
{
    struct lanes greatest = lanes_magnitude(x[0]), q[GROUP / LANES];
    for (unsigned i = 1; i < GROUP / LANES; i++)
        greatest = lanes_greater_magnitude(lanes_magnitude(x[i]), greatest);
    float most = lanes_greatest_magnitude(greatest);
    struct lanes inverse = lanes_set(most <= 0x1p-120f ? 0.0f : 127.0f / most);
    *ret_scale = most <= 0x1p-120f ? 0.0f : most / 127.0f;
    for (unsigned i = 0; i < GROUP / LANES; i++)
        q[i] = lanes_multiply(x[i], inverse);
    *ret_sum = lanes_store_bytes(q, ret_q);
}

static inline void quantise(const float *x, uint32_t k, int8_t *ret_q, float *ret_scales, int32_t *ret_sums)
{
    for (uint32_t g = 0; g < k / GROUP; g++, x += GROUP, ret_q += GROUP) {
        struct lanes group[GROUP / LANES];
        int32_t sum;
        for (unsigned i = 0; i < GROUP / LANES; i++)
            group[i] = lanes_load(x + i * LANES);
        quantise_group(group, ret_q, &ret_scales[g], &sum);
        if (ret_sums)
            ret_sums[g] = sum;
    }
}

#define F32_TILE 4u /* activation rows that share one pass over a block of weights */

/* f32 activations: a group is summed column by column from 0, then scaled into the sum. `rows` is a constant, so
 * that loops unroll. */
ALWAYS_INLINE void matmul_tile_f32(const uint8_t *quanta, const uint16_t *scales, enum weight_format format, uint32_t k,
                                   float factor, const struct matmul_row *row, unsigned rows, size_t y_offset)
{
    struct lanes sum[F32_TILE];
    for (unsigned r = 0; r < rows; r++)
        sum[r] = lanes_set(0.0f);
    for (uint32_t g = 0; g < k / GROUP; g++, quanta += block_bytes(format), scales += BLOCK_ROWS) {
        struct lanes group[F32_TILE];
        for (unsigned r = 0; r < rows; r++)
            group[r] = lanes_set(0.0f);
        for (unsigned line = 0; line < GROUP / 4; line++) {
            struct integer_lanes w = integers_load(quanta + (format == WEIGHT_INT4 ? line % 8 : line) * 64);
            if (format == WEIGHT_INT4)
                w = integers_nibbles(w, line >= 8);
            for (unsigned c = 0; c < 4; c++) {
                struct lanes weight = lanes_of_integers(integers_byte(w, (int)c));
                for (unsigned r = 0; r < rows; r++)
                    group[r] = lanes_fma(weight, lanes_set(row[r].x[(size_t)g * GROUP + line * 4 + c]), group[r]);
            }
        }
        struct lanes scale = lanes_load_f16(scales);
        for (unsigned r = 0; r < rows; r++)
            sum[r] = lanes_fma(group[r], scale, sum[r]);
    }
    for (unsigned r = 0; r < rows; r++)
        lanes_store(lanes_multiply(sum[r], lanes_set(factor)), row[r].y + y_offset);
}

ALWAYS_INLINE void matmul_f32(const void *quanta, const uint16_t *scales, enum weight_format format, uint32_t blocks,
                              uint32_t k, float factor, const struct matmul_row *rows, uint32_t row_count)
{
    for (uint32_t b = 0; b < blocks; b++) {
        const uint8_t *block = (const uint8_t *)quanta + quanta_bytes(format, b, k);
        const uint16_t *block_scales = scales + scales_bytes(b, k) / 2;
        uint32_t r = 0;
        for (; r + F32_TILE <= row_count; r += F32_TILE)
            matmul_tile_f32(block, block_scales, format, k, factor, rows + r, F32_TILE, (size_t)b * BLOCK_ROWS);
        for (; r < row_count; r++)
            matmul_tile_f32(block, block_scales, format, k, factor, rows + r, 1, (size_t)b * BLOCK_ROWS);
    }
}

static inline void matmul_int8_f32(const void *quanta, const uint16_t *scales, uint32_t blocks, uint32_t k,
                                   float factor, const struct matmul_row *rows, uint32_t row_count)
{
    matmul_f32(quanta, scales, WEIGHT_INT8, blocks, k, factor, rows, row_count);
}

static inline void matmul_int4_f32(const void *quanta, const uint16_t *scales, uint32_t blocks, uint32_t k,
                                   float factor, const struct matmul_row *rows, uint32_t row_count)
{
    matmul_f32(quanta, scales, WEIGHT_INT4, blocks, k, factor, rows, row_count);
}

static inline void dequantise_row(const void *quanta, const uint16_t *scales, enum weight_format format, uint32_t row,
                                  uint32_t k, float factor, float *ret_x)
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

/* sum_i x_i y_i */
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

/* Numbers i .. i + 15 of a row of that type; where only `count` are left, zeros after them. */
ALWAYS_INLINE struct lanes load_as_f32(const void *row, enum tensor_dtype dtype, uint32_t i, unsigned count)
{
    if (dtype == DTYPE_F32)
        return count >= LANES ? lanes_load((const float *)row + i)
                              : lanes_load_tail((const float *)row + i, count, 0.0f);
    const uint16_t *x = (const uint16_t *)row + i;
    uint16_t tail[LANES] = {0};
    if (count < LANES) {
        memcpy(tail, x, count * sizeof *x);
        x = tail;
    }
    return dtype == DTYPE_BF16 ? lanes_load_bf16(x) : lanes_load_f16(x);
}

/* 16 columns of a tile of dot products: `as` rows of that type times `bs` rows of f32. */
ALWAYS_INLINE void dot_step(const void *const *a, enum tensor_dtype dtype, unsigned as, const float *const *b,
                            unsigned bs, uint32_t i, unsigned count, struct lanes sum[DOT_TILE][DOT_TILE])
{
    struct lanes x[DOT_TILE];
    for (unsigned j = 0; j < as; j++)
        x[j] = load_as_f32(a[j], dtype, i, count);
    for (unsigned h = 0; h < bs; h++) {
        struct lanes y = load_as_f32(b[h], DTYPE_F32, i, count);
        for (unsigned j = 0; j < as; j++)
            sum[h][j] = lanes_fma(x[j], y, sum[h][j]);
    }
}

/* ret[h][j] = b[h] . a[j] of n columns. The counts and the type are constants, so that all sums stay in registers. */
ALWAYS_INLINE void dot_tile(const void *const *a, enum tensor_dtype dtype, unsigned as, const float *const *b,
                            unsigned bs, uint32_t n, float ret[DOT_TILE][DOT_TILE])
{
    struct lanes sum[DOT_TILE][DOT_TILE];
    for (unsigned h = 0; h < bs; h++)
        for (unsigned j = 0; j < as; j++)
            sum[h][j] = lanes_set(0.0f);
    uint32_t i = 0;
    for (; i + LANES <= n; i += LANES)
        dot_step(a, dtype, as, b, bs, i, LANES, sum);
    if (i < n)
        dot_step(a, dtype, as, b, bs, i, n - i, sum);
    if (as == DOT_TILE && bs == DOT_TILE) {
        lanes_sum_tile(sum, ret);
        return;
    }
    for (unsigned h = 0; h < bs; h++)
        for (unsigned j = 0; j < as; j++)
            ret[h][j] = lanes_sum(sum[h][j]);
}

/* The same for counts that are DOT_TILE or 1. */
ALWAYS_INLINE void dot_some(const void *const *a, enum tensor_dtype dtype, unsigned as, const float *const *b,
                            unsigned bs, uint32_t n, float ret[DOT_TILE][DOT_TILE])
{
    if (as == DOT_TILE && bs == DOT_TILE)
        dot_tile(a, dtype, DOT_TILE, b, DOT_TILE, n, ret);
    else if (as == DOT_TILE)
        dot_tile(a, dtype, DOT_TILE, b, 1, n, ret);
    else if (bs == DOT_TILE)
        dot_tile(a, dtype, 1, b, DOT_TILE, n, ret);
    else
        dot_tile(a, dtype, 1, b, 1, n, ret);
}

/* How many of the `left` go into the next tile. */
ALWAYS_INLINE unsigned tile_count(uint32_t left)
{
    return left >= DOT_TILE ? DOT_TILE : 1;
}

ALWAYS_INLINE void linear_of(const void *weights, enum tensor_dtype dtype, uint32_t n, uint32_t k,
                             const struct matmul_row *rows, uint32_t row_count)
{
    size_t row_bytes = (size_t)k * (dtype == DTYPE_F32 ? 4 : 2);
    for (uint32_t w = 0, ws; w < n; w += ws) {
        const void *a[DOT_TILE];
        ws = tile_count(n - w);
        for (unsigned j = 0; j < ws; j++)
            a[j] = (const char *)weights + (w + j) * row_bytes;
        for (uint32_t r = 0, rs; r < row_count; r += rs) {
            const float *b[DOT_TILE];
            float dots[DOT_TILE][DOT_TILE];
            rs = tile_count(row_count - r);
            for (unsigned h = 0; h < rs; h++)
                b[h] = rows[r + h].x;
            dot_some(a, dtype, ws, b, rs, k, dots);
            for (unsigned h = 0; h < rs; h++)
                memcpy(rows[r + h].y + w, dots[h], ws * sizeof(float));
        }
    }
}

static inline void linear(const void *weights, enum tensor_dtype dtype, uint32_t n, uint32_t k,
                          const struct matmul_row *rows, uint32_t row_count)
{
    if (dtype == DTYPE_F32)
        linear_of(weights, DTYPE_F32, n, k, rows, row_count);
    else if (dtype == DTYPE_BF16)
        linear_of(weights, DTYPE_BF16, n, k, rows, row_count);
    else
        linear_of(weights, DTYPE_F16, n, k, rows, row_count);
}

ALWAYS_INLINE float rmsnorm_scale(const float *x, uint32_t n, float eps)
{
    float mean = dot_f32(x, x, n) / (float)n;
    return 1.0f / sqrtf(mean + eps);
}

static inline void rmsnorm(const float *x, const float *weight, uint32_t n, float eps, float *ret_y)
{
    float scale = rmsnorm_scale(x, n, eps);
    for (uint32_t i = 0; i < n; i++)
        ret_y[i] = weight[i] * (x[i] * scale);
}

static inline void rmsnorm_quantise(const float *x, const float *weight, uint32_t n, float eps, float *ret_y,
                                    int8_t *ret_q, float *ret_scales, int32_t *ret_sums)
{
    const struct lanes scale = lanes_set(rmsnorm_scale(x, n, eps));
    for (uint32_t g = 0; g < n / GROUP; g++) {
        struct lanes y[GROUP / LANES];
        for (unsigned i = 0; i < GROUP / LANES; i++) {
            size_t at = (size_t)g * GROUP + i * LANES;
            y[i] = lanes_multiply(lanes_load(weight + at), lanes_multiply(lanes_load(x + at), scale));
            if (ret_y)
                lanes_store(y[i], ret_y + at);
        }
        quantise_group(y, ret_q + (size_t)g * GROUP, &ret_scales[g], &ret_sums[g]);
    }
}

static inline void layernorm(const float *x, const float *weight, const float *bias, uint32_t n, float eps,
                             float *ret_y)
{
    float mean = sum_f32(x, n) / (float)n;
    for (uint32_t i = 0; i < n; i++)
        ret_y[i] = x[i] - mean;
    float variance = dot_f32(ret_y, ret_y, n) / (float)n;
    float scale = 1.0f / sqrtf(variance + eps);
    for (uint32_t i = 0; i < n; i++)
        ret_y[i] = __builtin_fmaf(ret_y[i] * scale, weight[i], bias[i]);
}

static inline void sigmoid(const float *x, uint32_t n, float *ret_y)
{
    for (uint32_t i = 0; i < n; i++)
        ret_y[i] = 1.0f / (1.0f + inline_exp(-x[i]));
}

ALWAYS_INLINE float silu_times(float gate, float up)
{
    float silu = gate / (1.0f + inline_exp(-gate));
    return silu * up;
}

static inline void swiglu(const float *gate, const float *up, uint32_t n, float *ret_y)
{
    for (uint32_t i = 0; i < n; i++)
        ret_y[i] = silu_times(gate[i], up[i]);
}

#define SWIGLU_STRETCH 512u /* values that are still in L1 when they are quantised */

/* A stretch at a time: value by value and group by group are each a loop whose steps overlap in the CPU; within one group
 * they would wait for each other. */
static inline void swiglu_quantise(const float *gate, const float *up, uint32_t n, int8_t *ret_q, float *ret_scales,
                                   int32_t *ret_sums)
{
    float y[SWIGLU_STRETCH];
    for (uint32_t i = 0; i < n; i += SWIGLU_STRETCH) {
        uint32_t count = n - i < SWIGLU_STRETCH ? n - i : SWIGLU_STRETCH;
        swiglu(gate + i, up + i, count, y);
        quantise(y, count, ret_q + i, ret_scales + i / GROUP, ret_sums + i / GROUP);
    }
}

static inline void rope(float *x, const float *cos, const float *sin, uint32_t d, bool interleave)
{
    uint32_t half = d / 2;
    for (uint32_t j = 0; j < half; j++) {
        float *first = interleave ? x + 2 * j : x + j, *second = interleave ? first + 1 : first + half;
        float a = *first, b = *second;
        *first = a * cos[j] - b * sin[j];
        *second = a * sin[j] + b * cos[j];
    }
}

static inline void accumulate(float weight, const float *x, uint32_t n, float *y)
{
    for (uint32_t i = 0; i < n; i++)
        y[i] = __builtin_fmaf(weight, x[i], y[i]);
}

static inline void add(const float *x, uint32_t n, float *y)
{
    for (uint32_t i = 0; i < n; i++)
        y[i] = y[i] + x[i];
}

static inline void store_f16(const float *x, uint32_t n, uint16_t *ret_y)
{
    uint32_t i = 0;
    for (; i + LANES <= n; i += LANES)
        lanes_store_f16(lanes_load(x + i), ret_y + i);
    for (; i < n; i++)
        ret_y[i] = inline_f32_to_f16(x[i]);
}

static inline void load_f16(const uint16_t *x, uint32_t n, float *ret_y)
{
    uint32_t i = 0;
    for (; i + LANES <= n; i += LANES)
        lanes_store(lanes_load_f16(x + i), ret_y + i);
    for (; i < n; i++)
        ret_y[i] = inline_f16_to_f32(x[i]);
}

static inline void attention_scores(const float *q, uint32_t heads, const float *keys, uint32_t count, uint32_t width,
                                    float scale, float *ret_scores, size_t score_stride)
{
    for (uint32_t t = 0, ts; t < count; t += ts) {
        const void *a[DOT_TILE];
        ts = tile_count(count - t);
        for (unsigned j = 0; j < ts; j++)
            a[j] = keys + (size_t)(t + j) * width;
        for (uint32_t h = 0, hs; h < heads; h += hs) {
            const float *b[DOT_TILE];
            float dots[DOT_TILE][DOT_TILE];
            hs = tile_count(heads - h);
            for (unsigned i = 0; i < hs; i++)
                b[i] = q + (size_t)(h + i) * width;
            dot_some(a, DTYPE_F32, ts, b, hs, width, dots);
            for (unsigned i = 0; i < hs; i++)
                for (unsigned j = 0; j < ts; j++)
                    ret_scores[(h + i) * score_stride + t + j] = dots[i][j] * scale;
        }
    }
}

/* Any order finds the same maximum. */
static inline float maximum(const float *x, uint32_t n)
{
    struct lanes most = lanes_set(x[0]);
    uint32_t i = 0;
    for (; i + LANES <= n; i += LANES)
        most = lanes_maximum(lanes_load(x + i), most);
    if (i < n)
        most = lanes_maximum(lanes_load_tail(x + i, n - i, x[0]), most);
    return lanes_most(most);
}

static inline float softmax_block(float *scores, uint32_t count, float max)
{
    for (uint32_t t = 0; t < count; t++)
        scores[t] = inline_exp(scores[t] - max);
    return sum_f32(scores, count);
}

/* The sums of a tile of heads by 16-column vectors; the counts are constants. */
ALWAYS_INLINE void sum_tile(const float *p, size_t p_stride, unsigned heads, const float *keys, uint32_t count,
                            uint32_t width, unsigned vectors, float *z, size_t z_stride)
{
    struct lanes sum[DOT_TILE][DOT_TILE];
    for (unsigned h = 0; h < heads; h++)
        for (unsigned v = 0; v < vectors; v++)
            sum[h][v] = lanes_set(0.0f);
    for (uint32_t t = 0; t < count; t++) {
        struct lanes key[DOT_TILE];
        for (unsigned v = 0; v < vectors; v++)
            key[v] = lanes_load(keys + (size_t)t * width + v * LANES);
        for (unsigned h = 0; h < heads; h++) {
            struct lanes weight = lanes_set(p[h * p_stride + t]);
            for (unsigned v = 0; v < vectors; v++)
                sum[h][v] = lanes_fma(weight, key[v], sum[h][v]);
        }
    }
    for (unsigned h = 0; h < heads; h++)
        for (unsigned v = 0; v < vectors; v++) {
            float *at = z + h * z_stride + v * LANES;
            lanes_store(lanes_add(lanes_load(at), sum[h][v]), at);
        }
}

static inline void attention_sum(const float *p, size_t p_stride, uint32_t heads, const float *keys, uint32_t count,
                                 uint32_t width, uint32_t n, float *z)
{
    for (uint32_t j = 0; j < n;) {
        bool wide = n - j >= DOT_TILE * LANES;
        for (uint32_t h = 0; h < heads;) {
            bool tall = heads - h >= DOT_TILE;
            const float *weights = p + h * p_stride;
            float *at = z + (size_t)h * n + j;
            if (wide && tall)
                sum_tile(weights, p_stride, DOT_TILE, keys + j, count, width, DOT_TILE, at, n);
            else if (wide)
                sum_tile(weights, p_stride, 1, keys + j, count, width, DOT_TILE, at, n);
            else if (tall)
                sum_tile(weights, p_stride, DOT_TILE, keys + j, count, width, 1, at, n);
            else
                sum_tile(weights, p_stride, 1, keys + j, count, width, 1, at, n);
            h += tall ? DOT_TILE : 1;
        }
        j += wide ? DOT_TILE * LANES : LANES;
    }
}

/* I = fma(w, relu(dot * scale), I), heads ascending. */
ALWAYS_INLINE float index_add(float sum, float w, float dot, float scale)
{
    float scaled = dot * scale;
    return __builtin_fmaf(w, scaled > 0.0f ? scaled : 0.0f, sum);
}

static inline void index_scores(const struct index_queries *queries, const int8_t *keys, const float *key_scales,
                                uint32_t count, float *ret_scores)
{
    uint32_t dim = queries->dim, groups = dim / GROUP;
    for (uint32_t t = 0; t < count; t++) {
        float sum = 0.0f;
        for (uint32_t h = 0; h < queries->heads; h++) {
            float dot = 0.0f;
            for (uint32_t g = 0; g < groups; g++) {
                const int8_t *a = queries->q + (size_t)h * dim + g * GROUP, *b = keys + (size_t)t * dim + g * GROUP;
                int32_t integer = 0;
                for (unsigned i = 0; i < GROUP; i++)
                    integer += a[i] * b[i];
                dot = __builtin_fmaf((float)integer * queries->scales[h * groups + g], key_scales[t * groups + g], dot);
            }
            sum = index_add(sum, queries->weights[h], dot, queries->scale);
        }
        ret_scores[t] = sum;
    }
}

static inline void index_scores_f32(const struct index_queries *queries, const float *keys, uint32_t count,
                                    float *ret_scores)
{
    uint32_t dim = queries->dim;
    for (uint32_t t = 0; t < count; t++) {
        float sum = 0.0f;
        for (uint32_t h = 0; h < queries->heads; h++)
            sum = index_add(sum, queries->weights[h],
                            dot_f32(queries->x + (size_t)h * dim, keys + (size_t)t * dim, dim), queries->scale);
        ret_scores[t] = sum;
    }
}

/* Finds the k-th largest by its bytes, from the highest down: of the values that agree in the bytes found so far,
 * count the next one. */
static inline uint32_t select_best(const float *scores, uint32_t n, uint32_t k, uint32_t *ret_index)
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

#define SELECT_SMALL 4096u /* below it, clearing the counters would cost more than it saves */
#define SELECT_FEW 16384u  /* candidates that are taken out, so that what is left of the search touches nothing else */
#define DIGITS 2048u       /* of 11 bits; the last shares a bit with the one before it */
#define COPIES                                                                                                         \
    4u /* of the counters: neighbours often have the same digit, and a store must pass before the next load */

/* The bits of lanes that hold one of the `count` numbers that are left. */
ALWAYS_INLINE uint32_t first_lanes(uint32_t count)
{
    return count >= LANES ? 0xffffu : (1u << count) - 1u;
}

ALWAYS_INLINE struct integer_lanes load_orders(const float *x, uint32_t count)
{
    return lanes_order(count >= LANES ? lanes_load(x) : lanes_load_tail(x, count, 0.0f));
}

/* Counts the digit at `shift` of the lanes that agree with `prefix` in the higher bits; `all`, a constant: all do. Adds a
 * bit instead of asking for it: what the lanes hold is nothing that a CPU could guess. */
ALWAYS_INLINE void count_digits(struct integer_lanes order, uint32_t mask, bool all, int shift, uint32_t higher,
                                uint32_t prefix, uint32_t count[COPIES][DIGITS])
{
    uint32_t digit[LANES];
    if (!all)
        mask &= integers_equal(integers_and(order, integers_set(higher)), integers_set(prefix));
    integers_store(integers_and(integers_shift_right(order, shift), integers_set(DIGITS - 1)), digit);
    for (unsigned l = 0; l < LANES; l++)
        count[l % COPIES][digit[l]] += all ? 1 : mask >> l & 1;
}

/* The orders that agree with `prefix` in the higher bits, in ret; there is room for LANES more than there are. */
static inline uint32_t gather_orders(const float *scores, uint32_t n, uint32_t higher, uint32_t prefix, uint32_t *ret)
{
    uint32_t found = 0;
    for (uint32_t i = 0; i < n; i += LANES) {
        struct integer_lanes order = load_orders(scores + i, n - i);
        uint32_t mask = integers_equal(integers_and(order, integers_set(higher)), integers_set(prefix));
        mask &= first_lanes(n - i);
        integers_store_chosen(order, mask, ret + found);
        found += (uint32_t)__builtin_popcount(mask);
    }
    return found;
}

/* Indices of what is larger than `bound`, and of the first `equals` of its equals; there are k of both. */
static inline uint32_t take_above(const float *scores, uint32_t n, uint32_t bound, uint32_t equals, uint32_t k,
                                  uint32_t *ret_index)
{
    const struct integer_lanes bounds = integers_set(bound);
    uint32_t kept = 0;
    for (uint32_t i = 0; i < n && kept < k; i += LANES) {
        struct integer_lanes order = load_orders(scores + i, n - i);
        uint32_t mask = integers_above(order, bounds), equal = integers_equal(order, bounds) & first_lanes(n - i);
        for (mask &= first_lanes(n - i); equal && equals > 0; equals--, equal &= equal - 1)
            mask |= equal & -equal;
        uint32_t last[LANES], found = (uint32_t)__builtin_popcount(mask);
        bool room = kept + LANES <= k;
        integers_store_chosen(integers_count(i), mask, room ? ret_index + kept : last);
        if (!room)
            memcpy(ret_index + kept, last, found * sizeof *last);
        kept += found;
    }
    return kept;
}

/* As select_best, but by digits of 11 bits, lanes at a time. */
static inline uint32_t select_digits(const float *scores, uint32_t n, uint32_t k, uint32_t *ret_index)
{
    if (n < SELECT_SMALL || k == 0)
        return select_best(scores, n, k, ret_index);
    static const int shifts[] = {21, 10, 0};
    uint32_t count[COPIES][DIGITS], few[SELECT_FEW + LANES], prefix = 0, higher = 0, wanted = k;
    uint32_t here = n, gathered = 0; /* scores that agree with the prefix; how many of them stand in `few` */
    for (unsigned pass = 0; pass < 3; pass++) {
        memset(count, 0, sizeof count);
        if (here <= SELECT_FEW && gathered == 0) {
            gathered = gather_orders(scores, n, higher, prefix, few);
            memset(few + gathered, 0, LANES * sizeof few[0]); /* the rest of the last lanes, which counts nothing */
        }
        for (uint32_t i = 0; i < gathered; i += LANES)
            count_digits(integers_load(few + i), first_lanes(gathered - i), false, shifts[pass], higher, prefix, count);
        uint32_t i = 0;
        for (; gathered == 0 && pass == 0 && i + LANES <= n; i += LANES)
            count_digits(lanes_order(lanes_load(scores + i)), 0, true, shifts[0], 0, 0, count);
        for (; gathered == 0 && i < n; i += LANES)
            count_digits(load_orders(scores + i, n - i), first_lanes(n - i), false, shifts[pass], higher, prefix,
                         count);
        uint32_t digit = DIGITS;
        for (here = 0; digit > 0; wanted -= here) {
            digit--;
            here = count[0][digit] + count[1][digit] + count[2][digit] + count[3][digit];
            if (here >= wanted)
                break;
        }
        prefix |= digit << shifts[pass];
        higher |= (DIGITS - 1) << shifts[pass];
    }
    return take_above(scores, n, prefix, wanted, k, ret_index);
}

/* The entries of a kernel_set that no set replaces. */
#define LANES_KERNELS                                                                                                  \
    .quantise = quantise, .rmsnorm_quantise = rmsnorm_quantise, .swiglu_quantise = swiglu_quantise,                    \
    .matmul_int8_f32 = matmul_int8_f32, .matmul_int4_f32 = matmul_int4_f32, .linear = linear,                          \
    .dequantise_row = dequantise_row, .rmsnorm = rmsnorm, .layernorm = layernorm, .swiglu = swiglu,                    \
    .sigmoid = sigmoid, .rope = rope, .accumulate = accumulate, .add = add, .store_f16 = store_f16,                    \
    .load_f16 = load_f16, .attention_scores = attention_scores, .maximum = maximum, .softmax_block = softmax_block,    \
    .attention_sum = attention_sum, .index_scores_f32 = index_scores_f32
