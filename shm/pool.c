#include "shm/pool.h"

#include "proto/model_config.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define POOL_PART "pool"
#define POOL_MAX_SLOTS (1u << 24)

/* Everything that follows from a shape; the header repeats it and attach compares. */
struct pool_layout {
    uint64_t stride; /* bytes of one slot in one node's region */
    uint32_t slots_per_object, objects;
    size_t slots_offset, map_offset, table_bytes;
};

static size_t round_up(size_t value, size_t to)
{
    return (value + to - 1) / to * to;
}

static int pool_layout(const struct pool_shape *shape, struct pool_layout *ret_layout, struct error *ret_error)
{
    bool nodes_ok = shape->nodes == 1 || shape->nodes == 2 || shape->nodes == 4 || shape->nodes == 8;
    bool bytes_ok = shape->slice_bytes > 0 && shape->slice_bytes % DISK_ALIGN == 0 &&
                    shape->slice_bytes <= POOL_OBJECT_BYTES / EXPERT_SLICES;
    if (!nodes_ok || !bytes_ok || shape->slots == 0 || shape->slots > POOL_MAX_SLOTS || shape->moe_layers == 0 ||
        shape->moe_layers > MODEL_MAX_LAYERS || shape->experts == 0 || shape->experts > MODEL_MAX_EXPERTS)
        return error_set(ret_error, EINVAL,
                         "pool of %u slots of 8 x %zu bytes on %u nodes for %u layers of %u experts: out of range",
                         shape->slots, shape->slice_bytes, shape->nodes, shape->moe_layers, shape->experts);
    struct pool_layout layout = {.stride = (uint64_t)shape->slice_bytes * (EXPERT_SLICES / shape->nodes)};
    layout.slots_per_object = (uint32_t)(POOL_OBJECT_BYTES / layout.stride);
    layout.objects = (shape->slots + layout.slots_per_object - 1) / layout.slots_per_object;
    layout.slots_offset = round_up(sizeof(struct pool_header), CACHE_LINE);
    layout.map_offset = layout.slots_offset + (size_t)shape->slots * sizeof(struct slot);
    layout.table_bytes = layout.map_offset + (size_t)shape->moe_layers * shape->experts * sizeof(uint64_t);
    *ret_layout = layout;
    return 0;
}

size_t pool_table_bytes(const struct pool_shape *shape)
{
    struct pool_layout layout;
    return pool_layout(shape, &layout, NULL) < 0 ? 0 : layout.table_bytes;
}

static uint64_t object_bytes(uint32_t slots, const struct pool_layout *layout, uint32_t object)
{
    if (object >= layout->objects)
        return 0;
    uint32_t rest = slots - object * layout->slots_per_object;
    return layout->stride * (rest < layout->slots_per_object ? rest : layout->slots_per_object);
}

uint64_t pool_object_bytes(const struct pool_shape *shape, uint32_t object)
{
    struct pool_layout layout;
    return pool_layout(shape, &layout, NULL) < 0 ? 0 : object_bytes(shape->slots, &layout, object);
}

int pool_create(const char *instance, const struct pool_shape *shape, struct error *ret_error)
{
    struct pool_layout layout;
    int status = pool_layout(shape, &layout, ret_error);
    if (status < 0)
        return status;
    struct segment table;
    struct segment_options options = {.kind = SEGMENT_POOL, .node = -1, .populate_threads = 1};
    status = segment_create(instance, POOL_PART, layout.table_bytes, &options, &table, ret_error);
    if (status < 0)
        return status;
    struct pool_header *header = table.base;
    header->slots = shape->slots;
    header->nodes = shape->nodes;
    header->slots_per_object = layout.slots_per_object;
    header->objects = layout.objects;
    header->moe_layers = shape->moe_layers;
    header->experts = shape->experts;
    header->slice_bytes = shape->slice_bytes;
    header->slots_offset = layout.slots_offset;
    header->map_offset = layout.map_offset;
    /* A new object is all zeros: every slot EMPTY, generation 0. */
    memset((char *)table.base + layout.map_offset, 0xff, (size_t)shape->moe_layers * shape->experts * sizeof(uint64_t));
    segment_detach(&table);
    return 0;
}

/* Reads the header's constants once into a shape and holds everything else against what follows from it. */
static int check_table(const char *instance, const struct segment *table, struct pool_shape *ret_shape,
                       struct pool_layout *ret_layout, struct error *ret_error)
{
    if (table->bytes < sizeof(struct pool_header))
        return error_set(ret_error, EBADMSG,
                         "pool table of instance %s is too short: run `calypte down` and start again", instance);
    const struct pool_header *shared = table->base;
    struct pool_shape shape = {.slots = shared->slots,
                               .nodes = shared->nodes,
                               .moe_layers = shared->moe_layers,
                               .experts = shared->experts,
                               .slice_bytes = shared->slice_bytes};
    int status = pool_layout(&shape, ret_layout, ret_error);
    if (status < 0)
        return -EBADMSG;
    if (shared->slots_per_object != ret_layout->slots_per_object || shared->objects != ret_layout->objects ||
        shared->slots_offset != ret_layout->slots_offset || shared->map_offset != ret_layout->map_offset ||
        table->bytes != ret_layout->table_bytes)
        return error_set(ret_error, EBADMSG,
                         "pool table of instance %s contradicts itself: run `calypte down` and start again", instance);
    *ret_shape = shape;
    return 0;
}

int pool_attach(const char *instance, struct pool *ret_pool, struct error *ret_error)
{
    struct pool pool = {0};
    int status = segment_attach(instance, POOL_PART, SEGMENT_POOL, 0, true, &pool.table, ret_error);
    if (status < 0)
        return status;
    struct pool_shape shape = {0};
    struct pool_layout layout = {0};
    status = check_table(instance, &pool.table, &shape, &layout, ret_error);
    if (status < 0) {
        pool_detach(&pool);
        return status;
    }
    pool.header = pool.table.base;
    pool.slots = (struct slot *)(void *)((char *)pool.table.base + layout.slots_offset);
    pool.map = (_Atomic uint64_t *)(void *)((char *)pool.table.base + layout.map_offset);
    pool.slot_count = shape.slots;
    pool.nodes = shape.nodes;
    pool.slots_per_object = layout.slots_per_object;
    pool.object_count = layout.objects;
    pool.expert_count = shape.moe_layers * shape.experts;
    pool.slice_bytes = shape.slice_bytes;
    memcpy(pool.instance, instance, strlen(instance) + 1); /* segment_attach has checked its length */
    for (uint32_t n = 0; n < pool.nodes; n++) {
        pool.objects[n] = calloc(pool.object_count, sizeof(struct segment));
        if (!pool.objects[n]) {
            pool_detach(&pool);
            return error_set(ret_error, ENOMEM, "pool of instance %s: out of memory", instance);
        }
    }
    *ret_pool = pool;
    return 0;
}

static void object_part(uint32_t node, uint32_t object, char ret_part[static 32])
{
    snprintf(ret_part, 32, POOL_PART ".%u.%u", node, object);
}

static uint64_t attached_bytes(const struct pool *pool, uint32_t object)
{
    struct pool_layout layout = {.stride = (uint64_t)pool->slice_bytes * (EXPERT_SLICES / pool->nodes),
                                 .slots_per_object = pool->slots_per_object,
                                 .objects = pool->object_count};
    return object_bytes(pool->slot_count, &layout, object);
}

static uint32_t objects_ready(const struct pool *pool)
{
    uint32_t ready = atomic_load_explicit(&pool->header->objects_ready, memory_order_acquire);
    return ready < pool->object_count ? ready : pool->object_count;
}

int pool_attach_objects(struct pool *pool, struct error *ret_error)
{
    for (uint32_t ready = objects_ready(pool); pool->attached < ready; pool->attached++) {
        for (uint32_t n = 0; n < pool->nodes; n++) {
            struct segment *object = &pool->objects[n][pool->attached];
            if (object->base) /* from an earlier call that failed on a later node */
                continue;
            char part[32];
            object_part(n, pool->attached, part);
            int status = segment_attach(pool->instance, part, SEGMENT_RAW, attached_bytes(pool, pool->attached), true,
                                        object, ret_error);
            if (status < 0)
                return status;
        }
    }
    return 0;
}

void pool_detach(struct pool *pool)
{
    for (uint32_t n = 0; n < POOL_MAX_NODES; n++) {
        for (uint32_t k = 0; pool->objects[n] && k < pool->object_count; k++)
            segment_detach(&pool->objects[n][k]);
        free(pool->objects[n]);
    }
    segment_detach(&pool->table);
    *pool = (struct pool){0};
}

/* A new object on every node, of full size and without memory. */
static int create_object(struct pool *pool, uint32_t object, struct error *ret_error)
{
    for (uint32_t n = 0; n < pool->nodes; n++) {
        char part[32];
        object_part(n, object, part);
        const struct segment_options options = {.kind = SEGMENT_RAW, .node = -1, .sparse = true};
        struct segment made;
        int status = segment_unlink(pool->instance, part);
        if (status >= 0)
            status = segment_create(pool->instance, part, attached_bytes(pool, object), &options, &made, ret_error);
        else
            error_set(ret_error, -status, "shared memory object %s of instance %s cannot be removed: %s", part,
                      pool->instance, strerror(-status));
        if (status < 0) {
            while (n-- > 0) {
                object_part(n, object, part);
                segment_unlink(pool->instance, part);
            }
            return status;
        }
        segment_detach(&made); /* whoever uses the object maps it with pool_attach_objects */
    }
    atomic_store_explicit(&pool->header->objects_ready, object + 1, memory_order_release);
    return 0;
}

/* A stretch of slots of one object, on one node. */
struct stretch {
    const struct pool *pool;
    uint32_t object;
    size_t offset, bytes;
    struct segment_options options;
    int status;
    struct error error;
};

static struct stretch make_stretch(const struct pool *pool, uint32_t node, uint32_t first, uint32_t end)
{
    size_t stride = pool->slice_bytes * (EXPERT_SLICES / pool->nodes);
    return (struct stretch){.pool = pool,
                            .object = first / pool->slots_per_object,
                            .offset = first % pool->slots_per_object * stride,
                            .bytes = (end - first) * stride,
                            .options = {.kind = SEGMENT_RAW, .node = (int)node}};
}

static void *populate_stretch(void *argument)
{
    struct stretch *stretch = argument;
    const struct pool *pool = stretch->pool;
    char part[32];
    object_part((uint32_t)stretch->options.node, stretch->object, part);
    stretch->status = segment_populate(pool->instance, part, attached_bytes(pool, stretch->object), stretch->offset,
                                       stretch->bytes, &stretch->options, &stretch->error);
    return NULL;
}

/* The nodes' memories are filled at the same time, each by threads of its own. */
static int populate_nodes(const struct pool *pool, uint32_t first, uint32_t end, bool hugepages, bool background,
                          struct error *ret_error)
{
    struct stretch stretches[POOL_MAX_NODES];
    pthread_t threads[POOL_MAX_NODES];
    bool started[POOL_MAX_NODES] = {false};
    int status = 0;
    for (uint32_t n = 0; n < pool->nodes; n++) {
        stretches[n] = make_stretch(pool, n, first, end);
        stretches[n].options.hugepages = hugepages;
        stretches[n].options.background = background;
        started[n] = n > 0 && pthread_create(&threads[n], NULL, populate_stretch, &stretches[n]) == 0;
    }
    for (uint32_t n = 0; n < pool->nodes; n++) {
        if (started[n])
            pthread_join(threads[n], NULL);
        else
            populate_stretch(&stretches[n]);
        if (stretches[n].status < 0 && status == 0)
            status = error_set(ret_error, -stretches[n].status, "%s", stretches[n].error.text);
    }
    return status;
}

/* The end of first's object, or `end` if that comes before. */
static uint32_t end_in_object(const struct pool *pool, uint32_t first, uint32_t end)
{
    uint64_t next = ((uint64_t)first / pool->slots_per_object + 1) * pool->slots_per_object;
    end = end < pool->slot_count ? end : pool->slot_count;
    return next < end ? (uint32_t)next : end;
}

int pool_grow(struct pool *pool, uint32_t first, uint32_t end, bool hugepages, bool background, uint32_t *ret_end,
              struct error *ret_error)
{
    uint32_t stop = end_in_object(pool, first, end), object = first / pool->slots_per_object;
    *ret_end = first;
    if (first >= stop)
        return 0;
    int status = object < objects_ready(pool) ? 0 : create_object(pool, object, ret_error);
    if (status == 0)
        status = populate_nodes(pool, first, stop, hugepages, background, ret_error);
    if (status < 0) {
        pool_punch(pool, first, stop, NULL); /* other nodes may have got theirs */
        return status;
    }
    pool_publish(pool, stop);
    *ret_end = stop;
    return 0;
}

void pool_publish(struct pool *pool, uint32_t slots)
{
    atomic_store_explicit(&pool->header->slots_ready, slots, memory_order_release);
}

int pool_punch(struct pool *pool, uint32_t first, uint32_t end, struct error *ret_error)
{
    uint64_t stand = (uint64_t)objects_ready(pool) * pool->slots_per_object;
    end = end < stand ? end : (uint32_t)stand;
    end = end < pool->slot_count ? end : pool->slot_count;
    while (first < end) {
        uint32_t stop = end_in_object(pool, first, end);
        for (uint32_t n = 0; n < pool->nodes; n++) {
            struct stretch stretch = make_stretch(pool, n, first, stop);
            char part[32];
            object_part(n, stretch.object, part);
            int status = segment_punch(pool->instance, part, stretch.offset, stretch.bytes, ret_error);
            if (status < 0)
                return status;
        }
        first = stop;
    }
    return 0;
}

uint32_t pool_slots_ready(const struct pool *pool)
{
    uint64_t stand = (uint64_t)objects_ready(pool) * pool->slots_per_object;
    uint32_t ready = atomic_load_explicit(&pool->header->slots_ready, memory_order_acquire);
    ready = ready < pool->slot_count ? ready : pool->slot_count;
    return ready < stand ? ready : (uint32_t)stand;
}

void *pool_slice(const struct pool *pool, uint32_t slot, uint32_t slice)
{
    if (slot >= pool->slot_count || slice >= EXPERT_SLICES || slot / pool->slots_per_object >= pool->attached)
        return NULL;
    uint32_t a_node = EXPERT_SLICES / pool->nodes; /* slices a node */
    size_t within = (size_t)(slot % pool->slots_per_object) * a_node + slice % a_node;
    return (char *)pool->objects[slice / a_node][slot / pool->slots_per_object].base + within * pool->slice_bytes;
}

int pool_lookup(const struct pool *pool, uint32_t expert, struct slot_ref *ret_ref)
{
    if (expert >= pool->expert_count)
        return -ENOENT;
    uint64_t entry = atomic_load_explicit(&pool->map[expert], memory_order_acquire);
    struct slot_ref ref = {(uint32_t)entry, (uint32_t)(entry >> 32)};
    if (entry == POOL_NOWHERE || ref.index >= pool->slot_count)
        return -ENOENT;
    *ret_ref = ref;
    return 0;
}

int pool_pin(struct pool *pool, uint32_t expert, uint32_t holder, uint64_t tick, struct slot_ref *ret_ref)
{
    struct slot_ref ref;
    int status = pool_lookup(pool, expert, &ref);
    if (status < 0)
        return status;
    struct slot *slot = &pool->slots[ref.index];
    uint64_t word = atomic_load_explicit(&slot->state, memory_order_acquire);
    if (slot_generation_of(word) != ref.generation)
        return -ESTALE;
    switch (slot_state_of(word)) {
    case SLOT_LOADING: return -EAGAIN;
    case SLOT_FAILED:
        *ret_ref = ref;
        return atomic_load_explicit(&slot->expert, memory_order_relaxed) == expert ? -EIO : -ESTALE;
    case SLOT_READY: break;
    case SLOT_EMPTY:
    case SLOT_QUARANTINED:
    default: return -ESTALE;
    }
    if (slot_pin(&slot->state, ref.generation, holder) < 0)
        return -ESTALE;
    /* Pinned, the slot cannot change hands; a map entry that was wrong is found here. */
    if (atomic_load_explicit(&slot->expert, memory_order_relaxed) != expert) {
        slot_unpin(&slot->state, holder);
        return -ESTALE;
    }
    /* Never backwards: where several workers pin, an older tick must not make an expert look unused by the newer. */
    uint64_t used = atomic_load_explicit(&slot->used, memory_order_relaxed);
    while (used < tick &&
           !atomic_compare_exchange_weak_explicit(&slot->used, &used, tick, memory_order_relaxed, memory_order_relaxed))
        ;
    *ret_ref = ref;
    return 0;
}

void pool_unpin(struct pool *pool, struct slot_ref ref, uint32_t holder)
{
    if (ref.index < pool->slot_count)
        slot_unpin(&pool->slots[ref.index].state, holder);
}

void pool_release_holder(struct pool *pool, uint32_t holder)
{
    for (uint32_t i = 0; i < pool->slot_count; i++)
        slot_unpin(&pool->slots[i].state, holder);
}
