/* The reference kernel set. It is compiled twice from this file, for x86-64-v2 and for x86-64-v3 (KERNEL_SET names
 * the table); both give the same bits, because every sum below has one order, 16 rows or 16 elements are 16 lanes,
 * and contraction is off. */
#include "compute/kernel_lanes.h"
#include "compute/kernel_scalar.h"

#define TILE_ROWS 4u /* activation rows that share one pass over a block of weights */

/* One block row times `rows` (a constant, so that the loops are unrolled) activation rows. */
ALWAYS_INLINE void matmul_tile(const uint8_t *quanta, const uint16_t *scales, enum weight_format format, uint32_t k,
                               float factor, const struct matmul_row *row, unsigned rows, size_t y_offset)
{
    struct lanes sum[TILE_ROWS];
    for (unsigned r = 0; r < rows; r++)
        sum[r] = lanes_set(0.0f);
    for (uint32_t g = 0; g < k / GROUP; g++, quanta += block_bytes(format), scales += BLOCK_ROWS) {
        struct integer_lanes dot[TILE_ROWS];
        for (unsigned r = 0; r < rows; r++)
            dot[r] = integers_zero();
        for (unsigned line = 0; line < GROUP / 4; line++) {
            struct integer_lanes w = integers_load(quanta + (format == WEIGHT_INT4 ? line % 8 : line) * 64);
            if (format == WEIGHT_INT4)
                w = integers_nibbles(w, line >= 8);
            struct integer_lanes even = integers_even(w), odd = integers_odd(w);
            for (unsigned r = 0; r < rows; r++) {
                struct integer_lanes x = integers_repeat(row[r].q + (size_t)g * GROUP + line * 4);
                dot[r] = integers_dot(integers_dot(dot[r], even, integers_even(x)), odd, integers_odd(x));
            }
        }
        struct lanes scale = lanes_load_f16(scales);
        for (unsigned r = 0; r < rows; r++)
            sum[r] = lanes_fma(lanes_multiply(lanes_of_integers(dot[r]), scale), lanes_set(row[r].scales[g]), sum[r]);
    }
    for (unsigned r = 0; r < rows; r++)
        lanes_store(lanes_multiply(sum[r], lanes_set(factor)), row[r].y + y_offset);
}

ALWAYS_INLINE void matmul(const void *quanta, const uint16_t *scales, enum weight_format format, uint32_t blocks,
                          uint32_t k, float factor, const struct matmul_row *rows, uint32_t row_count)
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

const struct kernel_set KERNEL_SET = {
    .name = "scalar",
    .matmul_int8 = matmul_int8,
    .matmul_int4 = matmul_int4,
    .index_scores = index_scores,
    .select = select_best,
    LANES_KERNELS,
};
