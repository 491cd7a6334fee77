/* Reading and writing safetensors headers: https://github.com/huggingface/safetensors (format section).
 *
 * 8 bytes little-endian header length, a JSON object name -> {dtype, shape, data_offsets}, then the data. A reader
 * trusts nothing: header size, JSON, dtypes, shape products, offsets, overlaps, holes, duplicates, file length;
 * errors name file and tensor. / */
#pragma once

#include "proto/error.h"

#include <stddef.h>
#include <stdint.h>

enum tensor_dtype {
    DTYPE_U8 = 1,
    DTYPE_I8,
    DTYPE_F8_E4M3,
    DTYPE_F16,
    DTYPE_BF16,
    DTYPE_F32,
    DTYPE_I32,
    DTYPE_U32,
    DTYPE_I64,
    DTYPE_U64,
    DTYPE_F64,
};

#define TENSOR_MAX_DIMS 4u
#define TENSOR_NAME_MAX 120u

struct tensor {
    char name[TENSOR_NAME_MAX];
    enum tensor_dtype dtype;
    uint32_t dims;
    uint64_t shape[TENSOR_MAX_DIMS]; /* unused dimensions are 1 */
    uint64_t offset;                 /* bytes from the start of the file */
    uint64_t bytes;
};

struct safetensors {
    char *path;
    uint64_t file_bytes;
    uint64_t data_offset; /* of the data section in the file */
    uint64_t header_xxh3; /* XXH3-64 of the first data_offset bytes */
    size_t count;
    struct tensor *tensors; /* sorted by name */
};

/* Reads and checks the header of `path`. On success the caller frees with safetensors_close. Any thread. */
int safetensors_open(const char *path, struct safetensors *ret_file, struct error *ret_error);
void safetensors_close(struct safetensors *file);

/* The tensor called `name`, or NULL. */
const struct tensor *safetensors_find(const struct safetensors *file, const char *name);

size_t dtype_bytes(enum tensor_dtype dtype);
const char *dtype_name(enum tensor_dtype dtype);

/* Makes the header for `count` tensors whose data follow one another in the order given (offsets are filled in,
 * relative to the file), padded with spaces so that data start at a multiple of `align`. The caller frees
 * *ret_header. */
int safetensors_header(struct tensor *tensors, size_t count, uint64_t align, char **ret_header, size_t *ret_bytes,
                       struct error *ret_error);
