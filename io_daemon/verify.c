#include "io_daemon/verify.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#if defined(__x86_64__) && __has_include(<xxh_x86dispatch.h>)
    #include <xxh_x86dispatch.h> /* the same hash by the widest vectors that this CPU has */
#else
    #include <xxhash.h>
#endif

struct verifier {
    int doorbell_fd;
    _Atomic uint64_t *counter;
    pthread_mutex_t mutex;
    pthread_cond_t work;
    struct verify_job *first, *last; /* to do, in order */
    struct verify_job *done;
    bool closing;
    pthread_t thread;
};

static void hand_over_verdict(struct verifier *verifier, struct verify_job *job)
{
    bool first = !verifier->done;
    job->next = verifier->done;
    verifier->done = job;
    if (first) {
        uint64_t one = 1;
        /* fails only when the counter is full, and then it rings already */
        (void)!write(verifier->doorbell_fd, &one, sizeof(one));
    }
}

static bool verify(const struct verify_job *job)
{
    if (!job->state)
        return XXH3_64bits(job->data, job->bytes) == job->expected;
    if (job->first)
        XXH3_64bits_reset(job->state);
    XXH3_64bits_update(job->state, job->data, job->bytes);
    return !job->last || XXH3_64bits_digest(job->state) == job->expected;
}

static void *verify_thread(void *argument)
{
    struct verifier *verifier = argument;
    pthread_mutex_lock(&verifier->mutex);
    while (true) {
        while (!verifier->first && !verifier->closing)
            pthread_cond_wait(&verifier->work, &verifier->mutex);
        if (verifier->closing)
            break;
        struct verify_job *job = verifier->first;
        verifier->first = job->next;
        pthread_mutex_unlock(&verifier->mutex);
        job->matches = verify(job);
        atomic_fetch_add_explicit(verifier->counter, job->bytes, memory_order_relaxed);
        pthread_mutex_lock(&verifier->mutex);
        hand_over_verdict(verifier, job);
    }
    pthread_mutex_unlock(&verifier->mutex);
    return NULL;
}

int verifier_open(int doorbell_fd, _Atomic uint64_t *counter, struct verifier **ret_verifier, struct error *ret_error)
{
    struct verifier *verifier = calloc(1, sizeof(*verifier));
    if (!verifier)
        return error_set(ret_error, ENOMEM, "verify thread: out of memory");
    verifier->doorbell_fd = doorbell_fd;
    verifier->counter = counter;
    pthread_mutex_init(&verifier->mutex, NULL);
    pthread_cond_init(&verifier->work, NULL);
    int code = pthread_create(&verifier->thread, NULL, verify_thread, verifier);
    if (code) {
        free(verifier);
        return error_set(ret_error, code, "verify thread cannot be started: %s", strerror(code));
    }
    *ret_verifier = verifier;
    return 0;
}

void verifier_add(struct verifier *verifier, struct verify_job *job)
{
    job->next = NULL;
    pthread_mutex_lock(&verifier->mutex);
    if (verifier->first)
        verifier->last->next = job;
    else
        verifier->first = job;
    verifier->last = job;
    pthread_cond_signal(&verifier->work);
    pthread_mutex_unlock(&verifier->mutex);
}

struct verify_job *verifier_collect(struct verifier *verifier)
{
    pthread_mutex_lock(&verifier->mutex);
    struct verify_job *done = verifier->done;
    verifier->done = NULL;
    pthread_mutex_unlock(&verifier->mutex);
    return done;
}

void verifier_close(struct verifier *verifier)
{
    if (!verifier)
        return;
    pthread_mutex_lock(&verifier->mutex);
    verifier->closing = true;
    pthread_cond_signal(&verifier->work);
    pthread_mutex_unlock(&verifier->mutex);
    pthread_join(verifier->thread, NULL);
    pthread_cond_destroy(&verifier->work);
    pthread_mutex_destroy(&verifier->mutex);
    free(verifier);
}
