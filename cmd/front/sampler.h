/* Chooses the next token from logits. The choice depends on nothing but the logits, the parameters and the position:
 * not on the machine, the C library, or what else is running. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "compute/kernel.h"
#include "proto/error.h"

struct sampler_params {
    float temperature; /* 0: greedy */
    float top_p;       /* in (0, 1]; 1: all tokens */
    uint64_t seed;
    size_t vocab_limit;      /* ids at and above it are never chosen; SIZE_MAX: no limit */
    const uint64_t *allowed; /* bitmap of the ids that may be chosen (tokenizer_allowed), or NULL: all */
};

/* Working memory, reused from call to call; starts as all zeroes. One thread at a time. `kernels` (its owner's): a set
 * that computes exponentials many at once; NULL: one by one, with the same result. */
struct sampler_scratch {
    const struct kernel_set *kernels;
    float *weights; /* [blocks][64] */
    double *sums;   /* [blocks] */
    size_t blocks;
};

void sampler_scratch_free(struct sampler_scratch *scratch);

/* Checks what came from a user: temperature finite and in 0 .. 100, top_p in (0, 1]. -EINVAL names the field. */
int sampler_check(const struct sampler_params *params, struct error *ret_error);

/* Chooses an id for `position` (the absolute position of the new token) from logits[vocab], which may lie in shared memory: a neighbour
 * that changes them meanwhile gets another token chosen, nothing worse.
 *
 * Greedy: the greatest logit, ties to the lowest id. Else: p = softmax(logits / temperature) over the allowed ids; of the
 * fewest tokens whose p add up to at least top_p, in descending p, ties to the lowest id, one in proportion to its p. It is drawn from all
 * ids, in ascending order; if those before it have top_p already, again from those before it, until it is one of the kept. Draw d takes the
 * number that Philox4x32-10 gives for key seed, counter (position, d). Expected time O(vocab (1 + log(1 / top_p))).
 *
 * Returns the id; -EDOM when an allowed logit is NaN or +infinity, or when no id is allowed or all are -infinity;
 * -ENOMEM. */
int32_t sampler_pick(const struct sampler_params *params, uint64_t position, const float *logits, size_t vocab,
                     struct sampler_scratch *scratch);

/* The four 32-bit words of Philox4x32-10 for a counter and a key, from Salmon, Moraes, Dror and Shaw, "Parallel random
 * numbers: as easy as 1, 2, 3" (SC 2011). Any thread. */
void philox4x32(const uint32_t counter[4], const uint32_t key[2], uint32_t ret_words[4]);
