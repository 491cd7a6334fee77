/* calypte-front: tokens, sessions, scheduling and the request socket. Started by the supervisor (proto/heritage.h). */
#include "cmd/front/server.h"
#include "proto/cleanup.h"

#include <signal.h>
#include <string.h>
#include <sys/signalfd.h>

static int fail(struct heritage *heritage, const struct error *error)
{
    fprintf(stderr, "calypte-front: %s\n", error->text);
    if (heritage->notify_fd >= 0)
        heritage_notify(heritage, error->text);
    return 1;
}

int main(int argc, char **argv)
{
    struct heritage heritage;
    struct error error;
    if (heritage_parse(argc, argv, &heritage, &error) < 0) {
        fprintf(stderr, "calypte-front: %s\n", error.text);
        return 2;
    }
    if (heritage_bind_life(&heritage, &error) < 0)
        return fail(&heritage, &error);

    /* Blocked: they come through the descriptor alone. */
    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, SIGTERM);
    sigaddset(&signals, SIGINT);
    sigprocmask(SIG_BLOCK, &signals, NULL);
    signal(SIGPIPE, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN); /* a file that may not grow is an error of that request */
    _cleanup_close_ int signal_fd = signalfd(-1, &signals, SFD_CLOEXEC);
    if (signal_fd < 0) {
        error_set(&error, errno, "cannot make a signalfd: %s", strerror(errno));
        return fail(&heritage, &error);
    }

    struct front *front;
    if (server_open(&heritage, &front, &error) < 0)
        return fail(&heritage, &error);
    heritage_notify(&heritage, NULL);
    int status = server_run(front, &heritage, signal_fd, &error);
    server_close(front);
    return status < 0 ? fail(&heritage, &error) : 0;
}
