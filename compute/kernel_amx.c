/* The set for AMX: matrix products of many rows in int8 tiles, all else in AVX-512.
 *
 * A block of int8 weights is a tile as it lies (16 lines of 4 columns x 16 rows); nibbles are spread into such tiles, once for all
 * rows. One TDPBSSD is then the exact dot product of a group for 16 activation rows times 16 weight rows. Its sums go through memory to
 * the scaling, which is the same as in every set. A few rows would leave the tiles empty: they go to another set, with the same bits.
 *
 * KERNEL_SET names the table, FEW_ROWS_SET the set for a few rows. */
#include "compute/amx.h"
#include "compute/kernel_amx.h"
#include "compute/kernel_lanes.h"

#define FEW_ROWS 7u     /* at most so many are not worth a tile */
#define PASS_TILES 8u   /* of 16 activation rows, in one pass over all block rows */
#define PIECE_GROUPS 8u /* weight tiles that the rows of a pass take in turn: 8 KiB, they stay in L1 */
#define PASS_GROUPS 64u /* groups of one pass times its tiles: 64 KiB of activations, they stay in L2 */
#define TILE_BYTES (TILE_ROWS * TILE_ROW_BYTES)

extern const struct kernel_set FEW_ROWS_SET;

#define TILE_SUM 0 /* [activation row][weight row], int32 */
#define TILE_ACTIVATIONS 1
#define TILE_WEIGHTS 2

/* Activations of one pass, put together in tiles. Rows that are missing in the last tile are zeros, and their results are dropped. */
struct pass {
    int8_t q[PASS_GROUPS][TILE_BYTES] __attribute__((aligned(64))); /* [tile][group] */
    float scales[PASS_GROUPS][TILE_ROWS];                           /* [tile][group][row] */
    const struct matmul_row *rows;
    uint32_t row_count;
    size_t first, groups; /* of the k / 64 */
};

/* A run of groups of one block row: weight tiles and their scales. */
struct piece {
    const uint8_t *tiles;
    const uint16_t *scales;
    size_t first, groups; /* of the pass */
    size_t y_offset;
    float factor;
    bool from_zero, last; /* of its block row: the pieces before leave their sum in y */
};

static void pack(const struct matmul_row *rows, uint32_t row_count, size_t first, size_t groups, struct pass *ret_pass)
{
    ret_pass->rows = rows;
    ret_pass->row_count = row_count;
    ret_pass->first = first;
    ret_pass->groups = groups;
    uint32_t padded = (row_count + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS;
    for (uint32_t r = 0; r < padded; r++)
        for (size_t g = 0; g < groups; g++) {
            size_t at = r / TILE_ROWS * groups + g;
            int8_t *to = ret_pass->q[at] + r % TILE_ROWS * TILE_ROW_BYTES;
            if (r < row_count)
                memcpy(to, rows[r].q + (first + g) * GROUP, GROUP);
            else
                memset(to, 0, GROUP);
            ret_pass->scales[at][r % TILE_ROWS] = r < row_count ? rows[r].scales[first + g] : 0.0f;
        }
}

/* int4 blocks as tiles of int8. */
static void spread(const uint8_t *blocks, size_t groups, int8_t *ret_tiles)
{
    for (size_t g = 0; g < groups; g++, blocks += TILE_BYTES / 2, ret_tiles += TILE_BYTES)
        for (size_t i = 0; i < TILE_BYTES / 2; i++) {
            ret_tiles[i] = (int8_t)((blocks[i] & 15) - 8);
            ret_tiles[TILE_BYTES / 2 + i] = (int8_t)((blocks[i] >> 4) - 8);
        }
}

/* A piece times one tile of rows: all integer sums first, so that the tile unit does not wait for the scaling. */
static void multiply_tile(struct tiles *tiles, const struct pass *pass, const struct piece *piece, uint32_t tile)
{
    int32_t dot[PIECE_GROUPS][TILE_ROWS][BLOCK_ROWS] __attribute__((aligned(64)));
    float spare[LANES] = {0}, *y[TILE_ROWS];
    size_t at = tile * pass->groups + piece->first;
    for (size_t g = 0; g < piece->groups; g++) {
        tile_zero(tiles, TILE_SUM);
        tile_load(tiles, TILE_ACTIVATIONS, pass->q[at + g], TILE_ROW_BYTES);
        tile_load(tiles, TILE_WEIGHTS, piece->tiles + g * TILE_BYTES, TILE_ROW_BYTES);
        tile_dot_int8(tiles, TILE_SUM, TILE_ACTIVATIONS, TILE_WEIGHTS);
        tile_store(tiles, TILE_SUM, dot[g], TILE_ROW_BYTES);
    }
    struct lanes sum[TILE_ROWS];
    for (unsigned r = 0; r < TILE_ROWS; r++) {
        uint32_t row = tile * TILE_ROWS + r;
        y[r] = row < pass->row_count ? pass->rows[row].y + piece->y_offset : spare;
        sum[r] = piece->from_zero ? lanes_set(0.0f) : lanes_load(y[r]);
    }
    for (size_t g = 0; g < piece->groups; g++) {
        struct lanes scale = lanes_load_f16(piece->scales + g * BLOCK_ROWS);
        for (unsigned r = 0; r < TILE_ROWS; r++) {
            struct lanes scaled = lanes_multiply(lanes_of_integers(integers_load(dot[g][r])), scale);
            sum[r] = lanes_fma(scaled, lanes_set(pass->scales[at + g][r]), sum[r]);
        }
    }
    for (unsigned r = 0; r < TILE_ROWS; r++)
        lanes_store(piece->last ? lanes_multiply(sum[r], lanes_set(piece->factor)) : sum[r], y[r]);
}

/* All block rows times the rows and groups of a pass. */
static void multiply_pass(struct tiles *tiles, const struct pass *pass, const uint8_t *quanta, const uint16_t *scales,
                          enum weight_format format, uint32_t blocks, size_t all_groups, float factor)
{
    int8_t spread_tiles[PIECE_GROUPS * TILE_BYTES] __attribute__((aligned(64)));
    for (size_t b = 0; b < blocks; b++)
        for (size_t g = 0; g < pass->groups; g += PIECE_GROUPS) {
            size_t at = b * all_groups + pass->first + g, left = pass->groups - g;
            struct piece piece = {.tiles = quanta + at * block_bytes(format),
                                  .scales = scales + at * BLOCK_ROWS,
                                  .first = g,
                                  .groups = left < PIECE_GROUPS ? left : PIECE_GROUPS,
                                  .y_offset = b * BLOCK_ROWS,
                                  .factor = factor};
            piece.from_zero = pass->first + g == 0;
            piece.last = pass->first + g + piece.groups == all_groups;
            if (format == WEIGHT_INT4) {
                spread(piece.tiles, piece.groups, spread_tiles);
                piece.tiles = (const uint8_t *)spread_tiles;
            }
            for (uint32_t tile = 0; tile * TILE_ROWS < pass->row_count; tile++)
                multiply_tile(tiles, pass, &piece, tile);
        }
}

static void matmul(const void *quanta, const uint16_t *scales, enum weight_format format, uint32_t blocks, uint32_t k,
                   float factor, const struct matmul_row *rows, uint32_t row_count)
{
    struct pass pass;
    struct tiles tiles;
    struct tile_config config = {.palette = 1};
    for (unsigned t = 0; t <= TILE_WEIGHTS; t++) {
        config.rows[t] = TILE_ROWS;
        config.row_bytes[t] = TILE_ROW_BYTES;
    }
    tiles_configure(&tiles, &config); /* of this thread, which may have run other code since the last time */
    for (uint32_t r = 0; r < row_count; r += PASS_TILES * TILE_ROWS) {
        uint32_t in_pass = row_count - r < PASS_TILES * TILE_ROWS ? row_count - r : PASS_TILES * TILE_ROWS;
        size_t groups = k / GROUP, step = PASS_GROUPS / ((in_pass + TILE_ROWS - 1) / TILE_ROWS);
        for (size_t g = 0; g < groups; g += step) {
            pack(rows + r, in_pass, g, groups - g < step ? groups - g : step, &pass);
            multiply_pass(&tiles, &pass, quanta, scales, format, blocks, groups, factor);
        }
    }
    tiles_release(&tiles);
}

static void matmul_int8(const void *quanta, const uint16_t *scales, uint32_t blocks, uint32_t k, float factor,
                        const struct matmul_row *rows, uint32_t row_count)
{
    if (row_count <= FEW_ROWS)
        FEW_ROWS_SET.matmul_int8(quanta, scales, blocks, k, factor, rows, row_count);
    else
        matmul(quanta, scales, WEIGHT_INT8, blocks, k, factor, rows, row_count);
}

static void matmul_int4(const void *quanta, const uint16_t *scales, uint32_t blocks, uint32_t k, float factor,
                        const struct matmul_row *rows, uint32_t row_count)
{
    if (row_count <= FEW_ROWS)
        FEW_ROWS_SET.matmul_int4(quanta, scales, blocks, k, factor, rows, row_count);
    else
        matmul(quanta, scales, WEIGHT_INT4, blocks, k, factor, rows, row_count);
}

static void index_keys(const struct index_queries *queries, const int8_t *keys, const float *key_scales, uint32_t count,
                       float *ret_scores)
{
    FEW_ROWS_SET.index_scores(queries, keys, key_scales, count, ret_scores);
}

const struct kernel_set KERNEL_SET = {
    .name = "amx",
    .matmul_int8 = matmul_int8,
    .matmul_int4 = matmul_int4,
    .index_scores = index_keys,
    .select = select_digits,
    LANES_KERNELS,
};
