/* calypte bench decode and bench prefill: a whole instance on a whole model, against the bandwidth and the dot
 * instruction of the machine, which are measured between its runs. */
#include "cmd/bench/disk.h"
#include "cmd/bench/memory.h"
#include "cmd/bench/volume.h"
#include "cmd/cli/client.h"
#include "cmd/cli/commands.h"
#include "cmd/cli/interrupt.h"
#include "cmd/cli/target.h"
#include "cmd/cli/usage.h"
#include "compute/kernel.h"
#include "proto/cleanup.h"
#include "proto/message.h"

#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define CHUNK_MOST 4096u /* of the setting prefill_chunk */
#define DRIFT_TOKENS 16u /* of a stream, between two changes of its ranks */
#define LIMIT_RUNS 2u    /* of each limit, between two runs */

enum { FLAG_CONTEXT, FLAG_TOKENS, FLAG_RUNS, FLAG_SECONDS, FLAG_BYTES, FLAG_JSON, FLAG_ZIPF };
enum { FLAG_ROWS = FLAG_CONTEXT, FLAG_CHUNK = FLAG_TOKENS };

static const struct flag decode_flags[] = {
    [FLAG_CONTEXT] = {"--context", NULL, "N", "tokens before the measured ones (default 512)"},
    [FLAG_TOKENS] = {"--tokens", NULL, "N", "tokens of a run (default 64)"},
    [FLAG_RUNS] = {"--runs", NULL, "N", "runs; the best one counts (default 5)"},
    [FLAG_SECONDS] = {"--seconds", NULL, "S", "time of a run that measures the bandwidth (default 0.2)"},
    [FLAG_BYTES] = {"--bytes", NULL, "MIB", "memory that measures the bandwidth, in MiB (default 1200)"},
    [FLAG_JSON] = {"--json", NULL, NULL, "print the figures as JSON"},
    [FLAG_ZIPF] =
        {"--zipf", NULL, "S",
         "go on with tokens drawn by Zipf's law with the exponent S, the ranks drifting, and not with those that "
         "the model chooses"},
    {NULL, NULL, NULL, NULL},
};

static const struct command_line decode_syntax = {
    .command = "bench decode",
    .operands = "MODEL",
    .summary = "Tokens a second of one answer, and what the bandwidth of this machine allows for the bytes that a "
               "token reads.",
    .details = "An instance is used or started as by `calypte run`. A first run, which is not counted, fills the pool.",
    .flags = decode_flags,
    .settings = true,
    .least_operands = 1,
    .most_operands = 1,
};

static const struct flag prefill_flags[] = {
    [FLAG_ROWS] = {"--rows", NULL, "N", "tokens of the prompt (default 512)"},
    [FLAG_CHUNK] = {"--chunk", NULL, "N",
                    "tokens of a step, prefill_chunk of the instance (default: all, at most 4096)"},
    [FLAG_RUNS] = {"--runs", NULL, "N", "runs; the best one counts (default 5)"},
    [FLAG_SECONDS] = {"--seconds", NULL, "S", "time of a run that measures bandwidth or dot instruction (default 0.2)"},
    [FLAG_BYTES] = {"--bytes", NULL, "MIB", "memory that measures the bandwidth, in MiB (default 1200)"},
    [FLAG_JSON] = {"--json", NULL, NULL, "print the figures as JSON"},
    {NULL, NULL, NULL, NULL},
};

static const struct command_line prefill_syntax = {
    .command = "bench prefill",
    .operands = "MODEL",
    .summary =
        "Tokens a second of a prompt, and what the dot instruction and the bandwidth of this machine allow for them.",
    .details = "An instance is used or started as by `calypte run`. A first run, which is not counted, fills the pool.",
    .flags = prefill_flags,
    .settings = true,
    .least_operands = 1,
    .most_operands = 1,
};

/* Counters of the instance that a run is the difference of. */
enum counted {
    COUNTED_STEPS,
    COUNTED_STEP_S,
    COUNTED_MATMUL,
    COUNTED_FLIGHT,
    COUNTED_FRONT,
    COUNTED_HITS,
    COUNTED_MISSES,
    COUNTED_DISK,
    COUNTED_PARTS
};

static const char *const counted_names[COUNTED_PARTS] = {
    [COUNTED_STEPS] = "steps",           [COUNTED_STEP_S] = "step_seconds", [COUNTED_MATMUL] = "matmul_seconds",
    [COUNTED_FLIGHT] = "flight_seconds", [COUNTED_FRONT] = "front_seconds", [COUNTED_HITS] = "hits",
    [COUNTED_MISSES] = "misses",         [COUNTED_DISK] = "load_bytes",
};

struct figures {
    double tokens_per_s, read, dot; /* GB/s, GMAC/s: the better of what was measured before and after the run */
    double counted[COUNTED_PARTS], part_s[STEP_PARTS];
    struct disk_run disk;
    double expected_s; /* of the steps: bench_disk_expected() */
};

/* What bounds a run: measured while the instance has nothing to do. */
struct limits {
    struct bench_team *team;
    struct bench_memory memory;
    struct bench_reading reading;
    struct bench_load read, dot;
    const struct peak *peak;
    unsigned threads;
};

/* Tokens that a decode goes on with, one a step. */
struct token_stream {
    double *cumulated; /* [vocab], of the ranks' shares */
    uint32_t *tokens;  /* [tokens of a run] */
    uint64_t drawn;
};

struct bench {
    const char *command;
    struct arguments arguments;
    bool prefill;
    uint32_t prompt, tokens, chunk; /* tokens: of the answer; chunk: prompt tokens a step, of a prefill */
    double zipf;                    /* exponent of the stream; 0: the model chooses its tokens */
    struct token_stream stream;
    unsigned runs;
    double seconds;
    uint64_t megabytes;
    struct container *container;
    struct limits limits;
    struct target target;
    struct client client;
    struct bench_disk *disk;
    struct figures best;
    struct bench_spread tokens_per_s, read; /* of all runs */
    json_t *status;                         /* the supervisor's */
};

/* --- the limits --- */

static void work_dot(void *context, unsigned thread, unsigned threads, uint64_t first, uint64_t count)
{
    (void)thread;
    (void)threads;
    (void)first;
    const struct peak *peak = context;
    peak->run_dot(count);
}

/* With as many threads as an instance takes by itself. */
static int open_limits(struct bench *bench, int interrupt_fd, struct error *ret_error)
{
    struct limits *limits = &bench->limits;
    const struct kernel_set *set;
    int status = kernel_choose((uint32_t)settings_number(&bench->arguments.settings, SETTING_ISA), &set, ret_error);
    if (status < 0)
        return status;
    limits->peak = peak_find(set->name);
    if (!limits->peak)
        return error_set(ret_error, ENOTSUP, "no peak loop for the kernel set %s", set->name);
    limits->threads = bench_usable_cpus();
    status = bench_team_open(limits->threads, false, interrupt_fd, &limits->team, ret_error);
    if (status == 0)
        status = bench_memory_open(limits->team, bench->megabytes << 20, &limits->memory, ret_error);
    if (status == 0)
        status = bench_reading_open(limits->team, &limits->memory, limits->threads, bench->seconds, &limits->reading,
                                    &limits->read, ret_error);
    if (status < 0)
        return status;
    limits->dot = (struct bench_load){.work = work_dot,
                                      .context = (void *)(uintptr_t)limits->peak,
                                      .amount = (double)limits->peak->run_dot(1) * limits->threads};
    bench_calibrate(limits->team, &limits->read, bench->seconds);
    bench_calibrate(limits->team, &limits->dot, bench->seconds);
    return bench_team_check(limits->team, ret_error);
}

static void close_limits(struct limits *limits)
{
    bench_reading_close(&limits->reading);
    bench_memory_close(&limits->memory);
    bench_team_close(limits->team);
}

/* The best of some short runs, GB/s or GMAC/s. */
static double measure_limit(struct bench_team *team, struct bench_load *load)
{
    double best = 0;
    for (unsigned r = 0; r < LIMIT_RUNS; r++) {
        double rate = bench_rate(team, load) * 1e-9;
        best = rate > best ? rate : best;
    }
    return best;
}

/* -EINTR: a signal came, and they are no figures. */
static int measure_limits(struct limits *limits, double *ret_read, double *ret_dot, struct error *ret_error)
{
    *ret_read = measure_limit(limits->team, &limits->read);
    *ret_dot = measure_limit(limits->team, &limits->dot);
    return bench_team_check(limits->team, ret_error);
}

static double larger(double a, double b)
{
    return a > b ? a : b;
}

/* --- the instance --- */

static int set_number(struct settings *settings, const char *name, uint64_t number, struct error *ret_error)
{
    char text[24];
    snprintf(text, sizeof text, "%llu", (unsigned long long)number);
    return settings_set(settings, name, text, SOURCE_FLAG, "calypte bench", ret_error);
}

static int open_instance(struct bench *bench, int interrupt_fd, struct error *ret_error)
{
    struct settings *settings = &bench->arguments.settings;
    int status = set_number(settings, "context", (uint64_t)bench->prompt + bench->tokens, ret_error);
    if (status == 0 && bench->prefill)
        status = set_number(settings, "prefill_chunk", bench->chunk, ret_error);
    if (status == 0)
        status = target_open(bench->arguments.operands[0], NULL, settings, interrupt_fd, &bench->target, ret_error);
    if (status == 0)
        status = client_open(&bench->target.instance, "api.ipc", interrupt_fd, &bench->client, ret_error);
    if (status == 0)
        status = bench_disk_open(bench->target.instance.name, bench->arguments.operands[0], settings, interrupt_fd,
                                 &bench->disk, ret_error);
    return status;
}

static int take_counters(struct bench *bench, struct figures *ret_figures, struct error *ret_error)
{
    json_t *stats = NULL;
    int status = client_call(&bench->client, json_pack("{s:s}", "op", "stats"), -1, &stats, ret_error);
    if (status < 0)
        return status;
    for (int i = 0; i < COUNTED_PARTS; i++)
        ret_figures->counted[i] = json_number_value(json_object_get(stats, counted_names[i]));
    for (int p = 0; p < STEP_PARTS; p++) {
        char name[32];
        snprintf(name, sizeof name, "%s_seconds", step_part_name((enum step_part)p));
        ret_figures->part_s[p] = json_number_value(json_object_get(stats, name));
    }
    json_decref(stats);
    return 0;
}

static int open_stream(struct bench *bench, struct error *ret_error)
{
    if (bench->zipf <= 0)
        return 0;
    uint32_t vocab = bench->container->config.vocab;
    bench->stream.cumulated = calloc(vocab, sizeof *bench->stream.cumulated);
    bench->stream.tokens = calloc(bench->tokens, sizeof *bench->stream.tokens);
    if (!bench->stream.cumulated || !bench->stream.tokens)
        return error_set(ret_error, ENOMEM, "no memory for a stream of tokens");
    double sum = 0;
    for (uint32_t rank = 0; rank < vocab; rank++)
        bench->stream.cumulated[rank] = sum += pow(rank + 1, -bench->zipf);
    return 0;
}

static void close_stream(struct token_stream *stream)
{
    free(stream->cumulated);
    free(stream->tokens);
}

static uint32_t next_random(uint32_t *state)
{
    return *state = *state * 1664525u + 1013904223u; /* Numerical Recipes, chapter 7.1 */
}

/* The next run's. Now and then the most frequent token becomes the rarest, and all others rise by a rank. */
static void draw_stream(struct bench *bench, unsigned run)
{
    struct token_stream *stream = &bench->stream;
    uint32_t state = run, vocab = bench->container->config.vocab;
    for (uint32_t t = 0; t < bench->tokens; t++) {
        double share = next_random(&state) * 0x1p-32 * stream->cumulated[vocab - 1];
        uint32_t rank = 0, end = vocab - 1;
        while (rank < end) {
            uint32_t middle = rank + (end - rank) / 2;
            if (stream->cumulated[middle] > share)
                end = middle;
            else
                rank = middle + 1;
        }
        stream->tokens[t] = (uint32_t)((rank + stream->drawn++ / DRIFT_TOKENS) % vocab);
    }
}

/* One request, the prompt and so many tokens of the stream. Prompts of a decode are the same, and all but the last token
 * stays in the session, but each run draws other tokens, so that it uses other experts; prefills differ by `run`.
 * ret_seconds: without those in the queue. */
static int ask(struct bench *bench, unsigned run, uint32_t of_stream, uint32_t max_tokens, double *ret_seconds,
               struct error *ret_error)
{
    uint32_t state = bench->prefill ? run + 1 : 1, vocab = bench->container->config.vocab;
    json_t *tokens = json_array();
    for (uint32_t i = 0; i < bench->prompt; i++)
        json_array_append_new(tokens, json_integer((json_int_t)((uint64_t)next_random(&state) * vocab >> 32)));
    for (uint32_t i = 0; i < of_stream; i++)
        json_array_append_new(tokens, json_integer(bench->stream.tokens[i]));
    json_t *request = json_pack("{s:s, s:o, s:i, s:b}", "op", "generate", "tokens", tokens, "max_tokens",
                                (int)max_tokens, "ignore_eos", 1);
    if (request && !bench->prefill) {
        char session[32];
        snprintf(session, sizeof session, "bench-%d", getpid());
        json_object_set_new(request, "session", json_string(session));
        json_object_set_new(request, "temperature", json_real(1));
        json_object_set_new(request, "seed", json_integer(run));
    }
    json_auto_t *answer = NULL;
    int status = client_call(&bench->client, request, -1, &answer, ret_error);
    const json_t *timing = json_object_get(answer, "timing");
    *ret_seconds =
        json_number_value(json_object_get(timing, "total_s")) - json_number_value(json_object_get(timing, "queue_s"));
    return status;
}

/* Every step of a decode gives a token, also the first one, which computes the last token of the prompt again. */
static int ask_run(struct bench *bench, unsigned run, double *ret_seconds, struct error *ret_error)
{
    if (bench->zipf <= 0)
        return ask(bench, run, 0, bench->tokens, ret_seconds, ret_error);
    draw_stream(bench, run);
    *ret_seconds = 0;
    int status = 0;
    for (uint32_t t = 0; status == 0 && t < bench->tokens; t++) {
        double seconds;
        status = ask(bench, run, t, 1, &seconds, ret_error);
        *ret_seconds += seconds;
    }
    return status;
}

static int measure_run(struct bench *bench, unsigned run, struct figures *ret_figures, struct error *ret_error)
{
    struct figures before;
    double seconds = 0;
    int status = bench_disk_before(bench->disk, ret_error);
    if (status == 0)
        status = take_counters(bench, &before, ret_error);
    if (status == 0)
        status = ask_run(bench, run, &seconds, ret_error);
    if (status == 0)
        status = take_counters(bench, ret_figures, ret_error);
    if (status == 0) {
        for (int i = 0; i < COUNTED_PARTS; i++)
            ret_figures->counted[i] -= before.counted[i];
        for (int p = 0; p < STEP_PARTS; p++)
            ret_figures->part_s[p] -= before.part_s[p];
        ret_figures->tokens_per_s = seconds > 0 ? (bench->prefill ? bench->prompt : bench->tokens) / seconds : 0;
    }
    if (status == 0)
        status = bench_disk_after(bench->disk, &ret_figures->disk, ret_error);
    if (status == 0) {
        double experts = ret_figures->part_s[PART_EXPERTS];
        double rest = ret_figures->counted[COUNTED_STEP_S] - experts - ret_figures->part_s[PART_WAIT];
        ret_figures->expected_s = bench_disk_expected(bench->disk, experts, rest);
    }
    return status;
}

static int measure_runs(struct bench *bench, struct error *ret_error)
{
    double rates[BENCH_RUNS_MAX], reads[BENCH_RUNS_MAX];
    struct figures figures;
    double read = 0, dot = 0;
    /* The first runs fill session and pool. */
    double seconds;
    int status = ask(bench, 0, 0, bench->prefill ? bench->tokens : 1, &seconds, ret_error);
    if (status == 0)
        status = measure_run(bench, 0, &figures, ret_error);
    if (status == 0)
        status = measure_limits(&bench->limits, &read, &dot, ret_error);
    for (unsigned r = 0; status == 0 && r < bench->runs; r++) {
        double read_before = read, dot_before = dot;
        status = measure_run(bench, r + 1, &figures, ret_error);
        if (status == 0)
            status = measure_limits(&bench->limits, &read, &dot, ret_error);
        if (status < 0)
            break;
        figures.read = reads[r] = larger(read_before, read);
        figures.dot = larger(dot_before, dot);
        rates[r] = figures.tokens_per_s;
        if (figures.tokens_per_s > bench->best.tokens_per_s)
            bench->best = figures;
    }
    if (status == 0)
        status = client_ask_supervisor(&bench->target.instance, "status", &bench->status, ret_error);
    if (status == 0) {
        bench->tokens_per_s = bench_spread(rates, bench->runs);
        bench->read = bench_spread(reads, bench->runs);
    }
    return status;
}

/* --- the result --- */

struct result {
    struct bench_volume volume;   /* of the run, all its tokens */
    double tokens;                /* that count */
    double read_limit, dot_limit; /* tokens a second */
    double gmacs;                 /* of the products, in their own time */
};

static struct result result_of(const struct bench *bench)
{
    struct result result = {.tokens = bench->prefill ? bench->prompt : bench->tokens};
    uint32_t topk = (uint32_t)settings_number(&bench->arguments.settings, SETTING_INDEX_TOPK);
    topk = topk ? topk : bench->container->config.index_topk;
    double steps = bench->best.counted[COUNTED_STEPS] > 0 ? bench->best.counted[COUNTED_STEPS] : 1;
    if (bench->prefill) {
        uint32_t rows = (uint32_t)(bench->prompt / steps);
        for (uint32_t done = 0; done < bench->prompt; done += rows) {
            uint32_t now = bench->prompt - done < rows ? bench->prompt - done : rows;
            struct bench_volume step = bench_volume_of(bench->container, now, done + now, topk);
            result.volume.bytes += step.bytes;
            result.volume.macs += step.macs;
        }
    } else {
        for (uint32_t t = 0; t < bench->tokens; t++) {
            struct bench_volume step = bench_volume_of(bench->container, 1, bench->prompt + t, topk);
            result.volume.bytes += step.bytes;
            result.volume.macs += step.macs;
        }
    }
    result.read_limit = bench->best.read * 1e9 * result.tokens / result.volume.bytes;
    result.dot_limit = bench->best.dot * 1e9 * result.tokens / result.volume.macs;
    double matmul = bench->best.counted[COUNTED_MATMUL];
    result.gmacs = matmul > 0 ? result.volume.macs / matmul * 1e-9 : 0;
    return result;
}

static json_t *parts_json(const struct bench *bench)
{
    json_t *parts = json_object();
    for (int p = 0; p < STEP_PARTS; p++) {
        char name[32];
        snprintf(name, sizeof name, "%s_s", step_part_name((enum step_part)p));
        json_object_set_new(parts, name, json_real(bench->best.part_s[p]));
    }
    return parts;
}

/* While at least one demand was outstanding. */
static double disk_gbps(const struct bench *bench)
{
    double busy = bench->best.disk.busy_s;
    return busy > 0 ? bench->best.counted[COUNTED_DISK] / busy * 1e-9 : 0;
}

static void print_json(const struct bench *bench, const struct result *result)
{
    const double *counted = bench->best.counted;
    double limit = result->read_limit < result->dot_limit ? result->read_limit : result->dot_limit;
    char cpu[128];
    bench_cpu_name(cpu, sizeof cpu);
    const struct disk_run *run = &bench->best.disk;
    bool measured = run->bytes_per_s > 0;
    json_t *disk =
        json_pack("{s:I, s:f, s:f, s:o, s:o}", "bytes", (json_int_t)counted[COUNTED_DISK], "demand_s", run->busy_s,
                  "gbps", disk_gbps(bench), "iobench_gbps", measured ? json_real(run->bytes_per_s * 1e-9) : json_null(),
                  "expected_steps_s", measured ? json_real(bench->best.expected_s) : json_null());
    json_t *pool =
        json_pack("{s:O?, s:I, s:I}", "slots", json_object_get(json_object_get(bench->status, "pool"), "slots"), "hits",
                  (json_int_t)counted[COUNTED_HITS], "misses", (json_int_t)counted[COUNTED_MISSES]);
    json_t *matmul = json_pack("{s:f, s:f, s:f, s:s, s:f, s:f}", "s", counted[COUNTED_MATMUL], "share_of_steps",
                               counted[COUNTED_STEP_S] > 0 ? counted[COUNTED_MATMUL] / counted[COUNTED_STEP_S] : 0.0,
                               "gmacs", result->gmacs, "instruction", bench->limits.peak->dot, "limit", bench->best.dot,
                               "share", bench->best.dot > 0 ? result->gmacs / bench->best.dot : 0.0);
    json_auto_t *object =
        json_pack("{s:f, s:f, s:f, s:f, s:s, s:o, s:f, s:f, s:f, s:o, s:o, s:o}", "tokens_per_s",
                  bench->best.tokens_per_s, "bytes_per_token", result->volume.bytes / result->tokens,
                  "limit_tokens_per_s", limit, "share", limit > 0 ? bench->best.tokens_per_s / limit : 0.0, "bound",
                  result->read_limit < result->dot_limit ? "read bandwidth" : bench->limits.peak->dot, "parts",
                  parts_json(bench), "steps_s", counted[COUNTED_STEP_S], "flight_s", counted[COUNTED_FLIGHT], "front_s",
                  counted[COUNTED_FRONT], "matmul", matmul, "disk", disk, "pool", pool);
    json_object_update_new(
        object,
        json_pack("{s:s, s:s, s:i, s:i, s:i, s:f, s:o, s:f, s:o, s:I}", "cpu", cpu, "isa", bench->limits.peak->set,
                  "threads", (int)bench->limits.threads, bench->prefill ? "rows" : "context", (int)bench->prompt,
                  "tokens", (int)result->tokens, "read_gbps", bench->best.read, "read_spread",
                  bench_spread_json(&bench->read), "macs_per_token", result->volume.macs / result->tokens, "spread",
                  bench_spread_json(&bench->tokens_per_s), "steps", (json_int_t)counted[COUNTED_STEPS]));
    if (bench->zipf > 0)
        json_object_set_new(object, "zipf", json_real(bench->zipf));
    json_object_set(object, "workers", json_object_get(bench->status, "workers"));
    json_object_set(object, "worker_threads", json_object_get(bench->status, "threads"));
    json_dumpf(object, stdout, JSON_INDENT(1));
    putchar('\n');
}

static void print_lines(const struct bench *bench, const struct result *result)
{
    const double *counted = bench->best.counted;
    double steps = counted[COUNTED_STEPS] > 0 ? counted[COUNTED_STEPS] : 1;
    char cpu[128];
    bench_cpu_name(cpu, sizeof cpu);
    printf("cpu       %s, %u threads, kernels %s\n", cpu, bench->limits.threads, bench->limits.peak->set);
    printf("speed     %.2f tokens/s (%.2f to %.2f in %u run%s of %.0f tokens %s %u)\n", bench->best.tokens_per_s,
           bench->tokens_per_s.least, bench->tokens_per_s.most, bench->tokens_per_s.runs,
           bench->tokens_per_s.runs == 1 ? "" : "s", result->tokens, bench->prefill ? "of a prompt of" : "after",
           bench->prompt);
    printf("memory    %.2f MB a token, at %.2f GB/s (%.2f to %.2f) at most %.2f tokens/s: %.1f %%\n",
           result->volume.bytes / result->tokens * 1e-6, bench->best.read, bench->read.least, bench->read.most,
           result->read_limit, 100 * bench->best.tokens_per_s / result->read_limit);
    printf("matmul    %.2f GMAC a token, at %.1f GMAC/s (%s) at most %.2f tokens/s: %.1f %%\n",
           result->volume.macs / result->tokens * 1e-9, bench->best.dot, bench->limits.peak->dot, result->dot_limit,
           100 * bench->best.tokens_per_s / result->dot_limit);
    printf("          %.1f %% of the steps' time, %.1f GMAC/s in it: %.1f %%\n",
           counted[COUNTED_STEP_S] > 0 ? 100 * counted[COUNTED_MATMUL] / counted[COUNTED_STEP_S] : 0.0, result->gmacs,
           bench->best.dot > 0 ? 100 * result->gmacs / bench->best.dot : 0.0);
    printf("a step    %.3f ms:", 1e3 * counted[COUNTED_STEP_S] / steps);
    for (int p = 0; p < STEP_PARTS; p++)
        if (bench->best.part_s[p] > 0)
            printf(" %s %.3f", step_part_name((enum step_part)p), 1e3 * bench->best.part_s[p] / steps);
    printf("\nbetween   %.3f ms in the front, %.3f ms in messages\n", 1e3 * counted[COUNTED_FRONT] / steps,
           1e3 * (counted[COUNTED_FLIGHT] - counted[COUNTED_STEP_S]) / steps);
    printf("experts   %.0f hits, %.0f misses, %.1f MB from disk\n", counted[COUNTED_HITS], counted[COUNTED_MISSES],
           counted[COUNTED_DISK] * 1e-6);
    const struct disk_run *run = &bench->best.disk;
    if (run->bytes_per_s <= 0)
        return;
    printf("disk      %.2f GB/s in the %.2f s with a demand outstanding; iobench %.2f GB/s: %.1f %%\n",
           disk_gbps(bench), run->busy_s, run->bytes_per_s * 1e-9, 100 * disk_gbps(bench) / (run->bytes_per_s * 1e-9));
    printf("          the steps took %.3f times their parts (%.3f ms a step where reads hide products and products "
           "reads)\n",
           counted[COUNTED_STEP_S] / bench->best.expected_s, 1e3 * bench->best.expected_s / steps);
}

static int run(struct bench *bench, int interrupt_fd, struct error *ret_error)
{
    int status = container_open(bench->arguments.operands[0], &bench->container, ret_error);
    if (status == 0)
        status = open_stream(bench, ret_error);
    if (status == 0)
        status = open_limits(bench, interrupt_fd, ret_error);
    if (status == 0)
        status = open_instance(bench, interrupt_fd, ret_error);
    if (status == 0)
        status = measure_runs(bench, ret_error);
    bench_disk_close(bench->disk);
    client_close(&bench->client);
    target_close(&bench->target);
    close_limits(&bench->limits);
    if (status == 0) {
        struct result result = result_of(bench);
        if (bench->arguments.values[FLAG_JSON])
            print_json(bench, &result);
        else
            print_lines(bench, &result);
    }
    json_decref(bench->status);
    close_stream(&bench->stream);
    container_close(bench->container);
    return status;
}

static int bench_model(struct bench *bench, uint64_t prompt, uint64_t tokens)
{
    uint64_t runs = 5;
    struct error error = {{0}};
    bench->seconds = 0.2;
    bench->megabytes = BENCH_WEIGHT_BYTES >> 20;
    if (arguments_integer(&bench->arguments, FLAG_RUNS, 1, BENCH_RUNS_MAX, &runs) ||
        arguments_real(&bench->arguments, FLAG_SECONDS, 1e-4, 60, &bench->seconds) ||
        arguments_integer(&bench->arguments, FLAG_BYTES, 1, 1 << 20, &bench->megabytes))
        return EXIT_USAGE;
    bench->prompt = (uint32_t)prompt;
    bench->tokens = (uint32_t)tokens;
    bench->runs = (unsigned)runs;
    _cleanup_close_ int interrupt_fd = interrupt_open();
    int status = run(bench, interrupt_fd, &error);
    if (status == -EINTR)
        return EXIT_INTERRUPTED;
    return status < 0 ? usage_failed(bench->command, "%s", error.text) : EXIT_DONE;
}

int bench_decode(int argc, char **argv)
{
    struct bench bench = {.command = decode_syntax.command};
    uint64_t context = 512, tokens = 64;
    int code = arguments_parse(&decode_syntax, argc, argv, &bench.arguments);
    if (code != ARGUMENTS_GO_ON)
        return code;
    if (arguments_integer(&bench.arguments, FLAG_CONTEXT, 2, 1u << 23, &context) ||
        arguments_integer(&bench.arguments, FLAG_TOKENS, 2, 1u << 20, &tokens) ||
        arguments_real(&bench.arguments, FLAG_ZIPF, 0.1, 10, &bench.zipf))
        return EXIT_USAGE;
    return bench_model(&bench, context, tokens);
}

int bench_prefill(int argc, char **argv)
{
    struct bench bench = {.command = prefill_syntax.command, .prefill = true};
    uint64_t rows = 512;
    int code = arguments_parse(&prefill_syntax, argc, argv, &bench.arguments);
    if (code != ARGUMENTS_GO_ON)
        return code;
    if (arguments_integer(&bench.arguments, FLAG_ROWS, 2, 1u << 23, &rows))
        return EXIT_USAGE;
    uint64_t chunk = rows < CHUNK_MOST ? rows : CHUNK_MOST;
    if (arguments_integer(&bench.arguments, FLAG_CHUNK, 1, CHUNK_MOST, &chunk))
        return EXIT_USAGE;
    bench.chunk = (uint32_t)chunk;
    return bench_model(&bench, rows, 1);
}
