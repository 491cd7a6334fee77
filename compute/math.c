#include "compute/math.h"

#include "compute/math_inline.h"

/* For rounding f64 to the nearest integer by adding and subtracting. */
#define SHIFT64 0x1.8p52

float math_exp(float x)
{
    return inline_exp(x);
}

uint16_t math_f32_to_f16(float x)
{
    return inline_f32_to_f16(x);
}

float math_f16_to_f32(uint16_t x)
{
    return inline_f16_to_f32(x);
}

float math_bf16_to_f32(uint16_t x)
{
    return inline_bf16_to_f32(x);
}

static double double_of_bits(uint64_t bits)
{
    double x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static uint64_t bits_of_double(double x)
{
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* A value as the sum of two doubles, |low| at most half an ulp of high. */
struct pair {
    double high, low;
};

/* a + b exactly, |a| >= |b| (Dekker). */
static struct pair sum_pair(double a, double b)
{
    double high = a + b;
    return (struct pair){high, b - (high - a)};
}

/* ln x = e ln 2 + 2 atanh(s), s = (m - 1) / (m + 1), m in [sqrt 1/2, sqrt 2), good to some 2^-60 of 1: the first term
 * of the series and e ln 2 in pairs, the rest (at most s^2 / 3 of it) in f64. x > 0, finite. */
static struct pair log_pair(double x)
{
    int exponent = 0;
    if (x < 0x1p-1022) { /* subnormal */
        x *= 0x1p54;
        exponent = -54;
    }
    uint64_t bits = bits_of_double(x);
    exponent += (int)(bits >> 52) - 1023;
    double m = double_of_bits((bits & UINT64_C(0x000fffffffffffff)) | UINT64_C(0x3ff0000000000000));
    if (m >= 0x1.6a09e667f3bcdp0) {
        m *= 0.5;
        exponent++;
    }
    double numerator = m - 1.0; /* exact */
    struct pair denominator = m > 1.0 ? sum_pair(m, 1.0) : sum_pair(1.0, m);
    double s = numerator / denominator.high;
    double s_low = (__builtin_fma(-s, denominator.high, numerator) - s * denominator.low) / denominator.high;
    double z = s * s;
    double tail = 1.0 / 27.0;
    for (int k = 25; k >= 3; k -= 2)
        tail = __builtin_fma(tail, z, 1.0 / k);
    struct pair ln2 =
        sum_pair(exponent * 0x1.62e42fefa3800p-1, exponent * 0x1.ef35793c76730p-45); /* the first product is exact */
    double rest = 2.0 * s_low + 2.0 * s * (z * tail);
    struct pair result = exponent == 0 ? sum_pair(2.0 * s, 0.0) : sum_pair(ln2.high, 2.0 * s);
    return sum_pair(result.high, result.low + (ln2.low + rest));
}

/* e^(high + low): 2^n e^r, |r| <= 0.347, Taylor to degree 14. */
static double exp_pair(struct pair x)
{
    if (x.high > 710.0)
        return __builtin_inf();
    if (x.high < -746.0)
        return 0.0;
    double n = (x.high * 0x1.71547652b82fep0 + SHIFT64) - SHIFT64;
    double r = __builtin_fma(n, -0x1.62e42fefa3800p-1, x.high); /* exact */
    struct pair reduced = sum_pair(r, __builtin_fma(n, -0x1.ef35793c76730p-45, x.low));
    r = reduced.high;
    double p = 1.0 / 87178291200.0; /* 1/14! */
    static const double inverse_factorial[] = {1.0 / 6227020800.0, 1.0 / 479001600.0, 1.0 / 39916800.0, 1.0 / 3628800.0,
                                               1.0 / 362880.0,     1.0 / 40320.0,     1.0 / 5040.0,     1.0 / 720.0,
                                               1.0 / 120.0,        1.0 / 24.0,        1.0 / 6.0,        0.5};
    for (unsigned i = 0; i < sizeof inverse_factorial / sizeof inverse_factorial[0]; i++)
        p = __builtin_fma(p, r, inverse_factorial[i]);
    p = 1.0 + (r + (r * r * p + reduced.low));
    int power = (int)n, half = power >> 1;
    return p * double_of_bits((uint64_t)(half + 1023) << 52) * double_of_bits((uint64_t)(power - half + 1023) << 52);
}

double math_pow(double base, double exponent)
{
    if (!(base > 0.0) || base > 0x1.fffffffffffffp1023 || exponent != exponent)
        return __builtin_nan("");
    if (!(exponent < 0x1p60 && exponent > -0x1p60))
        return base == 1.0 ? 1.0 : (base > 1.0) == (exponent > 0.0) ? __builtin_inf() : 0.0;
    struct pair logarithm = log_pair(base);
    double high = exponent * logarithm.high;
    double low = __builtin_fma(exponent, logarithm.high, -high) + exponent * logarithm.low;
    return exp_pair((struct pair){high, low});
}

/* sin and cos of high + low, |high| <= 0.7854, by their Taylor polynomials; terms from the 19th power on are below
 * 2^-63. */
static double sin_reduced(double x, double low)
{
    static const double c[] = {1.0 / 355687428096000.0, -1.0 / 1307674368000.0, 1.0 / 6227020800.0, -1.0 / 39916800.0,
                               1.0 / 362880.0,          -1.0 / 5040.0,          1.0 / 120.0};
    double z = x * x, p = c[0];
    for (unsigned i = 1; i < sizeof c / sizeof c[0]; i++)
        p = __builtin_fma(p, z, c[i]);
    /* x - x^3/6 + x^5 p, with the first correction and low at the end so that x itself is added last. */
    double cube = x * z;
    return x + (__builtin_fma(cube, -1.0 / 6.0, low * __builtin_fma(z, -0.5, 1.0)) + cube * z * p);
}

static double cos_reduced(double x, double low)
{
    static const double c[] = {
        -1.0 / 6402373705728000.0, 1.0 / 20922789888000.0, -1.0 / 87178291200.0, 1.0 / 479001600.0,
        -1.0 / 3628800.0,          1.0 / 40320.0,          -1.0 / 720.0,         1.0 / 24.0};
    double z = x * x, p = c[0];
    for (unsigned i = 1; i < sizeof c / sizeof c[0]; i++)
        p = __builtin_fma(p, z, c[i]);
    double half = 0.5 * z, high = 1.0 - half;
    return high + (((1.0 - high) - half) + (z * z * p - x * low));
}

/* Reduction by multiples of pi/2, which stands here as three f64. x - n P1 is exact: both are multiples of 2^-53 (x is
 * not smaller than pi/4 where n is not 0) and the difference is below 1. n < 2^30, so the error of the whole is below
 * 2^-130. */
void math_sincos(double x, double *ret_sin, double *ret_cos)
{
    double n = (x * 0x1.45f306dc9c883p-1 + SHIFT64) - SHIFT64;
    double r = __builtin_fma(n, -0x1.921fb54442d18p0, x);
    double product = n * 0x1.1a62633145c07p-54;
    double product_low = __builtin_fma(n, 0x1.1a62633145c07p-54, -product);
    double high = r - product;
    double part = high - r; /* two-sum: what r - product lost */
    double lost = (r - (high - part)) - (product + part);
    double low = lost - product_low - n * -0x1.f1976b7ed8fbcp-110;
    double sum = high + low;
    low = low - (sum - high);
    double s = sin_reduced(sum, low), c = cos_reduced(sum, low);
    switch ((int64_t)n & 3) {
    case 0: *ret_sin = s, *ret_cos = c; break;
    case 1: *ret_sin = c, *ret_cos = -s; break;
    case 2: *ret_sin = -s, *ret_cos = -c; break;
    default: *ret_sin = -c, *ret_cos = s; break;
    }
}
