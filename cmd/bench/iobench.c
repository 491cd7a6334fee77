/* calypte iobench: what a drive gives for the daemon's access pattern, by size of the reads and bytes in flight. */
#include "cmd/bench/bench.h"
#include "cmd/bench/drive.h"
#include "cmd/cli/commands.h"
#include "cmd/cli/usage.h"
#include "io_daemon/reader.h"
#include "proto/cleanup.h"
#include "proto/parse.h"

#include <string.h>

#define MIB 1048576.0
#define CASES_MOST 40u
#define FEW_BYTES (UINT64_C(1) << 30) /* that a drive or a hypervisor might keep in its memory */

enum { FLAG_BLOCK, FLAG_DEPTH, FLAG_MEMORY, FLAG_SECONDS, FLAG_RUNS, FLAG_SIZE, FLAG_BUFFERED, FLAG_JSON };

static const struct flag flags[] = {
    [FLAG_BLOCK] = {"--block", NULL, "SIZE", "most bytes of a read (default: 512K, 1M, 2M and 4M)"},
    [FLAG_DEPTH] = {"--depth", NULL, "SIZE", "bytes in flight (default: 8M, 16M, 32M and 64M)"},
    [FLAG_MEMORY] = {"--memory", NULL, "huge|small|pool",
                     "what is read into: huge pages, pages of 4 KiB (default: both), shared memory like the pool's"},
    [FLAG_SECONDS] = {"--seconds", NULL, "S", "time of a run (default 0.3)"},
    [FLAG_RUNS] = {"--runs", NULL, "N", "runs of each setting; the best one counts (default 3)"},
    [FLAG_SIZE] = {"--size", NULL, "SIZE", "of the file that is written into a folder (default 8G)"},
    [FLAG_BUFFERED] = {"--buffered", NULL, NULL, "through the page cache, without O_DIRECT"},
    [FLAG_JSON] = {"--json", NULL, NULL, "print the figures as JSON"},
    {NULL, NULL, NULL, NULL},
};

static const struct command_line syntax = {
    .command = "iobench",
    .operands = "DIR|MODEL",
    .summary = "What a drive gives when whole experts are read in random order, as calypte-iod reads them.",
    .details = "Of a MODEL its own experts are read. In another folder a file of random bytes is made first, which has "
               "no name and is gone when the command ends.\n"
               "`--set io=pread` reads with threads instead of io_uring.",
    .flags = flags,
    .settings = true,
    .least_operands = 1,
    .most_operands = 1,
};

/* One setting and what it gave. */
struct setting_case {
    struct drive_setting setting;
    uint64_t piece; /* bytes of a read */
    double rates[BENCH_RUNS_MAX];
    struct bench_spread gbps;
    struct latencies latencies;
};

struct iobench {
    struct arguments arguments;
    double seconds;
    uint64_t runs;
    struct drive_bench *drive;
    struct setting_case *cases; /* [CASES_MOST] */
    unsigned count;
    const struct setting_case *best, *daemon; /* daemon: as calypte-iod reads; NULL: not measured */
};

/* `0`: not given. */
static int take_size(const struct arguments *arguments, size_t flag, uint64_t least, uint64_t most, uint64_t *ret_size)
{
    const char *text = arguments->values[flag];
    *ret_size = 0;
    if (!text || (parse_size(text, ret_size) == 0 && *ret_size >= least && *ret_size <= most))
        return 0;
    return usage_error("iobench", "%s cannot be \"%s\": a size from %llu to %llu bytes, like 2M", flags[flag].name,
                       text, (unsigned long long)least, (unsigned long long)most);
}

static int take_memory(const struct arguments *arguments, enum drive_memory *ret_memory)
{
    const char *text = arguments->values[FLAG_MEMORY];
    if (!text)
        return 0;
    for (unsigned m = 0; m < DRIVE_MEMORIES; m++) {
        if (!strcmp(text, drive_memory_names[m])) {
            *ret_memory = (enum drive_memory)m;
            return 0;
        }
    }
    return usage_error("iobench", "--memory cannot be \"%s\": it is huge, small or pool", text);
}

/* Cuts that come to the same reads are measured once. */
static struct setting_case *add_case(struct iobench *bench, const struct drive_setting *setting)
{
    uint64_t piece = drive_bench_piece_bytes(bench->drive, setting->block);
    for (unsigned c = 0; c < bench->count; c++)
        if (bench->cases[c].piece == piece && bench->cases[c].setting.depth == setting->depth &&
            bench->cases[c].setting.memory == setting->memory)
            return &bench->cases[c];
    struct setting_case *added = &bench->cases[bench->count++];
    uint64_t blob = drive_bench_facts(bench->drive)->blob_bytes;
    *added = (struct setting_case){.setting = *setting, .piece = piece};
    added->setting.block = setting->block < blob ? setting->block : blob;
    return added;
}

/* What was not chosen is tried. */
static void add_cases(struct iobench *bench, const struct drive_setting *chosen, bool memory_chosen)
{
    static const uint64_t blocks[] = {UINT64_C(512) << 10, UINT64_C(1) << 20, UINT64_C(2) << 20, UINT64_C(4) << 20};
    static const uint64_t depths[] = {UINT64_C(8) << 20, UINT64_C(16) << 20, UINT64_C(32) << 20, UINT64_C(64) << 20};
    for (unsigned m = 0; m < (memory_chosen ? 1u : 2u); m++)
        for (unsigned b = 0; b < (chosen->block ? 1 : sizeof blocks / sizeof blocks[0]); b++)
            for (unsigned d = 0; d < (chosen->depth ? 1 : sizeof depths / sizeof depths[0]); d++)
                add_case(bench, &(struct drive_setting){chosen->block ? chosen->block : blocks[b],
                                                        chosen->depth ? chosen->depth : depths[d],
                                                        memory_chosen ? chosen->memory
                                                        : m           ? DRIVE_MEMORY_SMALL
                                                                      : DRIVE_MEMORY_HUGE});
    if (!memory_chosen || chosen->memory == DRIVE_MEMORY_POOL)
        bench->daemon = add_case(bench, &(struct drive_setting){PIECE_BYTES, READER_IN_FLIGHT, DRIVE_MEMORY_POOL});
}

/* All settings once, then all again: a drive that changes changes all of them. */
static int measure(struct iobench *bench, struct error *ret_error)
{
    for (unsigned r = 0; r < bench->runs; r++) {
        for (unsigned c = 0; c < bench->count; c++) {
            struct setting_case *which = &bench->cases[c];
            double rate;
            int status =
                drive_bench_measure(bench->drive, &which->setting, bench->seconds, &which->latencies, &rate, ret_error);
            if (status < 0)
                return status;
            which->rates[r] = rate * 1e-9;
        }
    }
    for (unsigned c = 0; c < bench->count; c++) {
        struct setting_case *which = &bench->cases[c];
        which->gbps = bench_spread(which->rates, (unsigned)bench->runs);
        if (!bench->best || which->gbps.most > bench->best->gbps.most)
            bench->best = which;
    }
    return 0;
}

static void warn(const struct iobench *bench)
{
    const struct drive_bench_facts *facts = drive_bench_facts(bench->drive);
    if (bench->arguments.values[FLAG_BUFFERED])
        fprintf(stderr, "calypte iobench: --buffered: this measures the page cache as well as the drive\n");
    else if (!facts->direct)
        fprintf(stderr,
                "calypte iobench: %s: its file system refuses O_DIRECT: this measures the page cache as well as "
                "the drive\n",
                bench->arguments.operands[0]);
    if (facts->bytes < FEW_BYTES)
        fprintf(stderr, "calypte iobench: %s: only %.0f MB are read, which a drive may keep in a cache of its own\n",
                bench->arguments.operands[0], (double)facts->bytes / 1e6);
}

/* --- what is printed --- */

static double percentile_ms(const struct setting_case *which, double share)
{
    return latencies_percentile(&which->latencies, share) * 1e-6;
}

static json_t *case_json(const struct setting_case *which)
{
    return json_pack("{s:f, s:I, s:I, s:s, s:I, s:o, s:{s:I, s:f, s:f, s:f, s:f}}", "gbps", which->gbps.most, "block",
                     (json_int_t)which->setting.block, "depth", (json_int_t)which->setting.depth, "memory",
                     drive_memory_names[which->setting.memory], "read_bytes", (json_int_t)which->piece, "spread",
                     bench_spread_json(&which->gbps), "latency", "reads", (json_int_t)which->latencies.total, "p50_ms",
                     percentile_ms(which, 0.5), "p90_ms", percentile_ms(which, 0.9), "p99_ms",
                     percentile_ms(which, 0.99), "max_ms", (double)which->latencies.most_ns * 1e-6);
}

static void print_json(const struct iobench *bench)
{
    const struct drive_bench_facts *facts = drive_bench_facts(bench->drive);
    json_auto_t *object = case_json(bench->best);
    json_t *all = json_array();
    for (unsigned c = 0; c < bench->count; c++)
        json_array_append_new(all, case_json(&bench->cases[c]));
    json_object_set_new(object, "direct", json_boolean(facts->direct));
    json_object_set_new(object, "method", json_string(facts->method));
    json_object_set_new(object, "path", json_string(bench->arguments.operands[0]));
    json_object_set_new(object, "bytes", json_integer((json_int_t)facts->bytes));
    json_object_set_new(object, "blob_bytes", json_integer((json_int_t)facts->blob_bytes));
    json_object_set_new(object, "daemon", bench->daemon ? case_json(bench->daemon) : json_null());
    json_object_set_new(object, "all", all);
    json_dumpf(object, stdout, JSON_INDENT(1));
    putchar('\n');
}

static void print_case(const char *label, const struct setting_case *which)
{
    printf("%-6s %8.2f %10.1f  %-5s %9.3f  %7.3f to %7.3f %9.2f %9.2f %9.2f\n", label, (double)which->piece / MIB,
           (double)which->setting.depth / MIB, drive_memory_names[which->setting.memory], which->gbps.most,
           which->gbps.least, which->gbps.most, percentile_ms(which, 0.5), percentile_ms(which, 0.99),
           (double)which->latencies.most_ns * 1e-6);
}

static void print_table(const struct iobench *bench)
{
    const struct drive_bench_facts *facts = drive_bench_facts(bench->drive);
    printf("%s: %s, %.1f GB in blobs of %.2f MB in random order, %s, %s\n", bench->arguments.operands[0],
           facts->container ? "its experts" : "a file", (double)facts->bytes / 1e9, (double)facts->blob_bytes / 1e6,
           facts->method, facts->direct ? "O_DIRECT" : "page cache");
    printf("%-6s %8s %10s  %-5s %9s  %18s %9s %9s %9s\n", "", "read MiB", "flying MiB", "pages", "GB/s", "of all runs",
           "p50 ms", "p99 ms", "max ms");
    for (unsigned c = 0; c < bench->count; c++)
        print_case("", &bench->cases[c]);
    print_case("best", bench->best);
    if (bench->daemon)
        print_case("as iod", bench->daemon);
}

static int parse(int argc, char **argv, struct iobench *bench, struct drive_bench_options *ret_options,
                 struct drive_setting *ret_setting)
{
    struct arguments *arguments = &bench->arguments;
    uint64_t size;
    int code = arguments_parse(&syntax, argc, argv, arguments);
    if (code != ARGUMENTS_GO_ON)
        return code;
    bench->seconds = 0.3;
    bench->runs = 3;
    if (arguments_real(arguments, FLAG_SECONDS, 1e-3, 3600, &bench->seconds) ||
        arguments_integer(arguments, FLAG_RUNS, 1, BENCH_RUNS_MAX, &bench->runs) ||
        take_size(arguments, FLAG_BLOCK, DRIVE_BLOCK_LEAST, DRIVE_BLOCK_MOST, &ret_setting->block) ||
        take_size(arguments, FLAG_DEPTH, DRIVE_BLOCK_LEAST, DRIVE_DEPTH_MOST, &ret_setting->depth) ||
        take_size(arguments, FLAG_SIZE, DRIVE_BLOB_BYTES, UINT64_C(1) << 50, &size) ||
        take_memory(arguments, &ret_setting->memory))
        return EXIT_USAGE;
    *ret_options = (struct drive_bench_options){.path = arguments->operands[0],
                                                .scratch_bytes = size ? size : DRIVE_SCRATCH_BYTES,
                                                .io = (uint32_t)settings_number(&arguments->settings, SETTING_IO),
                                                .interrupt_fd = -1,
                                                .buffered = arguments->values[FLAG_BUFFERED] != NULL,
                                                .hugepages = settings_number(&arguments->settings, SETTING_HUGEPAGES) !=
                                                             SETTING_HUGEPAGES_OFF};
    return ARGUMENTS_GO_ON;
}

int cmd_iobench(int argc, char **argv)
{
    struct iobench bench = {.count = 0};
    struct drive_bench_options options;
    struct error error = {{0}};
    struct drive_setting chosen = {.block = 0};
    int code = parse(argc, argv, &bench, &options, &chosen);
    if (code != ARGUMENTS_GO_ON)
        return code;
    _cleanup_free_ struct setting_case *cases = calloc(CASES_MOST, sizeof *cases);
    bench.cases = cases;
    if (!cases)
        return usage_failed("iobench", "out of memory");
    int status = drive_bench_open(&options, &bench.drive, &error);
    if (status == 0) {
        warn(&bench);
        add_cases(&bench, &chosen, bench.arguments.values[FLAG_MEMORY] != NULL);
        status = measure(&bench, &error);
    }
    if (status == 0 && bench.arguments.values[FLAG_JSON])
        print_json(&bench);
    else if (status == 0)
        print_table(&bench);
    drive_bench_close(bench.drive);
    return status < 0 ? usage_failed("iobench", "%s", error.text) : EXIT_DONE;
}
