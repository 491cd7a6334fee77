/* The experts that are being read now. A load cuts its expert into pieces (2 MiB at most, contiguous in the file and in
 * one node's region), hands each slice that must be verified to the verify thread of its drive when its last byte is
 * there, and ends when nothing of it is in flight any more: only then may the slot change hands. Thread: the daemon's
 * main. */
#pragma once

#include "io_daemon/buffers.h"
#include "io_daemon/copies.h"
#include "io_daemon/placement.h"
#include "io_daemon/reader.h"
#include "io_daemon/verify.h"

#define MAX_LOADS 64u
#define MAX_GUESS_LOADS (MAX_LOADS / 2) /* of those, for lookaheads and warm-ups */

struct load {
    bool active, background;
    uint32_t expert;
    struct slot_ref ref;
    uint32_t pieces_left, verdicts_left;
    int code;                         /* first failure, an errno; 0: none */
    uint32_t slice;                   /* where it failed */
    size_t slice_left[EXPERT_SLICES]; /* bytes still to come */
    uint8_t copy[EXPERT_SLICES];      /* from which copy each slice is read */
    uint8_t wrong[EXPERT_SLICES];     /* bit c: it came wrong from copy c, twice */
    uint8_t mixed;                    /* bit s: a copy failed within slice s, and another went on */
    uint8_t read_again;               /* bit s: slice s is read once more, because its checksum differed */
    struct verify_job jobs[EXPERT_SLICES];
    struct piece *pieces; /* [cut_count + EXPERT_SLICES]: at the end one for each slice that is read again */
};

/* How an expert is cut: a piece lies in one stripe's file and in one node's region, and has at most PIECE_BYTES. */
struct cut {
    size_t first, bytes; /* counted from the start of the blob */
};

struct loads {
    struct copies *copies;
    struct placement *placement;
    struct requests *requests;
    struct reader *reader;
    const struct buffers *buffers;
    struct verifier *const *verifiers; /* [drives] */
    struct control *control;
    enum verify_choice verify;
    void (*log)(const char *line);
    uint8_t *verified; /* [copies][experts] bit s: slice s was read there and verified, and has not failed since */
    uint8_t *bad;      /* [copies][experts] bit s: slice s stands wrong there; read elsewhere if it can be */
    struct cut *cuts;  /* [cut_count], of every expert */
    uint32_t cut_count;
    uint32_t active, background; /* loads; those nobody waits for */
    struct load load[MAX_LOADS];
};

/* Fills the rest of a struct whose pointers and choices the caller has set. */
int loads_open(struct loads *loads, struct error *ret_error);
void loads_close(struct loads *loads);

/* True while another load of that expert would keep its drive busier. A guess has room only where little is on the way,
 * so that a demand that comes next does not wait behind it. */
bool loads_has_room(const struct loads *loads, uint32_t expert, enum priority priority);

/* Starts to read the expert into a slot that placement_take gave. Needs room. */
void loads_begin(struct loads *loads, uint32_t expert, struct slot_ref ref, enum priority priority);

/* A demand came for an expert whose load is active: what of it waits in the background becomes urgent. */
void loads_promote(struct loads *loads, uint32_t expert);

/* What the reader and the verify thread hand back. */
void loads_piece_done(struct loads *loads, struct piece *piece);
void loads_verdict(struct loads *loads, struct verify_job *job);

/* Gives up all loads: what has not been sent is taken back. They are gone when the reader has nothing in flight, and
 * then loads_abandon empties their slots. */
void loads_cancel(struct loads *loads);
void loads_abandon(struct loads *loads);

/* Tells the workers that wait for the expert to look again. */
void notify_demanders(const struct requests *requests, uint32_t expert);
