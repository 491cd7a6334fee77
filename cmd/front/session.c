#include "cmd/front/session.h"

#include <stdlib.h>
#include <string.h>

void sessions_init(struct sessions *sessions, struct kv_pages *pages)
{
    *sessions = (struct sessions){.pages = pages};
}

static void forget(struct sessions *sessions, struct session *session)
{
    kv_pages_give(sessions->pages, session->pages, session->page_count);
    free(session->tokens);
    free(session->pages);
    *session = (struct session){0};
}

void sessions_free(struct sessions *sessions)
{
    for (uint32_t i = 0; i < SESSIONS_MAX; i++)
        forget(sessions, &sessions->table[i]);
}

static struct session *find(struct sessions *sessions, const char *name)
{
    for (uint32_t i = 0; i < SESSIONS_MAX; i++)
        if (strcmp(sessions->table[i].name, name) == 0)
            return &sessions->table[i];
    return NULL;
}

uint32_t sessions_take(struct sessions *sessions, const char *name, const int32_t *tokens, uint32_t count,
                       uint32_t room, uint32_t *ret_pages, uint32_t *ret_page_count)
{
    *ret_page_count = 0;
    struct session *session = name[0] ? find(sessions, name) : NULL;
    if (!session)
        return 0;
    uint32_t common = 0;
    while (common < session->length && common + 1 < count && session->tokens[common] == tokens[common])
        common++;
    if (common > 0) {
        uint32_t moved = session->page_count < room ? session->page_count : room;
        memcpy(ret_pages, session->pages, moved * sizeof *ret_pages);
        memmove(session->pages, session->pages + moved, (session->page_count - moved) * sizeof *session->pages);
        session->page_count -= moved;
        *ret_page_count = moved;
    }
    forget(sessions, session);
    return common;
}

/* The place for `name`: its own, an empty one, or that of the session which was used longest ago. */
static struct session *place(struct sessions *sessions, const char *name)
{
    struct session *session = find(sessions, name);
    if (!session)
        session = find(sessions, "");
    if (session)
        return session;
    session = &sessions->table[0];
    for (uint32_t i = 1; i < SESSIONS_MAX; i++)
        if (sessions->table[i].used < session->used)
            session = &sessions->table[i];
    return session;
}

void sessions_keep(struct sessions *sessions, const char *name, const int32_t *tokens, uint32_t length,
                   const uint32_t *pages, uint32_t page_count, uint32_t page_tokens)
{
    uint32_t needed = (length + page_tokens - 1) / page_tokens;
    if (needed > page_count) { /* cannot be: every position was computed into a page */
        needed = page_count;
        length = needed * page_tokens;
    }
    kv_pages_give(sessions->pages, pages + needed, page_count - needed);
    if (needed == 0)
        return;
    struct session *session = place(sessions, name);
    forget(sessions, session);
    int32_t *kept_tokens = malloc(length * sizeof *kept_tokens);
    uint32_t *kept_pages = malloc(needed * sizeof *kept_pages);
    if (!kept_tokens || !kept_pages) {
        free(kept_tokens);
        free(kept_pages);
        kv_pages_give(sessions->pages, pages, needed);
        return;
    }
    memcpy(kept_tokens, tokens, length * sizeof *kept_tokens);
    memcpy(kept_pages, pages, needed * sizeof *kept_pages);
    *session = (struct session){
        .tokens = kept_tokens, .length = length, .pages = kept_pages, .page_count = needed, .used = ++sessions->clock};
    strncpy(session->name, name, sizeof session->name - 1);
}

void sessions_evict(struct sessions *sessions, uint32_t needed)
{
    while (sessions->pages->free_count < needed) {
        struct session *oldest = NULL;
        for (uint32_t i = 0; i < SESSIONS_MAX; i++) {
            struct session *session = &sessions->table[i];
            if (session->name[0] && (!oldest || session->used < oldest->used))
                oldest = session;
        }
        if (!oldest)
            return;
        forget(sessions, oldest);
    }
}
