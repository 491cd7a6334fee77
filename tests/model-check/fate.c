/* What nobody decides: reads that land or fail, processes that die; and the supervisor, who clears up
 * (cmd/supervisor/supervise.c, shm/control.c). */
#include "tests/model-check/steps.h"

#include <string.h>

enum outcome land(const struct protocol *p, struct state *s, uint32_t slot)
{
    if (s->flying[slot] == NONE || s->landed[slot])
        return CANNOT;
    s->bytes[slot] = s->flying[slot];
    s->landed[slot] = LANDED;
    if (p->mutation == READY_BEFORE_LANDING) {
        s->iod.loading &= (uint8_t) ~(1u << slot);
        s->flying[slot] = NONE;
        s->landed[slot] = 0;
    }
    return MOVED;
}

enum outcome land_late(struct state *s, uint32_t slot, uint32_t expert)
{
    uint8_t bit = (uint8_t)(1u << expert);
    if (!((s->late[slot] | s->uncovered[slot]) & bit))
        return CANNOT;
    s->bytes[slot] = (uint8_t)expert;
    s->late[slot] &= (uint8_t)~bit;
    s->uncovered[slot] &= (uint8_t)~bit;
    return MOVED;
}

/* Somebody wants the last slot away, or back again. */
enum outcome resize(struct state *s)
{
    if (!s->resizes)
        return CANNOT;
    s->resizes--;
    s->target = s->target == SLOTS ? SLOTS - 1 : SLOTS;
    s->doorbell = 1;
    return FATE;
}

/* pool_punch, in a thread of iod's. */
enum outcome punch(struct state *s)
{
    if (!s->punching)
        return CANNOT;
    s->bytes[SLOTS - 1] = NONE;
    s->punching = 0;
    s->doorbell = 1;
    return MOVED;
}

/* A read fails: what stands in the slot is neither the old nor the new. */
enum outcome break_read(struct state *s, uint32_t slot)
{
    if (!s->failures || s->flying[slot] == NONE || s->landed[slot])
        return CANNOT;
    s->failures--;
    s->bytes[slot] = NONE;
    s->landed[slot] = BROKEN;
    return FATE;
}

enum outcome kill_iod(struct state *s)
{
    if (!s->iod_deaths || s->iod.pc == I_DEAD)
        return CANNOT;
    bool covered = s->iod.flags & LOCK_HELD;
    s->iod_deaths--;
    for (uint32_t slot = 0; slot < SLOTS; slot++) {
        if (s->flying[slot] != NONE && !s->landed[slot]) {
            uint8_t *reads = covered ? &s->late[slot] : &s->uncovered[slot];
            *reads |= (uint8_t)(1u << s->flying[slot]);
        }
        s->flying[slot] = NONE;
        s->landed[slot] = 0;
    }
    memset(&s->iod, 0, sizeof s->iod);
    memset(s->iod.queue, NONE, sizeof s->iod.queue);
    memset(s->iod.seat, NONE, sizeof s->iod.seat);
    s->iod.slot = s->iod.expert = NONE;
    s->iod.pc = I_DEAD;
    s->punching = 0; /* by its successor, if not by it */
    s->dead |= 1u << IOD;
    s->supervisor = S_WATCHES;
    return FATE;
}

enum outcome kill_worker(struct state *s, uint32_t who)
{
    bool gone = who == LEADER ? s->leader.pc == L_DEAD : s->follower.pc == F_DEAD;
    if (!s->worker_deaths || gone)
        return CANNOT;
    s->worker_deaths--;
    if (who == LEADER) {
        forget_step(&s->leader);
        s->leader.pc = L_DEAD;
    } else {
        s->follower.pc = F_DEAD;
        s->follower.tainted = 0;
    }
    s->dead |= (uint8_t)(1u << who);
    s->supervisor = S_WATCHES;
    return FATE;
}

static bool all_acknowledged(const struct state *s)
{
    return (s->leader.pc == L_DEAD || s->leader.acknowledged == s->epoch) &&
           (s->follower.pc == F_DEAD || s->follower.acknowledged == s->epoch);
}

/* clear_dead: iod at once; workers when nobody can still be in an old step, after their pins. */
static enum outcome clear_dead(const struct protocol *p, struct state *s)
{
    if (s->dead >> IOD & 1) {
        s->dead &= (uint8_t) ~(1u << IOD);
        s->iod.pc = I_RECOVER;
        return MOVED;
    }
    if (!all_acknowledged(s) && p->mutation != PINS_BEFORE_ACKNOWLEDGE)
        return CANNOT;
    if (s->dead >> LEADER & 1 && s->release < SLOTS) { /* pool_release_holder */
        if (p->mutation != PINS_OF_THE_DEAD)
            unpin(s, s->release);
        s->release++;
        return MOVED;
    }
    s->release = 0;
    if (s->dead >> LEADER & 1) {
        s->dead &= (uint8_t) ~(1u << LEADER);
        s->leader.pc = L_IDLE;
        s->leader.epoch = s->leader.acknowledged = s->epoch;
        reset_barrier(s, LEADER, s->epoch);
        s->supervisor = S_BELL;
        return MOVED;
    }
    s->dead = 0;
    s->follower.pc = F_IDLE;
    s->follower.epoch = s->follower.acknowledged = s->epoch;
    reset_barrier(s, FOLLOWER, s->epoch);
    s->supervisor = S_BELL;
    return MOVED;
}

enum outcome move_supervisor(const struct protocol *p, struct state *s)
{
    switch ((enum supervisor_pc)s->supervisor) {
    case S_WATCHES:
        if (!s->dead)
            return CANNOT;
        if (p->mutation != NO_EPOCH) { /* control_raise_epoch: both words change before the wake */
            s->epoch++;
            void_requests(s);
        }
        if (p->mutation != EPOCH_WITHOUT_BUMP && p->mutation != NO_EPOCH)
            s->published_changed = 1;
        s->supervisor = S_WAKE;
        return MOVED;
    case S_WAKE:
        if (s->leader.pc == L_ASLEEP && p->mutation != EPOCH_WITHOUT_WAKE && p->mutation != NO_EPOCH)
            s->leader.pc = L_PUBLISHED;
        s->doorbell = 1;
        s->supervisor = S_CLEAR;
        return MOVED;
    case S_CLEAR: {
        enum outcome outcome = clear_dead(p, s);
        if (outcome == MOVED && !s->dead && s->supervisor == S_CLEAR)
            s->supervisor = S_WATCHES;
        return outcome;
    }
    case S_BELL: /* iod may wait for a slot without pins */
        if (p->mutation != NO_BELL_FOR_PINS)
            s->doorbell = 1;
        s->supervisor = s->dead ? S_CLEAR : S_WATCHES;
        return MOVED;
    }
    return CANNOT;
}
