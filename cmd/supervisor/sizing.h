/* How many slots the pool of a running instance should have. Pure: no clock, no files.
 *
 * A pool that was given a size keeps it. An `auto` pool follows the memory that is free, with a reserve for
 * everything else: below half of the reserve it shrinks, back to the whole of it; when the kernel says that
 * processes stall for want of memory it shrinks by a sixteenth at a time, unless there is plenty (twice the
 * reserve), for then they stall for another reason; and it grows again, by half of what is free above the reserve,
 * after a while in which neither happened. Between half a reserve and a reserve and a step nothing changes, so that
 * it does not swing. */
#pragma once

#include "cmd/supervisor/room.h"

#define SIZING_CALM_MS 30000 /* after it has shrunk, or could not grow, a pool does not grow for so long */

struct sizing {
    /* constant */
    uint64_t slot_bytes, reserve;
    uint64_t fixed_bytes; /* of the instance's other shared memory */
    uint32_t top_k;       /* slots below which no step can run */
    uint32_t least, most; /* slots of an `auto` pool: top_k and some; one for every expert */
    /* what is wanted */
    bool automatic;
    uint32_t target;
    int64_t calm_ms; /* no growth before */
};

/* What is so at a moment. */
struct sizing_view {
    struct room room;
    uint32_t standing; /* slots that have memory */
    uint32_t refused;  /* the target that iod found no memory for, 0: none */
    bool pressure;     /* the kernel has reported stalls */
    int64_t now_ms;
};

enum sizing_bound { BOUND_MEMORY, BOUND_CGROUP, BOUND_SHM, BOUND_EXPERTS };

/* The slots that an `auto` pool may have now, and what sets that bound. */
uint32_t sizing_cap(const struct sizing *sizing, const struct sizing_view *view, enum sizing_bound *ret_bound);

/* Follows what is so. True: the target has changed. */
bool sizing_follow(struct sizing *sizing, const struct sizing_view *view);

/* What a user says: bytes ("64G"), a share of the memory that would be free without the instance ("80%"), or "auto".
 * -EINVAL: no size, or too few slots for a step; -ENOSPC, -ENOMEM: /dev/shm or memory has no room for it. */
int sizing_set(struct sizing *sizing, const struct sizing_view *view, const char *text, struct error *ret_error);
