#include "cmd/cli/bar.h"

#include <stdio.h>
#include <unistd.h>

#define LINE_SECONDS 5.0 /* between lines where there is no terminal */

void bar_begin(const char *command, double before, struct bar *ret_bar)
{
    *ret_bar = (struct bar){.command = command, .before = before, .terminal = isatty(STDERR_FILENO)};
    clock_gettime(CLOCK_MONOTONIC, &ret_bar->started);
}

double bar_seconds(const struct bar *bar)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)(now.tv_sec - bar->started.tv_sec) + (double)(now.tv_nsec - bar->started.tv_nsec) * 1e-9;
}

void bar_clear(struct bar *bar)
{
    if (bar->drawn)
        fputs("\r\033[K", stderr);
    bar->drawn = false;
}

void bar_draw(struct bar *bar, double done, double total)
{
    double seconds = bar_seconds(bar);
    if (total <= 0 || (!bar->terminal && seconds - bar->last_line < LINE_SECONDS))
        return;
    bar->last_line = seconds;
    double rate = seconds > 0 ? (done - bar->before) / seconds : 0, share = done < total ? done / total : 1;
    char left[32] = "";
    if (rate > 0 && done < total) {
        unsigned wait = (unsigned)((total - done) / rate + 1);
        snprintf(left, sizeof left, ", %u:%02u:%02u left", wait / 3600, wait / 60 % 60, wait % 60);
    }
    char text[160];
    snprintf(text, sizeof text, "%5.1f %%  %.2f of %.2f GB, %.0f MB/s%s", share * 100, done / 1e9, total / 1e9,
             rate / 1e6, left);
    if (!bar->terminal) {
        fprintf(stderr, "%s: %s\n", bar->command, text);
        return;
    }
    char cells[25];
    for (int i = 0; i < 24; i++)
        cells[i] = i < (int)(share * 24) ? '#' : '.';
    cells[24] = '\0';
    fprintf(stderr, "\r[%s] %s\033[K", cells, text);
    fflush(stderr);
    bar->drawn = true;
}
