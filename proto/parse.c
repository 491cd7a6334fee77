#include "proto/parse.h"

#include <ctype.h>
#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#define NAME_MAX_NEAR 40u

int parse_number(const char *text, uint64_t least, uint64_t most, uint64_t *ret_number)
{
    if (!isdigit((unsigned char)text[0]))
        return -EINVAL;
    char *end;
    errno = 0;
    unsigned long long number = strtoull(text, &end, 10);
    if (*end != 0)
        return -EINVAL;
    if (errno != 0 || number < least || number > most)
        return -ERANGE;
    *ret_number = number;
    return 0;
}

/* Digits with at most one point among them: *ret_number, and where they end. Locale, hexadecimal, exponents, inf and
 * nan stay out. */
static int parse_decimal(const char *text, long double *ret_number, bool *ret_fraction, const char **ret_end)
{
    long double number = 0, scale = 1;
    bool point = false, digits = false;
    const char *at = text;
    for (; isdigit((unsigned char)*at) || (*at == '.' && !point); at++) {
        if (*at == '.') {
            point = true;
            continue;
        }
        digits = true;
        number = number * 10 + (*at - '0');
        if (point)
            scale *= 10;
    }
    if (!digits || at - text > 30)
        return -EINVAL;
    *ret_number = number / scale;
    *ret_fraction = point;
    *ret_end = at;
    return 0;
}

int parse_size(const char *text, uint64_t *ret_bytes)
{
    static const struct {
        const char *suffix;
        uint64_t factor;
    } units[] = {
        {"", 1},
        {"B", 1},
        {"K", UINT64_C(1) << 10},
        {"KiB", UINT64_C(1) << 10},
        {"M", UINT64_C(1) << 20},
        {"MiB", UINT64_C(1) << 20},
        {"G", UINT64_C(1) << 30},
        {"GiB", UINT64_C(1) << 30},
        {"T", UINT64_C(1) << 40},
        {"TiB", UINT64_C(1) << 40},
        {"P", UINT64_C(1) << 50},
        {"PiB", UINT64_C(1) << 50},
        {"KB", 1000},
        {"MB", 1000000},
        {"GB", 1000000000},
        {"TB", UINT64_C(1000000000000)},
        {"PB", UINT64_C(1000000000000000)},
    };
    long double number;
    bool fraction;
    const char *end;
    int status = parse_decimal(text, &number, &fraction, &end);
    if (status < 0)
        return status;
    for (size_t i = 0; i < sizeof units / sizeof units[0]; i++) {
        if (strcasecmp(end, units[i].suffix) != 0)
            continue;
        if (fraction && units[i].factor == 1)
            return -EINVAL;
        long double bytes = number * (long double)units[i].factor;
        if (bytes >= 0x1p63L)
            return -ERANGE;
        *ret_bytes = (uint64_t)bytes;
        return 0;
    }
    return -EINVAL;
}

int parse_real(const char *text, double least, double most, double *ret_number)
{
    size_t length = strlen(text);
    if (length == 0 || text[0] == '+' || strspn(text, "+-.0123456789eE") != length)
        return -EINVAL; /* strtod would take white space, hexadecimal, inf and nan */
    char *end;
    double number = strtod(text, &end);
    if (end != text + length)
        return -EINVAL;
    if (!(number >= least && number <= most))
        return -ERANGE;
    *ret_number = number;
    return 0;
}

int parse_percent(const char *text, double *ret_percent)
{
    long double number;
    bool fraction;
    const char *end;
    int status = parse_decimal(text, &number, &fraction, &end);
    if (status < 0)
        return status;
    if (strcmp(end, "%") != 0)
        return -EINVAL;
    if (number <= 0 || number > 100)
        return -ERANGE;
    *ret_percent = (double)number;
    return 0;
}

/* Letters to change, add or remove to come from `a` to `b` (Levenshtein), case and '-' / '_' not counted. */
static size_t distance(const char *a, const char *b)
{
    size_t row[NAME_MAX_NEAR + 1], columns = strlen(b);
    for (size_t j = 0; j <= columns; j++)
        row[j] = j;
    for (size_t i = 1; a[i - 1] != 0; i++) {
        size_t diagonal = row[0];
        row[0] = i;
        for (size_t j = 1; j <= columns; j++) {
            int x = a[i - 1] == '-' ? '_' : tolower((unsigned char)a[i - 1]);
            int y = b[j - 1] == '-' ? '_' : tolower((unsigned char)b[j - 1]);
            size_t best = diagonal + (x != y);
            if (row[j] + 1 < best)
                best = row[j] + 1;
            if (row[j - 1] + 1 < best)
                best = row[j - 1] + 1;
            diagonal = row[j];
            row[j] = best;
        }
    }
    return row[columns];
}

const char *nearest_name(const char *name, const char *const *names, size_t count)
{
    size_t length = strlen(name);
    if (length > NAME_MAX_NEAR)
        return NULL;
    size_t best = length / 3 > 2 ? length / 3 : 2;
    if (best > length / 2) /* more than half of a short name would be another name */
        best = length / 2;
    const char *found = NULL;
    for (size_t i = 0; i < count; i++) {
        if (strlen(names[i]) > NAME_MAX_NEAR)
            continue;
        bool beginning = length > 1 && strncasecmp(name, names[i], length) == 0;
        size_t far = beginning ? 1 : distance(name, names[i]);
        if (far < best || (far == best && !found)) {
            best = far;
            found = names[i];
        }
    }
    return found;
}
