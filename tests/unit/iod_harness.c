#include "tests/unit/iod_harness.h"

#include "proto/cleanup.h"
#include "shm/futex.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <xxhash.h>

#include <cmocka.h>

/* --- the container --- */

uint64_t expert_word(uint32_t expert, size_t word)
{
    return ((uint64_t)(expert + 1) << 32 | word) * UINT64_C(0x9E3779B97F4A7C15);
}

uint64_t dense_word(uint32_t file, size_t word)
{
    return ((uint64_t)(file + 1000000) << 32 | word) * UINT64_C(0xD6E8FEB86659FD93);
}

static json_t *make_config(const struct geometry *g)
{
    json_t *config = json_pack("{s:s, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i}", "model_type",
                               "glm_moe_dsa", "hidden_size", (int)g->hidden, "num_hidden_layers", (int)g->layers,
                               "num_attention_heads", 4, "vocab_size", 64, "max_position_embeddings", 4096,
                               "q_lora_rank", 64, "kv_lora_rank", 64, "qk_nope_head_dim", 64, "qk_rope_head_dim", 32,
                               "v_head_dim", 64, "index_topk", 64, "index_n_heads", 4, "index_head_dim", 64);
    json_t *more =
        json_pack("{s:i, s:i, s:i, s:i, s:i, s:i, s:f, s:f}", "n_routed_experts", (int)g->experts,
                  "num_experts_per_tok", (int)g->top_k, "n_shared_experts", 1, "moe_intermediate_size", (int)g->width,
                  "intermediate_size", 64, "first_k_dense_replace", 1, "rms_norm_eps", 1e-5, "rope_theta", 10000.0);
    assert_int_equal(json_object_update(config, more), 0);
    json_decref(more);
    return config;
}

static struct tensor make_tensor(const char *name, enum tensor_dtype dtype, uint32_t dims, uint64_t a, uint64_t b)
{
    struct tensor tensor = {.dtype = dtype, .dims = dims, .shape = {a, b, 1, 1}};
    snprintf(tensor.name, sizeof(tensor.name), "%s", name);
    tensor.bytes = a * b * dtype_bytes(dtype);
    return tensor;
}

static json_t *checksum_json(const void *data, size_t bytes)
{
    char digits[CHECKSUM_DIGITS + 1];
    checksum_format(XXH3_64bits(data, bytes), digits);
    return json_string(digits);
}

static void write_all(int fd, const void *data, size_t bytes)
{
    for (size_t done = 0; done < bytes;) {
        ssize_t put = write(fd, (const char *)data + done, bytes - done);
        assert_true(put > 0);
        done += (size_t)put;
    }
}

/* Writes a file of tensors whose data follow one another; data[i] has tensors[i].bytes. Returns its entry in the
 * manifest, in which only tensors with listed[i] have a checksum. */
static json_t *write_file(const char *folder, const char *name, struct tensor *tensors, const void *const *data,
                          const bool *listed, size_t count)
{
    char path[512];
    struct error error;
    char *header;
    size_t header_bytes, bytes;
    if (safetensors_header(tensors, count, DISK_ALIGN, &header, &header_bytes, &error) < 0)
        fail_msg("%s", error.text);
    snprintf(path, sizeof(path), "%s/%s", folder, name);
    _cleanup_close_ int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    assert_true(fd >= 0);
    write_all(fd, header, header_bytes);
    json_t *sums = json_object();
    bytes = header_bytes;
    for (size_t i = 0; i < count; i++) {
        write_all(fd, data[i], tensors[i].bytes);
        bytes += tensors[i].bytes;
        if (listed[i])
            json_object_set_new(sums, tensors[i].name, checksum_json(data[i], tensors[i].bytes));
    }
    assert_int_equal(fsync(fd), 0);
    json_t *entry = json_pack("{s:I, s:o, s:o}", "bytes", (json_int_t)bytes, "header",
                              checksum_json(header, header_bytes), "tensors", sums);
    free(header);
    return entry;
}

static size_t padding_for(size_t bytes)
{
    return (DISK_ALIGN - bytes % DISK_ALIGN) % DISK_ALIGN;
}

static json_t *write_dense(const char *folder, uint32_t file, const struct geometry *g)
{
    char name[64], big[64], small[64];
    static const unsigned char zeros[DISK_ALIGN];
    snprintf(name, sizeof(name), "dense-%05u.safetensors", file + 1);
    snprintf(big, sizeof(big), "model.big.%u.weight", file);
    snprintf(small, sizeof(small), "model.small.%u", file);
    size_t words = g->dense_bytes / 8;
    uint64_t *data = malloc(words * 8);
    for (size_t i = 0; i < words; i++)
        data[i] = dense_word(file, i);
    const float one[3] = {1, 2, (float)file};
    size_t padding = padding_for(words * 8 + sizeof(one));
    struct tensor tensors[] = {make_tensor(big, DTYPE_U64, 2, words / 2, 2), make_tensor(small, DTYPE_F32, 1, 3, 1),
                               make_tensor("padding", DTYPE_U8, 1, padding, 1)};
    const void *contents[] = {data, one, zeros};
    const bool listed[] = {true, true, true};
    json_t *entry = write_file(folder, name, tensors, contents, listed, padding ? 3 : 2);
    free(data);
    json_object_set_new(entry, "name", json_string(name));
    return entry;
}

/* The stripe's file of a layer: its slices of every expert, and in the first stripe the tables. */
static json_t *write_stripe(const char *folder, uint32_t layer, uint32_t stripe, const struct geometry *g,
                            size_t slice_bytes, const uint64_t *bytes, const void *const tables[static 2])
{
    char name[64];
    static const unsigned char zeros[DISK_ALIGN];
    struct range slices = split(EXPERT_SLICES, stripe, g->stripes ? g->stripes : 1);
    size_t count = g->experts;
    struct tensor *tensors = calloc(count + 3, sizeof(*tensors));
    const void **data = calloc(count + 3, sizeof(*data));
    bool *listed = calloc(count + 3, sizeof(*listed));
    for (uint32_t e = 0; e < g->experts; e++) {
        snprintf(name, sizeof(name), "model.layers.%u.mlp.experts.%u", layer, e);
        tensors[e] = make_tensor(name, DTYPE_U8, 2, slices.count, slice_bytes);
        data[e] = (const char *)bytes + ((size_t)e * EXPERT_SLICES + slices.first) * slice_bytes;
    }
    if (stripe == 0) {
        tensors[count] = make_tensor("experts.checksums", DTYPE_U64, 2, g->experts, EXPERT_SLICES);
        tensors[count + 1] = make_tensor("experts.exponents", DTYPE_I32, 2, g->experts, EXPERT_MATRICES);
        size_t padding = padding_for(tensors[count].bytes + tensors[count + 1].bytes);
        tensors[count + 2] = make_tensor("padding", DTYPE_U8, 1, padding, 1);
        data[count] = tables[0];
        data[count + 1] = tables[1];
        data[count + 2] = zeros;
        listed[count] = listed[count + 1] = true;
        count += padding ? 3 : 2;
    }
    snprintf(name, sizeof(name), CONTAINER_EXPERTS_NAME, stripe, layer);
    json_t *entry = write_file(folder, name, tensors, data, listed, count);
    json_object_set_new(entry, "name", json_string(name));
    free(tensors);
    free(data);
    free(listed);
    return entry;
}

static void add_file(json_t *files, json_t *entry)
{
    char name[64];
    snprintf(name, sizeof(name), "%s", json_string_value(json_object_get(entry, "name")));
    json_object_del(entry, "name");
    json_object_set_new(files, name, entry);
}

static void write_experts(const char *folder, uint32_t layer, const struct geometry *g, size_t slice_bytes,
                          json_t *files)
{
    size_t blob = slice_bytes * EXPERT_SLICES, words = blob / 8;
    uint64_t *checksums = calloc((size_t)g->experts * EXPERT_SLICES, 8);
    int32_t *exponents = calloc((size_t)g->experts * EXPERT_MATRICES, 4);
    uint64_t *bytes = malloc(g->experts * blob);
    for (uint32_t e = 0; e < g->experts; e++) {
        uint64_t *own = bytes + e * words;
        for (size_t i = 0; i < words; i++)
            own[i] = expert_word((layer - 1) * g->experts + e, i);
        for (uint32_t s = 0; s < EXPERT_SLICES; s++)
            checksums[e * EXPERT_SLICES + s] = XXH3_64bits((char *)own + s * slice_bytes, slice_bytes);
        for (uint32_t m = 0; m < EXPERT_MATRICES; m++)
            exponents[e * EXPERT_MATRICES + m] = (int32_t)(e + m) % 7 - 3;
    }
    const void *tables[] = {checksums, exponents};
    for (uint32_t s = 0; s < (g->stripes ? g->stripes : 1); s++)
        add_file(files, write_stripe(folder, layer, s, g, slice_bytes, bytes, tables));
    free(checksums);
    free(exponents);
    free(bytes);
}

void harness_make_container(const char *folder, const struct geometry *g)
{
    const struct expert_shape shape = {.format = WEIGHT_INT4, .hidden = g->hidden, .width = g->width};
    size_t slice_bytes = expert_slice_bytes(&shape);
    assert_int_equal(mkdir(folder, 0700), 0);
    json_t *files = json_object();
    for (uint32_t f = 0; f < 2; f++)
        add_file(files, write_dense(folder, f, g));
    for (uint32_t layer = 1; layer < g->layers; layer++)
        write_experts(folder, layer, g, slice_bytes, files);
    json_t *manifest = json_pack(
        "{s:i, s:i, s:s, s:s, s:o, s:n, s:f, s:s, s:s, s:i, s:i, s:I, s:o}", "format", CONTAINER_FORMAT, "numerics",
        CONTAINER_NUMERICS, "producer", "test", "source", "test", "config", make_config(g), "generation", "qk_norm_eps",
        1e-6, "dense_format", "int8", "expert_format", "int4", "slices", (int)EXPERT_SLICES, "stripes",
        g->stripes ? (int)g->stripes : 1, "slice_bytes", (json_int_t)slice_bytes, "files", files);
    assert_non_null(manifest);
    uint64_t checksum;
    char digits[CHECKSUM_DIGITS + 1], path[512];
    struct error error;
    if (container_checksum(manifest, &checksum, &error) < 0)
        fail_msg("%s", error.text);
    checksum_format(checksum, digits);
    json_object_set_new(manifest, "checksum", json_string(digits));
    snprintf(path, sizeof(path), "%s/%s", folder, CONTAINER_MANIFEST);
    assert_int_equal(json_dump_file(manifest, path, JSON_INDENT(1)), 0);
    json_decref(manifest);
}

void harness_flip_byte(const char *path, uint64_t offset, uint8_t flip)
{
    _cleanup_close_ int fd = open(path, O_RDWR | O_CLOEXEC);
    uint8_t byte;
    assert_true(fd >= 0);
    assert_int_equal(pread(fd, &byte, 1, (off_t)offset), 1);
    byte ^= flip;
    assert_int_equal(pwrite(fd, &byte, 1, (off_t)offset), 1);
    assert_int_equal(fsync(fd), 0);
}

void harness_scratch(const char *name, char ret_path[static 256])
{
    char *here = getcwd(NULL, 0);
    snprintf(ret_path, 256, "%s/%s-XXXXXX", here, name);
    free(here);
    assert_non_null(mkdtemp(ret_path));
}

void harness_remove(const char *path)
{
    DIR *dir = opendir(path);
    for (struct dirent *entry; dir && (entry = readdir(dir));) {
        char inner[600];
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0)
            continue;
        snprintf(inner, sizeof(inner), "%s/%s", path, entry->d_name);
        if (unlink(inner) < 0)
            harness_remove(inner);
    }
    if (dir)
        closedir(dir);
    rmdir(path);
}

/* --- the instance --- */

static int worlds; /* opened so far: each has a name of its own */

void harness_end(const char *scratch)
{
    for (int i = 0; i < worlds; i++) {
        char instance[INSTANCE_NAME_MAX];
        snprintf(instance, sizeof(instance), "test-iod-%d-%d", (int)getpid(), i);
        segment_unlink_all(instance);
    }
    harness_remove(scratch);
}

void world_open(struct world *world, const char *scratch, const char *container_path,
                const struct world_options *options)
{
    struct error error;
    struct container *container;
    *world = (struct world){.tick = 1};
    snprintf(world->instance, sizeof(world->instance), "test-iod-%d-%d", (int)getpid(), worlds);
    snprintf(world->rundir, sizeof(world->rundir), "%s/run-%d", scratch, worlds++);
    assert_int_equal(mkdir(world->rundir, 0700), 0);
    if (container_open(container_path, &container, &error) < 0)
        fail_msg("%s", error.text);
    struct facts *f = &world->facts;
    *f = (struct facts){.config = container->config,
                        .identity = container->identity,
                        .stripes = container->stripes,
                        .dense_format = container->dense_format,
                        .expert_format = container->expert_format,
                        .workers = options->workers,
                        .threads = 1,
                        .nodes = options->nodes,
                        .activations = ACTIVATIONS_INT8,
                        .kv = KV_F16,
                        .io = options->io,
                        .index_topk = 64,
                        .max_rows = 1,
                        .logit_rows = 1,
                        .kv_pages = 1,
                        .page_tokens = 64,
                        .context = 64,
                        .slots = 1,
                        .prefill_chunk = 1,
                        .pool_slots = options->slots};
    snprintf(f->container, sizeof(f->container), "%s", container_path);
    for (uint32_t w = 0; w < options->workers; w++)
        f->core_count[w] = 1;
    const struct pool_shape shape = {.slots = options->slots,
                                     .nodes = options->nodes,
                                     .moe_layers = (uint32_t)container->expert_count,
                                     .experts = container->config.experts,
                                     .slice_bytes = container->slice_bytes};
    if (control_create(world->instance, f, &world->control, &error) < 0 ||
        pool_create(world->instance, &shape, &error) < 0 || pool_attach(world->instance, &world->pool, &error) < 0)
        fail_msg("%s", error.text);
    container_close(container);
    for (uint32_t w = 0; w < options->workers; w++)
        world_tick(world, w, 1);
    world->doorbell = eventfd(0, EFD_NONBLOCK);
    assert_true(world->doorbell >= 0);
}

void world_close(struct world *world)
{
    pool_detach(&world->pool);
    control_detach(world->control);
    close(world->doorbell);
    assert_true(segment_unlink_all(world->instance) >= 2);
    harness_remove(world->rundir);
}

static void ring_if(struct world *world, _Atomic uint32_t *flag)
{
    uint64_t one = 1;
    if (atomic_load(flag))
        assert_int_equal(write(world->doorbell, &one, sizeof(one)), sizeof(one));
}

void world_tick(struct world *world, uint32_t worker, uint64_t tick)
{
    atomic_store(&world->control->workers[worker].tick, tick);
}

static void ask(struct world *world, uint32_t worker, uint32_t expert, uint64_t tick, enum demand_kind kind)
{
    const struct expert_request request = {
        .expert = expert, .epoch = atomic_load(&world->control->epoch), .tick = tick, .kind = kind};
    assert_int_equal(ring_push(&world->control->rings[worker], &request), 0);
    ring_if(world, &world->control->iod.asleep);
}

void world_ask(struct world *world, uint32_t worker, uint32_t expert, uint64_t tick)
{
    ask(world, worker, expert, tick, KIND_DEMAND);
}

void world_guess(struct world *world, uint32_t worker, uint32_t expert, uint64_t tick)
{
    ask(world, worker, expert, tick, KIND_LOOKAHEAD);
}

void world_use(struct world *world, uint32_t expert, uint32_t flags)
{
    uses_append(&world->control->uses, &(struct use){.expert = expert, .flags = flags | USE_LAYER}, 1);
}

uint64_t harness_now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

int world_get(struct world *world, uint32_t worker, uint32_t expert, uint64_t tick, int timeout_ms,
              struct slot_ref *ret_ref)
{
    _Atomic uint32_t *published = &world->control->workers[worker].published;
    uint64_t end = harness_now_ms() + (uint64_t)timeout_ms;
    struct slot_ref failed = {0};
    bool asked = false;
    while (true) {
        uint32_t seen = atomic_load(published);
        int status = pool_pin(&world->pool, expert, worker, tick, ret_ref);
        bool old_failure = ret_ref->index == failed.index && ret_ref->generation == failed.generation;
        if (status == 0 || (status == -EIO && asked && !old_failure))
            return status;
        if (!asked) {
            if (status == -EIO)
                failed = *ret_ref;
            world_ask(world, worker, expert, tick);
            asked = true;
        }
        uint64_t now = harness_now_ms();
        if (now >= end)
            return -ETIMEDOUT;
        futex_wait(published, seen, (int)(end - now));
    }
}

void world_put(struct world *world, uint32_t worker, struct slot_ref ref)
{
    pool_unpin(&world->pool, ref, worker);
    ring_if(world, &world->control->iod.starved);
}

size_t world_wrong_words(struct world *world, struct slot_ref ref, uint32_t expert, size_t step)
{
    size_t words = world->pool.slice_bytes / 8, wrong = 0;
    for (uint32_t s = 0; s < EXPERT_SLICES; s++) {
        if (!pool_slice(&world->pool, ref.index, s))
            assert_int_equal(pool_attach_objects(&world->pool, NULL), 0);
        const uint64_t *slice = pool_slice(&world->pool, ref.index, s);
        assert_non_null(slice);
        for (size_t i = 0; i < words; i += step)
            wrong += slice[i] != expert_word(expert, s * words + i);
    }
    return wrong;
}

/* --- the daemon as a process --- */

/* io_uring_setup says EPERM, as in a container with a strict profile. */
static void forbid_io_uring(void)
{
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_io_uring_setup, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {.len = sizeof(code) / sizeof(code[0]), .filter = code};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0 || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) < 0)
        _exit(99);
}

void iod_spawn(struct world *world, bool forbid_uring, struct iod_process *ret_process)
{
    int pipe_fds[2];
    char program[400], parent[16], notify[16], doorbell[16];
    const char *bin = getenv("CALYPTE_BIN");
    if (!bin)
        fail_msg("CALYPTE_BIN does not say where calypte-iod is");
    assert_int_equal(pipe(pipe_fds), 0);
    fcntl(pipe_fds[0], F_SETFD, FD_CLOEXEC);
    snprintf(program, sizeof(program), "%s/calypte-iod", bin);
    snprintf(parent, sizeof(parent), "%d", (int)getpid());
    snprintf(notify, sizeof(notify), "%d", pipe_fds[1]);
    snprintf(doorbell, sizeof(doorbell), "%d", world->doorbell);
    snprintf(ret_process->log_path, sizeof(ret_process->log_path), "%s/iod.log", world->rundir);
    fflush(NULL);
    ret_process->pid = fork();
    if (ret_process->pid == 0) {
        int log = open(ret_process->log_path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
        dup2(log, STDERR_FILENO);
        if (forbid_uring)
            forbid_io_uring();
        execl(program, "calypte-iod", "--instance", world->instance, "--rundir", world->rundir, "--parent", parent,
              "--notify-fd", notify, "--doorbell-fd", doorbell, (char *)NULL);
        _exit(98);
    }
    close(pipe_fds[1]);
    ret_process->notify_fd = pipe_fds[0];
}

int iod_wait_ready(struct iod_process *process, char ret_text[static 1200])
{
    size_t used = 0;
    ssize_t got;
    while (used < 1199 && (got = read(process->notify_fd, ret_text + used, 1199 - used)) > 0)
        used += (size_t)got;
    ret_text[used] = 0;
    close(process->notify_fd);
    return strcmp(ret_text, "ready\n") == 0 ? 0 : -1;
}

int iod_stop(struct iod_process *process, int signal)
{
    int status;
    if (signal)
        kill(process->pid, signal);
    assert_int_equal(waitpid(process->pid, &status, 0), process->pid);
    return status;
}

void iod_read_log(const struct iod_process *process, char ret_text[static 4096])
{
    _cleanup_close_ int fd = open(process->log_path, O_RDONLY | O_CLOEXEC);
    ssize_t got = fd < 0 ? 0 : read(fd, ret_text, 4095);
    ret_text[got < 0 ? 0 : got] = 0;
}

/* --- the daemon as a thread --- */

static pthread_mutex_t log_mutex = PTHREAD_MUTEX_INITIALIZER;
static char *log_text;

static void keep_line(const char *line)
{
    pthread_mutex_lock(&log_mutex);
    char *longer;
    if (asprintf(&longer, "%s%s\n", log_text ? log_text : "", line) >= 0) {
        free(log_text);
        log_text = longer;
    }
    pthread_mutex_unlock(&log_mutex);
}

char *iod_thread_log(void)
{
    pthread_mutex_lock(&log_mutex);
    char *text = log_text ? log_text : strdup("");
    log_text = NULL;
    pthread_mutex_unlock(&log_mutex);
    return text;
}

static void *serve(void *argument)
{
    struct iod_thread *iod = argument;
    struct loader *loader = NULL;
    const struct loader_options options = {.instance = iod->world->instance,
                                           .rundir = iod->world->rundir,
                                           .doorbell_fd = iod->world->doorbell,
                                           .stop_fd = iod->stop_fd,
                                           .method = iod->method,
                                           .log = keep_line};
    iod->open_status = loader_open(&options, &loader, &iod->error);
    pthread_barrier_wait(&iod->opened);
    if (!loader)
        return NULL;
    iod->run_status = loader_run(loader, &iod->error);
    loader_close(loader);
    return NULL;
}

int iod_thread_start(struct iod_thread *iod, struct world *world, const struct io_method *method)
{
    *iod = (struct iod_thread){.world = world, .method = method, .stop_fd = eventfd(0, 0)};
    pthread_barrier_init(&iod->opened, NULL, 2);
    assert_int_equal(pthread_create(&iod->thread, NULL, serve, iod), 0);
    pthread_barrier_wait(&iod->opened);
    int status = iod->open_status;
    if (status < 0) {
        pthread_join(iod->thread, NULL);
        pthread_barrier_destroy(&iod->opened);
        close(iod->stop_fd);
    } else {
        assert_int_equal(pool_attach_objects(&world->pool, NULL), 0);
    }
    return status;
}

int iod_thread_stop(struct iod_thread *iod)
{
    uint64_t one = 1;
    assert_int_equal(write(iod->stop_fd, &one, sizeof(one)), sizeof(one));
    pthread_join(iod->thread, NULL);
    pthread_barrier_destroy(&iod->opened);
    close(iod->stop_fd);
    return iod->run_status;
}
