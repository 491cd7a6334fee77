/* The messages between front and workers: binary, little-endian, versioned, every length checked before use.
 *
 * Each starts with struct message_header. STEP goes from the front to every worker, the same bytes; STEP_DONE comes back from worker 0
 * only. A STEP depends on nothing in a worker's memory, so it may be run twice. */
#pragma once

#include "proto/error.h"

#include <stddef.h>
#include <stdint.h>

#define MESSAGE_MAGIC 0x50594c43u /* "CLYP" */
#define MESSAGE_VERSION 2u

enum message_type { MESSAGE_STEP = 1, MESSAGE_STEP_DONE = 2 };

struct message_header {
    uint32_t magic;
    uint16_t version, type;
    uint64_t bytes; /* whole message */
};

enum step_logits { LOGITS_NONE = 0, LOGITS_LAST = 1, LOGITS_ALL = 2 };

/* Rows of one sequence in this step: positions first .. first + rows - 1. */
struct step_sequence {
    uint32_t first, rows;
    uint32_t logits;          /* enum step_logits */
    uint32_t pages;           /* at least ceil((first + rows) / page_tokens) */
    uint32_t row_offset;      /* of its first row among all rows of the step; filled by decode */
    const uint32_t *page_ids; /* [pages] */
};

/* A STEP in memory. tokens and next are [rows]; next[i] is the token after row i in its sequence, or -1 where unknown; it is used by
 * the MTP layer only. */
struct step {
    uint64_t id;
    uint32_t epoch;
    uint32_t
        draft; /* 1: run the MTP layer on rows whose next token is known, draft logits wanted for the rows that want logits */
    uint32_t sequences, rows;
    const struct step_sequence *sequence; /* [sequences] */
    const int32_t *tokens, *next;
};

/* What a worker does in a step. Waiting for other threads of its team belongs to the part in which they are awaited. */
enum step_part {
    PART_OTHER,     /* the step's beginning and end, embedding, the MTP layer's input */
    PART_ATTENTION, /* projections, latents, attention, its output */
    PART_INDEXER,   /* index keys and queries, scores, the choice of positions */
    PART_DENSE,     /* the MLP of dense layers */
    PART_ROUTER,
    PART_SHARED,   /* the shared expert */
    PART_EXPERTS,  /* routed experts */
    PART_WAIT,     /* for experts on their way from the disk */
    PART_EXCHANGE, /* for the other workers */
    PART_HEAD,     /* logits */
    STEP_PARTS,
};

/* "other", "attention", ... */
const char *step_part_name(enum step_part part);

struct step_done {
    uint64_t id;
    uint32_t epoch;
    int32_t status; /* 0; -ESTALE: abandoned, the epoch was raised; -EIO: an expert failed; else a negative errno */
    uint32_t logit_rows; /* rows of logits that stand in the exchange segment, in order of the rows that asked */
    uint32_t layer, expert, slice, code; /* of a failed expert: code is its errno (EBADMSG: checksum) */
    uint64_t step_ns;                    /* from the STEP's arrival to this message */
    uint64_t part_ns[STEP_PARTS];        /* where it went, in worker 0's first thread; their sum is step_ns */
    uint64_t matmul_ns;                  /* in products with quantised matrices, in all of those parts */
    uint32_t hits, misses;
};

struct step_limits {
    uint32_t max_rows, logit_rows, kv_pages, page_tokens, context, vocab;
};

/* Allocates the encoded message; the caller frees *ret_bytes. */
int message_encode_step(const struct step *step, void **ret_bytes, size_t *ret_size, struct error *ret_error);

/* Checks and decodes; *ret_step points into `bytes` and into one allocation *ret_memory that the caller frees. Refuses (-EBADMSG, naming
 * the field) wrong magic, version, type, lengths, page ids or tokens out of range, rows or logits over the limits. `bytes` must be
 * 8-aligned. */
int message_decode_step(const void *bytes, size_t size, const struct step_limits *limits, struct step *ret_step,
                        void **ret_memory, struct error *ret_error);

void message_encode_step_done(const struct step_done *done, unsigned char ret_bytes[], size_t size);
#define MESSAGE_STEP_DONE_BYTES 160u
int message_decode_step_done(const void *bytes, size_t size, struct step_done *ret_done, struct error *ret_error);
