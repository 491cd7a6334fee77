#include "cmd/convert/output.h"

#include "proto/cleanup.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define COPY_BYTES (1u << 20)

/* "FOLDER/NAME: cannot write: REASON; what to do". */
static int refuse(const struct output *output, const char *verb, int code, struct error *ret_error)
{
    const char *remedy = code == ENOSPC || code == EDQUOT ? "; free some space and run the same command again to go on"
                         : code == EROFS || code == EACCES || code == EPERM ? "; choose a folder that can be written to"
                                                                            : "";
    return error_set(ret_error, code, "%s/%s: cannot %s: %s%s", output->folder, output->name, verb, strerror(code),
                     remedy);
}

static void part_name(const char *name, char ret_part[80])
{
    snprintf(ret_part, 80, "%.64s" OUTPUT_SUFFIX, name);
}

int output_create(int folder_fd, const char *folder, const char *name, uint64_t bytes, struct output *ret_output,
                  struct error *ret_error)
{
    struct output output = {.folder_fd = folder_fd, .folder = folder, .fd = -1};
    snprintf(output.name, sizeof output.name, "%s", name);
    char part[80];
    part_name(output.name, part);
    output.fd = openat(folder_fd, part, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0644);
    if (output.fd < 0)
        return refuse(&output, "create", errno, ret_error);
    if (bytes > 0 && fallocate(output.fd, 0, 0, (off_t)bytes) < 0) {
        int code = errno;
        if (code == EOPNOTSUPP)
            code = ftruncate(output.fd, (off_t)bytes) < 0 ? errno : 0;
        if (code != 0) {
            output_discard(&output);
            return refuse(&output, "reserve its space", code, ret_error);
        }
    }
    *ret_output = output;
    return 0;
}

int output_write(const struct output *output, uint64_t offset, const void *bytes, size_t count, struct error *ret_error)
{
    if (output->fd < 0)
        return 0;
    for (size_t done = 0; done < count;) {
        ssize_t put = pwrite(output->fd, (const char *)bytes + done, count - done, (off_t)(offset + done));
        if (put < 0 && errno == EINTR)
            continue;
        if (put < 0)
            return refuse(output, "write", errno, ret_error);
        done += (size_t)put;
    }
    /* Only a hint: otherwise the sync at the end would find everything still to do. */
    (void)sync_file_range(output->fd, (off_t)offset, (off_t)count, SYNC_FILE_RANGE_WRITE);
    return 0;
}

int output_finish(struct output *output, struct error *ret_error)
{
    char part[80];
    part_name(output->name, part);
    if (fsync(output->fd) < 0)
        return refuse(output, "sync", errno, ret_error);
    if (renameat(output->folder_fd, part, output->folder_fd, output->name) < 0)
        return refuse(output, "rename", errno, ret_error);
    close(output->fd);
    output->fd = -1;
    if (fsync(output->folder_fd) < 0 && errno != EINVAL)
        return refuse(output, "sync the folder of", errno, ret_error);
    return 0;
}

void output_discard(struct output *output)
{
    if (output->fd < 0)
        return;
    close(output->fd);
    output->fd = -1;
    output_remove_leftover(output->folder_fd, output->name);
}

int output_link(int folder_fd, const char *folder, const char *name, const char *target, struct error *ret_error)
{
    struct output output = {.folder_fd = folder_fd, .folder = folder, .fd = -1};
    snprintf(output.name, sizeof output.name, "%s", name);
    _cleanup_free_ char *full = realpath(target, NULL), *path = NULL;
    if (!full || asprintf(&path, "%s/%s", full, name) < 0) {
        int code = full ? ENOMEM : errno;
        path = NULL;
        return refuse(&output, "link", code, ret_error);
    }
    char part[80];
    part_name(name, part);
    unlinkat(folder_fd, part, 0);
    if (symlinkat(path, folder_fd, part) < 0 || renameat(folder_fd, part, folder_fd, name) < 0)
        return refuse(&output, "link", errno, ret_error);
    return 0;
}

void output_remove_leftover(int folder_fd, const char *name)
{
    char part[80];
    part_name(name, part);
    unlinkat(folder_fd, part, 0);
}

int output_put(int folder_fd, const char *folder, const char *name, const void *bytes, size_t count,
               struct error *ret_error)
{
    _cleanup_(output_discard) struct output output = {.fd = -1};
    int status = output_create(folder_fd, folder, name, count, &output, ret_error);
    if (status == 0)
        status = output_write(&output, 0, bytes, count, ret_error);
    return status == 0 ? output_finish(&output, ret_error) : status;
}

static int copy_data(int from, const char *path, const struct output *output, struct error *ret_error)
{
    _cleanup_free_ char *buffer = malloc(COPY_BYTES);
    if (!buffer)
        return error_set(ret_error, ENOMEM, "%s: no memory to copy it", path);
    for (uint64_t offset = 0;;) {
        ssize_t got = pread(from, buffer, COPY_BYTES, (off_t)offset);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return error_set(ret_error, errno, "%s: cannot read: %s", path, strerror(errno));
        if (got == 0)
            return 0;
        int status = output_write(output, offset, buffer, (size_t)got, ret_error);
        if (status < 0)
            return status;
        offset += (uint64_t)got;
    }
}

int output_copy(int folder_fd, const char *folder, const char *name, const char *source_folder, struct error *ret_error)
{
    _cleanup_free_ char *path = NULL;
    if (asprintf(&path, "%s/%s", source_folder, name) < 0) {
        path = NULL;
        return error_set(ret_error, ENOMEM, "%s: no memory to copy it", name);
    }
    struct stat facts;
    _cleanup_close_ int from = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (from < 0 || fstat(from, &facts) < 0)
        return error_set(ret_error, errno, "%s: %s", path, strerror(errno));
    if (!S_ISREG(facts.st_mode))
        return error_set(ret_error, EINVAL, "%s: is not a regular file", path);
    _cleanup_(output_discard) struct output output = {.fd = -1};
    int status = output_create(folder_fd, folder, name, 0, &output, ret_error);
    if (status == 0)
        status = copy_data(from, path, &output, ret_error);
    return status == 0 ? output_finish(&output, ret_error) : status;
}
