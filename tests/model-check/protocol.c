/* All moves together, and what must hold. */
#include "tests/model-check/steps.h"

#include <stdio.h>
#include <string.h>

const char *const mutation_names[MUTATIONS] = {
    [AS_IT_IS] = "as-it-is",
    [PIN_ANY_STATE] = "pin-any-state",
    [PIN_WITHOUT_CHECKS] = "pin-without-checks",
    [EVICT_PINNED] = "evict-pinned",
    [EVICT_OWED] = "evict-owed",
    [EVICT_LOADING] = "evict-loading",
    [READY_BEFORE_LANDING] = "ready-before-landing",
    [NO_CHECKSUM] = "no-checksum",
    [PUBLISH_BEFORE_READY] = "publish-before-ready",
    [BUMP_WITHOUT_WAKE] = "bump-without-wake",
    [WAKE_WITHOUT_BUMP] = "wake-without-bump",
    [LOOK_BEFORE_PUBLISHED] = "look-before-published",
    [ASLEEP_AFTER_LOOK] = "asleep-after-look",
    [FLAG_BEFORE_PUSH] = "flag-before-push",
    [STARVED_WITHOUT_LOOK] = "starved-without-look",
    [FLAG_BEFORE_UNPIN] = "flag-before-unpin",
    [BELL_EMPTIED_LATE] = "bell-emptied-late",
    [DEMAND_OF_READY_LOST] = "demand-of-ready-lost",
    [DEMAND_OF_LOADING_LOST] = "demand-of-loading-lost",
    [UNPIN_BEFORE_BARRIER] = "unpin-before-barrier",
    [NO_QUARANTINE] = "no-quarantine",
    [QUARANTINE_TOO_SHORT] = "quarantine-too-short",
    [LOAD_WITHOUT_LOCK] = "load-without-lock",
    [QUARANTINE_FOR_EVER] = "quarantine-for-ever",
    [READY_NOT_TAKEN_OVER] = "ready-not-taken-over",
    [NO_EPOCH] = "no-epoch",
    [EPOCH_WITHOUT_WAKE] = "epoch-without-wake",
    [EPOCH_WITHOUT_BUMP] = "epoch-without-bump",
    [EPOCH_UNCHECKED] = "epoch-unchecked",
    [PINS_OF_THE_DEAD] = "pins-of-the-dead",
    [NO_BELL_FOR_PINS] = "no-bell-for-pins",
    [STALE_FAILURE] = "stale-failure",
    [SHRINK_PINNED] = "shrink-pinned",
    [SHRINK_LOADING] = "shrink-loading",
    [GROW_BEFORE_PUNCH] = "grow-before-punch",
    [GENERATION_UNCHECKED] = "generation-unchecked",
    [EXPERT_UNCHECKED] = "expert-unchecked",
    [MAP_KEPT_ON_EVICTION] = "map-kept-on-eviction",
    [PINS_BEFORE_ACKNOWLEDGE] = "pins-before-acknowledge",
};

void protocol_begin(const struct protocol *protocol, struct state *ret_state)
{
    struct state *s = ret_state;
    memset(s, 0, sizeof *s);
    for (uint32_t slot = 0; slot < SLOTS; slot++) {
        s->word[slot] = UINT64_C(1) << 32 | SLOT_EMPTY;
        s->expert[slot] = s->bytes[slot] = s->flying[slot] = s->iod.seat[slot] = NONE;
        s->used[slot] = BEFORE;
    }
    for (uint32_t e = 0; e < EXPERTS; e++) {
        s->map[e] = POOL_NOWHERE;
        s->wave_slot[e] = s->iod.queue[e] = NONE;
    }
    s->epoch = s->leader.epoch = s->leader.acknowledged = s->follower.epoch = s->follower.acknowledged = 1;
    s->arrived_epoch[0] = s->arrived_epoch[1] = 1;
    forget_step(&s->leader);
    s->leader.pc = L_IDLE;
    s->follower.pc = F_IDLE;
    s->iod.pc = I_LOCK;
    s->iod.slot = s->iod.expert = NONE;
    s->iod_deaths = protocol->scenario.iod_deaths;
    s->worker_deaths = protocol->scenario.worker_deaths;
    s->failures = protocol->scenario.failures;
    s->guesses = protocol->scenario.guesses;
    s->resizes = protocol->scenario.resizes;
    s->target = s->standing = s->iod.limit = SLOTS;
}

enum {
    MOVE_FOLLOWER = 8, /* 1-7: the leader begins a layer that wants this set; 0: it goes on */
    MOVE_IOD = 9,      /* and 4 choices more */
    MOVE_SUPERVISOR = 14,
    MOVE_LAND = 15,
    MOVE_BREAK = 17,
    MOVE_LATE = 19, /* slot * EXPERTS + expert */
    MOVE_KILL_IOD = 25,
    MOVE_KILL_LEADER = 26,
    MOVE_KILL_FOLLOWER = 27,
    MOVE_RESIZE = 28,
    MOVE_PUNCH = 29,
    MOVE_END = 30,
};

enum outcome protocol_move(const struct protocol *protocol, struct state *state, uint32_t move, const char **ret_broken)
{
    enum outcome outcome = CANNOT;
    *ret_broken = NULL;
    if (move == 0)
        outcome = move_leader(protocol, state, ret_broken);
    else if (move < MOVE_FOLLOWER)
        outcome = begin_layer(protocol, state, move);
    else if (move == MOVE_FOLLOWER)
        outcome = move_follower(protocol, state, ret_broken);
    else if (move < MOVE_SUPERVISOR)
        outcome = move_iod(protocol, state, move - MOVE_IOD);
    else if (move == MOVE_SUPERVISOR)
        outcome = move_supervisor(protocol, state);
    else if (move < MOVE_BREAK)
        outcome = land(protocol, state, move - MOVE_LAND);
    else if (move < MOVE_LATE)
        outcome = break_read(state, move - MOVE_BREAK);
    else if (move < MOVE_KILL_IOD)
        outcome = land_late(state, (move - MOVE_LATE) / EXPERTS, (move - MOVE_LATE) % EXPERTS);
    else if (move == MOVE_KILL_IOD)
        outcome = kill_iod(state);
    else if (move == MOVE_RESIZE)
        outcome = resize(state);
    else if (move == MOVE_PUNCH)
        outcome = punch(state);
    else if (move < MOVE_END)
        outcome = kill_worker(state, move - MOVE_KILL_LEADER);
    if (outcome != CANNOT) {
        rename_generations(state);
        watch_readers(state);
    }
    return outcome;
}

/* Nothing is asked, read, waited for or being mended. */
static bool is_quiet(const struct state *s)
{
    bool reads = s->flying[0] != NONE || s->flying[1] != NONE || s->late[0] || s->late[1];
    bool processes = s->leader.pc == L_IDLE && s->leader.acknowledged == s->epoch &&
                     s->follower.acknowledged == s->epoch && s->iod.pc == I_WAIT && !s->dead &&
                     s->supervisor == S_WATCHES;
    return processes && !reads && !s->doorbell && !s->ring_count && s->iod.flags & LOCK_HELD &&
           !(s->iod.flags & OCCUPIED) && !s->punching;
}

const char *protocol_invariant(const struct state *state)
{
    if (!is_quiet(state))
        return NULL;
    if (state->target != state->standing)
        return "the pool does not get the size that is wanted";
    for (uint32_t slot = 0; slot < SLOTS; slot++) {
        enum slot_state is = state_of(state, slot);
        uint8_t holds = state->iod.seat[slot];
        if (slot_pins_of(state->word[slot]))
            return "a pin is left";
        if (is == SLOT_LOADING || is == SLOT_QUARANTINED)
            return "a slot is left loading";
        if ((is == SLOT_EMPTY) != (holds == NONE))
            return "a slot is lost: iod's book and the slot differ";
        if (is == SLOT_READY && state->bytes[slot] != holds)
            return "a READY slot has the bytes of another expert";
        if (is == SLOT_READY && state->map[holds] != (slot | UINT64_C(1) << 32))
            return "the map does not know where an expert is";
    }
    return NULL;
}

const char *protocol_check_pin(const struct protocol *protocol, const struct state *state)
{
    if (state->leader.pc != L_LOOKUP)
        return NULL;
    struct state model = *state;
    struct leader *l = &model.leader;
    uint8_t expert = l->at, pinned = l->pinned;
    do
        look(protocol, &model);
    while (l->pc == L_WORD || l->pc == L_PIN || l->pc == L_CHECK);
    words_expose(state);
    struct slot_ref ref;
    int status = pool_pin(&model_pool, expert, LEADER, NOW, &ref);
    bool same = (status == 0) == (pinned != l->pinned);
    for (uint32_t slot = 0; slot < SLOTS; slot++)
        same =
            same && model_pool.slots[slot].state == model.word[slot] && model_pool.slots[slot].used == model.used[slot];
    if (status == 0)
        same = same && ref.index == l->slot[expert] && ref.generation == l->generation[expert];
    return same ? NULL : "the model's four steps and pool_pin() differ";
}

static const char *const leader_steps[] = {
    [L_IDLE] = "acknowledges",
    [L_LOOKUP] = "looks into the map",
    [L_WORD] = "looks at the slot",
    [L_PIN] = "pins",
    [L_CHECK] = "looks whether the slot holds the expert",
    [L_PUSH] = "pushes a request",
    [L_RING] = "rings if iod is asleep",
    [L_PUBLISHED] = "reads `published`",
    [L_EPOCH] = "looks at the epoch",
    [L_SLEEP] = "calls futex_wait",
    [L_PUBLISH] = "publishes a wave",
    [L_BARRIER_A] = "passes the barrier before a wave",
    [L_READING] = "has read its rows",
    [L_BARRIER_B] = "passes the barrier behind a wave",
    [L_RETIRE] = "unpins",
    [L_STARVED] = "rings if iod is starved",
    [L_FAILED] = "publishes a failure",
    [L_OVER] = "gives up the step",
    [L_ACKNOWLEDGE] = "acknowledges",
};
static const char *const follower_steps[] = {
    [F_IDLE] = "comes to the barrier before a wave, or hears of the epoch",
    [F_BARRIER_A] = "passes the barrier before a wave",
    [F_READING] = "has read its rows",
    [F_BARRIER_B] = "passes the barrier behind a wave",
    [F_ACKNOWLEDGE] = "acknowledges",
};
static const char *const iod_steps[] = {
    [I_RECOVER] = "takes over a slot",
    [I_REMAP] = "writes the map anew",
    [I_LOCK] = "tries the lock",
    [I_SIZE] = "looks after the pool's size",
    [I_COLLECT] = "pops the ring",
    [I_BUMP] = "bumps `published`",
    [I_WAKE] = "wakes the leader",
    [I_VERDICTS] = "looks for finished loads",
    [I_FINISH] = "ends a load",
    [I_SERVE] = "serves its queue",
    [I_EVICT] = "tries a victim",
    [I_UNMAP] = "clears the victim's map entry",
    [I_TAKE] = "makes a slot LOADING",
    [I_NAME] = "names the slot's expert",
    [I_MAP] = "writes the map and starts the read",
    [I_STARVED] = "raises `starved`",
    [I_SATED] = "lowers `starved`",
    [I_SLEEP] = "raises `asleep`",
    [I_LAST_LOOK] = "looks at the ring once more",
    [I_LATE] = "does late what it should have done before",
    [I_WAIT] = "wakes",
    [I_WOKEN] = "lowers `asleep`",
    [I_BELL] = "empties the doorbell",
};
static const char *const supervisor_steps[] = {
    [S_WATCHES] = "raises the epoch",
    [S_WAKE] = "wakes all",
    [S_CLEAR] = "clears up behind a dead one, or starts it again",
    [S_BELL] = "rings iod",
};

void protocol_describe(const struct state *before, uint32_t move, const struct state *after, char *ret_text,
                       size_t size)
{
    static const char letters[] = "ELRFQ";
    char what[96];
    if (move == 0)
        snprintf(what, sizeof what, "leader %s", leader_steps[before->leader.pc]);
    else if (move < MOVE_FOLLOWER)
        snprintf(what, sizeof what, "leader begins a layer that wants the experts of mask %u", move);
    else if (move == MOVE_FOLLOWER)
        snprintf(what, sizeof what, "follower %s", follower_steps[before->follower.pc]);
    else if (move < MOVE_SUPERVISOR)
        snprintf(what, sizeof what, "iod %s (choice %u)", iod_steps[before->iod.pc], move - MOVE_IOD);
    else if (move == MOVE_SUPERVISOR)
        snprintf(what, sizeof what, "supervisor %s", supervisor_steps[before->supervisor]);
    else if (move < MOVE_BREAK)
        snprintf(what, sizeof what, "a read lands in slot %u", move - MOVE_LAND);
    else if (move < MOVE_LATE)
        snprintf(what, sizeof what, "a read into slot %u fails", move - MOVE_BREAK);
    else if (move < MOVE_KILL_IOD)
        snprintf(what, sizeof what, "a dead iod's read of expert %u lands in slot %u", (move - MOVE_LATE) % EXPERTS,
                 (move - MOVE_LATE) / EXPERTS);
    else if (move >= MOVE_RESIZE)
        snprintf(what, sizeof what, move == MOVE_RESIZE ? "another size is wanted" : "memory is given back");
    else
        snprintf(what, sizeof what, "%s is killed",
                 move == MOVE_KILL_IOD      ? "iod"
                 : move == MOVE_KILL_LEADER ? "the leader"
                                            : "the follower");
    size_t used = (size_t)snprintf(ret_text, size, "%-64s", what);
    for (uint32_t slot = 0; slot < SLOTS && used < size; slot++)
        used +=
            (size_t)snprintf(ret_text + used, size - used, " %c%s expert %u bytes %u", letters[state_of(after, slot)],
                             slot_pins_of(after->word[slot]) ? "*" : " ", after->expert[slot], after->bytes[slot]);
}
