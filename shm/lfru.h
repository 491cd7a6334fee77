/* LFRU: which expert of the pool is given up. Pure: no clock, no I/O, no shared memory; iod and `calypte cachesim` run this code.
 *
 * (The prose above the implementation explains the goals and the mechanism: lfru.c.) */
#pragma once

#include "proto/error.h"

#include <stdbool.h>
#include <stdint.h>

#define LFRU_NONE UINT32_MAX

struct lfru;

/* Who used an expert, or for whom it comes into the pool. */
enum lfru_who {
    LFRU_DECODE,  /* a running answer */
    LFRU_PREFILL, /* a prompt: admitted low, so that a long one does not flush the working set of the answers */
    LFRU_GUESS,   /* a lookahead or a warm-up (admission only): the first to go, until used */
};

/* A policy over `experts` experts (ids below it, `per_layer` to a layer) of which `capacity` may be resident. */
int lfru_open(uint32_t experts, uint32_t per_layer, uint32_t capacity, struct lfru **ret_lfru, struct error *ret_error);
void lfru_close(struct lfru *lfru);

/* One use of an expert by one layer of one step, however many rows; resident or not. Constant time. */
void lfru_use(struct lfru *lfru, uint32_t expert, enum lfru_who who);

/* The expert is resident from now on. Constant time. */
void lfru_admit(struct lfru *lfru, uint32_t expert, enum lfru_who who);

/* The resident expert to give up next, or LFRU_NONE: the coldest that `may_go` allows (NULL: any) and that nobody holds. Changes
 * nothing that another call would notice. Constant time but for those that may not go. */
uint32_t lfru_victim(struct lfru *lfru, bool (*may_go)(void *context, uint32_t expert), void *context);

/* The expert is resident no more. Evicted: its history stays as a ghost; else (a failed read) only its place is forgotten. */
void lfru_evict(struct lfru *lfru, uint32_t expert);
void lfru_remove(struct lfru *lfru, uint32_t expert);

/* Held experts (pinned by the user) are never victims. */
void lfru_hold(struct lfru *lfru, uint32_t expert, bool held);

/* The pool has grown or shrunk. */
void lfru_resize(struct lfru *lfru, uint32_t capacity);

/* How warm an expert is, resident or not; comparable within one policy. And a beginning from what an earlier session learnt: the
 * same scale, before any use. */
float lfru_heat(const struct lfru *lfru, uint32_t expert);
void lfru_set_heat(struct lfru *lfru, uint32_t expert, float heat);
