/* The workers: compute/demand.c, moe.c, model.c. */
#include "tests/model-check/steps.h"

#include <errno.h>
#include <string.h>

/* Nothing of the step at hand is remembered. */
void forget_step(struct leader *l)
{
    l->wanted = l->missing = l->requested = l->pinned = l->stale_failure = 0;
    memset(l->slot, NONE, sizeof l->slot);
    memset(l->generation, 0, sizeof l->generation);
    l->at = l->at_slot = NONE;
    l->at_generation = l->flags = 0;
}

void reset_barrier(struct state *s, uint32_t who, uint8_t epoch)
{
    s->arrived_epoch[who] = epoch;
    s->arrived[who] = 0;
}

/* The next expert that this pass looks at, or what follows the pass. */
static void next_look(struct leader *l)
{
    uint8_t these = l->flags & FIRST_PASS ? l->wanted : l->requested;
    uint8_t from = l->at == NONE ? 0 : l->at + 1;
    l->at_slot = NONE;
    l->at_generation = 0;
    for (uint8_t e = from; e < EXPERTS; e++) {
        if (these >> e & 1) {
            l->at = e;
            l->pc = L_LOOKUP;
            return;
        }
    }
    l->at = NONE;
    if (l->flags & FIRST_PASS)
        l->pc = l->missing ? L_PUSH : L_PUBLISHED;
    else
        l->pc = l->pinned ? L_PUBLISH : L_SLEEP;
}

/* demand_begin, pin_ready: what follows a look at one expert. */
static void looked(struct leader *l, int status)
{
    uint8_t bit = (uint8_t)(1u << l->at);
    if (status == 0) {
        l->pinned |= bit;
        l->requested &= (uint8_t)~bit;
    } else if (l->flags & FIRST_PASS) {
        l->missing |= bit;
        l->stale_failure |= status == -EIO ? bit : 0;
    }
    if (status == 0 || (status == -EIO && l->flags & FIRST_PASS)) {
        l->slot[l->at] = l->at_slot;
        l->generation[l->at] = l->at_generation;
    }
    next_look(l);
}

static bool believes_failure(const struct protocol *p, const struct leader *l)
{
    if (l->flags & FIRST_PASS)
        return false;
    if (p->mutation == STALE_FAILURE)
        return true;
    return !(l->stale_failure >> l->at & 1 && l->slot[l->at] == l->at_slot && l->generation[l->at] == l->at_generation);
}

/* pool_pin in its four steps. */
void look(const struct protocol *p, struct state *s)
{
    struct leader *l = &s->leader;
    struct slot_ref ref;
    uint64_t word = l->at_slot < SLOTS ? s->word[l->at_slot] : 0;
    bool believes = p->mutation == PIN_WITHOUT_CHECKS || p->mutation == GENERATION_UNCHECKED;
    switch (l->pc) {
    case L_LOOKUP:
        words_expose(s);
        if (pool_lookup(&model_pool, l->at, &ref) < 0) {
            looked(l, -ENOENT);
            return;
        }
        l->at_slot = (uint8_t)ref.index;
        l->at_generation = (uint8_t)ref.generation;
        l->pc = L_WORD;
        return;
    case L_WORD:
        if (generation_of(word) != l->at_generation && !believes)
            looked(l, -ESTALE);
        else if (slot_state_of(word) == SLOT_READY || p->mutation == PIN_ANY_STATE)
            l->pc = L_PIN;
        else if (slot_state_of(word) == SLOT_FAILED && s->expert[l->at_slot] == l->at) {
            if (believes_failure(p, l))
                l->pc = L_FAILED;
            else
                looked(l, -EIO);
        } else
            looked(l, -EAGAIN);
        return;
    case L_PIN:
        if (p->mutation == PIN_ANY_STATE)
            s->word[l->at_slot] |= 1u << 4;
        else if (!pin(s, l->at_slot, believes ? generation_of(word) : l->at_generation)) {
            looked(l, -ESTALE);
            return;
        }
        l->pc = L_CHECK;
        return;
    case L_CHECK:
        if (s->expert[l->at_slot] != l->at && p->mutation != PIN_WITHOUT_CHECKS && p->mutation != EXPERT_UNCHECKED) {
            unpin(s, l->at_slot);
            looked(l, -ESTALE);
            return;
        }
        s->used[l->at_slot] = NOW;
        looked(l, 0);
        return;
    default: return;
    }
}

/* demand_publish_wave: the list, then the barrier's first half. */
static void publish_wave(struct state *s, bool failed)
{
    s->wave = failed ? 0 : s->leader.pinned;
    s->wave_failed = failed;
    for (uint32_t e = 0; e < EXPERTS; e++)
        s->wave_slot[e] = s->wave >> e & 1 ? s->leader.slot[e] : NONE;
    s->arrived[LEADER] = (s->arrived[LEADER] + 1) % 4;
    s->arrived_epoch[LEADER] = s->leader.epoch;
}

/* shared_memory_barrier, after `who` has arrived: 1 all are there, 0 not yet, -ESTALE. */
static int barrier(const struct protocol *p, const struct state *s, uint32_t who, uint8_t epoch)
{
    uint32_t other = 1 - who;
    bool stale = s->epoch != epoch && p->mutation != EPOCH_UNCHECKED;
    bool there = s->arrived_epoch[other] == epoch && (s->arrived[other] - s->arrived[who] + 4u) % 4 < 2;
    return stale ? -ESTALE : there;
}

/* A step is over without a result (model_step): its pins go (pool_release_holder), slot after slot, and a tick more makes void
 * what iod still owes to it. */
static enum outcome end_step(struct state *s)
{
    struct leader *l = &s->leader;
    bool failed = l->flags & STEP_FAILED;
    if (l->at == NONE)
        l->at = 0;
    if (l->at < SLOTS) {
        unpin(s, l->at++);
        return MOVED;
    }
    forget_step(l);
    new_tick(s);
    l->pc = failed ? L_IDLE : L_ACKNOWLEDGE;
    return failed ? COMPLETED : MOVED;
}

enum outcome begin_layer(const struct protocol *p, struct state *s, uint32_t wanted)
{
    struct leader *l = &s->leader;
    if (l->pc != L_IDLE || !(p->scenario.wanted >> wanted & 1) || wanted == 0)
        return CANNOT;
    if (s->dead || s->supervisor != S_WATCHES || s->iod.pc == I_RECOVER || s->iod.pc == I_REMAP)
        return CANNOT; /* `serving` is not this epoch */
    if (s->epoch != l->epoch || s->follower.epoch != s->epoch || l->acknowledged != s->epoch ||
        s->follower.acknowledged != s->epoch)
        return CANNOT;
    if (s->follower.pc != F_BARRIER_A || s->arrived[FOLLOWER] != (s->arrived[LEADER] + 1) % 4)
        return CANNOT; /* the exchanges of attention come first: all have left the last wave */
    new_tick(s);
    forget_step(l);
    l->wanted = (uint8_t)wanted;
    l->flags = FIRST_PASS;
    next_look(l);
    return MOVED;
}

static enum outcome acknowledge_leader(struct state *s)
{
    s->leader.epoch = s->leader.acknowledged = s->epoch; /* model_acknowledge */
    reset_barrier(s, LEADER, s->epoch);
    s->leader.pc = L_IDLE;
    return MOVED;
}

/* What is left to do when a wave is over. */
static enum outcome wave_over(struct state *s)
{
    struct leader *l = &s->leader;
    if (l->requested) {
        l->pc = L_PUBLISHED;
        return MOVED;
    }
    forget_step(l);
    l->pc = L_IDLE;
    return COMPLETED;
}

static enum outcome retire(const struct protocol *p, struct state *s)
{
    struct leader *l = &s->leader;
    if (p->mutation == FLAG_BEFORE_UNPIN && !(l->flags & BELL_SEEN)) { /* the flag is read too early */
        s->doorbell |= s->starved;
        l->flags |= BELL_SEEN;
        return MOVED;
    }
    for (uint32_t e = 0; e < EXPERTS; e++) {
        if (!(l->pinned >> e & 1))
            continue;
        unpin(s, l->slot[e]);
        l->pinned &= (uint8_t) ~(1u << e);
        l->wanted &= (uint8_t) ~(1u << e);
        l->slot[e] = NONE;
        l->generation[e] = 0;
        break;
    }
    if (l->pinned)
        return MOVED;
    if (l->flags & BELL_SEEN) {
        l->flags &= (uint8_t)~BELL_SEEN;
        return wave_over(s);
    }
    l->pc = L_STARVED;
    return MOVED;
}

/* request_missing: ring_push, one request after the other. */
static void push_missing(const struct protocol *p, struct state *s, const char **ret_broken)
{
    struct leader *l = &s->leader;
    if (p->mutation == FLAG_BEFORE_PUSH && !(l->flags & BELL_SEEN)) {
        s->doorbell |= s->asleep;
        l->flags |= BELL_SEEN;
        return;
    }
    uint8_t e = 0;
    while (!(l->missing >> e & 1))
        e++;
    if (s->ring_count == RING)
        *ret_broken = "the model's ring is too small";
    else
        s->ring[s->ring_count++] = s->epoch == l->epoch ? e : NONE;
    l->missing &= (uint8_t) ~(1u << e);
    l->requested |= (uint8_t)(1u << e);
    if (!l->missing) {
        l->pc = l->flags & BELL_SEEN ? L_PUBLISHED : L_RING;
        l->flags &= (uint8_t) ~(BELL_SEEN | FIRST_PASS);
    }
}

/* The barriers before and behind a wave. */
static enum outcome pass_barrier(const struct protocol *p, struct state *s, const char **ret_broken)
{
    struct leader *l = &s->leader;
    bool behind = l->pc == L_BARRIER_B;
    int status = barrier(p, s, LEADER, l->epoch);
    if (status == 0)
        return CANNOT;
    if (status > 0 && behind && l->flags & LEADER_TAINTED)
        *ret_broken = "worker 0 has used bytes of another expert";
    l->flags &= (uint8_t)~LEADER_TAINTED;
    if (status > 0 && !behind && s->wave_failed)
        l->flags |= STEP_FAILED;
    if (status < 0 || l->flags & STEP_FAILED)
        l->pc = L_OVER;
    else
        l->pc = behind ? L_RETIRE : L_READING;
    return MOVED;
}

enum outcome move_leader(const struct protocol *p, struct state *s, const char **ret_broken)
{
    struct leader *l = &s->leader;
    switch ((enum leader_pc)l->pc) {
    case L_DEAD:
    case L_ASLEEP: return CANNOT;
    case L_IDLE: return l->acknowledged != s->epoch ? acknowledge_leader(s) : CANNOT;
    case L_LOOKUP:
    case L_WORD:
    case L_PIN:
    case L_CHECK: look(p, s); return MOVED;
    case L_PUSH: push_missing(p, s, ret_broken); return MOVED;
    case L_RING:
        s->doorbell |= s->asleep;
        l->pc = L_PUBLISHED;
        return MOVED;
    case L_PUBLISHED: /* await_wave */
        l->flags &= (uint8_t)~FIRST_PASS;
        if (p->mutation != LOOK_BEFORE_PUBLISHED)
            s->published_changed = 0;
        l->pc = L_EPOCH;
        return MOVED;
    case L_EPOCH:
        l->at = NONE;
        if (s->epoch != l->epoch)
            l->pc = L_OVER;
        else
            next_look(l);
        return MOVED;
    case L_PUBLISH:
        publish_wave(s, false);
        l->pc = L_BARRIER_A;
        return MOVED;
    case L_SLEEP: /* futex_wait */
        if (p->mutation == LOOK_BEFORE_PUBLISHED)
            s->published_changed = 0;
        l->pc = s->published_changed ? L_PUBLISHED : L_ASLEEP;
        return MOVED;
    case L_FAILED:
        if (!(l->failed >> l->at & 1))
            *ret_broken = "an answer fails for a load that has not failed";
        publish_wave(s, true);
        l->at = NONE;
        l->pc = L_BARRIER_A;
        return MOVED;
    case L_BARRIER_A:
    case L_BARRIER_B: return pass_barrier(p, s, ret_broken);
    case L_READING:
        for (uint32_t e = 0; e < EXPERTS && p->mutation == UNPIN_BEFORE_BARRIER; e++) {
            if (l->pinned >> e & 1)
                unpin(s, l->slot[e]);
        }
        s->arrived[LEADER] = (s->arrived[LEADER] + 1) % 4;
        l->pc = L_BARRIER_B;
        return MOVED;
    case L_RETIRE: return retire(p, s);
    case L_STARVED: s->doorbell |= s->starved; return wave_over(s);
    case L_OVER: return end_step(s);
    case L_ACKNOWLEDGE: return acknowledge_leader(s);
    }
    return CANNOT;
}

/* --- the follower --- */

enum outcome move_follower(const struct protocol *p, struct state *s, const char **ret_broken)
{
    struct follower *f = &s->follower;
    int status;
    switch ((enum follower_pc)f->pc) {
    case F_DEAD: return CANNOT;
    case F_IDLE: /* a STEP comes, or the epoch is raised */
        if (f->acknowledged != s->epoch) {
            f->pc = F_ACKNOWLEDGE;
            return MOVED;
        }
        s->arrived[FOLLOWER] = (s->arrived[FOLLOWER] + 1) % 4;
        f->pc = F_BARRIER_A;
        return MOVED;
    case F_BARRIER_A:
        status = barrier(p, s, FOLLOWER, f->epoch);
        if (status == 0)
            return CANNOT;
        f->pc = status < 0 ? F_ACKNOWLEDGE : s->wave_failed ? F_IDLE : F_READING;
        return MOVED;
    case F_READING:
        s->arrived[FOLLOWER] = (s->arrived[FOLLOWER] + 1) % 4;
        f->pc = F_BARRIER_B;
        return MOVED;
    case F_BARRIER_B:
        status = barrier(p, s, FOLLOWER, f->epoch);
        if (status == 0)
            return CANNOT;
        if (status > 0 && f->tainted)
            *ret_broken = "worker 1 has used bytes of another expert";
        f->tainted = 0;
        f->pc = status < 0 ? F_ACKNOWLEDGE : F_IDLE;
        return MOVED;
    case F_ACKNOWLEDGE:
        f->tainted = 0;
        f->epoch = f->acknowledged = s->epoch;
        reset_barrier(s, FOLLOWER, s->epoch);
        f->pc = F_IDLE;
        return MOVED;
    }
    return CANNOT;
}

/* Who is reading a wave sees the bytes that stand there at every moment of it. */
void watch_readers(struct state *s)
{
    for (uint32_t e = 0; e < EXPERTS; e++) {
        if (s->leader.pc == L_READING && s->leader.pinned >> e & 1 && s->bytes[s->leader.slot[e]] != e)
            s->leader.flags |= LEADER_TAINTED;
        if (s->follower.pc == F_READING && s->wave >> e & 1 && s->bytes[s->wave_slot[e]] != e)
            s->follower.tainted = 1;
    }
}
