/* From settings, container and machine to the facts of an instance, with every byte of /dev/shm counted before the
 * first is taken. */
#pragma once

#include "cmd/supervisor/machine.h"
#include "proto/container.h"
#include "proto/settings.h"
#include "shm/control.h"
#include "shm/pool.h"

struct plan {
    struct facts facts;
    struct pool_shape pool; /* of the table: a slot for every expert */
    uint32_t pool_slots;    /* to begin with */
    bool automatic;         /* the pool follows the memory that is free */
    uint64_t reserve;       /* bytes of memory that an `auto` pool leaves */
    uint64_t slot_bytes;
    /* bytes of shared memory; pool_bytes: of pool_slots */
    uint64_t dense_bytes, kv_bytes, exchange_bytes, table_bytes, pool_bytes;
};

/* Fills a plan, or says in one line what does not fit, by how much, and the remedy (-ENOSPC: /dev/shm; -ENOMEM: memory;
 * -EINVAL: a setting). The pool gets what the setting says (bytes, or a share of the available memory), or with `auto`
 * what memory, control groups and /dev/shm leave after dense weights, KV, exchange and a reserve; at most a slot for
 * every expert, at least top_k slots (and as many again where they fit). Pure: all it knows is in its arguments. */
int plan_make(const struct settings *settings, const struct container *container, const struct machine *machine,
              struct plan *ret_plan, struct error *ret_error);

/* Shared memory of everything but the pool's experts, and the fewest slots of an `auto` pool. */
uint64_t plan_fixed_bytes(const struct plan *plan);
uint32_t plan_least_slots(const struct plan *plan);
