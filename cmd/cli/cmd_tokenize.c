/* calypte tokenize and detokenize: text to ids and back, for one text or for a stream of JSON lines. */
#include <errno.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "cmd/cli/commands.h"
#include "cmd/cli/usage.h"
#include "cmd/front/buffer.h"
#include "cmd/front/tokenizer.h"
#include "cmd/front/utf8.h"
#include "proto/cleanup.h"
#include "proto/error.h"

#define MAX_STDIN ((size_t)1 << 30)

enum { FLAG_JSON, FLAG_JSON_LINES, FLAG_SKIP_SPECIAL };

/* What both commands share; they differ in `convert`: one JSON value in, one out ({"ids": ...} or {"text": ...}). */
struct command {
    int (*convert)(const struct command *command, const struct tokenizer *tokenizer, const json_t *input,
                   json_t **ret_output, struct error *ret_error);
    json_t *(*parse)(const char *text, size_t length, struct error *ret_error); /* plain input to the same JSON value */
    void (*print)(const json_t *output);

    const char *name; /* from here on: from the command line */
    bool json, skip_special;
    const char *json_lines;
    const char *const *operands;
    size_t operand_count;
};

/* -- conversions -- */

static int text_to_ids(const struct command *command, const struct tokenizer *tokenizer, const json_t *input,
                       json_t **ret_output, struct error *ret_error)
{
    _cleanup_free_ int32_t *ids = NULL;
    size_t count = 0;

    (void)command;
    if (!json_is_string(input))
        return error_set(ret_error, EINVAL, "not a JSON string");
    int status =
        tokenizer_encode(tokenizer, json_string_value(input), json_string_length(input), &ids, &count, ret_error);
    if (status < 0)
        return status;
    json_t *array = json_array();
    for (size_t i = 0; i < count; i++)
        json_array_append_new(array, json_integer(ids[i]));
    *ret_output = json_pack("{s:o}", "ids", array);
    return *ret_output ? 0 : error_set(ret_error, ENOMEM, "out of memory");
}

static int ids_to_text(const struct command *command, const struct tokenizer *tokenizer, const json_t *input,
                       json_t **ret_output, struct error *ret_error)
{
    _cleanup_free_ int32_t *ids = NULL;
    _cleanup_free_ char *text = NULL;
    size_t count = json_array_size(input), length;

    if (!json_is_array(input))
        return error_set(ret_error, EINVAL, "not a JSON array of ids");
    ids = reallocarray(NULL, count + 1, sizeof *ids);
    if (!ids)
        return error_set(ret_error, ENOMEM, "out of memory");
    for (size_t i = 0; i < count; i++) {
        const json_t *id = json_array_get(input, i);
        if (!json_is_integer(id) || json_integer_value(id) < 0 || json_integer_value(id) > INT32_MAX)
            return error_set(ret_error, EINVAL, "item %zu is not an id", i);
        ids[i] = (int32_t)json_integer_value(id);
    }
    int status = tokenizer_decode(tokenizer, ids, count, command->skip_special, &text, &length, ret_error);
    if (status < 0)
        return status;
    *ret_output = json_pack("{s:s%}", "text", text, length);
    return *ret_output ? 0 : error_set(ret_error, ENOMEM, "out of memory");
}

/* -- plain input and output -- */

static json_t *parse_text(const char *text, size_t length, struct error *ret_error)
{
    size_t offset;

    if (!utf8_valid(text, length, &offset)) {
        error_set(ret_error, EILSEQ, "the text is not UTF-8 at byte %zu", offset);
        return NULL;
    }
    json_t *string = json_stringn(text, length);
    if (!string)
        error_set(ret_error, ENOMEM, "out of memory");
    return string;
}

/* Decimal ids separated by white space or commas, with or without the brackets of a JSON array. */
static json_t *parse_ids(const char *text, size_t length, struct error *ret_error)
{
    _cleanup_(json_decrefp) json_t *array = json_array();

    for (size_t at = 0; at < length;) {
        if (text[at] == 0 || strchr(" \t\r\n,[]", text[at])) {
            if (text[at++] == 0)
                break;
            continue;
        }
        char *end;
        errno = 0;
        long id = strtol(text + at, &end, 10);
        if (errno || end == text + at || id < 0 || id > INT32_MAX || (*end && !strchr(" \t\r\n,[]", *end))) {
            error_set(ret_error, EINVAL, "\"%.*s\" is not an id", (int)strcspn(text + at, " \t\r\n,[]"), text + at);
            return NULL;
        }
        json_array_append_new(array, json_integer(id));
        at = (size_t)(end - text);
    }
    return take_pointer(array);
}

static void print_ids(const json_t *output)
{
    size_t index;
    json_t *id;

    json_array_foreach (json_object_get(output, "ids"), index, id)
        printf(index ? " %" JSON_INTEGER_FORMAT : "%" JSON_INTEGER_FORMAT, json_integer_value(id));
    putchar('\n');
}

static void print_text(const json_t *output)
{
    const json_t *text = json_object_get(output, "text");

    fwrite(json_string_value(text), 1, json_string_length(text), stdout);
    putchar('\n');
}

static void print_json(const json_t *output)
{
    json_dumpf(output, stdout, JSON_COMPACT);
    putchar('\n');
}

/* -- input -- */

static int read_stream(FILE *stream, struct buffer *out, struct error *ret_error)
{
    for (size_t got = 1; got > 0; out->length += got) {
        if (out->length > MAX_STDIN)
            return error_set(ret_error, E2BIG, "stdin: more than 1 GiB");
        if (buffer_reserve(out, 65536) < 0)
            return error_set(ret_error, ENOMEM, "out of memory");
        got = fread(out->bytes + out->length, 1, 65535, stream);
    }
    if (ferror(stream))
        return error_set(ret_error, EIO, "stdin: %s", strerror(errno));
    out->bytes[out->length] = 0;
    return 0;
}

/* The operands, joined by spaces; without any, all of stdin. */
static int read_operands(const struct command *command, struct buffer *out, struct error *ret_error)
{
    if (command->operand_count == 0)
        return read_stream(stdin, out, ret_error);
    for (size_t i = 0; i < command->operand_count; i++)
        if ((i > 0 && buffer_append(out, " ", 1) < 0) ||
            buffer_append(out, command->operands[i], strlen(command->operands[i])) < 0)
            return error_set(ret_error, ENOMEM, "out of memory");
    return buffer_append(out, "", 1) < 0 ? error_set(ret_error, ENOMEM, "out of memory") : (out->length--, 0);
}

static int run_once(const struct command *command, const struct tokenizer *tokenizer)
{
    _cleanup_(buffer_free) struct buffer text = {0};
    _cleanup_(json_decrefp) json_t *input = NULL, *output = NULL;
    struct error error;

    if (read_operands(command, &text, &error) < 0)
        return usage_failed(command->name, "%s", error.text);
    input = command->parse(text.bytes, text.length, &error);
    if (!input || command->convert(command, tokenizer, input, &output, &error) < 0)
        return usage_failed(command->name, "%s", error.text);
    (command->json ? print_json : command->print)(output);
    return EXIT_DONE;
}

/* One answer a line, also for a line that is wrong: {"error": ...}, so that line n answers line n. */
static int run_lines(const struct command *command, const struct tokenizer *tokenizer)
{
    bool from_stdin = strcmp(command->json_lines, "-") == 0;
    _cleanup_fclose_ FILE *file = from_stdin ? NULL : fopen(command->json_lines, "re");
    _cleanup_free_ char *line = NULL;
    size_t capacity = 0, number = 0, wrong = 0;
    struct error error;
    ssize_t length;

    if (!from_stdin && !file)
        return usage_failed(command->name, "%s: %s", command->json_lines, strerror(errno));
    while ((length = getline(&line, &capacity, from_stdin ? stdin : file)) > 0) {
        _cleanup_(json_decrefp) json_t *input = NULL, *output = NULL;
        json_error_t json_error;
        number++;
        input = json_loadb(line, (size_t)length, JSON_DECODE_ANY | JSON_ALLOW_NUL, &json_error);
        int status = input ? command->convert(command, tokenizer, input, &output, &error)
                           : error_set(&error, EINVAL, "%s", json_error.text);
        if (status < 0) {
            wrong++;
            fprintf(stderr, "calypte %s: line %zu: %s\n", command->name, number, error.text);
            output = json_pack("{s:s}", "error", error.text);
            if (!output) /* the line quotes bytes that are not UTF-8 */
                output = json_pack("{s:s}", "error", "not a line of JSON");
        }
        print_json(output);
        fflush(stdout); /* a program may wait for the answer before it writes the next line */
    }
    return wrong ? EXIT_FAILED : EXIT_DONE;
}

/* -- the commands -- */

static int run(struct command *command, const struct command_line *line, int argc, char **argv)
{
    _cleanup_(tokenizer_closep) struct tokenizer *tokenizer = NULL;
    struct arguments arguments;
    struct error error;

    int code = arguments_parse(line, argc, argv, &arguments);
    if (code != ARGUMENTS_GO_ON)
        return code;
    command->name = line->command;
    command->json = arguments.values[FLAG_JSON] != NULL;
    command->json_lines = arguments.values[FLAG_JSON_LINES];
    command->skip_special = arguments.values[FLAG_SKIP_SPECIAL] != NULL;
    command->operands = arguments.operands + 1;
    command->operand_count = arguments.operand_count - 1;
    if (command->json_lines && command->operand_count > 0)
        return usage_error(command->name, "--json-lines reads its input from %s, so \"%s\" cannot stand there too",
                           command->json_lines, command->operands[0]);
    /* "-" is stdin, as no operand at all is */
    if (command->operand_count == 1 && strcmp(command->operands[0], "-") == 0)
        command->operand_count = 0;
    if (tokenizer_open(arguments.operands[0], &tokenizer, &error) < 0)
        return usage_failed(command->name, "%s", error.text);
    code = command->json_lines ? run_lines(command, tokenizer) : run_once(command, tokenizer);
    if (fflush(stdout) != 0 || ferror(stdout))
        return usage_failed(command->name, "cannot write to standard output");
    return code;
}

int cmd_tokenize(int argc, char **argv)
{
    static const struct flag flags[] = {
        [FLAG_JSON] = {"--json", NULL, NULL, "print {\"ids\":[...]}"},
        [FLAG_JSON_LINES] = {"--json-lines", NULL, "FILE",
                             "one JSON string a line in (- is stdin), {\"ids\":[...]} a line out"},
        {.name = NULL},
    };
    static const struct command_line line = {
        .command = "tokenize",
        .operands = "MODEL [TEXT]",
        .summary = "The token ids of a text. Added tokens such as <|user|> are one id each.",
        .details = "MODEL is a container, a Hugging Face folder or a tokenizer.json. Without TEXT, or with -, the\n"
                   "text is read from stdin as it is, its last newline included.",
        .flags = flags,
        .least_operands = 1,
        .most_operands = 2,
    };
    struct command command = {.convert = text_to_ids, .parse = parse_text, .print = print_ids};

    return run(&command, &line, argc, argv);
}

int cmd_detokenize(int argc, char **argv)
{
    static const struct flag flags[] = {
        [FLAG_JSON] = {"--json", NULL, NULL, "print {\"text\":\"...\"}"},
        [FLAG_JSON_LINES] = {"--json-lines", NULL, "FILE",
                             "one array of ids a line in (- is stdin), {\"text\":\"...\"} a line out"},
        [FLAG_SKIP_SPECIAL] = {"--skip-special", NULL, NULL, "leave out special tokens such as <|endoftext|>"},
        {.name = NULL},
    };
    static const struct command_line line = {
        .command = "detokenize",
        .operands = "MODEL [ID...]",
        .summary = "The text of token ids.",
        .details = "MODEL is a container, a Hugging Face folder or a tokenizer.json. Without ids, or with -, they\n"
                   "are read from stdin, separated by white space or commas.",
        .flags = flags,
        .least_operands = 1,
        .most_operands = ARGUMENTS_MAX_OPERANDS,
    };
    struct command command = {.convert = ids_to_text, .parse = parse_ids, .print = print_text};

    return run(&command, &line, argc, argv);
}
