/* simulation [SEED | --seeds FIRST COUNT] [--trace] [--keep-going]: see README.md. */
#include "tests/simulation/simulation.h"

#include "tests/unit/iod_harness.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/wait.h>

#define SEEDS 10000u
#define SEED_SECONDS 2 /* of CPU: a seed that takes longer hangs */
#define FASTER_SHARE 2u

struct simulation *the_simulation;

/* What the process that runs seeds tells the one that started it. */
struct shared {
    uint64_t seed;
    struct coverage coverage;
};

uint32_t dice(struct simulation *sim, uint32_t sides)
{
    uint64_t x = sim->dice += UINT64_C(0x9E3779B97F4A7C15); /* splitmix64 */
    x = (x ^ x >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
    x = (x ^ x >> 27) * UINT64_C(0x94D049BB133111EB);
    return sides ? (uint32_t)((x ^ x >> 31) >> 32) % sides : 0;
}

void trace(const struct simulation *sim, const char *format, ...)
{
    va_list args;
    if (!sim->tracing)
        return;
    printf("%6llu %9llu us  ", (unsigned long long)sim->events, (unsigned long long)(sim->now_ns / 1000));
    va_start(args, format);
    vprintf(format, args);
    va_end(args);
    putchar('\n');
}

void violated(const struct simulation *sim, const char *format, ...)
{
    va_list args;
    fflush(stdout);
    fprintf(stderr, "seed %llu, event %llu: ", (unsigned long long)sim->seed, (unsigned long long)sim->events);
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fputc('\n', stderr);
    _exit(1);
}

static void make_images(struct simulation *sim)
{
    sim->image = calloc(SIM_ALL, sizeof(*sim->image));
    for (uint32_t e = 0; e < SIM_ALL; e++) {
        for (size_t w = 0; w < SIM_BLOB_BYTES / 8; w++) {
            uint64_t word = expert_word(e, w);
            memcpy(sim->image[e] + w * 8, &word, sizeof(word));
        }
        sim->image_hash[e] = hash_blob(sim->image[e]);
    }
}

/* What stays over seeds stands before the rest; the rest begins with zeros. */
static void begin_seed(struct simulation *sim, uint64_t seed)
{
    memset((char *)sim + offsetof(struct simulation, seed), 0, sizeof(*sim) - offsetof(struct simulation, seed));
    sim->seed = seed;
}

static _Noreturn void run_seeds(struct simulation *sim, struct shared *shared, uint64_t end)
{
    for (; shared->seed < end; shared->seed++) {
        const struct itimerval most = {.it_value = {.tv_sec = SEED_SECONDS}};
        begin_seed(sim, shared->seed);
        setitimer(ITIMER_PROF, &most, NULL);
        run_seed(sim);
    }
    fflush(stdout);
    _exit(0);
}

/* Seeds run in a child: after one that fails another child goes on. Returns how many failed. */
static uint32_t run_all(struct simulation *sim, struct shared *shared, uint64_t end, bool keep_going)
{
    uint32_t failed = 0;
    while (shared->seed < end && (failed == 0 || keep_going)) {
        int status;
        fflush(NULL);
        pid_t child = fork();
        if (child == 0)
            run_seeds(sim, shared, end);
        if (child < 0 || waitpid(child, &status, 0) < 0)
            return failed + 1;
        if (status == 0)
            break;
        failed++;
        if (WIFSIGNALED(status))
            fprintf(stderr, "seed %llu: ended by signal %d\n", (unsigned long long)shared->seed, WTERMSIG(status));
        fprintf(stderr, "seed %llu failed; run again: simulation %llu --trace\n", (unsigned long long)shared->seed,
                (unsigned long long)shared->seed);
        shared->seed++;
    }
    return failed;
}

/* A simulation in which nothing happens proves nothing. Returns how many things have not. */
static uint32_t print_coverage(const struct coverage *c)
{
    const struct {
        const char *name;
        uint64_t count;
    } rows[] = {{"seeds", c->seeds},
                {"events", c->events},
                {"steps", c->steps},
                {"steps that failed for damage", c->failed_steps},
                {"waves", c->waves},
                {"loads", c->loads},
                {"lookaheads", c->guesses},
                {"evictions", c->evictions},
                {"reads that were hurt", c->reads_hurt},
                {"flipped bits", c->flips},
                {"late reads", c->late_reads},
                {"quarantined slots", c->quarantined},
                {"holes", c->punches},
                {"sizes refused", c->refused},
                {"steps within a turn", c->preempted},
                {"resizes", c->troubles[T_RESIZE]},
                {"holds", c->troubles[T_HOLD]},
                {"kills while it waits", c->troubles[T_KILL]},
                {"kills within a turn", c->troubles[T_KILL_IN_TURN]},
                {"orderly ends", c->troubles[T_STOP]},
                {"dead workers", c->troubles[T_WORKER]},
                {"epochs raised", c->troubles[T_EPOCH]},
                {"heals", c->troubles[T_HEAL]},
                {"drives that die", c->dead_drives},
                {"reads that fail on one of two copies", c->failing_reads},
                {"copies that are dropped", c->dropped},
                {"experts READY that one of two copies has damaged", c->saved},
                {"reads of the faster copy", c->fast_reads},
                {"reads of the slower copy", c->slow_reads},
                {"reads of dense weights of the first of two copies", c->dense_reads[0]},
                {"reads of dense weights of the second", c->dense_reads[1]},
                {"warm-ups", c->warmups},
                {"uses remembered", c->remembered}};
    uint32_t missing = 0;
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        printf("%10llu %s\n", (unsigned long long)rows[i].count, rows[i].name);
        missing += rows[i].count == 0;
    }
    if (c->fast_reads < FASTER_SHARE * c->slow_reads) {
        fprintf(stderr, "the faster copy is not read %u times as often as the slower one\n", FASTER_SHARE);
        missing++;
    }
    return missing;
}

static void note_file(struct simulation *sim, const char *path, uint32_t copy, uint32_t stripe)
{
    struct stat found;
    if (stat(path, &found) < 0 || sim->file_count == SIM_FILES)
        violated(sim, "%s: cannot be found", path);
    sim->files[sim->file_count++] =
        (struct sim_file){.inode = found.st_ino, .copy = (uint8_t)copy, .stripe = (uint8_t)stripe};
}

/* A container and its mirror, and which file is which. */
static void make_containers(struct simulation *sim, const char *scratch, uint32_t stripes)
{
    const struct geometry geometry = {64, 64, SIM_LAYERS + 1, SIM_EXPERTS, SIM_TOP_K, 4096, stripes};
    for (uint32_t c = 0; c < MAX_COPIES; c++) {
        char *path = sim->container[stripes][c];
        struct container *container;
        struct error error;
        snprintf(path, sizeof(sim->container[0][0]), "%s/%u-%u", scratch, stripes, c);
        harness_make_container(path, &geometry);
        if (container_open(path, &container, &error) < 0)
            violated(sim, "%s", error.text);
        sim->identity[stripes] = container->identity;
        for (size_t f = 0; f < container->dense_count; f++)
            note_file(sim, container->dense[f].header.path, c, 0);
        for (size_t l = 0; l < container->expert_count; l++)
            for (uint32_t s = 0; s < stripes; s++)
                note_file(sim, container->experts[l].stripes[s].header.path, c, s);
        container_close(container);
    }
}

static int simulate(struct simulation *sim, struct shared *shared, uint64_t end, bool keep_going)
{
    char scratch[] = "/dev/shm/calypte-simulation-XXXXXX";
    const struct world_options options = {.slots = SIM_SLOTS, .nodes = 4, .workers = 1 + SIM_FOLLOWERS};
    struct world world;
    char folder[64];
    if (!mkdtemp(scratch))
        return 1;
    for (uint32_t stripes = 1; stripes <= SIM_STRIPES; stripes++)
        make_containers(sim, scratch, stripes);
    setenv("XDG_STATE_HOME", scratch, 1); /* where the usage file stands */
    snprintf(folder, sizeof(folder), "%s/calypte", scratch);
    if (mkdir(folder, 0700) < 0)
        return 1;
    world_open(&world, scratch, sim->container[1][0], &options);
    sim->instance = world.instance;
    sim->rundir = world.rundir;
    sim->control = world.control;
    sim->doorbell_fd = world.doorbell;
    uint64_t count = end - shared->seed;
    sim->coverage = &shared->coverage;
    uint32_t failed = run_all(sim, shared, end, keep_going),
             missing = sim->tracing ? 0 : print_coverage(&shared->coverage);
    world_close(&world);
    harness_end(scratch);
    if (failed)
        fprintf(stderr, "%u seeds failed\n", failed);
    else if (missing && count >= 1000)
        fprintf(stderr, "%u things never happened\n", missing);
    return failed || (missing && count >= 1000);
}

int main(int argc, char **argv)
{
    struct simulation *sim = calloc(1, sizeof(*sim));
    struct shared *shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    uint64_t end = SEEDS;
    bool keep_going = false;
    if (!sim || shared == MAP_FAILED)
        return 1;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--trace") == 0) {
            sim->tracing = true;
        } else if (strcmp(argv[i], "--keep-going") == 0) {
            keep_going = true;
        } else if (strcmp(argv[i], "--seeds") == 0 && i + 2 < argc) {
            shared->seed = strtoull(argv[++i], NULL, 10);
            end = shared->seed + strtoull(argv[++i], NULL, 10);
        } else {
            shared->seed = strtoull(argv[i], NULL, 10);
            end = shared->seed + 1;
        }
    }
    the_simulation = sim;
    make_images(sim);
    sim->buffers = aligned_alloc(DISK_ALIGN, SIM_FLYING * sizeof(*sim->buffers));
    sim->saved_control = malloc(sizeof(struct control));
    sim->saved_table = malloc(SAVED_TABLE_BYTES);
    int status = sim->buffers && sim->saved_control && sim->saved_table ? simulate(sim, shared, end, keep_going) : 1;
    free(sim->buffers);
    free(sim->saved_control);
    free(sim->saved_table);
    free(sim->image);
    free(sim);
    return status;
}
