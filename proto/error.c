#include "proto/error.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

int error_set(struct error *ret_error, int code, const char *format, ...)
{
    if (ret_error) {
        va_list args;
        va_start(args, format);
        vsnprintf(ret_error->text, sizeof ret_error->text, format, args);
        va_end(args);
    }
    return -code;
}

int error_prefix(struct error *ret_error, int status, const char *format, ...)
{
    if (ret_error) {
        struct error inner = *ret_error;
        va_list args;
        va_start(args, format);
        int used = vsnprintf(ret_error->text, sizeof ret_error->text, format, args);
        va_end(args);
        /* The precision says what fits, so that the compiler need not warn of what is cut. */
        if (used >= 0 && (size_t)used + 2 < sizeof ret_error->text)
            snprintf(ret_error->text + used, sizeof ret_error->text - (size_t)used, ": %.*s",
                     (int)(sizeof ret_error->text - (size_t)used - 3), inner.text);
    }
    return status;
}
