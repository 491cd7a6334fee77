/* What a miss costs in calypte-iod beside the read itself: the use log, the request ring, one demand, its queue, the
 * policy's victim, the slot, the map, READY. The daemon's own code runs; nothing is read.
 *
 *     bookkeeping [SLOTS...]     (default: 4096 65536)
 *
 * A line for each pool size: nanoseconds a miss with warm caches, and with the caches full of something else before each
 * layer, as they are while layers are computed. In each layer half of the experts are there and half are missed, whatever
 * the size, so that a miss bears the same share of what a layer costs. */
#include "io_daemon/follower.h"
#include "io_daemon/reader.h"
#include "proto/cleanup.h"

#include <string.h>

#define LAYERS 160u
#define EXPERTS 512u /* a layer */
#define TOP_K 8u
#define SWEEP_BYTES (64u << 20)
#define ROUNDS 200000u /* layers that are timed, warm; a hundredth of it cold */

struct bench {
    struct control *control;
    struct pool pool;
    struct requests requests;
    struct placement placement;
    struct guesses guesses;
    struct follower follower;
    struct model_config config;
    uint64_t random, tick;
    uint32_t layer;
    unsigned char *sweep;
};

static uint32_t dice(struct bench *bench, uint32_t sides)
{
    bench->random = bench->random * UINT64_C(6364136223846793005) + 1442695040888963407u;
    return (uint32_t)(bench->random >> 33) % sides;
}

static int compare(const void *a, const void *b)
{
    uint32_t first = *(const uint32_t *)a, second = *(const uint32_t *)b;
    return first < second ? -1 : first > second;
}

/* A skewed choice among the layer's experts, of one that is in the pool or of one that is not. */
static uint32_t choose(struct bench *bench, bool there)
{
    uint32_t expert;
    struct slot_ref ref;
    uint32_t tries = 0;
    do {
        uint32_t most = 1 + dice(bench, EXPERTS);
        expert = bench->layer * EXPERTS + dice(bench, most);
    } while ((pool_lookup(&bench->pool, expert, &ref) == 0) != there && ++tries < 64 * EXPERTS);
    return expert;
}

/* The worker's part: a layer's experts; its uses in the log; the missing ones in the ring. */
static uint32_t ask_layer(struct bench *bench, uint32_t experts[TOP_K])
{
    struct use uses[TOP_K];
    uint32_t missing = 0;
    bench->layer = (bench->layer + 1) % LAYERS;
    atomic_store(&bench->control->workers[0].tick, ++bench->tick);
    for (uint32_t i = 0; i < TOP_K; i++)
        experts[i] = choose(bench, i % 2);
    qsort(experts, TOP_K, sizeof(*experts), compare);
    for (uint32_t i = 0; i < TOP_K; i++) {
        struct slot_ref ref;
        bool hit = pool_pin(&bench->pool, experts[i], 0, bench->tick, &ref) == 0;
        if (hit)
            pool_unpin(&bench->pool, ref, 0);
        uses[i] = (struct use){.expert = experts[i], .flags = (hit ? USE_HIT : 0) | (i ? 0 : USE_LAYER)};
        if (hit || (i > 0 && experts[i] == experts[i - 1]))
            continue;
        ring_push(&bench->control->rings[0],
                  &(struct expert_request){.expert = experts[i], .epoch = 1, .tick = bench->tick});
        missing++;
    }
    uses_append(&bench->control->uses, uses, TOP_K);
    return missing;
}

/* The daemon's part, as loader.c does it. */
static void serve(struct bench *bench)
{
    struct expert_request request;
    uint32_t expert;
    follower_read(&bench->follower);
    while (ring_pop(&bench->control->rings[0], &request) > 0) {
        if (requests_note(&bench->requests, 0, &request) < 0)
            continue;
        placement_demand(&bench->placement, request.expert);
        if (placement_find(&bench->placement, request.expert) == PLACE_NOWHERE)
            requests_append(&bench->requests, request.expert, PRIORITY_DEMAND);
    }
    while ((expert = requests_head(&bench->requests, PRIORITY_DEMAND)) != QUEUE_END) {
        struct slot_ref ref;
        if (placement_find(&bench->placement, expert) == PLACE_NOWHERE &&
            placement_take(&bench->placement, expert, PRIORITY_DEMAND, &ref) == 0)
            placement_finish(&bench->placement, expert, ref, 0, 0);
        requests_remove(&bench->requests, expert);
    }
}

/* The worker finds what it asked for, so that it is owed no longer. */
static void use_layer(struct bench *bench, const uint32_t experts[TOP_K])
{
    for (uint32_t i = 0; i < TOP_K; i++) {
        struct slot_ref ref;
        if (pool_pin(&bench->pool, experts[i], 0, bench->tick, &ref) == 0)
            pool_unpin(&bench->pool, ref, 0);
    }
}

static double nanoseconds_a_miss(struct bench *bench, uint32_t rounds, bool cold)
{
    uint64_t spent = 0, misses = 0;
    for (uint32_t i = 0; i < rounds; i++) {
        uint32_t experts[TOP_K], missing = ask_layer(bench, experts);
        if (cold)
            memset(bench->sweep, (int)i, SWEEP_BYTES);
        uint64_t begin = monotonic_ns();
        serve(bench);
        spent += missing ? monotonic_ns() - begin : 0;
        misses += missing;
        use_layer(bench, experts);
    }
    return misses ? (double)spent / (double)misses : 0;
}

static int open_bench(struct bench *bench, uint32_t slots, struct error *ret_error)
{
    const struct pool_shape shape = {
        .slots = slots, .nodes = 1, .moe_layers = LAYERS, .experts = EXPERTS, .slice_bytes = 4096};
    char instance[INSTANCE_NAME_MAX];
    snprintf(instance, sizeof(instance), "bookkeeping-%d", (int)getpid());
    bench->config = (struct model_config){.experts = EXPERTS, .top_k = TOP_K};
    bench->control = aligned_alloc(_Alignof(struct control), sizeof(*bench->control));
    bench->sweep = malloc(SWEEP_BYTES);
    if (!bench->control || !bench->sweep)
        return error_set(ret_error, ENOMEM, "out of memory");
    memset(bench->control, 0, sizeof(*bench->control));
    atomic_store(&bench->control->epoch, 1);
    int status = pool_create(instance, &shape, ret_error);
    if (status == 0)
        status = pool_attach(instance, &bench->pool, ret_error);
    segment_unlink_all(instance); /* the mapping stays */
    if (status == 0)
        status = requests_open(bench->control, 1, LAYERS * EXPERTS, &bench->requests, ret_error);
    if (status == 0)
        status = placement_open(&bench->pool, &bench->config, &bench->requests, &bench->control->iod, &bench->placement,
                                ret_error);
    if (status < 0)
        return status;
    placement_grow(&bench->placement, slots);
    follower_open(bench->control, &bench->placement, &bench->guesses, NULL, &bench->follower);
    return 0;
}

static int run(uint32_t slots)
{
    struct bench bench = {.random = 7};
    struct error error;
    if (open_bench(&bench, slots, &error) < 0) {
        fprintf(stderr, "bookkeeping: %s\n", error.text);
        return 1;
    }
    for (uint32_t e = 0; e < slots; e++) { /* fills the pool, each layer the same share of it */
        struct slot_ref ref;
        uint32_t expert = e % LAYERS * EXPERTS + e / LAYERS;
        if (placement_take(&bench.placement, expert, PRIORITY_DEMAND, &ref) == 0)
            placement_finish(&bench.placement, expert, ref, 0, 0);
    }
    nanoseconds_a_miss(&bench, ROUNDS, false);
    double warm = nanoseconds_a_miss(&bench, ROUNDS, false), cold = nanoseconds_a_miss(&bench, ROUNDS / 100, true);
    printf("%8u %12.0f %12.0f\n", slots, warm, cold);
    placement_close(&bench.placement);
    requests_close(&bench.requests);
    pool_detach(&bench.pool);
    free(bench.control);
    free(bench.sweep);
    return 0;
}

int main(int argc, char **argv)
{
    int failed = 0;
    printf("   slots    ns a miss    caches cold\n");
    for (int i = 1; i < argc; i++)
        failed |= run((uint32_t)strtoul(argv[i], NULL, 10));
    return argc > 1 ? failed : run(4096) | run(65536);
}
