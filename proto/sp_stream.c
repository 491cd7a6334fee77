#include "proto/sp_stream.h"

#include "proto/cleanup.h"

#include <endian.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>

#define FIRST_ROOM ((size_t)64 << 10) /* a length is believed only as far as bytes come */
#define GREETING_BYTES 8u
#define FRAME_MESSAGE 1

#define GREETING(protocol)                                                                                             \
    {                                                                                                                  \
        0, 'S', 'P', 0, 0, (unsigned char)(protocol), 0, 0                                                             \
    }

int sp_stream_open(int fd, enum sp_protocol ours, struct sp_stream *ret_stream)
{
    const unsigned char greeting[GREETING_BYTES] = GREETING(ours);
    /* It is the first thing on the socket: the buffer takes 8 bytes, or the other side is gone. */
    ssize_t sent = send(fd, greeting, sizeof greeting, MSG_NOSIGNAL);
    if (sent != (ssize_t)sizeof greeting)
        return sent < 0 ? -errno : -ECONNRESET;
    *ret_stream = (struct sp_stream){.fd = fd, .theirs = ours == SP_REQ ? SP_REP : ours == SP_REP ? SP_REQ : ours};
    return 0;
}

void sp_stream_close(struct sp_stream *stream)
{
    if (stream->fd >= 0)
        close(stream->fd);
    free(stream->message);
    free(stream->unsent);
    *stream = (struct sp_stream){.fd = -1};
}

/* Reads up to `wanted` bytes in all into `to`, which has `*bytes`. 0: all are there. */
static int fill(int fd, unsigned char *to, size_t *bytes, size_t wanted)
{
    while (*bytes < wanted) {
        ssize_t got = recv(fd, to + *bytes, wanted - *bytes, 0);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return got < 0 ? -errno : -ECONNRESET;
        *bytes += (size_t)got;
    }
    return 0;
}

int sp_stream_greet(struct sp_stream *stream)
{
    if (stream->greeted)
        return 0;
    const unsigned char theirs[GREETING_BYTES] = GREETING(stream->theirs);
    int status = fill(stream->fd, stream->head, &stream->head_bytes, GREETING_BYTES);
    if (status < 0)
        return status;
    if (memcmp(stream->head, theirs, GREETING_BYTES) != 0)
        return -EPROTO;
    stream->greeted = true;
    stream->head_bytes = 0;
    return 0;
}

int sp_stream_read(struct sp_stream *stream, size_t most)
{
    int status = sp_stream_greet(stream);
    if (status == 0)
        status = fill(stream->fd, stream->head, &stream->head_bytes, SP_FRAME_BYTES);
    if (status < 0)
        return status;
    uint64_t size;
    memcpy(&size, stream->head + 1, sizeof size);
    size = be64toh(size);
    if (stream->head[0] != FRAME_MESSAGE || size > most)
        return -EMSGSIZE;
    stream->message_size = (size_t)size;
    do {
        if (stream->message_bytes == stream->message_room || !stream->message) {
            size_t room = stream->message_room < FIRST_ROOM ? FIRST_ROOM : 2 * stream->message_room;
            room = room < size ? room : (size_t)size;
            unsigned char *larger = realloc(stream->message, room > 0 ? room : 1);
            if (!larger)
                return -ENOMEM;
            stream->message = larger;
            stream->message_room = room;
        }
        status = fill(stream->fd, stream->message, &stream->message_bytes, stream->message_room);
    } while (status == 0 && stream->message_bytes < size);
    return status;
}

void sp_stream_take(struct sp_stream *stream, size_t header_bytes, void **ret_bytes, size_t *ret_size)
{
    *ret_size = stream->message_size - header_bytes;
    memmove(stream->message, stream->message + header_bytes, *ret_size);
    *ret_bytes = take_pointer(stream->message);
    sp_stream_drop(stream);
}

void sp_stream_drop(struct sp_stream *stream)
{
    free(stream->message);
    stream->message = NULL;
    stream->message_bytes = stream->message_room = stream->message_size = stream->head_bytes = 0;
}

/* After a frame that is not whole nothing can follow. */
static int give_up(struct sp_stream *stream, int status)
{
    free(stream->unsent);
    stream->unsent = NULL;
    stream->unsent_from = stream->unsent_bytes = 0;
    shutdown(stream->fd, SHUT_WR);
    return status;
}

int sp_stream_write(struct sp_stream *stream, const void *header, size_t header_bytes, const void *bytes, size_t size)
{
    unsigned char head[SP_FRAME_BYTES + SP_HEADER_MAX] = {FRAME_MESSAGE};
    uint64_t length = htobe64(header_bytes + size);
    memcpy(head + 1, &length, sizeof length);
    if (header_bytes > 0)
        memcpy(head + SP_FRAME_BYTES, header, header_bytes);
    size_t head_bytes = SP_FRAME_BYTES + header_bytes, sent = 0;
    if (stream->unsent_bytes == 0) {
        struct iovec parts[] = {{head, head_bytes}, {(void *)(uintptr_t)bytes, size}};
        const struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2};
        ssize_t taken;
        do
            taken = sendmsg(stream->fd, &message, MSG_NOSIGNAL);
        while (taken < 0 && errno == EINTR);
        if (taken < 0 && errno != EAGAIN)
            return give_up(stream, -errno);
        sent = taken < 0 ? 0 : (size_t)taken;
    }
    if (sent == head_bytes + size)
        return 0;
    if (stream->unsent_from > 0)
        memmove(stream->unsent, stream->unsent + stream->unsent_from, stream->unsent_bytes);
    stream->unsent_from = 0;
    unsigned char *larger = realloc(stream->unsent, stream->unsent_bytes + head_bytes + size - sent);
    if (!larger)
        return give_up(stream, -ENOMEM);
    stream->unsent = larger;
    unsigned char *at = larger + stream->unsent_bytes;
    stream->unsent_bytes += head_bytes + size - sent;
    if (sent < head_bytes) {
        memcpy(at, head + sent, head_bytes - sent);
        at += head_bytes - sent;
        sent = head_bytes;
    }
    if (sent < head_bytes + size)
        memcpy(at, (const unsigned char *)bytes + (sent - head_bytes), head_bytes + size - sent);
    return sp_stream_flush(stream);
}

int sp_stream_flush(struct sp_stream *stream)
{
    while (stream->unsent_bytes > 0) {
        ssize_t sent = send(stream->fd, stream->unsent + stream->unsent_from, stream->unsent_bytes, MSG_NOSIGNAL);
        if (sent < 0 && errno == EINTR)
            continue;
        if (sent < 0)
            return errno == EAGAIN ? 0 : give_up(stream, -errno);
        stream->unsent_from += (size_t)sent;
        stream->unsent_bytes -= (size_t)sent;
    }
    free(stream->unsent);
    stream->unsent = NULL;
    stream->unsent_from = 0;
    return 0;
}

int sp_address(const char *path, struct sockaddr_un *ret_address, struct error *ret_error)
{
    *ret_address = (struct sockaddr_un){.sun_family = AF_UNIX};
    if (strlen(path) >= sizeof ret_address->sun_path)
        return error_set(ret_error, ENAMETOOLONG,
                         "%s: %zu bytes are too many for the path of a socket, %zu may be used; set "
                         "CALYPTE_RUNTIME_DIR to a shorter one",
                         path, strlen(path), sizeof ret_address->sun_path - 1);
    strcpy(ret_address->sun_path, path);
    return 0;
}
