/* A container that stands already: its files that are missing, or not as its manifest says, are made anew. */
#pragma once

#include "cmd/convert/destination.h"

/* Looks at what container_open looks at: presence, length, header and small tables of every file. ret_bad[i], of the
 * plan's files, are those that have to be made anew; *ret_count of them. *ret_manifest, which the caller decrefs, is
 * calypte.json. *ret_foreign, a line of why a file is refused that is not to be made anew: it cannot be read, it stands
 * on a drive that is away, or the plan has no such file; empty: none. */
int mend_find(const struct plan *plan, const struct write_folder *folder, bool *ret_bad, size_t *ret_count,
              json_t **ret_manifest, struct error *ret_foreign, struct error *ret_error);

/* Makes the `count` bad files anew, each of which appears as a whole and only with the checksums of the manifest. The
 * others are not touched. -EEXIST: the checkpoint is no longer that of the container. */
int mend_files(const struct write_context *context, struct destination *destination, const bool *bad, size_t count,
               const json_t *manifest, struct error *ret_error);

/* Copies the files beside the weights that the checkpoint has and the container lacks. *ret_count of them. */
int mend_copied(const struct write_context *context, size_t *ret_count, struct error *ret_error);
