/* The eviction policy: pure, so a table of cases is the whole test. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "shm/lru.h"

static void test_oldest_evictable(void **state)
{
    (void)state;
    const struct lru_candidate candidates[] = {{9, true}, {3, false}, {5, true},
                                               {4, true}, {4, true},  {UINT64_MAX, true}};
    assert_int_equal(lru_victim(candidates, 6), 3); /* 3 is older but stays; of two fours the lower index */
    assert_int_equal(lru_victim(candidates, 3), 2);
    assert_int_equal(lru_victim(candidates, 1), 0);
}

static void test_none(void **state)
{
    (void)state;
    const struct lru_candidate candidates[] = {{1, false}, {2, false}};
    assert_true(lru_victim(candidates, 2) == LRU_NONE);
    assert_true(lru_victim(candidates, 0) == LRU_NONE);
    const struct lru_candidate newest[] = {{UINT64_MAX, true}};
    assert_int_equal(lru_victim(newest, 1), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_oldest_evictable), cmocka_unit_test(test_none)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
