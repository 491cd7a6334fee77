/* Deadlines. */
#pragma once

#include <stdint.h>
#include <time.h>

/* CLOCK_MONOTONIC in milliseconds. */
static inline int64_t clock_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* What is left now of `timeout_ms` from `start_ms` on: 0 at its end; negative where it is for ever (timeout_ms negative). */
static inline int clock_left(int64_t start_ms, int timeout_ms)
{
    if (timeout_ms <= 0)
        return timeout_ms;
    int64_t left = start_ms + timeout_ms - clock_ms();
    return left > 0 ? (int)left : 0;
}
