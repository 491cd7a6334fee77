#include "cmd/cli/client.h"

#include "cmd/cli/interrupt.h"
#include "proto/cleanup.h"
#include "proto/clock.h"

#include <string.h>

#define SEND_MS 10000
#define SUPERVISOR_MS 10000
#define DIAL_MS 20
#define RESTART_MS 15000

int client_open(const struct instance *instance, const char *file, int interrupt_fd, struct client *ret_client,
                struct error *ret_error)
{
    char path[108];
    *ret_client = (struct client){.interrupt_fd = interrupt_fd, .server = instance->name};
    if (!instance_alive(instance))
        return instance_missing(instance, ret_error);
    instance_path(instance, file, path);
    int status = channel_dial(CHANNEL_REQ, path, interrupt_fd, &ret_client->channel, ret_error);
    /* The process behind the socket may be on its way back: its supervisor lives. */
    for (int waited = 0; (status == -ECONNREFUSED || status == -ENOENT) && waited < RESTART_MS; waited += DIAL_MS) {
        if (interrupt_wait(interrupt_fd, -1, DIAL_MS) == WAIT_INTERRUPTED)
            return error_set(ret_error, EINTR, "interrupted");
        if (!instance_alive(instance))
            return instance_missing(instance, ret_error);
        status = channel_dial(CHANNEL_REQ, path, interrupt_fd, &ret_client->channel, ret_error);
    }
    return status;
}

void client_close(struct client *client)
{
    channel_close(client->channel);
    client->channel = NULL;
}

/* 0, or what an answer with "ok": false says. */
static int check_answer(const struct client *client, const json_t *answer, struct error *ret_error)
{
    if (!json_is_object(answer))
        return error_set(ret_error, EBADMSG, "instance %s sent an answer that is no JSON object", client->server);
    if (json_is_true(json_object_get(answer, "ok")))
        return 0;
    const json_t *error = json_object_get(answer, "error");
    const char *code = json_string_value(json_object_get(error, "code")),
               *message = json_string_value(json_object_get(error, "message"));
    const char *field = json_string_value(json_object_get(error, "field"));
    if (!message)
        message = "no reason was given";
    if (code && !strcmp(code, "bad_request"))
        code = ""; /* the message says what is wrong with it */
    if (field && !strncmp(message, field, strlen(field)))
        field = NULL; /* the message begins with it */
    return error_set(ret_error, EREMOTEIO, "%s%s%s%s%s%s", code ? code : "error", code && !code[0] ? "" : ": ", message,
                     field ? " (" : "", field ? field : "", field ? ")" : "");
}

static int receive(struct client *client, int timeout_ms, void **ret_bytes, size_t *ret_size, struct error *ret_error)
{
    int64_t start = clock_ms();
    for (int left = timeout_ms; left != 0; left = clock_left(start, timeout_ms)) {
        if (interrupt_wait(client->interrupt_fd, channel_fd(client->channel), left) == WAIT_INTERRUPTED)
            return error_set(ret_error, EINTR, "interrupted");
        int status = channel_receive(client->channel, 0, ret_bytes, ret_size, ret_error);
        if (status == -ECONNRESET)
            return error_set(ret_error, ECONNRESET,
                             "instance %s: the process that worked on this request ended; ask again", client->server);
        if (status != -EAGAIN)
            return status ? error_prefix(ret_error, status, "instance %s", client->server) : 0;
    }
    return error_set(ret_error, ETIMEDOUT, "instance %s does not answer: see its logs", client->server);
}

int client_call(struct client *client, json_t *request, int timeout_ms, json_t **ret_answer, struct error *ret_error)
{
    _cleanup_free_ char *text = request ? json_dumps(request, JSON_COMPACT) : NULL;
    _cleanup_free_ void *bytes = NULL;
    json_error_t json_error;
    size_t size;
    json_decref(request);
    if (!text)
        return error_set(ret_error, ENOMEM, "out of memory for a request");
    int status = channel_send(client->channel, text, strlen(text), SEND_MS, ret_error);
    if (status)
        return error_prefix(ret_error, status, "instance %s", client->server);
    status = receive(client, timeout_ms, &bytes, &size, ret_error);
    if (status)
        return status;
    json_t *answer = json_loadb(bytes, size, 0, &json_error);
    status = check_answer(client, answer, ret_error);
    if (status) {
        json_decref(answer);
        return status;
    }
    *ret_answer = answer;
    return 0;
}

int client_ask_supervisor(const struct instance *instance, const char *op, json_t **ret_answer, struct error *ret_error)
{
    struct client client;
    int status = client_open(instance, "supervisor.ipc", -1, &client, ret_error);
    if (!status)
        status = client_call(&client, json_pack("{s:s}", "op", op), SUPERVISOR_MS, ret_answer, ret_error);
    client_close(&client);
    return status;
}

void client_print_change(const json_t *pool)
{
    const json_t *change = json_object_get(pool, "last_change");
    if (change)
        printf("changed   %.0f s ago to %" JSON_INTEGER_FORMAT " slots, from %" JSON_INTEGER_FORMAT ": %s\n",
               json_number_value(json_object_get(change, "seconds_ago")),
               json_integer_value(json_object_get(change, "to")), json_integer_value(json_object_get(change, "from")),
               json_string_value(json_object_get(change, "why")));
}
