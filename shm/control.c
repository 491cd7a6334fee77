#include "shm/control.h"

#include "proto/weights.h"
#include "shm/futex.h"

#include <string.h>

#define CONTROL_PART "control"

/* Limits that keep every product of facts inside 64 bits and every table inside its array. */
#define MAX_ROWS 65536u
#define MAX_KV_PAGES (1u << 24)
#define MAX_PAGE_TOKENS 4096u
#define MAX_POOL_SLOTS (1u << 24)
#define MAX_ISA 64u

const char *ahead_count_name(enum ahead_count count)
{
    static const char *const names[AHEAD_COUNTS] = {
        [AHEAD_ASKED] = "asked", [AHEAD_USED] = "used", [AHEAD_READY] = "ready", [AHEAD_MISSED] = "missed"};
    return names[count];
}

struct bound {
    const char *name;
    uint64_t value, least, most;
};

static int check_bounds(const struct bound *bounds, size_t count, struct error *ret_error)
{
    for (size_t i = 0; i < count; i++) {
        const struct bound *b = &bounds[i];
        if (b->value < b->least || b->value > b->most)
            return error_set(ret_error, EBADMSG, "control segment: %s is %llu, allowed are %llu to %llu", b->name,
                             (unsigned long long)b->value, (unsigned long long)b->least, (unsigned long long)b->most);
    }
    return 0;
}

static int check_workers(const struct facts *facts, struct error *ret_error)
{
    for (uint32_t w = 0; w < facts->workers; w++) {
        const struct bound bounds[] = {
            {"worker_node", facts->worker_node[w], 0, facts->nodes - 1},
            {"core_count", facts->core_count[w], 1, MAX_CORES},
        };
        int status = check_bounds(bounds, sizeof(bounds) / sizeof(bounds[0]), ret_error);
        for (uint32_t c = 0; status == 0 && c < facts->core_count[w]; c++) {
            if (facts->cores[w][c] >= MAX_CORES)
                status = error_set(ret_error, EBADMSG, "control segment: core %u of worker %u, allowed are 0 to %u",
                                   facts->cores[w][c], w, MAX_CORES - 1);
        }
        if (status < 0)
            return status;
    }
    return 0;
}

static int check_facts(const struct facts *facts, struct error *ret_error)
{
    int status = model_config_check(&facts->config, ret_error);
    if (status < 0)
        return status;
    if (!memchr(facts->container, 0, sizeof(facts->container)) || facts->container[0] != '/')
        return error_set(ret_error, EBADMSG, "control segment: container is not an absolute path");
    if (!memchr(facts->mirror, 0, sizeof(facts->mirror)) || (facts->mirror[0] && facts->mirror[0] != '/'))
        return error_set(ret_error, EBADMSG, "control segment: mirror is not an absolute path");
    const struct bound bounds[] = {
        {"dense_format", facts->dense_format, WEIGHT_INT4, WEIGHT_INT8},
        {"expert_format", facts->expert_format, WEIGHT_INT4, WEIGHT_INT8},
        {"workers", facts->workers, 1, MAX_WORKERS},
        {"threads", facts->threads, 1, MAX_CORES},
        {"nodes", facts->nodes, 1, EXPERT_SLICES},
        {"spin", facts->spin, 0, 1},
        {"activations", facts->activations, ACTIVATIONS_INT8, ACTIVATIONS_F32},
        {"kv", facts->kv, KV_F16, KV_F32},
        {"io", facts->io, IO_AUTO, IO_PREAD},
        {"index_topk", facts->index_topk, 1, UINT32_MAX / 2},
        {"max_rows", facts->max_rows, 1, MAX_ROWS},
        {"logit_rows", facts->logit_rows, 1, MAX_ROWS},
        {"kv_pages", facts->kv_pages, 1, MAX_KV_PAGES},
        {"page_tokens", facts->page_tokens, 1, MAX_PAGE_TOKENS},
        {"context", facts->context, 1, UINT32_MAX / 2},
        {"slots", facts->slots, 1, facts->logit_rows},
        {"queue", facts->queue, 0, MAX_ROWS},
        {"prefill_chunk", facts->prefill_chunk, 1, facts->max_rows},
        {"stripes", facts->stripes, 1, EXPERT_SLICES},
        {"pool_slots", facts->pool_slots, facts->config.top_k, MAX_POOL_SLOTS},
        {"hugepages", facts->hugepages, 0, 1},
        {"verify", facts->verify, VERIFY_FIRST, VERIFY_OFF},
        {"prefetch", facts->prefetch, PREFETCH_AUTO, PREFETCH_ON},
        {"learning", facts->learning, LEARNING_OFF, LEARNING_ON},
        {"isa", facts->isa, 0, MAX_ISA},
    };
    status = check_bounds(bounds, sizeof(bounds) / sizeof(bounds[0]), ret_error);
    if (status < 0)
        return status;
    if (facts->nodes & (facts->nodes - 1))
        return error_set(ret_error, EBADMSG, "control segment: nodes is %u, allowed are 1, 2, 4 and 8", facts->nodes);
    return check_workers(facts, ret_error);
}

int control_create(const char *instance, const struct facts *facts, struct control **ret_control,
                   struct error *ret_error)
{
    int status = check_facts(facts, ret_error);
    if (status < 0)
        return status;
    struct segment segment;
    struct segment_options options = {.kind = SEGMENT_CONTROL, .node = -1, .populate_threads = 1};
    status = segment_create(instance, CONTROL_PART, sizeof(struct control), &options, &segment, ret_error);
    if (status < 0)
        return status;
    struct control *control = segment.base;
    control->facts = *facts;
    atomic_store(&control->epoch, 1);
    atomic_store(&control->pool_target, facts->pool_slots);
    *ret_control = control;
    return 0;
}

static int attach(const char *instance, bool writable, struct control **ret_control, struct facts *ret_facts,
                  struct error *ret_error)
{
    struct segment segment;
    int status =
        segment_attach(instance, CONTROL_PART, SEGMENT_CONTROL, sizeof(struct control), writable, &segment, ret_error);
    if (status < 0)
        return status;
    struct control *control = segment.base;
    *ret_facts = control->facts; /* copied first, then checked: the copy is what counts */
    status = check_facts(ret_facts, ret_error);
    if (status < 0) {
        segment_detach(&segment);
        return status;
    }
    *ret_control = control;
    return 0;
}

int control_attach(const char *instance, struct control **ret_control, struct facts *ret_facts, struct error *ret_error)
{
    return attach(instance, true, ret_control, ret_facts, ret_error);
}

int control_watch(const char *instance, const struct control **ret_control, struct facts *ret_facts,
                  struct error *ret_error)
{
    struct control *control;
    int status = attach(instance, false, &control, ret_facts, ret_error);
    if (status == 0)
        *ret_control = control;
    return status;
}

void control_detach(const struct control *control)
{
    struct segment segment = {(void *)(uintptr_t)control, sizeof(*control)};
    segment_detach(&segment);
}

uint32_t control_raise_epoch(struct control *control)
{
    uint32_t epoch = atomic_fetch_add(&control->epoch, 1) + 1;
    /* Both words change before the wake, so that who has read a word, then found the old epoch, does not fall asleep on
     * it: its futex_wait sees another value. Read the word first, then the epoch. */
    for (uint32_t w = 0; w < MAX_WORKERS; w++) {
        struct worker_line *line = &control->workers[w];
        atomic_fetch_add(&line->published, 1);
        futex_wake_all(&line->published);
        atomic_fetch_add(&line->sequence, 1);
        futex_wake_all(&line->sequence);
    }
    return epoch;
}
