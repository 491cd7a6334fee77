/* calypte trace: which experts the steps of a running instance use, as a file for cachesim. */
#include "cmd/cli/client.h"
#include "cmd/cli/commands.h"
#include "cmd/cli/interrupt.h"
#include "cmd/cli/usage.h"
#include "proto/cleanup.h"
#include "proto/trace.h"
#include "shm/control.h"
#include "shm/pool.h"

#include <inttypes.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>

#define LOOK_MS 20 /* between two looks at the log, which holds seconds of decoding */
#define READ_AT_ONCE 4096u

enum { FLAG_NAME, FLAG_OUTPUT, FLAG_SECONDS };

static const struct flag flags[] = {
    [FLAG_NAME] = {"--name", "-n", "NAME", "the instance's name (default: default)"},
    [FLAG_OUTPUT] = {"--output", "-o", "FILE", "the file to write, which must not exist yet"},
    [FLAG_SECONDS] = {"--seconds", NULL, "S", "end after so many seconds"},
    {NULL, NULL, NULL, NULL},
};

static const struct command_line line = {
    .command = "trace",
    .operands = "",
    .summary = "Writes which experts every layer of every step uses, until Ctrl-C or the instance's end.",
    .details =
        "The file has JSON lines: the first says what was traced, each other is a layer of a step, with [expert, row,\n"
        "flags] for every use; flags are 1 (it was in the pool) + 2 (a prompt's row, not an answer's). Layers are "
        "counted from\n"
        "0, without the dense ones; `layer_numbers` in the first line has the numbers by which `calypte pool` names "
        "them.\n"
        "Where the pool is resized there is a line with the slots that it has from then on.\n"
        "`calypte cachesim FILE` tells what pools of other sizes and policies would have had.",
    .flags = flags,
};

struct tracer {
    const char *instance;
    const struct control *control;
    struct pool pool; /* its table only */
    uint32_t slots;   /* that have memory, as the trace says so far */
    struct trace_writer *writer;
    uint64_t place;                                        /* in the use log */
    uint32_t layers, experts;                              /* MoE layers of the model, experts of each */
    bool kept;                                             /* the file stands, whatever has failed */
    bool whole;                                            /* `layer` has been read from its first entry on */
    struct trace_layer layer;                              /* the one that is being read; uses [TRACE_MAX_USES] */
    uint64_t lost;                                         /* before `layer`, not yet written */
    uint64_t written_layers, uses, hits, misses, all_lost; /* hits, misses: of experts, each once a layer */
};

static int write_layer(struct tracer *tracer, struct error *ret_error)
{
    struct trace_layer *layer = &tracer->layer;
    if (!tracer->whole || layer->count == 0)
        return 0;
    layer->lost = tracer->lost;
    int status = trace_append(tracer->writer, layer, ret_error);
    if (status < 0)
        return status;
    for (uint32_t i = 0; i < layer->count; i++) {
        bool first = i == 0 || layer->uses[i].expert != layer->uses[i - 1].expert;
        bool hit = (layer->uses[i].flags & TRACE_HIT) != 0;
        tracer->hits += first && hit;
        tracer->misses += first && !hit;
    }
    tracer->written_layers++;
    tracer->uses += layer->count;
    tracer->lost = 0;
    layer->count = 0;
    return 0;
}

static void lose(struct tracer *tracer, uint64_t count)
{
    tracer->lost += count;
    tracer->all_lost += count;
}

/* Adds an entry of the log to the layer that is being read, or begins the next. */
static int take_use(struct tracer *tracer, const struct use *use, struct error *ret_error)
{
    struct trace_layer *layer = &tracer->layer;
    if (use->flags & USE_LAYER) {
        int status = write_layer(tracer, ret_error);
        if (status < 0)
            return status;
        tracer->whole = true;
        layer->step = use->step;
        layer->layer = use->expert / tracer->experts;
    }
    if (!tracer->whole) { /* the rest of a layer whose beginning is lost */
        lose(tracer, 1);
        return 0;
    }
    if (use->expert / tracer->experts != layer->layer || use->step != layer->step || layer->count == TRACE_MAX_USES)
        return error_set(ret_error, EBADMSG, "instance %s: its use log is damaged at step %" PRIu32 ", expert %" PRIu32,
                         tracer->instance, use->step, use->expert);
    layer->uses[layer->count++] = (struct trace_use){
        .expert = use->expert % tracer->experts,
        .row = use->row,
        .flags = (use->flags & USE_HIT ? TRACE_HIT : 0) | (use->flags & USE_PREFILL ? TRACE_PREFILL : 0),
    };
    return 0;
}

/* Takes everything that the log holds now. */
static int drain(struct tracer *tracer, struct error *ret_error)
{
    struct use uses[READ_AT_ONCE];
    uint64_t lost;
    uint32_t count;
    do {
        count = uses_read(&tracer->control->uses, &tracer->place, uses, READ_AT_ONCE, &lost);
        if (lost > 0) { /* the end of the layer before the gap may be in it, so that layer is lost too */
            lose(tracer, lost + tracer->layer.count);
            tracer->layer.count = 0;
            tracer->whole = false;
        }
        for (uint32_t i = 0; i < count; i++) {
            int status = take_use(tracer, &uses[i], ret_error);
            if (status < 0)
                return status;
        }
    } while (count > 0 || lost > 0);
    return 0;
}

/* Notes how many slots have memory, where that has changed. */
static int look_at_slots(struct tracer *tracer, struct error *ret_error)
{
    uint32_t slots = pool_slots_ready(&tracer->pool);
    if (slots == tracer->slots)
        return 0;
    tracer->slots = slots;
    return trace_append_slots(tracer->writer, slots, ret_error);
}

static int64_t now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* Until a signal, the supervisor's end, or the end of the time (`seconds`; 0: none). */
static int follow(struct tracer *tracer, int interrupt_fd, int supervisor_fd, double seconds, struct error *ret_error)
{
    int64_t end = now_ms() + (int64_t)(seconds * 1000);
    enum interrupt_wait wait = WAIT_TIMEOUT;
    while (wait == WAIT_TIMEOUT && (seconds <= 0 || now_ms() < end)) {
        wait = interrupt_wait(interrupt_fd, supervisor_fd, LOOK_MS);
        int status = drain(tracer, ret_error);
        if (status == 0)
            status = look_at_slots(tracer, ret_error);
        if (status < 0)
            return status;
    }
    return write_layer(tracer, ret_error);
}

static int open_supervisor(const struct instance *instance, struct error *ret_error)
{
    json_t *status = NULL;
    int code = client_ask_supervisor(instance, "status", &status, ret_error);
    if (code < 0)
        return code;
    const json_t *supervisor = json_array_get(json_object_get(status, "processes"), 0);
    pid_t pid = (pid_t)json_integer_value(json_object_get(supervisor, "pid"));
    json_decref(status);
    int fd = (int)syscall(SYS_pidfd_open, pid, 0);
    if (fd < 0)
        return error_set(ret_error, errno, "instance %s: its supervisor, process %d: %s", instance->name, (int)pid,
                         strerror(errno));
    return fd;
}

/* What is traced: the numbers of the model and of its pool. */
static struct trace_header describe(const struct tracer *tracer, const struct facts *facts)
{
    const struct model_config *config = &facts->config;
    struct trace_header header = {.identity = facts->identity,
                                  .layers = tracer->layers,
                                  .experts = tracer->experts,
                                  .slots = tracer->slots,
                                  .numbered = true,
                                  .expert_bytes = (uint64_t)tracer->pool.slice_bytes * EXPERT_SLICES};
    for (uint32_t layer = 0; layer < config->layers + config->mtp_layers; layer++) {
        int index = model_moe_index(config, layer);
        if (index >= 0)
            header.layer_numbers[index] = layer;
    }
    return header;
}

static int trace(const struct instance *instance, const char *path, double seconds, struct tracer *tracer,
                 struct error *ret_error)
{
    struct facts facts;
    _cleanup_close_ int interrupt_fd = interrupt_open();
    if (interrupt_fd < 0)
        return error_set(ret_error, -interrupt_fd, "cannot catch Ctrl-C: %s", strerror(-interrupt_fd));
    _cleanup_close_ int supervisor_fd = open_supervisor(instance, ret_error);
    if (supervisor_fd < 0)
        return supervisor_fd;
    int status = pool_attach(instance->name, &tracer->pool, ret_error);
    if (status < 0)
        return status;
    status = control_watch(instance->name, &tracer->control, &facts, ret_error);
    if (status < 0) {
        pool_detach(&tracer->pool);
        return status;
    }
    tracer->instance = instance->name;
    tracer->layers = model_moe_layers(&facts.config);
    tracer->experts = facts.config.experts;
    tracer->slots = pool_slots_ready(&tracer->pool);
    tracer->place = uses_end(&tracer->control->uses);
    _cleanup_free_ struct trace_use *uses = malloc(TRACE_MAX_USES * sizeof *uses);
    tracer->layer.uses = uses;
    const struct trace_header header = describe(tracer, &facts);
    status = uses ? trace_create(path, &header, &tracer->writer, ret_error)
                  : error_set(ret_error, ENOMEM, "no memory for a layer's uses");
    if (status == 0) {
        status = follow(tracer, interrupt_fd, supervisor_fd, seconds, ret_error);
        if (status == 0)
            status = trace_finish(tracer->writer, ret_error);
        else
            (void)trace_finish(tracer->writer, NULL);
        tracer->kept = access(path, F_OK) == 0;
    }
    control_detach(tracer->control);
    pool_detach(&tracer->pool);
    return status;
}

int cmd_trace(int argc, char **argv)
{
    struct arguments arguments;
    struct instance instance;
    struct error error;
    struct tracer tracer = {0};
    double seconds = 0;
    int code = arguments_parse(&line, argc, argv, &arguments);
    if (code == ARGUMENTS_GO_ON)
        code = arguments_real(&arguments, FLAG_SECONDS, 0.001, 1e9, &seconds) ? EXIT_USAGE : ARGUMENTS_GO_ON;
    if (code != ARGUMENTS_GO_ON)
        return code;
    const char *path = arguments.values[FLAG_OUTPUT];
    if (!path)
        return usage_error("trace", "where to? Name the file: calypte trace -o FILE");
    if (instance_find(arguments.values[FLAG_NAME] ? arguments.values[FLAG_NAME] : "default", &instance, &error))
        return usage_error("trace", "%s", error.text);
    if (trace(&instance, path, seconds, &tracer, &error) < 0)
        return usage_failed("trace", "%s%s", error.text, tracer.kept ? "; what was traced until then is kept" : "");
    uint64_t experts = tracer.hits + tracer.misses; /* each counts once a layer of a step */
    printf("%s: %" PRIu64 " layer%s of steps, %" PRIu64 " expert%s wanted (hits %" PRIu64 ", misses %" PRIu64
           "), %" PRIu64 " use%s by their rows, uses lost %" PRIu64 "\n",
           path, tracer.written_layers, plural(tracer.written_layers), experts, plural(experts), tracer.hits,
           tracer.misses, tracer.uses, plural(tracer.uses), tracer.all_lost);
    return EXIT_DONE;
}
