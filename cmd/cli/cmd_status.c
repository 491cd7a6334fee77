/* calypte status: what an instance is doing, as its supervisor tells it. */
#include "cmd/cli/client.h"
#include "cmd/cli/commands.h"
#include "cmd/cli/usage.h"
#include "proto/bytes_text.h"
#include "proto/model_config.h"

#include <stdlib.h>
#include <string.h>

enum { FLAG_NAME, FLAG_JSON };

static const struct flag flags[] = {
    [FLAG_NAME] = {"--name", "-n", "NAME", "the instance's name (default: default)"},
    [FLAG_JSON] = {"--json", NULL, NULL, "print everything as JSON"},
    {NULL, NULL, NULL, NULL},
};

static const struct command_line line = {
    .command = "status",
    .operands = "",
    .summary = "Processes, pool, disk and speed of a running instance.",
    .details =
        "In the JSON, `cpu` is in seconds of CPU time since the process started, `rss` in bytes (shared memory "
        "included), `cores`\n"
        "are those a worker's threads are pinned to, and `node` is its memory node (null: not bound). `steps` is what\n"
        "worker 0 counted, in seconds: its `parts` add up to `seconds` (`wait`: for experts on their way from "
        "the disk,\n"
        "`exchange`: for other workers), `matmul` lies across them. Of `disk`, `read_us` and `demand_us` are "
        "percentiles of\n"
        "one read and of the way from a request to the expert, in powers of two; `busy_seconds` is how long somebody "
        "waited\n"
        "for an expert; `guesses` says what became of the lookaheads; `copies` are the container and its mirror (used, "
        "refused,\n"
        "dropped), `drives` those they stand on, each with the bytes, the rate and the latency of its reads.\n"
        "`learning` in `pool` is what is done (on, read, off), with `why` where it is less than the setting.",
    .flags = flags,
};

static json_int_t number(const json_t *object, const char *name)
{
    return json_integer_value(json_object_get(object, name));
}

static const char *text(const json_t *object, const char *name)
{
    const char *value = json_string_value(json_object_get(object, name));
    return value ? value : "";
}

static struct bytes_text bytes(const json_t *object, const char *name)
{
    return bytes_text((uint64_t)number(object, name));
}

struct duration_text {
    char text[32];
};

/* "850 us", "7.2 ms", "1.5 s". */
static struct duration_text duration(json_int_t us)
{
    struct duration_text result;
    if (us < 1000)
        snprintf(result.text, sizeof result.text, "%" JSON_INTEGER_FORMAT " us", us);
    else
        snprintf(result.text, sizeof result.text, "%.1f %s", (double)us / (us < 1000000 ? 1e3 : 1e6),
                 us < 1000000 ? "ms" : "s");
    return result;
}

/* "0-3,8" for the cores of a process, "-" if it is not pinned. */
static void format_cores(const json_t *cores, char *ret_text, size_t size)
{
    size_t used = 0, count = json_array_size(cores);
    snprintf(ret_text, size, "-");
    for (size_t i = 0; i < count && used + 16 < size;) {
        size_t last = i;
        json_int_t first_core = json_integer_value(json_array_get(cores, i));
        while (last + 1 < count &&
               json_integer_value(json_array_get(cores, last + 1)) == first_core + (json_int_t)(last + 1 - i))
            last++;
        used += (size_t)snprintf(ret_text + used, size - used, "%s%" JSON_INTEGER_FORMAT, i ? "," : "", first_core);
        if (last > i && used + 16 < size)
            used += (size_t)snprintf(ret_text + used, size - used, "-%" JSON_INTEGER_FORMAT,
                                     first_core + (json_int_t)(last - i));
        i = last + 1;
    }
}

static void print_processes(const json_t *processes)
{
    size_t index;
    json_t *process;
    printf("%-20s %8s %-10s %4s %-12s %9s %10s %8s\n", "PROCESS", "PID", "STATE", "NODE", "CORES", "CPU s", "RSS",
           "RESTARTS");
    json_array_foreach (processes, index, process) {
        char name[40], node[24] = "-", cores[64];
        const json_t *worker = json_object_get(process, "index"), *on = json_object_get(process, "node");
        if (worker)
            snprintf(name, sizeof name, "%.24s %d", text(process, "name"), (int)json_integer_value(worker));
        else
            snprintf(name, sizeof name, "%.39s", text(process, "name"));
        if (json_is_integer(on))
            snprintf(node, sizeof node, "%" JSON_INTEGER_FORMAT, json_integer_value(on));
        format_cores(json_object_get(process, "cores"), cores, sizeof cores);
        printf("%-20s %8" JSON_INTEGER_FORMAT " %-10s %4s %-12s %9.2f %10s %8" JSON_INTEGER_FORMAT "\n", name,
               number(process, "pid"), text(process, "state"), node, cores,
               json_real_value(json_object_get(process, "cpu")), bytes(process, "rss").text,
               number(process, "restarts"));
    }
}

/* Where the time of the steps went; parts that took none are left out. */
static void print_steps(const json_t *steps)
{
    double seconds = json_number_value(json_object_get(steps, "seconds"));
    const char *name;
    json_t *part, *parts = json_object_get(steps, "parts");
    json_int_t count = number(steps, "count"), rows = number(steps, "rows");
    if (count == 0) {
        printf("steps     none yet\n");
        return;
    }
    printf("steps     %" JSON_INTEGER_FORMAT ", with %" JSON_INTEGER_FORMAT " row%s in all, in %.2f s", count, rows,
           plural((uint64_t)rows), seconds);
    if (seconds > 0) {
        printf(": waiting for experts %.1f %%", 100 * json_number_value(json_object_get(parts, "wait")) / seconds);
        json_object_foreach (parts, name, part)
            if (strcmp(name, "wait") && json_number_value(part) > 0)
                printf(", %s %.1f %%", name, 100 * json_number_value(part) / seconds);
        printf("; of all this matmul %.1f %%", 100 * json_number_value(json_object_get(steps, "matmul")) / seconds);
    }
    printf("\n");
}

struct layer_rate {
    json_int_t layer;
    double percent;
};

static int compare_rates(const void *a, const void *b)
{
    const struct layer_rate *x = a, *y = b;
    return (x->percent > y->percent) - (x->percent < y->percent);
}

/* The hit rates of the layers: the lowest, the median, the highest. */
static void print_layers(const json_t *layers)
{
    struct layer_rate rates[MODEL_MAX_LAYERS];
    size_t count = 0, index;
    json_t *layer;
    json_array_foreach (layers, index, layer) {
        json_int_t hits = number(layer, "hits"), uses = hits + number(layer, "misses");
        if (uses > 0 && count < MODEL_MAX_LAYERS)
            rates[count++] = (struct layer_rate){number(layer, "layer"), 100.0 * (double)hits / (double)uses};
    }
    if (count == 0)
        return;
    qsort(rates, count, sizeof *rates, compare_rates);
    printf("layers    hit rate from %.1f %% (layer %" JSON_INTEGER_FORMAT ") to %.1f %% (layer %" JSON_INTEGER_FORMAT
           "), median %.1f %%\n",
           rates[0].percent, rates[0].layer, rates[count - 1].percent, rates[count - 1].layer,
           rates[count / 2].percent);
}

static void print_lookahead(const json_t *lookahead)
{
    json_int_t asked = number(lookahead, "asked"), used = number(lookahead, "used");
    bool on = json_is_true(json_object_get(lookahead, "on"));
    if (!on && asked == 0)
        return;
    printf("lookahead %s, asked %" JSON_INTEGER_FORMAT, on ? "on" : "off", asked);
    if (asked > 0)
        printf(", used %.1f %%", 100.0 * (double)used / (double)asked);
    if (used > 0)
        printf(", in time %.1f %% of these; asked for %.1f %% of what was missing",
               100.0 * (double)number(lookahead, "ready") / (double)used,
               100.0 * (double)used / (double)(used + number(lookahead, "missed")));
    printf("\n");
}

/* Whether the use of experts is remembered. */
static void print_learning(const json_t *learning)
{
    const char *state = text(learning, "state"), *why = text(learning, "why");
    printf("learning  %s%s%s\n", !strcmp(state, "read") ? "read only" : state, why[0] ? ": " : "", why);
}

static void print_size(const json_t *pool)
{
    const char *by = json_string_value(json_object_get(pool, "cap_by"));
    printf("size      %" JSON_INTEGER_FORMAT " of %" JSON_INTEGER_FORMAT " slots stand%s, cap %" JSON_INTEGER_FORMAT
           " by %s, reserve %s\n",
           number(pool, "standing"), number(pool, "slots"),
           json_is_true(json_object_get(pool, "auto")) ? " (auto)" : "", number(pool, "cap"), by ? by : "?",
           bytes(pool, "reserve").text);
    client_print_change(pool);
}

/* The copies of the container, and the drives they stand on: where there is more than one, that is worth lines. */
static void print_drives(const json_t *disk)
{
    const json_t *copies = json_object_get(disk, "copies"), *drives = json_object_get(disk, "drives");
    size_t index, place;
    json_t *entry, *copy;
    json_array_foreach (copies, index, entry)
        if (json_array_size(copies) > 1)
            printf("copy %zu    %s: %s, read failures %" JSON_INTEGER_FORMAT ", wrong checksums %" JSON_INTEGER_FORMAT
                   "\n",
                   index + 1, text(entry, "path"), text(entry, "state"), number(entry, "read_failures"),
                   number(entry, "wrong_checksums"));
    json_array_foreach (drives, index, entry) {
        if (json_array_size(drives) < 2 && json_array_size(copies) < 2)
            return;
        printf("drive     %s, cop%s", text(entry, "device"),
               json_array_size(json_object_get(entry, "copies")) == 1 ? "y" : "ies");
        json_array_foreach (json_object_get(entry, "copies"), place, copy)
            printf("%s%" JSON_INTEGER_FORMAT, place ? ", " : " ", json_integer_value(copy));
        printf(": %s in %" JSON_INTEGER_FORMAT " reads, %s/s, %s a read\n", bytes(entry, "bytes").text,
               number(entry, "reads"), bytes(entry, "rate").text, duration(number(entry, "latency_us")).text);
    }
}

static void print_disk(const json_t *disk)
{
    json_int_t reads = number(disk, "reads"), waiting = number(json_object_get(disk, "queues"), "demands");
    json_int_t demand = number(json_object_get(disk, "demand_us"), "p99");
    const char *refused = text(disk, "registering_refused");
    printf("disk      %s in %" JSON_INTEGER_FORMAT " read%s (%s%s), failures %" JSON_INTEGER_FORMAT "\n",
           bytes(disk, "bytes").text, reads, plural((uint64_t)reads), text(disk, "method"),
           json_is_true(json_object_get(disk, "direct")) ? ", O_DIRECT" : "", number(disk, "failures"));
    if (reads > 0)
        printf("latency   of a read %s mean, 99 %% within %s", duration(number(disk, "latency_us")).text,
               duration(number(json_object_get(disk, "read_us"), "p99")).text);
    if (reads > 0 && demand > 0)
        printf("; demands 99 %% within %s", duration(demand).text);
    if (reads > 0 || waiting > 0)
        printf("%s%" JSON_INTEGER_FORMAT " expert%s wait%s\n", reads > 0 ? "; " : "latency   ", waiting,
               plural((uint64_t)waiting), waiting == 1 ? "s" : "");
    if (refused[0])
        printf(
            "memory    %s of the pool are registered with io_uring and no more can be (%s): reads into the rest cost "
            "more CPU time; raise the limit of locked memory (ulimit -l)\n",
            bytes(disk, "registered_bytes").text, refused);
}

static void print_status(const json_t *status)
{
    const json_t *pool = json_object_get(status, "pool"), *disk = json_object_get(status, "disk");
    const json_t *tokens = json_object_get(status, "tokens"), *requests = json_object_get(status, "requests");
    json_int_t hits = number(pool, "hits"), uses = hits + number(pool, "misses");
    printf("instance %s: %s, %s, up %.0f s\n\n", text(status, "instance"), text(status, "state"), text(status, "model"),
           json_number_value(json_object_get(status, "uptime_s")));
    print_processes(json_object_get(status, "processes"));
    printf("\npool      %" JSON_INTEGER_FORMAT " of %" JSON_INTEGER_FORMAT " slots filled (%" JSON_INTEGER_FORMAT
           " experts, %s), hits %" JSON_INTEGER_FORMAT ", misses %" JSON_INTEGER_FORMAT
           " (hit rate %.1f %%), evictions %" JSON_INTEGER_FORMAT "\n",
           number(pool, "filled"), number(pool, "slots"), number(pool, "experts"), bytes(pool, "bytes").text, hits,
           number(pool, "misses"), uses ? 100.0 * (double)hits / (double)uses : 0.0, number(pool, "evictions"));
    print_size(pool);
    print_layers(json_object_get(pool, "layers"));
    print_lookahead(json_object_get(pool, "lookahead"));
    print_learning(json_object_get(pool, "learning"));
    print_disk(disk);
    print_drives(disk);
    print_steps(json_object_get(status, "steps"));
    printf("tokens    prompt %" JSON_INTEGER_FORMAT " (%.1f a second), answer %" JSON_INTEGER_FORMAT
           " (%.1f a second)\n",
           number(tokens, "prompt"), json_real_value(json_object_get(tokens, "prompt_per_s")), number(tokens, "answer"),
           json_real_value(json_object_get(tokens, "answer_per_s")));
    printf("requests  answered %" JSON_INTEGER_FORMAT ", failed %" JSON_INTEGER_FORMAT ", running %" JSON_INTEGER_FORMAT
           ", queued %" JSON_INTEGER_FORMAT "\n",
           number(requests, "answered"), number(requests, "failed"), number(requests, "running"),
           number(requests, "queued"));
}

int cmd_status(int argc, char **argv)
{
    struct arguments arguments;
    struct instance instance;
    struct error error;
    json_t *status = NULL;
    int code = arguments_parse(&line, argc, argv, &arguments);
    if (code != ARGUMENTS_GO_ON)
        return code;
    if (instance_find(arguments.values[FLAG_NAME] ? arguments.values[FLAG_NAME] : "default", &instance, &error))
        return usage_error("status", "%s", error.text);
    if (client_ask_supervisor(&instance, "status", &status, &error))
        return usage_failed("status", "%s", error.text);
    if (arguments.values[FLAG_JSON]) {
        json_dumpf(status, stdout, JSON_INDENT(2));
        putchar('\n');
    } else
        print_status(status);
    json_decref(status);
    return EXIT_DONE;
}
