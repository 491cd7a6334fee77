#include "io_daemon/dense_load.h"

#include "io_daemon/disk.h"
#include "proto/cleanup.h"
#include "shm/dense.h"

#include <string.h>

#define EXPONENTS "experts.exponents"
#define PADDING "padding" /* fills a file up to 4096; no weight */
#define POPULATE_THREADS 4u

/* Where everything goes in the segment. */
struct dense_plan {
    struct tensor *tensors; /* [count], sorted by name */
    uint32_t count;
    uint64_t *data; /* [dense files] where each file's data region starts */
    uint64_t tensors_offset, exponents_offset;
    size_t bytes;
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
    qsort(plan->tensors, plan->count, sizeof(*plan->tensors), compare_tensors);
    for (uint32_t t = 1; t < plan->count; t++) {
        if (strcmp(plan->tensors[t - 1].name, plan->tensors[t].name) == 0)
            return error_set(ret_error, EBADMSG, "%s: tensor %s stands in two dense files: convert the model again",
                             container->path, plan->tensors[t].name);
    }
    return 0;
}

static bool keep_segment(const struct dense_load *load, const struct dense_plan *plan)
{
    struct segment segment;
    if (segment_attach(load->instance, "dense", SEGMENT_DENSE, plan->bytes, false, &segment, NULL) < 0)
        return false;
    const struct dense_header *header = segment.base;
    bool keep = atomic_load_explicit(&header->ready, memory_order_acquire) == 1 &&
                header->identity == load->container->identity;
    segment_detach(&segment);
    return keep;
}

static void fill_directory(const struct dense_load *load, const struct dense_plan *plan, const struct segment *segment)
{
    const struct container *container = load->container;
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

/* The verdicts that are due; the first bad one is the error. */
static int collect_verdicts(struct dense_load *load, size_t *left, struct error *ret_error)
{
    int status = 0;
    for (struct verify_job *job = verifier_collect(load->verifier); job; job = job->next) {
        (*left)--;
        const struct safetensors *file = job->owner;
        if (!job->matches && status == 0)
            status = error_set(ret_error, EBADMSG,
                               "%s: tensor %s: its checksum differs, the bytes on disk are damaged: fetch this "
                               "file again or convert again",
                               file->path, file->tensors[job->index].name);
    }
    return status;
}

static void empty_doorbell(const struct dense_load *load)
{
    uint64_t rings;
    (void)!read(load->doorbell_fd, &rings, sizeof(rings)); /* non-blocking; empty already is fine */
}

static int piece_failure(const struct safetensors *file, const struct piece *piece, struct error *ret_error)
{
    if (piece->status == -ENODATA)
        return error_set(ret_error, EIO,
                         "%s: the file is truncated at byte %llu: fetch this file again or convert again", file->path,
                         (unsigned long long)piece->read.offset);
    return error_set(ret_error, -piece->status, "%s: cannot be read at byte %llu: %s: check the drive (dmesg)",
                     file->path, (unsigned long long)piece->read.offset, strerror(-piece->status));
}

/* Waits until `count` pieces are back; after a failure takes back what is not in flight. */
static int wait_for_pieces(struct dense_load *load, const struct safetensors *file, uint64_t count,
                           struct error *ret_error)
{
    int status = 0;
    while (count) {
        struct piece *finished;
        uint32_t events;
        struct error ignored;
        int waited = reader_wait(load->reader, -1, &finished, &events, status ? &ignored : ret_error);
        if (waited < 0)
            return waited;
        for (; finished; finished = finished->next) {
            count--;
            if (finished->status < 0 && status == 0)
                status = piece_failure(file, finished, ret_error);
        }
        if (events & IO_EVENT_DOORBELL)
            empty_doorbell(load);
        if ((events & IO_EVENT_STOP) && status == 0)
            status = error_set(ret_error, ECANCELED, "told to stop while the dense weights were loaded");
        if (status < 0) {
            for (struct piece *piece = reader_withdraw(load->reader); piece; piece = piece->next)
                count--;
        }
    }
    return status;
}

static int read_file(struct dense_load *load, const struct safetensors *file, char *base, struct error *ret_error)
{
    bool direct;
    _cleanup_close_ int fd = disk_open(file->path, &direct, ret_error);
    if (fd < 0)
        return fd;
    load->direct = load->direct && direct;
    uint64_t bytes = data_bytes(file), count = (bytes + PIECE_BYTES - 1) / PIECE_BYTES;
    _cleanup_free_ struct piece *pieces = calloc(count + 1, sizeof(*pieces));
    if (!pieces)
        return error_set(ret_error, ENOMEM, "%s: out of memory", file->path);
    for (uint64_t i = 0; i < count; i++) {
        uint64_t done = i * PIECE_BYTES;
        pieces[i].read = (struct io_read){.fd = fd,
                                          .buffer = base + done,
                                          .bytes = bytes - done < PIECE_BYTES ? bytes - done : PIECE_BYTES,
                                          .offset = file->data_offset + done};
        reader_add(load->reader, &pieces[i]);
    }
    int status = wait_for_pieces(load, file, count, ret_error);
    if (load->reader->flying)
        take_pointer(pieces); /* waiting itself failed: the process ends with reads in flight, their memory must stay */
    return status;
}

static void add_verify_jobs(struct dense_load *load, const struct dense_file *file, const char *base,
                            struct verify_job *jobs)
{
    for (size_t t = 0; t < file->header.count; t++) {
        const struct tensor *tensor = &file->header.tensors[t];
        jobs[t] = (struct verify_job){.data = base + (tensor->offset - file->header.data_offset),
                                      .bytes = tensor->bytes,
                                      .expected = file->checksums[t],
                                      .owner = (void *)(uintptr_t)&file->header,
                                      .index = (uint32_t)t};
        verifier_add(load->verifier, &jobs[t]);
    }
}

/* Sleeps in the reader, with nothing to read, until the verify thread has finished. */
static int wait_for_verdicts(struct dense_load *load, size_t left, int status, struct error *ret_error)
{
    while (true) {
        struct error ignored;
        int verdict = collect_verdicts(load, &left, status ? &ignored : ret_error);
        status = status ? status : verdict;
        if (left == 0)
            return status;
        struct piece *finished;
        uint32_t events;
        int waited = reader_wait(load->reader, -1, &finished, &events, status ? &ignored : ret_error);
        if (waited < 0)
            return status ? status : waited;
        if (events & IO_EVENT_DOORBELL)
            empty_doorbell(load);
    }
}

/* Reads one file after another; the verify thread works on the one before. */
static int fill_data(struct dense_load *load, const struct dense_plan *plan, char *base, struct error *ret_error)
{
    const struct container *container = load->container;
    size_t most = 0, begun = 0;
    for (size_t f = 0; f < container->dense_count; f++)
        most += container->dense[f].header.count;
    _cleanup_free_ struct verify_job *jobs = calloc(most + 1, sizeof(*jobs));
    if (!jobs)
        return error_set(ret_error, ENOMEM, "dense weights: out of memory");
    int status = 0;
    for (size_t f = 0; status == 0 && f < container->dense_count; f++) {
        const struct dense_file *file = &container->dense[f];
        status = read_file(load, &file->header, base + plan->data[f], ret_error);
        if (status < 0)
            break;
        atomic_fetch_add_explicit(&load->control->iod.dense_bytes, data_bytes(&file->header), memory_order_relaxed);
        if (!load->verify)
            continue;
        add_verify_jobs(load, file, base + plan->data[f], jobs + begun);
        begun += file->header.count;
    }
    return wait_for_verdicts(load, begun, status, ret_error);
}

int dense_load(struct dense_load *load, struct error *ret_error)
{
    _cleanup_(free_plan) struct dense_plan plan = {0};
    int status = make_plan(load->container, &plan, ret_error);
    if (status < 0 || keep_segment(load, &plan))
        return status;
    status = segment_unlink(load->instance, "dense");
    if (status < 0)
        return error_set(ret_error, -status, "shared memory of the dense weights of instance %s cannot be removed: %s",
                         load->instance, strerror(-status));
    struct segment segment;
    struct segment_options options = {
        .kind = SEGMENT_DENSE, .node = -1, .hugepages = load->hugepages, .populate_threads = POPULATE_THREADS};
    status = segment_create(load->instance, "dense", plan.bytes, &options, &segment, ret_error);
    if (status < 0)
        return status;
    fill_directory(load, &plan, &segment);
    status = fill_data(load, &plan, segment.base, ret_error);
    if (status == 0)
        atomic_store_explicit(&((struct dense_header *)segment.base)->ready, 1, memory_order_release);
    else
        segment_unlink(load->instance, "dense");
    if (load->reader->flying == 0)
        segment_detach(&segment);
    return status;
}
