#include "cmd/front/field.h"

#include "proto/cleanup.h"
#include "proto/parse.h"

#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <string.h>

int fault_set(struct fault *ret_fault, const char *code, const char *field, const char *format, ...)
{
    ret_fault->code = code;
    snprintf(ret_fault->field, sizeof ret_fault->field, "%s", field ? field : "");
    char text[sizeof ret_fault->error.text];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    error_write(&ret_fault->error, "%s", text); /* one line, whatever a client's names hold */
    return -EINVAL;
}

json_t *fault_json(const struct fault *fault)
{
    json_t *error = json_pack("{s:s, s:s}", "code", fault->code, "message", "");
    /* A message may quote a part of what a client sent, cut at any byte: jansson takes whole UTF-8 only. */
    json_t *message = json_string(fault->error.text);
    if (!message)
        message = json_string("the request holds something that is wrong and cannot be shown");
    json_object_set_new(error, "message", message);
    if (fault->field[0])
        json_object_set_new(error, "field", json_string(fault->field));
    return json_pack("{s:b, s:o}", "ok", 0, "error", error);
}

int fields_check(const json_t *object, const char *const *names, struct fault *ret_fault)
{
    size_t count = 0;
    while (names[count])
        count++;
    /* jansson's iterator wants a variable object; nothing is changed. */
    union {
        const json_t *constant;
        json_t *variable;
    } view = {.constant = object};
    for (void *at = json_object_iter(view.variable); at; at = json_object_iter_next(view.variable, at)) {
        const char *name = json_object_iter_key(at);
        size_t i = 0;
        while (i < count && strcmp(name, names[i]) != 0)
            i++;
        if (i < count)
            continue;
        const char *near = nearest_name(name, names, count);
        return fault_set(ret_fault, "bad_request", strlen(name) < sizeof ret_fault->field ? name : NULL,
                         "%.60s: no such field here%s%s%s", strlen(name) < 60 ? name : "a field",
                         near ? "; did you mean `" : "", near ? near : "", near ? "`?" : "");
    }
    return 0;
}

/* The field's value, or NULL when it is absent or null. */
static const json_t *get(const json_t *object, const char *name)
{
    const json_t *value = json_object_get(object, name);
    return value && !json_is_null(value) ? value : NULL;
}

int field_string(const json_t *object, const char *name, bool zeros, const char **ret_text, size_t *ret_length,
                 struct fault *ret_fault)
{
    const json_t *value = get(object, name);
    if (!value)
        return 0;
    if (!json_is_string(value))
        return fault_set(ret_fault, "bad_request", name, "%s: must be a string", name);
    const char *text = json_string_value(value);
    size_t length = json_string_length(value);
    if (!zeros && strlen(text) != length)
        return fault_set(ret_fault, "bad_request", name, "%s: must not hold the character U+0000", name);
    *ret_text = text;
    if (ret_length)
        *ret_length = length;
    return 1;
}

int field_bool(const json_t *object, const char *name, bool *ret_value, struct fault *ret_fault)
{
    const json_t *value = get(object, name);
    if (!value)
        return 0;
    if (!json_is_boolean(value))
        return fault_set(ret_fault, "bad_request", name, "%s: must be true or false", name);
    *ret_value = json_is_true(value);
    return 1;
}

/* A whole number that fits 64 bits. */
static bool whole(const json_t *value, int64_t *ret_value)
{
    if (json_is_integer(value)) {
        *ret_value = json_integer_value(value);
        return true;
    }
    double number = json_number_value(value);
    if (!json_is_real(value) || number != rint(number) || fabs(number) > 0x1p53)
        return false;
    *ret_value = (int64_t)number;
    return true;
}

int field_integer(const json_t *object, const char *name, int64_t least, int64_t most, int64_t *ret_value,
                  struct fault *ret_fault)
{
    const json_t *value = get(object, name);
    if (!value)
        return 0;
    int64_t number;
    if (!whole(value, &number) || number < least || number > most)
        return fault_set(ret_fault, "bad_request", name, "%s: must be a whole number from %" PRId64 " to %" PRId64,
                         name, least, most);
    *ret_value = number;
    return 1;
}

int field_number(const json_t *object, const char *name, double least, double most, double *ret_value,
                 struct fault *ret_fault)
{
    const json_t *value = get(object, name);
    if (!value)
        return 0;
    double number = json_number_value(value);
    if (!json_is_number(value) || !(number >= least && number <= most))
        return fault_set(ret_fault, "bad_request", name, "%s: must be a number from %g to %g", name, least, most);
    *ret_value = number;
    return 1;
}

int field_tokens(const json_t *object, const char *name, uint32_t vocab, int32_t **ret_tokens, size_t *ret_count,
                 struct fault *ret_fault)
{
    const json_t *value = get(object, name);
    if (!value)
        return 0;
    if (!json_is_array(value))
        return fault_set(ret_fault, "bad_request", name, "%s: must be an array of token ids", name);
    size_t count = json_array_size(value);
    _cleanup_free_ int32_t *tokens = malloc(count > 0 ? count * sizeof *tokens : 1);
    if (!tokens)
        return fault_set(ret_fault, "model_error", name, "%s: no memory for %zu tokens", name, count);
    for (size_t i = 0; i < count; i++) {
        int64_t token;
        if (!whole(json_array_get(value, i), &token) || token < 0 || token >= vocab)
            return fault_set(ret_fault, "bad_request", name, "%s: element %zu must be a token id from 0 to %" PRIu32,
                             name, i, vocab - 1);
        tokens[i] = (int32_t)token;
    }
    *ret_tokens = take_pointer(tokens);
    *ret_count = count;
    return 1;
}

int field_strings(const json_t *object, const char *name, size_t most, const char **ret_texts, size_t *ret_count,
                  struct fault *ret_fault)
{
    const json_t *value = get(object, name);
    if (!value)
        return 0;
    size_t count = json_is_array(value) ? json_array_size(value) : 1;
    if (count > most)
        return fault_set(ret_fault, "bad_request", name, "%s: has %zu strings, may have %zu", name, count, most);
    for (size_t i = 0; i < count; i++) {
        const json_t *element = json_is_array(value) ? json_array_get(value, i) : value;
        const char *text = json_string_value(element);
        if (!text || text[0] == 0 || strlen(text) != json_string_length(element))
            return fault_set(ret_fault, "bad_request", name,
                             "%s: must be a string that is not empty, or an array of such", name);
        ret_texts[i] = text;
    }
    *ret_count = count;
    return 1;
}
