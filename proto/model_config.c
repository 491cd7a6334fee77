/* Model families: each is an entry of `families` with the numbers it reads from config.json (a table of fields) and a
 * function for what a table cannot say. Everything that is read is then held against the same bounds that
 * model_config_check uses. */
#include "proto/model_config.h"

#include "proto/weights.h"

#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#define FIELD_NAMES 3

/* A whole number of config.json: the names it goes by (the first one found counts), where it goes, its bounds, what
 * it must divide by, and its value where the file may leave it out (-1: it may not). */
struct field {
    const char *names[FIELD_NAMES];
    size_t offset;
    uint32_t least, most, multiple;
    int64_t absent;
};

#define FIELD(member) offsetof(struct model_config, member)

static const struct field glm_moe_dsa_fields[] = {
    {{"hidden_size"}, FIELD(hidden), 64, 65536, BLOCK_COLUMNS, -1},
    {{"num_hidden_layers"}, FIELD(layers), 1, MODEL_MAX_LAYERS, 1, -1},
    {{"num_attention_heads"}, FIELD(heads), 1, 1024, 1, -1},
    {{"vocab_size"}, FIELD(vocab), 16, 1u << 24, BLOCK_ROWS, -1},
    {{"max_position_embeddings"}, FIELD(max_positions), 1, 1u << 28, 1, -1},
    {{"num_nextn_predict_layers"}, FIELD(mtp_layers), 0, 1, 1, 0},
    {{"q_lora_rank"}, FIELD(q_lora), 64, 65536, BLOCK_COLUMNS, -1},
    {{"kv_lora_rank"}, FIELD(kv_lora), 64, 4096, BLOCK_COLUMNS, -1},
    {{"qk_nope_head_dim"}, FIELD(qk_nope), 64, 1024, BLOCK_COLUMNS, -1},
    {{"qk_rope_head_dim"}, FIELD(qk_rope), 16, 1024, BLOCK_ROWS, -1},
    {{"v_head_dim"}, FIELD(v_head), 16, 1024, BLOCK_ROWS, -1},
    {{"index_topk"}, FIELD(index_topk), 1, 1u << 28, 1, -1},
    {{"index_n_heads"}, FIELD(index_heads), 1, 256, 1, -1},
    {{"index_head_dim"}, FIELD(index_dim), 64, 1024, BLOCK_COLUMNS, -1},
    {{"n_routed_experts", "num_local_experts", "num_experts"}, FIELD(experts), 1, MODEL_MAX_EXPERTS, 1, -1},
    {{"num_experts_per_tok"}, FIELD(top_k), 1, MODEL_MAX_TOP_K, 1, -1},
    {{"n_shared_experts"}, FIELD(shared_experts), 0, 16, 1, -1},
    {{"moe_intermediate_size"}, FIELD(expert_width), 64, 65536, BLOCK_COLUMNS, -1},
    {{"intermediate_size"}, FIELD(dense_width), 64, 1u << 18, BLOCK_COLUMNS, -1},
    {{"n_group"}, FIELD(n_group), 1, MODEL_MAX_EXPERTS, 1, 1},
    {{"topk_group"}, FIELD(topk_group), 1, MODEL_MAX_EXPERTS, 1, 1},
};

#define GLM_MOE_DSA_FIELDS (sizeof glm_moe_dsa_fields / sizeof glm_moe_dsa_fields[0])

struct family {
    const char *model_type;
    enum model_family family;
    const struct field *fields;
    size_t field_count;
    /* The rest of config.json, and what only holds between several fields. */
    int (*parse)(const json_t *config, struct model_config *ret_config, struct error *ret_error);
    int (*check)(const struct model_config *config, struct error *ret_error);
};

static uint32_t field_value(const struct model_config *config, const struct field *field)
{
    uint32_t value;
    memcpy(&value, (const char *)config + field->offset, sizeof value);
    return value;
}

/* A member that is there and not null, else NULL. */
static const json_t *member(const json_t *object, const char *name)
{
    const json_t *value = json_object_get(object, name);
    return value && !json_is_null(value) ? value : NULL;
}

static int check_field(const struct field *field, int64_t value, struct error *ret_error)
{
    if (value < (int64_t)field->least || value > (int64_t)field->most)
        return error_set(ret_error, EINVAL, "config: %s is %lld, supported are %u to %u", field->names[0],
                         (long long)value, field->least, field->most);
    if (value % field->multiple != 0)
        return error_set(ret_error, EINVAL,
                         "config: %s is %lld, which is not a multiple of %u as the block format needs", field->names[0],
                         (long long)value, field->multiple);
    return 0;
}

static int parse_fields(const struct family *family, const json_t *config, struct model_config *ret_config,
                        struct error *ret_error)
{
    for (size_t i = 0; i < family->field_count; i++) {
        const struct field *field = &family->fields[i];
        const json_t *value = NULL;
        for (size_t n = 0; n < FIELD_NAMES && field->names[n] && !value; n++)
            value = member(config, field->names[n]);
        int64_t number = field->absent;
        if (!value && number < 0)
            return error_set(ret_error, EINVAL, "config: %s is missing", field->names[0]);
        if (value && !json_is_integer(value))
            return error_set(ret_error, EINVAL, "config: %s is not a whole number", field->names[0]);
        if (value)
            number = json_integer_value(value);
        int status = check_field(field, number, ret_error);
        if (status < 0)
            return status;
        uint32_t narrow = (uint32_t)number;
        memcpy((char *)ret_config + field->offset, &narrow, sizeof narrow);
    }
    return 0;
}

/* A number, whole or not; `absent` where the file leaves it out, or an error when that is NaN. */
static int parse_real(const json_t *config, const char *name, double absent, double *ret_value, struct error *ret_error)
{
    const json_t *value = member(config, name);
    if (value && !json_is_number(value))
        return error_set(ret_error, EINVAL, "config: %s is not a number", name);
    if (!value && isnan(absent))
        return error_set(ret_error, EINVAL, "config: %s is missing", name);
    *ret_value = value ? json_number_value(value) : absent;
    return 0;
}

static int parse_flag(const json_t *config, const char *name, bool absent, uint32_t *ret_value, struct error *ret_error)
{
    const json_t *value = member(config, name);
    if (value && !json_is_boolean(value))
        return error_set(ret_error, EINVAL, "config: %s is neither true nor false", name);
    *ret_value = value ? json_is_true(value) : absent;
    return 0;
}

/* Refuses a text member that is there and is not `supported`. */
static int require_text(const json_t *config, const char *name, const char *supported, struct error *ret_error)
{
    const json_t *value = member(config, name);
    if (!value)
        return 0;
    if (!json_is_string(value))
        return error_set(ret_error, EINVAL, "config: %s is not a text", name);
    if (strcmp(json_string_value(value), supported) != 0)
        return error_set(ret_error, ENOTSUP, "config: %s %.40s is not supported, only %s", name,
                         json_string_value(value), supported);
    return 0;
}

static int require_false(const json_t *config, const char *name, struct error *ret_error)
{
    uint32_t value = 0;
    int status = parse_flag(config, name, false, &value, ret_error);
    if (status == 0 && value)
        return error_set(ret_error, ENOTSUP, "config: %s true is not supported", name);
    return status;
}

/* Refuses a whole number that is there and is not `supported`. */
static int require_number(const json_t *config, const char *name, int64_t supported, struct error *ret_error)
{
    const json_t *value = member(config, name);
    if (value && (!json_is_integer(value) || json_integer_value(value) != supported))
        return error_set(ret_error, ENOTSUP, "config: %s must be %lld for this model", name, (long long)supported);
    return 0;
}

/* rope_theta stands at the top level, in rope_parameters or in rope_scaling, which replaces rope_parameters. A
 * default would be a silent wrong answer. */
static int parse_rope(const json_t *config, double *ret_theta, struct error *ret_error)
{
    const char *from = member(config, "rope_scaling") ? "rope_scaling" : "rope_parameters";
    const json_t *rope = member(config, from);
    if (rope && !json_is_object(rope))
        return error_set(ret_error, EINVAL, "config: %s is not an object", from);
    int status = require_text(rope, "rope_type", "default", ret_error);
    if (status == 0)
        status = require_text(rope, "type", "default", ret_error);
    if (status < 0)
        return status;
    const json_t *theta = rope ? member(rope, "rope_theta") : NULL;
    if (!theta)
        theta = member(config, "rope_theta");
    if (!theta && member(config, "rope_parameters"))
        theta = member(member(config, "rope_parameters"), "rope_theta");
    if (!json_is_number(theta))
        return error_set(
            ret_error, EINVAL,
            "config: rope_theta is missing (looked at the top level, in rope_parameters and in rope_scaling)");
    *ret_theta = json_number_value(theta);
    return 0;
}

/* A list with one word for each layer (a list that names the MTP layer too is accepted): words[0] gives values[0],
 * ... */
static int parse_layer_list(const json_t *list, const char *name, const struct model_config *config,
                            const char *const words[2], const uint8_t values[2], uint8_t *ret_kinds,
                            struct error *ret_error)
{
    size_t count = json_array_size(list);
    if (!json_is_array(list) || (count != config->layers && count != config->layers + config->mtp_layers))
        return error_set(ret_error, EINVAL, "config: %s is not a list of %u entries", name, config->layers);
    for (size_t i = 0; i < count; i++) {
        const char *word = json_string_value(json_array_get(list, i));
        if (word && !strcmp(word, words[0]))
            ret_kinds[i] = values[0];
        else if (word && !strcmp(word, words[1]))
            ret_kinds[i] = values[1];
        else
            return error_set(ret_error, ENOTSUP, "config: %s: layer %zu is %.40s, supported are %s and %s", name, i,
                             word ? word : "not a text", words[0], words[1]);
    }
    return 0;
}

/* mlp_layer_types decides; else the first first_k_dense_replace layers are dense. The MTP layer is always MoE. */
static int parse_layer_kinds(const json_t *config, struct model_config *ret_config, struct error *ret_error)
{
    static const char *const words[2] = {"dense", "sparse"};
    static const uint8_t values[2] = {LAYER_DENSE, LAYER_MOE};
    int status = require_number(config, "moe_layer_freq", 1, ret_error);
    if (status < 0)
        return status;
    const json_t *list = member(config, "mlp_layer_types");
    if (list) {
        status =
            parse_layer_list(list, "mlp_layer_types", ret_config, words, values, ret_config->layer_kind, ret_error);
    } else {
        const json_t *first = member(config, "first_k_dense_replace");
        if (!json_is_integer(first) || json_integer_value(first) < 0)
            return error_set(ret_error, EINVAL,
                             "config: neither mlp_layer_types nor a valid first_k_dense_replace is there");
        for (uint32_t i = 0; i < ret_config->layers; i++)
            ret_config->layer_kind[i] = (json_int_t)i < json_integer_value(first) ? LAYER_DENSE : LAYER_MOE;
    }
    if (ret_config->mtp_layers)
        ret_config->layer_kind[ret_config->layers] = LAYER_MOE;
    return status;
}

/* indexer_types decides; else layer i is full when max(i - offset + 1, 0) % freq == 0 (freq 1, all full, where
 * absent). The MTP layer has an indexer of its own. */
static int parse_indexer_kinds(const json_t *config, struct model_config *ret_config, struct error *ret_error)
{
    static const char *const words[2] = {"full", "shared"};
    static const uint8_t values[2] = {INDEXER_FULL, INDEXER_SHARED};
    const json_t *list = member(config, "indexer_types");
    int status = 0;
    if (list) {
        status =
            parse_layer_list(list, "indexer_types", ret_config, words, values, ret_config->indexer_kind, ret_error);
    } else {
        const json_t *every = member(config, "index_topk_freq"), *skip = member(config, "index_skip_topk_offset");
        int64_t freq = every ? json_integer_value(every) : 1, offset = skip ? json_integer_value(skip) : 0;
        if ((every && !json_is_integer(every)) || freq < 1 || freq > MODEL_MAX_LAYERS)
            return error_set(ret_error, EINVAL, "config: index_topk_freq is not a number from 1 to %u",
                             MODEL_MAX_LAYERS);
        if ((skip && !json_is_integer(skip)) || offset < 0 || offset > MODEL_MAX_LAYERS)
            return error_set(ret_error, EINVAL, "config: index_skip_topk_offset is not a number from 0 to %u",
                             MODEL_MAX_LAYERS);
        for (uint32_t i = 0; i < ret_config->layers; i++) {
            int64_t past = (int64_t)i - offset + 1;
            ret_config->indexer_kind[i] = (past > 0 ? past : 0) % freq == 0 ? INDEXER_FULL : INDEXER_SHARED;
        }
    }
    if (ret_config->mtp_layers)
        ret_config->indexer_kind[ret_config->layers] = INDEXER_FULL;
    return status;
}

/* The fields that are there twice in one form or another must agree. `head_dim` is not among them: GLM-5.2's
 * contradicts its own shapes. */
static int glm_moe_dsa_supported(const json_t *config, const struct model_config *parsed, struct error *ret_error)
{
    int status = require_text(config, "hidden_act", "silu", ret_error);
    if (status == 0)
        status = require_text(config, "scoring_func", "sigmoid", ret_error);
    if (status == 0)
        status = require_text(config, "topk_method", "noaux_tc", ret_error);
    if (status == 0)
        status = require_false(config, "attention_bias", ret_error);
    if (status == 0)
        status = require_false(config, "tie_word_embeddings", ret_error);
    if (status == 0)
        status = require_number(config, "num_key_value_heads", parsed->heads, ret_error);
    if (status == 0)
        status = require_number(config, "qk_head_dim", (int64_t)parsed->qk_nope + parsed->qk_rope, ret_error);
    return status;
}

static int glm_moe_dsa_parse(const json_t *config, struct model_config *ret_config, struct error *ret_error)
{
    int status = glm_moe_dsa_supported(config, ret_config, ret_error);
    if (status == 0 && ret_config->layers + ret_config->mtp_layers > MODEL_MAX_LAYERS)
        return error_set(ret_error, EINVAL, "config: num_hidden_layers is %u, supported are 1 to %u",
                         ret_config->layers, MODEL_MAX_LAYERS - ret_config->mtp_layers);
    double eps = 0, scaling = 0;
    if (status == 0)
        status = parse_real(config, "rms_norm_eps", (double)NAN, &eps, ret_error);
    if (status == 0)
        status = parse_real(config, "routed_scaling_factor", 1.0, &scaling, ret_error);
    if (status == 0)
        status = parse_rope(config, &ret_config->rope_theta, ret_error);
    if (status == 0)
        status = parse_flag(config, "rope_interleave", true, &ret_config->rope_interleave, ret_error);
    if (status == 0)
        status = parse_flag(config, "indexer_rope_interleave", true, &ret_config->index_rope_interleave, ret_error);
    if (status == 0)
        status = parse_flag(config, "norm_topk_prob", true, &ret_config->norm_topk_prob, ret_error);
    if (status == 0)
        status = parse_layer_kinds(config, ret_config, ret_error);
    if (status == 0)
        status = parse_indexer_kinds(config, ret_config, ret_error);
    ret_config->rms_eps = (float)eps;
    ret_config->routed_scaling = (float)scaling;
    ret_config->index_norm_eps = 1e-6f; /* not in config.json: the model's code has it */
    return status;
}

static int glm_moe_dsa_check(const struct model_config *c, struct error *ret_error)
{
    if (c->layers + c->mtp_layers > MODEL_MAX_LAYERS)
        return error_set(ret_error, EINVAL, "config: num_hidden_layers is %u, too many with the MTP layer", c->layers);
    if (c->top_k > c->experts)
        return error_set(ret_error, EINVAL, "config: num_experts_per_tok is %u of %u experts", c->top_k, c->experts);
    if (c->experts % c->n_group != 0 || (c->n_group > 1 && c->experts / c->n_group < 2))
        return error_set(ret_error, EINVAL, "config: n_group %u does not cut %u experts into groups of at least 2",
                         c->n_group, c->experts);
    if (c->topk_group > c->n_group || c->top_k > c->topk_group * (c->experts / c->n_group))
        return error_set(ret_error, EINVAL, "config: topk_group %u of %u groups does not hold %u experts",
                         c->topk_group, c->n_group, c->top_k);
    if (c->qk_rope > c->index_dim)
        return error_set(ret_error, EINVAL, "config: index_head_dim %u is smaller than qk_rope_head_dim %u",
                         c->index_dim, c->qk_rope);
    if (c->heads * c->v_head % BLOCK_COLUMNS != 0)
        return error_set(ret_error, EINVAL, "config: v_head_dim times num_attention_heads is %u, not a multiple of %u",
                         c->heads * c->v_head, BLOCK_COLUMNS);
    for (uint32_t i = 0; i < c->layers + c->mtp_layers; i++) {
        if (c->layer_kind[i] != LAYER_DENSE && c->layer_kind[i] != LAYER_MOE)
            return error_set(ret_error, EINVAL, "config: layer %u is neither dense nor MoE", i);
        if (c->indexer_kind[i] != INDEXER_FULL && c->indexer_kind[i] != INDEXER_SHARED)
            return error_set(ret_error, EINVAL, "config: layer %u has neither a full nor a shared indexer", i);
    }
    if (c->indexer_kind[0] != INDEXER_FULL)
        return error_set(ret_error, EINVAL,
                         "config: indexer_types: layer 0 is shared, but no layer before it chose keys");
    if (c->mtp_layers && (c->layer_kind[c->layers] != LAYER_MOE || c->indexer_kind[c->layers] != INDEXER_FULL))
        return error_set(ret_error, EINVAL, "config: the MTP layer must be MoE with a full indexer");
    return 0;
}

static const struct family families[] = {
    {"glm_moe_dsa", FAMILY_GLM_MOE_DSA, glm_moe_dsa_fields, GLM_MOE_DSA_FIELDS, glm_moe_dsa_parse, glm_moe_dsa_check},
};

#define FAMILIES (sizeof families / sizeof families[0])

/* Names every supported model type, for an error. */
static void list_families(char *ret_text, size_t size)
{
    size_t used = 0;
    for (size_t i = 0; i < FAMILIES && used < size; i++)
        used += (size_t)snprintf(ret_text + used, size - used, "%s%s", i ? ", " : "", families[i].model_type);
}

static int add_stop(const json_t *value, struct model_config *ret_config, struct error *ret_error)
{
    if (!json_is_integer(value) || json_integer_value(value) < 0 ||
        json_integer_value(value) >= (json_int_t)ret_config->vocab)
        return error_set(ret_error, EINVAL, "config: eos_token_id holds something that is not a token id under %u",
                         ret_config->vocab);
    if (ret_config->stop_count == MODEL_MAX_STOPS)
        return error_set(ret_error, EINVAL, "config: eos_token_id has more than %u entries", MODEL_MAX_STOPS);
    ret_config->stops[ret_config->stop_count++] = (int32_t)json_integer_value(value);
    return 0;
}

/* eos_token_id is an integer, a list, null or absent, in either file; generation_config.json wins. */
static int parse_stops(const json_t *config, const json_t *generation, struct model_config *ret_config,
                       struct error *ret_error)
{
    const json_t *eos = generation ? member(generation, "eos_token_id") : NULL;
    if (!eos)
        eos = member(config, "eos_token_id");
    if (!eos)
        return 0;
    if (!json_is_array(eos))
        return add_stop(eos, ret_config, ret_error);
    int status = 0;
    for (size_t i = 0; status == 0 && i < json_array_size(eos); i++)
        status = add_stop(json_array_get(eos, i), ret_config, ret_error);
    return status;
}

int model_config_parse(const json_t *config, const json_t *generation, double qk_norm_eps,
                       struct model_config *ret_config, struct error *ret_error)
{
    if (!json_is_object(config))
        return error_set(ret_error, EINVAL, "config: is not a JSON object");
    if (generation && !json_is_object(generation))
        return error_set(ret_error, EINVAL, "generation config: is not a JSON object");
    const char *type = json_string_value(json_object_get(config, "model_type"));
    if (!type)
        return error_set(ret_error, EINVAL, "config: model_type is missing");
    const struct family *family = NULL;
    for (size_t i = 0; i < FAMILIES; i++) {
        if (!strcmp(families[i].model_type, type))
            family = &families[i];
    }
    if (!family) {
        char known[256];
        list_families(known, sizeof known);
        return error_set(ret_error, ENOTSUP, "config: model_type %.60s is not supported, supported are: %s", type,
                         known);
    }
    struct model_config parsed = {.family = family->family,
                                  .qk_norm_eps = qk_norm_eps == 0 ? 1e-6f : (float)qk_norm_eps};
    snprintf(parsed.model_type, sizeof parsed.model_type, "%s", family->model_type);
    int status = parse_fields(family, config, &parsed, ret_error);
    if (status == 0)
        status = family->parse(config, &parsed, ret_error);
    if (status == 0)
        status = parse_stops(config, generation, &parsed, ret_error);
    if (status == 0)
        status = model_config_check(&parsed, ret_error);
    if (status == 0)
        *ret_config = parsed;
    return status;
}

static int check_eps(const char *name, float value, struct error *ret_error)
{
    if (!(value > 0 && value <= 0.1f))
        return error_set(ret_error, EINVAL, "config: %s is %g, supported are values over 0 up to 0.1", name,
                         (double)value);
    return 0;
}

static int check_flag(const char *name, uint32_t value, struct error *ret_error)
{
    return value <= 1 ? 0 : error_set(ret_error, EINVAL, "config: %s is %u, not 0 or 1", name, value);
}

static int check_common(const struct model_config *config, struct error *ret_error)
{
    int status = check_eps("rms_norm_eps", config->rms_eps, ret_error);
    if (status == 0)
        status = check_eps("qk_norm_eps", config->qk_norm_eps, ret_error);
    if (status == 0)
        status = check_eps("index_norm_eps", config->index_norm_eps, ret_error);
    if (status == 0)
        status = check_flag("rope_interleave", config->rope_interleave, ret_error);
    if (status == 0)
        status = check_flag("indexer_rope_interleave", config->index_rope_interleave, ret_error);
    if (status == 0)
        status = check_flag("norm_topk_prob", config->norm_topk_prob, ret_error);
    if (status < 0)
        return status;
    if (!(config->rope_theta > 1 && config->rope_theta < 1e12))
        return error_set(ret_error, EINVAL, "config: rope_theta is %g, supported are values from 1 to 1e12",
                         config->rope_theta);
    if (!(config->routed_scaling > 0 && config->routed_scaling < 1e4f))
        return error_set(ret_error, EINVAL, "config: routed_scaling_factor is %g", (double)config->routed_scaling);
    if (config->stop_count > MODEL_MAX_STOPS)
        return error_set(ret_error, EINVAL, "config: %u stop tokens, at most %u are supported", config->stop_count,
                         MODEL_MAX_STOPS);
    for (uint32_t i = 0; i < config->stop_count; i++) {
        if (config->stops[i] < 0 || (uint32_t)config->stops[i] >= config->vocab)
            return error_set(ret_error, EINVAL, "config: stop token %d is not a token id under %u", config->stops[i],
                             config->vocab);
    }
    return 0;
}

int model_config_check(const struct model_config *config, struct error *ret_error)
{
    const struct family *family = NULL;
    for (size_t i = 0; i < FAMILIES; i++) {
        if ((uint32_t)families[i].family == config->family)
            family = &families[i];
    }
    if (!family || strncmp(config->model_type, family->model_type, sizeof config->model_type) != 0)
        return error_set(ret_error, EINVAL, "config: model family %u is unknown", config->family);
    for (size_t i = 0; i < family->field_count; i++) {
        int status = check_field(&family->fields[i], field_value(config, &family->fields[i]), ret_error);
        if (status < 0)
            return status;
    }
    int status = check_common(config, ret_error);
    return status == 0 ? family->check(config, ret_error) : status;
}

uint32_t model_moe_layers(const struct model_config *config)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < config->layers + config->mtp_layers; i++)
        count += config->layer_kind[i] == LAYER_MOE;
    return count;
}

int model_moe_index(const struct model_config *config, uint32_t layer)
{
    if (layer >= config->layers + config->mtp_layers || config->layer_kind[layer] != LAYER_MOE)
        return -1;
    int index = 0;
    for (uint32_t i = 0; i < layer; i++)
        index += config->layer_kind[i] == LAYER_MOE;
    return index;
}
