#include "cmd/front/row_file.h"

#include "proto/cleanup.h"
#include "proto/safetensors.h"

#include <fcntl.h>
#include <string.h>

static int write_error(const struct row_file *file, struct error *ret_error)
{
    int code = errno ? errno : EIO;
    return error_set(ret_error, code, "%s: cannot write: %s%s", file->path, strerror(code),
                     code == ENOSPC || code == EDQUOT ? "; make room there or name another place" : "");
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
    _cleanup_close_ int fd = open(file->temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd < 0) {
        int status = write_error(file, ret_error);
        free(file->temporary); /* not ours to remove */
        file->temporary = NULL;
        return status;
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
    int status = safetensors_header(&tensor, 1, 8, &header, &bytes, ret_error);
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

int row_file_finish(struct row_file *file, struct error *ret_error)
{
    errno = 0;
    if (fflush(file->file) != 0 || fsync(fileno(file->file)) != 0)
        return write_error(file, ret_error);
    FILE *closing = file->file;
    file->file = NULL;
    if (fclose(closing) != 0 || rename(file->temporary, file->path) != 0)
        return write_error(file, ret_error);
    free(file->temporary);
    file->temporary = NULL;
    return 0;
}

void row_file_discard(struct row_file *file)
{
    if (file->file)
        fclose(file->file);
    if (file->temporary)
        unlink(file->temporary);
    free(file->temporary);
    free(file->path);
    *file = (struct row_file){0};
}
