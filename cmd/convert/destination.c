#include "cmd/convert/destination.h"

#include "cmd/convert/report.h"
#include "proto/bytes_text.h"
#include "proto/cleanup.h"
#include "proto/container.h"

#include <dirent.h>
#include <fcntl.h>
#include <libgen.h>
#include <limits.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>

/* The source is never written to, so the destination must not lie in it. Asked before the destination is made: then
 * its parent counts. */
static int check_outside(const char *source, const char *destination, struct error *ret_error)
{
    _cleanup_free_ char *from = realpath(source, NULL), *to = realpath(destination, NULL), *copy = strdup(destination);
    if (!to && copy)
        to = realpath(dirname(copy), NULL);
    size_t length = from ? strlen(from) : 0;
    if (from && to && !strncmp(from, to, length) && (to[length] == '/' || to[length] == '\0'))
        return error_set(ret_error, EINVAL,
                         "%s: lies in the checkpoint's folder, which is never written to: choose another folder",
                         destination);
    return 0;
}

static int open_folder(const struct checkpoint *source, const char *path, int *ret_fd, bool *ret_created,
                       struct error *ret_error)
{
    int status = source->synthetic ? 0 : check_outside(source->path, path, ret_error);
    if (status < 0)
        return status;
    if (mkdir(path, 0755) == 0)
        *ret_created = true;
    else if (errno != EEXIST)
        return error_set(ret_error, errno, "%s: cannot create this folder: %s; %s", path, strerror(errno),
                         errno == ENOENT ? "create the folder that it shall stand in"
                                         : "choose a folder that can be written to");
    *ret_fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (*ret_fd < 0)
        return error_set(ret_error, errno, "%s: %s%s", path, strerror(errno),
                         errno == ENOTDIR ? "; name a new or an empty folder" : "");
    /* Some network file systems refuse locks; there a second conversion is the user's own doing. */
    if (flock(*ret_fd, LOCK_EX | LOCK_NB) < 0 && errno == EWOULDBLOCK)
        return error_set(ret_error, EWOULDBLOCK,
                         "%s: another conversion is writing there, or this one twice: wait for it or choose another "
                         "folder",
                         path);
    return 0;
}

int destination_open(const struct plan *plan, const char *const *paths, struct destination *ret_destination,
                     struct error *ret_error)
{
    int status = 0;
    *ret_destination = (struct destination){.own = {true}};
    for (uint32_t i = 0; status == 0 && i < plan->options.stripes; i++) {
        struct write_folder *folder = &ret_destination->folders[i];
        *folder = (struct write_folder){.path = paths[i], .fd = -1};
        ret_destination->count++;
        status = open_folder(plan->checkpoint, paths[i], &folder->fd, &ret_destination->created[i], ret_error);
    }
    return status;
}

void destination_close(struct destination *destination)
{
    for (uint32_t i = 0; i < destination->count; i++) {
        if (destination->created[i])
            rmdir(destination->folders[i].path); /* where anything stands in it, it stays */
        close_fdp(&destination->folders[i].fd);
    }
    destination->count = 0;
}

bool destination_has(const struct write_folder *folder, const char *name)
{
    struct stat facts;
    return fstatat(folder->fd, name, &facts, AT_SYMLINK_NOFOLLOW) == 0;
}

int destination_check_empty(const struct write_folder *folder, bool journal, struct error *ret_error)
{
    _cleanup_close_ int fd = openat(folder->fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *names = fd < 0 ? NULL : fdopendir(fd);
    if (!names)
        return error_set(ret_error, errno, "%s: %s", folder->path, strerror(errno));
    (void)take_fd(fd); /* it is the stream's now */
    const struct dirent *entry;
    char found[NAME_MAX + 1] = "";
    while ((entry = readdir(names)) && !found[0]) {
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0 &&
            !(journal && !strcmp(entry->d_name, CONTAINER_JOURNAL)))
            snprintf(found, sizeof found, "%s", entry->d_name);
    }
    closedir(names);
    if (!found[0])
        return 0;
    if (destination_has(folder, "dense-00001.safetensors"))
        return error_set(
            ret_error, ENOTEMPTY,
            "%s: holds a container's files, but no %s that says which: fetch this file again, or remove the "
            "folder and convert again",
            folder->path, CONTAINER_MANIFEST);
    return error_set(ret_error, ENOTEMPTY,
                     "%s: holds %s, but neither a container nor an unfinished one: name a new or an empty folder",
                     folder->path, found);
}

int destination_check_space(const struct write_folder *folder, uint64_t needed, struct error *ret_error)
{
    struct statvfs facts;
    if (fstatvfs(folder->fd, &facts) < 0)
        return error_set(ret_error, errno, "%s: %s", folder->path, strerror(errno));
    if (facts.f_flag & ST_RDONLY)
        return error_set(ret_error, EROFS, "%s: %s; choose a folder that can be written to", folder->path,
                         strerror(EROFS));
    uint64_t available = (uint64_t)facts.f_bavail * facts.f_frsize;
    if (needed <= available)
        return 0;
    return error_set(ret_error, ENOSPC,
                     "%s: needs %s more, its file system has %s free: free %s or choose another folder", folder->path,
                     bytes_text(needed).text, bytes_text(available).text, bytes_text(needed - available).text);
}

void destination_note_shared(const struct destination *destination, struct convert_watch *watch)
{
    struct stat facts[EXPERT_SLICES] = {0};
    for (uint32_t i = 0; i < destination->count; i++) {
        if (fstat(destination->folders[i].fd, &facts[i]) < 0)
            return;
        for (uint32_t k = 0; k < i; k++) {
            if (facts[k].st_dev != facts[i].st_dev)
                continue;
            char line[1024];
            snprintf(line, sizeof line, "%.400s and %.400s are on the same drive: striping gains nothing",
                     destination->folders[k].path, destination->folders[i].path);
            watch->note(watch, line);
            return;
        }
    }
}

void destination_remove_leftovers(const struct destination *destination, const struct plan *plan, bool journal)
{
    int fd = destination->folders[0].fd;
    for (size_t i = 0; i < plan->file_count; i++) {
        output_remove_leftover(fd, plan->files[i].name);
        if (destination->own[plan->files[i].stripe])
            output_remove_leftover(destination->folders[plan->files[i].stripe].fd, plan->files[i].name);
    }
    for (size_t i = 0; convert_copied[i]; i++)
        output_remove_leftover(fd, convert_copied[i]);
    output_remove_leftover(fd, CONTAINER_MANIFEST);
    if (journal)
        unlinkat(fd, CONTAINER_JOURNAL, 0);
}
