/* The loops of peak.h from one instruction each. The including file defines
 *   VECTOR   its vector type
 *   DOT(i)   a statement that issues the dot instruction into acc[i] from a and b
 *   FMA(i)   the same for f32
 *   DOT_MACS, FMA_MACS  multiply-accumulates of one
 *   LOAD(p)  a vector from memory, OR(x, y), and FOLD(x), a uint64_t of it
 * Asm statements are volatile, because a compiler would see through such loops. */
#pragma once

#include "compute/peak.h"

#include <string.h>

/* Twelve at once cover latency times issue width of every CPU so far, and fit into sixteen registers with the
 * operands. */
#define AT_ONCE 12u
#define TWELVE(M) M(0) M(1) M(2) M(3) M(4) M(5) M(6) M(7) M(8) M(9) M(10) M(11)
#define UNROLLED 4u
#define UNROLL(M) TWELVE(M) TWELVE(M) TWELVE(M) TWELVE(M)
#define LINE_BYTES 64u
#define VECTORS (LINE_BYTES / sizeof(VECTOR)) /* of a line */

#define PEAK_LOOP(name, STATEMENT, macs)                                                                               \
    static uint64_t name(uint64_t rounds)                                                                              \
    {                                                                                                                  \
        VECTOR acc[AT_ONCE], a, b;                                                                                     \
        memset(acc, 0, sizeof acc);                                                                                    \
        memset(&a, 0, sizeof a);                                                                                       \
        memset(&b, 0, sizeof b);                                                                                       \
        for (uint64_t r = 0; r < rounds; r++) {                                                                        \
            UNROLL(STATEMENT)                                                                                          \
        }                                                                                                              \
        return rounds * UNROLLED * AT_ONCE * (macs);                                                                   \
    }

/* One line of each of `streams` streams at a time (a constant, so that the loop is unrolled). */
static inline __attribute__((always_inline)) uint64_t read_streams(const char *from, size_t bytes, unsigned streams)
{
    VECTOR sum[8];
    memset(sum, 0, sizeof sum);
    size_t each = bytes / streams;
    for (size_t at = 0; at < each; at += 2 * LINE_BYTES)
        for (unsigned s = 0; s < streams; s++)
            for (unsigned v = 0; v < 2 * VECTORS; v++)
                sum[s] = OR(sum[s], LOAD(from + s * each + at + v * sizeof(VECTOR)));
    uint64_t folded = 0;
    for (unsigned s = 0; s < streams; s++)
        folded |= FOLD(sum[s]);
    return folded;
}

static uint64_t read_all(const void *from, size_t bytes, unsigned streams)
{
    switch (streams) {
    case 1: return read_streams(from, bytes, 1);
    case 2: return read_streams(from, bytes, 2);
    case 4: return read_streams(from, bytes, 4);
    default: return read_streams(from, bytes, 8);
    }
}
