/* calypte synth: flags. */
#include "cmd/cli/commands.h"
#include "cmd/cli/usage.h"
#include "cmd/convert/progress.h"
#include "cmd/convert/synth.h"
#include "proto/cleanup.h"

#define JOBS_MAX 1024u

enum { FLAG_LIKE, FLAG_LAYERS, FLAG_DENSE, FLAG_EXPERTS, FLAG_MTP, FLAG_SEED, FLAG_JOBS, FLAG_STRIPE, FLAG_JSON };

static const struct flag flags[] = {
    [FLAG_LIKE] = {"--like", NULL, "CONFIG", "the shapes: glm-5.2, olmoe, or the path of a config.json"},
    [FLAG_LAYERS] = {"--layers", NULL, "N", "layers without the MTP layer (default: the model's)"},
    [FLAG_DENSE] = {"--dense", NULL, "N", "how many of them, the first ones, have a dense MLP (default: the model's)"},
    [FLAG_EXPERTS] = {"--experts", NULL, "N", "routed experts a layer (default: the model's)"},
    [FLAG_MTP] = {"--mtp", NULL, NULL, "with the MTP layer"},
    [FLAG_SEED] = {"--seed", NULL, "N", "the same seed gives the same bytes (default 0)"},
    [FLAG_JOBS] = {"--jobs", NULL, "N", "threads (default: the CPUs that this process may use)"},
    [FLAG_STRIPE] = {"--stripe", NULL, "DIR", "a folder on another drive for its share of every expert (repeatable)"},
    [FLAG_JSON] = {"--json", NULL, NULL, "print the result as JSON"},
    {NULL, NULL, NULL, NULL},
};

static const struct command_line syntax = {
    .command = "synth",
    .operands = "DST --like CONFIG",
    .summary = "Makes the container DST of random weights with a real model's shapes, to measure a machine before "
               "fetching the model.",
    .details = "Its answers are noise, and it has no tokenizer: give `run` and `score` token ids (--tokens FILE).\n"
               "Example: calypte synth /data/probe --like glm-5.2 --layers 5 --dense 1 --experts 64   (7.9 GiB)",
    .flags = flags,
    .least_operands = 1,
    .most_operands = 1,
};

static int parse_options(const struct arguments *arguments, struct synth_options *ret_options, unsigned *ret_jobs)
{
    uint64_t layers = SYNTH_UNCHANGED, dense = SYNTH_UNCHANGED, experts = SYNTH_UNCHANGED, seed = 0,
             jobs = progress_usable_cpus();
    if (!arguments->values[FLAG_LIKE])
        return usage_error(
            "synth", "--like is missing: calypte synth DST --like CONFIG, where CONFIG is one of %s or a config.json",
            synth_model_names());
    if (!synth_model(arguments->values[FLAG_LIKE]) && access(arguments->values[FLAG_LIKE], F_OK) < 0)
        return usage_error("synth", "--like cannot be \"%s\": one of %s, or the path of a config.json",
                           arguments->values[FLAG_LIKE], synth_model_names());
    int status = arguments_integer(arguments, FLAG_LAYERS, 1, MODEL_MAX_LAYERS - 1, &layers);
    if (status == 0)
        status = arguments_integer(arguments, FLAG_DENSE, 0, MODEL_MAX_LAYERS - 1, &dense);
    if (status == 0)
        status = arguments_integer(arguments, FLAG_EXPERTS, 1, MODEL_MAX_EXPERTS, &experts);
    if (status == 0)
        status = arguments_integer(arguments, FLAG_SEED, 0, UINT64_MAX, &seed);
    if (status == 0)
        status = arguments_integer(arguments, FLAG_JOBS, 1, JOBS_MAX, &jobs);
    *ret_options = (struct synth_options){.like = arguments->values[FLAG_LIKE],
                                          .layers = (uint32_t)layers,
                                          .dense = (uint32_t)dense,
                                          .experts = (uint32_t)experts,
                                          .mtp = arguments->values[FLAG_MTP] != NULL,
                                          .seed = seed};
    *ret_jobs = (unsigned)jobs;
    return status;
}

int cmd_synth(int argc, char **argv)
{
    struct arguments arguments;
    struct synth_options options;
    unsigned jobs = 1;
    int status = arguments_parse(&syntax, argc, argv, &arguments);
    if (status != ARGUMENTS_GO_ON)
        return status;
    status = parse_options(&arguments, &options, &jobs);
    if (status != 0)
        return status;
    struct error error = {{0}};
    struct plan_options formats = {.experts = WEIGHT_INT4, .dense = WEIGHT_INT8};
    const char *paths[EXPERT_SLICES];
    status = progress_paths(&arguments, "synth", FLAG_STRIPE, paths, &formats.stripes);
    if (status != 0)
        return status;
    _cleanup_(checkpoint_close) struct checkpoint checkpoint = {0};
    _cleanup_(plan_free) struct plan plan = {0};
    if (synth_checkpoint(&options, &checkpoint, &error) < 0 || plan_make(&checkpoint, &formats, &plan, &error) < 0)
        return usage_failed("synth", "%s", error.text);
    return progress_run("synth", &plan, paths, jobs, arguments.values[FLAG_JSON] != NULL);
}
