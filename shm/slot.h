/* A slot's state word: who may do what with one expert's place in the pool.
 *
 *   63                              32 31            20 19                4 3        0
 *  +----------------------------------+----------------+-------------------+----------+
 *  | generation                       | 0              | pin bit a holder  | state    |
 *  +----------------------------------+----------------+-------------------+----------+
 *
 * The generation is 32 bits and grows at every EMPTY -> LOADING, so that a reference that slept through 4 billion
 * reuses is needed to be fooled. Pins share the word with the state: eviction is one compare-and-swap that needs all
 * pin bits clear, pinning is one that needs READY and the expected generation; there is no moment between them.
 *
 *   EMPTY       -> LOADING       iod, when it gives the slot to an expert (generation + 1)
 *   LOADING     -> READY         iod, when every slice is there and verified
 *               -> FAILED        iod, when a read or a checksum failed; the slot's `error` says why
 *               -> QUARANTINED   a new iod: reads of its dead predecessor may still land here; iod at its end, on the
 *                                way to EMPTY, so that no worker takes what it gives up for a failure
 *   READY       -> EMPTY         iod, only with no pin bit set
 *   FAILED      -> EMPTY         iod
 *   QUARANTINED -> EMPTY         iod, once the predecessor's lock file is free
 *
 * slot_change() is the only function that changes the state. */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

enum slot_state {
    SLOT_EMPTY = 0,
    SLOT_LOADING = 1,
    SLOT_READY = 2,
    SLOT_FAILED = 3,
    SLOT_QUARANTINED = 4,
};

#define SLOT_HOLDERS 16u /* a bit each: workers 0-7, the others are free */

/* Which slot, and which of its lives. A stale one is an ordinary return value (-ESTALE). */
struct slot_ref {
    uint32_t index, generation;
};

static inline enum slot_state slot_state_of(uint64_t word)
{
    return (enum slot_state)(word & 15);
}
static inline uint32_t slot_generation_of(uint64_t word)
{
    return (uint32_t)(word >> 32);
}
static inline uint32_t slot_pins_of(uint64_t word)
{
    return (uint32_t)(word >> 4) & 0xffff;
}

/* Moves the state `from` -> `to` as the table above allows (anything else: -EINVAL). -ESTALE: the word is not `from`
 * with `generation`; -EBUSY: pinned. LOADING -> READY is a release: who then pins (acquire) sees the bytes. For EMPTY
 * -> LOADING `generation` is the old one and *ret_generation the new one (may be NULL). Thread: iod's main. */
int slot_change(_Atomic uint64_t *word, enum slot_state from, enum slot_state to, uint32_t generation,
                uint32_t *ret_generation);

/* Sets the holder's bit. 0: pinned (or was, by the same holder); -ESTALE: not READY with that generation. Any
 * thread. */
int slot_pin(_Atomic uint64_t *word, uint32_t generation, uint32_t holder);

/* Clears the holder's bit; repeatable. Any thread. */
void slot_unpin(_Atomic uint64_t *word, uint32_t holder);
