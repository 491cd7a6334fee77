/* The workers. Worker 0 does what compute/demand.c and moe.c do with the pool, in the same order, one access to what is
 * shared at a time; the others read what it has pinned. */
#include "tests/simulation/simulation.h"

#include <xxhash.h>

#define MANY_EVENTS 6000u /* no expert takes so many, when nothing is killed */

static struct worker_line *line_of(const struct simulation *sim)
{
    return &sim->control->workers[0];
}

static uint32_t epoch_now(const struct simulation *sim)
{
    return atomic_load(&sim->control->epoch);
}

static void ring_if(const struct simulation *sim, _Atomic uint32_t *flag)
{
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load(flag))
        ring_doorbell(sim);
}

static uint64_t fold_hash(uint64_t fold, uint64_t hash)
{
    return XXH3_64bits_withSeed(&hash, sizeof(hash), fold);
}

/* The stand-in for a step's logits: the bytes of all experts in the order of the sum, as the files have them. */
uint64_t expected_fold(const struct simulation *sim, uint32_t step)
{
    uint64_t fold = 0;
    for (uint32_t id = 0; id < SIM_ALL; id++)
        if (sim->plan.wanted[step][id / SIM_EXPERTS] >> id % SIM_EXPERTS & 1)
            fold = fold_hash(fold, sim->image_hash[id]);
    return fold;
}

static void begin_layer(struct simulation *sim)
{
    struct leader *l = &sim->leader;
    l->tick = atomic_load(&line_of(sim)->tick) + 1;
    atomic_store(&line_of(sim)->tick, l->tick);
    l->count = l->at = 0;
    for (uint32_t e = 0; e < SIM_EXPERTS; e++) {
        if (!(sim->plan.wanted[l->step][l->layer] >> e & 1))
            continue;
        l->expert[l->count] = l->layer * SIM_EXPERTS + e;
        l->status[l->count] = WANTED_MISSING;
        l->stale_failure[l->count++] = false;
    }
    l->pc = W_PIN;
}

static bool is_serving(const struct simulation *sim)
{
    uint32_t epoch = epoch_now(sim);
    bool all = sim->running && !sim->stop && sim->leader.acknowledged == epoch;
    for (uint32_t f = 0; f < sim->plan.followers; f++)
        all = all && sim->follower[f].acknowledged == epoch;
    return all;
}

/* model_acknowledge, then the front's next STEP, or the same once more. */
static bool idle(struct simulation *sim)
{
    struct leader *l = &sim->leader;
    if (l->acknowledged != epoch_now(sim)) {
        pool_release_holder(&sim->pool, 0);
        l->acknowledged = epoch_now(sim);
        trace(sim, "worker  acknowledges epoch %u", l->acknowledged);
        atomic_store(&line_of(sim)->acknowledged, l->acknowledged);
        return true;
    }
    if (!is_serving(sim))
        return false;
    l->epoch = l->acknowledged;
    l->fold = 0;
    l->layer = 0;
    trace(sim, "worker  begins step %u in epoch %u", l->step, l->epoch);
    begin_layer(sim);
    return true;
}

static void next_step(struct simulation *sim)
{
    struct leader *l = &sim->leader;
    l->step++;
    l->pc = l->step == sim->plan.steps ? W_DONE : W_IDLE;
}

/* A step is over without a result: what iod still owes to it is void. */
static void give_up_step(struct simulation *sim)
{
    pool_release_holder(&sim->pool, 0);
    atomic_fetch_add(&line_of(sim)->tick, 1);
    for (uint32_t i = 0; i < sim->leader.count; i++)
        sim->leader.status[i] = WANTED_DONE;
    sim->leader.waits_since = 0;
    sim->leader.pc = W_IDLE;
}

static void log_uses(struct simulation *sim)
{
    const struct leader *l = &sim->leader;
    struct use uses[SIM_EXPERTS];
    for (uint32_t i = 0; i < l->count; i++)
        uses[i] = (struct use){.expert = l->expert[i],
                               .flags = (i ? 0 : USE_LAYER) | (l->status[i] == WANTED_PINNED ? USE_HIT : 0),
                               .step = l->step};
    uses_append(&sim->control->uses, uses, l->count);
}

static void pin_first(struct simulation *sim)
{
    struct leader *l = &sim->leader;
    struct slot_ref ref = {0};
    int status = pool_pin(&sim->pool, l->expert[l->at], 0, l->tick, &ref);
    l->stale_failure[l->at] = status == -EIO;
    l->ref[l->at] = ref;
    l->status[l->at] = status == 0 ? WANTED_PINNED : WANTED_MISSING;
    if (++l->at < l->count)
        return;
    log_uses(sim);
    l->at = 0;
    l->pc = W_PUSH;
}

static void push(struct simulation *sim)
{
    struct leader *l = &sim->leader;
    bool pushed = false;
    while (l->at < l->count && l->status[l->at] != WANTED_MISSING)
        l->at++;
    if (l->at < l->count) {
        struct expert_request request = {.expert = l->expert[l->at], .epoch = l->epoch, .tick = l->tick};
        if (ring_push(&sim->control->rings[0], &request) < 0)
            violated(sim, "the request ring is full");
        trace(sim, "worker  asks for expert %u", l->expert[l->at]);
        l->status[l->at++] = WANTED_REQUESTED;
        return;
    }
    for (uint32_t i = 0; i < l->count; i++)
        pushed = pushed || l->status[i] == WANTED_REQUESTED;
    if (pushed)
        ring_if(sim, &sim->control->iod.asleep);
    l->pc = W_GUESS;
}

/* Some of what the next layer will want, and some that it will not. */
static void guess(struct simulation *sim)
{
    struct leader *l = &sim->leader;
    l->pc = W_LOOK;
    if (l->layer + 1 == SIM_LAYERS || sim->plan.guess_share == 0)
        return;
    for (uint32_t e = 0; e < SIM_EXPERTS; e++) {
        bool wanted = sim->plan.wanted[l->step][l->layer + 1] >> e & 1;
        if (dice(sim, 8) >= sim->plan.guess_share || (!wanted && dice(sim, 3)))
            continue;
        struct expert_request request = {
            .expert = (l->layer + 1) * SIM_EXPERTS + e, .epoch = l->epoch, .tick = l->tick + 1, .kind = KIND_LOOKAHEAD};
        if (ring_push(&sim->control->rings[0], &request) < 0)
            violated(sim, "the request ring is full");
        sim->coverage->guesses++;
    }
    ring_if(sim, &sim->control->iod.asleep);
}

static void look(struct simulation *sim)
{
    struct leader *l = &sim->leader;
    if (!l->waits_since)
        l->waits_since = sim->events;
    l->seen = atomic_load(&line_of(sim)->published);
    l->at = 0;
    l->pc = W_TRY;
    if (epoch_now(sim) != l->epoch)
        give_up_step(sim);
}

/* True when that copy was no help against that failure of an expert. */
static bool is_bad(const struct simulation *sim, uint32_t copy, uint32_t id, uint32_t code, uint32_t slice)
{
    if (sim->dropped >> copy & 1)
        return true;
    if (code == EIO || code == ENODATA)
        return sim->bad_reads[copy] >> id & 1;
    return code == EBADMSG && sim->bad_bytes[copy] >> id & 1 && slice == sim->plan.hurt_slice[copy][id];
}

static void fail_step(struct simulation *sim, uint32_t i, struct slot_ref ref)
{
    struct leader *l = &sim->leader;
    uint32_t id = l->expert[i], code = atomic_load(&sim->pool.slots[ref.index].error);
    uint32_t slice = atomic_load(&sim->pool.slots[ref.index].slice);
    for (uint32_t c = 0; c < MAX_COPIES; c++)
        if (sim->plan.used_copies >> c & 1 && !is_bad(sim, c, id, code, slice))
            violated(sim, "expert %u failed (%u, slice %u), and copy %u has it", id, code, slice, c);
    trace(sim, "worker  step %u fails for expert %u", l->step, id);
    sim->coverage->failed_steps++;
    give_up_step(sim);
    next_step(sim);
}

static void publish_wave(struct simulation *sim)
{
    struct leader *l = &sim->leader;
    l->at = 0;
    l->waits_since = 0;
    l->wave++;
    l->pc = W_READ;
    sim->coverage->waves++;
    trace(sim, "worker  publishes wave %u", l->wave);
}

/* pin_ready, one expert at a time. */
static void try_next(struct simulation *sim)
{
    struct leader *l = &sim->leader;
    bool pinned = false;
    while (l->at < l->count && l->status[l->at] != WANTED_REQUESTED)
        l->at++;
    if (l->at < l->count) {
        uint32_t i = l->at++;
        struct slot_ref ref;
        int status = pool_pin(&sim->pool, l->expert[i], 0, l->tick, &ref);
        bool stale = l->stale_failure[i] && l->ref[i].index == ref.index && l->ref[i].generation == ref.generation;
        if (status == 0) {
            l->ref[i] = ref;
            l->status[i] = WANTED_PINNED;
        } else if (status == -EIO && !stale) {
            fail_step(sim, i, ref);
        }
        return;
    }
    for (uint32_t i = 0; i < l->count; i++)
        pinned = pinned || l->status[i] == WANTED_PINNED;
    if (pinned) {
        publish_wave(sim);
        return;
    }
    l->woken = false;
    l->pc = atomic_load(&line_of(sim)->published) == l->seen ? W_SLEEP : W_LOOK; /* futex_wait */
}

/* What stands in the slot that worker 0 has pinned must be the expert's. */
static bool is_right(const struct simulation *sim, uint32_t i, uint64_t *ret_hash)
{
    *ret_hash = hash_slot(sim, sim->leader.ref[i].index);
    return *ret_hash == sim->image_hash[sim->leader.expert[i]];
}

static void read_next(struct simulation *sim)
{
    struct leader *l = &sim->leader;
    while (l->at < l->count && l->status[l->at] != WANTED_PINNED)
        l->at++;
    if (l->at == l->count) {
        l->pc = W_BARRIER;
        return;
    }
    if (!is_right(sim, l->at, &l->hash[l->at]))
        violated(sim, "worker 0 reads bytes that are not expert %u's in slot %u", l->expert[l->at],
                 l->ref[l->at].index);
    l->at++;
}

static bool pass_barrier(struct simulation *sim)
{
    struct leader *l = &sim->leader;
    if (epoch_now(sim) != l->epoch) {
        give_up_step(sim);
        return true;
    }
    for (uint32_t f = 0; f < sim->plan.followers; f++) {
        if (sim->follower[f].wave != l->wave || sim->follower[f].reading)
            return false;
        if (sim->follower[f].tainted)
            violated(sim, "worker %u has read bytes of another expert", f + 1);
    }
    l->at = 0;
    l->pc = W_RETIRE;
    return true;
}

static void end_layer(struct simulation *sim)
{
    struct leader *l = &sim->leader;
    for (uint32_t i = 0; i < l->count; i++)
        l->fold = fold_hash(l->fold, l->hash[i]);
    if (++l->layer < SIM_LAYERS) {
        begin_layer(sim);
        return;
    }
    if (l->fold != expected_fold(sim, l->step))
        violated(sim, "step %u has another checksum than undisturbed", l->step);
    trace(sim, "worker  ends step %u", l->step);
    sim->coverage->steps++;
    next_step(sim);
}

static void retire_next(struct simulation *sim)
{
    struct leader *l = &sim->leader;
    bool left = false;
    while (l->at < l->count && l->status[l->at] != WANTED_PINNED)
        l->at++;
    if (l->at < l->count) {
        l->status[l->at] = WANTED_DONE;
        pool_unpin(&sim->pool, l->ref[l->at], 0);
        l->at++;
        return;
    }
    ring_if(sim, &sim->control->iod.starved);
    for (uint32_t i = 0; i < l->count; i++)
        left = left || l->status[i] == WANTED_REQUESTED;
    if (left)
        l->pc = W_LOOK;
    else
        end_layer(sim);
}

bool leader_step(struct simulation *sim)
{
    static const char *const names[] = {
        [W_IDLE] = "is between steps", [W_PIN] = "pins",     [W_PUSH] = "asks",
        [W_GUESS] = "guesses",         [W_LOOK] = "looks",   [W_TRY] = "tries",
        [W_SLEEP] = "is woken",        [W_READ] = "reads",   [W_BARRIER] = "waits for all",
        [W_RETIRE] = "gives back",     [W_DEAD] = "is dead", [W_DONE] = "has done all"};
    struct leader *l = &sim->leader;
    if (l->waits_since && sim->events - l->waits_since > MANY_EVENTS)
        violated(sim, "worker 0 waits in layer %u of step %u for %u events", l->layer, l->step, MANY_EVENTS);
    if (l->pc >= W_PIN && l->pc <= W_RETIRE && (l->pc != W_SLEEP || l->woken))
        trace(sim, "worker  %s, layer %u, at %u", names[l->pc], l->layer, l->at);
    switch (l->pc) {
    case W_IDLE: return idle(sim);
    case W_PIN: pin_first(sim); return true;
    case W_PUSH: push(sim); return true;
    case W_GUESS: guess(sim); return true;
    case W_LOOK: look(sim); return true;
    case W_TRY: try_next(sim); return true;
    case W_SLEEP:
        if (!l->woken)
            return false;
        l->pc = W_LOOK;
        return true;
    case W_READ: read_next(sim); return true;
    case W_BARRIER: return pass_barrier(sim);
    case W_RETIRE: retire_next(sim); return true;
    case W_DONE: /* between requests: only acknowledges */
        if (l->acknowledged == epoch_now(sim))
            return false;
        idle(sim);
        return true;
    case W_DEAD:
    default: return false;
    }
}

bool follower_step(struct simulation *sim, uint32_t which)
{
    struct follower *f = &sim->follower[which];
    const struct leader *l = &sim->leader;
    uint64_t hash;
    if (f->acknowledged != epoch_now(sim)) {
        trace(sim, "worker%u acknowledges epoch %u", which + 1, epoch_now(sim));
        f->reading = f->tainted = false; /* the step is abandoned */
        f->wave = l->wave;
        f->acknowledged = epoch_now(sim);
        return true;
    }
    bool published = (l->pc == W_READ || l->pc == W_BARRIER) && l->epoch == f->acknowledged;
    if (!f->reading && published && f->wave != l->wave) {
        f->reading = true;
        f->at = 0;
        return true;
    }
    if (!f->reading)
        return false;
    while (f->at < l->count && l->status[f->at] != WANTED_PINNED)
        f->at++;
    if (f->at < l->count) {
        trace(sim, "worker%u reads expert %u", which + 1, l->expert[f->at]);
        f->tainted = f->tainted || !is_right(sim, f->at, &hash);
        f->at++;
        return true;
    }
    trace(sim, "worker%u has read wave %u", which + 1, l->wave);
    f->wave = l->wave;
    f->reading = false;
    return true;
}
