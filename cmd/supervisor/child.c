#include "cmd/supervisor/child.h"

#include "proto/cleanup.h"

#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <spawn.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

struct child_transition child_next(enum child_state state, enum child_event event)
{
    static const struct child_transition table[CHILD_STATES][CHILD_EVENTS] = {
        [CHILD_DOWN] =
            {[EVENT_START] = {true, CHILD_STARTING, ACTION_SPAWN}, [EVENT_STOP] = {true, CHILD_DOWN, ACTION_NONE}},
        [CHILD_STARTING] = {[EVENT_READY] = {true, CHILD_READY, ACTION_NONE},
                            [EVENT_EXIT] = {true, CHILD_DEAD, ACTION_RECOVER},
                            [EVENT_STOP] = {true, CHILD_STOPPING, ACTION_TERMINATE}},
        [CHILD_READY] = {[EVENT_EXIT] = {true, CHILD_DEAD, ACTION_RECOVER},
                         [EVENT_STALLED] = {true, CHILD_READY, ACTION_KILL},
                         [EVENT_STOP] = {true, CHILD_STOPPING, ACTION_TERMINATE}},
        [CHILD_DEAD] =
            {[EVENT_CLEARED] = {true, CHILD_WAITING, ACTION_NONE}, [EVENT_STOP] = {true, CHILD_DOWN, ACTION_NONE}},
        [CHILD_WAITING] =
            {[EVENT_DUE] = {true, CHILD_STARTING, ACTION_SPAWN}, [EVENT_STOP] = {true, CHILD_DOWN, ACTION_NONE}},
        [CHILD_STOPPING] =
            {[EVENT_EXIT] = {true, CHILD_DOWN, ACTION_NONE}, [EVENT_DUE] = {true, CHILD_STOPPING, ACTION_KILL}},
    };
    struct child_transition next = table[state][event];
    return next.listed ? next : (struct child_transition){false, state, ACTION_NONE};
}

const char *child_state_name(enum child_state state)
{
    static const char *const names[CHILD_STATES] = {
        [CHILD_DOWN] = "down",       [CHILD_STARTING] = "starting", [CHILD_READY] = "ready",
        [CHILD_DEAD] = "recovering", [CHILD_WAITING] = "waiting",   [CHILD_STOPPING] = "stopping",
    };
    return names[state];
}

int restart_delay_ms(uint32_t quick)
{
    if (quick <= 1)
        return 0;
    int delay = RESTART_FIRST_MS;
    for (uint32_t i = 2; i < quick && delay < RESTART_LONGEST_MS; i++)
        delay *= 2;
    return delay < RESTART_LONGEST_MS ? delay : RESTART_LONGEST_MS;
}

const char *child_program(enum child_kind kind)
{
    static const char *const programs[] = {
        [CHILD_IOD] = "calypte-iod", [CHILD_WORKER] = "calypte-worker", [CHILD_FRONT] = "calypte-front"};
    return programs[kind];
}

/* The environment of a worker: its team's size and manner stand before the OpenMP runtime starts, so the program need
 * not start itself again to set them. NULL when out of memory; the caller frees the array, not the strings. */
static char **worker_environment(char *threads)
{
    static char policy[] = "OMP_WAIT_POLICY=passive", binding[] = "OMP_PROC_BIND=false",
                dynamic[] = "OMP_DYNAMIC=false";
    static const char *const replaced[] = {
        "OMP_NUM_THREADS=",   "OMP_WAIT_POLICY=", "OMP_PROC_BIND=", "OMP_DYNAMIC=", "OMP_PLACES=",
        "GOMP_CPU_AFFINITY=", "GOMP_SPINCOUNT=",  "KMP_BLOCKTIME=", "KMP_AFFINITY="};
    size_t count = 0, kept = 0;
    while (environ[count])
        count++;
    char **environment = calloc(count + 5, sizeof *environment);
    if (!environment)
        return NULL;
    for (size_t i = 0; i < count; i++) {
        bool skip = false;
        for (size_t r = 0; r < sizeof replaced / sizeof *replaced; r++)
            skip |= !strncmp(environ[i], replaced[r], strlen(replaced[r]));
        if (!skip)
            environment[kept++] = environ[i];
    }
    environment[kept++] = threads;
    environment[kept++] = policy;
    environment[kept++] = binding;
    environment[kept] = dynamic;
    return environment;
}

struct arguments {
    char numbers[8][16];
    char *argv[20];
    int count;
};

static void add_text(struct arguments *arguments, const char *flag, const char *value)
{
    arguments->argv[arguments->count++] = (char *)(uintptr_t)flag; /* exec takes char *, and writes to none */
    arguments->argv[arguments->count++] = (char *)(uintptr_t)value;
}

static void add_number(struct arguments *arguments, const char *flag, long number)
{
    char *text = arguments->numbers[arguments->count / 2];
    snprintf(text, sizeof arguments->numbers[0], "%ld", number);
    add_text(arguments, flag, text);
}

/* dup2 of a descriptor on itself clears its close-on-exec flag in the child alone. */
static int set_actions(posix_spawn_file_actions_t *actions, const char *log, const int *fds, size_t count)
{
    int code = posix_spawn_file_actions_addopen(actions, 0, "/dev/null", O_RDONLY, 0);
    if (!code)
        code = posix_spawn_file_actions_addopen(actions, 1, log, O_WRONLY | O_CREAT | O_APPEND, 0600);
    if (!code)
        code = posix_spawn_file_actions_adddup2(actions, 1, 2);
    for (size_t i = 0; !code && i < count; i++)
        if (fds[i] >= 0)
            code = posix_spawn_file_actions_adddup2(actions, fds[i], fds[i]);
    return code;
}

static int set_attributes(posix_spawnattr_t *attributes)
{
    sigset_t none, all;
    sigemptyset(&none);
    sigfillset(&all);
    int code =
        posix_spawnattr_setflags(attributes, POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
    if (!code)
        code = posix_spawnattr_setpgroup(attributes, 0);
    if (!code)
        code = posix_spawnattr_setsigmask(attributes, &none);
    return code ? code : posix_spawnattr_setsigdefault(attributes, &all);
}

static int spawn(struct child *child, const struct child_gift *gift, const char *program, char **argv, int write_fd)
{
    char log[PATH_MAX], threads[40];
    const int fds[] = {write_fd, child->kind == CHILD_FRONT ? -1 : gift->doorbell_fd,
                       child->kind == CHILD_FRONT ? gift->wake_fd : -1};
    posix_spawn_file_actions_t actions;
    posix_spawnattr_t attributes;
    _cleanup_free_ char **environment = NULL;

    snprintf(log, sizeof log, "%s/%s.log", gift->folder, child->label);
    snprintf(threads, sizeof threads, "OMP_NUM_THREADS=%u", gift->threads);
    if (child->kind == CHILD_WORKER && !(environment = worker_environment(threads)))
        return ENOMEM;
    int code = posix_spawn_file_actions_init(&actions);
    if (code)
        return code;
    code = posix_spawnattr_init(&attributes);
    if (!code) {
        code = set_actions(&actions, log, fds, sizeof fds / sizeof *fds);
        if (!code)
            code = set_attributes(&attributes);
        if (!code)
            code = posix_spawn(&child->pid, program, &actions, &attributes, argv, environment ? environment : environ);
        posix_spawnattr_destroy(&attributes);
    }
    posix_spawn_file_actions_destroy(&actions);
    return code;
}

static void write_pid_file(const struct child *child, const char *folder)
{
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/%s.pid", folder, child->label);
    _cleanup_fclose_ FILE *stream = fopen(path, "we");
    if (stream)
        fprintf(stream, "%d\n", child->pid);
}

int child_spawn(struct child *child, const struct child_gift *gift, struct error *ret_error)
{
    char program[PATH_MAX];
    struct arguments arguments = {0};
    int pipe_fds[2];
    snprintf(program, sizeof program, "%s/%s", gift->programs, child_program(child->kind));
    if (pipe2(pipe_fds, O_CLOEXEC) < 0)
        return error_set(ret_error, errno, "cannot make a pipe for %s: %s", child->label, strerror(errno));
    fcntl(pipe_fds[0], F_SETFL, O_NONBLOCK);
    arguments.argv[arguments.count++] = program;
    add_text(&arguments, "--instance", gift->instance);
    add_text(&arguments, "--rundir", gift->folder);
    add_number(&arguments, "--parent", getpid());
    add_number(&arguments, "--notify-fd", pipe_fds[1]);
    if (child->kind == CHILD_FRONT)
        add_number(&arguments, "--wake-fd", gift->wake_fd);
    else
        add_number(&arguments, "--doorbell-fd", gift->doorbell_fd);
    if (child->kind == CHILD_WORKER)
        add_number(&arguments, "--index", child->index);
    child->pid = 0;
    int code = spawn(child, gift, program, arguments.argv, pipe_fds[1]);
    close(pipe_fds[1]);
    if (code) {
        child->pid = 0;
        close(pipe_fds[0]);
        return error_set(ret_error, code, "cannot start %s: %s", program, strerror(code));
    }
    child->notify_fd = pipe_fds[0];
    child->line_length = 0;
    write_pid_file(child, gift->folder);
    return 0;
}

int child_read_notice(struct child *child)
{
    while (child->notify_fd >= 0) {
        size_t room = sizeof child->line - 1 - child->line_length;
        ssize_t count = room ? read(child->notify_fd, child->line + child->line_length, room) : 0;
        if (count < 0 && errno == EINTR)
            continue;
        if (count < 0 && errno == EAGAIN)
            break;
        if (count <= 0) { /* the other end is closed, or the line is longer than one may be */
            close(child->notify_fd);
            child->notify_fd = -1;
            break;
        }
        child->line_length += (uint32_t)count;
    }
    child->line[child->line_length] = '\0';
    return !strcmp(child->line, "ready\n");
}

/* The last line of the child's log, without its end; empty if there is none. */
static void last_log_line(const struct child *child, const char *folder, char ret_line[512])
{
    char path[PATH_MAX], tail[512];
    ret_line[0] = '\0';
    snprintf(path, sizeof path, "%s/%s.log", folder, child->label);
    _cleanup_close_ int fd = open(path, O_RDONLY | O_CLOEXEC);
    off_t size = fd < 0 ? -1 : lseek(fd, 0, SEEK_END);
    off_t from = size > (off_t)sizeof tail - 1 ? size - ((off_t)sizeof tail - 1) : 0;
    ssize_t count = size < 0 ? -1 : pread(fd, tail, sizeof tail - 1, from);
    if (count <= 0)
        return;
    while (count && (tail[count - 1] == '\n' || tail[count - 1] == '\0'))
        count--;
    tail[count] = '\0';
    const char *start = strrchr(tail, '\n');
    snprintf(ret_line, 512, "%s", start ? start + 1 : tail);
}

void child_explain(const struct child *child, const char *folder, char *ret_text, size_t size)
{
    char last[512];
    if (!strncmp(child->line, "failed: ", 8)) {
        snprintf(ret_text, size, "%.*s", (int)strcspn(child->line + 8, "\n"), child->line + 8);
        return;
    }
    int length = WIFSIGNALED(child->exit_status)
                     ? snprintf(ret_text, size, "%s was ended by signal %d (%s)", child->label,
                                WTERMSIG(child->exit_status), strsignal(WTERMSIG(child->exit_status)))
                     : snprintf(ret_text, size, "%s ended with code %d", child->label, WEXITSTATUS(child->exit_status));
    last_log_line(child, folder, last);
    if (last[0] && length > 0 && (size_t)length < size)
        snprintf(ret_text + length, size - (size_t)length, "; the last line of its log: %s", last);
}
