/* What is remembered of the experts' use, as numbers and as bytes. Pure: no file, no clock.
 *
 * An expert's heat is the number of its uses, halved each time LEARNING_HALF_LIFE uses an expert have been made of the
 * whole model: half-lives are counted in uses, not in sessions, so that ten starts without a question forget nothing.
 *
 *   file    = header, then records, in the order in which they were written (little-endian)
 *   header  = magic 8, identity u64, experts u32, 0 u32, XXH3 of these 24 bytes u64
 *   record  = XXH3 of the rest (seed: identity) u64, kind u32, bytes of the payload u32, payload
 *   USES    = { expert u32, uses u32 } ..., experts ascending: added to the heat
 *   HEAT    = uses since the last halving u64, heat f32 [experts]: in place of everything before it */
#pragma once

#include "proto/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define LEARNING_HALF_LIFE 256u /* uses, on average, of each expert */
#define LEARNING_HEADER_BYTES 32u
#define LEARNING_RECORD_BYTES 16u /* of a record before its payload */

struct learning_memory {
    uint64_t identity; /* of the container */
    uint64_t uses;     /* since the last halving */
    uint32_t experts;
    float *heat; /* [experts] */
};

int learning_memory_open(uint64_t identity, uint32_t experts, struct learning_memory *ret_memory,
                         struct error *ret_error);
void learning_memory_close(struct learning_memory *memory);

/* Adds uses[experts] and lets the past decay. */
void learning_memory_add(struct learning_memory *memory, const uint32_t *uses);

/* Room that the encoders below need for `experts`: a header, a HEAT record, a USES record at most. */
size_t learning_heat_bytes(uint32_t experts);
size_t learning_uses_bytes(uint32_t experts);

/* They return how many bytes they wrote. A USES record of no uses has none. */
size_t learning_encode_header(const struct learning_memory *memory, void *ret_bytes);
size_t learning_encode_heat(const struct learning_memory *memory, void *ret_bytes);
size_t learning_encode_uses(const struct learning_memory *memory, const uint32_t *uses, void *ret_bytes);

enum learning_verdict {
    LEARNING_WHOLE,
    LEARNING_CUT,     /* a last record that was not written to its end, after a crash: harmless */
    LEARNING_DAMAGED, /* something else than that */
    LEARNING_FOREIGN, /* a whole header, of another model */
};

/* Reads a file's bytes into the memory, which was just opened, as far as they are right; *ret_whole says how far. The
 * bytes are hostile. */
enum learning_verdict learning_decode(struct learning_memory *memory, const void *bytes, size_t size,
                                      size_t *ret_whole);
