/* The numeric inner functions of the forward pass, as a table: one entry an instruction set, all with the same bits.
 *
 * The orders of every sum are fixed (README.md, "Numbers"); kernel_scalar.c is the reference. A new set is a file kernel_<name>.c that
 * fills a struct kernel_set and a line in kernel.c; tests/unit/test_kernel.c holds it to the reference. Functions work on explicit
 * shapes, keep no state and may run in any thread. Pointers to f32 and int8 data are at least 4-aligned; `ret_` areas never overlap
 * inputs unless it is said. */
#pragma once

#include "proto/error.h"
#include "proto/safetensors.h"
#include "proto/weights.h"

#include <stdbool.h>

#define KEY_BLOCK 64u       /* selected keys in a block of attention */
#define GROUP BLOCK_COLUMNS /* activations in a quantisation group */

enum kernel_isa { ISA_AUTO = 0, ISA_SCALAR, ISA_AVX2, ISA_AVX512, ISA_AMX, ISA_COUNT };

/* One activation row of a matrix product: q, scales and sums for the int8 kernels, x for the f32 ones. */
struct matmul_row {
    const int8_t *q;     /* [k], from -127 to 127 */
    const float *scales; /* [k / 64] */
    const int32_t *sums; /* [k / 64]: of each group of q, for dot instructions that want one operand unsigned */
    const float *x;      /* [k] */
    float *y;            /* out, [blocks * 16] */
};

/* The index queries of one row: of `heads` heads q [heads][dim], with scales and sums [heads][dim / 64] as quantise makes them, or
 * x [heads][dim]. */
struct index_queries {
    uint32_t heads, dim;
    const int8_t *q;
    const float *scales;
    const int32_t *sums;
    const float *x;
    const float *weights; /* [heads] */
    float scale;
};

/* y = W x for `blocks` block rows of W and every row: quanta and scales start at the first of the block rows (proto/weights.h), factor
 * is 2^exponent. Weights are read from memory once for all rows. */
typedef void matmul_function(const void *quanta, const uint16_t *scales, uint32_t blocks, uint32_t k, float factor,
                             const struct matmul_row *rows, uint32_t row_count);

struct kernel_set {
    const char *name;
    /* int8 in groups of 64: x [k] -> ret_q [k], ret_scales [k / 64], ret_sums [k / 64]: of each group of ret_q, or NULL. */
    void (*quantise)(const float *x, uint32_t k, int8_t *ret_q, float *ret_scales, int32_t *ret_sums);
    /* quantise of rmsnorm, in one pass after the sum; n a multiple of 64. ret_y [n]: the normed values too; NULL, or it may be x. */
    void (*rmsnorm_quantise)(const float *x, const float *weight, uint32_t n, float eps, float *ret_y, int8_t *ret_q,
                             float *ret_scales, int32_t *ret_sums);
    /* quantise of swiglu, in one pass; n a multiple of 64. */
    void (*swiglu_quantise)(const float *gate, const float *up, uint32_t n, int8_t *ret_q, float *ret_scales,
                            int32_t *ret_sums);
    matmul_function *matmul_int8, *matmul_int4;         /* int8 activations */
    matmul_function *matmul_int8_f32, *matmul_int4_f32; /* f32 activations */
    /* W [n, k] of f32, f16 or bf16 (used as f32), x [k] of each row -> its y [n]. */
    void (*linear)(const void *weights, enum tensor_dtype dtype, uint32_t n, uint32_t k, const struct matmul_row *rows,
                   uint32_t row_count);
    /* One row [k] of a quantised matrix, as f32: quantum * scale * factor. quanta and scales of its block row; row < 16. */
    void (*dequantise_row)(const void *quanta, const uint16_t *scales, enum weight_format format, uint32_t row,
                           uint32_t k, float factor, float *ret_x);
    /* x, weight [n] -> ret_y [n]; ret_y may be x. */
    void (*rmsnorm)(const float *x, const float *weight, uint32_t n, float eps, float *ret_y);
    void (*layernorm)(const float *x, const float *weight, const float *bias, uint32_t n, float eps, float *ret_y);
    /* silu(gate) * up, [n]; ret_y may be either. */
    void (*swiglu)(const float *gate, const float *up, uint32_t n, float *ret_y);
    /* sigmoid of x [n], in place allowed. */
    void (*sigmoid)(const float *x, uint32_t n, float *ret_y);
    /* Rotates x [d] in place by cos [d / 2], sin [d / 2]; pairs are (2j, 2j + 1) if interleaved, else (j, j + d / 2). */
    void (*rope)(float *x, const float *cos, const float *sin, uint32_t d, bool interleave);
    /* y = fma(weight, x, y), [n]; y = y + x, [n]. */
    void (*accumulate)(float weight, const float *x, uint32_t n, float *y);
    void (*add)(const float *x, uint32_t n, float *y);
    /* Latents between f32 and what the KV cache holds: f16. */
    void (*store_f16)(const float *x, uint32_t n, uint16_t *ret_y);
    void (*load_f16)(const uint16_t *x, uint32_t n, float *ret_y);
    /* ret_scores[h * score_stride + t] = (q_h . key_t) * scale. q [heads][width], keys [count][width], count <= 64. */
    void (*attention_scores)(const float *q, uint32_t heads, const float *keys, uint32_t count, uint32_t width,
                             float scale, float *ret_scores, size_t score_stride);
    float (*maximum)(const float *x, uint32_t n); /* n > 0 */
    /* p_t = exp(scores_t - max) in place, count <= 64; returns their sum. */
    float (*softmax_block)(float *scores, uint32_t count, float max);
    /* z[h][j] += sum_t p_h,t keys[t][j], the block's sum made from 0 and then added; j < n, keys [count][width], z [heads][n]. */
    void (*attention_sum)(const float *p, size_t p_stride, uint32_t heads, const float *keys, uint32_t count,
                          uint32_t width, uint32_t n, float *z);
    /* Index scores of `count` keys that follow one another: ret[t] = sum_h w_h relu((q_h . k_t) * scale). keys int8 [count][dim] with
     * scales [count][dim / 64]; or all f32. */
    void (*index_scores)(const struct index_queries *queries, const int8_t *keys, const float *key_scales,
                         uint32_t count, float *ret_scores);
    void (*index_scores_f32)(const struct index_queries *queries, const float *keys, uint32_t count, float *ret_scores);
    /* Indices, ascending, of the k largest of scores [n]; of equal ones the lower indices. k <= n. Returns k. */
    uint32_t (*select)(const float *scores, uint32_t n, uint32_t k, uint32_t *ret_index);
};

/* The set for facts.isa: `auto` is the best that runs here; one that does not is refused (-ENOTSUP) with a line that says what this
 * machine lacks for it. Any thread. */
int kernel_choose(uint32_t isa, const struct kernel_set **ret_set, struct error *ret_error);

/* The same for a machine with these features (cpu.h). */
int kernel_choose_for(uint32_t isa, uint32_t features, const struct kernel_set **ret_set, struct error *ret_error);

/* Set `index` of this build, the reference first, and what this machine lacks for it, as "AVX2, FMA"; empty where it runs. NULL past
 * the last. */
const struct kernel_set *kernel_set_at(uint32_t index, char *ret_missing, size_t size);

/* All sets that this CPU can run, the reference first; for tests and benchmarks. Returns their number, at most `size`. */
uint32_t kernel_sets(const struct kernel_set **ret_sets, uint32_t size);
