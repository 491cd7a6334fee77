/* Where a container is written: its folder and those of the other stripes, opened and locked. */
#pragma once

#include "cmd/convert/convert.h"
#include "cmd/convert/write.h"

#include <stdbool.h>

struct destination {
    uint32_t count;                             /* stripes of the plan */
    struct write_folder folders[EXPERT_SLICES]; /* the first is the container itself */
    bool created[EXPERT_SLICES];                /* by this run */
    bool own[EXPERT_SLICES];                    /* files of the plan's names there are this container's */
};

/* Opens, and creates where it is not there, paths[stripes of the plan]. Errors name the folder and the remedy;
 * -EWOULDBLOCK: another run has it. Whatever it returns, the caller closes. */
int destination_open(const struct plan *plan, const char *const *paths, struct destination *ret_destination,
                     struct error *ret_error);
/* Removes folders that this run made and that are empty. */
void destination_close(struct destination *destination);

/* Of something in the folder, a link that leads nowhere too. */
bool destination_has(const struct write_folder *folder, const char *name);
/* -ENOTEMPTY with anything in the folder. `journal`: but for a journal, which was not begun. */
int destination_check_empty(const struct write_folder *folder, bool journal, struct error *ret_error);
/* -ENOSPC, -EROFS: `needed` bytes cannot be written there. */
int destination_check_space(const struct write_folder *folder, uint64_t needed, struct error *ret_error);
/* Tells the user where two of the folders are on one drive. */
void destination_note_shared(const struct destination *destination, struct convert_watch *watch);
/* Removes temporary names of an earlier run from the folders that are its own, and with `journal` its journal. */
void destination_remove_leftovers(const struct destination *destination, const struct plan *plan, bool journal);
