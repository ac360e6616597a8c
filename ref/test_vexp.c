/* exp and tanh against quad precision over their whole range, in ulp; specials; tails and aliasing give
 * the same bits. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <math.h>
#include <quadmath.h>
#include <string.h>

#include "vexp.h"

#define N 4099 /* not a multiple of any vector */

static uint64_t state = 1;
static double uniform(void) { /* [0, 1) */
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (double)(state >> 11) * 0x1p-53;
}

/* Error in units of the spacing of doubles at the true value. */
static double ulps(double got, __float128 want) {
    int e;
    (void)frexpq(want, &e);
    e = e - 53 < -1074 ? -1074 : e - 53;
    return (double)fabsq(((__float128)got - want) / scalbnq(1, e));
}

typedef void (*vector)(const double *, double *, size_t);

static double worst(vector f, __float128 (*truth)(__float128), double lo, double hi, int rounds) {
    static double x[N], y[N];
    double most = 0;
    for (int k = 0; k < rounds; k++) {
        for (int i = 0; i < N; i++) x[i] = lo + (hi - lo) * uniform();
        f(x, y, N);
        for (int i = 0; i < N; i++) {
            double e = ulps(y[i], truth(x[i]));
            if (!(e <= most)) most = e;
        }
    }
    return most;
}

static void test_exp(void **s) {
    (void)s;
    const double range[][2] = {{-1, 1}, {-0.36, 0.36}, {-40, 0}, {-708, 709.78}, {-745.1, -708},
                               {-1e-9, 1e-9}, {-750, -744}, {709, 709.78271289338397}};
    for (size_t i = 0; i < sizeof range / sizeof *range; i++) {
        double e = worst(dkv_vexp, expq, range[i][0], range[i][1], 8);
        print_message("exp  [%g, %g]: %.3f ulp\n", range[i][0], range[i][1], e);
        assert_true(e <= DKV_VEXP_ULP);
    }
}

static void test_tanh(void **s) {
    (void)s;
    const double range[][2] = {{-1e-12, 1e-12}, {-0.2, 0.2}, {0.17, 0.53}, {-2, 2}, {-30, 30}, {18, 22}};
    for (size_t i = 0; i < sizeof range / sizeof *range; i++) {
        double e = worst(dkv_vtanh, tanhq, range[i][0], range[i][1], 8);
        print_message("tanh [%g, %g]: %.3f ulp\n", range[i][0], range[i][1], e);
        assert_true(e <= DKV_VTANH_ULP);
    }
}

static void test_specials(void **s) {
    (void)s;
    double x[] = {-INFINITY, INFINITY, NAN, -NAN, 0.0, -0.0, 710, 1e308, -1e308, -745.2, 5e-324, -5e-324,
                  709.782712893384, -745.13};
    double y[sizeof x / sizeof *x];
    dkv_vexp(x, y, sizeof x / sizeof *x);
    assert_true(y[0] == 0 && !signbit(y[0]));
    assert_true(y[1] == INFINITY && y[6] == INFINITY && y[7] == INFINITY);
    assert_true(isnan(y[2]) && isnan(y[3]));
    assert_true(y[4] == 1 && y[5] == 1 && y[10] == 1 && y[11] == 1);
    assert_true(y[8] == 0 && y[9] == 0);
    assert_true(isfinite(y[12]));
    assert_true(y[13] == 5e-324);
    dkv_vtanh(x, y, sizeof x / sizeof *x);
    assert_true(y[0] == -1 && y[1] == 1 && isnan(y[2]) && isnan(y[3]));
    assert_true(y[4] == 0 && !signbit(y[4]) && y[5] == 0 && signbit(y[5]));
    assert_true(y[6] == 1 && y[8] == -1 && y[10] == 5e-324);
}

static void test_bits(void **s) {
    (void)s;
    static double x[N], y[N], z[N];
    for (int i = 0; i < N; i++) x[i] = -800 + 1600 * uniform();
    dkv_vexp(x, y, N);
    for (int i = 0; i < N; i++) dkv_vexp(x + i, z + i, 1); /* the scalar tail */
    assert_memory_equal(y, z, sizeof y);
    for (int i = 0; i < N; i++) z[i] = x[i] - 3.7;
    dkv_vexp(z, z, N);
    dkv_vexpShift(x, 3.7, y, N);
    assert_memory_equal(y, z, sizeof y);
    dkv_vtanh(x, y, N);
    for (int i = 0; i < N; i++) dkv_vtanh(x + i, z + i, 1);
    assert_memory_equal(y, z, sizeof y);
}

/* The same bits on every machine: a digest of results over the range, as first computed. */
static void test_digest(void **s) {
    (void)s;
    static double x[N], y[N];
    uint64_t hash = 14695981039346656037u;
    state = 7;
    for (int i = 0; i < N; i++) x[i] = -746 + 1456 * uniform();
    dkv_vexp(x, y, N);
    for (int i = 0; i < N; i++) {
        uint64_t u;
        memcpy(&u, y + i, sizeof u);
        hash = (hash ^ u) * 1099511628211u;
    }
    print_message("digest %016llx\n", (unsigned long long)hash);
    assert_true(hash == 0x2cff42a097509582u);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_exp), cmocka_unit_test(test_tanh),
                                       cmocka_unit_test(test_specials), cmocka_unit_test(test_bits),
                                       cmocka_unit_test(test_digest)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
