/* A process as /proc/PID/stat has it. */
#pragma once

#include <stdint.h>
#include <sys/types.h>

struct process {
    char state; /* R, S, D, T (stopped by a signal), t (by a debugger), Z ... */
    pid_t parent;
    double cpu;   /* seconds, user and system */
    uint64_t rss; /* bytes */
};

/* All 0 where there is none. Any thread. */
struct process process_look(pid_t pid);
