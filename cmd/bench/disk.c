#include "cmd/bench/disk.h"

#include "cmd/bench/drive.h"
#include "io_daemon/reader.h"
#include "proto/cleanup.h"
#include "shm/control.h"

#include <stdlib.h>
#include <string.h>

#define DRIVE_SECONDS 0.5
#define DRIVE_RUNS 4u   /* the best counts, as in iobench */
#define MISSES_MOST 64u /* more in one visit count as so many: a prefill, which waits for bytes alone */

struct bench_disk {
    const struct control *control;
    struct drive_bench *drive;
    uint64_t place, busy_ns;
    double rate;      /* bytes a second, of the last measurement; 0: none */
    uint64_t *visits; /* [used][missed], both up to MISSES_MOST: how many visits of a layer were so */
    struct disk_run run;
};

int bench_disk_open(const char *instance, const char *container, const struct settings *settings, int interrupt_fd,
                    struct bench_disk **ret_disk, struct error *ret_error)
{
    struct bench_disk *disk = calloc(1, sizeof *disk);
    if (disk)
        disk->visits = calloc((MISSES_MOST + 1) * (MISSES_MOST + 1), sizeof *disk->visits);
    if (!disk || !disk->visits) {
        bench_disk_close(disk);
        return error_set(ret_error, ENOMEM, "no memory to watch the drive");
    }
    struct facts facts;
    struct drive_bench_options options = {.path = container,
                                          .io = (uint32_t)settings_number(settings, SETTING_IO),
                                          .interrupt_fd = interrupt_fd,
                                          .hugepages = settings_number(settings, SETTING_HUGEPAGES) != 0};
    int status = control_watch(instance, &disk->control, &facts, ret_error);
    if (status == 0)
        status = drive_bench_open(&options, &disk->drive, ret_error);
    if (status < 0)
        bench_disk_close(disk);
    else
        *ret_disk = disk;
    return status;
}

void bench_disk_close(struct bench_disk *disk)
{
    if (!disk)
        return;
    if (disk->drive)
        drive_bench_close(disk->drive);
    if (disk->control)
        control_detach(disk->control);
    free(disk->visits);
    free(disk);
}

static int measure_drive(struct bench_disk *disk, double *ret_rate, struct error *ret_error)
{
    const struct drive_setting setting = {.block = PIECE_BYTES, .depth = READER_IN_FLIGHT, .memory = DRIVE_MEMORY_POOL};
    struct latencies latencies = {0};
    int status = 0;
    *ret_rate = 0;
    for (unsigned r = 0; status == 0 && r < DRIVE_RUNS; r++) {
        double rate = 0;
        status = drive_bench_measure(disk->drive, &setting, DRIVE_SECONDS, &latencies, &rate, ret_error);
        *ret_rate = rate > *ret_rate ? rate : *ret_rate;
    }
    return status;
}

int bench_disk_before(struct bench_disk *disk, struct error *ret_error)
{
    int status = 0;
    if (disk->run.missed > 0 && disk->rate <= 0)
        status = measure_drive(disk, &disk->rate, ret_error);
    disk->place = uses_end(&disk->control->uses);
    disk->busy_ns = atomic_load_explicit(&disk->control->iod.busy_ns, memory_order_relaxed);
    return status;
}

static void count_visit(struct bench_disk *disk, uint32_t used, uint32_t missed)
{
    if (used == 0)
        return;
    disk->run.visits += 1;
    disk->run.use += used;
    disk->run.missed += missed;
    used = used < MISSES_MOST ? used : MISSES_MOST;
    missed = missed < used ? missed : used;
    disk->visits[used * (MISSES_MOST + 1) + missed]++;
}

/* The visits of the run, from the use log: an entry a row and expert, ascending by expert in a visit. */
static void count_visits(struct bench_disk *disk)
{
    struct use uses[256];
    uint32_t count, used = 0, missed = 0, last = UINT32_MAX;
    uint64_t lost;
    memset(disk->visits, 0, (MISSES_MOST + 1) * (MISSES_MOST + 1) * sizeof *disk->visits);
    while ((count = uses_read(&disk->control->uses, &disk->place, uses, 256, &lost)) > 0) {
        for (uint32_t i = 0; i < count; i++) {
            if (uses[i].flags & USE_LAYER) {
                count_visit(disk, used, missed);
                used = missed = 0;
                last = UINT32_MAX;
            }
            if (uses[i].expert == last)
                continue;
            last = uses[i].expert;
            used++;
            missed += !(uses[i].flags & USE_HIT);
        }
    }
    count_visit(disk, used, missed);
}

int bench_disk_after(struct bench_disk *disk, struct disk_run *ret_run, struct error *ret_error)
{
    uint64_t busy_ns = atomic_load_explicit(&disk->control->iod.busy_ns, memory_order_relaxed) - disk->busy_ns;
    double before = disk->rate;
    int status = 0;
    disk->run = (struct disk_run){.busy_s = (double)busy_ns * 1e-9};
    count_visits(disk);
    if (disk->run.missed > 0) {
        status = measure_drive(disk, &disk->rate, ret_error);
        disk->run.bytes_per_s = disk->rate > before ? disk->rate : before;
    }
    *ret_run = disk->run;
    return status;
}

double bench_disk_expected(const struct bench_disk *disk, double experts_s, double rest_s)
{
    double one = disk->run.use > 0 ? experts_s / disk->run.use : 0, total = rest_s;
    double blob = (double)drive_bench_facts(disk->drive)->blob_bytes;
    for (uint32_t used = 1; used <= MISSES_MOST; used++) {
        for (uint32_t missed = 0; missed <= used; missed++) {
            double visits = (double)disk->visits[used * (MISSES_MOST + 1) + missed], resident = (used - missed) * one;
            double reading = disk->run.bytes_per_s > 0 ? missed * blob / disk->run.bytes_per_s : 0;
            total += visits * ((reading > resident ? reading : resident) + (missed > 0 ? one : 0));
        }
    }
    return total;
}
