/* calypte config: every setting with its value and where that came from. */
#include "cmd/cli/commands.h"
#include "cmd/cli/usage.h"

#include <stdlib.h>

enum { FLAG_JSON };

static const struct flag flags[] = {
    [FLAG_JSON] = {"--json", NULL, NULL, "print {name: {\"value\", \"origin\"}}"},
    {NULL, NULL, NULL, NULL},
};

static const struct command_line line = {
    .command = "config",
    .operands = "",
    .summary =
        "Lists all settings as they would be used now, with value and origin. The output can be used as calypte.conf.",
    .details = "Files are read in this order, a later one wins: /etc/calypte/calypte.conf, "
               "$XDG_CONFIG_HOME/calypte/calypte.conf\n"
               "(~/.config/calypte/calypte.conf without it), --config FILE.",
    .flags = flags,
    .settings = true,
};

int cmd_config(int argc, char **argv)
{
    struct arguments arguments;
    int code = arguments_parse(&line, argc, argv, &arguments);
    if (code != ARGUMENTS_GO_ON)
        return code;
    if (!arguments.values[FLAG_JSON]) {
        settings_print(&arguments.settings, stdout);
        return EXIT_DONE;
    }
    json_t *json = settings_json(&arguments.settings);
    int failed = json_dumpf(json, stdout, JSON_INDENT(2));
    putchar('\n');
    json_decref(json);
    return failed ? usage_failed("config", "cannot print the settings as JSON") : EXIT_DONE;
}
