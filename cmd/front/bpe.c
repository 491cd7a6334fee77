#include "cmd/front/bpe.h"

#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "cmd/front/vocabulary.h"

#define NONE UINT32_MAX

/* A doubly linked list in an array: merging unlinks the right neighbour. */
struct bpe_symbol {
    uint32_t id; /* NONE once merged into its left neighbour */
    uint32_t previous, next;
};

/* A pair that was mergeable when it was pushed. It is stale when either side has changed since, which shows in that the
 * pair at `position` no longer merges to `result`. */
struct bpe_candidate {
    uint32_t rank, position, result;
};

int bpe_init(struct bpe *bpe, size_t merge_count)
{
    size_t slots = 16;

    while (slots < merge_count * 2)
        slots *= 2;
    bpe->merges = malloc(slots * sizeof *bpe->merges);
    bpe->merge_mask = slots - 1;
    if (!bpe->merges)
        return -ENOMEM;
    for (size_t i = 0; i < slots; i++)
        bpe->merges[i].left = NONE;
    return 0;
}

void bpe_free(struct bpe *bpe)
{
    free(bpe->merges);
}

static struct merge *find_slot(const struct bpe *bpe, uint32_t left, uint32_t right)
{
    uint32_t pair[2] = {left, right};
    size_t slot = XXH3_64bits(pair, sizeof pair) & bpe->merge_mask;

    for (;; slot = (slot + 1) & bpe->merge_mask) {
        struct merge *merge = &bpe->merges[slot];
        if (merge->left == NONE || (merge->left == left && merge->right == right))
            return merge;
    }
}

int bpe_add(struct bpe *bpe, int32_t left, int32_t right, uint32_t rank, int32_t result)
{
    struct merge *merge = find_slot(bpe, (uint32_t)left, (uint32_t)right);

    if (merge->left != NONE)
        return -EEXIST;
    *merge = (struct merge){.left = (uint32_t)left, .right = (uint32_t)right, .rank = rank, .result = (uint32_t)result};
    return 0;
}

static bool before(const struct bpe_candidate *a, const struct bpe_candidate *b)
{
    return a->rank != b->rank ? a->rank < b->rank : a->position < b->position;
}

static void heap_push(struct bpe_scratch *scratch, struct bpe_candidate candidate)
{
    size_t child = scratch->heap_length++;

    while (child > 0) {
        size_t parent = (child - 1) / 2;
        if (!before(&candidate, &scratch->heap[parent]))
            break;
        scratch->heap[child] = scratch->heap[parent];
        child = parent;
    }
    scratch->heap[child] = candidate;
}

static struct bpe_candidate heap_pop(struct bpe_scratch *scratch)
{
    struct bpe_candidate top = scratch->heap[0], last = scratch->heap[--scratch->heap_length];
    size_t hole = 0;

    for (;;) {
        size_t child = 2 * hole + 1;
        if (child >= scratch->heap_length)
            break;
        if (child + 1 < scratch->heap_length && before(&scratch->heap[child + 1], &scratch->heap[child]))
            child++;
        if (!before(&scratch->heap[child], &last))
            break;
        scratch->heap[hole] = scratch->heap[child];
        hole = child;
    }
    scratch->heap[hole] = last;
    return top;
}

void bpe_scratch_free(struct bpe_scratch *scratch)
{
    free(scratch->symbols);
    free(scratch->heap);
    *scratch = (struct bpe_scratch){0};
}

static int scratch_reserve(struct bpe_scratch *scratch, size_t length)
{
    if (length <= scratch->capacity)
        return 0;
    size_t capacity = length + length / 2 + 64;
    bpe_scratch_free(scratch);
    scratch->symbols = malloc(capacity * sizeof *scratch->symbols);
    /* n - 1 pairs at first; every merge removes a symbol and pushes at most two more */
    scratch->heap = malloc(3 * capacity * sizeof *scratch->heap);
    if (!scratch->symbols || !scratch->heap) {
        bpe_scratch_free(scratch);
        return -ENOMEM;
    }
    scratch->capacity = capacity;
    return 0;
}

static void push_pair(const struct bpe *bpe, struct bpe_scratch *scratch, uint32_t position)
{
    const struct bpe_symbol *symbol = &scratch->symbols[position];

    if (symbol->next == NONE)
        return;
    const struct merge *merge = find_slot(bpe, symbol->id, scratch->symbols[symbol->next].id);
    if (merge->left != NONE)
        heap_push(scratch, (struct bpe_candidate){merge->rank, position, merge->result});
}

static void apply_merge(const struct bpe *bpe, struct bpe_scratch *scratch, struct bpe_candidate top)
{
    struct bpe_symbol *left = &scratch->symbols[top.position];

    if (left->id == NONE || left->next == NONE)
        return;
    struct bpe_symbol *right = &scratch->symbols[left->next];
    const struct merge *merge = find_slot(bpe, left->id, right->id);
    if (merge->left == NONE || merge->result != top.result)
        return;
    left->id = top.result;
    left->next = right->next;
    right->id = NONE;
    if (left->next != NONE)
        scratch->symbols[left->next].previous = top.position;
    if (left->previous != NONE)
        push_pair(bpe, scratch, left->previous);
    push_pair(bpe, scratch, top.position);
}

int bpe_encode(const struct bpe *bpe, const struct vocabulary *vocabulary, struct bpe_scratch *scratch,
               const char *word, size_t length, int32_t *ret_ids, size_t *ret_count)
{
    uint32_t count = 0;

    *ret_count = 0;
    if (scratch_reserve(scratch, length) < 0)
        return -ENOMEM;
    for (size_t i = 0; i < length; i++) {
        int32_t id = vocabulary->byte_ids[(unsigned char)word[i]];
        if (id < 0)
            continue;
        scratch->symbols[count] = (struct bpe_symbol){.id = (uint32_t)id, .previous = count - 1, .next = count + 1};
        count++;
    }
    if (count == 0)
        return 0;
    scratch->symbols[count - 1].next = NONE;
    scratch->heap_length = 0;
    for (uint32_t i = 0; i + 1 < count; i++)
        push_pair(bpe, scratch, i);
    while (scratch->heap_length > 0)
        apply_merge(bpe, scratch, heap_pop(scratch));
    for (uint32_t i = 0; i != NONE; i = scratch->symbols[i].next)
        ret_ids[(*ret_count)++] = (int32_t)scratch->symbols[i].id;
    return 0;
}
