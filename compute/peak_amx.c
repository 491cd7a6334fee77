/* For AMX: tdpbssd on tiles of 16 rows of 64 bytes. Who runs the amx set has been given the tiles by the kernel. */
#include "compute/peak_512.h"
#include "compute/peak_sets.h"

#define TILES 8u
#define TILE_ROWS 16u
#define TILE_MACS (16u * 16u * 64u)

/* The palette that LDTILECFG reads: Intel SDM, volume 1, section 18.2. */
struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};
_Static_assert(sizeof(struct tile_config) == 64, "as LDTILECFG reads it");

/* Four sums from two times two operands, as a matrix product does it. */
static uint64_t run_dot(uint64_t rounds)
{
    struct tile_config config = {.palette = 1};
    for (unsigned t = 0; t < TILES; t++) {
        config.row_bytes[t] = LINE_BYTES;
        config.rows[t] = TILE_ROWS;
    }
    _tile_loadconfig(&config);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_zero(4);
    _tile_zero(5);
    _tile_zero(6);
    _tile_zero(7);
    for (uint64_t r = 0; r < rounds; r++)
        for (unsigned u = 0; u < UNROLLED; u++) {
            _tile_dpbssd(0, 4, 6);
            _tile_dpbssd(1, 4, 7);
            _tile_dpbssd(2, 5, 6);
            _tile_dpbssd(3, 5, 7);
        }
    _tile_release();
    return rounds * UNROLLED * 4 * TILE_MACS;
}

PEAK_LOOP(run_fma, FMA, FMA_MACS)

const struct peak peak_amx = {"amx", "tdpbssd", "vfmadd231ps zmm", run_dot, run_fma, read_all};
