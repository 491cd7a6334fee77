/* calypte bench memory, and the memory of the other benchmarks. */
#include "cmd/bench/memory.h"

#include "cmd/cli/commands.h"
#include "cmd/cli/usage.h"
#include "compute/kernel.h"
#include "proto/cleanup.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define CHUNK_BYTES 65536u /* read in one item by each thread */
#define STEP_BYTES (2u << 20)
#define SCALES_STEP (STEP_BYTES / 16 / 2)
#define STEPS_TOGETHER 16u /* written between two looks for a signal */
#define MAX_SETS 16u

static void *map(size_t bytes)
{
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        return NULL;
    (void)madvise(memory, bytes, MADV_HUGEPAGE); /* where there are none the figures say so */
    return memory;
}

/* One item: a step of the thread's part, and its scales. */
static void touch(void *context, unsigned thread, unsigned threads, uint64_t first, uint64_t count)
{
    struct bench_memory *memory = context;
    uint64_t x = 0x9e3779b97f4a7c15ull * (first * threads + thread + 1);
    int8_t *quanta = (int8_t *)memory->quanta[thread] + first * STEP_BYTES;
    uint16_t *scales = memory->scales[thread] + first * SCALES_STEP;
    for (size_t i = 0; i < count * STEP_BYTES; i += 8) {
        x ^= x << 13, x ^= x >> 7, x ^= x << 17; /* xorshift64 (Marsaglia 2003) */
        memcpy(quanta + i, &x, sizeof x);
        for (unsigned b = 0; b < 8; b++)
            quanta[i + b] = quanta[i + b] < -127 ? -127 : quanta[i + b];
    }
    for (size_t i = 0; i < count * SCALES_STEP; i++)
        scales[i] = (uint16_t)(0x1400u | (quanta[i] & 0xff)); /* 2^-10 and up to a quarter more */
}

int bench_memory_open(struct bench_team *team, uint64_t bytes, struct bench_memory *ret_memory, struct error *ret_error)
{
    unsigned threads = bench_team_threads(team);
    struct bench_memory memory = {.threads = threads,
                                  .bytes = (bytes / threads + STEP_BYTES - 1) / STEP_BYTES * STEP_BYTES};
    memory.scale_bytes = memory.bytes / 16;
    memory.quanta = calloc(threads, sizeof *memory.quanta);
    memory.scales = calloc(threads, sizeof *memory.scales);
    bool whole = memory.quanta && memory.scales;
    for (unsigned t = 0; whole && t < threads; t++) {
        memory.quanta[t] = map(memory.bytes);
        memory.scales[t] = map(memory.scale_bytes);
        whole = memory.quanta[t] && memory.scales[t];
    }
    if (!whole) {
        bench_memory_close(&memory);
        return error_set(ret_error, ENOMEM, "no memory for %llu MiB of weights; choose fewer with --bytes",
                         (unsigned long long)(bytes >> 20));
    }
    bench_team_run(team, touch, &memory, 0, memory.bytes / STEP_BYTES, STEPS_TOGETHER);
    int status = bench_team_check(team, ret_error);
    if (status < 0) {
        bench_memory_close(&memory);
        return status;
    }
    *ret_memory = memory;
    return 0;
}

void bench_memory_close(struct bench_memory *memory)
{
    for (unsigned t = 0; t < memory->threads; t++) {
        if (memory->quanta && memory->quanta[t])
            munmap(memory->quanta[t], memory->bytes);
        if (memory->scales && memory->scales[t])
            munmap(memory->scales[t], memory->scale_bytes);
    }
    free(memory->quanta);
    free(memory->scales);
    *memory = (struct bench_memory){0};
}

static void read_items(void *context, unsigned thread, unsigned threads, uint64_t first, uint64_t count)
{
    (void)threads;
    const struct bench_reading *reading = context;
    if (thread >= reading->readers)
        return;
    /* The items of a run lie one after the other, so what lies between two turns of the memory is read in one
     * stretch. */
    const struct bench_memory *memory = reading->memory;
    size_t chunks = memory->bytes / CHUNK_BYTES;
    uint64_t seen = 0;
    while (count > 0) {
        size_t at = (size_t)(first % chunks);
        size_t together = chunks - at < count ? chunks - at : (size_t)count;
        seen |=
            reading->peak->read(memory->quanta[thread] + at * CHUNK_BYTES, together * CHUNK_BYTES, reading->streams);
        first += together;
        count -= together;
    }
    reading->seen[thread] = seen;
}

int bench_reading_open(struct bench_team *team, const struct bench_memory *memory, unsigned readers, double seconds,
                       struct bench_reading *ret_reading, struct bench_load *ret_load, struct error *ret_error)
{
    const struct kernel_set *sets[MAX_SETS];
    uint32_t count = kernel_sets(sets, MAX_SETS);
    *ret_reading = (struct bench_reading){
        .memory = memory, .readers = readers, .seen = calloc(memory->threads, sizeof *ret_reading->seen)};
    if (!ret_reading->seen)
        return error_set(ret_error, ENOMEM, "no memory for %u threads", memory->threads);
    struct bench_load load = {.work = read_items, .context = ret_reading, .amount = (double)CHUNK_BYTES * readers};
    struct bench_reading best = {0};
    double most = 0;
    for (uint32_t i = 0; i < count; i++) {
        ret_reading->peak = peak_find(sets[i]->name);
        for (unsigned streams = 1; ret_reading->peak && streams <= 8; streams *= 2) {
            ret_reading->streams = streams;
            bench_calibrate(team, &load, seconds / 2);
            double rate = bench_rate(team, &load);
            if (rate > most) {
                most = rate;
                best = *ret_reading;
            }
        }
    }
    int status = bench_team_check(team, ret_error);
    if (status < 0) {
        bench_reading_close(ret_reading);
        return status;
    }
    if (!best.peak) {
        bench_reading_close(ret_reading);
        return error_set(ret_error, ENOTSUP, "no loop for reading memory on this machine");
    }
    *ret_reading = best;
    load.count = 0;
    *ret_load = load;
    return 0;
}

void bench_reading_close(struct bench_reading *reading)
{
    free(reading->seen);
    reading->seen = NULL;
}

enum { FLAG_THREADS, FLAG_SECONDS, FLAG_RUNS, FLAG_BYTES, FLAG_CPU_TIME, FLAG_JSON };

static const struct flag flags[] = {
    [FLAG_THREADS] = {"--threads", NULL, "N",
                      "threads, each on a CPU of its own (default: the CPUs that this process may use)"},
    [FLAG_SECONDS] = {"--seconds", NULL, "S", "time of a run (default 0.2)"},
    [FLAG_RUNS] = {"--runs", NULL, "N", "runs; the best one counts (default 7)"},
    [FLAG_BYTES] = {"--bytes", NULL, "MIB", "memory to read, in MiB (default 1200)"},
    [FLAG_CPU_TIME] = {"--cpu-time", NULL, NULL,
                       "count CPU time instead of the clock's: for a machine on which others work too"},
    [FLAG_JSON] = {"--json", NULL, NULL, "print the figures as JSON"},
    {NULL, NULL, NULL, NULL},
};

static const struct command_line syntax = {
    .command = "bench memory",
    .operands = "",
    .summary = "Bandwidth with which all threads together, and one alone, read memory that no cache holds.",
    .flags = flags,
};

/* Bandwidth of `readers` threads, GB/s. */
static int measure(struct bench_team *team, const struct bench_memory *memory, unsigned readers, unsigned runs,
                   double seconds, struct bench_spread *ret_spread, struct bench_reading *ret_reading,
                   struct error *ret_error)
{
    struct bench_load load;
    double rates[BENCH_RUNS_MAX];
    int status = bench_reading_open(team, memory, readers, seconds, ret_reading, &load, ret_error);
    if (status < 0)
        return status;
    bench_calibrate(team, &load, seconds);
    for (unsigned r = 0; r < runs; r++)
        rates[r] = bench_rate(team, &load) * 1e-9;
    *ret_spread = bench_spread(rates, runs);
    bench_reading_close(ret_reading);
    return 0;
}

static void print(unsigned threads, const struct bench_memory *memory, const struct bench_spread *all,
                  const struct bench_spread *one, const struct bench_reading *reading, bool json)
{
    char cpu[128];
    bench_cpu_name(cpu, sizeof cpu);
    if (json) {
        json_auto_t *object =
            json_pack("{s:s, s:i, s:f, s:f, s:I, s:s, s:i, s:o, s:o}", "cpu", cpu, "threads", (int)threads, "read_gbps",
                      all->most, "one_thread_gbps", one->most, "bytes", (json_int_t)(memory->bytes * threads), "loads",
                      reading->peak->set, "streams", (int)reading->streams, "spread", bench_spread_json(all),
                      "one_thread_spread", bench_spread_json(one));
        json_dumpf(object, stdout, JSON_INDENT(1));
        putchar('\n');
        return;
    }
    printf("cpu          %s\nmemory       %zu MiB, loads of %s in %u streams a thread\n", cpu,
           memory->bytes * threads >> 20, reading->peak->set, reading->streams);
    printf("%3u threads  %7.2f GB/s  (%.2f to %.2f in %u runs)\n", threads, all->most, all->least, all->most,
           all->runs);
    printf("  1 thread   %7.2f GB/s  (%.2f to %.2f)\n", one->most, one->least, one->most);
}

int bench_memory(int argc, char **argv)
{
    struct arguments arguments;
    uint64_t threads = bench_usable_cpus(), runs = 7, megabytes = BENCH_WEIGHT_BYTES >> 20;
    double seconds = 0.2;
    int code = arguments_parse(&syntax, argc, argv, &arguments);
    if (code != ARGUMENTS_GO_ON)
        return code;
    if (arguments_integer(&arguments, FLAG_THREADS, 1, 1024, &threads) ||
        arguments_real(&arguments, FLAG_SECONDS, 1e-4, 60, &seconds) ||
        arguments_integer(&arguments, FLAG_RUNS, 1, BENCH_RUNS_MAX, &runs) ||
        arguments_integer(&arguments, FLAG_BYTES, 1, 1 << 20, &megabytes))
        return EXIT_USAGE;
    struct error error = {{0}};
    struct bench_team *team = NULL;
    struct bench_memory memory = {0};
    struct bench_spread all, one;
    struct bench_reading reading, alone;
    int status = bench_team_open((unsigned)threads, arguments.values[FLAG_CPU_TIME] != NULL, -1, &team, &error);
    if (status == 0)
        status = bench_memory_open(team, megabytes << 20, &memory, &error);
    if (status == 0)
        status = measure(team, &memory, (unsigned)threads, (unsigned)runs, seconds, &all, &reading, &error);
    if (status == 0)
        status = measure(team, &memory, 1, (unsigned)runs, seconds, &one, &alone, &error);
    if (status == 0)
        print((unsigned)threads, &memory, &all, &one, &reading, arguments.values[FLAG_JSON] != NULL);
    bench_memory_close(&memory);
    bench_team_close(team);
    return status < 0 ? usage_failed("bench memory", "%s", error.text) : EXIT_DONE;
}
