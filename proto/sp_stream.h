/* One connection of the SP protocols, which nng and nanomsg speak, over a Unix stream socket; for both sides
 * (reply_socket.h, request_socket.h). The protocols' IPC mapping, version 0: 8 bytes of greeting each way, then frames
 * of a type byte, a 64-bit big-endian length, a header where the protocol has one, and the body. Nothing here waits.
 * One thread. */
#pragma once

#include "proto/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <sys/un.h>

#define SP_HEADER_MAX 64u
#define SP_FRAME_BYTES 9u /* type and length */

/* By their numbers in the greeting. */
enum sp_protocol {
    SP_PAIR = 0x10, /* version 0: a message is its body */
    SP_REQ = 0x30,  /* a message begins with the request's id, whose highest bit is set */
    SP_REP = 0x31,  /* a message begins with what came: hops, which have that bit clear, and the id */
};

/* All zero but fd: no connection. */
struct sp_stream {
    int fd; /* -1: none */
    enum sp_protocol theirs;
    bool greeted;

    unsigned char head[SP_FRAME_BYTES]; /* greeting, then each frame's beginning */
    size_t head_bytes;
    unsigned char *message;
    size_t message_bytes, message_room, message_size; /* got, allocated, announced */

    unsigned char *unsent;
    size_t unsent_from, unsent_bytes; /* the rest that waits: where it begins, its length */
};

/* Greets as `ours` on a fresh non-blocking socket, and takes it over; an error leaves it to the caller. */
int sp_stream_open(int fd, enum sp_protocol ours, struct sp_stream *ret_stream);
/* Closes the descriptor and frees what was half read and half sent. */
void sp_stream_close(struct sp_stream *stream);

/* 0: the other side has greeted, as the partner of `ours`. -EAGAIN: not yet. -EPROTO: as something else. -ECONNRESET
 * and others: it is gone. */
int sp_stream_greet(struct sp_stream *stream);

/* Reads on. 0: a message of `message_size` bytes is whole, and sp_stream_take or sp_stream_drop comes next. -EAGAIN:
 * later. Others, -EMSGSIZE of more than `most` bytes among them: the connection cannot be read on. Memory grows as bytes
 * come, whatever was announced. */
int sp_stream_read(struct sp_stream *stream, size_t most);

/* Hands out the whole message without its first `header_bytes`, in memory that the caller frees (8-aligned). */
void sp_stream_take(struct sp_stream *stream, size_t header_bytes, void **ret_bytes, size_t *ret_size);
void sp_stream_drop(struct sp_stream *stream);

/* Sends a message: what the other side does not take at once is kept, for sp_stream_flush, behind what is kept already.
 * An error, there too: the rest is given up, and the other side sees the connection end; what it has sent can still be
 * read. */
int sp_stream_write(struct sp_stream *stream, const void *header, size_t header_bytes, const void *bytes, size_t size);
int sp_stream_flush(struct sp_stream *stream);

/* The address of a socket at `path`, which has 107 bytes at most: -ENAMETOOLONG. */
int sp_address(const char *path, struct sockaddr_un *ret_address, struct error *ret_error);
