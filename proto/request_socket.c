#include "proto/request_socket.h"

#include "proto/cleanup.h"
#include "proto/clock.h"

#include <endian.h>
#include <poll.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/un.h>

#define GREETING_MS 10000
#define RETRY_MS 20 /* between attempts to connect */
#define ID_BYTES 4u
#define FIRST_ID UINT32_C(0x80000000)

struct request_socket {
    enum sp_protocol protocol;
    struct sp_stream stream;
    int epoll;       /* stays the same from connection to connection */
    uint32_t events; /* that epoll watches for */
    size_t most;
    uint32_t id; /* of the last request */
    struct sockaddr_un address;
};

static void watch(struct request_socket *socket)
{
    uint32_t events = EPOLLIN | (socket->stream.unsent_bytes > 0 ? EPOLLOUT : 0);
    struct epoll_event event = {.events = events};
    if (events != socket->events && epoll_ctl(socket->epoll, EPOLL_CTL_MOD, socket->stream.fd, &event) == 0)
        socket->events = events;
}

static void disconnect(struct request_socket *socket)
{
    if (socket->stream.fd < 0)
        return;
    /* A child that is just being started may hold the descriptor too, and then closing it would not end epoll's watch. */
    epoll_ctl(socket->epoll, EPOLL_CTL_DEL, socket->stream.fd, NULL);
    sp_stream_close(&socket->stream);
}

/* Unix sockets connect at once or not at all. -EAGAIN: the listener has no room for more that wait. */
static int connect_once(struct request_socket *ours)
{
    _cleanup_close_ int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    struct epoll_event event = {.events = EPOLLIN};
    struct sp_stream stream;
    if (fd < 0 || connect(fd, (const struct sockaddr *)&ours->address, sizeof ours->address) < 0)
        return -errno;
    int status = sp_stream_open(fd, ours->protocol, &stream);
    if (status < 0)
        return status;
    if (epoll_ctl(ours->epoll, EPOLL_CTL_ADD, fd, &event) < 0)
        return -errno;
    (void)take_fd(fd);
    ours->stream = stream;
    ours->events = EPOLLIN;
    return 0;
}

/* Whoever listened has ended, or is not there yet. */
static bool nobody_listens(int status)
{
    return status == -ENOENT || status == -ECONNREFUSED || status == -ECONNRESET || status == -EPIPE;
}

static int shorter(int left, int most)
{
    return left < 0 || left > most ? most : left;
}

static int wait_greeting(struct request_socket *socket, int interrupt_fd)
{
    int64_t start = clock_ms();
    for (;;) {
        int status = socket->stream.fd < 0 ? connect_once(socket) : 0;
        if (status == 0)
            status = sp_stream_greet(&socket->stream);
        int left = clock_left(start, GREETING_MS);
        if (status != -EAGAIN || left == 0)
            return status;
        struct pollfd fds[] = {{.fd = socket->stream.fd, .events = POLLIN}, {.fd = interrupt_fd, .events = POLLIN}};
        if (poll(fds, 2, socket->stream.fd < 0 ? shorter(left, RETRY_MS) : left) > 0 && fds[1].revents)
            return -EINTR;
    }
}

static int first_connection(struct request_socket *socket, int interrupt_fd, struct error *ret_error)
{
    const char *path = socket->address.sun_path;
    if (socket->protocol == SP_PAIR) {
        int status = connect_once(socket);
        return status == 0 || status == -EAGAIN || nobody_listens(status)
                   ? 0
                   : error_set(ret_error, -status, "%s: cannot connect: %s", path, strerror(-status));
    }
    int status = wait_greeting(socket, interrupt_fd);
    if (status == -EAGAIN)
        return error_set(ret_error, ETIMEDOUT, "%s: cannot connect: who listens there has not greeted for %d s", path,
                         GREETING_MS / 1000);
    if (status == -ECONNRESET || status == -EPIPE)
        status = -ECONNREFUSED;
    return status == 0 ? 0 : error_set(ret_error, -status, "%s: cannot connect: %s", path, strerror(-status));
}

static void request_socket_closep(struct request_socket **socket)
{
    request_socket_close(*socket);
}

int request_socket_dial(enum sp_protocol protocol, const char *path, size_t most, int interrupt_fd,
                        struct request_socket **ret_socket, struct error *ret_error)
{
    _cleanup_(request_socket_closep) struct request_socket *made = calloc(1, sizeof *made);
    if (!made)
        return error_set(ret_error, ENOMEM, "%s: no memory for a socket", path);
    made->protocol = protocol;
    made->most = most;
    made->stream.fd = made->epoll = -1;
    made->id = FIRST_ID;
    int status = sp_address(path, &made->address, ret_error);
    if (status < 0)
        return status;
    made->epoll = epoll_create1(EPOLL_CLOEXEC);
    if (made->epoll < 0)
        return error_set(ret_error, errno, "%s: cannot open a socket: %s", path, strerror(errno));
    status = first_connection(made, interrupt_fd, ret_error);
    if (status < 0)
        return status;
    *ret_socket = take_pointer(made);
    return 0;
}

void request_socket_close(struct request_socket *socket)
{
    if (!socket)
        return;
    disconnect(socket);
    if (socket->epoll >= 0)
        close(socket->epoll);
    free(socket);
}

int request_socket_fd(const struct request_socket *socket)
{
    return socket->epoll;
}

/* The other side sends no more. */
static bool has_ended(const struct request_socket *socket)
{
    struct pollfd poll_fd = {.fd = socket->stream.fd, .events = POLLRDHUP};
    return poll(&poll_fd, 1, 0) == 1;
}

/* 0: a message may begin. -EAGAIN: later. */
static int make_ready(struct request_socket *socket)
{
    if (socket->stream.fd >= 0 && has_ended(socket))
        disconnect(socket);
    int status = socket->stream.fd < 0 ? connect_once(socket) : 0;
    if (status == 0)
        status = sp_stream_greet(&socket->stream);
    if (status == 0)
        status = sp_stream_flush(&socket->stream);
    if (status == 0)
        return socket->stream.unsent_bytes > 0 ? -EAGAIN : 0;
    if (status != -EAGAIN)
        disconnect(socket);
    return nobody_listens(status) ? -EAGAIN : status;
}

void request_socket_connect(struct request_socket *socket)
{
    (void)make_ready(socket); /* if it is not, the next send tries again */
}

static int send_once(struct request_socket *socket, const void *bytes, size_t size)
{
    int status = make_ready(socket);
    if (status < 0)
        return status;
    bool request = socket->protocol == SP_REQ;
    socket->id = FIRST_ID | (socket->id + 1);
    uint32_t id = htobe32(socket->id);
    status = sp_stream_write(&socket->stream, &id, request ? ID_BYTES : 0, bytes, size);
    watch(socket);
    if (status == 0 || (request && nobody_listens(status)))
        return 0; /* some of it may have been heard, and an answer given: the next receive knows */
    disconnect(socket);
    return nobody_listens(status) ? -EAGAIN : status;
}

/* Until a message may begin, perhaps; a connection that has ended is let go. */
static void wait_to_send(struct request_socket *socket, int left)
{
    struct pollfd poll_fd = {.fd = socket->stream.fd,
                             .events = (short)(POLLRDHUP | (socket->stream.greeted ? POLLOUT : POLLIN))};
    if (socket->stream.fd >= 0 && poll(&poll_fd, 1, left) == 1 && poll_fd.revents & (POLLRDHUP | POLLHUP | POLLERR))
        disconnect(socket);
    if (socket->stream.fd < 0)
        poll(NULL, 0, shorter(left, RETRY_MS));
}

int request_socket_send(struct request_socket *socket, const void *bytes, size_t size, int timeout_ms,
                        struct error *ret_error)
{
    int64_t start = clock_ms();
    for (;;) {
        int status = send_once(socket, bytes, size);
        if (status == 0)
            return 0;
        const char *path = socket->address.sun_path;
        if (status != -EAGAIN)
            return error_set(ret_error, -status, "%s: cannot send: %s", path, strerror(-status));
        int left = clock_left(start, timeout_ms);
        if (left == 0)
            return error_set(ret_error, timeout_ms == 0 ? EAGAIN : ETIMEDOUT,
                             "%s: cannot send: nobody there takes anything", path);
        wait_to_send(socket, left);
    }
}

static bool is_answer(const struct request_socket *socket)
{
    uint32_t id;
    if (socket->stream.message_size < ID_BYTES)
        return false;
    memcpy(&id, socket->stream.message, sizeof id);
    return be32toh(id) == socket->id;
}

static int receive_once(struct request_socket *socket, void **ret_bytes, size_t *ret_size)
{
    size_t header = socket->protocol == SP_REQ ? ID_BYTES : 0;
    if (socket->stream.fd < 0)
        return -ECONNRESET;
    int status = sp_stream_flush(&socket->stream);
    if (status == 0 || nobody_listens(status)) /* what has come can still be read */
        status = sp_stream_read(&socket->stream, socket->most + header);
    if (status == 0 && socket->protocol == SP_REQ && !is_answer(socket)) {
        sp_stream_drop(&socket->stream);
        status = -EAGAIN;
    }
    if (status < 0 && status != -EAGAIN) {
        disconnect(socket);
        return status;
    }
    watch(socket);
    if (status == 0)
        sp_stream_take(&socket->stream, header, ret_bytes, ret_size);
    return status;
}

int request_socket_receive(struct request_socket *socket, int timeout_ms, void **ret_bytes, size_t *ret_size,
                           struct error *ret_error)
{
    int64_t start = clock_ms();
    for (;;) {
        int status = receive_once(socket, ret_bytes, ret_size);
        if (status == 0)
            return 0;
        const char *path = socket->address.sun_path;
        if (status == -ENOMEM)
            return error_set(ret_error, ENOMEM, "%s: no memory for a message", path);
        if (status != -EAGAIN)
            return error_set(ret_error, ECONNRESET, "%s: the connection has ended", path);
        int left = clock_left(start, timeout_ms);
        if (left == 0)
            return error_set(ret_error, timeout_ms == 0 ? EAGAIN : ETIMEDOUT, "%s: nothing came", path);
        struct pollfd wait = {.fd = socket->epoll, .events = POLLIN};
        poll(&wait, 1, left);
    }
}
