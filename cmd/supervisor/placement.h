/* Which cores and which memory node each worker gets: pure arithmetic on the machine and two wishes. */
#pragma once

#include "cmd/supervisor/machine.h"
#include "shm/control.h"

/* Fills workers, threads, nodes, spin, worker_node, core_count and cores of the facts.
 *
 * `workers` 0: one a node with CPUs and memory, at most 8; `threads` 0: the CPUs' worth of time divided over the
 * workers, no more than the cores of the worker that has fewest, at least 1. With no more workers than nodes a worker
 * has the cores of whole nodes; with more, the workers of a node share its cores, disjoint while there are enough.
 * Brief spinning is allowed only if every thread has a core of its own and the time for it. Memory nodes are merged to
 * 1, 2, 4 or 8, because an expert has 8 slices.
 * -EINVAL: more workers than MAX_WORKERS. */
int placement_fill(const struct machine *machine, uint32_t workers, uint32_t threads, struct facts *facts,
                   struct error *ret_error);
