/* The pool's size while it serves: shrinking below what is pinned, memory that comes back, growing again, a /dev/shm
 * that is full. The last needs a /dev/shm of its own, so this process takes a mount namespace where it may. */
#include <errno.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "proto/cleanup.h"
#include "tests/unit/iod_harness.h"

#define EXPERTS 16u
#define ALL (2 * EXPERTS)
#define TOP_K 4u
#define PATIENCE 20000 /* ms */
#define SHM_BYTES (96u << 20)

/* A blob is 1.75 MiB. */
static const struct geometry geometry = {
    .hidden = 1024, .width = 1024, .layers = 3, .experts = EXPERTS, .top_k = TOP_K, .dense_bytes = 1u << 20};
static char scratch[256], container_path[300];
static bool own_shm; /* /dev/shm is ours, SHM_BYTES large */

static void pause_briefly(void)
{
    nanosleep(&(struct timespec){.tv_nsec = 2000000}, NULL);
}

static void resize(struct world *world, uint32_t target)
{
    uint64_t one = 1;
    atomic_store(&world->control->pool_target, target);
    assert_int_equal(write(world->doorbell, &one, sizeof(one)), sizeof(one));
}

static void await_slots(struct world *world, uint32_t slots)
{
    uint64_t end = harness_now_ms() + PATIENCE;
    while (pool_slots_ready(&world->pool) != slots && harness_now_ms() < end)
        pause_briefly();
    assert_int_equal(pool_slots_ready(&world->pool), slots);
    assert_int_equal(pool_attach_objects(&world->pool, NULL), 0);
}

/* Bytes of memory that the pool's objects have. */
static uint64_t pool_memory(const struct world *world)
{
    uint64_t bytes = 0;
    for (uint32_t n = 0; n < world->pool.nodes; n++) {
        char path[200];
        struct stat stat_;
        snprintf(path, sizeof(path), "/dev/shm/calypte.%s.pool.%u.0", world->instance, n);
        if (stat(path, &stat_) == 0)
            bytes += (uint64_t)stat_.st_blocks * 512;
    }
    return bytes;
}

static uint64_t slot_bytes(const struct world *world)
{
    return world->pool.slice_bytes * EXPERT_SLICES;
}

/* The memory is given back after `slots_ready` has fallen. */
static void await_memory(const struct world *world, uint64_t most)
{
    uint64_t end = harness_now_ms() + PATIENCE;
    while (pool_memory(world) > most && harness_now_ms() < end)
        pause_briefly();
    assert_true(pool_memory(world) <= most);
}

static void use_right(struct world *world, uint32_t expert, uint64_t tick, struct slot_ref *ret_ref)
{
    int status = world_get(world, 0, expert, tick, PATIENCE, ret_ref);
    if (status < 0)
        fail_msg("expert %u: %d", expert, status);
    assert_int_equal(world_wrong_words(world, *ret_ref, expert, 1), 0);
}

static void use_all(struct world *world, uint64_t tick)
{
    world_tick(world, 0, tick);
    for (uint32_t e = 0; e < ALL; e++) {
        struct slot_ref ref;
        use_right(world, e, tick, &ref);
        world_put(world, 0, ref);
    }
}

static void start(struct iod_thread *iod, struct world *world)
{
    if (iod_thread_start(iod, world, NULL) < 0)
        fail_msg("%s", iod->error.text);
}

/* Pinned experts stay where they are, and right, until they are given back; then the pool is small, its memory is
 * free, and it serves; growing again, it holds everything. */
static void test_shrink_below_pinned(void **state)
{
    (void)state;
    for (uint32_t nodes = 1; nodes <= 2; nodes++) {
        struct world world;
        struct iod_thread iod;
        struct slot_ref pinned[8];
        world_open(&world, scratch, container_path, &(struct world_options){ALL, nodes, 1, IO_AUTO});
        start(&iod, &world);
        use_all(&world, 2);
        await_slots(&world, ALL);
        world_tick(&world, 0, 3);
        for (uint32_t i = 0; i < 8; i++)
            use_right(&world, i * 4, 3, &pinned[i]);
        resize(&world, TOP_K);
        /* Nobody can take away what is pinned: others come and go in the slots that stay. */
        for (uint64_t tick = 4; tick < 8; tick++) {
            struct slot_ref ref;
            world_tick(&world, 0, tick);
            use_right(&world, (uint32_t)tick * 4 + 1, tick, &ref);
            world_put(&world, 0, ref);
        }
        assert_int_equal(pool_slots_ready(&world.pool), ALL);
        for (uint32_t i = 0; i < 8; i++) {
            assert_int_equal(world_wrong_words(&world, pinned[i], i * 4, 1), 0);
            world_put(&world, 0, pinned[i]);
        }
        await_slots(&world, TOP_K);
        await_memory(&world, TOP_K * slot_bytes(&world));
        use_all(&world, 10);
        assert_true(pool_memory(&world) <= TOP_K * slot_bytes(&world));
        resize(&world, ALL);
        await_slots(&world, ALL);
        assert_true(pool_memory(&world) >= ALL * slot_bytes(&world));
        use_all(&world, 11);
        uint64_t loads = atomic_load(&world.control->iod.loads);
        use_all(&world, 12);
        assert_int_equal(atomic_load(&world.control->iod.loads), loads); /* all are there */
        assert_int_equal(iod_thread_stop(&iod), 0);
        world_close(&world);
    }
    free(iod_thread_log());
}

/* Sizes that change while every expert is asked for, over and over: what comes is right. */
static void test_resize_under_load(void **state)
{
    (void)state;
    struct world world;
    struct iod_thread iod;
    world_open(&world, scratch, container_path, &(struct world_options){ALL, 2, 1, IO_AUTO});
    start(&iod, &world);
    srand(3);
    for (uint64_t tick = 2; tick < 40; tick++) {
        resize(&world, TOP_K + (uint32_t)rand() % (ALL - TOP_K + 1));
        use_all(&world, tick);
    }
    resize(&world, UINT32_MAX); /* more than the table has */
    await_slots(&world, ALL);
    resize(&world, 0); /* fewer than a step needs */
    await_slots(&world, TOP_K);
    use_all(&world, 50);
    assert_int_equal(iod_thread_stop(&iod), 0);
    world_close(&world);
    char *log = iod_thread_log();
    assert_int_equal(strncmp(log, "dense weights: ", 15), 0); /* that line, and no other */
    assert_string_equal(strchr(log, '\n'), "\n");
    free(log);
}

/* A daemon that is killed while its pool shrinks: the next one keeps what stands and goes on shrinking. */
static void test_killed_while_shrinking(void **state)
{
    (void)state;
    char text[1200];
    struct world world;
    struct iod_process process;
    struct slot_ref pinned;
    world_open(&world, scratch, container_path, &(struct world_options){ALL, 1, 1, IO_AUTO});
    iod_spawn(&world, false, &process);
    if (iod_wait_ready(&process, text) < 0)
        fail_msg("%s", text);
    use_all(&world, 2);
    await_slots(&world, ALL);
    world_tick(&world, 0, 3);
    use_right(&world, ALL - 1, 3, &pinned);
    resize(&world, TOP_K);
    iod_stop(&process, SIGKILL);
    iod_spawn(&world, false, &process);
    if (iod_wait_ready(&process, text) < 0)
        fail_msg("%s", text);
    assert_int_equal(world_wrong_words(&world, pinned, ALL - 1, 1), 0);
    world_put(&world, 0, pinned);
    await_slots(&world, TOP_K);
    await_memory(&world, TOP_K * slot_bytes(&world));
    use_all(&world, 10);
    iod_stop(&process, SIGKILL);
    /* ... or between lowering `slots_ready` and the last hole, or while it populated: memory that nobody counts. */
    const struct segment_options options = {.kind = SEGMENT_RAW, .node = -1, .populate_threads = 1};
    assert_int_equal(segment_populate(world.instance, "pool.0.0", ALL * slot_bytes(&world), TOP_K * slot_bytes(&world),
                                      slot_bytes(&world), &options, NULL),
                     0);
    assert_true(pool_memory(&world) > TOP_K * slot_bytes(&world));
    iod_spawn(&world, false, &process);
    if (iod_wait_ready(&process, text) < 0)
        fail_msg("%s", text);
    assert_true(pool_memory(&world) <= TOP_K * slot_bytes(&world));
    use_all(&world, 11);
    iod_stop(&process, SIGTERM);
    world_close(&world);
}

static void hold(struct world *world, uint64_t bits)
{
    uint64_t one = 1;
    atomic_store(&world->control->holds[0], bits);
    atomic_fetch_add(&world->control->holds_changed, 1);
    assert_int_equal(write(world->doorbell, &one, sizeof(one)), sizeof(one));
}

/* Held experts stay while all others come and go, through another size and another daemon; with everything held,
 * half of the slots still serve. */
static void test_held(void **state)
{
    (void)state;
    struct world world;
    struct iod_thread iod;
    struct slot_ref ref;
    world_open(&world, scratch, container_path, &(struct world_options){ALL, 1, 1, IO_AUTO});
    atomic_store(&world.control->pool_target, 2 * TOP_K);
    start(&iod, &world);
    await_slots(&world, 2 * TOP_K);
    hold(&world, 1u << 3 | 1u << 17);
    for (uint64_t tick = 2; tick < 12; tick++) {
        use_all(&world, tick);
        assert_int_equal(pool_lookup(&world.pool, 3, &ref), 0);
        assert_int_equal(pool_lookup(&world.pool, 17, &ref), 0);
        resize(&world, tick % 2 ? 2 * TOP_K : 3 * TOP_K);
        if (tick == 6) {
            assert_int_equal(iod_thread_stop(&iod), 0);
            start(&iod, &world);
        }
    }
    hold(&world, UINT64_MAX);
    use_all(&world, 20);
    resize(&world, TOP_K);
    use_all(&world, 21);
    await_slots(&world, TOP_K);
    use_all(&world, 22);
    assert_int_equal(iod_thread_stop(&iod), 0);
    world_close(&world);
    free(iod_thread_log());
}

static void await_held(const struct world *world, uint32_t held)
{
    uint64_t end = harness_now_ms() + PATIENCE;
    while (atomic_load(&world->control->iod.held) != held && harness_now_ms() < end)
        pause_briefly();
    assert_int_equal(atomic_load(&world->control->iod.held), held);
}

/* Uses of some experts, until the daemon knows of them. */
static void heat_up(struct world *world, const uint32_t *experts, uint32_t count, uint32_t times)
{
    uint64_t end = harness_now_ms() + PATIENCE, one = 1;
    for (uint32_t i = 0; i < times * count; i++)
        world_use(world, experts[i % count], 0);
    assert_int_equal(write(world->doorbell, &one, sizeof(one)), sizeof(one));
    while (atomic_load(&world->control->iod.uses_read) != uses_end(&world->control->uses) && harness_now_ms() < end)
        pause_briefly();
    assert_true(atomic_load(&world->control->iod.uses_read) == uses_end(&world->control->uses));
}

/* More is held than a smaller pool may hold: the warmest of it stay, also when others become hotter, the first of those that
 * are alike; and all of it once the pool has grown again. */
static void test_held_beyond_half(void **state)
{
    (void)state;
    static const uint32_t warm[] = {5, 9, 14}, hot[] = {20, 21, 22, 23, 24, 25}, kept[] = {1, 5, 9, 14};
    struct world world;
    struct iod_thread iod;
    struct slot_ref ref;
    world_open(&world, scratch, container_path, &(struct world_options){ALL, 1, 1, IO_AUTO});
    start(&iod, &world);
    await_slots(&world, ALL);
    hold(&world, (1u << EXPERTS) - 2); /* the first layer's but 0 */
    await_held(&world, EXPERTS - 1);
    use_all(&world, 2);
    heat_up(&world, warm, 3, 10);
    resize(&world, 2 * TOP_K);
    await_held(&world, TOP_K);
    await_slots(&world, 2 * TOP_K);
    heat_up(&world, hot, 6, 100);
    for (uint64_t tick = 3; tick < 6; tick++) {
        use_all(&world, tick);
        for (uint32_t i = 0; i < TOP_K; i++)
            assert_int_equal(pool_lookup(&world.pool, kept[i], &ref), 0);
    }
    resize(&world, ALL);
    await_held(&world, EXPERTS - 1);
    hold(&world, 0);
    await_held(&world, 0);
    assert_int_equal(iod_thread_stop(&iod), 0);
    world_close(&world);
    free(iod_thread_log());
}

/* A pool that grows is filled with what was used most, though nobody asks; what was never used is left where it is. */
static void test_filled_when_grown(void **state)
{
    (void)state;
    static const uint32_t used[] = {1, 3, 8, 9, 17, 21, 24, 30}, hot[] = {3, 24, 21};
    struct world world;
    struct iod_thread iod;
    struct slot_ref ref;
    uint64_t end = harness_now_ms() + PATIENCE;
    world_open(&world, scratch, container_path, &(struct world_options){ALL, 1, 1, IO_AUTO});
    resize(&world, TOP_K);
    start(&iod, &world);
    await_slots(&world, TOP_K);
    heat_up(&world, used, 8, 2);
    heat_up(&world, hot, 3, 10);
    resize(&world, 2 * TOP_K + 3); /* all but top_k may be guesses while they are read */
    while (atomic_load(&world.control->iod.loads) < 8 && harness_now_ms() < end)
        pause_briefly();
    await_slots(&world, 2 * TOP_K + 3);
    for (uint32_t i = 0; i < 8; i++)
        assert_int_equal(pool_lookup(&world.pool, used[i], &ref), 0);
    assert_int_equal(atomic_load(&world.control->iod.loads), 8);
    assert_int_equal(iod_thread_stop(&iod), 0);
    world_close(&world);
    free(iod_thread_log());
}

static bool need_own_shm(void)
{
    if (!own_shm)
        print_message("no /dev/shm of our own (needs root): left out\n");
    return own_shm;
}

/* More is wanted than /dev/shm has: one line, the pool stays at what stands and serves; a size that fits is taken. */
static void test_full_shm(void **state)
{
    (void)state;
    struct world world;
    struct iod_thread iod;
    if (!need_own_shm())
        skip();
    world_open(&world, scratch, container_path, &(struct world_options){400, 1, 1, IO_AUTO});
    atomic_store(&world.control->pool_target, TOP_K);
    start(&iod, &world);
    assert_int_equal(pool_slots_ready(&world.pool), TOP_K);
    resize(&world, 400); /* 700 MiB */
    uint64_t end = harness_now_ms() + PATIENCE;
    while (atomic_load(&world.control->iod.pool_refused) != 400 && harness_now_ms() < end)
        pause_briefly();
    assert_int_equal(atomic_load(&world.control->iod.pool_refused), 400);
    use_all(&world, 2);
    assert_int_equal(pool_slots_ready(&world.pool), TOP_K);
    assert_true(pool_memory(&world) <= TOP_K * slot_bytes(&world));
    resize(&world, 2 * TOP_K);
    await_slots(&world, 2 * TOP_K);
    assert_int_equal(atomic_load(&world.control->iod.pool_refused), 0);
    use_all(&world, 3);
    assert_int_equal(iod_thread_stop(&iod), 0);
    char *log = iod_thread_log(), *said = strstr(log, "the pool stays at 4 of 400 slots: ");
    assert_non_null(said);
    assert_non_null(strstr(said, "/dev/shm"));
    assert_null(strstr(said + 1, "the pool stays"));
    free(log);
    world_close(&world);
}

/* The memory runs out in the middle: two nodes, each of which would fit alone. Nothing of the attempt is left. */
static void test_full_while_populating(void **state)
{
    (void)state;
    char instance[INSTANCE_NAME_MAX];
    struct pool pool;
    struct error error = {""};
    uint32_t end = 0;
    if (!need_own_shm())
        skip();
    snprintf(instance, sizeof(instance), "test-size-%d", (int)getpid());
    const struct pool_shape shape = {
        .slots = 64, .nodes = 2, .moe_layers = 1, .experts = 64, .slice_bytes = 256u << 10}; /* 1 MiB a node */
    assert_int_equal(pool_create(instance, &shape, &error), 0);
    assert_int_equal(pool_attach(instance, &pool, &error), 0);
    for (uint32_t round = 0; round < 20; round++) {
        assert_int_equal(pool_grow(&pool, 0, 4, false, false, &end, &error), 0);
        assert_int_equal(end, 4);
        int status = pool_grow(&pool, 4, 64, false, true, &end, &error);
        assert_int_equal(status, -ENOSPC);
        assert_int_equal(end, 4);
        assert_int_equal(pool_slots_ready(&pool), 4);
        for (uint32_t n = 0; n < 2; n++) {
            char path[200];
            struct stat stat_;
            snprintf(path, sizeof(path), "/dev/shm/calypte.%s.pool.%u.0", instance, n);
            assert_int_equal(stat(path, &stat_), 0);
            assert_int_equal(stat_.st_blocks * 512, 4 << 20);
        }
        pool_publish(&pool, 0);
        assert_int_equal(pool_punch(&pool, 0, 64, &error), 0);
    }
    pool_detach(&pool);
    segment_unlink_all(instance);
}

int main(void)
{
    char options[64];
    snprintf(options, sizeof(options), "size=%u", SHM_BYTES);
    own_shm = unshare(CLONE_NEWNS) == 0 && mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) == 0 &&
              mount("tmpfs", "/dev/shm", "tmpfs", 0, options) == 0;
    harness_scratch("test_size", scratch);
    snprintf(container_path, sizeof(container_path), "%s/container", scratch);
    harness_make_container(container_path, &geometry);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_shrink_below_pinned),    cmocka_unit_test(test_resize_under_load),
        cmocka_unit_test(test_killed_while_shrinking), cmocka_unit_test(test_full_shm),
        cmocka_unit_test(test_full_while_populating),  cmocka_unit_test(test_held),
        cmocka_unit_test(test_held_beyond_half),       cmocka_unit_test(test_filled_when_grown),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    harness_end(scratch);
    return failed;
}
