/* The tile instructions that kernel_amx.c uses. A tile is up to 16 rows of 64 bytes; tile numbers are constants from 0 to 7. Built
 * without AMX, the same names are a model in C, so that everything but the instructions themselves is tested on any machine.
 * Semantics: Intel SDM, volume 2, LDTILECFG, TILELOADD, TILESTORED, TILEZERO, TDPBSSD; memory layout of the configuration: volume 1,
 * "TILECFG". */
#pragma once

#include <stddef.h>
#include <stdint.h>

#define TILE_REGISTERS 8u
#define TILE_ROWS 16u
#define TILE_ROW_BYTES 64u

/* What LDTILECFG reads. palette 1 is the only one that there is. */
struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};
_Static_assert(sizeof(struct tile_config) == 64, "LDTILECFG reads 64 bytes");

#if defined(__AMX_TILE__) && defined(__AMX_INT8__)
    #include <immintrin.h>

struct tiles { /* the registers are the thread's: nothing to hold */
    char unused;
};

    /* The barrier: to gcc 12, a tile load reads no memory, and stores before it could be moved behind it. */
    #define TILES_DO(tiles, instruction)                                                                               \
        do {                                                                                                           \
            (void)(tiles);                                                                                             \
            __asm__ volatile("" ::: "memory");                                                                         \
            instruction;                                                                                               \
        } while (0)

    #define tiles_configure(tiles, config) TILES_DO(tiles, _tile_loadconfig(config))
    #define tiles_release(tiles) TILES_DO(tiles, _tile_release())
    #define tile_zero(tiles, tile) TILES_DO(tiles, _tile_zero(tile))
    #define tile_load(tiles, tile, from, stride) TILES_DO(tiles, _tile_loadd(tile, from, stride))
    #define tile_store(tiles, tile, to, stride) TILES_DO(tiles, _tile_stored(tile, to, stride))
    #define tile_dot_int8(tiles, sum, a, b) TILES_DO(tiles, _tile_dpbssd(sum, a, b))
#else
    #include "compute/amx_model.h"
#endif
