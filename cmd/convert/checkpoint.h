/* A Hugging Face checkpoint folder: config.json, generation_config.json, and safetensors shards placed by
 * model.safetensors.index.json (or one model.safetensors). It is only ever read. */
#pragma once

#include "proto/error.h"
#include "proto/safetensors.h"

#include <jansson.h>
#include <stdbool.h>

struct shard {
    char *name; /* in the folder */
    struct safetensors header;
    int fd;
};

struct source_tensor {
    const struct tensor *tensor;
    const struct shard *shard;
    bool used; /* set by the plan; what stays unset is unknown */
};

struct checkpoint {
    char *path;
    json_t *config, *generation; /* generation may be NULL */
    size_t shard_count;
    struct shard *shards; /* by name */
    size_t tensor_count;
    struct source_tensor *tensors; /* by name */
    size_t note_count;
    char **notes; /* lines for the user: what was ignored and why */
    /* Names and shapes only (synth.h): `path` is a name, no file stands behind it, weights come from `seed`. */
    bool synthetic;
    uint64_t seed;
};

/* Opens a folder and checks every header. Errors name file and tensor. The caller closes. One thread. */
int checkpoint_open(const char *path, struct checkpoint *ret_checkpoint, struct error *ret_error);
void checkpoint_close(struct checkpoint *checkpoint);

/* Adds a line to the notes. */
__attribute__((format(printf, 2, 3))) int checkpoint_note(struct checkpoint *checkpoint, const char *format, ...);

struct source_tensor *checkpoint_find(const struct checkpoint *checkpoint, const char *name);

/* A hash of what was opened: configuration, names, sizes, headers and samples of the data; `times` adds the times of
 * last change, which a copy of the folder does not share. Two checkpoints with the same hash are taken for the same. */
int checkpoint_fingerprint(const struct checkpoint *checkpoint, bool times, uint64_t *ret_hash,
                           struct error *ret_error);

/* A tensor [rows, columns] (a vector has one row) that is read a few rows at a time as f32. One thread each. */
struct source {
    const struct source_tensor *weight, *scale; /* scale: the F8_E4M3 weight's blocks of 128 x 128, or NULL */
    uint64_t rows, columns;
    float *scales; /* [ceil(rows / 128)][ceil(columns / 128)] */
    uint8_t *raw;
    size_t raw_bytes;
    float *f8; /* [256] the value of each E4M3 byte, where the weight is F8_E4M3 */
};

/* Checks without reading data that `weight` can be read as [rows, columns]: dtype, shape, and its scales. rows = 0
 * stands for a vector of `columns`. Finds the scales and marks both tensors used. */
int source_check(const struct checkpoint *checkpoint, struct source_tensor *weight, uint64_t rows, uint64_t columns,
                 struct source *ret_source, struct error *ret_error);
/* Reads the scales of a checked source. The caller closes. */
int source_open(struct source *source, struct error *ret_error);
void source_close(struct source *source);

/* Reads rows [first, first + count) as f32 [count][columns]. NaN and infinity are refused by tensor name. */
int source_read(struct source *source, uint64_t first, uint64_t count, float *ret_rows, struct error *ret_error);
/* The stored bytes of the whole tensor. */
int source_read_raw(struct source *source, void *ret_bytes, struct error *ret_error);
