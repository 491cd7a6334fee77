/* Configurations of public models, as in their config.json, as far as shapes and semantics need it. */
#include "cmd/convert/synth.h"

#include <string.h>

static const char glm_5_2[] =
    "{\"architectures\": [\"GlmMoeDsaForCausalLM\"], \"model_type\": \"glm_moe_dsa\", \"vocab_size\": 154880, "
    "\"hidden_size\": 6144,"
    " \"num_hidden_layers\": 78, \"num_attention_heads\": 64, \"num_key_value_heads\": 64, "
    "\"max_position_embeddings\": 1048576,"
    " \"rms_norm_eps\": 1e-05, \"hidden_act\": \"silu\", \"tie_word_embeddings\": false, \"attention_bias\": false,"
    " \"q_lora_rank\": 2048, \"kv_lora_rank\": 512, \"qk_nope_head_dim\": 192, \"qk_rope_head_dim\": 64, "
    "\"qk_head_dim\": 256,"
    " \"v_head_dim\": 256, \"rope_parameters\": {\"rope_theta\": 8000000, \"rope_type\": \"default\"}, "
    "\"rope_interleave\": true,"
    " \"n_routed_experts\": 256, \"n_shared_experts\": 1, \"num_experts_per_tok\": 8, \"moe_intermediate_size\": 2048,"
    " \"intermediate_size\": 12288, \"first_k_dense_replace\": 3, \"n_group\": 1, \"topk_group\": 1, "
    "\"norm_topk_prob\": true,"
    " \"routed_scaling_factor\": 2.5, \"scoring_func\": \"sigmoid\", \"topk_method\": \"noaux_tc\", \"index_topk\": "
    "2048,"
    " \"index_n_heads\": 32, \"index_head_dim\": 128, \"indexer_rope_interleave\": true, \"index_topk_freq\": 4,"
    " \"index_skip_topk_offset\": 3, \"index_share_for_mtp_iteration\": true, \"num_nextn_predict_layers\": 1,"
    " \"eos_token_id\": [154820, 154827, 154829], \"pad_token_id\": 154820}";

/* OLMoE-1B-7B's sizes (layers, widths, experts, heads, vocabulary; bytes a token within 3 %), carried by the one family there is: latent
 * attention with q_lora as wide as the model, and a sigmoid router, where OLMoE has plain heads and a softmax. */
static const char olmoe[] =
    "{\"architectures\": [\"GlmMoeDsaForCausalLM\"], \"model_type\": \"glm_moe_dsa\", \"vocab_size\": 50304, "
    "\"hidden_size\": 2048,"
    " \"num_hidden_layers\": 16, \"num_attention_heads\": 16, \"num_key_value_heads\": 16, "
    "\"max_position_embeddings\": 4096,"
    " \"rms_norm_eps\": 1e-05, \"hidden_act\": \"silu\", \"tie_word_embeddings\": false, \"attention_bias\": false,"
    " \"q_lora_rank\": 2048, \"kv_lora_rank\": 512, \"qk_nope_head_dim\": 64, \"qk_rope_head_dim\": 64, "
    "\"qk_head_dim\": 128,"
    " \"v_head_dim\": 128, \"rope_parameters\": {\"rope_theta\": 10000, \"rope_type\": \"default\"}, "
    "\"rope_interleave\": false,"
    " \"n_routed_experts\": 64, \"n_shared_experts\": 0, \"num_experts_per_tok\": 8, \"moe_intermediate_size\": 1024,"
    " \"intermediate_size\": 1024, \"first_k_dense_replace\": 0, \"n_group\": 1, \"topk_group\": 1, "
    "\"norm_topk_prob\": false,"
    " \"routed_scaling_factor\": 1.0, \"scoring_func\": \"sigmoid\", \"topk_method\": \"noaux_tc\", \"index_topk\": "
    "4096,"
    " \"index_n_heads\": 16, \"index_head_dim\": 64, \"indexer_rope_interleave\": false, \"index_topk_freq\": 1,"
    " \"index_skip_topk_offset\": 0, \"num_nextn_predict_layers\": 0, \"eos_token_id\": 50279, \"pad_token_id\": 1}";

static const struct {
    const char *name, *config;
} models[] = {{"glm-5.2", glm_5_2}, {"olmoe", olmoe}};

const char *synth_model(const char *name)
{
    for (size_t i = 0; i < sizeof models / sizeof models[0]; i++)
        if (!strcmp(models[i].name, name))
            return models[i].config;
    return NULL;
}

const char *synth_model_names(void)
{
    return "glm-5.2, olmoe";
}
