/* calypte-worker: receives STEPs, runs them with its team, worker 0 answers. Between two STEPs it sleeps in poll(). */
#include "compute/model.h"
#include "proto/channel.h"
#include "proto/cleanup.h"
#include "proto/heritage.h"
#include "shm/futex.h"

#include <limits.h>
#include <omp.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>

struct worker {
    struct heritage heritage;
    struct control *control;
    struct facts facts;
    struct channel *channel;
    struct model *model;
    struct step_limits limits;
    struct step_done last; /* of the last STEP that was run; id 0: none */
    int signal_fd;         /* SIGTERM, SIGINT */
    int epoch_fd;          /* eventfd: the watcher saw the epoch rise */
};

/* An idle worker sleeps in poll() and would not notice a raised epoch, which the supervisor wants acknowledged. This
 * thread sleeps on the futex that a raise wakes, and passes it on. */
static void *watch_epoch(void *argument)
{
    const struct worker *worker = argument;
    _Atomic uint32_t *published = &worker->control->workers[worker->heritage.index].published;
    uint32_t seen = 0; /* no epoch: whatever was raised before this thread ran is passed on too */
    for (;;) {
        uint32_t word = atomic_load(published), epoch = atomic_load(&worker->control->epoch);
        if (epoch != seen) {
            uint64_t one = 1;
            if (write(worker->epoch_fd, &one, sizeof one) == (ssize_t)sizeof one)
                seen = epoch;
        }
        futex_wait(published, word, -1);
    }
    return NULL;
}

static int start_watcher(struct worker *worker, struct error *ret_error)
{
    pthread_t watcher;
    int code = pthread_create(&watcher, NULL, watch_epoch, worker);
    if (code)
        return error_set(ret_error, code, "worker %u: no thread for watching the epoch: %s", worker->heritage.index,
                         strerror(code));
    pthread_detach(watcher);
    return 0;
}

/* Thread t of the team on its core. The team's threads are made here and stay. */
static void pin_team(const struct worker *worker)
{
    const struct facts *facts = &worker->facts;
    uint32_t index = worker->heritage.index, count = facts->core_count[index];
    if (count == 0)
        return;
#pragma omp parallel num_threads((int)facts->threads)
    {
        uint16_t core = facts->cores[index][(uint32_t)omp_get_thread_num() % count];
        cpu_set_t cpus;
        CPU_ZERO(&cpus);
        CPU_SET(core, &cpus);
        /* A core that this container may not use leaves the thread where it was: slower, not wrong. */
        (void)sched_setaffinity(0, sizeof cpus, &cpus);
    }
}

static int catch_signals(int *ret_fd, struct error *ret_error)
{
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGINT);
    int code = pthread_sigmask(SIG_BLOCK, &set, NULL); /* before the first thread, so that all inherit it */
    *ret_fd = code ? -1 : signalfd(-1, &set, SFD_CLOEXEC);
    if (*ret_fd < 0)
        return error_set(ret_error, code ? code : errno, "cannot catch SIGTERM: %s", strerror(code ? code : errno));
    return 0;
}

static int listen_for_front(struct worker *worker, struct error *ret_error)
{
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/worker.%u.ipc", worker->heritage.rundir, worker->heritage.index);
    return channel_listen(CHANNEL_PAIR, path, &worker->channel, ret_error);
}

static int open_worker(struct worker *worker, struct error *ret_error)
{
    struct heritage *heritage = &worker->heritage;
    int status = catch_signals(&worker->signal_fd, ret_error);
    if (status == 0)
        status = heritage_bind_life(heritage, ret_error);
    if (status == 0)
        status = control_attach(heritage->instance, &worker->control, &worker->facts, ret_error);
    if (status < 0)
        return status;
    if (heritage->index >= worker->facts.workers)
        return error_set(ret_error, EINVAL, "--index %u: the instance has %u workers", heritage->index,
                         worker->facts.workers);
    worker->epoch_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (worker->epoch_fd < 0)
        return error_set(ret_error, errno, "worker %u: no eventfd: %s", heritage->index, strerror(errno));
    status = listen_for_front(worker, ret_error);
    if (status == 0)
        status = start_watcher(worker, ret_error);
    if (status < 0)
        return status;
    omp_set_dynamic(0);
    pin_team(worker);
    const struct facts *facts = &worker->facts;
    worker->limits = (struct step_limits){.max_rows = facts->max_rows,
                                          .logit_rows = facts->logit_rows,
                                          .kv_pages = facts->kv_pages,
                                          .page_tokens = facts->page_tokens,
                                          .context = facts->context,
                                          .vocab = facts->config.vocab};
    return model_open(heritage->instance, facts, worker->control, heritage->index, heritage->doorbell_fd,
                      &worker->model, ret_error);
}

static void close_worker(struct worker *worker)
{
    model_close(worker->model);
    if (worker->channel)
        channel_close(worker->channel);
    close_fdp(&worker->signal_fd);
    /* The watcher still looks at control and epoch_fd; both end with the process. */
}

static int answer(struct worker *worker, const struct step_done *done, struct error *ret_error)
{
    unsigned char bytes[MESSAGE_STEP_DONE_BYTES];
    if (worker->heritage.index != 0)
        return 0;
    message_encode_step_done(done, bytes, sizeof bytes);
    return channel_send(worker->channel, bytes, sizeof bytes, 0, ret_error); /* a front that is gone gets none */
}

/* Runs one message. 0 to go on; anything else is this worker's end. */
static int serve(struct worker *worker, const void *bytes, size_t size, struct error *ret_error)
{
    _cleanup_free_ void *memory = NULL;
    struct step step;
    struct step_done done;
    int status = message_decode_step(bytes, size, &worker->limits, &step, &memory, ret_error);
    if (status < 0) { /* every worker got the same bytes and refuses them alike */
        fprintf(stderr, "calypte-worker: %s\n", ret_error->text);
        done = (struct step_done){.status = status};
        return answer(worker, &done, ret_error);
    }
    if (step.epoch == worker->model->exchange.epoch && step.epoch == worker->last.epoch && step.id <= worker->last.id)
        return step.id == worker->last.id ? answer(worker, &worker->last, ret_error) : 0; /* sent again: it was run */
    status = model_step(worker->model, &step, &done, ret_error);
    worker->last = done;
    bool lives = status == 0 || status == -ESTALE || status == -EIO || status == -EINVAL;
    if (status == -EIO && worker->heritage.index == 0)
        fprintf(stderr, "calypte-worker: %s\n", ret_error->text);
    if (!lives)
        return status;
    uint32_t epoch = atomic_load(&worker->control->epoch);
    if (epoch != worker->model->exchange.epoch)
        model_acknowledge(worker->model, epoch);
    return answer(worker, &done, ret_error);
}

/* Everything that has arrived. */
static int receive_all(struct worker *worker, struct error *ret_error)
{
    for (;;) {
        _cleanup_free_ void *bytes = NULL;
        size_t size;
        int status = channel_receive(worker->channel, 0, &bytes, &size, ret_error);
        if (status == -EAGAIN || status == -ETIMEDOUT)
            return 0;
        if (status == 0)
            status = serve(worker, bytes, size, ret_error);
        if (status < 0)
            return status;
    }
}

/* Until SIGTERM (0) or a fault. */
static int run(struct worker *worker, struct error *ret_error)
{
    for (;;) {
        uint32_t epoch = atomic_load(&worker->control->epoch);
        if (epoch != worker->model->exchange.epoch)
            model_acknowledge(worker->model, epoch);
        struct pollfd fds[] = {
            {.fd = worker->signal_fd, .events = POLLIN},
            {.fd = worker->epoch_fd, .events = POLLIN},
            {.fd = channel_fd(worker->channel), .events = POLLIN},
        };
        if (poll(fds, sizeof fds / sizeof fds[0], -1) < 0) {
            if (errno == EINTR)
                continue;
            return error_set(ret_error, errno, "worker %u: poll: %s", worker->heritage.index, strerror(errno));
        }
        if (fds[0].revents)
            return 0;
        uint64_t count;
        if (fds[1].revents && read(worker->epoch_fd, &count, sizeof count) < 0 && errno != EAGAIN)
            return error_set(ret_error, errno, "worker %u: eventfd: %s", worker->heritage.index, strerror(errno));
        int status = fds[2].revents ? receive_all(worker, ret_error) : 0;
        if (status < 0)
            return status;
    }
}

int main(int argc, char **argv)
{
    static struct worker worker = {.signal_fd = -1,
                                   .epoch_fd = -1}; /* the watcher looks at it until the process ends */
    struct error error = {0};
    int status = heritage_parse(argc, argv, &worker.heritage, &error);
    if (status < 0) {
        fprintf(stderr, "calypte-worker: %s\n", error.text);
        return 2;
    }
    status = open_worker(&worker, &error);
    heritage_notify(&worker.heritage, status < 0 ? error.text : NULL);
    if (status == 0)
        status = run(&worker, &error);
    if (status < 0)
        fprintf(stderr, "calypte-worker: %s\n", error.text);
    close_worker(&worker);
    return status < 0;
}
