/* One thread reads and keeps the book; hashers.c hashes.
 *
 *   begin_chunk       the next stretch of the next extent: pieces into the reader
 *   reader_wait       pieces come back
 *   hand_over         chunks whose pieces are all back go to their thread, in the order in which they were begun
 *   collect_chunks    hashed ones are free again; the last one of an extent settles the extent */
#include "cmd/verify/verify.h"

#include "cmd/verify/hashers.h"
#include "io_daemon/disk.h"
#include "proto/cleanup.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define TICK_MS 200
#define PLACE_NS UINT64_C(1000000000) /* between two writes of the place */
#define CHUNKS_READING 6u             /* more than the bytes in flight */
#define CHUNKS_HASHING 2u             /* a thread */

struct verify {
    struct place *place;
    const struct extents *extents;
    const struct verify_options *options;
    struct verify_result *result;
    struct tool_reader reader;
    struct hashers *hashers;
    int *files; /* [extents.file_count] */
    char *memory;
    struct chunk *chunks; /* [chunk_count] */
    uint32_t chunk_count;
    struct chunk *free, *first, *last; /* first, last: being read, in order */
    uint32_t hashing;                  /* chunks that the threads have */
    uint32_t extent;                   /* the next to begin, or the one that is being begun */
    uint64_t within;                   /* bytes of it that are begun */
    uint64_t bytes_done, bytes_begun, started_ns, written_ns, ticked_ns;
    bool changed, stopping; /* changed: since the place was written */
};

/* --- open and close --- */

static int open_files(struct verify *verify, struct error *ret_error)
{
    verify->result->direct = true;
    for (uint32_t f = 0; f < verify->extents->file_count; f++) {
        bool direct;
        verify->files[f] = disk_open(verify->extents->files[f].header->path, &direct, ret_error);
        if (verify->files[f] < 0)
            return verify->files[f];
        verify->result->direct = verify->result->direct && direct;
    }
    if (!verify->result->direct)
        verify->options->note(verify->options->context, "the file system refuses O_DIRECT: bytes that the page cache "
                                                        "holds are not read from the drive");
    return 0;
}

static int open_verify(struct verify *verify, struct error *ret_error)
{
    const struct extents *extents = verify->extents;
    verify->files = malloc((extents->file_count + 1u) * sizeof *verify->files);
    for (uint32_t f = 0; verify->files && f < extents->file_count; f++)
        verify->files[f] = -1;
    verify->chunk_count = CHUNKS_READING + CHUNKS_HASHING * verify->options->jobs;
    verify->chunks = calloc(verify->chunk_count, sizeof *verify->chunks);
    size_t bytes = verify->chunk_count * CHUNK_BYTES;
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    verify->memory = memory == MAP_FAILED ? NULL : memory;
    if (!verify->files || !verify->chunks || !verify->memory)
        return error_set(ret_error, ENOMEM, "no memory for %zu MB of reads; try fewer with --jobs", bytes >> 20);
    (void)madvise(verify->memory, bytes, MADV_HUGEPAGE); /* large stretches of memory make the reads cheap */
    for (uint32_t c = 0; c < verify->chunk_count; c++) {
        verify->chunks[c].memory = verify->memory + c * CHUNK_BYTES;
        verify->chunks[c].next = verify->free;
        verify->free = &verify->chunks[c];
    }
    int status = tool_reader_open(verify->options->io, verify->options->stop_fd, 0, 0, &verify->reader, ret_error);
    if (status < 0)
        return status;
    verify->result->method = verify->reader.reader.method->name;
    status = open_files(verify, ret_error);
    if (status < 0)
        return status;
    return hashers_open(extents, verify->options->jobs, verify->reader.doorbell_fd, &verify->hashers, ret_error);
}

static void close_verify(struct verify *verify)
{
    bool idle = tool_reader_drain(&verify->reader);
    hashers_close(verify->hashers);
    if (idle) { /* else reads may still land in it */
        if (verify->memory)
            munmap(verify->memory, verify->chunk_count * CHUNK_BYTES);
        free(verify->chunks);
    }
    tool_reader_close(&verify->reader);
    for (uint32_t f = 0; verify->files && f < verify->extents->file_count; f++)
        close_fdp(&verify->files[f]);
    free(verify->files);
}

/* --- reading --- */

/* Equal pieces, as the daemon cuts an expert. */
static void read_chunk(struct verify *verify, struct chunk *chunk, uint64_t bytes)
{
    uint64_t least = (bytes + PIECE_BYTES - 1) / PIECE_BYTES;
    uint64_t most = least ? (bytes / least + DISK_ALIGN - 1) / DISK_ALIGN * DISK_ALIGN : 0;
    chunk->piece_count = chunk->left = 0;
    for (uint64_t done = 0; done < bytes;) {
        uint64_t size = bytes - done < most ? bytes - done : most;
        struct piece *piece = &chunk->pieces[chunk->piece_count];
        *piece = (struct piece){.read = {.fd = verify->files[verify->extents->list[chunk->extent].file],
                                         .buffer = chunk->memory + done,
                                         .bytes = size,
                                         .offset = chunk->offset + done},
                                .owner = chunk};
        done += size;
        chunk->piece_end[chunk->piece_count++] = chunk->offset + done;
        chunk->left++;
        reader_add(&verify->reader.reader, piece);
    }
}

static void begin_chunk(struct verify *verify)
{
    const struct extent *extent = &verify->extents->list[verify->extent];
    struct chunk *chunk = verify->free;
    verify->free = chunk->next;
    uint64_t left = extent->end - extent->offset - verify->within, bytes = left < CHUNK_BYTES ? left : CHUNK_BYTES;
    chunk->extent = verify->extent;
    chunk->first = verify->within == 0;
    chunk->last = bytes == left;
    chunk->offset = extent->offset + verify->within;
    chunk->next = NULL;
    if (verify->first)
        verify->last->next = chunk;
    else
        verify->first = chunk;
    verify->last = chunk;
    read_chunk(verify, chunk, bytes);
    verify->bytes_begun += bytes;
    verify->within += bytes;
    if (chunk->last) {
        verify->within = 0;
        verify->extent++;
    }
}

/* Milliseconds until the rate allows the next read; 0: now. */
static int wait_for_rate(const struct verify *verify)
{
    if (!verify->options->rate)
        return 0;
    double due = (double)verify->bytes_begun / (double)verify->options->rate;
    double left = due - (double)(monotonic_ns() - verify->started_ns) * 1e-9;
    return left <= 0 ? 0 : left * 1000 >= TICK_MS ? TICK_MS : (int)(left * 1000) + 1;
}

/* Begins what there is room and time for. Returns how long to sleep at most, in ms. */
static int begin_chunks(struct verify *verify)
{
    int pause = 0;
    while (!verify->stopping && pause == 0) {
        while (verify->within == 0 && verify->extent < verify->extents->count &&
               verify->place->states[verify->extent] == EXTENT_GOOD)
            verify->extent++;
        if (verify->extent == verify->extents->count || !verify->free ||
            !reader_has_room(&verify->reader.reader, 0, false))
            break;
        pause = wait_for_rate(verify);
        if (pause == 0)
            begin_chunk(verify);
    }
    return pause ? pause : TICK_MS;
}

static void hand_over(struct verify *verify)
{
    while (verify->first && verify->first->left == 0) {
        struct chunk *chunk = verify->first;
        verify->first = chunk->next;
        verify->hashing++;
        hashers_add(verify->hashers, chunk);
    }
}

/* --- the book --- */

static void settle_extent(struct verify *verify, uint32_t index)
{
    const struct extent *extent = &verify->extents->list[index];
    const struct verify_options *options = verify->options;
    enum extent_state state = EXTENT_GOOD;
    for (uint32_t p = extent->first; p < extent->first + extent->parts; p++) {
        int code = hashers_code(verify->hashers, p);
        if (code == 0)
            continue;
        state = EXTENT_BAD;
        verify->result->damaged_parts++;
        options->damage(options->context, &verify->extents->files[extent->file], &verify->extents->parts[p], code);
    }
    verify->place->states[index] = (uint8_t)state;
    verify->bytes_done += extent->bytes;
    verify->changed = true;
}

static void collect_chunks(struct verify *verify)
{
    for (struct chunk *chunk = hashers_collect(verify->hashers), *next; chunk; chunk = next) {
        next = chunk->next;
        verify->hashing--;
        if (chunk->last)
            settle_extent(verify, chunk->extent);
        chunk->next = verify->free;
        verify->free = chunk;
    }
}

static void write_place(struct verify *verify, bool now)
{
    const struct verify_options *options = verify->options;
    uint64_t time = monotonic_ns();
    struct error error;
    if (!options->keep_place || !verify->changed || (!now && time - verify->written_ns < PLACE_NS))
        return;
    verify->written_ns = time;
    verify->changed = false;
    if (place_write(verify->place, &error) < 0)
        options->note(options->context, error.text);
}

static void tick(struct verify *verify)
{
    uint64_t now = monotonic_ns();
    if (now - verify->ticked_ns < TICK_MS * UINT64_C(1000000))
        return;
    verify->ticked_ns = now;
    verify->options->tick(verify->options->context, verify->bytes_done);
}

/* Until nothing is left, or what was begun has come back after a stop. */
static int read_all(struct verify *verify, struct error *ret_error)
{
    while (true) {
        int pause = begin_chunks(verify);
        bool begun_all = verify->stopping || verify->extent == verify->extents->count;
        hand_over(verify); /* an extent without bytes is complete at once */
        if (begun_all && !verify->first && !verify->hashing)
            return verify->stopping ? -EINTR : 0;
        struct piece *finished;
        uint32_t events = 0;
        int status = reader_wait(&verify->reader.reader, pause, &finished, &events, ret_error);
        if (status < 0)
            return status;
        for (; finished; finished = finished->next)
            ((struct chunk *)finished->owner)->left--;
        if (events & IO_EVENT_DOORBELL)
            tool_reader_answer(&verify->reader);
        if (events & IO_EVENT_STOP)
            verify->stopping = true;
        hand_over(verify);
        collect_chunks(verify);
        tick(verify);
        write_place(verify, false);
    }
}

int verify_run(struct place *place, const struct verify_options *options, struct verify_result *ret_result,
               struct error *ret_error)
{
    *ret_result = (struct verify_result){.method = "none"};
    struct verify verify = {.place = place,
                            .extents = place->extents,
                            .options = options,
                            .result = ret_result,
                            .reader = {.doorbell_fd = -1}};
    uint64_t before = 0;
    for (uint32_t e = 0; e < place->extents->count; e++)
        before += place->states[e] == EXTENT_GOOD ? place->extents->list[e].bytes : 0;
    verify.bytes_done = before;
    verify.started_ns = verify.written_ns = monotonic_ns();
    int status = open_verify(&verify, ret_error);
    if (status == 0) {
        status = read_all(&verify, ret_error);
        write_place(&verify, true);
    }
    close_verify(&verify);
    ret_result->bytes = verify.bytes_done - before;
    if (status == -EINTR)
        error_write(ret_error, "%s: interrupted", place->extents->container->path);
    return status;
}
