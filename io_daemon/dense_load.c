#include "io_daemon/dense_load.h"

#include "proto/cleanup.h"
#include "shm/dense.h"

#include <pthread.h>
#include <string.h>
#include <unistd.h>

#define EXPONENTS "experts.exponents"
#define PADDING "padding" /* fills a file up to 4096; no weight */
#define POPULATE_THREADS 4u
#define POPULATE_STRETCH ((size_t)128 << 20) /* has memory before the next is begun, and can be read into */

/* Where everything goes in the segment. */
struct dense_plan {
    struct tensor *tensors; /* [count], sorted by name */
    uint32_t count;
    uint64_t *data; /* [dense files] where each file's data region starts */
    uint64_t tensors_offset, exponents_offset;
    size_t bytes;
    size_t head_bytes; /* the directory and the exponents, to the end of their last huge page */
};

static uint64_t align_up(uint64_t value, uint64_t to)
{
    return (value + to - 1) / to * to;
}

static int compare_tensors(const void *a, const void *b)
{
    return strcmp(((const struct tensor *)a)->name, ((const struct tensor *)b)->name);
}

static void free_plan(struct dense_plan *plan)
{
    free(plan->tensors);
    free(plan->data);
}

static uint64_t data_bytes(const struct safetensors *file)
{
    return file->file_bytes - file->data_offset;
}

static struct tensor exponents_tensor(const struct container *container, uint64_t offset)
{
    struct tensor tensor = {.name = EXPONENTS, .dtype = DTYPE_I32, .dims = 3, .offset = offset};
    tensor.shape[0] = container->expert_count;
    tensor.shape[1] = container->config.experts;
    tensor.shape[2] = EXPERT_MATRICES;
    tensor.shape[3] = 1;
    tensor.bytes = tensor.shape[0] * tensor.shape[1] * tensor.shape[2] * sizeof(int32_t);
    return tensor;
}

static int make_plan(const struct container *container, struct dense_plan *plan, struct error *ret_error)
{
    size_t most = 1;
    for (size_t f = 0; f < container->dense_count; f++)
        most += container->dense[f].header.count;
    plan->tensors = calloc(most, sizeof(*plan->tensors));
    plan->data = calloc(container->dense_count + 1, sizeof(*plan->data));
    if (!plan->tensors || !plan->data)
        return error_set(ret_error, ENOMEM, "dense weights: out of memory");
    plan->tensors_offset = align_up(sizeof(struct dense_header), CACHE_LINE);
    plan->exponents_offset = align_up(plan->tensors_offset + most * sizeof(struct tensor), DISK_ALIGN);
    struct tensor exponents = exponents_tensor(container, plan->exponents_offset);
    plan->tensors[plan->count++] = exponents;
    uint64_t end = align_up(plan->exponents_offset + exponents.bytes, DISK_ALIGN);
    plan->head_bytes = align_up(end, HUGE_PAGE);
    for (size_t f = 0; f < container->dense_count; f++) {
        const struct safetensors *file = &container->dense[f].header;
        plan->data[f] = end;
        end = align_up(end + data_bytes(file), DISK_ALIGN);
        for (size_t t = 0; t < file->count; t++) {
            if (strcmp(file->tensors[t].name, PADDING) == 0)
                continue;
            struct tensor *tensor = &plan->tensors[plan->count++];
            *tensor = file->tensors[t];
            tensor->offset = tensor->offset - file->data_offset + plan->data[f];
        }
    }
    plan->bytes = end;
    plan->head_bytes = plan->head_bytes < end ? plan->head_bytes : end;
    qsort(plan->tensors, plan->count, sizeof(*plan->tensors), compare_tensors);
    for (uint32_t t = 1; t < plan->count; t++) {
        if (strcmp(plan->tensors[t - 1].name, plan->tensors[t].name) == 0)
            return error_set(ret_error, EBADMSG, "%s: tensor %s stands in two dense files: convert the model again",
                             container->path, plan->tensors[t].name);
    }
    return 0;
}

/* What is known of a dense file. */
struct dense_progress {
    bool wanted;                  /* to be read, or read again */
    uint32_t copy, tried;         /* from where; bit c: copy c was not good */
    const struct tensor *damaged; /* a tensor whose checksum differs, of the last reading */
};

/* The segment gets its memory in the order in which it is read into, by threads that are ahead of the reads. */
struct dense_memory {
    const struct dense_load *load;
    const struct segment *segment;
    pthread_t thread;
    _Atomic size_t ready; /* bytes from the beginning on that have memory */
    _Atomic bool stop, failed;
    struct error error; /* of `failed` */
    int status;
};

static void ring_doorbell(const struct dense_load *load)
{
    uint64_t one = 1;
    (void)!write(load->doorbell_fd, &one, sizeof(one)); /* fails only when it rings already */
}

static void *make_memory(void *argument)
{
    struct dense_memory *memory = argument;
    const struct segment_options options = {
        .node = -1, .hugepages = memory->load->hugepages, .populate_threads = POPULATE_THREADS};
    size_t bytes = memory->segment->bytes, ready = atomic_load(&memory->ready);
    while (ready < bytes && !atomic_load(&memory->stop)) {
        size_t stretch = bytes - ready < POPULATE_STRETCH ? bytes - ready : POPULATE_STRETCH;
        memory->status = segment_populate_mapped(memory->load->instance, "dense", memory->segment, ready, stretch,
                                                 &options, &memory->error);
        if (memory->status < 0) {
            atomic_store(&memory->failed, true);
            ring_doorbell(memory->load);
            break;
        }
        ready += stretch;
        atomic_store(&memory->ready, ready);
        ring_doorbell(memory->load);
    }
    return NULL;
}

static bool keep_segment(const struct dense_load *load, const struct dense_plan *plan)
{
    struct segment segment;
    if (segment_attach(load->instance, "dense", SEGMENT_DENSE, plan->bytes, false, &segment, NULL) < 0)
        return false;
    const struct dense_header *header = segment.base;
    bool keep = atomic_load_explicit(&header->ready, memory_order_acquire) == 1 &&
                header->identity == load->copies->container->identity;
    segment_detach(&segment);
    return keep;
}

static void fill_directory(const struct dense_load *load, const struct dense_plan *plan, const struct segment *segment)
{
    const struct container *container = load->copies->container;
    struct dense_header *header = segment->base;
    char *base = segment->base;
    header->count = plan->count;
    header->identity = container->identity;
    header->tensors_offset = plan->tensors_offset;
    memcpy(base + plan->tensors_offset, plan->tensors, plan->count * sizeof(*plan->tensors));
    size_t layer_bytes = (size_t)container->config.experts * EXPERT_MATRICES * sizeof(int32_t);
    for (size_t i = 0; i < container->expert_count; i++)
        memcpy(base + plan->exponents_offset + i * layer_bytes, container->experts[i].exponents, layer_bytes);
}

/* The verdicts that are due. */
static void collect_verdicts(struct dense_load *load, size_t *left)
{
    for (struct verify_job *job = verifier_collect(load->verifier); job; job = job->next) {
        struct dense_progress *progress = job->owner;
        (*left)--;
        if (!job->matches && !progress->damaged)
            progress->damaged = &load->copies->container->dense[progress - load->progress].header.tensors[job->index];
    }
}

/* Each is told once. `status`: what has gone wrong before. */
static int heed_events(const struct dense_load *load, uint32_t events, int status, struct error *ret_error)
{
    uint64_t rings;
    if (events & IO_EVENT_DOORBELL)
        (void)!read(load->doorbell_fd, &rings, sizeof(rings)); /* non-blocking; empty already is fine */
    if ((events & IO_EVENT_STOP) && status == 0)
        return error_set(ret_error, ECANCELED, "told to stop while the dense weights were loaded");
    return status;
}

static int piece_failure(const char *path, const struct piece *piece, struct error *ret_error)
{
    if (piece->status == -ENODATA)
        return error_set(ret_error, EIO, "%s: the file is truncated at byte %llu: " CONTAINER_MEND, path,
                         (unsigned long long)piece->read.offset);
    return error_set(ret_error, -piece->status, "%s: cannot be read at byte %llu: %s: check the drive (dmesg)", path,
                     (unsigned long long)piece->read.offset, strerror(-piece->status));
}

/* Adds the pieces from `added` on whose memory is there. */
static uint64_t add_pieces(const struct dense_load *load, struct piece *pieces, uint64_t count, uint64_t added)
{
    const char *ready = (const char *)load->memory->segment->base + atomic_load(&load->memory->ready);
    while (added < count && (const char *)pieces[added].read.buffer + pieces[added].read.bytes <= ready)
        reader_add(load->reader, &pieces[added++]);
    return added;
}

static int memory_failure(const struct dense_memory *memory, struct error *ret_error)
{
    *ret_error = memory->error;
    return memory->status;
}

/* Reads the pieces; after a failure takes back what is not in flight. `ret_read`: 0, or the result of the read that
 * failed. */
static int read_pieces(struct dense_load *load, const char *path, struct piece *pieces, uint64_t count, int *ret_read,
                       struct error *ret_error)
{
    int status = 0;
    uint64_t added = 0, back = 0;
    *ret_read = 0;
    while (status == 0 ? back < count : back < added) {
        if (status == 0)
            added = add_pieces(load, pieces, count, added);
        struct piece *finished;
        uint32_t events;
        struct error ignored;
        int waited = reader_wait(load->reader, -1, &finished, &events, status ? &ignored : ret_error);
        if (waited < 0)
            return waited;
        for (; finished; finished = finished->next) {
            back++;
            if (finished->status < 0 && status == 0) {
                *ret_read = finished->status;
                status = piece_failure(path, finished, ret_error);
            }
        }
        status = heed_events(load, events, status, ret_error);
        if (atomic_load(&load->memory->failed) && status == 0)
            status = memory_failure(load->memory, ret_error);
        if (status < 0) {
            for (struct piece *piece = reader_withdraw(load->reader); piece; piece = piece->next)
                back++;
        }
    }
    return status;
}

/* Reads dense file `f` from the copy that its progress names. */
static int read_copy(struct dense_load *load, size_t f, char *base, int *ret_read, struct error *ret_error)
{
    const struct copies *copies = load->copies;
    const struct safetensors *file = &copies->container->dense[f].header;
    size_t place = copies_dense_file(copies, f);
    const struct copy_file *opened = &copies->copy[load->progress[f].copy].files[place];
    const char *path = copies_path(copies, load->progress[f].copy, place);
    uint64_t bytes = data_bytes(file), count = (bytes + PIECE_BYTES - 1) / PIECE_BYTES;
    *ret_read = 0;
    _cleanup_free_ struct piece *pieces = calloc(count + 1, sizeof(*pieces));
    if (!pieces)
        return error_set(ret_error, ENOMEM, "%s: out of memory", path);
    for (uint64_t i = 0; i < count; i++) {
        uint64_t done = i * PIECE_BYTES;
        pieces[i].read = (struct io_read){.fd = opened->fd,
                                          .buffer = base + done,
                                          .bytes = bytes - done < PIECE_BYTES ? bytes - done : PIECE_BYTES,
                                          .offset = file->data_offset + done};
        pieces[i].drive = opened->drive;
    }
    int status = read_pieces(load, path, pieces, count, ret_read, ret_error);
    if (load->reader->flying)
        take_pointer(pieces); /* waiting itself failed: the process ends with reads in flight, their memory must stay */
    return status;
}

/* Reads a file from a copy that gives all of it, and drops those that do not. */
static int read_file(struct dense_load *load, size_t f, char *base, struct error *ret_error)
{
    struct copies *copies = load->copies;
    struct dense_progress *progress = &load->progress[f];
    while (true) {
        int failed;
        progress->copy = (uint32_t)__builtin_ctz(copies->live & ~progress->tried);
        int status = read_copy(load, f, base, &failed, ret_error);
        if (status == 0)
            atomic_fetch_add_explicit(&load->control->iod.dense_bytes, data_bytes(&copies->container->dense[f].header),
                                      memory_order_relaxed);
        progress->tried |= 1u << progress->copy;
        if (copies_is_fault(failed))
            copies_count_failure(copies, progress->copy);
        if (status == 0 || !copies_is_fault(failed) || load->reader->flying || !(copies->live & ~progress->tried))
            return status;
        copies_drop(copies, progress->copy, copies_dense_file(copies, f), failed);
    }
}

static size_t add_verify_jobs(struct dense_load *load, size_t f, const char *base, struct verify_job *jobs)
{
    const struct dense_file *file = &load->copies->container->dense[f];
    for (size_t t = 0; t < file->header.count; t++) {
        const struct tensor *tensor = &file->header.tensors[t];
        jobs[t] = (struct verify_job){.data = base + (tensor->offset - file->header.data_offset),
                                      .bytes = tensor->bytes,
                                      .expected = file->checksums[t],
                                      .owner = &load->progress[f],
                                      .index = (uint32_t)t};
        verifier_add(load->verifier, &jobs[t]);
    }
    return file->header.count;
}

/* Sleeps in the reader, with nothing to read, until the verify thread has finished. */
static int wait_for_verdicts(struct dense_load *load, size_t left, int status, struct error *ret_error)
{
    while (true) {
        struct error ignored;
        collect_verdicts(load, &left);
        if (left == 0)
            return status;
        struct piece *finished;
        uint32_t events;
        int waited = reader_wait(load->reader, -1, &finished, &events, status ? &ignored : ret_error);
        if (waited < 0) {
            for (; left > 0; collect_verdicts(load, &left))
                usleep(1000); /* jobs and data are the verify thread's until then */
            return status ? status : waited;
        }
        status = heed_events(load, events, status, ret_error);
    }
}

/* A file with a damaged tensor is read once more, from another copy; none: the error. */
static int look_elsewhere(struct dense_load *load, size_t f, bool *ret_again, struct error *ret_error)
{
    struct copies *copies = load->copies;
    struct dense_progress *progress = &load->progress[f];
    const char *path = copies_path(copies, progress->copy, copies_dense_file(copies, f));
    const char *name = progress->damaged->name;
    uint32_t others = copies->live & ~progress->tried;
    copies_count_wrong(copies, progress->copy);
    if (!others)
        return error_set(ret_error, EBADMSG,
                         "%s: tensor %s: its checksum differs, the bytes on disk are damaged: " CONTAINER_REPLACE, path,
                         name);
    char line[1200];
    snprintf(
        line, sizeof(line),
        "%s: tensor %s: its checksum differs, the bytes on disk are damaged: read from %s instead; " CONTAINER_REPLACE,
        path, name, copies->copy[__builtin_ctz(others)].path);
    copies->log(line);
    progress->damaged = NULL;
    progress->wanted = *ret_again = true;
    return 0;
}

/* Reads the wanted files one after another; the verify thread works on the one before. */
static int read_wanted(struct dense_load *load, const struct dense_plan *plan, char *base, struct verify_job *jobs,
                       struct error *ret_error)
{
    size_t begun = 0;
    int status = 0;
    for (size_t f = 0; status == 0 && f < load->copies->container->dense_count; f++) {
        if (!load->progress[f].wanted)
            continue;
        load->progress[f].wanted = false;
        status = read_file(load, f, base + plan->data[f], ret_error);
        if (status == 0 && load->verify)
            begun += add_verify_jobs(load, f, base + plan->data[f], jobs + begun);
    }
    return wait_for_verdicts(load, begun, status, ret_error);
}

static int fill_data(struct dense_load *load, const struct dense_plan *plan, char *base, struct error *ret_error)
{
    const struct container *container = load->copies->container;
    size_t most = 0;
    for (size_t f = 0; f < container->dense_count; f++)
        most += container->dense[f].header.count;
    _cleanup_free_ struct verify_job *jobs = calloc(most + 1, sizeof(*jobs));
    _cleanup_free_ struct dense_progress *progress = calloc(container->dense_count + 1, sizeof(*progress));
    if (!jobs || !progress)
        return error_set(ret_error, ENOMEM, "dense weights: out of memory");
    load->progress = progress;
    for (size_t f = 0; f < container->dense_count; f++)
        progress[f].wanted = true;
    int status = 0;
    for (bool again = true; status == 0 && again;) {
        again = false;
        status = read_wanted(load, plan, base, jobs, ret_error);
        for (size_t f = 0; status == 0 && f < container->dense_count; f++) {
            if (progress[f].damaged)
                status = look_elsewhere(load, f, &again, ret_error);
        }
    }
    load->progress = NULL;
    return status;
}

/* Fills the data while the segment gets its memory. */
static int fill_segment(struct dense_load *load, const struct dense_plan *plan, const struct segment *segment,
                        struct error *ret_error)
{
    struct dense_memory memory = {.load = load, .segment = segment};
    atomic_init(&memory.ready, plan->head_bytes);
    bool ahead = pthread_create(&memory.thread, NULL, make_memory, &memory) == 0;
    if (!ahead) /* all of it first, then */
        make_memory(&memory);
    load->memory = &memory;
    int status = fill_data(load, plan, segment->base, ret_error);
    atomic_store(&memory.stop, true);
    if (ahead)
        pthread_join(memory.thread, NULL);
    load->memory = NULL;
    return status;
}

int dense_load(struct dense_load *load, struct error *ret_error)
{
    _cleanup_(free_plan) struct dense_plan plan = {0};
    int status = make_plan(load->copies->container, &plan, ret_error);
    if (status < 0 || keep_segment(load, &plan))
        return status;
    status = segment_unlink(load->instance, "dense");
    if (status < 0)
        return error_set(ret_error, -status, "shared memory of the dense weights of instance %s cannot be removed: %s",
                         load->instance, strerror(-status));
    struct segment segment;
    struct segment_options options = {
        .kind = SEGMENT_DENSE, .node = -1, .hugepages = load->hugepages, .sparse = true, .head_bytes = plan.head_bytes};
    status = segment_create(load->instance, "dense", plan.bytes, &options, &segment, ret_error);
    if (status < 0)
        return status;
    fill_directory(load, &plan, &segment);
    status = fill_segment(load, &plan, &segment, ret_error);
    if (status == 0)
        atomic_store_explicit(&((struct dense_header *)segment.base)->ready, 1, memory_order_release);
    else
        segment_unlink(load->instance, "dense");
    if (load->reader->flying == 0)
        segment_detach(&segment);
    return status;
}
