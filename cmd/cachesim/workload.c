#include "cmd/cachesim/workload.h"

#include "proto/cleanup.h"

#include <inttypes.h>

static void close_readerp(struct trace_reader **reader)
{
    trace_close(*reader);
}

/* Room for `more` elements beside `count`. */
static int make_room(void **array, uint64_t *room, uint64_t count, uint64_t more, size_t bytes)
{
    if (count + more <= *room)
        return 0;
    uint64_t wanted = (count + more) * 2;
    void *grown = reallocarray(*array, wanted, bytes);
    if (!grown)
        return -ENOMEM;
    *array = grown;
    *room = wanted;
    return 0;
}

/* The most experts that one row of the layer uses. `counts` [TRACE_MAX_ROWS] is all 0, and is again afterwards. */
static uint32_t row_experts(const struct trace_layer *layer, uint32_t *counts)
{
    uint32_t most = 0;
    for (uint32_t i = 0; i < layer->count; i++) {
        uint32_t count = ++counts[layer->uses[i].row];
        most = count > most ? count : most;
    }
    for (uint32_t i = 0; i < layer->count; i++)
        counts[layer->uses[i].row] = 0;
    return most;
}

static void add_uses(struct workload *workload, const struct trace_layer *layer)
{
    struct workload_layer *into = &workload->layers[workload->layer_count++];
    *into = (struct workload_layer){.first = workload->use_count};
    for (uint32_t i = 0; i < layer->count; i++) {
        const struct trace_use *use = &layer->uses[i];
        if (i == 0 || use->expert != layer->uses[i - 1].expert) {
            workload->recorded_hits += use->flags & TRACE_HIT;
            workload->uses[workload->use_count++] = (struct workload_use){
                .expert = layer->layer * workload->header.experts + use->expert, .next = USED_NEVER, .prefill = true};
            into->count++;
        }
        if (!(use->flags & TRACE_PREFILL))
            workload->uses[workload->use_count - 1].prefill = false;
    }
}

/* Links each use to the expert's next one, from the end to the beginning, and counts what occurs. */
static int link_uses(struct workload *workload)
{
    _cleanup_free_ uint32_t *next = malloc(workload->experts * sizeof *next);
    bool layers[MODEL_MAX_LAYERS] = {0};
    if (!next)
        return -ENOMEM;
    for (uint32_t e = 0; e < workload->experts; e++)
        next[e] = USED_NEVER;
    for (uint32_t l = workload->layer_count; l-- > 0;) {
        struct workload_use *uses = &workload->uses[workload->layers[l].first];
        for (uint32_t i = 0; i < workload->layers[l].count; i++) {
            uses[i].next = next[uses[i].expert];
            next[uses[i].expert] = l;
        }
    }
    for (uint32_t e = 0; e < workload->experts; e++) {
        if (next[e] == USED_NEVER)
            continue;
        workload->experts_used++;
        workload->layers_used += !layers[e / workload->header.experts];
        layers[e / workload->header.experts] = true;
    }
    return 0;
}

static int read_layers(const char *path, struct trace_reader *reader, struct workload *workload,
                       struct error *ret_error)
{
    uint64_t layer_room = 0, use_room = 0, step = UINT64_MAX;
    struct trace_layer layer;
    int status;
    _cleanup_free_ uint32_t *counts = calloc(TRACE_MAX_ROWS, sizeof *counts);
    if (!counts)
        return error_set(ret_error, ENOMEM, "%s: out of memory", path);
    while ((status = trace_next(reader, &layer, ret_error)) > 0) {
        if (workload->layer_count == USED_NEVER - 1)
            return error_set(ret_error, EFBIG, "%s: more than %u layers", path, USED_NEVER - 1);
        if (make_room((void **)&workload->layers, &layer_room, workload->layer_count, 1, sizeof *workload->layers) ||
            make_room((void **)&workload->uses, &use_room, workload->use_count, layer.count, sizeof *workload->uses))
            return error_set(ret_error, ENOMEM, "%s: more uses than memory holds", path);
        if (layer.lost > INT64_MAX - workload->lost)
            return error_set(ret_error, EBADMSG, "%s: more uses are lost than can be: a damaged trace", path);
        add_uses(workload, &layer);
        uint32_t most = row_experts(&layer, counts);
        workload->row_experts = most > workload->row_experts ? most : workload->row_experts;
        workload->lost += layer.lost;
        workload->steps += layer.step != step;
        step = layer.step;
    }
    trace_slots(reader, &workload->least_slots, &workload->most_slots);
    return status;
}

int workload_read(const char *path, struct workload *ret_workload, struct error *ret_error)
{
    _cleanup_(close_readerp) struct trace_reader *reader = NULL;
    struct workload workload = {0};
    int status = trace_open(path, &reader, &workload.header, ret_error);
    if (status < 0)
        return status;
    workload.experts = workload.header.layers * workload.header.experts;
    status = read_layers(path, reader, &workload, ret_error);
    if (status == 0 && workload.use_count == 0)
        status = error_set(ret_error, ENODATA, "%s: no uses in this trace", path);
    if (status == 0 && link_uses(&workload) < 0)
        status = error_set(ret_error, ENOMEM, "%s: more experts than memory holds", path);
    if (status < 0) {
        workload_close(&workload);
        return status;
    }
    *ret_workload = workload;
    return 0;
}

void workload_close(struct workload *workload)
{
    free(workload->layers);
    free(workload->uses);
    *workload = (struct workload){0};
}
