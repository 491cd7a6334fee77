/* The I/O daemon: start, the loop, the end.
 *
 *   main.c        heritage, signals, lines on stderr
 *   loader.c      here: what stands when; the loop that sleeps in one place and looks at everything when it wakes
 *   requests.c    who wants which expert: one demand an expert, one queue
 *   placement.c   which expert has which slot: taking over a pool, giving, evicting, quarantine
 *   loads.c       the experts that are being read: pieces in, slices to the verify thread, READY or FAILED out
 *   dense_load.c  the resident weights, once at start
 *   reader.c      whole pieces out of partial reads, bounds of what is in flight
 *   method_uring.c, method_pread.c  two ways to read, one table (method.h)
 *   verify.c      the thread that computes checksums
 *   disk.c        opening files with O_DIRECT
 *
 * A miss passes through in this order: ring -> requests -> placement (slot LOADING, map) -> loads -> reader -> method
 * -> reader -> loads -> verify -> loads -> placement (READY) -> `published` of the workers that asked. */
#include "io_daemon/loader.h"

#include "io_daemon/dense_load.h"
#include "io_daemon/disk.h"
#include "io_daemon/loads.h"
#include "proto/cleanup.h"

#include <fcntl.h>
#include <pthread.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/file.h>

#define LOCK_FILE "iod.lock"
#define LOCK_RETRY_MS 5
#define LOCK_PATIENCE_NS (UINT64_C(60) * 1000000000u) /* after that a hanging lock no longer stops loads */
#define LOCK_SLOW_RETRY_MS 1000
#define STARVED_RETRY_MS 100 /* a worker that moves on without asking does not ring */

struct loader {
    const char *instance;
    void (*log)(const char *line);
    struct control *control;
    struct facts facts;
    struct container *container;
    struct pool pool;
    int doorbell_fd, own_doorbell_fd, stop_fd;
    int lock_fd;
    bool lock_held, lock_given_up;
    uint64_t lock_deadline_ns;
    int *files; /* [MoE layers] */
    bool direct;
    struct reader reader;
    struct verifier *verifier;
    struct requests requests;
    struct placement placement;
    struct loads loads;
    bool liar[MAX_WORKERS]; /* logged once */
    bool stopping;
    /* the thread that grows the pool */
    pthread_t grower;
    bool growing, growth_reported;
    _Atomic bool growth_stop, growth_failed; /* failed: `growth_error` is written */
    struct error growth_error;
};

__attribute__((format(printf, 2, 3))) static void log_line(const struct loader *loader, const char *format, ...)
{
    char line[1200];
    va_list args;
    va_start(args, format);
    vsnprintf(line, sizeof(line), format, args);
    va_end(args);
    loader->log(line);
}

static void ring_doorbell(const struct loader *loader)
{
    uint64_t one = 1;
    /* fails only when the counter is full, and then it rings already */
    (void)!write(loader->doorbell_fd, &one, sizeof(one));
}

static void empty_doorbell(const struct loader *loader)
{
    uint64_t rings;
    (void)!read(loader->doorbell_fd, &rings, sizeof(rings)); /* non-blocking; empty already is fine */
}

/* --- start --- */

static int open_doorbell(struct loader *loader, const struct loader_options *options, struct error *ret_error)
{
    loader->doorbell_fd = options->doorbell_fd;
    if (loader->doorbell_fd < 0)
        loader->doorbell_fd = loader->own_doorbell_fd = eventfd(0, EFD_CLOEXEC);
    int flags = fcntl(loader->doorbell_fd, F_GETFL);
    if (flags < 0 || fcntl(loader->doorbell_fd, F_SETFL, flags | O_NONBLOCK) < 0)
        return error_set(ret_error, errno, "doorbell: descriptor %d is not usable: %s", loader->doorbell_fd,
                         strerror(errno));
    return 0;
}

static int attach_instance(struct loader *loader, struct error *ret_error)
{
    int status = control_attach(loader->instance, &loader->control, &loader->facts, ret_error);
    if (status == 0)
        status = container_open(loader->facts.container, &loader->container, ret_error);
    if (status < 0)
        return status;
    const struct container *container = loader->container;
    if (container->identity != loader->facts.identity)
        return error_set(ret_error, ESTALE,
                         "%s: is not the container that the instance was started with: run `calypte down` and `calypte "
                         "up` again",
                         container->path);
    status = pool_attach(loader->instance, &loader->pool, ret_error);
    if (status < 0)
        return status;
    const struct pool *pool = &loader->pool;
    if (pool->expert_count != container->expert_count * container->config.experts ||
        pool->slice_bytes != container->slice_bytes || pool->slot_count != loader->facts.pool_slots ||
        pool->nodes != loader->facts.nodes)
        return error_set(
            ret_error, EBADMSG,
            "pool of instance %s was made for another container: run `calypte down` and `calypte up` again",
            loader->instance);
    return 0;
}

static bool try_lock(struct loader *loader)
{
    if (!loader->lock_held && flock(loader->lock_fd, LOCK_EX | LOCK_NB) == 0)
        loader->lock_held = true;
    return loader->lock_held;
}

static int open_lock(struct loader *loader, const char *rundir, struct error *ret_error)
{
    _cleanup_free_ char *path = NULL;
    if (asprintf(&path, "%s/" LOCK_FILE, rundir) < 0) {
        path = NULL;
        return error_set(ret_error, ENOMEM, "lock file: out of memory");
    }
    loader->lock_fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (loader->lock_fd < 0)
        return error_set(ret_error, errno, "%s cannot be opened: %s", path, strerror(errno));
    loader->lock_deadline_ns = monotonic_ns() + LOCK_PATIENCE_NS;
    try_lock(loader);
    return 0;
}

static int open_method(struct loader *loader, const struct io_method *method, struct error *ret_error)
{
    struct io_setup setup = {.doorbell_fd = loader->doorbell_fd,
                             .stop_fd = loader->stop_fd,
                             .lock_fd = loader->lock_fd,
                             .depth = READER_DEPTH};
    bool may_fall_back = !method && loader->facts.io != IO_PREAD;
    if (!method)
        method = loader->facts.io == IO_PREAD ? &io_method_pread : &io_method_uring;
    int status = method->open(&setup, &loader->reader.io, ret_error);
    if ((status == -EPERM || status == -ENOSYS) && may_fall_back) {
        log_line(loader, "%s: reading with pread instead", ret_error->text);
        method = &io_method_pread;
        status = method->open(&setup, &loader->reader.io, ret_error);
    }
    if (status < 0)
        return status;
    struct iod_line *counters = &loader->control->iod;
    loader->reader.method = method;
    loader->reader.counters = (struct reader_counters){&counters->reads, &counters->load_bytes, &counters->read_ns};
    atomic_store(&counters->method, method->choice);
    return 0;
}

static int open_files(struct loader *loader, struct error *ret_error)
{
    size_t count = loader->container->expert_count;
    loader->direct = true;
    loader->files = calloc(count, sizeof(*loader->files));
    if (!loader->files)
        return error_set(ret_error, ENOMEM, "expert files: out of memory");
    for (size_t i = 0; i < count; i++)
        loader->files[i] = -1;
    for (size_t i = 0; i < count; i++) {
        bool direct;
        loader->files[i] = disk_open(loader->container->experts[i].header.path, &direct, ret_error);
        if (loader->files[i] < 0)
            return loader->files[i];
        loader->direct = loader->direct && direct;
    }
    return 0;
}

static int load_dense(struct loader *loader, struct error *ret_error)
{
    struct dense_load load = {.instance = loader->instance,
                              .container = loader->container,
                              .reader = &loader->reader,
                              .verifier = loader->verifier,
                              .control = loader->control,
                              .doorbell_fd = loader->doorbell_fd,
                              .hugepages = loader->facts.hugepages,
                              .direct = loader->direct};
    int status = dense_load(&load, ret_error);
    loader->direct = load.direct;
    if (status == 0 && !loader->direct)
        log_line(loader,
                 "%s: its file system refuses O_DIRECT: reading through the page cache, which costs memory and speed",
                 loader->container->path);
    atomic_store(&loader->control->iod.direct, loader->direct);
    return status;
}

static int open_books(struct loader *loader, struct error *ret_error)
{
    int status =
        requests_open(loader->control, loader->facts.workers, loader->pool.expert_count, &loader->requests, ret_error);
    if (status < 0)
        return status;
    status = placement_open(&loader->pool, &loader->requests, &loader->control->iod.evictions, &loader->placement,
                            ret_error);
    if (status < 0)
        return status;
    loader->loads.container = loader->container;
    loader->loads.placement = &loader->placement;
    loader->loads.requests = &loader->requests;
    loader->loads.verifier = loader->verifier;
    loader->loads.control = loader->control;
    loader->loads.files = loader->files;
    loader->loads.log = loader->log;
    return loads_open(&loader->loads, ret_error);
}

static void *grow_pool(void *argument)
{
    struct loader *loader = argument;
    int status = 0;
    while (status == 0 && !atomic_load(&loader->growth_stop)) {
        status = pool_grow(&loader->pool, loader->facts.hugepages, &loader->growth_error);
        if (status < 0)
            atomic_store(&loader->growth_failed, true);
        ring_doorbell(loader);
    }
    return NULL;
}

/* The first object now, the rest behind. */
static int open_pool(struct loader *loader, struct error *ret_error)
{
    int status = pool_slots_ready(&loader->pool) ? 0 : pool_grow(&loader->pool, loader->facts.hugepages, ret_error);
    if (status >= 0)
        status = pool_attach_objects(&loader->pool, ret_error);
    /* Workers may start when a step can: a wave needs a slot for each expert of one row. */
    while (status >= 0 && pool_slots_ready(&loader->pool) < loader->container->config.top_k) {
        status = pool_grow(&loader->pool, loader->facts.hugepages, ret_error);
        if (status >= 0)
            status = pool_attach_objects(&loader->pool, ret_error);
    }
    if (status < 0 || loader->pool.attached == loader->pool.object_count)
        return status;
    int code = pthread_create(&loader->grower, NULL, grow_pool, loader);
    if (code)
        return error_set(ret_error, code, "thread that grows the pool cannot be started: %s", strerror(code));
    loader->growing = true;
    return 0;
}

static int open_all(struct loader *loader, const struct loader_options *options, struct error *ret_error)
{
    int status = open_doorbell(loader, options, ret_error);
    if (status == 0)
        status = attach_instance(loader, ret_error);
    if (status == 0)
        status = open_lock(loader, options->rundir, ret_error);
    if (status == 0)
        status = open_method(loader, options->method, ret_error);
    if (status == 0)
        status = verifier_open(loader->doorbell_fd, &loader->control->iod.verified_bytes, &loader->verifier, ret_error);
    if (status == 0)
        status = open_files(loader, ret_error);
    if (status == 0)
        status = load_dense(loader, ret_error);
    if (status == 0)
        status = open_books(loader, ret_error);
    return status == 0 ? open_pool(loader, ret_error) : status;
}

int loader_open(const struct loader_options *options, struct loader **ret_loader, struct error *ret_error)
{
    struct loader *loader = calloc(1, sizeof(*loader));
    if (!loader)
        return error_set(ret_error, ENOMEM, "out of memory");
    loader->instance = options->instance;
    loader->log = options->log;
    loader->stop_fd = options->stop_fd;
    loader->lock_fd = loader->own_doorbell_fd = -1;
    loader->loads.reader = &loader->reader; /* loader_close cancels loads however far we came */
    int status = open_all(loader, options, ret_error);
    if (status < 0) {
        loader_close(loader);
        return status;
    }
    *ret_loader = loader;
    return 0;
}

/* --- the loop --- */

static void accept_request(struct loader *loader, uint32_t worker, const struct expert_request *request)
{
    int status = requests_note(&loader->requests, worker, request);
    if (status == -EBADMSG && !loader->liar[worker]) {
        log_line(loader, "worker %u asked for expert %u of %u: ignored", worker, request->expert,
                 loader->pool.expert_count);
        loader->liar[worker] = true;
    }
    if (status < 0)
        return;
    switch (placement_find(&loader->placement, request->expert)) {
    case PLACE_READY: notify_demanders(&loader->requests, request->expert); break;
    case PLACE_LOADING: /* its end notifies whoever wants it then */ break;
    case PLACE_FAILED: /* asked for again: try again */
        placement_forget_failed(&loader->placement, request->expert);
        requests_append(&loader->requests, request->expert);
        break;
    case PLACE_NOWHERE: requests_append(&loader->requests, request->expert); break;
    }
}

/* Empties the rings. True when there was something. */
static bool collect_requests(struct loader *loader)
{
    bool any = false;
    for (uint32_t w = 0; w < loader->facts.workers; w++) {
        struct request_ring *ring = &loader->control->rings[w];
        struct expert_request request;
        int status = 0;
        for (uint32_t taken = 0; taken < RING_ENTRIES && (status = ring_pop(ring, &request)) > 0; taken++) {
            accept_request(loader, w, &request);
            any = true;
        }
        if (status < 0) {
            if (!loader->liar[w])
                log_line(loader, "request ring of worker %u is damaged: its requests are forgotten", w);
            loader->liar[w] = true;
            ring_drain(ring);
        }
    }
    return any;
}

static void collect_verdicts(struct loader *loader)
{
    for (struct verify_job *job = verifier_collect(loader->verifier); job;) {
        struct verify_job *next = job->next; /* the load, and the job in it, may be reused */
        loads_verdict(&loader->loads, job);
        job = next;
    }
}

static void collect_pieces(struct loader *loader, struct piece *piece)
{
    while (piece) {
        struct piece *next = piece->next;
        loads_piece_done(&loader->loads, piece);
        piece = next;
    }
}

static void collect_growth(struct loader *loader)
{
    struct error error;
    if (pool_attach_objects(&loader->pool, &error) < 0 && !loader->growth_reported) {
        log_line(loader, "%s", error.text);
        loader->growth_reported = true;
    }
    if (atomic_load(&loader->growth_failed) && !loader->growth_reported) {
        log_line(loader, "the pool stays at %u of %u slots: %s", pool_slots_ready(&loader->pool),
                 loader->pool.slot_count, loader->growth_error.text);
        loader->growth_reported = true;
    }
}

/* True when loads may be started: while a dead predecessor's reads may still be in flight, a second death would leave
 * nobody who knows about ours, so nothing is read into the pool before the lock is ours. */
static bool check_lock(struct loader *loader)
{
    bool may_load = loader->lock_held || loader->lock_given_up;
    if (!loader->lock_held && try_lock(loader)) {
        placement_end_quarantine(&loader->placement);
        may_load = true;
    } else if (!may_load && monotonic_ns() > loader->lock_deadline_ns) {
        log_line(
            loader,
            "the lock of the predecessor is still held: its reads cannot be in flight so long, going on without it");
        placement_end_quarantine(&loader->placement);
        loader->lock_given_up = may_load = true;
    }
    return may_load;
}

/* Starts loads for the demands in the queue while the disk has room. -EAGAIN: a demand found no slot. */
static int start_loads(struct loader *loader)
{
    while (loads_has_room(&loader->loads)) {
        uint32_t expert = requests_head(&loader->requests);
        if (expert == QUEUE_END)
            return 0;
        if (placement_find(&loader->placement, expert) == PLACE_NOWHERE) {
            struct slot_ref ref;
            int status = placement_take(&loader->placement, expert, &ref);
            if (status < 0)
                return status;
            loads_begin(&loader->loads, expert, ref);
        }
        requests_remove_head(&loader->requests);
    }
    return 0;
}

/* The same with the flag that makes an unpin ring: raised before the second look, so that no unpin falls between. */
static bool serve_demands(struct loader *loader)
{
    _Atomic uint32_t *starved = &loader->control->iod.starved;
    int status = start_loads(loader);
    if (status < 0) {
        atomic_store(starved, 1);
        status = start_loads(loader);
    }
    if (status == 0 && atomic_load_explicit(starved, memory_order_relaxed))
        atomic_store(starved, 0);
    return status < 0;
}

static int sleep_for_events(struct loader *loader, int timeout_ms, struct error *ret_error)
{
    _Atomic uint32_t *asleep = &loader->control->iod.asleep;
    struct piece *finished = NULL;
    uint32_t events = 0;
    /* Raised before the last look at the rings, so that no request falls between. */
    atomic_store(asleep, 1);
    int status = 0;
    if (!collect_requests(loader))
        status = reader_wait(&loader->reader, timeout_ms, &finished, &events, ret_error);
    atomic_store(asleep, 0);
    if (events & IO_EVENT_DOORBELL)
        empty_doorbell(loader);
    if (events & IO_EVENT_STOP)
        loader->stopping = true;
    collect_pieces(loader, finished);
    return status;
}

int loader_run(struct loader *loader, struct error *ret_error)
{
    if (loader->lock_held)
        placement_end_quarantine(&loader->placement);
    int status = 0;
    while (!loader->stopping && status == 0) {
        bool may_load = check_lock(loader);
        collect_growth(loader);
        collect_requests(loader);
        collect_verdicts(loader);
        bool starved = may_load && serve_demands(loader);
        int timeout_ms = starved ? STARVED_RETRY_MS : -1;
        if (!loader->lock_held)
            timeout_ms = may_load ? LOCK_SLOW_RETRY_MS : LOCK_RETRY_MS;
        status = sleep_for_events(loader, timeout_ms, ret_error);
    }
    return status;
}

/* --- the end --- */

/* False when waiting itself failed: reads are in flight, and the memory that they fill must stay until the process
 * ends. */
static bool wait_for_reads(struct loader *loader)
{
    loads_cancel(&loader->loads);
    while (loader->reader.flying) {
        struct piece *finished;
        uint32_t events;
        struct error ignored;
        if (reader_wait(&loader->reader, -1, &finished, &events, &ignored) < 0)
            return false;
        if (events & IO_EVENT_DOORBELL)
            empty_doorbell(loader);
        reader_withdraw(&loader->reader); /* rests of short reads */
    }
    return true;
}

void loader_close(struct loader *loader)
{
    if (!loader)
        return;
    atomic_store(&loader->growth_stop, true);
    if (loader->growing)
        pthread_join(loader->grower, NULL);
    if (loader->reader.method && !wait_for_reads(loader))
        return;
    verifier_close(loader->verifier);
    loads_abandon(&loader->loads);
    if (loader->reader.method)
        loader->reader.method->close(loader->reader.io);
    loads_close(&loader->loads);
    placement_close(&loader->placement);
    requests_close(&loader->requests);
    for (size_t i = 0; loader->files && i < loader->container->expert_count; i++)
        close_fdp(&loader->files[i]);
    free(loader->files);
    pool_detach(&loader->pool);
    container_close(loader->container);
    if (loader->control)
        control_detach(loader->control);
    close_fdp(&loader->lock_fd);
    close_fdp(&loader->own_doorbell_fd);
    free(loader);
}
