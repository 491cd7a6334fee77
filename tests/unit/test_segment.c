/* Segments: names, modes, refusals of what is foreign or damaged, a /dev/shm that is too small, and futexes on them. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "shm/futex.h"
#include "shm/segment.h"

static char instance[INSTANCE_NAME_MAX];
static const struct segment_options small = {.kind = SEGMENT_KV, .node = -1, .populate_threads = 1};

static void test_create_attach(void **state)
{
    (void)state;
    struct segment a, b;
    struct error error;
    const size_t bytes = 40u << 20; /* several populate steps */
    const struct segment_options options = {.kind = SEGMENT_KV, .node = 0, .hugepages = true, .populate_threads = 3};
    assert_int_equal(segment_create(instance, "kv", bytes, &options, &a, &error), 0);
    assert_int_equal(segment_create(instance, "kv", bytes, &options, &b, &error), -EEXIST);
    assert_non_null(strstr(error.text, ".kv"));

    char name[128];
    snprintf(name, sizeof(name), "/calypte.%s.kv", instance);
    int fd = shm_open(name, O_RDWR, 0);
    struct stat stat;
    assert_int_equal(fstat(fd, &stat), 0);
    close(fd);
    assert_int_equal(stat.st_mode & 0777, 0600);
    assert_true((uint64_t)stat.st_blocks * 512 >= bytes); /* every page is there already */

    assert_int_equal(segment_attach(instance, "kv", SEGMENT_KV, bytes, true, &b, &error), 0);
    strcpy((char *)a.base + 4096, "seen by both");
    assert_string_equal((char *)b.base + 4096, "seen by both");
    segment_detach(&b);
    assert_null(b.base);
    segment_detach(&b);
    segment_detach(&a);
    assert_int_equal(segment_unlink(instance, "kv"), 1);
    assert_int_equal(segment_unlink(instance, "kv"), 0);
    assert_int_equal(segment_attach(instance, "kv", SEGMENT_KV, 0, true, &b, &error), -ENOENT);
}

static void test_refusals(void **state)
{
    (void)state;
    struct segment a, b;
    struct error error;
    assert_int_equal(segment_create(instance, "kv", 8192, &small, &a, &error), 0);
    struct segment_header *header = a.base;

    assert_int_equal(segment_attach(instance, "kv", SEGMENT_DENSE, 0, false, &b, &error), -EBADMSG);
    assert_int_equal(segment_attach(instance, "kv", SEGMENT_KV, 4096, false, &b, &error), -EBADMSG);
    header->layout++;
    assert_int_equal(segment_attach(instance, "kv", SEGMENT_KV, 0, false, &b, &error), -EPROTO);
    assert_non_null(strstr(error.text, "layout"));
    header->layout--;
    header->bytes = 4096;
    assert_int_equal(segment_attach(instance, "kv", SEGMENT_KV, 0, false, &b, &error), -EBADMSG);
    header->bytes = 8192;
    header->magic ^= 1;
    assert_int_equal(segment_attach(instance, "kv", SEGMENT_KV, 0, false, &b, &error), -EBADMSG);
    header->magic ^= 1;
    assert_int_equal(segment_attach(instance, "kv", SEGMENT_KV, 0, false, &b, &error), 0);
    segment_detach(&b);
    segment_detach(&a);
    segment_unlink(instance, "kv");

    char name[128]; /* shorter than its own header: an object made by somebody who died at once */
    snprintf(name, sizeof(name), "/calypte.%s.kv", instance);
    int fd = shm_open(name, O_RDWR | O_CREAT | O_EXCL, 0600);
    assert_true(fd >= 0);
    assert_int_equal(segment_attach(instance, "kv", SEGMENT_KV, 0, true, &b, &error), -EBADMSG);
    assert_int_equal(ftruncate(fd, 7), 0);
    assert_int_equal(segment_attach(instance, "kv", SEGMENT_KV, 0, true, &b, &error), -EBADMSG);
    close(fd);
    segment_unlink(instance, "kv");
}

static void test_too_small(void **state)
{
    (void)state;
    struct segment a;
    struct error error;
    const size_t sizes[] = {(size_t)1 << 50, (size_t)1 << 62};
    for (size_t i = 0; i < 2; i++) {
        assert_int_equal(segment_create(instance, "pool.0.0", sizes[i], &(struct segment_options){.kind = SEGMENT_RAW, .node = -1}, &a,
                                        &error), -ENOSPC);
        char wanted[32];
        snprintf(wanted, sizeof(wanted), "%zu bytes", sizes[i]);
        assert_non_null(strstr(error.text, wanted));
        assert_non_null(strstr(error.text, ".pool.0.0"));
        assert_non_null(strstr(error.text, "free"));
        assert_non_null(strstr(error.text, "--pool"));
        assert_int_equal(segment_unlink(instance, "pool.0.0"), 0); /* nothing was left behind */
    }
}

static void test_names(void **state)
{
    (void)state;
    const char *bad[] = {"", "a.b", "a/b", "../x", "a b", "\xc3\xa4", "0123456789012345678901234567890123456789012345678901234567890123"};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        struct error error = {""};
        assert_int_equal(segment_check_instance(bad[i], &error), -EINVAL);
        assert_true(strlen(error.text) > 0);
        assert_int_equal(segment_unlink_all(bad[i]), -EINVAL);
    }
    assert_int_equal(segment_check_instance("Az-_09", NULL), 0);
}

static void test_unlink_all(void **state)
{
    (void)state;
    struct segment a;
    char other[INSTANCE_NAME_MAX]; /* a name that begins like ours */
    snprintf(other, sizeof(other), "test-segment-%dx", (int)getpid());
    const char *parts[] = {"kv", "pool", "pool.0.1"};
    for (size_t i = 0; i < 3; i++) {
        assert_int_equal(segment_create(instance, parts[i], 4096, &small, &a, NULL), 0);
        segment_detach(&a);
    }
    assert_int_equal(segment_create(other, "kv", 4096, &small, &a, NULL), 0);
    segment_detach(&a);
    assert_int_equal(segment_unlink_all(instance), 3);
    assert_int_equal(segment_unlink_all(instance), 0);
    assert_int_equal(segment_unlink_all(other), 1);
}

/* A sleeper in another process is woken; one that was killed asleep disturbs nobody. */
static void test_futex_across_processes(void **state)
{
    (void)state;
    struct segment a;
    assert_int_equal(segment_create(instance, "kv", 4096, &small, &a, NULL), 0);
    _Atomic uint32_t *word = (_Atomic uint32_t *)(void *)((char *)a.base + 1024);
    pid_t victim = fork(), sleeper;
    if (victim == 0) {
        while (true)
            futex_wait(word, 0, -1);
    }
    sleeper = fork();
    if (sleeper == 0) {
        while (atomic_load(word) == 0)
            futex_wait(word, 0, -1);
        _exit(7);
    }
    usleep(50000);
    kill(victim, SIGKILL);
    waitpid(victim, NULL, 0);
    assert_int_equal(futex_wait(word, 0, 20), -ETIMEDOUT);
    atomic_store(word, 1);
    futex_wake_all(word);
    int status;
    waitpid(sleeper, &status, 0);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 7);
    assert_int_equal(futex_wait(word, 0, -1), 0); /* differs already: does not sleep */
    segment_detach(&a);
    segment_unlink(instance, "kv");
}

int main(void)
{
    snprintf(instance, sizeof(instance), "test-segment-%d", (int)getpid());
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_create_attach), cmocka_unit_test(test_refusals),   cmocka_unit_test(test_too_small),
        cmocka_unit_test(test_names),         cmocka_unit_test(test_unlink_all), cmocka_unit_test(test_futex_across_processes),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    segment_unlink_all(instance);
    return failed;
}
