#include "io_daemon/learning_record.h"

#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#define HEAT_MOST 0x1p64f /* more than any file can count up to, and far from what a float cannot hold */

static const char magic[8] = {'C', 'A', 'L', 'Y', 'U', 'S', 'E', '1'};

enum record_kind { RECORD_USES = 1, RECORD_HEAT = 2 };

struct file_header {
    char magic[8];
    uint64_t identity;
    uint32_t experts, reserved;
    uint64_t checksum;
};
_Static_assert(sizeof(struct file_header) == LEARNING_HEADER_BYTES, "as it stands in the file");

struct record {
    uint64_t checksum;
    uint32_t kind, bytes;
};
_Static_assert(sizeof(struct record) == LEARNING_RECORD_BYTES, "as it stands in the file");

struct use_count {
    uint32_t expert, uses;
};

int learning_memory_open(uint64_t identity, uint32_t experts, struct learning_memory *ret_memory,
                         struct error *ret_error)
{
    struct learning_memory memory = {.identity = identity, .experts = experts, .heat = calloc(experts, sizeof(float))};
    if (!memory.heat)
        return error_set(ret_error, ENOMEM, "use of %u experts: out of memory", experts);
    *ret_memory = memory;
    return 0;
}

void learning_memory_close(struct learning_memory *memory)
{
    free(memory->heat);
    *memory = (struct learning_memory){0};
}

/* Halves what lies a half-life back, once for each half-life in `uses`. */
static void decay(struct learning_memory *memory)
{
    uint64_t half_life = (uint64_t)LEARNING_HALF_LIFE * memory->experts, halvings = memory->uses / half_life;
    if (halvings == 0)
        return;
    memory->uses %= half_life;
    float share = halvings < 64 ? 1.0f / (float)(UINT64_C(1) << halvings) : 0;
    for (uint32_t e = 0; e < memory->experts; e++)
        memory->heat[e] *= share;
}

void learning_memory_add(struct learning_memory *memory, const uint32_t *uses)
{
    for (uint32_t e = 0; e < memory->experts; e++) {
        memory->heat[e] += (float)uses[e];
        memory->uses += uses[e];
    }
    decay(memory);
}

size_t learning_heat_bytes(uint32_t experts)
{
    return sizeof(struct record) + sizeof(uint64_t) + (size_t)experts * sizeof(float);
}

size_t learning_uses_bytes(uint32_t experts)
{
    return sizeof(struct record) + (size_t)experts * sizeof(struct use_count);
}

size_t learning_encode_header(const struct learning_memory *memory, void *ret_bytes)
{
    struct file_header header = {.identity = memory->identity, .experts = memory->experts};
    memcpy(header.magic, magic, sizeof magic);
    header.checksum = XXH3_64bits(&header, offsetof(struct file_header, checksum));
    memcpy(ret_bytes, &header, sizeof header);
    return sizeof header;
}

/* Of a record at `bytes` whose payload has `size`: everything behind the checksum itself. */
static uint64_t record_checksum(const struct learning_memory *memory, const char *bytes, size_t size)
{
    size_t behind = sizeof(uint64_t);
    return XXH3_64bits_withSeed(bytes + behind, sizeof(struct record) - behind + size, memory->identity);
}

static size_t seal(const struct learning_memory *memory, enum record_kind kind, char *bytes, size_t size)
{
    struct record record = {.kind = kind, .bytes = (uint32_t)size};
    memcpy(bytes, &record, sizeof record);
    record.checksum = record_checksum(memory, bytes, size);
    memcpy(bytes, &record, sizeof record);
    return sizeof record + size;
}

size_t learning_encode_heat(const struct learning_memory *memory, void *ret_bytes)
{
    char *bytes = ret_bytes, *payload = bytes + sizeof(struct record);
    memcpy(payload, &memory->uses, sizeof memory->uses);
    memcpy(payload + sizeof memory->uses, memory->heat, (size_t)memory->experts * sizeof(float));
    return seal(memory, RECORD_HEAT, bytes, learning_heat_bytes(memory->experts) - sizeof(struct record));
}

size_t learning_encode_uses(const struct learning_memory *memory, const uint32_t *uses, void *ret_bytes)
{
    char *bytes = ret_bytes, *payload = bytes + sizeof(struct record);
    size_t size = 0;
    for (uint32_t e = 0; e < memory->experts; e++) {
        if (uses[e] == 0)
            continue;
        struct use_count count = {e, uses[e]};
        memcpy(payload + size, &count, sizeof count);
        size += sizeof count;
    }
    return size > 0 ? seal(memory, RECORD_USES, bytes, size) : 0;
}

static bool take_heat(struct learning_memory *memory, const char *payload, size_t size)
{
    uint64_t uses;
    size_t bytes = (size_t)memory->experts * sizeof(float);
    if (size != sizeof uses + bytes)
        return false;
    memcpy(&uses, payload, sizeof uses);
    if (uses >= (uint64_t)LEARNING_HALF_LIFE * memory->experts)
        return false;
    for (size_t at = sizeof uses; at < size; at += sizeof(float)) {
        float heat;
        memcpy(&heat, payload + at, sizeof heat);
        if (!(heat >= 0 && heat <= HEAT_MOST))
            return false;
    }
    memcpy(memory->heat, payload + sizeof uses, bytes);
    memory->uses = uses;
    return true;
}

static bool take_uses(struct learning_memory *memory, const char *payload, size_t size)
{
    struct use_count count;
    uint32_t least = 0;
    if (size % sizeof count != 0)
        return false;
    for (size_t at = 0; at < size; at += sizeof count) {
        memcpy(&count, payload + at, sizeof count);
        if (count.expert < least || count.expert >= memory->experts)
            return false;
        least = count.expert + 1;
    }
    for (size_t at = 0; at < size; at += sizeof count) {
        memcpy(&count, payload + at, sizeof count);
        float heat = memory->heat[count.expert] + (float)count.uses;
        memory->heat[count.expert] = heat < HEAT_MOST ? heat : HEAT_MOST;
        memory->uses += count.uses;
    }
    decay(memory);
    return true;
}

static enum learning_verdict check_header(const struct learning_memory *memory, const char *bytes, size_t size)
{
    struct file_header header;
    if (size < sizeof header)
        return memcmp(bytes, magic, size < sizeof magic ? size : sizeof magic) == 0 ? LEARNING_CUT : LEARNING_DAMAGED;
    memcpy(&header, bytes, sizeof header);
    if (memcmp(header.magic, magic, sizeof magic) != 0 ||
        header.checksum != XXH3_64bits(&header, offsetof(struct file_header, checksum)))
        return LEARNING_DAMAGED;
    return header.identity == memory->identity && header.experts == memory->experts ? LEARNING_WHOLE : LEARNING_FOREIGN;
}

enum learning_verdict learning_decode(struct learning_memory *memory, const void *bytes, size_t size, size_t *ret_whole)
{
    const char *file = bytes;
    size_t at = sizeof(struct file_header);
    *ret_whole = 0;
    if (size == 0)
        return LEARNING_WHOLE;
    enum learning_verdict verdict = check_header(memory, file, size);
    if (verdict != LEARNING_WHOLE)
        return verdict;
    for (struct record record; at < size; at += sizeof record + record.bytes) {
        *ret_whole = at;
        if (size - at < sizeof record)
            return LEARNING_CUT;
        memcpy(&record, file + at, sizeof record);
        size_t left = size - at - sizeof record;
        if (record.bytes > left)
            return LEARNING_CUT;
        if (record.checksum != record_checksum(memory, file + at, record.bytes))
            return record.bytes == left ? LEARNING_CUT
                                        : LEARNING_DAMAGED; /* the end of a file may hold pages never written */
        const char *payload = file + at + sizeof record;
        bool right = false;
        switch (record.kind) {
        case RECORD_USES: right = take_uses(memory, payload, record.bytes); break;
        case RECORD_HEAT: right = take_heat(memory, payload, record.bytes); break;
        default: break;
        }
        if (!right)
            return LEARNING_DAMAGED;
    }
    *ret_whole = size;
    return LEARNING_WHOLE;
}
