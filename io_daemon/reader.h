/* Whole pieces out of partial reads. A piece is 1-2 MiB that the caller wants in memory; the reader keeps few enough
 * bytes of each drive in flight that a demand never waits long, lets urgent pieces pass those of guesses, resumes short
 * reads at an aligned place, repeats what was interrupted, and hands a piece back once: whole, or with the reason why
 * not. Thread: the daemon's main. */
#pragma once

#include "io_daemon/method.h"
#include "shm/histogram.h"

#include <stdbool.h>

#define READER_IN_FLIGHT (UINT64_C(32) << 20) /* bytes of a drive */
#define READER_BACKGROUND 4u            /* one in so many of them is for pieces in the background, unless all is calm */
#define READER_DEPTH 64u                /* reads in flight, where they are small */
#define READER_DRIVES 16u               /* drives that have bounds of their own */
#define PIECE_BYTES (UINT64_C(2) << 20) /* the largest piece */

struct piece {
    struct io_read read; /* what is still to come; first member, so that a finished read is its piece */
    void *owner;
    uint32_t index;  /* the owner's */
    uint8_t drive;   /* below READER_DRIVES */
    uint8_t copy;    /* the owner's */
    bool background; /* nobody waits for it: it is passed by all others, and READER_BACKGROUND holds for it */
    int status;      /* when handed back: 0, or a negative errno; -ENODATA: the file ends before the piece */
    uint64_t started_ns;
    uint64_t ahead;  /* bytes of its drive in flight when it was sent, its own among them */
    bool retried;    /* one EIO was forgiven */
    uint32_t stalls; /* reads in a row without progress */
    struct piece *next;
};

/* What a reader counts; relaxed, for anybody to look at. `us`: of each read; NULL: not counted. */
struct reader_counters {
    _Atomic uint64_t *reads, *bytes, *ns;
    struct histogram *us;
};

struct piece_queue {
    struct piece *first, *last;
    uint64_t bytes;
};

struct drive {
    struct piece_queue urgent, background; /* waiting for room in flight */
    uint64_t flying_bytes;
    uint32_t flying;
    uint64_t bytes, reads, read_ns; /* so far */
    double rate;                    /* bytes a nanosecond, a moving average; 0: nothing was read yet */
};

struct reader {
    const struct io_method *method;
    void *io;
    struct reader_counters counters;
    /* In flight, at most; 0: READER_IN_FLIGHT and READER_DEPTH. A piece larger than that goes alone. */
    uint64_t most_bytes; /* of a drive */
    uint32_t most_reads; /* of all */
    struct drive drives[READER_DRIVES];
    uint32_t flying; /* reads, of all drives */
    bool
        calm; /* W: the owner: nobody waits for a piece, or did lately, so that the background may have all that may fly */
    /* W: the owner. Bit c: copy c is read no more, and what is still in flight from there comes back whole or as failed,
     * never to be resumed there. */
    uint32_t dropped_copies;
};

/* Asks for a piece: the owner has set read.fd, buffer, bytes, offset, owner, index, drive and background. Its memory
 * must live until it is handed back. */
void reader_add(struct reader *reader, struct piece *piece);

/* True while another piece for that drive would keep it busier. */
bool reader_has_room(const struct reader *reader, uint8_t drive, bool background);

/* In how many nanoseconds the last of `bytes` bytes more would be there: all that is before them, by the rate of that drive. */
double reader_expected_ns(const struct reader *reader, uint8_t drive, bool background, uint64_t bytes);

/* The owner's pieces that wait in the background become urgent, behind those that are. */
void reader_promote(struct reader *reader, uint8_t drive, const void *owner);

/* Pieces that wait name that registered buffer no more. */
void reader_forget_buffer(struct reader *reader, uint32_t buffer_place);

/* Sends what fits, sleeps (see io_method.wait), and hands back finished pieces as a list. */
int reader_wait(struct reader *reader, int timeout_ms, struct piece **ret_finished, uint32_t *ret_events,
                struct error *ret_error);

/* Takes back all pieces that are not in flight yet, as a list. */
struct piece *reader_withdraw(struct reader *reader);

uint64_t monotonic_ns(void);
