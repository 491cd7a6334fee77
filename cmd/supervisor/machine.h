/* What this process may use of the machine it stands on: CPUs, NUMA nodes, memory, /dev/shm. Read once, at the start of
 * an instance.
 *
 * The affinity mask and the limits of every control group above the process count, so that an instance in a container
 * with two CPUs and 8 GB takes two CPUs and 8 GB, whatever the host has. */
#pragma once

#include "proto/error.h"

#include <stdint.h>

#define MACHINE_MAX_CPUS 1024u
#define MACHINE_MAX_NODES 64u

struct machine_node {
    uint32_t id; /* the kernel's number */
    uint32_t cpu_count;
    uint16_t cpus[MACHINE_MAX_CPUS]; /* those this process may use, ascending */
};

struct machine {
    uint32_t cpu_count;         /* CPUs in the affinity mask */
    uint32_t cpu_budget;        /* CPUs' worth of time: the mask, cut by cpu.max (rounded down), at least 1 */
    uint32_t node_count;        /* nodes with memory and with CPUs of the mask, at least 1 */
    struct machine_node *nodes; /* [node_count] */
    uint64_t memory_available;  /* bytes: MemAvailable, cut by the limits of the control groups */
    uint64_t shm_free;          /* bytes of /dev/shm */
};

/* Reads /proc and /sys below `root` ("" for this machine; tests give a made-up tree) and this process's affinity mask.
 * The caller frees with machine_free. Any thread. */
int machine_read(const char *root, struct machine *ret_machine, struct error *ret_error);
void machine_free(struct machine *machine);

/* Parses a kernel CPU list ("0-3,8,10-11") into ascending numbers below MACHINE_MAX_CPUS. Returns how many, or
 * -EINVAL. */
int cpu_list_parse(const char *text, uint16_t ret_cpus[MACHINE_MAX_CPUS]);
