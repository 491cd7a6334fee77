/* What is remembered of the experts' use, as numbers and as bytes. Pure: no file, no clock.
 *
 * An expert's heat is the number of its uses, halved each time USAGE_HALF_LIFE uses an expert have been made of the
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

#define USAGE_HALF_LIFE 256u /* uses, on average, of each expert */
#define USAGE_HEADER_BYTES 32u
#define USAGE_RECORD_BYTES 16u /* of a record before its payload */

struct usage_memory {
    uint64_t identity; /* of the container */
    uint64_t uses;     /* since the last halving */
    uint32_t experts;
    float *heat; /* [experts] */
};

int usage_memory_open(uint64_t identity, uint32_t experts, struct usage_memory *ret_memory, struct error *ret_error);
void usage_memory_close(struct usage_memory *memory);

/* Adds uses[experts] and lets the past decay. */
void usage_memory_add(struct usage_memory *memory, const uint32_t *uses);

/* Room that the encoders below need for `experts`: a header, a HEAT record, a USES record at most. */
size_t usage_heat_bytes(uint32_t experts);
size_t usage_uses_bytes(uint32_t experts);

/* They return how many bytes they wrote. A USES record of no uses has none. */
size_t usage_encode_header(const struct usage_memory *memory, void *ret_bytes);
size_t usage_encode_heat(const struct usage_memory *memory, void *ret_bytes);
size_t usage_encode_uses(const struct usage_memory *memory, const uint32_t *uses, void *ret_bytes);

enum usage_verdict {
    USAGE_WHOLE,
    USAGE_CUT,     /* a last record that was not written to its end, after a crash: harmless */
    USAGE_DAMAGED, /* something else than that */
    USAGE_FOREIGN, /* a whole header, of another model */
};

/* Reads a file's bytes into the memory, which was just opened, as far as they are right; *ret_whole says how far. The
 * bytes are hostile. */
enum usage_verdict usage_decode(struct usage_memory *memory, const void *bytes, size_t size, size_t *ret_whole);
