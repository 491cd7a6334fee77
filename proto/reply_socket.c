#include "proto/reply_socket.h"

#include "proto/cleanup.h"
#include "proto/clock.h"

#include <linux/sockios.h>
#include <stdbool.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/queue.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#define CONNECTIONS_MAX 512u
#define BACKLOG SOMAXCONN /* nng's clients do not wait for room in it */
#define UNSENT_MAX ((size_t)1 << 20)
#define LINGER_MS 1000

struct connection {
    TAILQ_ENTRY(connection) link;
    struct sp_stream stream;
    uint32_t id;
    uint32_t unanswered; /* requests */
    bool broken;
    uint32_t events; /* that epoll watches for */
};

TAILQ_HEAD(connection_list, connection);

struct reply_socket {
    enum sp_protocol protocol;
    int listener, epoll;
    bool listening; /* epoll watches the listener */
    size_t most;
    char path[sizeof((struct sockaddr_un){0}).sun_path];
    struct connection_list connections; /* the one that was heard last is last */
    uint32_t count, last_id;
};

static void watch_listener(struct reply_socket *socket, bool listening)
{
    struct epoll_event event = {.events = listening ? EPOLLIN : 0, .data.ptr = NULL};
    if (listening != socket->listening && epoll_ctl(socket->epoll, EPOLL_CTL_MOD, socket->listener, &event) == 0)
        socket->listening = listening;
}

static void watch(struct reply_socket *socket, struct connection *connection)
{
    uint32_t events = (connection->stream.unsent_bytes > 0 ? EPOLLOUT : 0) |
                      (connection->stream.unsent_bytes <= UNSENT_MAX ? EPOLLIN : 0);
    struct epoll_event event = {.events = events, .data.ptr = connection};
    if (events != connection->events && epoll_ctl(socket->epoll, EPOLL_CTL_MOD, connection->stream.fd, &event) == 0)
        connection->events = events;
}

static void drop(struct reply_socket *socket, struct connection *connection)
{
    TAILQ_REMOVE(&socket->connections, connection, link);
    socket->count--;
    /* A child that is just being started may hold the descriptor too, and then closing it would not end epoll's watch. */
    epoll_ctl(socket->epoll, EPOLL_CTL_DEL, connection->stream.fd, NULL);
    sp_stream_close(&connection->stream);
    free(connection);
    watch_listener(socket, true);
}

/* Makes room for a new connection: the one that has been silent longest and waits for no answer goes, or, where all
 * wait, nobody new is let in. */
static void make_room(struct reply_socket *socket)
{
    struct connection *connection;
    TAILQ_FOREACH (connection, &socket->connections, link)
        if (connection->unanswered == 0 && connection->stream.unsent_bytes == 0) {
            drop(socket, connection);
            return;
        }
    if (!TAILQ_EMPTY(&socket->connections)) /* drop() listens again */
        watch_listener(socket, false);
}

static void accept_one(struct reply_socket *socket)
{
    if (socket->count >= CONNECTIONS_MAX) {
        make_room(socket);
        if (socket->count >= CONNECTIONS_MAX)
            return;
    }
    _cleanup_close_ int fd = accept4(socket->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0) {
        if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS)
            make_room(socket);
        return;
    }
    struct connection *connection = calloc(1, sizeof *connection);
    if (!connection)
        return;
    connection->events = EPOLLIN;
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = connection};
    if (sp_stream_open(fd, socket->protocol, &connection->stream) < 0 ||
        epoll_ctl(socket->epoll, EPOLL_CTL_ADD, fd, &event) < 0) {
        free(connection);
        return;
    }
    (void)take_fd(fd);
    if (++socket->last_id == 0)
        socket->last_id = 1;
    connection->id = socket->last_id;
    TAILQ_INSERT_TAIL(&socket->connections, connection, link);
    socket->count++;
}

/* Bytes of a request's header, which ends with the id: its highest bit is set. 0: there is none. */
static size_t request_header(const struct connection *connection)
{
    for (size_t end = 4; end <= connection->stream.message_size && end <= SP_HEADER_MAX; end += 4)
        if (connection->stream.message[end - 4] & 0x80)
            return end;
    return 0;
}

/* Splits a whole message into header and body. */
static int take_message(const struct reply_socket *socket, struct connection *connection,
                        struct reply_address *ret_from, void **ret_bytes, size_t *ret_size)
{
    size_t header = socket->protocol == SP_REP ? request_header(connection) : 0;
    if (header == 0 && socket->protocol == SP_REP)
        return -EPROTO;
    *ret_from = (struct reply_address){.connection = connection->id, .header_bytes = header};
    memcpy(ret_from->header, connection->stream.message, header);
    sp_stream_take(&connection->stream, header, ret_bytes, ret_size);
    connection->unanswered++;
    return 0;
}

int reply_socket_receive(struct reply_socket *socket, struct reply_address *ret_from, void **ret_bytes,
                         size_t *ret_size)
{
    struct epoll_event event;
    /* One event at a time: epoll then goes round among those that are ready. */
    for (unsigned tries = 0; tries < CONNECTIONS_MAX && epoll_wait(socket->epoll, &event, 1, 0) == 1; tries++) {
        struct connection *connection = event.data.ptr;
        if (!connection) {
            accept_one(socket);
            continue;
        }
        int status = connection->broken ? -EPIPE : 0;
        if (status == 0 && event.events & EPOLLOUT)
            status = sp_stream_flush(&connection->stream);
        if (status == 0)
            status = event.events & EPOLLIN ? sp_stream_read(&connection->stream, socket->most + SP_HEADER_MAX)
                     : event.events & (EPOLLHUP | EPOLLERR) ? -ECONNRESET
                                                            : -EAGAIN;
        if (status == 0)
            status = take_message(socket, connection, ret_from, ret_bytes, ret_size);
        if (status == 0) {
            TAILQ_REMOVE(&socket->connections, connection, link);
            TAILQ_INSERT_TAIL(&socket->connections, connection, link);
            watch(socket, connection);
            return 0;
        }
        if (status == -EAGAIN) {
            watch(socket, connection);
            continue;
        }
        *ret_from = (struct reply_address){.connection = connection->id};
        *ret_bytes = NULL;
        *ret_size = 0;
        drop(socket, connection);
        return 0;
    }
    return -EAGAIN;
}

/* The connection's end is told by reply_socket_receive, not in the middle of what the caller does now. */
static void give_up(struct connection *connection)
{
    connection->broken = true;
    shutdown(connection->stream.fd, SHUT_RDWR);
}

void reply_socket_send(struct reply_socket *socket, const struct reply_address *to, const void *bytes, size_t size)
{
    struct connection *connection;
    TAILQ_FOREACH (connection, &socket->connections, link)
        if (connection->id == to->connection)
            break;
    if (!connection || connection->broken)
        return;
    if (connection->unanswered > 0)
        connection->unanswered--;
    if (sp_stream_write(&connection->stream, to->header, to->header_bytes, bytes, size) < 0)
        give_up(connection);
    watch(socket, connection);
}

int reply_socket_fd(const struct reply_socket *socket)
{
    return socket->epoll;
}

static bool has_read_all(const struct connection *connection)
{
    int bytes;
    return connection->stream.unsent_bytes == 0 && ioctl(connection->stream.fd, SIOCOUTQ, &bytes) == 0 && bytes == 0;
}

/* The last answers: what waits is sent, then the end. False: the connection is done with. */
static bool send_rest(struct reply_socket *socket, struct connection *connection)
{
    if (!connection->stream.greeted || connection->broken || sp_stream_flush(&connection->stream) < 0 ||
        has_read_all(connection))
        return false;
    if (connection->stream.unsent_bytes == 0)
        shutdown(connection->stream.fd, SHUT_WR);
    watch(socket, connection);
    return true;
}

/* What the client still sends is for nobody. False: it has closed. */
static bool discard(const struct connection *connection)
{
    unsigned char bytes[4096];
    ssize_t got;
    while ((got = recv(connection->stream.fd, bytes, sizeof bytes, 0)) > 0 || (got < 0 && errno == EINTR))
        continue;
    return got < 0 && errno == EAGAIN;
}

/* A client that hears of the end and of its answer at once may look at the end only, as nng's do; and one that sends while
 * we close loses what it has not read. So the end comes first from them, or after a while. */
static void linger(struct reply_socket *socket)
{
    struct connection *connection, *next;
    for (connection = TAILQ_FIRST(&socket->connections); connection; connection = next) {
        next = TAILQ_NEXT(connection, link);
        if (!send_rest(socket, connection))
            drop(socket, connection);
    }
    struct epoll_event event;
    for (int64_t end = clock_ms() + LINGER_MS, left = LINGER_MS; socket->count > 0 && left > 0;
         left = end - clock_ms()) {
        watch_listener(socket, false);
        if (epoll_wait(socket->epoll, &event, 1, (int)left) != 1)
            continue;
        connection = event.data.ptr;
        if (connection && ((event.events & EPOLLIN && !discard(connection)) || event.events & (EPOLLHUP | EPOLLERR) ||
                           (event.events & EPOLLOUT && !send_rest(socket, connection))))
            drop(socket, connection);
    }
}

void reply_socket_close(struct reply_socket *socket)
{
    if (!socket)
        return;
    struct connection *connection;
    if (socket->epoll >= 0)
        linger(socket);
    while ((connection = TAILQ_FIRST(&socket->connections)))
        drop(socket, connection);
    if (socket->listener >= 0) {
        close(socket->listener);
        unlink(socket->path);
    }
    if (socket->epoll >= 0)
        close(socket->epoll);
    free(socket);
}

static void reply_socket_closep(struct reply_socket **socket)
{
    reply_socket_close(*socket);
}

/* Binds; a file that a process left which listens no more is in the way only once. */
static int bind_path(int fd, const struct sockaddr_un *address)
{
    if (bind(fd, (const struct sockaddr *)address, sizeof *address) == 0)
        return 0;
    if (errno != EADDRINUSE)
        return -errno;
    _cleanup_close_ int probe = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (probe < 0)
        return -errno;
    if (connect(probe, (const struct sockaddr *)address, sizeof *address) == 0 || errno != ECONNREFUSED)
        return -EADDRINUSE;
    if (unlink(address->sun_path) < 0 || bind(fd, (const struct sockaddr *)address, sizeof *address) < 0)
        return -errno;
    return 0;
}

int reply_socket_listen(enum sp_protocol protocol, const char *path, size_t most, struct reply_socket **ret_socket,
                        struct error *ret_error)
{
    struct sockaddr_un address;
    int status = sp_address(path, &address, ret_error);
    if (status < 0)
        return status;
    _cleanup_(reply_socket_closep) struct reply_socket *made = calloc(1, sizeof *made);
    if (!made)
        return error_set(ret_error, ENOMEM, "%s: no memory for a socket", path);
    TAILQ_INIT(&made->connections);
    made->protocol = protocol;
    made->most = most;
    made->listening = true;
    made->listener = -1;
    strcpy(made->path, path);
    made->epoll = epoll_create1(EPOLL_CLOEXEC);
    _cleanup_close_ int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (made->epoll < 0 || fd < 0)
        return error_set(ret_error, errno, "%s: cannot open a socket: %s", path, strerror(errno));
    status = bind_path(fd, &address);
    if (status < 0)
        return error_set(ret_error, -status, "%s: cannot listen: %s", path, strerror(-status));
    made->listener = take_fd(fd);
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = NULL};
    /* chmod before listen: nobody can connect in between */
    if (chmod(path, 0600) < 0 || listen(made->listener, BACKLOG) < 0 ||
        epoll_ctl(made->epoll, EPOLL_CTL_ADD, made->listener, &event) < 0)
        return error_set(ret_error, errno, "%s: cannot listen: %s", path, strerror(errno));
    *ret_socket = take_pointer(made);
    return 0;
}
