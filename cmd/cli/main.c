/* calypte: the command line. Each command is a function of its own file; this is their table. */
#include "cmd/cli/commands.h"
#include "proto/parse.h"

#include <stdio.h>
#include <string.h>

struct command {
    const char *name, *summary;
    int (*run)(int argc, char **argv);
};

static const struct command commands[] = {
    {"convert", "Hugging Face folder -> Calypte container", cmd_convert},
    {"synth", "a container of random weights with a real model's shapes", cmd_synth},
    {"info", "what a container holds", cmd_info},
    {"up", "start an instance", cmd_up},
    {"down", "stop an instance", cmd_down},
    {"status", "processes, pool, disk and speed of an instance", cmd_status},
    {"run", "answer one prompt", cmd_run},
    {"score", "perplexity of a text", cmd_score},
    {"tokenize", "text -> ids", cmd_tokenize},
    {"detokenize", "ids -> text", cmd_detokenize},
    {"bench", "figures of this machine beside its limits", cmd_bench},
    {"config", "all settings with value and origin", cmd_config},
};

#define COMMANDS (sizeof commands / sizeof *commands)

static int print_help(FILE *file)
{
    fprintf(file, "calypte: runs mixture-of-experts models that do not fit in memory\n\n"
                  "usage: calypte COMMAND [ARGUMENTS]\n\nCommands:\n");
    for (size_t i = 0; i < COMMANDS; i++)
        fprintf(file, "  %-12s %s\n", commands[i].name, commands[i].summary);
    fprintf(file,
            "\n`calypte COMMAND --help` says more. Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted.\n");
    return EXIT_DONE;
}

static int unknown(const char *name)
{
    const char *names[COMMANDS];
    for (size_t i = 0; i < COMMANDS; i++)
        names[i] = commands[i].name;
    const char *near = nearest_name(name, names, COMMANDS);
    if (near)
        fprintf(stderr, "calypte: unknown command %s, did you mean %s?\n", name, near);
    else
        fprintf(stderr, "calypte: unknown command %s, see calypte --help\n", name);
    return EXIT_USAGE;
}

int main(int argc, char **argv)
{
    if (argc < 2) {
        print_help(stderr);
        return EXIT_USAGE;
    }
    if (!strcmp(argv[1], "--help") || !strcmp(argv[1], "-h") || (!strcmp(argv[1], "help") && argc == 2))
        return print_help(stdout);
    if (!strcmp(argv[1], "--version")) {
        printf("calypte %s\n", CALYPTE_VERSION);
        return EXIT_DONE;
    }
    for (size_t i = 0; i < COMMANDS; i++)
        if (!strcmp(argv[1], commands[i].name)) {
            int code = commands[i].run(argc - 1, argv + 1);
            /* A full disk or a closed pipe shows here, when what was printed is really written. */
            if (fflush(stdout) && code == EXIT_DONE) {
                fprintf(stderr, "calypte %s: cannot write to standard output\n", argv[1]);
                return EXIT_FAILED;
            }
            return code;
        }
    return unknown(argv[1]);
}
