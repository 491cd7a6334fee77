/* What the files of the front share: the instance as the front sees it, and the requests in it. One thread. */
#pragma once

#include "cmd/front/chat.h"
#include "cmd/front/field.h"
#include "cmd/front/generation.h"
#include "cmd/front/scheduler.h"
#include "cmd/front/score.h"
#include "cmd/front/tokenizer.h"
#include "proto/reply_socket.h"

enum request_kind { REQUEST_GENERATE, REQUEST_SUBMIT, REQUEST_SCORE };

/* A request that is answered later than it came. */
struct request {
    TAILQ_ENTRY(request) link;
    enum request_kind kind;
    char id[40];
    struct front *front;
    struct reply_address waiter;
    uint64_t wait_until_ns; /* of a waiting `next` */
    uint64_t touched_ns;    /* when its client last asked for it (SUBMIT) */
    bool in_scheduler;      /* its sequence's end() has not been called yet */
    bool over;              /* answered, or never to be answered: freed when it is out of the scheduler */
    bool failed;
    struct fault fault; /* if failed */
    union {
        struct generation generation;
        struct score score;
    };
};

TAILQ_HEAD(request_list, request);

struct front {
    struct scheduler scheduler;
    struct tokenizer *tokenizer; /* NULL: the model has none */
    uint64_t *allowed;           /* the ids that may be sampled, or NULL */
    const struct chat_template *template;
    struct sampler_scratch scratch;
    char instance[INSTANCE_NAME_MAX];
    struct reply_socket *socket;
    struct request_list requests;
    uint32_t submitted;                 /* SUBMIT requests in the list */
    uint64_t started_ns, last_id, born; /* born: makes ids of two lives of the front differ */
};

/* A request that nobody asks for is dropped after this time; of those that are done at most so many are kept. */
#define SUBMIT_IDLE_SECONDS 120
#define SUBMIT_MAX 64u

/* server.c: sends an answer; takes over `answer`. */
void front_reply(struct front *front, const struct reply_address *to, json_t *answer);
void front_reply_fault(struct front *front, const struct reply_address *to, const struct fault *fault);

/* api.c: one message of a client. */
void api_take(struct front *front, const struct reply_address *from, const char *bytes, size_t size);
/* The tokenizer, or NULL and a fault that names the field. */
const struct tokenizer *api_tokenizer(const struct front *front, const char *field, struct fault *ret_fault);

/* requests.c: the operations that take time. */
void request_generate(struct front *front, const struct reply_address *from, const json_t *message,
                      enum request_kind kind);
void request_score(struct front *front, const struct reply_address *from, const json_t *message);
void request_next(struct front *front, const struct reply_address *from, const json_t *message);
void request_cancel(struct front *front, const struct reply_address *from, const json_t *message);
/* True when this very request waits already. */
bool request_is_waiting(const struct front *front, const struct reply_address *from);
void request_connection_closed(struct front *front, uint32_t connection);
/* Answers what has waited long enough and drops what nobody asks for; returns milliseconds to the next such moment, -1:
 * none. */
int request_expire(struct front *front);
void request_close_all(struct front *front);

/* prompt.c: the tokens of a prompt, from `prompt`, `tokens` or `messages`. 0 and *ret_tokens (for free(), at least
 * one), or a fault. *ret_thinks: the template asked for reasoning, with which the answer begins. */
int prompt_tokens(const struct front *front, const json_t *message, int32_t **ret_tokens, size_t *ret_count,
                  bool *ret_thinks, struct fault *ret_fault);

/* stats.c */
json_t *stats_status(const struct front *front);
json_t *stats_counters(const struct front *front);
json_t *stats_metrics(const struct front *front);
