#include "cmd/front/generation.h"

#include "cmd/front/clock.h"
#include "proto/cleanup.h"

#include <inttypes.h>

static struct generation *of_sequence(struct sequence *sequence)
{
    return (struct generation *)(void *)sequence;
}

static void plan(struct sequence *sequence, uint32_t max_rows, uint32_t max_logit_rows, struct step_plan *ret_plan)
{
    (void)max_logit_rows; /* one at most, and one is always left */
    uint32_t left = sequence->length - sequence->computed;
    uint32_t rows = left < max_rows ? left : max_rows;
    *ret_plan = (struct step_plan){.first = sequence->computed,
                                   .rows = rows,
                                   .logits = rows == left ? LOGITS_LAST : LOGITS_NONE,
                                   .tokens = sequence->tokens + sequence->computed,
                                   .known = left};
}

static bool is_stop(const struct facts *facts, int32_t token)
{
    for (uint32_t i = 0; i < facts->config.stop_count; i++)
        if (facts->config.stops[i] == token)
            return true;
    return false;
}

/* What the stream still held back. 1: a stop string is complete. */
static int end_stream(struct text_stream *stream, struct buffer *buffer, struct error *ret_error)
{
    const char *text;
    size_t shown;
    int status = text_stream_finish(stream, &text, &shown, ret_error);
    if (status >= 0 && buffer_append(buffer, text, shown) < 0)
        return error_set(ret_error, ENOMEM, "no memory for the text of the answer");
    return status;
}

/* Adds the token's bytes to reasoning or text. 1: a stop string is complete. */
static int add_text(struct generation *generation, int32_t token, struct error *ret_error)
{
    if (!generation->tokenizer)
        return 0;
    if (!generation->reasoned && token == generation->reasoning_end) {
        generation->reasoned = true;
        return end_stream(generation->reasoning_stream, &generation->reasoning, ret_error);
    }
    if (tokenizer_is_special(generation->tokenizer, token))
        return 0;
    size_t length, shown;
    const char *text, *bytes = tokenizer_token_bytes(generation->tokenizer, token, &length);
    if (!bytes)
        return 0;
    int status = text_stream_feed(generation->reasoned ? generation->stream : generation->reasoning_stream, bytes,
                                  length, &text, &shown, ret_error);
    if (status >= 0 &&
        buffer_append(generation->reasoned ? &generation->text : &generation->reasoning, text, shown) < 0)
        return error_set(ret_error, ENOMEM, "no memory for the text of the answer");
    return status;
}

static int finish(struct generation *generation, const char *why, struct error *ret_error)
{
    generation->finish = why;
    generation->ended_ns = clock_ns();
    if (!generation->stream)
        return 1;
    int status = generation->reasoned ? end_stream(generation->stream, &generation->text, ret_error)
                                      : end_stream(generation->reasoning_stream, &generation->reasoning, ret_error);
    if (status == 1)
        generation->finish = "stop";
    return status < 0 ? status : 1;
}

static int advance(struct sequence *sequence, struct scheduler *scheduler, uint32_t logit_row, uint32_t logit_rows,
                   struct error *ret_error)
{
    struct generation *generation = of_sequence(sequence);
    const struct facts *facts = &scheduler->facts;
    sequence->computed += sequence->plan.rows;
    generation->disk_bytes =
        atomic_load_explicit(&scheduler->control->iod.load_bytes, memory_order_relaxed) - sequence->disk_bytes_before;
    for (int c = 0; c < AHEAD_COUNTS; c++)
        generation->ahead[c] = atomic_load_explicit(&scheduler->control->workers[0].ahead[c], memory_order_relaxed) -
                               sequence->ahead_before[c];
    generation->own_ns =
        atomic_load_explicit(&scheduler->control->front.own_ns, memory_order_relaxed) - sequence->own_ns_before;
    if (logit_rows == 0)
        return 0;

    const float *logits = scheduler_logits(scheduler, logit_row, false);
    int32_t token =
        sampler_pick(&generation->sampler, sequence->length, logits, facts->config.vocab, generation->scratch);
    if (token == -EDOM)
        return error_set(ret_error, EDOM,
                         "the logits after %" PRIu32 " tokens are not numbers; the container or the memory is damaged",
                         sequence->length);
    if (token < 0)
        return error_set(ret_error, -token, "no memory to choose a token");
    if (generation->first_token_ns == 0)
        generation->first_token_ns = clock_ns();
    if (!generation->ignore_eos && is_stop(facts, token))
        return finish(generation, "stop", ret_error);

    generation->tokens[sequence->length++] = token;
    int status = add_text(generation, token, ret_error);
    if (status == 1)
        return finish(generation, "stop", ret_error);
    if (status == 0 && sequence->length == sequence->room)
        return finish(generation, "length", ret_error);
    if (status == 0)
        generation->progress(generation);
    return status;
}

static void end(struct sequence *sequence, const struct sequence_end *why)
{
    struct generation *generation = of_sequence(sequence);
    if (generation->ended_ns == 0)
        generation->ended_ns = clock_ns();
    generation->ended(generation, why);
}

static const struct sequence_method generation_method = {.plan = plan, .advance = advance, .end = end};

int generation_init(struct generation *generation, const struct facts *facts, const int32_t *prompt, size_t count,
                    uint64_t max_tokens, const char *const *stops, size_t stop_count, struct error *ret_error)
{
    if (count >= facts->context)
        return error_set(ret_error, E2BIG,
                         "the prompt has %zu tokens, a context of %" PRIu32
                         " leaves no room for an answer; raise `context`",
                         count, facts->context);
    uint32_t left = facts->context - (uint32_t)count;
    struct sequence *sequence = &generation->sequence;
    sequence->method = &generation_method;
    sequence->room = (uint32_t)count + (max_tokens < left ? (uint32_t)max_tokens : left);
    generation->tokens = malloc(sequence->room * sizeof *generation->tokens);
    if (!generation->tokens)
        return error_set(ret_error, ENOMEM, "no memory for %" PRIu32 " tokens", sequence->room);
    memcpy(generation->tokens, prompt, count * sizeof *prompt);
    generation->prompt = (uint32_t)count;
    sequence->tokens = generation->tokens;
    sequence->length = (uint32_t)count;
    generation->added_ns = clock_ns();
    generation->reasoned = generation->reasoning_end < 0;
    if (!generation->tokenizer)
        return 0;
    int status = generation->reasoned ? 0 : text_stream_new(NULL, 0, &generation->reasoning_stream, ret_error);
    return status < 0 ? status : text_stream_new(stops, stop_count, &generation->stream, ret_error);
}

void generation_free(struct generation *generation)
{
    free(generation->tokens);
    text_stream_free(generation->reasoning_stream);
    text_stream_free(generation->stream);
    buffer_free(&generation->reasoning);
    buffer_free(&generation->text);
}
