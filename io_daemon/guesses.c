#include "io_daemon/guesses.h"

#define IDLE_MOST_NS UINT64_C(100000000) /* longer gaps are the user's */
#define OUTCOMES 32u                     /* guesses whose end is known, to judge them by */
#define REST_FIRST 8u                    /* windows */
#define REST_MOST 256u

void guesses_open(struct guesses *ret_guesses, uint64_t now_ns)
{
    *ret_guesses = (struct guesses){.on = true, .next_rest = REST_FIRST, .clock_ns = now_ns};
}

void guesses_use(struct guesses *guesses, bool hit)
{
    guesses->uses++;
    guesses->hits += hit;
}

uint64_t guesses_clock(struct guesses *guesses, bool busy, uint64_t now_ns)
{
    uint64_t passed = now_ns - guesses->clock_ns, busy_ns = guesses->busy ? passed : 0;
    if (guesses->busy)
        guesses->busy_ns += passed;
    else
        guesses->idle_ns += passed < IDLE_MOST_NS ? passed : IDLE_MOST_NS;
    guesses->busy = busy;
    guesses->clock_ns = now_ns;
    return busy_ns;
}

/* One in a hundred uses misses, or would without a guess; less than half of that turns guesses off again. */
static bool misses_enough(const struct guesses *guesses, uint64_t used)
{
    uint64_t misses = guesses->uses - guesses->hits + (used - guesses->window_used);
    return misses * (guesses->on ? 200 : 100) >= guesses->uses;
}

/* A tenth of the time is the drive's own; less than half of that turns guesses off again. */
static bool drive_has_time(const struct guesses *guesses)
{
    return guesses->idle_ns * (guesses->on ? 20 : 10) >= guesses->busy_ns + guesses->idle_ns;
}

/* False at the beginning of a rest, and during it. */
static bool guessed_well(struct guesses *guesses, uint64_t used, uint64_t lost)
{
    if (guesses->rest > 0) {
        guesses->rest--;
        guesses->judged_used = used; /* what still comes of earlier guesses says nothing new */
        guesses->judged_lost = lost;
        return guesses->rest == 0;
    }
    uint64_t right = used - guesses->judged_used, wrong = lost - guesses->judged_lost;
    if (right + wrong < OUTCOMES)
        return true;
    guesses->judged_used = used;
    guesses->judged_lost = lost;
    if (right >= wrong) {
        guesses->next_rest = REST_FIRST;
        return true;
    }
    guesses->rest = guesses->next_rest;
    guesses->next_rest = guesses->next_rest < REST_MOST ? 2 * guesses->next_rest : REST_MOST;
    return false;
}

bool guesses_pay(struct guesses *guesses, uint64_t used, uint64_t lost)
{
    if (guesses->uses < GUESSES_WINDOW)
        return guesses->on;
    bool good = guessed_well(guesses, used, lost);
    guesses->on = good && misses_enough(guesses, used) && drive_has_time(guesses);
    guesses->uses = guesses->hits = 0;
    guesses->window_used = used;
    guesses->busy_ns = guesses->idle_ns = 0;
    return guesses->on;
}
