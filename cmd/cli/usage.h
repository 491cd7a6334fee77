/* Command lines: flags and operands from a table, --help from the same table, and what every command says to a wrong
 * flag or value: one line that names it and the nearest right one. */
#pragma once

#include "proto/settings.h"

#include <stdbool.h>
#include <stddef.h>

/* Prints "calypte COMMAND: unknown flag FLAG, did you mean ...?" on stderr and returns EXIT_USAGE. */
int usage_unknown_flag(const char *command, const char *flag, const char *const *flags, size_t count);

/* Prints "calypte COMMAND: ..." on stderr, one line whatever the arguments hold, and returns EXIT_USAGE. `command` NULL:
 * "calypte: ...". */
__attribute__((format(printf, 2, 3))) int usage_error(const char *command, const char *format, ...);

/* The same, and returns EXIT_FAILED. */
__attribute__((format(printf, 2, 3))) int usage_failed(const char *command, const char *format, ...);

struct flag {
    const char *name;  /* "--json"; NULL ends a table */
    const char *alias; /* "-n", or NULL */
    const char *value; /* what its value is called in --help; NULL: it has none */
    const char *help;
};

struct command_line {
    const char *command, *operands, *summary; /* "run", "[MODEL] PROMPT", one line */
    const char *details;                      /* behind the flags in --help, or NULL */
    const struct flag *flags;
    bool settings; /* takes the settings' flags too, and --config */
    size_t least_operands, most_operands;
};

#define ARGUMENTS_MAX_FLAGS 24u
#define ARGUMENTS_MAX_OPERANDS 1024u
#define ARGUMENTS_MAX_GIVEN 16384u /* `pool --hold` for half of a large model's experts */

struct arguments {
    const struct command_line *line;
    const char *values[ARGUMENTS_MAX_FLAGS]; /* by flag: the last value, "" for one without; NULL: not given */
    struct {
        size_t flag;
        const char *value;
    } given[ARGUMENTS_MAX_GIVEN]; /* in the order of the command line */
    size_t given_count;
    const char *operands[ARGUMENTS_MAX_OPERANDS];
    size_t operand_count;
    struct settings settings; /* file, environment and flags, where the line takes settings */
};

#define ARGUMENTS_GO_ON (-1)

/* Parses a command's arguments: `--flag value`, `--flag=value`, `-` is an operand, `--` ends the flags. Returns
 * ARGUMENTS_GO_ON, or the exit code with which the command ends now (--help was printed; something was wrong and has
 * been said). */
int arguments_parse(const struct command_line *line, int argc, char **argv, struct arguments *ret_arguments);

/* Reads flag number `flag` as a number, if it was given: 0, or EXIT_USAGE after saying what is wrong. */
int arguments_integer(const struct arguments *arguments, size_t flag, uint64_t least, uint64_t most,
                      uint64_t *ret_number);
int arguments_real(const struct arguments *arguments, size_t flag, double least, double most, double *ret_number);

/* "" for one, "s" for any other number: the end of what is counted. */
static inline const char *plural(uint64_t count)
{
    return count == 1 ? "" : "s";
}
