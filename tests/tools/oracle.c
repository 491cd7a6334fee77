/* Holds what the engine wrote against an oracle's files. Used by the integration tests; prints the figures and exits 1 on a miss.
 *
 *   oracle tokens ORACLE.safetensors                      the oracle's tokens, decimal, one a line
 *   oracle prompt ORACLE.json                             the tokens of its greedy prompt
 *   oracle greedy ORACLE.json ANSWER.json                 `run --json` against the oracle's continuation, up to the first gap < 0.02
 *   oracle logits GOT.safetensors TENSOR ORACLE.safetensors TENSOR [top1=F] [median=F] [cosine=F exceptions=N]
 *        top1: least share of rows with the same argmax; median: least median cosine; cosine: at least F in all rows but N
 *   oracle follows ANSWER.json LOGITS.safetensors N        each token of a greedy answer is the argmax of `score --logits` of prompt and
 *        answer, whose prompt has N tokens
 */
#include "proto/cleanup.h"
#include "proto/safetensors.h"

#include <jansson.h>
#include <math.h>
#include <stdbool.h>
#include <string.h>

#define GREEDY_GAP 0.02 /* below it, rounding may decide which token comes next */
#define TIE 1e-4        /* of the logits' standard deviation */

static int fail(const char *what)
{
    fprintf(stderr, "oracle: %s\n", what);
    return 1;
}

/* Reads one tensor whole. The caller frees. */
static void *read_tensor(const char *path, const char *name, enum tensor_dtype dtype, struct tensor *ret_tensor)
{
    struct safetensors file;
    struct error error;
    if (safetensors_open(path, &file, &error) < 0) {
        fail(error.text);
        return NULL;
    }
    const struct tensor *tensor = safetensors_find(&file, name);
    void *data = NULL;
    _cleanup_fclose_ FILE *stream = fopen(path, "rb");
    if (tensor && tensor->dtype == dtype && stream && fseek(stream, (long)tensor->offset, SEEK_SET) == 0) {
        data = malloc(tensor->bytes);
        if (data && fread(data, 1, tensor->bytes, stream) != tensor->bytes) {
            free(data);
            data = NULL;
        }
        *ret_tensor = *tensor;
    }
    safetensors_close(&file);
    if (!data)
        fprintf(stderr, "oracle: %s: no tensor %s of the expected type\n", path, name);
    return data;
}

static int print_tokens(const char *path)
{
    struct tensor tensor;
    _cleanup_free_ int32_t *tokens = read_tensor(path, "tokens", DTYPE_I32, &tensor);
    if (!tokens)
        return 1;
    for (uint64_t i = 0; i < tensor.shape[0]; i++)
        printf("%d\n", tokens[i]);
    return 0;
}

static int print_prompt(const char *path)
{
    json_t *oracle = json_load_file(path, 0, NULL);
    const json_t *greedy = json_object_get(oracle, "greedy");
    size_t length = (size_t)json_integer_value(json_object_get(oracle, "prompt_length"));
    for (size_t i = 0; i < length; i++)
        printf("%lld\n", (long long)json_integer_value(json_array_get(greedy, i)));
    json_decref(oracle);
    return length ? 0 : fail("no greedy prompt in that file");
}

static int check_greedy(const char *oracle_path, const char *answer_path)
{
    json_t *oracle = json_load_file(oracle_path, 0, NULL), *answer = json_load_file(answer_path, 0, NULL);
    const json_t *greedy = json_object_get(oracle, "greedy"), *gaps = json_object_get(oracle, "gap");
    const json_t *tokens = json_object_get(answer, "tokens");
    size_t length = (size_t)json_integer_value(json_object_get(oracle, "prompt_length")), equal = 0;
    bool good = json_array_size(tokens) > 0;
    for (size_t i = 0; i < json_array_size(gaps) && good; i++, equal++) {
        if (json_real_value(json_array_get(gaps, i)) < GREEDY_GAP)
            break;
        json_int_t want = json_integer_value(json_array_get(greedy, length + i));
        json_int_t got = i < json_array_size(tokens) ? json_integer_value(json_array_get(tokens, i)) : -1;
        if (want != got) {
            fprintf(stderr, "oracle: token %zu is %lld, want %lld\n", i, (long long)got, (long long)want);
            good = false;
        }
    }
    printf("greedy: %zu tokens equal\n", equal);
    json_decref(oracle);
    json_decref(answer);
    return good ? 0 : 1;
}

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

struct row_figures {
    double cosine;
    bool same_top;
};

static struct row_figures compare_rows(const float *got, const float *want, uint64_t width)
{
    double dot = 0, got2 = 0, want2 = 0, sum = 0;
    uint64_t got_top = 0, want_top = 0;
    for (uint64_t i = 0; i < width; i++) {
        dot += (double)got[i] * (double)want[i];
        got2 += (double)got[i] * (double)got[i];
        want2 += (double)want[i] * (double)want[i];
        sum += (double)want[i];
        got_top = got[i] > got[got_top] ? i : got_top;
        want_top = want[i] > want[want_top] ? i : want_top;
    }
    double mean = sum / (double)width, deviation = sqrt(want2 / (double)width - mean * mean);
    return (struct row_figures){
        .cosine = dot / sqrt(got2 * want2),
        .same_top = got_top == want_top || (double)want[want_top] - (double)want[got_top] <= TIE * deviation,
    };
}

static double option(int argc, char **argv, const char *name, double otherwise)
{
    size_t length = strlen(name);
    for (int i = 0; i < argc; i++)
        if (strncmp(argv[i], name, length) == 0 && argv[i][length] == '=')
            return strtod(argv[i] + length + 1, NULL);
    return otherwise;
}

static int check_logits(int argc, char **argv)
{
    struct tensor got_shape, want_shape;
    _cleanup_free_ float *got = read_tensor(argv[0], argv[1], DTYPE_F32, &got_shape);
    _cleanup_free_ float *want = read_tensor(argv[2], argv[3], DTYPE_F32, &want_shape);
    if (!got || !want)
        return 1;
    uint64_t rows = want_shape.shape[0], width = want_shape.shape[1];
    if (got_shape.shape[0] != rows || got_shape.shape[1] != width || rows == 0)
        return fail("the shapes differ");
    _cleanup_free_ double *cosines = malloc(rows * sizeof *cosines);
    if (!cosines)
        return fail("out of memory");
    double floor = option(argc, argv, "cosine", -1);
    uint64_t same = 0, below = 0;
    for (uint64_t r = 0; r < rows; r++) {
        struct row_figures figures = compare_rows(got + r * width, want + r * width, width);
        cosines[r] = figures.cosine;
        same += figures.same_top;
        below += !(figures.cosine >= floor);
    }
    qsort(cosines, rows, sizeof *cosines, compare_doubles);
    double median = rows % 2 ? cosines[rows / 2] : (cosines[rows / 2 - 1] + cosines[rows / 2]) / 2;
    double top1 = (double)same / (double)rows;
    printf("%s: rows %llu, top-1 %.4f, cosine median %.6f, least %.6f, below %g: %llu\n", argv[3],
           (unsigned long long)rows, top1, median, cosines[0], floor, (unsigned long long)below);
    bool good = top1 >= option(argc, argv, "top1", 0) && median >= option(argc, argv, "median", -1) &&
                (double)below <= option(argc, argv, "exceptions", 0);
    return good ? 0 : fail("that is not close enough");
}

static int check_follows(const char *answer_path, const char *logits_path, const char *prompt_length)
{
    json_t *answer = json_load_file(answer_path, 0, NULL);
    const json_t *tokens = json_object_get(answer, "tokens");
    struct tensor shape;
    _cleanup_free_ float *logits = read_tensor(logits_path, "logits", DTYPE_F32, &shape);
    uint64_t row = strtoull(prompt_length, NULL, 10) - 1, count = json_array_size(tokens);
    bool good = logits && count > 0 && row + count <= shape.shape[0];
    for (uint64_t i = 0; good && i < count; i++, row++) {
        const float *of_row = logits + row * shape.shape[1];
        uint64_t top = 0, got = (uint64_t)json_integer_value(json_array_get(tokens, i));
        for (uint64_t t = 1; t < shape.shape[1]; t++)
            top = of_row[t] > of_row[top] ? t : top;
        good = top == got;
        if (!good)
            fprintf(stderr, "oracle: token %llu is %llu, the logits say %llu\n", (unsigned long long)i,
                    (unsigned long long)got, (unsigned long long)top);
    }
    printf("%llu tokens follow the logits\n", (unsigned long long)count);
    json_decref(answer);
    return good ? 0 : fail("the answer is not what the logits say");
}

int main(int argc, char **argv)
{
    if (argc == 3 && strcmp(argv[1], "tokens") == 0)
        return print_tokens(argv[2]);
    if (argc == 3 && strcmp(argv[1], "prompt") == 0)
        return print_prompt(argv[2]);
    if (argc == 4 && strcmp(argv[1], "greedy") == 0)
        return check_greedy(argv[2], argv[3]);
    if (argc == 5 && strcmp(argv[1], "follows") == 0)
        return check_follows(argv[2], argv[3], argv[4]);
    if (argc >= 6 && strcmp(argv[1], "logits") == 0)
        return check_logits(argc - 2, argv + 2);
    fprintf(stderr, "usage: oracle tokens|prompt|greedy|follows|logits ... (see oracle.c)\n");
    return 2;
}
