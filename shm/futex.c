#include "shm/futex.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

int futex_wait(_Atomic uint32_t *word, uint32_t expected, int timeout_ms)
{
    struct timespec timeout = {timeout_ms / 1000, (long)(timeout_ms % 1000) * 1000000};
    if (syscall(SYS_futex, word, FUTEX_WAIT, expected, timeout_ms < 0 ? NULL : &timeout, NULL, 0) == 0)
        return 0;
    return errno == EAGAIN ? 0 : -errno; /* EAGAIN: the word differs already */
}

void futex_wake_all(_Atomic uint32_t *word)
{
    syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}
