/* Every checksum of a container held against the bytes on the drive: read by the daemon's reader, hashed by threads. */
#pragma once

#include "cmd/verify/place.h"
#include "io_daemon/tool_reader.h"

struct verify_options {
    uint32_t io;     /* enum io_choice */
    uint32_t jobs;   /* hashing threads */
    uint64_t rate;   /* bytes a second, at most; 0: as many as come */
    int stop_fd;     /* readable: end; -1: never */
    bool keep_place; /* write it now and then */
    void *context;   /* of the functions below, which the caller's thread calls */
    /* five times a second: bytes of the parts that are done, earlier runs' too */
    void (*tick)(void *context, uint64_t bytes);
    /* a part that is not good (extents_describe) */
    void (*damage)(void *context, const struct extent_file *file, const struct part *part, int code);
    /* something that the user should know, without the end of the line */
    void (*note)(void *context, const char *line);
};

struct verify_result {
    uint64_t bytes;         /* verified by this run */
    uint32_t damaged_parts; /* found by this run */
    bool direct;            /* O_DIRECT was used for all files */
    const char *method;
};

/* Reads all extents of `place` that are not EXTENT_GOOD. 0: all are done. -EINTR: told to stop, the place is kept. Else
 * an error that has nothing to do with the container's bytes. Thread: any, one; signals blocked. */
int verify_run(struct place *place, const struct verify_options *options, struct verify_result *ret_result,
               struct error *ret_error);
