/* The form of weights, the same on disk, in the pool and in the kernels: nothing is repacked after a read.
 *
 * A matrix is [n, k]: n output rows, k input columns. It is cut into blocks of 16 rows x 64 columns; a block has one f16
 * scale a row. Blocks lie in order [n / 16][k / 64], so a run of whole block rows is one stretch of bytes.
 *
 *   int8 block, 1024 bytes: weight (r, c) is the signed byte at  (c / 4) * 64 + r * 4 + c % 4
 *        -> 64-byte line q holds columns 4q .. 4q+3 of all 16 rows: one dot-product instruction a line, and an AMX tile.
 *   int4 block, 512 bytes:  line q (0..7) holds in its low nibbles line q of the int8 block (columns 4q .. 4q+3) and in its
 *        high nibbles line q + 8 (columns 32+4q .. 32+4q+3); weight = nibble - 8.
 *   scales: f16 [n / 16][k / 64][16]. weight = quantum * scale * 2^exponent, one exponent a matrix, applied to the finished sum.
 *
 * An expert is a blob of 8 slices; slice s holds the s-th part of the rows of gate, up and down, cut in whole blocks:
 *   [gate quanta][up quanta][down quanta][gate scales][up scales][down scales][zeros up to slice_bytes]
 * All slices of a container have the same size, a multiple of 4096 (O_DIRECT).
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#define BLOCK_ROWS 16u
#define BLOCK_COLUMNS 64u
#define SCALES_BYTES (BLOCK_ROWS * 2u) /* the f16 scales of one block */
#define EXPERT_SLICES 8u
#define DISK_ALIGN 4096u

enum weight_format {
    WEIGHT_INT4 = 1,
    WEIGHT_INT8 = 2,
};

enum expert_matrix { EXPERT_GATE, EXPERT_UP, EXPERT_DOWN, EXPERT_MATRICES };

static inline size_t block_bytes(enum weight_format format)
{
    return format == WEIGHT_INT4 ? 512 : 1024;
}

/* Bytes of the quanta of `blocks` block rows of a matrix with k columns. */
static inline size_t quanta_bytes(enum weight_format format, uint32_t blocks, uint32_t k)
{
    return (size_t)blocks * (k / BLOCK_COLUMNS) * block_bytes(format);
}

/* Bytes of the scales of the same rows. */
static inline size_t scales_bytes(uint32_t blocks, uint32_t k)
{
    return (size_t)blocks * (k / BLOCK_COLUMNS) * SCALES_BYTES;
}

/* Part `part` of `parts` of `count` things: [first, first + length). The parts cover all, in order, sizes differ by at most one.
 * Used for slices of an expert, rows of a worker, rows of a thread, so that all agree. */
struct range {
    uint32_t first, count;
};

static inline struct range split(uint32_t count, uint32_t part, uint32_t parts)
{
    uint32_t first = (uint32_t)((uint64_t)count * part / parts);
    return (struct range){first, (uint32_t)((uint64_t)count * (part + 1) / parts) - first};
}

/* Where one matrix of an expert lies in one slice. */
struct slice_part {
    struct range blocks; /* block rows of the matrix that this slice holds */
    size_t quanta;       /* byte offset in the slice */
    size_t scales;       /* byte offset in the slice */
};

/* The geometry of an expert: hidden = input width of gate and up, width = their rows. */
struct expert_shape {
    enum weight_format format;
    uint32_t hidden, width;
};

static inline uint32_t expert_rows(const struct expert_shape *shape, enum expert_matrix matrix)
{
    return matrix == EXPERT_DOWN ? shape->hidden : shape->width;
}

static inline uint32_t expert_columns(const struct expert_shape *shape, enum expert_matrix matrix)
{
    return matrix == EXPERT_DOWN ? shape->width : shape->hidden;
}

/* Fills the three parts of slice `slice` and returns the bytes used, before padding. */
static inline size_t expert_slice(const struct expert_shape *shape, uint32_t slice,
                                  struct slice_part ret_parts[EXPERT_MATRICES])
{
    size_t offset = 0;
    for (int m = 0; m < EXPERT_MATRICES; m++) {
        uint32_t rows = expert_rows(shape, (enum expert_matrix)m), k = expert_columns(shape, (enum expert_matrix)m);
        ret_parts[m].blocks = split(rows / BLOCK_ROWS, slice, EXPERT_SLICES);
        ret_parts[m].quanta = offset;
        offset += quanta_bytes(shape->format, ret_parts[m].blocks.count, k);
    }
    for (int m = 0; m < EXPERT_MATRICES; m++) {
        ret_parts[m].scales = offset;
        offset += scales_bytes(ret_parts[m].blocks.count, expert_columns(shape, (enum expert_matrix)m));
    }
    return offset;
}

/* Bytes of every slice of a container: the largest, padded to 4096. GLM-5.2 at int4: 612 x 4096. */
static inline size_t expert_slice_bytes(const struct expert_shape *shape)
{
    size_t most = 0;
    for (uint32_t s = 0; s < EXPERT_SLICES; s++) {
        struct slice_part parts[EXPERT_MATRICES];
        size_t used = expert_slice(shape, s, parts);
        most = used > most ? used : most;
    }
    return (most + DISK_ALIGN - 1) / DISK_ALIGN * DISK_ALIGN;
}
