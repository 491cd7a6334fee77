/* What `calypte verify` reads of a container: the parts that have a checksum (slices of experts, dense tensors) in the
 * order of the disk, and extents, runs of parts that are read and hashed together. The same container gives the same
 * extents, so a place can be remembered as a number of them. */
#pragma once

#include "proto/container.h"

#include <stdbool.h>

#define EXTENT_BYTES (UINT64_C(8) << 20) /* of an extent, but a part that is larger is one alone */

struct part {
    uint64_t offset, bytes; /* in its file */
    uint64_t expected;      /* XXH3-64 */
    uint32_t index;         /* of an expert file: expert * 8 + slice; of a dense file: of the tensor in its header */
};

struct extent {
    uint32_t file;
    uint32_t first, parts; /* of extents.parts */
    uint64_t offset, end;  /* bytes of the file that cover them, multiples of 4096 */
    uint64_t bytes;        /* of the parts */
};

struct extent_file {
    const struct safetensors *header;
    const struct expert_layer *experts;    /* NULL: a dense file */
    uint32_t first_extent, extents, parts; /* parts: those of this file */
};

struct extents {
    const struct container *container;
    struct extent_file *files; /* [file_count] the dense ones first */
    struct part *parts;        /* [part_count] */
    struct extent *list;       /* [count] */
    uint32_t file_count, part_count, count;
    uint64_t bytes; /* of all parts */
};

/* The container must outlive them. The caller frees with extents_free. */
int extents_make(const struct container *container, struct extents *ret_extents, struct error *ret_error);
void extents_free(struct extents *extents);

/* One line on a part that is not good: file, expert or tensor, what is wrong (`code`, an errno: EBADMSG the checksum
 * differs, ENODATA the file ends before it, else why it cannot be read) and what to do. */
void extents_describe(const struct extent_file *file, const struct part *part, int code, char *ret_text, size_t size);
/* The same as {"file", "layer", "expert", "slice", "reason"} or {"file", "tensor", "reason"}; NULL: no memory. */
json_t *extents_describe_json(const struct extent_file *file, const struct part *part, int code);
