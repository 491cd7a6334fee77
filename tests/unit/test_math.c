/* The functions of compute/math.h against libm in a wider type, and a checksum of their bits: numbers are a promise. */
#include "compute/math.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>
#include <xxhash.h>

#include <cmocka.h>

static float of_bits(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Distance of `got` from the exact `want` in units of the last place of an f32 near it (of the smallest subnormal, at
 * the bottom). */
static double ulps_f32(float got, double want)
{
    int exponent;
    frexp(want, &exponent);
    return fabs((double)got - want) / ldexp(1.0, (exponent < -125 ? -125 : exponent) - 24);
}

static double ulps_f64(double got, long double want)
{
    int exponent;
    frexpl(want, &exponent);
    return (double)(fabsl((long double)got - want) / ldexpl(1.0L, (exponent < -1021 ? -1021 : exponent) - 53));
}

static void test_exp(void **state)
{
    (void)state;
    assert_true(math_exp(0.0f) == 1.0f && math_exp(-0.0f) == 1.0f);
    assert_true(isinf(math_exp(INFINITY)) && math_exp(-INFINITY) == 0.0f && isnan(math_exp(NAN)));
    assert_true(isinf(math_exp(88.73f)) && isfinite(math_exp(88.72f)));
    assert_true(math_exp(-103.9f) > 0.0f && math_exp(-104.1f) == 0.0f);
    double worst = 0.0;
    uint64_t finite = 0;
    for (uint64_t bits = 0; bits < (UINT64_C(1) << 32); bits += 257) {
        float x = of_bits((uint32_t)bits), y = math_exp(x);
        double want = exp((double)x);
        if (isnan(x)) {
            assert_true(isnan(y));
        } else if (want >= 0x1.ffffffp127) {
            assert_true(isinf(y));
        } else {
            double error = ulps_f32(y, want);
            worst = error > worst ? error : worst;
            finite++;
        }
    }
    for (float x = -104.0f; x < 88.72f; x += 0.000173f) {
        double error = ulps_f32(math_exp(x), exp((double)x));
        worst = error > worst ? error : worst;
    }
    print_message("math_exp: worst %.3f ulp over %llu bit patterns\n", worst, (unsigned long long)finite);
    assert_true(worst < 2.0);
}

static void test_pow(void **state)
{
    (void)state;
    static const double bases[] = {1.5, 2.0, 10000.0, 50000.0, 160000.0, 500000.0, 1e6,
                                   5e6, 8e6, 1e7,     0.3,     1.0,      0x1p-1060};
    double worst = 0.0;
    for (size_t b = 0; b < sizeof bases / sizeof bases[0]; b++)
        for (int j = -256; j <= 256; j++) {
            double exponent = j / 256.0;
            long double want = powl(bases[b], exponent);
            double got = math_pow(bases[b], exponent);
            double error = want > 0x1.fffffffffffffp1023L ? (isinf(got) ? 0.0 : 1e9) : ulps_f64(got, want);
            worst = error > worst ? error : worst;
        }
    print_message("math_pow: worst %.3f ulp\n", worst);
    assert_true(worst < 4.0);
    assert_true(math_pow(8e6, 0.0) == 1.0 && math_pow(2.0, 10.0) == 1024.0);
    assert_true(isinf(math_pow(10.0, 400.0)) && math_pow(10.0, -400.0) == 0.0 && isnan(math_pow(-1.0, 0.5)) &&
                isnan(math_pow(2.0, NAN)));
}

static void test_sincos(void **state)
{
    (void)state;
    double worst = 0.0, s, c;
    uint64_t random = 1;
    for (int i = 0; i < 400000; i++) {
        random = random * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        double unit = (double)(random >> 11) * 0x1p-53;
        double x = ldexp(unit, i % 60 - 30) * (i & 64 ? -1.0 : 1.0);
        if (i % 5 == 0)
            x = (double)(random >> 44) * 1.57079632679489661923; /* near multiples of pi/2 */
        math_sincos(x, &s, &c);
        double es = ulps_f64(s, sinl(x)), ec = ulps_f64(c, cosl(x));
        worst = es > worst ? es : worst;
        worst = ec > worst ? ec : worst;
    }
    print_message("math_sincos: worst %.3f ulp\n", worst);
    assert_true(worst < 2.0);
    math_sincos(0.0, &s, &c);
    assert_true(s == 0.0 && c == 1.0);
}

static void test_half(void **state)
{
    (void)state;
    for (uint32_t bits = 0; bits < 65536; bits++) {
        float x = math_f16_to_f32((uint16_t)bits);
        int exponent = (int)(bits >> 10 & 31), fraction = (int)(bits & 1023);
        if (exponent == 31) {
            assert_true(fraction ? isnan(x) : isinf(x));
        } else {
            double want = exponent ? ldexp(1024 + fraction, exponent - 25) : ldexp(fraction, -24);
            assert_true((double)x == (bits >> 15 ? -want : want));
        }
        assert_int_equal(signbit(x) != 0, bits >> 15);
        assert_int_equal(math_f32_to_f16(x), exponent == 31 && fraction ? bits | 0x200u : bits);
    }
    /* Between two neighbours: to the nearer one, at the middle to the even one. */
    for (uint32_t bits = 0; bits < 0x7bff; bits++) {
        float low = math_f16_to_f32((uint16_t)bits), high = math_f16_to_f32((uint16_t)(bits + 1)),
              middle = (low + high) * 0.5f;
        assert_int_equal(math_f32_to_f16(middle), bits & 1 ? bits + 1 : bits);
        assert_int_equal(math_f32_to_f16(nextafterf(middle, 0.0f)), bits);
        assert_int_equal(math_f32_to_f16(nextafterf(middle, INFINITY)), bits + 1);
    }
    assert_int_equal(math_f32_to_f16(65519.0f), 0x7bff);
    assert_int_equal(math_f32_to_f16(65520.0f), 0x7c00);
    assert_int_equal(math_f32_to_f16(-INFINITY), 0xfc00);
    assert_int_equal(math_f32_to_f16(0x1p-25f), 0);
    assert_int_equal(math_f32_to_f16(0x1.000002p-25f), 1);
    assert_true(math_bf16_to_f32(0x3f80) == 1.0f && math_bf16_to_f32(0xc040) == -3.0f);
}

static void test_bits(void **state)
{
    (void)state;
    XXH3_state_t *hash = XXH3_createState();
    assert_non_null(hash);
    XXH3_64bits_reset(hash);
    for (uint64_t bits = 0; bits < (UINT64_C(1) << 32); bits += 4099) {
        float y = math_exp(of_bits((uint32_t)bits));
        if (!isnan(y))
            XXH3_64bits_update(hash, &y, sizeof y);
        uint16_t half = math_f32_to_f16(of_bits((uint32_t)bits));
        XXH3_64bits_update(hash, &half, sizeof half);
    }
    uint64_t of_exp = XXH3_64bits_digest(hash);
    XXH3_64bits_reset(hash);
    for (int j = 0; j < 128; j++)
        for (int position = 0; position < 1 << 20; position += 4093) {
            double s, c, frequency = math_pow(j & 1 ? 8e6 : 1e4, -j / 128.0);
            math_sincos(position * frequency, &s, &c);
            XXH3_64bits_update(hash, &frequency, sizeof frequency);
            XXH3_64bits_update(hash, &s, sizeof s);
            XXH3_64bits_update(hash, &c, sizeof c);
        }
    uint64_t of_rope = XXH3_64bits_digest(hash);
    XXH3_freeState(hash);
    print_message("bits: exp %016llx, rope %016llx\n", (unsigned long long)of_exp, (unsigned long long)of_rope);
    assert_true(of_exp == UINT64_C(0x588e72abec438384));
    assert_true(of_rope == UINT64_C(0xbee2c0e218e5d3de));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_exp),  cmocka_unit_test(test_pow),  cmocka_unit_test(test_sincos),
        cmocka_unit_test(test_half), cmocka_unit_test(test_bits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
