/* The folder of an instance: who may take it, what is refused, what is cleaned. */
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "cmd/supervisor/instance.h"

struct scratch {
    char root[64];
    char name[32]; /* of this test's instance */
};

static int make_scratch(void **state)
{
    struct scratch *scratch = calloc(1, sizeof *scratch);
    strcpy(scratch->root, "/tmp/calypte-test.XXXXXX");
    snprintf(scratch->name, sizeof scratch->name, "test-instance-%d", getpid());
    *state = scratch;
    return mkdtemp(scratch->root) ? setenv("CALYPTE_RUNTIME_DIR", scratch->root, 1) : -1;
}

static int remove_scratch(void **state)
{
    struct scratch *scratch = *state;
    char command[128];
    segment_unlink_all(scratch->name);
    snprintf(command, sizeof command, "rm -rf '%s'", scratch->root);
    int status = system(command);
    free(scratch);
    return status;
}

static void test_root(void **state)
{
    char root[INSTANCE_FOLDER_MAX], want[64];
    struct error error;
    (void)state;
    assert_int_equal(setenv("XDG_RUNTIME_DIR", "/xdg", 1), 0);
    assert_int_equal(instance_root(root, &error), 0);
    assert_string_equal(root, getenv("CALYPTE_RUNTIME_DIR"));
    unsetenv("CALYPTE_RUNTIME_DIR");
    assert_int_equal(instance_root(root, &error), 0);
    assert_string_equal(root, "/xdg/calypte");
    unsetenv("XDG_RUNTIME_DIR");
    snprintf(want, sizeof want, "/tmp/calypte-%u", geteuid());
    assert_int_equal(instance_root(root, &error), 0);
    assert_string_equal(root, geteuid() ? want : "/run/calypte");
    setenv("CALYPTE_RUNTIME_DIR", "relative", 1);
    assert_int_equal(instance_root(root, &error), -EINVAL);
    char longer[200];
    memset(longer, 'x', sizeof longer);
    longer[0] = '/';
    longer[sizeof longer - 1] = '\0';
    setenv("CALYPTE_RUNTIME_DIR", longer, 1);
    assert_int_equal(instance_root(root, &error), -ENAMETOOLONG);
}

static void test_take(void **state)
{
    const struct scratch *scratch = *state;
    struct instance first, second;
    struct stat facts;
    struct error error;
    assert_int_equal(instance_take(scratch->name, &first, &error), 0);
    assert_int_equal(stat(first.folder, &facts), 0);
    assert_int_equal(facts.st_mode & 0777, 0700);
    assert_int_equal(instance_alive(&first), 1);
    /* A second one is refused, and hurts nothing. */
    assert_int_equal(instance_take(scratch->name, &second, &error), -EBUSY);
    assert_non_null(strstr(error.text, "running already"));
    assert_int_equal(instance_alive(&first), 1);
    instance_release(&first, true);
    assert_int_equal(stat(first.folder, &facts), -1);
    assert_int_equal(instance_find(scratch->name, &second, &error), 0);
    assert_int_equal(instance_alive(&second), 0);
    assert_int_equal(instance_take(scratch->name, &second, &error), 0);
    instance_release(&second, true);
}

static void test_names(void **state)
{
    static const char *const bad[] = {"", ".", "..", "a/b", "a.b", "a b", "\xc3\xa9"};
    struct instance instance;
    struct error error;
    (void)state;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        assert_true(instance_find(bad[i], &instance, &error) < 0);
}

static void test_refuses_folder(void **state)
{
    const struct scratch *scratch = *state;
    struct instance instance;
    struct error error;
    assert_int_equal(instance_find(scratch->name, &instance, &error), 0);
    assert_int_equal(symlink("/tmp", instance.folder), 0);
    assert_int_equal(instance_take(scratch->name, &instance, &error), -EPERM);
    assert_int_equal(unlink(instance.folder), 0);
    assert_int_equal(mkdir(instance.folder, 0700), 0);
    assert_int_equal(chmod(instance.folder, 0777), 0);
    assert_int_equal(instance_take(scratch->name, &instance, &error), -EPERM);
    assert_int_equal(chmod(instance.folder, 0700), 0);
    if (geteuid() == 0) { /* only root can give a folder away */
        assert_int_equal(chown(instance.folder, 1, 1), 0);
        assert_int_equal(instance_take(scratch->name, &instance, &error), -EPERM);
        assert_non_null(strstr(error.text, "belongs to user 1"));
        assert_int_equal(chown(instance.folder, 0, 0), 0);
    }
    assert_int_equal(instance_take(scratch->name, &instance, &error), 0);
    instance_release(&instance, true);
}

static void touch(const struct instance *instance, const char *file)
{
    char path[108];
    instance_path(instance, file, path);
    int fd = open(path, O_CREAT | O_WRONLY, 0600);
    assert_true(fd >= 0);
    close(fd);
}

static bool exists(const struct instance *instance, const char *file)
{
    char path[108];
    instance_path(instance, file, path);
    return access(path, F_OK) == 0;
}

/* A process with the arguments of a child of that instance, which ignores SIGTERM and calls itself `program`. */
static pid_t start_orphan(const char *program, const char *name, const char *folder)
{
    pid_t pid = fork();
    if (pid == 0) {
        execl("/bin/sh", program, "-c", "trap '' TERM; while :; do sleep 1; done", "calypte-worker", "--instance", name,
              "--rundir", folder, "--parent", "1", (char *)NULL);
        _exit(1);
    }
    assert_true(pid > 0);
    char path[64], text[512];
    snprintf(path, sizeof path, "/proc/%d/cmdline", pid);
    for (int i = 0; i < 1000; i++) { /* until it has become the shell */
        FILE *file = fopen(path, "r");
        size_t size = file ? fread(text, 1, sizeof text, file) : 0;
        if (file)
            fclose(file);
        if (memmem(text, size, "--rundir", 8))
            break;
        usleep(1000);
    }
    return pid;
}

static void test_cleans(void **state)
{
    const struct scratch *scratch = *state;
    struct instance instance;
    struct error error;
    char segment[64];
    assert_int_equal(instance_take(scratch->name, &instance, &error), 0);
    touch(&instance, "api.ipc");
    touch(&instance, "calypte-iod.pid");
    touch(&instance, "calypte-iod.log");
    snprintf(segment, sizeof segment, "/calypte.%s.control", scratch->name);
    int fd = shm_open(segment, O_CREAT | O_RDWR, 0600);
    assert_true(fd >= 0);
    close(fd);
    pid_t orphan = start_orphan("calypte-worker", scratch->name, instance.folder);
    pid_t debugger = start_orphan("/usr/bin/gdb", scratch->name, instance.folder);
    assert_int_equal(instance_clean(&instance, &error), 0);
    int exit_status;
    assert_int_equal(waitpid(orphan, &exit_status, WNOHANG), orphan); /* it is gone already */
    assert_true(WIFSIGNALED(exit_status) && WTERMSIG(exit_status) == SIGKILL);
    assert_int_equal(waitpid(debugger, &exit_status, WNOHANG), 0); /* a name of another's is another's process */
    kill(debugger, SIGKILL);
    waitpid(debugger, NULL, 0);
    assert_false(exists(&instance, "api.ipc"));
    assert_false(exists(&instance, "calypte-iod.pid"));
    assert_true(exists(&instance, "calypte-iod.log"));
    assert_int_equal(shm_open(segment, O_RDWR, 0600), -1);
    instance_release(&instance, true);
    assert_int_equal(access(instance.folder, F_OK), -1);
}

/* The same name in another folder: its shared memory is the same, so it must not be touched. */
static void test_spares_namesake(void **state)
{
    const struct scratch *scratch = *state;
    struct instance instance;
    struct error error;
    char segment[64];
    snprintf(segment, sizeof segment, "/calypte.%s.control", scratch->name);
    int fd = shm_open(segment, O_CREAT | O_RDWR, 0600);
    assert_true(fd >= 0);
    close(fd);
    pid_t other = start_orphan("calypte-worker", scratch->name, "/another/folder");
    assert_int_equal(instance_take(scratch->name, &instance, &error), 0);
    assert_int_equal(instance_clean(&instance, &error), -EBUSY);
    assert_non_null(strstr(error.text, "/another/folder"));
    assert_int_equal(kill(other, 0), 0);
    fd = shm_open(segment, O_RDWR, 0600);
    assert_true(fd >= 0);
    close(fd);
    kill(other, SIGKILL);
    waitpid(other, NULL, 0);
    instance_release(&instance, true);
}

static void test_sweep(void **state)
{
    const struct scratch *scratch = *state;
    struct instance live, dead;
    struct error error;
    char name[48];
    snprintf(name, sizeof name, "run-%s", scratch->name);
    assert_int_equal(instance_take(scratch->name, &live, &error), 0);
    assert_int_equal(instance_take(name, &dead, &error), 0);
    touch(&dead, "api.ipc");
    instance_release(&dead, false); /* as a killed process does */
    assert_int_equal(instance_sweep("", &error), 0);
    assert_int_equal(access(dead.folder, F_OK), -1);
    assert_int_equal(access(live.folder, F_OK), 0);
    assert_int_equal(instance_alive(&live), 1);
    instance_release(&live, true);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_root, make_scratch, remove_scratch),
        cmocka_unit_test_setup_teardown(test_take, make_scratch, remove_scratch),
        cmocka_unit_test_setup_teardown(test_names, make_scratch, remove_scratch),
        cmocka_unit_test_setup_teardown(test_refuses_folder, make_scratch, remove_scratch),
        cmocka_unit_test_setup_teardown(test_cleans, make_scratch, remove_scratch),
        cmocka_unit_test_setup_teardown(test_spares_namesake, make_scratch, remove_scratch),
        cmocka_unit_test_setup_teardown(test_sweep, make_scratch, remove_scratch),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
