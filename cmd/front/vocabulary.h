/* Tokens by id and by bytes. A byte-level vocabulary spells each byte as one printable character (space is U+0120);
 * here tokens are kept as the bytes they stand for. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Ids above this are refused: a hostile file must not make us allocate by its largest number. */
#define VOCABULARY_MAX_ID ((1 << 22) - 1)

enum token_flags {
    TOKEN_PRESENT = 1 << 0,
    TOKEN_ADDED = 1 << 1,   /* listed in added_tokens */
    TOKEN_SPECIAL = 1 << 2, /* ... and marked special there */
    TOKEN_BLANK = 1 << 3,   /* ... and nothing but white space, not special: ordinary text */
};

struct token {
    uint32_t offset, length; /* in `arena` */
    uint32_t flags;
};

struct vocabulary {
    struct token *tokens; /* [size], by id */
    size_t size;          /* highest id + 1 */
    char *arena;
    size_t arena_length, arena_capacity;
    uint32_t *slots; /* [slot_mask + 1] open addressing over XXH3 of the bytes: id + 1, 0 is empty */
    size_t slot_mask;
    int32_t byte_ids[256]; /* the token of a single byte, -1 where there is none */
};

/* Room for ids below `size` and `arena_capacity` bytes of tokens. 0 or -ENOMEM. */
int vocabulary_init(struct vocabulary *vocabulary, size_t size, size_t arena_capacity);
void vocabulary_free(struct vocabulary *vocabulary);

/* Gives `id` (below size, without a token so far) the token spelt `content` in the file. In `reachable` tokens, those
 * of the BPE model, content that is all byte-level characters can also be found by its bytes. 0, -EEXIST for an id that
 * has a token, -ENOSPC when the arena is full. */
int vocabulary_add(struct vocabulary *vocabulary, int32_t id, const char *content, size_t length, bool reachable);

/* The id of the token with these bytes, or -1. */
int32_t vocabulary_find(const struct vocabulary *vocabulary, const char *bytes, size_t length);

/* Turns byte-level characters into bytes (`out` holds at least `length`). Returns the number of bytes, or -1 when a
 * character is not one of the 256. */
ptrdiff_t byte_level_decode(const char *text, size_t length, char *out);
