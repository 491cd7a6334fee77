/* A safetensors file of one f32 matrix that is written row after row, because it need not fit in memory. It has no name
 * until it is whole, or a temporary one where the file system has no nameless files. One thread. */
#pragma once

#include "proto/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

struct row_file {
    FILE *file;
    char *path, *temporary;
    bool named; /* it stands under `temporary` */
    size_t columns;
};

/* Begins it with the header of tensor `name`, [rows, columns] f32. The temporary name is `<path>.<pid>.part`. Errors name
 * the file; a path that is a folder, a device or a pipe is refused. */
int row_file_create(struct row_file *file, const char *path, const char *name, uint64_t rows, uint64_t columns,
                    struct error *ret_error);

/* Appends `columns` numbers. */
int row_file_write(struct row_file *file, const float *row, struct error *ret_error);

/* Syncs and gives it its name. On failure, and for a file that was not finished, row_file_discard removes it. */
int row_file_finish(struct row_file *file, struct error *ret_error);
void row_file_discard(struct row_file *file);
