/* Whether lookaheads pay: pure functions of numbers, no clock, no I/O.
 *
 * A lookahead is worth its read while three things hold: experts are missed, or would be without guesses; the drive has idle time, for a
 * guess that only stands before the next demand gains nothing; and enough of what was guessed is used. Each window of
 * uses is judged by itself. Where guesses were mostly wrong they rest, twice as long each time, and are tried again:
 * without guesses nobody can know how good they would be. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

struct guesses {
    bool on;
    uint64_t uses, hits;               /* of this window */
    uint64_t busy_ns, idle_ns;         /* of this window: with and without a demand outstanding */
    uint64_t window_used;              /* of the guesses' totals, at its beginning */
    uint64_t judged_used, judged_lost; /* what was judged before of the guesses' totals */
    uint32_t rest, next_rest;          /* windows */
    bool busy;
    uint64_t clock_ns;
};

#define GUESSES_WINDOW 2048u /* uses */

/* Lookaheads are on in the first window. */
void guesses_open(struct guesses *ret_guesses, uint64_t now_ns);

/* One use of an expert: was it there? */
void guesses_use(struct guesses *guesses, bool hit);

/* From `now_ns` on a demand is, or is not, outstanding. Returns for how many nanoseconds since the last call one was. A
 * long time without a demand is an instance that nobody asks, and counts as a short one. */
uint64_t guesses_clock(struct guesses *guesses, bool busy, uint64_t now_ns);

/* At the end of a window, its judgement; else what holds. `used` and `lost`: all guesses ever that were loaded and used,
 * and that were loaded and evicted unused. */
bool guesses_pay(struct guesses *guesses, uint64_t used, uint64_t lost);
