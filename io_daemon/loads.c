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

/* How many whole slices a piece may have where two copies are read: then no slice comes from both, unless one fails, and a
 * wrong checksum says which copy is wrong. */
static uint32_t group_slices(const struct loads *loads)
{
    size_t most = PIECE_BYTES / loads->copies->container->slice_bytes;
    if ((loads->copies->live & (loads->copies->live - 1)) == 0 || most > EXPERT_SLICES)
        return EXPERT_SLICES;
    return most ? (uint32_t)most : 1;
}

/* Cuts a blob where its stripe or its node changes, and what is between into pieces. */
static int make_cuts(struct loads *loads, struct error *ret_error)
{
    uint32_t nodes = loads->placement->pool->nodes, slices_a_node = EXPERT_SLICES / nodes;
    const struct container *container = loads->copies->container;
    size_t slice_bytes = container->slice_bytes;
    loads->cuts = calloc(EXPERT_SLICES * (slice_bytes / PIECE_BYTES + 2), sizeof(*loads->cuts));
    if (!loads->cuts)
        return error_set(ret_error, ENOMEM, "loads: out of memory");
    uint32_t group = group_slices(loads);
    for (uint32_t s = 0; s < container->stripes; s++) {
        struct range share = split(EXPERT_SLICES, s, container->stripes);
        for (uint32_t slice = share.first, end; slice < share.first + share.count; slice = end) {
            end = (slice / slices_a_node + 1) * slices_a_node;
            end = end < share.first + share.count ? end : share.first + share.count;
            end = end < slice + group ? end : slice + group;
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
    size_t experts = loads->placement->pool->expert_count;
    loads->verified = calloc(MAX_COPIES * experts, sizeof(*loads->verified));
    loads->bad = calloc(MAX_COPIES * experts, sizeof(*loads->bad));
    bool complete = loads->verified && loads->bad;
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
    free(loads->bad);
    free(loads->cuts);
}

static const struct expert_layer *layer_of(const struct loads *loads, uint32_t expert)
{
    return &loads->copies->container->experts[expert / loads->copies->container->config.experts];
}

static uint32_t stripe_of(const struct loads *loads, uint32_t slice)
{
    return stripe_of_slice(slice, loads->copies->container->stripes);
}

static size_t file_of(const struct loads *loads, uint32_t expert, uint32_t stripe)
{
    return copies_expert_file(loads->copies, expert / loads->copies->container->config.experts, stripe);
}

/* The file that holds a slice of the load's expert, of the copy from which it is read. */
static const struct copy_file *opened_file(const struct loads *loads, const struct load *load, uint32_t slice)
{
    return &loads->copies->copy[load->copy[slice]].files[file_of(loads, load->expert, stripe_of(loads, slice))];
}

bool loads_has_room(const struct loads *loads, uint32_t expert, enum priority priority)
{
    const struct copies *copies = loads->copies;
    bool background = priority != PRIORITY_DEMAND;
    if (loads->active == MAX_LOADS || (background && loads->active >= MAX_GUESS_LOADS))
        return false;
    /* One drive with room is enough for a demand; a guess keeps out of the way on all. */
    bool any = false, all = true;
    for (uint32_t s = 0; s < copies->container->stripes; s++) {
        size_t file = file_of(loads, expert, s);
        uint32_t copy = copies_choose(copies, loads->reader, copies->live, file, PIECE_BYTES, background);
        bool room = reader_has_room(loads->reader, copies->copy[copy].files[file].drive, background);
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

/* What is known of an expert's slices in a copy. */
static uint8_t *slice_bits(const struct loads *loads, uint8_t *bits, uint32_t copy, uint32_t expert)
{
    return &bits[(size_t)copy * loads->placement->pool->expert_count + expert];
}

/* From which copy of the mask (not 0) the slices of one piece are read: where they do not stand wrong, if there is such a
 * one, and first come. */
static uint8_t choose_copy(const struct loads *loads, const struct load *load, uint32_t mask, uint32_t first,
                           uint32_t count)
{
    uint32_t good = mask, slices = ((1u << count) - 1) << first;
    for (uint32_t c = 0; c < MAX_COPIES; c++) {
        if (*slice_bits(loads, loads->bad, c, load->expert) & slices)
            good &= ~(1u << c);
    }
    return (uint8_t)copies_choose(loads->copies, loads->reader, good ? good : mask,
                                  file_of(loads, load->expert, stripe_of(loads, first)),
                                  count * loads->copies->container->slice_bytes, load->background);
}

/* Reads `bytes` from byte `first` of the blob on, within one stripe and one node's stretch, from the copy that was chosen
 * for its first slice. */
static void read_range(struct loads *loads, struct load *load, uint32_t index, size_t first, size_t bytes)
{
    const struct container *container = loads->copies->container;
    uint32_t slice = (uint32_t)(first / container->slice_bytes);
    const struct expert_stripe *place = &layer_of(loads, load->expert)->stripes[stripe_of(loads, slice)];
    const struct copy_file *file = opened_file(loads, load, slice);
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
                            .copy = load->copy[slice],
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
    size_t slice_bytes = loads->copies->container->slice_bytes;
    for (uint32_t s = 0; s < EXPERT_SLICES; s++)
        load->slice_left[s] = slice_bytes;
    memset(load->copy, __builtin_ctz(loads->copies->live), sizeof(load->copy));
    for (uint32_t i = 0; i < loads->cut_count; i++) {
        const struct cut *cut = &loads->cuts[i];
        uint32_t first = (uint32_t)(cut->first / slice_bytes), whole = (uint32_t)(cut->bytes / slice_bytes);
        if (loads->copies->live & (loads->copies->live - 1) && cut->first % slice_bytes == 0) {
            uint32_t count = whole ? whole : 1;
            memset(&load->copy[first], choose_copy(loads, load, loads->copies->live, first, count), count);
        }
        read_range(loads, load, i, cut->first, cut->bytes);
    }
}

void loads_promote(struct loads *loads, uint32_t expert)
{
    for (uint32_t i = 0; loads->background && i < MAX_LOADS; i++) {
        struct load *load = &loads->load[i];
        if (!load->active || !load->background || load->expert != expert)
            continue;
        load->background = false;
        loads->background--;
        for (uint32_t d = 0; d < loads->copies->drive_count; d++)
            reader_promote(loads->reader, (uint8_t)d, load);
        return;
    }
}

static void log_damage(const struct loads *loads, const struct load *load, uint32_t slice, const char *reason,
                       const char *remedy)
{
    const struct expert_layer *layer = layer_of(loads, load->expert);
    char line[1200];
    snprintf(line, sizeof(line), "%s: expert %u of layer %u, slice %u: %s: %s",
             copies_path(loads->copies, load->copy[slice], file_of(loads, load->expert, stripe_of(loads, slice))),
             load->expert % loads->copies->container->config.experts, layer->layer, slice, reason, remedy);
    loads->log(line);
}

static void log_failure(const struct loads *loads, const struct load *load)
{
    log_damage(loads, load, load->slice, container_fault(load->code), container_remedy(load->code));
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
        for (uint32_t c = 0; c < MAX_COPIES; c++)
            *slice_bits(loads, loads->verified, c, expert) = 0;
    }
    if (placement_finish(loads->placement, expert, load->ref, load->code, load->slice) < 0) {
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

static bool must_verify(const struct loads *loads, const struct load *load, uint32_t slice)
{
    switch (loads->verify) {
    case VERIFY_FIRST:
        return load->mixed & 1u << slice ||
               !(*slice_bits(loads, loads->verified, load->copy[slice], load->expert) & 1u << slice);
    case VERIFY_OFF: return false;
    case VERIFY_ALWAYS:
    default: return true;
    }
}

/* All bytes of a slice are there. */
static void finish_slice(struct loads *loads, struct load *load, uint32_t slice)
{
    if (!must_verify(loads, load, slice))
        return;
    uint32_t expert = load->expert % loads->copies->container->config.experts;
    struct verify_job *job = &load->jobs[slice];
    *job = (struct verify_job){.data = pool_slice(loads->placement->pool, load->ref.index, slice),
                               .bytes = loads->copies->container->slice_bytes,
                               .expected = layer_of(loads, load->expert)->checksums[expert * EXPERT_SLICES + slice],
                               .owner = load,
                               .index = slice};
    load->verdicts_left++;
    verifier_add(loads->verifiers[opened_file(loads, load, slice)->drive], job);
}

/* What a piece holds of the blob. */
static struct cut covered(const struct loads *loads, const struct piece *piece)
{
    size_t bytes = loads->copies->container->slice_bytes;
    return piece->index < loads->cut_count ? loads->cuts[piece->index]
                                           : (struct cut){(piece->index - loads->cut_count) * bytes, bytes};
}

/* What is left of a piece is read from a copy that is live. */
static void move_piece(struct loads *loads, struct piece *piece)
{
    struct load *load = piece->owner;
    size_t slice_bytes = loads->copies->container->slice_bytes;
    struct cut cut = covered(loads, piece);
    uint32_t first = (uint32_t)(cut.first / slice_bytes);
    uint32_t end = (uint32_t)((cut.first + cut.bytes - 1) / slice_bytes) + 1;
    piece->copy = choose_copy(loads, load, loads->copies->live, first, end - first);
    for (uint32_t s = first; s < end; s++) {
        load->copy[s] = piece->copy;
        load->mixed |= (uint8_t)(1u << s);
        load->read_again &= (uint8_t) ~(1u << s); /* the other copy has not been read yet */
    }
    const struct copy_file *file = opened_file(loads, load, first);
    piece->read.fd = file->fd;
    piece->drive = file->drive;
}

/* A read of the piece failed: its copy is dropped, and what waits to be read from there is read elsewhere. */
static void drop_copy(struct loads *loads, const struct piece *piece)
{
    const struct load *load = piece->owner;
    uint32_t slice = (uint32_t)(covered(loads, piece).first / loads->copies->container->slice_bytes);
    copies_drop(loads->copies, piece->copy, file_of(loads, load->expert, stripe_of(loads, slice)), piece->status);
    loads->reader->dropped_copies |= 1u << piece->copy;
    struct piece *waiting = reader_withdraw(loads->reader);
    while (waiting) {
        struct piece *next = waiting->next;
        if (!(loads->copies->live & 1u << waiting->copy))
            move_piece(loads, waiting);
        reader_add(loads->reader, waiting);
        waiting = next;
    }
}

/* True: the piece could not be read from one copy, and is now read from another. */
static bool read_elsewhere(struct loads *loads, struct load *load, struct piece *piece)
{
    struct copies *copies = loads->copies;
    if (!copies_is_fault(piece->status))
        return false;
    if (copies->live & 1u << piece->copy) /* of a dropped one it is known */
        copies_count_failure(copies, piece->copy);
    if (load->code || !(copies->live & ~(1u << piece->copy)))
        return false;
    if (copies->live & 1u << piece->copy)
        drop_copy(loads, piece);
    move_piece(loads, piece);
    piece->read.buffer_place = 0; /* it may have been given back while the read was in flight */
    reader_add(loads->reader, piece);
    return true;
}

void loads_piece_done(struct loads *loads, struct piece *piece)
{
    struct load *load = piece->owner;
    struct cut cut = covered(loads, piece);
    size_t slice_bytes = loads->copies->container->slice_bytes, first = cut.first, bytes = cut.bytes;
    if (piece->retried)
        atomic_fetch_add_explicit(&loads->control->iod.retries, 1, memory_order_relaxed);
    if (read_elsewhere(loads, load, piece))
        return;
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
            finish_slice(loads, load, slice);
        at = end;
    }
    finish_if_complete(loads, load);
}

static void read_slice(struct loads *loads, struct load *load, uint32_t slice)
{
    size_t bytes = loads->copies->container->slice_bytes;
    load->slice_left[slice] = bytes;
    load->mixed &= (uint8_t) ~(1u << slice);
    atomic_fetch_add_explicit(&loads->control->iod.retries, 1, memory_order_relaxed);
    read_range(loads, load, loads->cut_count + slice, slice * bytes, bytes);
}

static void note_right(struct loads *loads, struct load *load, uint32_t slice)
{
    uint8_t bit = (uint8_t)(1u << slice);
    if (load->read_again & bit)
        log_damage(loads, load, slice, "read wrong once and right when read again",
                   "check the drive, its cable and the memory (dmesg)");
    if (load->mixed & bit)
        return;
    *slice_bits(loads, loads->verified, load->copy[slice], load->expert) |= bit;
    *slice_bits(loads, loads->bad, load->copy[slice], load->expert) &= (uint8_t)~bit;
}

/* The bytes may have been damaged on the way, so they are fetched once more before the disk is blamed. Then another copy
 * is asked, and the blamed one is kept: a wrong byte is no dead drive. */
static void note_wrong(struct loads *loads, struct load *load, uint32_t slice)
{
    uint8_t bit = (uint8_t)(1u << slice), copy = load->copy[slice];
    if (!(load->read_again & bit) && loads->copies->live & 1u << copy) {
        load->read_again |= bit;
        read_slice(loads, load, slice);
        return;
    }
    if (load->read_again & bit) {
        load->wrong[slice] |= (uint8_t)(1u << copy);
        copies_count_wrong(loads->copies, copy);
        *slice_bits(loads, loads->bad, copy, load->expert) |= bit;
    }
    uint32_t others = loads->copies->live & ~(uint32_t)load->wrong[slice];
    if (!others) {
        note_failure(load, EBADMSG, slice);
        return;
    }
    char remedy[700];
    uint8_t other = choose_copy(loads, load, others, slice, 1);
    snprintf(remedy, sizeof(remedy), "read from %s instead; " CONTAINER_REPLACE, loads->copies->copy[other].path);
    log_damage(loads, load, slice, container_fault(EBADMSG), remedy);
    load->read_again &= (uint8_t)~bit;
    load->copy[slice] = other;
    read_slice(loads, load, slice);
}

void loads_verdict(struct loads *loads, struct verify_job *job)
{
    struct load *load = job->owner;
    load->verdicts_left--;
    if (job->matches)
        note_right(loads, load, job->index);
    else if (load->code == 0)
        note_wrong(loads, load, job->index);
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
