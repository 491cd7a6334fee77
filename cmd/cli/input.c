#include "cmd/cli/input.h"

#include "proto/cleanup.h"

#include <ctype.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#define INPUT_MAX ((size_t)64 << 20)

static const char *shown(const char *path)
{
    return strcmp(path, "-") ? path : "standard input";
}

int input_read(const char *path, char **ret_bytes, size_t *ret_size, struct error *ret_error)
{
    bool from_stdin = !strcmp(path, "-");
    _cleanup_fclose_ FILE *opened = from_stdin ? NULL : fopen(path, "re");
    FILE *file = from_stdin ? stdin : opened;
    _cleanup_free_ char *bytes = NULL;
    size_t size = 0, room = 0, got;
    if (!file)
        return error_set(ret_error, errno, "cannot read %s: %s", path, strerror(errno));
    do {
        if (room - size < 2) {
            room = room ? room * 2 : 65536;
            char *more = realloc(bytes, room);
            if (!more)
                return error_set(ret_error, ENOMEM, "out of memory while reading %s", shown(path));
            bytes = more;
        }
        got = fread(bytes + size, 1, room - size - 1, file);
        size += got;
        if (size > INPUT_MAX)
            return error_set(ret_error, E2BIG, "%s has more than %zu MiB", shown(path), INPUT_MAX >> 20);
    } while (got);
    if (ferror(file))
        return error_set(ret_error, EIO, "cannot read %s: %s", shown(path), strerror(errno));
    bytes[size] = '\0';
    *ret_bytes = take_pointer(bytes);
    *ret_size = size;
    return 0;
}

int input_tokens(const char *path, json_t **ret_tokens, struct error *ret_error)
{
    _cleanup_free_ char *bytes = NULL;
    size_t size;
    int status = input_read(path, &bytes, &size, ret_error);
    if (status)
        return status;
    json_t *tokens = json_array();
    for (char *at = bytes; at < bytes + size;) {
        char *end;
        if (isspace((unsigned char)*at)) {
            at++;
            continue;
        }
        errno = 0;
        long id = strtol(at, &end, 10);
        if (!isdigit((unsigned char)*at) || errno || id > INT32_MAX || (*end && !isspace((unsigned char)*end)) ||
            (!*end && end < bytes + size)) {
            json_decref(tokens);
            return error_set(
                ret_error, EINVAL,
                "%s: \"%.*s\" at byte %td is no token id; decimal ids separated by white space are expected",
                shown(path), (int)strcspn(at, " \t\r\n") > 32 ? 32 : (int)strcspn(at, " \t\r\n"), at, at - bytes);
        }
        json_array_append_new(tokens, json_integer(id));
        at = end;
    }
    *ret_tokens = tokens;
    return 0;
}

int input_text(const char *bytes, size_t size, const char *path, json_t **ret_text, struct error *ret_error)
{
    *ret_text = json_stringn(bytes, size);
    return *ret_text ? 0 : error_set(ret_error, EILSEQ, "%s is not UTF-8 text", shown(path));
}
