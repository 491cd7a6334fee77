#include "cmd/convert/unit.h"

#include "cmd/convert/quantise.h"
#include "cmd/convert/synth.h"
#include "cmd/convert/tensor_stream.h"
#include "proto/cleanup.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define STRIP_ROWS 128u /* rows of a matrix that are in memory at once */

/* The matrix that a unit makes, seen as strips of whole block rows: strips of 128 rows, or one head each for the
 * halves of kv_b_proj. It is read twice, first for the largest magnitude; the second time usually comes from the page
 * cache. */
struct view {
    struct source *source;
    uint32_t strips;
    uint64_t strip_rows;    /* of the source, and all the rows that a strip takes from it */
    uint64_t stride, first; /* strip s takes rows from s * stride + first on */
    bool transposed;
    uint64_t rows, columns; /* of the largest strip, as it comes out */
    float *values, *scratch;
};

static void view_close(struct view *view)
{
    free(view->values);
    free(view->scratch);
}

static int view_open(const struct plan *plan, const struct plan_unit *unit, struct source *source,
                     struct view *ret_view, struct error *ret_error)
{
    const struct model_config *config = &plan->config;
    struct view view = {.source = source, .columns = source->columns};
    if (unit->kind == UNIT_W_UK || unit->kind == UNIT_W_UV) {
        view.strips = config->heads;
        view.stride = (uint64_t)config->qk_nope + config->v_head;
        view.transposed = unit->kind == UNIT_W_UK;
        view.first = view.transposed ? 0 : config->qk_nope;
        view.strip_rows = view.transposed ? config->qk_nope : config->v_head;
    } else {
        view.strips = (uint32_t)((source->rows + STRIP_ROWS - 1) / STRIP_ROWS);
        view.stride = view.strip_rows = STRIP_ROWS;
    }
    view.rows = view.strip_rows;
    if (view.transposed) {
        view.rows = source->columns;
        view.columns = view.strip_rows;
    }
    view.values = malloc(view.rows * view.columns * sizeof(float));
    view.scratch = view.transposed ? malloc(view.rows * view.columns * sizeof(float)) : NULL;
    *ret_view = view;
    if (!view.values || (view.transposed && !view.scratch))
        return error_set(ret_error, ENOMEM, "tensor %s: no memory for %llu rows", source->weight->tensor->name,
                         (unsigned long long)view.rows);
    return 0;
}

/* Fills view->values with strip s; *ret_rows rows of view->columns. */
static int view_read(struct view *view, uint32_t s, uint64_t *ret_rows, struct error *ret_error)
{
    uint64_t first = s * view->stride + view->first, count = view->strip_rows;
    if (first + count > view->source->rows)
        count = view->source->rows - first;
    int status = source_read(view->source, first, count, view->transposed ? view->scratch : view->values, ret_error);
    if (status < 0)
        return status;
    *ret_rows = view->transposed ? view->rows : count;
    for (uint64_t r = 0; view->transposed && r < view->rows; r++) {
        for (uint64_t c = 0; c < view->columns; c++)
            view->values[r * view->columns + c] = view->scratch[c * view->rows + r];
    }
    return 0;
}

static int find_exponent(const struct unit_target *target, struct view *view, enum weight_format format,
                         int *ret_exponent, struct error *ret_error)
{
    float absmax = 0;
    for (uint32_t s = 0; s < view->strips; s++) {
        uint64_t rows = 0;
        int status = unit_stopped(target, ret_error);
        if (status == 0)
            status = view_read(view, s, &rows, ret_error);
        if (status < 0)
            return status;
        for (uint64_t i = 0; i < rows * view->columns; i++)
            absmax = fabsf(view->values[i]) > absmax ? fabsf(view->values[i]) : absmax;
    }
    *ret_exponent = quantise_exponent(format, absmax);
    return 0;
}

static int quantise_strips(const struct unit_target *target, const struct plan_unit *unit, struct view *view,
                           int exponent, struct tensor_stream *quanta_stream, struct tensor_stream *scales_stream,
                           struct error *ret_error)
{
    uint32_t k = (uint32_t)view->columns;
    size_t quanta_row = quanta_bytes(unit->format, 1, k), scales_row = scales_bytes(1, k);
    size_t most = (size_t)view->rows / BLOCK_ROWS;
    _cleanup_free_ uint8_t *quanta = malloc(most * quanta_row);
    _cleanup_free_ uint16_t *scales = malloc(most * scales_row);
    if (!quanta || !scales)
        return error_set(ret_error, ENOMEM, "tensor %s: no memory to quantise it", view->source->weight->tensor->name);
    for (uint32_t s = 0; s < view->strips; s++) {
        uint64_t rows = 0;
        int status = unit_stopped(target, ret_error);
        if (status == 0)
            status = view_read(view, s, &rows, ret_error);
        if (status < 0)
            return status;
        size_t blocks = (size_t)rows / BLOCK_ROWS;
        for (size_t b = 0; b < blocks; b++)
            quantise_block_row(unit->format, exponent, view->values + b * BLOCK_ROWS * k, k, quanta + b * quanta_row,
                               scales + b * scales_row / sizeof scales[0]);
        status = tensor_stream_write(quanta_stream, quanta, blocks * quanta_row, ret_error);
        if (status == 0)
            status = tensor_stream_write(scales_stream, scales, blocks * scales_row, ret_error);
        if (status < 0)
            return status;
        atomic_fetch_add(target->bytes_done, blocks * (quanta_row + scales_row));
    }
    return 0;
}

static int convert_matrix(const struct unit_target *target, const struct plan_unit *unit, struct source *source,
                          struct error *ret_error)
{
    _cleanup_(view_close) struct view view = {0};
    _cleanup_(tensor_stream_close) struct tensor_stream quanta = {0}, scales = {0};
    int exponent = 0;
    int status = view_open(target->plan, unit, source, &view, ret_error);
    if (status == 0)
        status = find_exponent(target, &view, unit->format, &exponent, ret_error);
    if (status == 0)
        status = tensor_stream_open(target, unit->tensors[0], &quanta, ret_error);
    if (status == 0)
        status = tensor_stream_open(target, unit->tensors[1], &scales, ret_error);
    if (status == 0)
        status = quantise_strips(target, unit, &view, exponent, &quanta, &scales, ret_error);
    if (status < 0)
        return status;
    tensor_stream_finish(&quanta);
    tensor_stream_finish(&scales);
    int32_t stored = exponent;
    return tensor_write(target, unit->tensors[2], &stored, ret_error);
}

/* Norms, biases, routers: whole, as F32 or as they are (but checked all the same). */
static int convert_plain(const struct unit_target *target, const struct plan_unit *unit, struct source *source,
                         struct error *ret_error)
{
    size_t count = (size_t)(source->rows * source->columns);
    _cleanup_free_ float *values = malloc(count * sizeof values[0]);
    if (!values)
        return error_set(ret_error, ENOMEM, "tensor %s: no memory", source->weight->tensor->name);
    int status = source_read(source, 0, source->rows, values, ret_error);
    if (status == 0 && unit->kind == UNIT_AS_IS)
        status = source_read_raw(source, values, ret_error);
    if (status == 0)
        status = tensor_write(target, unit->tensors[0], values, ret_error);
    atomic_fetch_add(target->bytes_done, target->file->tensors[unit->tensors[0]].bytes);
    return status;
}

/* Quantises one matrix of an expert into the slices of its blob. */
static int convert_expert_matrix(const struct unit_target *target, const struct plan_unit *unit,
                                 enum expert_matrix matrix, struct source *source, uint8_t *blob, int32_t *ret_exponent,
                                 struct error *ret_error)
{
    const struct expert_shape *shape = &target->plan->expert_shape;
    _cleanup_(view_close) struct view view = {0};
    int exponent = 0;
    int status = view_open(target->plan, unit, source, &view, ret_error);
    if (status == 0)
        status = find_exponent(target, &view, unit->format, &exponent, ret_error);
    uint32_t k = expert_columns(shape, matrix), slice = 0, block = 0;
    struct slice_part parts[EXPERT_MATRICES];
    expert_slice(shape, slice, parts);
    for (uint32_t s = 0; status == 0 && s < view.strips; s++) {
        uint64_t rows = 0;
        status = view_read(&view, s, &rows, ret_error);
        for (uint32_t b = 0; status == 0 && b < rows / BLOCK_ROWS; b++, block++) {
            while (block >= parts[matrix].blocks.first + parts[matrix].blocks.count)
                expert_slice(shape, ++slice, parts);
            uint32_t row = block - parts[matrix].blocks.first;
            uint8_t *bytes = blob + slice * target->plan->slice_bytes;
            uint16_t *scales = (uint16_t *)(void *)(bytes + parts[matrix].scales + row * scales_bytes(1, k));
            quantise_block_row(unit->format, exponent, view.values + (size_t)b * BLOCK_ROWS * k, k,
                               bytes + parts[matrix].quanta + row * quanta_bytes(unit->format, 1, k), scales);
        }
    }
    *ret_exponent = exponent;
    return status;
}

static int convert_expert(const struct unit_target *target, const struct plan_unit *unit,
                          struct source sources[EXPERT_MATRICES], struct error *ret_error)
{
    _cleanup_free_ uint8_t *blob = calloc(EXPERT_SLICES, target->plan->slice_bytes);
    if (!blob)
        return error_set(ret_error, ENOMEM, "%s: no memory for expert %u", target->file->name, unit->expert);
    for (int m = 0; m < EXPERT_MATRICES; m++) {
        int status = unit_stopped(target, ret_error);
        if (status == 0)
            status = convert_expert_matrix(target, unit, (enum expert_matrix)m, &sources[m], blob,
                                           &target->exponents[unit->expert * EXPERT_MATRICES + (uint32_t)m], ret_error);
        if (status < 0)
            return status;
    }
    return tensor_write_expert(target, unit, blob, ret_error);
}

int unit_convert(const struct unit_target *target, const struct plan_unit *unit, struct error *ret_error)
{
    if (target->plan->checkpoint->synthetic)
        return synth_unit(target, unit, ret_error);
    /* Copies, because scales and buffers belong to this run of the unit alone. */
    struct source sources[EXPERT_MATRICES];
    memcpy(sources, unit->sources, sizeof sources);
    int count = unit->kind == UNIT_EXPERT ? EXPERT_MATRICES : 1, status = 0;
    for (int i = 0; status == 0 && i < count; i++)
        status = source_open(&sources[i], ret_error);
    if (status == 0) {
        switch (unit->kind) {
        case UNIT_MATRIX:
        case UNIT_W_UK:
        case UNIT_W_UV: status = convert_matrix(target, unit, &sources[0], ret_error); break;
        case UNIT_F32:
        case UNIT_AS_IS: status = convert_plain(target, unit, &sources[0], ret_error); break;
        case UNIT_EXPERT: status = convert_expert(target, unit, sources, ret_error); break;
        }
    }
    for (int i = 0; i < count; i++)
        source_close(&sources[i]);
    return status;
}
