/* Who does what next: workers, disk, verify thread, the pool's thread, and a supervisor that makes trouble. The daemon has
 * the program's stack; all others act while it waits, and at the places where it touches what they see. */
#include "tests/simulation/simulation.h"

#include <string.h>
#include <unistd.h>

#define MOST_TROUBLES 20u /* of a seed */
#define LONG_PAUSE 40u    /* steps of others while the daemon stands still within a turn */
#define TURN_HOOKS 60u    /* how many places of a turn a death is spread over */

void ring_doorbell(const struct simulation *sim)
{
    uint64_t one = 1;
    (void)!write(sim->doorbell_fd, &one, sizeof(one)); /* full: rings already */
}

/* --- death --- */

/* What a daemon writes beside bytes of the pool: all of the control segment but the use log, and the slot table. */
static size_t control_bytes(void)
{
    return offsetof(struct control, uses);
}

void world_kill(struct simulation *sim)
{
    trace(sim, "iod     is killed");
    memcpy(sim->saved_control, sim->control, control_bytes());
    memcpy(sim->saved_table, sim->pool.table.base, sim->pool.table.bytes);
    sim->saved_tally = sim->tally;
    sim->die_at_hook = 0;
    sim->dead = true;
    sim->job = NULL;
    disk_kill(sim);
}

/* The daemon's end has run, so that nothing leaks; to all others it has not happened. */
static void undo_end(struct simulation *sim)
{
    memcpy(sim->control, sim->saved_control, control_bytes());
    memcpy(sim->pool.table.base, sim->saved_table, sim->pool.table.bytes);
    sim->tally = sim->saved_tally;
    check_counters_of_dead(sim);
}

void world_hook(struct simulation *sim)
{
    if (!sim->running || sim->dead || sim->busy)
        return;
    sim->hooks++;
    if (sim->die_at_hook && sim->hooks >= sim->die_at_hook) {
        world_kill(sim);
        return;
    }
    if (dice(sim, 8))
        return;
    sim->busy = true;
    sim->timer_only = false;
    for (uint32_t steps = dice(sim, 4) ? 1 : 1 + dice(sim, LONG_PAUSE); steps > 0; steps--) {
        uint32_t who = dice(sim, 1 + sim->plan.followers);
        sim->coverage->preempted += who ? follower_step(sim, who - 1) : leader_step(sim);
    }
    check_event(sim);
    sim->busy = false;
}

/* --- the supervisor --- */

static void raise_epoch(struct simulation *sim)
{
    uint32_t epoch = control_raise_epoch(sim->control);
    trace(sim, "super   raises the epoch to %u", epoch);
    ring_doorbell(sim);
}

static void resize(struct simulation *sim)
{
    uint32_t target = SIM_TOP_K + dice(sim, sim->plan.slots - SIM_TOP_K + 1);
    atomic_store(&sim->control->pool_target, target);
    trace(sim, "super   wants %u slots", target);
    ring_doorbell(sim);
}

static void hold(struct simulation *sim)
{
    uint32_t id = dice(sim, SIM_ALL);
    atomic_fetch_xor(&sim->control->holds[0], UINT64_C(1) << id);
    atomic_fetch_add(&sim->control->holds_changed, 1);
    trace(sim, "super   holds expert %u, or no more", id);
    ring_doorbell(sim);
}

static void heal(struct simulation *sim)
{
    uint32_t id = dice(sim, SIM_ALL);
    trace(sim, "super   expert %u is right on the disk", id);
    for (uint32_t c = 0; c < MAX_COPIES; c++)
        sim->plan.hurt[c][id] = HURT_NOT;
}

static void kill_worker(struct simulation *sim)
{
    if (sim->leader.pc == W_DEAD)
        return;
    trace(sim, "super   worker 0 is dead");
    sim->leader.pc = W_DEAD;
    sim->leader.waits_since = 0;
    raise_epoch(sim);
}

static bool make_trouble(struct simulation *sim)
{
    enum trouble trouble = (enum trouble)dice(sim, TROUBLES);
    bool alive = sim->running && !sim->stop;
    sim->next_trouble = sim->events + 1 + dice(sim, 2 * sim->plan.trouble);
    if (!alive && (trouble == T_KILL || trouble == T_KILL_IN_TURN || trouble == T_STOP))
        return false;
    sim->troubles++;
    sim->coverage->troubles[trouble]++;
    switch (trouble) {
    case T_RESIZE: resize(sim); break;
    case T_HOLD: hold(sim); break;
    case T_KILL: world_kill(sim); break;
    case T_KILL_IN_TURN:
        trace(sim, "super   will kill iod within a turn");
        sim->die_at_hook = sim->hooks + 1 + dice(sim, TURN_HOOKS);
        break;
    case T_STOP:
        trace(sim, "super   tells iod to end");
        sim->stop = true;
        break;
    case T_WORKER: kill_worker(sim); break;
    case T_EPOCH: raise_epoch(sim); break;
    case T_HEAL: heal(sim); break;
    case T_DRIVE: drives_trouble(sim); break;
    case TROUBLES:
    default: break;
    }
    return true;
}

/* clear_dead: the pins of a dead worker go when no living one can still be reading. */
static bool supervisor_step(struct simulation *sim)
{
    uint32_t epoch = atomic_load(&sim->control->epoch);
    if (sim->leader.pc != W_DEAD)
        return false;
    for (uint32_t f = 0; f < sim->plan.followers; f++)
        if (sim->follower[f].acknowledged != epoch)
            return false;
    pool_release_holder(&sim->pool, 0);
    ring_doorbell(sim);
    sim->leader.acknowledged = 0;
    sim->leader.pc = sim->leader.step == sim->plan.steps ? W_DONE : W_IDLE;
    trace(sim, "super   starts worker 0 again");
    return true;
}

/* --- the schedule --- */

enum actor { LEADER, LEADER_AGAIN, DISK, DISK_AGAIN, VERIFIER, JOB, SUPERVISOR, FOLLOWERS };

static bool act(struct simulation *sim, uint32_t actor)
{
    switch (actor) {
    case LEADER:
    case LEADER_AGAIN: return leader_step(sim);
    case DISK:
    case DISK_AGAIN: return disk_step(sim);
    case VERIFIER: return verify_step(sim);
    case JOB: return job_step(sim);
    case SUPERVISOR: return supervisor_step(sim);
    default: return follower_step(sim, actor - FOLLOWERS);
    }
}

static bool work_is_done(const struct simulation *sim)
{
    uint32_t epoch = atomic_load(&sim->control->epoch);
    return sim->leader.pc == W_DONE && sim->leader.acknowledged == epoch;
}

bool world_event(struct simulation *sim)
{
    uint32_t actors = FOLLOWERS + sim->plan.followers, first = dice(sim, actors);
    bool acted = false;
    sim->busy = true;
    if (sim->plan.trouble && sim->events >= sim->next_trouble && sim->troubles < MOST_TROUBLES &&
        sim->leader.pc != W_DONE)
        acted = make_trouble(sim);
    for (uint32_t i = 0; i < actors && !acted && !sim->dead; i++)
        acted = act(sim, (first + i) % actors);
    if (acted && !sim->dead) {
        sim->events++;
        sim->now_ns += 500 + dice(sim, 20000);
        sim->idle_timeouts = 0;
        check_event(sim);
    }
    sim->busy = false;
    return acted;
}

uint64_t world_next(const struct simulation *sim)
{
    uint64_t next = SIM_NEVER, verify_ns;
    if (sim->job)
        return sim->now_ns;
    if (verify_due(sim, &verify_ns))
        next = verify_ns;
    for (uint32_t i = 0; i < SIM_FLYING; i++) {
        const struct flying *flying = &sim->flying[i];
        if (flying->used && !flying->landed && flying->due_ns < next)
            next = flying->due_ns;
    }
    return next;
}

bool world_is_done(const struct simulation *sim)
{
    return work_is_done(sim) && disk_flying(sim) == 0;
}

/* --- a seed --- */

/* By Zipf's law, rank r in proportion to 1 / r, or all alike. */
static uint32_t choose_expert(struct simulation *sim, bool zipf)
{
    static const uint32_t weights[SIM_EXPERTS] = {840, 420, 280, 210, 168, 140, 120, 105}; /* 840 / rank */
    if (!zipf)
        return dice(sim, SIM_EXPERTS);
    uint32_t left = dice(sim, 2283), rank = 0;
    while (left >= weights[rank])
        left -= weights[rank++];
    return rank;
}

static void make_plan(struct simulation *sim)
{
    static const uint32_t verify[] = {VERIFY_FIRST, VERIFY_ALWAYS, VERIFY_ALWAYS, VERIFY_OFF};
    struct sim_plan *plan = &sim->plan;
    bool zipf = dice(sim, 2), drifts = dice(sim, 2);
    *plan = (struct sim_plan){.slots = SIM_TOP_K + dice(sim, SIM_SLOTS - SIM_TOP_K + 1),
                              .nodes = 1u << dice(sim, 3),
                              .verify = verify[dice(sim, 4)],
                              .steps = 2 + dice(sim, SIM_STEPS - 1),
                              .followers = dice(sim, SIM_FOLLOWERS + 1),
                              .depth = dice(sim, 2) ? 64 : 1 + dice(sim, 8),
                              .in_flight = (1 + dice(sim, 6)) * SIM_BLOB_BYTES,
                              .guess_share = dice(sim, 2) ? dice(sim, 8) : 0,
                              .faults = dice(sim, 3) ? 2 + dice(sim, 30) : 0,
                              .trouble = dice(sim, 4) ? 20 + dice(sim, 200) : 0};
    for (uint32_t s = 0; s < plan->steps; s++) {
        uint32_t rows = 1 + dice(sim, 3);
        for (uint32_t l = 0; l < SIM_LAYERS; l++)
            for (uint32_t i = 0; i < rows * SIM_TOP_K; i++)
                plan->wanted[s][l] |= 1u << (choose_expert(sim, zipf) + l + (drifts ? s / 3 : 0)) % SIM_EXPERTS;
    }
    drives_plan(sim);
    learning_plan(sim);
}

static void unlink_pool(const struct simulation *sim)
{
    segment_unlink(sim->instance, "pool");
    for (uint32_t n = 0; n < 4; n++) {
        char part[16];
        snprintf(part, sizeof(part), "pool.%u.0", n);
        segment_unlink(sim->instance, part);
    }
}

/* One of two copies may not open: there is none, or it is another container. */
static void name_copies(struct simulation *sim)
{
    struct facts *facts = &sim->control->facts;
    uint32_t stripes = sim->plan.stripes, other = stripes == 1 ? SIM_STRIPES : 1;
    const char *first = sim->container[stripes][0], *mirror = sim->container[stripes][1];
    if (!(sim->plan.used_copies & 1))
        first = "/nowhere";
    if (!sim->plan.mirrored)
        mirror = "";
    else if (!(sim->plan.used_copies & 2))
        mirror = sim->container[other][1];
    snprintf(facts->container, sizeof(facts->container), "%s", first);
    snprintf(facts->mirror, sizeof(facts->mirror), "%s", mirror);
    facts->identity = sim->identity[stripes];
    facts->stripes = stripes;
    facts->learning = sim->plan.learning;
}

/* What the supervisor leaves to a new instance. */
static void make_instance(struct simulation *sim)
{
    struct control *control = sim->control;
    struct error error;
    const struct pool_shape shape = {.slots = sim->plan.slots,
                                     .nodes = sim->plan.nodes,
                                     .moe_layers = SIM_LAYERS,
                                     .experts = SIM_EXPERTS,
                                     .slice_bytes = SIM_SLICE_BYTES};
    char *first = (char *)control + offsetof(struct control, epoch);
    memset(first, 0, offsetof(struct control, uses.entries) - offsetof(struct control, epoch));
    control->facts.pool_slots = sim->plan.slots;
    control->facts.nodes = sim->plan.nodes;
    control->facts.verify = sim->plan.verify;
    name_copies(sim);
    atomic_store(&control->epoch, 1);
    atomic_store(&control->pool_target, sim->plan.slots);
    segment_unlink(sim->instance, "dense"); /* each seed loads them anew */
    unlink_pool(sim);
    if (pool_create(sim->instance, &shape, &error) < 0 || pool_attach(sim->instance, &sim->pool, &error) < 0)
        violated(sim, "%s", error.text);
}

static void empty_doorbell(const struct simulation *sim)
{
    uint64_t rings;
    (void)!read(sim->doorbell_fd, &rings, sizeof(rings)); /* empty already is fine */
}

static void log_line(const char *line)
{
    struct simulation *sim = the_simulation;
    if (sim->dead)
        return;
    trace(sim, "log     %s", line);
    sim->drops_told += strstr(line, ": this copy is read no more") != NULL;
    sim->refusals_told += strstr(line, " not used, ") != NULL;
}

static struct loader *start_daemon(struct simulation *sim)
{
    struct loader *loader;
    struct error error;
    const struct loader_options options = {.instance = sim->instance,
                                           .rundir = sim->rundir,
                                           .doorbell_fd = sim->doorbell_fd,
                                           .stop_fd = -1,
                                           .method = &sim_method,
                                           .in_flight = sim->plan.in_flight,
                                           .log = log_line};
    trace(sim, "iod     starts");
    sim->stop = sim->stop_told = sim->dead = false;
    sim->opening = true;
    if (loader_open(&options, &loader, &error) < 0 || pool_attach_objects(&sim->pool, &error) < 0)
        violated(sim, "%s", error.text);
    sim->opening = false;
    learning_check_start(sim);
    return loader;
}

/* One daemon, from its start to its death or end. */
static void run_daemon(struct simulation *sim)
{
    struct error error;
    struct loader *loader = start_daemon(sim);
    sim->running = true;
    if (loader_run(loader, &error) < 0)
        violated(sim, "%s", error.text);
    trace(sim, "iod     ends");
    loader_close(loader);
    sim->running = false;
    sim->placement = NULL;
    sim->die_at_hook = 0;
    if (sim->dead)
        undo_end(sim);
    sim->dead = false;
}

/* Before the supervisor has noticed, and before the next one stands. */
static void live_without_daemon(struct simulation *sim)
{
    for (uint32_t i = dice(sim, 40); i > 0; i--)
        if (!world_event(sim) && world_next(sim) != SIM_NEVER)
            sim->now_ns = world_next(sim) > sim->now_ns ? world_next(sim) : sim->now_ns;
}

static void begin(struct simulation *sim)
{
    sim->dice = sim->seed * UINT64_C(0x9E3779B97F4A7C15);
    make_plan(sim);
    sim->dice = ~sim->seed * UINT64_C(0xD6E8FEB86659FD93);
    sim->now_ns = 1000000000;
    sim->next_trouble = sim->plan.trouble;
    sim->leader.acknowledged = 0;
    make_instance(sim);
    learning_begin(sim);
    empty_doorbell(sim);
}

void run_seed(struct simulation *sim)
{
    begin(sim);
    while (true) {
        run_daemon(sim);
        if (sim->finished)
            break;
        live_without_daemon(sim);
        raise_epoch(sim);
        if (dice(sim, 2))
            live_without_daemon(sim);
    }
    sim->coverage->seeds++;
    sim->coverage->events += sim->events;
    sim->coverage->loads += sim->tally.loads;
    sim->coverage->evictions += sim->tally.evictions;
    pool_detach(&sim->pool);
    unlink_pool(sim);
}
