/* What the benchmarks share: pinned threads, repeated runs, and figures with their spread. The figure that counts is
 * the best run's, as in STREAM (McCalpin): what else runs on the machine only ever slows. */
#pragma once

#include "proto/error.h"

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The parts of `calypte bench`, called as commands are (cmd/cli/commands.h). */
int bench_memory(int argc, char **argv);
int bench_kernels(int argc, char **argv);
int bench_decode(int argc, char **argv);
int bench_prefill(int argc, char **argv);

#define BENCH_RUNS_MAX 64u

struct bench_spread {
    double median, least, most;
    unsigned runs;
};

/* Sorts `values` [runs], 1 to BENCH_RUNS_MAX of them. */
struct bench_spread bench_spread(double *values, unsigned runs);
/* {"median", "min", "max", "runs"} */
json_t *bench_spread_json(const struct bench_spread *spread);

/* The processor's name as the kernel knows it. */
void bench_cpu_name(char *ret_name, size_t size);
unsigned bench_usable_cpus(void);

/* Threads that stay, thread t on the t-th CPU that this process may use. */
struct bench_team;

/* What a thread does of the items first .. first + count - 1; all threads get the same items. */
typedef void bench_work(void *context, unsigned thread, unsigned threads, uint64_t first, uint64_t count);

/* `cpu_time`: runs are timed by the CPU time of the thread that used most of it, for machines on which others work
 * too; else by the clock, from the first thread's start to the last one's end. `interrupt_fd` (cmd/cli/interrupt.h; -1:
 * signals have their default effect): once a signal has come, a run ends after its stretch and later ones do nothing;
 * their figures are none, which bench_team_check tells. */
int bench_team_open(unsigned threads, bool cpu_time, int interrupt_fd, struct bench_team **ret_team,
                    struct error *ret_error);
void bench_team_close(struct bench_team *team);
unsigned bench_team_threads(const struct bench_team *team);
/* 0, or -EINTR once a signal has come. */
int bench_team_check(const struct bench_team *team, struct error *ret_error);

/* Lets all threads work at once, each in stretches of `stretch` items (at least 1), between which it looks for a signal.
 * Returns the seconds that it took. */
double bench_team_run(struct bench_team *team, bench_work *work, void *context, uint64_t first, uint64_t count,
                      uint64_t stretch);

/* Something to measure: `amount` (bytes, products) an item; `next` goes on from run to run, so that what was used
 * last is used last. */
struct bench_load {
    bench_work *work;
    void *context;
    double amount;
    uint64_t next, count; /* count: items a run, 0 until bench_calibrate */
    uint64_t stretch;     /* items between two looks for a signal: about 0.25 s, mostly the whole run */
};

/* Finds how many items take about `seconds`. They run at least once. */
void bench_calibrate(struct bench_team *team, struct bench_load *load, double seconds);
/* One run: amount a second. */
double bench_rate(struct bench_team *team, struct bench_load *load);

/* Measures `load` and its `limit`, a run of the one after a run of the other, so that a machine that changes changes
 * both. */
void bench_compare(struct bench_team *team, struct bench_load *load, struct bench_load *limit, unsigned runs,
                   double seconds, struct bench_spread *ret_figure, struct bench_spread *ret_limit);
