/* The protocol of the pool as a machine of small steps: worker 0 (the leader, who asks and pins), worker 1 (the
 * follower, who reads what the leader has pinned), iod, the kernel that lands reads, and the supervisor.
 *
 * A move is one access to something that another process writes, together with what its process does in private until
 * the next one. Moves call the very functions of shm (slot_change, slot_pin, slot_unpin, pool_lookup) on the state's
 * words; what is written down again here is the order in which compute/demand.c, compute/model.c, io_daemon/loader.c,
 * requests.c, placement.c, loads.c, size.c and cmd/supervisor/supervise.c call them. Each step names its function.
 *
 * What the model leaves out: weak memory (all moves are in one order; test_pool_stress runs under TSan), a full request
 * ring, lies of a neighbour, wrap of the 32-bit generation, and the policy: any slot that may go is a victim. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define SLOTS 2u
#define EXPERTS 3u
#define RING 12u
#define NONE 7u /* no expert, no slot */

/* Lines of the protocol that a run can leave out or change. Each is refuted, but for those of `redundant`. */
enum mutation {
    AS_IT_IS,
    PIN_ANY_STATE,          /* pool_pin does not look whether the slot is READY */
    PIN_WITHOUT_CHECKS,     /* neither generation nor expert are looked at: a stale map entry is believed */
    EVICT_PINNED,           /* eviction ignores pins */
    EVICT_OWED,             /* eviction takes what was delivered and not used yet */
    EVICT_LOADING,          /* a slot with a read in flight is given again */
    READY_BEFORE_LANDING,   /* READY when the read was sent */
    NO_CHECKSUM,            /* what a failed read left becomes READY */
    PUBLISH_BEFORE_READY,   /* `published` is bumped and woken, then the slot changes */
    BUMP_WITHOUT_WAKE,      /* a sleeper is not woken */
    WAKE_WITHOUT_BUMP,      /* who is about to sleep is not warned */
    LOOK_BEFORE_PUBLISHED,  /* the leader reads the futex word after it has looked at the slots */
    ASLEEP_AFTER_LOOK,      /* iod raises `asleep` after its last look at the ring */
    FLAG_BEFORE_PUSH,       /* the leader reads `asleep` before it pushes */
    STARVED_WITHOUT_LOOK,   /* iod raises `starved` and does not look again */
    FLAG_BEFORE_UNPIN,      /* the leader reads `starved` before it unpins */
    BELL_EMPTIED_LATE,      /* iod empties the doorbell between its last look and its wait */
    DEMAND_OF_READY_LOST,   /* a request for an expert that is READY is not answered */
    DEMAND_OF_LOADING_LOST, /* a request for an expert that is LOADING is not remembered */
    UNPIN_BEFORE_BARRIER,   /* the leader gives a wave back before all have finished it */
    NO_QUARANTINE,          /* a new iod takes LOADING slots for empty and loads at once */
    LOAD_WITHOUT_LOCK,      /* a new iod reads into the pool before it has the lock */
    QUARANTINE_FOR_EVER,    /* a new iod never ends the quarantine */
    READY_NOT_TAKEN_OVER,   /* a new iod leaves READY slots out of its book */
    NO_EPOCH,               /* a death does not raise the epoch */
    EPOCH_WITHOUT_WAKE,     /* raising it wakes nobody */
    EPOCH_WITHOUT_BUMP,     /* nor changes the word that a sleeper has read */
    EPOCH_UNCHECKED,        /* a barrier lets a step of an old epoch go on */
    PINS_OF_THE_DEAD,       /* a dead worker's pins stay */
    STALE_FAILURE,          /* an old failure is taken for the answer */
    SHRINK_PINNED,          /* a pool that shrinks takes a slot that is pinned */
    SHRINK_LOADING,         /* ... or into which a read is in flight */
    GROW_BEFORE_PUNCH,      /* a slot is given again while its memory is still being given back */
    /* Alone these change nothing that can be seen: another line does the same work. */
    GENERATION_UNCHECKED, /* the expert in the slot is still looked at */
    EXPERT_UNCHECKED,     /* the generation is still looked at */
    QUARANTINE_TOO_SHORT, /* a new iod empties LOADING slots at once, but loads nothing before it has the lock */
    NO_BELL_FOR_PINS,     /* a dead worker's pins are cleared without ringing iod: the requests that waited are void */
    MAP_KEPT_ON_EVICTION, /* the entry is stale, and is found to be */
    PINS_BEFORE_ACKNOWLEDGE, /* what is read then does not count any more */
    MUTATIONS,
};

extern const char *const mutation_names[MUTATIONS];

/* What may happen to a run. */
struct scenario {
    const char *name;
    uint8_t iod_deaths, worker_deaths, failures; /* at most */
    uint8_t guesses;                             /* at most: iod loads what nobody asked for: lookahead, warm-up */
    uint8_t resizes;                             /* at most: the last slot is taken away, or given back */
    uint8_t wanted; /* the sets of experts that a layer may want: bit s, of set s as bits of experts */
    bool large;     /* millions of states */
};

struct leader {
    uint8_t pc, epoch, acknowledged;
    uint8_t wanted, missing, requested, pinned, stale_failure; /* bits of experts */
    uint8_t slot[EXPERTS], generation[EXPERTS];                /* of what is pinned, and of an old failure */
    uint8_t at, at_slot, at_generation;                        /* the expert that is looked at */
    uint8_t flags;                                             /* enum leader_flag */
    uint8_t failed;                                            /* experts whose load has failed since the tick began */
};

struct follower {
    uint8_t pc, epoch, acknowledged, tainted;
};

struct iod {
    uint8_t pc, back; /* `back`: where to go on after a notice */
    uint8_t live;     /* bits: experts with a live demand */
    uint8_t queue[EXPERTS], queued;
    uint8_t seat[SLOTS], loading; /* the book: expert of each slot; bits of slots */
    uint8_t expert, slot, tried;  /* at hand */
    uint8_t limit;                /* slots that may be taken */
    uint8_t flags;                /* enum iod_flag */
};

/* No padding but at the end, because states are compared as bytes (STATE_BYTES of them). Generations and
 * ticks are renamed after every move, so that they do not grow: a generation is 1 (the slot's) or 0 (an old one), a tick
 * NOW (the leader's) or BEFORE. */
struct state {
    uint64_t word[SLOTS], map[EXPERTS];
    uint8_t expert[SLOTS], used[SLOTS];
    uint8_t bytes[SLOTS]; /* the expert whose bytes stand in the slot */
    uint8_t asleep, starved, doorbell, published_changed, epoch;
    uint8_t target, standing, punching; /* slots: wanted, with memory; 1: the last one's is being given back */
    uint8_t ring[RING], ring_count;     /* experts; NONE: a request of an old tick or epoch */
    uint8_t wave, wave_slot[EXPERTS], wave_failed; /* the list that the leader publishes: bits, and where */
    uint8_t arrived[2], arrived_epoch[2];          /* barrier: sequence modulo 4 */
    /* the kernel: the expert being read into a slot by the living iod, how it ended; reads of dead ones, as bits: with
     * the lock file in their ring, and without */
    uint8_t flying[SLOTS], landed[SLOTS], late[SLOTS], uncovered[SLOTS];
    struct leader leader;
    struct follower follower;
    struct iod iod;
    uint8_t supervisor, release, dead; /* step, slot, bits of who is dead and not restarted */
    uint8_t iod_deaths, worker_deaths, failures, resizes, guesses; /* left */
};

#define STATE_BYTES (offsetof(struct state, guesses) + 1)

/* One run's rules. */
struct protocol {
    enum mutation mutation;
    struct scenario scenario;
};

void protocol_begin(const struct protocol *protocol, struct state *ret_state);

#define MOVES 30u /* numbers of moves */

enum outcome {
    CANNOT,    /* the move is not possible here */
    MOVED,     /* *state is the next one */
    COMPLETED, /* the same, and a layer was finished or an honest failure was told: progress */
    FATE,      /* the same, by a death or a failed read, on which nobody may count */
};

/* Makes move number `move` of a state. *ret_broken is a sentence where this breaks a promise, else NULL. */
enum outcome protocol_move(const struct protocol *protocol, struct state *state, uint32_t move,
                           const char **ret_broken);

/* What must hold in a state: NULL, or a sentence. */
const char *protocol_invariant(const struct state *state);

/* Where the leader is about to pin: NULL if the model's steps, made without interruption, do what pool_pin() does, else a
 * sentence. */
const char *protocol_check_pin(const struct protocol *protocol, const struct state *state);

/* Says what the move does, for a trace. */
void protocol_describe(const struct state *before, uint32_t move, const struct state *after, char *ret_text,
                       size_t size);
