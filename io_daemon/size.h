/* How many slots have memory: brings about what the supervisor wants (`pool_target`), while the daemon serves.
 *
 * Growing and giving back block, so a thread does them, one job at a time; all else is the daemon's main thread.
 *   grow    the thread populates object after object; each one's slots are taken into use as it stands
 *   shrink  the slots above the target are emptied as they become unpinned (placement_limit); when none is occupied
 *           `slots_ready` falls, and the thread punches their memory out of the objects
 * A target that memory or /dev/shm is too small for is reported (`pool_refused`), with one line, and not tried again
 * before another one is wanted: the pool stays at what stands. */
#pragma once

#include "io_daemon/buffers.h"
#include "io_daemon/placement.h"

#include <pthread.h>

struct size {
    /* set by the caller */
    struct pool *pool;
    struct placement *placement;
    struct buffers *buffers;
    struct control *control;
    uint32_t least; /* slots that a step needs */
    bool hugepages;
    int doorbell_fd; /* rung when the thread has done something */
    void (*log)(const char *line);
    /* The daemon's own book of the slots that have memory. W: the thread while it works, else main. */
    _Atomic uint32_t ready;
    uint32_t limit, occupied; /* of the last placement_limit */
    uint32_t refused;
    bool attach_reported;
    /* the job */
    pthread_t thread;
    bool working;
    _Atomic bool stop, done;
    bool punch;            /* else grow */
    uint32_t first, end;   /* what is punched */
    _Atomic uint32_t goal; /* the target that was last grown for */
    int status;
    struct error error;
};

/* Takes over what stands, and brings up the first object: at least `least` slots have memory and may be used when it
 * returns. Thread: main, as all here. */
int size_open(struct size *size, struct error *ret_error);

/* Does what is due; to be called whenever the loop wakes. True: slots above the target are still pinned, call again
 * soon. */
bool size_keep(struct size *size);

/* The slots that the supervisor wants, read once and kept within bounds. */
uint32_t size_wanted(const struct size *size);

/* More slots are on their way. */
bool size_is_growing(const struct size *size);

/* Stops the thread after the object at hand. Nothing to do for one that was never opened. */
void size_close(struct size *size);
