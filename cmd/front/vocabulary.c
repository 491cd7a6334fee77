#include "cmd/front/vocabulary.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "cmd/front/utf8.h"

/* GPT-2's map: printable Latin-1 bytes are themselves, the 68 others are U+0100 and up in ascending order. */
static bool byte_is_itself(int byte)
{
    return (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
}

static int byte_of_character(unsigned character)
{
    if (character < 0x100)
        return byte_is_itself((int)character) ? (int)character : -1;
    unsigned index = character - 0x100;
    if (index < 0x21)
        return (int)index; /* 0x00 .. 0x20 */
    if (index < 0x21 + 0x22)
        return (int)(0x7F + index - 0x21); /* 0x7F .. 0xA0 */
    return index == 0x21 + 0x22 ? 0xAD : -1;
}

ptrdiff_t byte_level_decode(const char *text, size_t length, char *out)
{
    size_t used = 0, step;

    for (size_t at = 0; at < length; at += step) {
        if (utf8_step(text + at, length - at, &step) != UTF8_VALID || step > 2)
            return -1;
        const unsigned char *p = (const unsigned char *)text + at;
        int byte = byte_of_character(step == 1 ? p[0] : (unsigned)(p[0] & 0x1F) << 6 | (p[1] & 0x3F));
        if (byte < 0)
            return -1;
        out[used++] = (char)byte;
    }
    return (ptrdiff_t)used;
}

int vocabulary_init(struct vocabulary *vocabulary, size_t size, size_t arena_capacity)
{
    size_t slots = 16;

    while (slots < size * 2)
        slots *= 2;
    *vocabulary = (struct vocabulary){
        .tokens = calloc(size + 1, sizeof *vocabulary->tokens),
        .size = size,
        .arena = malloc(arena_capacity + 1),
        .arena_capacity = arena_capacity,
        .slots = calloc(slots, sizeof *vocabulary->slots),
        .slot_mask = slots - 1,
    };
    for (int byte = 0; byte < 256; byte++)
        vocabulary->byte_ids[byte] = -1;
    return vocabulary->tokens && vocabulary->arena && vocabulary->slots ? 0 : -ENOMEM;
}

void vocabulary_free(struct vocabulary *vocabulary)
{
    free(vocabulary->tokens);
    free(vocabulary->arena);
    free(vocabulary->slots);
}

static size_t find_slot(const struct vocabulary *vocabulary, const char *bytes, size_t length)
{
    size_t slot = XXH3_64bits(bytes, length) & vocabulary->slot_mask;

    for (; vocabulary->slots[slot]; slot = (slot + 1) & vocabulary->slot_mask) {
        const struct token *token = &vocabulary->tokens[vocabulary->slots[slot] - 1];
        if (token->length == length && memcmp(vocabulary->arena + token->offset, bytes, length) == 0)
            break;
    }
    return slot;
}

int32_t vocabulary_find(const struct vocabulary *vocabulary, const char *bytes, size_t length)
{
    return (int32_t)vocabulary->slots[find_slot(vocabulary, bytes, length)] - 1;
}

int vocabulary_add(struct vocabulary *vocabulary, int32_t id, const char *content, size_t length, bool reachable)
{
    struct token *token = &vocabulary->tokens[id];

    if (token->flags & TOKEN_PRESENT)
        return -EEXIST;
    if (length > vocabulary->arena_capacity - vocabulary->arena_length)
        return -ENOSPC;
    char *bytes = vocabulary->arena + vocabulary->arena_length;
    ptrdiff_t decoded = byte_level_decode(content, length, bytes);
    if (decoded < 0)
        memcpy(bytes, content, length); /* the ByteLevel decoder shows such a token as it is spelt */
    token->offset = (uint32_t)vocabulary->arena_length;
    token->length = (uint32_t)(decoded < 0 ? (ptrdiff_t)length : decoded);
    token->flags = TOKEN_PRESENT;
    vocabulary->arena_length += token->length;
    if (reachable && decoded >= 0) {
        vocabulary->slots[find_slot(vocabulary, bytes, token->length)] = (uint32_t)id + 1;
        if (decoded == 1)
            vocabulary->byte_ids[(unsigned char)bytes[0]] = id;
    }
    return 0;
}
