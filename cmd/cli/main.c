/* calypte: the command line. Each command is a function of its own file; this is their table. */
#include "cmd/cli/commands.h"
#include "cmd/cli/usage.h"
#include "proto/parse.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

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
    {"pool", "the pool of experts: its size, and what is hot", cmd_pool},
    {"run", "answer one prompt", cmd_run},
    {"score", "perplexity of a text", cmd_score},
    {"tokenize", "text -> ids", cmd_tokenize},
    {"detokenize", "ids -> text", cmd_detokenize},
    {"verify", "all checksums of a container against its drive", cmd_verify},
    {"bench", "figures of this machine beside its limits", cmd_bench},
    {"iobench", "what a drive gives for reading experts", cmd_iobench},
    {"trace", "which experts the steps of an instance use, into a file", cmd_trace},
    {"cachesim", "what other pools would have had of a trace", cmd_cachesim},
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
        return usage_error(NULL, "unknown command %s, did you mean %s?", name, near);
    return usage_error(NULL, "unknown command %s, see calypte --help", name);
}

/* Descriptors 0 to 2 that the caller has closed would become sockets and files of ours, and what is printed would go
 * there: they are taken, the outputs so that writing fails (EBADF). */
static void take_standard_descriptors(void)
{
    int fd = open("/dev/null", O_RDONLY);
    while (fd >= 0 && fd <= 2)
        fd = open("/dev/null", O_RDONLY);
    if (fd > 2)
        close(fd);
}

/* A full disk or a closed pipe shows here, when what was printed is really written. */
static int end_output(const char *command, int code)
{
    errno = 0;
    if ((fflush(stdout) || ferror(stdout)) && code == EXIT_DONE)
        return usage_failed(command, "cannot write to standard output%s%s", errno ? ": " : "",
                            errno ? strerror(errno) : "");
    return code;
}

int main(int argc, char **argv)
{
    take_standard_descriptors();
    if (argc < 2) {
        print_help(stderr);
        return EXIT_USAGE;
    }
    if (!strcmp(argv[1], "--help") || !strcmp(argv[1], "-h") || (!strcmp(argv[1], "help") && argc == 2))
        return end_output(NULL, print_help(stdout));
    if (!strcmp(argv[1], "--version")) {
        printf("calypte %s\n", CALYPTE_VERSION);
        return end_output(NULL, EXIT_DONE);
    }
    for (size_t i = 0; i < COMMANDS; i++)
        if (!strcmp(argv[1], commands[i].name))
            return end_output(argv[1], commands[i].run(argc - 1, argv + 1));
    return unknown(argv[1]);
}
