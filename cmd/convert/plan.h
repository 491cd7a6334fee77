/* What a conversion will write, down to the byte, before any weight is read: the files, their tensors and headers,
 * and the units of work (one tensor or one expert each). Planning also finds every missing, unknown and misshapen
 * tensor of the checkpoint. */
#pragma once

#include "cmd/convert/checkpoint.h"
#include "cmd/convert/family.h"
#include "proto/weights.h"

struct plan_options {
    enum weight_format experts, dense;
    double qk_norm_eps;
    uint32_t stripes; /* drives that the slices of every expert are spread over, 1 to 8; 0: 1 */
};

enum unit_kind {
    UNIT_MATRIX, /* quantised as it is */
    /* Of kv_b_proj, the qk_nope rows of each head, transposed, on top of each other: [heads * kv_lora, qk_nope]. */
    UNIT_W_UK,
    /* Of kv_b_proj, the v_head rows of each head: [heads * v_head, kv_lora]. */
    UNIT_W_UV,
    UNIT_F32,
    UNIT_AS_IS,
    UNIT_EXPERT, /* gate, up and down to one blob */
};

#define UNIT_TENSORS 3u /* quanta, scales, exponent; the others have one */

struct plan_unit {
    enum unit_kind kind;
    enum weight_format format;              /* of quanta */
    uint32_t expert;                        /* UNIT_EXPERT */
    struct source sources[EXPERT_MATRICES]; /* checked, not opened; all but UNIT_EXPERT have one */
    uint32_t tensors[UNIT_TENSORS];         /* what it writes: indices into the file's tensors */
};

struct plan_file {
    char name[48];
    bool experts; /* an experts file, else a dense one */
    uint32_t layer;
    /* Of an experts file. Those of a layer follow one another; the units stand in the first and write to all. */
    uint32_t stripe;
    struct range slices;
    size_t tensor_count;
    struct tensor *tensors; /* with their places in the file; the last one may be the padding */
    size_t unit_count;
    struct plan_unit *units;
    char *header;
    size_t header_bytes;
    uint64_t bytes;
};

struct plan {
    const struct checkpoint *checkpoint;
    struct plan_options options;
    struct model_config config;
    struct expert_shape expert_shape;
    size_t slice_bytes;
    size_t file_count;
    struct plan_file *files; /* dense first, then experts by layer and stripe */
    uint64_t dense_bytes, expert_bytes;
};

/* `checkpoint` must live as long as the plan; its tensors get marked and it gets notes. One thread. */
int plan_make(struct checkpoint *checkpoint, const struct plan_options *options, struct plan *ret_plan,
              struct error *ret_error);
void plan_free(struct plan *plan);
