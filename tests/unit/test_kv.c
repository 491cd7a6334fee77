/* The layout of KV pages: every array inside its page, none over another, sizes as the formats say. */
#include "shm/kv.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

/* GLM-5.2's numbers: 78 layers and the MTP layer, 21 + 1 with an indexer of their own. */
static struct facts glm(void)
{
    struct facts facts = {.activations = ACTIVATIONS_INT8, .kv = KV_F16, .kv_pages = 10, .page_tokens = KV_PAGE_TOKENS};
    struct model_config *c = &facts.config;
    c->layers = 78;
    c->mtp_layers = 1;
    c->kv_lora = 512;
    c->qk_rope = 64;
    c->index_dim = 128;
    for (uint32_t i = 0; i < 79; i++)
        c->indexer_kind[i] = i < 3 || i == 78 || (i > 2 && (i - 2) % 4 == 0) ? INDEXER_FULL : INDEXER_SHARED;
    return facts;
}

static void mark(unsigned char *page, size_t page_bytes, size_t offset, size_t bytes)
{
    assert_true(offset % 64 == 0 && offset + bytes <= page_bytes);
    for (size_t i = 0; i < bytes; i++) {
        assert_int_equal(page[offset + i], 0);
        page[offset + i] = 1;
    }
}

static void check(const struct facts *facts)
{
    struct kv_layout layout;
    kv_layout(facts, &layout);
    assert_int_equal(layout.page_bytes % 4096, 0);
    assert_int_equal(layout.segment_bytes, layout.header_bytes + facts->kv_pages * layout.page_bytes);
    assert_true(layout.header_bytes >= sizeof(struct segment_header));
    unsigned char *page = calloc(1, layout.page_bytes);
    assert_non_null(page);
    size_t used = 0;
    for (uint32_t i = 0; i < facts->config.layers + facts->config.mtp_layers; i++) {
        mark(page, layout.page_bytes, layout.latents[i], layout.latent_bytes * layout.page_tokens);
        used += layout.latent_bytes * layout.page_tokens;
        if (facts->config.indexer_kind[i] != INDEXER_FULL)
            continue;
        mark(page, layout.page_bytes, layout.keys[i], layout.key_bytes * layout.page_tokens);
        mark(page, layout.page_bytes, layout.key_scales[i], layout.key_scale_bytes * layout.page_tokens);
        used += (layout.key_bytes + layout.key_scale_bytes) * layout.page_tokens;
    }
    assert_true(layout.page_bytes - used < 8192); /* no space lost but for alignment */
    free(page);
}

static void test_layout(void **state)
{
    (void)state;
    struct facts facts = glm();
    struct kv_layout layout;
    kv_layout(&facts, &layout);
    assert_int_equal(layout.latent_width, 576);
    assert_int_equal(layout.latent_bytes, 1152);
    assert_int_equal(layout.key_bytes, 128);
    assert_int_equal(layout.key_scale_bytes, 8);
    check(&facts);
    facts.kv = KV_F32;
    facts.activations = ACTIVATIONS_F32;
    kv_layout(&facts, &layout);
    assert_int_equal(layout.latent_bytes, 2304);
    assert_int_equal(layout.key_bytes, 512);
    assert_int_equal(layout.key_scale_bytes, 0);
    check(&facts);
    facts.page_tokens = 1; /* odd sizes too */
    facts.config.qk_rope = 16;
    check(&facts);
}

static void test_pages(void **state)
{
    (void)state;
    struct facts facts = glm();
    struct kv_layout layout;
    kv_layout(&facts, &layout);
    char base[1];
    const struct segment segment = {.base = base, .bytes = layout.segment_bytes};
    size_t last = (size_t)((char *)kv_page(&segment, &layout, facts.kv_pages - 1) - base);
    assert_int_equal(last + layout.page_bytes, layout.segment_bytes);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_layout), cmocka_unit_test(test_pages)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
