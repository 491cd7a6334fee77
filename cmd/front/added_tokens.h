/* Added tokens: pieces of text that become one id before anything else looks at them ("<|user|>"). */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/error.h"

struct pcre2_real_code_8;

struct added_token {
    char *content; /* as in the file, ends in a zero */
    char *match;   /* what is looked for: the content, or its normalized form when `normalized` */
    size_t length; /* of `match` */
    int32_t id;
    bool single_word; /* only where no word character is beside it */
    bool lstrip;      /* takes the white space before it along */
    bool rstrip;      /* and behind it */
    bool normalized;  /* looked for in the normalized text, not in the raw one */
    bool special;
    bool blank; /* not special, and white space alone: ordinary text */
};

struct added_tokens {
    struct added_token *tokens; /* [count], by the first byte of `match`, then the longest first */
    size_t count;
    size_t first[257];              /* tokens that begin with byte b are first[b] .. first[b + 1] */
    struct pcre2_real_code_8 *word; /* a word character, for single_word; NULL when no token asks for it */
};

/* Sorts the tokens and builds the index; `tokens` and `count` are filled. 0, -EINVAL or -ENOMEM. */
int added_tokens_index(struct added_tokens *added, struct error *ret_error);
void added_tokens_free(struct added_tokens *added);

/* The token spelt `content`, or NULL. */
const struct added_token *added_tokens_find(const struct added_tokens *added, const char *content);

/* Called for each piece in order: `token` is NULL for a piece of text (never empty). Negative returns end the run. */
typedef int added_tokens_piece_fn(void *context, const struct added_token *token, const char *text, size_t length,
                                  struct error *ret_error);

/* Cuts `text` at the tokens with the given `normalized` flag: leftmost, then longest. `plain`: only blank ones. */
int added_tokens_split(const struct added_tokens *added, bool normalized, bool plain, const char *text, size_t length,
                       added_tokens_piece_fn *piece, void *context, struct error *ret_error);

/* Length of the character of white space (White_Space of Unicode) that `text` begins with, or 0. */
size_t white_space(const char *text, size_t length);
