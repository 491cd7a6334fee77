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

struct uring_poll {
    int fd; /* -1: not used */
    bool armed;
};

struct uring {
    struct io_uring ring;
    struct uring_poll polls[POLL_TAGS];
    bool multishot; /* kernels before 5.13 have one-shot polls only */
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
    struct io_uring_sqe *sqe = free_sqe(state);
    if (!sqe)
        return -EAGAIN;
    io_uring_prep_read(sqe, read->fd, read->buffer, (unsigned)read->bytes, read->offset);
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

const struct io_method io_method_uring = {
    .name = "uring",
    .choice = IO_URING,
    .open = uring_open,
    .submit = uring_submit,
    .wait = uring_wait,
    .close = uring_close,
};
