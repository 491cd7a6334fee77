/* Ctrl-C and its like as a descriptor, so that a command that waits for something can end what it has begun. */
#pragma once

#include <stdbool.h>

/* Blocks SIGINT, SIGTERM, SIGHUP (unless it is ignored, as under nohup) and SIGPIPE and returns a descriptor that polls
 * readable when one of the first three has come, or a negative errno. Before any thread exists. The caller closes
 * it. */
int interrupt_open(void);

enum interrupt_wait { WAIT_READY, WAIT_INTERRUPTED, WAIT_TIMEOUT };

/* Waits until `fd` is readable (WAIT_READY, also at its end), a signal has come, or `timeout_ms` (negative: no limit)
 * is over. A signal wins. `fd` -1: only for a signal. */
enum interrupt_wait interrupt_wait(int interrupt_fd, int fd, int timeout_ms);
