/* Reads and checks a tokenizer.json. Nothing in the file is trusted. */
#include "cmd/front/tokenizer.h"

#include <fcntl.h>
#include <inttypes.h>
#include <string.h>
#include <sys/stat.h>

#include <jansson.h>

#include "cmd/front/buffer.h"
#include "cmd/front/normalizer.h"
#include "cmd/front/tokenizer_internal.h"
#include "cmd/front/utf8.h"
#include "proto/cleanup.h"

#define MAX_FILE ((off_t)256 << 20)
#define MAX_NESTING 16 /* of Sequence in Sequence */

/* -- the file -- */

static int read_file(const char *path, char **ret_bytes, size_t *ret_length, struct error *ret_error)
{
    _cleanup_close_ int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    struct stat stat;
    size_t length = 0;

    if (fd < 0 || fstat(fd, &stat) < 0)
        return error_set(ret_error, errno, "%s: %s%s", path, strerror(errno), error_remedy(errno));
    if (!S_ISREG(stat.st_mode))
        return error_set(ret_error, EINVAL, "%s: not a regular file", path);
    if (stat.st_size > MAX_FILE)
        return error_set(ret_error, EFBIG, "%s: larger than 256 MiB, so no tokenizer.json", path);
    _cleanup_free_ char *bytes = malloc((size_t)stat.st_size + 1);
    if (!bytes)
        return error_set(ret_error, ENOMEM, "%s: out of memory", path);
    while (length < (size_t)stat.st_size) {
        ssize_t got = read(fd, bytes + length, (size_t)stat.st_size - length);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return error_set(ret_error, errno, "%s: %s", path, strerror(errno));
        if (got == 0)
            break;
        length += (size_t)got;
    }
    *ret_bytes = take_pointer(bytes);
    *ret_length = length;
    return 0;
}

/* -- values -- */

static int get_bool(const json_t *object, const char *key, bool *ret_value, struct error *ret_error)
{
    const json_t *value = json_object_get(object, key);

    if (!json_is_boolean(value))
        return error_set(ret_error, EINVAL, "\"%s\" must be true or false", key);
    *ret_value = json_is_true(value);
    return 0;
}

/* For a setting that may be absent or null. */
static int get_bool_or(const json_t *object, const char *key, bool otherwise, bool *ret_value, struct error *ret_error)
{
    const json_t *value = json_object_get(object, key);

    *ret_value = otherwise;
    return !value || json_is_null(value) ? 0 : get_bool(object, key, ret_value, ret_error);
}

static int get_type(const json_t *object, const char **ret_type, struct error *ret_error)
{
    *ret_type = json_string_value(json_object_get(object, "type"));
    return *ret_type ? 0 : error_set(ret_error, EINVAL, "has no \"type\"");
}

static int check_id(const json_t *value, const char *name, int32_t *ret_id, struct error *ret_error)
{
    if (!json_is_integer(value) || json_integer_value(value) < 0 || json_integer_value(value) > VOCABULARY_MAX_ID)
        return error_set(ret_error, EINVAL, "the id of \"%s\" is not a number from 0 to %d", utf8_quoted(name).text,
                         VOCABULARY_MAX_ID);
    *ret_id = (int32_t)json_integer_value(value);
    return 0;
}

static int check_array(const json_t *value, const char *key, struct error *ret_error)
{
    return json_is_array(value) ? 0 : error_set(ret_error, EINVAL, "\"%s\" must be an array", key);
}

/* -- vocabulary and added tokens -- */

/* Measures first, so that one allocation does, then adds. */
static int load_vocabulary(struct tokenizer *tokenizer, json_t *vocab, const json_t *added, struct error *ret_error)
{
    size_t size = 0, bytes = 0, index;
    const char *content;
    json_t *value;
    int32_t id;
    int status;

    json_object_foreach (vocab, content, value) {
        if ((status = check_id(value, content, &id, ret_error)) < 0)
            return error_prefix(ret_error, status, "model.vocab");
        if (*content == 0)
            return error_set(ret_error, EINVAL, "model.vocab: id %d is an empty token", (int)id);
        size = (size_t)id >= size ? (size_t)id + 1 : size;
        bytes += strlen(content);
    }
    json_array_foreach (added, index, value) {
        content = json_string_value(json_object_get(value, "content"));
        if (!content || !*content)
            return error_set(ret_error, EINVAL, "added_tokens[%zu] has no \"content\"", index);
        if ((status = check_id(json_object_get(value, "id"), content, &id, ret_error)) < 0)
            return error_prefix(ret_error, status, "added_tokens");
        size = (size_t)id >= size ? (size_t)id + 1 : size;
        bytes += strlen(content);
    }
    if (vocabulary_init(&tokenizer->vocabulary, size, bytes) < 0)
        return error_set(ret_error, ENOMEM, "out of memory for %zu tokens", size);
    json_object_foreach (vocab, content, value) {
        id = (int32_t)json_integer_value(value);
        if (vocabulary_add(&tokenizer->vocabulary, id, content, strlen(content), true) < 0)
            return error_set(ret_error, EINVAL, "model.vocab: id %d is there twice, the second time as \"%s\"", (int)id,
                             utf8_quoted(content).text);
    }
    return 0;
}

static bool all_white_space(const char *text, size_t length)
{
    size_t step = 1;

    for (size_t at = 0; at < length && step > 0; at += step)
        step = white_space(text + at, length - at);
    return step > 0;
}

static int load_added_token(struct tokenizer *tokenizer, const json_t *vocab, const json_t *json,
                            struct added_token *token, struct error *ret_error)
{
    const char *content = json_string_value(json_object_get(json, "content"));
    const json_t *twin = json_object_get(vocab, content);
    _cleanup_(buffer_free) struct buffer match = {0};
    size_t length = strlen(content);
    int status = 0;

    token->id = (int32_t)json_integer_value(json_object_get(json, "id"));
    if ((status = get_bool(json, "single_word", &token->single_word, ret_error)) < 0 ||
        (status = get_bool(json, "lstrip", &token->lstrip, ret_error)) < 0 ||
        (status = get_bool(json, "rstrip", &token->rstrip, ret_error)) < 0 ||
        (status = get_bool(json, "normalized", &token->normalized, ret_error)) < 0 ||
        (status = get_bool(json, "special", &token->special, ret_error)) < 0)
        return status;
    token->blank = !token->special && all_white_space(content, length);
    token->content = strdup(content);
    if (!token->content || (token->normalized && tokenizer->nfc ? normalizer_nfc(content, length, &match)
                                                                : buffer_append(&match, content, length)) < 0)
        return error_set(ret_error, ENOMEM, "out of memory");
    token->length = match.length;
    token->match = take_pointer(match.bytes);

    if (twin && json_integer_value(twin) != token->id)
        return error_set(ret_error, EINVAL, "has id %d, and id %" JSON_INTEGER_FORMAT " in model.vocab", (int)token->id,
                         json_integer_value(twin));
    if (!twin && vocabulary_add(&tokenizer->vocabulary, token->id, content, length, false) < 0)
        return error_set(ret_error, EINVAL, "has id %d, which is another token's", (int)token->id);
    uint32_t *flags = &tokenizer->vocabulary.tokens[token->id].flags;
    if (*flags & TOKEN_ADDED)
        return error_set(ret_error, EINVAL, "is there twice");
    *flags |= TOKEN_ADDED | (token->special ? TOKEN_SPECIAL : 0) | (token->blank ? TOKEN_BLANK : 0);
    return 0;
}

static int load_added_tokens(struct tokenizer *tokenizer, const json_t *vocab, const json_t *array,
                             struct error *ret_error)
{
    struct added_tokens *added = &tokenizer->added;
    size_t index;
    json_t *value;

    added->tokens = calloc(json_array_size(array) + 1, sizeof *added->tokens);
    if (!added->tokens)
        return error_set(ret_error, ENOMEM, "out of memory");
    json_array_foreach (array, index, value) {
        int status = load_added_token(tokenizer, vocab, value, &added->tokens[added->count++], ret_error);
        if (status < 0)
            return error_prefix(ret_error, status, "added_tokens: \"%s\"",
                                utf8_quoted(json_string_value(json_object_get(value, "content"))).text);
    }
    return added_tokens_index(added, ret_error);
}

/* -- merges -- */

/* Splits one entry, ["a","b"] or "a b". */
static int merge_sides(const json_t *merge, const char **ret_left, size_t *ret_left_length, const char **ret_right)
{
    if (json_is_string(merge)) {
        const char *left = json_string_value(merge), *space = strchr(left, ' ');
        if (!space || strchr(space + 1, ' '))
            return -EINVAL;
        *ret_left = left;
        *ret_left_length = (size_t)(space - left);
        *ret_right = space + 1;
        return 0;
    }
    if (json_array_size(merge) != 2)
        return -EINVAL;
    *ret_left = json_string_value(json_array_get(merge, 0));
    *ret_right = json_string_value(json_array_get(merge, 1));
    if (!*ret_left || !*ret_right)
        return -EINVAL;
    *ret_left_length = strlen(*ret_left);
    return 0;
}

static int load_merge(struct tokenizer *tokenizer, const json_t *json, uint32_t rank, struct buffer *bytes,
                      struct error *ret_error)
{
    const char *left, *right;
    size_t left_length;

    if (merge_sides(json, &left, &left_length, &right) < 0)
        return error_set(ret_error, EINVAL, "is neither [\"a\",\"b\"] nor \"a b\"");
    size_t right_length = strlen(right);
    bytes->length = 0;
    if (buffer_reserve(bytes, left_length + right_length + 1) < 0)
        return error_set(ret_error, ENOMEM, "out of memory");
    ptrdiff_t first = byte_level_decode(left, left_length, bytes->bytes);
    ptrdiff_t second = first <= 0 ? -1 : byte_level_decode(right, right_length, bytes->bytes + first);
    if (first <= 0 || second <= 0)
        return error_set(ret_error, EINVAL, "has a side that is not byte-level characters");
    const struct vocabulary *vocabulary = &tokenizer->vocabulary;
    int32_t left_id = vocabulary_find(vocabulary, bytes->bytes, (size_t)first);
    int32_t right_id = vocabulary_find(vocabulary, bytes->bytes + first, (size_t)second);
    int32_t result = vocabulary_find(vocabulary, bytes->bytes, (size_t)(first + second));
    if (left_id < 0 || right_id < 0 || result < 0)
        return error_set(ret_error, EINVAL, "names a token that is not in model.vocab");
    if (bpe_add(&tokenizer->bpe, left_id, right_id, rank, result) < 0)
        return error_set(ret_error, EINVAL, "is there twice");
    return 0;
}

static int load_merges(struct tokenizer *tokenizer, const json_t *merges, struct error *ret_error)
{
    _cleanup_(buffer_free) struct buffer bytes = {0};
    uint32_t rank = 0;
    size_t index;
    json_t *value;
    int status = check_array(merges, "merges", ret_error);

    if (status < 0)
        return status;
    if (bpe_init(&tokenizer->bpe, json_array_size(merges)) < 0)
        return error_set(ret_error, ENOMEM, "out of memory for %zu merges", json_array_size(merges));
    json_array_foreach (merges, index, value) {
        if (json_is_string(value) && strncmp(json_string_value(value), "#version", 8) == 0)
            continue; /* the first line of an old merges.txt */
        status = load_merge(tokenizer, value, rank++, &bytes, ret_error);
        if (status < 0)
            return error_prefix(ret_error, status, "merges[%zu]", index);
    }
    return 0;
}

/* -- model -- */

static int check_model(const json_t *model, struct error *ret_error)
{
    static const char *const empty[] = {"continuing_subword_prefix", "end_of_word_suffix"};
    const char *type = json_string_value(json_object_get(model, "type"));
    const json_t *dropout = json_object_get(model, "dropout");
    bool byte_fallback;
    int status;

    if (!json_is_object(model))
        return error_set(ret_error, EINVAL, "missing");
    if (!type || strcmp(type, "BPE") != 0)
        return error_set(ret_error, ENOTSUP, "type %s is not supported, only BPE is", utf8_quoted(type).text);
    if (dropout && !json_is_null(dropout) && !(json_is_number(dropout) && json_number_value(dropout) == 0))
        return error_set(ret_error, ENOTSUP, "dropout is not supported");
    for (size_t i = 0; i < sizeof empty / sizeof *empty; i++) {
        const json_t *value = json_object_get(model, empty[i]);
        if (value && !json_is_null(value) && json_string_length(value) + !json_is_string(value) > 0)
            return error_set(ret_error, ENOTSUP, "%s is not supported", empty[i]);
    }
    if ((status = get_bool_or(model, "byte_fallback", false, &byte_fallback, ret_error)) < 0)
        return status;
    if (byte_fallback)
        return error_set(ret_error, ENOTSUP, "byte_fallback is not supported");
    return json_is_object(json_object_get(model, "vocab")) ? 0
                                                           : error_set(ret_error, EINVAL, "vocab must be an object");
}

/* Where every byte of UTF-8 has a token, nothing is unknown and unk_token is never used. */
static int check_unknown(const struct tokenizer *tokenizer, const json_t *model, struct error *ret_error)
{
    const json_t *unknown = json_object_get(model, "unk_token");

    if (!unknown || json_is_null(unknown))
        return 0;
    for (int byte = 0; byte < 0xF5; byte++)
        if (byte != 0xC0 && byte != 0xC1 && tokenizer->vocabulary.byte_ids[byte] < 0)
            return error_set(ret_error, ENOTSUP, "unk_token is not supported where byte 0x%02X has no token", byte);
    return 0;
}

static int load_model(struct tokenizer *tokenizer, const json_t *model, const json_t *added, struct error *ret_error)
{
    json_t *vocab = json_object_get(model, "vocab");
    int status = check_model(model, ret_error);

    if (status == 0)
        status = get_bool_or(model, "ignore_merges", false, &tokenizer->ignore_merges, ret_error);
    if (status == 0 && added && !json_is_null(added))
        status = check_array(added, "added_tokens", ret_error);
    if (status < 0)
        return error_prefix(ret_error, status, "model");
    if ((status = load_vocabulary(tokenizer, vocab, added, ret_error)) < 0 ||
        (status = load_added_tokens(tokenizer, vocab, added, ret_error)) < 0)
        return status;
    if ((status = load_merges(tokenizer, json_object_get(model, "merges"), ret_error)) < 0 ||
        (status = check_unknown(tokenizer, model, ret_error)) < 0)
        return error_prefix(ret_error, status, "model");
    return 0;
}

/* -- normalizer, pre-tokenizer, decoder -- */

static int load_normalizer(struct tokenizer *tokenizer, const json_t *json, int nesting, struct error *ret_error)
{
    const char *type;
    size_t index;
    json_t *value;
    int status;

    if (!json || json_is_null(json))
        return 0;
    if ((status = get_type(json, &type, ret_error)) < 0)
        return status;
    if (strcmp(type, "NFC") == 0) {
        tokenizer->nfc = true;
        return 0;
    }
    if (strcmp(type, "Sequence") != 0 || nesting >= MAX_NESTING)
        return error_set(ret_error, ENOTSUP, "type %s is not supported, only NFC is", utf8_quoted(type).text);
    const json_t *sequence = json_object_get(json, "normalizers");
    if ((status = check_array(sequence, "normalizers", ret_error)) < 0)
        return status;
    json_array_foreach (sequence, index, value)
        if ((status = load_normalizer(tokenizer, value, nesting + 1, ret_error)) < 0)
            return status;
    return 0;
}

static int load_split(struct pretokenizer *pretokenizer, const json_t *json, struct error *ret_error)
{
    const char *behavior = json_string_value(json_object_get(json, "behavior"));
    const json_t *pattern = json_object_get(json, "pattern");
    const json_t *regex = json_object_get(pattern, "Regex"), *string = json_object_get(pattern, "String");
    bool invert = false;
    int status = get_bool(json, "invert", &invert, ret_error);

    if (status < 0)
        return status;
    if (!behavior || (strcmp(behavior, "Isolated") != 0 && strcmp(behavior, "Removed") != 0))
        return error_set(ret_error, ENOTSUP, "behavior %s is not supported, only Isolated and Removed are",
                         utf8_quoted(behavior).text);
    if (json_object_size(pattern) != 1 || json_is_string(regex) == json_is_string(string))
        return error_set(ret_error, EINVAL, "\"pattern\" must be {\"Regex\": ...} or {\"String\": ...}");
    bool removed = strcmp(behavior, "Removed") == 0;
    const json_t *text = regex ? regex : string;
    return pretokenizer_add_split(pretokenizer, json_string_value(text), json_string_length(text), !regex,
                                  removed && !invert, removed && invert, ret_error);
}

static int load_byte_level(struct pretokenizer *pretokenizer, const json_t *json, struct error *ret_error)
{
    bool add_prefix_space = false, use_regex = true;
    int status;

    if ((status = get_bool(json, "add_prefix_space", &add_prefix_space, ret_error)) < 0 ||
        (status = get_bool_or(json, "use_regex", true, &use_regex, ret_error)) < 0)
        return status;
    if (add_prefix_space)
        pretokenizer->prefix_before = pretokenizer->split_count;
    if (!use_regex)
        return 0;
    return pretokenizer_add_split(pretokenizer, PRETOKENIZER_GPT2_PATTERN, sizeof PRETOKENIZER_GPT2_PATTERN - 1, false,
                                  false, false, ret_error);
}

/* ByteLevel must come once and last: it turns text into byte-level characters, which later steps would see. */
static int load_pretokenizer(struct pretokenizer *pretokenizer, const json_t *json, int nesting, bool *byte_level,
                             struct error *ret_error)
{
    const char *type;
    size_t index;
    json_t *value;
    int status = get_type(json, &type, ret_error);

    if (status < 0)
        return status;
    if (*byte_level)
        return error_set(ret_error, ENOTSUP, "type %s after ByteLevel is not supported", utf8_quoted(type).text);
    if (strcmp(type, "ByteLevel") == 0) {
        *byte_level = true;
        status = load_byte_level(pretokenizer, json, ret_error);
    } else if (strcmp(type, "Split") == 0) {
        status = load_split(pretokenizer, json, ret_error);
    } else if (strcmp(type, "Sequence") == 0 && nesting < MAX_NESTING) {
        const json_t *sequence = json_object_get(json, "pretokenizers");
        if ((status = check_array(sequence, "pretokenizers", ret_error)) < 0)
            return status;
        json_array_foreach (sequence, index, value)
            if ((status = load_pretokenizer(pretokenizer, value, nesting + 1, byte_level, ret_error)) < 0)
                return status;
    } else {
        return error_set(ret_error, ENOTSUP, "type %s is not supported, only Sequence, Split and ByteLevel are",
                         utf8_quoted(type).text);
    }
    return error_prefix(ret_error, status, "%s", type);
}

static int load_decoder(const json_t *json, struct error *ret_error)
{
    const char *type = json_string_value(json_object_get(json, "type"));

    if (!type || strcmp(type, "ByteLevel") != 0)
        return error_set(ret_error, ENOTSUP, "decoder: type %s is not supported, only ByteLevel is",
                         utf8_quoted(type).text);
    return 0;
}

static int load(struct tokenizer *tokenizer, const json_t *root, struct error *ret_error)
{
    const json_t *pre_tokenizer = json_object_get(root, "pre_tokenizer");
    bool byte_level = false;
    int status;

    if (!json_is_object(root))
        return error_set(ret_error, EINVAL, "not a JSON object");
    if ((status = load_normalizer(tokenizer, json_object_get(root, "normalizer"), 0, ret_error)) < 0)
        return error_prefix(ret_error, status, "normalizer");
    if ((status = load_pretokenizer(&tokenizer->pretokenizer, pre_tokenizer, 0, &byte_level, ret_error)) < 0)
        return error_prefix(ret_error, status, "pre_tokenizer");
    if (!byte_level)
        return error_set(ret_error, ENOTSUP, "pre_tokenizer: a vocabulary that is not ByteLevel is not supported");
    if ((status = load_decoder(json_object_get(root, "decoder"), ret_error)) < 0)
        return status;
    return load_model(tokenizer, json_object_get(root, "model"), json_object_get(root, "added_tokens"), ret_error);
}

static int open_file(const char *path, struct tokenizer **ret_tokenizer, struct error *ret_error)
{
    _cleanup_free_ char *bytes = NULL;
    _cleanup_(json_decrefp) json_t *root = NULL;
    _cleanup_(tokenizer_closep) struct tokenizer *tokenizer = NULL;
    json_error_t json_error;
    size_t length = 0;

    int status = read_file(path, &bytes, &length, ret_error);
    if (status < 0)
        return status;
    root = json_loadb(bytes, length, JSON_REJECT_DUPLICATES, &json_error);
    if (!root)
        return error_set(ret_error, EINVAL, "%s: line %d, column %d: %s", path, json_error.line, json_error.column,
                         json_error.text);
    tokenizer = calloc(1, sizeof *tokenizer);
    if (!tokenizer)
        return error_set(ret_error, ENOMEM, "%s: out of memory", path);
    tokenizer->pretokenizer.prefix_before = SIZE_MAX;
    status = load(tokenizer, root, ret_error);
    if (status < 0)
        return error_prefix(ret_error, status, "%s", path);
    *ret_tokenizer = take_pointer(tokenizer);
    return 0;
}

int tokenizer_open(const char *path, struct tokenizer **ret_tokenizer, struct error *ret_error)
{
    struct stat stat_path;
    if (stat(path, &stat_path) == 0 && S_ISDIR(stat_path.st_mode)) {
        _cleanup_free_ char *file = NULL;
        if (asprintf(&file, "%s/tokenizer.json", path) >= 0)
            return open_file(file, ret_tokenizer, ret_error);
        file = NULL;
        return error_set(ret_error, ENOMEM, "%s: out of memory", path);
    }
    return open_file(path, ret_tokenizer, ret_error);
}
