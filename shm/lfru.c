/* LFRU, least frequently and recently used: which expert is given up.
 *
 * Goals
 * - An expert is worth what it will save: the chance that the next step uses it. Frequency tells that where the work stays
 *   the same, recency where it drifts, and neither may be a setting.
 * - What was evicted is remembered, so that an expert which comes back again and again is known to do so.
 * - A long prompt sweeps over nearly all experts of every layer once. It must not flush what the answers live on.
 * - Time that passes idle changes nothing: the clock is the evictions.
 * - The cost of an eviction does not depend on the size of the pool.
 *
 * Heat
 * An expert's heat is the sum of its uses, each halved with every half-life since: LRFU's combined recency and frequency
 * (Lee et al. 2001). A short half-life is LRU, a long one LFU. The heat of all experts decays alike, so only a use changes
 * their order: what is kept is log2(heat) + age of the clock, which stands still while `now` moves away from it. Every
 * expert has its heat, resident or not; a ghost is an expert that has only that, so the model bounds the ghosts.
 *
 * The clock
 * It ticks by evictions, since only these cost something: a pool that hits remembers for long, one that misses forgets
 * fast. A use moves it a little (a 64th of an eviction), so that what was hot in hours without an eviction does not stay
 * for ever.
 *
 * Which half-life
 * Nothing says beforehand, and it differs by a factor of hundreds between works and between sizes of the pool. So several
 * are kept: ten estimators, of five half-lives (a 16th of the model's experts to 32 times as many, in evictions), each
 * with a prompt's use counted in full and as a half. At each use every estimator is asked whether the expert would have
 * been resident, had the pool held the `capacity` hottest by this estimator: a histogram of all heats, with a mark above
 * which there are just so many, answers in constant time. What it would have missed lately gives it its weight: the
 * exponentially weighted forecaster (Littlestone and Warmuth 1994). So the best decides where it is clearly better, and
 * those that are about as good are averaged, which is better than each of them.
 *
 * The rank
 * The weighted mean of the logarithms, so that the order stands still between two weighings, which come as many evictions
 * apart as the pool has slots. An expert that its layer used in the last step is used again oftener than its frequency
 * says, and from the second step on hardly more: it ranks higher until its layer's next turn. How much differs between
 * experts by far: some come for several tokens of a word, some once an answer. So each has its own chance of a use in the
 * next step as well, counted apart after an answer's use and after a prompt's: answers begin alike, and what the prompt's
 * many rows used says little about them.
 *
 * The victim
 * Layers come in a circle, so an expert of the layer just passed is needed later than an equally warm one of the next
 * layer. The victim is the expert that is probably waited for longest: 1 / (its uses a step), and the way until its
 * layer's turn. Where a prompt uses most experts of every layer, those of the layers that it has not reached yet are
 * needed at once, however cold they are: the share of this layer's experts that the prompt uses shortens their wait.
 * Each layer knows its coldest resident; only these are compared, and a layer looks for it anew when it has lost it. The
 * cost is bounded by the number of layers and the experts of one.
 *
 * The pool is one for all layers: a layer whose uses concentrate needs fewer slots for the same hits. */
#include "shm/lfru.h"

#include <math.h>
#include <stdlib.h>

/* log2(heat) + age, in fixed point. */
#define OCTAVE_BITS 24
#define OCTAVE (INT64_C(1) << OCTAVE_BITS)
#define ABSENT INT64_MAX      /* the rank of what cannot be given up */
#define NEVER 0               /* of an expert that was not used yet */
#define EPOCH (1000 * OCTAVE) /* `now` at the beginning: what has any heat is above 0 */
#define OCTAVES_BELOW 40      /* colder than that is the same as unused */
#define OCTAVES_ABOVE 23      /* hotter than that is not counted */
#define PREFILL_OCTAVES 1     /* a prompt's use is half of an answer's, where it counts low */
#define GUESS_OCTAVES 2       /* a guess ranks at a quarter of its heat */
#define AGAIN_WEIGHT 2.0      /* a use in the last turn: worth 1 + so many times the chance of the next */

#define TICKS_EVICTION 64u
#define TICKS_USE 1u

/* log2(1 + 2^-x), x in 64ths; beyond these octaves the fixed point holds nothing of it. */
#define SUM_BITS (OCTAVE_BITS - 6)
#define SUM_ENTRIES (26u * 64)

/* The histogram: a ring of 16 grades an octave. */
#define GRADE_BITS (OCTAVE_BITS - 4)
#define GRADES (64u * 16)

#define HALF_LIVES 5u
#define ESTIMATORS (2 * HALF_LIVES)
#define ESTIMATOR_HEAT 3u /* the one that lfru_heat tells of: 4, prompts low */
#define WEIGHT_BITS 10    /* weights are in parts of 1 << WEIGHT_BITS, which is their sum */

#define WINDOW 8.0        /* misses, as a share of the experts, over which estimators are compared */
#define LEAST_MISSES 64.0 /* one in so many uses counts as missed, for the window */
#define WORSE 0.006       /* an estimator that misses by this share more than the best weighs e times less */
#define NO_MISSES 1e-6    /* a share of misses below which estimators are not told apart */
#define TURN_WEIGHT 3.0f  /* steps that the circle of the layers counts for; from 2 to 6 the hits are nearly the same */

static const double half_lives[HALF_LIVES] = {1.0 / 16, 1.0 / 4, 1, 4, 32}; /* evictions, as a share of the experts */

struct estimator {
    double half_life;    /* ticks */
    double missed;       /* share of the uses lately */
    int64_t prefill;     /* added to the logarithm of a prompt's use */
    int64_t now;         /* EPOCH + the clock in half-lives */
    uint64_t step, rest; /* of `now` a tick, and what has not become one yet, both with 32 bits more */
    int64_t floor;       /* the lowest grade; all that is colder is counted there */
    int64_t mark;        /* the grade of the coldest that a pool of the hottest holds */
    uint32_t over;       /* experts above the mark */
    uint32_t grades[GRADES];
};

/* How often an expert's layer used it two turns running. */
struct reuse {
    uint8_t turns; /* that used it and are over; both are halved when these are too many */
    uint8_t again; /* the next one used it too */
};

struct history {
    int64_t heat[ESTIMATORS];
    uint32_t turn; /* of its layer, when it was used last */
    bool resident, held, guess;
    bool prompt;           /* used it last */
    struct reuse reuse[2]; /* after an answer's use, after a prompt's */
};

struct layer {
    uint32_t coldest;  /* LFRU_NONE: no expert of the layer can be given up */
    bool stale;        /* it has to be looked for */
    float cold;        /* its cold_of */
    float wait;        /* of the proposed expert, in steps; below 0: there is none */
    uint32_t turns;    /* how many have begun */
    uint32_t recent;   /* experts used in the last */
    uint32_t proposed; /* as victim */
};

struct lfru {
    uint32_t experts, per_layer, layer_count, capacity;
    uint32_t weights[ESTIMATORS]; /* of the rank */
    double rate;                  /* uses a tick of an expert whose rank is now */
    uint32_t unweighed;           /* evictions since the estimators were weighed */
    uint32_t layer, expert;       /* of the last use */
    uint32_t prompt_uses;         /* of that layer in this step, by prompts alone */
    uint64_t step_ticks;          /* of the step so far */
    double ticks_a_step;          /* lately */
    struct history *histories;    /* [experts] */
    int64_t *ranks;               /* [experts]: weighted heat, or ABSENT */
    uint32_t *recents;            /* [experts]: from each layer's first on, its experts used in its last turn */
    struct layer *layers;         /* [layer_count] */
    int64_t reference;            /* of cold_of: the ranks' now, lately */
    struct estimator estimators[ESTIMATORS];
    uint32_t sums[SUM_ENTRIES + 1];
};

/* log2(2^a + 2^b). */
static int64_t add_heat(const struct lfru *lfru, int64_t a, int64_t b)
{
    int64_t more = a > b ? a : b, gap = more - (a > b ? b : a), at = gap >> SUM_BITS;
    if (at >= SUM_ENTRIES)
        return more;
    int64_t sum = lfru->sums[at], beyond = gap - (at << SUM_BITS);
    return more + sum - ((sum - lfru->sums[at + 1]) * beyond >> SUM_BITS);
}

static int64_t grade_of(const struct estimator *estimator, int64_t heat)
{
    int64_t grade = heat >> GRADE_BITS;
    return grade > estimator->floor ? grade : estimator->floor;
}

static uint32_t *count_at(struct estimator *estimator, int64_t grade)
{
    return &estimator->grades[(uint64_t)grade % GRADES];
}

/* Moves the mark to where `capacity` experts are at or above it, and fewer above. */
static void settle_mark(struct estimator *estimator, uint32_t capacity)
{
    while (estimator->over >= capacity)
        estimator->over -= *count_at(estimator, ++estimator->mark);
    while (estimator->mark > estimator->floor && estimator->over + *count_at(estimator, estimator->mark) < capacity)
        estimator->over += *count_at(estimator, estimator->mark--);
}

/* An expert's heat changes. */
static void regrade(struct estimator *estimator, uint32_t capacity, int64_t from, int64_t to)
{
    int64_t old = grade_of(estimator, from), new = grade_of(estimator, to);
    if (old == new)
        return;
    --*count_at(estimator, old);
    ++*count_at(estimator, new);
    estimator->over += (uint32_t)(new > estimator->mark) - (uint32_t)(old > estimator->mark);
    settle_mark(estimator, capacity);
}

/* The share of the experts of this heat that a pool of the `capacity` hottest would not hold. */
static double would_miss(struct estimator *estimator, uint32_t capacity, int64_t heat)
{
    int64_t grade = grade_of(estimator, heat);
    if (grade != estimator->mark)
        return grade < estimator->mark;
    uint32_t here = *count_at(estimator, grade), room = capacity - estimator->over;
    return room < here ? 1 - (double)room / here : 0;
}

/* The inverse of the heat behind a rank. All heats decay alike, so one factor brings those of all experts to now. */
static float cold_of(const struct lfru *lfru, int64_t rank)
{
    float octaves = (float)(lfru->reference - rank) / (float)OCTAVE;
    return exp2f(octaves < OCTAVES_BELOW ? octaves : OCTAVES_BELOW);
}

/* What the ranks decay from: the weighted `now`, as an expert's rank is its weighted heat. */
static int64_t ranks_now(const struct lfru *lfru)
{
    int64_t sum = 0;
    for (uint32_t k = 0; k < ESTIMATORS; k++)
        sum += (lfru->estimators[k].now >> WEIGHT_BITS) * lfru->weights[k];
    return sum;
}

static int64_t rank_of(const struct lfru *lfru, const struct history *history)
{
    int64_t sum = 0;
    for (uint32_t k = 0; k < ESTIMATORS; k++)
        sum += (history->heat[k] >> WEIGHT_BITS) * lfru->weights[k];
    return sum;
}

/* By how much an expert of its layer's last turn ranks higher. Its chance is by the rule of succession. */
static int64_t recent_octaves(const struct history *history)
{
    const struct reuse *reuse = &history->reuse[history->prompt];
    double chance = (reuse->again + 1.0) / (reuse->turns + 2.0);
    return (int64_t)(log2(1 + AGAIN_WEIGHT * chance) * (double)OCTAVE);
}

/* Writes what the expert is worth, after anything about it has changed. */
static void rank_expert(struct lfru *lfru, uint32_t expert)
{
    const struct history *history = &lfru->histories[expert];
    struct layer *layer = &lfru->layers[expert / lfru->per_layer];
    int64_t rank = ABSENT;
    if (history->resident && !history->held)
        rank = rank_of(lfru, history) + (history->turn == layer->turns ? recent_octaves(history) : 0) -
               (history->guess ? GUESS_OCTAVES * OCTAVE : 0);
    if (rank < (layer->coldest == LFRU_NONE ? ABSENT : lfru->ranks[layer->coldest])) {
        layer->coldest = expert;
        layer->cold = cold_of(lfru, rank);
    } else if (layer->coldest == expert) {
        layer->stale = true;
    }
    lfru->ranks[expert] = rank;
}

/* The first of the layer's experts with the least rank that is more than `above`, or is `above` and behind the expert
 * `before`; LFRU_NONE: there is none. */
static uint32_t find_coldest(const struct lfru *lfru, uint32_t layer, int64_t above, uint32_t before)
{
    uint32_t first = layer * lfru->per_layer, coldest = LFRU_NONE;
    uint32_t end = lfru->experts - first > lfru->per_layer ? first + lfru->per_layer : lfru->experts;
    int64_t least = ABSENT;
    for (uint32_t e = first; e < end; e++) { /* without branches, so that it is fast */
        int64_t rank = lfru->ranks[e];
        bool colder = rank < least && (rank > above || (rank == above && e > before));
        least = colder ? rank : least;
        coldest = colder ? e : coldest;
    }
    return coldest;
}

static int64_t floor_of(const struct estimator *estimator)
{
    return (estimator->now - OCTAVES_BELOW * OCTAVE) >> GRADE_BITS;
}

static void tick(struct lfru *lfru, uint32_t ticks)
{
    lfru->step_ticks += ticks;
    for (uint32_t k = 0; k < ESTIMATORS; k++) {
        struct estimator *estimator = &lfru->estimators[k];
        estimator->rest += estimator->step * ticks;
        estimator->now += (int64_t)(estimator->rest >> 32);
        estimator->rest &= UINT32_MAX;
        for (int64_t floor = floor_of(estimator); estimator->floor < floor; estimator->floor++) {
            uint32_t lowest = *count_at(estimator, estimator->floor), *next = count_at(estimator, estimator->floor + 1);
            *count_at(estimator, estimator->floor) = 0;
            if (estimator->mark == estimator->floor) {
                estimator->mark++;
                estimator->over -= *next;
            }
            *next += lowest;
        }
        settle_mark(estimator, lfru->capacity);
    }
}

/* Every layer has to look for its coldest. */
static void make_stale(struct lfru *lfru)
{
    lfru->reference = ranks_now(lfru);
    for (uint32_t l = 0; l < lfru->layer_count; l++)
        lfru->layers[l].stale = true;
}

static void weigh_estimators(struct lfru *lfru)
{
    uint32_t best = 0, left = 1u << WEIGHT_BITS;
    double shares[ESTIMATORS], sum = 0, rate = 0;
    for (uint32_t k = 1; k < ESTIMATORS; k++)
        best = lfru->estimators[k].missed < lfru->estimators[best].missed ? k : best;
    double least = lfru->estimators[best].missed, step = WORSE * (least > NO_MISSES ? least : NO_MISSES);
    for (uint32_t k = 0; k < ESTIMATORS; k++)
        sum += shares[k] = exp((least - lfru->estimators[k].missed) / step);
    for (uint32_t k = 0; k < ESTIMATORS; k++)
        left -= lfru->weights[k] = k == best ? 0 : (uint32_t)lrint(shares[k] / sum * (1u << WEIGHT_BITS));
    lfru->weights[best] = left;
    /* A constant rate of r uses a tick has the heat r * half_life / ln 2. */
    for (uint32_t k = 0; k < ESTIMATORS; k++)
        rate += lfru->weights[k] * log(M_LN2 / lfru->estimators[k].half_life);
    lfru->rate = exp(rate / (1u << WEIGHT_BITS));
    lfru->unweighed = 0;
    make_stale(lfru);
    for (uint32_t e = 0; e < lfru->experts; e++)
        rank_expert(lfru, e);
}

int lfru_open(uint32_t experts, uint32_t per_layer, uint32_t capacity, struct lfru **ret_lfru, struct error *ret_error)
{
    if (experts == 0 || per_layer == 0 || capacity == 0 || experts >= LFRU_NONE - per_layer)
        return error_set(ret_error, EINVAL, "no policy for %u experts, %u a layer, %u slots", experts, per_layer,
                         capacity);
    struct lfru *lfru = calloc(1, sizeof *lfru);
    uint32_t layers = (experts - 1) / per_layer + 1;
    if (lfru) {
        lfru->histories = calloc(experts, sizeof *lfru->histories);
        lfru->ranks = calloc(experts, sizeof *lfru->ranks);
        lfru->recents = calloc(experts, sizeof *lfru->recents);
        lfru->layers = calloc(layers, sizeof *lfru->layers);
    }
    if (!lfru || !lfru->histories || !lfru->ranks || !lfru->recents || !lfru->layers) {
        lfru_close(lfru);
        return error_set(ret_error, ENOMEM, "history of %u experts: out of memory", experts);
    }
    lfru->experts = experts;
    lfru->per_layer = per_layer;
    lfru->layer_count = layers;
    lfru->capacity = capacity;
    lfru->ticks_a_step = TICKS_EVICTION;
    for (uint32_t i = 0; i <= SUM_ENTRIES; i++)
        lfru->sums[i] = (uint32_t)lrint(log2(1 + exp2(-(double)i / 64)) * (double)OCTAVE);
    for (uint32_t k = 0; k < ESTIMATORS; k++) {
        struct estimator *estimator = &lfru->estimators[k];
        double evictions = half_lives[k % HALF_LIVES] * experts;
        estimator->half_life = TICKS_EVICTION * (evictions < 1 ? 1 : evictions);
        estimator->step = (uint64_t)((double)OCTAVE * 0x1p32 / estimator->half_life);
        estimator->now = EPOCH;
        estimator->prefill = k < HALF_LIVES ? -PREFILL_OCTAVES * OCTAVE : 0;
        estimator->missed = 1;
        estimator->floor = estimator->mark = floor_of(estimator);
        *count_at(estimator, estimator->floor) = experts;
    }
    for (uint32_t e = 0; e < experts; e++) {
        lfru->ranks[e] = ABSENT;
        for (uint32_t k = 0; k < ESTIMATORS; k++)
            lfru->histories[e].heat[k] = NEVER;
    }
    for (uint32_t l = 0; l < layers; l++)
        lfru->layers[l] =
            (struct layer){.coldest = LFRU_NONE, .turns = 2}; /* no expert was used in this one or before */
    lfru_resize(lfru, capacity);
    weigh_estimators(lfru);
    *ret_lfru = lfru;
    return 0;
}

void lfru_close(struct lfru *lfru)
{
    if (lfru) {
        free(lfru->histories);
        free(lfru->ranks);
        free(lfru->recents);
        free(lfru->layers);
    }
    free(lfru);
}

/* A layer's turn: those of its last one are recent no more. */
static void begin_turn(struct lfru *lfru, uint32_t layer)
{
    struct layer *own = &lfru->layers[layer];
    uint32_t count = own->recent;
    own->turns++;
    own->recent = 0;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t expert = lfru->recents[layer * lfru->per_layer + i];
        struct history *history = &lfru->histories[expert];
        struct reuse *reuse = &history->reuse[history->prompt];
        if (++reuse->turns == UINT8_MAX)
            *reuse = (struct reuse){reuse->turns / 2, reuse->again / 2};
        rank_expert(lfru, expert);
    }
    if (layer <= lfru->layer) { /* a step has ended */
        lfru->ticks_a_step += ((double)lfru->step_ticks - lfru->ticks_a_step) / 64;
        lfru->step_ticks = 0;
    }
    lfru->layer = layer;
    lfru->prompt_uses = 0;
}

static void note_turn(struct lfru *lfru, uint32_t expert)
{
    struct history *history = &lfru->histories[expert];
    uint32_t layer = expert / lfru->per_layer;
    struct layer *own = &lfru->layers[layer];
    if (layer != lfru->layer || expert <= lfru->expert)
        begin_turn(lfru, layer);
    lfru->expert = expert;
    if (history->turn == own->turns)
        return;
    if (history->turn + 1 == own->turns)
        history->reuse[history->prompt].again++;
    history->turn = own->turns;
    lfru->recents[layer * lfru->per_layer + own->recent++] = expert;
}

void lfru_use(struct lfru *lfru, uint32_t expert, enum lfru_who who)
{
    struct history *history = &lfru->histories[expert];
    note_turn(lfru, expert);
    lfru->prompt_uses += who == LFRU_PREFILL;
    tick(lfru, TICKS_USE);
    double missed = lfru->estimators[0].missed;
    for (uint32_t k = 1; k < ESTIMATORS; k++)
        missed = fmin(missed, lfru->estimators[k].missed);
    double share = (missed < 1 / LEAST_MISSES ? 1 / LEAST_MISSES : missed) / (WINDOW * lfru->experts);
    for (uint32_t k = 0; k < ESTIMATORS; k++) {
        struct estimator *estimator = &lfru->estimators[k];
        int64_t use = estimator->now + (who == LFRU_PREFILL ? estimator->prefill : 0);
        int64_t heat = add_heat(lfru, history->heat[k], use), most = estimator->now + OCTAVES_ABOVE * OCTAVE;
        heat = heat < most ? heat : most;
        estimator->missed += (would_miss(estimator, lfru->capacity, history->heat[k]) - estimator->missed) * share;
        regrade(estimator, lfru->capacity, history->heat[k], heat);
        history->heat[k] = heat;
    }
    history->guess = false;
    history->prompt = who == LFRU_PREFILL;
    rank_expert(lfru, expert);
}

void lfru_admit(struct lfru *lfru, uint32_t expert, enum lfru_who who)
{
    struct history *history = &lfru->histories[expert];
    if (history->resident)
        return;
    history->resident = true;
    history->guess = who == LFRU_GUESS;
    rank_expert(lfru, expert);
}

/* What makes a wait of cold_of, in steps. */
struct scale {
    float cold;      /* steps, of a layer whose turn has been */
    float cold_next; /* of one that comes in this step */
    float turn;      /* for each layer of the way */
};

static struct scale scale_now(const struct lfru *lfru)
{
    double uses = exp2((double)(lfru->reference - ranks_now(lfru)) / (double)OCTAVE) * lfru->rate * lfru->ticks_a_step;
    float cold = (float)(1 / uses), prompt = (float)lfru->prompt_uses / (float)(lfru->per_layer + 1);
    return (struct scale){
        .cold = cold, .cold_next = cold * (1 - prompt), .turn = TURN_WEIGHT / (float)lfru->layer_count};
}

/* The layer's expert that is compared with those of the others. */
static void propose(struct lfru *lfru, const struct scale *scale, uint32_t layer, uint32_t expert, float cold)
{
    struct layer *into = &lfru->layers[layer];
    into->proposed = expert;
    if (expert == LFRU_NONE)
        into->wait = -1;
    else if (layer > lfru->layer)
        into->wait = cold * scale->cold_next + scale->turn * (float)(layer - lfru->layer);
    else
        into->wait = cold * scale->cold + scale->turn * (float)(layer + lfru->layer_count - lfru->layer);
}

uint32_t lfru_victim(struct lfru *lfru, bool (*may_go)(void *context, uint32_t expert), void *context)
{
    if (ranks_now(lfru) - lfru->reference > OCTAVES_BELOW * OCTAVE)
        make_stale(lfru);
    const struct scale scale = scale_now(lfru);
    for (uint32_t l = 0; l < lfru->layer_count; l++) {
        struct layer *layer = &lfru->layers[l];
        if (layer->stale) {
            layer->coldest = find_coldest(lfru, l, INT64_MIN, 0);
            layer->cold = layer->coldest == LFRU_NONE ? 0 : cold_of(lfru, lfru->ranks[layer->coldest]);
            layer->stale = false;
        }
        propose(lfru, &scale, l, layer->coldest, layer->cold);
    }
    while (true) {
        uint32_t longest = 0;
        for (uint32_t l = 1; l < lfru->layer_count; l++)
            if (lfru->layers[l].wait > lfru->layers[longest].wait)
                longest = l;
        uint32_t victim = lfru->layers[longest].proposed;
        if (victim == LFRU_NONE || !may_go || may_go(context, victim))
            return victim;
        uint32_t next = find_coldest(lfru, longest, lfru->ranks[victim], victim);
        propose(lfru, &scale, longest, next, next == LFRU_NONE ? 0 : cold_of(lfru, lfru->ranks[next]));
    }
}

void lfru_remove(struct lfru *lfru, uint32_t expert)
{
    struct history *history = &lfru->histories[expert];
    history->resident = history->guess = false;
    rank_expert(lfru, expert);
}

void lfru_evict(struct lfru *lfru, uint32_t expert)
{
    if (!lfru->histories[expert].resident)
        return;
    lfru_remove(lfru, expert);
    tick(lfru, TICKS_EVICTION);
    if (lfru->unweighed++ >= lfru->capacity)
        weigh_estimators(lfru);
}

void lfru_hold(struct lfru *lfru, uint32_t expert, bool held)
{
    struct history *history = &lfru->histories[expert];
    history->held = held;
    rank_expert(lfru, expert);
}

void lfru_resize(struct lfru *lfru, uint32_t capacity)
{
    lfru->capacity = capacity > 0 ? capacity : 1;
    for (uint32_t k = 0; k < ESTIMATORS; k++)
        settle_mark(&lfru->estimators[k], lfru->capacity);
}

float lfru_heat(const struct lfru *lfru, uint32_t expert)
{
    int64_t heat = lfru->histories[expert].heat[ESTIMATOR_HEAT];
    if (heat == NEVER)
        return 0;
    return (float)exp2((double)(heat - lfru->estimators[ESTIMATOR_HEAT].now) / (double)OCTAVE);
}

void lfru_set_heat(struct lfru *lfru, uint32_t expert, float heat)
{
    struct history *history = &lfru->histories[expert];
    double octaves = heat > 0 ? log2((double)heat) : -INFINITY; /* what is no number is not above 0 */
    for (uint32_t k = 0; k < ESTIMATORS; k++) {
        struct estimator *estimator = &lfru->estimators[k];
        /* The same rate of use has a heat in proportion to the half-life. */
        double own = octaves + log2(estimator->half_life / lfru->estimators[ESTIMATOR_HEAT].half_life);
        int64_t logarithm = NEVER;
        if (own > -OCTAVES_BELOW)
            logarithm = estimator->now + (int64_t)((own < OCTAVES_ABOVE ? own : OCTAVES_ABOVE) * (double)OCTAVE);
        regrade(estimator, lfru->capacity, history->heat[k], logarithm);
        history->heat[k] = logarithm;
    }
    rank_expert(lfru, expert);
}
