/* The indexer of DeepSeek Sparse Attention: for each row the index_topk positions with the highest index score.
 * Formulas: DeepSeek-V3.2 technical report, section 2. Each worker scores its share of the positions with all index
 * heads and publishes its best; the union of their bests holds the best of all, so the set is the same for any number
 * of workers. */
#include "compute/model.h"

#include <math.h>
#include <string.h>

/* What one worker publishes, for all rows: counts u32 [rows], scores f32 [rows][topk], positions u32 [rows][topk];
 * workers one after another. Positions ascend. */
struct candidates {
    uint32_t *count;
    float *score;
    uint32_t *position;
};

static struct candidates candidates_of(const struct model *model, void *buffer, uint32_t worker, uint32_t rows)
{
    size_t topk = model->facts.index_topk;
    uint32_t *base = (uint32_t *)buffer + worker * rows * (1 + 2 * topk);
    struct candidates candidates = {.count = base, .score = (float *)(void *)(base + rows)};
    candidates.position = base + rows + rows * topk;
    return candidates;
}

bool index_needed(const struct model *model, const struct batch *batch)
{
    for (uint32_t r = 0; r < batch->rows; r++)
        if (batch->position[r] >= model->facts.index_topk)
            return true;
    return false;
}

void index_store_key(struct thread *thread, const struct batch *batch, uint32_t layer, uint32_t row, const float *key)
{
    struct model *model = thread->model;
    const struct model_config *c = &model->facts.config;
    const struct indexer_weights *w = &model->weights.layers[layer].indexer;
    const struct kv_layout *layout = &model->kv_layout;
    float *k = thread->row;
    size_t at = (size_t)row * (c->qk_rope / 2);
    model->kernels->layernorm(key, w->k_norm, w->k_norm_bias, c->index_dim, c->index_norm_eps, k);
    model->kernels->rope(k, batch->cos + at, batch->sin + at, c->qk_rope, c->index_rope_interleave);
    uint32_t position = batch->position[row], within = position % layout->page_tokens;
    unsigned char *page = kv_page(&model->kv, layout, batch->sequence[row]->page_ids[position / layout->page_tokens]);
    unsigned char *to = page + layout->keys[layer] + within * layout->key_bytes;
    if (model->facts.activations == ACTIVATIONS_F32)
        memcpy(to, k, layout->key_bytes);
    else
        model->kernels->quantise(k, c->index_dim, (int8_t *)to,
                                 (float *)(void *)(page + layout->key_scales[layer] + within * layout->key_scale_bytes),
                                 NULL);
}

/* Rotates and quantises the index queries of this thread's rows. */
static void set_queries(struct thread *thread, struct batch *batch, const float *queries)
{
    struct model *model = thread->model;
    const struct model_config *c = &model->facts.config;
    size_t width = (size_t)c->index_heads * c->index_dim;
    struct range rows = thread_range(thread, batch->rows);
    for (uint32_t r = rows.first; r < rows.first + rows.count; r++) {
        size_t at = (size_t)r * (c->qk_rope / 2);
        memcpy(thread->row, queries + r * width, width * sizeof(float));
        for (uint32_t h = 0; h < c->index_heads; h++)
            model->kernels->rope(thread->row + (size_t)h * c->index_dim, batch->cos + at, batch->sin + at, c->qk_rope,
                                 c->index_rope_interleave);
        activation_set(model, &model->state.index, r, thread->row);
    }
}

/* Scores of positions [range) of one row, page by page. */
static void score_positions(struct thread *thread, const struct batch *batch, uint32_t layer, uint32_t row,
                            struct range range, float *ret_scores)
{
    struct model *model = thread->model;
    const struct model_config *c = &model->facts.config;
    const struct kv_layout *layout = &model->kv_layout;
    const struct activation *index = &model->state.index;
    const struct matmul_row q = activation_row(index, row, NULL);
    const struct index_queries queries = {.heads = c->index_heads,
                                          .dim = c->index_dim,
                                          .q = q.q,
                                          .scales = q.scales,
                                          .sums = q.sums,
                                          .x = q.x,
                                          .weights = model->state.index_weight + (size_t)row * c->index_heads,
                                          .scale = 1.0f / sqrtf((float)c->index_dim)};
    for (uint32_t done = 0; done < range.count;) {
        uint32_t position = range.first + done, within = position % layout->page_tokens;
        uint32_t count =
            layout->page_tokens - within < range.count - done ? layout->page_tokens - within : range.count - done;
        const unsigned char *page =
            kv_page(&model->kv, layout, batch->sequence[row]->page_ids[position / layout->page_tokens]);
        const unsigned char *keys = page + layout->keys[layer] + within * layout->key_bytes;
        if (model->facts.activations == ACTIVATIONS_F32)
            model->kernels->index_scores_f32(&queries, (const float *)(const void *)keys, count, ret_scores + done);
        else
            model->kernels->index_scores(
                &queries, (const int8_t *)keys,
                (const float *)(const void *)(page + layout->key_scales[layer] + within * layout->key_scale_bytes),
                count, ret_scores + done);
        done += count;
    }
}

static bool is_sparse(const struct model *model, const struct batch *batch, uint32_t row)
{
    return batch->position[row] >= model->facts.index_topk;
}

/* Own share's best of rows [first, first + count), into the exchange. */
static void score_rows(struct thread *thread, struct batch *batch, uint32_t layer, uint32_t first, uint32_t count,
                       const struct candidates *own)
{
    struct model *model = thread->model;
    struct state *state = &model->state;
    uint32_t topk = model->facts.index_topk, most = model->facts.context / model->facts.workers + 1;
    for (uint32_t r = first; r < first + count; r++) {
        if (!is_sparse(model, batch, r))
            continue;
        struct range share = split(batch->position[r] + 1, model->self, model->facts.workers);
        struct range part = thread_range(thread, share.count);
        score_positions(thread, batch, layer, r, (struct range){share.first + part.first, part.count},
                        state->index_score + (size_t)(r - first) * most + part.first);
    }
    team_sync(thread, 0);
    struct range mine = thread_range(thread, count);
    for (uint32_t r = first + mine.first; r < first + mine.first + mine.count; r++) {
        own->count[r] = 0;
        if (!is_sparse(model, batch, r))
            continue;
        struct range share = split(batch->position[r] + 1, model->self, model->facts.workers);
        const float *scores = state->index_score + (size_t)(r - first) * most;
        uint32_t kept = model->kernels->select(scores, share.count, share.count < topk ? share.count : topk,
                                               thread->candidate_index);
        own->count[r] = kept;
        for (uint32_t i = 0; i < kept; i++) {
            own->score[(size_t)r * topk + i] = scores[thread->candidate_index[i]];
            own->position[(size_t)r * topk + i] = share.first + thread->candidate_index[i];
        }
    }
    team_sync(thread, 0); /* the scores are overwritten next */
}

/* The best of all workers' candidates for one row. Workers' shares ascend, so the candidates lie in ascending position.
 * What another worker wrote is bounded before use. */
static void merge_row(struct thread *thread, struct batch *batch, void *buffer, uint32_t row)
{
    struct model *model = thread->model;
    struct state *state = &model->state;
    uint32_t topk = model->facts.index_topk, total = 0;
    for (uint32_t w = 0; w < model->facts.workers; w++) {
        struct candidates from = candidates_of(model, buffer, w, batch->rows);
        uint32_t count = from.count[row];
        count = count < topk ? count : topk;
        for (uint32_t i = 0; i < count; i++, total++) {
            uint32_t position = from.position[(size_t)row * topk + i];
            thread->candidate_score[total] = from.score[(size_t)row * topk + i];
            thread->candidate_position[total] = position <= batch->position[row] ? position : batch->position[row];
        }
    }
    uint32_t kept =
        model->kernels->select(thread->candidate_score, total, total < topk ? total : topk, thread->candidate_index);
    uint32_t *selected = state->selected + (size_t)row * topk;
    for (uint32_t i = 0; i < kept; i++)
        selected[i] = thread->candidate_position[thread->candidate_index[i]];
    state->selected_count[row] = kept > 0 ? kept : SELECT_ALL;
}

int index_select(struct thread *thread, struct batch *batch, uint32_t layer, const float *queries)
{
    struct model *model = thread->model;
    set_queries(thread, batch, queries);
    team_sync(thread, 0);
    void *buffer = exchange_buffer(&model->exchange);
    struct candidates own = candidates_of(model, buffer, model->self, batch->rows);
    for (uint32_t first = 0; first < batch->rows; first += SELECT_ROWS)
        score_rows(thread, batch, layer, first, batch->rows - first < SELECT_ROWS ? batch->rows - first : SELECT_ROWS,
                   &own);
    int status = team_exchange(thread, 0);
    if (status < 0)
        return status;
    struct range rows = thread_range(thread, batch->rows);
    for (uint32_t r = rows.first; r < rows.first + rows.count; r++)
        if (is_sparse(model, batch, r))
            merge_row(thread, batch, buffer, r);
    team_sync(thread, 0);
    return 0;
}
