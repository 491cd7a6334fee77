#include "io_daemon/reader.h"

#include "proto/weights.h"

#include <stdatomic.h>
#include <time.h>

/* A file that ends within a page gives an O_DIRECT reader the same few bytes again and again. */
#define MAX_STALLS 3u
#define RATE_UNKNOWN 1.0  /* bytes a nanosecond; a plain SSD, until the first read is back */
#define RATE_SHARE 0.0625 /* of the newest read in the average */

uint64_t monotonic_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void append_piece(struct piece_queue *queue, struct piece *piece)
{
    piece->next = NULL;
    if (queue->first)
        queue->last->next = piece;
    else
        queue->first = piece;
    queue->last = piece;
    queue->bytes += piece->read.bytes;
}

static void enqueue(struct reader *reader, struct piece *piece)
{
    struct drive *drive = &reader->drives[piece->drive];
    append_piece(piece->background ? &drive->background : &drive->urgent, piece);
}

void reader_add(struct reader *reader, struct piece *piece)
{
    piece->status = 0;
    piece->retried = false;
    piece->stalls = 0;
    enqueue(reader, piece);
}

/* Bytes of a drive that may be in flight. */
static uint64_t most_bytes(const struct reader *reader, bool background)
{
    uint64_t most = reader->most_bytes ? reader->most_bytes : READER_IN_FLIGHT;
    return background && !reader->calm ? most / READER_BACKGROUND : most;
}

bool reader_has_room(const struct reader *reader, uint8_t drive, bool background)
{
    const struct drive *d = &reader->drives[drive];
    uint64_t bytes = d->flying_bytes + d->urgent.bytes + (background ? d->background.bytes : 0);
    return bytes < most_bytes(reader, background);
}

double reader_expected_ns(const struct reader *reader, uint8_t drive, bool background, uint64_t bytes)
{
    const struct drive *d = &reader->drives[drive];
    uint64_t ahead = d->flying_bytes + d->urgent.bytes + (background ? d->background.bytes : 0) + bytes;
    return (double)ahead / (d->rate > 0 ? d->rate : RATE_UNKNOWN);
}

void reader_promote(struct reader *reader, uint8_t drive, const void *owner)
{
    struct drive *d = &reader->drives[drive];
    struct piece *piece = d->background.first;
    d->background = (struct piece_queue){0};
    while (piece) {
        struct piece *next = piece->next;
        if (piece->owner == owner)
            piece->background = false;
        enqueue(reader, piece);
        piece = next;
    }
}

void reader_forget_buffer(struct reader *reader, uint32_t buffer_place)
{
    for (uint32_t d = 0; d < READER_DRIVES; d++) {
        const struct piece_queue *queues[] = {&reader->drives[d].urgent, &reader->drives[d].background};
        for (size_t q = 0; q < 2; q++) {
            for (struct piece *piece = queues[q]->first; piece; piece = piece->next) {
                if (piece->read.buffer_place == buffer_place)
                    piece->read.buffer_place = 0;
            }
        }
    }
}

struct piece *reader_withdraw(struct reader *reader)
{
    struct piece_queue all = {0};
    for (uint32_t d = 0; d < READER_DRIVES; d++) {
        struct piece_queue *queues[] = {&reader->drives[d].urgent, &reader->drives[d].background};
        for (size_t q = 0; q < 2; q++) {
            for (struct piece *piece = queues[q]->first, *next; piece; piece = next) {
                next = piece->next;
                append_piece(&all, piece);
            }
            *queues[q] = (struct piece_queue){0};
        }
    }
    return all.first;
}

/* Sends from the front of one queue. False: the method is full. */
static bool submit_queue(struct reader *reader, struct drive *drive, struct piece_queue *queue, uint64_t most)
{
    uint32_t most_reads = reader->most_reads ? reader->most_reads : READER_DEPTH;
    while (queue->first && reader->flying < most_reads) {
        struct piece *piece = queue->first;
        if (drive->flying && drive->flying_bytes + piece->read.bytes > most)
            return true;
        piece->started_ns = monotonic_ns();
        if (reader->method->submit(reader->io, &piece->read) < 0)
            return false;
        queue->first = piece->next;
        queue->bytes -= piece->read.bytes;
        drive->flying_bytes += piece->read.bytes;
        piece->ahead = drive->flying_bytes;
        drive->flying++;
        reader->flying++;
    }
    return true;
}

static void submit_pieces(struct reader *reader)
{
    bool open = true;
    for (uint32_t d = 0; open && d < READER_DRIVES; d++)
        open = submit_queue(reader, &reader->drives[d], &reader->drives[d].urgent, most_bytes(reader, false));
    for (uint32_t d = 0; open && d < READER_DRIVES; d++) {
        struct drive *drive = &reader->drives[d];
        open = submit_queue(reader, drive, &drive->background, most_bytes(reader, true));
    }
}

static void skip_bytes(struct io_read *read, size_t bytes)
{
    read->buffer = (char *)read->buffer + bytes;
    read->offset += bytes;
    read->bytes -= bytes;
}

/* Looks at a read that came back: true when its piece is finished, false when the rest must be read. `dropped`: not from
 * there, so that the piece is finished with what it has. */
static bool advance_piece(struct piece *piece, bool dropped)
{
    struct io_read *read = &piece->read;
    int64_t result = read->result;
    if ((result == -EINTR || result == -EAGAIN) && !dropped)
        return false;
    if (result == -EIO && !piece->retried && !dropped) {
        piece->retried = true;
        return false;
    }
    if (result < 0) {
        piece->status = (int)result;
        return true;
    }
    if ((uint64_t)result >= read->bytes)
        return true;
    /* O_DIRECT must go on at an aligned place: what came of a broken page is read once more. */
    size_t progress = (size_t)result / DISK_ALIGN * DISK_ALIGN;
    piece->stalls = progress ? 0 : piece->stalls + 1;
    if (result == 0 || piece->stalls > MAX_STALLS) {
        piece->status = -ENODATA;
        return true;
    }
    skip_bytes(read, progress);
    piece->status = dropped ? -ENODATA : 0;
    return dropped;
}

/* A drive works on all that is in flight at once, so its rate is that, by the time that a read among them took. */
static void count_read(struct reader *reader, struct drive *drive, const struct piece *piece, uint64_t took_ns)
{
    uint64_t got = piece->read.result > 0 ? (uint64_t)piece->read.result : 0;
    atomic_fetch_add_explicit(reader->counters.reads, 1, memory_order_relaxed);
    atomic_fetch_add_explicit(reader->counters.ns, took_ns, memory_order_relaxed);
    atomic_fetch_add_explicit(reader->counters.bytes, got, memory_order_relaxed);
    if (reader->counters.us)
        histogram_add(reader->counters.us, took_ns / 1000);
    drive->reads++;
    drive->read_ns += took_ns;
    drive->bytes += got;
    if (got < piece->read.bytes || took_ns == 0)
        return;
    double rate = (double)piece->ahead / (double)took_ns;
    drive->rate += drive->rate > 0 ? (rate - drive->rate) * RATE_SHARE : rate;
}

int reader_wait(struct reader *reader, int timeout_ms, struct piece **ret_finished, uint32_t *ret_events,
                struct error *ret_error)
{
    struct io_read *read = NULL;
    *ret_finished = NULL;
    submit_pieces(reader);
    int status = reader->method->wait(reader->io, timeout_ms, &read, ret_events, ret_error);
    uint64_t now = read ? monotonic_ns() : 0;
    while (read) {
        struct piece *piece = (struct piece *)(void *)read;
        read = read->next;
        struct drive *drive = &reader->drives[piece->drive];
        reader->flying--;
        drive->flying--;
        drive->flying_bytes -= piece->read.bytes;
        count_read(reader, drive, piece, now - piece->started_ns);
        if (advance_piece(piece, reader->dropped_copies & 1u << piece->copy)) {
            piece->next = *ret_finished;
            *ret_finished = piece;
        } else {
            piece->read.buffer_place = 0; /* it may have been given back while the read was in flight */
            enqueue(reader, piece);
        }
    }
    submit_pieces(reader); /* what makes room for the next piece also sends it, before anything else is done */
    return status;
}
