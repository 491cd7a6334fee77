/* calypte verify: all checksums of a container. */
#include "cmd/cli/bar.h"
#include "cmd/cli/commands.h"
#include "cmd/cli/interrupt.h"
#include "cmd/cli/usage.h"
#include "cmd/convert/progress.h"
#include "cmd/verify/verify.h"
#include "proto/cleanup.h"
#include "proto/parse.h"

#include <string.h>
#include <sys/signalfd.h>

#define JOBS_MOST 64u
#define JOBS_DEFAULT 4u /* one hashes some 20 GB a second, where memory gives them */

#define RATE_LEAST (1u << 20) /* bytes a second: a number without its suffix is far below */

enum { FLAG_JOBS, FLAG_RATE, FLAG_RESTART, FLAG_JSON };

static const struct flag flags[] = {
    [FLAG_JOBS] = {"--jobs", NULL, "N", "hashing threads (default: the CPUs that this process may use, at most 4)"},
    [FLAG_RATE] = {"--rate", NULL, "SIZE", "bytes a second, at most: for a machine that is answering (default: all)"},
    [FLAG_RESTART] = {"--restart", NULL, NULL, "from the beginning, also if a run was interrupted"},
    [FLAG_JSON] = {"--json", NULL, NULL, "print the result as JSON"},
    {NULL, NULL, NULL, NULL},
};

static const struct command_line syntax = {
    .command = "verify",
    .operands = "MODEL",
    .summary = "Reads the whole container MODEL from its drive and checks every checksum: manifest, headers, dense "
               "tensors, every slice of every expert.",
    .details = "A run that was interrupted goes on where it was when the same command is given again. Nothing is "
               "written into the container.\n"
               "`--set io=pread` reads with threads instead of io_uring.",
    .flags = flags,
    .settings = true,
    .least_operands = 1,
    .most_operands = 1,
};

struct verify_command {
    struct arguments arguments;
    uint64_t jobs, rate;
    bool json;
    struct container *container;
    struct extents extents;
    struct place place;
    uint64_t bytes_before; /* verified by an earlier run */
    struct bar bar;
    int interrupt_fd;
    json_t *damage; /* of all, as JSON */
    uint32_t damaged_experts, damaged_tensors;
    uint32_t changed_files;              /* during the run */
    json_t *changed;                     /* their paths */
    const struct extent_file *last_file; /* of the expert that was counted last */
    uint32_t last_expert;
};

/* --- what verify_run calls --- */

static void tick(void *context, uint64_t bytes)
{
    struct verify_command *command = context;
    bar_draw(&command->bar, (double)bytes, (double)command->extents.bytes);
}

static void note(void *context, const char *line)
{
    struct verify_command *command = context;
    bar_clear(&command->bar);
    fprintf(stderr, "calypte verify: %s\n", line);
}

/* The slices of an expert come one after the other. */
static void count_damage(struct verify_command *command, const struct extent_file *file, const struct part *part)
{
    uint32_t expert = part->index / EXPERT_SLICES;
    if (!file->experts) {
        command->damaged_tensors++;
    } else if (file != command->last_file || expert != command->last_expert) {
        command->damaged_experts++;
        command->last_file = file;
        command->last_expert = expert;
    }
}

static void damage(void *context, const struct extent_file *file, const struct part *part, int code)
{
    struct verify_command *command = context;
    count_damage(command, file, part);
    if (command->json) {
        json_array_append_new(command->damage, extents_describe_json(file, part, code));
        return;
    }
    char text[1024];
    extents_describe(file, part, code, text, sizeof text);
    for (char *at = text; *at; at++) /* a tensor's name may hold anything, and this stays one line */
        *at = (unsigned char)*at < ' ' || *at == 0x7F ? '?' : *at;
    bar_clear(&command->bar);
    puts(text);
    fflush(stdout);
}

/* --- the end --- */

/* What was read of a file before it changed says nothing of what is there now. */
static void find_changed(struct verify_command *command)
{
    for (uint32_t f = 0; f < command->extents.file_count; f++) {
        const char *path = command->extents.files[f].header->path;
        if (!place_file_changed(&command->place, f))
            continue;
        command->changed_files++;
        json_array_append_new(command->changed, json_string(path));
        if (!command->json)
            printf("%s: changed during the run: what was read is not what is there now\n", path);
    }
}

static int not_good(const struct verify_command *command, const struct verify_result *result)
{
    const char *path = command->container->path;
    uint32_t changed = command->changed_files;
    if (!changed)
        return usage_failed(
            "verify",
            "%s: %u expert%s and %u dense tensor%s are damaged: "
            "fetch their files again, or remove them and run `calypte convert SRC DST` again (only they are made anew)",
            path, command->damaged_experts, plural(command->damaged_experts), command->damaged_tensors,
            plural(command->damaged_tensors));
    if (!result->damaged_parts)
        return usage_failed("verify", "%s: %u file%s changed during the run: run it again when nothing writes there",
                            path, changed, plural(changed));
    return usage_failed("verify",
                        "%s: %u expert%s and %u dense tensor%s are damaged, and %u file%s changed during the run: run "
                        "it again when nothing writes there",
                        path, command->damaged_experts, plural(command->damaged_experts), command->damaged_tensors,
                        plural(command->damaged_tensors), changed, plural(changed));
}

/* A file that cannot even be opened as what the manifest says. */
static void refuse(void *context, const char *name, int status, const struct error *why)
{
    struct verify_command *command = context;
    (void)status;
    if (!command->json) {
        puts(why->text);
        return;
    }
    char path[sizeof why->text];
    int length = snprintf(path, sizeof path, "%s/%s", command->arguments.operands[0], name);
    bool prefixed = length < (int)sizeof path && !strncmp(why->text, path, (size_t)length) && why->text[length] == ':';
    json_array_append_new(command->damage, json_pack("{s:s, s:s}", "file", path, "reason",
                                                     prefixed ? why->text + length + 2 : why->text));
}

/* After the last of them: the contents of the others are not looked at, because a remedy is the next thing to do. */
static int refused(struct verify_command *command, unsigned count)
{
    const char *path = command->arguments.operands[0];
    if (command->json) {
        json_auto_t *object = json_pack("{s:s, s:O}", "path", path, "damaged", command->damage);
        json_dumpf(object, stdout, JSON_INDENT(1));
        putchar('\n');
    }
    return usage_failed("verify",
                        "%s: %u of its files cannot be used, and nothing was read of the others: mend %s as %s "
                        "says, then verify again",
                        path, count, count == 1 ? "it" : "them", count == 1 ? "its line" : "the line of each");
}

static void print_json(const struct verify_command *command, const struct verify_result *result, double seconds)
{
    char identity[CHECKSUM_DIGITS + 1];
    uint32_t tensors = 0, slices = 0;
    for (uint32_t f = 0; f < command->extents.file_count; f++)
        *(command->extents.files[f].experts ? &slices : &tensors) += command->extents.files[f].parts;
    checksum_format(command->container->identity, identity);
    json_auto_t *object = json_pack(
        "{s:s, s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:O, s:O, s:f, s:f, s:s, s:b}", "path", command->container->path,
        "identity", identity, "files", (json_int_t)command->extents.file_count, "experts",
        (json_int_t)(slices / EXPERT_SLICES), "slices", (json_int_t)slices, "tensors", (json_int_t)tensors, "bytes",
        (json_int_t)(command->bytes_before + result->bytes), "resumed_bytes", (json_int_t)command->bytes_before,
        "damaged", command->damage, "changed", command->changed, "seconds", seconds, "gbps",
        seconds > 0 ? (double)result->bytes / seconds / 1e9 : 0, "method", result->method, "direct", result->direct);
    json_dumpf(object, stdout, JSON_INDENT(1));
    putchar('\n');
}

static int finish(struct verify_command *command, const struct verify_result *result)
{
    double seconds = bar_seconds(&command->bar);
    uint64_t experts = command->container->expert_count * (uint64_t)command->container->config.experts;
    find_changed(command);
    place_remove(&command->place);
    if (command->json)
        print_json(command, result, seconds);
    if (result->damaged_parts || command->changed_files)
        return not_good(command, result);
    if (!command->json)
        printf("%s: good: %" PRIu64 " expert%s and the dense weights, %.2f GB in %.1f s (%.2f GB/s%s)\n",
               command->container->path, experts, plural(experts),
               (double)(command->bytes_before + result->bytes) / 1e9, seconds,
               seconds > 0 ? (double)result->bytes / seconds / 1e9 : 0,
               command->bytes_before ? ", and an earlier run" : "");
    return EXIT_DONE;
}

static int interrupted(struct verify_command *command, const struct verify_result *result)
{
    struct signalfd_siginfo info = {.ssi_signo = 2};
    (void)!read(command->interrupt_fd, &info, sizeof info);
    fprintf(stderr, "calypte verify: %s: interrupted at %.1f %%%s; run the same command again to go on\n",
            command->container->path,
            100.0 * (double)(command->bytes_before + result->bytes) / (double)command->extents.bytes,
            result->damaged_parts ? ", damage was found" : "");
    return 128 + (int)info.ssi_signo; /* EXIT_INTERRUPTED for SIGINT */
}

static int run(struct verify_command *command)
{
    struct error error = {{0}};
    struct verify_result result;
    struct verify_options options = {
        .io = (uint32_t)settings_number(&command->arguments.settings, SETTING_IO),
        .jobs = (uint32_t)command->jobs,
        .rate = command->rate,
        .stop_fd = command->interrupt_fd,
        .keep_place = true,
        .context = command,
        .tick = tick,
        .damage = damage,
        .note = note,
    };
    int status = container_inspect(command->arguments.operands[0], refuse, command, &command->container, &error);
    if (status > 0)
        return refused(command, (unsigned)status);
    if (status < 0 || extents_make(command->container, &command->extents, &error) < 0 ||
        place_open(&command->extents, command->arguments.values[FLAG_RESTART] != NULL, &command->place,
                   &command->bytes_before, &error) < 0)
        return usage_failed("verify", "%s", error.text);
    if (command->bytes_before)
        fprintf(stderr, "calypte verify: %s: goes on at %.1f %%; --restart begins anew\n", command->container->path,
                100.0 * (double)command->bytes_before / (double)command->extents.bytes);
    bar_begin("verify", (double)command->bytes_before, &command->bar);
    status = verify_run(&command->place, &options, &result, &error);
    bar_clear(&command->bar);
    if (status == -EINTR)
        return interrupted(command, &result);
    return status < 0 ? usage_failed("verify", "%s", error.text) : finish(command, &result);
}

int cmd_verify(int argc, char **argv)
{
    struct verify_command command = {.interrupt_fd = -1};
    struct arguments *arguments = &command.arguments;
    int code = arguments_parse(&syntax, argc, argv, arguments);
    if (code != ARGUMENTS_GO_ON)
        return code;
    command.jobs = progress_usable_cpus() < JOBS_DEFAULT ? progress_usable_cpus() : JOBS_DEFAULT;
    command.json = arguments->values[FLAG_JSON] != NULL;
    if (arguments_integer(arguments, FLAG_JOBS, 1, JOBS_MOST, &command.jobs))
        return EXIT_USAGE;
    const char *rate = arguments->values[FLAG_RATE];
    if (rate && (parse_size(rate, &command.rate) < 0 || command.rate < RATE_LEAST))
        return usage_error("verify", "--rate cannot be \"%s\": bytes a second, like 200M; 1M at least", rate);
    command.interrupt_fd = interrupt_open();
    if (command.interrupt_fd < 0)
        return usage_failed("verify", "signals cannot be watched: %s", strerror(-command.interrupt_fd));
    command.damage = json_array();
    command.changed = json_array();
    code = command.damage && command.changed ? run(&command) : usage_failed("verify", "out of memory");
    place_close(&command.place);
    extents_free(&command.extents);
    container_close(command.container);
    json_decref(command.damage);
    json_decref(command.changed);
    close(command.interrupt_fd);
    return code;
}
