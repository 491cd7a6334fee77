/* Streaming: however a text is cut into tokens, the pieces are the same text, each of whole characters, and nothing of
 * a stop string is ever shown. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "cmd/front/text_stream.h"
#include "cmd/front/utf8.h"
#include "proto/cleanup.h"

static const struct {
    const char *bytes;
    const char *stops[4];
    const char *text; /* what must come out */
    int stopped;
} cases[] = {
    {"hello world", {NULL}, "hello world", 0},
    {"na\xC3\xAFve \xF0\x9F\x98\x80!", {NULL}, "na\xC3\xAFve \xF0\x9F\x98\x80!", 0},
    {"hello world", {"wor"}, "hello ", 1},
    {"hello world", {"world!"}, "hello world", 0},
    {"aaab", {"aab"}, "a", 1},
    {"abababc", {"ababc"}, "ab", 1},
    {"one two three", {"three", "two"}, "one ", 1},
    {"xabcx", {"bc", "abc"}, "x", 1},    /* ending together: the longest */
    {"xabcdx", {"abcd", "bc"}, "xa", 1}, /* the first to be complete */
    {"stop", {"stop"}, "", 1},
    {"\xE4\xBD\xA0\xE5\xA5\xBD", {"\xE5\xA5\xBD"}, "\xE4\xBD\xA0", 1},
    {"\xE4\xBD\xA0\xE4\xBD\xA1", {"\xE4\xBD\xA1"}, "\xE4\xBD\xA0", 1}, /* they share their first bytes */
    {"a\xFF"
     "b",
     {NULL},
     "a\xEF\xBF\xBD"
     "b",
     0},
    {"a\xE4\xBD", {NULL}, "a\xEF\xBF\xBD", 0}, /* never became whole: one replacement */
    {"\xE4\xBD\x41\xE4\x41",
     {NULL},
     "\xEF\xBF\xBD"
     "A"
     "\xEF\xBF\xBD"
     "A",
     0},
    {"\xED\xA0\x80", {NULL}, "\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD", 0},
    {"\xF0\x9F\xF0\x9F\x98\x80", {NULL}, "\xEF\xBF\xBD\xF0\x9F\x98\x80", 0},
    {"x\xFFy", {"\xEF\xBF\xBDy"}, "x", 1},
    {"ab\xE4", {"b\xEF\xBF\xBD"}, "a", 1}, /* complete only when the answer ends */
    {"", {"x"}, "", 0},
};

struct result {
    char text[256];
    size_t length;
    int stopped;
};

static void add(struct result *result, const char *text, size_t length)
{
    assert_true(utf8_valid(text, length, NULL));
    assert_true(result->length + length < sizeof result->text);
    memcpy(result->text + result->length, text, length);
    result->length += length;
}

/* Feeds the bytes cut where `cuts` has a bit. */
static struct result stream(size_t index, unsigned cuts)
{
    _cleanup_(text_stream_freep) struct text_stream *stream = NULL;
    struct result result = {.length = 0};
    const char *bytes = cases[index].bytes, *text;
    size_t count = 0, length = strlen(bytes), start = 0, shown;

    while (count < 4 && cases[index].stops[count])
        count++;
    assert_int_equal(text_stream_new(cases[index].stops, count, &stream, NULL), 0);
    for (size_t at = 1; at <= length; at++) {
        if (at < length && !(cuts >> (at - 1) & 1))
            continue;
        result.stopped |= text_stream_feed(stream, bytes + start, at - start, &text, &shown, NULL);
        add(&result, text, shown);
        start = at;
        /* what is shown is a prefix of what will be the text */
        assert_memory_equal(result.text, cases[index].text, result.length);
    }
    result.stopped |= text_stream_finish(stream, &text, &shown, NULL);
    add(&result, text, shown);
    return result;
}

static void test_every_cut(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        size_t length = strlen(cases[i].bytes);
        for (unsigned cuts = 0; cuts < 1U << (length > 0 ? length - 1 : 0); cuts++) {
            struct result result = stream(i, cuts);
            if (result.length != strlen(cases[i].text) || memcmp(result.text, cases[i].text, result.length) != 0 ||
                result.stopped != cases[i].stopped)
                fail_msg("case %zu, cuts %x: \"%.*s\", stopped %d", i, cuts, (int)result.length, result.text,
                         result.stopped);
        }
    }
}

/* Text that can be shown is shown at once. */
static void test_prompt(void **state)
{
    static const char *const stops[] = {"END"};
    _cleanup_(text_stream_freep) struct text_stream *stream = NULL;
    const char *text;
    size_t length;

    (void)state;
    assert_int_equal(text_stream_new(stops, 1, &stream, NULL), 0);
    assert_int_equal(text_stream_feed(stream, "abEN", 4, &text, &length, NULL), 0);
    assert_int_equal(length, 2);
    assert_int_equal(text_stream_feed(stream, "x\xE4", 2, &text, &length, NULL), 0);
    assert_int_equal(length, 3);
    assert_memory_equal(text, "ENx", 3);
    assert_int_equal(text_stream_feed(stream,
                                      "\xBD\xA0"
                                      "ENDmore",
                                      9, &text, &length, NULL),
                     1);
    assert_int_equal(length, 3);
    assert_memory_equal(text, "\xE4\xBD\xA0", 3);
    assert_int_equal(text_stream_feed(stream, "more", 4, &text, &length, NULL), 1);
    assert_int_equal(length, 0);
    assert_int_equal(text_stream_finish(stream, &text, &length, NULL), 1);
    assert_int_equal(length, 0);
}

static void test_wrong_stops(void **state)
{
    static const char *const empty[] = {"a", ""}, *const invalid[] = {"\xFF"};
    const char *many[TEXT_STREAM_MAX_STOPS + 1];
    struct text_stream *stream = NULL;
    struct error error;

    (void)state;
    for (size_t i = 0; i < sizeof many / sizeof *many; i++)
        many[i] = "x";
    assert_int_equal(text_stream_new(empty, 2, &stream, &error), -EINVAL);
    assert_non_null(strstr(error.text, "stop: string 1"));
    assert_int_equal(text_stream_new(invalid, 1, &stream, &error), -EINVAL);
    assert_int_equal(text_stream_new(many, TEXT_STREAM_MAX_STOPS + 1, &stream, &error), -EINVAL);
    assert_int_equal(text_stream_new(many, TEXT_STREAM_MAX_STOPS, &stream, &error), 0);
    text_stream_free(stream);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_cut),
        cmocka_unit_test(test_prompt),
        cmocka_unit_test(test_wrong_stops),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
