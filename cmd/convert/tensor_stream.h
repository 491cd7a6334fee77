/* Writing the tensors of a file, with their checksums: what converting and synthesising have in common. */
#pragma once

#include "cmd/convert/unit.h"

#include <xxhash.h>

/* A tensor written from front to back, hashed on the way. One thread. */
struct tensor_stream {
    const struct unit_target *target;
    uint32_t tensor;
    uint64_t offset;
    XXH3_state_t *hash;
};

int tensor_stream_open(const struct unit_target *target, uint32_t tensor, struct tensor_stream *ret_stream,
                       struct error *ret_error);
int tensor_stream_write(struct tensor_stream *stream, const void *bytes, size_t count, struct error *ret_error);
/* The tensor is whole: notes its checksum. */
void tensor_stream_finish(const struct tensor_stream *stream);
void tensor_stream_close(struct tensor_stream *stream);

/* Writes a tensor that is in memory as a whole. */
int tensor_write(const struct unit_target *target, uint32_t tensor, const void *bytes, struct error *ret_error);

/* Writes an expert's blob, EXPERT_SLICES slices of the container's slice_bytes. */
int tensor_write_expert(const struct unit_target *target, const struct plan_unit *unit, const uint8_t *blob,
                        struct error *ret_error);

/* -EINTR once the run shall stop. */
int unit_stopped(const struct unit_target *target, struct error *ret_error);
