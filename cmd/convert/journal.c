#include "cmd/convert/journal.h"

#include "proto/cleanup.h"
#include "proto/container.h"

#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>

#define JOURNAL_MAX_BYTES (256 << 20)

static int fail(const struct journal *journal, const char *verb, int code, struct error *ret_error)
{
    return error_set(ret_error, code, "%s/%s: cannot %s: %s%s", journal->folder, CONTAINER_JOURNAL, verb,
                     strerror(code),
                     code == ENOSPC                    ? "; free some space and run the same command again to go on"
                     : code == EROFS || code == EACCES ? "; choose a folder that can be written to"
                                                       : "");
}

/* Appends one line and waits until the disk has it. */
static int append(struct journal *journal, const json_t *object, struct error *ret_error)
{
    _cleanup_free_ char *text = json_dumps(object, JSON_COMPACT | JSON_SORT_KEYS);
    _cleanup_free_ char *line = NULL;
    if (!text || asprintf(&line, "%s\n", text) < 0) {
        line = NULL;
        return error_set(ret_error, ENOMEM, "%s/%s: no memory", journal->folder, CONTAINER_JOURNAL);
    }
    size_t length = strlen(line);
    for (size_t done = 0; done < length;) {
        ssize_t put = write(journal->fd, line + done, length - done);
        if (put < 0 && errno == EINTR)
            continue;
        if (put < 0)
            return fail(journal, "write", errno, ret_error);
        done += (size_t)put;
    }
    return fsync(journal->fd) < 0 ? fail(journal, "sync", errno, ret_error) : 0;
}

static int read_all(struct journal *journal, char **ret_text, size_t *ret_length, struct error *ret_error)
{
    struct stat facts;
    if (fstat(journal->fd, &facts) < 0)
        return fail(journal, "read", errno, ret_error);
    if (!S_ISREG(facts.st_mode) || facts.st_size > JOURNAL_MAX_BYTES)
        return fail(journal, "use it", EINVAL, ret_error);
    size_t length = (size_t)facts.st_size, done = 0;
    _cleanup_free_ char *text = malloc(length + 1);
    if (!text)
        return fail(journal, "read", ENOMEM, ret_error);
    while (done < length) {
        ssize_t got = pread(journal->fd, text + done, length - done, (off_t)done);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return fail(journal, "read", errno, ret_error);
        if (got == 0)
            break;
        done += (size_t)got;
    }
    text[done] = '\0';
    *ret_text = take_pointer(text);
    *ret_length = done;
    return 0;
}

/* Is the first line that of the run which is asked for? */
static int check_first(const struct journal *journal, const json_t *line, const struct journal_run *run,
                       struct error *ret_error)
{
    uint64_t stated;
    if (checksum_parse(json_object_get(line, "fingerprint"), &stated) < 0 || stated != run->fingerprint)
        return error_set(ret_error, EEXIST,
                         "%s: holds an unfinished conversion of another checkpoint or with other options: remove it to "
                         "begin anew, or choose another folder",
                         journal->folder);
    const json_t *stripes = json_object_get(line, "stripes");
    for (size_t i = 0; i < json_array_size(run->stripes); i++) {
        const char *before = json_string_value(json_array_get(stripes, i));
        const char *now = json_string_value(json_array_get(run->stripes, i));
        if (!before || strcmp(before, now) != 0)
            return error_set(ret_error, EEXIST,
                             "%s: holds an unfinished conversion whose stripe %zu is %.400s, not %.400s: give the same "
                             "--stripe folders in the same order, or remove it to begin anew",
                             journal->folder, i + 1, before ? before : "unknown", now);
    }
    return 0;
}

/* Takes the whole lines of the text and cuts the file behind them. What has no first line is left as it is: it may be
 * somebody else's. */
static int parse(struct journal *journal, const char *text, size_t length, const struct journal_run *run,
                 struct error *ret_error)
{
    size_t used = 0;
    const char *end;
    while ((end = memchr(text + used, '\n', length - used))) {
        json_auto_t *line = json_loadb(text + used, (size_t)(end - text) - used, JSON_REJECT_DUPLICATES, NULL);
        const char *file = json_string_value(json_object_get(line, "file"));
        json_t *entry = json_object_get(line, "entry");
        if (!journal->begun) {
            int status = check_first(journal, line, run, ret_error);
            if (status < 0)
                return status;
            journal->begun = true;
        } else if (!file || !json_is_object(entry) || json_object_set(journal->entries, file, entry) < 0) {
            break;
        }
        used = (size_t)(end - text) + 1;
    }
    if (!journal->begun)
        return 0;
    if (ftruncate(journal->fd, (off_t)used) < 0 || lseek(journal->fd, 0, SEEK_END) < 0)
        return fail(journal, "write", errno, ret_error);
    return 0;
}

int journal_open(int folder_fd, const char *folder, const struct journal_run *run, struct journal *ret_journal,
                 struct error *ret_error)
{
    _cleanup_(journal_close) struct journal journal = {.fd = -1, .folder = folder, .entries = json_object()};
    journal.fd = openat(folder_fd, CONTAINER_JOURNAL, O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (journal.fd < 0 && errno != ENOENT)
        return fail(&journal, "open", errno, ret_error);
    _cleanup_free_ char *text = NULL;
    size_t length = 0;
    int status = journal.fd < 0 ? 0 : read_all(&journal, &text, &length, ret_error);
    if (status == 0 && journal.fd >= 0)
        status = parse(&journal, text, length, run, ret_error);
    if (status < 0)
        return status;
    *ret_journal = journal;
    journal = (struct journal){.fd = -1};
    return 0;
}

int journal_begin(int folder_fd, const struct journal_run *run, struct journal *journal, struct error *ret_error)
{
    if (journal->fd < 0)
        journal->fd = openat(folder_fd, CONTAINER_JOURNAL, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0644);
    if (journal->fd < 0)
        return fail(journal, "create", errno, ret_error);
    if (ftruncate(journal->fd, 0) < 0) /* half a first line */
        return fail(journal, "write", errno, ret_error);
    char digits[CHECKSUM_DIGITS + 1];
    checksum_format(run->fingerprint, digits);
    json_auto_t *first = json_pack("{s:s, s:O}", "fingerprint", digits, "stripes", run->stripes);
    int status = append(journal, first, ret_error);
    if (status < 0)
        unlinkat(folder_fd, CONTAINER_JOURNAL, 0);
    journal->begun = status == 0;
    return status;
}

int journal_add(struct journal *journal, const char *file, const json_t *entry, struct error *ret_error)
{
    json_auto_t *line = json_pack("{s:s, s:O}", "file", file, "entry", entry);
    return append(journal, line, ret_error);
}

void journal_close(struct journal *journal)
{
    close_fdp(&journal->fd);
    journal->fd = -1;
    json_decref(journal->entries);
    journal->entries = NULL;
}
