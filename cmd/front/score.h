/* A score: how surprised the model is by a text, token after token, each given all before it in its window.
 *
 * The tokens are cut into windows of `window` tokens; each starts afresh and its first token is not scored. Negative
 * log-likelihood in nats, in f64: log(sum over the vocabulary, ids ascending, of exp(x - max)) - (x_target - max),
 * summed in the order of the tokens.
 *
 * Files: `logits` [T, vocab], row i is the prediction after token i. `draft_logits` [T - 1, vocab], row i is the MTP
 * layer's prediction of token i + 2, after tokens i and i + 1; the last row of every window but the last, whose next
 * token belongs to the next window, is NaN. */
#pragma once

#include "cmd/front/row_file.h"
#include "cmd/front/scheduler.h"

struct score {
    struct sequence sequence;                                           /* first: the scheduler's pointer is ours */
    void (*ended)(struct score *score, const struct sequence_end *end); /* the owner's */
    int32_t *tokens;                                                    /* [count] */
    size_t count, start; /* start: of the window that is being computed */
    uint32_t window;
    double nll; /* sum */
    uint64_t scored;
    uint64_t started_ns, ended_ns;
    bool with_logits, with_drafts;
    struct row_file logits, drafts;
    float *unknown;           /* [vocab] NaN, where with_drafts */
    const char *failed_field; /* "logits" or "draft_logits" when its file could not be written */
};

/* Takes over `tokens` (at least 2), also on failure. The files may be NULL. On failure failed_field says which file, if
 * one. */
int score_init(struct score *score, const struct facts *facts, int32_t *tokens, size_t count, uint32_t window,
               const char *logits_path, const char *drafts_path, struct error *ret_error);
void score_free(struct score *score);
