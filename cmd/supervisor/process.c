#include "cmd/supervisor/process.h"

#include "proto/cleanup.h"

#include <inttypes.h>
#include <string.h>
#include <unistd.h>

/* Fields 3, 4, 14, 15 and 24, counted behind the program's name, which may hold anything. */
struct process process_look(pid_t pid)
{
    char path[64], line[1024];
    uint64_t user, system, pages;
    struct process process = {0};
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    _cleanup_fclose_ FILE *stream = pid > 0 ? fopen(path, "re") : NULL;
    const char *fields = stream && fgets(line, sizeof line, stream) ? strrchr(line, ')') : NULL;
    if (!fields || sscanf(fields,
                          ") %c %d %*d %*d %*d %*d %*u %*u %*u %*u %*u %" SCNu64 " %" SCNu64
                          " %*d %*d %*d %*d %*d %*d %*u %*u %" SCNu64,
                          &process.state, &process.parent, &user, &system, &pages) != 5)
        return (struct process){0};
    process.cpu = (double)(user + system) / (double)sysconf(_SC_CLK_TCK);
    process.rss = pages * (uint64_t)sysconf(_SC_PAGESIZE);
    return process;
}
