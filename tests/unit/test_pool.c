/* The pool: its geometry on 1 to 8 nodes, growth, pinning through the map, and a table that lies. */
#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "shm/pool.h"

static char instance[INSTANCE_NAME_MAX];

static void open_pool(const struct pool_shape *shape, struct pool *ret_pool)
{
    struct error error;
    if (pool_create(instance, shape, &error) < 0 || pool_attach(instance, ret_pool, &error) < 0)
        fail_msg("%s", error.text);
    uint32_t ready = 0;
    while (ready < shape->slots)
        if (pool_grow(ret_pool, ready, UINT32_MAX, false, false, &ready, &error) < 0)
            fail_msg("%s", error.text);
    if (pool_attach_objects(ret_pool, &error) < 0)
        fail_msg("%s", error.text);
}

static void close_pool(struct pool *pool)
{
    pool_detach(pool);
    segment_unlink_all(instance);
}

/* What iod does to bring an expert in. */
static struct slot_ref load(struct pool *pool, uint32_t slot, uint32_t expert, enum slot_state end)
{
    struct slot *s = &pool->slots[slot];
    struct slot_ref ref = {.index = slot};
    assert_int_equal(slot_change(&s->state, SLOT_EMPTY, SLOT_LOADING, slot_generation_of(s->state), &ref.generation),
                     0);
    s->expert = expert;
    pool->map[expert] = slot | (uint64_t)ref.generation << 32;
    if (end != SLOT_LOADING)
        assert_int_equal(slot_change(&s->state, SLOT_LOADING, end, ref.generation, NULL), 0);
    return ref;
}

/* Every byte of every slot belongs to one slice only, and a node's slices of a slot follow one another. */
static void test_geometry(void **state)
{
    (void)state;
    for (uint32_t nodes = 1; nodes <= 8; nodes *= 2) {
        const struct pool_shape shape = {
            .slots = 5, .nodes = nodes, .moe_layers = 2, .experts = 7, .slice_bytes = 8192};
        struct pool pool;
        open_pool(&shape, &pool);
        assert_int_equal(pool_slots_ready(&pool), 5);
        assert_int_equal(pool.expert_count, 14);
        for (uint32_t slot = 0; slot < 5; slot++) {
            for (uint32_t slice = 0; slice < EXPERT_SLICES; slice++) {
                unsigned char *bytes = pool_slice(&pool, slot, slice);
                assert_non_null(bytes);
                assert_true((uintptr_t)bytes % DISK_ALIGN == 0);
                memset(bytes, (int)(slot * EXPERT_SLICES + slice), shape.slice_bytes);
                if (slice % (EXPERT_SLICES / nodes))
                    assert_ptr_equal(bytes, (unsigned char *)pool_slice(&pool, slot, slice - 1) + shape.slice_bytes);
            }
        }
        for (uint32_t slot = 0; slot < 5; slot++) {
            for (uint32_t slice = 0; slice < EXPERT_SLICES; slice++) {
                const unsigned char *bytes = pool_slice(&pool, slot, slice);
                for (size_t i = 0; i < shape.slice_bytes; i++)
                    assert_int_equal(bytes[i], slot * EXPERT_SLICES + slice);
            }
        }
        assert_null(pool_slice(&pool, 5, 0));
        assert_null(pool_slice(&pool, UINT32_MAX, 0));
        assert_null(pool_slice(&pool, 0, 8));
        close_pool(&pool);
    }
}

static void test_objects(void **state)
{
    (void)state;
    /* A GLM-5.2 expert: 53 in a GiB; no slot crosses two objects. */
    const struct pool_shape glm = {
        .slots = 120, .nodes = 1, .moe_layers = 76, .experts = 256, .slice_bytes = 612 * 4096};
    const uint64_t slot_bytes = 8 * glm.slice_bytes;
    assert_true(pool_object_bytes(&glm, 0) == 53 * slot_bytes);
    assert_true(pool_object_bytes(&glm, 1) == 53 * slot_bytes);
    assert_true(pool_object_bytes(&glm, 2) == 14 * slot_bytes);
    assert_true(pool_object_bytes(&glm, 3) == 0);
    const struct pool_shape halves = {
        .slots = 120, .nodes = 2, .moe_layers = 76, .experts = 256, .slice_bytes = 612 * 4096};
    assert_true(pool_object_bytes(&halves, 0) == 107 * slot_bytes / 2);
    assert_true(pool_table_bytes(&glm) >= 120 * sizeof(struct slot) + 76 * 256 * 8);

    const struct pool_shape bad[] = {
        {.slots = 0, .nodes = 1, .moe_layers = 1, .experts = 1, .slice_bytes = 4096},
        {.slots = 1, .nodes = 3, .moe_layers = 1, .experts = 1, .slice_bytes = 4096},
        {.slots = 1, .nodes = 1, .moe_layers = 1, .experts = 1, .slice_bytes = 4097},
        {.slots = 1, .nodes = 1, .moe_layers = 1, .experts = 1, .slice_bytes = POOL_OBJECT_BYTES},
        {.slots = 1, .nodes = 1, .moe_layers = 1, .experts = 100000, .slice_bytes = 4096},
    };
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        assert_int_equal(pool_create(instance, &bad[i], NULL), -EINVAL);
        assert_int_equal(pool_table_bytes(&bad[i]), 0);
        assert_true(pool_object_bytes(&bad[i], 0) == 0);
    }
}

/* Two objects; what a dead predecessor left unpublished is replaced; attaching follows the growth. */
static void test_growth(void **state)
{
    (void)state;
    /* 520 MiB a slot, so that each has an object of its own. */
    const struct pool_shape shape = {.slots = 2, .nodes = 1, .moe_layers = 1, .experts = 16, .slice_bytes = 65u << 20};
    struct pool pool, view;
    struct error error;
    struct segment stale;
    struct statvfs fs;
    if (statvfs("/dev/shm", &fs) < 0 || (uint64_t)fs.f_bavail * fs.f_frsize < 1200u << 20)
        skip();
    assert_int_equal(pool_create(instance, &shape, &error), 0);
    assert_int_equal(pool_attach(instance, &pool, &error), 0);
    assert_int_equal(pool_attach(instance, &view, &error), 0);
    assert_int_equal(pool.slots_per_object, 1);
    assert_int_equal(pool_slots_ready(&pool), 0);
    assert_null(pool_slice(&pool, 0, 0));
    assert_int_equal(segment_create(instance, "pool.0.0", 4096,
                                    &(struct segment_options){.kind = SEGMENT_RAW, .node = -1}, &stale, NULL),
                     0);
    segment_detach(&stale);
    uint32_t ready = 0;
    assert_int_equal(pool_grow(&pool, 0, 2, false, false, &ready, &error), 0);
    assert_int_equal(ready, 1); /* an object at a time */
    assert_int_equal(pool_slots_ready(&pool), 1);
    assert_null(pool_slice(&pool, 0, 0)); /* growing maps nothing */
    assert_int_equal(pool_attach_objects(&view, &error), 0);
    assert_non_null(pool_slice(&view, 0, 7));
    assert_null(pool_slice(&view, 1, 0));
    assert_int_equal(pool_grow(&pool, 1, 2, false, true, &ready, &error), 0);
    assert_int_equal(ready, 2);
    assert_int_equal(pool_grow(&pool, 2, 2, false, true, &ready, &error), 0); /* nothing to do */
    assert_int_equal(ready, 2);
    assert_int_equal(pool_slots_ready(&view), 2);
    assert_null(pool_slice(&view, 1, 0)); /* not mapped here yet */
    assert_int_equal(pool_attach_objects(&view, &error), 0);
    assert_non_null(pool_slice(&view, 1, 7));
    pool_detach(&view);
    close_pool(&pool);
}

static void test_pin(void **state)
{
    (void)state;
    const struct pool_shape shape = {.slots = 2, .nodes = 1, .moe_layers = 1, .experts = 4, .slice_bytes = 4096};
    struct pool pool;
    struct slot_ref ref = {0};
    open_pool(&shape, &pool);
    assert_int_equal(pool_pin(&pool, 0, 0, 1, &ref), -ENOENT);
    assert_int_equal(pool_pin(&pool, 4, 0, 1, &ref), -ENOENT);
    struct slot_ref loading = load(&pool, 0, 2, SLOT_LOADING);
    assert_int_equal(pool_pin(&pool, 2, 0, 1, &ref), -EAGAIN);
    assert_int_equal(slot_change(&pool.slots[0].state, SLOT_LOADING, SLOT_READY, loading.generation, NULL), 0);
    assert_int_equal(pool_pin(&pool, 2, 3, 77, &ref), 0);
    assert_int_equal(ref.index, 0);
    assert_int_equal(ref.generation, loading.generation);
    assert_true(pool.slots[0].used == 77);
    assert_int_equal(slot_pins_of(pool.slots[0].state), 1u << 3);
    pool_unpin(&pool, ref, 3);
    assert_int_equal(slot_pins_of(pool.slots[0].state), 0);

    /* A map entry that points at another expert's slot, or at its earlier life, pins nothing. */
    pool.map[1] = pool.map[2];
    assert_int_equal(pool_pin(&pool, 1, 0, 1, &ref), -ESTALE);
    pool.map[1] = 0 | (uint64_t)(loading.generation - 1) << 32;
    assert_int_equal(pool_pin(&pool, 1, 0, 1, &ref), -ESTALE);
    pool.map[1] = 77777;
    assert_int_equal(pool_pin(&pool, 1, 0, 1, &ref), -ENOENT);
    assert_int_equal(slot_pins_of(pool.slots[0].state), 0);

    struct slot_ref failed = load(&pool, 1, 3, SLOT_FAILED);
    assert_int_equal(pool_pin(&pool, 3, 0, 1, &ref), -EIO);
    assert_int_equal(ref.index, failed.index);

    assert_int_equal(pool_pin(&pool, 2, 5, 78, &ref), 0);
    assert_int_equal(pool_pin(&pool, 2, 6, 78, &ref), 0);
    pool_release_holder(&pool, 5);
    pool_release_holder(&pool, 5);
    assert_int_equal(slot_pins_of(pool.slots[0].state), 1u << 6);
    pool_unpin(&pool, (struct slot_ref){1000, 0}, 6); /* no such slot */
    close_pool(&pool);
}

/* A holder that is killed at any moment leaves nothing that giving its pins back does not cure. */
static void test_killed_holder(void **state)
{
    (void)state;
    const struct pool_shape shape = {.slots = 4, .nodes = 1, .moe_layers = 1, .experts = 4, .slice_bytes = 4096};
    struct pool pool;
    open_pool(&shape, &pool);
    for (uint32_t s = 0; s < 4; s++)
        load(&pool, s, s, SLOT_READY);
    bool left_pinned = false;
    for (int round = 0; round < 40; round++) {
        struct slot_ref mine, ref;
        assert_int_equal(pool_pin(&pool, 1, 2, 1, &mine), 0);
        pid_t child = fork();
        if (child == 0) {
            for (uint32_t i = 0; true; i++) {
                if (pool_pin(&pool, i % 4, 5, i, &ref) == 0 && i % 3)
                    pool_unpin(&pool, ref, 5);
            }
        }
        usleep(500 + (unsigned)round * 50);
        kill(child, SIGKILL);
        assert_int_equal(waitpid(child, NULL, 0), child);
        for (uint32_t s = 0; s < 4; s++)
            left_pinned |= (slot_pins_of(pool.slots[s].state) & 1u << 5) != 0;
        pool_release_holder(&pool, 5);
        for (uint32_t s = 0; s < 4; s++)
            assert_int_equal(slot_pins_of(pool.slots[s].state), s == 1 ? 1u << 2 : 0);
        pool_unpin(&pool, mine, 2);
    }
    assert_true(left_pinned);
    close_pool(&pool);
}

/* A table that lies is refused, or used within its bounds: never a read outside (ASan watches). */
static void test_liar(void **state)
{
    (void)state;
    const struct pool_shape shape = {.slots = 4, .nodes = 2, .moe_layers = 1, .experts = 8, .slice_bytes = 4096};
    struct pool pool, other;
    open_pool(&shape, &pool);
    uint32_t *words = pool.table.base;
    const size_t header_words = offsetof(struct pool_header, objects_ready) / sizeof(*words);
    for (size_t i = 0; i < header_words; i++) {
        if (i * 4 >= offsetof(struct pool_header, map_offset) + 8)
            break; /* padding from here on */
        uint32_t saved = words[i];
        const uint32_t lies[] = {saved + 1, saved ^ 0x80000000u, UINT32_MAX};
        for (size_t k = 0; k < 3; k++) {
            words[i] = lies[k];
            struct error error = {""};
            int status = pool_attach(instance, &other, &error);
            if (status == 0)
                fail_msg("word %zu of the header may lie", i);
            assert_true(strlen(error.text) > 0);
        }
        words[i] = saved;
    }
    srand(1);
    uint32_t *rest = words + header_words;
    size_t count = (pool.table.bytes - header_words * 4) / 4;
    for (int i = 0; i < 1000000; i++) {
        rest[(size_t)rand() % count] = (uint32_t)rand() * 2654435761u;
        struct slot_ref ref;
        if (pool_pin(&pool, (uint32_t)rand() % 10, 1, 1, &ref) == 0) {
            assert_true(ref.index < 4);
            pool_unpin(&pool, ref, 1);
        }
        if (i % 1000 == 0) {
            assert_true(pool_slots_ready(&pool) <= 4);
            pool_attach_objects(&pool, NULL);
        }
    }
    close_pool(&pool);
}

int main(void)
{
    snprintf(instance, sizeof(instance), "test-pool-%d", (int)getpid());
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_geometry), cmocka_unit_test(test_objects),       cmocka_unit_test(test_growth),
        cmocka_unit_test(test_pin),      cmocka_unit_test(test_killed_holder), cmocka_unit_test(test_liar),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    segment_unlink_all(instance);
    return failed;
}
