/* What the front does when something is wrong: requests, clients, workers, epochs. A real calypte-front over its real
 * socket. */
#include "tests/unit/front_fixture.h"

#include "proto/cleanup.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <nng/nng.h>
#include <nng/protocol/reqrep0/req.h>

#include <signal.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>

static int set_up(void **state)
{
    *state = fixture_start(true);
    return 0;
}

static int tear_down(void **state)
{
    fixture_stop(*state);
    return 0;
}

static const int32_t prompt[] = {300, 301, 302, 303, 304, 305};
#define GENERATE "{\"op\":\"generate\",\"tokens\":[300,301,302,303,304,305]}"

static void check_generate(struct fixture *fixture, json_t *answer)
{
    size_t count;
    _cleanup_free_ int32_t *expected = fixture_expected(fixture, prompt, 6, SIZE_MAX, &count);
    fixture_check_tokens(answer, expected, count);
    json_decref(answer);
}

static void test_bad_requests(void **state)
{
    struct fixture *fixture = *state;
    static const struct {
        const char *request, *field, *part;
    } cases[] = {
        {"", NULL, "not JSON"},
        {"{", NULL, "not JSON"},
        {"nonsense", NULL, "not JSON"},
        {"[1,2]", NULL, "must be a JSON object"},
        {"{\"op\":\"status\"} {}", NULL, "not JSON"},
        {"{\"op\":\"status\",\"op\":\"stats\"}", NULL, "not JSON"},
        {"{\"op\":\"\xff\"}", NULL, "not UTF-8"},
        {"{\"op\":\"\\ud800\"}", NULL, "not JSON"},
        {"{}", "op", "missing"},
        {"{\"op\":7}", "op", "string"},
        {"{\"op\":\"generat\"}", "op", "`generate`"},
        {"{\"op\":\"status\",\"x\":1}", "x", "no such field"},
        {"{\"op\":\"generate\"}", "prompt", "exactly one"},
        {"{\"op\":\"generate\",\"prompt\":\"a\",\"tokens\":[1]}", "prompt", "exactly one"},
        {"{\"op\":\"generate\",\"prompt\":5}", "prompt", "string"},
        {"{\"op\":\"generate\",\"prompt\":\"\",\"raw\":true}", "prompt", "empty"},
        {"{\"op\":\"generate\",\"prompt\":\"a\\u0000b\"}", "prompt", "U+0000"},
        {"{\"op\":\"generate\",\"prompt\":\"a\",\"max_token\":1}", "max_token", "`max_tokens`"},
        {"{\"op\":\"generate\",\"tokens\":[]}", "tokens", "empty"},
        {"{\"op\":\"generate\",\"tokens\":\"1 2\"}", "tokens", "array"},
        {"{\"op\":\"generate\",\"tokens\":[1,-1]}", "tokens", "element 1"},
        {"{\"op\":\"generate\",\"tokens\":[4096]}", "tokens", "0 to 4095"},
        {"{\"op\":\"generate\",\"tokens\":[1.5]}", "tokens", "element 0"},
        {"{\"op\":\"generate\",\"tokens\":[null]}", "tokens", "element 0"},
        {"{\"op\":\"generate\",\"tokens\":[99999999999999999999]}", "tokens", "element 0"},
        {"{\"op\":\"generate\",\"tokens\":[1],\"max_tokens\":0}", "max_tokens", "from 1"},
        {"{\"op\":\"generate\",\"tokens\":[1],\"max_tokens\":-5}", "max_tokens", "from 1"},
        {"{\"op\":\"generate\",\"tokens\":[1],\"max_tokens\":1e30}", "max_tokens", "from 1"},
        {"{\"op\":\"generate\",\"tokens\":[1],\"max_tokens\":99999999999999999999}", "max_tokens", "from 1"},
        {"{\"op\":\"generate\",\"tokens\":[1],\"max_tokens\":\"5\"}", "max_tokens", "number"},
        {"{\"op\":\"generate\",\"tokens\":[1],\"temperature\":-1}", "temperature", "0 to 100"},
        {"{\"op\":\"generate\",\"tokens\":[1],\"temperature\":\"hot\"}", "temperature", "number"},
        {"{\"op\":\"generate\",\"tokens\":[1],\"top_p\":0}", "top_p", "top_p"},
        {"{\"op\":\"generate\",\"tokens\":[1],\"top_p\":1.01}", "top_p", "0 to 1"},
        {"{\"op\":\"generate\",\"tokens\":[1],\"seed\":-1}", "seed", "from 0"},
        {"{\"op\":\"generate\",\"tokens\":[1],\"seed\":1.5}", "seed", "whole number"},
        {"{\"op\":\"generate\",\"tokens\":[1],\"stop\":\"\"}", "stop", "not empty"},
        {"{\"op\":\"generate\",\"tokens\":[1],\"stop\":[1]}", "stop", "string"},
        {"{\"op\":\"generate\",\"tokens\":[1],\"stop\":[\"a\",\"b\",\"c\",\"d\",\"e\",\"f\",\"g\",\"h\",\"i\",\"j\","
         "\"k\",\"l\",\"m\",\"n\","
         "\"o\",\"p\",\"q\"]}",
         "stop", "16"},
        {"{\"op\":\"generate\",\"tokens\":[1],\"session\":\"\"}", "session", "1 to 63"},
        {"{\"op\":\"generate\",\"tokens\":[1],\"system\":\"x\"}", "system", "nothing with tokens"},
        {"{\"op\":\"generate\",\"prompt\":\"x\",\"raw\":1}", "raw", "true or false"},
        {"{\"op\":\"generate\",\"prompt\":\"x\",\"think\":\"hard\"}", "think", "think"},
        {"{\"op\":\"generate\",\"prompt\":\"x\",\"think\":3}", "think", "string"},
        {"{\"op\":\"generate\",\"prompt\":\"x\",\"raw\":true,\"think\":true}", "think", "raw"},
        {"{\"op\":\"generate\",\"messages\":[]}", "messages", "1 to"},
        {"{\"op\":\"generate\",\"messages\":{}}", "messages", "array"},
        {"{\"op\":\"generate\",\"messages\":[5]}", "messages[0]", "object"},
        {"{\"op\":\"generate\",\"messages\":[{\"role\":\"user\"}]}", "messages[0].content", "content"},
        {"{\"op\":\"generate\",\"messages\":[{\"role\":\"user\",\"content\":\"x\",\"nam\":1}]}", "messages[0].nam",
         "no such field"},
        {"{\"op\":\"generate\",\"messages\":[{\"role\":\"usr\",\"content\":\"x\"}]}", "messages[0].role", "role"},
        {"{\"op\":\"next\"}", "id", "missing"},
        {"{\"op\":\"next\",\"id\":\"x\"}", "id", "no request"},
        {"{\"op\":\"next\",\"id\":\"x\",\"wait\":1}", "wait", "`wait_ms`"},
        {"{\"op\":\"cancel\",\"id\":5}", "id", "string"},
        {"{\"op\":\"tokenize\"}", "text", "missing"},
        {"{\"op\":\"detokenize\",\"tokens\":[4090]}", "tokens", "4090"},
        {"{\"op\":\"score\",\"tokens\":[1,2],\"text\":\"x\"}", "text", "exactly one"},
        {"{\"op\":\"score\",\"tokens\":[1,2],\"context\":1}", "context", "from 2"},
        {"{\"op\":\"score\",\"tokens\":[1,2],\"logits\":\"/x\",\"draft_logits\":\"/x\"}", "draft_logits", "same file"},
        {"{\"op\":\"score\",\"tokens\":[1,2],\"logits\":\"/tmp\"}", "logits", "a folder"},
        {"{\"op\":\"score\",\"tokens\":[1,2],\"logits\":\"/dev/null\"}", "logits", "no regular file"},
        {"{\"op\":\"next\",\"id\":\"a\\nb\"}", "id", "\"a?b\""},
    };
    struct channel *channel = fixture_dial(fixture);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fixture_send(channel, cases[i].request);
        fixture_check_error(fixture_receive(channel), "bad_request", cases[i].field, cases[i].part);
    }
    _cleanup_free_ char *deep = calloc(1, 400000);
    assert_non_null(deep);
    strcpy(deep, "{\"op\":");
    memset(deep + 6, '[', 300000);
    fixture_send(channel, deep);
    fixture_check_error(fixture_receive(channel), "bad_request", NULL, "not JSON");
    channel_close(channel);
    assert_int_equal(atomic_load(&fixture->steps), 0);
    check_generate(fixture, fixture_ask(fixture, GENERATE));
}

/* Damaged requests get an answer, whatever it is, and the front lives. */
static void test_mutated_requests(void **state)
{
    struct fixture *fixture = *state;
    static const char *const samples[] = {
        "{\"op\":\"generate\",\"tokens\":[300,301],\"max_tokens\":2,\"stop\":[\"x\"],\"seed\":1,\"temperature\":0.5,"
        "\"top_p\":0.5}",
        "{\"op\":\"generate\",\"messages\":[{\"role\":\"user\",\"content\":\"Hello\"}],\"max_tokens\":1,\"think\":"
        "\"on\"}",
        "{\"op\":\"submit\",\"prompt\":\"Hello\",\"raw\":true,\"max_tokens\":1,\"session\":\"a\"}",
        "{\"op\":\"score\",\"tokens\":[300,301,302],\"context\":2}",
        "{\"op\":\"detokenize\",\"tokens\":[300,301,302],\"skip_special\":true}",
    };
    uint64_t random = 88172645463325252u;
    struct channel *channel = fixture_dial(fixture);
    for (int i = 0; i < 3000; i++) {
        char text[256];
        strcpy(text, samples[i % 5]);
        for (int change = 0; change < 1 + i % 3; change++) {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            static const char bytes[] = "\"{}[]:,0-9e.\\x\xc3 ntf";
            text[(random >> 32) % strlen(text)] = bytes[(random >> 20) % (sizeof bytes - 1)];
        }
        fixture_send(channel, text);
        json_t *answer = fixture_receive(channel);
        assert_true(json_is_boolean(json_object_get(answer, "ok")));
        json_decref(answer);
    }
    channel_close(channel);
    check_generate(fixture, fixture_ask(fixture, GENERATE));
}

static void test_large_messages(void **state)
{
    struct fixture *fixture = *state;
    size_t size = (size_t)17 << 20;
    _cleanup_free_ char *text = malloc(((size_t)65 << 20) + 1);
    assert_non_null(text);
    memset(text, ' ', size);
    memcpy(text, "{\"op\":\"status\"", 14);
    text[size - 1] = '}';
    text[size] = 0;
    struct channel *channel = fixture_dial(fixture);
    fixture_send(channel, text);
    fixture_check_error(fixture_receive(channel), "bad_request", NULL, "17825792 bytes");
    size = (size_t)65 << 20;
    memset(text, ' ', size);
    text[size] = 0;
    fixture_send(channel, text);
    void *bytes;
    size_t got;
    struct error error;
    assert_int_equal(channel_receive(channel, 5000, &bytes, &got, &error), -ECONNRESET);
    channel_close(channel);
    check_generate(fixture, fixture_ask(fixture, GENERATE));
}

/* Two slots and a queue of two: the fifth is refused at once; the others are answered in turn. */
static void test_busy(void **state)
{
    struct fixture *fixture = *state;
    struct channel *channels[4];
    atomic_store(&fixture->mode, WORKER_HOLDS);
    for (int i = 0; i < 4; i++) {
        channels[i] = fixture_dial(fixture);
        fixture_send(channels[i], GENERATE);
        fixture_wait_status(fixture, i < 2 ? "running" : "queued", i < 2 ? i + 1 : i - 1);
    }
    fixture_check_error(fixture_ask(fixture, GENERATE), "busy", NULL, "queue");
    fixture_check_error(fixture_ask(fixture, "{\"op\":\"score\",\"tokens\":[1,2]}"), "busy", NULL, "queue");
    atomic_store(&fixture->mode, WORKER_GOOD);
    for (int i = 0; i < 4; i++) {
        check_generate(fixture, fixture_receive(channels[i]));
        channel_close(channels[i]);
    }
}

/* Waits until `count` of the requests that `status` lists have `value` (taken over) under `name`. */
static void wait_requests(struct fixture *fixture, const char *name, json_t *value, size_t count)
{
    size_t got = SIZE_MAX;
    for (int i = 0; i < 500 && got != count; i++) {
        json_t *status = fixture_ask(fixture, "{\"op\":\"status\"}");
        const json_t *requests = json_object_get(status, "requests");
        got = 0;
        for (size_t r = 0; r < json_array_size(requests); r++)
            got += json_equal(json_object_get(json_array_get(requests, r), name), value) ? 1 : 0;
        json_decref(status);
        usleep(5000);
    }
    json_decref(value);
    assert_int_equal(got, count);
}

/* A client that is gone: its request leaves the queue, or stops running. */
static void test_client_gone(void **state)
{
    struct fixture *fixture = *state;
    struct channel *channels[3];
    atomic_store(&fixture->mode, WORKER_HOLDS);
    for (int i = 0; i < 3; i++) {
        channels[i] = fixture_dial(fixture);
        fixture_send(channels[i], GENERATE);
        fixture_wait_status(fixture, i < 2 ? "running" : "queued", i < 2 ? i + 1 : 1);
    }
    channel_close(channels[2]);
    fixture_wait_status(fixture, "queued", 0);
    channel_close(channels[0]);
    wait_requests(fixture, "state", json_string("ending"), 1); /* it is in the STEP in flight, and leaves after it */
    for (int i = 0; i < 2000 && atomic_load(&fixture->steps) == 0; i++)
        usleep(1000); /* that STEP has come */
    uint32_t rows = atomic_load(&fixture->rows);
    atomic_store(&fixture->mode, WORKER_GOOD);
    check_generate(fixture, fixture_receive(channels[1]));
    channel_close(channels[1]);
    fixture_wait_status(fixture, "running", 0);
    size_t count;
    free(fixture_expected(fixture, prompt, 6, SIZE_MAX, &count));
    assert_true(atomic_load(&fixture->rows) - rows <= 6 + count); /* of the one that was left, nobody else's */

    /* a waiting `next` that is gone ends the submitted request too */
    atomic_store(&fixture->mode, WORKER_HOLDS);
    json_t *answer = fixture_ask(fixture, "{\"op\":\"submit\",\"tokens\":[300]}");
    char request[128];
    snprintf(request, sizeof request, "{\"op\":\"next\",\"id\":\"%s\",\"wait_ms\":60000}",
             json_string_value(json_object_get(answer, "id")));
    json_decref(answer);
    struct channel *channel = fixture_dial(fixture);
    fixture_send(channel, request);
    wait_requests(fixture, "awaited", json_true(), 1);
    channel_close(channel);
    wait_requests(fixture, "awaited", json_true(), 0);
    atomic_store(&fixture->mode, WORKER_GOOD);
    fixture_wait_status(fixture, "running", 0);
    fixture_check_error(fixture_ask(fixture, request), "bad_request", "id", "no request");
}

/* Connections that end before a word was said: whoever comes later is served. */
static void test_connects_and_goes(void **state)
{
    struct fixture *fixture = *state;
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    memcpy(address.sun_path, fixture->socket, strlen(fixture->socket) + 1);
    for (int i = 0; i < 100; i++) {
        int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
        assert_int_equal(connect(fd, (const struct sockaddr *)&address, sizeof address), 0);
        close(fd);
    }
    check_generate(fixture, fixture_ask(fixture, GENERATE));
}

/* nng's REQ sends a request again when the answer is late: it is one request. */
static void test_resent(void **state)
{
    struct fixture *fixture = *state;
    char url[160];
    nng_socket socket;
    nng_msg *message;
    atomic_store(&fixture->mode, WORKER_HOLDS);
    snprintf(url, sizeof url, "ipc://%s", fixture->socket);
    assert_int_equal(nng_req0_open(&socket), 0);
    assert_int_equal(nng_socket_set_ms(socket, NNG_OPT_REQ_RESENDTIME, 30), 0);
    assert_int_equal(nng_dial(socket, url, NULL, 0), 0);
    char text[] = GENERATE;
    assert_int_equal(nng_send(socket, text, strlen(text), 0), 0);
    usleep(400000);
    atomic_store(&fixture->mode, WORKER_GOOD);
    assert_int_equal(nng_recvmsg(socket, &message, 0), 0);
    json_t *answer = json_loadb(nng_msg_body(message), nng_msg_len(message), 0, NULL);
    nng_msg_free(message);
    check_generate(fixture, answer);
    nng_close(socket);
    answer = fixture_ask(fixture, "{\"op\":\"stats\"}");
    assert_int_equal(json_integer_value(json_object_get(answer, "requests")), 1);
    json_decref(answer);
}

/* One client with many requests at once on one connection. */
static void test_many_contexts(void **state)
{
    enum { CONTEXTS = 50 };
    struct fixture *fixture = *state;
    char url[160];
    nng_socket socket;
    nng_ctx contexts[CONTEXTS];
    nng_aio *aios[CONTEXTS];
    snprintf(url, sizeof url, "ipc://%s", fixture->socket);
    assert_int_equal(nng_req0_open(&socket), 0);
    assert_int_equal(nng_dial(socket, url, NULL, 0), 0);
    for (int i = 0; i < CONTEXTS; i++) {
        nng_msg *message;
        assert_int_equal(nng_ctx_open(&contexts[i], socket), 0);
        assert_int_equal(nng_aio_alloc(&aios[i], NULL, NULL), 0);
        assert_int_equal(nng_msg_alloc(&message, 0), 0);
        assert_int_equal(nng_msg_append(message, "{\"op\":\"status\"}", 15), 0);
        nng_aio_set_msg(aios[i], message);
        nng_ctx_send(contexts[i], aios[i]);
    }
    for (int i = 0; i < CONTEXTS; i++) {
        nng_aio_wait(aios[i]);
        assert_int_equal(nng_aio_result(aios[i]), 0);
        nng_aio_set_timeout(aios[i], 10000);
        nng_ctx_recv(contexts[i], aios[i]);
    }
    for (int i = 0; i < CONTEXTS; i++) {
        nng_aio_wait(aios[i]);
        assert_int_equal(nng_aio_result(aios[i]), 0);
        nng_msg_free(nng_aio_get_msg(aios[i]));
        nng_aio_free(aios[i]);
    }
    nng_close(socket);
}

/* A process died: the request in service gets `restarted`, the queued one waits and is answered after; the late answer
 * of the old epoch does not count. */
static void test_epoch(void **state)
{
    struct fixture *fixture = *state;
    struct channel *channels[3];
    static const char *const idle = "{\"op\":\"generate\",\"tokens\":[300,301,302,303,304,305]}";
    atomic_store(&fixture->mode, WORKER_HOLDS);
    for (int i = 0; i < 3; i++) {
        channels[i] = fixture_dial(fixture);
        fixture_send(channels[i], i == 2 ? idle : GENERATE);
        fixture_wait_status(fixture, i < 2 ? "running" : "queued", i < 2 ? i + 1 : 1);
    }
    fixture_raise_epoch(fixture);
    atomic_store(&fixture->mode, WORKER_GOOD);
    fixture_check_error(fixture_receive(channels[0]), "restarted", NULL, "died");
    /* the second had its slot, but the STEP that was in flight did not carry it: it waits for the next life */
    fixture_wait_status(fixture, "running", 2);
    json_t *status = fixture_ask(fixture, "{\"op\":\"status\"}");
    assert_true(json_is_false(json_object_get(status, "serving")));
    json_decref(status);
    uint32_t steps = atomic_load(&fixture->steps);
    usleep(50000);
    assert_int_equal(atomic_load(&fixture->steps), steps); /* no STEP while not all are ready */
    fixture_serve(fixture);
    check_generate(fixture, fixture_receive(channels[1]));
    check_generate(fixture, fixture_receive(channels[2]));
    for (int i = 0; i < 3; i++)
        channel_close(channels[i]);
    check_generate(fixture, fixture_ask(fixture, GENERATE));
}

/* Nothing that worker 0 says can hurt: wrong ids, epochs, counts; numbers that are none; an expert that cannot be read.
 */
static void test_workers_at_fault(void **state)
{
    struct fixture *fixture = *state;
    atomic_store(&fixture->mode, WORKER_BABBLES);
    check_generate(fixture, fixture_ask(fixture, GENERATE));
    atomic_store(&fixture->mode, WORKER_NAN);
    fixture_check_error(fixture_ask(fixture, GENERATE), "model_error", NULL, "not numbers");
    fixture_check_error(fixture_ask(fixture, "{\"op\":\"score\",\"tokens\":[1,2,3]}"), "model_error", NULL,
                        "not numbers");
    atomic_store(&fixture->mode, WORKER_LIES);
    fixture_check_error(fixture_ask(fixture, GENERATE), "model_error", NULL, "rows of logits");
    atomic_store(&fixture->mode, WORKER_EXPERT_FAILS);
    fixture_check_error(fixture_ask(fixture, GENERATE), "model_error", NULL,
                        "expert 17 of layer 3, slice 2, in experts-0-00003.safetensors of ");
    atomic_store(&fixture->mode, WORKER_GOOD);
    check_generate(fixture, fixture_ask(fixture, GENERATE));
    json_t *answer = fixture_ask(fixture, "{\"op\":\"stats\"}");
    assert_int_equal(json_integer_value(json_object_get(answer, "errors")), 4);
    assert_int_equal(json_integer_value(json_object_get(answer, "kv_pages_free")),
                     fixture->facts.kv_pages); /* nothing leaks */
    json_decref(answer);
}

/* A STEP that never arrives is sent again, and one that arrives twice is answered once. */
static void test_lost_step(void **state)
{
    struct fixture *fixture = *state;
    atomic_store(&fixture->mode, WORKER_LOSES);
    struct channel *channel = fixture_dial(fixture);
    fixture_send(channel, GENERATE);
    fixture_wait_status(fixture, "running", 1);
    usleep(300000);
    assert_int_equal(atomic_load(&fixture->steps), 0);
    atomic_store(&fixture->mode, WORKER_GOOD);
    check_generate(fixture, fixture_receive(channel));
    atomic_store(&fixture->mode, WORKER_HOLDS);
    fixture_send(channel, GENERATE);
    sleep(3);
    atomic_store(&fixture->mode, WORKER_GOOD);
    check_generate(fixture, fixture_receive(channel));
    channel_close(channel);
}

/* A worker that died again and again while the front connected is reached when it is back. */
static void test_broken_connections(void **state)
{
    struct fixture *fixture = *state;
    atomic_store(&fixture->mode, WORKER_BREAKS);
    sleep(1);
    struct channel *channel = fixture_dial(fixture);
    fixture_send(channel, GENERATE);
    usleep(300000);
    atomic_store(&fixture->mode, WORKER_GOOD);
    check_generate(fixture, fixture_receive(channel));
    channel_close(channel);
}

/* What was never fetched is bounded. */
static void test_unfetched(void **state)
{
    struct fixture *fixture = *state;
    char first[128] = "";
    for (int i = 0; i < 80; i++) {
        json_t *answer = fixture_ask(fixture, "{\"op\":\"submit\",\"tokens\":[300],\"max_tokens\":1}");
        if (!json_is_true(json_object_get(answer, "ok")))
            fail_msg("request %d was refused", i);
        if (i == 0)
            snprintf(first, sizeof first, "{\"op\":\"next\",\"id\":\"%s\"}",
                     json_string_value(json_object_get(answer, "id")));
        json_decref(answer);
        fixture_wait_status(fixture, "running", 0);
    }
    json_t *status = fixture_ask(fixture, "{\"op\":\"status\"}");
    assert_int_equal(json_array_size(json_object_get(status, "requests")), 64);
    json_decref(status);
    fixture_check_error(fixture_ask(fixture, first), "bad_request", "id", "no request");
}

static uint64_t switches(pid_t pid)
{
    char path[64], line[128];
    unsigned long count = 0;
    snprintf(path, sizeof path, "/proc/%d/status", (int)pid);
    _cleanup_fclose_ FILE *file = fopen(path, "r");
    assert_non_null(file);
    while (fgets(line, sizeof line, file))
        if (sscanf(line, "voluntary_ctxt_switches: %lu", &count) == 1)
            return count;
    fail();
    return 0;
}

/* An idle front does not even wake. */
static void test_idle(void **state)
{
    struct fixture *fixture = *state;
    check_generate(fixture, fixture_ask(fixture, GENERATE));
    /* the end of the connection above may still come; after that there is nothing to wake for */
    for (int i = 0; i < 20; i++) {
        uint64_t before = switches(fixture->front);
        usleep(500000);
        if (switches(fixture->front) == before)
            return;
    }
    fail_msg("the front wakes again and again");
}

struct waiting {
    struct channel *channel;
    pthread_t thread;
    void *bytes;
    size_t size;
    int status;
};

static void *wait_for_answer(void *context)
{
    struct waiting *waiting = context;
    waiting->status = channel_receive(waiting->channel, 15000, &waiting->bytes, &waiting->size, NULL);
    return NULL;
}

/* The epoch is raised because the instance ends: nobody is told of a process that died. */
static void test_stopping(void **state)
{
    struct fixture *fixture = *state;
    struct channel *channel = fixture_dial(fixture);
    atomic_store(&fixture->mode, WORKER_HOLDS);
    fixture_send(channel, GENERATE);
    fixture_wait_status(fixture, "running", 1);
    atomic_store(&fixture->control->stopping, 1);
    fixture_raise_epoch(fixture);
    fixture_check_error(fixture_receive(channel), "restarted", NULL, "the instance is stopping");
    channel_close(channel);
    atomic_store(&fixture->mode, WORKER_GOOD);
}

/* SIGTERM: who waits is told, running or queued. */
static void test_stopped(void **state)
{
    struct fixture *fixture = *state;
    struct waiting waiting[3];
    int status;
    atomic_store(&fixture->mode, WORKER_HOLDS);
    for (int i = 0; i < 3; i++) {
        waiting[i] = (struct waiting){.channel = fixture_dial(fixture)};
        fixture_send(waiting[i].channel, GENERATE);
        fixture_wait_status(fixture, i < 2 ? "running" : "queued", i < 2 ? i + 1 : 1);
        assert_int_equal(pthread_create(&waiting[i].thread, NULL, wait_for_answer, &waiting[i]), 0);
    }
    kill(fixture->front, SIGTERM);
    assert_int_equal(waitpid(fixture->front, &status, 0), fixture->front);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    fixture->front = 0;
    for (int i = 0; i < 3; i++) {
        pthread_join(waiting[i].thread, NULL);
        assert_int_equal(waiting[i].status, 0);
        fixture_check_error(json_loadb(waiting[i].bytes, waiting[i].size, 0, NULL), "restarted", NULL, "stopping");
        free(waiting[i].bytes);
        channel_close(waiting[i].channel);
    }
    atomic_store(&fixture->mode, WORKER_GOOD);
}

#define FRONT_TEST(test) cmocka_unit_test_setup_teardown(test, set_up, tear_down)

int main(void)
{
    const struct CMUnitTest tests[] = {
        FRONT_TEST(test_bad_requests),   FRONT_TEST(test_mutated_requests),
        FRONT_TEST(test_large_messages), FRONT_TEST(test_busy),
        FRONT_TEST(test_client_gone),    FRONT_TEST(test_connects_and_goes),
        FRONT_TEST(test_resent),         FRONT_TEST(test_many_contexts),
        FRONT_TEST(test_epoch),          FRONT_TEST(test_workers_at_fault),
        FRONT_TEST(test_lost_step),      FRONT_TEST(test_broken_connections),
        FRONT_TEST(test_unfetched),      FRONT_TEST(test_idle),
        FRONT_TEST(test_stopping),       FRONT_TEST(test_stopped),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    nng_fini(); /* it frees closed sockets in a thread of its own, which the end of the process may overtake */
    return failed;
}
