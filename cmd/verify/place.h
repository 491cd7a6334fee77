/* Where an interrupted `calypte verify` goes on: a small JSON file in $XDG_STATE_HOME/calypte (~/.local/state/calypte
 * without it), bound to the container's identity, its folder, and each file's length and time of change. It holds
 * nothing that is worth an error: what is wrong with it costs a run from the beginning.
 *
 *   {"identity": "16 hex digits", "files": {NAME: {"bytes", "changed_ns", "done": extents from the first
 *    one that were read, "bad": [those of them that were not good, they are read again]}}} */
#pragma once

#include "cmd/verify/extents.h"

enum extent_state { EXTENT_TO_DO, EXTENT_GOOD, EXTENT_BAD };

struct place {
    const struct extents *extents;
    char *path;          /* of the state file; NULL: there is no folder for it */
    uint8_t *states;     /* [extents] enum extent_state */
    int64_t *changed_ns; /* [files] when each was changed last */
    bool unwritable;     /* a line has been said */
};

/* Reads the place, unless `restart`; extents that an earlier run found good are EXTENT_GOOD then, all others
 * EXTENT_TO_DO. *ret_bytes: those of the good ones. Only -ENOMEM and files that are gone are errors. */
int place_open(const struct extents *extents, bool restart, struct place *ret_place, uint64_t *ret_bytes,
               struct error *ret_error);
/* Writes it under a temporary name and renames. The first failure is returned with a line, later ones are 0. */
int place_write(struct place *place, struct error *ret_error);
/* Is a file no longer the one that place_open saw, by its length, the time of the inode's change, or because it is gone? */
bool place_file_changed(const struct place *place, uint32_t file);
/* The run is complete: nothing to go on with. */
void place_remove(const struct place *place);
void place_close(struct place *place);
