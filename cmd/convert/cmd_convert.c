/* calypte convert: flags. */
#include "cmd/cli/commands.h"
#include "cmd/cli/usage.h"
#include "cmd/convert/progress.h"
#include "cmd/convert/report.h"
#include "proto/cleanup.h"
#include "proto/container.h"

#include <string.h>

#define JOBS_MAX 1024u

enum { FLAG_EXPERTS, FLAG_DENSE, FLAG_QK_NORM_EPS, FLAG_JOBS, FLAG_STRIPE, FLAG_PLAN, FLAG_JSON };

static const struct flag flags[] = {
    [FLAG_EXPERTS] = {"--experts", NULL, "int4|int8", "format of the experts, the MTP layer's too (default int4)"},
    [FLAG_DENSE] = {"--dense", NULL, "int8|int4",
                    "format of the other matrices (default int8); in the MTP layer int8 always"},
    [FLAG_QK_NORM_EPS] = {"--qk-norm-eps", NULL, "X",
                          "epsilon of the norms behind q_a_proj and kv_a_proj (default 1e-6)"},
    [FLAG_JOBS] = {"--jobs", NULL, "N", "threads (default: the CPUs that this process may use)"},
    [FLAG_STRIPE] = {"--stripe", NULL, "DIR", "a folder on another drive for its share of every expert (repeatable)"},
    [FLAG_PLAN] = {"--plan", NULL, NULL, "print sizes and formats, write nothing (DST may be left out)"},
    [FLAG_JSON] = {"--json", NULL, NULL, "print the result as JSON"},
    {NULL, NULL, NULL, NULL},
};

static const struct command_line syntax = {
    .command = "convert",
    .operands = "SRC DST",
    .summary = "Makes the container DST from the Hugging Face checkpoint in the folder SRC, which is only read.",
    .details =
        "A conversion that was interrupted goes on where it was when the same command is given again, and gives "
        "the same bytes.\n"
        "Of a container that stands in DST, the files that are missing or cut short are made anew, and no others.\n"
        "Which are damaged, `calypte verify` says: remove those first.\n"
        "Each thread holds a few rows of one tensor, or one expert, in memory.",
    .flags = flags,
    .least_operands = 1,
    .most_operands = 2,
};

static int parse_format(const struct arguments *arguments, size_t flag, enum weight_format *ret_format)
{
    const char *value = arguments->values[flag];
    if (!value)
        return 0;
    *ret_format = weight_format_parse(value);
    return *ret_format ? 0
                       : usage_error("convert", "%s %s is not a format, it is int4 or int8", flags[flag].name, value);
}

static int parse_options(const struct arguments *arguments, struct plan_options *ret_options, const char **ret_paths,
                         unsigned *ret_jobs)
{
    *ret_options = (struct plan_options){.experts = WEIGHT_INT4, .dense = WEIGHT_INT8, .qk_norm_eps = 1e-6};
    uint64_t jobs = progress_usable_cpus();
    int status = parse_format(arguments, FLAG_EXPERTS, &ret_options->experts);
    if (status == 0)
        status = parse_format(arguments, FLAG_DENSE, &ret_options->dense);
    if (status == 0)
        status = arguments_real(arguments, FLAG_QK_NORM_EPS, 1e-12, 0.1, &ret_options->qk_norm_eps);
    if (status == 0)
        status = arguments_integer(arguments, FLAG_JOBS, 1, JOBS_MAX, &jobs);
    if (status == 0 && arguments->operand_count < 2 && !arguments->values[FLAG_PLAN])
        status = usage_error("convert", "DST is missing: calypte convert SRC DST");
    *ret_jobs = (unsigned)jobs;
    return status == 0 ? progress_paths(arguments, "convert", FLAG_STRIPE, ret_paths, &ret_options->stripes) : status;
}

/* At most a few of the notes: a checkpoint may hold thousands of tensors of one kind that are not needed. */
static void print_notes(const struct checkpoint *checkpoint)
{
    const size_t most = 8;
    for (size_t i = 0; i < checkpoint->note_count && i < most; i++)
        fprintf(stderr, "convert: %s\n", checkpoint->notes[i]);
    if (checkpoint->note_count > most)
        fprintf(stderr, "convert: %zu more tensors ignored\n", checkpoint->note_count - most);
}

int cmd_convert(int argc, char **argv)
{
    struct arguments arguments;
    struct plan_options options;
    const char *paths[EXPERT_SLICES];
    unsigned jobs;
    int status = arguments_parse(&syntax, argc, argv, &arguments);
    if (status != ARGUMENTS_GO_ON)
        return status;
    status = parse_options(&arguments, &options, paths, &jobs);
    if (status != 0)
        return status;
    struct error error = {{0}};
    _cleanup_(checkpoint_close) struct checkpoint checkpoint = {0};
    _cleanup_(plan_free) struct plan plan = {0};
    if (checkpoint_open(arguments.operands[0], &checkpoint, &error) < 0 ||
        plan_make(&checkpoint, &options, &plan, &error) < 0)
        return usage_failed("convert", "%s", error.text);
    print_notes(&checkpoint);
    if (!arguments.values[FLAG_PLAN])
        return progress_run("convert", &plan, paths, jobs, arguments.values[FLAG_JSON] != NULL);
    report_plan(&plan, arguments.values[FLAG_JSON] != NULL, stdout);
    return EXIT_DONE;
}
