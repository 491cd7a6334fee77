/* calypte-iod: the process that owns the container's files and every byte of weights that enters shared memory. */
#include "io_daemon/loader.h"
#include "proto/cleanup.h"
#include "proto/heritage.h"

#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/signalfd.h>

static void log_to_stderr(const char *line)
{
    fprintf(stderr, "calypte-iod: %s\n", line);
}

/* SIGTERM becomes a readable descriptor. A Ctrl-C reaches every process of the terminal's group; under a supervisor it
 * is the supervisor that says when to end. Before the first thread, so that all inherit the mask. */
static int open_signals(bool supervised)
{
    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, SIGTERM);
    if (supervised)
        signal(SIGINT, SIG_IGN);
    else
        sigaddset(&signals, SIGINT);
    signal(SIGPIPE, SIG_IGN);
    sigprocmask(SIG_BLOCK, &signals, NULL);
    return signalfd(-1, &signals, SFD_CLOEXEC | SFD_NONBLOCK);
}

static int fail(struct heritage *heritage, const char *text)
{
    if (heritage->notify_fd >= 0)
        log_to_stderr(text); /* without a pipe the notice itself goes to stderr */
    heritage_notify(heritage, text);
    return EXIT_FAILURE;
}

int main(int argc, char **argv)
{
    struct heritage heritage;
    struct error error;
    if (heritage_parse(argc, argv, &heritage, &error) < 0) {
        log_to_stderr(error.text);
        return 2;
    }
    _cleanup_close_ int stop_fd = open_signals(heritage.parent > 0);
    if (stop_fd < 0 || heritage_bind_life(&heritage, &error) < 0)
        return fail(&heritage, stop_fd < 0 ? "signals cannot be received" : error.text);

    struct loader_options options = {.instance = heritage.instance,
                                     .rundir = heritage.rundir,
                                     .doorbell_fd = heritage.doorbell_fd,
                                     .stop_fd = stop_fd,
                                     .log = log_to_stderr};
    struct loader *loader;
    int status = loader_open(&options, &loader, &error);
    if (status == -ECANCELED)
        return EXIT_SUCCESS;
    if (status < 0)
        return fail(&heritage, error.text);
    heritage_notify(&heritage, NULL);
    status = loader_run(loader, &error);
    if (status < 0)
        log_to_stderr(error.text);
    loader_close(loader);
    return status < 0 ? EXIT_FAILURE : EXIT_SUCCESS;
}
