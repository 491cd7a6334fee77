/* Limits of the control groups that this process is in, versions 1 and 2 (and both at once, as on hybrid hosts). Groups
 * are nested: the tightest limit from the process's own group up to the root of the mount is the one that holds.
 *
 * All read the files below `root` ("" for this machine; tests give a made-up tree). What cannot be read limits nothing.
 * Any thread. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#define CGROUP_UNLIMITED UINT64_MAX
#define CGROUP_PATH_MAX 1024u

/* CPU time a second, in thousandths of a CPU; CGROUP_UNLIMITED without a limit. */
uint64_t cgroup_cpu_permille(const char *root);

/* How far the groups are from the tightest of their memory limits (memory.max and memory.high, or
 * memory.limit_in_bytes). Page cache that the kernel would drop first (inactive_file) counts as free. */
struct cgroup_memory {
    uint64_t free;              /* bytes; CGROUP_UNLIMITED */
    char file[CGROUP_PATH_MAX]; /* where that limit stands, "" without one */
};
struct cgroup_memory cgroup_memory_read(const char *root);

/* The memory.pressure file of the process's own group (version 2). False: there is none. */
bool cgroup_pressure_file(const char *root, char ret_path[CGROUP_PATH_MAX]);
