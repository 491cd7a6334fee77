#include "cmd/cli/interrupt.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <sys/signalfd.h>

int interrupt_open(void)
{
    sigset_t signals;
    struct sigaction hangup;
    sigemptyset(&signals);
    sigaddset(&signals, SIGINT);
    sigaddset(&signals, SIGTERM);
    if (sigaction(SIGHUP, NULL, &hangup) < 0 || hangup.sa_handler != SIG_IGN) /* nohup means what it says */
        sigaddset(&signals, SIGHUP);
    int fd = signalfd(-1, &signals, SFD_CLOEXEC | SFD_NONBLOCK);
    if (fd < 0)
        return -errno;
    sigaddset(&signals, SIGPIPE);
    sigprocmask(SIG_BLOCK, &signals, NULL);
    return fd;
}

enum interrupt_wait interrupt_wait(int interrupt_fd, int fd, int timeout_ms)
{
    struct pollfd fds[] = {{.fd = interrupt_fd, .events = POLLIN}, {.fd = fd, .events = POLLIN}};
    int ready;
    do
        ready = poll(fds, 2, timeout_ms);
    while (ready < 0 && errno == EINTR);
    if (fds[0].revents)
        return WAIT_INTERRUPTED;
    return ready > 0 ? WAIT_READY : WAIT_TIMEOUT;
}
