#include "cmd/convert/mend.h"

#include "proto/cleanup.h"
#include "proto/container.h"

#include <fcntl.h>
#include <libgen.h>
#include <limits.h>
#include <string.h>
#include <sys/stat.h>

struct finding {
    const struct plan *plan;
    const struct write_folder *folder;
    bool *bad;
    size_t count;
    struct error *foreign;
};

static void mark(void *context, const char *name, int status, const struct error *why)
{
    struct finding *finding = context;
    size_t i = 0;
    while (i < finding->plan->file_count && strcmp(finding->plan->files[i].name, name) != 0)
        i++;
    bool away = status == -ENOENT && destination_has(finding->folder, name); /* a link */
    if (i < finding->plan->file_count && !away && (status == -ENOENT || status == -EINVAL)) {
        finding->bad[i] = true;
        finding->count++;
    } else if (!finding->foreign->text[0]) {
        error_write(finding->foreign, "%.900s%s", why->text, status == -EIO ? "; remove it to have it made anew" : "");
    }
}

int mend_find(const struct plan *plan, const struct write_folder *folder, bool *ret_bad, size_t *ret_count,
              json_t **ret_manifest, struct error *ret_foreign, struct error *ret_error)
{
    ret_foreign->text[0] = '\0';
    struct finding finding = {.plan = plan, .folder = folder, .bad = ret_bad, .foreign = ret_foreign};
    struct container *container = NULL;
    int status = container_inspect(folder->path, mark, &finding, &container, ret_error);
    if (status < 0)
        return status;
    container_close(container);
    _cleanup_free_ char *path = NULL;
    if (asprintf(&path, "%s/%s", folder->path, CONTAINER_MANIFEST) < 0) {
        path = NULL;
        return error_set(ret_error, ENOMEM, "%s: no memory", folder->path);
    }
    *ret_count = finding.count;
    return container_read_json(path, CONTAINER_MANIFEST_MAX, ret_manifest, ret_error);
}

/* Does one of the container's links lead into the folder of its stripe? */
static bool is_linked(const struct plan *plan, const struct destination *destination, uint32_t stripe)
{
    struct stat folder, target;
    if (fstat(destination->folders[stripe].fd, &folder) < 0)
        return false;
    for (size_t i = 0; i < plan->file_count; i++) {
        char link[PATH_MAX];
        ssize_t length = plan->files[i].stripe == stripe
                             ? readlinkat(destination->folders[0].fd, plan->files[i].name, link, sizeof link - 1)
                             : -1;
        if (length <= 0)
            continue;
        link[length] = '\0';
        if (fstatat(destination->folders[0].fd, dirname(link), &target, 0) == 0 && target.st_dev == folder.st_dev &&
            target.st_ino == folder.st_ino)
            return true;
    }
    return false;
}

/* What a stripe's folder holds is the container's own where its links lead there; else it must be empty. */
static int own_folder(const struct plan *plan, struct destination *destination, uint32_t stripe,
                      struct error *ret_error)
{
    const struct write_folder *folder = &destination->folders[stripe];
    int status = destination->own[stripe] || is_linked(plan, destination, stripe)
                     ? 0
                     : destination_check_empty(folder, false, ret_error);
    if (status == -ENOTEMPTY)
        return error_set(ret_error, ENOTEMPTY,
                         "%s: holds something, and no link experts-%u-* in %s leads there: give as stripe %u the "
                         "folder that they lead "
                         "to, or an empty one",
                         folder->path, stripe, destination->folders[0].path, stripe);
    destination->own[stripe] = status == 0;
    return status;
}

static int check_folders(const struct plan *plan, struct destination *destination, const bool *bad,
                         struct error *ret_error)
{
    uint64_t needed[EXPERT_SLICES] = {0};
    for (size_t i = 0; i < plan->file_count; i++)
        needed[plan->files[i].stripe] += bad[i] ? plan->files[i].bytes : 0;
    int status = 0;
    for (uint32_t s = 0; status == 0 && s < destination->count; s++) {
        if (needed[s])
            status = own_folder(plan, destination, s, ret_error);
        if (status == 0 && needed[s])
            status = destination_check_space(&destination->folders[s], needed[s], ret_error);
    }
    return status;
}

static bool any(const bool *flags, size_t count)
{
    return memchr(flags, true, count * sizeof *flags) != NULL;
}

/* Every expert of a layer is converted, also where one stripe alone is written. */
static uint64_t work_bytes(const struct plan *plan, const bool *bad)
{
    uint64_t bytes = 0;
    for (size_t i = 0, group; i < plan->file_count; i += group) {
        group = write_group(plan, &plan->files[i]);
        for (size_t k = i; any(bad + i, group) && k < i + group; k++)
            bytes += plan->files[k].bytes;
    }
    return bytes;
}

int mend_files(const struct write_context *context, struct destination *destination, const bool *bad, size_t count,
               const json_t *manifest, struct error *ret_error)
{
    if (!count)
        return 0;
    const struct plan *plan = context->plan;
    int status = check_folders(plan, destination, bad, ret_error);
    atomic_store(&context->watch->bytes_total, work_bytes(plan, bad));
    for (size_t i = 0; status == 0 && i < plan->file_count; i++) {
        char line[160];
        snprintf(line, sizeof line, "%s: missing or damaged, made anew", plan->files[i].name);
        if (bad[i])
            context->watch->note(context->watch, line);
    }
    for (size_t i = 0, group; status == 0 && i < plan->file_count; i += group) {
        group = write_group(plan, &plan->files[i]);
        if (any(bad + i, group))
            status =
                write_files_again(context, &plan->files[i], bad + i, json_object_get(manifest, "files"), ret_error);
    }
    return status;
}

int mend_copied(const struct write_context *context, size_t *ret_count, struct error *ret_error)
{
    const struct write_folder *folder = &context->folders[0];
    *ret_count = 0;
    for (size_t i = 0; !context->plan->checkpoint->synthetic && convert_copied[i]; i++) {
        if (destination_has(folder, convert_copied[i]))
            continue;
        int status =
            output_copy(folder->fd, folder->path, convert_copied[i], context->plan->checkpoint->path, ret_error);
        if (status == -ENOENT)
            continue;
        if (status < 0)
            return status;
        (*ret_count)++;
        char line[160];
        snprintf(line, sizeof line, "%s: missing, copied again", convert_copied[i]);
        context->watch->note(context->watch, line);
    }
    return 0;
}
