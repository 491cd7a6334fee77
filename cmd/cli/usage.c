#include "cmd/cli/usage.h"

#include <stdarg.h>
#include <stdio.h>

#include "cmd/cli/commands.h"
#include "proto/parse.h"

int usage_unknown_flag(const char *command, const char *flag, const char *const *flags, size_t count)
{
    const char *nearest = nearest_name(flag, flags, count);

    if (nearest)
        return usage_error(command, "unknown flag %s, did you mean %s?", flag, nearest);
    return usage_error(command, "unknown flag %s, see calypte %s --help", flag, command);
}

int usage_error(const char *command, const char *format, ...)
{
    va_list args;

    fprintf(stderr, "calypte %s: ", command);
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fputc('\n', stderr);
    return EXIT_USAGE;
}
