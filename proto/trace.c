#include "proto/trace.h"

#include "proto/cleanup.h"
#include "proto/container.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdbool.h>
#include <string.h>
#include <sys/stat.h>

struct trace_writer {
    FILE *file;
    char *path;
    struct trace_header header;
};

struct trace_reader {
    FILE *file;
    char *path;
    struct trace_header header;
    uint64_t format;
    uint32_t least_slots, most_slots;
    uint64_t line;
    bool begun; /* a layer was read */
    char *text; /* [room], the line that was read last */
    size_t room;
    struct trace_use *uses; /* [uses_room] */
    size_t uses_room;
};

static bool header_fits(const struct trace_header *header)
{
    if (header->layers < 1 || header->layers > MODEL_MAX_LAYERS || header->experts < 1 ||
        header->experts > MODEL_MAX_EXPERTS || header->slots > INT32_MAX ||
        header->expert_bytes > TRACE_EXPERT_BYTES_MAX)
        return false;
    for (uint32_t l = 0; header->numbered && l < header->layers; l++) {
        const uint32_t *number = &header->layer_numbers[l];
        if (*number >= MODEL_MAX_LAYERS || (l && *number <= number[-1]))
            return false;
    }
    return true;
}

/* What a layer must be, for the writer and for the reader; NULL where it is. */
static const char *layer_fault(const struct trace_header *header, const struct trace_layer *layer)
{
    if (layer->step > INT64_MAX || layer->lost > INT64_MAX)
        return "a number that is too large";
    if (layer->layer >= header->layers)
        return "a layer that the model does not have";
    if (layer->count == 0 || layer->count > TRACE_MAX_USES)
        return "no uses, or too many";
    for (uint32_t i = 0; i < layer->count; i++) {
        const struct trace_use *use = &layer->uses[i];
        if (use->expert >= header->experts)
            return "an expert that the layer does not have";
        if (use->row >= TRACE_MAX_ROWS || use->flags > (TRACE_HIT | TRACE_PREFILL))
            return "a row or flags out of range";
        if (i && (use->expert < use[-1].expert || (use->expert == use[-1].expert && use->row <= use[-1].row)))
            return "uses that do not ascend";
    }
    return NULL;
}

/* Ends the line. Steals the reference. */
static int write_line(struct trace_writer *writer, json_t *object, struct error *ret_error)
{
    json_auto_t *line = object;
    if (!line)
        return error_set(ret_error, ENOMEM, "%s: out of memory", writer->path);
    errno = 0;
    if (json_dumpf(line, writer->file, JSON_COMPACT) < 0 || putc('\n', writer->file) == EOF)
        return error_set(ret_error, errno, "%s: cannot write: %s", writer->path, strerror(errno));
    return 0;
}

static void free_writer(struct trace_writer *writer)
{
    if (writer->file)
        fclose(writer->file);
    free(writer->path);
    free(writer);
}

/* The first line, or NULL. */
static json_t *header_json(const struct trace_header *header)
{
    char identity[CHECKSUM_DIGITS + 1];
    checksum_format(header->identity, identity);
    json_t *line = json_pack("{si ss si si si}", "trace", TRACE_FORMAT, "model", identity, "layers",
                             (int)header->layers, "experts", (int)header->experts, "slots", (int)header->slots);
    json_t *numbers = header->numbered ? json_array() : NULL;
    int status = 0;
    for (uint32_t l = 0; numbers && l < header->layers; l++)
        status |= json_array_append_new(numbers, json_integer(header->layer_numbers[l]));
    if (header->numbered)
        status |= json_object_set_new(line, "layer_numbers", numbers);
    if (header->expert_bytes)
        status |= json_object_set_new(line, "expert_bytes", json_integer((json_int_t)header->expert_bytes));
    if (status) {
        json_decref(line);
        line = NULL;
    }
    return line;
}

int trace_create(const char *path, const struct trace_header *header, struct trace_writer **ret_writer,
                 struct error *ret_error)
{
    if (!header_fits(header))
        return error_set(ret_error, EINVAL, "%s: a trace of %u layers of %u experts and %u slots", path, header->layers,
                         header->experts, header->slots);
    struct trace_writer *writer = calloc(1, sizeof *writer);
    if (!writer || !(writer->path = strdup(path))) {
        free(writer);
        return error_set(ret_error, ENOMEM, "%s: out of memory", path);
    }
    writer->header = *header;
    int fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd < 0 || !(writer->file = fdopen(fd, "w"))) {
        int code = errno;
        if (fd >= 0)
            close(fd);
        free_writer(writer);
        return error_set(ret_error, code, "%s: cannot make the trace: %s%s", path, strerror(code),
                         code == EEXIST ? "; choose another name or remove it" : "");
    }
    int status = write_line(writer, header_json(header), ret_error);
    if (status < 0) {
        unlink(path);
        free_writer(writer);
        return status;
    }
    *ret_writer = writer;
    return 0;
}

int trace_append(struct trace_writer *writer, const struct trace_layer *layer, struct error *ret_error)
{
    const char *fault = layer_fault(&writer->header, layer);
    if (fault)
        return error_set(ret_error, EINVAL, "%s: step %" PRIu64 ", layer %u has %s", writer->path, layer->step,
                         layer->layer, fault);
    json_auto_t *rows = json_array();
    for (uint32_t i = 0; rows && i < layer->count; i++) {
        const struct trace_use *use = &layer->uses[i];
        json_t *row = json_pack("[iii]", (int)use->expert, (int)use->row, (int)use->flags);
        if (json_array_append_new(rows, row) < 0)
            return error_set(ret_error, ENOMEM, "%s: out of memory", writer->path);
    }
    json_t *line = json_pack("{sI si}", "step", (json_int_t)layer->step, "layer", (int)layer->layer);
    if (line && layer->lost && json_object_set_new(line, "lost", json_integer((json_int_t)layer->lost)) < 0) {
        json_decref(line);
        line = NULL;
    }
    if (line && json_object_set(line, "rows", rows) < 0) {
        json_decref(line);
        line = NULL;
    }
    return write_line(writer, line, ret_error);
}

int trace_append_slots(struct trace_writer *writer, uint32_t slots, struct error *ret_error)
{
    if (slots > INT32_MAX)
        return error_set(ret_error, EINVAL, "%s: a pool of %u slots", writer->path, slots);
    return write_line(writer, json_pack("{si}", "slots", (int)slots), ret_error);
}

/* Behind its last whole line. False: it has none. */
static bool cut_file(int fd)
{
    char block[4096];
    for (off_t end = lseek(fd, 0, SEEK_END), start; end > 0; end = start) {
        start = end > (off_t)sizeof block ? end - (off_t)sizeof block : 0;
        size_t bytes = (size_t)(end - start);
        const char *last = pread(fd, block, bytes, start) == (ssize_t)bytes ? memrchr(block, '\n', bytes) : NULL;
        if (last)
            return ftruncate(fd, start + (last - block) + 1) == 0;
    }
    return false;
}

int trace_finish(struct trace_writer *writer, struct error *ret_error)
{
    int status = 0;
    if (!writer)
        return 0;
    int fd = dup(fileno(writer->file));
    bool failed = ferror(writer->file);
    errno = 0;
    if (fclose(writer->file)) {
        status = error_set(ret_error, errno, "%s: cannot write: %s", writer->path, strerror(errno));
        failed = true;
    }
    if (failed && (fd < 0 || !cut_file(fd)))
        unlink(writer->path);
    if (fd >= 0)
        close(fd);
    writer->file = NULL;
    free_writer(writer);
    return status;
}

void trace_discard(struct trace_writer *writer)
{
    if (!writer)
        return;
    unlink(writer->path);
    free_writer(writer);
}

/* The reader's next line, without its end. 1; 0 at the end of the file. */
static int read_line(struct trace_reader *reader, size_t *ret_length, struct error *ret_error)
{
    size_t length = 0;
    int letter;
    reader->line++;
    errno = 0;
    while ((letter = getc_unlocked(reader->file)) != EOF && letter != '\n') {
        if (length == reader->room) {
            size_t room = reader->room ? reader->room * 2 : 4096;
            char *text = room <= TRACE_LINE_MAX ? realloc(reader->text, room) : NULL;
            if (!text)
                return error_set(ret_error, room <= TRACE_LINE_MAX ? ENOMEM : EBADMSG, "%s: line %" PRIu64 " is %s",
                                 reader->path, reader->line,
                                 room <= TRACE_LINE_MAX ? "more than memory holds" : "too long; is this a trace?");
            reader->text = text;
            reader->room = room;
        }
        reader->text[length++] = (char)letter;
    }
    if (letter == EOF && ferror(reader->file))
        return error_set(ret_error, errno, "%s: cannot read: %s", reader->path, strerror(errno));
    if (letter == EOF && length)
        return error_set(ret_error, EBADMSG,
                         reader->line == 1 ? "%s: not a trace of `calypte trace`"
                                           : "%s: line %" PRIu64 " is cut off; remove that line and try again",
                         reader->path, reader->line);
    *ret_length = length;
    return letter != EOF;
}

static bool get_number(const json_t *value, uint64_t most, uint64_t *ret_number)
{
    if (!json_is_integer(value) || json_integer_value(value) < 0 || (uint64_t)json_integer_value(value) > most)
        return false;
    *ret_number = (uint64_t)json_integer_value(value);
    return true;
}

static int bad_line(const struct trace_reader *reader, const char *fault, struct error *ret_error)
{
    return error_set(ret_error, EBADMSG, "%s: line %" PRIu64 " has %s", reader->path, reader->line, fault);
}

/* The members that may be absent. */
static bool read_options(const json_t *line, struct trace_header *header)
{
    const json_t *numbers = json_object_get(line, "layer_numbers"), *bytes = json_object_get(line, "expert_bytes");
    uint64_t number;
    header->numbered = numbers != NULL;
    if (numbers && (!json_is_array(numbers) || json_array_size(numbers) != header->layers))
        return false;
    for (uint32_t l = 0; numbers && l < header->layers; l++) {
        if (!get_number(json_array_get(numbers, l), MODEL_MAX_LAYERS, &number))
            return false;
        header->layer_numbers[l] = (uint32_t)number;
    }
    return !bytes || (get_number(bytes, TRACE_EXPERT_BYTES_MAX, &header->expert_bytes) && header->expert_bytes > 0);
}

static int read_header(struct trace_reader *reader, struct error *ret_error)
{
    size_t length = 0;
    uint64_t layers = 0, experts = 0, slots = 0;
    int status = read_line(reader, &length, ret_error);
    if (status < 0)
        return status;
    json_auto_t *line = json_loadb(reader->text, length, JSON_REJECT_DUPLICATES, NULL);
    if (!get_number(json_object_get(line, "trace"), UINT32_MAX, &reader->format))
        return error_set(ret_error, EBADMSG, "%s: not a trace of `calypte trace` (a compressed one: zcat FILE | ...)",
                         reader->path);
    if (reader->format < 1 || reader->format > TRACE_FORMAT)
        return error_set(ret_error, EBADMSG, "%s: a trace of format %" PRIu64 ", this program reads 1 to %d",
                         reader->path, reader->format, TRACE_FORMAT);
    if (checksum_parse(json_object_get(line, "model"), &reader->header.identity) < 0 ||
        !get_number(json_object_get(line, "layers"), MODEL_MAX_LAYERS, &layers) ||
        !get_number(json_object_get(line, "experts"), MODEL_MAX_EXPERTS, &experts) ||
        !get_number(json_object_get(line, "slots"), INT32_MAX, &slots))
        return bad_line(reader, "no model, or one out of range", ret_error);
    reader->header.layers = (uint32_t)layers;
    reader->header.experts = (uint32_t)experts;
    reader->header.slots = reader->least_slots = reader->most_slots = (uint32_t)slots;
    return read_options(line, &reader->header) && header_fits(&reader->header)
               ? 0
               : bad_line(reader, "no model, or one out of range", ret_error);
}

int trace_open(const char *path, struct trace_reader **ret_reader, struct trace_header *ret_header,
               struct error *ret_error)
{
    struct trace_reader *reader = calloc(1, sizeof *reader);
    if (!reader || !(reader->path = strdup(path))) {
        free(reader);
        return error_set(ret_error, ENOMEM, "%s: out of memory", path);
    }
    struct stat stat;
    int status = 0;
    reader->file = fopen(path, "re");
    if (!reader->file)
        status = error_set(ret_error, errno, "%s: cannot open: %s", path, strerror(errno));
    else if (fstat(fileno(reader->file), &stat) == 0 && S_ISDIR(stat.st_mode))
        status = error_set(ret_error, EISDIR, "%s: a folder, not a trace", path);
    else
        status = read_header(reader, ret_error);
    if (status < 0) {
        trace_close(reader);
        return status;
    }
    *ret_header = reader->header;
    *ret_reader = reader;
    return 0;
}

/* The uses of a line, into the reader's own array. */
static const char *read_uses(struct trace_reader *reader, const json_t *rows)
{
    size_t count = json_array_size(rows), i;
    json_t *row;
    if (!json_is_array(rows) || count > TRACE_MAX_USES)
        return "no rows, or too many";
    if (count > reader->uses_room) {
        struct trace_use *uses = realloc(reader->uses, count * sizeof *uses);
        if (!uses)
            return "more rows than memory holds";
        reader->uses = uses;
        reader->uses_room = count;
    }
    json_array_foreach (rows, i, row) {
        uint64_t expert, number, flags;
        if (json_array_size(row) != 3 || !get_number(json_array_get(row, 0), UINT32_MAX, &expert) ||
            !get_number(json_array_get(row, 1), UINT32_MAX, &number) ||
            !get_number(json_array_get(row, 2), UINT32_MAX, &flags))
            return "a row that is not [expert, row, flags]";
        reader->uses[i] =
            (struct trace_use){.expert = (uint32_t)expert, .row = (uint32_t)number, .flags = (uint32_t)flags};
    }
    return NULL;
}

/* A line that tells of another number of slots. */
static int take_slots(struct trace_reader *reader, const json_t *line, struct error *ret_error)
{
    uint64_t slots;
    if (reader->format < 2 || !get_number(json_object_get(line, "slots"), INT32_MAX, &slots))
        return bad_line(reader, "no step and layer", ret_error);
    if (!reader->begun) /* the pool grows behind a start */
        reader->least_slots = reader->most_slots = (uint32_t)slots;
    reader->least_slots = slots < reader->least_slots ? (uint32_t)slots : reader->least_slots;
    reader->most_slots = slots > reader->most_slots ? (uint32_t)slots : reader->most_slots;
    return 0;
}

static int take_layer(struct trace_reader *reader, const json_t *line, struct trace_layer *ret_layer,
                      struct error *ret_error)
{
    uint64_t layer = 0;
    const json_t *lost = json_object_get(line, "lost");
    *ret_layer = (struct trace_layer){0};
    if (!get_number(json_object_get(line, "step"), INT64_MAX, &ret_layer->step) ||
        !get_number(json_object_get(line, "layer"), UINT32_MAX, &layer) ||
        (lost && !get_number(lost, INT64_MAX, &ret_layer->lost)))
        return bad_line(reader, "no step and layer", ret_error);
    const char *fault = read_uses(reader, json_object_get(line, "rows"));
    ret_layer->layer = (uint32_t)layer;
    ret_layer->count = (uint32_t)json_array_size(json_object_get(line, "rows"));
    ret_layer->uses = reader->uses;
    if (!fault)
        fault = layer_fault(&reader->header, ret_layer);
    reader->begun = true;
    return fault ? bad_line(reader, fault, ret_error) : 1;
}

int trace_next(struct trace_reader *reader, struct trace_layer *ret_layer, struct error *ret_error)
{
    size_t length = 0;
    int status;
    while ((status = read_line(reader, &length, ret_error)) > 0) {
        json_auto_t *line = json_loadb(reader->text, length, JSON_REJECT_DUPLICATES, NULL);
        bool is_layer = json_object_get(line, "step") != NULL;
        status = is_layer ? take_layer(reader, line, ret_layer, ret_error) : take_slots(reader, line, ret_error);
        if (status != 0)
            return status;
    }
    return status;
}

void trace_slots(const struct trace_reader *reader, uint32_t *ret_least, uint32_t *ret_most)
{
    *ret_least = reader->least_slots;
    *ret_most = reader->most_slots;
}

void trace_close(struct trace_reader *reader)
{
    if (!reader)
        return;
    if (reader->file)
        fclose(reader->file);
    free(reader->path);
    free(reader->text);
    free(reader->uses);
    free(reader);
}
