/* The commands of `calypte`. Each gets its own arguments, argv[0] being the command's name, prints its result on stdout
 * and what went wrong as one line on stderr, and returns the exit code of the program:
 *   0 done, 1 failed, 2 wrong usage (a flag or value, named with the nearest right one), 130 interrupted. */
#pragma once

enum {
    EXIT_DONE = 0,
    EXIT_FAILED = 1,
    EXIT_USAGE = 2,
    EXIT_INTERRUPTED = 130,
};

int cmd_bench(int argc, char **argv);
int cmd_cachesim(int argc, char **argv);
int cmd_config(int argc, char **argv);
int cmd_convert(int argc, char **argv);
int cmd_detokenize(int argc, char **argv);
int cmd_down(int argc, char **argv);
int cmd_info(int argc, char **argv);
int cmd_iobench(int argc, char **argv);
int cmd_pool(int argc, char **argv);
int cmd_run(int argc, char **argv);
int cmd_score(int argc, char **argv);
int cmd_status(int argc, char **argv);
int cmd_synth(int argc, char **argv);
int cmd_tokenize(int argc, char **argv);
int cmd_trace(int argc, char **argv);
int cmd_up(int argc, char **argv);
int cmd_verify(int argc, char **argv);
