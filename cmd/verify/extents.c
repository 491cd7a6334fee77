#include "cmd/verify/extents.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int compare_parts(const void *a, const void *b)
{
    const struct part *left = a, *right = b;
    return left->offset < right->offset ? -1 : left->offset > right->offset;
}

static void add_expert_parts(struct extents *extents, const struct expert_layer *layer, uint32_t stripe)
{
    const struct container *container = extents->container;
    const struct expert_stripe *file = &layer->stripes[stripe];
    for (uint32_t e = 0; e < container->config.experts; e++) {
        for (uint32_t i = 0, s = file->slices.first; i < file->slices.count; i++, s++)
            extents->parts[extents->part_count++] =
                (struct part){.offset = file->offsets[e] + i * container->slice_bytes,
                              .bytes = container->slice_bytes,
                              .expected = layer->checksums[e * EXPERT_SLICES + s],
                              .index = e * EXPERT_SLICES + s};
    }
}

static void add_dense_parts(struct extents *extents, const struct dense_file *file)
{
    for (size_t t = 0; t < file->header.count; t++)
        extents->parts[extents->part_count++] = (struct part){.offset = file->header.tensors[t].offset,
                                                              .bytes = file->header.tensors[t].bytes,
                                                              .expected = file->checksums[t],
                                                              .index = (uint32_t)t};
}

/* Cuts the parts of the last file into extents. There are never more extents than parts. */
static void add_extents(struct extents *extents, uint32_t first)
{
    struct extent_file *file = &extents->files[extents->file_count - 1];
    file->parts = extents->part_count - first;
    file->first_extent = extents->count;
    qsort(extents->parts + first, file->parts, sizeof *extents->parts, compare_parts);
    for (uint32_t p = first; p < extents->part_count; p++) {
        const struct part *part = &extents->parts[p];
        struct extent *extent = p > first ? &extents->list[extents->count - 1] : NULL;
        if (!extent || extent->bytes + part->bytes > EXTENT_BYTES) {
            extent = &extents->list[extents->count++];
            *extent = (struct extent){
                .file = extents->file_count - 1, .first = p, .offset = part->offset / DISK_ALIGN * DISK_ALIGN};
        }
        extent->parts++;
        extent->bytes += part->bytes;
        extent->end = (part->offset + part->bytes + DISK_ALIGN - 1) / DISK_ALIGN * DISK_ALIGN;
        extents->bytes += part->bytes;
    }
    file->extents = extents->count - file->first_extent;
}

int extents_make(const struct container *container, struct extents *ret_extents, struct error *ret_error)
{
    struct extents extents = {.container = container};
    size_t parts = container->expert_count * container->config.experts * (size_t)EXPERT_SLICES;
    size_t files = container->dense_count + container->expert_count * container->stripes;
    for (size_t f = 0; f < container->dense_count; f++)
        parts += container->dense[f].header.count;
    if (parts > UINT32_MAX)
        return error_set(ret_error, EFBIG, "%s: has more than 2^32 tensors and slices", container->path);
    extents.files = calloc(files + 1, sizeof *extents.files);
    extents.parts = calloc(parts + 1, sizeof *extents.parts);
    extents.list = calloc(parts + 1, sizeof *extents.list);
    if (!extents.files || !extents.parts || !extents.list) {
        extents_free(&extents);
        return error_set(ret_error, ENOMEM, "%s: no memory for the list of its checksums", container->path);
    }
    for (size_t f = 0; f < files; f++) {
        bool dense = f < container->dense_count;
        uint32_t stripe = dense ? 0 : (uint32_t)((f - container->dense_count) % container->stripes);
        const struct expert_layer *experts =
            dense ? NULL : &container->experts[(f - container->dense_count) / container->stripes];
        uint32_t first = extents.part_count;
        extents.files[extents.file_count++] = (struct extent_file){
            .header = dense ? &container->dense[f].header : &experts->stripes[stripe].header, .experts = experts};
        if (dense)
            add_dense_parts(&extents, &container->dense[f]);
        else
            add_expert_parts(&extents, experts, stripe);
        add_extents(&extents, first);
    }
    *ret_extents = extents;
    return 0;
}

void extents_free(struct extents *extents)
{
    free(extents->files);
    free(extents->parts);
    free(extents->list);
    *extents = (struct extents){0};
}

void extents_describe(const struct extent_file *file, const struct part *part, int code, char *ret_text, size_t size)
{
    if (file->experts)
        snprintf(ret_text, size, "%s: expert %u of layer %u, slice %u: %s: %s", file->header->path,
                 part->index / EXPERT_SLICES, file->experts->layer, part->index % EXPERT_SLICES, container_fault(code),
                 container_remedy(code));
    else
        snprintf(ret_text, size, "%s: tensor %s: %s: %s", file->header->path, file->header->tensors[part->index].name,
                 container_fault(code), container_remedy(code));
}

json_t *extents_describe_json(const struct extent_file *file, const struct part *part, int code)
{
    if (file->experts)
        return json_pack("{s:s, s:i, s:i, s:i, s:s}", "file", file->header->path, "layer", (int)file->experts->layer,
                         "expert", (int)(part->index / EXPERT_SLICES), "slice", (int)(part->index % EXPERT_SLICES),
                         "reason", container_fault(code));
    return json_pack("{s:s, s:s, s:s}", "file", file->header->path, "tensor", file->header->tensors[part->index].name,
                     "reason", container_fault(code));
}
