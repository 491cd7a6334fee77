#include "cmd/bench/drive.h"

#include "cmd/cli/bar.h"
#include "cmd/cli/interrupt.h"
#include "io_daemon/disk.h"
#include "io_daemon/tool_reader.h"
#include "proto/cleanup.h"
#include "proto/container.h"
#include "shm/segment.h"

#include <fcntl.h>
#include <math.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>

#define FILL_BYTES (UINT64_C(4) << 20)
#define FILL_SYNC_BYTES (UINT64_C(64) << 20)
#define MOST_READS 256u
#define MOST_LOADS 256u
#define POOL_BYTES                                                                                                     \
    (UINT64_C(1) << 30) /* of shared memory, read into in turn: what a drive gives may differ from page to page */

struct blob {
    uint32_t file;                   /* of its first stripe; the others' follow */
    uint64_t offsets[EXPERT_SLICES]; /* [stripes] */
};

struct drive_bench {
    struct drive_bench_facts facts;
    uint32_t io;
    int interrupt_fd; /* -1: none */
    bool hugepages;
    char *path;
    struct container *container; /* NULL: a scratch file */
    int *files;
    size_t file_count;
    uint32_t stripes;                     /* files that a blob is spread over */
    uint64_t stripe_bytes[EXPERT_SLICES]; /* of a blob */
    struct blob *blobs;                   /* in the order in which they are read */
    size_t blob_count, next;
};

const char *const drive_memory_names[DRIVE_MEMORIES + 1] = {
    [DRIVE_MEMORY_HUGE] = "huge", [DRIVE_MEMORY_SMALL] = "small", [DRIVE_MEMORY_POOL] = "pool"};

/* xorshift64, Marsaglia 2003 */
static uint64_t draw(uint64_t *state)
{
    *state ^= *state << 13, *state ^= *state >> 7, *state ^= *state << 17;
    return *state;
}

/* --- latencies --- */

/* Sixteen buckets an octave. */
static void add_latency(struct latencies *latencies, uint64_t ns)
{
    unsigned octave = 63u - (unsigned)__builtin_clzll(ns | 16);
    latencies->counts[octave * 16 + (ns >> (octave - 4) & 15)]++;
    latencies->total++;
    latencies->most_ns = ns > latencies->most_ns ? ns : latencies->most_ns;
}

double latencies_percentile(const struct latencies *latencies, double share)
{
    uint64_t seen = 0;
    for (unsigned b = 0; b < LATENCY_BUCKETS; b++) {
        seen += latencies->counts[b];
        if (seen > 0 && (double)seen >= share * (double)latencies->total)
            return fmin(ldexp(16.5 + b % 16, (int)(b / 16) - 4), (double)latencies->most_ns);
    }
    return 0;
}

/* --- opening --- */

static int fill_scratch(int fd, const char *folder, uint64_t bytes, struct error *ret_error)
{
    _cleanup_free_ uint64_t *block = malloc(FILL_BYTES);
    if (!block)
        return error_set(ret_error, ENOMEM, "%s: no memory to fill a file", folder);
    uint64_t random = 0x9e3779b97f4a7c15u;
    struct bar bar;
    bar_begin("iobench: writing", 0, &bar);
    for (uint64_t done = 0; done < bytes;) {
        /* no two blocks alike: some drives and file systems would store them once */
        for (size_t i = 0; i < FILL_BYTES / sizeof *block; i++)
            block[i] = draw(&random);
        uint64_t left = bytes - done < FILL_BYTES ? bytes - done : FILL_BYTES;
        ssize_t put = pwrite(fd, block, left, (off_t)done);
        if (put < 0 && errno == EINTR)
            continue;
        if (put < 0) {
            int code = errno;
            bar_clear(&bar);
            return error_set(ret_error, code, "%s: a file of %.1f GB cannot be written there: %s%s", folder,
                             (double)bytes / 1e9, strerror(code), code == ENOSPC ? "; choose fewer with --size" : "");
        }
        done += (uint64_t)put;
        if (done % FILL_SYNC_BYTES == 0 || done >= bytes) { /* the page cache shall keep what others have in it */
            (void)fdatasync(fd);
            (void)posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
        }
        bar_draw(&bar, (double)done, (double)bytes);
    }
    bar_clear(&bar);
    return 0;
}

/* A file without a name, which is gone with its last descriptor. */
static int make_scratch(const char *folder, uint64_t bytes, int *ret_fd, struct error *ret_error)
{
    struct statvfs room;
    _cleanup_free_ char *path = NULL;
    if (asprintf(&path, "%s/calypte-iobench.XXXXXX", folder) < 0) {
        path = NULL;
        return error_set(ret_error, ENOMEM, "%s: no memory", folder);
    }
    if (statvfs(folder, &room) < 0)
        return error_set(ret_error, errno, "%s: %s; give a folder on the drive, or a container", folder,
                         strerror(errno));
    if ((uint64_t)room.f_bavail * room.f_frsize < bytes)
        return error_set(ret_error, ENOSPC,
                         "%s: a file of %.1f GB does not fit, %.1f GB are free; choose fewer with "
                         "--size",
                         folder, (double)bytes / 1e9, (double)room.f_bavail * (double)room.f_frsize / 1e9);
    _cleanup_close_ int fd = mkostemp(path, O_CLOEXEC);
    if (fd < 0)
        return error_set(ret_error, errno, "%s: a file cannot be made there: %s", folder, strerror(errno));
    unlink(path);
    if (fallocate(fd, 0, 0, (off_t)bytes) < 0 && errno == ENOSPC)
        return error_set(ret_error, ENOSPC, "%s: a file of %.1f GB does not fit; choose fewer with --size", folder,
                         (double)bytes / 1e9);
    int status = fill_scratch(fd, folder, bytes, ret_error);
    if (status == 0)
        *ret_fd = take_fd(fd);
    return status;
}

static int open_file(struct drive_bench *drive, const char *path, bool buffered, struct error *ret_error)
{
    bool direct = false;
    int fd = buffered ? open(path, O_RDONLY | O_CLOEXEC) : disk_open(path, &direct, ret_error);
    if (fd < 0)
        return buffered ? error_set(ret_error, errno, "%s cannot be opened: %s", path, strerror(errno)) : fd;
    drive->files[drive->file_count++] = fd;
    drive->facts.direct = drive->facts.direct && direct;
    return 0;
}

static int open_container(struct drive_bench *drive, const struct drive_bench_options *options, struct error *ret_error)
{
    int status = container_open(options->path, &drive->container, ret_error);
    if (status < 0)
        return status;
    const struct container *container = drive->container;
    uint32_t experts = container->config.experts;
    drive->facts.blob_bytes = EXPERT_SLICES * container->slice_bytes;
    drive->stripes = container->stripes;
    for (uint32_t s = 0; s < container->stripes; s++)
        drive->stripe_bytes[s] = split(EXPERT_SLICES, s, container->stripes).count * container->slice_bytes;
    drive->files = calloc(container->expert_count * container->stripes + 1, sizeof *drive->files);
    drive->blobs = calloc(container->expert_count * experts + 1, sizeof *drive->blobs);
    if (!drive->files || !drive->blobs)
        return error_set(ret_error, ENOMEM, "%s: no memory", options->path);
    for (uint32_t f = 0; status == 0 && f < container->expert_count; f++) {
        const struct expert_layer *layer = &container->experts[f];
        for (uint32_t s = 0; status == 0 && s < container->stripes; s++)
            status = open_file(drive, layer->stripes[s].header.path, options->buffered, ret_error);
        for (uint32_t e = 0; e < experts; e++) {
            struct blob *blob = &drive->blobs[drive->blob_count++];
            blob->file = f * container->stripes;
            for (uint32_t s = 0; s < container->stripes; s++)
                blob->offsets[s] = layer->stripes[s].offsets[e];
        }
    }
    if (status == 0 && drive->blob_count == 0)
        status = error_set(ret_error, EINVAL, "%s: has no experts; give a folder on the drive instead", options->path);
    return status;
}

static int open_scratch(struct drive_bench *drive, const struct drive_bench_options *options, struct error *ret_error)
{
    drive->facts.blob_bytes = DRIVE_BLOB_BYTES;
    drive->stripes = 1;
    drive->stripe_bytes[0] = DRIVE_BLOB_BYTES;
    size_t count = options->scratch_bytes / DRIVE_BLOB_BYTES;
    if (count == 0)
        return error_set(ret_error, EINVAL, "--size must be at least one blob of %u bytes", DRIVE_BLOB_BYTES);
    drive->files = calloc(1, sizeof *drive->files);
    drive->blobs = calloc(count, sizeof *drive->blobs);
    if (!drive->files || !drive->blobs)
        return error_set(ret_error, ENOMEM, "%s: no memory", options->path);
    _cleanup_close_ int fd = -1;
    int status = make_scratch(options->path, (uint64_t)count * DRIVE_BLOB_BYTES, &fd, ret_error);
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    if (status == 0)
        status = open_file(drive, path, options->buffered, ret_error);
    for (size_t b = 0; b < count; b++)
        drive->blobs[drive->blob_count++] = (struct blob){0, {(uint64_t)b * DRIVE_BLOB_BYTES}};
    return status;
}

/* Also with a manifest that is a dangling link: a folder in which something is wrong is none to write into. */
static bool is_container(const char *path)
{
    struct stat facts;
    _cleanup_free_ char *manifest = NULL;
    if (asprintf(&manifest, "%s/%s", path, CONTAINER_MANIFEST) < 0)
        manifest = NULL;
    return manifest && lstat(manifest, &facts) == 0;
}

/* Which method the machine allows. */
static int probe_method(struct drive_bench *drive, struct error *ret_error)
{
    struct tool_reader reader;
    int status = tool_reader_open(drive->io, -1, 0, 0, &reader, ret_error);
    if (status < 0)
        return status;
    drive->facts.method = reader.reader.method->name;
    tool_reader_close(&reader);
    return 0;
}

int drive_bench_open(const struct drive_bench_options *options, struct drive_bench **ret_drive, struct error *ret_error)
{
    struct drive_bench *drive = calloc(1, sizeof *drive);
    if (!drive || !(drive->path = strdup(options->path))) {
        free(drive);
        return error_set(ret_error, ENOMEM, "%s: no memory", options->path);
    }
    drive->io = options->io;
    drive->interrupt_fd = options->interrupt_fd;
    drive->hugepages = options->hugepages;
    drive->facts.direct = !options->buffered;
    drive->facts.container = is_container(options->path);
    int status = probe_method(drive, ret_error);
    if (status == 0)
        status = drive->facts.container ? open_container(drive, options, ret_error)
                                        : open_scratch(drive, options, ret_error);
    if (status < 0) {
        drive_bench_close(drive);
        return status;
    }
    drive->facts.bytes = drive->blob_count * drive->facts.blob_bytes;
    uint64_t random = 0x2545f4914f6cdd1du; /* the same order each time; Fisher and Yates */
    for (size_t b = drive->blob_count - 1; b > 0; b--) {
        size_t other = draw(&random) % (b + 1);
        struct blob blob = drive->blobs[b];
        drive->blobs[b] = drive->blobs[other];
        drive->blobs[other] = blob;
    }
    *ret_drive = drive;
    return 0;
}

void drive_bench_close(struct drive_bench *drive)
{
    if (!drive)
        return;
    for (size_t f = 0; f < drive->file_count; f++)
        close(drive->files[f]);
    container_close(drive->container);
    free(drive->files);
    free(drive->blobs);
    free(drive->path);
    free(drive);
}

const struct drive_bench_facts *drive_bench_facts(const struct drive_bench *drive)
{
    return &drive->facts;
}

/* --- measuring --- */

uint64_t drive_bench_piece_bytes(const struct drive_bench *drive, uint64_t block)
{
    uint64_t blob = drive->facts.blob_bytes, count = (blob + block - 1) / block;
    return (blob / count + DISK_ALIGN - 1) / DISK_ALIGN * DISK_ALIGN;
}

struct load {
    char *memory;
    struct piece *pieces;
    uint32_t left; /* pieces still to come */
};

/* One call of drive_measure. */
struct run {
    struct drive_bench *drive;
    struct tool_reader reader;
    uint64_t piece_bytes, depth;
    uint32_t pieces, load_count, next_load; /* pieces: of a blob */
    struct load *loads;
    char *memory;
    size_t memory_bytes;
    uint32_t buffer_place; /* io_read.buffer_place */
    struct piece *all_pieces;
    uint64_t bytes; /* that have come */
};

static void close_run(struct run *run)
{
    if (tool_reader_drain(&run->reader)) { /* else reads may still land in it */
        if (run->memory)
            munmap(run->memory, run->memory_bytes);
        free(run->all_pieces);
    }
    tool_reader_close(&run->reader);
    free(run->loads);
}

/* As iod does with its pool's, where the method knows how to and the machine lets it. */
static void register_memory(struct run *run)
{
    const struct reader *reader = &run->reader.reader;
    bool done = reader->method->register_buffer &&
                reader->method->register_buffer(reader->io, 0, run->memory, run->memory_bytes) == 0;
    run->buffer_place = done ? 1 : 0;
}

/* Leaves the memory filled, so that no page is made while the clock runs. */
static int make_memory(struct run *run, enum drive_memory memory, struct error *ret_error)
{
    if (memory == DRIVE_MEMORY_POOL) {
        struct segment_options options = {
            .kind = SEGMENT_RAW, .node = -1, .hugepages = run->drive->hugepages, .populate_threads = 1};
        struct segment segment;
        char name[INSTANCE_NAME_MAX];
        snprintf(name, sizeof name, "iobench-%d", (int)getpid());
        int status = segment_create(name, "memory", run->memory_bytes, &options, &segment, ret_error);
        if (status < 0)
            return status;
        segment_unlink(name, "memory");
        run->memory = segment.base;
        register_memory(run);
        return 0;
    }
    void *base = mmap(NULL, run->memory_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED)
        return error_set(ret_error, ENOMEM, "no memory for %.0f MB of reads; choose less with --depth",
                         (double)run->memory_bytes / 1e6);
    (void)madvise(base, run->memory_bytes, memory == DRIVE_MEMORY_HUGE ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
    memset(base, 0, run->memory_bytes);
    run->memory = base;
    return 0;
}

static int open_run(struct run *run, const struct drive_setting *setting, struct error *ret_error)
{
    const struct drive_bench *drive = run->drive;
    uint64_t blob = drive->facts.blob_bytes;
    run->piece_bytes = drive_bench_piece_bytes(drive, setting->block);
    for (uint32_t s = 0; s < drive->stripes; s++)
        run->pieces += (uint32_t)((drive->stripe_bytes[s] + run->piece_bytes - 1) / run->piece_bytes);
    uint64_t loads = run->depth * drive->stripes / blob + 2, pool = POOL_BYTES / blob,
             reads = (run->depth + run->piece_bytes - 1) / run->piece_bytes;
    loads = setting->memory == DRIVE_MEMORY_POOL && loads < pool ? pool : loads;
    run->load_count = (uint32_t)(loads < MOST_LOADS ? loads : MOST_LOADS);
    reads = reads < MOST_READS ? reads : MOST_READS;
    int status = tool_reader_open(drive->io, -1, run->depth, (uint32_t)reads, &run->reader, ret_error);
    if (status < 0)
        return status;
    run->memory_bytes = run->load_count * blob;
    run->loads = calloc(run->load_count, sizeof *run->loads);
    run->all_pieces = calloc((size_t)run->load_count * run->pieces, sizeof *run->all_pieces);
    if (!run->loads || !run->all_pieces)
        return error_set(ret_error, ENOMEM, "no memory for %u reads", run->load_count * run->pieces);
    status = make_memory(run, setting->memory, ret_error);
    if (status < 0)
        return status;
    for (uint32_t l = 0; l < run->load_count; l++) {
        run->loads[l].memory = run->memory + l * blob;
        run->loads[l].pieces = run->all_pieces + (size_t)l * run->pieces;
    }
    return 0;
}

static void begin_load(struct run *run, struct load *load)
{
    struct drive_bench *drive = run->drive;
    const struct blob *blob = &drive->blobs[drive->next];
    drive->next = (drive->next + 1) % drive->blob_count;
    load->left = run->pieces;
    struct piece *piece = load->pieces;
    char *memory = load->memory;
    for (uint32_t s = 0; s < drive->stripes; s++) {
        for (uint64_t at = 0; at < drive->stripe_bytes[s]; at += run->piece_bytes, piece++) {
            uint64_t left = drive->stripe_bytes[s] - at;
            *piece = (struct piece){.read = {.fd = drive->files[blob->file + s],
                                             .buffer = memory + at,
                                             .bytes = left < run->piece_bytes ? left : run->piece_bytes,
                                             .offset = blob->offsets[s] + at,
                                             .buffer_place = run->buffer_place},
                                    .owner = load,
                                    .index = blob->file + s,
                                    .drive = (uint8_t)(s % READER_DRIVES)};
            reader_add(&run->reader.reader, piece);
        }
        memory += drive->stripe_bytes[s];
    }
}

/* As the daemon does: the next expert is begun when all bytes that wait and fly would leave the drive room. */
static void begin_loads(struct run *run)
{
    const struct reader *reader = &run->reader.reader;
    while (run->loads[run->next_load].left == 0 && reader_has_room(reader, 0, false)) {
        begin_load(run, &run->loads[run->next_load]);
        run->next_load = (run->next_load + 1) % run->load_count;
    }
}

static int read_failed(const struct drive_bench *drive, const struct piece *piece, struct error *ret_error)
{
    const struct container *container = drive->container;
    const char *path = container ? container->experts[piece->index / container->stripes]
                                       .stripes[piece->index % container->stripes]
                                       .header.path
                                 : drive->path;
    return error_set(ret_error, -piece->status, "%s: cannot be read at byte %llu: %s: check the drive (dmesg)", path,
                     (unsigned long long)piece->read.offset, container_fault(-piece->status));
}

/* Sends what there is room for and takes what has come. */
static int turn(struct run *run, struct latencies *latencies, struct error *ret_error)
{
    struct piece *finished;
    uint32_t events = 0;
    if (run->drive->interrupt_fd >= 0 && interrupt_wait(run->drive->interrupt_fd, -1, 0) == WAIT_INTERRUPTED)
        return error_set(ret_error, EINTR, "interrupted");
    begin_loads(run);
    uint64_t before = run->reader.bytes;
    int status = reader_wait(&run->reader.reader, -1, &finished, &events, ret_error);
    uint64_t now = monotonic_ns();
    if (events & IO_EVENT_DOORBELL)
        tool_reader_answer(&run->reader);
    run->bytes += run->reader.bytes - before;
    for (; finished; finished = finished->next) {
        ((struct load *)finished->owner)->left--;
        add_latency(latencies, now - finished->started_ns);
        if (finished->status < 0 && status == 0)
            status = read_failed(run->drive, finished, ret_error);
    }
    return status;
}

static int measure(struct run *run, double seconds, struct latencies *latencies, double *ret_bytes_per_s,
                   struct error *ret_error)
{
    struct latencies ignored = {.total = 0};
    int status = 0;
    while (status == 0 && run->bytes < run->depth)
        status = turn(run, &ignored, ret_error);
    uint64_t start = monotonic_ns(), before = run->bytes, now = start;
    while (status == 0 && (double)(now - start) < seconds * 1e9) {
        status = turn(run, latencies, ret_error);
        now = monotonic_ns();
    }
    *ret_bytes_per_s = now > start ? (double)(run->bytes - before) * 1e9 / (double)(now - start) : 0;
    return status;
}

int drive_bench_measure(struct drive_bench *drive, const struct drive_setting *setting, double seconds,
                        struct latencies *latencies, double *ret_bytes_per_s, struct error *ret_error)
{
    struct run run = {.drive = drive, .depth = setting->depth, .reader = {.doorbell_fd = -1}};
    int status = open_run(&run, setting, ret_error);
    if (status == 0)
        status = measure(&run, seconds, latencies, ret_bytes_per_s, ret_error);
    close_run(&run);
    return status;
}
