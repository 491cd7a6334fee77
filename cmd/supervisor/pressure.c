#include "cmd/supervisor/pressure.h"

#include "cmd/supervisor/cgroup.h"
#include "proto/cleanup.h"

#include <fcntl.h>
#include <limits.h>

/* Microseconds of stall, and of the window; a window of whole 2 s needs no privilege. */
#define TRIGGER "some 200000 2000000"

static int open_trigger(const char *path)
{
    _cleanup_close_ int fd = open(path, O_RDWR | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0 || write(fd, TRIGGER, sizeof TRIGGER) < 0)
        return -1;
    return take_fd(fd);
}

int pressure_open(const char *root)
{
    char path[CGROUP_PATH_MAX];
    int fd = cgroup_pressure_file(root, path) ? open_trigger(path) : -1;
    if (fd >= 0)
        return fd;
    snprintf(path, sizeof path, "%s/proc/pressure/memory", root);
    return open_trigger(path);
}
