#include "cmd/convert/write.h"

#include "cmd/convert/unit.h"
#include "proto/cleanup.h"
#include "proto/container.h"

#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <xxhash.h>

#define READ_BYTES (1u << 20)
#define TABLE_CHECKSUMS "experts.checksums"
#define TABLE_EXPONENTS "experts.exponents"

static void json_set_checksum(json_t *object, const char *name, uint64_t checksum)
{
    char digits[CHECKSUM_DIGITS + 1];
    checksum_format(checksum, digits);
    json_object_set_new(object, name, json_string(digits));
}

static const struct tensor *find_tensor(const struct plan_file *file, const char *name)
{
    for (size_t i = file->tensor_count; i-- > 0;) {
        if (!strcmp(file->tensors[i].name, name))
            return &file->tensors[i];
    }
    return NULL;
}

static int run_unit(void *context, size_t index, struct error *ret_error)
{
    const struct unit_target *target = context;
    return unit_convert(target, &target->file->units[index], ret_error);
}

/* The checksum of zeros, which the padding is. */
static uint64_t padding_checksum(const struct tensor *padding)
{
    static const uint8_t zeros[DISK_ALIGN];
    return XXH3_64bits(zeros, padding->bytes);
}

/* Header, tables and padding: what no unit writes. Fills the entry's "tensors". */
static int write_rest(const struct unit_target *target, uint32_t stripe, json_t *tensors, struct error *ret_error)
{
    const struct plan_file *file = target->file + stripe;
    const struct output *output = &target->outputs[stripe];
    int status = output_write(output, 0, file->header, file->header_bytes, ret_error);
    if (status < 0)
        return status;
    if (file->experts) {
        const struct tensor *checksums = find_tensor(file, TABLE_CHECKSUMS),
                            *exponents = find_tensor(file, TABLE_EXPONENTS);
        if (!checksums || !exponents)
            return 0; /* another stripe than the first */
        status = output_write(output, checksums->offset, target->slice_checksums, checksums->bytes, ret_error);
        if (status == 0)
            status = output_write(output, exponents->offset, target->exponents, exponents->bytes, ret_error);
        json_set_checksum(tensors, TABLE_CHECKSUMS, XXH3_64bits(target->slice_checksums, checksums->bytes));
        json_set_checksum(tensors, TABLE_EXPONENTS, XXH3_64bits(target->exponents, exponents->bytes));
        return status;
    }
    for (size_t i = 0; i < file->tensor_count; i++) {
        bool padding = !strcmp(file->tensors[i].name, "padding");
        json_set_checksum(tensors, file->tensors[i].name,
                          padding ? padding_checksum(&file->tensors[i]) : target->checksums[i]);
    }
    return 0;
}

/* The rest of a file's bytes, and its entry. */
static int describe_file(const struct unit_target *target, uint32_t stripe, json_t **ret_entry, struct error *ret_error)
{
    const struct plan_file *file = target->file + stripe;
    json_auto_t *tensors = json_object();
    int status = tensors ? write_rest(target, stripe, tensors, ret_error)
                         : error_set(ret_error, ENOMEM, "%s: no memory", file->name);
    if (status < 0)
        return status;
    json_t *entry = json_pack("{s:I, s:O}", "bytes", (json_int_t)file->bytes, "tensors", tensors);
    if (!entry)
        return error_set(ret_error, ENOMEM, "%s: no memory", file->name);
    json_set_checksum(entry, "header", XXH3_64bits(file->header, file->header_bytes));
    *ret_entry = entry;
    return 0;
}

/* Gives the files of a group their names. */
static int finish_files(const struct write_context *context, const struct plan_file *file, struct output *outputs,
                        struct error *ret_error)
{
    int status = 0;
    for (uint32_t s = 0; status == 0 && s < write_group(context->plan, file); s++) {
        if (outputs[s].fd < 0)
            continue;
        status = output_finish(&outputs[s], ret_error);
        if (status == 0 && s > 0)
            status = output_link(context->folders[0].fd, context->folders[0].path, file[s].name,
                                 context->folders[s].path, ret_error);
    }
    return status;
}

/* Are the entries those that the container's manifest has? Its conversion's fingerprint knows samples of the source. */
static int check_entries(const struct write_context *context, const struct plan_file *file, json_t *const *entries,
                         const json_t *manifest_files, struct error *ret_error)
{
    for (uint32_t s = 0; s < write_group(context->plan, file); s++) {
        if (!json_equal(entries[s], json_object_get(manifest_files, file[s].name)))
            return error_set(
                ret_error, EEXIST,
                "%s: would not become what %s of %s says: %s is no longer what that container was made of; "
                "convert the checkpoint that it was, or into another folder",
                file[s].name, CONTAINER_MANIFEST, context->folders[0].path, context->plan->checkpoint->path);
    }
    return 0;
}

static int fill_files(const struct write_context *context, const struct plan_file *file, const struct output *outputs,
                      json_t **ret_entries, struct error *ret_error)
{
    size_t experts = context->plan->config.experts;
    _cleanup_free_ uint64_t *checksums = calloc(file->tensor_count + 1, sizeof *checksums);
    _cleanup_free_ uint64_t *slices = calloc(experts * EXPERT_SLICES, sizeof *slices);
    _cleanup_free_ int32_t *exponents = calloc(experts * EXPERT_MATRICES, sizeof *exponents);
    if (!checksums || !slices || !exponents)
        return error_set(ret_error, ENOMEM, "%s: no memory", file->name);
    struct unit_target target = {.plan = context->plan,
                                 .file = file,
                                 .outputs = outputs,
                                 .checksums = checksums,
                                 .slice_checksums = slices,
                                 .exponents = exponents,
                                 .stop = context->jobs.stop,
                                 .bytes_done = &context->watch->bytes_done};
    int status = jobs_run(&context->jobs, file->unit_count, run_unit, &target, ret_error);
    for (uint32_t s = 0; status == 0 && s < write_group(context->plan, file); s++)
        status = describe_file(&target, s, &ret_entries[s], ret_error);
    return status;
}

/* Opens a file for each of the group that is wanted; fd is -1 in the other outputs. */
static int create_files(const struct write_context *context, const struct plan_file *file, const bool *wanted,
                        struct output *ret_outputs, struct error *ret_error)
{
    int status = 0;
    uint32_t count = write_group(context->plan, file);
    for (uint32_t s = 0; s < count; s++)
        ret_outputs[s].fd = -1;
    for (uint32_t s = 0; status == 0 && s < count; s++) {
        if (!wanted || wanted[s])
            status = output_create(context->folders[s].fd, context->folders[s].path, file[s].name, file[s].bytes,
                                   &ret_outputs[s], ret_error);
    }
    return status;
}

uint32_t write_group(const struct plan *plan, const struct plan_file *file)
{
    return file->experts ? plan->options.stripes : 1;
}

int write_files(const struct write_context *context, const struct plan_file *file, json_t **ret_entries,
                struct error *ret_error)
{
    struct output outputs[EXPERT_SLICES];
    int status = create_files(context, file, NULL, outputs, ret_error);
    if (status == 0)
        status = fill_files(context, file, outputs, ret_entries, ret_error);
    if (status == 0)
        status = finish_files(context, file, outputs, ret_error);
    for (uint32_t s = 0; s < write_group(context->plan, file); s++)
        output_discard(&outputs[s]);
    return status;
}

int write_files_again(const struct write_context *context, const struct plan_file *file, const bool *wanted,
                      const json_t *manifest_files, struct error *ret_error)
{
    struct output outputs[EXPERT_SLICES];
    json_t *entries[EXPERT_SLICES] = {NULL};
    int status = create_files(context, file, wanted, outputs, ret_error);
    if (status == 0)
        status = fill_files(context, file, outputs, entries, ret_error);
    if (status == 0)
        status = check_entries(context, file, entries, manifest_files, ret_error);
    if (status == 0)
        status = finish_files(context, file, outputs, ret_error);
    for (uint32_t s = 0; s < write_group(context->plan, file); s++) {
        output_discard(&outputs[s]);
        json_decref(entries[s]);
    }
    return status;
}

/* A finished file being read again. */
struct verification {
    const struct plan_file *file;
    const json_t *tensors; /* of the entry */
    int fd;
    uint64_t *slices; /* [experts][8], from the file */
    atomic_bool differs;
};

static bool read_at(int fd, uint64_t offset, void *bytes, size_t count)
{
    for (size_t done = 0; done < count;) {
        ssize_t got = pread(fd, (char *)bytes + done, count - done, (off_t)(offset + done));
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return false;
        done += (size_t)got;
    }
    return true;
}

/* Hashes a stretch of the file. */
static int hash_at(int fd, uint64_t offset, uint64_t count, bool *ret_read, uint64_t *ret_hash, struct error *ret_error)
{
    _cleanup_free_ uint8_t *buffer = malloc(READ_BYTES);
    XXH3_state_t *hash = XXH3_createState();
    *ret_read = false;
    if (!buffer || !hash) {
        XXH3_freeState(hash);
        return error_set(ret_error, ENOMEM, "no memory to verify what an earlier run finished");
    }
    XXH3_64bits_reset(hash);
    uint64_t done = 0;
    while (done < count) {
        size_t bytes = count - done < READ_BYTES ? (size_t)(count - done) : READ_BYTES;
        if (!read_at(fd, offset + done, buffer, bytes))
            break;
        XXH3_64bits_update(hash, buffer, bytes);
        done += bytes;
    }
    *ret_read = done == count;
    *ret_hash = XXH3_64bits_digest(hash);
    XXH3_freeState(hash);
    return 0;
}

static int verify_tensor(void *context, size_t index, struct error *ret_error)
{
    struct verification *verification = context;
    const struct tensor *tensor = &verification->file->tensors[index];
    /* An expert is checked by the table, slice by slice; the table, like every tensor of a dense file, by the entry. */
    bool expert = verification->file->experts && tensor->dtype == DTYPE_U8 && tensor->dims == 2;
    uint32_t parts = expert ? verification->file->slices.count : 1;
    for (uint32_t p = 0; p < parts && !atomic_load(&verification->differs); p++) {
        uint64_t bytes = tensor->bytes / parts, hash = 0, expected = 0;
        bool readable, known = true;
        int status = hash_at(verification->fd, tensor->offset + p * bytes, bytes, &readable, &hash, ret_error);
        if (status < 0)
            return status;
        if (expert)
            expected = verification->slices[index * EXPERT_SLICES + verification->file->slices.first + p];
        else if (verification->file->experts && !strcmp(tensor->name, "padding"))
            expected = padding_checksum(tensor);
        else
            known = checksum_parse(json_object_get(verification->tensors, tensor->name), &expected) == 0;
        if (!readable || !known || hash != expected)
            atomic_store(&verification->differs, true);
    }
    return 0;
}

/* Length, header and entry: quick checks first. */
static bool looks_right(const struct plan_file *file, const json_t *entry, int fd)
{
    struct stat facts;
    uint64_t header;
    if (fd < 0 || fstat(fd, &facts) < 0 || (uint64_t)facts.st_size != file->bytes ||
        json_integer_value(json_object_get(entry, "bytes")) != (json_int_t)file->bytes ||
        checksum_parse(json_object_get(entry, "header"), &header) < 0 ||
        header != XXH3_64bits(file->header, file->header_bytes))
        return false;
    _cleanup_free_ char *stored = malloc(file->header_bytes);
    return stored && read_at(fd, 0, stored, file->header_bytes) && !memcmp(stored, file->header, file->header_bytes);
}

/* One file of a group; `slices` [experts][8] is the table in the first. */
static int verify_file(const struct write_context *context, const struct plan_file *file, const json_t *entry,
                       uint64_t *slices, bool *ret_good, struct error *ret_error)
{
    *ret_good = false;
    _cleanup_close_ int fd = openat(context->folders[file->stripe].fd, file->name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    if (!looks_right(file, entry, fd))
        return 0;
    if (file->experts && file->stripe == 0) {
        const struct tensor *table = find_tensor(file, TABLE_CHECKSUMS);
        if (!read_at(fd, table->offset, slices, table->bytes))
            return 0;
    }
    struct verification verification = {
        .file = file, .tensors = json_object_get(entry, "tensors"), .fd = fd, .slices = slices};
    int status = jobs_run(&context->jobs, file->tensor_count, verify_tensor, &verification, ret_error);
    *ret_good = status == 0 && !atomic_load(&verification.differs);
    return status;
}

int verify_files(const struct write_context *context, const struct plan_file *file, json_t *const *entries,
                 bool *ret_good, struct error *ret_error)
{
    size_t experts = context->plan->config.experts;
    _cleanup_free_ uint64_t *slices = calloc(experts * EXPERT_SLICES, sizeof *slices);
    if (!slices)
        return error_set(ret_error, ENOMEM, "%s: no memory to verify it", file->name);
    int status = 0;
    *ret_good = true;
    for (uint32_t s = 0; status == 0 && *ret_good && s < write_group(context->plan, file); s++)
        status = verify_file(context, &file[s], entries[s], slices, ret_good, ret_error);
    /* A link that an earlier run did not come to. */
    for (uint32_t s = 1; status == 0 && *ret_good && s < write_group(context->plan, file); s++)
        status = output_link(context->folders[0].fd, context->folders[0].path, file[s].name, context->folders[s].path,
                             ret_error);
    return status;
}
