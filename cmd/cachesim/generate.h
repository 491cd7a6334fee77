/* Made-up traces, to hold policies against each other where no model runs. The same seed makes the same trace.
 *
 * 16 layers of 128 experts, 8 of them a row. Which experts of a layer are popular follows Zipf's law (the n-th is used
 * in proportion to 1 / n), and drifts: now and then two experts of a layer exchange their popularity. */
#pragma once

#include "proto/error.h"

#include <stdint.h>

enum generate_kind {
    GENERATE_ZIPF, /* one answer; a layer's drift: one exchange in 5 steps */
    GENERATE_SCAN, /* an answer with little drift (one in 50), and after every 50 steps of it a prompt of 64 rows that
                      use all experts alike */
    GENERATE_KINDS,
};

const char *generate_kind_name(enum generate_kind kind);

/* Writes `steps` steps to the file `path`, which must not exist yet and is removed after a failure. */
int generate_trace(enum generate_kind kind, uint64_t seed, uint64_t steps, const char *path, struct error *ret_error);
