/* Reads through one io_uring ring, used by one thread. The doorbell and the stop descriptor are polled in the same
 * ring, so the daemon sleeps in exactly one system call. */
#include "io_daemon/method.h"
#include "shm/control.h"

#include <liburing.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* What stands in user_data for a poll; every other value is a struct io_read. */
enum poll_tag { TAG_DOORBELL = 1, TAG_STOP = 2, POLL_TAGS = 3 };

#define BUFFER_PLACES (1u << 14) /* as many as the kernel allows */

struct uring_poll {
    int fd; /* -1: not used */
    bool armed;
};

struct uring {
    struct io_uring ring;
    struct uring_poll polls[POLL_TAGS];
    bool multishot; /* kernels before 5.13 have one-shot polls only */
    int lock_fd;
    uint32_t *fixed; /* [fixed_count] by descriptor: its place in the ring's file table, 0: it has none */
    int fixed_count;
    bool has_buffers; /* the table of registered buffers is there */
};

/* From what suits us best to what every kernel with io_uring has. */
static const unsigned flag_sets[] = {
    IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN,
    IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_COOP_TASKRUN,
    IORING_SETUP_COOP_TASKRUN,
    0,
};

static int setup_ring(struct io_uring *ring, uint32_t depth)
{
    int status = -EINVAL;
    for (size_t i = 0; status == -EINVAL && i < sizeof(flag_sets) / sizeof(flag_sets[0]); i++)
        status = io_uring_queue_init(depth + POLL_TAGS, ring, flag_sets[i]);
    return status;
}

static void uring_close(void *state)
{
    struct uring *uring = state;
    io_uring_queue_exit(&uring->ring);
    free(uring->fixed);
    free(uring);
}

static int uring_open(const struct io_setup *setup, void **ret_state, struct error *ret_error)
{
    struct uring *uring = calloc(1, sizeof(*uring));
    if (!uring)
        return error_set(ret_error, ENOMEM, "io_uring: out of memory");
    int status = setup_ring(&uring->ring, setup->depth);
    if (status < 0) {
        free(uring);
        return error_set(ret_error, -status,
                         "io_uring cannot be used (%s): check kernel.io_uring_disabled, the memlock limit and the "
                         "container's seccomp profile",
                         strerror(-status));
    }
    /* The ring outlives this process until its last read has landed, and so does what its file table holds: a successor
     * that gets the lock knows that no late page will come. */
    if (setup->lock_fd >= 0)
        status = io_uring_register_files(&uring->ring, &setup->lock_fd, 1);
    if (status < 0) {
        uring_close(uring);
        return error_set(ret_error, -status, "io_uring cannot hold the lock file: %s", strerror(-status));
    }
    uring->multishot = true;
    uring->lock_fd = setup->lock_fd;
    uring->polls[0].fd = -1;
    uring->polls[TAG_DOORBELL].fd = setup->doorbell_fd;
    uring->polls[TAG_STOP].fd = setup->stop_fd;
    *ret_state = uring;
    return 0;
}

/* A free entry; a full queue is sent first. NULL: still full, the kernel wants completions collected. */
static struct io_uring_sqe *free_sqe(struct uring *uring)
{
    struct io_uring_sqe *sqe = io_uring_get_sqe(&uring->ring);
    if (!sqe && io_uring_submit(&uring->ring) > 0)
        sqe = io_uring_get_sqe(&uring->ring);
    return sqe;
}

static int uring_submit(void *state, struct io_read *read)
{
    const struct uring *uring = state;
    struct io_uring_sqe *sqe = free_sqe(state);
    if (!sqe)
        return -EAGAIN;
    uint32_t place = read->fd < uring->fixed_count ? uring->fixed[read->fd] : 0;
    int file = place ? (int)place : read->fd;
    if (read->buffer_place)
        io_uring_prep_read_fixed(sqe, file, read->buffer, (unsigned)read->bytes, read->offset,
                                 (int)read->buffer_place - 1);
    else
        io_uring_prep_read(sqe, file, read->buffer, (unsigned)read->bytes, read->offset);
    if (place)
        sqe->flags |= IOSQE_FIXED_FILE;
    io_uring_sqe_set_data(sqe, read);
    return 0;
}

static void arm_polls(struct uring *uring)
{
    for (uint64_t tag = 0; tag < POLL_TAGS; tag++) {
        struct uring_poll *poll = &uring->polls[tag];
        if (poll->fd < 0 || poll->armed)
            continue;
        struct io_uring_sqe *sqe = free_sqe(uring);
        if (!sqe)
            return; /* the next wait tries again; until then completions of reads wake us */
        if (uring->multishot)
            io_uring_prep_poll_multishot(sqe, poll->fd, POLLIN);
        else
            io_uring_prep_poll_add(sqe, poll->fd, POLLIN);
        io_uring_sqe_set_data64(sqe, tag);
        poll->armed = true;
    }
}

static void finish_poll(struct uring *uring, uint64_t tag, const struct io_uring_cqe *cqe, uint32_t *events)
{
    if (!(cqe->flags & IORING_CQE_F_MORE))
        uring->polls[tag].armed = false;
    if (cqe->res == -EINVAL && uring->multishot)
        uring->multishot = false;
    else if (cqe->res > 0)
        *events |= tag == TAG_DOORBELL ? IO_EVENT_DOORBELL : IO_EVENT_STOP;
}

static struct io_read *collect_completions(struct uring *uring, uint32_t *events, unsigned *ret_seen)
{
    struct io_read *finished = NULL;
    struct io_uring_cqe *cqe;
    unsigned head, seen = 0;
    io_uring_for_each_cqe(&uring->ring, head, cqe)
    {
        seen++;
        if (cqe->user_data < POLL_TAGS) {
            finish_poll(uring, cqe->user_data, cqe, events);
            continue;
        }
        struct io_read *read = io_uring_cqe_get_data(cqe);
        read->result = cqe->res;
        read->next = finished;
        finished = read;
    }
    io_uring_cq_advance(&uring->ring, seen);
    *ret_seen = seen;
    return finished;
}

static int uring_wait(void *state, int timeout_ms, struct io_read **ret_finished, uint32_t *ret_events,
                      struct error *ret_error)
{
    struct uring *uring = state;
    struct __kernel_timespec timeout = {timeout_ms / 1000, (long long)(timeout_ms % 1000) * 1000000};
    struct io_uring_cqe *cqe;
    arm_polls(uring);
    int status = io_uring_submit_and_wait_timeout(&uring->ring, &cqe, 1, timeout_ms < 0 ? NULL : &timeout, NULL);
    unsigned seen;
    *ret_events = 0;
    *ret_finished = collect_completions(uring, ret_events, &seen);
    if (status >= 0 || status == -EINTR || status == -ETIME)
        return 0;
    if (status == -EAGAIN || status == -EBUSY) {
        /* The kernel is short of memory, or its completion queue was full: what was not sent stays in the submission
         * queue. */
        if (seen == 0)
            nanosleep(&(struct timespec){0, 1000000}, NULL);
        return 0;
    }
    return error_set(ret_error, -status, "io_uring: waiting failed: %s", strerror(-status));
}

/* The table is made anew, the lock file first in it as before. */
static int uring_register_files(void *state, const int *fds, uint32_t count)
{
    struct uring *uring = state;
    int highest = 0;
    for (uint32_t i = 0; i < count; i++)
        highest = fds[i] > highest ? fds[i] : highest;
    int *table = calloc((size_t)count + 1, sizeof(*table));
    uint32_t *fixed = calloc((size_t)highest + 1, sizeof(*fixed));
    int status = table && fixed ? 0 : -ENOMEM;
    if (status == 0 && uring->lock_fd >= 0)
        status = io_uring_unregister_files(&uring->ring);
    if (status == 0) {
        table[0] = uring->lock_fd; /* -1 leaves the place empty */
        for (uint32_t i = 0; i < count; i++) {
            table[i + 1] = fds[i];
            fixed[fds[i]] = i + 1;
        }
        status = io_uring_register_files(&uring->ring, table, count + 1);
        if (status < 0 && uring->lock_fd >= 0 && io_uring_register_files(&uring->ring, &uring->lock_fd, 1) < 0)
            status = -EBADF;
    }
    free(table);
    if (status < 0) {
        free(fixed);
        return status;
    }
    uring->fixed = fixed;
    uring->fixed_count = highest + 1;
    return 0;
}

static int uring_register_buffer(void *state, uint32_t place, void *base, size_t bytes)
{
    struct uring *uring = state;
    if (place >= BUFFER_PLACES)
        return -ENOSPC;
    if (!uring->has_buffers) {
        int status = io_uring_register_buffers_sparse(&uring->ring, BUFFER_PLACES);
        if (status < 0)
            return status;
        uring->has_buffers = true;
    }
    const struct iovec buffer = {.iov_base = base, .iov_len = bytes};
    __u64 tag = 0;
    int updated = io_uring_register_buffers_update_tag(&uring->ring, place, &buffer, &tag, 1);
    return updated < 0 ? updated : updated == 1 ? 0 : -ENOMEM;
}

const struct io_method io_method_uring = {
    .name = "uring",
    .choice = IO_URING,
    .open = uring_open,
    .submit = uring_submit,
    .wait = uring_wait,
    .close = uring_close,
    .register_files = uring_register_files,
    .register_buffer = uring_register_buffer,
};
