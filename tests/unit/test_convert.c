/* The conversion as a library: what it writes is what the checkpoint says, interruptions do not show, bad checkpoints
 * are named. */
#include "tests/unit/convert_fixture.h"

#include "compute/math.h"

#include <math.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

static char *scratch, *glm_a;

static int setup(void **state)
{
    (void)state;
    scratch = fixture_scratch();
    glm_a = fixture_path("oracles/glm-a/checkpoint");
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    free(glm_a);
    fixture_remove(scratch);
    return 0;
}

/* A quantised matrix of a container, read back. */
struct matrix {
    const uint8_t *quanta;
    const uint16_t *scales;
    enum weight_format format;
    uint32_t k;
    int exponent;
};

static float weight_at(const struct matrix *matrix, uint32_t row, uint32_t column)
{
    size_t block = (size_t)(row / BLOCK_ROWS) * (matrix->k / BLOCK_COLUMNS) + column / BLOCK_COLUMNS;
    uint32_t r = row % BLOCK_ROWS, c = column % BLOCK_COLUMNS;
    int quantum;
    if (matrix->format == WEIGHT_INT8) {
        quantum = (int8_t)matrix->quanta[block * 1024 + c / 4 * 64 + r * 4 + c % 4];
    } else {
        uint8_t pair = matrix->quanta[block * 512 + c % 32 / 4 * 64 + r * 4 + c % 4];
        quantum = (c < 32 ? pair & 15 : pair >> 4) - 8;
    }
    return ldexpf((float)quantum * math_f16_to_f32(matrix->scales[block * BLOCK_ROWS + r]), matrix->exponent);
}

/* Finds a matrix in the (single) dense file, which is in memory at `data`. */
static struct matrix dense_matrix(const struct dense_file *file, const uint8_t *data, const char *name)
{
    char scale[160], exponent[160];
    snprintf(scale, sizeof scale, "%s_scale", name);
    snprintf(exponent, sizeof exponent, "%s_exponent", name);
    const struct tensor *q = safetensors_find(&file->header, name), *s = safetensors_find(&file->header, scale),
                        *e = safetensors_find(&file->header, exponent);
    if (!q || !s || !e)
        fail_msg("%s is not whole", name);
    assert_int_equal(s->dtype, DTYPE_F16);
    assert_int_equal(e->dtype, DTYPE_I32);
    return (struct matrix){.quanta = data + q->offset,
                           .scales = (const uint16_t *)(const void *)(data + s->offset),
                           .format = q->dtype == DTYPE_I8 ? WEIGHT_INT8 : WEIGHT_INT4,
                           .k = (uint32_t)q->shape[1] * BLOCK_COLUMNS,
                           .exponent = *(const int32_t *)(const void *)(data + e->offset)};
}

static float *source_values(const struct checkpoint *checkpoint, const char *name, uint64_t *ret_rows,
                            uint64_t *ret_columns)
{
    struct source_tensor *tensor = checkpoint_find(checkpoint, name);
    if (!tensor)
        fail_msg("%s is missing", name);
    bool vector = tensor->tensor->dims == 1;
    struct source source;
    struct error error;
    *ret_rows = vector ? 1 : tensor->tensor->shape[0];
    *ret_columns = tensor->tensor->shape[vector ? 0 : 1];
    float *values = malloc(*ret_rows * *ret_columns * sizeof *values);
    assert_non_null(values);
    if (source_check(checkpoint, tensor, vector ? 0 : *ret_rows, *ret_columns, &source, &error) < 0 ||
        source_open(&source, &error) < 0 || source_read(&source, 0, *ret_rows, values, &error) < 0)
        fail_msg("%s", error.text);
    source_close(&source);
    return values;
}

/* The weights of this checkpoint can be held exactly by 4 and 8 bits, and so they must be. */
static void test_exact(void **state)
{
    (void)state;
    _cleanup_free_ char *folder = fixture_join(scratch, "exact");
    struct error error = {{0}};
    if (fixture_convert(glm_a, folder, NULL, 2, 0, &error) < 0)
        fail_msg("%s", error.text);
    struct container *container;
    struct checkpoint checkpoint;
    assert_int_equal(container_open(folder, &container, &error), 0);
    assert_int_equal(checkpoint_open(glm_a, &checkpoint, &error), 0);
    const struct model_config *c = &container->config;
    assert_int_equal(container->dense_count, 1);
    size_t bytes, compared = 0;
    _cleanup_free_ uint8_t *dense = fixture_read(folder, "dense-00001.safetensors", &bytes);
    for (size_t i = 0; i < checkpoint.tensor_count; i++) {
        const char *name = checkpoint.tensors[i].tensor->name;
        uint64_t rows, columns;
        uint32_t layer, expert;
        char part[16];
        _cleanup_free_ float *values = source_values(&checkpoint, name, &rows, &columns);
        const struct tensor *stored = safetensors_find(&container->dense[0].header, name);
        if (sscanf(name, "model.layers.%u.mlp.experts.%u.%15[^_]", &layer, &expert, part) == 3) {
            int m = part[0] == 'g' ? EXPERT_GATE : part[0] == 'u' ? EXPERT_UP : EXPERT_DOWN;
            const struct expert_layer *file = &container->experts[model_moe_index(c, layer)];
            _cleanup_free_ uint8_t *blobs =
                fixture_read(folder, strrchr(file->stripes[0].header.path, '/') + 1, &bytes);
            for (uint32_t s = 0; s < EXPERT_SLICES; s++) {
                struct slice_part parts[EXPERT_MATRICES];
                expert_slice(&container->expert_shape, s, parts);
                const uint8_t *slice = blobs + file->stripes[0].offsets[expert] + s * container->slice_bytes;
                struct matrix matrix = {.quanta = slice + parts[m].quanta,
                                        .scales = (const uint16_t *)(const void *)(slice + parts[m].scales),
                                        .format = WEIGHT_INT4,
                                        .k = (uint32_t)columns,
                                        .exponent = file->exponents[expert * EXPERT_MATRICES + (uint32_t)m]};
                for (uint32_t r = 0; r < parts[m].blocks.count * BLOCK_ROWS; r++) {
                    for (uint32_t k = 0; k < columns; k++)
                        assert_true(weight_at(&matrix, r, k) ==
                                    values[(parts[m].blocks.first * BLOCK_ROWS + r) * columns + k]);
                }
            }
        } else if (strstr(name, "kv_b_proj")) {
            sscanf(name, "model.layers.%u.", &layer);
            char uk[80], uv[80];
            snprintf(uk, sizeof uk, "model.layers.%u.self_attn.w_uk.weight", layer);
            snprintf(uv, sizeof uv, "model.layers.%u.self_attn.w_uv.weight", layer);
            struct matrix k_part = dense_matrix(&container->dense[0], dense, uk),
                          v_part = dense_matrix(&container->dense[0], dense, uv);
            assert_int_equal(k_part.k, c->qk_nope);
            assert_int_equal(v_part.k, c->kv_lora);
            for (uint32_t row = 0; row < rows; row++) {
                uint32_t head = row / (c->qk_nope + c->v_head), within = row % (c->qk_nope + c->v_head);
                for (uint32_t l = 0; l < columns; l++) {
                    float got = within < c->qk_nope ? weight_at(&k_part, head * c->kv_lora + l, within)
                                                    : weight_at(&v_part, head * c->v_head + within - c->qk_nope, l);
                    assert_true(got == values[row * columns + l]);
                }
            }
        } else if (stored && stored->dims == 3) {
            struct matrix matrix = dense_matrix(&container->dense[0], dense, name);
            assert_int_equal(matrix.format, WEIGHT_INT8);
            for (uint32_t r = 0; r < rows; r++) {
                for (uint32_t k = 0; k < columns; k++)
                    assert_true(weight_at(&matrix, r, k) == values[r * columns + k]);
            }
        } else if (stored && stored->dtype == DTYPE_F32) {
            assert_memory_equal(dense + stored->offset, values, rows * columns * sizeof(float));
        } else if (stored) {
            assert_non_null(strstr(name, "mlp.gate.weight"));
            assert_int_equal(stored->dtype, checkpoint.tensors[i].tensor->dtype);
            for (uint64_t v = 0; v < rows * columns; v++) {
                uint16_t half;
                memcpy(&half, dense + stored->offset + v * 2, 2);
                assert_true(math_bf16_to_f32(half) == values[v]);
            }
        } else {
            fail_msg("%s is not in the container", name);
        }
        compared++;
    }
    assert_int_equal(compared, checkpoint.tensor_count);
    checkpoint_close(&checkpoint);
    container_close(container);
}

/* Neither the number of jobs nor a stop at any moment shows in the bytes. */
static void test_same_bytes(void **state)
{
    (void)state;
    _cleanup_free_ char *one = fixture_join(scratch, "one"), *many = fixture_join(scratch, "many"),
                        *again = fixture_join(scratch, "again");
    struct error error = {{0}};
    assert_int_equal(fixture_convert(glm_a, one, NULL, 1, 0, &error), 0);
    assert_int_equal(fixture_convert(glm_a, many, NULL, 7, 0, &error), 0);
    fixture_assert_same(one, many);
    unsigned interrupted = 0;
    for (unsigned tick = 1; tick < 40; tick++) {
        int status = fixture_convert(glm_a, again, NULL, 2, tick, &error);
        if (status == 0)
            break;
        assert_int_equal(status, -EINTR);
        interrupted++;
        struct container *container;
        assert_true(container_open(again, &container, &error) < 0);
    }
    assert_true(interrupted > 2);
    fixture_assert_same(one, again);
    /* Once more: it is done, and stays as it is. */
    assert_int_equal(fixture_convert(glm_a, again, NULL, 2, 0, &error), 0);
    fixture_assert_same(one, again);
}

/* A file of an earlier run that was damaged since is made again. */
static void test_damaged_meanwhile(void **state)
{
    (void)state;
    _cleanup_free_ char *folder = fixture_join(scratch, "damaged"), *one = fixture_join(scratch, "reference");
    struct error error = {{0}};
    assert_int_equal(fixture_convert(glm_a, one, NULL, 2, 0, &error), 0);
    _cleanup_free_ char *dense = fixture_join(folder, "dense-00001.safetensors"), *part = NULL;
    for (unsigned tick = 1; access(dense, F_OK) < 0; tick++)
        assert_int_equal(fixture_convert(glm_a, folder, NULL, 2, tick, &error), -EINTR);
    part = fixture_join(folder, "experts-0-00001.safetensors.part");
    size_t bytes;
    _cleanup_free_ uint8_t *data = fixture_read(folder, "dense-00001.safetensors", &bytes);
    data[bytes / 2] ^= 16;
    fixture_write(folder, "dense-00001.safetensors", data, bytes);
    fixture_write(folder, "experts-0-00001.safetensors.part", "rest", 4);
    assert_int_equal(fixture_convert(glm_a, folder, NULL, 2, 0, &error), 0);
    fixture_assert_same(one, folder);
}

static void assert_fails(const char *source, const char *destination, const struct plan_options *options,
                         const char *expected)
{
    struct error error = {{0}};
    if (fixture_convert(source, destination, options, 2, 0, &error) >= 0)
        fail_msg("converted, expected: %s", expected);
    if (!strstr(error.text, expected) || strchr(error.text, '\n'))
        fail_msg("%s\n  without: %s", error.text, expected);
}

static void test_destinations(void **state)
{
    (void)state;
    struct plan_options int8 = {.experts = WEIGHT_INT8, .dense = WEIGHT_INT8};
    _cleanup_free_ char *folder = fixture_join(scratch, "places"), *file = fixture_join(scratch, "file"),
                        *inside = fixture_join(glm_a, "out"), *nowhere = fixture_join(scratch, "no/where"),
                        *other = fixture_join(scratch, "other");
    struct error error = {{0}};
    assert_int_equal(fixture_convert(glm_a, folder, NULL, 2, 0, &error), 0);
    assert_fails(glm_a, folder, &int8, "holds another container already");
    fixture_write(scratch, "file", "x", 1);
    assert_fails(glm_a, file, NULL, "Not a directory");
    assert_fails(glm_a, glm_a, NULL, "never written to");
    assert_fails(glm_a, inside, NULL, "never written to");
    assert_true(access(inside, F_OK) < 0);
    assert_fails(glm_a, nowhere, NULL, "cannot create this folder");
    assert_int_equal(mkdir(other, 0700), 0);
    fixture_write(other, "letter.txt", "x", 1);
    assert_fails(glm_a, other, NULL, "holds letter.txt");
    /* An unfinished run with other options is not touched. */
    _cleanup_free_ char *half = fixture_join(scratch, "half"), *dense = fixture_join(half, "dense-00001.safetensors");
    for (unsigned tick = 1; access(dense, F_OK) < 0; tick++)
        assert_int_equal(fixture_convert(glm_a, half, NULL, 2, tick, &error), -EINTR);
    assert_fails(glm_a, half, &int8, "unfinished conversion of another checkpoint or with other options");
    assert_int_equal(fixture_convert(glm_a, half, NULL, 2, 0, &error), 0);
    fixture_assert_same(folder, half);
    /* An attempt that fails before a file is done leaves nothing. */
    _cleanup_free_ char *early = fixture_join(scratch, "early"),
                        *first = fixture_join(early, "dense-00001.safetensors");
    assert_int_equal(fixture_convert(glm_a, early, NULL, 2, 1, &error), -EINTR);
    assert_true(access(early, F_OK) < 0 || access(first, F_OK) == 0);
}

static void test_dense_int4(void **state)
{
    (void)state;
    struct plan_options options = {.experts = WEIGHT_INT8, .dense = WEIGHT_INT4, .qk_norm_eps = 1e-5};
    _cleanup_free_ char *folder = fixture_join(scratch, "formats");
    struct error error = {{0}};
    assert_int_equal(fixture_convert(glm_a, folder, &options, 2, 0, &error), 0);
    struct container *container;
    assert_int_equal(container_open(folder, &container, &error), 0);
    const struct safetensors *dense = &container->dense[0].header;
    assert_int_equal(safetensors_find(dense, "lm_head.weight")->dtype, DTYPE_U8);
    assert_int_equal(safetensors_find(dense, "lm_head.weight")->shape[2], 512);
    assert_int_equal(safetensors_find(dense, "model.layers.0.self_attn.w_uk.weight")->dtype, DTYPE_U8);
    assert_int_equal(safetensors_find(dense, "model.layers.4.eh_proj.weight")->dtype, DTYPE_I8);
    assert_int_equal(safetensors_find(dense, "model.layers.4.self_attn.o_proj.weight")->dtype, DTYPE_I8);
    assert_int_equal(safetensors_find(dense, "model.layers.0.self_attn.indexer.weights_proj.weight")->dtype, DTYPE_F32);
    assert_true(container->config.qk_norm_eps == 1e-5f);
    assert_int_equal(container->expert_format, WEIGHT_INT8);
    container_close(container);
}

/* Changes to a good checkpoint, and what the error must say. */
static void rename_tensor(struct fixture_checkpoint *c, const char *from, const char *to)
{
    json_object_set(c->header, to, json_object_get(c->header, from));
    json_object_del(c->header, from);
}

static void missing_expert(struct fixture_checkpoint *c)
{
    rename_tensor(c, "model.layers.2.mlp.experts.3.up_proj.weight", "model.layers.2.mlp.experts.6.up_proj.weight");
}

static void unknown_tensor(struct fixture_checkpoint *c)
{
    json_object_set_new(c->header, "model.layers.1.self_attn.surprise",
                        json_loads("{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}", 0, NULL));
}

static void turned_matrix(struct fixture_checkpoint *c)
{
    json_t *tensor = json_object_get(c->header, "model.layers.0.self_attn.q_b_proj.weight");
    json_object_set_new(tensor, "shape", json_pack("[i,i]", 128, 384));
}

static void wrong_dtype(struct fixture_checkpoint *c)
{
    json_t *tensor = json_object_get(c->header, "model.norm.weight");
    json_object_set_new(tensor, "dtype", json_string("I8"));
    json_object_set_new(tensor, "shape", json_pack("[i]", 512));
}

static void integer_weight(struct fixture_checkpoint *c)
{
    json_t *tensor = json_object_get(c->header, "lm_head.weight");
    json_object_set_new(tensor, "dtype", json_string("I32"));
    json_object_set_new(tensor, "shape", json_pack("[i,i]", 512, 128));
}

static void f8_without_scale(struct fixture_checkpoint *c)
{
    json_t *tensor = json_object_get(c->header, "model.embed_tokens.weight");
    json_object_set_new(tensor, "dtype", json_string("F8_E4M3"));
    json_object_set_new(tensor, "shape", json_pack("[i,i]", 512, 512));
}

static void not_a_number(struct fixture_checkpoint *c)
{
    memcpy(fixture_data(c, "model.layers.1.mlp.experts.2.down_proj.weight") + 1000, "\xc0\x7f", 2);
}

static void infinite_norm(struct fixture_checkpoint *c)
{
    memcpy(fixture_data(c, "model.layers.3.input_layernorm.weight"), "\x80\xff", 2);
}

static void infinite_router(struct fixture_checkpoint *c)
{
    memcpy(fixture_data(c, "model.layers.3.mlp.gate.weight") + 20, "\x80\x7f", 2);
}

static void scale_without_weight(struct fixture_checkpoint *c)
{
    json_object_set_new(c->header, "model.layers.1.mlp.gate.weight_scale_inv",
                        json_loads("{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[0,0]}", 0, NULL));
}

static void other_quantisation(struct fixture_checkpoint *c)
{
    json_object_set_new(c->config, "quantization_config", json_pack("{s:s}", "quant_method", "gptq"));
}

static void other_blocks(struct fixture_checkpoint *c)
{
    json_object_set_new(c->config, "quantization_config",
                        json_pack("{s:s, s:[i,i]}", "quant_method", "fp8", "weight_block_size", 64, 64));
}

static void other_model(struct fixture_checkpoint *c)
{
    json_object_set_new(c->config, "model_type", json_string("mamba"));
}

static const struct {
    void (*change)(struct fixture_checkpoint *checkpoint);
    const char *expected;
} changes[] = {
    {missing_expert, "tensor model.layers.2.mlp.experts.3.up_proj.weight is missing"},
    {unknown_tensor, "tensor model.layers.1.self_attn.surprise is not part of a glm_moe_dsa model"},
    {turned_matrix,
     "tensor model.layers.0.self_attn.q_b_proj.weight has shape [128, 384], the configuration needs [384, 128]"},
    {wrong_dtype, "tensor model.norm.weight has"},
    {integer_weight, "tensor lm_head.weight has"},
    {f8_without_scale, "tensor model.embed_tokens.weight has shape"},
    {not_a_number, "tensor model.layers.1.mlp.experts.2.down_proj.weight holds a NaN"},
    {infinite_norm, "tensor model.layers.3.input_layernorm.weight holds a NaN or an infinity"},
    {infinite_router, "tensor model.layers.3.mlp.gate.weight holds a NaN or an infinity"},
    {scale_without_weight, "tensor model.layers.1.mlp.gate.weight_scale_inv is not part"},
    {other_quantisation, "quant_method gptq is not supported"},
    {other_blocks, "weight_block_size must be [128, 128]"},
    {other_model, "model_type mamba is not supported"},
};

static void test_bad_checkpoints(void **state)
{
    (void)state;
    _cleanup_free_ char *source = fixture_join(scratch, "bad"), *destination = fixture_join(scratch, "bad-out");
    assert_int_equal(mkdir(source, 0700), 0);
    for (size_t i = 0; i < sizeof changes / sizeof changes[0]; i++) {
        struct fixture_checkpoint checkpoint;
        fixture_load(glm_a, &checkpoint);
        changes[i].change(&checkpoint);
        fixture_store(&checkpoint, source);
        fixture_unload(&checkpoint);
        assert_fails(source, destination, NULL, changes[i].expected);
        /* What was begun is not a container; what was not begun has left nothing. */
        _cleanup_free_ char *manifest = fixture_join(destination, CONTAINER_MANIFEST);
        assert_true(access(manifest, F_OK) < 0);
        fixture_remove(strdup(destination));
    }
}

/* Tensors that are known not to be needed are left out with a note. */
static void test_ignored(void **state)
{
    (void)state;
    _cleanup_free_ char *source = fixture_join(scratch, "extra");
    assert_int_equal(mkdir(source, 0700), 0);
    struct fixture_checkpoint changed;
    fixture_load(glm_a, &changed);
    static const char *const names[] = {"model.layers.4.embed_tokens.weight", "model.layers.4.shared_head.head.weight",
                                        "model.layers.2.self_attn.indexer.wk.weight",
                                        "model.layers.0.self_attn.rotary_emb.inv_freq"};
    for (size_t i = 0; i < 4; i++)
        json_object_set_new(changed.header, names[i],
                            json_loads("{\"dtype\":\"BF16\",\"shape\":[0],\"data_offsets\":[0,0]}", 0, NULL));
    fixture_store(&changed, source);
    fixture_unload(&changed);
    struct checkpoint checkpoint;
    struct plan plan;
    struct plan_options options = {.experts = WEIGHT_INT4, .dense = WEIGHT_INT8};
    struct error error = {{0}};
    assert_int_equal(checkpoint_open(source, &checkpoint, &error), 0);
    if (plan_make(&checkpoint, &options, &plan, &error) < 0)
        fail_msg("%s", error.text);
    assert_int_equal(checkpoint.note_count, 4);
    plan_free(&plan);
    checkpoint_close(&checkpoint);
}

/* An index that is wrong or hostile: its text, the words of the error. */
static const struct {
    const char *index, *expected;
} indexes[] = {
    {"", "model.safetensors.index.json"},
    {"[]", "not a JSON object"},
    {"{}", "has no weight_map"},
    {"{\"weight_map\":{}}", "has no weight_map"},
    {"{\"weight_map\":{\"a\":\"../secret.safetensors\"}}", "tensor a is placed in ../secret.safetensors"},
    {"{\"weight_map\":{\"a\":\"/etc/secret.safetensors\"}}", "tensor a is placed in /etc/secret.safetensors"},
    {"{\"weight_map\":{\"a\":\"..\"}}", "tensor a is placed in .."},
    {"{\"weight_map\":{\"a\":\"\"}}", "tensor a is placed in"},
    {"{\"weight_map\":{\"a\":\"weights.bin\"}}", "tensor a is placed in weights.bin"},
    {"{\"weight_map\":{\"a\":7}}", "tensor a is placed in something"},
    {"{\"weight_map\":{\"a\":\"none.safetensors\"}}", "none.safetensors: No such file"},
    {"{\"weight_map\":{\"a\":\"tiny.safetensors\"}}", "tiny.safetensors: tensor a is missing there"},
    {"{\"weight_map\":{\"b\":\"tiny.safetensors\",\"b\":\"tiny.safetensors\"}}", "uplicate"},
    {"{\"weight_map\":{\"b\":\"short.safetensors\"}}", "short.safetensors: tensor b ends at byte 4"},
};

static void test_indexes(void **state)
{
    (void)state;
    static const char tiny[] =
        "\x3f\0\0\0\0\0\0\0{\"b\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}               1234";
    _cleanup_free_ char *source = fixture_join(scratch, "index"), *destination = fixture_join(scratch, "index-out");
    assert_int_equal(mkdir(source, 0700), 0);
    fixture_write(source, "config.json", "{}", 2);
    fixture_write(source, "tiny.safetensors", tiny, 8 + 0x3f + 4);
    fixture_write(source, "short.safetensors", tiny, 8 + 0x3f + 3);
    for (size_t i = 0; i < sizeof indexes / sizeof indexes[0]; i++) {
        fixture_write(source, "model.safetensors.index.json", indexes[i].index, strlen(indexes[i].index));
        assert_fails(source, destination, NULL, indexes[i].expected);
    }
    assert_true(access(destination, F_OK) < 0);
    _cleanup_free_ char *nowhere = fixture_join(scratch, "nowhere"), *empty = fixture_join(scratch, "empty");
    assert_fails(nowhere, destination, NULL,
                 "nowhere: No such file or directory; give the folder of a Hugging Face checkpoint");
    assert_int_equal(mkdir(empty, 0700), 0);
    fixture_write(empty, "config.json", "{}", 2);
    assert_fails(empty, destination, NULL, "not a Hugging Face checkpoint");
}

/* The same numbers stored as BF16, F16 and F32 are the same numbers. */
static void test_plain_types(void **state)
{
    (void)state;
    static const char *const types[] = {"BF16", "F16", "F32"};
    static const float numbers[6] = {0.0f, -1.0f, 1.5f, 1024.0f, -0.0078125f, 3.140625f};
    for (int t = 0; t < 3; t++) {
        uint8_t data[24];
        size_t size = t == 2 ? 4 : 2;
        for (size_t i = 0; i < 6; i++) {
            uint32_t bits;
            memcpy(&bits, &numbers[i], 4);
            uint16_t half = t == 1 ? math_f32_to_f16(numbers[i]) : (uint16_t)(bits >> 16);
            memcpy(data + i * size, size == 4 ? (void *)&bits : (void *)&half, size);
        }
        struct fixture_checkpoint made = {.config = json_object(), .data = data, .data_bytes = 6 * size};
        made.header = json_pack("{s:{s:s, s:[i,i], s:[i,i]}}", "w", "dtype", types[t], "shape", 2, 3, "data_offsets", 0,
                                (int)(6 * size));
        fixture_store(&made, scratch);
        struct checkpoint checkpoint;
        struct error error = {{0}};
        uint64_t rows, columns;
        assert_int_equal(checkpoint_open(scratch, &checkpoint, &error), 0);
        _cleanup_free_ float *values = source_values(&checkpoint, "w", &rows, &columns);
        assert_memory_equal(values, numbers, sizeof numbers);
        checkpoint_close(&checkpoint);
        json_decref(made.config);
        json_decref(made.header);
    }
    _cleanup_free_ char *config = fixture_join(scratch, "config.json"),
                        *weights = fixture_join(scratch, "model.safetensors");
    unlink(config);
    unlink(weights);
}

/* The index decides which of two copies counts; a tensor that it does not list is none of the checkpoint's. */
static void test_index_decides(void **state)
{
    (void)state;
    _cleanup_free_ char *source = fixture_join(scratch, "copies");
    assert_int_equal(mkdir(source, 0700), 0);
    static const char header[] = "{\"w\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},"
                                 "\"x\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[4,4]}}";
    for (int i = 0; i < 2; i++) {
        uint8_t file[256] = {sizeof header - 1};
        memcpy(file + 8, header, sizeof header - 1);
        float value = (float)(i + 1);
        memcpy(file + 8 + sizeof header - 1, &value, 4);
        fixture_write(source, i == 0 ? "a.safetensors" : "b.safetensors", file, 8 + sizeof header - 1 + 4);
    }
    fixture_write(source, "config.json", "{}", 2);
    static const char index[] = "{\"weight_map\":{\"w\":\"b.safetensors\",\"x\":\"a.safetensors\"}}";
    fixture_write(source, "model.safetensors.index.json", index, sizeof index - 1);
    struct checkpoint checkpoint;
    struct error error = {{0}};
    uint64_t rows, columns;
    if (checkpoint_open(source, &checkpoint, &error) < 0)
        fail_msg("%s", error.text);
    assert_int_equal(checkpoint.tensor_count, 2);
    _cleanup_free_ float *values = source_values(&checkpoint, "w", &rows, &columns);
    assert_true(values[0] == 2.0f);
    assert_int_equal(checkpoint.note_count, 2);
    assert_non_null(strstr(checkpoint.notes[0], "a.safetensors: tensor w ignored"));
    assert_non_null(strstr(checkpoint.notes[1], "b.safetensors: tensor x ignored"));
    checkpoint_close(&checkpoint);
}

/* Every E4M3 byte with F32 and with BF16 scales, in blocks of 128 x 128 that the matrix does not fill. */
static void test_decoding(void **state)
{
    (void)state;
    enum { ROWS = 130, COLUMNS = 256 };
    static uint8_t f8[ROWS][COLUMNS];
    static float values[ROWS * COLUMNS];
    static const float scales[2][2] = {{0.5f, -3.0f}, {1.0f / 1024, 6.5f}}; /* exact in BF16 */
    for (int r = 0; r < ROWS; r++) {
        for (int c = 0; c < COLUMNS; c++)
            f8[r][c] = c == 0x7F || c == 0xFF ? 0 : (uint8_t)c;
    }
    for (int bf16 = 0; bf16 < 2; bf16++) {
        struct fixture_checkpoint made = {.config = json_object(), .data_bytes = sizeof f8 + (bf16 ? 8 : 16)};
        made.data = malloc(made.data_bytes);
        made.header =
            json_pack("{s:{s:s, s:[i,i], s:[i,i]}, s:{s:s, s:[i,i], s:[i,i]}}", "w", "dtype", "F8_E4M3", "shape", ROWS,
                      COLUMNS, "data_offsets", 0, (int)sizeof f8, "w_scale_inv", "dtype", bf16 ? "BF16" : "F32",
                      "shape", 2, 2, "data_offsets", (int)sizeof f8, (int)made.data_bytes);
        for (int round = 0; round < 2; round++) {
            f8[129][200] = round ? 0xFF : 1;
            memcpy(made.data, f8, sizeof f8);
            for (int i = 0; i < 4; i++) {
                uint32_t bits;
                memcpy(&bits, &scales[i / 2][i % 2], 4);
                uint16_t high = (uint16_t)(bits >> 16);
                memcpy(made.data + sizeof f8 + (size_t)i * (bf16 ? 2 : 4), bf16 ? (void *)&high : (void *)&bits,
                       bf16 ? 2 : 4);
            }
            fixture_store(&made, scratch);
            struct checkpoint checkpoint;
            struct source source;
            struct error error = {{0}};
            assert_int_equal(checkpoint_open(scratch, &checkpoint, &error), 0);
            assert_int_equal(
                source_check(&checkpoint, checkpoint_find(&checkpoint, "w"), ROWS, COLUMNS, &source, &error), 0);
            assert_int_equal(source_open(&source, &error), 0);
            int status = source_read(&source, 0, ROWS, values, &error);
            if (round == 1) {
                assert_true(status < 0);
                assert_non_null(strstr(error.text, "tensor w holds a NaN"));
            }
            for (int r = 0; round == 0 && r < ROWS; r++) {
                for (int c = 0; c < COLUMNS; c++) {
                    int code = f8[r][c] & 127, exponent = code >> 3, fraction = code & 7;
                    double value = exponent ? ldexp(8 + fraction, exponent - 10) : ldexp(fraction, -9);
                    value *= (f8[r][c] & 128 ? -1 : 1) * (double)scales[r / 128][c / 128];
                    if ((double)values[r * COLUMNS + c] != value)
                        fail_msg("byte %#x is %g, not %g", f8[r][c], (double)values[r * COLUMNS + c], value);
                }
            }
            source_close(&source);
            checkpoint_close(&checkpoint);
        }
        f8[129][200] = 1;
        fixture_unload(&made);
    }
    _cleanup_free_ char *config = fixture_join(scratch, "config.json"),
                        *weights = fixture_join(scratch, "model.safetensors");
    unlink(config);
    unlink(weights);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_decoding),        cmocka_unit_test(test_plain_types),
        cmocka_unit_test(test_index_decides),   cmocka_unit_test(test_exact),
        cmocka_unit_test(test_same_bytes),      cmocka_unit_test(test_damaged_meanwhile),
        cmocka_unit_test(test_destinations),    cmocka_unit_test(test_dense_int4),
        cmocka_unit_test(test_bad_checkpoints), cmocka_unit_test(test_ignored),
        cmocka_unit_test(test_indexes),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
