/* Bytes as a person reads them, one way for all that is printed: "640.0 KiB", "256.0 MiB", "12.3 GiB" and "11.5 TiB" (from 10
 * on). */
#pragma once

#include <stdint.h>
#include <stdio.h>

struct bytes_text {
    char text[32];
};

/* Lives as long as the expression it stands in: printf("%s\n", bytes_text(n).text). Any thread. */
static inline struct bytes_text bytes_text(uint64_t bytes)
{
    struct bytes_text result;
    const char *unit = bytes >= UINT64_C(10) << 40   ? "TiB"
                       : bytes >= UINT64_C(10) << 30 ? "GiB"
                       : bytes >= UINT64_C(1) << 20  ? "MiB"
                                                     : "KiB";
    double scale = unit[0] == 'T' ? 0x1p40 : unit[0] == 'G' ? 0x1p30 : unit[0] == 'M' ? 0x1p20 : 0x1p10;
    snprintf(result.text, sizeof result.text, "%.1f %s", (double)bytes / scale, unit);
    return result;
}
