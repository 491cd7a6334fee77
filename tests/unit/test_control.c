/* The control segment: every fact is checked on both sides, and raising the epoch ends every wait. */
#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "proto/weights.h"
#include "shm/control.h"
#include "shm/futex.h"

static char instance[INSTANCE_NAME_MAX];

static void make_facts(struct facts *ret_facts)
{
    static const char text[] =
        "{\"model_type\": \"glm_moe_dsa\", \"hidden_size\": 64, \"num_hidden_layers\": 2, \"num_attention_heads\": 4, "
        "\"vocab_size\": 64,"
        "\"max_position_embeddings\": 4096, \"q_lora_rank\": 64, \"kv_lora_rank\": 64, \"qk_nope_head_dim\": 64, "
        "\"qk_rope_head_dim\": 32,"
        "\"v_head_dim\": 64, \"index_topk\": 64, \"index_n_heads\": 4, \"index_head_dim\": 64, \"n_routed_experts\": 8,"
        "\"num_experts_per_tok\": 4, \"n_shared_experts\": 1, \"moe_intermediate_size\": 64, \"intermediate_size\": 64,"
        "\"first_k_dense_replace\": 1, \"rms_norm_eps\": 1e-5, \"rope_theta\": 10000}";
    struct error error;
    json_auto_t *config = json_loads(text, 0, NULL);
    *ret_facts = (struct facts){.container = "/models/m",
                                .stripes = 1,
                                .dense_format = WEIGHT_INT8,
                                .expert_format = WEIGHT_INT4,
                                .workers = 2,
                                .threads = 1,
                                .nodes = 2,
                                .activations = ACTIVATIONS_INT8,
                                .kv = KV_F16,
                                .index_topk = 64,
                                .max_rows = 8,
                                .logit_rows = 8,
                                .kv_pages = 4,
                                .page_tokens = 64,
                                .context = 256,
                                .slots = 2,
                                .prefill_chunk = 8,
                                .pool_slots = 8};
    ret_facts->worker_node[1] = 1;
    ret_facts->core_count[0] = ret_facts->core_count[1] = 2;
    ret_facts->cores[0][1] = 1023;
    if (model_config_parse(config, NULL, 0, &ret_facts->config, &error) < 0)
        fail_msg("%s", error.text);
}

static void test_facts_travel(void **state)
{
    (void)state;
    struct facts facts, seen;
    struct control *control, *view;
    struct error error;
    make_facts(&facts);
    if (control_create(instance, &facts, &control, &error) < 0)
        fail_msg("%s", error.text);
    assert_int_equal(control_create(instance, &facts, &view, &error), -EEXIST);
    if (control_attach(instance, &view, &seen, &error) < 0)
        fail_msg("%s", error.text);
    assert_memory_equal(&seen, &facts, sizeof(facts));
    assert_int_equal(view->epoch, 1);
    assert_int_equal(view->serving, 0);
    for (uint32_t w = 0; w < MAX_WORKERS; w++) /* one cache line a writer */
        assert_true((uintptr_t)&view->workers[w].arrived / CACHE_LINE !=
                    (uintptr_t)&view->workers[w].published / CACHE_LINE);
    control_detach(view);
    control_detach(control);
    segment_unlink_all(instance);
}

struct lie {
    const char *name; /* what the line must say */
    size_t offset;
    uint32_t value;
};
#define LIE(member, value)                                                                                             \
    {                                                                                                                  \
        #member, offsetof(struct facts, member), value                                                                 \
    }

static void test_lies(void **state)
{
    (void)state;
    static const struct lie lies[] = {
        LIE(dense_format, 3),
        LIE(expert_format, 0),
        LIE(workers, 0),
        LIE(workers, 9),
        LIE(threads, 0),
        LIE(threads, 100000),
        LIE(nodes, 0),
        LIE(nodes, 3),
        LIE(nodes, 16),
        LIE(spin, 2),
        LIE(activations, 0),
        LIE(kv, 3),
        LIE(io, 3),
        LIE(index_topk, 0),
        LIE(max_rows, 0),
        LIE(max_rows, UINT32_MAX),
        LIE(logit_rows, 0),
        LIE(kv_pages, 0),
        LIE(kv_pages, UINT32_MAX),
        LIE(page_tokens, 0),
        LIE(context, 0),
        LIE(slots, 9),
        LIE(prefill_chunk, 0),
        LIE(queue, UINT32_MAX),
        LIE(pool_slots, 3),
        LIE(pool_slots, UINT32_MAX),
        LIE(hugepages, 2),
        LIE(prefetch, 3),
        LIE(isa, 1000),
        {"worker_node", offsetof(struct facts, worker_node) + 4, 2},
        {"core_count", offsetof(struct facts, core_count), 0},
        {"core ", offsetof(struct facts, cores), 1024},
        {"container", offsetof(struct facts, container), 0},
        {"", offsetof(struct facts, config) + offsetof(struct model_config, top_k), 9},
        {"", offsetof(struct facts, config) + offsetof(struct model_config, layers), MODEL_MAX_LAYERS + 1},
    };
    struct facts facts, seen;
    struct control *control, *view;
    struct error error;
    make_facts(&facts);
    assert_int_equal(control_create(instance, &facts, &control, &error), 0);
    for (size_t i = 0; i < sizeof(lies) / sizeof(lies[0]); i++) {
        memcpy((char *)&control->facts + lies[i].offset, &lies[i].value, sizeof(uint32_t));
        error.text[0] = 0;
        if (control_attach(instance, &view, &seen, &error) == 0)
            fail_msg("%s may be %u", lies[i].name, lies[i].value);
        if (!strstr(error.text, lies[i].name))
            fail_msg("%s is not named in: %s", lies[i].name, error.text);
        struct facts wrong = facts;
        memcpy((char *)&wrong + lies[i].offset, &lies[i].value, sizeof(uint32_t));
        assert_true(control_create("other-instance", &wrong, &view, &error) < 0);
        control->facts = facts;
    }
    memset(control->facts.container, 'x', sizeof(control->facts.container)); /* no end */
    assert_true(control_attach(instance, &view, &seen, &error) < 0);
    control->facts = facts;
    snprintf(control->facts.mirror, sizeof(control->facts.mirror), "relative");
    assert_int_equal(control_attach(instance, &view, &seen, &error), -EBADMSG);
    assert_non_null(strstr(error.text, "mirror"));
    memset(control->facts.mirror, '/', sizeof(control->facts.mirror));
    assert_int_equal(control_attach(instance, &view, &seen, &error), -EBADMSG);
    control_detach(control);
    segment_unlink_all(instance);
}

struct sleeper {
    struct control *control;
    _Atomic uint32_t *word;
};

/* As every wait does: read the word, look at the condition, sleep on the value read. */
static void *sleep_until_raised(void *argument)
{
    struct sleeper *sleeper = argument;
    while (true) {
        uint32_t seen = atomic_load(sleeper->word);
        if (atomic_load(&sleeper->control->epoch) != 1)
            return NULL;
        futex_wait(sleeper->word, seen, -1); /* no timeout: a lost wake hangs the test */
    }
}

static void test_raise_epoch(void **state)
{
    (void)state;
    for (int round = 0; round < 200; round++) {
        struct facts facts;
        struct control *control;
        make_facts(&facts);
        assert_int_equal(control_create(instance, &facts, &control, NULL), 0);
        pthread_t threads[4];
        struct sleeper sleepers[4];
        for (uint32_t i = 0; i < 4; i++) {
            struct worker_line *line = &control->workers[i / 2];
            sleepers[i] = (struct sleeper){control, i % 2 ? &line->sequence : &line->published};
            assert_int_equal(pthread_create(&threads[i], NULL, sleep_until_raised, &sleepers[i]), 0);
        }
        if (round % 2)
            usleep(round * 10u);
        uint32_t published = control->workers[7].published, sequence = control->workers[7].sequence;
        assert_int_equal(control_raise_epoch(control), 2);
        assert_true(control->workers[7].published != published && control->workers[7].sequence != sequence);
        for (uint32_t i = 0; i < 4; i++)
            pthread_join(threads[i], NULL);
        control_detach(control);
        segment_unlink_all(instance);
    }
}

int main(void)
{
    snprintf(instance, sizeof(instance), "test-control-%d", (int)getpid());
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_facts_travel),
        cmocka_unit_test(test_lies),
        cmocka_unit_test(test_raise_epoch),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    segment_unlink_all(instance);
    return failed;
}
