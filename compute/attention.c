/* Multi-head latent attention (MLA) in its absorbed form, over the paged cache of latents. Formulas: DeepSeek-V2 (arXiv
 * 2405.04434), section 2.1; the orders of the sums: README.md. */
#include "compute/model.h"

#include <math.h>
#include <string.h>

/* Where the parts of the first exchange stand in its row. */
struct projection {
    uint32_t kv_a, index_key, index_weight, width; /* q_a stands at 0 */
};

static struct projection projection_of(const struct model_config *c)
{
    struct projection p = {.kv_a = c->q_lora};
    p.index_key = p.kv_a + c->kv_lora + c->qk_rope;
    p.index_weight = p.index_key + c->index_dim;
    p.width = p.index_weight + c->index_heads;
    return p;
}

static const unsigned char *latent_address(const struct model *model, const struct step_sequence *sequence,
                                           uint32_t position, uint32_t layer)
{
    const struct kv_layout *layout = &model->kv_layout;
    return kv_page(&model->kv, layout, sequence->page_ids[position / layout->page_tokens]) + layout->latents[layer] +
           position % layout->page_tokens * layout->latent_bytes;
}

/* x = norm(h), then q_a, kv_a and, in full layers, index key and weights: own rows into the exchange. */
static int project(struct thread *thread, struct batch *batch, uint32_t layer, float **ret_buffer)
{
    struct model *model = thread->model;
    const struct model_config *c = &model->facts.config;
    const struct layer_weights *w = &model->weights.layers[layer];
    struct state *state = &model->state;
    struct projection p = projection_of(c);
    struct range rows = thread_range(thread, batch->rows);
    bool full = c->indexer_kind[layer] == INDEXER_FULL; /* its weights are f32 and want x */
    for (uint32_t r = rows.first; r < rows.first + rows.count; r++)
        activation_norm(model, &state->hidden, r, batch->h + (size_t)r * c->hidden, w->input_norm, c->rms_eps,
                        full ? state->x + (size_t)r * c->hidden : NULL);
    team_sync(thread, 0);
    float *buffer = exchange_buffer(&model->exchange);
    matrix_multiply(thread, &w->q_a, &state->hidden, 0, batch->rows, own_range(thread, w->q_a.n / BLOCK_ROWS), buffer,
                    p.width);
    matrix_multiply(thread, &w->kv_a, &state->hidden, 0, batch->rows, own_range(thread, w->kv_a.n / BLOCK_ROWS),
                    buffer + p.kv_a, p.width);
    if (full) {
        part_begin(thread, PART_INDEXER);
        const struct linear *weights = &w->indexer.weights_proj;
        matrix_multiply(thread, &w->indexer.wk, &state->hidden, 0, batch->rows,
                        own_range(thread, w->indexer.wk.n / BLOCK_ROWS), buffer + p.index_key, p.width);
        struct range own = own_range(thread, weights->n);
        for (uint32_t r = 0; r < batch->rows; r++)
            thread->rows[r] = (struct matmul_row){.x = state->x + (size_t)r * c->hidden,
                                                  .y = buffer + (size_t)r * p.width + p.index_weight + own.first};
        model->kernels->linear((const char *)weights->data +
                                   (size_t)own.first * weights->k * dtype_bytes(weights->dtype),
                               weights->dtype, own.count, weights->k, thread->rows, batch->rows);
        part_begin(thread, PART_ATTENTION);
    }
    *ret_buffer = buffer;
    return team_exchange(thread, 0);
}

/* Writes [norm(c); rope(k_r)] of one row into the cache. */
static void store_latent(struct thread *thread, const struct batch *batch, uint32_t layer, uint32_t row,
                         const float *kv_a)
{
    struct model *model = thread->model;
    const struct model_config *c = &model->facts.config;
    float *latent = thread->row;
    model->kernels->rmsnorm(kv_a, model->weights.layers[layer].kv_a_norm, c->kv_lora, c->qk_norm_eps, latent);
    memcpy(latent + c->kv_lora, kv_a + c->kv_lora, c->qk_rope * sizeof(float));
    size_t at = (size_t)row * (c->qk_rope / 2);
    model->kernels->rope(latent + c->kv_lora, batch->cos + at, batch->sin + at, c->qk_rope, c->rope_interleave);
    const unsigned char *address = latent_address(model, batch->sequence[row], batch->position[row], layer);
    unsigned char *to = (unsigned char *)model->kv.base + (address - (const unsigned char *)model->kv.base);
    if (model->facts.kv == KV_F32)
        memcpy(to, latent, model->kv_layout.latent_bytes);
    else
        model->kernels->store_f16(latent, model->kv_layout.latent_width, (uint16_t *)(void *)to);
}

/* After the first exchange: r = norm(q_a) everywhere; of each row one worker writes the cache. */
static void finish_projection(struct thread *thread, struct batch *batch, uint32_t layer, const float *buffer)
{
    struct model *model = thread->model;
    const struct model_config *c = &model->facts.config;
    struct state *state = &model->state;
    struct projection p = projection_of(c);
    bool full = c->indexer_kind[layer] == INDEXER_FULL;
    float head_scale = 1.0f / sqrtf((float)c->index_heads);
    struct range rows = thread_range(thread, batch->rows);
    for (uint32_t r = rows.first; r < rows.first + rows.count; r++) {
        const float *row = buffer + (size_t)r * p.width;
        activation_norm(model, &state->q_lora, r, row, model->weights.layers[layer].q_a_norm, c->qk_norm_eps, NULL);
        if (full) /* chooses anew: all positions, unless index_select says otherwise */
            state->selected_count[r] = SELECT_ALL;
        for (uint32_t h = 0; full && h < c->index_heads; h++)
            state->index_weight[(size_t)r * c->index_heads + h] = row[p.index_weight + h] * head_scale;
        if (r % model->facts.workers != model->self)
            continue;
        store_latent(thread, batch, layer, r, row + p.kv_a);
        if (full)
            index_store_key(thread, batch, layer, r, row + p.index_key);
    }
}

/* Queries of own heads: q~ = [W_UK^T q_nope; rope(q_rope)], [kv_lora + qk_rope] a head. state->q holds W_qb r. */
static void absorb_queries(struct thread *thread, struct batch *batch, uint32_t layer)
{
    struct model *model = thread->model;
    const struct model_config *c = &model->facts.config;
    struct state *state = &model->state;
    uint32_t heads = model->heads.count, qk = c->qk_nope + c->qk_rope, width = model->kv_layout.latent_width;
    struct range tasks = thread_range(thread, batch->rows * heads);
    for (uint32_t task = tasks.first; task < tasks.first + tasks.count; task++) {
        size_t at = (size_t)(task / heads) * (c->qk_rope / 2);
        const float *q = state->q + (size_t)task * qk;
        float *rotated = state->q_latent + (size_t)task * width + c->kv_lora;
        memcpy(rotated, q + c->qk_nope, c->qk_rope * sizeof(float));
        model->kernels->rope(rotated, batch->cos + at, batch->sin + at, c->qk_rope, c->rope_interleave);
        activation_set(model, &state->nope, (task % heads) * batch->rows + task / heads, q);
    }
    team_sync(thread, 0);
    /* One matrix a head; a thread takes a run of block rows of the heads laid end to end. Activations lie head by
     * head. */
    const struct matrix *w_uk = &model->weights.layers[layer].w_uk;
    uint32_t a_head = c->kv_lora / BLOCK_ROWS;
    struct range own = thread_range(thread, heads * a_head);
    for (uint32_t h = 0; h < heads; h++) {
        uint32_t first = own.first > h * a_head ? own.first : h * a_head;
        uint32_t end = own.first + own.count < (h + 1) * a_head ? own.first + own.count : (h + 1) * a_head;
        if (first >= end)
            continue;
        struct matrix head = matrix_from(w_uk, (model->heads.first + h) * a_head);
        matrix_multiply(thread, &head, &state->nope, h * batch->rows, batch->rows,
                        (struct range){first - h * a_head, end - first}, state->q_latent + (size_t)h * width,
                        (size_t)heads * width);
    }
    team_sync(thread, 0);
}

/* The keys of one block as f32 [count][kv_lora + qk_rope]: selected positions first .. first + count - 1 of a row. */
static void load_keys(struct thread *thread, const struct batch *batch, uint32_t layer, uint32_t row, uint32_t first,
                      uint32_t count)
{
    struct model *model = thread->model;
    const struct state *state = &model->state;
    uint32_t width = model->kv_layout.latent_width;
    const uint32_t *selected =
        state->selected_count[row] == SELECT_ALL ? NULL : state->selected + (size_t)row * model->facts.index_topk;
    for (uint32_t t = 0; t < count; t++) {
        uint32_t position = selected ? selected[first + t] : first + t;
        const unsigned char *from = latent_address(model, batch->sequence[row], position, layer);
        if (model->facts.kv == KV_F32)
            memcpy(thread->keys + (size_t)t * width, from, width * sizeof(float));
        else
            model->kernels->load_f16((const uint16_t *)(const void *)from, width, thread->keys + (size_t)t * width);
    }
}

/* Attention of one row and `heads` heads from `head` (of the own ones) on: exact maximum over all selected keys, then
 * blocks of 64 in ascending position. The latent sums z, normalised, become activations for W_UV. */
static void attend(struct thread *thread, struct batch *batch, uint32_t layer, uint32_t row, uint32_t head,
                   uint32_t heads)
{
    struct model *model = thread->model;
    const struct model_config *c = &model->facts.config;
    struct state *state = &model->state;
    const struct kernel_set *kernels = model->kernels;
    uint32_t width = model->kv_layout.latent_width, own = model->heads.count;
    uint32_t count = state->selected_count[row] == SELECT_ALL ? batch->position[row] + 1 : state->selected_count[row];
    float scale = 1.0f / sqrtf((float)(c->qk_nope + c->qk_rope));
    const float *q = state->q_latent + ((size_t)row * own + head) * width;
    for (uint32_t first = 0; first < count; first += KEY_BLOCK) {
        uint32_t keys = count - first < KEY_BLOCK ? count - first : KEY_BLOCK;
        load_keys(thread, batch, layer, row, first, keys);
        kernels->attention_scores(q, heads, thread->keys, keys, width, scale, thread->scores + first, count);
    }
    float total[ATTENTION_HEADS] = {0}, max[ATTENTION_HEADS];
    for (uint32_t h = 0; h < heads; h++)
        max[h] = kernels->maximum(thread->scores + (size_t)h * count, count);
    memset(thread->z, 0, (size_t)heads * c->kv_lora * sizeof(float));
    for (uint32_t first = 0; first < count; first += KEY_BLOCK) {
        uint32_t keys = count - first < KEY_BLOCK ? count - first : KEY_BLOCK;
        for (uint32_t h = 0; h < heads; h++)
            total[h] = total[h] + kernels->softmax_block(thread->scores + (size_t)h * count + first, keys, max[h]);
        if (count > KEY_BLOCK) /* else they are there still */
            load_keys(thread, batch, layer, row, first, keys);
        kernels->attention_sum(thread->scores + first, count, heads, thread->keys, keys, width, c->kv_lora, thread->z);
    }
    for (uint32_t h = 0; h < heads; h++) {
        float *z = thread->z + (size_t)h * c->kv_lora;
        float inverse = 1.0f / total[h];
        for (uint32_t j = 0; j < c->kv_lora; j++)
            z[j] = z[j] * inverse;
        activation_set(model, &state->latent, (head + h) * batch->rows + row, z);
    }
}

/* o of own heads = W_UV z, into the exchange [rows][heads * v_head]. */
static int attention_output(struct thread *thread, struct batch *batch, uint32_t layer, float **ret_buffer)
{
    struct model *model = thread->model;
    const struct model_config *c = &model->facts.config;
    uint32_t heads = model->heads.count;
    const struct matrix *w_uv = &model->weights.layers[layer].w_uv;
    uint32_t a_head = c->v_head / BLOCK_ROWS;
    float *buffer = exchange_buffer(&model->exchange);
    struct range own = thread_range(thread, heads * a_head);
    for (uint32_t h = 0; h < heads; h++) {
        uint32_t first = own.first > h * a_head ? own.first : h * a_head;
        uint32_t end = own.first + own.count < (h + 1) * a_head ? own.first + own.count : (h + 1) * a_head;
        if (first < end) /* rows of W_UV of all heads are rows of the output */
            matrix_multiply(thread, w_uv, &model->state.latent, h * batch->rows, batch->rows,
                            (struct range){model->heads.first * a_head + first, end - first}, buffer,
                            (size_t)c->heads * c->v_head);
    }
    *ret_buffer = buffer;
    return team_exchange(thread, 0);
}

/* h += W_O o. */
static int attention_residual(struct thread *thread, struct batch *batch, uint32_t layer, const float *o)
{
    struct model *model = thread->model;
    const struct model_config *c = &model->facts.config;
    struct state *state = &model->state;
    size_t width = (size_t)c->heads * c->v_head;
    struct range rows = thread_range(thread, batch->rows);
    for (uint32_t r = rows.first; r < rows.first + rows.count; r++)
        activation_set(model, &state->o, r, o + r * width);
    team_sync(thread, 0);
    float *buffer = exchange_buffer(&model->exchange);
    matrix_multiply_team(thread, &model->weights.layers[layer].o, &state->o, batch->rows, model->hidden_blocks,
                         batch->h, buffer, c->hidden);
    return residual_exchange(thread, batch, buffer);
}

int forward_attention_mla(struct thread *thread, struct batch *batch, uint32_t layer)
{
    struct model *model = thread->model;
    const struct model_config *c = &model->facts.config;
    const struct layer_weights *w = &model->weights.layers[layer];
    struct state *state = &model->state;
    uint32_t own = model->heads.count, qk = c->qk_nope + c->qk_rope;
    float *buffer;
    int status = project(thread, batch, layer, &buffer);
    if (status < 0)
        return status;
    finish_projection(thread, batch, layer, buffer);
    team_sync(thread, 0);

    /* Own heads' queries stay here; index queries go to everybody. The exchange also separates who wrote the cache from
     * who reads it. */
    struct matrix own_q_b = matrix_from(&w->q_b, model->heads.first * qk / BLOCK_ROWS);
    matrix_multiply_team(thread, &own_q_b, &state->q_lora, batch->rows, (struct range){0, own * qk / BLOCK_ROWS}, NULL,
                         state->q, (size_t)own * qk);
    bool select = c->indexer_kind[layer] == INDEXER_FULL && index_needed(model, batch);
    float *queries = exchange_buffer(&model->exchange);
    if (select) {
        part_begin(thread, PART_INDEXER);
        matrix_multiply_team(thread, &w->indexer.wq_b, &state->q_lora, batch->rows,
                             worker_range(&model->facts, model->self, w->indexer.wq_b.n / BLOCK_ROWS), NULL, queries,
                             (size_t)c->index_heads * c->index_dim);
    }
    status = team_exchange(thread, 0);
    if (status == 0 && select)
        status = index_select(thread, batch, layer, queries);
    if (status < 0)
        return status;

    part_begin(thread, PART_ATTENTION);
    absorb_queries(thread, batch, layer);
    if (own > 0) {
        uint32_t together = batch->rows * own / model->team.threads;
        together = together < 1 ? 1 : together > ATTENTION_HEADS ? ATTENTION_HEADS : together;
        uint32_t groups = (own + together - 1) / together;
        /* rows of a prefill have ever more keys */
        struct team_job job = team_begin(thread, batch->rows * groups, TAIL_ALL);
        struct range tasks;
        while (team_take(&job, &tasks))
            for (uint32_t task = tasks.first; task < tasks.first + tasks.count; task++) {
                uint32_t head = task % groups * together;
                attend(thread, batch, layer, task / groups, head, own - head < together ? own - head : together);
            }
    }
    team_sync(thread, 0);
    status = attention_output(thread, batch, layer, &buffer);
    return status < 0 ? status : attention_residual(thread, batch, layer, buffer);
}
