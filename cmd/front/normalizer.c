#include "cmd/front/normalizer.h"

#include <errno.h>
#include <stdbool.h>
#include <stdint.h>

#include <utf8proc.h>

#include "cmd/front/buffer.h"
#include "proto/cleanup.h"

/* No canonical decomposition of one character is longer than this. */
#define MAX_DECOMPOSED 32

static unsigned combining_class(int32_t character)
{
    return (unsigned)utf8proc_get_property(character)->combining_class & 0xFF;
}

/* Canonical ordering of one run of characters whose class is not 0: a stable sort by class. utf8proc's own
 * decomposition sorts by exchanging neighbours, which takes hours for a megabyte of marks; so decomposition is asked
 * for one character at a time, and this counts. */
static void sort_run(int32_t *run, int32_t *spare, size_t length)
{
    size_t starts[257] = {0};

    for (size_t i = 0; i < length; i++)
        starts[combining_class(run[i]) + 1]++;
    for (size_t i = 1; i <= 256; i++)
        starts[i] += starts[i - 1];
    for (size_t i = 0; i < length; i++)
        spare[starts[combining_class(run[i])]++] = run[i];
    memcpy(run, spare, length * sizeof *run);
}

static void sort_marks(int32_t *characters, int32_t *spare, size_t count)
{
    size_t start = 0;
    bool sorted = true;

    for (size_t i = 0; i <= count; i++) {
        unsigned rank = i < count ? combining_class(characters[i]) : 0;
        if (rank == 0) {
            if (!sorted)
                sort_run(characters + start, spare, i - start);
            start = i + 1;
            sorted = true;
        } else if (i > start && rank < combining_class(characters[i - 1])) {
            sorted = false;
        }
    }
}

static int decompose(const char *text, size_t length, int32_t **ret_characters, size_t *ret_count)
{
    _cleanup_free_ int32_t *characters = NULL;
    size_t capacity = 0, count = 0;
    int boundary = 0;

    for (size_t at = 0; at < length;) {
        utf8proc_int32_t character;
        at +=
            (size_t)utf8proc_iterate((const utf8proc_uint8_t *)text + at, (utf8proc_ssize_t)(length - at), &character);
        if (capacity - count < MAX_DECOMPOSED) {
            capacity = capacity + capacity / 2 + length + MAX_DECOMPOSED;
            int32_t *grown = reallocarray(characters, capacity, sizeof *characters);
            if (!grown)
                return -ENOMEM;
            characters = grown;
        }
        utf8proc_ssize_t written = utf8proc_decompose_char(character, characters + count, MAX_DECOMPOSED,
                                                           UTF8PROC_STABLE | UTF8PROC_DECOMPOSE, &boundary);
        if (written < 0 || written > MAX_DECOMPOSED)
            return -EINVAL;
        count += (size_t)written;
    }
    *ret_characters = take_pointer(characters);
    *ret_count = count;
    return 0;
}

int normalizer_nfc(const char *text, size_t length, struct buffer *out)
{
    _cleanup_free_ int32_t *characters = NULL, *spare = NULL;
    size_t count;
    bool ascii = true;

    for (size_t i = 0; i < length && ascii; i++)
        ascii = (unsigned char)text[i] < 0x80;
    if (ascii)
        return buffer_append(out, text, length);

    int status = decompose(text, length, &characters, &count);
    if (status < 0)
        return status;
    spare = reallocarray(NULL, count + 1, sizeof *spare);
    if (!spare || buffer_reserve(out, 4 * count) < 0)
        return -ENOMEM;
    sort_marks(characters, spare, count);
    utf8proc_ssize_t composed =
        utf8proc_normalize_utf32(characters, (utf8proc_ssize_t)count, UTF8PROC_STABLE | UTF8PROC_COMPOSE);
    if (composed < 0)
        return -EINVAL;
    for (utf8proc_ssize_t i = 0; i < composed; i++)
        out->length += (size_t)utf8proc_encode_char(characters[i], (utf8proc_uint8_t *)out->bytes + out->length);
    return 0;
}
