#include "cmd/front/text_stream.h"

#include <string.h>

#include "cmd/front/buffer.h"
#include "cmd/front/utf8.h"
#include "proto/cleanup.h"

/* Knuth, Morris and Pratt 1977: how many bytes of the stop string end the text so far. */
struct stop {
    char *text;
    size_t length;
    size_t *borders; /* [length]: the longest proper prefix of text[0 .. i] that also ends it */
    size_t matched;  /* below length */
};

struct text_stream {
    struct stop stops[TEXT_STREAM_MAX_STOPS];
    size_t stop_count;
    char character[4]; /* the bytes of a character that is not whole yet */
    size_t character_length;
    struct buffer text; /* `shown` bytes were given out by the last call; the rest is held back */
    size_t shown;
    bool stopped;
};

static int stop_init(struct stop *stop, const char *text)
{
    stop->length = strlen(text);
    stop->text = strdup(text);
    stop->borders = calloc(stop->length, sizeof *stop->borders);
    if (!stop->text || !stop->borders)
        return -ENOMEM;
    for (size_t i = 1, border = 0; i < stop->length; i++) {
        while (border > 0 && text[i] != text[border])
            border = stop->borders[border - 1];
        border += text[i] == text[border];
        stop->borders[i] = border;
    }
    return 0;
}

/* True when `byte` completes the stop string. */
static bool stop_step(struct stop *stop, char byte)
{
    while (stop->matched > 0 && stop->text[stop->matched] != byte)
        stop->matched = stop->borders[stop->matched - 1];
    stop->matched += stop->text[stop->matched] == byte;
    return stop->matched == stop->length;
}

int text_stream_new(const char *const *stops, size_t stop_count, struct text_stream **ret_stream,
                    struct error *ret_error)
{
    _cleanup_(text_stream_freep) struct text_stream *stream = NULL;

    if (stop_count > TEXT_STREAM_MAX_STOPS)
        return error_set(ret_error, EINVAL, "stop: %zu strings, at most %d are possible", stop_count,
                         TEXT_STREAM_MAX_STOPS);
    stream = calloc(1, sizeof *stream);
    if (!stream)
        return error_set(ret_error, ENOMEM, "out of memory");
    for (size_t i = 0; i < stop_count; i++) {
        size_t length = strnlen(stops[i], TEXT_STREAM_MAX_STOP_LENGTH + 1);
        if (length == 0 || length > TEXT_STREAM_MAX_STOP_LENGTH)
            return error_set(ret_error, EINVAL, "stop: string %zu must have from 1 to %d bytes", i,
                             TEXT_STREAM_MAX_STOP_LENGTH);
        if (!utf8_valid(stops[i], length, NULL))
            return error_set(ret_error, EINVAL, "stop: string %zu is not UTF-8", i);
        if (stop_init(&stream->stops[stream->stop_count++], stops[i]) < 0)
            return error_set(ret_error, ENOMEM, "out of memory");
    }
    *ret_stream = take_pointer(stream);
    return 0;
}

void text_stream_free(struct text_stream *stream)
{
    if (!stream)
        return;
    for (size_t i = 0; i < stream->stop_count; i++) {
        free(stream->stops[i].text);
        free(stream->stops[i].borders);
    }
    buffer_free(&stream->text);
    free(stream);
}

/* Takes one whole character and looks for stop strings that end with it. */
static int take_character(struct text_stream *stream, const char *bytes, size_t length)
{
    size_t longest = 0;

    if (buffer_append(&stream->text, bytes, length) < 0)
        return -ENOMEM;
    for (size_t s = 0; s < stream->stop_count; s++) {
        bool complete = false;
        for (size_t i = 0; i < length; i++) /* a stop string is whole characters: it completes with the last byte */
            complete = stop_step(&stream->stops[s], bytes[i]);
        if (complete && stream->stops[s].length > longest)
            longest = stream->stops[s].length;
    }
    if (longest > 0) {
        stream->text.length -= longest;
        stream->stopped = true;
    }
    return 0;
}

/* Forgets what the last call gave out. */
static void drop_shown(struct text_stream *stream)
{
    stream->text.length -= stream->shown;
    if (stream->shown > 0)
        memmove(stream->text.bytes, stream->text.bytes + stream->shown, stream->text.length);
    stream->shown = 0;
}

static int give_out(struct text_stream *stream, bool finish, const char **ret_text, size_t *ret_length)
{
    size_t held = 0;

    for (size_t s = 0; s < stream->stop_count && !stream->stopped && !finish; s++)
        if (stream->stops[s].matched > held)
            held = stream->stops[s].matched;
    stream->shown = stream->text.length - held;
    *ret_text = stream->text.bytes ? stream->text.bytes : "";
    *ret_length = stream->shown;
    return stream->stopped ? 1 : 0;
}

int text_stream_feed(struct text_stream *stream, const char *bytes, size_t length, const char **ret_text,
                     size_t *ret_length, struct error *ret_error)
{
    drop_shown(stream);
    for (size_t at = 0; at < length && !stream->stopped;) {
        size_t step;
        stream->character[stream->character_length++] = bytes[at++];
        /* A byte that does not continue the character ends it as an invalid one, and may itself begin the next. */
        enum utf8_status status = utf8_step(stream->character, stream->character_length, &step);
        if (status == UTF8_INCOMPLETE)
            continue;
        bool valid = status == UTF8_VALID;
        if (!valid && step < stream->character_length)
            at--;
        stream->character_length = 0;
        if (take_character(stream, valid ? stream->character : UTF8_REPLACEMENT,
                           valid ? step : sizeof UTF8_REPLACEMENT - 1) < 0)
            return error_set(ret_error, ENOMEM, "out of memory for the text of the answer");
    }
    return give_out(stream, false, ret_text, ret_length);
}

int text_stream_finish(struct text_stream *stream, const char **ret_text, size_t *ret_length, struct error *ret_error)
{
    drop_shown(stream);
    if (stream->character_length > 0 && !stream->stopped) {
        stream->character_length = 0;
        if (take_character(stream, UTF8_REPLACEMENT, sizeof UTF8_REPLACEMENT - 1) < 0)
            return error_set(ret_error, ENOMEM, "out of memory for the text of the answer");
    }
    return give_out(stream, true, ret_text, ret_length);
}
