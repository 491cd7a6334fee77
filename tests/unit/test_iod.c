/* The I/O daemon against a real container and real shared memory; the test is supervisor and workers. Some tests run
 * calypte-iod itself, some its loader in a thread, over a method that hurts. */
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "proto/cleanup.h"
#include "shm/dense.h"
#include "shm/futex.h"
#include "tests/unit/faulty_method.h"
#include "tests/unit/iod_harness.h"

#define EXPERTS 16u
#define LAYERS 3u /* 2 of them MoE */
#define ALL (2 * EXPERTS)
#define TOP_K 4u
#define PATIENCE 20000 /* ms; far more than anything takes, for machines under load */

/* Slices of 224 KiB, so a blob is 1.75 MiB; over two nodes each half is a piece of its own. */
static const struct geometry geometry = {
    .hidden = 1024, .width = 1024, .layers = LAYERS, .experts = EXPERTS, .top_k = TOP_K, .dense_bytes = 5u << 20};
static char scratch[256], container_path[300];

static void layer_file(uint32_t layer, char ret_path[static 400])
{
    snprintf(ret_path, 400, "%s/experts-0-%05u.safetensors", container_path, layer);
}

static uint64_t blob_offset(uint32_t expert)
{
    struct container *container;
    assert_int_equal(container_open(container_path, &container, NULL), 0);
    uint64_t offset = container->experts[expert / EXPERTS].stripes[0].offsets[expert % EXPERTS];
    container_close(container);
    return offset;
}

static void get_right(struct world *world, uint32_t worker, uint32_t expert, uint64_t tick, struct slot_ref *ret_ref)
{
    int status = world_get(world, worker, expert, tick, PATIENCE, ret_ref);
    if (status < 0)
        fail_msg("expert %u: %d", expert, status);
    assert_int_equal(world_wrong_words(world, *ret_ref, expert, 1), 0);
}

static void use_all(struct world *world, uint64_t tick)
{
    world_tick(world, 0, tick);
    for (uint32_t e = 0; e < ALL; e++) {
        struct slot_ref ref;
        get_right(world, 0, e, tick, &ref);
        world_put(world, 0, ref);
    }
}

static uint64_t loads_of(const struct world *world)
{
    return atomic_load(&world->control->iod.loads);
}

static void start(struct iod_thread *iod, struct world *world, const struct io_method *method)
{
    if (iod_thread_start(iod, world, method) < 0)
        fail_msg("%s", iod->error.text);
}

static void check_dense(const struct world *world)
{
    struct dense dense;
    struct error error;
    if (dense_attach(world->instance, &dense, &error) < 0)
        fail_msg("%s", error.text);
    assert_int_equal(dense.count, 5);
    for (uint32_t f = 0; f < 2; f++) {
        char name[64];
        snprintf(name, sizeof(name), "model.big.%u.weight", f);
        const uint64_t shape[] = {geometry.dense_bytes / 16, 2}, three[] = {3};
        const uint64_t *words = dense_find(&dense, name, DTYPE_U64, 2, shape, &error);
        assert_non_null(words);
        for (size_t i = 0; i < geometry.dense_bytes / 8; i++)
            assert_true(words[i] == dense_word(f, i));
        snprintf(name, sizeof(name), "model.small.%u", f);
        const float *small = dense_find(&dense, name, DTYPE_F32, 1, three, &error);
        assert_true(small && small[0] == 1 && small[2] == (float)f);
        assert_null(dense_find(&dense, name, DTYPE_F16, 1, three, &error));
        assert_non_null(strstr(error.text, name));
    }
    assert_null(dense_find(&dense, "padding", DTYPE_U8, 1, (const uint64_t[]){1}, &error));
    const int32_t *exponents =
        dense_find(&dense, "experts.exponents", DTYPE_I32, 3, (const uint64_t[]){2, EXPERTS, 3}, &error);
    assert_non_null(exponents);
    for (int e = 0; e < (int)ALL; e++) {
        for (int m = 0; m < 3; m++)
            assert_int_equal(exponents[e * 3 + m], (e % (int)EXPERTS + m) % 7 - 3);
    }
    dense_detach(&dense);
}

/* Both methods, one and more nodes, a pool of all and the smallest pool: everything comes and is right; hits read
 * nothing. */
static void test_load_everything(void **state)
{
    (void)state;
    static const struct world_options cases[] = {{ALL, 1, 1, IO_URING},
                                                 {ALL, 2, 1, IO_PREAD},
                                                 {TOP_K, 1, 1, IO_PREAD},
                                                 {TOP_K, 8, 1, IO_URING},
                                                 {TOP_K + 3, 4, 1, IO_AUTO}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct world world;
        struct iod_thread iod;
        world_open(&world, scratch, container_path, &cases[i]);
        start(&iod, &world, NULL);
        assert_int_equal(world.control->iod.method, cases[i].io == IO_PREAD ? IO_PREAD : IO_URING);
        check_dense(&world);
        assert_true(world.control->iod.dense_bytes > 2 * geometry.dense_bytes);
        use_all(&world, 10);
        assert_int_equal(loads_of(&world), ALL);
        use_all(&world, 11);
        if (cases[i].slots == ALL) {
            assert_int_equal(loads_of(&world), ALL);
            assert_int_equal(world.control->iod.evictions, 0);
        } else {
            assert_true(world.control->iod.evictions >= ALL - cases[i].slots);
        }
        assert_true(world.control->iod.verified_bytes >= ALL * world.pool.slice_bytes * EXPERT_SLICES);
        assert_int_equal(iod_thread_stop(&iod), 0);
        world_close(&world);
    }
    free(iod_thread_log());
}

/* What worker 0 does with the experts of a layer: asks for all that it cannot pin, uses those that it can, sleeps when
 * there is none, until all were used. 0, -EBADMSG for wrong bytes, -ETIMEDOUT. */
static int use_in_waves(struct world *world, uint32_t worker, uint32_t first, uint32_t count, uint64_t tick)
{
    _Atomic uint32_t *published = &world->control->workers[worker].published;
    bool used[ALL] = {false}, asked[ALL] = {false};
    uint64_t end = harness_now_ms() + PATIENCE;
    world_tick(world, worker, tick);
    for (uint32_t left = count; left > 0;) {
        uint32_t seen = atomic_load(published), before = left;
        for (uint32_t e = 0; e < count; e++) {
            uint32_t expert = (first + e) % ALL;
            struct slot_ref ref;
            int status = used[e] ? 1 : pool_pin(&world->pool, expert, worker, tick, &ref);
            if (status == 0) {
                size_t wrong = world_wrong_words(world, ref, expert, 16);
                world_put(world, worker, ref);
                if (wrong)
                    return -EBADMSG;
                used[e] = true;
                left--;
            } else if ((status == -ENOENT || status == -ESTALE) && !asked[e]) {
                world_ask(world, worker, expert, tick);
                asked[e] = true;
            }
        }
        if (harness_now_ms() > end)
            return -ETIMEDOUT;
        if (left == before)
            futex_wait(published, seen, 1000);
    }
    return 0;
}

/* All experts at once through a pool of top_k slots. */
static void test_wave(void **state)
{
    (void)state;
    struct world world;
    struct iod_thread iod;
    world_open(&world, scratch, container_path, &(struct world_options){TOP_K, 1, 1, IO_URING});
    start(&iod, &world, NULL);
    for (uint64_t tick = 1; tick <= 6; tick++)
        assert_int_equal(use_in_waves(&world, 0, 0, ALL, tick), 0);
    iod_thread_stop(&iod);
    assert_true(loads_of(&world) <= 6 * ALL); /* none was evicted while it was owed, and read twice */
    world_close(&world);
}

/* --- a method that hurts --- */

/* A failure that a fault of the method can cause legally: the same piece hit by EIO twice. */
static void use_all_patiently(struct world *world, uint64_t tick)
{
    world_tick(world, 0, tick);
    for (uint32_t e = 0; e < ALL; e++) {
        struct slot_ref ref;
        int status = -EIO;
        for (int tries = 0; status == -EIO && tries < 20; tries++)
            status = world_get(world, 0, e, tick, PATIENCE, &ref);
        assert_int_equal(status, 0);
        assert_int_equal(world_wrong_words(world, ref, e, 1), 0);
        world_put(world, 0, ref);
    }
}

static void test_faults(void **state)
{
    (void)state;
    static const uint32_t mixes[] = {FAULT_SHORT,
                                     FAULT_AGAIN,
                                     FAULT_HOLD,
                                     FAULT_REFUSE | FAULT_SHORT,
                                     FAULT_SMALL_RING | FAULT_REFUSE,
                                     FAULT_SHORT | FAULT_EIO | FAULT_AGAIN | FAULT_HOLD | FAULT_REFUSE};
    for (size_t i = 0; i < 2 * sizeof(mixes) / sizeof(mixes[0]); i++) {
        struct world world;
        struct iod_thread iod;
        plan_faults(i % 2 ? &io_method_uring : &io_method_pread, mixes[i / 2] & ~(uint32_t)FAULT_EIO);
        world_open(&world, scratch, container_path, &(struct world_options){TOP_K + 1, i % 4 < 2 ? 1 : 2, 1, IO_AUTO});
        start(&iod, &world, &faulty_method);
        check_dense(&world);
        fault_plan.faults = mixes[i / 2]; /* between two requests nothing is in flight */
        use_all_patiently(&world, 10);
        use_all_patiently(&world, 11);
        if (fault_plan.faults & (FAULT_SHORT | FAULT_AGAIN))
            assert_true(atomic_load(&fault_plan.spoiled) > 10);
        assert_int_equal(iod_thread_stop(&iod), 0);
        world_close(&world);
    }
    free(iod_thread_log());
}

/* Several workers want one expert while it is read: one read, all are told. */
static void test_coalescing(void **state)
{
    (void)state;
    struct world world;
    struct iod_thread iod;
    plan_faults(&io_method_uring, 0);
    world_open(&world, scratch, container_path, &(struct world_options){ALL, 1, 3, IO_AUTO});
    start(&iod, &world, &faulty_method);
    uint32_t before = atomic_load(&fault_plan.submitted);
    atomic_store(&fault_plan.hold_all, 1);
    for (uint32_t round = 0; round < 3; round++) {
        for (uint32_t w = 0; w < 3; w++)
            world_ask(&world, w, 5, 1);
    }
    for (int i = 0; atomic_load(&fault_plan.submitted) == before && i < PATIENCE; i++)
        usleep(1000);
    usleep(20000);
    uint32_t reads = atomic_load(&fault_plan.submitted) - before;
    assert_int_equal(reads, 1); /* a blob of 1.75 MiB is one piece */
    atomic_store(&fault_plan.hold_all, 0);
    for (uint32_t w = 0; w < 3; w++) {
        struct slot_ref ref;
        get_right(&world, w, 5, 1, &ref);
        for (int i = 0; !atomic_load(&world.control->workers[w].published) && i < PATIENCE; i++)
            usleep(1000); /* told just after the slot is READY */
        assert_true(atomic_load(&world.control->workers[w].published) > 0);
    }
    assert_int_equal(loads_of(&world), 1);
    assert_int_equal(atomic_load(&fault_plan.submitted) - before, 1);
    iod_thread_stop(&iod);
    world_close(&world);
}

static void expect_failure(struct world *world, uint32_t expert, uint32_t code, uint32_t slice, const char *words)
{
    struct slot_ref ref;
    assert_int_equal(world_get(world, 0, expert, world->tick, PATIENCE, &ref), -EIO);
    assert_int_equal(world->pool.slots[ref.index].error, code);
    assert_int_equal(world->pool.slots[ref.index].slice, slice);
    char *log = iod_thread_log(), name[64];
    snprintf(name, sizeof(name), "expert %u of layer %u, slice %u", expert % EXPERTS, expert / EXPERTS + 1, slice);
    if (!strstr(log, name) || !strstr(log, words) || !strstr(log, "experts-0-"))
        fail_msg("no line says \"%s\" and \"%s\": %s", name, words, log);
    free(log);
}

/* A flipped byte fails one expert with its name, again on a second try, and no longer once the byte is right. */
static void test_flipped_byte(void **state)
{
    (void)state;
    struct world world;
    struct iod_thread iod;
    char path[400];
    world_open(&world, scratch, container_path, &(struct world_options){TOP_K, 1, 1, IO_URING});
    start(&iod, &world, NULL);
    free(iod_thread_log());
    layer_file(2, path);
    uint64_t offset = blob_offset(EXPERTS + 3) + 6 * world.pool.slice_bytes + 12345;
    harness_flip_byte(path, offset, 0x10);
    for (int tries = 0; tries < 3; tries++) {
        expect_failure(&world, EXPERTS + 3, EBADMSG, 6, "checksum");
        struct slot_ref ref;
        for (uint32_t e = EXPERTS; e < EXPERTS + 3; e++) {
            get_right(&world, 0, e, world.tick, &ref);
            world_put(&world, 0, ref);
        }
        world_tick(&world, 0, ++world.tick);
    }
    assert_int_equal(world.control->iod.failures, 3);
    harness_flip_byte(path, offset, 0x10);
    struct slot_ref ref;
    get_right(&world, 0, EXPERTS + 3, world.tick, &ref);
    iod_thread_stop(&iod);
    world_close(&world);
}

/* Slots of failed loads are given out again: more failures than slots. */
static void test_many_failures(void **state)
{
    (void)state;
    struct world world;
    struct iod_thread iod;
    char path[400];
    world_open(&world, scratch, container_path, &(struct world_options){TOP_K, 1, 1, IO_URING});
    start(&iod, &world, NULL);
    free(iod_thread_log());
    layer_file(1, path);
    uint64_t offsets[2 * TOP_K];
    for (uint32_t e = 0; e < 2 * TOP_K; e++) {
        offsets[e] = blob_offset(e) + e * world.pool.slice_bytes;
        harness_flip_byte(path, offsets[e], 1);
    }
    for (uint32_t e = 0; e < 2 * TOP_K; e++) {
        expect_failure(&world, e, EBADMSG, e, "checksum");
        world_tick(&world, 0, ++world.tick); /* the step ends, the next one begins */
    }
    for (uint32_t e = 0; e < 2 * TOP_K; e++)
        harness_flip_byte(path, offsets[e], 1);
    use_all(&world, world.tick + 1);
    iod_thread_stop(&iod);
    world_close(&world);
}

static void test_truncated(void **state)
{
    (void)state;
    const struct io_method *methods[] = {&io_method_uring, &io_method_pread};
    char path[400], copy[420];
    layer_file(2, path);
    snprintf(copy, sizeof(copy), "%s/whole", scratch);
    for (size_t i = 0; i < 2; i++) {
        struct world world;
        struct iod_thread iod;
        struct stat stat_before;
        world_open(&world, scratch, container_path, &(struct world_options){TOP_K, 1, 1, IO_AUTO});
        start(&iod, &world, methods[i]);
        free(iod_thread_log());
        assert_int_equal(stat(path, &stat_before), 0);
        uint64_t cut = blob_offset(EXPERTS + 8) + 2 * world.pool.slice_bytes + (i ? 100 : 8192);
        _cleanup_close_ int fd = open(path, O_RDWR | O_CLOEXEC);
        _cleanup_free_ char *rest = malloc((size_t)stat_before.st_size - cut);
        assert_int_equal(pread(fd, rest, (size_t)stat_before.st_size - cut, (off_t)cut),
                         stat_before.st_size - (off_t)cut);
        assert_int_equal(ftruncate(fd, (off_t)cut), 0);
        expect_failure(&world, EXPERTS + 8, ENODATA, 2, "truncated");
        struct slot_ref ref;
        get_right(&world, 0, EXPERTS + 7, world.tick, &ref);
        iod_thread_stop(&iod);
        world_close(&world);

        /* A daemon that starts now refuses the file by name. */
        struct container *container;
        struct error error;
        assert_true(container_open(container_path, &container, &error) < 0);
        assert_non_null(strstr(error.text, "experts-0-00002"));
        assert_int_equal(pwrite(fd, rest, (size_t)stat_before.st_size - cut, (off_t)cut),
                         stat_before.st_size - (off_t)cut);
        assert_int_equal(fsync(fd), 0);
    }
}

/* A bad sector: one retry, then FAILED; the drive's neighbours are fine. */
static void test_bad_sector(void **state)
{
    (void)state;
    struct world world;
    struct iod_thread iod;
    plan_faults(&io_method_uring, 0);
    world_open(&world, scratch, container_path, &(struct world_options){TOP_K, 2, 1, IO_AUTO});
    start(&iod, &world, &faulty_method);
    free(iod_thread_log());
    fault_plan.broken_offset = blob_offset(4) + 5 * world.pool.slice_bytes;
    uint32_t before = atomic_load(&fault_plan.submitted);
    expect_failure(&world, 4, EIO, 4, "check the drive"); /* slices 4-7 are one read: the first that did not come */
    assert_int_equal(atomic_load(&fault_plan.submitted) - before, 3); /* two halves, one of them twice */
    struct slot_ref ref;
    get_right(&world, 0, 5, world.tick, &ref);
    fault_plan.broken_offset = 0;
    get_right(&world, 0, 4, world.tick, &ref);
    iod_thread_stop(&iod);
    world_close(&world);
}

static void test_damaged_dense(void **state)
{
    (void)state;
    struct world world;
    struct iod_thread iod;
    char path[400];
    struct container *container;
    assert_int_equal(container_open(container_path, &container, NULL), 0);
    uint64_t offset = safetensors_find(&container->dense[1].header, "model.small.1")->offset;
    container_close(container);
    snprintf(path, sizeof(path), "%s/dense-00002.safetensors", container_path);
    world_open(&world, scratch, container_path, &(struct world_options){TOP_K, 1, 1, IO_URING});
    harness_flip_byte(path, offset, 4);
    assert_int_equal(iod_thread_start(&iod, &world, NULL), -EBADMSG);
    if (!strstr(iod.error.text, "dense-00002") || !strstr(iod.error.text, "model.small.1"))
        fail_msg("%s", iod.error.text);
    struct dense dense;
    assert_int_equal(dense_attach(world.instance, &dense, NULL), -ENOENT); /* nothing half-loaded stays */
    harness_flip_byte(path, offset, 4);
    start(&iod, &world, NULL);
    check_dense(&world);
    iod_thread_stop(&iod);
    world_close(&world);
}

/* A second daemon keeps READY slots and the dense weights; another container's are replaced. */
static void test_restart_keeps(void **state)
{
    (void)state;
    struct world world;
    struct iod_thread iod;
    struct slot_ref refs[ALL], ref;
    world_open(&world, scratch, container_path, &(struct world_options){ALL, 2, 1, IO_URING});
    start(&iod, &world, NULL);
    use_all(&world, 5);
    for (uint32_t e = 0; e < ALL; e++)
        assert_int_equal(pool_lookup(&world.pool, e, &refs[e]), 0);
    iod_thread_stop(&iod);
    uint64_t dense_bytes = world.control->iod.dense_bytes;
    control_raise_epoch(world.control);
    world.pool.map[3] = world.pool.map[4]; /* the map is made right from the slots */
    world.pool.map[5] = POOL_NOWHERE;
    start(&iod, &world, NULL);
    use_all(&world, 6);
    for (uint32_t e = 0; e < ALL; e++) {
        assert_int_equal(pool_lookup(&world.pool, e, &ref), 0);
        assert_true(ref.index == refs[e].index && ref.generation == refs[e].generation);
    }
    assert_int_equal(loads_of(&world), ALL);
    assert_true(world.control->iod.dense_bytes == dense_bytes);
    check_dense(&world);
    iod_thread_stop(&iod);

    struct segment segment;
    assert_int_equal(segment_attach(world.instance, "dense", SEGMENT_DENSE, 0, true, &segment, NULL), 0);
    ((struct dense_header *)segment.base)->identity ^= 1;
    segment_detach(&segment);
    start(&iod, &world, NULL);
    assert_true(world.control->iod.dense_bytes == 2 * dense_bytes);
    check_dense(&world);
    iod_thread_stop(&iod);
    world_close(&world);
}

/* While the predecessor's lock is held its LOADING slots stay in quarantine and nothing is read into the pool. */
static void test_quarantine(void **state)
{
    (void)state;
    struct world world;
    struct iod_thread iod;
    char path[400];
    world_open(&world, scratch, container_path, &(struct world_options){TOP_K, 1, 1, IO_URING});
    start(&iod, &world, NULL);
    struct slot_ref ref;
    get_right(&world, 0, 0, world.tick, &ref);
    world_put(&world, 0, ref);
    iod_thread_stop(&iod);
    uint32_t left = ref.index == 1 ? 2 : 1; /* a slot that a dead daemon was filling */
    uint32_t generation;
    assert_int_equal(slot_change(&world.pool.slots[left].state, SLOT_EMPTY, SLOT_LOADING,
                                 slot_generation_of(world.pool.slots[left].state), &generation),
                     0);
    world.pool.slots[left].expert = 7;
    world.pool.map[7] = left | (uint64_t)generation << 32;
    snprintf(path, sizeof(path), "%s/iod.lock", world.rundir);
    int lock = open(path, O_RDWR | O_CLOEXEC);
    assert_int_equal(flock(lock, LOCK_EX), 0);

    control_raise_epoch(world.control);
    start(&iod, &world, NULL);
    get_right(&world, 0, 0, world.tick, &ref); /* READY ones serve on */
    world_put(&world, 0, ref);
    assert_int_equal(world_get(&world, 0, 7, world.tick, 200, &ref), -ETIMEDOUT);
    assert_int_equal(world_get(&world, 0, 9, world.tick, 100, &ref), -ETIMEDOUT);
    assert_int_equal(slot_state_of(world.pool.slots[left].state), SLOT_QUARANTINED);
    assert_int_equal(slot_generation_of(world.pool.slots[left].state), generation);
    assert_int_equal(loads_of(&world), 1);
    close(lock);
    get_right(&world, 0, 7, world.tick, &ref);
    get_right(&world, 0, 9, world.tick, &ref);
    iod_thread_stop(&iod);
    world_close(&world);
}

/* --- demands --- */

/* What nobody waits for any more is not read: requests of an old epoch, of a step that has passed, for no expert at
 * all. */
static void test_void_demands(void **state)
{
    (void)state;
    struct world world;
    struct iod_thread iod;
    world_open(&world, scratch, container_path, &(struct world_options){TOP_K, 1, 2, IO_URING});
    start(&iod, &world, NULL);
    free(iod_thread_log());
    world_tick(&world, 0, 50);
    ring_push(&world.control->rings[0], &(struct expert_request){.expert = 1, .epoch = 0, .tick = 50});
    ring_push(&world.control->rings[0], &(struct expert_request){.expert = 2, .epoch = 1, .tick = 49});
    ring_push(&world.control->rings[1], &(struct expert_request){.expert = ALL, .epoch = 1, .tick = 50});
    struct slot_ref ref;
    get_right(&world, 0, 3, 50, &ref);
    assert_int_equal(loads_of(&world), 1);
    char *log = iod_thread_log();
    assert_non_null(strstr(log, "worker 1 asked for expert"));
    free(log);
    /* A queue of demands that found no slot is forgotten when the epoch rises. */
    struct slot_ref held[TOP_K];
    held[0] = ref;
    for (uint32_t e = 1; e < TOP_K; e++)
        get_right(&world, 0, 10 + e, 50, &held[e]);
    for (uint32_t e = 0; e < 8; e++)
        world_ask(&world, 1, EXPERTS + e, 50);
    for (int i = 0; !atomic_load(&world.control->iod.starved) && i < PATIENCE; i++)
        usleep(1000);
    assert_int_equal(loads_of(&world), TOP_K);
    assert_int_equal(world.control->iod.starved, 1);
    control_raise_epoch(world.control);
    for (uint32_t e = 0; e < TOP_K; e++)
        world_put(&world, 0, held[e]);
    usleep(300000);
    assert_int_equal(loads_of(&world), TOP_K);
    assert_int_equal(world.control->iod.starved, 0);
    iod_thread_stop(&iod);
    world_close(&world);
}

/* An unpin wakes a demand that found every slot pinned; without the bell it would be seen after 100 ms. */
static void test_starved(void **state)
{
    (void)state;
    struct world world;
    struct iod_thread iod;
    world_open(&world, scratch, container_path, &(struct world_options){TOP_K, 1, 2, IO_URING});
    start(&iod, &world, NULL);
    int quick = 0;
    for (uint32_t round = 0; round < 20; round++) {
        struct slot_ref held[TOP_K], ref;
        uint64_t tick = 10 + round;
        world_tick(&world, 0, tick);
        world_tick(&world, 1, tick);
        for (uint32_t e = 0; e < TOP_K; e++)
            get_right(&world, 0, (round * TOP_K + e) % ALL, tick, &held[e]);
        uint32_t other = (round * TOP_K + TOP_K) % ALL;
        world_ask(&world, 1, other, tick);
        for (int i = 0; !atomic_load(&world.control->iod.starved) && i < PATIENCE; i++)
            usleep(1000);
        assert_int_equal(pool_pin(&world.pool, other, 1, tick, &ref), -ENOENT);
        usleep(1000 + round * 7000);
        uint64_t begin = harness_now_ms();
        world_put(&world, 0, held[0]);
        get_right(&world, 1, other, tick, &ref);
        quick += harness_now_ms() - begin < 60;
        world_put(&world, 1, ref);
        for (uint32_t e = 1; e < TOP_K; e++)
            world_put(&world, 0, held[e]);
    }
    assert_true(quick > 10); /* by the 100 ms timer alone some 12 of 20 would be slow */
    iod_thread_stop(&iod);
    world_close(&world);
}

struct chaser {
    struct world *world;
    uint32_t worker, first;
    int status;
};

/* A worker with a working set larger than the pool, all of it its own. */
static void *chase(void *argument)
{
    struct chaser *chaser = argument;
    for (uint64_t tick = 2; tick < 40 && chaser->status == 0; tick++) {
        chaser->status = use_in_waves(chaser->world, chaser->worker, chaser->first, 8, tick);
    }
    return NULL;
}

/* Four workers drive each other's experts out of a pool of four slots: nobody starves, and nothing is read that is not
 * used. */
static void test_chase(void **state)
{
    (void)state;
    struct world world;
    struct iod_thread iod;
    world_open(&world, scratch, container_path, &(struct world_options){TOP_K, 1, 4, IO_URING});
    start(&iod, &world, NULL);
    pthread_t threads[4];
    struct chaser chasers[4];
    for (uint32_t w = 0; w < 4; w++) {
        chasers[w] = (struct chaser){.world = &world, .worker = w, .first = w * 8};
        assert_int_equal(pthread_create(&threads[w], NULL, chase, &chasers[w]), 0);
    }
    for (uint32_t w = 0; w < 4; w++) {
        pthread_join(threads[w], NULL);
        assert_int_equal(chasers[w].status, 0);
    }
    assert_true(loads_of(&world) <= 4 * 38 * 8);
    iod_thread_stop(&iod);
    world_close(&world);
}

/* A neighbour scribbles over the pool's table, the rings and the control words while the daemon works: it survives,
 * ends when told, and the next one serves right again. */
static void test_liar(void **state)
{
    (void)state;
    struct world world;
    struct iod_thread iod;
    world_open(&world, scratch, container_path, &(struct world_options){TOP_K + 4, 2, 2, IO_URING});
    start(&iod, &world, NULL);
    uint32_t *control = (uint32_t *)(void *)((char *)world.control + offsetof(struct control, epoch));
    size_t control_words = (sizeof(struct control) - offsetof(struct control, epoch)) / 4;
    uint32_t *table = (uint32_t *)(void *)((char *)world.pool.table.base + offsetof(struct pool_header, objects_ready));
    size_t table_words = (world.pool.table.bytes - offsetof(struct pool_header, objects_ready)) / 4;
    srand(3);
    for (int i = 0; i < 1000000; i++) {
        uint32_t *word = rand() % 2 ? &control[(size_t)rand() % control_words] : &table[(size_t)rand() % table_words];
        atomic_fetch_xor((_Atomic uint32_t *)word, 1u << rand() % 32);
        if (i % 50 == 0) {
            struct expert_request request = {.expert = (uint32_t)rand() % (ALL + 2),
                                             .epoch = atomic_load(&world.control->epoch),
                                             .tick = atomic_load(&world.control->workers[0].tick)};
            atomic_store(&world.control->rings[0].tail, atomic_load(&world.control->rings[0].head));
            ring_push(&world.control->rings[0], &request);
            uint64_t one = 1;
            assert_true(write(world.doorbell, &one, sizeof(one)) == sizeof(one) || errno == EAGAIN);
        }
    }
    assert_int_equal(iod_thread_stop(&iod), 0);
    pool_detach(&world.pool);
    control_detach(world.control);
    segment_unlink_all(world.instance);
    harness_remove(world.rundir);
    free(iod_thread_log());

    world_open(&world, scratch, container_path, &(struct world_options){TOP_K, 1, 1, IO_URING});
    start(&iod, &world, NULL);
    use_all(&world, 2);
    iod_thread_stop(&iod);
    world_close(&world);
}

/* --- the process --- */

static uint64_t context_switches(pid_t pid)
{
    uint64_t sum = 0;
    for (int thread = pid; thread < pid + 50; thread++) {
        char path[80], line[200];
        snprintf(path, sizeof(path), "/proc/%d/task/%d/status", (int)pid, thread);
        FILE *file = fopen(path, "re");
        while (file && fgets(line, sizeof(line), file)) {
            unsigned long long count;
            if (sscanf(line, "voluntary_ctxt_switches: %llu", &count) == 1)
                sum += count;
        }
        if (file)
            fclose(file);
    }
    return sum;
}

/* calypte-iod itself: says ready, serves, sleeps without a single wakeup while idle, ends on SIGTERM with 0. */
static void test_process(void **state)
{
    (void)state;
    const uint32_t io[] = {IO_AUTO, IO_PREAD};
    for (size_t i = 0; i < 2; i++) {
        struct world world;
        struct iod_process process;
        char text[1200];
        world_open(&world, scratch, container_path, &(struct world_options){TOP_K, 1, 1, io[i]});
        iod_spawn(&world, false, &process);
        if (iod_wait_ready(&process, text) < 0)
            fail_msg("%s", text);
        use_all(&world, 2);
        uint64_t before, after = 0;
        int second = 0;
        do { /* what the last loads began may still end; after that there is nothing to wake for */
            before = context_switches(process.pid);
            assert_true(before > 0);
            usleep(1000000);
            after = context_switches(process.pid);
        } while (after != before && ++second < 5);
#ifndef __SANITIZE_THREAD__ /* which has a thread of its own that wakes up */
        assert_true(after == before);
#endif
        int status = iod_stop(&process, SIGTERM);
        assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
        world_close(&world);
    }
}

static void test_process_without_uring(void **state)
{
    (void)state;
    struct world world;
    struct iod_process process;
    char text[4096];
    world_open(&world, scratch, container_path, &(struct world_options){TOP_K, 1, 1, IO_URING});
    iod_spawn(&world, true, &process);
    if (iod_wait_ready(&process, text) < 0)
        fail_msg("%s", text);
    assert_int_equal(world.control->iod.method, IO_PREAD);
    use_all(&world, 2);
    int status = iod_stop(&process, SIGTERM);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    iod_read_log(&process, text);
    const char *said = strstr(text, "io_uring cannot be used");
    assert_non_null(said);
    assert_null(strstr(said + 1, "io_uring cannot be used")); /* once */
    world_close(&world);
}

static void test_process_refuses(void **state)
{
    (void)state;
    struct world world;
    struct iod_process process;
    char text[1200];
    world_open(&world, scratch, container_path, &(struct world_options){TOP_K, 1, 1, IO_URING});
    world.control->facts.identity ^= 1;
    iod_spawn(&world, false, &process);
    assert_int_equal(iod_wait_ready(&process, text), -1);
    assert_non_null(strstr(text, "failed: "));
    assert_non_null(strstr(text, "is not the container"));
    int status = iod_stop(&process, 0);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 1);
    world_close(&world);
}

int main(void)
{
    harness_scratch("test_iod", scratch);
    snprintf(container_path, sizeof(container_path), "%s/container", scratch);
    harness_make_container(container_path, &geometry);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_load_everything),
        cmocka_unit_test(test_wave),
        cmocka_unit_test(test_faults),
        cmocka_unit_test(test_coalescing),
        cmocka_unit_test(test_flipped_byte),
        cmocka_unit_test(test_many_failures),
        cmocka_unit_test(test_truncated),
        cmocka_unit_test(test_bad_sector),
        cmocka_unit_test(test_damaged_dense),
        cmocka_unit_test(test_restart_keeps),
        cmocka_unit_test(test_quarantine),
        cmocka_unit_test(test_void_demands),
        cmocka_unit_test(test_starved),
        cmocka_unit_test(test_chase),
        cmocka_unit_test(test_liar),
        cmocka_unit_test(test_process),
        cmocka_unit_test(test_process_without_uring),
        cmocka_unit_test(test_process_refuses),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    harness_end(scratch);
    return failed;
}
