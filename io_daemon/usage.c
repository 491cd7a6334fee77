#include "io_daemon/usage.h"

#include "io_daemon/usage_record.h"
#include "proto/cleanup.h"

#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdarg.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>

#define RECORD_USES_EACH 16u /* a record when every expert has been used so often, on average */
#define RECORDS_MOST 16u     /* of the largest kind, in a file; then it is written anew */
#define LOCK_TRIES 8         /* each lost to an instance that renamed a new file into place at that moment */

struct usage {
    struct usage_memory memory; /* all that the file says: the opener's until the first note, then the writer's */
    enum usage_verdict verdict; /* of what was read into it */
    bool loaded;                /* something was, so the file is not added to it once more */
    char path[PATH_MAX];
    int fd; /* -1: read only */
    uint64_t bytes;
    void (*log)(const char *line);
    char *buffer; /* room for a header and any record */

    uint32_t *noted; /* [experts] since the last record; the noting thread's */
    uint64_t noted_uses;

    pthread_t writer;
    bool writing; /* there is a writer */
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    /* under the mutex */
    uint32_t *handed; /* [experts] all 0 unless `full`, and then the writer's */
    bool full, stop;
};

__attribute__((format(printf, 2, 3))) static void say(const struct usage *usage, const char *format, ...)
{
    char line[PATH_MAX + 256];
    va_list args;
    va_start(args, format);
    vsnprintf(line, sizeof line, format, args);
    va_end(args);
    usage->log(line);
}

int usage_path(const char *rundir, uint64_t identity, char ret_path[PATH_MAX], struct error *ret_error)
{
    const char *state = getenv("XDG_STATE_HOME"), *home = getenv("HOME");
    int length;
    if (state && state[0] == '/') { /* a relative one is to be ignored, says the XDG specification */
        length = snprintf(ret_path, PATH_MAX, "%s/calypte/%016" PRIx64 ".usage", state, identity);
    } else if (home && home[0] == '/') {
        length = snprintf(ret_path, PATH_MAX, "%s/.local/state/calypte/%016" PRIx64 ".usage", home, identity);
    } else {
        size_t end = strlen(rundir);
        while (end > 1 && rundir[end - 1] == '/')
            end--;
        while (end > 0 && rundir[end - 1] != '/')
            end--;
        length = snprintf(ret_path, PATH_MAX, "%.*s%016" PRIx64 ".usage", (int)end, rundir, identity);
    }
    if (length >= PATH_MAX)
        return error_set(ret_error, ENAMETOOLONG, "%.100s...: too long for the path of the usage file", ret_path);
    return 0;
}

/* Makes the folders above the file. What fails here fails again, with its reason, when the file is opened. */
static void make_folders(const char *path)
{
    char folder[PATH_MAX];
    snprintf(folder, sizeof folder, "%s", path);
    for (char *slash = strchr(folder + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = 0;
        mkdir(folder, 0700);
        *slash = '/';
    }
}

/* --- the file --- */

static int write_all(int fd, const char *bytes, size_t size)
{
    while (size > 0) {
        ssize_t written = write(fd, bytes, size);
        if (written < 0 && errno == EINTR)
            continue;
        if (written <= 0)
            return written < 0 ? -errno : -EIO;
        bytes += written;
        size -= (size_t)written;
    }
    return 0;
}

static bool same_file(int fd, const char *path)
{
    struct stat opened, named;
    return fstat(fd, &opened) == 0 && lstat(path, &named) == 0 && opened.st_dev == named.st_dev &&
           opened.st_ino == named.st_ino;
}

/* Opens the file with its lock, made if need be. The descriptor, or -EBUSY: another instance writes it. */
static int open_locked(const char *path, int flags)
{
    for (int i = 0; i < LOCK_TRIES; i++) {
        _cleanup_close_ int fd = open(path, O_RDWR | O_APPEND | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | flags, 0600);
        struct stat stat;
        if (fd < 0 || fstat(fd, &stat) < 0)
            return -errno;
        if (!S_ISREG(stat.st_mode) || stat.st_uid != geteuid())
            return -EPERM;
        if (flock(fd, LOCK_EX | LOCK_NB) < 0)
            return errno == EWOULDBLOCK ? -EBUSY : -errno;
        if (same_file(fd, path))
            return take_fd(fd);
    }
    return -EBUSY;
}

/* Writes header and heat into a new file and renames it into place, with its lock taken before it has the name. */
static int write_anew(struct usage *usage)
{
    char path[PATH_MAX + 8];
    snprintf(path, sizeof path, "%s.new", usage->path);
    _cleanup_close_ int fd = open(path, O_RDWR | O_APPEND | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0 || flock(fd, LOCK_EX | LOCK_NB) < 0)
        return -errno;
    size_t bytes = usage_encode_header(&usage->memory, usage->buffer);
    bytes += usage_encode_heat(&usage->memory, usage->buffer + bytes);
    int status = write_all(fd, usage->buffer, bytes);
    if (status == 0 && (fdatasync(fd) < 0 || rename(path, usage->path) < 0))
        status = -errno;
    if (status < 0) {
        unlink(path);
        return status;
    }
    if (usage->fd >= 0)
        close(usage->fd);
    usage->fd = take_fd(fd);
    usage->bytes = bytes;
    return 0;
}

static uint64_t bytes_most(uint32_t experts)
{
    return USAGE_HEADER_BYTES + (uint64_t)RECORDS_MOST * usage_uses_bytes(experts);
}

/* Reads the file behind `fd` into the memory. */
static enum usage_verdict read_bytes(struct usage *usage, int fd, size_t *ret_whole)
{
    /* One record may stand beyond the bound, which is looked at before the next. */
    size_t most = bytes_most(usage->memory.experts) + usage_heat_bytes(usage->memory.experts) +
                  usage_uses_bytes(usage->memory.experts),
           size = 0;
    _cleanup_free_ char *bytes = malloc(most + 1);
    *ret_whole = 0;
    if (!bytes)
        return USAGE_DAMAGED;
    while (size <= most) {
        ssize_t got = pread(fd, bytes + size, most + 1 - size, (off_t)size);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return USAGE_DAMAGED;
        if (got == 0)
            break;
        size += (size_t)got;
    }
    return size > most ? USAGE_DAMAGED : usage_decode(&usage->memory, bytes, size, ret_whole);
}

static void read_file(struct usage *usage, int fd, size_t *ret_whole)
{
    usage->verdict = read_bytes(usage, fd, ret_whole);
    usage->loaded = true;
}

/* Reads what can be read of a file that is not written; `reason`: why, NULL: it was not to be. */
static void read_only(struct usage *usage, const char *reason)
{
    struct stat stat;
    size_t whole;
    _cleanup_close_ int fd = open(usage->path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    int code = fd < 0 || fstat(fd, &stat) < 0 ? errno : S_ISREG(stat.st_mode) ? 0 : EPERM;
    if (code && !usage->loaded) {
        if (code != ENOENT || reason)
            say(usage, "%s: %s: the use of the experts is not remembered", usage->path,
                reason ? reason : strerror(code));
        return;
    }
    if (!usage->loaded)
        read_file(usage, fd, &whole);
    bool damaged = usage->verdict == USAGE_DAMAGED || usage->verdict == USAGE_FOREIGN;
    if (damaged)
        say(usage, "%s: damaged, or of another model: read as far as it is right%s%s", usage->path,
            reason ? ", but not written: " : "", reason ? reason : "");
    else if (reason)
        say(usage, "%s: %s: the use of the experts is read, but not written", usage->path, reason);
}

static int open_for_writing(struct usage *usage)
{
    make_folders(usage->path);
    usage->fd = open_locked(usage->path, O_CREAT);
    if (usage->fd < 0)
        return usage->fd;
    size_t whole;
    read_file(usage, usage->fd, &whole);
    if (usage->verdict == USAGE_DAMAGED || usage->verdict == USAGE_FOREIGN) {
        char aside[PATH_MAX + 16];
        snprintf(aside, sizeof aside, "%s.damaged", usage->path);
        if (rename(usage->path, aside) < 0)
            return -errno;
        say(usage, "%s: %s: set aside as %s; what was readable is kept", usage->path,
            usage->verdict == USAGE_FOREIGN ? "the use of another model" : "damaged", aside);
        return write_anew(usage);
    }
    if (whole == 0) /* new, or not even its header was written */
        return write_anew(usage);
    if (ftruncate(usage->fd, (off_t)whole) < 0)
        return -errno;
    usage->bytes = whole;
    return 0;
}

/* --- the writer --- */

/* The file has lost its name: writes a new one, unless another instance did so in the meantime (-EBUSY). */
static int write_again(struct usage *usage)
{
    make_folders(usage->path);
    _cleanup_close_ int there = open_locked(usage->path, O_CREAT); /* until ours has the name */
    int status = there < 0 ? there : write_anew(usage);
    if (status == 0)
        say(usage, "%s: was removed or replaced while it was in use: written anew", usage->path);
    return status;
}

static int append(struct usage *usage, const uint32_t *uses)
{
    size_t bytes = usage_encode_uses(&usage->memory, uses, usage->buffer);
    usage_memory_add(&usage->memory, uses);
    if (!same_file(usage->fd, usage->path))
        return write_again(usage);
    if (usage->bytes + bytes > bytes_most(usage->memory.experts))
        return write_anew(usage);
    int status = write_all(usage->fd, usage->buffer, bytes);
    if (status == 0)
        usage->bytes += bytes;
    else if (ftruncate(usage->fd, (off_t)usage->bytes) < 0)
        return status; /* half a record stays: the next reader cuts it off */
    return status;
}

static void *write_records(void *argument)
{
    struct usage *usage = argument;
    bool failed = false;
    pthread_mutex_lock(&usage->mutex);
    while (true) {
        while (!usage->full && !usage->stop)
            pthread_cond_wait(&usage->changed, &usage->mutex);
        if (!usage->full)
            break;
        pthread_mutex_unlock(&usage->mutex);
        int status = failed ? 0 : append(usage, usage->handed);
        if (status < 0) {
            say(usage, "%s cannot be written: %s: the use of the experts is not remembered from here on", usage->path,
                status == -EBUSY ? "another instance of this model writes it" : strerror(-status));
            failed = true;
        }
        memset(usage->handed, 0, usage->memory.experts * sizeof *usage->handed);
        pthread_mutex_lock(&usage->mutex);
        usage->full = false;
        pthread_cond_signal(&usage->changed);
    }
    pthread_mutex_unlock(&usage->mutex);
    return NULL;
}

/* Hands the noted uses to the writer. Under the mutex, when the writer has none. */
static void hand_over(struct usage *usage)
{
    uint32_t *empty = usage->handed;
    usage->handed = usage->noted;
    usage->noted = empty;
    usage->noted_uses = 0;
    usage->full = true;
    pthread_cond_signal(&usage->changed);
}

void usage_note(struct usage *usage, uint32_t expert)
{
    if (!usage->writing || expert >= usage->memory.experts)
        return;
    usage->noted[expert]++;
    if (++usage->noted_uses < (uint64_t)RECORD_USES_EACH * usage->memory.experts)
        return;
    /* A writer that is not ready yet does not stop us: the next note tries again. */
    if (pthread_mutex_trylock(&usage->mutex) != 0)
        return;
    if (!usage->full)
        hand_over(usage);
    pthread_mutex_unlock(&usage->mutex);
}

/* --- opening and closing --- */

int usage_open(const struct usage_options *options, struct usage **ret_usage, struct error *ret_error)
{
    uint32_t experts = options->experts;
    struct usage *usage = calloc(1, sizeof *usage);
    if (!usage)
        return error_set(ret_error, ENOMEM, "use of %u experts: out of memory", experts);
    usage->fd = -1;
    usage->log = options->log;
    pthread_mutex_init(&usage->mutex, NULL);
    pthread_cond_init(&usage->changed, NULL);
    snprintf(usage->path, sizeof usage->path, "%s", options->path);
    usage->noted = calloc(experts, sizeof *usage->noted);
    usage->handed = calloc(experts, sizeof *usage->handed);
    usage->buffer = malloc(USAGE_HEADER_BYTES + usage_heat_bytes(experts) + usage_uses_bytes(experts));
    int status = usage_memory_open(options->identity, experts, &usage->memory, ret_error);
    if (status == 0 && (!usage->noted || !usage->handed || !usage->buffer))
        status = error_set(ret_error, ENOMEM, "use of %u experts: out of memory", experts);
    if (status < 0) {
        usage_close(usage);
        return status;
    }
    int opened = options->read_only ? -EROFS : open_for_writing(usage);
    if (opened == 0)
        usage->writing = pthread_create(&usage->writer, NULL, write_records, usage) == 0;
    else if (options->read_only)
        read_only(usage, NULL);
    else
        read_only(usage, opened == -EBUSY ? "another instance of this model writes it" : strerror(-opened));
    if (opened < 0) {
        close_fdp(&usage->fd);
        usage->fd = -1;
    }
    *ret_usage = usage;
    return 0;
}

void usage_close(struct usage *usage)
{
    if (!usage)
        return;
    if (usage->writing) {
        pthread_mutex_lock(&usage->mutex);
        while (usage->full)
            pthread_cond_wait(&usage->changed, &usage->mutex);
        if (usage->noted_uses > 0)
            hand_over(usage);
        usage->stop = true;
        pthread_cond_signal(&usage->changed);
        pthread_mutex_unlock(&usage->mutex);
        pthread_join(usage->writer, NULL);
    }
    pthread_cond_destroy(&usage->changed);
    pthread_mutex_destroy(&usage->mutex);
    usage_memory_close(&usage->memory);
    free(usage->noted);
    free(usage->handed);
    free(usage->buffer);
    close_fdp(&usage->fd);
    free(usage);
}

float usage_heat(const struct usage *usage, uint32_t expert)
{
    return expert < usage->memory.experts ? usage->memory.heat[expert] : 0;
}

static int by_heat(const void *left, const void *right, void *context)
{
    const float *heat = context;
    uint32_t a = *(const uint32_t *)left, b = *(const uint32_t *)right;
    if (heat[a] != heat[b])
        return heat[a] > heat[b] ? -1 : 1;
    return a < b ? -1 : a > b;
}

int usage_hottest(const struct usage *usage, uint32_t most, uint32_t *ret_experts)
{
    uint32_t count = 0;
    _cleanup_free_ uint32_t *experts = calloc(usage->memory.experts, sizeof *experts);
    if (!experts)
        return -ENOMEM;
    for (uint32_t e = 0; e < usage->memory.experts; e++) {
        if (usage->memory.heat[e] > 0)
            experts[count++] = e;
    }
    qsort_r(experts, count, sizeof *experts, by_heat, usage->memory.heat);
    count = count < most ? count : most;
    memcpy(ret_experts, experts, count * sizeof *experts);
    return (int)count;
}

int usage_forget(const char *path, struct error *ret_error)
{
    _cleanup_close_ int fd = open_locked(path, 0);
    if (fd == -ENOENT)
        return 0;
    if (fd == -EBUSY)
        return error_set(ret_error, EBUSY,
                         "%s: a running instance of this model writes it: stop that one (`calypte down`) first", path);
    if (fd < 0 || unlink(path) < 0)
        return error_set(ret_error, fd < 0 ? -fd : errno, "%s cannot be removed: %s", path,
                         strerror(fd < 0 ? -fd : errno));
    return 0;
}
