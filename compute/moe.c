/* Mixture-of-experts layers: router, waves, experts.
 *
 * Worker 0 alone speaks with iod. It pins the wanted experts that are READY and asks for the others, in ascending id, and computes in
 * waves: a wave is every wanted expert that it could pin now. It publishes the wave in an exchange; all workers do gate and up of their
 * columns for all (row, expert) pairs of the wave, exchange the SwiGLU values, do down; a barrier; worker 0 unpins. Every pair's result
 * is kept alone and the sum is made at the end in ascending expert id, so the waves leave no trace in the numbers. */
#include "compute/demand.h"
#include "compute/family.h"
#include "compute/lookahead.h"

#include <math.h>
#include <string.h>

void route_noaux_tc(const struct model *model, const struct layer_weights *weights, float *logits, uint32_t *ret_chosen,
                    float *ret_weight)
{
    const struct model_config *c = &model->facts.config;
    float biased[MODEL_MAX_EXPERTS];
    model->kernels->sigmoid(logits, c->experts, logits);
    for (uint32_t e = 0; e < c->experts; e++)
        biased[e] = logits[e] + weights->router_bias[e];
    if (c->n_group > 1) {
        /* A group counts as its two best; of the groups the best topk_group stay, ties to the lower group. */
        float group_score[MODEL_MAX_EXPERTS];
        uint32_t a_group = c->experts / c->n_group, kept[MODEL_MAX_EXPERTS], next = 0;
        for (uint32_t g = 0; g < c->n_group; g++) {
            float best = -INFINITY, second = -INFINITY;
            for (uint32_t e = g * a_group; e < (g + 1) * a_group; e++) {
                second = biased[e] > best ? best : biased[e] > second ? biased[e] : second;
                best = biased[e] > best ? biased[e] : best;
            }
            group_score[g] = best + second;
        }
        uint32_t count = model->kernels->select(group_score, c->n_group, c->topk_group, kept);
        for (uint32_t g = 0; g < c->n_group; g++) {
            if (next < count && kept[next] == g) {
                next++;
                continue;
            }
            for (uint32_t e = g * a_group; e < (g + 1) * a_group; e++)
                biased[e] = -INFINITY;
        }
    }
    model->kernels->select(biased, c->experts, c->top_k, ret_chosen);
    float sum = 0.0f;
    for (uint32_t j = 0; j < c->top_k; j++)
        sum = sum + logits[ret_chosen[j]];
    for (uint32_t j = 0; j < c->top_k; j++) {
        float weight = logits[ret_chosen[j]];
        if (c->norm_topk_prob)
            weight = weight / (sum + 1e-20f);
        ret_weight[j] = weight * c->routed_scaling;
    }
}

/* x = norm(h); router logits of all rows, a thread some experts; the choice of each row; and who uses which expert. */
static void route(struct thread *thread, struct batch *batch, uint32_t layer)
{
    struct model *model = thread->model;
    const struct model_config *c = &model->facts.config;
    const struct layer_weights *w = &model->weights.layers[layer];
    struct state *state = &model->state;
    struct range rows = thread_range(thread, batch->rows);
    for (uint32_t r = rows.first; r < rows.first + rows.count; r++)
        activation_norm(model, &state->hidden, r, batch->h + (size_t)r * c->hidden, w->post_norm, c->rms_eps,
                        state->x + (size_t)r * c->hidden);
    team_sync(thread, 0);
    struct range own = thread_range(thread, c->experts);
    const char *first = (const char *)w->router.data + (size_t)own.first * c->hidden * dtype_bytes(w->router.dtype);
    for (uint32_t r = 0; r < batch->rows; r++)
        thread->rows[r] = (struct matmul_row){.x = state->x + (size_t)r * c->hidden,
                                              .y = state->router + (size_t)r * c->experts + own.first};
    model->kernels->linear(first, w->router.dtype, own.count, c->hidden, thread->rows, batch->rows);
    team_sync(thread, 0);
    for (uint32_t r = rows.first; r < rows.first + rows.count; r++)
        model->family->route(model, w, state->router + (size_t)r * c->experts, state->chosen + (size_t)r * c->top_k,
                             state->chosen_weight + (size_t)r * c->top_k);
    team_sync(thread, 0);
    if (thread->index != 0)
        return;
    uint32_t pairs = batch->rows * c->top_k, wanted = 0;
    memset(state->expert_first, 0, (c->experts + 1) * sizeof(uint32_t));
    for (uint32_t p = 0; p < pairs; p++)
        state->expert_first[state->chosen[p] + 1]++;
    for (uint32_t e = 0; e < c->experts; e++) {
        if (state->expert_first[e + 1] > 0)
            state->demand.expert[wanted++] = e;
        state->expert_first[e + 1] += state->expert_first[e];
    }
    state->demand.wanted = wanted;
    state->demand.done = 0;
    /* Fill by counting up from each start; afterwards the starts stand one expert too far, so they are moved back. */
    for (uint32_t p = 0; p < pairs; p++)
        state->pairs[state->expert_first[state->chosen[p]]++] = p;
    for (uint32_t e = c->experts; e > 0; e--)
        state->expert_first[e] = state->expert_first[e - 1];
    state->expert_first[0] = 0;
}

/* y[row] = block rows `own` of one matrix of an expert times the given activation rows; an expert's rows lie in 8 slices. */
static void expert_multiply(struct thread *thread, const struct wave_expert *expert, enum expert_matrix which,
                            const struct layer_weights *w, struct range own, uint32_t rows)
{
    struct model *model = thread->model;
    uint32_t k = expert_columns(&model->expert_shape, which);
    enum weight_format format = model->expert_shape.format;
    bool f32 = model->facts.activations == ACTIVATIONS_F32;
    const struct kernel_set *kernels = model->kernels;
    matmul_function *multiply = format == WEIGHT_INT4 ? (f32 ? kernels->matmul_int4_f32 : kernels->matmul_int4)
                                                      : (f32 ? kernels->matmul_int8_f32 : kernels->matmul_int8);
    float factor = ldexpf(1.0f, w->exponents[expert->expert * EXPERT_MATRICES + which]);
    uint64_t begun = matmul_begin(thread);
    for (uint32_t s = 0; s < EXPERT_SLICES && own.count > 0; s++) {
        const struct slice_part *part = &model->parts[s][which];
        uint32_t end = part->blocks.first + part->blocks.count;
        if (own.first >= end)
            continue;
        uint32_t skip = own.first - part->blocks.first,
                 count = end - own.first < own.count ? end - own.first : own.count;
        multiply(expert->slice[s] + part->quanta + quanta_bytes(format, skip, k),
                 (const uint16_t *)(const void *)(expert->slice[s] + part->scales + scales_bytes(skip, k)), count, k,
                 factor, thread->rows, rows);
        for (uint32_t r = 0; r < rows; r++)
            thread->rows[r].y += (size_t)count * BLOCK_ROWS;
        own.first += count;
        own.count -= count;
    }
    matmul_end(thread, begun);
}

/* Points thread->rows at the activations of an expert's pairs; y of pair number i of the expert is y + i * stride. */
static uint32_t pair_rows(struct thread *thread, const struct activation *activation, uint32_t expert, bool by_row,
                          float *y, size_t stride)
{
    const struct state *state = &thread->model->state;
    uint32_t first = state->expert_first[expert], count = state->expert_first[expert + 1] - first;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t pair = state->pairs[first + i];
        thread->rows[i] =
            activation_row(activation, by_row ? pair / thread->model->facts.config.top_k : pair, y + i * stride);
    }
    return count;
}

static uint32_t lesser(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

/* Gate and up of these groups of an expert for all its pairs, and their SwiGLU. */
static void gate_up_groups(struct thread *thread, const struct wave_expert *expert, const struct layer_weights *w,
                           struct range groups, struct activation *ret_pairs)
{
    const struct model *model = thread->model;
    const struct state *state = &model->state;
    uint32_t first = state->expert_first[expert->expert], count = state->expert_first[expert->expert + 1] - first;
    while (groups.count > 0) {
        uint32_t most = count > 0 ? gate_room(&model->facts) / count : groups.count;
        struct range now = {groups.first, lesser(groups.count, most)};
        struct range blocks = {now.first * GROUP_BLOCKS, now.count * GROUP_BLOCKS};
        size_t columns = (size_t)now.count * GROUP;
        pair_rows(thread, &state->hidden, expert->expert, true, thread->gate, columns);
        expert_multiply(thread, expert, EXPERT_GATE, w, blocks, count);
        pair_rows(thread, &state->hidden, expert->expert, true, thread->up, columns);
        expert_multiply(thread, expert, EXPERT_UP, w, blocks, count);
        for (uint32_t n = 0; n < count; n++)
            activation_swiglu(model, ret_pairs, state->pairs[first + n], now, thread->gate + n * columns,
                              thread->up + n * columns);
        groups.first += now.count;
        groups.count -= now.count;
    }
}

/* SwiGLU of the units (expert of the wave, own group of its width), laid end to end, as activations [pairs][expert_width]. */
static void wave_gate_up(struct thread *thread, uint32_t layer, struct activation *ret_pairs)
{
    struct model *model = thread->model;
    struct state *state = &model->state;
    const struct layer_weights *w = &model->weights.layers[layer];
    struct range own = worker_range(&model->facts, model->self, model->facts.config.expert_width / GROUP), run;
    struct team_job job = team_begin(thread, state->wave_count * own.count, TAIL_SOME);
    while (team_take(&job, &run))
        while (run.count > 0) {
            const struct wave_expert *expert = &state->wave[run.first / own.count];
            uint32_t first = run.first % own.count, count = lesser(own.count - first, run.count);
            gate_up_groups(thread, expert, w, (struct range){own.first + first, count}, ret_pairs);
            run.first += count;
            run.count -= count;
        }
}

/* Down: the units (expert of the wave, two own block rows), laid end to end; results kept alone in pair_y [pairs][own columns]. */
static void wave_down(struct thread *thread, uint32_t layer, const struct activation *pairs)
{
    struct model *model = thread->model;
    struct state *state = &model->state;
    const struct layer_weights *w = &model->weights.layers[layer];
    uint32_t an_expert = block_units(model->hidden_blocks);
    struct team_job job = team_begin(thread, state->wave_count * an_expert, TAIL_SOME);
    struct range run;
    while (team_take(&job, &run))
        while (run.count > 0) {
            const struct wave_expert *expert = &state->wave[run.first / an_expert];
            uint32_t first = run.first % an_expert, count = lesser(an_expert - first, run.count);
            struct range blocks = unit_blocks(model->hidden_blocks, (struct range){first, count});
            uint32_t rows = pair_rows(thread, pairs, expert->expert, false, NULL, 0);
            for (uint32_t n = 0; n < rows; n++)
                thread->rows[n].y =
                    pair_result(model, state->pairs[state->expert_first[expert->expert] + n], blocks.first);
            expert_multiply(thread, expert, EXPERT_DOWN, w, blocks, rows);
            run.first += count;
            run.count -= count;
        }
}

/* y = fma(w_e, y_e, y) in ascending expert id from 0, then the shared expert, then h; own columns, into the buffer. */
static void combine(struct thread *thread, const struct batch *batch, bool shared, float *buffer)
{
    struct model *model = thread->model;
    struct state *state = &model->state;
    const struct model_config *c = &model->facts.config;
    struct range own = own_range(thread, c->hidden / BLOCK_ROWS);
    uint32_t first = own.first * BLOCK_ROWS, count = own.count * BLOCK_ROWS;
    for (uint32_t r = 0; count > 0 && r < batch->rows; r++) {
        float *y = buffer + (size_t)r * c->hidden + first;
        memset(y, 0, count * sizeof(float));
        for (uint32_t j = 0; j < c->top_k; j++) {
            uint32_t pair = r * c->top_k + j;
            model->kernels->accumulate(state->chosen_weight[pair], pair_result(model, pair, own.first), count, y);
        }
        if (shared)
            model->kernels->add(state->shared_y + (size_t)r * c->hidden + first, count, y);
        model->kernels->add(batch->h + (size_t)r * c->hidden + first, count, y);
    }
}

/* One wave from its list, which stands in `buffer`, to its results. The first carries `shared`, the shared expert's activations of the
 * same exchange: they must be read before the next but one ends, so down comes before the wave's own products. */
static int run_wave(struct thread *thread, struct batch *batch, uint32_t layer, const unsigned char *buffer,
                    const struct activation *shared)
{
    struct model *model = thread->model;
    struct state *state = &model->state;
    const struct layer_weights *w = &model->weights.layers[layer];
    int status = 0;
    if (thread->index == 0)
        status = demand_accept_wave(model, layer, (const struct wave_list *)(const void *)buffer);
    status = team_sync(thread, status);
    if (status < 0)
        return status;
    if (shared) {
        part_begin(thread, PART_SHARED);
        matrix_multiply_team(thread, &w->down, shared, batch->rows, model->hidden_blocks, NULL, state->shared_y,
                             model->facts.config.hidden);
        part_begin(thread, PART_EXPERTS);
    }
    uint32_t pairs = batch->rows * model->facts.config.top_k;
    struct activation inner =
        activation_at(model, exchange_buffer(&model->exchange), pairs, model->facts.config.expert_width);
    wave_gate_up(thread, layer, &inner);
    status = team_exchange(thread, 0);
    if (status < 0)
        return status;
    wave_down(thread, layer, &inner);
    return 0;
}

int forward_mlp_moe(struct thread *thread, struct batch *batch, uint32_t layer)
{
    struct model *model = thread->model;
    const struct layer_weights *w = &model->weights.layers[layer];
    struct state *state = &model->state;
    bool has_shared = w->gate.n > 0, leader = model->self == 0 && thread->index == 0;
    part_begin(thread, PART_ROUTER);
    route(thread, batch, layer);
    part_begin(thread, PART_EXPERTS);
    if (leader)
        demand_begin(model, batch, layer);
    lookahead_ask(thread, batch, layer);
    unsigned char *buffer = exchange_buffer(&model->exchange);
    struct activation shared = activation_at(model, buffer + EXCHANGE_WAVE_BYTES, batch->rows, w->gate.n);
    if (has_shared) {
        part_begin(thread, PART_SHARED);
        forward_gate_up(thread, w, batch->rows, &shared);
        part_begin(thread, PART_EXPERTS);
    }
    for (bool first = true;; first = false) {
        int status = leader ? demand_publish_wave(model, layer, (struct wave_list *)(void *)buffer) : 0;
        status = team_exchange(thread, status);
        if (status == 0)
            status = run_wave(thread, batch, layer, buffer, first && has_shared ? &shared : NULL);
        if (status < 0)
            return status;
        /* `wanted` and `done` change only in thread 0, here; the others look after the sync. */
        if (thread->index == 0)
            state->demand.done += state->wave_count;
        team_sync(thread, 0);
        if (state->demand.done >= state->demand.wanted)
            break;
        status = team_exchange(thread, 0); /* all workers are done with the wave */
        if (status < 0)
            return status;
        if (leader)
            demand_retire_wave(model);
        buffer = exchange_buffer(&model->exchange);
    }
    float *sum = exchange_buffer(&model->exchange);
    combine(thread, batch, has_shared, sum);
    int status = residual_exchange(thread, batch, sum);
    if (status == 0 && leader)
        demand_retire_wave(model);
    return status;
}
