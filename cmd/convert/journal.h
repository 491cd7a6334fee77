/* What an unfinished conversion has done so far: DST/convert.state, one JSON object a line. The first line says which
 * conversion it is, each further one is the manifest's entry of a finished file. A line is synced after its file, so
 * that every file with a whole line is whole. The file is removed when calypte.json stands. */
#pragma once

#include "proto/error.h"

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

#define JOURNAL_NAME "convert.state"

struct journal {
    int fd; /* -1: not open */
    const char *folder;
    json_t *entries; /* file name -> entry, of an earlier run */
};

/* Opens or begins the journal of the conversion with this fingerprint. -EEXIST: it belongs to another conversion. */
int journal_open(int folder_fd, const char *folder, uint64_t fingerprint, struct journal *ret_journal,
                 struct error *ret_error);
/* Notes that a file stands under its name. */
int journal_add(struct journal *journal, const char *file, const json_t *entry, struct error *ret_error);
void journal_close(struct journal *journal);
