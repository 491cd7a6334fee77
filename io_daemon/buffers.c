#include "io_daemon/buffers.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHUNK_BYTES ((size_t)64 << 20)

static size_t stretch_bytes(const struct pool *pool)
{
    return pool->slice_bytes * (EXPERT_SLICES / pool->nodes);
}

int buffers_open(struct buffers *buffers, struct error *ret_error)
{
    const struct pool *pool = buffers->pool;
    size_t fit = CHUNK_BYTES / stretch_bytes(pool);
    buffers->refused = !buffers->reader->method->register_buffer;
    buffers->chunk_slots = fit < 1 ? 1 : fit < pool->slots_per_object ? (uint32_t)fit : pool->slots_per_object;
    buffers->object_chunks = (pool->slots_per_object + buffers->chunk_slots - 1) / buffers->chunk_slots;
    uint32_t last_slots = pool->slot_count - (pool->object_count - 1) * pool->slots_per_object;
    buffers->chunks = buffers->object_chunks * (pool->object_count - 1) +
                      (last_slots + buffers->chunk_slots - 1) / buffers->chunk_slots;
    atomic_store(buffers->bytes, 0); /* a predecessor's are gone with its ring */
    atomic_store(buffers->refusal, 0);
    buffers->registered = calloc((size_t)buffers->chunks * pool->nodes, sizeof(*buffers->registered));
    return buffers->registered ? 0 : error_set(ret_error, ENOMEM, "registered buffers: out of memory");
}

void buffers_close(struct buffers *buffers)
{
    free(buffers->registered);
    buffers->registered = NULL;
}

static uint32_t first_slot(const struct buffers *buffers, uint32_t chunk)
{
    return chunk / buffers->object_chunks * buffers->pool->slots_per_object +
           chunk % buffers->object_chunks * buffers->chunk_slots;
}

/* The slot behind the chunk's last. */
static uint32_t end_slot(const struct buffers *buffers, uint32_t chunk)
{
    uint32_t end = first_slot(buffers, chunk) + buffers->chunk_slots;
    uint32_t object_end = (chunk / buffers->object_chunks + 1) * buffers->pool->slots_per_object;
    end = end < object_end ? end : object_end;
    return end < buffers->pool->slot_count ? end : buffers->pool->slot_count;
}

static size_t chunk_bytes(const struct buffers *buffers, uint32_t chunk)
{
    return (end_slot(buffers, chunk) - first_slot(buffers, chunk)) * stretch_bytes(buffers->pool);
}

/* The early chunks of all nodes have the low places: those beyond what a method offers are the late ones. */
static uint32_t place_of(const struct buffers *buffers, uint32_t chunk, uint32_t node)
{
    return chunk * buffers->pool->nodes + node;
}

static int register_chunk(struct buffers *buffers, uint32_t chunk, uint32_t node)
{
    const struct reader *reader = buffers->reader;
    uint32_t place = place_of(buffers, chunk, node), slice = node * (EXPERT_SLICES / buffers->pool->nodes);
    void *base = pool_slice(buffers->pool, first_slot(buffers, chunk), slice);
    size_t bytes = chunk_bytes(buffers, chunk);
    int status = base ? reader->method->register_buffer(reader->io, place, base, bytes) : -EFAULT;
    if (status < 0)
        return status;
    buffers->registered[place] = true;
    atomic_fetch_add_explicit(buffers->bytes, bytes, memory_order_relaxed);
    return 0;
}

static void refuse(struct buffers *buffers, int status)
{
    char line[256];
    snprintf(line, sizeof(line),
             "%llu MiB of the pool are registered with io_uring and no more can be (%s): reads into the rest cost more "
             "CPU time; raise the limit of locked memory (ulimit -l)",
             (unsigned long long)(atomic_load(buffers->bytes) >> 20), strerror(-status));
    atomic_store(buffers->refusal, (uint32_t)-status);
    buffers->log(line);
    buffers->refused = true;
}

bool buffers_keep(struct buffers *buffers, uint32_t slots)
{
    if (buffers->refused || buffers->next == buffers->chunks || end_slot(buffers, buffers->next) > slots)
        return false;
    for (uint32_t n = 0; n < buffers->pool->nodes; n++) {
        if (buffers->registered[place_of(buffers, buffers->next, n)])
            continue;
        int status = register_chunk(buffers, buffers->next, n);
        if (status < 0)
            refuse(buffers, status);
        if (status < 0)
            return false;
    }
    buffers->next++;
    return buffers->next < buffers->chunks && end_slot(buffers, buffers->next) <= slots;
}

void buffers_release(struct buffers *buffers, uint32_t slots)
{
    struct reader *reader = buffers->reader;
    for (uint32_t c = buffers->chunks; c-- > 0 && end_slot(buffers, c) > slots;) {
        for (uint32_t n = 0; n < buffers->pool->nodes; n++) {
            uint32_t place = place_of(buffers, c, n);
            if (!buffers->registered[place])
                continue;
            /* Even if the kernel did not let go of it, no read names it again, and none that waits. */
            buffers->registered[place] = false;
            reader_forget_buffer(reader, place + 1);
            reader->method->register_buffer(reader->io, place, NULL, 0);
            atomic_fetch_sub_explicit(buffers->bytes, chunk_bytes(buffers, c), memory_order_relaxed);
        }
        buffers->next = c < buffers->next ? c : buffers->next;
    }
}

uint32_t buffers_find(const struct buffers *buffers, uint32_t slot, uint32_t slice)
{
    const struct pool *pool = buffers->pool;
    uint32_t node = slice / (EXPERT_SLICES / pool->nodes);
    uint32_t chunk =
        slot / pool->slots_per_object * buffers->object_chunks + slot % pool->slots_per_object / buffers->chunk_slots;
    uint32_t place = place_of(buffers, chunk, node);
    return buffers->registered[place] ? place + 1 : 0;
}
