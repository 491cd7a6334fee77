#include "cmd/front/sampler.h"

#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "compute/math.h"

#define BLOCK 64u    /* ids of a word of `allowed`, and of a call of the kernels */
#define LANES 16u    /* of a maximum */
#define SUM_LANES 8u /* of a sum in f64 */

struct sampler_candidate {
    float weight; /* exp((logit - greatest) / temperature), in (0, 1] */
    int32_t id;
};

void sampler_scratch_free(struct sampler_scratch *scratch)
{
    free(scratch->candidates);
    free(scratch->weights);
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

/* Whether one of 64 numbers is NaN or +infinity, in integer comparisons, so that a compiler can make vectors of
 * them. */
static bool is_wrong(const float *x)
{
    int32_t wrong = 0;
    for (size_t i = 0; i < BLOCK; i++) {
        int32_t bits;
        memcpy(&bits, &x[i], sizeof bits);
        wrong |= (bits >= 0x7f800000) | ((bits < 0) & (bits > -0x800000));
    }
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
        most = block;
        best = (int32_t)first;
        while (*x++ != block)
            best++;
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

/* Weights of all ids, 0 where not allowed, up to a multiple of 64; returns their sum, in lanes (id % 8), which are then
 * added in order. */
static double weigh(const struct sampler_params *params, const float *logits, size_t limit, float top,
                    const struct sampler_scratch *scratch)
{
    double lanes[SUM_LANES] = {0}, total = 0;
    float room[BLOCK];

    for (size_t first = 0; first < limit; first += BLOCK) {
        const float *x = block_of(params, logits, limit, first, room);
        float *weights = scratch->weights + first;
        for (size_t i = 0; i < BLOCK; i++)
            weights[i] = (x[i] - top) / params->temperature;
        if (scratch->kernels)
            scratch->kernels->softmax_block(weights, BLOCK, 0.0f); /* e^x of each */
        else
            for (size_t i = 0; i < BLOCK; i++)
                weights[i] = math_exp(weights[i]);
        for (size_t i = 0; i < BLOCK; i += SUM_LANES)
            for (size_t l = 0; l < SUM_LANES; l++)
                lanes[l] += (double)weights[i + l];
    }
    for (size_t l = 0; l < SUM_LANES; l++)
        total += lanes[l];
    return total;
}

/* The sum of the weights that are `least` at least. */
static double sum_from(const float *weights, size_t limit, float least)
{
    double lanes[SUM_LANES] = {0}, total = 0;

    for (size_t first = 0; first < limit; first += BLOCK)
        for (size_t i = 0; i < BLOCK; i += SUM_LANES)
            for (size_t l = 0; l < SUM_LANES; l++) {
                float weight = weights[first + i + l];
                lanes[l] += (double)(weight >= least ? weight : 0.0f);
            }
    for (size_t l = 0; l < SUM_LANES; l++)
        total += lanes[l];
    return total;
}

/* Takes as candidates the ids whose weight is at least some bound, as high a one as leaves more than `enough` of the
 * sum: the others are too far down the order to be reached. Returns their number. */
static size_t gather(const struct sampler_scratch *scratch, size_t limit, double enough)
{
    static const float bounds[] = {0x1p-4f, 0x1p-8f, 0x1p-12f, 0x1p-16f, 0x1p-24f, 0x1p-149f};
    const size_t last = sizeof bounds / sizeof bounds[0] - 1;
    size_t b = 0, count = 0;

    while (b < last && sum_from(scratch->weights, limit, bounds[b]) <= enough * (1 + 0x1p-30))
        b++;
    for (size_t first = 0; first < limit; first += BLOCK) {
        if (block_maximum(scratch->weights + first) < bounds[b])
            continue;
        for (size_t id = first; id < first + BLOCK; id++)
            if (scratch->weights[id] >= bounds[b])
                scratch->candidates[count++] = (struct sampler_candidate){scratch->weights[id], (int32_t)id};
    }
    return count;
}

static int make_room(struct sampler_scratch *scratch, size_t limit)
{
    size_t capacity = (limit + BLOCK - 1) / BLOCK * BLOCK;

    if (scratch->capacity >= capacity)
        return 0;
    sampler_scratch_free(scratch);
    scratch->candidates = reallocarray(NULL, capacity, sizeof *scratch->candidates);
    scratch->weights = reallocarray(NULL, capacity, sizeof *scratch->weights);
    if (!scratch->candidates || !scratch->weights)
        return -ENOMEM;
    scratch->capacity = capacity;
    return 0;
}

int32_t sampler_pick(const struct sampler_params *params, uint64_t position, const float *logits, size_t vocab,
                     struct sampler_scratch *scratch)
{
    size_t limit = vocab < params->vocab_limit ? vocab : params->vocab_limit;
    int32_t best = greatest(params, logits, limit);
    double kept = 0;

    if (best < 0 || params->temperature == 0)
        return best;
    if (make_room(scratch, limit) < 0)
        return -ENOMEM;
    double total = weigh(params, logits, limit, logits[best], scratch), u = uniform(params->seed, position);
    bool all = params->top_p >= 1;
    double enough = all ? u * total : (double)params->top_p * total;
    struct sampler_candidate *heap = scratch->candidates;
    size_t count = gather(scratch, limit, enough), left = count;
    for (size_t i = count / 2; i-- > 0;)
        sift_down(heap, count, i);

    /* Take the greatest off until they are enough; like heap sort, they gather behind the heap in reverse order. With
     * top_p 1 what is kept is known at once, so it is enough to reach the token that is drawn. */
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
