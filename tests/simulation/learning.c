/* The usage file, a real one: what earlier sessions have left in it, what a daemon that ends adds and one that dies does
 * not, and in which order the next one warms up. The writer's thread is run by the end of the daemon (pthread_join). */
#include "tests/simulation/simulation.h"

#include "io_daemon/learning.h"
#include "io_daemon/learning_record.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define MOST_HEAT 40u

static uint64_t identity_of(const struct simulation *sim)
{
    return sim->identity[sim->plan.stripes];
}

void learning_plan(struct simulation *sim)
{
    static const uint32_t choices[] = {LEARNING_OFF, LEARNING_OFF, LEARNING_READ, LEARNING_ON, LEARNING_ON};
    sim->plan.learning = choices[dice(sim, 5)];
    bool remembers = dice(sim, 4);
    for (uint32_t e = 0; e < SIM_ALL; e++)
        sim->remembered[e] = remembers && dice(sim, 3) ? 1 + dice(sim, MOST_HEAT) : 0;
}

/* What earlier sessions have left. */
void learning_begin(struct simulation *sim)
{
    char path[PATH_MAX], bytes[1024];
    struct learning_memory memory;
    struct error error;
    if (sim->plan.learning == LEARNING_OFF)
        return;
    if (learning_path(sim->rundir, identity_of(sim), path, &error) < 0 ||
        learning_memory_open(identity_of(sim), SIM_ALL, &memory, &error) < 0)
        violated(sim, "%s", error.text);
    for (uint32_t e = 0; e < SIM_ALL; e++)
        memory.heat[e] = (float)sim->remembered[e];
    size_t size = learning_encode_header(&memory, bytes);
    size += learning_encode_heat(&memory, bytes + size);
    learning_memory_close(&memory);
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (fd < 0 || write(fd, bytes, size) != (ssize_t)size)
        violated(sim, "%s cannot be written", path);
    close(fd);
}

int __real_learning_open(const struct learning_options *options, struct learning **ret_learning,
                         struct error *ret_error);
int __wrap_learning_open(const struct learning_options *options, struct learning **ret_learning,
                         struct error *ret_error);

int __wrap_learning_open(const struct learning_options *options, struct learning **ret_learning,
                         struct error *ret_error)
{
    struct simulation *sim = the_simulation;
    sim->in_learning = true;
    int status = __real_learning_open(options, ret_learning, ret_error);
    sim->in_learning = false;
    for (uint32_t e = 0; status == 0 && e < SIM_ALL; e++)
        if (learning_heat(*ret_learning, e) != (float)sim->remembered[e])
            violated(sim, "expert %u was used %u times, and %.1f are remembered", e, sim->remembered[e],
                     (double)learning_heat(*ret_learning, e));
    return status;
}

int __real_learning_hottest(const struct learning *learning, uint32_t most, uint32_t *ret_experts);
int __wrap_learning_hottest(const struct learning *learning, uint32_t most, uint32_t *ret_experts);

int __wrap_learning_hottest(const struct learning *learning, uint32_t most, uint32_t *ret_experts)
{
    struct simulation *sim = the_simulation;
    int count = __real_learning_hottest(learning, most, ret_experts);
    uint32_t used = 0;
    for (uint32_t e = 0; e < SIM_ALL; e++)
        used += sim->remembered[e] > 0;
    if (count != (int)used)
        violated(sim, "%d experts are to be warmed up, and %u were used", count, used);
    sim->to_warm = used;
    sim->last_warmed = SIM_ALL;
    return count;
}

void __real_requests_warm(struct requests *requests, uint32_t expert);
void __wrap_requests_warm(struct requests *requests, uint32_t expert);

/* The hottest first; then those that the user holds. */
void __wrap_requests_warm(struct requests *requests, uint32_t expert)
{
    struct simulation *sim = the_simulation;
    __real_requests_warm(requests, expert);
    if (sim->to_warm == 0)
        return;
    if (sim->remembered[expert] == 0)
        violated(sim, "expert %u is warmed up, and was never used", expert);
    if (sim->last_warmed < SIM_ALL && sim->remembered[sim->last_warmed] < sim->remembered[expert])
        violated(sim, "expert %u is warmed up after expert %u, which is colder", expert, sim->last_warmed);
    sim->last_warmed = expert;
    sim->to_warm--;
}

void learning_check_start(struct simulation *sim)
{
    if (sim->to_warm)
        violated(sim, "%u experts were used, and are not warmed up", sim->to_warm);
    sim->uses_at_start = atomic_load(&sim->control->iod.uses_read);
}

void __real_learning_close(struct learning *learning);
void __wrap_learning_close(struct learning *learning);

/* What the daemon has seen used since its start is in the file now, unless it was killed. */
void __wrap_learning_close(struct learning *learning)
{
    struct simulation *sim = the_simulation;
    uint64_t place = sim->uses_at_start, end = atomic_load(&sim->control->iod.uses_read), lost;
    struct use use;
    sim->in_learning = true;
    __real_learning_close(learning);
    sim->in_learning = false;
    if (sim->dead || sim->plan.learning != LEARNING_ON)
        return;
    while (place < end && uses_read(&sim->control->uses, &place, &use, 1, &lost) == 1) {
        sim->remembered[use.expert]++;
        sim->coverage->remembered++;
    }
}
