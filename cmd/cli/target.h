/* Which instance a request goes to: a named one, one that runs that very container with those settings, or a private
 * one that is started for the occasion and stopped after it. */
#pragma once

#include "cmd/supervisor/instance.h"
#include "proto/settings.h"

#include <sys/types.h>

struct target {
    struct instance instance;
    pid_t private_pid; /* of its supervisor, a child of this process; 0: the instance is not ours */
};

/* `model` NULL: the instance called `name`, or `default` where that is NULL too. Otherwise an instance of that
 * container (same identity, and the value of every setting that was given) is looked for, and a private one started
 * where there is none. -EINTR: a signal came while it started. */
int target_open(const char *model, const char *name, const struct settings *settings, int interrupt_fd,
                struct target *ret_target, struct error *ret_error);

/* An error where a setting's flag was given and no MODEL: a running instance has its settings. `own`: one that the request
 * carries itself (SETTING_COUNT: none). */
int target_check_settings(const char *model, const struct settings *settings, enum setting own,
                          struct error *ret_error);

/* An error where the container `model` (NULL: none is named) has no tokenizer, or one that cannot be read, so that a
 * request with text would be in vain. */
int target_check_text(const char *model, struct error *ret_error);

/* Stops a private instance; nothing of it is left then. Repeatable. */
void target_close(struct target *target);
