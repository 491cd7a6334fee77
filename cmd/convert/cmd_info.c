/* calypte info: what a container is, or what a checkpoint would become, and what of it this machine can hold. */
#include "cmd/cli/commands.h"
#include "cmd/cli/usage.h"
#include "cmd/convert/report.h"
#include "cmd/convert/synth.h"
#include "proto/bytes_text.h"
#include "proto/cleanup.h"
#include "proto/container.h"

#include <string.h>
#include <sys/statvfs.h>

static const struct flag flags[] = {{"--json", NULL, NULL, "print one JSON object"}, {NULL, NULL, NULL, NULL}};

static const struct command_line syntax = {
    .command = "info",
    .operands = "MODEL",
    .summary =
        "Family, shapes, formats, bytes a token and an expert of a container, and what of it fits in this machine.",
    .details = "MODEL may also be a Hugging Face checkpoint: then it says what `calypte convert` would make of it.",
    .flags = flags,
    .least_operands = 1,
    .most_operands = 1,
};

/* Bytes that this machine could give; 0 where it does not say. */
struct machine {
    uint64_t available, shared_memory;
};

static struct machine look_at_machine(void)
{
    struct machine machine = {0};
    _cleanup_fclose_ FILE *file = fopen("/proc/meminfo", "re");
    char line[128];
    unsigned long long kilobytes;
    while (file && fgets(line, sizeof line, file)) {
        if (sscanf(line, "MemAvailable: %llu kB", &kilobytes) == 1)
            machine.available = kilobytes * 1024;
    }
    struct statvfs facts;
    if (statvfs("/dev/shm", &facts) == 0)
        machine.shared_memory = (uint64_t)facts.f_bavail * facts.f_frsize;
    return machine;
}

static uint64_t least(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

/* Experts that fit beside the dense weights, at most all. */
static uint64_t fitting_experts(const struct model_facts *facts, const struct machine *machine)
{
    uint64_t room = least(machine->available, machine->shared_memory), blob = EXPERT_SLICES * facts->slice_bytes;
    uint64_t all = (uint64_t)model_moe_layers(facts->config) * facts->config->experts;
    return room > facts->dense_bytes ? least((room - facts->dense_bytes) / blob, all) : 0;
}

/* What only a container has. */
struct origin {
    json_t *stripes; /* of more than one: their folders */
    json_t *source;  /* what it was made of */
};

static void free_origin(struct origin *origin)
{
    json_decref(origin->stripes);
    json_decref(origin->source);
}

static int read_origin(const struct container *container, struct origin *ret_origin, struct error *ret_error)
{
    _cleanup_free_ char *path = NULL;
    json_t *manifest;
    if (asprintf(&path, "%s/" CONTAINER_MANIFEST, container->path) < 0) {
        path = NULL;
        return error_set(ret_error, ENOMEM, "%s: no memory", container->path);
    }
    int status = container_read_json(path, CONTAINER_MANIFEST_MAX, &manifest, ret_error);
    if (status < 0)
        return status;
    ret_origin->source = json_incref(json_object_get(manifest, "source"));
    json_decref(manifest);
    ret_origin->stripes = json_array();
    for (uint32_t s = 0; container->expert_count && s < container->stripes; s++) {
        _cleanup_free_ char *file = realpath(container->experts[0].stripes[s].header.path, NULL);
        char *slash = file ? strrchr(file, '/') : NULL;
        if (slash)
            *slash = 0;
        json_array_append_new(ret_origin->stripes, json_string(file ? file : "?"));
    }
    return 0;
}

static bool is_synthetic(const struct origin *origin)
{
    const char *source = json_string_value(origin->source);
    return source && !strncmp(source, SYNTH_SOURCE, strlen(SYNTH_SOURCE));
}

static void print_origin(const struct origin *origin)
{
    const char *source = json_string_value(origin->source);
    size_t s, count = json_array_size(origin->stripes);
    json_t *folder;
    if (source)
        printf("made of         %s%s\n", source, is_synthetic(origin) ? ": synthetic, its answers are noise" : "");
    json_array_foreach (origin->stripes, s, folder) {
        if (count > 1)
            printf("stripe %zu of %zu   %s\n", s + 1, count, json_string_value(folder));
    }
}

static void print_json(const char *kind, const char *path, const struct model_facts *facts, const struct origin *origin)
{
    struct machine machine = look_at_machine();
    json_auto_t *object = report_facts(facts);
    json_object_set_new(object, "kind", json_string(kind));
    json_object_set_new(object, "path", json_string(path));
    json_object_set_new(object, "machine",
                        json_pack("{s:I, s:I, s:I}", "available_bytes", (json_int_t)machine.available,
                                  "shared_memory_bytes", (json_int_t)machine.shared_memory, "experts_that_fit",
                                  (json_int_t)fitting_experts(facts, &machine)));
    if (origin->stripes) {
        json_object_set(object, "stripes", origin->stripes);
        json_object_set_new(object, "synthetic", json_boolean(is_synthetic(origin)));
    }
    if (origin->source)
        json_object_set(object, "source", origin->source);
    json_dumpf(object, stdout, JSON_INDENT(1));
    putchar('\n');
}

static void print_lines(const char *kind, const struct model_facts *facts, const struct origin *origin)
{
    struct machine machine = look_at_machine();
    printf("%s\n", kind);
    print_origin(origin);
    report_print(facts, stdout);
    uint64_t fit = fitting_experts(facts, &machine),
             all = (uint64_t)model_moe_layers(facts->config) * facts->config->experts;
    printf("this machine    %s of memory, %s of shared memory available: ", bytes_text(machine.available).text,
           bytes_text(machine.shared_memory).text);
    if (fit == all)
        printf("all of it fits\n");
    else if (least(machine.available, machine.shared_memory) <= facts->dense_bytes)
        printf("the dense weights do not fit\n");
    else
        printf("the dense weights and %.1f %% of the experts fit\n", 100.0 * (double)fit / (double)all);
}

static void print_facts(const char *kind, const char *path, const struct model_facts *facts,
                        const struct origin *origin, bool json)
{
    if (json)
        print_json(kind, path, facts, origin);
    else
        print_lines(!strcmp(kind, "container") ? "Calypte container"
                                               : "Hugging Face checkpoint; `calypte convert` would make of it:",
                    facts, origin);
}

static int info_container(const char *path, bool json, struct error *ret_error)
{
    struct container *container;
    int status = container_open(path, &container, ret_error);
    if (status < 0)
        return status;
    struct model_facts facts = {.config = &container->config,
                                .dense_format = container->dense_format,
                                .expert_format = container->expert_format,
                                .slice_bytes = container->slice_bytes};
    for (size_t f = 0; f < container->dense_count; f++) {
        const struct safetensors *header = &container->dense[f].header;
        facts.dense_bytes += header->file_bytes;
        for (size_t i = 0; i < header->count; i++)
            facts.dense_token_bytes +=
                report_read_each_token(&container->config, header->tensors[i].name) ? header->tensors[i].bytes : 0;
    }
    for (size_t f = 0; f < container->expert_count; f++)
        for (uint32_t s = 0; s < container->stripes; s++)
            facts.expert_bytes += container->experts[f].stripes[s].header.file_bytes;
    _cleanup_(free_origin) struct origin origin = {NULL, NULL};
    status = read_origin(container, &origin, ret_error);
    if (status == 0)
        print_facts("container", path, &facts, &origin, json);
    container_close(container);
    return status;
}

static int info_checkpoint(const char *path, bool json, struct error *ret_error)
{
    _cleanup_(checkpoint_close) struct checkpoint checkpoint = {0};
    _cleanup_(plan_free) struct plan plan = {0};
    int status = checkpoint_open(path, &checkpoint, ret_error);
    struct plan_options options = {.experts = WEIGHT_INT4, .dense = WEIGHT_INT8};
    if (status == 0)
        status = plan_make(&checkpoint, &options, &plan, ret_error);
    if (status < 0)
        return status;
    struct model_facts facts = report_plan_facts(&plan);
    print_facts("checkpoint", path, &facts, &(struct origin){NULL, NULL}, json);
    return 0;
}

static bool has_file(const char *folder, const char *name)
{
    _cleanup_free_ char *path = NULL;
    if (asprintf(&path, "%s/%s", folder, name) < 0) {
        path = NULL;
        return false;
    }
    return access(path, F_OK) == 0;
}

int cmd_info(int argc, char **argv)
{
    struct arguments arguments;
    int status = arguments_parse(&syntax, argc, argv, &arguments);
    if (status != ARGUMENTS_GO_ON)
        return status;
    const char *model = arguments.operands[0];
    bool json = arguments.values[0] != NULL;
    struct error error = {{0}};
    bool checkpoint = !has_file(model, CONTAINER_MANIFEST) && has_file(model, "config.json");
    status = checkpoint ? info_checkpoint(model, json, &error) : info_container(model, json, &error);
    return status < 0 ? usage_failed("info", "%s", error.text) : EXIT_DONE;
}
