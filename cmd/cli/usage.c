#include "cmd/cli/usage.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cmd/cli/commands.h"
#include "proto/parse.h"

int usage_unknown_flag(const char *command, const char *flag, const char *const *flags, size_t count)
{
    const char *nearest = nearest_name(flag, flags, count);

    if (nearest)
        return usage_error(command, "unknown flag %s, did you mean %s?", flag, nearest);
    return usage_error(command, "unknown flag %s, see calypte %s --help", flag, command);
}

__attribute__((format(printf, 2, 0))) static void print_line(const char *command, const char *format, va_list args)
{
    char text[2048];
    vsnprintf(text, sizeof text, format, args);
    for (char *at = text; *at; at++) /* an argument may hold anything, and this stays one line */
        if ((unsigned char)*at < ' ' || *at == 0x7F)
            *at = '?';
    if (command)
        fprintf(stderr, "calypte %s: %s\n", command, text);
    else
        fprintf(stderr, "calypte: %s\n", text);
}

int usage_error(const char *command, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    print_line(command, format, args);
    va_end(args);
    return EXIT_USAGE;
}

int usage_failed(const char *command, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    print_line(command, format, args);
    va_end(args);
    return EXIT_FAILED;
}

static void print_help(const struct command_line *line)
{
    printf("calypte %s%s%s\n%s\n\nFlags:\n", line->command, *line->operands ? " " : "", line->operands, line->summary);
    for (const struct flag *flag = line->flags; flag->name; flag++) {
        char spelling[64];
        snprintf(spelling, sizeof spelling, "%s%s%s%s%s", flag->alias ? flag->alias : "", flag->alias ? ", " : "",
                 flag->name, flag->value ? " " : "", flag->value ? flag->value : "");
        printf("  %-26s %s\n", spelling, flag->help);
    }
    printf("  %-26s %s\n", "--help", "this text");
    if (line->settings) {
        printf(
            "\nSettings (flag over environment CALYPTE_<NAME> over file calypte.conf; `calypte config` lists them):\n");
        printf("  %-26s %s\n", "--config FILE", "a file of `name = value` lines");
        settings_print_help(stdout);
    }
    if (line->details)
        printf("\n%s\n", line->details);
}

/* True if argv[*index] is the flag called `name`; *ret_value is then what stands behind its "=" or NULL. */
static bool is_flag(const char *word, const char *name, const char **ret_value)
{
    size_t length = name ? strlen(name) : 0;
    if (!length || strncmp(word, name, length) || (word[length] && word[length] != '='))
        return false;
    *ret_value = word[length] ? word + length + 1 : NULL;
    return true;
}

static int unknown_flag(const struct command_line *line, const char *word)
{
    const char *names[ARGUMENTS_MAX_FLAGS + SETTING_COUNT + 3];
    char flag[64];
    size_t count = 0;
    names[count++] = "--help";
    for (const struct flag *known = line->flags; known->name; known++)
        names[count++] = known->name;
    if (line->settings) {
        names[count++] = "--config";
        names[count++] = "--set";
        for (int s = 0; s < SETTING_COUNT; s++)
            if (setting_info((enum setting)s)->flag)
                names[count++] = setting_info((enum setting)s)->flag;
    }
    snprintf(flag, sizeof flag, "%.*s", (int)strcspn(word, "="), word);
    return usage_unknown_flag(line->command, flag, names, count);
}

/* Takes a flag of the table. 1: taken; 0: it is none; EXIT_USAGE: said what is wrong. */
static int take_flag(const struct command_line *line, int argc, char **argv, int *index, struct arguments *arguments)
{
    for (size_t f = 0; line->flags[f].name; f++) {
        const struct flag *flag = &line->flags[f];
        const char *value;
        if (!is_flag(argv[*index], flag->name, &value) && !is_flag(argv[*index], flag->alias, &value))
            continue;
        if (!flag->value && value)
            return usage_error(line->command, "%s takes no value", flag->name);
        if (flag->value && !value) {
            if (*index + 1 >= argc)
                return usage_error(line->command, "%s needs a value: %s %s", flag->name, flag->name, flag->value);
            value = argv[++*index];
        }
        if (arguments->given_count == ARGUMENTS_MAX_GIVEN)
            return usage_error(line->command, "more than %u flags: give the rest in a second call",
                               ARGUMENTS_MAX_GIVEN);
        arguments->values[f] = value ? value : "";
        arguments->given[arguments->given_count].flag = f;
        arguments->given[arguments->given_count++].value = arguments->values[f];
        return 1;
    }
    return 0;
}

static int take_setting(const struct command_line *line, int argc, char **argv, int *index, struct arguments *arguments)
{
    struct error error;
    const char *value;
    if (!line->settings)
        return 0;
    if (is_flag(argv[*index], "--config", &value)) { /* read before all others */
        *index += value ? 0 : 1;
        return 1;
    }
    int taken = settings_take_flag(&arguments->settings, argc, argv, index, &error);
    return taken < 0 ? usage_error(line->command, "%s", error.text) : taken;
}

/* File and environment come first, whatever the order of the command line. */
static int load_settings(const struct command_line *line, int argc, char **argv, struct settings *settings)
{
    const char *config = NULL, *value;
    struct error error;
    for (int i = 1; i < argc && strcmp(argv[i], "--"); i++)
        if (is_flag(argv[i], "--config", &value)) {
            config = value ? value : i + 1 < argc ? argv[i + 1] : NULL;
            if (!config)
                return usage_error(line->command, "--config needs a value: --config FILE");
        }
    return settings_load(settings, config, &error) ? usage_error(line->command, "%s", error.text) : 0;
}

static int check_operands(const struct command_line *line, const struct arguments *arguments)
{
    if (arguments->operand_count > line->most_operands)
        return usage_error(line->command, "unexpected argument \"%s\": calypte %s %s",
                           arguments->operands[line->most_operands], line->command, line->operands);
    if (arguments->operand_count < line->least_operands)
        return usage_error(line->command, "an argument is missing: calypte %s %s", line->command, line->operands);
    return ARGUMENTS_GO_ON;
}

int arguments_parse(const struct command_line *line, int argc, char **argv, struct arguments *ret_arguments)
{
    bool flags_ended = false;
    *ret_arguments = (struct arguments){.line = line};
    for (int i = 1; i < argc && strcmp(argv[i], "--"); i++)
        if (!strcmp(argv[i], "--help") || !strcmp(argv[i], "-h")) {
            print_help(line);
            return EXIT_DONE;
        }
    int code = line->settings ? load_settings(line, argc, argv, &ret_arguments->settings) : 0;
    for (int i = 1; !code && i < argc; i++) {
        if (!flags_ended && !strcmp(argv[i], "--")) {
            flags_ended = true;
            continue;
        }
        if (flags_ended || argv[i][0] != '-' || !argv[i][1]) {
            if (ret_arguments->operand_count == ARGUMENTS_MAX_OPERANDS)
                return usage_error(line->command, "too many arguments");
            ret_arguments->operands[ret_arguments->operand_count++] = argv[i];
            continue;
        }
        const char *word = argv[i];
        int taken = take_flag(line, argc, argv, &i, ret_arguments);
        if (!taken)
            taken = take_setting(line, argc, argv, &i, ret_arguments);
        if (taken != 1)
            return taken ? taken : unknown_flag(line, word);
    }
    return code ? code : check_operands(line, ret_arguments);
}

int arguments_integer(const struct arguments *arguments, size_t flag, uint64_t least, uint64_t most,
                      uint64_t *ret_number)
{
    const char *text = arguments->values[flag];
    if (!text || !parse_number(text, least, most, ret_number))
        return 0;
    return usage_error(arguments->line->command, "%s cannot be \"%s\": a number from %" PRIu64 " to %" PRIu64,
                       arguments->line->flags[flag].name, text, least, most);
}

int arguments_real(const struct arguments *arguments, size_t flag, double least, double most, double *ret_number)
{
    const char *text = arguments->values[flag];
    if (!text || !parse_real(text, least, most, ret_number))
        return 0;
    return usage_error(arguments->line->command, "%s cannot be \"%s\": a number from %g to %g",
                       arguments->line->flags[flag].name, text, least, most);
}
