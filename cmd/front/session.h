/* Sessions: what a conversation leaves behind, so that its next request need not compute the beginning again.
 *
 * A request that names a session takes what is kept under that name: the pages, and as many positions as its own tokens
 * have in common with the kept ones. When it has ended, its pages are kept under the name. Kept pages are given back,
 * least recently used first, when a request needs them. The bits are the same with and without: a position's keys
 * depend on the tokens up to it alone. One thread. */
#pragma once

#include "cmd/front/kv_pages.h"

#define SESSION_NAME_MAX 64u
#define SESSIONS_MAX 64u

struct session {
    char name[SESSION_NAME_MAX]; /* "": the place is empty */
    int32_t *tokens;             /* [length], tokens whose keys stand in the pages */
    uint32_t length;
    uint32_t *pages; /* [page_count] */
    uint32_t page_count;
    uint64_t used;
};

struct sessions {
    struct session table[SESSIONS_MAX];
    struct kv_pages *pages;
    uint64_t clock;
};

void sessions_init(struct sessions *sessions, struct kv_pages *pages);
void sessions_free(struct sessions *sessions);

/* Moves up to `room` kept pages of session `name` to ret_pages, as many as hold the beginning that its tokens share
 * with `tokens` (at most count - 1 positions: the last row is always computed, its logits are wanted). Returns the
 * number of positions; *ret_page_count pages now belong to the caller, the rest are free. The session is forgotten
 * until it is kept again. */
uint32_t sessions_take(struct sessions *sessions, const char *name, const int32_t *tokens, uint32_t count,
                       uint32_t room, uint32_t *ret_pages, uint32_t *ret_page_count);

/* Keeps `length` positions of `tokens` in `pages`, which are copied or, where they are not needed or memory is short,
 * given back. */
void sessions_keep(struct sessions *sessions, const char *name, const int32_t *tokens, uint32_t length,
                   const uint32_t *pages, uint32_t page_count, uint32_t page_tokens);

/* Gives back kept pages until `needed` are free or no session is left. */
void sessions_evict(struct sessions *sessions, uint32_t needed);
