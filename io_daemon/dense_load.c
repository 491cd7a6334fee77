#include "io_daemon/dense_load.h"

#include "proto/cleanup.h"
#include "shm/dense.h"

#include <pthread.h>
#include <string.h>
#include <unistd.h>
#include <xxhash.h>

#define EXPONENTS "experts.exponents"
#define PADDING "padding"   /* fills a file up to 4096; no weight */
#define POPULATE_THREADS 4u /* while reads wait for memory */
#define STRETCH_LEAST                                                                                                  \
    ((size_t)32 << 20) /* has memory before the next is begun, and can be read into; doubled from the first on */
#define STRETCH_MOST ((size_t)128 << 20)

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
    struct piece *pieces;         /* [count]; owner: the progress, NULL once it came */
    uint64_t count, added, whole; /* pieces; given to the reader; came, from the first on without a gap */
    const struct tensor **order;  /* [tensors] as they stand in the file */
    struct verify_job *jobs;      /* [count + tensors] */
    size_t tensor, job;           /* the next of each */
    uint64_t verified;            /* bytes handed to the verify thread */
    XXH3_state_t *state;          /* its own, of the tensor that it is at */
    uint32_t copy, tried;         /* from where it is read; bit c: copy c was not good */
    const struct tensor *damaged; /* its checksum differs */
};

/* The segment gets its memory in the order in which it is read into, ahead of the reads: by one thread, which disturbs them least, and by
 * more where it would not stay ahead (pages of 4 KiB, several drives). */
struct dense_memory {
    const struct dense_load *load;
    const struct segment *segment;
    pthread_t thread;
    _Atomic size_t ready;   /* bytes from the beginning on that have memory */
    _Atomic size_t waiting; /* bytes of them that the reader has */
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
    struct segment_options options = {.node = -1, .hugepages = memory->load->hugepages};
    size_t bytes = memory->segment->bytes, ready = atomic_load(&memory->ready), stretch = STRETCH_LEAST;
    while (ready < bytes && !atomic_load(&memory->stop)) {
        options.populate_threads = atomic_load(&memory->waiting) < STRETCH_MOST ? POPULATE_THREADS : 1;
        stretch = bytes - ready < stretch ? bytes - ready : stretch;
        memory->status = segment_populate_mapped(memory->load->instance, "dense", memory->segment, ready, stretch,
                                                 &options, &memory->error);
        if (memory->status < 0) {
            atomic_store(&memory->failed, true);
            ring_doorbell(memory->load);
            break;
        }
        ready += stretch;
        stretch = 2 * stretch < STRETCH_MOST ? 2 * stretch : STRETCH_MOST;
        atomic_store(&memory->ready, ready);
        ring_doorbell(memory->load);
    }
    return NULL;
}

/* Filling the segment: all files are one stream of pieces, so that the drives never run dry between two of them, and each is
 * hashed as it comes, so that no tensor's hash is left to be waited for at the end. */
struct dense_filling {
    const struct dense_load *load;
    const struct dense_plan *plan;
    struct dense_memory memory;
    char *base;                         /* of the segment */
    struct dense_progress *progress;    /* [dense files] */
    size_t first;                       /* the files before it were given to the reader, whole */
    uint64_t reading;                   /* pieces that the reader has */
    uint64_t verifying;                 /* jobs that the verify threads have */
    struct dense_progress *failed_file; /* of the first read that failed; NULL: none did */
    int result, status;                 /* of that read; and what it means, with the words */
    struct error error;
};

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

static size_t file_number(const struct dense_filling *filling, const struct dense_progress *progress)
{
    return (size_t)(progress - filling->progress);
}

static const struct safetensors *header_of(const struct dense_filling *filling, const struct dense_progress *progress)
{
    return &filling->load->copies->container->dense[file_number(filling, progress)].header;
}

static const struct copy_file *opened_file(const struct dense_filling *filling, const struct dense_progress *progress)
{
    const struct copies *copies = filling->load->copies;
    return &copies->copy[progress->copy].files[copies_dense_file(copies, file_number(filling, progress))];
}

static const char *path_of(const struct dense_filling *filling, const struct dense_progress *progress)
{
    const struct copies *copies = filling->load->copies;
    return copies_path(copies, progress->copy, copies_dense_file(copies, file_number(filling, progress)));
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

/* Nothing of the file is under way. */
static void read_anew(struct dense_progress *progress)
{
    progress->added = progress->whole = progress->verified = 0;
    progress->tensor = progress->job = 0;
    progress->damaged = NULL;
}

/* Chooses from where the file is read, and cuts it. */
static void begin_file(const struct dense_filling *filling, struct dense_progress *progress)
{
    const struct copies *copies = filling->load->copies;
    const struct safetensors *file = header_of(filling, progress);
    size_t f = file_number(filling, progress);
    uint64_t bytes = data_bytes(file);
    progress->copy = copies_choose(copies, filling->load->reader, copies->live & ~progress->tried,
                                   copies_dense_file(copies, f), bytes, false);
    const struct copy_file *opened = opened_file(filling, progress);
    for (uint64_t i = 0; i < progress->count; i++) {
        uint64_t done = i * PIECE_BYTES;
        progress->pieces[i] = (struct piece){.read = {.fd = opened->fd,
                                                      .buffer = filling->base + filling->plan->data[f] + done,
                                                      .bytes = bytes - done < PIECE_BYTES ? bytes - done : PIECE_BYTES,
                                                      .offset = file->data_offset + done},
                                             .owner = progress,
                                             .drive = opened->drive,
                                             .copy = (uint8_t)progress->copy};
    }
}

/* Gives the reader what is still to be read and has memory. */
static void add_pieces(struct dense_filling *filling)
{
    const char *ready = filling->base + atomic_load(&filling->memory.ready);
    for (; filling->first < filling->load->copies->container->dense_count; filling->first++) {
        struct dense_progress *progress = &filling->progress[filling->first];
        const char *data = filling->base + filling->plan->data[filling->first];
        uint64_t bytes = data_bytes(header_of(filling, progress));
        for (; progress->added < progress->count; progress->added++) {
            uint64_t end = (progress->added + 1) * PIECE_BYTES;
            if (data + (end < bytes ? end : bytes) > ready)
                return;
            if (progress->added == 0)
                begin_file(filling, progress);
            reader_add(filling->load->reader, &progress->pieces[progress->added]);
            filling->reading++;
        }
    }
}

/* Hands over what has come of the file's tensors since, to the thread of its drive. */
static void verify_more(struct dense_filling *filling, struct dense_progress *progress)
{
    size_t f = file_number(filling, progress);
    const struct dense_file *file = &filling->load->copies->container->dense[f];
    uint64_t there = progress->whole < progress->count ? progress->whole * PIECE_BYTES : data_bytes(&file->header);
    while (progress->tensor < file->header.count) {
        const struct tensor *tensor = progress->order[progress->tensor];
        uint64_t begin = tensor->offset - file->header.data_offset, end = begin + tensor->bytes,
                 from = progress->verified;
        uint64_t to = end < there ? end : there;
        if (to <= from && from < end)
            return;
        uint32_t index = (uint32_t)(tensor - file->header.tensors);
        struct verify_job *job = &progress->jobs[progress->job++];
        *job = (struct verify_job){.data = filling->base + filling->plan->data[f] + from,
                                   .bytes = to - from,
                                   .state = progress->state,
                                   .first = from == begin,
                                   .last = to == end,
                                   .expected = file->checksums[index],
                                   .owner = progress,
                                   .index = index};
        verifier_add(filling->load->verifiers[opened_file(filling, progress)->drive], job);
        filling->verifying++;
        progress->verified = to;
        progress->tensor += to == end;
    }
}

static void collect_verdicts(struct dense_filling *filling)
{
    for (uint32_t d = 0; d < READER_DRIVES && filling->load->verifiers[d]; d++) {
        for (struct verify_job *job = verifier_collect(filling->load->verifiers[d]); job; job = job->next) {
            struct dense_progress *progress = job->owner;
            filling->verifying--;
            if (!job->matches && !progress->damaged)
                progress->damaged = &header_of(filling, progress)->tensors[job->index];
        }
    }
}

static int piece_failure(const char *path, const struct piece *piece, struct error *ret_error)
{
    if (piece->status == -ENODATA)
        return error_set(ret_error, EIO, "%s: the file is truncated at byte %llu: " CONTAINER_MEND, path,
                         (unsigned long long)piece->read.offset);
    return error_set(ret_error, -piece->status, "%s: cannot be read at byte %llu: %s: check the drive (dmesg)", path,
                     (unsigned long long)piece->read.offset, strerror(-piece->status));
}

static void take_piece(struct dense_filling *filling, struct piece *piece)
{
    struct dense_progress *progress = piece->owner;
    filling->reading--;
    if (piece->status < 0 && !filling->failed_file) {
        filling->failed_file = progress;
        filling->result = piece->status;
        filling->status = piece_failure(path_of(filling, progress), piece, &filling->error);
    }
    if (piece->status < 0)
        return;
    piece->owner = NULL;
    while (progress->whole < progress->count && !progress->pieces[progress->whole].owner)
        progress->whole++;
    if (progress->whole == progress->count)
        atomic_fetch_add_explicit(&filling->load->control->iod.dense_bytes, data_bytes(header_of(filling, progress)),
                                  memory_order_relaxed);
    if (filling->load->verify)
        verify_more(filling, progress);
}

/* Reads and verifies what is not there, until all is or one read has failed. Nothing is under way when it returns, but where waiting
 * itself failed. */
static int read_wanted(struct dense_filling *filling, struct error *ret_error)
{
    struct reader *reader = filling->load->reader;
    int status = 0;
    filling->first = 0;
    filling->failed_file = NULL;
    while (true) {
        bool going_on = status == 0 && !filling->failed_file;
        if (going_on)
            add_pieces(filling);
        atomic_store(&filling->memory.waiting, filling->reading * PIECE_BYTES);
        collect_verdicts(filling);
        if (filling->reading == 0 && filling->verifying == 0 &&
            !(going_on && filling->first < filling->load->copies->container->dense_count))
            return status;
        struct piece *finished;
        uint32_t events;
        struct error ignored;
        int waited = reader_wait(reader, -1, &finished, &events, status ? &ignored : ret_error);
        if (waited < 0) {
            for (; filling->verifying > 0; collect_verdicts(filling))
                usleep(1000); /* jobs and data are the verify threads' until then */
            return status ? status : waited;
        }
        for (; finished; finished = finished->next)
            take_piece(filling, finished);
        status = heed_events(filling->load, events, status, ret_error);
        if (status == 0 && atomic_load(&filling->memory.failed)) {
            *ret_error = filling->memory.error;
            status = filling->memory.status;
        }
        if (status < 0 || filling->failed_file) {
            for (struct piece *piece = reader_withdraw(reader); piece; piece = piece->next)
                filling->reading--;
        }
    }
}

/* Each file that is not whole can still be read from a copy other than that one. */
static bool is_dispensable(const struct dense_filling *filling, uint32_t copy)
{
    const struct copies *copies = filling->load->copies;
    uint32_t others = copies->live & ~(1u << copy);
    bool all = true;
    for (size_t f = 0; f < copies->container->dense_count; f++) {
        const struct dense_progress *progress = &filling->progress[f];
        all = all && (progress->whole == progress->count || (others & ~progress->tried));
    }
    return all;
}

/* After a read that failed: what is not whole is read from another copy; none: the error. */
static int drop_copy(struct dense_filling *filling, struct error *ret_error)
{
    struct copies *copies = filling->load->copies;
    struct dense_progress *progress = filling->failed_file;
    bool fault = copies_is_fault(filling->result);
    if (fault)
        copies_count_failure(copies, progress->copy);
    if (!fault || !is_dispensable(filling, progress->copy)) {
        *ret_error = filling->error;
        return filling->status;
    }
    copies_drop(copies, progress->copy, copies_dense_file(copies, file_number(filling, progress)), filling->result);
    for (size_t f = 0; f < copies->container->dense_count; f++)
        if (filling->progress[f].whole < filling->progress[f].count)
            read_anew(&filling->progress[f]);
    return 0;
}

/* A file with a damaged tensor is read once more, from another copy; none: the error. */
static int look_elsewhere(struct dense_filling *filling, struct dense_progress *progress, struct error *ret_error)
{
    struct copies *copies = filling->load->copies;
    const char *path = path_of(filling, progress), *name = progress->damaged->name;
    progress->tried |= 1u << progress->copy;
    uint32_t others = copies->live & ~progress->tried;
    copies_count_wrong(copies, progress->copy);
    if (!others)
        return error_set(ret_error, EBADMSG, "%s: tensor %s: %s: " CONTAINER_REPLACE, path, name,
                         container_fault(EBADMSG));
    char line[1200];
    snprintf(line, sizeof(line), "%s: tensor %s: %s: read from %s instead; " CONTAINER_REPLACE, path, name,
             container_fault(EBADMSG), copies->copy[__builtin_ctz(others)].path);
    copies->log(line);
    read_anew(progress);
    return 0;
}

static int read_until_good(struct dense_filling *filling, struct error *ret_error)
{
    size_t count = filling->load->copies->container->dense_count;
    int status = 0;
    for (bool again = true; status == 0 && again;) {
        status = read_wanted(filling, ret_error);
        again = filling->failed_file != NULL;
        if (status == 0 && again)
            status = drop_copy(filling, ret_error);
        for (size_t f = 0; status == 0 && f < count; f++) {
            if (!filling->progress[f].damaged)
                continue;
            again = true;
            status = look_elsewhere(filling, &filling->progress[f], ret_error);
        }
    }
    return status;
}

static int compare_places(const void *a, const void *b)
{
    const struct tensor *x = *(const struct tensor *const *)a, *y = *(const struct tensor *const *)b;
    if (x->offset != y->offset)
        return x->offset < y->offset ? -1 : 1;
    return x->bytes < y->bytes ? -1 : x->bytes > y->bytes; /* an empty one stands before its neighbour */
}

static int open_progress(struct dense_progress *progress, const struct safetensors *file)
{
    progress->count = (data_bytes(file) + PIECE_BYTES - 1) / PIECE_BYTES;
    progress->pieces = calloc(progress->count + 1, sizeof(*progress->pieces));
    progress->order = calloc(file->count + 1, sizeof(*progress->order));
    progress->jobs = calloc(progress->count + file->count + 1, sizeof(*progress->jobs));
    progress->state = XXH3_createState();
    if (!progress->pieces || !progress->order || !progress->jobs || !progress->state)
        return -ENOMEM;
    for (size_t t = 0; t < file->count; t++)
        progress->order[t] = &file->tensors[t];
    qsort(progress->order, file->count, sizeof(const struct tensor *), compare_places);
    return 0;
}

static void close_progress(struct dense_progress *progress, bool reading)
{
    if (!reading) /* else the process ends with reads in flight, and their pieces must stay */
        free(progress->pieces);
    free(progress->order);
    free(progress->jobs);
    XXH3_freeState(progress->state);
}

static int fill_data(struct dense_filling *filling, struct error *ret_error)
{
    const struct container *container = filling->load->copies->container;
    _cleanup_free_ struct dense_progress *progress = calloc(container->dense_count + 1, sizeof(*progress));
    int status = progress ? 0 : -ENOMEM;
    for (size_t f = 0; status == 0 && f < container->dense_count; f++)
        status = open_progress(&progress[f], &container->dense[f].header);
    filling->progress = progress;
    status = status == 0 ? read_until_good(filling, ret_error)
                         : error_set(ret_error, ENOMEM, "dense weights: out of memory");
    for (size_t f = 0; progress && f < container->dense_count; f++)
        close_progress(&progress[f], filling->load->reader->flying > 0);
    return status;
}

/* Fills the data while the segment gets its memory. */
static int fill_segment(const struct dense_load *load, const struct dense_plan *plan, const struct segment *segment,
                        struct error *ret_error)
{
    struct dense_filling filling = {
        .load = load, .plan = plan, .base = segment->base, .memory = {.load = load, .segment = segment}};
    struct dense_memory *memory = &filling.memory;
    atomic_init(&memory->ready, plan->head_bytes);
    bool ahead = pthread_create(&memory->thread, NULL, make_memory, memory) == 0;
    if (!ahead) /* all of it first, then */
        make_memory(memory);
    int status = fill_data(&filling, ret_error);
    atomic_store(&memory->stop, true);
    if (ahead)
        pthread_join(memory->thread, NULL);
    return status;
}

int dense_load(const struct dense_load *load, struct error *ret_error)
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
