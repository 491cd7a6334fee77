/* Processes that a dead supervisor left: they end by themselves (heritage_bind_life), but not at once. */
#pragma once

#include "proto/error.h"

/* Kills every process whose arguments name this instance and this folder (`--instance NAME --rundir FOLDER`, as the
 * heritage has them) and waits until the last one is gone. Process ids are held by pidfd, so a reused one is never hit.
 * -ETIMEDOUT names a process that does not end (blocked in the kernel); -EBUSY: an instance of that name, whose shared
 * memory must not be touched, runs with another folder, or its supervisor lives though the folder was removed. Any thread. */
int orphans_end(const char *name, const char *folder, struct error *ret_error);
