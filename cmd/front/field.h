/* Reading the fields of a request: types and ranges are checked, and what is wrong is said in the words of the request
 * socket.
 *
 * A getter returns 1 and fills its results, 0 when the field is absent or null (results untouched), or negative with
 * the fault. */
#pragma once

#include "proto/error.h"

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* What is answered instead of a result. */
struct fault {
    const char *code; /* "bad_request", "too_long", "busy", "model_error" or "restarted" */
    char field[64];   /* "": none in particular */
    struct error error;
};

/* Fills a fault and returns -EINVAL. `field` may be NULL. */
__attribute__((format(printf, 4, 5))) int fault_set(struct fault *ret_fault, const char *code, const char *field,
                                                    const char *format, ...);

/* The object {"ok": false, "error": {...}}. */
json_t *fault_json(const struct fault *fault);

/* Refuses every field of `object` that is not among `names` (up to a NULL), naming it and the nearest. */
int fields_check(const json_t *object, const char *const *names, struct fault *ret_fault);

/* *ret_text belongs to the object and ends in a zero; it holds no other unless `zeros`. */
int field_string(const json_t *object, const char *name, bool zeros, const char **ret_text, size_t *ret_length,
                 struct fault *ret_fault);
int field_bool(const json_t *object, const char *name, bool *ret_value, struct fault *ret_fault);
/* A whole number, 5 or 5.0. */
int field_integer(const json_t *object, const char *name, int64_t least, int64_t most, int64_t *ret_value,
                  struct fault *ret_fault);
int field_number(const json_t *object, const char *name, double least, double most, double *ret_value,
                 struct fault *ret_fault);
/* An array of ids below `vocab`; *ret_tokens is for free(). */
int field_tokens(const json_t *object, const char *name, uint32_t vocab, int32_t **ret_tokens, size_t *ret_count,
                 struct fault *ret_fault);
/* A string or an array of at most `most` of them; the strings belong to the object. */
int field_strings(const json_t *object, const char *name, size_t most, const char **ret_texts, size_t *ret_count,
                  struct fault *ret_fault);
