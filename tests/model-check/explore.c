/* Visits every state that the pool's protocol can come to, for two slots, three experts, two workers, and any order of
 * their moves: no answer with the bytes of another expert, no slot, pin or wake lost, and from everywhere a way on.
 * Then does the same to mutants of the protocol, each of which must break one of these.
 *
 *   model-check             all scenarios, all mutants: a line each; 1 if one is not as it should be
 *   model-check MUTANT      the shortest way to what that mutant breaks, move by move */
#include "tests/model-check/protocol.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#define BUCKETS_FIRST (1u << 16) /* a power of two */

/* The small ones first: most mutants are broken there. */
static const struct scenario scenarios[] = {
    {.name = "failed reads", .failures = 2, .wanted = 0x02},
    {.name = "iod dies", .iod_deaths = 1, .wanted = 0x06},
    {.name = "more than fit", .wanted = 0x80},
    {.name = "a worker dies", .worker_deaths = 1, .wanted = 0x08},
    {.name = "guesses", .guesses = 2, .wanted = 0x02},
    {.name = "resized", .resizes = 2, .wanted = 0x08},
    {.name = "iod and a worker die", .iod_deaths = 1, .worker_deaths = 1, .wanted = 0x02},
    {.name = "iod dies twice", .iod_deaths = 2, .wanted = 0x06, .large = true},
    {.name = "anything is wanted", .wanted = 0xfe, .large = true},
    {.name = "one of two fails", .failures = 1, .wanted = 0x0a, .large = true},
    {.name = "guesses beside two", .guesses = 2, .wanted = 0x08, .large = true},
    {.name = "resized, iod dies", .iod_deaths = 1, .resizes = 1, .wanted = 0x08, .large = true},
    {.name = "iod dies, three wanted", .iod_deaths = 1, .wanted = 0x80, .large = true},
};
#define SCENARIOS (sizeof scenarios / sizeof scenarios[0])

/* A visited state: how it was reached. */
struct visit {
    uint32_t parent;
    uint8_t move;
    bool goes_on; /* progress can be reached from here */
};

/* Which visit a state is, by 96 bits of its hash: two of ten million are the same with a chance of 1e-15. */
struct bucket {
    uint64_t low;
    uint32_t high, visit; /* visit + 1; 0: empty */
};

struct edge {
    uint32_t from, to;
};

struct exploration {
    struct protocol protocol;
    struct visit *visits;
    uint32_t count, room;
    struct bucket *buckets;
    uint32_t bucket_count;
    struct edge *edges;
    size_t edge_count, edge_room;
    struct state *level, *next; /* the states of one depth, and of the next */
    uint32_t *level_visit, *next_visit;
    uint32_t level_count, next_count, next_room;
    const char *broken;   /* what does not hold, where */
    uint32_t where, move; /* the move that breaks it there; MOVES: it does not hold there */
};

static void *grow(void *memory, size_t count, size_t size)
{
    memory = realloc(memory, count * size);
    if (!memory) {
        fprintf(stderr, "model-check: out of memory\n");
        exit(2);
    }
    return memory;
}

static void rehash(struct exploration *x)
{
    uint32_t count = x->bucket_count ? x->bucket_count * 2 : BUCKETS_FIRST;
    struct bucket *buckets = grow(NULL, count, sizeof *buckets);
    memset(buckets, 0, count * sizeof *buckets);
    for (uint32_t i = 0; i < x->bucket_count; i++) {
        if (!x->buckets[i].visit)
            continue;
        uint32_t at = (uint32_t)x->buckets[i].low & (count - 1);
        while (buckets[at].visit)
            at = (at + 1) & (count - 1);
        buckets[at] = x->buckets[i];
    }
    free(x->buckets);
    x->buckets = buckets;
    x->bucket_count = count;
}

/* The visit of a state; a new one is appended and put into the next level. */
static uint32_t visit(struct exploration *x, const struct state *state, uint32_t parent, uint32_t move, bool *ret_new)
{
    XXH128_hash_t hash = XXH3_128bits(state, STATE_BYTES);
    if (x->count + x->count / 2 >= x->bucket_count)
        rehash(x);
    uint32_t at = (uint32_t)hash.low64 & (x->bucket_count - 1);
    struct bucket mine = {hash.low64, (uint32_t)hash.high64, x->count + 1};
    *ret_new = false;
    for (; x->buckets[at].visit; at = (at + 1) & (x->bucket_count - 1)) {
        if (x->buckets[at].low == mine.low && x->buckets[at].high == mine.high)
            return x->buckets[at].visit - 1;
    }
    *ret_new = true;
    if (x->count == x->room) {
        x->room = x->room ? x->room * 2 : BUCKETS_FIRST;
        x->visits = grow(x->visits, x->room, sizeof *x->visits);
    }
    x->visits[x->count] = (struct visit){.parent = parent, .move = (uint8_t)move};
    x->buckets[at] = mine;
    if (x->next_count == x->next_room) {
        x->next_room = x->next_room ? x->next_room * 2 : 1024;
        x->next = grow(x->next, x->next_room, sizeof *x->next);
        x->next_visit = grow(x->next_visit, x->next_room, sizeof *x->next_visit);
        x->level = grow(x->level, x->next_room, sizeof *x->level);
        x->level_visit = grow(x->level_visit, x->next_room, sizeof *x->level_visit);
    }
    x->next[x->next_count] = *state;
    x->next_visit[x->next_count++] = x->count;
    return x->count++;
}

static void note_edge(struct exploration *x, uint32_t from, uint32_t to)
{
    if (x->edge_count == x->edge_room) {
        x->edge_room = x->edge_room ? x->edge_room * 2 : BUCKETS_FIRST;
        x->edges = grow(x->edges, x->edge_room, sizeof *x->edges);
    }
    x->edges[x->edge_count++] = (struct edge){from, to};
}

/* Makes every move of one state. */
static void expand(struct exploration *x, const struct state *state, uint32_t self)
{
    const char *broken = protocol_invariant(state);
    bool honest = x->protocol.mutation == AS_IT_IS;
    if (!broken && honest)
        broken = protocol_check_pin(&x->protocol, state);
    uint32_t breaks = MOVES;
    for (uint32_t move = 0; move < MOVES && !broken; move++) {
        struct state after = *state;
        enum outcome outcome = protocol_move(&x->protocol, &after, move, &broken);
        if (outcome == CANNOT)
            continue;
        bool is_new;
        uint32_t to = visit(x, &after, self, move, &is_new);
        if (broken)
            breaks = move;
        if (outcome == COMPLETED)
            x->visits[self].goes_on = true;
        else if (outcome == MOVED)
            note_edge(x, self, to);
    }
    if (broken) {
        x->broken = broken;
        x->where = self;
        x->move = breaks;
    }
}

/* Marks every state from which progress can be reached without fate's help; the first without is a broken promise. */
static void check_progress(struct exploration *x)
{
    bool changed = true;
    /* States are numbered by depth, and edges stand in the order of their origins: from behind, few rounds are enough. */
    while (changed) {
        changed = false;
        for (size_t e = x->edge_count; e-- > 0;) {
            struct visit *from = &x->visits[x->edges[e].from];
            if (!from->goes_on && x->visits[x->edges[e].to].goes_on)
                from->goes_on = changed = true;
        }
    }
    for (uint32_t i = 0; i < x->count && !x->broken; i++) {
        if (!x->visits[i].goes_on) {
            x->broken = "nothing goes on: a wake, a request or a slot is lost";
            x->where = i;
            x->move = MOVES;
        }
    }
}

static void explore(struct exploration *x)
{
    struct state first;
    bool is_new;
    protocol_begin(&x->protocol, &first);
    rehash(x);
    visit(x, &first, UINT32_MAX, 0, &is_new);
    while (x->next_count && !x->broken) {
        struct state *level = x->level;
        uint32_t *visits = x->level_visit;
        x->level = x->next;
        x->level_visit = x->next_visit;
        x->next = level;
        x->next_visit = visits;
        x->level_count = x->next_count;
        x->next_count = 0;
        for (uint32_t i = 0; i < x->level_count && !x->broken; i++) {
            struct state state = x->level[i]; /* a copy: the level's memory may move */
            expand(x, &state, x->level_visit[i]);
        }
    }
    if (!x->broken)
        check_progress(x);
}

static void release(struct exploration *x)
{
    free(x->visits);
    free(x->buckets);
    free(x->edges);
    free(x->level);
    free(x->next);
    free(x->level_visit);
    free(x->next_visit);
}

/* Prints the moves that lead to a state. */
static void print_way(const struct exploration *x)
{
    uint32_t steps = 0;
    for (uint32_t at = x->where; at != UINT32_MAX; at = x->visits[at].parent)
        steps++;
    uint8_t *moves = grow(NULL, steps + 1, 1);
    uint32_t at = x->where;
    for (uint32_t i = steps; i-- > 0; at = x->visits[at].parent)
        moves[i] = x->visits[at].move;
    moves[steps] = (uint8_t)x->move;
    if (x->move < MOVES)
        steps++;
    struct state state;
    protocol_begin(&x->protocol, &state);
    for (uint32_t i = 1; i < steps; i++) {
        struct state before = state;
        const char *broken;
        char text[256];
        protocol_move(&x->protocol, &state, moves[i], &broken);
        protocol_describe(&before, moves[i], &state, text, sizeof text);
        printf("%4u %s\n", i, text);
    }
    free(moves);
}

/* Runs a mutant through the scenarios until one breaks it. True if that is as it should be. */
static bool try_mutant(enum mutation mutation, bool print)
{
    bool holds = mutation == AS_IT_IS || mutation >= GENERATION_UNCHECKED;
    uint64_t states = 0;
    const char *broken = NULL;
    size_t s;
    for (s = 0; s < SCENARIOS && !broken; s++) {
        if (scenarios[s].large && holds && mutation != AS_IT_IS)
            continue;
        struct exploration x = {.protocol = {mutation, scenarios[s]}};
        explore(&x);
        states += x.count;
        broken = x.broken;
        if (broken && (print || holds))
            print_way(&x);
        if (print || mutation == AS_IT_IS)
            printf("%-24s %-22s %9u states: %s\n", mutation_names[mutation], scenarios[s].name, x.count,
                   broken ? broken : "holds");
        release(&x);
    }
    if (mutation != AS_IT_IS && !print)
        printf("%-24s %-22s %9llu states: %s\n", mutation_names[mutation], broken ? scenarios[s - 1].name : "all",
               (unsigned long long)states, broken ? broken : "holds");
    fflush(stdout);
    return holds == !broken;
}

int main(int argc, char **argv)
{
    if (argc > 2) {
        fprintf(stderr, "model-check: one mutant at most\n");
        return 2;
    }
    bool right = true, known = argc < 2;
    for (uint32_t m = 0; m < MUTATIONS; m++) {
        bool chosen = argc == 2 && strcmp(argv[1], mutation_names[m]) == 0;
        known |= chosen;
        if ((argc < 2 || chosen) && !try_mutant((enum mutation)m, argc == 2)) {
            printf("%s: not as it should be\n", mutation_names[m]);
            right = false;
        }
    }
    if (!known)
        fprintf(stderr, "model-check: %s: no such mutant\n", argv[1]);
    return known ? !right : 2;
}
