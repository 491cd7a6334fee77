/* One file of a container: written, or an earlier run's held against what it should be. */
#pragma once

#include "cmd/convert/convert.h"
#include "cmd/convert/jobs.h"
#include "cmd/convert/output.h"

#include <jansson.h>

struct write_context {
    const struct plan *plan;
    int folder_fd;
    const char *folder;
    struct jobs jobs;
    struct convert_watch *watch;
};

/* Converts and writes a file; *ret_entry is its entry in the manifest. */
int write_file(const struct write_context *context, const struct plan_file *file, json_t **ret_entry,
               struct error *ret_error);

/* Reads all of a finished file. *ret_good: it is the planned file with the contents that `entry` says. An error is
 * only returned for what ends the conversion (interrupted, no memory). */
int verify_file(const struct write_context *context, const struct plan_file *file, const json_t *entry, bool *ret_good,
                struct error *ret_error);
