/* Segment `control`: what all processes of an instance must know, and the words on which they meet.
 *
 * The supervisor creates it, fills the facts, and only then starts children. One cache line a writer. Any tool may read
 * at any time. */
#pragma once

#include "proto/message.h"
#include "proto/model_config.h"
#include "shm/histogram.h"
#include "shm/ring.h"
#include "shm/segment.h"
#include "shm/uses.h"

#include <stdatomic.h>

#define MAX_WORKERS 8u
#define MAX_CORES 1024u
#define MAX_COPIES 2u  /* of the container: the one that was named first, and its mirror */
#define MAX_DRIVES 16u /* that iod tells apart */
#define HOLD_WORDS (MODEL_MAX_LAYERS * MODEL_MAX_EXPERTS / 64) /* a bit for each expert */

enum activations { ACTIVATIONS_INT8 = 1, ACTIVATIONS_F32 = 2 };
enum kv_format { KV_F16 = 1, KV_F32 = 2 };
enum io_choice { IO_AUTO = 0, IO_URING = 1, IO_PREAD = 2 };
/* When a slice of an expert is held against its checksum: when it is first read in the life of iod (or since it failed),
 * each time, never. */
enum verify_choice { VERIFY_FIRST = 0, VERIFY_ALWAYS = 1, VERIFY_OFF = 2 };
enum prefetch { PREFETCH_AUTO = 0, PREFETCH_OFF = 1, PREFETCH_ON = 2 };
/* The use of experts in earlier sessions: no matter, read at the start, read and added to. */
enum learning_choice { LEARNING_OFF = 0, LEARNING_READ = 1, LEARNING_ON = 2 };
/* A copy of the container: there is none; read; not used because it does not open or is another; given up when it failed. */
enum copy_state { COPY_NONE = 0, COPY_USED = 1, COPY_REFUSED = 2, COPY_DROPPED = 3 };

/* Constant for the life of the instance. W: supervisor, before the first child; R: all, copied and checked at
 * attach. */
struct facts {
    struct model_config config;
    char container[512];                  /* absolute path */
    char mirror[512];                     /* absolute path of a second copy; empty: none */
    uint64_t identity;                    /* container_open()'s; iod refuses another */
    uint32_t dense_format, expert_format; /* enum weight_format */
    uint32_t stripes;                     /* of the container: files that an expert is spread over */
    uint32_t workers, threads;            /* threads: a worker */
    uint32_t nodes;                       /* memory nodes of the pool: 1, 2, 4 or 8 */
    uint32_t spin;                        /* 1: brief spinning is allowed (all teams together fit the cores) */
    uint32_t activations, kv, io;         /* the enums above */
    uint32_t index_topk;                  /* the config's, or the setting's */
    uint32_t max_rows;                    /* rows of a STEP: at least prefill_chunk and the slots */
    uint32_t logit_rows;                  /* rows of logits that one STEP may ask for */
    uint32_t kv_pages, page_tokens;       /* pages of the KV segment, tokens a page */
    uint32_t context;                     /* tokens a sequence may have */
    /* the settings of these names; prefill_chunk <= max_rows, slots <= logit_rows */
    uint32_t slots, queue, prefill_chunk;
    uint32_t pool_slots;               /* of the table: what the pool may grow to */
    uint32_t hugepages;                /* 0 or 1 */
    uint32_t verify;                   /* enum verify_choice */
    uint32_t prefetch;                 /* enum prefetch */
    uint32_t learning;                 /* enum learning_choice */
    uint32_t isa;                      /* kernels: enum kernel_isa (compute/kernel.h), 0 auto */
    uint32_t worker_node[MAX_WORKERS]; /* memory node of each worker */
    uint16_t core_count[MAX_WORKERS];  /* cores of each worker ... */
    /* ... and which; thread t of worker w is pinned to cores[w][t % core_count[w]] */
    uint16_t cores[MAX_WORKERS][MAX_CORES];
};

/* What looking ahead was good for, in experts: asked for; used, those of them that their layer then wanted; ready, those of the used that
 * were READY when the layer began; missed, those that an answer's row wanted and that were neither asked for nor READY. Recall is used /
 * (used + missed), precision used / asked. */
enum ahead_count { AHEAD_ASKED, AHEAD_USED, AHEAD_READY, AHEAD_MISSED, AHEAD_COUNTS };

/* "asked", "used", ... */
const char *ahead_count_name(enum ahead_count count);

/* Adds to a counter that only this process writes and anybody may read. */
static inline void add_counter(_Atomic uint64_t *counter, uint64_t value)
{
    atomic_store_explicit(counter, atomic_load_explicit(counter, memory_order_relaxed) + value, memory_order_relaxed);
}

struct worker_line {
    /* W: iod; R: the worker, futex. Bumped after any slot changed to READY or FAILED on behalf of this worker, and by
     * the supervisor after it raised the epoch. */
    _Alignas(CACHE_LINE) _Atomic uint32_t published;
    /* W: the worker; R: all workers. The barrier of the exchange: it has stored everything up to `arrived`, epoch << 32
     * | sequence. `sequence` is the futex word: it changes after every change of `arrived`, and when the supervisor
     * raises the epoch, and never returns to a value that a sleeper may have read. */
    _Alignas(CACHE_LINE) _Atomic uint64_t arrived;
    _Atomic uint32_t sequence;
    _Atomic uint32_t waiters; /* W: all workers, how many sleep on `sequence` */
    /* W: the worker; R: iod, supervisor. Grows with every layer of every step; a demand with an older tick is void. */
    _Alignas(CACHE_LINE) _Atomic uint64_t tick;
    _Atomic uint32_t acknowledged; /* the last epoch that this worker has seen and abandoned everything older for */
    /* counters, W: the worker, relaxed */
    /* times: see struct step_done */
    _Atomic uint64_t steps, rows, step_ns, part_ns[STEP_PARTS], matmul_ns, hits, misses;
    _Atomic uint64_t ahead[AHEAD_COUNTS]; /* by enum ahead_count; worker 0 */
};

/* A drive with files of the container, as iod has known it since it started. */
struct drive_line {
    _Atomic uint64_t device; /* dev_t */
    _Atomic uint32_t copies; /* bit c: files of copy c stand there */
    _Atomic uint64_t bytes, reads, read_ns;
    _Atomic uint64_t rate; /* bytes a second, a moving average */
};

/* A copy of the container, since the instance started. */
struct copy_line {
    _Atomic uint32_t state;           /* enum copy_state */
    _Atomic uint64_t read_failures;   /* reads that failed for good: EIO twice, the file ends, the device is gone */
    _Atomic uint64_t wrong_checksums; /* slices that were wrong when read again, too; dense files with a wrong tensor */
};

struct iod_line {
    /* W: iod; R: workers. Dekker pairs, seq_cst on both sides: iod stores 1, looks again at rings / slots, sleeps; a
     * worker pushes or unpins, then reads the flag and writes the eventfd if it is set. */
    _Alignas(CACHE_LINE) _Atomic uint32_t asleep; /* a request must ring */
    _Atomic uint32_t starved;                     /* an unpin must ring: a demand found no slot to evict */
    _Atomic uint32_t lookahead;                   /* 1: worker 0 should ask for the next layer's experts ahead */
    /* How far iod has read the use log: a writer more than half a log ahead rings, where `asleep` is set. */
    _Atomic uint64_t uses_read;
    /* counters, W: iod, relaxed */
    _Alignas(CACHE_LINE) _Atomic uint64_t loads, load_bytes, reads, read_ns, evictions, failures,
        verified_bytes, demand_ns;
    _Atomic uint64_t dense_bytes;
    _Atomic uint32_t method;       /* enum io_choice in use */
    _Atomic uint32_t direct;       /* 1: O_DIRECT */
    _Atomic uint32_t pool_refused; /* the target that memory or /dev/shm was too small for; 0: none */
    _Atomic uint32_t
        held; /* experts that are held: of the bits in `holds`, or the warmest where half of the slots are fewer */
    _Atomic uint64_t busy_ns; /* how long at least one demand was outstanding */
    _Atomic uint64_t retries; /* reads that were repeated: EIO, and slices whose checksum differed */
    /* Lookaheads: asked for and taken up; of those, given a slot; used after that; evicted unused; given up unread. */
    _Atomic uint64_t guesses_asked, guesses_loaded, guesses_used, guesses_wasted, guesses_dropped;
    /* now: experts that wait, bytes in flight */
    _Atomic uint32_t queued_demands, queued_lookaheads, queued_warmups;
    _Atomic uint64_t flying_bytes, registered_bytes; /* of the pool: with io_uring, in advance */
    _Atomic uint32_t
        registering_refused;   /* errno with which the kernel refused to register more of it; 0: it did not */
    _Atomic uint32_t learning; /* enum learning_choice, what is done: at most the fact of this name */
    _Atomic uint32_t
        learning_refused; /* errno of why it is less, EBUSY: another instance writes the file; 0: it is not */
    struct histogram read_us, demand_us; /* of one read; from the request for an expert to READY */
    struct copy_line copies[MAX_COPIES];
    _Atomic uint32_t drive_count;
    struct drive_line drives[MAX_DRIVES];
};

/* How often the experts of a layer were READY when it began, and how often not; an expert of a step counts once, however many rows use it. */
struct layer_counts {
    _Atomic uint64_t hits, misses; /* W: worker 0, relaxed */
};

struct front_line {
    _Alignas(CACHE_LINE) _Atomic uint64_t requests, answers, errors, prompt_tokens, answer_tokens, prompt_ns, answer_ns;
    /* how long STEPs were in flight, and how long the front took after each: sampling, text, the next STEP */
    _Atomic uint64_t flight_ns, own_ns;
    _Atomic uint32_t running, queued;
};

struct control {
    struct segment_header segment;
    struct facts facts;
    /* W: supervisor; R: all. Raised when a process dies; every wait compares it, abandons its step and acknowledges.
     * Starts at 1. */
    _Alignas(CACHE_LINE) _Atomic uint32_t epoch;
    /* W: supervisor. Equal to epoch while every process is ready in that epoch: front sends STEPs only then. */
    _Alignas(CACHE_LINE) _Atomic uint32_t serving;
    /* W: supervisor, before it raises the epoch for the last time. 1: the instance ends; R: front. */
    _Atomic uint32_t stopping;
    /* W: supervisor, who then rings iod; R: iod, tools. Slots that the pool should have: top_k to facts.pool_slots. */
    _Alignas(CACHE_LINE) _Atomic uint32_t pool_target;
    /* Experts that the user holds in the pool, a bit each. W: supervisor, the bits, then the counter (release), and
     * rings iod; R: iod, tools. */
    _Atomic uint32_t holds_changed;
    _Atomic uint64_t holds[HOLD_WORDS];
    struct iod_line iod;
    struct front_line front;
    struct worker_line workers[MAX_WORKERS];
    struct request_ring rings[MAX_WORKERS];                            /* worker w -> iod */
    _Alignas(CACHE_LINE) struct layer_counts layers[MODEL_MAX_LAYERS]; /* by layer, of worker 0 */
    struct use_log uses;                                               /* worker 0 -> iod, tools */
};

/* Creates the segment with those facts (they are checked first). Thread: the supervisor's main. */
int control_create(const char *instance, const struct facts *facts, struct control **ret_control,
                   struct error *ret_error);

/* Maps it, checks every fact, and copies them: use the copy, never control->facts. */
int control_attach(const char *instance, struct control **ret_control, struct facts *ret_facts,
                   struct error *ret_error);
/* The same for reading only: a write would fault. */
int control_watch(const char *instance, const struct control **ret_control, struct facts *ret_facts,
                  struct error *ret_error);
void control_detach(const struct control *control);

/* Raises the epoch and wakes every futex of the instance. Thread: the supervisor's main. Returns the new epoch. */
uint32_t control_raise_epoch(struct control *control);
