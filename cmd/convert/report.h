/* Sizes and formats, for `convert --plan` and `info`. */
#pragma once

#include "cmd/convert/plan.h"

#include <stdio.h>

/* What a model needs and reads: facts common to a container and to a plan of one. */
struct model_facts {
    const struct model_config *config;
    enum weight_format dense_format, expert_format;
    uint64_t dense_bytes, expert_bytes; /* of the files */
    uint64_t dense_token_bytes;         /* dense weights that every token reads */
    uint64_t slice_bytes;
};

struct model_facts report_plan_facts(const struct plan *plan);

/* Whether every token reads a dense tensor: the embedding gives one row only, and the MTP layer only drafts. */
bool report_read_each_token(const struct model_config *config, const char *tensor);

/* The facts as a JSON object (NULL without memory), and as lines for people. */
json_t *report_facts(const struct model_facts *facts);
void report_print(const struct model_facts *facts, FILE *out);

/* What `plan` will write, as lines or as one JSON object. */
void report_plan(const struct plan *plan, bool json, FILE *out);
