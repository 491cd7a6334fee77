#include "shm/slot.h"

#include <errno.h>

static uint64_t slot_word(uint32_t generation, enum slot_state state)
{
    return (uint64_t)generation << 32 | (uint64_t)state;
}

static uint64_t holder_bit(uint32_t holder)
{
    return UINT64_C(1) << (4 + holder % SLOT_HOLDERS);
}

static bool change_allowed(enum slot_state from, enum slot_state to)
{
    switch (from) {
    case SLOT_EMPTY: return to == SLOT_LOADING;
    case SLOT_LOADING: return to == SLOT_READY || to == SLOT_FAILED || to == SLOT_QUARANTINED;
    case SLOT_READY:
    case SLOT_FAILED:
    case SLOT_QUARANTINED: return to == SLOT_EMPTY;
    }
    return false;
}

int slot_change(_Atomic uint64_t *word, enum slot_state from, enum slot_state to, uint32_t generation,
                uint32_t *ret_generation)
{
    if (!change_allowed(from, to))
        return -EINVAL;
    /* Pins of any state but READY mean nothing (only a scribbler sets them), so the new word drops them. */
    uint32_t next = from == SLOT_EMPTY ? generation + 1 : generation;
    uint64_t old = atomic_load_explicit(word, memory_order_relaxed);
    do {
        if (slot_state_of(old) != from || slot_generation_of(old) != generation)
            return -ESTALE;
        if (from == SLOT_READY && slot_pins_of(old))
            return -EBUSY;
        /* acquire: bytes are written only after the last reader's unpin; release: bytes before READY, error before
         * FAILED. */
    } while (!atomic_compare_exchange_weak_explicit(word, &old, slot_word(next, to), memory_order_acq_rel,
                                                    memory_order_relaxed));
    if (ret_generation)
        *ret_generation = next;
    return 0;
}

int slot_pin(_Atomic uint64_t *word, uint32_t generation, uint32_t holder)
{
    uint64_t old = atomic_load_explicit(word, memory_order_relaxed);
    do {
        if (slot_state_of(old) != SLOT_READY || slot_generation_of(old) != generation)
            return -ESTALE;
    } while (!atomic_compare_exchange_weak_explicit(word, &old, old | holder_bit(holder), memory_order_acquire,
                                                    memory_order_relaxed));
    return 0;
}

void slot_unpin(_Atomic uint64_t *word, uint32_t holder)
{
    /* release: the holder's reads of the bytes come before the eviction that this allows. Sequentially consistent,
     * because the flag `starved` is read after it. */
    atomic_fetch_and(word, ~holder_bit(holder));
}
