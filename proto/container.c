#include "proto/container.h"

#include "proto/cleanup.h"

#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdbool.h>
#include <string.h>
#include <sys/stat.h>
#include <xxhash.h>

#define EXPONENT_LIMIT 126 /* 2^e must be a normal f32 */
#define DENSE_FILES_MAX 99999u

static const struct {
    enum weight_format format;
    const char *name;
} formats[] = {{WEIGHT_INT4, "int4"}, {WEIGHT_INT8, "int8"}};

const char *weight_format_name(enum weight_format format)
{
    for (size_t i = 0; i < sizeof formats / sizeof formats[0]; i++) {
        if (formats[i].format == format)
            return formats[i].name;
    }
    return "?";
}

enum weight_format weight_format_parse(const char *name)
{
    for (size_t i = 0; name && i < sizeof formats / sizeof formats[0]; i++) {
        if (!strcmp(formats[i].name, name))
            return formats[i].format;
    }
    return (enum weight_format)0;
}

void checksum_format(uint64_t checksum, char ret_text[CHECKSUM_DIGITS + 1])
{
    snprintf(ret_text, CHECKSUM_DIGITS + 1, "%016" PRIx64, checksum);
}

int checksum_parse(const json_t *text, uint64_t *ret_checksum)
{
    const char *digits = json_string_value(text);
    if (!digits || strlen(digits) != CHECKSUM_DIGITS || strspn(digits, "0123456789abcdef") != CHECKSUM_DIGITS)
        return -EINVAL;
    *ret_checksum = strtoull(digits, NULL, 16);
    return 0;
}

int container_checksum(const json_t *manifest, uint64_t *ret_checksum, struct error *ret_error)
{
    json_auto_t *bare = json_object();
    const char *name;
    json_t *value;
    /* json_object_foreach wants a pointer to non-const, but only reads. */
    json_t *object = (json_t *)(uintptr_t)manifest;
    json_object_foreach (object, name, value) {
        if (strcmp(name, "checksum") != 0 && json_object_set(bare, name, value) < 0)
            return error_set(ret_error, ENOMEM, "no memory for the manifest's checksum");
    }
    _cleanup_free_ char *text = json_dumps(bare, JSON_COMPACT | JSON_SORT_KEYS);
    if (!text)
        return error_set(ret_error, ENOMEM, "no memory for the manifest's checksum");
    *ret_checksum = XXH3_64bits(text, strlen(text));
    return 0;
}

int container_read_json(const char *path, size_t limit, json_t **ret_object, struct error *ret_error)
{
    struct stat facts;
    _cleanup_close_ int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0 || fstat(fd, &facts) < 0)
        return error_set(ret_error, errno, "%s: %s%s", path, strerror(errno), error_remedy(errno));
    if (!S_ISREG(facts.st_mode))
        return error_set(ret_error, EINVAL, "%s: is not a regular file", path);
    if ((uint64_t)facts.st_size > limit)
        return error_set(ret_error, EFBIG, "%s: has %lld bytes, at most %zu are accepted", path,
                         (long long)facts.st_size, limit);
    /* json_loadfd() would make a system call for every byte */
    _cleanup_fclose_ FILE *file = fdopen(fd, "r");
    if (!file)
        return error_set(ret_error, errno, "%s: %s", path, strerror(errno));
    take_fd(fd);
    json_error_t where;
    json_t *object = json_loadf(file, JSON_REJECT_DUPLICATES, &where);
    if (!object)
        return error_set(ret_error, EINVAL, "%s: line %d: %s", path, where.line, where.text);
    if (!json_is_object(object)) {
        json_decref(object);
        return error_set(ret_error, EINVAL, "%s: is not a JSON object", path);
    }
    *ret_object = object;
    return 0;
}

static int read_tensor(const struct safetensors *file, const struct tensor *tensor, void *buffer,
                       struct error *ret_error)
{
    _cleanup_close_ int fd = open(file->path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return error_set(ret_error, errno, "%s: %s%s", file->path, strerror(errno), error_remedy(errno));
    for (uint64_t done = 0; done < tensor->bytes;) {
        ssize_t got = pread(fd, (char *)buffer + done, tensor->bytes - done, (off_t)(tensor->offset + done));
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return error_set(ret_error, got < 0 ? errno : EIO, "%s: cannot read tensor %s: %s%s", file->path,
                             tensor->name, got < 0 ? strerror(errno) : "the file became shorter",
                             error_remedy(got < 0 ? errno : 0));
        done += (uint64_t)got;
    }
    return 0;
}

/* A file that cannot be looked at. Of a link that leads nowhere it is the target's drive that is missing, and no copy of
 * the file. */
const char *container_fault(int code)
{
    return code == EBADMSG   ? "its checksum differs, the bytes on disk are damaged"
           : code == ENODATA ? "the file is truncated"
                             : strerror(code);
}

const char *container_remedy(int code)
{
    return code == EBADMSG || code == ENODATA ? CONTAINER_REPLACE : "check the drive (dmesg), then " CONTAINER_REPLACE;
}

static int no_file(const char *path, int code, struct error *ret_error)
{
    char target[PATH_MAX];
    ssize_t length = readlink(path, target, sizeof target - 1);
    if (length < 0 && code == ENOENT)
        return error_set(ret_error, code, "%s: %s; " CONTAINER_MEND, path, strerror(code));
    if (length < 0 || code != ENOENT)
        return error_set(ret_error, code, "%s: %s%s", path, strerror(code), error_remedy(code));
    target[length] = '\0';
    return error_set(ret_error, code,
                     "%.300s: a link to %.300s: %s; mount its drive, or mend the link, or remove the link and run its "
                     "`calypte convert` again (same flags; only this file is made anew)",
                     path, target, strerror(code));
}

/* Opens a file of the container and holds it against its entry in the manifest. */
static int open_file(const struct container *container, const char *name, const json_t *entry,
                     struct safetensors *ret_file, struct error *ret_error)
{
    _cleanup_free_ char *path = NULL;
    if (asprintf(&path, "%s/%s", container->path, name) < 0) {
        path = NULL;
        return error_set(ret_error, ENOMEM, "%s: no memory", name);
    }
    const json_t *bytes = json_object_get(entry, "bytes");
    uint64_t header;
    if (!json_is_integer(bytes) || json_integer_value(bytes) < 0 ||
        checksum_parse(json_object_get(entry, "header"), &header) < 0 ||
        !json_is_object(json_object_get(entry, "tensors")))
        return error_set(ret_error, EINVAL, "%s/%s: entry of %s is not valid, convert into another folder",
                         container->path, CONTAINER_MANIFEST, name);
    /* The length first: of a truncated file it says more than the header would. */
    struct stat facts;
    if (stat(path, &facts) < 0)
        return no_file(path, errno, ret_error);
    if ((uint64_t)facts.st_size != (uint64_t)json_integer_value(bytes))
        return error_set(ret_error, EINVAL, "%s: has %lld bytes, the manifest says %lld: " CONTAINER_MEND, path,
                         (long long)facts.st_size, (long long)json_integer_value(bytes));
    struct safetensors file;
    struct error why = {{0}};
    int status = safetensors_open(path, &file, &why);
    if (status == -EINVAL || status == -EOVERFLOW || status == -ENODATA) /* what stands there is no such file */
        return error_set(ret_error, EINVAL, "%.800s; " CONTAINER_MEND, why.text);
    if (status < 0)
        return error_set(ret_error, -status, "%s", why.text);
    if (file.file_bytes != (uint64_t)json_integer_value(bytes) || file.header_xxh3 != header) {
        status = error_set(ret_error, EINVAL, "%s: its header is damaged (checksum differs): " CONTAINER_MEND, path);
        safetensors_close(&file);
        return status;
    }
    *ret_file = file;
    return 0;
}

static int open_dense(const struct container *container, const char *name, const json_t *entry,
                      struct dense_file *ret_file, struct error *ret_error)
{
    int status = open_file(container, name, entry, &ret_file->header, ret_error);
    if (status < 0)
        return status;
    const struct safetensors *header = &ret_file->header;
    const json_t *tensors = json_object_get(entry, "tensors");
    ret_file->checksums = calloc(header->count + 1, sizeof ret_file->checksums[0]);
    if (!ret_file->checksums)
        return error_set(ret_error, ENOMEM, "%s: no memory", header->path);
    if (json_object_size(tensors) != header->count)
        return error_set(ret_error, EINVAL,
                         "%s: holds %zu tensors, the manifest lists %zu: convert into another folder", header->path,
                         header->count, json_object_size(tensors));
    for (size_t i = 0; i < header->count; i++) {
        if (checksum_parse(json_object_get(tensors, header->tensors[i].name), &ret_file->checksums[i]) < 0)
            return error_set(ret_error, EINVAL,
                             "%s: the manifest has no checksum of tensor %s: convert into another folder", header->path,
                             header->tensors[i].name);
    }
    if (header->data_offset % DISK_ALIGN != 0 || header->file_bytes % DISK_ALIGN != 0)
        return error_set(ret_error, EINVAL, "%s: its data do not stand on multiples of %u: convert into another folder",
                         header->path, DISK_ALIGN);
    return 0;
}

/* Reads a small table of an expert file and holds it against the manifest. The caller frees *ret_table. */
static int read_table(const struct safetensors *file, const json_t *tensors, const char *name, enum tensor_dtype dtype,
                      uint32_t rows, uint32_t columns, void **ret_table, struct error *ret_error)
{
    const struct tensor *tensor = safetensors_find(file, name);
    if (!tensor || tensor->dtype != dtype || tensor->dims != 2 || tensor->shape[0] != rows ||
        tensor->shape[1] != columns)
        return error_set(ret_error, EINVAL, "%s: tensor %s is not there as %s [%u, %u]: convert into another folder",
                         file->path, name, dtype_name(dtype), rows, columns);
    uint64_t expected;
    if (checksum_parse(json_object_get(tensors, name), &expected) < 0)
        return error_set(ret_error, EINVAL,
                         "%s: the manifest has no checksum of tensor %s: convert into another folder", file->path,
                         name);
    _cleanup_free_ void *table = malloc(tensor->bytes);
    if (!table)
        return error_set(ret_error, ENOMEM, "%s: no memory for tensor %s", file->path, name);
    int status = read_tensor(file, tensor, table, ret_error);
    if (status < 0)
        return status;
    if (XXH3_64bits(table, tensor->bytes) != expected)
        return error_set(ret_error, EINVAL, "%s: tensor %s is damaged (checksum differs): " CONTAINER_MEND, file->path,
                         name);
    *ret_table = take_pointer(table);
    return 0;
}

/* The place of every expert in a stripe. */
static int find_blobs(const struct container *container, uint32_t layer, struct expert_stripe *stripe,
                      struct error *ret_error)
{
    uint32_t experts = container->config.experts;
    stripe->offsets = calloc(experts, sizeof stripe->offsets[0]);
    if (!stripe->offsets)
        return error_set(ret_error, ENOMEM, "%s: no memory", stripe->header.path);
    for (uint32_t e = 0; e < experts; e++) {
        char name[TENSOR_NAME_MAX];
        snprintf(name, sizeof name, "model.layers.%u.mlp.experts.%u", layer, e);
        const struct tensor *tensor = safetensors_find(&stripe->header, name);
        if (!tensor || tensor->dtype != DTYPE_U8 || tensor->dims != 2 || tensor->shape[0] != stripe->slices.count ||
            tensor->shape[1] != container->slice_bytes || tensor->offset % DISK_ALIGN != 0)
            return error_set(
                ret_error, EINVAL,
                "%s: tensor %s is not there as U8 [%u, %zu] on a multiple of %u: convert into another folder",
                stripe->header.path, name, stripe->slices.count, container->slice_bytes, DISK_ALIGN);
        stripe->offsets[e] = tensor->offset;
    }
    return 0;
}

/* The tables stand in the first stripe. */
static int read_tables(const struct container *container, const json_t *entry, struct expert_layer *layer,
                       struct error *ret_error)
{
    const struct safetensors *file = &layer->stripes[0].header;
    const json_t *tensors = json_object_get(entry, "tensors");
    uint32_t experts = container->config.experts;
    void *checksums = NULL, *exponents = NULL;
    int status =
        read_table(file, tensors, "experts.checksums", DTYPE_U64, experts, EXPERT_SLICES, &checksums, ret_error);
    if (status == 0)
        status =
            read_table(file, tensors, "experts.exponents", DTYPE_I32, experts, EXPERT_MATRICES, &exponents, ret_error);
    layer->checksums = checksums;
    layer->exponents = exponents;
    for (uint32_t i = 0; status == 0 && i < experts * EXPERT_MATRICES; i++) {
        if (layer->exponents[i] < -EXPONENT_LIMIT || layer->exponents[i] > EXPONENT_LIMIT)
            status = error_set(ret_error, EINVAL,
                               "%s: tensor experts.exponents holds %d for expert %u: convert into another folder",
                               file->path, layer->exponents[i], i / EXPERT_MATRICES);
    }
    return status;
}

/* The files of a container on their way: who hears of those that are refused, and how many were. */
struct inspection {
    container_refusal *refusal; /* NULL: the first one ends it */
    void *context;
    uint32_t refused;
};

/* After a file was refused with `status` and the line `why`: 0 where the next one is looked at. */
static int refuse_file(struct inspection *inspection, const char *name, int status, const struct error *why,
                       struct error *ret_error)
{
    if (!inspection->refusal || status == -ENOMEM)
        return error_set(ret_error, -status, "%s", why->text);
    inspection->refusal(inspection->context, name, status, why);
    inspection->refused++;
    return 0;
}

static int open_experts(const struct container *container, const json_t *files, struct expert_layer *layer,
                        struct inspection *inspection, struct error *ret_error)
{
    int status = 0;
    struct error why = {{0}};
    for (uint32_t s = 0; status == 0 && s < container->stripes; s++) {
        struct expert_stripe *stripe = &layer->stripes[s];
        char name[64];
        snprintf(name, sizeof name, CONTAINER_EXPERTS_NAME, s, layer->layer);
        const json_t *entry = json_object_get(files, name);
        if (!entry)
            return error_set(ret_error, EINVAL, "%s/%s: lists no %s: convert into another folder", container->path,
                             CONTAINER_MANIFEST, name);
        stripe->slices = split(EXPERT_SLICES, s, container->stripes);
        status = open_file(container, name, entry, &stripe->header, &why);
        if (status == 0)
            status = find_blobs(container, layer->layer, stripe, &why);
        if (status == 0 && s == 0)
            status = read_tables(container, entry, layer, &why);
        if (status < 0)
            status = refuse_file(inspection, name, status, &why, ret_error);
    }
    return status;
}

/* The dense files are those of the manifest called dense-00001, dense-00002, ... without a gap. */
static int open_all_dense(struct container *container, const json_t *files, struct inspection *inspection,
                          struct error *ret_error)
{
    struct error why = {{0}};
    char name[64];
    size_t count = 0;
    while (count < DENSE_FILES_MAX) {
        snprintf(name, sizeof name, "dense-%05zu.safetensors", count + 1);
        if (!json_object_get(files, name))
            break;
        count++;
    }
    if (count == 0)
        return error_set(ret_error, EINVAL, "%s/%s: lists no dense-00001.safetensors: convert into another folder",
                         container->path, CONTAINER_MANIFEST);
    container->dense = calloc(count, sizeof container->dense[0]);
    if (!container->dense)
        return error_set(ret_error, ENOMEM, "%s: no memory", container->path);
    container->dense_count = count;
    for (size_t i = 0; i < count; i++) {
        snprintf(name, sizeof name, "dense-%05zu.safetensors", i + 1);
        int status = open_dense(container, name, json_object_get(files, name), &container->dense[i], &why);
        if (status < 0)
            status = refuse_file(inspection, name, status, &why, ret_error);
        if (status < 0)
            return status;
    }
    return 0;
}

static int open_all_experts(struct container *container, const json_t *files, struct inspection *inspection,
                            struct error *ret_error)
{
    uint32_t count = model_moe_layers(&container->config);
    container->experts = calloc(count + 1u, sizeof container->experts[0]);
    if (!container->experts)
        return error_set(ret_error, ENOMEM, "%s: no memory", container->path);
    container->expert_count = count;
    for (uint32_t layer = 0; layer < container->config.layers + container->config.mtp_layers; layer++) {
        int index = model_moe_index(&container->config, layer);
        if (index < 0)
            continue;
        container->experts[index].layer = layer;
        int status = open_experts(container, files, &container->experts[index], inspection, ret_error);
        if (status < 0)
            return status;
    }
    size_t expected = container->dense_count + (size_t)count * container->stripes;
    if (json_object_size(files) != expected)
        return error_set(ret_error, EINVAL,
                         "%s/%s: lists %zu files, its configuration has %zu: convert into another folder",
                         container->path, CONTAINER_MANIFEST, json_object_size(files), expected);
    return 0;
}

static int require_version(const char *path, const json_t *manifest, const char *name, json_int_t supported,
                           struct error *ret_error)
{
    const json_t *value = json_object_get(manifest, name);
    if (!json_is_integer(value))
        return error_set(ret_error, EINVAL, "%s: %s is missing or not a whole number: not a Calypte container?", path,
                         name);
    if (json_integer_value(value) != supported)
        return error_set(ret_error, ENOTSUP,
                         "%s: %s is %lld, this version reads %lld: convert with this version into another folder", path,
                         name, (long long)json_integer_value(value), (long long)supported);
    return 0;
}

/* Everything of the manifest but its files. */
static int parse_manifest(const char *path, const json_t *manifest, struct container *container,
                          struct error *ret_error)
{
    int status = require_version(path, manifest, "format", CONTAINER_FORMAT, ret_error);
    if (status == 0)
        status = require_version(path, manifest, "numerics", CONTAINER_NUMERICS, ret_error);
    if (status < 0)
        return status;
    uint64_t stated, computed;
    if (checksum_parse(json_object_get(manifest, "checksum"), &stated) < 0)
        return error_set(ret_error, EINVAL, "%s: has no valid checksum: convert into another folder", path);
    status = container_checksum(manifest, &computed, ret_error);
    if (status < 0)
        return status;
    if (stated != computed)
        return error_set(ret_error, EINVAL,
                         "%s: is damaged (checksum differs): fetch this file again, or convert into another folder",
                         path);
    container->identity = computed;
    status = require_version(path, manifest, "slices", EXPERT_SLICES, ret_error);
    if (status < 0)
        return status;
    json_int_t stripes = json_integer_value(json_object_get(manifest, "stripes"));
    if (stripes < 1 || stripes > (json_int_t)EXPERT_SLICES)
        return error_set(ret_error, EINVAL, "%s: stripes is missing or not from 1 to %u", path, EXPERT_SLICES);
    container->stripes = (uint32_t)stripes;

    container->dense_format = weight_format_parse(json_string_value(json_object_get(manifest, "dense_format")));
    container->expert_format = weight_format_parse(json_string_value(json_object_get(manifest, "expert_format")));
    if (!container->dense_format || !container->expert_format)
        return error_set(ret_error, ENOTSUP, "%s: dense_format or expert_format is neither int4 nor int8", path);
    const json_t *eps = json_object_get(manifest, "qk_norm_eps"), *generation = json_object_get(manifest, "generation");
    if (!json_is_number(eps) || !(json_number_value(eps) > 0))
        return error_set(ret_error, EINVAL, "%s: qk_norm_eps is missing or not a positive number", path);
    status = model_config_parse(json_object_get(manifest, "config"), json_is_null(generation) ? NULL : generation,
                                json_number_value(eps), &container->config, ret_error);
    if (status < 0)
        return error_prefix(ret_error, status, "%s", path);
    container->expert_shape = (struct expert_shape){.format = container->expert_format,
                                                    .hidden = container->config.hidden,
                                                    .width = container->config.expert_width};
    container->slice_bytes = expert_slice_bytes(&container->expert_shape);
    return require_version(path, manifest, "slice_bytes", (json_int_t)container->slice_bytes, ret_error);
}

static bool has_file(const char *folder, const char *name)
{
    char path[PATH_MAX];
    return snprintf(path, sizeof path, "%s/%s", folder, name) < (int)sizeof path && access(path, F_OK) == 0;
}

/* A folder without a manifest: says what it is instead. */
static int no_manifest(const char *path, struct error *ret_error)
{
    struct stat status;
    if (stat(path, &status) < 0)
        return error_set(ret_error, errno, "%s: %s; give the folder that `calypte convert` made", path,
                         strerror(errno));
    if (!S_ISDIR(status.st_mode))
        return error_set(ret_error, ENOTDIR, "%s: is not a folder; give the folder that `calypte convert` made", path);
    if (has_file(path, "config.json"))
        return error_set(ret_error, ENOENT,
                         "%s: is a Hugging Face folder and no container (it holds no %s); make one of it: "
                         "`calypte convert %s DST`",
                         path, CONTAINER_MANIFEST, path);
    if (has_file(path, CONTAINER_JOURNAL))
        return error_set(
            ret_error, ENOENT,
            "%s: holds no %s: not a Calypte container, its conversion is not finished: run the command that "
            "began it again to go on (`calypte convert SRC %s`)",
            path, CONTAINER_MANIFEST, path);
    if (has_file(path, "dense-00001.safetensors"))
        return error_set(
            ret_error, ENOENT,
            "%s: holds no %s, without which it is not a Calypte container: fetch this file again, or remove "
            "the folder and convert again (`calypte convert SRC %s`)",
            path, CONTAINER_MANIFEST, path);
    return error_set(ret_error, ENOENT,
                     "%s: holds no %s: not a Calypte container; give the folder that `calypte convert` made", path,
                     CONTAINER_MANIFEST);
}

static int open_manifest(struct container *container, struct inspection *inspection, struct error *ret_error)
{
    _cleanup_free_ char *path = NULL;
    if (asprintf(&path, "%s/%s", container->path, CONTAINER_MANIFEST) < 0) {
        path = NULL;
        return error_set(ret_error, ENOMEM, "%s: no memory", container->path);
    }
    if (access(path, F_OK) < 0 && (errno == ENOENT || errno == ENOTDIR))
        return no_manifest(container->path, ret_error);
    json_auto_t *manifest = NULL;
    int status = container_read_json(path, CONTAINER_MANIFEST_MAX, &manifest, ret_error);
    if (status == 0)
        status = parse_manifest(path, manifest, container, ret_error);
    if (status < 0)
        return status;
    const json_t *files = json_object_get(manifest, "files");
    if (!json_is_object(files))
        return error_set(ret_error, EINVAL, "%s: files is missing: convert into another folder", path);
    status = open_all_dense(container, files, inspection, ret_error);
    return status == 0 ? open_all_experts(container, files, inspection, ret_error) : status;
}

static int open_container(const char *path, struct inspection *inspection, struct container **ret_container,
                          struct error *ret_error)
{
    struct container *container = calloc(1, sizeof *container);
    if (!container || !(container->path = strdup(path))) {
        free(container);
        return error_set(ret_error, ENOMEM, "%s: no memory", path);
    }
    int status = open_manifest(container, inspection, ret_error);
    if (status < 0 || inspection->refused) {
        container_close(container);
        return status < 0 ? status : (int)inspection->refused;
    }
    *ret_container = container;
    return 0;
}

int container_open(const char *path, struct container **ret_container, struct error *ret_error)
{
    return open_container(path, &(struct inspection){0}, ret_container, ret_error);
}

int container_inspect(const char *path, container_refusal *refusal, void *context, struct container **ret_container,
                      struct error *ret_error)
{
    return open_container(path, &(struct inspection){.refusal = refusal, .context = context}, ret_container, ret_error);
}

void container_close(struct container *container)
{
    if (!container)
        return;
    for (size_t i = 0; i < container->dense_count; i++) {
        safetensors_close(&container->dense[i].header);
        free(container->dense[i].checksums);
    }
    for (size_t i = 0; i < container->expert_count; i++) {
        for (uint32_t s = 0; s < container->stripes; s++) {
            safetensors_close(&container->experts[i].stripes[s].header);
            free(container->experts[i].stripes[s].offsets);
        }
        free(container->experts[i].checksums);
        free(container->experts[i].exponents);
    }
    free(container->dense);
    free(container->experts);
    free(container->path);
    free(container);
}
