/* The running maximum as declared (max_slack, sink_first): P, its roundings and the noise of what follows. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "reference.h"
#include "twin_formula.h"
#include "twin_trial.inc"

static void put(void *to, dualkv_dtype type, int64_t at, double x) {
    dkv_encodeArray(&x, type, 1, (char *)to + at * (int64_t)dkv_dtypeSize(type));
}

/* Sums of twelve uniforms. */
static void fillArray(void *to, dualkv_dtype type, int64_t n, double by, uint64_t *x) {
    for (int64_t i = 0; to && i < n; i++) {
        double v = -6;
        for (int k = 0; k < 12; k++) v += uniform(x);
        put(to, type, i, v * by);
    }
}

static int fillNormal(const dkv_problem *p, const dkv_layout *l, const char *dir, dkv_inputs *in, dkv_err *err) {
    const dualkv_problem *v = &l->view;
    uint64_t x = p->seed;
    (void)dir, (void)err;
    fillArray(in->q, p->dtype, v->tq * v->hq * v->dqk, 1, &x);
    fillArray(in->k, p->dtype, v->tk * v->hkv * v->dqk, 1, &x);
    fillArray(in->v, p->dtype, v->tk * v->hkv * v->dv, 1, &x);
    fillArray(in->d_o, p->dtype, v->tq * v->hq * v->dv, 1, &x);
    fillArray(in->sink, DUALKV_FP32, v->hq, 2, &x);
    for (int64_t h = 0; in->sink && h < v->hq; h++) in->sink[h] += 6; /* near the largest scores */
    return 0;
}

/* Head dimension 2. The largest score of each 16 keys is 0 in the first, then 3: all rows meet a tie with a slack of 3. */
static int fillTies(const dkv_problem *p, const dkv_layout *l, const char *dir, dkv_inputs *in, dkv_err *err) {
    const dualkv_problem *v = &l->view;
    fillNormal(p, l, dir, in, err);
    uint64_t x = p->seed;
    for (int64_t i = 0; i < v->tq * v->hq; i++) put(in->q, p->dtype, 2 * i, 1), put(in->q, p->dtype, 2 * i + 1, uniform(&x));
    for (int64_t j = 0; j < v->tk; j++) {
        const bool top = j % 16 == 0;
        put(in->k, p->dtype, 2 * j, top ? (j ? 3 : 0) : -2 * uniform(&x));
        put(in->k, p->dtype, 2 * j + 1, top ? 0 : -uniform(&x));
    }
    return 0;
}

static const char *const options[] = {"bn=16,lazy=2",           "bn=16,sink=first",          "bn=16,lazy=3,sink=first",
                                      "bn=48,lazy=2,order=down", "bn=16,lazy=8,p=exact",      "bn=48,sink=first,order=down",
                                      "bn=32,lazy=2,acc=tc",     "bn=32,lazy=1,p=normalised", "bn=7,lazy=36"};
enum { N_OPTIONS = sizeof options / sizeof *options };
static const char *const lines[] = {"shape=120+3x50 heads=4:2 dim=32 scale=0.5 sinklogit=1 dtype=%s seed=%d",
                                    "shape=90+2x60 heads=2:1 dim=16 scale=1 softcap=12 alibi=on dtype=%s seed=%d",
                                    "shape=64+64 heads=2:1 dim=32 mask=window:17 sinklogit=3 dtype=%s seed=%d"};

/* Clean kernels keep within the bound and the noise. */
static void test_clean(void **state) {
    (void)state;
    for (int i = 0; i < N_OPTIONS; i++)
        for (int e = 0; e < 3; e++) {
            const int type = (i + e) % 3;
            char line[200];
            trial t;
            if ((strstr(options[i], "tc") && type == DUALKV_FP32) || (strstr(options[i], "36") && type == DUALKV_FP16)) continue;
            snprintf(line, sizeof line, lines[e], dkv_dtypeName((dualkv_dtype)type), 40 + i);
            runTrial(&t, line, options[i], fillNormal);
            int64_t n[DKV_N_OUTPUTS], count;
            dkv_countOutputs(&t.l, n);
            for (int id = 0; id < DKV_N_OUTPUTS; id++) {
                const double *got = dkv_outputAt(&t.got, (dkv_tensor_id)id), *truth = dkv_outputAt(&t.o.truth, (dkv_tensor_id)id);
                const double *bound = dkv_outputAt(&t.o.bound, (dkv_tensor_id)id), z = got ? rmsOf(&t, (dkv_tensor_id)id, &count) : 0;
                for (int64_t k = 0; got && k < n[id]; k++)
                    if (!(fabs(got[k] - truth[k]) <= bound[k])) fail_msg("%s %s: %s", line, options[i], dkv_tensorName((dkv_tensor_id)id));
                if (got && id != DKV_DSINK && !(z < 1.35))
                    fail_msg("%s %s: rms z of %s %.3f", line, options[i], dkv_tensorName((dkv_tensor_id)id), z);
            }
            closeTrial(&t);
        }
}

/* What is done and not declared, or declared and not done, shows in O. */
static void test_undeclared_shows(void **state) {
    (void)state;
    const struct {
        const char *options;
        double slack;
        int sink_first;
    } wrong[] = {{"bn=16,lazy=2", 0, 0},  {"bn=16", 2 * 0.6931, 0},           {"bn=16,lazy=2", 4 * 0.6931, 0}, {"bn=16,sink=first", 0, 0},
                 {"bn=16", 0, 1},         {"bn=16,lazy=2,sink=first", 0, 1},  {"bn=48,order=down,sink=first", 0, 0}};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        for (int type = 0; type < 2; type++) {
            trial t;
            char line[200];
            snprintf(line, sizeof line, "shape=120+3x50 heads=4:2 dim=32 scale=0.5 sinklogit=6 grad=off dtype=%s",
                     dkv_dtypeName((dualkv_dtype)type));
            runTrial(&t, line, wrong[i].options, fillNormal);
            assert_true(rmsOf(&t, DKV_O, NULL) < 1.2);
            t.a.max_slack = wrong[i].slack;
            t.a.sink_first = wrong[i].sink_first;
            consult(&t, 1);
            double z = rmsOf(&t, DKV_O, NULL);
            if (!(z > 2.5)) fail_msg("%s as slack %.3f, sink first %d: rms z only %.3f", wrong[i].options, wrong[i].slack, wrong[i].sink_first, z);
            closeTrial(&t);
        }
}

/* Where there is no sink, it is neither first nor last. */
static void test_no_sink(void **state) {
    (void)state;
    trial t;
    runTrial(&t, "shape=90+2x60 heads=2:1 dim=16 grad=off", "bn=16,lazy=2", fillNormal);
    const int64_t n = t.l.view.tq * t.l.view.hq;
    double *one = room(n, sizeof *one);
    memcpy(one, t.o.sigma2.lse, (size_t)n * sizeof *one);
    t.a.sink_first = 1;
    consult(&t, 1);
    assert_memory_equal(one, t.o.sigma2.lse, (size_t)n * sizeof *one);
    free(one);
    closeTrial(&t);
}

/* Another kernel, fp32 but for P and O, for one head and rows that see all keys: the maximum stays while a tile of 16 exceeds
 * it by no more than slack, where the factors left over are no powers of two. */
static void waitFor(trial *t, float slack) {
    const int64_t n = t->l.view.tk, d = t->p.dv;
    double *q = room(2 * n, sizeof *q), *k = room(2 * n, sizeof *k), *v = room(d * n, sizeof *v);
    dkv_decodeArray(t->in.q, t->p.dtype, (size_t)(2 * n), q);
    dkv_decodeArray(t->in.k, t->p.dtype, (size_t)(2 * n), k);
    dkv_decodeArray(t->in.v, t->p.dtype, (size_t)(d * n), v);
    for (int64_t i = 0; i < n; i++) {
        float m = -INFINITY, l = 0, o[64] = {0}, s[16];
        for (int64_t j0 = 0; j0 < n; j0 += 16) {
            float top = m, sum = 0;
            for (int64_t j = 0; j < 16; j++) {
                s[j] = (float)q[2 * i] * (float)k[2 * (j0 + j)] + (float)q[2 * i + 1] * (float)k[2 * (j0 + j) + 1];
                top = s[j] > top ? s[j] : top;
            }
            if (top - m <= slack) top = m;
            const float by = m == -INFINITY ? 0 : expf(m - top);
            for (int64_t c = 0; c < d; c++) o[c] *= by;
            for (int64_t j = 0; j < 16; j++) {
                const float p = expf(s[j] - top), low = (float)dkv_roundTo((double)p, t->a.p_format);
                sum += p;
                for (int64_t c = 0; c < d; c++) o[c] += low * (float)v[(j0 + j) * d + c];
            }
            l = l * by + sum;
            m = top;
        }
        t->got.lse[i] = (double)(m + logf(l));
        for (int64_t c = 0; c < d; c++) t->got.o[i * d + c] = dkv_roundTo((double)(o[c] / l), t->a.out_format);
    }
    free(q);
    free(k);
    free(v);
}

/* Differences that are the slack to the last place: a kernel may decide either way, and its P is rounded elsewhere. */
static void test_ties(void **state) {
    (void)state;
    for (int type = 0; type < 3; type++) {
        trial t;
        char line[200];
        snprintf(line, sizeof line, "shape=160 heads=1:1 dim=2:64 scale=1 mask=full grad=off dtype=%s", dkv_dtypeName((dualkv_dtype)type));
        runTrial(&t, line, "bn=16", fillTies);
        t.a.exp_error = t.a.log_error = 0x1p-22;
        for (int e = 0; e < 4; e++) {
            waitFor(&t, e % 2 ? 3 - 0x1p-22f : 3);
            t.a.max_slack = e < 2 ? 3 - 1e-7 : 3 + 1e-7;
            consult(&t, 1);
            double z = rmsOf(&t, DKV_O, NULL), lse = rmsOf(&t, DKV_LSE, NULL);
            if (!(z < 1.2 && lse < 1.3)) fail_msg("%s, %d: rms z of O %.3f, of LSE %.3f", line, e, z, lse);
        }
        closeTrial(&t);
    }
}

/* Formulas at the edges, and what is refused. */
static void test_rules(void **state) {
    (void)state;
    assert_true(dkv_raisedMax(-INFINITY, -5, 3) == -5);
    assert_true(dkv_raisedMax(1, 4, 3) == 1 && dkv_raisedMax(1, 4.01, 3) == 4.01 && dkv_raisedMax(1, 1.5, 0) == 1.5);
    assert_true(dkv_raisedMax(1, -INFINITY, 0) == 1 && isinf(dkv_raisedMax(-INFINITY, -INFINITY, 1)));
    assert_true(dkv_raiseDoubtful(1, 4, 3, 0, 0) && !dkv_raiseDoubtful(1, 4.001, 3, 0, 0));
    assert_true(dkv_raiseDoubtful(1, 4.001, 3, 1e-7, 0) && !dkv_raiseDoubtful(-INFINITY, 4, 3, 1, 1) && !dkv_raiseDoubtful(1, 1, 0, 1, 1));
    const dualkv_arithmetic good = {.size = sizeof good, .unit = 0x1p-24, .acc_unit = 0x1p-24, .acc_step = 1, .in_format = -1,
                                    .s_format = -1, .ds_format = -1, .partial_format = -1, .max_slack = 11, .sink_first = 1};
    const double bad[] = {-1, NAN, INFINITY, 26, 1e308, -0x1p-1074};
    dkv_err err = {0};
    char words[300];
    assert_int_equal(dkv_checkArithmetic(&good, &err), DKV_OK);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        dualkv_arithmetic a = good;
        a.max_slack = bad[i];
        assert_int_equal(dkv_checkArithmetic(&a, &err), DKV_EUSER);
        assert_non_null(strstr(err.text, "max_slack="));
        assert_null(strchr(err.text, '\n'));
    }
    for (int i = 0; i < 3; i++) { /* P in fp16, by its own format or the operands' */
        dualkv_arithmetic a = good;
        a.max_slack = 11.5;
        a.p_format = i == 1 ? DUALKV_FP16 : i == 2 ? DUALKV_EXACT : DUALKV_BF16;
        if (i == 2) a.in_format = DUALKV_FP16;
        assert_int_equal(dkv_checkArithmetic(&a, &err), i ? DKV_EUSER : DKV_OK);
        a.max_slack = 0, a.sink_first = 2;
        assert_int_equal(dkv_checkArithmetic(&a, &err), DKV_EUSER);
    }
    dualkv_arithmetic a = good;
    a.max_slack = 8 * 0.69314718055994531;
    dkv_describeArithmetic(&a, words, sizeof words);
    assert_non_null(strstr(words, ", maximum raised lazily, by 2^8, the sink first"));
}

static void test_options(void **state) {
    (void)state;
    static const char *const wrong[] = {"lazy=", "lazy=-1", "lazy=37", "lazy=nan", "lazy=1e2", "lazy=8x", "lazy=99999999999999999999", "sink=", "sink=second"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        char err[300] = "";
        assert_null(dkv_emuKernel.open(wrong[i], err, sizeof err));
        assert_true(strlen(err) > 10 && !strchr(err, '\n'));
    }
    trial t;
    openTrial(&t, "shape=9 dtype=fp16", fillNormal);
    void *self = dkv_emuKernel.open("lazy=16", NULL, 0);
    assert_non_null(strstr(dkv_emuKernel.refuses(self, &t.l.view), "fp16"));
    dkv_emuKernel.close(self);
    closeTrial(&t);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_clean), cmocka_unit_test(test_undeclared_shows), cmocka_unit_test(test_ties),
        cmocka_unit_test(test_no_sink),
        cmocka_unit_test(test_rules), cmocka_unit_test(test_options),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
