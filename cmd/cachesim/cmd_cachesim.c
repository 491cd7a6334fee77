/* calypte cachesim: what a pool of other sizes and policies would have had of a trace. */
#include "cmd/cachesim/generate.h"
#include "cmd/cachesim/plot.h"
#include "cmd/cachesim/replay.h"
#include "cmd/cli/commands.h"
#include "cmd/cli/usage.h"
#include "proto/bytes_text.h"
#include "proto/cleanup.h"
#include "proto/parse.h"

#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <string.h>

#define SIZES_DEFAULT "10,20,30,40,50,60,70,80,90"
#define SIZES_MAX 100u
#define STEPS_MAX 1000000u

enum { FLAG_SIZES, FLAG_JSON, FLAG_PLOT, FLAG_IN_FLIGHT, FLAG_GENERATE, FLAG_SEED, FLAG_STEPS, FLAG_OUTPUT };

static const struct flag flags[] = {
    [FLAG_SIZES] = {"--sizes", NULL, "S,S,...",
                    "pool sizes: percent of the experts used, or bytes (64G) (default 10,20,...,90)"},
    [FLAG_JSON] = {"--json", NULL, NULL, "print the result as JSON"},
    [FLAG_PLOT] = {"--plot", NULL, "FILE.png", "draw it too (needs gnuplot)"},
    [FLAG_IN_FLIGHT] = {"--in-flight", NULL, "N", "experts read at a time, for which there must be slots (default 2)"},
    [FLAG_GENERATE] = {"--generate", NULL, "KIND",
                       "instead, make up a trace: zipf (one answer, its experts drift) or\n"
                       "                             scan (an answer, and long prompts over it)"},
    [FLAG_SEED] = {"--seed", NULL, "N", "of --generate: the same seed makes the same trace (default 0)"},
    [FLAG_STEPS] = {"--steps", NULL, "N", "of --generate (default 2000)"},
    [FLAG_OUTPUT] = {"--output", "-o", "FILE", "of --generate: the file to write, which must not exist yet"},
    {NULL, NULL, NULL, NULL},
};

static const struct command_line line = {
    .command = "cachesim",
    .operands = "TRACE | --generate KIND -o TRACE",
    .summary = "Replays a trace of `calypte trace` through pools of other sizes and policies: their hit rates.",
    .details =
        "A use is an expert of a layer of a step, however many rows used it; a hit, if it was in the pool when "
        "the layer\n"
        "began. LFU counts for ever; \"LFU a layer\" gives each layer an equal share of the slots; LFRU is the "
        "pool's own\n"
        "policy, in its very code; Belady knows the future: no policy can have more. \"gap\" is the share of "
        "the way from\n"
        "LRU to Belady that LFRU goes. Sizes in bytes, and the memory in the table, need a trace that says how "
        "large\n"
        "an expert is (of older versions they do not). A compressed trace: zcat TRACE.gz | calypte cachesim /dev/stdin",
    .flags = flags,
    .least_operands = 0,
    .most_operands = 1,
};

struct result {
    double percent; /* of the experts that the trace uses */
    uint64_t bytes; /* as the user gave it; 0: in percent */
    uint32_t slots;
    uint64_t hits[REPLAY_POLICIES];
};

/* Share of the way from LRU to Belady; 1 where there is none to go. */
static double gap_closed(const struct result *result)
{
    double way = (double)result->hits[REPLAY_BELADY] - (double)result->hits[REPLAY_LRU];
    return way > 0 ? ((double)result->hits[REPLAY_LFRU] - (double)result->hits[REPLAY_LRU]) / way : 1;
}

static double percent_of(uint64_t part, uint64_t whole)
{
    return whole ? 100.0 * (double)part / (double)whole : 0;
}

/* "10,64G,30", ascending or not, into the percent or the bytes of ret_results. */
static int parse_sizes(const char *text, struct result *ret_results, size_t *ret_count)
{
    _cleanup_free_ char *copy = strdup(text ? text : SIZES_DEFAULT);
    char *rest = copy, *word;
    *ret_count = 0;
    if (!copy)
        return usage_failed("cachesim", "out of memory");
    while ((word = strsep(&rest, ","))) {
        struct result *size = &ret_results[*ret_count];
        if (*ret_count == SIZES_MAX)
            return usage_error("cachesim", "--sizes has more than %u sizes", SIZES_MAX);
        bool plain = word[strspn(word, "0123456789.")] == 0;
        if (parse_real(word, 0.001, 100, &size->percent) < 0 &&
            (plain || parse_size(word, &size->bytes) < 0 || size->bytes == 0))
            return usage_error("cachesim",
                               "--sizes cannot have \"%s\": percent from 0.001 to 100 or bytes like 64G, with commas "
                               "between",
                               word);
        (*ret_count)++;
    }
    return EXIT_DONE;
}

/* The slots of each size. Of the sizes by default those are left out that no pool can have: a layer needs a slot for
 * every expert that one row uses. */
static int find_slots(const char *path, const struct workload *workload, bool by_default, struct result *results,
                      size_t *count, struct error *ret_error)
{
    uint64_t expert_bytes = workload->header.expert_bytes, used = workload->experts_used, least = workload->row_experts;
    size_t kept = 0;
    for (size_t i = 0; i < *count; i++) {
        struct result *result = &results[kept];
        *result = results[i];
        if (result->bytes && !expert_bytes)
            return error_set(ret_error, EINVAL, "%s does not say how large an expert is: give --sizes in percent",
                             path);
        uint64_t slots =
            result->bytes ? result->bytes / expert_bytes : (uint64_t)((double)used * result->percent / 100);
        if (slots < least && by_default && i + 1 < *count)
            continue;
        if (slots < least && by_default) { /* all of them: so few experts are used */
            result->percent = 100;
            slots = used;
        }
        if (slots < least)
            return error_set(ret_error, EINVAL,
                             "--sizes: a pool of %" PRIu64 " slot%s is too small, a layer uses %" PRIu64
                             " at once: from %.4g %% of the %" PRIu64 " experts on",
                             slots, plural(slots), least, ceil(1e4 * (double)least / (double)used) / 100, used);
        result->slots = slots < UINT32_MAX ? (uint32_t)slots : UINT32_MAX;
        if (result->bytes)
            result->percent = percent_of(slots, used);
        kept++;
    }
    *count = kept;
    return 0;
}

static int simulate(const struct workload *workload, struct result *results, size_t count, uint32_t in_flight,
                    struct error *ret_error)
{
    for (size_t i = 0; i < count; i++) {
        for (int p = 0; p < REPLAY_POLICIES; p++) {
            int status =
                replay(workload, (enum replay_policy)p, results[i].slots, in_flight, &results[i].hits[p], ret_error);
            if (status < 0)
                return status;
        }
    }
    return 0;
}

static void print_table(const struct workload *workload, const struct result *results, size_t count)
{
    uint64_t uses = workload->use_count, expert_bytes = workload->header.expert_bytes;
    printf("%" PRIu64 " step%s, %u of %u layer%s", workload->steps, plural(workload->steps), workload->layers_used,
           workload->header.layers, plural(workload->header.layers));
    if (workload->header.numbered)
        printf(" (%u to %u in the model)", workload->header.layer_numbers[0],
               workload->header.layer_numbers[workload->header.layers - 1]);
    printf(" of %u experts, %u expert%s used, %" PRIu64 " use%s\n", workload->header.experts, workload->experts_used,
           plural(workload->experts_used), uses, plural(uses));
    if (workload->lost)
        printf("%" PRIu64 " entries are missing from the trace\n", workload->lost);
    printf("\nhit rate, %%\n%8s %8s", "pool", "slots");
    if (expert_bytes)
        printf(" %11s", "memory");
    for (int p = 0; p < REPLAY_POLICIES; p++)
        printf(" %12s", replay_policy_name((enum replay_policy)p));
    printf(" %8s\n", "gap, %");
    for (size_t i = 0; i < count; i++) {
        printf("%6.4g %% %8u", results[i].percent, results[i].slots);
        if (expert_bytes)
            printf(" %11s", bytes_text(results[i].slots * expert_bytes).text);
        for (int p = 0; p < REPLAY_POLICIES; p++)
            printf(" %12.2f", percent_of(results[i].hits[p], uses));
        printf(" %8.1f\n", 100 * gap_closed(&results[i]));
    }
}

static void print_own(const struct workload *workload, const struct result *own)
{
    uint64_t uses = workload->use_count, had = workload->recorded_hits;
    if (workload->least_slots != workload->most_slots) {
        printf("\nthe traced pool: %" PRIu64
               " misses (hit rate %.2f %%). It was resized while this was traced (%u to %u slots): not compared\n",
               uses - had, percent_of(had, uses), workload->least_slots, workload->most_slots);
        return;
    }
    printf("\nthe traced pool of %u slots: %" PRIu64
           " misses (hit rate %.2f %%); LFRU from an empty pool of as many: %" PRIu64 " misses (%.2f %%)\n",
           own->slots, uses - had, percent_of(had, uses), uses - own->hits[REPLAY_LFRU],
           percent_of(own->hits[REPLAY_LFRU], uses));
}

static json_t *result_json(const struct workload *workload, const struct result *result)
{
    json_t *hits = json_object();
    for (int p = 0; p < REPLAY_POLICIES; p++)
        json_object_set_new(hits, replay_policy_name((enum replay_policy)p),
                            json_real(percent_of(result->hits[p], workload->use_count)));
    json_t *size = json_pack("{sf sI so sf}", "percent", result->percent, "slots", (json_int_t)result->slots,
                             "hit_rate", hits, "gap", 100 * gap_closed(result));
    if (workload->header.expert_bytes)
        json_object_set_new(size, "pool_bytes",
                            json_integer((json_int_t)(result->slots * workload->header.expert_bytes)));
    return size;
}

/* The traced pool; LFRU's count beside it, unless it was resized. */
static json_t *traced_json(const struct workload *workload, const struct result *own)
{
    uint64_t uses = workload->use_count;
    bool resized = workload->least_slots != workload->most_slots;
    json_t *traced = json_pack("{sI sI sb}", "slots", (json_int_t)own->slots, "misses",
                               (json_int_t)(uses - workload->recorded_hits), "resized", (int)resized);
    if (resized)
        json_object_set_new(traced, "most_slots", json_integer(workload->most_slots));
    if (resized)
        json_object_set_new(traced, "least_slots", json_integer(workload->least_slots));
    else
        json_object_set_new(traced, "lfru_misses", json_integer((json_int_t)(uses - own->hits[REPLAY_LFRU])));
    return traced;
}

static int print_json(const struct workload *workload, const struct result *results, size_t count,
                      const struct result *own)
{
    json_auto_t *sizes = json_array();
    for (size_t i = 0; i < count; i++)
        json_array_append_new(sizes, result_json(workload, &results[i]));
    json_auto_t *all = json_pack("{sI sI sI sI sI sI sO}", "steps", (json_int_t)workload->steps, "layers",
                                 (json_int_t)workload->layers_used, "experts", (json_int_t)workload->header.experts,
                                 "experts_used", (json_int_t)workload->experts_used, "uses",
                                 (json_int_t)workload->use_count, "lost", (json_int_t)workload->lost, "sizes", sizes);
    if (own && all)
        json_object_set_new(all, "traced", traced_json(workload, own));
    if (!all)
        return usage_failed("cachesim", "out of memory");
    json_dumpf(all, stdout, JSON_INDENT(2));
    putchar('\n');
    return EXIT_DONE;
}

static int draw(const struct workload *workload, const char *trace, const struct result *results, size_t count,
                const char *path, struct error *ret_error)
{
    struct plot_point points[SIZES_MAX];
    for (size_t i = 0; i < count; i++) {
        points[i].percent = results[i].percent;
        for (int p = 0; p < REPLAY_POLICIES; p++)
            points[i].hit_rates[p] = percent_of(results[i].hits[p], workload->use_count);
    }
    return plot_draw(path, trace, points, count, ret_error);
}

static int run_simulation(const struct arguments *arguments)
{
    struct result results[SIZES_MAX] = {0}, own = {0};
    size_t count = 0;
    uint64_t in_flight = REPLAY_IN_FLIGHT;
    struct error error;
    int code = parse_sizes(arguments->values[FLAG_SIZES], results, &count);
    if (code == 0)
        code = arguments_integer(arguments, FLAG_IN_FLIGHT, 1, UINT32_MAX, &in_flight);
    if (code)
        return code;
    const char *picture = arguments->values[FLAG_PLOT], *dot = picture ? strrchr(picture, '.') : NULL;
    if (picture && (!dot || strcmp(dot, ".png") != 0))
        return usage_error("cachesim", "--plot %s: it draws a PNG, the name must end in .png", picture);
    _cleanup_(workload_close) struct workload workload = {0};
    int status = workload_read(arguments->operands[0], &workload, &error);
    if (status == 0)
        status = find_slots(arguments->operands[0], &workload, !arguments->values[FLAG_SIZES], results, &count, &error);
    if (status == 0)
        status = simulate(&workload, results, count, (uint32_t)in_flight, &error);
    own.slots = workload.least_slots;
    if (status == 0 && own.slots && workload.least_slots == workload.most_slots)
        status = replay(&workload, REPLAY_LFRU, own.slots, (uint32_t)in_flight, &own.hits[REPLAY_LFRU], &error);
    if (status == 0 && picture)
        status = draw(&workload, arguments->operands[0], results, count, picture, &error);
    if (status < 0)
        return usage_failed("cachesim", "%s", error.text);
    if (arguments->values[FLAG_JSON])
        return print_json(&workload, results, count, own.slots ? &own : NULL);
    print_table(&workload, results, count);
    if (own.slots)
        print_own(&workload, &own);
    return EXIT_DONE;
}

static int run_generator(const struct arguments *arguments)
{
    uint64_t seed = 0, steps = 2000;
    struct error error;
    const char *wanted = arguments->values[FLAG_GENERATE];
    int kind = 0, code = arguments_integer(arguments, FLAG_SEED, 0, UINT64_MAX, &seed);
    if (code == 0)
        code = arguments_integer(arguments, FLAG_STEPS, 1, STEPS_MAX, &steps);
    if (code)
        return code;
    while (kind < GENERATE_KINDS && strcmp(wanted, generate_kind_name((enum generate_kind)kind)) != 0)
        kind++;
    if (kind == GENERATE_KINDS)
        return usage_error("cachesim", "--generate cannot be \"%s\": zipf or scan", wanted);
    if (!arguments->values[FLAG_OUTPUT] || arguments->operand_count)
        return usage_error("cachesim", "--generate writes a file: calypte cachesim --generate %s -o TRACE", wanted);
    if (generate_trace((enum generate_kind)kind, seed, steps, arguments->values[FLAG_OUTPUT], &error) < 0)
        return usage_failed("cachesim", "%s", error.text);
    return EXIT_DONE;
}

int cmd_cachesim(int argc, char **argv)
{
    struct arguments arguments;
    int code = arguments_parse(&line, argc, argv, &arguments);
    if (code != ARGUMENTS_GO_ON)
        return code;
    if (arguments.values[FLAG_GENERATE])
        return run_generator(&arguments);
    if (arguments.operand_count == 0)
        return usage_error("cachesim", "an argument is missing: calypte cachesim TRACE");
    return run_simulation(&arguments);
}
