#include "io_daemon/requests.h"

#include "io_daemon/reader.h"

#include <stdlib.h>

int requests_open(struct control *control, uint32_t workers, uint32_t experts, struct requests *ret_requests,
                  struct error *ret_error)
{
    struct requests requests = {
        .control = control, .workers = workers, .experts = experts, .first = QUEUE_END, .last = QUEUE_END};
    requests.demands = calloc(experts, sizeof(*requests.demands));
    requests.next = calloc(experts, sizeof(*requests.next));
    if (!requests.demands || !requests.next) {
        requests_close(&requests);
        return error_set(ret_error, ENOMEM, "requests of %u experts: out of memory", experts);
    }
    for (uint32_t e = 0; e < experts; e++)
        requests.next[e] = QUEUE_OUT;
    /* What a predecessor left is void: the supervisor has raised the epoch, and the workers ask again. */
    for (uint32_t w = 0; w < workers; w++)
        ring_drain(&control->rings[w]);
    *ret_requests = requests;
    return 0;
}

void requests_close(struct requests *requests)
{
    free(requests->demands);
    free(requests->next);
    *requests = (struct requests){0};
}

static uint32_t current_epoch(const struct requests *requests)
{
    return atomic_load(&requests->control->epoch);
}

static uint64_t current_tick(const struct requests *requests, uint32_t worker)
{
    return atomic_load_explicit(&requests->control->workers[worker].tick, memory_order_acquire);
}

int requests_note(struct requests *requests, uint32_t worker, const struct expert_request *request)
{
    if (request->expert >= requests->experts)
        return -EBADMSG;
    if (request->epoch != current_epoch(requests) || current_tick(requests, worker) > request->tick)
        return -ESTALE;
    struct demand *demand = &requests->demands[request->expert];
    if (!requests_live(requests, request->expert, NULL))
        *demand = (struct demand){.epoch = request->epoch, .asked_ns = monotonic_ns()};
    demand->workers |= 1u << worker;
    demand->tick[worker] = request->tick;
    return 0;
}

uint32_t requests_live(const struct requests *requests, uint32_t expert, uint64_t *ret_tick)
{
    const struct demand *demand = &requests->demands[expert];
    uint32_t live = 0;
    uint64_t oldest = UINT64_MAX;
    if (demand->workers && demand->epoch == current_epoch(requests)) {
        for (uint32_t w = 0; w < requests->workers; w++) {
            if (!(demand->workers & 1u << w) || current_tick(requests, w) > demand->tick[w])
                continue;
            live |= 1u << w;
            oldest = demand->tick[w] < oldest ? demand->tick[w] : oldest;
        }
    }
    if (ret_tick)
        *ret_tick = live ? oldest : 0;
    return live;
}

bool requests_owed(const struct requests *requests, uint32_t expert, uint64_t used)
{
    const struct demand *demand = &requests->demands[expert];
    uint32_t live = requests_live(requests, expert, NULL);
    for (uint32_t w = 0; live && w < requests->workers; w++) {
        if ((live & 1u << w) && demand->tick[w] > used)
            return true;
    }
    return false;
}

void requests_append(struct requests *requests, uint32_t expert)
{
    if (requests->next[expert] != QUEUE_OUT)
        return;
    requests->next[expert] = QUEUE_END;
    if (requests->first == QUEUE_END)
        requests->first = expert;
    else
        requests->next[requests->last] = expert;
    requests->last = expert;
}

void requests_remove_head(struct requests *requests)
{
    uint32_t expert = requests->first;
    requests->first = requests->next[expert];
    requests->next[expert] = QUEUE_OUT;
}

uint32_t requests_head(struct requests *requests)
{
    while (requests->first != QUEUE_END && !requests_live(requests, requests->first, NULL))
        requests_remove_head(requests);
    return requests->first;
}
