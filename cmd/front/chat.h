/* Messages of a conversation to the token ids of a prompt, as the model's family was trained on them. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "cmd/front/tokenizer.h"
#include "proto/error.h"

struct chat_message {
    const char *role;      /* system, user, assistant, tool or observation (two words for one thing) */
    const char *content;   /* UTF-8; for an assistant it may still hold its <think>...</think> */
    const char *reasoning; /* of an assistant, or NULL */
};

enum chat_think {
    CHAT_THINK_OFF,
    CHAT_THINK_HIGH,
    CHAT_THINK_MAX, /* what "on" means */
};

struct chat_template;

struct chat_options {
    const struct chat_template *template;
    enum chat_think think;
};

/* The template for a `model_type` of config.json, or NULL when the family has none (then only raw prompts work). */
const struct chat_template *chat_template_find(const char *model_type);

/* The token with which the model ends its reasoning, if the prompt asked for some; -1: the tokenizer has none. */
int32_t chat_reasoning_end(const struct chat_template *template, const struct tokenizer *tokenizer);

/* "off", "on", "high" or "max". -EINVAL naming the field `think`. */
int chat_think_parse(const char *text, enum chat_think *ret_think, struct error *ret_error);

/* The prompt that asks for the next answer. Role markers are single ids; the text of every message is encoded with
 * tokenizer_encode_plain, so no message can forge one. *ret_ids is for free(). Errors: -EINVAL for a missing or unknown
 * field, named as messages[i].role; -ENOTSUP when the tokenizer lacks a marker; those of tokenizer_encode. */
int chat_render(const struct tokenizer *tokenizer, const struct chat_message *messages, size_t count,
                const struct chat_options *options, int32_t **ret_ids, size_t *ret_count, struct error *ret_error);
