#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "../data/fill.h"
#include "../ref/twin_trial.inc"
#include "judge.h"

#define LEVEL 1e-9

/* An oracle made up: truth and twin normal, sigma about 2^-20, bound 20 sigma; got = twin + sigma e. */
static void makeUp(trial *t, double size) {
    dkv_err err = {0};
    int64_t n[DKV_N_OUTPUTS];
    uint64_t x = 3;
    memset(t, 0, sizeof *t);
    if (dkv_parseProblem("shape=100+4x50 heads=4:2 dim=16 dtype=fp32 sinklogit=0", NULL, &t->p, &err) ||
        dkv_makeLayout(&t->p, &t->l, &err) || dkv_allocOracle(&t->l, &t->o, &err) ||
        dkv_allocOutputs(&t->l, &t->got, &err))
        fail_msg("%s", err.text);
    dkv_countOutputs(&t->l, n);
    t->a = (dualkv_arithmetic){.size = sizeof t->a,
                               .declared = 1,
                               .unit = 0x1p-24,
                               .acc_unit = 0x1p-24,
                               .acc_step = 1,
                               .out_format = DUALKV_FP32,
                               .key_tile = 64};
    for (int id = 0; id < DKV_N_OUTPUTS; id++) {
        t->o.has_twin[id] = true;
        for (int64_t i = 0; i < n[id]; i++) {
            double v = normal(&x), s = 0x1p-20 * (0.5 + uniform(&x));
            dkv_outputAt(&t->o.truth, (dkv_tensor_id)id)[i] = dkv_outputAt(&t->o.twin, (dkv_tensor_id)id)[i] =
                v;
            dkv_outputAt(&t->o.sigma2, (dkv_tensor_id)id)[i] = s * s;
            dkv_outputAt(&t->o.bound, (dkv_tensor_id)id)[i] = 20 * s;
            dkv_outputAt(&t->got, (dkv_tensor_id)id)[i] = v + s * size * normal(&x);
        }
    }
}

static dkv_judgement judge(trial *t, dkv_tensor_id id) {
    dkv_judgement j;
    dkv_err err = {0};
    if (dkv_judgeTensor(&t->l, &t->a, &t->o, id, dkv_outputAt(&t->got, id), LEVEL, &j, &err))
        fail_msg("%s", err.text);
    return j;
}

static const char *explain(trial *t, dkv_tensor_id id, const dkv_judgement *j) {
    static char text[400];
    dkv_explainJudgement(&t->a, id, j, text, sizeof text);
    return text;
}

static void test_passes(void **state) {
    (void)state;
    trial t;
    makeUp(&t, 1);
    for (int id = 0; id < DKV_N_OUTPUTS; id++) {
        dkv_judgement j = judge(&t, (dkv_tensor_id)id);
        assert_true(j.present && j.twin && !j.failed && !j.imprecise && !j.biased);
        assert_true(j.all.max_ratio > 0 && j.all.max_ratio <= 1 && j.all.bad == 0);
        assert_string_equal(explain(&t, (dkv_tensor_id)id, &j), "");
        if (id == DKV_DSINK) continue;
        assert_true(fabs(j.all.rms_z - 1) < 0.1);
        assert_int_equal(j.all.total, j.region[0].total + j.region[1].total);
    }
    dkv_judgement j = judge(&t, DKV_DK);
    assert_int_equal(j.region[0].total, 100 * 2 * 16);
    assert_int_equal(j.region[1].total, 200 * 2 * 16);
    closeTrial(&t);
}

static void test_finite(void **state) {
    (void)state;
    trial t;
    makeUp(&t, 1);
    int64_t at = (int64_t)((100 + 50 + 17) * 4 + 3) * 16 + 5; /* second response, row 17, head 3, dim 5 */
    double was = t.got.dq[at];
    t.got.dq[at] = NAN;
    t.o.bound.dq[at] = INFINITY;
    dkv_judgement j = judge(&t, DKV_DQ);
    assert_true(j.failed && isinf(j.all.max_ratio));
    assert_int_equal(j.all.bad, 1);
    assert_int_equal(j.all.nonfinite, 1);
    assert_int_equal(j.region[1].bad, 1);
    assert_int_equal(j.worst.segment, 2);
    assert_int_equal(j.worst.row, 17);
    assert_int_equal(j.worst.head, 3);
    assert_int_equal(j.worst.dim, 5);
    assert_non_null(strstr(explain(&t, DKV_DQ, &j), "dQ: nan where"));
    t.got.dq[at] = INFINITY;
    assert_true(judge(&t, DKV_DQ).failed);
    t.o.bound.dq[at] = 1;
    t.o.truth.dq[at] = 0x1.fffffep127; /* the largest: one unit more overflows */
    assert_true(judge(&t, DKV_DQ).failed);
    t.o.truth.dq[at] = 0x1.ffffffp127;
    j = judge(&t, DKV_DQ);
    assert_false(j.failed);
    assert_int_equal(j.all.nonfinite, 0); /* right, then */
    t.got.dq[at] = -INFINITY;
    assert_true(judge(&t, DKV_DQ).failed);
    t.got.dq[at] = was;
    t.o.truth.dq[at] = NAN; /* nothing is defined there */
    assert_false(judge(&t, DKV_DQ).failed);
    t.o.truth.lse[7] = -INFINITY;
    t.o.bound.lse[7] = 0;
    t.got.lse[7] = -49994;
    j = judge(&t, DKV_LSE);
    assert_true(j.failed);
    assert_non_null(strstr(explain(&t, DKV_LSE, &j), "where -inf is right"));
    t.got.lse[7] = NAN;
    assert_true(judge(&t, DKV_LSE).failed);
    t.got.lse[7] = -INFINITY;
    assert_false(judge(&t, DKV_LSE).failed);
    t.o.bound.dk[0] = NAN;
    assert_true(judge(&t, DKV_DK).failed);
    closeTrial(&t);
}

static void test_words(void **state) {
    (void)state;
    trial t;
    makeUp(&t, 1);
    int64_t at = (65 * 2 + 1) * 16 + 3; /* a prompt's key 65 */
    t.got.dk[at] = t.o.truth.dk[at] + 3.4 * t.o.bound.dk[at];
    dkv_judgement j = judge(&t, DKV_DK);
    assert_true(j.failed && fabs(j.all.max_ratio - 3.4) < 1e-6);
    assert_int_equal(j.worst.tile_edge, 1);
    const char *text = explain(&t, DKV_DK, &j);
    assert_non_null(strstr(
        text, "dK: 3.4 times what rounding allows at group 0, prompt, key 65 (1 past a 64-row tile's edge), "
              "KV head 1, dim 3: got "));
    assert_non_null(strstr(text, "1 of 9600 elements are wrong"));
    char small[20];
    dkv_explainJudgement(&t.a, DKV_DK, &j, small, sizeof small);
    assert_int_equal(strlen(small), 19);
    closeTrial(&t);
}

static void test_noise(void **state) {
    (void)state;
    trial t;
    makeUp(&t, 2);
    dkv_judgement j = judge(&t, DKV_O);
    assert_true(j.imprecise && !j.biased);
    assert_non_null(strstr(explain(&t, DKV_O, &j), "O: noise of"));
    closeTrial(&t);
    makeUp(&t, 0.1); /* more precise than declared */
    for (int id = 0; id < DKV_N_OUTPUTS; id++) assert_false(judge(&t, (dkv_tensor_id)id).imprecise);
    for (int64_t i = 0; i < 100 * 2 * 16; i++) /* in the prompt's keys alone */
        t.got.dv[i] = t.o.twin.dv[i] + 3.5 * (t.got.dv[i] - t.o.twin.dv[i]) / 0.1;
    j = judge(&t, DKV_DV);
    assert_true(j.imprecise && j.region[0].rms_z > j.region[0].rms_limit &&
                j.region[1].rms_z < j.region[1].rms_limit);
    closeTrial(&t);
}

static void test_bias(void **state) {
    (void)state;
    trial t;
    makeUp(&t, 0.1);
    for (int64_t i = 0; i < 300 * 2 * 16; i++) t.got.dk[i] += -2e-6 * t.o.twin.dk[i];
    dkv_judgement j = judge(&t, DKV_DK);
    assert_true(j.biased && j.all.gain < -1.9e-6 && j.all.gain > -2.1e-6);
    assert_non_null(strstr(explain(&t, DKV_DK, &j), "dK: too small by 2e-06"));
    for (int64_t i = 0; i < 300 * 4; i++) t.got.lse[i] += 0x1p-19;
    j = judge(&t, DKV_LSE);
    assert_true(j.biased);
    assert_non_null(strstr(explain(&t, DKV_LSE, &j), "on average"));
    for (int64_t i = 0; i < 300 * 2 * 16; i++) t.got.dv[i] = t.o.truth.dv[i] * (i < 100 * 2 * 16 ? 1 - 3e-3 : 1 + 1e-3);
    j = judge(&t, DKV_DV);
    assert_true(fabs(j.region[0].truth_gain + 3e-3) < 1e-12 && fabs(j.region[1].truth_gain - 1e-3) < 1e-12);
    assert_true(j.all.truth_gain > -3e-3 && j.all.truth_gain < 1e-3);
    closeTrial(&t);
}

/* Nothing to round, nothing rounded: no test; half a unit and more is an error. */
static void test_exact(void **state) {
    (void)state;
    trial t;
    makeUp(&t, 1);
    for (int64_t i = 0; i < 300 * 4 * 16; i++) {
        t.o.sigma2.o[i] = 0;
        t.got.o[i] = t.o.twin.o[i];
        t.o.bound.o[i] = 1;
    }
    dkv_judgement j = judge(&t, DKV_O);
    assert_true(!j.failed && !j.imprecise && !j.biased && j.all.rms_z == 0);
    for (int64_t i = 0; i < 300 * 4 * 16; i++) t.got.o[i] *= 1 + 0x1p-25;
    assert_true(judge(&t, DKV_O).all.rms_z == 0);
    for (int64_t i = 0; i < 300 * 4 * 16; i++) t.got.o[i] = t.o.twin.o[i] * (1 + 0x1p-20);
    assert_true(judge(&t, DKV_O).imprecise);
    closeTrial(&t);
}

/* Identical rows are one observation, seen often. */
static void test_equal(void **state) {
    (void)state;
    trial t;
    makeUp(&t, 1);
    double free = judge(&t, DKV_O).all.dof;
    for (int64_t r = 150; r < 300; r++) {
        memcpy(t.o.twin.o + r * 64, t.o.twin.o + (100 + (r - 100) % 50) * 64, sizeof(double) * 64);
        memcpy(t.got.o + r * 64, t.got.o + (100 + (r - 100) % 50) * 64, sizeof(double) * 64);
    }
    dkv_judgement j = judge(&t, DKV_O);
    assert_true(free == 1200);
    assert_true(j.region[0].dof == 400 && j.region[1].dof == 200);
    closeTrial(&t);
}

static void test_refuses(void **state) {
    (void)state;
    trial t;
    dkv_judgement j;
    dkv_err err = {0};
    makeUp(&t, 1);
    assert_int_equal(dkv_judgeTensor(&t.l, &t.a, &t.o, DKV_O, t.got.o, 0, &j, &err), DKV_EHARNESS);
    assert_int_equal(dkv_judgeTensor(&t.l, &t.a, &t.o, DKV_O, NULL, LEVEL, &j, &err), DKV_OK);
    assert_false(j.present);
    closeTrial(&t);
}

/* The emulated kernel on real fills: no alarm, and a twin that predicts it (rms z of 0.8 to 1.15;
 * a small case is allowed its scatter). */
static void test_fills(void **state) {
    (void)state;
    static const char *const fills[] = {"normal", "hot",        "cold",    "outlier",
                                        "needle", "duplicated", "aligned", "dupkeys"};
    for (size_t f = 0; f < sizeof fills / sizeof *fills; f++)
        for (int type = 0; type < 3; type++) {
            char line[200];
            trial t;
            snprintf(line, sizeof line, "shape=100+3x70 heads=4:2 dim=64 dtype=%s fill=%s",
                     dkv_dtypeName((dualkv_dtype)type), fills[f]);
            runTrial(&t, line, "", dkv_fillInputs);
            for (int id = 0; id < DKV_N_OUTPUTS; id++) {
                dkv_judgement j = judge(&t, (dkv_tensor_id)id);
                if (j.failed || j.imprecise || j.biased)
                    fail_msg("%s: %s", line, explain(&t, (dkv_tensor_id)id, &j));
                bool cancels = !strcmp(fills[f], "needle") && id != DKV_LSE;
                double few = j.all.dof < 100 ? 2 / sqrt(2 * j.all.dof) : 0; /* of a root mean square of so few */
                if (j.present && !(j.all.rms_z < 1.2 + few && (cancels || j.all.rms_z > 0.8 - few)))
                    fail_msg("%s: rms z of %s is %.3f of %.0f", line, dkv_tensorName((dkv_tensor_id)id),
                             j.all.rms_z, j.all.dof);
            }
            closeTrial(&t);
        }
}

/* dK of the keys, 4 elements of it: twin = a u, got = twin + gain a u + size b v. */
static void setKeys(trial *t, uint64_t *x, bool one_profile, double gain, double size) {
    double u[4], v[4];
    for (int c = 0; c < 4; c++) u[c] = normal(x), v[c] = normal(x);
    for (int64_t j = 0; j < 300 * 2; j++) {
        const double a = one_profile ? 0.5 + uniform(x) : normal(x), b = one_profile ? a : normal(x);
        for (int64_t c = 0, at = j * 16; c < 16; c++, at++) {
            t->o.twin.dk[at] = t->o.truth.dk[at] = c < 4 ? a * u[c] : 0;
            t->o.sigma2.dk[at] = c < 4 ? size * size * (one_profile ? a * a : u[c] * u[c]) : 0;
            t->got.dk[at] = c < 4 ? a * u[c] * (1 + gain) + size * b * (one_profile ? v[c] : u[c]) : 0;
            t->o.bound.dk[at] = 100;
        }
    }
}

/* Keys that all rows see with the same weights are multiples of one sum, and so are their errors: 600 of them are one vector
 * of 4, whatever that shows. Keys of one query row, multiples of it, have errors of their own, and show a gain as before. */
static void test_profiles(void **state) {
    (void)state;
    trial t;
    uint64_t x = 5;
    double limit = 0;
    makeUp(&t, 1);
    for (int seed = 0; seed < 200; seed++) {
        setKeys(&t, &x, true, 0, 1);
        const dkv_judgement j = judge(&t, DKV_DK);
        if (j.imprecise || j.biased) fail_msg("seed %d: %s", seed, explain(&t, DKV_DK, &j));
    }
    for (int seed = 0; seed < 20; seed++) {
        setKeys(&t, &x, false, 3e-3, 1e-3);
        const dkv_judgement j = judge(&t, DKV_DK);
        assert_true(j.biased && j.all.gain > 2e-3);
        limit += j.all.rms_limit / 20;
    }
    if (!(limit < 2.8)) fail_msg("limit %g", limit); /* 2.6 if all are taken for independent */
    closeTrial(&t);
}

/* Errors that are not independent: one chain in all rows; equal addends; one rounding for all rows; flushed P; one capped
 * score in all rows; one profile of P for all keys. */
static void test_coherent(void **state) {
    (void)state;
    static const struct {
        const char *line, *kernel;
    } cases[] = {
        {"shape=187+1 heads=8:1 mask=block:32:0.05:53 alibi=on fill=needle seed=218 dlse=on", ""},
        {"shape=248k+4x14 heads=2:1 dim=4 dtype=fp32 scale=0.05 softcap=1 alibi=on fill=constv seed=961", ""},
        {"shape=248k+4x20 heads=1:1 dim=4 dtype=fp32 mask=full scale=0.01 fill=constv seed=34195", ""},
        {"shape=248k+3x20 heads=1:1 dim=16 dtype=fp32 mask=prefix scale=0.01 softcap=1 fill=constv seed=365", ""},
        {"shape=61k+(7+3x8),4x0 heads=8:1 dim=24:40 dtype=fp16 softcap=0.5 fill=descending seed=313 dlse=on", ""},
        {"shape=22+(6+239) heads=4:1 dim=1 mask=full scale=0.05 sinklogit=-1 fill=aligned seed=655", ""},
        {"shape=49k+3,5,3 heads=4:1 dim=2:11 dtype=fp32 fill=ownhot", "fault=E5"},
        {"shape=37+108x4 heads=2:1 dim=16 dtype=fp32 mask=window:62 fill=duplicated seed=470 dlse=on", ""},
        {"shape=0k+2x192,4x29 heads=4:2 dim=1 dtype=fp32 mask=prefix scale=0.05 softcap=50 fill=needle seed=304", ""},
        {"shape=191+19,192 heads=4:1 dim=1 dtype=fp32 scale=0.05 softcap=50 sinklogit=4 fill=needle seed=39 dlse=on", ""},
        {"shape=256 heads=8:1 dim=1 dtype=fp32 mask=full softcap=0.5 sinklogit=-2 fill=descending seed=782", ""},
        {"shape=23+113,67 heads=9:3 dim=32 dtype=fp16 mask=window:1:1 softcap=5 sinklogit=-20 fill=prefixhot seed=168", ""},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        trial t;
        runTrial(&t, cases[i].line, cases[i].kernel, dkv_fillInputs);
        for (int id = 0; id < DKV_N_OUTPUTS; id++) {
            dkv_judgement j = judge(&t, (dkv_tensor_id)id);
            if (j.failed || j.imprecise || j.biased)
                fail_msg("%s: %s", cases[i].line, explain(&t, (dkv_tensor_id)id, &j));
        }
        closeTrial(&t);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_passes), cmocka_unit_test(test_finite),  cmocka_unit_test(test_words),
        cmocka_unit_test(test_noise),  cmocka_unit_test(test_bias),    cmocka_unit_test(test_exact),
        cmocka_unit_test(test_equal),  cmocka_unit_test(test_refuses), cmocka_unit_test(test_fills),
        cmocka_unit_test(test_coherent), cmocka_unit_test(test_profiles),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
