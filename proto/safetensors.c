#include "proto/safetensors.h"

#include "proto/cleanup.h"

#include <fcntl.h>
#include <jansson.h>
#include <stdbool.h>
#include <string.h>
#include <sys/stat.h>
#include <xxhash.h>

/* The format's own bound on a header; it also bounds what a hostile file makes us allocate. */
#define HEADER_MAX_BYTES 100000000u

static const struct {
    const char *name;
    size_t bytes;
} dtypes[] = {
    [DTYPE_U8] = {"U8", 1},     [DTYPE_I8] = {"I8", 1},   [DTYPE_F8_E4M3] = {"F8_E4M3", 1}, [DTYPE_F16] = {"F16", 2},
    [DTYPE_BF16] = {"BF16", 2}, [DTYPE_F32] = {"F32", 4}, [DTYPE_I32] = {"I32", 4},         [DTYPE_U32] = {"U32", 4},
    [DTYPE_I64] = {"I64", 8},   [DTYPE_U64] = {"U64", 8}, [DTYPE_F64] = {"F64", 8},
};

#define DTYPE_COUNT (sizeof dtypes / sizeof dtypes[0])

size_t dtype_bytes(enum tensor_dtype dtype)
{
    return (size_t)dtype < DTYPE_COUNT ? dtypes[dtype].bytes : 0;
}

const char *dtype_name(enum tensor_dtype dtype)
{
    return (size_t)dtype < DTYPE_COUNT && dtypes[dtype].name ? dtypes[dtype].name : "?";
}

static int compare_names(const void *a, const void *b)
{
    return strcmp(((const struct tensor *)a)->name, ((const struct tensor *)b)->name);
}

/* By place in the file; an empty tensor comes before the one that starts where it lies. */
static int compare_offsets(const void *a, const void *b)
{
    const struct tensor *x = a, *y = b;
    if (x->offset != y->offset)
        return x->offset < y->offset ? -1 : 1;
    return x->bytes < y->bytes ? -1 : x->bytes > y->bytes;
}

static int read_exactly(int fd, void *buffer, size_t bytes)
{
    size_t done = 0;
    while (done < bytes) {
        ssize_t got = pread(fd, (char *)buffer + done, bytes - done, (off_t)done);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return -errno;
        if (got == 0)
            return -ENODATA;
        done += (size_t)got;
    }
    return 0;
}

static int parse_dtype(const char *path, const json_t *value, struct tensor *tensor, struct error *ret_error)
{
    const char *text = json_string_value(value);
    if (!text)
        return error_set(ret_error, EINVAL, "%s: tensor %s has no dtype", path, tensor->name);
    for (size_t i = 1; i < DTYPE_COUNT; i++) {
        if (!strcmp(dtypes[i].name, text)) {
            tensor->dtype = (enum tensor_dtype)i;
            return 0;
        }
    }
    return error_set(ret_error, EINVAL, "%s: tensor %s has dtype %.20s, which is not supported", path, tensor->name,
                     text);
}

/* Fills dims, shape and bytes. */
static int parse_shape(const char *path, const json_t *value, struct tensor *tensor, struct error *ret_error)
{
    if (!json_is_array(value))
        return error_set(ret_error, EINVAL, "%s: tensor %s has no shape", path, tensor->name);
    size_t dims = json_array_size(value);
    if (dims > TENSOR_MAX_DIMS)
        return error_set(ret_error, EINVAL, "%s: tensor %s has %zu dimensions, at most %u are supported", path,
                         tensor->name, dims, TENSOR_MAX_DIMS);
    tensor->dims = (uint32_t)dims;
    tensor->bytes = dtype_bytes(tensor->dtype);
    for (size_t i = 0; i < TENSOR_MAX_DIMS; i++)
        tensor->shape[i] = 1;
    for (size_t i = 0; i < dims; i++) {
        const json_t *size = json_array_get(value, i);
        if (!json_is_integer(size) || json_integer_value(size) < 0)
            return error_set(ret_error, EINVAL, "%s: tensor %s has a shape that is not made of sizes", path,
                             tensor->name);
        tensor->shape[i] = (uint64_t)json_integer_value(size);
    }
    for (size_t i = 0; i < dims; i++) {
        if (__builtin_mul_overflow(tensor->bytes, tensor->shape[i], &tensor->bytes) || tensor->bytes > INT64_MAX)
            return error_set(ret_error, EOVERFLOW, "%s: tensor %s has a shape whose size overflows", path,
                             tensor->name);
    }
    return 0;
}

/* Fills the offset in the file and holds the range against shape and file. */
static int parse_offsets(const struct safetensors *file, const json_t *value, struct tensor *tensor,
                         struct error *ret_error)
{
    const json_t *first = json_array_get(value, 0), *last = json_array_get(value, 1);
    if (json_array_size(value) != 2 || !json_is_integer(first) || !json_is_integer(last) ||
        json_integer_value(first) < 0 || json_integer_value(last) < json_integer_value(first))
        return error_set(ret_error, EINVAL, "%s: tensor %s has data_offsets that are not a range", file->path,
                         tensor->name);
    uint64_t begin = (uint64_t)json_integer_value(first), end = (uint64_t)json_integer_value(last);
    if (end > file->file_bytes - file->data_offset)
        return error_set(
            ret_error, EINVAL,
            "%s: tensor %s ends at byte %llu of the data but the file has only %llu: it is truncated, fetch it again",
            file->path, tensor->name, (unsigned long long)end,
            (unsigned long long)(file->file_bytes - file->data_offset));
    if (end - begin != tensor->bytes)
        return error_set(ret_error, EINVAL, "%s: tensor %s has %llu bytes of data, its dtype and shape need %llu",
                         file->path, tensor->name, (unsigned long long)(end - begin),
                         (unsigned long long)tensor->bytes);
    tensor->offset = file->data_offset + begin;
    return 0;
}

static int parse_tensor(const struct safetensors *file, const char *name, const json_t *value, struct tensor *tensor,
                        struct error *ret_error)
{
    size_t length = strlen(name);
    if (length == 0 || length >= TENSOR_NAME_MAX)
        return error_set(ret_error, EINVAL, "%s: tensor name of %zu bytes (%.40s), 1 to %u are supported", file->path,
                         length, name, TENSOR_NAME_MAX - 1);
    memcpy(tensor->name, name, length + 1);
    if (!json_is_object(value))
        return error_set(ret_error, EINVAL, "%s: tensor %s is not described by an object", file->path, name);
    int status = parse_dtype(file->path, json_object_get(value, "dtype"), tensor, ret_error);
    if (status == 0)
        status = parse_shape(file->path, json_object_get(value, "shape"), tensor, ret_error);
    if (status == 0)
        status = parse_offsets(file, json_object_get(value, "data_offsets"), tensor, ret_error);
    return status;
}

/* The data section must be covered exactly: no overlap, no hole, nothing behind the last tensor. */
static int check_cover(struct safetensors *file, struct error *ret_error)
{
    if (file->count > 1)
        qsort(file->tensors, file->count, sizeof file->tensors[0], compare_offsets);
    uint64_t end = file->data_offset;
    for (size_t i = 0; i < file->count; i++) {
        const struct tensor *tensor = &file->tensors[i];
        if (tensor->offset < end)
            return error_set(ret_error, EINVAL, "%s: tensor %s overlaps tensor %s", file->path, tensor->name,
                             file->tensors[i - 1].name);
        if (tensor->offset > end)
            return error_set(ret_error, EINVAL, "%s: %llu bytes in front of tensor %s belong to no tensor", file->path,
                             (unsigned long long)(tensor->offset - end), tensor->name);
        end = tensor->offset + tensor->bytes;
    }
    if (end != file->file_bytes)
        return error_set(ret_error, EINVAL, "%s: %llu bytes at the end belong to no tensor", file->path,
                         (unsigned long long)(file->file_bytes - end));
    if (file->count > 1)
        qsort(file->tensors, file->count, sizeof file->tensors[0], compare_names);
    return 0;
}

static int parse_header(struct safetensors *file, const char *text, size_t bytes, struct error *ret_error)
{
    json_error_t where;
    json_auto_t *root = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, &where);
    if (!root)
        return error_set(ret_error, EINVAL, "%s: header: %s", file->path, where.text);
    if (!json_is_object(root))
        return error_set(ret_error, EINVAL, "%s: header is not a JSON object", file->path);

    file->tensors = calloc(json_object_size(root) + 1, sizeof file->tensors[0]);
    if (!file->tensors)
        return error_set(ret_error, ENOMEM, "%s: no memory for %zu tensors", file->path, json_object_size(root));
    const char *name;
    json_t *value;
    json_object_foreach (root, name, value) {
        if (!strcmp(name, "__metadata__"))
            continue;
        int status = parse_tensor(file, name, value, &file->tensors[file->count], ret_error);
        if (status < 0)
            return status;
        file->count++;
    }
    return check_cover(file, ret_error);
}

static int read_header(struct safetensors *file, int fd, struct error *ret_error)
{
    uint8_t prefix[8];
    if (file->file_bytes < sizeof prefix)
        return error_set(ret_error, EINVAL, "%s: has %llu bytes, too short for a safetensors file: fetch it again",
                         file->path, (unsigned long long)file->file_bytes);
    int status = read_exactly(fd, prefix, sizeof prefix);
    if (status < 0)
        return error_set(ret_error, -status, "%s: %s%s", file->path, strerror(-status), error_remedy(-status));
    uint64_t header_bytes = 0;
    for (size_t i = sizeof prefix; i-- > 0;)
        header_bytes = header_bytes << 8 | prefix[i];
    if (header_bytes > HEADER_MAX_BYTES)
        return error_set(ret_error, EINVAL,
                         "%s: header of %llu bytes, at most %u are accepted: not a safetensors file?", file->path,
                         (unsigned long long)header_bytes, HEADER_MAX_BYTES);
    if (header_bytes > file->file_bytes - sizeof prefix)
        return error_set(ret_error, EINVAL,
                         "%s: header of %llu bytes in a file of %llu: it is truncated, fetch it again", file->path,
                         (unsigned long long)header_bytes, (unsigned long long)file->file_bytes);

    file->data_offset = sizeof prefix + header_bytes;
    _cleanup_free_ char *text = malloc((size_t)file->data_offset);
    if (!text)
        return error_set(ret_error, ENOMEM, "%s: no memory for its header", file->path);
    status = read_exactly(fd, text, (size_t)file->data_offset);
    if (status < 0)
        return error_set(ret_error, -status, "%s: cannot read its header: %s%s", file->path, strerror(-status),
                         error_remedy(-status));
    file->header_xxh3 = XXH3_64bits(text, (size_t)file->data_offset);
    return parse_header(file, text + sizeof prefix, (size_t)header_bytes, ret_error);
}

int safetensors_open(const char *path, struct safetensors *ret_file, struct error *ret_error)
{
    struct safetensors file = {.path = strdup(path)};
    if (!file.path)
        return error_set(ret_error, ENOMEM, "%s: no memory", path);
    int status;
    struct stat facts;
    /* O_NONBLOCK: a FIFO of that name must not hang us; it has no effect on the regular files that are accepted. */
    _cleanup_close_ int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0 || fstat(fd, &facts) < 0)
        status = error_set(ret_error, errno, "%s: %s%s", path, strerror(errno), error_remedy(errno));
    else if (!S_ISREG(facts.st_mode))
        status = error_set(ret_error, EINVAL, "%s: is not a regular file", path);
    else {
        file.file_bytes = (uint64_t)facts.st_size;
        status = read_header(&file, fd, ret_error);
    }
    if (status < 0) {
        safetensors_close(&file);
        return status;
    }
    *ret_file = file;
    return 0;
}

void safetensors_close(struct safetensors *file)
{
    free(file->path);
    free(file->tensors);
    *file = (struct safetensors){0};
}

const struct tensor *safetensors_find(const struct safetensors *file, const char *name)
{
    size_t low = 0, high = file->count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        int order = strcmp(name, file->tensors[middle].name);
        if (order == 0)
            return &file->tensors[middle];
        if (order < 0)
            high = middle;
        else
            low = middle + 1;
    }
    return NULL;
}

/* {"dtype", "shape", "data_offsets"} of a tensor whose data start at `begin` of the data section, or NULL without
 * memory. */
static json_t *describe(const struct tensor *tensor, uint64_t begin)
{
    json_auto_t *shape = json_array();
    for (uint32_t i = 0; i < tensor->dims; i++) {
        if (json_array_append_new(shape, json_integer((json_int_t)tensor->shape[i])) < 0)
            return NULL;
    }
    return json_pack("{s:s, s:O, s:[I, I]}", "dtype", dtype_name(tensor->dtype), "shape", shape, "data_offsets",
                     (json_int_t)begin, (json_int_t)(begin + tensor->bytes));
}

int safetensors_header(struct tensor *tensors, size_t count, uint64_t align, char **ret_header, size_t *ret_bytes,
                       struct error *ret_error)
{
    json_auto_t *root = json_object();
    uint64_t end = 0;
    for (size_t i = 0; i < count; i++) {
        struct tensor *tensor = &tensors[i];
        if (tensor->dims > TENSOR_MAX_DIMS || dtype_bytes(tensor->dtype) == 0)
            return error_set(ret_error, EINVAL, "tensor %s has no valid dtype and shape", tensor->name);
        tensor->bytes = dtype_bytes(tensor->dtype);
        for (uint32_t d = 0; d < TENSOR_MAX_DIMS; d++) {
            if (d >= tensor->dims)
                tensor->shape[d] = 1;
            if (__builtin_mul_overflow(tensor->bytes, tensor->shape[d], &tensor->bytes))
                return error_set(ret_error, EOVERFLOW, "tensor %s has a shape whose size overflows", tensor->name);
        }
        if (tensor->bytes > INT64_MAX - end)
            return error_set(ret_error, EOVERFLOW, "tensor %s makes the file too large", tensor->name);
        if (json_object_get(root, tensor->name))
            return error_set(ret_error, EEXIST, "tensor %s stands twice in one file", tensor->name);
        if (json_object_set_new(root, tensor->name, describe(tensor, end)) < 0)
            return error_set(ret_error, ENOMEM, "tensor %s: no memory for the header", tensor->name);
        tensor->offset = end;
        end += tensor->bytes;
    }
    _cleanup_free_ char *text = json_dumps(root, JSON_COMPACT);
    if (!text)
        return error_set(ret_error, ENOMEM, "no memory for a header of %zu tensors", count);

    size_t length = strlen(text);
    uint64_t data_offset = (8 + length + align - 1) / align * align;
    char *header = malloc(data_offset);
    if (!header)
        return error_set(ret_error, ENOMEM, "no memory for a header of %zu tensors", count);
    uint64_t header_bytes = data_offset - 8;
    for (size_t i = 0; i < 8; i++)
        header[i] = (char)(header_bytes >> (8 * i));
    memcpy(header + 8, text, length);
    memset(header + 8 + length, ' ', header_bytes - length);
    for (size_t i = 0; i < count; i++)
        tensors[i].offset += data_offset;
    *ret_header = header;
    *ret_bytes = data_offset;
    return 0;
}
