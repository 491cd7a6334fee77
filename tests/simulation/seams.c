/* The seams: functions of libc, shm and the daemon that the linker leads here (-Wl,--wrap), to be replaced or watched.
 *
 *   clock_gettime            the fake clock
 *   pthread_create, _join    the thread that sizes the pool is a job of the schedule
 *   verifier_*               the verify thread likewise
 *   futex_wake_all           whom a wake reaches
 *   fstat64, copies_*, loads_open   drives.c
 *   learning_*, requests_warm       learning.c
 *   slot_change, ring_pop    where the daemon touches what others see: they may act before it, or it may die
 *   placement_*, lfru_evict, pool_grow, pool_punch   watched, and memory that runs out */
#include "tests/simulation/simulation.h"

#include "io_daemon/loads.h"

#include <pthread.h>
#include <stdlib.h>
#include <time.h>
#include <xxhash.h>

#define VERIFY_MOST_NS 50000u

/* --- the clock --- */

int __real_clock_gettime(clockid_t clock, struct timespec *ret_time);
int __wrap_clock_gettime(clockid_t clock, struct timespec *ret_time);

int __wrap_clock_gettime(clockid_t clock, struct timespec *ret_time)
{
    struct simulation *sim = the_simulation;
    if (clock != CLOCK_MONOTONIC)
        return __real_clock_gettime(clock, ret_time);
    world_hook(sim);
    sim->now_ns += 100;
    *ret_time = (struct timespec){(time_t)(sim->now_ns / 1000000000), (long)(sim->now_ns % 1000000000)};
    return 0;
}

/* --- threads --- */

int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*work)(void *), void *argument);
int __wrap_pthread_join(pthread_t thread, void **ret_value);

/* Only the daemon's loop and its learning start a thread of their own; those that populate memory find none, and it is
 * done in place. */
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*work)(void *), void *argument)
{
    struct simulation *sim = the_simulation;
    (void)attributes;
    if (sim->in_learning) {
        *thread = pthread_self();
        sim->writer = work;
        sim->writer_argument = argument;
        return 0;
    }
    if (!sim->running || sim->busy)
        return EAGAIN;
    *thread = pthread_self();
    sim->job = work;
    sim->job_argument = argument;
    return 0;
}

bool job_step(struct simulation *sim)
{
    void *(*job)(void *) = sim->job;
    if (!job)
        return false;
    sim->job = NULL;
    trace(sim, "size    works");
    job(sim->job_argument);
    return true;
}

int __wrap_pthread_join(pthread_t thread, void **ret_value)
{
    struct simulation *sim = the_simulation;
    bool busy = sim->busy;
    (void)thread;
    (void)ret_value;
    if (sim->in_learning) {
        if (!sim->dead) /* else it died with its process */
            sim->writer(sim->writer_argument);
        return 0;
    }
    if (sim->dead)
        sim->job = NULL;
    sim->busy = true;
    job_step(sim);
    sim->busy = busy;
    return 0;
}

int __real_pool_grow(struct pool *pool, uint32_t first, uint32_t end, bool hugepages, bool background,
                     uint32_t *ret_end, struct error *ret_error);
int __wrap_pool_grow(struct pool *pool, uint32_t first, uint32_t end, bool hugepages, bool background,
                     uint32_t *ret_end, struct error *ret_error);

/* Memory runs out now and then, and comes in parts, as objects do. */
int __wrap_pool_grow(struct pool *pool, uint32_t first, uint32_t end, bool hugepages, bool background,
                     uint32_t *ret_end, struct error *ret_error)
{
    struct simulation *sim = the_simulation;
    if (background && sim->plan.faults && dice(sim, 6) == 0) {
        *ret_end = first;
        sim->coverage->refused++;
        return error_set(ret_error, ENOSPC, "simulated: no memory");
    }
    if (end > first + 1 && dice(sim, 2))
        end = first + 1 + dice(sim, end - first);
    return __real_pool_grow(pool, first, end, hugepages, background, ret_end, ret_error);
}

int __real_pool_punch(struct pool *pool, uint32_t first, uint32_t end, struct error *ret_error);
int __wrap_pool_punch(struct pool *pool, uint32_t first, uint32_t end, struct error *ret_error);

int __wrap_pool_punch(struct pool *pool, uint32_t first, uint32_t end, struct error *ret_error)
{
    struct simulation *sim = the_simulation;
    if (sim->running && sim->registered_nodes)
        violated(sim, "a hole is punched into a registered buffer");
    int status = __real_pool_punch(pool, first, end, ret_error);
    for (uint32_t s = 0; s < sim->plan.slots && sim->pool.attached; s++)
        if (slot_state_of(atomic_load(&sim->pool.slots[s].state)) == SLOT_READY)
            check_slot(sim, s);
    sim->coverage->punches += sim->running;
    return status;
}

/* --- the verify thread --- */

struct verifier {
    int doorbell_fd;
    _Atomic uint64_t *counter;
    struct verify_job *first, *last, *done;
    uint64_t due_ns;
};

int __wrap_verifier_open(int doorbell_fd, _Atomic uint64_t *counter, struct verifier **ret_verifier,
                         struct error *ret_error);
void __wrap_verifier_add(struct verifier *verifier, struct verify_job *job);
struct verify_job *__wrap_verifier_collect(struct verifier *verifier);
void __wrap_verifier_close(struct verifier *verifier);

int __wrap_verifier_open(int doorbell_fd, _Atomic uint64_t *counter, struct verifier **ret_verifier,
                         struct error *ret_error)
{
    struct verifier *verifier = calloc(1, sizeof(*verifier));
    if (!verifier)
        return error_set(ret_error, ENOMEM, "simulated verify thread: out of memory");
    verifier->doorbell_fd = doorbell_fd;
    verifier->counter = counter;
    uint32_t place = 0;
    while (the_simulation->verifiers[place])
        place++;
    *ret_verifier = the_simulation->verifiers[place] = verifier;
    return 0;
}

void __wrap_verifier_add(struct verifier *verifier, struct verify_job *job)
{
    struct simulation *sim = the_simulation;
    job->next = NULL;
    if (verifier->first)
        verifier->last->next = job;
    else
        verifier->first = job;
    if (verifier->first == job)
        verifier->due_ns = sim->now_ns + (sim->opening ? 0 : dice(sim, VERIFY_MOST_NS));
    verifier->last = job;
}

/* The verify thread that is due first. */
static struct verifier *next_verifier(const struct simulation *sim)
{
    struct verifier *next = NULL;
    for (uint32_t d = 0; d < READER_DRIVES && sim->verifiers[d]; d++)
        if (sim->verifiers[d]->first && (!next || sim->verifiers[d]->due_ns < next->due_ns))
            next = sim->verifiers[d];
    return next;
}

bool verify_due(const struct simulation *sim, uint64_t *ret_ns)
{
    const struct verifier *next = next_verifier(sim);
    if (next)
        *ret_ns = next->due_ns;
    return next;
}

bool verify_step(struct simulation *sim)
{
    struct verifier *verifier = next_verifier(sim);
    if (!verifier || verifier->due_ns > sim->now_ns)
        return false;
    struct verify_job *job = verifier->first;
    verifier->first = job->next;
    verifier->due_ns = sim->now_ns + dice(sim, VERIFY_MOST_NS);
    job->matches = XXH3_64bits(job->data, job->bytes) == job->expected;
    atomic_fetch_add(verifier->counter, job->bytes);
    sim->tally.verified += job->bytes;
    if (!verifier->done)
        ring_doorbell(sim);
    job->next = verifier->done;
    verifier->done = job;
    trace(sim, "verify  slice %u %s", job->index, job->matches ? "is right" : "differs");
    return true;
}

struct verify_job *__wrap_verifier_collect(struct verifier *verifier)
{
    struct verify_job *done = verifier->done;
    verifier->done = NULL;
    return done;
}

void __wrap_verifier_close(struct verifier *verifier)
{
    if (!verifier)
        return;
    for (uint32_t d = 0; d < READER_DRIVES; d++)
        if (the_simulation->verifiers[d] == verifier)
            the_simulation->verifiers[d] = NULL;
    free(verifier);
}

/* --- what others see --- */

void __wrap_futex_wake_all(_Atomic uint32_t *word);

void __wrap_futex_wake_all(_Atomic uint32_t *word)
{
    struct simulation *sim = the_simulation;
    const struct control *theirs = sim->placement ? sim->placement->requests->control : NULL;
    world_hook(sim);
    if (!sim->dead &&
        (word == &sim->control->workers[0].published || (theirs && word == &theirs->workers[0].published)))
        sim->leader.woken = true;
}

int __real_ring_pop(struct request_ring *ring, struct expert_request *ret_request);
int __wrap_ring_pop(struct request_ring *ring, struct expert_request *ret_request);

int __wrap_ring_pop(struct request_ring *ring, struct expert_request *ret_request)
{
    world_hook(the_simulation);
    int status = __real_ring_pop(ring, ret_request);
    world_hook(the_simulation); /* what is pushed from here on was not seen by this look */
    return status;
}

int __real_slot_change(_Atomic uint64_t *word, enum slot_state from, enum slot_state to, uint32_t generation,
                       uint32_t *ret_generation);
int __wrap_slot_change(_Atomic uint64_t *word, enum slot_state from, enum slot_state to, uint32_t generation,
                       uint32_t *ret_generation);

static void note_change(struct simulation *sim, struct slot *slot, uint32_t index, enum slot_state from,
                        enum slot_state to)
{
    static const char *const names[] = {"EMPTY", "LOADING", "READY", "FAILED", "QUARANTINED"};
    if (to != SLOT_LOADING)
        trace(sim, "iod     slot %u (expert %u): %s to %s", index, atomic_load(&slot->expert), names[from], names[to]);
    uint32_t expert = atomic_load(&slot->expert);
    sim->coverage->saved += to == SLOT_READY && sim->copies->live == 3 && drives_hurt(sim, expert);
    sim->tally.loads += to == SLOT_READY;
    sim->tally.failures += to == SLOT_FAILED && atomic_load(&slot->error) != ECANCELED;
    sim->tally.evictions += from == SLOT_READY && !sim->in_placement_open;
    sim->coverage->quarantined += to == SLOT_QUARANTINED;
}

int __wrap_slot_change(_Atomic uint64_t *word, enum slot_state from, enum slot_state to, uint32_t generation,
                       uint32_t *ret_generation)
{
    struct simulation *sim = the_simulation;
    world_hook(sim);
    int status = __real_slot_change(word, from, to, generation, ret_generation);
    if (status == 0 && sim->placement && !sim->dead) {
        struct slot *slots = sim->placement->pool->slots,
                    *slot = (struct slot *)((uintptr_t)word - offsetof(struct slot, state));
        note_change(sim, slot, (uint32_t)(slot - slots), from, to);
    }
    return status;
}

/* --- placement --- */

int __real_placement_open(struct pool *pool, const struct model_config *config, struct requests *requests,
                          struct iod_line *counters, struct placement *ret_placement, struct error *ret_error);
int __wrap_placement_open(struct pool *pool, const struct model_config *config, struct requests *requests,
                          struct iod_line *counters, struct placement *ret_placement, struct error *ret_error);

int __wrap_placement_open(struct pool *pool, const struct model_config *config, struct requests *requests,
                          struct iod_line *counters, struct placement *ret_placement, struct error *ret_error)
{
    struct simulation *sim = the_simulation;
    ret_placement->pool = pool;
    ret_placement->requests = requests;
    sim->placement = ret_placement;
    sim->in_placement_open = true;
    int status = __real_placement_open(pool, config, requests, counters, ret_placement, ret_error);
    sim->in_placement_open = false;
    return status;
}

int __real_placement_take(struct placement *placement, uint32_t expert, enum priority priority,
                          struct slot_ref *ret_ref);
int __wrap_placement_take(struct placement *placement, uint32_t expert, enum priority priority,
                          struct slot_ref *ret_ref);

/* Guesses wait while a demand does, and leave it top_k slots. */
int __wrap_placement_take(struct placement *placement, uint32_t expert, enum priority priority,
                          struct slot_ref *ret_ref)
{
    static const char *const names[] = {"demanded", "looked ahead", "warmed up"};
    struct simulation *sim = the_simulation;
    uint64_t evictions = sim->tally.evictions;
    int status = __real_placement_take(placement, expert, priority, ret_ref);
    if (status < 0 || sim->dead)
        return status;
    drives_begin_load(sim, expert);
    sim->eio_spent[expert] = sim->stall_spent[expert] = false;
    sim->flipped[expert] = 0;
    trace(sim, "iod     gives slot %u to expert %u, %s", ret_ref->index, expert, names[priority]);
    if (priority == PRIORITY_DEMAND && sim->timer_only)
        violated(sim, "a demand for expert %u got its slot only when a timer ran out", expert);
    if (priority == PRIORITY_DEMAND)
        return status;
    sim->coverage->warmups += priority == PRIORITY_WARMUP;
    if (priority == PRIORITY_WARMUP && sim->tally.evictions != evictions)
        violated(sim, "expert %u is warmed up in the place of another", expert);
    if (placement->requests->queued[PRIORITY_DEMAND])
        violated(sim, "a guess begins, and %u demands wait", placement->requests->queued[PRIORITY_DEMAND]);
    if (placement->guesses + SIM_TOP_K > placement_capacity(placement))
        violated(sim, "guesses keep %u of %u slots", placement->guesses, placement_capacity(placement));
    return status;
}
