/* Many threads pin, load and evict at once with the real pool code. Every byte of a slot is written with plain stores
 * from the expert and the generation, and read with plain loads under a pin: a torn or wrong read shows in the values,
 * a missing order shows in TSan. */
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <cmocka.h>

#include "shm/pool.h"

#define EXPERTS 24u
#define SLOTS 8u
#define LOADERS 2u /* each owns every second slot and every second expert */
#define PINNERS 6u
#define DYING 7u /* a holder that never unpins; another thread gives its pins back */
#define SLICE 4096u
#define CHANGES 200000u /* loads of each loader, at least */
#define PINS 100000u    /* of all pinners, at least */

struct stress {
    struct pool pool;
    _Atomic uint64_t pins, stale, failures, evictions;
    _Atomic uint32_t loaders_left;
    _Atomic uint32_t wrong; /* words that were not what they should be */
};

struct member {
    struct stress *stress;
    uint32_t index;
    uint64_t random;
};

static uint32_t next_random(struct member *member)
{
    member->random ^= member->random << 13;
    member->random ^= member->random >> 7;
    member->random ^= member->random << 17;
    return (uint32_t)(member->random >> 20);
}

static uint64_t payload(struct slot_ref ref, uint32_t expert, size_t word)
{
    return ((uint64_t)expert << 40 | (uint64_t)ref.index << 32 | ref.generation) * UINT64_C(0x9E3779B97F4A7C15) + word;
}

/* The first words of each slice: enough to be torn, few enough to turn over often. */
#define WORDS 16u

static void write_slot(struct pool *pool, struct slot_ref ref, uint32_t expert)
{
    for (uint32_t s = 0; s < EXPERT_SLICES; s++) {
        uint64_t *words = pool_slice(pool, ref.index, s);
        for (size_t i = 0; i < WORDS; i++)
            words[i] = payload(ref, expert, s * WORDS + i);
    }
}

static uint32_t wrong_words(const struct pool *pool, struct slot_ref ref, uint32_t expert)
{
    uint32_t wrong = 0;
    for (uint32_t s = 0; s < EXPERT_SLICES; s++) {
        const uint64_t *words = pool_slice(pool, ref.index, s);
        for (size_t i = 0; i < WORDS; i++)
            wrong += words[i] != payload(ref, expert, s * WORDS + i);
    }
    return wrong;
}

/* One of the loader's slots, made EMPTY; SLOTS if all are pinned. */
static uint32_t free_slot(struct member *self, uint32_t held[SLOTS])
{
    struct stress *stress = self->stress;
    uint32_t loader = self->index;
    struct pool *pool = &stress->pool;
    for (uint32_t i = loader; i < SLOTS; i += LOADERS) {
        if (slot_state_of(atomic_load(&pool->slots[i].state)) == SLOT_EMPTY)
            return i;
    }
    for (uint32_t tries = 0, i = next_random(self); tries < SLOTS / LOADERS; tries++, i++) {
        uint32_t victim = i % (SLOTS / LOADERS) * LOADERS + loader;
        uint64_t word = atomic_load(&pool->slots[victim].state);
        if (slot_pins_of(word) != 0)
            continue;
        if (slot_change(&pool->slots[victim].state, slot_state_of(word), SLOT_EMPTY, slot_generation_of(word), NULL) ==
            0) {
            atomic_store_explicit(&pool->map[held[victim]], POOL_NOWHERE, memory_order_release);
            atomic_fetch_add(&stress->evictions, 1);
            return victim;
        }
    }
    return SLOTS;
}

static void *load_and_evict(void *argument)
{
    struct member *self = argument;
    struct stress *stress = self->stress;
    struct pool *pool = &stress->pool;
    uint32_t held[SLOTS] = {0};
    for (uint32_t done = 0; done < CHANGES || atomic_load(&stress->pins) < PINS;) {
        uint32_t expert = next_random(self) % (EXPERTS / LOADERS) * LOADERS + self->index;
        struct slot_ref ref;
        if (pool_lookup(pool, expert, &ref) == 0 &&
            slot_state_of(atomic_load(&pool->slots[ref.index].state)) == SLOT_READY)
            continue;
        uint32_t slot = free_slot(self, held);
        if (slot == SLOTS) {
            sched_yield();
            continue;
        }
        ref.index = slot;
        assert_int_equal(slot_change(&pool->slots[slot].state, SLOT_EMPTY, SLOT_LOADING,
                                     slot_generation_of(atomic_load(&pool->slots[slot].state)), &ref.generation),
                         0);
        held[slot] = expert;
        atomic_store_explicit(&pool->slots[slot].expert, expert, memory_order_relaxed);
        atomic_store_explicit(&pool->map[expert], slot | (uint64_t)ref.generation << 32, memory_order_release);
        write_slot(pool, ref, expert);
        bool fails = next_random(self) % 16 == 0;
        if (fails)
            atomic_store_explicit(&pool->slots[slot].error, EIO, memory_order_relaxed);
        assert_int_equal(
            slot_change(&pool->slots[slot].state, SLOT_LOADING, fails ? SLOT_FAILED : SLOT_READY, ref.generation, NULL),
            0);
        done++;
        if (next_random(self) % 2 == 0)
            sched_yield();
    }
    atomic_fetch_sub(&stress->loaders_left, 1);
    return NULL;
}

static void *pin_and_read(void *argument)
{
    struct member *self = argument;
    struct stress *stress = self->stress;
    for (uint64_t tick = 1; atomic_load(&stress->loaders_left); tick++) {
        uint32_t expert = next_random(self) % EXPERTS;
        struct slot_ref ref;
        int status = pool_pin(&stress->pool, expert, self->index, tick, &ref);
        if (status == 0) {
            atomic_fetch_add(&stress->wrong, wrong_words(&stress->pool, ref, expert));
            if (next_random(self) % 8 == 0)
                sched_yield();
            atomic_fetch_add(&stress->wrong, wrong_words(&stress->pool, ref, expert));
            if (self->index == DYING) {
                sched_yield();
                pool_release_holder(&stress->pool, DYING);
            } else {
                pool_unpin(&stress->pool, ref, self->index);
            }
            atomic_fetch_add(&stress->pins, 1);
        } else if (status == -EIO) {
            atomic_fetch_add(&stress->failures, 1);
        } else {
            assert_true(status == -ENOENT || status == -EAGAIN || status == -ESTALE);
            atomic_fetch_add(&stress->stale, 1);
            sched_yield();
        }
    }
    return NULL;
}

static void test_stress(void **state)
{
    (void)state;
    char instance[INSTANCE_NAME_MAX];
    snprintf(instance, sizeof(instance), "test-stress-%d", (int)getpid());
    struct stress *stress = calloc(1, sizeof(*stress));
    const struct pool_shape shape = {
        .slots = SLOTS, .nodes = 2, .moe_layers = 1, .experts = EXPERTS, .slice_bytes = SLICE};
    struct error error;
    uint32_t ready;
    if (pool_create(instance, &shape, &error) < 0 || pool_attach(instance, &stress->pool, &error) < 0 ||
        pool_grow(&stress->pool, 0, SLOTS, false, false, &ready, &error) < 0 ||
        pool_attach_objects(&stress->pool, &error) < 0)
        fail_msg("%s", error.text);
    segment_unlink_all(instance); /* mapped it stays, and nothing is left if this test dies */

    atomic_store(&stress->loaders_left, LOADERS);
    pthread_t threads[LOADERS + PINNERS + 1];
    struct member members[LOADERS + PINNERS + 1];
    for (uint32_t i = 0; i < LOADERS + PINNERS + 1; i++) {
        bool loader = i < LOADERS;
        uint32_t index = loader ? i : i == LOADERS + PINNERS ? DYING : i - LOADERS;
        members[i] = (struct member){.stress = stress, .index = index, .random = i * 77777 + 1};
        assert_int_equal(pthread_create(&threads[i], NULL, loader ? load_and_evict : pin_and_read, &members[i]), 0);
    }
    for (uint32_t i = 0; i < LOADERS + PINNERS + 1; i++)
        pthread_join(threads[i], NULL);

    print_message("%lu pins, %lu refused, %lu failed, %lu evictions\n", (unsigned long)stress->pins,
                  (unsigned long)stress->stale, (unsigned long)stress->failures, (unsigned long)stress->evictions);
    assert_int_equal(stress->wrong, 0);
    assert_true(stress->failures > 0);
    assert_true(stress->evictions >= LOADERS * CHANGES - SLOTS);
    for (uint32_t i = 0; i < SLOTS; i++)
        assert_int_equal(slot_pins_of(stress->pool.slots[i].state), 0);
    pool_detach(&stress->pool);
    free(stress);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_stress)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
