/* Unicode normalization form C (UAX #15), with the data of utf8proc. */
#pragma once

#include <stddef.h>

struct buffer;

/* Puts the NFC of `text` (valid UTF-8) behind what `out` holds. Linear in the length, also for long runs of combining
 * marks. 0 or -ENOMEM. Any thread. */
int normalizer_nfc(const char *text, size_t length, struct buffer *out);
