#include "cmd/convert/report.h"

#include "proto/bytes_text.h"
#include "proto/container.h"

#include <inttypes.h>
#include <string.h>

#define INDEX_KEY_SCALE_BYTES 4u /* of each group of 64 of an index key */

bool report_read_each_token(const struct model_config *config, const char *tensor)
{
    char prefix[32];
    snprintf(prefix, sizeof prefix, "model.layers.%u.", config->layers);
    return strncmp(tensor, "model.embed_tokens.", 19) != 0 && strncmp(tensor, prefix, strlen(prefix)) != 0 &&
           strcmp(tensor, "padding") != 0;
}

/* Latents in f16 in every layer, index keys as int8 in groups where the layer has an indexer. */
static uint64_t kv_bytes_token(const struct model_config *config)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < config->layers + config->mtp_layers; i++) {
        bytes += 2ull * (config->kv_lora + config->qk_rope);
        if (config->indexer_kind[i] == INDEXER_FULL)
            bytes += config->index_dim + config->index_dim / BLOCK_COLUMNS * INDEX_KEY_SCALE_BYTES;
    }
    return bytes;
}

static uint32_t count_full(const struct model_config *config)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < config->layers; i++)
        count += config->indexer_kind[i] == INDEXER_FULL;
    return count;
}

/* MoE layers that every token goes through: the MTP layer is not one. */
static uint32_t main_moe_layers(const struct model_config *config)
{
    return model_moe_layers(config) - config->mtp_layers;
}

static uint64_t expert_bytes_token(const struct model_facts *facts)
{
    return (uint64_t)main_moe_layers(facts->config) * facts->config->top_k * EXPERT_SLICES * facts->slice_bytes;
}

json_t *report_facts(const struct model_facts *facts)
{
    const struct model_config *c = facts->config;
    json_t *shapes =
        json_pack("{s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i}", "hidden", (int)c->hidden, "layers",
                  (int)c->layers, "moe_layers", (int)main_moe_layers(c), "mtp_layers", (int)c->mtp_layers, "heads",
                  (int)c->heads, "vocab", (int)c->vocab, "max_positions", (int)c->max_positions, "experts",
                  (int)c->experts, "top_k", (int)c->top_k, "expert_width", (int)c->expert_width, "index_topk",
                  (int)c->index_topk, "full_indexers", (int)count_full(c));
    uint64_t blob = EXPERT_SLICES * facts->slice_bytes, experts = expert_bytes_token(facts);
    return json_pack("{s:s, s:o, s:s, s:s, s:I, s:I, s:I, s:I, s:{s:I, s:I, s:I}, s:I, s:I, s:I}", "family",
                     c->model_type, "shapes", shapes, "dense_format", weight_format_name(facts->dense_format),
                     "expert_format", weight_format_name(facts->expert_format), "total_bytes",
                     (json_int_t)(facts->dense_bytes + facts->expert_bytes), "dense_bytes",
                     (json_int_t)facts->dense_bytes, "experts_bytes", (json_int_t)facts->expert_bytes, "expert_bytes",
                     (json_int_t)blob, "bytes_per_token", "dense", (json_int_t)facts->dense_token_bytes, "experts",
                     (json_int_t)experts, "total", (json_int_t)(facts->dense_token_bytes + experts), "experts_total",
                     (json_int_t)model_moe_layers(c) * c->experts, "kv_bytes_per_token", (json_int_t)kv_bytes_token(c),
                     "kv_bytes_full_context", (json_int_t)(kv_bytes_token(c) * c->max_positions));
}

void report_print(const struct model_facts *facts, FILE *out)
{
    const struct model_config *c = facts->config;
    uint64_t experts = expert_bytes_token(facts);
    fprintf(out, "family          %s\n", c->model_type);
    fprintf(out, "layers          %u (%u MoE)%s, hidden %u, %u heads, vocabulary %u\n", c->layers, main_moe_layers(c),
            c->mtp_layers ? " + 1 MTP" : "", c->hidden, c->heads, c->vocab);
    fprintf(out,
            "attention       MLA: q %u, kv %u, %u + %u, v %u; DSA: best %u keys, %u of %u layers with an indexer\n",
            c->q_lora, c->kv_lora, c->qk_nope, c->qk_rope, c->v_head, c->index_topk, count_full(c), c->layers);
    fprintf(out, "experts         %u a layer, %u active, %u shared, width %u\n", c->experts, c->top_k,
            c->shared_experts, c->expert_width);
    fprintf(out, "formats         experts %s, dense %s, in groups of %u\n", weight_format_name(facts->expert_format),
            weight_format_name(facts->dense_format), BLOCK_COLUMNS);
    fprintf(out, "size            %s: dense %s, experts %s\n",
            bytes_text(facts->dense_bytes + facts->expert_bytes).text, bytes_text(facts->dense_bytes).text,
            bytes_text(facts->expert_bytes).text);
    fprintf(out, "an expert       %s (%" PRIu64 " bytes); %u of them\n",
            bytes_text(EXPERT_SLICES * facts->slice_bytes).text, EXPERT_SLICES * facts->slice_bytes,
            model_moe_layers(c) * c->experts);
    fprintf(out, "a token reads   %s: dense %s, experts %s\n", bytes_text(facts->dense_token_bytes + experts).text,
            bytes_text(facts->dense_token_bytes).text, bytes_text(experts).text);
    fprintf(out, "context         %u tokens, %s each, %s in all\n", c->max_positions,
            bytes_text(kv_bytes_token(c)).text, bytes_text(kv_bytes_token(c) * c->max_positions).text);
}

static uint64_t plan_token_bytes(const struct plan *plan)
{
    uint64_t bytes = 0;
    for (size_t f = 0; f < plan->file_count; f++) {
        const struct plan_file *file = &plan->files[f];
        for (size_t i = 0; !file->experts && i < file->tensor_count; i++)
            bytes += report_read_each_token(&plan->config, file->tensors[i].name) ? file->tensors[i].bytes : 0;
    }
    return bytes;
}

struct model_facts report_plan_facts(const struct plan *plan)
{
    return (struct model_facts){.config = &plan->config,
                                .dense_format = plan->options.dense,
                                .expert_format = plan->options.experts,
                                .dense_bytes = plan->dense_bytes,
                                .expert_bytes = plan->expert_bytes,
                                .dense_token_bytes = plan_token_bytes(plan),
                                .slice_bytes = plan->slice_bytes};
}

void report_plan(const struct plan *plan, bool json, FILE *out)
{
    struct model_facts facts = report_plan_facts(plan);
    if (!json) {
        report_print(&facts, out);
        fprintf(out, "files           %zu\n", plan->file_count);
        for (size_t i = 0; i < plan->file_count; i++)
            fprintf(out, "  %-28s %15" PRIu64 " bytes, %zu tensors\n", plan->files[i].name, plan->files[i].bytes,
                    plan->files[i].tensor_count);
        return;
    }
    json_auto_t *object = report_facts(&facts), *files = json_object();
    for (size_t i = 0; i < plan->file_count; i++)
        json_object_set_new(files, plan->files[i].name, json_integer((json_int_t)plan->files[i].bytes));
    json_object_set(object, "files", files);
    json_dumpf(object, out, JSON_INDENT(1));
    fputc('\n', out);
}
