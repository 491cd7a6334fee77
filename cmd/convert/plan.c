#include "cmd/convert/plan.h"

#include "proto/cleanup.h"
#include "proto/container.h"

#include <string.h>

#define DENSE_FILE_BYTES                                                                                               \
    (4ull << 30) /* a file is closed before it grows beyond, counting a byte a weight; one tensor may be larger */

/* Makes room for one more element of an array that grows by doubling. */
static int grow(void *array, size_t count, size_t element, struct error *ret_error)
{
    if (count & (count - 1))
        return 0;
    void **pointer = array;
    void *larger = reallocarray(*pointer, count ? count * 2 : 1, element);
    if (!larger)
        return error_set(ret_error, ENOMEM, "no memory for the plan of the conversion");
    *pointer = larger;
    return 0;
}

static int add_file(struct plan *plan, const char *name, struct plan_file **ret_file, struct error *ret_error)
{
    int status = grow(&plan->files, plan->file_count, sizeof plan->files[0], ret_error);
    if (status < 0)
        return status;
    struct plan_file *file = &plan->files[plan->file_count++];
    *file = (struct plan_file){0};
    snprintf(file->name, sizeof file->name, "%s", name);
    *ret_file = file;
    return 0;
}

static int add_unit(struct plan_file *file, const struct plan_unit *unit, struct error *ret_error)
{
    int status = grow(&file->units, file->unit_count, sizeof file->units[0], ret_error);
    if (status == 0)
        file->units[file->unit_count++] = *unit;
    return status;
}

__attribute__((format(printf, 7, 8))) static int add_tensor(struct plan_file *file, enum tensor_dtype dtype,
                                                            uint32_t dims, const uint64_t *shape, uint32_t *ret_index,
                                                            struct error *ret_error, const char *format, ...)
{
    int status = grow(&file->tensors, file->tensor_count, sizeof file->tensors[0], ret_error);
    if (status < 0)
        return status;
    struct tensor *tensor = &file->tensors[file->tensor_count];
    *tensor = (struct tensor){.dtype = dtype, .dims = dims, .shape = {1, 1, 1, 1}, .bytes = dtype_bytes(dtype)};
    for (uint32_t i = 0; i < dims; i++) {
        tensor->shape[i] = shape[i];
        tensor->bytes *= shape[i];
    }
    va_list args;
    va_start(args, format);
    vsnprintf(tensor->name, sizeof tensor->name, format, args);
    va_end(args);
    *ret_index = (uint32_t)file->tensor_count++;
    return 0;
}

/* Finds a tensor of the checkpoint by rule, layer and expert and checks it. */
static int find_source(const struct plan *plan, const struct tensor_rule *rule, const char *name,
                       struct source *ret_source, struct error *ret_error)
{
    struct source_tensor *tensor = checkpoint_find(plan->checkpoint, name);
    if (!tensor)
        return error_set(ret_error, ENOENT, "%s: tensor %s is missing", plan->checkpoint->path, name);
    return source_check(plan->checkpoint, tensor, tensor_size_of(&plan->config, rule->rows),
                        tensor_size_of(&plan->config, rule->columns), ret_source, ret_error);
}

/* Shape [n, k] of the matrix that a unit makes. */
static void unit_shape(const struct model_config *config, const struct plan_unit *unit, uint64_t ret_shape[2])
{
    ret_shape[0] = unit->sources[0].rows;
    ret_shape[1] = unit->sources[0].columns;
    if (unit->kind == UNIT_W_UK) {
        ret_shape[0] = (uint64_t)config->heads * config->kv_lora;
        ret_shape[1] = config->qk_nope;
    } else if (unit->kind == UNIT_W_UV) {
        ret_shape[0] = (uint64_t)config->heads * config->v_head;
    }
}

/* Adds a unit of a dense file and the tensors that it writes under `name`. */
static int add_dense_unit(struct plan *plan, struct plan_file *file, struct plan_unit *unit, const char *name,
                          struct error *ret_error)
{
    const struct tensor *stored = unit->sources[0].weight->tensor;
    int status;
    if (unit->kind == UNIT_F32 || unit->kind == UNIT_AS_IS) {
        enum tensor_dtype dtype = unit->kind == UNIT_F32 ? DTYPE_F32 : stored->dtype;
        status = add_tensor(file, dtype, stored->dims, stored->shape, &unit->tensors[0], ret_error, "%s", name);
    } else {
        uint64_t shape[2];
        unit_shape(&plan->config, unit, shape);
        uint64_t blocks[3] = {shape[0] / BLOCK_ROWS, shape[1] / BLOCK_COLUMNS, block_bytes(unit->format)}, one = 1;
        status = add_tensor(file, unit->format == WEIGHT_INT4 ? DTYPE_U8 : DTYPE_I8, 3, blocks, &unit->tensors[0],
                            ret_error, "%s", name);
        blocks[2] = BLOCK_ROWS;
        if (status == 0)
            status = add_tensor(file, DTYPE_F16, 3, blocks, &unit->tensors[1], ret_error, "%s_scale", name);
        if (status == 0)
            status = add_tensor(file, DTYPE_I32, 1, &one, &unit->tensors[2], ret_error, "%s_exponent", name);
    }
    return status == 0 ? add_unit(file, unit, ret_error) : status;
}

/* Bytes that a unit adds to its file, for cutting files. */
static uint64_t unit_bytes(const struct plan_file *file, size_t first_tensor)
{
    uint64_t bytes = 0;
    for (size_t i = first_tensor; i < file->tensor_count; i++)
        bytes += file->tensors[i].bytes;
    return bytes;
}

/* The open dense file, or a new one when the next tensor of `bytes` would make it too large. */
static int dense_file(struct plan *plan, uint64_t bytes, struct plan_file **ret_file, struct error *ret_error)
{
    struct plan_file *last = plan->file_count ? &plan->files[plan->file_count - 1] : NULL;
    *ret_file = last;
    if (last && last->bytes + bytes <= DENSE_FILE_BYTES)
        return 0;
    char name[48];
    snprintf(name, sizeof name, "dense-%05zu.safetensors", plan->file_count + 1);
    return add_file(plan, name, ret_file, ret_error);
}

/* Plans the tensor of a rule that goes into a dense file. `layer` names the layer, or is not used. */
static int plan_dense(struct plan *plan, const struct tensor_rule *rule, uint32_t layer, struct error *ret_error)
{
    char name[TENSOR_NAME_MAX], prefix[32] = "";
    if (rule->scope != SCOPE_MODEL)
        snprintf(prefix, sizeof prefix, "model.layers.%u.", layer);
    snprintf(name, sizeof name, "%s%s", prefix, rule->name);
    bool mtp = rule->scope != SCOPE_MODEL && layer >= plan->config.layers;
    struct plan_unit unit = {.format = mtp ? WEIGHT_INT8 : plan->options.dense};
    int status = find_source(plan, rule, name, &unit.sources[0], ret_error);
    if (status < 0)
        return status;
    if (rule->target == TARGET_AS_IS && unit.sources[0].scale)
        return error_set(ret_error, EINVAL, "%s: tensor %s has dtype F8_E4M3, supported are BF16, F16 and F32",
                         plan->checkpoint->path, name);
    struct plan_file *file;
    status = dense_file(plan, unit.sources[0].rows * unit.sources[0].columns, &file, ret_error);
    if (status < 0)
        return status;
    size_t first = file->tensor_count;
    if (rule->target == TARGET_KV_B) {
        unit.kind = UNIT_W_UK;
        snprintf(name, sizeof name, "%sself_attn.w_uk.weight", prefix);
        status = add_dense_unit(plan, file, &unit, name, ret_error);
        unit.kind = UNIT_W_UV;
        snprintf(name, sizeof name, "%sself_attn.w_uv.weight", prefix);
        if (status == 0)
            status = add_dense_unit(plan, file, &unit, name, ret_error);
    } else {
        unit.kind = rule->target == TARGET_DENSE ? UNIT_MATRIX : rule->target == TARGET_F32 ? UNIT_F32 : UNIT_AS_IS;
        status = add_dense_unit(plan, file, &unit, name, ret_error);
    }
    file->bytes += unit_bytes(file, first);
    return status;
}

static bool is_expert(const struct tensor_rule *rule)
{
    return rule->target == TARGET_EXPERT_GATE || rule->target == TARGET_EXPERT_UP || rule->target == TARGET_EXPERT_DOWN;
}

static int plan_all_dense(struct plan *plan, const struct tensor_family *family, struct error *ret_error)
{
    /* Tensors of the model that stand in front of the first layer's rule, the layers, the rest. */
    size_t first = 0, last = family->rule_count;
    while (first < last && family->rules[first].scope == SCOPE_MODEL)
        first++;
    while (last > first && family->rules[last - 1].scope == SCOPE_MODEL)
        last--;
    int status = 0;
    for (size_t i = 0; status == 0 && i < first; i++)
        status = plan_dense(plan, &family->rules[i], 0, ret_error);
    for (uint32_t layer = 0; layer < plan->config.layers + plan->config.mtp_layers; layer++) {
        for (size_t i = first; status == 0 && i < last; i++) {
            const struct tensor_rule *rule = &family->rules[i];
            if (!is_expert(rule) && tensor_scope_has(&plan->config, rule->scope, layer))
                status = plan_dense(plan, rule, layer, ret_error);
        }
    }
    for (size_t i = last; status == 0 && i < family->rule_count; i++)
        status = plan_dense(plan, &family->rules[i], 0, ret_error);
    return status;
}

/* Finds gate, up and down of one expert. */
static int find_expert(const struct plan *plan, const struct tensor_family *family, uint32_t layer,
                       struct plan_unit *unit, struct error *ret_error)
{
    for (size_t i = 0; i < family->rule_count; i++) {
        const struct tensor_rule *rule = &family->rules[i];
        if (!is_expert(rule) || !tensor_scope_has(&plan->config, rule->scope, layer))
            continue;
        const char *star = strchr(rule->name, '*');
        char name[TENSOR_NAME_MAX];
        snprintf(name, sizeof name, "model.layers.%u.%.*s%u%s", layer, (int)(star - rule->name), rule->name,
                 unit->expert, star + 1);
        int matrix = rule->target == TARGET_EXPERT_GATE ? EXPERT_GATE
                     : rule->target == TARGET_EXPERT_UP ? EXPERT_UP
                                                        : EXPERT_DOWN;
        int status = find_source(plan, rule, name, &unit->sources[matrix], ret_error);
        if (status < 0)
            return status;
    }
    return 0;
}

/* The file of one stripe of a layer: its slices of every expert, and in the first the tables. */
static int plan_stripe(struct plan *plan, uint32_t layer, uint32_t stripe, struct error *ret_error)
{
    char name[48];
    snprintf(name, sizeof name, CONTAINER_EXPERTS_NAME, stripe, layer);
    struct plan_file *file;
    int status = add_file(plan, name, &file, ret_error);
    if (status < 0)
        return status;
    file->experts = true;
    file->layer = layer;
    file->stripe = stripe;
    file->slices = split(EXPERT_SLICES, stripe, plan->options.stripes);
    uint64_t slices[2] = {file->slices.count, plan->slice_bytes}, checksums[2] = {plan->config.experts, EXPERT_SLICES},
             exponents[2] = {plan->config.experts, EXPERT_MATRICES};
    uint32_t unused; /* expert e is tensor e */
    for (uint32_t e = 0; status == 0 && e < plan->config.experts; e++)
        status = add_tensor(file, DTYPE_U8, 2, slices, &unused, ret_error, "model.layers.%u.mlp.experts.%u", layer, e);
    if (status == 0 && stripe == 0)
        status = add_tensor(file, DTYPE_U64, 2, checksums, &unused, ret_error, "experts.checksums");
    if (status == 0 && stripe == 0)
        status = add_tensor(file, DTYPE_I32, 2, exponents, &unused, ret_error, "experts.exponents");
    return status;
}

static int plan_experts(struct plan *plan, const struct tensor_family *family, uint32_t layer, struct error *ret_error)
{
    size_t first = plan->file_count;
    int status = 0;
    for (uint32_t s = 0; status == 0 && s < plan->options.stripes; s++)
        status = plan_stripe(plan, layer, s, ret_error);
    for (uint32_t e = 0; status == 0 && e < plan->config.experts; e++) {
        struct plan_unit unit = {.kind = UNIT_EXPERT, .format = plan->options.experts, .expert = e, .tensors = {e}};
        status = find_expert(plan, family, layer, &unit, ret_error);
        if (status == 0)
            status = add_unit(&plan->files[first], &unit, ret_error);
    }
    return status;
}

/* Order in a file: quanta (multiples of 512 bytes), scales (of 32), then by size of the elements, so that everything
 * is aligned. */
static int alignment_class(const struct tensor *tensor)
{
    if (tensor->dims == 3)
        return tensor->dtype == DTYPE_F16 ? 1 : 0;
    return dtype_bytes(tensor->dtype) == 4 ? 2 : 3;
}

#define ALIGNMENT_CLASSES 4

static int sort_dense(struct plan_file *file, struct error *ret_error)
{
    struct tensor *sorted = calloc(file->tensor_count, sizeof *sorted);
    _cleanup_free_ uint32_t *place = calloc(file->tensor_count, sizeof *place);
    if (!sorted || !place) {
        free(sorted);
        return error_set(ret_error, ENOMEM, "no memory for the plan of the conversion");
    }
    uint32_t count = 0;
    for (int class = 0; class < ALIGNMENT_CLASSES; class ++) {
        for (size_t i = 0; i < file->tensor_count; i++) {
            if (alignment_class(&file->tensors[i]) != class)
                continue;
            sorted[count] = file->tensors[i];
            place[i] = count++;
        }
    }
    for (size_t u = 0; u < file->unit_count; u++) {
        for (size_t t = 0; t < UNIT_TENSORS; t++)
            file->units[u].tensors[t] = place[file->units[u].tensors[t]];
    }
    free(file->tensors);
    file->tensors = sorted;
    return 0;
}

/* Pads the data to whole blocks of the disk and makes the header. */
static int finish_file(struct plan_file *file, struct error *ret_error)
{
    int status = file->experts ? 0 : sort_dense(file, ret_error);
    if (status < 0)
        return status;
    uint64_t data = unit_bytes(file, 0), padding = (DISK_ALIGN - data % DISK_ALIGN) % DISK_ALIGN;
    if (padding) {
        struct tensor *larger = reallocarray(file->tensors, file->tensor_count + 1, sizeof *larger);
        if (!larger)
            return error_set(ret_error, ENOMEM, "no memory for the plan of the conversion");
        file->tensors = larger;
        larger[file->tensor_count++] =
            (struct tensor){.name = "padding", .dtype = DTYPE_U8, .dims = 1, .shape = {padding, 1, 1, 1}};
    }
    status = safetensors_header(file->tensors, file->tensor_count, DISK_ALIGN, &file->header, &file->header_bytes,
                                ret_error);
    file->bytes = file->header_bytes + data + padding;
    return status;
}

/* Every tensor must have been used or be known as not needed. */
static int check_unknown(struct checkpoint *checkpoint, const struct plan *plan, const struct tensor_family *family,
                         struct error *ret_error)
{
    for (size_t i = 0; i < checkpoint->tensor_count; i++) {
        const struct source_tensor *tensor = &checkpoint->tensors[i];
        if (tensor->used)
            continue;
        const char *name = tensor->tensor->name, *why = tensor_ignored(family, &plan->config, name);
        if (!why)
            return error_set(ret_error, EINVAL, "%s: tensor %s is not part of a %s model", tensor->shard->header.path,
                             name, plan->config.model_type);
        if (checkpoint_note(checkpoint, "%s: tensor %s ignored: %s", tensor->shard->name, name, why) < 0)
            return error_set(ret_error, ENOMEM, "no memory for the plan of the conversion");
    }
    return 0;
}

/* config.json may say how its weights are stored; what we would read wrongly is refused by name. */
static int check_quantization(const struct checkpoint *checkpoint, struct error *ret_error)
{
    const json_t *stored = json_object_get(checkpoint->config, "quantization_config");
    if (!json_is_object(stored))
        return 0;
    const char *method = json_string_value(json_object_get(stored, "quant_method"));
    if (!method || strcmp(method, "fp8") != 0)
        return error_set(ret_error, ENOTSUP, "%s/config.json: quant_method %.40s is not supported, only fp8",
                         checkpoint->path, method ? method : "(missing)");
    const json_t *block = json_object_get(stored, "weight_block_size");
    if (json_array_size(block) != 2 || json_integer_value(json_array_get(block, 0)) != 128 ||
        json_integer_value(json_array_get(block, 1)) != 128)
        return error_set(ret_error, ENOTSUP, "%s/config.json: weight_block_size must be [128, 128]", checkpoint->path);
    return 0;
}

static int make(struct checkpoint *checkpoint, struct plan *plan, struct error *ret_error)
{
    int status = check_quantization(checkpoint, ret_error);
    if (status < 0)
        return status;
    status = model_config_parse(checkpoint->config, checkpoint->generation, plan->options.qk_norm_eps, &plan->config,
                                ret_error);
    if (status < 0)
        return error_prefix(ret_error, status, "%s", checkpoint->path);
    const struct tensor_family *family = tensor_family_find(&plan->config);
    if (!family)
        return error_set(ret_error, ENOTSUP, "%s: model_type %s cannot be converted", checkpoint->path,
                         plan->config.model_type);
    plan->expert_shape = (struct expert_shape){
        .format = plan->options.experts, .hidden = plan->config.hidden, .width = plan->config.expert_width};
    plan->slice_bytes = expert_slice_bytes(&plan->expert_shape);
    status = plan_all_dense(plan, family, ret_error);
    for (uint32_t layer = 0; status == 0 && layer < plan->config.layers + plan->config.mtp_layers; layer++) {
        if (plan->config.layer_kind[layer] == LAYER_MOE)
            status = plan_experts(plan, family, layer, ret_error);
    }
    if (status == 0)
        status = check_unknown(checkpoint, plan, family, ret_error);
    for (size_t i = 0; status == 0 && i < plan->file_count; i++) {
        struct plan_file *file = &plan->files[i];
        status = finish_file(file, ret_error);
        *(file->experts ? &plan->expert_bytes : &plan->dense_bytes) += file->bytes;
    }
    return status;
}

int plan_make(struct checkpoint *checkpoint, const struct plan_options *options, struct plan *ret_plan,
              struct error *ret_error)
{
    struct plan plan = {.checkpoint = checkpoint, .options = *options};
    if (plan.options.stripes == 0)
        plan.options.stripes = 1;
    int status = make(checkpoint, &plan, ret_error);
    if (status < 0)
        plan_free(&plan);
    else
        *ret_plan = plan;
    return status;
}

void plan_free(struct plan *plan)
{
    for (size_t i = 0; i < plan->file_count; i++) {
        free(plan->files[i].tensors);
        free(plan->files[i].units);
        free(plan->files[i].header);
    }
    free(plan->files);
    plan->files = NULL;
    plan->file_count = 0;
}
