/* Who wants which expert. The rings bring requests; here each expert has one demand, whoever and however many ask for
 * it, and the experts that must be read stand in queues by priority, in the order in which they were asked for. An
 * expert stands in one queue at most; being asked for with a higher priority moves it. Thread: the daemon's main.
 *
 * A demand is live while the epoch is the one in which it was made and the worker has not moved past the tick at which
 * it asked. A delivered expert is *owed* while a live demand is younger than the slot's last use: evicting it then
 * would let two demands chase each other for ever. A lookahead is live until its layer begins: what the layer wants it
 * demands by then. */
#pragma once

#include "shm/control.h"

#include <stddef.h>
#include <sys/queue.h>

/* Why an expert is read, the most urgent first. */
enum priority {
    PRIORITY_DEMAND,    /* a worker waits for it */
    PRIORITY_LOOKAHEAD, /* a worker guesses that its next layer will want it */
    PRIORITY_WARMUP,    /* it was used much in earlier sessions */
    PRIORITIES,         /* in no queue */
};

/* Of each expert; what one worker's demand needs stands in one cache line. */
struct wish {
    _Alignas(CACHE_LINE) TAILQ_ENTRY(wish) link;
    enum priority queue;
    /* the demand */
    uint32_t epoch;
    uint32_t workers; /* bit w: worker w asked */
    /* the lookahead: of which epoch and worker, and the tick of the layer that it was asked for */
    uint32_t guess_epoch;
    uint64_t guess_tick;
    uint64_t gone_used;         /* its slot's `used` when it was evicted last */
    uint64_t asked_ns;          /* the first of the live demands */
    uint64_t tick[MAX_WORKERS]; /* of each worker's demand: when */
    uint32_t guess_worker;
};
_Static_assert(offsetof(struct wish, tick[1]) <= CACHE_LINE, "worker 0's demand is in the first cache line");

TAILQ_HEAD(wish_queue, wish);

struct requests {
    struct control *control;
    uint32_t workers, experts;
    struct wish *wishes; /* [experts] */
    struct wish_queue queues[PRIORITIES];
    uint32_t queued[PRIORITIES];
};

#define QUEUE_END UINT32_MAX

int requests_open(struct control *control, uint32_t workers, uint32_t experts, struct requests *ret_requests,
                  struct error *ret_error);
void requests_close(struct requests *requests);

/* Notes what worker `worker` asked for. 0; -ESTALE when the request is void already; -EBADMSG when it names no expert
 * or no kind. */
int requests_note(struct requests *requests, uint32_t worker, const struct expert_request *request);

/* The workers whose demand for the expert is live, as bits; *ret_tick is the oldest of their ticks (may be NULL). */
uint32_t requests_live(const struct requests *requests, uint32_t expert, uint64_t *ret_tick);

/* True while some worker has not used the expert that it asked for; `used` is the slot's. */
bool requests_owed(const struct requests *requests, uint32_t expert, uint64_t used);

/* The expert has been evicted from a slot with that `used`. A demand of that tick or before that is still on its way has
 * been served: a guess brought the expert while the worker asked for it. Read once more it would be owed to nobody, and
 * keep its slot until the worker's next tick. */
void requests_gone(struct requests *requests, uint32_t expert, uint64_t used);

/* Queues an expert to be read. One that stands in that queue, or in a more urgent one, already stays where it is. */
void requests_append(struct requests *requests, uint32_t expert, enum priority priority);

/* The first of a queue whose demand or lookahead is live (a warm-up always is), dropping void ones before it, or
 * QUEUE_END. */
uint32_t requests_head(struct requests *requests, enum priority priority);

/* Takes an expert out of whatever queue it stands in. */
void requests_remove(struct requests *requests, uint32_t expert);

/* The same for a lookahead that finds no place: counted as dropped. */
void requests_drop(struct requests *requests, uint32_t expert);

/* Queues an expert to be read when nothing else is to do; in the order of the calls. */
void requests_warm(struct requests *requests, uint32_t expert);
