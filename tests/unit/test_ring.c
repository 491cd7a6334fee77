/* The request ring: order, both ends' limits, a producer that lies, and two threads. */
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include "shm/ring.h"

static struct request_ring *new_ring(uint32_t start)
{
    struct request_ring *ring = aligned_alloc(CACHE_LINE, sizeof(*ring));
    assert_non_null(ring);
    atomic_init(&ring->head, start);
    atomic_init(&ring->tail, start);
    return ring;
}

static void test_order_and_full(void **state)
{
    (void)state;
    struct request_ring *ring = new_ring(UINT32_MAX - 5); /* the counters wrap on the way */
    struct expert_request request;
    assert_int_equal(ring_pop(ring, &request), 0);
    for (uint32_t i = 0; i < RING_ENTRIES; i++)
        assert_int_equal(ring_push(ring, &(struct expert_request){.expert = i, .epoch = 1, .tick = i}), 0);
    assert_int_equal(ring_push(ring, &(struct expert_request){0}), -EAGAIN);
    for (uint32_t i = 0; i < RING_ENTRIES; i++) {
        assert_int_equal(ring_pop(ring, &request), 1);
        assert_int_equal(request.expert, i);
        assert_true(request.tick == i);
    }
    assert_int_equal(ring_pop(ring, &request), 0);
    free(ring);
}

static void test_drain_and_lies(void **state)
{
    (void)state;
    struct request_ring *ring = new_ring(0);
    struct expert_request request;
    ring_push(ring, &(struct expert_request){.expert = 1});
    ring_push(ring, &(struct expert_request){.expert = 2});
    ring_drain(ring);
    assert_int_equal(ring_pop(ring, &request), 0);
    atomic_store(&ring->tail, RING_ENTRIES + 7); /* more than the ring holds */
    assert_int_equal(ring_pop(ring, &request), -EBADMSG);
    ring_drain(ring);
    assert_int_equal(ring_pop(ring, &request), 0);
    atomic_store(&ring->head, 99); /* a lying consumer: the producer sees a full ring and writes nothing */
    atomic_store(&ring->tail, 3);
    assert_int_equal(ring_push(ring, &request), -EAGAIN);
    free(ring);
}

#define PASSED 200000u

static void *produce(void *argument)
{
    for (uint32_t i = 0; i < PASSED; i++) {
        while (ring_push(argument, &(struct expert_request){.expert = i, .epoch = ~i, .tick = (uint64_t)i << 32}) < 0)
            sched_yield();
    }
    return NULL;
}

static void test_two_threads(void **state)
{
    (void)state;
    struct request_ring *ring = new_ring(0);
    pthread_t producer;
    assert_int_equal(pthread_create(&producer, NULL, produce, ring), 0);
    for (uint32_t i = 0; i < PASSED;) {
        struct expert_request request;
        int status = ring_pop(ring, &request);
        assert_true(status >= 0);
        if (status == 0) {
            sched_yield();
            continue;
        }
        assert_int_equal(request.expert, i);
        assert_int_equal(request.epoch, ~i);
        assert_true(request.tick == (uint64_t)i << 32);
        i++;
    }
    pthread_join(producer, NULL);
    free(ring);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_order_and_full),
        cmocka_unit_test(test_drain_and_lies),
        cmocka_unit_test(test_two_threads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
