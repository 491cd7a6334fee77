/* The set for AVX2, FMA and F16C. It is compiled twice from this file: plain, and with AVX-VNNI (KERNEL_SET names the table).
 *
 * Both dot instructions multiply unsigned by signed bytes; weights are the unsigned operand. What keeps every sum exact:
 *   AVX-VNNI (vpdpbusd) adds four products to an int32, nothing narrower. Nibbles are used as they lie (8 too much), int8 with the sign
 *       bit flipped (128 too much), so a group's sum starts at -8 or -128 times the sum of its activations.
 *   plain, int4 (vpmaddubsw): a pair is at most 2 * 15 * 128; the eight pairs of half a group stay below 32768 in int16, then are widened.
 *   plain, int8: |w| times x with the sign of w. A pair is at most 2 * 128 * 127, and is widened at once; x is never -128 (kernel.h). */
#include "compute/kernel_avx2.h"
#include "compute/kernel_lanes.h"

#define TILE_ROWS 4u    /* activation rows that share the weights in registers: 8 sums of 16 registers */
#define PARTS 2u        /* registers for 16 rows of weights */
#define HALF_LINES 8u   /* lines of 64 bytes (4 columns of 16 rows) in half a group */
#define PIECE_GROUPS 8u /* blocks that several tiles of rows read in turn: 4 or 8 KiB, they stay in L1 */
#define PASS_ROWS 128u  /* rows and bytes of activations of one pass over all block rows: they stay in L2 */
#define PASS_BYTES (1u << 18)
#define AHEAD 4096u /* bytes: prefetching stops at a page in hardware */

#ifdef __AVXVNNI__
    #define VNNI true
#else
    #define VNNI false
#endif

/* A run of groups of one block row. */
struct piece {
    const uint8_t *quanta;
    const uint16_t *scales;
    size_t first, groups; /* of the k / 64 */
    size_t y_offset;
    float factor;
    bool last; /* of its block row: the pieces before it leave their sum in y */
};

/* Weights of 4 columns of 8 rows as the dot product takes them. */
ALWAYS_INLINE __m256i load_weights(const uint8_t *block, enum weight_format format, unsigned half, unsigned line,
                                   unsigned part)
{
    if (format == WEIGHT_INT4) {
        __m256i both = _mm256_loadu_si256((const __m256i *)(const void *)(block + line * 64 + part * 32));
        return _mm256_and_si256(half ? _mm256_srli_epi16(both, 4) : both, _mm256_set1_epi8(15));
    }
    __m256i w =
        _mm256_loadu_si256((const __m256i *)(const void *)(block + (half * HALF_LINES + line) * 64 + part * 32));
    return VNNI ? _mm256_xor_si256(w, _mm256_set1_epi8(-128)) : w;
}

/* dot[r][p] += 32 columns of weights times activations. narrow: the int16 sums of plain int4. */
ALWAYS_INLINE void dot_line(const __m256i w[PARTS], __m256i x, enum weight_format format, __m256i narrow[PARTS],
                            __m256i dot[PARTS])
{
    for (unsigned p = 0; p < PARTS; p++) {
#ifdef __AVXVNNI__
        (void)format;
        (void)narrow;
        dot[p] = _mm256_dpbusd_avx_epi32(dot[p], w[p], x);
#else
        if (format == WEIGHT_INT4) {
            narrow[p] = _mm256_add_epi16(narrow[p], _mm256_maddubs_epi16(w[p], x));
            __asm__("" : "+x"(narrow[p])); /* or gcc regroups the sums of several lines and runs out of registers */
            continue;
        }
        __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w[p]), _mm256_sign_epi8(x, w[p]));
        dot[p] = _mm256_add_epi32(dot[p], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
        __asm__("" : "+x"(dot[p])); /* likewise */
#endif
    }
}

/* One half of a group, 32 columns, of `rows` activation rows. */
ALWAYS_INLINE void dot_half(const uint8_t *block, enum weight_format format, unsigned half,
                            const int8_t *const q[TILE_ROWS], unsigned rows, __m256i dot[TILE_ROWS][PARTS])
{
    __m256i narrow[TILE_ROWS][PARTS];
    for (unsigned r = 0; r < rows; r++)
        narrow[r][0] = narrow[r][1] = _mm256_setzero_si256();
#pragma GCC unroll 8
    for (unsigned line = 0; line < HALF_LINES; line++) {
        __m256i w[PARTS];
        for (unsigned p = 0; p < PARTS; p++)
            w[p] = load_weights(block, format, half, line, p);
        for (unsigned r = 0; r < rows; r++) {
            int32_t four;
            memcpy(&four, q[r] + half * HALF_LINES * 4 + line * 4, sizeof four);
            dot_line(w, _mm256_set1_epi32(four), format, narrow[r], dot[r]);
        }
    }
    for (unsigned r = 0; !VNNI && format == WEIGHT_INT4 && r < rows; r++)
        for (unsigned p = 0; p < PARTS; p++)
            dot[r][p] = _mm256_add_epi32(dot[r][p], _mm256_madd_epi16(narrow[r][p], _mm256_set1_epi16(1)));
}

/* Less what the offset of the weights adds to the group's sum. */
ALWAYS_INLINE __m256i start_of_dot(int32_t sum, enum weight_format format)
{
    if (!VNNI && format == WEIGHT_INT8)
        return _mm256_setzero_si256();
    return _mm256_sub_epi32(_mm256_setzero_si256(),
                            _mm256_slli_epi32(_mm256_set1_epi32(sum), format == WEIGHT_INT4 ? 3 : 7));
}

/* A piece times `rows` activation rows, a constant, so that sums stay in registers. */
ALWAYS_INLINE void matmul_tile(const struct piece *piece, enum weight_format format, const struct matmul_row *row,
                               unsigned rows)
{
    __m256 sum[TILE_ROWS][PARTS];
    const int8_t *q[TILE_ROWS];
    const float *x_scales[TILE_ROWS];
    const int32_t *sums[TILE_ROWS];
    for (unsigned r = 0; r < rows; r++) {
        q[r] = row[r].q + piece->first * GROUP;
        x_scales[r] = row[r].scales + piece->first;
        sums[r] = row[r].sums + piece->first;
        for (unsigned p = 0; p < PARTS; p++)
            sum[r][p] = piece->first == 0 ? _mm256_setzero_ps() : _mm256_loadu_ps(row[r].y + piece->y_offset + p * 8);
    }
    const uint8_t *block = piece->quanta;
    for (size_t g = 0; g < piece->groups; g++, block += block_bytes(format)) {
        __m256i dot[TILE_ROWS][PARTS];
        for (size_t i = 0; i < block_bytes(format); i += 64)
            _mm_prefetch((const char *)block + AHEAD + i, _MM_HINT_T0);
        for (unsigned r = 0; r < rows; r++)
            dot[r][0] = dot[r][1] = start_of_dot(sums[r][g], format);
        dot_half(block, format, 0, q, rows, dot);
        dot_half(block, format, 1, q, rows, dot);
        struct lanes scale = lanes_load_f16(piece->scales + g * BLOCK_ROWS);
        for (unsigned r = 0; r < rows; r++) {
            __m256 x_scale = _mm256_set1_ps(x_scales[r][g]);
            for (unsigned p = 0; p < PARTS; p++)
                sum[r][p] =
                    _mm256_fmadd_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(dot[r][p]), scale.part[p]), x_scale, sum[r][p]);
            q[r] += GROUP;
        }
    }
    for (unsigned r = 0; r < rows; r++)
        for (unsigned p = 0; p < PARTS; p++)
            _mm256_storeu_ps(row[r].y + piece->y_offset + p * 8,
                             piece->last ? _mm256_mul_ps(sum[r][p], _mm256_set1_ps(piece->factor)) : sum[r][p]);
}

ALWAYS_INLINE void matmul_piece(const struct piece *piece, enum weight_format format, const struct matmul_row *rows,
                                uint32_t row_count)
{
    for (; row_count >= TILE_ROWS; rows += TILE_ROWS, row_count -= TILE_ROWS)
        matmul_tile(piece, format, rows, TILE_ROWS);
    switch (row_count) {
    case 3: matmul_tile(piece, format, rows, 3); break;
    case 2: matmul_tile(piece, format, rows, 2); break;
    case 1: matmul_tile(piece, format, rows, 1); break;
    default: break;
    }
}

/* Groups [first, end) of all block rows times rows that fill at most PASS_ROWS. */
ALWAYS_INLINE void matmul_pass(const void *quanta, const uint16_t *scales, enum weight_format format, uint32_t blocks,
                               uint32_t k, float factor, const struct matmul_row *rows, uint32_t row_count,
                               size_t first, size_t end)
{
    size_t groups = k / GROUP, step = row_count > TILE_ROWS ? PIECE_GROUPS : end - first;
    for (size_t b = 0; b < blocks; b++)
        for (size_t g = first; g < end; g += step) {
            size_t at = b * groups + g;
            struct piece piece = {.quanta = (const uint8_t *)quanta + at * block_bytes(format),
                                  .scales = scales + at * BLOCK_ROWS,
                                  .first = g,
                                  .groups = end - g < step ? end - g : step,
                                  .y_offset = b * BLOCK_ROWS,
                                  .factor = factor,
                                  .last = groups - g <= step};
            matmul_piece(&piece, format, rows, row_count);
        }
}

ALWAYS_INLINE void matmul(const void *quanta, const uint16_t *scales, enum weight_format format, uint32_t blocks,
                          uint32_t k, float factor, const struct matmul_row *rows, uint32_t row_count)
{
    for (uint32_t r = 0; r < row_count; r += PASS_ROWS) {
        uint32_t in_pass = row_count - r < PASS_ROWS ? row_count - r : PASS_ROWS;
        size_t groups = k / GROUP,
               step = in_pass > TILE_ROWS ? PASS_BYTES / GROUP / in_pass / PIECE_GROUPS * PIECE_GROUPS : groups;
        for (size_t g = 0; g < groups; g += step)
            matmul_pass(quanta, scales, format, blocks, k, factor, rows + r, in_pass, g,
                        groups - g < step ? groups : g + step);
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

/* 8 rows of 8 words, transposed. */
ALWAYS_INLINE void transpose_words(__m256i x[8])
{
    __m256i y[8];
    for (unsigned i = 0; i < 8; i += 2) {
        y[i] = _mm256_unpacklo_epi32(x[i], x[i + 1]);
        y[i + 1] = _mm256_unpackhi_epi32(x[i], x[i + 1]);
    }
    for (unsigned i = 0; i < 8; i += 4)
        for (unsigned j = 0; j < 2; j++) {
            x[i + 2 * j] = _mm256_unpacklo_epi64(y[i + j], y[i + j + 2]);
            x[i + 2 * j + 1] = _mm256_unpackhi_epi64(y[i + j], y[i + j + 2]);
        }
    for (unsigned i = 0; i < 4; i++) {
        y[i] = _mm256_permute2x128_si256(x[i], x[i + 4], 0x20);
        y[i + 4] = _mm256_permute2x128_si256(x[i], x[i + 4], 0x31);
    }
    memcpy(x, y, sizeof y);
}

/* 16 index keys as a block row of int8 weights. */
struct key_block {
    uint8_t quanta[INDEX_GROUPS][BLOCK_ROWS * GROUP];
    struct lanes scale[INDEX_GROUPS];
};

/* 16 keys, or the `count` that are left, and zeros. */
static void load_index_keys(const int8_t *keys, const float *scales, uint32_t groups, uint32_t count,
                            struct key_block *ret_block)
{
    for (uint32_t g = 0; g < groups; g++) {
        float scale[LANES] = {0};
        for (unsigned t = 0; t < LANES && t < count; t++)
            scale[t] = scales[t * groups + g];
        ret_block->scale[g] = lanes_load(scale);
        for (unsigned i = 0; i < 4; i++) { /* half of the keys, half of the columns */
            unsigned part = i % 2, half = i / 2;
            __m256i word[8];
            for (unsigned r = 0; r < 8; r++) {
                unsigned t = part * 8 + r;
                const int8_t *from = keys + ((size_t)t * groups + g) * GROUP + half * 32;
                word[r] = t < count ? _mm256_loadu_si256((const __m256i *)(const void *)from) : _mm256_setzero_si256();
            }
            transpose_words(word);
            for (unsigned line = 0; line < 8; line++)
                _mm256_storeu_si256(
                    (__m256i *)(void *)(ret_block->quanta[g] + (half * HALF_LINES + line) * 64 + part * 32),
                    word[line]);
        }
    }
}

/* Adds `heads` (a constant) heads from `first` on to the scores of 16 keys. */
ALWAYS_INLINE void index_heads(const struct index_queries *queries, uint32_t first, unsigned heads,
                               const struct key_block *keys, struct lanes *sum)
{
    uint32_t groups = queries->dim / GROUP;
    struct lanes dot[TILE_ROWS];
    for (unsigned h = 0; h < heads; h++)
        dot[h] = lanes_set(0.0f);
    for (uint32_t g = 0; g < groups; g++) {
        const int8_t *q[TILE_ROWS];
        __m256i integer[TILE_ROWS][PARTS];
        for (unsigned h = 0; h < heads; h++) {
            size_t at = (size_t)(first + h) * groups + g;
            q[h] = queries->q + at * GROUP;
            integer[h][0] = integer[h][1] = start_of_dot(queries->sums[at], WEIGHT_INT8);
        }
        dot_half(keys->quanta[g], WEIGHT_INT8, 0, q, heads, integer);
        dot_half(keys->quanta[g], WEIGHT_INT8, 1, q, heads, integer);
        for (unsigned h = 0; h < heads; h++) {
            struct lanes exact = lanes_of_integers((struct integer_lanes){{integer[h][0], integer[h][1]}});
            struct lanes scale = lanes_set(queries->scales[(size_t)(first + h) * groups + g]);
            dot[h] = lanes_fma(lanes_multiply(exact, scale), keys->scale[g], dot[h]);
        }
    }
    for (unsigned h = 0; h < heads; h++) {
        struct lanes scaled = lanes_multiply(dot[h], lanes_set(queries->scale));
        *sum = lanes_fma(lanes_set(queries->weights[first + h]), lanes_maximum(scaled, lanes_set(0.0f)), *sum);
    }
}

/* index_scores with 16 keys in lanes: transposed once for all heads. */
static void index_keys(const struct index_queries *queries, const int8_t *keys, const float *key_scales, uint32_t count,
                       float *ret_scores)
{
    uint32_t groups = queries->dim / GROUP;
    if (groups > INDEX_GROUPS) {
        index_scores(queries, keys, key_scales, count, ret_scores);
        return;
    }
    for (uint32_t t = 0; t < count; t += LANES) {
        struct key_block block;
        struct lanes sum = lanes_set(0.0f);
        float score[LANES];
        load_index_keys(keys + (size_t)t * queries->dim, key_scales + (size_t)t * groups, groups, count - t, &block);
        uint32_t h = 0;
        for (; h + TILE_ROWS <= queries->heads; h += TILE_ROWS)
            index_heads(queries, h, TILE_ROWS, &block, &sum);
        for (; h < queries->heads; h++)
            index_heads(queries, h, 1, &block, &sum);
        lanes_store(sum, score);
        memcpy(ret_scores + t, score, (count - t < LANES ? count - t : LANES) * sizeof *score);
    }
}

const struct kernel_set KERNEL_SET = {
    .name = VNNI ? "avxvnni" : "avx2",
    .matmul_int8 = matmul_int8,
    .matmul_int4 = matmul_int4,
    .index_scores = index_keys,
    .select = select_digits,
    LANES_KERNELS,
};
