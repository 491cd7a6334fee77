/* What the files of the model share: the places in each process's program, and the words of the pool, changed by shm's own
 * functions. */
#pragma once

#include "tests/model-check/protocol.h"

#include "shm/pool.h"

enum { BEFORE = 1, NOW = 2 };               /* ticks */
enum { LEADER = 0, FOLLOWER = 1, IOD = 2 }; /* bits of `dead`; the first two are holders' numbers too */
enum { LANDED = 1, BROKEN = 2 };            /* how a read ended */

enum leader_pc {
    L_DEAD,
    L_IDLE,
    L_LOOKUP,
    L_WORD,
    L_PIN,
    L_CHECK,
    L_PUSH,
    L_RING,
    L_PUBLISHED,
    L_EPOCH,
    L_SLEEP,
    L_ASLEEP,
    L_PUBLISH,
    L_BARRIER_A,
    L_READING,
    L_BARRIER_B,
    L_RETIRE,
    L_STARVED,
    L_FAILED,
    L_OVER,
    L_ACKNOWLEDGE,
};
enum leader_flag { FIRST_PASS = 1, LEADER_TAINTED = 2, BELL_SEEN = 4, STEP_FAILED = 8 };

enum follower_pc { F_DEAD, F_IDLE, F_BARRIER_A, F_READING, F_BARRIER_B, F_ACKNOWLEDGE };

enum iod_pc {
    I_DEAD,
    I_RECOVER,
    I_REMAP,
    I_LOCK,
    I_SIZE,
    I_COLLECT,
    I_BUMP,
    I_WAKE,
    I_VERDICTS,
    I_FINISH,
    I_SERVE,
    I_EVICT,
    I_UNMAP,
    I_TAKE,
    I_NAME,
    I_MAP,
    I_STARVED,
    I_SATED,
    I_SLEEP,
    I_LAST_LOOK,
    I_LATE, /* only in mutants: between the last look and the wait */
    I_WAIT,
    I_WOKEN,
    I_BELL,
};
enum iod_flag { LOCK_HELD = 1, ANY = 2, SECOND_LOOK = 4, GUESS = 8, OCCUPIED = 16 };

enum supervisor_pc { S_WATCHES, S_WAKE, S_CLEAR, S_BELL };

/* words.c */
extern struct pool model_pool; /* what shm's functions look at, filled by words_expose() */
void words_expose(const struct state *s);
bool change(struct state *s, uint32_t slot, enum slot_state from, enum slot_state to); /* slot_change */
bool pin(struct state *s, uint32_t slot, uint32_t generation);                         /* slot_pin, of the leader */
void unpin(struct state *s, uint32_t slot);                                            /* slot_unpin, of the leader */
uint32_t generation_of(uint64_t word);
enum slot_state state_of(const struct state *s, uint32_t slot);
void rename_generations(struct state *s);
void void_requests(struct state *s);
void new_tick(struct state *s);

/* workers.c */
void forget_step(struct leader *l);
void reset_barrier(struct state *s, uint32_t who, uint8_t epoch);
void look(const struct protocol *p, struct state *s);
enum outcome begin_layer(const struct protocol *p, struct state *s, uint32_t wanted);
enum outcome move_leader(const struct protocol *p, struct state *s, const char **ret_broken);
enum outcome move_follower(const struct protocol *p, struct state *s, const char **ret_broken);
void watch_readers(struct state *s);

/* iod.c */
enum outcome move_iod(const struct protocol *p, struct state *s, uint32_t choice);

/* fate.c: the kernel's reads, deaths, and the supervisor */
enum outcome land(const struct protocol *p, struct state *s, uint32_t slot);
enum outcome land_late(struct state *s, uint32_t slot, uint32_t expert);
enum outcome break_read(struct state *s, uint32_t slot);
enum outcome kill_iod(struct state *s);
enum outcome kill_worker(struct state *s, uint32_t who);
enum outcome resize(struct state *s);
enum outcome punch(struct state *s);
enum outcome move_supervisor(const struct protocol *p, struct state *s);
