#include "tests/unit/engine.h"

#include "proto/cleanup.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/stat.h>

#include <cmocka.h>

#define MUST(call, error)                                                                                              \
    do {                                                                                                               \
        if ((call) < 0)                                                                                                \
            fail_msg("%s", (error).text);                                                                              \
    } while (0)

static void log_line(const char *line)
{
    (void)line; /* the tests look at results; the daemon's lines have tests of their own */
}

static void *run_iod(void *argument)
{
    struct engine *engine = argument;
    struct error error = {0};
    struct loader_options options = {.instance = engine->instance,
                                     .rundir = engine->rundir,
                                     .doorbell_fd = engine->doorbell,
                                     .stop_fd = engine->stop_fd,
                                     .log = log_line};
    int status = loader_open(&options, &engine->loader, &error);
    if (status < 0)
        print_error("iod: %s\n", error.text);
    pthread_barrier_wait(&engine->opened);
    if (status < 0)
        return NULL;
    if (loader_run(engine->loader, &error) < 0)
        print_error("iod: %s\n", error.text);
    loader_close(engine->loader);
    return NULL;
}

void engine_start_iod(struct engine *engine)
{
    engine->stop_fd = eventfd(0, EFD_CLOEXEC);
    engine->loader = NULL;
    pthread_barrier_init(&engine->opened, NULL, 2);
    assert_int_equal(pthread_create(&engine->iod_thread, NULL, run_iod, engine), 0);
    engine->iod_runs = true;
    pthread_barrier_wait(&engine->opened);
    assert_non_null(engine->loader);
}

void engine_stop_iod(struct engine *engine)
{
    uint64_t one = 1;
    assert_int_equal(write(engine->stop_fd, &one, sizeof one), sizeof one);
    pthread_join(engine->iod_thread, NULL);
    engine->iod_runs = false;
    pthread_barrier_destroy(&engine->opened);
    close(engine->stop_fd);
}

static void *run_worker(void *argument)
{
    struct engine_worker *worker = argument;
    struct engine *engine = worker->engine;
    for (;;) {
        pthread_barrier_wait(&engine->begin);
        if (!engine->step)
            return NULL;
        worker->status = model_step(worker->model, engine->step, &worker->done, &worker->error);
        pthread_barrier_wait(&engine->end);
    }
}

static uint32_t or_default(uint32_t value, uint32_t otherwise)
{
    return value ? value : otherwise;
}

static void fill_facts(struct facts *f, const struct engine_options *o, const struct container *container)
{
    uint32_t context = or_default(o->context, 512), rows = or_default(o->max_rows, 64);
    *f = (struct facts){.config = container->config,
                        .identity = container->identity,
                        .stripes = container->stripes,
                        .dense_format = container->dense_format,
                        .expert_format = container->expert_format,
                        .workers = o->workers,
                        .threads = o->threads,
                        .nodes = or_default(o->nodes, 1),
                        .activations = or_default(o->activations, ACTIVATIONS_INT8),
                        .kv = or_default(o->kv, KV_F16),
                        .io = IO_AUTO,
                        .index_topk = or_default(o->index_topk, container->config.index_topk),
                        .max_rows = rows,
                        .logit_rows = rows,
                        .page_tokens = KV_PAGE_TOKENS,
                        .kv_pages = 3 * ((context + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS),
                        .context = context,
                        .slots = 1,
                        .queue = 8,
                        .prefill_chunk = rows,
                        .isa = o->isa,
                        .prefetch = o->prefetch};
    uint32_t all = (uint32_t)container->expert_count * container->config.experts;
    f->pool_slots = or_default(o->slots, all);
    if (!realpath(o->container, f->container))
        fail_msg("no container %s", o->container);
    for (uint32_t w = 0; w < f->workers; w++) {
        f->core_count[w] = 1;
        f->worker_node[w] = w % f->nodes;
    }
}

static void make_segment(const struct engine *engine, const char *part, enum segment_kind kind, size_t bytes)
{
    struct segment segment;
    struct error error;
    const struct segment_options options = {.kind = kind, .node = -1, .populate_threads = 1};
    MUST(segment_create(engine->instance, part, bytes, &options, &segment, &error), error);
    segment_detach(&segment);
}

void engine_open(struct engine *engine, const struct engine_options *options)
{
    static int number;
    struct error error;
    struct container *container;
    memset(engine, 0, sizeof *engine);
    snprintf(engine->instance, sizeof engine->instance, "test-engine-%d-%d", (int)getpid(), number++);
    snprintf(engine->rundir, sizeof engine->rundir, "/tmp/calypte-engine-XXXXXX");
    assert_non_null(mkdtemp(engine->rundir));
    engine->open = true;
    engine->doorbell = -1;
    MUST(container_open(options->container, &container, &error), error);
    fill_facts(&engine->facts, options, container);
    struct facts *f = &engine->facts;
    const struct pool_shape shape = {.slots = f->pool_slots,
                                     .nodes = f->nodes,
                                     .moe_layers = (uint32_t)container->expert_count,
                                     .experts = container->config.experts,
                                     .slice_bytes = container->slice_bytes};
    container_close(container);
    MUST(control_create(engine->instance, f, &engine->control, &error), error);
    atomic_store(&engine->control->serving, 1);
    MUST(pool_create(engine->instance, &shape, &error), error);
    struct kv_layout kv;
    kv_layout(f, &kv);
    exchange_layout(f, &engine->layout);
    make_segment(engine, "kv", SEGMENT_KV, kv.segment_bytes);
    make_segment(engine, "exchange", SEGMENT_EXCHANGE, engine->layout.segment_bytes);
    MUST(segment_attach(engine->instance, "exchange", SEGMENT_EXCHANGE, 0, false, &engine->exchange, &error), error);
    engine->doorbell = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    engine_start_iod(engine);
    uint32_t threads = options->processes ? 0 : f->workers;
    for (uint32_t w = 0; w < threads; w++) {
        engine->workers[w].engine = engine;
        engine->workers[w].index = w;
        MUST(model_open(engine->instance, f, engine->control, w, engine->doorbell, &engine->workers[w].model, &error),
             error);
    }
    pthread_barrier_init(&engine->begin, NULL, threads + 1);
    pthread_barrier_init(&engine->end, NULL, threads + 1);
    for (; engine->started < threads; engine->started++) {
        struct engine_worker *worker = &engine->workers[engine->started];
        if (pthread_create(&worker->thread, NULL, run_worker, worker) != 0)
            abort(); /* the others wait at a barrier that nobody could reach */
    }
}

static void end_workers(struct engine *engine)
{
    if (engine->in_step) { /* every wait of the step is given up */
        control_raise_epoch(engine->control);
        pthread_barrier_wait(&engine->end);
    }
    engine->step = NULL;
    if (engine->started > 0) {
        pthread_barrier_wait(&engine->begin);
        for (uint32_t w = 0; w < engine->started; w++)
            pthread_join(engine->workers[w].thread, NULL);
        pthread_barrier_destroy(&engine->begin);
        pthread_barrier_destroy(&engine->end);
    }
    for (uint32_t w = 0; w < MAX_WORKERS; w++)
        if (engine->workers[w].model)
            model_close(engine->workers[w].model);
}

static void remove_rundir(const struct engine *engine)
{
    char command[256];
    snprintf(command, sizeof command, "rm -rf '%s'", engine->rundir);
    assert_int_equal(system(command), 0);
}

/* Whatever of it is open. Returns the segments that were removed. */
static int close_all(struct engine *engine)
{
    end_workers(engine);
    if (engine->iod_runs)
        engine_stop_iod(engine);
    if (engine->doorbell >= 0)
        close(engine->doorbell);
    if (engine->exchange.base)
        segment_detach(&engine->exchange);
    if (engine->control)
        control_detach(engine->control);
    remove_rundir(engine);
    engine->open = false;
    return segment_unlink_all(engine->instance);
}

void engine_close(struct engine *engine)
{
    assert_true(close_all(engine) >= 4);
}

int engine_set_up(void **state)
{
    *state = calloc(1, sizeof(struct engine));
    return *state ? 0 : -1;
}

int engine_tear_down(void **state)
{
    struct engine *engine = *state;
    if (engine->open)
        close_all(engine);
    free(engine);
    return 0;
}

void engine_begin(struct engine *engine, const struct step *step)
{
    engine->step = step;
    engine->in_step = true;
    pthread_barrier_wait(&engine->begin);
}

int engine_finish(struct engine *engine, struct step_done *ret_done)
{
    pthread_barrier_wait(&engine->end);
    engine->in_step = false;
    *ret_done = engine->workers[0].done;
    for (uint32_t w = 1; w < engine->facts.workers; w++)
        if (engine->workers[w].status != engine->workers[0].status)
            fail_msg("worker %u left the step with %d (%s), worker 0 with %d", w, engine->workers[w].status,
                     engine->workers[w].error.text, engine->workers[0].status);
    return engine->workers[0].status;
}

int engine_step(struct engine *engine, const struct step *step, struct step_done *ret_done)
{
    engine_begin(engine, step);
    return engine_finish(engine, ret_done);
}

bool engine_has_asked(const struct engine *engine)
{
    const struct request_ring *ring = &engine->control->rings[0]; /* worker 0 asks for all */
    return atomic_load(&ring->tail) != atomic_load(&ring->head);
}

void engine_score(struct engine *engine, const int32_t *tokens, uint32_t count, uint32_t chunk, uint32_t first_page,
                  float *ret_logits, float *ret_draft)
{
    uint32_t vocab = engine->facts.config.vocab, pages = (count + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS;
    uint32_t *page_ids = calloc(pages, sizeof *page_ids);
    int32_t *next = calloc(count, sizeof *next);
    for (uint32_t p = 0; p < pages; p++)
        page_ids[p] = first_page + pages - 1 - p; /* not in order: the table counts */
    for (uint32_t first = 0; first < count; first += chunk) {
        uint32_t rows = count - first < chunk ? count - first : chunk;
        for (uint32_t i = 0; i < rows; i++)
            next[i] = first + i + 1 < count ? tokens[first + i + 1] : -1;
        const struct step_sequence sequence = {
            .first = first, .rows = rows, .logits = LOGITS_ALL, .pages = pages, .page_ids = page_ids};
        const struct step step = {.id = first + 1,
                                  .epoch = atomic_load(&engine->control->epoch),
                                  .draft = ret_draft != NULL,
                                  .sequences = 1,
                                  .rows = rows,
                                  .sequence = &sequence,
                                  .tokens = tokens + first,
                                  .next = next};
        struct step_done done;
        int status = engine_step(engine, &step, &done);
        if (status < 0)
            fail_msg("step at %u: %d: %s", first, status, engine->workers[0].error.text);
        assert_int_equal(done.logit_rows, rows);
        memcpy(ret_logits + (size_t)first * vocab, exchange_logits(&engine->exchange, &engine->layout, 0),
               (size_t)rows * vocab * sizeof(float));
        uint32_t drafts = first + rows < count ? rows : rows - 1;
        if (ret_draft)
            memcpy(ret_draft + (size_t)first * vocab, exchange_logits(&engine->exchange, &engine->layout, 1),
                   (size_t)drafts * vocab * sizeof(float));
    }
    free(page_ids);
    free(next);
}

void *engine_tensor(const char *path, const char *name, enum tensor_dtype dtype, uint64_t ret_shape[static 2])
{
    struct safetensors file;
    struct error error;
    MUST(safetensors_open(path, &file, &error), error);
    const struct tensor *tensor = safetensors_find(&file, name);
    if (!tensor || tensor->dtype != dtype)
        fail_msg("%s: no tensor %s", path, name);
    void *data = malloc(tensor->bytes);
    _cleanup_fclose_ FILE *stream = fopen(path, "rb");
    assert_true(data && stream && fseek(stream, (long)tensor->offset, SEEK_SET) == 0);
    assert_int_equal(fread(data, 1, tensor->bytes, stream), tensor->bytes);
    ret_shape[0] = tensor->shape[0];
    ret_shape[1] = tensor->shape[1];
    safetensors_close(&file);
    return data;
}
