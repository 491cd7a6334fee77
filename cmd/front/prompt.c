/* The prompt of a request: text through the chat template, raw text, messages, or token ids. */
#include "cmd/front/front.h"
#include "proto/cleanup.h"

#include <string.h>

#define MESSAGES_MAX 4096u

/* Turns a library's refusal into a fault; a line "field: ..." or "messages[i].role: ..." names the field itself. */
static int refuse(int status, const char *field, const struct error *error, struct fault *ret_fault)
{
    const char *code = status == -ENOMEM ? "model_error" : status == -E2BIG ? "too_long" : "bad_request";
    const char *colon = strchr(error->text, ':');
    char name[64];
    if (strncmp(error->text, "messages[", 9) == 0 && colon && (size_t)(colon - error->text) < sizeof name) {
        memcpy(name, error->text, (size_t)(colon - error->text));
        name[colon - error->text] = 0;
        field = name;
    }
    return fault_set(ret_fault, code, field, "%s", error->text);
}

static int parse_think(const json_t *message, enum chat_think *ret_think, struct fault *ret_fault)
{
    const json_t *value = json_object_get(message, "think");
    const char *text;
    struct error error;
    *ret_think = CHAT_THINK_OFF;
    if (json_is_boolean(value))
        text = json_is_true(value) ? "on" : "off";
    else {
        int status = field_string(message, "think", false, &text, NULL, ret_fault);
        if (status <= 0)
            return status;
    }
    int status = chat_think_parse(text, ret_think, &error);
    return status < 0 ? refuse(status, "think", &error, ret_fault) : 0;
}

/* `messages` as an array of struct chat_message for free(); the strings belong to the JSON. */
static int parse_messages(const json_t *array, struct chat_message **ret_messages, size_t *ret_count,
                          struct fault *ret_fault)
{
    static const char *const names[] = {"role", "content", "reasoning", NULL};
    size_t count = json_array_size(array);
    if (!json_is_array(array) || count == 0 || count > MESSAGES_MAX)
        return fault_set(ret_fault, "bad_request", "messages", "messages: must be an array of 1 to %u messages",
                         MESSAGES_MAX);
    _cleanup_free_ struct chat_message *messages = calloc(count, sizeof *messages);
    if (!messages)
        return fault_set(ret_fault, "model_error", "messages", "messages: no memory");
    for (size_t i = 0; i < count; i++) {
        const json_t *object = json_array_get(array, i);
        char path[64];
        snprintf(path, sizeof path, "messages[%zu]", i);
        if (!json_is_object(object))
            return fault_set(ret_fault, "bad_request", path, "%s: must be an object with role and content", path);
        struct fault inner;
        int status = fields_check(object, names, &inner);
        if (status == 0)
            status = field_string(object, "role", false, &messages[i].role, NULL, &inner);
        if (status >= 0)
            status = field_string(object, "content", false, &messages[i].content, NULL, &inner);
        if (status >= 0)
            status = field_string(object, "reasoning", false, &messages[i].reasoning, NULL, &inner);
        if (status < 0) {
            snprintf(path, sizeof path, "messages[%zu].%.32s", i, inner.field);
            return fault_set(ret_fault, inner.code, path, "messages[%zu].%s", i, inner.error.text);
        }
    }
    *ret_messages = take_pointer(messages);
    *ret_count = count;
    return 0;
}

static int render(const struct front *front, const struct chat_message *messages, size_t count, enum chat_think think,
                  const char *field, int32_t **ret_tokens, size_t *ret_count, bool *ret_thinks, struct fault *ret_fault)
{
    struct error error;
    if (!front->template)
        return fault_set(ret_fault, "bad_request", field,
                         "%s: %s models have no chat template; send raw: true with a prompt", field,
                         front->scheduler.facts.config.model_type);
    struct chat_options options = {.template = front->template, .think = think};
    *ret_thinks = think != CHAT_THINK_OFF;
    int status = chat_render(front->tokenizer, messages, count, &options, ret_tokens, ret_count, &error);
    return status < 0 ? refuse(status, field, &error, ret_fault) : 0;
}

static int from_text(const struct front *front, const json_t *message, const char *text, size_t length,
                     int32_t **ret_tokens, size_t *ret_count, bool *ret_thinks, struct fault *ret_fault)
{
    bool raw = false;
    enum chat_think think;
    const char *system = NULL;
    struct error error;
    if (field_bool(message, "raw", &raw, ret_fault) < 0 || parse_think(message, &think, ret_fault) < 0 ||
        field_string(message, "system", false, &system, NULL, ret_fault) < 0)
        return -EINVAL;
    if (raw) {
        if (system || think != CHAT_THINK_OFF)
            return fault_set(ret_fault, "bad_request", system ? "system" : "think",
                             "%s: means nothing with raw: true, which uses no template", system ? "system" : "think");
        int status = tokenizer_encode(front->tokenizer, text, length, ret_tokens, ret_count, &error);
        return status < 0 ? refuse(status, "prompt", &error, ret_fault) : 0;
    }
    if (strlen(text) != length)
        return fault_set(ret_fault, "bad_request", "prompt",
                         "prompt: must not hold the character U+0000 unless raw is true");
    struct chat_message messages[2];
    size_t count = 0;
    if (system)
        messages[count++] = (struct chat_message){.role = "system", .content = system};
    messages[count++] = (struct chat_message){.role = "user", .content = text};
    return render(front, messages, count, think, "prompt", ret_tokens, ret_count, ret_thinks, ret_fault);
}

static int from_messages(const struct front *front, const json_t *message, int32_t **ret_tokens, size_t *ret_count,
                         bool *ret_thinks, struct fault *ret_fault)
{
    _cleanup_free_ struct chat_message *messages = NULL;
    size_t count;
    enum chat_think think;
    bool raw = false;
    const char *system = NULL;
    if (parse_messages(json_object_get(message, "messages"), &messages, &count, ret_fault) < 0 ||
        parse_think(message, &think, ret_fault) < 0 || field_bool(message, "raw", &raw, ret_fault) < 0 ||
        field_string(message, "system", false, &system, NULL, ret_fault) < 0)
        return -EINVAL;
    if (raw || system)
        return fault_set(ret_fault, "bad_request", raw ? "raw" : "system", "%s: means nothing with messages",
                         raw ? "raw" : "system");
    return render(front, messages, count, think, "messages", ret_tokens, ret_count, ret_thinks, ret_fault);
}

int prompt_tokens(const struct front *front, const json_t *message, int32_t **ret_tokens, size_t *ret_count,
                  bool *ret_thinks, struct fault *ret_fault)
{
    const char *text = NULL;
    *ret_thinks = false;
    size_t length = 0;
    _cleanup_free_ int32_t *tokens = NULL;
    size_t count = 0;
    const json_t *messages = json_object_get(message, "messages");
    bool has_messages = messages && !json_is_null(messages);
    int has_text = field_string(message, "prompt", true, &text, &length, ret_fault);
    int has_tokens =
        has_text < 0 ? 0
                     : field_tokens(message, "tokens", front->scheduler.facts.config.vocab, &tokens, &count, ret_fault);
    if (has_text < 0 || has_tokens < 0)
        return -EINVAL;
    if (has_text + has_tokens + has_messages != 1)
        return fault_set(ret_fault, "bad_request", "prompt",
                         "prompt: exactly one of prompt, tokens and messages is needed");
    const char *field = has_text ? "prompt" : has_tokens ? "tokens" : "messages";
    if (has_tokens) {
        enum chat_think think;
        const char *system = NULL;
        if (parse_think(message, &think, ret_fault) < 0 ||
            field_string(message, "system", false, &system, NULL, ret_fault) < 0)
            return -EINVAL;
        if (system || think != CHAT_THINK_OFF)
            return fault_set(ret_fault, "bad_request", system ? "system" : "think", "%s: means nothing with tokens",
                             system ? "system" : "think");
    } else {
        if (!api_tokenizer(front, field, ret_fault))
            return -EINVAL;
        int status = has_text ? from_text(front, message, text, length, &tokens, &count, ret_thinks, ret_fault)
                              : from_messages(front, message, &tokens, &count, ret_thinks, ret_fault);
        if (status < 0)
            return status;
    }
    if (count == 0)
        return fault_set(ret_fault, "bad_request", field, "%s: is empty; at least one token is needed", field);
    /* A tokenizer may know ids that the model has no row for. */
    for (size_t i = 0; i < count; i++)
        if (tokens[i] < 0 || (uint32_t)tokens[i] >= front->scheduler.facts.config.vocab)
            return fault_set(ret_fault, "bad_request", field, "%s: its token %d is not in the model's vocabulary of %u",
                             field, (int)tokens[i], front->scheduler.facts.config.vocab);
    *ret_tokens = take_pointer(tokens);
    *ret_count = count;
    return 0;
}
