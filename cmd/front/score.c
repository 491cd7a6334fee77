#include "cmd/front/score.h"

#include "cmd/front/clock.h"
#include "compute/math.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static struct score *of_sequence(struct sequence *sequence)
{
    return (struct score *)(void *)sequence;
}

/* Tokens of the window that is being computed. */
static uint32_t window_length(const struct score *score)
{
    size_t left = score->count - score->start;
    return left < score->window ? (uint32_t)left : score->window;
}

static void plan(struct sequence *sequence, uint32_t max_rows, uint32_t max_logit_rows, struct step_plan *ret_plan)
{
    const struct score *score = of_sequence(sequence);
    uint32_t left = window_length(score) - sequence->computed, rows = left;
    if (rows > max_rows)
        rows = max_rows;
    if (rows > max_logit_rows)
        rows = max_logit_rows;
    *ret_plan = (struct step_plan){.first = sequence->computed,
                                   .rows = rows,
                                   .logits = LOGITS_ALL,
                                   .draft = score->with_drafts,
                                   .tokens = score->tokens + score->start + sequence->computed,
                                   .known = left};
}

/* -log softmax(logits)[target], or NaN. */
static double surprise(const float *logits, uint32_t vocab, int32_t target)
{
    float most = logits[0];
    for (uint32_t i = 1; i < vocab; i++)
        if (logits[i] > most)
            most = logits[i];
    double sum = 0;
    for (uint32_t i = 0; i < vocab; i++)
        sum += (double)math_exp(logits[i] - most);
    return log(sum) - (double)(logits[target] - most);
}

static int file_failed(struct score *score, const char *field, int status)
{
    score->failed_field = field;
    return status;
}

/* Row `position` of the window, the token after it being known or not. */
static int take_row(struct score *score, struct scheduler *scheduler, uint32_t row, uint32_t position,
                    struct error *ret_error)
{
    uint32_t vocab = scheduler->facts.config.vocab;
    size_t token = score->start + position;
    bool known = position + 1 < window_length(score);
    const float *logits = scheduler_logits(scheduler, row, false);
    if (known) {
        double nll = surprise(logits, vocab, score->tokens[token + 1]);
        if (!isfinite(nll))
            return error_set(ret_error, EDOM,
                             "the logits after token %zu are not numbers; the container or the memory is damaged",
                             token);
        score->nll += nll;
        score->scored++;
    }
    int status = score->with_logits ? row_file_write(&score->logits, logits, ret_error) : 0;
    if (status < 0)
        return file_failed(score, "logits", status);
    if (score->with_drafts && token + 1 < score->count) {
        status =
            row_file_write(&score->drafts, known ? scheduler_logits(scheduler, row, true) : score->unknown, ret_error);
        if (status < 0)
            return file_failed(score, "draft_logits", status);
    }
    return 0;
}

static int finish_files(struct score *score, struct error *ret_error)
{
    int status = score->with_logits ? row_file_finish(&score->logits, ret_error) : 0;
    if (status < 0)
        return file_failed(score, "logits", status);
    status = score->with_drafts ? row_file_finish(&score->drafts, ret_error) : 0;
    return status < 0 ? file_failed(score, "draft_logits", status) : 1;
}

static int advance(struct sequence *sequence, struct scheduler *scheduler, uint32_t logit_row, uint32_t logit_rows,
                   struct error *ret_error)
{
    struct score *score = of_sequence(sequence);
    for (uint32_t row = 0; row < logit_rows; row++) {
        int status = take_row(score, scheduler, logit_row + row, sequence->computed + row, ret_error);
        if (status < 0)
            return status;
    }
    sequence->computed += sequence->plan.rows;
    uint32_t length = window_length(score);
    if (sequence->computed < length)
        return 0;
    score->start += length;
    sequence->computed = 0;
    return score->start < score->count ? 0 : finish_files(score, ret_error);
}

static void end(struct sequence *sequence, const struct sequence_end *why)
{
    struct score *score = of_sequence(sequence);
    score->ended_ns = clock_ns();
    score->ended(score, why);
}

static const struct sequence_method score_method = {.plan = plan, .advance = advance, .end = end};

int score_init(struct score *score, const struct facts *facts, int32_t *tokens, size_t count, uint32_t window,
               const char *logits_path, const char *drafts_path, struct error *ret_error)
{
    score->tokens = tokens;
    score->count = count;
    score->window = window;
    score->started_ns = clock_ns();
    score->sequence.method = &score_method;
    score->sequence.room = window < count ? window : (uint32_t)count;
    uint64_t vocab = facts->config.vocab;
    if (logits_path) {
        int status = row_file_create(&score->logits, logits_path, "logits", count, vocab, ret_error);
        if (status < 0)
            return file_failed(score, "logits", status);
        score->with_logits = true;
    }
    if (drafts_path) {
        int status = row_file_create(&score->drafts, drafts_path, "draft_logits", count - 1, vocab, ret_error);
        if (status < 0)
            return file_failed(score, "draft_logits", status);
        score->with_drafts = true;
        score->unknown = malloc(vocab * sizeof *score->unknown);
        if (!score->unknown)
            return error_set(ret_error, ENOMEM, "no memory for a row of logits");
        for (uint64_t i = 0; i < vocab; i++)
            score->unknown[i] = NAN;
    }
    return 0;
}

void score_free(struct score *score)
{
    free(score->tokens);
    free(score->unknown);
    row_file_discard(&score->logits);
    row_file_discard(&score->drafts);
}
