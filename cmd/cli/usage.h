/* What every command says to a wrong flag or value: one line that names it and the nearest right one. */
#pragma once

#include <stddef.h>

/* Prints "calypte COMMAND: unknown flag FLAG, did you mean ...?" on stderr and returns EXIT_USAGE. */
int usage_unknown_flag(const char *command, const char *flag, const char *const *flags, size_t count);

/* Prints "calypte COMMAND: ..." on stderr and returns EXIT_USAGE. */
__attribute__((format(printf, 2, 3))) int usage_error(const char *command, const char *format, ...);
