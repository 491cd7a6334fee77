/* LFRU: which expert of the pool is given up. Pure: no clock, no I/O, no shared memory; iod and `calypte cachesim` run this code.
 *
 * (The prose above the implementation explains the goals and the mechanism: lfru.c.) One thread at a time; the same calls give the
 * same answers. Experts are numbered as in the pool, moe_index * per_layer + expert; whoever calls has checked the number. */
#pragma once

#include "proto/error.h"

#include <stdbool.h>
#include <stdint.h>

#define LFRU_NONE UINT32_MAX

struct lfru;

/* Who used an expert, or for whom it comes into the pool. */
enum lfru_who {
    LFRU_DECODE,  /* a running answer */
    LFRU_PREFILL, /* a prompt: may count less, so that a long one does not flush the working set of the answers */
    LFRU_GUESS,   /* a lookahead or a warm-up (admission only): worth a quarter of its heat, until used */
};

/* A policy over `experts` experts (ids below it, `per_layer` to a layer) of which `capacity` may be resident. */
int lfru_open(uint32_t experts, uint32_t per_layer, uint32_t capacity, struct lfru **ret_lfru, struct error *ret_error);
void lfru_close(struct lfru *lfru);

/* One use of an expert by one layer of one step, however many rows; resident or not. Constant time. The uses of a layer come in
 * ascending order (one that does not ascend begins the next step), and before its misses are admitted. */
void lfru_use(struct lfru *lfru, uint32_t expert, enum lfru_who who);

/* The expert is resident from now on (nothing, if it was). Constant time. */
void lfru_admit(struct lfru *lfru, uint32_t expert, enum lfru_who who);

/* The resident expert to give up next, or LFRU_NONE: a cold one that `may_go` allows (NULL: any) and that nobody holds. Changes
 * nothing that another call would notice. Constant time but for those that may not go. */
uint32_t lfru_victim(struct lfru *lfru, bool (*may_go)(void *context, uint32_t expert), void *context);

/* The expert is resident no more (nothing, if it was not). Evicted: the clock ticks. Removed (a failed read): it does not. In both
 * cases its history stays, as a ghost. Constant time, but for one eviction in `capacity` at most, which may look at every expert. */
void lfru_evict(struct lfru *lfru, uint32_t expert);
void lfru_remove(struct lfru *lfru, uint32_t expert);

/* Held experts (pinned by the user) are never victims. */
void lfru_hold(struct lfru *lfru, uint32_t expert, bool held);

/* The pool has grown or shrunk; of a smaller one the caller evicts what is too much. */
void lfru_resize(struct lfru *lfru, uint32_t capacity);

/* How warm an expert is, resident or not: its uses, those long ago counted less; comparable within one policy. And a beginning from
 * what an earlier session learnt: the same scale, before any use; what is no number or not above 0 is none. */
float lfru_heat(const struct lfru *lfru, uint32_t expert);
void lfru_set_heat(struct lfru *lfru, uint32_t expert, float heat);
