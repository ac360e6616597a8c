#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "reference.h"
#include "twin_impl.h"
#include "twin_ride.h"
#include "twin_trial.inc"

static void fillNormals(void *t, dualkv_dtype type, int64_t n, uint64_t *x) {
    for (int64_t i = 0; t && i < n; i++) {
        double v = normal(x);
        dkv_encodeArray(&v, type, 1, (char *)t + i * (int64_t)dkv_dtypeSize(type));
    }
}
static int fillRandom(const dkv_problem *p, const dkv_layout *l, const char *dir, dkv_inputs *in,
                      dkv_err *err) {
    const dualkv_problem *v = &l->view;
    uint64_t x = p->seed;
    (void)dir, (void)err;
    fillNormals(in->q, p->dtype, v->tq * v->hq * v->dqk, &x);
    fillNormals(in->k, p->dtype, v->tk * v->hkv * v->dqk, &x);
    fillNormals(in->v, p->dtype, v->tk * v->hkv * v->dv, &x);
    fillNormals(in->d_o, p->dtype, v->tq * v->hq * v->dv, &x);
    fillNormals(in->d_lse, DUALKV_FP32, v->tq * v->hq, &x);
    fillNormals(in->sink, DUALKV_FP32, v->hq, &x);
    return 0;
}

/* ---- the parts ---- */

/* Mean square of round(x + e) - round(x), x uniform and e normal, against the formula, for e from h/1000 to
 * 3h. */
static void test_flip(void **state) {
    (void)state;
    uint64_t r = 5;
    for (double s = 0.001; s < 4; s *= 2) {
        double real = 0, model = 0;
        int n = s < 0.02 ? 400000 : 40000;
        for (int i = 0; i < n; i++) {
            double x = uniform(&r) * 64, y = rint(x), d = rint(x + s * normal(&r)) - y;
            real += d * d;
            model += dkv_flip(x, y, s * s, 1);
        }
        assert_true(model / real > 0.75 && model / real < 1.3);
    }
    assert_true(dkv_flip(1, 1, 1e-6, 1) < 1e-9); /* far from a midpoint nothing flips */
    assert_true(dkv_flip(1.4999, 1, 1e-6, 1) > 0.4);
}

/* Chains of fp32 products: the variance that the checkpoints predict against chains that are run. */
static void test_chains(void **state) {
    (void)state;
    dkv_problem p = {.dtype = DUALKV_FP32};
    dualkv_arithmetic a = {.unit = 0x1p-24, .acc_unit = 0x1p-24, .acc_step = 1, .in_format = DUALKV_EXACT};
    dkv_noise z;
    uint64_t r = 9;
    dkv_makeNoise(&p, &a, &z);
    for (int kind = 0; kind < 3; kind++) /* random, with a common mean, one channel 20 times larger */
        for (int d = 2; d <= 256; d *= 4) {
            double real = 0, model = 0, x[256], y[256];
            for (int i = 0; i < 1500; i++) {
                float ux[256], uy[256], dot, sq, sum = 0;
                double nx, ny, exact = 0;
                for (int c = 0; c < d; c++) {
                    x[c] = (float)((normal(&r) + (kind == 1)) * (kind == 2 && c == d / 3 ? 20 : 1));
                    y[c] = (float)(normal(&r) + (kind == 1));
                    float one = (float)x[c] * (float)y[c];
                    sum += one;
                    exact += x[c] * y[c];
                }
                dkv_unitRows(x, 1, d, ux, &nx);
                dkv_unitRows(y, 1, d, uy, &ny);
                dkv_chainSquare(&z, ux, uy, d, &dot, &sq);
                real += (sum - exact) * (sum - exact);
                model += z.step2 * sq * nx * ny;
            }
            assert_true(model / real > 0.8 && model / real < 1.4);
        }
}

/* One chain, walked: over many pairs the mean square of its error, whatever the quanta of its operands; and of rows
 * that lean on one key the LSE, where the keys' quanta differ. */
static void test_walk(void **state) {
    (void)state;
    uint64_t r = 11;
    for (int type = 0; type < 3; type++)
        for (int outliers = 0; outliers < 2; outliers++) {
            double real = 0, model = 0, x[64], y[64];
            for (int i = 0; i < 3000; i++) {
                float sum = 0;
                double exact = 0;
                for (int c = 0; c < 64; c++) {
                    x[c] = dkv_roundTo(normal(&r) * (outliers && c % 16 == 3 ? 30 : 1), type);
                    y[c] = dkv_roundTo(normal(&r), type);
                    sum += (float)x[c] * (float)y[c];
                    exact += x[c] * y[c];
                }
                real += (sum - exact) * (sum - exact);
                model += dkv_twinWalk(&(dkv_noise){.step = 1}, x, y, 64, 0).own;
            }
            assert_true(model / real > 0.85 && model / real < 1.15);
        }
}

#define CHAINS 4000
/* The same in a tensor core's steps, 8 or 16 products each, taken in order and in another: beside the loss that is
 * expected of all of them. The noise of a few steps is a little overestimated. */
static void test_walk_steps(void **state) {
    (void)state;
    static double x[CHAINS][64], y[CHAINS][64];
    uint64_t r = 12;
    for (int type = 0; type < 2; type++)
        for (int step = 8; step <= 16; step += 8)
            for (int turned = 0; turned < 2; turned++) {
                double err[CHAINS], exact[CHAINS], real = 0, model = 0, drift = 0, size = 0;
                const dkv_noise z = {.step = step, .truncates = 1};
                for (int i = 0; i < CHAINS; i++) {
                    double sum = 0;
                    exact[i] = 0;
                    for (int c = 0; c < 64; c++) {
                        x[i][c] = dkv_roundTo(normal(&r) * (c % 8 == 3 ? 30 : 1), type);
                        y[i][c] = dkv_roundTo(fabs(normal(&r)) * (x[i][c] < 0 ? -1 : 1), type);
                        exact[i] += x[i][c] * y[i][c];
                    }
                    for (int c = 0; c < 64; c += step) {
                        int at = turned ? 64 - step - c : c;
                        sum = dkv_twinStep(sum, x[i] + at, y[i] + at, step);
                    }
                    err[i] = sum - exact[i];
                    drift += err[i] * exact[i];
                    size += exact[i] * exact[i];
                }
                for (int i = 0; i < CHAINS; i++) {
                    double loss = drift / size * exact[i];
                    real += (err[i] - loss) * (err[i] - loss);
                    dkv_twin_walk w = dkv_twinWalk(&z, x[i], y[i], 64, loss);
                    model += w.own + w.common;
                }
                assert_true(drift < 0 && model / real > 0.9 && model / real < 1.5);
            }
}

#define TERMS 65536
#define SUMS  96
/* Long chains in a tensor core's steps: what they lose on average, and how far each is off that where the order of terms is
 * not declared. Random signs, in two orders: the loss is n x / 2 of the accumulator's own cut, and the bridge's variance is
 * all that is left. Terms of one sign: the loss of all cuts, and no path to be off by. */
static void test_lost_anyhow(void **state) {
    (void)state;
    static double x[TERMS];
    const double one[16] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
    dkv_problem p = {.dtype = DUALKV_FP16};
    dualkv_arithmetic a = {.unit = 0x1p-24, .acc_unit = 0x1.4p-21, .acc_step = 16, .acc_truncates = 1, .acc_gain = 1.68 * 0x1p-24,
                           .p_format = DUALKV_FP16, .in_format = DUALKV_EXACT};
    dkv_noise z;
    uint64_t r = 21;
    dkv_makeNoise(&p, &a, &z);
    assert_true(fabs(z.cut - 0.75 / 4.75) < 1e-12);
    for (int kind = 0; kind < 4; kind++) { /* random signs; the same, in four strands; in half as many; one sign */
        const int64_t n = kind == 2 ? TERMS / 2 : TERMS;
        double lost = 0, along = 0, expected = 0, squares = 0, off = 0, model = 0;
        for (int e = 0; e < SUMS; e++) {
            double acc = 0, sum = 0, size = 0, spread = 0, tile = 0, square = 0;
            for (int64_t i = 0; i < n; i++) {
                const int64_t at = kind == 1 ? i % 4 * (n / 4) + i / 4 : i;
                x[at] = dkv_roundTo(exp(normal(&r)), DUALKV_FP16) * dkv_roundTo(normal(&r), DUALKV_FP16);
                if (kind == 3) x[at] = fabs(x[at]);
                sum += x[at];
                size += fabs(x[at]);
                square += x[at] * x[at];
                tile += x[at]; /* in the order of the walk, which is not the chain's */
                if (i % 256 == 255) spread += tile * tile, tile = 0;
            }
            for (int64_t i = 0; i < n; i += 16) acc = dkv_twinStep(acc, x + i, one, 16);
            const double loss = dkv_twinLossAnyhow(&z, z.last_p, 0, sum, (double)n, size, square).mean, d = acc - sum + loss;
            lost += (sum - acc) * sum;
            along += loss * sum;
            expected += loss * loss;
            off += d * d;
            squares += sum * sum;
            model += dkv_twinPath(&z, 0, sum, (double)n, size, spread, 256 / (double)n);
        }
        if (kind < 3 && !(fabs(lost - along) < 0.5 * along && off / model > 0.6 && off / model < 1.6))
            fail_msg("kind %d: loss %g of the expected, off by %g of the variance", kind, lost / along, off / model);
        if (kind == 3 && !(fabs(lost / along - 1) < 0.08 && model < 1e-3 * expected))
            fail_msg("one sign: loss %g of the expected, variance %g of it", lost / along, model / expected);
    }
}

/* Short chains of 16-bit numbers lose a part of that: their products have few bits. P log-normal, its rows' dO parallel or
 * not; without the part the residual is up to 40 times what is left to explain. */
static void test_lost_bits(void **state) {
    (void)state;
    static double p[2048], y[2048];
    const int types[] = {DUALKV_BF16, DUALKV_FP16};
    uint64_t r = 22;
    for (int e = 0; e < 48; e++) { /* type, length, how unlike the terms are, signs */
        const int64_t n = 32ll << 2 * (e / 2 % 4);
        const double wide = 0.3 + e / 8 % 3 * 0.7, parallel = e / 24 ? 0 : 1;
        const dkv_problem problem = {.dtype = types[e % 2]};
        const dualkv_arithmetic a = {.unit = 0x1p-24, .acc_unit = 0x1.4p-21, .acc_step = 16, .acc_truncates = 1,
                                     .acc_gain = 1.68 * 0x1p-24, .p_format = types[e % 2], .in_format = DUALKV_EXACT};
        dkv_noise z;
        double off = 0, whole = 0, model = 0;
        dkv_makeNoise(&problem, &a, &z);
        for (int k = 0; k < SUMS; k++) {
            double acc = 0, sum = 0, size = 0, square = 0, spread = 0, tile = 0, chain = 0;
            for (int64_t i = 0; i < n; i++) {
                p[i] = dkv_roundTo(exp(wide * normal(&r)) / 700, types[e % 2]);
                y[i] = dkv_roundTo(parallel > 0 ? 0.7 + 0.1 * normal(&r) : normal(&r), types[e % 2]);
                const double x = p[i] * y[i];
                sum += x, size += fabs(x), square += x * x, tile += x;
                chain += DKV_ROUND_VAR * 2 * 0x1p-48 / 16 * sum * sum;
                if (i % 32 == 31) spread += tile * tile, tile = 0;
            }
            for (int64_t i = 0; i < n; i += 16) acc = dkv_twinStep(acc, p + i, y + i, 16);
            const dkv_twin_lost lost = dkv_twinLossAnyhow(&z, z.last_p, 0, sum, (double)n, size, square);
            const double d = acc - sum + lost.mean, full = acc - sum + dkv_twinLoss(&z, 0, 0, sum, (double)n, size);
            off += d * d;
            whole += full * full;
            model += chain + lost.var + dkv_twinPath(&z, 0, sum, (double)n, size, spread, 32 / (double)n) +
                     dkv_twinPathWithin(&z, 0, 32, square);
        }
        if (!(off / model < (n > 32 ? 2.6 : 7))) /* of so few terms one may be most */
            fail_msg("%d: off by %g of the variance, by %g without the part", e, off / model, whole / model);
    }
}

static void same(double x, double want, double tolerance, const char *what, int64_t n) {
    if (!(fabs(x - want) <= tolerance * fabs(want))) fail_msg("%s of %lld: %g, not %g", what, (long long)n, x, want);
}

/* The vectorised forms against the formulas term by term, ragged sizes too. */
static void test_loops(void **state) {
    (void)state;
    static const struct { int64_t m, n, d; } size[] = {{1, 1, 1}, {5, 33, 7}, {9, 70, 24}, {4, 64, 128}, {3, 5, 256}};
    static double x[9 * 256], y[70 * 256];
    static float a[9 * 256], b[70 * 256], dot[9 * 70], sq[9 * 70];
    double norm[70];
    uint64_t r = 5;
    for (int e = 0; e < 10; e++) {
        const int64_t m = size[e / 2].m, n = size[e / 2].n, d = size[e / 2].d;
        const dkv_noise z = {.step2 = 1, .prod2 = e % 2};
        for (int64_t c = 0; c < m * d; c++) x[c] = normal(&r);
        for (int64_t c = 0; c < n * d; c++) y[c] = normal(&r);
        dkv_unitRows(x, m, d, a, norm);
        dkv_unitRows(y, n, d, b, norm);
        dkv_chainSquares(&z, a, b, m, n, d, dot, sq);
        for (int64_t i = 0; i < m * n; i++) {
            float one_dot, one_sq;
            dkv_chainSquare(&z, a + i / n * d, b + i % n * d, d, &one_dot, &one_sq);
            assert_true(fabsf(dot[i] - one_dot) < 1e-6f);
            same(sq[i], one_sq, 1e-4, "squares", i);
        }
    }
    for (int64_t n = 1; n <= 41; n += 8 - n % 3) {
        double sum = 0, squares = 0, g = 0, f = 0, least = 0.3, want[6] = {0}; /* count, g, g2, ff, first of g and f */
        for (int64_t j = 0; j < n; j++) sum += fabs(x[j] = normal(&r)), squares += x[j] * x[j];
        for (int64_t j = 0; j < n; j++) {
            g += fabs(x[j]) / sum;
            f += x[j] * x[j] / squares;
            if (!(fabs(x[j]) > least)) continue;
            if (want[0]++ == 0) want[4] = g, want[5] = f;
            want[1] += g;
            want[2] += g * g;
            want[3] += f < 1 ? f * (1 - f) : 0;
        }
        dkv_chainStep k = dkv_walkStep(x, n, least, 1, 0, 0);
        const double got[] = {k.count, k.g, k.g2, k.ff, k.g_first, k.f_first};
        for (int e = 0; e < 6; e++)
            if (fabs(want[e]) > 1e-12) same(got[e], want[e], 1e-9, "walk", n);
        same(k.squares, squares, 1e-12, "squares", n);
    }
}

/* Rows of dO that are nearly the same; q all alike, keys 1 and -1. Of fp32. */
static int fillParallel(const dkv_problem *p, const dkv_layout *l, const char *dir, dkv_inputs *in, dkv_err *err) {
    const dualkv_problem *v = &l->view;
    float *d_o = in->d_o;
    if (fillRandom(p, l, dir, in, err)) return -1;
    for (int64_t i = 0; i < v->tq * v->hq * v->dv; i++) d_o[i] = (float)(i % v->dv + 1) * (1 + 0.1f * d_o[i]);
    return 0;
}
static int fillSigns(const dkv_problem *p, const dkv_layout *l, const char *dir, dkv_inputs *in, dkv_err *err) {
    const dualkv_problem *v = &l->view;
    float *q = in->q, *k = in->k;
    if (fillRandom(p, l, dir, in, err)) return -1;
    for (int64_t i = 0; i < v->tq * v->hq * v->dqk; i++) q[i] = 800.3f;
    for (int64_t j = 0; j < v->tk * v->hkv * v->dqk; j++) k[j] = k[j] < 0 ? -1 : 1;
    return 0;
}

/* Sums of fp32 products in chains of `fold` terms, tile by tile of 40: what they lose is what the tiles' steps say together,
 * and a step of the device's formula says the same. */
static double foldedSum(const dkv_noise *z, int64_t n, double fold, double mean, uint64_t *r, double *model) {
    const int64_t tile = 40;
    double x[40], before = 0, after = 0, var = 0;
    float chain = 0, sum = 0;
    for (int64_t i = 0; i < n; i += tile) {
        double squares = 0;
        for (int64_t e = 0; e < tile; e++) {
            x[e] = (float)(normal(r) + mean);
            after += x[e];
            squares += x[e] * x[e];
            chain += (float)x[e];
            if ((i + e + 1) % (int64_t)fold && i + e + 1 < n) continue;
            sum = i + e + 1 <= (int64_t)fold ? chain : sum + chain;
            chain = 0;
        }
        const double one = 1, was = var;
        dkv_twinChain(z, dkv_evenStep((double)tile, squares, 1, fold, (double)i), 1, &before, &after, &one, &var);
        same(var - was, dkv_formulaChain(z, dkv_formulaEven((double)tile, squares), fold, (double)i, before, after, 1), 1e-9,
             "step", i);
        before = after;
    }
    *model += var;
    return (sum - after) * (sum - after);
}

/* A sum that is folded after more terms than a tile has goes on from tile to tile; dV of many rows whose dO are parallel. */
static void test_folds(void **state) {
    (void)state;
    const dkv_noise z = {.unit2 = DKV_ROUND_VAR * 0x1p-48, .step2 = DKV_ROUND_VAR * 0x1p-48, .step = 1};
    const double folds[] = {48, 100, 400, 2048};
    uint64_t r = 31;
    for (int e = 0; e < 4; e++)
        for (int mean = 0; mean <= 3; mean += 3)
            for (int64_t n = 40; n <= 1000; n *= 5) {
                double real = 0, model = 0;
                for (int i = 0; i < 800; i++) /* of every mantissa */
                    real += foldedSum(&z, n, folds[e], mean * exp2(uniform(&r)), &r, &model);
                if (!(model / real > 0.7 && model / real < 1.4))
                    fail_msg("fold %g, mean %d, %d terms: %g of the variance", folds[e], mean, (int)n, model / real);
            }
    trial t;
    openTrial(&t, "shape=191k+40x4 heads=4:1 dim=8 dtype=fp32 mask=prefix alibi=on", fillParallel);
    runKernel(&t, "");
    t.a.acc_fold_dkv = t.a.acc_fold_dq = 2048; /* more than any of its chains has */
    consult(&t, 1);
    for (int id = DKV_DQ; id <= DKV_DV; id++)
        if (!(rmsOf(&t, (dkv_tensor_id)id, NULL) < 1.2))
            fail_msg("%s: rms z of %.2f", dkv_tensorName((dkv_tensor_id)id), rmsOf(&t, (dkv_tensor_id)id, NULL));
    closeTrial(&t);
}

/* Scores that are all the softcap's are one error, whatever rows they are of. */
static void test_alike(void **state) {
    (void)state;
    trial t;
    runTrial(&t, "shape=0k+2x192,4x29 heads=4:2 dim=1 dtype=fp32 mask=prefix scale=0.05 softcap=50", "", fillSigns);
    assert_int_equal(t.o.alike.rows, 2000);
    assert_true(dkv_independent(&t.o.alike, t.o.alike.capped) < 5);
    assert_true(t.o.alike.lse > 40 * t.o.alike.rows);
    closeTrial(&t);
    runTrial(&t, "shape=60+2x40 heads=2:1 dim=8 dtype=fp32 scale=90 softcap=0.5", "", fillRandom); /* half of all keys at the cap */
    assert_true(dkv_independent(&t.o.alike, t.o.alike.capped) < 5);
    assert_true(t.o.alike.lse < 2 * t.o.alike.rows); /* of which LSE has more than that error */
    closeTrial(&t);
    runTrial(&t, "shape=100+3x70 heads=4:2 dim=64 dtype=fp32 softcap=50", "", fillRandom);
    assert_int_equal(t.o.alike.capped, t.o.alike.rows); /* different scores */
    closeTrial(&t);
}

/* A row's sum, several terms at a time and one by one: terms of all sizes, runs of equal ones, zeros, ones. */
static void test_terms(void **state) {
    (void)state;
    const dkv_noise z = {.unit2 = DKV_ROUND_VAR * 0x1p-48, .exp2 = 0x1p-47, .stuck = 0x1p-24};
    const dkv_spacing ulp = {0, 0x1p-23};
    uint64_t r = 3;
    for (int kind = 0; kind < 6; kind++) {
        double p[100], rel[100];
        float equal[100];
        dkv_formula_sum a = {0}, b = {0};
        for (int j = 0; j < 100; j++) {
            p[j] = kind == 0 ? exp(normal(&r)) : kind == 1 ? exp(12 * normal(&r)) : kind == 2 ? 0.3 : j % 9 ? 0 : 1;
            if (kind == 4) p[j] = j / 11 % 2 ? 0.7 : exp(normal(&r));
            if (kind == 5) p[j] = j < 16 ? 0 : j == 50 ? NAN : exp(normal(&r));
            rel[j] = p[j] * p[j];
            equal[j] = (float)(1 + j % 3);
        }
        dkv_twinAddTerms(&z, ulp, &a, 100, p, 0.5, rel, equal);
        for (int j = 0; j < 100; j++) dkv_formulaAdd(&z, ulp, &b, p[j] * 0.5, rel[j] * z.unit2, equal[j]);
        if (kind == 5) {
            assert_true(isnan(a.part) && isnan(b.part));
            continue;
        }
        same(a.part, b.part, 1e-14, "sum", kind);
        same(a.squares, b.squares, 1e-9, "its roundings", kind);
        same(a.lost, b.lost, 1e-12, "what is lost", kind);
        same(a.noise, b.noise, 1e-9, "its terms' errors", kind);
    }
}

/* ---- the clean kernel ---- */

static const char *const shapes[] = {
    "shape=100+3x70 heads=4:2 dim=64",
    "shape=130+2x33,1 heads=2:2 dim=40:24 mask=window:30:4 dlse=on sinklogit=0.5 seed=2",
    "shape=65+2x(17+2x9@30,5@3)@20,6/40 heads=7:1 dim=16 softcap=3 alibi=on seed=3",
    "shape=60k+4x40@30,20 heads=2:1 dim=8 mask=full dlse=on seed=4",
};
static const char *const kernels[] = {"bm=64,bn=64", "bm=16,bn=48", "bm=32,bn=32,order=down", "bm=64,bn=512"};

static void test_clean(void **state) {
    (void)state;
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
        for (int type = 0; type < 3; type++) {
            char line[300];
            trial t;
            snprintf(line, sizeof line, "%s dtype=%s", shapes[s], dkv_dtypeName((dualkv_dtype)type));
            runTrial(&t, line, kernels[(s + (size_t)type) % 4], fillRandom);
            for (int id = 0; id < DKV_N_OUTPUTS; id++) {
                int64_t n;
                double z = rmsOf(&t, (dkv_tensor_id)id, &n);
                if (n < 100) continue;
                if (!(z > 0.8 && z < 1.2))
                    fail_msg("%s, %s: rms z %.3f", line, dkv_tensorName((dkv_tensor_id)id), z);
            }
            closeTrial(&t);
        }
}

/* Arithmetic in other places: each declared, and predicted. */
static void test_variants(void **state) {
    (void)state;
    static const struct {
        const char *options, *dtype;
        double least; /* 0: 0.75; below where many elements lie on the grid and err once in a million, by a whole step */
    } cases[] = {
        {"p=normalised", "bf16", 0},
        {"p=normalised,scores=low,order=down", "bf16", 0},
        {"p=normalised,partials=low,scores=low,acc=tc", "bf16", 0},
        {"p=exact", "bf16", 0},
        {"p=exact,delta=exact", "fp16", 0},
        {"delta=exact,acc=tc", "bf16", 0},
        {"partials=low", "bf16", 0},
        {"ds=scaled", "bf16", 0},
        {"ds=scaled,acc=tc,partials=low", "fp16", 0},
        {"partials=segments", "bf16", 0.5},
        {"partials=segments,acc=tc", "fp16", 0.5},
        {"partials=rows", "bf16", 0.5},
        {"scores=low", "fp16", 0},
        {"p=normalised", "fp32", 0},
        {"in=tf32", "fp32", 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char line[200];
        trial t;
        snprintf(line, sizeof line, "shape=100+3x70 heads=4:2 dim=64 dtype=%s seed=2%s", cases[i].dtype,
                 strncmp(cases[i].options, "ds=", 3) ? "" : " scale=0.1");
        runTrial(&t, line, cases[i].options, fillRandom);
        for (int id = 0; id < DKV_N_OUTPUTS; id++) {
            int64_t n;
            double z = rmsOf(&t, (dkv_tensor_id)id, &n);
            if (n && !(z > (cases[i].least > 0 ? cases[i].least : 0.75) && z < 1.25))
                fail_msg("%s, %s: rms z of %s is %.3f", cases[i].options, cases[i].dtype,
                         dkv_tensorName((dkv_tensor_id)id), z);
        }
        closeTrial(&t);
    }
}

/* Identical responses that differ in their dLSE: in fp32 their rows err alike in P and dP all the same. */
static void test_shared_rows(void **state) {
    (void)state;
    for (int seed = 1; seed <= 3; seed++) {
        char line[200];
        trial t;
        double sum = 0, twin = 0;
        snprintf(line, sizeof line, "shape=37+100x3 heads=2:1 dim=16 dtype=fp32 dlse=on seed=%d", seed);
        openTrial(&t, line, fillRandom);
        for (int64_t at = 40; at < t.l.view.tq; at += 3) {
            float *const all[] = {t.in.q, t.in.k, t.in.v, t.in.d_o};
            for (int e = 0; e < 4; e++) {
                const int64_t width = (e == 0 || e == 3 ? 2 : 1) * 16;
                memcpy(all[e] + at * width, all[e] + 37 * width, sizeof(float) * (size_t)(3 * width));
            }
        }
        runKernel(&t, "");
        consult(&t, 1);
        for (int64_t i = 0; i < 37 * 16; i++) {
            sum += (t.got.dk[i] - t.o.twin.dk[i]) * (t.got.dk[i] - t.o.twin.dk[i]);
            twin += t.o.sigma2.dk[i];
        }
        if (!(sum / twin > 0.2 && sum / twin < 2)) fail_msg("%s: residual %g of the variance of the prompt's dK", line, sum / twin);
        closeTrial(&t);
    }
}

/* Truth, bound and twin in one traversal are those of two, bit for bit. */
static void test_ride(void **state) {
    (void)state;
    static const char *const options[] = {"", "acc=tc", "bn=100", "p=normalised"};
    int rode = 0;
    for (size_t e = 0; e < 5 * sizeof shapes / sizeof *shapes; e++) {
        trial t;
        dkv_oracle all;
        dkv_err err = {0};
        dkv_ref_options opt = {.threads = 3};
        int64_t n[DKV_N_OUTPUTS];
        runTrial(&t, shapes[e / 5], e % 5 == 4 ? "" : options[e % 5], fillRandom);
        if (e % 5 == 4) { /* nothing rounded; a NaN in V */
            t.a.p_format = t.a.ds_format = DUALKV_EXACT;
            ((uint16_t *)t.in.v)[3] = 0x7fff;
            consult(&t, 1);
        }
        rode += dkv_twinRides(&t.p, &t.in, &t.a);
        assert_int_equal(dkv_allocOracle(&t.l, &all, &err), DKV_OK);
        if (dkv_oracleAll(&t.p, &t.l, &t.in, &t.a, &opt, t.got.o, t.got.lse, &all, &err)) fail_msg("%s", err.text);
        dkv_countOutputs(&t.l, n);
        for (int k = 0; k < 4 * DKV_N_OUTPUTS; k++) {
            const dkv_tensor_id id = (dkv_tensor_id)(k / 4);
            const dkv_outputs *x[] = {&t.o.truth, &t.o.bound, &t.o.twin, &t.o.sigma2};
            const dkv_outputs *y[] = {&all.truth, &all.bound, &all.twin, &all.sigma2};
            assert_int_equal(t.o.has_twin[id], all.has_twin[id]);
            if (k % 4 < 2 || t.o.has_twin[id])
                if (n[id] &&
                    memcmp(dkv_outputAt(x[k % 4], id), dkv_outputAt(y[k % 4], id), sizeof(double) * (size_t)n[id]))
                    fail_msg("%s: %s %d differs", shapes[e / 5], dkv_tensorName(id), k % 4);
        }
        assert_memory_equal(&t.o.alike, &all.alike, sizeof all.alike);
        dkv_freeOracle(&all);
        closeTrial(&t);
    }
    assert_true(rode > 4);
}

static void test_threads(void **state) {
    (void)state;
    trial t;
    runTrial(&t, shapes[0], "", fillRandom);
    int64_t n[DKV_N_OUTPUTS];
    dkv_countOutputs(&t.l, n);
    for (int id = 0; id < DKV_N_OUTPUTS; id++) {
        size_t bytes = sizeof(double) * (size_t)n[id];
        if (!bytes) continue;
        double *twin = malloc(bytes), *sigma2 = malloc(bytes);
        memcpy(twin, dkv_outputAt(&t.o.twin, (dkv_tensor_id)id), bytes);
        memcpy(sigma2, dkv_outputAt(&t.o.sigma2, (dkv_tensor_id)id), bytes);
        consult(&t, 2);
        assert_memory_equal(twin, dkv_outputAt(&t.o.twin, (dkv_tensor_id)id), bytes);
        assert_memory_equal(sigma2, dkv_outputAt(&t.o.sigma2, (dkv_tensor_id)id), bytes);
        free(twin);
        free(sigma2);
    }
    closeTrial(&t);
}

/* ---- what must be seen ---- */

typedef struct seen {
    const char *kernel, *dtype;
    dkv_tensor_id id;
} seen;

/* One rounding more than declared, or one in another place: far above a clean kernel's 1. */
static void test_faults(void **state) {
    (void)state;
    static const seen faults[] = {
        {"fault=X9", "bf16", DKV_DQ}, {"fault=X9", "fp16", DKV_DK},  {"fault=X8", "bf16", DKV_LSE},
        {"fault=X13", "bf16", DKV_O}, {"fault=X15", "bf16", DKV_DQ}, {"fault=X15", "fp16", DKV_DQ},
        {"fault=E4", "fp16", DKV_DQ}, {"fault=E4", "fp32", DKV_DK},  {"fault=E1", "bf16", DKV_DK},
        {"fault=E1", "fp16", DKV_DV}, {"fault=E2", "bf16", DKV_O},   {"fault=X11", "bf16", DKV_DV},
    };
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) {
        char line[200];
        trial t;
        snprintf(line, sizeof line, "%s dtype=%s", shapes[0], faults[i].dtype);
        runTrial(&t, line, faults[i].kernel, fillRandom);
        double z = rmsOf(&t, faults[i].id, NULL);
        if (!(z > 3))
            fail_msg("%s, %s: rms z of %s only %.3f", faults[i].kernel, line, dkv_tensorName(faults[i].id),
                     z);
        closeTrial(&t);
    }
}

/* The twin depends on the declared tile, order and roundings: each wrong declaration shows. */
static void test_declared(void **state) {
    (void)state;
    trial t;
    runTrial(&t, shapes[0], "bn=64", fillRandom);
    dualkv_arithmetic right = t.a;
    struct {
        dualkv_arithmetic a;
        dkv_tensor_id id;
    } wrong[] = {{right, DKV_O},  {right, DKV_O},  {right, DKV_O}, {right, DKV_DQ},
                 {right, DKV_DV}, {right, DKV_DQ}, {right, DKV_DK}, {right, DKV_DV}, {right, DKV_DK}, {right, DKV_DQ}};
    wrong[0].a.key_tile = 32;
    wrong[1].a.key_order = 1;
    wrong[2].a.p_normalised = 1;
    wrong[3].a.ds_format = DUALKV_EXACT;
    wrong[4].a.p_format = DUALKV_EXACT;
    wrong[5].a.delta_exact = 1;
    for (int i = 6; i < 10; i++) wrong[i].a.partial_format = DUALKV_BF16;
    wrong[7].a.partial_of = DUALKV_PARTIAL_SEGMENTS;
    wrong[8].a.partial_of = DUALKV_PARTIAL_ROWS;
    wrong[8].a.row_block = 64;
    wrong[9].a.dq_block = 64;
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        t.a = wrong[i].a;
        consult(&t, 1);
        double z = rmsOf(&t, wrong[i].id, NULL);
        if (!(z > 3)) fail_msg("declaration %zu: rms z of %s only %.3f", i, dkv_tensorName(wrong[i].id), z);
    }
    t.a = right;
    t.a.key_tile = 0;
    consult(&t, 1);
    assert_false(t.o.has_twin[DKV_O]);
    assert_true(t.o.has_twin[DKV_LSE] && t.o.has_twin[DKV_DQ]);
    closeTrial(&t);
}

/* Partial sums of two query heads, each rounded: what two KV heads with the same keys give, rounded and
 * added. */
static void test_partials(void **state) {
    (void)state;
    trial one, two;
    openTrial(&one, "shape=40+2x30 heads=2:1 dim=16", fillRandom);
    openTrial(&two, "shape=40+2x30 heads=2:2 dim=16", fillRandom);
    int64_t tk = one.l.view.tk, d = 16;
    memcpy(two.in.q, one.in.q, (size_t)(one.l.view.tq * 2 * d) * 2);
    memcpy(two.in.d_o, one.in.d_o, (size_t)(one.l.view.tq * 2 * d) * 2);
    for (int64_t j = 0; j < 2 * tk; j++) {
        memcpy((uint16_t *)two.in.k + j * d, (uint16_t *)one.in.k + j / 2 * d, (size_t)d * 2);
        memcpy((uint16_t *)two.in.v + j * d, (uint16_t *)one.in.v + j / 2 * d, (size_t)d * 2);
    }
    runKernel(&one, "");
    runKernel(&two, "");
    one.a.partial_format = DUALKV_BF16;
    consult(&one, 1);
    consult(&two, 1);
    for (int64_t j = 0; j < tk; j++)
        for (int64_t c = 0; c < d; c++) {
            double a = dkv_roundTo(two.o.twin.dk[(2 * j) * d + c], DUALKV_BF16);
            double b = dkv_roundTo(two.o.twin.dk[(2 * j + 1) * d + c], DUALKV_BF16);
            assert_true(fabs(one.o.twin.dk[j * d + c] - a - b) <= 1e-12 * (fabs(a) + fabs(b)));
            assert_true(one.o.sigma2.dk[j * d + c] >= 0);
        }
    closeTrial(&one);
    closeTrial(&two);
}

/* NaN and infinity in one row's inputs, or in what the kernel left of it, stay with what depends on that row.
 */
static void test_isolation(void **state) {
    (void)state;
    trial t, clean;
    runTrial(&clean, "shape=30+2x20 heads=1:1 dim=8", "", fillRandom);
    openTrial(&t, "shape=30+2x20 heads=1:1 dim=8", fillRandom);
    for (int c = 0; c < 8; c++) { /* the second response's last token */
        double bad = c & 1 ? NAN : INFINITY;
        dkv_encodeArray(&bad, t.p.dtype, 1, (uint16_t *)t.in.v + 69 * 8 + c);
        dkv_encodeArray(&bad, t.p.dtype, 1, (uint16_t *)t.in.k + 69 * 8 + c);
    }
    memcpy(t.got.o, clean.got.o, sizeof(double) * 70 * 8);
    memcpy(t.got.lse, clean.got.lse, sizeof(double) * 70);
    t.got.lse[69] = NAN;
    t.a = clean.a;
    consult(&t, 1);
    for (int i = 0; i < 69 * 8; i++) {
        assert_true(fabs(t.o.twin.o[i] - clean.o.twin.o[i]) < 1e-12);
        assert_true(fabs(t.o.twin.dq[i] - clean.o.twin.dq[i]) < 1e-12);
        /* its own branch: nothing is claimed */
        assert_true(isfinite(t.o.sigma2.o[i]) == (i < 50 * 8) && isfinite(t.o.sigma2.dq[i]) == (i < 50 * 8));
    }
    for (int i = 30 * 8; i < 50 * 8; i++) { /* the first response's own keys */
        assert_true(fabs(t.o.twin.dk[i] - clean.o.twin.dk[i]) < 1e-12);
        assert_true(fabs(t.o.twin.dv[i] - clean.o.twin.dv[i]) < 1e-12);
        assert_true(isfinite(t.o.sigma2.dk[i]) && isfinite(t.o.sigma2.dv[i]));
    }
    closeTrial(&t);
    closeTrial(&clean);
}

/* A row whose LSE is no number says nothing of the keys that it does not see. */
static void test_unseen_keys(void **state) {
    (void)state;
    const char *lines[] = {"shape=30+2x20 heads=1:1 dim=8", "shape=30+2x20 heads=1:1 dim=8 dtype=fp32 softcap=5"};
    const double left[] = {NAN, INFINITY};
    for (int e = 0; e < 4; e++) {
        trial t, clean;
        runTrial(&clean, lines[e / 2], "", fillRandom);
        openTrial(&t, lines[e / 2], fillRandom);
        memcpy(t.got.o, clean.got.o, sizeof(double) * 70 * 8);
        memcpy(t.got.lse, clean.got.lse, sizeof(double) * 70);
        t.got.lse[60] = left[e % 2]; /* of the second response, in its middle */
        t.a = clean.a;
        consult(&t, 1);
        for (int i = 61 * 8; i < 70 * 8; i++) {
            assert_true(fabs(t.o.twin.dk[i] - clean.o.twin.dk[i]) < 1e-12);
            assert_true(fabs(t.o.twin.dv[i] - clean.o.twin.dv[i]) < 1e-12);
            assert_true(isfinite(t.o.sigma2.dk[i]) && isfinite(t.o.sigma2.dv[i]));
        }
        closeTrial(&t);
        closeTrial(&clean);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_flip),     cmocka_unit_test(test_chains),    cmocka_unit_test(test_clean),
        cmocka_unit_test(test_walk),     cmocka_unit_test(test_walk_steps), cmocka_unit_test(test_variants),
        cmocka_unit_test(test_loops),    cmocka_unit_test(test_terms),      cmocka_unit_test(test_threads),
        cmocka_unit_test(test_ride),     cmocka_unit_test(test_lost_anyhow), cmocka_unit_test(test_lost_bits),
        cmocka_unit_test(test_shared_rows),
        cmocka_unit_test(test_faults),    cmocka_unit_test(test_declared),
        cmocka_unit_test(test_folds),    cmocka_unit_test(test_alike),
        cmocka_unit_test(test_partials), cmocka_unit_test(test_isolation), cmocka_unit_test(test_unseen_keys),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
