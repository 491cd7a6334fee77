#include "io_daemon/size.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

__attribute__((format(printf, 2, 3))) static void log_line(const struct size *size, const char *format, ...)
{
    char line[1200];
    va_list args;
    va_start(args, format);
    vsnprintf(line, sizeof(line), format, args);
    va_end(args);
    size->log(line);
}

uint32_t size_wanted(const struct size *size)
{
    uint32_t target = atomic_load(&size->control->pool_target);
    target = target < size->pool->slot_count ? target : size->pool->slot_count;
    return target > size->least ? target : size->least;
}

static void ring_doorbell(const struct size *size)
{
    uint64_t one = 1;
    (void)!write(size->doorbell_fd, &one, sizeof(one)); /* fails only when it rings already */
}

static int grow_once(struct size *size, bool background, struct error *ret_error)
{
    uint32_t end;
    size->goal = size_wanted(size);
    int status =
        pool_grow(size->pool, atomic_load(&size->ready), size->goal, size->hugepages, background, &end, ret_error);
    if (status == 0)
        atomic_store(&size->ready, end);
    return status;
}

static void *work(void *argument)
{
    struct size *size = argument;
    size->status = 0;
    if (size->punch)
        size->status = pool_punch(size->pool, size->first, size->end, &size->error);
    while (!size->punch && size->status == 0 && !atomic_load(&size->stop) &&
           atomic_load(&size->ready) < size_wanted(size)) {
        size->status = grow_once(size, true, &size->error);
        ring_doorbell(size);
    }
    atomic_store(&size->done, true);
    ring_doorbell(size);
    return NULL;
}

static void start_work(struct size *size, bool punch)
{
    size->punch = punch;
    atomic_store(&size->stop, false);
    atomic_store(&size->done, false);
    int code = pthread_create(&size->thread, NULL, work, size);
    size->working = code == 0;
    if (code) { /* later, when somebody wants another size */
        log_line(size, "the pool stays at %u slots: a thread cannot be started: %s", atomic_load(&size->ready),
                 strerror(code));
        size->refused = size_wanted(size);
    }
}

static void end_work(struct size *size)
{
    pthread_join(size->thread, NULL);
    size->working = false;
    if (size->status == 0)
        return;
    if (size->punch) {
        log_line(size, "%s", size->error.text);
        return;
    }
    size->refused = size->goal;
    atomic_store(&size->control->iod.pool_refused, size->refused);
    log_line(size, "the pool stays at %u of %u slots: %s", atomic_load(&size->ready), size->goal, size->error.text);
}

static void attach(struct size *size)
{
    struct error error;
    if (pool_attach_objects(size->pool, &error) < 0 && !size->attach_reported) {
        log_line(size, "%s", error.text);
        size->attach_reported = true;
    }
}

/* Slots below the limit may be taken; those above empty themselves. */
static void set_limit(struct size *size, uint32_t limit)
{
    uint64_t mapped = (uint64_t)size->pool->attached * size->pool->slots_per_object;
    placement_grow(size->placement, limit < mapped ? limit : (uint32_t)mapped);
    if (limit == size->limit && size->occupied == 0)
        return;
    if (limit < size->limit)
        buffers_release(size->buffers, limit); /* before a hole is punched there */
    size->limit = limit;
    size->occupied = placement_limit(size->placement, limit);
}

int size_open(struct size *size, struct error *ret_error)
{
    uint32_t ready = pool_slots_ready(size->pool);
    atomic_store(&size->ready, ready);
    atomic_store(&size->control->iod.pool_refused, 0);
    /* A predecessor that died between lowering `slots_ready` and the last punch, or while it populated. */
    int status = pool_punch(size->pool, ready, size->pool->slot_count, ret_error);
    while (status == 0 && atomic_load(&size->ready) < size->least)
        status = grow_once(size, false, ret_error);
    if (status == 0)
        status = pool_attach_objects(size->pool, ret_error);
    if (status == 0)
        set_limit(size, atomic_load(&size->ready));
    return status;
}

bool size_keep(struct size *size)
{
    if (size->working && atomic_load(&size->done))
        end_work(size);
    uint32_t target = size_wanted(size), ready = atomic_load(&size->ready);
    if (size->refused && size->refused != target) {
        size->refused = 0;
        atomic_store(&size->control->iod.pool_refused, 0);
    }
    attach(size);
    set_limit(size, target < ready ? target : ready);
    if (size->working) {
        if (target < size->goal)
            atomic_store(&size->stop, true);
    } else if (target < ready && size->occupied == 0) {
        atomic_store(&size->ready, target);
        pool_publish(size->pool, target);
        size->first = target;
        size->end = ready;
        start_work(size, true);
    } else if (target > ready && size->refused == 0) {
        start_work(size, false);
    }
    return size->occupied > 0;
}

void size_close(struct size *size)
{
    atomic_store(&size->stop, true);
    if (size->working)
        pthread_join(size->thread, NULL);
    size->working = false;
}

bool size_is_growing(const struct size *size)
{
    return size->refused == 0 && atomic_load(&size->ready) < size_wanted(size);
}
