/* Reading what a person typed: numbers, sizes, shares, and the name that was meant. Any thread. */
#pragma once

#include <stddef.h>
#include <stdint.h>

/* A decimal number least .. most, nothing before or after it. 0, -EINVAL (not a number), -ERANGE. */
int parse_number(const char *text, uint64_t least, uint64_t most, uint64_t *ret_number);

/* A decimal number least .. most with sign, fraction and exponent ("-0.5", "1e-3"), in the C locale. 0, -EINVAL,
 * -ERANGE. */
int parse_real(const char *text, double least, double most, double *ret_number);

/* Bytes: a decimal number, with a fraction if it has a suffix. K, M, G, T, P and KiB to PiB are powers of 1024;
 * KB to PB of 1000; upper or lower case. "64G", "1.5GiB", "4096". 0, -EINVAL, -ERANGE (2^63 bytes or more). */
#define PARSE_SIZE_LIMIT "8192P (2^63 bytes)"
int parse_size(const char *text, uint64_t *ret_bytes);

/* A share like "80%" or "12.5%", more than 0 and at most 100. 0, -EINVAL, -ERANGE. */
int parse_percent(const char *text, double *ret_percent);

/* The name among `names` that is fewest letters away from `name`, or NULL when none is near: at most a third of its
 * letters or 2, and at most half. The beginning of a name is one letter away from it. */
const char *nearest_name(const char *name, const char *const *names, size_t count);
