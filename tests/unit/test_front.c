/* What the front answers: a real calypte-front over its real socket. */
#include "tests/unit/front_fixture.h"

#include "proto/cleanup.h"
#include "proto/safetensors.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <dirent.h>
#include <fcntl.h>
#include <math.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>

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

static const int32_t prompt[] = {300, 301, 302, 303, 304, 305, 306, 307, 308, 309, 310, 311, 312, 313};
#define PROMPT (sizeof prompt / sizeof prompt[0])

/* {"op": OP, "tokens": [...], MORE} for free(). */
static char *request_text(const char *op, const int32_t *tokens, size_t count, const char *more)
{
    char *text = NULL;
    size_t size;
    FILE *file = open_memstream(&text, &size);
    assert_non_null(file);
    fprintf(file, "{\"op\":\"%s\",\"tokens\":[", op);
    for (size_t i = 0; i < count; i++)
        fprintf(file, "%s%d", i ? "," : "", tokens[i]);
    fprintf(file, "]%s%s}", more[0] ? "," : "", more);
    fclose(file);
    return text;
}

static json_t *ask_tokens(struct fixture *fixture, const char *op, const int32_t *tokens, size_t count,
                          const char *more)
{
    _cleanup_free_ char *text = request_text(op, tokens, count, more);
    return fixture_ask(fixture, text);
}

static void check_text(struct fixture *fixture, const json_t *answer, const int32_t *tokens, size_t count)
{
    _cleanup_free_ char *text = NULL;
    size_t length;
    struct error error;
    assert_int_equal(tokenizer_decode(fixture->tokenizer, tokens, count, true, &text, &length, &error), 0);
    assert_string_equal(json_string_value(json_object_get(answer, "text")), text);
}

static int64_t number(const json_t *answer, const char *object, const char *name)
{
    return json_integer_value(json_object_get(object ? json_object_get(answer, object) : answer, name));
}

static void test_generate(void **state)
{
    struct fixture *fixture = *state;
    size_t count;
    _cleanup_free_ int32_t *expected = fixture_expected(fixture, prompt, PROMPT, SIZE_MAX, &count);
    assert_true(count > 1 && count < 60);
    json_t *answer = ask_tokens(fixture, "generate", prompt, PROMPT, "");
    fixture_check_tokens(answer, expected, count);
    check_text(fixture, answer, expected, count);
    assert_string_equal(json_string_value(json_object_get(answer, "finish")), "stop");
    assert_int_equal(number(answer, "usage", "prompt"), PROMPT);
    assert_int_equal(number(answer, "usage", "answer"), count);
    const json_t *timing = json_object_get(answer, "timing");
    assert_true(json_number_value(json_object_get(timing, "first_token_s")) > 0);
    assert_true(json_number_value(json_object_get(timing, "prompt_tokens_per_s")) > 0);
    assert_true(json_number_value(json_object_get(timing, "answer_tokens_per_s")) > 0);
    assert_true(fabs(json_number_value(json_object_get(timing, "hit_rate")) - 0.75) < 1e-9);
    /* 14 prompt tokens in chunks of 5, and one STEP for every further token, each 4096 bytes of disk in this test */
    assert_int_equal(json_integer_value(json_object_get(timing, "disk_bytes")), 4096 * (3 + (int64_t)count));
    json_decref(answer);
    assert_int_equal(atomic_load(&fixture->steps), 3 + count);
    assert_int_equal(atomic_load(&fixture->rows), PROMPT + count);
}

/* Prompts as text are the ids that the tokenizer and the chat template make of them. */
static void test_prompts(void **state)
{
    struct fixture *fixture = *state;
    static const struct {
        const char *request, *rendered;
    } cases[] = {
        {"{\"op\":\"generate\",\"prompt\":\"What is a river?\",\"raw\":true}", "What is a river?"},
        {"{\"op\":\"generate\",\"prompt\":\"What is a river?\"}",
         "[gMASK]<sop><|user|>What is a river?<|assistant|><think></think>"},
        {"{\"op\":\"generate\",\"messages\":[{\"role\":\"user\",\"content\":\"What is a river?\"}]}",
         "[gMASK]<sop><|user|>What is a river?<|assistant|><think></think>"},
        {"{\"op\":\"generate\",\"prompt\":\"Go.\",\"system\":\"Be brief.\"}",
         "[gMASK]<sop><|system|>Be brief.<|user|>Go.<|assistant|><think></think>"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        _cleanup_free_ int32_t *ids = NULL, *expected = NULL;
        size_t count, answer_count;
        struct error error;
        assert_int_equal(
            tokenizer_encode(fixture->tokenizer, cases[i].rendered, strlen(cases[i].rendered), &ids, &count, &error),
            0);
        expected = fixture_expected(fixture, ids, count, SIZE_MAX, &answer_count);
        json_t *answer = fixture_ask(fixture, cases[i].request);
        fixture_check_tokens(answer, expected, answer_count);
        assert_int_equal(number(answer, "usage", "prompt"), count);
        json_decref(answer);
    }
    /* until its end token comes, and this model never says it, all is reasoning; without `think` nothing is */
    static const char *const thinks[] = {"off", "on"};
    for (size_t on = 0; on < 2; on++) {
        char request[128];
        snprintf(request, sizeof request,
                 "{\"op\":\"generate\",\"prompt\":\"Go.\",\"think\":\"%s\",\"max_tokens\":8,\"ignore_eos\":true}",
                 thinks[on]);
        json_t *answer = fixture_ask(fixture, request);
        assert_int_equal(json_array_size(json_object_get(answer, "tokens")), 8);
        const json_t *reasoning = json_object_get(answer, "reasoning"), *text = json_object_get(answer, "text");
        assert_true(json_string_length(on ? reasoning : text) > 0);
        assert_true(on ? json_string_length(text) == 0 : !reasoning);
        json_decref(answer);
    }
}

static void test_limits(void **state)
{
    struct fixture *fixture = *state;
    size_t count;
    _cleanup_free_ int32_t *expected = fixture_expected(fixture, prompt, PROMPT, SIZE_MAX, &count);
    json_t *answer = ask_tokens(fixture, "generate", prompt, PROMPT, "\"max_tokens\":2");
    fixture_check_tokens(answer, expected, 2);
    assert_string_equal(json_string_value(json_object_get(answer, "finish")), "length");
    json_decref(answer);

    /* a prompt that leaves room for one token */
    uint32_t context = fixture->facts.context;
    int32_t full[128];
    for (uint32_t i = 0; i < context; i++)
        full[i] = 400 + (int32_t)i % 4;
    _cleanup_free_ int32_t *last = fixture_expected(fixture, full, context - 1, SIZE_MAX, &count);
    assert_int_equal(count, 1); /* not the stop token */
    answer = ask_tokens(fixture, "generate", full, context - 1, "\"max_tokens\":1000");
    fixture_check_tokens(answer, last, 1);
    assert_string_equal(json_string_value(json_object_get(answer, "finish")), "length");
    json_decref(answer);
    fixture_check_error(ask_tokens(fixture, "generate", full, context, ""), "too_long", "tokens", "96");

    /* a stop string: the text before it, and the tokens up to it */
    _cleanup_free_ char *text = NULL;
    size_t length;
    struct error error;
    assert_int_equal(tokenizer_decode(fixture->tokenizer, expected, 3, true, &text, &length, &error), 0);
    _cleanup_free_ char *two = NULL;
    size_t two_length;
    assert_int_equal(tokenizer_decode(fixture->tokenizer, expected, 2, true, &two, &two_length, &error), 0);
    json_t *stop = json_pack("{s:[s]}", "stop", text + two_length); /* the third token's own text */
    _cleanup_free_ char *member = json_dumps(stop, JSON_COMPACT);
    json_decref(stop);
    member[strlen(member) - 1] = 0;
    answer = ask_tokens(fixture, "generate", prompt, PROMPT, member + 1);
    assert_string_equal(json_string_value(json_object_get(answer, "finish")), "stop");
    const char *before = json_string_value(json_object_get(answer, "text"));
    assert_non_null(before);
    assert_true(strlen(before) <= two_length && strncmp(before, text, strlen(before)) == 0);
    json_decref(answer);
}

/* submit, then next until it is done; the pieces together are the whole. */
static void test_submit(void **state)
{
    struct fixture *fixture = *state;
    size_t count, got = 0;
    _cleanup_free_ int32_t *expected = fixture_expected(fixture, prompt, PROMPT, SIZE_MAX, &count);
    json_t *answer = ask_tokens(fixture, "submit", prompt, PROMPT, "");
    assert_true(json_is_true(json_object_get(answer, "ok")));
    char request[128], text[4096] = "";
    snprintf(request, sizeof request, "{\"op\":\"next\",\"id\":\"%s\",\"wait_ms\":5000}",
             json_string_value(json_object_get(answer, "id")));
    json_decref(answer);
    struct channel *channel = fixture_dial(fixture);
    bool done = false;
    while (!done) {
        fixture_send(channel, request);
        answer = fixture_receive(channel);
        assert_true(json_is_true(json_object_get(answer, "ok")));
        strncat(text, json_string_value(json_object_get(answer, "text")), sizeof text - strlen(text) - 1);
        const json_t *tokens = json_object_get(answer, "tokens");
        for (size_t i = 0; i < json_array_size(tokens); i++)
            assert_int_equal(json_integer_value(json_array_get(tokens, i)), expected[got++]);
        done = json_is_true(json_object_get(answer, "done"));
        if (done) {
            assert_string_equal(json_string_value(json_object_get(answer, "finish")), "stop");
            assert_int_equal(number(answer, "usage", "answer"), count);
        }
        json_decref(answer);
    }
    assert_int_equal(got, count);
    json_t *whole = json_pack("{s:s}", "text", text);
    check_text(fixture, whole, expected, count);
    json_decref(whole);
    fixture_send(channel, request);
    fixture_check_error(fixture_receive(channel), "bad_request", "id", "no request");
    channel_close(channel);
}

/* next with nothing to say answers when its time is over; cancel ends a request, whose last piece says so. */
static void test_wait_and_cancel(void **state)
{
    struct fixture *fixture = *state;
    atomic_store(&fixture->mode, WORKER_HOLDS);
    json_t *answer = ask_tokens(fixture, "submit", prompt, PROMPT, "");
    char id[64], request[160];
    snprintf(id, sizeof id, "%s", json_string_value(json_object_get(answer, "id")));
    json_decref(answer);
    static const int waits[] = {0, 50};
    for (size_t i = 0; i < 2; i++) {
        snprintf(request, sizeof request, "{\"op\":\"next\",\"id\":\"%s\",\"wait_ms\":%d}", id, waits[i]);
        answer = fixture_ask(fixture, request);
        assert_true(json_is_false(json_object_get(answer, "done")));
        assert_string_equal(json_string_value(json_object_get(answer, "text")), "");
        json_decref(answer);
    }
    snprintf(request, sizeof request, "{\"op\":\"cancel\",\"id\":\"%s\"}", id);
    answer = fixture_ask(fixture, request);
    assert_true(json_is_true(json_object_get(answer, "ok")));
    json_decref(answer);
    snprintf(request, sizeof request, "{\"op\":\"next\",\"id\":\"%s\"}", id);
    answer = fixture_ask(fixture, request);
    assert_string_equal(json_string_value(json_object_get(answer, "finish")), "cancelled");
    assert_true(json_is_true(json_object_get(answer, "done")));
    json_decref(answer);
    atomic_store(&fixture->mode, WORKER_GOOD);
    fixture_wait_status(fixture, "running", 0);
    fixture_check_error(fixture_ask(fixture, request), "bad_request", "id", "no request");
}

/* Two at once share STEPs, and each gets its own answer. */
static void test_together(void **state)
{
    struct fixture *fixture = *state;
    static const int32_t other[] = {500, 501, 502, 503, 504, 505, 506};
    size_t count, other_count;
    _cleanup_free_ int32_t *expected = fixture_expected(fixture, prompt, PROMPT, SIZE_MAX, &count);
    _cleanup_free_ int32_t *other_expected = fixture_expected(fixture, other, 7, SIZE_MAX, &other_count);
    atomic_store(&fixture->mode, WORKER_HOLDS);
    struct channel *one = fixture_dial(fixture), *two = fixture_dial(fixture);
    _cleanup_free_ char *first = request_text("generate", prompt, PROMPT, ""),
                        *second = request_text("generate", other, 7, "");
    fixture_send(one, first);
    fixture_send(two, second);
    fixture_wait_status(fixture, "running", 2);
    atomic_store(&fixture->mode, WORKER_GOOD);
    json_t *answer = fixture_receive(one);
    fixture_check_tokens(answer, expected, count);
    json_decref(answer);
    answer = fixture_receive(two);
    fixture_check_tokens(answer, other_expected, other_count);
    json_decref(answer);
    assert_int_equal(atomic_load(&fixture->widest), 2);
    channel_close(one);
    channel_close(two);
}

/* A session's second request computes only what is new. */
static void test_session(void **state)
{
    struct fixture *fixture = *state;
    size_t count;
    _cleanup_free_ int32_t *expected = fixture_expected(fixture, prompt, PROMPT, 3, &count);
    json_t *answer = ask_tokens(fixture, "generate", prompt, PROMPT, "\"session\":\"talk\",\"max_tokens\":3");
    fixture_check_tokens(answer, expected, count);
    assert_int_equal(number(answer, "usage", "cached"), 0);
    json_decref(answer);
    int32_t longer[64];
    memcpy(longer, prompt, sizeof prompt);
    memcpy(longer + PROMPT, expected, count * sizeof *expected);
    longer[PROMPT + count] = 777;
    size_t length = PROMPT + count + 1, more;
    _cleanup_free_ int32_t *next = fixture_expected(fixture, longer, length, 4, &more);
    uint32_t rows = atomic_load(&fixture->rows);
    answer = ask_tokens(fixture, "generate", longer, length, "\"session\":\"talk\",\"max_tokens\":4");
    fixture_check_tokens(answer, next, more);
    assert_int_equal(number(answer, "usage", "cached"),
                     PROMPT + count - 1); /* the last token of an answer is not computed */
    json_decref(answer);
    assert_true(atomic_load(&fixture->rows) - rows <= 2 + more);
    /* another beginning: nothing of the kept is used wrongly */
    longer[2] = 999;
    _cleanup_free_ int32_t *other = fixture_expected(fixture, longer, length, 4, &more);
    answer = ask_tokens(fixture, "generate", longer, length, "\"session\":\"talk\",\"max_tokens\":4");
    fixture_check_tokens(answer, other, more);
    assert_int_equal(number(answer, "usage", "cached"), 2);
    json_decref(answer);
    /* kept pages make room: many sessions of many pages each */
    for (int i = 0; i < 12; i++) {
        char options[64];
        snprintf(options, sizeof options, "\"session\":\"s%d\",\"max_tokens\":60", i);
        answer = ask_tokens(fixture, "generate", longer, length, options);
        assert_true(json_is_true(json_object_get(answer, "ok")));
        json_decref(answer);
    }
}

/* The same seed gives the same text, alone or not; another seed another one. */
static void test_sampling(void **state)
{
    struct fixture *fixture = *state;
    static const char *const options = "\"temperature\":5,\"top_p\":0.9,\"seed\":11,\"max_tokens\":20";
    json_t *one = ask_tokens(fixture, "generate", prompt, PROMPT, options);
    struct channel *beside = fixture_dial(fixture);
    _cleanup_free_ char *other =
        request_text("generate", prompt, PROMPT, "\"temperature\":5,\"seed\":12,\"max_tokens\":20");
    fixture_send(beside, other);
    json_t *two = ask_tokens(fixture, "generate", prompt, PROMPT, options), *three = fixture_receive(beside);
    assert_true(json_equal(json_object_get(one, "tokens"), json_object_get(two, "tokens")));
    assert_true(json_array_size(json_object_get(one, "tokens")) > 0);
    assert_false(json_equal(json_object_get(one, "tokens"), json_object_get(three, "tokens")));
    assert_int_equal(number(one, NULL, "seed"), 11);
    for (size_t i = 0; i < json_array_size(json_object_get(three, "tokens")); i++)
        assert_true(json_integer_value(json_array_get(json_object_get(three, "tokens"), i)) <
                    4085); /* rows without a token */
    json_decref(one);
    json_decref(two);
    json_decref(three);
    channel_close(beside);
    /* A top_p that no float is small enough for still leaves the likeliest token. */
    one = ask_tokens(fixture, "generate", prompt, PROMPT, "\"temperature\":5,\"top_p\":1e-300,\"max_tokens\":20");
    two = ask_tokens(fixture, "generate", prompt, PROMPT, "\"temperature\":0,\"max_tokens\":20");
    assert_true(json_array_size(json_object_get(one, "tokens")) > 0);
    assert_true(json_equal(json_object_get(one, "tokens"), json_object_get(two, "tokens")));
    json_decref(one);
    json_decref(two);
}

static float *read_rows(const char *path, const char *name, size_t rows, size_t columns)
{
    struct safetensors file;
    struct error error;
    if (safetensors_open(path, &file, &error) < 0)
        fail_msg("%s", error.text);
    const struct tensor *tensor = safetensors_find(&file, name);
    assert_non_null(tensor);
    assert_true(tensor->dtype == DTYPE_F32 && tensor->dims == 2 && tensor->shape[0] == rows &&
                tensor->shape[1] == columns);
    float *data = malloc(tensor->bytes);
    assert_non_null(data);
    int fd = open(path, O_RDONLY);
    assert_int_equal(pread(fd, data, tensor->bytes, (off_t)tensor->offset), (ssize_t)tensor->bytes);
    close(fd);
    safetensors_close(&file);
    return data;
}

static size_t peak(const float *row, size_t columns)
{
    size_t best = 0;
    for (size_t i = 1; i < columns; i++)
        if (row[i] > row[best])
            best = i;
    return best;
}

/* Windows of 9 over 14 tokens: 9 and 5, each afresh. */
static void test_score(void **state)
{
    struct fixture *fixture = *state;
    size_t vocab = fixture->facts.config.vocab, window = 9;
    char logits_path[96], drafts_path[96], options[300];
    snprintf(logits_path, sizeof logits_path, "%s/logits", fixture->folder);
    snprintf(drafts_path, sizeof drafts_path, "%s/drafts", fixture->folder);
    snprintf(options, sizeof options, "\"context\":%zu,\"logits\":\"%s\",\"draft_logits\":\"%s\"", window, logits_path,
             drafts_path);
    int32_t tokens[PROMPT];
    memcpy(tokens, prompt, sizeof tokens);
    tokens[3] = fixture_follow(tokens, 3); /* one that is foreseen */
    json_t *answer = ask_tokens(fixture, "score", tokens, PROMPT, options);
    assert_true(json_is_true(json_object_get(answer, "ok")));

    double sum = 0, norm = log(exp((double)FIXTURE_PEAK) + (double)vocab - 1);
    for (size_t i = 0; i + 1 < PROMPT; i++) {
        size_t start = i / window * window;
        if ((i + 1) % window != 0)
            sum += norm - (tokens[i + 1] == fixture_follow(tokens + start, i + 1 - start) ? (double)FIXTURE_PEAK : 0);
    }
    assert_int_equal(number(answer, NULL, "tokens"), PROMPT - 2);
    double nll = json_number_value(json_object_get(answer, "nll"));
    assert_true(fabs(nll - sum / (PROMPT - 2)) < 1e-6);
    assert_true(fabs(json_number_value(json_object_get(answer, "perplexity")) - exp(nll)) < 1e-6);
    json_decref(answer);

    _cleanup_free_ float *logits = read_rows(logits_path, "logits", PROMPT, vocab);
    _cleanup_free_ float *drafts = read_rows(drafts_path, "draft_logits", PROMPT - 1, vocab);
    for (size_t i = 0; i < PROMPT; i++) {
        size_t start = i / window * window;
        assert_int_equal(peak(logits + i * vocab, vocab), fixture_follow(tokens + start, i + 1 - start));
        if (i + 1 == window)
            assert_true(isnan(drafts[i * vocab]) && isnan(drafts[(i + 1) * vocab - 1]));
        else if (i + 1 < PROMPT)
            assert_int_equal(peak(drafts + i * vocab, vocab),
                             fixture_draft(tokens + start, i + 1 - start, tokens[i + 1]));
    }
    assert_int_equal(unlink(logits_path), 0);
    assert_int_equal(unlink(drafts_path), 0);

    fixture_check_error(ask_tokens(fixture, "score", tokens, 1, ""), "bad_request", "tokens", "at least 2");
    fixture_check_error(ask_tokens(fixture, "score", tokens, PROMPT, "\"context\":97"), "bad_request", "context",
                        "2 to 96");
    fixture_check_error(ask_tokens(fixture, "score", tokens, PROMPT, "\"logits\":\"x\""), "bad_request", "logits",
                        "absolute");
    fixture_check_error(ask_tokens(fixture, "score", tokens, PROMPT, "\"logits\":\"/no/such/folder/x\""), "bad_request",
                        "logits", "/no/such/folder/x");
    fixture_check_error(ask_tokens(fixture, "score", tokens, PROMPT, "\"logits\":\"/dev/full/x\""), "bad_request",
                        "logits", "/dev/full");
}

static size_t entries(const char *folder)
{
    size_t count = 0;
    DIR *opened = opendir(folder);
    assert_non_null(opened);
    for (struct dirent *entry; (entry = readdir(opened));)
        count += entry->d_name[0] != '.' ? 1 : 0;
    closedir(opened);
    return count;
}

/* While it is written a score's file has no name, so that a front that is killed leaves none; then it takes the place of
 * the one that is there. */
static void test_score_file_nameless(void **state)
{
    struct fixture *fixture = *state;
    char path[96], request[300];
    int nameless = open(fixture->folder, O_TMPFILE | O_WRONLY | O_CLOEXEC, 0600);
    if (nameless < 0)
        skip(); /* the file system has none */
    close(nameless);
    snprintf(path, sizeof path, "%s/logits", fixture->folder);
    int old = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    assert_int_equal(write(old, "old", 3), 3);
    close(old);
    size_t before = entries(fixture->folder);
    snprintf(request, sizeof request, "{\"op\":\"score\",\"tokens\":[300,301,302],\"logits\":\"%s\"}", path);
    atomic_store(&fixture->mode, WORKER_HOLDS);
    struct channel *channel = fixture_dial(fixture);
    fixture_send(channel, request);
    fixture_wait_status(fixture, "running", 1);
    struct stat status;
    assert_int_equal(entries(fixture->folder), before);
    assert_int_equal(stat(path, &status), 0);
    assert_int_equal(status.st_size, 3);
    atomic_store(&fixture->mode, WORKER_GOOD);
    json_t *answer = fixture_receive(channel);
    assert_true(json_is_true(json_object_get(answer, "ok")));
    json_decref(answer);
    channel_close(channel);
    assert_int_equal(entries(fixture->folder), before);
    free(read_rows(path, "logits", 3, fixture->facts.config.vocab));
    assert_int_equal(unlink(path), 0);
}

/* A file that cannot be written whole: an error that names it, and nothing is left of it. */
static void test_score_file_full(void **state)
{
    struct fixture *fixture = *state;
    char path[96], options[160];
    snprintf(path, sizeof path, "%s/logits", fixture->folder);
    snprintf(options, sizeof options, "\"logits\":\"%s\"", path);
    struct rlimit limit;
    assert_int_equal(prlimit(fixture->front, RLIMIT_FSIZE, NULL, &limit), 0);
    struct rlimit small = {.rlim_cur = 3 * 4096 * sizeof(float), .rlim_max = limit.rlim_max};
    assert_int_equal(prlimit(fixture->front, RLIMIT_FSIZE, &small, NULL), 0);
    fixture_check_error(ask_tokens(fixture, "score", prompt, PROMPT, options), "bad_request", "logits", path);
    assert_int_equal(prlimit(fixture->front, RLIMIT_FSIZE, &limit, NULL), 0);
    /* tear_down removes the folder, which fails if anything is in it */
    json_t *answer = ask_tokens(fixture, "score", prompt, PROMPT, options);
    assert_true(json_is_true(json_object_get(answer, "ok")));
    json_decref(answer);
    assert_int_equal(unlink(path), 0);
}

static void test_small_operations(void **state)
{
    struct fixture *fixture = *state;
    json_t *answer = fixture_ask(fixture, "{\"op\":\"tokenize\",\"text\":\"What is a river?\"}");
    _cleanup_free_ int32_t *ids = NULL;
    size_t count;
    struct error error;
    assert_int_equal(tokenizer_encode(fixture->tokenizer, "What is a river?", 16, &ids, &count, &error), 0);
    const json_t *array = json_object_get(answer, "ids");
    assert_int_equal(json_array_size(array), count);
    for (size_t i = 0; i < count; i++)
        assert_int_equal(json_integer_value(json_array_get(array, i)), ids[i]);
    json_decref(answer);
    answer = ask_tokens(fixture, "detokenize", ids, count, "");
    assert_string_equal(json_string_value(json_object_get(answer, "text")), "What is a river?");
    json_decref(answer);

    answer = fixture_ask(fixture, "{\"op\":\"status\"}");
    assert_true(json_is_true(json_object_get(answer, "serving")));
    assert_int_equal(number(answer, NULL, "context"), 96);
    assert_string_equal(json_string_value(json_object_get(answer, "model")), fixture->container);
    json_decref(answer);
    json_decref(ask_tokens(fixture, "generate", prompt, PROMPT, "\"max_tokens\":3"));
    answer = fixture_ask(fixture, "{\"op\":\"stats\"}");
    assert_int_equal(number(answer, NULL, "requests"), 1);
    assert_int_equal(number(answer, NULL, "answers"), 1);
    assert_int_equal(number(answer, NULL, "prompt_tokens"), PROMPT);
    assert_int_equal(number(answer, NULL, "answer_tokens"), 3);
    json_decref(answer);
    answer = fixture_ask(fixture, "{\"op\":\"metrics\"}");
    const char *text = json_string_value(json_object_get(answer, "text"));
    assert_non_null(
        strstr(text, "# TYPE calypte_answer_tokens_total counter\ncalypte_answer_tokens_total{instance=\""));
    assert_non_null(strstr(text, "\"} 3\n"));
    json_decref(answer);
}

/* The client of the interface page. */
static void test_nngcat(void **state)
{
    struct fixture *fixture = *state;
    if (access("/usr/bin/nngcat", X_OK) != 0)
        skip();
    char command[300], text[4096] = "";
    snprintf(command, sizeof command, "nngcat --req --dial ipc://%s --data '{\"op\":\"status\"}' --ascii",
             fixture->socket);
    FILE *pipe = popen(command, "r");
    assert_non_null(pipe);
    assert_true(fread(text, 1, sizeof text - 1, pipe) > 0);
    assert_int_equal(pclose(pipe), 0);
    assert_non_null(strstr(text, "\"ok\":true"));
}

/* A model without a tokenizer takes and gives tokens. */
static void test_without_tokenizer(void **state)
{
    (void)state;
    struct fixture *fixture = fixture_start(false);
    size_t count;
    _cleanup_free_ int32_t *expected = fixture_expected(fixture, prompt, PROMPT, SIZE_MAX, &count);
    json_t *answer = ask_tokens(fixture, "generate", prompt, PROMPT, "");
    fixture_check_tokens(answer, expected, count);
    assert_null(json_object_get(answer, "text"));
    json_decref(answer);
    fixture_check_error(fixture_ask(fixture, "{\"op\":\"generate\",\"prompt\":\"x\"}"), "bad_request", "prompt",
                        "no tokenizer");
    fixture_check_error(fixture_ask(fixture, "{\"op\":\"tokenize\",\"text\":\"x\"}"), "bad_request", "text",
                        "no tokenizer");
    fixture_check_error(ask_tokens(fixture, "detokenize", prompt, PROMPT, ""), "bad_request", "tokens", "no tokenizer");
    fixture_check_error(ask_tokens(fixture, "generate", prompt, PROMPT, "\"stop\":\"x\""), "bad_request", "stop",
                        "no tokenizer");
    fixture_stop(fixture);
}

#define FRONT_TEST(test) cmocka_unit_test_setup_teardown(test, set_up, tear_down)

int main(void)
{
    const struct CMUnitTest tests[] = {
        FRONT_TEST(test_generate),        FRONT_TEST(test_prompts),
        FRONT_TEST(test_limits),          FRONT_TEST(test_submit),
        FRONT_TEST(test_wait_and_cancel), FRONT_TEST(test_together),
        FRONT_TEST(test_session),         FRONT_TEST(test_sampling),
        FRONT_TEST(test_score),           FRONT_TEST(test_score_file_nameless),
        FRONT_TEST(test_score_file_full), FRONT_TEST(test_small_operations),
        FRONT_TEST(test_nngcat),          cmocka_unit_test(test_without_tokenizer),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
