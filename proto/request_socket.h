/* The asking side of nng's protocols over a Unix socket (sp_stream.h): REQ, to a listener of nng's or ours, and PAIR, for
 * the front's channel to a worker. nng's own dialler is not used anywhere: with that of 1.5.2 closing may hang, an answer
 * that came before it was asked for is lost when the connection ends, a descriptor that cannot be had aborts the
 * process. No threads: one descriptor to poll. One thread. */
#pragma once

#include "proto/error.h"
#include "proto/sp_stream.h"

struct request_socket;

/* Dials as SP_REQ or SP_PAIR; messages that come are of `most` bytes at most. -ENAMETOOLONG. SP_PAIR connects if somebody
 * listens and does not wait. SP_REQ waits until the listener has greeted: -ENOENT and -ECONNREFUSED where nobody listens
 * or who does ends meanwhile, -ETIMEDOUT after 10 s, -EINTR as soon as `interrupt_fd` (-1: none) polls readable. */
int request_socket_dial(enum sp_protocol protocol, const char *path, size_t most, int interrupt_fd,
                        struct request_socket **ret_socket, struct error *ret_error);

/* Closes at once. What the other side has not taken yet is lost. */
void request_socket_close(struct request_socket *socket);

/* A descriptor that polls readable when there is something to do: a message, the other side's greeting or end, or room for
 * the rest of what was sent. request_socket_receive does it. */
int request_socket_fd(const struct request_socket *socket);

/* Connects where there is no connection and somebody listens; does not wait. */
void request_socket_connect(struct request_socket *socket);

/* timeout_ms: negative waits for ever, 0 tries once. A message is taken when the one before is out, and its rest is sent
 * by later calls. -EAGAIN (tried once), -ETIMEDOUT: nothing of it was taken: nobody listens, or has greeted, or reads.
 * Where the connection has ended it connects anew, and what was unread is lost. A request replaces the one before, and
 * is never sent again. */
int request_socket_send(struct request_socket *socket, const void *bytes, size_t size, int timeout_ms,
                        struct error *ret_error);

/* A message in memory that the caller frees (8-aligned). REQ: the answer to the last request; others are dropped. -EAGAIN,
 * -ETIMEDOUT: none yet. -ECONNRESET: there is no connection, or it has just ended, after everything that had come. */
int request_socket_receive(struct request_socket *socket, int timeout_ms, void **ret_bytes, size_t *ret_size,
                           struct error *ret_error);
