/* The front, one thread and one poll loop:
 *
 *   server.c      the request socket and the loop      scheduler.c   queue, slots, STEPs
 *   api.c         operations, parsing                  session.c     kept beginnings of conversations
 *   field.c       checked fields, faults               kv_pages.c    free pages
 *   requests.c    generate, submit/next, score, ...    generation.c  a sequence that answers
 *   prompt.c      prompt -> tokens                     score.c       a sequence that is scored; row_file.c: its files
 *   stats.c       status, stats, metrics               tokenizer, chat, sampler, text_stream: text and choice */
#include "cmd/front/server.h"

#include "cmd/front/clock.h"
#include "cmd/front/front.h"
#include "proto/cleanup.h"

#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <malloc.h>
#include <poll.h>
#include <string.h>

#define RECEIVE_MAX ((size_t)64 << 20)
#define REQUESTS_A_ROUND 16
#define TRIM_ABOVE ((size_t)1 << 20)

void front_reply(struct front *front, const struct reply_address *to, json_t *answer)
{
    static const char no_memory[] =
        "{\"ok\":false,\"error\":{\"code\":\"model_error\",\"message\":\"no memory for the answer\"}}";
    _cleanup_free_ char *text = answer ? json_dumps(answer, JSON_COMPACT | JSON_REAL_PRECISION(15)) : NULL;
    json_decref(answer);
    const char *body = text ? text : no_memory;
    reply_socket_send(front->socket, to, body, strlen(body));
}

void front_reply_fault(struct front *front, const struct reply_address *to, const struct fault *fault)
{
    front_reply(front, to, fault_json(fault));
}

static int open_socket(struct front *front, const char *rundir, struct error *ret_error)
{
    char path[PATH_MAX];
    int length = snprintf(path, sizeof path, "%s/api.ipc", rundir);
    if (length < 0 || (size_t)length >= sizeof path)
        return error_set(ret_error, ENAMETOOLONG, "%.100s...: too long for the path of a socket", rundir);
    return reply_socket_listen(SP_REP, path, RECEIVE_MAX, &front->socket, ret_error);
}

static int open_tokenizer(struct front *front, struct error *ret_error)
{
    const struct facts *facts = &front->scheduler.facts;
    int status = tokenizer_open(facts->container, &front->tokenizer, ret_error);
    if (status == -ENOENT)
        return 0; /* a model of ids alone */
    if (status < 0)
        return status;
    front->template = chat_template_find(facts->config.model_type);
    return tokenizer_allowed(front->tokenizer, facts->config.vocab, &front->allowed, ret_error);
}

/* A worker refuses a set that this CPU lacks; sampling only gets slower without one. */
static void open_sampler(struct front *front)
{
    struct error ignored;
    if (kernel_choose(front->scheduler.facts.isa, &front->scratch.kernels, &ignored) < 0)
        front->scratch.kernels = NULL;
}

int server_open(const struct heritage *heritage, struct front **ret_front, struct error *ret_error)
{
    if (heritage->wake_fd < 0)
        return error_set(ret_error, EINVAL,
                         "--wake-fd: is missing; `calypte up` starts this program with the right arguments");
    struct front *front = calloc(1, sizeof *front);
    if (!front)
        return error_set(ret_error, ENOMEM, "no memory");
    TAILQ_INIT(&front->requests);
    front->started_ns = clock_ns();
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    front->born = (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
    snprintf(front->instance, sizeof front->instance, "%s", heritage->instance);

    int status = scheduler_open(&front->scheduler, heritage->instance, heritage->rundir, ret_error);
    if (status == 0) {
        open_sampler(front);
        status = open_tokenizer(front, ret_error);
    }
    if (status == 0)
        status = open_socket(front, heritage->rundir, ret_error);
    if (status < 0) {
        server_close(front);
        return status;
    }
    *ret_front = front;
    return 0;
}

/* Takes messages that are there, not so many that workers wait for the next STEP behind a busy client. */
static void take_requests(struct front *front)
{
    struct reply_address from;
    void *bytes;
    size_t size;
    for (int taken = 0; taken < REQUESTS_A_ROUND && reply_socket_receive(front->socket, &from, &bytes, &size) == 0;
         taken++) {
        if (!bytes)
            request_connection_closed(front, from.connection);
        else if (!request_is_waiting(front, &from))
            api_take(front, &from, bytes, size);
        free(bytes);
        if (size > TRIM_ABOVE)
            malloc_trim(0); /* its JSON was a million pieces, which free() alone keeps */
        scheduler_continue(&front->scheduler);
    }
}

static void take_wake(struct front *front, int wake_fd)
{
    uint64_t count;
    while (read(wake_fd, &count, sizeof count) < 0 && errno == EINTR)
        ;
    scheduler_wake(&front->scheduler);
}

enum { POLL_SIGNAL, POLL_WAKE, POLL_REQUEST, POLL_WORKER, POLL_MAX = POLL_WORKER + MAX_WORKERS };

int server_run(struct front *front, const struct heritage *heritage, int signal_fd, struct error *ret_error)
{
    struct scheduler *scheduler = &front->scheduler;
    uint32_t workers = scheduler->facts.workers;
    int flags = fcntl(heritage->wake_fd, F_GETFL);
    fcntl(heritage->wake_fd, F_SETFL, flags | O_NONBLOCK);
    scheduler_wake(scheduler);
    for (;;) {
        int patience = request_expire(front), repeat = scheduler_repeat(scheduler);
        struct pollfd fds[POLL_MAX] = {
            [POLL_SIGNAL] = {.fd = signal_fd, .events = POLLIN},
            [POLL_WAKE] = {.fd = heritage->wake_fd, .events = POLLIN},
            [POLL_REQUEST] = {.fd = reply_socket_fd(front->socket), .events = POLLIN},
        };
        nfds_t count = POLL_WORKER;
        for (uint32_t w = 0; w < workers; w++)
            fds[count++] = (struct pollfd){.fd = channel_fd(scheduler->workers[w]), .events = POLLIN};

        int ready = poll(fds, count, patience < 0 || (repeat >= 0 && repeat < patience) ? repeat : patience);
        if (ready < 0 && errno != EINTR)
            return error_set(ret_error, errno, "cannot poll: %s", strerror(errno));
        if (ready <= 0)
            continue;
        if (fds[POLL_SIGNAL].revents)
            return 0;
        if (fds[POLL_WAKE].revents)
            take_wake(front, heritage->wake_fd);
        for (uint32_t w = 0; w < workers; w++)
            if (fds[POLL_WORKER + w].revents)
                scheduler_receive(scheduler, w);
        if (fds[POLL_REQUEST].revents)
            take_requests(front);
    }
}

void server_close(struct front *front)
{
    if (!front)
        return;
    scheduler_close(&front->scheduler);
    request_close_all(front);
    reply_socket_close(front->socket);
    sampler_scratch_free(&front->scratch);
    free(front->allowed);
    tokenizer_close(front->tokenizer);
    free(front);
}
