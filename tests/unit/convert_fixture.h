/* Helpers of the tests that make containers: scratch folders, converting, and copying a checkpoint with changes. */
#pragma once

#include "cmd/convert/convert.h"
#include "proto/cleanup.h"
#include "proto/container.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

/* "<tests folder>/NAME"; the caller frees. */
char *fixture_path(const char *name);
/* "FOLDER/NAME"; the caller frees. */
char *fixture_join(const char *folder, const char *name);

char *fixture_scratch(void);
void fixture_remove(char *folder); /* with all that is in it; frees the name */

/* A whole file in memory; the caller frees. */
uint8_t *fixture_read(const char *folder, const char *name, size_t *ret_bytes);
void fixture_write(const char *folder, const char *name, const void *bytes, size_t count);

/* Opens, plans and converts; status as convert_run, error filled. `stop_after` > 0: asks it to stop at that tick. */
int fixture_convert(const char *source, const char *destination, const struct plan_options *options, unsigned jobs,
                    unsigned stop_after, struct error *ret_error);

/* The bundled model as a container in `folder`; the caller frees the name. */
char *fixture_model(const char *folder);

/* Asserts that two containers are the same files with the same bytes. */
void fixture_assert_same(const char *a, const char *b);

/* A checkpoint of one file to be changed: its header as JSON and its data. */
struct fixture_checkpoint {
    json_t *config, *header;
    uint8_t *data;
    size_t data_bytes;
};

/* Reads a checkpoint of one shard. */
void fixture_load(const char *source, struct fixture_checkpoint *ret_checkpoint);
void fixture_unload(struct fixture_checkpoint *checkpoint);
/* Writes it as config.json and model.safetensors. */
void fixture_store(const struct fixture_checkpoint *checkpoint, const char *folder);
/* The stored bytes of a tensor. */
uint8_t *fixture_data(const struct fixture_checkpoint *checkpoint, const char *tensor);
