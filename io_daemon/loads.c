#include "io_daemon/loads.h"

#include "shm/futex.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int loads_open(struct loads *loads, struct error *ret_error)
{
    /* A node's stretch is cut into equal pieces, so that no small rest stands alone. */
    uint32_t nodes = loads->placement->pool->nodes;
    loads->stretch_bytes = loads->container->slice_bytes * (EXPERT_SLICES / nodes);
    size_t least = (loads->stretch_bytes + PIECE_BYTES - 1) / PIECE_BYTES;
    loads->piece_bytes = (loads->stretch_bytes / least + DISK_ALIGN - 1) / DISK_ALIGN * DISK_ALIGN;
    loads->stretch_pieces = (uint32_t)((loads->stretch_bytes + loads->piece_bytes - 1) / loads->piece_bytes);
    for (uint32_t i = 0; i < MAX_LOADS; i++) {
        loads->load[i].pieces = calloc((size_t)loads->stretch_pieces * nodes, sizeof(struct piece));
        if (!loads->load[i].pieces)
            return error_set(ret_error, ENOMEM, "loads: out of memory");
    }
    return 0;
}

void loads_close(struct loads *loads)
{
    for (uint32_t i = 0; i < MAX_LOADS; i++)
        free(loads->load[i].pieces);
}

bool loads_has_room(const struct loads *loads)
{
    uint64_t bytes = loads->reader->waiting_bytes + loads->reader->flying_bytes;
    return loads->active < MAX_LOADS && bytes < READER_IN_FLIGHT;
}

void notify_demanders(const struct requests *requests, uint32_t expert)
{
    uint32_t workers = requests_live(requests, expert, NULL);
    for (uint32_t w = 0; w < requests->workers; w++) {
        if (!(workers & 1u << w))
            continue;
        _Atomic uint32_t *published = &requests->control->workers[w].published;
        atomic_fetch_add(published, 1);
        futex_wake_all(published);
    }
}

static const struct expert_file *file_of(const struct loads *loads, uint32_t expert)
{
    return &loads->container->experts[expert / loads->container->config.experts];
}

/* The bytes of piece `index`, counted from the start of the blob. */
static void piece_range(const struct loads *loads, uint32_t index, size_t *ret_first, size_t *ret_bytes)
{
    size_t within = index % loads->stretch_pieces * loads->piece_bytes, left = loads->stretch_bytes - within;
    *ret_first = index / loads->stretch_pieces * loads->stretch_bytes + within;
    *ret_bytes = left < loads->piece_bytes ? left : loads->piece_bytes;
}

static void read_piece(struct loads *loads, struct load *load, uint32_t index)
{
    const struct container *container = loads->container;
    uint32_t experts = container->config.experts;
    size_t first, bytes;
    piece_range(loads, index, &first, &bytes);
    uint32_t slice = (uint32_t)(first / container->slice_bytes);
    char *base = pool_slice(loads->placement->pool, load->ref.index, slice);
    struct piece *piece = &load->pieces[index];
    *piece = (struct piece){.read = {.fd = loads->files[load->expert / experts],
                                     .buffer = base + first % container->slice_bytes,
                                     .bytes = bytes,
                                     .offset = file_of(loads, load->expert)->offsets[load->expert % experts] + first},
                            .owner = load,
                            .index = index};
    load->pieces_left++;
    reader_add(loads->reader, piece);
}

void loads_begin(struct loads *loads, uint32_t expert, struct slot_ref ref)
{
    struct load *load = loads->load;
    while (load->active)
        load++;
    struct piece *pieces = load->pieces;
    *load = (struct load){.active = true, .expert = expert, .ref = ref, .pieces = pieces};
    loads->active++;
    for (uint32_t s = 0; s < EXPERT_SLICES; s++)
        load->slice_left[s] = loads->container->slice_bytes;
    for (uint32_t i = 0; i < loads->stretch_pieces * loads->placement->pool->nodes; i++)
        read_piece(loads, load, i);
}

static void log_failure(const struct loads *loads, const struct load *load)
{
    const struct expert_file *file = file_of(loads, load->expert);
    const char *reason = load->code == EBADMSG   ? "its checksum differs, the bytes on disk are damaged"
                         : load->code == ENODATA ? "the file is truncated"
                                                 : strerror(load->code);
    char line[1024];
    snprintf(line, sizeof(line), "%s: expert %u of layer %u, slice %u: %s: %s", file->header.path,
             load->expert % loads->container->config.experts, file->layer, load->slice, reason,
             load->code == EIO ? "check the drive (dmesg), then fetch this file again or convert again"
                               : "fetch this file again or convert again");
    loads->log(line);
}

static void finish_load(struct loads *loads, struct load *load)
{
    struct iod_line *counters = &loads->control->iod;
    if (load->code) {
        log_failure(loads, load);
        atomic_fetch_add_explicit(&counters->failures, 1, memory_order_relaxed);
    }
    int code = load->code == ENODATA ? EIO : load->code; /* what the slot tells: EIO or EBADMSG */
    if (placement_finish(loads->placement, load->expert, load->ref, code, load->slice) < 0) {
        char line[128];
        snprintf(line, sizeof(line), "slot %u: its state was changed by another process: not used any more",
                 load->ref.index);
        loads->log(line);
        requests_append(loads->requests, load->expert);
    } else if (!load->code) {
        uint64_t waited = monotonic_ns() - loads->requests->demands[load->expert].asked_ns;
        atomic_fetch_add_explicit(&counters->loads, 1, memory_order_relaxed);
        atomic_fetch_add_explicit(&counters->demand_ns, waited, memory_order_relaxed);
    }
    load->active = false;
    loads->active--;
    notify_demanders(loads->requests, load->expert);
}

static void finish_if_complete(struct loads *loads, struct load *load)
{
    if (load->pieces_left == 0 && load->verdicts_left == 0)
        finish_load(loads, load);
}

static void note_failure(struct load *load, int code, uint32_t slice)
{
    if (!load->code) {
        load->code = code;
        load->slice = slice;
    }
}

static void verify_slice(struct loads *loads, struct load *load, uint32_t slice)
{
    const struct expert_file *file = file_of(loads, load->expert);
    uint32_t expert = load->expert % loads->container->config.experts;
    struct verify_job *job = &load->jobs[slice];
    *job = (struct verify_job){.data = pool_slice(loads->placement->pool, load->ref.index, slice),
                               .bytes = loads->container->slice_bytes,
                               .expected = file->checksums[expert * EXPERT_SLICES + slice],
                               .owner = load,
                               .index = slice};
    load->verdicts_left++;
    verifier_add(loads->verifier, job);
}

void loads_piece_done(struct loads *loads, struct piece *piece)
{
    struct load *load = piece->owner;
    size_t slice_bytes = loads->container->slice_bytes, first, bytes;
    piece_range(loads, piece->index, &first, &bytes);
    load->pieces_left--;
    if (piece->status < 0) {
        size_t left = piece->read.bytes; /* what did not come stands at the end */
        note_failure(load, -piece->status, (uint32_t)((first + bytes - left) / slice_bytes));
    }
    for (size_t at = first; at < first + bytes && !load->code;) {
        uint32_t slice = (uint32_t)(at / slice_bytes);
        size_t end = (slice + 1) * slice_bytes < first + bytes ? (slice + 1) * slice_bytes : first + bytes;
        load->slice_left[slice] -= end - at;
        if (load->slice_left[slice] == 0)
            verify_slice(loads, load, slice);
        at = end;
    }
    finish_if_complete(loads, load);
}

void loads_verdict(struct loads *loads, struct verify_job *job)
{
    struct load *load = job->owner;
    load->verdicts_left--;
    if (!job->matches)
        note_failure(load, EBADMSG, job->index);
    finish_if_complete(loads, load);
}

void loads_cancel(struct loads *loads)
{
    for (struct piece *piece = reader_withdraw(loads->reader); piece; piece = piece->next)
        ((struct load *)piece->owner)->pieces_left--;
    for (uint32_t i = 0; i < MAX_LOADS; i++) {
        if (loads->load[i].active)
            note_failure(&loads->load[i], ECANCELED, 0);
    }
}

void loads_abandon(struct loads *loads)
{
    for (uint32_t i = 0; i < MAX_LOADS; i++) {
        struct load *load = &loads->load[i];
        if (!load->active)
            continue;
        placement_abandon(loads->placement, load->expert, load->ref);
        load->active = false;
        loads->active--;
    }
}
