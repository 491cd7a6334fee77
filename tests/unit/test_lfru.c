/* The policy: what must always hold, under random work; and what it is for: scans, drift, ghosts, guesses, held experts. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "shm/lfru.h"

#define EXPERTS 512u
#define PER_LAYER 64u
#define LAYERS (EXPERTS / PER_LAYER)

/* A pool with the policy's answers obeyed, and a book of its own to hold them against. */
struct cache {
    struct lfru *lfru;
    uint32_t experts, capacity, residents;
    bool resident[65536 * 2], held[65536 * 2], refused[65536 * 2];
    uint64_t uses, hits, asked, victims_hash;
};

static void open_cache(struct cache *cache, uint32_t experts, uint32_t per_layer, uint32_t capacity)
{
    struct error error;
    memset(cache, 0, sizeof *cache);
    cache->experts = experts;
    cache->capacity = capacity;
    if (lfru_open(experts, per_layer, capacity, &cache->lfru, &error))
        fail_msg("%s", error.text);
}

static bool may_go(void *context, uint32_t expert)
{
    struct cache *cache = context;
    cache->asked++;
    return !cache->refused[expert];
}

static void evict_one(struct cache *cache)
{
    uint32_t victim = lfru_victim(cache->lfru, may_go, cache);
    assert_true(victim < cache->experts);
    assert_true(cache->resident[victim] && !cache->held[victim] && !cache->refused[victim]);
    assert_int_equal(lfru_victim(cache->lfru, may_go, cache), victim); /* asking changes nothing */
    lfru_evict(cache->lfru, victim);
    cache->resident[victim] = false;
    cache->residents--;
    cache->victims_hash = (cache->victims_hash ^ victim) * 0x100000001b3u;
}

static void admit(struct cache *cache, uint32_t expert, enum lfru_who who)
{
    while (cache->residents >= cache->capacity)
        evict_one(cache);
    lfru_admit(cache->lfru, expert, who);
    cache->resident[expert] = true;
    cache->residents++;
}

/* Returns whether it was a hit. */
static bool use(struct cache *cache, uint32_t expert, enum lfru_who who)
{
    bool hit = cache->resident[expert];
    lfru_use(cache->lfru, expert, who);
    cache->uses++;
    cache->hits += hit;
    if (!hit)
        admit(cache, expert, who);
    return hit;
}

static uint32_t next_random(uint64_t *seed)
{
    *seed ^= *seed << 13;
    *seed ^= *seed >> 7;
    *seed ^= *seed << 17;
    return (uint32_t)(*seed >> 32);
}

/* Everything that callers do, at random; `seed` is what happens. */
static void random_work(struct cache *cache, uint64_t seed, uint32_t operations)
{
    for (uint32_t i = 0; i < operations; i++) {
        uint32_t choice = next_random(&seed) % 1000, expert = next_random(&seed) % cache->experts;
        if (choice < 900) {
            uint32_t skewed = next_random(&seed) % (1 + next_random(&seed) % cache->experts);
            use(cache, skewed, choice < 600 ? LFRU_DECODE : LFRU_PREFILL);
        } else if (choice < 940) {
            if (!cache->resident[expert])
                admit(cache, expert, LFRU_GUESS);
        } else if (choice < 960) {
            cache->held[expert] = !cache->held[expert] && next_random(&seed) % 8 == 0;
            lfru_hold(cache->lfru, expert, cache->held[expert]);
        } else if (choice < 980) {
            cache->refused[expert] = next_random(&seed) % 4 == 0;
        } else if (choice < 990 && cache->resident[expert]) {
            lfru_remove(cache->lfru, expert);
            cache->resident[expert] = false;
            cache->residents--;
        } else if (choice < 992) {
            cache->capacity = 250 + next_random(&seed) % 100;
            lfru_resize(cache->lfru, cache->capacity);
            while (cache->residents > cache->capacity)
                evict_one(cache);
        }
    }
}

static struct cache one, other;

static void test_random_work(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 20; seed++) {
        open_cache(&one, EXPERTS, PER_LAYER, 300);
        random_work(&one, seed * 0x9e3779b97f4a7c15u, 20000);
        /* Whatever is resident, and nothing else, comes out in the end. */
        memset(one.refused, 0, sizeof one.refused);
        for (uint32_t e = 0; e < EXPERTS; e++) {
            lfru_hold(one.lfru, e, false);
            one.held[e] = false;
        }
        while (one.residents > 0)
            evict_one(&one);
        assert_int_equal(lfru_victim(one.lfru, NULL, NULL), LFRU_NONE);
        lfru_close(one.lfru);
    }
}

static void test_same_calls_same_answers(void **state)
{
    (void)state;
    open_cache(&one, EXPERTS, PER_LAYER, 300);
    open_cache(&other, EXPERTS, PER_LAYER, 300);
    random_work(&one, 77, 50000);
    random_work(&other, 77, 50000);
    assert_int_equal(one.victims_hash, other.victims_hash);
    assert_memory_equal(one.resident, other.resident, sizeof one.resident);
    for (uint32_t e = 0; e < EXPERTS; e++)
        assert_true(lfru_heat(one.lfru, e) == lfru_heat(other.lfru, e));
    lfru_close(one.lfru);
    lfru_close(other.lfru);
}

/* A pool's memory is made by and by, but before it is full nothing is given up: then how it grew makes no difference. */
static void test_grown_pool(void **state)
{
    (void)state;
    open_cache(&one, EXPERTS, PER_LAYER, 300);
    open_cache(&other, EXPERTS, PER_LAYER, 300);
    for (uint32_t capacity = 7; capacity < 300; capacity += 40)
        lfru_resize(other.lfru, capacity);
    lfru_resize(other.lfru, 300);
    random_work(&one, 78, 50000);
    random_work(&other, 78, 50000);
    assert_int_equal(one.victims_hash, other.victims_hash);
    lfru_close(one.lfru);
    lfru_close(other.lfru);
}

/* However many residents there are, one is asked for; those that may not go add one each. */
static void test_constant_questions(void **state)
{
    (void)state;
    const uint32_t sizes[3] = {256, 4096, 65536};
    for (int i = 0; i < 3; i++) {
        open_cache(&one, 2 * sizes[i], 256, sizes[i]);
        uint64_t seed = 9;
        for (uint32_t n = 0; n < 3 * sizes[i]; n++)
            use(&one, next_random(&seed) % one.experts, LFRU_DECODE);
        for (uint32_t refused = 0; refused < 20; refused++) {
            one.asked = 0;
            uint32_t victim = lfru_victim(one.lfru, may_go, &one);
            assert_int_equal(one.asked, 1 + refused);
            assert_true(one.resident[victim] && !one.refused[victim]);
            one.refused[victim] = true;
        }
        lfru_close(one.lfru);
    }
}

/* Of experts that are used alike, the one goes whose layer's turn is farthest. */
static void test_turns(void **state)
{
    (void)state;
    for (uint32_t last = 0; last < LAYERS; last++) {
        open_cache(&one, EXPERTS, PER_LAYER, LAYERS);
        for (int step = 0; step < 10; step++)
            for (uint32_t layer = 0; layer < LAYERS; layer++)
                lfru_use(one.lfru, layer * PER_LAYER, LFRU_DECODE);
        for (uint32_t layer = 0; layer < LAYERS; layer++)
            admit(&one, layer * PER_LAYER, LFRU_DECODE);
        for (uint32_t layer = 0; layer <= last; layer++)
            lfru_use(one.lfru, layer * PER_LAYER + 9, LFRU_DECODE);
        assert_int_equal(lfru_victim(one.lfru, NULL, NULL) / PER_LAYER, last);
        lfru_close(one.lfru);
    }
}

/* An expert of its layer's last step stays before one that was used a little oftener, until the layer's next turn. */
static void test_recent(void **state)
{
    (void)state;
    open_cache(&one, EXPERTS, PER_LAYER, 2);
    for (int step = 0; step < 9; step++) {
        lfru_use(one.lfru, step < 5 ? 0 : 1, LFRU_DECODE);
        lfru_use(one.lfru, PER_LAYER, LFRU_DECODE); /* the next layer */
    }
    admit(&one, 0, LFRU_DECODE);
    admit(&one, 1, LFRU_DECODE);
    assert_int_equal(lfru_victim(one.lfru, NULL, NULL), 0);
    lfru_use(one.lfru, 2, LFRU_DECODE);
    assert_int_equal(lfru_victim(one.lfru, NULL, NULL), 1);
    lfru_close(one.lfru);
}

/* A step of two layers. `who` uses of the first: expert 2, and 0 and 1 where it says so. */
static void pair_step(struct cache *cache, bool first, bool second, enum lfru_who who)
{
    for (uint32_t e = 0; e < 3; e++)
        if (e == 2 || (e == 0 ? first : second))
            lfru_use(cache->lfru, e, who);
    lfru_use(cache->lfru, PER_LAYER, who);
}

/* Of two that the last step used, the one stays that comes in runs, not one used oftener but seldom twice running. */
static void test_runs(void **state)
{
    (void)state;
    open_cache(&one, EXPERTS, PER_LAYER, 2);
    admit(&one, 0, LFRU_DECODE);
    admit(&one, 1, LFRU_DECODE);
    for (int step = 0; step <= 4800; step++) { /* often enough for every counter to be full */
        pair_step(&one, step % 16 < 4, step % 3 == 0 || step % 48 == 1, LFRU_DECODE);
        if (step < 96 || step % 48 != 0)
            continue;
        assert_true(lfru_heat(one.lfru, 0) < lfru_heat(one.lfru, 1));
        assert_int_equal(lfru_victim(one.lfru, NULL, NULL), 1);
    }
    pair_step(&one, false, false, LFRU_DECODE);
    assert_int_equal(lfru_victim(one.lfru, NULL, NULL), 0);
    lfru_close(one.lfru);
}

/* After a prompt that used both, the one stays that answers begin with, before one that comes later and for longer. */
static void test_answers_begin_alike(void **state)
{
    (void)state;
    open_cache(&one, EXPERTS, PER_LAYER, 2);
    admit(&one, 0, LFRU_DECODE);
    admit(&one, 1, LFRU_DECODE);
    for (int step = 0; step <= 160; step++) /* it ends with a prompt */
        pair_step(&one, step % 8 < 2, step % 8 == 0 || (step % 8 >= 3 && step % 8 < 6),
                  step % 8 == 0 ? LFRU_PREFILL : LFRU_DECODE);
    assert_true(lfru_heat(one.lfru, 0) < lfru_heat(one.lfru, 1));
    assert_int_equal(lfru_victim(one.lfru, NULL, NULL), 1);
    lfru_close(one.lfru);
}

static void test_held_and_refused(void **state)
{
    (void)state;
    open_cache(&one, EXPERTS, PER_LAYER, 4);
    for (uint32_t e = 0; e < 4; e++)
        use(&one, e, LFRU_DECODE);
    for (uint32_t e = 0; e < 4; e++) {
        assert_int_not_equal(lfru_victim(one.lfru, NULL, NULL), LFRU_NONE);
        lfru_hold(one.lfru, e, true);
        lfru_hold(one.lfru, e, true);
        lfru_use(one.lfru, e, LFRU_DECODE);
    }
    assert_int_equal(lfru_victim(one.lfru, NULL, NULL), LFRU_NONE);
    lfru_hold(one.lfru, 2, false);
    assert_int_equal(lfru_victim(one.lfru, NULL, NULL), 2);
    one.refused[2] = true;
    assert_int_equal(lfru_victim(one.lfru, may_go, &one), LFRU_NONE);
    lfru_remove(one.lfru, 2);
    assert_int_equal(lfru_victim(one.lfru, NULL, NULL), LFRU_NONE);
    lfru_hold(one.lfru, 300, true); /* before it comes */
    lfru_admit(one.lfru, 300, LFRU_DECODE);
    lfru_admit(one.lfru, 300, LFRU_DECODE);
    assert_int_equal(lfru_victim(one.lfru, NULL, NULL), LFRU_NONE);
    lfru_close(one.lfru);
}

/* A step of an answer: 4 experts of each layer, of the 12 from `first` on. */
static void answer_step(struct cache *cache, uint64_t *seed, uint32_t first)
{
    for (uint32_t layer = 0; layer < LAYERS; layer++)
        for (uint32_t i = 0; i < 4; i++)
            use(cache, layer * PER_LAYER + first + 3 * i + next_random(seed) % 3, LFRU_DECODE);
}

static void sweep(struct cache *cache, enum lfru_who who)
{
    for (uint32_t e = 0; e < EXPERTS; e++)
        use(cache, e, who);
}

static uint32_t residents_of_set(const struct cache *cache, uint32_t first)
{
    uint32_t count = 0;
    for (uint32_t layer = 0; layer < LAYERS; layer++)
        for (uint32_t e = 0; e < 12; e++)
            count += cache->resident[layer * PER_LAYER + first + e];
    return count;
}

/* 96 experts that answers live on, 128 slots; a prompt that uses all 512 leaves nearly all of the 96. */
static void test_scan(void **state)
{
    (void)state;
    open_cache(&one, EXPERTS, PER_LAYER, 128);
    uint64_t seed = 5;
    for (int i = 0; i < 300; i++)
        answer_step(&one, &seed, 20);
    for (int prompt = 0; prompt < 10; prompt++) {
        sweep(&one, LFRU_PREFILL);
        assert_true(residents_of_set(&one, 20) >= 90);
        for (int i = 0; i < 20; i++)
            answer_step(&one, &seed, 20);
    }
    lfru_close(one.lfru);
}

/* The work moves on to other experts, after hours and after minutes: these are resident soon, however hot the old ones were. */
static void test_drift(void **state)
{
    (void)state;
    for (int steps = 100; steps <= 20000; steps *= 200) {
        open_cache(&one, EXPERTS, PER_LAYER, 128);
        uint64_t seed = 6;
        for (int i = 0; i < steps; i++)
            answer_step(&one, &seed, 0);
        for (int i = 0; i < 200; i++)
            answer_step(&one, &seed, 40);
        assert_true(residents_of_set(&one, 40) >= 94);
        lfru_close(one.lfru);
    }
}

/* An expert that was hot, evicted, and used once more stays before those that were used once ever. */
static void test_ghosts(void **state)
{
    (void)state;
    open_cache(&one, EXPERTS, EXPERTS, 16);
    for (int i = 0; i < 50; i++)
        use(&one, 7, LFRU_DECODE);
    lfru_evict(one.lfru, 7);
    one.resident[7] = false;
    one.residents--;
    use(&one, 7, LFRU_DECODE);
    for (uint32_t e = 100; e < 200; e++)
        use(&one, e, LFRU_DECODE);
    assert_true(one.resident[7]);
    lfru_close(one.lfru);
}

static void test_guesses_go_first(void **state)
{
    (void)state;
    open_cache(&one, EXPERTS, EXPERTS, 32);
    for (uint32_t e = 0; e < 20; e++)
        use(&one, e, LFRU_DECODE);
    for (uint32_t e = 100; e < 112; e++)
        admit(&one, e, LFRU_GUESS);
    for (uint32_t e = 100; e < 104; e++)
        use(&one, e, LFRU_DECODE); /* right ones */
    for (uint32_t e = 200; e < 208; e++)
        use(&one, e, LFRU_DECODE);
    for (uint32_t e = 0; e < EXPERTS; e++)
        assert_int_equal(one.resident[e], e < 20 || (e >= 100 && e < 104) || (e >= 200 && e < 208));
    lfru_close(one.lfru);
}

/* Of two that were used as often, the one that came back as a guess goes; one that was used ten times as often stays. */
static void test_guesses_with_a_past(void **state)
{
    (void)state;
    open_cache(&one, EXPERTS, EXPERTS, 4);
    for (int i = 0; i < 20; i++)
        for (uint32_t e = 0; e < (i < 2 ? 4u : 1u); e++)
            lfru_use(one.lfru, e, LFRU_DECODE);
    admit(&one, 3, LFRU_GUESS);
    admit(&one, 2, LFRU_DECODE);
    admit(&one, 1, LFRU_DECODE);
    admit(&one, 0, LFRU_GUESS);
    assert_int_equal(lfru_victim(one.lfru, NULL, NULL), 3);
    lfru_use(one.lfru, 3, LFRU_DECODE); /* it was right */
    assert_int_not_equal(lfru_victim(one.lfru, NULL, NULL), 3);
    evict_one(&one);
    evict_one(&one);
    assert_true(one.resident[0]);
    lfru_close(one.lfru);
}

/* A prompt that uses all experts of each layer: what it has not reached stays, however cold, and what it has passed goes. */
static void test_prompt_reaches(void **state)
{
    (void)state;
    open_cache(&one, EXPERTS, PER_LAYER, EXPERTS / 2);
    for (uint32_t e = 0; e < EXPERTS; e++) /* the later layers are colder */
        for (uint32_t i = 0; i < 2 * (LAYERS - e / PER_LAYER); i++)
            lfru_use(one.lfru, e, LFRU_DECODE);
    for (uint32_t e = 0; e < EXPERTS; e += 2)
        admit(&one, e, LFRU_DECODE);
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        for (uint32_t e = layer * PER_LAYER; e < (layer + 1) * PER_LAYER; e++)
            lfru_use(one.lfru, e, LFRU_PREFILL);
        assert_true(lfru_victim(one.lfru, NULL, NULL) / PER_LAYER <= layer);
    }
    lfru_close(one.lfru);
}

/* Uses that leave no doubt: the work changes every few steps, over and over. Who counts for long keeps what is over. */
static void test_learns(void **state)
{
    (void)state;
    open_cache(&one, EXPERTS, PER_LAYER, 128);
    uint64_t seed = 8;
    for (int i = 0; i < 3000; i++) {
        if (i == 2000)
            one.uses = one.hits = 0;
        answer_step(&one, &seed, (uint32_t)(i / 20 * 17) % (PER_LAYER - 12));
    }
    assert_true((double)one.hits / (double)one.uses > 0.75);
    lfru_close(one.lfru);
}

/* What was saved and loaded again is the same, and two that were loaded alike go on alike, the coldest first. */
static void test_restore(void **state)
{
    (void)state;
    float saved[EXPERTS];
    open_cache(&one, EXPERTS, EXPERTS, 128);
    random_work(&one, 3, 30000);
    for (uint32_t e = 0; e < EXPERTS; e++)
        saved[e] = lfru_heat(one.lfru, e);
    lfru_close(one.lfru);
    open_cache(&one, EXPERTS, EXPERTS, 128);
    open_cache(&other, EXPERTS, EXPERTS, 128);
    for (uint32_t e = 0; e < EXPERTS; e++) {
        lfru_set_heat(one.lfru, e, saved[e]);
        lfru_set_heat(other.lfru, e, lfru_heat(one.lfru, e));
        assert_true(fabsf(lfru_heat(one.lfru, e) - saved[e]) <= saved[e] * 1e-6f);
        assert_true(lfru_heat(one.lfru, e) == lfru_heat(other.lfru, e));
    }
    for (uint32_t e = 0; e < 128; e++) { /* the same shares of cold and hot */
        admit(&one, 4 * e, LFRU_GUESS);
        admit(&other, 4 * e, LFRU_GUESS);
    }
    for (uint32_t i = 0; i < 64; i++) {
        uint32_t victim = lfru_victim(one.lfru, NULL, NULL), colder = 0;
        for (uint32_t e = 0; e < EXPERTS; e++)
            colder += one.resident[e] && lfru_heat(one.lfru, e) < 0.98f * lfru_heat(one.lfru, victim);
        assert_int_equal(colder, 0);
        evict_one(&one);
        evict_one(&other);
    }
    random_work(&one, 4, 30000);
    random_work(&other, 4, 30000);
    assert_int_equal(one.victims_hash, other.victims_hash);
    lfru_close(one.lfru);
    lfru_close(other.lfru);
}

/* A usage file may hold anything. */
static void test_hostile_heat(void **state)
{
    (void)state;
    const float heats[] = {NAN, -NAN, INFINITY, -INFINITY, -1, 0, 1e-38f, 3e38f};
    open_cache(&one, EXPERTS, PER_LAYER, 300);
    for (uint32_t e = 0; e < EXPERTS; e++)
        lfru_set_heat(one.lfru, e, heats[e % 8]);
    for (uint32_t e = 0; e < EXPERTS; e++)
        assert_true(lfru_heat(one.lfru, e) >= 0 && lfru_heat(one.lfru, e) < 1e9f);
    random_work(&one, 11, 50000);
    lfru_close(one.lfru);
}

static void test_nonsense(void **state)
{
    (void)state;
    struct lfru *lfru;
    struct error error;
    assert_int_equal(lfru_open(0, 8, 4, &lfru, &error), -EINVAL);
    assert_int_equal(lfru_open(8, 0, 4, &lfru, &error), -EINVAL);
    assert_int_equal(lfru_open(8, 8, 0, &lfru, &error), -EINVAL);
    assert_int_equal(lfru_open(UINT32_MAX, 8, 4, &lfru, &error), -EINVAL);
    lfru_close(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random_work),
        cmocka_unit_test(test_same_calls_same_answers),
        cmocka_unit_test(test_grown_pool),
        cmocka_unit_test(test_constant_questions),
        cmocka_unit_test(test_turns),
        cmocka_unit_test(test_recent),
        cmocka_unit_test(test_runs),
        cmocka_unit_test(test_answers_begin_alike),
        cmocka_unit_test(test_held_and_refused),
        cmocka_unit_test(test_scan),
        cmocka_unit_test(test_drift),
        cmocka_unit_test(test_ghosts),
        cmocka_unit_test(test_guesses_go_first),
        cmocka_unit_test(test_guesses_with_a_past),
        cmocka_unit_test(test_prompt_reaches),
        cmocka_unit_test(test_learns),
        cmocka_unit_test(test_restore),
        cmocka_unit_test(test_hostile_heat),
        cmocka_unit_test(test_nonsense),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
