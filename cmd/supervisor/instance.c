#include "cmd/supervisor/instance.h"

#include "cmd/supervisor/orphans.h"
#include "proto/cleanup.h"

#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>

#define LOCK_FILE "supervisor.lock"

static void close_dirp(DIR **directory)
{
    if (*directory)
        closedir(*directory);
}

int instance_root(char ret_root[INSTANCE_FOLDER_MAX], struct error *ret_error)
{
    const char *own = getenv("CALYPTE_RUNTIME_DIR"), *user = getenv("XDG_RUNTIME_DIR");
    int length;
    if (own && *own)
        length = snprintf(ret_root, INSTANCE_FOLDER_MAX, "%s", own);
    else if (user && *user)
        length = snprintf(ret_root, INSTANCE_FOLDER_MAX, "%s/calypte", user);
    else if (geteuid() == 0)
        length = snprintf(ret_root, INSTANCE_FOLDER_MAX, "/run/calypte");
    else
        length = snprintf(ret_root, INSTANCE_FOLDER_MAX, "/tmp/calypte-%u", geteuid());
    if (ret_root[0] != '/')
        return error_set(ret_error, EINVAL, "runtime folder %s is not an absolute path: set CALYPTE_RUNTIME_DIR to one",
                         ret_root);
    if (length >= (int)INSTANCE_FOLDER_MAX)
        return error_set(ret_error, ENAMETOOLONG,
                         "runtime folder is %d bytes long, a socket's address has room for %u: set "
                         "CALYPTE_RUNTIME_DIR to a shorter path",
                         length, INSTANCE_FOLDER_MAX - 1);
    return 0;
}

int instance_find(const char *name, struct instance *ret_instance, struct error *ret_error)
{
    char root[INSTANCE_FOLDER_MAX];
    *ret_instance = (struct instance){.lock_fd = -1};
    int status = segment_check_instance(name, ret_error);
    if (!status)
        status = instance_root(root, ret_error);
    if (status)
        return status;
    snprintf(ret_instance->name, sizeof ret_instance->name, "%s", name);
    int length = snprintf(ret_instance->folder, sizeof ret_instance->folder, "%s/%s", root, name);
    if (length >= (int)sizeof ret_instance->folder)
        return error_set(ret_error, ENAMETOOLONG,
                         "the folder of instance %s would be %d bytes long, a socket's address has room for %zu: "
                         "take a shorter name, or set CALYPTE_RUNTIME_DIR to a shorter path",
                         name, length, sizeof ret_instance->folder - 1);
    return 0;
}

void instance_path(const struct instance *instance, const char *file, char ret_path[108])
{
    snprintf(ret_path, 108, "%s/%s", instance->folder, file);
}

int instance_alive(const struct instance *instance)
{
    char path[108];
    instance_path(instance, LOCK_FILE, path);
    _cleanup_close_ int fd =
        open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK); /* somebody's FIFO does not hold us */
    return fd >= 0 && flock(fd, LOCK_SH | LOCK_NB) < 0 && errno == EWOULDBLOCK;
}

/* mkdir -p with mode 0700 for what is missing. */
static int make_folders(const char *folder, struct error *ret_error)
{
    char path[INSTANCE_FOLDER_MAX];
    snprintf(path, sizeof path, "%s", folder);
    for (char *slash = path + 1;; slash++) {
        slash += strcspn(slash, "/");
        char kept = *slash;
        *slash = '\0';
        if (mkdir(path, 0700) < 0 && errno != EEXIST)
            return error_set(ret_error, errno,
                             "cannot make folder %s: %s (set CALYPTE_RUNTIME_DIR to a folder of yours)", path,
                             strerror(errno));
        if (!kept)
            return 0;
        *slash = kept;
    }
}

/* In a folder that others may write to, somebody else could have put a folder or a link of that name. */
static int check_folder(const char *folder, struct error *ret_error)
{
    struct stat facts;
    if (lstat(folder, &facts) < 0)
        return error_set(ret_error, errno, "cannot look at folder %s: %s", folder, strerror(errno));
    if (!S_ISDIR(facts.st_mode))
        return error_set(ret_error, EPERM, "%s is not a folder: remove it", folder);
    if (facts.st_uid != geteuid())
        return error_set(ret_error, EPERM,
                         "folder %s belongs to user %u, not to %u: remove it, or set CALYPTE_RUNTIME_DIR", folder,
                         facts.st_uid, geteuid());
    if (facts.st_mode & 077)
        return error_set(ret_error, EPERM, "folder %s is open to other users (mode %03o): chmod 700 it", folder,
                         facts.st_mode & 0777);
    return 0;
}

/* Takes the lock once: 0, -EBUSY, -EAGAIN when the file was removed in between (its last owner was leaving). */
static int lock_once(struct instance *instance, struct error *ret_error)
{
    char path[108];
    struct stat ours, there;
    instance_path(instance, LOCK_FILE, path);
    _cleanup_close_ int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0)
        return errno == ENOENT ? -EAGAIN : error_set(ret_error, errno, "cannot open %s: %s", path, strerror(errno));
    if (flock(fd, LOCK_EX | LOCK_NB) < 0)
        return errno == EWOULDBLOCK ? -EBUSY : error_set(ret_error, errno, "cannot lock %s: %s", path, strerror(errno));
    if (fstat(fd, &ours) < 0 || stat(path, &there) < 0 || ours.st_ino != there.st_ino || ours.st_dev != there.st_dev)
        return -EAGAIN;
    instance->lock_fd = take_fd(fd);
    return 0;
}

int instance_take(const char *name, struct instance *ret_instance, struct error *ret_error)
{
    int status = instance_find(name, ret_instance, ret_error);
    if (status)
        return status;
    /* Somebody who only asks whether the instance lives (instance_alive) holds the lock for a moment: hence a few
     * attempts. */
    for (int attempt = 0; attempt < 10; attempt++) {
        status = make_folders(ret_instance->folder, ret_error);
        if (!status)
            status = check_folder(ret_instance->folder, ret_error);
        if (status)
            return status;
        status = lock_once(ret_instance, ret_error);
        if (status != -EBUSY && status != -EAGAIN)
            return status;
        nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
    }
    return error_set(ret_error, EBUSY,
                     "instance %s is running already: stop it with `calypte down -n %s`, or give this one another "
                     "name with -n",
                     name, name);
}

/* Removes the files of the folder; logs and the lock file stay unless `everything`. */
static void remove_files(const struct instance *instance, bool everything)
{
    _cleanup_(close_dirp) DIR *directory = opendir(instance->folder);
    struct dirent *entry;
    while (directory && (entry = readdir(directory))) {
        size_t length = strlen(entry->d_name);
        bool kept = !strcmp(entry->d_name, LOCK_FILE) ||
                    (!everything && length > 4 && !strcmp(entry->d_name + length - 4, ".log"));
        if (strcmp(entry->d_name, ".") && strcmp(entry->d_name, "..") && !kept)
            unlinkat(dirfd(directory), entry->d_name, 0);
    }
}

int instance_clean(const struct instance *instance, struct error *ret_error)
{
    int status = orphans_end(instance->name, instance->folder, ret_error);
    if (status)
        return status;
    int removed = segment_unlink_all(instance->name);
    if (removed < 0)
        return error_set(ret_error, -removed, "cannot remove the shared memory /dev/shm/calypte.%s.*: %s",
                         instance->name, strerror(-removed));
    remove_files(instance, false);
    return 0;
}

void instance_release(struct instance *instance, bool remove)
{
    char path[108];
    if (instance->lock_fd < 0)
        return;
    if (remove) {
        remove_files(instance, true);
        instance_path(instance, LOCK_FILE, path);
        unlink(path);
        rmdir(instance->folder);
    }
    close(instance->lock_fd);
    instance->lock_fd = -1;
}

static int sweep_one(const struct instance *found, void *prefix)
{
    struct instance instance;
    struct error ignored;
    if (strncmp(found->name, prefix, strlen(prefix)) || instance_alive(found) ||
        instance_take(found->name, &instance, &ignored))
        return 0;
    int status = instance_clean(&instance, &ignored);
    instance_release(&instance, !status);
    return 0;
}

int instance_sweep(const char *prefix, struct error *ret_error)
{
    char own[INSTANCE_NAME_MAX];
    snprintf(own, sizeof own, "%s", prefix);
    return instance_each(sweep_one, own, ret_error);
}

struct names {
    char text[512];
    size_t length;
};

static int name_running(const struct instance *instance, void *context)
{
    struct names *names = context;
    size_t room = sizeof names->text - names->length;
    if (!instance_alive(instance))
        return 0;
    int length = snprintf(names->text + names->length, room, "%s%s", names->length ? ", " : "", instance->name);
    names->length += (size_t)length < room ? (size_t)length : room - 1;
    return 0;
}

int instance_missing(const struct instance *instance, struct error *ret_error)
{
    char log[108];
    instance_path(instance, "supervisor.log", log);
    if (!access(log, F_OK) && !instance_alive(instance))
        return error_set(ret_error, ENOENT,
                         "instance %s has ended without `calypte down`: %s says why; `calypte down -n %s` "
                         "gives back what it left, `calypte up` starts it anew",
                         instance->name, log, instance->name);
    struct names names = {.length = 0};
    struct error ignored;
    instance_each(name_running, &names, &ignored); /* a folder that cannot be read has none that could be reached */
    if (!names.length)
        return error_set(ret_error, ENOENT,
                         "no instance %s is running: start it with `calypte up MODEL -n %s` (there is none in %s)",
                         instance->name, instance->name, instance->folder);
    return error_set(ret_error, ENOENT,
                     "no instance %s is running (running: %s): name one with -n, or start it with `calypte up MODEL "
                     "-n %s`",
                     instance->name, names.text, instance->name);
}

int instance_each(int (*visit)(const struct instance *instance, void *context), void *context, struct error *ret_error)
{
    char root[INSTANCE_FOLDER_MAX];
    int status = instance_root(root, ret_error);
    if (status)
        return status;
    _cleanup_(close_dirp) DIR *directory = opendir(root);
    if (!directory)
        return errno == ENOENT ? 0 : error_set(ret_error, errno, "cannot read folder %s: %s", root, strerror(errno));
    struct dirent *entry;
    while (!status && (entry = readdir(directory))) {
        struct instance instance;
        char path[108];
        if (instance_find(entry->d_name, &instance, NULL))
            continue;
        instance_path(&instance, LOCK_FILE, path);
        if (!access(path, F_OK))
            status = visit(&instance, context);
    }
    return status;
}
