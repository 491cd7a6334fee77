#include "io_daemon/learning.h"

#include "io_daemon/learning_record.h"
#include "proto/cleanup.h"
#include "shm/control.h"

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
    _Atomic uint32_t *done, *refused; /* the options' */
    char *buffer;                     /* room for a header and any record */

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

/* Tells what is done from now on, and why not more. */
static void tell(const struct learning *learning, enum learning_choice done, int refused)
{
    if (!learning->done)
        return;
    atomic_store(learning->refused, (uint32_t)refused);
    atomic_store(learning->done, (uint32_t)done);
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

/* Opens a regular file. The descriptor, or a negative errno and the line. */
static int open_regular(const char *path, int flags, struct error *ret_error)
{
    struct stat stat;
    _cleanup_close_ int fd = open(path, flags | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600);
    int code = fd < 0 ? errno : 0, known = fd < 0 ? lstat(path, &stat) : fstat(fd, &stat);
    if (known == 0 && !S_ISREG(stat.st_mode))
        return error_set(ret_error, EINVAL, "%s is not a regular file", path);
    return code ? error_set(ret_error, code, "%s: %s", path, strerror(code)) : take_fd(fd);
}

/* Opens a file with its lock, made if need be. The descriptor, or a negative errno and the line; -EBUSY: another
 * instance writes it. */
static int open_locked(const char *path, int flags, struct error *ret_error)
{
    for (int i = 0; i < LOCK_TRIES; i++) {
        struct stat stat;
        _cleanup_close_ int fd = open_regular(path, O_RDWR | O_APPEND | flags, ret_error);
        if (fd < 0)
            return fd;
        if (fstat(fd, &stat) < 0 || stat.st_uid != geteuid())
            return error_set(ret_error, EPERM, "%s belongs to another user", path);
        int code = flock(fd, LOCK_EX | LOCK_NB) < 0 ? errno : 0;
        if (code == EWOULDBLOCK)
            break;
        if (code)
            return error_set(ret_error, code, "%s cannot be locked: %s", path, strerror(code));
        if (same_file(fd, path))
            return take_fd(fd);
    }
    return error_set(ret_error, EBUSY, "%s: another instance of this model writes it", path);
}

/* Gives the new file its name, and before that the old one the name `aside` as well (NULL: none): at no moment is there
 * none. */
static int put_in_place(const char *path, const char *new_path, const char *aside, struct error *ret_error)
{
    if (aside && ((unlink(aside) < 0 && errno != ENOENT) || link(path, aside) < 0))
        return error_set(ret_error, errno, "%s cannot be set aside as %s: %s", path, aside, strerror(errno));
    if (rename(new_path, path) == 0)
        return 0;
    int status = error_set(ret_error, errno, "%s cannot be renamed to %s: %s", new_path, path, strerror(errno));
    if (aside)
        unlink(aside);
    return status;
}

/* Writes header and heat into a new file and renames it into place, with its lock taken before it has the name. What
 * has the name stays until the new file is on the drive; `aside`: and then gets this name, NULL: is gone. */
static int write_anew(struct learning *learning, const char *aside, struct error *ret_error)
{
    char path[PATH_MAX + 8];
    snprintf(path, sizeof path, "%s.new", learning->path);
    _cleanup_close_ int fd = open_locked(path, O_CREAT, ret_error);
    if (fd < 0)
        return fd;
    size_t bytes = learning_encode_header(&learning->memory, learning->buffer);
    bytes += learning_encode_heat(&learning->memory, learning->buffer + bytes);
    int status = ftruncate(fd, 0) < 0 ? -errno : write_all(fd, learning->buffer, bytes);
    if (status == 0 && fdatasync(fd) < 0)
        status = -errno;
    if (status < 0)
        error_set(ret_error, -status, "%s cannot be written: %s", path, strerror(-status));
    else
        status = put_in_place(learning->path, path, aside, ret_error);
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

/* Reads what can be read of a file that is not written, for a `reason` with its errno `refused` (NULL, 0: it was not to
 * be). */
static void read_only(struct learning *learning, const char *reason, int refused)
{
    size_t whole;
    struct error error;
    _cleanup_close_ int fd = learning->loaded ? -1 : open_regular(learning->path, O_RDONLY, &error);
    if (fd < 0 && !learning->loaded) {
        bool none = fd == -ENOENT && !reason;
        tell(learning, none ? LEARNING_READ : LEARNING_OFF, reason ? refused : none ? 0 : -fd);
        if (!none)
            say(learning, "%s: the use of the experts is not remembered", reason ? reason : error.text);
        return;
    }
    if (!learning->loaded)
        read_file(learning, fd, &whole);
    tell(learning, LEARNING_READ, refused);
    bool damaged = learning->verdict == LEARNING_DAMAGED || learning->verdict == LEARNING_FOREIGN;
    if (damaged)
        say(learning, "%s: damaged, or of another model: read as far as it is right%s%s", learning->path,
            reason ? ", but not written: " : "", reason ? reason : "");
    else if (reason)
        say(learning, "%s: the use of the experts is read, but not written", reason);
}

static int open_for_writing(struct learning *learning, struct error *ret_error)
{
    make_folders(learning->path);
    learning->fd = open_locked(learning->path, O_CREAT, ret_error);
    if (learning->fd < 0)
        return learning->fd;
    size_t whole;
    read_file(learning, learning->fd, &whole);
    if (learning->verdict == LEARNING_DAMAGED || learning->verdict == LEARNING_FOREIGN) {
        char aside[PATH_MAX + 16];
        snprintf(aside, sizeof aside, "%s.damaged", learning->path);
        int status = write_anew(learning, aside, ret_error);
        if (status == 0)
            say(learning, "%s: %s: set aside as %s; what was readable is kept", learning->path,
                learning->verdict == LEARNING_FOREIGN ? "the use of another model" : "damaged", aside);
        return status;
    }
    if (whole == 0) /* new, or not even its header was written */
        return write_anew(learning, NULL, ret_error);
    if (ftruncate(learning->fd, (off_t)whole) < 0)
        return error_set(ret_error, errno, "%s cannot be cut back to what is whole: %s", learning->path,
                         strerror(errno));
    learning->bytes = whole;
    return 0;
}

/* --- the writer --- */

/* The file has lost its name: writes a new one, unless another instance did so in the meantime (-EBUSY). */
static int write_again(struct learning *learning, struct error *ret_error)
{
    make_folders(learning->path);
    _cleanup_close_ int there = open_locked(learning->path, O_CREAT, ret_error); /* until ours has the name */
    int status = there < 0 ? there : write_anew(learning, NULL, ret_error);
    if (status == 0)
        say(learning, "%s: was removed or replaced while it was in use: written anew", learning->path);
    return status;
}

static int append(struct learning *learning, const uint32_t *uses, struct error *ret_error)
{
    size_t bytes = learning_encode_uses(&learning->memory, uses, learning->buffer);
    learning_memory_add(&learning->memory, uses);
    if (!same_file(learning->fd, learning->path))
        return write_again(learning, ret_error);
    if (learning->bytes + bytes > bytes_most(learning->memory.experts))
        return write_anew(learning, NULL, ret_error);
    int status = write_all(learning->fd, learning->buffer, bytes);
    if (status == 0) {
        learning->bytes += bytes;
        return 0;
    }
    (void)!ftruncate(learning->fd, (off_t)learning->bytes); /* else half a record stays: the next reader cuts it off */
    return error_set(ret_error, -status, "%s cannot be written: %s", learning->path, strerror(-status));
}

static void *write_records(void *argument)
{
    struct learning *learning = argument;
    struct error error;
    bool failed = false;
    pthread_mutex_lock(&learning->mutex);
    while (true) {
        while (!learning->full && !learning->stop)
            pthread_cond_wait(&learning->changed, &learning->mutex);
        if (!learning->full)
            break;
        pthread_mutex_unlock(&learning->mutex);
        int status = failed ? 0 : append(learning, learning->handed, &error);
        if (status < 0) {
            say(learning, "%s: the use of the experts is not remembered from here on", error.text);
            tell(learning, LEARNING_READ, -status);
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

static int start_writer(struct learning *learning, struct error *ret_error)
{
    int code = pthread_create(&learning->writer, NULL, write_records, learning);
    if (code)
        return error_set(ret_error, code, "%s: no thread to write it: %s", learning->path, strerror(code));
    learning->writing = true;
    tell(learning, LEARNING_ON, 0);
    return 0;
}

int learning_open(const struct learning_options *options, struct learning **ret_learning, struct error *ret_error)
{
    uint32_t experts = options->experts;
    struct learning *learning = calloc(1, sizeof *learning);
    if (!learning)
        return error_set(ret_error, ENOMEM, "use of %u experts: out of memory", experts);
    learning->fd = -1;
    learning->log = options->log;
    learning->done = options->done;
    learning->refused = options->refused;
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
    struct error reason;
    int opened = options->read_only ? -EROFS : open_for_writing(learning, &reason);
    if (opened == 0)
        opened = start_writer(learning, &reason);
    if (opened < 0) {
        read_only(learning, options->read_only ? NULL : reason.text, options->read_only ? 0 : -opened);
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
    _cleanup_close_ int fd = open_locked(path, 0, ret_error);
    if (fd == -ENOENT)
        return 0;
    if (fd == -EBUSY)
        return error_set(ret_error, EBUSY,
                         "%s: a running instance of this model writes it: stop that one (`calypte down`) first", path);
    if (fd < 0)
        return error_prefix(ret_error, fd, "what is remembered cannot be removed");
    if (unlink(path) < 0)
        return error_set(ret_error, errno, "%s cannot be removed: %s", path, strerror(errno));
    return 0;
}
