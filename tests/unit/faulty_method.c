#include "tests/unit/faulty_method.h"

#include "proto/weights.h"
#include "shm/control.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

struct fault_plan fault_plan;

void plan_faults(const struct io_method *inner, uint32_t faults)
{
    fault_plan.inner = inner;
    fault_plan.faults = faults;
    fault_plan.broken_offset = fault_plan.flipped_offset = 0;
    fault_plan.broken_device = fault_plan.slow_device = 0;
    fault_plan.dropped_state = NULL;
    fault_plan.dropped_device = 0;
    atomic_store(&fault_plan.dropped_reads, 0);
    atomic_store(&fault_plan.flips, 0);
    atomic_store(&fault_plan.hold_all, 0);
    atomic_store(&fault_plan.submitted, 0);
    atomic_store(&fault_plan.spoiled, 0);
}

#define HELD_MAX 256u

struct faulty {
    const struct io_method *inner;
    void *state;
    uint64_t random;
    struct io_read *held[HELD_MAX];
    uint64_t due_ns[HELD_MAX]; /* of each: not handed back before */
    uint64_t slow_ns;          /* when the slow device has given what was asked of it so far */
    uint32_t held_count;
    bool refused;
};

static uint32_t dice(struct faulty *faulty, uint32_t sides)
{
    faulty->random = faulty->random * UINT64_C(6364136223846793005) + 1442695040888963407u;
    return (uint32_t)(faulty->random >> 33) % sides;
}

static int faulty_open(const struct io_setup *setup, void **ret_state, struct error *ret_error)
{
    struct faulty *faulty = calloc(1, sizeof(*faulty));
    struct io_setup inner = *setup;
    faulty->inner = fault_plan.inner;
    faulty->random = 42;
    if (fault_plan.faults & FAULT_SMALL_RING)
        inner.depth = 1;
    *ret_state = faulty;
    return faulty->inner->open(&inner, &faulty->state, ret_error);
}

static bool stands_on(const struct io_read *read, uint64_t device)
{
    struct stat found;
    return device && fstat(read->fd, &found) == 0 && found.st_dev == device;
}

static int faulty_submit(void *state, struct io_read *read)
{
    struct faulty *faulty = state;
    if (fault_plan.dropped_state && atomic_load(fault_plan.dropped_state) == COPY_DROPPED &&
        stands_on(read, fault_plan.dropped_device))
        atomic_fetch_add(&fault_plan.dropped_reads, 1);
    if ((fault_plan.faults & FAULT_REFUSE) && dice(faulty, 4) == 0) {
        faulty->refused = true;
        return -EAGAIN;
    }
    int status = faulty->inner->submit(faulty->state, read);
    if (status == 0) {
        atomic_store(&fault_plan.last_offset, read->offset);
        atomic_fetch_add(&fault_plan.submitted, 1);
    }
    return status;
}

/* True when the read covers that byte of a file of more than 8 MiB. */
static bool covers(const struct io_read *read, uint64_t offset)
{
    return offset && read->offset <= offset && offset < read->offset + read->bytes &&
           lseek(read->fd, 0, SEEK_END) > 8 << 20;
}

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void hurt(struct faulty *faulty, struct io_read *read)
{
    if (atomic_load(&fault_plan.flips) && covers(read, fault_plan.flipped_offset)) {
        ((char *)read->buffer)[fault_plan.flipped_offset - read->offset] ^= 1;
        atomic_fetch_sub(&fault_plan.flips, 1);
    }
    if (stands_on(read, fault_plan.broken_device)) {
        read->result = fault_plan.broken_result;
    } else if (covers(read, fault_plan.broken_offset)) {
        read->result = -EIO;
    } else if ((fault_plan.faults & FAULT_SHORT) && dice(faulty, 2)) {
        read->result = 1 + dice(faulty, (uint32_t)read->bytes);
    } else if ((fault_plan.faults & FAULT_EIO) && (read->offset / DISK_ALIGN) % 3 == 0 && dice(faulty, 8) == 0) {
        read->result = -EIO;
    } else if ((fault_plan.faults & FAULT_AGAIN) && dice(faulty, 3) == 0) {
        read->result = dice(faulty, 2) ? -EINTR : -EAGAIN;
    }
    size_t good = read->result > 0 ? (size_t)read->result : 0;
    if (good < read->bytes) {
        atomic_fetch_add(&fault_plan.spoiled, 1);
        memset((char *)read->buffer + good, 0xEE, read->bytes - good);
    }
}

static int faulty_wait(void *state, int timeout_ms, struct io_read **ret_finished, uint32_t *ret_events,
                       struct error *ret_error)
{
    struct faulty *faulty = state;
    struct io_read *list = NULL, *read = NULL;
    int short_wait = faulty->held_count || faulty->refused ? 1 : timeout_ms;
    if (fault_plan.faults & FAULT_SMALL_RING)
        usleep(2000);
    faulty->refused = false;
    int status = faulty->inner->wait(faulty->state, short_wait, &read, ret_events, ret_error);
    uint64_t now = now_ns();
    while (read) {
        struct io_read *next = read->next;
        hurt(faulty, read);
        assert_true(faulty->held_count < HELD_MAX);
        faulty->due_ns[faulty->held_count] = now;
        if (stands_on(read, fault_plan.slow_device)) {
            faulty->slow_ns = (faulty->slow_ns > now ? faulty->slow_ns : now) + fault_plan.slow_us * UINT64_C(1000);
            faulty->due_ns[faulty->held_count] = faulty->slow_ns;
        }
        faulty->held[faulty->held_count++] = read;
        read = next;
    }
    for (uint32_t i = faulty->held_count; i-- > 0 && !atomic_load(&fault_plan.hold_all);) {
        uint32_t pick = (fault_plan.faults & FAULT_HOLD) ? dice(faulty, faulty->held_count) : i;
        if (((fault_plan.faults & FAULT_HOLD) && dice(faulty, 2)) || faulty->due_ns[pick] > now)
            continue;
        faulty->held[pick]->next = list;
        list = faulty->held[pick];
        faulty->held[pick] = faulty->held[--faulty->held_count];
        faulty->due_ns[pick] = faulty->due_ns[faulty->held_count];
    }
    *ret_finished = list;
    return status;
}

static void faulty_close(void *state)
{
    struct faulty *faulty = state;
    assert_int_equal(faulty->held_count, 0);
    faulty->inner->close(faulty->state);
    free(faulty);
}

static int faulty_register_files(void *state, const int *fds, uint32_t count)
{
    struct faulty *faulty = state;
    if (fault_plan.faults & FAULT_REGISTER)
        return -EMFILE;
    return faulty->inner->register_files ? faulty->inner->register_files(faulty->state, fds, count) : 0;
}

static int faulty_register_buffer(void *state, uint32_t place, void *base, size_t bytes)
{
    struct faulty *faulty = state;
    if ((fault_plan.faults & FAULT_REGISTER) || !faulty->inner->register_buffer)
        return -ENOMEM;
    return faulty->inner->register_buffer(faulty->state, place, base, bytes);
}

const struct io_method faulty_method = {.name = "faulty",
                                        .choice = IO_AUTO,
                                        .open = faulty_open,
                                        .submit = faulty_submit,
                                        .wait = faulty_wait,
                                        .close = faulty_close,
                                        .register_files = faulty_register_files,
                                        .register_buffer = faulty_register_buffer};
