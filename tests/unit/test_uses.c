/* The use log: order, readers that are lapped or torn, a writer that dies and returns, lies, and threads. */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "shm/uses.h"

#define AT_ONCE 64u

static struct use_log *log_of(void **state)
{
    return *state;
}

static int set_up(void **state)
{
    *state = aligned_alloc(CACHE_LINE, sizeof(struct use_log));
    if (!*state)
        return -1;
    memset(*state, 0, sizeof(struct use_log)); /* as a new segment is */
    return 0;
}

static int tear_down(void **state)
{
    free(*state);
    return 0;
}

/* Entry number n of a log whose every entry says which it is. */
static struct use numbered(uint64_t n)
{
    return (struct use){.expert = (uint32_t)(n & 0xffffff),
                        .row = (uint32_t)(n * 7 & 0x1fff),
                        .flags = (uint32_t)(n & 7),
                        .step = (uint32_t)(n >> 3 & 0xffffff)};
}

static bool is_numbered(const struct use *use, uint64_t n)
{
    struct use want = numbered(n);
    return memcmp(use, &want, sizeof want) == 0;
}

static void append_numbered(struct use_log *log, uint64_t first, uint64_t count)
{
    struct use uses[AT_ONCE];
    while (count > 0) {
        uint32_t some = count < AT_ONCE ? (uint32_t)count : AT_ONCE;
        for (uint32_t i = 0; i < some; i++)
            uses[i] = numbered(first + i);
        uses_append(log, uses, some);
        first += some;
        count -= some;
    }
}

/* Reads until nothing is left; every entry must be number *next + what was lost. */
static uint64_t read_numbered(const struct use_log *log, uint64_t *place, uint64_t *next, uint64_t *ret_lost)
{
    struct use uses[1000];
    uint64_t total = 0, lost;
    uint32_t count;
    *ret_lost = 0;
    do {
        count = uses_read(log, place, uses, 1000, &lost);
        *ret_lost += lost;
        *next += lost;
        for (uint32_t i = 0; i < count; i++)
            if (!is_numbered(&uses[i], *next + i))
                fail_msg("entry %llu is not what was written", (unsigned long long)(*next + i));
        *next += count;
        total += count;
    } while (count > 0 || lost > 0);
    return total;
}

static void test_every_field(void **state)
{
    struct use_log *log = log_of(state);
    const struct use greatest = {.expert = 0xffffff, .row = 0x1fff, .flags = 7, .step = 0xffffff};
    const struct use wanted[] = {{.expert = 0xffffff}, {.row = 0x1fff}, {.flags = 7}, {.step = 0xffffff}};
    struct use got[6];
    uint64_t place = 0, lost = 1;
    uses_append(log, wanted, 4);
    uses_append(log, &greatest, 1);
    assert_int_equal(uses_read(log, &place, got, 6, &lost), 5);
    assert_int_equal(lost, 0);
    assert_memory_equal(got, wanted, sizeof wanted);
    assert_memory_equal(&got[4], &greatest, sizeof greatest);
    assert_int_equal(uses_read(log, &place, got, 6, &lost), 0);

    /* what is too large for its field does not spill into a neighbour */
    const struct use larger = {.expert = 0x1000001, .row = 0x2002, .flags = 8 | 2, .step = 0x1000004};
    uses_append(log, &larger, 1);
    assert_int_equal(uses_read(log, &place, got, 6, &lost), 1);
    assert_int_equal(got[0].expert, 1);
    assert_int_equal(got[0].row, 2);
    assert_int_equal(got[0].flags, 2);
    assert_int_equal(got[0].step, 4);
}

/* Two readers with places of their own, through three rounds of the ring. */
static void test_order_through_wraps(void **state)
{
    struct use_log *log = log_of(state);
    uint64_t place = 0, next = 0, lost, late_place = uses_end(log), late_next = 0, written = 0;
    while (written < 3 * (uint64_t)USE_ENTRIES) {
        append_numbered(log, written, 4999);
        written += 4999;
        assert_int_equal(read_numbered(log, &place, &next, &lost), 4999);
        assert_int_equal(lost, 0);
        if (written % 3 == 0) {
            read_numbered(log, &late_place, &late_next, &lost);
            assert_int_equal(lost, 0);
            assert_true(late_next == written);
        }
    }
    assert_true(place == uses_end(log) && uses_end(log) == written);
}

/* A reader that was lapped gets the last USE_ENTRIES whole and is told how many it has lost. */
static void test_lapped(void **state)
{
    struct use_log *log = log_of(state);
    uint64_t place = 0, next = 0, lost;
    append_numbered(log, 0, USE_ENTRIES);
    assert_int_equal(read_numbered(log, &place, &next, &lost), USE_ENTRIES); /* exactly full: nothing is lost yet */
    assert_int_equal(lost, 0);
    append_numbered(log, USE_ENTRIES, USE_ENTRIES + 12345);
    assert_int_equal(read_numbered(log, &place, &next, &lost), USE_ENTRIES);
    assert_int_equal(lost, 12345);
    assert_true(place == uses_end(log));
}

/* The writer has announced entries and overwritten some of them: what lies there is neither delivered nor forgotten to be counted. */
static void test_torn(void **state)
{
    struct use_log *log = log_of(state);
    uint64_t place = 0, lost;
    struct use *uses = calloc(USE_ENTRIES, sizeof *uses);
    append_numbered(log, 0, USE_ENTRIES);
    atomic_store(&log->begun, USE_ENTRIES + 100u);
    for (uint32_t i = 0; i < 50; i++)
        atomic_store(&log->entries[i], UINT64_MAX);
    assert_int_equal(uses_read(log, &place, uses, USE_ENTRIES, &lost), USE_ENTRIES - 100);
    assert_int_equal(lost, 100);
    assert_true(is_numbered(&uses[0], 100) && is_numbered(&uses[USE_ENTRIES - 101], USE_ENTRIES - 1));
    assert_true(place == USE_ENTRIES);
    place = 0; /* a short read that is torn as a whole still moves on */
    assert_int_equal(uses_read(log, &place, uses, 40, &lost), 0);
    assert_int_equal(lost, 40);
    assert_true(place == 40);

    /* The writer died there; the next one, which appends less, does not make the torn entries whole. */
    append_numbered(log, USE_ENTRIES, 10);
    place = 0;
    uint64_t next = 0;
    assert_int_equal(read_numbered(log, &place, &next, &lost), USE_ENTRIES + 10 - 100);
    assert_int_equal(lost, 100);
    free(uses);
}

/* Whatever stands in the header, a reader gets no more than it asked for and comes to an end, and a writer heals the log. */
static void test_lies(void **state)
{
    struct use_log *log = log_of(state);
    static const uint64_t lies[] = {0, 1, USE_ENTRIES, UINT64_MAX / 2, UINT64_MAX - USE_ENTRIES, UINT64_MAX};
    struct use uses[10];
    for (size_t e = 0; e < sizeof lies / sizeof *lies; e++)
        for (size_t b = 0; b < sizeof lies / sizeof *lies; b++)
            for (size_t p = 0; p < sizeof lies / sizeof *lies; p++) {
                uint64_t place = lies[p], lost;
                atomic_store(&log->end, lies[e]);
                atomic_store(&log->begun, lies[b]);
                assert_true(uses_read(log, &place, uses, 10, &lost) <= 10);
                assert_true(lies[e] - place <= USE_ENTRIES);
            }
    atomic_store(&log->end, 5);
    atomic_store(&log->begun, UINT64_MAX);
    append_numbered(log, 5, 3);
    uint64_t place = 5, next = 5, lost;
    assert_int_equal(read_numbered(log, &place, &next, &lost), 3);
    assert_int_equal(lost, 0);
}

/* A log that was begun anew behind a reader's back: it starts over. */
static void test_begun_anew(void **state)
{
    struct use_log *log = log_of(state);
    uint64_t place = 1000, next = 0, lost;
    append_numbered(log, 0, 30);
    assert_int_equal(read_numbered(log, &place, &next, &lost), 30);
    assert_int_equal(lost, 0);
}

#define RUN (20 * (uint64_t)USE_ENTRIES)

static void *write_run(void *argument)
{
    append_numbered(argument, 0, RUN);
    return NULL;
}

/* A reader that now and then is too slow never takes an entry for another, and what it got and lost is all there was. */
static void test_two_threads(void **state)
{
    struct use_log *log = log_of(state);
    pthread_t writer;
    uint64_t place = 0, next = 0, got = 0, lost, all_lost = 0, laps = 0;
    assert_int_equal(pthread_create(&writer, NULL, write_run, log), 0);
    while (got + all_lost < RUN) {
        got += read_numbered(log, &place, &next, &lost);
        all_lost += lost;
        if (++laps % 4 == 0) /* sleeps until it is lapped, or all is written */
            while (uses_end(log) - place < USE_ENTRIES && uses_end(log) < RUN)
                ;
    }
    pthread_join(writer, NULL);
    assert_true(got + all_lost == RUN && next == RUN && place == RUN);
    assert_true(got > 0);
}

#define HANDED 100000u

static uint64_t handed[HANDED]; /* plain words: TSan sees whether the log orders them */

static void *hand_over(void *argument)
{
    for (uint64_t i = 0; i < HANDED; i++) {
        handed[i] = i * 3;
        append_numbered(argument, i, 1);
    }
    return NULL;
}

/* Who sees an entry sees all that its writer had done before. */
static void test_order_of_threads(void **state)
{
    struct use_log *log = log_of(state);
    pthread_t writer;
    uint64_t place = 0, got = 0, lost;
    assert_int_equal(pthread_create(&writer, NULL, hand_over, log), 0);
    while (got < HANDED) {
        struct use uses[100];
        uint32_t count = uses_read(log, &place, uses, 100, &lost);
        assert_int_equal(lost, 0);
        for (uint64_t end = got + count; got < end; got++)
            assert_true(handed[got] == got * 3);
    }
    pthread_join(writer, NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_every_field, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_order_through_wraps, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_lapped, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_torn, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_lies, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_begun_anew, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_two_threads, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_order_of_threads, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
