/* The forward pass against Hugging Face's logits, and its promise: the same bits whatever the split of the work. */
#include "tests/unit/convert_fixture.h"
#include "tests/unit/engine.h"

#include <fcntl.h>
#include <math.h>
#include <time.h>
#include <xxhash.h>

#define CHUNK 64u
#define PATIENCE_MS 20000

struct oracle {
    int32_t *tokens;
    float *logits, *logits_dense, *draft;
    uint32_t count, vocab;
};

static char *scratch, *containers[3]; /* set up once: glm-a, glm-b, the bundled model */
static const char *const names[] = {"oracles/glm-a/checkpoint", "oracles/glm-b/checkpoint", "model"};

static int set_up(void **state)
{
    (void)state;
    scratch = fixture_scratch();
    for (int i = 0; i < 3; i++) {
        char name[] = {(char)('0' + i), 0};
        struct error error;
        char *source = fixture_path(names[i]);
        containers[i] = fixture_join(scratch, name);
        if (fixture_convert(source, containers[i], NULL, 2, 0, &error) < 0) {
            print_error("%s\n", error.text);
            return -1;
        }
        free(source);
    }
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    for (int i = 0; i < 3; i++)
        free(containers[i]);
    fixture_remove(scratch);
    return 0;
}

static void read_oracle(const char *name, struct oracle *ret_oracle)
{
    uint64_t shape[2];
    char *path = fixture_path(name);
    struct oracle *o = ret_oracle;
    o->tokens = engine_tensor(path, "tokens", DTYPE_I32, shape);
    o->count = (uint32_t)shape[0];
    o->logits = engine_tensor(path, "logits", DTYPE_F32, shape);
    o->vocab = (uint32_t)shape[1];
    o->logits_dense = engine_tensor(path, "logits_dense", DTYPE_F32, shape);
    o->draft = engine_tensor(path, "draft_logits", DTYPE_F32, shape);
    free(path);
}

static void free_oracle(struct oracle *oracle)
{
    free(oracle->tokens);
    free(oracle->logits);
    free(oracle->logits_dense);
    free(oracle->draft);
}

struct likeness {
    double top1, median;
    uint32_t far; /* rows with a cosine under 0.99999 */
};

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* The same argmax, or two of `want` that are a tie within 1e-4 of its deviation. */
static bool same_top(const float *got, const float *want, uint32_t n)
{
    uint32_t g = 0, w = 0;
    double sum = 0, squares = 0;
    for (uint32_t i = 0; i < n; i++) {
        g = got[i] > got[g] ? i : g;
        w = want[i] > want[w] ? i : w;
        sum += want[i];
        squares += (double)want[i] * want[i];
    }
    double deviation = sqrt(squares / n - sum / n * (sum / n));
    return g == w || want[w] - want[g] <= 1e-4 * deviation;
}

static struct likeness liken(const char *what, const float *got, const float *want, uint32_t rows, uint32_t vocab)
{
    struct likeness like = {0};
    double *cosine = calloc(rows, sizeof *cosine);
    for (uint32_t r = 0; r < rows; r++) {
        const float *a = got + (size_t)r * vocab, *b = want + (size_t)r * vocab;
        double ab = 0, aa = 0, bb = 0;
        for (uint32_t i = 0; i < vocab; i++) {
            ab += (double)a[i] * b[i];
            aa += (double)a[i] * a[i];
            bb += (double)b[i] * b[i];
        }
        cosine[r] = ab / sqrt(aa * bb);
        like.far += !(cosine[r] >= 0.99999);
        like.top1 += same_top(a, b, vocab);
    }
    like.top1 /= rows;
    qsort(cosine, rows, sizeof *cosine, compare_doubles);
    like.median = cosine[rows / 2];
    print_message("%s: top-1 %.4f, median cosine %.6f, least %.6f\n", what, like.top1, like.median, cosine[0]);
    free(cosine);
    return like;
}

static void check_oracle(struct engine *engine, int which)
{
    static const char *const files[] = {"oracles/glm-a/oracle.safetensors", "oracles/glm-b/oracle.safetensors"};
    struct oracle oracle;
    read_oracle(files[which], &oracle);
    size_t values = (size_t)oracle.count * oracle.vocab;
    float *logits = calloc(values, sizeof(float)), *draft = calloc(values, sizeof(float));
    for (int f32 = 0; f32 < 2; f32++)
        for (int dense = 0; dense < 2; dense++) {
            const struct engine_options options = {.container = containers[which],
                                                   .workers = 1,
                                                   .threads = 2,
                                                   .activations = f32 ? ACTIVATIONS_F32 : 0,
                                                   .kv = f32 ? KV_F32 : 0,
                                                   .index_topk = dense ? 4096 : 0};
            engine_open(engine, &options);
            engine_score(engine, oracle.tokens, oracle.count, CHUNK, 0, logits, draft);
            engine_close(engine);
            char what[64];
            snprintf(what, sizeof what, "glm-%c, %s activations, %s", 'a' + which, f32 ? "f32" : "int8",
                     dense ? "dense" : "sparse");
            struct likeness like =
                liken(what, logits, dense ? oracle.logits_dense : oracle.logits, oracle.count, oracle.vocab);
            if (f32)
                assert_true(like.top1 == 1.0 && like.far <= 2);
            else
                assert_true(like.top1 >= (dense ? 0.85 : 0.75) && like.median >= (dense ? 0.9993 : 0.997));
            if (dense)
                continue;
            strcat(what, ", draft");
            like = liken(what, draft, oracle.draft, oracle.count - 1, oracle.vocab);
            if (f32)
                assert_true(like.top1 == 1.0 && like.far <= 2);
            else
                assert_true(like.top1 >= 0.62 && like.median >= 0.985);
        }
    free(logits);
    free(draft);
    free_oracle(&oracle);
}

static void test_oracle_a(void **state)
{
    check_oracle(*state, 0);
}

static void test_oracle_b(void **state)
{
    check_oracle(*state, 1);
}

/* Decimal ids of tests/oracles/score.tokens, the first `count`. */
static int32_t *read_tokens(uint32_t count)
{
    char *path = fixture_path("oracles/score.tokens");
    FILE *stream = fopen(path, "r");
    int32_t *tokens = calloc(count, sizeof *tokens);
    assert_true(stream && tokens);
    for (uint32_t i = 0; i < count; i++)
        assert_int_equal(fscanf(stream, "%d", &tokens[i]), 1);
    fclose(stream);
    free(path);
    return tokens;
}

static void test_same_bits(void **state)
{
    struct engine *engine = *state;
    static const struct variant {
        uint32_t workers, threads, chunk, slots, nodes, isa;
    } variants[] = {
        {1, 1, 64, 0, 1, ISA_SCALAR}, {1, 2, 64, 0, 1, ISA_AUTO}, {2, 1, 64, 0, 1, 0}, {2, 2, 64, 0, 2, 0},
        {3, 2, 64, 0, 1, 0},          {8, 1, 64, 0, 4, 0},        {8, 2, 64, 4, 8, 0}, {1, 1, 1, 4, 1, 0},
        {2, 1, 7, 5, 1, 0},           {3, 1, 50, 4, 1, 0},
    };
    const uint32_t count = 150; /* the bundled model keeps 64 keys: the last rows are sparse */
    const struct {
        uint32_t activations, kv, index_topk;
    } modes[] = {{ACTIVATIONS_INT8, KV_F16, 0}, {ACTIVATIONS_F32, KV_F32, 0}, {ACTIVATIONS_INT8, KV_F16, 4096}};
    int32_t *tokens = read_tokens(count);
    size_t values = (size_t)count * 4096;
    float *want[2] = {calloc(values, 4), calloc(values, 4)}, *got[2] = {calloc(values, 4), calloc(values, 4)};
    for (size_t m = 0; m < 3; m++)
        for (size_t v = 0; v < sizeof variants / sizeof variants[0]; v++) {
            const struct variant *variant = &variants[v];
            const struct engine_options options = {.container = containers[2],
                                                   .workers = variant->workers,
                                                   .threads = variant->threads,
                                                   .slots = variant->slots,
                                                   .nodes = variant->nodes,
                                                   .isa = variant->isa,
                                                   .activations = modes[m].activations,
                                                   .kv = modes[m].kv,
                                                   .index_topk = modes[m].index_topk};
            if (m > 0 && v % 4 != 0 && v != 6)
                continue; /* the rarer modes take fewer splits */
            engine_open(engine, &options);
            engine_score(engine, tokens, count, variant->chunk, 0, v ? got[0] : want[0], v ? got[1] : want[1]);
            if (v) { /* once more over the same pool, now warm, other pages */
                engine_score(engine, tokens, count, variant->chunk, 5, got[0], got[1]);
                assert_memory_equal(got[0], want[0], values * 4);
                assert_memory_equal(got[1], want[1], values * 4 - 4096 * 4);
            }
            engine_close(engine);
        }
    for (int i = 0; i < 2; i++) {
        free(want[i]);
        free(got[i]);
    }
    free(tokens);
}

/* Two sequences and a draft in one STEP, each row as if it were alone. */
static void test_sequences(void **state)
{
    struct engine *engine = *state;
    enum { FIRST = 90, SECOND = 20, VOCAB = 4096 };
    const struct engine_options options = {.container = containers[2], .workers = 2, .threads = 1};
    int32_t *tokens = read_tokens(FIRST + SECOND), *second = tokens + FIRST;
    float *alone = calloc((size_t)(FIRST + SECOND) * VOCAB, 4), *drafts = calloc((size_t)(FIRST + SECOND) * VOCAB, 4);
    engine_open(engine, &options);
    engine_score(engine, tokens, FIRST, 45, 0, alone, drafts);
    engine_score(engine, second, SECOND, SECOND, 8, alone + (size_t)FIRST * VOCAB, drafts + (size_t)FIRST * VOCAB);

    /* The last 5 rows of the first and all of the second together, other pages for the second. The first's last next is
     * unknown. */
    const uint32_t first_pages[] = {1, 0}, second_pages[] = {10};
    int32_t ids[5 + SECOND], next[5 + SECOND];
    for (int i = 0; i < 5; i++) {
        ids[i] = tokens[FIRST - 5 + i];
        next[i] = i < 4 ? tokens[FIRST - 4 + i] : -1;
    }
    for (int i = 0; i < SECOND; i++) {
        ids[5 + i] = second[i];
        next[5 + i] = i + 1 < SECOND ? second[i + 1] : -1;
    }
    const struct step_sequence sequences[] = {
        {.first = FIRST - 5, .rows = 5, .logits = LOGITS_LAST, .pages = 2, .page_ids = first_pages},
        {.first = 0, .rows = SECOND, .logits = LOGITS_ALL, .pages = 1, .page_ids = second_pages, .row_offset = 5},
    };
    const struct step step = {.id = 1,
                              .epoch = 1,
                              .draft = 1,
                              .sequences = 2,
                              .rows = 5 + SECOND,
                              .sequence = sequences,
                              .tokens = ids,
                              .next = next};
    struct step_done done;
    assert_int_equal(engine_step(engine, &step, &done), 0);
    assert_int_equal(done.logit_rows, 1 + SECOND);
    const float *got = exchange_logits(&engine->exchange, &engine->layout, 0),
                *draft = exchange_logits(&engine->exchange, &engine->layout, 1);
    assert_memory_equal(got, alone + (size_t)(FIRST - 1) * VOCAB, VOCAB * 4);
    assert_memory_equal(got + VOCAB, alone + (size_t)FIRST * VOCAB, (size_t)SECOND * VOCAB * 4);
    assert_memory_equal(draft + VOCAB, drafts + (size_t)FIRST * VOCAB, (size_t)(SECOND - 1) * VOCAB * 4);
    for (uint32_t i = 0; i < VOCAB; i++) /* no draft where the next token is unknown */
        assert_true(draft[i] == 0.0f && draft[(size_t)SECOND * VOCAB + i] == 0.0f);
    engine_close(engine);
    free(alone);
    free(drafts);
    free(tokens);
}

/* Numbers are a promise: these sums may change only together with "numerics" in calypte.json. */
static void test_checksum(void **state)
{
    struct engine *engine = *state;
    enum { TOKENS = 100, VOCAB = 4096 };
    static const uint64_t want[2] = {UINT64_C(0x61dd18e29b0d3969), UINT64_C(0x0f95abf650503895)};
    int32_t *tokens = read_tokens(TOKENS);
    float *logits = calloc((size_t)TOKENS * VOCAB, 4), *draft = calloc((size_t)TOKENS * VOCAB, 4);
    for (int f32 = 0; f32 < 2; f32++) {
        const struct engine_options options = {.container = containers[2],
                                               .workers = 1,
                                               .threads = 2,
                                               .activations = f32 ? ACTIVATIONS_F32 : 0,
                                               .kv = f32 ? KV_F32 : 0};
        engine_open(engine, &options);
        engine_score(engine, tokens, TOKENS, CHUNK, 0, logits, draft);
        engine_close(engine);
        uint64_t sum =
            XXH3_64bits(logits, (size_t)TOKENS * VOCAB * 4) ^ XXH3_64bits(draft, (size_t)(TOKENS - 1) * VOCAB * 4);
        print_message("logits of the bundled model, %s: %016llx\n", f32 ? "f32" : "int8", (unsigned long long)sum);
        assert_true(sum == want[f32]);
    }
    free(logits);
    free(draft);
    free(tokens);
}

/* A step over `rows` tokens of a fresh sequence. */
static int step_rows(struct engine *engine, const int32_t *tokens, uint32_t rows, struct step_done *ret_done)
{
    static const uint32_t pages[] = {0};
    const struct step_sequence sequence = {.rows = rows, .logits = LOGITS_LAST, .pages = 1, .page_ids = pages};
    const struct step step = {.id = 9,
                              .epoch = atomic_load(&engine->control->epoch),
                              .sequences = 1,
                              .rows = rows,
                              .sequence = &sequence,
                              .tokens = tokens,
                              .next = tokens};
    return engine_step(engine, &step, ret_done);
}

static void flip_byte(const char *path, off_t offset)
{
    int fd = open(path, O_RDWR);
    unsigned char byte = 0;
    assert_true(fd >= 0 && pread(fd, &byte, 1, offset) == 1);
    byte ^= 0x40;
    assert_true(pwrite(fd, &byte, 1, offset) == 1);
    close(fd);
}

/* Until iod reads nothing any more, and has nothing to read. */
static void await_loads(const struct engine *engine)
{
    bool quiet = false;
    for (int ms = 0; !quiet && ms < PATIENCE_MS; ms++) {
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
        quiet = !engine_has_asked(engine) && atomic_load(&engine->control->iod.asleep);
        for (uint32_t i = 0; i < engine->facts.pool_slots; i++)
            quiet &= slot_state_of(atomic_load(&engine->workers[0].model->pool.slots[i].state)) != SLOT_LOADING;
    }
    assert_true(quiet);
}

/* A byte of every expert of layer 3 is wrong: the step ends with the name of one; mended, the next step is right. */
static void test_failed_expert(void **state)
{
    struct engine *engine = *state;
    struct error error;
    struct container *container;
    char *folder = fixture_join(scratch, "flipped"), *source = fixture_path("model");
    assert_int_equal(fixture_convert(source, folder, NULL, 2, 0, &error), 0);
    free(source);
    assert_int_equal(container_open(folder, &container, &error), 0);
    const struct expert_layer *file = &container->experts[model_moe_index(&container->config, 3)];
    int32_t *tokens = read_tokens(30);
    struct step_done done;
    const struct engine_options options = {.container = folder, .workers = 2, .threads = 2};
    engine_open(engine, &options);
    for (int round = 0; round < 2; round++) {
        for (uint32_t e = 0; e < container->config.experts; e++)
            flip_byte(file->stripes[0].header.path,
                      (off_t)(file->stripes[0].offsets[e] + 5 * container->slice_bytes + 11));
        int status = step_rows(engine, tokens, 30, &done);
        if (round == 0) {
            assert_int_equal(status, -EIO);
            assert_true(done.status == -EIO && done.layer == 3 && done.expert < container->config.experts);
            assert_true(done.slice == 5 && done.code == EBADMSG);
            print_message("%s\n", engine->workers[0].error.text);
        } else {
            if (status < 0)
                fail_msg("after mending: %d %s", status, engine->workers[0].error.text);
        }
        await_loads(engine); /* one that began before the mending may bring the old bytes */
        for (uint32_t i = 0; i < engine->facts.pool_slots; i++)
            assert_int_equal(slot_pins_of(atomic_load(&engine->workers[0].model->pool.slots[i].state)), 0);
    }
    engine_close(engine);
    container_close(container);
    free(tokens);
    free(folder);
}

/* The I/O daemon is away: the step waits for its experts until the epoch is raised; then everybody leaves, and it can
 * be run again. */
static void test_epoch(void **state)
{
    struct engine *engine = *state;
    int32_t *tokens = read_tokens(30);
    float *want = calloc(4096, 4);
    struct step_done done;
    for (uint32_t workers = 1; workers <= 3; workers += 2) {
        const struct engine_options options = {.container = containers[2], .workers = workers, .threads = 2};
        engine_open(engine, &options);
        engine_stop_iod(engine);
        const uint32_t pages[] = {0};
        const struct step_sequence sequence = {.rows = 30, .logits = LOGITS_LAST, .pages = 1, .page_ids = pages};
        const struct step step = {
            .id = 9, .epoch = 1, .sequences = 1, .rows = 30, .sequence = &sequence, .tokens = tokens, .next = tokens};
        engine_begin(engine, &step);
        for (int ms = 0; !engine_has_asked(engine) && ms < PATIENCE_MS; ms++)
            nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
        assert_true(engine_has_asked(engine)); /* it has asked for experts, and now waits */
        assert_int_equal(control_raise_epoch(engine->control), 2);
        assert_int_equal(engine_finish(engine, &done), -ESTALE);
        assert_int_equal(done.status, -ESTALE);
        for (uint32_t w = 0; w < workers; w++)
            model_acknowledge(engine->workers[w].model, 2);
        assert_int_equal(atomic_load(&engine->control->workers[workers - 1].acknowledged), 2);
        assert_int_equal(engine_step(engine, &step, &done), -ESTALE); /* the old epoch's STEP is refused at once */
        engine_start_iod(engine);
        assert_int_equal(step_rows(engine, tokens, 30, &done), 0);
        const float *got = exchange_logits(&engine->exchange, &engine->layout, 0);
        if (workers == 1)
            memcpy(want, got, 4096 * 4);
        else
            assert_memory_equal(got, want, 4096 * 4);
        engine_close(engine);
    }
    free(want);
    free(tokens);
}

#define ENGINE_TEST(test) cmocka_unit_test_setup_teardown(test, engine_set_up, engine_tear_down)

int main(void)
{
    const struct CMUnitTest tests[] = {
        ENGINE_TEST(test_oracle_a),  ENGINE_TEST(test_oracle_b), ENGINE_TEST(test_same_bits),
        ENGINE_TEST(test_sequences), ENGINE_TEST(test_checksum), ENGINE_TEST(test_failed_expert),
        ENGINE_TEST(test_epoch),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
