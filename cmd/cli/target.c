#include "cmd/cli/target.h"

#include "cmd/cli/client.h"
#include "cmd/cli/launch.h"
#include "proto/cleanup.h"
#include "proto/container.h"

#include <inttypes.h>
#include <limits.h>
#include <string.h>
#include <sys/stat.h>

struct search {
    char identity[20];
    const struct settings *settings;
    struct instance found;
};

/* True if the running instance serves a command with these settings: it has the value of each that was given (flag,
 * environment, file), and a context that is long enough. Settings left to their defaults are the instance's affair. */
static bool settings_fit(const json_t *status, const struct settings *ours)
{
    const json_t *theirs = json_object_get(status, "settings");
    for (int s = 0; s < SETTING_COUNT; s++) {
        const char *text = json_string_value(json_object_get(theirs, setting_info((enum setting)s)->name));
        if (ours->values[s].source == SOURCE_DEFAULT)
            continue;
        if (s == SETTING_CONTEXT) {
            if (json_integer_value(json_object_get(status, "context")) <
                (json_int_t)settings_number(ours, SETTING_CONTEXT))
                return false;
        } else if (!text || strcmp(text, settings_text(ours, (enum setting)s)))
            return false;
    }
    return true;
}

static int is_match(const struct instance *instance, void *context)
{
    struct search *search = context;
    struct error ignored;
    json_t *status = NULL;
    if (!strncmp(instance->name, INSTANCE_PRIVATE_PREFIX, strlen(INSTANCE_PRIVATE_PREFIX)) ||
        !instance_alive(instance) || client_ask_supervisor(instance, "status", &status, &ignored))
        return 0;
    const char *identity = json_string_value(json_object_get(status, "identity")),
               *state = json_string_value(json_object_get(status, "state"));
    bool match = identity && !strcmp(identity, search->identity) && state &&
                 (!strcmp(state, "serving") || !strcmp(state, "recovering")) && settings_fit(status, search->settings);
    json_decref(status);
    if (match)
        search->found = *instance;
    return match;
}

static int start_private(const char *path, const struct settings *settings, int interrupt_fd, struct target *target,
                         struct error *ret_error)
{
    char name[INSTANCE_NAME_MAX];
    snprintf(name, sizeof name, INSTANCE_PRIVATE_PREFIX "%d", getpid());
    int status = instance_find(name, &target->instance, ret_error);
    if (status)
        return status;
    struct launch launch = {
        .instance = target->instance.name, .container = path, .settings = settings, .private = true};
    return launch_start(&launch, interrupt_fd, &target->private_pid, ret_error);
}

int target_open(const char *model, const char *name, const struct settings *settings, int interrupt_fd,
                struct target *ret_target, struct error *ret_error)
{
    *ret_target = (struct target){.private_pid = 0};
    if (!model)
        return instance_find(name ? name : "default", &ret_target->instance, ret_error);
    int status = launch_check_copies(model, settings, ret_error);
    if (status)
        return status;
    _cleanup_free_ char *path = realpath(model, NULL);
    if (!path)
        return error_set(ret_error, errno, "model %s: %s; give the folder that `calypte convert` made", model,
                         strerror(errno));
    struct container *container;
    status = container_open(path, &container, ret_error);
    if (status)
        return status;
    struct search search = {.settings = settings};
    snprintf(search.identity, sizeof search.identity, "%016" PRIx64, container->identity);
    container_close(container);
    status = instance_each(is_match, &search, ret_error);
    if (status < 0)
        return status;
    if (status > 0) {
        ret_target->instance = search.found;
        return 0;
    }
    instance_sweep(INSTANCE_PRIVATE_PREFIX, ret_error);
    return start_private(path, settings, interrupt_fd, ret_target, ret_error);
}

int target_check_settings(const char *model, const struct settings *settings, enum setting own, struct error *ret_error)
{
    for (int s = 0; !model && s < SETTING_COUNT; s++)
        if (settings->values[s].source == SOURCE_FLAG && s != (int)own)
            return error_set(ret_error, EINVAL,
                             "%s=%s: settings are those of the running instance; leave it out, or name a MODEL, for "
                             "which an instance with it is found or started",
                             setting_info((enum setting)s)->name, settings_text(settings, (enum setting)s));
    return 0;
}

/* Whether the folder has an entry of this name: 1 or 0; a negative errno where it cannot be known, or what it is cannot be
 * read. */
static int has_file(const char *folder, const char *name, struct error *ret_error)
{
    char path[PATH_MAX];
    struct stat stat;
    int length = snprintf(path, sizeof path, "%s/%s", folder, name);
    if (length < 0 || (size_t)length >= sizeof path)
        return error_set(ret_error, ENAMETOOLONG, "%.100s...: the path is too long", folder);
    int code = lstat(path, &stat) < 0 ? errno : 0;
    if (code == ENOENT)
        return 0;
    if (!code && access(path, R_OK) < 0)
        code = errno;
    if (!code)
        return 1;
    return error_set(ret_error, code, "%s: %s%s", path, strerror(code),
                     code == ENOENT ? "; it is a link to nowhere" : error_remedy(code));
}

int target_check_text(const char *model, struct error *ret_error)
{
    int found = model ? has_file(model, CONTAINER_MANIFEST, NULL) : 0;
    if (found <= 0) /* no container: whoever opens it says why */
        return 0;
    found = has_file(model, "tokenizer.json", ret_error);
    if (found != 0)
        return found < 0 ? found : 0;
    return error_set(ret_error, ENOTSUP,
                     "%s: the model has no tokenizer: give token ids (--tokens FILE), or measure with `calypte bench`",
                     model);
}

void target_close(struct target *target)
{
    if (target->private_pid > 0)
        launch_stop(target->private_pid);
    target->private_pid = 0;
}
