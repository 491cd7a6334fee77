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

/* Writes the line and returns -`code`; never 0 or more, even where `code` is not a positive errno (-EIO then), which both a reader and
 * the compiler may rely on. `ret_error` may be NULL. Any thread. */
#define error_set(ret_error, code, ...)                                                                                \
    __extension__({                                                                                                    \
        int code_ = (code); /* first: the line's arguments may disturb errno */                                        \
        error_write(ret_error, __VA_ARGS__);                                                                           \
        code_ > 0 ? -code_ : -EIO;                                                                                     \
    })

/* Puts "context: " in front of the line that is there already and gives `status` back, so that a caller can write
 * `return error_prefix(ret_error, status, "%s", path)`. */
#define error_prefix(ret_error, status, ...)                                                                           \
    __extension__({                                                                                                    \
        int status_ = (status);                                                                                        \
        error_write_prefix(ret_error, __VA_ARGS__);                                                                    \
        status_;                                                                                                       \
    })

/* What the user can do about a file that cannot be opened or read: "; REMEDY", to stand behind strerror(code), or "". Any
 * thread. */
const char *error_remedy(int code);

__attribute__((format(printf, 2, 3))) void error_write(struct error *ret_error, const char *format, ...);
__attribute__((format(printf, 2, 3))) void error_write_prefix(struct error *ret_error, const char *format, ...);
