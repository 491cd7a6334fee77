/* Messages between front and workers: what is encoded is decoded, and what is not a message is refused. */
#include "proto/cleanup.h"
#include "proto/message.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <string.h>

static const struct step_limits limits = {
    .max_rows = 16, .logit_rows = 8, .kv_pages = 32, .page_tokens = 4, .context = 64, .vocab = 100};

static const uint32_t pages_a[] = {31, 0, 7}, pages_b[] = {5};
static const struct step_sequence sequences[] = {
    {.first = 3, .rows = 6, .logits = LOGITS_LAST, .pages = 3, .page_ids = pages_a},
    {.first = 0, .rows = 4, .logits = LOGITS_ALL, .pages = 1, .page_ids = pages_b},
};
static const int32_t tokens[] = {1, 2, 3, 4, 5, 99, 0, 7, 8, 9}, next[] = {2, 3, 4, 5, 99, -1, 7, 8, 9, -1};
static const struct step sample = {.id = 0x123456789abcdef0,
                                   .epoch = 7,
                                   .draft = 1,
                                   .sequences = 2,
                                   .rows = 10,
                                   .sequence = sequences,
                                   .tokens = tokens,
                                   .next = next};

/* An 8-aligned copy of exactly `size` bytes, so that AddressSanitizer sees a byte too many. */
static void *copy_of(const void *bytes, size_t size)
{
    void *copy = malloc(size > 0 ? size : 1);
    assert_non_null(copy);
    memcpy(copy, bytes, size);
    return copy;
}

static void encode_sample(void **ret_bytes, size_t *ret_size)
{
    struct error error;
    assert_int_equal(message_encode_step(&sample, ret_bytes, ret_size, &error), 0);
}

static void test_step_round_trip(void **state)
{
    (void)state;
    _cleanup_free_ void *bytes = NULL, *memory = NULL;
    size_t size;
    encode_sample(&bytes, &size);
    struct step step;
    struct error error = {""};
    assert_int_equal(message_decode_step(bytes, size, &limits, &step, &memory, &error), 0);
    assert_true(step.id == sample.id && step.epoch == 7 && step.draft == 1 && step.sequences == 2 && step.rows == 10);
    assert_memory_equal(step.tokens, tokens, sizeof tokens);
    assert_memory_equal(step.next, next, sizeof next);
    uint32_t offset = 0;
    for (uint32_t s = 0; s < 2; s++) {
        const struct step_sequence *got = &step.sequence[s], *want = &sequences[s];
        assert_true(got->first == want->first && got->rows == want->rows && got->logits == want->logits &&
                    got->pages == want->pages);
        assert_int_equal(got->row_offset, offset);
        assert_memory_equal(got->page_ids, want->page_ids, want->pages * sizeof(uint32_t));
        offset += want->rows;
    }
}

static void test_encode_checks_rows(void **state)
{
    (void)state;
    struct step wrong = sample;
    wrong.rows = 11;
    void *bytes;
    size_t size;
    struct error error;
    assert_int_equal(message_encode_step(&wrong, &bytes, &size, &error), -EINVAL);
    assert_non_null(strstr(error.text, "11"));
}

static void test_step_truncated(void **state)
{
    (void)state;
    _cleanup_free_ void *bytes = NULL;
    size_t size;
    encode_sample(&bytes, &size);
    for (size_t length = 0; length < size; length++) {
        for (int honest = 0; honest < 2; honest++) {
            _cleanup_free_ unsigned char *part = copy_of(bytes, length);
            uint64_t claimed = length;
            if (honest && length >= 16) /* a header that says the truncated length */
                memcpy(part + 8, &claimed, sizeof claimed);
            struct step step;
            void *memory = NULL;
            struct error error = {""};
            assert_int_equal(message_decode_step(part, length, &limits, &step, &memory, &error), -EBADMSG);
            assert_true(error.text[0] != 0 && memory == NULL);
        }
    }
}

/* Everything that a decoded step promises. */
static void check_bounds(const struct step *step)
{
    uint32_t rows = 0, logits = 0;
    assert_in_range(step->rows, 1, limits.max_rows);
    assert_in_range(step->sequences, 1, step->rows);
    assert_true(step->draft <= 1);
    for (uint32_t s = 0; s < step->sequences; s++) {
        const struct step_sequence *sequence = &step->sequence[s];
        assert_int_equal(sequence->row_offset, rows);
        assert_true(sequence->rows >= 1 && (uint64_t)sequence->first + sequence->rows <= limits.context);
        assert_true(sequence->pages * (uint64_t)limits.page_tokens >= (uint64_t)sequence->first + sequence->rows);
        for (uint32_t page = 0; page < sequence->pages; page++)
            assert_true(sequence->page_ids[page] < limits.kv_pages);
        assert_true(sequence->logits <= LOGITS_ALL);
        rows += sequence->rows;
        logits += sequence->logits == LOGITS_ALL ? sequence->rows : sequence->logits;
    }
    assert_int_equal(rows, step->rows);
    assert_true(logits <= limits.logit_rows);
    for (uint32_t row = 0; row < rows; row++) {
        assert_true(step->tokens[row] >= 0 && (uint32_t)step->tokens[row] < limits.vocab);
        assert_true(step->next[row] >= -1 && step->next[row] < (int32_t)limits.vocab);
    }
}

static uint64_t random_state = 0x9e3779b97f4a7c15;

static uint32_t random_below(uint32_t limit)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (uint32_t)(random_state >> 32) % limit;
}

/* A few bytes or words become something else: mostly small, because those reach the checks behind the first. */
static void mutate(unsigned char *bytes, size_t size)
{
    uint32_t changes = 1 + random_below(4);
    for (uint32_t i = 0; i < changes; i++) {
        static const uint32_t words[] = {0, 1, 2, 3, 8, 16, 31, 32, 64, 99, 100, 0x7fffffff, 0x80000000, 0xffffffff};
        if (random_below(2)) {
            uint32_t word = words[random_below(sizeof words / sizeof words[0])];
            memcpy(bytes + 4 * random_below((uint32_t)size / 4), &word, sizeof word);
        } else
            bytes[random_below((uint32_t)size)] ^= (unsigned char)(1u << random_below(8));
    }
}

static void test_step_mutated(void **state)
{
    (void)state;
    _cleanup_free_ void *bytes = NULL;
    size_t size;
    encode_sample(&bytes, &size);
    uint32_t accepted = 0;
    for (int i = 0; i < 100000; i++) {
        _cleanup_free_ unsigned char *copy = copy_of(bytes, size);
        mutate(copy, size);
        struct step step;
        _cleanup_free_ void *memory = NULL;
        struct error error = {""};
        int status = message_decode_step(copy, size, &limits, &step, &memory, &error);
        assert_true(status == 0 || status == -EBADMSG);
        if (status == 0) {
            accepted++;
            check_bounds(&step);
        } else
            assert_true(error.text[0] != 0);
    }
    assert_in_range(accepted, 1000, 90000); /* both ways were walked */
}

static void refused(size_t offset, uint32_t word, const char *named)
{
    _cleanup_free_ unsigned char *bytes = NULL;
    size_t size;
    void *encoded;
    encode_sample(&encoded, &size);
    bytes = encoded;
    memcpy(bytes + offset, &word, sizeof word);
    struct step step;
    void *memory = NULL;
    struct error error = {""};
    assert_int_equal(message_decode_step(bytes, size, &limits, &step, &memory, &error), -EBADMSG);
    if (!strstr(error.text, named))
        fail_msg("offset %zu: \"%s\" does not name %s", offset, error.text, named);
}

static void test_step_names_the_field(void **state)
{
    (void)state;
    refused(0, 1, "magic");
    refused(4, (MESSAGE_VERSION + 1) | 1 << 16, "version");
    refused(4, (MESSAGE_VERSION - 1) | 1 << 16, "version");
    refused(4, MESSAGE_VERSION | 2 << 16, "type");
    refused(8, 12, "bytes");
    refused(28, 2, "draft");
    refused(32, 0, "sequences");
    refused(32, 11, "sequences");
    refused(36, 17, "rows");
    refused(36, 0, "rows");
    refused(40, 60, "context");
    refused(40, 0xffffffff, "context");
    refused(44, 0, "rows");
    refused(48, 3, "logits");
    refused(48, LOGITS_ALL, "rows of logits"); /* 6 + 4 > 8 */
    refused(52, 2, "pages");
    refused(52, 4, "bytes"); /* one page more than the message has */
    refused(72, 100, "token");
    refused(72, 0xffffffff, "token");
    refused(112, 0xfffffffe, "next token");
    refused(152, 32, "page id");
}

static const struct step_done done_sample = {.id = 42,
                                             .epoch = 3,
                                             .status = -EIO,
                                             .logit_rows = 2,
                                             .layer = 4,
                                             .expert = 31,
                                             .slice = 7,
                                             .code = EBADMSG,
                                             .step_ns = 1u << 31,
                                             .part_ns = {[PART_ATTENTION] = 5, [PART_HEAD] = 17},
                                             .matmul_ns = 11,
                                             .hits = 100,
                                             .misses = 3};

static void test_step_done(void **state)
{
    (void)state;
    unsigned char bytes[MESSAGE_STEP_DONE_BYTES];
    message_encode_step_done(&done_sample, bytes, sizeof bytes);
    struct step_done done;
    struct error error = {""};
    assert_int_equal(message_decode_step_done(bytes, sizeof bytes, &done, &error), 0);
    assert_true(done.id == 42 && done.epoch == 3 && done.status == -EIO && done.logit_rows == 2 && done.layer == 4);
    assert_true(done.expert == 31 && done.slice == 7 && done.code == EBADMSG && done.step_ns == 1u << 31 &&
                done.matmul_ns == 11);
    assert_memory_equal(done.part_ns, done_sample.part_ns, sizeof done.part_ns);
    assert_true(done.hits == 100 && done.misses == 3);
    for (size_t length = 0; length < sizeof bytes; length++) {
        _cleanup_free_ unsigned char *part = copy_of(bytes, length);
        uint64_t claimed = length;
        if (length >= 16)
            memcpy(part + 8, &claimed, sizeof claimed);
        assert_int_equal(message_decode_step_done(part, length, &done, &error), -EBADMSG);
    }
    for (int i = 0; i < 100000; i++) {
        _cleanup_free_ unsigned char *copy = copy_of(bytes, sizeof bytes);
        mutate(copy, sizeof bytes);
        if (message_decode_step_done(copy, sizeof bytes, &done, &error) == 0)
            assert_true(done.status <= 0 && done.status >= -4095 && done.code <= 4095);
    }
    void *step_bytes;
    size_t size;
    encode_sample(&step_bytes, &size);
    assert_int_equal(message_decode_step_done(step_bytes, size, &done, &error), -EBADMSG);
    free(step_bytes);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_step_round_trip),      cmocka_unit_test(test_encode_checks_rows),
        cmocka_unit_test(test_step_truncated),       cmocka_unit_test(test_step_mutated),
        cmocka_unit_test(test_step_names_the_field), cmocka_unit_test(test_step_done),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
