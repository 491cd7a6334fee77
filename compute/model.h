/* The forward pass in memory: what a worker knows (facts), reads (weights) and writes (state).
 *
 *   model.c    opens and closes a model, allocates the state, runs one STEP as one parallel region
 *   family.c   the table of model families: tensor names, attention, router
 *   forward.c  embedding, layers, dense MLP, logits       attention.c  MLA over the KV cache
 *   indexer.c  which keys a row attends to                moe.c        router, waves, experts
 *   demand.c   worker 0 and iod: pins, requests, waves    mtp.c        the draft layer
 *   team.c     threads of a worker, and their meeting with other workers
 *   lookahead.c  the next layer's likely experts
 *
 * All threads of all workers run the same functions on the same STEP (SPMD). Names of dimensions: rows = token rows of the step; W
 * workers; own = this worker's part. Every [rows] below has room for facts.max_rows. */
#pragma once

#include "compute/kernel.h"
#include "compute/team.h"
#include "proto/message.h"
#include "shm/dense.h"
#include "shm/exchange.h"
#include "shm/kv.h"
#include "shm/pool.h"

/* A quantised matrix [n, k] of the dense segment. */
struct matrix {
    enum weight_format format;
    uint32_t n, k;
    float factor; /* 2^exponent */
    const uint8_t *quanta;
    const uint16_t *scales;
};

/* A matrix [n, k] that is used as f32: f32, f16 or bf16 in memory. */
struct linear {
    enum tensor_dtype dtype;
    uint32_t n, k;
    const void *data;
};

struct indexer_weights {
    struct matrix wq_b;                /* [index_heads * index_dim, q_lora] */
    struct matrix wk;                  /* [index_dim, hidden] */
    struct linear weights_proj;        /* [index_heads, hidden] */
    const float *k_norm, *k_norm_bias; /* [index_dim] */
};

struct layer_weights {
    const float *input_norm, *post_norm; /* [hidden] */
    const float *q_a_norm, *kv_a_norm;   /* [q_lora], [kv_lora] */
    struct matrix q_a;                   /* [q_lora, hidden] */
    struct matrix q_b;                   /* [heads * (qk_nope + qk_rope), q_lora] */
    struct matrix kv_a;                  /* [kv_lora + qk_rope, hidden] */
    struct matrix w_uk;                  /* heads of [kv_lora, qk_nope] */
    struct matrix w_uv;                  /* heads of [v_head, kv_lora] */
    struct matrix o;                     /* [hidden, heads * v_head] */
    struct indexer_weights indexer;      /* full layers only */
    struct matrix gate, up, down;        /* the dense MLP [dense_width, hidden], or the shared expert */
    struct linear router;                /* [experts, hidden], MoE layers only */
    const float *router_bias;            /* [experts] */
    const int32_t *exponents;            /* [experts][3]: gate, up, down */
};

struct weights {
    struct matrix embed, lm_head; /* [vocab, hidden] */
    const float *norm;            /* [hidden] */
    struct layer_weights layers[MODEL_MAX_LAYERS];
    const float *enorm, *hnorm, *head_norm; /* MTP, [hidden] */
    struct matrix eh_proj;                  /* [hidden, 2 * hidden] */
};

/* The same matrix from block row `block` on. */
static inline struct matrix matrix_from(const struct matrix *matrix, uint32_t block)
{
    struct matrix rest = *matrix;
    rest.n -= block * BLOCK_ROWS;
    rest.quanta += quanta_bytes(matrix->format, block, matrix->k);
    rest.scales += scales_bytes(block, matrix->k) / 2;
    return rest;
}

/* Rows ready for a matrix: quantised, or f32 in the reference mode. */
struct activation {
    uint32_t width;
    int8_t *q;     /* [rows][width] */
    float *scales; /* [rows][width / 64] */
    int32_t *sums; /* [rows][width / 64]: of each group of q */
    float *x;      /* [rows][width] */
};

/* Row `row` of it as an operand whose product goes to y. */
static inline struct matmul_row activation_row(const struct activation *activation, size_t row, float *y)
{
    size_t at = row * activation->width;
    if (!activation->q)
        return (struct matmul_row){.x = activation->x + at, .y = y};
    return (struct matmul_row){.q = activation->q + at,
                               .scales = activation->scales + at / GROUP,
                               .sums = activation->sums + at / GROUP,
                               .y = y};
}

/* Rows that go through a layer together: (sequence, position) pairs. The draft layer has its own, shorter batch. */
struct batch {
    uint32_t rows;
    const struct step_sequence **sequence; /* [rows] */
    uint32_t *position;                    /* [rows] */
    int32_t *token;                        /* [rows]: the token whose embedding goes in */
    uint32_t *source;                      /* [rows]: row of the step */
    float *cos, *sin;                      /* [rows][qk_rope / 2] */
    float *h;                              /* [rows][hidden], the residual stream */
};

#define SELECT_ALL UINT32_MAX /* every position up to the row's own */

/* One expert of a wave, mapped here. */
struct wave_expert {
    uint32_t expert; /* of the layer */
    const uint8_t *slice[EXPERT_SLICES];
};

struct expert_failure {
    uint32_t layer, expert, slice, code;
};

/* Worker 0's business with iod in one layer. */
struct demand {
    uint64_t tick;
    uint32_t wanted, done; /* experts of the layer's rows; computed so far */
    uint32_t *expert;      /* [experts]: wanted ones, ascending */
    uint8_t *status;       /* [experts]: enum wanted_status of demand.c, by place in `expert` */
    bool *stale_failure;   /* [experts]: `ref` is a FAILED slot, seen before the request */
    struct slot_ref *ref;  /* [experts] */
    uint64_t hits, misses;
};

struct state {
    struct batch batch, draft;
    float *x;                       /* [rows][hidden]: normed, f32 */
    float *final;                   /* [rows][hidden]: after the final norm, for the draft layer */
    struct activation hidden;       /* [rows][2 * hidden]; a layer uses width hidden */
    struct activation q_lora;       /* [rows][q_lora] */
    struct activation nope, latent; /* [rows * own heads][qk_nope], [kv_lora] */
    struct activation o;            /* [rows][heads * v_head] */
    struct activation index;        /* [rows][index_heads * index_dim] */
    float *q;                       /* [rows][own heads][qk_nope + qk_rope] */
    float *q_latent;                /* [rows][own heads][kv_lora + qk_rope] */
    float *index_weight;            /* [rows][index_heads], times index_heads^-1/2 */
    float *index_score;             /* [SELECT_ROWS][share of positions] */
    uint32_t *selected;             /* [rows][index_topk], ascending positions */
    uint32_t *selected_count;       /* [rows], or SELECT_ALL */
    float *router;                  /* [rows][experts] */
    uint32_t *chosen;               /* [rows][top_k], ascending */
    float *chosen_weight;           /* [rows][top_k] */
    uint32_t *expert_first;         /* [experts + 1]: where an expert's pairs begin in `pairs` */
    uint32_t *pairs;                /* [rows * top_k]: row * top_k + place, by expert, then row */
    float *shared_y;                /* [rows][hidden]: own columns */
    float *pair_y;                  /* [rows * top_k][own columns of hidden] */
    struct wave_expert *wave;       /* [experts] */
    uint32_t wave_count;
    struct demand demand;
    uint32_t *logit_row; /* [rows]: rows whose logits are wanted */
    uint32_t *draft_row; /* [rows]: for each of them, its row in the draft batch, or UINT32_MAX */
    uint32_t logit_rows;
    double *inverse_frequency; /* [qk_rope / 2] */
    struct thread *threads;    /* [threads] */
    void **memory;             /* all allocations */
    size_t memory_count;
};

/* What one thread of the team owns. */
struct thread {
    struct team_place place;
    struct model *model;
    uint32_t index, job;     /* job: number of the last one */
    struct matmul_row *rows; /* [max_rows] */
    float *gate, *up;        /* [gate_room][64]: rows x groups, before SwiGLU */
    float *keys;             /* [64][kv_lora + qk_rope] */
    float *scores;           /* [ATTENTION_HEADS][most keys] */
    float *z;                /* [ATTENTION_HEADS][kv_lora] */
    float *row;              /* [widest row]: scratch */
    float *candidate_score;  /* [W * index_topk] */
    uint32_t *candidate_position, *candidate_index;
};

#define ATTENTION_HEADS 32u /* heads that share a block of keys in one task, at most */
#define SELECT_ROWS 16u     /* rows whose index scores are held at a time */
#define GATE_GROUPS 32u     /* of gate and up that one call computes for one row */
#define GROUP_BLOCKS                                                                                                   \
    (GROUP / BLOCK_ROWS) /* block rows of gate and up whose results are one group of down's activations */

struct model {
    struct facts facts;
    const struct family *family;
    const struct kernel_set *kernels;
    struct control *control;
    struct worker_line *line;
    struct dense dense;
    struct segment kv;
    struct kv_layout kv_layout;
    struct pool pool;
    struct exchange exchange;
    struct team team;
    struct weights weights;
    struct state state;
    uint32_t self;              /* worker number */
    int doorbell;               /* iod's eventfd, -1: none */
    struct range heads;         /* own */
    struct range hidden_blocks; /* own block rows of matrices with `hidden` rows */
    struct expert_shape expert_shape;
    struct slice_part parts[EXPERT_SLICES][EXPERT_MATRICES];
    const struct step *step;       /* the running one */
    struct lookahead *lookahead;   /* worker 0's, or NULL */
    struct expert_failure failure; /* W: the team's first thread */
    struct error error;            /* W: the team's first thread, with a fatal status */
};

/* Attaches every segment of an instance (facts: the copy that control_attach made) and allocates the state of worker `self`. Errors name
 * the segment or tensor. Thread: main. */
int model_open(const char *instance, const struct facts *facts, struct control *control, uint32_t self, int doorbell,
               struct model **ret_model, struct error *ret_error);
void model_close(struct model *model);

/* Runs one STEP (checked by message_decode_step) with a team of facts.threads threads. 0: logits stand in the exchange segment.
 * -ESTALE: the epoch was raised, nothing of the step counts. -EIO: an expert failed, *ret_done names it. Anything else is a fault of
 * this worker: the line says which, and the process should end. Thread: main, one step at a time. */
int model_step(struct model *model, const struct step *step, struct step_done *ret_done, struct error *ret_error);

/* Acknowledges `epoch`: gives back all pins, begins the exchange afresh. Thread: main, between steps. */
void model_acknowledge(struct model *model, uint32_t epoch);

/* The team's part of [count]: this thread's rows of a batch. */
static inline struct range thread_range(const struct thread *thread, uint32_t count)
{
    return split(count, thread->index, thread->model->team.threads);
}

/* Groups of a row that thread->gate and thread->up hold, all rows together: one group of every row, or a wide run of one row. */
static inline uint32_t gate_room(const struct facts *facts)
{
    return facts->max_rows > GATE_GROUPS ? facts->max_rows : GATE_GROUPS;
}

/* Units (16-row blocks of a matrix, or rows of a small one) that this thread computes of `count`: the worker's, then the thread's. */
struct range worker_range(const struct facts *facts, uint32_t self, uint32_t count);
struct range own_range(const struct thread *thread, uint32_t count);

/* Units of two block rows, which share their activations in the kernels: how many, and what a run of them holds. */
static inline uint32_t block_units(struct range blocks)
{
    return (blocks.count + 1) / 2;
}
struct range unit_blocks(struct range blocks, struct range units);

/* Own columns of one pair's expert result, from block row `block` (of the whole matrix) on. */
static inline float *pair_result(const struct model *model, uint32_t pair, uint32_t block)
{
    return model->state.pair_y +
           ((size_t)pair * model->hidden_blocks.count + block - model->hidden_blocks.first) * BLOCK_ROWS;
}

/* The step's time that follows belongs to `part`. */
static inline void part_begin(const struct thread *thread, enum step_part part)
{
    if (thread->index == 0)
        team_part(&thread->model->team, part);
}

/* Around products with quantised matrices: what they take is counted beside the parts. */
static inline uint64_t matmul_begin(const struct thread *thread)
{
    return thread->index == 0 ? clock_ns() : 0;
}

static inline void matmul_end(const struct thread *thread, uint64_t begun)
{
    if (thread->index == 0)
        thread->model->team.matmul_ns += clock_ns() - begun;
}

/* forward.c */
int forward(struct thread *thread);
int forward_layer(struct thread *thread, struct batch *batch, uint32_t layer);
int forward_mlp_dense(struct thread *thread, struct batch *batch, uint32_t layer);
void embed_row(const struct thread *thread, int32_t token, float *ret_x); /* [hidden] */
/* cos and sin of a row's position: angles position * theta^(-2j / qk_rope) in f64, rounded to f32. */
void rope_row(const struct model *model, struct batch *batch, uint32_t row);
/* Room for an activation of `rows` rows in `memory`, where f32 values would fit too: [q][scales][sums], or [x] in the reference mode. */
struct activation activation_at(const struct model *model, void *memory, size_t rows, uint32_t width);
/* Makes row `row` of an activation from x [width]. */
void activation_set(const struct model *model, struct activation *activation, uint32_t row, const float *x);
/* Makes row `row` of an activation from rmsnorm of x [width]; ret_y [width], or NULL: the normed values too. */
void activation_norm(const struct model *model, struct activation *activation, uint32_t row, const float *x,
                     const float *weight, float eps, float *ret_y);
/* y + r * stride + 16 * blocks.first ... = rows first .. first + rows - 1 of the activation times those block rows of the matrix. */
void matrix_multiply(struct thread *thread, const struct matrix *matrix, const struct activation *activation,
                     uint32_t first, uint32_t rows, struct range blocks, float *y, size_t stride);
/* The same for block rows that the team shares, in pairs; all threads call it, and a barrier follows. `residual` [rows][n], or NULL: added
 * to y. */
void matrix_multiply_team(struct thread *thread, const struct matrix *matrix, const struct activation *activation,
                          uint32_t rows, struct range blocks, const float *residual, float *y, size_t stride);
/* Gate and up of a dense MLP or a shared expert, own groups, shared by the team: their SwiGLU into ret_units [rows][width]. */
void forward_gate_up(struct thread *thread, const struct layer_weights *w, uint32_t rows, struct activation *ret_units);
/* SwiGLU of gate and up [groups * 64] into these groups of row `row` of an activation. */
void activation_swiglu(const struct model *model, struct activation *activation, size_t row, struct range groups,
                       const float *gate, const float *up);
/* The exchange of the residual stream, and h everywhere: own columns of `buffer` [rows][hidden] have been written. */
int residual_exchange(struct thread *thread, struct batch *batch, const float *buffer);
/* logits of the rows `row[i]` of x, normed by `norm`; UINT32_MAX: a row of zeros. */
int forward_logits(struct thread *thread, const float *h, const uint32_t *row, const float *norm, int draft);

/* attention.c, indexer.c, moe.c, mtp.c; all return 0 or the status of an exchange */
int forward_attention_mla(struct thread *thread, struct batch *batch, uint32_t layer);
int forward_mlp_moe(struct thread *thread, struct batch *batch, uint32_t layer);
int forward_mtp(struct thread *thread);
void index_store_key(struct thread *thread, const struct batch *batch, uint32_t layer, uint32_t row, const float *key);
bool index_needed(const struct model *model, const struct batch *batch);
int index_select(struct thread *thread, struct batch *batch, uint32_t layer, const float *queries);
/* Router of the noaux_tc kind: scores = sigmoid of the logits. */
void route_noaux_tc(const struct model *model, const struct layer_weights *weights, float *logits, uint32_t *ret_chosen,
                    float *ret_weight);
