#include "compute/demand.h"

#include "compute/lookahead.h"
#include "shm/futex.h"

#include <unistd.h>

#define RETRY_MS 5 /* while the request ring is full */

/* A wanted expert on its way, in the eyes of worker 0. */
enum wanted_status {
    WANTED_MISSING,   /* to be asked for */
    WANTED_REQUESTED, /* in iod's hands */
    WANTED_PINNED,    /* of this wave */
    WANTED_DONE,
};

static void ring_doorbell(const struct model *model, _Atomic uint32_t *flag)
{
    atomic_thread_fence(memory_order_seq_cst);
    uint64_t one = 1;
    if (model->doorbell >= 0 && atomic_load(flag) && write(model->doorbell, &one, sizeof one) < 0)
        return; /* EAGAIN: the counter is full, so iod will wake anyway */
}

uint32_t demand_first_id(const struct model *model, uint32_t layer)
{
    return (uint32_t)model_moe_index(&model->facts.config, layer) * model->facts.config.experts;
}

/* Asks iod for every expert that is still missing. What does not fit in the ring stays missing and is asked for later. */
static bool request_missing(struct model *model, uint32_t layer)
{
    struct demand *demand = &model->state.demand;
    uint32_t first_id = demand_first_id(model, layer);
    bool pushed = false, full = false;
    for (uint32_t i = 0; i < demand->wanted && !full; i++) {
        if (demand->status[i] != WANTED_MISSING)
            continue;
        struct expert_request request = {
            .expert = first_id + demand->expert[i], .epoch = model->exchange.epoch, .tick = demand->tick};
        full = ring_push(&model->control->rings[model->self], &request) < 0;
        if (!full) {
            demand->status[i] = WANTED_REQUESTED;
            pushed = true;
        }
    }
    if (pushed)
        ring_doorbell(model, &model->control->iod.asleep);
    return full;
}

#define USES_AT_ONCE 64u /* entries that go into the use log together */

/* Which rows chose which of the wanted experts goes into the use log, and what was there into the layer's counts. iod is told before it is
 * asked, so that it knows the layer's uses when it chooses victims for the layer's misses. */
static void log_uses(struct model *model, const struct batch *batch, uint32_t layer)
{
    const struct state *state = &model->state;
    struct use_log *log = &model->control->uses;
    uint32_t first_id = demand_first_id(model, layer);
    struct use uses[USES_AT_ONCE];
    uint32_t count = 0, first = USE_LAYER, top_k = model->facts.config.top_k;
    for (uint32_t i = 0; i < state->demand.wanted; i++) {
        uint32_t expert = state->demand.expert[i], id = first_id + expert;
        bool hit = state->demand.status[i] == WANTED_PINNED, answers = false;
        for (uint32_t p = state->expert_first[expert]; p < state->expert_first[expert + 1]; p++) {
            uint32_t row = state->pairs[p] / top_k;
            bool answer = batch_answers(batch, row);
            answers |= answer;
            uses[count++] = (struct use){.expert = id,
                                         .row = batch->source[row],
                                         .flags = first | (hit ? USE_HIT : 0) | (answer ? 0 : USE_PREFILL),
                                         .step = (uint32_t)model->step->id};
            first = 0;
            if (count == USES_AT_ONCE) {
                uses_append(log, uses, count);
                count = 0;
            }
        }
        if (answers)
            lookahead_count(model, layer, expert, hit);
    }
    uses_append(log, uses, count);
    uint64_t read = atomic_load_explicit(&model->control->iod.uses_read, memory_order_relaxed);
    if (uses_end(log) - read > USE_ENTRIES / 2)
        ring_doorbell(model, &model->control->iod.asleep);
}

/* Worker 0, once a layer: pins what is there and asks for the rest. A FAILED slot seen here is an old failure: the request makes iod try
 * again, and only another generation's failure is believed. */
void demand_begin(struct model *model, const struct batch *batch, uint32_t layer)
{
    struct demand *demand = &model->state.demand;
    uint32_t hits = 0, first_id = demand_first_id(model, layer);
    demand->tick = atomic_load(&model->line->tick) + 1;
    atomic_store(&model->line->tick, demand->tick);
    for (uint32_t i = 0; i < demand->wanted; i++) {
        struct slot_ref ref = {0};
        int status = pool_pin(&model->pool, first_id + demand->expert[i], model->self, demand->tick, &ref);
        demand->stale_failure[i] = status == -EIO;
        demand->ref[i] = ref;
        demand->status[i] = status == 0 ? WANTED_PINNED : WANTED_MISSING;
        hits += status == 0;
    }
    demand->hits += hits;
    demand->misses += demand->wanted - hits;
    add_counter(&model->control->layers[layer].hits, hits);
    add_counter(&model->control->layers[layer].misses, demand->wanted - hits);
    log_uses(model, batch, layer);
    request_missing(model, layer);
}

uint32_t demand_guess(struct model *model, uint32_t layer, const uint32_t *experts, uint32_t count)
{
    uint32_t pushed = 0, first_id = demand_first_id(model, layer);
    for (; pushed < count; pushed++) {
        /* The next layer's tick: every MoE layer adds one. */
        struct expert_request request = {.expert = first_id + experts[pushed],
                                         .epoch = model->exchange.epoch,
                                         .tick = model->state.demand.tick + 1,
                                         .kind = KIND_LOOKAHEAD};
        if (ring_push(&model->control->rings[model->self], &request) < 0)
            break; /* full: it is only a guess */
    }
    if (pushed > 0)
        ring_doorbell(model, &model->control->iod.asleep);
    return pushed;
}

static int failed(struct model *model, uint32_t layer, uint32_t i, struct slot_ref ref)
{
    struct slot *slot = &model->pool.slots[ref.index];
    model->failure = (struct expert_failure){
        .layer = layer,
        .expert = model->state.demand.expert[i],
        .slice = atomic_load_explicit(&slot->slice, memory_order_relaxed),
        .code = atomic_load_explicit(&slot->error, memory_order_relaxed),
    };
    return -EIO;
}

/* Pins every wanted expert that is READY now. Returns how many of this wave there are, or -EIO. */
static int pin_ready(struct model *model, uint32_t layer)
{
    struct demand *demand = &model->state.demand;
    int pinned = 0;
    uint32_t first_id = demand_first_id(model, layer);
    for (uint32_t i = 0; i < demand->wanted; i++) {
        if (demand->status[i] == WANTED_PINNED)
            pinned++;
        if (demand->status[i] != WANTED_REQUESTED)
            continue;
        struct slot_ref ref;
        int status = pool_pin(&model->pool, first_id + demand->expert[i], model->self, demand->tick, &ref);
        if (status == 0) {
            demand->status[i] = WANTED_PINNED;
            demand->ref[i] = ref;
            pinned++;
        } else if (status == -EIO && !(demand->stale_failure[i] && demand->ref[i].index == ref.index &&
                                       demand->ref[i].generation == ref.generation)) {
            return failed(model, layer, i, ref);
        }
    }
    return pinned;
}

/* Waits until the next wave has at least one expert. Reads `published` before it looks, so no wake is lost. -EIO, -ESTALE. */
static int await_wave(struct model *model, uint32_t layer)
{
    enum step_part part = model->team.part;
    int status;
    for (;;) {
        uint32_t published = atomic_load(&model->line->published);
        status = atomic_load(&model->control->epoch) != model->exchange.epoch ? -ESTALE : pin_ready(model, layer);
        if (status != 0)
            break;
        bool full = request_missing(model, layer);
        if (model->team.part != PART_WAIT)
            team_part(&model->team, PART_WAIT);
        futex_wait(&model->line->published, published, full ? RETRY_MS : -1);
    }
    if (model->team.part != part)
        team_part(&model->team, part);
    return status < 0 ? status : 0;
}

/* Worker 0's first thread writes the wave (or the failure) into the exchange. -ESTALE: nothing is written, the step is over. */
int demand_publish_wave(struct model *model, uint32_t layer, struct wave_list *list)
{
    struct demand *demand = &model->state.demand;
    list->status = await_wave(model, layer);
    if (list->status == -ESTALE)
        return -ESTALE;
    list->failure = model->failure;
    list->count = 0;
    for (uint32_t i = 0; list->status == 0 && i < demand->wanted; i++)
        if (demand->status[i] == WANTED_PINNED)
            list->expert[list->count++] =
                (struct wave_reference){demand->expert[i], demand->ref[i].index, demand->ref[i].generation};
    return 0;
}

/* Each worker's first thread: reads the list once, checks it, maps its slots. What worker 0 has pinned stays until all are done with it. */
int demand_accept_wave(struct model *model, uint32_t layer, const struct wave_list *list)
{
    struct state *state = &model->state;
    int32_t status = list->status;
    uint32_t count = list->count;
    if (status < 0) {
        model->failure = list->failure;
        return -EIO;
    }
    if (count == 0 || count > model->facts.config.experts)
        return error_set(&model->error, EBADMSG, "worker 0 published a wave of %u experts for layer %u", count, layer);
    for (uint32_t i = 0; i < count; i++) {
        struct wave_reference reference = list->expert[i];
        struct wave_expert *expert = &state->wave[i];
        uint32_t first = i > 0 ? state->wave[i - 1].expert + 1 : 0;
        if (reference.expert < first || reference.expert >= model->facts.config.experts)
            return error_set(&model->error, EBADMSG, "worker 0 published expert %u out of order for layer %u",
                             reference.expert, layer);
        expert->expert = reference.expert;
        for (uint32_t s = 0; s < EXPERT_SLICES; s++) {
            expert->slice[s] = pool_slice(&model->pool, reference.slot, s);
            if (!expert->slice[s]) { /* the pool has grown since */
                int attached = pool_attach_objects(&model->pool, &model->error);
                if (attached < 0)
                    return attached;
                expert->slice[s] = pool_slice(&model->pool, reference.slot, s);
            }
            if (!expert->slice[s])
                return error_set(&model->error, EBADMSG, "worker 0 published slot %u, which the pool does not have",
                                 reference.slot);
        }
    }
    state->wave_count = count;
    return 0;
}

/* After all workers have finished a wave: worker 0 gives its experts back. */
void demand_retire_wave(struct model *model)
{
    struct demand *demand = &model->state.demand;
    for (uint32_t i = 0; i < demand->wanted; i++)
        if (demand->status[i] == WANTED_PINNED) {
            pool_unpin(&model->pool, demand->ref[i], model->self);
            demand->status[i] = WANTED_DONE;
        }
    ring_doorbell(model, &model->control->iod.starved);
}
