#include "shm/kv.h"

#include "proto/weights.h"

#define KV_ALIGN 4096u /* of pages and of the header: a page never shares a memory page with another */

static size_t align_up(size_t value, size_t to)
{
    return (value + to - 1) / to * to;
}

void kv_layout(const struct facts *facts, struct kv_layout *ret_layout)
{
    const struct model_config *config = &facts->config;
    struct kv_layout layout = {
        .page_tokens = facts->page_tokens, .pages = facts->kv_pages, .latent_width = config->kv_lora + config->qk_rope};
    layout.latent_bytes = layout.latent_width * (facts->kv == KV_F32 ? sizeof(float) : sizeof(uint16_t));
    if (facts->activations == ACTIVATIONS_F32) {
        layout.key_bytes = config->index_dim * sizeof(float);
    } else {
        layout.key_bytes = config->index_dim;
        layout.key_scale_bytes = config->index_dim / BLOCK_COLUMNS * sizeof(float);
    }
    size_t offset = 0;
    for (uint32_t layer = 0; layer < config->layers + config->mtp_layers; layer++) {
        layout.latents[layer] = offset;
        offset = align_up(offset + layout.page_tokens * layout.latent_bytes, CACHE_LINE);
        if (config->indexer_kind[layer] != INDEXER_FULL)
            continue;
        layout.keys[layer] = offset;
        offset = align_up(offset + layout.page_tokens * layout.key_bytes, CACHE_LINE);
        layout.key_scales[layer] = offset;
        offset = align_up(offset + layout.page_tokens * layout.key_scale_bytes, CACHE_LINE);
    }
    layout.page_bytes = align_up(offset, KV_ALIGN);
    layout.header_bytes = align_up(sizeof(struct segment_header), KV_ALIGN);
    layout.segment_bytes = layout.header_bytes + (size_t)layout.pages * layout.page_bytes;
    *ret_layout = layout;
}
