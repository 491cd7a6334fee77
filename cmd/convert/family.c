#include "cmd/convert/family.h"

#include <stdio.h>
#include <string.h>

#define COUNT(array) (sizeof(array) / sizeof(array)[0])

static const struct tensor_rule glm_moe_dsa_rules[] = {
    {"model.embed_tokens.weight", SCOPE_MODEL, SIZE_VOCAB, SIZE_HIDDEN, TARGET_DENSE},

    {"input_layernorm.weight", SCOPE_LAYER, SIZE_NONE, SIZE_HIDDEN, TARGET_F32},
    {"post_attention_layernorm.weight", SCOPE_LAYER, SIZE_NONE, SIZE_HIDDEN, TARGET_F32},
    {"self_attn.q_a_proj.weight", SCOPE_LAYER, SIZE_Q_LORA, SIZE_HIDDEN, TARGET_DENSE},
    {"self_attn.q_a_layernorm.weight", SCOPE_LAYER, SIZE_NONE, SIZE_Q_LORA, TARGET_F32},
    {"self_attn.q_b_proj.weight", SCOPE_LAYER, SIZE_Q_ROWS, SIZE_Q_LORA, TARGET_DENSE},
    {"self_attn.kv_a_proj_with_mqa.weight", SCOPE_LAYER, SIZE_KV_A_ROWS, SIZE_HIDDEN, TARGET_DENSE},
    {"self_attn.kv_a_layernorm.weight", SCOPE_LAYER, SIZE_NONE, SIZE_KV_LORA, TARGET_F32},
    {"self_attn.kv_b_proj.weight", SCOPE_LAYER, SIZE_KV_B_ROWS, SIZE_KV_LORA, TARGET_KV_B},
    {"self_attn.o_proj.weight", SCOPE_LAYER, SIZE_HIDDEN, SIZE_V_COLUMNS, TARGET_DENSE},

    {"self_attn.indexer.wq_b.weight", SCOPE_FULL, SIZE_INDEX_ROWS, SIZE_Q_LORA, TARGET_DENSE},
    {"self_attn.indexer.wk.weight", SCOPE_FULL, SIZE_INDEX_DIM, SIZE_HIDDEN, TARGET_DENSE},
    {"self_attn.indexer.k_norm.weight", SCOPE_FULL, SIZE_NONE, SIZE_INDEX_DIM, TARGET_F32},
    {"self_attn.indexer.k_norm.bias", SCOPE_FULL, SIZE_NONE, SIZE_INDEX_DIM, TARGET_F32},
    {"self_attn.indexer.weights_proj.weight", SCOPE_FULL, SIZE_INDEX_HEADS, SIZE_HIDDEN, TARGET_F32},

    {"mlp.gate_proj.weight", SCOPE_DENSE, SIZE_DENSE_WIDTH, SIZE_HIDDEN, TARGET_DENSE},
    {"mlp.up_proj.weight", SCOPE_DENSE, SIZE_DENSE_WIDTH, SIZE_HIDDEN, TARGET_DENSE},
    {"mlp.down_proj.weight", SCOPE_DENSE, SIZE_HIDDEN, SIZE_DENSE_WIDTH, TARGET_DENSE},

    {"mlp.gate.weight", SCOPE_MOE, SIZE_EXPERTS, SIZE_HIDDEN, TARGET_AS_IS},
    {"mlp.gate.e_score_correction_bias", SCOPE_MOE, SIZE_NONE, SIZE_EXPERTS, TARGET_F32},
    {"mlp.experts.*.gate_proj.weight", SCOPE_MOE, SIZE_EXPERT_WIDTH, SIZE_HIDDEN, TARGET_EXPERT_GATE},
    {"mlp.experts.*.up_proj.weight", SCOPE_MOE, SIZE_EXPERT_WIDTH, SIZE_HIDDEN, TARGET_EXPERT_UP},
    {"mlp.experts.*.down_proj.weight", SCOPE_MOE, SIZE_HIDDEN, SIZE_EXPERT_WIDTH, TARGET_EXPERT_DOWN},
    {"mlp.shared_experts.gate_proj.weight", SCOPE_MOE_SHARED, SIZE_SHARED_WIDTH, SIZE_HIDDEN, TARGET_DENSE},
    {"mlp.shared_experts.up_proj.weight", SCOPE_MOE_SHARED, SIZE_SHARED_WIDTH, SIZE_HIDDEN, TARGET_DENSE},
    {"mlp.shared_experts.down_proj.weight", SCOPE_MOE_SHARED, SIZE_HIDDEN, SIZE_SHARED_WIDTH, TARGET_DENSE},

    {"enorm.weight", SCOPE_MTP, SIZE_NONE, SIZE_HIDDEN, TARGET_F32},
    {"hnorm.weight", SCOPE_MTP, SIZE_NONE, SIZE_HIDDEN, TARGET_F32},
    {"eh_proj.weight", SCOPE_MTP, SIZE_HIDDEN, SIZE_TWO_HIDDEN, TARGET_DENSE},
    {"shared_head.norm.weight", SCOPE_MTP, SIZE_NONE, SIZE_HIDDEN, TARGET_F32},

    {"model.norm.weight", SCOPE_MODEL, SIZE_NONE, SIZE_HIDDEN, TARGET_F32},
    {"lm_head.weight", SCOPE_MODEL, SIZE_VOCAB, SIZE_HIDDEN, TARGET_DENSE},
};

static const struct ignore_rule glm_moe_dsa_ignored[] = {
    {"embed_tokens.", SCOPE_MTP, "a copy of model.embed_tokens"},
    {"shared_head.head.", SCOPE_MTP, "a copy of lm_head"},
    {"self_attn.indexer.", SCOPE_SHARED, "this layer uses the keys that another layer's indexer chose"},
    {"self_attn.rotary_emb.inv_freq", SCOPE_LAYER, "computed from rope_theta"},
};

static const struct tensor_family families[] = {
    {FAMILY_GLM_MOE_DSA, glm_moe_dsa_rules, COUNT(glm_moe_dsa_rules), glm_moe_dsa_ignored, COUNT(glm_moe_dsa_ignored)},
};

const struct tensor_family *tensor_family_find(const struct model_config *config)
{
    for (size_t i = 0; i < COUNT(families); i++) {
        if ((uint32_t)families[i].family == config->family)
            return &families[i];
    }
    return NULL;
}

bool tensor_scope_has(const struct model_config *config, enum tensor_scope scope, uint32_t layer)
{
    if (scope == SCOPE_MODEL)
        return true;
    if (layer >= config->layers + config->mtp_layers)
        return false;
    switch (scope) {
    case SCOPE_MODEL:
    case SCOPE_LAYER: return true;
    case SCOPE_DENSE: return config->layer_kind[layer] == LAYER_DENSE;
    case SCOPE_MOE: return config->layer_kind[layer] == LAYER_MOE;
    case SCOPE_MOE_SHARED: return config->layer_kind[layer] == LAYER_MOE && config->shared_experts > 0;
    case SCOPE_FULL: return config->indexer_kind[layer] == INDEXER_FULL;
    case SCOPE_SHARED: return config->indexer_kind[layer] == INDEXER_SHARED;
    case SCOPE_MTP: return layer >= config->layers;
    }
    return false;
}

uint64_t tensor_size_of(const struct model_config *c, enum tensor_size size)
{
    switch (size) {
    case SIZE_NONE: return 0;
    case SIZE_VOCAB: return c->vocab;
    case SIZE_HIDDEN: return c->hidden;
    case SIZE_TWO_HIDDEN: return 2ull * c->hidden;
    case SIZE_Q_LORA: return c->q_lora;
    case SIZE_Q_ROWS: return (uint64_t)c->heads * (c->qk_nope + c->qk_rope);
    case SIZE_KV_LORA: return c->kv_lora;
    case SIZE_KV_A_ROWS: return (uint64_t)c->kv_lora + c->qk_rope;
    case SIZE_KV_B_ROWS: return (uint64_t)c->heads * (c->qk_nope + c->v_head);
    case SIZE_V_COLUMNS: return (uint64_t)c->heads * c->v_head;
    case SIZE_INDEX_HEADS: return c->index_heads;
    case SIZE_INDEX_DIM: return c->index_dim;
    case SIZE_INDEX_ROWS: return (uint64_t)c->index_heads * c->index_dim;
    case SIZE_DENSE_WIDTH: return c->dense_width;
    case SIZE_EXPERT_WIDTH: return c->expert_width;
    case SIZE_SHARED_WIDTH: return (uint64_t)c->shared_experts * c->expert_width;
    case SIZE_EXPERTS: return c->experts;
    }
    return 0;
}

const char *tensor_ignored(const struct tensor_family *family, const struct model_config *config, const char *name)
{
    unsigned layer;
    int used = 0;
    if (sscanf(name, "model.layers.%9u.%n", &layer, &used) != 1 || used == 0)
        return NULL;
    if (layer >= config->layers + config->mtp_layers)
        return layer == config->layers ? "the configuration has no MTP layer (num_nextn_predict_layers is 0)" : NULL;
    for (size_t i = 0; i < family->ignored_count; i++) {
        const struct ignore_rule *rule = &family->ignored[i];
        if (tensor_scope_has(config, rule->scope, layer) && !strncmp(name + used, rule->prefix, strlen(rule->prefix)))
            return rule->why;
    }
    return NULL;
}
