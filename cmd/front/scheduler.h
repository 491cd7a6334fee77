/* The scheduler: which sequences run, and the STEPs that carry them forward.
 *
 * A sequence waits in a FIFO queue until a slot and its KV pages are free; then every STEP takes some rows of each
 * running sequence. There is one STEP in flight at most. What a sequence wants of a STEP and does with its logits is
 * its method's: an answer (generation.h) or a score (score.h). One thread. */
#pragma once

#include "cmd/front/kv_pages.h"
#include "cmd/front/session.h"
#include "proto/channel.h"
#include "proto/message.h"
#include "shm/control.h"
#include "shm/exchange.h"

#include <stdbool.h>
#include <sys/queue.h>

struct scheduler;
struct sequence;

/* Rows that a sequence wants computed: tokens[0 .. rows - 1] at positions first ... */
struct step_plan {
    uint32_t first, rows;
    enum step_logits logits;
    bool draft;
    const int32_t *tokens;
    uint32_t known; /* tokens known from tokens[0] on, rows or more: the STEP tells a row its next token */
};

/* Why a sequence ended, in the words of the request socket. NULL code: it came to its own end; "cancelled":
 * scheduler_cancel. */
struct sequence_end {
    const char *code; /* "model_error", "restarted", "cancelled" */
    const char *message;
};

struct sequence_method {
    /* Its next rows, at most max_rows of them and at most max_logit_rows with logits (both at least 1). */
    void (*plan)(struct sequence *sequence, uint32_t max_rows, uint32_t max_logit_rows, struct step_plan *ret_plan);
    /* The planned rows are computed; their `logit_rows` rows of logits begin at `logit_row` (scheduler_logits). 0: go
     * on; 1: at its end; negative: a model_error with its line. */
    int (*advance)(struct sequence *sequence, struct scheduler *scheduler, uint32_t logit_row, uint32_t logit_rows,
                   struct error *ret_error);
    /* Called once, when it has left the scheduler; may free it. */
    void (*end)(struct sequence *sequence, const struct sequence_end *end);
};

enum sequence_state { SEQUENCE_IDLE, SEQUENCE_WAITING, SEQUENCE_RUNNING };

struct sequence {
    /* the owner's, before scheduler_add */
    const struct sequence_method *method;
    uint32_t room;                  /* tokens that it may grow to: pages are reserved for all of them */
    char session[SESSION_NAME_MAX]; /* "": none */
    const int32_t *tokens;          /* [length] from position 0 on; kept up to date by the owner */
    uint32_t length;
    uint32_t computed; /* positions whose keys stand in the pages; grows in `advance` */
    /* the scheduler's */
    TAILQ_ENTRY(sequence) link;
    enum sequence_state state;
    bool stepped;    /* some STEP has carried it */
    bool cancelled;  /* ended while a STEP that carries it is in flight: leaves when that is done */
    uint32_t *pages; /* [page_count] */
    uint32_t page_count;
    uint32_t cached;       /* positions that a session brought */
    struct step_plan plan; /* in the STEP in flight; rows 0: not in it */
    /* what its steps said; shared steps count for each of their sequences */
    uint64_t hits, misses, disk_bytes_before, own_ns_before;
    uint64_t ahead_before[AHEAD_COUNTS];
    uint64_t steps, step_ns, part_ns[STEP_PARTS], matmul_ns;
    uint64_t started_ns; /* CLOCK_MONOTONIC when it got its slot */
};

TAILQ_HEAD(sequence_list, sequence);

struct scheduler {
    struct facts facts;
    struct control *control;
    struct segment exchange;
    struct exchange_layout layout;
    struct channel *workers[MAX_WORKERS];
    struct kv_pages pages;
    struct sessions sessions;
    struct sequence_list waiting, running;
    uint32_t waiting_count, running_count;
    uint32_t epoch;   /* the last one seen */
    uint64_t step_id; /* of the last STEP */
    bool in_flight;
    uint64_t sent_ns;          /* CLOCK_MONOTONIC when it began to be given to the last worker */
    uint64_t repeat_ns;        /* CLOCK_MONOTONIC when it is sent again */
    uint32_t in_flight_logits; /* rows of logits that it asked for */
    void *message;             /* its bytes */
    size_t message_bytes;
    uint32_t unsent; /* bit w: worker w has not got the message */
};

/* Attaches the segments of `instance` and dials `<rundir>/worker.<i>.ipc`. */
int scheduler_open(struct scheduler *scheduler, const char *instance, const char *rundir, struct error *ret_error);
/* Ends every sequence with `restarted` and lets everything go. */
void scheduler_close(struct scheduler *scheduler);

/* Puts a sequence in the queue; scheduler_continue starts it. -EBUSY: the queue is full; -E2BIG: more KV pages than
 * there are. */
int scheduler_add(struct scheduler *scheduler, struct sequence *sequence, struct error *ret_error);

/* Takes a sequence out. Its method's end() is called: at once, or when the STEP in flight that carries it is done. */
void scheduler_cancel(struct scheduler *scheduler, struct sequence *sequence);

/* What the loop tells it: the channel of worker `w` polls readable; epoch or serving changed. */
void scheduler_receive(struct scheduler *scheduler, uint32_t w);
void scheduler_wake(struct scheduler *scheduler);

/* Sends a STEP again that has been in flight for a second: a message can be lost where a connection ends, and workers run a
 * STEP once however often it comes. A worker that has not taken it yet is connected to again where that is needed. Returns
 * after how many ms to call it again; -1: nothing is in flight. */
int scheduler_repeat(struct scheduler *scheduler);

/* Starts what can start: after scheduler_add and scheduler_cancel. */
void scheduler_continue(struct scheduler *scheduler);

bool scheduler_serving(const struct scheduler *scheduler);

/* One row of logits of the STEP that is being advanced, [vocab], where the workers wrote it: in shared memory, so nothing that is read may
 * be believed to be the same when it is read again. */
const float *scheduler_logits(struct scheduler *scheduler, uint32_t row, bool draft);
