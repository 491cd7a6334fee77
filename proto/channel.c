#include "proto/channel.h"

#include "proto/cleanup.h"
#include "proto/clock.h"
#include "proto/reply_socket.h"
#include "proto/request_socket.h"

#include <poll.h>
#include <string.h>
#include <sys/un.h>

#define RECEIVE_MAX ((size_t)64 << 20)

/* One of the two. */
struct channel {
    struct request_socket *requests; /* a dialler */
    struct reply_socket *replies;    /* a listener */
    struct reply_address asked;      /* its: who sent last, where an answer goes */
    char path[sizeof((struct sockaddr_un){0}).sun_path];
};

void channel_close(struct channel *channel)
{
    if (!channel)
        return;
    request_socket_close(channel->requests);
    reply_socket_close(channel->replies);
    free(channel);
}

static void channel_closep(struct channel **channel)
{
    channel_close(*channel);
}

int channel_listen(enum channel_kind kind, const char *path, struct channel **ret_channel, struct error *ret_error)
{
    _cleanup_(channel_closep) struct channel *channel = calloc(1, sizeof *channel);
    if (!channel)
        return error_set(ret_error, ENOMEM, "%s: no memory for a socket", path);
    int status =
        reply_socket_listen(kind == CHANNEL_PAIR ? SP_PAIR : SP_REP, path, RECEIVE_MAX, &channel->replies, ret_error);
    if (status < 0)
        return status;
    strcpy(channel->path, path); /* which is not too long, or nobody listens */
    *ret_channel = take_pointer(channel);
    return 0;
}

int channel_dial(enum channel_kind kind, const char *path, int interrupt_fd, struct channel **ret_channel,
                 struct error *ret_error)
{
    _cleanup_(channel_closep) struct channel *channel = calloc(1, sizeof *channel);
    if (!channel)
        return error_set(ret_error, ENOMEM, "%s: no memory for a socket", path);
    int status = request_socket_dial(kind == CHANNEL_PAIR ? SP_PAIR : SP_REQ, path, RECEIVE_MAX, interrupt_fd,
                                     &channel->requests, ret_error);
    if (status < 0)
        return status;
    *ret_channel = take_pointer(channel);
    return 0;
}

int channel_fd(struct channel *channel)
{
    return channel->requests ? request_socket_fd(channel->requests) : reply_socket_fd(channel->replies);
}

void channel_connect(struct channel *channel)
{
    request_socket_connect(channel->requests);
}

int channel_send(struct channel *channel, const void *bytes, size_t size, int timeout_ms, struct error *ret_error)
{
    if (channel->requests)
        return request_socket_send(channel->requests, bytes, size, timeout_ms, ret_error);
    reply_socket_send(channel->replies, &channel->asked, bytes, size);
    return 0;
}

static int receive_request(struct channel *channel, int timeout_ms, void **ret_bytes, size_t *ret_size,
                           struct error *ret_error)
{
    for (int64_t start = clock_ms();;) {
        while (reply_socket_receive(channel->replies, &channel->asked, ret_bytes, ret_size) == 0)
            if (*ret_bytes)
                return 0;
        int left = clock_left(start, timeout_ms);
        if (left == 0)
            return error_set(ret_error, timeout_ms == 0 ? EAGAIN : ETIMEDOUT, "%s: nothing came", channel->path);
        struct pollfd wait = {.fd = channel_fd(channel), .events = POLLIN};
        if (poll(&wait, 1, left) < 0 && errno != EINTR)
            return error_set(ret_error, errno, "%s: cannot poll: %s", channel->path, strerror(errno));
    }
}

int channel_receive(struct channel *channel, int timeout_ms, void **ret_bytes, size_t *ret_size,
                    struct error *ret_error)
{
    if (channel->requests)
        return request_socket_receive(channel->requests, timeout_ms, ret_bytes, ret_size, ret_error);
    return receive_request(channel, timeout_ms, ret_bytes, ret_size, ret_error);
}
