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
    uint64_t line;
    char *text; /* [room], the line that was read last */
    size_t room;
    struct trace_use *uses; /* [uses_room] */
    size_t uses_room;
};

static bool header_fits(const struct trace_header *header)
{
    return header->layers >= 1 && header->layers <= MODEL_MAX_LAYERS && header->experts >= 1 &&
           header->experts <= MODEL_MAX_EXPERTS;
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

int trace_create(const char *path, const struct trace_header *header, struct trace_writer **ret_writer,
                 struct error *ret_error)
{
    char identity[CHECKSUM_DIGITS + 1];
    if (!header_fits(header))
        return error_set(ret_error, EINVAL, "%s: a trace of %u layers of %u experts and %u slots", path, header->layers,
                         header->experts, header->slots);
    struct trace_writer *writer = calloc(1, sizeof *writer);
    if (!writer || !(writer->path = strdup(path))) {
        free(writer);
        return error_set(ret_error, ENOMEM, "%s: out of memory", path);
    }
    writer->header = *header;
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd < 0 || !(writer->file = fdopen(fd, "w"))) {
        int code = errno;
        if (fd >= 0)
            close(fd);
        free_writer(writer);
        return error_set(ret_error, code, "%s: cannot make the trace: %s%s", path, strerror(code),
                         code == EEXIST ? "; choose another name or remove it" : "");
    }
    checksum_format(header->identity, identity);
    int status =
        write_line(writer,
                   json_pack("{si ss si si si}", "trace", TRACE_FORMAT, "model", identity, "layers",
                             (int)header->layers, "experts", (int)header->experts, "slots", (int)header->slots),
                   ret_error);
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

int trace_finish(struct trace_writer *writer, struct error *ret_error)
{
    int status = 0;
    if (!writer)
        return 0;
    errno = 0;
    if (fclose(writer->file)) {
        status = error_set(ret_error, errno, "%s: cannot write: %s", writer->path, strerror(errno));
        unlink(writer->path);
    }
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
        return error_set(ret_error, EBADMSG, "%s: line %" PRIu64 " is cut off; remove it and try again", reader->path,
                         reader->line);
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

static int read_header(struct trace_reader *reader, struct error *ret_error)
{
    size_t length = 0;
    uint64_t format = 0, layers = 0, experts = 0, slots = 0;
    int status = read_line(reader, &length, ret_error);
    if (status < 0)
        return status;
    json_auto_t *line = json_loadb(reader->text, length, JSON_REJECT_DUPLICATES, NULL);
    if (!get_number(json_object_get(line, "trace"), UINT32_MAX, &format))
        return error_set(ret_error, EBADMSG, "%s: not a trace of `calypte trace` (a compressed one: zcat FILE | ...)",
                         reader->path);
    if (format != TRACE_FORMAT)
        return error_set(ret_error, EBADMSG, "%s: a trace of format %" PRIu64 ", this program reads %d", reader->path,
                         format, TRACE_FORMAT);
    if (checksum_parse(json_object_get(line, "model"), &reader->header.identity) < 0 ||
        !get_number(json_object_get(line, "layers"), MODEL_MAX_LAYERS, &layers) ||
        !get_number(json_object_get(line, "experts"), MODEL_MAX_EXPERTS, &experts) ||
        !get_number(json_object_get(line, "slots"), INT32_MAX, &slots))
        return bad_line(reader, "no model, or one out of range", ret_error);
    reader->header.layers = (uint32_t)layers;
    reader->header.experts = (uint32_t)experts;
    reader->header.slots = (uint32_t)slots;
    return header_fits(&reader->header) ? 0 : bad_line(reader, "no model, or one out of range", ret_error);
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

int trace_next(struct trace_reader *reader, struct trace_layer *ret_layer, struct error *ret_error)
{
    size_t length = 0;
    uint64_t layer = 0;
    int status = read_line(reader, &length, ret_error);
    if (status <= 0)
        return status;
    json_auto_t *line = json_loadb(reader->text, length, JSON_REJECT_DUPLICATES, NULL);
    *ret_layer = (struct trace_layer){0};
    const json_t *lost = json_object_get(line, "lost");
    if (!line || !get_number(json_object_get(line, "step"), INT64_MAX, &ret_layer->step) ||
        !get_number(json_object_get(line, "layer"), UINT32_MAX, &layer) ||
        (lost && !get_number(lost, INT64_MAX, &ret_layer->lost)))
        return bad_line(reader, "no step and layer", ret_error);
    const char *fault = read_uses(reader, json_object_get(line, "rows"));
    ret_layer->layer = (uint32_t)layer;
    ret_layer->count = (uint32_t)json_array_size(json_object_get(line, "rows"));
    ret_layer->uses = reader->uses;
    if (!fault)
        fault = layer_fault(&reader->header, ret_layer);
    return fault ? bad_line(reader, fault, ret_error) : 1;
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
