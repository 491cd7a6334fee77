/* The time inside a step: its parts add up to the step, each is charged for its own work, and counters keep the
 * sums. */
#include "tests/unit/convert_fixture.h"
#include "tests/unit/engine.h"

#define ROWS 256u /* more than the bundled model's 64 best keys, so that its indexer chooses */
#define TRIES 20
#define PAGES (ROWS / KV_PAGE_TOKENS)

static char *scratch, *container;

static int set_up(void **state)
{
    (void)state;
    scratch = fixture_scratch();
    container = fixture_model(scratch);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    free(container);
    fixture_remove(scratch);
    return 0;
}

/* A step over the first ROWS tokens of a fresh sequence; returns the wall time around it. */
static uint64_t run_step(struct engine *engine, struct step_done *ret_done)
{
    int32_t tokens[ROWS];
    uint32_t pages[PAGES];
    for (uint32_t i = 0; i < ROWS; i++)
        tokens[i] = (int32_t)(i * 37 % 4000);
    for (uint32_t p = 0; p < PAGES; p++)
        pages[p] = p;
    const struct step_sequence sequence = {.rows = ROWS, .logits = LOGITS_LAST, .pages = PAGES, .page_ids = pages};
    const struct step step = {.id = 1,
                              .epoch = atomic_load(&engine->control->epoch),
                              .sequences = 1,
                              .rows = ROWS,
                              .sequence = &sequence,
                              .tokens = tokens,
                              .next = tokens};
    uint64_t begun = clock_ns();
    assert_int_equal(engine_step(engine, &step, ret_done), 0);
    return clock_ns() - begun;
}

static uint64_t sum_of(const struct step_done *done)
{
    uint64_t sum = 0;
    for (int p = 0; p < STEP_PARTS; p++)
        sum += done->part_ns[p];
    return sum;
}

static void test_parts_are_the_step(void **state)
{
    struct engine *engine = *state;
    const struct engine_options options = {.container = container, .workers = 2, .threads = 2, .max_rows = ROWS};
    engine_open(engine, &options);

    struct step_done done;
    uint64_t wall = run_step(engine, &done);
    assert_true(done.step_ns <= wall);
    assert_true(done.part_ns[PART_WAIT] > 0); /* the pool was empty */
    for (int p = 0; p < STEP_PARTS; p++)
        if (done.part_ns[p] == 0)
            fail_msg("no time in part %s", step_part_name((enum step_part)p));

    uint64_t total = done.step_ns, matmul = done.matmul_ns, parts[STEP_PARTS];
    memcpy(parts, done.part_ns, sizeof parts);
    double best = 0;
    for (int i = 0; i < TRIES; i++) {
        wall = run_step(engine, &done);
        assert_int_equal(done.part_ns[PART_WAIT], 0); /* now everything is there */
        assert_int_equal(done.misses, 0);
        assert_int_equal(sum_of(&done), done.step_ns);
        assert_true(done.step_ns <= wall);
        assert_in_range(done.matmul_ns, 1, done.step_ns);
        /* Another program may take the CPU between the clocks of the test and of the worker, but not each time. */
        double share = (double)sum_of(&done) / (double)wall;
        best = share > best ? share : best;
        total += done.step_ns;
        matmul += done.matmul_ns;
        for (int p = 0; p < STEP_PARTS; p++)
            parts[p] += done.part_ns[p];
    }
    if (best < 0.98)
        fail_msg("the parts are %.1f %% of the time of a step at best", best * 100);

    const struct worker_line *line = &engine->control->workers[0];
    assert_int_equal(atomic_load(&line->steps), TRIES + 1);
    assert_int_equal(atomic_load(&line->step_ns), total);
    assert_int_equal(atomic_load(&line->matmul_ns), matmul);
    for (int p = 0; p < STEP_PARTS; p++)
        assert_int_equal(atomic_load(&line->part_ns[p]), parts[p]);
    engine_close(engine);
}

/* The clock is charged to the part that is left. */
static void test_part_changes(void **state)
{
    (void)state;
    struct team team = {.threads = 1};
    uint64_t start = clock_ns(), before = start;
    team_time(&team, start);
    assert_int_equal(team_part(&team, PART_HEAD), PART_OTHER);
    while (clock_ns() - before < 2000000) {
    }
    assert_int_equal(team_part(&team, PART_WAIT), PART_HEAD);
    assert_int_equal(team_part(&team, PART_HEAD), PART_WAIT);
    assert_true(team.part_ns[PART_HEAD] >= 1900000);
    uint64_t head = team.part_ns[PART_HEAD];
    assert_int_equal(team_part(&team, PART_OTHER), PART_HEAD);
    assert_true(team.part_ns[PART_HEAD] >= head); /* a part that comes again goes on */
    assert_int_equal(team.part_ns[PART_OTHER] + team.part_ns[PART_HEAD] + team.part_ns[PART_WAIT],
                     team.part_since - start);
}

#define ENGINE_TEST(test) cmocka_unit_test_setup_teardown(test, engine_set_up, engine_tear_down)

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_part_changes),
        ENGINE_TEST(test_parts_are_the_step),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
