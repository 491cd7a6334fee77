/* Experts that a user holds in the pool: what was asked for, into the bits that iod follows. */
#include "cmd/supervisor/supervise.h"

#include "proto/parse.h"

#include <inttypes.h>
#include <string.h>

/* The id of "LAYER:EXPERT". */
static int parse_expert(const struct facts *facts, const char *text, uint32_t *ret_expert, struct error *ret_error)
{
    const struct model_config *config = &facts->config;
    char layer_text[16] = "";
    const char *colon = strchr(text, ':');
    uint64_t layer, expert;
    if (colon && (size_t)(colon - text) < sizeof layer_text)
        memcpy(layer_text, text, (size_t)(colon - text));
    if (!colon || parse_number(layer_text, 0, UINT32_MAX, &layer) || parse_number(colon + 1, 0, UINT32_MAX, &expert))
        return error_set(ret_error, EINVAL, "%.40s: LAYER:EXPERT is expected, as `calypte pool` lists them", text);
    int index = layer < MODEL_MAX_LAYERS ? model_moe_index(config, (uint32_t)layer) : -1;
    if (index < 0)
        return error_set(ret_error, EINVAL, "%.40s: layer %" PRIu64 " has no experts", text, layer);
    if (expert >= config->experts)
        return error_set(ret_error, EINVAL, "%.40s: a layer has the experts 0 to %u", text, config->experts - 1);
    *ret_expert = (uint32_t)index * config->experts + (uint32_t)expert;
    return 0;
}

static uint32_t held_count(const uint64_t bits[HOLD_WORDS])
{
    uint32_t count = 0;
    for (uint32_t w = 0; w < HOLD_WORDS; w++)
        count += (uint32_t)__builtin_popcountll(bits[w]);
    return count;
}

static int change(const struct supervisor *supervisor, const json_t *list, bool hold, uint64_t bits[HOLD_WORDS],
                  struct error *ret_error)
{
    const char *name = hold ? "hold" : "release";
    size_t i;
    json_t *item;
    if (list && !json_is_array(list))
        return error_set(ret_error, EINVAL, "%s is a list of strings, LAYER:EXPERT", name);
    json_array_foreach (list, i, item) {
        const char *text = json_string_value(item);
        uint32_t expert;
        if (!text)
            return error_set(ret_error, EINVAL, "%s is a list of strings, LAYER:EXPERT", name);
        if (!hold && !strcmp(text, "all")) {
            memset(bits, 0, HOLD_WORDS * sizeof *bits);
            continue;
        }
        int status = parse_expert(&supervisor->plan.facts, text, &expert, ret_error);
        if (status)
            return error_prefix(ret_error, status, "%s", name);
        uint64_t bit = UINT64_C(1) << expert % 64;
        bits[expert / 64] = hold ? bits[expert / 64] | bit : bits[expert / 64] & ~bit;
    }
    return 0;
}

int supervisor_change_holds(struct supervisor *supervisor, const json_t *request, uint32_t slots,
                            struct error *ret_error)
{
    const json_t *hold = json_object_get(request, "hold"), *release = json_object_get(request, "release");
    if (!hold && !release)
        return 0;
    uint64_t bits[HOLD_WORDS];
    for (uint32_t w = 0; w < HOLD_WORDS; w++)
        bits[w] = atomic_load_explicit(&supervisor->control->holds[w], memory_order_relaxed);
    int status = change(supervisor, release, false, bits, ret_error);
    if (!status)
        status = change(supervisor, hold, true, bits, ret_error);
    if (status)
        return status;
    if (hold && held_count(bits) > slots / 2)
        return error_set(ret_error, ENOSPC,
                         "hold: %u experts would be held, and of a pool of %u slots at most half may be: release some, "
                         "or enlarge the pool (--size)",
                         held_count(bits), slots);
    for (uint32_t w = 0; w < HOLD_WORDS; w++)
        atomic_store_explicit(&supervisor->control->holds[w], bits[w], memory_order_relaxed);
    atomic_fetch_add(&supervisor->control->holds_changed, 1);
    supervisor_ring(supervisor->doorbell_fd);
    return 0;
}

json_t *supervisor_holds_json(const struct supervisor *supervisor)
{
    const struct model_config *config = &supervisor->plan.facts.config;
    json_t *list = json_array();
    uint32_t index = 0;
    for (uint32_t layer = 0; layer < config->layers + config->mtp_layers; layer++) {
        if (model_moe_index(config, layer) < 0)
            continue;
        for (uint32_t e = 0; e < config->experts; e++) {
            uint32_t expert = index * config->experts + e;
            if (atomic_load_explicit(&supervisor->control->holds[expert / 64], memory_order_relaxed) >> expert % 64 & 1)
                json_array_append_new(list, json_sprintf("%u:%u", layer, e));
        }
        index++;
    }
    return list;
}
