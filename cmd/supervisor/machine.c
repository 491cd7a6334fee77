#include "cmd/supervisor/machine.h"

#include "cmd/supervisor/room.h"
#include "proto/cleanup.h"

#include <ctype.h>
#include <dirent.h>
#include <inttypes.h>
#include <limits.h>
#include <sched.h>
#include <stdbool.h>
#include <string.h>

int cpu_list_parse(const char *text, uint16_t ret_cpus[MACHINE_MAX_CPUS])
{
    uint32_t count = 0;
    long next = 0; /* lists are ascending: what follows must not be below */
    while (*text && *text != '\n') {
        char *end;
        if (!isdigit((unsigned char)*text))
            return -EINVAL;
        long first = strtol(text, &end, 10), last = first;
        if (*end == '-') {
            if (!isdigit((unsigned char)end[1]))
                return -EINVAL;
            last = strtol(end + 1, &end, 10);
        }
        if (first < next || last < first || (*end && *end != ',' && *end != '\n'))
            return -EINVAL;
        last = last < (long)MACHINE_MAX_CPUS ? last : (long)MACHINE_MAX_CPUS - 1;
        for (long cpu = first; cpu <= last; cpu++)
            ret_cpus[count++] = (uint16_t)cpu;
        next = last + 1;
        text = *end == ',' ? end + 1 : end;
    }
    return (int)count;
}

/* The CPUs of the affinity mask, ascending. The kernel wants a mask as large as its own, so one of ample size is
 * given. */
static int read_mask(uint16_t ret_cpus[MACHINE_MAX_CPUS], uint32_t *ret_count, struct error *ret_error)
{
    enum { MASK_CPUS = 8192 };
    cpu_set_t *mask = CPU_ALLOC(MASK_CPUS);
    size_t size = CPU_ALLOC_SIZE(MASK_CPUS);
    if (!mask)
        return error_set(ret_error, ENOMEM, "out of memory while reading the CPU affinity mask");
    int status = sched_getaffinity(0, size, mask) < 0
                     ? error_set(ret_error, errno, "cannot read the CPU affinity mask: %s", strerror(errno))
                     : 0;
    uint32_t count = 0;
    for (uint32_t cpu = 0; !status && cpu < MACHINE_MAX_CPUS; cpu++)
        if (CPU_ISSET_S(cpu, size, mask))
            ret_cpus[count++] = (uint16_t)cpu;
    CPU_FREE(mask);
    if (!status && !count)
        return error_set(ret_error, EINVAL, "no CPU below %u is in the affinity mask", MACHINE_MAX_CPUS);
    *ret_count = count;
    return status;
}

static bool node_has_memory(const char *folder)
{
    char path[PATH_MAX], line[256];
    uint64_t kilobytes;
    snprintf(path, sizeof path, "%s/meminfo", folder);
    _cleanup_fclose_ FILE *stream = fopen(path, "re");
    while (stream && fgets(line, sizeof line, stream)) {
        const char *at = strstr(line, "MemTotal:");
        if (at && sscanf(at, "MemTotal: %" SCNu64, &kilobytes) == 1)
            return kilobytes > 0;
    }
    return false;
}

/* One node's CPUs that are in the mask; false if it has none, or no memory. */
static bool read_node(const char *folder, const uint16_t *mask, uint32_t mask_count, struct machine_node *ret_node)
{
    char path[PATH_MAX], line[4096];
    snprintf(path, sizeof path, "%s/cpulist", folder);
    _cleanup_fclose_ FILE *stream = fopen(path, "re");
    uint16_t cpus[MACHINE_MAX_CPUS];
    if (!stream || !fgets(line, sizeof line, stream) || !node_has_memory(folder))
        return false;
    int count = cpu_list_parse(line, cpus);
    ret_node->cpu_count = 0;
    uint32_t m = 0;
    for (int i = 0; i < count; i++) {
        while (m < mask_count && mask[m] < cpus[i])
            m++;
        if (m < mask_count && mask[m] == cpus[i])
            ret_node->cpus[ret_node->cpu_count++] = cpus[i];
    }
    return ret_node->cpu_count > 0;
}

static void read_nodes(const char *root, const uint16_t *mask, uint32_t mask_count, struct machine *machine)
{
    for (uint32_t id = 0; id < MACHINE_MAX_NODES; id++) {
        char folder[PATH_MAX - 16];
        snprintf(folder, sizeof folder, "%s/sys/devices/system/node/node%u", root, id);
        struct machine_node *node = &machine->nodes[machine->node_count];
        node->id = id;
        machine->node_count += read_node(folder, mask, mask_count, node);
    }
    if (machine->node_count)
        return;
    /* No NUMA in this kernel: one node with every CPU. */
    machine->node_count = 1;
    machine->nodes[0] = (struct machine_node){.cpu_count = mask_count};
    memcpy(machine->nodes[0].cpus, mask, mask_count * sizeof *mask);
}

int machine_read(const char *root, struct machine *ret_machine, struct error *ret_error)
{
    uint16_t mask[MACHINE_MAX_CPUS];
    struct room room;
    *ret_machine = (struct machine){0};
    int status = read_mask(mask, &ret_machine->cpu_count, ret_error);
    if (!status)
        status = room_read(root, &room, ret_error);
    if (status)
        return status;
    ret_machine->memory_available = room_available(&room);
    ret_machine->shm_free = room.shm_free;
    uint64_t budget = cgroup_cpu_permille(root) / 1000;
    ret_machine->cpu_budget =
        budget < ret_machine->cpu_count ? (uint32_t)(budget ? budget : 1) : ret_machine->cpu_count;
    ret_machine->nodes = calloc(MACHINE_MAX_NODES + 1, sizeof *ret_machine->nodes);
    if (!ret_machine->nodes)
        return error_set(ret_error, ENOMEM, "out of memory while reading the NUMA nodes");
    read_nodes(root, mask, ret_machine->cpu_count, ret_machine);
    return 0;
}

void machine_free(struct machine *machine)
{
    free(machine->nodes);
    *machine = (struct machine){0};
}
