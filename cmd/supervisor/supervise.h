/* The supervisor's main object: an instance's shared memory, its processes, and the loop that keeps them.
 *
 * One thread, one poll(): signals (a signalfd), the notify pipes of children that start, the control socket. Nothing is
 * polled by time but acknowledgements of a raised epoch, and those only after a worker died. */
#pragma once

#include "cmd/supervisor/child.h"
#include "cmd/supervisor/instance.h"
#include "cmd/supervisor/plan.h"
#include "proto/channel.h"
#include "proto/heritage.h"
#include "shm/control.h"
#include "shm/pool.h"

#include <jansson.h>
#include <stdio.h>

#define STOP_MS 5000        /* from SIGTERM to SIGKILL */
#define ACKNOWLEDGE_MS 2000 /* a living worker that has not seen a new epoch by then is ended and started again */

struct supervisor {
    struct instance *instance; /* taken and clean */
    struct plan plan;
    const struct settings *settings;
    struct heritage starter; /* who waits for `ready` or `failed: ...` */
    const char *programs;    /* folder of the programs */
    FILE *log;
    struct control *control;
    struct pool pool; /* the table only */
    struct channel *socket;
    int signal_fd, doorbell_fd, wake_fd;
    uint32_t child_count;
    struct child children[MAX_WORKERS + 2]; /* iod, workers, front */
    uint32_t epoch;
    int64_t epoch_ms, started_ms;
    bool served; /* the instance has been able to answer */
    bool stopping;
    bool failed;
    struct error reason; /* why, if failed */
};

/* Milliseconds of the monotonic clock. */
int64_t supervisor_now_ms(void);

/* Creates segments, descriptors and the control socket, and starts iod. The signals SIGCHLD, SIGTERM, SIGINT, SIGHUP
 * and SIGPIPE must be blocked already, before any other thread exists. The caller has filled instance, plan, settings,
 * starter, programs and log, and calls supervisor_end in any case. Thread: main, as all here. */
int supervisor_start(struct supervisor *supervisor, struct error *ret_error);

/* Keeps the processes until the last has ended: after a signal or the control socket's `down` (0), or because the
 * instance could not start or gave up (negative errno and the line). */
int supervisor_run(struct supervisor *supervisor, struct error *ret_error);

/* Closes everything and removes the shared memory. */
void supervisor_end(struct supervisor *supervisor);

/* The answer to one request of the control socket (status.c): {"op": "status"} or {"op": "down"}; *ret_down says that
 * the second came. `bytes` are whatever somebody sent. NULL when out of memory. */
json_t *supervisor_answer(const struct supervisor *supervisor, const void *bytes, size_t size, bool *ret_down);
