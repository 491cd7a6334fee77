/* The copies of the container: the one that the instance was started with and, where the setting `mirror` names one, a
 * second of the same identity: files of the same names, with the same bytes at the same places, so what is begun in one
 * may go on in the other. A copy that does not open is not used, with one line; one whose reads fail is dropped, with one
 * line, while another is left. Which is first does not matter. Thread: main. */
#pragma once

#include "io_daemon/reader.h"
#include "proto/container.h"
#include "shm/control.h"

struct copy_file {
    int fd;
    uint8_t drive; /* which drive it stands on: an index of the reader's and the verifiers' */
};

struct copy {
    const char *path;
    struct container *container; /* NULL: not opened */
    struct copy_file *files;     /* [file_count], see copies_expert_file and copies_dense_file */
};

struct copies {
    struct copy copy[MAX_COPIES];
    uint32_t live; /* bit c: copy c is read */
    const struct container
        *container; /* of the first that opened; its paths are that copy's, all else is everybody's */
    size_t file_count;
    bool direct; /* every file is read with O_DIRECT */
    dev_t drives[READER_DRIVES];
    uint32_t drive_count;
    struct control *control;
    void (*log)(const char *line);
};

/* Opens the copies that the facts name; they must outlive `copies`. An error where none can be used: that of the first
 * copy. */
int copies_open(struct copies *copies, const struct facts *facts, struct control *control,
                void (*log)(const char *line), struct error *ret_error);
void copies_close(struct copies *copies);

/* Places in `files`. `layer` counts MoE layers. */
size_t copies_expert_file(const struct copies *copies, size_t layer, uint32_t stripe);
size_t copies_dense_file(const struct copies *copies, size_t file);

const char *copies_path(const struct copies *copies, uint32_t copy, size_t file);

/* Among the copies of the mask (not 0), the one from which `bytes` bytes more of that file would be there first. */
uint32_t copies_choose(const struct copies *copies, const struct reader *reader, uint32_t mask, size_t file,
                       uint64_t bytes, bool background);

/* True when that result of a read says that its copy is no good; lack of memory is ours, and no copy would help. */
bool copies_is_fault(int status);

/* No longer reads a copy, because a read of that file failed with `status`. Another must be live. */
void copies_drop(struct copies *copies, uint32_t copy, size_t file, int status);

/* Counts a read of that copy that has failed for good, or bytes there whose checksum differs. */
void copies_count_failure(const struct copies *copies, uint32_t copy);
void copies_count_wrong(const struct copies *copies, uint32_t copy);

/* All descriptors of the copies that are read; at most MAX_COPIES * file_count. Returns how many. */
uint32_t copies_descriptors(const struct copies *copies, int *ret_fds);

/* Makes what the reader has counted of each drive visible to all. */
void copies_publish(const struct copies *copies, const struct reader *reader);
