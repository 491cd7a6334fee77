#include "cmd/front/scheduler.h"

#include "cmd/front/clock.h"
#include "proto/cleanup.h"
#include "proto/container.h"

#include <inttypes.h>
#include <limits.h>
#include <string.h>

#define STOPPING "the instance is stopping; ask again when it is up"
#define REPEAT_NS (UINT64_C(1000) * 1000000) /* how long a STEP may be in flight before it is sent again */

int scheduler_open(struct scheduler *scheduler, const char *instance, const char *rundir, struct error *ret_error)
{
    *scheduler = (struct scheduler){0};
    TAILQ_INIT(&scheduler->waiting);
    TAILQ_INIT(&scheduler->running);
    int status = control_attach(instance, &scheduler->control, &scheduler->facts, ret_error);
    if (status < 0)
        return status;
    const struct facts *facts = &scheduler->facts;
    exchange_layout(facts, &scheduler->layout);
    status = segment_attach(instance, "exchange", SEGMENT_EXCHANGE, scheduler->layout.segment_bytes, false,
                            &scheduler->exchange, ret_error);
    if (status == 0)
        status = kv_pages_init(&scheduler->pages, facts->kv_pages, ret_error);
    if (status == 0)
        sessions_init(&scheduler->sessions, &scheduler->pages);
    for (uint32_t w = 0; status == 0 && w < facts->workers; w++) {
        char path[PATH_MAX];
        snprintf(path, sizeof path, "%s/worker.%" PRIu32 ".ipc", rundir, w);
        status = channel_dial(CHANNEL_PAIR, path, -1, &scheduler->workers[w], ret_error);
    }
    if (status < 0) {
        scheduler_close(scheduler);
        return status;
    }
    scheduler->epoch = atomic_load(&scheduler->control->epoch);
    return 0;
}

static void count_sequences(struct scheduler *scheduler)
{
    atomic_store_explicit(&scheduler->control->front.running, scheduler->running_count, memory_order_relaxed);
    atomic_store_explicit(&scheduler->control->front.queued, scheduler->waiting_count, memory_order_relaxed);
}

/* Gives back what a sequence holds and tells its owner. The owner may free it. */
static void leave(struct scheduler *scheduler, struct sequence *sequence, const char *code, const char *message)
{
    if (sequence->state == SEQUENCE_WAITING) {
        TAILQ_REMOVE(&scheduler->waiting, sequence, link);
        scheduler->waiting_count--;
    } else if (sequence->state == SEQUENCE_RUNNING) {
        TAILQ_REMOVE(&scheduler->running, sequence, link);
        scheduler->running_count--;
        if (sequence->session[0])
            sessions_keep(&scheduler->sessions, sequence->session, sequence->tokens, sequence->computed,
                          sequence->pages, sequence->page_count, scheduler->facts.page_tokens);
        else
            kv_pages_give(&scheduler->pages, sequence->pages, sequence->page_count);
        free(sequence->pages);
        sequence->pages = NULL;
        sequence->page_count = 0;
    }
    sequence->state = SEQUENCE_IDLE;
    count_sequences(scheduler);
    struct sequence_end end = {.code = sequence->cancelled ? "cancelled" : code, .message = message};
    sequence->method->end(sequence, &end);
}

/* Forgets the STEP in flight: an answer to it will not count. */
static void drop_step(struct scheduler *scheduler)
{
    free(scheduler->message);
    scheduler->message = NULL;
    scheduler->unsent = 0;
    scheduler->in_flight = false;
}

/* Ends the running sequences that the last STEP carried, or with `all` those that any STEP ever carried. */
static void end_carried(struct scheduler *scheduler, bool all, const char *code, const char *message)
{
    struct sequence *sequence = TAILQ_FIRST(&scheduler->running);
    while (sequence) {
        struct sequence *next = TAILQ_NEXT(sequence, link);
        bool carried = sequence->plan.rows > 0 || (all && sequence->stepped);
        sequence->plan.rows = 0;
        if (carried)
            leave(scheduler, sequence, code, message);
        sequence = next;
    }
}

void scheduler_close(struct scheduler *scheduler)
{
    struct sequence *sequence;
    drop_step(scheduler);
    while ((sequence = TAILQ_FIRST(&scheduler->running)))
        leave(scheduler, sequence, "restarted", STOPPING);
    while ((sequence = TAILQ_FIRST(&scheduler->waiting)))
        leave(scheduler, sequence, "restarted", STOPPING);
    for (uint32_t w = 0; w < MAX_WORKERS; w++)
        channel_close(scheduler->workers[w]);
    if (scheduler->pages.free)
        sessions_free(&scheduler->sessions);
    kv_pages_free(&scheduler->pages);
    if (scheduler->exchange.base)
        segment_detach(&scheduler->exchange);
    if (scheduler->control)
        control_detach(scheduler->control);
    *scheduler = (struct scheduler){0};
    TAILQ_INIT(&scheduler->waiting);
    TAILQ_INIT(&scheduler->running);
}

bool scheduler_serving(const struct scheduler *scheduler)
{
    return atomic_load(&scheduler->control->serving) == scheduler->epoch &&
           atomic_load(&scheduler->control->epoch) == scheduler->epoch;
}

static uint32_t pages_of(const struct scheduler *scheduler, uint32_t tokens)
{
    return (uint32_t)(((uint64_t)tokens + scheduler->facts.page_tokens - 1) / scheduler->facts.page_tokens);
}

/* Gives a waiting sequence its slot and pages. -ENOSPC while others hold the pages. */
static int start(struct scheduler *scheduler, struct sequence *sequence)
{
    uint32_t needed = pages_of(scheduler, sequence->room), kept = 0;
    uint32_t *pages = malloc(needed * sizeof *pages);
    if (!pages)
        return -ENOMEM;
    uint32_t cached = 0;
    if (sequence->session[0])
        cached = sessions_take(&scheduler->sessions, sequence->session, sequence->tokens, sequence->length, needed,
                               pages, &kept);
    sessions_evict(&scheduler->sessions, needed - kept);
    if (kv_pages_take(&scheduler->pages, needed - kept, pages + kept) < 0) {
        kv_pages_give(&scheduler->pages, pages, kept);
        free(pages);
        return -ENOSPC;
    }
    TAILQ_REMOVE(&scheduler->waiting, sequence, link);
    scheduler->waiting_count--;
    TAILQ_INSERT_TAIL(&scheduler->running, sequence, link);
    scheduler->running_count++;
    sequence->state = SEQUENCE_RUNNING;
    sequence->pages = pages;
    sequence->page_count = needed;
    sequence->cached = sequence->computed = cached;
    sequence->started_ns = clock_ns();
    sequence->own_ns_before = atomic_load_explicit(&scheduler->control->front.own_ns, memory_order_relaxed);
    sequence->disk_bytes_before = atomic_load_explicit(&scheduler->control->iod.load_bytes, memory_order_relaxed);
    for (int c = 0; c < AHEAD_COUNTS; c++)
        sequence->ahead_before[c] =
            atomic_load_explicit(&scheduler->control->workers[0].ahead[c], memory_order_relaxed);
    count_sequences(scheduler);
    return 0;
}

/* Asks every running sequence for its rows, in the order in which they started, and fills the arrays. Nobody takes more
 * than prefill_chunk rows, nor the one row that each of those behind may always have: an answer never waits for a long
 * prompt. */
static void plan_step(struct scheduler *scheduler, struct step_sequence *parts, int32_t *tokens, int32_t *next,
                      struct step *step)
{
    const struct facts *facts = &scheduler->facts;
    uint32_t others = scheduler->running_count, logit_rows = 0;
    struct sequence *sequence;
    TAILQ_FOREACH (sequence, &scheduler->running, link) {
        struct step_plan *plan = &sequence->plan;
        *plan = (struct step_plan){0};
        others--; /* each of those behind keeps a row and a row of logits */
        if (step->rows + others >= facts->max_rows || logit_rows + others >= facts->logit_rows)
            continue;
        uint32_t rows = facts->max_rows - step->rows - others;
        sequence->method->plan(sequence, rows < facts->prefill_chunk ? rows : facts->prefill_chunk,
                               facts->logit_rows - logit_rows - others, plan);
        parts[step->sequences++] = (struct step_sequence){
            .first = plan->first,
            .rows = plan->rows,
            .logits = plan->logits,
            .pages = pages_of(scheduler, plan->first + plan->rows),
            .page_ids = sequence->pages,
        };
        for (uint32_t row = 0; row < plan->rows; row++) {
            tokens[step->rows + row] = plan->tokens[row];
            next[step->rows + row] = row + 1 < plan->known ? plan->tokens[row + 1] : -1;
        }
        step->rows += plan->rows;
        step->draft |= plan->draft;
        logit_rows += plan->logits == LOGITS_ALL ? plan->rows : plan->logits == LOGITS_LAST ? 1 : 0;
        sequence->stepped = true;
    }
    scheduler->in_flight_logits = logit_rows;
}

static uint32_t all_workers(const struct scheduler *scheduler)
{
    return (1u << scheduler->facts.workers) - 1;
}

/* Gives the STEP in flight to those of `workers` (bit w: worker w) that take it now. */
static void send_step(struct scheduler *scheduler, uint32_t workers)
{
    struct error error;
    uint64_t now = clock_ns(); /* before: a worker that has the message may take this CPU from the front */
    bool first = scheduler->unsent != 0;
    for (uint32_t w = 0; w < scheduler->facts.workers; w++) {
        if (!(workers & 1u << w))
            continue;
        int status = channel_send(scheduler->workers[w], scheduler->message, scheduler->message_bytes, 0, &error);
        if (status == -EAGAIN)
            continue; /* again when it has greeted, or after a while */
        if (status < 0 && scheduler->unsent & 1u << w) {
            drop_step(scheduler);
            end_carried(scheduler, false, "model_error", error.text);
            return;
        }
        scheduler->unsent &= ~(1u << w);
    }
    if (first && scheduler->unsent == 0)
        scheduler->sent_ns = now;
    scheduler->repeat_ns = now + REPEAT_NS;
}

/* Builds and sends the next STEP, if there is something to compute and it may be. */
static void next_step(struct scheduler *scheduler)
{
    struct sequence *sequence;
    while ((sequence = TAILQ_FIRST(&scheduler->waiting)) && scheduler->running_count < scheduler->facts.slots) {
        int status = start(scheduler, sequence);
        if (status == -ENOMEM)
            leave(scheduler, sequence, "model_error",
                  "no memory for its table of pages; free some memory and ask again");
        else if (status < 0)
            break;
    }
    if (scheduler->in_flight || scheduler->running_count == 0 || !scheduler_serving(scheduler))
        return;

    size_t rows = scheduler->facts.max_rows;
    _cleanup_free_ struct step_sequence *parts = malloc(scheduler->running_count * sizeof *parts);
    _cleanup_free_ int32_t *tokens = malloc(2 * rows * sizeof *tokens);
    struct error error;
    struct step step = {.id = scheduler->step_id + 1,
                        .epoch = scheduler->epoch,
                        .sequence = parts,
                        .tokens = tokens,
                        .next = tokens + rows};
    int status =
        parts && tokens ? 0 : error_set(&error, ENOMEM, "no memory for a step; free some memory and ask again");
    if (status == 0) {
        plan_step(scheduler, parts, tokens, tokens + rows, &step);
        status = message_encode_step(&step, &scheduler->message, &scheduler->message_bytes, &error);
    }
    if (status < 0) {
        TAILQ_FOREACH (sequence, &scheduler->running, link)
            sequence->stepped = true;
        end_carried(scheduler, true, "model_error", error.text);
        return;
    }
    scheduler->step_id = step.id;
    scheduler->in_flight = true;
    scheduler->unsent = all_workers(scheduler);
    send_step(scheduler, scheduler->unsent);
}

/* Steps are started one after another until one is in flight or nothing can be computed: a step that fails at once ends
 * its sequences, and the next may start. */
static void keep_going(struct scheduler *scheduler)
{
    do
        next_step(scheduler);
    while (!scheduler->in_flight && scheduler->running_count > 0 && scheduler_serving(scheduler));
}

int scheduler_repeat(struct scheduler *scheduler)
{
    if (scheduler->in_flight && clock_ns() >= scheduler->repeat_ns) {
        send_step(scheduler, scheduler->unsent != 0 ? scheduler->unsent : all_workers(scheduler));
        keep_going(scheduler);
    }
    if (!scheduler->in_flight)
        return -1;
    uint64_t now = clock_ns();
    return now < scheduler->repeat_ns ? (int)((scheduler->repeat_ns - now) / 1000000) + 1 : 0;
}

int scheduler_add(struct scheduler *scheduler, struct sequence *sequence, struct error *ret_error)
{
    const struct facts *facts = &scheduler->facts;
    if (pages_of(scheduler, sequence->room) > facts->kv_pages)
        return error_set(ret_error, E2BIG, "%" PRIu32 " tokens need %" PRIu32 " KV pages, the instance has %" PRIu32,
                         sequence->room, pages_of(scheduler, sequence->room), facts->kv_pages);
    bool starts_now = scheduler->waiting_count == 0 && scheduler->running_count < facts->slots;
    if (!starts_now && scheduler->waiting_count >= facts->queue)
        return error_set(
            ret_error, EBUSY, "%" PRIu32 " request%s and %" PRIu32 " wait; ask again later, or raise `queue`",
            scheduler->running_count, scheduler->running_count == 1 ? " runs" : "s run", scheduler->waiting_count);
    sequence->state = SEQUENCE_WAITING;
    TAILQ_INSERT_TAIL(&scheduler->waiting, sequence, link);
    scheduler->waiting_count++;
    count_sequences(scheduler);
    return 0;
}

void scheduler_cancel(struct scheduler *scheduler, struct sequence *sequence)
{
    if (sequence->state == SEQUENCE_IDLE || sequence->cancelled)
        return;
    sequence->cancelled = true;
    if (!scheduler->in_flight || sequence->plan.rows == 0)
        leave(scheduler, sequence, NULL, NULL);
}

const float *scheduler_logits(struct scheduler *scheduler, uint32_t row, bool draft)
{
    return exchange_logits(&scheduler->exchange, &scheduler->layout, draft) +
           (size_t)row * scheduler->facts.config.vocab;
}

static void describe_failure(const struct facts *facts, const struct step_done *done, struct error *ret_error)
{
    if (done->status == -EIO && done->code != 0)
        error_set(ret_error, EIO,
                  "expert %" PRIu32 " of layer %" PRIu32 ", slice %" PRIu32 ", in " CONTAINER_EXPERTS_NAME
                  " of %.300s%s%.300s: %s: %s",
                  done->expert, done->layer, done->slice, stripe_of_slice(done->slice, facts->stripes), done->layer,
                  facts->container, facts->mirror[0] ? " and " : "", facts->mirror, container_fault((int)done->code),
                  container_remedy((int)done->code));
    else
        error_set(ret_error, EIO, "a worker could not run the step: %s; its log says more", strerror(-done->status));
}

static void add_times(struct sequence *sequence, const struct step_done *done)
{
    sequence->steps++;
    sequence->step_ns += done->step_ns;
    sequence->matmul_ns += done->matmul_ns;
    for (unsigned p = 0; p < STEP_PARTS; p++)
        sequence->part_ns[p] += done->part_ns[p];
}

/* Gives every sequence of the finished STEP its logits. */
static void advance_all(struct scheduler *scheduler, const struct step_done *done)
{
    uint32_t logit_row = 0;
    struct sequence *sequence = TAILQ_FIRST(&scheduler->running);
    while (sequence) {
        struct sequence *next = TAILQ_NEXT(sequence, link);
        const struct step_plan *plan = &sequence->plan;
        uint32_t rows = plan->rows, logit_rows = plan->logits == LOGITS_ALL    ? rows
                                                 : plan->logits == LOGITS_LAST ? 1
                                                                               : 0;
        if (rows > 0 && sequence->cancelled)
            leave(scheduler, sequence, NULL, NULL);
        else if (rows > 0) {
            struct error error;
            sequence->hits += done->hits;
            sequence->misses += done->misses;
            add_times(sequence, done);
            int status = sequence->method->advance(sequence, scheduler, logit_row, logit_rows, &error);
            sequence->plan.rows = 0;
            if (status != 0)
                leave(scheduler, sequence, status < 0 ? "model_error" : NULL, status < 0 ? error.text : NULL);
        }
        logit_row += rows > 0 ? logit_rows : 0;
        sequence = next;
    }
}

/* What worker 0 said of a STEP. */
static void take_done(struct scheduler *scheduler, const void *bytes, size_t size)
{
    struct step_done done;
    struct error error;
    int status = message_decode_step_done(bytes, size, &done, &error);
    if (status == 0 && (!scheduler->in_flight || done.id != scheduler->step_id || done.epoch != scheduler->epoch ||
                        done.epoch != atomic_load(&scheduler->control->epoch)))
        return; /* of another life; if the epoch was raised, the supervisor wakes us */
    if (status == 0 && done.status == -ESTALE)
        return; /* likewise: a worker abandons a step only when the epoch was raised */
    if (!scheduler->in_flight)
        return;
    if (status == 0 && done.status < 0) {
        describe_failure(&scheduler->facts, &done, &error);
        status = done.status;
    }
    if (status == 0 && scheduler->unsent != 0)
        status = error_set(&error, EBADMSG, "worker 0 says that a step is done which not all workers have got");
    if (status == 0 && done.logit_rows != scheduler->in_flight_logits)
        status = error_set(&error, EBADMSG, "worker 0 gave %" PRIu32 " rows of logits where %" PRIu32 " were asked for",
                           done.logit_rows, scheduler->in_flight_logits);
    drop_step(scheduler);
    if (status < 0)
        end_carried(scheduler, false, "model_error", error.text);
    else
        advance_all(scheduler, &done);
}

void scheduler_receive(struct scheduler *scheduler, uint32_t w)
{
    void *bytes;
    size_t size;
    uint64_t woken = clock_ns(), sent = scheduler->sent_ns;
    bool waited = scheduler->in_flight;
    int status;
    while ((status = channel_receive(scheduler->workers[w], 0, &bytes, &size, NULL)) == 0) {
        if (w == 0)
            take_done(scheduler, bytes, size);
        free(bytes);
    }
    bool done = waited && !scheduler->in_flight;
    /* It may have greeted just now. Where the connection has ended, a new one has time until the STEP is repeated. */
    if (status == -EAGAIN && scheduler->unsent & 1u << w)
        send_step(scheduler, 1u << w);
    keep_going(scheduler);
    if (done) {
        uint64_t end = scheduler->in_flight && scheduler->unsent == 0 ? scheduler->sent_ns : clock_ns();
        add_counter(&scheduler->control->front.flight_ns, woken - sent);
        add_counter(&scheduler->control->front.own_ns, end - woken);
    }
}

void scheduler_wake(struct scheduler *scheduler)
{
    uint32_t epoch = atomic_load(&scheduler->control->epoch);
    if (epoch != scheduler->epoch) {
        scheduler->epoch = epoch;
        drop_step(scheduler);
        bool stopping = atomic_load(&scheduler->control->stopping) == 1;
        end_carried(scheduler, true, "restarted",
                    stopping ? STOPPING : "a process of the instance died while it worked on this request; ask again");
    }
    /* Now, so that no answer waits for it, or writes the time of this access to the drive that the sockets' folder is on. */
    for (uint32_t w = 0; scheduler_serving(scheduler) && w < scheduler->facts.workers; w++)
        channel_connect(scheduler->workers[w]);
    keep_going(scheduler);
}

void scheduler_continue(struct scheduler *scheduler)
{
    keep_going(scheduler);
}
