/* Progress of a run that writes a container, for people: a bar on a terminal, else a line now and then; and the
 * signals that end it. */
#pragma once

#include "cmd/convert/convert.h"

/* Number of CPUs that this process may use: the default of --jobs. */
unsigned progress_usable_cpus(void);

/* Runs convert_run for the command `command` ("convert"), tells on stderr how it goes and how it ended, and returns
 * the exit code. With `json` the plan is printed on stdout when all is done. SIGINT and SIGTERM end it. Thread:
 * main, before it has started others. */
int progress_run(const char *command, const struct plan *plan, const char *destination, unsigned jobs, bool json);
