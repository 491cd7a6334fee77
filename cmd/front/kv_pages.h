/* Which pages of the KV segment are free. The front alone gives them out and takes them back; a page has one owner, a
 * running sequence or a kept session. One thread. */
#pragma once

#include "proto/error.h"

#include <stdint.h>

struct kv_pages {
    uint32_t *free; /* [count], the first free_count are free; the last of them goes out first */
    uint32_t count, free_count;
};

int kv_pages_init(struct kv_pages *pages, uint32_t count, struct error *ret_error);
void kv_pages_free(struct kv_pages *pages);

/* Takes `count` pages: 0, or -ENOSPC with nothing taken. */
int kv_pages_take(struct kv_pages *pages, uint32_t count, uint32_t *ret_ids);
void kv_pages_give(struct kv_pages *pages, const uint32_t *ids, uint32_t count);
