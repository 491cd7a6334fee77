/* Progress of a run that writes a container, for people: a bar on a terminal, else a line now and then; and the
 * signals that end it. */
#pragma once

#include "cmd/convert/convert.h"

/* Number of CPUs that this process may use: the default of --jobs. */
unsigned progress_usable_cpus(void);

/* Runs convert_run for the command `command` ("convert"), tells on stderr how it goes and how it ended, and returns
 * the exit code. With `json` the plan is printed on stdout when all is done. SIGINT and SIGTERM end it. Thread:
 * main, before it has started others. */
int progress_run(const char *command, const struct plan *plan, const char *const *paths, unsigned jobs, bool json);

/* DST, and the folders of the flag that names the other stripes: ret_paths [8], *ret_stripes of them. 0, or EXIT_USAGE
 * after saying what is wrong. */
struct arguments;
int progress_paths(const struct arguments *arguments, const char *command, size_t flag, const char **ret_paths,
                   uint32_t *ret_stripes);
