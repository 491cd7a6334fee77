#include "cmd/verify/place.h"

#include "proto/cleanup.h"

#include <fcntl.h>
#include <limits.h>
#include <string.h>
#include <sys/stat.h>
#include <xxhash.h>

#define PLACE_MAX_BYTES (64u << 20)

static const char *file_name(const struct extent_file *file)
{
    const char *slash = strrchr(file->header->path, '/');
    return slash ? slash + 1 : file->header->path;
}

static uint64_t file_bytes(const struct extent_file *file)
{
    return file->header->file_bytes;
}

/* The change of the inode: the time of the contents can be set, and a copy brings the old one along. */
static int64_t change_ns(const struct stat *facts)
{
    return (int64_t)facts->st_ctim.tv_sec * 1000000000 + facts->st_ctim.tv_nsec;
}

/* Makes the folders of `path` up to its last slash. */
static void make_folders(const char *path)
{
    char folder[PATH_MAX];
    snprintf(folder, sizeof folder, "%s", path);
    for (char *at = strchr(folder + 1, '/'); at; at = strchr(at + 1, '/')) {
        *at = '\0';
        (void)mkdir(folder, 0700); /* one that cannot be made shows when the file is written */
        *at = '/';
    }
}

/* Two copies of a container have places of their own. NULL: no folder for it, or no memory. */
static char *state_path(const struct container *container)
{
    const char *state = getenv("XDG_STATE_HOME"), *home = getenv("HOME");
    bool given = state && state[0] == '/'; /* a relative one is to be ignored, says the XDG specification */
    _cleanup_free_ char *folder = realpath(container->path, NULL);
    char *path = NULL;
    if (!folder || (!given && !(home && home[0] == '/')))
        return NULL;
    uint64_t copy = XXH3_64bits(folder, strlen(folder));
    int length = asprintf(&path, "%s%s/calypte/%016" PRIx64 "-%016" PRIx64 ".verify", given ? state : home,
                          given ? "" : "/.local/state", container->identity, copy);
    if (length < 0)
        return NULL;
    if (length >= PATH_MAX) {
        free(path);
        return NULL;
    }
    return path;
}

/* Takes an entry over if it tells of the file that is there now. */
static void take_entry(struct place *place, uint32_t f, const json_t *entry)
{
    const struct extent_file *file = &place->extents->files[f];
    const json_t *bytes = json_object_get(entry, "bytes"), *changed = json_object_get(entry, "changed_ns");
    const json_t *done = json_object_get(entry, "done"), *bad = json_object_get(entry, "bad"), *index;
    json_int_t count = json_integer_value(done);
    size_t i;
    if (!json_is_integer(bytes) || !json_is_integer(changed) || !json_is_integer(done) || !json_is_array(bad) ||
        (uint64_t)json_integer_value(bytes) != file_bytes(file) ||
        json_integer_value(changed) != place->changed_ns[f] || count < 0 || count > file->extents)
        return;
    memset(place->states + file->first_extent, EXTENT_GOOD, (size_t)count);
    for (i = 0; i < json_array_size(bad); i++) {
        index = json_array_get(bad, i);
        if (json_is_integer(index) && json_integer_value(index) >= 0 && json_integer_value(index) < count)
            place->states[file->first_extent + (size_t)json_integer_value(index)] = EXTENT_TO_DO;
    }
}

static void read_place(struct place *place)
{
    json_auto_t *object = NULL;
    uint64_t identity;
    if (!place->path || container_read_json(place->path, PLACE_MAX_BYTES, &object, NULL) < 0 ||
        checksum_parse(json_object_get(object, "identity"), &identity) < 0 ||
        identity != place->extents->container->identity)
        return;
    for (uint32_t f = 0; f < place->extents->file_count; f++)
        take_entry(place, f, json_object_get(json_object_get(object, "files"), file_name(&place->extents->files[f])));
}

int place_open(const struct extents *extents, bool restart, struct place *ret_place, uint64_t *ret_bytes,
               struct error *ret_error)
{
    struct place place = {.extents = extents,
                          .path = state_path(extents->container),
                          .states = calloc(extents->count + 1u, 1),
                          .changed_ns = calloc(extents->file_count + 1u, sizeof(int64_t))};
    *ret_place = place;
    *ret_bytes = 0;
    if (!place.states || !place.changed_ns)
        return error_set(ret_error, ENOMEM, "%s: no memory for the place of the run", extents->container->path);
    for (uint32_t f = 0; f < extents->file_count; f++) {
        struct stat facts;
        const char *path = extents->files[f].header->path;
        if (stat(path, &facts) < 0)
            return error_set(ret_error, errno, "%s: %s", path, strerror(errno));
        place.changed_ns[f] = change_ns(&facts);
    }
    if (!restart)
        read_place(&place);
    for (uint32_t e = 0; e < extents->count; e++)
        *ret_bytes += place.states[e] == EXTENT_GOOD ? extents->list[e].bytes : 0;
    return 0;
}

static json_t *entry_of(const struct place *place, uint32_t f)
{
    const struct extent_file *file = &place->extents->files[f];
    const uint8_t *states = place->states + file->first_extent;
    json_t *bad = json_array();
    uint32_t done = 0;
    for (; done < file->extents && states[done] != EXTENT_TO_DO; done++)
        if (states[done] == EXTENT_BAD)
            json_array_append_new(bad, json_integer(done));
    return json_pack("{s:I, s:I, s:I, s:o}", "bytes", (json_int_t)file_bytes(file), "changed_ns",
                     (json_int_t)place->changed_ns[f], "done", (json_int_t)done, "bad", bad);
}

static int write_object(const struct place *place, const json_t *object)
{
    char temporary[PATH_MAX + 16];
    snprintf(temporary, sizeof temporary, "%s.%d", place->path, (int)getpid());
    _cleanup_close_ int fd = open(temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0)
        return -errno;
    int code = json_dumpfd(object, fd, JSON_COMPACT) < 0 ? (errno ? errno : EIO) : 0;
    if (code == 0 && rename(temporary, place->path) < 0)
        code = errno;
    if (code)
        unlink(temporary);
    return -code;
}

int place_write(struct place *place, struct error *ret_error)
{
    const struct container *container = place->extents->container;
    char identity[CHECKSUM_DIGITS + 1];
    if (place->unwritable)
        return 0;
    place->unwritable = !place->path;
    if (!place->path)
        return error_set(ret_error, ENOENT,
                         "neither XDG_STATE_HOME nor HOME is set: an interrupted run will begin anew");
    checksum_format(container->identity, identity);
    json_t *files = json_object();
    for (uint32_t f = 0; f < place->extents->file_count; f++)
        json_object_set_new(files, file_name(&place->extents->files[f]), entry_of(place, f));
    json_auto_t *object = json_pack("{s:s, s:o}", "identity", identity, "files", files);
    make_folders(place->path);
    int status = object ? write_object(place, object) : -ENOMEM;
    if (status == 0)
        return 0;
    place->unwritable = true;
    return error_set(ret_error, -status, "%s: cannot be written: %s: an interrupted run will begin anew", place->path,
                     strerror(-status));
}

bool place_file_changed(const struct place *place, uint32_t file)
{
    struct stat facts;
    return stat(place->extents->files[file].header->path, &facts) < 0 ||
           (uint64_t)facts.st_size != file_bytes(&place->extents->files[file]) ||
           change_ns(&facts) != place->changed_ns[file];
}

void place_remove(const struct place *place)
{
    if (place->path)
        unlink(place->path);
}

void place_close(struct place *place)
{
    free(place->path);
    free(place->states);
    free(place->changed_ns);
    *place = (struct place){0};
}
