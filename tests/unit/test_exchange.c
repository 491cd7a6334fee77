/* The exchange between real processes: nobody reads before all have written, a raised epoch frees every waiter, and a
 * late arrival of an old epoch does not count. */
#include "shm/exchange.h"

#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>

#include <cmocka.h>

#define ROUNDS 3000u
#define VALUES 100u /* a worker writes in a round */

/* Of a test: what a failed one leaves is ended by tear_down(). */
struct world {
    char instance[INSTANCE_NAME_MAX];
    struct facts facts;
    struct control *control;
    pid_t children[MAX_WORKERS];
    uint32_t child_count;
};

static void open_world(struct world *world, uint32_t workers, uint32_t spin)
{
    static int number;
    *world = (struct world){
        .facts = {.workers = workers, .spin = spin, .max_rows = 2, .logit_rows = 1, .context = 64, .index_topk = 64}};
    snprintf(world->instance, sizeof world->instance, "test-exchange-%d-%d", (int)getpid(), number++);
    struct model_config *c = &world->facts.config;
    c->hidden = 512;
    c->vocab = 64;
    struct exchange_layout layout;
    exchange_layout(&world->facts, &layout);
    struct segment segment;
    struct error error;
    struct segment_options options = {.kind = SEGMENT_EXCHANGE, .node = -1, .populate_threads = 1};
    if (segment_create(world->instance, "exchange", layout.segment_bytes, &options, &segment, &error) < 0)
        fail_msg("%s", error.text);
    segment_detach(&segment);
    options.kind = SEGMENT_CONTROL;
    if (segment_create(world->instance, "control", sizeof(struct control), &options, &segment, &error) < 0)
        fail_msg("%s", error.text);
    world->control = segment.base;
    atomic_store(&world->control->epoch, 1);
}

static void close_world(struct world *world)
{
    control_detach(world->control);
    world->control = NULL;
    assert_int_equal(segment_unlink_all(world->instance), 2);
}

static int set_up(void **state)
{
    *state = calloc(1, sizeof(struct world));
    return *state ? 0 : -1;
}

static int tear_down(void **state)
{
    struct world *world = *state;
    for (uint32_t i = 0; i < world->child_count; i++) {
        kill(world->children[i], SIGKILL);
        waitpid(world->children[i], NULL, 0);
    }
    if (world->instance[0])
        segment_unlink_all(world->instance);
    free(world);
    return 0;
}

/* fork(), and the child ends with the test. */
static pid_t fork_child(struct world *world)
{
    assert_true(world->child_count < MAX_WORKERS);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid > 0)
        world->children[world->child_count++] = pid;
    return pid;
}

/* Waits for it and returns wait's status. */
static int end_child(struct world *world, pid_t pid)
{
    int status = -1;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    for (uint32_t i = 0; i < world->child_count; i++)
        if (world->children[i] == pid)
            world->children[i] = world->children[--world->child_count];
    return status;
}

static void attach(struct world *world, uint32_t self, struct exchange *ret_exchange)
{
    struct error error;
    if (exchange_attach(world->instance, &world->facts, world->control, self, ret_exchange, &error) < 0)
        fail_msg("%s", error.text);
    exchange_reset(ret_exchange, atomic_load(&world->control->epoch));
}

static uint32_t value_of(uint32_t worker, uint32_t round, uint32_t i)
{
    return (worker * 1000003u + round) * 2654435761u + i;
}

/* One worker: writes its part, meets, reads all parts. Returns the number of wrong values. */
static uint32_t run_rounds_in(struct world *world, struct exchange *exchange, uint32_t rounds)
{
    uint32_t wrong = 0, self = exchange->self;
    for (uint32_t round = 0; round < rounds; round++) {
        uint32_t *buffer = exchange_buffer(exchange);
        for (uint32_t i = 0; i < VALUES; i++)
            buffer[self * VALUES + i] = value_of(self, round, i);
        if (exchange->method->barrier(exchange) != 0)
            return UINT32_MAX;
        for (uint32_t w = 0; w < world->facts.workers; w++)
            for (uint32_t i = 0; i < VALUES; i++)
                wrong += buffer[w * VALUES + i] != value_of(w, round, i);
    }
    return wrong;
}

static uint32_t run_rounds(struct world *world, uint32_t self, uint32_t rounds)
{
    struct exchange exchange;
    attach(world, self, &exchange);
    uint32_t wrong = run_rounds_in(world, &exchange, rounds);
    exchange_detach(&exchange);
    return wrong;
}

static pid_t start(struct world *world, uint32_t self, uint32_t rounds)
{
    pid_t pid = fork_child(world);
    if (pid == 0)
        _exit(run_rounds(world, self, rounds) == 0 ? 0 : 1);
    return pid;
}

static void test_rounds(void **state)
{
    struct world *world = *state;
    for (uint32_t workers = 1; workers <= 8; workers = workers * 2 + 1)
        for (uint32_t spin = 0; spin < 2; spin++) {
            if (spin && workers > 2)
                continue; /* spinning is for teams that fit the cores */
            pid_t pids[MAX_WORKERS];
            open_world(world, workers, spin);
            for (uint32_t w = 1; w < workers; w++)
                pids[w] = start(world, w, ROUNDS);
            assert_int_equal(run_rounds(world, 0, ROUNDS), 0);
            for (uint32_t w = 1; w < workers; w++)
                assert_int_equal(end_child(world, pids[w]), 0);
            close_world(world);
        }
}

struct member {
    struct world *world;
    const struct exchange *shared; /* its mapping is everybody's here, so that TSan sees who meets in it */
    pthread_t thread;
    uint32_t self, wrong;
};

static void *run_member(void *argument)
{
    struct member *member = argument;
    struct exchange exchange = *member->shared;
    exchange.self = member->self;
    exchange_reset(&exchange, atomic_load(&member->world->control->epoch));
    member->wrong = run_rounds_in(member->world, &exchange, ROUNDS / 3);
    return NULL;
}

/* Workers as threads: rows are stored and read with plain accesses, and the barrier alone orders them. */
static void test_threads(void **state)
{
    struct world *world = *state;
    for (uint32_t spin = 0; spin < 2; spin++) {
        struct exchange shared;
        struct member members[3];
        open_world(world, 3, spin);
        attach(world, 0, &shared);
        for (uint32_t w = 0; w < 3; w++) {
            members[w] = (struct member){.world = world, .shared = &shared, .self = w};
            assert_int_equal(pthread_create(&members[w].thread, NULL, run_member, &members[w]), 0);
        }
        for (uint32_t w = 0; w < 3; w++)
            pthread_join(members[w].thread, NULL);
        for (uint32_t w = 0; w < 3; w++)
            assert_int_equal(members[w].wrong, 0);
        exchange_detach(&shared);
        close_world(world);
    }
}

static void sleep_ms(long ms)
{
    nanosleep(&(struct timespec){.tv_nsec = ms * 1000000}, NULL);
}

/* A worker that waits for one that never comes, then, in the new epoch, meets it. Exits 0 when both ended as they
 * should. */
static void wait_in_vain(struct world *world, uint32_t self)
{
    struct exchange exchange;
    attach(world, self, &exchange);
    exchange_reset(&exchange, 1); /* the epoch may have been raised before this process came so far */
    if (exchange.method->barrier(&exchange) != -ESTALE)
        _exit(1);
    exchange_reset(&exchange, atomic_load(&world->control->epoch));
    _exit(exchange.method->barrier(&exchange) == 0 ? 0 : 2);
}

static void test_epoch(void **state)
{
    struct world *world = *state;
    for (int round = 0; round < 20; round++) {
        open_world(world, 3, 0);
        pid_t pids[2];
        for (uint32_t w = 0; w < 2; w++)
            if ((pids[w] = fork_child(world)) == 0)
                wait_in_vain(world, w + 1);
        sleep_ms(round % 4 * 3); /* asleep or not yet */
        struct exchange exchange;
        attach(world, 0, &exchange); /* in the old epoch, and does not come */
        assert_int_equal(control_raise_epoch(world->control), 2);
        exchange_reset(&exchange, 2);
        assert_int_equal(exchange.method->barrier(&exchange), 0);
        for (int i = 0; i < 2; i++)
            assert_int_equal(end_child(world, pids[i]), 0);
        exchange_detach(&exchange);
        close_world(world);
    }
}

/* A killed waiter leaves nothing that would hold the others up. */
static void test_killed_waiter(void **state)
{
    struct world *world = *state;
    open_world(world, 2, 0);
    pid_t pid = start(world, 1, 1);
    sleep_ms(20);
    kill(pid, SIGKILL);
    assert_true(WIFSIGNALED(end_child(world, pid)));
    control_raise_epoch(world->control);
    pid = start(world, 1, 50);
    assert_int_equal(run_rounds(world, 0, 50), 0);
    assert_int_equal(end_child(world, pid), 0);
    close_world(world);
}

/* What a stalled worker writes late carries its old epoch. */
static void test_late_arrival(void **state)
{
    struct world *world = *state;
    open_world(world, 2, 0);
    struct exchange mine, late;
    attach(world, 0, &mine);
    attach(world, 1, &late);
    control_raise_epoch(world->control);
    exchange_reset(&mine, 2);
    late.sequence = 7; /* far ahead, in epoch 1 */
    assert_int_equal(late.method->barrier(&late), -ESTALE);
    pid_t pid = fork_child(world);
    if (pid == 0)
        _exit(mine.method->barrier(&mine) == 0 ? 0 : 1);
    sleep_ms(30);
    assert_int_equal(waitpid(pid, NULL, WNOHANG), 0); /* still waiting */
    exchange_reset(&late, 2);
    assert_int_equal(late.method->barrier(&late), 0);
    assert_int_equal(end_child(world, pid), 0);
    exchange_detach(&mine);
    exchange_detach(&late);
    close_world(world);
}

/* Also a barrier that nobody has to be waited for ends a step of an old epoch. */
static void test_raised_before(void **state)
{
    struct world *world = *state;
    for (uint32_t workers = 1; workers <= 2; workers++) {
        struct exchange mine;
        open_world(world, workers, 0);
        attach(world, 0, &mine);
        atomic_store(&world->control->workers[1].arrived, UINT64_C(1) << 32 | 1); /* in the first exchange of epoch 1 */
        control_raise_epoch(world->control);
        assert_int_equal(mine.method->barrier(&mine), -ESTALE);
        exchange_detach(&mine);
        close_world(world);
    }
}

/* The supervisor alone frees who sleeps at a barrier: nobody else says anything. */
static void test_freed_by_epoch(void **state)
{
    struct world *world = *state;
    struct exchange mine;
    open_world(world, 2, 0);
    attach(world, 1, &mine);
    pid_t pid = fork_child(world);
    if (pid == 0)
        _exit(mine.method->barrier(&mine) == -ESTALE ? 0 : 1);
    sleep_ms(30);
    control_raise_epoch(world->control);
    assert_int_equal(end_child(world, pid), 0);
    exchange_detach(&mine);
    close_world(world);
}

static void test_layout(void **state)
{
    (void)state;
    struct facts facts = {.workers = 2, .max_rows = 8, .logit_rows = 4, .context = 4096, .index_topk = 2048};
    struct model_config *c = &facts.config;
    c->hidden = 6144, c->q_lora = 2048, c->kv_lora = 512, c->qk_rope = 64, c->index_dim = 128, c->index_heads = 32,
    c->heads = 64;
    c->v_head = 256, c->dense_width = 12288, c->shared_experts = 1, c->expert_width = 2048, c->top_k = 8,
    c->vocab = 154880, c->mtp_layers = 1;
    struct exchange_layout layout;
    exchange_layout(&facts, &layout);
    assert_true(layout.buffer_bytes >= EXCHANGE_WAVE_BYTES + 8u * 64 * 256 * 4); /* attention output */
    assert_true(layout.buffer_bytes >= 8u * 2 * (2048 * 8 + 4));                 /* index candidates */
    assert_true(layout.logits >= layout.buffers + 2 * layout.buffer_bytes);
    assert_true(layout.draft_logits >= layout.logits + (size_t)4 * 154880 * 4);
    assert_true(layout.segment_bytes >= layout.draft_logits + (size_t)4 * 154880 * 4);
    facts.index_topk = 4096; /* every key is kept: no candidates travel */
    assert_int_equal(exchange_candidates(&facts), 0);
}

#define WORLD_TEST(test) cmocka_unit_test_setup_teardown(test, set_up, tear_down)

int main(void)
{
    const struct CMUnitTest tests[] = {
        WORLD_TEST(test_rounds),         WORLD_TEST(test_threads),      WORLD_TEST(test_epoch),
        WORLD_TEST(test_killed_waiter),  WORLD_TEST(test_late_arrival), WORLD_TEST(test_raised_before),
        WORLD_TEST(test_freed_by_epoch), cmocka_unit_test(test_layout),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
