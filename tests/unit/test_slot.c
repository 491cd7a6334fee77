/* The state machine of a slot: every transition that the table allows, none that it does not, and what a generation
 * protects. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "shm/slot.h"

static uint64_t word_of(uint32_t generation, uint32_t pins, enum slot_state state)
{
    return (uint64_t)generation << 32 | (uint64_t)pins << 4 | (uint64_t)state;
}

static void test_transitions(void **state)
{
    (void)state;
    static const bool allowed[5][5] = {
        [SLOT_EMPTY][SLOT_LOADING] = true,       [SLOT_LOADING][SLOT_READY] = true, [SLOT_LOADING][SLOT_FAILED] = true,
        [SLOT_LOADING][SLOT_QUARANTINED] = true, [SLOT_READY][SLOT_EMPTY] = true,   [SLOT_FAILED][SLOT_EMPTY] = true,
        [SLOT_QUARANTINED][SLOT_EMPTY] = true,
    };
    for (uint32_t from = 0; from < 5; from++) {
        for (uint32_t to = 0; to < 5; to++) {
            _Atomic uint64_t word = word_of(7, 0, (enum slot_state)from);
            uint32_t generation = 0;
            int status = slot_change(&word, (enum slot_state)from, (enum slot_state)to, 7, &generation);
            if (!allowed[from][to]) {
                assert_int_equal(status, -EINVAL);
                assert_true(word == word_of(7, 0, (enum slot_state)from));
                continue;
            }
            assert_int_equal(status, 0);
            assert_int_equal(generation, from == SLOT_EMPTY ? 8 : 7);
            assert_true(word == word_of(generation, 0, (enum slot_state)to));
        }
    }
}

static void test_stale(void **state)
{
    (void)state;
    _Atomic uint64_t word = word_of(7, 0, SLOT_READY);
    assert_int_equal(slot_change(&word, SLOT_READY, SLOT_EMPTY, 6, NULL), -ESTALE);
    assert_int_equal(slot_change(&word, SLOT_LOADING, SLOT_READY, 7, NULL), -ESTALE);
    assert_int_equal(slot_pin(&word, 6, 0), -ESTALE);
    assert_int_equal(slot_pin(&word, 8, 0), -ESTALE);
    assert_true(word == word_of(7, 0, SLOT_READY));
    const enum slot_state others[] = {SLOT_EMPTY, SLOT_LOADING, SLOT_FAILED, SLOT_QUARANTINED};
    for (size_t i = 0; i < 4; i++) {
        word = word_of(7, 0, others[i]);
        assert_int_equal(slot_pin(&word, 7, 0), -ESTALE);
        assert_true(word == word_of(7, 0, others[i]));
    }
}

static void test_pins(void **state)
{
    (void)state;
    _Atomic uint64_t word = word_of(1, 0, SLOT_READY);
    for (uint32_t holder = 0; holder < SLOT_HOLDERS; holder++) {
        assert_int_equal(slot_pin(&word, 1, holder), 0);
        assert_int_equal(slot_pin(&word, 1, holder), 0); /* once more by the same holder is no second pin */
        assert_int_equal(slot_pins_of(word), (2u << holder) - 1);
        assert_int_equal(slot_change(&word, SLOT_READY, SLOT_EMPTY, 1, NULL), -EBUSY);
    }
    assert_int_equal(slot_state_of(word), SLOT_READY);
    assert_int_equal(slot_generation_of(word), 1);
    for (uint32_t holder = 0; holder < SLOT_HOLDERS; holder++) {
        assert_int_equal(slot_change(&word, SLOT_READY, SLOT_EMPTY, 1, NULL), -EBUSY);
        slot_unpin(&word, holder);
        slot_unpin(&word, holder);
    }
    assert_true(word == word_of(1, 0, SLOT_READY));
    assert_int_equal(slot_change(&word, SLOT_READY, SLOT_EMPTY, 1, NULL), 0);
    slot_unpin(&word, 3); /* a late clearing of a dead holder's bit changes nothing */
    assert_true(word == word_of(1, 0, SLOT_EMPTY));
}

static void test_generation_wraps(void **state)
{
    (void)state;
    _Atomic uint64_t word = word_of(UINT32_MAX, 0, SLOT_EMPTY);
    uint32_t generation = 1;
    assert_int_equal(slot_change(&word, SLOT_EMPTY, SLOT_LOADING, UINT32_MAX, &generation), 0);
    assert_int_equal(generation, 0);
    assert_true(word == word_of(0, 0, SLOT_LOADING));
}

/* Bits that only a scribbler sets do not survive the next change. */
static void test_stray_pins_heal(void **state)
{
    (void)state;
    _Atomic uint64_t word = word_of(3, 0x8001, SLOT_LOADING);
    assert_int_equal(slot_change(&word, SLOT_LOADING, SLOT_READY, 3, NULL), 0);
    assert_true(word == word_of(3, 0, SLOT_READY));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_transitions),      cmocka_unit_test(test_stale),           cmocka_unit_test(test_pins),
        cmocka_unit_test(test_generation_wraps), cmocka_unit_test(test_stray_pins_heal),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
