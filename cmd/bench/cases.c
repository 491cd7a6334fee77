/* The kernels on GLM-5.2's shapes, as the forward pass calls them: every thread its own block rows of each matrix,
 * or its own rows. */
#include "cmd/bench/kernels.h"
#include "compute/model.h"
#include "proto/cleanup.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define HIDDEN 6144u
#define WIDTH 2048u
#define LATENT 576u     /* values of a latent that a query is multiplied with ... */
#define LATENT_SUM 512u /* ... and those that are summed */
#define HEADS 64u
#define HEADS_AT_ONCE ATTENTION_HEADS /* as attention.c calls the kernels */
#define INDEX_HEADS 32u
#define INDEX_DIM 128u
#define EXPERTS 256u
#define QUERY_ROWS 16u /* different rows of queries, used in turn */
#define VECTORS 16u    /* different vectors of scores, used in turn */
#define FACTOR 0x1p-6f

/* What a case allocates; freed together. */
struct memory_list {
    void *at[12];
    size_t count;
};

static void *take(struct memory_list *list, size_t bytes)
{
    void *memory = aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (memory)
        memset(memory, 0, (bytes + 63) / 64 * 64);
    list->at[list->count++] = memory;
    return memory;
}

static bool is_whole(const struct memory_list *list)
{
    for (size_t i = 0; i < list->count; i++)
        if (!list->at[i])
            return false;
    return true;
}

struct measurement {
    const struct bench_case *which;
    const struct kernel_set *set;
    const struct bench_memory *memory;
    struct memory_list list;
    float *x;  /* floats, the case's own shape */
    int8_t *q; /* the same quantised */
    float *scales;
    int32_t *sums;
    float *y;                /* results */
    struct matmul_row *rows; /* [threads][rows] */
    uint16_t *latents;       /* [n][LATENT] */
    uint32_t *index;
    float *scratch; /* [threads][scratch_floats] */
    size_t scratch_floats;
};

static void close_measurement(void *context)
{
    struct measurement *m = context;
    for (size_t i = 0; m && i < m->list.count; i++)
        free(m->list.at[i]);
    free(m);
}

static int open_measurement(const struct bench_case *which, const struct kernel_set *set,
                            const struct bench_memory *memory, struct measurement **ret_measurement,
                            struct error *ret_error)
{
    struct measurement *m = calloc(1, sizeof *m);
    if (!m)
        return error_set(ret_error, ENOMEM, "no memory for %s", which->name);
    m->which = which;
    m->set = set;
    m->memory = memory;
    *ret_measurement = m;
    return 0;
}

static int check_measurement(struct measurement *m, struct error *ret_error)
{
    if (is_whole(&m->list))
        return 0;
    const char *name = m->which->name;
    close_measurement(m);
    return error_set(ret_error, ENOMEM, "no memory for %s", name);
}

/* Numbers from -1 to 1, the same each time. */
static void fill_floats(float *x, size_t count)
{
    uint32_t state = 12345;
    for (size_t i = 0; i < count; i++) {
        state = state * 1664525u + 1013904223u; /* Numerical Recipes, chapter 7.1 */
        x[i] = (float)(state >> 8) * 0x1p-23f - 1.0f;
    }
}

static enum weight_format format_of(const struct bench_case *which)
{
    return strstr(which->name, "int4") ? WEIGHT_INT4 : WEIGHT_INT8;
}

/* --- matrix products --- */

static int open_matmul(const struct bench_case *which, const struct kernel_set *set, const struct bench_memory *memory,
                       void **ret_context, double *ret_item_bytes, double *ret_item_macs, struct error *ret_error)
{
    struct measurement *m;
    int status = open_measurement(which, set, memory, &m, ret_error);
    if (status < 0)
        return status;
    size_t elements = (size_t)which->rows * which->k, groups = elements / GROUP;
    m->x = take(&m->list, which->k * sizeof *m->x);
    m->q = take(&m->list, elements);
    m->scales = take(&m->list, groups * sizeof *m->scales);
    m->sums = take(&m->list, groups * sizeof *m->sums);
    m->y = take(&m->list, (size_t)which->rows * which->n * sizeof *m->y);
    m->rows = take(&m->list, (size_t)memory->threads * which->rows * sizeof *m->rows);
    status = check_measurement(m, ret_error);
    if (status < 0)
        return status;
    fill_floats(m->x, which->k);
    for (uint32_t r = 0; r < which->rows; r++) {
        size_t at = (size_t)r * which->k;
        set->quantise(m->x, which->k, m->q + at, m->scales + at / GROUP, m->sums + at / GROUP);
        m->x[r % which->k] += 0.5f; /* no two rows alike */
    }
    for (unsigned t = 0; t < memory->threads; t++) {
        size_t first = (size_t)split(which->n / BLOCK_ROWS, t, memory->threads).first * BLOCK_ROWS;
        for (uint32_t r = 0; r < which->rows; r++) {
            size_t at = (size_t)r * which->k;
            m->rows[(size_t)t * which->rows + r] = (struct matmul_row){.q = m->q + at,
                                                                       .scales = m->scales + at / GROUP,
                                                                       .sums = m->sums + at / GROUP,
                                                                       .y = m->y + (size_t)r * which->n + first};
        }
    }
    uint32_t blocks = which->n / BLOCK_ROWS;
    *ret_item_bytes = (double)(quanta_bytes(format_of(which), blocks, which->k) + scales_bytes(blocks, which->k));
    *ret_item_macs = (double)which->n * which->k * which->rows;
    *ret_context = m;
    return 0;
}

/* An item is one matrix; they follow one another through the thread's memory. */
static void work_matmul(void *context, unsigned thread, unsigned threads, uint64_t first, uint64_t count)
{
    const struct measurement *m = context;
    enum weight_format format = format_of(m->which);
    uint32_t k = m->which->k, blocks = split(m->which->n / BLOCK_ROWS, thread, threads).count;
    size_t quanta = quanta_bytes(format, blocks, k), scales = scales_bytes(blocks, k);
    if (blocks == 0)
        return;
    size_t matrices = m->memory->bytes / quanta, with_scales = m->memory->scale_bytes / scales;
    matrices = with_scales < matrices ? with_scales : matrices;
    matmul_function *multiply = format == WEIGHT_INT4 ? m->set->matmul_int4 : m->set->matmul_int8;
    for (uint64_t i = first; matrices > 0 && i < first + count; i++)
        multiply(m->memory->quanta[thread] + i % matrices * quanta,
                 m->memory->scales[thread] + i % matrices * (scales / 2), blocks, k, FACTOR,
                 m->rows + (size_t)thread * m->which->rows, m->which->rows);
}

/* --- the router: f32 products with bf16 weights --- */

static int open_router(const struct bench_case *which, const struct kernel_set *set, const struct bench_memory *memory,
                       void **ret_context, double *ret_item_bytes, double *ret_item_macs, struct error *ret_error)
{
    struct measurement *m;
    int status = open_measurement(which, set, memory, &m, ret_error);
    if (status < 0)
        return status;
    m->x = take(&m->list, (size_t)which->rows * which->k * sizeof *m->x);
    m->y = take(&m->list, (size_t)which->rows * which->n * sizeof *m->y);
    m->rows = take(&m->list, (size_t)memory->threads * which->rows * sizeof *m->rows);
    status = check_measurement(m, ret_error);
    if (status < 0)
        return status;
    fill_floats(m->x, (size_t)which->rows * which->k);
    for (unsigned t = 0; t < memory->threads; t++)
        for (uint32_t r = 0; r < which->rows; r++)
            m->rows[(size_t)t * which->rows + r] =
                (struct matmul_row){.x = m->x + (size_t)r * which->k,
                                    .y = m->y + (size_t)r * which->n + split(which->n, t, memory->threads).first};
    *ret_item_bytes = 2.0 * which->n * which->k;
    *ret_item_macs = (double)which->n * which->k * which->rows;
    *ret_context = m;
    return 0;
}

/* The scales serve as weights: as bf16 they are small numbers too. */
static void work_router(void *context, unsigned thread, unsigned threads, uint64_t first, uint64_t count)
{
    const struct measurement *m = context;
    uint32_t n = split(m->which->n, thread, threads).count;
    size_t elements = (size_t)n * m->which->k, matrices = elements ? m->memory->scale_bytes / 2 / elements : 0;
    for (uint64_t i = first; matrices > 0 && i < first + count; i++)
        m->set->linear(m->memory->scales[thread] + i % matrices * elements, DTYPE_BF16, n, m->which->k,
                       m->rows + (size_t)thread * m->which->rows, m->which->rows);
}

/* --- attention over n keys: an item is one row of all heads a thread --- */

static int open_attention(const struct bench_case *which, const struct kernel_set *set,
                          const struct bench_memory *memory, void **ret_context, double *ret_item_bytes,
                          double *ret_item_macs, struct error *ret_error)
{
    struct measurement *m;
    int status = open_measurement(which, set, memory, &m, ret_error);
    if (status < 0)
        return status;
    m->scratch_floats =
        (size_t)KEY_BLOCK * LATENT + (size_t)HEADS_AT_ONCE * which->n + (size_t)HEADS_AT_ONCE * LATENT_SUM;
    m->x = take(&m->list, (size_t)QUERY_ROWS * HEADS * LATENT * sizeof *m->x);
    m->latents = take(&m->list, (size_t)which->n * LATENT * sizeof *m->latents);
    m->scratch = take(&m->list, memory->threads * m->scratch_floats * sizeof *m->scratch);
    status = check_measurement(m, ret_error);
    if (status < 0)
        return status;
    fill_floats(m->x, (size_t)QUERY_ROWS * HEADS * LATENT);
    for (uint32_t t = 0; t < which->n; t++)
        set->store_f16(m->x + (size_t)t % (QUERY_ROWS * HEADS) * LATENT, LATENT, m->latents + (size_t)t * LATENT);
    *ret_item_bytes = (double)which->n * LATENT * sizeof(uint16_t) * memory->threads;
    *ret_item_macs = (double)which->n * HEADS * (LATENT + LATENT_SUM) * memory->threads;
    *ret_context = m;
    return 0;
}

/* As attend() of compute/attention.c. */
static void attend(const struct measurement *m, const float *q, float *scratch)
{
    const struct kernel_set *set = m->set;
    uint32_t count = m->which->n;
    float *keys = scratch, *scores = keys + (size_t)KEY_BLOCK * LATENT, *z = scores + (size_t)HEADS_AT_ONCE * count;
    for (uint32_t first = 0; first < count; first += KEY_BLOCK) {
        uint32_t block = count - first < KEY_BLOCK ? count - first : KEY_BLOCK;
        for (uint32_t t = 0; t < block; t++)
            set->load_f16(m->latents + (size_t)(first + t) * LATENT, LATENT, keys + (size_t)t * LATENT);
        set->attention_scores(q, HEADS_AT_ONCE, keys, block, LATENT, 0.0625f, scores + first, count);
    }
    memset(z, 0, (size_t)HEADS_AT_ONCE * LATENT_SUM * sizeof *z);
    for (uint32_t first = 0; first < count; first += KEY_BLOCK) {
        uint32_t block = count - first < KEY_BLOCK ? count - first : KEY_BLOCK;
        for (uint32_t h = 0; h < HEADS_AT_ONCE; h++)
            set->softmax_block(scores + (size_t)h * count + first, block,
                               set->maximum(scores + (size_t)h * count, first == 0 ? count : 1));
        for (uint32_t t = 0; t < block; t++)
            set->load_f16(m->latents + (size_t)(first + t) * LATENT, LATENT, keys + (size_t)t * LATENT);
        set->attention_sum(scores + first, count, HEADS_AT_ONCE, keys, block, LATENT, LATENT_SUM, z);
    }
}

static void work_attention(void *context, unsigned thread, unsigned threads, uint64_t first, uint64_t count)
{
    const struct measurement *m = context;
    for (uint64_t i = first; i < first + count; i++)
        for (uint32_t h = 0; h < HEADS; h += HEADS_AT_ONCE)
            attend(m, m->x + ((i * threads + thread) % QUERY_ROWS * HEADS + h) * LATENT,
                   m->scratch + thread * m->scratch_floats);
}

/* --- index scores of n keys, positions split over the threads --- */

static int open_indexer(const struct bench_case *which, const struct kernel_set *set, const struct bench_memory *memory,
                        void **ret_context, double *ret_item_bytes, double *ret_item_macs, struct error *ret_error)
{
    struct measurement *m;
    int status = open_measurement(which, set, memory, &m, ret_error);
    if (status < 0)
        return status;
    size_t width = (size_t)INDEX_HEADS * INDEX_DIM;
    m->x = take(&m->list, width * sizeof *m->x);
    m->q = take(&m->list, width);
    m->scales = take(&m->list, width / GROUP * sizeof *m->scales);
    m->sums = take(&m->list, width / GROUP * sizeof *m->sums);
    m->y = take(&m->list, which->n * sizeof *m->y);
    m->scratch = take(&m->list, (size_t)which->n * (INDEX_DIM / GROUP) * sizeof *m->scratch); /* the keys' scales */
    status = check_measurement(m, ret_error);
    if (status < 0)
        return status;
    fill_floats(m->x, width);
    set->quantise(m->x, (uint32_t)width, m->q, m->scales, m->sums);
    fill_floats(m->scratch, (size_t)which->n * (INDEX_DIM / GROUP));
    size_t key_bytes = INDEX_DIM + INDEX_DIM / GROUP * sizeof(float);
    *ret_item_bytes = (double)which->n * (double)key_bytes;
    *ret_item_macs = (double)which->n * INDEX_HEADS * INDEX_DIM;
    *ret_context = m;
    return 0;
}

static void work_indexer(void *context, unsigned thread, unsigned threads, uint64_t first, uint64_t count)
{
    const struct measurement *m = context;
    struct range own = split(m->which->n, thread, threads);
    const struct index_queries queries = {.heads = INDEX_HEADS,
                                          .dim = INDEX_DIM,
                                          .q = m->q,
                                          .scales = m->scales,
                                          .sums = m->sums,
                                          .weights = m->x,
                                          .scale = 0.088388346f};
    size_t bytes = (size_t)own.count * INDEX_DIM, copies = bytes ? m->memory->bytes / bytes : 0;
    for (uint64_t i = first; copies > 0 && i < first + count; i++)
        m->set->index_scores(&queries, (const int8_t *)m->memory->quanta[thread] + i % copies * bytes,
                             m->scratch + (size_t)own.first * (INDEX_DIM / GROUP), own.count, m->y + own.first);
}

/* --- the k best of n scores, one thread --- */

static int open_select(const struct bench_case *which, const struct kernel_set *set, const struct bench_memory *memory,
                       void **ret_context, double *ret_item_bytes, double *ret_item_macs, struct error *ret_error)
{
    struct measurement *m;
    int status = open_measurement(which, set, memory, &m, ret_error);
    if (status < 0)
        return status;
    m->x = take(&m->list, (size_t)VECTORS * which->n * sizeof *m->x);
    m->index = take(&m->list, which->k * sizeof *m->index);
    status = check_measurement(m, ret_error);
    if (status < 0)
        return status;
    fill_floats(m->x, (size_t)VECTORS * which->n);
    *ret_item_bytes = (double)which->n * sizeof(float);
    *ret_item_macs = 0;
    *ret_context = m;
    return 0;
}

static void work_select(void *context, unsigned thread, unsigned threads, uint64_t first, uint64_t count)
{
    (void)threads;
    const struct measurement *m = context;
    for (uint64_t i = first; thread == 0 && i < first + count; i++)
        m->set->select(m->x + i % VECTORS * m->which->n, m->which->n, m->which->k, m->index);
}

/* --- norms and SwiGLU with the quantisation behind them: an item is one row a thread, from memory --- */

static int open_rows(const struct bench_case *which, const struct kernel_set *set, const struct bench_memory *memory,
                     void **ret_context, double *ret_item_bytes, double *ret_item_macs, struct error *ret_error)
{
    struct measurement *m;
    int status = open_measurement(which, set, memory, &m, ret_error);
    if (status < 0)
        return status;
    /* rows: of a thread; then a weight row, and results of a thread */
    m->scratch_floats = (size_t)which->rows * which->n * which->k;
    m->scratch = take(&m->list, memory->threads * m->scratch_floats * sizeof *m->scratch);
    m->x = take(&m->list, which->n * sizeof *m->x);
    m->q = take(&m->list, (size_t)memory->threads * which->n);
    m->scales = take(&m->list, (size_t)memory->threads * which->n / GROUP * sizeof *m->scales);
    m->sums = take(&m->list, (size_t)memory->threads * which->n / GROUP * sizeof *m->sums);
    status = check_measurement(m, ret_error);
    if (status < 0)
        return status;
    fill_floats(m->scratch, memory->threads * m->scratch_floats);
    fill_floats(m->x, which->n);
    *ret_item_bytes = (double)which->n * which->k * sizeof(float) * memory->threads;
    *ret_item_macs = 0;
    *ret_context = m;
    return 0;
}

static void work_rmsnorm(void *context, unsigned thread, unsigned threads, uint64_t first, uint64_t count)
{
    (void)threads;
    const struct measurement *m = context;
    size_t n = m->which->n, at = thread * n;
    for (uint64_t i = first; i < first + count; i++)
        m->set->rmsnorm_quantise(m->scratch + thread * m->scratch_floats + i % m->which->rows * n, m->x, m->which->n,
                                 1e-5f, NULL, m->q + at, m->scales + at / GROUP, m->sums + at / GROUP);
}

static void work_swiglu(void *context, unsigned thread, unsigned threads, uint64_t first, uint64_t count)
{
    (void)threads;
    const struct measurement *m = context;
    size_t n = m->which->n, at = thread * n;
    for (uint64_t i = first; i < first + count; i++) {
        const float *gate = m->scratch + thread * m->scratch_floats + i % m->which->rows * 2 * n;
        m->set->swiglu_quantise(gate, gate + n, m->which->n, m->q + at, m->scales + at / GROUP, m->sums + at / GROUP);
    }
}

#define MATMUL(name, bound, rows)                                                                                      \
    {name, bound, rows, HIDDEN, WIDTH, open_matmul, work_matmul, close_measurement},                                   \
    {                                                                                                                  \
        name, bound, rows, WIDTH, HIDDEN, open_matmul, work_matmul, close_measurement                                  \
    }

const struct bench_case bench_cases[] = {
    MATMUL("int4_gemv", BOUND_READ, 1),
    MATMUL("int4_gemv", BOUND_READ, 2),
    MATMUL("int4_gemv", BOUND_READ, 4),
    MATMUL("int4_gemv", BOUND_READ, 16),
    MATMUL("int8_gemv", BOUND_READ, 1),
    MATMUL("int8_gemv", BOUND_READ, 2),
    MATMUL("int8_gemv", BOUND_READ, 4),
    MATMUL("int8_gemv", BOUND_READ, 16),
    MATMUL("int4_gemm", BOUND_DOT, 16),
    MATMUL("int4_gemm", BOUND_DOT, 128),
    MATMUL("int4_gemm", BOUND_DOT, 512),
    MATMUL("int8_gemm", BOUND_DOT, 16),
    MATMUL("int8_gemm", BOUND_DOT, 128),
    MATMUL("int8_gemm", BOUND_DOT, 512),
    {"attention", BOUND_FMA, 512, 2048, LATENT, open_attention, work_attention, close_measurement},
    {"indexer", BOUND_DOT, 1, 100000, INDEX_DIM, open_indexer, work_indexer, close_measurement},
    {"topk", BOUND_READ_ONE, 1, 100000, 2048, open_select, work_select, close_measurement},
    {"router", BOUND_READ, 1, EXPERTS, HIDDEN, open_router, work_router, close_measurement},
    {"rmsnorm_quantise", BOUND_READ, 512, HIDDEN, 1, open_rows, work_rmsnorm, close_measurement},
    {"swiglu_quantise", BOUND_READ, 512, WIDTH, 2, open_rows, work_swiglu, close_measurement},
};
const size_t bench_case_count = sizeof bench_cases / sizeof bench_cases[0];
