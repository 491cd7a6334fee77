/* The threads that hash what `calypte verify` reads. An extent is one thread's, and its chunks come in order, so a tensor
 * of any size is hashed as it comes. */
#pragma once

#include "cmd/verify/extents.h"
#include "io_daemon/reader.h"

/* An extent that is no larger than EXTENT_BYTES fits into one, with what alignment adds. */
#define CHUNK_BYTES (EXTENT_BYTES + PIECE_BYTES)
#define CHUNK_PIECES (CHUNK_BYTES / PIECE_BYTES + 1)

/* A stretch of an extent in memory, read in pieces. */
struct chunk {
    uint32_t extent;
    bool first, last; /* of its extent */
    uint64_t offset;  /* in the file */
    char *memory;     /* [CHUNK_BYTES] */
    struct piece pieces[CHUNK_PIECES];
    uint64_t piece_end[CHUNK_PIECES]; /* where each ends in the file */
    uint32_t piece_count, left;       /* left: pieces still to come */
    struct chunk *next;               /* in the list that holds it */
};

struct hashers;

/* `count` threads. `doorbell_fd` is written when chunks wait to be collected. Signals must be blocked already. */
int hashers_open(const struct extents *extents, uint32_t count, int doorbell_fd, struct hashers **ret_hashers,
                 struct error *ret_error);

/* Hands over a chunk whose pieces are all back, failed or not; those of an extent in order. */
void hashers_add(struct hashers *hashers, struct chunk *chunk);

/* All chunks that have been hashed so far, as a list; NULL: none. After the last one of an extent hashers_code tells of
 * its parts. */
struct chunk *hashers_collect(struct hashers *hashers);

/* 0: the part is good; else see extents_describe. */
int hashers_code(const struct hashers *hashers, uint32_t part);

/* Ends the threads after the chunks they work on; others are forgotten. */
void hashers_close(struct hashers *hashers);
