#include "cmd/front/sampler.h"

#include <float.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "compute/math.h"

#define BLOCK 64u /* ids of a word of `allowed`, and of a call of the kernels */
#define LANES 16u /* of a maximum and of a sum */

void sampler_scratch_free(struct sampler_scratch *scratch)
{
    free(scratch->weights);
    free(scratch->sums);
    *scratch = (struct sampler_scratch){.kernels = scratch->kernels};
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

/* A number in [0, 1) with 53 random bits, for a draw at a position. */
static double uniform(uint64_t seed, uint64_t position, uint32_t draw)
{
    const uint32_t counter[4] = {(uint32_t)position, (uint32_t)(position >> 32), draw, 0};
    const uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    uint32_t words[4];

    philox4x32(counter, key, words);
    uint64_t bits = ((uint64_t)words[1] << 32 | words[0]) >> 11;
    return (double)bits * 0x1p-53;
}

/* Logits of 64 ids from `first` on: -INFINITY where an id is not allowed or there is none. Points into `logits` where
 * nothing is to be left out, else to `room`. */
static const float *block_of(const struct sampler_params *params, const float *logits, size_t limit, size_t first,
                             float room[BLOCK])
{
    uint64_t allowed = params->allowed ? params->allowed[first / BLOCK] : UINT64_MAX;
    size_t count = limit - first < BLOCK ? limit - first : BLOCK;
    if (count == BLOCK && allowed == UINT64_MAX)
        return logits + first;
    for (size_t i = 0; i < BLOCK; i++)
        room[i] = i < count && (allowed >> i & 1) ? logits[first + i] : -INFINITY;
    return room;
}

/* Whether one of 64 numbers is NaN or +infinity. */
static bool is_wrong(const float *x)
{
    int32_t wrong = 0;
    for (size_t i = 0; i < BLOCK; i++)
        wrong |= !(x[i] < INFINITY);
    return wrong != 0;
}

static float block_maximum(const float *x)
{
    float lanes[LANES];
    memcpy(lanes, x, sizeof lanes);
    for (size_t i = LANES; i < BLOCK; i += LANES)
        for (size_t l = 0; l < LANES; l++)
            lanes[l] = x[i + l] > lanes[l] ? x[i + l] : lanes[l];
    for (size_t l = 1; l < LANES; l++)
        lanes[0] = lanes[l] > lanes[0] ? lanes[l] : lanes[0];
    return lanes[0];
}

/* The greatest allowed logit, or -EDOM. */
static int32_t greatest(const struct sampler_params *params, const float *logits, size_t limit)
{
    int32_t best = -EDOM;
    float most = -INFINITY, room[BLOCK];

    for (size_t first = 0; first < limit; first += BLOCK) {
        const float *x = block_of(params, logits, limit, first, room);
        if (is_wrong(x))
            return -EDOM;
        float block = block_maximum(x);
        if (!(block > most))
            continue;
        size_t i = 0;
        while (i < BLOCK - 1 && x[i] != block)
            i++;
        most = block;
        best = (int32_t)(first + i < limit ? first + i : limit - 1);
    }
    return best;
}

/* The sum of those of 64 weights that are `least` at least: the lanes sum of the kernels (compute/README.md). */
static float block_sum(const float *weights, float least)
{
    float lanes[LANES] = {0};

    for (size_t i = 0; i < BLOCK; i += LANES)
        for (size_t l = 0; l < LANES; l++)
            lanes[l] += weights[i + l] >= least ? weights[i + l] : 0.0f;
    for (size_t half = LANES / 2; half > 0; half /= 2)
        for (size_t l = 0; l < half; l++)
            lanes[l] += lanes[l + half];
    return lanes[0];
}

/* e^x of 64 numbers in place. Returns their sum. */
static float exponentials(const struct kernel_set *kernels, float *x)
{
    if (kernels)
        return kernels->softmax_block(x, BLOCK, 0.0f);
    for (size_t i = 0; i < BLOCK; i++)
        x[i] = math_exp(x[i]);
    return block_sum(x, 0.0f);
}

/* Weights of all ids, e^((logit - greatest) / temperature), 0 where not allowed, up to a multiple of 64; and their sum, block by
 * block. */
static double weigh(const struct sampler_params *params, const float *logits, size_t limit, float top,
                    const struct sampler_scratch *scratch)
{
    float room[BLOCK], factor = 1.0f / params->temperature;
    double total = 0;

    factor = factor < FLT_MAX ? factor : FLT_MAX; /* times 0 it must be 0 */
    for (size_t first = 0; first < limit; first += BLOCK) {
        const float *x = block_of(params, logits, limit, first, room);
        for (size_t i = 0; i < BLOCK; i++) {
            float exponent = (x[i] - top) * factor;
            scratch->weights[first + i] = exponent < 0.0f ? exponent : 0.0f; /* greater: changed since */
        }
    }
    /* Apart: wide loads right behind narrow stores of the same bytes would wait for them. */
    for (size_t first = 0; first < limit; first += BLOCK) {
        scratch->sums[first / BLOCK] = (double)exponentials(scratch->kernels, scratch->weights + first);
        total += scratch->sums[first / BLOCK];
    }
    return total;
}

/* A place in the order of likelihood: descending weight, ties to the lower id. */
struct place {
    float weight;
    size_t id;
};

static bool comes_before(float weight, size_t id, struct place place)
{
    return weight > place.weight || (weight == place.weight && id < place.id);
}

/* The sum of the weights that come before `place`, block by block. */
static double sum_before(const struct sampler_scratch *scratch, size_t limit, struct place place)
{
    double total = 0;
    uint32_t bits;
    float above;

    memcpy(&bits, &place.weight, sizeof bits);
    bits++; /* of a positive number: the next greater one */
    memcpy(&above, &bits, sizeof above);
    for (size_t first = 0; first < limit; first += BLOCK) {
        const float *weights = scratch->weights + first;
        double sum = 0;
        if (first <= place.id && place.id < first + BLOCK)
            for (size_t i = 0; i < BLOCK; i++)
                sum += comes_before(weights[i], first + i, place) ? (double)weights[i] : 0.0;
        else
            sum = (double)block_sum(weights, first < place.id ? place.weight : above);
        scratch->sums[first / BLOCK] = sum;
        total += sum;
    }
    return total;
}

/* Of the ids before `place`, in ascending order, the one at which their sum passes `target`. */
static size_t id_at(const struct sampler_scratch *scratch, size_t limit, struct place place, double target)
{
    size_t blocks = (limit + BLOCK - 1) / BLOCK, b = 0, last = 0;
    double sum = 0;

    for (size_t at = 0; at < blocks; at++) {
        if (scratch->sums[at] == 0)
            continue;
        b = at;
        if (sum + scratch->sums[at] > target)
            break;
        sum += scratch->sums[at];
    }
    /* Where rounding leaves the sum short of the target, the last one is it. */
    for (size_t id = b * BLOCK; id < (b + 1) * BLOCK; id++) {
        if (!comes_before(scratch->weights[id], id, place))
            continue;
        last = id;
        sum += (double)scratch->weights[id];
        if (sum > target)
            break;
    }
    return last;
}

static int make_room(struct sampler_scratch *scratch, size_t limit)
{
    size_t blocks = (limit + BLOCK - 1) / BLOCK;

    if (scratch->blocks >= blocks)
        return 0;
    sampler_scratch_free(scratch);
    scratch->weights = reallocarray(NULL, blocks * BLOCK, sizeof *scratch->weights);
    scratch->sums = reallocarray(NULL, blocks, sizeof *scratch->sums);
    if (!scratch->weights || !scratch->sums)
        return -ENOMEM;
    scratch->blocks = blocks;
    return 0;
}

int32_t sampler_pick(const struct sampler_params *params, uint64_t position, const float *logits, size_t vocab,
                     struct sampler_scratch *scratch)
{
    size_t limit = vocab < params->vocab_limit ? vocab : params->vocab_limit;
    int32_t best = greatest(params, logits, limit);

    if (best < 0 || params->temperature == 0)
        return best;
    if (make_room(scratch, limit) < 0)
        return -ENOMEM;
    double total = weigh(params, logits, limit, logits[best], scratch), sum = total;
    struct place place = {0}; /* every weight above 0 comes before it */
    for (uint32_t draw = 0;; draw++) {
        size_t id = id_at(scratch, limit, place, uniform(params->seed, position, draw) * sum);
        if (params->top_p >= 1)
            return (int32_t)id;
        /* Kept is what has less than top_p before it. One that is not sets a bound: the next is drawn from those before. */
        place = (struct place){scratch->weights[id], id};
        sum = sum_before(scratch, limit, place);
        if (sum <= 0 || sum < (double)params->top_p * total)
            return (int32_t)id;
    }
}
