/* calypte bench: its parts by their names. */
#include "cmd/bench/bench.h"
#include "cmd/cli/commands.h"
#include "cmd/cli/usage.h"
#include "proto/parse.h"

#include <stdio.h>
#include <string.h>

static const struct part {
    const char *name, *summary;
    int (*run)(int argc, char **argv);
} parts[] = {
    {"memory", "read bandwidth of this machine", bench_memory},
    {"kernels", "each kernel against the limit of this machine", bench_kernels},
    {"decode", "tokens a second of an answer, against the bandwidth", bench_decode},
    {"prefill", "tokens a second of a prompt, against the dot instruction", bench_prefill},
};

#define PARTS (sizeof parts / sizeof parts[0])

static void print_help(FILE *file)
{
    fprintf(file, "calypte bench PART [ARGUMENTS]\nFigures of this machine, with the physical limit measured beside "
                  "them.\n\nParts:\n");
    for (size_t i = 0; i < PARTS; i++)
        fprintf(file, "  %-12s %s\n", parts[i].name, parts[i].summary);
    fprintf(file, "\n`calypte bench PART --help` says more.\n");
}

int cmd_bench(int argc, char **argv)
{
    const char *names[PARTS];
    for (size_t i = 0; i < PARTS; i++)
        names[i] = parts[i].name;
    if (argc < 2) {
        print_help(stderr);
        return EXIT_USAGE;
    }
    if (!strcmp(argv[1], "--help") || !strcmp(argv[1], "-h")) {
        print_help(stdout);
        return EXIT_DONE;
    }
    for (size_t i = 0; i < PARTS; i++)
        if (!strcmp(argv[1], parts[i].name))
            return parts[i].run(argc - 1, argv + 1);
    const char *near = nearest_name(argv[1], names, PARTS);
    if (near)
        return usage_error("bench", "unknown part %s, did you mean %s?", argv[1], near);
    return usage_error("bench", "unknown part %s, see calypte bench --help", argv[1]);
}
