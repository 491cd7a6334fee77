/* Every setting of an instance: one table, from which the file, the environment, the flags, `--help` and `calypte
 * config` come.
 *
 * A value is known by where it came from; a flag wins over the environment, the environment over a file, a file over
 * the default, in whatever order they are read. A wrong name or value is one line that names it, what is allowed, and
 * the nearest right name. */
#pragma once

#include "proto/error.h"

#include <jansson.h>
#include <stdint.h>
#include <stdio.h>

enum setting {
    SETTING_WORKERS,
    SETTING_THREADS,
    SETTING_POOL,
    SETTING_CONTEXT,
    SETTING_SLOTS,
    SETTING_QUEUE,
    SETTING_IO,
    SETTING_ISA,
    SETTING_ACTIVATIONS,
    SETTING_KV,
    SETTING_INDEX_TOPK,
    SETTING_PREFILL_CHUNK,
    SETTING_HUGEPAGES,
    SETTING_VERIFY,
    SETTING_PREFETCH,
    SETTING_LEARNING,
    SETTING_MIRROR,
    SETTING_COUNT,
};

enum setting_type {
    SETTING_NUMBER, /* least .. most; 0 may be written `auto` where the default is 0 */
    SETTING_CHOICE, /* one of `choices`; its number is the index in them */
    SETTING_SHARE,  /* a size in bytes, a percentage, or `auto` */
    SETTING_PATH,   /* a path of the file system, or nothing */
};

struct setting_info {
    const char *name; /* in files; CALYPTE_<NAME> in the environment */
    enum setting_type type;
    const char *flag; /* `--pool`, or NULL: reached by --set */
    const char *default_text;
    uint64_t least, most;   /* of a number */
    const char *choices[6]; /* of a choice, NULL behind the last */
    const char *help;
};

/* Who set a value; a higher one wins. */
enum setting_source { SOURCE_DEFAULT, SOURCE_FILE, SOURCE_ENVIRONMENT, SOURCE_FLAG };

#define SETTING_TEXT_MAX 512u
#define SETTING_ORIGIN_MAX 512u

struct setting_value {
    enum setting_source source;
    char text[SETTING_TEXT_MAX];     /* as it was given */
    char origin[SETTING_ORIGIN_MAX]; /* "default", the file's path, "CALYPTE_POOL", "--pool" */
    uint64_t number;                 /* NUMBER and CHOICE; SHARE: bytes, or 0 */
    double percent;                  /* SHARE: percent, or 0. Both 0: auto */
};

struct settings {
    struct setting_value values[SETTING_COUNT];
};

/* Values of the choices, by number. */
enum setting_io { SETTING_IO_AUTO, SETTING_IO_URING, SETTING_IO_PREAD };
enum setting_activations { SETTING_ACTIVATIONS_INT8, SETTING_ACTIVATIONS_F32 };
enum setting_kv { SETTING_KV_F16, SETTING_KV_F32 };
enum setting_hugepages { SETTING_HUGEPAGES_AUTO, SETTING_HUGEPAGES_OFF };
enum setting_verify { SETTING_VERIFY_FIRST, SETTING_VERIFY_ALWAYS, SETTING_VERIFY_OFF };
enum setting_prefetch { SETTING_PREFETCH_AUTO, SETTING_PREFETCH_OFF, SETTING_PREFETCH_ON };
enum setting_learning { SETTING_LEARNING_OFF, SETTING_LEARNING_READ, SETTING_LEARNING_ON };

const struct setting_info *setting_info(enum setting setting);

/* The setting called `name` (as in files), or -ENOENT and a line with the nearest name. */
int setting_find(const char *name, enum setting *ret_setting, struct error *ret_error);

/* All defaults. */
void settings_init(struct settings *settings);

/* Defaults, then /etc/calypte/calypte.conf, $XDG_CONFIG_HOME/calypte/calypte.conf (~/.config without it), `config_file`
 * (may be NULL; if not, it must exist), each over the one before, then CALYPTE_<NAME> of every setting. Reads the
 * environment. */
int settings_load(struct settings *settings, const char *config_file, struct error *ret_error);

/* One file; -ENOENT when it is not there. */
int settings_load_file(struct settings *settings, const char *path, struct error *ret_error);

/* Sets one value unless a higher source has set it. `origin` is for people. -EINVAL with a line. */
int settings_set(struct settings *settings, const char *name, const char *text, enum setting_source source,
                 const char *origin, struct error *ret_error);

/* Takes a setting's flag from a command line: `--pool 64G`, `--pool=64G`, `--set name=value`. 1: taken, *index stands
 * on its last word; 0: argv[*index] is no setting's flag; negative: a line. */
int settings_take_flag(struct settings *settings, int argc, char **argv, int *index, struct error *ret_error);

static inline uint64_t settings_number(const struct settings *settings, enum setting setting)
{
    return settings->values[setting].number;
}

static inline const char *settings_text(const struct settings *settings, enum setting setting)
{
    return settings->values[setting].text;
}

/* Bytes of the pool where `available` bytes could be used for it; `automatic` is the answer for `auto`. */
uint64_t settings_share(const struct settings *settings, enum setting setting, uint64_t available, uint64_t automatic);

/* `calypte config`: a line `name = value ; origin` each, as a file could have it; and as JSON: {name: {"value",
 * "origin"}}. */
void settings_print(const struct settings *settings, FILE *file);
json_t *settings_json(const struct settings *settings);

/* The settings' part of --help: each with its flag or --set, its values, its default. */
void settings_print_help(FILE *file);

/* "auto, uring, pread", "1 to 8" ...: what a setting may be. */
void setting_print_allowed(const struct setting_info *info, char *ret_text, size_t size);
