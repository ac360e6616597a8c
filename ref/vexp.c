/* vexp.c: exp(x) = 2^n exp(r), n = round(x / ln 2), r = x - n ln 2, |r| <= 0.3466.
 *
 * Plain loops that the compiler vectorises, cloned for AVX-512 and AVX2; every operation is an IEEE add,
 * subtract, multiply, divide or bit operation, so that each clone and the scalar tail give the same bits.
 *
 * Error of exp, in ulp of a result just below 1 (the worst place, 2^-53): the last addition 0.5; r, below
 * 0.35, is known to 0.25 and meets a factor below 1; r + tail, below 0.3, rounds by 0.25; tail, below
 * 0.07, by 0.1; the polynomial (Chebyshev interpolation of degree 11, computed in 60 digits) 0.12. The
 * product by the second power of two rounds only a subnormal result, by half a quantum beside what the
 * rest has shrunk to. */
#include "vexp.h"
#include "clones.h"

#include <stdint.h>

#define LOG2E 0x1.71547652b82fep+0
#define LN2_HI 0x1.62e42fee00000p-1 /* 32 bits: n * LN2_HI is exact */
#define LN2_LO 0x1.a39ef35793c76p-33
#define MAGIC 0x1.8p52 /* adding and subtracting it rounds to an integer, which then lies in the low bits */

typedef union bits { double f; uint64_t u; } bits;

static inline double pow2(double n) { /* n an integer, -1022..1023 */
    bits b = {.f = n + (MAGIC + 1023.0)};
    b.u <<= 52;
    return b.f;
}

/* exp(r) - 1 - r */
static inline double tail(double r) {
    double r2 = r * r, r4 = r2 * r2;
    double a = 0x1.0000000000001p-1 + r * 0x1.5555555555556p-3;
    double b = 0x1.5555555553d64p-5 + r * 0x1.11111111109b4p-7;
    double c = 0x1.6c16c1788b646p-10 + r * 0x1.a01a01a7c3d59p-13;
    double d = 0x1.a019b90eefe8ep-16 + r * 0x1.71de0daf7a6ccp-19;
    double e = 0x1.2891834686c7ep-22 + r * 0x1.af38a71a18cb9p-26;
    return r2 * ((a + r2 * b) + r4 * ((c + r2 * d) + r4 * e));
}

/* The power of two in two factors, so that results down to 2^-1074 and up to the largest are reached. */
static inline double expOf(double x) {
    x = x > 710.0 ? 710.0 : x; /* infinity, and 0 below: past every rounding */
    x = x < -746.0 ? -746.0 : x;
    double n = (x * LOG2E + MAGIC) - MAGIC;
    double r = (x - n * LN2_HI) - n * LN2_LO;
    double half = (n * 0.5 + MAGIC) - MAGIC;
    return (1.0 + (r + tail(r))) * pow2(half) * pow2(n - half);
}

DKV_CLONES void dkv_vexp(const double *x, double *y, size_t n) {
    for (size_t i = 0; i < n; i++) y[i] = expOf(x[i]);
}

DKV_CLONES void dkv_vexpShift(const double *x, double shift, double *y, size_t n) {
    for (size_t i = 0; i < n; i++) y[i] = expOf(x[i] - shift);
}

/* tanh(x) = m / (m + 2), m = exp(2|x|) - 1 = 2^n (exp(r) - 1) + (2^n - 1): no cancellation, since 2^n - 1
 * >= 1 unless n = 0. From 20 on the result is 1. */
DKV_CLONES void dkv_vtanh(const double *x, double *y, size_t n) {
    for (size_t i = 0; i < n; i++) {
        bits a = {.f = x[i]};
        uint64_t sign = a.u & 0x8000000000000000u;
        a.u ^= sign;
        double z = a.f > 20.0 ? 40.0 : 2.0 * a.f;
        double k = (z * LOG2E + MAGIC) - MAGIC;
        double r = (z - k * LN2_HI) - k * LN2_LO;
        double p = pow2(k), m = p * (r + tail(r)) + (p - 1.0);
        a.f = m / (m + 2.0);
        a.u |= sign;
        y[i] = a.f;
    }
}
