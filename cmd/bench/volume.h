/* What a model has to read and to multiply, from a container's shapes. */
#pragma once

#include "proto/container.h"

struct bench_volume {
    double bytes; /* of weights and KV memory that a step reads at least: each weight once for all rows */
    double macs;  /* in products with quantised matrices */
};

/* A step of `rows` rows of one sequence that ends at position `end` (the keys of all before count), logits for the
 * last row, no drafts. `index_topk` keys are kept. With several rows every expert of a layer counts as read, with
 * one row top_k of them. */
struct bench_volume bench_volume_of(const struct container *container, uint32_t rows, uint32_t end,
                                    uint32_t index_topk);
