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
#include "proto/cleanup.h"
#include "proto/error.h"

#define MAX_STDIN ((size_t)1 << 30)

/* What both commands share; they differ in `convert`: one JSON value in, one out ({"ids": ...} or {"text": ...}). */
struct command {
    const char *name, *help, *operand;
    bool skip_special_possible;
    int (*convert)(const struct command *command, const struct tokenizer *tokenizer, const json_t *input,
                   json_t **ret_output, struct error *ret_error);
    json_t *(*parse)(const char *text, size_t length, struct error *ret_error); /* plain input to the same JSON value */
    void (*print)(const json_t *output);

    bool json, skip_special; /* from the flags */
    const char *model, *json_lines, **operands;
    size_t operand_count;
};

static int fail(const struct command *command, const char *message)
{
    fprintf(stderr, "calypte %s: %s\n", command->name, message);
    return EXIT_FAILED;
}

/* -- conversions -- */

static int text_to_ids(const struct command *command, const struct tokenizer *tokenizer, const json_t *input,
                       json_t **ret_output, struct error *ret_error)
{
    _cleanup_free_ int32_t *ids = NULL;
    size_t count = 0;

    (void)command;
    if (!json_is_string(input))
        return error_set(ret_error, EINVAL, "not a JSON string");
    int status = tokenizer_encode(tokenizer, json_string_value(input), json_string_length(input), &ids, &count, ret_error);
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
    json_t *string = json_stringn(text, length);

    if (!string)
        error_set(ret_error, EILSEQ, "the text is not UTF-8");
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

    json_array_foreach(json_object_get(output, "ids"), index, id)
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
        return fail(command, error.text);
    input = command->parse(text.bytes, text.length, &error);
    if (!input || command->convert(command, tokenizer, input, &output, &error) < 0)
        return fail(command, error.text);
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

    if (!from_stdin && !file) {
        error_set(&error, errno, "%s: %s", command->json_lines, strerror(errno));
        return fail(command, error.text);
    }
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
        }
        print_json(output);
    }
    return wrong ? EXIT_FAILED : EXIT_DONE;
}

/* -- arguments -- */

/* Returns -1 to go on, or an exit code. */
static int parse_arguments(struct command *command, int argc, char **argv)
{
    static const char *const flags[] = {"--json", "--json-lines", "--help", "--skip-special"};
    size_t flag_count = command->skip_special_possible ? 4 : 3;
    bool flags_end = false;

    for (int i = 1; i < argc; i++) {
        const char *argument = argv[i];
        if (flags_end || argument[0] != '-' || strcmp(argument, "-") == 0) {
            if (!command->model)
                command->model = argument;
            else
                command->operands[command->operand_count++] = argument;
        } else if (strcmp(argument, "--") == 0) {
            flags_end = true;
        } else if (strcmp(argument, "--help") == 0 || strcmp(argument, "-h") == 0) {
            fputs(command->help, stdout);
            return EXIT_DONE;
        } else if (strcmp(argument, "--json") == 0) {
            command->json = true;
        } else if (strcmp(argument, "--skip-special") == 0 && command->skip_special_possible) {
            command->skip_special = true;
        } else if (strcmp(argument, "--json-lines") == 0) {
            if (i + 1 == argc)
                return usage_error(command->name, "--json-lines needs a file, or - for stdin");
            command->json_lines = argv[++i];
        } else if (strncmp(argument, "--json-lines=", 13) == 0) {
            command->json_lines = argument + 13;
        } else {
            return usage_unknown_flag(command->name, argument, flags, flag_count);
        }
    }
    if (!command->model)
        return usage_error(command->name, "MODEL is missing: a container, a model folder or a tokenizer.json");
    if (command->json_lines && command->operand_count > 0)
        return usage_error(command->name, "--json-lines reads its input from %s, so there can be no %s", command->json_lines,
                           command->operand);
    return -1;
}

static int run(struct command *command, int argc, char **argv)
{
    _cleanup_(tokenizer_closep) struct tokenizer *tokenizer = NULL;
    _cleanup_free_ const char **operands = calloc((size_t)argc + 1, sizeof *operands);
    struct error error;

    if (!operands)
        return fail(command, "out of memory");
    command->operands = operands;
    int code = parse_arguments(command, argc, argv);
    if (code >= 0)
        return code;
    /* "-" is stdin, as no operand at all is */
    if (command->operand_count == 1 && strcmp(operands[0], "-") == 0)
        command->operand_count = 0;
    if (tokenizer_open(command->model, &tokenizer, &error) < 0)
        return fail(command, error.text);
    code = command->json_lines ? run_lines(command, tokenizer) : run_once(command, tokenizer);
    if (fflush(stdout) != 0 || ferror(stdout))
        return fail(command, "cannot write to stdout");
    return code;
}

int cmd_tokenize(int argc, char **argv)
{
    struct command command = {
        .name = "tokenize",
        .operand = "TEXT",
        .help = "Usage: calypte tokenize MODEL [TEXT]\n"
                "The token ids of a text. MODEL is a container, a Hugging Face folder or a tokenizer.json; without TEXT,\n"
                "or with -, the text is read from stdin as it is. Added tokens such as <|user|> are one id each.\n\n"
                "  --json             print {\"ids\":[...]}\n"
                "  --json-lines FILE  read one JSON string a line (- is stdin), answer {\"ids\":[...]} a line\n"
                "  --help             print this\n",
        .convert = text_to_ids,
        .parse = parse_text,
        .print = print_ids,
    };

    return run(&command, argc, argv);
}

int cmd_detokenize(int argc, char **argv)
{
    struct command command = {
        .name = "detokenize",
        .operand = "ID",
        .help = "Usage: calypte detokenize MODEL [ID...]\n"
                "The text of token ids. MODEL is a container, a Hugging Face folder or a tokenizer.json; without ids, or\n"
                "with -, they are read from stdin, separated by white space or commas.\n\n"
                "  --json             print {\"text\":\"...\"}\n"
                "  --json-lines FILE  read one JSON array of ids a line (- is stdin), answer {\"text\":\"...\"} a line\n"
                "  --skip-special     leave out special tokens such as <|endoftext|>\n"
                "  --help             print this\n",
        .skip_special_possible = true,
        .convert = ids_to_text,
        .parse = parse_ids,
        .print = print_text,
    };

    return run(&command, argc, argv);
}
