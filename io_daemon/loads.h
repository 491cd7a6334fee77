/* The experts that are being read now. A load cuts its expert into pieces (2 MiB at most, contiguous in the file and in
 * one node's region), hands each slice to the verify thread when its last byte is there, and ends when nothing of it is
 * in flight any more: only then may the slot change hands. Thread: the daemon's main. */
#pragma once

#include "io_daemon/placement.h"
#include "io_daemon/reader.h"
#include "io_daemon/verify.h"
#include "proto/container.h"

#define MAX_LOADS 64u

struct load {
    bool active;
    uint32_t expert;
    struct slot_ref ref;
    uint32_t pieces_left, verdicts_left;
    int code;                         /* first failure, an errno; 0: none */
    uint32_t slice;                   /* where it failed */
    size_t slice_left[EXPERT_SLICES]; /* bytes still to come */
    struct verify_job jobs[EXPERT_SLICES];
    struct piece *pieces; /* [nodes * stretch_pieces] */
};

struct loads {
    const struct container *container;
    struct placement *placement;
    struct requests *requests;
    struct reader *reader;
    struct verifier *verifier;
    struct control *control;
    const int *files; /* [expert files] */
    void (*log)(const char *line);
    size_t stretch_bytes, piece_bytes; /* of an expert: on one node, and in one piece */
    uint32_t stretch_pieces, active;
    struct load load[MAX_LOADS];
};

/* Fills the rest of a struct whose pointers the caller has set. */
int loads_open(struct loads *loads, struct error *ret_error);
void loads_close(struct loads *loads);

/* True while another load would keep the disk busier. */
bool loads_has_room(const struct loads *loads);

/* Starts to read the expert into a slot that placement_take gave. Needs room. */
void loads_begin(struct loads *loads, uint32_t expert, struct slot_ref ref);

/* What the reader and the verify thread hand back. */
void loads_piece_done(struct loads *loads, struct piece *piece);
void loads_verdict(struct loads *loads, struct verify_job *job);

/* Gives up all loads: what has not been sent is taken back. They are gone when the reader has nothing in flight, and
 * then loads_abandon empties their slots. */
void loads_cancel(struct loads *loads);
void loads_abandon(struct loads *loads);

/* Tells the workers that wait for the expert to look again. */
void notify_demanders(const struct requests *requests, uint32_t expert);
