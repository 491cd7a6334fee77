/* The drives below the container and its mirror: which files stand on which (the seam is fstat, by which the daemon tells
 * devices apart), how fast each works off what it is given, and when one dies. And what must hold of the daemon's choice
 * among the copies. */
#include "tests/simulation/simulation.h"

#include "io_daemon/loads.h"

#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#define FAKE_MAJOR 240u
#define PLAIN_NS 400000u /* the most that luck adds to a read */

/* --- which file stands where --- */

static const struct sim_file *find_file(const struct simulation *sim, ino_t inode)
{
    for (uint32_t i = 0; i < sim->file_count; i++)
        if (sim->files[i].inode == inode)
            return &sim->files[i];
    return NULL;
}

uint32_t drive_of(const struct simulation *sim, const struct sim_file *file)
{
    return sim->plan.drive_of[file->copy][file->stripe];
}

const struct sim_file *drives_file(const struct simulation *sim, int fd)
{
    const struct sim_file *file = fd >= 0 && fd < (int)SIM_FDS ? sim->file_of[fd] : NULL;
    if (!file)
        violated(sim, "a read of descriptor %d, which is no file of the container", fd);
    return file;
}

int __real_fstat64(int fd, struct stat *ret_stat);
int __wrap_fstat64(int fd, struct stat *ret_stat);

int __wrap_fstat64(int fd, struct stat *ret_stat)
{
    struct simulation *sim = the_simulation;
    int status = __real_fstat64(fd, ret_stat);
    const struct sim_file *file = status == 0 ? find_file(sim, ret_stat->st_ino) : NULL;
    if (!file)
        return status;
    ret_stat->st_dev = makedev(FAKE_MAJOR, drive_of(sim, file));
    if (fd < (int)SIM_FDS)
        sim->file_of[fd] = file;
    return status;
}

/* --- what a seed decides --- */

static void plan_places(struct simulation *sim)
{
    struct sim_plan *plan = &sim->plan;
    bool one_drive = dice(sim, 8) == 0, one_for_mirror = dice(sim, 3) == 0, shared = dice(sim, 8) == 0;
    for (uint32_t s = 0; s < plan->stripes; s++) {
        plan->drive_of[0][s] = (uint8_t)(one_drive ? 0 : s);
        plan->drive_of[1][s] = (uint8_t)(SIM_STRIPES + (one_for_mirror ? 0 : s));
    }
    if (shared)
        plan->drive_of[1][0] = plan->drive_of[0][0];
}

static void plan_speeds(struct simulation *sim)
{
    for (uint32_t d = 0; d < SIM_DRIVES; d++) {
        uint32_t slowness = 1 + dice(sim, 8);
        sim->plan.drive[d] = (struct sim_speed){.first_ns = 20000 * slowness,
                                                .luck_ns = dice(sim, PLAIN_NS),
                                                .slice_ns = 1000 * slowness * (1 + dice(sim, 8)),
                                                .lanes = 1 + dice(sim, SIM_LANES)};
    }
    if (dice(sim, 2)) /* one copy is much faster */
        for (uint32_t s = 0, fast = dice(sim, 2); s < SIM_STRIPES; s++) {
            sim->plan.drive[fast * SIM_STRIPES + s] = (struct sim_speed){20000, 20000, 1000, SIM_LANES};
            sim->plan.drive[(1 - fast) * SIM_STRIPES + s] = (struct sim_speed){200000, 20000, 60000, 1};
        }
}

static void plan_damage(struct simulation *sim)
{
    struct sim_plan *plan = &sim->plan;
    uint32_t hurt = dice(sim, 3) == 0 ? 1 + dice(sim, 3) : 0;
    for (uint32_t i = 0; i < hurt; i++) {
        uint32_t id = dice(sim, SIM_ALL), copies = plan->mirrored ? 1 + dice(sim, 3) : 1,
                 slice = dice(sim, EXPERT_SLICES);
        for (uint32_t c = 0; c < MAX_COPIES; c++) {
            if (!(copies >> c & 1))
                continue;
            enum hurt kind = (enum hurt)(HURT_CHECKSUM + dice(sim, 3));
            if (plan->mirrored && dice(sim, 2))
                kind = HURT_CHECKSUM; /* else nearly each mirror is dropped soon */
            plan->hurt[c][id] = plan->verify == VERIFY_OFF && kind == HURT_CHECKSUM ? HURT_EIO : kind;
            plan->hurt_slice[c][id] = dice(sim, 2) ? slice : dice(sim, EXPERT_SLICES);
        }
    }
}

void drives_plan(struct simulation *sim)
{
    struct sim_plan *plan = &sim->plan;
    plan->stripes = dice(sim, 2) ? 1 + dice(sim, SIM_STRIPES) : 1;
    plan->mirrored = dice(sim, 2);
    plan->used_copies = plan->mirrored ? 3 : 1;
    if (plan->mirrored && dice(sim, 8) == 0)
        plan->used_copies = 1 + dice(sim, 2); /* the other does not open */
    plan_places(sim);
    plan_speeds(sim);
    plan_damage(sim);
    if (plan->used_copies == 3 && dice(sim, 8) == 0) {
        uint32_t d = plan->drive_of[dice(sim, 2)][dice(sim, plan->stripes)];
        sim->drive[d].dead = plan->drive_of[0][0] != plan->drive_of[1][0]; /* else no dense weights */
    }
}

/* --- time and death --- */

/* When a read that is sent now comes back: after those that its lane works on. */
uint64_t drives_due(struct simulation *sim, uint32_t drive, size_t bytes)
{
    const struct sim_speed *speed = &sim->plan.drive[drive];
    uint64_t *free_ns = sim->drive[drive].free_ns, *lane = free_ns;
    for (uint32_t l = 1; l < speed->lanes; l++)
        lane = free_ns[l] < *lane ? &free_ns[l] : lane;
    uint64_t begins = *lane > sim->now_ns ? *lane : sim->now_ns;
    *lane = begins + speed->first_ns + dice(sim, speed->luck_ns) + bytes * speed->slice_ns / SIM_SLICE_BYTES;
    return *lane;
}

/* Bit e: that copy cannot give expert e whole, because reads fail or come short (EIO) or bytes are wrong (EBADMSG). */
static uint32_t bad_experts(const struct simulation *sim, uint32_t copy, uint32_t code)
{
    uint32_t bad = 0, dead = 0;
    for (uint32_t s = 0; s < sim->plan.stripes; s++)
        dead |= sim->drive[sim->plan.drive_of[copy][s]].dead;
    for (uint32_t e = 0; e < SIM_ALL; e++) {
        enum hurt hurt = sim->plan.hurt[copy][e];
        bool fails = hurt == HURT_EIO || hurt == HURT_CUT || dead;
        bad |= (uint32_t)(code == EIO ? fails : hurt == HURT_CHECKSUM) << e;
    }
    return bad;
}

void drives_begin_load(struct simulation *sim, uint32_t expert)
{
    uint32_t bit = 1u << expert;
    for (uint32_t c = 0; c < MAX_COPIES; c++) {
        sim->bad_reads[c] = (sim->bad_reads[c] & ~bit) | (bad_experts(sim, c, EIO) & bit);
        sim->bad_bytes[c] = (sim->bad_bytes[c] & ~bit) | (bad_experts(sim, c, EBADMSG) & bit);
    }
}

bool drives_hurt(const struct simulation *sim, uint32_t expert)
{
    return sim->plan.hurt[0][expert] != HURT_NOT || (sim->plan.mirrored && sim->plan.hurt[1][expert] != HURT_NOT);
}

/* A drive dies, or one that is dead works again. A copy without a mirror dies more seldom. */
void drives_trouble(struct simulation *sim)
{
    uint32_t copy = sim->plan.mirrored ? dice(sim, MAX_COPIES) : 0;
    uint32_t d = sim->plan.drive_of[copy][dice(sim, sim->plan.stripes)];
    if (!sim->drive[d].dead && sim->plan.used_copies != 3 && dice(sim, 4))
        return;
    sim->drive[d].dead = !sim->drive[d].dead;
    sim->coverage->dead_drives += sim->drive[d].dead;
    trace(sim, "super   drive %u %s", d, sim->drive[d].dead ? "is dead" : "works again");
    for (uint32_t c = 0; c < MAX_COPIES; c++)
        sim->bad_reads[c] |= bad_experts(sim, c, EIO);
}

/* --- the daemon's copies --- */

int __real_copies_open(struct copies *copies, const struct facts *facts, struct control *control,
                       void (*log)(const char *line), struct error *ret_error);
int __wrap_copies_open(struct copies *copies, const struct facts *facts, struct control *control,
                       void (*log)(const char *line), struct error *ret_error);

int __wrap_copies_open(struct copies *copies, const struct facts *facts, struct control *control,
                       void (*log)(const char *line), struct error *ret_error)
{
    struct simulation *sim = the_simulation;
    sim->copies = copies;
    sim->dropped = sim->failing = sim->must_drop = sim->drops_told = sim->refusals_told = 0;
    for (uint32_t d = 0; d < SIM_DRIVES; d++)
        sim->drive[d].bytes = sim->drive[d].reads = 0;
    return __real_copies_open(copies, facts, control, log, ret_error);
}

int __real_loads_open(struct loads *loads, struct error *ret_error);
int __wrap_loads_open(struct loads *loads, struct error *ret_error);

int __wrap_loads_open(struct loads *loads, struct error *ret_error)
{
    the_simulation->reader = loads->reader;
    return __real_loads_open(loads, ret_error);
}

/* What is before the last of `bytes` bytes more, by what is under way and what waits, over the rate that was measured. */
static double wait_for(const struct simulation *sim, const struct reader *reader, uint32_t copy, size_t file,
                       uint64_t bytes, bool background)
{
    uint32_t index = sim->copies->copy[copy].files[file].drive;
    const struct drive *drive = &reader->drives[index];
    uint64_t ahead = bytes;
    for (uint32_t i = 0; i < SIM_FLYING; i++) {
        const struct flying *flying = &sim->flying[i];
        if (flying->used && flying->ring == sim->ring && flying->read &&
            makedev(FAKE_MAJOR, flying->drive) == sim->copies->drives[index])
            ahead += flying->bytes;
    }
    for (const struct piece *piece = drive->urgent.first; piece; piece = piece->next)
        ahead += piece->read.bytes;
    for (const struct piece *piece = drive->background.first; piece && background; piece = piece->next)
        ahead += piece->read.bytes;
    return (double)ahead / (drive->rate > 0 ? drive->rate : 1.0);
}

uint32_t __real_copies_choose(const struct copies *copies, const struct reader *reader, uint32_t mask, size_t file,
                              uint64_t bytes, bool background);
uint32_t __wrap_copies_choose(const struct copies *copies, const struct reader *reader, uint32_t mask, size_t file,
                              uint64_t bytes, bool background);

/* Each read goes to the copy that is there first. */
uint32_t __wrap_copies_choose(const struct copies *copies, const struct reader *reader, uint32_t mask, size_t file,
                              uint64_t bytes, bool background)
{
    struct simulation *sim = the_simulation;
    uint32_t chosen = __real_copies_choose(copies, reader, mask, file, bytes, background);
    if (sim->dead)
        return chosen;
    if (!(mask >> chosen & 1))
        violated(sim, "copy %u is chosen among %x", chosen, mask);
    for (uint32_t c = 0; c < MAX_COPIES && mask == 3; c++) {
        double other = wait_for(sim, reader, c, file, bytes, background),
               own = wait_for(sim, reader, chosen, file, bytes, background);
        if (other < own)
            violated(sim, "copy %u is chosen for %.0f ns, and copy %u takes %.0f", chosen, own, c, other);
    }
    return chosen;
}

void __real_copies_drop(struct copies *copies, uint32_t copy, size_t file, int status);
void __wrap_copies_drop(struct copies *copies, uint32_t copy, size_t file, int status);

/* A copy is dropped for a read of its own that has failed for good, once, and never the last. */
void __wrap_copies_drop(struct copies *copies, uint32_t copy, size_t file, int status)
{
    struct simulation *sim = the_simulation;
    if (!sim->dead) {
        if (!(copies->live >> copy & 1) || sim->dropped >> copy & 1)
            violated(sim, "copy %u is dropped a second time", copy);
        if (!(copies->live & ~(1u << copy)))
            violated(sim, "copy %u is dropped, and no other is left", copy);
        if (!(sim->failing >> copy & 1))
            violated(sim, "copy %u is dropped, and no read of it has failed for good", copy);
        sim->dropped |= 1u << copy;
        sim->coverage->dropped++;
        trace(sim, "iod     drops copy %u: %s", copy, strerror(-status));
    }
    __real_copies_drop(copies, copy, file, status);
}

/* The daemon is told of a read that has failed for good: twice with EIO, or with nothing at all. Behind the next turn
 * its copy must not be read, if there is another. */
void drives_note_result(struct simulation *sim, const struct flying *flying)
{
    const struct piece *piece = (const struct piece *)(void *)flying->read;
    uint32_t bit = 1u << flying->copy;
    sim->drive[flying->drive].reads++;
    sim->drive[flying->drive].bytes += flying->result > 0 ? (uint64_t)flying->result : 0;
    if (flying->result != 0 && !(flying->result == -EIO && piece->retried))
        return;
    sim->failing |= bit;
    if (!flying->direct && ((const struct load *)piece->owner)->code)
        return; /* it fails already */
    if (sim->copies->live == 3) {
        sim->must_drop |= bit;
        sim->coverage->failing_reads++;
    }
}

static bool is_fast(const struct sim_speed *speed)
{
    return speed->slice_ns == 1000 && speed->lanes == SIM_LANES;
}

void drives_check_read(struct simulation *sim, const struct flying *flying)
{
    const struct piece *piece = (const struct piece *)(void *)flying->read;
    const struct sim_plan *plan = &sim->plan;
    if (!(plan->used_copies >> flying->copy & 1))
        violated(sim, "a read of copy %u, which has not opened", flying->copy);
    if (sim->dropped >> flying->copy & 1)
        violated(sim, "a read of copy %u, which is dropped", flying->copy);
    if (sim->copies->drives[piece->drive] != makedev(FAKE_MAJOR, flying->drive))
        violated(sim, "a read of drive %u is counted for another", flying->drive);
    if (sim->copies->live != 3)
        return;
    if (flying->direct) {
        sim->coverage->dense_reads[flying->copy]++;
        return;
    }
    bool fast[MAX_COPIES];
    for (uint32_t c = 0; c < MAX_COPIES; c++)
        fast[c] = is_fast(&plan->drive[plan->drive_of[c][sim->file_of[flying->read->fd]->stripe]]);
    if (fast[0] == fast[1])
        return;
    if (fast[flying->copy])
        sim->coverage->fast_reads++;
    else
        sim->coverage->slow_reads++;
}

/* --- at every turn --- */

static void check_states(const struct simulation *sim)
{
    for (uint32_t c = 0; c < MAX_COPIES; c++) {
        uint32_t state = atomic_load(&sim->control->iod.copies[c].state), expected = COPY_USED;
        if (c == 1 && !sim->plan.mirrored)
            expected = COPY_NONE;
        else if (!(sim->plan.used_copies >> c & 1))
            expected = COPY_REFUSED;
        else if (sim->dropped >> c & 1)
            expected = COPY_DROPPED;
        if (state != expected)
            violated(sim, "copy %u is told to be in state %u, not %u", c, state, expected);
    }
    if (sim->copies->live != (sim->plan.used_copies & ~sim->dropped))
        violated(sim, "copies %x are read, and %x are good", sim->copies->live, sim->plan.used_copies & ~sim->dropped);
    if (sim->drops_told != (uint32_t)__builtin_popcount(sim->dropped))
        violated(sim, "%u lines tell of %u copies that were dropped", sim->drops_told,
                 (uint32_t)__builtin_popcount(sim->dropped));
    if (sim->refusals_told != (uint32_t)(sim->plan.mirrored && sim->plan.used_copies != 3))
        violated(sim, "%u lines tell of copies that are not used", sim->refusals_told);
}

uint64_t drives_most_bytes(const struct simulation *sim, bool background)
{
    return background && !sim->reader->calm ? sim->plan.in_flight / READER_BACKGROUND : sim->plan.in_flight;
}

/* A drive that has a piece waiting, and room for it, was not left idle; what is counted of it is what happened. */
static void check_drive(const struct simulation *sim, uint32_t index)
{
    const struct drive *drive = &sim->reader->drives[index];
    const struct drive_line *line = &sim->control->iod.drives[index];
    uint32_t minor = (uint32_t)minor(sim->copies->drives[index]), reads = 0;
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < SIM_FLYING; i++) {
        const struct flying *flying = &sim->flying[i];
        bool its = flying->used && flying->ring == sim->ring && flying->drive == minor;
        reads += its;
        bytes += its ? flying->bytes : 0;
    }
    if (bytes != drive->flying_bytes || reads != drive->flying)
        violated(sim, "%llu bytes are under way from drive %u, and %llu are counted", (unsigned long long)bytes, minor,
                 (unsigned long long)drive->flying_bytes);
    const struct piece *const waiting[] = {drive->urgent.first, drive->background.first};
    for (uint32_t q = 0; q < 2 && !sim->full && sim->reader->flying < READER_DEPTH; q++)
        if (waiting[q] && (!reads || bytes + waiting[q]->read.bytes <= drives_most_bytes(sim, q == 1)))
            violated(sim, "drive %u has room, and %zu bytes wait for it", minor, waiting[q]->read.bytes);
    if (!sim->stop_told &&
        (atomic_load(&line->bytes) != sim->drive[minor].bytes || atomic_load(&line->reads) != sim->drive[minor].reads))
        violated(sim, "drive %u: counted %llu bytes, read %llu", minor, (unsigned long long)atomic_load(&line->bytes),
                 (unsigned long long)sim->drive[minor].bytes);
}

/* True when another piece of that file would find room on its drive, whichever copy is chosen. */
static bool has_room(const struct simulation *sim, size_t file)
{
    for (uint32_t c = 0; c < MAX_COPIES; c++) {
        if (!(sim->copies->live >> c & 1))
            continue;
        const struct drive *drive = &sim->reader->drives[sim->copies->copy[c].files[file].drive];
        if (drive->flying_bytes + drive->urgent.bytes >= drives_most_bytes(sim, false))
            return false;
    }
    return true;
}

/* No demand waits that has a slot to get and a drive to be read from. */
static void check_demands(const struct simulation *sim)
{
    const struct requests *requests = sim->placement->requests;
    const struct wish *wish = TAILQ_FIRST(&requests->queues[PRIORITY_DEMAND]);
    if (!wish || atomic_load(&sim->control->iod.starved))
        return;
    uint32_t expert = (uint32_t)(wish - requests->wishes);
    for (uint32_t s = 0; s < sim->plan.stripes; s++)
        if (has_room(sim, copies_expert_file(sim->copies, expert / SIM_EXPERTS, s)))
            violated(sim, "a demand for expert %u waits, and stripe %u could be read", expert, s);
}

void drives_check_turn(struct simulation *sim, bool may_load)
{
    uint32_t left = sim->must_drop & sim->copies->live;
    if (left && sim->copies->live != left)
        violated(sim, "reads of copy %u have failed, and it is not dropped", (uint32_t)__builtin_ctz(left));
    sim->must_drop = 0;
    check_states(sim);
    for (uint32_t d = 0; d < sim->copies->drive_count; d++)
        check_drive(sim, d);
    if (may_load && !sim->stop_told)
        check_demands(sim);
    sim->full = false;
}
