/* A channel is a message socket with its address: who dials (request_socket.h) and who listens (reply_socket.h) under one
 * name, with timeouts. Both speak nng's protocols, so that either end may be an nng program. (The front listens through
 * reply_socket.h itself, because it answers out of order.) No threads; one thread at a time. */
#pragma once

#include "proto/error.h"

#include <stddef.h>
#include <stdint.h>

enum channel_kind {
    CHANNEL_PAIR, /* front <-> worker */
    CHANNEL_REQ,  /* a client */
    CHANNEL_REP,  /* a server that answers in order (the supervisor) */
};

struct channel;

/* Listens at or dials the Unix socket `path` (at most 107 bytes: -ENAMETOOLONG). Dialling a PAIR returns at once, and where
 * nobody listens yet a send connects. A REQ needs a listener now, and waits for its greeting: -ENOENT, -ECONNREFUSED,
 * -ETIMEDOUT after 10 s, -EINTR as soon as `interrupt_fd` (-1: none) polls readable. A connection that has ended is made
 * anew by the next send; nothing is sent twice: a REQ whose server ends receives -ECONNRESET. A message above 64 MiB
 * closes the connection. */
int channel_listen(enum channel_kind kind, const char *path, struct channel **ret_channel, struct error *ret_error);
int channel_dial(enum channel_kind kind, const char *path, int interrupt_fd, struct channel **ret_channel,
                 struct error *ret_error);

/* A dialler closes at once; a listener lets the others read the last answers, for a second at most. */
void channel_close(struct channel *channel);

/* A descriptor that polls readable when channel_receive has something to do: a message, or a connection's greeting, rest or
 * end (-EAGAIN, -ECONNRESET). So a dialler whose send was -EAGAIN sends again after a receive. */
int channel_fd(struct channel *channel);

/* A dialler: connects where there is no connection and somebody listens; does not wait. */
void channel_connect(struct channel *channel);

/* A listener's send goes to whoever it received from last and never waits: who is gone has no answer. A dialler is connected
 * once the listener's owner has received, be it nothing. For a dialler, timeout_ms: negative waits for ever, 0 tries once.
 * -EAGAIN (tried once), -ETIMEDOUT: nobody takes it yet. 0: it is taken, and goes out now or with later receives. */
int channel_send(struct channel *channel, const void *bytes, size_t size, int timeout_ms, struct error *ret_error);

/* Receives a message into memory that the caller frees (8-aligned). -EAGAIN, -ETIMEDOUT as above; a dialler -ECONNRESET: its
 * connection has ended, or there is none. */
int channel_receive(struct channel *channel, int timeout_ms, void **ret_bytes, size_t *ret_size,
                    struct error *ret_error);
