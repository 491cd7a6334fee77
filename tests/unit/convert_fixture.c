#include "tests/unit/convert_fixture.h"

#include <dirent.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

char *fixture_path(const char *name)
{
    const char *folder = getenv("CALYPTE_TESTS");
    return fixture_join(folder ? folder : "tests", name);
}

char *fixture_join(const char *folder, const char *name)
{
    char *path;
    assert_true(asprintf(&path, "%s/%s", folder, name) > 0);
    return path;
}

char *fixture_scratch(void)
{
    char *folder = strdup("/tmp/calypte-test-XXXXXX");
    assert_non_null(folder);
    assert_non_null(mkdtemp(folder));
    return folder;
}

static void remove_tree(const char *folder)
{
    DIR *directory = opendir(folder);
    const struct dirent *entry;
    while (directory && (entry = readdir(directory))) {
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, ".."))
            continue;
        char *path = fixture_join(folder, entry->d_name);
        if (unlink(path) < 0)
            remove_tree(path);
        free(path);
    }
    if (directory)
        closedir(directory);
    rmdir(folder);
}

void fixture_remove(char *folder)
{
    remove_tree(folder);
    free(folder);
}

uint8_t *fixture_read(const char *folder, const char *name, size_t *ret_bytes)
{
    _cleanup_free_ char *path = fixture_join(folder, name);
    _cleanup_fclose_ FILE *file = fopen(path, "rb");
    if (!file)
        fail_msg("%s: cannot open", path);
    struct stat facts;
    assert_int_equal(fstat(fileno(file), &facts), 0);
    uint8_t *bytes = malloc((size_t)facts.st_size + 1);
    assert_non_null(bytes);
    assert_int_equal(fread(bytes, 1, (size_t)facts.st_size, file), facts.st_size);
    bytes[facts.st_size] = '\0';
    *ret_bytes = (size_t)facts.st_size;
    return bytes;
}

void fixture_write(const char *folder, const char *name, const void *bytes, size_t count)
{
    _cleanup_free_ char *path = fixture_join(folder, name);
    _cleanup_fclose_ FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(bytes, 1, count, file), count);
}

struct watch {
    struct convert_watch watch; /* first */
    unsigned ticks, stop_after;
};

static void tick(struct convert_watch *watch)
{
    struct watch *own = (struct watch *)watch;
    own->ticks++;
    if (own->stop_after > 0 && own->ticks >= own->stop_after)
        atomic_store(&watch->stop, true);
}

static void note(struct convert_watch *watch, const char *line)
{
    (void)watch;
    assert_true(line[0] != '\0');
}

int fixture_convert(const char *source, const char *destination, const struct plan_options *options, unsigned jobs,
                    unsigned stop_after, struct error *ret_error)
{
    struct plan_options usual = {.experts = WEIGHT_INT4, .dense = WEIGHT_INT8};
    struct checkpoint checkpoint = {0};
    struct plan plan = {0};
    struct watch watch = {.watch = {.tick = tick, .note = note}, .stop_after = stop_after};
    enum convert_result result;
    int status = checkpoint_open(source, &checkpoint, ret_error);
    if (status == 0)
        status = plan_make(&checkpoint, options ? options : &usual, &plan, ret_error);
    if (status == 0)
        status = convert_run(&plan, &destination, jobs, &watch.watch, &result, ret_error);
    plan_free(&plan);
    checkpoint_close(&checkpoint);
    return status;
}

char *fixture_model(const char *folder)
{
    struct error error = {{0}};
    _cleanup_free_ char *source = fixture_path("model");
    char *container = fixture_join(folder, "container");
    if (fixture_convert(source, container, NULL, 2, 0, &error) < 0)
        fail_msg("%s", error.text);
    return container;
}

void fixture_assert_same(const char *a, const char *b)
{
    DIR *directory = opendir(a);
    assert_non_null(directory);
    size_t count = 0;
    const struct dirent *entry;
    while ((entry = readdir(directory))) {
        if (entry->d_name[0] == '.')
            continue;
        size_t first, second;
        _cleanup_free_ uint8_t *x = fixture_read(a, entry->d_name, &first),
                               *y = fixture_read(b, entry->d_name, &second);
        if (first != second || memcmp(x, y, first) != 0)
            fail_msg("%s differs", entry->d_name);
        count++;
    }
    closedir(directory);
    directory = opendir(b);
    assert_non_null(directory);
    while ((entry = readdir(directory)))
        count -= entry->d_name[0] != '.';
    closedir(directory);
    assert_int_equal(count, 0);
}

void fixture_load(const char *source, struct fixture_checkpoint *ret_checkpoint)
{
    _cleanup_free_ char *config = fixture_join(source, "config.json");
    ret_checkpoint->config = json_load_file(config, 0, NULL);
    size_t bytes;
    uint8_t *file = fixture_read(source, "model-00001-of-00001.safetensors", &bytes);
    uint64_t header;
    memcpy(&header, file, 8);
    ret_checkpoint->header = json_loadb((const char *)file + 8, header, 0, NULL);
    assert_true(ret_checkpoint->config && ret_checkpoint->header);
    json_object_del(ret_checkpoint->header, "__metadata__");
    ret_checkpoint->data_bytes = bytes - 8 - header;
    ret_checkpoint->data = malloc(ret_checkpoint->data_bytes);
    assert_non_null(ret_checkpoint->data);
    memcpy(ret_checkpoint->data, file + 8 + header, ret_checkpoint->data_bytes);
    free(file);
}

void fixture_unload(struct fixture_checkpoint *checkpoint)
{
    json_decref(checkpoint->config);
    json_decref(checkpoint->header);
    free(checkpoint->data);
}

void fixture_store(const struct fixture_checkpoint *checkpoint, const char *folder)
{
    _cleanup_free_ char *config = json_dumps(checkpoint->config, 0),
                        *header = json_dumps(checkpoint->header, JSON_COMPACT);
    assert_true(config && header);
    fixture_write(folder, "config.json", config, strlen(config));
    _cleanup_free_ char *path = fixture_join(folder, "model.safetensors");
    _cleanup_fclose_ FILE *file = fopen(path, "wb");
    uint64_t length = strlen(header);
    assert_non_null(file);
    assert_int_equal(fwrite(&length, 1, 8, file), 8);
    assert_int_equal(fwrite(header, 1, length, file), length);
    assert_int_equal(fwrite(checkpoint->data, 1, checkpoint->data_bytes, file), checkpoint->data_bytes);
}

uint8_t *fixture_data(const struct fixture_checkpoint *checkpoint, const char *tensor)
{
    const json_t *offsets = json_object_get(json_object_get(checkpoint->header, tensor), "data_offsets");
    assert_int_equal(json_array_size(offsets), 2);
    return checkpoint->data + json_integer_value(json_array_get(offsets, 0));
}
