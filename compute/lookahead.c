#include "compute/lookahead.h"

#include "compute/demand.h"
#include "compute/family.h"

#include <stdlib.h>
#include <string.h>

#define NO_LAYER UINT32_MAX

struct lookahead {
    uint32_t rows, row[LOOKAHEAD_ROWS]; /* of the step's batch; 0: this step does not look ahead */
    uint32_t layer;                     /* whose experts were asked for last, or NO_LAYER */
    float *x;                           /* [LOOKAHEAD_ROWS][hidden]: normed */
    float *router;                      /* [LOOKAHEAD_ROWS][experts] */
    float *likely;                      /* [experts]: the weights that rows give it, added up; 0: no row chooses it */
    uint32_t *expert;                   /* [experts]: to be asked for, the likeliest first */
    bool *asked;                        /* [experts] of `layer` */
};

int lookahead_open(struct model *model, struct error *ret_error)
{
    const struct model_config *c = &model->facts.config;
    if (model->self != 0 || model->facts.prefetch == PREFETCH_OFF)
        return 0;
    struct lookahead *ahead = model->lookahead = calloc(1, sizeof *ahead);
    if (ahead) {
        ahead->layer = NO_LAYER;
        ahead->x = calloc((size_t)LOOKAHEAD_ROWS * c->hidden, sizeof *ahead->x);
        ahead->router = calloc((size_t)LOOKAHEAD_ROWS * c->experts, sizeof *ahead->router);
        ahead->likely = calloc(c->experts, sizeof *ahead->likely);
        ahead->expert = calloc(c->experts, sizeof *ahead->expert);
        ahead->asked = calloc(c->experts, sizeof *ahead->asked);
    }
    if (!ahead || !ahead->x || !ahead->router || !ahead->likely || !ahead->expert || !ahead->asked)
        return error_set(ret_error, ENOMEM, "worker 0: no memory for looking ahead; free some, or set prefetch=off");
    return 0;
}

void lookahead_close(struct model *model)
{
    struct lookahead *ahead = model->lookahead;
    if (!ahead)
        return;
    free(ahead->x);
    free(ahead->router);
    free(ahead->likely);
    free(ahead->expert);
    free(ahead->asked);
    free(ahead);
    model->lookahead = NULL;
}

void lookahead_begin(struct model *model)
{
    struct lookahead *ahead = model->lookahead;
    const struct batch *batch = &model->state.batch;
    if (!ahead)
        return;
    ahead->rows = 0;
    ahead->layer = NO_LAYER;
    if (model->facts.prefetch == PREFETCH_AUTO && atomic_load(&model->control->iod.lookahead) != 1)
        return;
    for (uint32_t r = 0; r < batch->rows && ahead->rows < LOOKAHEAD_ROWS; r++)
        if (batch_answers(batch, r))
            ahead->row[ahead->rows++] = r;
}

/* The MoE layer behind `layer` that takes the same rows, or NO_LAYER: the draft layer takes others. */
static uint32_t next_layer(const struct model_config *config, uint32_t layer)
{
    for (uint32_t next = layer + 1; next < config->layers; next++)
        if (config->layer_kind[next] == LAYER_MOE)
            return next;
    return NO_LAYER;
}

/* What each expert of `layer` is worth to the rows: the sum of the weights that its router gives it. */
static void weigh(struct model *model, uint32_t layer)
{
    const struct model_config *c = &model->facts.config;
    struct lookahead *ahead = model->lookahead;
    uint32_t chosen[MODEL_MAX_TOP_K];
    float weight[MODEL_MAX_TOP_K];
    memset(ahead->likely, 0, c->experts * sizeof *ahead->likely);
    for (uint32_t r = 0; r < ahead->rows; r++) {
        model->family->route(model, &model->weights.layers[layer], ahead->router + (size_t)r * c->experts, chosen,
                             weight);
        for (uint32_t j = 0; j < c->top_k; j++)
            ahead->likely[chosen[j]] += weight[j];
    }
}

/* Asks for the chosen experts that are not in the pool, the likeliest first: where the drive has time for few, it should be those. */
static void ask(struct model *model, uint32_t layer)
{
    struct lookahead *ahead = model->lookahead;
    uint32_t count = 0, experts = model->facts.config.experts, first_id = demand_first_id(model, layer);
    for (uint32_t e = 0; e < experts; e++) {
        struct slot_ref ref;
        if (!(ahead->likely[e] > 0) || pool_lookup(&model->pool, first_id + e, &ref) == 0)
            continue;
        uint32_t place = count++;
        for (; place > 0 && ahead->likely[ahead->expert[place - 1]] < ahead->likely[e]; place--)
            ahead->expert[place] = ahead->expert[place - 1];
        ahead->expert[place] = e;
    }
    count = demand_guess(model, layer, ahead->expert, count);
    ahead->layer = layer;
    memset(ahead->asked, 0, experts * sizeof *ahead->asked);
    for (uint32_t i = 0; i < count; i++)
        ahead->asked[ahead->expert[i]] = true;
    add_counter(&model->line->ahead[AHEAD_ASKED], count);
}

void lookahead_ask(struct thread *thread, const struct batch *batch, uint32_t layer)
{
    struct model *model = thread->model;
    struct lookahead *ahead = model->lookahead;
    const struct model_config *c = &model->facts.config;
    uint32_t next = next_layer(c, layer);
    if (!ahead || ahead->rows == 0 || next == NO_LAYER)
        return;
    part_begin(thread, PART_ROUTER);
    const struct layer_weights *w = &model->weights.layers[next];
    struct range rows = thread_range(thread, ahead->rows), own = thread_range(thread, c->experts);
    for (uint32_t r = rows.first; r < rows.first + rows.count; r++)
        model->kernels->rmsnorm(batch->h + (size_t)ahead->row[r] * c->hidden, w->post_norm, c->hidden, c->rms_eps,
                                ahead->x + (size_t)r * c->hidden);
    team_sync(thread, 0);
    const char *first = (const char *)w->router.data + (size_t)own.first * c->hidden * dtype_bytes(w->router.dtype);
    for (uint32_t r = 0; r < ahead->rows; r++)
        thread->rows[r] = (struct matmul_row){.x = ahead->x + (size_t)r * c->hidden,
                                              .y = ahead->router + (size_t)r * c->experts + own.first};
    model->kernels->linear(first, w->router.dtype, own.count, c->hidden, thread->rows, ahead->rows);
    team_sync(thread, 0);
    if (thread->index == 0) {
        weigh(model, next);
        ask(model, next);
    }
    part_begin(thread, PART_EXPERTS);
}

void lookahead_count(struct model *model, uint32_t layer, uint32_t expert, bool ready)
{
    struct lookahead *ahead = model->lookahead;
    if (!ahead || ahead->layer != layer)
        return;
    if (ahead->asked[expert]) {
        add_counter(&model->line->ahead[AHEAD_USED], 1);
        add_counter(&model->line->ahead[AHEAD_READY], ready);
    } else {
        add_counter(&model->line->ahead[AHEAD_MISSED], !ready);
    }
}
