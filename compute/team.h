/* The threads of one worker. They run the same code; they meet here, and through their first thread they meet the other
 * workers. */
#pragma once

#include "proto/message.h"
#include "shm/exchange.h"

struct thread;

struct team {
    uint32_t threads, spin;
    /* one cache line each: arrivals are counted by the others, the phase is turned by thread 0 */
    _Alignas(CACHE_LINE) _Atomic uint32_t arrived;
    _Atomic uint32_t first_sleeps;
    _Alignas(CACHE_LINE) _Atomic uint32_t phase;
    _Atomic uint32_t sleepers;
    int status; /* W: thread 0, before it turns the phase */
    /* where the step's time goes, in the first thread */
    enum step_part part;
    uint64_t part_since, part_ns[STEP_PARTS], matmul_ns;
};

void team_init(struct team *team, uint32_t threads, uint32_t spin);

/* All threads of the team meet. Returns to everybody what thread 0 gave as `status` (the others' is ignored), so that a
 * step is left by all at the same place. */
int team_sync(struct thread *thread, int status);

/* The same, and while the team is together its first thread ends the current exchange with the other workers; skipped
 * if its status is not 0. -ESTALE: the epoch was raised. */
int team_exchange(struct thread *thread, int status);

/* The step's time: begins in PART_OTHER at `now` (clock_ns()). Thread: the team's first, as below. */
void team_time(struct team *team, uint64_t now);
/* What follows belongs to `part`. Returns the part before. One look at the clock. */
enum step_part team_part(struct team *team, enum step_part part);

uint64_t clock_ns(void);
