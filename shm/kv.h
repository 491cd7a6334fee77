/* Segment `kv`: pages of `page_tokens` tokens. Tables and counts of pages are the front's alone; a STEP names the page ids of its
 * sequences, and position p of a sequence stands in its page p / page_tokens, row p % page_tokens.
 *
 * A page holds for every layer (the MTP layer last): latents [page_tokens][kv_lora + qk_rope] (f16, or f32 with kv=f32), normed c
 * first, then the rotated k_r; and for every layer with its own indexer: index keys [page_tokens][index_dim] int8 with their scales
 * [page_tokens][index_dim / 64] f32 (with activations=f32: the keys as f32, no scales). The layout is a function of the facts. */
#pragma once

#include "shm/control.h"

#define KV_PAGE_TOKENS 64u

struct kv_layout {
    uint32_t page_tokens, pages;
    uint32_t latent_width;             /* kv_lora + qk_rope */
    size_t latent_bytes;               /* of one token of one layer */
    size_t key_bytes, key_scale_bytes; /* of one token of one layer with an indexer; scale bytes 0 with f32 */
    size_t latents[MODEL_MAX_LAYERS];  /* byte offset of a layer's latents in a page */
    size_t keys[MODEL_MAX_LAYERS], key_scales[MODEL_MAX_LAYERS]; /* likewise; meaningless for shared layers */
    size_t page_bytes;                                           /* a multiple of 4096 */
    size_t header_bytes, segment_bytes;
};

void kv_layout(const struct facts *facts, struct kv_layout *ret_layout);

/* The segment starts with a segment_header, pages follow at header_bytes. */
static inline unsigned char *kv_page(const struct segment *kv, const struct kv_layout *layout, uint32_t page)
{
    return (unsigned char *)kv->base + layout->header_bytes + (size_t)page * layout->page_bytes;
}
