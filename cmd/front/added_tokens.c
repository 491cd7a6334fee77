#include "cmd/front/added_tokens.h"

#include <stdlib.h>
#include <string.h>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <utf8proc.h>

#include "cmd/front/utf8.h"

/* \w of Rust's regex, by which Hugging Face tokenizers judge single_word. */
#define WORD_PATTERN "[\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}\\p{Join_Control}]"

size_t white_space(const char *text, size_t length)
{
    utf8proc_int32_t c;
    utf8proc_ssize_t size = utf8proc_iterate((const utf8proc_uint8_t *)text, (utf8proc_ssize_t)length, &c);

    if (size <= 0)
        return 0;
    bool space = (c >= 0x9 && c <= 0xD) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
                 (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
                 c == 0x3000;
    return space ? (size_t)size : 0;
}

/* The beginning of the character that ends at `end` > 0. */
static size_t character_before(const char *text, size_t end)
{
    size_t start = end - 1;

    while (start > 0 && ((unsigned char)text[start] & 0xC0) == 0x80)
        start--;
    return start;
}

static int compare(const void *a, const void *b)
{
    const struct added_token *x = a, *y = b;

    if (x->match[0] != y->match[0])
        return (unsigned char)x->match[0] < (unsigned char)y->match[0] ? -1 : 1;
    if (x->length != y->length)
        return x->length > y->length ? -1 : 1;
    return memcmp(x->match, y->match, x->length);
}

int added_tokens_index(struct added_tokens *added, struct error *ret_error)
{
    bool single_word = false;
    size_t at = 0;

    if (added->count > 0)
        qsort(added->tokens, added->count, sizeof *added->tokens, compare);
    for (size_t i = 0; i < added->count; i++) {
        single_word |= added->tokens[i].single_word;
        if (i > 0 && compare(&added->tokens[i - 1], &added->tokens[i]) == 0)
            return error_set(ret_error, EINVAL, "added_tokens: \"%s\" is there twice",
                             utf8_quoted(added->tokens[i].content).text);
    }
    for (size_t byte = 0; byte <= 256; byte++) {
        while (at < added->count && (unsigned char)added->tokens[at].match[0] < byte)
            at++;
        added->first[byte] = at;
    }
    if (single_word) {
        int code;
        PCRE2_SIZE offset;
        added->word =
            pcre2_compile((PCRE2_SPTR)WORD_PATTERN, PCRE2_ZERO_TERMINATED, PCRE2_UTF | PCRE2_UCP, &code, &offset, NULL);
        if (!added->word)
            return error_set(ret_error, ENOMEM, "out of memory");
    }
    return 0;
}

void added_tokens_free(struct added_tokens *added)
{
    for (size_t i = 0; i < added->count; i++) {
        free(added->tokens[i].content);
        free(added->tokens[i].match);
    }
    free(added->tokens);
    pcre2_code_free(added->word);
}

const struct added_token *added_tokens_find(const struct added_tokens *added, const char *content)
{
    for (size_t i = 0; i < added->count; i++)
        if (strcmp(added->tokens[i].content, content) == 0)
            return &added->tokens[i];
    return NULL;
}

static bool is_word_character(const struct added_tokens *added, const char *text, size_t length)
{
    pcre2_match_data *match_data = pcre2_match_data_create(1, NULL);
    int found = match_data ? pcre2_match(added->word, (PCRE2_SPTR)text, length, 0, PCRE2_NO_UTF_CHECK | PCRE2_ANCHORED,
                                         match_data, NULL)
                           : PCRE2_ERROR_NOMEMORY;

    pcre2_match_data_free(match_data);
    return found >= 0;
}

/* True when a word character touches text[start .. end]. */
static bool inside_word(const struct added_tokens *added, const char *text, size_t length, size_t start, size_t end)
{
    if (start > 0) {
        size_t before = character_before(text, start);
        if (is_word_character(added, text + before, start - before))
            return true;
    }
    return end < length && is_word_character(added, text + end, length - end);
}

static const struct added_token *match_at(const struct added_tokens *added, bool normalized, bool plain,
                                          const char *text, size_t length)
{
    size_t byte = (unsigned char)text[0];

    for (size_t i = added->first[byte]; i < added->first[byte + 1]; i++) {
        const struct added_token *token = &added->tokens[i];
        if (token->normalized == normalized && (!plain || token->blank) && token->length <= length &&
            memcmp(token->match, text, token->length) == 0)
            return token;
    }
    return NULL;
}

int added_tokens_split(const struct added_tokens *added, bool normalized, bool plain, const char *text, size_t length,
                       added_tokens_piece_fn *piece, void *context, struct error *ret_error)
{
    size_t done = 0, step;
    int status;

    for (size_t at = 0; at < length; at += step) {
        const struct added_token *token = match_at(added, normalized, plain, text + at, length - at);
        if (!token) {
            step = 1;
            continue;
        }
        step = token->length;
        size_t start = at, end = at + step, space;
        if (token->single_word && inside_word(added, text, length, start, end))
            continue;
        while (token->lstrip && start > done) {
            size_t before = character_before(text, start);
            if (white_space(text + before, start - before) == 0)
                break;
            start = before;
        }
        while (token->rstrip && end < length && (space = white_space(text + end, length - end)) > 0)
            end += space;
        if (token->lstrip && done >= end) /* the token before has taken all of it as its white space */
            continue;
        if (start > done && (status = piece(context, NULL, text + done, start - done, ret_error)) < 0)
            return status;
        if ((status = piece(context, token, text + at, step, ret_error)) < 0)
            return status;
        done = end;
    }
    return done < length ? piece(context, NULL, text + done, length - done, ret_error) : 0;
}
