/* calypte convert: flags, progress, signals. */
#include "cmd/cli/commands.h"
#include "cmd/cli/usage.h"
#include "cmd/convert/convert.h"
#include "cmd/convert/report.h"
#include "proto/cleanup.h"
#include "proto/container.h"

#include <sched.h>
#include <signal.h>
#include <string.h>
#include <time.h>

#define JOBS_MAX 1024u
#define LINE_SECONDS 5.0 /* between progress lines where there is no terminal */

enum { FLAG_EXPERTS, FLAG_DENSE, FLAG_QK_NORM_EPS, FLAG_JOBS, FLAG_PLAN, FLAG_JSON };

static const struct flag flags[] = {
    [FLAG_EXPERTS] = {"--experts", NULL, "int4|int8", "format of the experts, the MTP layer's too (default int4)"},
    [FLAG_DENSE] = {"--dense", NULL, "int8|int4", "format of the other matrices (default int8); in the MTP layer int8 always"},
    [FLAG_QK_NORM_EPS] = {"--qk-norm-eps", NULL, "X", "epsilon of the norms behind q_a_proj and kv_a_proj (default 1e-6)"},
    [FLAG_JOBS] = {"--jobs", NULL, "N", "threads (default: the CPUs that this process may use)"},
    [FLAG_PLAN] = {"--plan", NULL, NULL, "print sizes and formats, write nothing (DST may be left out)"},
    [FLAG_JSON] = {"--json", NULL, NULL, "print the result as JSON"},
    {NULL, NULL, NULL, NULL},
};

static const struct command_line syntax = {
    .command = "convert",
    .operands = "SRC DST",
    .summary = "Makes the container DST from the Hugging Face checkpoint in the folder SRC, which is only read.",
    .details = "A conversion that was interrupted goes on where it was when the same command is given again, and gives the same bytes.\n"
               "Each thread holds a few rows of one tensor, or one expert, in memory.",
    .flags = flags,
    .least_operands = 1,
    .most_operands = 2,
};

/* Progress of a run, drawn by the thread that called convert_run. */
struct progress {
    struct convert_watch watch; /* first, so that the callbacks can get back to the rest */
    struct timespec started;
    double last_line; /* seconds since the start */
    bool terminal, drawn, on;
    int signal; /* that asked to stop */
};

static unsigned usable_cpus(void)
{
    cpu_set_t set;
    int count = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
    return count > 0 ? (unsigned)count : 1;
}

static double seconds_since(const struct timespec *start)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)(now.tv_sec - start->tv_sec) + (double)(now.tv_nsec - start->tv_nsec) * 1e-9;
}

static void clear_bar(struct progress *progress)
{
    if (progress->drawn)
        fputs("\r\033[K", stderr);
    progress->drawn = false;
}

static void draw(struct progress *progress)
{
    double seconds = seconds_since(&progress->started);
    double done = (double)atomic_load(&progress->watch.bytes_done), total = (double)atomic_load(&progress->watch.bytes_total);
    if (!progress->on || total <= 0 || (!progress->terminal && seconds - progress->last_line < LINE_SECONDS))
        return;
    progress->last_line = seconds;
    double rate = seconds > 0 ? done / seconds : 0, share = done < total ? done / total : 1;
    char left[32] = "";
    if (rate > 0 && done < total) {
        unsigned wait = (unsigned)((total - done) / rate + 1);
        snprintf(left, sizeof left, ", %u:%02u:%02u left", wait / 3600, wait / 60 % 60, wait % 60);
    }
    char text[160];
    snprintf(text, sizeof text, "%5.1f %%  %.2f of %.2f GB, %.0f MB/s%s", share * 100, done / 1e9, total / 1e9, rate / 1e6, left);
    if (!progress->terminal) {
        fprintf(stderr, "convert: %s\n", text);
        return;
    }
    char bar[25];
    for (int i = 0; i < 24; i++)
        bar[i] = i < (int)(share * 24) ? '#' : '.';
    bar[24] = '\0';
    fprintf(stderr, "\r[%s] %s\033[K", bar, text);
    fflush(stderr);
    progress->drawn = true;
}

/* The signals that ask to stop are blocked, so they wait here until they are asked for. */
static void tick(struct convert_watch *watch)
{
    struct progress *progress = (struct progress *)watch;
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGINT);
    sigaddset(&set, SIGTERM);
    int got = sigtimedwait(&set, NULL, &(struct timespec){0});
    if (got > 0) {
        progress->signal = got;
        atomic_store(&watch->stop, true);
    }
    draw(progress);
}

static void note(struct convert_watch *watch, const char *line)
{
    clear_bar((struct progress *)watch);
    fprintf(stderr, "convert: %s\n", line);
}

static int parse_format(const struct arguments *arguments, size_t flag, enum weight_format *ret_format)
{
    const char *value = arguments->values[flag];
    if (!value)
        return 0;
    *ret_format = weight_format_parse(value);
    return *ret_format ? 0 : usage_error("convert", "%s %s is not a format, it is int4 or int8", flags[flag].name, value);
}

static int parse_options(const struct arguments *arguments, struct plan_options *ret_options, unsigned *ret_jobs)
{
    *ret_options = (struct plan_options){.experts = WEIGHT_INT4, .dense = WEIGHT_INT8, .qk_norm_eps = 1e-6};
    uint64_t jobs = usable_cpus();
    int status = parse_format(arguments, FLAG_EXPERTS, &ret_options->experts);
    if (status == 0)
        status = parse_format(arguments, FLAG_DENSE, &ret_options->dense);
    if (status == 0)
        status = arguments_real(arguments, FLAG_QK_NORM_EPS, 1e-12, 0.1, &ret_options->qk_norm_eps);
    if (status == 0)
        status = arguments_integer(arguments, FLAG_JOBS, 1, JOBS_MAX, &jobs);
    if (status == 0 && arguments->operand_count < 2 && !arguments->values[FLAG_PLAN])
        status = usage_error("convert", "DST is missing: calypte convert SRC DST");
    *ret_jobs = (unsigned)jobs;
    return status;
}

/* At most a few of the notes: a checkpoint may hold thousands of tensors of one kind that are not needed. */
static void print_notes(const struct checkpoint *checkpoint)
{
    const size_t most = 8;
    for (size_t i = 0; i < checkpoint->note_count && i < most; i++)
        fprintf(stderr, "convert: %s\n", checkpoint->notes[i]);
    if (checkpoint->note_count > most)
        fprintf(stderr, "convert: %zu more tensors ignored\n", checkpoint->note_count - most);
}

static int run(const struct plan *plan, const char *destination, unsigned jobs, bool json)
{
    struct progress progress = {
        .watch = {.tick = tick, .note = note}, .terminal = isatty(STDERR_FILENO), .on = true};
    clock_gettime(CLOCK_MONOTONIC, &progress.started);
    sigset_t set, before;
    sigemptyset(&set);
    sigaddset(&set, SIGINT);
    sigaddset(&set, SIGTERM);
    pthread_sigmask(SIG_BLOCK, &set, &before);

    struct error error = {{0}};
    enum convert_result result = CONVERT_DONE;
    int status = convert_run(plan, destination, jobs, &progress.watch, &result, &error);
    tick(&progress.watch);
    clear_bar(&progress);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (progress.signal && status == -EINTR) {
        fputs("calypte convert: interrupted; run the same command again to go on\n", stderr);
        return progress.signal == SIGINT ? EXIT_INTERRUPTED : 128 + progress.signal;
    }
    if (status < 0)
        return usage_failed("convert", "%s", error.text);
    if (result == CONVERT_WAS_DONE)
        fprintf(stderr, "convert: %s: holds this container already, nothing to do\n", destination);
    else
        fprintf(stderr, "convert: %s: done in %.1f s\n", destination, seconds_since(&progress.started));
    if (json)
        report_plan(plan, true, stdout);
    return EXIT_DONE;
}

int cmd_convert(int argc, char **argv)
{
    struct arguments arguments;
    struct plan_options options;
    unsigned jobs;
    int status = arguments_parse(&syntax, argc, argv, &arguments);
    if (status != ARGUMENTS_GO_ON)
        return status;
    status = parse_options(&arguments, &options, &jobs);
    if (status != 0)
        return status;
    struct error error = {{0}};
    _cleanup_(checkpoint_close) struct checkpoint checkpoint = {0};
    _cleanup_(plan_free) struct plan plan = {0};
    if (checkpoint_open(arguments.operands[0], &checkpoint, &error) < 0 || plan_make(&checkpoint, &options, &plan, &error) < 0)
        return usage_failed("convert", "%s", error.text);
    print_notes(&checkpoint);
    if (!arguments.values[FLAG_PLAN])
        return run(&plan, arguments.operands[1], jobs, arguments.values[FLAG_JSON] != NULL);
    report_plan(&plan, arguments.values[FLAG_JSON] != NULL, stdout);
    return EXIT_DONE;
}
