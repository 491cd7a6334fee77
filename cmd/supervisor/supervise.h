/* The supervisor's main object: an instance's shared memory, its processes, and the loop that keeps them.
 *
 * One thread, one poll(): signals (a signalfd), the notify pipes of children that start, the control socket.
 * Nothing is polled by time but acknowledgements of a raised epoch, those only after a worker died, and the free
 * memory, which only an `auto` pool follows. */
#pragma once

#include "cmd/supervisor/child.h"
#include "cmd/supervisor/instance.h"
#include "cmd/supervisor/plan.h"
#include "cmd/supervisor/sizing.h"
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
    struct sizing sizing;
    uint32_t size_before;    /* the last change of sizing.target: from so many slots ... */
    int64_t size_changed_ms; /* ... when; 0: there was none ... */
    char size_why[128];      /* ... and why */
    int pressure_fd;         /* of pressure_open(), -1: none */
    bool pressure;           /* it has spoken */
    int64_t look_ms;         /* when to look at the free memory again */
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

/* The answer to one request of the control socket (status.c): {"op": "status"}, {"op": "pool", "size": ...} or {"op":
 * "down"}; *ret_down says that the last came. `bytes` are whatever somebody sent. NULL when out of memory. */
json_t *supervisor_answer(struct supervisor *supervisor, const void *bytes, size_t size, bool *ret_down);

/* The pool's size (pool_size.c). Open: the plan's, before iod starts. Take pressure: what poll() found on
 * pressure_fd. Follow: an `auto` pool after the free memory, if it is time to look; returns when to look again
 * (INT64_MAX: never). */
void supervisor_open_size(struct supervisor *supervisor);
void supervisor_take_pressure(struct supervisor *supervisor, short events);
int64_t supervisor_follow_room(struct supervisor *supervisor);

/* `pool` of the status, its part about the size, and the answer to {"op": "pool"}, which may set the size. */
json_t *supervisor_pool_json(const struct supervisor *supervisor);
json_t *supervisor_size_json(const struct supervisor *supervisor);
json_t *supervisor_answer_pool(struct supervisor *supervisor, const json_t *request);

/* A line in the log; and an eventfd's bell. */
__attribute__((format(printf, 2, 3))) void supervisor_say(const struct supervisor *supervisor, const char *format, ...);
void supervisor_ring(int fd);

/* The experts that the user holds in the pool (holds.c): members `hold` and `release` of {"op": "pool"}, lists of
 * "LAYER:EXPERT". `slots`: of the pool, half of which may be held. A refusal changes nothing. And all of them, as such
 * a list. */
int supervisor_change_holds(struct supervisor *supervisor, const json_t *request, uint32_t slots,
                            struct error *ret_error);
json_t *supervisor_holds_json(const struct supervisor *supervisor);
