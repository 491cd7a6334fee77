#include "cmd/front/chat.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "cmd/front/utf8.h"
#include "proto/cleanup.h"

struct prompt {
    const struct tokenizer *tokenizer;
    int32_t *ids;
    size_t count, capacity;
    struct error *error;
};

/* What differs from family to family. */
struct chat_template {
    const char *model_type;
    const char *reasoning_end; /* token */
    int (*render)(struct prompt *prompt, const struct chat_message *messages, size_t count,
                  const struct chat_options *options);
};

static int put_ids(struct prompt *prompt, const int32_t *ids, size_t count)
{
    if (count > prompt->capacity - prompt->count) {
        size_t capacity = prompt->count + count + prompt->capacity / 2 + 64;
        int32_t *grown = reallocarray(prompt->ids, capacity, sizeof *grown);
        if (!grown)
            return error_set(prompt->error, ENOMEM, "out of memory for a prompt of %zu tokens", capacity);
        prompt->ids = grown;
        prompt->capacity = capacity;
    }
    for (size_t i = 0; i < count; i++)
        prompt->ids[prompt->count++] = ids[i];
    return 0;
}

static int put_marker(struct prompt *prompt, const char *content)
{
    int32_t id = tokenizer_id(prompt->tokenizer, content);

    if (id < 0)
        return error_set(prompt->error, ENOTSUP,
                         "the tokenizer has no token %s, which the chat template needs: use a raw prompt", content);
    return put_ids(prompt, &id, 1);
}

static int put_markers(struct prompt *prompt, const char *const *contents, size_t count)
{
    int status = 0;

    for (size_t i = 0; i < count && status == 0; i++)
        status = put_marker(prompt, contents[i]);
    return status;
}

static int put_text(struct prompt *prompt, const char *text, size_t length)
{
    _cleanup_free_ int32_t *ids = NULL;
    size_t count = 0;
    int status = tokenizer_encode_plain(prompt->tokenizer, text, length, &ids, &count, prompt->error);

    return status < 0 ? status : put_ids(prompt, ids, count);
}

/* -- GLM: [gMASK]<sop>, then turns without anything between them -- */

struct span {
    const char *text;
    size_t length;
};

static struct span strip_newlines(struct span span, bool front, bool back)
{
    while (front && span.length > 0 && *span.text == '\n') {
        span.text++;
        span.length--;
    }
    while (back && span.length > 0 && span.text[span.length - 1] == '\n')
        span.length--;
    return span;
}

/* The place behind the last `needle` before `end`, or NULL. */
static const char *behind_last(const char *text, const char *end, const char *needle)
{
    size_t length = strlen(needle);

    for (const char *at = end; (size_t)(at - text) >= length; at--)
        if (memcmp(at - length, needle, length) == 0)
            return at;
    return NULL;
}

/* Clients send answers back as they got them: the reasoning may stand in the content, closed by </think>. */
static void split_reasoning(const struct chat_message *message, struct span *ret_reasoning, struct span *ret_content)
{
    const char *content = message->content, *close = strstr(content, "</think>");

    *ret_content = (struct span){content, strlen(content)};
    *ret_reasoning = (struct span){message->reasoning, message->reasoning ? strlen(message->reasoning) : 0};
    if (message->reasoning || !close)
        return;
    const char *open = behind_last(content, close, "<think>"), *start = open ? open : content;
    const char *end = content + strlen(content), *text = behind_last(content, end, "</think>");
    *ret_reasoning = strip_newlines((struct span){start, (size_t)(close - start)}, true, true);
    *ret_content = strip_newlines((struct span){text, (size_t)(end - text)}, true, false);
}

static int glm_assistant(struct prompt *prompt, const struct chat_message *message, bool keep_reasoning)
{
    struct span reasoning, content;
    int status;

    split_reasoning(message, &reasoning, &content);
    if ((status = put_markers(prompt, (const char *const[]){"<|assistant|>", "<think>"}, 2)) < 0)
        return status;
    if (keep_reasoning && (status = put_text(prompt, reasoning.text, reasoning.length)) < 0)
        return status;
    if ((status = put_marker(prompt, "</think>")) < 0)
        return status;
    return put_text(prompt, content.text, content.length);
}

static bool is_tool(const struct chat_message *message)
{
    return strcmp(message->role, "tool") == 0 || strcmp(message->role, "observation") == 0;
}

/* Results that follow each other share one <|observation|>. */
static int glm_tool(struct prompt *prompt, const struct chat_message *message, bool first)
{
    int status;

    if ((first && (status = put_marker(prompt, "<|observation|>")) < 0) ||
        (status = put_marker(prompt, "<tool_response>")) < 0 ||
        (status = put_text(prompt, message->content, strlen(message->content))) < 0)
        return status;
    return put_marker(prompt, "</tool_response>");
}

static int glm_text(struct prompt *prompt, const char *marker, const char *content)
{
    int status = put_marker(prompt, marker);

    return status < 0 ? status : put_text(prompt, content, strlen(content));
}

static int glm_message(struct prompt *prompt, const struct chat_message *messages, size_t index, size_t last_user)
{
    const struct chat_message *message = &messages[index];

    if (strcmp(message->role, "system") == 0)
        return glm_text(prompt, "<|system|>", message->content);
    if (strcmp(message->role, "user") == 0)
        return glm_text(prompt, "<|user|>", message->content);
    if (strcmp(message->role, "assistant") == 0)
        return glm_assistant(prompt, message, last_user == SIZE_MAX || index > last_user);
    if (is_tool(message))
        return glm_tool(prompt, message, index == 0 || !is_tool(&messages[index - 1]));
    return error_set(prompt->error, EINVAL, "\"%s\" is not one of system, user, assistant, tool, observation",
                     utf8_quoted(message->role).text);
}

static int glm_render(struct prompt *prompt, const struct chat_message *messages, size_t count,
                      const struct chat_options *options)
{
    size_t last_user = SIZE_MAX;
    int status = put_markers(prompt, (const char *const[]){"[gMASK]", "<sop>"}, 2);

    if (status == 0 && options->think != CHAT_THINK_OFF)
        status = glm_text(prompt, "<|system|>",
                          options->think == CHAT_THINK_HIGH ? "Reasoning Effort: High" : "Reasoning Effort: Max");
    for (size_t i = 0; i < count; i++)
        if (strcmp(messages[i].role, "user") == 0)
            last_user = i;
    for (size_t i = 0; i < count && status == 0; i++) {
        status = glm_message(prompt, messages, i, last_user);
        if (status == -EINVAL)
            status = error_prefix(prompt->error, status, "messages[%zu].role", i);
        else if (status == -EILSEQ || status == -E2BIG)
            status = error_prefix(prompt->error, status, "messages[%zu].content", i);
    }
    if (status == 0)
        status = put_markers(prompt, (const char *const[]){"<|assistant|>", "<think>", "</think>"},
                             options->think == CHAT_THINK_OFF ? 3 : 2);
    return status;
}

static const struct chat_template templates[] = {
    {.model_type = "glm_moe_dsa", .reasoning_end = "</think>", .render = glm_render},
};

const struct chat_template *chat_template_find(const char *model_type)
{
    for (size_t i = 0; i < sizeof templates / sizeof *templates; i++)
        if (strcmp(templates[i].model_type, model_type) == 0)
            return &templates[i];
    return NULL;
}

int32_t chat_reasoning_end(const struct chat_template *template, const struct tokenizer *tokenizer)
{
    return tokenizer_id(tokenizer, template->reasoning_end);
}

int chat_think_parse(const char *text, enum chat_think *ret_think, struct error *ret_error)
{
    static const struct {
        const char *name;
        enum chat_think think;
    } names[] = {{"off", CHAT_THINK_OFF}, {"on", CHAT_THINK_MAX}, {"high", CHAT_THINK_HIGH}, {"max", CHAT_THINK_MAX}};

    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        if (strcmp(names[i].name, text) == 0) {
            *ret_think = names[i].think;
            return 0;
        }
    }
    return error_set(ret_error, EINVAL, "think: \"%s\" is not one of off, on, high, max", utf8_quoted(text).text);
}

int chat_render(const struct tokenizer *tokenizer, const struct chat_message *messages, size_t count,
                const struct chat_options *options, int32_t **ret_ids, size_t *ret_count, struct error *ret_error)
{
    struct prompt prompt = {.tokenizer = tokenizer, .error = ret_error};

    if (count == 0)
        return error_set(ret_error, EINVAL, "messages: empty, at least one message is needed");
    for (size_t i = 0; i < count; i++) {
        if (!messages[i].role)
            return error_set(ret_error, EINVAL, "messages[%zu].role: missing", i);
        if (!messages[i].content)
            return error_set(ret_error, EINVAL, "messages[%zu].content: missing", i);
    }
    int status = options->template->render(&prompt, messages, count, options);
    if (status < 0) {
        free(prompt.ids);
        return status;
    }
    *ret_ids = prompt.ids;
    *ret_count = prompt.count;
    return 0;
}
