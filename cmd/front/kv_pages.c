#include "cmd/front/kv_pages.h"

#include <stdlib.h>

int kv_pages_init(struct kv_pages *pages, uint32_t count, struct error *ret_error)
{
    pages->free = malloc((size_t)count * sizeof *pages->free);
    if (!pages->free)
        return error_set(ret_error, ENOMEM, "no memory for a table of %u KV pages", count);
    pages->count = count;
    pages->free_count = count;
    for (uint32_t i = 0; i < count; i++)
        pages->free[i] = count - 1 - i;
    return 0;
}

void kv_pages_free(struct kv_pages *pages)
{
    free(pages->free);
    *pages = (struct kv_pages){0};
}

int kv_pages_take(struct kv_pages *pages, uint32_t count, uint32_t *ret_ids)
{
    if (count > pages->free_count)
        return -ENOSPC;
    for (uint32_t i = 0; i < count; i++)
        ret_ids[i] = pages->free[--pages->free_count];
    return 0;
}

void kv_pages_give(struct kv_pages *pages, const uint32_t *ids, uint32_t count)
{
    for (uint32_t i = count; i-- > 0;)
        pages->free[pages->free_count++] = ids[i];
}
