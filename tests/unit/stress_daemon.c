/* The daemon of test_pool_stress and its drives: see pool_stress.h. */
#include "io_daemon/follower.h"
#include "io_daemon/loads.h"
#include "io_daemon/size.h"
#include "tests/unit/pool_stress.h"

#include <poll.h>
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>

#include <cmocka.h>

#define FLYING 8u /* loads that the daemon has on the drives at once */

/* --- the drives --- */

/* One of the writes in that state, by chance; NULL: none. */
static struct write *find_write(struct stress *stress, enum write_state state, uint64_t *random)
{
    uint32_t first = dice(random, WRITES);
    for (uint32_t i = 0; i < WRITES; i++) {
        struct write *found = &stress->writes[(first + i) % WRITES];
        if (found->state == state)
            return found;
    }
    return NULL;
}

void *run_drive(void *argument)
{
    struct drive_thread *self = argument;
    struct stress *stress = self->stress;
    pthread_mutex_lock(&stress->mutex);
    while (!stress->drives_end) {
        struct write *chosen = find_write(stress, WRITE_WAITS, &self->random);
        if (!chosen) {
            pthread_cond_wait(&stress->work, &stress->mutex);
            continue;
        }
        chosen->state = WRITE_RUNS;
        struct write job = *chosen;
        pthread_mutex_unlock(&stress->mutex);
        for (uint32_t s = 0; s < EXPERT_SLICES; s++) {
            if (dice(&self->random, 32) == 0)
                sched_yield();
            write_slice(&self->pool, job.ref, job.expert, s);
        }
        pthread_mutex_lock(&stress->mutex);
        chosen->state = job.life == stress->life ? WRITE_DONE : WRITE_NONE;
        ring(stress);
    }
    pthread_mutex_unlock(&stress->mutex);
    return NULL;
}

/* --- the daemon: books that die with it --- */

struct daemon {
    struct stress *stress;
    struct pool pool;
    struct model_config config;
    struct requests requests;
    struct placement placement;
    struct reader reader; /* it reads nothing: for what buffers.c asks of it */
    struct buffers buffers;
    struct guesses guesses;
    struct follower follower;
    struct size size;
    bool lock_held;
    uint32_t flying;
    uint64_t random;
    jmp_buf death;
};

static void log_line(const char *line)
{
    print_error("%s\n", line);
}

/* kill -9 comes at this place of a turn, or not. */
static void may_die(struct daemon *self)
{
    if (dice(&self->random, 1000) == 0 && !atomic_load_explicit(&self->stress->daemon_end, memory_order_relaxed))
        longjmp(self->death, 1);
}

static void must(struct daemon *self, bool good)
{
    if (!good)
        count(&self->stress->unexpected);
}

/* Writes of daemons that are dead hold the lock. */
static bool check_lock(struct daemon *self)
{
    struct stress *stress = self->stress;
    if (self->lock_held)
        return true;
    self->lock_held = true;
    pthread_mutex_lock(&stress->mutex);
    for (uint32_t i = 0; i < WRITES; i++) {
        if (stress->writes[i].state != WRITE_NONE && stress->writes[i].life != stress->life)
            self->lock_held = false;
    }
    pthread_mutex_unlock(&stress->mutex);
    if (self->lock_held)
        placement_end_quarantine(&self->placement);
    return self->lock_held;
}

static void accept_demand(struct daemon *self, uint32_t expert)
{
    placement_demand(&self->placement, expert);
    switch (placement_find(&self->placement, expert)) {
    case PLACE_READY: notify_demanders(&self->requests, expert); return;
    case PLACE_LOADING: return;
    case PLACE_FAILED: placement_forget_failed(&self->placement, expert); break;
    case PLACE_NOWHERE: break;
    }
    requests_append(&self->requests, expert, PRIORITY_DEMAND);
}

static bool collect_requests(struct daemon *self)
{
    bool any = false;
    struct expert_request request;
    follower_read(&self->follower);
    for (uint32_t w = 0; w < ASKERS; w++) {
        int status = 0;
        for (uint32_t i = 0; i < RING_ENTRIES && (status = ring_pop(&self->stress->control->rings[w], &request)) > 0;
             i++) {
            any = true;
            int noted = requests_note(&self->requests, w, &request);
            must(self, noted == 0 || noted == -ESTALE);
            if (noted == 0 && request.kind == KIND_DEMAND)
                accept_demand(self, request.expert);
            else if (noted == 0 && placement_find(&self->placement, request.expert) == PLACE_NOWHERE)
                requests_append(&self->requests, request.expert, PRIORITY_LOOKAHEAD);
        }
        must(self, status >= 0);
    }
    return any;
}

/* Ends the loads whose bytes are there; now and then one counts as failed. */
static void collect_writes(struct daemon *self)
{
    struct stress *stress = self->stress;
    for (uint32_t i = 0; i < WRITES; i++) {
        pthread_mutex_lock(&stress->mutex);
        struct write done = stress->writes[i];
        bool mine = done.state == WRITE_DONE && done.life == stress->life;
        if (mine)
            stress->writes[i].state = WRITE_NONE;
        pthread_mutex_unlock(&stress->mutex);
        if (!mine)
            continue;
        bool fails = dice(&self->random, 16) == 0;
        self->flying--;
        must(self, placement_finish(&self->placement, done.expert, done.ref, fails ? EIO : 0, 3) == 0);
        count(fails ? &stress->failures : &stress->loads);
        may_die(self);
        notify_demanders(&self->requests, done.expert);
    }
}

static void begin_load(struct daemon *self, uint32_t expert, struct slot_ref ref)
{
    struct stress *stress = self->stress;
    may_die(self);
    pthread_mutex_lock(&stress->mutex);
    struct write *free_one = find_write(stress, WRITE_NONE, &self->random);
    if (free_one)
        *free_one = (struct write){WRITE_WAITS, stress->life, expert, ref};
    pthread_cond_signal(&stress->work);
    pthread_mutex_unlock(&stress->mutex);
    must(self, free_one != NULL);
    self->flying++;
}

/* -EAGAIN: a demand found no slot. */
static int start_loads(struct daemon *self, enum priority priority)
{
    uint32_t expert;
    while (self->flying < FLYING && (expert = requests_head(&self->requests, priority)) != QUEUE_END) {
        struct slot_ref ref;
        int status = -EEXIST;
        if (placement_find(&self->placement, expert) == PLACE_NOWHERE)
            status = placement_take(&self->placement, expert, priority, &ref);
        if (status < 0 && status != -EEXIST && priority == PRIORITY_DEMAND)
            return status;
        requests_remove(&self->requests, expert);
        if (status == 0)
            begin_load(self, expert, ref);
    }
    return 0;
}

static bool serve_queues(struct daemon *self)
{
    _Atomic uint32_t *starved = &self->stress->control->iod.starved;
    int status = start_loads(self, PRIORITY_DEMAND);
    if (status < 0) {
        atomic_store(starved, 1);
        status = start_loads(self, PRIORITY_DEMAND);
    }
    if (status == 0 && atomic_load_explicit(starved, memory_order_relaxed))
        atomic_store(starved, 0);
    if (self->requests.queued[PRIORITY_DEMAND] == 0)
        start_loads(self, PRIORITY_LOOKAHEAD);
    return status < 0;
}

static void sleep_for_events(struct daemon *self, int timeout_ms)
{
    _Atomic uint32_t *asleep = &self->stress->control->iod.asleep;
    struct pollfd doorbell = {.fd = self->stress->doorbell, .events = POLLIN};
    uint64_t rings;
    atomic_store(asleep, 1);
    if (!collect_requests(self))
        poll(&doorbell, 1, timeout_ms);
    atomic_store(asleep, 0);
    (void)!read(self->stress->doorbell, &rings, sizeof(rings)); /* empty already is fine */
}

static void open_daemon(struct daemon *self)
{
    struct stress *stress = self->stress;
    struct error error;
    int status = requests_open(stress->control, ASKERS, EXPERTS, &self->requests, &error);
    if (status == 0)
        status = placement_open(&self->pool, &self->config, &self->requests, &stress->control->iod, &self->placement,
                                &error);
    self->reader.method = &io_method_pread;
    self->buffers = (struct buffers){.pool = &self->pool,
                                     .reader = &self->reader,
                                     .bytes = &stress->control->iod.registered_bytes,
                                     .refusal = &stress->control->iod.registering_refused,
                                     .log = log_line};
    if (status == 0)
        status = buffers_open(&self->buffers, &error);
    guesses_open(&self->guesses, monotonic_ns());
    if (status == 0)
        follower_open(stress->control, &self->placement, &self->guesses, NULL, &self->follower);
    self->size = (struct size){.pool = &self->pool,
                               .placement = &self->placement,
                               .buffers = &self->buffers,
                               .control = stress->control,
                               .least = TOP_K,
                               .doorbell_fd = stress->doorbell,
                               .log = log_line};
    if (status == 0)
        status = size_open(&self->size, &error);
    if (status < 0)
        print_error("%s\n", error.text);
    must(self, status == 0);
}

/* The books are gone; shared memory stays as it is. A thread that gives memory or takes it is waited for: its death would
 * leave what the end of its last system call leaves. */
static void drop_books(struct daemon *self)
{
    size_close(&self->size);
    buffers_close(&self->buffers);
    placement_close(&self->placement);
    requests_close(&self->requests);
}

/* What the drives have been told to write will be written, what waits in the dead one's own queues may be gone; then the
 * supervisor raises the epoch. */
static void bury(struct daemon *self)
{
    struct stress *stress = self->stress;
    pthread_mutex_lock(&stress->mutex);
    stress->life++;
    for (uint32_t i = 0; i < WRITES; i++) {
        struct write *left = &stress->writes[i];
        if (left->state == WRITE_DONE || (left->state == WRITE_WAITS && dice(&self->random, 4) == 0))
            left->state = WRITE_NONE;
    }
    pthread_mutex_unlock(&stress->mutex);
    drop_books(self);
    count(&stress->deaths);
    control_raise_epoch(stress->control);
}

static void abandon_loads(struct daemon *self)
{
    struct stress *stress = self->stress;
    for (uint32_t i = 0; self->flying > 0; i = (i + 1) % WRITES) {
        pthread_mutex_lock(&stress->mutex);
        struct write done = stress->writes[i];
        if (done.state == WRITE_DONE)
            stress->writes[i].state = WRITE_NONE;
        pthread_mutex_unlock(&stress->mutex);
        if (done.state != WRITE_DONE)
            continue;
        placement_abandon(&self->placement, done.expert, done.ref);
        self->flying--;
    }
}

/* One daemon. True: it was told to end; false: killed. */
static bool run_daemon(struct stress *stress, uint64_t seed)
{
    struct daemon *self = calloc(1, sizeof(*self));
    bool ended = false;
    self->stress = stress;
    self->pool = stress->pool;
    self->config = (struct model_config){.top_k = TOP_K, .experts = A_LAYER};
    self->random = seed;
    open_daemon(self);
    atomic_store(&stress->control->serving, atomic_load(&stress->control->epoch));
    if (setjmp(self->death) == 0) {
        while (!atomic_load_explicit(&stress->daemon_end, memory_order_relaxed)) {
            bool may_load = check_lock(self);
            bool shrinking = size_keep(&self->size);
            collect_requests(self);
            collect_writes(self);
            bool starved = may_load && serve_queues(self);
            may_die(self);
            int timeout_ms = starved || shrinking ? 100 : -1;
            sleep_for_events(self, self->lock_held ? timeout_ms : 1);
        }
        while (!check_lock(self))
            sched_yield();
        abandon_loads(self);
        drop_books(self);
        ended = true;
    } else {
        bury(self);
    }
    free(self);
    return ended;
}

void *run_daemons(void *argument)
{
    uint64_t seed = 1;
    while (!run_daemon(argument, seed++ * UINT64_C(0x9E3779B97F4A7C15)))
        ;
    return NULL;
}
