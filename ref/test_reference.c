/* The three references: naive and blocked against quad within their own fp64 bounds, gradients against
 * differences in quad, copies against packed rows, and identities that need no other implementation. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "mask.h"
#include "reference.h"
#include "small_problems.h"
#include "tiles.h"
#include "vexp.h"

#define U 0x1p-53

typedef int (*reference)(const dkv_problem *, const dkv_layout *, const dkv_inputs *, dkv_outputs *,
                         dkv_err *);

typedef struct bench {
    char line[300];
    dkv_problem p;
    dkv_layout l;
    dkv_inputs in;
    int64_t n[DKV_N_OUTPUTS];
} bench;

/* False where the mask is not admissible. */
static bool openBench(bench *b, const char *line, double hot) {
    dkv_err err;
    snprintf(b->line, sizeof b->line, "%s", line);
    if (dkv_parseProblem(line, NULL, &b->p, &err)) fail_msg("%s: %s", line, err.text);
    if (dkv_maskAdmissible(&b->p, &err)) {
        dkv_freeProblem(&b->p);
        return false;
    }
    assert_int_equal(dkv_makeLayout(&b->p, &b->l, &err), 0);
    assert_int_equal(dkv_makeSmallInputs(&b->p, &b->l, b->p.seed, hot, &b->in, &err), 0);
    dkv_countOutputs(&b->l, b->n);
    return true;
}

static void closeBench(bench *b) {
    dkv_freeInputs(&b->in);
    dkv_freeLayout(&b->l);
    dkv_freeProblem(&b->p);
}

/* Outputs of a reference; old contents are NaN, every element must be written. */
static dkv_outputs run(const bench *b, reference f) {
    dkv_outputs out;
    dkv_err err;
    assert_int_equal(dkv_allocOutputs(&b->l, &out, &err), 0);
    for (int i = 0; i < DKV_N_OUTPUTS; i++)
        if (b->n[i]) memset(dkv_outputAt(&out, (dkv_tensor_id)i), 0xff, (size_t)b->n[i] * sizeof(double));
    if (f(&b->p, &b->l, &b->in, &out, &err)) fail_msg("%s: %s", b->line, err.text);
    return out;
}

static dkv_outputs gaugeOf(const bench *b, const dkv_gauge_errors *e) {
    dkv_outputs out;
    dkv_err err;
    assert_int_equal(dkv_allocOutputs(&b->l, &out, &err), 0);
    if (dkv_refGauge(&b->p, &b->l, &b->in, e, &out, &err)) fail_msg("%s: %s", b->line, err.text);
    return out;
}

/* Largest |x - y| / (times * bound) over all tensors; infinite where one is NaN or where a difference has
 * bound 0. */
static double ratio(const bench *b, const dkv_outputs *x, const dkv_outputs *y, const dkv_outputs *bound,
                    double times, const char **where) {
    double worst = 0;
    for (int i = 0; i < DKV_N_OUTPUTS; i++)
        for (int64_t j = 0; j < b->n[i]; j++) {
            const dkv_tensor_id t = (dkv_tensor_id)i;
            const double a = dkv_outputAt(x, t)[j], c = dkv_outputAt(y, t)[j];
            if (a == c) continue;
            double r = fabs(a - c) / (times * dkv_outputAt(bound, t)[j]);
            if (!(r <= worst)) {
                worst = r == r ? r : (double)INFINITY;
                if (where) *where = dkv_tensorName(t);
            }
        }
    return worst;
}

static int blocked(const dkv_problem *p, const dkv_layout *l, const dkv_inputs *in, dkv_outputs *out,
                   dkv_err *err) {
    const dkv_ref_options one = {.threads = 1};
    return dkv_refBlocked(p, l, in, &one, out, err);
}

static dkv_mutant mutant;
static int mutated(const dkv_problem *p, const dkv_layout *l, const dkv_inputs *in, dkv_outputs *out,
                   dkv_err *err) {
    const dkv_ref_options one = {.threads = 1, .mutant = mutant};
    return dkv_refBlocked(p, l, in, &one, out, err);
}

/* Rescales at most once a tile; a small problem has one tile a range, at most depth + 1 ranges. */
static const dkv_gauge_errors blocked_errors = {.exp_error = 2 * DKV_VEXP_ULP * U,
                                                .log_error = 2 * U,
                                                .tanh_error = 2 * DKV_VTANH_ULP * U,
                                                .rescales = DKV_DEPTH_MAX};

static const char *const modifiers[] = {
    "heads=1:1 dim=4",
    "heads=4:2 dim=5:3 dtype=fp32 softcap=2 dlse=on",
    "heads=3:1 dim=3:6 dtype=fp16 alibi=on sinklogit=0.5",
    "heads=2:2 dim=1 dtype=fp32 scale=0.7 sinklogit=-2 dlse=on",
    "heads=6:3 dim=2:1 softcap=1.5 alibi=on sinklogit=1 dlse=on",
    "heads=2:1 dim=7 dtype=fp16 dlse=on",
};

typedef struct tally {
    int cases;
    double naive, blocked;
    int caught[DKV_MUTANT_N];
} tally;

static void againstQuad(const bench *b, tally *t) {
    const char *where = "";
    dkv_outputs truth = run(b, dkv_refQuad), naive = run(b, dkv_refNaive), fast = run(b, blocked);
    dkv_outputs bound = gaugeOf(b, NULL), fast_bound = gaugeOf(b, &blocked_errors);
    double r = ratio(b, &naive, &truth, &bound, 1, &where);
    if (!(r <= 1)) fail_msg("%s: naive is %.3g of its bound from quad in %s", b->line, r, where);
    t->naive = fmax(t->naive, r);
    r = ratio(b, &fast, &truth, &fast_bound, 1, &where);
    if (!(r <= 1)) fail_msg("%s: blocked is %.3g of its bound from quad in %s", b->line, r, where);
    t->blocked = fmax(t->blocked, r);
    for (int m = 1; m < DKV_MUTANT_N && t->cases % 7 == 0; m++) {
        mutant = (dkv_mutant)m;
        dkv_outputs wrong = run(b, mutated);
        t->caught[m] += !(ratio(b, &wrong, &truth, &fast_bound, 1, NULL) <= 1);
        dkv_freeOutputs(&wrong);
    }
    t->cases++;
    dkv_freeOutputs(&truth);
    dkv_freeOutputs(&naive);
    dkv_freeOutputs(&fast);
    dkv_freeOutputs(&bound);
    dkv_freeOutputs(&fast_bound);
}

static void naive_and_blocked_against_quad(void **state) {
    (void)state;
    tally t = {0};
    for (size_t s = 0; s < DKV_COUNT(dkv_small_shapes); s++)
        for (size_t m = 0; dkv_smallMask(m); m++)
            for (size_t i = 0; i < 2; i++) {
                const size_t word = (s * 5 + m * 7 + i * 3) % DKV_COUNT(modifiers);
                const double hot[] = {1, 30, 0.01};
                char line[300];
                bench b;
                snprintf(line, sizeof line, "shape=%s mask=%s %s seed=%d", dkv_small_shapes[s],
                         dkv_smallMask(m), modifiers[word], (int)(s * 100 + m));
                if (!openBench(&b, line, hot[(s + m) % 3])) continue;
                againstQuad(&b, &t);
                closeBench(&b);
            }
    print_message("%d cases; worst err/bound: naive %.3f, blocked %.3f\n", t.cases, t.naive, t.blocked);
    assert_true(t.cases > 600);
    assert_true(t.naive > 1e-3 && t.blocked > 1e-3); /* the bound is of the size of the error */
    for (int m = 1; m < DKV_MUTANT_N; m++) {
        print_message("mutant %d: caught in %d cases\n", m, t.caught[m]);
        assert_true(t.caught[m] > 0);
    }
}

/* Small differences of large sums: only the bound's sum of magnitudes covers their rounding. */
static void cancelling_scores(void **state) {
    (void)state;
    bench b;
    const char *where = "";
    assert_true(openBench(&b, "shape=6+4,3 heads=2:1 dim=64:4 dtype=fp32 dlse=on", 2000));
    float *q = b.in.q, *k = b.in.k;
    for (int64_t i = 0; i < b.n[DKV_DQ]; i += 64)
        for (int c = 0; c < 32; c++) q[i + 32 + c] = q[i + c] * (1 + 0x1p-11f);
    for (int64_t i = 0; i < b.n[DKV_DK]; i += 64)
        for (int c = 0; c < 32; c++) k[i + 32 + c] = -k[i + c];
    dkv_outputs truth = run(&b, dkv_refQuad), naive = run(&b, dkv_refNaive), bound = gaugeOf(&b, NULL);
    double r = ratio(&b, &naive, &truth, &bound, 1, &where);
    if (!(r <= 1)) fail_msg("naive is %.3g of its bound in %s", r, where);
    dkv_freeOutputs(&truth);
    dkv_freeOutputs(&naive);
    dkv_freeOutputs(&bound);
    closeBench(&b);
}

/* The bound is of use: it would not let a relative error of 1e-12 pass. */
static void the_bound_is_narrow(void **state) {
    (void)state;
    bench b;
    assert_true(
        openBench(&b, "shape=4+3,5 heads=4:2 dim=5:3 dtype=fp32 softcap=2 alibi=on sinklogit=1 dlse=on", 1));
    dkv_outputs truth = run(&b, dkv_refQuad), bound = gaugeOf(&b, NULL);
    for (int i = 0; i < DKV_N_OUTPUTS; i++) {
        double size = 0, width = 0;
        for (int64_t j = 0; j < b.n[i]; j++) {
            size += fabs(dkv_outputAt(&truth, (dkv_tensor_id)i)[j]);
            width += dkv_outputAt(&bound, (dkv_tensor_id)i)[j];
        }
        assert_true(width > 0 && width < 1e-12 * size);
    }
    dkv_freeOutputs(&truth);
    dkv_freeOutputs(&bound);
    closeBench(&b);
}

/* F = sum dO.O + sum dLSE LSE in quad, rounded to double. */
static double loss(const bench *b, dkv_outputs *out, double *size) {
    double f = 0;
    const dualkv_problem *v = &b->l.view;
    dkv_outputs forward = {.o = out->o, .lse = out->lse};
    dkv_err err;
    assert_int_equal(dkv_refQuad(&b->p, &b->l, &b->in, &forward, &err), 0);
    __float128 sum = 0;
    for (int64_t i = 0; i < b->n[DKV_O]; i++) {
        sum += (__float128)((float *)b->in.d_o)[i] * out->o[i];
        *size += fabs(((float *)b->in.d_o)[i] * out->o[i]);
    }
    for (int64_t i = 0; b->in.d_lse && i < v->hq * v->tq; i++) {
        if (isinf(out->lse[i])) continue;
        sum += (__float128)b->in.d_lse[i] * out->lse[i];
        *size += fabs(b->in.d_lse[i] * out->lse[i]);
    }
    f = (double)sum;
    return f;
}

/* Central differences at steps h, h/2, h/4, extrapolated twice over. The last extrapolation's error is below
 * its distance to the one before, plus what the rounding of F to double does at the smallest step. */
static void differentiate(const bench *b, dkv_outputs *out, float *x, double got) {
    const float keep = *x;
    double d[3], size = 0;
    for (int i = 0; i < 3; i++) {
        const float h = 0x1p-6f / (float)(1 << i); /* x is a multiple of 2^-10: x + h and x - h are exact */
        *x = keep + h;
        d[i] = loss(b, out, &size);
        *x = keep - h;
        d[i] = (d[i] - loss(b, out, &size)) / (2 * (double)h);
    }
    *x = keep;
    const double r0 = (4 * d[1] - d[0]) / 3, r1 = (4 * d[2] - d[1]) / 3, best = (16 * r1 - r0) / 15;
    const double noise = 4 * U * size / 0x1p-8;
    if (!(fabs(got - best) <= fabs(best - r1) + noise))
        fail_msg("%s: gradient %.17g, differences %.17g +- %.2g", b->line, got, best,
                 fabs(best - r1) + noise);
}

static void gradients_against_differences(void **state) {
    (void)state;
    static const char *const lines[] = {
        "shape=2+2,1 heads=2:1 dim=2:3 dtype=fp32 dlse=on",
        "shape=2k+2@1,1 heads=2:2 dim=2:1 dtype=fp32 softcap=1.5 sinklogit=0 dlse=on",
        "shape=1+(1+2,1),1 heads=2:1 dim=2 dtype=fp32 alibi=on sinklogit=1 mask=window:2:1",
        "shape=2+2 heads=1:1 dim=3 dtype=fp32 mask=full softcap=2 alibi=on dlse=on scale=0.5",
        "shape=3+2 heads=1:1 dim=2 dtype=fp32 mask=block:1:0.3:5 sinklogit=1 dlse=on",
        "shape=2+2 heads=1:1 dim=2 dtype=fp32 mask=prefix",
    };
    for (size_t i = 0; i < DKV_COUNT(lines); i++) {
        bench b;
        assert_true(openBench(&b, lines[i], 1));
        float *x[4] = {b.in.q, b.in.k, b.in.v, b.in.sink};
        const int64_t n[4] = {b.n[DKV_DQ], b.n[DKV_DK], b.n[DKV_DV], b.n[DKV_DSINK]};
        for (int t = 0; t < 4; t++)
            for (int64_t j = 0; j < n[t]; j++) x[t][j] = rintf(x[t][j] * 1024) / 1024;
        dkv_outputs got = run(&b, dkv_refNaive), scratch = run(&b, dkv_refNaive);
        const double *g[4] = {got.dq, got.dk, got.dv, got.dsink};
        for (int t = 0; t < 4; t++)
            for (int64_t j = 0; j < n[t]; j++) differentiate(&b, &scratch, x[t] + j, g[t][j]);
        dkv_freeOutputs(&got);
        dkv_freeOutputs(&scratch);
        closeBench(&b);
    }
}

/* The replicated layout as a problem of its own, for the references. */
static void problemOfView(const bench *b, const dkv_layout *rep, dkv_problem *out) {
    *out = b->p;
    out->n_nodes = rep->view.n_segments;
    out->n_groups = rep->view.n_groups;
    out->nodes = calloc((size_t)out->n_nodes + 1, sizeof *out->nodes);
    assert_non_null(out->nodes);
    for (int32_t i = 0; i < out->n_nodes; i++) {
        const dualkv_segment *s = &rep->segments[i];
        out->nodes[i] = (dkv_node){.parent = s->parent,
                                   .group = s->group,
                                   .depth = s->depth,
                                   .key_only = s->parent < 0 && s->k_len && !s->q_len,
                                   .len = s->k_len,
                                   .context = s->context};
    }
}

/* O_replicated = E O_packed on every row, copies included, and dX_packed = E^T dX_replicated for a dO that is
 * spread over all copies (small integers, so that E^T dO is exact). */
static void equivalence(bench *b) {
    const dualkv_problem *v = &b->l.view;
    bench r = {.n = {0}};
    int64_t *q_source, *k_source;
    uint8_t *own;
    dkv_err err;
    memcpy(r.line, b->line, sizeof r.line);
    assert_int_equal(dkv_makeReplicated(&b->p, &b->l, &r.l, &q_source, &k_source, &own, &err), 0);
    problemOfView(b, &r.l, &r.p);
    dkv_countOutputs(&r.l, r.n);
    assert_int_equal(dkv_replicateInputs(&b->l, &r.l, q_source, k_source, own, &b->in, &r.in, &err), 0);
    const int64_t row = (int64_t)v->hq * v->dv;
    float *rep_do = r.in.d_o, *packed_do = b->in.d_o;
    memset(packed_do, 0, (size_t)b->n[DKV_O] * sizeof(float));
    for (int64_t i = 0; i < r.n[DKV_O]; i++) {
        rep_do[i] = (float)(i * 11 % 15 - 7);
        packed_do[q_source[i / row] * row + i % row] += rep_do[i];
    }
    dkv_outputs x = run(b, dkv_refNaive), y = run(&r, dkv_refNaive), back;
    dkv_outputs xb = gaugeOf(b, NULL), yb = gaugeOf(&r, NULL), bound;
    for (int64_t t = 0; t < r.l.view.tq; t++)
        for (int64_t h = 0; h < v->hq; h++) {
            assert_true(y.lse[h * r.l.view.tq + t] == x.lse[h * v->tq + q_source[t]]);
            assert_memory_equal(y.o + t * row + h * v->dv, x.o + q_source[t] * row + h * v->dv,
                                (size_t)v->dv * sizeof(double));
        }
    assert_int_equal(dkv_allocOutputs(&b->l, &back, &err), 0);
    assert_int_equal(dkv_allocOutputs(&b->l, &bound, &err), 0);
    assert_int_equal(dkv_packOutputs(&b->l, &r.l, q_source, k_source, own, &y, &back, &err), 0);
    assert_int_equal(dkv_packOutputs(&b->l, &r.l, q_source, k_source, own, &yb, &bound, &err), 0);
    const char *where = "";
    for (int i = 0; i < DKV_N_OUTPUTS; i++) /* both sides err, and so does the sum over copies */
        for (int64_t j = 0; j < b->n[i]; j++)
            dkv_outputAt(&bound, (dkv_tensor_id)i)[j] += dkv_outputAt(&xb, (dkv_tensor_id)i)[j];
    double worst = ratio(b, &x, &back, &bound, 1, &where);
    if (!(worst <= 1))
        fail_msg("%s: packed and replicated differ, %.3g of the bound in %s", b->line, worst, where);
    dkv_outputs *all[] = {&x, &y, &back, &xb, &yb, &bound};
    for (int i = 0; i < 6; i++) dkv_freeOutputs(all[i]);
    free(q_source);
    free(k_source);
    free(own);
    free(r.p.nodes);
    dkv_freeInputs(&r.in);
    dkv_freeLayout(&r.l);
}

static void replicated_is_packed(void **state) {
    (void)state;
    for (size_t s = 0; s < DKV_COUNT(dkv_small_shapes); s++)
        for (size_t m = 0; dkv_smallMask(m); m++) {
            char line[300];
            bench b;
            snprintf(line, sizeof line, "shape=%s mask=%s heads=4:2 dim=3:2 dtype=fp32%s",
                     dkv_small_shapes[s], dkv_smallMask(m),
                     (s + m) % 2 ? " alibi=on sinklogit=1" : " softcap=2");
            if (!openBench(&b, line, 1)) continue;
            equivalence(&b);
            closeBench(&b);
        }
}

/* The boundary between prompt and response is nobody's business but the layout's: same rows, same results. */
static void boundary_moves(void **state) {
    (void)state;
    static const char *const shapes[] = {"8", "0+8", "1+7", "5+3", "7+1", "2+(3+3)", "0+(5+(0+(1+2)))"};
    static const char *const masks[] = {"causal", "window:3:1", "chunk:3", "block:2:0.5:3"};
    for (size_t m = 0; m < DKV_COUNT(masks); m++) {
        bench b[DKV_COUNT(shapes)];
        dkv_outputs first = {0}, bound = {0};
        for (size_t s = 0; s < DKV_COUNT(shapes); s++) {
            char line[300];
            snprintf(line, sizeof line,
                     "shape=%s mask=%s heads=4:2 dim=3 dtype=fp32 alibi=on sinklogit=1 dlse=on", shapes[s],
                     masks[m]);
            assert_true(openBench(&b[s], line, 1));
            dkv_outputs x = run(&b[s], dkv_refNaive);
            if (s == 0) {
                first = x;
                bound = gaugeOf(&b[0], NULL);
                continue;
            }
            assert_memory_equal(x.o, first.o, (size_t)b[0].n[DKV_O] * sizeof(double));
            assert_memory_equal(x.lse, first.lse, (size_t)b[0].n[DKV_LSE] * sizeof(double));
            assert_memory_equal(x.dq, first.dq, (size_t)b[0].n[DKV_DQ] * sizeof(double));
            assert_true(ratio(&b[0], &x, &first, &bound, 2, NULL) <= 1);
            dkv_freeOutputs(&x);
            closeBench(&b[s]);
        }
        dkv_freeOutputs(&first);
        dkv_freeOutputs(&bound);
        closeBench(&b[0]);
    }
}

/* Copies rows of `width` bytes: n of them from row a of x to row c of y. */
static void moveRows(const void *x, int64_t a, void *y, int64_t c, int64_t n, int64_t width) {
    memcpy((char *)y + c * width, (const char *)x + a * width, (size_t)(n * width));
}

/* 4+3,2,5 against 4+5,3,2: outputs are permuted with the responses; the prompt's dK, dV are sums in another
 * order. */
static void responses_permute(void **state) {
    (void)state;
    static const int64_t from[] = {0, 4, 7, 9}, to[] = {0, 9, 12, 4}, len[] = {4, 3, 2, 5};
    bench a, b;
    assert_true(openBench(&a, "shape=4+3,2,5 heads=4:2 dim=3:2 dtype=fp32 softcap=3", 1));
    assert_true(openBench(&b, "shape=4+5,3,2 heads=4:2 dim=3:2 dtype=fp32 softcap=3", 1));
    dkv_outputs x = run(&a, dkv_refNaive), want = run(&b, dkv_refNaive), bound;
    for (int i = 0; i < 4; i++) {
        moveRows(a.in.q, from[i], b.in.q, to[i], len[i], 4 * 3 * 4);
        moveRows(a.in.k, from[i], b.in.k, to[i], len[i], 2 * 3 * 4);
        moveRows(a.in.v, from[i], b.in.v, to[i], len[i], 2 * 2 * 4);
        moveRows(a.in.d_o, from[i], b.in.d_o, to[i], len[i], 4 * 2 * 4);
        moveRows(x.o, from[i], want.o, to[i], len[i], 4 * 2 * 8);
        moveRows(x.dq, from[i], want.dq, to[i], len[i], 4 * 3 * 8);
        moveRows(x.dk, from[i], want.dk, to[i], len[i], 2 * 3 * 8);
        moveRows(x.dv, from[i], want.dv, to[i], len[i], 2 * 2 * 8);
        for (int h = 0; h < 4; h++) moveRows(x.lse + h * 14, from[i], want.lse + h * 14, to[i], len[i], 8);
    }
    dkv_outputs y = run(&b, dkv_refNaive);
    bound = gaugeOf(&b, NULL);
    assert_memory_equal(y.o, want.o, (size_t)b.n[DKV_O] * 8);
    assert_memory_equal(y.dq, want.dq, (size_t)b.n[DKV_DQ] * 8);
    assert_true(ratio(&b, &y, &want, &bound, 2, NULL) <= 1);
    dkv_freeOutputs(&x);
    dkv_freeOutputs(&y);
    dkv_freeOutputs(&want);
    dkv_freeOutputs(&bound);
    closeBench(&a);
    closeBench(&b);
}

/* Without a sink a row's probabilities sum to 1: sum_j dV_j = sum_i dO_i for each KV head. And sum q.dq = sum
 * k.dk, whatever the score's modifiers (both are sum ds_ij d(s)/d(q.k) q.k). */
static void sums(void **state) {
    (void)state;
    static const char *const lines[] = {"shape=4+3,2,5 heads=4:2 dim=3:2 dtype=fp32",
                                        "shape=5k+3@2,2 heads=6:2 dim=4 dtype=fp32 softcap=2 dlse=on",
                                        "shape=3+(2+2,1),4 heads=2:2 dim=5:1 dtype=fp32 mask=full alibi=on",
                                        "shape=9+9 heads=2:1 dim=4 dtype=fp32 mask=window:3:1"};
    for (size_t i = 0; i < DKV_COUNT(lines); i++) {
        bench b;
        assert_true(openBench(&b, lines[i], 1));
        const dualkv_problem *v = &b.l.view;
        dkv_outputs x = run(&b, dkv_refNaive), bound = gaugeOf(&b, NULL);
        const int64_t group = v->hq / v->hkv;
        const float *d_o = b.in.d_o, *q = b.in.q, *k = b.in.k;
        for (int64_t c = 0; c < v->hkv * v->dv; c++) {
            double dv = 0, err = 0, sum = 0, size = 0;
            for (int64_t t = 0; t < v->tk; t++) {
                dv += x.dv[t * v->hkv * v->dv + c];
                err += bound.dv[t * v->hkv * v->dv + c];
            }
            for (int64_t t = 0; t < v->tq * group; t++) {
                const int64_t h = c / v->dv * group + t % group;
                sum += d_o[(t / group * v->hq + h) * v->dv + c % v->dv];
                size += fabs(d_o[(t / group * v->hq + h) * v->dv + c % v->dv]);
            }
            assert_true(fabs(dv - sum) <= err + (double)(v->tq * group + v->tk) * U * size);
        }
        double qdq = 0, kdk = 0, err = 0;
        for (int64_t j = 0; j < b.n[DKV_DQ]; j++) {
            qdq += q[j] * x.dq[j];
            err += fabs(q[j]) * bound.dq[j] + (double)b.n[DKV_DQ] * U * fabs(q[j] * x.dq[j]);
        }
        for (int64_t j = 0; j < b.n[DKV_DK]; j++) {
            kdk += k[j] * x.dk[j];
            err += fabs(k[j]) * bound.dk[j] + (double)b.n[DKV_DK] * U * fabs(k[j] * x.dk[j]);
        }
        assert_true(fabs(qdq - kdk) <= err && fabs(qdq) > 1000 * err);
        dkv_freeOutputs(&x);
        dkv_freeOutputs(&bound);
        closeBench(&b);
    }
}

/* NaN in every input of one response: the rows of all others, and their own keys' gradients, keep their bits;
 * the shared ancestors' dK and dV receive it. */
static void nan_stays_in_its_branch(void **state) {
    (void)state;
    static const char *const masks[] = {"causal", "full", "prefix", "window:3:1", "chunk:4", "block:2:0.5:3"};
    static const reference all[] = {dkv_refNaive, dkv_refQuad, blocked};
    const int64_t bad = 4, bad_end = 7, total = 12; /* 4+3,2,(1+2): response 0 */
    for (size_t m = 0; m < DKV_COUNT(masks); m++)
        for (size_t f = 0; f < DKV_COUNT(all); f++) {
            char line[300];
            bench b;
            snprintf(line, sizeof line, "shape=4+3,2,(1+2) mask=%s heads=1:1 dim=3 dtype=fp32 dlse=on",
                     masks[m]);
            assert_true(openBench(&b, line, 1));
            dkv_outputs x = run(&b, all[f]);
            float *in[] = {b.in.q, b.in.k, b.in.v, b.in.d_o};
            for (int i = 0; i < 4; i++)
                for (int64_t j = bad * 3; j < bad_end * 3; j++) in[i][j] = NAN;
            dkv_outputs y = run(&b, all[f]);
            for (int64_t t = 0; t < total; t++) {
                if (t >= bad && t < bad_end) {
                    assert_true(isnan(y.o[t * 3]) && isnan(y.lse[t]) && isnan(y.dq[t * 3]));
                    continue;
                }
                assert_true(y.lse[t] == x.lse[t]);
                assert_memory_equal(y.o + t * 3, x.o + t * 3, 3 * sizeof(double));
                assert_memory_equal(y.dq + t * 3, x.dq + t * 3, 3 * sizeof(double));
                if (t < bad) continue;
                assert_memory_equal(y.dk + t * 3, x.dk + t * 3, 3 * sizeof(double));
                assert_memory_equal(y.dv + t * 3, x.dv + t * 3, 3 * sizeof(double));
            }
            if (m < 3) assert_true(isnan(y.dk[0]) && isnan(y.dv[0]));
            dkv_freeOutputs(&x);
            dkv_freeOutputs(&y);
            closeBench(&b);
        }
}

/* A NaN in the future of a row's own response: 0 times NaN must not reach the rows before it. */
static void nan_stays_in_the_future(void **state) {
    (void)state;
    static const char *const masks[] = {"causal", "prefix", "window:3:1", "chunk:4", "block:2:0.5:3"};
    static const reference all[] = {dkv_refNaive, dkv_refQuad, blocked};
    const int64_t bad = 8; /* last token of 4+5 */
    for (size_t m = 0; m < DKV_COUNT(masks); m++)
        for (size_t f = 0; f < DKV_COUNT(all); f++) {
            char line[300];
            bench b;
            snprintf(line, sizeof line, "shape=4+5 mask=%s heads=1:1 dim=3 dtype=fp32 dlse=on", masks[m]);
            assert_true(openBench(&b, line, 1));
            dkv_outputs x = run(&b, all[f]), bound = gaugeOf(&b, &blocked_errors);
            float *in[] = {b.in.q, b.in.k, b.in.v, b.in.d_o};
            for (int i = 0; i < 4; i++)
                for (int64_t j = bad * 3; j < bad * 3 + 3; j++) in[i][j] = i % 2 ? INFINITY : NAN;
            dkv_outputs y = run(&b, all[f]);
            for (int64_t j = 0; j < bad * 3; j++) { /* blocked may sum such a tile in another order */
                const double times = all[f] == blocked ? 2 : 0;
                assert_true(fabs(y.o[j] - x.o[j]) <= times * bound.o[j]);
                assert_true(fabs(y.dq[j] - x.dq[j]) <= times * bound.dq[j]);
                assert_true(fabs(y.lse[j / 3] - x.lse[j / 3]) <= times * bound.lse[j / 3] ||
                            y.lse[j / 3] == x.lse[j / 3]);
            }
            dkv_freeOutputs(&bound);
            dkv_freeOutputs(&x);
            dkv_freeOutputs(&y);
            closeBench(&b);
        }
}

/* Rows without keys, with and without a sink. */
static void rows_without_keys(void **state) {
    (void)state;
    static const reference all[] = {dkv_refNaive, dkv_refQuad, blocked};
    for (size_t f = 0; f < DKV_COUNT(all); f++)
        for (int sink = 0; sink < 2; sink++) {
            bench b;
            assert_true(openBench(&b,
                                  sink ? "shape=3+2 mask=block:1:0:1 heads=2:1 dim=3 dlse=on sinklogit=1"
                                       : "shape=3+2 mask=block:1:0:1 heads=2:1 dim=3 dlse=on",
                                  1));
            dkv_outputs x = run(&b, all[f]);
            for (int i = 0; i < DKV_N_OUTPUTS; i++)
                for (int64_t j = 0; j < b.n[i]; j++) {
                    double got = dkv_outputAt(&x, (dkv_tensor_id)i)[j], want = 0;
                    if (i == DKV_LSE) want = sink ? (double)b.in.sink[j / 5] : -(double)INFINITY;
                    if (i == DKV_DSINK) /* LSE is the sink logit itself */
                        for (int t = 0; t < 5; t++) want += b.in.d_lse[j * 5 + t];
                    if (i == DKV_DSINK ? !(fabs(got - want) <= 8 * U * 5) : got != want)
                        fail_msg("%s[%d] = %g, want %g", dkv_tensorName((dkv_tensor_id)i), (int)j, got, want);
                }
            dkv_freeOutputs(&x);
            closeBench(&b);
        }
}

static void refusals(void **state) {
    (void)state;
    dkv_problem p;
    dkv_layout l = {.view = {.size = 0}};
    dkv_inputs in = {0};
    dkv_outputs out = {0};
    dkv_err err;
    assert_int_equal(dkv_parseProblem("shape=100000+2x5000 heads=8:8 dim=128", NULL, &p, &err), 0);
    assert_int_equal(dkv_refQuad(&p, &l, &in, &out, &err), DKV_EREFUSED);
    assert_non_null(strstr(err.text, "quad reference: "));
    dkv_freeProblem(&p);
    assert_int_equal(dkv_parseProblem("shape=4+2 mask=bidir", NULL, &p, &err), 0);
    assert_int_equal(dkv_refNaive(&p, &l, &in, &out, &err), DKV_EREFUSED);
    assert_int_equal(dkv_refQuad(&p, &l, &in, &out, &err), DKV_EREFUSED);
    assert_non_null(strstr(err.text, "row 0 of the prompt"));
    dkv_freeProblem(&p);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(naive_and_blocked_against_quad),
        cmocka_unit_test(cancelling_scores),
        cmocka_unit_test(the_bound_is_narrow),
        cmocka_unit_test(gradients_against_differences),
        cmocka_unit_test(replicated_is_packed),
        cmocka_unit_test(boundary_moves),
        cmocka_unit_test(responses_permute),
        cmocka_unit_test(sums),
        cmocka_unit_test(nan_stays_in_its_branch),
        cmocka_unit_test(nan_stays_in_the_future),
        cmocka_unit_test(rows_without_keys),
        cmocka_unit_test(refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
