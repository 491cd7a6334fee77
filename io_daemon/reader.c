#include "io_daemon/reader.h"

#include "proto/weights.h"

#include <stdatomic.h>
#include <time.h>

/* A file that ends within a page gives an O_DIRECT reader the same few bytes again and again. */
#define MAX_STALLS 3u

uint64_t monotonic_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void append_piece(struct reader *reader, struct piece *piece)
{
    piece->next = NULL;
    if (reader->first)
        reader->last->next = piece;
    else
        reader->first = piece;
    reader->last = piece;
    reader->waiting_bytes += piece->read.bytes;
}

void reader_add(struct reader *reader, struct piece *piece)
{
    piece->status = 0;
    piece->retried = false;
    piece->stalls = 0;
    append_piece(reader, piece);
}

struct piece *reader_withdraw(struct reader *reader)
{
    struct piece *pieces = reader->first;
    reader->first = reader->last = NULL;
    reader->waiting_bytes = 0;
    return pieces;
}

static void submit_pieces(struct reader *reader)
{
    while (reader->first && reader->flying < READER_DEPTH) {
        struct piece *piece = reader->first;
        if (reader->flying && reader->flying_bytes + piece->read.bytes > READER_IN_FLIGHT)
            return;
        piece->started_ns = monotonic_ns();
        if (reader->method->submit(reader->io, &piece->read) < 0)
            return;
        reader->first = piece->next;
        reader->waiting_bytes -= piece->read.bytes;
        reader->flying_bytes += piece->read.bytes;
        reader->flying++;
    }
}

static void skip_bytes(struct io_read *read, size_t bytes)
{
    read->buffer = (char *)read->buffer + bytes;
    read->offset += bytes;
    read->bytes -= bytes;
}

/* Looks at a read that came back: true when its piece is finished, false when the rest must be read. */
static bool advance_piece(struct piece *piece)
{
    struct io_read *read = &piece->read;
    int64_t result = read->result;
    if (result == -EINTR || result == -EAGAIN)
        return false;
    if (result == -EIO && !piece->retried) {
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
    return false;
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
        reader->flying--;
        reader->flying_bytes -= piece->read.bytes;
        atomic_fetch_add_explicit(reader->counters.reads, 1, memory_order_relaxed);
        atomic_fetch_add_explicit(reader->counters.ns, now - piece->started_ns, memory_order_relaxed);
        if (piece->read.result > 0)
            atomic_fetch_add_explicit(reader->counters.bytes, (uint64_t)piece->read.result, memory_order_relaxed);
        if (advance_piece(piece)) {
            piece->next = *ret_finished;
            *ret_finished = piece;
        } else {
            append_piece(reader, piece);
        }
    }
    submit_pieces(reader); /* what makes room for the next piece also sends it, before anything else is done */
    return status;
}
