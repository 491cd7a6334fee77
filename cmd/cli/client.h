/* Talking to an instance: JSON requests to the front's socket (api.ipc) and to the supervisor's (supervisor.ipc). */
#pragma once

#include "cmd/supervisor/instance.h"
#include "proto/channel.h"

#include <jansson.h>

struct client {
    struct channel *channel;
    int interrupt_fd;   /* -1: signals have their default effect */
    const char *server; /* for messages: "instance default" */
};

/* Dials `file` in the instance's folder, and waits a while for a server that is being restarted. -ENOENT: no such
 * instance runs;
 * -EINTR: a signal came. */
int client_open(const struct instance *instance, const char *file, int interrupt_fd, struct client *ret_client,
                struct error *ret_error);
void client_close(struct client *client);

/* Sends `request` (whose reference it takes over) and waits for the answer, at most `timeout_ms` (negative: no limit).
 * An answer with "ok": false becomes -EREMOTEIO and its message. -EINTR: a signal came; the request may be repeated or
 * replaced by another. */
int client_call(struct client *client, json_t *request, int timeout_ms, json_t **ret_answer, struct error *ret_error);

/* One request to the supervisor of a live instance. */
int client_ask_supervisor(const struct instance *instance, const char *op, json_t **ret_answer,
                          struct error *ret_error);

/* Prints when and why the size of the pool has changed last, if it has; `pool`: of "status" or of "pool". */
void client_print_change(const json_t *pool);
