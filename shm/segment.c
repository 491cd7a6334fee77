#include "shm/segment.h"

#include "proto/cleanup.h"

#include <dirent.h>
#include <fcntl.h>
#include <numa.h>
#include <numaif.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>

#define SHM_FOLDER "/dev/shm" /* where glibc's shm_open puts its objects */
#define SMALL_PAGE 4096u
#define POPULATE_STEP (8 * HUGE_PAGE) /* bytes at a time: short enough that threads share the work evenly */
#define POPULATE_MAX_THREADS 64u
#ifndef MADV_COLLAPSE
    #define MADV_COLLAPSE 25 /* Linux 6.1, in headers from glibc 2.37 on */
#endif
#define BACKGROUND_NICE 10 /* a tenth of a core beside a thread at work, all of it beside an idle one */
#define SEGMENT_NAME_MAX 128

int segment_check_instance(const char *instance, struct error *ret_error)
{
    size_t length = strlen(instance);
    if (length == 0 || length >= INSTANCE_NAME_MAX)
        return error_set(ret_error, EINVAL, "instance name '%.80s': it must have 1 to %u characters", instance,
                         INSTANCE_NAME_MAX - 1);
    for (const char *c = instance; *c; c++) {
        bool allowed =
            (*c >= 'a' && *c <= 'z') || (*c >= 'A' && *c <= 'Z') || (*c >= '0' && *c <= '9') || *c == '-' || *c == '_';
        if (!allowed)
            return error_set(ret_error, EINVAL, "instance name '%s': only letters, digits, '-' and '_' are allowed",
                             instance);
    }
    return 0;
}

static int segment_name(const char *instance, const char *part, char ret_name[static SEGMENT_NAME_MAX],
                        struct error *ret_error)
{
    int status = segment_check_instance(instance, ret_error);
    if (status < 0)
        return status;
    int length = snprintf(ret_name, SEGMENT_NAME_MAX, "/calypte.%s.%s", instance, part);
    if (length >= SEGMENT_NAME_MAX || strchr(part, '/'))
        return error_set(ret_error, EINVAL, "shared memory part '%s' is no valid name", part);
    return 0;
}

static uint64_t bytes_free(int fd)
{
    struct statvfs fs;
    if (fstatvfs(fd, &fs) < 0 || fs.f_blocks == 0) /* no blocks: the mount has no limit of its own */
        return UINT64_MAX;
    return (uint64_t)fs.f_bavail * fs.f_frsize;
}

static int no_space(const char *name, int fd, size_t bytes, int code, struct error *ret_error)
{
    uint64_t free_now = bytes_free(fd);
    if (code == ENOSPC || (free_now < bytes && code != ENOMEM))
        return error_set(ret_error, ENOSPC,
                         "shared memory %s needs %zu bytes and " SHM_FOLDER
                         " has %llu free: choose a smaller --pool or --context, or "
                         "enlarge it (mount -o remount,size=SIZE " SHM_FOLDER ")",
                         name, bytes, (unsigned long long)free_now);
    return error_set(
        ret_error, code,
        "shared memory %s of %zu bytes: memory ran out (%s): choose a smaller --pool or --context, or raise the memory "
        "limit of this cgroup",
        name, bytes, strerror(code));
}

/* What to do where shm_open failed with this errno, or "". */
static const char *open_remedy(int code)
{
    struct statvfs fs;
    switch (code) {
    case EEXIST: return " (an instance of this name runs, or `calypte down` must clean up after one)";
    case ENOENT: return " (is the instance running?)";
    case EMFILE: return "; raise the limit of open files (ulimit -n)";
    case ENOSPC:
        if (statvfs(SHM_FOLDER, &fs) == 0 && fs.f_files > 0 && fs.f_favail == 0)
            return ": " SHM_FOLDER " has no inodes left; remove files from it, or give it more (mount -o "
                   "remount,nr_inodes=COUNT " SHM_FOLDER ")";
        return "; enlarge " SHM_FOLDER " (mount -o remount,size=SIZE " SHM_FOLDER ")";
    default: return "";
    }
}

static int cannot_be(const char *what, const char *name, int code, struct error *ret_error)
{
    return error_set(ret_error, code, "shared memory %s cannot be %s: %s%s", name, what, strerror(code),
                     open_remedy(code));
}

struct populate {
    char *base;
    size_t bytes;
    const struct bitmask *cpus; /* where the threads run; NULL: anywhere */
    bool background;            /* niced */
    bool hugepages;
    _Atomic uint64_t next; /* byte offset of the next step that no thread has taken, from the huge page of `base` on */
    _Atomic int code;      /* errno of the first failure, 0: none */
};

static char *huge_page_of(const char *address)
{
    return (char *)((uintptr_t)address & ~(HUGE_PAGE - 1));
}

/* 0 or a positive errno. */
static int populate_small(char *base, size_t bytes)
{
    while (madvise(base, bytes, MADV_POPULATE_WRITE) < 0)
        if (errno != EINTR && errno != EAGAIN)
            return errno;
    return 0;
}

/* Huge pages from a mount that gives none by itself: `huge=never` is the default of tmpfs. A collapse asks neither the
 * mount nor the kernel's settings, `deny` excepted, but wants one page of each to be there. What cannot have a huge page, by
 * age of the kernel, by lack or because a read is in flight to its memory, is left to populate_small. */
static void populate_huge(char *base, size_t bytes)
{
    char *first = huge_page_of(base + HUGE_PAGE - 1), *end = huge_page_of(base + bytes);
    for (char *page = first; page < end; page += HUGE_PAGE)
        if (populate_small(page, SMALL_PAGE))
            return;
    if (first < end)
        (void)madvise(first, (size_t)(end - first), MADV_COLLAPSE);
}

static void *populate_segment(void *argument)
{
    struct populate *populate = argument;
    if (populate->cpus)
        numa_sched_setaffinity(0, (struct bitmask *)(uintptr_t)populate->cpus); /* failure costs time only */
    if (populate->background)
        (void)!nice(BACKGROUND_NICE); /* Linux: this thread alone */
    char *first = huge_page_of(populate->base), *end = populate->base + populate->bytes;
    while (atomic_load(&populate->code) == 0) {
        char *base = first + atomic_fetch_add(&populate->next, POPULATE_STEP), *stop = base + POPULATE_STEP;
        if (base >= end)
            break;
        base = base < populate->base ? populate->base : base;
        size_t bytes = (size_t)((stop < end ? stop : end) - base);
        if (populate->hugepages)
            populate_huge(base, bytes);
        int none = 0, code = populate_small(base, bytes);
        if (code)
            atomic_compare_exchange_strong(&populate->code, &none, code);
    }
    return NULL;
}

/* The cores of a node that this process may use, from which its pages are zeroed fastest; those of any node where it
 * may use none of them; NULL: no matter. Asked once here, not in each thread: libnuma's answer goes through a cache
 * without a lock. */
static struct bitmask *node_cpus(int node)
{
    struct bitmask *allowed = numa_available() < 0 ? NULL : numa_allocate_cpumask(), *cpus = NULL;
    if (allowed && numa_sched_getaffinity(0, allowed) > 0) {
        cpus = numa_allocate_cpumask();
        if (node >= 0 && numa_node_to_cpus(node, cpus) == 0)
            for (unsigned i = 0; i < cpus->size; i++)
                if (!numa_bitmask_isbitset(allowed, i))
                    numa_bitmask_clearbit(cpus, i);
        if (numa_bitmask_weight(cpus) == 0)
            copy_bitmask_to_bitmask(allowed, cpus);
    }
    if (allowed)
        numa_free_cpumask(allowed);
    return cpus;
}

static void populate_with_threads(struct populate *populate, uint32_t threads)
{
    pthread_t ids[POPULATE_MAX_THREADS];
    uint32_t started = 0;
    threads = threads > POPULATE_MAX_THREADS ? POPULATE_MAX_THREADS : threads;
    while (started < threads && pthread_create(&ids[started], NULL, populate_segment, populate) == 0)
        started++;
    for (uint32_t i = 0; i < started; i++)
        pthread_join(ids[i], NULL);
    if (started == 0) { /* the caller keeps its affinity and its priority */
        populate->cpus = NULL;
        populate->background = false;
        populate_segment(populate);
    }
}

/* 0 or a positive errno. The threads are new ones, so that binding them to a node leaves the caller's affinity
 * alone. `offset` is where `base` stands in the file. */
static int populate_all(char *base, size_t bytes, size_t offset, const struct segment_options *options, int fd)
{
    uint32_t threads = options->populate_threads;
    struct bitmask *cpus = threads == 1 ? NULL : node_cpus(options->node);
    struct populate populate = {
        .base = base, .bytes = bytes, .cpus = cpus, .background = options->background, .hugepages = options->hugepages};
    if (threads == 0)
        threads = cpus ? numa_bitmask_weight(cpus) : (uint32_t)sysconf(_SC_NPROCESSORS_ONLN);
    if (options->node < 0)
        populate.cpus = NULL;
    populate_with_threads(&populate, threads == 1 && !options->background ? 0 : threads);
    if (cpus)
        numa_free_cpumask(cpus);
    int code = atomic_load(&populate.code);
    if (code == EINVAL) /* a kernel before 5.14 */
        code = posix_fallocate(fd, (off_t)offset, (off_t)bytes);
    return code == EFAULT ? ENOSPC : code; /* EFAULT: a touch would have been a SIGBUS */
}

/* A machine without that node (or without NUMA) gets no binding: placement costs time, never correctness. Preferred and
 * not strict: a strict policy on a full node calls the OOM killer instead of failing. */
static int bind_to_node(void *base, size_t bytes, int node)
{
    if (node < 0 || numa_available() < 0 || !numa_bitmask_isbitset(numa_all_nodes_ptr, (unsigned)node))
        return -1;
    struct bitmask *mask = numa_allocate_nodemask();
    numa_bitmask_setbit(mask, (unsigned)node);
    long status = mbind(base, bytes, MPOL_PREFERRED, mask->maskp, mask->size + 1, 0);
    numa_free_nodemask(mask);
    return status < 0 ? -1 : node;
}

/* Memory for `bytes` from `offset` on of a mapped object. 0 or a positive errno. */
static int fill_stretch(char *base, size_t offset, size_t bytes, const struct segment_options *options, int fd)
{
    struct segment_options bound = *options;
    bound.node = bind_to_node(base + offset, bytes, options->node);
    if (options->hugepages)
        (void)madvise(base + offset, bytes, MADV_HUGEPAGE); /* a kernel or mount without them works with small pages */
    return populate_all(base + offset, bytes, offset, &bound, fd);
}

/* Where huge pages can be mapped whole. MAP_FAILED with errno. */
static void *map_object(int fd, size_t bytes, int protection)
{
    if (bytes < HUGE_PAGE)
        return mmap(NULL, bytes, protection, MAP_SHARED, fd, 0);
    char *room = mmap(NULL, bytes + HUGE_PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (room == MAP_FAILED)
        return room;
    char *base = mmap(huge_page_of(room + HUGE_PAGE - 1), bytes, protection, MAP_SHARED | MAP_FIXED, fd, 0);
    size_t mapped = base == MAP_FAILED ? 0 : (bytes + SMALL_PAGE - 1) & ~(size_t)(SMALL_PAGE - 1);
    size_t before = mapped ? (size_t)(base - room) : bytes + HUGE_PAGE;
    int code = errno;
    if (before)
        munmap(room, before);
    if (mapped)
        munmap(base + mapped, bytes + HUGE_PAGE - before - mapped);
    errno = code;
    return base;
}

static int segment_fill(const char *name, int fd, size_t bytes, const struct segment_options *options, void **ret_base,
                        struct error *ret_error)
{
    /* Asking first saves filling the whole mount only to give it back; the populate below is what counts. */
    size_t populated = options->sparse ? options->head_bytes : bytes;
    if (populated && bytes_free(fd) < bytes)
        return no_space(name, fd, bytes, ENOSPC, ret_error);
    if (ftruncate(fd, (off_t)bytes) < 0)
        return error_set(ret_error, errno, "shared memory %s cannot get %zu bytes: %s", name, bytes, strerror(errno));
    char *base = map_object(fd, bytes, PROT_READ | PROT_WRITE);
    if (base == MAP_FAILED)
        return error_set(ret_error, errno, "shared memory %s of %zu bytes cannot be mapped: %s", name, bytes,
                         strerror(errno));
    int code = populated ? fill_stretch(base, 0, populated, options, fd) : 0;
    if (code) {
        munmap(base, bytes);
        return no_space(name, fd, bytes, code, ret_error);
    }
    *ret_base = base;
    return 0;
}

int segment_create(const char *instance, const char *part, size_t bytes, const struct segment_options *options,
                   struct segment *ret_segment, struct error *ret_error)
{
    char name[SEGMENT_NAME_MAX];
    int status = segment_name(instance, part, name, ret_error);
    if (status < 0)
        return status;
    bool raw = options->kind == SEGMENT_RAW;
    size_t head = options->sparse ? options->head_bytes : bytes; /* what may be touched when this returns */
    if (bytes == 0 || bytes > INT64_MAX || head > bytes || (!raw && head < sizeof(struct segment_header)))
        return error_set(ret_error, EINVAL, "shared memory %s cannot have %zu bytes", name, bytes);
    _cleanup_close_ int fd = shm_open(name, O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600);
    if (fd < 0)
        return cannot_be("created", name, errno, ret_error);
    void *base = NULL;
    status = segment_fill(name, fd, bytes, options, &base, ret_error);
    if (status < 0) {
        shm_unlink(name);
        return status;
    }
    if (!raw) {
        struct segment_header *header = base;
        header->layout = SEGMENT_LAYOUT;
        header->kind = options->kind;
        header->bytes = bytes;
        /* last: who attaches early finds no segment */
        __atomic_store_n(&header->magic, SEGMENT_MAGIC, __ATOMIC_RELEASE);
    }
    *ret_segment = (struct segment){base, bytes};
    return 0;
}

static int check_header(const char *name, const struct segment *segment, enum segment_kind kind,
                        struct error *ret_error)
{
    const struct segment_header *shared = segment->base;
    uint64_t magic = __atomic_load_n(&shared->magic, __ATOMIC_ACQUIRE);
    struct segment_header header = *shared;
    if (magic != SEGMENT_MAGIC)
        return error_set(ret_error, EBADMSG, "shared memory %s is not (yet) a segment of Calypte", name);
    if (header.layout != SEGMENT_LAYOUT)
        return error_set(ret_error, EPROTO,
                         "shared memory %s has layout %u and this program knows %u: stop the instance with the "
                         "version that started it",
                         name, header.layout, SEGMENT_LAYOUT);
    if (header.kind != (uint32_t)kind || header.bytes != segment->bytes)
        return error_set(ret_error, EBADMSG,
                         "shared memory %s is of kind %u with %llu bytes, expected kind %u with %zu: run "
                         "`calypte down` and start again",
                         name, header.kind, (unsigned long long)header.bytes, (uint32_t)kind, segment->bytes);
    return 0;
}

int segment_attach(const char *instance, const char *part, enum segment_kind kind, size_t bytes_expected, bool writable,
                   struct segment *ret_segment, struct error *ret_error)
{
    char name[SEGMENT_NAME_MAX];
    int status = segment_name(instance, part, name, ret_error);
    if (status < 0)
        return status;
    _cleanup_close_ int fd = shm_open(name, (writable ? O_RDWR : O_RDONLY) | O_CLOEXEC, 0);
    if (fd < 0)
        return cannot_be("opened", name, errno, ret_error);
    struct stat stat;
    if (fstat(fd, &stat) < 0)
        return error_set(ret_error, errno, "shared memory %s: %s", name, strerror(errno));
    if (stat.st_uid != geteuid())
        return error_set(ret_error, EPERM, "shared memory %s belongs to user %u: not used", name, stat.st_uid);
    size_t bytes = (size_t)stat.st_size;
    size_t least = kind == SEGMENT_RAW ? 1 : sizeof(struct segment_header);
    if (bytes < least || (bytes_expected && bytes != bytes_expected))
        return error_set(ret_error, EBADMSG,
                         "shared memory %s has %zu bytes, expected %zu: run `calypte down` and start again", name,
                         bytes, bytes_expected ? bytes_expected : least);
    void *base = map_object(fd, bytes, PROT_READ | (writable ? PROT_WRITE : 0));
    if (base == MAP_FAILED)
        return error_set(ret_error, errno, "shared memory %s of %zu bytes cannot be mapped: %s", name, bytes,
                         strerror(errno));
    struct segment segment = {base, bytes};
    status = kind == SEGMENT_RAW ? 0 : check_header(name, &segment, kind, ret_error);
    if (status < 0) {
        segment_detach(&segment);
        return status;
    }
    *ret_segment = segment;
    return 0;
}

void segment_detach(struct segment *segment)
{
    if (segment->base)
        munmap(segment->base, segment->bytes);
    *segment = (struct segment){0};
}

int segment_populate_mapped(const char *instance, const char *part, const struct segment *segment, size_t offset,
                            size_t bytes, const struct segment_options *options, struct error *ret_error)
{
    char name[SEGMENT_NAME_MAX];
    int status = segment_name(instance, part, name, ret_error);
    if (status < 0)
        return status;
    _cleanup_close_ int fd = shm_open(name, O_RDWR | O_CLOEXEC, 0);
    if (fd < 0)
        return cannot_be("opened", name, errno, ret_error);
    int code = 0;
    if (offset > segment->bytes || bytes > segment->bytes - offset)
        code = EINVAL;
    if (!code && bytes_free(fd) < bytes)
        code = ENOSPC;
    if (!code) {
        code = fill_stretch(segment->base, offset, bytes, options, fd);
        if (code)
            (void)segment_punch(instance, part, offset, bytes, NULL);
    }
    return code ? no_space(name, fd, bytes, code, ret_error) : 0;
}

int segment_populate(const char *instance, const char *part, size_t bytes_expected, size_t offset, size_t bytes,
                     const struct segment_options *options, struct error *ret_error)
{
    struct segment segment = {0};
    int status = segment_attach(instance, part, SEGMENT_RAW, bytes_expected, true, &segment, ret_error);
    if (status == 0)
        status = segment_populate_mapped(instance, part, &segment, offset, bytes, options, ret_error);
    segment_detach(&segment);
    return status;
}

int segment_punch(const char *instance, const char *part, size_t offset, size_t bytes, struct error *ret_error)
{
    char name[SEGMENT_NAME_MAX];
    int status = segment_name(instance, part, name, ret_error);
    if (status < 0)
        return status;
    _cleanup_close_ int fd = shm_open(name, O_RDWR | O_CLOEXEC, 0);
    if (fd < 0 || fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)offset, (off_t)bytes) < 0)
        return error_set(ret_error, errno, "shared memory %s: %zu bytes at %zu cannot be given back: %s", name, bytes,
                         offset, strerror(errno));
    return 0;
}

int segment_unlink(const char *instance, const char *part)
{
    char name[SEGMENT_NAME_MAX];
    int status = segment_name(instance, part, name, NULL);
    if (status < 0)
        return status;
    if (shm_unlink(name) == 0)
        return 1;
    return errno == ENOENT ? 0 : -errno;
}

static void close_dirp(DIR **dir)
{
    if (*dir)
        closedir(*dir);
}

int segment_unlink_all(const char *instance)
{
    char prefix[SEGMENT_NAME_MAX];
    int status = segment_name(instance, "", prefix, NULL);
    if (status < 0)
        return status;
    _cleanup_(close_dirp) DIR *dir = opendir(SHM_FOLDER);
    if (!dir)
        return errno == ENOENT ? 0 : -errno;
    int removed = 0, failure = 0;
    for (struct dirent *entry; (entry = readdir(dir));) {
        /* An instance's name has no dot, so that the prefix with its last dot fits no other instance. */
        if (strncmp(entry->d_name, prefix + 1, strlen(prefix + 1)) != 0)
            continue;
        if (unlinkat(dirfd(dir), entry->d_name, 0) == 0)
            removed++;
        else if (errno != ENOENT)
            failure = -errno;
    }
    return failure < 0 ? failure : removed;
}
