/* Whole pieces out of partial reads. A piece is 1-2 MiB that the caller wants in memory; the reader keeps few enough
 * bytes in flight that a demand never waits long, resumes short reads at an aligned place, repeats what was
 * interrupted, and hands a piece back once: whole, or with the reason why not. Thread: the daemon's main. */
#pragma once

#include "io_daemon/method.h"

#include <stdbool.h>

#define READER_IN_FLIGHT (UINT64_C(32) << 20) /* bytes */
#define READER_DEPTH 64u                      /* reads in flight, where they are small */
#define PIECE_BYTES (UINT64_C(2) << 20)       /* the largest piece */

struct piece {
    struct io_read read; /* what is still to come; first member, so that a finished read is its piece */
    void *owner;
    uint32_t index; /* the owner's */
    int status;     /* when handed back: 0, or a negative errno; -ENODATA: the file ends before the piece */
    uint64_t started_ns;
    bool retried;    /* one EIO was forgiven */
    uint32_t stalls; /* reads in a row without progress */
    struct piece *next;
};

/* What a reader counts; relaxed, for anybody to look at. */
struct reader_counters {
    _Atomic uint64_t *reads, *bytes, *ns;
};

struct reader {
    const struct io_method *method;
    void *io;
    struct reader_counters counters;
    struct piece *first, *last; /* waiting for room in flight */
    uint64_t waiting_bytes, flying_bytes;
    uint32_t flying;
};

/* Asks for a piece: the owner has set read.fd, buffer, bytes, offset, owner and index. Its memory must live until it is
 * handed back. */
void reader_add(struct reader *reader, struct piece *piece);

/* Sends what fits, sleeps (see io_method.wait), and hands back finished pieces as a list. */
int reader_wait(struct reader *reader, int timeout_ms, struct piece **ret_finished, uint32_t *ret_events,
                struct error *ret_error);

/* Takes back all pieces that are not in flight yet, as a list. */
struct piece *reader_withdraw(struct reader *reader);

uint64_t monotonic_ns(void);
