/* A picture of hit rates by pool size, drawn by gnuplot, a program of its own. */
#pragma once

#include "cmd/cachesim/replay.h"

struct plot_point {
    double percent;                    /* of the experts that the trace uses */
    double hit_rates[REPLAY_POLICIES]; /* percent */
};

/* Writes the PNG `path`, whole or with an error. -ENOENT: there is no gnuplot, or no such folder. */
int plot_draw(const char *path, const char *title, const struct plot_point *points, size_t count,
              struct error *ret_error);
