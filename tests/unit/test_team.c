/* The team's work without the model: every unit is taken once, whoever takes it, and a thread that is held up loses its tail to the
 * others. */
#include "compute/model.h"

#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define THREADS_MOST 9u
#define UNITS_MOST 200u
#define JOBS 300u
#define PATIENCE_NS 20000000000u

/* Teams of 1 to THREADS_MOST threads that run the same jobs one after another. */
struct world {
    struct model *model;
    uint32_t begun[JOBS]
                  [UNITS_MOST]; /* how often a unit was taken: written by who takes it, read after the last barrier */
    uint32_t tail_part;
    _Atomic uint32_t done, wrong;
};

static struct world world;

static uint32_t units_of(uint32_t job)
{
    return job * 37 % (UNITS_MOST + 1);
}

static void *run_thread(void *argument)
{
    struct thread *thread = argument;
    for (uint32_t j = 0; j < JOBS; j++) {
        struct team_job job = team_begin(thread, units_of(j), world.tail_part);
        struct range units;
        while (team_take(&job, &units))
            for (uint32_t u = units.first; u < units.first + units.count; u++) {
                world.begun[j][u]++;
                if (u % 8 == 0)
                    sched_yield();
            }
        if (j % 3 == 0 && team_sync(thread, (int)j) != (int)j) /* some jobs follow one another without a barrier */
            atomic_fetch_add(&world.wrong, 1);
    }
    return NULL;
}

/* One job; thread 0 does not go on from its head before everything else is done. */
static void *run_held(void *argument)
{
    struct thread *thread = argument;
    struct team_job job = team_begin(thread, UNITS_MOST, world.tail_part);
    struct range units;
    uint64_t begun = clock_ns();
    team_sync(thread, 0); /* all have begun */
    while (team_take(&job, &units)) {
        bool head = thread->index == 0 && units.first == 0;
        while (head && atomic_load(&world.done) + units.count < UNITS_MOST && clock_ns() - begun < PATIENCE_NS)
            sched_yield();
        atomic_fetch_add(&world.done, units.count);
        if (thread->index == 0 && !head)
            atomic_fetch_add(&world.wrong, 1);
    }
    if (clock_ns() - begun >= PATIENCE_NS)
        atomic_fetch_add(&world.wrong, 1);
    return NULL;
}

static void run_team(uint32_t threads, void *(*run)(void *))
{
    pthread_t ids[THREADS_MOST];
    size_t bytes = (sizeof *world.model + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE;
    world.model = aligned_alloc(CACHE_LINE, bytes);
    assert_non_null(world.model);
    memset(world.model, 0, bytes);
    team_init(&world.model->team, threads, 0);
    world.model->state.threads = aligned_alloc(CACHE_LINE, threads * sizeof(struct thread));
    assert_non_null(world.model->state.threads);
    for (uint32_t t = 0; t < threads; t++)
        world.model->state.threads[t] = (struct thread){.model = world.model, .index = t};
    for (uint32_t t = 0; t < threads; t++)
        if (pthread_create(&ids[t], NULL, run, &world.model->state.threads[t]) != 0)
            abort(); /* the others wait for it */
    for (uint32_t t = 0; t < threads; t++)
        pthread_join(ids[t], NULL);
    free(world.model->state.threads);
    free(world.model);
    assert_int_equal(atomic_load(&world.wrong), 0);
}

static void test_every_unit_once(void **state)
{
    (void)state;
    const uint32_t parts[] = {TAIL_ALL, TAIL_SOME, 8};
    for (uint32_t threads = 1; threads <= THREADS_MOST; threads++)
        for (uint32_t p = 0; p < sizeof parts / sizeof *parts; p++) {
            memset(&world, 0, sizeof world);
            world.tail_part = parts[p];
            run_team(threads, run_thread);
            for (uint32_t j = 0; j < JOBS; j++)
                for (uint32_t u = 0; u < UNITS_MOST; u++)
                    if (world.begun[j][u] != (u < units_of(j)))
                        fail_msg("%u threads, tail 1/%u, job %u: unit %u was taken %u times", threads, parts[p], j, u,
                                 world.begun[j][u]);
        }
}

static void test_tail_of_a_held_thread(void **state)
{
    (void)state;
    for (uint32_t threads = 2; threads <= THREADS_MOST; threads++) {
        memset(&world, 0, sizeof world);
        world.tail_part = TAIL_SOME;
        run_team(threads, run_held);
        assert_int_equal(atomic_load(&world.done), UNITS_MOST);
    }
}

/* One thread has it all, in one piece. */
static void test_alone(void **state)
{
    (void)state;
    memset(&world, 0, sizeof world);
    struct model *model = aligned_alloc(CACHE_LINE, (sizeof *model + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE);
    assert_non_null(model);
    struct thread thread = {.model = model};
    model->state.threads = &thread;
    team_init(&model->team, 1, 0);
    struct team_job job = team_begin(&thread, 13, TAIL_ALL);
    struct range units;
    assert_true(team_take(&job, &units));
    assert_int_equal(units.first, 0);
    assert_int_equal(units.count, 13);
    assert_false(team_take(&job, &units));
    job = team_begin(&thread, 0, TAIL_SOME);
    assert_false(team_take(&job, &units));
    free(model);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_alone),
        cmocka_unit_test(test_every_unit_once),
        cmocka_unit_test(test_tail_of_a_held_thread),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
