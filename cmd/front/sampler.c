#include "cmd/front/sampler.h"

#include <math.h>
#include <stdbool.h>
#include <stdlib.h>

#include "compute/math.h"

struct sampler_candidate {
    float weight; /* exp((logit - greatest) / temperature), in (0, 1] */
    int32_t id;
};

void sampler_scratch_free(struct sampler_scratch *scratch)
{
    free(scratch->candidates);
    *scratch = (struct sampler_scratch){0};
}

int sampler_check(const struct sampler_params *params, struct error *ret_error)
{
    /* written so that NaN fails too */
    if (!(params->temperature >= 0 && params->temperature <= 100))
        return error_set(ret_error, EINVAL, "temperature must be from 0 to 100");
    if (!(params->top_p > 0 && params->top_p <= 1))
        return error_set(ret_error, EINVAL, "top_p must be above 0 and at most 1");
    return 0;
}

void philox4x32(const uint32_t counter[4], const uint32_t key[2], uint32_t ret_words[4])
{
    uint32_t c[4] = {counter[0], counter[1], counter[2], counter[3]}, k[2] = {key[0], key[1]};

    for (int round = 0; round < 10; round++) {
        uint64_t a = (uint64_t)0xD2511F53u * c[0], b = (uint64_t)0xCD9E8D57u * c[2];
        uint32_t next[4] = {(uint32_t)(b >> 32) ^ c[1] ^ k[0], (uint32_t)b, (uint32_t)(a >> 32) ^ c[3] ^ k[1],
                            (uint32_t)a};
        for (int i = 0; i < 4; i++)
            c[i] = next[i];
        k[0] += 0x9E3779B9u;
        k[1] += 0xBB67AE85u;
    }
    for (int i = 0; i < 4; i++)
        ret_words[i] = c[i];
}

/* A number in [0, 1) with 53 random bits. */
static double uniform(uint64_t seed, uint64_t position)
{
    const uint32_t counter[4] = {(uint32_t)position, (uint32_t)(position >> 32), 0, 0};
    const uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    uint32_t words[4];

    philox4x32(counter, key, words);
    uint64_t bits = ((uint64_t)words[1] << 32 | words[0]) >> 11;
    return (double)bits * 0x1p-53;
}

static bool is_allowed(const struct sampler_params *params, size_t id)
{
    return !params->allowed || (params->allowed[id / 64] >> id % 64 & 1);
}

/* The greatest allowed logit, or -EDOM. */
static int32_t greatest(const struct sampler_params *params, const float *logits, size_t vocab)
{
    int32_t best = -EDOM;

    for (size_t id = 0; id < vocab; id++) {
        if (!is_allowed(params, id))
            continue;
        if (isnan(logits[id]) || logits[id] == INFINITY)
            return -EDOM;
        if (logits[id] > (best < 0 ? -INFINITY : logits[best]))
            best = (int32_t)id;
    }
    return best;
}

static bool before(const struct sampler_candidate *a, const struct sampler_candidate *b)
{
    return a->weight != b->weight ? a->weight > b->weight : a->id < b->id;
}

/* Restores the heap below `hole`: the parent comes before its children. */
static void sift_down(struct sampler_candidate *heap, size_t count, size_t hole)
{
    struct sampler_candidate moved = heap[hole];

    for (size_t child; (child = 2 * hole + 1) < count; hole = child) {
        if (child + 1 < count && before(&heap[child + 1], &heap[child]))
            child++;
        if (!before(&heap[child], &moved))
            break;
        heap[hole] = heap[child];
    }
    heap[hole] = moved;
}

/* Weighs the allowed tokens in ascending id; *ret_total is their sum, in that order. */
static size_t weigh(const struct sampler_params *params, const float *logits, size_t vocab, float top,
                    struct sampler_candidate *candidates, double *ret_total)
{
    size_t count = 0;

    *ret_total = 0;
    for (size_t id = 0; id < vocab; id++) {
        if (!is_allowed(params, id))
            continue;
        float weight = math_exp((logits[id] - top) / params->temperature);
        if (weight > 0) {
            candidates[count++] = (struct sampler_candidate){weight, (int32_t)id};
            *ret_total += (double)weight;
        }
    }
    return count;
}

int32_t sampler_pick(const struct sampler_params *params, uint64_t position, const float *logits, size_t vocab,
                     struct sampler_scratch *scratch)
{
    size_t limit = vocab < params->vocab_limit ? vocab : params->vocab_limit;
    int32_t best = greatest(params, logits, limit);
    double total, kept = 0;

    if (best < 0 || params->temperature == 0)
        return best;
    if (scratch->capacity < limit) {
        sampler_scratch_free(scratch);
        scratch->candidates = reallocarray(NULL, limit, sizeof *scratch->candidates);
        if (!scratch->candidates)
            return -ENOMEM;
        scratch->capacity = limit;
    }
    struct sampler_candidate *heap = scratch->candidates;
    size_t count = weigh(params, logits, limit, logits[best], heap, &total), left = count;
    for (size_t i = count / 2; i-- > 0;)
        sift_down(heap, count, i);

    /* Take the greatest off until they are enough; like heap sort, they gather behind the heap in reverse order. With
     * top_p 1 what is kept is known at once, so it is enough to reach the token that is drawn. */
    bool all = params->top_p >= 1;
    double u = uniform(params->seed, position), enough = all ? u * total : (double)params->top_p * total;
    while (left > 0 && (kept < enough || (all && kept == enough) || left == count)) {
        struct sampler_candidate taken = heap[0];
        kept += (double)taken.weight;
        heap[0] = heap[--left];
        if (left > 0)
            sift_down(heap, left, 0);
        heap[left] = taken;
    }
    double target = all ? enough : u * kept, sum = 0;
    for (size_t i = count; i-- > left;) {
        sum += (double)heap[i].weight;
        if (sum > target)
            return heap[i].id;
    }
    return heap[left].id; /* rounding: the sum in another order may fall short of the total by a hair */
}
