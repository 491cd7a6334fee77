/* safetensors headers: what a good one gives, and a table of bad ones, each with the words that its error must have. */
#include "proto/cleanup.h"
#include "proto/safetensors.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>
#include <sys/stat.h>
#include <xxhash.h>

#include <cmocka.h>

static char folder[] = "/tmp/calypte-safetensors-XXXXXX", path[64];

static int setup(void **state)
{
    (void)state;
    if (!mkdtemp(folder))
        return -1;
    snprintf(path, sizeof path, "%s/file.safetensors", folder);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    unlink(path);
    return rmdir(folder);
}

/* Writes a file: header length, header, then `data` bytes. */
static void put(uint64_t header_bytes, const char *header, size_t length, size_t data)
{
    _cleanup_fclose_ FILE *file = fopen(path, "wb");
    assert_non_null(file);
    for (int i = 0; i < 8; i++)
        fputc((int)(header_bytes >> (8 * i) & 255), file);
    assert_int_equal(fwrite(header, 1, length, file), length);
    for (size_t i = 0; i < data; i++)
        fputc((int)(i & 255), file);
}

struct bad_header {
    const char *header;
    size_t data;
    const char *expected[2]; /* words of the error; the second may be NULL */
};

#define A(text) "{\"a\":" text "}"
#define T(dtype, shape, first, last)                                                                                   \
    "{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":[" first "," last "]}"

static const struct bad_header bad_headers[] = {
    /* not JSON, or not this JSON */
    {"", 0, {"header"}},
    {"{", 0, {"header"}},
    {"[]", 0, {"not a JSON object"}},
    {"null", 0, {"header"}},
    {"{} x", 0, {"header"}},
    {"{\"a\\u0000b\":" T("U8", "[1]", "0", "1") "}", 1, {"header"}},
    {"{\"a\xff\":" T("U8", "[1]", "0", "1") "}", 1, {"header"}},
    /* duplicates */
    {"{\"a\":" T("U8", "[1]", "0", "1") ",\"a\":" T("U8", "[1]", "1", "2") "}", 2, {"uplicate", "\"a\""}},
    {A("{\"dtype\":\"U8\",\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,1]}"), 1, {"uplicate", "dtype"}},
    /* members missing or of a wrong type */
    {A("5"), 0, {"tensor a", "object"}},
    {A("{\"shape\":[1],\"data_offsets\":[0,1]}"), 1, {"tensor a", "dtype"}},
    {A("{\"dtype\":3,\"shape\":[1],\"data_offsets\":[0,1]}"), 1, {"tensor a", "dtype"}},
    {A("{\"dtype\":\"U8\",\"data_offsets\":[0,1]}"), 1, {"tensor a", "shape"}},
    {A("{\"dtype\":\"U8\",\"shape\":[1]}"), 1, {"tensor a", "data_offsets"}},
    {A("{\"dtype\":\"U8\",\"shape\":1,\"data_offsets\":[0,1]}"), 1, {"tensor a", "shape"}},
    {A(T("U8", "[1.0]", "0", "1")), 1, {"tensor a", "shape"}},
    {A(T("U8", "[-1]", "0", "1")), 1, {"tensor a", "shape"}},
    {A(T("U8", "[\"1\"]", "0", "1")), 1, {"tensor a", "shape"}},
    {A(T("U8", "[1,1,1,1,1]", "0", "1")), 1, {"tensor a", "5 dimensions"}},
    {A(T("F4", "[1]", "0", "1")), 1, {"tensor a", "dtype F4"}},
    {A(T("u8", "[1]", "0", "1")), 1, {"tensor a", "dtype u8"}},
    {A(T("", "[1]", "0", "1")), 1, {"tensor a", "dtype"}},
    {A("{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0]}"), 1, {"tensor a", "data_offsets"}},
    {A("{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1,2]}"), 1, {"tensor a", "data_offsets"}},
    {A("{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":{}}"), 1, {"tensor a", "data_offsets"}},
    {A(T("U8", "[1]", "0.0", "1.0")), 1, {"tensor a", "data_offsets"}},
    {A(T("U8", "[1]", "-1", "0")), 1, {"tensor a", "data_offsets"}},
    {A(T("U8", "[1]", "1", "0")), 1, {"tensor a", "data_offsets"}},
    /* sizes */
    {A(T("U8", "[4294967296,4294967296]", "0", "1")), 1, {"tensor a", "overflow"}},
    {A(T("F32", "[2305843009213693952,2]", "0", "1")), 1, {"tensor a", "overflow"}},
    {A(T("F32", "[4611686018427387904]", "0", "0")), 0, {"tensor a", "overflow"}},
    {A(T("U8", "[99999999999999999999]", "0", "1")), 1, {"header"}},
    {A(T("F32", "[2]", "0", "4")), 4, {"tensor a", "need 8"}},
    {A(T("U8", "[2]", "0", "3")), 3, {"tensor a", "need 2"}},
    /* truncated, holes, overlaps */
    {A(T("U8", "[8]", "0", "8")), 7, {"tensor a", "truncated"}},
    {A(T("U8", "[1]", "9223372036854775806", "9223372036854775807")), 1, {"tensor a", "truncated"}},
    {A(T("U8", "[1]", "0", "1")), 2, {"1 bytes at the end"}},
    {A(T("U8", "[1]", "1", "2")), 2, {"tensor a", "belong to no tensor"}},
    {"{\"a\":" T("U8", "[2]", "0", "2") ",\"b\":" T("U8", "[2]", "1", "3") "}", 3, {"tensor b", "overlaps tensor a"}},
    {"{\"a\":" T("U8", "[2]", "0", "2") ",\"b\":" T("U8", "[2]", "0", "2") "}", 2, {"overlaps"}},
    {"{\"a\":" T("U8", "[1]", "0", "1") ",\"b\":" T("U8", "[1]", "2", "3") "}",
     3,
     {"front of tensor b", "belong to no tensor"}},
    {"{}", 1, {"belong to no tensor"}},
    /* names */
    {"{\"\":" T("U8", "[1]", "0", "1") "}", 1, {"tensor name"}},
    {"{\"01234567890123456789012345678901234567890123456789012345678901234567890123456789012345678901234567890123456789"
     "01234567890\":" T("U8", "[1]", "0", "1") "}",
     1,
     {"tensor name", "121"}},
};

static void test_bad_headers(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof bad_headers / sizeof bad_headers[0]; i++) {
        const struct bad_header *bad = &bad_headers[i];
        put(strlen(bad->header), bad->header, strlen(bad->header), bad->data);
        struct safetensors file;
        struct error error = {{0}};
        if (safetensors_open(path, &file, &error) >= 0)
            fail_msg("accepted: %s", bad->header);
        for (int e = 0; e < 2 && bad->expected[e]; e++) {
            if (!strstr(error.text, bad->expected[e]))
                fail_msg("%s\n  gives: %s\n  without: %s", bad->header, error.text, bad->expected[e]);
        }
        if (!strstr(error.text, path) || strchr(error.text, '\n'))
            fail_msg("not one line with the file's name: %s", error.text);
    }
}

static void assert_refused(const char *expected)
{
    struct safetensors file;
    struct error error = {{0}};
    assert_true(safetensors_open(path, &file, &error) < 0);
    if (!strstr(error.text, expected) || !strstr(error.text, path))
        fail_msg("%s\n  without: %s", error.text, expected);
}

static void test_bad_length(void **state)
{
    (void)state;
    put(3, "{}", 2, 0);
    assert_refused("truncated");
    put(UINT64_MAX, "{}", 2, 0);
    assert_refused("header of 18446744073709551615 bytes");
    put(UINT64_MAX - 7, "{}", 2, 0);
    assert_refused("header of");
    put(100000001, "{}", 2, 0);
    assert_refused("at most");
    assert_int_equal(truncate(path, 7), 0);
    assert_refused("too short");
    assert_int_equal(truncate(path, 0), 0);
    assert_refused("too short");
    assert_int_equal(unlink(path), 0);
    assert_refused("No such file");
    assert_int_equal(mkfifo(path, 0600), 0);
    assert_refused("not a regular file");
    assert_int_equal(unlink(path), 0);
}

static void test_good(void **state)
{
    (void)state;
    static const char header[] = "{\"__metadata__\":{\"format\":\"pt\"},\"b\":" T(
        "F32", "[2,3]", "2", "26") ",\"a\":" T("BF16", "[]", "0", "2") ",\"none\":" T("U8", "[0,7]", "26", "26") "}   ";
    put(sizeof header - 1, header, sizeof header - 1, 26);
    struct safetensors file;
    struct error error;
    assert_int_equal(safetensors_open(path, &file, &error), 0);
    assert_int_equal(file.count, 3);
    assert_int_equal(file.data_offset, 8 + sizeof header - 1);
    assert_int_equal(file.file_bytes, file.data_offset + 26);
    const struct tensor *a = safetensors_find(&file, "a"), *b = safetensors_find(&file, "b"),
                        *none = safetensors_find(&file, "none");
    assert_true(a && b && none && !safetensors_find(&file, "c") && !safetensors_find(&file, "__metadata__"));
    assert_int_equal(a->dtype, DTYPE_BF16);
    assert_int_equal(a->dims, 0);
    assert_int_equal(a->bytes, 2);
    assert_int_equal(b->offset, file.data_offset + 2);
    assert_int_equal(b->shape[0], 2);
    assert_int_equal(b->shape[1], 3);
    assert_int_equal(b->shape[2], 1);
    assert_int_equal(none->bytes, 0);
    safetensors_close(&file);

    /* A shard may be empty. */
    put(2, "{}", 2, 0);
    assert_int_equal(safetensors_open(path, &file, &error), 0);
    assert_int_equal(file.count, 0);
    safetensors_close(&file);
}

/* What we write we can read, and the data start where they shall. */
static void test_header(void **state)
{
    (void)state;
    struct tensor tensors[] = {
        {.name = "z", .dtype = DTYPE_U8, .dims = 3, .shape = {2, 3, 512}},
        {.name = "quote\"and\\slash", .dtype = DTYPE_F16, .dims = 1, .shape = {5}},
        {.name = "table", .dtype = DTYPE_U64, .dims = 2, .shape = {4, 8}},
    };
    _cleanup_free_ char *header = NULL;
    size_t bytes;
    struct error error;
    assert_int_equal(safetensors_header(tensors, 3, 4096, &header, &bytes, &error), 0);
    assert_int_equal(bytes, 4096);
    assert_int_equal(tensors[0].offset, 4096);
    assert_int_equal(tensors[1].offset, 4096 + 3072);
    assert_int_equal(tensors[2].offset, 4096 + 3072 + 10);
    put(4096 - 8, header + 8, bytes - 8, 3072 + 10 + 256);
    struct safetensors file;
    assert_int_equal(safetensors_open(path, &file, &error), 0);
    assert_int_equal(file.header_xxh3, XXH3_64bits(header, bytes));
    for (size_t i = 0; i < 3; i++) {
        const struct tensor *found = safetensors_find(&file, tensors[i].name);
        assert_non_null(found);
        assert_int_equal(found->offset, tensors[i].offset);
        assert_int_equal(found->bytes, tensors[i].bytes);
        assert_int_equal(found->dtype, tensors[i].dtype);
        assert_int_equal(found->dims, tensors[i].dims);
    }
    safetensors_close(&file);

    strcpy(tensors[2].name, "z");
    char *unused;
    assert_int_equal(safetensors_header(tensors, 3, 4096, &unused, &bytes, &error), -EEXIST);
    assert_non_null(strstr(error.text, "tensor z"));
    tensors[0] = (struct tensor){.name = "big", .dtype = DTYPE_F32, .dims = 2, .shape = {1ull << 40, 1ull << 40}};
    assert_int_equal(safetensors_header(tensors, 1, 4096, &unused, &bytes, &error), -EOVERFLOW);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bad_headers),
        cmocka_unit_test(test_bad_length),
        cmocka_unit_test(test_good),
        cmocka_unit_test(test_header),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
