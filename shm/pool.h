/* The pool of experts in shared memory.
 *
 * Segment `pool` holds the slot table and the map; the bytes stand in raw objects `pool.<node>.<k>` of at most 1
 * GiB, made as the pool grows; no slot crosses two. An object has its full size from the beginning, and memory up to
 * the last slot that stands. A slot is one stretch in each node's region: node n of N holds the slices [8n/N,
 * 8(n+1)/N) of every expert, one after another (slice_bytes each).
 *
 * Who writes what stands at each field. Experts are numbered id = moe_index * experts + expert. */
#pragma once

#include "proto/error.h"
#include "proto/weights.h"
#include "shm/segment.h"
#include "shm/slot.h"

#define POOL_OBJECT_BYTES (UINT64_C(1) << 30)
#define POOL_MAX_NODES 8u
#define POOL_NOWHERE UINT64_MAX

struct slot {
    _Alignas(CACHE_LINE) _Atomic uint64_t state; /* slot.h; W: iod, and pin bits by every holder */
    /* W: worker 0, its tick at the last pin, and iod while LOADING (relaxed); R: iod, the policy's recency */
    _Atomic uint64_t used;
    _Atomic uint32_t expert; /* W: iod while EMPTY -> LOADING; R: all */
    /* W: iod before LOADING -> FAILED: errno (EIO, ENODATA where the file ends before it, EBADMSG for a checksum); R: all after FAILED
     * (acquire) */
    _Atomic uint32_t error;
    _Atomic uint32_t slice; /* W: iod, with error: the slice that failed */
    _Atomic float heat;     /* W: iod, the policy's word on how warm the expert is (relaxed); R: tools */
};

struct pool_header {
    struct segment_header segment;
    /* W: creator, once; R: all, checked at attach */
    uint32_t slots, nodes, slots_per_object, objects; /* objects: a node */
    uint32_t moe_layers, experts;
    uint64_t slice_bytes;
    uint64_t slots_offset, map_offset; /* struct slot [slots]; _Atomic uint64_t [moe_layers * experts] */
    /* W: iod, release, after object k is there on all nodes; R: all, acquire. Grows only. */
    _Alignas(CACHE_LINE) _Atomic uint32_t objects_ready;
    /* W: iod; R: all, acquire. Slots below it have memory; those from it on are EMPTY. Falls when the pool shrinks. */
    _Atomic uint32_t slots_ready;
};

/* A process's view: private, rebuilt by attaching. */
struct pool {
    struct segment table;
    struct pool_header *header;
    struct slot *slots;
    /* [moe_layers * experts]: index | generation << 32, or POOL_NOWHERE; W: iod; R: all, acquire */
    _Atomic uint64_t *map;
    /* copies of the checked header, so that a neighbour's later scribble changes nothing here */
    uint32_t slot_count, nodes, slots_per_object, object_count, expert_count;
    size_t slice_bytes;
    char instance[INSTANCE_NAME_MAX];
    uint32_t attached;                       /* objects mapped so far, a node */
    struct segment *objects[POOL_MAX_NODES]; /* [nodes][object_count] */
};

struct pool_shape {
    uint32_t slots, nodes, moe_layers, experts;
    size_t slice_bytes;
};

/* Bytes of the table, and of all objects, of a pool of that shape. */
size_t pool_table_bytes(const struct pool_shape *shape);
uint64_t pool_object_bytes(const struct pool_shape *shape, uint32_t object); /* one node's object number `object` */

/* Creates the table (all slots EMPTY, map empty). Thread: the supervisor's main. */
int pool_create(const char *instance, const struct pool_shape *shape, struct error *ret_error);

/* Maps the table and checks it. Objects are mapped by pool_attach_objects, which may be called again as the pool
 * grows. */
int pool_attach(const char *instance, struct pool *ret_pool, struct error *ret_error);
int pool_attach_objects(struct pool *pool, struct error *ret_error);
void pool_detach(struct pool *pool);

/* Gives memory to the slots from `first` on, up to `end` or the end of first's object, on all nodes at once, and
 * publishes how far they stand now (*ret_end too; == first: there was nothing to do). iod only; blocks while pages
 * are populated: run it beside the loop. `first` is the caller's own book of what stands. An object that a dead
 * predecessor left unpublished is removed first. `background`: by niced threads. On an error (full /dev/shm) what
 * stood stands. */
int pool_grow(struct pool *pool, uint32_t first, uint32_t end, bool hugepages, bool background, uint32_t *ret_end,
              struct error *ret_error);

/* Publishes that slots below `slots` stand: to shrink, once those above are EMPTY for good; then pool_punch gives their
 * memory back. Both: iod only; punching blocks and may be repeated. */
void pool_publish(struct pool *pool, uint32_t slots);
int pool_punch(struct pool *pool, uint32_t first, uint32_t end, struct error *ret_error);

/* Slots that have memory: those with an index below may be used. */
uint32_t pool_slots_ready(const struct pool *pool);

/* Address of slice `slice` of a slot, mapped in this process. The slot's index and slice are checked: NULL if out of
 * range or not attached. */
void *pool_slice(const struct pool *pool, uint32_t slot, uint32_t slice);

/* Where an expert is now: 0 and *ret_ref, or -ENOENT. The state may change at once; only a pin holds it. Any thread. */
int pool_lookup(const struct pool *pool, uint32_t expert, struct slot_ref *ret_ref);

/* Pins an expert if it is READY, after checking that the slot holds that expert. 0 and *ret_ref (pinned); -ENOENT:
 * nowhere; -EAGAIN: LOADING; -EIO: FAILED (ref filled: its error can be read); -ESTALE: changed under us, look up
 * again. */
int pool_pin(struct pool *pool, uint32_t expert, uint32_t holder, uint64_t tick, struct slot_ref *ret_ref);
void pool_unpin(struct pool *pool, struct slot_ref ref, uint32_t holder);

/* Clears every pin bit of a holder: what a dead worker held. Repeatable. Any thread. */
void pool_release_holder(struct pool *pool, uint32_t holder);
