#include "cmd/front/row_file.h"

#include "proto/cleanup.h"
#include "proto/safetensors.h"

#include <fcntl.h>
#include <libgen.h>
#include <string.h>
#include <sys/stat.h>

static int write_error(const struct row_file *file, struct error *ret_error)
{
    int code = errno ? errno : EIO;
    return error_set(ret_error, code, "%s: cannot write: %s%s", file->path, strerror(code),
                     code == ENOSPC || code == EDQUOT ? "; make room there or name another place" : "");
}

/* What a finished file would take the place of: nothing, or a regular file; not a device, a pipe or a folder. */
static int check_place(const struct row_file *file, struct error *ret_error)
{
    struct stat there;
    if (stat(file->path, &there) == 0 && !S_ISREG(there.st_mode))
        return error_set(ret_error, S_ISDIR(there.st_mode) ? EISDIR : EINVAL,
                         "%s: is %s; name a file, it is created or replaced", file->path,
                         S_ISDIR(there.st_mode) ? "a folder" : "no regular file");
    return 0;
}

/* A nameless file in the folder of `path`, of which nothing is left when the process is killed; a file under the temporary
 * name where the file system has no such files. */
static int open_file(const struct row_file *file, bool *ret_named)
{
    _cleanup_free_ char *folder = strdup(file->path);
    if (!folder)
        return -1;
    int fd = open(dirname(folder), O_TMPFILE | O_WRONLY | O_CLOEXEC, 0666);
    *ret_named = fd < 0 && (errno == EOPNOTSUPP || errno == EISDIR || errno == EINVAL);
    return *ret_named ? open(file->temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666) : fd;
}

int row_file_create(struct row_file *file, const char *path, const char *name, uint64_t rows, uint64_t columns,
                    struct error *ret_error)
{
    *file = (struct row_file){.columns = columns};
    if (asprintf(&file->temporary, "%s.%ld.part", path, (long)getpid()) < 0)
        file->temporary = NULL;
    file->path = strdup(path);
    if (!file->path || !file->temporary)
        return error_set(ret_error, ENOMEM, "%s: no memory", path);
    int status = check_place(file, ret_error);
    if (status < 0)
        return status;
    _cleanup_close_ int fd = open_file(file, &file->named);
    if (fd < 0) {
        file->named = false; /* what stands there is not ours to remove */
        return write_error(file, ret_error);
    }
    file->file = fdopen(fd, "w");
    if (!file->file)
        return write_error(file, ret_error);
    take_fd(fd);
    struct tensor tensor = {.dtype = DTYPE_F32, .dims = 2, .shape = {rows, columns, 1, 1}};
    snprintf(tensor.name, sizeof tensor.name, "%s", name);
    tensor.bytes = rows * columns * sizeof(float);
    _cleanup_free_ char *header = NULL;
    size_t bytes;
    status = safetensors_header(&tensor, 1, 8, &header, &bytes, ret_error);
    if (status < 0)
        return error_prefix(ret_error, status, "%s", path);
    errno = 0;
    if (fwrite(header, 1, bytes, file->file) != bytes)
        return write_error(file, ret_error);
    return 0;
}

int row_file_write(struct row_file *file, const float *row, struct error *ret_error)
{
    errno = 0;
    if (fwrite(row, sizeof *row, file->columns, file->file) != file->columns)
        return write_error(file, ret_error);
    return 0;
}

/* Gives a nameless file the temporary name: linkat() cannot replace a file, rename() can. */
static int give_name(struct row_file *file)
{
    char open_path[64];
    snprintf(open_path, sizeof open_path, "/proc/self/fd/%d", fileno(file->file));
    if (linkat(AT_FDCWD, open_path, AT_FDCWD, file->temporary, AT_SYMLINK_FOLLOW) < 0)
        return -1;
    file->named = true;
    return 0;
}

int row_file_finish(struct row_file *file, struct error *ret_error)
{
    errno = 0;
    if (fflush(file->file) != 0 || fsync(fileno(file->file)) != 0 || (!file->named && give_name(file) < 0))
        return write_error(file, ret_error);
    FILE *closing = file->file;
    file->file = NULL;
    if (fclose(closing) != 0 || rename(file->temporary, file->path) != 0)
        return write_error(file, ret_error);
    file->named = false;
    return 0;
}

void row_file_discard(struct row_file *file)
{
    if (file->file)
        fclose(file->file);
    if (file->named)
        unlink(file->temporary);
    free(file->temporary);
    free(file->path);
    *file = (struct row_file){0};
}
