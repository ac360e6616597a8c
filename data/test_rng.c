#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "rng.h"

/* Bits, so that a change of any operation shows; they hold on every machine. */
static void test_golden(void **state) {
    (void)state;
    static const struct {
        uint64_t seed, index;
        uint32_t stream, sub;
        double want;
    } golden[] = {
        {1, 0, DKV_STREAM_Q, 0, -0x1.520485c4eec2ap-3},
        {1, 1, DKV_STREAM_Q, 0, 0x1.5695da4efad08p+1},
        {1, 2, DKV_STREAM_K, 0, 0x1.9fa8fbcadd6bdp+0},
        {7, 1000003, DKV_STREAM_V, 0, -0x1.4ed076ae387eep+0},
        {~0ull, 1ull << 40, DKV_STREAM_DO, 5, 0x1.34d8809e06e34p+1},
    };
    for (size_t i = 0; i < sizeof golden / sizeof *golden; i++) {
        double x = dkv_normal(golden[i].seed, golden[i].stream, golden[i].sub, golden[i].index);
        if (!(x == golden[i].want)) fail_msg("%zu: %a", i, x);
    }
}

static void test_known_answer(void **state) {
    (void)state;
    /* Random123's published vector: counter and key all zero. */
    dkv_words w = dkv_drawWords(0, 0, 0, 0);
    assert_int_equal(w.v[0], 0x6627e8d5);
    assert_int_equal(w.v[1], 0xe169c58d);
    assert_int_equal(w.v[2], 0xbc57ac4c);
    assert_int_equal(w.v[3], 0x9b00dbd8);
}

static void test_functions(void **state) {
    (void)state;
    double worst_log = 0, worst_circle = 0;
    for (uint32_t i = 0; i < 200000; i++) {
        uint32_t w = i < 8 ? i : i < 16 ? ~0u - (i - 8) : i * 2654435761u;
        double u = dkv_uniform(w), want = -2 * log(u), c, s;
        double err = fabs(dkv_minusTwoLog(u) - want) / want;
        if (err > worst_log) worst_log = err;
        dkv_circle(w, &c, &s);
        long double a = (long double)w * 0x1p-32L * 6.283185307179586476925L;
        err = fmax(fabs((double)(c - cosl(a))), fabs((double)(s - sinl(a))));
        if (err > worst_circle) worst_circle = err;
    }
    assert_true(worst_log < 2e-15);
    assert_true(worst_circle < 3e-16);
}

static void test_order_and_moments(void **state) {
    (void)state;
    enum { N = 400000 };
    static double x[N];
    dkv_fillNormals(3, DKV_STREAM_K, 0, 0, N, x);
    double m[5] = {0}, lag = 0;
    int inside = 0;
    for (int i = 0; i < N; i++) {
        for (int k = 1; k <= 4; k++) m[k] += pow(x[i], k) / N;
        if (i) lag += x[i] * x[i - 1] / N;
        inside += fabs(x[i]) < 1;
    }
    /* within 5 standard errors: sqrt(1, 2, 15, 96)/sqrt(N) */
    assert_true(fabs(m[1]) < 5 / sqrt(N));
    assert_true(fabs(m[2] - 1) < 5 * sqrt(2. / N));
    assert_true(fabs(m[3]) < 5 * sqrt(15. / N));
    assert_true(fabs(m[4] - 3) < 5 * sqrt(96. / N));
    assert_true(fabs(lag) < 5 / sqrt(N));
    assert_true(fabs(inside / (double)N - 0.6826894921) < 5 * sqrt(0.217 / N));
    for (int i = N - 1; i >= 0; i -= 997) assert_true(dkv_normal(3, DKV_STREAM_K, 0, (uint64_t)i) == x[i]);
    double part[10];
    for (uint64_t start = 0; start < 9; start++) {
        dkv_fillNormals(3, DKV_STREAM_K, 0, start, 10, part);
        for (int i = 0; i < 10; i++) assert_true(part[i] == x[start + (uint64_t)i]);
    }
    int same = 0;
    for (uint64_t i = 0; i < 1000; i++)
        same += dkv_normal(3, DKV_STREAM_V, 0, i) == x[i] || dkv_normal(4, DKV_STREAM_K, 0, i) == x[i] ||
                dkv_normal(3, DKV_STREAM_K, 1, i) == x[i];
    assert_int_equal(same, 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_known_answer),
        cmocka_unit_test(test_golden),
        cmocka_unit_test(test_functions),
        cmocka_unit_test(test_order_and_moments),
    };
    return cmocka_run_group_tests_name("rng", tests, NULL, NULL);
}
