/* The I/O daemon under requests of different urgency, and what it does with the bytes that come: priorities, verification,
 * a second reading. The test is supervisor and workers, the daemon's loader runs in a thread over a method that holds
 * back reads, or spoils them. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "io_daemon/loads.h"
#include "tests/unit/faulty_method.h"
#include "tests/unit/iod_harness.h"

#define TOP_K 4u
#define PATIENCE 20000 /* ms */
#define QUIET 60000    /* us in which nothing more must happen */

/* Blobs of 128 KiB, so that the number of loads bounds what is in flight; and of 1.6 MiB, so that bytes do. */
static const struct geometry small = {
    .hidden = 256, .width = 256, .layers = 2, .experts = 128, .top_k = TOP_K, .dense_bytes = 1u << 20};
static const struct geometry large = {
    .hidden = 1024, .width = 1024, .layers = 2, .experts = 32, .top_k = TOP_K, .dense_bytes = 1u << 20};
static char scratch[256], small_path[300], large_path[300];
static char other_drive[] = "/dev/shm/test_iod_priority-XXXXXX"; /* a folder on another file system */

struct bench {
    struct world world;
    struct iod_thread iod;
    uint32_t submitted; /* reads before the test's own */
    uint64_t tick;
};

static void start_with(struct bench *bench, const char *path, uint32_t slots, enum verify_choice verify,
                       uint32_t faults)
{
    plan_faults(&io_method_uring, faults);
    world_open(&bench->world, scratch, path, &(struct world_options){slots, 1, 2, IO_AUTO});
    bench->world.control->facts.verify = verify;
    if (iod_thread_start(&bench->iod, &bench->world, &faulty_method) < 0)
        fail_msg("%s", bench->iod.error.text);
    bench->submitted = atomic_load(&fault_plan.submitted);
    bench->tick = 10;
    world_tick(&bench->world, 0, bench->tick);
    world_tick(&bench->world, 1, bench->tick);
}

static void start(struct bench *bench, const char *path, uint32_t slots)
{
    start_with(bench, path, slots, VERIFY_FIRST, 0);
}

static void stop(struct bench *bench)
{
    atomic_store(&fault_plan.hold_all, 0);
    assert_int_equal(iod_thread_stop(&bench->iod), 0);
    world_close(&bench->world);
    free(iod_thread_log());
}

static uint32_t reads_of(const struct bench *bench)
{
    return atomic_load(&fault_plan.submitted) - bench->submitted;
}

static uint64_t loads_of(const struct bench *bench)
{
    return atomic_load(&bench->world.control->iod.loads);
}

static void expect_reads(const struct bench *bench, uint32_t reads)
{
    for (int i = 0; reads_of(bench) < reads && i < PATIENCE; i++)
        usleep(1000);
    usleep(QUIET);
    assert_int_equal(reads_of(bench), reads);
}

static void expect_loads(const struct bench *bench, uint64_t loads)
{
    for (int i = 0; loads_of(bench) < loads && i < PATIENCE; i++)
        usleep(1000);
    usleep(QUIET);
    assert_int_equal(loads_of(bench), loads);
}

/* As reads_of, but for a counter of the daemon's. */
static void expect_count(const _Atomic uint64_t *counter, uint64_t value)
{
    for (int i = 0; atomic_load(counter) < value && i < PATIENCE; i++)
        usleep(1000);
    assert_int_equal(atomic_load(counter), value);
}

static uint64_t blob_offset(const char *path, uint32_t expert)
{
    struct container *container;
    assert_int_equal(container_open(path, &container, NULL), 0);
    uint64_t offset = container->experts[0].stripes[0].offsets[expert];
    container_close(container);
    return offset;
}

/* Gets an expert, looks at its bytes, gives it back. */
static void use_expert(struct bench *bench, uint32_t worker, uint32_t expert, uint32_t flags)
{
    struct slot_ref ref;
    world_use(&bench->world, expert, flags);
    assert_int_equal(world_get(&bench->world, worker, expert, bench->tick, PATIENCE, &ref), 0);
    assert_int_equal(world_wrong_words(&bench->world, ref, expert, 1), 0);
    world_put(&bench->world, worker, ref);
}

static void next_layer(struct bench *bench)
{
    bench->tick++;
    world_tick(&bench->world, 0, bench->tick);
    world_tick(&bench->world, 1, bench->tick);
}

static void guess_range(struct bench *bench, uint32_t first, uint32_t count)
{
    for (uint32_t e = first; e < first + count; e++)
        world_guess(&bench->world, 0, e, bench->tick + 1);
}

/* --- priorities --- */

/* A hundred guesses are asked for first; the demand is sent before all of them that are not in flight yet. */
static void test_demand_overtakes(void **state)
{
    (void)state;
    struct bench bench;
    start(&bench, small_path, 128);
    const struct iod_line *line = &bench.world.control->iod;
    atomic_store(&fault_plan.hold_all, 1);
    guess_range(&bench, 0, 100);
    expect_reads(&bench, MAX_GUESS_LOADS);
    world_ask(&bench.world, 1, 120, bench.tick);
    expect_reads(&bench, MAX_GUESS_LOADS + 1);
    assert_int_equal(fault_plan.last_offset, blob_offset(small_path, 120));
    assert_int_equal(line->queued_lookaheads, 100 - MAX_GUESS_LOADS);
    assert_int_equal(line->queued_demands, 0);
    assert_true(line->flying_bytes > 0);
    atomic_store(&fault_plan.hold_all, 0);
    use_expert(&bench, 1, 120, 0);
    expect_loads(&bench, 101);
    assert_int_equal(reads_of(&bench), 101);
    assert_int_equal(line->guesses_asked, 100);
    assert_int_equal(line->guesses_loaded, 100);
    assert_int_equal(line->guesses_dropped, 0);
    stop(&bench);
}

/* A guess that waits in the queue and becomes a demand goes at once, and is read once. */
static void test_promoted_in_queue(void **state)
{
    (void)state;
    struct bench bench;
    start(&bench, small_path, 128);
    atomic_store(&fault_plan.hold_all, 1);
    guess_range(&bench, 0, 40);
    expect_reads(&bench, MAX_GUESS_LOADS);
    world_ask(&bench.world, 0, 39, bench.tick);
    world_ask(&bench.world, 1, 39, bench.tick);
    expect_reads(&bench, MAX_GUESS_LOADS + 1);
    assert_int_equal(fault_plan.last_offset, blob_offset(small_path, 39));
    atomic_store(&fault_plan.hold_all, 0);
    use_expert(&bench, 0, 39, 0);
    use_expert(&bench, 1, 39, 0);
    expect_loads(&bench, 40);
    assert_int_equal(reads_of(&bench), 40);
    assert_int_equal(bench.world.control->iod.guesses_loaded, 39);
    stop(&bench);
}

/* A guess whose slot is LOADING while its bytes still wait: they pass those of other guesses, and beyond what guesses
 * may have in flight while a demand is outstanding, or was lately. */
static void test_promoted_while_loading(void **state)
{
    (void)state;
    struct bench bench;
    start(&bench, large_path, 32);
    const uint32_t fit = /* beside the demand */
        (uint32_t)(READER_IN_FLIGHT / READER_BACKGROUND / (bench.world.pool.slice_bytes * EXPERT_SLICES)) - 1;
    assert_true(fit < 12 && bench.world.pool.slice_bytes * EXPERT_SLICES <= PIECE_BYTES);
    atomic_store(&fault_plan.hold_all, 1);
    world_ask(&bench.world, 1, 31, bench.tick);
    expect_reads(&bench, 1);
    guess_range(&bench, 0, 12);
    expect_reads(&bench, 1 + fit);
    struct slot_ref ref;
    assert_int_equal(pool_pin(&bench.world.pool, fit, 0, bench.tick, &ref), -EAGAIN); /* LOADING */
    world_ask(&bench.world, 0, fit, bench.tick);
    expect_reads(&bench, 1 + fit + 1);
    assert_int_equal(fault_plan.last_offset, blob_offset(large_path, fit));
    assert_int_equal(bench.world.control->iod.guesses_used, 1);
    atomic_store(&fault_plan.hold_all, 0);
    use_expert(&bench, 0, fit, 0);
    use_expert(&bench, 1, 31, 0);
    expect_loads(&bench, 1 + 12);
    assert_int_equal(reads_of(&bench), 1 + 12);
    stop(&bench);
}

/* Where nobody has demanded anything, guesses may have all that may be in flight. */
static void test_calm(void **state)
{
    (void)state;
    struct bench bench;
    start(&bench, large_path, 32);
    const uint32_t fit = (uint32_t)(READER_IN_FLIGHT / (bench.world.pool.slice_bytes * EXPERT_SLICES));
    assert_true(fit > 8 && fit < 26);
    atomic_store(&fault_plan.hold_all, 1);
    guess_range(&bench, 0, 26);
    expect_reads(&bench, fit);
    atomic_store(&fault_plan.hold_all, 0);
    expect_loads(&bench, 26);
    stop(&bench);
}

/* A guess brings an expert while the worker asks for it; it is used and evicted before iod reads that request. Read again it
 * would be owed to nobody, and keep a slot from what the worker still waits for. */
static void test_used_before_asked(void **state)
{
    (void)state;
    struct bench bench;
    start(&bench, small_path, TOP_K);
    world_ask(&bench.world, 0, 1, bench.tick);
    expect_loads(&bench, 1);
    use_expert(&bench, 0, 1, 0);
    for (uint32_t e = 2; e < 2 + TOP_K; e++)
        use_expert(&bench, 0, e, 0);
    expect_loads(&bench, 1 + TOP_K); /* expert 1 has made room */
    world_ask(&bench.world, 0, 1, bench.tick);
    expect_loads(&bench, 1 + TOP_K);
    next_layer(&bench);
    use_expert(&bench, 0, 1, 0);
    expect_loads(&bench, 2 + TOP_K);
    stop(&bench);
}

/* What is still queued when its layer begins is not read any more; nor what is asked for too late, or of an old epoch. */
static void test_dropped(void **state)
{
    (void)state;
    struct bench bench;
    start(&bench, small_path, 128);
    const struct iod_line *line = &bench.world.control->iod;
    atomic_store(&fault_plan.hold_all, 1);
    guess_range(&bench, 0, 40);
    expect_reads(&bench, MAX_GUESS_LOADS);
    next_layer(&bench);
    world_guess(&bench.world, 0, 50, bench.tick);
    atomic_store(&fault_plan.hold_all, 0);
    expect_loads(&bench, MAX_GUESS_LOADS);
    expect_count(&line->guesses_dropped, 40 - MAX_GUESS_LOADS);
    assert_int_equal(line->queued_lookaheads, 0);
    atomic_store(&fault_plan.hold_all, 1);
    guess_range(&bench, 60, 40);
    expect_reads(&bench, 2 * MAX_GUESS_LOADS);
    control_raise_epoch(bench.world.control);
    atomic_store(&fault_plan.hold_all, 0);
    expect_loads(&bench, 2 * MAX_GUESS_LOADS);
    expect_count(&line->guesses_dropped, 2 * (40 - MAX_GUESS_LOADS));
    stop(&bench);
}

/* While a demand waits for a slot, a guess waits behind it, and is not given up. */
static void test_guess_waits(void **state)
{
    (void)state;
    struct bench bench;
    struct slot_ref held[TOP_K + 2];
    start(&bench, small_path, TOP_K + 2);
    const struct iod_line *line = &bench.world.control->iod;
    for (uint32_t e = 0; e < TOP_K + 2; e++)
        assert_int_equal(world_get(&bench.world, 1, e, bench.tick, PATIENCE, &held[e]), 0);
    world_ask(&bench.world, 0, 20, bench.tick);
    for (int i = 0; !atomic_load(&line->starved) && i < PATIENCE; i++)
        usleep(1000);
    guess_range(&bench, 21, 1);
    expect_count(&line->guesses_asked, 1);
    usleep(QUIET);
    assert_int_equal(line->queued_demands, 1);
    assert_int_equal(line->queued_lookaheads, 1);
    assert_int_equal(line->guesses_dropped, 0);
    world_put(&bench.world, 1, held[0]);
    use_expert(&bench, 0, 20, 0);
    expect_count(&line->guesses_dropped, 1); /* now it is its turn, and there is no slot */
    for (uint32_t e = 1; e < TOP_K + 2; e++)
        world_put(&bench.world, 1, held[e]);
    stop(&bench);
}

/* Guesses leave demands as many slots as one row of a layer needs. */
static void test_last_slots(void **state)
{
    (void)state;
    struct bench bench;
    start(&bench, small_path, TOP_K + 2);
    const struct iod_line *line = &bench.world.control->iod;
    atomic_store(&fault_plan.hold_all, 1);
    guess_range(&bench, 0, 10);
    expect_reads(&bench, 2);
    expect_count(&line->guesses_dropped, 8);
    for (uint32_t e = 20; e < 20 + TOP_K; e++)
        world_ask(&bench.world, 0, e, bench.tick);
    expect_reads(&bench, 2 + TOP_K);
    atomic_store(&fault_plan.hold_all, 0);
    for (uint32_t e = 20; e < 20 + TOP_K; e++)
        use_expert(&bench, 0, e, 0);
    /* Unused, the two go before what was used; of the two, one is used in time. */
    use_expert(&bench, 0, 0, USE_HIT);
    next_layer(&bench);
    use_expert(&bench, 0, 30, 0);
    next_layer(&bench);
    use_expert(&bench, 0, 31, 0);
    assert_int_equal(line->guesses_used, 1);
    assert_int_equal(line->guesses_wasted, 1);
    stop(&bench);
}

/* In a full pool a lookahead takes the place of what is no warmer than its expert will be. */
static void test_warm_stay(void **state)
{
    (void)state;
    struct bench bench;
    start(&bench, small_path, TOP_K + 1);
    const struct iod_line *line = &bench.world.control->iod;
    for (uint32_t round = 0; round < 3; round++) {
        for (uint32_t e = 0; e < TOP_K + 1; e++)
            use_expert(&bench, 0, e, round ? USE_HIT : 0);
        next_layer(&bench);
    }
    guess_range(&bench, 50, 1);
    expect_count(&line->guesses_dropped, 1);
    assert_int_equal(line->evictions, 0);
    for (uint32_t i = 0; i < 4; i++)
        world_use(&bench.world, 51, 0); /* by a layer that had it once */
    guess_range(&bench, 51, 1);
    expect_count(&line->guesses_loaded, 1);
    assert_int_equal(line->evictions, 1);
    expect_loads(&bench, TOP_K + 2);
    stop(&bench);
}

/* The use log reaches the policy: what is used all the time survives what is used once, however often that happens. */
static void test_hot_stay(void **state)
{
    (void)state;
    struct bench bench;
    start(&bench, small_path, TOP_K + 4);
    for (uint32_t i = 0; i < 60; i++) {
        use_expert(&bench, 0, 0, i ? USE_HIT : 0);
        use_expert(&bench, 0, 1, i ? USE_HIT : 0);
        for (uint32_t k = 0; k < 2; k++) {
            use_expert(&bench, 0, 2 + (2 * i + k) % 120, 0);
            next_layer(&bench);
        }
    }
    assert_int_equal(loads_of(&bench), 2 + 120);
    assert_true(bench.world.control->iod.uses_read == uses_end(&bench.world.control->uses));
    stop(&bench);
}

/* --- verification --- */

/* Twice over all experts through a small pool, so that each is read twice: how many bytes were verified? */
static void test_verify_modes(void **state)
{
    (void)state;
    static const enum verify_choice modes[] = {VERIFY_FIRST, VERIFY_ALWAYS, VERIFY_OFF};
    for (size_t m = 0; m < 3; m++) {
        struct bench bench;
        start_with(&bench, small_path, TOP_K, modes[m], 0);
        const struct iod_line *line = &bench.world.control->iod;
        uint64_t dense = atomic_load(&line->verified_bytes), blob = bench.world.pool.slice_bytes * EXPERT_SLICES;
        for (uint32_t pass = 0; pass < 2; pass++) {
            for (uint32_t e = 0; e < 16; e++) {
                use_expert(&bench, 0, e, 0);
                next_layer(&bench);
            }
        }
        uint64_t verified = atomic_load(&line->verified_bytes) - dense, loads = loads_of(&bench);
        assert_true(loads > 20);
        assert_int_equal(verified, modes[m] == VERIFY_FIRST ? 16 * blob : modes[m] == VERIFY_ALWAYS ? loads * blob : 0);
        assert_true(modes[m] == VERIFY_OFF ? dense == 0 : dense > 0);

        /* A byte that is flipped after it was read once. */
        char path[400];
        snprintf(path, sizeof(path), "%s/experts-0-00001.safetensors", small_path);
        uint64_t offset = blob_offset(small_path, 0) + 3 * bench.world.pool.slice_bytes + 5;
        harness_flip_byte(path, offset, 0x40);
        struct slot_ref ref;
        int status = world_get(&bench.world, 0, 0, bench.tick, PATIENCE, &ref);
        harness_flip_byte(path, offset, 0x40);
        if (modes[m] == VERIFY_ALWAYS) {
            assert_int_equal(status, -EIO);
        } else {
            assert_int_equal(status, 0);
            assert_int_equal(world_wrong_words(&bench.world, ref, 0, 1), 1);
        }
        stop(&bench);
    }
}

/* With verify=first an expert that failed is verified again when it is read the next time. */
static void test_verify_after_failure(void **state)
{
    (void)state;
    struct bench bench;
    start(&bench, small_path, TOP_K);
    uint64_t blob = bench.world.pool.slice_bytes * EXPERT_SLICES;
    for (uint32_t e = 0; e <= TOP_K; e++) {
        use_expert(&bench, 0, e, 0);
        next_layer(&bench);
    }
    uint32_t gone = 0;
    struct slot_ref ref;
    while (pool_lookup(&bench.world.pool, gone, &ref) == 0)
        gone++;
    assert_true(gone <= TOP_K);
    fault_plan.broken_offset = blob_offset(small_path, gone) + 100;
    assert_int_equal(world_get(&bench.world, 0, gone, bench.tick, PATIENCE, &ref), -EIO);
    fault_plan.broken_offset = 0;
    next_layer(&bench);
    uint64_t before = atomic_load(&bench.world.control->iod.verified_bytes);
    use_expert(&bench, 0, gone, 0);
    assert_int_equal(atomic_load(&bench.world.control->iod.verified_bytes) - before, blob);
    stop(&bench);
}

/* A slice that comes wrong is read once more: right the second time, it is a line in the log; else the expert fails. */
static void test_read_again(void **state)
{
    (void)state;
    for (uint32_t flips = 1; flips <= 2; flips++) {
        struct bench bench;
        start(&bench, small_path, TOP_K);
        const struct iod_line *line = &bench.world.control->iod;
        free(iod_thread_log());
        fault_plan.flipped_offset = blob_offset(small_path, 7) + 5 * bench.world.pool.slice_bytes + 77;
        atomic_store(&fault_plan.flips, flips);
        struct slot_ref ref;
        int status = world_get(&bench.world, 0, 7, bench.tick, PATIENCE, &ref);
        char *log = iod_thread_log();
        if (flips == 1) {
            assert_int_equal(status, 0);
            assert_int_equal(world_wrong_words(&bench.world, ref, 7, 1), 0);
            assert_non_null(strstr(log, "expert 7 of layer 1, slice 5: read wrong once"));
        } else {
            assert_int_equal(status, -EIO);
            assert_int_equal(bench.world.pool.slots[ref.index].error, EBADMSG);
            assert_int_equal(bench.world.pool.slots[ref.index].slice, 5);
            assert_non_null(strstr(log, "expert 7 of layer 1, slice 5: its checksum differs"));
        }
        free(log);
        assert_int_equal(line->retries, 1);
        assert_int_equal(line->failures, flips - 1);
        assert_int_equal(reads_of(&bench), 2);
        stop(&bench);
    }
}

/* --- the rest --- */

/* What cannot be registered is one line, and read all the same. */
static void test_unregistered(void **state)
{
    (void)state;
    struct bench bench;
    free(iod_thread_log());
    start_with(&bench, small_path, TOP_K, VERIFY_FIRST, FAULT_REGISTER);
    use_expert(&bench, 0, 3, 0);
    use_expert(&bench, 0, 4, 0);
    char *log = iod_thread_log();
    static const char *const lines[] = {"are not registered", "registered with io_uring and no more can be"};
    for (size_t i = 0; i < 2; i++) {
        const char *said = strstr(log, lines[i]);
        assert_non_null(said);
        assert_null(strstr(said + 1, lines[i]));
    }
    free(log);
    stop(&bench);
}

static void set_size(struct bench *bench, uint32_t slots)
{
    uint64_t one = 1;
    atomic_store(&bench->world.control->pool_target, slots);
    assert_int_equal(write(bench->world.doorbell, &one, sizeof(one)), sizeof(one));
}

static void expect_registered(const struct bench *bench, uint32_t slots)
{
    const _Atomic uint64_t *bytes = &bench->world.control->iod.registered_bytes;
    uint64_t wanted = slots * bench->world.pool.slice_bytes * EXPERT_SLICES;
    for (int i = 0; atomic_load(bytes) != wanted && i < PATIENCE; i++)
        usleep(1000);
    assert_int_equal(atomic_load(bytes), wanted);
}

/* False where this user may not lock enough memory; the daemon has said so then. */
static bool may_register(const struct bench *bench)
{
    bool refused = false;
    for (int i = 0; !refused && atomic_load(&bench->world.control->iod.registered_bytes) == 0 && i < PATIENCE; i++) {
        usleep(1000);
        char *log = iod_thread_log();
        refused = strstr(log, "registered with io_uring and no more can be") != NULL;
        free(log);
    }
    return !refused;
}

static void use_all(struct bench *bench, uint32_t experts)
{
    for (uint32_t e = 0; e < experts; e++) {
        use_expert(bench, 0, e, 0);
        next_layer(bench);
    }
}

/* The pool's memory is registered as it stands, given back before a hole is punched in it, and registered anew when it
 * stands again: reads land where the workers look, though nothing verifies them here. */
static void test_registered(void **state)
{
    (void)state;
    for (uint32_t nodes = 1; nodes <= 2; nodes++) {
        struct bench bench = {.tick = 10};
        plan_faults(&io_method_uring, 0);
        world_open(&bench.world, scratch, large_path, &(struct world_options){32, nodes, 2, IO_AUTO});
        bench.world.control->facts.verify = VERIFY_OFF;
        assert_int_equal(iod_thread_start(&bench.iod, &bench.world, &faulty_method), 0);
        if (!may_register(&bench)) {
            print_message("not enough memory may be locked (ulimit -l): nothing was registered\n");
            stop(&bench);
            skip();
        }
        for (uint32_t round = 0; round < 2; round++) {
            expect_registered(&bench, 32);
            use_all(&bench, 32);
            set_size(&bench, 8);
            expect_registered(&bench, 0);
            use_all(&bench, 32);
            for (int i = 0; pool_slots_ready(&bench.world.pool) != 8 && i < PATIENCE; i++)
                usleep(1000);
            assert_int_equal(pool_slots_ready(&bench.world.pool), 8);
            set_size(&bench, 32);
        }
        stop(&bench);
    }
}

/* The experts of one layer stand on another file system: each drive has its own bytes in flight. The pool is two chunks of
 * registered memory. */
static void test_two_drives(void **state)
{
    (void)state;
    static const struct geometry geometry = {
        .hidden = 1024, .width = 1024, .layers = 3, .experts = 32, .top_k = TOP_K, .dense_bytes = 1u << 20};
    char path[300], file[400], moved[80], command[1000];
    snprintf(path, sizeof(path), "%s/two", scratch);
    harness_make_container(path, &geometry);
    assert_non_null(mkdtemp(other_drive));
    snprintf(file, sizeof(file), "%s/experts-0-00002.safetensors", path);
    snprintf(moved, sizeof(moved), "%s/experts", other_drive);
    snprintf(command, sizeof(command), "mv '%s' '%s'", file, moved);
    assert_int_equal(system(command), 0);
    assert_int_equal(symlink(moved, file), 0);

    struct bench bench;
    start(&bench, path, 64);
    uint32_t fit = (uint32_t)(READER_IN_FLIGHT / (bench.world.pool.slice_bytes * EXPERT_SLICES));
    assert_true(fit < 30);
    if (may_register(&bench))
        expect_registered(&bench, 64);
    atomic_store(&fault_plan.hold_all, 1);
    for (uint32_t e = 0; e < 30; e++) {
        world_ask(&bench.world, 0, e, bench.tick);
        world_ask(&bench.world, 0, 32 + e, bench.tick);
    }
    expect_reads(&bench, 2 * fit);
    atomic_store(&fault_plan.hold_all, 0);
    for (uint32_t e = 0; e < 30; e++) {
        use_expert(&bench, 0, e, 0);
        use_expert(&bench, 0, 32 + e, 0);
    }
    assert_int_equal(bench.world.control->iod.failures, 0);
    stop(&bench);
}

static uint64_t sum_of(const struct histogram *histogram)
{
    uint64_t sum = 0;
    for (uint32_t b = 0; b < HISTOGRAM_BUCKETS; b++)
        sum += atomic_load(&histogram->count[b]);
    return sum;
}

/* The counters: every read and every demand has its latency; the time with a demand outstanding is that of the reads. */
static void test_counters(void **state)
{
    (void)state;
    struct bench bench;
    start(&bench, small_path, 128);
    const struct iod_line *line = &bench.world.control->iod;
    uint64_t reads = sum_of(&line->read_us);
    assert_int_equal(reads, line->reads);
    atomic_store(&fault_plan.hold_all, 1);
    for (uint32_t e = 0; e < 5; e++)
        world_ask(&bench.world, 0, e, bench.tick);
    expect_reads(&bench, 5); /* waits for QUIET */
    atomic_store(&fault_plan.hold_all, 0);
    expect_loads(&bench, 5);
    guess_range(&bench, 10, 3);
    expect_loads(&bench, 8);
    assert_int_equal(sum_of(&line->read_us), reads + 8);
    assert_int_equal(sum_of(&line->demand_us), 5);
    assert_true(histogram_percentile(&line->demand_us, 0.5) >= QUIET);
    assert_true(line->busy_ns >= UINT64_C(1000) * QUIET);
    assert_true(line->demand_ns >= 5 * UINT64_C(1000) * QUIET && line->busy_ns < line->demand_ns);
    assert_int_equal(line->flying_bytes, 0);
    stop(&bench);
}

int main(void)
{
    harness_scratch("test_iod_priority", scratch);
    snprintf(small_path, sizeof(small_path), "%s/small", scratch);
    snprintf(large_path, sizeof(large_path), "%s/large", scratch);
    harness_make_container(small_path, &small);
    harness_make_container(large_path, &large);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_demand_overtakes),
        cmocka_unit_test(test_promoted_in_queue),
        cmocka_unit_test(test_promoted_while_loading),
        cmocka_unit_test(test_calm),
        cmocka_unit_test(test_used_before_asked),
        cmocka_unit_test(test_dropped),
        cmocka_unit_test(test_guess_waits),
        cmocka_unit_test(test_last_slots),
        cmocka_unit_test(test_warm_stay),
        cmocka_unit_test(test_hot_stay),
        cmocka_unit_test(test_verify_modes),
        cmocka_unit_test(test_verify_after_failure),
        cmocka_unit_test(test_read_again),
        cmocka_unit_test(test_unregistered),
        cmocka_unit_test(test_registered),
        cmocka_unit_test(test_two_drives),
        cmocka_unit_test(test_counters),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    harness_remove(other_drive);
    harness_end(scratch);
    return failed;
}
