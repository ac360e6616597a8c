/* The bound: the emulated kernel stays below it, a direct evaluation of the formulas gives it, it grows with
 * every declared error, and faults stand far above it. test_bound_search.c pushes kernels towards it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <math.h>

#include "bound_case.inc"
#include "small_problems.h"

/* Every shape and mask, modifiers and dtypes taken in turn, both accumulators and orders. */
static void test_emu_below(void **state) {
    (void)state;
    static const char *const modifier[] = {"",          " softcap=2",
                                           " alibi=on", " sinklogit=1",
                                           " dlse=on",  " softcap=20 alibi=on sinklogit=-2 dlse=on"};
    static const char *const dims[] = {"dim=16", "dim=1", "dim=8:3", "dim=24"},
                             *heads[] = {"1:1", "4:2", "3:1"};
    static const char *const options[] = {"bm=16,bn=16", "bm=3,bn=5", "bm=16,bn=16,acc=tc",
                                          "bm=32,bn=8,order=down"};
    static const double hot[] = {1, 8, 0.01};
    int i = 0;
    for (size_t s = 0; s < DKV_COUNT(dkv_small_shapes); s++)
        for (size_t m = 0; dkv_smallMask(m); m++, i++) {
            char line[300];
            int type = i % 3, option = i / 3 % 4;
            if (type == 2 && option == 2) option = 0;
            snprintf(line, sizeof line, "shape=%s mask=%s heads=%s %s dtype=%s seed=%d%s",
                     dkv_small_shapes[s], dkv_smallMask(m), heads[i % 3], dims[i / 2 % 4],
                     dkv_dtypeName((dualkv_dtype)type), i, modifier[i % 6]);
            bound_case c;
            if (!open_case(line, &c)) continue;
            scale_array(c.in.q, c.p.dtype, c.n_q, hot[i / 5 % 3]);
            run_emu(&c, options[option]);
            run_bound(&c);
            for (int id = 0; id < DKV_N_OUTPUTS; id++) {
                double ratio = worst_ratio(&c, (dkv_tensor_id)id, NULL);
                if (!(ratio <= 1))
                    fail_msg("%s %s: %s at %g of its bound", line, options[option], dkv_tensorName(id),
                             ratio);
            }
            close_case(&c);
        }
    assert_true(i > 300);
}

static double sum_bound(const bound_case *c, dkv_tensor_id id) {
    const double *b = dkv_outputAt(&c->oracle.bound, id);
    double sum = 0;
    for (int64_t i = 0; i < c->n[id]; i++) sum += b[i];
    return sum;
}

static void check_grows(const bound_case *c, const double before[DKV_N_OUTPUTS], const char *what) {
    int more = 0;
    for (int id = 0; id < DKV_N_OUTPUTS; id++) {
        double now = sum_bound(c, (dkv_tensor_id)id);
        if (now < before[id]) fail_msg("%s: the bound of %s shrinks", what, dkv_tensorName(id));
        more += now > before[id];
    }
    if (!more) fail_msg("%s: no bound grows", what);
}

/* More declared error, larger bound, whichever the error. */
static void test_monotonic(void **state) {
    (void)state;
    bound_case c;
    assert_true(open_case("shape=70+2x40 heads=2:1 dim=16 dtype=bf16 softcap=3 sinklogit=0 seed=3", &c));
    run_emu(&c, "bm=16,bn=16");
    const dualkv_arithmetic base = c.a;
    double before[DKV_N_OUTPUTS];
    run_bound(&c);
    for (int id = 0; id < DKV_N_OUTPUTS; id++) before[id] = sum_bound(&c, (dkv_tensor_id)id);
#define GROWS(change)                                                                                        \
    do {                                                                                                     \
        c.a = base;                                                                                          \
        c.a.change;                                                                                          \
        run_bound(&c);                                                                                       \
        check_grows(&c, before, #change);                                                                    \
    } while (0)
    GROWS(unit *= 2);
    GROWS(acc_unit *= 2);
    GROWS(in_format = DUALKV_BF16);
    GROWS(s_format = DUALKV_BF16);
    GROWS(partial_format = DUALKV_BF16);
    GROWS(p_normalised = 1);
    GROWS(exp_error *= 2);
    GROWS(log_error *= 16);
    GROWS(tanh_error *= 16);
    GROWS(key_tile = 0);
    GROWS(max_slack = 5);
#undef GROWS
    scale_array(c.in.v, c.p.dtype, c.n_v, 0x1p-122); /* flushing shows where results are near underflow */
    c.a = base;
    run_bound(&c);
    const double kept = sum_bound(&c, DKV_O);
    c.a.flushes = 1;
    run_bound(&c);
    assert_true(sum_bound(&c, DKV_O) > 1.01 * kept);
    scale_array(c.in.v, c.p.dtype, c.n_v, 0x1p122);
    /* and less error, a smaller bound: the same with the roles exchanged */
    double now[DKV_N_OUTPUTS];
    c.a = base;
    c.a.p_format = c.a.ds_format = DUALKV_EXACT;
    run_bound(&c);
    for (int id = 0; id < DKV_N_OUTPUTS; id++) now[id] = sum_bound(&c, (dkv_tensor_id)id);
    assert_true(now[DKV_O] < before[DKV_O] && now[DKV_DQ] < before[DKV_DQ] && now[DKV_DV] < before[DKV_DV]);
    assert_true(now[DKV_LSE] == before[DKV_LSE]);
    c.a = base;
    c.a.delta_exact = 1;
    run_bound(&c);
    assert_true(sum_bound(&c, DKV_DQ) < before[DKV_DQ] && sum_bound(&c, DKV_DV) == before[DKV_DV]);
    close_case(&c);
}

/* Folding a long truncating chain keeps dK and dV of prompt keys near the truth. */
static void test_fold(void **state) {
    (void)state;
    bound_case c;
    assert_true(open_case("shape=3+40x50 heads=2:1 dim=16 dtype=fp16 seed=5", &c));
    run_emu(&c, "bm=16,bn=16,acc=tc");
    c.a.p_format = c.a.ds_format = c.a.out_format = DUALKV_EXACT;
    run_bound(&c);
    double whole = sum_bound(&c, DKV_DV), dq = sum_bound(&c, DKV_DQ);
    c.a.acc_fold_dkv = 8;
    run_bound(&c);
    assert_true(sum_bound(&c, DKV_DV) < 0.5 * whole);
    assert_true(sum_bound(&c, DKV_DQ) == dq);
    assert_true(dkv_chainError(&c.a, 1600) > 99 * c.a.acc_unit);
    c.a.acc_fold = 10;
    assert_true(dkv_chainError(&c.a, 1600) < 10 * c.a.acc_unit + 11 * c.a.unit);
    close_case(&c);
}

/* Rows without keys have no error to make: O, dQ 0, LSE -inf, and keys that no row sees likewise. */
static void test_no_key(void **state) {
    (void)state;
    bound_case c;
    assert_true(open_case("shape=9+2x6 heads=2:1 dim=8 dtype=bf16 mask=block:2:0:1 seed=2", &c));
    run_emu(&c, "bm=16,bn=16");
    run_bound(&c);
    for (int id = 0; id < DKV_DSINK; id++) {
        const double *b = dkv_outputAt(&c.oracle.bound, (dkv_tensor_id)id);
        for (int64_t i = 0; i < c.n[id]; i++) assert_true(b[i] == 0);
    }
    for (int64_t i = 0; i < c.n[DKV_LSE]; i++) assert_true(c.oracle.truth.lse[i] == -(double)INFINITY);
    close_case(&c);
}

static bool same_bound(const bound_case *x, const bound_case *y) {
    for (int id = 0; id < DKV_N_OUTPUTS; id++)
        if (x->n[id] &&
            memcmp(dkv_outputAt(&x->oracle.bound, (dkv_tensor_id)id),
                   dkv_outputAt(&y->oracle.bound, (dkv_tensor_id)id), (size_t)x->n[id] * sizeof(double)))
            return false;
    return true;
}

/* The truth that comes with the bound is the blocked reference's, bit for bit, NaN and infinities included. */
static void test_truth(void **state) {
    (void)state;
    static const char *const lines[] = {
        "shape=300+2x(90+2x20) heads=4:2 dim=16 dtype=bf16 seed=3",
        "shape=170+3x60 heads=2:1 dim=24:8 dtype=fp32 mask=window:40:3 softcap=2 alibi=on sinklogit=0.5 seed=4",
        "shape=70+2x40 heads=3:1 dim=8 dtype=fp16 mask=block:16:0.1:7 softcap=1 sinklogit=-2 seed=5",
        "shape=90+2x30 heads=1:1 dim=8 dtype=bf16 grad=off seed=6"};
    for (int e = 0; e < 8; e++) {
        bound_case c;
        assert_true(open_case(lines[e / 2], &c));
        if (e % 2) { /* an infinite key, a NaN in Q and one in V */
            const double bad[] = {INFINITY, NAN};
            const size_t size = dkv_dtypeSize(c.p.dtype);
            dkv_encodeArray(&bad[0], c.p.dtype, 1, (char *)c.in.k + size * (size_t)(c.n_k / 3));
            dkv_encodeArray(&bad[1], c.p.dtype, 1, (char *)c.in.q + size * (size_t)(c.n_q - 1));
            dkv_encodeArray(&bad[1], c.p.dtype, 1, (char *)c.in.v + size * (size_t)(c.n_v - 1));
        }
        c.a = profile_of(&c, 0);
        c.threads = 3;
        run_bound(&c);
        dkv_ref_options one = {.threads = 1};
        dkv_err err = {0};
        assert_int_equal(dkv_refBlocked(&c.p, &c.l, &c.in, &one, &c.got, &err), DKV_OK);
        for (int id = 0; id < DKV_N_OUTPUTS; id++) {
            const double *x = dkv_outputAt(&c.oracle.truth, (dkv_tensor_id)id);
            const double *y = dkv_outputAt(&c.got, (dkv_tensor_id)id);
            for (int64_t i = 0; i < c.n[id]; i++)
                if (x[i] != y[i] && !(isnan(x[i]) && isnan(y[i])))
                    fail_msg("%s %d: %s[%lld] is %a, the blocked reference says %a", lines[e / 2], e % 2,
                             dkv_tensorName((dkv_tensor_id)id), (long long)i, x[i], y[i]);
        }
        close_case(&c);
    }
}

static void test_threads(void **state) {
    (void)state;
    const char *line = "shape=400+3x300 heads=4:2 dim=24 dtype=bf16 sinklogit=1 seed=9";
    bound_case x, y;
    assert_true(open_case(line, &x) && open_case(line, &y));
    x.a = y.a = profile_of(&x, 1);
    x.threads = 1;
    y.threads = 5;
    run_bound(&x);
    run_bound(&y);
    assert_true(same_bound(&x, &y));
    close_case(&x);
    close_case(&y);
}

/* NaN in one response: its own elements have no bound, a sibling's have the bound that they had without. */
static void test_nonfinite(void **state) {
    (void)state;
    const char *line = "shape=20+2x30 heads=1:1 dim=8 dtype=bf16 seed=4";
    bound_case x, y;
    assert_true(open_case(line, &x) && open_case(line, &y));
    x.a = y.a = profile_of(&x, 1);
    for (int c = 0; c < 8; c++) {
        ((uint16_t *)y.in.k)[20 * 8 + c] = 0x7fc0; /* first token of the first response */
        ((uint16_t *)y.in.v)[20 * 8 + c] = 0x7fc0;
    }
    run_bound(&x);
    run_bound(&y);
    for (int64_t t = 0; t < 80; t++) {
        bool touched = t >= 20 && t < 50;
        for (int c = 0; c < 8; c++) {
            const double a = x.oracle.bound.o[t * 8 + c], b = y.oracle.bound.o[t * 8 + c];
            if (touched)
                assert_true(isnan(b));
            else
                assert_true(a == b && isfinite(a));
            assert_true(isnan(y.oracle.bound.dk[t * 8 + c]) == (t < 50));
            assert_true(isnan(y.oracle.bound.dq[t * 8 + c]) == touched);
        }
    }
    close_case(&x);
    close_case(&y);
}

/* A masked pair may carry what is not finite through its own branch, where nothing is claimed, and no
 * further. */
static void test_unclaimed(void **state) {
    (void)state;
    bound_case c;
    assert_true(open_case("shape=20+2x30 heads=1:1 dim=8 dtype=bf16 mask=chunk:5 seed=4", &c));
    c.a = profile_of(&c, 1);
    ((uint16_t *)c.in.v)[(20 + 12) * 8] = 0x7fc0; /* token 12 of the first response: chunk 30..34 of 50 */
    run_bound(&c);
    for (int64_t t = 0; t < 80; t++) {
        const double *b = &c.oracle.bound.o[t * 8], *k = &c.oracle.bound.dk[t * 8];
        const bool own = t >= 20 && t < 50, sees = t >= 32 && t < 35;
        assert_true(isnan(b[0]) == sees);
        assert_true((b[1] == DKV_UNCLAIMED) == own && isfinite(c.oracle.truth.o[t * 8 + 1]));
        assert_true(isnan(k[1]) || (k[1] == DKV_UNCLAIMED) == (t < 50));
        assert_true(c.oracle.bound.lse[t] > 0);
    }
    close_case(&c);
}

/* Inputs beyond fp32's safe range take the fp64 way: scaling V and dO by a power of two scales the bound. */
static void test_scaling(void **state) {
    (void)state;
    const char *line = "shape=40+2x30 heads=2:1 dim=16 dtype=fp32 seed=6";
    bound_case x, y;
    assert_true(open_case(line, &x) && open_case(line, &y));
    x.a = y.a = profile_of(&x, 0);
    scale_array(y.in.v, DUALKV_FP32, y.n_v, 0x1p60);
    run_bound(&x);
    run_bound(&y);
    for (int64_t i = 0; i < x.n[DKV_O]; i++) {
        double a = x.oracle.bound.o[i], b = y.oracle.bound.o[i] * 0x1p-60;
        assert_true(a >= b * (1 - 1e-9) && a <= b * 1.001); /* the fp32 way adds its own error */
    }
    for (int64_t i = 0; i < x.n[DKV_DK]; i++) {
        double a = x.oracle.bound.dk[i], b = y.oracle.bound.dk[i] * 0x1p-60;
        assert_true(a >= b * (1 - 1e-9) && a <= b * 1.001);
    }
    close_case(&x);
    close_case(&y);
}

/* Power: LSE off by 1 %, one key of 512 lost, stand far above the bound. */
static void test_power(void **state) {
    (void)state;
    bound_case c;
    assert_true(open_case("shape=512+2x64 heads=2:1 dim=64 dtype=bf16 seed=8", &c));
    run_emu(&c, "bm=64,bn=64");
    run_bound(&c);
    const int64_t last = 511;
    const double l = c.oracle.truth.lse[last], b = c.oracle.bound.lse[last];
    assert_true(0.01 * fabs(l) > 100 * b);
    assert_true(1.0 / 512 > 20 * b);
    double ratio = worst_ratio(&c, DKV_LSE, NULL);
    assert_true(ratio <= 1);
    close_case(&c);
}

static void test_arithmetic(void **state) {
    (void)state;
    bound_case c;
    dkv_err err;
    char words[300], last[300] = "";
    double before[DKV_N_OUTPUTS] = {0}, now[DKV_N_OUTPUTS];
    assert_true(open_case("shape=40+2x30 heads=2:1 dim=16 dtype=fp16 seed=6", &c));
    int i = 0;
    for (dualkv_arithmetic a; dkv_arithmeticProfile(i, &c.p, &a, NULL); i++) {
        assert_int_equal(dkv_checkArithmetic(&a, &err), 0);
        dkv_describeArithmetic(&a, words, sizeof words);
        assert_true(strlen(words) > 20 && strcmp(words, last) != 0);
        snprintf(last, sizeof last, "%s", words);
        c.a = a;
        run_bound(&c);
        for (int id = 0; id < DKV_N_OUTPUTS; id++) now[id] = sum_bound(&c, (dkv_tensor_id)id);
        if (i == 0) memcpy(before, now, sizeof before);
        assert_true(now[DKV_O] >= before[DKV_O] && now[DKV_DQ] >= before[DKV_DQ] &&
                    now[DKV_DV] >= before[DKV_DV]);
    }
    assert_int_equal(i, 12);
    dkv_describeArithmetic(&c.a, words, 10); /* cut, not overrun */
    assert_true(strlen(words) == 9);
    const dualkv_arithmetic good = c.a;
#define REFUSED(change)                                                                                      \
    do {                                                                                                     \
        dualkv_arithmetic bad = good;                                                                        \
        bad.change;                                                                                          \
        assert_int_equal(dkv_checkArithmetic(&bad, &err), DKV_EUSER);                                        \
        assert_true(strlen(err.text) > 10);                                                                  \
    } while (0)
    REFUSED(unit = 0);
    REFUSED(unit = NAN);
    REFUSED(acc_unit = 0.1);
    REFUSED(acc_step = 0);
    REFUSED(ds_scaled = 2);
    REFUSED(acc_gain = 1);
    REFUSED(acc_fold = -1);
    REFUSED(p_format = 9);
    REFUSED(ds_format = -2);
    REFUSED(out_format = DUALKV_TF32);
    REFUSED(key_tile = -1);
    REFUSED(exp_error = INFINITY);
    REFUSED(exp_error = 0x1p-9);
    REFUSED(flushes = 2);
    REFUSED(max_slack = -1);
    REFUSED(sink_first = -1);
#undef REFUSED
    close_case(&c);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_emu_below),  cmocka_unit_test(test_monotonic), cmocka_unit_test(test_fold),
        cmocka_unit_test(test_no_key),     cmocka_unit_test(test_threads),   cmocka_unit_test(test_nonfinite),
        cmocka_unit_test(test_truth),
        cmocka_unit_test(test_unclaimed),  cmocka_unit_test(test_scaling),   cmocka_unit_test(test_power),
        cmocka_unit_test(test_arithmetic),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
