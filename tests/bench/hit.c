/* What an expert that is in the pool costs worker 0: pinned, written into the use log, published, accepted and given back, on GLM-5.2's
 * shape: steps of one row, 8 random experts of 256 a layer, a pool of 4,096 slots. The loop runs in a thread that may make no system
 * call but its last: any other would end the program (SIGSYS).
 *
 *   bench-hit [LAYERS]
 *
 * One line: the median of 9 runs in nanoseconds an expert, and the share of demand_begin (pins and log) in it. */
#include "compute/demand.h"
#include "proto/cleanup.h"

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#define SLOTS 4096u
#define RUNS 9
#define LAYERS_DEFAULT 100000ul

struct bench {
    struct model *model;
    struct wave_list list;
    struct batch batch;
    unsigned long layers;
    uint8_t (*chosen)[8]; /* [layers]: ascending */
    uint8_t *layer;       /* [layers] */
    bool watched;         /* by seccomp */
    int status;
    double total[RUNS], begin[RUNS]; /* ns an expert */
};

static uint64_t next_random(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

/* Every slot READY with an expert of the last 16 MoE layers. */
static int fill_pool(struct pool *pool, struct error *ret_error)
{
    uint32_t end = 0;
    int status = 0;
    while (status == 0 && end < SLOTS)
        status = pool_grow(pool, end, SLOTS, false, false, &end, ret_error);
    if (status >= 0)
        status = pool_attach_objects(pool, ret_error);
    for (uint32_t s = 0; status == 0 && s < SLOTS; s++) {
        uint32_t expert = pool->expert_count - SLOTS + s, generation;
        struct slot *slot = &pool->slots[s];
        atomic_store(&slot->expert, expert);
        if (slot_change(&slot->state, SLOT_EMPTY, SLOT_LOADING, 0, &generation) < 0 ||
            slot_change(&slot->state, SLOT_LOADING, SLOT_READY, generation, NULL) < 0)
            return error_set(ret_error, EINVAL, "slot %u does not become READY", s);
        atomic_store(&pool->map[expert], s | (uint64_t)generation << 32);
    }
    return status;
}

static void *need(size_t count, size_t size)
{
    void *memory = calloc(count, size);
    if (!memory) {
        fprintf(stderr, "bench-hit: out of memory\n");
        exit(1);
    }
    return memory;
}

/* As much of a model as demand.c looks at. */
static struct model *make_model(struct control *control)
{
    struct model *model = need(1, sizeof *model);
    struct model_config *c = &model->facts.config;
    *c = (struct model_config){.layers = 78, .experts = 256, .top_k = 8};
    for (uint32_t layer = 3; layer < c->layers; layer++)
        c->layer_kind[layer] = LAYER_MOE;
    model->control = control;
    model->line = &control->workers[0];
    model->doorbell = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    struct state *s = &model->state;
    s->demand.expert = need(c->experts, sizeof *s->demand.expert);
    s->demand.status = need(c->experts, sizeof *s->demand.status);
    s->demand.stale_failure = need(c->experts, sizeof *s->demand.stale_failure);
    s->demand.ref = need(c->experts, sizeof *s->demand.ref);
    s->wave = need(c->experts, sizeof *s->wave);
    s->expert_first = need(c->experts + 1, sizeof *s->expert_first);
    s->pairs = need(c->top_k, sizeof *s->pairs);
    for (uint32_t j = 0; j < c->top_k; j++)
        s->pairs[j] = j;
    return model;
}

static void choose(struct bench *bench)
{
    const struct model_config *c = &bench->model->facts.config;
    uint64_t state = 0x9e3779b97f4a7c15u;
    bench->chosen = need(bench->layers, sizeof *bench->chosen);
    bench->layer = need(bench->layers, 1);
    for (unsigned long n = 0; n < bench->layers; n++) {
        bench->layer[n] = (uint8_t)(c->layers - 1 - next_random(&state) % (SLOTS / c->experts));
        for (uint32_t count = 0; count < c->top_k;) {
            uint8_t expert = (uint8_t)next_random(&state);
            uint32_t place = count;
            while (place > 0 && bench->chosen[n][place - 1] > expert)
                place--;
            if (place > 0 && bench->chosen[n][place - 1] == expert)
                continue;
            memmove(&bench->chosen[n][place + 1], &bench->chosen[n][place], count - place);
            bench->chosen[n][place] = expert;
            count++;
        }
    }
}

static int run(struct bench *bench, double *ret_total, double *ret_begin)
{
    struct model *model = bench->model;
    struct state *state = &model->state;
    struct demand *demand = &state->demand;
    uint32_t top_k = model->facts.config.top_k;
    uint64_t begin_ns = 0, start = clock_ns();
    demand->hits = demand->misses = 0;
    for (unsigned long n = 0; n < bench->layers; n++) {
        uint32_t layer = bench->layer[n];
        demand->wanted = top_k;
        for (uint32_t j = 0; j < top_k; j++) {
            uint32_t expert = bench->chosen[n][j];
            demand->expert[j] = expert;
            state->expert_first[expert] = j;
            state->expert_first[expert + 1] = j + 1; /* what only follows it is not looked at */
        }
        atomic_store_explicit(&model->control->iod.uses_read, uses_end(&model->control->uses), memory_order_relaxed);
        uint64_t before = clock_ns();
        demand_begin(model, &bench->batch, layer);
        begin_ns += clock_ns() - before;
        if (demand_publish_wave(model, layer, &bench->list) < 0 || demand_accept_wave(model, layer, &bench->list) < 0)
            return -EIO;
        demand_retire_wave(model);
    }
    double experts = (double)bench->layers * top_k;
    *ret_total = (double)(clock_ns() - start) / experts;
    *ret_begin = (double)begin_ns / experts;
    return demand->hits == bench->layers * top_k ? 0 : -ENOENT;
}

/* From here on the calling thread may do nothing but end. */
static bool forbid_system_calls(void)
{
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_exit, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
    };
    const struct sock_fprog program = {sizeof filter / sizeof *filter, filter};
    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

static void *run_all(void *argument)
{
    struct bench *bench = argument;
    bench->watched = forbid_system_calls();
    for (int r = 0; r < RUNS && bench->status == 0; r++)
        bench->status = run(bench, &bench->total[r], &bench->begin[r]);
    if (bench->watched)
        syscall(SYS_exit, 0);
    return NULL;
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static int measure(struct bench *bench)
{
    static const struct step step = {.id = 1, .rows = 1};
    static const struct step_sequence sequence = {.rows = 1};
    const struct step_sequence *sequences[] = {&sequence};
    uint32_t source = 0;
    pthread_t thread;
    bench->model->step = &step;
    bench->batch = (struct batch){.rows = 1, .sequence = sequences, .source = &source};
    choose(bench);
    if (pthread_create(&thread, NULL, run_all, bench) != 0) {
        fprintf(stderr, "bench-hit: no thread\n");
        return 1;
    }
    pthread_join(thread, NULL);
    if (bench->status < 0) {
        fprintf(stderr, "bench-hit: not every expert was a hit\n");
        return 1;
    }
    qsort(bench->total, RUNS, sizeof(double), compare);
    qsort(bench->begin, RUNS, sizeof(double), compare);
    printf("a hit: %.1f ns (%.1f to %.1f), of it demand_begin %.1f ns; system calls: %s\n", bench->total[RUNS / 2],
           bench->total[0], bench->total[RUNS - 1], bench->begin[RUNS / 2], bench->watched ? "none" : "not watched");
    return 0;
}

int main(int argc, char **argv)
{
    struct bench bench = {.layers = argc > 1 ? strtoul(argv[1], NULL, 10) : LAYERS_DEFAULT};
    struct error error;
    char instance[INSTANCE_NAME_MAX];
    const struct pool_shape shape = {
        .slots = SLOTS, .nodes = 1, .moe_layers = 75, .experts = 256, .slice_bytes = DISK_ALIGN};
    struct control *control = aligned_alloc(CACHE_LINE, sizeof *control);
    if (!control || bench.layers == 0) {
        fprintf(stderr, "usage: bench-hit [LAYERS]\n");
        return 2;
    }
    memset(control, 0, sizeof *control);
    bench.model = make_model(control);
    snprintf(instance, sizeof instance, "bench-hit-%d", (int)getpid());
    int status = pool_create(instance, &shape, &error);
    if (status == 0)
        status = pool_attach(instance, &bench.model->pool, &error);
    if (status == 0)
        status = fill_pool(&bench.model->pool, &error);
    segment_unlink_all(instance);
    if (status < 0) {
        fprintf(stderr, "bench-hit: %s\n", error.text);
        return 1;
    }
    return measure(&bench);
}
