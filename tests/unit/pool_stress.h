/* What the threads of test_pool_stress share.
 *
 *   holder 0        the leader, worker 0: asks by its ring, waits on its futex word without a timeout, uses what comes in waves
 *   holders 1-7     ask by their rings too, pin what comes, and move on
 *   holders 8-15    pin whatever is there
 *   the daemon      (stress_daemon.c) placement.c, requests.c, size.c, follower.c; a turn is that of loader.c. Killed, it leaves the slot
 *                   table as it is, and its books are gone; the next one opens its own
 *   two drives      (stress_daemon.c) write the bytes of a load, also of a daemon that has died since; while one of those is left, the
 *                   lock is held
 *   the supervisor  the main thread: other sizes, the pins of dead holders, the end
 *
 * The bytes of a slot are words made of expert and generation, written and read with plain accesses through the same addresses: a read of
 * another life, a torn one and a hole that was punched show in the values, an order that is missing shows in TSan. */
#pragma once

#include "shm/control.h"
#include "shm/pool.h"

#include <pthread.h>
#include <unistd.h>

#define HOLDERS SLOT_HOLDERS
#define ASKERS MAX_WORKERS /* the first holders; each has a ring */
#define DRIVES 2u
#define LAYERS 2u
#define A_LAYER 24u
#define EXPERTS (LAYERS * A_LAYER)
#define SLOTS 20u
#define TOP_K 4u
#define SLICE 4096u
#define WORDS 16u  /* of a slice: enough to be torn, few enough to turn over often */
#define WRITES 64u /* room for those of dead daemons, too */

enum write_state { WRITE_NONE, WRITE_WAITS, WRITE_RUNS, WRITE_DONE };

/* The bytes of a load. */
struct write {
    enum write_state state;
    uint32_t life; /* of the daemon that asked for it */
    uint32_t expert;
    struct slot_ref ref;
};

struct stress {
    struct pool pool; /* never changed after the start: each thread has a copy, with the same addresses */
    struct control *control;
    int doorbell;
    pthread_mutex_t mutex; /* of the four below: the daemon and the drives, nobody else */
    pthread_cond_t work;
    struct write writes[WRITES];
    uint32_t life;
    bool drives_end;
    /* relaxed: they tell what is done, and order nothing */
    _Atomic uint64_t loads, failures, deaths, pins, ticks, holder_deaths, wrong, unexpected;
    _Atomic bool holders_end, daemon_end;
    _Atomic uint32_t holders_left;
    _Atomic bool dead[HOLDERS]; /* W: the holder, true; the supervisor, false once its pins are given back */
};

static inline void count(_Atomic uint64_t *counter)
{
    atomic_fetch_add_explicit(counter, 1, memory_order_relaxed);
}

static inline uint64_t look(_Atomic uint64_t *counter)
{
    return atomic_load_explicit(counter, memory_order_relaxed);
}

static inline uint32_t dice(uint64_t *random, uint32_t sides)
{
    *random ^= *random << 13;
    *random ^= *random >> 7;
    *random ^= *random << 17;
    return (uint32_t)(*random >> 20) % sides;
}

static inline void ring(const struct stress *stress)
{
    uint64_t one = 1;
    (void)!write(stress->doorbell, &one, sizeof(one)); /* full: rings already */
}

/* Of a push or an unpin, the flag read after it. */
static inline void ring_if(const struct stress *stress, _Atomic uint32_t *flag)
{
    if (atomic_load(flag))
        ring(stress);
}

static inline uint64_t payload(struct slot_ref ref, uint32_t expert, size_t word)
{
    return ((uint64_t)expert << 40 | (uint64_t)ref.index << 32 | ref.generation) * UINT64_C(0x9E3779B97F4A7C15) + word;
}

static inline void write_slice(const struct pool *pool, struct slot_ref ref, uint32_t expert, uint32_t slice)
{
    uint64_t *words = pool_slice(pool, ref.index, slice);
    for (size_t i = 0; i < WORDS; i++)
        words[i] = payload(ref, expert, slice * WORDS + i);
}

static inline uint32_t wrong_words(const struct pool *pool, struct slot_ref ref, uint32_t expert)
{
    uint32_t wrong = 0;
    for (uint32_t s = 0; s < EXPERT_SLICES; s++) {
        const uint64_t *words = pool_slice(pool, ref.index, s);
        for (size_t i = 0; i < WORDS; i++)
            wrong += words[i] != payload(ref, expert, s * WORDS + i);
    }
    return wrong;
}

/* A thread: run_drive's argument. */
struct drive_thread {
    struct stress *stress;
    struct pool pool;
    uint64_t random;
};
void *run_drive(void *argument);

/* A thread: one daemon after another, until the last one is told to end. */
void *run_daemons(void *argument);
