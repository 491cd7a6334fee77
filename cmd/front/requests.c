/* The requests that take time: generate, submit and next, score, cancel.
 *
 * A request lives from its arrival until it is answered (submit: until its last piece is taken, it is cancelled, or
 * nobody has asked for SUBMIT_IDLE_SECONDS) and its sequence has left the scheduler. */
#include "cmd/front/front.h"

#include "cmd/front/clock.h"
#include "proto/cleanup.h"

#include <float.h>
#include <inttypes.h>
#include <math.h>
#include <string.h>
#include <sys/random.h>

#define NEXT_WAIT_MS 10000
#define NEXT_WAIT_MAX_MS 600000

static uint64_t count_up(_Atomic uint64_t *counter, uint64_t more)
{
    return atomic_fetch_add_explicit(counter, more, memory_order_relaxed);
}

static struct front_line *counters(struct front *front)
{
    return &front->scheduler.control->front;
}

static struct request *request_new(struct front *front, const struct reply_address *from, enum request_kind kind)
{
    struct request *request = calloc(1, sizeof *request);
    if (!request)
        return NULL;
    request->kind = kind;
    request->front = front;
    snprintf(request->id, sizeof request->id, "%" PRIx64 "-%" PRIu64, front->born, ++front->last_id);
    if (kind == REQUEST_SUBMIT)
        front->submitted++;
    else
        request->waiter = *from;
    request->touched_ns = clock_ns();
    TAILQ_INSERT_TAIL(&front->requests, request, link);
    count_up(&counters(front)->requests, 1);
    return request;
}

static struct sequence *sequence_of(struct request *request)
{
    return request->kind == REQUEST_SCORE ? &request->score.sequence : &request->generation.sequence;
}

/* Frees a request that is over and out of the scheduler. */
static void request_release(struct request *request)
{
    if (!request->over || request->in_scheduler)
        return;
    struct front *front = request->front;
    TAILQ_REMOVE(&front->requests, request, link);
    if (request->kind == REQUEST_SUBMIT)
        front->submitted--;
    if (request->kind == REQUEST_SCORE)
        score_free(&request->score);
    else
        generation_free(&request->generation);
    free(request);
}

/* Sends what the waiter waits for; nobody waits any more. */
static void answer(struct request *request, json_t *object)
{
    struct reply_address to = request->waiter;
    request->waiter = (struct reply_address){0};
    request->touched_ns = clock_ns();
    if (to.connection)
        front_reply(request->front, &to, object);
    else
        json_decref(object);
}

static double rate(uint64_t count, uint64_t ns)
{
    return ns > 0 ? (double)count * 1e9 / (double)ns : 0;
}

static json_t *timing_json(const struct generation *generation)
{
    const struct sequence *sequence = &generation->sequence;
    uint64_t begun = sequence->started_ns ? sequence->started_ns : generation->ended_ns;
    uint64_t first = generation->first_token_ns ? generation->first_token_ns : generation->ended_ns;
    uint32_t answered = generation_answer_length(generation);
    uint64_t uses = sequence->hits + sequence->misses;
    json_t *parts = json_object();
    for (int p = 0; p < STEP_PARTS; p++) {
        char name[32];
        snprintf(name, sizeof name, "%s_s", step_part_name((enum step_part)p));
        json_object_set_new(parts, name, json_real((double)sequence->part_ns[p] / 1e9));
    }
    json_t *timing = json_pack(
        "{s:f, s:f, s:f, s:f, s:f, s:f, s:I, s:I, s:f, s:f, s:f, s:o}", "queue_s",
        (double)(begun - generation->added_ns) / 1e9, "first_token_s", (double)(first - generation->added_ns) / 1e9,
        "total_s", (double)(generation->ended_ns - generation->added_ns) / 1e9, "prompt_tokens_per_s",
        rate(generation->prompt - sequence->cached, first - begun), "answer_tokens_per_s",
        answered > 1 ? rate(answered - 1, generation->ended_ns - first) : 0.0, "hit_rate",
        uses > 0 ? (double)sequence->hits / (double)uses : 1.0, "disk_bytes", (json_int_t)generation->disk_bytes,
        "steps", (json_int_t)sequence->steps, "steps_s", (double)sequence->step_ns / 1e9, "matmul_s",
        (double)sequence->matmul_ns / 1e9, "front_s", (double)generation->own_ns / 1e9, "parts", parts);
    if (generation->ahead[AHEAD_ASKED] > 0) {
        json_t *lookahead = json_object();
        for (int c = 0; c < AHEAD_COUNTS; c++)
            json_object_set_new(lookahead, ahead_count_name((enum ahead_count)c),
                                json_integer((json_int_t)generation->ahead[c]));
        json_object_set_new(timing, "lookahead", lookahead);
    }
    return timing;
}

static json_t *text_json(const struct buffer *buffer)
{
    return json_stringn(buffer->length > 0 ? buffer->bytes : "", buffer->length);
}

/* What nobody has taken yet of reasoning, text and tokens, put into `object`; it counts as taken then. */
static void take_piece(struct generation *generation, json_t *object)
{
    if (generation->tokenizer && generation->reasoning_end >= 0)
        json_object_set_new(object, "reasoning", text_json(&generation->reasoning));
    if (generation->tokenizer)
        json_object_set_new(object, "text", text_json(&generation->text));
    json_t *tokens = json_array();
    uint32_t length = generation_answer_length(generation);
    for (uint32_t i = generation->taken; i < length; i++)
        json_array_append_new(tokens, json_integer(generation->tokens[generation->prompt + i]));
    json_object_set_new(object, "tokens", tokens);
    generation->reasoning.length = 0;
    generation->text.length = 0;
    generation->taken = length;
}

static json_t *generation_json(struct request *request)
{
    struct generation *generation = &request->generation;
    json_t *object = json_pack("{s:b, s:s}", "ok", 1, "id", request->id);
    take_piece(generation, object);
    if (request->kind == REQUEST_SUBMIT)
        json_object_set_new(object, "done", json_true());
    json_object_set_new(object, "finish", json_string(generation->finish));
    json_object_set_new(object, "usage",
                        json_pack("{s:I, s:I, s:I}", "prompt", (json_int_t)generation->prompt, "answer",
                                  (json_int_t)generation_answer_length(generation), "cached",
                                  (json_int_t)generation->sequence.cached));
    json_object_set_new(object, "seed", json_integer((json_int_t)generation->sampler.seed));
    json_object_set_new(object, "timing", timing_json(generation));
    return object;
}

static json_t *score_json(const struct score *score)
{
    double nll = score->scored > 0 ? score->nll / (double)score->scored : 0;
    json_t *perplexity = json_real(exp(nll)); /* NULL where it overflows */
    return json_pack("{s:b, s:I, s:f, s:o, s:f}", "ok", 1, "tokens", (json_int_t)score->scored, "nll", nll,
                     "perplexity", perplexity ? perplexity : json_null(), "seconds",
                     (double)(score->ended_ns - score->started_ns) / 1e9);
}

/* Gives the waiter of a finished request its last answer; then the request is over. */
static void answer_last(struct request *request)
{
    if (request->over || !request->waiter.connection)
        return;
    request->over = true;
    answer(request, request->failed                  ? fault_json(&request->fault)
                    : request->kind == REQUEST_SCORE ? score_json(&request->score)
                                                     : generation_json(request));
}

static void count_answer(struct request *request)
{
    struct front_line *line = counters(request->front);
    count_up(request->failed ? &line->errors : &line->answers, 1);
    if (request->kind == REQUEST_SCORE)
        return;
    const struct generation *generation = &request->generation;
    const struct sequence *sequence = &generation->sequence;
    if (sequence->started_ns == 0 || generation->first_token_ns == 0)
        return;
    count_up(&line->prompt_tokens, generation->prompt - sequence->cached);
    count_up(&line->answer_tokens, generation_answer_length(generation));
    count_up(&line->prompt_ns, generation->first_token_ns - sequence->started_ns);
    count_up(&line->answer_ns, generation->ended_ns - generation->first_token_ns);
}

/* The scheduler has let the request's sequence go. */
static void left_scheduler(struct request *request, const struct sequence_end *end, const char *field)
{
    request->in_scheduler = false;
    if (end->code && strcmp(end->code, "cancelled") != 0) {
        request->failed = true;
        fault_set(&request->fault, field ? "bad_request" : end->code, field, "%s", end->message);
    }
    count_answer(request);
    answer_last(request);
    request_release(request);
}

static struct request *request_of_generation(struct generation *generation)
{
    return (struct request *)(void *)((char *)generation - offsetof(struct request, generation));
}

static void generation_ended(struct generation *generation, const struct sequence_end *end)
{
    left_scheduler(request_of_generation(generation), end, NULL);
}

static void generation_progress(struct generation *generation)
{
    struct request *request = request_of_generation(generation);
    bool something = generation->tokenizer ? generation->text.length + generation->reasoning.length > 0
                                           : generation->taken < generation_answer_length(generation);
    if (request->kind != REQUEST_SUBMIT || !request->waiter.connection || !something)
        return;
    json_t *piece = json_pack("{s:b, s:s}", "ok", 1, "id", request->id);
    take_piece(generation, piece);
    json_object_set_new(piece, "done", json_false());
    answer(request, piece);
}

static void score_ended(struct score *score, const struct sequence_end *end)
{
    struct request *request = (struct request *)(void *)((char *)score - offsetof(struct request, score));
    left_scheduler(request, end, score->failed_field);
}

/* A submitted request that is done but not fetched makes room for a new one. */
static bool make_room(struct front *front)
{
    if (front->submitted < SUBMIT_MAX)
        return true;
    struct request *request;
    TAILQ_FOREACH (request, &front->requests, link)
        if (request->kind == REQUEST_SUBMIT && !request->in_scheduler && !request->waiter.connection) {
            request->over = true;
            request_release(request);
            return true;
        }
    return false;
}

/* Puts the request in the queue. */
static int enqueue(struct request *request, struct fault *ret_fault)
{
    struct error error;
    int status = scheduler_add(&request->front->scheduler, sequence_of(request), &error);
    if (status < 0)
        return fault_set(ret_fault, status == -EBUSY ? "busy" : "too_long", NULL, "%s", error.text);
    request->in_scheduler = true;
    return 0;
}

/* Answers a request that never came so far as the queue. */
static void refuse(struct request *request, const struct reply_address *from, const struct fault *fault)
{
    count_up(&counters(request->front)->errors, 1);
    front_reply_fault(request->front, from, fault);
    request->over = true;
    request_release(request);
}

static int read_sampler(struct front *front, const json_t *message, struct sampler_params *ret_params,
                        struct fault *ret_fault)
{
    double temperature = 0, top_p = 1;
    int64_t seed = 0;
    int seeded = field_integer(message, "seed", 0, INT64_MAX, &seed, ret_fault);
    if (seeded < 0 || field_number(message, "temperature", 0, 100, &temperature, ret_fault) < 0 ||
        field_number(message, "top_p", 0, 1, &top_p, ret_fault) < 0)
        return -EINVAL;
    if (!seeded && temperature > 0) {
        uint32_t random = 0;
        if (getrandom(&random, sizeof random, 0) != sizeof random)
            return fault_set(ret_fault, "model_error", "seed", "seed: the system gives no random number; send one");
        seed = random;
    }
    *ret_params =
        (struct sampler_params){.temperature = (float)temperature,
                                .top_p = top_p > 0 ? fmaxf((float)top_p, FLT_TRUE_MIN) : 0, /* not rounded to 0 */
                                .seed = (uint64_t)seed,
                                .vocab_limit = SIZE_MAX,
                                .allowed = front->allowed};
    struct error error;
    if (sampler_check(ret_params, &error) < 0)
        return fault_set(ret_fault, "bad_request", top_p > 0 ? "temperature" : "top_p", "%s", error.text);
    return 0;
}

static int read_session(const json_t *message, char *ret_name, struct fault *ret_fault)
{
    const char *session;
    size_t length;
    int status = field_string(message, "session", false, &session, &length, ret_fault);
    if (status <= 0)
        return status;
    if (length == 0 || length >= SESSION_NAME_MAX)
        return fault_set(ret_fault, "bad_request", "session", "session: must have 1 to %u bytes", SESSION_NAME_MAX - 1);
    memcpy(ret_name, session, length + 1);
    return 0;
}

static int prepare_generation(struct request *request, const json_t *message, struct fault *ret_fault)
{
    struct front *front = request->front;
    struct generation *generation = &request->generation;
    int64_t max_tokens = INT32_MAX;
    const char *stops[TEXT_STREAM_MAX_STOPS];
    size_t stop_count = 0, count;
    bool thinks;
    _cleanup_free_ int32_t *prompt = NULL;
    if (prompt_tokens(front, message, &prompt, &count, &thinks, ret_fault) < 0 ||
        field_integer(message, "max_tokens", 1, INT32_MAX, &max_tokens, ret_fault) < 0 ||
        read_sampler(front, message, &generation->sampler, ret_fault) < 0 ||
        field_strings(message, "stop", TEXT_STREAM_MAX_STOPS, stops, &stop_count, ret_fault) < 0 ||
        field_bool(message, "ignore_eos", &generation->ignore_eos, ret_fault) < 0 ||
        read_session(message, generation->sequence.session, ret_fault) < 0)
        return -EINVAL;
    if (stop_count > 0 && !api_tokenizer(front, "stop", ret_fault))
        return -EINVAL;
    generation->tokenizer = front->tokenizer;
    generation->reasoning_end = thinks ? chat_reasoning_end(front->template, front->tokenizer) : -1;
    generation->scratch = &front->scratch;
    generation->progress = generation_progress;
    generation->ended = generation_ended;
    struct error error;
    int status = generation_init(generation, &front->scheduler.facts, prompt, count, (uint64_t)max_tokens, stops,
                                 stop_count, &error);
    if (status == -E2BIG) {
        static const char *const fields[] = {"prompt", "tokens", "messages"};
        size_t i = 0;
        while (i < 2 && !json_object_get(message, fields[i]))
            i++;
        return fault_set(ret_fault, "too_long", fields[i], "%s", error.text);
    }
    if (status < 0)
        return fault_set(ret_fault, status == -ENOMEM ? "model_error" : "bad_request",
                         status == -ENOMEM ? NULL : "stop", "%s", error.text);
    return 0;
}

void request_generate(struct front *front, const struct reply_address *from, const json_t *message,
                      enum request_kind kind)
{
    static const char *const names[] = {"op",          "prompt", "tokens", "messages",   "max_tokens",
                                        "temperature", "top_p",  "seed",   "stop",       "raw",
                                        "session",     "system", "think",  "ignore_eos", NULL};
    struct fault fault;
    struct request *request = NULL;
    int status = fields_check(message, names, &fault);
    if (status == 0 && kind == REQUEST_SUBMIT && !make_room(front))
        status =
            fault_set(&fault, "busy", NULL, "%u submitted requests have not been fetched; ask again later", SUBMIT_MAX);
    if (status == 0 && !(request = request_new(front, from, kind)))
        fault_set(&fault, "model_error", NULL, "no memory for a request");
    if (!request) {
        front_reply_fault(front, from, &fault);
        return;
    }
    status = prepare_generation(request, message, &fault);
    if (status == 0)
        status = enqueue(request, &fault);
    if (status < 0)
        refuse(request, from, &fault);
    else if (kind == REQUEST_SUBMIT)
        front_reply(front, from, json_pack("{s:b, s:s}", "ok", 1, "id", request->id));
}

/* The tokens that are to be scored; at least 2. */
static int score_tokens(struct front *front, const json_t *message, int32_t **ret_tokens, size_t *ret_count,
                        struct fault *ret_fault)
{
    const char *text;
    size_t length;
    int has_text = field_string(message, "text", true, &text, &length, ret_fault);
    int has_tokens = has_text < 0 ? 0
                                  : field_tokens(message, "tokens", front->scheduler.facts.config.vocab, ret_tokens,
                                                 ret_count, ret_fault);
    if (has_text < 0 || has_tokens < 0)
        return -EINVAL;
    if (has_text + has_tokens != 1)
        return fault_set(ret_fault, "bad_request", "text", "text: exactly one of text and tokens is needed");
    const char *field = has_text ? "text" : "tokens";
    if (has_text) {
        const struct tokenizer *tokenizer = api_tokenizer(front, "text", ret_fault);
        struct error error;
        if (!tokenizer)
            return -EINVAL;
        if (tokenizer_encode(tokenizer, text, length, ret_tokens, ret_count, &error) < 0)
            return fault_set(ret_fault, "bad_request", "text", "%s", error.text);
        for (size_t i = 0; i < *ret_count; i++)
            if ((uint32_t)(*ret_tokens)[i] >= front->scheduler.facts.config.vocab)
                return fault_set(ret_fault, "bad_request", "text",
                                 "text: its token %d is not in the model's vocabulary", (int)(*ret_tokens)[i]);
    }
    if (*ret_count < 2)
        return fault_set(ret_fault, "bad_request", field,
                         "%s: has %zu tokens, at least 2 are needed: the first is not scored", field, *ret_count);
    return 0;
}

static int score_path(const json_t *message, const char *field, const char **ret_path, struct fault *ret_fault)
{
    int status = field_string(message, field, false, ret_path, NULL, ret_fault);
    if (status == 1 && (*ret_path)[0] != '/')
        return fault_set(ret_fault, "bad_request", field, "%s: must be an absolute path", field);
    return status;
}

static int prepare_score(struct request *request, const json_t *message, struct fault *ret_fault)
{
    struct front *front = request->front;
    const struct facts *facts = &front->scheduler.facts;
    const char *logits = NULL, *drafts = NULL;
    int64_t window = facts->context;
    size_t count = 0;
    _cleanup_free_ int32_t *tokens = NULL;
    if (score_path(message, "logits", &logits, ret_fault) < 0 ||
        score_path(message, "draft_logits", &drafts, ret_fault) < 0 ||
        field_integer(message, "context", 2, facts->context, &window, ret_fault) < 0 ||
        score_tokens(front, message, &tokens, &count, ret_fault) < 0)
        return -EINVAL;
    if (drafts && facts->config.mtp_layers == 0)
        return fault_set(ret_fault, "bad_request", "draft_logits", "draft_logits: the model has no MTP layer");
    if (logits && drafts && strcmp(logits, drafts) == 0)
        return fault_set(ret_fault, "bad_request", "draft_logits", "draft_logits: names the same file as logits");
    request->score.ended = score_ended;
    struct error error;
    int status =
        score_init(&request->score, facts, take_pointer(tokens), count, (uint32_t)window, logits, drafts, &error);
    if (status < 0)
        return fault_set(ret_fault, request->score.failed_field ? "bad_request" : "model_error",
                         request->score.failed_field, "%s", error.text);
    return 0;
}

void request_score(struct front *front, const struct reply_address *from, const json_t *message)
{
    static const char *const names[] = {"op", "text", "tokens", "context", "logits", "draft_logits", NULL};
    struct fault fault;
    struct request *request = NULL;
    int status = fields_check(message, names, &fault);
    if (status == 0 && !(request = request_new(front, from, REQUEST_SCORE)))
        fault_set(&fault, "model_error", NULL, "no memory for a request");
    if (!request) {
        front_reply_fault(front, from, &fault);
        return;
    }
    status = prepare_score(request, message, &fault);
    if (status == 0)
        status = enqueue(request, &fault);
    if (status < 0)
        refuse(request, from, &fault);
}

/* The request that the message's `id` names. */
static struct request *find(struct front *front, const json_t *message, const char *const *names,
                            struct fault *ret_fault)
{
    const char *id;
    if (fields_check(message, names, ret_fault) < 0)
        return NULL;
    int status = field_string(message, "id", false, &id, NULL, ret_fault);
    if (status < 0)
        return NULL;
    struct request *request;
    TAILQ_FOREACH (request, &front->requests, link)
        if (status == 1 && !request->over && strcmp(request->id, id) == 0)
            return request;
    if (status == 0)
        fault_set(ret_fault, "bad_request", "id", "id: is missing");
    else
        fault_set(ret_fault, "bad_request", "id",
                  "id: no request \"%.40s\" is here; it was answered, cancelled, or not asked for in %d s", id,
                  SUBMIT_IDLE_SECONDS);
    return NULL;
}

/* An answer to a `next` that has nothing to say. */
static json_t *empty_piece(const struct request *request)
{
    json_t *piece = json_pack("{s:b, s:s}", "ok", 1, "id", request->id);
    if (request->generation.tokenizer && request->generation.reasoning_end >= 0)
        json_object_set_new(piece, "reasoning", json_string(""));
    if (request->generation.tokenizer)
        json_object_set_new(piece, "text", json_string(""));
    json_object_set_new(piece, "tokens", json_array());
    json_object_set_new(piece, "done", json_false());
    return piece;
}

void request_next(struct front *front, const struct reply_address *from, const json_t *message)
{
    static const char *const names[] = {"op", "id", "wait_ms", NULL};
    struct fault fault;
    int64_t wait_ms = NEXT_WAIT_MS;
    struct request *request = find(front, message, names, &fault);
    if (request && request->kind != REQUEST_SUBMIT) {
        fault_set(&fault, "bad_request", "id", "id: %s is answered whole; only a submitted request comes in pieces",
                  request->id);
        request = NULL;
    }
    if (!request || field_integer(message, "wait_ms", 0, NEXT_WAIT_MAX_MS, &wait_ms, &fault) < 0) {
        front_reply_fault(front, from, &fault);
        return;
    }
    if (request->waiter.connection) /* the newest one waits on */
        answer(request, empty_piece(request));
    request->waiter = *from;
    request->touched_ns = clock_ns();
    request->wait_until_ns = request->touched_ns + (uint64_t)wait_ms * 1000000;
    if (request->failed || request->generation.finish) {
        answer_last(request);
        request_release(request);
        return;
    }
    generation_progress(&request->generation);
    if (request->waiter.connection && wait_ms == 0)
        answer(request, empty_piece(request));
}

/* Takes a request out of the queue or off the workers. What it said so far is its answer. */
static void stop(struct request *request)
{
    if (request->kind == REQUEST_SCORE) {
        request->failed = true;
        fault_set(&request->fault, "bad_request", "id", "the score was cancelled");
    } else if (!request->generation.finish) {
        request->generation.finish = "cancelled";
        request->generation.ended_ns = clock_ns();
    }
    answer_last(request);
    if (request->in_scheduler)
        scheduler_cancel(&request->front->scheduler, sequence_of(request)); /* may free it */
    else
        request_release(request);
}

void request_cancel(struct front *front, const struct reply_address *from, const json_t *message)
{
    static const char *const names[] = {"op", "id", NULL};
    struct fault fault;
    struct request *request = find(front, message, names, &fault);
    if (!request) {
        front_reply_fault(front, from, &fault);
        return;
    }
    front_reply(front, from, json_pack("{s:b, s:s}", "ok", 1, "id", request->id));
    stop(request);
}

bool request_is_waiting(const struct front *front, const struct reply_address *from)
{
    const struct request *request;
    TAILQ_FOREACH (request, &front->requests, link)
        if (request->waiter.connection == from->connection && request->waiter.header_bytes == from->header_bytes &&
            memcmp(request->waiter.header, from->header, from->header_bytes) == 0)
            return true;
    return false;
}

/* Nobody will ask for it any more. */
static void abandon(struct request *request)
{
    request->waiter = (struct reply_address){0};
    request->over = true;
    stop(request);
}

void request_connection_closed(struct front *front, uint32_t connection)
{
    struct request *request = TAILQ_FIRST(&front->requests);
    while (request) {
        struct request *next = TAILQ_NEXT(request, link);
        if (request->waiter.connection == connection)
            abandon(request);
        request = next;
    }
}

int request_expire(struct front *front)
{
    uint64_t now = clock_ns(), earliest = UINT64_MAX;
    struct request *request = TAILQ_FIRST(&front->requests);
    while (request) {
        struct request *next = TAILQ_NEXT(request, link);
        if (request->kind == REQUEST_SUBMIT && !request->over) {
            if (request->waiter.connection && request->wait_until_ns <= now)
                answer(request, empty_piece(request));
            uint64_t idle_until = request->touched_ns + (uint64_t)SUBMIT_IDLE_SECONDS * 1000000000;
            uint64_t until = request->waiter.connection ? request->wait_until_ns : idle_until;
            if (until <= now)
                abandon(request);
            else if (until < earliest)
                earliest = until;
        }
        request = next;
    }
    if (earliest == UINT64_MAX)
        return -1;
    return (int)((earliest - now) / 1000000) + 1;
}

void request_close_all(struct front *front)
{
    struct request *request = TAILQ_FIRST(&front->requests);
    while (request) {
        struct request *next = TAILQ_NEXT(request, link);
        request->over = true;
        request->in_scheduler = false;
        request_release(request);
        request = next;
    }
}
