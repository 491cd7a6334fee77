/* An error is a negative errno as the return value and one line for the user in `struct error`.
 *
 * Libraries never print and never exit: they fill the line and return. The line names the thing (file, tensor, request,
 * setting) and says what to do about it; a main prints it once, after its own name.
 */
#pragma once

#include <errno.h>

struct error {
    char text[1024];
};

/* Writes the line and returns -`code` (code is a positive errno). `ret_error` may be NULL. Any thread. */
__attribute__((format(printf, 3, 4))) int error_set(struct error *ret_error, int code, const char *format, ...);

/* Puts "context: " in front of the line that is there already and returns `status` unchanged, so that a caller can write
 * `return error_prefix(ret_error, status, "%s", path)`. */
__attribute__((format(printf, 3, 4))) int error_prefix(struct error *ret_error, int status, const char *format, ...);
