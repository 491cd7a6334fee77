/* The threads of one worker. They run the same code; they meet here, and through their first thread they meet the other workers. */
#pragma once

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
    uint64_t exchange_ns;
};

void team_init(struct team *team, uint32_t threads, uint32_t spin);

/* All threads of the team meet. Returns to everybody what thread 0 gave as `status` (the others' is ignored), so that a step is left
 * by all at the same place. */
int team_sync(struct thread *thread, int status);

/* The same, and while the team is together its first thread ends the current exchange with the other workers; skipped if its status is
 * not 0. -ESTALE: the epoch was raised. */
int team_exchange(struct thread *thread, int status);

uint64_t clock_ns(void);
