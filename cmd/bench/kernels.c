/* calypte bench kernels: each kernel of each set that runs here, beside the limit of the machine. */
#include "cmd/bench/kernels.h"

#include "cmd/cli/commands.h"
#include "cmd/cli/usage.h"
#include "proto/cleanup.h"

#include <stdio.h>
#include <string.h>

#define MAX_SETS 16u

enum { FLAG_ISA, FLAG_KERNEL, FLAG_ROWS, FLAG_THREADS, FLAG_SECONDS, FLAG_RUNS, FLAG_BYTES, FLAG_CPU_TIME, FLAG_JSON };

static const struct flag flags[] = {
    [FLAG_ISA] = {"--isa", NULL, "NAME", "only this kernel set"},
    [FLAG_KERNEL] = {"--kernel", NULL, "NAME", "only this kernel, as int4_gemv or topk"},
    [FLAG_ROWS] = {"--rows", NULL, "N", "only with this number of rows"},
    [FLAG_THREADS] = {"--threads", NULL, "N",
                      "threads, each on a CPU of its own (default: the CPUs that this process may use)"},
    [FLAG_SECONDS] = {"--seconds", NULL, "S", "time of a run (default 0.1)"},
    [FLAG_RUNS] = {"--runs", NULL, "N", "runs; the best one counts (default 5)"},
    [FLAG_BYTES] = {"--bytes", NULL, "MIB",
                    "weights in memory, in MiB (default 1200: more than any cache holds; at least 64)"},
    [FLAG_CPU_TIME] = {"--cpu-time", NULL, NULL,
                       "count CPU time instead of the clock's: for a machine on which others work too"},
    [FLAG_JSON] = {"--json", NULL, NULL, "print the figures as JSON"},
    {NULL, NULL, NULL, NULL},
};

static const struct command_line syntax = {
    .command = "bench kernels",
    .operands = "",
    .summary = "Speed of each kernel of each instruction set that runs here, and its share of what the machine allows.",
    .details =
        "Limits are measured run by run beside the kernels: the read bandwidth of all threads, or the rate of the "
        "set's own dot\n"
        "(or multiply-add) instruction without memory. Figures are the best run's; the spread stands beside them.",
    .flags = flags,
};

struct bench {
    struct arguments arguments;
    uint64_t threads, runs, megabytes, rows;
    double seconds;
    struct bench_team *team;
    struct bench_memory memory;
    struct bench_reading reading[2]; /* all threads, one */
    struct bench_load limits[4];     /* by enum bench_bound */
    const struct peak *peak;         /* of the set at hand */
    json_t *results;
};

static void work_dot(void *context, unsigned thread, unsigned threads, uint64_t first, uint64_t count)
{
    (void)thread;
    (void)threads;
    (void)first;
    const struct peak *peak = *(const struct peak *const *)context;
    peak->run_dot(count);
}

static void work_fma(void *context, unsigned thread, unsigned threads, uint64_t first, uint64_t count)
{
    (void)thread;
    (void)threads;
    (void)first;
    const struct peak *peak = *(const struct peak *const *)context;
    peak->run_fma(count);
}

/* The limits that belong to a set. */
static void use_peak(struct bench *bench, const struct peak *peak)
{
    bench->peak = peak;
    bench->limits[BOUND_DOT] =
        (struct bench_load){.work = work_dot,
                            .context = &bench->peak,
                            .amount = peak ? (double)peak->run_dot(1) * (double)bench->threads : 0};
    bench->limits[BOUND_FMA] =
        (struct bench_load){.work = work_fma,
                            .context = &bench->peak,
                            .amount = peak ? (double)peak->run_fma(1) * (double)bench->threads : 0};
}

static bool is_read(enum bench_bound bound)
{
    return bound == BOUND_READ || bound == BOUND_READ_ONE;
}

static const char *bound_name(const struct bench *bench, enum bench_bound bound)
{
    switch (bound) {
    case BOUND_READ: return "read bandwidth";
    case BOUND_READ_ONE: return "read bandwidth of a thread";
    case BOUND_DOT: return bench->peak->dot;
    case BOUND_FMA: return bench->peak->fma;
    }
    return "?";
}

static void report(struct bench *bench, const struct bench_case *which, const struct kernel_set *set, double bytes,
                   double macs, const struct bench_spread *figure, const struct bench_spread *limit)
{
    double amount = is_read(which->bound) ? bytes : macs, per_second = amount > 0 ? figure->most * 1e9 / amount : 0;
    double gbps = bytes * per_second * 1e-9, gmacs = macs * per_second * 1e-9,
           microseconds = per_second > 0 ? 1e6 / per_second : 0;
    double share = limit->most > 0 ? figure->most / limit->most : 0;
    if (!bench->arguments.values[FLAG_JSON]) {
        char shape[32];
        snprintf(shape, sizeof shape, "%u x %u x %u", which->rows, which->n, which->k);
        printf("%-17s %-8s %-18s %8.2f GB/s %8.1f GMAC/s %10.1f us  %5.1f %% of %6.1f %s (%s); %.1f to %.1f\n",
               which->name, set->name, shape, gbps, gmacs, microseconds, share * 100, limit->most,
               is_read(which->bound) ? "GB/s" : "GMAC/s", bound_name(bench, which->bound), figure->least, figure->most);
        fflush(stdout);
        return;
    }
    json_array_append_new(bench->results,
                          json_pack("{s:s, s:s, s:i, s:i, s:i, s:f, s:f, s:f, s:f, s:f, s:s, s:o, s:o}", "name",
                                    which->name, "isa", set->name, "rows", (int)which->rows, "n", (int)which->n, "k",
                                    (int)which->k, "gbps", gbps, "gmacs", gmacs, "us", microseconds, "limit",
                                    limit->most, "share", share, "bound", bound_name(bench, which->bound), "spread",
                                    bench_spread_json(figure), "limit_spread", bench_spread_json(limit)));
}

static int run_case(struct bench *bench, const struct bench_case *which, const struct kernel_set *set,
                    struct error *ret_error)
{
    const char *kernel = bench->arguments.values[FLAG_KERNEL];
    if ((kernel && strcmp(kernel, which->name) != 0) || (bench->rows && bench->rows != which->rows))
        return 0;
    double bytes, macs;
    struct bench_spread figure, limit;
    struct bench_load load = {.work = which->work};
    int status = which->open(which, set, &bench->memory, &load.context, &bytes, &macs, ret_error);
    if (status < 0)
        return status;
    load.amount = is_read(which->bound) ? bytes : macs;
    bench_compare(bench->team, &load, &bench->limits[which->bound], (unsigned)bench->runs, bench->seconds, &figure,
                  &limit);
    which->close(load.context);
    report(bench, which, set, bytes, macs, &figure, &limit);
    return 0;
}

/* Of sets with one name the last is the one that isa=NAME takes. */
static bool is_hidden(const struct kernel_set *const *sets, uint32_t count, uint32_t i)
{
    for (uint32_t j = i + 1; j < count; j++)
        if (!strcmp(sets[j]->name, sets[i]->name))
            return true;
    return false;
}

static int run_sets(struct bench *bench, struct error *ret_error)
{
    const struct kernel_set *sets[MAX_SETS];
    uint32_t count = kernel_sets(sets, MAX_SETS), done = 0;
    const char *isa = bench->arguments.values[FLAG_ISA];
    int status = 0;
    for (uint32_t i = 0; status == 0 && i < count; i++) {
        const struct peak *peak = peak_find(sets[i]->name);
        if (is_hidden(sets, count, i) || (isa && strcmp(isa, sets[i]->name) != 0))
            continue;
        if (!peak)
            return error_set(ret_error, ENOTSUP, "no peak loop for the kernel set %s", sets[i]->name);
        use_peak(bench, peak);
        done++;
        for (size_t c = 0; status == 0 && c < bench_case_count; c++)
            status = run_case(bench, &bench_cases[c], sets[i], ret_error);
    }
    if (status == 0 && done == 0)
        return error_set(ret_error, ENOTSUP, "--isa %s: this CPU cannot run that kernel set", isa);
    return status;
}

static int parse(int argc, char **argv, struct bench *bench)
{
    *bench = (struct bench){
        .threads = bench_usable_cpus(), .runs = 5, .megabytes = BENCH_WEIGHT_BYTES >> 20, .seconds = 0.1};
    const struct arguments *arguments = &bench->arguments;
    int code = arguments_parse(&syntax, argc, argv, &bench->arguments);
    if (code != ARGUMENTS_GO_ON)
        return code;
    if (arguments_integer(arguments, FLAG_THREADS, 1, 1024, &bench->threads) ||
        arguments_integer(arguments, FLAG_ROWS, 1, 4096, &bench->rows) ||
        arguments_real(arguments, FLAG_SECONDS, 1e-4, 60, &bench->seconds) ||
        arguments_integer(arguments, FLAG_RUNS, 1, BENCH_RUNS_MAX, &bench->runs) ||
        arguments_integer(arguments, FLAG_BYTES, 64, 1 << 20, &bench->megabytes))
        return EXIT_USAGE;
    const char *isa = arguments->values[FLAG_ISA];
    const struct kernel_set *set;
    char missing[256], names[256] = "";
    bool built = !isa;
    for (uint32_t i = 0; (set = kernel_set_at(i, missing, sizeof missing)); i++) {
        size_t used = strlen(names);
        built = built || !strcmp(isa, set->name);
        if (!strstr(names, set->name))
            snprintf(names + used, sizeof names - used, "%s%s", used ? ", " : "", set->name);
    }
    if (!built)
        return usage_error("bench kernels", "--isa cannot be \"%s\": one of %s", isa, names);
    const char *kernel = arguments->values[FLAG_KERNEL];
    bool known = !kernel;
    for (size_t c = 0; c < bench_case_count; c++)
        known = known || !strcmp(kernel, bench_cases[c].name);
    return known ? ARGUMENTS_GO_ON
                 : usage_error("bench kernels",
                               "--kernel %s is unknown, known are int4_gemv, int8_gemv, int4_gemm, "
                               "int8_gemm, attention, indexer, topk, router, rmsnorm_quantise, swiglu_quantise",
                               kernel);
}

static int run(struct bench *bench, struct error *ret_error)
{
    int status = bench_team_open((unsigned)bench->threads, bench->arguments.values[FLAG_CPU_TIME] != NULL, -1,
                                 &bench->team, ret_error);
    if (status == 0)
        status = bench_memory_open(bench->team, bench->megabytes << 20, &bench->memory, ret_error);
    if (status == 0)
        status = bench_reading_open(bench->team, &bench->memory, (unsigned)bench->threads, bench->seconds,
                                    &bench->reading[0], &bench->limits[BOUND_READ], ret_error);
    if (status == 0)
        status = bench_reading_open(bench->team, &bench->memory, 1, bench->seconds, &bench->reading[1],
                                    &bench->limits[BOUND_READ_ONE], ret_error);
    if (status < 0)
        return status;
    char cpu[128];
    bench_cpu_name(cpu, sizeof cpu);
    bench_calibrate(bench->team, &bench->limits[BOUND_READ], bench->seconds);
    double rates[BENCH_RUNS_MAX];
    for (unsigned r = 0; r < bench->runs; r++)
        rates[r] = bench_rate(bench->team, &bench->limits[BOUND_READ]) * 1e-9;
    struct bench_spread read = bench_spread(rates, (unsigned)bench->runs);
    if (!bench->arguments.values[FLAG_JSON]) {
        printf("%s, %llu threads, %llu MiB of weights, read bandwidth %.2f GB/s (%.2f to %.2f in %u runs)\n"
               "kernel            set      rows x n x k\n",
               cpu, (unsigned long long)bench->threads, (unsigned long long)bench->megabytes, read.most, read.least,
               read.most, read.runs);
        return run_sets(bench, ret_error);
    }
    bench->results = json_array();
    status = run_sets(bench, ret_error);
    json_auto_t *object = json_pack("{s:s, s:I, s:f, s:o, s:I, s:o}", "cpu", cpu, "threads", (json_int_t)bench->threads,
                                    "read_gbps", read.most, "read_spread", bench_spread_json(&read), "weight_bytes",
                                    (json_int_t)(bench->megabytes << 20), "results", bench->results);
    if (status == 0) {
        json_dumpf(object, stdout, JSON_INDENT(1));
        putchar('\n');
    }
    return status;
}

int bench_kernels(int argc, char **argv)
{
    struct bench bench;
    int code = parse(argc, argv, &bench);
    if (code != ARGUMENTS_GO_ON)
        return code;
    struct error error = {{0}};
    int status = run(&bench, &error);
    for (int i = 0; i < 2; i++)
        bench_reading_close(&bench.reading[i]);
    bench_memory_close(&bench.memory);
    bench_team_close(bench.team);
    return status < 0 ? usage_failed("bench kernels", "%s", error.text) : EXIT_DONE;
}
