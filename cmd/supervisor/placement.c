#include "cmd/supervisor/placement.h"

#include "proto/weights.h"

/* The largest of 1, 2, 4, 8 that is not above `count`. */
static uint32_t merged_nodes(uint32_t count)
{
    uint32_t nodes = 1;
    while (nodes * 2 <= count && nodes < 8)
        nodes *= 2;
    return nodes;
}

static void give_core(struct facts *facts, uint32_t worker, uint16_t core)
{
    if (facts->core_count[worker] < MAX_CORES)
        facts->cores[worker][facts->core_count[worker]++] = core;
}

/* Worker `worker` gets whole nodes. Returns the first of them. */
static uint32_t give_nodes(const struct machine *machine, struct facts *facts, uint32_t worker)
{
    struct range nodes = split(machine->node_count, worker, facts->workers);
    for (uint32_t n = nodes.first; n < nodes.first + nodes.count; n++)
        for (uint32_t c = 0; c < machine->nodes[n].cpu_count; c++)
            give_core(facts, worker, machine->nodes[n].cpus[c]);
    return nodes.first;
}

/* The workers of one node share its cores; where there are fewer cores than workers, several get the same one. Returns
 * false if a core was given twice. */
static bool share_node(const struct machine_node *node, struct range workers, struct facts *facts)
{
    for (uint32_t i = 0; i < workers.count; i++) {
        struct range cores = split(node->cpu_count, i, workers.count);
        if (!cores.count)
            give_core(facts, workers.first + i, node->cpus[i * node->cpu_count / workers.count]);
        for (uint32_t c = cores.first; c < cores.first + cores.count; c++)
            give_core(facts, workers.first + i, node->cpus[c]);
    }
    return workers.count <= node->cpu_count;
}

int placement_fill(const struct machine *machine, uint32_t workers, uint32_t threads, struct facts *facts,
                   struct error *ret_error)
{
    if (workers > MAX_WORKERS)
        return error_set(ret_error, EINVAL, "workers=%u is too many: an instance has at most %u", workers, MAX_WORKERS);
    facts->workers = workers ? workers : machine->node_count < MAX_WORKERS ? machine->node_count : MAX_WORKERS;
    facts->nodes = merged_nodes(machine->node_count);
    bool disjoint = true;
    for (uint32_t w = 0; w < MAX_WORKERS; w++)
        facts->core_count[w] = 0;
    if (facts->workers <= machine->node_count) {
        for (uint32_t w = 0; w < facts->workers; w++)
            facts->worker_node[w] = give_nodes(machine, facts, w) * facts->nodes / machine->node_count;
    } else {
        for (uint32_t n = 0; n < machine->node_count; n++) {
            struct range sharing = split(facts->workers, n, machine->node_count);
            disjoint &= share_node(&machine->nodes[n], sharing, facts);
            for (uint32_t i = 0; i < sharing.count; i++)
                facts->worker_node[sharing.first + i] = n * facts->nodes / machine->node_count;
        }
    }
    uint32_t fewest = UINT32_MAX;
    for (uint32_t w = 0; w < facts->workers; w++)
        fewest = facts->core_count[w] < fewest ? facts->core_count[w] : fewest;
    uint32_t share = machine->cpu_budget / facts->workers;
    share = share < fewest ? share : fewest;
    facts->threads = threads ? threads : share ? share : 1;
    facts->spin =
        disjoint && facts->threads <= fewest && (uint64_t)facts->threads * facts->workers <= machine->cpu_budget;
    return 0;
}
