/* Byte pair encoding: a word starts as the tokens of its bytes, and the pair with the lowest rank is merged until no
 * pair is in the table. Sennrich et al. 2016; ties go to the leftmost pair, as in Hugging Face tokenizers. */
#pragma once

#include <stddef.h>
#include <stdint.h>

struct vocabulary;

struct merge {
    uint32_t left, right; /* token ids; left is UINT32_MAX in an empty slot */
    uint32_t rank;        /* the place in the file: lower is merged first */
    uint32_t result;      /* token id */
};

struct bpe {
    struct merge *merges; /* [merge_mask + 1], open addressing over the pair */
    size_t merge_mask;
};

int bpe_init(struct bpe *bpe, size_t merge_count);
void bpe_free(struct bpe *bpe);

/* Adds the merge of `rank`; at most `merge_count` of bpe_init. 0, or -EEXIST when the pair is there already. */
int bpe_add(struct bpe *bpe, int32_t left, int32_t right, uint32_t rank, int32_t result);

/* Working memory of one caller of bpe_encode, reused from word to word; starts as all zeroes. */
struct bpe_scratch {
    struct bpe_symbol *symbols;
    struct bpe_candidate *heap;
    size_t capacity, heap_length;
};

void bpe_scratch_free(struct bpe_scratch *scratch);

/* Encodes one word of `length` bytes (below 2^31) to at most `length` ids in `ret_ids`; O(n log n). Bytes without a
 * token vanish, as in Hugging Face tokenizers without an unk_token. 0 or -ENOMEM. Any thread with its own scratch. */
int bpe_encode(const struct bpe *bpe, const struct vocabulary *vocabulary, struct bpe_scratch *scratch,
               const char *word, size_t length, int32_t *ret_ids, size_t *ret_count);
