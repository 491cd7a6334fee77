#include "cmd/bench/volume.h"

#include "cmd/convert/report.h"

#include <string.h>

/* A quantised matrix as it lies in the container: [n / 16, k / 64, bytes of a block]. */
static bool is_quantised(const struct tensor *tensor)
{
    return tensor->dims == 3 && (tensor->dtype == DTYPE_I8 || tensor->dtype == DTYPE_U8);
}

static bool is_used(const struct container *container, const char *name, bool selects)
{
    /* Index queries and their scales are only made when there are more keys than are kept. */
    return report_read_each_token(&container->config, name) && (selects || !strstr(name, ".indexer.wq_b."));
}

static double expert_bytes(const struct container *container)
{
    double bytes = 0;
    for (uint32_t s = 0; s < EXPERT_SLICES; s++) {
        struct slice_part parts[EXPERT_MATRICES];
        bytes += (double)expert_slice(&container->expert_shape, s, parts);
    }
    return bytes;
}

/* Latents of the keys that are attended to, and index keys of all positions; read once, whatever the rows. */
static double kv_bytes(const struct model_config *config, uint32_t rows, uint32_t end, uint32_t index_topk)
{
    double keys = rows > 1 || end <= index_topk ? end : index_topk, bytes = 0;
    for (uint32_t i = 0; i < config->layers; i++) {
        bytes += keys * (config->kv_lora + config->qk_rope) * sizeof(uint16_t);
        size_t key_bytes = config->index_dim + config->index_dim / BLOCK_COLUMNS * sizeof(float);
        if (config->indexer_kind[i] == INDEXER_FULL && end > index_topk)
            bytes += (double)end * (double)key_bytes;
    }
    return bytes;
}

struct bench_volume bench_volume_of(const struct container *container, uint32_t rows, uint32_t end, uint32_t index_topk)
{
    const struct model_config *config = &container->config;
    struct bench_volume volume = {.bytes = kv_bytes(config, rows, end, index_topk)};
    bool selects = end > index_topk;
    for (size_t f = 0; f < container->dense_count; f++)
        for (size_t i = 0; i < container->dense[f].header.count; i++) {
            const struct tensor *tensor = &container->dense[f].header.tensors[i];
            if (!is_used(container, tensor->name, selects))
                continue;
            volume.bytes += (double)tensor->bytes;
            if (is_quantised(tensor))
                volume.macs += (double)(tensor->shape[0] * BLOCK_ROWS * tensor->shape[1] * BLOCK_COLUMNS) *
                               (strncmp(tensor->name, "lm_head.", 8) == 0 ? 1 : rows);
        }
    double layers = model_moe_layers(config) - config->mtp_layers, read = (double)rows * config->top_k;
    if (rows > 1 && read > config->experts)
        read = config->experts;
    volume.bytes += layers * read * expert_bytes(container);
    volume.macs += layers * rows * config->top_k * EXPERT_MATRICES * (double)config->hidden * config->expert_width;
    return volume;
}
