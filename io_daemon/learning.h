/* The file that remembers, from one session to the next, how much each expert is used (learning_record.h: what stands in
 * it). It never stands among the model's own files, and its loss costs only time: whatever is wrong with it is one line
 * in the log, never an error.
 *
 * Whoever holds the file's flock writes it: a second instance of the same model only reads. Records are appended by a
 * thread of its own, so that no miss waits for a disk that is busy. A file beyond its bound is written anew under a
 * temporary name and renamed, and so is one that was removed while it was in use. What can be read but not written is
 * read. After a crash it is cut back to its last whole record; one that is damaged otherwise, or
 * of another model, is set aside as PATH.damaged once what was readable of it stands in a new one. */
#pragma once

#include "proto/error.h"

#include <limits.h>
#include <stdbool.h>
#include <stdint.h>

struct learning;

struct learning_options {
    const char *path; /* learning_path()'s */
    uint64_t identity;
    uint32_t experts;
    bool read_only;
    _Atomic uint32_t *done, *refused; /* iod_line.learning and learning_refused, which follow what happens; or NULL */
    void (*log)(const char *line);    /* from the opener's thread and the writer's */
};

/* Where the file of a container stands: <identity>.usage in $XDG_STATE_HOME/calypte, or in ~/.local/state/calypte, or,
 * where neither is set to an absolute path, beside the instance's folder `rundir`. -ENAMETOOLONG. Reads the environment. */
int learning_path(const char *rundir, uint64_t identity, char ret_path[PATH_MAX], struct error *ret_error);

/* Reads the file, and makes ready to write it. Only -ENOMEM is an error. */
int learning_open(const struct learning_options *options, struct learning **ret_learning, struct error *ret_error);

/* Writes what was noted since the last record, and frees; NULL is allowed. */
void learning_close(struct learning *learning);

/* Uses of an expert, decayed, as the file had them at the start. Thread: the one that notes; before its first note. */
float learning_heat(const struct learning *learning, uint32_t expert);

/* The experts with any heat, at most `most`, the hottest first, into ret_experts[most]. Returns how many, or -ENOMEM.
 * As learning_heat. */
int learning_hottest(const struct learning *learning, uint32_t most, uint32_t *ret_experts);

/* One use of an expert. Constant time, never blocks, no system call but one to wake the writer now and then. Thread:
 * one. */
void learning_note(struct learning *learning, uint32_t expert);

/* Removes the file. 0 also when there was none; -EBUSY: a live instance of this model writes it. Any thread. */
int learning_forget(const char *path, struct error *ret_error);
