/* A channel is an nng socket with its address: the only header through which the rest of the project sees nng. nng makes a
 * dozen threads a process, which inherit the opener's affinity: open channels before pinning. A REP channel speaks nng's
 * protocol without nng (reply_socket.h, which the front uses itself because it answers out of order). */
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

/* Listens on or dials `ipc://<path>` (at most 107 bytes, as Unix sockets have it: -ENAMETOOLONG). A dialled channel
 * reconnects by itself. Dialling a PAIR returns at once and connects when somebody listens; a REQ needs a listener now
 * (-ENOENT, -ECONNREFUSED). REQ never resends: when its server ends, the receive is -ECONNRESET. A message above 64 MiB
 * closes the connection. Any thread. */
int channel_listen(enum channel_kind kind, const char *path, struct channel **ret_channel, struct error *ret_error);
int channel_dial(enum channel_kind kind, const char *path, struct channel **ret_channel, struct error *ret_error);
void channel_close(struct channel *channel);

/* For a process that ends soon: forgets a dialled channel and leaves its socket to the end of the process, because
 * nng_close() of 1.5.2 may wait for ever for a connection that ends at the same moment. */
void channel_abandon(struct channel *channel);

/* A descriptor that polls readable when a message can be received. */
int channel_fd(struct channel *channel);

/* A descriptor that polls readable when a message can be sent (a dialled PAIR: the other side
 * is connected; a listener has none: -1). */
int channel_send_fd(struct channel *channel);

/* A listener's send goes to whoever it received from last and never waits: who is gone has no answer. It has no threads
 * either: a dialler is connected once the listener's owner has received, be it nothing. For a dialler,
 * timeout_ms: negative waits for ever, 0 tries once. -EAGAIN (tried once) / -ETIMEDOUT, -ECONNRESET when closed. One
 * thread sends and one receives at a time. */
int channel_send(struct channel *channel, const void *bytes, size_t size, int timeout_ms, struct error *ret_error);

/* Receives a message into memory that the caller frees (8-aligned). */
int channel_receive(struct channel *channel, int timeout_ms, void **ret_bytes, size_t *ret_size,
                    struct error *ret_error);
