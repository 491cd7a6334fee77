/* What worker 0 writes down about the experts that are used, and what it asks for ahead: the log, the counts by layer, the guesses, and
 * that none of it touches the numbers. */
#include "compute/demand.h"
#include "tests/unit/convert_fixture.h"
#include "tests/unit/engine.h"

#include <string.h>

#define TOKENS 48u
#define PROMPT 32u
#define SMALL 24u /* slots: far fewer than the experts that a step of PROMPT rows uses */

static char *scratch, *container;
static int32_t tokens[TOKENS];

static int set_up(void **state)
{
    (void)state;
    scratch = fixture_scratch();
    container = fixture_model(scratch);
    for (uint32_t i = 0; i < TOKENS; i++)
        tokens[i] = (int32_t)(i * 37 % 4000);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    free(container);
    fixture_remove(scratch);
    return 0;
}

static float *score(struct engine *engine, uint32_t chunk)
{
    float *logits = calloc((size_t)TOKENS * engine->facts.config.vocab, sizeof *logits);
    assert_non_null(logits);
    engine_score(engine, tokens, TOKENS, chunk, 0, logits, NULL);
    return logits;
}

static uint64_t ahead(const struct engine *engine, enum ahead_count count)
{
    return atomic_load(&engine->control->workers[0].ahead[count]);
}

static void open_engine(struct engine *engine, uint32_t prefetch, uint32_t slots)
{
    const struct engine_options options = {
        .container = container, .workers = 2, .threads = 2, .prefetch = prefetch, .slots = slots};
    engine_open(engine, &options);
}

/* Guesses on, few slots, one row a step: what is asked for ahead is counted, and every logit has the bits of the run without. */
static void test_same_bits(void **state)
{
    struct engine *engine = *state;
    open_engine(engine, PREFETCH_OFF, 0);
    atomic_store(&engine->control->iod.lookahead, 1); /* off is off whatever iod says */
    float *want = score(engine, 1);
    for (int c = 0; c < AHEAD_COUNTS; c++)
        assert_int_equal(ahead(engine, (enum ahead_count)c), 0);
    size_t bytes = (size_t)TOKENS * engine->facts.config.vocab * sizeof *want;
    engine_close(engine);
    open_engine(engine, PREFETCH_ON, SMALL);
    float *got = score(engine, 1);
    uint64_t asked = ahead(engine, AHEAD_ASKED), used = ahead(engine, AHEAD_USED);
    print_message("asked %llu, used %llu, ready %llu, missed %llu\n", (unsigned long long)asked,
                  (unsigned long long)used, (unsigned long long)ahead(engine, AHEAD_READY),
                  (unsigned long long)ahead(engine, AHEAD_MISSED));
    /* Chance would find an eighth: 4 of 32 experts. */
    assert_true(used > asked / 3 && used <= asked && ahead(engine, AHEAD_READY) <= used);
    assert_true(ahead(engine, AHEAD_MISSED) > 0);
    engine_close(engine);
    assert_memory_equal(got, want, bytes);
    free(want);
    free(got);
}

/* A prompt's chunk is not looked ahead for: nobody knows which of its experts the drive should read first. */
static void test_prompts_are_not_guessed(void **state)
{
    struct engine *engine = *state;
    open_engine(engine, PREFETCH_ON, SMALL);
    free(score(engine, PROMPT / 2));
    assert_int_equal(ahead(engine, AHEAD_ASKED), 0);
    assert_int_equal(ahead(engine, AHEAD_MISSED), 0);
    engine_close(engine);
}

struct totals {
    uint64_t entries, layers, hits, misses, prefill;
};

/* Reads everything from *place on and checks the order of each layer. */
static struct totals read_log(const struct engine *engine, uint64_t *place)
{
    static struct use uses[USE_ENTRIES];
    uint64_t lost, layer_hits[MODEL_MAX_LAYERS] = {0};
    struct totals totals = {0};
    uint32_t experts = engine->facts.config.experts;
    uint32_t count = uses_read(&engine->control->uses, place, uses, USE_ENTRIES, &lost);
    assert_int_equal(lost, 0);
    for (uint32_t i = 0; i < count; i++) {
        const struct use *use = &uses[i], *before = use - 1;
        bool begins = use->flags & USE_LAYER, first = begins || use->expert != before->expert;
        totals.entries++;
        totals.layers += begins;
        totals.prefill += (use->flags & USE_PREFILL) != 0;
        totals.hits += first && use->flags & USE_HIT;
        totals.misses += first && !(use->flags & USE_HIT);
        layer_hits[use->expert / experts] += first && use->flags & USE_HIT;
        assert_true(i > 0 || begins);
        if (!begins) {
            assert_int_equal(use->expert / experts, before->expert / experts);
            assert_int_equal(use->step, before->step);
            assert_true(use->expert > before->expert || (use->expert == before->expert && use->row > before->row));
            assert_true(use->expert > before->expert || (use->flags & USE_HIT) == (before->flags & USE_HIT));
        } else if (i > 0 && use->step == before->step)
            assert_true(use->expert / experts == before->expert / experts + 1);
    }
    uint32_t layer = 0;
    for (uint32_t m = 0; m < model_moe_layers(&engine->facts.config); m++, layer++) {
        while (engine->facts.config.layer_kind[layer] != LAYER_MOE)
            layer++;
        assert_true(atomic_load(&engine->control->layers[layer].hits) == layer_hits[m]);
    }
    return totals;
}

/* The log and the counts by layer hold what the steps say, for chunks and for single rows. */
static void test_log(void **state)
{
    struct engine *engine = *state;
    open_engine(engine, PREFETCH_AUTO, SMALL);
    const struct model_config *c = &engine->facts.config;
    uint32_t layers = model_moe_layers(c) - c->mtp_layers; /* the draft layer does not run */
    uint64_t place = uses_end(&engine->control->uses);
    free(score(engine, PROMPT)); /* a chunk of 32 rows, and one of 16 */
    uint64_t before = place;
    struct totals totals = read_log(engine, &place);
    const struct worker_line *line = &engine->control->workers[0];
    assert_int_equal(totals.entries, TOKENS * layers * c->top_k);
    assert_int_equal(totals.prefill, totals.entries);
    assert_int_equal(totals.layers, 2 * layers);
    assert_true(totals.hits == atomic_load(&line->hits) && totals.misses == atomic_load(&line->misses));
    assert_true(totals.misses > 0);
    free(score(engine, ANSWER_ROWS)); /* these pass for answers */
    place = before;
    struct totals both = read_log(engine, &place);
    assert_int_equal(both.entries, 2 * totals.entries);
    assert_int_equal(both.prefill, totals.entries);
    assert_int_equal(both.layers, totals.layers + TOKENS / ANSWER_ROWS * layers);
    assert_true(both.hits == atomic_load(&line->hits) && both.misses == atomic_load(&line->misses));
    engine_close(engine);
}

static bool rings(const struct engine *engine)
{
    uint64_t count;
    return read(engine->doorbell, &count, sizeof count) == sizeof count;
}

/* One token again and again, as a prompt of 9 rows or as an answer's single row, which wants no expert that the prompt does not want:
 * a position does not change what is attended to where all is the same. */
static const int32_t same[ANSWER_ROWS + 1] = {5, 5, 5, 5, 5, 5, 5, 5, 5}, no_next[ANSWER_ROWS + 1];
static const uint32_t page;
static const struct step_sequence many = {.rows = ANSWER_ROWS + 1,
                                          .logits = LOGITS_LAST,
                                          .pages = 1,
                                          .page_ids = &page},
                                  one = {.rows = 1, .logits = LOGITS_LAST, .pages = 1, .page_ids = &page};

static void run_same(struct engine *engine, const struct step_sequence *sequence, struct step_done *ret_done)
{
    const struct step step = {.id = 1,
                              .epoch = 1,
                              .sequences = 1,
                              .rows = sequence->rows,
                              .sequence = sequence,
                              .tokens = same,
                              .next = no_next};
    assert_int_equal(engine_step(engine, &step, ret_done), 0);
}

/* Opens an engine in which the experts of these steps are READY and iod does nothing any more. */
static void open_without_iod(struct engine *engine, uint32_t prefetch)
{
    struct step_done done;
    open_engine(engine, prefetch, 0);
    run_same(engine, &many, &done);
    engine_stop_iod(engine);
    while (rings(engine))
        ;
    atomic_store(&engine->control->iod.starved, 0);
    atomic_store(&engine->control->iod.uses_read, uses_end(&engine->control->uses));
}

/* iod is woken for the log's sake when it is half a log behind and asleep, and only then. */
static void test_doorbell(void **state)
{
    struct engine *engine = *state;
    struct step_done done;
    open_without_iod(engine, PREFETCH_OFF);
    static const struct {
        uint64_t unread;
        uint32_t asleep;
        bool rings;
    } cases[] = {
        {0, 1, false}, {USE_ENTRIES / 2 - 100, 1, false}, {USE_ENTRIES / 2, 0, false}, {USE_ENTRIES / 2, 1, true}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        atomic_store(&engine->control->iod.uses_read, uses_end(&engine->control->uses) - cases[i].unread);
        atomic_store(&engine->control->iod.asleep, cases[i].asleep);
        run_same(engine, &one, &done);
        assert_int_equal(done.misses, 0);
        assert_int_equal(rings(engine), cases[i].rings);
    }
    engine_start_iod(engine);
    engine_close(engine);
}

/* `auto` does what iod says; what is asked for is the next layer's, for its tick, not in the pool, and rings. */
static void test_auto(void **state)
{
    struct engine *engine = *state;
    struct step_done done;
    struct expert_request request;
    open_without_iod(engine, PREFETCH_AUTO);
    struct control *control = engine->control;
    const struct model *model = engine->workers[0].model;
    uint64_t asked = ahead(engine, AHEAD_ASKED), count = 0;
    uint32_t experts = engine->facts.config.experts;
    atomic_store(&control->iod.asleep, 1);
    atomic_store(&control->iod.lookahead, 0);
    run_same(engine, &one, &done);
    assert_int_equal(done.misses, 0);
    assert_true(ahead(engine, AHEAD_ASKED) == asked && !rings(engine));
    assert_int_equal(ring_pop(&control->rings[0], &request), 0);
    uint64_t tick = atomic_load(&control->workers[0].tick);
    atomic_store(&control->iod.lookahead, 1);
    run_same(engine, &one, &done);
    assert_true(rings(engine));
    while (ring_pop(&control->rings[0], &request) == 1) {
        struct slot_ref ref;
        count++;
        assert_int_equal(request.kind, KIND_LOOKAHEAD);
        assert_int_equal(request.epoch, 1);
        assert_true(request.tick == tick + 1 + request.expert / experts); /* the first MoE layer has tick + 1 */
        assert_true(request.expert >= experts);                           /* nothing comes before that one */
        assert_int_equal(pool_lookup(&model->pool, request.expert, &ref), -ENOENT);
    }
    assert_true(count > 0 && ahead(engine, AHEAD_ASKED) == asked + count);
    engine_start_iod(engine);
    engine_close(engine);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_same_bits, engine_set_up, engine_tear_down),
        cmocka_unit_test_setup_teardown(test_prompts_are_not_guessed, engine_set_up, engine_tear_down),
        cmocka_unit_test_setup_teardown(test_log, engine_set_up, engine_tear_down),
        cmocka_unit_test_setup_teardown(test_doorbell, engine_set_up, engine_tear_down),
        cmocka_unit_test_setup_teardown(test_auto, engine_set_up, engine_tear_down),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
