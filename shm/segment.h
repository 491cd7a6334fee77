/* POSIX shared memory objects `/calypte.<instance>.<part>`, mode 0600, made with O_EXCL.
 *
 * A segment starts with a struct segment_header and holds offsets and ids only, never pointers. Attaching checks magic,
 * layout version, kind and size; a segment of another version is refused in one sentence. Raw segments (pool objects)
 * have no header. */
#pragma once

#include "proto/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define SEGMENT_MAGIC UINT64_C(0x31455450594c4143) /* "CALYPTE1", little-endian */
#define SEGMENT_LAYOUT 4u
#define INSTANCE_NAME_MAX 64u /* letters, digits, '-', '_' */
#define CACHE_LINE 64
#define HUGE_PAGE (UINT64_C(2) << 20) /* bytes */

enum segment_kind {
    SEGMENT_CONTROL = 1,
    SEGMENT_POOL, /* slot table and map */
    SEGMENT_DENSE,
    SEGMENT_KV,
    SEGMENT_EXCHANGE,
    SEGMENT_RAW, /* a pool object: no header */
};

/* W: creator, before anybody attaches; R: all */
struct segment_header {
    uint64_t magic;
    uint32_t layout; /* SEGMENT_LAYOUT */
    uint32_t kind;   /* enum segment_kind */
    uint64_t bytes;
};

struct segment {
    void *base;
    size_t bytes;
};

/* Creates, sizes, maps and populates (MADV_POPULATE_WRITE by `populate_threads` threads; 1 for small ones) a
 * segment, so that a full /dev/shm or cgroup is an error here (ENOSPC/ENOMEM, naming the segment, the bytes wanted,
 * the bytes free and the remedy) and never a SIGBUS later. `node` >= 0 binds the memory to that NUMA node first.
 * `hugepages` collapses what it can into huge pages (every mapping of HUGE_PAGE or more begins with one). `sparse` gives memory to the first `head_bytes` alone and leaves the rest to
 * segment_populate; it must not be touched before. With a head the room for all of it is asked for all the same. An
 * existing object of the same name is -EEXIST. On failure nothing is left behind. Any thread. */
struct segment_options {
    enum segment_kind kind;
    int node; /* -1: no binding */
    bool hugepages, sparse;
    size_t head_bytes;         /* of a sparse one: 0 where it is raw, else from its header on */
    uint32_t populate_threads; /* 0: one for each core of the node that this process may use */
    bool background;           /* the populating threads are niced: others are at work */
};
int segment_create(const char *instance, const char *part, size_t bytes, const struct segment_options *options,
                   struct segment *ret_segment, struct error *ret_error);

/* Maps an existing segment after checking it. `bytes_expected` 0: whatever the header says (checked against the file's
 * size). */
int segment_attach(const char *instance, const char *part, enum segment_kind kind, size_t bytes_expected, bool writable,
                   struct segment *ret_segment, struct error *ret_error);

void segment_detach(struct segment *segment);

/* Gives memory to a stretch of a raw segment of `bytes_expected` bytes, as segment_create does to all of it (node,
 * hugepages, threads, background; the errors are the same). On failure the stretch has none. Offsets and sizes are
 * multiples of 4096. Any thread. */
int segment_populate(const char *instance, const char *part, size_t bytes_expected, size_t offset, size_t bytes,
                     const struct segment_options *options, struct error *ret_error);

/* The same for a segment that the caller has mapped, of any kind: its mapping then has the pages too. */
int segment_populate_mapped(const char *instance, const char *part, const struct segment *segment, size_t offset,
                            size_t bytes, const struct segment_options *options, struct error *ret_error);

/* Takes the memory of such a stretch back (FALLOC_FL_PUNCH_HOLE): who maps it reads zeros. Repeatable. Any thread. */
int segment_punch(const char *instance, const char *part, size_t offset, size_t bytes, struct error *ret_error);

/* Removes one name (a missing one is fine), or every `/calypte.<instance>.*`. Returns the number removed or negative
 * errno. */
int segment_unlink(const char *instance, const char *part);
int segment_unlink_all(const char *instance);

/* 0 if the name may be an instance's, -EINVAL with a line otherwise. */
int segment_check_instance(const char *instance, struct error *ret_error);
