/* Waiting between processes: shared futexes on 32-bit words, nothing else (a pthread condition in shared memory hangs
 * after one killed waiter; FUTEX_PRIVATE does not cross processes). */
#pragma once

#include <stdatomic.h>
#include <stdint.h>

/* Sleeps while *word == expected, at most `timeout_ms` (negative: for ever). Returns 0 when woken or when the word
 * differs already, -ETIMEDOUT, or -EINTR. The caller re-checks its condition in every case. Any thread. */
int futex_wait(_Atomic uint32_t *word, uint32_t expected, int timeout_ms);

/* Wakes everybody who waits on the word. */
void futex_wake_all(_Atomic uint32_t *word);
