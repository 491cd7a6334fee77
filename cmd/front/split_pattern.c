#include "cmd/front/split_pattern.h"

#include <ctype.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "cmd/front/buffer.h"

#define MAX_DEPTH 64

/* White_Space of Unicode, which is \s to Oniguruma and to Rust's regex. PCRE2 counts U+180E too. */
#define SPACE                                                                                                          \
    "\\x{9}-\\x{d}\\x{20}\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}\\x{205f}\\x{3000}"
#define NOT_SPACE                                                                                                      \
    "\\x{0}-\\x{8}\\x{e}-\\x{1f}\\x{21}-\\x{84}\\x{86}-\\x{9f}\\x{a1}-\\x{167f}\\x{1681}-\\x{1fff}\\x{200b}-\\x{2027}" \
    "\\x{202a}-\\x{202e}\\x{2030}-\\x{205e}\\x{2060}-\\x{2fff}\\x{3001}-\\x{10ffff}"

struct translation {
    const char *pattern;
    size_t length, at;
    struct buffer *out;
    bool caseless[MAX_DEPTH]; /* for each open group: is it, or a group around it, (?i: */
    size_t depth;
    bool in_class;
    char last_literal; /* lower case letter just before, inside (?i:; else 0 */
    struct error *error;
};

static int refuse(struct translation *t, const char *what)
{
    return error_set(t->error, ENOTSUP, "the pattern uses %s at byte %zu, which is not supported", what, t->at);
}

static int put(struct translation *t, const char *text, size_t length)
{
    return buffer_append(t->out, text, length) < 0 ? error_set(t->error, ENOMEM, "out of memory") : 0;
}

static int put_string(struct translation *t, const char *text)
{
    return put(t, text, strlen(text));
}

/* The character `ahead` places on, or 0 past the end. */
static char peek(const struct translation *t, size_t ahead)
{
    return ahead < t->length - t->at ? t->pattern[t->at + ahead] : 0;
}

static int copy(struct translation *t, size_t count)
{
    int status = put(t, t->pattern + t->at, count);
    t->at += count;
    return status;
}

static bool is_general_category(const char *name, size_t length)
{
    static const char categories[] =
        " L Lu Ll Lt Lm Lo M Mn Mc Me N Nd Nl No P Pc Pd Ps Pe Pi Pf Po S Sm Sc Sk So Z Zs Zl Zp C Cc Cf Co ";
    char word[5];

    if (length < 1 || length > 2)
        return false;
    snprintf(word, sizeof word, " %.*s ", (int)length, name);
    return strstr(categories, word) != NULL;
}

/* \p{Lu} stays; \p{Han} is the script to Oniguruma, but the script extensions to PCRE2. */
static int property(struct translation *t)
{
    size_t start = 3, end;
    bool negated = peek(t, 1) == 'P';

    if (peek(t, 2) != '{')
        return refuse(t, "\\p without braces");
    if (peek(t, start) == '^') {
        negated = !negated;
        start++;
    }
    for (end = start; isalpha((unsigned char)peek(t, end)) || peek(t, end) == '_'; end++)
        ;
    if (end == start || peek(t, end) != '}')
        return refuse(t, "a malformed \\p{...}");
    if (t->caseless[t->depth])
        return refuse(t, "\\p inside (?i:...)");
    const char *name = t->pattern + t->at + start;
    int status = put_string(t, negated ? "\\P{" : "\\p{");
    if (status == 0 && !is_general_category(name, end - start))
        status = put_string(t, "sc:");
    if (status == 0)
        status = put(t, name, end - start);
    t->at += end + 1;
    return status < 0 ? status : put_string(t, "}");
}

/* \x{H...} or \uHHHH */
static int code_point(struct translation *t)
{
    bool braces = peek(t, 1) == 'x';
    size_t start = braces ? 3 : 2, end;
    uint32_t value = 0;
    char text[16];

    for (end = start; isxdigit((unsigned char)peek(t, end)) && end < start + (braces ? 6 : 4); end++)
        value = value * 16 + (uint32_t)(isdigit((unsigned char)peek(t, end)) ? peek(t, end) - '0'
                                                                             : (peek(t, end) | 0x20) - 'a' + 10);
    if (end == start || (braces ? peek(t, 2) != '{' || peek(t, end) != '}' : end != start + 4))
        return refuse(t, "a character code that is not \\x{H...} or \\uHHHH");
    if (t->caseless[t->depth] && value > 0x7F)
        return refuse(t, "a character outside ASCII inside (?i:...)");
    t->at += end + (braces ? 1 : 0);
    snprintf(text, sizeof text, "\\x{%x}", value);
    return put_string(t, text);
}

static int escape(struct translation *t)
{
    char c = peek(t, 1), name[] = "\\?";
    const char *text = NULL;

    t->last_literal = 0;
    switch (c) {
    case 's': text = t->in_class ? SPACE : "[" SPACE "]"; break;
    case 'S': text = t->in_class ? NOT_SPACE : "[^" SPACE "]"; break;
    case 'd': text = "\\p{Nd}"; break;
    case 'D': text = "\\P{Nd}"; break;
    case 'n': text = "\\x{a}"; break;
    case 'r': text = "\\x{d}"; break;
    case 't': text = "\\x{9}"; break;
    case 'f': text = "\\x{c}"; break;
    case 'v': text = "\\x{b}"; break; /* one character to Oniguruma, a class to PCRE2 */
    case 'p':
    case 'P': return property(t);
    case 'x':
    case 'u': return code_point(t);
    default: break;
    }
    if (text) {
        t->at += 2;
        return put_string(t, text);
    }
    if (c >= 0x20 && c < 0x7F && !isalnum((unsigned char)c))
        return copy(t, 2); /* an escaped punctuation mark or space is itself */
    name[1] = c > 0x20 && c < 0x7F ? c : '?';
    return refuse(t, name);
}

static int open_group(struct translation *t)
{
    static const char *const kinds[] = {"(?:", "(?=", "(?!", "(?>", "(?<=", "(?<!", "(?i:"};
    size_t length = 1, found = 0;

    if (peek(t, 1) == '*')
        return refuse(t, "(*...)");
    if (peek(t, 1) == '?') {
        for (; found < sizeof kinds / sizeof *kinds; found++) {
            length = strlen(kinds[found]);
            if (length <= t->length - t->at && memcmp(t->pattern + t->at, kinds[found], length) == 0)
                break;
        }
        if (found == sizeof kinds / sizeof *kinds)
            return refuse(t, "a group other than (...), (?:, (?=, (?!, (?<=, (?<!, (?> and (?i:");
    }
    if (t->depth + 1 >= MAX_DEPTH)
        return refuse(t, "more than 63 nested groups");
    bool caseless = t->caseless[t->depth] || (length == 4 && t->pattern[t->at + 2] == 'i');
    t->caseless[++t->depth] = caseless;
    return copy(t, length);
}

/* {n} {n,} {n,m}: what follows must mean the same to both. */
static int interval(struct translation *t)
{
    size_t end = 1;
    bool comma = false;

    while (isdigit((unsigned char)peek(t, end)))
        end++;
    if (end > 1 && peek(t, end) == ',') {
        comma = true;
        for (end++; isdigit((unsigned char)peek(t, end)); end++)
            ;
    }
    if (end == 1 || peek(t, end) != '}')
        return refuse(t, "{ other than {n}, {n,} or {n,m}");
    if (peek(t, end + 1) == '+' || (peek(t, end + 1) == '?' && !comma))
        return refuse(t, "{...}+ or {n}?"); /* a second repetition to Oniguruma; possessive or lazy to PCRE2 */
    return copy(t, end + 1);
}

static int literal(struct translation *t)
{
    static const char *const folds[] = {"ss", "st", "ff", "fi", "fl"};
    char c = t->pattern[t->at], lower = (char)tolower((unsigned char)c);

    if (t->caseless[t->depth]) {
        if ((unsigned char)c > 0x7F)
            return refuse(t, "a character outside ASCII inside (?i:...)");
        /* Oniguruma also finds one character that folds to two letters, such as a sharp s for ss. */
        for (size_t i = 0; i < sizeof folds / sizeof *folds && !t->in_class; i++)
            if (t->last_literal == folds[i][0] && lower == folds[i][1])
                return refuse(t, "ss, st, ff, fi or fl inside (?i:...)");
    }
    t->last_literal = lower;
    return copy(t, 1);
}

static int class_step(struct translation *t)
{
    char c = peek(t, 0);

    if (c == '\\')
        return escape(t);
    if (c == '[')
        return refuse(t, "[ inside a class");
    if (c == '&' && peek(t, 1) == '&')
        return refuse(t, "&& inside a class");
    if (c == ']') {
        t->in_class = false;
        t->last_literal = 0;
        return copy(t, 1);
    }
    return literal(t);
}

static int step(struct translation *t)
{
    char c = peek(t, 0);

    if (c == '\\')
        return escape(t);
    if (strchr("[(){*+?|^$.", c) == NULL || c == 0)
        return literal(t);
    t->last_literal = 0;
    switch (c) {
    case '[':
        t->in_class = true;
        if (peek(t, peek(t, 1) == '^' ? 2 : 1) == ']')
            return refuse(t, "an empty class");
        return copy(t, peek(t, 1) == '^' ? 2 : 1);
    case '(': return open_group(t);
    case ')':
        if (t->depth == 0)
            return refuse(t, "an unmatched )");
        t->depth--;
        return copy(t, 1);
    case '{': return interval(t);
    default: return copy(t, 1);
    }
}

int split_pattern_translate(const char *pattern, size_t length, struct buffer *out, struct error *ret_error)
{
    struct translation t = {.pattern = pattern, .length = length, .out = out, .error = ret_error};

    while (t.at < length) {
        int status = t.in_class ? class_step(&t) : step(&t);
        if (status < 0)
            return status;
    }
    if (t.in_class || t.depth > 0)
        return refuse(&t, "an unclosed class or group");
    return 0;
}
