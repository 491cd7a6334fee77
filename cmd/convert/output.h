/* A file that appears whole or not at all: written under a temporary name, synced, renamed, the folder synced. */
#pragma once

#include "proto/error.h"

#include <stddef.h>
#include <stdint.h>

#define OUTPUT_SUFFIX ".part" /* of temporary names; never that of a finished file */

struct output {
    int folder_fd;
    const char *folder; /* for errors */
    char name[64];
    int fd; /* -1: not open */
};

/* Creates NAME.part with `bytes` bytes reserved (0: none), so that a full disk is noticed here. */
int output_create(int folder_fd, const char *folder, const char *name, uint64_t bytes, struct output *ret_output,
                  struct error *ret_error);
/* Writes at an offset and lets the disk begin with it. An output that is not open takes nothing.
 * Several threads may write different places. */
int output_write(const struct output *output, uint64_t offset, const void *bytes, size_t count,
                 struct error *ret_error);
/* Syncs and gives the file its name. Closes. */
int output_finish(struct output *output, struct error *ret_error);
/* Closes and removes what was written; nothing after output_finish. */
void output_discard(struct output *output);

/* Writes or copies a small file as a whole. A copy answers -ENOENT where the source is not there. */
int output_put(int folder_fd, const char *folder, const char *name, const void *bytes, size_t count,
               struct error *ret_error);
int output_copy(int folder_fd, const char *folder, const char *name, const char *source_folder,
                struct error *ret_error);
/* Makes FOLDER/NAME a symbolic link to the file of that name in the folder `target`, in place of what was there. */
int output_link(int folder_fd, const char *folder, const char *name, const char *target, struct error *ret_error);
/* Removes NAME.part of an earlier run, if there is one. */
void output_remove_leftover(int folder_fd, const char *name);
