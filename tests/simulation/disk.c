/* The fake disk and ring: reads come back in any order and time, short, interrupted, failed, with a flipped bit; those of
 * a dead daemon land late, and keep its lock file locked, as io_uring does. */
#include "tests/simulation/simulation.h"

#include "io_daemon/reader.h"

#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define LATE_MOST_NS 68000000u
#define LATELY_NS UINT64_C(100000000)             /* so long after a demand the background has its share only */
#define STARVED_RETRY_MS 100                      /* io_daemon/loader.c's, and no other of its timers */
#define WORD_INVERSE UINT64_C(0xF1DE83E19937733D) /* of the factor of expert_word() in tests/unit/iod_harness.h */

static int disk_open_ring(const struct io_setup *setup, void **ret_state, struct error *ret_error)
{
    struct sim_ring *ring = calloc(1, sizeof(*ring));
    if (!ring)
        return error_set(ret_error, ENOMEM, "simulated ring: out of memory");
    ring->alive = true;
    ring->lock_fd = fcntl(setup->lock_fd, F_DUPFD_CLOEXEC, 0);
    the_simulation->ring = ring;
    the_simulation->registered_nodes = 0;
    *ret_state = ring;
    return 0;
}

static void free_ring_if_over(struct sim_ring *ring)
{
    if (ring->alive || ring->flying)
        return;
    close(ring->lock_fd); /* the last read has landed: the lock is free */
    free(ring);
}

static void disk_close_ring(void *state)
{
    struct sim_ring *ring = state;
    ring->alive = false;
    free_ring_if_over(ring);
}

uint32_t disk_flying(const struct simulation *sim)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < SIM_FLYING; i++)
        count += sim->flying[i].used;
    return count;
}

/* Where in the pool's objects a buffer of the daemon's stands. False: it is not the pool's. */
static bool find_place(const struct simulation *sim, struct flying *flying, const char *buffer)
{
    const struct pool *pool = sim->placement ? sim->placement->pool : NULL;
    for (uint32_t n = 0; pool && pool->attached && n < pool->nodes; n++) {
        const char *base = pool->objects[n][0].base;
        if (buffer >= base && buffer < base + pool->objects[n][0].bytes) {
            flying->node = n;
            flying->offset = (size_t)(buffer - base);
            return true;
        }
    }
    return false;
}

static bool hurts(struct simulation *sim)
{
    bool hurt = sim->plan.faults && dice(sim, sim->plan.faults) == 0;
    sim->coverage->reads_hurt += hurt;
    return hurt;
}

/* What is wrong with the drive itself. */
static void hurt_for_good(const struct simulation *sim, struct flying *flying)
{
    uint32_t bad = sim->plan.hurt_slice[flying->copy][flying->expert], first = flying->slice;
    uint32_t end = first + (uint32_t)(flying->bytes / SIM_SLICE_BYTES);
    if (bad < first || bad >= end)
        return;
    switch (sim->plan.hurt[flying->copy][flying->expert]) {
    case HURT_CHECKSUM: flying->data[(bad - first) * SIM_SLICE_BYTES + 77] ^= 4; break;
    case HURT_EIO: flying->result = -EIO; break;
    case HURT_CUT: flying->result = (int64_t)(bad - first) * SIM_SLICE_BYTES; break;
    case HURT_NOT:
    default: break;
    }
}

/* One slice comes with a flipped bit, but never twice in a load: then it would be the drive's. */
static void flip(struct simulation *sim, struct flying *flying)
{
    uint32_t slices = (uint32_t)(flying->bytes / SIM_SLICE_BYTES),
             pick = flying->slice + dice(sim, slices ? slices : 1);
    if (!slices || sim->plan.verify != VERIFY_ALWAYS || drives_hurt(sim, flying->expert) ||
        sim->flipped[flying->expert] >> pick & 1 || !hurts(sim))
        return;
    sim->flipped[flying->expert] |= (uint8_t)(1u << pick);
    flying->data[(pick - flying->slice) * SIM_SLICE_BYTES + dice(sim, SIM_SLICE_BYTES)] ^= 1;
    sim->coverage->flips++;
}

/* What passes when the read is repeated. */
static void hurt_once(struct simulation *sim, struct flying *flying)
{
    bool *eio = &sim->eio_spent[flying->expert], *stall = &sim->stall_spent[flying->expert];
    if (flying->result < 0 || sim->plan.hurt[flying->copy][flying->expert] == HURT_CUT || !hurts(sim))
        return;
    switch (dice(sim, 4)) {
    case 0: flying->result = dice(sim, 2) ? -EINTR : -EAGAIN; break;
    case 1:
        if (!*eio && sim->plan.hurt[flying->copy][flying->expert] == HURT_NOT)
            flying->result = -EIO;
        *eio = true;
        break;
    case 2: /* without a whole page */
        if (!*stall)
            flying->result = 1 + dice(sim, SIM_SLICE_BYTES - 1);
        *stall = true;
        break;
    default:
        if (flying->bytes > SIM_SLICE_BYTES)
            flying->result = SIM_SLICE_BYTES + dice(sim, (uint32_t)flying->bytes - SIM_SLICE_BYTES);
        break;
    }
}

static void check_submission(struct simulation *sim, const struct flying *flying)
{
    const struct piece *piece = (const struct piece *)(void *)flying->read;
    uint64_t bytes = 0, reads = 0, most = drives_most_bytes(sim, piece->background);
    bool demands = !piece->background && !flying->direct;
    for (uint32_t i = 0; i < SIM_FLYING; i++) {
        if (sim->flying[i].used && sim->flying[i].ring == sim->ring && &sim->flying[i] != flying) {
            bytes += sim->flying[i].drive == flying->drive ? sim->flying[i].bytes : 0;
            reads++;
            demands |= !((const struct piece *)(void *)sim->flying[i].read)->background && !sim->flying[i].direct;
        }
    }
    if (bytes && bytes + flying->bytes > most)
        violated(sim, "%llu bytes of drive %u in flight, %llu are the most",
                 (unsigned long long)(bytes + flying->bytes), flying->drive, (unsigned long long)most);
    flying->ring->demanded_ns = demands ? sim->now_ns : flying->ring->demanded_ns;
    if (piece->background && sim->reader->calm && flying->ring->demanded_ns &&
        sim->now_ns - flying->ring->demanded_ns <= LATELY_NS)
        violated(sim, "the background may have all that may fly, %llu ns after a demand",
                 (unsigned long long)(sim->now_ns - flying->ring->demanded_ns));
    drives_check_read(sim, flying);
    if (reads >= READER_DEPTH)
        violated(sim, "more than %u reads in flight", READER_DEPTH);
    if (!flying->direct && flying->read->buffer_place > sim->registered_nodes)
        violated(sim, "a read names registered buffer %u of %u", flying->read->buffer_place, sim->registered_nodes);
}

static int disk_submit(void *state, struct io_read *read)
{
    struct simulation *sim = the_simulation;
    struct sim_ring *ring = state;
    world_hook(sim);
    if (sim->dead) {
        read->next = ring->ghosts;
        ring->ghosts = read;
        return 0;
    }
    uint32_t place = 0;
    while (place < SIM_FLYING && sim->flying[place].used)
        place++;
    if (place == SIM_FLYING || ring->flying >= sim->plan.depth || (ring->flying && !sim->opening && hurts(sim))) {
        sim->full = true;
        return -EAGAIN;
    }
    struct flying *flying = &sim->flying[place];
    const struct sim_file *file = drives_file(sim, read->fd);
    flying->copy = file->copy;
    flying->drive = (uint8_t)drive_of(sim, file);
    flying->used = true;
    flying->landed = false;
    flying->ring = ring;
    flying->read = read;
    flying->direct = NULL;
    flying->bytes = read->bytes;
    if (!find_place(sim, flying, read->buffer))
        flying->direct = read->buffer;
    if (read->bytes > SIM_BLOB_BYTES)
        violated(sim, "a read of %zu bytes", read->bytes);
    flying->data = sim->buffers[place];
    flying->result = pread(read->fd, flying->data, read->bytes, (off_t)read->offset);
    if (flying->result < 0)
        violated(sim, "the container cannot be read: %s", strerror(errno));
    flying->half_ns = flying->due_ns = sim->now_ns;
    ring->flying++;
    if (flying->direct) {
        check_submission(sim, flying);
        return 0;
    }
    uint64_t word;
    memcpy(&word, flying->data, sizeof(word));
    word *= WORD_INVERSE;
    flying->expert = (uint32_t)(word >> 32) - 1;
    flying->slice = (uint32_t)word / (SIM_SLICE_BYTES / 8);
    if (flying->expert >= SIM_ALL || flying->slice >= EXPERT_SLICES)
        violated(sim, "a read of the file's other parts");
    hurt_for_good(sim, flying);
    flip(sim, flying);
    hurt_once(sim, flying);
    size_t good = flying->result > 0 ? (size_t)flying->result : 0;
    if (good < flying->bytes)
        memset(flying->data + good, 0xEE, flying->bytes - good);
    flying->due_ns = drives_due(sim, flying->drive, flying->bytes);
    flying->half_ns += dice(sim, (uint32_t)(flying->due_ns - sim->now_ns));
    flying->half = dice(sim, (uint32_t)flying->bytes);
    check_submission(sim, flying);
    trace(sim, "iod     read of expert %u, slice %u, %zu bytes, of copy %u, drive %u", flying->expert, flying->slice,
          flying->bytes, flying->copy, flying->drive);
    return 0;
}

/* The kernel writes into the pool, whoever has asked and whatever has become of the slot. */
static void write_pool(struct simulation *sim, const struct flying *flying, size_t from, size_t end)
{
    char *base = sim->pool.objects[flying->node][0].base;
    memcpy(base + flying->offset + from, flying->data + from, end - from);
    uint32_t slot = (uint32_t)(flying->offset / (SIM_SLICE_BYTES * (EXPERT_SLICES / sim->pool.nodes)));
    uint64_t word = atomic_load(&sim->pool.slots[slot].state);
    if (slot_state_of(word) == SLOT_READY)
        check_slot(sim, slot);
    if (slot >= pool_slots_ready(&sim->pool))
        violated(sim, "a read lands in slot %u, which has no memory any more", slot);
}

bool disk_step(struct simulation *sim)
{
    uint32_t first = dice(sim, SIM_FLYING);
    for (uint32_t i = 0; i < SIM_FLYING; i++) {
        struct flying *flying = &sim->flying[(first + i) % SIM_FLYING];
        if (!flying->used || flying->landed)
            continue;
        if (flying->half && flying->half_ns <= sim->now_ns) {
            write_pool(sim, flying, 0, flying->half);
            flying->half = 0;
            trace(sim, "disk    read of expert %u, slice %u landed in part", flying->expert, flying->slice);
            return true;
        }
        if (flying->due_ns > sim->now_ns)
            continue;
        if (sim->drive[flying->drive].dead)
            flying->result = -EIO;
        else if (flying->direct)
            memcpy(flying->direct, flying->data, flying->bytes);
        else
            write_pool(sim, flying, 0, flying->bytes);
        flying->landed = true;
        trace(sim, "disk    read of expert %u, slice %u landed: %lld%s", flying->expert, flying->slice,
              (long long)flying->result, flying->read ? "" : ", for nobody");
        if (!flying->read) {
            struct sim_ring *ring = flying->ring;
            sim->coverage->late_reads++;
            flying->used = false;
            ring->flying--;
            free_ring_if_over(ring);
        }
        return true;
    }
    return false;
}

/* The ring's owner is dead: nobody will be told. */
void disk_kill(struct simulation *sim)
{
    struct sim_ring *ring = sim->ring;
    for (uint32_t i = 0; i < SIM_FLYING; i++) {
        struct flying *flying = &sim->flying[i];
        if (!flying->used || flying->ring != ring || !flying->read)
            continue;
        flying->read->next = ring->ghosts;
        ring->ghosts = flying->read;
        flying->read = NULL;
        if (flying->landed) {
            flying->used = false;
            ring->flying--;
        } else if (dice(sim, 2)) {
            flying->due_ns = sim->now_ns + dice(sim, LATE_MOST_NS);
            flying->half_ns = flying->half_ns > sim->now_ns ? sim->now_ns + dice(sim, LATE_MOST_NS) : flying->half_ns;
        }
    }
}

static bool doorbell_rings(const struct simulation *sim)
{
    struct pollfd poll_fd = {.fd = sim->doorbell_fd, .events = POLLIN};
    return poll(&poll_fd, 1, 0) == 1;
}

static bool anything_landed(const struct simulation *sim)
{
    for (uint32_t i = 0; i < SIM_FLYING; i++)
        if (sim->flying[i].used && sim->flying[i].landed && sim->flying[i].ring == sim->ring)
            return true;
    return false;
}

/* Something for the daemon to wake up for. */
static bool has_news(const struct simulation *sim)
{
    return (sim->stop && !sim->stop_told) || anything_landed(sim) || doorbell_rings(sim);
}

/* Tells of some of what has landed (of one at least), in any order. */
static struct io_read *collect(struct simulation *sim)
{
    struct io_read *list = NULL;
    uint32_t first = dice(sim, SIM_FLYING);
    for (uint32_t i = 0; i < SIM_FLYING; i++) {
        struct flying *flying = &sim->flying[(first + i) % SIM_FLYING];
        if (!flying->used || !flying->landed || flying->ring != sim->ring || (list && dice(sim, 3) == 0))
            continue;
        drives_note_result(sim, flying);
        flying->read->result = flying->result;
        flying->read->next = list;
        list = flying->read;
        sim->tally.reads++;
        sim->tally.bytes += flying->result > 0 ? (uint64_t)flying->result : 0;
        flying->used = false;
        sim->ring->flying--;
    }
    return list;
}

static struct io_read *give_ghosts(struct sim_ring *ring)
{
    struct io_read *list = ring->ghosts;
    ring->ghosts = NULL;
    for (struct io_read *read = list; read; read = read->next)
        read->result = -ECANCELED;
    return list;
}

/* Nothing happens at this moment: on to the next that does, at most to `deadline`. */
static void let_time_pass(struct simulation *sim, uint64_t deadline)
{
    uint64_t next = world_next(sim);
    if (next == SIM_NEVER && deadline == SIM_NEVER) {
        if (!world_is_done(sim))
            violated(sim, "nothing goes on any more: worker 0 is at %u of layer %u of step %u", sim->leader.pc,
                     sim->leader.layer, sim->leader.step);
        check_end(sim);
        sim->finished = sim->stop = true;
        return;
    }
    if (next >= deadline && ++sim->idle_timeouts > 200)
        violated(sim, "only timers go on: worker 0 is at %u of layer %u of step %u", sim->leader.pc, sim->leader.layer,
                 sim->leader.step);
    next = next < deadline ? next : deadline;
    sim->now_ns = next > sim->now_ns ? next : sim->now_ns;
}

static int disk_wait(void *state, int timeout_ms, struct io_read **ret_finished, uint32_t *ret_events,
                     struct error *ret_error)
{
    struct simulation *sim = the_simulation;
    uint64_t deadline = timeout_ms < 0 ? SIM_NEVER : sim->now_ns + (uint64_t)timeout_ms * 1000000;
    (void)ret_error;
    if (sim->running && !sim->dead)
        check_turn(sim, timeout_ms < 0 || timeout_ms == STARVED_RETRY_MS);
    while (!sim->dead && sim->now_ns < deadline) {
        if ((sim->opening || dice(sim, 3) == 0) && has_news(sim))
            break;
        if (sim->opening ? disk_step(sim) || verify_step(sim) : world_event(sim))
            continue;
        if (has_news(sim))
            break;
        if (!sim->dead)
            let_time_pass(sim, deadline);
    }
    *ret_events = (sim->stop || sim->dead ? IO_EVENT_STOP : 0) | (doorbell_rings(sim) ? IO_EVENT_DOORBELL : 0);
    sim->timer_only = timeout_ms == STARVED_RETRY_MS && sim->now_ns >= deadline && !has_news(sim);
    sim->stop_told = sim->stop;
    *ret_finished = sim->dead ? give_ghosts(state) : collect(sim);
    return 0;
}

static int disk_register_buffer(void *state, uint32_t place, void *base, size_t bytes)
{
    struct simulation *sim = the_simulation;
    (void)state;
    (void)bytes;
    if (base && dice(sim, 8) == 0)
        return -ENOMEM;
    if (!base)
        sim->registered_nodes = 0;
    else if (place != sim->registered_nodes++)
        violated(sim, "buffer %u is registered after %u", place, sim->registered_nodes - 1);
    return 0;
}

const struct io_method sim_method = {.name = "simulation",
                                     .choice = IO_URING,
                                     .open = disk_open_ring,
                                     .submit = disk_submit,
                                     .wait = disk_wait,
                                     .close = disk_close_ring,
                                     .register_buffer = disk_register_buffer};
