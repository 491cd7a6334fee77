/* calypte-worker as a process: its messages, its sleep, the epoch, and the death of a neighbour. */
#include "proto/channel.h"
#include "tests/unit/convert_fixture.h"
#include "tests/unit/engine.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>

#define ROWS 30u
#define VOCAB 4096u
#define PATIENCE_MS 20000

static char *scratch, *container;
static float want[VOCAB]; /* logits of the last of ROWS tokens, by workers that are threads */
static int32_t tokens[ROWS];

static const uint32_t pages[] = {0};
static const struct step_sequence sequence = {.rows = ROWS, .logits = LOGITS_LAST, .pages = 1, .page_ids = pages};

static struct step step_of(uint32_t epoch)
{
    return (struct step){.id = 100 + epoch,
                         .epoch = epoch,
                         .sequences = 1,
                         .rows = ROWS,
                         .sequence = &sequence,
                         .tokens = tokens,
                         .next = tokens};
}

static int set_up(void **state)
{
    (void)state;
    void *fixture;
    if (engine_set_up(&fixture) < 0)
        return -1;
    struct engine *engine = fixture;
    struct step_done done;
    scratch = fixture_scratch();
    container = fixture_model(scratch);
    for (uint32_t i = 0; i < ROWS; i++)
        tokens[i] = (int32_t)(i * 37 % 4000);
    const struct engine_options options = {.container = container, .workers = 1, .threads = 1};
    engine_open(engine, &options);
    const struct step step = step_of(1);
    assert_int_equal(engine_step(engine, &step, &done), 0);
    memcpy(want, exchange_logits(&engine->exchange, &engine->layout, 0), sizeof want);
    engine_close(engine);
    return engine_tear_down(&fixture);
}

static int tear_down(void **state)
{
    (void)state;
    free(container);
    fixture_remove(scratch);
    return 0;
}

struct process {
    pid_t pid;
    struct channel *channel;
};

/* Starts worker `index` and waits until it says `ready`. */
static void start_worker(const struct engine *engine, uint32_t index, struct process *ret_process)
{
    const char *bin = getenv("CALYPTE_BIN");
    char program[512], parent[16], notify[16], doorbell[16], number[16], line[64] = {0};
    int fds[2];
    assert_non_null(bin);
    assert_int_equal(pipe2(fds, O_CLOEXEC), 0);
    snprintf(program, sizeof program, "%s/calypte-worker", bin);
    snprintf(parent, sizeof parent, "%d", (int)getpid());
    snprintf(notify, sizeof notify, "%d", fds[1]);
    snprintf(doorbell, sizeof doorbell, "%d", engine->doorbell);
    snprintf(number, sizeof number, "%u", index);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        fcntl(fds[1], F_SETFD, 0);
        fcntl(engine->doorbell, F_SETFD, 0);
        execl(program, "calypte-worker", "--instance", engine->instance, "--rundir", engine->rundir, "--parent", parent,
              "--notify-fd", notify, "--doorbell-fd", doorbell, "--index", number, (char *)NULL);
        _exit(127);
    }
    close(fds[1]);
    struct pollfd ready = {.fd = fds[0], .events = POLLIN};
    assert_int_equal(poll(&ready, 1, PATIENCE_MS), 1);
    assert_true(read(fds[0], line, sizeof line - 1) > 0);
    assert_string_equal(line, "ready\n");
    close(fds[0]);
    struct error error;
    char path[256];
    snprintf(path, sizeof path, "%s/worker.%u.ipc", engine->rundir, index);
    ret_process->pid = pid;
    if (channel_dial(CHANNEL_PAIR, path, -1, &ret_process->channel, &error) < 0)
        fail_msg("%s", error.text);
}

/* Ends it and returns wait's status. */
static int stop_worker(struct process *process, int signal_number)
{
    int status = -1;
    kill(process->pid, signal_number);
    for (int ms = 0; ms < PATIENCE_MS && waitpid(process->pid, &status, WNOHANG) == 0; ms += 5)
        nanosleep(&(struct timespec){.tv_nsec = 5000000}, NULL);
    channel_close(process->channel);
    return status;
}

static void send_step(struct process *process, const struct step *step)
{
    _cleanup_free_ void *bytes = NULL;
    size_t size;
    struct error error;
    assert_int_equal(message_encode_step(step, &bytes, &size, &error), 0);
    if (channel_send(process->channel, bytes, size, PATIENCE_MS, &error) < 0)
        fail_msg("%s", error.text);
}

static struct step_done receive_done(struct process *process)
{
    _cleanup_free_ void *bytes = NULL;
    size_t size;
    struct error error;
    struct step_done done;
    if (channel_receive(process->channel, PATIENCE_MS, &bytes, &size, &error) < 0)
        fail_msg("%s", error.text);
    if (message_decode_step_done(bytes, size, &done, &error) < 0)
        fail_msg("%s", error.text);
    return done;
}

/* Ticks of CPU time that a process has used, all its threads. */
static unsigned long cpu_ticks(pid_t pid)
{
    char path[64];
    unsigned long user = 0, system_time = 0;
    snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    _cleanup_fclose_ FILE *stream = fopen(path, "r");
    assert_non_null(stream);
    assert_int_equal(
        fscanf(stream, "%*d (%*[^)]) %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %lu %lu", &user, &system_time), 2);
    return user + system_time;
}

static void wait_acknowledged(const struct engine *engine, uint32_t worker, uint32_t epoch)
{
    for (int ms = 0; ms < PATIENCE_MS; ms += 5) {
        if (atomic_load(&engine->control->workers[worker].acknowledged) == epoch)
            return;
        nanosleep(&(struct timespec){.tv_nsec = 5000000}, NULL);
    }
    fail_msg("worker %u did not acknowledge epoch %u", worker, epoch);
}

static void check_answer(const struct engine *engine, const struct step_done *done, uint32_t epoch)
{
    if (done->status != 0)
        fail_msg("STEP_DONE says %d", done->status);
    assert_true(done->id == 100 + epoch && done->epoch == epoch && done->logit_rows == 1);
    assert_memory_equal(exchange_logits(&engine->exchange, &engine->layout, 0), want, sizeof want);
}

static void test_alone(void **state)
{
    struct engine *engine = *state;
    struct process worker;
    const struct engine_options options = {.container = container, .workers = 1, .threads = 2, .processes = true};
    engine_open(engine, &options);
    start_worker(engine, 0, &worker);
    struct step step = step_of(1);
    send_step(&worker, &step);
    struct step_done done = receive_done(&worker);
    check_answer(engine, &done, 1);
    assert_true(done.misses > 0 && atomic_load(&engine->control->workers[0].steps) == 1);

    /* The same STEP sent again is answered again, not run again. */
    send_step(&worker, &step);
    done = receive_done(&worker);
    check_answer(engine, &done, 1);
    assert_int_equal(atomic_load(&engine->control->workers[0].steps), 1);

    /* A message that is none is answered, and the worker lives. */
    struct error error;
    unsigned char garbage[64] = {1, 2, 3};
    assert_int_equal(channel_send(worker.channel, garbage, sizeof garbage, PATIENCE_MS, &error), 0);
    assert_int_equal(receive_done(&worker).status, -EBADMSG);

    /* Idle, it uses no CPU, and still acknowledges a raised epoch. */
    unsigned long used = 2;
    for (int i = 0; used > 1 && i < 6; i++) { /* its last answer may still have an end */
        unsigned long before = cpu_ticks(worker.pid);
        nanosleep(&(struct timespec){.tv_nsec = 700000000}, NULL);
        used = cpu_ticks(worker.pid) - before;
    }
    assert_true(used <= 1);
    assert_int_equal(control_raise_epoch(engine->control), 2);
    wait_acknowledged(engine, 0, 2);
    send_step(&worker, &step);
    assert_int_equal(receive_done(&worker).status, -ESTALE);
    step = step_of(2);
    send_step(&worker, &step);
    done = receive_done(&worker);
    check_answer(engine, &done, 2);
    assert_int_equal(stop_worker(&worker, SIGTERM), 0);
    engine_close(engine);
}

/* Both wait, one for experts, one for the other; one is killed: the other abandons the step; started again, they do it. */
static void test_neighbour_dies(void **state)
{
    struct engine *engine = *state;
    for (uint32_t victim = 0; victim < 2; victim++) {
        struct process workers[2];
        const struct engine_options options = {.container = container, .workers = 2, .threads = 1, .processes = true};
        engine_open(engine, &options);
        engine_stop_iod(engine);
        for (uint32_t w = 0; w < 2; w++)
            start_worker(engine, w, &workers[w]);
        struct step step = step_of(1);
        for (uint32_t w = 0; w < 2; w++)
            send_step(&workers[w], &step);
        for (int ms = 0; !engine_has_asked(engine) && ms < PATIENCE_MS; ms++)
            nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL); /* until the step waits for an expert */
        assert_true(WIFSIGNALED(stop_worker(&workers[victim], SIGKILL)));
        assert_int_equal(control_raise_epoch(engine->control), 2);
        wait_acknowledged(engine, 1 - victim, 2);
        if (victim == 1)
            assert_int_equal(receive_done(&workers[0]).status, -ESTALE);
        engine_start_iod(engine);
        start_worker(engine, victim, &workers[victim]);
        step = step_of(2);
        for (uint32_t w = 0; w < 2; w++)
            send_step(&workers[w], &step);
        struct step_done done = receive_done(&workers[0]);
        check_answer(engine, &done, 2);
        for (uint32_t w = 0; w < 2; w++)
            assert_int_equal(stop_worker(&workers[w], SIGTERM), 0);
        engine_close(engine);
    }
}

/* Connects as a front that dies before the greeting. */
static void connect_and_die(const struct engine *engine)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(address.sun_path, sizeof address.sun_path, "%.90s/worker.0.ipc", engine->rundir);
    _cleanup_close_ int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_true(fd >= 0);
    assert_int_equal(connect(fd, (const struct sockaddr *)(const void *)&address, sizeof address), 0);
}

/* A new front gets through, also when the one before died while it connected. */
static void test_front_dies(void **state)
{
    struct engine *engine = *state;
    struct process worker;
    struct error error;
    char path[256];
    const struct engine_options options = {.container = container, .workers = 1, .threads = 1, .processes = true};
    engine_open(engine, &options);
    start_worker(engine, 0, &worker);
    snprintf(path, sizeof path, "%s/worker.0.ipc", engine->rundir);
    for (uint32_t epoch = 2; epoch < 6; epoch++) {
        channel_close(worker.channel);
        connect_and_die(engine);
        assert_int_equal(control_raise_epoch(engine->control), epoch);
        wait_acknowledged(engine, 0, epoch);
        if (channel_dial(CHANNEL_PAIR, path, -1, &worker.channel, &error) < 0)
            fail_msg("%s", error.text);
        struct step step = step_of(epoch);
        send_step(&worker, &step);
        struct step_done done = receive_done(&worker);
        check_answer(engine, &done, epoch);
    }
    assert_int_equal(stop_worker(&worker, SIGTERM), 0);
    engine_close(engine);
}

#define ENGINE_TEST(test) cmocka_unit_test_setup_teardown(test, engine_set_up, engine_tear_down)

int main(void)
{
    const struct CMUnitTest tests[] = {ENGINE_TEST(test_alone), ENGINE_TEST(test_neighbour_dies),
                                       ENGINE_TEST(test_front_dies)};
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
