/* How bytes come from a file: a table of functions, so that everything else of this folder runs the same over io_uring
 * (method_uring.c), over threads that call pread (method_pread.c), and in tests over a table that hurts one of the two.
 *
 * A method moves bytes and nothing else: short reads, retries and bounds of what is in flight belong to reader.c. */
#pragma once

#include "proto/error.h"

#include <stddef.h>
#include <stdint.h>

/* One read. The owner keeps it and its buffer alive until the method has handed it back. */
struct io_read {
    int fd;
    void *buffer;
    size_t bytes;
    uint64_t offset;
    uint32_t buffer_place; /* 0, or 1 + the place of a registered buffer that holds all of it */
    int64_t result;        /* bytes read, or a negative errno; W: the method, before it hands the read back */
    struct io_read *next;  /* for the list that holds it */
};

struct io_setup {
    int doorbell_fd; /* eventfd, non-blocking: written by workers, the verify thread and the pool's growth */
    int stop_fd;     /* readable when the daemon shall end (a signalfd); -1: none */
    int lock_fd;     /* the lock file, to be held for as long as any read of this method can still land in memory */
    uint32_t depth;  /* reads in flight, at most */
};

enum io_event { IO_EVENT_DOORBELL = 1, IO_EVENT_STOP = 2 };

/* All functions: the thread that opened. */
struct io_method {
    const char *name;
    uint32_t choice; /* enum io_choice */
    /* -EPERM and -ENOSYS: this machine forbids or lacks it, another method may work. */
    int (*open)(const struct io_setup *setup, void **ret_state, struct error *ret_error);
    /* Takes a read. 0, or -EAGAIN: full, collect with `wait` first. */
    int (*submit)(void *state, struct io_read *read);
    /* Sleeps until a read has finished, an event came, or `timeout_ms` passed (negative: for ever), and hands back all
     * finished reads as a list in any order. Events (a mask of enum io_event) may be reported once for several causes,
     * so the caller empties the doorbell. 0 also when nothing happened (a signal). */
    int (*wait)(void *state, int timeout_ms, struct io_read **ret_finished, uint32_t *ret_events,
                struct error *ret_error);
    /* No read may be in flight. */
    void (*close)(void *state);
    /* NULL, or: reads of these files will come, which stay open until `close`. A negative errno only means that they cost
     * a little more, but for -EBADF: the lock file is not held any more. No read may be in flight. */
    int (*register_files)(void *state, const int *fds, uint32_t count);
    /* NULL, or: reads into `bytes` bytes at `base` will come, and name `place` + 1. They must be mapped, and nothing else may
     * stand there while the buffer is registered; NULL: no such read comes any more, but some may be in flight. A negative
     * errno (-ENOMEM: not so much memory may be locked) only means that reads into it must not name it. */
    int (*register_buffer)(void *state, uint32_t place, void *base, size_t bytes);
};

extern const struct io_method io_method_uring, io_method_pread;
