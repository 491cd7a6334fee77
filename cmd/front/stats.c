/* Figures of the instance: `status` for people, `stats` as JSON, `metrics` as the text format of Prometheus. The
 * counters belong to the processes that write them, in the control segment; they are only read here. */
#include "cmd/front/front.h"

#include "cmd/front/clock.h"
#include "proto/cleanup.h"

#include <inttypes.h>
#include <string.h>

struct counter {
    const char *name, *help;
    bool gauge;
    double factor; /* 0: a whole number; else the value is multiplied with it */
    uint64_t value;
};

#define COUNTERS 39u

static uint64_t load(const _Atomic uint64_t *word)
{
    return atomic_load_explicit(word, memory_order_relaxed);
}

static size_t collect(const struct front *front, struct counter *ret_counters)
{
    const struct control *control = front->scheduler.control;
    const struct front_line *line = &control->front;
    const struct iod_line *iod = &control->iod;
    const struct worker_line *worker =
        &control->workers[0]; /* all workers run the same steps; worker 0 pins the experts */
    const struct counter counters[] = {
        {"requests", "requests that came", false, 0, load(&line->requests)},
        {"answers", "requests that were answered", false, 0, load(&line->answers)},
        {"errors", "requests that got an error", false, 0, load(&line->errors)},
        {"running", "requests that are being answered", true, 0, front->scheduler.running_count},
        {"queued", "requests that wait", true, 0, front->scheduler.waiting_count},
        {"prompt_tokens", "prompt tokens computed", false, 0, load(&line->prompt_tokens)},
        {"answer_tokens", "answer tokens given", false, 0, load(&line->answer_tokens)},
        {"prompt_seconds", "time from a slot to the first token", false, 1e-9, load(&line->prompt_ns)},
        {"answer_seconds", "time from the first to the last token", false, 1e-9, load(&line->answer_ns)},
        {"steps", "forward passes", false, 0, load(&worker->steps)},
        {"rows", "rows of forward passes", false, 0, load(&worker->rows)},
        {"step_seconds", "time in forward passes", false, 1e-9, load(&worker->step_ns)},
        {"attention_seconds", "of it in attention", false, 1e-9, load(&worker->part_ns[PART_ATTENTION])},
        {"indexer_seconds", "of it in the choice of keys", false, 1e-9, load(&worker->part_ns[PART_INDEXER])},
        {"dense_seconds", "of it in the MLP of dense layers", false, 1e-9, load(&worker->part_ns[PART_DENSE])},
        {"router_seconds", "of it in routers", false, 1e-9, load(&worker->part_ns[PART_ROUTER])},
        {"shared_seconds", "of it in shared experts", false, 1e-9, load(&worker->part_ns[PART_SHARED])},
        {"experts_seconds", "of it in routed experts", false, 1e-9, load(&worker->part_ns[PART_EXPERTS])},
        {"wait_seconds", "of it waiting for experts", false, 1e-9, load(&worker->part_ns[PART_WAIT])},
        {"exchange_seconds", "of it waiting for other workers", false, 1e-9, load(&worker->part_ns[PART_EXCHANGE])},
        {"head_seconds", "of it in logits", false, 1e-9, load(&worker->part_ns[PART_HEAD])},
        {"other_seconds", "of it in all the rest", false, 1e-9, load(&worker->part_ns[PART_OTHER])},
        {"matmul_seconds", "of it in products with quantised matrices", false, 1e-9, load(&worker->matmul_ns)},
        {"flight_seconds", "time from a step's message to its answer", false, 1e-9, load(&line->flight_ns)},
        {"front_seconds", "the front's own time after each step", false, 1e-9, load(&line->own_ns)},
        {"hits", "experts that were in the pool when they were wanted", false, 0, load(&worker->hits)},
        {"misses", "experts that had to be read first", false, 0, load(&worker->misses)},
        {"lookahead_asked", "experts that were asked for ahead", false, 0, load(&worker->ahead[AHEAD_ASKED])},
        {"lookahead_used", "of them those that were then wanted", false, 0, load(&worker->ahead[AHEAD_USED])},
        {"lookahead_ready", "of these those that were in the pool in time", false, 0,
         load(&worker->ahead[AHEAD_READY])},
        {"lookahead_missed", "missing experts that were not asked for ahead", false, 0,
         load(&worker->ahead[AHEAD_MISSED])},
        {"loads", "experts read", false, 0, load(&iod->loads)},
        {"load_bytes", "bytes of experts read", false, 0, load(&iod->load_bytes)},
        {"reads", "reads issued", false, 0, load(&iod->reads)},
        {"read_seconds", "time of reads, each from its start to its end", false, 1e-9, load(&iod->read_ns)},
        {"evictions", "experts given up for others", false, 0, load(&iod->evictions)},
        {"failures", "experts that could not be read", false, 0, load(&iod->failures)},
        {"dense_bytes", "bytes of dense weights read", false, 0, load(&iod->dense_bytes)},
        {"kv_pages_free", "KV pages that nobody holds", true, 0, front->scheduler.pages.free_count},
    };
    _Static_assert(sizeof counters / sizeof counters[0] == COUNTERS, "the array of the callers");
    memcpy(ret_counters, counters, sizeof counters);
    return COUNTERS;
}

json_t *stats_counters(const struct front *front)
{
    struct counter counters[COUNTERS];
    size_t count = collect(front, counters);
    json_t *object = json_pack("{s:b}", "ok", 1);
    for (size_t i = 0; i < count; i++)
        json_object_set_new(object, counters[i].name,
                            counters[i].factor > 0 ? json_real((double)counters[i].value * counters[i].factor)
                                                   : json_integer((json_int_t)counters[i].value));
    return object;
}

json_t *stats_metrics(const struct front *front)
{
    struct counter counters[COUNTERS];
    size_t count = collect(front, counters), size;
    _cleanup_free_ char *text = NULL;
    FILE *file = open_memstream(&text, &size);
    if (!file)
        return NULL;
    for (size_t i = 0; i < count; i++) {
        const struct counter *counter = &counters[i];
        const char *suffix = counter->gauge ? "" : "_total";
        fprintf(file, "# HELP calypte_%s%s %s\n# TYPE calypte_%s%s %s\ncalypte_%s%s{instance=\"%s\"} ", counter->name,
                suffix, counter->help, counter->name, suffix, counter->gauge ? "gauge" : "counter", counter->name,
                suffix, front->instance);
        if (counter->factor > 0)
            fprintf(file, "%.9f\n", (double)counter->value * counter->factor);
        else
            fprintf(file, "%" PRIu64 "\n", counter->value);
    }
    if (fclose(file) != 0)
        return NULL;
    return json_pack("{s:b, s:o}", "ok", 1, "text", json_stringn(text, size));
}

static json_t *requests_json(const struct front *front)
{
    json_t *array = json_array();
    const struct request *request;
    TAILQ_FOREACH (request, &front->requests, link) {
        static const char *const kinds[] = {
            [REQUEST_GENERATE] = "generate", [REQUEST_SUBMIT] = "submit", [REQUEST_SCORE] = "score"};
        const struct sequence *sequence =
            request->kind == REQUEST_SCORE ? &request->score.sequence : &request->generation.sequence;
        const char *state = request->over                         ? "ending"
                            : sequence->state == SEQUENCE_RUNNING ? "running"
                            : sequence->state == SEQUENCE_WAITING ? "queued"
                                                                  : "done";
        json_array_append_new(array, json_pack("{s:s, s:s, s:s, s:b}", "id", request->id, "op", kinds[request->kind],
                                               "state", state, "awaited", request->waiter.connection != 0));
    }
    return array;
}

json_t *stats_status(const struct front *front)
{
    const struct scheduler *scheduler = &front->scheduler;
    const struct facts *facts = &scheduler->facts;
    const struct control *control = scheduler->control;
    return json_pack("{s:b, s:s, s:s, s:s, s:b, s:b, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:f, s:o}", "ok", 1, "instance",
                     front->instance, "model", facts->container, "family", facts->config.model_type, "tokenizer",
                     front->tokenizer != NULL, "serving", scheduler_serving(scheduler), "epoch",
                     (json_int_t)atomic_load(&control->epoch), "workers", (json_int_t)facts->workers, "threads",
                     (json_int_t)facts->threads, "context", (json_int_t)facts->context, "running",
                     (json_int_t)scheduler->running_count, "queued", (json_int_t)scheduler->waiting_count, "queue",
                     (json_int_t)facts->queue, "uptime_s", (double)(clock_ns() - front->started_ns) / 1e9, "requests",
                     requests_json(front));
}
