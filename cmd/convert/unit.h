/* One unit of work: reads a tensor (or an expert's three), converts it and writes it to its place; of a synthetic
 * checkpoint it makes the weights up. */
#pragma once

#include "cmd/convert/output.h"
#include "cmd/convert/plan.h"

#include <stdatomic.h>

/* A file being written. Each unit writes other elements of the arrays, so units may run in parallel. */
struct unit_target {
    const struct plan *plan;
    const struct plan_file *file;
    const struct output *outputs; /* of an experts file: of each stripe; those that are not open stay as they are */
    uint64_t *checksums;          /* [tensors of the file] XXH3 of each tensor of a dense file that a unit wrote */
    uint64_t *slice_checksums;    /* [experts][8] of an experts file */
    int32_t *exponents;           /* [experts][3] of an experts file */
    atomic_bool *stop;            /* when set, a unit ends soon with -EINTR */
    atomic_uint_least64_t *bytes_done;
};

int unit_convert(const struct unit_target *target, const struct plan_unit *unit, struct error *ret_error);
