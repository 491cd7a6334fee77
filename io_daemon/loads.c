#include "io_daemon/loads.h"

#include "shm/futex.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Adds the cuts of the bytes [first, end) of a blob: equal ones, so that no small rest stands alone. */
static void cut_stretch(struct loads *loads, size_t first, size_t end)
{
    size_t least = (end - first + PIECE_BYTES - 1) / PIECE_BYTES;
    size_t bytes = ((end - first) / least + DISK_ALIGN - 1) / DISK_ALIGN * DISK_ALIGN;
    for (size_t at = first; at < end; at += bytes)
        loads->cuts[loads->cut_count++] = (struct cut){at, end - at < bytes ? end - at : bytes};
}

/* Cuts a blob where its stripe or its node changes, and what is between into pieces. */
static int make_cuts(struct loads *loads, struct error *ret_error)
{
    uint32_t nodes = loads->placement->pool->nodes, slices_a_node = EXPERT_SLICES / nodes;
    size_t slice_bytes = loads->container->slice_bytes;
    loads->cuts = calloc(EXPERT_SLICES * (slice_bytes / PIECE_BYTES + 2), sizeof(*loads->cuts));
    if (!loads->cuts)
        return error_set(ret_error, ENOMEM, "loads: out of memory");
    for (uint32_t s = 0; s < loads->container->stripes; s++) {
        struct range share = split(EXPERT_SLICES, s, loads->container->stripes);
        for (uint32_t slice = share.first, end; slice < share.first + share.count; slice = end) {
            end = (slice / slices_a_node + 1) * slices_a_node;
            end = end < share.first + share.count ? end : share.first + share.count;
            cut_stretch(loads, slice * slice_bytes, end * slice_bytes);
        }
    }
    return 0;
}

int loads_open(struct loads *loads, struct error *ret_error)
{
    int status = make_cuts(loads, ret_error);
    if (status < 0)
        return status;
    loads->verified = calloc(loads->placement->pool->expert_count, sizeof(*loads->verified));
    bool complete = loads->verified;
    for (uint32_t i = 0; i < MAX_LOADS; i++) {
        loads->load[i].pieces = calloc((size_t)loads->cut_count + EXPERT_SLICES, sizeof(struct piece));
        complete = complete && loads->load[i].pieces;
    }
    if (!complete)
        return error_set(ret_error, ENOMEM, "loads: out of memory");
    return 0;
}

void loads_close(struct loads *loads)
{
    for (uint32_t i = 0; i < MAX_LOADS; i++)
        free(loads->load[i].pieces);
    free(loads->verified);
    free(loads->cuts);
}

static const struct expert_layer *layer_of(const struct loads *loads, uint32_t expert)
{
    return &loads->container->experts[expert / loads->container->config.experts];
}

static uint32_t stripe_of(const struct loads *loads, uint32_t slice)
{
    uint32_t stripe = 0;
    while (slice >= split(EXPERT_SLICES, stripe + 1, loads->container->stripes).first &&
           stripe + 1 < loads->container->stripes)
        stripe++;
    return stripe;
}

static const struct load_file *opened_file(const struct loads *loads, uint32_t expert, uint32_t stripe)
{
    const struct container *container = loads->container;
    return &loads->files[expert / container->config.experts * container->stripes + stripe];
}

bool loads_has_room(const struct loads *loads, uint32_t expert, enum priority priority)
{
    bool background = priority != PRIORITY_DEMAND;
    if (loads->active == MAX_LOADS || (background && loads->active >= MAX_GUESS_LOADS))
        return false;
    /* One drive with room is enough for a demand; a guess keeps out of the way on all. */
    bool any = false, all = true;
    for (uint32_t s = 0; s < loads->container->stripes; s++) {
        bool room = reader_has_room(loads->reader, opened_file(loads, expert, s)->drive, background);
        any = any || room;
        all = all && room;
    }
    return background ? all : any;
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

/* Reads `bytes` from byte `first` of the blob on, within one stripe and one node's stretch. */
static void read_range(struct loads *loads, struct load *load, uint32_t index, size_t first, size_t bytes)
{
    const struct container *container = loads->container;
    uint32_t slice = (uint32_t)(first / container->slice_bytes), stripe = stripe_of(loads, slice);
    const struct expert_stripe *place = &layer_of(loads, load->expert)->stripes[stripe];
    const struct load_file *file = opened_file(loads, load->expert, stripe);
    char *base = pool_slice(loads->placement->pool, load->ref.index, slice);
    struct piece *piece = &load->pieces[index];
    *piece = (struct piece){.read = {.fd = file->fd,
                                     .buffer = base + first % container->slice_bytes,
                                     .bytes = bytes,
                                     .buffer_place = buffers_find(loads->buffers, load->ref.index, slice),
                                     .offset = place->offsets[load->expert % container->config.experts] + first -
                                               place->slices.first * container->slice_bytes},
                            .owner = load,
                            .index = index,
                            .drive = file->drive,
                            .background = load->background};
    load->pieces_left++;
    reader_add(loads->reader, piece);
}

void loads_begin(struct loads *loads, uint32_t expert, struct slot_ref ref, enum priority priority)
{
    struct load *load = loads->load;
    while (load->active)
        load++;
    struct piece *pieces = load->pieces;
    *load = (struct load){
        .active = true, .background = priority != PRIORITY_DEMAND, .expert = expert, .ref = ref, .pieces = pieces};
    loads->active++;
    loads->background += load->background;
    for (uint32_t s = 0; s < EXPERT_SLICES; s++)
        load->slice_left[s] = loads->container->slice_bytes;
    for (uint32_t i = 0; i < loads->cut_count; i++)
        read_range(loads, load, i, loads->cuts[i].first, loads->cuts[i].bytes);
}

void loads_promote(struct loads *loads, uint32_t expert)
{
    for (uint32_t i = 0; loads->background && i < MAX_LOADS; i++) {
        struct load *load = &loads->load[i];
        if (!load->active || !load->background || load->expert != expert)
            continue;
        load->background = false;
        loads->background--;
        for (uint32_t s = 0; s < loads->container->stripes; s++)
            reader_promote(loads->reader, opened_file(loads, expert, s)->drive, load);
        return;
    }
}

static void log_damage(const struct loads *loads, const struct load *load, uint32_t slice, const char *reason,
                       const char *remedy)
{
    const struct expert_layer *layer = layer_of(loads, load->expert);
    char line[1024];
    snprintf(line, sizeof(line), "%s: expert %u of layer %u, slice %u: %s: %s",
             layer->stripes[stripe_of(loads, slice)].header.path, load->expert % loads->container->config.experts,
             layer->layer, slice, reason, remedy);
    loads->log(line);
}

static void log_failure(const struct loads *loads, const struct load *load)
{
    const char *reason = load->code == EBADMSG   ? "its checksum differs, the bytes on disk are damaged"
                         : load->code == ENODATA ? "the file is truncated"
                                                 : strerror(load->code);
    log_damage(loads, load, load->slice, reason,
               load->code == EIO ? "check the drive (dmesg), then fetch this file again or convert again"
                                 : "fetch this file again or convert again");
}

static void end_load(struct loads *loads, struct load *load)
{
    loads->active--;
    loads->background -= load->background;
    load->active = false;
}

static void count_demand(struct loads *loads, uint32_t expert)
{
    struct iod_line *counters = &loads->control->iod;
    uint64_t waited = monotonic_ns() - loads->requests->wishes[expert].asked_ns;
    atomic_fetch_add_explicit(&counters->demand_ns, waited, memory_order_relaxed);
    histogram_add(&counters->demand_us, waited / 1000);
}

static void finish_load(struct loads *loads, struct load *load)
{
    struct iod_line *counters = &loads->control->iod;
    uint32_t expert = load->expert;
    if (load->code) {
        log_failure(loads, load);
        atomic_fetch_add_explicit(&counters->failures, 1, memory_order_relaxed);
        loads->verified[expert] = 0;
    }
    int code = load->code == ENODATA ? EIO : load->code; /* what the slot tells: EIO or EBADMSG */
    if (placement_finish(loads->placement, expert, load->ref, code, load->slice) < 0) {
        char line[128];
        snprintf(line, sizeof(line), "slot %u: its state was changed by another process: not used any more",
                 load->ref.index);
        loads->log(line);
        requests_append(loads->requests, expert, PRIORITY_DEMAND);
    } else if (!load->code) {
        atomic_fetch_add_explicit(&counters->loads, 1, memory_order_relaxed);
        if (!load->background)
            count_demand(loads, expert);
    }
    end_load(loads, load);
    notify_demanders(loads->requests, expert);
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

static bool must_verify(const struct loads *loads, uint32_t expert, uint32_t slice)
{
    switch (loads->verify) {
    case VERIFY_FIRST: return !(loads->verified[expert] & 1u << slice);
    case VERIFY_OFF: return false;
    case VERIFY_ALWAYS:
    default: return true;
    }
}

/* All bytes of a slice are there. */
static void finish_slice(struct loads *loads, struct load *load, uint32_t slice)
{
    if (!must_verify(loads, load->expert, slice))
        return;
    uint32_t expert = load->expert % loads->container->config.experts;
    struct verify_job *job = &load->jobs[slice];
    *job = (struct verify_job){.data = pool_slice(loads->placement->pool, load->ref.index, slice),
                               .bytes = loads->container->slice_bytes,
                               .expected = layer_of(loads, load->expert)->checksums[expert * EXPERT_SLICES + slice],
                               .owner = load,
                               .index = slice};
    load->verdicts_left++;
    verifier_add(loads->verifiers[opened_file(loads, load->expert, stripe_of(loads, slice))->drive], job);
}

/* What a piece holds of the blob. */
static struct cut covered(const struct loads *loads, const struct piece *piece)
{
    size_t bytes = loads->container->slice_bytes;
    return piece->index < loads->cut_count ? loads->cuts[piece->index]
                                           : (struct cut){(piece->index - loads->cut_count) * bytes, bytes};
}

void loads_piece_done(struct loads *loads, struct piece *piece)
{
    struct load *load = piece->owner;
    struct cut cut = covered(loads, piece);
    size_t slice_bytes = loads->container->slice_bytes, first = cut.first, bytes = cut.bytes;
    load->pieces_left--;
    if (piece->retried)
        atomic_fetch_add_explicit(&loads->control->iod.retries, 1, memory_order_relaxed);
    if (piece->status < 0) {
        size_t left = piece->read.bytes; /* what did not come stands at the end */
        note_failure(load, -piece->status, (uint32_t)((first + bytes - left) / slice_bytes));
    }
    for (size_t at = first; at < first + bytes && !load->code;) {
        uint32_t slice = (uint32_t)(at / slice_bytes);
        size_t end = (slice + 1) * slice_bytes < first + bytes ? (slice + 1) * slice_bytes : first + bytes;
        load->slice_left[slice] -= end - at;
        if (load->slice_left[slice] == 0)
            finish_slice(loads, load, slice);
        at = end;
    }
    finish_if_complete(loads, load);
}

/* The bytes may have been damaged on the way, so they are fetched once more before the disk is blamed. */
static void read_slice_again(struct loads *loads, struct load *load, uint32_t slice)
{
    load->read_again |= (uint8_t)(1u << slice);
    load->slice_left[slice] = loads->container->slice_bytes;
    atomic_fetch_add_explicit(&loads->control->iod.retries, 1, memory_order_relaxed);
    read_range(loads, load, loads->cut_count + slice, slice * loads->container->slice_bytes,
               loads->container->slice_bytes);
}

void loads_verdict(struct loads *loads, struct verify_job *job)
{
    struct load *load = job->owner;
    uint32_t slice = job->index;
    load->verdicts_left--;
    if (job->matches && load->read_again & 1u << slice)
        log_damage(loads, load, slice, "read wrong once and right when read again",
                   "check the drive, its cable and the memory (dmesg)");
    if (job->matches)
        loads->verified[load->expert] |= (uint8_t)(1u << slice);
    else if (load->code == 0 && !(load->read_again & 1u << slice))
        read_slice_again(loads, load, slice);
    else
        note_failure(load, EBADMSG, slice);
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
        end_load(loads, load);
    }
}
