#include "io_daemon/disk.h"

#include "proto/cleanup.h"
#include "proto/weights.h"

#include <fcntl.h>
#include <string.h>

static bool direct_read_works(int fd)
{
    void *page;
    if (posix_memalign(&page, DISK_ALIGN, DISK_ALIGN))
        return false;
    ssize_t got;
    do {
        got = pread(fd, page, DISK_ALIGN, 0);
    } while (got < 0 && errno == EINTR);
    free(page);
    return got >= 0 || errno != EINVAL; /* any other failure is the disk's, and the load will name it */
}

/* Without a note of the access in the inode, which would be a write; only the file's owner may leave it out. */
static int open_to_read(const char *path, int flags)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOATIME | flags);
    return fd < 0 && errno == EPERM ? open(path, O_RDONLY | O_CLOEXEC | flags) : fd;
}

int disk_open(const char *path, bool *ret_direct, struct error *ret_error)
{
    _cleanup_close_ int fd = open_to_read(path, O_DIRECT);
    *ret_direct = fd >= 0 && direct_read_works(fd);
    if (*ret_direct)
        return take_fd(fd);
    if (fd < 0 && errno != EINVAL)
        return error_set(ret_error, errno, "%s cannot be opened: %s", path, strerror(errno));
    int buffered = open_to_read(path, 0);
    return buffered >= 0 ? buffered : error_set(ret_error, errno, "%s cannot be opened: %s", path, strerror(errno));
}
