/* Pool memory that io_uring knows in advance: the kernel pins the pages of a registered buffer once instead of at every
 * read, which on pages of 4 KiB is most of what a read costs.
 *
 * A chunk is some 64 MiB of consecutive slots of one object, so no slot crosses two. Only chunks whose slots all stand
 * below the pool's size are registered. One that shrinking reaches is given back before a hole is punched in it: a
 * registered buffer would keep the old pages, and reads would go on landing in them, where nobody sees them, with a good
 * result. Slots of other chunks are read like any memory. Thread: the daemon's main. */
#pragma once

#include "io_daemon/placement.h"
#include "io_daemon/reader.h"

struct buffers {
    struct pool *pool;
    struct reader *reader;     /* its method must know how to register, or nothing is */
    _Atomic uint64_t *bytes;   /* counter: registered now */
    _Atomic uint32_t *refusal; /* errno of why no more can be */
    void (*log)(const char *line);
    bool *registered; /* [chunks][nodes] */
    uint32_t chunk_slots, object_chunks, chunks;
    uint32_t next; /* the first chunk that may not be registered on all nodes */
    bool refused;  /* this machine gives no more: logged once */
};

/* Fills the rest of a struct whose first five the caller has set. */
int buffers_open(struct buffers *buffers, struct error *ret_error);
void buffers_close(struct buffers *buffers);

/* Registers the next chunk, if its slots are all below `slots`, which stand and are mapped. True: another one is due. It
 * takes a millisecond or two. */
bool buffers_keep(struct buffers *buffers, uint32_t slots);

/* Gives back every chunk that has a slot at or above `slots`. Reads of them may be in flight still; those that wait are
 * sent as into any memory. */
void buffers_release(struct buffers *buffers, uint32_t slots);

/* io_read.buffer_place of a read into that slot, from that slice on within one node. */
uint32_t buffers_find(const struct buffers *buffers, uint32_t slot, uint32_t slice);
