/* One file of a container: written, or an earlier run's held against what it should be. */
#pragma once

#include "cmd/convert/convert.h"
#include "cmd/convert/jobs.h"
#include "cmd/convert/output.h"

#include <jansson.h>
#include <stdbool.h>

/* Where a stripe's files stand; the first is the container itself. */
struct write_folder {
    const char *path;
    int fd;
};

struct write_context {
    const struct plan *plan;
    const struct write_folder *folders; /* [stripes of the plan] */
    struct jobs jobs;
    struct convert_watch *watch;
};

/* Files that are written together: a dense file alone, an experts file with those of the layer's other stripes. */
uint32_t write_group(const struct plan *plan, const struct plan_file *file);

/* Converts and writes the group that begins with `file`; ret_entries[0 .. write_group()) are their entries in the
 * manifest. */
int write_files(const struct write_context *context, const struct plan_file *file, json_t **ret_entries,
                struct error *ret_error);
/* The same for a container that stands: of the group only the files s with wanted[s] are written, and they get their names
 * only if all entries are those of `manifest_files` (the manifest's "files"). -EEXIST: they are not. */
int write_files_again(const struct write_context *context, const struct plan_file *file, const bool *wanted,
                      const json_t *manifest_files, struct error *ret_error);

/* Reads all of a finished group. *ret_good: it is the planned one with the contents that `entries` say. An error is
 * only returned for what ends the conversion (interrupted, no memory). */
int verify_files(const struct write_context *context, const struct plan_file *file, json_t *const *entries,
                 bool *ret_good, struct error *ret_error);
