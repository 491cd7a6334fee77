/* The forward pass of a STEP: embedding, layers, final norm, logits. Read model.h first. */
#include "compute/family.h"
#include "compute/math.h"
#include "compute/model.h"

#include <string.h>

struct range worker_range(const struct facts *facts, uint32_t self, uint32_t count)
{
    /* Where every memory node has workers, a node's workers share the rows whose slices lie there; else all share all. */
    uint32_t mine = 0, before = 0, seen = 0;
    for (uint32_t w = 0; w < facts->workers; w++) {
        seen |= 1u << (facts->worker_node[w] & 31u);
        if (facts->worker_node[w] == facts->worker_node[self]) {
            before += w < self;
            mine++;
        }
    }
    if (facts->nodes == 1 || seen != (1u << facts->nodes) - 1)
        return split(count, self, facts->workers);
    struct range node = split(count, facts->worker_node[self], facts->nodes);
    struct range part = split(node.count, before, mine);
    return (struct range){node.first + part.first, part.count};
}

struct range own_range(const struct thread *thread, uint32_t count)
{
    struct range worker = worker_range(&thread->model->facts, thread->model->self, count);
    struct range part = split(worker.count, thread->index, thread->model->team.threads);
    return (struct range){worker.first + part.first, part.count};
}

void embed_row(const struct thread *thread, int32_t token, float *ret_x)
{
    const struct matrix *embed = &thread->model->weights.embed;
    uint32_t block = (uint32_t)token / BLOCK_ROWS;
    thread->model->kernels->dequantise_row(embed->quanta + quanta_bytes(embed->format, block, embed->k),
                                           embed->scales + scales_bytes(block, embed->k) / 2, embed->format,
                                           (uint32_t)token % BLOCK_ROWS, embed->k, embed->factor, ret_x);
}

void rope_row(const struct model *model, struct batch *batch, uint32_t row)
{
    uint32_t half = model->facts.config.qk_rope / 2;
    for (uint32_t j = 0; j < half; j++) {
        double s, c;
        math_sincos((double)batch->position[row] * model->state.inverse_frequency[j], &s, &c);
        batch->cos[(size_t)row * half + j] = (float)c;
        batch->sin[(size_t)row * half + j] = (float)s;
    }
}

void activation_set(const struct model *model, struct activation *activation, uint32_t row, const float *x)
{
    size_t at = (size_t)row * activation->width;
    if (model->facts.activations == ACTIVATIONS_F32) {
        memcpy(activation->x + at, x, activation->width * sizeof(float));
        return;
    }
    model->kernels->quantise(x, activation->width, activation->q + at, activation->scales + at / GROUP,
                             activation->sums + at / GROUP);
}

struct activation activation_at(const struct model *model, void *memory, size_t rows, uint32_t width)
{
    struct activation activation = {.width = width};
    if (model->facts.activations == ACTIVATIONS_F32) {
        activation.x = memory;
        return activation;
    }
    activation.q = memory;
    activation.scales = (float *)(void *)(activation.q + rows * width);
    activation.sums = (int32_t *)(void *)(activation.scales + rows * width / GROUP);
    return activation;
}

void activation_norm(const struct model *model, struct activation *activation, uint32_t row, const float *x,
                     const float *weight, float eps, float *ret_y)
{
    size_t at = (size_t)row * activation->width;
    if (model->facts.activations != ACTIVATIONS_F32) {
        model->kernels->rmsnorm_quantise(x, weight, activation->width, eps, ret_y, activation->q + at,
                                         activation->scales + at / GROUP, activation->sums + at / GROUP);
        return;
    }
    model->kernels->rmsnorm(x, weight, activation->width, eps, activation->x + at);
    if (ret_y)
        memcpy(ret_y, activation->x + at, activation->width * sizeof(float));
}

void matrix_multiply(struct thread *thread, const struct matrix *matrix, const struct activation *activation,
                     uint32_t first, uint32_t rows, struct range blocks, float *y, size_t stride)
{
    if (blocks.count == 0)
        return;
    const struct kernel_set *kernels = thread->model->kernels;
    bool f32 = thread->model->facts.activations == ACTIVATIONS_F32;
    for (uint32_t r = 0; r < rows; r++)
        thread->rows[r] = activation_row(activation, first + r, y + r * stride + (size_t)blocks.first * BLOCK_ROWS);
    matmul_function *multiply = matrix->format == WEIGHT_INT4 ? (f32 ? kernels->matmul_int4_f32 : kernels->matmul_int4)
                                                              : (f32 ? kernels->matmul_int8_f32 : kernels->matmul_int8);
    uint64_t begun = matmul_begin(thread);
    multiply(matrix->quanta + quanta_bytes(matrix->format, blocks.first, matrix->k),
             matrix->scales + scales_bytes(blocks.first, matrix->k) / 2, blocks.count, matrix->k, matrix->factor,
             thread->rows, rows);
    matmul_end(thread, begun);
}

/* Block rows of units of two: the last may be one. */
struct range unit_blocks(struct range blocks, struct range units)
{
    uint32_t first = 2 * units.first, end = 2 * (units.first + units.count);
    end = end < blocks.count ? end : blocks.count;
    return (struct range){blocks.first + first, end - first};
}

void matrix_multiply_team(struct thread *thread, const struct matrix *matrix, const struct activation *activation,
                          uint32_t rows, struct range blocks, const float *residual, float *y, size_t stride)
{
    struct team_job job = team_begin(thread, block_units(blocks), TAIL_SOME);
    struct range units;
    while (team_take(&job, &units)) {
        struct range run = unit_blocks(blocks, units);
        size_t first = (size_t)run.first * BLOCK_ROWS;
        matrix_multiply(thread, matrix, activation, 0, rows, run, y, stride);
        for (uint32_t r = 0; residual && r < rows; r++)
            thread->model->kernels->add(residual + r * stride + first, run.count * BLOCK_ROWS, y + r * stride + first);
    }
}

int residual_exchange(struct thread *thread, struct batch *batch, const float *buffer)
{
    uint32_t hidden = thread->model->facts.config.hidden;
    int status = team_exchange(thread, 0);
    if (status < 0)
        return status;
    struct range rows = thread_range(thread, batch->rows);
    memcpy(batch->h + (size_t)rows.first * hidden, buffer + (size_t)rows.first * hidden,
           (size_t)rows.count * hidden * sizeof(float));
    return 0;
}

void activation_swiglu(const struct model *model, struct activation *activation, size_t row, struct range groups,
                       const float *gate, const float *up)
{
    size_t at = row * activation->width + (size_t)groups.first * GROUP;
    if (model->facts.activations == ACTIVATIONS_F32)
        model->kernels->swiglu(gate, up, groups.count * GROUP, activation->x + at);
    else
        model->kernels->swiglu_quantise(gate, up, groups.count * GROUP, activation->q + at,
                                        activation->scales + at / GROUP, activation->sums + at / GROUP);
}

void forward_gate_up(struct thread *thread, const struct layer_weights *w, uint32_t rows, struct activation *ret_units)
{
    const struct model *model = thread->model;
    struct range own = worker_range(&model->facts, model->self, w->gate.n / GROUP), run;
    uint32_t most = gate_room(&model->facts) / rows;
    struct team_job job = team_begin(thread, own.count, TAIL_SOME);
    while (team_take(&job, &run))
        for (uint32_t done = 0; done < run.count;) {
            struct range groups = {own.first + run.first + done, run.count - done < most ? run.count - done : most};
            struct range blocks = {0, groups.count * GROUP_BLOCKS};
            struct matrix gate = matrix_from(&w->gate, groups.first * GROUP_BLOCKS),
                          up = matrix_from(&w->up, groups.first * GROUP_BLOCKS);
            size_t columns = (size_t)groups.count * GROUP;
            matrix_multiply(thread, &gate, &model->state.hidden, 0, rows, blocks, thread->gate, columns);
            matrix_multiply(thread, &up, &model->state.hidden, 0, rows, blocks, thread->up, columns);
            for (uint32_t r = 0; r < rows; r++)
                activation_swiglu(model, ret_units, r, groups, thread->gate + r * columns, thread->up + r * columns);
            done += groups.count;
        }
}

/* h += W_down (silu(W_gate x) * W_up x), x = norm(h). */
int forward_mlp_dense(struct thread *thread, struct batch *batch, uint32_t layer)
{
    struct model *model = thread->model;
    const struct layer_weights *w = &model->weights.layers[layer];
    const struct model_config *c = &model->facts.config;
    struct state *state = &model->state;
    struct range rows = thread_range(thread, batch->rows);
    part_begin(thread, PART_DENSE);
    for (uint32_t r = rows.first; r < rows.first + rows.count; r++)
        activation_norm(model, &state->hidden, r, batch->h + (size_t)r * c->hidden, w->post_norm, c->rms_eps, NULL);
    team_sync(thread, 0);
    struct activation inner = activation_at(model, exchange_buffer(&model->exchange), batch->rows, w->gate.n);
    forward_gate_up(thread, w, batch->rows, &inner);
    int status = team_exchange(thread, 0);
    if (status < 0)
        return status;
    float *buffer = exchange_buffer(&model->exchange);
    matrix_multiply_team(thread, &w->down, &inner, batch->rows, model->hidden_blocks, batch->h, buffer, c->hidden);
    return residual_exchange(thread, batch, buffer);
}

int forward_logits(struct thread *thread, const float *h, const uint32_t *row, const float *norm, int draft)
{
    struct model *model = thread->model;
    const struct model_config *c = &model->facts.config;
    struct state *state = &model->state;
    struct range rows = thread_range(thread, state->logit_rows);
    part_begin(thread, PART_HEAD);
    for (uint32_t i = rows.first; i < rows.first + rows.count; i++) {
        if (row[i] != UINT32_MAX) {
            activation_norm(model, &state->hidden, i, h + (size_t)row[i] * c->hidden, norm, c->rms_eps, NULL);
            continue;
        }
        float *x = state->x + (size_t)i * c->hidden;
        memset(x, 0, c->hidden * sizeof(float)); /* the product of zeros is zero */
        activation_set(model, &state->hidden, i, x);
    }
    team_sync(thread, 0);
    float *logits = exchange_logits(&model->exchange.segment, &model->exchange.layout, draft);
    matrix_multiply_team(thread, &model->weights.lm_head, &state->hidden, state->logit_rows,
                         worker_range(&model->facts, model->self, c->vocab / BLOCK_ROWS), NULL, logits, c->vocab);
    return team_exchange(thread, 0);
}

/* One layer on a batch. */
int forward_layer(struct thread *thread, struct batch *batch, uint32_t layer)
{
    struct model *model = thread->model;
    part_begin(thread, PART_ATTENTION);
    int status = model->family->attention(thread, batch, layer);
    if (status < 0)
        return status;
    return model->facts.config.layer_kind[layer] == LAYER_MOE ? forward_mlp_moe(thread, batch, layer)
                                                              : forward_mlp_dense(thread, batch, layer);
}

int forward(struct thread *thread)
{
    struct model *model = thread->model;
    const struct model_config *c = &model->facts.config;
    struct state *state = &model->state;
    struct batch *batch = &state->batch;
    struct range rows = thread_range(thread, batch->rows);
    for (uint32_t r = rows.first; r < rows.first + rows.count; r++) {
        rope_row(model, batch, r);
        embed_row(thread, batch->token[r], batch->h + (size_t)r * c->hidden);
    }
    int status = 0;
    for (uint32_t layer = 0; status == 0 && layer < c->layers; layer++)
        status = forward_layer(thread, batch, layer);
    if (status < 0)
        return status;
    if (state->logit_rows > 0) {
        team_sync(thread, 0); /* h is whole for all threads */
        status = forward_logits(thread, batch->h, state->logit_row, model->weights.norm, 0);
    }
    if (status == 0 && model->step->draft)
        status = forward_mtp(thread);
    return status;
}
