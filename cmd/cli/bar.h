/* Progress of something that takes long, on stderr: a bar on a terminal, else a line every few seconds. */
#pragma once

#include <stdbool.h>
#include <time.h>

struct bar {
    const char *command;
    struct timespec started;
    double last_line, before; /* seconds since the start; bytes that were done before it */
    bool terminal, drawn;
};

/* `before`: bytes that an earlier run has done; they do not count for the rate. */
void bar_begin(const char *command, double before, struct bar *ret_bar);
/* "42.0 %  1.20 of 2.86 GB, 990 MB/s, 0:00:02 left". `total` 0: not known yet, nothing is drawn. */
void bar_draw(struct bar *bar, double done, double total);
/* Before any other line. */
void bar_clear(struct bar *bar);
double bar_seconds(const struct bar *bar);
