/* The conversion, from the top. Its parts: checkpoint.c reads the source, family.c says what a family's tensors
 * become, plan.c lays out every file before a weight is read, unit.c converts one tensor or expert with quantise.c,
 * write.c makes one file of them with jobs.c, output.c lets files appear whole, journal.c remembers finished ones,
 * destination.c has the folders, mend.c makes what a container lacks. */
#include "cmd/convert/convert.h"

#include "cmd/convert/destination.h"
#include "cmd/convert/journal.h"
#include "cmd/convert/mend.h"
#include "cmd/convert/write.h"
#include "proto/cleanup.h"
#include "proto/container.h"

#include <fcntl.h>
#include <string.h>
#include <xxhash.h>

#define PRODUCER "calypte " CALYPTE_VERSION
#define SPARE_BYTES (4u << 20) /* manifest, journal and the file system's own needs */

const char *const convert_copied[] = {"tokenizer.json", "tokenizer_config.json", "generation_config.json",
                                      "chat_template.jinja", NULL};

static void run_free(struct journal_run *run)
{
    json_decref(run->stripes);
    run->stripes = NULL;
}

/* A hash of everything that the bytes of the container come from; `times`: see checkpoint_fingerprint. */
static int fingerprint(const struct plan *plan, bool times, uint64_t *ret_hash, struct error *ret_error)
{
    uint64_t checkpoint;
    int status = checkpoint_fingerprint(plan->checkpoint, times, &checkpoint, ret_error);
    if (status < 0)
        return status;
    char text[256];
    snprintf(text, sizeof text, "%s format %d numerics %d checkpoint %016llx experts %s dense %s qk_norm_eps %.17g",
             PRODUCER, CONTAINER_FORMAT, CONTAINER_NUMERICS, (unsigned long long)checkpoint,
             weight_format_name(plan->options.experts), weight_format_name(plan->options.dense),
             (double)plan->config.qk_norm_eps);
    if (plan->options.stripes > 1) {
        size_t length = strlen(text);
        snprintf(text + length, sizeof text - length, " stripes %u", plan->options.stripes);
    }
    *ret_hash = XXH3_64bits(text, strlen(text));
    return 0;
}

/* What the journal of this run says of it. */
static int describe_run(const struct plan *plan, const struct destination *destination, struct journal_run *ret_run,
                        struct error *ret_error)
{
    *ret_run = (struct journal_run){.stripes = json_array()};
    int status = fingerprint(plan, true, &ret_run->fingerprint, ret_error);
    for (uint32_t i = 1; status == 0 && i < destination->count; i++) {
        const char *path = destination->folders[i].path;
        _cleanup_free_ char *full = realpath(path, NULL);
        if (!full)
            return error_set(ret_error, errno, "%s: %s", path, strerror(errno));
        if (json_array_append_new(ret_run->stripes, json_string(full)) < 0)
            status =
                error_set(ret_error, EILSEQ, "%s: the path is not UTF-8 and cannot be noted: choose another", full);
    }
    return status;
}

/* Was the container with this manifest made of the plan's checkpoint, with its options? */
static int check_same(const struct plan *plan, const struct write_folder *folder, const json_t *manifest,
                      struct error *ret_error)
{
    uint64_t wanted = 0, stated = 0;
    int status = fingerprint(plan, false, &wanted, ret_error);
    if (status < 0)
        return status;
    if (checksum_parse(json_object_get(manifest, "fingerprint"), &stated) < 0 || stated != wanted) {
        const char *source = json_string_value(json_object_get(manifest, "source"));
        return error_set(
            ret_error, EEXIST,
            "%s: holds another container already (from %s, experts %s, dense %s, stripes %lld, by %s): choose "
            "another folder, or give the flags, and use the version, that it was made with",
            folder->path, source ? source : "?", json_string_value(json_object_get(manifest, "expert_format")),
            json_string_value(json_object_get(manifest, "dense_format")),
            (long long)json_integer_value(json_object_get(manifest, "stripes")),
            json_string_value(json_object_get(manifest, "producer")));
    }
    return 0;
}

/* A container stands at the destination: makes what it lacks. *ret_mended: how many files. */
static int mend(const struct write_context *context, struct destination *destination, size_t *ret_mended,
                struct error *ret_error)
{
    const struct plan *plan = context->plan;
    const struct write_folder *folder = &destination->folders[0];
    struct error foreign;
    json_auto_t *manifest = NULL;
    size_t bad_count = 0, copied = 0;
    _cleanup_free_ bool *bad = calloc(plan->file_count + 1, sizeof *bad);
    if (!bad)
        return error_set(ret_error, ENOMEM, "%s: no memory", folder->path);
    int status = mend_find(plan, folder, bad, &bad_count, &manifest, &foreign, ret_error);
    if (status == 0)
        status = check_same(plan, folder, manifest, ret_error);
    if (status == 0 && foreign.text[0])
        status = error_set(ret_error, EIO, "%s", foreign.text);
    if (status == 0)
        status = mend_files(context, destination, bad, bad_count, manifest, ret_error);
    if (status == 0)
        status = mend_copied(context, &copied, ret_error);
    if (status < 0)
        return status;
    *ret_mended = bad_count + copied;
    destination_remove_leftovers(destination, plan, true);
    return 0;
}

/* Which files of the plan an earlier run finished; kept[i] is then their entry. */
static int keep_finished(const struct write_context *context, const struct journal *journal, json_t **kept,
                         struct error *ret_error)
{
    const struct plan *plan = context->plan;
    for (size_t i = 0; i < plan->file_count; i += write_group(plan, &plan->files[i])) {
        const struct plan_file *file = &plan->files[i];
        uint32_t count = write_group(plan, file), known = 0;
        json_t *entries[EXPERT_SLICES];
        for (uint32_t s = 0; s < count; s++) {
            entries[s] = json_object_get(journal->entries, file[s].name);
            known += entries[s] != NULL;
        }
        if (known < count)
            continue;
        bool good;
        int status = verify_files(context, file, entries, &good, ret_error);
        if (status < 0)
            return status;
        char line[160];
        snprintf(line, sizeof line,
                 good ? "%s: finished by an earlier run, kept" : "%s: changed since an earlier run, made again",
                 file->name);
        context->watch->note(context->watch, line);
        for (uint32_t s = 0; good && s < count; s++)
            kept[i + s] = json_incref(entries[s]);
    }
    return 0;
}

static int write_all(const struct write_context *context, struct journal *journal, json_t **entries,
                     struct error *ret_error)
{
    const struct plan *plan = context->plan;
    for (size_t i = 0; i < plan->file_count; i += write_group(plan, &plan->files[i])) {
        const struct plan_file *file = &plan->files[i];
        if (entries[i])
            continue;
        int status = write_files(context, file, &entries[i], ret_error);
        for (uint32_t s = 0; status == 0 && s < write_group(plan, file); s++)
            status = journal_add(journal, file[s].name, entries[i + s], ret_error);
        if (status < 0)
            return status;
    }
    for (size_t i = 0; !plan->checkpoint->synthetic && convert_copied[i]; i++) {
        int status = output_copy(context->folders[0].fd, context->folders[0].path, convert_copied[i],
                                 plan->checkpoint->path, ret_error);
        if (status < 0 && status != -ENOENT)
            return status;
    }
    return 0;
}

static void add_checksum(json_t *object, const char *name, uint64_t checksum)
{
    char digits[CHECKSUM_DIGITS + 1];
    checksum_format(checksum, digits);
    json_object_set_new(object, name, json_string(digits));
}

static int write_manifest(const struct write_context *context, json_t *const *entries, struct error *ret_error)
{
    const struct plan *plan = context->plan;
    const struct checkpoint *checkpoint = plan->checkpoint;
    _cleanup_free_ char *full = checkpoint->synthetic ? NULL : realpath(checkpoint->path, NULL);
    const char *slash = full ? strrchr(full, '/') : NULL;
    const char *source = checkpoint->synthetic ? checkpoint->path : slash ? slash + 1 : "checkpoint";
    json_auto_t *files = json_object();
    for (size_t i = 0; i < plan->file_count; i++)
        json_object_set(files, plan->files[i].name, entries[i]);
    json_auto_t *manifest = json_pack(
        "{s:i, s:i, s:s, s:s, s:O, s:O?, s:f, s:s, s:s, s:i, s:i, s:I, s:O}", "format", CONTAINER_FORMAT, "numerics",
        CONTAINER_NUMERICS, "producer", PRODUCER, "source", source, "config", checkpoint->config, "generation",
        checkpoint->generation, "qk_norm_eps", plan->options.qk_norm_eps == 0 ? 1e-6 : plan->options.qk_norm_eps,
        "dense_format", weight_format_name(plan->options.dense), "expert_format",
        weight_format_name(plan->options.experts), "slices", (int)EXPERT_SLICES, "stripes", (int)plan->options.stripes,
        "slice_bytes", (json_int_t)plan->slice_bytes, "files", files);
    uint64_t hash;
    int status = fingerprint(plan, false, &hash, ret_error);
    if (status < 0)
        return status;
    if (!manifest)
        return error_set(ret_error, ENOMEM, "%s/%s: no memory", context->folders[0].path, CONTAINER_MANIFEST);
    add_checksum(manifest, "fingerprint", hash);
    status = container_checksum(manifest, &hash, ret_error);
    if (status < 0)
        return status;
    add_checksum(manifest, "checksum", hash);
    _cleanup_free_ char *text = json_dumps(manifest, JSON_INDENT(1) | JSON_SORT_KEYS);
    if (!text)
        return error_set(ret_error, ENOMEM, "%s/%s: no memory", context->folders[0].path, CONTAINER_MANIFEST);
    return output_put(context->folders[0].fd, context->folders[0].path, CONTAINER_MANIFEST, text, strlen(text),
                      ret_error);
}

/* With the journal open: keeps what is there, writes the rest, the manifest last. */
static int convert_into(const struct write_context *context, struct journal *journal,
                        const struct destination *destination, json_t **entries, struct error *ret_error)
{
    const struct plan *plan = context->plan;
    int status = keep_finished(context, journal, entries, ret_error);
    if (status < 0)
        return status;
    uint64_t needed[EXPERT_SLICES] = {0}, total = 0;
    for (size_t i = 0; i < plan->file_count; i++) {
        uint64_t bytes = entries[i] ? 0 : plan->files[i].bytes;
        needed[plan->files[i].stripe] += bytes;
        total += bytes;
    }
    atomic_store(&context->watch->bytes_total, total);
    for (uint32_t i = 0; status == 0 && i < destination->count; i++)
        status = destination_check_space(&destination->folders[i], needed[i] + SPARE_BYTES, ret_error);
    if (status == 0)
        status = write_all(context, journal, entries, ret_error);
    return status == 0 ? write_manifest(context, entries, ret_error) : status;
}

static void tick(void *context)
{
    struct convert_watch *watch = context;
    watch->tick(watch);
}

/* After a failure: an attempt that finished no file leaves nothing; else what is finished stays for the next one. */
static void give_up(const struct plan *plan, const struct destination *destination)
{
    bool some = false;
    for (size_t i = 0; i < plan->file_count; i++)
        some = some || destination_has(&destination->folders[plan->files[i].stripe], plan->files[i].name);
    destination_remove_leftovers(destination, plan, !some);
}

/* Opens or begins the journal. Only when that has succeeded are the folders this run's own: they were empty, or they are
 * those of the unfinished run that goes on. */
static int take_folders(const struct plan *plan, const struct destination *destination, struct journal *ret_journal,
                        struct error *ret_error)
{
    const struct write_folder *folder = &destination->folders[0];
    _cleanup_(run_free) struct journal_run run = {0};
    int status = describe_run(plan, destination, &run, ret_error);
    if (status == 0)
        status = journal_open(folder->fd, folder->path, &run, ret_journal, ret_error);
    if (status < 0 || ret_journal->begun)
        return status;
    for (uint32_t i = 0; status == 0 && i < destination->count; i++)
        status = destination_check_empty(&destination->folders[i], i == 0, ret_error);
    return status == 0 ? journal_begin(folder->fd, &run, ret_journal, ret_error) : status;
}

static int convert(const struct plan *plan, struct destination *destination, unsigned threads,
                   struct convert_watch *watch, enum convert_result *ret_result, struct error *ret_error)
{
    const struct write_folder *folder = &destination->folders[0];
    struct write_context context = {
        .plan = plan,
        .folders = destination->folders,
        .jobs = {.threads = threads, .stop = &watch->stop, .tick = tick, .tick_context = watch},
        .watch = watch};
    if (destination_has(folder, CONTAINER_MANIFEST)) {
        size_t mended = 0;
        int status = mend(&context, destination, &mended, ret_error);
        *ret_result = mended ? CONVERT_DONE : CONVERT_WAS_DONE;
        return status;
    }
    *ret_result = CONVERT_DONE;
    _cleanup_(journal_close) struct journal journal = {.fd = -1};
    int status = take_folders(plan, destination, &journal, ret_error);
    if (status < 0)
        return status;
    for (uint32_t i = 0; i < destination->count; i++)
        destination->own[i] = true;
    destination_note_shared(destination, watch);
    json_t **entries = calloc(plan->file_count + 1, sizeof *entries);
    if (!entries)
        status = error_set(ret_error, ENOMEM, "%s: no memory", folder->path);
    if (status == 0)
        status = convert_into(&context, &journal, destination, entries, ret_error);
    for (size_t i = 0; entries && i < plan->file_count; i++)
        json_decref(entries[i]);
    free(entries);
    if (status == 0)
        destination_remove_leftovers(destination, plan, true);
    else
        give_up(plan, destination);
    return status;
}

int convert_run(const struct plan *plan, const char *const *paths, unsigned threads, struct convert_watch *watch,
                enum convert_result *ret_result, struct error *ret_error)
{
    _cleanup_(destination_close) struct destination destination = {0};
    int status = destination_open(plan, paths, &destination, ret_error);
    if (status == 0)
        status = convert(plan, &destination, threads, watch, ret_result, ret_error);
    return status;
}
