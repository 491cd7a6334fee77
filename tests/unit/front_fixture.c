#include "tests/unit/front_fixture.h"

#include "proto/cleanup.h"
#include "proto/message.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <fcntl.h>
#include <limits.h>
#include <math.h>
#include <signal.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>

#define STOP_TOKEN 4071
#define FIRST_TEXT_TOKEN 256
#define TEXT_TOKENS 1000

static uint64_t mix(uint64_t hash, int32_t token)
{
    hash ^= (uint64_t)(uint32_t)token + 1;
    hash *= UINT64_C(0x9e3779b97f4a7c15);
    return hash ^ hash >> 29;
}

static int32_t pick(uint64_t hash)
{
    return hash % 24 == 0 ? STOP_TOKEN : FIRST_TEXT_TOKEN + (int32_t)(hash / 24 % TEXT_TOKENS);
}

int32_t fixture_follow(const int32_t *tokens, size_t count)
{
    uint64_t hash = 1;
    for (size_t i = 0; i < count; i++)
        hash = mix(hash, tokens[i]);
    return pick(hash);
}

int32_t fixture_draft(const int32_t *tokens, size_t count, int32_t next)
{
    uint64_t hash = 1;
    for (size_t i = 0; i < count; i++)
        hash = mix(hash, tokens[i]);
    return pick(mix(hash, next) ^ 77);
}

int32_t *fixture_expected(const struct fixture *fixture, const int32_t *prompt, size_t count, size_t max_tokens,
                          size_t *ret_count)
{
    int32_t *all = malloc((fixture->facts.context + 1) * sizeof *all),
            *answer = malloc((fixture->facts.context + 1) * sizeof *answer);
    assert_non_null(all);
    assert_non_null(answer);
    memcpy(all, prompt, count * sizeof *all);
    size_t length = count;
    while (length < fixture->facts.context && length - count < max_tokens) {
        int32_t token = fixture_follow(all, length);
        if (token == STOP_TOKEN)
            break;
        all[length++] = token;
    }
    *ret_count = length - count;
    memcpy(answer, all + count, *ret_count * sizeof *answer);
    free(all);
    return answer;
}

/* ---- workers: these run in threads, where cmocka's asserts cannot be used ---- */

static void write_row(struct fixture *fixture, uint32_t row, bool draft, int32_t peak)
{
    uint32_t vocab = fixture->facts.config.vocab;
    float *logits = exchange_logits(&fixture->exchange, &fixture->layout, draft) + (size_t)row * vocab;
    for (uint32_t i = 0; i < vocab; i++)
        logits[i] = atomic_load(&fixture->mode) == WORKER_NAN ? NAN : 0;
    logits[peak] = atomic_load(&fixture->mode) == WORKER_NAN ? NAN : FIXTURE_PEAK;
}

/* Where a position's token is remembered. */
static int32_t *kv_row(struct fixture *fixture, const struct step_sequence *sequence, uint32_t position)
{
    uint32_t page_tokens = fixture->facts.page_tokens;
    return &fixture->kv[sequence->page_ids[position / page_tokens] * page_tokens + position % page_tokens];
}

/* Runs a STEP as worker 0; returns the rows of logits. */
static uint32_t run_step(struct fixture *fixture, const struct step *step)
{
    uint32_t logit_row = 0;
    for (uint32_t s = 0; s < step->sequences; s++) {
        const struct step_sequence *sequence = &step->sequence[s];
        for (uint32_t row = 0; row < sequence->rows; row++)
            *kv_row(fixture, sequence, sequence->first + row) = step->tokens[sequence->row_offset + row];
        uint64_t hash = 1;
        for (uint32_t position = 0; position < sequence->first + sequence->rows; position++) {
            int32_t token = *kv_row(fixture, sequence, position);
            if (token < 0)
                atomic_fetch_add(&fixture->mismatches, 1);
            hash = mix(hash, token);
            bool wanted = position >= sequence->first &&
                          (sequence->logits == LOGITS_ALL ||
                           (sequence->logits == LOGITS_LAST && position + 1 == sequence->first + sequence->rows));
            if (!wanted)
                continue;
            int32_t next = step->next[sequence->row_offset + position - sequence->first];
            if (step->draft && next >= 0)
                write_row(fixture, logit_row, true, pick(mix(hash, next) ^ 77));
            write_row(fixture, logit_row++, false, pick(hash));
        }
    }
    return logit_row;
}

static void send_done(struct fixture *fixture, const struct step_done *done)
{
    unsigned char bytes[MESSAGE_STEP_DONE_BYTES];
    message_encode_step_done(done, bytes, sizeof bytes);
    channel_send(fixture->channels[0], bytes, sizeof bytes, 2000, NULL);
}

/* The epoch was raised, or the test ends. */
static bool is_void(struct fixture *fixture, const struct step *step)
{
    return atomic_load(&fixture->ending) || atomic_load(&fixture->control->epoch) != step->epoch;
}

static void answer_step(struct fixture *fixture, const struct step *step)
{
    /* As in the exchange of real workers: nobody finishes before all have come, with the same STEP. */
    while ((atomic_load(&fixture->mode) == WORKER_HOLDS ||
            atomic_load(&fixture->seen[1]) != atomic_load(&fixture->seen[0])) &&
           !is_void(fixture, step))
        usleep(1000);
    if (is_void(fixture, step))
        return;
    enum worker_mode mode = (enum worker_mode)atomic_load(&fixture->mode);
    struct step_done done = {.id = step->id, .epoch = step->epoch, .hits = 3, .misses = 1};
    if (mode == WORKER_DROPS)
        return;
    done.logit_rows = run_step(fixture, step);
    if (mode == WORKER_EXPERT_FAILS) {
        done = (struct step_done){.id = step->id,
                                  .epoch = step->epoch,
                                  .status = -EIO,
                                  .layer = 3,
                                  .expert = 17,
                                  .slice = 2,
                                  .code = EBADMSG};
    } else if (mode == WORKER_LIES)
        done.logit_rows++;
    else if (mode == WORKER_BABBLES) {
        struct step_done other = done;
        other.id += 1;
        send_done(fixture, &other);
        other = done;
        other.epoch -= 1;
        send_done(fixture, &other);
        other = done;
        other.status = -ESTALE;
        send_done(fixture, &other);
    }
    atomic_fetch_add(&fixture->control->iod.load_bytes, 4096);
    send_done(fixture, &done);
}

struct worker {
    struct fixture *fixture;
    uint32_t index;
};

static void take_step(struct fixture *fixture, uint32_t index, const void *bytes, size_t size)
{
    const struct facts *facts = &fixture->facts;
    struct step_limits limits = {.max_rows = facts->max_rows,
                                 .logit_rows = facts->logit_rows,
                                 .kv_pages = facts->kv_pages,
                                 .page_tokens = facts->page_tokens,
                                 .context = facts->context,
                                 .vocab = facts->config.vocab};
    struct step step;
    _cleanup_free_ void *memory = NULL;
    struct error error;
    if (message_decode_step(bytes, size, &limits, &step, &memory, &error) < 0) {
        fprintf(stderr, "worker %u: %s\n", index, error.text);
        atomic_fetch_add(&fixture->mismatches, 1);
        return;
    }
    if (atomic_load(&fixture->control->serving) != step.epoch || atomic_load(&fixture->mode) == WORKER_LOSES)
        return; /* of another life, or never come */
    uint64_t hash = 1;
    for (size_t i = 0; i < size; i++)
        hash = mix(hash, ((const unsigned char *)bytes)[i]);
    if (atomic_load(&fixture->seen[index]) == hash)
        return; /* sent again, and run already */
    atomic_store(&fixture->seen[index], hash);
    if (index == 0) {
        atomic_fetch_add(&fixture->steps, 1);
        atomic_fetch_add(&fixture->rows, step.rows);
        if (step.sequences > atomic_load(&fixture->widest))
            atomic_store(&fixture->widest, step.sequences);
        answer_step(fixture, &step);
    }
}

/* Worker 1, as long as the mode is WORKER_BREAKS: something that dies as soon as the front connects. */
static void break_connections(struct fixture *fixture)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(address.sun_path, sizeof address.sun_path, "%.90s/worker.1.ipc", fixture->rundir);
    channel_close(fixture->channels[1]);
    fixture->channels[1] = NULL;
    unlink(address.sun_path);
    _cleanup_close_ int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (bind(listener, (const struct sockaddr *)(const void *)&address, sizeof address) < 0 || listen(listener, 8) < 0)
        atomic_fetch_add(&fixture->mismatches, 1);
    while (atomic_load(&fixture->mode) == WORKER_BREAKS && !atomic_load(&fixture->ending)) {
        int fd = accept(listener, NULL, NULL);
        if (fd < 0)
            usleep(1000);
        else
            close(fd);
    }
    unlink(address.sun_path);
    if (channel_listen(CHANNEL_PAIR, address.sun_path, &fixture->channels[1], NULL) < 0)
        atomic_fetch_add(&fixture->mismatches, 1);
}

static void *run_worker(void *context)
{
    _cleanup_free_ struct worker *worker = context;
    struct fixture *fixture = worker->fixture;
    while (!atomic_load(&fixture->ending)) {
        void *bytes;
        size_t size;
        if (worker->index == 1 && atomic_load(&fixture->mode) == WORKER_BREAKS)
            break_connections(fixture);
        if (channel_receive(fixture->channels[worker->index], 20, &bytes, &size, NULL) < 0)
            continue;
        take_step(fixture, worker->index, bytes, size);
        free(bytes);
    }
    return NULL;
}

/* ---- the instance ---- */

static void must(int status, const struct error *error)
{
    if (status < 0)
        fail_msg("%s", error->text);
}

static void fill_facts(struct fixture *fixture)
{
    struct error error;
    char path[600];
    snprintf(path, sizeof path, "%s/model/config.json", getenv("CALYPTE_TESTS"));
    json_t *config = json_load_file(path, 0, NULL);
    snprintf(path, sizeof path, "%s/model/generation_config.json", getenv("CALYPTE_TESTS"));
    json_t *generation = json_load_file(path, 0, NULL);
    assert_non_null(config);
    struct facts *facts = &fixture->facts;
    must(model_config_parse(config, generation, 0, &facts->config, &error), &error);
    json_decref(config);
    json_decref(generation);
    snprintf(facts->container, sizeof facts->container, "%s", fixture->container);
    facts->dense_format = facts->expert_format = facts->stripes = 1;
    facts->workers = FIXTURE_WORKERS;
    facts->threads = facts->nodes = 1;
    facts->activations = ACTIVATIONS_INT8;
    facts->kv = KV_F16;
    facts->index_topk = facts->config.index_topk;
    facts->max_rows = 8;
    facts->logit_rows = 4;
    facts->prefill_chunk = 5;
    facts->slots = facts->queue = 2;
    facts->page_tokens = 4;
    facts->context = 96;
    facts->kv_pages = 2 * facts->context / facts->page_tokens;
    facts->pool_slots = facts->config.top_k;
    for (uint32_t w = 0; w < FIXTURE_WORKERS; w++)
        facts->core_count[w] = 1;
}

static void start_front(struct fixture *fixture)
{
    const char *folder = getenv("CALYPTE_BIN");
    char program[PATH_MAX], notify[16], wake[16];
    int ends[2];
    assert_non_null(folder);
    snprintf(program, sizeof program, "%s/calypte-front", folder);
    fixture->wake_fd = eventfd(0, EFD_NONBLOCK);
    assert_true(fixture->wake_fd >= 0);
    assert_int_equal(pipe(ends), 0);
    snprintf(notify, sizeof notify, "%d", ends[1]);
    snprintf(wake, sizeof wake, "%d", fixture->wake_fd);
    fixture->front = fork();
    assert_true(fixture->front >= 0);
    if (fixture->front == 0) {
        close(ends[0]);
        execl(program, program, "--instance", fixture->instance, "--rundir", fixture->rundir, "--notify-fd", notify,
              "--wake-fd", wake, (char *)NULL);
        _exit(127);
    }
    close(ends[1]);
    char line[1100] = "";
    ssize_t length = read(ends[0], line, sizeof line - 1);
    close(ends[0]);
    if (length <= 0 || strcmp(line, "ready\n") != 0)
        fail_msg("%s said \"%s\"", program, line);
}

struct fixture *fixture_start(bool with_tokenizer)
{
    struct error error;
    struct fixture *fixture = calloc(1, sizeof *fixture);
    assert_non_null(fixture);
    strcpy(fixture->folder, "/tmp/calypte-front-XXXXXX");
    assert_non_null(mkdtemp(fixture->folder));
    snprintf(fixture->instance, sizeof fixture->instance, "test-front-%d", (int)getpid());
    snprintf(fixture->rundir, sizeof fixture->rundir, "%s/run", fixture->folder);
    assert_int_equal(mkdir(fixture->rundir, 0700), 0);
    snprintf(fixture->socket, sizeof fixture->socket, "%s/api.ipc", fixture->rundir);
    if (with_tokenizer) {
        char path[600];
        snprintf(path, sizeof path, "%s/model", getenv("CALYPTE_TESTS"));
        _cleanup_free_ char *absolute = realpath(path, NULL);
        assert_non_null(absolute);
        snprintf(fixture->container, sizeof fixture->container, "%s", absolute);
        must(tokenizer_open(fixture->container, &fixture->tokenizer, &error), &error);
    } else
        snprintf(fixture->container, sizeof fixture->container, "%s", fixture->rundir);
    fill_facts(fixture);
    segment_unlink_all(fixture->instance);
    must(control_create(fixture->instance, &fixture->facts, &fixture->control, &error), &error);
    exchange_layout(&fixture->facts, &fixture->layout);
    struct segment_options options = {.kind = SEGMENT_EXCHANGE, .node = -1, .populate_threads = 1};
    must(segment_create(fixture->instance, "exchange", fixture->layout.segment_bytes, &options, &fixture->exchange,
                        &error),
         &error);
    size_t kv_rows = (size_t)fixture->facts.kv_pages * fixture->facts.page_tokens;
    fixture->kv = malloc(kv_rows * sizeof *fixture->kv);
    assert_non_null(fixture->kv);
    memset(fixture->kv, 0xff, kv_rows * sizeof *fixture->kv);

    start_front(fixture); /* before this process has threads */
    for (uint32_t w = 0; w < FIXTURE_WORKERS; w++) {
        char path[128];
        snprintf(path, sizeof path, "%s/worker.%u.ipc", fixture->rundir, w);
        must(channel_listen(CHANNEL_PAIR, path, &fixture->channels[w], &error), &error);
        struct worker *worker = malloc(sizeof *worker);
        assert_non_null(worker);
        *worker = (struct worker){.fixture = fixture, .index = w};
        assert_int_equal(pthread_create(&fixture->threads[w], NULL, run_worker, worker), 0);
    }
    fixture_serve(fixture);
    return fixture;
}

void fixture_stop(struct fixture *fixture)
{
    int status = 0;
    if (fixture->front > 0) {
        kill(fixture->front, SIGTERM);
        assert_int_equal(waitpid(fixture->front, &status, 0), fixture->front);
        assert_true(WIFEXITED(status));
        assert_int_equal(WEXITSTATUS(status), 0);
    }
    atomic_store(&fixture->ending, 1);
    for (uint32_t w = 0; w < FIXTURE_WORKERS; w++) {
        pthread_join(fixture->threads[w], NULL);
        channel_close(fixture->channels[w]);
    }
    assert_int_equal(atomic_load(&fixture->mismatches), 0);
    tokenizer_close(fixture->tokenizer);
    close(fixture->wake_fd);
    segment_detach(&fixture->exchange);
    control_detach(fixture->control);
    segment_unlink_all(fixture->instance);
    unlink(fixture->socket); /* a front that was killed leaves it */
    assert_int_equal(rmdir(fixture->rundir), 0);
    assert_int_equal(rmdir(fixture->folder), 0);
    free(fixture->kv);
    free(fixture);
}

/* ---- a client ---- */

struct channel *fixture_dial(struct fixture *fixture)
{
    struct channel *channel;
    struct error error;
    must(channel_dial(CHANNEL_REQ, fixture->socket, -1, &channel, &error), &error);
    return channel;
}

void fixture_send(struct channel *channel, const char *request)
{
    struct error error;
    must(channel_send(channel, request, strlen(request), 5000, &error), &error);
}

json_t *fixture_receive(struct channel *channel)
{
    void *bytes;
    size_t size;
    struct error error;
    must(channel_receive(channel, 15000, &bytes, &size, &error), &error);
    json_t *answer = json_loadb(bytes, size, JSON_ALLOW_NUL, NULL);
    free(bytes);
    assert_non_null(answer);
    return answer;
}

json_t *fixture_ask(struct fixture *fixture, const char *request)
{
    struct channel *channel = fixture_dial(fixture);
    fixture_send(channel, request);
    json_t *answer = fixture_receive(channel);
    channel_close(channel);
    return answer;
}

void fixture_check_tokens(const json_t *answer, const int32_t *tokens, size_t count)
{
    _cleanup_free_ char *text = json_dumps(answer, JSON_COMPACT);
    if (!json_is_true(json_object_get(answer, "ok")))
        fail_msg("%s", text);
    const json_t *got = json_object_get(answer, "tokens");
    if (json_array_size(got) != count)
        fail_msg("%zu tokens are expected: %s", count, text);
    for (size_t i = 0; i < count; i++)
        assert_int_equal(json_integer_value(json_array_get(got, i)), tokens[i]);
}

void fixture_check_error(json_t *answer, const char *code, const char *field, const char *part)
{
    _cleanup_free_ char *text = json_dumps(answer, JSON_COMPACT);
    const json_t *error = json_object_get(answer, "error");
    const char *got_code = json_string_value(json_object_get(error, "code"));
    const char *got_field = json_string_value(json_object_get(error, "field"));
    const char *message = json_string_value(json_object_get(error, "message"));
    bool right = json_is_false(json_object_get(answer, "ok")) && got_code && message && strcmp(got_code, code) == 0 &&
                 strstr(message, part) && (field ? got_field && strcmp(got_field, field) == 0 : !got_field);
    if (!right)
        fail_msg("expected %s, field %s, \"%s\"; got %s", code, field ? field : "none", part, text);
    json_decref(answer);
}

void fixture_wait_status(struct fixture *fixture, const char *name, int64_t value)
{
    int64_t got = -1;
    for (int i = 0; i < 500; i++) {
        json_t *status = fixture_ask(fixture, "{\"op\":\"status\"}");
        got = json_integer_value(json_object_get(status, name));
        json_decref(status);
        if (got == value)
            return;
        usleep(10000);
    }
    fail_msg("status: %s is %ld, expected %ld", name, (long)got, (long)value);
}

static void wake(struct fixture *fixture)
{
    uint64_t one = 1;
    assert_int_equal(write(fixture->wake_fd, &one, sizeof one), sizeof one);
}

void fixture_raise_epoch(struct fixture *fixture)
{
    control_raise_epoch(fixture->control);
    wake(fixture);
}

void fixture_serve(struct fixture *fixture)
{
    atomic_store(&fixture->control->serving, atomic_load(&fixture->control->epoch));
    wake(fixture);
}
