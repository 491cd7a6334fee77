/* The MTP (draft) layer: from the hidden state of a row and the token after it to logits for the token after that. */
#include "compute/model.h"

#include <string.h>

/* u_i = eh_proj [enorm(embed(next_i)); hnorm(h_i)], embedding first; h_i is the hidden state after the final norm. */
static int draft_input(struct thread *thread)
{
    struct model *model = thread->model;
    const struct model_config *c = &model->facts.config;
    struct state *state = &model->state;
    struct batch *draft = &state->draft;
    uint32_t hidden = c->hidden;
    struct range rows = thread_range(thread, draft->rows);
    for (uint32_t r = rows.first; r < rows.first + rows.count; r++) {
        float *embedding = thread->row, *final = embedding + hidden;
        rope_row(model, draft, r);
        embed_row(thread, draft->token[r], embedding);
        model->kernels->rmsnorm(state->batch.h + (size_t)draft->source[r] * hidden, model->weights.norm, hidden,
                                c->rms_eps, final);
        /* the halves of row r of u are rows 2 r and 2 r + 1 of half the width */
        activation_norm(model, &state->hidden, 2 * r, embedding, model->weights.enorm, c->rms_eps, NULL);
        activation_norm(model, &state->hidden, 2 * r + 1, final, model->weights.hnorm, c->rms_eps, NULL);
    }
    team_sync(thread, 0);
    struct activation input = state->hidden;
    input.width = 2 * hidden;
    float *buffer = exchange_buffer(&model->exchange);
    matrix_multiply(thread, &model->weights.eh_proj, &input, 0, draft->rows, own_range(thread, hidden / BLOCK_ROWS),
                    buffer, hidden);
    int status = team_exchange(thread, 0);
    if (status < 0)
        return status;
    memcpy(draft->h + (size_t)rows.first * hidden, buffer + (size_t)rows.first * hidden,
           (size_t)rows.count * hidden * sizeof(float));
    return 0;
}

int forward_mtp(struct thread *thread)
{
    struct model *model = thread->model;
    struct state *state = &model->state;
    part_begin(thread, PART_OTHER);
    team_sync(thread, 0); /* logits read `hidden` until here; h is whole */
    int status = 0;
    if (state->draft.rows > 0)
        status = draft_input(thread);
    if (status == 0 && state->draft.rows > 0)
        status = forward_layer(thread, &state->draft, model->facts.config.layers);
    if (status == 0 && state->logit_rows > 0) {
        team_sync(thread, 0);
        status = forward_logits(thread, state->draft.h, state->draft_row, model->weights.head_norm, 1);
    }
    return status;
}
