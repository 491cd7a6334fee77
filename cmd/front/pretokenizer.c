#include "cmd/front/pretokenizer.h"

#include <stdint.h>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "cmd/front/buffer.h"
#include "cmd/front/split_pattern.h"
#include "cmd/front/utf8.h"
#include "proto/cleanup.h"

/* A match may take this many steps for each byte of text, and some more: far above what the patterns of known
 * tokenizers need (a handful), far below a quadratic search. */
#define STEPS_PER_BYTE 64
#define STEPS_AT_LEAST 100000
#define HEAP_LIMIT_KIB (256 * 1024)

struct run {
    const struct pretokenizer *pretokenizer;
    pcre2_match_data *match_data;
    pcre2_match_context *match_context;
    pretokenizer_word_fn *word;
    void *context;
    struct error *error;
};

static void code_freep(pcre2_code **code)
{
    pcre2_code_free(*code);
}

static void compile_context_freep(pcre2_compile_context **context)
{
    pcre2_compile_context_free(*context);
}

static int compile(const char *pattern, size_t length, bool literal, pcre2_code **ret_code, struct error *ret_error)
{
    _cleanup_(compile_context_freep) pcre2_compile_context *context = pcre2_compile_context_create(NULL);
    int code;
    PCRE2_SIZE offset;

    if (!context)
        return error_set(ret_error, ENOMEM, "out of memory");
    pcre2_set_newline(context, PCRE2_NEWLINE_LF);
    *ret_code = pcre2_compile((PCRE2_SPTR)pattern, length,
                              literal ? PCRE2_UTF | PCRE2_LITERAL : PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE, &code,
                              &offset, context);
    if (!*ret_code) {
        char message[128];
        pcre2_get_error_message(code, (PCRE2_UCHAR *)message, sizeof message);
        return error_set(ret_error, EINVAL, "the pattern does not compile: %s", message);
    }
    /* Where the system forbids writable code, the interpreter does the same work. */
    (void)pcre2_jit_compile(*ret_code, PCRE2_JIT_COMPLETE);
    return 0;
}

int pretokenizer_add_split(struct pretokenizer *pretokenizer, const char *pattern, size_t length, bool literal,
                           bool remove_matches, bool remove_gaps, struct error *ret_error)
{
    _cleanup_(buffer_free) struct buffer translated = {0};
    _cleanup_(code_freep) pcre2_code *code = NULL;

    if (pretokenizer->split_count == PRETOKENIZER_MAX_SPLITS)
        return error_set(ret_error, ENOSPC, "more than %d splits are not supported", PRETOKENIZER_MAX_SPLITS);
    if (length == 0)
        return error_set(ret_error, EINVAL, "the pattern is empty");
    int status = literal ? buffer_append(&translated, pattern, length)
                         : split_pattern_translate(pattern, length, &translated, ret_error);
    if (status == 0)
        status = compile(translated.bytes, translated.length, literal, &code, ret_error);
    if (status < 0)
        return status;
    pretokenizer->splits[pretokenizer->split_count++] =
        (struct split){.code = take_pointer(code), .remove_matches = remove_matches, .remove_gaps = remove_gaps};
    return 0;
}

void pretokenizer_free(struct pretokenizer *pretokenizer)
{
    for (size_t i = 0; i < pretokenizer->split_count; i++)
        pcre2_code_free(pretokenizer->splits[i].code);
    pretokenizer->split_count = 0;
}

/* The first match at or after `start`. 1, 0 for none, or negative. */
static int match(struct run *run, const pcre2_code *code, const char *text, size_t length, size_t start,
                 size_t *ret_start, size_t *ret_end)
{
    uint64_t steps = STEPS_AT_LEAST + STEPS_PER_BYTE * (uint64_t)(length - start);
    pcre2_set_match_limit(run->match_context, steps < UINT32_MAX ? (uint32_t)steps : UINT32_MAX);

    int found =
        pcre2_match(code, (PCRE2_SPTR)text, length, start, PCRE2_NO_UTF_CHECK, run->match_data, run->match_context);
    if (found == PCRE2_ERROR_JIT_STACKLIMIT) /* compiled code has a small stack; the interpreter uses the heap */
        found = pcre2_match(code, (PCRE2_SPTR)text, length, start, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, run->match_data,
                            run->match_context);
    if (found == PCRE2_ERROR_NOMATCH)
        return 0;
    if (found == PCRE2_ERROR_NOMEMORY)
        return error_set(run->error, ENOMEM, "out of memory");
    if (found < 0)
        return error_set(run->error, E2BIG,
                         "the tokenizer's split pattern needs too many steps for this text: split it or shorten it");
    const PCRE2_SIZE *offsets = pcre2_get_ovector_pointer(run->match_data);
    *ret_start = offsets[0];
    *ret_end = offsets[1];
    return 1;
}

static int run_splits(struct run *run, size_t index, const char *text, size_t length);

/* Matches that do not overlap, from left to right; an empty match right behind a match is skipped. */
static int run_split(struct run *run, size_t index, const char *text, size_t length)
{
    const struct split *split = &run->pretokenizer->splits[index];
    size_t done = 0, from = 0, start = 0, end = 0, step;
    bool matched = false;
    int status;

    while (from <= length && (status = match(run, split->code, text, length, from, &start, &end)) != 0) {
        if (status < 0)
            return status;
        if (start == end && matched && end == done) {
            if (from >= length)
                break;
            utf8_step(text + from, length - from, &step);
            from += step;
            continue;
        }
        if (!split->remove_gaps && (status = run_splits(run, index + 1, text + done, start - done)) < 0)
            return status;
        if (!split->remove_matches && (status = run_splits(run, index + 1, text + start, end - start)) < 0)
            return status;
        done = from = end;
        matched = true;
    }
    return split->remove_gaps ? 0 : run_splits(run, index + 1, text + done, length - done);
}

static int run_splits(struct run *run, size_t index, const char *text, size_t length)
{
    _cleanup_free_ char *prefixed = NULL;

    if (length == 0)
        return 0;
    if (index == run->pretokenizer->prefix_before && text[0] != ' ') {
        prefixed = malloc(length + 1);
        if (!prefixed)
            return error_set(run->error, ENOMEM, "out of memory");
        prefixed[0] = ' ';
        memcpy(prefixed + 1, text, length++);
        text = prefixed;
    }
    if (index < run->pretokenizer->split_count)
        return run_split(run, index, text, length);
    return run->word(run->context, text, length, run->error);
}

int pretokenizer_run(const struct pretokenizer *pretokenizer, const char *text, size_t length,
                     pretokenizer_word_fn *word, void *context, struct error *ret_error)
{
    struct run run = {
        .pretokenizer = pretokenizer,
        .match_data = pcre2_match_data_create(1, NULL),
        .match_context = pcre2_match_context_create(NULL),
        .word = word,
        .context = context,
        .error = ret_error,
    };
    int status = run.match_data && run.match_context ? 0 : error_set(ret_error, ENOMEM, "out of memory");

    if (status == 0) {
        pcre2_set_heap_limit(run.match_context, HEAP_LIMIT_KIB);
        status = run_splits(&run, 0, text, length);
    }
    pcre2_match_data_free(run.match_data);
    pcre2_match_context_free(run.match_context);
    return status;
}
