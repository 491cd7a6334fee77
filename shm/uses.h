/* The use log: which experts the rows of every step chose, in the order of use. Worker 0's first thread writes it; iod feeds its
 * policy from it, and `calypte trace` writes it to a file.
 *
 * It is a ring whose writer never waits: each reader has a place of its own, and one that is slower than the writer learns how many
 * entries it has lost. The entries of a layer follow one another by ascending expert, then row; the first has USE_LAYER. */
#pragma once

#include "shm/segment.h"

#include <stdatomic.h>
#include <stdint.h>

#define USE_ENTRIES (1u << 18)

enum use_flag {
    USE_HIT = 1,     /* READY when its layer began */
    USE_PREFILL = 2, /* of a prompt's row, not of an answer's: its sequence has many rows in the step */
    USE_LAYER = 4,   /* the first entry of a layer */
};

/* Packed in an entry, from the low bits: expert 24, row 13, flags 3, step 24. */
struct use {
    uint32_t expert; /* moe_index * experts + expert */
    uint32_t row;    /* of the step, modulo 8192 */
    uint32_t flags;  /* enum use_flag */
    uint32_t step;   /* low 24 bits of the step's number */
};

struct use_log {
    /* W: the writer, before it writes the entries below it: what lies more than USE_ENTRIES before may be overwritten. */
    _Alignas(CACHE_LINE) _Atomic uint64_t begun;
    _Atomic uint64_t end; /* W: the writer, after it has written them (release) */
    _Alignas(CACHE_LINE) _Atomic uint64_t entries[USE_ENTRIES];
};

/* Appends `count` uses, at most USE_ENTRIES / 2 at a time. Continues where an earlier writer, dead or not, has ended. Wait-free. Thread: the one writer. */
void uses_append(struct use_log *log, const struct use *uses, uint32_t count);

/* Reads at most `most` entries from *place on, which moves behind them. Returns how many; *ret_lost: how many were overwritten before
 * they were read. A new reader begins with *place = uses_end(). Any thread, any process; values are as hostile as their writer. */
uint32_t uses_read(const struct use_log *log, uint64_t *place, struct use *ret_uses, uint32_t most, uint64_t *ret_lost);
uint64_t uses_end(const struct use_log *log);
