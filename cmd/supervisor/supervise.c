/* The siblings: child.c (one process: states, start), status.c (the control socket's answers), pool_size.c (the
 * pool's size while it runs), plan.c (facts and sizes), instance.c (folder and lock), orphans.c (what a dead
 * supervisor left), process.c (a process as /proc has it). */
#include "cmd/supervisor/supervise.h"

#include "proto/cleanup.h"
#include "shm/exchange.h"
#include "shm/kv.h"

#include <inttypes.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <time.h>

#define ACKNOWLEDGE_TICK_MS 2
#define REQUEST_MAX 65536u /* bytes of a request on the control socket */
#define ANSWER_MS 1000     /* a client that does not take its answer loses it */

int64_t supervisor_now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

void supervisor_say(const struct supervisor *supervisor, const char *format, ...)
{
    char stamp[32] = "";
    time_t now = time(NULL);
    struct tm parts;
    va_list arguments;
    if (!supervisor->log)
        return;
    if (localtime_r(&now, &parts))
        strftime(stamp, sizeof stamp, "%Y-%m-%d %H:%M:%S", &parts);
    fprintf(supervisor->log, "%s %s: ", stamp, supervisor->instance->name);
    va_start(arguments, format);
    vfprintf(supervisor->log, format, arguments);
    va_end(arguments);
    fputc('\n', supervisor->log);
    fflush(supervisor->log);
}

void supervisor_ring(int fd)
{
    uint64_t one = 1;
    ssize_t written;
    do
        written = write(fd, &one, sizeof one);
    while (written < 0 && errno == EINTR); /* EAGAIN: the counter is full, so it is rung */
}

/* ---- start and end ---- */

static int create_segment(const struct supervisor *supervisor, const char *part, size_t bytes, enum segment_kind kind,
                          struct error *ret_error)
{
    struct segment segment;
    struct segment_options options = {.kind = kind,
                                      .node = -1,
                                      .hugepages = supervisor->plan.facts.hugepages,
                                      .populate_threads = bytes > (64u << 20) ? 4 : 1};
    int status = segment_create(supervisor->instance->name, part, bytes, &options, &segment, ret_error);
    if (!status)
        segment_detach(&segment);
    return status;
}

static int create_memory(struct supervisor *supervisor, struct error *ret_error)
{
    const char *name = supervisor->instance->name;
    int status = control_create(name, &supervisor->plan.facts, &supervisor->control, ret_error);
    if (!status)
        status = pool_create(name, &supervisor->plan.pool, ret_error);
    if (!status)
        status = pool_attach(name, &supervisor->pool, ret_error);
    if (!status)
        status = create_segment(supervisor, "kv", supervisor->plan.kv_bytes, SEGMENT_KV, ret_error);
    if (!status)
        status = create_segment(supervisor, "exchange", supervisor->plan.exchange_bytes, SEGMENT_EXCHANGE, ret_error);
    return status;
}

static int open_descriptors(struct supervisor *supervisor, struct error *ret_error)
{
    char path[108];
    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, SIGCHLD);
    sigaddset(&signals, SIGTERM);
    sigaddset(&signals, SIGINT);
    sigaddset(&signals, SIGHUP);
    supervisor->signal_fd = signalfd(-1, &signals, SFD_CLOEXEC | SFD_NONBLOCK);
    supervisor->doorbell_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    supervisor->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (supervisor->signal_fd < 0 || supervisor->doorbell_fd < 0 || supervisor->wake_fd < 0)
        return error_set(ret_error, errno, "cannot make a signalfd and two eventfds: %s", strerror(errno));
    instance_path(supervisor->instance, "supervisor.ipc", path);
    return channel_listen(CHANNEL_REP, path, &supervisor->socket, ret_error);
}

static void add_child(struct supervisor *supervisor, enum child_kind kind, uint32_t index)
{
    struct child *child = &supervisor->children[supervisor->child_count++];
    *child = (struct child){.kind = kind, .index = index, .notify_fd = -1};
    if (kind == CHILD_WORKER)
        snprintf(child->label, sizeof child->label, "%s-%u", child_program(kind), index);
    else
        snprintf(child->label, sizeof child->label, "%s", child_program(kind));
}

static void dispatch(struct supervisor *supervisor, struct child *child, enum child_event event);

int supervisor_start(struct supervisor *supervisor, struct error *ret_error)
{
    supervisor->signal_fd = supervisor->doorbell_fd = supervisor->wake_fd = supervisor->pressure_fd = -1;
    supervisor->epoch = 1;
    supervisor->started_ms = supervisor_now_ms();
    add_child(supervisor, CHILD_IOD, 0);
    for (uint32_t w = 0; w < supervisor->plan.facts.workers; w++)
        add_child(supervisor, CHILD_WORKER, w);
    add_child(supervisor, CHILD_FRONT, 0);
    int status = open_descriptors(supervisor, ret_error);
    if (!status)
        status = create_memory(supervisor, ret_error);
    if (status)
        return status;
    supervisor_open_size(supervisor);
    dispatch(supervisor, &supervisor->children[0], EVENT_START);
    return 0;
}

void supervisor_end(struct supervisor *supervisor)
{
    const int fds[] = {supervisor->signal_fd, supervisor->doorbell_fd, supervisor->wake_fd, supervisor->pressure_fd};
    if (supervisor->socket)
        channel_close(supervisor->socket);
    pool_detach(&supervisor->pool);
    if (supervisor->control)
        control_detach(supervisor->control);
    for (size_t i = 0; i < sizeof fds / sizeof *fds; i++)
        if (fds[i] >= 0)
            close(fds[i]);
    int removed = segment_unlink_all(supervisor->instance->name);
    if (removed < 0)
        supervisor_say(supervisor, "cannot remove the shared memory: %s", strerror(-removed));
}

/* ---- what happens to a child ---- */

/* Everybody must abandon the step at hand: somebody who takes part in it has died, or will. */
static void raise_epoch(struct supervisor *supervisor)
{
    supervisor->epoch = control_raise_epoch(supervisor->control);
    supervisor->epoch_ms = supervisor_now_ms();
    supervisor_ring(supervisor->wake_fd);
    supervisor_ring(supervisor->doorbell_fd);
}

static void stop_next(struct supervisor *supervisor)
{
    bool workers_left = false;
    for (uint32_t i = 0; i < supervisor->child_count; i++) {
        struct child *child = &supervisor->children[i];
        if (child->kind != CHILD_WORKER)
            continue;
        dispatch(supervisor, child, EVENT_STOP);
        workers_left |= child->state != CHILD_DOWN;
    }
    for (uint32_t i = 0; !workers_left && i < supervisor->child_count; i++)
        dispatch(supervisor, &supervisor->children[i], EVENT_STOP);
}

/* Workers first: one that has just finished a step wants to tell the front, one that waits for an expert or for another
 * worker hears of SIGTERM only when the epoch is raised. The others follow when no worker is left. */
static void stop_all(struct supervisor *supervisor)
{
    supervisor->stopping = true;
    if (!supervisor->failed)
        atomic_store(&supervisor->control->stopping, 1); /* first: the front tells its clients why */
    raise_epoch(supervisor);
    stop_next(supervisor);
}

/* Ends the instance for a reason; the first reason counts. */
static void fail(struct supervisor *supervisor, int code, const char *text)
{
    if (!supervisor->failed)
        error_set(&supervisor->reason, code, "%s", text);
    supervisor->failed = true;
    supervisor_say(supervisor, "%s", text);
    if (!supervisor->stopping)
        stop_all(supervisor);
}

static void start_child(struct supervisor *supervisor, struct child *child)
{
    struct child_gift gift = {.programs = supervisor->programs,
                              .instance = supervisor->instance->name,
                              .folder = supervisor->instance->folder,
                              .doorbell_fd = supervisor->doorbell_fd,
                              .wake_fd = supervisor->wake_fd,
                              .threads = supervisor->plan.facts.threads};
    struct error error;
    child->started_ms = supervisor_now_ms();
    child->finished_before = atomic_load(&supervisor->control->front.answers);
    int status = child_spawn(child, &gift, &error);
    if (!status) {
        supervisor_say(supervisor, "%s started, process %d", child->label, child->pid);
        return;
    }
    /* As if it had died at once: an instance that serves tries again, for descriptors or memory may be back. */
    snprintf(child->line, sizeof child->line, "failed: %.*s", (int)sizeof child->line - 16, error.text);
    dispatch(supervisor, child, EVENT_EXIT);
}

static void recover(struct supervisor *supervisor, struct child *child)
{
    char why[1024], text[1400];
    child_explain(child, supervisor->instance->folder, why, sizeof why);
    if (supervisor->stopping) {
        supervisor_say(supervisor, "%s", why);
        child->state = CHILD_DOWN;
        return;
    }
    if (!supervisor->served) {
        snprintf(text, sizeof text, "%s", why);
        child->state = CHILD_DOWN;
        fail(supervisor, EIO, text);
        return;
    }
    int64_t now = supervisor_now_ms();
    bool calm = now - child->started_ms >= RESTART_CALM_MS ||
                atomic_load(&supervisor->control->front.answers) != child->finished_before;
    child->quick = calm ? 0 : child->quick + 1;
    child->restarts++;
    child->due_ms = now + restart_delay_ms(child->quick);
    if (child->quick >= RESTART_LIMIT) {
        snprintf(text, sizeof text, "instance %s gives up: %s, %u times in a row; the logs are in %s",
                 supervisor->instance->name, why, child->quick, supervisor->instance->folder);
        child->state = CHILD_DOWN;
        fail(supervisor, EIO, text);
        return;
    }
    raise_epoch(supervisor);
    supervisor_say(supervisor, "%s; epoch %u, restart in %" PRId64 " ms", why, supervisor->epoch, child->due_ms - now);
}

static void dispatch(struct supervisor *supervisor, struct child *child, enum child_event event)
{
    struct child_transition next = child_next(child->state, event);
    child->state = next.state;
    switch (next.action) {
    case ACTION_NONE: return;
    case ACTION_SPAWN: start_child(supervisor, child); return;
    case ACTION_RECOVER: recover(supervisor, child); return;
    case ACTION_TERMINATE:
        child->due_ms = supervisor_now_ms() + STOP_MS;
        kill(child->pid, SIGTERM);
        return;
    case ACTION_KILL:
        child->due_ms = INT64_MAX;
        supervisor_say(supervisor, "%s does not answer: killed", child->label);
        kill(child->pid, SIGKILL);
        return;
    }
}

static void take_notice(struct supervisor *supervisor, struct child *child)
{
    if (!child_read_notice(child) || child->state != CHILD_STARTING)
        return;
    supervisor_say(supervisor, "%s is ready after %" PRId64 " ms", child->label,
                   supervisor_now_ms() - child->started_ms);
    dispatch(supervisor, child, EVENT_READY);
    /* Workers map the dense weights and the front serves nobody without them: the rest starts when iod has loaded
     * them. */
    for (uint32_t i = 0; child->kind == CHILD_IOD && i < supervisor->child_count && !supervisor->stopping; i++)
        dispatch(supervisor, &supervisor->children[i], EVENT_START);
}

static void reap(struct supervisor *supervisor)
{
    for (uint32_t i = 0; i < supervisor->child_count; i++) {
        struct child *child = &supervisor->children[i];
        int exit_status;
        if (child->pid <= 0 || waitpid(child->pid, &exit_status, WNOHANG) != child->pid)
            continue;
        char path[108], file[64];
        take_notice(supervisor, child); /* its last words */
        if (child->notify_fd >= 0)
            close(child->notify_fd);
        child->notify_fd = -1;
        child->pid = 0;
        child->exit_status = exit_status;
        snprintf(file, sizeof file, "%s.pid", child->label);
        instance_path(supervisor->instance, file, path);
        unlink(path);
        dispatch(supervisor, child, EVENT_EXIT);
    }
}

/* ---- the loop ---- */

/* True when no living worker can still be in a step of an older epoch. One that is starting has had no step yet. */
static bool all_acknowledged(const struct supervisor *supervisor)
{
    for (uint32_t i = 0; i < supervisor->child_count; i++) {
        const struct child *child = &supervisor->children[i];
        if (child->kind == CHILD_WORKER && child->state == CHILD_READY &&
            atomic_load(&supervisor->control->workers[child->index].acknowledged) != supervisor->epoch)
            return false;
    }
    return true;
}

/* Clears what dead children left behind. Returns true while that has to wait: a dead worker's pins hold experts in
 * place that the living may still be reading, until they have abandoned the step. */
static bool clear_dead(struct supervisor *supervisor)
{
    bool waiting = false, acknowledged = all_acknowledged(supervisor);
    for (uint32_t i = 0; i < supervisor->child_count; i++) {
        struct child *child = &supervisor->children[i];
        if (child->state != CHILD_DEAD)
            continue;
        if (child->kind == CHILD_WORKER && !acknowledged) {
            waiting = true;
            continue;
        }
        if (child->kind == CHILD_WORKER) {
            pool_release_holder(&supervisor->pool, child->index);
            supervisor_ring(supervisor->doorbell_fd); /* iod may wait for a slot without pins */
        }
        dispatch(supervisor, child, EVENT_CLEARED);
    }
    for (uint32_t i = 0; waiting && i < supervisor->child_count; i++) {
        struct child *child = &supervisor->children[i];
        if (child->kind == CHILD_WORKER && supervisor_now_ms() - supervisor->epoch_ms > ACKNOWLEDGE_MS &&
            atomic_load(&supervisor->control->workers[child->index].acknowledged) != supervisor->epoch)
            dispatch(supervisor, child, EVENT_STALLED);
    }
    return waiting;
}

static void serve_if_ready(struct supervisor *supervisor)
{
    if (supervisor->stopping || atomic_load(&supervisor->control->serving) == supervisor->epoch)
        return;
    for (uint32_t i = 0; i < supervisor->child_count; i++)
        if (supervisor->children[i].state != CHILD_READY)
            return;
    atomic_store(&supervisor->control->serving, supervisor->epoch);
    supervisor_ring(supervisor->wake_fd);
    supervisor_say(supervisor, "serving, epoch %u", supervisor->epoch);
    if (!supervisor->served && supervisor->starter.notify_fd >= 0)
        heritage_notify(&supervisor->starter, NULL);
    supervisor->served = true;
}

/* Does what is due, and returns how long poll may sleep (-1: for ever). */
static int settle(struct supervisor *supervisor)
{
    bool waiting = !supervisor->stopping && clear_dead(supervisor);
    if (supervisor->stopping)
        stop_next(supervisor);
    int64_t now = supervisor_now_ms(), next = supervisor_follow_room(supervisor);
    if (waiting && now + ACKNOWLEDGE_TICK_MS < next)
        next = now + ACKNOWLEDGE_TICK_MS;
    for (uint32_t i = 0; i < supervisor->child_count; i++) {
        struct child *child = &supervisor->children[i];
        bool timed = child->state == CHILD_WAITING || child->state == CHILD_STOPPING;
        if (timed && child->due_ms <= now)
            dispatch(supervisor, child, EVENT_DUE);
        else if (timed && child->due_ms < next)
            next = child->due_ms;
    }
    serve_if_ready(supervisor);
    return next == INT64_MAX ? -1 : next > now ? (int)(next - now) : 0;
}

/* Whoever started the instance hears why it never answered. */
static void stopped_early(struct supervisor *supervisor, const char *reason)
{
    if (supervisor->served || supervisor->failed)
        return;
    supervisor->failed = true;
    error_set(&supervisor->reason, EINTR, "%s", reason);
}

static void take_signals(struct supervisor *supervisor)
{
    struct signalfd_siginfo info;
    while (read(supervisor->signal_fd, &info, sizeof info) == (ssize_t)sizeof info) {
        if (info.ssi_signo == SIGCHLD)
            continue; /* several may come as one: reap() asks each child */
        supervisor_say(supervisor, "stopping: signal %u from process %u", info.ssi_signo, info.ssi_pid);
        char reason[64];
        snprintf(reason, sizeof reason, "stopped by signal %u before it could answer", info.ssi_signo);
        stopped_early(supervisor, reason);
        if (!supervisor->stopping)
            stop_all(supervisor);
        else
            for (uint32_t i = 0; i < supervisor->child_count; i++) /* asked twice: at once */
                supervisor->children[i].due_ms = 0;
    }
    reap(supervisor);
}

static void take_request(struct supervisor *supervisor)
{
    _cleanup_free_ void *bytes = NULL;
    _cleanup_free_ char *text = NULL;
    size_t size;
    bool down = false;
    if (channel_receive(supervisor->socket, 0, &bytes, &size, NULL))
        return;
    json_t *answer = supervisor_answer(supervisor, bytes, size > REQUEST_MAX ? 0 : size, &down);
    text = answer ? json_dumps(answer, JSON_COMPACT) : NULL;
    json_decref(answer);
    const char *sent = text ? text : "{\"ok\":false}";
    channel_send(supervisor->socket, sent, strlen(sent), ANSWER_MS, NULL);
    if (down && !supervisor->stopping) {
        supervisor_say(supervisor, "stopping: asked to");
        stopped_early(supervisor, "stopped by `calypte down` before it could answer");
        stop_all(supervisor);
    }
}

static bool all_down(const struct supervisor *supervisor)
{
    for (uint32_t i = 0; i < supervisor->child_count; i++)
        if (supervisor->children[i].state != CHILD_DOWN || supervisor->children[i].pid > 0)
            return false;
    return true;
}

static int loop_once(struct supervisor *supervisor, struct error *ret_error)
{
    int timeout = settle(supervisor); /* first: it may start a child, whose pipe is then polled too */
    if (all_down(supervisor))
        return 0;
    struct pollfd fds[3 + MAX_WORKERS + 2] = {{.fd = supervisor->signal_fd, .events = POLLIN},
                                              {.fd = channel_fd(supervisor->socket), .events = POLLIN},
                                              {.fd = supervisor->pressure_fd, .events = POLLPRI}};
    for (uint32_t i = 0; i < supervisor->child_count; i++)
        fds[3 + i] = (struct pollfd){.fd = supervisor->children[i].notify_fd, .events = POLLIN};
    if (poll(fds, 3 + supervisor->child_count, timeout) < 0)
        return errno == EINTR ? 0 : error_set(ret_error, errno, "poll: %s", strerror(errno));
    for (uint32_t i = 0; i < supervisor->child_count; i++)
        if (fds[3 + i].revents && fds[3 + i].fd == supervisor->children[i].notify_fd)
            take_notice(supervisor, &supervisor->children[i]);
    if (fds[0].revents)
        take_signals(supervisor);
    if (fds[1].revents)
        take_request(supervisor);
    if (fds[2].revents)
        supervisor_take_pressure(supervisor, fds[2].revents);
    return 0;
}

int supervisor_run(struct supervisor *supervisor, struct error *ret_error)
{
    int status = 0;
    while (!status && !(all_down(supervisor) && (supervisor->stopping || supervisor->failed)))
        status = loop_once(supervisor, ret_error);
    if (!status && supervisor->failed)
        status = error_set(ret_error, EIO, "%s", supervisor->reason.text);
    return status;
}
