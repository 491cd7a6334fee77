/* A container against damage: whatever is flipped, cut off or missing is refused with the file's name, and all
 * checksums hold. */
#include "tests/unit/convert_fixture.h"

#include <stdlib.h>
#include <unistd.h>
#include <xxhash.h>

static char *scratch, *folder; /* of the container */

static int setup(void **state)
{
    (void)state;
    scratch = fixture_scratch();
    folder = fixture_join(scratch, "glm-a");
    _cleanup_free_ char *source = fixture_path("oracles/glm-a/checkpoint");
    struct error error;
    if (fixture_convert(source, folder, NULL, 2, 0, &error) < 0) {
        print_error("%s\n", error.text);
        return -1;
    }
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    free(folder);
    fixture_remove(scratch);
    return 0;
}

static void assert_opens(void)
{
    struct container *container;
    struct error error = {{0}};
    if (container_open(folder, &container, &error) < 0)
        fail_msg("refused: %s", error.text);
    container_close(container);
}

static void assert_refused(const char *name, const char *words)
{
    struct container *container;
    struct error error = {{0}};
    if (container_open(folder, &container, &error) >= 0)
        fail_msg("accepted, %s %s expected", name, words);
    if (!strstr(error.text, name) || !strstr(error.text, words) || strchr(error.text, '\n'))
        fail_msg("%s\n  without: %s, %s", error.text, name, words);
}

/* Every checksum of the opened container is that of the bytes on disk, and every tensor has its place. */
static void test_checksums(void **state)
{
    (void)state;
    struct container *container;
    struct error error;
    assert_int_equal(container_open(folder, &container, &error), 0);
    assert_int_equal(container->expert_format, WEIGHT_INT4);
    assert_int_equal(container->dense_format, WEIGHT_INT8);
    assert_int_equal(container->expert_count, 4);
    for (size_t f = 0; f < container->dense_count; f++) {
        const struct dense_file *file = &container->dense[f];
        size_t bytes;
        _cleanup_free_ uint8_t *data = fixture_read(folder, strrchr(file->header.path, '/') + 1, &bytes);
        assert_int_equal(bytes, file->header.file_bytes);
        assert_int_equal(bytes % DISK_ALIGN, 0);
        for (size_t i = 0; i < file->header.count; i++) {
            const struct tensor *tensor = &file->header.tensors[i];
            assert_int_equal(XXH3_64bits(data + tensor->offset, tensor->bytes), file->checksums[i]);
            if (tensor->dims == 3)
                assert_int_equal(tensor->offset % (tensor->dtype == DTYPE_F16 ? SCALES_BYTES : 512), 0);
            else
                assert_int_equal(tensor->offset % dtype_bytes(tensor->dtype), 0);
        }
    }
    for (size_t f = 0; f < container->expert_count; f++) {
        const struct expert_layer *file = &container->experts[f];
        assert_int_equal(file->layer, f + 1);
        size_t bytes;
        _cleanup_free_ uint8_t *data = fixture_read(folder, strrchr(file->stripes[0].header.path, '/') + 1, &bytes);
        for (uint32_t e = 0; e < container->config.experts; e++) {
            for (uint32_t s = 0; s < EXPERT_SLICES; s++)
                assert_int_equal(XXH3_64bits(data + file->stripes[0].offsets[e] + s * container->slice_bytes,
                                             container->slice_bytes),
                                 file->checksums[e * EXPERT_SLICES + s]);
        }
    }
    container_close(container);
}

/* Flips one bit at every `step`-th byte of [first, last) and asserts that the container is refused, or that nothing
 * that counts was changed (white space between JSON tokens). */
static void flip_all(const char *name, size_t first, size_t last, size_t step, const char *words)
{
    struct container *container;
    struct error error;
    assert_int_equal(container_open(folder, &container, &error), 0);
    uint64_t identity = container->identity;
    container_close(container);
    size_t bytes;
    _cleanup_free_ uint8_t *data = fixture_read(folder, name, &bytes);
    _cleanup_free_ char *path = fixture_join(folder, name);
    for (size_t i = first; i < last && i < bytes; i += step) {
        _cleanup_fclose_ FILE *file = fopen(path, "r+b");
        assert_non_null(file);
        setvbuf(file, NULL, _IONBF, 0);
        fseek(file, (long)i, SEEK_SET);
        fputc(data[i] ^ (1 << i % 8), file);
        error.text[0] = '\0';
        int status = container_open(folder, &container, &error);
        if (status >= 0 && (strcmp(name, CONTAINER_MANIFEST) != 0 || container->identity != identity))
            fail_msg("%s: byte %zu flipped, accepted", name, i);
        if (status >= 0)
            container_close(container);
        else if (!strstr(error.text, name) || !strstr(error.text, words))
            fail_msg("%s: byte %zu flipped: %s", name, i, error.text);
        fseek(file, (long)i, SEEK_SET);
        fputc(data[i], file);
    }
    assert_opens();
}

static void test_flipped_manifest(void **state)
{
    (void)state;
    flip_all(CONTAINER_MANIFEST, 0, SIZE_MAX, 31, "");
}

static void test_flipped_header(void **state)
{
    (void)state;
    flip_all("dense-00001.safetensors", 0, 4096, 41, "again");
    flip_all("experts-0-00002.safetensors", 0, 4096, 41, "again");
}

static void test_flipped_tables(void **state)
{
    (void)state;
    struct container *container;
    struct error error;
    assert_int_equal(container_open(folder, &container, &error), 0);
    const struct tensor *checksums = safetensors_find(&container->experts[1].stripes[0].header, "experts.checksums");
    const struct tensor *exponents = safetensors_find(&container->experts[1].stripes[0].header, "experts.exponents");
    size_t first = checksums->offset, middle = exponents->offset, last = exponents->offset + exponents->bytes;
    container_close(container);
    flip_all("experts-0-00002.safetensors", first, middle, 11, "experts.checksums");
    flip_all("experts-0-00002.safetensors", middle, last, 5, "experts.exponents");
}

/* Each file in turn: shorter, longer, empty, missing. */
static void test_lengths(void **state)
{
    (void)state;
    static const char *const names[] = {"dense-00001.safetensors", "experts-0-00001.safetensors",
                                        "experts-0-00004.safetensors"};
    for (size_t n = 0; n < sizeof names / sizeof names[0]; n++) {
        size_t bytes;
        _cleanup_free_ uint8_t *data = fixture_read(folder, names[n], &bytes);
        _cleanup_free_ char *path = fixture_join(folder, names[n]);
        const size_t lengths[] = {0, 7, 100, bytes - 4096, bytes - 1, bytes + 1};
        for (size_t l = 0; l < sizeof lengths / sizeof lengths[0]; l++) {
            assert_int_equal(truncate(path, (off_t)lengths[l]), 0);
            assert_refused(names[n], "the manifest says");
            fixture_write(folder, names[n], data, bytes);
        }
        assert_int_equal(unlink(path), 0);
        assert_refused(names[n], "No such file or directory; fetch this file again");
        assert_int_equal(symlink("/no/drive/has/this", path), 0); /* a stripe whose drive is not there */
        assert_refused(names[n], "a link to /no/drive/has/this: No such file or directory; mount its drive, or mend");
        assert_int_equal(unlink(path), 0);
        fixture_write(folder, names[n], data, bytes);
    }
    size_t bytes;
    _cleanup_free_ uint8_t *data = fixture_read(folder, CONTAINER_MANIFEST, &bytes);
    _cleanup_free_ char *path = fixture_join(folder, CONTAINER_MANIFEST);
    for (size_t length = 0; length < bytes - 1; length += 997) {
        fixture_write(folder, CONTAINER_MANIFEST, data, length);
        assert_refused(CONTAINER_MANIFEST, "");
    }
    assert_int_equal(unlink(path), 0);
    assert_refused(folder, "not a Calypte container");
    fixture_write(folder, CONTAINER_MANIFEST, data, bytes);
    assert_opens();
}

/* What container_inspect told. */
struct told {
    size_t count;
    char names[4][64];
    int statuses[4];
};

static void tell(void *context, const char *name, int status, const struct error *why)
{
    struct told *told = context;
    assert_true(told->count < 4);
    snprintf(told->names[told->count], sizeof told->names[0], "%s", name);
    told->statuses[told->count++] = status;
    assert_non_null(strstr(why->text, name));
    assert_non_null(strstr(why->text, CONTAINER_MEND));
}

/* All files that are refused are told, in the order of the manifest, and a container comes only without them. */
static void test_inspect(void **state)
{
    (void)state;
    static const char *const names[] = {"dense-00001.safetensors", "experts-0-00002.safetensors",
                                        "experts-0-00004.safetensors"};
    struct container *container = NULL;
    struct error error = {""};
    struct told told = {0};
    size_t bytes[3];
    uint8_t *data[3];
    assert_int_equal(container_inspect(folder, tell, &told, &container, &error), 0);
    container_close(container);
    for (size_t i = 0; i < 3; i++) {
        _cleanup_free_ char *path = fixture_join(folder, names[i]);
        data[i] = fixture_read(folder, names[i], &bytes[i]);
        if (i == 1)
            assert_int_equal(unlink(path), 0);
        else
            assert_int_equal(truncate(path, 4096), 0);
    }
    container = NULL;
    assert_int_equal(container_inspect(folder, tell, &told, &container, &error), 3);
    assert_null(container);
    assert_int_equal(told.count, 3);
    for (size_t i = 0; i < 3; i++) {
        assert_string_equal(told.names[i], names[i]);
        assert_int_equal(told.statuses[i], i == 1 ? -ENOENT : -EINVAL);
        fixture_write(folder, names[i], data[i], bytes[i]);
        free(data[i]);
    }
    assert_opens();
}

/* Manifests whose checksum is right but which lie: member (of the whole or of its "config"), value, words of the
 * error. */
static const struct {
    bool config;
    const char *name, *value, *expected;
} lies[] = {
    {false, "format", "2", "format is 2"},
    {false, "numerics", "7", "numerics is 7"},
    {false, "format", "\"1\"", "format is missing"},
    {false, "slices", "4", "slices is 4"},
    {false, "stripes", "9", "stripes is missing or not from 1 to 8"},
    {false, "stripes", "2", "is not there as U8 [4, "},
    {false, "slice_bytes", "4096", "slice_bytes is 4096"},
    {false, "slice_bytes", "-1", "slice_bytes is -1"},
    {false, "dense_format", "\"int5\"", "dense_format"},
    {false, "expert_format", "\"int8\"", "slice_bytes"},
    {false, "qk_norm_eps", "0", "qk_norm_eps"},
    {false, "qk_norm_eps", "-1", "qk_norm_eps"},
    {false, "config", "{}", "model_type"},
    {false, "generation", "[]", "generation"},
    {false, "files", "[]", "files is missing"},
    {false, "files", "{}", "dense-00001"},
    {true, "hidden_size", "128", "slice_bytes"},
    {true, "n_routed_experts", "7", "experts.6"},
    {true, "n_routed_experts", "5", "experts.checksums"},
    {true, "num_nextn_predict_layers", "0", "lists 5 files"},
    {true, "first_k_dense_replace", "0", ""},
};

static void put_manifest(json_t *manifest)
{
    uint64_t checksum;
    char digits[CHECKSUM_DIGITS + 1];
    assert_int_equal(container_checksum(manifest, &checksum, NULL), 0);
    checksum_format(checksum, digits);
    json_object_set_new(manifest, "checksum", json_string(digits));
    _cleanup_free_ char *text = json_dumps(manifest, 0);
    fixture_write(folder, CONTAINER_MANIFEST, text, strlen(text));
}

static void test_lies(void **state)
{
    (void)state;
    size_t bytes;
    _cleanup_free_ uint8_t *data = fixture_read(folder, CONTAINER_MANIFEST, &bytes);
    for (size_t i = 0; i < sizeof lies / sizeof lies[0]; i++) {
        json_auto_t *manifest = json_loadb((const char *)data, bytes, 0, NULL);
        json_t *object = lies[i].config ? json_object_get(manifest, "config") : manifest;
        if (!strcmp(lies[i].name, "first_k_dense_replace"))
            json_object_del(object, "mlp_layer_types");
        json_object_set_new(object, lies[i].name, json_loads(lies[i].value, JSON_DECODE_ANY, NULL));
        put_manifest(manifest);
        assert_refused("", lies[i].expected);
    }
    /* Names that lead out of the folder, and entries that are none. */
    static const char *const names[] = {"../x.safetensors", "/etc/passwd", "experts-0-00099.safetensors"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        json_auto_t *manifest = json_loadb((const char *)data, bytes, 0, NULL);
        json_t *files = json_object_get(manifest, "files");
        json_object_set(files, names[i], json_object_get(files, "dense-00001.safetensors"));
        put_manifest(manifest);
        assert_refused(CONTAINER_MANIFEST, "files");
    }
    static const char *const entries[] = {"5", "{}", "{\"bytes\":-1,\"header\":\"0123456789abcdef\",\"tensors\":{}}",
                                          "{\"bytes\":1,\"header\":\"0123456789ABCDEF\",\"tensors\":{}}"};
    for (size_t i = 0; i < sizeof entries / sizeof entries[0]; i++) {
        json_auto_t *manifest = json_loadb((const char *)data, bytes, 0, NULL);
        json_object_set_new(json_object_get(manifest, "files"), "experts-0-00003.safetensors",
                            json_loads(entries[i], JSON_DECODE_ANY, NULL));
        put_manifest(manifest);
        assert_refused("experts-0-00003.safetensors", "entry");
    }
    fixture_write(folder, CONTAINER_MANIFEST, data, bytes);
    assert_opens();
}

/* A path that is no container: what it is instead, and what to do. */
static void test_no_container(void **state)
{
    (void)state;
    struct container *container;
    struct error error = {""};
    _cleanup_free_ char *checkpoint = fixture_path("oracles/glm-a/checkpoint");
    assert_int_equal(container_open(checkpoint, &container, &error), -ENOENT);
    assert_non_null(strstr(error.text, "calypte convert"));
    assert_non_null(strstr(error.text, "Hugging Face"));
    _cleanup_free_ char *file = fixture_join(folder, CONTAINER_MANIFEST);
    assert_int_equal(container_open(file, &container, &error), -ENOTDIR);
    assert_non_null(strstr(error.text, "not a folder"));
    _cleanup_free_ char *nowhere = fixture_join(folder, "nowhere");
    assert_int_equal(container_open(nowhere, &container, &error), -ENOENT);
    assert_non_null(strstr(error.text, nowhere));
}

/* Read calls of this process so far. */
static unsigned long read_calls(void)
{
    unsigned long count = 0;
    char line[128];
    FILE *file = fopen("/proc/self/io", "re");
    assert_non_null(file);
    while (fgets(line, sizeof line, file))
        sscanf(line, "syscr: %lu", &count);
    fclose(file);
    return count;
}

/* Opening costs a few reads, not one for every byte of the manifest. */
static void test_few_reads(void **state)
{
    (void)state;
    struct container *container;
    struct error error;
    size_t bytes;
    free(fixture_read(folder, CONTAINER_MANIFEST, &bytes));
    unsigned long before = read_calls();
    assert_int_equal(container_open(folder, &container, &error), 0);
    assert_true(read_calls() - before < bytes / 10);
    container_close(container);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_checksums),      cmocka_unit_test(test_flipped_manifest),
        cmocka_unit_test(test_flipped_header), cmocka_unit_test(test_flipped_tables),
        cmocka_unit_test(test_lengths),        cmocka_unit_test(test_lies),
        cmocka_unit_test(test_no_container),   cmocka_unit_test(test_few_reads),
        cmocka_unit_test(test_inspect),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
