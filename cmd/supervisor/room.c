#include "cmd/supervisor/room.h"

#include "proto/cleanup.h"

#include <inttypes.h>
#include <limits.h>
#include <string.h>
#include <sys/statvfs.h>

static int read_memory(const char *root, uint64_t *ret_bytes, struct error *ret_error)
{
    char path[PATH_MAX], line[256];
    uint64_t kilobytes;
    snprintf(path, sizeof path, "%s/proc/meminfo", root);
    _cleanup_fclose_ FILE *stream = fopen(path, "re");
    while (stream && fgets(line, sizeof line, stream))
        if (sscanf(line, "MemAvailable: %" SCNu64, &kilobytes) == 1 && kilobytes <= UINT64_MAX / 1024) {
            *ret_bytes = kilobytes * 1024;
            return 0;
        }
    return error_set(ret_error, EIO, "%s has no MemAvailable: is /proc mounted?", path);
}

int room_read(const char *root, struct room *ret_room, struct error *ret_error)
{
    struct statvfs shm;
    int status = read_memory(root, &ret_room->memory, ret_error);
    if (status)
        return status;
    if (statvfs("/dev/shm", &shm) < 0)
        return error_set(ret_error, errno, "cannot look at /dev/shm (%s): mount a tmpfs there", strerror(errno));
    /* No blocks: the mount has no limit of its own. */
    ret_room->shm_free = shm.f_blocks ? (uint64_t)shm.f_bavail * shm.f_frsize : UINT64_MAX;
    ret_room->cgroup = cgroup_memory_read(root);
    return 0;
}

uint64_t room_available(const struct room *room)
{
    return room->cgroup.free < room->memory ? room->cgroup.free : room->memory;
}
