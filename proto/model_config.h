/* What the engine knows of a model: the facts of config.json and generation_config.json, checked once, in one flat
 * struct that also travels in the control segment. A family is an entry of the table in model_config.c; what it
 * cannot run it refuses by name. */
#pragma once

#include "proto/error.h"

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

#define MODEL_MAX_LAYERS 160u /* with the MTP layers */
#define MODEL_MAX_EXPERTS 1024u
#define MODEL_MAX_TOP_K 32u
#define MODEL_MAX_STOPS 16u

enum model_family {
    FAMILY_GLM_MOE_DSA = 1,
};

enum layer_kind { LAYER_DENSE = 0, LAYER_MOE = 1 };
enum indexer_kind { INDEXER_FULL = 1, INDEXER_SHARED = 2 };

struct model_config {
    uint32_t family; /* enum model_family */
    char model_type[32];
    uint32_t hidden, layers, heads, vocab, max_positions;
    uint32_t mtp_layers; /* 0 or 1; the MTP layer's index is `layers` */
    float rms_eps, qk_norm_eps, index_norm_eps;
    double rope_theta;
    uint32_t rope_interleave, index_rope_interleave; /* 0 or 1 */
    /* MLA */
    uint32_t q_lora, kv_lora, qk_nope, qk_rope, v_head;
    /* DSA: keys kept, index heads and their width */
    uint32_t index_topk, index_heads, index_dim;
    /* MoE */
    uint32_t experts, top_k, shared_experts, expert_width, dense_width, n_group, topk_group, norm_topk_prob;
    float routed_scaling;
    uint8_t layer_kind[MODEL_MAX_LAYERS];   /* enum layer_kind, the MTP layer at [layers] */
    uint8_t indexer_kind[MODEL_MAX_LAYERS]; /* enum indexer_kind */
    uint32_t stop_count;
    int32_t stops[MODEL_MAX_STOPS];
};

/* Parses config.json and, if not NULL, generation_config.json (its eos_token_id wins). `qk_norm_eps` is the
 * container's parameter (0: the default, 1e-6). Refuses unknown model types, missing rope_theta, sizes out of range,
 * sizes that the block format cannot hold (inputs divide by 64, rows by 16), naming the field. Any thread. */
int model_config_parse(const json_t *config, const json_t *generation, double qk_norm_eps,
                       struct model_config *ret_config, struct error *ret_error);

/* Checks every bound of a config that came through shared memory. */
int model_config_check(const struct model_config *config, struct error *ret_error);

/* Number of MoE layers (the MTP layer's included), and the index of a layer among them, or -1. */
uint32_t model_moe_layers(const struct model_config *config);
int model_moe_index(const struct model_config *config, uint32_t layer);
