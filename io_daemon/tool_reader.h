/* A reader outside the daemon, for tools that read a container as the daemon does: `calypte iobench`, `calypte verify`.
 * Thread: the one that opened it. */
#pragma once

#include "io_daemon/reader.h"

struct tool_reader {
    struct reader reader;
    int doorbell_fd; /* eventfd, non-blocking; what is written to it ends a reader_wait with IO_EVENT_DOORBELL */
    _Atomic uint64_t reads, bytes, ns; /* the reader's counters */
};

/* Opens the method that `io` asks for (enum io_choice; without IO_PREAD, pread is taken where io_uring is forbidden).
 * `stop_fd`: see struct io_setup. `most_bytes`, `most_reads`: in flight, 0: as the daemon. It must not be moved
 * afterwards. */
int tool_reader_open(uint32_t io, int stop_fd, uint64_t most_bytes, uint32_t most_reads, struct tool_reader *ret_reader,
                     struct error *ret_error);

/* Takes back what is not in flight and waits for what is. False: waiting failed and reads may still land, so their
 * memory must stay until the process ends. The finished pieces are forgotten. */
bool tool_reader_drain(struct tool_reader *reader);

/* Empties the doorbell. */
void tool_reader_answer(struct tool_reader *reader);

/* With nothing in flight; one that could not be drained is left to the end of the process. */
void tool_reader_close(struct tool_reader *reader);
