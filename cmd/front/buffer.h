/* A byte buffer that grows: text that is being put together. */
#pragma once

#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

struct buffer {
    char *bytes; /* NULL while empty; not terminated by a zero */
    size_t length, capacity;
};

static inline void buffer_free(struct buffer *buffer)
{
    free(buffer->bytes);
    *buffer = (struct buffer){0};
}

/* Makes room for `more` bytes after `length`. 0, or -ENOMEM with the buffer unchanged. */
static inline int buffer_reserve(struct buffer *buffer, size_t more)
{
    if (more <= buffer->capacity - buffer->length)
        return 0;
    size_t needed;
    if (__builtin_add_overflow(buffer->length, more, &needed) || needed > SIZE_MAX / 2)
        return -ENOMEM;
    size_t capacity = needed + needed / 2 + 64;
    char *bytes = realloc(buffer->bytes, capacity);
    if (!bytes)
        return -ENOMEM;
    buffer->bytes = bytes;
    buffer->capacity = capacity;
    return 0;
}

static inline int buffer_append(struct buffer *buffer, const char *bytes, size_t length)
{
    int status = buffer_reserve(buffer, length);
    if (status == 0 && length > 0) {
        memcpy(buffer->bytes + buffer->length, bytes, length);
        buffer->length += length;
    }
    return status;
}
