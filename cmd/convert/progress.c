#include "cmd/convert/progress.h"

#include "cmd/cli/bar.h"
#include "cmd/cli/commands.h"
#include "cmd/cli/usage.h"
#include "cmd/convert/report.h"
#include "proto/cleanup.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

/* Progress of a run, drawn by the thread that called convert_run. */
struct progress {
    struct convert_watch watch; /* first, so that the callbacks can get back to the rest */
    struct bar bar;
    sigset_t stops; /* signals that ask to stop */
    int signal;     /* the one that came */
};

unsigned progress_usable_cpus(void)
{
    cpu_set_t set;
    int count = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
    return count > 0 ? (unsigned)count : 1;
}

/* The signals that ask to stop: not those which the caller made us ignore, as a shell does for SIGINT in the
 * background. */
static sigset_t stop_signals(void)
{
    static const int signals[] = {SIGINT, SIGTERM};
    sigset_t set;
    sigemptyset(&set);
    for (size_t i = 0; i < sizeof signals / sizeof signals[0]; i++) {
        struct sigaction action;
        if (sigaction(signals[i], NULL, &action) == 0 && action.sa_handler != SIG_IGN)
            sigaddset(&set, signals[i]);
    }
    return set;
}

/* The signals are blocked, so they wait until they are asked for here. */
static void tick(struct convert_watch *watch)
{
    struct progress *progress = (struct progress *)watch;
    int got = sigtimedwait(&progress->stops, NULL, &(struct timespec){0});
    if (got > 0) {
        progress->signal = got;
        atomic_store(&watch->stop, true);
    }
    bar_draw(&progress->bar, (double)atomic_load(&watch->bytes_done), (double)atomic_load(&watch->bytes_total));
}

static void note(struct convert_watch *watch, const char *line)
{
    struct progress *progress = (struct progress *)watch;
    bar_clear(&progress->bar);
    fprintf(stderr, "%s: %s\n", progress->bar.command, line);
}

int progress_run(const char *command, const struct plan *plan, const char *const *paths, unsigned jobs, bool json)
{
    struct progress progress = {.watch = {.tick = tick, .note = note}, .stops = stop_signals()};
    bar_begin(command, 0, &progress.bar);
    sigset_t before;
    pthread_sigmask(SIG_BLOCK, &progress.stops, &before);

    struct error error = {{0}};
    enum convert_result result = CONVERT_DONE;
    int status = convert_run(plan, paths, jobs, &progress.watch, &result, &error);
    tick(&progress.watch);
    bar_clear(&progress.bar);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (progress.signal && status == -EINTR) {
        fprintf(stderr, "calypte %s: interrupted; run the same command again to go on\n", command);
        return progress.signal == SIGINT ? EXIT_INTERRUPTED : 128 + progress.signal;
    }
    if (status < 0)
        return usage_failed(command, "%s", error.text);
    if (result == CONVERT_WAS_DONE)
        fprintf(stderr, "%s: %s: holds this container already, nothing to do\n", command, paths[0]);
    else
        fprintf(stderr, "%s: %s: done in %.1f s\n", command, paths[0], bar_seconds(&progress.bar));
    if (json)
        report_plan(plan, true, stdout);
    return EXIT_DONE;
}

int progress_paths(const struct arguments *arguments, const char *command, size_t flag, const char **ret_paths,
                   uint32_t *ret_stripes)
{
    uint32_t count = 1;
    ret_paths[0] = arguments->operands[arguments->operand_count - 1];
    for (size_t i = 0; i < arguments->given_count; i++) {
        if (arguments->given[i].flag != flag)
            continue;
        if (count == EXPERT_SLICES)
            return usage_error(command, "--stripe: an expert has %u slices, so %u folders with DST are the most",
                               EXPERT_SLICES, EXPERT_SLICES);
        ret_paths[count++] = arguments->given[i].value;
    }
    *ret_stripes = count;
    return 0;
}
