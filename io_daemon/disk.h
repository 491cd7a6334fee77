/* Opening the container's files for reads that bypass the page cache. */
#pragma once

#include "proto/error.h"

#include <stdbool.h>

/* Opens `path` with O_DIRECT, or without where the file system refuses (*ret_direct says which), and tries one read of
 * 4096 bytes, for some file systems accept the flag and refuse the read. Accesses are not noted (O_NOATIME) where the file
 * is the user's own. The descriptor, or a negative errno. Any thread. */
int disk_open(const char *path, bool *ret_direct, struct error *ret_error);
