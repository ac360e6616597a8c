/* Errors of fine.h: what they are at most, and that they have no mean. */
#include "fine.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#define U 0x1p-24

static double errorAt(float x) { return (dkv_fineTanh(x) - tanh(x)) / tanh(x); }

static void tanh_is_as_good_as_stated(void **state) {
    (void)state;
    double worst = 0;
    for (uint32_t u = 0x2f800000u; u < 0x41400000u; u += 97) { /* 2^-32 to 12 */
        float x;
        memcpy(&x, &u, sizeof x);
        worst = fmax(worst, fabs(errorAt(x)));
        assert_true(dkv_fineTanh(-x) == -dkv_fineTanh(x));
    }
    print_message("tanh: %.3f u at most\n", worst / U);
    assert_true(worst <= DKV_FINE_TANH_ERROR && worst > DKV_FINE_TANH_ERROR / 2);
}

/* Of CUDA's tanhf it is up to 1.8. From 8 on the result is one of a few. */
static void tanh_has_no_mean_error(void **state) {
    (void)state;
    double worst = 0;
    for (double x = 0x1p-6; x < 8; x *= 1.05) {
        double sum = 0;
        for (int i = 0; i < 20000; i++) sum += errorAt((float)(x * (1 + i * (0.05 / 20000)))) / 20000;
        worst = fmax(worst, fabs(sum));
    }
    print_message("tanh: %.3f u on average at most\n", worst / U);
    assert_true(worst < 0.1 * U);
}

static void tanh_of_specials(void **state) {
    (void)state;
    assert_true(isnan(dkv_fineTanh(NAN)) && isnan(dkv_fineTanh(-NAN)));
    assert_true(dkv_fineTanh(INFINITY) == 1 && dkv_fineTanh(-INFINITY) == -1);
    assert_true(dkv_fineTanh(1e-42f) == 1e-42f && dkv_fineTanh(3e38f) == 1);
    assert_true(dkv_fineTanh(0.f) == 0 && dkv_fineTanh(-0.f) == 0);
}

static void factors_lose_nothing(void **state) {
    (void)state;
    const double scales[] = {1, 0.0883883461, 0.125, 0.2, 1e-4, 2e38, 1e-30, -0.7, 1 / DKV_LOG2E_EXACT};
    for (size_t i = 0; i < sizeof scales / sizeof *scales; i++) {
        double f = scales[i] * DKV_LOG2E_EXACT;
        float hi, rest;
        dkv_fineFactor(f, &hi, &rest);
        assert_true(rest * f > 0 && isfinite(hi) && fabs((hi + (double)rest) / f - 1) < 0x1p-45);
        float far = dkv_fineTimes(-INFINITY, hi, rest);
        assert_true(isinf(far) && (far < 0) == (f > 0) && dkv_fineTimes(0, hi, rest) == 0);
    }
    assert_true(fabs((DKV_LOG2E + (double)DKV_LOG2E_REST) / DKV_LOG2E_EXACT - 1) < 0x1p-50);
    const double ends[] = {3.4e38, 0x1p-149, 0x1p-126}; /* scales: its factor is past fp32; so is what is left of it */
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++) {
        float hi, rest;
        dkv_fineFactor(ends[i] * DKV_LOG2E_EXACT, &hi, &rest);
        assert_true(hi > 0 && isfinite(hi) && rest > 0 && dkv_fineTimes(-INFINITY, hi, rest) == -INFINITY);
    }
}

/* A factor rounded once has a mean error of up to 1 u, and so it has where the rest is added to a product already rounded. */
static void products_have_no_mean_error(void **state) {
    (void)state;
    const float scales[] = {0.2f, 0.0883883461f, 1e-4f, 0.125f};
    for (size_t s = 0; s < sizeof scales / sizeof *scales; s++) {
        float hi, rest;
        double f = scales[s] * DKV_LOG2E_EXACT, sum = 0;
        dkv_fineFactor(f, &hi, &rest);
        for (int i = 1; i <= 100000; i++) {
            float x = (float)-i * 0x1.fp-12f;
            sum += (dkv_fineTimes(x, hi, rest) / (x * f) - 1) / 100000;
        }
        assert_true(fabs(sum) < 0.02 * U);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tanh_is_as_good_as_stated), cmocka_unit_test(tanh_has_no_mean_error),
        cmocka_unit_test(tanh_of_specials),          cmocka_unit_test(factors_lose_nothing),
        cmocka_unit_test(products_have_no_mean_error),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
