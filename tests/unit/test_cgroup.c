/* Limits of control groups, read from the trees of tests/cgroup: versions 1 and 2, nested, without limits, both at
 * once, and folders where files are missing or hold nonsense. */
#include <errno.h>
#include <poll.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "cmd/supervisor/cgroup.h"
#include "cmd/supervisor/pressure.h"
#include "cmd/supervisor/room.h"

struct expectation {
    const char *tree;
    uint64_t cpu_permille, memory_free;
    const char *memory_file, *pressure_file; /* below the tree; "" and NULL: none */
};

static const struct expectation expectations[] = {
    {"v1", 3000, (UINT64_C(8) - 3 + 1) << 30, "/sys/fs/cgroup/memory/memory.limit_in_bytes", NULL},
    {"v1-nested", CGROUP_UNLIMITED, 0, "/sys/fs/cgroup/memory/a/memory.limit_in_bytes", NULL},
    {"v2", 2500, 3000000 - (2500000 - 200000), "/sys/fs/cgroup/a/memory.high", "/sys/fs/cgroup/a/memory.pressure"},
    {"v2-nested", 500, 900000 - (850000 - 100000), "/sys/fs/cgroup/a/memory.max", NULL},
    {"max", CGROUP_UNLIMITED, CGROUP_UNLIMITED, "", NULL},
    {"hybrid", 4000, 600, "/sys/fs/cgroup/memory/box/memory.limit_in_bytes",
     "/sys/fs/cgroup/unified/box/memory.pressure"},
    {"missing", CGROUP_UNLIMITED, CGROUP_UNLIMITED, "", NULL},
    {"no-such-tree", CGROUP_UNLIMITED, CGROUP_UNLIMITED, "", NULL},
};

static void check_end(const char *root, const char *path, const char *end)
{
    char whole[CGROUP_PATH_MAX];
    snprintf(whole, sizeof whole, "%s%s", *end ? root : "", end);
    assert_string_equal(path, whole);
}

static void test_trees(void **state)
{
    const char *tests = getenv("CALYPTE_TESTS");
    (void)state;
    assert_non_null(tests);
    for (size_t i = 0; i < sizeof expectations / sizeof *expectations; i++) {
        const struct expectation *expected = &expectations[i];
        char root[512], pressure[CGROUP_PATH_MAX];
        snprintf(root, sizeof root, "%s/cgroup/%s", tests, expected->tree);
        print_message("%s\n", expected->tree);
        assert_true(cgroup_cpu_permille(root) == expected->cpu_permille);
        struct cgroup_memory memory = cgroup_memory_read(root);
        assert_true(memory.free == expected->memory_free);
        check_end(root, memory.file, expected->memory_file);
        assert_int_equal(cgroup_pressure_file(root, pressure), expected->pressure_file != NULL);
        if (expected->pressure_file)
            check_end(root, pressure, expected->pressure_file);
    }
}

/* The least of memory and groups counts; a /proc without meminfo is an error. */
static void test_room(void **state)
{
    const struct room rooms[] = {{.memory = 5, .cgroup = {.free = CGROUP_UNLIMITED}},
                                 {.memory = 5, .cgroup = {.free = 7}},
                                 {.memory = 9, .cgroup = {.free = 5}}};
    struct room room;
    struct error error;
    (void)state;
    for (size_t i = 0; i < sizeof rooms / sizeof *rooms; i++)
        assert_true(room_available(&rooms[i]) == 5);
    assert_int_equal(room_read("", &room, &error), 0);
    assert_true(room.memory > 0 && room.shm_free > 0);
    assert_int_equal(room_read("/nowhere", &room, &error), -EIO);
    assert_non_null(strstr(error.text, "/nowhere/proc/meminfo"));
}

/* The kernel takes the trigger where it has one to give; a tree without reports, or with a file that is no trigger,
 * has none. */
static void test_pressure(void **state)
{
    (void)state;
    bool there = access("/proc/pressure/memory", W_OK) == 0;
    int fd = pressure_open("");
    if (there)
        assert_true(fd >= 0);
    if (fd >= 0) {
        struct pollfd poll_fd = {.fd = fd, .events = POLLPRI};
        assert_true(poll(&poll_fd, 1, 0) >= 0);
        assert_int_equal(poll_fd.revents & (POLLERR | POLLNVAL), 0);
        close(fd);
    }
    assert_int_equal(pressure_open("/nowhere"), -1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_trees), cmocka_unit_test(test_room),
                                       cmocka_unit_test(test_pressure)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
