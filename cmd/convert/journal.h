/* What an unfinished conversion has done so far: DST/convert.state (CONTAINER_JOURNAL), one JSON object a line. The
 * first line says which conversion it is and where its stripes stand, each further one is the manifest's entry of a
 * finished file. A line is synced after its file, so that every file with a whole line is whole. The file is removed
 * when calypte.json stands. */
#pragma once

#include "proto/error.h"

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

/* What makes a run the same as an earlier one. */
struct journal_run {
    uint64_t fingerprint;
    json_t *stripes; /* absolute paths of the folders beside DST, in order */
};

struct journal {
    int fd; /* -1: not open */
    const char *folder;
    bool begun;      /* it has its first line: the run's own files may stand in its folders */
    json_t *entries; /* file name -> entry, of an earlier run */
};

/* Opens the journal of an earlier run, if there is one, and creates none. -EEXIST: it belongs to another conversion, or
 * to one with stripes in other folders. */
int journal_open(int folder_fd, const char *folder, const struct journal_run *run, struct journal *ret_journal,
                 struct error *ret_error);
/* Begins one that is open and not begun; what cannot be begun leaves no file. */
int journal_begin(int folder_fd, const struct journal_run *run, struct journal *journal, struct error *ret_error);
/* Notes that a file stands under its name. */
int journal_add(struct journal *journal, const char *file, const json_t *entry, struct error *ret_error);
void journal_close(struct journal *journal);
