/* The verify thread: checksums beside the loop, so that a read never waits for a hash.
 *
 * Jobs go in, verdicts come out; both lists are the process's own. The memory of a job is written by nobody while the
 * job is here. */
#pragma once

#include "proto/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct verify_job {
    const void *data;
    size_t bytes;
    struct XXH3_state_s
        *state; /* NULL: `data` is all that is hashed; else a stretch, after those handed over before with this state */
    bool first, last;  /* stretch; all but the last one match */
    uint64_t expected; /* XXH3-64 */
    void *owner;
    uint32_t index; /* the owner's */
    bool matches;   /* the verdict */
    struct verify_job *next;
};

struct verifier;

/* `doorbell_fd` is written when verdicts wait to be collected; `counter` grows by the bytes verified. Thread: main. */
int verifier_open(int doorbell_fd, _Atomic uint64_t *counter, struct verifier **ret_verifier, struct error *ret_error);

/* Hands over a job; its memory and its data must live until it is collected. */
void verifier_add(struct verifier *verifier, struct verify_job *job);

/* All verdicts so far, as a list; NULL: none. */
struct verify_job *verifier_collect(struct verifier *verifier);

/* Ends the thread after the job it works on; jobs not begun are forgotten. */
void verifier_close(struct verifier *verifier);
