#include "proto/channel.h"

#include "proto/cleanup.h"
#include "proto/reply_socket.h"

#include <nng/nng.h>
#include <nng/protocol/pair0/pair.h>
#include <nng/protocol/reqrep0/req.h>
#include <nng/transport/ipc/ipc.h>

#include <poll.h>
#include <stdbool.h>
#include <string.h>
#include <sys/un.h>

#define RECEIVE_MAX ((size_t)64 << 20)
#define URL_MAX (sizeof "ipc://" + sizeof((struct sockaddr_un){0}).sun_path)

struct channel {
    struct reply_socket *replies; /* a listener: all that there is */
    struct reply_address asked;   /* who sent last: where an answer goes */
    nng_socket socket;            /* a dialler */
    bool open;
    int receive_fd, send_fd;
    char url[URL_MAX];
};

static int nng_to_errno(int code)
{
    switch (code) {
    case NNG_EINTR: return EINTR;
    case NNG_ENOMEM: return ENOMEM;
    case NNG_EBUSY: return EBUSY;
    case NNG_ETIMEDOUT: return ETIMEDOUT;
    case NNG_ECONNREFUSED: return ECONNREFUSED;
    case NNG_ECLOSED: return ECONNRESET;
    case NNG_EAGAIN: return EAGAIN;
    case NNG_EADDRINUSE: return EADDRINUSE;
    case NNG_ENOENT: return ENOENT;
    case NNG_EPERM: return EPERM;
    case NNG_EMSGSIZE: return EMSGSIZE;
    case NNG_ECONNABORTED:
    case NNG_ECONNRESET: return ECONNRESET;
    case NNG_ENOFILES: return EMFILE;
    case NNG_ENOSPC: return ENOSPC;
    default: return EIO;
    }
}

static int channel_error(int code, const char *what, const char *url, struct error *ret_error)
{
    return error_set(ret_error, nng_to_errno(code), "%s: %s: %s", url, what, nng_strerror(code));
}

void channel_close(struct channel *channel)
{
    if (!channel)
        return;
    if (channel->open)
        nng_close(channel->socket);
    reply_socket_close(channel->replies);
    free(channel);
}

void channel_abandon(struct channel *channel)
{
    free(channel);
}

static void channel_closep(struct channel **channel)
{
    channel_close(*channel);
}

static int channel_open(enum channel_kind kind, const char *path, struct channel **ret_channel, struct error *ret_error)
{
    struct sockaddr_un address;
    if (strlen(path) >= sizeof address.sun_path)
        return error_set(ret_error, ENAMETOOLONG,
                         "%s: %zu bytes are too many for the path of a socket, %zu may be used; set "
                         "CALYPTE_RUNTIME_DIR to a shorter one",
                         path, strlen(path), sizeof address.sun_path - 1);
    _cleanup_(channel_closep) struct channel *channel = calloc(1, sizeof *channel);
    if (!channel)
        return error_set(ret_error, ENOMEM, "%s: no memory for a socket", path);
    snprintf(channel->url, sizeof channel->url, "ipc://%s", path);

    int code = kind == CHANNEL_PAIR ? nng_pair0_open(&channel->socket) : nng_req0_open(&channel->socket);
    if (code != 0)
        return channel_error(code, "cannot open a socket", channel->url, ret_error);
    channel->open = true;
    code = nng_socket_set_size(channel->socket, NNG_OPT_RECVMAXSZ, RECEIVE_MAX);
    if (code == 0)
        code = nng_socket_set_ms(channel->socket, NNG_OPT_RECONNMINT, 10);
    if (code == 0)
        code = nng_socket_set_ms(channel->socket, NNG_OPT_RECONNMAXT, 200);
    if (code == 0 && kind == CHANNEL_REQ)
        code = nng_socket_set_ms(channel->socket, NNG_OPT_REQ_RESENDTIME, NNG_DURATION_INFINITE);
    if (code == 0)
        code = nng_socket_get_int(channel->socket, NNG_OPT_RECVFD, &channel->receive_fd);
    if (code == 0)
        code = nng_socket_get_int(channel->socket, NNG_OPT_SENDFD, &channel->send_fd);
    if (code != 0)
        return channel_error(code, "cannot set up the socket", channel->url, ret_error);
    *ret_channel = take_pointer(channel);
    return 0;
}

int channel_listen(enum channel_kind kind, const char *path, struct channel **ret_channel, struct error *ret_error)
{
    _cleanup_(channel_closep) struct channel *channel = calloc(1, sizeof *channel);
    if (!channel)
        return error_set(ret_error, ENOMEM, "%s: no memory for a socket", path);
    int status = reply_socket_listen(kind == CHANNEL_PAIR ? REPLY_PAIR : REPLY_REP, path, RECEIVE_MAX,
                                     &channel->replies, ret_error);
    if (status < 0)
        return status;
    snprintf(channel->url, sizeof channel->url, "ipc://%s", path);
    channel->receive_fd = reply_socket_fd(channel->replies);
    channel->send_fd = -1;
    *ret_channel = take_pointer(channel);
    return 0;
}

int channel_dial(enum channel_kind kind, const char *path, struct channel **ret_channel, struct error *ret_error)
{
    _cleanup_(channel_closep) struct channel *channel = NULL;
    int status = channel_open(kind, path, &channel, ret_error);
    if (status < 0)
        return status;
    int code = nng_dial(channel->socket, channel->url, NULL, kind == CHANNEL_PAIR ? NNG_FLAG_NONBLOCK : 0);
    /* whoever listened ended before the greeting */
    if (code == NNG_ECONNSHUT || code == NNG_ECONNRESET || code == NNG_ECLOSED)
        code = NNG_ECONNREFUSED;
    if (code != 0)
        return channel_error(code, "cannot connect", channel->url, ret_error);
    *ret_channel = take_pointer(channel);
    return 0;
}

int channel_fd(struct channel *channel)
{
    return channel->receive_fd;
}

int channel_send_fd(struct channel *channel)
{
    return channel->send_fd;
}

static int set_timeout(struct channel *channel, const char *option, int timeout_ms)
{
    return timeout_ms == 0
               ? 0
               : nng_socket_set_ms(channel->socket, option, timeout_ms < 0 ? NNG_DURATION_INFINITE : timeout_ms);
}

int channel_send(struct channel *channel, const void *bytes, size_t size, int timeout_ms, struct error *ret_error)
{
    if (channel->replies) {
        reply_socket_send(channel->replies, &channel->asked, bytes, size);
        return 0;
    }
    nng_msg *message;
    int code = nng_msg_alloc(&message, 0);
    if (code != 0)
        return channel_error(code, "cannot send", channel->url, ret_error);
    code = nng_msg_append(message, bytes, size);
    if (code == 0)
        code = set_timeout(channel, NNG_OPT_SENDTIMEO, timeout_ms);
    if (code == 0)
        code = nng_sendmsg(channel->socket, message, timeout_ms == 0 ? NNG_FLAG_NONBLOCK : 0);
    if (code != 0) {
        nng_msg_free(message); /* nng keeps a message only when it has taken it */
        return channel_error(code, "cannot send", channel->url, ret_error);
    }
    return 0;
}

static int receive_request(struct channel *channel, int timeout_ms, void **ret_bytes, size_t *ret_size,
                           struct error *ret_error)
{
    for (;;) {
        while (reply_socket_receive(channel->replies, &channel->asked, ret_bytes, ret_size) == 0)
            if (*ret_bytes)
                return 0;
        struct pollfd wait = {.fd = channel->receive_fd, .events = POLLIN};
        int ready = timeout_ms == 0 ? 0 : poll(&wait, 1, timeout_ms);
        if (ready == 0)
            return error_set(ret_error, timeout_ms == 0 ? EAGAIN : ETIMEDOUT, "%s: nothing came", channel->url);
        if (ready < 0 && errno != EINTR)
            return error_set(ret_error, errno, "%s: cannot poll: %s", channel->url, strerror(errno));
    }
}

int channel_receive(struct channel *channel, int timeout_ms, void **ret_bytes, size_t *ret_size,
                    struct error *ret_error)
{
    if (channel->replies)
        return receive_request(channel, timeout_ms, ret_bytes, ret_size, ret_error);
    nng_msg *message;
    int code = set_timeout(channel, NNG_OPT_RECVTIMEO, timeout_ms);
    if (code == 0)
        code = nng_recvmsg(channel->socket, &message, timeout_ms == 0 ? NNG_FLAG_NONBLOCK : 0);
    if (code != 0)
        return channel_error(code, "cannot receive", channel->url, ret_error);
    size_t size = nng_msg_len(message);
    void *bytes = malloc(size > 0 ? size : 1);
    if (bytes && size > 0)
        memcpy(bytes, nng_msg_body(message), size);
    nng_msg_free(message);
    if (!bytes)
        return error_set(ret_error, ENOMEM, "%s: no memory for a message of %zu bytes", channel->url, size);
    *ret_bytes = bytes;
    *ret_size = size;
    return 0;
}
