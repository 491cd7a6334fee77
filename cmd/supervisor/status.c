/* What the control socket answers. */
#include "cmd/supervisor/process.h"
#include "cmd/supervisor/supervise.h"

#include "proto/cleanup.h"

#include <inttypes.h>
#include <limits.h>
#include <string.h>
#include <sys/sysmacros.h>

static json_t *process_json(const char *name, const char *state, pid_t pid, uint32_t restarts)
{
    struct process process = process_look(pid);
    bool stopped = process.state == 'T' || process.state == 't'; /* nothing goes on before it is let go on */
    return json_pack("{s:s, s:s, s:i, s:n, s:[], s:f, s:I, s:i}", "name", name, "state", stopped ? "stopped" : state,
                     "pid", pid, "node", "cores", "cpu", process.cpu, "rss", (json_int_t)process.rss, "restarts",
                     (int)restarts);
}

static json_t *processes_json(const struct supervisor *supervisor)
{
    json_t *processes = json_array();
    const struct facts *facts = &supervisor->plan.facts;
    json_array_append_new(processes, process_json("calypte-supervisor", "ready", getpid(), 0));
    for (uint32_t i = 0; i < supervisor->child_count; i++) {
        const struct child *child = &supervisor->children[i];
        json_t *process =
            process_json(child_program(child->kind), child_state_name(child->state), child->pid, child->restarts);
        if (child->kind == CHILD_WORKER) {
            json_t *cores = json_array();
            for (uint32_t c = 0; c < facts->core_count[child->index]; c++)
                json_array_append_new(cores, json_integer(facts->cores[child->index][c]));
            json_object_set_new(process, "index", json_integer(child->index));
            json_object_set_new(process, "node", json_integer(facts->worker_node[child->index]));
            json_object_set_new(process, "cores", cores);
        }
        json_array_append_new(processes, process);
    }
    return processes;
}

static uint64_t per(uint64_t amount, uint64_t count)
{
    return count ? amount / count : 0;
}

static double rate(uint64_t amount, uint64_t nanoseconds)
{
    return nanoseconds ? (double)amount * 1e9 / (double)nanoseconds : 0;
}

/* Of every MoE layer: experts that were there when it began, and that were not. */
static json_t *layers_json(const struct supervisor *supervisor)
{
    const struct model_config *config = &supervisor->plan.facts.config;
    json_t *layers = json_array();
    for (uint32_t layer = 0; layer < config->layers + config->mtp_layers; layer++) {
        const struct layer_counts *counts = &supervisor->control->layers[layer];
        if (config->layer_kind[layer] == LAYER_MOE)
            json_array_append_new(layers, json_pack("{s:I, s:I, s:I}", "layer", (json_int_t)layer, "hits",
                                                    (json_int_t)atomic_load(&counts->hits), "misses",
                                                    (json_int_t)atomic_load(&counts->misses)));
    }
    return layers;
}

/* What looking ahead was good for. */
static json_t *lookahead_json(const struct supervisor *supervisor)
{
    const struct worker_line *worker = &supervisor->control->workers[0];
    uint32_t prefetch = supervisor->plan.facts.prefetch;
    bool on =
        prefetch == PREFETCH_ON || (prefetch == PREFETCH_AUTO && atomic_load(&supervisor->control->iod.lookahead) == 1);
    json_t *lookahead = json_pack("{s:b}", "on", (int)on);
    for (int c = 0; c < AHEAD_COUNTS; c++)
        json_object_set_new(lookahead, ahead_count_name((enum ahead_count)c),
                            json_integer((json_int_t)atomic_load(&worker->ahead[c])));
    return lookahead;
}

/* What is remembered of the use of experts, and why it is less than the setting says. */
static json_t *learning_json(const struct supervisor *supervisor)
{
    static const char *const names[] = {[LEARNING_OFF] = "off", [LEARNING_READ] = "read", [LEARNING_ON] = "on"};
    uint32_t done = atomic_load(&supervisor->control->iod.learning);
    uint32_t refused = atomic_load(&supervisor->control->iod.learning_refused);
    json_t *learning = json_pack("{s:s}", "state", done <= LEARNING_ON ? names[done] : "unknown");
    if (refused)
        json_object_set_new(
            learning, "why",
            json_string(refused == EBUSY ? "another instance of this model writes it" : strerror((int)refused)));
    return learning;
}

json_t *supervisor_pool_json(const struct supervisor *supervisor)
{
    const struct control *control = supervisor->control;
    const struct pool *pool = &supervisor->pool;
    uint64_t hits = atomic_load(&control->workers[0].hits), misses = atomic_load(&control->workers[0].misses);
    uint32_t filled = 0, loading = 0, pinned = 0;
    for (uint32_t s = 0; s < pool->slot_count; s++) {
        uint64_t word = atomic_load(&pool->slots[s].state);
        filled += slot_state_of(word) == SLOT_READY;
        loading += slot_state_of(word) == SLOT_LOADING;
        pinned += slot_pins_of(word) != 0;
    }
    json_t *size = supervisor_size_json(supervisor);
    json_t *use = json_pack("{s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:o, s:o, s:o}", "filled", (json_int_t)filled,
                            "loading", (json_int_t)loading, "pinned", (json_int_t)pinned, "experts",
                            (json_int_t)supervisor->plan.pool.moe_layers * supervisor->plan.pool.experts, "hits",
                            (json_int_t)hits, "misses", (json_int_t)misses, "evictions",
                            (json_int_t)atomic_load(&control->iod.evictions), "layers", layers_json(supervisor),
                            "lookahead", lookahead_json(supervisor), "learning", learning_json(supervisor));
    json_object_update_missing(size, use);
    json_decref(use);
    return size;
}

/* Where the time of the steps went, as worker 0 counted it; the parts add up to seconds. */
static json_t *steps_json(const struct worker_line *worker)
{
    json_t *parts = json_object();
    for (int p = 0; p < STEP_PARTS; p++)
        json_object_set_new(parts, step_part_name((enum step_part)p),
                            json_real((double)atomic_load(&worker->part_ns[p]) / 1e9));
    return json_pack("{s:I, s:I, s:f, s:f, s:o}", "count", (json_int_t)atomic_load(&worker->steps), "rows",
                     (json_int_t)atomic_load(&worker->rows), "seconds", (double)atomic_load(&worker->step_ns) / 1e9,
                     "matmul", (double)atomic_load(&worker->matmul_ns) / 1e9, "parts", parts);
}

static json_t *percentiles_json(const struct histogram *histogram)
{
    return json_pack("{s:I, s:I, s:I}", "p50", (json_int_t)histogram_percentile(histogram, 0.5), "p90",
                     (json_int_t)histogram_percentile(histogram, 0.9), "p99",
                     (json_int_t)histogram_percentile(histogram, 0.99));
}

/* What waits to be read, by priority. */
static json_t *queues_json(const struct iod_line *iod)
{
    return json_pack("{s:I, s:I, s:I, s:I}", "demands", (json_int_t)atomic_load(&iod->queued_demands), "lookaheads",
                     (json_int_t)atomic_load(&iod->queued_lookaheads), "warmups",
                     (json_int_t)atomic_load(&iod->queued_warmups), "flying_bytes",
                     (json_int_t)atomic_load(&iod->flying_bytes));
}

/* What became of the lookaheads that iod took up. */
static json_t *guesses_json(const struct iod_line *iod)
{
    return json_pack("{s:I, s:I, s:I, s:I, s:I}", "asked", (json_int_t)atomic_load(&iod->guesses_asked), "loaded",
                     (json_int_t)atomic_load(&iod->guesses_loaded), "used", (json_int_t)atomic_load(&iod->guesses_used),
                     "wasted", (json_int_t)atomic_load(&iod->guesses_wasted), "dropped",
                     (json_int_t)atomic_load(&iod->guesses_dropped));
}

/* The copies of the container and what has become of them. */
static json_t *copies_json(const struct supervisor *supervisor)
{
    static const char *const states[] = {
        [COPY_NONE] = "none", [COPY_USED] = "used", [COPY_REFUSED] = "refused", [COPY_DROPPED] = "dropped"};
    const struct facts *facts = &supervisor->plan.facts;
    json_t *copies = json_array();
    for (uint32_t c = 0; c < MAX_COPIES; c++) {
        const char *path = c == 0 ? facts->container : facts->mirror;
        const struct copy_line *copy = &supervisor->control->iod.copies[c];
        uint32_t state = atomic_load(&copy->state);
        if (path[0])
            json_array_append_new(copies, json_pack("{s:s, s:s, s:I, s:I}", "path", path, "state",
                                                    state <= COPY_DROPPED ? states[state] : "unknown", "read_failures",
                                                    (json_int_t)atomic_load(&copy->read_failures), "wrong_checksums",
                                                    (json_int_t)atomic_load(&copy->wrong_checksums)));
    }
    return copies;
}

/* The drives with files of the container: which, of which copies, and what was read there since iod started. */
static json_t *drives_json(const struct iod_line *iod)
{
    json_t *drives = json_array();
    for (uint32_t d = 0, count = atomic_load(&iod->drive_count); d < count && d < MAX_DRIVES; d++) {
        const struct drive_line *drive = &iod->drives[d];
        uint64_t device = atomic_load(&drive->device), reads = atomic_load(&drive->reads);
        char name[32];
        json_t *copies = json_array();
        for (uint32_t c = 0; c < MAX_COPIES; c++) {
            if (atomic_load(&drive->copies) & 1u << c)
                json_array_append_new(copies, json_integer(c + 1));
        }
        snprintf(name, sizeof name, "%u:%u", major(device), minor(device));
        json_array_append_new(drives,
                              json_pack("{s:s, s:o, s:I, s:I, s:I, s:I}", "device", name, "copies", copies, "reads",
                                        (json_int_t)reads, "bytes", (json_int_t)atomic_load(&drive->bytes), "rate",
                                        (json_int_t)atomic_load(&drive->rate), "latency_us",
                                        (json_int_t)(per(atomic_load(&drive->read_ns), reads) / 1000)));
    }
    return drives;
}

static json_t *disk_json(const struct supervisor *supervisor)
{
    static const char *const methods[] = {[IO_AUTO] = "none yet", [IO_URING] = "uring", [IO_PREAD] = "pread"};
    const struct iod_line *iod = &supervisor->control->iod;
    uint32_t method = atomic_load(&iod->method);
    uint64_t reads = atomic_load(&iod->reads);
    json_t *disk =
        json_pack("{s:s, s:b, s:I, s:I, s:I, s:I, s:I, s:I}", "method",
                  method <= IO_PREAD ? methods[method] : "unknown", "direct", (int)(atomic_load(&iod->direct) == 1),
                  "reads", (json_int_t)reads, "bytes", (json_int_t)atomic_load(&iod->load_bytes), "loads",
                  (json_int_t)atomic_load(&iod->loads), "failures", (json_int_t)atomic_load(&iod->failures),
                  "latency_us", (json_int_t)(per(atomic_load(&iod->read_ns), reads) / 1000), "dense_bytes",
                  (json_int_t)atomic_load(&iod->dense_bytes));
    json_t *more = json_pack(
        "{s:o, s:o, s:o, s:o, s:f, s:I, s:I, s:I, s:o, s:o}", "read_us", percentiles_json(&iod->read_us), "demand_us",
        percentiles_json(&iod->demand_us), "queues", queues_json(iod), "guesses", guesses_json(iod), "busy_seconds",
        (double)atomic_load(&iod->busy_ns) / 1e9, "retries", (json_int_t)atomic_load(&iod->retries), "verified_bytes",
        (json_int_t)atomic_load(&iod->verified_bytes), "registered_bytes",
        (json_int_t)atomic_load(&iod->registered_bytes), "copies", copies_json(supervisor), "drives", drives_json(iod));
    uint32_t refused = atomic_load(&iod->registering_refused);
    if (refused)
        json_object_set_new(more, "registering_refused", json_string(strerror((int)refused)));
    json_object_update_missing(disk, more);
    json_decref(more);
    return disk;
}

static json_t *tokens_json(const struct front_line *front)
{
    uint64_t prompt = atomic_load(&front->prompt_tokens), answer = atomic_load(&front->answer_tokens);
    return json_pack("{s:I, s:I, s:f, s:f}", "prompt", (json_int_t)prompt, "answer", (json_int_t)answer, "prompt_per_s",
                     rate(prompt, atomic_load(&front->prompt_ns)), "answer_per_s",
                     rate(answer, atomic_load(&front->answer_ns)));
}

static json_t *requests_json(const struct front_line *front)
{
    return json_pack("{s:I, s:I, s:I, s:I, s:I}", "received", (json_int_t)atomic_load(&front->requests), "answered",
                     (json_int_t)atomic_load(&front->answers), "failed", (json_int_t)atomic_load(&front->errors),
                     "running", (json_int_t)atomic_load(&front->running), "queued",
                     (json_int_t)atomic_load(&front->queued));
}

static json_t *settings_texts(const struct settings *settings)
{
    json_t *texts = json_object();
    for (int s = 0; s < SETTING_COUNT; s++)
        json_object_set_new(texts, setting_info((enum setting)s)->name,
                            json_string(settings_text(settings, (enum setting)s)));
    return texts;
}

static const char *instance_state(const struct supervisor *supervisor)
{
    if (supervisor->stopping)
        return "stopping";
    if (!supervisor->served)
        return "starting";
    return atomic_load(&supervisor->control->serving) == supervisor->epoch ? "serving" : "recovering";
}

static json_t *status_json(const struct supervisor *supervisor)
{
    const struct facts *facts = &supervisor->plan.facts;
    char identity[20];
    snprintf(identity, sizeof identity, "%016" PRIx64, facts->identity);
    return json_pack("{s:b, s:s, s:s, s:s, s:s, s:i, s:f, s:i, s:i, s:i, s:i, s:o, s:o, s:o, s:o, s:o, s:o, s:o}", "ok",
                     1, "instance", supervisor->instance->name, "model", facts->container, "identity", identity,
                     "state", instance_state(supervisor), "epoch", (int)supervisor->epoch, "uptime_s",
                     (double)(supervisor_now_ms() - supervisor->started_ms) / 1000, "workers", (int)facts->workers,
                     "threads", (int)facts->threads, "context", (int)facts->context, "slots", (int)facts->slots,
                     "settings", settings_texts(supervisor->settings), "processes", processes_json(supervisor), "pool",
                     supervisor_pool_json(supervisor), "disk", disk_json(supervisor), "steps",
                     steps_json(&supervisor->control->workers[0]), "tokens", tokens_json(&supervisor->control->front),
                     "requests", requests_json(&supervisor->control->front));
}

static json_t *refusal(const char *message)
{
    return json_pack("{s:b, s:{s:s, s:s}}", "ok", 0, "error", "code", "bad_request", "message", message);
}

json_t *supervisor_answer(struct supervisor *supervisor, const void *bytes, size_t size, bool *ret_down)
{
    json_error_t ignored;
    json_t *answer, *request = json_loadb(bytes, size, JSON_REJECT_DUPLICATES, &ignored);
    const char *op = json_string_value(json_object_get(request, "op"));
    *ret_down = false;
    if (!op) {
        answer = refusal("a request is a JSON object with a member `op`: status, pool or down");
    } else if (!strcmp(op, "status")) {
        answer = status_json(supervisor);
    } else if (!strcmp(op, "pool")) {
        answer = supervisor_answer_pool(supervisor, request);
    } else if (!strcmp(op, "down")) {
        *ret_down = true;
        answer = json_pack("{s:b, s:i}", "ok", 1, "pid", (int)getpid());
    } else {
        answer = refusal("no such op: status, pool or down");
    }
    json_decref(request);
    return answer;
}
