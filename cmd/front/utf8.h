/* UTF-8, one character at a time, as Unicode chapter 3 (table 3-7) defines it: no surrogates, no overlong forms.
 * utf8proc says only "invalid"; streaming needs to tell a wrong character from one that is not all there yet, and a
 * lossy decoder needs to know how many bytes one U+FFFD stands for. */
#pragma once

#include <stdbool.h>
#include <stddef.h>

enum utf8_status {
    UTF8_VALID,      /* *ret_length bytes are one character */
    UTF8_INVALID,    /* *ret_length bytes are what one U+FFFD replaces (the "maximal subpart", as Rust and WHATWG do) */
    UTF8_INCOMPLETE, /* all `length` bytes are the right beginning of a character whose rest is missing */
};

#define UTF8_REPLACEMENT "\xEF\xBF\xBD"

/* Looks at the first character of `bytes`; `length` > 0. Any thread. */
enum utf8_status utf8_step(const char *bytes, size_t length, size_t *ret_length);

/* True when all of `bytes` is UTF-8; else *ret_offset (may be NULL) is where it stops being that. Any thread. */
bool utf8_valid(const char *bytes, size_t length, size_t *ret_offset);

/* A name from outside as an error line may show it: at most 64 bytes of whole characters, control characters and what
 * is not UTF-8 as '?', "..." where it was cut. `text` may be NULL. Use as utf8_quoted(name).text within one expression.
 */
struct utf8_quoted {
    char text[68];
};

struct utf8_quoted utf8_quoted(const char *text);
