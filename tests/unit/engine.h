/* An instance inside the test: segments as the supervisor makes them, the real I/O daemon as a thread, each worker as a
 * thread with its own team. Everything but processes and messages is what runs in production. */
#pragma once

#include "compute/model.h"
#include "io_daemon/loader.h"
#include "proto/container.h"

#include <pthread.h>

struct engine_options {
    const char *container; /* folder */
    uint32_t workers, threads;
    uint32_t activations, kv;          /* 0: the defaults */
    uint32_t index_topk;               /* 0: the config's */
    uint32_t max_rows, context, slots; /* 0: 64, 512, all experts */
    uint32_t isa, nodes;
    uint32_t prefetch; /* enum prefetch */
    bool processes;    /* the test starts the workers itself */
};

struct engine_worker {
    struct engine *engine;
    uint32_t index;
    pthread_t thread;
    struct model *model;
    int status;
    struct step_done done;
    struct error error;
};

struct engine {
    char instance[INSTANCE_NAME_MAX];
    char rundir[128];
    struct facts facts;
    struct control *control;
    struct exchange_layout layout;
    struct segment exchange;
    int doorbell, stop_fd;
    pthread_t iod_thread;
    struct loader *loader;
    pthread_barrier_t begin, end, opened; /* of a step; of iod's start */
    uint32_t started;                     /* workers that are threads here */
    bool open, iod_runs, in_step;
    const struct step *step; /* NULL: end */
    struct engine_worker workers[MAX_WORKERS];
};

/* Setup and teardown of a cmocka test: *state is a struct engine, which the test opens and closes. The teardown closes
 * what a test that failed has left open: threads, shared memory, folders. */
int engine_set_up(void **state);
int engine_tear_down(void **state);

/* Asserts that everything worked. */
void engine_open(struct engine *engine, const struct engine_options *options);
void engine_close(struct engine *engine);

/* Stops and starts the I/O daemon. */
void engine_stop_iod(struct engine *engine);
void engine_start_iod(struct engine *engine);

/* Runs a step on all workers; the status and what worker 0 answers. */
int engine_step(struct engine *engine, const struct step *step, struct step_done *ret_done);
/* The same in two halves. */
void engine_begin(struct engine *engine, const struct step *step);
int engine_finish(struct engine *engine, struct step_done *ret_done);

/* True while requests for experts wait that iod has not taken. */
bool engine_has_asked(const struct engine *engine);

/* Logits of every token of one sequence, in chunks: [count][vocab]; draft (may be NULL) [count - 1][vocab]. first_page:
 * of its pages. */
void engine_score(struct engine *engine, const int32_t *tokens, uint32_t count, uint32_t chunk, uint32_t first_page,
                  float *ret_logits, float *ret_draft);

/* Tensor of a safetensors file, whole; the caller frees. */
void *engine_tensor(const char *path, const char *name, enum tensor_dtype dtype, uint64_t ret_shape[static 2]);
