/* Reads by threads that call pread, for machines where io_uring is forbidden: containers with a strict seccomp profile,
 * old kernels.
 *
 * The lock file needs no help here: a thread inside pread cannot die before its read has ended, and the process keeps
 * its descriptors until its last thread is gone, so the lock is free only when nothing can land any more. */
#include "io_daemon/method.h"
#include "shm/control.h"

#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define PREAD_THREADS 8u

struct pread_pool {
    int doorbell_fd, stop_fd;
    pthread_mutex_t mutex;
    pthread_cond_t work;
    struct io_read *first, *last; /* wanted, in order */
    struct io_read *finished;
    bool closing;
    uint32_t threads;
    pthread_t ids[PREAD_THREADS];
};

static void hand_back(struct pread_pool *pool, struct io_read *read)
{
    bool first = !pool->finished;
    read->next = pool->finished;
    pool->finished = read;
    if (first) {
        uint64_t one = 1;
        /* fails only when the counter is full, and then it rings already */
        (void)!write(pool->doorbell_fd, &one, sizeof(one));
    }
}

static void *pread_thread(void *argument)
{
    struct pread_pool *pool = argument;
    pthread_mutex_lock(&pool->mutex);
    while (true) {
        while (!pool->first && !pool->closing)
            pthread_cond_wait(&pool->work, &pool->mutex);
        struct io_read *read = pool->first;
        if (!read)
            break;
        pool->first = read->next;
        pthread_mutex_unlock(&pool->mutex);
        ssize_t got = pread(read->fd, read->buffer, read->bytes, (off_t)read->offset);
        read->result = got < 0 ? -errno : got;
        pthread_mutex_lock(&pool->mutex);
        hand_back(pool, read);
    }
    pthread_mutex_unlock(&pool->mutex);
    return NULL;
}

static void pread_close(void *state)
{
    struct pread_pool *pool = state;
    pthread_mutex_lock(&pool->mutex);
    pool->closing = true;
    pthread_cond_broadcast(&pool->work);
    pthread_mutex_unlock(&pool->mutex);
    for (uint32_t i = 0; i < pool->threads; i++)
        pthread_join(pool->ids[i], NULL);
    pthread_cond_destroy(&pool->work);
    pthread_mutex_destroy(&pool->mutex);
    free(pool);
}

static int pread_open(const struct io_setup *setup, void **ret_state, struct error *ret_error)
{
    struct pread_pool *pool = calloc(1, sizeof(*pool));
    if (!pool)
        return error_set(ret_error, ENOMEM, "pread threads: out of memory");
    pool->doorbell_fd = setup->doorbell_fd;
    pool->stop_fd = setup->stop_fd;
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_cond_init(&pool->work, NULL);
    uint32_t wanted = setup->depth < PREAD_THREADS ? setup->depth : PREAD_THREADS;
    while (pool->threads < wanted && pthread_create(&pool->ids[pool->threads], NULL, pread_thread, pool) == 0)
        pool->threads++;
    if (pool->threads == 0) {
        pread_close(pool);
        return error_set(ret_error, EAGAIN,
                         "pread threads cannot be started: raise the limit of processes (ulimit -u)");
    }
    *ret_state = pool;
    return 0;
}

static int pread_submit(void *state, struct io_read *read)
{
    struct pread_pool *pool = state;
    read->next = NULL;
    pthread_mutex_lock(&pool->mutex);
    if (pool->first)
        pool->last->next = read;
    else
        pool->first = read;
    pool->last = read;
    pthread_cond_signal(&pool->work);
    pthread_mutex_unlock(&pool->mutex);
    return 0;
}

static struct io_read *take_finished(struct pread_pool *pool)
{
    pthread_mutex_lock(&pool->mutex);
    struct io_read *finished = pool->finished;
    pool->finished = NULL;
    pthread_mutex_unlock(&pool->mutex);
    return finished;
}

static int pread_wait(void *state, int timeout_ms, struct io_read **ret_finished, uint32_t *ret_events,
                      struct error *ret_error)
{
    struct pread_pool *pool = state;
    *ret_finished = take_finished(pool);
    struct pollfd fds[] = {{.fd = pool->doorbell_fd, .events = POLLIN}, {.fd = pool->stop_fd, .events = POLLIN}};
    int status = poll(fds, 2, *ret_finished ? 0 : timeout_ms);
    *ret_events = 0;
    if (status < 0)
        return errno == EINTR ? 0 : error_set(ret_error, errno, "poll of the doorbell failed: %s", strerror(errno));
    if (fds[0].revents & POLLIN)
        *ret_events |= IO_EVENT_DOORBELL;
    if (fds[1].revents & POLLIN)
        *ret_events |= IO_EVENT_STOP;
    if (!*ret_finished)
        *ret_finished = take_finished(pool);
    return 0;
}

const struct io_method io_method_pread = {
    .name = "pread",
    .choice = IO_PREAD,
    .open = pread_open,
    .submit = pread_submit,
    .wait = pread_wait,
    .close = pread_close,
};
