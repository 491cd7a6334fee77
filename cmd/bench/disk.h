/* What a run of `bench decode` or `bench prefill` waited for the drive, beside what the drive gives. Thread: one for all functions. */
#pragma once

#include "proto/error.h"
#include "proto/settings.h"

struct bench_disk;

/* Of one run, all its steps. */
struct disk_run {
    double busy_s; /* at least one demand was outstanding */
    double visits, use,
        missed;         /* MoE layers that rows went through; experts they used, and of those the missing ones */
    double bytes_per_s; /* what the drive gives: the better of before and after the run; 0: not asked */
};

/* Watches a running instance of the container. `settings`: io and hugepages. `interrupt_fd`
 * (cmd/cli/interrupt.h): a signal ends the measuring of the drive with -EINTR. */
int bench_disk_open(const char *instance, const char *container, const struct settings *settings, int interrupt_fd,
                    struct bench_disk **ret_disk, struct error *ret_error);
void bench_disk_close(struct bench_disk *disk);

/* Before and after a run. An idle instance is expected: where experts were missing, the drive is measured with the daemon's own reads, for a
 * second each time. */
int bench_disk_before(struct bench_disk *disk, struct error *ret_error);
int bench_disk_after(struct bench_disk *disk, struct disk_run *ret_run, struct error *ret_error);

/* Seconds that the run's steps take when nothing is lost: each visit of a layer the longer of its missing bytes at the drive's rate and its
 * resident experts' products, then the products of the last arrival; and everything else as measured. `experts_s` is the time of all experts'
 * products, `rest_s` that of all other parts but waiting. */
double bench_disk_expected(const struct bench_disk *disk, double experts_s, double rest_s); /* of the last run */
