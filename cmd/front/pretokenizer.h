/* Cuts text into the words that BPE sees: the Split and ByteLevel pre-tokenizers of Hugging Face tokenizers. */
#pragma once

#include <stdbool.h>
#include <stddef.h>

#include "proto/error.h"

#define PRETOKENIZER_MAX_SPLITS 16

struct split {
    struct pcre2_real_code_8 *code;
    bool remove_matches, remove_gaps; /* Isolated: neither; Removed: matches, or with `invert` what is between them */
};

struct pretokenizer {
    struct split splits[PRETOKENIZER_MAX_SPLITS]; /* in order: each cuts the pieces of the one before */
    size_t split_count;
    size_t prefix_before; /* the split before which a piece gets a space in front, if it has none; SIZE_MAX: never */
};

/* Adds a split by a pattern in Oniguruma's syntax, or by a plain string when `literal`. -ENOTSUP and -EINVAL with the
 * reason, -ENOSPC above PRETOKENIZER_MAX_SPLITS, -ENOMEM. */
int pretokenizer_add_split(struct pretokenizer *pretokenizer, const char *pattern, size_t length, bool literal,
                           bool remove_matches, bool remove_gaps, struct error *ret_error);

/* The pattern of ByteLevel with `use_regex`, from GPT-2. */
#define PRETOKENIZER_GPT2_PATTERN "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"

void pretokenizer_free(struct pretokenizer *pretokenizer);

/* Called for each word, never an empty one; a negative return ends the run and is returned. */
typedef int pretokenizer_word_fn(void *context, const char *word, size_t length, struct error *ret_error);

/* Cuts `text` (valid UTF-8). Steps of matching are limited in proportion to the length: -E2BIG when a pattern needs
 * more. Any thread. */
int pretokenizer_run(const struct pretokenizer *pretokenizer, const char *text, size_t length,
                     pretokenizer_word_fn *word, void *context, struct error *ret_error);
