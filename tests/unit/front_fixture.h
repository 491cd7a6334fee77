/* A real calypte-front in an instance of its own. Its workers are threads of the test: they decode real STEPs, keep the
 * tokens of every KV page, and write logits that depend on all tokens of a sequence up to the row, read through the
 * STEP's page ids. So a wrong position, page, chunk or row of logits changes the answer. */
#pragma once

#include "cmd/front/tokenizer.h"
#include "proto/channel.h"
#include "shm/control.h"
#include "shm/exchange.h"

#include <jansson.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/types.h>

#define FIXTURE_WORKERS 2u

enum worker_mode {
    WORKER_GOOD,
    WORKER_HOLDS,  /* does not answer until the mode changes */
    WORKER_DROPS,  /* never answers this STEP */
    WORKER_BREAKS, /* worker 1 closes every connection before its greeting */
    WORKER_LOSES,  /* both lose every message, as when a connection breaks under it */
    WORKER_NAN,
    WORKER_EXPERT_FAILS, /* -EIO, layer 3, expert 17, slice 2, checksum */
    WORKER_LIES,         /* says another number of rows of logits */
    WORKER_BABBLES,      /* sends what is no message, and answers with wrong ids and epochs before the right one */
};

struct fixture {
    char folder[64], rundir[96], instance[INSTANCE_NAME_MAX], socket[128], container[512];
    struct facts facts;
    struct control *control;
    struct segment exchange;
    struct exchange_layout layout;
    struct tokenizer *tokenizer; /* the bundled model's; NULL in an instance without one */
    pid_t front;
    int wake_fd;
    struct channel *channels[FIXTURE_WORKERS];
    pthread_t threads[FIXTURE_WORKERS];
    _Atomic int mode; /* enum worker_mode */
    _Atomic int ending;
    _Atomic uint32_t steps, rows, widest; /* that worker 0 was given; widest: most sequences in one */
    _Atomic uint32_t mismatches; /* what the two workers saw differed, or a STEP read a KV row that nobody wrote */
    int32_t *kv;                 /* [kv_pages][page_tokens], worker 0's */
    _Atomic uint64_t seen[FIXTURE_WORKERS]; /* a hash of each worker's last STEP */
};

/* Starts an instance whose container is tests/model, or an empty folder. */
struct fixture *fixture_start(bool with_tokenizer);
/* Ends it; checks that the front ended well, that the workers saw nothing wrong, and that nothing is left. */
void fixture_stop(struct fixture *fixture);

/* Sends one request and returns the answer. */
json_t *fixture_ask(struct fixture *fixture, const char *request);
/* The same on a connection that the caller keeps. */
struct channel *fixture_dial(struct fixture *fixture);
void fixture_send(struct channel *channel, const char *request);
json_t *fixture_receive(struct channel *channel);

/* The answer that the workers give to a prompt: its tokens (for free()), up to the stop token, max_tokens or the
 * context. */
int32_t *fixture_expected(const struct fixture *fixture, const int32_t *prompt, size_t count, size_t max_tokens,
                          size_t *ret_count);
/* The token that the workers find likeliest after `count` tokens; the draft after one more, `next`. */
int32_t fixture_follow(const int32_t *tokens, size_t count);
int32_t fixture_draft(const int32_t *tokens, size_t count, int32_t next);
#define FIXTURE_PEAK 6.0f /* its logit; all others are 0 */

/* Checks {"ok": true} and that `tokens` of the answer are these. */
void fixture_check_tokens(const json_t *answer, const int32_t *tokens, size_t count);
/* Checks an error's code and field (NULL: none) and that its message holds `part`. */
void fixture_check_error(json_t *answer, const char *code, const char *field, const char *part);

/* Waits until the number that `status` has under `name` is `value`. */
void fixture_wait_status(struct fixture *fixture, const char *name, int64_t value);
/* A process of the instance died; then (serving) everything is ready again. */
void fixture_raise_epoch(struct fixture *fixture);
void fixture_serve(struct fixture *fixture);
