/* How much memory is free now: read at the start of an instance, and again and again while its pool follows. */
#pragma once

#include "cmd/supervisor/cgroup.h"
#include "proto/error.h"

struct room {
    uint64_t memory;             /* bytes: MemAvailable */
    struct cgroup_memory cgroup; /* until the tightest limit of a control group */
    uint64_t shm_free;           /* bytes of /dev/shm */
};

/* Reads /proc and /sys below `root` ("" for this machine), and /dev/shm. Any thread. */
int room_read(const char *root, struct room *ret_room, struct error *ret_error);

/* Bytes that may be taken: of memory and of the control groups, whichever has less. */
uint64_t room_available(const struct room *room);
