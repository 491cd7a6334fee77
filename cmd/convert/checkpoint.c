#include "cmd/convert/checkpoint.h"

#include "compute/math.h"
#include "proto/cleanup.h"
#include "proto/container.h"

#include <fcntl.h>
#include <stdarg.h>
#include <string.h>
#include <sys/stat.h>
#include <xxhash.h>

#define CONFIG_MAX_BYTES (16u << 20)
#define INDEX_MAX_BYTES (256u << 20)
#define INDEX_NAME "model.safetensors.index.json"
#define SINGLE_NAME "model.safetensors"
#define F8_BLOCK 128u
#define SAMPLES 16u
#define SAMPLE_BYTES 65536u

int checkpoint_note(struct checkpoint *checkpoint, const char *format, ...)
{
    char **notes = realloc(checkpoint->notes, (checkpoint->note_count + 1) * sizeof *notes);
    if (!notes)
        return -ENOMEM;
    checkpoint->notes = notes;
    va_list args;
    va_start(args, format);
    int length = vasprintf(&notes[checkpoint->note_count], format, args);
    va_end(args);
    if (length < 0)
        return -ENOMEM;
    checkpoint->note_count++;
    return 0;
}

static int join(const char *folder, const char *name, char **ret_path, struct error *ret_error)
{
    if (asprintf(ret_path, "%s/%s", folder, name) < 0) {
        *ret_path = NULL;
        return error_set(ret_error, ENOMEM, "%s/%s: no memory", folder, name);
    }
    return 0;
}

static int read_config(const char *folder, const char *name, bool optional, json_t **ret_object,
                       struct error *ret_error)
{
    _cleanup_free_ char *path = NULL;
    int status = join(folder, name, &path, ret_error);
    if (status < 0)
        return status;
    if (optional && access(path, F_OK) < 0 && errno == ENOENT)
        return 0;
    return container_read_json(path, CONFIG_MAX_BYTES, ret_object, ret_error);
}

/* A shard must be a file of the folder itself. */
static bool is_plain_name(const char *name)
{
    const char *suffix = ".safetensors";
    size_t length = strlen(name), tail = strlen(suffix);
    return length > tail && length < 256 && name[0] != '.' && !strchr(name, '/') &&
           !strcmp(name + length - tail, suffix);
}

static int compare_source(const void *a, const void *b)
{
    return strcmp(((const struct source_tensor *)a)->tensor->name, ((const struct source_tensor *)b)->tensor->name);
}

static int compare_text(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

static int open_shard(const char *folder, const char *name, struct shard *ret_shard, struct error *ret_error)
{
    _cleanup_free_ char *path = NULL;
    ret_shard->fd = -1;
    int status = join(folder, name, &path, ret_error);
    if (status < 0)
        return status;
    ret_shard->name = strdup(name);
    if (!ret_shard->name)
        return error_set(ret_error, ENOMEM, "%s: no memory", path);
    status = safetensors_open(path, &ret_shard->header, ret_error);
    if (status < 0)
        return status;
    ret_shard->fd = open(path, O_RDONLY | O_CLOEXEC);
    if (ret_shard->fd < 0)
        return error_set(ret_error, errno, "%s: %s", path, strerror(errno));
    return 0;
}

/* Opens the files that the weight map names, each once. */
static int open_shards(struct checkpoint *checkpoint, json_t *map, struct error *ret_error)
{
    _cleanup_free_ const char **files = calloc(json_object_size(map) + 1, sizeof *files);
    if (!files)
        return error_set(ret_error, ENOMEM, "%s/%s: no memory", checkpoint->path, INDEX_NAME);
    size_t count = 0;
    const char *name;
    json_t *value;
    json_object_foreach (map, name, value) {
        const char *file = json_string_value(value);
        if (!file || !is_plain_name(file))
            return error_set(
                ret_error, EINVAL,
                "%s/%s: tensor %.100s is placed in %.100s, which is not a .safetensors file of this folder",
                checkpoint->path, INDEX_NAME, name, file ? file : "something that is not a name");
        files[count++] = file;
    }
    if (count > 1)
        qsort(files, count, sizeof *files, compare_text);
    checkpoint->shards = calloc(count + 1, sizeof checkpoint->shards[0]);
    if (!checkpoint->shards)
        return error_set(ret_error, ENOMEM, "%s/%s: no memory", checkpoint->path, INDEX_NAME);
    for (size_t i = 0; i < count; i++) {
        if (i > 0 && !strcmp(files[i], files[i - 1]))
            continue;
        int status = open_shard(checkpoint->path, files[i], &checkpoint->shards[checkpoint->shard_count++], ret_error);
        if (status < 0)
            return status;
    }
    return 0;
}

static const struct shard *find_shard(const struct checkpoint *checkpoint, const char *name)
{
    size_t low = 0, high = checkpoint->shard_count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        int order = strcmp(name, checkpoint->shards[middle].name);
        if (order == 0)
            return &checkpoint->shards[middle];
        if (order < 0)
            high = middle;
        else
            low = middle + 1;
    }
    return NULL;
}

/* The index decides where a tensor is; copies elsewhere are noted. */
static int place_by_index(struct checkpoint *checkpoint, json_t *map, struct error *ret_error)
{
    const char *name;
    json_t *value;
    checkpoint->tensors = calloc(json_object_size(map) + 1, sizeof checkpoint->tensors[0]);
    if (!checkpoint->tensors)
        return error_set(ret_error, ENOMEM, "%s/%s: no memory", checkpoint->path, INDEX_NAME);
    json_object_foreach (map, name, value) {
        const struct shard *shard = find_shard(checkpoint, json_string_value(value));
        const struct tensor *tensor = shard ? safetensors_find(&shard->header, name) : NULL;
        if (!tensor)
            return error_set(ret_error, EINVAL, "%s/%s: tensor %.120s is missing there, though %s places it there",
                             checkpoint->path, json_string_value(value), name, INDEX_NAME);
        checkpoint->tensors[checkpoint->tensor_count++] = (struct source_tensor){.tensor = tensor, .shard = shard};
    }
    for (size_t s = 0; s < checkpoint->shard_count; s++) {
        const struct shard *shard = &checkpoint->shards[s];
        for (size_t i = 0; i < shard->header.count; i++) {
            const char *there = shard->header.tensors[i].name;
            const char *place = json_string_value(json_object_get(map, there));
            if (place && !strcmp(place, shard->name))
                continue;
            if (checkpoint_note(checkpoint, "%s: tensor %s ignored: %s %s", shard->name, there, INDEX_NAME,
                                place ? "places it in another file" : "does not list it") < 0)
                return error_set(ret_error, ENOMEM, "%s: no memory", checkpoint->path);
        }
    }
    return 0;
}

static int open_indexed(struct checkpoint *checkpoint, const char *index_path, struct error *ret_error)
{
    json_auto_t *index = NULL;
    int status = container_read_json(index_path, INDEX_MAX_BYTES, &index, ret_error);
    if (status < 0)
        return status;
    json_t *map = json_object_get(index, "weight_map");
    if (!json_is_object(map) || json_object_size(map) == 0)
        return error_set(ret_error, EINVAL, "%s: has no weight_map", index_path);
    status = open_shards(checkpoint, map, ret_error);
    return status == 0 ? place_by_index(checkpoint, map, ret_error) : status;
}

static int open_single(struct checkpoint *checkpoint, struct error *ret_error)
{
    checkpoint->shards = calloc(1, sizeof checkpoint->shards[0]);
    if (!checkpoint->shards)
        return error_set(ret_error, ENOMEM, "%s: no memory", checkpoint->path);
    checkpoint->shard_count = 1;
    struct shard *shard = &checkpoint->shards[0];
    int status = open_shard(checkpoint->path, SINGLE_NAME, shard, ret_error);
    if (status == -ENOENT)
        return error_set(ret_error, ENOENT, "%s: holds neither %s nor %s: not a Hugging Face checkpoint?",
                         checkpoint->path, INDEX_NAME, SINGLE_NAME);
    if (status < 0)
        return status;
    checkpoint->tensors = calloc(shard->header.count + 1, sizeof checkpoint->tensors[0]);
    if (!checkpoint->tensors)
        return error_set(ret_error, ENOMEM, "%s: no memory", checkpoint->path);
    for (size_t i = 0; i < shard->header.count; i++)
        checkpoint->tensors[checkpoint->tensor_count++] =
            (struct source_tensor){.tensor = &shard->header.tensors[i], .shard = shard};
    return 0;
}

/* A folder of somebody's is told from a checkpoint by its config.json; says what it is instead. */
static int check_folder(const char *path, struct error *ret_error)
{
    static const char *const names[] = {CONTAINER_MANIFEST, "config.json"};
    bool there[2] = {false};
    struct stat facts;
    if (stat(path, &facts) < 0)
        return error_set(ret_error, errno, "%s: %s%s", path, strerror(errno),
                         errno == ENOENT ? "; give the folder of a Hugging Face checkpoint" : error_remedy(errno));
    if (!S_ISDIR(facts.st_mode))
        return error_set(ret_error, ENOTDIR, "%s: is not a folder; give the folder of a Hugging Face checkpoint", path);
    for (size_t i = 0; i < 2; i++) {
        _cleanup_free_ char *name = NULL;
        int status = join(path, names[i], &name, ret_error);
        if (status < 0)
            return status;
        there[i] = access(name, F_OK) == 0 || errno != ENOENT;
    }
    if (there[0] && !there[1])
        return error_set(
            ret_error, EINVAL,
            "%s: is a Calypte container already; give the folder of the Hugging Face checkpoint it was made of", path);
    if (!there[1])
        return error_set(ret_error, ENOENT, "%s: holds no config.json: not a Hugging Face checkpoint", path);
    return 0;
}

static int open_all(struct checkpoint *checkpoint, struct error *ret_error)
{
    int status = check_folder(checkpoint->path, ret_error);
    if (status == 0)
        status = read_config(checkpoint->path, "config.json", false, &checkpoint->config, ret_error);
    if (status == 0)
        status = read_config(checkpoint->path, "generation_config.json", true, &checkpoint->generation, ret_error);
    _cleanup_free_ char *index_path = NULL;
    if (status == 0)
        status = join(checkpoint->path, INDEX_NAME, &index_path, ret_error);
    if (status < 0)
        return status;
    if (access(index_path, F_OK) == 0 || errno != ENOENT)
        status = open_indexed(checkpoint, index_path, ret_error);
    else
        status = open_single(checkpoint, ret_error);
    if (status == 0 && checkpoint->tensor_count > 1)
        qsort(checkpoint->tensors, checkpoint->tensor_count, sizeof checkpoint->tensors[0], compare_source);
    return status;
}

int checkpoint_open(const char *path, struct checkpoint *ret_checkpoint, struct error *ret_error)
{
    struct checkpoint checkpoint = {.path = strdup(path)};
    if (!checkpoint.path)
        return error_set(ret_error, ENOMEM, "%s: no memory", path);
    int status = open_all(&checkpoint, ret_error);
    if (status < 0)
        checkpoint_close(&checkpoint);
    else
        *ret_checkpoint = checkpoint;
    return status;
}

void checkpoint_close(struct checkpoint *checkpoint)
{
    for (size_t i = 0; i < checkpoint->shard_count; i++) {
        free(checkpoint->shards[i].name);
        safetensors_close(&checkpoint->shards[i].header);
        close_fdp(&checkpoint->shards[i].fd);
    }
    for (size_t i = 0; i < checkpoint->note_count; i++)
        free(checkpoint->notes[i]);
    json_decref(checkpoint->config);
    json_decref(checkpoint->generation);
    free(checkpoint->shards);
    free(checkpoint->tensors);
    free(checkpoint->notes);
    free(checkpoint->path);
    *checkpoint = (struct checkpoint){0};
}

struct source_tensor *checkpoint_find(const struct checkpoint *checkpoint, const char *name)
{
    size_t low = 0, high = checkpoint->tensor_count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        int order = strcmp(name, checkpoint->tensors[middle].tensor->name);
        if (order == 0)
            return &checkpoint->tensors[middle];
        if (order < 0)
            high = middle;
        else
            low = middle + 1;
    }
    return NULL;
}

/* Reads bytes of a shard; a file that became shorter since it was opened is an error. */
static int read_shard(const struct shard *shard, const char *tensor, uint64_t offset, size_t bytes, void *ret_bytes,
                      struct error *ret_error)
{
    for (size_t done = 0; done < bytes;) {
        ssize_t got = pread(shard->fd, (char *)ret_bytes + done, bytes - done, (off_t)(offset + done));
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return error_set(ret_error, got < 0 ? errno : EIO, "%s: tensor %s: cannot read at byte %llu: %s",
                             shard->header.path, tensor, (unsigned long long)(offset + done),
                             got < 0 ? strerror(errno) : "the file became shorter");
        done += (size_t)got;
    }
    return 0;
}

static int hash_json(XXH3_state_t *hash, const json_t *object, struct error *ret_error)
{
    _cleanup_free_ char *text = object ? json_dumps(object, JSON_COMPACT | JSON_SORT_KEYS) : strdup("null");
    if (!text)
        return error_set(ret_error, ENOMEM, "no memory for the fingerprint of the checkpoint");
    XXH3_64bits_update(hash, text, strlen(text) + 1);
    return 0;
}

static int hash_shard(XXH3_state_t *hash, const struct shard *shard, bool times, uint8_t *sample,
                      struct error *ret_error)
{
    struct stat facts;
    if (fstat(shard->fd, &facts) < 0)
        return error_set(ret_error, errno, "%s: %s", shard->header.path, strerror(errno));
    uint64_t numbers[] = {shard->header.file_bytes, shard->header.header_xxh3,
                          times ? (uint64_t)facts.st_mtim.tv_sec : 0, times ? (uint64_t)facts.st_mtim.tv_nsec : 0};
    XXH3_64bits_update(hash, shard->name, strlen(shard->name) + 1);
    XXH3_64bits_update(hash, numbers, sizeof numbers);
    uint64_t data = shard->header.file_bytes - shard->header.data_offset;
    for (uint64_t i = 0; i < SAMPLES; i++) {
        uint64_t offset = data / SAMPLES * i;
        size_t bytes = data - offset < SAMPLE_BYTES ? (size_t)(data - offset) : SAMPLE_BYTES;
        int status = read_shard(shard, "(sample)", shard->header.data_offset + offset, bytes, sample, ret_error);
        if (status < 0)
            return status;
        XXH3_64bits_update(hash, sample, bytes);
    }
    return 0;
}

static void free_hash(XXH3_state_t **hash)
{
    XXH3_freeState(*hash);
}

int checkpoint_fingerprint(const struct checkpoint *checkpoint, bool times, uint64_t *ret_hash, struct error *ret_error)
{
    _cleanup_(free_hash) XXH3_state_t *hash = XXH3_createState();
    _cleanup_free_ uint8_t *sample = malloc(SAMPLE_BYTES);
    if (!hash || !sample)
        return error_set(ret_error, ENOMEM, "%s: no memory for its fingerprint", checkpoint->path);
    XXH3_64bits_reset(hash);
    int status = hash_json(hash, checkpoint->config, ret_error);
    if (status == 0)
        status = hash_json(hash, checkpoint->generation, ret_error);
    for (size_t i = 0; status == 0 && i < checkpoint->tensor_count; i++) {
        const struct source_tensor *tensor = &checkpoint->tensors[i];
        XXH3_64bits_update(hash, tensor->tensor->name, strlen(tensor->tensor->name) + 1);
        XXH3_64bits_update(hash, tensor->shard->name, strlen(tensor->shard->name) + 1);
    }
    if (checkpoint->synthetic)
        XXH3_64bits_update(hash, &checkpoint->seed, sizeof checkpoint->seed);
    for (size_t i = 0; status == 0 && !checkpoint->synthetic && i < checkpoint->shard_count; i++)
        status = hash_shard(hash, &checkpoint->shards[i], times, sample, ret_error);
    if (status == 0)
        *ret_hash = XXH3_64bits_digest(hash);
    return status;
}

/* E4M3FN: sign, 4 exponent bits with bias 7, 3 fraction bits; no infinities, NaN at 0x7F and 0xFF only. */
static float f8_to_f32(uint8_t byte)
{
    int exponent = byte >> 3 & 15, fraction = byte & 7;
    float value = exponent == 0 ? (float)fraction / 512.0f : (float)(8 + fraction) * (float)(1u << exponent) / 1024.0f;
    if ((byte & 0x7F) == 0x7F)
        value = __builtin_nanf("");
    return byte & 0x80 ? -value : value;
}

static uint64_t f8_blocks(uint64_t size)
{
    return (size + F8_BLOCK - 1) / F8_BLOCK;
}

static void format_shape(const struct tensor *tensor, char *ret_text, size_t size)
{
    size_t used = (size_t)snprintf(ret_text, size, "[");
    for (uint32_t i = 0; i < tensor->dims; i++)
        used += (size_t)snprintf(ret_text + used, size - used, "%s%llu", i ? ", " : "",
                                 (unsigned long long)tensor->shape[i]);
    snprintf(ret_text + used, size - used, "]");
}

static int check_shape(const struct source_tensor *source, uint64_t rows, uint64_t columns, struct error *ret_error)
{
    const struct tensor *tensor = source->tensor;
    char shape[128];
    format_shape(tensor, shape, sizeof shape);
    if (rows == 0 && (tensor->dims != 1 || tensor->shape[0] != columns))
        return error_set(ret_error, EINVAL, "%s: tensor %s has shape %s, the configuration needs [%llu]",
                         source->shard->header.path, tensor->name, shape, (unsigned long long)columns);
    if (rows != 0 && (tensor->dims != 2 || tensor->shape[0] != rows || tensor->shape[1] != columns))
        return error_set(ret_error, EINVAL, "%s: tensor %s has shape %s, the configuration needs [%llu, %llu]",
                         source->shard->header.path, tensor->name, shape, (unsigned long long)rows,
                         (unsigned long long)columns);
    return 0;
}

/* An F8_E4M3 weight needs its scales beside it, [ceil(rows / 128), ceil(columns / 128)], F32 or BF16. */
static int check_scale(const struct checkpoint *checkpoint, struct source *source, struct error *ret_error)
{
    const struct source_tensor *weight = source->weight;
    char name[TENSOR_NAME_MAX + 16];
    snprintf(name, sizeof name, "%s_scale_inv", weight->tensor->name);
    struct source_tensor *scale = checkpoint_find(checkpoint, name);
    if (!scale)
        return error_set(ret_error, EINVAL, "%s: tensor %s is F8_E4M3 but %s is missing", weight->shard->header.path,
                         weight->tensor->name, name);
    if (scale->tensor->dtype != DTYPE_F32 && scale->tensor->dtype != DTYPE_BF16)
        return error_set(ret_error, EINVAL, "%s: tensor %s has dtype %s, supported are F32 and BF16",
                         scale->shard->header.path, name, dtype_name(scale->tensor->dtype));
    scale->used = true;
    source->scale = scale;
    return check_shape(scale, f8_blocks(source->rows), f8_blocks(source->columns), ret_error);
}

int source_check(const struct checkpoint *checkpoint, struct source_tensor *weight, uint64_t rows, uint64_t columns,
                 struct source *ret_source, struct error *ret_error)
{
    *ret_source = (struct source){.weight = weight, .rows = rows ? rows : 1, .columns = columns};
    weight->used = true;
    int status = check_shape(weight, rows, columns, ret_error);
    if (status < 0)
        return status;
    switch (weight->tensor->dtype) {
    case DTYPE_F8_E4M3: return check_scale(checkpoint, ret_source, ret_error);
    case DTYPE_BF16:
    case DTYPE_F16:
    case DTYPE_F32: return 0;
    case DTYPE_U8:
    case DTYPE_I8:
    case DTYPE_I32:
    case DTYPE_U32:
    case DTYPE_I64:
    case DTYPE_U64:
    case DTYPE_F64: break;
    }
    return error_set(ret_error, EINVAL, "%s: tensor %s has dtype %s, supported are BF16, F16, F32 and F8_E4M3",
                     weight->shard->header.path, weight->tensor->name, dtype_name(weight->tensor->dtype));
}

/* `count` stored values to f32. F8 values are scaled by the caller. */
static void decode(const struct source *source, enum tensor_dtype dtype, const uint8_t *raw, size_t count,
                   float *ret_values)
{
    for (size_t i = 0; i < count; i++) {
        uint16_t half;
        if (dtype == DTYPE_F8_E4M3) {
            ret_values[i] = source->f8[raw[i]];
        } else if (dtype == DTYPE_F32) {
            memcpy(&ret_values[i], raw + i * 4, 4);
        } else {
            memcpy(&half, raw + i * 2, 2);
            ret_values[i] = dtype == DTYPE_BF16 ? math_bf16_to_f32(half) : math_f16_to_f32(half);
        }
    }
}

/* All finite? A finite float times zero is zero, anything else is NaN. */
static bool all_finite(const float *values, size_t count)
{
    float lanes[16] = {0};
    size_t i = 0;
    for (; i + 16 <= count; i += 16) {
        for (size_t l = 0; l < 16; l++)
            lanes[l] += values[i + l] * 0.0f;
    }
    for (; i < count; i++)
        lanes[0] += values[i] * 0.0f;
    for (size_t l = 0; l < 16; l++) {
        if (lanes[l] != 0)
            return false;
    }
    return true;
}

static int refuse_not_finite(const struct source_tensor *source, struct error *ret_error)
{
    return error_set(ret_error, EINVAL,
                     "%s: tensor %s holds a NaN or an infinity: the checkpoint is damaged, fetch it again",
                     source->shard->header.path, source->tensor->name);
}

int source_open(struct source *source, struct error *ret_error)
{
    if (!source->scale)
        return 0;
    const struct tensor *scale = source->scale->tensor;
    size_t count = (size_t)(scale->shape[0] * scale->shape[1]);
    _cleanup_free_ uint8_t *raw = malloc(scale->bytes + 1);
    source->scales = malloc(count * sizeof source->scales[0] + 1);
    source->f8 = malloc(256 * sizeof source->f8[0]);
    if (!raw || !source->scales || !source->f8)
        return error_set(ret_error, ENOMEM, "%s: tensor %s: no memory", source->scale->shard->header.path, scale->name);
    for (uint32_t i = 0; i < 256; i++)
        source->f8[i] = f8_to_f32((uint8_t)i);
    int status = read_shard(source->scale->shard, scale->name, scale->offset, scale->bytes, raw, ret_error);
    if (status < 0)
        return status;
    decode(source, scale->dtype, raw, count, source->scales);
    return all_finite(source->scales, count) ? 0 : refuse_not_finite(source->scale, ret_error);
}

void source_close(struct source *source)
{
    free(source->scales);
    free(source->raw);
    free(source->f8);
    source->scales = NULL;
    source->f8 = NULL;
    source->raw = NULL;
    source->raw_bytes = 0;
}

int source_read(struct source *source, uint64_t first, uint64_t count, float *ret_rows, struct error *ret_error)
{
    const struct tensor *weight = source->weight->tensor;
    size_t row_bytes = (size_t)source->columns * dtype_bytes(weight->dtype), bytes = (size_t)count * row_bytes;
    if (bytes > source->raw_bytes) {
        free(source->raw);
        source->raw = malloc(bytes);
        source->raw_bytes = source->raw ? bytes : 0;
        if (!source->raw)
            return error_set(ret_error, ENOMEM, "%s: tensor %s: no memory for %zu bytes",
                             source->weight->shard->header.path, weight->name, bytes);
    }
    int status = read_shard(source->weight->shard, weight->name, weight->offset + first * row_bytes, bytes, source->raw,
                            ret_error);
    if (status < 0)
        return status;
    decode(source, weight->dtype, source->raw, (size_t)(count * source->columns), ret_rows);
    for (uint64_t r = 0; source->scales && r < count; r++) {
        const float *scales = source->scales + (first + r) / F8_BLOCK * f8_blocks(source->columns);
        float *row = ret_rows + r * source->columns;
        for (uint64_t c = 0; c < source->columns; c++)
            row[c] *= scales[c / F8_BLOCK];
    }
    return all_finite(ret_rows, (size_t)(count * source->columns)) ? 0 : refuse_not_finite(source->weight, ret_error);
}

int source_read_raw(struct source *source, void *ret_bytes, struct error *ret_error)
{
    const struct tensor *weight = source->weight->tensor;
    return read_shard(source->weight->shard, weight->name, weight->offset, weight->bytes, ret_bytes, ret_error);
}
