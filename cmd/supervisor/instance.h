/* An instance's folder: $CALYPTE_RUNTIME_DIR, else $XDG_RUNTIME_DIR/calypte, else /run/calypte (root) or
 * /tmp/calypte-UID, and in it a folder by the instance's name (mode 0700) with its sockets, pid files and logs.
 *
 * Who holds the flock on `supervisor.lock` is the instance's supervisor. A live instance is never touched; what a dead
 * one left behind (shared memory, sockets, processes) is removed by whoever takes the lock next. */
#pragma once

#include "proto/error.h"
#include "shm/segment.h"

#include <stdbool.h>
#include <stddef.h>

#define INSTANCE_FOLDER_MAX 92u        /* with "/supervisor.ipc" it must fit a socket address, 108 bytes */
#define INSTANCE_PRIVATE_PREFIX "run-" /* names of the instances that `calypte run` starts for one answer */

struct instance {
    char name[INSTANCE_NAME_MAX];
    char folder[INSTANCE_FOLDER_MAX];
    int lock_fd; /* -1: not taken */
};

/* The folder of all instances, which need not exist. Any thread, as all here. */
int instance_root(char ret_root[INSTANCE_FOLDER_MAX], struct error *ret_error);

/* Fills name and folder, after checking both; touches nothing. */
int instance_find(const char *name, struct instance *ret_instance, struct error *ret_error);

/* Path of a file in the folder. */
void instance_path(const struct instance *instance, const char *file, char ret_path[108]);

/* 1: a supervisor holds the lock; 0: none does. */
int instance_alive(const struct instance *instance);

/* -ENOENT and the line that no such instance is running, which names those of the folder that are. */
int instance_missing(const struct instance *instance, struct error *ret_error);

/* instance_find, makes the folder, takes the lock. -EBUSY: a live instance has that name. -EPERM: the folder is not
 * ours alone. */
int instance_take(const char *name, struct instance *ret_instance, struct error *ret_error);

/* Ends every process that a dead supervisor left, and waits until they are gone; removes shared memory, sockets and pid
 * files. Only with the lock taken. */
int instance_clean(const struct instance *instance, struct error *ret_error);

/* Gives the lock back. `remove`: the folder goes first, with everything in it. */
void instance_release(struct instance *instance, bool remove);

/* Cleans and removes what dead instances left whose name starts with `prefix` ("" for all). Live ones are not
 * touched. */
int instance_sweep(const char *prefix, struct error *ret_error);

/* Calls `visit` with each folder's instance, in no order; stops at a non-zero answer and returns it. */
int instance_each(int (*visit)(const struct instance *instance, void *context), void *context, struct error *ret_error);
