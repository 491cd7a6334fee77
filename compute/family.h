/* What differs between model families: where the tensors are, and which attention and router run on them. A new family
 * is a line of the table in family.c and the functions that it does not share with another. */
#pragma once

#include "compute/model.h"

struct family {
    enum model_family family;
    /* Finds the tensors of a layer in the dense segment and fills what the functions below need. */
    int (*find_attention)(const struct model *model, uint32_t layer, struct layer_weights *ret_weights,
                          struct error *ret_error);
    int (*find_mlp)(const struct model *model, uint32_t layer, struct layer_weights *ret_weights,
                    struct error *ret_error);
    /* h += Attention(norm(h)), with its exchanges; 0 or their status. All threads. */
    int (*attention)(struct thread *thread, struct batch *batch, uint32_t layer);
    /* One row: logits [experts] (overwritten) -> the experts chosen, ascending, and their weights [top_k]. Any
     * thread. */
    void (*route)(const struct model *model, const struct layer_weights *weights, float *logits, uint32_t *ret_chosen,
                  float *ret_weight);
};

/* The table's entry, or NULL. */
const struct family *family_find(uint32_t family);

/* Fills model->weights from the dense segment; the line names the tensor that is missing or has another shape. */
int weights_find(struct model *model, struct error *ret_error);
