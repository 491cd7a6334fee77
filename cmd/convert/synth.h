/* Containers of random weights with a real model's shapes, to measure a machine before 400 GB are fetched.
 *
 * A synthetic checkpoint has a configuration and the names and shapes of its family's tensors, but no data: it is
 * planned and written like any other (plan.h, convert.h), and where a conversion would read and quantise, synth_unit
 * makes quanta and scales up. Every word comes from the seed, the tensor's name and its place (a counter-based
 * generator), so the bytes do not depend on threads, interruptions or the machine. Scales are such that a product
 * with activations of unit variance has unit variance again: nothing overflows however deep the model is; embeddings
 * have unit variance, so that rows differ and the router spreads them; what attention and experts add to them has half of it, so that
 * layers agree on a row about as much as in a trained model, and reading ahead is worth as much. */
#pragma once

#include "cmd/convert/unit.h"

#include <stdbool.h>

#define SYNTH_UNCHANGED UINT32_MAX
#define SYNTH_SOURCE "random weights like " /* begins the `source` in calypte.json of a container that synth made */

struct synth_options {
    const char *like; /* name of a built-in model (synth_models.c), or path of a config.json */
    /* layers without MTP, leading dense ones, experts a layer; SYNTH_UNCHANGED: as in the model */
    uint32_t layers, dense, experts;
    bool mtp; /* with the MTP layer; without it there is none, whatever the model has */
    uint64_t seed;
};

/* Makes the checkpoint of such a model. Errors name the model and the field. The caller closes it with
 * checkpoint_close. One thread. */
int synth_checkpoint(const struct synth_options *options, struct checkpoint *ret_checkpoint, struct error *ret_error);

/* Makes and writes one unit's tensors. Units may run in parallel. */
int synth_unit(const struct unit_target *target, const struct plan_unit *unit, struct error *ret_error);

/* config.json of the built-in model called `name`, or NULL; and all their names, separated by ", ". */
const char *synth_model(const char *name);
const char *synth_model_names(void);
