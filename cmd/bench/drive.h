/* What a drive gives for the daemon's access pattern: experts in random order, each in pieces, a bounded number of bytes
 * in flight, read by the daemon's own reader and methods. Thread: one for all functions. */
#pragma once

#include "proto/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define DRIVE_BLOB_BYTES 20054016u              /* an expert of GLM-5.2 in int4 */
#define DRIVE_SCRATCH_BYTES (UINT64_C(8) << 30) /* more than a drive's own cache */
#define DRIVE_BLOCK_LEAST 4096u
#define DRIVE_BLOCK_MOST (UINT64_C(64) << 20)
#define DRIVE_DEPTH_MOST (UINT64_C(1) << 30)

struct drive_bench_options {
    const char *path;       /* a container: its experts are read; another folder: a file made there, without a name */
    uint64_t scratch_bytes; /* of that file */
    uint32_t io;            /* enum io_choice */
    bool buffered;          /* through the page cache */
    int interrupt_fd;       /* cmd/cli/interrupt.h: a signal ends drive_bench_measure; -1: its default effect */
    bool hugepages;         /* the setting of that name: whether the pool asks for huge pages */
};

struct drive_bench;

/* What was opened. */
struct drive_bench_facts {
    bool container, direct; /* direct: O_DIRECT is used */
    const char *method;     /* "uring", "pread": what can be used */
    uint64_t bytes;         /* of all blobs */
    uint64_t blob_bytes;
};

/* Where the bytes go. The size of its pages may matter more than anything else: a request to the drive has a limited
 * number of stretches of memory. */
enum drive_memory {
    DRIVE_MEMORY_HUGE,  /* huge pages of the process, where the kernel gives them */
    DRIVE_MEMORY_SMALL, /* pages of 4 KiB */
    DRIVE_MEMORY_POOL,  /* shared memory, made and registered as the pool of experts is */
    DRIVE_MEMORIES
};
extern const char *const drive_memory_names[DRIVE_MEMORIES + 1]; /* "huge", "small", "pool", NULL */

/* One way to read. */
struct drive_setting {
    uint64_t block; /* bytes of a read, at most */
    uint64_t depth; /* bytes in flight */
    enum drive_memory memory;
};

/* Counts of durations, so fine that a percentile is at most 3 % off. */
#define LATENCY_BUCKETS (64u * 16u)
struct latencies {
    uint64_t counts[LATENCY_BUCKETS], total, most_ns;
};

/* Opens a container or fills a scratch file, which takes its time and is told on stderr. -ENOSPC: no room for it. */
int drive_bench_open(const struct drive_bench_options *options, struct drive_bench **ret_drive,
                     struct error *ret_error);
void drive_bench_close(struct drive_bench *drive);
const struct drive_bench_facts *drive_bench_facts(const struct drive_bench *drive);

/* Bytes of the reads that a blob is cut into where `block` is the most: equal ones, multiples of 4096. */
uint64_t drive_bench_piece_bytes(const struct drive_bench *drive, uint64_t block);

/* Reads blobs for `seconds`, counted from when the drive is busy: bytes a second, and each read's time is counted in
 * `latencies`. Goes on where the last call ended, so that every blob is read once before one is read again. Errors name
 * the file; -EINTR: a signal came. */
int drive_bench_measure(struct drive_bench *drive, const struct drive_setting *setting, double seconds,
                        struct latencies *latencies, double *ret_bytes_per_s, struct error *ret_error);

/* The duration, in ns, below which `share` (0 to 1) of them lie. */
double latencies_percentile(const struct latencies *latencies, double share);
