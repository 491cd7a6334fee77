/* The listening side of nng's protocols over a Unix socket (sp_stream.h): REP, for `nngcat --req` and every nng client, and
 * PAIR, for the front's channel to a worker. Answers go to where a message came from. nng's own listener is not used
 * anywhere: that of 1.5.2 never accepts again once a client has gone between connect() and the greeting
 * (nanomsg/nng#1518). No threads: one descriptor to poll. One thread. */
#pragma once

#include "proto/error.h"
#include "proto/sp_stream.h"

#include <stdint.h>

/* Where an answer goes. A request in flight is known by all of it: nng's REQ sends it again with the same id after a
 * while. */
struct reply_address {
    uint32_t connection;                 /* 0: nobody waits */
    unsigned char header[SP_HEADER_MAX]; /* hops, request id */
    size_t header_bytes;
};

struct reply_socket;

/* Listens as SP_REP or SP_PAIR at `path` (mode 0600). A socket that nobody listens at any more is replaced; -EADDRINUSE
 * where somebody does, -ENAMETOOLONG. A request above `most` bytes closes its connection. */
int reply_socket_listen(enum sp_protocol protocol, const char *path, size_t most, struct reply_socket **ret_socket,
                        struct error *ret_error);

/* Writes the answers that wait, lets the clients read them, for a second at most, and closes. */
void reply_socket_close(struct reply_socket *socket);

/* A descriptor that polls readable when reply_socket_receive has something to do. */
int reply_socket_fd(const struct reply_socket *socket);

/* One thing that happened: a request in memory that the caller frees, or *ret_bytes NULL: the connection ret_from->connection
 * is gone. -EAGAIN: nothing more for now. */
int reply_socket_receive(struct reply_socket *socket, struct reply_address *ret_from, void **ret_bytes,
                         size_t *ret_size);

/* Answers. Never waits: what the client does not take at once is kept, and nothing more is read from it above 1 MiB. A
 * connection that is gone, or memory that is short, drops the answer (and the connection). */
void reply_socket_send(struct reply_socket *socket, const struct reply_address *to, const void *bytes, size_t size);
