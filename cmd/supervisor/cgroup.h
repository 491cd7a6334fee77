/* Limits of the control groups that this process is in, versions 1 and 2 (and both at once, as on hybrid hosts). Groups
 * are nested: the tightest limit from the process's own group up to the root of the mount is the one that holds. */
#pragma once

#include <stdint.h>

#define CGROUP_UNLIMITED UINT64_MAX

struct cgroup_limits {
    uint64_t cpu_permille; /* CPU time a second, in thousandths of a CPU; CGROUP_UNLIMITED without a limit */
    uint64_t memory_free;  /* bytes until the tightest memory limit, page cache that can be dropped counted as free */
};

/* Reads the files below `root` ("" for this machine). What cannot be read limits nothing. Any thread. */
struct cgroup_limits cgroup_read(const char *root);
