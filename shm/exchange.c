#include "shm/exchange.h"

#include "shm/futex.h"

#define EXCHANGE_PART "exchange"
#define EXCHANGE_ALIGN 4096u
#define SPINS 20000u /* looks at a line before sleeping, where spinning is allowed: some 100 us */

static size_t align_up(size_t value, size_t to)
{
    return (value + to - 1) / to * to;
}

static size_t larger(size_t a, size_t b)
{
    return a > b ? a : b;
}

/* f32 values a row of the widest exchange of rows: each line is one exchange of a layer, in their order. */
static size_t widest_row(const struct facts *facts)
{
    const struct model_config *config = &facts->config;
    size_t shared_width = (size_t)config->shared_experts * config->expert_width;
    size_t most = 2 * (size_t)config->hidden;
    most = larger(most,
                  (size_t)config->q_lora + config->kv_lora + config->qk_rope + config->index_dim + config->index_heads);
    most = larger(most, (size_t)config->index_heads * config->index_dim);
    most = larger(most, (size_t)config->heads * config->v_head);
    most = larger(most, config->dense_width);
    most = larger(most, shared_width);
    return larger(most, (size_t)config->top_k * config->expert_width);
}

size_t exchange_candidates(const struct facts *facts)
{
    return facts->index_topk < facts->context ? facts->index_topk : 0;
}

void exchange_layout(const struct facts *facts, struct exchange_layout *ret_layout)
{
    struct exchange_layout layout = {0};
    size_t candidate = sizeof(float) + sizeof(uint32_t);
    size_t a_row = widest_row(facts) * sizeof(float);
    a_row = larger(a_row, facts->workers * (exchange_candidates(facts) * candidate + sizeof(uint32_t)));
    layout.buffer_bytes = align_up(EXCHANGE_WAVE_BYTES + facts->max_rows * a_row, EXCHANGE_ALIGN);
    layout.buffers = align_up(sizeof(struct segment_header), EXCHANGE_ALIGN);
    layout.logits = layout.buffers + 2 * layout.buffer_bytes;
    size_t logits_bytes = align_up((size_t)facts->logit_rows * facts->config.vocab * sizeof(float), EXCHANGE_ALIGN);
    layout.draft_logits = layout.logits + logits_bytes;
    layout.segment_bytes = layout.draft_logits + (facts->config.mtp_layers ? logits_bytes : 0);
    *ret_layout = layout;
}

int exchange_attach(const char *instance, const struct facts *facts, struct control *control, uint32_t self,
                    struct exchange *ret_exchange, struct error *ret_error)
{
    if (self >= facts->workers)
        return error_set(ret_error, EINVAL, "worker %u of an instance with %u workers", self, facts->workers);
    struct exchange exchange = {.control = control,
                                .workers = facts->workers,
                                .self = self,
                                .spin = facts->spin,
                                .method = &exchange_shared_memory};
    exchange_layout(facts, &exchange.layout);
    int status = segment_attach(instance, EXCHANGE_PART, SEGMENT_EXCHANGE, exchange.layout.segment_bytes, true,
                                &exchange.segment, ret_error);
    if (status < 0)
        return status;
    *ret_exchange = exchange;
    return 0;
}

void exchange_detach(struct exchange *exchange)
{
    segment_detach(&exchange->segment);
}

/* Says how far this worker is. The word changes by an addition, never back to a value that a sleeper may have read,
 * also when a new epoch begins at 0 again. */
static void announce(struct exchange *exchange)
{
    struct worker_line *line = &exchange->control->workers[exchange->self];
    uint64_t pair = (uint64_t)exchange->epoch << 32 | exchange->sequence;
    atomic_store_explicit(&line->arrived, pair, memory_order_release);
    atomic_fetch_add(&line->sequence, 1);
    if (atomic_load(&line->waiters))
        futex_wake_all(&line->sequence);
}

void exchange_reset(struct exchange *exchange, uint32_t epoch)
{
    exchange->epoch = epoch;
    exchange->sequence = 0;
    announce(exchange);
}

static bool has_arrived(struct exchange *exchange, struct worker_line *line)
{
    uint64_t pair = atomic_load_explicit(&line->arrived, memory_order_acquire);
    return pair >> 32 == exchange->epoch && (uint32_t)pair >= exchange->sequence;
}

static bool is_stale(struct exchange *exchange)
{
    return atomic_load(&exchange->control->epoch) != exchange->epoch;
}

static int await(struct exchange *exchange, struct worker_line *line)
{
    for (uint32_t i = 0; i < (exchange->spin ? SPINS : 1); i++) {
        if (has_arrived(exchange, line))
            return 0;
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
    }
    int status = 0;
    atomic_fetch_add(&line->waiters, 1);
    for (;;) {
        uint32_t word =
            atomic_load(&line->sequence); /* first the word, then what it stands for: no gap to lose a wake in */
        if (is_stale(exchange)) {
            status = -ESTALE;
            break;
        }
        if (has_arrived(exchange, line))
            break;
        futex_wait(&line->sequence, word, -1);
    }
    atomic_fetch_sub(&line->waiters, 1);
    return status;
}

static int shared_memory_barrier(struct exchange *exchange)
{
    exchange->sequence++;
    if (exchange->workers > 1)
        announce(exchange);
    for (uint32_t w = 0; w < exchange->workers; w++) {
        if (w == exchange->self)
            continue;
        int status = await(exchange, &exchange->control->workers[w]);
        if (status < 0)
            return status;
    }
    return is_stale(exchange) ? -ESTALE : 0;
}

const struct exchange_method exchange_shared_memory = {.name = "shared memory", .barrier = shared_memory_barrier};
