/* The daemon's books without a disk: which expert gets which slot, what is given up for it, what guesses may take, how the
 * pool grows and shrinks, the queues of requests, and the judge of lookaheads. */
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

#include "io_daemon/follower.h"

#define EXPERTS 64u
#define TOP_K 4u

struct books {
    char instance[INSTANCE_NAME_MAX];
    struct control *control;
    struct pool pool;
    struct requests requests;
    struct placement placement;
    uint64_t tick;
};

static const struct model_config config = {.experts = EXPERTS, .top_k = TOP_K};

static void open_placement(struct books *books)
{
    struct error error;
    if (requests_open(books->control, 2, EXPERTS, &books->requests, &error) < 0 ||
        placement_open(&books->pool, &config, &books->requests, &books->control->iod, &books->placement, &error) < 0)
        fail_msg("%s", error.text);
}

static void close_placement(struct books *books)
{
    placement_close(&books->placement);
    requests_close(&books->requests);
}

/* The table of a pool of `slots`, of which none stands yet for the placement. */
static void open_books(struct books *books, uint32_t slots)
{
    const struct pool_shape shape = {
        .slots = slots, .nodes = 1, .moe_layers = 1, .experts = EXPERTS, .slice_bytes = 4096};
    struct error error;
    *books = (struct books){.tick = 10};
    snprintf(books->instance, sizeof(books->instance), "test-placement-%d", (int)getpid());
    books->control = aligned_alloc(_Alignof(struct control), sizeof(*books->control));
    memset(books->control, 0, sizeof(*books->control));
    atomic_store(&books->control->epoch, 1);
    atomic_store(&books->control->workers[0].tick, books->tick);
    if (pool_create(books->instance, &shape, &error) < 0 || pool_attach(books->instance, &books->pool, &error) < 0)
        fail_msg("%s", error.text);
    segment_unlink_all(books->instance); /* the mapping stays */
    atomic_store(&books->pool.header->objects_ready, books->pool.object_count);
    pool_publish(&books->pool, slots);
    open_placement(books);
}

static void close_books(struct books *books)
{
    close_placement(books);
    pool_detach(&books->pool);
    free(books->control);
}

static int load(struct books *books, uint32_t expert, enum priority priority)
{
    struct slot_ref ref;
    int status = placement_take(&books->placement, expert, priority, &ref);
    if (status == 0)
        assert_int_equal(placement_finish(&books->placement, expert, ref, 0, 0), 0);
    return status;
}

static void use(struct books *books, uint32_t expert)
{
    placement_use(&books->placement, expert, LFRU_DECODE);
}

static uint32_t slot_of(const struct books *books, uint32_t expert)
{
    struct slot_ref ref;
    return pool_lookup(&books->pool, expert, &ref) < 0 ? NOBODY : ref.index;
}

static struct slot_ref pin(struct books *books, uint32_t expert)
{
    struct slot_ref ref;
    assert_int_equal(pool_pin(&books->pool, expert, 0, books->tick, &ref), 0);
    return ref;
}

static uint32_t resident(const struct books *books)
{
    uint32_t count = 0;
    for (uint32_t e = 0; e < EXPERTS; e++)
        count += placement_find(&books->placement, e) == PLACE_READY;
    return count;
}

static int demand(struct books *books, uint32_t expert)
{
    const struct expert_request request = {.expert = expert, .epoch = 1, .tick = books->tick};
    int status = requests_note(&books->requests, 0, &request);
    if (status == 0)
        placement_demand(&books->placement, expert);
    return status;
}

/* Slots are given from the lowest on, as they come to stand; then the coldest goes, never a pinned or owed one. */
static void test_give(void **state)
{
    (void)state;
    struct books books;
    open_books(&books, 8);
    assert_int_equal(load(&books, 0, PRIORITY_DEMAND), -EAGAIN); /* none stands */
    placement_grow(&books.placement, 5);
    for (uint32_t e = 0; e < 5; e++) {
        assert_int_equal(load(&books, e, PRIORITY_DEMAND), 0);
        assert_int_equal(slot_of(&books, e), e);
        for (uint32_t i = 0; i < 2 + e % 2 * 8; i++) /* 1 and 3 are warm */
            use(&books, e);
    }
    struct slot_ref zero = pin(&books, 0);
    assert_int_equal(demand(&books, 2), 0);
    assert_int_equal(load(&books, 10, PRIORITY_DEMAND), 0);
    assert_int_equal(slot_of(&books, 4), NOBODY);
    assert_int_equal(slot_of(&books, 10), 4);
    use(&books, 10);
    placement_grow(&books.placement, 8);
    assert_int_equal(load(&books, 11, PRIORITY_DEMAND), 0);
    assert_int_equal(slot_of(&books, 11), 5);
    pool_unpin(&books.pool, zero, 0);
    pool_unpin(&books.pool, pin(&books, 2), 0); /* used, so owed no more */
    for (uint32_t e = 12; e < 16; e++) {
        assert_int_equal(load(&books, e, PRIORITY_DEMAND), 0);
        use(&books, e);
    }
    assert_int_equal(resident(&books), 8);
    assert_true(slot_of(&books, 1) != NOBODY && slot_of(&books, 3) != NOBODY);
    /* Nothing may go: all pinned. */
    for (uint32_t e = 0; e < EXPERTS; e++) {
        if (slot_of(&books, e) != NOBODY)
            pin(&books, e);
    }
    assert_int_equal(load(&books, 20, PRIORITY_DEMAND), -EAGAIN);
    close_books(&books);
}

/* A held expert stays though it is the coldest; a failed one gives its slot back before anything good is evicted. */
static void test_hold_and_fail(void **state)
{
    (void)state;
    struct books books;
    struct slot_ref ref;
    open_books(&books, 6);
    placement_grow(&books.placement, 6);
    placement_hold(&books.placement, 0, true);
    for (uint32_t e = 0; e < 30; e++) {
        assert_int_equal(load(&books, e, PRIORITY_DEMAND), 0);
        if (e > 0)
            use(&books, e);
    }
    assert_true(slot_of(&books, 0) != NOBODY);
    placement_hold(&books.placement, 0, false);
    for (uint32_t e = 30; e < 40; e++) {
        assert_int_equal(load(&books, e, PRIORITY_DEMAND), 0);
        use(&books, e);
    }
    assert_int_equal(slot_of(&books, 0), NOBODY);

    assert_int_equal(demand(&books, 50), 0);
    assert_int_equal(placement_take(&books.placement, 50, PRIORITY_DEMAND, &ref), 0);
    assert_int_equal(placement_finish(&books.placement, 50, ref, EIO, 3), 0);
    assert_int_equal(placement_find(&books.placement, 50), PLACE_FAILED);
    uint64_t evictions = atomic_load(&books.control->iod.evictions);
    assert_int_equal(load(&books, 51, PRIORITY_DEMAND), 0); /* the failure is still to be looked at */
    assert_int_equal(atomic_load(&books.control->iod.evictions), evictions + 1);
    assert_int_equal(placement_find(&books.placement, 50), PLACE_FAILED);
    atomic_store(&books.control->workers[0].tick, ++books.tick);
    assert_int_equal(load(&books, 52, PRIORITY_DEMAND), 0);
    assert_int_equal(atomic_load(&books.control->iod.evictions), evictions + 1);
    assert_int_equal(placement_find(&books.placement, 50), PLACE_NOWHERE);
    assert_int_equal(slot_of(&books, 52), ref.index);
    close_books(&books);
}

/* A warm-up takes free slots only; a lookahead that was not used goes first. */
static void test_guesses(void **state)
{
    (void)state;
    struct books books;
    open_books(&books, 8);
    placement_grow(&books.placement, 8);
    for (uint32_t e = 0; e < 8; e++)
        assert_int_equal(load(&books, e, PRIORITY_WARMUP), 0); /* one at a time: none keeps a slot LOADING */
    assert_int_equal(load(&books, 8, PRIORITY_WARMUP), -ENOSPC);
    for (uint32_t e = 0; e < 8; e++)
        use(&books, e);
    assert_int_equal(load(&books, 20, PRIORITY_LOOKAHEAD), 0);
    assert_int_equal(load(&books, 30, PRIORITY_DEMAND), 0);
    assert_int_equal(slot_of(&books, 20), NOBODY);
    assert_int_equal(books.control->iod.guesses_wasted, 1);
    use(&books, 30);
    /* Used, it is like any other, and keeps no slot from demands. */
    for (uint32_t e = 40; e < 60; e++) {
        for (uint32_t i = 0; i < 3; i++)
            use(&books, e);
        assert_int_equal(load(&books, e, PRIORITY_LOOKAHEAD), 0);
        use(&books, e);
        assert_int_equal(books.placement.guesses, 0);
    }
    assert_int_equal(books.control->iod.guesses_used, 20);
    assert_int_equal(books.control->iod.guesses_wasted, 1);
    /* LOADING warm-ups count against the slots that demands must be left. */
    struct slot_ref refs[4];
    placement_limit(&books.placement, 4);
    placement_limit(&books.placement, 8);
    for (uint32_t e = 0; e < 4; e++)
        assert_int_equal(placement_take(&books.placement, e, PRIORITY_WARMUP, &refs[e]), 0);
    assert_int_equal(books.placement.guesses, 4);
    assert_int_equal(load(&books, 5, PRIORITY_LOOKAHEAD), -ENOSPC);
    assert_int_equal(load(&books, 5, PRIORITY_WARMUP), -EBUSY);
    for (uint32_t e = 0; e < 4; e++)
        assert_int_equal(placement_finish(&books.placement, e, refs[e], e ? 0 : EIO, 0), 0);
    assert_int_equal(books.placement.guesses, 0);
    close_books(&books);
}

/* Shrinking: what is above the limit goes as soon as nobody needs it, and is not given again before the limit rises. */
static void test_limit(void **state)
{
    (void)state;
    struct books books;
    struct slot_ref loading;
    open_books(&books, 16);
    placement_grow(&books.placement, 16);
    for (uint32_t e = 0; e < 14; e++)
        assert_int_equal(load(&books, e, PRIORITY_DEMAND), 0);
    assert_int_equal(placement_take(&books.placement, 14, PRIORITY_DEMAND, &loading), 0);
    struct slot_ref pinned = pin(&books, 12);
    atomic_store(&books.pool.slots[13].used, 0);
    assert_int_equal(demand(&books, 13), 0); /* owed */
    assert_int_equal(placement_limit(&books.placement, 6), 3);
    assert_int_equal(resident(&books), 8);
    assert_true(slot_of(&books, 12) == 12 && slot_of(&books, 13) == 13 && slot_of(&books, 11) == NOBODY);
    for (uint32_t e = 20; e < 40; e++) {
        assert_int_equal(load(&books, e, PRIORITY_DEMAND), 0);
        assert_true(slot_of(&books, e) < 6);
    }
    pool_unpin(&books.pool, pinned, 0);
    assert_int_equal(placement_limit(&books.placement, 6), 2);
    assert_int_equal(placement_finish(&books.placement, 14, loading, 0, 0), 0);
    pool_unpin(&books.pool, pin(&books, 13), 0);
    assert_int_equal(placement_limit(&books.placement, 6), 0);
    assert_int_equal(resident(&books), 6);
    for (uint32_t s = 6; s < 16; s++)
        assert_int_equal(slot_state_of(atomic_load(&books.pool.slots[s].state)), SLOT_EMPTY);
    /* Growing again, half of the way. */
    assert_int_equal(placement_limit(&books.placement, 10), 0);
    for (uint32_t e = 40; e < 60; e++)
        assert_int_equal(load(&books, e, PRIORITY_DEMAND), 0);
    assert_int_equal(resident(&books), 10);
    for (uint32_t e = 0; e < EXPERTS; e++)
        assert_true(slot_of(&books, e) == NOBODY || slot_of(&books, e) < 10);
    close_books(&books);
}

/* A slot whose state somebody has changed is left alone, and the expert gets another. */
static void test_scribbled(void **state)
{
    (void)state;
    struct books books;
    struct slot_ref ref;
    open_books(&books, 6);
    placement_grow(&books.placement, 6);
    for (uint32_t e = 0; e < 3; e++)
        assert_int_equal(load(&books, e, PRIORITY_DEMAND), 0);
    atomic_store(&books.pool.slots[1].state, 0x700000000u | SLOT_QUARANTINED);
    assert_int_equal(placement_find(&books.placement, 1), PLACE_NOWHERE);
    assert_int_equal(load(&books, 1, PRIORITY_DEMAND), 0);
    assert_int_equal(slot_of(&books, 1), 3);
    assert_int_equal(placement_take(&books.placement, 4, PRIORITY_DEMAND, &ref), 0);
    atomic_store(&books.pool.slots[ref.index].state, SLOT_READY);
    assert_int_equal(placement_finish(&books.placement, 4, ref, 0, 0), -ESTALE);
    assert_int_equal(slot_of(&books, 4), NOBODY);
    for (uint32_t e = 10; e < 40; e++) {
        assert_int_equal(load(&books, e, PRIORITY_DEMAND), 0);
        assert_true(slot_of(&books, e) != 1 && slot_of(&books, e) != ref.index);
    }
    assert_int_equal(resident(&books), 4);
    close_books(&books);
}

/* A second daemon takes over what is READY, the order of use included. */
static void test_take_over(void **state)
{
    (void)state;
    struct books books;
    open_books(&books, 8);
    placement_grow(&books.placement, 8);
    for (uint32_t e = 0; e < 8; e++) {
        assert_int_equal(load(&books, e, PRIORITY_DEMAND), 0);
        books.tick = e == 2 ? 100 : 20 + e;
        pool_unpin(&books.pool, pin(&books, e), 0);
    }
    books.tick = 100;
    atomic_store(&books.control->workers[0].tick, books.tick);
    close_placement(&books);
    open_placement(&books);
    assert_int_equal(resident(&books), 8);
    placement_grow(&books.placement, 8);
    for (uint32_t e = 20; e < 26; e++) {
        assert_int_equal(load(&books, e, PRIORITY_DEMAND), 0);
        use(&books, e);
    }
    assert_true(slot_of(&books, 2) != NOBODY); /* used last */
    assert_int_equal(slot_of(&books, 0), NOBODY);
    close_books(&books);
}

static enum slot_state state_of(const struct books *books, uint32_t slot)
{
    return slot_state_of(atomic_load(&books->pool.slots[slot].state));
}

/* What a dead daemon was reading may still land: that slot is nobody's before the quarantine ends. What had failed is forgotten, and the map
 * says of both that they are nowhere. */
static void test_take_over_unfinished(void **state)
{
    (void)state;
    struct books books;
    struct slot_ref loading, failed, ref;
    open_books(&books, 8);
    placement_grow(&books.placement, 8);
    assert_int_equal(placement_take(&books.placement, 0, PRIORITY_DEMAND, &loading), 0);
    assert_int_equal(placement_take(&books.placement, 1, PRIORITY_DEMAND, &failed), 0);
    assert_int_equal(placement_finish(&books.placement, 1, failed, EIO, 5), 0);
    assert_int_equal(atomic_load(&books.pool.slots[failed.index].error), EIO);
    assert_int_equal(atomic_load(&books.pool.slots[failed.index].slice), 5);
    close_placement(&books);
    open_placement(&books);
    assert_int_equal(state_of(&books, loading.index), SLOT_QUARANTINED);
    assert_int_equal(state_of(&books, failed.index), SLOT_EMPTY);
    assert_true(slot_of(&books, 0) == NOBODY && slot_of(&books, 1) == NOBODY);
    placement_grow(&books.placement, 8);
    for (uint32_t e = 10; e < 17; e++) {
        assert_int_equal(placement_take(&books.placement, e, PRIORITY_DEMAND, &ref), 0);
        assert_int_not_equal(ref.index, loading.index);
    }
    assert_int_equal(placement_take(&books.placement, 17, PRIORITY_DEMAND, &ref), -EAGAIN);
    assert_int_equal(placement_limit(&books.placement, 0), 8); /* it stands in the way of a smaller pool */
    placement_limit(&books.placement, 8);
    placement_end_quarantine(&books.placement);
    assert_int_equal(placement_take(&books.placement, 17, PRIORITY_DEMAND, &ref), 0);
    assert_int_equal(ref.index, loading.index);
    assert_int_equal(ref.generation, loading.generation + 1);
    close_books(&books);
}

/* Entries of one layer for one expert are one use, whoever reads them when; nonsense is passed over. */
static void test_follower(void **state)
{
    (void)state;
    struct books books;
    struct guesses guesses;
    struct follower follower;
    open_books(&books, 8);
    guesses_open(&guesses, 0);
    const struct use before[] = {{.expert = 9, .flags = USE_LAYER}, {.expert = 9, .flags = USE_LAYER}};
    uses_append(&books.control->uses, before, 2);
    follower_open(books.control, &books.placement, &guesses, NULL, &follower);
    assert_int_equal(guesses.uses, 0); /* a daemon before has judged by them */
    float heat = lfru_heat(books.placement.lfru, 9);
    assert_true(heat > 1.5f && heat <= 2);
    const struct use uses[] = {{.expert = 3, .flags = USE_LAYER | USE_HIT, .row = 0},
                               {.expert = 3, .flags = USE_HIT, .row = 1},
                               {.expert = EXPERTS, .row = 1}, /* nonsense */
                               {.expert = 5, .flags = USE_PREFILL}};
    uses_append(&books.control->uses, uses, 4);
    follower_read(&follower);
    const struct use rest[] = {{.expert = 5, .flags = 0, .row = 1}, {.expert = 6}, {.expert = 6, .flags = USE_LAYER}};
    uses_append(&books.control->uses, rest, 3);
    follower_read(&follower);
    assert_int_equal(guesses.uses, 4);
    assert_int_equal(guesses.hits, 1);
    assert_true(lfru_heat(books.placement.lfru, 3) <= 1 && lfru_heat(books.placement.lfru, 3) > 0.5f);
    assert_true(lfru_heat(books.placement.lfru, 6) > 1.5f);
    assert_int_equal(books.control->iod.uses_read, 9);
    /* What the policy thinks of an expert stands in its slot. */
    placement_grow(&books.placement, 8);
    assert_int_equal(load(&books, 7, PRIORITY_DEMAND), 0);
    assert_int_equal(load(&books, 6, PRIORITY_DEMAND), 0);
    for (uint32_t i = 0; i < 2; i++)
        placement_publish_heat(&books.placement);
    assert_true(books.pool.slots[0].heat < 0.5f && books.pool.slots[1].heat > 1.5f);
    close_books(&books);
}

/* --- requests --- */

static void ask(struct books *books, uint32_t worker, uint32_t expert, uint64_t tick, uint32_t kind, int expected)
{
    const struct expert_request request = {.expert = expert, .epoch = 1, .tick = tick, .kind = kind};
    assert_int_equal(requests_note(&books->requests, worker, &request), expected);
    if (expected == 0)
        requests_append(&books->requests, expert, kind == KIND_DEMAND ? PRIORITY_DEMAND : PRIORITY_LOOKAHEAD);
}

static void test_queues(void **state)
{
    (void)state;
    struct books books;
    open_books(&books, 8);
    struct requests *r = &books.requests;
    uint64_t now = books.tick;
    atomic_store(&books.control->workers[1].tick, now);
    ask(&books, 0, EXPERTS, now, KIND_DEMAND, -EBADMSG);
    ask(&books, 0, 1, now, 2, -EBADMSG);
    ask(&books, 0, 1, now - 1, KIND_DEMAND, -ESTALE);
    ask(&books, 0, 1, now, KIND_LOOKAHEAD, -ESTALE); /* its layer has begun */
    for (uint32_t e = 0; e < 4; e++)
        requests_warm(r, e);
    requests_warm(r, EXPERTS);
    ask(&books, 0, 10, now + 1, KIND_LOOKAHEAD, 0);
    ask(&books, 0, 2, now + 1, KIND_LOOKAHEAD, 0); /* moves up */
    ask(&books, 1, 12, now + 5, KIND_LOOKAHEAD, 0);
    ask(&books, 0, 20, now, KIND_DEMAND, 0);
    ask(&books, 1, 2, now, KIND_DEMAND, 0); /* and up again */
    ask(&books, 0, 2, now, KIND_DEMAND, 0);
    ask(&books, 0, 20, now + 1, KIND_LOOKAHEAD, 0); /* not down */
    assert_int_equal(r->queued[PRIORITY_DEMAND], 2);
    assert_int_equal(r->queued[PRIORITY_LOOKAHEAD], 2);
    assert_int_equal(r->queued[PRIORITY_WARMUP], 3);
    assert_int_equal(requests_head(r, PRIORITY_DEMAND), 20);
    requests_remove(r, 20);
    requests_remove(r, 20);
    assert_int_equal(requests_head(r, PRIORITY_DEMAND), 2);
    assert_int_equal(requests_live(r, 2, NULL), 3);
    atomic_store(&books.control->workers[0].tick, now + 1);
    assert_int_equal(requests_live(r, 2, NULL), 2);
    assert_int_equal(requests_head(r, PRIORITY_LOOKAHEAD), 12); /* worker 1 has not come so far */
    assert_int_equal(books.control->iod.guesses_dropped, 1);
    assert_int_equal(requests_head(r, PRIORITY_WARMUP), 0);
    requests_drop(r, 0);
    assert_int_equal(requests_head(r, PRIORITY_WARMUP), 1);
    assert_int_equal(books.control->iod.guesses_dropped, 1);
    atomic_store(&books.control->epoch, 2);
    assert_int_equal(requests_head(r, PRIORITY_DEMAND), QUEUE_END);
    assert_int_equal(requests_head(r, PRIORITY_LOOKAHEAD), QUEUE_END);
    assert_int_equal(requests_head(r, PRIORITY_WARMUP), 1);
    assert_int_equal(books.control->iod.guesses_dropped, 2);
    close_books(&books);
}

/* --- the judge of lookaheads --- */

/* One window: so many of 100 uses hit, the drive so many of 100 parts of the time busy. */
static bool window(struct guesses *guesses, uint32_t hits, uint32_t busy, uint64_t used, uint64_t lost)
{
    bool on = guesses->on;
    for (uint32_t i = 0; i < GUESSES_WINDOW; i++) {
        assert_true(guesses_pay(guesses, used, lost) == on); /* within a window nothing changes */
        guesses_use(guesses, i % 100 < hits);
        guesses_clock(guesses, true, guesses->clock_ns + (100 - busy) * 1000u);
        assert_int_equal(guesses_clock(guesses, false, guesses->clock_ns + busy * 1000u), busy * 1000u);
    }
    return guesses_pay(guesses, used, lost);
}

static void test_judge(void **state)
{
    (void)state;
    struct guesses g;
    guesses_open(&g, 5);
    assert_true(g.on);
    assert_true(window(&g, 60, 80, 0, 0));
    assert_false(window(&g, 100, 80, 0, 0)); /* nothing is missed */
    assert_true(window(&g, 90, 80, 0, 0));
    assert_true(window(&g, 60, 93, 0, 0)); /* little time, but it is on */
    assert_false(window(&g, 60, 97, 0, 0));
    assert_false(window(&g, 60, 93, 0, 0)); /* and that is not enough to begin again */
    assert_true(window(&g, 60, 80, 0, 0));
    /* Wrong guesses: a rest, then another try; a longer rest after that. */
    assert_true(window(&g, 60, 80, 100, 50));
    assert_false(window(&g, 60, 80, 110, 150));
    uint32_t rest = 1;
    while (!window(&g, 60, 80, 110, 200))
        rest++;
    assert_int_equal(rest, 8);
    assert_false(window(&g, 60, 80, 110, 300));
    for (rest = 1; !window(&g, 60, 80, 110, 300); rest++)
        ;
    assert_int_equal(rest, 16);
    /* Nothing is missed, thanks to guesses. */
    guesses_open(&g, 5);
    assert_true(window(&g, 100, 80, 100, 0));
    assert_false(window(&g, 100, 80, 100, 0));
    /* A pause in which nobody asks is not the drive's idle time. */
    for (uint32_t i = 0; i < GUESSES_WINDOW; i++)
        guesses_use(&g, i % 2);
    guesses_clock(&g, false, g.clock_ns + UINT64_C(3600) * 1000000000u);
    guesses_clock(&g, true, g.clock_ns);
    guesses_clock(&g, false, g.clock_ns + UINT64_C(10) * 1000000000u);
    assert_false(guesses_pay(&g, 100, 0));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_give),
        cmocka_unit_test(test_hold_and_fail),
        cmocka_unit_test(test_guesses),
        cmocka_unit_test(test_limit),
        cmocka_unit_test(test_scribbled),
        cmocka_unit_test(test_take_over),
        cmocka_unit_test(test_take_over_unfinished),
        cmocka_unit_test(test_follower),
        cmocka_unit_test(test_queues),
        cmocka_unit_test(test_judge),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
