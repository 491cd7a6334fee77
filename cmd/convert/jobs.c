#include "cmd/convert/jobs.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define TICK_NANOSECONDS 100000000L

struct team {
    const struct jobs *jobs;
    int (*run)(void *context, size_t index, struct error *ret_error);
    void *context;
    size_t count;
    atomic_size_t next;
    atomic_bool failed;
    pthread_mutex_t lock; /* for what follows */
    pthread_cond_t idle;
    unsigned running;
    size_t failed_index;
    int status;
    struct error error;
};

static void note_failure(struct team *team, size_t index, int status, const struct error *error)
{
    pthread_mutex_lock(&team->lock);
    if (team->status == 0 || index < team->failed_index) {
        team->failed_index = index;
        team->status = status;
        team->error = *error;
    }
    pthread_mutex_unlock(&team->lock);
    atomic_store(&team->failed, true);
}

static void *work(void *argument)
{
    struct team *team = argument;
    while (!atomic_load(&team->failed) && !atomic_load(team->jobs->stop)) {
        size_t index = atomic_fetch_add(&team->next, 1);
        if (index >= team->count)
            break;
        struct error error = {{0}};
        int status = team->run(team->context, index, &error);
        if (status < 0)
            note_failure(team, index, status, &error);
    }
    pthread_mutex_lock(&team->lock);
    team->running--;
    pthread_cond_signal(&team->idle);
    pthread_mutex_unlock(&team->lock);
    return NULL;
}

/* Waits for the threads, ticking meanwhile. */
static void watch(struct team *team)
{
    pthread_mutex_lock(&team->lock);
    while (team->running > 0) {
        struct timespec until;
        clock_gettime(CLOCK_MONOTONIC, &until);
        until.tv_nsec += TICK_NANOSECONDS;
        if (until.tv_nsec >= 1000000000L) {
            until.tv_nsec -= 1000000000L;
            until.tv_sec++;
        }
        pthread_cond_timedwait(&team->idle, &team->lock, &until);
        pthread_mutex_unlock(&team->lock);
        team->jobs->tick(team->jobs->tick_context);
        pthread_mutex_lock(&team->lock);
    }
    pthread_mutex_unlock(&team->lock);
}

static int run_team(struct team *team, struct error *ret_error)
{
    unsigned threads = team->jobs->threads, started = 0;
    threads = threads < team->count ? threads : (unsigned)team->count;
    pthread_t *ids = calloc(threads + 1, sizeof *ids);
    if (!ids)
        return error_set(ret_error, ENOMEM, "no memory for %u threads", threads);
    int status = 0;
    for (; started < threads; started++) {
        pthread_mutex_lock(&team->lock);
        team->running++;
        pthread_mutex_unlock(&team->lock);
        status = pthread_create(&ids[started], NULL, work, team);
        if (status != 0) {
            pthread_mutex_lock(&team->lock);
            team->running--;
            pthread_mutex_unlock(&team->lock);
            break;
        }
    }
    /* Fewer threads than asked for do the same work. */
    if (started == 0 && threads > 0) {
        free(ids);
        return error_set(ret_error, status, "cannot start a thread: %s", strerror(status));
    }
    watch(team);
    for (unsigned i = 0; i < started; i++)
        pthread_join(ids[i], NULL);
    free(ids);
    if (team->status < 0 && ret_error)
        *ret_error = team->error;
    if (team->status < 0)
        return team->status;
    if (atomic_load(team->jobs->stop))
        return error_set(ret_error, EINTR, "interrupted");
    return 0;
}

int jobs_run(const struct jobs *jobs, size_t count, int (*run)(void *context, size_t index, struct error *ret_error),
             void *context, struct error *ret_error)
{
    struct team team = {.jobs = jobs, .run = run, .context = context, .count = count};
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_mutex_init(&team.lock, NULL);
    pthread_cond_init(&team.idle, &monotonic);
    pthread_condattr_destroy(&monotonic);
    int status = run_team(&team, ret_error);
    pthread_cond_destroy(&team.idle);
    pthread_mutex_destroy(&team.lock);
    jobs->tick(jobs->tick_context);
    return status;
}
