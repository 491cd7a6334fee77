#include "compute/family.h"

#include <math.h>
#include <stdio.h>

/* Looks tensors up by `prefix` + name. */
struct finder {
    const struct dense *dense;
    const char *prefix;
    struct error *error;
};

static void full_name(const struct finder *finder, const char *name, const char *suffix, char ret_name[TENSOR_NAME_MAX])
{
    snprintf(ret_name, TENSOR_NAME_MAX, "%s%s%s", finder->prefix, name, suffix);
}

static int find_vector(const struct finder *finder, const char *name, uint32_t n, const float **ret_data)
{
    char full[TENSOR_NAME_MAX];
    full_name(finder, name, "", full);
    const uint64_t shape[] = {n};
    *ret_data = dense_find(finder->dense, full, DTYPE_F32, 1, shape, finder->error);
    return *ret_data ? 0 : -ENOENT;
}

static int find_linear(const struct finder *finder, const char *name, uint32_t n, uint32_t k, struct linear *ret_linear)
{
    static const enum tensor_dtype dtypes[] = {DTYPE_BF16, DTYPE_F16, DTYPE_F32}; /* the last one's error is reported */
    char full[TENSOR_NAME_MAX];
    full_name(finder, name, "", full);
    const uint64_t shape[] = {n, k};
    for (size_t i = 0; i < sizeof dtypes / sizeof dtypes[0]; i++) {
        const void *data = dense_find(finder->dense, full, dtypes[i], 2, shape, finder->error);
        if (data) {
            *ret_linear = (struct linear){dtypes[i], n, k, data};
            return 0;
        }
    }
    return -ENOENT;
}

/* 2^exponent; the exponents that f32 holds as normal numbers are the ones that convert writes. */
static int factor_of(int32_t exponent, const char *name, float *ret_factor, struct error *ret_error)
{
    if (exponent < -126 || exponent > 127)
        return error_set(ret_error, EBADMSG, "tensor %s: exponent %d is out of range: convert the model again", name,
                         exponent);
    *ret_factor = ldexpf(1.0f, exponent);
    return 0;
}

static int find_matrix(const struct finder *finder, const char *name, uint32_t n, uint32_t k, struct matrix *ret_matrix)
{
    char full[TENSOR_NAME_MAX];
    struct matrix matrix = {.format = WEIGHT_INT8, .n = n, .k = k};
    uint64_t shape[] = {n / BLOCK_ROWS, k / BLOCK_COLUMNS, block_bytes(WEIGHT_INT8)};
    full_name(finder, name, "", full);
    matrix.quanta = dense_find(finder->dense, full, DTYPE_I8, 3, shape, NULL);
    if (!matrix.quanta) {
        matrix.format = WEIGHT_INT4;
        shape[2] = block_bytes(WEIGHT_INT4);
        matrix.quanta = dense_find(finder->dense, full, DTYPE_U8, 3, shape, finder->error);
    }
    if (!matrix.quanta)
        return -ENOENT;
    shape[2] = BLOCK_ROWS;
    full_name(finder, name, "_scale", full);
    matrix.scales = dense_find(finder->dense, full, DTYPE_F16, 3, shape, finder->error);
    if (!matrix.scales)
        return -ENOENT;
    const uint64_t one[] = {1};
    full_name(finder, name, "_exponent", full);
    const int32_t *exponent = dense_find(finder->dense, full, DTYPE_I32, 1, one, finder->error);
    if (!exponent)
        return -ENOENT;
    int status = factor_of(*exponent, full, &matrix.factor, finder->error);
    if (status == 0)
        *ret_matrix = matrix;
    return status;
}

struct wanted_matrix {
    const char *name;
    uint32_t n, k;
    struct matrix *matrix;
};

struct wanted_vector {
    const char *name;
    uint32_t n;
    const float **vector;
};

static int find_all(const struct finder *finder, const struct wanted_matrix *matrices, size_t matrix_count,
                    const struct wanted_vector *vectors, size_t vector_count)
{
    int status = 0;
    for (size_t i = 0; status == 0 && i < matrix_count; i++)
        status = find_matrix(finder, matrices[i].name, matrices[i].n, matrices[i].k, matrices[i].matrix);
    for (size_t i = 0; status == 0 && i < vector_count; i++)
        status = find_vector(finder, vectors[i].name, vectors[i].n, vectors[i].vector);
    return status;
}

#define COUNT(array) (sizeof(array) / sizeof(array)[0])

static int find_indexer(const struct finder *finder, const struct model_config *c, struct indexer_weights *ret_indexer)
{
    const struct wanted_matrix matrices[] = {
        {"self_attn.indexer.wq_b.weight", c->index_heads * c->index_dim, c->q_lora, &ret_indexer->wq_b},
        {"self_attn.indexer.wk.weight", c->index_dim, c->hidden, &ret_indexer->wk},
    };
    const struct wanted_vector vectors[] = {
        {"self_attn.indexer.k_norm.weight", c->index_dim, &ret_indexer->k_norm},
        {"self_attn.indexer.k_norm.bias", c->index_dim, &ret_indexer->k_norm_bias},
    };
    int status = find_all(finder, matrices, COUNT(matrices), vectors, COUNT(vectors));
    if (status == 0)
        status = find_linear(finder, "self_attn.indexer.weights_proj.weight", c->index_heads, c->hidden,
                             &ret_indexer->weights_proj);
    return status;
}

static int find_attention_mla(const struct model *model, uint32_t layer, struct layer_weights *ret_weights,
                              struct error *ret_error)
{
    const struct model_config *c = &model->facts.config;
    char prefix[40];
    snprintf(prefix, sizeof prefix, "model.layers.%u.", layer);
    struct finder finder = {&model->dense, prefix, ret_error};
    struct layer_weights *w = ret_weights;
    const struct wanted_matrix matrices[] = {
        {"self_attn.q_a_proj.weight", c->q_lora, c->hidden, &w->q_a},
        {"self_attn.q_b_proj.weight", c->heads * (c->qk_nope + c->qk_rope), c->q_lora, &w->q_b},
        {"self_attn.kv_a_proj_with_mqa.weight", c->kv_lora + c->qk_rope, c->hidden, &w->kv_a},
        {"self_attn.w_uk.weight", c->heads * c->kv_lora, c->qk_nope, &w->w_uk},
        {"self_attn.w_uv.weight", c->heads * c->v_head, c->kv_lora, &w->w_uv},
        {"self_attn.o_proj.weight", c->hidden, c->heads * c->v_head, &w->o},
    };
    const struct wanted_vector vectors[] = {
        {"input_layernorm.weight", c->hidden, &w->input_norm},
        {"post_attention_layernorm.weight", c->hidden, &w->post_norm},
        {"self_attn.q_a_layernorm.weight", c->q_lora, &w->q_a_norm},
        {"self_attn.kv_a_layernorm.weight", c->kv_lora, &w->kv_a_norm},
    };
    int status = find_all(&finder, matrices, COUNT(matrices), vectors, COUNT(vectors));
    if (status == 0 && c->indexer_kind[layer] == INDEXER_FULL)
        status = find_indexer(&finder, c, &w->indexer);
    return status;
}

/* The exponents of every expert of a MoE layer, each checked. */
static int find_exponents(const struct model *model, uint32_t layer, const int32_t **ret_exponents,
                          struct error *ret_error)
{
    const struct model_config *c = &model->facts.config;
    const uint64_t shape[] = {model_moe_layers(c), c->experts, EXPERT_MATRICES};
    const int32_t *all = dense_find(&model->dense, "experts.exponents", DTYPE_I32, 3, shape, ret_error);
    int index = model_moe_index(c, layer);
    if (!all || index < 0)
        return -ENOENT;
    *ret_exponents = all + (size_t)index * c->experts * EXPERT_MATRICES;
    int status = 0;
    for (uint32_t i = 0; status == 0 && i < c->experts * EXPERT_MATRICES; i++) {
        float factor;
        status = factor_of((*ret_exponents)[i], "experts.exponents", &factor, ret_error);
    }
    return status;
}

static int find_mlp_shared(const struct model *model, uint32_t layer, struct layer_weights *ret_weights,
                           struct error *ret_error)
{
    const struct model_config *c = &model->facts.config;
    char prefix[40];
    snprintf(prefix, sizeof prefix, "model.layers.%u.mlp.", layer);
    struct finder finder = {&model->dense, prefix, ret_error};
    struct layer_weights *w = ret_weights;
    if (c->layer_kind[layer] == LAYER_DENSE) {
        const struct wanted_matrix matrices[] = {
            {"gate_proj.weight", c->dense_width, c->hidden, &w->gate},
            {"up_proj.weight", c->dense_width, c->hidden, &w->up},
            {"down_proj.weight", c->hidden, c->dense_width, &w->down},
        };
        return find_all(&finder, matrices, COUNT(matrices), NULL, 0);
    }
    uint32_t width = c->shared_experts * c->expert_width;
    const struct wanted_matrix matrices[] = {
        {"shared_experts.gate_proj.weight", width, c->hidden, &w->gate},
        {"shared_experts.up_proj.weight", width, c->hidden, &w->up},
        {"shared_experts.down_proj.weight", c->hidden, width, &w->down},
    };
    const struct wanted_vector vectors[] = {{"gate.e_score_correction_bias", c->experts, &w->router_bias}};
    int status = find_all(&finder, matrices, width > 0 ? COUNT(matrices) : 0, vectors, COUNT(vectors));
    if (status == 0)
        status = find_linear(&finder, "gate.weight", c->experts, c->hidden, &w->router);
    if (status == 0)
        status = find_exponents(model, layer, &w->exponents, ret_error);
    return status;
}

static const struct family families[] = {
    {FAMILY_GLM_MOE_DSA, find_attention_mla, find_mlp_shared, forward_attention_mla, route_noaux_tc},
};

const struct family *family_find(uint32_t family)
{
    for (size_t i = 0; i < COUNT(families); i++)
        if ((uint32_t)families[i].family == family)
            return &families[i];
    return NULL;
}

static int find_mtp(struct model *model, struct error *ret_error)
{
    const struct model_config *c = &model->facts.config;
    struct weights *w = &model->weights;
    char prefix[40];
    snprintf(prefix, sizeof prefix, "model.layers.%u.", c->layers);
    struct finder finder = {&model->dense, prefix, ret_error};
    const struct wanted_matrix matrices[] = {{"eh_proj.weight", c->hidden, 2 * c->hidden, &w->eh_proj}};
    const struct wanted_vector vectors[] = {
        {"enorm.weight", c->hidden, &w->enorm},
        {"hnorm.weight", c->hidden, &w->hnorm},
        {"shared_head.norm.weight", c->hidden, &w->head_norm},
    };
    return find_all(&finder, matrices, COUNT(matrices), vectors, COUNT(vectors));
}

int weights_find(struct model *model, struct error *ret_error)
{
    const struct model_config *c = &model->facts.config;
    struct weights *w = &model->weights;
    struct finder finder = {&model->dense, "", ret_error};
    const struct wanted_matrix matrices[] = {
        {"model.embed_tokens.weight", c->vocab, c->hidden, &w->embed},
        {"lm_head.weight", c->vocab, c->hidden, &w->lm_head},
    };
    const struct wanted_vector vectors[] = {{"model.norm.weight", c->hidden, &w->norm}};
    int status = find_all(&finder, matrices, COUNT(matrices), vectors, COUNT(vectors));
    for (uint32_t layer = 0; status == 0 && layer < c->layers + c->mtp_layers; layer++) {
        status = model->family->find_attention(model, layer, &w->layers[layer], ret_error);
        if (status == 0)
            status = model->family->find_mlp(model, layer, &w->layers[layer], ret_error);
    }
    if (status == 0 && c->mtp_layers)
        status = find_mtp(model, ret_error);
    return status;
}
