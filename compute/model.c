#include "compute/model.h"

#include "compute/family.h"
#include "compute/lookahead.h"
#include "compute/math.h"

#include <math.h>
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MEMORY_MAX 128u /* allocations of a state and of all threads' scratch go into one list, which grows by this */

/* `count` things of `size` bytes, zeroed, on a cache line of their own, kept in the state's list; NULL when memory runs out. */
static void *allocate(struct state *state, size_t count, size_t size)
{
    size_t bytes;
    if (__builtin_mul_overflow(count, size, &bytes) || __builtin_add_overflow(bytes, CACHE_LINE, &bytes))
        return NULL;
    if (state->memory_count % MEMORY_MAX == 0) {
        void **longer = realloc(state->memory, (state->memory_count + MEMORY_MAX) * sizeof(void *));
        if (!longer)
            return NULL;
        state->memory = longer;
    }
    void *memory = aligned_alloc(CACHE_LINE, bytes / CACHE_LINE * CACHE_LINE);
    if (!memory)
        return NULL;
    memset(memory, 0, bytes / CACHE_LINE * CACHE_LINE);
    state->memory[state->memory_count++] = memory;
    return memory;
}

/* One entry of the table of what a state needs. */
struct need {
    void *pointer; /* the address of the pointer to fill */
    size_t count, size;
};

static int allocate_all(struct state *state, const struct need *needs, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        void *memory = allocate(state, needs[i].count, needs[i].size);
        if (!memory)
            return -ENOMEM;
        memcpy(needs[i].pointer, &memory, sizeof memory);
    }
    return 0;
}

#define NEED(pointer, count)                                                                                           \
    {                                                                                                                  \
        &(pointer), (count), sizeof *(pointer)                                                                         \
    }
#define COUNT(array) (sizeof(array) / sizeof(array)[0])

static int allocate_activation(struct model *model, struct activation *activation, size_t rows, uint32_t width)
{
    struct state *state = &model->state;
    size_t values = rows * width;
    activation->width = width;
    if (model->facts.activations == ACTIVATIONS_F32) {
        const struct need needs[] = {NEED(activation->x, values)};
        return allocate_all(state, needs, COUNT(needs));
    }
    const struct need needs[] = {NEED(activation->q, values), NEED(activation->scales, values / GROUP),
                                 NEED(activation->sums, values / GROUP)};
    return allocate_all(state, needs, COUNT(needs));
}

static uint32_t larger(uint32_t a, uint32_t b)
{
    return a > b ? a : b;
}

static int allocate_activations(struct model *model)
{
    const struct model_config *c = &model->facts.config;
    struct state *s = &model->state;
    size_t rows = model->facts.max_rows, head_rows = rows * model->heads.count;
    /* `hidden` has room for the two halves that go into eh_proj, and for as many rows as may ask for logits. */
    size_t hidden_rows = larger(model->facts.max_rows, model->facts.logit_rows);
    int status = allocate_activation(model, &s->hidden, hidden_rows * 2, c->hidden);
    if (status == 0)
        status = allocate_activation(model, &s->q_lora, rows, c->q_lora);
    if (status == 0)
        status = allocate_activation(model, &s->nope, head_rows, c->qk_nope);
    if (status == 0)
        status = allocate_activation(model, &s->latent, head_rows, c->kv_lora);
    if (status == 0)
        status = allocate_activation(model, &s->o, rows, c->heads * c->v_head);
    if (status == 0)
        status = allocate_activation(model, &s->index, rows, c->index_heads * c->index_dim);
    return status;
}

static int allocate_batch(struct model *model, struct batch *batch)
{
    size_t rows = model->facts.max_rows, angles = rows * (model->facts.config.qk_rope / 2);
    const struct need needs[] = {
        NEED(batch->sequence, rows),
        NEED(batch->position, rows),
        NEED(batch->token, rows),
        NEED(batch->source, rows),
        NEED(batch->cos, angles),
        NEED(batch->sin, angles),
        NEED(batch->h, rows * model->facts.config.hidden),
    };
    return allocate_all(&model->state, needs, COUNT(needs));
}

static int allocate_thread(struct model *model, struct thread *thread)
{
    const struct facts *f = &model->facts;
    const struct model_config *c = &f->config;
    uint32_t width = c->kv_lora + c->qk_rope, keys = f->index_topk < f->context ? f->index_topk : f->context;
    uint32_t row = larger(larger(2 * c->hidden, c->index_heads * c->index_dim), larger(width, c->q_lora));
    size_t candidates = exchange_candidates(f), gate = (size_t)gate_room(f) * GROUP;
    const struct need needs[] = {
        NEED(thread->rows, f->max_rows + f->logit_rows),
        NEED(thread->gate, gate),
        NEED(thread->up, gate),
        NEED(thread->keys, (size_t)KEY_BLOCK * width),
        NEED(thread->scores, (size_t)ATTENTION_HEADS * keys),
        NEED(thread->z, (size_t)ATTENTION_HEADS * c->kv_lora),
        NEED(thread->row, row),
        NEED(thread->candidate_score, f->workers * candidates),
        NEED(thread->candidate_position, f->workers * candidates),
        NEED(thread->candidate_index, candidates),
    };
    return allocate_all(&model->state, needs, COUNT(needs));
}

static int allocate_state(struct model *model, struct error *ret_error)
{
    const struct facts *f = &model->facts;
    const struct model_config *c = &f->config;
    struct state *s = &model->state;
    size_t rows = f->max_rows, own = model->heads.count, candidates = exchange_candidates(f);
    size_t x_rows = larger(f->max_rows, f->logit_rows);
    const struct need needs[] = {
        NEED(s->x, x_rows * c->hidden),
        NEED(s->q, rows * own * (c->qk_nope + c->qk_rope)),
        NEED(s->q_latent, rows * own * (c->kv_lora + c->qk_rope)),
        NEED(s->index_weight, rows * c->index_heads),
        NEED(s->index_score, candidates ? (size_t)SELECT_ROWS * (f->context / f->workers + 1) : 0),
        NEED(s->selected, rows * candidates),
        NEED(s->selected_count, rows),
        NEED(s->router, rows * c->experts),
        NEED(s->chosen, rows * c->top_k),
        NEED(s->chosen_weight, rows * c->top_k),
        NEED(s->expert_first, c->experts + 1),
        NEED(s->pairs, rows * c->top_k),
        NEED(s->shared_y, rows * c->hidden),
        NEED(s->pair_y, rows * c->top_k * model->hidden_blocks.count * BLOCK_ROWS),
        NEED(s->wave, c->experts),
        NEED(s->demand.expert, c->experts),
        NEED(s->demand.status, c->experts),
        NEED(s->demand.stale_failure, c->experts),
        NEED(s->demand.ref, c->experts),
        NEED(s->logit_row, f->logit_rows),
        NEED(s->draft_row, f->logit_rows),
        NEED(s->inverse_frequency, c->qk_rope / 2),
        NEED(s->threads, f->threads),
    };
    int status = allocate_all(s, needs, COUNT(needs));
    if (status == 0)
        status = allocate_activations(model);
    if (status == 0)
        status = allocate_batch(model, &s->batch);
    if (status == 0 && c->mtp_layers)
        status = allocate_batch(model, &s->draft);
    for (uint32_t t = 0; status == 0 && t < f->threads; t++) {
        s->threads[t] = (struct thread){.model = model, .index = t};
        status = allocate_thread(model, &s->threads[t]);
    }
    if (status < 0)
        return error_set(ret_error, ENOMEM,
                         "worker %u: no memory for steps of %u rows: choose a smaller prefill_chunk or --context",
                         model->self, f->max_rows);
    for (uint32_t j = 0; j < c->qk_rope / 2; j++)
        s->inverse_frequency[j] = math_pow(c->rope_theta, -2.0 * j / c->qk_rope);
    return 0;
}

/* What the config's own check cannot know: that this code can run it. */
static int check_model(const struct facts *facts, struct error *ret_error)
{
    const struct model_config *c = &facts->config;
    if (c->indexer_kind[0] != INDEXER_FULL || (c->mtp_layers && c->indexer_kind[c->layers] != INDEXER_FULL))
        return error_set(ret_error, EINVAL, "model %s: its first layer shares an indexer that no layer before it has",
                         c->model_type);
    if (facts->page_tokens == 0 || facts->max_rows == 0)
        return error_set(ret_error, EINVAL, "facts without rows or page size");
    return 0;
}

static int attach_all(struct model *model, const char *instance, struct error *ret_error)
{
    int status = dense_attach(instance, &model->dense, ret_error);
    if (status == 0)
        status = weights_find(model, ret_error);
    if (status == 0) {
        kv_layout(&model->facts, &model->kv_layout);
        status =
            segment_attach(instance, "kv", SEGMENT_KV, model->kv_layout.segment_bytes, true, &model->kv, ret_error);
    }
    if (status == 0)
        status = exchange_attach(instance, &model->facts, model->control, model->self, &model->exchange, ret_error);
    if (status == 0)
        status = pool_attach(instance, &model->pool, ret_error);
    if (status == 0)
        status = pool_attach_objects(&model->pool, ret_error);
    if (status < 0)
        return status;
    const struct model_config *c = &model->facts.config;
    if (model->pool.slice_bytes < expert_slice_bytes(&model->expert_shape) ||
        model->pool.expert_count != model_moe_layers(c) * c->experts)
        return error_set(ret_error, EBADMSG,
                         "pool of instance %s was made for another model: run `calypte down` and start again",
                         instance);
    return 0;
}

int model_open(const char *instance, const struct facts *facts, struct control *control, uint32_t self, int doorbell,
               struct model **ret_model, struct error *ret_error)
{
    if (self >= facts->workers)
        return error_set(ret_error, EINVAL, "worker %u of an instance with %u workers", self, facts->workers);
    struct model *model = aligned_alloc(CACHE_LINE, (sizeof *model + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE);
    if (!model)
        return error_set(ret_error, ENOMEM, "worker %u: out of memory", self);
    memset(model, 0, sizeof *model);
    const struct model_config *c = &facts->config;
    model->facts = *facts;
    model->family = family_find(c->family);
    model->control = control;
    model->line = &control->workers[self];
    model->self = self;
    model->doorbell = doorbell;
    model->heads = split(c->heads, self, facts->workers);
    model->hidden_blocks = worker_range(facts, self, c->hidden / BLOCK_ROWS);
    model->expert_shape = (struct expert_shape){(enum weight_format)facts->expert_format, c->hidden, c->expert_width};
    for (uint32_t s = 0; s < EXPERT_SLICES; s++)
        expert_slice(&model->expert_shape, s, model->parts[s]);
    team_init(&model->team, facts->threads, facts->spin);
    int status = check_model(facts, ret_error);
    if (status == 0 && !model->family)
        status = error_set(ret_error, ENOTSUP, "model %s: no forward pass for this family", c->model_type);
    if (status == 0)
        status = kernel_choose(facts->isa, &model->kernels, ret_error);
    if (status == 0)
        status = attach_all(model, instance, ret_error);
    if (status == 0)
        status = allocate_state(model, ret_error);
    if (status == 0)
        status = lookahead_open(model, ret_error);
    if (status < 0) {
        model_close(model);
        return status;
    }
    model_acknowledge(model, atomic_load(&control->epoch));
    *ret_model = model;
    return 0;
}

void model_close(struct model *model)
{
    if (!model)
        return;
    for (size_t i = 0; i < model->state.memory_count; i++)
        free(model->state.memory[i]);
    free(model->state.memory);
    lookahead_close(model);
    if (model->pool.header)
        pool_detach(&model->pool);
    exchange_detach(&model->exchange);
    segment_detach(&model->kv);
    dense_detach(&model->dense);
    free(model);
}

void model_acknowledge(struct model *model, uint32_t epoch)
{
    pool_release_holder(&model->pool, model->self);
    exchange_reset(&model->exchange, epoch);
    atomic_store(&model->line->acknowledged, epoch);
}

/* Turns the STEP's sequences into rows. */
static void fill_batches(struct model *model, const struct step *step)
{
    struct state *state = &model->state;
    state->batch.rows = 0;
    state->draft.rows = 0;
    state->logit_rows = 0;
    for (uint32_t q = 0; q < step->sequences; q++) {
        const struct step_sequence *sequence = &step->sequence[q];
        for (uint32_t i = 0; i < sequence->rows; i++) {
            uint32_t row = state->batch.rows++, draft_row = UINT32_MAX, position = sequence->first + i;
            state->batch.sequence[row] = sequence;
            state->batch.position[row] = position;
            state->batch.token[row] = step->tokens[row];
            state->batch.source[row] = row;
            if (step->draft && step->next[row] >= 0) {
                draft_row = state->draft.rows++;
                state->draft.sequence[draft_row] = sequence;
                state->draft.position[draft_row] = position;
                state->draft.token[draft_row] = step->next[row];
                state->draft.source[draft_row] = row;
            }
            if (sequence->logits == LOGITS_ALL || (sequence->logits == LOGITS_LAST && i + 1 == sequence->rows)) {
                state->logit_row[state->logit_rows] = row;
                state->draft_row[state->logit_rows++] = draft_row;
            }
        }
    }
}

static int run_team(struct model *model)
{
    int status = 0, threads = (int)model->facts.threads;
#pragma omp parallel num_threads(threads)
    {
        int mine;
        if (omp_get_num_threads() != threads)
            mine = -EAGAIN;
        else
            mine = forward(&model->state.threads[omp_get_thread_num()]);
        if (omp_get_thread_num() == 0)
            status = mine;
    }
    if (status == -EAGAIN)
        error_set(&model->error, EAGAIN,
                  "worker %u: OpenMP gave fewer than %d threads: raise the limit of processes (ulimit -u)", model->self,
                  threads);
    return status;
}

static int refuse_step(const struct model *model, const struct step *step, struct error *ret_error)
{
    if (step->draft && !model->facts.config.mtp_layers)
        return error_set(ret_error, EINVAL, "a STEP asks for drafts, and model %s has no MTP layer",
                         model->facts.config.model_type);
    if (step->rows == 0 || step->rows > model->facts.max_rows)
        return error_set(ret_error, EINVAL, "a STEP of %u rows, allowed are 1 to %u", step->rows,
                         model->facts.max_rows);
    return 0;
}

int model_step(struct model *model, const struct step *step, struct step_done *ret_done, struct error *ret_error)
{
    uint64_t start = clock_ns();
    team_time(&model->team, start);
    struct demand *demand = &model->state.demand;
    *ret_done = (struct step_done){.id = step->id, .epoch = step->epoch, .status = -ESTALE};
    if (step->epoch != atomic_load(&model->control->epoch))
        return error_set(ret_error, ESTALE, "a STEP of epoch %u, which is over", step->epoch);
    if (model->exchange.epoch != step->epoch)
        model_acknowledge(model, step->epoch);
    demand->hits = demand->misses = 0;
    model->failure = (struct expert_failure){0};
    int status = refuse_step(model, step, ret_error);
    if (status == 0) {
        model->step = step;
        fill_batches(model, step);
        lookahead_begin(model);
        status = run_team(model);
    }
    if (status < 0) {
        pool_release_holder(&model->pool, model->self);
        atomic_fetch_add(&model->line->tick, 1); /* what iod still owes to this step is void */
    }
    ret_done->status = status;
    ret_done->logit_rows = status == 0 ? model->state.logit_rows : 0;
    ret_done->layer = model->failure.layer;
    ret_done->expert = model->failure.expert;
    ret_done->slice = model->failure.slice;
    ret_done->code = model->failure.code;
    ret_done->hits = (uint32_t)demand->hits;
    ret_done->misses = (uint32_t)demand->misses;
    team_part(&model->team, PART_OTHER);
    memcpy(ret_done->part_ns, model->team.part_ns, sizeof ret_done->part_ns);
    ret_done->matmul_ns = model->team.matmul_ns;
    ret_done->step_ns = model->team.part_since - start;
    struct worker_line *line = model->line;
    add_counter(&line->steps, 1);
    add_counter(&line->rows, step->rows);
    add_counter(&line->step_ns, ret_done->step_ns);
    for (unsigned p = 0; p < STEP_PARTS; p++)
        add_counter(&line->part_ns[p], ret_done->part_ns[p]);
    add_counter(&line->matmul_ns, ret_done->matmul_ns);
    add_counter(&line->hits, demand->hits);
    add_counter(&line->misses, demand->misses);
    if (status == -EIO)
        error_set(ret_error, EIO, "expert %u of layer %u: slice %u cannot be read: %s", ret_done->expert,
                  ret_done->layer, ret_done->slice,
                  ret_done->code == EBADMSG ? "its checksum is wrong" : strerror((int)ret_done->code));
    else if (status < 0 && status != -ESTALE && status != -EINVAL && ret_error)
        *ret_error = model->error;
    return status;
}
