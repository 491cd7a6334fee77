#include "io_daemon/copies.h"

#include "io_daemon/disk.h"
#include "proto/cleanup.h"

#include <string.h>
#include <sys/stat.h>

_Static_assert(READER_DRIVES == MAX_DRIVES, "each drive of the reader has a line in shared memory");

size_t copies_expert_file(const struct copies *copies, size_t layer, uint32_t stripe)
{
    return layer * copies->container->stripes + stripe;
}

size_t copies_dense_file(const struct copies *copies, size_t file)
{
    return copies->container->expert_count * copies->container->stripes + file;
}

static const char *path_in(const struct container *container, size_t file)
{
    size_t experts = container->expert_count * container->stripes;
    return file < experts ? container->experts[file / container->stripes].stripes[file % container->stripes].header.path
                          : container->dense[file - experts].header.path;
}

const char *copies_path(const struct copies *copies, uint32_t copy, size_t file)
{
    return path_in(copies->copy[copy].container, file);
}

static size_t count_files(const struct container *container)
{
    return container->expert_count * container->stripes + container->dense_count;
}

/* Files of one device share a drive; of more devices than there are drives, the last do. */
static uint8_t find_drive(struct copies *copies, dev_t device)
{
    uint32_t d = 0;
    while (d < copies->drive_count && copies->drives[d] != device)
        d++;
    if (d == copies->drive_count && d < READER_DRIVES)
        copies->drives[copies->drive_count++] = device;
    return (uint8_t)(d < READER_DRIVES ? d : READER_DRIVES - 1);
}

static void close_copy(struct copy *copy)
{
    size_t count = copy->container ? count_files(copy->container) : 0;
    for (size_t f = 0; copy->files && f < count; f++)
        close_fdp(&copy->files[f].fd);
    free(copy->files);
    if (copy->container)
        container_close(copy->container);
    copy->files = NULL;
    copy->container = NULL;
}

/* Opens all files of a copy. `ret_devices`: [files] where each stands. */
static int open_files(struct copy *copy, dev_t *ret_devices, bool *ret_direct, struct error *ret_error)
{
    size_t count = count_files(copy->container);
    *ret_direct = true;
    copy->files = calloc(count + 1, sizeof(*copy->files));
    if (!copy->files)
        return error_set(ret_error, ENOMEM, "%s: out of memory", copy->path);
    for (size_t f = 0; f < count; f++)
        copy->files[f].fd = -1;
    for (size_t f = 0; f < count; f++) {
        const char *path = path_in(copy->container, f);
        struct stat found;
        bool direct;
        copy->files[f].fd = disk_open(path, &direct, ret_error);
        if (copy->files[f].fd < 0)
            return copy->files[f].fd;
        if (fstat(copy->files[f].fd, &found) < 0)
            return error_set(ret_error, errno, "%s: its device is not known: %s", path, strerror(errno));
        ret_devices[f] = found.st_dev;
        *ret_direct = *ret_direct && direct;
    }
    return 0;
}

/* Two folders can be one: by a link, or a mount. */
static bool same_files(const struct copy *a, const struct copy *b)
{
    struct stat first, second;
    return fstat(a->files[0].fd, &first) == 0 && fstat(b->files[0].fd, &second) == 0 && first.st_dev == second.st_dev &&
           first.st_ino == second.st_ino;
}

static int open_copy(struct copies *copies, uint32_t c, uint64_t identity, struct error *ret_error)
{
    struct copy *copy = &copies->copy[c];
    int status = container_open(copy->path, &copy->container, ret_error);
    if (status < 0)
        return status;
    if (copy->container->identity != identity)
        return error_set(
            ret_error, ESTALE, "%s: is not the container that the instance was started with: %s", copy->path,
            c == 0 ? "run `calypte down` and `calypte up` again" : "name a copy of that one, or copy it again");
    size_t count = count_files(copy->container);
    bool direct;
    _cleanup_free_ dev_t *devices = calloc(count + 1, sizeof(*devices));
    if (!devices)
        return error_set(ret_error, ENOMEM, "%s: out of memory", copy->path);
    status = open_files(copy, devices, &direct, ret_error);
    if (status < 0)
        return status;
    if (copies->container && count && same_files(copy, &copies->copy[0]))
        return error_set(ret_error, EEXIST, "%s: is the container itself", copy->path);
    for (size_t f = 0; f < count; f++)
        copy->files[f].drive = find_drive(copies, devices[f]);
    copies->direct = copies->direct && direct;
    copies->live |= 1u << c;
    if (!copies->container) {
        copies->container = copy->container;
        copies->file_count = count;
    }
    return 0;
}

static void set_state(const struct copies *copies, uint32_t c, enum copy_state state)
{
    atomic_store_explicit(&copies->control->iod.copies[c].state, state, memory_order_relaxed);
}

int copies_open(struct copies *copies, const struct facts *facts, struct control *control,
                void (*log)(const char *line), struct error *ret_error)
{
    struct error errors[MAX_COPIES];
    int statuses[MAX_COPIES] = {0};
    *copies = (struct copies){.direct = true, .control = control, .log = log};
    atomic_store_explicit(&control->iod.drive_count, 0, memory_order_relaxed);
    copies->copy[0].path = facts->container;
    copies->copy[1].path = facts->mirror[0] ? facts->mirror : NULL;
    for (uint32_t c = 0; c < MAX_COPIES; c++) {
        set_state(copies, c, COPY_NONE);
        if (!copies->copy[c].path)
            continue;
        statuses[c] = open_copy(copies, c, facts->identity, &errors[c]);
        set_state(copies, c, statuses[c] < 0 ? COPY_REFUSED : COPY_USED);
        if (statuses[c] < 0)
            close_copy(&copies->copy[c]);
    }
    if (!copies->live)
        return error_set(ret_error, -statuses[0], "%s", errors[0].text);
    for (uint32_t c = 0; c < MAX_COPIES; c++) {
        char line[sizeof(errors[c].text) + 600];
        if (statuses[c] == 0)
            continue;
        snprintf(line, sizeof(line), "%s not used, %.511s is read alone: %.1023s", c == 0 ? "container" : "mirror",
                 copies->copy[1 - c].path, errors[c].text);
        log(line);
    }
    return 0;
}

void copies_close(struct copies *copies)
{
    for (uint32_t c = 0; c < MAX_COPIES; c++)
        close_copy(&copies->copy[c]);
}

uint32_t copies_choose(const struct copies *copies, const struct reader *reader, uint32_t mask, size_t file,
                       uint64_t bytes, bool background)
{
    uint32_t best = (uint32_t)__builtin_ctz(mask);
    double least = 0;
    if ((mask & (mask - 1)) == 0)
        return best;
    for (uint32_t c = best; c < MAX_COPIES; c++) {
        if (!(mask & 1u << c))
            continue;
        double expected = reader_expected_ns(reader, copies->copy[c].files[file].drive, background, bytes);
        if (c == best || expected < least) {
            best = c;
            least = expected;
        }
    }
    return best;
}

bool copies_is_fault(int status)
{
    return status < 0 && status != -ENOMEM;
}

static void add_one(_Atomic uint64_t *counter)
{
    atomic_fetch_add_explicit(counter, 1, memory_order_relaxed);
}

void copies_count_failure(const struct copies *copies, uint32_t copy)
{
    add_one(&copies->control->iod.copies[copy].read_failures);
}

void copies_count_wrong(const struct copies *copies, uint32_t copy)
{
    add_one(&copies->control->iod.copies[copy].wrong_checksums);
}

void copies_drop(struct copies *copies, uint32_t copy, size_t file, int status)
{
    char line[1200];
    copies->live &= ~(1u << copy);
    set_state(copies, copy, COPY_DROPPED);
    snprintf(line, sizeof(line), "%s: %s: this copy is read no more, %s alone goes on: %s",
             copies_path(copies, copy, file), container_fault(-status), copies->copy[__builtin_ctz(copies->live)].path,
             status == -ENODATA ? CONTAINER_MEND : "check the drive (dmesg)");
    copies->log(line);
}

uint32_t copies_descriptors(const struct copies *copies, int *ret_fds)
{
    uint32_t count = 0;
    for (uint32_t c = 0; c < MAX_COPIES; c++) {
        for (size_t f = 0; (copies->live & 1u << c) && f < copies->file_count; f++)
            ret_fds[count++] = copies->copy[c].files[f].fd;
    }
    return count;
}

/* Copies of which a file stands on that drive, a bit each. */
static uint32_t copies_on(const struct copies *copies, uint32_t drive)
{
    uint32_t mask = 0;
    for (uint32_t c = 0; c < MAX_COPIES; c++) {
        for (size_t f = 0; copies->copy[c].files && f < copies->file_count; f++)
            mask |= copies->copy[c].files[f].drive == drive ? 1u << c : 0;
    }
    return mask;
}

void copies_publish(const struct copies *copies, const struct reader *reader)
{
    struct iod_line *line = &copies->control->iod;
    bool first = atomic_load_explicit(&line->drive_count, memory_order_relaxed) != copies->drive_count;
    for (uint32_t d = 0; d < copies->drive_count; d++) {
        const struct drive *drive = &reader->drives[d];
        struct drive_line *seen = &line->drives[d];
        if (first) {
            atomic_store_explicit(&seen->device, copies->drives[d], memory_order_relaxed);
            atomic_store_explicit(&seen->copies, copies_on(copies, d), memory_order_relaxed);
        }
        atomic_store_explicit(&seen->bytes, drive->bytes, memory_order_relaxed);
        atomic_store_explicit(&seen->reads, drive->reads, memory_order_relaxed);
        atomic_store_explicit(&seen->read_ns, drive->read_ns, memory_order_relaxed);
        atomic_store_explicit(&seen->rate, (uint64_t)(drive->rate * 1e9), memory_order_relaxed);
    }
    if (first)
        atomic_store_explicit(&line->drive_count, copies->drive_count, memory_order_relaxed);
}
