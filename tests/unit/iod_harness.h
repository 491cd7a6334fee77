/* What the tests of the I/O daemon share: a container made on the spot, an instance around it (the supervisor's part),
 * workers that ask and pin, and the daemon as a process or as a thread of the test. */
#pragma once

#include "io_daemon/loader.h"
#include "proto/container.h"
#include "shm/control.h"
#include "shm/pool.h"

#include <pthread.h>
#include <sys/types.h>

/* A container whose every byte of experts and dense tensors follows from its place. */
struct geometry {
    uint32_t hidden, width, layers, experts, top_k; /* layer 0 is dense, the others MoE */
    uint32_t dense_bytes;                           /* of each of two dense files' big tensor */
    uint32_t stripes;                               /* 0: 1 */
};

void harness_make_container(const char *folder, const struct geometry *geometry);

/* 64-bit word `word` of an expert's blob, and of a dense file's big tensor. */
uint64_t expert_word(uint32_t expert, size_t word);
uint64_t dense_word(uint32_t file, size_t word);

/* Changes one byte of a file by `flip` (xor); called twice it restores. */
void harness_flip_byte(const char *path, uint64_t offset, uint8_t flip);

/* A scratch folder under the working directory (a build folder, so a real disk). harness_end removes it with all that
 * is in it, and the shared memory of worlds that a failed test left open. */
void harness_scratch(const char *name, char ret_path[static 256]);
void harness_remove(const char *path);
void harness_end(const char *scratch);

struct world {
    char instance[INSTANCE_NAME_MAX];
    char rundir[256];
    struct facts facts;
    struct control *control;
    struct pool pool;
    int doorbell;
    uint64_t tick; /* of the fake workers */
};

struct world_options {
    uint32_t slots, nodes, workers, io;
};

/* Creates control and pool of an instance that runs `container`; objects are the daemon's. */
void world_open(struct world *world, const char *scratch, const char *container, const struct world_options *options);
void world_close(struct world *world);

/* What a worker does. world_ask pushes a request and rings if it must. world_get asks once and waits: 0 (pinned by holder
 * `worker`), -EIO (ref filled), -ETIMEDOUT. world_put unpins and rings if it must. */
void world_ask(struct world *world, uint32_t worker, uint32_t expert, uint64_t tick);
int world_get(struct world *world, uint32_t worker, uint32_t expert, uint64_t tick, int timeout_ms,
              struct slot_ref *ret_ref);
/* The same for a lookahead: asked before the layer of `tick` begins, waited for by nobody. */
void world_guess(struct world *world, uint32_t worker, uint32_t expert, uint64_t tick);
/* Worker 0 writes into the use log: a layer of one row used that expert. */
void world_use(struct world *world, uint32_t expert, uint32_t flags);
void world_put(struct world *world, uint32_t worker, struct slot_ref ref);
void world_tick(struct world *world, uint32_t worker, uint64_t tick);

/* Words of the pinned expert that are not what they should be; `step` looks at every step-th word. */
size_t world_wrong_words(struct world *world, struct slot_ref ref, uint32_t expert, size_t step);

uint64_t harness_now_ms(void);

/* The daemon as a process: $CALYPTE_BIN/calypte-iod. Its stderr goes to `log_path`. */
struct iod_process {
    pid_t pid;
    int notify_fd;
    char log_path[320];
};
void iod_spawn(struct world *world, bool forbid_uring, struct iod_process *ret_process);
/* 0 when it says `ready`, -1 when it says `failed: TEXT` (copied) or ends. */
int iod_wait_ready(struct iod_process *process, char ret_text[static 1200]);
/* Ends it with a signal and returns wait's status. */
int iod_stop(struct iod_process *process, int signal);
void iod_read_log(const struct iod_process *process, char ret_text[static 4096]);

/* The daemon as a thread, with a method of the test's choice (NULL: as the facts say). */
struct iod_thread {
    struct world *world;
    const struct io_method *method;
    pthread_t thread;
    pthread_barrier_t opened;
    int stop_fd;
    int open_status, run_status; /* of loader_open and loader_run */
    struct error error;
};
/* 0 when it serves, or what loader_open returned. */
int iod_thread_start(struct iod_thread *iod, struct world *world, const struct io_method *method);
int iod_thread_stop(struct iod_thread *iod);
/* Lines that threads have logged since the last call; the caller frees. */
char *iod_thread_log(void);
