/* The trace file: what is written is read, and what is not a trace is refused with its line. */
#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cmocka.h>

#include "proto/trace.h"

static char folder[64], path[96];

static int set_up(void **state)
{
    (void)state;
    snprintf(folder, sizeof folder, "/tmp/calypte-trace.XXXXXX");
    if (!mkdtemp(folder))
        return -1;
    snprintf(path, sizeof path, "%s/trace", folder);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    unlink(path);
    return rmdir(folder);
}

static const struct trace_header shape = {
    .identity = 0x0123456789abcdef,
    .layers = 3,
    .experts = 8,
    .slots = 12,
    .layer_numbers = {1, 2, 5},
    .numbered = true,
    .expert_bytes = 65536,
};

static void test_round_trip(void **state)
{
    (void)state;
    struct trace_use uses[2][3] = {{{0, 0, TRACE_HIT}, {0, 8191, TRACE_PREFILL}, {7, 1, 3}}, {{5, 2, 0}}};
    struct trace_layer layers[2] = {{.step = 1, .layer = 2, .count = 3, .uses = uses[0]},
                                    {.step = INT64_MAX, .lost = 44, .layer = 0, .count = 1, .uses = uses[1]}};
    struct trace_writer *writer;
    struct trace_reader *reader;
    struct trace_header header;
    struct trace_layer layer;
    struct error error;
    assert_int_equal(trace_create(path, &shape, &writer, &error), 0);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(trace_append_slots(writer, i ? 20 : 14, &error), 0);
        assert_int_equal(trace_append(writer, &layers[i], &error), 0);
    }
    assert_int_equal(trace_finish(writer, &error), 0);
    assert_int_equal(trace_create(path, &shape, &writer, &error), -EEXIST);

    assert_int_equal(trace_open(path, &reader, &header, &error), 0);
    assert_memory_equal(header.layer_numbers, shape.layer_numbers, sizeof shape.layer_numbers);
    assert_true(header.identity == shape.identity && header.layers == 3 && header.experts == 8 && header.slots == 12);
    assert_true(header.numbered && header.expert_bytes == 65536);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(trace_next(reader, &layer, &error), 1);
        assert_int_equal(layer.step, layers[i].step);
        assert_int_equal(layer.lost, layers[i].lost);
        assert_int_equal(layer.layer, layers[i].layer);
        assert_int_equal(layer.count, layers[i].count);
        assert_memory_equal(layer.uses, uses[i], layer.count * sizeof *layer.uses);
    }
    uint32_t least, most;
    assert_int_equal(trace_next(reader, &layer, &error), 0);
    trace_slots(reader, &least, &most);
    assert_true(least == 14 && most == 20); /* what the head says was over before the first layer */
    trace_close(reader);
}

/* A writer does not write what a reader would refuse. */
static void test_refused_layers(void **state)
{
    (void)state;
    struct trace_use good = {.expert = 1}, expert = {.expert = 8}, row = {.row = TRACE_MAX_ROWS}, flag = {.flags = 4},
                     twice[2] = {{.expert = 3, .row = 1}, {.expert = 3, .row = 1}},
                     falling[2] = {{.expert = 3}, {.expert = 2}};
    const struct trace_layer refused[] = {
        {.layer = 3, .count = 1, .uses = &good},
        {.count = 0, .uses = &good},
        {.count = 1, .uses = &expert},
        {.count = 1, .uses = &row},
        {.count = 1, .uses = &flag},
        {.count = 2, .uses = twice},
        {.count = 2, .uses = falling},
        {.step = UINT64_MAX, .count = 1, .uses = &good},
        {.lost = UINT64_MAX, .count = 1, .uses = &good},
    };
    struct trace_writer *writer;
    struct trace_reader *reader;
    struct trace_header header;
    struct trace_layer layer;
    struct error error;
    assert_int_equal(trace_create(path, &shape, &writer, &error), 0);
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++)
        assert_int_equal(trace_append(writer, &refused[i], &error), -EINVAL);
    assert_int_equal(trace_finish(writer, &error), 0);
    assert_int_equal(trace_open(path, &reader, &header, &error), 0);
    assert_int_equal(trace_next(reader, &layer, &error), 0);
    trace_close(reader);
}

#define HEADER "{\"trace\":1,\"model\":\"0123456789abcdef\",\"layers\":3,\"experts\":8,\"slots\":12}\n"

/* Reads a file of that text to its end; what the last call returned. */
static int read_text(const char *text, size_t bytes, struct error *ret_error)
{
    FILE *file = fopen(path, "w");
    struct trace_reader *reader;
    struct trace_header header;
    struct trace_layer layer;
    assert_non_null(file);
    assert_int_equal(fwrite(text, 1, bytes, file), bytes);
    assert_int_equal(fclose(file), 0);
    int status = trace_open(path, &reader, &header, ret_error);
    if (status < 0)
        return status;
    while ((status = trace_next(reader, &layer, ret_error)) > 0)
        for (uint32_t i = 0; i < layer.count; i++)
            assert_true(layer.layer < header.layers && layer.uses[i].expert < header.experts);
    trace_close(reader);
    return status;
}

static void test_refused_files(void **state)
{
    (void)state;
    static const char *const refused[] = {
        "",
        "\n",
        "{}\n",
        "[1]\n",
        "\x1f\x8b\x08 compressed\n",
        "{\"trace\":3,\"model\":\"0123456789abcdef\",\"layers\":3,\"experts\":8,\"slots\":12}\n",
        "{\"trace\":1,\"model\":\"0123456789abcde\",\"layers\":3,\"experts\":8,\"slots\":12}\n",
        "{\"trace\":1,\"model\":\"0123456789abcdef\",\"layers\":0,\"experts\":8,\"slots\":12}\n",
        "{\"trace\":1,\"model\":\"0123456789abcdef\",\"layers\":3,\"experts\":4294967304,\"slots\":12}\n",
        "{\"trace\":1,\"model\":\"0123456789abcdef\",\"layers\":3,\"experts\":8,\"slots\":-1}\n",
        "{\"trace\":1,\"trace\":1,\"model\":\"0123456789abcdef\",\"layers\":3,\"experts\":8,\"slots\":12}\n",
        "{\"trace\":2,\"model\":\"0123456789abcdef\",\"layers\":3,\"experts\":8,\"slots\":12,\"layer_numbers\":[1,2]}"
        "\n",
        "{\"trace\":2,\"model\":\"0123456789abcdef\",\"layers\":2,\"experts\":8,\"slots\":12,\"layer_numbers\":[2,2]}"
        "\n",
        "{\"trace\":2,\"model\":\"0123456789abcdef\",\"layers\":1,\"experts\":8,\"slots\":12,\"layer_numbers\":[160]}"
        "\n",
        "{\"trace\":2,\"model\":\"0123456789abcdef\",\"layers\":3,\"experts\":8,\"slots\":12,\"expert_bytes\":0}\n",
        "{\"trace\":2,\"model\":\"0123456789abcdef\",\"layers\":3,\"experts\":8,\"slots\":12}\n{\"slots\":-1}\n",
        HEADER "{\"slots\":12}\n", /* not in format 1 */
        HEADER "\n",
        HEADER "{\"step\":1,\"layer\":0}\n",
        HEADER "{\"step\":1,\"layer\":0,\"rows\":[]}\n",
        HEADER "{\"step\":1,\"layer\":0,\"rows\":7}\n",
        HEADER "{\"step\":1,\"layer\":0,\"rows\":[[1,0]]}\n",
        HEADER "{\"step\":1,\"layer\":0,\"rows\":[[1,0,0,0]]}\n",
        HEADER "{\"step\":1,\"layer\":0,\"rows\":[[1,0,0.5]]}\n",
        HEADER "{\"step\":1,\"layer\":0,\"rows\":[[8,0,0]]}\n",
        HEADER "{\"step\":1,\"layer\":0,\"rows\":[[-1,0,0]]}\n",
        HEADER "{\"step\":1,\"layer\":0,\"rows\":[[4294967296,0,0]]}\n",
        HEADER "{\"step\":1,\"layer\":3,\"rows\":[[1,0,0]]}\n",
        HEADER "{\"step\":1,\"layer\":4294967296,\"rows\":[[1,0,0]]}\n",
        HEADER "{\"step\":-1,\"layer\":0,\"rows\":[[1,0,0]]}\n",
        HEADER "{\"step\":1,\"layer\":0,\"lost\":\"x\",\"rows\":[[1,0,0]]}\n",
        HEADER "{\"step\":1,\"layer\":0,\"rows\":[[1,0,0],[1,0,0]]}\n",
        HEADER "{\"step\":1,\"layer\":0,\"rows\":[[1,0,0]]}", /* cut off */
        HEADER "{\"step\":1,\"layer\":0,\"rows\":[[1,0,0]\n",
    };
    struct error error;
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        int status = read_text(refused[i], strlen(refused[i]), &error);
        if (status != -EBADMSG)
            fail_msg("%d for: %s", status, refused[i]);
        assert_non_null(strstr(error.text, path));
    }
    assert_int_equal(read_text(HEADER, strlen(HEADER), &error), 0);
    assert_int_equal(read_text(HEADER "{\"step\":1,\"layer\":0,\"rows\":[[1,0,0]]}\n",
                               strlen(HEADER) + strlen("{\"step\":1,\"layer\":0,\"rows\":[[1,0,0]]}\n"), &error),
                     0);
}

/* Every prefix of a trace, and every byte of it changed: never more than a refusal. */
static void test_damaged(void **state)
{
    (void)state;
    static const char whole[] = HEADER "{\"step\":1,\"layer\":0,\"rows\":[[1,0,0],[2,0,3]]}\n";
    char text[sizeof whole];
    struct error error;
    for (size_t bytes = 0; bytes < sizeof whole - 1; bytes++)
        if (bytes != strlen(HEADER))
            assert_int_equal(read_text(whole, bytes, &error), -EBADMSG);
    for (size_t i = 0; i < sizeof whole - 1; i++)
        for (int to = 0; to < 256; to += 5) {
            memcpy(text, whole, sizeof whole);
            text[i] = (char)to;
            int status = read_text(text, sizeof whole - 1, &error);
            assert_true(status == 0 || status == -EBADMSG);
        }
}

static void test_endless_line(void **state)
{
    (void)state;
    struct error error;
    size_t bytes = TRACE_LINE_MAX + 4096;
    char *text = malloc(bytes);
    assert_non_null(text);
    memset(text, ' ', bytes);
    assert_int_equal(read_text(text, bytes, &error), -EBADMSG);
    assert_non_null(strstr(error.text, "too long"));
    free(text);
}

/* A disk that becomes full: what had room is kept, to the last whole line; a name of which nothing came is free again. */
static void test_full_disk(void **state)
{
    (void)state;
    struct trace_use use = {.expert = 1};
    struct trace_layer layer = {.count = 1, .uses = &use};
    struct trace_writer *writer;
    struct rlimit limit, none;
    struct error error;
    assert_int_equal(trace_create(path, &shape, &writer, &error), 0);
    assert_int_equal(trace_append(writer, &layer, &error), 0);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &limit), 0);
    none = limit;
    none.rlim_cur = 0;
    void (*before)(int) = signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &none), 0);
    int status = trace_finish(writer, &error);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
    signal(SIGXFSZ, before);
    assert_int_equal(status, -EFBIG);
    assert_non_null(strstr(error.text, "cannot write"));
    assert_int_equal(access(path, F_OK), -1);

    assert_int_equal(trace_create(path, &shape, &writer, &error), 0);
    none.rlim_cur = 10000;
    before = signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &none), 0);
    for (status = 0; status == 0; layer.step++)
        status = trace_append(writer, &layer, &error);
    assert_int_equal(status, -EFBIG);
    (void)trace_finish(writer, NULL);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
    signal(SIGXFSZ, before);
    struct trace_reader *reader;
    struct trace_header header;
    uint64_t lines = 0;
    assert_int_equal(trace_open(path, &reader, &header, &error), 0);
    while ((status = trace_next(reader, &layer, &error)) > 0)
        assert_int_equal(layer.step, lines++);
    assert_int_equal(status, 0);
    assert_true(lines > 100);
    trace_close(reader);
    assert_int_equal(unlink(path), 0);

    assert_int_equal(trace_create(path, &shape, &writer, &error), 0);
    trace_discard(writer);
    assert_int_equal(access(path, F_OK), -1);
    trace_discard(NULL);
}

static void test_no_file(void **state)
{
    (void)state;
    struct trace_reader *reader;
    struct trace_writer *writer;
    struct trace_header header;
    struct error error;
    assert_int_equal(trace_open(path, &reader, &header, &error), -ENOENT);
    assert_int_equal(trace_open(folder, &reader, &header, &error), -EISDIR);
    assert_int_equal(trace_create("/nowhere/trace", &shape, &writer, &error), -ENOENT);
    header = shape;
    header.experts = 0;
    assert_int_equal(trace_create(path, &header, &writer, &error), -EINVAL);
    assert_int_equal(access(path, F_OK), -1);
    assert_int_equal(trace_finish(NULL, &error), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_round_trip, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_refused_layers, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_refused_files, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_damaged, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_endless_line, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_full_disk, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_no_file, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
