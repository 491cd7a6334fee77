/* The pool under stress, as threads of one process: sixteen holders pin while one daemon loads, evicts, shrinks, grows, and is killed again
 * and again. Who does what stands in pool_stress.h. */
#include <errno.h>
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>

#include <cmocka.h>

#include "shm/futex.h"
#include "tests/unit/pool_stress.h"

/* Rounds of the supervisor, some 0.6 ms each: a clock would go on while the machine stands still. */
#define PATIENCE 40000u

/* What a run has at least, before it ends. */
#define LOADS 20000u
#define PINS 100000u
#define TICKS 1500u
#define DEATHS 100u /* of the daemon */
#define HOLDER_DEATHS 50u
#define RESIZES 150u

/* --- holders --- */

struct holder {
    struct stress *stress;
    struct pool pool;
    uint32_t index;
    uint64_t random;
};

/* What is pinned is read twice, and is what it was when it was pinned; its tick does not fall. */
static void use(struct holder *self, struct slot_ref ref, uint32_t expert, uint64_t tick)
{
    const struct pool *pool = &self->pool;
    uint32_t wrong = wrong_words(pool, ref, expert);
    if (dice(&self->random, 8) == 0)
        sched_yield();
    wrong += wrong_words(pool, ref, expert);
    uint64_t word = atomic_load_explicit(&pool->slots[ref.index].state, memory_order_relaxed);
    wrong += slot_state_of(word) != SLOT_READY || slot_generation_of(word) != ref.generation;
    wrong += atomic_load_explicit(&pool->header->slots_ready, memory_order_relaxed) <= ref.index;
    wrong += atomic_load_explicit(&pool->slots[ref.index].used, memory_order_relaxed) < tick;
    atomic_fetch_add_explicit(&self->stress->wrong, wrong, memory_order_relaxed);
    count(&self->stress->pins);
}

static void give_back(struct holder *self, struct slot_ref ref)
{
    pool_unpin(&self->pool, ref, self->index);
    ring_if(self->stress, &self->stress->control->iod.starved);
}

static bool ask(const struct holder *self, uint32_t expert, uint32_t epoch, uint64_t tick, enum demand_kind kind)
{
    const struct expert_request request = {.expert = expert, .epoch = epoch, .tick = tick, .kind = kind};
    return ring_push(&self->stress->control->rings[self->index], &request) == 0;
}

/* An expert of a layer that the leader wants. */
struct wanted {
    uint32_t expert;
    bool asked, done;
    struct slot_ref ref, failed;
    bool pinned;
};

static void log_uses(const struct holder *self, const struct wanted *wanted, uint32_t wanted_count)
{
    struct use uses[TOP_K];
    for (uint32_t i = 0; i < wanted_count; i++)
        uses[i] = (struct use){.expert = wanted[i].expert,
                               .flags = (i == 0 ? USE_LAYER : 0) | (wanted[i].pinned ? USE_HIT : 0)};
    uses_append(&self->stress->control->uses, uses, wanted_count);
}

/* Pins what is there and asks once for what is not. 0; -EIO: one has failed; -ENOBUFS: the ring is full. */
static int look_at_wanted(struct holder *self, struct wanted *wanted, uint32_t wanted_count, uint32_t epoch,
                          uint64_t tick)
{
    int result = 0;
    bool first = true, pushed = false;
    for (uint32_t i = 0; i < wanted_count; i++) {
        struct wanted *one = &wanted[i];
        if (one->done)
            continue;
        int status = pool_pin(&self->pool, one->expert, self->index, tick, &one->ref);
        one->pinned = status == 0;
        first = first && !one->asked;
        if (status != -EIO)
            continue;
        if (one->asked && (one->ref.index != one->failed.index || one->ref.generation != one->failed.generation))
            result = -EIO;
        if (!one->asked)
            one->failed = one->ref;
    }
    if (first)
        log_uses(self, wanted, wanted_count);
    for (uint32_t i = 0; result == 0 && i < wanted_count; i++) {
        if (wanted[i].done || wanted[i].pinned || wanted[i].asked)
            continue;
        wanted[i].asked = ask(self, wanted[i].expert, epoch, tick, KIND_DEMAND);
        pushed |= wanted[i].asked;
        result = wanted[i].asked ? 0 : -ENOBUFS;
    }
    if (pushed)
        ring_if(self->stress, &self->stress->control->iod.asleep);
    return result;
}

/* Uses the wave and gives it back. Returns how many are still to come; *ret_any: there was one. */
static uint32_t use_wave(struct holder *self, struct wanted *wanted, uint32_t wanted_count, uint64_t tick,
                         bool *ret_any)
{
    uint32_t left = 0;
    *ret_any = false;
    for (uint32_t i = 0; i < wanted_count; i++) {
        if (wanted[i].pinned)
            use(self, wanted[i].ref, wanted[i].expert, tick);
    }
    for (uint32_t i = 0; i < wanted_count; i++) {
        if (wanted[i].pinned) {
            give_back(self, wanted[i].ref);
            wanted[i].done = *ret_any = true;
        }
        wanted[i].pinned = false;
        left += !wanted[i].done;
    }
    return left;
}

/* A layer, as shm/README.md has it: published, epoch, pins, requests, the wave, sleep. */
static void use_layer(struct holder *self)
{
    struct worker_line *line = &self->stress->control->workers[self->index];
    uint64_t tick = atomic_load(&line->tick) + 1;
    uint32_t epoch = atomic_load(&self->stress->control->epoch), first = dice(&self->random, EXPERTS);
    if (atomic_load(&self->stress->control->serving) != epoch) { /* a step begins only where every process is ready */
        sched_yield();
        return;
    }
    struct wanted wanted[TOP_K];
    for (uint32_t i = 0; i < TOP_K; i++)
        wanted[i] = (struct wanted){.expert = (first + i * 5) % EXPERTS};
    atomic_store(&line->tick, tick);
    for (;;) {
        bool any;
        uint32_t seen = atomic_load(&line->published);
        if (atomic_load(&self->stress->control->epoch) != epoch)
            return;
        int status = look_at_wanted(self, wanted, TOP_K, epoch, tick);
        if (use_wave(self, wanted, TOP_K, tick, &any) == 0 || status == -EIO)
            break;
        if (!any)
            futex_wait(&line->published, seen, status == -ENOBUFS ? 5 : -1);
    }
    for (uint32_t i = 0; i < 2; i++)
        ask(self, dice(&self->random, EXPERTS), epoch, tick + 1, KIND_LOOKAHEAD);
    ring_if(self->stress, &self->stress->control->iod.asleep);
    count(&self->stress->ticks);
}

static void *run_leader(void *argument)
{
    struct holder *self = argument;
    while (!atomic_load_explicit(&self->stress->holders_end, memory_order_relaxed))
        use_layer(self);
    atomic_fetch_sub(&self->stress->holders_left, 1);
    return NULL;
}

/* Others pin with a tick before the leader's: what is owed to it stays so (shm/README.md, Decisions). */
static uint64_t older_tick(const struct holder *self)
{
    uint64_t tick = atomic_load_explicit(&self->stress->control->workers[0].tick, memory_order_relaxed);
    return tick > 0 ? tick - 1 : 0;
}

/* Asks, each expert once a tick, and moves on. */
static void ask_and_go_on(struct holder *self, uint32_t expert, uint64_t *asked)
{
    struct control *control = self->stress->control;
    struct worker_line *line = &control->workers[self->index];
    uint64_t tick = atomic_load_explicit(&line->tick, memory_order_relaxed), bit = UINT64_C(1) << expert;
    if (*asked & bit)
        return;
    if (ask(self, expert, atomic_load(&control->epoch), tick, KIND_DEMAND)) {
        *asked |= bit;
        ring_if(self->stress, &control->iod.asleep);
    }
}

/* The process is gone, its pins are not: until the supervisor has given them back. */
static void die(struct holder *self)
{
    struct stress *stress = self->stress;
    atomic_store_explicit(&stress->dead[self->index], true, memory_order_release);
    while (atomic_load_explicit(&stress->dead[self->index], memory_order_acquire))
        sched_yield();
}

#define HELD 2u /* experts that a holder pins at once */

static void *run_holder(void *argument)
{
    struct holder *self = argument;
    struct stress *stress = self->stress;
    struct worker_line *line = self->index < ASKERS ? &stress->control->workers[self->index] : NULL;
    uint64_t asked = 0;
    for (uint32_t round = 1; !atomic_load_explicit(&stress->holders_end, memory_order_relaxed); round++) {
        struct slot_ref held[HELD];
        uint32_t held_count = 0, expert = dice(&self->random, EXPERTS);
        uint64_t tick = older_tick(self);
        for (uint32_t i = 0; i < HELD; i++, expert = (expert + 7) % EXPERTS) {
            int status = pool_pin(&self->pool, expert, self->index, tick, &held[held_count]);
            if (status == 0)
                use(self, held[held_count++], expert, tick);
            else if (line)
                ask_and_go_on(self, expert, &asked);
            if (status != 0 && status != -ENOENT && status != -EAGAIN && status != -EIO && status != -ESTALE)
                count(&stress->unexpected);
        }
        bool dies = held_count > 0 && dice(&self->random, 1000) == 0;
        for (uint32_t i = 0; i < held_count && !dies; i++)
            give_back(self, held[i]);
        if (dies)
            die(self);
        if (held_count == 0 || dice(&self->random, 8) == 0) /* it computes; else all would be pinned for ever */
            nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
        if (line && round % 64 == 0) {
            atomic_store(&line->tick, atomic_load_explicit(&line->tick, memory_order_relaxed) + 1);
            asked = 0;
        }
    }
    atomic_fetch_sub(&stress->holders_left, 1);
    return NULL;
}

/* --- the supervisor --- */

static bool enough(struct stress *stress, uint64_t resizes)
{
    return look(&stress->loads) >= LOADS && look(&stress->pins) >= PINS && look(&stress->ticks) >= TICKS &&
           look(&stress->deaths) >= DEATHS && look(&stress->holder_deaths) >= HOLDER_DEATHS && resizes >= RESIZES;
}

static void give_back_of_dead(struct stress *stress, struct pool *pool)
{
    for (uint32_t h = 0; h < HOLDERS; h++) {
        if (!atomic_load_explicit(&stress->dead[h], memory_order_acquire))
            continue;
        pool_release_holder(pool, h);
        ring(stress);
        count(&stress->holder_deaths);
        atomic_store_explicit(&stress->dead[h], false, memory_order_release);
    }
}

/* Makes trouble until there was enough of everything and all holders have ended. Returns the number of sizes. */
static uint64_t supervise(struct stress *stress)
{
    struct pool pool = stress->pool;
    uint64_t random = 4711, resizes = 0, before = 0;
    uint32_t waited = 0;
    while (atomic_load(&stress->holders_left) > 0) {
        nanosleep(&(struct timespec){.tv_nsec = 500000}, NULL);
        give_back_of_dead(stress, &pool);
        if (dice(&random, 8) == 0) {
            atomic_store(&stress->control->pool_target, TOP_K + dice(&random, SLOTS - TOP_K + 1));
            ring(stress);
            resizes++;
        }
        if (enough(stress, resizes) || look(&stress->wrong) || look(&stress->unexpected))
            atomic_store_explicit(&stress->holders_end, true, memory_order_relaxed);
        uint64_t ticks = look(&stress->ticks);
        waited = ticks == before ? waited + 1 : 0;
        before = ticks;
        if (waited == PATIENCE) {
            print_error("the leader waits and waits: a wake, a request or a slot is lost\n");
            segment_unlink_all(stress->pool.instance);
            abort(); /* the threads cannot be ended */
        }
    }
    return resizes;
}

/* --- the whole --- */

static void open_stress(struct stress *stress)
{
    char instance[INSTANCE_NAME_MAX];
    snprintf(instance, sizeof(instance), "test-stress-%d", (int)getpid());
    const struct pool_shape shape = {
        .slots = SLOTS, .nodes = 2, .moe_layers = LAYERS, .experts = A_LAYER, .slice_bytes = SLICE};
    struct error error;
    uint32_t ready;
    stress->control = aligned_alloc(CACHE_LINE, sizeof(*stress->control));
    assert_non_null(stress->control);
    memset(stress->control, 0, sizeof(*stress->control));
    atomic_store(&stress->control->epoch, 1);
    atomic_store(&stress->control->pool_target, SLOTS);
    stress->doorbell = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    pthread_mutex_init(&stress->mutex, NULL);
    pthread_cond_init(&stress->work, NULL);
    if (pool_create(instance, &shape, &error) < 0 || pool_attach(instance, &stress->pool, &error) < 0 ||
        pool_grow(&stress->pool, 0, TOP_K, false, false, &ready, &error) < 0 ||
        pool_attach_objects(&stress->pool, &error) < 0)
        fail_msg("%s", error.text);
}

/* Nothing is pinned or on its way, and the map says what the slots say. */
static void check_rest(const struct stress *stress)
{
    const struct pool *pool = &stress->pool;
    uint32_t ready = 0, mapped = 0;
    for (uint32_t i = 0; i < SLOTS; i++) {
        uint64_t word = atomic_load(&pool->slots[i].state);
        enum slot_state at = slot_state_of(word);
        assert_int_equal(slot_pins_of(word), 0);
        assert_true(at == SLOT_READY || at == SLOT_FAILED || at == SLOT_EMPTY);
        assert_true(at == SLOT_EMPTY || i < pool_slots_ready(pool));
        ready += at != SLOT_EMPTY;
    }
    for (uint32_t e = 0; e < EXPERTS; e++) {
        struct slot_ref ref;
        if (pool_lookup(pool, e, &ref) < 0)
            continue;
        uint64_t word = atomic_load(&pool->slots[ref.index].state);
        mapped++;
        assert_int_equal(slot_generation_of(word), ref.generation);
        assert_int_equal(atomic_load(&pool->slots[ref.index].expert), e);
        if (slot_state_of(word) == SLOT_READY)
            assert_int_equal(wrong_words(pool, ref, e), 0);
    }
    assert_int_equal(ready, mapped);
}

static void test_stress(void **state)
{
    struct stress *stress = *state = calloc(1, sizeof(*stress));
    pthread_t daemon, drives[DRIVES], holders[HOLDERS];
    struct drive_thread drive_threads[DRIVES];
    struct holder holder_threads[HOLDERS];
    open_stress(stress);
    atomic_store(&stress->holders_left, HOLDERS);
    for (uint32_t i = 0; i < DRIVES; i++) {
        drive_threads[i] = (struct drive_thread){.stress = stress, .pool = stress->pool, .random = i + 99};
        assert_int_equal(pthread_create(&drives[i], NULL, run_drive, &drive_threads[i]), 0);
    }
    assert_int_equal(pthread_create(&daemon, NULL, run_daemons, stress), 0);
    for (uint32_t i = 0; i < HOLDERS; i++) {
        holder_threads[i] =
            (struct holder){.stress = stress, .pool = stress->pool, .index = i, .random = i * 77777 + 1};
        assert_int_equal(pthread_create(&holders[i], NULL, i == 0 ? run_leader : run_holder, &holder_threads[i]), 0);
    }
    uint64_t resizes = supervise(stress);
    for (uint32_t i = 0; i < HOLDERS; i++)
        pthread_join(holders[i], NULL);
    atomic_store(&stress->daemon_end, true);
    ring(stress);
    pthread_join(daemon, NULL);
    pthread_mutex_lock(&stress->mutex);
    stress->drives_end = true;
    pthread_cond_broadcast(&stress->work);
    pthread_mutex_unlock(&stress->mutex);
    for (uint32_t i = 0; i < DRIVES; i++)
        pthread_join(drives[i], NULL);

    print_message(
        "%lu loads, %lu failed, %lu evictions; %lu pins, %lu layers; %lu daemons and %lu holders died, %lu sizes\n",
        (unsigned long)stress->loads, (unsigned long)stress->failures, (unsigned long)stress->control->iod.evictions,
        (unsigned long)stress->pins, (unsigned long)stress->ticks, (unsigned long)stress->deaths,
        (unsigned long)stress->holder_deaths, (unsigned long)resizes);
    assert_int_equal(stress->wrong, 0);
    assert_int_equal(stress->unexpected, 0);
    assert_true(stress->failures > 0);
    check_rest(stress);
}

#define TURNS 1000000u

/* A holder of one slot that is READY: its bit is there after a pin and gone after an unpin, whatever the others do with theirs. */
static void *turn_bit(void *argument)
{
    struct holder *self = argument;
    _Atomic uint64_t *word = &self->stress->pool.slots[0].state;
    uint32_t generation = slot_generation_of(atomic_load(word)), bit = 1u << self->index;
    for (uint32_t i = 0; i < TURNS; i++) {
        uint32_t wrong = slot_pin(word, generation, self->index) != 0;
        wrong += !(slot_pins_of(atomic_load_explicit(word, memory_order_relaxed)) & bit);
        slot_unpin(word, self->index);
        wrong += (slot_pins_of(atomic_load_explicit(word, memory_order_relaxed)) & bit) != 0;
        atomic_fetch_add_explicit(&self->stress->wrong, wrong, memory_order_relaxed);
    }
    return NULL;
}

static void test_one_word(void **state)
{
    struct stress *stress = *state = calloc(1, sizeof(*stress));
    pthread_t threads[4];
    struct holder holders[4];
    open_stress(stress);
    _Atomic uint64_t *word = &stress->pool.slots[0].state;
    assert_int_equal(slot_change(word, SLOT_EMPTY, SLOT_LOADING, 0, NULL), 0);
    assert_int_equal(slot_change(word, SLOT_LOADING, SLOT_READY, 1, NULL), 0);
    for (uint32_t i = 0; i < 4; i++) {
        holders[i] = (struct holder){.stress = stress, .index = i * 5};
        assert_int_equal(pthread_create(&threads[i], NULL, turn_bit, &holders[i]), 0);
    }
    for (uint32_t i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    assert_int_equal(stress->wrong, 0);
    assert_int_equal(slot_change(word, SLOT_READY, SLOT_EMPTY, 1, NULL), 0);
}

static int tear_down(void **state)
{
    struct stress *stress = *state;
    segment_unlink_all(stress->pool.instance);
    pool_detach(&stress->pool);
    close(stress->doorbell);
    free(stress->control);
    free(stress);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test_teardown(test_one_word, tear_down),
                                       cmocka_unit_test_teardown(test_stress, tear_down)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
