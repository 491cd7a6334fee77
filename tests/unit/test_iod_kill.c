/* calypte-iod is killed with reads in flight and started again at once, over and over, on a drive that is kept busy.
 * The kernel goes on filling memory for a dead process; no such late page may land in a slot that the successor has
 * freed. The test would see it: it marks every page of a slot the moment that it leaves quarantine and looks at the
 * marks for longer than late pages take; then it pins what the successor delivers and looks at that. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "tests/unit/iod_harness.h"

#define EXPERTS 48u
#define SLOTS 12u
#define MARK_MS 300u  /* how long the marks are watched */
#define WATCH_MS 100u /* and then what was delivered */
#define NOISE 6u      /* threads that keep the drive busy, so that late pages are late */
#define NOISE_BYTES (4u << 20)
#define PATIENCE 30000
#define PAGE_WORDS 512u

/* Blobs of 8.4 MB, so that a few fill the queue of the drive. */
static const struct geometry geometry = {
    .hidden = 2048, .width = 2560, .layers = 2, .experts = EXPERTS, .top_k = 4, .dense_bytes = 1u << 20};
static char scratch[256], container_path[300];

static void wait_ready(struct iod_process *process)
{
    char text[1200];
    if (iod_wait_ready(process, text) < 0)
        fail_msg("%s", text);
}

static _Atomic bool noise_stop;

static void *make_noise(void *argument)
{
    char path[400];
    void *buffer;
    unsigned seed = *(unsigned *)argument;
    snprintf(path, sizeof(path), "%s/experts-0-00001.safetensors", container_path);
    int fd = open(path, O_RDONLY | O_DIRECT | O_CLOEXEC);
    if (fd < 0 || posix_memalign(&buffer, 4096, NOISE_BYTES))
        return NULL; /* without O_DIRECT: less noise */
    while (!atomic_load(&noise_stop))
        (void)!pread(fd, buffer, NOISE_BYTES, (off_t)(rand_r(&seed) % 80) * NOISE_BYTES);
    free(buffer);
    close(fd);
    return NULL;
}

/* One word of each page of a slot is its mark. */
#define MARK UINT64_C(0x4d41524b4d41524b)

static void mark_slot(struct world *world, uint32_t slot)
{
    for (uint32_t s = 0; s < EXPERT_SLICES; s++) {
        uint64_t *words = pool_slice(&world->pool, slot, s);
        for (size_t i = 0; i < world->pool.slice_bytes / 8; i += PAGE_WORDS)
            __atomic_store_n(&words[i], MARK, __ATOMIC_RELAXED);
    }
}

static size_t lost_marks(struct world *world, uint32_t slot)
{
    size_t lost = 0;
    for (uint32_t s = 0; s < EXPERT_SLICES; s++) {
        uint64_t *words = pool_slice(&world->pool, slot, s);
        for (size_t i = 0; i < world->pool.slice_bytes / 8; i += PAGE_WORDS)
            lost += __atomic_load_n(&words[i], __ATOMIC_RELAXED) != MARK;
    }
    return lost;
}

/* The fastest successor that there can be: takes the lock the moment that it is free, and at once uses what the dead
 * one was filling. */
static void watch_behind_lock(struct world *world, const bool was_loading[SLOTS])
{
    char path[300];
    snprintf(path, sizeof(path), "%s/iod.lock", world->rundir);
    int lock = open(path, O_RDWR | O_CLOEXEC);
    assert_true(lock >= 0);
    assert_int_equal(flock(lock, LOCK_EX), 0);
    for (uint32_t s = 0; s < SLOTS; s++) {
        if (was_loading[s])
            mark_slot(world, s);
    }
    for (uint64_t end = harness_now_ms() + MARK_MS; harness_now_ms() < end;) {
        for (uint32_t s = 0; s < SLOTS; s++) {
            size_t lost = was_loading[s] ? lost_marks(world, s) : 0;
            if (lost)
                fail_msg("slot %u: %zu late pages after the lock was free", s, lost);
        }
    }
    close(lock);
}

/* Nobody asks for anything, so what the successor frees stays EMPTY: from then on every page must keep its mark.
 * `was_loading` are the `left` slots that the dead one was filling. */
static void watch_marks(struct world *world, const bool was_loading[SLOTS], uint32_t left)
{
    bool marked[SLOTS] = {false};
    uint64_t give_up = harness_now_ms() + PATIENCE;
    for (uint64_t end = 0; left || harness_now_ms() < end;) {
        if (harness_now_ms() > give_up)
            fail_msg("%u slots stay in quarantine", left);
        for (uint32_t s = 0; s < SLOTS; s++) {
            if (was_loading[s] && !marked[s] && slot_state_of(atomic_load(&world->pool.slots[s].state)) == SLOT_EMPTY) {
                mark_slot(world, s);
                marked[s] = true;
                left--;
                end = harness_now_ms() + MARK_MS;
            }
            size_t lost = marked[s] ? lost_marks(world, s) : 0;
            if (lost)
                fail_msg("slot %u: %zu late pages after it was freed", s, lost);
        }
    }
}

/* A new step of the only worker, which wants `SLOTS` experts from `first` on. */
static void ask_for(struct world *world, uint32_t first)
{
    world_tick(world, 0, ++world->tick);
    for (uint32_t e = 0; e < SLOTS; e++)
        world_ask(world, 0, (first + e) % EXPERTS, world->tick);
}

static uint32_t find_loading(const struct world *world, bool ret_loading[SLOTS])
{
    uint32_t count = 0;
    for (uint32_t s = 0; s < SLOTS; s++) {
        ret_loading[s] = slot_state_of(atomic_load(&world->pool.slots[s].state)) == SLOT_LOADING;
        count += ret_loading[s];
    }
    return count;
}

/* Pins all that was asked for and watches it. */
static void watch(struct world *world, uint32_t first)
{
    struct slot_ref refs[SLOTS];
    for (uint32_t e = 0; e < SLOTS; e++) {
        int status = world_get(world, 0, (first + e) % EXPERTS, world->tick, PATIENCE, &refs[e]);
        if (status < 0)
            fail_msg("expert %u after a restart: %d", (first + e) % EXPERTS, status);
    }
    for (uint64_t end = harness_now_ms() + WATCH_MS; harness_now_ms() < end;) {
        for (uint32_t e = 0; e < SLOTS; e++) {
            size_t wrong = world_wrong_words(world, refs[e], (first + e) % EXPERTS, PAGE_WORDS);
            if (wrong)
                fail_msg("expert %u, slot %u: %zu pages are another expert's", (first + e) % EXPERTS, refs[e].index,
                         wrong);
        }
        usleep(2000);
    }
    for (uint32_t e = 0; e < SLOTS; e++) {
        assert_int_equal(world_wrong_words(world, refs[e], (first + e) % EXPERTS, 1), 0);
        world_put(world, 0, refs[e]);
    }
}

static void kill_rounds(uint32_t io, int rounds)
{
    struct world world;
    struct iod_process process;
    uint32_t first = 0, loading = 0;
    pthread_t noise[NOISE];
    unsigned seeds[NOISE];
    atomic_store(&noise_stop, false);
    for (uint32_t i = 0; i < NOISE; i++) {
        seeds[i] = i;
        assert_int_equal(pthread_create(&noise[i], NULL, make_noise, &seeds[i]), 0);
    }
    world_open(&world, scratch, container_path, &(struct world_options){SLOTS, 1, 1, io});
    iod_spawn(&world, false, &process);
    wait_ready(&process);
    assert_int_equal(pool_attach_objects(&world.pool, NULL), 0);
    ask_for(&world, first);
    watch(&world, first);
    for (int round = 0; round < rounds; round++) {
        first += SLOTS;
        ask_for(&world, first);
        usleep(1000 + (unsigned)round % 5 * 2000);
        kill(process.pid, SIGKILL);
        iod_stop(&process, 0);
        bool was_loading[SLOTS];
        uint32_t count = find_loading(&world, was_loading);
        loading += count;
        if (round % 2)
            watch_behind_lock(&world, was_loading);
        control_raise_epoch(world.control);
        iod_spawn(&world, false, &process);
        watch_marks(&world, was_loading, count);
        wait_ready(&process);
        first += SLOTS; /* none of those that the dead one was reading */
        ask_for(&world, first);
        watch(&world, first);
    }
    assert_true(loading >= (uint32_t)rounds); /* reads were in flight indeed */
    atomic_store(&noise_stop, true);
    for (uint32_t i = 0; i < NOISE; i++)
        pthread_join(noise[i], NULL);
    int status = iod_stop(&process, SIGTERM);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    print_message("%d kills, %u slots were loading\n", rounds, loading);
    world_close(&world);
}

static void test_kill_uring(void **state)
{
    (void)state;
    kill_rounds(IO_URING, 20);
}

static void test_kill_pread(void **state)
{
    (void)state;
    kill_rounds(IO_PREAD, 8);
}

int main(void)
{
    harness_scratch("test_iod_kill", scratch);
    snprintf(container_path, sizeof(container_path), "%s/container", scratch);
    harness_make_container(container_path, &geometry);
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_kill_uring), cmocka_unit_test(test_kill_pread)};
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    harness_end(scratch);
    return failed;
}
