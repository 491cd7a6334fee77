/* The patterns of tokenizer.json are written for Oniguruma (Ruby syntax), which Hugging Face tokenizers use. They run
 * on PCRE2 here, and the two disagree in places: this turns a pattern into one that means the same to PCRE2. */
#pragma once

#include <stddef.h>

#include "proto/error.h"

struct buffer;

/* Puts the PCRE2 form of `pattern` (UTF-8) into the empty buffer `out`; to be compiled with PCRE2_UTF | PCRE2_UCP |
 * PCRE2_MULTILINE and newline LF. Constructs whose meaning would differ, or that no known tokenizer uses, are refused
 * by name: -ENOTSUP. Also -ENOMEM. */
int split_pattern_translate(const char *pattern, size_t length, struct buffer *out, struct error *ret_error);
