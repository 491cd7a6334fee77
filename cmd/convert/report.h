/* Sizes and formats, for `convert --plan` and `info`. */
#pragma once

#include "cmd/convert/plan.h"

#include <stdio.h>

/* What `plan` will write, as lines or as one JSON object. */
void report_plan(const struct plan *plan, bool json, FILE *out);

/* What `model` needs and reads: facts common to a container and to a plan of one. */
struct model_facts {
    const struct model_config *config;
    enum weight_format dense_format, expert_format;
    uint64_t dense_bytes, expert_bytes; /* of the files */
    uint64_t dense_token_bytes;         /* dense weights that one token reads: all but most of the embedding */
    uint64_t slice_bytes;
};

/* The facts as a JSON object, or NULL without memory. */
json_t *report_facts(const struct model_facts *facts);
/* The same for people. */
void report_print(const struct model_facts *facts, FILE *out);
