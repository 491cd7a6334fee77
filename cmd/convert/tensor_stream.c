#include "cmd/convert/tensor_stream.h"

int tensor_stream_open(const struct unit_target *target, uint32_t tensor, struct tensor_stream *ret_stream,
                       struct error *ret_error)
{
    *ret_stream = (struct tensor_stream){
        .target = target, .tensor = tensor, .offset = target->file->tensors[tensor].offset, .hash = XXH3_createState()};
    if (!ret_stream->hash)
        return error_set(ret_error, ENOMEM, "%s: no memory for a checksum", target->file->name);
    XXH3_64bits_reset(ret_stream->hash);
    return 0;
}

int tensor_stream_write(struct tensor_stream *stream, const void *bytes, size_t count, struct error *ret_error)
{
    XXH3_64bits_update(stream->hash, bytes, count);
    int status = output_write(stream->target->outputs, stream->offset, bytes, count, ret_error);
    stream->offset += count;
    return status;
}

void tensor_stream_finish(const struct tensor_stream *stream)
{
    stream->target->checksums[stream->tensor] = XXH3_64bits_digest(stream->hash);
}

void tensor_stream_close(struct tensor_stream *stream)
{
    XXH3_freeState(stream->hash);
    stream->hash = NULL;
}

int tensor_write(const struct unit_target *target, uint32_t tensor, const void *bytes, struct error *ret_error)
{
    const struct tensor *place = &target->file->tensors[tensor];
    target->checksums[tensor] = XXH3_64bits(bytes, place->bytes);
    return output_write(target->outputs, place->offset, bytes, place->bytes, ret_error);
}

int tensor_write_expert(const struct unit_target *target, const struct plan_unit *unit, const uint8_t *blob,
                        struct error *ret_error)
{
    size_t slice_bytes = target->plan->slice_bytes;
    for (uint32_t s = 0; s < EXPERT_SLICES; s++)
        target->slice_checksums[unit->expert * EXPERT_SLICES + s] = XXH3_64bits(blob + s * slice_bytes, slice_bytes);
    int status = 0;
    for (uint32_t s = 0; status == 0 && s < target->plan->options.stripes; s++) {
        const struct plan_file *file = target->file + s;
        status = output_write(&target->outputs[s], file->tensors[unit->tensors[0]].offset,
                              blob + file->slices.first * slice_bytes, file->slices.count * slice_bytes, ret_error);
    }
    atomic_fetch_add(target->bytes_done, EXPERT_SLICES * slice_bytes);
    return status;
}

int unit_stopped(const struct unit_target *target, struct error *ret_error)
{
    return atomic_load_explicit(target->stop, memory_order_relaxed) ? error_set(ret_error, EINTR, "interrupted") : 0;
}
