/* The daemon: io_daemon/loader.c, requests.c, placement.c, loads.c, size.c. */
#include "tests/model-check/steps.h"

#include <string.h>

static uint32_t where(const struct state *s, uint32_t expert)
{
    for (uint32_t slot = 0; slot < SLOTS; slot++) {
        if (s->iod.seat[slot] == expert)
            return slot;
    }
    return NONE;
}

static void enqueue(struct iod *i, uint8_t expert)
{
    for (uint32_t q = 0; q < i->queued; q++) {
        if (i->queue[q] == expert)
            return;
    }
    i->queue[i->queued++] = expert;
}

static uint8_t dequeue(struct iod *i)
{
    uint8_t expert = i->queue[0];
    memmove(i->queue, i->queue + 1, EXPERTS - 1);
    i->queue[EXPERTS - 1] = NONE;
    i->queued--;
    return expert;
}

static void clear_seat(const struct protocol *p, struct state *s, uint32_t slot)
{
    if (s->iod.seat[slot] != NONE && p->mutation != MAP_KEPT_ON_EVICTION)
        s->map[s->iod.seat[slot]] = POOL_NOWHERE;
    s->iod.seat[slot] = NONE;
}

static void notify(struct state *s, uint8_t expert, uint8_t back)
{
    s->iod.back = back;
    s->iod.pc = s->iod.live >> expert & 1 ? I_BUMP : back;
}

/* accept_request */
static void accept(const struct protocol *p, struct state *s, uint8_t expert, uint8_t back)
{
    struct iod *i = &s->iod;
    i->pc = back;
    if (expert == NONE)
        return;
    uint32_t slot = where(s, expert);
    bool loading = slot != NONE && i->loading >> slot & 1;
    if (loading && p->mutation == DEMAND_OF_LOADING_LOST)
        return;
    i->live |= (uint8_t)(1u << expert);
    if (slot == NONE) {
        enqueue(i, expert);
    } else if (loading) {
        return;
    } else if (state_of(s, slot) == SLOT_READY) {
        if (p->mutation != DEMAND_OF_READY_LOST)
            notify(s, expert, back);
    } else { /* placement_forget_failed */
        change(s, slot, SLOT_FAILED, SLOT_EMPTY);
        clear_seat(p, s, slot);
        enqueue(i, expert);
    }
}

static uint8_t pop(struct state *s)
{
    uint8_t expert = s->ring[0];
    memmove(s->ring, s->ring + 1, RING - 1);
    s->ring[RING - 1] = 0;
    s->ring_count--;
    return expert;
}

/* placement_open, slot after slot, then the map. Rings are drained first. */
static void recover(const struct protocol *p, struct state *s)
{
    struct iod *i = &s->iod;
    uint32_t at = i->tried;
    if (i->pc == I_REMAP) {
        uint32_t slot = where(s, at);
        s->map[at] = slot == NONE ? POOL_NOWHERE : slot | (uint64_t)generation_of(s->word[slot]) << 32;
        i->tried = (uint8_t)(at + 1) % EXPERTS;
        i->pc = i->tried ? I_REMAP : I_LOCK;
        if (!i->tried && s->standing < SLOTS) /* size_open */
            s->bytes[SLOTS - 1] = NONE;
        return;
    }
    if (at == 0) {
        s->ring_count = 0;
        memset(s->ring, 0, sizeof s->ring);
    }
    switch (state_of(s, at)) {
    case SLOT_READY:
        if (p->mutation == READY_NOT_TAKEN_OVER)
            break;
        if (where(s, s->expert[at]) == NONE)
            i->seat[at] = s->expert[at];
        else
            change(s, at, SLOT_READY, SLOT_EMPTY);
        break;
    case SLOT_LOADING:
        change(s, at, SLOT_LOADING, SLOT_QUARANTINED);
        if (p->mutation == NO_QUARANTINE || p->mutation == QUARANTINE_TOO_SHORT)
            change(s, at, SLOT_QUARANTINED, SLOT_EMPTY);
        break;
    case SLOT_FAILED: change(s, at, SLOT_FAILED, SLOT_EMPTY); break;
    case SLOT_QUARANTINED:
    case SLOT_EMPTY: break;
    }
    i->tried = (uint8_t)(at + 1) % SLOTS;
    i->pc = i->tried ? I_RECOVER : I_REMAP;
}

static bool lock_is_free(const struct state *s)
{
    return !s->late[0] && !s->late[1];
}

/* check_lock */
static void take_lock(const struct protocol *p, struct state *s)
{
    struct iod *i = &s->iod;
    bool got = !(i->flags & LOCK_HELD) && lock_is_free(s);
    if (got)
        i->flags |= LOCK_HELD;
    if (got && p->mutation != QUARANTINE_FOR_EVER) {
        for (uint32_t slot = 0; slot < SLOTS; slot++) {
            if (state_of(s, slot) == SLOT_QUARANTINED)
                change(s, slot, SLOT_QUARANTINED, SLOT_EMPTY);
        }
    }
    i->pc = I_SIZE;
}

static bool is_owed(const struct state *s, uint32_t slot)
{
    return s->iod.live >> s->iod.seat[slot] & 1 && s->used[slot] != NOW;
}

/* size_keep, placement_limit: the last slot empties itself when nobody needs it, then its memory is given back. */
static void keep_size(const struct protocol *p, struct state *s)
{
    struct iod *i = &s->iod;
    uint32_t slot = SLOTS - 1;
    bool loading = i->loading >> slot & 1 && p->mutation != SHRINK_LOADING;
    i->limit = s->target < s->standing ? s->target : s->standing;
    i->flags &= (uint8_t)~OCCUPIED;
    i->pc = I_COLLECT;
    if (i->limit <= slot && i->seat[slot] != NONE && !loading && !is_owed(s, slot)) {
        if (p->mutation == SHRINK_PINNED)
            s->word[slot] &= ~UINT64_C(0xffff0);
        if (state_of(s, slot) != SLOT_LOADING && change(s, slot, state_of(s, slot), SLOT_EMPTY)) {
            i->slot = (uint8_t)slot;
            i->pc = I_UNMAP;
            return;
        }
    }
    bool occupied = i->seat[slot] != NONE || state_of(s, slot) == SLOT_QUARANTINED;
    if (p->mutation == SHRINK_LOADING && state_of(s, slot) == SLOT_LOADING)
        occupied = false;
    if (s->target < s->standing && occupied) {
        i->flags |= OCCUPIED;
    } else if (s->target < s->standing && !s->punching) {
        s->standing = s->target;
        s->punching = 1;
    } else if (s->target > s->standing && (!s->punching || p->mutation == GROW_BEFORE_PUNCH)) {
        s->standing = i->limit = s->target;
    }
}

static bool has_landed(const struct state *s)
{
    return s->landed[0] || s->landed[1];
}

/* finish_load of the first slot whose read has ended: READY or FAILED. */
static void finish(const struct protocol *p, struct state *s)
{
    struct iod *i = &s->iod;
    uint32_t slot = i->slot;
    uint8_t expert = s->flying[slot];
    bool good = s->landed[slot] == LANDED && s->bytes[slot] == expert;
    bool ready = good || p->mutation == NO_CHECKSUM;
    if (!ready)
        s->leader.failed |= (uint8_t)(1u << expert);
    change(s, slot, SLOT_LOADING, ready ? SLOT_READY : SLOT_FAILED);
    i->loading &= (uint8_t) ~(1u << slot);
    s->flying[slot] = NONE;
    s->landed[slot] = 0;
    i->slot = NONE;
    if (p->mutation == PUBLISH_BEFORE_READY)
        i->pc = I_VERDICTS;
    else
        notify(s, expert, I_VERDICTS);
}

/* start_loads: the next demand, and an EMPTY slot for it if there is one. */
static enum outcome serve(const struct protocol *p, struct state *s, uint32_t choice)
{
    struct iod *i = &s->iod;
    bool may_load = i->flags & LOCK_HELD || p->mutation == LOAD_WITHOUT_LOCK || p->mutation == NO_QUARANTINE;
    while (i->queued && (!(i->live >> i->queue[0] & 1) || where(s, i->queue[0]) != NONE))
        dequeue(i);
    i->tried = 0;
    if (choice < EXPERTS) { /* a guess, where no demand waits */
        if (!s->guesses || !may_load || i->queued || where(s, choice) != NONE)
            return CANNOT;
        s->guesses--;
        i->flags |= GUESS;
        i->expert = (uint8_t)choice;
    } else if (choice > EXPERTS) {
        return CANNOT;
    } else if (!may_load || !i->queued) {
        i->pc = may_load && s->starved ? I_SATED : I_SLEEP;
        return MOVED;
    } else {
        i->expert = i->queue[0];
    }
    i->pc = I_EVICT;
    for (uint8_t slot = 0; slot < i->limit; slot++) {
        if (state_of(s, slot) == SLOT_EMPTY && !(i->loading >> slot & 1)) {
            i->slot = slot;
            i->pc = I_TAKE;
            break;
        }
    }
    return MOVED;
}

/* evict_one: slot `choice` is the policy's victim. */
static enum outcome evict(const struct protocol *p, struct state *s, uint32_t choice)
{
    struct iod *i = &s->iod;
    if (i->tried == (1u << SLOTS) - 1) { /* no slot */
        if (choice)
            return CANNOT;
        i->expert = NONE;
        i->tried = 0;
        bool enough = i->flags & (GUESS | SECOND_LOOK);
        i->pc = enough ? I_SLEEP : I_STARVED;
        i->flags &= (uint8_t)~GUESS;
        return MOVED;
    }
    if (choice >= SLOTS || i->tried >> choice & 1)
        return CANNOT;
    uint8_t holds = i->seat[choice];
    bool loading = i->loading >> choice & 1 && p->mutation != EVICT_LOADING;
    bool owed = holds != NONE && is_owed(s, choice) && p->mutation != EVICT_OWED;
    i->tried |= (uint8_t)(1u << choice);
    if (holds == NONE || loading || owed || choice >= i->limit)
        return MOVED;
    if (p->mutation == EVICT_PINNED)
        s->word[choice] &= ~UINT64_C(0xffff0);
    if (p->mutation == EVICT_LOADING && state_of(s, choice) == SLOT_LOADING) {
        s->word[choice] = (s->word[choice] & ~UINT64_C(15)) | SLOT_EMPTY;
        s->late[choice] |= (uint8_t)(1u << s->flying[choice]); /* its read goes on */
        s->flying[choice] = NONE;
        s->landed[choice] = 0;
        i->loading &= (uint8_t) ~(1u << choice);
    } else if (!change(s, choice, state_of(s, choice), SLOT_EMPTY)) {
        return MOVED; /* pinned */
    }
    i->slot = (uint8_t)choice;
    i->tried = 0;
    i->pc = I_UNMAP;
    return MOVED;
}

/* sleep_for_events, up to the wait */
static enum outcome last_look(const struct protocol *p, struct state *s)
{
    struct iod *i = &s->iod;
    if (s->ring_count) {
        i->flags |= ANY;
        accept(p, s, pop(s), I_LAST_LOOK);
        return MOVED;
    }
    bool late = p->mutation == ASLEEP_AFTER_LOOK || p->mutation == BELL_EMPTIED_LATE;
    i->pc = i->flags & ANY ? I_WOKEN : late ? I_LATE : I_WAIT;
    i->flags &= (uint8_t)~ANY;
    return MOVED;
}

static enum outcome wait_for_events(struct state *s)
{
    bool lock = !(s->iod.flags & LOCK_HELD) && lock_is_free(s);
    bool timer = s->iod.flags & OCCUPIED;
    if (!s->doorbell && !has_landed(s) && !lock && !timer)
        return CANNOT;
    s->iod.pc = I_WOKEN;
    return MOVED;
}

/* collect_verdicts: is there a read that has ended? */
static void collect_verdicts(const struct protocol *p, struct state *s)
{
    struct iod *i = &s->iod;
    i->slot = NONE;
    for (uint8_t slot = 0; slot < SLOTS && i->slot == NONE; slot++) {
        if (s->landed[slot] && s->flying[slot] != NONE)
            i->slot = slot;
    }
    i->pc = i->slot == NONE ? I_SERVE : I_FINISH;
    if (i->pc == I_FINISH && p->mutation == PUBLISH_BEFORE_READY)
        notify(s, s->flying[i->slot], I_FINISH);
}

/* evict_one's end, placement_take and loads_begin, store by store. */
static void take_slot(const struct protocol *p, struct state *s)
{
    struct iod *i = &s->iod;
    uint8_t slot = i->slot, expert = i->expert;
    if (i->pc == I_UNMAP) {
        clear_seat(p, s, slot);
        i->pc = expert == NONE ? I_SIZE : I_TAKE;
        i->slot = expert == NONE ? NONE : slot;
    } else if (i->pc == I_TAKE) {
        change(s, slot, SLOT_EMPTY, SLOT_LOADING);
        i->seat[slot] = expert;
        i->loading |= (uint8_t)(1u << slot);
        i->pc = I_NAME;
    } else if (i->pc == I_NAME) {
        s->used[slot] = BEFORE;
        s->expert[slot] = expert;
        i->pc = I_MAP;
    } else {
        s->map[expert] = slot | (uint64_t)generation_of(s->word[slot]) << 32;
        s->flying[slot] = expert;
        i->slot = i->expert = NONE;
        i->flags &= (uint8_t)~GUESS;
        i->pc = I_SERVE;
        if (p->mutation == READY_BEFORE_LANDING) {
            change(s, slot, SLOT_LOADING, SLOT_READY);
            notify(s, expert, I_SERVE);
        }
    }
}

enum outcome move_iod(const struct protocol *p, struct state *s, uint32_t choice)
{
    struct iod *i = &s->iod;
    if (i->pc == I_SERVE)
        return serve(p, s, choice);
    if (i->pc == I_EVICT)
        return evict(p, s, choice);
    if (choice)
        return CANNOT;
    switch ((enum iod_pc)i->pc) {
    case I_DEAD:
    case I_SERVE:
    case I_EVICT: return CANNOT;
    case I_RECOVER:
    case I_REMAP: recover(p, s); return MOVED;
    case I_LOCK: take_lock(p, s); return MOVED;
    case I_SIZE: keep_size(p, s); return MOVED;
    case I_COLLECT:
        if (s->ring_count)
            accept(p, s, pop(s), I_COLLECT);
        else
            i->pc = I_VERDICTS;
        return MOVED;
    case I_BUMP:
        if (p->mutation != WAKE_WITHOUT_BUMP)
            s->published_changed = 1;
        i->pc = I_WAKE;
        return MOVED;
    case I_WAKE:
        if (s->leader.pc == L_ASLEEP && p->mutation != BUMP_WITHOUT_WAKE)
            s->leader.pc = L_PUBLISHED;
        i->pc = i->back;
        i->back = 0;
        return MOVED;
    case I_VERDICTS: collect_verdicts(p, s); return MOVED;
    case I_FINISH: finish(p, s); return MOVED;
    case I_UNMAP:
    case I_TAKE:
    case I_NAME:
    case I_MAP: take_slot(p, s); return MOVED;
    case I_STARVED: /* serve_demands: raised before the second look */
        s->starved = 1;
        i->flags |= SECOND_LOOK;
        i->pc = p->mutation == STARVED_WITHOUT_LOOK ? I_SLEEP : I_SERVE;
        return MOVED;
    case I_SATED:
        s->starved = 0;
        i->pc = I_SLEEP;
        return MOVED;
    case I_SLEEP:
        if (p->mutation != ASLEEP_AFTER_LOOK)
            s->asleep = 1;
        i->flags &= (uint8_t)~SECOND_LOOK;
        i->pc = I_LAST_LOOK;
        return MOVED;
    case I_LAST_LOOK: return last_look(p, s);
    case I_LATE:
        if (p->mutation == ASLEEP_AFTER_LOOK)
            s->asleep = 1;
        else
            s->doorbell = 0;
        i->pc = I_WAIT;
        return MOVED;
    case I_WAIT: return wait_for_events(s);
    case I_WOKEN:
        s->asleep = 0;
        i->pc = I_BELL;
        return MOVED;
    case I_BELL:
        s->doorbell = 0;
        i->pc = I_LOCK;
        return MOVED;
    }
    return CANNOT;
}
