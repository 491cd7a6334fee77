#include "cmd/convert/synth.h"

#include "cmd/convert/tensor_stream.h"
#include "proto/cleanup.h"
#include "proto/container.h"

#include <math.h>
#include <string.h>

#define CONFIG_MAX_BYTES (1u << 20)
#define CHUNK_BYTES (4u << 20) /* made, hashed and written at a time */
/* Of the residual stream's root mean square, what a layer's two additions have. With 1 the router of a layer would choose nearly anew
 * after each addition, with 1/2 it keeps about as much of its choice as in trained models (compute/README.md, Lookahead). */
#define RESIDUAL_SHARE 0.5f
#define GOLDEN 0x9e3779b97f4a7c15ull
#define F16_ONE 0x3c00u
#define F16_FRACTION 0x3ffu

/* Word `i` of the stream called `key`: SplitMix64 (Steele, Lea and Flood 2014), whose state is a counter. */
static inline uint64_t random_word(uint64_t key, uint64_t i)
{
    uint64_t x = key + i * GOLDEN;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    return x ^ x >> 31;
}

static uint64_t tensor_key(const struct unit_target *target, const char *name)
{
    return XXH3_64bits_withSeed(name, strlen(name), target->plan->checkpoint->seed);
}

/* Words first .. first + bytes / 8 - 1 of a stream; bytes is a multiple of 8. */
static void fill(uint64_t key, uint64_t first, void *ret_bytes, size_t bytes)
{
    uint64_t *words = ret_bytes;
    for (size_t i = 0; i < bytes / sizeof *words; i++)
        words[i] = random_word(key, first + i);
}

/* Random bytes as quanta around 0: the least value, which has no opposite (-128; -8, nibble 0), becomes 0. A mean that is not 0 would
 * make every column alike, and give all tokens the same experts some layers on. */
static void make_quanta(enum weight_format format, void *bytes, size_t count)
{
    int8_t *quanta = bytes;
    for (size_t i = 0; format == WEIGHT_INT8 && i < count; i++)
        quanta[i] = quanta[i] == -128 ? 0 : quanta[i];
    uint64_t *words = bytes;
    for (size_t i = 0; format == WEIGHT_INT4 && i < count / sizeof *words; i++) {
        uint64_t w = words[i], none = ~(w | w >> 1 | w >> 2 | w >> 3) & 0x1111111111111111ull;
        words[i] = w | none << 3;
    }
}

/* Random bytes as scales: f16 from 1 to 2. */
static void make_scales(void *bytes, size_t count)
{
    uint16_t *scales = bytes;
    for (size_t i = 0; i < count / sizeof *scales; i++)
        scales[i] = (uint16_t)(F16_ONE | (scales[i] & F16_FRACTION));
}

/* The exponent with which quanta and scales as above have a root mean square next to `wanted`. */
static int32_t exponent_for(enum weight_format format, float wanted)
{
    const float scale = 1.527525f;                                       /* sqrt(7 / 3): of numbers from 1 to 2 */
    const float quantum = format == WEIGHT_INT4 ? 4.183300f : 73.46727f; /* of -7 .. 7, of -127 .. 127, with 0 twice */
    int x;
    float m = frexpf(wanted / (scale * quantum), &x);
    return m < 0.70710678f ? x - 1 : x;
}

static bool ends_with(const char *name, const char *end)
{
    size_t length = strlen(name), most = strlen(end);
    return length >= most && strcmp(name + length - most, end) == 0;
}

/* Unit variance out of unit variance in, but for what is added to the residual stream; embeddings are looked up, so theirs is their
 * own. */
static float wanted_rms(const struct plan_unit *unit, uint64_t k)
{
    const char *name = unit->sources[0].weight->tensor->name;
    if (strcmp(name, "model.embed_tokens.weight") == 0)
        return 1.0f;
    bool adds = ends_with(name, ".o_proj.weight") || ends_with(name, ".down_proj.weight");
    return (adds ? RESIDUAL_SHARE : 1.0f) / sqrtf((float)k);
}

/* Streams one tensor of random bytes, made into weights by the caller's kind: quanta (format) or scales (0). */
static int stream_random(const struct unit_target *target, uint32_t tensor, enum weight_format format, uint8_t *chunk,
                         struct error *ret_error)
{
    const struct tensor *place = &target->file->tensors[tensor];
    uint64_t key = tensor_key(target, place->name);
    _cleanup_(tensor_stream_close) struct tensor_stream stream = {0};
    int status = tensor_stream_open(target, tensor, &stream, ret_error);
    for (uint64_t done = 0; status == 0 && done < place->bytes;) {
        size_t bytes = place->bytes - done < CHUNK_BYTES ? (size_t)(place->bytes - done) : CHUNK_BYTES;
        fill(key, done / 8, chunk, bytes);
        if (format)
            make_quanta(format, chunk, bytes);
        else
            make_scales(chunk, bytes);
        status = unit_stopped(target, ret_error);
        if (status == 0)
            status = tensor_stream_write(&stream, chunk, bytes, ret_error);
        atomic_fetch_add(target->bytes_done, bytes);
        done += bytes;
    }
    if (status == 0)
        tensor_stream_finish(&stream);
    return status;
}

static int synth_matrix(const struct unit_target *target, const struct plan_unit *unit, struct error *ret_error)
{
    _cleanup_free_ uint8_t *chunk = malloc(CHUNK_BYTES);
    if (!chunk)
        return error_set(ret_error, ENOMEM, "%s: no memory for random weights", target->file->name);
    int status = stream_random(target, unit->tensors[0], unit->format, chunk, ret_error);
    if (status == 0)
        status = stream_random(target, unit->tensors[1], (enum weight_format)0, chunk, ret_error);
    if (status < 0)
        return status;
    uint64_t k = target->file->tensors[unit->tensors[0]].shape[1] * BLOCK_COLUMNS;
    int32_t exponent = exponent_for(unit->format, wanted_rms(unit, k));
    return tensor_write(target, unit->tensors[2], &exponent, ret_error);
}

/* Norms around 1, biases 0, small matrices (router, index weights) with the variance that quantised ones have. */
static int synth_plain(const struct unit_target *target, const struct plan_unit *unit, struct error *ret_error)
{
    const struct tensor *place = &target->file->tensors[unit->tensors[0]];
    size_t count = place->bytes / dtype_bytes(place->dtype), length = strlen(place->name);
    _cleanup_free_ float *values = malloc(count * sizeof *values + 1);
    if (!values)
        return error_set(ret_error, ENOMEM, "%s: no memory for random weights", target->file->name);
    uint64_t key = tensor_key(target, place->name);
    bool bias = length > 4 && !strcmp(place->name + length - 4, "bias");
    float width = place->dims == 1 ? 0.1f : sqrtf(3.0f / (float)place->shape[1]),
          middle = place->dims == 1 ? 1.0f : 0.0f;
    uint16_t *halves = (uint16_t *)(void *)values;
    for (size_t i = 0; i < count; i++) {
        float uniform = (float)(random_word(key, i) >> 40) * 0x1p-23f - 1.0f; /* -1 .. 1 */
        float value = bias ? 0.0f : middle + width * uniform;
        if (place->dtype == DTYPE_F32) {
            values[i] = value;
            continue;
        }
        uint32_t bits; /* BF16: the upper half of an f32 */
        memcpy(&bits, &value, sizeof bits);
        halves[i] = (uint16_t)(bits >> 16);
    }
    atomic_fetch_add(target->bytes_done, place->bytes);
    return tensor_write(target, unit->tensors[0], values, ret_error);
}

static int synth_expert(const struct unit_target *target, const struct plan_unit *unit, struct error *ret_error)
{
    const struct expert_shape *shape = &target->plan->expert_shape;
    size_t slice_bytes = target->plan->slice_bytes;
    _cleanup_free_ uint8_t *blob = calloc(EXPERT_SLICES, slice_bytes);
    if (!blob)
        return error_set(ret_error, ENOMEM, "%s: no memory for expert %u", target->file->name, unit->expert);
    uint64_t key = tensor_key(target, target->file->tensors[unit->tensors[0]].name);
    for (uint32_t s = 0; s < EXPERT_SLICES; s++) {
        struct slice_part parts[EXPERT_MATRICES];
        size_t used = expert_slice(shape, s, parts);
        uint8_t *slice = blob + s * slice_bytes;
        fill(key, s * slice_bytes / 8, slice, used);
        make_quanta(shape->format, slice, parts[0].scales);
        make_scales(slice + parts[0].scales, used - parts[0].scales);
    }
    for (int m = 0; m < EXPERT_MATRICES; m++)
        target->exponents[unit->expert * EXPERT_MATRICES + (uint32_t)m] =
            exponent_for(shape->format, (m == EXPERT_DOWN ? RESIDUAL_SHARE : 1.0f) /
                                            sqrtf((float)expert_columns(shape, (enum expert_matrix)m)));
    int status = unit_stopped(target, ret_error);
    return status == 0 ? tensor_write_expert(target, unit, blob, ret_error) : status;
}

int synth_unit(const struct unit_target *target, const struct plan_unit *unit, struct error *ret_error)
{
    switch (unit->kind) {
    case UNIT_MATRIX:
    case UNIT_W_UK:
    case UNIT_W_UV: return synth_matrix(target, unit, ret_error);
    case UNIT_F32:
    case UNIT_AS_IS: return synth_plain(target, unit, ret_error);
    case UNIT_EXPERT: return synth_expert(target, unit, ret_error);
    }
    return error_set(ret_error, EINVAL, "%s: unit of unknown kind %d", target->file->name, (int)unit->kind);
}

/* The configuration of the model that is imitated. */
static int read_model(const char *like, json_t **ret_config, struct error *ret_error)
{
    const char *built_in = synth_model(like);
    json_error_t where;
    if (built_in) {
        *ret_config = json_loads(built_in, 0, &where);
        return *ret_config ? 0 : error_set(ret_error, ENOMEM, "%s: no memory for its configuration", like);
    }
    int status = container_read_json(like, CONFIG_MAX_BYTES, ret_config, ret_error);
    if (status == -ENOENT)
        return error_set(ret_error, ENOENT, "%s: is neither a config.json nor a built-in model; built in are %s", like,
                         synth_model_names());
    return status;
}

static void shorten(json_t *config, const char *list, size_t layers)
{
    json_t *array = json_object_get(config, list);
    while (json_array_size(array) > layers && layers > 0)
        json_array_remove(array, json_array_size(array) - 1);
    if (json_array_size(array) < layers)
        json_object_del(config, list); /* too short for so many layers: the rule behind it counts */
}

/* Applies the options; what they make impossible model_config_parse refuses. */
static void change_config(const struct synth_options *options, json_t *config)
{
    if (options->layers != SYNTH_UNCHANGED)
        json_object_set_new(config, "num_hidden_layers", json_integer(options->layers));
    size_t layers = (size_t)json_integer_value(json_object_get(config, "num_hidden_layers"));
    shorten(config, "indexer_types", layers);
    shorten(config, "mlp_layer_types", layers);
    if (options->dense != SYNTH_UNCHANGED) {
        json_object_del(config, "mlp_layer_types");
        json_object_set_new(config, "first_k_dense_replace", json_integer(options->dense));
    }
    if (options->experts != SYNTH_UNCHANGED)
        json_object_set_new(config, "n_routed_experts", json_integer(options->experts));
    json_object_set_new(config, "num_nextn_predict_layers", json_integer(options->mtp));
    json_object_del(config, "quantization_config"); /* its weights never were stored */
}

/* The tensors of a family, one by one. */
struct tensor_list {
    struct tensor *tensors; /* NULL: only counted */
    size_t count;
};

__attribute__((format(printf, 4, 5))) static void add(struct tensor_list *list, const struct model_config *config,
                                                      const struct tensor_rule *rule, const char *format, ...)
{
    struct tensor *tensor = list->tensors ? &list->tensors[list->count] : NULL;
    list->count++;
    if (!tensor)
        return;
    uint64_t rows = tensor_size_of(config, rule->rows), columns = tensor_size_of(config, rule->columns);
    *tensor = (struct tensor){
        .dtype = DTYPE_BF16, .dims = rows ? 2 : 1, .shape = {rows ? rows : columns, rows ? columns : 1, 1, 1}};
    tensor->bytes = tensor->shape[0] * tensor->shape[1] * dtype_bytes(tensor->dtype);
    va_list args;
    va_start(args, format);
    vsnprintf(tensor->name, sizeof tensor->name, format, args);
    va_end(args);
}

static void list_tensors(const struct tensor_family *family, const struct model_config *config,
                         struct tensor_list *list)
{
    list->count = 0;
    for (size_t i = 0; i < family->rule_count; i++) {
        const struct tensor_rule *rule = &family->rules[i];
        const char *star = strchr(rule->name, '*');
        if (rule->scope == SCOPE_MODEL)
            add(list, config, rule, "%s", rule->name);
        for (uint32_t layer = 0; rule->scope != SCOPE_MODEL && layer < config->layers + config->mtp_layers; layer++) {
            if (!tensor_scope_has(config, rule->scope, layer))
                continue;
            if (!star)
                add(list, config, rule, "model.layers.%u.%s", layer, rule->name);
            for (uint32_t e = 0; star && e < config->experts; e++)
                add(list, config, rule, "model.layers.%u.%.*s%u%s", layer, (int)(star - rule->name), rule->name, e,
                    star + 1);
        }
    }
}

static int compare_tensor(const void *a, const void *b)
{
    return strcmp(((const struct tensor *)a)->name, ((const struct tensor *)b)->name);
}

/* One shard without a file holds them all. */
static int add_shard(struct checkpoint *checkpoint, const struct model_config *config, struct error *ret_error)
{
    const struct tensor_family *family = tensor_family_find(config);
    if (!family)
        return error_set(ret_error, ENOTSUP, "%s: model_type %s cannot be made", checkpoint->path, config->model_type);
    struct tensor_list list = {0};
    list_tensors(family, config, &list);
    struct shard *shard = calloc(1, sizeof *shard);
    checkpoint->tensors = calloc(list.count + 1, sizeof checkpoint->tensors[0]);
    if (!shard || !checkpoint->tensors) {
        free(shard);
        return error_set(ret_error, ENOMEM, "%s: no memory for the names of %zu tensors", checkpoint->path, list.count);
    }
    checkpoint->shards = shard;
    checkpoint->shard_count = 1;
    shard->fd = -1;
    shard->name = strdup("synthetic");
    shard->header.path = strdup(checkpoint->path);
    shard->header.tensors = list.tensors = calloc(list.count + 1, sizeof list.tensors[0]);
    if (!shard->name || !shard->header.path || !list.tensors)
        return error_set(ret_error, ENOMEM, "%s: no memory for the names of %zu tensors", checkpoint->path, list.count);
    list_tensors(family, config, &list);
    qsort(list.tensors, list.count, sizeof list.tensors[0], compare_tensor);
    shard->header.count = checkpoint->tensor_count = list.count;
    for (size_t i = 0; i < list.count; i++)
        checkpoint->tensors[i] = (struct source_tensor){.tensor = &list.tensors[i], .shard = shard};
    return 0;
}

static int make(const struct synth_options *options, struct checkpoint *checkpoint, struct error *ret_error)
{
    struct model_config config;
    int status = read_model(options->like, &checkpoint->config, ret_error);
    if (status < 0)
        return status;
    change_config(options, checkpoint->config);
    status = model_config_parse(checkpoint->config, NULL, 0, &config, ret_error);
    if (status < 0)
        return error_prefix(ret_error, status, "%s", options->like);
    if (options->dense != SYNTH_UNCHANGED && options->dense > config.layers)
        return error_set(ret_error, EINVAL, "%s: %u dense layers of %u are too many", options->like, options->dense,
                         config.layers);
    if (model_moe_layers(&config) == 0)
        return error_set(
            ret_error, EINVAL,
            "%s: of %u layers the first %u are dense, so none is left with experts: more layers, or --dense",
            options->like, config.layers, config.layers);
    return add_shard(checkpoint, &config, ret_error);
}

int synth_checkpoint(const struct synth_options *options, struct checkpoint *ret_checkpoint, struct error *ret_error)
{
    struct checkpoint checkpoint = {.synthetic = true, .seed = options->seed};
    if (asprintf(&checkpoint.path, SYNTH_SOURCE "%s", options->like) < 0) {
        checkpoint.path = NULL;
        return error_set(ret_error, ENOMEM, "%s: no memory", options->like);
    }
    int status = make(options, &checkpoint, ret_error);
    if (status < 0)
        checkpoint_close(&checkpoint);
    else
        *ret_checkpoint = checkpoint;
    return status;
}
