#include "cmd/cachesim/plot.h"

#include "proto/cleanup.h"

#include <spawn.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>

/* A string of gnuplot: between single quotes, where only these mean anything. */
static void print_quoted(FILE *script, const char *text)
{
    putc('\'', script);
    for (; *text; text++) {
        if (*text == '\'')
            putc('\'', script);
        putc((unsigned char)*text < ' ' ? '?' : *text, script);
    }
    putc('\'', script);
}

static void print_script(FILE *script, const char *title, const struct plot_point *points, size_t count)
{
    fprintf(script, "set terminal png size 900,600\nset title ");
    print_quoted(script, title);
    fprintf(script, " noenhanced\nset xlabel 'pool, %% of the experts used'\nset ylabel 'hit rate, %%'\n"
                    "set key bottom right\nset grid\nset xrange [0:100]\nset yrange [0:100]\nplot ");
    for (int p = 0; p < REPLAY_POLICIES; p++)
        fprintf(script, "%s'-' with linespoints title '%s'", p ? ", " : "", replay_policy_name((enum replay_policy)p));
    putc('\n', script);
    for (int p = 0; p < REPLAY_POLICIES; p++) {
        for (size_t i = 0; i < count; i++)
            fprintf(script, "%g %g\n", points[i].percent, points[i].hit_rates[p]);
        fprintf(script, "e\n");
    }
}

/* Runs gnuplot with the script as its standard input, `picture_fd` as its output, and nothing else of ours. */
static int run_gnuplot(FILE *script, int picture_fd, const char *path, struct error *ret_error)
{
    char name[] = "gnuplot", *arguments[] = {name, NULL};
    posix_spawn_file_actions_t actions;
    pid_t pid;
    int code = posix_spawn_file_actions_init(&actions), ended = 0;
    if (code)
        return error_set(ret_error, code, "%s: cannot start gnuplot: %s", path, strerror(code));
    code = posix_spawn_file_actions_adddup2(&actions, fileno(script), STDIN_FILENO);
    if (code == 0)
        code = posix_spawn_file_actions_adddup2(&actions, picture_fd, STDOUT_FILENO);
    if (code == 0)
        code = posix_spawnp(&pid, name, &actions, NULL, arguments, environ);
    posix_spawn_file_actions_destroy(&actions);
    if (code)
        return error_set(ret_error, code, "%s: cannot start gnuplot: %s%s", path, strerror(code),
                         code == ENOENT ? "; install the package gnuplot-nox" : "");
    while (waitpid(pid, &ended, 0) < 0)
        if (errno != EINTR)
            return error_set(ret_error, errno, "%s: gnuplot is lost: %s", path, strerror(errno));
    if (!WIFEXITED(ended) || WEXITSTATUS(ended))
        return error_set(ret_error, EIO, "%s: gnuplot could not draw it", path);
    return 0;
}

/* Writes all of `picture_fd` to the file `path`. */
static int write_picture(int picture_fd, const char *path, struct error *ret_error)
{
    char block[16384];
    ssize_t got = 0;
    off_t at = 0;
    FILE *file = fopen(path, "we");
    if (!file)
        return error_set(ret_error, errno, "%s: cannot write: %s", path, strerror(errno));
    errno = 0;
    for (; (got = pread(picture_fd, block, sizeof block, at)) > 0; at += got)
        if (fwrite(block, 1, (size_t)got, file) != (size_t)got)
            break;
    int code = got == 0 ? 0 : errno ? errno : EIO;
    if (fclose(file) && code == 0)
        code = errno;
    return code ? error_set(ret_error, code, "%s: cannot write: %s", path, strerror(code)) : 0;
}

int plot_draw(const char *path, const char *title, const struct plot_point *points, size_t count,
              struct error *ret_error)
{
    _cleanup_fclose_ FILE *script = tmpfile();
    if (!script)
        return error_set(ret_error, errno, "%s: no temporary file: %s", path, strerror(errno));
    print_script(script, title, points, count);
    if (fflush(script) || ferror(script) || fseek(script, 0, SEEK_SET))
        return error_set(ret_error, errno, "%s: no temporary file: %s", path, strerror(errno));
    /* gnuplot ends well even where it cannot open or write its output file: so it draws into memory. */
    _cleanup_close_ int picture_fd = memfd_create("picture", MFD_CLOEXEC);
    if (picture_fd < 0)
        return error_set(ret_error, errno, "%s: no memory for the picture: %s", path, strerror(errno));
    int status = run_gnuplot(script, picture_fd, path, ret_error);
    struct stat stat;
    if (status == 0 && (fstat(picture_fd, &stat) < 0 || stat.st_size == 0))
        status = error_set(ret_error, EIO, "%s: gnuplot drew nothing", path);
    return status == 0 ? write_picture(picture_fd, path, ret_error) : status;
}
