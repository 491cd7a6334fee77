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

#include <nng/protocol/reqrep0/rep.h>
#include <nng/supplemental/util/platform.h>
#include <nng/transport/ipc/ipc.h>

#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <poll.h>
#include <string.h>
#include <sys/un.h>

#define RECEIVE_MAX ((size_t)64 << 20)
#define SEND_BUFFER 64
#define SEND_TIMEOUT_MS 1000
#define REQUESTS_A_ROUND 16

/* What the loop needs beside the front: the ends of the pipe through which nng's threads say that a client's connection
 * is gone. */
struct server {
    struct front front; /* first: struct front is what the others see */
    int closed_read, closed_write;
    int request_fd;
};

static struct server *of_front(struct front *front)
{
    return (struct server *)(void *)front;
}

void front_reply(struct front *front, const struct reply_address *to, json_t *answer)
{
    static const char no_memory[] =
        "{\"ok\":false,\"error\":{\"code\":\"model_error\",\"message\":\"no memory for the answer\"}}";
    _cleanup_free_ char *text = answer ? json_dumps(answer, JSON_COMPACT | JSON_REAL_PRECISION(15)) : NULL;
    json_decref(answer);
    const char *body = text ? text : no_memory;
    nng_msg *message;
    if (nng_msg_alloc(&message, 0) != 0)
        return;
    /* nng's own queue takes it over at once: a client that does not read has its answers dropped, nobody waits for it. */
    if (nng_msg_append(message, body, strlen(body)) != 0 ||
        nng_msg_header_append(message, to->header, to->header_bytes) != 0 ||
        nng_sendmsg(front->socket, message, 0) != 0)
        nng_msg_free(message);
}

void front_reply_fault(struct front *front, const struct reply_address *to, const struct fault *fault)
{
    front_reply(front, to, fault_json(fault));
}

/* nng's thread: a connection is gone. A pipe's write of 4 bytes is whole or nothing. Should it ever be full (16384 closed
 * connections that the loop has not seen), some answers are computed for nobody. */
static void pipe_closed(nng_pipe pipe, nng_pipe_ev event, void *context)
{
    const struct server *server = context;
    uint32_t id = (uint32_t)nng_pipe_id(pipe);
    if (event == NNG_PIPE_EV_REM_POST && write(server->closed_write, &id, sizeof id) < 0)
        return;
}

static int open_socket(struct server *server, const char *rundir, struct error *ret_error)
{
    struct front *front = &server->front;
    char url[sizeof "ipc://" + PATH_MAX];
    int length = snprintf(url, sizeof url, "ipc://%s/api.ipc", rundir);
    size_t limit = sizeof((struct sockaddr_un){0}.sun_path) - 1;
    if (length < 0 || (size_t)length - strlen("ipc://") > limit)
        return error_set(ret_error, ENAMETOOLONG,
                         "%s/api.ipc: too long for the path of a socket, %zu bytes may be used; set "
                         "CALYPTE_RUNTIME_DIR to a shorter one",
                         rundir, limit);
    int ends[2];
    if (pipe2(ends, O_CLOEXEC | O_NONBLOCK) < 0)
        return error_set(ret_error, errno, "cannot make a pipe: %s", strerror(errno));
    server->closed_read = ends[0];
    server->closed_write = ends[1];

    nng_listener listener;
    int code = nng_rep0_open_raw(&front->socket);
    if (code != 0)
        return error_set(ret_error, EIO, "%s: cannot open a socket: %s", url, nng_strerror(code));
    front->socket_open = true;
    code = nng_socket_set_size(front->socket, NNG_OPT_RECVMAXSZ, RECEIVE_MAX);
    if (code == 0)
        code = nng_socket_set_int(front->socket, NNG_OPT_SENDBUF, SEND_BUFFER);
    if (code == 0)
        code = nng_socket_set_ms(front->socket, NNG_OPT_SENDTIMEO, SEND_TIMEOUT_MS);
    if (code == 0)
        code = nng_socket_get_int(front->socket, NNG_OPT_RECVFD, &server->request_fd);
    if (code == 0)
        code = nng_pipe_notify(front->socket, NNG_PIPE_EV_REM_POST, pipe_closed, server);
    if (code == 0)
        code = nng_listener_create(&listener, front->socket, url);
    if (code == 0)
        code = nng_listener_set_int(listener, NNG_OPT_IPC_PERMISSIONS, 0600);
    if (code == 0)
        code = nng_listener_start(listener, 0);
    if (code != 0)
        return error_set(ret_error, EIO, "%s: cannot listen: %s", url, nng_strerror(code));
    return 0;
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

int server_open(const struct heritage *heritage, struct front **ret_front, struct error *ret_error)
{
    if (heritage->wake_fd < 0)
        return error_set(ret_error, EINVAL,
                         "--wake-fd: is missing; `calypte up` starts this program with the right arguments");
    struct server *server = calloc(1, sizeof *server);
    if (!server)
        return error_set(ret_error, ENOMEM, "no memory");
    struct front *front = &server->front;
    TAILQ_INIT(&front->requests);
    server->closed_read = server->closed_write = -1;
    front->started_ns = clock_ns();
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    front->born = (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
    snprintf(front->instance, sizeof front->instance, "%s", heritage->instance);

    int status = scheduler_open(&front->scheduler, heritage->instance, heritage->rundir, ret_error);
    if (status == 0)
        status = open_tokenizer(front, ret_error);
    if (status == 0)
        status = open_socket(server, heritage->rundir, ret_error);
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
    nng_msg *message;
    for (int taken = 0; taken < REQUESTS_A_ROUND && nng_recvmsg(front->socket, &message, NNG_FLAG_NONBLOCK) == 0;
         taken++) {
        struct reply_address from = {.pipe = (uint32_t)nng_pipe_id(nng_msg_get_pipe(message)),
                                     .header_bytes = nng_msg_header_len(message)};
        if (from.header_bytes <= sizeof from.header) {
            memcpy(from.header, nng_msg_header(message), from.header_bytes);
            if (!request_is_waiting(front, &from))
                api_take(front, &from, nng_msg_body(message), nng_msg_len(message));
        }
        nng_msg_free(message);
        scheduler_continue(&front->scheduler);
    }
}

static void take_closed(struct server *server)
{
    uint32_t ids[256];
    ssize_t bytes;
    while ((bytes = read(server->closed_read, ids, sizeof ids)) > 0)
        for (size_t i = 0; i < (size_t)bytes / sizeof ids[0]; i++)
            request_pipe_closed(&server->front, ids[i]);
    scheduler_continue(&server->front.scheduler);
}

static void take_wake(struct front *front, int wake_fd)
{
    uint64_t count;
    while (read(wake_fd, &count, sizeof count) < 0 && errno == EINTR)
        ;
    scheduler_wake(&front->scheduler);
}

enum { POLL_SIGNAL, POLL_WAKE, POLL_CLOSED, POLL_REQUEST, POLL_WORKER, POLL_MAX = POLL_WORKER + 2 * MAX_WORKERS };

int server_run(struct front *front, const struct heritage *heritage, int signal_fd, struct error *ret_error)
{
    struct server *server = of_front(front);
    struct scheduler *scheduler = &front->scheduler;
    uint32_t workers = scheduler->facts.workers;
    int flags = fcntl(heritage->wake_fd, F_GETFL);
    fcntl(heritage->wake_fd, F_SETFL, flags | O_NONBLOCK);
    scheduler_wake(scheduler);
    for (;;) {
        struct pollfd fds[POLL_MAX] = {
            [POLL_SIGNAL] = {.fd = signal_fd, .events = POLLIN},
            [POLL_WAKE] = {.fd = heritage->wake_fd, .events = POLLIN},
            [POLL_CLOSED] = {.fd = server->closed_read, .events = POLLIN},
            [POLL_REQUEST] = {.fd = server->request_fd, .events = POLLIN},
        };
        nfds_t count = POLL_WORKER;
        for (uint32_t w = 0; w < workers; w++)
            fds[count++] = (struct pollfd){.fd = channel_fd(scheduler->workers[w]), .events = POLLIN};
        for (uint32_t w = 0; w < workers; w++)
            if (scheduler->unsent & 1u << w)
                fds[count++] = (struct pollfd){.fd = channel_send_fd(scheduler->workers[w]), .events = POLLIN};

        int ready = poll(fds, count, request_expire(front));
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
        for (nfds_t i = POLL_WORKER + workers; i < count; i++)
            if (fds[i].revents) {
                scheduler_send(scheduler);
                break;
            }
        if (fds[POLL_CLOSED].revents)
            take_closed(server);
        if (fds[POLL_REQUEST].revents)
            take_requests(front);
    }
}

void server_close(struct front *front)
{
    if (!front)
        return;
    struct server *server = of_front(front);
    bool answering = !TAILQ_EMPTY(&front->requests);
    scheduler_close(&front->scheduler);
    request_close_all(front);
    if (answering)
        nng_msleep(50); /* nng_close drops what its threads have not written yet */
    if (front->socket_open)
        nng_close(front->socket);
    if (server->closed_read >= 0)
        close(server->closed_read);
    if (server->closed_write >= 0)
        close(server->closed_write);
    sampler_scratch_free(&front->scratch);
    free(front->allowed);
    tokenizer_close(front->tokenizer);
    free(server);
}
