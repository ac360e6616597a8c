/* dtype.c against a slow definition: the nearest of all values of the format, found by search in a sorted
 * table. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <float.h>
#include <stdlib.h>

#include "dtype.h"

static uint64_t rng = 88172645463325252ull;
static uint64_t randomBits(void) {
    rng ^= rng << 13;
    rng ^= rng >> 7;
    rng ^= rng << 17;
    return rng;
}

static double fromBits(uint64_t u) {
    double x;
    memcpy(&x, &u, sizeof x);
    return x;
}

static int sameBits(double a, double b) { return !memcmp(&a, &b, sizeof a) || (a != a && b != b); }

/* Value of a non-negative 16-bit pattern, field by field. The pattern after the largest finite one stands for
 * the next power of two: whatever rounds there is infinite. */
static double slowDecode(unsigned h, dualkv_dtype t) {
    int p = t == DUALKV_FP16 ? 10 : 7, bias = t == DUALKV_FP16 ? 15 : 127;
    int e = (int)(h >> p), m = (int)(h & ((1u << p) - 1));
    return e ? ldexp(m + (1 << p), e - bias - p) : ldexp(m, 1 - bias - p);
}

static unsigned infinityBits(dualkv_dtype t) { return t == DUALKV_FP16 ? 0x7c00 : 0x7f80; }

/* Nearest non-negative pattern for a >= 0, ties to the even pattern. */
static unsigned slowEncode(double a, dualkv_dtype t) {
    unsigned lo = 0, hi = infinityBits(t);
    if (a >= slowDecode(hi, t)) return hi;
    while (hi - lo > 1) {
        unsigned mid = (lo + hi) / 2;
        if (slowDecode(mid, t) <= a)
            lo = mid;
        else
            hi = mid;
    }
    __float128 below = (__float128)a - slowDecode(lo, t), above = (__float128)slowDecode(hi, t) - a;
    if (below == above) return lo & 1 ? hi : lo;
    return below < above ? lo : hi;
}

static void checkOne(double x, dualkv_dtype t) {
    double a = fabs(x);
    unsigned want = slowEncode(a, t);
    uint16_t got = dkv_encode16(x, t), array;
    if (got != (want | (signbit(x) ? 0x8000u : 0u))) fail_msg("encode(%a) = %04x, want %04x", x, got, want);
    dkv_encodeArray(&x, t, 1, &array);
    assert_int_equal(array, got);
    double value = want == infinityBits(t) ? (double)INFINITY : slowDecode(want, t);
    if (!sameBits(dkv_roundTo(x, t), copysign(value, x))) fail_msg("round(%a) = %a", x, dkv_roundTo(x, t));
}

static void all_patterns_round_trip(void **state) {
    (void)state;
    for (int t = DUALKV_BF16; t <= DUALKV_FP16; t++) {
        static uint16_t in[65536], back[65536];
        static double x[65536];
        unsigned inf = infinityBits((dualkv_dtype)t);
        for (int i = 0; i < 65536; i++) in[i] = (uint16_t)i;
        dkv_decodeArray(in, (dualkv_dtype)t, 65536, x);
        dkv_encodeArray(x, (dualkv_dtype)t, 65536, back);
        for (unsigned i = 0; i < 65536; i++) {
            unsigned h = i & 0x7fffu;
            assert_true(sameBits(x[i], dkv_decode16((uint16_t)i, (dualkv_dtype)t)));
            if (h > inf) { /* NaN: stays NaN, quiet, sign kept */
                uint64_t u;
                memcpy(&u, &x[i], sizeof u);
                assert_true(x[i] != x[i] && (u >> 51 & 1) && u >> 63 == i >> 15);
                assert_int_equal(back[i], i | (t == DUALKV_FP16 ? 0x200u : 0x40u));
                continue;
            }
            assert_int_equal(back[i], i);
            double want = h == inf ? (double)INFINITY : slowDecode(h, (dualkv_dtype)t);
            assert_true(sameBits(x[i], i & 0x8000u ? -want : want));
            assert_true(sameBits(dkv_roundTo(x[i], t), x[i]));
        }
    }
}

static void midpoints_and_neighbours(void **state) {
    (void)state;
    for (int t = DUALKV_BF16; t <= DUALKV_FP16; t++)
        for (unsigned h = 0; h < infinityBits((dualkv_dtype)t); h++) {
            double lo = slowDecode(h, (dualkv_dtype)t), hi = slowDecode(h + 1, (dualkv_dtype)t),
                   mid = (lo + hi) / 2;
            const double x[] = {lo, mid, nextafter(mid, 0), nextafter(mid, INFINITY), nextafter(hi, 0), -mid};
            for (size_t i = 0; i < sizeof x / sizeof *x; i++) checkOne(x[i], (dualkv_dtype)t);
        }
}

static void random_doubles(void **state) {
    (void)state;
    for (int i = 0; i < 300000; i++) {
        uint64_t u = randomBits();
        double any = fromBits(u),
               near = ldexp((double)(u >> 11) * 0x1p-53 + 0.5, (int)(randomBits() % 300) - 155);
        if (any == any && !isinf(any)) {
            checkOne(any, DUALKV_BF16);
            checkOne(any, DUALKV_FP16);
            assert_true(sameBits(dkv_roundTo(any, DUALKV_FP32), (float)any));
        }
        checkOne(near, DUALKV_BF16);
        checkOne(-near, DUALKV_FP16);
        assert_true(sameBits(dkv_roundTo(near, DUALKV_FP32), (float)near));
        /* a double on, or one place beside, a midpoint of float */
        float f = (float)near;
        double mid = (f + (double)nextafterf(f, INFINITY)) / 2;
        assert_true(sameBits(dkv_roundTo(mid, DUALKV_FP32), (float)mid));
        assert_true(sameBits(dkv_roundTo(nextafter(mid, 0), DUALKV_FP32), (float)nextafter(mid, 0)));
    }
}

/* Through fp32 this one would be rounded twice: 1 + 2^-8 + 2^-40 is above a bf16 midpoint, its float is on
 * it. */
static void one_rounding(void **state) {
    (void)state;
    assert_true(dkv_roundTo(1 + 0x1p-8 + 0x1p-40, DUALKV_BF16) == 1 + 0x1p-7);
    assert_true(dkv_roundTo(1 + 0x1p-11 + 0x1p-40, DUALKV_FP16) == 1 + 0x1p-10);
    assert_true(dkv_roundTo(1 + 0x1p-8, DUALKV_BF16) == 1);
}

static void specials(void **state) {
    (void)state;
    const double inf = (double)INFINITY, nan_ = (double)NAN;
    for (int t = DUALKV_EXACT; t <= DUALKV_FP32; t++) {
        double max = dkv_maxFinite(t);
        assert_true(dkv_roundTo(inf, t) == inf && dkv_roundTo(-inf, t) == -inf);
        assert_true(dkv_roundTo(nan_, t) != dkv_roundTo(nan_, t));
        assert_true(sameBits(dkv_roundTo(-0.0, t), -0.0));
        assert_true(dkv_roundTo(max, t) == max);
        if (t == DUALKV_EXACT) continue;
        double half = dkv_ulp(max, t) / 2, quantum = 2 * dkv_underflow(t);
        assert_true(isinf(dkv_roundTo(max + half, t)));
        assert_true(dkv_roundTo(nextafter(max + half, 0), t) == max);
        assert_true(isinf(dkv_roundTo(-DBL_MAX, t)));
        assert_true(dkv_roundTo(quantum, t) == quantum && dkv_roundTo(quantum / 2, t) == 0);
        assert_true(dkv_roundTo(nextafter(quantum / 2, 1), t) == quantum);
        assert_true(dkv_ulp(0, t) == quantum && dkv_ulp(quantum, t) == quantum);
        assert_true(dkv_ulp(1, t) == 2 * dkv_unitRoundoff(t));
        assert_true(dkv_ulp(inf, t) == dkv_ulp(max, t));
    }
    double exact = 1 + 0x1p-52;
    assert_true(dkv_roundTo(exact, DUALKV_EXACT) == exact &&
                dkv_roundTo(DBL_TRUE_MIN, DUALKV_EXACT) == DBL_TRUE_MIN);
    assert_true(dkv_ulp(1, DUALKV_EXACT) == 0x1p-52 && dkv_ulp(0, DUALKV_EXACT) == DBL_TRUE_MIN);
    assert_true(dkv_unitRoundoff(DUALKV_BF16) == 0x1p-8 && dkv_unitRoundoff(DUALKV_FP16) == 0x1p-11);
    assert_true(dkv_unitRoundoff(DUALKV_FP32) == 0x1p-24 && dkv_unitRoundoff(DUALKV_EXACT) == 0);
    assert_true(dkv_underflow(DUALKV_FP16) == 0x1p-25 && dkv_underflow(DUALKV_BF16) == 0x1p-134);
    assert_true(dkv_maxFinite(DUALKV_FP16) == 65504 && dkv_maxFinite(DUALKV_FP32) == (double)FLT_MAX);
}

static void arrays(void **state) {
    (void)state;
    enum { N = 1021 };
    double x[N], y[N];
    for (int t = DUALKV_EXACT; t <= DUALKV_FP32; t++) {
        for (int i = 0; i < N; i++) x[i] = y[i] = fromBits(randomBits());
        x[0] = y[0] = (double)NAN;
        dkv_roundArray(y, N, t);
        for (int i = 0; i < N; i++) {
            assert_true(sameBits(y[i], dkv_roundTo(x[i], t)));
            assert_true(sameBits(y[i], dkv_roundBy(dkv_makeRounder(t), x[i])));
        }
        if (t < 0) continue;
        uint32_t bits[N];
        double back[N];
        dkv_encodeArray(x, (dualkv_dtype)t, N, bits);
        dkv_decodeArray(bits, (dualkv_dtype)t, N, back);
        for (int i = 0; i < N; i++) assert_true(sameBits(back[i], y[i]));
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(all_patterns_round_trip),
        cmocka_unit_test(midpoints_and_neighbours),
        cmocka_unit_test(random_doubles),
        cmocka_unit_test(one_rounding),
        cmocka_unit_test(specials),
        cmocka_unit_test(arrays),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
