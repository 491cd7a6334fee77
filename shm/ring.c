#include "shm/ring.h"

#include <errno.h>

int ring_push(struct request_ring *ring, const struct expert_request *request)
{
    uint32_t tail = atomic_load_explicit(&ring->tail, memory_order_relaxed);
    uint32_t head = atomic_load_explicit(&ring->head, memory_order_acquire);
    if (tail - head >= RING_ENTRIES)
        return -EAGAIN;
    ring->entries[tail % RING_ENTRIES] = *request;
    /* Sequentially consistent, as in ring_pop: the flag `asleep` is read after this store, and written before that
     * load. */
    atomic_store(&ring->tail, tail + 1);
    return 0;
}

int ring_pop(struct request_ring *ring, struct expert_request *ret_request)
{
    uint32_t head = atomic_load_explicit(&ring->head, memory_order_relaxed);
    uint32_t tail = atomic_load(&ring->tail);
    if (tail == head)
        return 0;
    if (tail - head > RING_ENTRIES)
        return -EBADMSG;
    *ret_request = ring->entries[head % RING_ENTRIES];
    atomic_store_explicit(&ring->head, head + 1, memory_order_release);
    return 1;
}

void ring_drain(struct request_ring *ring)
{
    uint32_t tail = atomic_load_explicit(&ring->tail, memory_order_acquire);
    atomic_store_explicit(&ring->head, tail, memory_order_release);
}
