/* What a request is made of, from files and standard input. */
#pragma once

#include "proto/error.h"

#include <jansson.h>
#include <stddef.h>

/* The whole of a file ("-": standard input), terminated, at most 64 MiB. The caller frees. */
int input_read(const char *path, char **ret_bytes, size_t *ret_size, struct error *ret_error);

/* Decimal ids separated by white space, as a JSON array. The error names `path` and what is no id. */
int input_tokens(const char *path, json_t **ret_tokens, struct error *ret_error);

/* Text as a JSON string; -EILSEQ: it is not UTF-8. */
int input_text(const char *bytes, size_t size, const char *path, json_t **ret_text, struct error *ret_error);
