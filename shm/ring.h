/* A single-producer, single-consumer ring in shared memory: how a worker asks iod for experts.
 *
 * head and tail run freely; the producer writes the entry, then releases tail; the consumer acquires tail, reads the
 * entry once, then releases head. A consumer that finds tail - head > RING_ENTRIES was lied to and says -EBADMSG. */
#pragma once

#include "shm/segment.h"

#include <stdatomic.h>
#include <stdint.h>

#define RING_ENTRIES 2048u /* a power of two, more than any layer has experts */

/* Why a worker asks. A demand is waited for; a lookahead is a guess for the next layer, dropped once that layer has passed. */
enum demand_kind { KIND_DEMAND = 0, KIND_LOOKAHEAD = 1 };

struct expert_request {
    uint32_t expert; /* moe_index * experts + expert */
    uint32_t epoch;
    /* The worker's tick at the layer that needs the expert: of a demand the tick when it asked, and until the slot's
     * `used` reaches it the expert is owed to the worker; of a lookahead the next tick. */
    uint64_t tick;
    uint32_t kind; /* enum demand_kind; anything else is refused */
    uint32_t reserved;
};

struct request_ring {
    _Alignas(CACHE_LINE) _Atomic uint32_t tail; /* W: the worker */
    _Alignas(CACHE_LINE) _Atomic uint32_t head; /* W: iod */
    _Alignas(CACHE_LINE) struct expert_request entries[RING_ENTRIES];
};

/* 0, or -EAGAIN when full. Thread: the one producer. */
int ring_push(struct request_ring *ring, const struct expert_request *request);

/* 1 and an entry, 0 when empty, -EBADMSG. Thread: the one consumer. */
int ring_pop(struct request_ring *ring, struct expert_request *ret_request);

/* Forgets what is queued (consumer, when it starts). */
void ring_drain(struct request_ring *ring);
