/* The request socket's operations: one JSON object in, one out. What takes time goes on in requests.c. */
#include "cmd/front/front.h"

#include "cmd/front/utf8.h"
#include "proto/cleanup.h"
#include "proto/parse.h"

#include <string.h>

#define MESSAGE_MAX ((size_t)16 << 20)

struct operation {
    const char *name;
    void (*run)(struct front *front, const struct reply_address *from, const json_t *message);
};

const struct tokenizer *api_tokenizer(const struct front *front, const char *field, struct fault *ret_fault)
{
    if (!front->tokenizer)
        fault_set(ret_fault, "bad_request", field, "%s: the model has no tokenizer; use tokens", field);
    return front->tokenizer;
}

static void generate(struct front *front, const struct reply_address *from, const json_t *message)
{
    request_generate(front, from, message, REQUEST_GENERATE);
}

static void submit(struct front *front, const struct reply_address *from, const json_t *message)
{
    request_generate(front, from, message, REQUEST_SUBMIT);
}

static json_t *ids_json(const int32_t *ids, size_t count)
{
    json_t *array = json_array();
    for (size_t i = 0; i < count; i++)
        json_array_append_new(array, json_integer(ids[i]));
    return array;
}

static void tokenize(struct front *front, const struct reply_address *from, const json_t *message)
{
    static const char *const names[] = {"op", "text", NULL};
    struct fault fault;
    struct error error;
    const char *text = NULL;
    size_t length = 0, count = 0;
    _cleanup_free_ int32_t *ids = NULL;
    const struct tokenizer *tokenizer = NULL;
    int status = fields_check(message, names, &fault);
    if (status == 0)
        status = field_string(message, "text", true, &text, &length, &fault);
    if (status == 0)
        status = fault_set(&fault, "bad_request", "text", "text: is missing");
    if (status == 1 && !(tokenizer = api_tokenizer(front, "text", &fault)))
        status = -EINVAL;
    if (status == 1 && tokenizer_encode(tokenizer, text, length, &ids, &count, &error) < 0)
        status = fault_set(&fault, "bad_request", "text", "%s", error.text);
    if (status < 0)
        front_reply_fault(front, from, &fault);
    else
        front_reply(front, from, json_pack("{s:b, s:o}", "ok", 1, "ids", ids_json(ids, count)));
}

static void detokenize(struct front *front, const struct reply_address *from, const json_t *message)
{
    static const char *const names[] = {"op", "tokens", "skip_special", NULL};
    struct fault fault;
    struct error error;
    _cleanup_free_ int32_t *tokens = NULL;
    _cleanup_free_ char *text = NULL;
    size_t count = 0, length = 0;
    bool skip_special = false;
    const struct tokenizer *tokenizer = NULL;
    int status = fields_check(message, names, &fault);
    if (status == 0)
        status = field_bool(message, "skip_special", &skip_special, &fault) < 0 ? -EINVAL : 0;
    if (status == 0)
        status = field_tokens(message, "tokens", front->scheduler.facts.config.vocab, &tokens, &count, &fault);
    if (status == 0)
        status = fault_set(&fault, "bad_request", "tokens", "tokens: is missing");
    if (status == 1 && !front->tokenizer)
        status = fault_set(&fault, "bad_request", "tokens", "tokens: the model has no tokenizer, its ids have no text");
    if (status == 1)
        tokenizer = front->tokenizer;
    if (status == 1 && tokenizer_decode(tokenizer, tokens, count, skip_special, &text, &length, &error) < 0)
        status = fault_set(&fault, "bad_request", "tokens", "%s", error.text);
    if (status < 0)
        front_reply_fault(front, from, &fault);
    else
        front_reply(front, from, json_pack("{s:b, s:o}", "ok", 1, "text", json_stringn(text, length)));
}

/* An operation that takes no fields and is answered by `make`. */
static void answer_plain(struct front *front, const struct reply_address *from, const json_t *message,
                         json_t *(*make)(const struct front *front))
{
    static const char *const names[] = {"op", NULL};
    struct fault fault;
    if (fields_check(message, names, &fault) < 0)
        front_reply_fault(front, from, &fault);
    else
        front_reply(front, from, make(front));
}

static void instance_status(struct front *front, const struct reply_address *from, const json_t *message)
{
    answer_plain(front, from, message, stats_status);
}

static void stats(struct front *front, const struct reply_address *from, const json_t *message)
{
    answer_plain(front, from, message, stats_counters);
}

static void metrics(struct front *front, const struct reply_address *from, const json_t *message)
{
    answer_plain(front, from, message, stats_metrics);
}

static const struct operation operations[] = {
    {"generate", generate}, {"submit", submit},       {"next", request_next},     {"cancel", request_cancel},
    {"tokenize", tokenize}, {"score", request_score}, {"detokenize", detokenize}, {"status", instance_status},
    {"stats", stats},       {"metrics", metrics},
};
#define OPERATIONS (sizeof operations / sizeof operations[0])

/* Parses one JSON object. Numbers beyond 64 bits are read as reals, so that the field they stand in can be named. */
static json_t *parse(const char *bytes, size_t size, struct fault *ret_fault)
{
    if (size > MESSAGE_MAX) {
        fault_set(ret_fault, "bad_request", NULL, "the message has %zu bytes, at most %zu are taken", size,
                  MESSAGE_MAX);
        return NULL;
    }
    size_t offset;
    if (!utf8_valid(bytes, size, &offset)) {
        fault_set(ret_fault, "bad_request", NULL, "the message is not UTF-8 at byte %zu", offset);
        return NULL;
    }
    const size_t flags = JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL;
    json_error_t error;
    json_t *message = json_loadb(bytes, size, flags, &error);
    if (!message && json_error_code(&error) == json_error_numeric_overflow)
        message = json_loadb(bytes, size, flags | JSON_DECODE_INT_AS_REAL, &error);
    if (!message && error.text[0] == 0) /* jansson says nothing where memory is short */
        fault_set(ret_fault, "model_error", NULL,
                  "no memory to read the message; send a smaller one or free some memory");
    else if (!message)
        fault_set(ret_fault, "bad_request", NULL, "the message is not JSON: %.200s (line %d, column %d)", error.text,
                  error.line, error.column);
    else if (!json_is_object(message)) {
        json_decref(message);
        message = NULL;
        fault_set(ret_fault, "bad_request", NULL, "the message must be a JSON object with `op`");
    }
    return message;
}

static void refuse_operation(const char *name, struct fault *ret_fault)
{
    const char *names[OPERATIONS];
    for (size_t i = 0; i < OPERATIONS; i++)
        names[i] = operations[i].name;
    const char *near = name ? nearest_name(name, names, OPERATIONS) : NULL;
    if (!name)
        fault_set(ret_fault, "bad_request", "op", "op: is missing; `{\"op\":\"status\"}` is the simplest request");
    else
        fault_set(ret_fault, "bad_request", "op", "op: there is no operation of that name%s%s%s",
                  near ? "; did you mean `" : "", near ? near : "", near ? "`?" : "");
}

void api_take(struct front *front, const struct reply_address *from, const char *bytes, size_t size)
{
    struct fault fault;
    const char *name = NULL;
    json_t *message = parse(bytes, size, &fault);
    int status = message ? field_string(message, "op", false, &name, NULL, &fault) : -EINVAL;
    const struct operation *operation = NULL;
    for (size_t i = 0; name && i < OPERATIONS; i++)
        if (strcmp(operations[i].name, name) == 0)
            operation = &operations[i];
    if (operation)
        operation->run(front, from, message);
    else {
        if (status >= 0)
            refuse_operation(name, &fault);
        front_reply_fault(front, from, &fault);
    }
    json_decref(message);
}
