#include "compute/team.h"

#include "compute/model.h"
#include "shm/futex.h"

#include <string.h>
#include <time.h>

#define SPINS 4000u /* looks before sleeping, where spinning is allowed: some 20 us */

void team_init(struct team *team, uint32_t threads, uint32_t spin)
{
    *team = (struct team){.threads = threads, .spin = spin};
}

uint64_t clock_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void pause_briefly(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

/* Waits until every thread below this one has arrived at the end of `phase`. */
static void await_children(struct thread *thread, uint32_t phase)
{
    struct team *team = &thread->model->team;
    uint32_t child = thread->index * TEAM_CHILDREN + 1, end = child + TEAM_CHILDREN;
    for (; child < end && child < team->threads; child++) {
        struct team_place *place = &thread->model->state.threads[child].place;
        uint32_t arrived = phase;
        for (uint32_t i = 0; team->spin && i < SPINS && arrived == phase; i++) {
            arrived = atomic_load_explicit(&place->arrived, memory_order_acquire);
            if (arrived == phase)
                pause_briefly();
        }
        if (arrived != phase)
            continue;
        atomic_store(&place->parent_sleeps, 1);
        while (atomic_load(&place->arrived) == phase)
            futex_wait(&place->arrived, phase, -1);
        atomic_store(&place->parent_sleeps, 0);
    }
}

/* Thread 0, when all have arrived. */
static void release_team(struct team *team, int status)
{
    team->status = status;
    atomic_fetch_add(&team->phase, 1);
    if (atomic_load(&team->sleepers))
        futex_wake_all(&team->phase);
}

/* Another thread arrives, after those below it, and waits for the phase to turn. */
static int await_phase(struct thread *thread)
{
    struct team *team = &thread->model->team;
    struct team_place *place = &thread->place;
    uint32_t phase =
        atomic_load_explicit(&team->phase, memory_order_relaxed); /* cannot turn before this thread has arrived */
    await_children(thread, phase);
    atomic_store(&place->arrived, phase + 1);
    if (atomic_load(&place->parent_sleeps))
        futex_wake_all(&place->arrived);
    for (uint32_t i = 0; team->spin && i < SPINS; i++) {
        if (atomic_load_explicit(&team->phase, memory_order_acquire) != phase)
            return team->status;
        pause_briefly();
    }
    atomic_fetch_add(&team->sleepers, 1);
    while (atomic_load(&team->phase) == phase)
        futex_wait(&team->phase, phase, -1);
    atomic_fetch_sub(&team->sleepers, 1);
    return team->status;
}

void team_time(struct team *team, uint64_t now)
{
    memset(team->part_ns, 0, sizeof team->part_ns);
    team->part = PART_OTHER;
    team->part_since = now;
    team->matmul_ns = 0;
}

enum step_part team_part(struct team *team, enum step_part part)
{
    enum step_part before = team->part;
    uint64_t now = clock_ns();
    team->part_ns[before] += now - team->part_since;
    team->part_since = now;
    team->part = part;
    return before;
}

int team_sync(struct thread *thread, int status)
{
    struct team *team = &thread->model->team;
    if (thread->index != 0)
        return await_phase(thread);
    if (team->threads > 1) {
        await_children(thread, atomic_load_explicit(&team->phase, memory_order_relaxed));
        release_team(team, status);
    }
    return status;
}

int team_exchange(struct thread *thread, int status)
{
    struct team *team = &thread->model->team;
    if (thread->index != 0)
        return await_phase(thread);
    if (team->threads > 1)
        await_children(thread, atomic_load_explicit(&team->phase, memory_order_relaxed));
    if (status == 0) {
        struct exchange *exchange = &thread->model->exchange;
        enum step_part part = team_part(team, PART_EXCHANGE);
        status = exchange->method->barrier(exchange);
        team_part(team, part);
    }
    if (team->threads > 1)
        release_team(team, status);
    return status;
}

static struct range tail_of(const struct team_job *job, uint32_t index)
{
    uint32_t threads = job->thread->model->team.threads;
    struct range run = split(job->units, index, threads);
    uint32_t count = threads > 1 ? run.count / job->tail_part : 0;
    return (struct range){run.first + run.count - count, count};
}

struct team_job team_begin(struct thread *thread, uint32_t units, uint32_t tail_part)
{
    struct team_job job = {.thread = thread, .number = ++thread->job, .units = units, .tail_part = tail_part};
    struct range run = split(units, thread->index, thread->model->team.threads), tail = tail_of(&job, thread->index);
    job.head = (struct range){run.first, run.count - tail.count};
    atomic_store_explicit(&thread->place.tail, (uint64_t)job.number << 32 | tail.first, memory_order_relaxed);
    return job;
}

/* The word orders nothing but itself: what the units need was there before the job, and the barrier hands on what they gave. */
static bool take_tail(const struct team_job *job, uint32_t index, struct range *ret_units)
{
    struct range tail = tail_of(job, index);
    _Atomic uint64_t *word = &job->thread->model->state.threads[index].place.tail;
    uint64_t seen = atomic_load_explicit(word, memory_order_relaxed);
    while (seen >> 32 == job->number && (uint32_t)seen < tail.first + tail.count) {
        uint32_t next = (uint32_t)seen, count = (tail.first + tail.count - next + 1) / 2;
        if (atomic_compare_exchange_weak_explicit(word, &seen, seen + count, memory_order_relaxed,
                                                  memory_order_relaxed)) {
            *ret_units = (struct range){next, count};
            return true;
        }
    }
    return false;
}

/* After its own tail a thread looks at those 1, 2, 4, ... places behind it: near and far ones, but few. */
bool team_take(struct team_job *job, struct range *ret_units)
{
    uint32_t threads = job->thread->model->team.threads;
    if (job->head.count > 0) {
        *ret_units = job->head;
        job->head.count = 0;
        return true;
    }
    while (job->distance < threads) {
        if (take_tail(job, (job->thread->index + job->distance) % threads, ret_units)) {
            if (job->distance > 0)
                job->distance = 1;
            return true;
        }
        job->distance = job->distance > 0 ? 2 * job->distance : 1;
    }
    return false;
}
