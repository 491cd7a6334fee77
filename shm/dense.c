#include "shm/dense.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DENSE_MAX_TENSORS (1u << 20)

static int check_tensor(const struct tensor *tensor, size_t segment_bytes)
{
    if (!memchr(tensor->name, 0, sizeof(tensor->name)) || tensor->name[0] == 0)
        return -EBADMSG;
    size_t element = dtype_bytes(tensor->dtype);
    if (element == 0 || tensor->dims > TENSOR_MAX_DIMS)
        return -EBADMSG;
    uint64_t bytes = element;
    for (uint32_t d = 0; d < TENSOR_MAX_DIMS; d++) {
        if (__builtin_mul_overflow(bytes, tensor->shape[d], &bytes))
            return -EBADMSG;
    }
    if (bytes != tensor->bytes || tensor->offset > segment_bytes || bytes > segment_bytes - tensor->offset)
        return -EBADMSG;
    return tensor->offset % element ? -EBADMSG : 0;
}

int dense_attach(const char *instance, struct dense *ret_dense, struct error *ret_error)
{
    struct dense dense = {0};
    int status = segment_attach(instance, "dense", SEGMENT_DENSE, 0, false, &dense.segment, ret_error);
    if (status < 0)
        return status;
    const struct dense_header *header = dense.segment.base;
    if (dense.segment.bytes < sizeof(*header) || !atomic_load_explicit(&header->ready, memory_order_acquire)) {
        segment_detach(&dense.segment);
        return error_set(ret_error, EAGAIN, "dense weights of instance %s are not loaded yet", instance);
    }
    uint32_t count = header->count;
    uint64_t offset = header->tensors_offset;
    size_t bytes = dense.segment.bytes;
    if (count > DENSE_MAX_TENSORS || offset % _Alignof(struct tensor) || offset > bytes ||
        (size_t)count * sizeof(struct tensor) > bytes - offset) {
        segment_detach(&dense.segment);
        return error_set(ret_error, EBADMSG,
                         "directory of the dense weights of instance %s is damaged: run `calypte down` and start again",
                         instance);
    }
    /* A private copy: what was checked cannot be changed by a neighbour afterwards. */
    struct tensor *tensors = calloc(count ? count : 1, sizeof(*tensors));
    if (!tensors) {
        segment_detach(&dense.segment);
        return error_set(ret_error, ENOMEM, "directory of the dense weights of instance %s: out of memory", instance);
    }
    memcpy(tensors, (const char *)dense.segment.base + offset, (size_t)count * sizeof(*tensors));
    dense.tensors = tensors;
    dense.count = count;
    for (uint32_t i = 0; i < count; i++) {
        if (check_tensor(&tensors[i], bytes) < 0 || (i > 0 && strcmp(tensors[i - 1].name, tensors[i].name) >= 0)) {
            dense_detach(&dense);
            return error_set(ret_error, EBADMSG,
                             "directory of the dense weights of instance %s is damaged at entry %u: run `calypte down` "
                             "and start again",
                             instance, i);
        }
    }
    *ret_dense = dense;
    return 0;
}

void dense_detach(struct dense *dense)
{
    segment_detach(&dense->segment);
    free((void *)(uintptr_t)dense->tensors);
    *dense = (struct dense){0};
}

static int compare_name(const void *name, const void *tensor)
{
    return strcmp(name, ((const struct tensor *)tensor)->name);
}

static void shape_text(uint32_t dims, const uint64_t *shape, char ret_text[static 96])
{
    size_t used = 0;
    ret_text[0] = 0;
    for (uint32_t d = 0; d < dims && d < TENSOR_MAX_DIMS; d++)
        used += (size_t)snprintf(ret_text + used, 96 - used, "%s%" PRIu64, d ? ", " : "", shape[d]);
}

const void *dense_find(const struct dense *dense, const char *name, enum tensor_dtype dtype, uint32_t dims,
                       const uint64_t *shape, struct error *ret_error)
{
    const struct tensor *tensor = bsearch(name, dense->tensors, dense->count, sizeof(*tensor), compare_name);
    if (!tensor) {
        error_set(ret_error, ENOENT, "tensor %s is not among the dense weights: convert the model again", name);
        return NULL;
    }
    bool fits = tensor->dtype == dtype && tensor->dims == dims && dims >= 1 && dims <= TENSOR_MAX_DIMS;
    if (!fits || memcmp(tensor->shape, shape, dims * sizeof(*shape)) != 0) {
        char have[96], want[96];
        shape_text(tensor->dims, tensor->shape, have);
        shape_text(dims, shape, want);
        error_set(ret_error, EBADMSG, "tensor %s is %s [%s] where the model needs %s [%s]: convert the model again",
                  name, dtype_name(tensor->dtype), have, dtype_name(dtype), want);
        return NULL;
    }
    return (const char *)dense->segment.base + tensor->offset;
}
