/* A method that hurts: it reads through another one and then shortens, fails, delays, reorders and refuses. */
#pragma once

#include "io_daemon/method.h"

#include <stdatomic.h>

enum fault {
    FAULT_SHORT = 1,       /* report less than was read, spoil the rest */
    FAULT_EIO = 2,         /* the first try of some reads fails */
    FAULT_AGAIN = 4,       /* EINTR, EAGAIN */
    FAULT_HOLD = 8,        /* hand back later, in another order */
    FAULT_REFUSE = 16,     /* submit says that it is full */
    FAULT_SMALL_RING = 32, /* queues far smaller than what is in flight, collected late */
    FAULT_REGISTER = 64,   /* neither files nor memory can be registered */
};

/* What faulty methods do from now on, and what they have seen. */
struct fault_plan {
    const struct io_method *inner; /* set before the thread that opens it starts */
    _Atomic uint32_t faults;
    _Atomic uint64_t broken_offset; /* reads that cover this byte of a file of more than 8 MiB always fail; 0: none */
    _Atomic uint64_t broken_device; /* reads of files on this device always fail; 0: none */
    _Atomic int broken_result;      /* with this negative errno */
    _Atomic uint64_t slow_device;   /* reads of files there come back one every `slow_us`; 0: none */
    _Atomic uint32_t slow_us;
    _Atomic uint32_t hold_all;       /* 1: nothing comes back */
    _Atomic uint64_t flipped_offset; /* the next `flips` reads that cover this byte of such a file bring it flipped */
    _Atomic uint32_t flips;
    const _Atomic uint32_t
        *dropped_state;             /* enum copy_state of a copy; NULL: none is watched. Set before the thread starts */
    uint64_t dropped_device;        /* ... on this device */
    _Atomic uint32_t dropped_reads; /* submitted there after it was dropped */
    _Atomic uint32_t submitted, spoiled;
    _Atomic uint64_t last_offset; /* of the read that was submitted last */
};
extern struct fault_plan fault_plan;
extern const struct io_method faulty_method;

/* A new plan: those faults over that method, nothing broken, nothing held, counters at 0. */
void plan_faults(const struct io_method *inner, uint32_t faults);
