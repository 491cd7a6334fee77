/* config.json: what the fields become, the rules where they are absent, and a table of what is refused and how it is
 * named. */
#include "proto/cleanup.h"
#include "proto/model_config.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

/* The facts of GLM-5.2. */
static json_t *glm52(void)
{
    static const char text[] =
        "{\"model_type\":\"glm_moe_dsa\",\"hidden_size\":6144,\"num_hidden_layers\":78,\"num_attention_heads\":64,"
        "\"num_key_value_heads\":64,\"vocab_size\":154880,\"max_position_embeddings\":1048576,\"rms_norm_eps\":1e-05,"
        "\"hidden_act\":\"silu\",\"tie_word_embeddings\":false,\"attention_bias\":false,\"q_lora_rank\":2048,\"kv_lora_"
        "rank\":512,"
        "\"qk_nope_head_dim\":192,\"qk_rope_head_dim\":64,\"qk_head_dim\":256,\"v_head_dim\":256,\"head_dim\":192,"
        "\"rope_parameters\":{\"rope_theta\":8000000,\"rope_type\":\"default\"},\"rope_interleave\":true,\"n_routed_"
        "experts\":256,"
        "\"n_shared_experts\":1,\"num_experts_per_tok\":8,\"moe_intermediate_size\":2048,\"intermediate_size\":12288,"
        "\"first_k_dense_replace\":3,\"n_group\":1,\"topk_group\":1,\"norm_topk_prob\":true,\"routed_scaling_factor\":"
        "2.5,"
        "\"scoring_func\":\"sigmoid\",\"topk_method\":\"noaux_tc\",\"index_topk\":2048,\"index_n_heads\":32,\"index_"
        "head_dim\":128,"
        "\"indexer_rope_interleave\":true,\"index_topk_freq\":4,\"index_skip_topk_offset\":3,\"num_nextn_predict_"
        "layers\":1,"
        "\"eos_token_id\":[154820,154827,154829],\"pad_token_id\":154820}";
    json_t *config = json_loads(text, 0, NULL);
    assert_non_null(config);
    return config;
}

static void parse_good(const json_t *config, const json_t *generation, struct model_config *ret_config)
{
    struct error error = {{0}};
    if (model_config_parse(config, generation, 0, ret_config, &error) < 0)
        fail_msg("refused: %s", error.text);
    assert_int_equal(model_config_check(ret_config, &error), 0);
}

static void test_glm52(void **state)
{
    (void)state;
    json_auto_t *config = glm52();
    struct model_config c;
    parse_good(config, NULL, &c);
    assert_int_equal(c.family, FAMILY_GLM_MOE_DSA);
    assert_string_equal(c.model_type, "glm_moe_dsa");
    assert_int_equal(c.hidden, 6144);
    assert_int_equal(c.layers, 78);
    assert_int_equal(c.heads, 64);
    assert_int_equal(c.vocab, 154880);
    assert_int_equal(c.qk_nope, 192);
    assert_int_equal(c.qk_rope, 64);
    assert_int_equal(c.v_head, 256);
    assert_int_equal(c.experts, 256);
    assert_int_equal(c.top_k, 8);
    assert_int_equal(c.expert_width, 2048);
    assert_int_equal(c.dense_width, 12288);
    assert_int_equal(c.mtp_layers, 1);
    assert_true(c.rope_theta == 8e6 && c.rms_eps == 1e-5f && c.qk_norm_eps == 1e-6f && c.index_norm_eps == 1e-6f);
    assert_true(c.routed_scaling == 2.5f && c.norm_topk_prob == 1);
    assert_int_equal(c.stop_count, 3);
    assert_int_equal(c.stops[2], 154829);
    /* Full at 0, 1, 2, 6, 10, ..., 74, and in the MTP layer. */
    for (uint32_t i = 0; i < 78; i++)
        assert_int_equal(c.indexer_kind[i], i < 2 || (i >= 2 && (i - 2) % 4 == 0) ? INDEXER_FULL : INDEXER_SHARED);
    assert_int_equal(c.indexer_kind[78], INDEXER_FULL);
    for (uint32_t i = 0; i < 79; i++)
        assert_int_equal(c.layer_kind[i], i < 3 ? LAYER_DENSE : LAYER_MOE);
    assert_int_equal(model_moe_layers(&c), 76);
    assert_int_equal(model_moe_index(&c, 2), -1);
    assert_int_equal(model_moe_index(&c, 3), 0);
    assert_int_equal(model_moe_index(&c, 78), 75);
    assert_int_equal(model_moe_index(&c, 79), -1);
}

/* Lists decide over the rules; without a frequency every layer is full; head_dim is not looked at. */
static void test_layer_rules(void **state)
{
    (void)state;
    json_auto_t *config = glm52();
    struct model_config c;
    json_object_set_new(config, "num_hidden_layers", json_integer(4));
    json_object_set_new(config, "head_dim", json_string("nonsense"));
    json_object_set_new(config, "indexer_types", json_pack("[s,s,s,s]", "full", "shared", "shared", "full"));
    json_object_set_new(config, "mlp_layer_types", json_pack("[s,s,s,s]", "dense", "sparse", "dense", "sparse"));
    parse_good(config, NULL, &c);
    assert_int_equal(c.indexer_kind[1], INDEXER_SHARED);
    assert_int_equal(c.indexer_kind[3], INDEXER_FULL);
    assert_int_equal(c.layer_kind[1], LAYER_MOE);
    assert_int_equal(c.layer_kind[2], LAYER_DENSE);
    assert_int_equal(c.layer_kind[4], LAYER_MOE);

    json_object_del(config, "indexer_types");
    json_object_del(config, "index_topk_freq");
    json_object_del(config, "index_skip_topk_offset");
    json_object_set_new(config, "mlp_layer_types", json_null());
    json_object_set_new(config, "num_nextn_predict_layers", json_integer(0));
    parse_good(config, NULL, &c);
    for (uint32_t i = 0; i < 4; i++)
        assert_int_equal(c.indexer_kind[i], INDEXER_FULL);
    assert_int_equal(c.layer_kind[2], LAYER_DENSE);
    assert_int_equal(c.layer_kind[3], LAYER_MOE);
    assert_int_equal(model_moe_layers(&c), 1);
}

static void test_places_and_aliases(void **state)
{
    (void)state;
    json_auto_t *config = glm52();
    struct model_config c;
    /* rope_theta: in rope_scaling, which replaces rope_parameters; at the top level. */
    json_object_set_new(config, "rope_scaling", json_pack("{s:f, s:s}", "rope_theta", 1e6, "type", "default"));
    parse_good(config, NULL, &c);
    assert_true(c.rope_theta == 1e6);
    json_object_set_new(config, "rope_scaling", json_null());
    json_object_del(config, "rope_parameters");
    json_object_set_new(config, "rope_theta", json_integer(50000));
    parse_good(config, NULL, &c);
    assert_true(c.rope_theta == 5e4);
    static const char *const aliases[] = {"num_experts", "num_local_experts"};
    for (size_t i = 0; i < 2; i++) {
        json_object_del(config, "n_routed_experts");
        json_object_set_new(config, aliases[i], json_integer(128));
        parse_good(config, NULL, &c);
        assert_int_equal(c.experts, 128);
        json_object_del(config, aliases[i]);
    }
}

static void test_stops(void **state)
{
    (void)state;
    json_auto_t *config = glm52(), *generation = json_object();
    struct model_config c;
    parse_good(config, generation, &c);
    assert_int_equal(c.stop_count, 3);
    json_object_set_new(generation, "eos_token_id", json_integer(7));
    parse_good(config, generation, &c);
    assert_int_equal(c.stop_count, 1);
    assert_int_equal(c.stops[0], 7);
    json_object_set_new(generation, "eos_token_id", json_pack("[i,i]", 8, 9));
    parse_good(config, generation, &c);
    assert_int_equal(c.stop_count, 2);
    assert_int_equal(c.stops[1], 9);
    json_object_set_new(generation, "eos_token_id", json_null());
    json_object_set_new(config, "eos_token_id", json_integer(5));
    parse_good(config, generation, &c);
    assert_int_equal(c.stops[0], 5);
    json_object_del(config, "eos_token_id");
    parse_good(config, generation, &c);
    assert_int_equal(c.stop_count, 0);
}

/* A member, the JSON that it becomes (NULL: it is taken away), and the words of the error. */
static const struct {
    const char *name, *value, *expected;
} refusals[] = {
    {"model_type", "\"llama\"", "model_type llama is not supported"},
    {"model_type", NULL, "model_type is missing"},
    {"model_type", "7", "model_type is missing"},
    {"rope_parameters", NULL, "rope_theta is missing"},
    {"rope_parameters", "{\"rope_type\":\"default\"}", "rope_theta is missing"},
    {"rope_parameters", "{\"rope_theta\":\"1e6\"}", "rope_theta is missing"},
    {"rope_parameters", "{\"rope_theta\":1e6,\"rope_type\":\"yarn\"}", "rope_type yarn is not supported"},
    {"rope_scaling", "{\"rope_theta\":1e6,\"type\":\"linear\"}", "type linear is not supported"},
    {"rope_parameters", "[]", "rope_parameters is not an object"},
    {"rope_parameters", "{\"rope_theta\":0}", "rope_theta is 0"},
    {"hidden_act", "\"gelu\"", "hidden_act gelu is not supported"},
    {"scoring_func", "\"softmax\"", "scoring_func softmax is not supported"},
    {"topk_method", "\"greedy\"", "topk_method greedy is not supported"},
    {"attention_bias", "true", "attention_bias true is not supported"},
    {"attention_bias", "0", "attention_bias is neither true nor false"},
    {"tie_word_embeddings", "true", "tie_word_embeddings true is not supported"},
    {"num_key_value_heads", "8", "num_key_value_heads must be 64"},
    {"qk_head_dim", "192", "qk_head_dim must be 256"},
    {"moe_layer_freq", "2", "moe_layer_freq must be 1"},
    {"hidden_size", NULL, "hidden_size is missing"},
    {"hidden_size", "6144.0", "hidden_size is not a whole number"},
    {"hidden_size", "-64", "hidden_size is -64"},
    {"hidden_size", "0", "hidden_size is 0"},
    {"hidden_size", "6145", "hidden_size is 6145, which is not a multiple of 64"},
    {"hidden_size", "4294967360", "hidden_size is 4294967360"},
    {"vocab_size", "154881", "vocab_size is 154881, which is not a multiple of 16"},
    {"num_hidden_layers", "160", "num_hidden_layers is 160"},
    {"num_hidden_layers", "1000000000000", "num_hidden_layers is 1000000000000"},
    {"num_experts_per_tok", "33", "num_experts_per_tok is 33"},
    {"n_routed_experts", "4", "num_experts_per_tok is 8 of 4"},
    {"n_routed_experts", "2048", "n_routed_experts is 2048"},
    {"n_shared_experts", "17", "n_shared_experts is 17"},
    {"n_group", "3", "n_group 3"},
    {"topk_group", "2", "topk_group 2"},
    {"num_nextn_predict_layers", "2", "num_nextn_predict_layers is 2"},
    {"rms_norm_eps", NULL, "rms_norm_eps is missing"},
    {"rms_norm_eps", "0", "rms_norm_eps is 0"},
    {"rms_norm_eps", "\"1e-5\"", "rms_norm_eps is not a number"},
    {"routed_scaling_factor", "-1", "routed_scaling_factor is -1"},
    {"norm_topk_prob", "1", "norm_topk_prob is neither"},
    {"indexer_types", "[\"full\"]", "indexer_types is not a list of 78"},
    {"index_topk_freq", "0", "index_topk_freq is not"},
    {"index_skip_topk_offset", "-1", "index_skip_topk_offset is not"},
    {"index_head_dim", "32", "index_head_dim is 32"},
    {"first_k_dense_replace", NULL, "first_k_dense_replace"},
    {"eos_token_id", "154880", "eos_token_id"},
    {"eos_token_id", "[1,\"2\"]", "eos_token_id"},
    {"eos_token_id", "[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1]", "more than 16"},
};

static void test_refusals(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof refusals / sizeof refusals[0]; i++) {
        json_auto_t *config = glm52();
        if (refusals[i].value)
            json_object_set_new(config, refusals[i].name, json_loads(refusals[i].value, JSON_DECODE_ANY, NULL));
        else
            json_object_del(config, refusals[i].name);
        struct model_config c;
        struct error error = {{0}};
        if (model_config_parse(config, NULL, 0, &c, &error) >= 0)
            fail_msg("accepted: %s %s", refusals[i].name, refusals[i].value ? refusals[i].value : "missing");
        if (!strstr(error.text, refusals[i].expected))
            fail_msg("%s\n  without: %s", error.text, refusals[i].expected);
    }
}

static void test_refused_lists(void **state)
{
    (void)state;
    json_auto_t *config = glm52();
    json_object_set_new(config, "num_hidden_layers", json_integer(2));
    struct model_config c;
    struct error error = {{0}};
    json_object_set_new(config, "indexer_types", json_pack("[s,s]", "shared", "full"));
    assert_true(model_config_parse(config, NULL, 0, &c, &error) < 0 && strstr(error.text, "layer 0 is shared"));
    json_object_set_new(config, "indexer_types", json_pack("[s,s]", "full", "half"));
    assert_true(model_config_parse(config, NULL, 0, &c, &error) < 0 && strstr(error.text, "layer 1 is half"));
    json_object_set_new(config, "indexer_types", json_pack("[s,s]", "full", "full"));
    json_object_set_new(config, "mlp_layer_types", json_pack("[s,i]", "dense", 1));
    assert_true(model_config_parse(config, NULL, 0, &c, &error) < 0 && strstr(error.text, "layer 1 is not a text"));
    json_auto_t *array = json_array();
    assert_true(model_config_parse(array, NULL, 0, &c, &error) < 0);
    assert_true(model_config_parse(NULL, NULL, 0, &c, &error) < 0);
    json_object_del(config, "mlp_layer_types");
    assert_true(model_config_parse(config, array, 0, &c, &error) < 0 && strstr(error.text, "generation"));
    assert_true(model_config_parse(config, NULL, 1.0, &c, &error) < 0 && strstr(error.text, "qk_norm_eps"));
    assert_true(model_config_parse(config, NULL, -1e-6, &c, &error) < 0 && strstr(error.text, "qk_norm_eps"));
}

/* A config from shared memory: whatever single 32-bit word another process writes, the check ends and never lets a
 * value through that would make a size overflow. */
static void test_check(void **state)
{
    (void)state;
    json_auto_t *config = glm52();
    struct model_config good, bad;
    parse_good(config, NULL, &good);
    static const uint32_t words[] = {0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF};
    for (size_t offset = 0; offset + 4 <= sizeof good; offset += 4) {
        for (size_t w = 0; w < sizeof words / sizeof words[0]; w++) {
            bad = good;
            memcpy((char *)&bad + offset, &words[w], 4);
            struct error error = {{0}};
            if (model_config_check(&bad, &error) == 0) {
                assert_true(bad.layers + bad.mtp_layers <= MODEL_MAX_LAYERS && bad.top_k <= MODEL_MAX_TOP_K);
                assert_true(bad.experts <= MODEL_MAX_EXPERTS && bad.stop_count <= MODEL_MAX_STOPS &&
                            bad.hidden <= 65536);
            } else {
                assert_true(error.text[0] != '\0');
            }
        }
    }
    bad = good;
    bad.family = 99;
    assert_true(model_config_check(&bad, NULL) < 0);
    bad = good;
    bad.layer_kind[5] = 7;
    assert_true(model_config_check(&bad, NULL) < 0);
    bad = good;
    bad.stop_count = MODEL_MAX_STOPS + 1;
    assert_true(model_config_check(&bad, NULL) < 0);
    bad = good;
    bad.stops[0] = -1;
    assert_true(model_config_check(&bad, NULL) < 0);
    bad = good;
    bad.rms_eps = __builtin_nanf("");
    assert_true(model_config_check(&bad, NULL) < 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_glm52), cmocka_unit_test(test_layer_rules), cmocka_unit_test(test_places_and_aliases),
        cmocka_unit_test(test_stops), cmocka_unit_test(test_refusals),    cmocka_unit_test(test_refused_lists),
        cmocka_unit_test(test_check),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
