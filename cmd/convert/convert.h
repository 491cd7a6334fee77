/* A checkpoint becomes a container. */
#pragma once

#include "cmd/convert/plan.h"

#include <stdatomic.h>

/* What the caller sees of a running conversion. */
struct convert_watch {
    atomic_uint_least64_t bytes_done; /* of bytes_total; of this run only */
    atomic_uint_least64_t bytes_total;
    atomic_bool stop; /* set it, and the conversion ends soon with -EINTR; what is finished stays */
    /* Called some times a second from the thread that called convert_run. */
    void (*tick)(struct convert_watch *watch);
    /* A line for the user: a file kept, a file done again. */
    void (*note)(struct convert_watch *watch, const char *line);
};

enum convert_result {
    CONVERT_DONE,     /* all of it, or what a container lacked */
    CONVERT_WAS_DONE, /* the same conversion stands there already */
};

/* Writes the planned container to the folder paths[0], which may not exist, be empty, hold an unfinished run of
 * the same conversion (it is finished), or the container itself (of which the files are made anew that container_open
 * would refuse); the files of stripe s go to paths[s] [stripes of the plan], folders that are empty or those of the
 * unfinished run or the container. `threads` threads, each with one tensor's rows or one expert in memory. The bytes do
 * not depend on threads or on interruptions. Errors leave what was finished for the next run; without calypte.json it is
 * not a container. One caller at a time for a destination: a second one gets -EWOULDBLOCK. */
int convert_run(const struct plan *plan, const char *const *paths, unsigned threads, struct convert_watch *watch,
                enum convert_result *ret_result, struct error *ret_error);

/* The files beside the weights that are copied as they are, where the checkpoint has them. NULL at the end. */
extern const char *const convert_copied[];
