/* A generation: a sequence that is given a prompt and answers it, token after token. */
#pragma once

#include "cmd/front/buffer.h"
#include "cmd/front/sampler.h"
#include "cmd/front/scheduler.h"
#include "cmd/front/text_stream.h"
#include "cmd/front/tokenizer.h"

struct generation {
    struct sequence sequence; /* first: the scheduler's pointer is ours */
    /* its owner's, before generation_init */
    const struct tokenizer *tokenizer; /* NULL: a model of ids alone */
    struct sampler_params sampler;
    struct sampler_scratch *scratch;
    int32_t reasoning_end; /* the answer begins with reasoning, which ends with this token; -1: it has none */
    bool ignore_eos;       /* the model's stop tokens are tokens like others: for measuring */
    void (*progress)(struct generation *generation); /* there is a new token */
    void (*ended)(struct generation *generation, const struct sequence_end *end);
    /* its own */
    int32_t *tokens; /* [sequence.room]: the prompt, then the answer */
    uint32_t prompt;
    bool reasoned;                        /* reasoning_end has come, or there is no reasoning */
    struct text_stream *reasoning_stream; /* has no stop strings: those are for the answer */
    struct text_stream *stream;
    struct buffer reasoning, text;               /* of the answer, what nobody has taken yet */
    uint32_t taken;                              /* tokens of the answer that somebody has taken */
    const char *finish;                          /* "stop" or "length"; NULL while it goes on */
    uint64_t added_ns, first_token_ns, ended_ns; /* CLOCK_MONOTONIC, 0: not yet */
    uint64_t own_ns;                             /* of the front, between its steps */
    uint64_t disk_bytes;                         /* that iod read while this ran */
    uint64_t ahead[AHEAD_COUNTS];                /* what looking ahead was good for while this ran */
};

/* Takes `prompt` (copied, at least one token). The answer has at most max_tokens tokens and ends with the context at
 * the latest. -E2BIG when the context leaves no room for an answer; -ENOMEM; what text_stream_new says of `stops`. */
int generation_init(struct generation *generation, const struct facts *facts, const int32_t *prompt, size_t count,
                    uint64_t max_tokens, const char *const *stops, size_t stop_count, struct error *ret_error);
void generation_free(struct generation *generation);

static inline uint32_t generation_answer_length(const struct generation *generation)
{
    return generation->sequence.length - generation->prompt;
}
