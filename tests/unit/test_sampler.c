/* The sampler: its order, its limits, its distribution, and that nothing but its inputs decides. */
#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "cmd/front/sampler.h"
#include "compute/math.h"

#define VOCAB 1000
#define LARGE 5000

static const struct sampler_params greedy = {.top_p = 1, .vocab_limit = SIZE_MAX};

static int32_t pick(struct sampler_params params, uint64_t position, const float *logits, size_t vocab)
{
    struct sampler_scratch scratch = {0};
    int32_t id = sampler_pick(&params, position, logits, vocab, &scratch);

    sampler_scratch_free(&scratch);
    return id;
}

/* Known answers from the Random123 distribution. */
static void test_philox(void **state)
{
    static const uint32_t cases[3][10] = {
        {0, 0, 0, 0, 0, 0, 0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8},
        {0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0x408f276d, 0x41c83b0e, 0xa20bc7c6,
         0x6d5451fd},
        {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344, 0xa4093822, 0x299f31d0, 0xd16cfe09, 0x94fdcceb, 0x5001e420,
         0x24126ea1},
    };

    (void)state;
    for (size_t i = 0; i < 3; i++) {
        uint32_t words[4];
        philox4x32(cases[i], cases[i] + 4, words);
        assert_memory_equal(words, cases[i] + 6, sizeof words);
    }
}

static void test_greedy(void **state)
{
    const float logits[] = {-1, 3, 3, -INFINITY, 2.5F};
    uint64_t allowed = 0x1D; /* all but id 1 */
    struct sampler_params params = greedy;

    (void)state;
    assert_int_equal(pick(params, 0, logits, 5), 1); /* ties: the lowest id */
    params.allowed = &allowed;
    assert_int_equal(pick(params, 0, logits, 5), 2);
    params.vocab_limit = 1;
    assert_int_equal(pick(params, 0, logits, 5), 0);
}

static void test_wrong_logits(void **state)
{
    const float nan[] = {1, NAN, 2}, infinite[] = {1, INFINITY}, nothing[] = {-INFINITY, -INFINITY};
    uint64_t allowed = 0x5;
    struct sampler_params params = greedy;

    (void)state;
    for (int hot = 0; hot < 2; hot++) {
        params.temperature = (float)hot;
        params.allowed = NULL;
        assert_int_equal(pick(params, 0, nan, 3), -EDOM);
        assert_int_equal(pick(params, 0, infinite, 2), -EDOM);
        assert_int_equal(pick(params, 0, nothing, 2), -EDOM);
        assert_int_equal(pick(params, 0, nothing, 0), -EDOM);
        params.allowed = &allowed; /* what is not allowed is not looked at */
        assert_true(pick(params, 0, nan, 3) >= 0);
    }
}

static void test_parameters(void **state)
{
    struct sampler_params params = {.temperature = NAN, .top_p = 1};
    struct error error;

    (void)state;
    assert_int_equal(sampler_check(&params, &error), -EINVAL);
    assert_non_null(strstr(error.text, "temperature"));
    params.temperature = -0.5F;
    assert_int_equal(sampler_check(&params, &error), -EINVAL);
    params = (struct sampler_params){.temperature = 1, .top_p = 0};
    assert_int_equal(sampler_check(&params, &error), -EINVAL);
    assert_non_null(strstr(error.text, "top_p"));
    params.top_p = 1.5F;
    assert_int_equal(sampler_check(&params, &error), -EINVAL);
    params.top_p = 0.9F;
    assert_int_equal(sampler_check(&params, &error), 0);
}

struct weighted {
    double weight;
    int32_t id;
};

static int compare(const void *a, const void *b)
{
    const struct weighted *x = a, *y = b;

    if (x->weight != y->weight)
        return x->weight > y->weight ? -1 : 1;
    return x->id < y->id ? -1 : 1;
}

/* The definition, by a full sort and libm: which ids may come out, and how often. Some 60,000 draws; the share of each
 * id must be within five standard deviations. */
static void check_distribution(float temperature, float top_p, unsigned seed)
{
    enum { DRAWS = 60000, SOME = 40 };
    struct weighted sorted[SOME];
    struct sampler_params params = {.temperature = temperature, .top_p = top_p, .seed = seed, .vocab_limit = SIZE_MAX};
    struct sampler_scratch scratch = {0};
    float logits[SOME];
    size_t drawn[SOME] = {0}, kept = 0;
    double total = 0, sum = 0;

    for (int i = 0; i < SOME; i++) {
        seed = seed * 1664525 + 1013904223;
        logits[i] = (float)(seed >> 24) / 64 - (float)(i % 3); /* with ties */
        sorted[i] = (struct weighted){exp((double)logits[i] / (double)temperature), i};
        total += sorted[i].weight;
    }
    qsort(sorted, SOME, sizeof *sorted, compare);
    while (kept < SOME && sum < (double)top_p * total * (1 - 1e-9))
        sum += sorted[kept++].weight;
    for (uint64_t position = 0; position < DRAWS; position++) {
        int32_t id = sampler_pick(&params, position, logits, SOME, &scratch);
        assert_in_range(id, 0, SOME - 1);
        drawn[id]++;
    }
    sampler_scratch_free(&scratch);
    for (size_t i = 0; i < SOME; i++) {
        double p = i < kept ? sorted[i].weight / sum : 0, n = (double)drawn[sorted[i].id];
        if (fabs(n - p * DRAWS) > 5 * sqrt(p * (1 - p) * DRAWS) + 1e-9)
            fail_msg("temperature %g, top_p %g: id %d came %g times, not %g", (double)temperature, (double)top_p,
                     (int)sorted[i].id, n, p * DRAWS);
    }
}

static void test_distribution(void **state)
{
    (void)state;
    check_distribution(1, 1, 1);
    check_distribution(0.7F, 0.9F, 2);
    check_distribution(1.5F, 0.5F, 3);
    check_distribution(0.2F, 0.99F, 4);
    check_distribution(3, 0.01F, 5);
}

/* Of equally likely tokens the lowest ids are kept. */
static void test_ties(void **state)
{
    float logits[VOCAB] = {0};
    struct sampler_params params = {.temperature = 1, .top_p = 0.25F, .seed = 3, .vocab_limit = SIZE_MAX};
    int32_t highest = 0;

    (void)state;
    for (uint64_t i = 0; i < 2000; i++) {
        int32_t id = pick(params, i, logits, VOCAB);
        highest = id > highest ? id : highest;
    }
    assert_in_range(highest, 240, 249);
}

/* A fixed choice: these ids are part of what a seed promises, on every machine. */
static void test_seed(void **state)
{
    float logits[VOCAB];
    struct sampler_params params = {.temperature = 1, .top_p = 0.95F, .seed = 42, .vocab_limit = SIZE_MAX};
    int32_t first[32], again[32];
    size_t same_with_other_seed = 0;

    (void)state;
    for (size_t i = 0; i < VOCAB; i++)
        logits[i] = (float)(i * 7919 % 1009) / 250;
    for (uint64_t i = 0; i < 32; i++)
        first[i] = pick(params, i, logits, VOCAB);
    for (uint64_t i = 32; i-- > 0;) /* in any order */
        again[i] = pick(params, i, logits, VOCAB);
    assert_memory_equal(first, again, sizeof first);
    const int32_t expected[] = {
        469, 326, 655, 670, 838, 294, 746, 409, 132, 396, 661, 436, 172, 475, 728, 343,
        182, 470, 925, 159, 924, 42,  629, 891, 628, 93,  489, 115, 802, 979, 918, 86,
    };
    assert_memory_equal(first, expected, sizeof expected);
    params.seed = 43;
    for (uint64_t i = 0; i < 32; i++)
        same_with_other_seed += pick(params, i, logits, VOCAB) == first[i];
    assert_true(same_with_other_seed < 8);
}

/* Rows without a token never come out, however likely the model thinks they are. */
static void test_allowed(void **state)
{
    float logits[VOCAB];
    uint64_t allowed[VOCAB / 64 + 1] = {0};
    struct sampler_params params = {.temperature = 2, .top_p = 1, .seed = 7, .vocab_limit = 900, .allowed = allowed};

    (void)state;
    for (size_t i = 0; i < VOCAB; i++) {
        logits[i] = i % 3 ? 20 : 0;
        if (i % 3 == 0)
            allowed[i / 64] |= UINT64_C(1) << i % 64;
    }
    for (uint64_t i = 0; i < 2000; i++) {
        int32_t id = pick(params, i, logits, VOCAB);
        assert_true(id >= 0 && id < 900 && id % 3 == 0);
    }
}

/* The picks of the definition, in this program's own words: weights one by one, all of them sorted to know which come before which, plain
 * sums. */
static int32_t pick_slowly(const struct sampler_params *params, uint64_t position, const float *logits, int vocab)
{
    static struct weighted sorted[LARGE];
    static int place[LARGE]; /* of an id in the order */
    static double before[LARGE + 1];
    const uint32_t key[2] = {(uint32_t)params->seed, 0};
    float top = -INFINITY;
    int count = 0;

    for (int id = 0; id < vocab; id++)
        if (params->allowed[id / 64] >> id % 64 & 1)
            top = fmaxf(top, logits[id]);
    for (int id = 0; id < vocab; id++) {
        float weight = math_exp((logits[id] - top) * (1 / params->temperature));
        place[id] = LARGE;
        if (params->allowed[id / 64] >> id % 64 & 1 && weight > 0)
            sorted[count++] = (struct weighted){(double)weight, id};
    }
    qsort(sorted, (size_t)count, sizeof *sorted, compare);
    for (int i = 0; i < count; i++) {
        place[sorted[i].id] = i;
        before[i + 1] = before[i] + sorted[i].weight;
    }
    double total = before[count];
    int end = count; /* the draw is among sorted[0 .. end) */
    for (uint32_t draw = 0;; draw++) {
        const uint32_t counter[4] = {(uint32_t)position, 0, draw, 0};
        uint32_t words[4];
        philox4x32(counter, key, words);
        double target = (double)(((uint64_t)words[1] << 32 | words[0]) >> 11) * 0x1p-53 * before[end], sum = 0;
        int id = 0;
        for (; id < vocab; id++)
            if (place[id] < end && (sum += sorted[place[id]].weight) > target)
                break;
        if (params->top_p >= 1 || before[place[id]] < (double)params->top_p * total)
            return id;
        end = place[id];
    }
}

/* Flat and peaked logits, holes, sizes that are no multiple of 64: the same ids as by a full sort, with each kernel
 * set and without. */
static void test_against_sort(void **state)
{
    static float logits[LARGE];
    static uint64_t allowed[LARGE / 64 + 1];
    const struct kernel_set *sets[16];
    uint32_t set_count = kernel_sets(sets, 16), seed = 1;
    const float temperatures[] = {0.01F, 0.7F, 1, 30}, top_ps[] = {1e-6F, 0.5F, 0.95F, 0.9999999F, 1};

    (void)state;
    for (int trial = 0; trial < 120; trial++) {
        int vocab = LARGE - trial * 13;
        for (int i = 0; i < vocab; i++) {
            seed = seed * 1664525 + 1013904223;
            logits[i] = (float)(seed >> 16) / 65536 * (float)(trial % 7 * 5 + 1);
            logits[i] = seed % 50 == 0 ? -INFINITY : logits[i];
        }
        for (size_t w = 0; w < sizeof allowed / sizeof *allowed; w++) {
            seed = seed * 1664525 + 1013904223;
            allowed[w] = trial % 2 ? UINT64_MAX : (uint64_t)seed << 32 | seed;
        }
        struct sampler_params params = {.temperature = temperatures[trial % 4],
                                        .top_p = top_ps[trial % 5],
                                        .seed = (uint64_t)trial,
                                        .vocab_limit = SIZE_MAX,
                                        .allowed = allowed};
        int32_t want = pick_slowly(&params, (uint64_t)trial, logits, vocab);
        assert_int_equal(pick(params, (uint64_t)trial, logits, (size_t)vocab), want);
        for (uint32_t s = 0; s < set_count; s++) {
            struct sampler_scratch scratch = {.kernels = sets[s]};
            assert_int_equal(sampler_pick(&params, (uint64_t)trial, logits, (size_t)vocab, &scratch), want);
            sampler_scratch_free(&scratch);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_philox),     cmocka_unit_test(test_greedy),       cmocka_unit_test(test_wrong_logits),
        cmocka_unit_test(test_parameters), cmocka_unit_test(test_distribution), cmocka_unit_test(test_ties),
        cmocka_unit_test(test_seed),       cmocka_unit_test(test_allowed),      cmocka_unit_test(test_against_sort),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
