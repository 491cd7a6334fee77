/* The way of a text: added tokens (added_tokens.c) -> NFC (normalizer.c) -> normalized added tokens -> words
 * (pretokenizer.c, split_pattern.c) -> ids (bpe.c, vocabulary.c). tokenizer_load.c reads the file. */
#include "cmd/front/tokenizer.h"

#include <stdlib.h>
#include <string.h>

#include "cmd/front/buffer.h"
#include "cmd/front/normalizer.h"
#include "cmd/front/tokenizer_internal.h"
#include "cmd/front/utf8.h"
#include "proto/cleanup.h"

#define MAX_TEXT ((size_t)1 << 30)

struct encoding {
    const struct tokenizer *tokenizer;
    bool plain;
    int32_t *ids;
    size_t count, capacity;
    struct bpe_scratch scratch;
};

static int reserve_ids(struct encoding *encoding, size_t more, struct error *ret_error)
{
    if (more <= encoding->capacity - encoding->count)
        return 0;
    size_t capacity = encoding->count + more + encoding->capacity / 2 + 64;
    int32_t *ids = reallocarray(encoding->ids, capacity, sizeof *ids);
    if (!ids)
        return error_set(ret_error, ENOMEM, "out of memory for %zu tokens", capacity);
    encoding->ids = ids;
    encoding->capacity = capacity;
    return 0;
}

/* In plain text no added token may come out, not even where the model's own vocabulary spells one. */
static bool is_forged(const struct encoding *encoding, int32_t id)
{
    uint32_t flags = encoding->tokenizer->vocabulary.tokens[id].flags;

    return encoding->plain && (flags & TOKEN_ADDED) && !(flags & TOKEN_BLANK);
}

static int encode_word(void *context, const char *word, size_t length, struct error *ret_error)
{
    struct encoding *encoding = context;
    const struct tokenizer *tokenizer = encoding->tokenizer;
    size_t count = 0;

    if (reserve_ids(encoding, length, ret_error) < 0)
        return -ENOMEM;
    int32_t *ids = encoding->ids + encoding->count;
    if (tokenizer->ignore_merges) {
        int32_t id = vocabulary_find(&tokenizer->vocabulary, word, length);
        if (id >= 0 && !is_forged(encoding, id)) {
            ids[0] = id;
            encoding->count++;
            return 0;
        }
    }
    if (bpe_encode(&tokenizer->bpe, &tokenizer->vocabulary, &encoding->scratch, word, length, ids, &count) < 0)
        return error_set(ret_error, ENOMEM, "out of memory for a word of %zu bytes", length);
    bool forged = false;
    for (size_t i = 0; i < count && encoding->plain; i++)
        forged |= is_forged(encoding, ids[i]);
    if (forged) { /* spelt byte by byte the text is the same, and the token is not */
        count = 0;
        for (size_t i = 0; i < length; i++) {
            int32_t id = tokenizer->vocabulary.byte_ids[(unsigned char)word[i]];
            if (id >= 0 && !is_forged(encoding, id))
                ids[count++] = id;
        }
    }
    encoding->count += count;
    return 0;
}

static int encode_normalized_piece(void *context, const struct added_token *token, const char *text, size_t length,
                                   struct error *ret_error)
{
    struct encoding *encoding = context;

    if (!token)
        return pretokenizer_run(&encoding->tokenizer->pretokenizer, text, length, encode_word, encoding, ret_error);
    if (reserve_ids(encoding, 1, ret_error) < 0)
        return -ENOMEM;
    encoding->ids[encoding->count++] = token->id;
    return 0;
}

static int encode_raw_piece(void *context, const struct added_token *token, const char *text, size_t length,
                            struct error *ret_error)
{
    struct encoding *encoding = context;
    const struct tokenizer *tokenizer = encoding->tokenizer;
    _cleanup_(buffer_free) struct buffer normalized = {0};

    if (token)
        return encode_normalized_piece(encoding, token, text, length, ret_error);
    if (tokenizer->nfc) {
        if (normalizer_nfc(text, length, &normalized) < 0)
            return error_set(ret_error, ENOMEM, "out of memory for %zu bytes of text", length);
        text = normalized.bytes;
        length = normalized.length;
    }
    return added_tokens_split(&tokenizer->added, true, encoding->plain, text, length, encode_normalized_piece, encoding,
                              ret_error);
}

static int encode(const struct tokenizer *tokenizer, const char *text, size_t length, bool plain, int32_t **ret_ids,
                  size_t *ret_count, struct error *ret_error)
{
    struct encoding encoding = {.tokenizer = tokenizer, .plain = plain};
    size_t offset;

    if (length > MAX_TEXT)
        return error_set(ret_error, E2BIG, "the text has %zu bytes, more than %zu: split it", length, MAX_TEXT);
    if (!utf8_valid(text, length, &offset))
        return error_set(ret_error, EILSEQ, "the text is not UTF-8 at byte %zu", offset);
    int status = reserve_ids(&encoding, 1, ret_error); /* so that no ids are an array too */
    if (status == 0)
        status =
            added_tokens_split(&tokenizer->added, false, plain, text, length, encode_raw_piece, &encoding, ret_error);
    bpe_scratch_free(&encoding.scratch);
    if (status < 0) {
        free(encoding.ids);
        return status;
    }
    *ret_ids = encoding.ids;
    *ret_count = encoding.count;
    return 0;
}

int tokenizer_encode(const struct tokenizer *tokenizer, const char *text, size_t length, int32_t **ret_ids,
                     size_t *ret_count, struct error *ret_error)
{
    return encode(tokenizer, text, length, false, ret_ids, ret_count, ret_error);
}

int tokenizer_encode_plain(const struct tokenizer *tokenizer, const char *text, size_t length, int32_t **ret_ids,
                           size_t *ret_count, struct error *ret_error)
{
    return encode(tokenizer, text, length, true, ret_ids, ret_count, ret_error);
}

static const struct token *find_token(const struct tokenizer *tokenizer, int32_t id)
{
    if (id < 0 || (size_t)id >= tokenizer->vocabulary.size || !(tokenizer->vocabulary.tokens[id].flags & TOKEN_PRESENT))
        return NULL;
    return &tokenizer->vocabulary.tokens[id];
}

const char *tokenizer_token_bytes(const struct tokenizer *tokenizer, int32_t id, size_t *ret_length)
{
    const struct token *token = find_token(tokenizer, id);

    if (!token)
        return NULL;
    *ret_length = token->length;
    return tokenizer->vocabulary.arena + token->offset;
}

/* Puts `bytes` behind `out`, with U+FFFD where they are not UTF-8. */
static int append_lossy(struct buffer *out, const char *bytes, size_t length)
{
    size_t step;

    for (size_t at = 0; at < length; at += step) {
        bool valid = utf8_step(bytes + at, length - at, &step) == UTF8_VALID;
        if (buffer_append(out, valid ? bytes + at : UTF8_REPLACEMENT, valid ? step : sizeof UTF8_REPLACEMENT - 1) < 0)
            return -ENOMEM;
    }
    return 0;
}

int tokenizer_decode(const struct tokenizer *tokenizer, const int32_t *ids, size_t count, bool skip_special,
                     char **ret_text, size_t *ret_length, struct error *ret_error)
{
    _cleanup_(buffer_free) struct buffer bytes = {0}, text = {0};

    for (size_t i = 0; i < count; i++) {
        const struct token *token = find_token(tokenizer, ids[i]);
        if (!token)
            return error_set(ret_error, EINVAL, "id %d (number %zu) has no token: ids are below %zu", (int)ids[i], i,
                             tokenizer->vocabulary.size);
        if (skip_special && (token->flags & TOKEN_SPECIAL))
            continue;
        if (buffer_append(&bytes, tokenizer->vocabulary.arena + token->offset, token->length) < 0)
            return error_set(ret_error, ENOMEM, "out of memory for the text of %zu tokens", count);
    }
    if (append_lossy(&text, bytes.bytes, bytes.length) < 0 || buffer_append(&text, "", 1) < 0)
        return error_set(ret_error, ENOMEM, "out of memory for the text of %zu tokens", count);
    *ret_length = text.length - 1;
    *ret_text = take_pointer(text.bytes);
    return 0;
}

int32_t tokenizer_id(const struct tokenizer *tokenizer, const char *content)
{
    const struct added_token *token = added_tokens_find(&tokenizer->added, content);

    return token ? token->id : -ENOENT;
}

bool tokenizer_is_special(const struct tokenizer *tokenizer, int32_t id)
{
    const struct token *token = find_token(tokenizer, id);

    return token && (token->flags & TOKEN_SPECIAL);
}

size_t tokenizer_size(const struct tokenizer *tokenizer)
{
    return tokenizer->vocabulary.size;
}

int tokenizer_allowed(const struct tokenizer *tokenizer, size_t vocab, uint64_t **ret_allowed, struct error *ret_error)
{
    uint64_t *allowed = calloc(vocab / 64 + 1, sizeof *allowed);

    if (!allowed)
        return error_set(ret_error, ENOMEM, "out of memory for a bitmap of %zu ids", vocab);
    for (size_t id = 0; id < vocab && id < tokenizer->vocabulary.size; id++)
        if (tokenizer->vocabulary.tokens[id].flags & TOKEN_PRESENT)
            allowed[id / 64] |= UINT64_C(1) << id % 64;
    *ret_allowed = allowed;
    return 0;
}

void tokenizer_close(struct tokenizer *tokenizer)
{
    if (!tokenizer)
        return;
    vocabulary_free(&tokenizer->vocabulary);
    bpe_free(&tokenizer->bpe);
    added_tokens_free(&tokenizer->added);
    pretokenizer_free(&tokenizer->pretokenizer);
    free(tokenizer);
}
