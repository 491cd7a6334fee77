/* One run of the I/O daemon, the pool and the workers in one thread, on a fake clock, with a fake disk below and a
 * supervisor that makes trouble. All that is random comes from the seed: see README.md. */
#pragma once

#include "io_daemon/copies.h"
#include "io_daemon/loader.h"
#include "io_daemon/placement.h"
#include "io_daemon/verify.h"
#include "shm/control.h"
#include "shm/pool.h"

#define SIM_LAYERS 3u
#define SIM_EXPERTS 8u /* of a layer */
#define SIM_ALL (SIM_LAYERS * SIM_EXPERTS)
#define SIM_TOP_K 2u
#define SIM_SLOTS 16u
#define SIM_STEPS 12u
#define SIM_FOLLOWERS 2u
#define SIM_SLICE_BYTES 4096u
#define SIM_BLOB_BYTES (SIM_SLICE_BYTES * EXPERT_SLICES)
#define SIM_FLYING 128u /* reads under way, of living and dead daemons */
#define SIM_STRIPES 3u  /* of the container, at most */
#define SIM_DRIVES (SIM_STRIPES * MAX_COPIES)
#define SIM_LANES 8u /* reads that a drive works on at once, at most */
#define SIM_FILES 64u
#define SIM_FDS 256u
#define SIM_NEVER UINT64_MAX
#define SAVED_TABLE_BYTES 65536u

enum hurt { HURT_NOT, HURT_CHECKSUM, HURT_EIO, HURT_CUT };

/* A read takes this long in its lane: the first part, luck up to that much, a part for each slice. */
struct sim_speed {
    uint32_t first_ns, luck_ns, slice_ns, lanes;
};

/* What a seed has decided before the run. The schedule has dice of its own, so a changed program keeps its work. */
struct sim_plan {
    uint32_t slots, nodes, verify, steps, followers, depth;
    uint64_t in_flight;
    uint32_t wanted[SIM_STEPS][SIM_LAYERS]; /* bit e: expert e of the layer */
    uint32_t guess_share;                   /* of 8: how much of the next layer is guessed */
    uint32_t faults;                        /* one read in so many is hurt; 0: none */
    uint32_t trouble;                       /* events between two troubles, about; 0: none */
    uint32_t stripes;
    bool mirrored;
    uint32_t used_copies;                /* bit c: copy c opens */
    enum hurt hurt[MAX_COPIES][SIM_ALL]; /* of an expert's bytes in a copy, until healed */
    uint32_t hurt_slice[MAX_COPIES][SIM_ALL];
    uint8_t drive_of[MAX_COPIES][SIM_STRIPES];
    struct sim_speed drive[SIM_DRIVES];
    uint32_t learning; /* enum learning_choice */
};

/* A file of one of the containers. */
struct sim_file {
    ino_t inode;
    uint8_t copy, stripe; /* dense files stand beside the first stripe */
};

struct sim_drive {
    bool dead;
    uint64_t free_ns[SIM_LANES]; /* when each lane has worked off what it was given */
    uint64_t bytes, reads;       /* that the daemon at hand was told of */
};

/* A descriptor of the daemon's lock file that the kernel keeps while reads of one ring are under way. */
struct sim_ring {
    int lock_fd;
    bool alive;
    uint32_t flying;
    uint64_t demanded_ns;   /* when a demand was seen in flight last; 0: never */
    struct io_read *ghosts; /* of a dead daemon: what its own memory still believes to be under way */
};

/* A read on its way. It lands in two halves, then it is told. */
struct flying {
    bool used, landed;
    struct sim_ring *ring;
    struct io_read *read; /* NULL: nobody is there any more to be told */
    uint64_t half_ns, due_ns;
    char *direct;  /* memory that is not the pool's (dense weights) */
    uint32_t node; /* of the pool's object */
    size_t offset, bytes, half;
    int64_t result;
    uint32_t expert, slice;
    uint8_t copy, drive;
    unsigned char *data;
};

enum worker_pc {
    W_IDLE,    /* between steps */
    W_PIN,     /* first look of a layer, an expert at a time */
    W_PUSH,    /* demands */
    W_GUESS,   /* lookaheads */
    W_LOOK,    /* reads `published` and the epoch */
    W_TRY,     /* pins what has come, an expert at a time */
    W_SLEEP,   /* on `published` */
    W_READ,    /* of a wave, an expert at a time */
    W_BARRIER, /* until the followers have read it as well */
    W_RETIRE,  /* unpins, an expert at a time */
    W_DEAD,
    W_DONE,
};

enum wanted { WANTED_MISSING, WANTED_REQUESTED, WANTED_PINNED, WANTED_DONE };

/* Worker 0: what compute/demand.c and moe.c do, one access to what is shared a time. */
struct leader {
    enum worker_pc pc;
    uint32_t epoch, acknowledged;
    uint64_t tick;
    uint32_t step, layer, at, count;
    uint32_t expert[SIM_EXPERTS]; /* of all */
    enum wanted status[SIM_EXPERTS];
    struct slot_ref ref[SIM_EXPERTS];
    bool stale_failure[SIM_EXPERTS];
    uint64_t hash[SIM_EXPERTS];
    uint32_t seen;
    bool woken;
    uint64_t waits_since; /* events; 0: does not wait */
    uint64_t fold;
    uint32_t wave; /* number of the one that was published last */
};

/* The other workers read what worker 0 has pinned. */
struct follower {
    uint32_t acknowledged;
    uint32_t wave, at; /* the wave that it has read, or reads */
    bool reading, tainted;
};

/* What happened, for the counters of the daemon to be held against. Goes back with a dead daemon's writes. */
struct tally {
    uint64_t loads, failures, evictions, reads, bytes, verified;
};

enum trouble { T_RESIZE, T_HOLD, T_KILL, T_KILL_IN_TURN, T_STOP, T_WORKER, T_EPOCH, T_HEAL, T_DRIVE, TROUBLES };

/* Summed over all seeds. */
struct coverage {
    uint64_t seeds, events, steps, failed_steps, waves, loads, guesses, evictions, late_reads, quarantined, flips,
        refused, preempted, reads_hurt, punches, troubles[TROUBLES], dead_drives, failing_reads, dropped, saved,
        fast_reads, slow_reads, dense_reads[MAX_COPIES], warmups, remembered;
};

struct simulation {
    /* of the process */
    const char *instance, *rundir;
    char container[SIM_STRIPES + 1][MAX_COPIES][64]; /* by stripes: paths */
    uint64_t identity[SIM_STRIPES + 1];
    struct sim_file files[SIM_FILES]; /* of all containers */
    uint32_t file_count;
    struct control *control;
    int doorbell_fd;
    unsigned char (*image)[SIM_BLOB_BYTES]; /* [SIM_ALL] what each expert's bytes are */
    uint64_t image_hash[SIM_ALL];
    unsigned char (*buffers)[SIM_BLOB_BYTES]; /* [SIM_FLYING], aligned for O_DIRECT */
    bool tracing;
    unsigned char *saved_control, *saved_table; /* what others saw when the daemon died */
    struct coverage *coverage;
    /* of the seed */
    uint64_t seed, dice;
    struct sim_plan plan;
    struct pool pool; /* the workers' view */
    uint64_t now_ns, events, next_trouble, idle_timeouts;
    uint32_t troubles;
    bool finished;
    struct leader leader;
    struct follower follower[SIM_FOLLOWERS];

    struct sim_drive drive[SIM_DRIVES];
    /* Bit e: since the last load of expert e began, that copy could not be read; its bytes were wrong. */
    uint32_t bad_reads[MAX_COPIES], bad_bytes[MAX_COPIES];
    uint32_t remembered[SIM_ALL]; /* uses of each expert, in the usage file */
    const struct sim_file *file_of[SIM_FDS];

    struct flying flying[SIM_FLYING];
    bool eio_spent[SIM_ALL], stall_spent[SIM_ALL];
    uint8_t flipped[SIM_ALL];   /* bit s: slice s came wrong once in this load */
    uint64_t shadow[SIM_SLOTS]; /* the slots' words, when they were looked at last */
    struct tally tally;
    /* of the daemon at hand */
    struct placement *placement; /* NULL: none */
    struct sim_ring *ring;
    bool opening, running, dead, stop, stop_told, busy, in_placement_open;
    bool timer_only;             /* it woke for a demand without a slot, and nobody had rung */
    uint64_t hooks, die_at_hook; /* 0: not in a turn */
    uint32_t registered_nodes;   /* whose memory the ring knows; on each the pool is one chunk */
    void *(*job)(void *);
    void *job_argument;
    struct verifier *verifiers[READER_DRIVES];
    struct tally saved_tally;
    struct copies *copies;
    struct reader *reader;
    uint32_t dropped, failing, must_drop; /* bit c: copy c is; has failed for good; so the next turn must drop it */
    uint32_t drops_told, refusals_told;   /* lines in the log */
    bool full;                            /* the method has refused a read since the last turn */
    bool in_learning;                     /* opening or closing it */
    void *(*writer)(void *);              /* learning's */
    void *writer_argument;
    uint32_t to_warm, last_warmed; /* experts that the start has to queue for warming up; the last of them so far */
    uint64_t uses_at_start;
};

/* main.c; a seam gets nothing of its caller's, so it finds the simulation here */
extern struct simulation *the_simulation;
__attribute__((format(printf, 2, 3), noreturn)) void violated(const struct simulation *sim, const char *format, ...);
__attribute__((format(printf, 2, 3))) void trace(const struct simulation *sim, const char *format, ...);
uint32_t dice(struct simulation *sim, uint32_t sides);

/* world.c: who does what next */
void run_seed(struct simulation *sim);
/* One event of anybody but the daemon. False: nobody has anything to do now. */
bool world_event(struct simulation *sim);
/* When something will happen by itself. */
uint64_t world_next(const struct simulation *sim);
/* Nothing is left to do but for the daemon. */
bool world_is_done(const struct simulation *sim);
/* Called where the daemon touches what others see: they may act in between, or it may die here. */
void world_hook(struct simulation *sim);
/* SIGKILL: what the daemon does from here on did not happen. */
void world_kill(struct simulation *sim);
void ring_doorbell(const struct simulation *sim);

/* worker.c */
bool leader_step(struct simulation *sim);
bool follower_step(struct simulation *sim, uint32_t which);
uint64_t expected_fold(const struct simulation *sim, uint32_t step);

/* disk.c */
extern const struct io_method sim_method;
/* A read lands, or half of it. False: none is due. */
bool disk_step(struct simulation *sim);
void disk_kill(struct simulation *sim);
uint32_t disk_flying(const struct simulation *sim);

/* drives.c */
void drives_plan(struct simulation *sim);
uint32_t drive_of(const struct simulation *sim, const struct sim_file *file);
const struct sim_file *drives_file(const struct simulation *sim, int fd);
uint64_t drives_due(struct simulation *sim, uint32_t drive, size_t bytes);
uint64_t drives_most_bytes(const struct simulation *sim, bool background); /* that may fly */
/* A load of the expert begins. */
void drives_begin_load(struct simulation *sim, uint32_t expert);
bool drives_hurt(const struct simulation *sim, uint32_t expert);
void drives_trouble(struct simulation *sim);
void drives_note_result(struct simulation *sim, const struct flying *flying);
void drives_check_read(struct simulation *sim, const struct flying *flying);
/* `may_load`: no dead daemon's reads can be under way. */
void drives_check_turn(struct simulation *sim, bool may_load);

/* learning.c */
void learning_plan(struct simulation *sim);
void learning_begin(struct simulation *sim);
void learning_check_start(struct simulation *sim);

/* seams.c: the functions of the daemon and of shm that are replaced or watched (-Wl,--wrap) */
bool verify_step(struct simulation *sim);
bool job_step(struct simulation *sim);
bool verify_due(const struct simulation *sim, uint64_t *ret_ns);

/* checks.c */
void check_slot(const struct simulation *sim, uint32_t slot);
void check_event(struct simulation *sim);
/* After a death: the counters stand, at most a little behind what happened. */
void check_counters_of_dead(struct simulation *sim);
void check_turn(struct simulation *sim, bool may_load);
void check_end(struct simulation *sim);
uint64_t hash_slot(const struct simulation *sim, uint32_t slot);
uint64_t hash_blob(const unsigned char *blob);
