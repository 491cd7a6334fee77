/* The tile instructions of amx.h in C: a tile is an array, an instruction the loops of its definition. */
#pragma once

#include <assert.h>
#include <string.h>

struct tiles {
    struct tile_config config;
    uint8_t bytes[TILE_REGISTERS][TILE_ROWS][TILE_ROW_BYTES];
};

/* LDTILECFG: all tiles become zero. The CPU faults on what is asserted here. */
static inline void tiles_configure(struct tiles *tiles, const struct tile_config *config)
{
    assert(config->palette == 1 && config->start_row == 0);
    for (unsigned t = 0; t < TILE_REGISTERS; t++)
        assert(config->rows[t] <= TILE_ROWS && config->row_bytes[t] <= TILE_ROW_BYTES && config->row_bytes[t] % 4 == 0);
    tiles->config = *config;
    memset(tiles->bytes, 0, sizeof tiles->bytes);
}

static inline void tiles_release(struct tiles *tiles)
{
    memset(tiles, 0, sizeof *tiles);
}

/* TILEZERO */
static inline void tile_zero(struct tiles *tiles, unsigned tile)
{
    assert(tiles->config.palette == 1 && tiles->config.rows[tile] > 0);
    memset(tiles->bytes[tile], 0, sizeof tiles->bytes[tile]);
}

/* TILELOADD: rows of the tile from `from`, `stride` bytes apart; what the configuration leaves out becomes zero. */
static inline void tile_load(struct tiles *tiles, unsigned tile, const void *from, size_t stride)
{
    tile_zero(tiles, tile);
    for (unsigned row = 0; row < tiles->config.rows[tile]; row++)
        memcpy(tiles->bytes[tile][row], (const uint8_t *)from + row * stride, tiles->config.row_bytes[tile]);
}

/* TILESTORED */
static inline void tile_store(const struct tiles *tiles, unsigned tile, void *to, size_t stride)
{
    assert(tiles->config.palette == 1 && tiles->config.rows[tile] > 0);
    for (unsigned row = 0; row < tiles->config.rows[tile]; row++)
        memcpy((uint8_t *)to + row * stride, tiles->bytes[tile][row], tiles->config.row_bytes[tile]);
}

/* TDPBSSD: sum[m][n] += a[m][4k + i] * b[k][4n + i] over all k and i < 4; sums are int32, a and b int8. */
static inline void tile_dot_int8(struct tiles *tiles, unsigned sum, unsigned a, unsigned b)
{
    const struct tile_config *config = &tiles->config;
    unsigned rows = config->rows[sum], columns = config->row_bytes[sum] / 4, depth = config->row_bytes[a] / 4;
    assert(sum != a && sum != b && a != b);
    assert(config->rows[a] == rows && config->rows[b] == depth && config->row_bytes[b] / 4 == columns);
    for (unsigned m = 0; m < rows; m++)
        for (unsigned n = 0; n < columns; n++) {
            int32_t total;
            memcpy(&total, &tiles->bytes[sum][m][n * 4], sizeof total);
            for (unsigned k = 0; k < depth; k++)
                for (unsigned i = 0; i < 4; i++)
                    total += (int8_t)tiles->bytes[a][m][k * 4 + i] * (int8_t)tiles->bytes[b][k][n * 4 + i];
            memcpy(&tiles->bytes[sum][m][n * 4], &total, sizeof total);
        }
}
