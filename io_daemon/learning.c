#include "io_daemon/learning.h"

#include "io_daemon/learning_record.h"
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

struct learning {
    struct learning_memory memory; /* all that the file says: the opener's until the first note, then the writer's */
    enum learning_verdict verdict; /* of what was read into it */
    bool loaded;                   /* something was, so the file is not added to it once more */
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

__attribute__((format(printf, 2, 3))) static void say(const struct learning *learning, const char *format, ...)
{
    char line[PATH_MAX + 256];
    va_list args;
    va_start(args, format);
    vsnprintf(line, sizeof line, format, args);
    va_end(args);
    learning->log(line);
}

int learning_path(const char *rundir, uint64_t identity, char ret_path[PATH_MAX], struct error *ret_error)
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
static int write_anew(struct learning *learning)
{
    char path[PATH_MAX + 8];
    snprintf(path, sizeof path, "%s.new", learning->path);
    _cleanup_close_ int fd = open(path, O_RDWR | O_APPEND | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0 || flock(fd, LOCK_EX | LOCK_NB) < 0)
        return -errno;
    size_t bytes = learning_encode_header(&learning->memory, learning->buffer);
    bytes += learning_encode_heat(&learning->memory, learning->buffer + bytes);
    int status = write_all(fd, learning->buffer, bytes);
    if (status == 0 && (fdatasync(fd) < 0 || rename(path, learning->path) < 0))
        status = -errno;
    if (status < 0) {
        unlink(path);
        return status;
    }
    if (learning->fd >= 0)
        close(learning->fd);
    learning->fd = take_fd(fd);
    learning->bytes = bytes;
    return 0;
}

static uint64_t bytes_most(uint32_t experts)
{
    return LEARNING_HEADER_BYTES + (uint64_t)RECORDS_MOST * learning_uses_bytes(experts);
}

/* Reads the file behind `fd` into the memory. */
static enum learning_verdict read_bytes(struct learning *learning, int fd, size_t *ret_whole)
{
    /* One record may stand beyond the bound, which is looked at before the next. */
    size_t most = bytes_most(learning->memory.experts) + learning_heat_bytes(learning->memory.experts) +
                  learning_uses_bytes(learning->memory.experts),
           size = 0;
    _cleanup_free_ char *bytes = malloc(most + 1);
    *ret_whole = 0;
    if (!bytes)
        return LEARNING_DAMAGED;
    while (size <= most) {
        ssize_t got = pread(fd, bytes + size, most + 1 - size, (off_t)size);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return LEARNING_DAMAGED;
        if (got == 0)
            break;
        size += (size_t)got;
    }
    return size > most ? LEARNING_DAMAGED : learning_decode(&learning->memory, bytes, size, ret_whole);
}

static void read_file(struct learning *learning, int fd, size_t *ret_whole)
{
    learning->verdict = read_bytes(learning, fd, ret_whole);
    learning->loaded = true;
}

/* Reads what can be read of a file that is not written; `reason`: why, NULL: it was not to be. */
static void read_only(struct learning *learning, const char *reason)
{
    struct stat stat;
    size_t whole;
    _cleanup_close_ int fd = open(learning->path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    int code = fd < 0 || fstat(fd, &stat) < 0 ? errno : S_ISREG(stat.st_mode) ? 0 : EPERM;
    if (code && !learning->loaded) {
        if (code != ENOENT || reason)
            say(learning, "%s: %s: the use of the experts is not remembered", learning->path,
                reason ? reason : strerror(code));
        return;
    }
    if (!learning->loaded)
        read_file(learning, fd, &whole);
    bool damaged = learning->verdict == LEARNING_DAMAGED || learning->verdict == LEARNING_FOREIGN;
    if (damaged)
        say(learning, "%s: damaged, or of another model: read as far as it is right%s%s", learning->path,
            reason ? ", but not written: " : "", reason ? reason : "");
    else if (reason)
        say(learning, "%s: %s: the use of the experts is read, but not written", learning->path, reason);
}

static int open_for_writing(struct learning *learning)
{
    make_folders(learning->path);
    learning->fd = open_locked(learning->path, O_CREAT);
    if (learning->fd < 0)
        return learning->fd;
    size_t whole;
    read_file(learning, learning->fd, &whole);
    if (learning->verdict == LEARNING_DAMAGED || learning->verdict == LEARNING_FOREIGN) {
        char aside[PATH_MAX + 16];
        snprintf(aside, sizeof aside, "%s.damaged", learning->path);
        if (rename(learning->path, aside) < 0)
            return -errno;
        say(learning, "%s: %s: set aside as %s; what was readable is kept", learning->path,
            learning->verdict == LEARNING_FOREIGN ? "the use of another model" : "damaged", aside);
        return write_anew(learning);
    }
    if (whole == 0) /* new, or not even its header was written */
        return write_anew(learning);
    if (ftruncate(learning->fd, (off_t)whole) < 0)
        return -errno;
    learning->bytes = whole;
    return 0;
}

/* --- the writer --- */

/* The file has lost its name: writes a new one, unless another instance did so in the meantime (-EBUSY). */
static int write_again(struct learning *learning)
{
    make_folders(learning->path);
    _cleanup_close_ int there = open_locked(learning->path, O_CREAT); /* until ours has the name */
    int status = there < 0 ? there : write_anew(learning);
    if (status == 0)
        say(learning, "%s: was removed or replaced while it was in use: written anew", learning->path);
    return status;
}

static int append(struct learning *learning, const uint32_t *uses)
{
    size_t bytes = learning_encode_uses(&learning->memory, uses, learning->buffer);
    learning_memory_add(&learning->memory, uses);
    if (!same_file(learning->fd, learning->path))
        return write_again(learning);
    if (learning->bytes + bytes > bytes_most(learning->memory.experts))
        return write_anew(learning);
    int status = write_all(learning->fd, learning->buffer, bytes);
    if (status == 0)
        learning->bytes += bytes;
    else if (ftruncate(learning->fd, (off_t)learning->bytes) < 0)
        return status; /* half a record stays: the next reader cuts it off */
    return status;
}

static void *write_records(void *argument)
{
    struct learning *learning = argument;
    bool failed = false;
    pthread_mutex_lock(&learning->mutex);
    while (true) {
        while (!learning->full && !learning->stop)
            pthread_cond_wait(&learning->changed, &learning->mutex);
        if (!learning->full)
            break;
        pthread_mutex_unlock(&learning->mutex);
        int status = failed ? 0 : append(learning, learning->handed);
        if (status < 0) {
            say(learning, "%s cannot be written: %s: the use of the experts is not remembered from here on",
                learning->path, status == -EBUSY ? "another instance of this model writes it" : strerror(-status));
            failed = true;
        }
        memset(learning->handed, 0, learning->memory.experts * sizeof *learning->handed);
        pthread_mutex_lock(&learning->mutex);
        learning->full = false;
        pthread_cond_signal(&learning->changed);
    }
    pthread_mutex_unlock(&learning->mutex);
    return NULL;
}

/* Hands the noted uses to the writer. Under the mutex, when the writer has none. */
static void hand_over(struct learning *learning)
{
    uint32_t *empty = learning->handed;
    learning->handed = learning->noted;
    learning->noted = empty;
    learning->noted_uses = 0;
    learning->full = true;
    pthread_cond_signal(&learning->changed);
}

void learning_note(struct learning *learning, uint32_t expert)
{
    if (!learning->writing || expert >= learning->memory.experts)
        return;
    learning->noted[expert]++;
    if (++learning->noted_uses < (uint64_t)RECORD_USES_EACH * learning->memory.experts)
        return;
    /* A writer that is not ready yet does not stop us: the next note tries again. */
    if (pthread_mutex_trylock(&learning->mutex) != 0)
        return;
    if (!learning->full)
        hand_over(learning);
    pthread_mutex_unlock(&learning->mutex);
}

/* --- opening and closing --- */

int learning_open(const struct learning_options *options, struct learning **ret_learning, struct error *ret_error)
{
    uint32_t experts = options->experts;
    struct learning *learning = calloc(1, sizeof *learning);
    if (!learning)
        return error_set(ret_error, ENOMEM, "use of %u experts: out of memory", experts);
    learning->fd = -1;
    learning->log = options->log;
    pthread_mutex_init(&learning->mutex, NULL);
    pthread_cond_init(&learning->changed, NULL);
    snprintf(learning->path, sizeof learning->path, "%s", options->path);
    learning->noted = calloc(experts, sizeof *learning->noted);
    learning->handed = calloc(experts, sizeof *learning->handed);
    learning->buffer = malloc(LEARNING_HEADER_BYTES + learning_heat_bytes(experts) + learning_uses_bytes(experts));
    int status = learning_memory_open(options->identity, experts, &learning->memory, ret_error);
    if (status == 0 && (!learning->noted || !learning->handed || !learning->buffer))
        status = error_set(ret_error, ENOMEM, "use of %u experts: out of memory", experts);
    if (status < 0) {
        learning_close(learning);
        return status;
    }
    int opened = options->read_only ? -EROFS : open_for_writing(learning);
    if (opened == 0)
        learning->writing = pthread_create(&learning->writer, NULL, write_records, learning) == 0;
    else if (options->read_only)
        read_only(learning, NULL);
    else
        read_only(learning, opened == -EBUSY ? "another instance of this model writes it" : strerror(-opened));
    if (opened < 0) {
        close_fdp(&learning->fd);
        learning->fd = -1;
    }
    *ret_learning = learning;
    return 0;
}

void learning_close(struct learning *learning)
{
    if (!learning)
        return;
    if (learning->writing) {
        pthread_mutex_lock(&learning->mutex);
        while (learning->full)
            pthread_cond_wait(&learning->changed, &learning->mutex);
        if (learning->noted_uses > 0)
            hand_over(learning);
        learning->stop = true;
        pthread_cond_signal(&learning->changed);
        pthread_mutex_unlock(&learning->mutex);
        pthread_join(learning->writer, NULL);
    }
    pthread_cond_destroy(&learning->changed);
    pthread_mutex_destroy(&learning->mutex);
    learning_memory_close(&learning->memory);
    free(learning->noted);
    free(learning->handed);
    free(learning->buffer);
    close_fdp(&learning->fd);
    free(learning);
}

float learning_heat(const struct learning *learning, uint32_t expert)
{
    return expert < learning->memory.experts ? learning->memory.heat[expert] : 0;
}

static int by_heat(const void *left, const void *right, void *context)
{
    const float *heat = context;
    uint32_t a = *(const uint32_t *)left, b = *(const uint32_t *)right;
    if (heat[a] != heat[b])
        return heat[a] > heat[b] ? -1 : 1;
    return a < b ? -1 : a > b;
}

int learning_hottest(const struct learning *learning, uint32_t most, uint32_t *ret_experts)
{
    uint32_t count = 0;
    _cleanup_free_ uint32_t *experts = calloc(learning->memory.experts, sizeof *experts);
    if (!experts)
        return -ENOMEM;
    for (uint32_t e = 0; e < learning->memory.experts; e++) {
        if (learning->memory.heat[e] > 0)
            experts[count++] = e;
    }
    qsort_r(experts, count, sizeof *experts, by_heat, learning->memory.heat);
    count = count < most ? count : most;
    memcpy(ret_experts, experts, count * sizeof *experts);
    return (int)count;
}

int learning_forget(const char *path, struct error *ret_error)
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
