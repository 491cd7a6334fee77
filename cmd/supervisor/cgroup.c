/* The files are described in the kernel's Documentation/admin-guide/cgroup-v1 and cgroup-v2.rst (cpu.max, memory.max,
 * memory.high)
 * and Documentation/scheduler/sched-bwc.rst (cpu.cfs_quota_us). */
#include "cmd/supervisor/cgroup.h"

#include "proto/cleanup.h"

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdbool.h>
#include <string.h>
#include <unistd.h>

/* Version 1 has no "max": without a limit a group shows the largest multiple of a page, of whatever size. */
#define NO_LIMIT (UINT64_C(1) << 62)

/* Where a hierarchy is mounted and where in it the process stands. */
struct hierarchy {
    char mount[PATH_MAX]; /* with the root in front */
    char group[PATH_MAX]; /* below the mount, "" or "/a/b" */
    bool found;
};

static bool read_line(const char *folder, const char *file, char *ret_line, int size)
{
    char path[2 * PATH_MAX + 64];
    snprintf(path, sizeof path, "%s/%s", folder, file);
    _cleanup_fclose_ FILE *stream = fopen(path, "re");
    return stream && fgets(ret_line, size, stream);
}

static bool read_number(const char *folder, const char *file, uint64_t *ret_number)
{
    char line[128];
    return read_line(folder, file, line, sizeof line) && sscanf(line, "%" SCNu64, ret_number) == 1;
}

/* The number behind `key ` in a file of such lines (memory.stat), 0 if there is none. */
static uint64_t read_keyed(const char *folder, const char *file, const char *key)
{
    char path[2 * PATH_MAX + 64], line[256];
    snprintf(path, sizeof path, "%s/%s", folder, file);
    _cleanup_fclose_ FILE *stream = fopen(path, "re");
    size_t length = strlen(key);
    uint64_t number = 0;
    while (stream && fgets(line, sizeof line, stream))
        if (!strncmp(line, key, length) && line[length] == ' ')
            return sscanf(line + length, "%" SCNu64, &number) == 1 ? number : 0;
    return 0;
}

/* True if `word` is one of the comma-separated words of `list`. */
static bool has_word(const char *list, const char *word)
{
    size_t length = strlen(word);
    for (const char *at = list; at; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL)
        if (!strncmp(at, word, length) && (at[length] == '\0' || at[length] == ',' || at[length] == '\n'))
            return true;
    return false;
}

/* The process's group in the hierarchy of `controller`, or in the version 2 hierarchy when it is NULL
 * (/proc/self/cgroup has lines `id:controllers:path`, with 0 and nothing for version 2). */
static bool find_group(const char *root, const char *controller, char ret_group[PATH_MAX])
{
    char path[PATH_MAX], line[PATH_MAX + 256];
    snprintf(path, sizeof path, "%s/proc/self/cgroup", root);
    _cleanup_fclose_ FILE *stream = fopen(path, "re");
    while (stream && fgets(line, sizeof line, stream)) {
        char *controllers = strchr(line, ':'), *group = controllers ? strchr(controllers + 1, ':') : NULL;
        if (!group)
            continue;
        *controllers++ = '\0';
        *group++ = '\0';
        group[strcspn(group, "\n")] = '\0';
        if (controller ? has_word(controllers, controller) : !strcmp(line, "0") && !*controllers) {
            snprintf(ret_group, PATH_MAX, "%.*s", PATH_MAX - 1, group);
            return true;
        }
    }
    return false;
}

/* Finds the mount (/proc/self/mountinfo: `id parent dev root mount options ... - type source superoptions`) and cuts
 * the mount's own root off the group's path, as a container shows it. */
static void find_hierarchy(const char *root, const char *controller, struct hierarchy *ret)
{
    char path[PATH_MAX], line[4096], group[PATH_MAX];
    ret->found = false;
    if (!find_group(root, controller, group))
        return;
    snprintf(path, sizeof path, "%s/proc/self/mountinfo", root);
    _cleanup_fclose_ FILE *stream = fopen(path, "re");
    while (stream && fgets(line, sizeof line, stream)) {
        char mount_root[1024], mount[1024], type[64], options[1024];
        const char *tail = strstr(line, " - ");
        if (!tail || sscanf(line, "%*s %*s %*s %1023s %1023s", mount_root, mount) != 2 ||
            sscanf(tail + 3, "%63s %*s %1023s", type, options) != 2)
            continue;
        if (controller ? strcmp(type, "cgroup") || !has_word(options, controller) : strcmp(type, "cgroup2") != 0)
            continue;
        size_t cut = !strcmp(mount_root, "/") ? 0 : strlen(mount_root);
        const char *below = !strncmp(group, mount_root, cut) && (!group[cut] || group[cut] == '/') ? group + cut : "";
        snprintf(ret->mount, sizeof ret->mount, "%s%s", root, mount);
        snprintf(ret->group, sizeof ret->group, "%s", !strcmp(below, "/") ? "" : below);
        ret->found = true;
        return;
    }
}

static uint64_t cpu_limit(const char *folder, bool version_2)
{
    uint64_t quota = 0, period = 0;
    char line[128];
    if (version_2) {
        if (!read_line(folder, "cpu.max", line, sizeof line) ||
            sscanf(line, "%" SCNu64 " %" SCNu64, &quota, &period) != 2)
            return CGROUP_UNLIMITED; /* "max 100000" */
    } else {
        if (!read_line(folder, "cpu.cfs_quota_us", line, sizeof line) || line[0] == '-' ||
            sscanf(line, "%" SCNu64, &quota) != 1 || !read_number(folder, "cpu.cfs_period_us", &period))
            return CGROUP_UNLIMITED; /* -1 */
    }
    if (!period || quota > UINT64_MAX / 1000)
        return CGROUP_UNLIMITED;
    return quota * 1000 / period;
}

/* What `folder` leaves of one limit; "max" and what cannot be read are no limit. */
static void take_limit(const char *folder, const char *file, uint64_t used, struct cgroup_memory *least)
{
    uint64_t limit;
    if (!read_number(folder, file, &limit) || limit > NO_LIMIT)
        return;
    uint64_t left = limit > used ? limit - used : 0;
    if (left >= least->free)
        return;
    least->free = left;
    snprintf(least->file, sizeof least->file, "%.*s/%s", (int)sizeof least->file - 64, folder, file);
}

static void memory_limits(const char *folder, bool version_2, struct cgroup_memory *least)
{
    uint64_t used;
    if (!read_number(folder, version_2 ? "memory.current" : "memory.usage_in_bytes", &used))
        return;
    uint64_t cache = read_keyed(folder, "memory.stat", version_2 ? "inactive_file" : "total_inactive_file");
    used = used > cache ? used - cache : 0;
    take_limit(folder, version_2 ? "memory.max" : "memory.limit_in_bytes", used, least);
    if (version_2)
        take_limit(folder, "memory.high", used, least); /* from there on the kernel slows the group down */
}

/* Steps from a group's folder to the one above; false behind the root of the mount. */
static bool go_up(char *folder, size_t mount_length)
{
    char *slash = strrchr(folder + mount_length, '/');
    if (slash)
        *slash = '\0';
    return slash != NULL;
}

/* Where the process's group in a hierarchy stands ("controller" NULL: in version 2), and the length of the mount's own
 * path. False: it is in none. */
static bool find_folder(const char *root, const char *controller, char ret_folder[2 * PATH_MAX], size_t *ret_mount)
{
    struct hierarchy *hierarchy = malloc(sizeof *hierarchy);
    if (hierarchy)
        find_hierarchy(root, controller, hierarchy);
    bool found = hierarchy && hierarchy->found;
    if (found) {
        snprintf(ret_folder, 2 * PATH_MAX, "%s%s", hierarchy->mount, hierarchy->group);
        *ret_mount = strlen(hierarchy->mount);
    }
    free(hierarchy);
    return found;
}

uint64_t cgroup_cpu_permille(const char *root)
{
    char folder[2 * PATH_MAX];
    size_t mount;
    uint64_t least = CGROUP_UNLIMITED;
    for (int version = 1; version <= 2; version++) {
        bool more = find_folder(root, version == 1 ? "cpu" : NULL, folder, &mount);
        for (; more; more = go_up(folder, mount)) {
            uint64_t here = cpu_limit(folder, version == 2);
            least = here < least ? here : least;
        }
    }
    return least;
}

struct cgroup_memory cgroup_memory_read(const char *root)
{
    char folder[2 * PATH_MAX];
    size_t mount;
    struct cgroup_memory least = {.free = CGROUP_UNLIMITED};
    for (int version = 1; version <= 2; version++) {
        bool more = find_folder(root, version == 1 ? "memory" : NULL, folder, &mount);
        for (; more; more = go_up(folder, mount))
            memory_limits(folder, version == 2, &least);
    }
    return least;
}

bool cgroup_pressure_file(const char *root, char ret_path[CGROUP_PATH_MAX])
{
    char folder[2 * PATH_MAX];
    size_t mount;
    if (!find_folder(root, NULL, folder, &mount))
        return false;
    int length = snprintf(ret_path, CGROUP_PATH_MAX, "%s/memory.pressure", folder);
    return length < (int)CGROUP_PATH_MAX && access(ret_path, F_OK) == 0;
}
