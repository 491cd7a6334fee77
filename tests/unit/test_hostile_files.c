/* Mutated files: whatever bytes stand in a safetensors header, a config.json or a container, the parsers end with an
 * answer or with one line. Run under ASan and UBSan. CALYPTE_FUZZ_ROUNDS sets the number of rounds (default 2000);
 * the seed is fixed. */
#include "tests/unit/convert_fixture.h"

#include <stdlib.h>
#include <unistd.h>

static char *scratch, *folder; /* of a container */
static unsigned long rounds;
static uint64_t seed = 7;

static uint32_t random_below(uint32_t limit)
{
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(seed >> 33) % limit;
}

static int setup(void **state)
{
    (void)state;
    const char *text = getenv("CALYPTE_FUZZ_ROUNDS");
    rounds = text ? strtoul(text, NULL, 10) : 2000;
    scratch = fixture_scratch();
    folder = fixture_join(scratch, "container");
    _cleanup_free_ char *source = fixture_path("oracles/glm-a/checkpoint");
    struct error error;
    return fixture_convert(source, folder, NULL, 2, 0, &error);
}

static int teardown(void **state)
{
    (void)state;
    free(folder);
    fixture_remove(scratch);
    return 0;
}

/* Pieces that hurt parsers. */
static const char *const pieces[] = {"0",
                                     "-1",
                                     "9223372036854775807",
                                     "18446744073709551616",
                                     "1e308",
                                     "null",
                                     "true",
                                     "[]",
                                     "{}",
                                     "\"\"",
                                     "\"F32\"",
                                     "[0,0]",
                                     "4096",
                                     "}",
                                     "]",
                                     ",",
                                     "\\u0000",
                                     "\xff"};

/* Changes bytes, or replaces, inserts or removes a stretch; keeps under `limit`. */
static size_t mutate(uint8_t *bytes, size_t count, size_t limit)
{
    for (uint32_t changes = 1 + random_below(3); changes > 0 && count > 1; changes--) {
        uint32_t at = random_below((uint32_t)count), length = random_below(12);
        const char *piece = pieces[random_below(sizeof pieces / sizeof pieces[0])];
        length = at + length > count ? (uint32_t)count - at : length;
        switch (random_below(5)) {
        case 0: bytes[at] ^= (uint8_t)(1u << random_below(8)); break;
        case 1: bytes[at] = (uint8_t)random_below(256); break;
        case 2:
            memmove(bytes + at, bytes + at + length, count - at - length);
            count -= length;
            break;
        case 3:
            if (count + strlen(piece) <= limit) {
                memmove(bytes + at + strlen(piece), bytes + at, count - at);
                memcpy(bytes + at, piece, strlen(piece));
                count += strlen(piece);
            }
            break;
        default: /* a number becomes another one */
            while (at < count && (bytes[at] < '0' || bytes[at] > '9'))
                at++;
            if (at < count)
                bytes[at] = (uint8_t)('0' + random_below(10));
            break;
        }
    }
    return count;
}

static void check_error(int status, const struct error *error)
{
    if (status < 0 && (!error->text[0] || strchr(error->text, '\n') || !memchr(error->text, '\0', sizeof error->text)))
        fail_msg("status %d with: %s", status, error->text);
}

static void test_headers(void **state)
{
    (void)state;
    static const char header[] =
        "{\"__metadata__\":{\"a\":\"b\"},\"w\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[0,24]},"
        "\"v\":{\"dtype\":\"BF16\",\"shape\":[4],\"data_offsets\":[24,32]},\"e\":{\"dtype\":\"U8\",\"shape\":[0],"
        "\"data_offsets\":[32,32]}}";
    _cleanup_free_ char *path = fixture_join(scratch, "fuzz.safetensors");
    unsigned long accepted = 0;
    for (unsigned long i = 0; i < rounds; i++) {
        uint8_t file[1024] = {0};
        size_t count = mutate((uint8_t *)memcpy(file + 8, header, sizeof header - 1), sizeof header - 1, 900);
        uint64_t length = random_below(20) ? count : ((uint64_t)random_below(1u << 31) << random_below(34));
        memcpy(file, &length, 8);
        fixture_write(scratch, "fuzz.safetensors", file, 8 + count + (random_below(10) ? 32 : random_below(64)));
        struct safetensors opened;
        struct error error = {{0}};
        int status = safetensors_open(path, &opened, &error);
        check_error(status, &error);
        if (status < 0)
            continue;
        accepted++;
        for (size_t t = 0; t < opened.count; t++) {
            const struct tensor *tensor = &opened.tensors[t];
            assert_true(tensor->offset >= opened.data_offset && tensor->bytes <= opened.file_bytes);
            assert_true(tensor->offset <= opened.file_bytes - tensor->bytes);
            assert_ptr_equal(safetensors_find(&opened, tensor->name), tensor);
        }
        safetensors_close(&opened);
    }
    unlink(path);
    assert_true(accepted > 0 && accepted < rounds);
}

static void test_configs(void **state)
{
    (void)state;
    _cleanup_free_ char *source = fixture_path("model");
    size_t bytes;
    _cleanup_free_ uint8_t *good = fixture_read(source, "config.json", &bytes), *text = malloc(bytes + 256);
    assert_non_null(text);
    unsigned long accepted = 0, parsed = 0;
    for (unsigned long i = 0; i < rounds; i++) {
        memcpy(text, good, bytes);
        size_t count = mutate(text, bytes, bytes + 256);
        json_auto_t *config = json_loadb((const char *)text, count, 0, NULL);
        struct model_config facts;
        struct error error = {{0}};
        parsed += config != NULL;
        int status = model_config_parse(config, NULL, 0, &facts, &error);
        check_error(status, &error);
        if (status == 0) {
            accepted++;
            assert_int_equal(model_config_check(&facts, &error), 0);
        }
    }
    assert_true(accepted > 0 && accepted < parsed);
}

/* One file of the container at a time; for the manifest half of the time with a right checksum. */
static void test_containers(void **state)
{
    (void)state;
    static const char *const names[] = {CONTAINER_MANIFEST, CONTAINER_MANIFEST, "dense-00001.safetensors",
                                        "experts-0-00001.safetensors"};
    for (unsigned long i = 0; i < rounds / 10; i++) {
        const char *name = names[random_below(4)];
        size_t bytes;
        _cleanup_free_ uint8_t *good = fixture_read(folder, name, &bytes), *bad = malloc(bytes + 256);
        assert_non_null(bad);
        memcpy(bad, good, bytes);
        size_t head = bytes < 20000 ? bytes : 20000, count = bytes;
        if (name == names[0])
            count = mutate(bad, bytes, bytes + 256);
        else
            mutate(bad, head, head);
        json_auto_t *manifest =
            name == names[0] && random_below(2) ? json_loadb((const char *)bad, count, 0, NULL) : NULL;
        uint64_t checksum;
        if (json_is_object(manifest) && container_checksum(manifest, &checksum, NULL) == 0) {
            char digits[CHECKSUM_DIGITS + 1];
            checksum_format(checksum, digits);
            json_object_set_new(manifest, "checksum", json_string(digits));
            _cleanup_free_ char *text = json_dumps(manifest, 0);
            fixture_write(folder, name, text, strlen(text));
        } else {
            fixture_write(folder, name, bad, count);
        }
        struct container *container;
        struct error error = {{0}};
        int status = container_open(folder, &container, &error);
        check_error(status, &error);
        if (status == 0)
            container_close(container);
        fixture_write(folder, name, good, bytes);
    }
    struct container *container;
    struct error error;
    assert_int_equal(container_open(folder, &container, &error), 0);
    container_close(container);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_headers),
        cmocka_unit_test(test_configs),
        cmocka_unit_test(test_containers),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
