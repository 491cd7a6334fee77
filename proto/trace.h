/* The file of `calypte trace`: which experts every layer of every step used, and whether they were in the pool.
 *
 * JSON lines, so that jq and awk read it; half as long again as packed entries, and gzip makes it a sixth. The first
 * line says what was traced:
 *   {"trace":2,"model":"16 hex digits, the container's identity","layers":75,"experts":256,"slots":4800,
 *    "layer_numbers":[3,4,..,77],"expert_bytes":19922944}
 * layers: MoE layers; experts: of a layer; slots: of the pool, those with memory, 0: there was no pool; layer_numbers:
 * what the model itself, `calypte pool` and errors call each of the layers; expert_bytes: of one expert, so of a slot.
 * The last two may be absent, as in format 1, which has nothing of slots that change either. Then a line a layer of a
 * step, in the order of use:
 *   {"step":7,"layer":3,"rows":[[17,0,1],[17,1,3],[40,0,0]]}
 * layer: among the MoE layers, counted from 0; rows: [expert within the layer, row of the step, flags: 1 was in the
 * pool when the layer began + 2 of a prompt, not of an answer]; ascending by expert, then row, none twice. Where uses
 * were lost, because the writer of the trace was too slow, the layer behind the gap has "lost": how many.
 * Where the pool was resized there is, between layers, a line
 *   {"slots":160}
 * with the slots that have memory from about there on. */
#pragma once

#include "proto/error.h"
#include "proto/model_config.h"

#include <stdbool.h>
#include <stdint.h>

#define TRACE_FORMAT 2
#define TRACE_MAX_ROWS 8192u                              /* of a step: what the use log can number */
#define TRACE_MAX_USES (TRACE_MAX_ROWS * MODEL_MAX_TOP_K) /* of a layer of one step */
#define TRACE_EXPERT_BYTES_MAX (UINT64_C(1) << 40)
#define TRACE_LINE_MAX ((size_t)8 << 20) /* bytes */

enum trace_flag { TRACE_HIT = 1, TRACE_PREFILL = 2 };

struct trace_header {
    uint64_t identity; /* of the container */
    uint32_t layers, experts, slots;
    uint32_t layer_numbers[MODEL_MAX_LAYERS]; /* [layers], ascending, where known: `numbered` */
    bool numbered;
    uint64_t expert_bytes; /* 0: not known */
};

struct trace_use {
    uint32_t expert; /* within its layer */
    uint32_t row, flags;
};

struct trace_layer {
    uint64_t step, lost;
    uint32_t layer; /* moe_index */
    uint32_t count;
    struct trace_use *uses; /* [count] */
};

/* A trace that is being written. One thread at a time, as for the reader. */
struct trace_writer;

/* Begins the file `path`, which must not exist yet (-EEXIST). */
int trace_create(const char *path, const struct trace_header *header, struct trace_writer **ret_writer,
                 struct error *ret_error);
/* Appends a layer. -EINVAL where it is not one: nothing is written then. */
int trace_append(struct trace_writer *writer, const struct trace_layer *layer, struct error *ret_error);
/* Notes that the pool has so many slots with memory from here on. */
int trace_append_slots(struct trace_writer *writer, uint32_t slots, struct error *ret_error);
/* Writes out what is buffered. Frees the writer, whatever happens; a file that could not be written whole, now or before,
 * is cut behind its last whole line, and removed if it has none. NULL: nothing. */
int trace_finish(struct trace_writer *writer, struct error *ret_error);
/* Instead of it, where a part is worth nothing: removes the file and frees the writer. NULL: nothing. */
void trace_discard(struct trace_writer *writer);

struct trace_reader;

/* Opens a trace and checks its first line. `path` may be a pipe: zcat FILE.gz | calypte cachesim /dev/stdin. */
int trace_open(const char *path, struct trace_reader **ret_reader, struct trace_header *ret_header,
               struct error *ret_error);
/* The next layer: 1; 0 at the end; -EBADMSG for a line that is none, with its number. Every number of *ret_layer is
 * within the header's bounds. It is valid until the next call. */
int trace_next(struct trace_reader *reader, struct trace_layer *ret_layer, struct error *ret_error);
/* The fewest and the most slots that the pool had, as far as the trace has been read. */
void trace_slots(const struct trace_reader *reader, uint32_t *ret_least, uint32_t *ret_most);
void trace_close(struct trace_reader *reader);
