#include "cmd/bench/bench.h"

#include "cmd/cli/interrupt.h"
#include "compute/team.h"
#include "proto/cleanup.h"

#include <pthread.h>
#include <sched.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define COUNT_MOST (UINT64_C(1) << 32) /* items a run: one that takes no time ends here */
#define STRETCH_SECONDS 0.25           /* between two looks for a signal */

struct bench_team {
    unsigned threads, started;
    pthread_t *ids;
    pthread_barrier_t begin, end; /* of all members and the caller */
    pthread_mutex_t gate;         /* held until all members are there, or one could not be started */
    bool over, cpu_time;
    int interrupt_fd; /* -1: none */
    bench_work *work;
    void *context;
    uint64_t first, count, stretch;
    uint64_t *began, *ended, *cpu; /* [threads] ns: of the clock, and CPU time between them */
    int *cpus;                     /* [threads] */
};

struct member {
    struct bench_team *team;
    unsigned index;
};

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

struct bench_spread bench_spread(double *values, unsigned runs)
{
    qsort(values, runs, sizeof *values, compare);
    double median = runs % 2 ? values[runs / 2] : (values[runs / 2 - 1] + values[runs / 2]) / 2;
    return (struct bench_spread){.median = median, .least = values[0], .most = values[runs - 1], .runs = runs};
}

json_t *bench_spread_json(const struct bench_spread *spread)
{
    return json_pack("{s:f, s:f, s:f, s:i}", "median", spread->median, "min", spread->least, "max", spread->most,
                     "runs", (int)spread->runs);
}

void bench_cpu_name(char *ret_name, size_t size)
{
    _cleanup_fclose_ FILE *file = fopen("/proc/cpuinfo", "re");
    char line[256];
    snprintf(ret_name, size, "unknown");
    while (file && fgets(line, sizeof line, file)) {
        const char *colon = strchr(line, ':');
        if (strncmp(line, "model name", 10) != 0 || !colon)
            continue;
        colon += 1 + strspn(colon + 1, " ");
        snprintf(ret_name, size, "%.*s", (int)strcspn(colon, "\n"), colon);
        return;
    }
}

unsigned bench_usable_cpus(void)
{
    cpu_set_t set;
    int count = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
    return count > 0 ? (unsigned)count : 1;
}

static uint64_t cpu_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* Nobody reads the descriptor, so that every thread sees the signal, and at every later look. */
static bool interrupted(const struct bench_team *team)
{
    return team->interrupt_fd >= 0 && interrupt_wait(team->interrupt_fd, -1, 0) == WAIT_INTERRUPTED;
}

static void work_stretches(const struct bench_team *team, unsigned thread)
{
    uint64_t first = team->first, left = team->count;
    while (left > 0 && !interrupted(team)) {
        uint64_t count = left < team->stretch ? left : team->stretch;
        team->work(team->context, thread, team->threads, first, count);
        first += count;
        left -= count;
    }
}

static void *run_member(void *argument)
{
    struct member member = *(struct member *)argument;
    struct bench_team *team = member.team;
    free(argument);
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(team->cpus[member.index], &set);
    (void)sched_setaffinity(0, sizeof set, &set); /* an unpinned thread measures less well, not something else */
    pthread_mutex_lock(&team->gate);
    bool over = team->over;
    pthread_mutex_unlock(&team->gate);
    while (!over) {
        pthread_barrier_wait(&team->begin);
        if (team->over)
            return NULL;
        uint64_t cpu = cpu_ns();
        team->began[member.index] = clock_ns();
        work_stretches(team, member.index);
        team->ended[member.index] = clock_ns();
        team->cpu[member.index] = cpu_ns() - cpu;
        pthread_barrier_wait(&team->end);
    }
    return NULL;
}

/* The CPUs in the order of their numbers; more threads than CPUs share them. */
static void choose_cpus(struct bench_team *team)
{
    cpu_set_t set;
    CPU_ZERO(&set);
    if (sched_getaffinity(0, sizeof set, &set) < 0 || CPU_COUNT(&set) == 0)
        CPU_SET(0, &set);
    int cpu = -1;
    for (unsigned t = 0; t < team->threads; t++) {
        do
            cpu = (cpu + 1) % CPU_SETSIZE;
        while (!CPU_ISSET(cpu, &set));
        team->cpus[t] = cpu;
    }
}

static int start_member(struct bench_team *team)
{
    struct member *member = malloc(sizeof *member);
    if (!member)
        return ENOMEM;
    *member = (struct member){.team = team, .index = team->started};
    int code = pthread_create(&team->ids[team->started], NULL, run_member, member);
    if (code)
        free(member);
    return code;
}

/* A team is whole or none: the barriers count all. */
static int start_members(struct bench_team *team, struct error *ret_error)
{
    int code = 0;
    pthread_mutex_lock(&team->gate);
    for (; team->started < team->threads && code == 0; team->started += code == 0)
        code = start_member(team);
    team->over = code != 0;
    pthread_mutex_unlock(&team->gate);
    return code ? error_set(ret_error, code, "cannot start thread %u of %u: %s", team->started + 1, team->threads,
                            strerror(code))
                : 0;
}

int bench_team_open(unsigned threads, bool cpu_time, int interrupt_fd, struct bench_team **ret_team,
                    struct error *ret_error)
{
    struct bench_team *team = calloc(1, sizeof *team);
    if (!team)
        return error_set(ret_error, ENOMEM, "no memory for %u threads", threads);
    team->threads = threads;
    team->cpu_time = cpu_time;
    team->interrupt_fd = interrupt_fd;
    team->ids = calloc(threads, sizeof *team->ids);
    team->began = calloc(threads, sizeof *team->began);
    team->ended = calloc(threads, sizeof *team->ended);
    team->cpu = calloc(threads, sizeof *team->cpu);
    team->cpus = calloc(threads, sizeof *team->cpus);
    pthread_barrier_init(&team->begin, NULL, threads + 1);
    pthread_barrier_init(&team->end, NULL, threads + 1);
    pthread_mutex_init(&team->gate, NULL);
    int status = 0;
    if (!team->ids || !team->began || !team->ended || !team->cpu || !team->cpus)
        status = error_set(ret_error, ENOMEM, "no memory for %u threads", threads);
    if (status == 0) {
        choose_cpus(team);
        status = start_members(team, ret_error);
    }
    if (status < 0)
        bench_team_close(team);
    else
        *ret_team = team;
    return status;
}

void bench_team_close(struct bench_team *team)
{
    if (!team)
        return;
    if (team->started == team->threads) {
        team->over = true;
        pthread_barrier_wait(&team->begin);
    }
    for (unsigned t = 0; t < team->started; t++)
        pthread_join(team->ids[t], NULL);
    pthread_barrier_destroy(&team->begin);
    pthread_barrier_destroy(&team->end);
    pthread_mutex_destroy(&team->gate);
    free(team->ids);
    free(team->began);
    free(team->ended);
    free(team->cpu);
    free(team->cpus);
    free(team);
}

unsigned bench_team_threads(const struct bench_team *team)
{
    return team->threads;
}

int bench_team_check(const struct bench_team *team, struct error *ret_error)
{
    return interrupted(team) ? error_set(ret_error, EINTR, "interrupted") : 0;
}

/* CPU time of the last run's busiest thread, in seconds. */
static double busiest(const struct bench_team *team)
{
    uint64_t most = 0;
    for (unsigned t = 0; t < team->threads; t++)
        most = team->cpu[t] > most ? team->cpu[t] : most;
    return (double)most * 1e-9;
}

double bench_team_run(struct bench_team *team, bench_work *work, void *context, uint64_t first, uint64_t count,
                      uint64_t stretch)
{
    team->work = work;
    team->context = context;
    team->first = first;
    team->count = count;
    team->stretch = stretch;
    pthread_barrier_wait(&team->begin);
    pthread_barrier_wait(&team->end);
    if (team->cpu_time)
        return busiest(team);
    uint64_t began = team->began[0], ended = team->ended[0];
    for (unsigned t = 1; t < team->threads; t++) {
        began = team->began[t] < began ? team->began[t] : began;
        ended = team->ended[t] > ended ? team->ended[t] : ended;
    }
    return (double)(ended - began) * 1e-9;
}

static double run_load(struct bench_team *team, struct bench_load *load)
{
    double seconds = bench_team_run(team, load->work, load->context, load->next, load->count, load->stretch);
    load->next += load->count;
    return seconds;
}

/* Items that take `seconds` where `count` took `took`. */
static uint64_t fitting(uint64_t count, double took, double seconds)
{
    double fit = took > 0 ? (double)count * seconds / took : 1;
    return fit < 1 ? 1 : fit > (double)COUNT_MOST ? COUNT_MOST : (uint64_t)fit;
}

void bench_calibrate(struct bench_team *team, struct bench_load *load, double seconds)
{
    load->count = load->stretch = 1;
    for (;;) {
        /* By CPU time: by the clock a run may be long because another program was on the CPU. */
        run_load(team, load);
        double took = busiest(team);
        if (took >= seconds / 4 || load->count >= COUNT_MOST) {
            load->stretch = fitting(load->count, took, STRETCH_SECONDS);
            load->count = fitting(load->count, took, seconds);
            return;
        }
        load->count *= 2;
        if (took < STRETCH_SECONDS)
            load->stretch = load->count;
    }
}

double bench_rate(struct bench_team *team, struct bench_load *load)
{
    double seconds = run_load(team, load);
    return seconds > 0 ? (double)load->count * load->amount / seconds : 0;
}

void bench_compare(struct bench_team *team, struct bench_load *load, struct bench_load *limit, unsigned runs,
                   double seconds, struct bench_spread *ret_figure, struct bench_spread *ret_limit)
{
    double figures[BENCH_RUNS_MAX], limits[BENCH_RUNS_MAX];
    if (limit->count == 0)
        bench_calibrate(team, limit, seconds);
    bench_calibrate(team, load, seconds);
    for (unsigned r = 0; r < runs; r++) {
        limits[r] = bench_rate(team, limit) * 1e-9;
        figures[r] = bench_rate(team, load) * 1e-9;
    }
    *ret_figure = bench_spread(figures, runs);
    *ret_limit = bench_spread(limits, runs);
}
