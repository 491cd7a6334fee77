/* Settings: parsing, who wins, and what is said of a wrong name or value. */
#include "proto/cleanup.h"
#include "proto/parse.h"
#include "proto/settings.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <limits.h>
#include <string.h>
#include <sys/stat.h>

/* A folder of this test's own, with XDG_CONFIG_HOME in it. */
struct fixture {
    char folder[64], user_file[128], given_file[128];
};

static void write_file(const char *path, const char *text)
{
    _cleanup_fclose_ FILE *file = fopen(path, "w");
    assert_non_null(file);
    assert_int_equal(fputs(text, file) >= 0, 1);
}

static int set_up(void **state)
{
    struct fixture *fixture = calloc(1, sizeof *fixture);
    assert_non_null(fixture);
    strcpy(fixture->folder, "/tmp/calypte-settings-XXXXXX");
    assert_non_null(mkdtemp(fixture->folder));
    char folder[96];
    snprintf(folder, sizeof folder, "%s/calypte", fixture->folder);
    assert_int_equal(mkdir(folder, 0700), 0);
    snprintf(fixture->user_file, sizeof fixture->user_file, "%s/calypte.conf", folder);
    snprintf(fixture->given_file, sizeof fixture->given_file, "%s/given.conf", fixture->folder);
    setenv("XDG_CONFIG_HOME", fixture->folder, 1);
    for (int s = 0; s < SETTING_COUNT; s++) {
        char variable[64];
        snprintf(variable, sizeof variable, "CALYPTE_%s", setting_info((enum setting)s)->name);
        for (char *at = variable; *at; at++)
            *at = (char)(*at >= 'a' && *at <= 'z' ? *at - 'a' + 'A' : *at);
        unsetenv(variable);
    }
    *state = fixture;
    return 0;
}

static int tear_down(void **state)
{
    struct fixture *fixture = *state;
    char folder[96];
    unlink(fixture->user_file);
    unlink(fixture->given_file);
    snprintf(folder, sizeof folder, "%s/calypte", fixture->folder);
    rmdir(folder);
    rmdir(fixture->folder);
    free(fixture);
    return 0;
}

static void test_sizes(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        uint64_t bytes;
    } good[] = {
        {"64G", UINT64_C(64) << 30},
        {"1.5GiB", UINT64_C(3) << 29},
        {"4096", 4096},
        {"0", 0},
        {"1kb", 1000},
        {"1KiB", 1024},
        {"2TB", UINT64_C(2000000000000)},
        {"1P", UINT64_C(1) << 50},
        {"8191.5PiB", (UINT64_C(1) << 63) - (UINT64_C(1) << 49)},
        {"3pb", UINT64_C(3000000000000000)},
        {"0.5m", 1 << 19},
        {"8B", 8},
    };
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
        uint64_t bytes = 1;
        assert_int_equal(parse_size(good[i].text, &bytes), 0);
        assert_int_equal(bytes, good[i].bytes);
    }
    static const char *const bad[] = {"",    "G",    "-1G", "1.5", "1..5G",     "1 G",
                                      "1Gx", "0x10", "1e9", "inf", "99999999T", "."};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        uint64_t bytes;
        assert_true(parse_size(bad[i], &bytes) < 0);
    }
    static const char *const large[] = {"8192P", "18446744073709551615", "99999999T"};
    for (size_t i = 0; i < sizeof large / sizeof large[0]; i++) {
        uint64_t bytes;
        assert_int_equal(parse_size(large[i], &bytes), -ERANGE);
    }
}

static void test_percentages_and_names(void **state)
{
    (void)state;
    double percent;
    assert_int_equal(parse_percent("80%", &percent), 0);
    assert_true(percent == 80);
    assert_int_equal(parse_percent("12.5%", &percent), 0);
    assert_true(percent == 12.5);
    assert_true(parse_percent("0%", &percent) < 0 && parse_percent("101%", &percent) < 0 &&
                parse_percent("80", &percent) < 0);
    static const char *const names[] = {"workers", "threads", "pool"};
    assert_string_equal(nearest_name("wrokers", names, 3), "workers");
    assert_string_equal(nearest_name("Pools", names, 3), "pool");
    assert_null(nearest_name("completely_different", names, 3));
    static const char *const short_names[] = {"on", "off", "max"};
    assert_null(nearest_name("x", short_names, 3));
    assert_null(nearest_name("of", &short_names[2], 1));
    assert_null(nearest_name("mop", short_names, 3)); /* two letters of three: anything */
    assert_string_equal(nearest_name("mas", short_names, 3), "max");
    static const char *const not_real[] = {"", " 3", "3 ", "0x10", "inf", "nan", "+1", "1e", "--1", "1,5"};
    double number = 7;
    for (size_t i = 0; i < sizeof not_real / sizeof not_real[0]; i++)
        assert_int_equal(parse_real(not_real[i], -10, 10, &number), -EINVAL);
    assert_int_equal(parse_real("11", -10, 10, &number), -ERANGE);
    assert_int_equal(parse_real("1e999", -10, 1e308, &number), -ERANGE);
    assert_true(number == 7);
    assert_int_equal(parse_real("-2.5e-1", -10, 10, &number), 0);
    assert_true(number == -0.25);
}

static void test_defaults(void **state)
{
    (void)state;
    struct settings settings;
    settings_init(&settings);
    for (int s = 0; s < SETTING_COUNT; s++) {
        const struct setting_info *info = setting_info((enum setting)s);
        enum setting found;
        struct error error;
        assert_int_equal(setting_find(info->name, &found, &error), 0);
        assert_int_equal(found, s);
        assert_string_equal(settings_text(&settings, (enum setting)s), info->default_text);
        assert_string_equal(settings.values[s].origin, "default");
        /* a default is a value that could be given */
        assert_int_equal(settings_set(&settings, info->name, info->default_text, SOURCE_FLAG, "test", &error), 0);
    }
    assert_int_equal(settings_number(&settings, SETTING_PREFILL_CHUNK), 256);
    assert_int_equal(settings_share(&settings, SETTING_POOL, 1000, 77), 77);
}

static void test_who_wins(void **state)
{
    struct fixture *fixture = *state;
    struct settings settings;
    struct error error = {""};
    write_file(fixture->user_file, "# mine\nworkers = 2\nthreads=3\nqueue = 1 ; short\npool = 1G\n");
    write_file(fixture->given_file, "threads = 4\npool = 50%\n");
    setenv("CALYPTE_POOL", "2G", 1);
    int status = settings_load(&settings, fixture->given_file, &error);
    unsetenv("CALYPTE_POOL");
    assert_string_equal(error.text, "");
    assert_int_equal(status, 0);
    assert_int_equal(settings_number(&settings, SETTING_WORKERS), 2);
    assert_string_equal(settings.values[SETTING_WORKERS].origin, fixture->user_file);
    assert_int_equal(settings_number(&settings, SETTING_THREADS), 4);
    assert_string_equal(settings.values[SETTING_THREADS].origin, fixture->given_file);
    assert_int_equal(settings_number(&settings, SETTING_QUEUE), 1);
    assert_int_equal(settings_share(&settings, SETTING_POOL, 1000, 0), UINT64_C(2) << 30);
    assert_string_equal(settings.values[SETTING_POOL].origin, "CALYPTE_POOL");

    char *argv[] = {(char[]){"up"},    (char[]){"--pool=80%"}, (char[]){"--workers"},    (char[]){"8"},
                    (char[]){"--set"}, (char[]){"io=pread"},   (char[]){"--set=kv=f32"}, (char[]){"--poolx"}};
    int argc = 8, taken = 0;
    for (int i = 1; i < argc; i++)
        taken += settings_take_flag(&settings, argc, argv, &i, &error);
    assert_int_equal(taken, 4); /* --poolx is nobody's flag */
    assert_int_equal(settings_share(&settings, SETTING_POOL, 1000, 0), 800);
    assert_int_equal(settings_number(&settings, SETTING_WORKERS), 8);
    assert_int_equal(settings_number(&settings, SETTING_IO), SETTING_IO_PREAD);
    assert_int_equal(settings_number(&settings, SETTING_KV), SETTING_KV_F32);
    /* whatever the order, a flag stays */
    assert_int_equal(settings_set(&settings, "workers", "3", SOURCE_ENVIRONMENT, "CALYPTE_WORKERS", &error), 0);
    assert_int_equal(settings_number(&settings, SETTING_WORKERS), 8);
}

static void check_refused(const char *name, const char *value, const char *const *parts)
{
    struct settings settings;
    struct error error = {""};
    settings_init(&settings);
    assert_int_equal(settings_set(&settings, name, value, SOURCE_FLAG, "--set", &error), -EINVAL);
    for (; *parts; parts++)
        if (!strstr(error.text, *parts))
            fail_msg("\"%s\" does not say \"%s\"", error.text, *parts);
    assert_null(strchr(error.text, '\n'));
}

static void test_refusals(void **state)
{
    struct fixture *fixture = *state;
    check_refused("wokers", "1", (const char *const[]){"wokers", "`workers`", NULL});
    check_refused("workers", "9", (const char *const[]){"workers", "\"9\"", "0 to 8", NULL});
    check_refused("workers", "-1", (const char *const[]){"0 to 8", NULL});
    check_refused("workers", "two", (const char *const[]){"0 to 8", NULL});
    check_refused("workers", "", (const char *const[]){"0 to 8", NULL});
    check_refused("slots", "0", (const char *const[]){"1 to 64", NULL});
    check_refused("io", "urning", (const char *const[]){"auto, uring, pread", "`uring`", NULL});
    check_refused("pool", "0", (const char *const[]){"pool", "64G", NULL});
    check_refused("pool", "200%", (const char *const[]){"pool", NULL});
    check_refused("pool", "25", (const char *const[]){"\"25\"", "64G", "80%", NULL});
    check_refused("kv", "f16f16f16f16f16f16f16f16f16f16f16f16f16f16f16f16f16f16f16f16f16f16",
                  (const char *const[]){"f16, f32", NULL});

    struct settings settings;
    struct error error = {""};
    write_file(fixture->given_file, "workers = 2\nthread = 3\n");
    assert_int_equal(settings_load(&settings, fixture->given_file, &error), -EINVAL);
    assert_non_null(strstr(error.text, fixture->given_file));
    assert_non_null(strstr(error.text, "`threads`"));
    write_file(fixture->given_file, "workers = 2\nnonsense\n");
    assert_int_equal(settings_load(&settings, fixture->given_file, &error), -EINVAL);
    assert_non_null(strstr(error.text, "line 2"));
    write_file(fixture->given_file, "[pool]\nworkers = 2\n");
    assert_int_equal(settings_load(&settings, fixture->given_file, &error), -EINVAL);
    assert_non_null(strstr(error.text, "[pool]"));
    FILE *file = fopen(fixture->given_file, "we");
    assert_non_null(file);
    assert_int_equal(fwrite("slots = 2\0 3\n", 1, 13, file), 13);
    fclose(file);
    assert_int_equal(settings_load(&settings, fixture->given_file, &error), -EINVAL);
    assert_non_null(strstr(error.text, "zero byte"));
    assert_int_equal(settings_load(&settings, "/dev/zero", &error), -EINVAL); /* it has no end */
    assert_non_null(strstr(error.text, "/dev/zero"));
    unlink(fixture->given_file);
    assert_int_equal(settings_load(&settings, fixture->given_file, &error), -ENOENT);
    assert_non_null(strstr(error.text, fixture->given_file));
    setenv("CALYPTE_SLOTS", "many", 1);
    assert_int_equal(settings_load(&settings, NULL, &error), -EINVAL);
    unsetenv("CALYPTE_SLOTS");
    assert_non_null(strstr(error.text, "CALYPTE_SLOTS"));
    char *argv[] = {(char[]){"--pool"}};
    int index = 0;
    assert_int_equal(settings_take_flag(&settings, 1, argv, &index, &error), -EINVAL);
    assert_non_null(strstr(error.text, "--pool"));
}

/* What `calypte config` prints is a file with the same values. */
/* A path is taken as it is written, and no longer than others can keep it. */
static void test_path(void **state)
{
    (void)state;
    struct settings settings;
    struct error error;
    char *argv[] = {(char[]){"--mirror"}, (char[]){"/mnt/second copy"}}, longest[SETTING_TEXT_MAX + 1];
    int index = 0;
    settings_init(&settings);
    assert_string_equal(settings_text(&settings, SETTING_MIRROR), "");
    assert_int_equal(settings_take_flag(&settings, 2, argv, &index, &error), 1);
    assert_string_equal(settings_text(&settings, SETTING_MIRROR), "/mnt/second copy");
    char *other[] = {(char[]){"--mirror"}, (char[]){"/mnt/third"}, (char[]){"--set"}, (char[]){"mirror=/mnt/third"}};
    for (int i = 0; i < 4; i++) {
        int first = i;
        assert_int_equal(settings_take_flag(&settings, 4, other, &i, &error), -EINVAL);
        assert_non_null(strstr(error.text, "mirror is given twice"));
        assert_int_equal(i, first + 1);
    }
    assert_int_equal(settings_set(&settings, "mirror", "", SOURCE_FLAG, "test", &error), 0);
    assert_string_equal(settings_text(&settings, SETTING_MIRROR), "");
    memset(longest, 'x', sizeof longest - 1);
    longest[sizeof longest - 1] = 0;
    assert_int_equal(settings_set(&settings, "mirror", longest, SOURCE_FLAG, "test", &error), -EINVAL);
    longest[sizeof longest - 2] = 0;
    assert_int_equal(settings_set(&settings, "mirror", longest, SOURCE_FLAG, "test", &error), 0);
}

static void test_print_is_a_file(void **state)
{
    struct fixture *fixture = *state;
    struct settings settings, again;
    struct error error = {""};
    settings_init(&settings);
    assert_int_equal(settings_set(&settings, "pool", "12.5%", SOURCE_FLAG, "--pool", &error), 0);
    assert_int_equal(settings_set(&settings, "isa", "scalar", SOURCE_FLAG, "--set", &error), 0);
    FILE *file = fopen(fixture->given_file, "w");
    assert_non_null(file);
    settings_print(&settings, file);
    fclose(file);
    assert_int_equal(settings_load(&again, fixture->given_file, &error), 0);
    for (int s = 0; s < SETTING_COUNT; s++)
        assert_string_equal(settings_text(&again, (enum setting)s), settings_text(&settings, (enum setting)s));
    json_t *object = settings_json(&settings);
    assert_int_equal(json_object_size(object), SETTING_COUNT);
    assert_string_equal(json_string_value(json_object_get(json_object_get(object, "pool"), "origin")), "--pool");
    json_decref(object);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sizes),
        cmocka_unit_test(test_percentages_and_names),
        cmocka_unit_test(test_defaults),
        cmocka_unit_test_setup_teardown(test_who_wins, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_refusals, set_up, tear_down),
        cmocka_unit_test(test_path),
        cmocka_unit_test_setup_teardown(test_print_is_a_file, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
