/* The container on disk: a folder with calypte.json (the manifest), dense-*.safetensors,
 * experts-<stripe>-<layer>.safetensors, and the tokenizer and generation files of the checkpoint. It is read-only for
 * ever.
 *
 * calypte.json:
 *   {"format": 1, "numerics": 1, "producer": "calypte 0.1.0", "source": NAME OF THE SOURCE FOLDER,
 *    "config": config.json of the checkpoint, "generation": generation_config.json or null, "qk_norm_eps": 1e-6,
 *    "dense_format": "int8", "expert_format": "int4", "slices": 8, "stripes": 1, "slice_bytes": N,
 *    "files": {"dense-00001.safetensors": {"bytes": N, "header": "16 hex digits, XXH3 of everything before the data",
 *                                         "tensors": {NAME: "XXH3 of its data", ...}},
 *              "experts-0-00001.safetensors": {"bytes", "header", "tensors": {"experts.checksums": ..., ...}}},
 *    "fingerprint": "16 hex digits, of the checkpoint and the options; only `calypte convert` reads it",
 *    "checksum": "XXH3 of this object without this member, dumped by jansson with JSON_COMPACT | JSON_SORT_KEYS"}
 *
 * dense-*.safetensors: names as in the checkpoint. A quantised matrix [n, k] is
 *   NAME           I8 [n/16, k/64, 1024] (int8) or U8 [n/16, k/64, 512] (int4)      NAME ends in .weight
 *   NAME_scale     F16 [n/16, k/64, 16]
 *   NAME_exponent  I32 [1]
 *   kv_b_proj becomes `self_attn.w_uk.weight` (heads matrices of [kv_lora, qk_nope] on top of each other:
 *   n = heads * kv_lora) and `self_attn.w_uv.weight` (n = heads * v_head, k = kv_lora). Norms, biases and indexer
 *   weights_proj are F32; the router keeps the checkpoint's type (BF16, F16 or F32). Tensors stand in order of falling
 *   alignment (quanta, scales, the rest), the file is padded to 4096 by a last U8 tensor `padding` where needed.
 *   Files hold at most some 4 GiB.
 *
 * experts-<stripe>-<layer, 5 digits>.safetensors: one MoE layer (the MTP layer's too). Stripe s of S holds the slices
 * split(8, s, S) of every expert, so that an expert streams from S drives at once; the files of the stripes but the first
 * stand in folders of their own, and the container's folder has symbolic links to them.
 *   model.layers.L.mlp.experts.E     U8 [slices of the stripe, slice_bytes]   E ascending, 4096-aligned
 *   experts.checksums                U64 [experts, 8]      XXH3 of each slice         } in the
 *   experts.exponents                I32 [experts, 3]      gate, up, down             } first stripe
 *   padding                          U8                    to a multiple of 4096
 */
#pragma once

#include "proto/error.h"
#include "proto/model_config.h"
#include "proto/safetensors.h"
#include "proto/weights.h"

#include <inttypes.h>

#define CONTAINER_FORMAT 1
#define CONTAINER_NUMERICS 1
#define CONTAINER_EXPERTS_NAME "experts-%" PRIu32 "-%05" PRIu32 ".safetensors" /* of a stripe and a layer */

struct dense_file {
    struct safetensors header;
    uint64_t *checksums; /* [header.count], XXH3 of each tensor's data, in the header's order */
};

/* The slices of one stripe, of all experts of a layer. */
struct expert_stripe {
    struct safetensors header;
    struct range slices; /* which of the 8 */
    uint64_t *offsets;   /* [experts] of their first byte in the file, 4096-aligned, checked */
};

/* The stripe that a slice of an expert stands in. */
static inline uint32_t stripe_of_slice(uint32_t slice, uint32_t stripes)
{
    uint32_t stripe = 0;
    while (stripe + 1 < stripes && slice >= split(EXPERT_SLICES, stripe + 1, stripes).first)
        stripe++;
    return stripe;
}

struct expert_layer {
    uint32_t layer;
    struct expert_stripe stripes[EXPERT_SLICES]; /* [container.stripes] */
    uint64_t *checksums;                         /* [experts][8], read from the file and held against the manifest */
    int32_t *exponents;                          /* [experts][3] */
};

struct container {
    char *path;
    uint64_t identity; /* the manifest's checksum: two containers with the same are the same bytes */
    struct model_config config;
    enum weight_format dense_format, expert_format;
    struct expert_shape expert_shape;
    size_t slice_bytes;
    uint32_t stripes; /* 1 to 8 */
    size_t dense_count;
    struct dense_file *dense;
    size_t expert_count; /* = number of MoE layers, ascending by layer */
    struct expert_layer *experts;
};

/* Opens a container and checks everything but the bulk data: manifest checksum, formats, every file's length and
 * header hash, every expert's place, the small tables. Errors name the file and the remedy. The caller frees with
 * container_close. Any thread. */
int container_open(const char *path, struct container **ret_container, struct error *ret_error);
/* As container_open, but a file that is refused does not end it: each is told with its name in the manifest, and the next
 * one is looked at. `status` is -ENOENT where it is missing, -EINVAL where what stands there is not the manifest's, else
 * why it cannot be read; `why` is container_open's line. Returns 0 and the container, or how many files were refused, or
 * an error that is not one of its files'. */
typedef void container_refusal(void *context, const char *name, int status, const struct error *why);
int container_inspect(const char *path, container_refusal *refusal, void *context, struct container **ret_container,
                      struct error *ret_error);
void container_close(struct container *container);

#define CONTAINER_MANIFEST "calypte.json"
#define CONTAINER_MANIFEST_MAX (256u << 20) /* bytes; GLM-5.2's has about 1 MiB */
#define CONTAINER_JOURNAL "convert.state"   /* stands there while the conversion is unfinished */

/* What mends one file of a container, for errors: such a one as container_open refuses, and one whose bulk data are
 * damaged, which convert does not read to find. */
#define CONTAINER_MEND                                                                                                 \
    "fetch this file again, or run its `calypte convert` again (same flags; only this file is made anew)"
#define CONTAINER_REPLACE                                                                                              \
    "fetch this file again, or remove it and run its `calypte convert` again (same flags; only this file is made "     \
    "anew)"

/* Why bytes of a container cannot be had, and what to do then; `code`: an errno, ENODATA where the file ends before them, EBADMSG where
 * their checksum differs. Any thread. */
const char *container_fault(int code);
const char *container_remedy(int code);

/* The manifest's checksum: XXH3 of the object without its member "checksum", as jansson dumps it. `manifest` is not
 * changed. */
int container_checksum(const json_t *manifest, uint64_t *ret_checksum, struct error *ret_error);

/* A checksum as the manifest spells it: 16 lower-case hexadecimal digits. The parser refuses anything else. */
#define CHECKSUM_DIGITS 16u
void checksum_format(uint64_t checksum, char ret_text[CHECKSUM_DIGITS + 1]);
int checksum_parse(const json_t *text, uint64_t *ret_checksum);

/* Reads a JSON object of at most `limit` bytes; errors name the path. The caller decrefs. */
int container_read_json(const char *path, size_t limit, json_t **ret_object, struct error *ret_error);

/* The format of a name in calypte.json ("int4", "int8"), and back; 0 where the name is unknown. */
const char *weight_format_name(enum weight_format format);
enum weight_format weight_format_parse(const char *name);
