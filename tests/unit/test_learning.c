/* What is remembered of the experts' use: the bytes and the numbers, then the file with its lock, its bound and all that
 * may be wrong with it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "io_daemon/learning.h"
#include "io_daemon/learning_record.h"
#include "proto/cleanup.h"

#include <fcntl.h>
#include <ftw.h>
#include <signal.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>

#define EXPERTS 40u
#define IDENTITY UINT64_C(0x1234567890abcdef)

/* --- bytes and numbers --- */

static struct learning_memory new_memory(void)
{
    struct learning_memory memory;
    assert_int_equal(learning_memory_open(IDENTITY, EXPERTS, &memory, NULL), 0);
    return memory;
}

/* A file of a header, a HEAT record and two USES records; *ret_ends: where each of the four ends. */
static size_t example(char *ret_bytes, size_t ret_ends[4])
{
    struct learning_memory memory = new_memory();
    uint32_t uses[EXPERTS] = {[3] = 7, [39] = 1}, more[EXPERTS] = {[0] = 2, [3] = 1};
    learning_memory_add(&memory, uses);
    size_t size = learning_encode_header(&memory, ret_bytes);
    ret_ends[0] = size;
    ret_ends[1] = size += learning_encode_heat(&memory, ret_bytes + size);
    ret_ends[2] = size += learning_encode_uses(&memory, uses, ret_bytes + size);
    ret_ends[3] = size += learning_encode_uses(&memory, more, ret_bytes + size);
    learning_memory_close(&memory);
    return size;
}

static void test_round_trip(void **state)
{
    (void)state;
    char bytes[4096];
    size_t ends[4], whole, size = example(bytes, ends);
    struct learning_memory memory = new_memory();
    assert_int_equal(learning_decode(&memory, bytes, size, &whole), LEARNING_WHOLE);
    assert_int_equal(whole, size);
    for (uint32_t e = 0; e < EXPERTS; e++)
        assert_true(memory.heat[e] == (e == 0 ? 2.0f : e == 3 ? 15.0f : e == 39 ? 2.0f : 0.0f));
    assert_int_equal(memory.uses, 19);
    uint32_t none[EXPERTS] = {0};
    assert_int_equal(learning_encode_uses(&memory, none, bytes), 0);
    learning_memory_close(&memory);
}

/* A half-life is counted in uses of the whole model, however they are cut into records. */
static void test_decay(void **state)
{
    (void)state;
    struct learning_memory once = new_memory(), often = new_memory();
    const uint32_t half_life = LEARNING_HALF_LIFE * EXPERTS;
    once.heat[1] = often.heat[1] = 64;
    uint32_t uses[EXPERTS] = {[2] = half_life - 1};
    learning_memory_add(&once, uses);
    assert_true(once.heat[1] == 64);
    uses[2] = 1;
    learning_memory_add(&once, uses);
    assert_true(once.heat[1] == 32);
    assert_true(once.heat[2] == (float)half_life / 2);
    for (uint32_t i = 0; i < half_life; i++)
        learning_memory_add(&often, uses);
    assert_true(often.heat[1] == 32);
    uses[2] = 3 * half_life;
    learning_memory_add(&once, uses);
    assert_true(once.heat[1] == 4);
    uses[2] = UINT32_MAX; /* more than 64 half-lives in one record: nothing remains, nothing overflows */
    uses[3] = UINT32_MAX;
    learning_memory_add(&once, uses);
    assert_true(once.heat[1] == 0);
    learning_memory_close(&once);
    learning_memory_close(&often);
}

/* Cut at every byte: what was whole before the cut is there, and nothing else. */
static void test_cut_anywhere(void **state)
{
    (void)state;
    char bytes[4096];
    size_t ends[4], size = example(bytes, ends);
    for (size_t cut = 0; cut < size; cut++) {
        struct learning_memory memory = new_memory();
        _cleanup_free_ char *copy = malloc(cut + 1); /* so that a look behind the end is seen */
        memcpy(copy, bytes, cut);
        size_t whole, expected = 0;
        for (int i = 0; i < 4; i++)
            expected = ends[i] <= cut ? ends[i] : expected;
        enum learning_verdict verdict = learning_decode(&memory, copy, cut, &whole);
        assert_int_equal(verdict, cut == 0 || cut == expected ? LEARNING_WHOLE : LEARNING_CUT);
        assert_int_equal(whole, expected);
        assert_true(memory.heat[3] == (cut >= ends[2] ? 14.0f : cut >= ends[1] ? 7.0f : 0.0f));
        learning_memory_close(&memory);
    }
}

/* Every bit flipped: never taken for whole, and what lies before the flip is kept. */
static void test_flip_anywhere(void **state)
{
    (void)state;
    char bytes[4096];
    size_t ends[4], size = example(bytes, ends);
    for (size_t bit = 0; bit < size * 8; bit++) {
        struct learning_memory memory = new_memory();
        _cleanup_free_ char *copy = malloc(size);
        memcpy(copy, bytes, size);
        copy[bit / 8] ^= (char)(1 << bit % 8);
        size_t whole, before = 0;
        for (int i = 0; i < 3; i++)
            before = ends[i] <= bit / 8 ? ends[i] : before;
        enum learning_verdict verdict = learning_decode(&memory, copy, size, &whole);
        assert_true(verdict == LEARNING_DAMAGED || (verdict == LEARNING_CUT && before > 0));
        assert_int_equal(whole, before);
        learning_memory_close(&memory);
    }
}

/* Records with a right checksum and a wrong content: made by encoding what no honest writer has. */
static void test_crafted(void **state)
{
    (void)state;
    char bytes[4096];
    size_t whole;
    const float bad[] = {-1, 1e30f, __builtin_nanf(""), __builtin_inff()};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        struct learning_memory memory = new_memory(), read = new_memory();
        memory.heat[EXPERTS - 1] = bad[i];
        size_t size = learning_encode_header(&memory, bytes), header = size;
        size += learning_encode_heat(&memory, bytes + size);
        assert_int_equal(learning_decode(&read, bytes, size, &whole), LEARNING_DAMAGED);
        assert_int_equal(whole, header);
        for (uint32_t e = 0; e < EXPERTS; e++)
            assert_true(read.heat[e] == 0);
        learning_memory_close(&memory);
        learning_memory_close(&read);
    }
    /* A record of a larger model behind this one's header: an expert out of range, a table too long, a count too large. */
    struct learning_memory large, read = new_memory();
    assert_int_equal(learning_memory_open(IDENTITY, EXPERTS + 1, &large, NULL), 0);
    size_t header = learning_encode_header(&read, bytes);
    uint32_t uses[EXPERTS + 1] = {[EXPERTS] = 1};
    size_t size = header + learning_encode_uses(&large, uses, bytes + header);
    assert_int_equal(learning_decode(&read, bytes, size, &whole), LEARNING_DAMAGED);
    size = header + learning_encode_heat(&large, bytes + header);
    assert_int_equal(learning_decode(&read, bytes, size, &whole), LEARNING_DAMAGED);
    struct learning_memory many = new_memory();
    many.uses = UINT64_MAX;
    size = header + learning_encode_heat(&many, bytes + header);
    assert_int_equal(learning_decode(&read, bytes, size, &whole), LEARNING_DAMAGED);
    assert_int_equal(whole, header);
    /* Whole, but of another model or of other shapes. */
    size = learning_encode_header(&large, bytes);
    assert_int_equal(learning_decode(&read, bytes, size, &whole), LEARNING_FOREIGN);
    many.identity++;
    size = learning_encode_header(&many, bytes);
    assert_int_equal(learning_decode(&read, bytes, size, &whole), LEARNING_FOREIGN);
    /* This model's header, a record sealed for another. */
    header = learning_encode_header(&read, bytes);
    many.uses = 0;
    size = header + learning_encode_heat(&many, bytes + header);
    assert_int_equal(learning_decode(&read, bytes, size, &whole), LEARNING_CUT);
    assert_int_equal(whole, header);
    learning_memory_close(&large);
    learning_memory_close(&many);
    learning_memory_close(&read);
}

/* --- the file --- */

struct scratch {
    char folder[64], path[128], aside[160];
};

static char said[1024];
static int lines;

static void log_said(const char *line)
{
    snprintf(said, sizeof said, "%s", line);
    lines++;
}

static int remove_entry(const char *path, const struct stat *stat, int kind, struct FTW *walk)
{
    (void)stat, (void)kind, (void)walk;
    return remove(path);
}

static int setup(void **state)
{
    struct scratch *scratch = calloc(1, sizeof *scratch);
    strcpy(scratch->folder, "/tmp/calypte-learning.XXXXXX");
    if (!scratch || !mkdtemp(scratch->folder))
        return -1;
    snprintf(scratch->path, sizeof scratch->path, "%s/state/calypte/test.usage", scratch->folder);
    snprintf(scratch->aside, sizeof scratch->aside, "%s.damaged", scratch->path);
    said[0] = 0;
    lines = 0;
    *state = scratch;
    return 0;
}

static int teardown(void **state)
{
    struct scratch *scratch = *state;
    nftw(scratch->folder, remove_entry, 8, FTW_DEPTH | FTW_PHYS);
    free(scratch);
    return 0;
}

static struct learning *open_learning(const char *path, bool read_only)
{
    struct learning_options options = {
        .path = path, .identity = IDENTITY, .experts = EXPERTS, .read_only = read_only, .log = log_said};
    struct learning *learning;
    assert_int_equal(learning_open(&options, &learning, NULL), 0);
    return learning;
}

static void note(struct learning *learning, uint32_t expert, uint32_t times)
{
    for (uint32_t i = 0; i < times; i++)
        learning_note(learning, expert);
}

static off_t bytes_of(const char *path)
{
    struct stat stat_;
    return stat(path, &stat_) == 0 ? stat_.st_size : -1;
}

static void append_bytes(const char *path, const void *bytes, size_t size)
{
    _cleanup_close_ int fd = open(path, O_WRONLY | O_APPEND);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, bytes, size), size);
}

static void test_remembered(void **state)
{
    struct scratch *scratch = *state;
    struct learning *learning = open_learning(scratch->path, false);
    uint32_t hottest[EXPERTS];
    assert_int_equal(learning_hottest(learning, EXPERTS, hottest), 0);
    note(learning, 5, 3);
    note(learning, 7, 9);
    note(learning, 6, 3);
    note(learning, EXPERTS, 100); /* no expert: nothing */
    learning_close(learning);
    learning = open_learning(scratch->path, false);
    assert_true(learning_heat(learning, 7) == 9);
    assert_int_equal(learning_hottest(learning, EXPERTS, hottest), 3);
    assert_int_equal(hottest[0], 7);
    assert_int_equal(hottest[1], 5);
    assert_int_equal(hottest[2], 6);
    assert_int_equal(learning_hottest(learning, 2, hottest), 2);
    note(learning, 7, 1);
    learning_close(learning);
    learning = open_learning(scratch->path, true);
    assert_true(learning_heat(learning, 7) == 10);
    note(learning, 7, 1000);
    learning_close(learning);
    learning = open_learning(scratch->path, true);
    assert_true(learning_heat(learning, 7) == 10);
    learning_close(learning);
    assert_int_equal(lines, 0);
}

/* A million uses, faster than they can be written: records are written while they are noted, the file stays below its bound, and what it holds at the end
 * is what was noted, decayed. */
static void test_bounded(void **state)
{
    struct scratch *scratch = *state;
    struct learning *learning = open_learning(scratch->path, false);
    off_t most = 0, first = bytes_of(scratch->path);
    for (uint32_t i = 0; i < 1000000; i++) {
        learning_note(learning, i % 3 ? 1 : i % EXPERTS);
        if (i % 1000 == 0)
            most = bytes_of(scratch->path) > most ? bytes_of(scratch->path) : most;
    }
    /* The thread that appends may not have had a core yet. */
    for (int tries = 0; most == first && tries < 10000; tries++) {
        usleep(1000);
        most = bytes_of(scratch->path);
    }
    assert_true(most > first);
    learning_close(learning);
    off_t bound = (off_t)(LEARNING_HEADER_BYTES + 16 * learning_uses_bytes(EXPERTS));
    assert_true(most <= bound);
    assert_true(bytes_of(scratch->path) <= bound);
    /* Two half-lives more, in records as small as they are in life. */
    for (uint32_t round = 0; round < 2 * LEARNING_HALF_LIFE / 8; round++) {
        learning = open_learning(scratch->path, false);
        for (uint32_t i = 0; i < 8 * EXPERTS; i++)
            learning_note(learning, i % 3 ? 1 : i % EXPERTS);
        learning_close(learning);
    }
    learning = open_learning(scratch->path, true);
    /* Two thirds and a little of the uses, of one half-life at least, and of two at most. */
    float half_life = (float)(LEARNING_HALF_LIFE * EXPERTS);
    assert_true(learning_heat(learning, 1) > 0.33f * half_life && learning_heat(learning, 1) < 1.4f * half_life);
    assert_true(learning_heat(learning, 2) > 0 && learning_heat(learning, 2) < learning_heat(learning, 1) / 20);
    learning_close(learning);
    assert_int_equal(lines, 0);
}

static void test_cut_back(void **state)
{
    struct scratch *scratch = *state;
    struct learning *learning = open_learning(scratch->path, false);
    note(learning, 5, 3);
    learning_close(learning);
    off_t whole = bytes_of(scratch->path);
    append_bytes(scratch->path, "half a record of", 11);
    learning = open_learning(scratch->path, false);
    assert_true(learning_heat(learning, 5) == 3);
    assert_int_equal(bytes_of(scratch->path), whole);
    note(learning, 5, 1);
    learning_close(learning);
    learning = open_learning(scratch->path, false);
    assert_true(learning_heat(learning, 5) == 4);
    learning_close(learning);
    assert_int_equal(lines, 0);
    assert_int_equal(bytes_of(scratch->aside), -1);
}

static void test_set_aside(void **state)
{
    struct scratch *scratch = *state;
    learning_close(open_learning(scratch->path, false));
    /* Foreign bytes, a damaged middle, a file of any length. */
    for (int kind = 0; kind < 3; kind++) {
        if (kind == 0) {
            assert_int_equal(truncate(scratch->path, 0), 0);
            append_bytes(scratch->path, "these are the notes of somebody else, quite long ones", 53);
        } else if (kind == 1) {
            struct learning *learning = open_learning(scratch->path, false);
            note(learning, 5, 3);
            learning_close(learning);
            char zeros[200] = {0};
            zeros[12] = 4; /* a record of 4 bytes that is none, and more behind it */
            append_bytes(scratch->path, zeros, sizeof zeros);
        } else {
            assert_int_equal(truncate(scratch->path, 1 << 28), 0);
        }
        off_t before = bytes_of(scratch->path);
        lines = 0;
        struct learning *learning = open_learning(scratch->path, false);
        assert_int_equal(lines, 1);
        assert_non_null(strstr(said, scratch->aside));
        assert_int_equal(bytes_of(scratch->aside), before);
        assert_true(learning_heat(learning, 5) == (kind == 1 ? 3 : 0));
        note(learning, 6, 2);
        learning_close(learning);
        lines = 0;
        learning = open_learning(scratch->path, true);
        assert_true(learning_heat(learning, 6) == 2 && learning_heat(learning, 5) == (kind == 1 ? 3 : 0));
        learning_close(learning);
        assert_int_equal(lines, 0);
        assert_int_equal(truncate(scratch->path, 0), 0);
        learning_close(open_learning(scratch->path, false)); /* an empty file is a new one */
        assert_int_equal(lines, 0);
    }
}

static void test_two_instances(void **state)
{
    struct scratch *scratch = *state;
    struct learning *first = open_learning(scratch->path, false);
    note(first, 5, 3);
    learning_close(first);
    first = open_learning(scratch->path, false);
    struct learning *second = open_learning(scratch->path, false);
    assert_int_equal(lines, 1);
    assert_non_null(strstr(said, "another instance"));
    assert_true(learning_heat(second, 5) == 3);
    note(second, 5, 100);
    note(first, 5, 1);
    learning_close(second);
    struct error error;
    assert_int_equal(learning_forget(scratch->path, &error), -EBUSY);
    /* The lock goes with the file when it is written anew. */
    note(first, 1, 1000000);
    assert_int_equal(learning_forget(scratch->path, &error), -EBUSY);
    learning_close(first);
    first = open_learning(scratch->path, true);
    assert_true(learning_heat(first, 5) < 4);
    learning_close(first);
    assert_int_equal(learning_forget(scratch->path, &error), 0);
    assert_int_equal(bytes_of(scratch->path), -1);
    assert_int_equal(learning_forget(scratch->path, &error), 0);
}

/* What cannot be written is one line, and the instance goes on. */
static void test_unwritable(void **state)
{
    struct scratch *scratch = *state;
    char path[160];
    snprintf(path, sizeof path, "%s/file", scratch->folder);
    _cleanup_close_ int fd = open(path, O_CREAT | O_WRONLY, 0600);
    assert_true(fd >= 0);
    strcat(path, "/test.usage");
    struct learning *learning = open_learning(path, false);
    assert_int_equal(lines, 1);
    note(learning, 1, 100000);
    learning_close(learning);
    /* A link, a folder and a pipe in its place are not followed, read or waited for. */
    learning_close(open_learning(scratch->path, false));
    for (int kind = 0; kind < 3; kind++) {
        remove(scratch->path);
        assert_int_equal(kind == 0   ? symlink("/dev/zero", scratch->path)
                         : kind == 1 ? mkdir(scratch->path, 0700)
                                     : mkfifo(scratch->path, 0600),
                         0);
        lines = 0;
        learning_close(open_learning(scratch->path, false));
        assert_int_equal(lines, 1);
        assert_non_null(strstr(said, "is not a regular file"));
        learning_close(open_learning(scratch->path, true));
        assert_int_equal(lines, 2);
        assert_non_null(strstr(said, "is not a regular file"));
    }
}

/* What may be read but not written is read, with one line. */
static void test_not_ours_to_write(void **state)
{
    struct scratch *scratch = *state;
    const uid_t nobody = 65534;
    struct learning *learning = open_learning(scratch->path, false);
    note(learning, 5, 3);
    learning_close(learning);
    char path[sizeof scratch->path];
    snprintf(path, sizeof path, "%s", scratch->path);
    assert_int_equal(chmod(path, 0444), 0);
    for (char *slash = strrchr(path, '/'); strlen(path) > strlen(scratch->folder); slash = strrchr(path, '/')) {
        *slash = 0;
        assert_int_equal(chmod(path, 0755), 0);
    }
    for (int damaged = 0; damaged < 2; damaged++) {
        if (damaged) {
            chmod(scratch->path, 0644);
            char zeros[200] = {[12] = 4}; /* a record of 4 bytes that is none, and more behind it */
            append_bytes(scratch->path, zeros, sizeof zeros);
            chmod(scratch->path, 0444);
        }
        off_t before = bytes_of(scratch->path);
        lines = 0;
        uid_t own = geteuid();
        if (own == 0) /* who may write everything */
            assert_int_equal(seteuid(nobody), 0);
        learning = open_learning(scratch->path, false);
        assert_int_equal(seteuid(own), 0);
        assert_int_equal(lines, 1);
        assert_non_null(strstr(said, "Permission denied"));
        assert_non_null(strstr(said, "but not written"));
        assert_true(learning_heat(learning, 5) == 3);
        note(learning, 5, 100000);
        learning_close(learning);
        assert_int_equal(lines, 1);
        assert_int_equal(bytes_of(scratch->path), before);
    }
}

/* Damaged, and nothing can be put in its place, because a folder blocks one of the two names or the drive is full: the file
 * stays where it is, what is right in it counts, and counts once, and the line names what failed. */
static void test_not_set_aside(void **state)
{
    struct scratch *scratch = *state;
    struct learning *learning = open_learning(scratch->path, false);
    note(learning, 5, 3);
    learning_close(learning);
    char zeros[200] = {[12] = 4}, new_path[160];
    append_bytes(scratch->path, zeros, sizeof zeros);
    snprintf(new_path, sizeof new_path, "%s.new", scratch->path);
    const off_t damaged = bytes_of(scratch->path);
    struct rlimit limit, full = {.rlim_cur = 50};
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &limit), 0);
    full.rlim_max = limit.rlim_max;
    signal(SIGXFSZ, SIG_IGN);
    for (int kind = 0; kind < 4; kind++) {
        const char *blocked = kind == 0 ? scratch->aside : new_path;
        if (kind < 3)
            assert_int_equal(kind < 2 ? mkdir(blocked, 0700) : mkfifo(blocked, 0600), 0);
        else
            assert_int_equal(setrlimit(RLIMIT_FSIZE, &full), 0);
        lines = 0;
        learning = open_learning(scratch->path, false);
        assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
        assert_int_equal(lines, 1);
        assert_non_null(strstr(said, "read as far as it is right, but not written"));
        assert_non_null(strstr(said, blocked));
        assert_int_equal(kind == 1 || kind == 2, strstr(said, "is not a regular file") != NULL);
        assert_null(strstr(said, "kept"));
        assert_true(learning_heat(learning, 5) == 3);
        learning_close(learning);
        assert_int_equal(bytes_of(scratch->path), damaged);
        assert_int_equal(kind < 3 ? remove(blocked) : 0, 0);
        assert_int_equal(access(new_path, F_OK), -1);
        assert_int_equal(access(scratch->aside, F_OK), -1);
    }
    signal(SIGXFSZ, SIG_DFL);
    learning = open_learning(scratch->path, false);
    assert_int_equal(bytes_of(scratch->aside), damaged);
    assert_true(learning_heat(learning, 5) == 3);
    learning_close(learning);
}

/* Removed while it is in use, with its folder or without: written anew with all that was known, and one line. */
static void test_removed(void **state)
{
    struct scratch *scratch = *state;
    struct learning *learning = open_learning(scratch->path, false);
    note(learning, 5, 3);
    learning_close(learning);
    for (int round = 0; round < 2; round++) {
        lines = 0;
        learning = open_learning(scratch->path, false);
        note(learning, 5, 1);
        assert_int_equal(unlink(scratch->path), 0);
        if (round == 1) {
            char folder[sizeof scratch->path];
            snprintf(folder, sizeof folder, "%s", scratch->path);
            *strrchr(folder, '/') = 0;
            assert_int_equal(rmdir(folder), 0);
        }
        learning_close(learning);
        assert_int_equal(lines, 1);
        assert_non_null(strstr(said, "removed or replaced while it was in use: written anew"));
        learning = open_learning(scratch->path, true);
        assert_true(learning_heat(learning, 5) == (float)(4 + round));
        learning_close(learning);
        assert_int_equal(lines, 1);
    }
    /* Another instance has made a new one: that is left alone. */
    learning = open_learning(scratch->path, false);
    assert_int_equal(unlink(scratch->path), 0);
    struct learning *second = open_learning(scratch->path, false);
    lines = 0;
    note(learning, 5, 100);
    learning_close(learning);
    assert_int_equal(lines, 1);
    assert_non_null(strstr(said, "another instance of this model writes it"));
    note(second, 6, 2);
    learning_close(second);
    learning = open_learning(scratch->path, true);
    assert_true(learning_heat(learning, 5) == 0 && learning_heat(learning, 6) == 2);
    learning_close(learning);
    assert_int_equal(lines, 1);
}

/* Killed at any moment of a million notes: the next start reads it without a word. */
static void test_killed(void **state)
{
    struct scratch *scratch = *state;
    for (int round = 0; round < 20; round++) {
        pid_t child = fork();
        assert_true(child >= 0);
        if (child == 0) {
            struct learning *learning = open_learning(scratch->path, false);
            for (uint32_t i = 0;; i++)
                learning_note(learning, i % EXPERTS);
        }
        usleep(3000 + 700 * (useconds_t)round);
        kill(child, SIGKILL);
        waitpid(child, NULL, 0);
        learning_close(open_learning(scratch->path, false));
        assert_int_equal(lines, 0);
    }
    assert_int_equal(bytes_of(scratch->aside), -1);
    struct learning *learning = open_learning(scratch->path, true);
    assert_true(learning_heat(learning, 1) > 0);
    learning_close(learning);
}

static void test_path(void **state)
{
    (void)state;
    char path[PATH_MAX];
    setenv("XDG_STATE_HOME", "/home/state", 1);
    assert_int_equal(learning_path("/run/calypte/main", 0xab, path, NULL), 0);
    assert_string_equal(path, "/home/state/calypte/00000000000000ab.usage");
    setenv("XDG_STATE_HOME", "relative", 1);
    setenv("HOME", "/home/me", 1);
    assert_int_equal(learning_path("/run/calypte/main", 0xab, path, NULL), 0);
    assert_string_equal(path, "/home/me/.local/state/calypte/00000000000000ab.usage");
    unsetenv("HOME");
    assert_int_equal(learning_path("/run/calypte/main/", 0xab, path, NULL), 0);
    assert_string_equal(path, "/run/calypte/00000000000000ab.usage");
    unsetenv("XDG_STATE_HOME");
    assert_int_equal(learning_path("/main", 0xab, path, NULL), 0);
    assert_string_equal(path, "/00000000000000ab.usage");
    assert_int_equal(learning_path("main", 0xab, path, NULL), 0);
    assert_string_equal(path, "00000000000000ab.usage");
    char longest[PATH_MAX];
    memset(longest, 'a', sizeof longest - 1);
    longest[0] = longest[PATH_MAX - 3] = '/';
    longest[PATH_MAX - 1] = 0;
    assert_int_equal(learning_path(longest, 1, path, NULL), -ENAMETOOLONG);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trip),
        cmocka_unit_test(test_decay),
        cmocka_unit_test(test_cut_anywhere),
        cmocka_unit_test(test_flip_anywhere),
        cmocka_unit_test(test_crafted),
        cmocka_unit_test_setup_teardown(test_remembered, setup, teardown),
        cmocka_unit_test_setup_teardown(test_bounded, setup, teardown),
        cmocka_unit_test_setup_teardown(test_cut_back, setup, teardown),
        cmocka_unit_test_setup_teardown(test_set_aside, setup, teardown),
        cmocka_unit_test_setup_teardown(test_two_instances, setup, teardown),
        cmocka_unit_test_setup_teardown(test_unwritable, setup, teardown),
        cmocka_unit_test_setup_teardown(test_not_ours_to_write, setup, teardown),
        cmocka_unit_test_setup_teardown(test_not_set_aside, setup, teardown),
        cmocka_unit_test_setup_teardown(test_removed, setup, teardown),
        cmocka_unit_test_setup_teardown(test_killed, setup, teardown),
        cmocka_unit_test(test_path),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
