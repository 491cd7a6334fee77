#include "io_daemon/requests.h"

#include "io_daemon/reader.h"

#include <stdlib.h>
#include <string.h>

int requests_open(struct control *control, uint32_t workers, uint32_t experts, struct requests *ret_requests,
                  struct error *ret_error)
{
    *ret_requests = (struct requests){.control = control, .workers = workers, .experts = experts};
    size_t bytes = experts * sizeof(*ret_requests->wishes);
    ret_requests->wishes = aligned_alloc(_Alignof(struct wish), bytes);
    if (!ret_requests->wishes)
        return error_set(ret_error, ENOMEM, "requests of %u experts: out of memory", experts);
    memset(ret_requests->wishes, 0, bytes);
    for (uint32_t e = 0; e < experts; e++)
        ret_requests->wishes[e].queue = PRIORITIES;
    for (uint32_t p = 0; p < PRIORITIES; p++)
        TAILQ_INIT(&ret_requests->queues[p]);
    /* What a predecessor left is void: the supervisor has raised the epoch, and the workers ask again. */
    for (uint32_t w = 0; w < workers; w++)
        ring_drain(&control->rings[w]);
    return 0;
}

void requests_close(struct requests *requests)
{
    free(requests->wishes);
    requests->wishes = NULL;
}

static uint32_t current_epoch(const struct requests *requests)
{
    return atomic_load(&requests->control->epoch);
}

static uint64_t current_tick(const struct requests *requests, uint32_t worker)
{
    return atomic_load_explicit(&requests->control->workers[worker].tick, memory_order_acquire);
}

static int note_demand(struct requests *requests, uint32_t worker, const struct expert_request *request)
{
    struct wish *wish = &requests->wishes[request->expert];
    if (current_tick(requests, worker) > request->tick || wish->gone_used >= request->tick)
        return -ESTALE;
    if (!requests_live(requests, request->expert, NULL)) {
        wish->epoch = request->epoch;
        wish->workers = 0;
        wish->asked_ns = monotonic_ns();
    }
    wish->workers |= 1u << worker;
    wish->tick[worker] = request->tick;
    return 0;
}

static int note_lookahead(struct requests *requests, uint32_t worker, const struct expert_request *request)
{
    if (current_tick(requests, worker) >= request->tick)
        return -ESTALE;
    struct wish *wish = &requests->wishes[request->expert];
    wish->guess_epoch = request->epoch;
    wish->guess_worker = worker;
    wish->guess_tick = request->tick;
    return 0;
}

int requests_note(struct requests *requests, uint32_t worker, const struct expert_request *request)
{
    if (request->expert >= requests->experts)
        return -EBADMSG;
    if (request->epoch != current_epoch(requests))
        return -ESTALE;
    switch (request->kind) {
    case KIND_DEMAND: return note_demand(requests, worker, request);
    case KIND_LOOKAHEAD: return note_lookahead(requests, worker, request);
    default: return -EBADMSG;
    }
}

uint32_t requests_live(const struct requests *requests, uint32_t expert, uint64_t *ret_tick)
{
    const struct wish *wish = &requests->wishes[expert];
    uint32_t live = 0;
    uint64_t oldest = UINT64_MAX;
    if (wish->workers && wish->epoch == current_epoch(requests)) {
        for (uint32_t w = 0; w < requests->workers; w++) {
            if (!(wish->workers & 1u << w) || current_tick(requests, w) > wish->tick[w])
                continue;
            live |= 1u << w;
            oldest = wish->tick[w] < oldest ? wish->tick[w] : oldest;
        }
    }
    if (ret_tick)
        *ret_tick = live ? oldest : 0;
    return live;
}

bool requests_owed(const struct requests *requests, uint32_t expert, uint64_t used)
{
    const struct wish *wish = &requests->wishes[expert];
    uint32_t live = requests_live(requests, expert, NULL);
    for (uint32_t w = 0; live && w < requests->workers; w++) {
        if ((live & 1u << w) && wish->tick[w] > used)
            return true;
    }
    return false;
}

void requests_gone(struct requests *requests, uint32_t expert, uint64_t used)
{
    requests->wishes[expert].gone_used = used;
}

void requests_remove(struct requests *requests, uint32_t expert)
{
    struct wish *wish = &requests->wishes[expert];
    if (wish->queue == PRIORITIES)
        return;
    TAILQ_REMOVE(&requests->queues[wish->queue], wish, link);
    requests->queued[wish->queue]--;
    wish->queue = PRIORITIES;
}

void requests_drop(struct requests *requests, uint32_t expert)
{
    if (requests->wishes[expert].queue == PRIORITY_LOOKAHEAD)
        atomic_fetch_add_explicit(&requests->control->iod.guesses_dropped, 1, memory_order_relaxed);
    requests_remove(requests, expert);
}

void requests_append(struct requests *requests, uint32_t expert, enum priority priority)
{
    struct wish *wish = &requests->wishes[expert];
    if (wish->queue <= priority)
        return;
    requests_remove(requests, expert);
    wish->queue = priority;
    TAILQ_INSERT_TAIL(&requests->queues[priority], wish, link);
    requests->queued[priority]++;
}

static bool still_wanted(const struct requests *requests, uint32_t expert)
{
    const struct wish *wish = &requests->wishes[expert];
    switch (wish->queue) {
    case PRIORITY_DEMAND: return requests_live(requests, expert, NULL) != 0;
    case PRIORITY_LOOKAHEAD:
        return wish->guess_epoch == current_epoch(requests) &&
               current_tick(requests, wish->guess_worker) < wish->guess_tick;
    case PRIORITY_WARMUP: return true;
    case PRIORITIES:
    default: return false;
    }
}

uint32_t requests_head(struct requests *requests, enum priority priority)
{
    struct wish *wish;
    while ((wish = TAILQ_FIRST(&requests->queues[priority]))) {
        uint32_t expert = (uint32_t)(wish - requests->wishes);
        if (still_wanted(requests, expert))
            return expert;
        requests_drop(requests, expert);
    }
    return QUEUE_END;
}

void requests_warm(struct requests *requests, uint32_t expert)
{
    if (expert < requests->experts)
        requests_append(requests, expert, PRIORITY_WARMUP);
}
