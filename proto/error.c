#include "proto/error.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* Texts from files and sockets may stand in the line: no control character of theirs reaches a log or a terminal. */
static void keep_one_line(char *text)
{
    for (; *text; text++) {
        if ((unsigned char)*text < 0x20 || *text == 0x7F)
            *text = '?';
    }
}

void error_write(struct error *ret_error, const char *format, ...)
{
    if (ret_error) {
        va_list args;
        va_start(args, format);
        vsnprintf(ret_error->text, sizeof ret_error->text, format, args);
        va_end(args);
        keep_one_line(ret_error->text);
    }
}

void error_write_prefix(struct error *ret_error, const char *format, ...)
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
        keep_one_line(ret_error->text);
    }
}

const char *error_remedy(int code)
{
    switch (code) {
    case EACCES:
    case EPERM: return "; let this user read it: see owner and mode (ls -l) of the file and of the folders above it";
    case EIO: return "; check the drive (dmesg)";
    default: return "";
    }
}
