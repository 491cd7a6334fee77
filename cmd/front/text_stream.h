/* The text of an answer as it may be shown while tokens come: never ending inside a character, never showing the start
 * of a stop string that may still become whole. All pieces together are the final text, however the tokens cut it. */
#pragma once

#include <stdbool.h>
#include <stddef.h>

#include "proto/error.h"

#define TEXT_STREAM_MAX_STOPS 16
#define TEXT_STREAM_MAX_STOP_LENGTH 4096

struct text_stream;

/* `stops`: up to TEXT_STREAM_MAX_STOPS strings in UTF-8, none empty; copied. Errors: -EINVAL, -ENOMEM. */
int text_stream_new(const char *const *stops, size_t stop_count, struct text_stream **ret_stream,
                    struct error *ret_error);
void text_stream_free(struct text_stream *stream);

static inline void text_stream_freep(struct text_stream **stream)
{
    text_stream_free(*stream);
}

/* Feeds the bytes of a token. *ret_text is the text that may be shown now (perhaps empty, valid until the next call,
 * not terminated). Returns 1 when a stop string is complete: what came before it has been given out, what follows is
 * ignored; 0 otherwise, -ENOMEM. The first stop string to be complete counts; of several that end together, the
 * longest. */
int text_stream_feed(struct text_stream *stream, const char *bytes, size_t length, const char **ret_text,
                     size_t *ret_length, struct error *ret_error);

/* The rest, at the end of an answer: what was held back, and one U+FFFD for a character that never became whole.
 * Returns as text_stream_feed. */
int text_stream_finish(struct text_stream *stream, const char **ret_text, size_t *ret_length, struct error *ret_error);
