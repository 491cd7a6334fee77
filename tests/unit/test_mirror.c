/* The I/O daemon with a second copy of its container: on the disk of the build, and in /dev/shm, which stands for another
 * drive. Whatever happens to one copy, what arrives is right. */
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "proto/cleanup.h"
#include "shm/dense.h"
#include "tests/unit/faulty_method.h"
#include "tests/unit/iod_harness.h"

#define EXPERTS 6u /* of the only MoE layer */
#define TOP_K 2u
#define PATIENCE 20000 /* ms; far more than anything takes, for machines under load */
#define EXPERT_FILE "experts-0-00001.safetensors"

/* Slices of more than PIECE_BYTES, so that one is several pieces, as GLM-5.2's are. */
static const struct geometry geometry = {
    .hidden = 2048, .width = 6144, .layers = 2, .experts = EXPERTS, .top_k = TOP_K, .dense_bytes = 5u << 20};
static char scratch[256], other_drive[64];
static char paths[MAX_COPIES][300]; /* the container, its mirror */

static uint64_t device_of(uint32_t copy)
{
    struct stat found;
    assert_int_equal(stat(paths[copy], &found), 0);
    return found.st_dev;
}

static void file_in(uint32_t copy, const char *name, char ret_path[static 700])
{
    snprintf(ret_path, 700, "%s/%s", paths[copy], name);
}

/* Of a byte of an expert's slice in its file. */
static uint64_t offset_of(uint32_t expert, uint32_t slice, uint64_t byte)
{
    struct container *container;
    assert_int_equal(container_open(paths[0], &container, NULL), 0);
    uint64_t offset = container->experts[0].stripes[0].offsets[expert] + slice * container->slice_bytes + byte;
    container_close(container);
    return offset;
}

/* Makes the other copy so slow that this one is surely read. */
static void prefer(uint32_t copy)
{
    fault_plan.slow_us = 8000;
    fault_plan.slow_device = device_of(1 - copy);
}

static void flip(uint32_t copy, const char *name, uint64_t offset)
{
    char path[700];
    file_in(copy, name, path);
    harness_flip_byte(path, offset, 0x20);
}

static void open_world(struct world *world, uint32_t slots, const char *mirror)
{
    world_open(world, scratch, paths[0], &(struct world_options){slots, 2, 1, IO_AUTO});
    snprintf(world->control->facts.mirror, sizeof(world->control->facts.mirror), "%s", mirror);
}

/* From when that copy is dropped on, every read that is sent there is counted. */
static void watch(const struct world *world, uint32_t copy)
{
    fault_plan.dropped_state = &world->control->iod.copies[copy].state;
    fault_plan.dropped_device = device_of(copy);
}

static void start(struct iod_thread *iod, struct world *world)
{
    if (iod_thread_start(iod, world, &faulty_method) < 0)
        fail_msg("%s", iod->error.text);
}

static void stop(struct iod_thread *iod, struct world *world)
{
    assert_int_equal(iod_thread_stop(iod), 0);
    world_close(world);
}

static void get_right(struct world *world, uint32_t expert)
{
    struct slot_ref ref;
    int status = world_get(world, 0, expert, world->tick, PATIENCE, &ref);
    if (status < 0)
        fail_msg("expert %u: %d", expert, status);
    assert_int_equal(world_wrong_words(world, ref, expert, 1), 0);
    world_put(world, 0, ref);
}

/* All experts, one after the other: each is read anew where the pool has TOP_K slots. */
static void use_all(struct world *world)
{
    world_tick(world, 0, ++world->tick);
    for (uint32_t e = 0; e < EXPERTS; e++)
        get_right(world, e);
}

/* All experts, asked for at once, and used as they come. */
static void use_at_once(struct world *world)
{
    bool used[EXPERTS] = {false};
    uint64_t end = harness_now_ms() + PATIENCE;
    world_tick(world, 0, ++world->tick);
    for (uint32_t e = 0; e < EXPERTS; e++)
        world_ask(world, 0, e, world->tick);
    for (uint32_t left = EXPERTS; left > 0; usleep(200)) {
        for (uint32_t e = 0; e < EXPERTS; e++) {
            struct slot_ref ref;
            int status = used[e] ? -EALREADY : pool_pin(&world->pool, e, 0, world->tick, &ref);
            if (status == -EIO)
                fail_msg("expert %u failed", e);
            if (status < 0)
                continue;
            assert_int_equal(world_wrong_words(world, ref, e, 1), 0);
            world_put(world, 0, ref);
            used[e] = true;
            left--;
        }
        if (harness_now_ms() > end)
            fail_msg("%u experts did not come", left);
    }
}

static uint32_t state_of(const struct world *world, uint32_t copy)
{
    return atomic_load(&world->control->iod.copies[copy].state);
}

static void expect_counts(const struct world *world, uint32_t copy, uint64_t failures, uint64_t wrong)
{
    const struct copy_line *line = &world->control->iod.copies[copy];
    assert_int_equal(line->read_failures, failures);
    assert_int_equal(line->wrong_checksums, wrong);
}

static uint64_t bytes_of(const struct world *world, uint32_t copy)
{
    const struct iod_line *iod = &world->control->iod;
    uint64_t bytes = 0;
    for (uint32_t d = 0; d < iod->drive_count; d++)
        bytes += iod->drives[d].copies & 1u << copy ? atomic_load(&iod->drives[d].bytes) : 0;
    return bytes;
}

static uint32_t count_lines(const char *log, const char *words)
{
    uint32_t count = 0;
    for (const char *at = log; (at = strstr(at, words)); at++)
        count++;
    return count;
}

/* So many lines with those words since the last look. */
static void expect_lines(uint32_t count, const char *words)
{
    _cleanup_free_ char *log = iod_thread_log();
    if (count_lines(log, words) != count)
        fail_msg("not %u lines say \"%s\": %s", count, words, log);
}

/* One line of the log is about a file of a copy: that copy, with those words. */
static void check_log(const char *log, uint32_t copy, const char *words)
{
    char begin[700];
    file_in(copy, EXPERT_FILE ": ", begin);
    const char *line = strstr(log, begin), *found = line ? strstr(line, words) : NULL;
    if (count_lines(log, ".safetensors: ") != 1 || !found || memchr(line, '\n', (size_t)(found - line)))
        fail_msg("not one line \"%s\" that says \"%s\": %s", begin, words, log);
}

/* Both copies are read, the slower less, and every byte is somebody's. */
static void test_both_are_read(void **state)
{
    (void)state;
    for (uint32_t slow = 0; slow < MAX_COPIES; slow++) {
        struct world world;
        struct iod_thread iod;
        plan_faults(&io_method_uring, 0);
        fault_plan.slow_us = 8000;
        open_world(&world, TOP_K, paths[1]);
        start(&iod, &world);
        use_all(&world);
        fault_plan.slow_device = device_of(slow);
        use_at_once(&world);
        uint64_t before[] = {bytes_of(&world, 0), bytes_of(&world, 1)};
        for (int round = 0; round < 3; round++)
            use_at_once(&world);
        assert_int_equal(world.control->iod.drive_count, 2);
        uint64_t slower = bytes_of(&world, slow) - before[slow];
        uint64_t faster = bytes_of(&world, 1 - slow) - before[1 - slow];
        assert_true(bytes_of(&world, 0) > 0 && bytes_of(&world, 1) > 0);
        if (faster < 2 * slower)
            fail_msg("%llu bytes from the slow drive, %llu from the other", (unsigned long long)slower,
                     (unsigned long long)faster);
        iod_thread_stop(&iod);
        assert_true(bytes_of(&world, 0) + bytes_of(&world, 1) <= atomic_load(&world.control->iod.load_bytes));
        assert_true(state_of(&world, 0) == COPY_USED && state_of(&world, 1) == COPY_USED);
        assert_int_equal(world.control->iod.failures, 0);
        world_close(&world);
    }
    expect_lines(0, "read no more");
}

/* A wrong byte in either copy: right bytes from the other, one line, and that slice is not read there again. */
static void test_flipped_byte(void **state)
{
    (void)state;
    for (uint32_t copy = 0; copy < MAX_COPIES; copy++) {
        struct world world;
        struct iod_thread iod;
        uint64_t offset = offset_of(3, 5, 4097);
        plan_faults(&io_method_uring, 0);
        prefer(1 - copy);
        flip(copy, EXPERT_FILE, offset);
        open_world(&world, TOP_K, paths[1]);
        start(&iod, &world);
        free(iod_thread_log());
        use_at_once(&world); /* all is verified, but in the other copy */
        prefer(copy);
        char *log = strdup("");
        for (int round = 0; round < 50 && !strstr(log, ".safetensors"); round++) {
            free(log);
            use_at_once(&world);
            log = iod_thread_log();
        }
        check_log(log, copy, "expert 3 of layer 1, slice 5: its checksum differs");
        assert_non_null(strstr(log, "instead"));
        assert_non_null(strstr(log, paths[1 - copy]));
        free(log);
        uint64_t retries = world.control->iod.retries;
        assert_int_equal(retries, 2); /* again from that copy, then from the other */
        for (int round = 0; round < 5; round++)
            use_at_once(&world);
        expect_lines(0, "expert");
        assert_int_equal(world.control->iod.retries, retries);
        assert_int_equal(world.control->iod.failures, 0);
        assert_true(state_of(&world, 0) == COPY_USED && state_of(&world, 1) == COPY_USED);
        expect_counts(&world, copy, 0, 1);
        expect_counts(&world, 1 - copy, 0, 0);
        stop(&iod, &world);
        flip(copy, EXPERT_FILE, offset);
    }
}

/* Wrong in both copies: that expert fails with its name, the others do not, and mending one copy is enough. */
static void test_flipped_in_both(void **state)
{
    (void)state;
    struct world world;
    struct iod_thread iod;
    struct slot_ref ref;
    uint64_t offset = offset_of(2, 7, 0);
    plan_faults(&io_method_pread, 0);
    for (uint32_t copy = 0; copy < MAX_COPIES; copy++)
        flip(copy, EXPERT_FILE, offset);
    open_world(&world, EXPERTS, paths[1]);
    start(&iod, &world);
    free(iod_thread_log());
    for (int round = 0; round < 2; round++) {
        assert_int_equal(world_get(&world, 0, 2, world.tick, PATIENCE, &ref), -EIO);
        assert_int_equal(world.pool.slots[ref.index].error, EBADMSG);
        assert_int_equal(world.pool.slots[ref.index].slice, 7);
        get_right(&world, 1);
        get_right(&world, 3);
        expect_lines(2, "expert 2 of layer 1, slice 7: its checksum differs"); /* each copy's */
        world_tick(&world, 0, ++world.tick);
    }
    assert_int_equal(world.control->iod.failures, 2);
    expect_counts(&world, 0, 0, 2);
    expect_counts(&world, 1, 0, 2);
    flip(1, EXPERT_FILE, offset);
    get_right(&world, 2);
    stop(&iod, &world);
    flip(0, EXPERT_FILE, offset);
}

/* A file that is cut short while it is read: one line, that copy is dropped, the other gives everything. */
static void test_truncated(void **state)
{
    (void)state;
    for (uint32_t copy = 0; copy < MAX_COPIES; copy++) {
        struct world world;
        struct iod_thread iod;
        char path[700];
        plan_faults(copy ? &io_method_pread : &io_method_uring, 0);
        prefer(copy);
        open_world(&world, TOP_K, paths[1]);
        watch(&world, copy);
        start(&iod, &world);
        free(iod_thread_log());
        file_in(copy, EXPERT_FILE, path);
        off_t cut = (off_t)offset_of(0, 3, copy ? 8192 : 100);
        _cleanup_close_ int fd = open(path, O_RDWR | O_CLOEXEC);
        off_t size = lseek(fd, 0, SEEK_END);
        _cleanup_free_ char *rest = malloc((size_t)(size - cut));
        for (off_t done = 0, got; done < size - cut; done += got) {
            got = pread(fd, rest + done, (size_t)(size - cut - done), cut + done);
            assert_true(got > 0);
        }
        assert_int_equal(ftruncate(fd, cut), 0);
        for (int round = 0; round < 4; round++)
            use_at_once(&world);
        _cleanup_free_ char *log = iod_thread_log();
        check_log(log, copy, "the file is truncated: this copy is read no more");
        expect_counts(&world, copy, 1, 0);
        expect_counts(&world, 1 - copy, 0, 0);
        assert_int_equal(state_of(&world, copy), COPY_DROPPED);
        assert_int_equal(fault_plan.dropped_reads, 0);
        assert_int_equal(state_of(&world, 1 - copy), COPY_USED);
        assert_int_equal(world.control->iod.failures, 0);
        stop(&iod, &world);
        for (off_t done = 0, put; done < size - cut; done += put) {
            put = pwrite(fd, rest + done, (size_t)(size - cut - done), cut + done);
            assert_true(put > 0);
        }
        assert_int_equal(fsync(fd), 0);
    }
}

/* A drive dies with reads in flight and more that wait; then the other one gives errors as well, and comes back. */
static void test_dead_drive(void **state)
{
    (void)state;
    static const int results[] = {-EIO, -ENODEV};
    for (uint32_t copy = 0; copy < MAX_COPIES; copy++) {
        struct world world;
        struct iod_thread iod;
        struct slot_ref ref;
        plan_faults(copy ? &io_method_uring : &io_method_pread, FAULT_HOLD);
        open_world(&world, EXPERTS, paths[1]);
        watch(&world, copy);
        start(&iod, &world);
        free(iod_thread_log());
        fault_plan.broken_result = results[copy];
        prefer(copy);
        get_right(&world, 0);
        fault_plan.broken_device = device_of(copy);
        for (uint32_t e = 1; e < 4; e++)
            world_ask(&world, 0, e, world.tick);
        world_guess(&world, 0, 4, world.tick + 1);
        for (uint32_t e = 0; e < 5; e++)
            get_right(&world, e);
        _cleanup_free_ char *log = iod_thread_log();
        check_log(log, copy, "this copy is read no more");
        assert_non_null(strstr(log, strerror(-results[copy])));
        assert_int_equal(state_of(&world, copy), COPY_DROPPED);
        assert_int_equal(fault_plan.dropped_reads, 0); /* nor what was in flight, with its first EIO */
        assert_int_equal(world.control->iod.failures, 0);

        fault_plan.slow_device = 0;
        fault_plan.broken_device = device_of(1 - copy);
        assert_int_equal(world_get(&world, 0, 5, world.tick, PATIENCE, &ref), -EIO);
        assert_int_equal(world.pool.slots[ref.index].error, -results[copy]);
        expect_lines(1, "expert 5 of layer 1, slice ");
        assert_int_equal(state_of(&world, 1 - copy), COPY_USED);
        fault_plan.broken_device = 0;
        world_tick(&world, 0, ++world.tick);
        uint64_t before = bytes_of(&world, copy);
        get_right(&world, 5);
        assert_int_equal(bytes_of(&world, copy), before); /* dropped is dropped */
        stop(&iod, &world);
    }
}

/* What cannot be a mirror is one line, and the start goes on without it. */
static void test_refused(void **state)
{
    (void)state;
    char stale[320], cut[320], link[320], path[400], file[400];
    struct geometry other = geometry;
    other.dense_bytes /= 2;
    other.width = 512;
    snprintf(stale, sizeof(stale), "%s/stale", scratch);
    snprintf(cut, sizeof(cut), "%s/cut", scratch);
    snprintf(link, sizeof(link), "%s/link", scratch);
    harness_make_container(stale, &other);
    harness_make_container(cut, &geometry);
    snprintf(file, sizeof(file), "%s/" EXPERT_FILE, cut);
    assert_int_equal(truncate(file, 1 << 20), 0);
    assert_int_equal(symlink(paths[0], link), 0);
    snprintf(path, sizeof(path), "%s/nothing", scratch);
    const struct {
        const char *path, *words;
    } cases[] = {{stale, "is not the container that the instance was started with"},
                 {cut, "has 1048576 bytes, the manifest says"},
                 {path, "No such file"},
                 {scratch, "holds no calypte.json"},
                 {link, "is the container itself"}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct world world;
        struct iod_thread iod;
        plan_faults(&io_method_uring, 0);
        open_world(&world, TOP_K, cases[i].path);
        start(&iod, &world);
        _cleanup_free_ char *log = iod_thread_log();
        if (!strstr(log, "mirror not used, ") || !strstr(log, cases[i].words) ||
            count_lines(log, " is read alone: ") != 1)
            fail_msg("not one line that says \"%s\": %s", cases[i].words, log);
        assert_true(state_of(&world, 0) == COPY_USED && state_of(&world, 1) == COPY_REFUSED);
        use_all(&world);
        assert_int_equal(world.control->iod.drive_count, 1);
        stop(&iod, &world);
    }
    unlink(link);
}

/* A daemon that is started anew when the first copy has gone reads the mirror alone. */
static void test_first_gone(void **state)
{
    (void)state;
    struct world world;
    struct iod_thread iod;
    char away[320];
    plan_faults(&io_method_uring, 0);
    open_world(&world, TOP_K, paths[1]);
    start(&iod, &world);
    use_all(&world);
    assert_int_equal(iod_thread_stop(&iod), 0);
    free(iod_thread_log());
    snprintf(away, sizeof(away), "%s/away", scratch);
    assert_int_equal(rename(paths[0], away), 0);
    control_raise_epoch(world.control);
    start(&iod, &world);
    use_all(&world);
    assert_true(state_of(&world, 0) == COPY_REFUSED && state_of(&world, 1) == COPY_USED);
    expect_lines(1, "is read alone");
    stop(&iod, &world);
    assert_int_equal(rename(away, paths[0]), 0);
}

static void check_dense(const struct world *world)
{
    struct dense dense;
    struct error error;
    if (dense_attach(world->instance, &dense, &error) < 0)
        fail_msg("%s", error.text);
    for (uint32_t f = 0; f < 2; f++) {
        char name[64];
        snprintf(name, sizeof(name), "model.big.%u.weight", f);
        const uint64_t shape[] = {geometry.dense_bytes / 16, 2};
        const uint64_t *words = dense_find(&dense, name, DTYPE_U64, 2, shape, &error);
        assert_non_null(words);
        for (size_t i = 0; i < geometry.dense_bytes / 8; i++)
            assert_true(words[i] == dense_word(f, i));
    }
    dense_detach(&dense);
}

/* The dense weights: from the mirror where the first copy's drive fails, or a tensor of it is damaged. */
static void test_dense(void **state)
{
    (void)state;
    const char *name = "dense-00001.safetensors";
    struct container *container;
    struct world world;
    struct iod_thread iod;
    assert_int_equal(container_open(paths[0], &container, NULL), 0);
    uint64_t offset = safetensors_find(&container->dense[0].header, "model.big.0.weight")->offset + (3u << 20);
    container_close(container);

    plan_faults(&io_method_uring, 0);
    fault_plan.broken_result = -EIO;
    fault_plan.broken_device = device_of(0);
    open_world(&world, TOP_K, paths[1]);
    start(&iod, &world);
    check_dense(&world);
    expect_lines(1, "this copy is read no more");
    assert_int_equal(state_of(&world, 0), COPY_DROPPED);
    expect_counts(&world, 0, 1, 0);
    use_all(&world);
    stop(&iod, &world);

    plan_faults(&io_method_pread, 0);
    flip(0, name, offset);
    open_world(&world, TOP_K, paths[1]);
    start(&iod, &world);
    check_dense(&world);
    expect_lines(1, "tensor model.big.0.weight: its checksum differs, the bytes on disk are damaged: read from ");
    expect_counts(&world, 0, 0, 1);
    assert_true(state_of(&world, 0) == COPY_USED && state_of(&world, 1) == COPY_USED);
    stop(&iod, &world);

    flip(1, name, offset);
    open_world(&world, TOP_K, paths[1]);
    assert_int_equal(iod_thread_start(&iod, &world, &faulty_method), -EBADMSG);
    assert_non_null(strstr(iod.error.text, "model.big.0.weight"));
    assert_non_null(strstr(iod.error.text, paths[1]));
    world_close(&world);
    free(iod_thread_log());
    for (uint32_t copy = 0; copy < MAX_COPIES; copy++)
        flip(copy, name, offset);
}

int main(void)
{
    harness_scratch("test_mirror", scratch);
    strcpy(other_drive, "/dev/shm/test-mirror-XXXXXX");
    if (!mkdtemp(other_drive))
        return 1;
    snprintf(paths[0], sizeof(paths[0]), "%s/container", scratch);
    snprintf(paths[1], sizeof(paths[1]), "%s/mirror", other_drive);
    for (uint32_t copy = 0; copy < MAX_COPIES; copy++)
        harness_make_container(paths[copy], &geometry);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_both_are_read),   cmocka_unit_test(test_flipped_byte),
        cmocka_unit_test(test_flipped_in_both), cmocka_unit_test(test_truncated),
        cmocka_unit_test(test_dead_drive),      cmocka_unit_test(test_refused),
        cmocka_unit_test(test_first_gone),      cmocka_unit_test(test_dense),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    harness_remove(other_drive);
    harness_end(scratch);
    return failed;
}
