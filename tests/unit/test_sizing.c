/* How large a running pool should be: what follows from the free memory, from pressure, from a user's wish. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "cmd/supervisor/sizing.h"

#define MIB (UINT64_C(1) << 20)
#define GIB (UINT64_C(1) << 30)

/* 20 MiB a slot, 1000 experts, a reserve of 2 GiB. */
static struct sizing made_sizing(uint32_t target)
{
    return (struct sizing){.slot_bytes = 20 * MIB,
                           .reserve = 2 * GIB,
                           .fixed_bytes = 3 * GIB,
                           .top_k = 8,
                           .least = 16,
                           .most = 1000,
                           .automatic = true,
                           .target = target};
}

static struct sizing_view made_view(uint64_t free_bytes, uint32_t standing)
{
    return (struct sizing_view){
        .room = {.memory = free_bytes, .cgroup = {.free = CGROUP_UNLIMITED}, .shm_free = 100 * GIB},
        .standing = standing,
        .now_ms = 1000000};
}

static void test_cap(void **state)
{
    struct sizing sizing = made_sizing(100);
    struct sizing_view view = made_view(4 * GIB, 100);
    enum sizing_bound bound;
    (void)state;
    assert_int_equal(sizing_cap(&sizing, &view, &bound), 100 + 2048 / 20);
    assert_int_equal(bound, BOUND_MEMORY);
    view.room.cgroup.free = 3 * GIB;
    assert_int_equal(sizing_cap(&sizing, &view, &bound), 100 + 1024 / 20);
    assert_int_equal(bound, BOUND_CGROUP);
    view.room.cgroup.free = GIB; /* less than the reserve: the pool has too much */
    assert_int_equal(sizing_cap(&sizing, &view, &bound), (2000 - 1024) / 20);
    view.room.shm_free = 0;
    view.room.cgroup.free = 3 * GIB;
    assert_int_equal(sizing_cap(&sizing, &view, &bound), 100);
    assert_int_equal(bound, BOUND_SHM);
    view = made_view(UINT64_MAX, 100);
    view.room.shm_free = UINT64_MAX;
    assert_int_equal(sizing_cap(&sizing, &view, &bound), 1000);
    assert_int_equal(bound, BOUND_EXPERTS);
    view = made_view(0, 20);
    assert_int_equal(sizing_cap(&sizing, &view, &bound), 16); /* never fewer */
}

/* What is free between half the reserve and the reserve and a step changes nothing. */
static void test_nothing_changes(void **state)
{
    const uint64_t free_bytes[] = {GIB, 2 * GIB, 2 * GIB + 999 * MIB};
    (void)state;
    for (size_t i = 0; i < 3; i++) {
        struct sizing sizing = made_sizing(100);
        struct sizing_view view = made_view(free_bytes[i], 100);
        assert_false(sizing_follow(&sizing, &view));
        assert_int_equal(sizing.target, 100);
    }
}

static void test_shrinks(void **state)
{
    struct sizing sizing = made_sizing(400);
    struct sizing_view view = made_view(GIB - MIB, 400);
    (void)state;
    assert_true(sizing_follow(&sizing, &view)); /* back to the whole reserve */
    uint32_t target = 400 - (1024 + 1 + 19) / 20;
    assert_int_equal(sizing.target, target);
    /* On its way: what it will give back counts. */
    view.now_ms += 5000;
    assert_false(sizing_follow(&sizing, &view));
    /* There: no growth before the calm is over, whatever is free. */
    view = made_view(30 * GIB, target);
    assert_false(sizing_follow(&sizing, &view));
    view.now_ms += SIZING_CALM_MS;
    assert_true(sizing_follow(&sizing, &view));
    assert_true(sizing.target > target);
    /* Never below the least. */
    sizing = made_sizing(20);
    view = made_view(0, 20);
    assert_true(sizing_follow(&sizing, &view));
    assert_int_equal(sizing.target, 16);
    view.standing = 16;
    assert_false(sizing_follow(&sizing, &view));
}

/* Growth that no longer fits is taken back before it is there. */
static void test_growth_overtaken(void **state)
{
    struct sizing sizing = made_sizing(500);
    struct sizing_view view = made_view(3 * GIB, 400); /* 100 slots, 2000 MiB, are to come */
    (void)state;
    view.room.memory = 2 * GIB;
    assert_true(sizing_follow(&sizing, &view));
    assert_int_equal(sizing.target, 400);
}

static void test_pressure(void **state)
{
    struct sizing sizing = made_sizing(320);
    struct sizing_view view = made_view(3 * GIB, 320);
    (void)state;
    view.pressure = true;
    assert_true(sizing_follow(&sizing, &view));
    assert_int_equal(sizing.target, 300); /* a sixteenth */
    view = made_view(40 * GIB, 300);
    view.pressure = true; /* stalls, with plenty of free memory: not the pool's doing */
    assert_false(sizing_follow(&sizing, &view));
}

/* Half of what is free above the reserve at a time, until a step is not there any more. */
static void test_grows(void **state)
{
    struct sizing sizing = made_sizing(100);
    struct sizing_view view = made_view(10 * GIB, 100);
    (void)state;
    for (int round = 0; round < 20; round++) {
        uint32_t before = sizing.target;
        bool changed = sizing_follow(&sizing, &view);
        assert_int_equal(changed, sizing.target > before);
        view.room.memory -= (sizing.target - view.standing) * 20 * MIB; /* iod has followed */
        view.standing = sizing.target;
        view.now_ms += 5000;
    }
    assert_true(view.room.memory >= 2 * GIB);
    assert_true(view.room.memory < 3 * GIB + 20 * MIB);
    /* /dev/shm bounds it too, and the number of experts. */
    sizing = made_sizing(100);
    view = made_view(90 * GIB, 100);
    view.room.shm_free = 30 * MIB;
    assert_false(sizing_follow(&sizing, &view));
    sizing = made_sizing(990);
    view = made_view(90 * GIB, 990);
    assert_true(sizing_follow(&sizing, &view));
    assert_int_equal(sizing.target, 1000);
    view.standing = 1000;
    assert_false(sizing_follow(&sizing, &view));
}

/* iod found no memory: the wish comes down to what stands, and is calm for a while. */
static void test_refused(void **state)
{
    struct sizing sizing = made_sizing(300);
    struct sizing_view view = made_view(20 * GIB, 200);
    (void)state;
    view.refused = 300;
    assert_true(sizing_follow(&sizing, &view));
    assert_int_equal(sizing.target, 200);
    assert_false(sizing_follow(&sizing, &view));
}

/* A pool with a size keeps it, however much or little is free. */
static void test_fixed(void **state)
{
    struct sizing sizing = made_sizing(100);
    struct sizing_view view = made_view(30 * GIB, 100);
    struct error error;
    (void)state;
    assert_int_equal(sizing_set(&sizing, &view, "1G", &error), 0);
    assert_int_equal(sizing.target, 51);
    assert_false(sizing.automatic);
    view.now_ms += 10 * SIZING_CALM_MS;
    assert_false(sizing_follow(&sizing, &view));
    view.room.memory = 0;
    view.pressure = true;
    assert_false(sizing_follow(&sizing, &view));
    assert_int_equal(sizing.target, 51);
}

static void test_set(void **state)
{
    struct sizing sizing = made_sizing(100);
    struct sizing_view view = made_view(5 * GIB, 100);
    struct error error;
    (void)state;
    /* Of all that would be free without the instance: 5 GiB, the pool's 2000 MiB, the other 3 GiB. */
    assert_int_equal(sizing_set(&sizing, &view, "50%", &error), 0);
    assert_int_equal(sizing.target, (8 * 1024 + 2000) / 2 / 20);
    sizing = made_sizing(100);
    assert_int_equal(sizing_set(&sizing, &view, "159M", &error), -EINVAL);
    assert_non_null(strstr(error.text, "a layer needs 8 at once"));
    assert_int_equal(sizing_set(&sizing, &view, "much", &error), -EINVAL);
    assert_non_null(strstr(error.text, "size=much"));
    assert_int_equal(sizing_set(&sizing, &view, "18446744073709551615", &error), -EINVAL);
    assert_non_null(strstr(error.text, "too large"));
    assert_int_equal(sizing_set(&sizing, &view, "10G", &error), -ENOMEM);
    assert_non_null(strstr(error.text, "memory limit"));
    view.room.shm_free = GIB;
    assert_int_equal(sizing_set(&sizing, &view, "4G", &error), -ENOSPC);
    assert_non_null(strstr(error.text, "/dev/shm"));
    assert_true(sizing.automatic && sizing.target == 100); /* a refusal changes nothing */
    view = made_view(50 * GIB, 100);
    assert_int_equal(sizing_set(&sizing, &view, "40G", &error), 0);
    assert_int_equal(sizing.target, 1000); /* no more than there are experts */
    assert_int_equal(sizing_set(&sizing, &view, "160M", &error), 0);
    assert_int_equal(sizing.target, 8);
    view = made_view(4 * GIB, 8);
    assert_int_equal(sizing_set(&sizing, &view, "auto", &error), 0);
    assert_true(sizing.automatic);
    assert_int_equal(sizing.target, 8 + 2048 / 20);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_cap),
        cmocka_unit_test(test_nothing_changes),
        cmocka_unit_test(test_shrinks),
        cmocka_unit_test(test_pressure),
        cmocka_unit_test(test_growth_overtaken),
        cmocka_unit_test(test_grows),
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_fixed),
        cmocka_unit_test(test_set),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
