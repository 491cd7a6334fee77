#include "cmd/convert/progress.h"

#include "cmd/cli/commands.h"
#include "cmd/cli/usage.h"
#include "cmd/convert/report.h"
#include "proto/cleanup.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#define LINE_SECONDS 5.0 /* between progress lines where there is no terminal */

/* Progress of a run, drawn by the thread that called convert_run. */
struct progress {
    struct convert_watch watch; /* first, so that the callbacks can get back to the rest */
    const char *command;
    struct timespec started;
    double last_line; /* seconds since the start */
    bool terminal, drawn;
    sigset_t stops; /* signals that ask to stop */
    int signal;     /* the one that came */
};

unsigned progress_usable_cpus(void)
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
    double done = (double)atomic_load(&progress->watch.bytes_done),
           total = (double)atomic_load(&progress->watch.bytes_total);
    if (total <= 0 || (!progress->terminal && seconds - progress->last_line < LINE_SECONDS))
        return;
    progress->last_line = seconds;
    double rate = seconds > 0 ? done / seconds : 0, share = done < total ? done / total : 1;
    char left[32] = "";
    if (rate > 0 && done < total) {
        unsigned wait = (unsigned)((total - done) / rate + 1);
        snprintf(left, sizeof left, ", %u:%02u:%02u left", wait / 3600, wait / 60 % 60, wait % 60);
    }
    char text[160];
    snprintf(text, sizeof text, "%5.1f %%  %.2f of %.2f GB, %.0f MB/s%s", share * 100, done / 1e9, total / 1e9,
             rate / 1e6, left);
    if (!progress->terminal) {
        fprintf(stderr, "%s: %s\n", progress->command, text);
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
    draw(progress);
}

static void note(struct convert_watch *watch, const char *line)
{
    struct progress *progress = (struct progress *)watch;
    clear_bar(progress);
    fprintf(stderr, "%s: %s\n", progress->command, line);
}

int progress_run(const char *command, const struct plan *plan, const char *destination, unsigned jobs, bool json)
{
    struct progress progress = {.command = command,
                                .watch = {.tick = tick, .note = note},
                                .terminal = isatty(STDERR_FILENO),
                                .stops = stop_signals()};
    clock_gettime(CLOCK_MONOTONIC, &progress.started);
    sigset_t before;
    pthread_sigmask(SIG_BLOCK, &progress.stops, &before);

    struct error error = {{0}};
    enum convert_result result = CONVERT_DONE;
    int status = convert_run(plan, destination, jobs, &progress.watch, &result, &error);
    tick(&progress.watch);
    clear_bar(&progress);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (progress.signal && status == -EINTR) {
        fprintf(stderr, "calypte %s: interrupted; run the same command again to go on\n", command);
        return progress.signal == SIGINT ? EXIT_INTERRUPTED : 128 + progress.signal;
    }
    if (status < 0)
        return usage_failed(command, "%s", error.text);
    if (result == CONVERT_WAS_DONE)
        fprintf(stderr, "%s: %s: holds this container already, nothing to do\n", command, destination);
    else
        fprintf(stderr, "%s: %s: done in %.1f s\n", command, destination, seconds_since(&progress.started));
    if (json)
        report_plan(plan, true, stdout);
    return EXIT_DONE;
}
