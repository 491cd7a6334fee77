/* Wire form, little-endian, no holes:
 *
 *   STEP       header 16 | id 8, epoch 4, draft 4, sequences 4, rows 4
 *              | per sequence: first 4, rows 4, logits 4, pages 4
 *              | tokens 4 x rows | next 4 x rows | page ids 4 x pages, sequence after sequence
 *   STEP_DONE  header 16 | id 8, epoch 4, status 4, logit_rows 4, layer 4, expert 4, slice 4, code 4, 0 4,
 *              step_ns 8, part_ns 8 x 10 (enum step_part), matmul_ns 8, hits 4, misses 4 */
#include "proto/message.h"

#include "proto/cleanup.h"

#include <inttypes.h>
#include <string.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "messages are copied as they stand in memory");

struct step_wire {
    struct message_header header;
    uint64_t id;
    uint32_t epoch, draft, sequences, rows;
};

struct sequence_wire {
    uint32_t first, rows, logits, pages;
};

struct step_done_wire {
    struct message_header header;
    uint64_t id;
    uint32_t epoch;
    int32_t status;
    uint32_t logit_rows, layer, expert, slice, code, zero;
    uint64_t step_ns, part_ns[STEP_PARTS], matmul_ns;
    uint32_t hits, misses;
};

_Static_assert(sizeof(struct message_header) == 16 && sizeof(struct step_wire) == 40 &&
                   sizeof(struct sequence_wire) == 16,
               "wire form");
_Static_assert(sizeof(struct step_done_wire) == MESSAGE_STEP_DONE_BYTES, "wire form");

const char *step_part_name(enum step_part part)
{
    static const char *const names[STEP_PARTS] = {
        [PART_OTHER] = "other",     [PART_ATTENTION] = "attention", [PART_INDEXER] = "indexer",
        [PART_DENSE] = "dense",     [PART_ROUTER] = "router",       [PART_SHARED] = "shared",
        [PART_EXPERTS] = "experts", [PART_WAIT] = "wait",           [PART_EXCHANGE] = "exchange",
        [PART_HEAD] = "head",
    };
    return (unsigned)part < STEP_PARTS ? names[part] : "?";
}

static struct message_header make_header(enum message_type type, uint64_t bytes)
{
    return (struct message_header){
        .magic = MESSAGE_MAGIC, .version = MESSAGE_VERSION, .type = (uint16_t)type, .bytes = bytes};
}

static int check_header(const void *bytes, size_t size, enum message_type type, struct error *ret_error)
{
    struct message_header header;
    if (size < sizeof header)
        return error_set(ret_error, EBADMSG, "message: %zu bytes are too few for a header", size);
    memcpy(&header, bytes, sizeof header);
    if (header.magic != MESSAGE_MAGIC)
        return error_set(ret_error, EBADMSG, "message: magic 0x%08" PRIx32 " is not Calypte's", header.magic);
    if (header.version != MESSAGE_VERSION)
        return error_set(ret_error, EBADMSG,
                         "message: version %u, this program speaks %u; restart the instance with one version",
                         (unsigned)header.version, MESSAGE_VERSION);
    if (header.type != (uint16_t)type)
        return error_set(ret_error, EBADMSG, "message: type %u where %u is expected", (unsigned)header.type,
                         (unsigned)type);
    if (header.bytes != size)
        return error_set(ret_error, EBADMSG, "message: says %" PRIu64 " bytes, has %zu", header.bytes, size);
    return 0;
}

int message_encode_step(const struct step *step, void **ret_bytes, size_t *ret_size, struct error *ret_error)
{
    uint64_t rows = 0, pages = 0;
    for (uint32_t s = 0; s < step->sequences; s++) {
        rows += step->sequence[s].rows;
        pages += step->sequence[s].pages;
    }
    if (rows != step->rows)
        return error_set(ret_error, EINVAL, "step %" PRIu64 ": its sequences have %" PRIu64 " rows, it says %" PRIu32,
                         step->id, rows, step->rows);
    uint64_t size = sizeof(struct step_wire) + step->sequences * sizeof(struct sequence_wire) + 8 * rows + 4 * pages;
    unsigned char *bytes = malloc(size);
    if (!bytes)
        return error_set(ret_error, ENOMEM, "step %" PRIu64 ": no memory for %" PRIu64 " bytes", step->id, size);

    struct step_wire wire = {.header = make_header(MESSAGE_STEP, size),
                             .id = step->id,
                             .epoch = step->epoch,
                             .draft = step->draft,
                             .sequences = step->sequences,
                             .rows = step->rows};
    unsigned char *at = bytes;
    memcpy(at, &wire, sizeof wire);
    at += sizeof wire;
    for (uint32_t s = 0; s < step->sequences; s++) {
        const struct step_sequence *sequence = &step->sequence[s];
        struct sequence_wire part = {
            .first = sequence->first, .rows = sequence->rows, .logits = sequence->logits, .pages = sequence->pages};
        memcpy(at, &part, sizeof part);
        at += sizeof part;
    }
    if (rows > 0) {
        memcpy(at, step->tokens, 4 * rows);
        memcpy(at + 4 * rows, step->next, 4 * rows);
        at += 8 * rows;
    }
    for (uint32_t s = 0; s < step->sequences; s++) {
        size_t part = (size_t)4 * step->sequence[s].pages;
        if (part > 0)
            memcpy(at, step->sequence[s].page_ids, part);
        at += part;
    }
    *ret_bytes = bytes;
    *ret_size = size;
    return 0;
}

/* Checks the sequences' table against the limits and the step's rows; *ret_pages is their sum. */
static int decode_sequences(const struct step_wire *wire, const struct sequence_wire *parts,
                            const struct step_limits *limits, struct step_sequence *sequences, uint64_t *ret_pages,
                            struct error *ret_error)
{
    uint64_t rows = 0, pages = 0, logits = 0;
    for (uint32_t s = 0; s < wire->sequences; s++) {
        struct sequence_wire part;
        memcpy(&part, &parts[s], sizeof part);
        uint64_t end = (uint64_t)part.first + part.rows;
        if (part.rows == 0 || part.rows > wire->rows - rows)
            return error_set(ret_error, EBADMSG,
                             "step: sequence %" PRIu32 " has rows %" PRIu32 " of the %" PRIu32 " in the step", s,
                             part.rows, wire->rows);
        if (end > limits->context)
            return error_set(ret_error, EBADMSG,
                             "step: sequence %" PRIu32 " ends at position %" PRIu64 ", the context is %" PRIu32, s, end,
                             limits->context);
        if (part.logits > LOGITS_ALL)
            return error_set(ret_error, EBADMSG, "step: sequence %" PRIu32 " has logits %" PRIu32 ", known are 0 to 2",
                             s, part.logits);
        uint64_t needed = (end + limits->page_tokens - 1) / limits->page_tokens;
        if (part.pages < needed || part.pages > limits->kv_pages)
            return error_set(ret_error, EBADMSG,
                             "step: sequence %" PRIu32 " has pages %" PRIu32 ", needs %" PRIu64 " of at most %" PRIu32,
                             s, part.pages, needed, limits->kv_pages);
        sequences[s] = (struct step_sequence){.first = part.first,
                                              .rows = part.rows,
                                              .logits = part.logits,
                                              .pages = part.pages,
                                              .row_offset = (uint32_t)rows};
        rows += part.rows;
        pages += part.pages;
        logits += part.logits == LOGITS_ALL ? part.rows : part.logits == LOGITS_LAST ? 1 : 0;
    }
    if (rows != wire->rows)
        return error_set(ret_error, EBADMSG, "step: its sequences have %" PRIu64 " rows, it says %" PRIu32, rows,
                         wire->rows);
    if (logits > limits->logit_rows)
        return error_set(ret_error, EBADMSG, "step: asks for %" PRIu64 " rows of logits, the limit is %" PRIu32, logits,
                         limits->logit_rows);
    *ret_pages = pages;
    return 0;
}

static int check_tokens(const char *name, const int32_t *tokens, uint32_t rows, int32_t least, uint32_t vocab,
                        struct error *ret_error)
{
    for (uint32_t row = 0; row < rows; row++)
        if (tokens[row] < least || (int64_t)tokens[row] >= vocab)
            return error_set(ret_error, EBADMSG,
                             "step: %s %" PRId32 " of row %" PRIu32 " is not in a vocabulary of %" PRIu32, name,
                             tokens[row], row, vocab);
    return 0;
}

int message_decode_step(const void *bytes, size_t size, const struct step_limits *limits, struct step *ret_step,
                        void **ret_memory, struct error *ret_error)
{
    int status = check_header(bytes, size, MESSAGE_STEP, ret_error);
    if (status < 0)
        return status;
    struct step_wire wire;
    if (size < sizeof wire)
        return error_set(ret_error, EBADMSG, "step: %zu bytes are too few", size);
    memcpy(&wire, bytes, sizeof wire);
    if (wire.draft > 1)
        return error_set(ret_error, EBADMSG, "step: draft is %" PRIu32 ", may be 0 or 1", wire.draft);
    if (wire.rows == 0 || wire.rows > limits->max_rows)
        return error_set(ret_error, EBADMSG, "step: rows is %" PRIu32 ", may be 1 to %" PRIu32, wire.rows,
                         limits->max_rows);
    if (wire.sequences == 0 || wire.sequences > wire.rows)
        return error_set(ret_error, EBADMSG, "step: sequences is %" PRIu32 " for %" PRIu32 " rows", wire.sequences,
                         wire.rows);
    if (limits->page_tokens == 0)
        return error_set(ret_error, EINVAL, "step: page_tokens of this instance is 0");

    /* 32-bit counts in 64-bit sums: nothing here can overflow. */
    uint64_t fixed = sizeof wire + (uint64_t)wire.sequences * sizeof(struct sequence_wire) + (uint64_t)8 * wire.rows;
    if (size < fixed)
        return error_set(ret_error, EBADMSG,
                         "step: %zu bytes are too few for %" PRIu32 " sequences and %" PRIu32 " rows", size,
                         wire.sequences, wire.rows);
    _cleanup_free_ struct step_sequence *sequences = calloc(wire.sequences, sizeof *sequences);
    if (!sequences)
        return error_set(ret_error, ENOMEM, "step: no memory for %" PRIu32 " sequences", wire.sequences);

    const unsigned char *at = (const unsigned char *)bytes + sizeof wire;
    uint64_t pages = 0;
    status =
        decode_sequences(&wire, (const struct sequence_wire *)(const void *)at, limits, sequences, &pages, ret_error);
    if (status < 0)
        return status;
    if (size != fixed + 4 * pages)
        return error_set(ret_error, EBADMSG, "step: has %zu bytes, its counts make %" PRIu64, size, fixed + 4 * pages);
    at += wire.sequences * sizeof(struct sequence_wire);

    const int32_t *tokens = (const int32_t *)(const void *)at, *next = tokens + wire.rows;
    status = check_tokens("token", tokens, wire.rows, 0, limits->vocab, ret_error);
    if (status == 0)
        status = check_tokens("next token", next, wire.rows, -1, limits->vocab, ret_error);
    if (status < 0)
        return status;

    const uint32_t *page_ids = (const uint32_t *)(const void *)(next + wire.rows);
    for (uint32_t s = 0; s < wire.sequences; s++) {
        sequences[s].page_ids = page_ids;
        for (uint32_t page = 0; page < sequences[s].pages; page++)
            if (page_ids[page] >= limits->kv_pages)
                return error_set(ret_error, EBADMSG,
                                 "step: page id %" PRIu32 " of sequence %" PRIu32 ", there are %" PRIu32 " pages",
                                 page_ids[page], s, limits->kv_pages);
        page_ids += sequences[s].pages;
    }
    *ret_step = (struct step){.id = wire.id,
                              .epoch = wire.epoch,
                              .draft = wire.draft,
                              .sequences = wire.sequences,
                              .rows = wire.rows,
                              .sequence = sequences,
                              .tokens = tokens,
                              .next = next};
    *ret_memory = take_pointer(sequences);
    return 0;
}

void message_encode_step_done(const struct step_done *done, unsigned char ret_bytes[], size_t size)
{
    struct step_done_wire wire = {
        .header = make_header(MESSAGE_STEP_DONE, sizeof wire),
        .id = done->id,
        .epoch = done->epoch,
        .status = done->status,
        .logit_rows = done->logit_rows,
        .layer = done->layer,
        .expert = done->expert,
        .slice = done->slice,
        .code = done->code,
        .step_ns = done->step_ns,
        .matmul_ns = done->matmul_ns,
        .hits = done->hits,
        .misses = done->misses,
    };
    memcpy(wire.part_ns, done->part_ns, sizeof wire.part_ns);
    memcpy(ret_bytes, &wire, size < sizeof wire ? size : sizeof wire);
}

int message_decode_step_done(const void *bytes, size_t size, struct step_done *ret_done, struct error *ret_error)
{
    int status = check_header(bytes, size, MESSAGE_STEP_DONE, ret_error);
    if (status < 0)
        return status;
    struct step_done_wire wire;
    if (size != sizeof wire)
        return error_set(ret_error, EBADMSG, "step_done: has %zu bytes, must have %zu", size, sizeof wire);
    memcpy(&wire, bytes, sizeof wire);
    if (wire.status > 0 || wire.status < -4095)
        return error_set(ret_error, EBADMSG, "step_done: status %" PRId32 " is neither 0 nor a negative errno",
                         wire.status);
    if (wire.code > 4095)
        return error_set(ret_error, EBADMSG, "step_done: code %" PRIu32 " is not an errno", wire.code);
    if (wire.zero != 0)
        return error_set(ret_error, EBADMSG, "step_done: reserved bytes are not 0");
    *ret_done = (struct step_done){
        .id = wire.id,
        .epoch = wire.epoch,
        .status = wire.status,
        .logit_rows = wire.logit_rows,
        .layer = wire.layer,
        .expert = wire.expert,
        .slice = wire.slice,
        .code = wire.code,
        .step_ns = wire.step_ns,
        .matmul_ns = wire.matmul_ns,
        .hits = wire.hits,
        .misses = wire.misses,
    };
    memcpy(ret_done->part_ns, wire.part_ns, sizeof wire.part_ns);
    return 0;
}
