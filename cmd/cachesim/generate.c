#include "cmd/cachesim/generate.h"

#include "proto/trace.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#define LAYERS 16u
#define EXPERTS 128u
#define TOP_K 8u
#define PROMPT_ROWS 64u
#define PROMPT_EVERY 50u /* steps */

static const struct {
    const char *name;
    double drift; /* exchanges a layer and step */
    bool prompts;
} kinds[GENERATE_KINDS] = {[GENERATE_ZIPF] = {"zipf", 1.0 / 5, false}, [GENERATE_SCAN] = {"scan", 1.0 / 50, true}};

struct generator {
    unsigned short random[3];          /* erand48's */
    double share[EXPERTS];             /* of the n most popular experts in all uses */
    uint32_t popular[LAYERS][EXPERTS]; /* the experts of a layer, the most popular first */
    bool chosen[EXPERTS][PROMPT_ROWS];
    struct trace_use uses[PROMPT_ROWS * TOP_K];
};

const char *generate_kind_name(enum generate_kind kind)
{
    return (unsigned)kind < GENERATE_KINDS ? kinds[kind].name : "?";
}

static uint32_t below(struct generator *generator, uint32_t limit)
{
    return (uint32_t)(erand48(generator->random) * limit);
}

static void exchange(struct generator *generator, uint32_t layer, uint32_t a, uint32_t b)
{
    uint32_t *popular = generator->popular[layer], kept = popular[a];
    popular[a] = popular[b];
    popular[b] = kept;
}

static void begin(struct generator *generator, uint64_t seed)
{
    double sum = 0;
    memset(generator, 0, sizeof *generator);
    for (int i = 0; i < 3; i++)
        generator->random[i] = (unsigned short)(seed >> 16 * i ^ seed >> 48);
    for (uint32_t n = 0; n < EXPERTS; n++)
        generator->share[n] = sum += 1.0 / (n + 1);
    for (uint32_t n = 0; n < EXPERTS; n++)
        generator->share[n] /= sum;
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        for (uint32_t n = 0; n < EXPERTS; n++)
            generator->popular[layer][n] = n;
        for (uint32_t n = EXPERTS - 1; n > 0; n--)
            exchange(generator, layer, n, below(generator, n + 1));
    }
}

/* An expert by its popularity. */
static uint32_t draw(struct generator *generator, uint32_t layer)
{
    double at = erand48(generator->random);
    uint32_t n = 0;
    while (n < EXPERTS - 1 && generator->share[n] <= at)
        n++;
    return generator->popular[layer][n];
}

static uint32_t choose(struct generator *generator, uint32_t layer, bool prompt)
{
    uint32_t rows = prompt ? PROMPT_ROWS : 1, count = 0;
    memset(generator->chosen, 0, sizeof generator->chosen);
    for (uint32_t row = 0; row < rows; row++) {
        for (uint32_t k = 0; k < TOP_K;) {
            uint32_t expert = prompt ? below(generator, EXPERTS) : draw(generator, layer);
            k += !generator->chosen[expert][row];
            generator->chosen[expert][row] = true;
        }
    }
    for (uint32_t expert = 0; expert < EXPERTS; expert++)
        for (uint32_t row = 0; row < rows; row++)
            if (generator->chosen[expert][row])
                generator->uses[count++] =
                    (struct trace_use){.expert = expert, .row = row, .flags = prompt ? TRACE_PREFILL : 0};
    return count;
}

static int write_steps(struct generator *generator, enum generate_kind kind, uint64_t steps,
                       struct trace_writer *writer, struct error *ret_error)
{
    for (uint64_t step = 0; step < steps; step++) {
        bool prompt = kinds[kind].prompts && step % (PROMPT_EVERY + 1) == PROMPT_EVERY;
        for (uint32_t layer = 0; layer < LAYERS; layer++) {
            struct trace_layer line = {.step = step, .layer = layer, .uses = generator->uses};
            line.count = choose(generator, layer, prompt);
            int status = trace_append(writer, &line, ret_error);
            if (status < 0)
                return status;
            if (erand48(generator->random) < kinds[kind].drift)
                exchange(generator, layer, below(generator, EXPERTS), below(generator, EXPERTS));
        }
    }
    return 0;
}

int generate_trace(enum generate_kind kind, uint64_t seed, uint64_t steps, const char *path, struct error *ret_error)
{
    const struct trace_header header = {.layers = LAYERS, .experts = EXPERTS};
    struct trace_writer *writer;
    struct generator *generator = malloc(sizeof *generator);
    if (!generator)
        return error_set(ret_error, ENOMEM, "%s: out of memory", path);
    int status = trace_create(path, &header, &writer, ret_error);
    if (status == 0) {
        begin(generator, seed);
        status = write_steps(generator, kind, steps, writer, ret_error);
        if (status == 0)
            status = trace_finish(writer, ret_error);
        else
            trace_discard(writer);
    }
    free(generator);
    return status;
}
