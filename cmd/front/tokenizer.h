/* Text to token ids and back: the byte-level BPE of a Hugging Face tokenizer.json.
 *
 * What a file may use: model BPE (merges as pairs or as "a b", `ignore_merges`), normalizer NFC, pre-tokenizers Split
 * (Isolated or Removed) and ByteLevel, added tokens with their flags, decoder ByteLevel. Anything else is refused by
 * its name when the file is opened, because a tokenizer that is nearly right gives answers that are quietly wrong.
 *
 * An open tokenizer never changes: any number of threads may use it at once. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/error.h"

struct tokenizer;

/* Opens `path`, a tokenizer.json or a folder that holds one. The file is checked whole: types, ids, lengths,
 * duplicates, merges. Errors: -ENOENT and the like from the file system, -EINVAL for a file that is wrong, -ENOTSUP for
 * a feature that is not supported, -ENOMEM. */
int tokenizer_open(const char *path, struct tokenizer **ret_tokenizer, struct error *ret_error);
void tokenizer_close(struct tokenizer *tokenizer);

static inline void tokenizer_closep(struct tokenizer **tokenizer)
{
    tokenizer_close(*tokenizer);
}

/* Encodes `text` (UTF-8, may hold zero bytes). Added tokens are found in it before everything else, so "<|user|>"
 * becomes one id; nothing is put in front or behind. *ret_ids is for free(). Errors: -EILSEQ when the text is not
 * UTF-8, -E2BIG above 1 GiB or when a Split pattern needs unreasonably many steps for it, -ENOMEM. */
int tokenizer_encode(const struct tokenizer *tokenizer, const char *text, size_t length, int32_t **ret_ids,
                     size_t *ret_count, struct error *ret_error);

/* The same for text of strangers: no id of an added token comes out, whatever the text says, so it cannot forge the end
 * of a turn. (Added tokens of white space alone, with which some vocabularies spell indentation, are ordinary text.) */
int tokenizer_encode_plain(const struct tokenizer *tokenizer, const char *text, size_t length, int32_t **ret_ids,
                           size_t *ret_count, struct error *ret_error);

/* The text of `ids`, with U+FFFD for bytes that are not UTF-8; `skip_special` leaves out tokens marked special.
 * *ret_text is for free() and ends in a zero that *ret_length does not count. Errors: -EINVAL for an id without a
 * token, -ENOMEM. */
int tokenizer_decode(const struct tokenizer *tokenizer, const int32_t *ids, size_t count, bool skip_special,
                     char **ret_text, size_t *ret_length, struct error *ret_error);

/* The bytes that one token stands for (not always whole characters: see text_stream.h), or NULL. */
const char *tokenizer_token_bytes(const struct tokenizer *tokenizer, int32_t id, size_t *ret_length);

/* The id of the added token that is spelt `content`, or -ENOENT. */
int32_t tokenizer_id(const struct tokenizer *tokenizer, const char *content);

/* True when the token is marked special: not part of the text of an answer. */
bool tokenizer_is_special(const struct tokenizer *tokenizer, int32_t id);

/* The highest id plus one. Ids below it need not all have a token. */
size_t tokenizer_size(const struct tokenizer *tokenizer);

/* A bitmap of `vocab` bits (id i: word i / 64, bit i % 64) of the ids that have a token, for the sampler: rows of a
 * model past the vocabulary, or in a gap of it, must never be sampled. *ret_allowed is for free(). */
int tokenizer_allowed(const struct tokenizer *tokenizer, size_t vocab, uint64_t **ret_allowed, struct error *ret_error);
