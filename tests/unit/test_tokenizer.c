/* The tokenizer against Hugging Face's answers (tests/oracles), against hostile files and against hostile text. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>
#include <jansson.h>

#include "cmd/front/buffer.h"
#include "cmd/front/normalizer.h"
#include "cmd/front/split_pattern.h"
#include "cmd/front/tokenizer.h"
#include "cmd/front/utf8.h"
#include "proto/cleanup.h"

struct fixture {
    char folder[64];
    char path[96]; /* folder/tokenizer.json */
    json_t *base;  /* the bundled tokenizer.json */
    struct tokenizer *bundled;
};

static const char *tests_folder(void)
{
    const char *folder = getenv("CALYPTE_TESTS");

    return folder ? folder : "tests";
}

static char *test_path(const char *name)
{
    char *path;

    assert_true(asprintf(&path, "%s/%s", tests_folder(), name) > 0);
    return path;
}

static double now(void)
{
    struct timespec time;

    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

static int set_up(void **state)
{
    struct fixture *fixture = calloc(1, sizeof *fixture);
    _cleanup_free_ char *folder = test_path("model"), *file = test_path("model/tokenizer.json");
    struct error error;

    assert_non_null(fixture);
    strcpy(fixture->folder, "/tmp/calypte-tokenizer-XXXXXX");
    assert_non_null(mkdtemp(fixture->folder));
    snprintf(fixture->path, sizeof fixture->path, "%s/tokenizer.json", fixture->folder);
    fixture->base = json_load_file(file, 0, NULL);
    assert_non_null(fixture->base);
    if (tokenizer_open(folder, &fixture->bundled, &error) < 0)
        fail_msg("%s", error.text);
    *state = fixture;
    return 0;
}

static int tear_down(void **state)
{
    struct fixture *fixture = *state;

    tokenizer_close(fixture->bundled);
    json_decref(fixture->base);
    unlink(fixture->path);
    assert_int_equal(rmdir(fixture->folder), 0);
    free(fixture);
    return 0;
}

/* -- the oracles -- */

static void check_ids(const struct tokenizer *tokenizer, const json_t *text, const json_t *ids, const char *where)
{
    _cleanup_free_ int32_t *got = NULL;
    size_t count;
    struct error error;

    if (tokenizer_encode(tokenizer, json_string_value(text), json_string_length(text), &got, &count, &error) < 0)
        fail_msg("%s: %s", where, error.text);
    bool same = count == json_array_size(ids);
    for (size_t i = 0; i < count && same; i++)
        same = got[i] == json_integer_value(json_array_get(ids, i));
    if (!same)
        fail_msg("%s: other ids for \"%s\"", where, json_string_value(text));
}

static void check_text(const struct tokenizer *tokenizer, const json_t *ids, const char *text, size_t length,
                       const char *where)
{
    size_t count = json_array_size(ids), got_length;
    int32_t *list = calloc(count + 1, sizeof *list);
    _cleanup_free_ char *got = NULL;
    struct error error;

    for (size_t i = 0; i < count; i++)
        list[i] = (int32_t)json_integer_value(json_array_get(ids, i));
    if (tokenizer_decode(tokenizer, list, count, false, &got, &got_length, &error) < 0)
        fail_msg("%s: %s", where, error.text);
    free(list);
    if (got_length != length || memcmp(got, text, length) != 0)
        fail_msg("%s: decoded to \"%s\", not \"%s\"", where, got, text);
}

/* Every line of a file of {"text", "ids"}. What an NFC tokenizer decodes to is the NFC of the text. */
static void check_oracle(const struct tokenizer *tokenizer, const char *name, bool nfc)
{
    _cleanup_free_ char *path = NULL, *line = NULL;
    size_t capacity = 0, number = 0;

    assert_true(asprintf(&path, "%s/oracles/tokenizers/%s.jsonl", tests_folder(), name) > 0);
    _cleanup_fclose_ FILE *file = fopen(path, "r");
    assert_non_null(file);
    while (getline(&line, &capacity, file) > 0) {
        char where[64];
        snprintf(where, sizeof where, "%s line %zu", name, ++number);
        json_t *json = json_loads(line, JSON_ALLOW_NUL, NULL);
        if (!json)
            fail_msg("%s: not JSON", where);
        const json_t *text = json_object_get(json, "text"), *ids = json_object_get(json, "ids");
        check_ids(tokenizer, text, ids, where);
        _cleanup_(buffer_free) struct buffer expected = {0};
        const char *string = json_string_value(text);
        size_t length = json_string_length(text);
        assert_int_equal(nfc ? normalizer_nfc(string, length, &expected) : buffer_append(&expected, string, length), 0);
        check_text(tokenizer, ids, expected.bytes ? expected.bytes : "", expected.length, where);
        json_decref(json);
    }
    assert_int_equal(number, 459);
}

static void test_oracle_bundled(void **state)
{
    struct fixture *fixture = *state;

    check_oracle(fixture->bundled, "calypte", false);
    assert_int_equal(tokenizer_size(fixture->bundled), 4085);
}

static void check_compressed(struct fixture *fixture, const char *name, bool nfc)
{
    _cleanup_(tokenizer_closep) struct tokenizer *tokenizer = NULL;
    _cleanup_free_ char *command = NULL;
    struct error error;

    assert_true(asprintf(&command, "xz -dc '%s/tokenizers/%s.tokenizer.json.xz' > '%s'", tests_folder(), name,
                         fixture->path) > 0);
    assert_int_equal(system(command), 0);
    double start = now();
    if (tokenizer_open(fixture->folder, &tokenizer, &error) < 0)
        fail_msg("%s", error.text);
    print_message("%s opened in %.2f s\n", name, now() - start);
    check_oracle(tokenizer, name, nfc);
}

static void test_oracle_gpt35turbo(void **state)
{
    check_compressed(*state, "gpt35turbo", false);
}

static void test_oracle_gpt4o(void **state)
{
    check_compressed(*state, "gpt4o", false);
}

static void test_oracle_qwen3(void **state)
{
    check_compressed(*state, "qwen3", true);
}

/* -- changed copies of the bundled file -- */

static int open_json(struct fixture *fixture, const json_t *json, struct tokenizer **ret_tokenizer, struct error *error)
{
    assert_int_equal(json_dump_file(json, fixture->path, JSON_COMPACT), 0);
    return tokenizer_open(fixture->path, ret_tokenizer, error);
}

static void merges_to_strings(json_t *model)
{
    json_t *strings = json_array(), *merge;
    size_t index;

    json_array_foreach (json_object_get(model, "merges"), index, merge)
        json_array_append_new(strings, json_sprintf("%s %s", json_string_value(json_array_get(merge, 0)),
                                                    json_string_value(json_array_get(merge, 1))));
    json_object_set_new(model, "merges", strings);
}

/* tokenizer-features.jsonl: pre-tokenizers, normalizers and added tokens in combinations, with the ids that Hugging
 * Face tokenizers 0.23.3 gives. Each line says what to change in the bundled file. */
static void test_features(void **state)
{
    struct fixture *fixture = *state;
    _cleanup_free_ char *path = test_path("oracles/tokenizer-features.jsonl"), *line = NULL;
    _cleanup_fclose_ FILE *file = fopen(path, "r");
    size_t capacity = 0, number = 0, index;

    assert_non_null(file);
    while (getline(&line, &capacity, file) > 0) {
        _cleanup_(tokenizer_closep) struct tokenizer *tokenizer = NULL;
        json_t *set = json_loads(line, 0, NULL), *json = json_deep_copy(fixture->base), *one;
        json_t *model = json_object_get(json, "model");
        char where[64];
        struct error error;
        snprintf(where, sizeof where, "features line %zu", ++number);
        json_object_set(json, "pre_tokenizer", json_object_get(set, "pre_tokenizer"));
        json_object_set(json, "normalizer", json_object_get(set, "normalizer"));
        json_object_set(model, "ignore_merges", json_object_get(set, "ignore_merges"));
        json_array_extend(json_object_get(json, "added_tokens"), json_object_get(set, "added_tokens"));
        if (json_is_true(json_object_get(set, "merges_as_strings")))
            merges_to_strings(model);
        if (open_json(fixture, json, &tokenizer, &error) < 0)
            fail_msg("%s: %s", where, error.text);
        json_array_foreach (json_object_get(set, "cases"), index, one)
            check_ids(tokenizer, json_object_get(one, "text"), json_object_get(one, "ids"), where);
        json_decref(set);
        json_decref(json);
    }
    assert_int_equal(number, 80);
}

/* Sets the value at a path like "model/merges/3/0" ("+" appends to an array) to a JSON text; no text removes it. */
static void set_at(json_t *json, const char *path, const char *text)
{
    char name[64];

    for (const char *slash; (slash = strchr(path, '/')); path = slash + 1) {
        snprintf(name, sizeof name, "%.*s", (int)(slash - path), path);
        json = json_is_array(json) ? json_array_get(json, (size_t)atoi(name)) : json_object_get(json, name);
        assert_non_null(json);
    }
    json_t *value = text ? json_loads(text, JSON_DECODE_ANY, NULL) : NULL;
    if (!text)
        assert_int_equal(json_object_del(json, path), 0);
    else if (strcmp(path, "+") == 0)
        assert_int_equal(json_array_append_new(json, value), 0);
    else if (json_is_array(json))
        assert_int_equal(json_array_set_new(json, (size_t)atoi(path), value), 0);
    else
        assert_int_equal(json_object_set_new(json, path, value), 0);
}

static const struct {
    const char *path, *value, *message;
} wrong_files[] = {
    {"model", "null", "model: missing"},
    {"model/type", "\"Unigram\"", "model: type Unigram is not supported"},
    {"model/dropout", "0.1", "dropout"},
    {"model/byte_fallback", "true", "byte_fallback"},
    {"model/ignore_merges", "1", "\"ignore_merges\" must be true or false"},
    {"model/continuing_subword_prefix", "\"##\"", "continuing_subword_prefix"},
    {"model/end_of_word_suffix", "7", "end_of_word_suffix"},
    {"model/vocab", "[]", "vocab must be an object"},
    {"model/vocab/the", "-1", "the id of \"the\""},
    {"model/vocab/the", "5000000000", "the id of \"the\""},
    {"model/vocab/the", "\"7\"", "the id of \"the\""},
    {"model/vocab/the", "7.5", "the id of \"the\""},
    {"model/vocab/zzzzzz", "7", "is there twice"},
    {"model/vocab/", "4090", "empty token"},
    {"model/merges", "{}", "\"merges\" must be an array"},
    {"model/merges/+", "[\"a\"]", "merges[3808]: is neither"},
    {"model/merges/+", "\"a b c\"", "merges[3808]: is neither"},
    {"model/merges/+", "[\"a\", 1]", "merges[3808]: is neither"},
    {"model/merges/+", "[\"q\", \"zzzzz\"]", "merges[3808]: names a token"},
    {"model/merges/+", "[\"\", \"a\"]", "merges[3808]: has a side"},
    {"model/merges/+", "[\"a\\u4f60\", \"a\"]", "merges[3808]: has a side"},
    {"model/merges/+", "[\"h\", \"e\"]", "merges[3808]: is there twice"},
    {"added_tokens", "7", "\"added_tokens\" must be an array"},
    {"added_tokens/0", "7", "added_tokens[0] has no \"content\""},
    {"added_tokens/0/content", "\"\"", "added_tokens[0] has no \"content\""},
    {"added_tokens/0/id", "4065", "which is another token's"},
    {"added_tokens/0/id", "-5", "the id of"},
    {"added_tokens/0/id", "3", "which is another token's"},
    {"added_tokens/0/content", "\"the\"", "in model.vocab"},
    {"added_tokens/0/lstrip", "null", "\"lstrip\" must be true or false"},
    {"added_tokens/0/content", "\"[MASK]\"", "is there twice"},
    {"normalizer", "{\"type\":\"NFKC\"}", "normalizer: type NFKC is not supported"},
    {"normalizer", "7", "normalizer: has no \"type\""},
    {"pre_tokenizer", "null", "pre_tokenizer: has no \"type\""},
    {"pre_tokenizer", "{\"type\":\"Whitespace\"}", "pre_tokenizer: type Whitespace is not supported"},
    {"pre_tokenizer/pretokenizers/1", "{\"type\":\"Sequence\",\"pretokenizers\":[]}", "not ByteLevel"},
    {"pre_tokenizer/pretokenizers/+", "{\"type\":\"Digits\"}", "Digits after ByteLevel"},
    {"pre_tokenizer/pretokenizers/1/add_prefix_space", "\"no\"", "\"add_prefix_space\" must be"},
    {"pre_tokenizer/pretokenizers/0/behavior", "\"MergedWithNext\"", "behavior MergedWithNext is not supported"},
    {"pre_tokenizer/pretokenizers/0/invert", "null", "\"invert\" must be true or false"},
    {"pre_tokenizer/pretokenizers/0/pattern", "\"x\"", "\"pattern\" must be"},
    {"pre_tokenizer/pretokenizers/0/pattern", "{\"Regex\":\"a\",\"String\":\"b\"}", "\"pattern\" must be"},
    {"pre_tokenizer/pretokenizers/0/pattern/Regex", "\"\"", "the pattern is empty"},
    {"pre_tokenizer/pretokenizers/0/pattern/Regex", "\"\\\\w+\"", "the pattern uses \\w at byte 0"},
    {"pre_tokenizer/pretokenizers/0/pattern/Regex", "\"a**\"", "does not compile"},
    {"decoder", "null", "decoder: type (none) is not supported"},
    {"decoder/type", "\"WordPiece\"", "decoder: type WordPiece is not supported"},
};

static void test_wrong_files(void **state)
{
    struct fixture *fixture = *state;

    for (size_t i = 0; i < sizeof wrong_files / sizeof *wrong_files; i++) {
        struct tokenizer *tokenizer = NULL;
        struct error error = {""};
        json_t *json = json_deep_copy(fixture->base);
        set_at(json, wrong_files[i].path, wrong_files[i].value);
        int status = open_json(fixture, json, &tokenizer, &error);
        if (status != -EINVAL && status != -ENOTSUP)
            fail_msg("%s = %s: status %d", wrong_files[i].path, wrong_files[i].value, status);
        if (!strstr(error.text, wrong_files[i].message) || !strstr(error.text, fixture->path) ||
            strchr(error.text, '\n'))
            fail_msg("%s = %s: \"%s\", not \"%s\"", wrong_files[i].path, wrong_files[i].value, error.text,
                     wrong_files[i].message);
        json_decref(json);
    }
}

static void check_bytes(struct fixture *fixture, const char *bytes, size_t length, int expected)
{
    struct tokenizer *tokenizer = NULL;
    struct error error;
    FILE *file = fopen(fixture->path, "w");

    assert_non_null(file);
    assert_int_equal(fwrite(bytes, 1, length, file), length);
    fclose(file);
    assert_int_equal(tokenizer_open(fixture->path, &tokenizer, &error), expected);
}

static void test_not_json(void **state)
{
    struct fixture *fixture = *state;
    struct tokenizer *tokenizer = NULL;
    struct error error;
    char *whole = json_dumps(fixture->base, JSON_COMPACT);

    check_bytes(fixture, "", 0, -EINVAL);
    check_bytes(fixture, "[]", 2, -EINVAL);
    check_bytes(fixture, "{\"a\":1,\"a\":2}", 13, -EINVAL);
    check_bytes(fixture, "\xff\xfe\0\0", 4, -EINVAL);
    check_bytes(fixture, whole, strlen(whole) / 2, -EINVAL);
    check_bytes(fixture, whole, strlen(whole) - 1, -EINVAL);
    free(whole);
    assert_int_equal(tokenizer_open("/dev/null", &tokenizer, &error), -EINVAL);
    assert_int_equal(tokenizer_open(fixture->folder, &tokenizer, &error), -EINVAL);
    assert_non_null(strstr(error.text, "/tokenizer.json: "));
    unlink(fixture->path);
    assert_int_equal(tokenizer_open(fixture->folder, &tokenizer, &error), -ENOENT);
    assert_non_null(strstr(error.text, "tokenizer.json"));
}

/* -- text -- */

static void test_not_utf8(void **state)
{
    static const char *const texts[] = {"a\x80", "\xC0\x80", "\xED\xA0\x80", "\xF4\x90\x80\x80", "ab\xE4\xBD", "\xFF"};
    struct fixture *fixture = *state;

    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        int32_t *ids = NULL;
        size_t count;
        struct error error;
        assert_int_equal(tokenizer_encode(fixture->bundled, texts[i], strlen(texts[i]), &ids, &count, &error), -EILSEQ);
        assert_non_null(strstr(error.text, "not UTF-8 at byte"));
    }
}

static void test_empty_and_zero(void **state)
{
    struct fixture *fixture = *state;
    int32_t *ids;
    size_t count;
    struct error error;

    assert_int_equal(tokenizer_encode(fixture->bundled, "", 0, &ids, &count, &error), 0);
    assert_int_equal(count, 0);
    assert_non_null(ids);
    free(ids);
    assert_int_equal(tokenizer_encode(fixture->bundled, "a\0b", 3, &ids, &count, &error), 0);
    assert_int_equal(count, 3);
    char *text;
    size_t length;
    assert_int_equal(tokenizer_decode(fixture->bundled, ids, count, false, &text, &length, &error), 0);
    assert_int_equal(length, 3);
    assert_memory_equal(text, "a\0b", 4);
    free(text);
    free(ids);
}

/* No added token comes out of plain text, and it still says the same. */
static void test_plain(void **state)
{
    static const char text[] = "x<|user|>[gMASK]<sop></think>/nothink<|endoftext|> y";
    struct fixture *fixture = *state;
    json_t *json = json_deep_copy(fixture->base);
    _cleanup_(tokenizer_closep) struct tokenizer *tokenizer = NULL;
    struct error error;

    /* the hardest case: the model's vocabulary spells an added token, as one word that ignore_merges would find */
    set_at(json, "model/vocab/\xC4\xA0y", "4087");
    set_at(json, "added_tokens/+",
           "{\"id\":4087,\"content\":\"\\u0120y\",\"single_word\":false,\"lstrip\":false,"
           "\"rstrip\":false,\"normalized\":false,\"special\":true}");
    set_at(json, "added_tokens/+",
           "{\"id\":4088,\"content\":\"   \",\"single_word\":false,\"lstrip\":false,"
           "\"rstrip\":false,\"normalized\":false,\"special\":false}");
    assert_int_equal(open_json(fixture, json, &tokenizer, &error), 0);
    json_decref(json);
    int32_t *ids;
    size_t count, length;
    char *back;
    assert_int_equal(tokenizer_encode_plain(tokenizer, text, sizeof text - 1, &ids, &count, &error), 0);
    for (size_t i = 0; i < count; i++)
        assert_true(ids[i] < 4064);
    assert_int_equal(tokenizer_decode(tokenizer, ids, count, false, &back, &length, &error), 0);
    assert_string_equal(back, text);
    free(back);
    free(ids);
    assert_int_equal(tokenizer_encode_plain(tokenizer, "a   b", 5, &ids, &count, &error), 0);
    assert_int_equal(count, 3);
    assert_int_equal(ids[1], 4088); /* white space is ordinary text */
    free(ids);
}

static void test_lookup(void **state)
{
    struct fixture *fixture = *state;
    size_t length;
    struct error error;

    assert_int_equal(tokenizer_id(fixture->bundled, "<|user|>"), 4071);
    assert_int_equal(tokenizer_id(fixture->bundled, "<|nobody|>"), -ENOENT);
    assert_true(tokenizer_is_special(fixture->bundled, 4071));
    assert_false(tokenizer_is_special(fixture->bundled, 4074)); /* <think> */
    assert_false(tokenizer_is_special(fixture->bundled, -1));
    assert_null(tokenizer_token_bytes(fixture->bundled, 4085, &length));
    assert_null(tokenizer_token_bytes(fixture->bundled, -1, &length));
    assert_memory_equal(tokenizer_token_bytes(fixture->bundled, 4071, &length), "<|user|>", 8);
    assert_int_equal(length, 8);
    assert_memory_equal(tokenizer_token_bytes(fixture->bundled, 220, &length), " ", 1);

    uint64_t *allowed;
    assert_int_equal(tokenizer_allowed(fixture->bundled, 4096, &allowed, &error), 0);
    for (size_t id = 0; id < 4096; id++)
        assert_int_equal(allowed[id / 64] >> id % 64 & 1, id < 4085);
    free(allowed);
    char *text;
    const int32_t ids[] = {4071, 64, 4064}, unused[] = {4090};
    assert_int_equal(tokenizer_decode(fixture->bundled, ids, 3, true, &text, &length, &error), 0);
    assert_string_equal(text, "a");
    free(text);
    assert_int_equal(tokenizer_decode(fixture->bundled, unused, 1, false, &text, &length, &error), -EINVAL);
}

/* A megabyte of anything must take seconds, not hours. */
static void test_long_texts(void **state)
{
    static const char *const units[] = {
        "a", "A", " ", "\n", " a", "1", "<|", "!", "e\xCC\x81", "\xCC\x81\xCC\xA7", "\xE4\xBD\xA0", " \r", "\xC2\xA0"};
    struct fixture *fixture = *state;
    json_t *json = json_deep_copy(fixture->base);
    _cleanup_(tokenizer_closep) struct tokenizer *tokenizer = NULL;
    struct error error;

    set_at(json, "normalizer", "{\"type\":\"NFC\"}");
    assert_int_equal(open_json(fixture, json, &tokenizer, &error), 0);
    json_decref(json);
    for (size_t i = 0; i < sizeof units / sizeof *units; i++) {
        size_t unit = strlen(units[i]), length = (size_t)1000000 / unit * unit, count;
        char *text = malloc(length);
        int32_t *ids;
        for (size_t at = 0; at < length; at += unit)
            memcpy(text + at, units[i], unit);
        double start = now();
        assert_int_equal(tokenizer_encode(tokenizer, text, length, &ids, &count, &error), 0);
        assert_true(count > 0 && now() - start < 20); /* 0.3 s; much more with sanitizers */
        free(ids);
        free(text);
    }
}

/* A pattern that explodes is stopped, with one line. */
static void test_pattern_limit(void **state)
{
    struct fixture *fixture = *state;
    json_t *json = json_deep_copy(fixture->base);
    _cleanup_(tokenizer_closep) struct tokenizer *tokenizer = NULL;
    struct error error;
    char text[64];
    int32_t *ids;
    size_t count;

    set_at(json, "pre_tokenizer/pretokenizers/0/pattern/Regex", "\"(?:a+)+(?:a+)+(?:a+)+b|c\"");
    assert_int_equal(open_json(fixture, json, &tokenizer, &error), 0);
    json_decref(json);
    memset(text, 'a', sizeof text);
    double start = now();
    assert_int_equal(tokenizer_encode(tokenizer, text, sizeof text, &ids, &count, &error), -E2BIG);
    assert_true(now() - start < 5);
    assert_non_null(strstr(error.text, "too many steps"));
}

static void test_translate(void **state)
{
    static const char *const refused[] = {
        "\\w",    "\\b",     "\\h",   "\\R",         "\\1",         "\\pL",    "\\p{}",         "\\p{L", "[a[b]]",
        "[a&&b]", "[]a]",    "[^]a]", "[[:alpha:]]", "a{,3}",       "a{2}+",   "a{2}?",         "a{x}",  "(?i)a",
        "(?m:a)", "(?<n>a)", "(?#c)", "(*FAIL)",     "(?i:\\p{L})", "(?i:st)", "(?i:\xC3\xA9)", "(a",    "a)",
        "[a",     "\\x41",   "\\",    "(?R)",        "(?P<n>a)",    "\\k<n>",  "\\K",           "\\Q",   "(?|a)",
    };

    (void)state;
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        _cleanup_(buffer_free) struct buffer out = {0};
        struct error error;
        if (split_pattern_translate(refused[i], strlen(refused[i]), &out, &error) != -ENOTSUP)
            fail_msg("%s is not refused", refused[i]);
    }
    _cleanup_(buffer_free) struct buffer out = {0};
    static const char pattern[] = "\\p{Han}\\P{Lu}\\v\\u4f60[\\d]",
                      translated[] = "\\p{sc:Han}\\P{Lu}\\x{b}\\x{4f60}[\\p{Nd}]";
    assert_int_equal(split_pattern_translate(pattern, sizeof pattern - 1, &out, NULL), 0);
    assert_int_equal(out.length, sizeof translated - 1);
    assert_memory_equal(out.bytes, translated, out.length);
}

static void test_utf8(void **state)
{
    size_t length;

    (void)state;
    assert_int_equal(utf8_step("\xF0\x9F\x98\x80", 4, &length), UTF8_VALID);
    assert_int_equal(length, 4);
    assert_int_equal(utf8_step("\xF0\x9F\x98", 3, &length), UTF8_INCOMPLETE);
    assert_int_equal(length, 3);
    assert_int_equal(utf8_step("\xF0\x9F\x41", 3, &length), UTF8_INVALID);
    assert_int_equal(length, 2);
    assert_int_equal(utf8_step("\xE0\x80\x80", 3, &length), UTF8_INVALID); /* overlong */
    assert_int_equal(length, 1);
    assert_int_equal(utf8_step("\xED\xA0\x80", 3, &length), UTF8_INVALID); /* surrogate */
    assert_int_equal(length, 1);
    assert_string_equal(utf8_quoted("na\xC3\xAFve\n\xFF").text, "na\xC3\xAFve??");
    assert_string_equal(utf8_quoted(NULL).text, "(none)");
    char name[200];
    memset(name, 'a', sizeof name);
    strcpy(name + 63, "\xC3\xAF"); /* a character across the limit is left out whole */
    assert_int_equal(strlen(utf8_quoted(name).text), 66);
    assert_string_equal(utf8_quoted(name).text + 62, "a...");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_utf8),
        cmocka_unit_test(test_translate),
        cmocka_unit_test_setup_teardown(test_oracle_bundled, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_oracle_gpt35turbo, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_oracle_gpt4o, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_oracle_qwen3, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_features, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_wrong_files, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_not_json, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_not_utf8, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_empty_and_zero, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_plain, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_lookup, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_long_texts, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_pattern_limit, set_up, tear_down),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
