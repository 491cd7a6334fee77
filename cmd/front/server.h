/* The front's server: the request socket, and the one loop in which everything happens. */
#pragma once

#include "proto/error.h"
#include "proto/heritage.h"

struct front;

/* Attaches the instance's segments, opens its tokenizer and its sockets. The caller has blocked the signals that
 * `signal_fd` reads. Thread: main. */
int server_open(const struct heritage *heritage, struct front **ret_front, struct error *ret_error);

/* Serves until signal_fd (a signalfd) is readable. Idle it sleeps: no timers, no CPU. */
int server_run(struct front *front, const struct heritage *heritage, int signal_fd, struct error *ret_error);

/* Answers what is open with `restarted` and lets everything go. */
void server_close(struct front *front);
