#include "proto/settings.h"

#include "proto/cleanup.h"
#include "proto/parse.h"

#include <ctype.h>
#include <ini.h>
#include <inttypes.h>
#include <limits.h>
#include <string.h>

#define LEAST_SHARE 4096u /* bytes */

static const struct setting_info table[SETTING_COUNT] = {
    [SETTING_WORKERS] = {.name = "workers",
                         .type = SETTING_NUMBER,
                         .flag = "--workers",
                         .default_text = "0",
                         .most = 8,
                         .help = "worker processes; 0: one a NUMA node with CPUs and memory"},
    [SETTING_THREADS] = {.name = "threads",
                         .type = SETTING_NUMBER,
                         .flag = "--threads",
                         .default_text = "0",
                         .most = 1024,
                         .help =
                             "threads a worker; 0: its share of the cores that the affinity mask and cpu.max leave"},
    [SETTING_POOL] =
        {.name = "pool",
         .type = SETTING_SHARE,
         .flag = "--pool",
         .default_text = "auto",
         .help =
             "shared memory for experts: bytes (64G, 1.5GiB), a share of the memory that is available (80%), or auto"},
    [SETTING_CONTEXT] = {.name = "context",
                         .type = SETTING_NUMBER,
                         .flag = "--context",
                         .default_text = "0",
                         .most = 1u << 24,
                         .help = "tokens that a prompt and its answer may have; 0: the model's most, at most 8192"},
    [SETTING_SLOTS] = {.name = "slots",
                       .type = SETTING_NUMBER,
                       .flag = "--slots",
                       .default_text = "1",
                       .least = 1,
                       .most = 64,
                       .help = "requests that are answered at the same time, each with KV memory for a whole context"},
    [SETTING_QUEUE] = {.name = "queue",
                       .type = SETTING_NUMBER,
                       .default_text = "8",
                       .most = 4096,
                       .help = "requests that may wait; one more is answered `busy`"},
    [SETTING_IO] = {.name = "io",
                    .type = SETTING_CHOICE,
                    .default_text = "auto",
                    .choices = {"auto", "uring", "pread"},
                    .help = "how weights are read; auto: io_uring where the kernel allows it"},
    [SETTING_ISA] = {.name = "isa",
                     .type = SETTING_CHOICE,
                     .default_text = "auto",
                     .choices = {"auto", "scalar", "avx2", "avx512", "amx"}, /* as enum kernel_isa has them */
                     .help = "kernels; every set gives the same bits; auto: the best that this machine runs"},
    [SETTING_ACTIVATIONS] = {.name = "activations",
                             .type = SETTING_CHOICE,
                             .default_text = "int8",
                             .choices = {"int8", "f32"},
                             .help = "activations before quantised matrices; f32 is a slow reference"},
    [SETTING_KV] = {.name = "kv",
                    .type = SETTING_CHOICE,
                    .default_text = "f16",
                    .choices = {"f16", "f32"},
                    .help = "numbers of the KV memory; f32 is a reference"},
    [SETTING_INDEX_TOPK] =
        {.name = "index_topk",
         .type = SETTING_NUMBER,
         .default_text = "0",
         .most = 1u << 24,
         .help = "keys that sparse attention keeps; 0: the model's number; the context or more: dense attention"},
    [SETTING_PREFILL_CHUNK] = {.name = "prefill_chunk",
                               .type = SETTING_NUMBER,
                               .default_text = "256",
                               .least = 1,
                               .most = 4096,
                               .help = "prompt tokens that one forward pass takes"},
    [SETTING_HUGEPAGES] = {.name = "hugepages",
                           .type = SETTING_CHOICE,
                           .default_text = "auto",
                           .choices = {"auto", "off"},
                           .help = "huge pages for weights and KV, where the machine has them"},
    [SETTING_VERIFY] = {.name = "verify",
                        .type = SETTING_CHOICE,
                        .default_text = "first",
                        .choices = {"first", "always", "off"}, /* as enum verify_choice has them */
                        .help = "hold what is read against the checksums: when it is first read, each time, or never"},
    [SETTING_PREFETCH] = {.name = "prefetch",
                          .type = SETTING_CHOICE,
                          .default_text = "auto",
                          .choices = {"auto", "off", "on"}, /* as enum prefetch has them */
                          .help =
                              "ask for the next layer's likely experts ahead; auto: where the drive has time for them"},
    [SETTING_LEARNING] = {.name = "learning",
                          .type = SETTING_CHOICE,
                          .default_text = "on",
                          .choices = {"off", "read", "on"}, /* as enum learning_choice has them */
                          .help = "remember which experts are used, and load those at the next start; read: only load"},
    [SETTING_MIRROR] =
        {.name = "mirror",
         .type = SETTING_PATH,
         .flag = "--mirror",
         .default_text = "",
         .help = "a folder with a second copy of the container, best on another drive: experts are read from "
                 "both, and from one where the other fails"},
};

const struct setting_info *setting_info(enum setting setting)
{
    return &table[setting];
}

int setting_find(const char *name, enum setting *ret_setting, struct error *ret_error)
{
    const char *names[SETTING_COUNT];
    for (int i = 0; i < SETTING_COUNT; i++) {
        if (strcmp(name, table[i].name) == 0) {
            *ret_setting = (enum setting)i;
            return 0;
        }
        names[i] = table[i].name;
    }
    const char *near = nearest_name(name, names, SETTING_COUNT);
    return error_set(ret_error, ENOENT, "%s: no such setting; %s%s%s", name, near ? "did you mean `" : "",
                     near ? near : "", near ? "`?" : "`calypte config` lists them all");
}

void setting_print_allowed(const struct setting_info *info, char *ret_text, size_t size)
{
    switch (info->type) {
    case SETTING_NUMBER: snprintf(ret_text, size, "%" PRIu64 " to %" PRIu64, info->least, info->most); return;
    case SETTING_SHARE:
        snprintf(
            ret_text, size,
            "auto, bytes like 64G or 1.5GiB (4096 at least), or a share of the memory that is available, like 80%%");
        return;
    case SETTING_PATH: snprintf(ret_text, size, "a folder, or nothing"); return;
    case SETTING_CHOICE: break;
    }
    ret_text[0] = 0;
    for (size_t i = 0; info->choices[i]; i++) {
        size_t used = strlen(ret_text);
        snprintf(ret_text + used, size - used, "%s%s", i > 0 ? ", " : "", info->choices[i]);
    }
}

static int bad_value(const struct setting_info *info, const char *text, const char *origin, struct error *ret_error)
{
    char allowed[128];
    setting_print_allowed(info, allowed, sizeof allowed);
    const char *near = NULL;
    if (info->type == SETTING_CHOICE) {
        size_t count = 0;
        while (info->choices[count])
            count++;
        near = nearest_name(text, info->choices, count);
    }
    return error_set(ret_error, EINVAL, "%s: %s cannot be \"%.100s\"; allowed: %s%s%s%s", origin, info->name, text,
                     allowed, near ? "; did you mean `" : "", near ? near : "", near ? "`?" : "");
}

/* Reads `text` into the value's number and percent. */
static int parse_value(const struct setting_info *info, const char *text, struct setting_value *value)
{
    value->number = 0;
    value->percent = 0;
    switch (info->type) {
    case SETTING_NUMBER:
        if (strcmp(text, "auto") == 0 && strcmp(info->default_text, "0") == 0)
            return 0;
        return parse_number(text, info->least, info->most, &value->number);
    case SETTING_CHOICE:
        for (size_t i = 0; info->choices[i]; i++)
            if (strcmp(text, info->choices[i]) == 0) {
                value->number = i;
                return 0;
            }
        return -EINVAL;
    case SETTING_SHARE:
        if (strcmp(text, "auto") == 0)
            return 0;
        if (parse_percent(text, &value->percent) == 0)
            return 0;
        if (parse_size(text, &value->number) < 0 || value->number < LEAST_SHARE)
            return -EINVAL; /* fewer bytes were meant as a percentage, or lack their suffix */
        return 0;
    case SETTING_PATH: return 0;
    }
    return -EINVAL;
}

void settings_init(struct settings *settings)
{
    for (int i = 0; i < SETTING_COUNT; i++) {
        struct setting_value *value = &settings->values[i];
        *value = (struct setting_value){.source = SOURCE_DEFAULT, .origin = "default"};
        snprintf(value->text, sizeof value->text, "%s", table[i].default_text);
        parse_value(&table[i], value->text, value);
    }
}

int settings_set(struct settings *settings, const char *name, const char *text, enum setting_source source,
                 const char *origin, struct error *ret_error)
{
    enum setting setting;
    int status = setting_find(name, &setting, ret_error);
    if (status < 0)
        return error_prefix(ret_error, -EINVAL, "%s", origin);
    struct setting_value value = {.source = source};
    if (strlen(text) >= sizeof value.text || parse_value(&table[setting], text, &value) < 0)
        return bad_value(&table[setting], text, origin, ret_error);
    snprintf(value.text, sizeof value.text, "%s", text);
    snprintf(value.origin, sizeof value.origin, "%s", origin);
    if (source >= settings->values[setting].source)
        settings->values[setting] = value;
    return 0;
}

#define FILE_MAX ((size_t)1 << 20) /* bytes; a device may have no end */

struct file_reader {
    struct settings *settings;
    const char *path;
    int status;
    struct error *error;
};

static int take_line(void *context, const char *section, const char *name, const char *value)
{
    struct file_reader *reader = context;
    if (reader->status < 0)
        return 1; /* the first fault is the one to tell */
    if (section[0] != 0)
        reader->status =
            error_set(reader->error, EINVAL, "%s: [%s]: sections are not used; write `name = value` lines only",
                      reader->path, section);
    else
        reader->status = settings_set(reader->settings, name, value, SOURCE_FILE, reader->path, reader->error);
    return reader->status == 0;
}

int settings_load_file(struct settings *settings, const char *path, struct error *ret_error)
{
    _cleanup_fclose_ FILE *file = fopen(path, "re");
    if (!file)
        return error_set(ret_error, errno, "%s: cannot read the settings: %s", path, strerror(errno));
    _cleanup_free_ char *text = malloc(FILE_MAX + 1);
    if (!text)
        return error_set(ret_error, ENOMEM, "%s: no memory to read the settings", path);
    size_t size = fread(text, 1, FILE_MAX + 1, file);
    if (ferror(file))
        return error_set(ret_error, EIO, "%s: cannot read the settings", path);
    if (size > FILE_MAX || memchr(text, 0, size))
        return error_set(ret_error, EINVAL, "%s: is no file of settings: it %s", path,
                         size > FILE_MAX ? "has more than 1 MiB" : "holds a zero byte");
    text[size] = 0;
    struct file_reader reader = {.settings = settings, .path = path, .error = ret_error};
    int line = ini_parse_string(text, take_line, &reader);
    if (reader.status < 0)
        return reader.status;
    if (line > 0)
        return error_set(ret_error, EINVAL, "%s: line %d is not `name = value`", path, line);
    if (line < 0)
        return error_set(ret_error, ENOMEM, "%s: no memory to read the settings", path);
    return 0;
}

static int load_environment(struct settings *settings, struct error *ret_error)
{
    for (int i = 0; i < SETTING_COUNT; i++) {
        char variable[64];
        int length = snprintf(variable, sizeof variable, "CALYPTE_%s", table[i].name);
        for (int c = 0; c < length; c++)
            variable[c] = (char)toupper((unsigned char)variable[c]);
        const char *text = getenv(variable);
        if (!text || text[0] == 0)
            continue;
        int status = settings_set(settings, table[i].name, text, SOURCE_ENVIRONMENT, variable, ret_error);
        if (status < 0)
            return status;
    }
    return 0;
}

/* A file that need not be there. */
static int load_optional(struct settings *settings, const char *path, struct error *ret_error)
{
    struct error error;
    int status = settings_load_file(settings, path, &error);
    if (status == -ENOENT || status == -ENOTDIR)
        return 0;
    return status < 0 ? error_set(ret_error, -status, "%s", error.text) : 0;
}

int settings_load(struct settings *settings, const char *config_file, struct error *ret_error)
{
    settings_init(settings);
    int status = load_optional(settings, "/etc/calypte/calypte.conf", ret_error);
    if (status < 0)
        return status;

    char path[PATH_MAX];
    const char *base = getenv("XDG_CONFIG_HOME"), *home = getenv("HOME");
    int length = 0;
    if (base && base[0] == '/') /* a relative one is to be ignored, says the XDG specification */
        length = snprintf(path, sizeof path, "%s/calypte/calypte.conf", base);
    else if (home && home[0] == '/')
        length = snprintf(path, sizeof path, "%s/.config/calypte/calypte.conf", home);
    if (length > 0 && (size_t)length < sizeof path) {
        status = load_optional(settings, path, ret_error);
        if (status < 0)
            return status;
    }
    if (config_file) {
        status = settings_load_file(settings, config_file, ret_error);
        if (status < 0)
            return status;
    }
    return load_environment(settings, ret_error);
}

/* A flag that is given again counts anew, but a second path would be meant to be read as well. */
static int take_flag(struct settings *settings, const char *name, const char *text, const char *flag,
                     struct error *ret_error)
{
    enum setting setting;
    if (setting_find(name, &setting, NULL) == 0 && table[setting].type == SETTING_PATH &&
        settings->values[setting].source == SOURCE_FLAG && strcmp(settings->values[setting].text, text) != 0)
        return error_set(ret_error, EINVAL, "%s is given twice, %.200s and %.200s: there is one %s at most", name,
                         settings->values[setting].text, text, name);
    return settings_set(settings, name, text, SOURCE_FLAG, flag, ret_error);
}

static int take_assignment(struct settings *settings, const char *text, struct error *ret_error)
{
    const char *equals = strchr(text, '=');
    char name[64];
    if (!equals || equals == text || (size_t)(equals - text) >= sizeof name)
        return error_set(ret_error, EINVAL, "--set: \"%.100s\" is not name=value", text);
    memcpy(name, text, (size_t)(equals - text));
    name[equals - text] = 0;
    return take_flag(settings, name, equals + 1, "--set", ret_error);
}

/* The value of flag `flag` if argv[*index] is it (`--flag value` or `--flag=value`). 1, 0, or negative. */
static int take_value(const char *flag, int argc, char **argv, int *index, const char **ret_value,
                      struct error *ret_error)
{
    const char *word = argv[*index];
    size_t length = strlen(flag);
    if (strncmp(word, flag, length) != 0 || (word[length] != 0 && word[length] != '='))
        return 0;
    if (word[length] == '=') {
        *ret_value = word + length + 1;
        return 1;
    }
    if (*index + 1 >= argc)
        return error_set(ret_error, EINVAL, "%s: its value is missing", flag);
    *index += 1;
    *ret_value = argv[*index];
    return 1;
}

int settings_take_flag(struct settings *settings, int argc, char **argv, int *index, struct error *ret_error)
{
    const char *value;
    int taken = take_value("--set", argc, argv, index, &value, ret_error);
    if (taken != 0) {
        int status = taken < 0 ? taken : take_assignment(settings, value, ret_error);
        return status < 0 ? status : 1;
    }
    for (int i = 0; i < SETTING_COUNT; i++) {
        if (!table[i].flag)
            continue;
        taken = take_value(table[i].flag, argc, argv, index, &value, ret_error);
        if (taken == 0)
            continue;
        int status = taken < 0 ? taken : take_flag(settings, table[i].name, value, table[i].flag, ret_error);
        return status < 0 ? status : 1;
    }
    return 0;
}

uint64_t settings_share(const struct settings *settings, enum setting setting, uint64_t available, uint64_t automatic)
{
    const struct setting_value *value = &settings->values[setting];
    if (value->number > 0)
        return value->number;
    if (value->percent > 0)
        return (uint64_t)((double)available * value->percent / 100);
    return automatic;
}

void settings_print(const struct settings *settings, FILE *file)
{
    for (int i = 0; i < SETTING_COUNT; i++)
        fprintf(file, "%-13s = %-8s ; %s\n", table[i].name, settings->values[i].text, settings->values[i].origin);
}

json_t *settings_json(const struct settings *settings)
{
    json_t *object = json_object();
    for (int i = 0; i < SETTING_COUNT; i++)
        json_object_set_new(
            object, table[i].name,
            json_pack("{s:s, s:s}", "value", settings->values[i].text, "origin", settings->values[i].origin));
    return object;
}

void settings_print_help(FILE *file)
{
    for (int i = 0; i < SETTING_COUNT; i++) {
        char spelling[64], allowed[128];
        if (table[i].flag)
            snprintf(spelling, sizeof spelling, "%s VALUE", table[i].flag);
        else
            snprintf(spelling, sizeof spelling, "--set %s=VALUE", table[i].name);
        setting_print_allowed(&table[i], allowed, sizeof allowed);
        fprintf(file, "  %-26s %s\n  %-26s (%s; default %s)\n", spelling, table[i].help, "", allowed,
                table[i].default_text);
    }
}
