/* Segments: names, modes, refusals of what is foreign or damaged, a /dev/shm that is too small, and futexes on them. */
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
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

/* KiB of a mapping that stand in huge pages, by the kernel's own account. */
static unsigned long huge_kib(const void *base)
{
    char line[512], address[32];
    unsigned long kib = 0;
    bool here = false;
    FILE *maps = fopen("/proc/self/smaps", "r");
    assert_non_null(maps);
    snprintf(address, sizeof(address), "%lx-", (unsigned long)(uintptr_t)base);
    while (fgets(line, sizeof(line), maps)) {
        if (strncmp(line, address, strlen(address)) == 0)
            here = true;
        else if (here && sscanf(line, "ShmemPmdMapped: %lu kB", &kib) == 1)
            break;
    }
    fclose(maps);
    return kib;
}

/* Whether this kernel collapses pages of a mount that gives no huge ones. */
static bool kernel_collapses(void)
{
    char *room = mmap(NULL, 2 * HUGE_PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    char *place = (char *)(((uintptr_t)room + HUGE_PAGE - 1) & ~(HUGE_PAGE - 1));
    int fd = shm_open("/calypte-test-collapse", O_CREAT | O_RDWR, 0600);
    shm_unlink("/calypte-test-collapse");
    assert_int_equal(ftruncate(fd, HUGE_PAGE), 0);
    char *page = mmap(place, HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0);
    assert_true(page == place);
    *page = 1;
    bool can = madvise(page, HUGE_PAGE, 25 /* MADV_COLLAPSE */) == 0;
    munmap(room, 2 * HUGE_PAGE);
    close(fd);
    return can;
}

/* Huge pages without a mount that gives them, seen by whoever attaches, and none where they are not wanted. */
static void test_huge_pages(void **state)
{
    (void)state;
    struct segment a, b;
    struct error error;
    if (!kernel_collapses())
        skip();
    struct segment_options options = {.kind = SEGMENT_KV, .node = -1, .hugepages = true};
    const size_t bytes = 20 * HUGE_PAGE + 4096;
    assert_int_equal(segment_create(instance, "kv", bytes, &options, &a, &error), 0);
    assert_true(huge_kib(a.base) >= HUGE_PAGE >> 10); /* all 20, but where the machine has no more */
    ((char *)a.base)[5 * HUGE_PAGE] = 1;
    assert_int_equal(segment_attach(instance, "kv", SEGMENT_KV, bytes, true, &b, &error), 0);
    unsigned long sum = 0;
    for (size_t at = 0; at < bytes; at += 4096)
        sum += ((const unsigned char *)b.base)[at];
    assert_true(sum > 0);
    assert_int_equal(huge_kib(b.base), huge_kib(a.base));
    segment_detach(&b);
    segment_detach(&a);
    segment_unlink(instance, "kv");
    options.hugepages = false;
    assert_int_equal(segment_create(instance, "kv", bytes, &options, &a, &error), 0);
    assert_int_equal(huge_kib(a.base), 0);
    segment_detach(&a);
    segment_unlink(instance, "kv");
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
        assert_int_equal(segment_create(instance, "pool.0.0", sizes[i],
                                        &(struct segment_options){.kind = SEGMENT_RAW, .node = -1}, &a, &error),
                         -ENOSPC);
        char wanted[32];
        snprintf(wanted, sizeof(wanted), "%zu bytes", sizes[i]);
        assert_non_null(strstr(error.text, wanted));
        assert_non_null(strstr(error.text, ".pool.0.0"));
        assert_non_null(strstr(error.text, "free"));
        assert_non_null(strstr(error.text, "--pool"));
        assert_int_equal(segment_unlink(instance, "pool.0.0"), 0); /* nothing was left behind */
    }
}

#define RACERS 4

/* In a namespace with a /dev/shm of 64 MiB of its own, four make 24 MiB each at the same moment. Each either has all
 * its pages or gets the error, never a signal. */
static void race_for_space(const int gate[2])
{
    struct segment a;
    struct error error;
    char part[16], byte;
    snprintf(part, sizeof(part), "kv.%d", (int)getpid());
    (void)!read(gate[0], &byte, 1);
    int status = segment_create(instance, part, 24u << 20, &small, &a, &error);
    if (status < 0)
        _exit(status == -ENOSPC && strstr(error.text, "25165824 bytes") && segment_unlink(instance, part) == 0 ? 1 : 2);
    memset((char *)a.base + sizeof(struct segment_header), 1, a.bytes - sizeof(struct segment_header));
    usleep(300000); /* keeps it while the others try */
    _exit(0);
}

/* In a process of its own: what it does to itself ends with it. 77: it is not allowed to. */
static void expect_in_child(int (*run)(void))
{
    int status;
    fflush(NULL);
    pid_t child = fork();
    if (child == 0)
        _exit(run());
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    if (WEXITSTATUS(status) == 77)
        skip();
    assert_int_equal(WEXITSTATUS(status), 0);
}

static int run_racers(void)
{
    if (unshare(CLONE_NEWNS) < 0 || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0 ||
        mount("tmpfs", "/dev/shm", "tmpfs", 0, "size=64M") < 0)
        return 77;
    int gate[2], counts[3] = {0}, status;
    if (pipe(gate) < 0)
        return 3;
    for (int i = 0; i < RACERS; i++) {
        if (fork() == 0) {
            close(gate[1]);
            race_for_space(gate);
        }
    }
    close(gate[0]);
    close(gate[1]); /* the end of the pipe is the start */
    for (int i = 0; i < RACERS; i++) {
        if (wait(&status) < 0 || !WIFEXITED(status) || WEXITSTATUS(status) > 1)
            return 4;
        counts[WEXITSTATUS(status)]++;
    }
    return counts[0] <= 2 && counts[0] + counts[1] == RACERS ? 0 : 5;
}

static void test_small_mount(void **state)
{
    (void)state;
    expect_in_child(run_racers);
}

/* In a namespace with a /dev/shm of four inodes of its own: its folder, and one segment less than the loop makes. */
static int run_out_of_inodes(void)
{
    struct segment a;
    struct error error = {""};
    char part[16];
    int status = 0;
    if (unshare(CLONE_NEWNS) < 0 || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0 ||
        mount("tmpfs", "/dev/shm", "tmpfs", 0, "size=64M,nr_inodes=4") < 0)
        return 77;
    for (int i = 0; i < 4 && status == 0; i++) {
        snprintf(part, sizeof(part), "kv.%d", i);
        status = segment_create(instance, part, 8192, &small, &a, &error);
    }
    return status == -ENOSPC && strstr(error.text, ".kv.3 ") && strstr(error.text, "no inodes left") &&
                   strstr(error.text, "remount,nr_inodes=")
               ? 0
               : 1;
}

static void test_no_inodes(void **state)
{
    (void)state;
    expect_in_child(run_out_of_inodes);
}

static void test_no_descriptors(void **state)
{
    (void)state;
    struct segment a;
    struct error created = {""}, attached = {""}, populated = {""};
    struct rlimit limit;
    assert_int_equal(segment_create(instance, "kv", 8192, &small, &a, NULL), 0);
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &limit), 0);
    const struct rlimit none = {.rlim_cur = 0, .rlim_max = limit.rlim_max};
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &none), 0);
    struct segment b;
    int statuses[] = {segment_create(instance, "pool", 8192, &small, &b, &created),
                      segment_attach(instance, "kv", SEGMENT_KV, 0, true, &b, &attached),
                      segment_populate_mapped(instance, "kv", &a, 0, 4096, &small, &populated)};
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &limit), 0);
    const struct error *errors[] = {&created, &attached, &populated};
    for (int i = 0; i < 3; i++) {
        assert_int_equal(statuses[i], -EMFILE);
        assert_non_null(strstr(errors[i]->text, "ulimit -n"));
    }
    segment_detach(&a);
    assert_int_equal(segment_unlink(instance, "kv"), 1);
}

/* A kernel without MADV_POPULATE_WRITE (its madvise says EINVAL): every page is there all the same. */
static int create_on_old_kernel(void)
{
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_madvise, 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[2])),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, MADV_POPULATE_WRITE, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EINVAL),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {.len = sizeof(code) / sizeof(code[0]), .filter = code};
    struct segment a;
    struct stat stat;
    char path[128];
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0 || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) < 0)
        return 77;
    if (segment_create(instance, "old", 20u << 20, &small, &a, NULL) < 0)
        return 1;
    snprintf(path, sizeof(path), "/dev/shm/calypte.%s.old", instance);
    return lstat(path, &stat) == 0 && stat.st_blocks * 512 >= 20 << 20 ? 0 : 2;
}

static void test_old_kernel(void **state)
{
    (void)state;
    expect_in_child(create_on_old_kernel);
    assert_int_equal(segment_unlink(instance, "old"), 1);
}

static void test_names(void **state)
{
    (void)state;
    const char *bad[] = {"",
                         "a.b",
                         "a/b",
                         "../x",
                         "a b",
                         "\xc3\xa4",
                         "0123456789012345678901234567890123456789012345678901234567890123"};
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

/* Until the process sleeps in a system call. */
static void wait_asleep(pid_t pid)
{
    char path[64], state = 0;
    snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    for (int ms = 0; state != 'S' && ms < 20000; ms++) {
        usleep(1000);
        FILE *file = fopen(path, "r");
        assert_non_null(file);
        assert_int_equal(fscanf(file, "%*d (%*[^)]) %c", &state), 1);
        fclose(file);
    }
    assert_int_equal(state, 'S');
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
    wait_asleep(victim);
    wait_asleep(sleeper);
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
        cmocka_unit_test(test_create_attach),
        cmocka_unit_test(test_huge_pages),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_too_small),
        cmocka_unit_test(test_small_mount),
        cmocka_unit_test(test_no_inodes),
        cmocka_unit_test(test_no_descriptors),
        cmocka_unit_test(test_old_kernel),
        cmocka_unit_test(test_names),
        cmocka_unit_test(test_unlink_all),
        cmocka_unit_test(test_futex_across_processes),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    segment_unlink_all(instance);
    return failed;
}
