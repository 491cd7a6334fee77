/* What a family's checkpoint holds, as a table: the name of each tensor, in which layers it stands, its shape, and
 * what becomes of it. A new family is a new table in family.c. */
#pragma once

#include "proto/model_config.h"

#include <stdbool.h>
#include <stddef.h>

/* Where a tensor stands. All but SCOPE_MODEL: once a layer, under "model.layers.<layer>.". */
enum tensor_scope {
    SCOPE_MODEL,      /* once, under its full name */
    SCOPE_LAYER,      /* in every layer, the MTP layer too */
    SCOPE_DENSE,      /* in dense layers */
    SCOPE_MOE,        /* in MoE layers */
    SCOPE_MOE_SHARED, /* in MoE layers of a model with shared experts */
    SCOPE_FULL,       /* in layers with an indexer of their own */
    SCOPE_SHARED,     /* in layers that reuse another layer's keys */
    SCOPE_MTP,        /* in the MTP layer */
};

/* Sizes that a configuration gives. */
enum tensor_size {
    SIZE_NONE, /* rows of a vector */
    SIZE_VOCAB,
    SIZE_HIDDEN,
    SIZE_TWO_HIDDEN,
    SIZE_Q_LORA,
    SIZE_Q_ROWS, /* heads x (qk_nope + qk_rope) */
    SIZE_KV_LORA,
    SIZE_KV_A_ROWS, /* kv_lora + qk_rope */
    SIZE_KV_B_ROWS, /* heads x (qk_nope + v_head) */
    SIZE_V_COLUMNS, /* heads x v_head */
    SIZE_INDEX_HEADS,
    SIZE_INDEX_DIM,
    SIZE_INDEX_ROWS, /* index heads x their width */
    SIZE_DENSE_WIDTH,
    SIZE_EXPERT_WIDTH,
    SIZE_SHARED_WIDTH, /* shared experts x expert width */
    SIZE_EXPERTS,
};

enum tensor_target {
    TARGET_DENSE,       /* a matrix in the dense format (int8 in the MTP layer), resident */
    TARGET_KV_B,        /* split into self_attn.w_uk (transposed) and self_attn.w_uv, each as TARGET_DENSE */
    TARGET_F32,         /* as F32 */
    TARGET_AS_IS,       /* in the checkpoint's type */
    TARGET_EXPERT_GATE, /* a part of the expert's blob; '*' in the name stands for the expert */
    TARGET_EXPERT_UP,
    TARGET_EXPERT_DOWN,
};

struct tensor_rule {
    const char *name;
    enum tensor_scope scope;
    enum tensor_size rows, columns;
    enum tensor_target target;
};

/* Tensors that stand in public checkpoints and are not needed: a prefix of their names. */
struct ignore_rule {
    const char *prefix;
    enum tensor_scope scope;
    const char *why;
};

struct tensor_family {
    enum model_family family;
    const struct tensor_rule *rules;
    size_t rule_count;
    const struct ignore_rule *ignored;
    size_t ignored_count;
};

/* The table of a checked configuration's family. Never NULL for a family that model_config_parse accepts. Any
 * thread. */
const struct tensor_family *tensor_family_find(const struct model_config *config);

/* Whether tensors of a scope stand in a layer; `layer` is ignored for SCOPE_MODEL. */
bool tensor_scope_has(const struct model_config *config, enum tensor_scope scope, uint32_t layer);

uint64_t tensor_size_of(const struct model_config *config, enum tensor_size size);

/* Why the family ignores the tensor called `name`, or NULL: then it is unknown. */
const char *tensor_ignored(const struct tensor_family *family, const struct model_config *config, const char *name);
