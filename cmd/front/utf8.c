#include "cmd/front/utf8.h"

#include <string.h>

enum utf8_status utf8_step(const char *bytes, size_t length, size_t *ret_length)
{
    const unsigned char *p = (const unsigned char *)bytes;
    unsigned low = 0x80, high = 0xBF; /* what the next byte may be */
    size_t more;

    if (p[0] < 0x80) {
        more = 0;
    } else if (p[0] >= 0xC2 && p[0] <= 0xDF) {
        more = 1;
    } else if (p[0] >= 0xE0 && p[0] <= 0xEF) {
        more = 2;
        low = p[0] == 0xE0 ? 0xA0 : 0x80;  /* below: overlong */
        high = p[0] == 0xED ? 0x9F : 0xBF; /* above: surrogates */
    } else if (p[0] >= 0xF0 && p[0] <= 0xF4) {
        more = 3;
        low = p[0] == 0xF0 ? 0x90 : 0x80;
        high = p[0] == 0xF4 ? 0x8F : 0xBF; /* above: past U+10FFFF */
    } else {
        *ret_length = 1;
        return UTF8_INVALID;
    }
    for (size_t i = 1; i <= more; i++) {
        *ret_length = i;
        if (i == length)
            return UTF8_INCOMPLETE;
        if (p[i] < low || p[i] > high)
            return UTF8_INVALID;
        low = 0x80;
        high = 0xBF;
    }
    *ret_length = more + 1;
    return UTF8_VALID;
}

bool utf8_valid(const char *bytes, size_t length, size_t *ret_offset)
{
    size_t step;

    for (size_t at = 0; at < length; at += step) {
        if (utf8_step(bytes + at, length - at, &step) != UTF8_VALID) {
            if (ret_offset)
                *ret_offset = at;
            return false;
        }
    }
    return true;
}

struct utf8_quoted utf8_quoted(const char *text)
{
    struct utf8_quoted quoted = {"(none)"};
    size_t length = text ? strlen(text) : 0, used = 0, step;

    if (!text)
        return quoted;
    for (size_t at = 0; at < length; at += step) {
        bool plain = utf8_step(text + at, length - at, &step) == UTF8_VALID && (unsigned char)text[at] >= 0x20 &&
                     text[at] != 0x7F;
        size_t size = plain ? step : 1;
        if (used + size > 64) {
            memcpy(quoted.text + used, "...", 4);
            return quoted;
        }
        memcpy(quoted.text + used, plain ? text + at : "?", size);
        used += size;
    }
    quoted.text[used] = 0;
    return quoted;
}
