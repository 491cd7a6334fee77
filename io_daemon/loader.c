/* The I/O daemon: start, the loop, the end.
 *
 *   main.c        heritage, signals, lines on stderr
 *   loader.c      here: what stands when; the loop that sleeps in one place and looks at everything when it wakes
 *   requests.c    who wants which expert: one demand an expert, queues by priority
 *   follower.c    reads the use log: what the policy and the two below know of experts comes from there
 *   guesses.c     whether lookaheads pay
 *   learning.c, learning_record.c  what is remembered of experts over sessions
 *   placement.c   which expert has which slot: taking over a pool, giving, evicting, quarantine; shm/lfru.c is the policy
 *   size.c        how many slots have memory: growing behind the first object, shrinking, as the supervisor says
 *   holds.c       experts that the user holds in the pool
 *   warmup.c      filling the slots that come when the pool grows
 *   buffers.c     the part of the pool that io_uring knows in advance
 *   loads.c       the experts that are being read: pieces in, slices to the verify thread, READY or FAILED out
 *   dense_load.c  the resident weights, once at start
 *   copies.c      the files of the container and of its mirror, and which of them is read
 *   reader.c      whole pieces out of partial reads, bounds of what is in flight
 *   method_uring.c, method_pread.c  two ways to read, one table (method.h)
 *   verify.c      the thread that computes checksums
 *   disk.c        opening files with O_DIRECT
 *
 * A miss passes through in this order: ring -> requests -> placement (slot LOADING, map) -> loads -> reader -> method
 * -> reader -> loads -> verify -> loads -> placement (READY) -> `published` of the workers that asked. */
#include "io_daemon/loader.h"

#include "io_daemon/dense_load.h"
#include "io_daemon/follower.h"
#include "io_daemon/holds.h"
#include "io_daemon/loads.h"
#include "io_daemon/size.h"
#include "io_daemon/warmup.h"
#include "proto/cleanup.h"

#include <fcntl.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/file.h>

#define LOCK_FILE "iod.lock"
#define CALM_NS UINT64_C(100000000) /* longer than a step is without a demand */
#define LOCK_RETRY_MS 5
#define LOCK_PATIENCE_NS (UINT64_C(60) * 1000000000u) /* after that a hanging lock no longer stops loads */
#define LOCK_SLOW_RETRY_MS 1000
#define STARVED_RETRY_MS 100 /* a worker that moves on without asking does not ring */
/* Of what many sessions have counted a 16th is believed: about what this session's policy, whose clock is evictions, would
 * have kept of it where every fourth use misses. So what is used now soon counts more. */
#define REMEMBERED 16.0f

struct loader {
    const char *instance;
    void (*log)(const char *line);
    struct control *control;
    struct facts facts;
    struct copies copies;
    const struct container *container; /* what the copies have in common */
    struct pool pool;
    int doorbell_fd, own_doorbell_fd, stop_fd;
    int lock_fd;
    bool lock_held, lock_given_up;
    uint64_t lock_deadline_ns;
    struct reader reader;
    struct verifier *verifiers[READER_DRIVES]; /* [drives of the copies], one thread each */
    struct requests requests;
    struct placement placement;
    struct buffers buffers;
    struct loads loads;
    struct guesses guesses;
    uint64_t demanded_ns; /* when a demand was outstanding last */
    struct follower follower;
    bool liar[MAX_WORKERS]; /* logged once */
    bool stopping;
    struct size size;
    struct holds holds;
    struct warmup warmup;
    struct learning *learning; /* NULL: nothing is remembered */
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
        status = copies_open(&loader->copies, &loader->facts, loader->control, loader->log, ret_error);
    if (status < 0)
        return status;
    const struct container *container = loader->container = loader->copies.container;
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
    loader->reader.counters =
        (struct reader_counters){&counters->reads, &counters->load_bytes, &counters->read_ns, &counters->read_us};
    atomic_store(&counters->method, method->choice);
    return 0;
}

/* Reads of registered files spare the kernel a look-up each. */
static int register_files(struct loader *loader, struct error *ret_error)
{
    if (!loader->reader.method->register_files)
        return 0;
    _cleanup_free_ int *fds = calloc(MAX_COPIES * loader->copies.file_count + 1, sizeof(*fds));
    if (!fds)
        return error_set(ret_error, ENOMEM, "files of the container: out of memory");
    uint32_t count = copies_descriptors(&loader->copies, fds);
    int status = loader->reader.method->register_files(loader->reader.io, fds, count);
    if (status == -EBADF)
        return error_set(ret_error, EBADF, "io_uring does not hold the lock file any more");
    if (status < 0)
        log_line(
            loader,
            "the %u files of the container are not registered (%s): reading goes on, with a little more work a read",
            count, strerror(-status));
    return 0;
}

static int open_verifiers(struct loader *loader, struct error *ret_error)
{
    int status = 0;
    for (uint32_t d = 0; status == 0 && (d == 0 || d < loader->copies.drive_count); d++)
        status =
            verifier_open(loader->doorbell_fd, &loader->control->iod.verified_bytes, &loader->verifiers[d], ret_error);
    return status;
}

static int load_dense(struct loader *loader, struct error *ret_error)
{
    struct dense_load load = {.instance = loader->instance,
                              .copies = &loader->copies,
                              .reader = &loader->reader,
                              .verifiers = loader->verifiers,
                              .control = loader->control,
                              .doorbell_fd = loader->doorbell_fd,
                              .verify = loader->facts.verify != VERIFY_OFF,
                              .hugepages = loader->facts.hugepages};
    atomic_store(&loader->control->iod.direct, loader->copies.direct);
    uint64_t begun_ns = monotonic_ns(), before = atomic_load(&loader->control->iod.dense_bytes);
    int status = dense_load(&load, ret_error);
    double gb = (double)(atomic_load(&loader->control->iod.dense_bytes) - before) * 1e-9;
    double seconds = (double)(monotonic_ns() - begun_ns) * 1e-9;
    if (status == 0 && gb > 0)
        log_line(loader, "dense weights: %.3f GB in %.3f s, %.2f GB/s", gb, seconds, gb / seconds);
    if (status == 0 && !loader->copies.direct)
        log_line(loader,
                 "%s: its file system refuses O_DIRECT: reading through the page cache, which costs memory and speed",
                 loader->container->path);
    return status;
}

/* What earlier sessions used: the policy begins with it, and it is read when nothing else is to do. */
static int open_learning(struct loader *loader, const char *rundir, struct error *ret_error)
{
    char path[PATH_MAX];
    struct iod_line *line = &loader->control->iod;
    struct learning_options options = {.path = path,
                                       .identity = loader->container->identity,
                                       .experts = loader->pool.expert_count,
                                       .read_only = loader->facts.learning == LEARNING_READ,
                                       .done = &line->learning,
                                       .refused = &line->learning_refused,
                                       .log = loader->log};
    atomic_store(&line->learning, LEARNING_OFF);
    atomic_store(&line->learning_refused, 0);
    if (loader->facts.learning == LEARNING_OFF)
        return 0;
    if (learning_path(rundir, options.identity, path, ret_error) < 0) {
        log_line(loader, "%s: the use of the experts is not remembered", ret_error->text);
        atomic_store(&line->learning_refused, ENAMETOOLONG);
        return 0;
    }
    int status = learning_open(&options, &loader->learning, ret_error);
    if (status < 0)
        return status;
    _cleanup_free_ uint32_t *hottest = calloc(options.experts, sizeof(*hottest));
    int count = hottest ? learning_hottest(loader->learning, options.experts, hottest) : -ENOMEM;
    if (count < 0)
        return error_set(ret_error, ENOMEM, "experts of earlier sessions: out of memory");
    for (int i = 0; i < count; i++) {
        lfru_set_heat(loader->placement.lfru, hottest[i], learning_heat(loader->learning, hottest[i]) / REMEMBERED);
        requests_warm(&loader->requests, hottest[i]);
    }
    return 0;
}

static int open_books(struct loader *loader, const char *rundir, struct error *ret_error)
{
    int status =
        requests_open(loader->control, loader->facts.workers, loader->pool.expert_count, &loader->requests, ret_error);
    if (status < 0)
        return status;
    status = placement_open(&loader->pool, &loader->container->config, &loader->requests, &loader->control->iod,
                            &loader->placement, ret_error);
    if (status < 0)
        return status;
    loader->buffers = (struct buffers){.pool = &loader->pool,
                                       .reader = &loader->reader,
                                       .bytes = &loader->control->iod.registered_bytes,
                                       .refusal = &loader->control->iod.registering_refused,
                                       .log = loader->log};
    status = buffers_open(&loader->buffers, ret_error);
    if (status < 0)
        return status;
    status = open_learning(loader, rundir, ret_error);
    if (status < 0)
        return status;
    follower_open(loader->control, &loader->placement, &loader->guesses, loader->learning, &loader->follower);
    guesses_open(&loader->guesses, monotonic_ns());
    loader->loads.copies = &loader->copies;
    loader->loads.placement = &loader->placement;
    loader->loads.requests = &loader->requests;
    loader->loads.buffers = &loader->buffers;
    loader->loads.verifiers = loader->verifiers;
    loader->loads.verify = (enum verify_choice)loader->facts.verify;
    loader->loads.control = loader->control;
    loader->loads.log = loader->log;
    return loads_open(&loader->loads, ret_error);
}

/* The first object now, the rest behind. Workers may start when a step can: a wave needs a slot for each expert of one
 * row. */
static int open_pool(struct loader *loader, struct error *ret_error)
{
    struct size *size = &loader->size;
    size->pool = &loader->pool;
    size->placement = &loader->placement;
    size->buffers = &loader->buffers;
    size->control = loader->control;
    size->least = loader->container->config.top_k;
    size->hugepages = loader->facts.hugepages;
    size->doorbell_fd = loader->doorbell_fd;
    size->log = loader->log;
    int status = size_open(size, ret_error);
    if (status == 0)
        status = holds_open(loader->control, &loader->placement, &loader->requests, &loader->holds, ret_error);
    if (status == 0)
        status = warmup_open(&loader->placement, &loader->requests, size_wanted(size), &loader->warmup, ret_error);
    return status;
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
        status = register_files(loader, ret_error);
    if (status == 0)
        status = open_verifiers(loader, ret_error);
    if (status == 0)
        status = load_dense(loader, ret_error);
    if (status == 0)
        status = open_books(loader, options->rundir, ret_error);
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
    loader->reader.most_bytes = options->in_flight;
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

static void accept_demand(struct loader *loader, uint32_t expert)
{
    placement_demand(&loader->placement, expert);
    switch (placement_find(&loader->placement, expert)) {
    case PLACE_READY: notify_demanders(&loader->requests, expert); return;
    case PLACE_LOADING: /* its end notifies whoever wants it then */ loads_promote(&loader->loads, expert); return;
    case PLACE_FAILED: /* asked for again: try again */ placement_forget_failed(&loader->placement, expert); break;
    case PLACE_NOWHERE: break;
    }
    requests_append(&loader->requests, expert, PRIORITY_DEMAND);
}

static void accept_lookahead(struct loader *loader, uint32_t expert)
{
    if (placement_find(&loader->placement, expert) != PLACE_NOWHERE ||
        loader->requests.wishes[expert].queue <= PRIORITY_LOOKAHEAD)
        return;
    atomic_fetch_add_explicit(&loader->control->iod.guesses_asked, 1, memory_order_relaxed);
    requests_append(&loader->requests, expert, PRIORITY_LOOKAHEAD);
}

static void accept_request(struct loader *loader, uint32_t worker, const struct expert_request *request)
{
    int status = requests_note(&loader->requests, worker, request);
    if (status == -EBADMSG && !loader->liar[worker]) {
        log_line(loader, "worker %u asked for expert %u of %u, kind %u: ignored", worker, request->expert,
                 loader->pool.expert_count, request->kind);
        loader->liar[worker] = true;
    }
    if (status == 0 && request->kind == KIND_DEMAND)
        accept_demand(loader, request->expert);
    else if (status == 0)
        accept_lookahead(loader, request->expert);
}

/* Empties the rings. True when there was something. The uses are read after that: a worker writes those of a layer before it
 * asks for what the layer misses, so that the policy knows them when it chooses victims. */
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
    follower_read(&loader->follower);
    return any;
}

static void collect_verdicts(struct loader *loader)
{
    for (uint32_t d = 0; d < READER_DRIVES && loader->verifiers[d]; d++) {
        for (struct verify_job *job = verifier_collect(loader->verifiers[d]); job;) {
            struct verify_job *next = job->next; /* the load, and the job in it, may be reused */
            loads_verdict(&loader->loads, job);
            job = next;
        }
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
static int start_demands(struct loader *loader)
{
    uint32_t expert;
    while ((expert = requests_head(&loader->requests, PRIORITY_DEMAND)) != QUEUE_END) {
        if (!loads_has_room(&loader->loads, expert, PRIORITY_DEMAND))
            return 0;
        if (placement_find(&loader->placement, expert) == PLACE_NOWHERE) {
            struct slot_ref ref;
            int status = placement_take(&loader->placement, expert, PRIORITY_DEMAND, &ref);
            if (status < 0)
                return status;
            loads_begin(&loader->loads, expert, ref, PRIORITY_DEMAND);
        }
        requests_remove(&loader->requests, expert);
    }
    return 0;
}

static bool pool_is_growing(const struct loader *loader)
{
    return size_is_growing(&loader->size);
}

/* The same for guesses, while no demand waits. One that finds no slot is given up, but while the pool still grows the
 * warm-up waits for the slots to come. */
static void start_guesses(struct loader *loader, enum priority priority)
{
    struct requests *requests = &loader->requests;
    uint32_t expert;
    while (requests->queued[PRIORITY_DEMAND] == 0 && (expert = requests_head(requests, priority)) != QUEUE_END &&
           loads_has_room(&loader->loads, expert, priority)) {
        int status = -ENOSPC;
        struct slot_ref ref;
        if (placement_find(&loader->placement, expert) == PLACE_NOWHERE) {
            status = placement_take(&loader->placement, expert, priority, &ref);
            if (status == -EBUSY || (status < 0 && priority == PRIORITY_WARMUP && pool_is_growing(loader)))
                return;
        }
        if (status < 0) {
            requests_drop(requests, expert);
            continue;
        }
        requests_remove(requests, expert);
        loads_begin(&loader->loads, expert, ref, priority);
    }
}

/* All queues, the demands with the flag that makes an unpin ring: raised before the second look, so that no unpin falls
 * between. True: a demand found no slot. */
static bool serve_queues(struct loader *loader)
{
    _Atomic uint32_t *starved = &loader->control->iod.starved;
    int status = start_demands(loader);
    if (status < 0) {
        atomic_store(starved, 1);
        status = start_demands(loader);
    }
    if (status == 0 && atomic_load_explicit(starved, memory_order_relaxed))
        atomic_store(starved, 0);
    start_guesses(loader, PRIORITY_LOOKAHEAD);
    start_guesses(loader, PRIORITY_WARMUP);
    return status < 0;
}

/* What others may read of the queues, and whether worker 0 shall look ahead. */
static void publish_state(struct loader *loader)
{
    struct iod_line *line = &loader->control->iod;
    const struct requests *requests = &loader->requests;
    bool busy = requests->queued[PRIORITY_DEMAND] || loader->loads.active > loader->loads.background;
    uint64_t now = monotonic_ns(), busy_ns = guesses_clock(&loader->guesses, busy, now), flying = 0;
    loader->demanded_ns = busy || busy_ns > 0 ? now : loader->demanded_ns;
    loader->reader.calm = now - loader->demanded_ns > CALM_NS;
    for (uint32_t d = 0; d < READER_DRIVES; d++)
        flying += loader->reader.drives[d].flying_bytes;
    placement_publish_heat(&loader->placement);
    copies_publish(&loader->copies, &loader->reader);
    atomic_fetch_add_explicit(&line->busy_ns, busy_ns, memory_order_relaxed);
    atomic_store_explicit(&line->queued_demands, requests->queued[PRIORITY_DEMAND], memory_order_relaxed);
    atomic_store_explicit(&line->queued_lookaheads, requests->queued[PRIORITY_LOOKAHEAD], memory_order_relaxed);
    atomic_store_explicit(&line->queued_warmups, requests->queued[PRIORITY_WARMUP], memory_order_relaxed);
    atomic_store_explicit(&line->flying_bytes, flying, memory_order_relaxed);
    bool pay = guesses_pay(&loader->guesses, atomic_load_explicit(&line->guesses_used, memory_order_relaxed),
                           atomic_load_explicit(&line->guesses_wasted, memory_order_relaxed));
    if (atomic_load_explicit(&line->lookahead, memory_order_relaxed) != pay)
        atomic_store_explicit(&line->lookahead, pay, memory_order_relaxed);
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
        bool shrinking = size_keep(&loader->size);
        holds_keep(&loader->holds, loader->size.limit);
        warmup_keep(&loader->warmup, size_wanted(&loader->size));
        collect_requests(loader);
        collect_verdicts(loader);
        bool starved = may_load && serve_queues(loader);
        publish_state(loader);
        /* Not while memory is made: it would wait for the thread that makes it, in the kernel, and the drive would run dry. */
        bool registering =
            !size_is_growing(&loader->size) && buffers_keep(&loader->buffers, placement_capacity(&loader->placement));
        int timeout_ms = registering ? 0 : starved || shrinking ? STARVED_RETRY_MS : -1;
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
    size_close(&loader->size);
    holds_close(&loader->holds);
    warmup_close(&loader->warmup);
    learning_close(loader->learning);
    if (loader->reader.method && !wait_for_reads(loader))
        return;
    for (uint32_t d = 0; d < READER_DRIVES; d++)
        verifier_close(loader->verifiers[d]);
    loads_abandon(&loader->loads);
    if (loader->reader.method)
        loader->reader.method->close(loader->reader.io);
    loads_close(&loader->loads);
    buffers_close(&loader->buffers);
    placement_close(&loader->placement);
    requests_close(&loader->requests);
    pool_detach(&loader->pool);
    copies_close(&loader->copies);
    if (loader->control)
        control_detach(loader->control);
    close_fdp(&loader->lock_fd);
    close_fdp(&loader->own_doorbell_fd);
    free(loader);
}
