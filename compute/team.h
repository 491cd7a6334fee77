/* The threads of one worker. They run the same code; they meet here, and through their first thread they meet the other
 * workers. */
#pragma once

#include "proto/message.h"
#include "proto/weights.h"
#include "shm/exchange.h"

struct thread;

/* Arrivals go up a tree, so that no word is written by more than one thread; the release is one word that all read. */
#define TEAM_CHILDREN 4u

struct team {
    uint32_t threads, spin;
    _Alignas(CACHE_LINE) _Atomic uint32_t phase; /* W: thread 0, when all have arrived */
    _Atomic uint32_t sleepers;
    int status; /* W: thread 0, before it turns the phase */
    /* where the step's time goes, in the first thread; apart from what the others watch */
    _Alignas(CACHE_LINE) enum step_part part;
    uint64_t part_since, part_ns[STEP_PARTS], matmul_ns;
};

/* A thread's place in the tree: the children of place t are 4t + 1 .. 4t + 4. And the end of its run of the job. */
struct team_place {
    _Alignas(CACHE_LINE) _Atomic uint32_t arrived; /* W: the thread: the phase that it and all below it ask for */
    _Atomic uint32_t parent_sleeps;                /* W: the parent */
    /* 63..32 number of the job, 31..0 next unit of the tail. W: the thread when it begins a job, then whoever takes units, by
     * compare-and-swap: with the number in the word a late one cannot take units of another job. */
    _Alignas(CACHE_LINE) _Atomic uint64_t tail;
};

void team_init(struct team *team, uint32_t threads, uint32_t spin);

/* All threads of the team meet. Returns to everybody what thread 0 gave as `status` (the others' is ignored), so that a
 * step is left by all at the same place. */
int team_sync(struct thread *thread, int status);

/* The same, and while the team is together its first thread ends the current exchange with the other workers; skipped
 * if its status is not 0. -ESTALE: the epoch was raised. */
int team_exchange(struct thread *thread, int status);

/* Work that the team shares: units 0 .. units - 1, a run of them a thread by split(). The head of a run is its thread's, without
 * atomics; of the tail each takes half of what is left, its thread first, then those that are done with theirs. All threads begin the
 * same jobs in the same order. A barrier must follow before anybody reads the results. */
struct team_job {
    struct thread *thread;
    uint32_t number, units, tail_part, distance;
    struct range head;
};

/* The tail is the last `tail_part`-th part of a run. */
#define TAIL_SOME 2u
#define TAIL_ALL 1u /* units of different lengths */

struct team_job team_begin(struct thread *thread, uint32_t units, uint32_t tail_part);
/* The next units for this thread. False: none are left that it may take. */
bool team_take(struct team_job *job, struct range *ret_units);

/* The step's time: begins in PART_OTHER at `now` (clock_ns()). Thread: the team's first, as below. */
void team_time(struct team *team, uint64_t now);
/* What follows belongs to `part`. Returns the part before. One look at the clock. */
enum step_part team_part(struct team *team, enum step_part part);

uint64_t clock_ns(void);
