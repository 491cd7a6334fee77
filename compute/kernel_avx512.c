/* The set for AVX-512 (F, BW, DQ, VL, VNNI). 16 rows of weights are the 16 lanes of a register.
 *
 * vpdpbusd multiplies four unsigned by four signed bytes of a lane and adds them to its int32: nothing narrower, so
 * nothing saturates. Weights are the unsigned operand: nibbles as they lie (8 too much), int8 with the sign bit
 * flipped (128 too much); so a group's sum starts at -8 or -128 times the sum of its activations. It stays under
 * 64 * 255 * 127, far inside int32. */
#include "compute/kernel_avx512.h"
#include "compute/kernel_lanes.h"

/* Activation rows times two block rows: 12 integer and 12 f32 sums, and what feeds them, fill 32 registers. */
#define TILE_ROWS 6u
/* Up to so many rows memory is the limit: one block row at a time, so that weights are one stream. */
#define GEMV_ROWS 4u
/* Groups between a prefetch and its use. */
#define AHEAD 12u
#define LOW_NIBBLES 0x0f0f0f0f
#define SIGN_BITS ((int32_t)0x80808080)

#if defined(__SANITIZE_ADDRESS__)
    #define UNROLL /* with its checks in every line it would take a minute to compile */
#elif defined(__clang__)
    #define UNROLL _Pragma("clang loop unroll(full)")
#else
    #define UNROLL _Pragma("GCC unroll 16")
#endif

ALWAYS_INLINE __m512i four_columns(const int8_t *q)
{
    int32_t four;
    memcpy(&four, q, sizeof four);
    return _mm512_set1_epi32(four);
}

/* Asks for a block and its scales, which memory needs some time to bring. No address is wrong for a prefetch. */
ALWAYS_INLINE void prefetch_block(const uint8_t *quanta, const uint16_t *scales, enum weight_format format)
{
    for (unsigned i = 0; i < block_bytes(format); i += 64)
        _mm_prefetch((const char *)quanta + i, _MM_HINT_T0);
    _mm_prefetch((const char *)scales, _MM_HINT_T0);
}

/* What a tile asks for while it works: blocks number `next` on of its block rows, group by group, then (from all of
 * them on) of those after them; one for every `tiles` blocks that it multiplies. */
struct prefetch {
    size_t next, tiles;
};

/* dot[b][r] += the products of one group: int4, two lines of the int8 order from one of nibbles; int8, line by line. */
ALWAYS_INLINE void dot_group(const uint8_t *quanta, size_t next_block, enum weight_format format, unsigned blocks,
                             const int8_t *const q[TILE_ROWS], unsigned rows, __m512i dot[2][TILE_ROWS])
{
    const __m512i low = _mm512_set1_epi32(LOW_NIBBLES), sign = _mm512_set1_epi32(SIGN_BITS);
    UNROLL for (unsigned line = 0; line < GROUP / 8; line++)
    {
        __m512i w[2][2];
        for (unsigned b = 0; b < blocks; b++) {
            const uint8_t *from = quanta + b * next_block + line * (format == WEIGHT_INT4 ? 64 : 128);
            __m512i first = _mm512_loadu_si512(from);
            w[b][0] = format == WEIGHT_INT4 ? _mm512_and_si512(first, low) : _mm512_xor_si512(first, sign);
            w[b][1] = format == WEIGHT_INT4 ? _mm512_and_si512(_mm512_srli_epi16(first, 4), low)
                                            : _mm512_xor_si512(_mm512_loadu_si512(from + 64), sign);
        }
        for (unsigned half = 0; half < 2; half++)
            for (unsigned r = 0; r < rows; r++) {
                __m512i x = four_columns(q[r] + (format == WEIGHT_INT4 ? line * 4 + half * 32 : line * 8 + half * 4));
                for (unsigned b = 0; b < blocks; b++)
                    dot[b][r] = _mm512_dpbusd_epi32(dot[b][r], w[b][half], x);
            }
    }
}

/* `blocks` (1 or 2) block rows times `rows` activation rows; both are constants, so that sums stay in registers. */
ALWAYS_INLINE void matmul_tile(const uint8_t *quanta, const uint16_t *scales, enum weight_format format,
                               unsigned blocks, uint32_t k, float factor, const struct matmul_row *row, unsigned rows,
                               size_t y_offset, struct prefetch prefetch)
{
    const size_t next_quanta = quanta_bytes(format, 1, k), next_scales = scales_bytes(1, k) / 2, groups = k / GROUP;
    size_t credit = 0;
    __m512 sum[2][TILE_ROWS];
    for (unsigned b = 0; b < blocks; b++)
        for (unsigned r = 0; r < rows; r++)
            sum[b][r] = _mm512_setzero_ps();
    for (size_t g = 0; g < groups; g++, quanta += block_bytes(format), scales += BLOCK_ROWS) {
        __m512i dot[2][TILE_ROWS];
        const int8_t *q[TILE_ROWS];
        for (unsigned r = 0; r < rows; r++) {
            q[r] = row[r].q + g * GROUP;
            __m512i start = _mm512_slli_epi32(_mm512_set1_epi32(row[r].sums[g]), format == WEIGHT_INT4 ? 3 : 7);
            for (unsigned b = 0; b < blocks; b++)
                dot[b][r] = _mm512_sub_epi32(_mm512_setzero_si512(), start);
        }
        for (credit += blocks; credit >= prefetch.tiles; credit -= prefetch.tiles, prefetch.next++) {
            size_t b = prefetch.next % blocks, group = prefetch.next / blocks;
            size_t at = group - g + (group >= groups ? (blocks - 1) * groups : 0);
            prefetch_block(quanta + b * next_quanta + at * block_bytes(format),
                           scales + b * next_scales + at * BLOCK_ROWS, format);
        }
        dot_group(quanta, next_quanta, format, blocks, q, rows, dot);
        for (unsigned b = 0; b < blocks; b++) {
            __m512 scale = lanes_load_f16(scales + b * next_scales).all;
            for (unsigned r = 0; r < rows; r++)
                sum[b][r] = _mm512_fmadd_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(dot[b][r]), scale),
                                            _mm512_set1_ps(row[r].scales[g]), sum[b][r]);
        }
    }
    for (unsigned b = 0; b < blocks; b++)
        for (unsigned r = 0; r < rows; r++)
            _mm512_storeu_ps(row[r].y + y_offset + b * BLOCK_ROWS, _mm512_mul_ps(sum[b][r], _mm512_set1_ps(factor)));
}

/* All rows times two block rows, in tiles of about the same height: with more than GEMV_ROWS rows 3 to 6. The first
 * tile of all asks for what it needs next; the others have time, and ask for the next block rows, each for its part. */
ALWAYS_INLINE void matmul_two(const uint8_t *quanta, const uint16_t *scales, enum weight_format format, uint32_t k,
                              float factor, const struct matmul_row *rows, uint32_t row_count, size_t y_offset)
{
    uint32_t tiles = (row_count + TILE_ROWS - 1) / TILE_ROWS;
    for (uint32_t t = 0; t < tiles; t++) {
        struct range tile = split(row_count, t, tiles);
        const struct matmul_row *row = rows + tile.first;
        struct prefetch prefetch = {2 * AHEAD, 1};
        if (tiles > 1 && (t > 0 || y_offset > 0))
            prefetch = (struct prefetch){2 * (k / GROUP) + t * 2 * (k / GROUP) / tiles, tiles};
        if (tile.count == 3)
            matmul_tile(quanta, scales, format, 2, k, factor, row, 3, y_offset, prefetch);
        else if (tile.count == 4)
            matmul_tile(quanta, scales, format, 2, k, factor, row, 4, y_offset, prefetch);
        else if (tile.count == 5)
            matmul_tile(quanta, scales, format, 2, k, factor, row, 5, y_offset, prefetch);
        else
            matmul_tile(quanta, scales, format, 2, k, factor, row, TILE_ROWS, y_offset, prefetch);
    }
}

/* All rows times one block row, GEMV_ROWS at a time. */
ALWAYS_INLINE void matmul_one(const uint8_t *quanta, const uint16_t *scales, enum weight_format format, uint32_t k,
                              float factor, const struct matmul_row *rows, uint32_t row_count, size_t y_offset)
{
    const struct prefetch prefetch = {AHEAD, 1};
    for (uint32_t r = 0; r < row_count; r += GEMV_ROWS) {
        uint32_t left = row_count - r;
        if (left == 1)
            matmul_tile(quanta, scales, format, 1, k, factor, rows + r, 1, y_offset, prefetch);
        else if (left == 2)
            matmul_tile(quanta, scales, format, 1, k, factor, rows + r, 2, y_offset, prefetch);
        else if (left == 3)
            matmul_tile(quanta, scales, format, 1, k, factor, rows + r, 3, y_offset, prefetch);
        else
            matmul_tile(quanta, scales, format, 1, k, factor, rows + r, GEMV_ROWS, y_offset, prefetch);
    }
}

ALWAYS_INLINE void matmul(const void *quanta, const uint16_t *scales, enum weight_format format, uint32_t blocks,
                          uint32_t k, float factor, const struct matmul_row *rows, uint32_t row_count)
{
    for (uint32_t b = 0; b < blocks;) {
        const uint8_t *from = (const uint8_t *)quanta + quanta_bytes(format, b, k);
        const uint16_t *from_scales = scales + scales_bytes(b, k) / 2;
        if (blocks - b >= 2 && row_count > GEMV_ROWS) {
            matmul_two(from, from_scales, format, k, factor, rows, row_count, (size_t)b * BLOCK_ROWS);
            b += 2;
        } else {
            matmul_one(from, from_scales, format, k, factor, rows, row_count, (size_t)b * BLOCK_ROWS);
            b += 1;
        }
    }
}

static void matmul_int8(const void *quanta, const uint16_t *scales, uint32_t blocks, uint32_t k, float factor,
                        const struct matmul_row *rows, uint32_t row_count)
{
    matmul(quanta, scales, WEIGHT_INT8, blocks, k, factor, rows, row_count);
}

static void matmul_int4(const void *quanta, const uint16_t *scales, uint32_t blocks, uint32_t k, float factor,
                        const struct matmul_row *rows, uint32_t row_count)
{
    matmul(quanta, scales, WEIGHT_INT4, blocks, k, factor, rows, row_count);
}

#define INDEX_GROUPS 4u /* the most groups of an index key that index_keys takes */
#define INDEX_HEADS 4u  /* heads, by two times 16 keys, whose sums stay in registers */

/* 16 rows of 16 words, transposed. */
ALWAYS_INLINE void transpose_words(__m512i x[LANES])
{
    __m512i y[LANES];
    for (unsigned i = 0; i < LANES; i += 2) {
        y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
    for (unsigned i = 0; i < LANES; i += 4)
        for (unsigned j = 0; j < 2; j++) {
            x[i + 2 * j] = _mm512_unpacklo_epi64(y[i + j], y[i + j + 2]);
            x[i + 2 * j + 1] = _mm512_unpackhi_epi64(y[i + j], y[i + j + 2]);
        }
    for (unsigned i = 0; i < 4; i++)
        for (unsigned j = 0; j < 2; j++) {
            y[8 * j + i] = _mm512_shuffle_i32x4(x[8 * j + i], x[8 * j + i + 4], 0x88);
            y[8 * j + i + 4] = _mm512_shuffle_i32x4(x[8 * j + i], x[8 * j + i + 4], 0xdd);
        }
    for (unsigned i = 0; i < 8; i++) {
        x[i] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0x88);
        x[i + 8] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0xdd);
    }
}

/* 16 index keys, a lane each: lines of four columns, unsigned, and a scale a group. */
struct key_lanes {
    __m512i line[INDEX_GROUPS * LANES];
    __m512 scale[INDEX_GROUPS];
};

/* 16 keys, or the `count` that are left, and zeros. */
ALWAYS_INLINE void load_index_keys(const int8_t *keys, const float *scales, uint32_t dim, uint32_t count,
                                   struct key_lanes *ret_lanes)
{
    uint32_t groups = dim / GROUP;
    for (uint32_t g = 0; g < groups; g++) {
        __m512i line[LANES];
        float scale[LANES] = {0};
        for (unsigned t = 0; t < LANES; t++)
            line[t] = t < count ? _mm512_loadu_si512(keys + (size_t)t * dim + g * GROUP) : _mm512_setzero_si512();
        for (unsigned t = 0; t < LANES && t < count; t++)
            scale[t] = scales[t * groups + g];
        transpose_words(line);
        for (unsigned c = 0; c < LANES; c++)
            ret_lanes->line[g * LANES + c] = _mm512_xor_si512(line[c], _mm512_set1_epi32(SIGN_BITS));
        ret_lanes->scale[g] = _mm512_loadu_ps(scale);
    }
}

/* Adds `heads` (a constant) heads from `first` on to the scores of 32 keys. */
ALWAYS_INLINE void index_heads(const struct index_queries *queries, uint32_t first, unsigned heads,
                               const struct key_lanes keys[2], __m512 sum[2])
{
    uint32_t groups = queries->dim / GROUP;
    __m512 dot[INDEX_HEADS][2];
    for (unsigned h = 0; h < heads; h++)
        dot[h][0] = dot[h][1] = _mm512_setzero_ps();
    for (uint32_t g = 0; g < groups; g++) {
        const int8_t *q = queries->q + (size_t)first * queries->dim + g * GROUP;
        __m512i integer[INDEX_HEADS][2];
        for (unsigned h = 0; h < heads; h++)
            integer[h][0] = integer[h][1] = _mm512_set1_epi32(-128 * queries->sums[(first + h) * groups + g]);
        UNROLL for (unsigned c = 0; c < LANES; c++)
        {
            for (unsigned h = 0; h < heads; h++) {
                __m512i x = four_columns(q + (size_t)h * queries->dim + c * 4);
                for (unsigned b = 0; b < 2; b++)
                    integer[h][b] = _mm512_dpbusd_epi32(integer[h][b], keys[b].line[g * LANES + c], x);
            }
        }
        for (unsigned h = 0; h < heads; h++) {
            __m512 scale = _mm512_set1_ps(queries->scales[(first + h) * groups + g]);
            for (unsigned b = 0; b < 2; b++)
                dot[h][b] = _mm512_fmadd_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(integer[h][b]), scale), keys[b].scale[g],
                                            dot[h][b]);
        }
    }
    for (unsigned h = 0; h < heads; h++)
        for (unsigned b = 0; b < 2; b++) {
            __m512 scaled =
                _mm512_max_ps(_mm512_mul_ps(dot[h][b], _mm512_set1_ps(queries->scale)), _mm512_setzero_ps());
            sum[b] = _mm512_fmadd_ps(_mm512_set1_ps(queries->weights[first + h]), scaled, sum[b]);
        }
}

/* index_scores with 32 keys in lanes: transposed once for all heads. */
static void index_keys(const struct index_queries *queries, const int8_t *keys, const float *key_scales, uint32_t count,
                       float *ret_scores)
{
    uint32_t heads = queries->heads, dim = queries->dim, groups = dim / GROUP;
    if (groups > INDEX_GROUPS) {
        index_scores(queries, keys, key_scales, count, ret_scores);
        return;
    }
    for (uint32_t t = 0; t < count; t += 2 * LANES) {
        struct key_lanes lanes[2];
        __m512 sum[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
        for (unsigned b = 0; b < 2; b++) {
            uint32_t before = t + b * LANES < count ? t + b * LANES : count;
            load_index_keys(keys + (size_t)before * dim, key_scales + (size_t)before * groups, dim, count - before,
                            &lanes[b]);
        }
        uint32_t h = 0;
        for (; h + INDEX_HEADS <= heads; h += INDEX_HEADS)
            index_heads(queries, h, INDEX_HEADS, lanes, sum);
        for (; h < heads; h++)
            index_heads(queries, h, 1, lanes, sum);
        for (unsigned b = 0; b < 2 && t + b * LANES < count; b++)
            _mm512_mask_storeu_ps(ret_scores + t + b * LANES, (__mmask16)first_lanes(count - t - b * LANES), sum[b]);
    }
}

const struct kernel_set KERNEL_SET = {
    .name = "avx512",
    .matmul_int8 = matmul_int8,
    .matmul_int4 = matmul_int4,
    .index_scores = index_keys,
    .select = select_digits,
    LANES_KERNELS,
};
