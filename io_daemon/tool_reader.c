#include "io_daemon/tool_reader.h"

#include "shm/control.h"

#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

int tool_reader_open(uint32_t io, int stop_fd, uint64_t most_bytes, uint32_t most_reads, struct tool_reader *ret_reader,
                     struct error *ret_error)
{
    *ret_reader = (struct tool_reader){.doorbell_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
    if (ret_reader->doorbell_fd < 0)
        return error_set(ret_error, errno, "eventfd cannot be made: %s", strerror(errno));
    struct io_setup setup = {.doorbell_fd = ret_reader->doorbell_fd,
                             .stop_fd = stop_fd,
                             .lock_fd = -1,
                             .depth = most_reads ? most_reads : READER_DEPTH};
    struct reader *reader = &ret_reader->reader;
    reader->counters = (struct reader_counters){&ret_reader->reads, &ret_reader->bytes, &ret_reader->ns, NULL};
    reader->most_bytes = most_bytes;
    reader->most_reads = most_reads;
    const struct io_method *method = io == IO_PREAD ? &io_method_pread : &io_method_uring;
    int status = method->open(&setup, &reader->io, ret_error);
    if ((status == -EPERM || status == -ENOSYS) && io != IO_PREAD) {
        method = &io_method_pread;
        status = method->open(&setup, &reader->io, ret_error);
    }
    if (status == 0)
        reader->method = method;
    else
        tool_reader_close(ret_reader);
    return status;
}

void tool_reader_answer(struct tool_reader *reader)
{
    uint64_t rings;
    (void)!read(reader->doorbell_fd, &rings, sizeof(rings)); /* empty already is fine */
}

bool tool_reader_drain(struct tool_reader *reader)
{
    (void)reader_withdraw(&reader->reader);
    while (reader->reader.flying > 0) {
        struct piece *finished;
        uint32_t events;
        if (reader_wait(&reader->reader, -1, &finished, &events, NULL) < 0)
            return false;
        if (events & IO_EVENT_DOORBELL)
            tool_reader_answer(reader);
        (void)reader_withdraw(&reader->reader); /* what came back in part would be sent again */
    }
    return true;
}

void tool_reader_close(struct tool_reader *reader)
{
    if (reader->reader.flying > 0)
        return;
    if (reader->reader.method)
        reader->reader.method->close(reader->reader.io);
    if (reader->doorbell_fd >= 0)
        close(reader->doorbell_fd);
    *reader = (struct tool_reader){.doorbell_fd = -1};
}
