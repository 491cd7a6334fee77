/* How fast the pool gets its memory, against one populating thread a core that does nothing else: each of those
 * fills an object of its own on a core of its own, so nothing is shared but the machine. The pool is filled as iod
 * does it, before and behind the first object.
 *
 *   bench-populate [MIB]      (of memory, default 2048; as root, for a /dev/shm of its own: 4 KiB pages,
 *                             huge pages by collapse, and by the mount)
 *
 * A line for each size of page: medians of 9 interleaved rounds in GB/s, and the pool's share of the limit. */
#include "proto/cleanup.h"
#include "shm/pool.h"

#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <time.h>

#define ROUNDS 9
#define MAX_THREADS 256
#define SLICE (612u * 4096u) /* GLM-5.2's */
#define INSTANCE "bench-populate"

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

struct filler {
    uint32_t index;
    int core;
    size_t bytes;
    bool hugepages;
    int status;
    struct error error;
};

static void *fill_alone(void *argument)
{
    struct filler *filler = argument;
    struct segment segment;
    cpu_set_t core;
    char part[32];
    CPU_ZERO(&core);
    CPU_SET((unsigned)filler->core, &core);
    sched_setaffinity(0, sizeof core, &core);
    const struct segment_options options = {
        .kind = SEGMENT_RAW, .node = -1, .hugepages = filler->hugepages, .populate_threads = 1};
    snprintf(part, sizeof part, "alone.%u", filler->index);
    filler->status = segment_create(INSTANCE, part, filler->bytes, &options, &segment, &filler->error);
    if (filler->status == 0)
        segment_detach(&segment);
    return NULL;
}

/* GB/s of a thread a core, or negative errno. */
static double measure_alone(size_t bytes, bool hugepages, struct error *ret_error)
{
    static struct filler fillers[MAX_THREADS];
    pthread_t threads[MAX_THREADS];
    cpu_set_t mask;
    uint32_t count = 0;
    sched_getaffinity(0, sizeof mask, &mask);
    for (int c = 0; c < CPU_SETSIZE && count < MAX_THREADS; c++)
        if (CPU_ISSET((unsigned)c, &mask))
            fillers[count++] = (struct filler){.core = c, .hugepages = hugepages};
    double start = now();
    for (uint32_t i = 0; i < count; i++) {
        fillers[i].index = i;
        fillers[i].bytes = bytes / count / (2u << 20) * (2u << 20);
        if (pthread_create(&threads[i], NULL, fill_alone, &fillers[i]))
            return error_set(ret_error, EAGAIN, "a thread cannot be started");
    }
    double total = 0;
    int status = 0;
    for (uint32_t i = 0; i < count; i++) {
        pthread_join(threads[i], NULL);
        total += (double)fillers[i].bytes;
        if (fillers[i].status < 0)
            status = error_set(ret_error, -fillers[i].status, "%s", fillers[i].error.text);
    }
    double seconds = now() - start;
    segment_unlink_all(INSTANCE);
    return status < 0 ? status : total / seconds / 1e9;
}

static double measure_pool(size_t bytes, bool hugepages, bool background, struct error *ret_error)
{
    const struct pool_shape shape = {.slots = (uint32_t)(bytes / SLICE / EXPERT_SLICES),
                                     .nodes = 1,
                                     .moe_layers = 75,
                                     .experts = 256,
                                     .slice_bytes = SLICE};
    struct pool pool;
    int status = pool_create(INSTANCE, &shape, ret_error);
    if (status == 0)
        status = pool_attach(INSTANCE, &pool, ret_error);
    if (status < 0)
        return status;
    uint32_t end = 0;
    double start = now();
    while (status == 0 && end < shape.slots)
        status = pool_grow(&pool, end, shape.slots, hugepages, background, &end, ret_error);
    double seconds = now() - start;
    pool_detach(&pool);
    segment_unlink_all(INSTANCE);
    return status < 0 ? status : (double)shape.slots * SLICE * EXPERT_SLICES / seconds / 1e9;
}

static int compare(const void *a, const void *b)
{
    const double *x = a, *y = b;
    return (*x > *y) - (*x < *y);
}

static double median(double *values)
{
    qsort(values, ROUNDS, sizeof *values, compare);
    return values[ROUNDS / 2];
}

static int measure(const char *pages, size_t bytes, bool hugepages, struct error *ret_error)
{
    double alone[ROUNDS], first[ROUNDS], behind[ROUNDS];
    for (int r = 0; r < ROUNDS; r++) {
        alone[r] = measure_alone(bytes, hugepages, ret_error);
        first[r] = alone[r] < 0 ? alone[r] : measure_pool(bytes, hugepages, false, ret_error);
        behind[r] = first[r] < 0 ? first[r] : measure_pool(bytes, hugepages, true, ret_error);
        if (behind[r] < 0)
            return (int)behind[r];
    }
    double limit = median(alone), now_ = median(first), later = median(behind);
    printf("%-12s a thread a core %.2f GB/s; the pool %.2f (%.0f %%), behind the first object %.2f (%.0f %%)\n", pages,
           limit, now_, 100 * now_ / limit, later, 100 * later / limit);
    return 0;
}

int main(int argc, char **argv)
{
    size_t bytes = (size_t)(argc > 1 ? strtoul(argv[1], NULL, 10) : 2048) << 20;
    struct error error = {""};
    bool own = unshare(CLONE_NEWNS) == 0 && mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) == 0;
    int status = 0;
    if (!own)
        status = measure("/dev/shm:", bytes, true, &error);
    else if (mount("tmpfs", "/dev/shm", "tmpfs", 0, "size=90%,huge=never") ||
             (status = measure("4 KiB pages:", bytes, false, &error)) < 0 ||
             (status = measure("collapsed:", bytes, true, &error)) < 0 || umount("/dev/shm") ||
             mount("tmpfs", "/dev/shm", "tmpfs", 0, "size=90%,huge=always") ||
             (status = measure("huge pages:", bytes, true, &error)) < 0)
        status = status < 0 ? status : error_set(&error, errno, "a /dev/shm of its own: %s", strerror(errno));
    if (status < 0)
        fprintf(stderr, "bench-populate: %s\n", error.text);
    return status < 0 ? EXIT_FAILURE : EXIT_SUCCESS;
}
