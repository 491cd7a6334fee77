/* Who wants which expert. The rings bring requests; here each expert has one demand, whoever and however many ask for
 * it, and the experts that must be read stand in one queue in the order in which they were asked for. Thread: the
 * daemon's main.
 *
 * A demand is live while the epoch is the one in which it was made and the worker has not moved past the tick at which
 * it asked. A delivered expert is *owed* while a live demand is younger than the slot's last use: evicting it then
 * would let two demands chase each other for ever. */
#pragma once

#include "shm/control.h"

struct demand {
    uint32_t epoch;
    uint32_t workers;           /* bit w: worker w asked */
    uint64_t tick[MAX_WORKERS]; /* when */
    uint64_t asked_ns;          /* first of those */
};

struct requests {
    struct control *control;
    uint32_t workers, experts;
    struct demand *demands; /* [experts] */
    uint32_t *next;         /* [experts]; QUEUE_OUT, or the next in the queue */
    uint32_t first, last;   /* QUEUE_END: empty */
};

#define QUEUE_END UINT32_MAX
#define QUEUE_OUT (UINT32_MAX - 1)

int requests_open(struct control *control, uint32_t workers, uint32_t experts, struct requests *ret_requests,
                  struct error *ret_error);
void requests_close(struct requests *requests);

/* Notes what worker `worker` asked for. 0; -ESTALE when the request is void already; -EBADMSG when it names no
 * expert. */
int requests_note(struct requests *requests, uint32_t worker, const struct expert_request *request);

/* The workers whose demand for the expert is live, as bits; *ret_tick is the oldest of their ticks (may be NULL). */
uint32_t requests_live(const struct requests *requests, uint32_t expert, uint64_t *ret_tick);

/* True while some worker has not used the expert that it asked for; `used` is the slot's. */
bool requests_owed(const struct requests *requests, uint32_t expert, uint64_t used);

/* The queue of experts to read. Appending one that is in it already does nothing. requests_head gives the first with a
 * live demand, dropping void ones before it, or QUEUE_END. */
void requests_append(struct requests *requests, uint32_t expert);
uint32_t requests_head(struct requests *requests);
void requests_remove_head(struct requests *requests);
