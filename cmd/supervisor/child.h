/* One process that the supervisor keeps: its states, and how it is started.
 *
 *   state \ event   START           READY   EXIT           CLEARED   DUE              STALLED   STOP
 *   DOWN            STARTING spawn                                                              DOWN
 *   STARTING                        READY   DEAD recover                                        STOPPING terminate
 *   READY                                   DEAD recover                              kill      STOPPING terminate
 *   DEAD                                                   WAITING                              DOWN
 *   WAITING                                                          STARTING spawn             DOWN
 *   STOPPING                                DOWN                     kill
 *
 * "Started" is not "ready": READY is a line on the notify pipe. DEAD lasts until nothing in shared memory remembers the
 * dead process (CLEARED), WAITING until its back-off is over (DUE). STALLED: a living worker does not acknowledge an
 * epoch. What the table does not name changes nothing. */
#pragma once

#include "proto/error.h"

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

enum child_kind { CHILD_IOD, CHILD_WORKER, CHILD_FRONT };

enum child_state { CHILD_DOWN, CHILD_STARTING, CHILD_READY, CHILD_DEAD, CHILD_WAITING, CHILD_STOPPING, CHILD_STATES };

enum child_event {
    EVENT_START,
    EVENT_READY,
    EVENT_EXIT,
    EVENT_CLEARED,
    EVENT_DUE,
    EVENT_STALLED,
    EVENT_STOP,
    CHILD_EVENTS
};

enum child_action { ACTION_NONE, ACTION_SPAWN, ACTION_RECOVER, ACTION_TERMINATE, ACTION_KILL };

struct child_transition {
    bool listed;
    enum child_state state;
    enum child_action action;
};

/* The table above. Pure. */
struct child_transition child_next(enum child_state state, enum child_event event);

const char *child_state_name(enum child_state state);

/* The law of restarts. A death is quick when the process was not up for RESTART_CALM_MS and the instance finished no
 * request since it started. The first restart is immediate, then the delay doubles from RESTART_FIRST_MS to
 * RESTART_LONGEST_MS with each quick death in a row; after RESTART_LIMIT of them the instance gives up. A death that is
 * not quick starts the count anew. */
#define RESTART_CALM_MS 10000
#define RESTART_FIRST_MS 50
#define RESTART_LONGEST_MS 2000
#define RESTART_LIMIT 10u

/* Milliseconds to wait after the `quick`th quick death in a row (0: the death was not quick). Pure. */
int restart_delay_ms(uint32_t quick);

struct child {
    enum child_kind kind;
    uint32_t index; /* of a worker */
    char label[32]; /* "calypte-worker-0": names its log and pid file, and lines for the user */
    enum child_state state;
    pid_t pid;       /* 0: none */
    int notify_fd;   /* read end, -1: closed */
    char line[1100]; /* what came through it */
    uint32_t line_length;
    int64_t started_ms, due_ms; /* monotonic; due_ms: end of the back-off, or when SIGTERM becomes SIGKILL */
    uint64_t finished_before;   /* requests that the instance had finished when it started */
    uint32_t restarts, quick;
    int exit_status; /* of waitpid, of the last one that died */
};

const char *child_program(enum child_kind kind);

/* What a child is given; descriptors stay the supervisor's. */
struct child_gift {
    const char *programs; /* folder of the programs */
    const char *instance, *folder;
    int doorbell_fd, wake_fd;
    uint32_t threads; /* a worker */
};

/* Starts the program in a process group of its own (a terminal's Ctrl-C is for the supervisor), with stdin from
 * /dev/null, output to its log, default signals, and no descriptor but those of its heritage. Sets pid, notify_fd,
 * empties line; writes the pid file. Thread: the supervisor's main, whose death ends the child. */
int child_spawn(struct child *child, const struct child_gift *gift, struct error *ret_error);

/* Reads what is in the notify pipe. Returns 1 when the line `ready` has come, 0 otherwise. */
int child_read_notice(struct child *child);

/* One clause for why the child ended: its own `failed:` line, else the signal or exit code and the last line of its
 * log. */
void child_explain(const struct child *child, const char *folder, char *ret_text, size_t size);
