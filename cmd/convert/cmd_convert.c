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

static const char help[] =
    "usage: calypte convert [FLAGS] SRC DST\n"
    "\n"
    "Makes a Calypte container DST from the Hugging Face checkpoint in folder SRC. SRC is only read. A conversion that was\n"
    "interrupted goes on where it was when the same command is given again, and gives the same bytes.\n"
    "\n"
    "  --experts int4|int8   format of the experts (default int4)\n"
    "  --dense int8|int4     format of the other matrices (default int8); the MTP layer's are always int8\n"
    "  --qk-norm-eps X       epsilon of the norms after q_a_proj and kv_a_proj (default 1e-6)\n"
    "  --jobs N              threads (default: the CPUs this process may use); each holds one tensor's rows or one expert\n"
    "  --plan                print sizes and formats, write nothing (DST may be left out)\n"
    "  --json                print the result as JSON\n"
    "  --help                this text\n";

static const char *const flags[] = {"--experts", "--dense", "--qk-norm-eps", "--jobs", "--plan", "--json", "--help"};
static const char *const value_flags[] = {"--experts", "--dense", "--qk-norm-eps", "--jobs"};

struct arguments {
    struct plan_options options;
    unsigned jobs;
    bool plan, json, help;
    const char *source, *destination;
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

static int parse_value(struct arguments *arguments, const char *flag, const char *value)
{
    char *end;
    if (!strcmp(flag, "--experts") || !strcmp(flag, "--dense")) {
        enum weight_format format = weight_format_parse(value);
        if (!format)
            return usage_error("convert", "%s %s is not a format, it is int4 or int8", flag, value);
        *(flag[2] == 'e' ? &arguments->options.experts : &arguments->options.dense) = format;
    } else if (!strcmp(flag, "--jobs")) {
        unsigned long jobs = strtoul(value, &end, 10);
        if (*value < '0' || *value > '9' || *end || jobs < 1 || jobs > JOBS_MAX)
            return usage_error("convert", "--jobs %s is not a number from 1 to %u", value, JOBS_MAX);
        arguments->jobs = (unsigned)jobs;
    } else {
        double eps = strtod(value, &end);
        if (end == value || *end || !(eps > 0 && eps <= 0.1))
            return usage_error("convert", "--qk-norm-eps %s is not a number over 0 up to 0.1", value);
        arguments->options.qk_norm_eps = eps;
    }
    return 0;
}

static bool takes_value(const char *flag, size_t length)
{
    for (size_t i = 0; i < sizeof value_flags / sizeof value_flags[0]; i++) {
        if (strlen(value_flags[i]) == length && !strncmp(value_flags[i], flag, length))
            return true;
    }
    return false;
}

/* One argument that is a flag; *i moves on when it takes the next one as its value. */
static int parse_flag(struct arguments *arguments, int argc, char **argv, int *i)
{
    const char *flag = argv[*i], *equals = strchr(flag, '=');
    size_t length = equals ? (size_t)(equals - flag) : strlen(flag);
    if (takes_value(flag, length)) {
        char name[32];
        snprintf(name, sizeof name, "%.*s", (int)length, flag);
        const char *value = equals ? equals + 1 : argv[*i + 1];
        if (!equals && *i + 1 >= argc)
            return usage_error("convert", "%s needs a value", name);
        *i += !equals;
        return parse_value(arguments, name, value);
    }
    if (!strcmp(flag, "--plan"))
        arguments->plan = true;
    else if (!strcmp(flag, "--json"))
        arguments->json = true;
    else if (!strcmp(flag, "--help") || !strcmp(flag, "-h"))
        arguments->help = true;
    else
        return usage_unknown_flag("convert", flag, flags, sizeof flags / sizeof flags[0]);
    return 0;
}

static int parse_arguments(int argc, char **argv, struct arguments *ret_arguments)
{
    struct arguments arguments = {.options = {.experts = WEIGHT_INT4, .dense = WEIGHT_INT8}, .jobs = usable_cpus()};
    bool only_paths = false;
    for (int i = 1; i < argc; i++) {
        int status = 0;
        if (!only_paths && !strcmp(argv[i], "--"))
            only_paths = true;
        else if (!only_paths && argv[i][0] == '-' && argv[i][1])
            status = parse_flag(&arguments, argc, argv, &i);
        else if (!arguments.source)
            arguments.source = argv[i];
        else if (!arguments.destination)
            arguments.destination = argv[i];
        else
            return usage_error("convert", "%s is one argument too many: it takes SRC and DST", argv[i]);
        if (status != 0)
            return status;
    }
    if (!arguments.help && (!arguments.source || (!arguments.destination && !arguments.plan)))
        return usage_error("convert", "%s is missing: calypte convert SRC DST", arguments.source ? "DST" : "SRC");
    *ret_arguments = arguments;
    return 0;
}

static int fail(const char *what, const struct error *error)
{
    fprintf(stderr, "calypte %s: %s\n", what, error->text);
    return EXIT_FAILED;
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

static int run(const struct plan *plan, const struct arguments *arguments)
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
    int status = convert_run(plan, arguments->destination, arguments->jobs, &progress.watch, &result, &error);
    tick(&progress.watch);
    clear_bar(&progress);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (progress.signal && status == -EINTR) {
        fputs("calypte convert: interrupted; run the same command again to go on\n", stderr);
        return progress.signal == SIGINT ? EXIT_INTERRUPTED : 128 + progress.signal;
    }
    if (status < 0)
        return fail("convert", &error);
    if (result == CONVERT_WAS_DONE)
        fprintf(stderr, "convert: %s: holds this container already, nothing to do\n", arguments->destination);
    else
        fprintf(stderr, "convert: %s: done in %.1f s\n", arguments->destination, seconds_since(&progress.started));
    if (arguments->json)
        report_plan(plan, true, stdout);
    return EXIT_DONE;
}

int cmd_convert(int argc, char **argv)
{
    struct arguments arguments;
    int status = parse_arguments(argc, argv, &arguments);
    if (status != 0)
        return status;
    if (arguments.help) {
        fputs(help, stdout);
        return EXIT_DONE;
    }
    struct error error = {{0}};
    _cleanup_(checkpoint_close) struct checkpoint checkpoint = {0};
    _cleanup_(plan_free) struct plan plan = {0};
    if (checkpoint_open(arguments.source, &checkpoint, &error) < 0 ||
        plan_make(&checkpoint, &arguments.options, &plan, &error) < 0)
        return fail("convert", &error);
    print_notes(&checkpoint);
    if (!arguments.plan)
        return run(&plan, &arguments);
    report_plan(&plan, arguments.json, stdout);
    return EXIT_DONE;
}
