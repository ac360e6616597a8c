/* Pushes a correct kernel towards the bound. The kernel here is plain loops in fp64 in which every operation
 * that may round carries a site: a relative (or absolute) error of the declared size whose sign is free. A
 * search finds, by a difference at each site, the sign that moves one output element furthest; all sites
 * together give nearly the worst correct kernel there is for those inputs. It must stay within the bound.
 * Units up to 2^-8 make second-order terms visible. DUALKV_BOUND_TRIALS: number of random problems (default
 * 40). */
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

#define ROWS 6
#define DIM 4

typedef struct sim {
    const bound_case *c;
    const dualkv_arithmetic *a;
    double *sign; /* of each site */
    int64_t n, room;
    double us, w, in, p, ds, out, partial; /* as in bound.h, from the declaration alone */
    double q[2][ROWS][DIM], k[ROWS][DIM], v[ROWS][DIM], d_o[2][ROWS][DIM];
    bool sees[ROWS][ROWS];
    double o[2][ROWS][DIM], unrounded[2][ROWS][DIM], lse[2][ROWS], p_hat[2][ROWS][ROWS];
    double ds_hat[2][ROWS][ROWS], p_back[2][ROWS][ROWS], delta[2][ROWS];
    double dq[2][ROWS][DIM], dk[ROWS][DIM], dv[ROWS][DIM], dsink[2];
} sim;

static double site(sim *s, double size) {
    assert_true(s->n < s->room);
    return size * s->sign[s->n++];
}
static double round_by(sim *s, double x, double u) { return x * (1 + site(s, u)); }
/* To a format: relative, and absolute at underflow; 0 is exact. */
static double round_to(sim *s, double x, double u, int32_t format) {
    double y = round_by(s, x, u) + site(s, dkv_underflow(format));
    return x == 0 ? 0 : y;
}
static double op(sim *s, double x) { return round_by(s, x, s->a->unit); }
static double score_op(sim *s, double x) { return round_by(s, x, s->us); }

/* Sum of n products x[i] y[i] in steps, folded as declared; y rounded as an operand, x where it is an input.
 */
static double dot(sim *s, bool input, const double *x, const double *y, int n, int64_t fold) {
    double acc = 0, sum = 0;
    int step = s->a->acc_step, steps = 0;
    for (int i = 0; i < n; i += step) {
        double t = 0, all = fabs(acc);
        for (int j = i; j < n && j < i + step; j++) {
            double z = round_by(s, x[j], input ? s->in : 0) * round_by(s, y[j], s->in);
            t += z;
            all += fabs(z);
        }
        acc = acc + t + site(s, s->a->acc_unit) * all;
        if (fold && ++steps % fold == 0) {
            sum = steps > fold ? op(s, sum + acc) : acc;
            acc = 0;
        }
    }
    return !fold || steps < fold ? acc : steps % fold ? op(s, sum + acc) : sum;
}

static double score(sim *s, int h, int i, int j, double *cap_t) {
    const dkv_problem *p = &s->c->p;
    double x = score_op(s, score_op(s, p->scale * dot(s, true, s->q[h][i], s->k[j], p->dqk, s->a->acc_fold)));
    if (p->softcap > 0) {
        double y = score_op(s, score_op(s, x / p->softcap));
        *cap_t = score_op(s, round_by(s, tanh(y), s->a->tanh_error));
        x = score_op(s, score_op(s, p->softcap * *cap_t));
    }
    if (p->alibi) {
        double b = s->c->l.alibi_slopes[h] * fabs((double)(i - j));
        if (b > 0) x = score_op(s, x - score_op(s, score_op(s, score_op(s, b))));
    }
    return x;
}

static double exp_op(sim *s, double x) { return round_by(s, exp(op(s, op(s, x))), s->a->exp_error); }

/* A key tile: scores x of its keys, P in its place; the running maximum, its scaled and rounded value, the
 * sum. */
typedef struct running {
    double max, base, sum, o[DIM];
} running;

static double fade(sim *s, running *r, double top) {
    bool moves = top > r->max, first = r->max == -(double)INFINITY;
    double base = op(s, top), by = exp_op(s, op(s, moves && !first ? r->base - base : 0));
    double sum = op(s, r->sum * by), o[DIM];
    for (int c = 0; c < s->c->p.dv; c++) o[c] = op(s, r->o[c] * by);
    if (!moves) return 1;
    r->max = top;
    r->base = base;
    r->sum = first ? 0 : sum;
    for (int c = 0; c < s->c->p.dv; c++) r->o[c] = first ? 0 : o[c];
    return by;
}

static void key_tile(sim *s, int h, int i, int j0, int j1, running *r) {
    double x[ROWS], y[ROWS], sum = 0, top = -(double)INFINITY, unused;
    int n = 0, key[ROWS];
    for (int j = j0; j < j1; j++)
        if (s->sees[i][j]) {
            x[n] = score(s, h, i, j, &unused);
            top = fmax(top, x[n]);
            key[n++] = j;
        }
    if (!n) return;
    if (!(s->a->max_slack > 0 && top - r->max <= s->a->max_slack)) fade(s, r, top);
    for (int e = 0; e < n; e++) {
        x[e] = exp_op(s, op(s, op(s, x[e]) - r->base));
        sum = e ? op(s, sum + x[e]) : x[e];
        s->p_hat[h][i][key[e]] = x[e];
    }
    r->sum = op(s, r->sum + sum);
    if (s->a->p_normalised) return;
    for (int e = 0; e < n; e++) x[e] = round_to(s, x[e], s->p, s->a->p_format);
    for (int c = 0; c < s->c->p.dv; c++) {
        for (int e = 0; e < n; e++) y[e] = s->v[key[e]][c];
        r->o[c] =
            op(s, r->o[c] + dot(s, false, x, y, n, 0)); /* one more addition than a chain through the tile */
    }
}

/* P divided by its sum, rounded, then multiplied by V. */
static void normalised(sim *s, int h, int i, double inverse, running *r) {
    double x[ROWS], y[ROWS];
    int n = 0, key[ROWS];
    for (int j = 0; j < s->c->l.view.tk; j++)
        if (s->sees[i][j]) {
            double p = op(s, s->p_hat[h][i][j] * inverse);
            x[n] = round_to(s, p, s->p, s->a->p_format);
            s->p_hat[h][i][j] = x[n];
            key[n++] = j;
        }
    for (int c = 0; c < s->c->p.dv; c++) {
        for (int e = 0; e < n; e++) y[e] = s->v[key[e]][c];
        r->o[c] = dot(s, false, x, y, n, s->a->acc_fold);
    }
}

static void forward_row(sim *s, int h, int i) {
    const dkv_problem *p = &s->c->p;
    const int tk = (int)s->c->l.view.tk, tile = s->a->key_tile && !s->a->p_normalised ? s->a->key_tile : tk;
    const int tiles = (tk + tile - 1) / tile;
    running r = {.max = -(double)INFINITY};
    const bool first = p->sink && s->a->sink_first && !s->a->p_normalised;
    if (first) {
        fade(s, &r, s->c->in.sink[h]);
        r.sum = exp_op(s, op(s, op(s, s->c->in.sink[h]) - r.base));
    }
    for (int t = 0; t < tiles; t++) {
        int at = (s->a->key_order ? tiles - 1 - t : t) * tile;
        key_tile(s, h, i, at, at + tile < tk ? at + tile : tk, &r);
    }
    if (p->sink && !first) {
        double sink = s->c->in.sink[h];
        double by = s->a->max_slack > 0 && sink - r.max <= s->a->max_slack ? 1 : fade(s, &r, fmax(sink, r.max));
        for (int j = 0; j < tk; j++) s->p_hat[h][i][j] *= by;
        r.sum = op(s, r.sum + exp_op(s, op(s, op(s, sink) - r.base)));
    }
    double inverse = r.sum > 0 ? op(s, 1 / r.sum) : 0, log_l = r.sum > 0 ? log(r.sum) : 0;
    if (s->a->p_normalised) normalised(s, h, i, inverse, &r);
    for (int c = 0; c < p->dv; c++) {
        double o = s->a->p_normalised ? r.o[c] : op(s, r.o[c] * inverse);
        s->unrounded[h][i][c] = o;
        s->o[h][i][c] = round_to(s, o, s->out, s->a->out_format);
    }
    log_l += site(s, s->a->log_error) * fmax(1, fabs(log_l) / log(2.0));
    double m = op(s, r.base), ln = op(s, log_l);
    s->lse[h][i] = r.sum > 0 ? op(s, m + ln) : -(double)INFINITY;
}

static double delta_of(sim *s, int h, int i, const double *dp) {
    double d = 0;
    int n = 0;
    if (s->a->p_normalised) { /* as a softmax's backward: sum over keys of P dP */
        for (int j = 0; j < s->c->l.view.tk; j++)
            if (s->sees[i][j]) {
                double t = op(s, s->p_hat[h][i][j] * dp[j]);
                d = n++ ? op(s, d + t) : t;
            }
    } else {
        const double *o = s->a->delta_exact ? s->unrounded[h][i] : s->o[h][i];
        for (int c = 0; c < s->c->p.dv; c++) {
            double t = op(s, s->d_o[h][i][c] * o[c]);
            d = c ? op(s, d + t) : t;
        }
    }
    return s->c->in.d_lse ? op(s, d - s->c->in.d_lse[h * s->c->l.view.tq + i]) : d;
}

static void backward_row(sim *s, int h, int i) {
    const dkv_problem *p = &s->c->p;
    const bool eager = s->a->p_normalised && s->a->s_format >= 0;
    double dp[ROWS] = {0}, x[ROWS], y[ROWS];
    int n = 0, key[ROWS];
    if (s->lse[h][i] == -(double)INFINITY) return;
    for (int j = 0; j < s->c->l.view.tk; j++)
        if (s->sees[i][j])
            dp[j] = round_by(s, dot(s, true, s->d_o[h][i], s->v[j], p->dv, s->a->acc_fold),
                             dkv_unitRoundoff(s->a->s_format));
    s->delta[h][i] = delta_of(s, h, i, dp);
    for (int j = 0; j < s->c->l.view.tk; j++) {
        if (!s->sees[i][j]) continue;
        double t = 0, z = score(s, h, i, j, &t);
        double e = exp_op(s, op(s, op(s, z) - op(s, s->lse[h][i])));
        double hat = round_to(s, e, s->p, s->a->p_format);
        if (eager) e = hat = s->p_hat[h][i][j];
        double ds = op(s, e * op(s, dp[j] - s->delta[h][i]));
        if (p->softcap > 0) ds = op(s, ds * op(s, 1 - op(s, t * t)));
        s->p_back[h][i][j] = hat;
        s->ds_hat[h][i][j] = round_to(s, ds, s->ds, s->a->ds_format);
        x[n] = s->ds_hat[h][i][j];
        key[n++] = j;
    }
    for (int c = 0; c < p->dqk; c++) {
        for (int e = 0; e < n; e++) y[e] = s->k[key[e]][c];
        double d = dot(s, false, x, y, n, s->a->acc_fold_dq ? s->a->acc_fold_dq : s->a->acc_fold);
        d = op(s, op(s, d * p->scale));
        s->dq[h][i][c] = round_to(s, d, s->out, s->a->out_format);
    }
}

/* dK or dV of one key: a chain over the rows of each head, the heads' partial sums rounded and summed. */
static double key_sum(sim *s, int j, double w[2][ROWS][ROWS], double x[2][ROWS][DIM], int c) {
    double sum = 0, a[ROWS], b[ROWS];
    for (int h = 0; h < s->c->p.hq; h++) {
        int n = 0;
        for (int i = 0; i < s->c->l.view.tq; i++)
            if (s->sees[i][j]) {
                a[n] = w[h][i][j];
                b[n++] = x[h][i][c];
            }
        double d = dot(s, false, a, b, n, s->a->acc_fold_dkv ? s->a->acc_fold_dkv : s->a->acc_fold);
        d = round_to(s, d, s->partial, s->a->partial_format);
        sum = h ? op(s, sum + d) : d;
    }
    return sum;
}

static void run_sim(sim *s) {
    const dkv_problem *p = &s->c->p;
    s->n = 0;
    for (int h = 0; h < p->hq; h++)
        for (int i = 0; i < s->c->l.view.tq; i++) {
            forward_row(s, h, i);
            backward_row(s, h, i);
        }
    for (int j = 0; j < s->c->l.view.tk; j++) {
        for (int c = 0; c < p->dqk; c++) {
            double d = op(s, op(s, key_sum(s, j, s->ds_hat, s->q, c) * p->scale));
            s->dk[j][c] = round_to(s, d, s->out, s->a->out_format);
        }
        for (int c = 0; c < p->dv; c++)
            s->dv[j][c] = round_to(s, key_sum(s, j, s->p_back, s->d_o, c), s->out, s->a->out_format);
    }
    for (int h = 0; p->sink && h < p->hq; h++) {
        s->dsink[h] = 0;
        for (int i = 0; i < s->c->l.view.tq; i++) {
            double x = op(s, s->c->in.sink[h]) - op(s, s->lse[h][i]);
            double t = op(s, exp_op(s, op(s, x)) * -s->delta[h][i]);
            s->dsink[h] = i ? op(s, s->dsink[h] + t) : t;
        }
    }
}

static double target(const sim *s, dkv_tensor_id id, int64_t at) {
    const dkv_problem *p = &s->c->p;
    const int64_t tq = s->c->l.view.tq;
    switch (id) {
    case DKV_O: return s->o[at / p->dv % p->hq][at / p->dv / p->hq][at % p->dv];
    case DKV_LSE: return s->lse[at / tq][at % tq];
    case DKV_DQ: return s->dq[at / p->dqk % p->hq][at / p->dqk / p->hq][at % p->dqk];
    case DKV_DK: return s->dk[at / p->dqk][at % p->dqk];
    case DKV_DV: return s->dv[at / p->dv][at % p->dv];
    default: return s->dsink[at];
    }
}

static void decode(const bound_case *c, const void *from, int64_t rows, int heads, int d,
                   double to[][ROWS][DIM]) {
    for (int64_t r = 0; r < rows; r++)
        for (int h = 0; h < heads; h++)
            dkv_decodeArray((const char *)from + (r * heads + h) * d * (int64_t)dkv_dtypeSize(c->p.dtype),
                            c->p.dtype, (size_t)d, to[h][r]);
}

static sim *make_sim(const bound_case *c) {
    sim *s = calloc(1, sizeof *s);
    assert_non_null(s);
    s->c = c;
    s->a = &c->a;
    s->room = 200000;
    s->sign = calloc((size_t)s->room, sizeof *s->sign);
    assert_non_null(s->sign);
    assert_true(c->l.view.tq <= ROWS && c->l.view.tk <= ROWS && c->p.hkv == 1 && c->p.hq <= 2);
    decode(c, c->in.q, c->l.view.tq, c->p.hq, c->p.dqk, s->q);
    decode(c, c->in.d_o, c->l.view.tq, c->p.hq, c->p.dv, s->d_o);
    decode(c, c->in.k, c->l.view.tk, 1, c->p.dqk, &s->k);
    decode(c, c->in.v, c->l.view.tk, 1, c->p.dv, &s->v);
    for (int i = 0; i < c->l.view.tq; i++)
        for (int j = 0; j < c->l.view.tk; j++) s->sees[i][j] = dkv_maskSees(&c->p, 0, i, j);
    s->us = fmax(s->a->unit, dkv_unitRoundoff(s->a->s_format));
    s->in = dkv_unitRoundoff(s->a->in_format);
    s->p = s->a->p_format >= 0 ? dkv_unitRoundoff(s->a->p_format) : s->in;
    s->ds = s->a->ds_format >= 0 ? dkv_unitRoundoff(s->a->ds_format) : s->in;
    s->out = dkv_unitRoundoff(s->a->out_format);
    s->partial = dkv_unitRoundoff(s->a->partial_format);
    return s;
}

/* Largest error / bound that the signs reach at one element, both ways round. */
static double push(sim *s, dkv_tensor_id id, int64_t at) {
    const double truth = dkv_outputAt(&s->c->oracle.truth, id)[at],
                 bound = dkv_outputAt(&s->c->oracle.bound, id)[at];
    double worst = 0;
    memset(s->sign, 0, sizeof *s->sign * (size_t)s->room);
    run_sim(s);
    const int64_t sites = s->n;
    const double base = target(s, id, at);
    if (base == truth && bound == 0) return 0;
    double *best = calloc((size_t)sites + 1, sizeof *best);
    assert_non_null(best);
    for (int64_t i = 0; i < sites; i++) {
        s->sign[i] = 1;
        run_sim(s);
        best[i] = target(s, id, at) >= base ? 1 : -1;
        s->sign[i] = 0;
    }
    for (int way = -1; way <= 1; way += 2) {
        for (int64_t i = 0; i < sites; i++) s->sign[i] = way * best[i];
        run_sim(s);
        double r = fabs(target(s, id, at) - truth) / bound;
        worst = r > worst || isnan(r) ? r : worst;
    }
    free(best);
    return worst;
}

static uint64_t state;
static int pick(int n) {
    uint64_t x = (state += 0x9E3779B97F4A7C15ull);
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ x >> 27) * 0x94D049BB133111EBull;
    return (int)((x ^ x >> 31) % (uint64_t)n);
}

static void pick_arithmetic(bound_case *c) {
    static const double units[] = {0x1p-24, 0x1p-24, 0x1p-14, 0x1p-9, 0x1p-8};
    static const int32_t low[] = {DUALKV_EXACT, DUALKV_BF16, DUALKV_FP16, DUALKV_TF32, DUALKV_FP32};
    dualkv_arithmetic *a = &c->a;
    *a = (dualkv_arithmetic){
        .size = sizeof *a, .declared = 1, .unit = units[pick(5)], .acc_step = 1 + pick(3)};
    a->acc_unit = fmin(0x1p-7, a->unit * (1 + 9 * pick(2)));
    a->acc_fold = pick(3) ? 0 : 1 + pick(2);
    a->acc_fold_dq = pick(4) ? 0 : 1 + pick(2);
    a->acc_fold_dkv = pick(4) ? 0 : 1 + pick(2);
    a->in_format = pick(4) ? DUALKV_EXACT : low[pick(5)];
    a->s_format = pick(4) ? DUALKV_EXACT : low[pick(5)];
    a->p_format = low[pick(5)];
    a->ds_format = low[pick(5)];
    a->out_format = pick(4) ? (int32_t)c->p.dtype : DUALKV_EXACT;
    a->partial_format = pick(3) ? DUALKV_EXACT : low[pick(5)];
    if (!(dkv_unitRoundoff(a->partial_format) > a->unit)) a->partial_format = DUALKV_EXACT; /* as dkv_partialsOf has it */
    a->p_normalised = pick(3) == 0;
    a->delta_exact = pick(2);
    a->key_tile = pick(5) * (1 + pick(2));
    a->key_order = pick(2);
    a->max_slack = pick(2) * pick(6);
    a->sink_first = pick(2);
    a->exp_error = fmin(0x1p-10, units[pick(5)] * pick(3));
    a->log_error = fmin(0x1p-10, units[pick(5)]);
    a->tanh_error = fmin(0x1p-10, units[pick(5)]);
}

/* Amplitudes of Q, V and dO, a constant added to V, so that cancelling and coherent sums both arise. */
static void pick_inputs(bound_case *c, char *words, size_t n) {
    static const double size[] = {1, 1, 4, 0.05, 0x1p-15};
    const double q = size[pick(4)], v = size[pick(5)], d = size[pick(5)], mean = pick(2) * 3.0;
    for (int64_t i = 0; i < c->n_v; i++) {
        char *at = (char *)c->in.v + i * (int64_t)dkv_dtypeSize(c->p.dtype);
        double x;
        dkv_decodeArray(at, c->p.dtype, 1, &x);
        x = (x + mean) * v;
        dkv_encodeArray(&x, c->p.dtype, 1, at);
    }
    scale_array(c->in.q, c->p.dtype, c->n_q, q);
    scale_array(c->in.d_o, c->p.dtype, c->n[DKV_O], d);
    snprintf(words, n, "q x%g v x%g+%g dO x%g", q, v, mean, d);
}

static void trial(double worst[DKV_N_OUTPUTS]) {
    static const char *const mask[] = {"causal", "full", "window:2:1", "block:1:0.6:3"};
    static const char *const more[] = {
        "", "", " softcap=1", " alibi=on", " sinklogit=1", " dlse=on sinklogit=-2"};
    char line[300], inputs[100], words[300];
    bound_case c;
    snprintf(line, sizeof line, "shape=%d heads=%d:1 dim=%d:%d dtype=%s mask=%s seed=%d%s%s", 1 + pick(ROWS),
             1 + pick(2), 1 + pick(DIM), 1 + pick(DIM), dkv_dtypeName((dualkv_dtype)pick(3)), mask[pick(4)],
             1 + pick(100000), more[pick(6)], pick(4) ? "" : " scale=3");
    assert_true(open_case(line, &c));
    pick_arithmetic(&c);
    pick_inputs(&c, inputs, sizeof inputs);
    run_bound(&c);
    dkv_describeArithmetic(&c.a, words, sizeof words);
    sim *s = make_sim(&c);
    for (int id = 0; id < DKV_N_OUTPUTS; id++) {
        if (!c.n[id]) continue;
        int64_t at = pick((int)c.n[id]);
        double r = dkv_outputAt(&c.oracle.bound, (dkv_tensor_id)id)[at] == INFINITY
                       ? 0
                       : push(s, (dkv_tensor_id)id, at);
        if (id == DKV_LSE && c.oracle.truth.lse[at] == -(double)INFINITY) continue;
        if (!(r <= 1))
            fail_msg("%s %s: %s[%ld] reaches %g of its bound (unit %g, acc %g, exp %g, log %g; %s)", line,
                     inputs, dkv_tensorName((dkv_tensor_id)id), (long)at, r, c.a.unit, c.a.acc_unit,
                     c.a.exp_error, c.a.log_error, words);
        worst[id] = r > worst[id] ? r : worst[id];
    }
    free(s->sign);
    free(s);
    close_case(&c);
}

static void test_search(void **unused) {
    (void)unused;
    const char *given = getenv("DUALKV_BOUND_TRIALS"), *seed = getenv("DUALKV_BOUND_SEED");
    const long trials = given ? strtol(given, NULL, 10) : 40;
    double worst[DKV_N_OUTPUTS] = {0};
    state = seed ? strtoull(seed, NULL, 10) : 12345;
    for (long i = 0; i < trials; i++) trial(worst);
    printf("%ld trials, largest error / bound:", trials);
    for (int id = 0; id < DKV_N_OUTPUTS; id++)
        printf(" %s %.3f", dkv_tensorName((dkv_tensor_id)id), worst[id]);
    printf("\n");
    /* a search that finds nothing proves nothing */
    for (int id = 0; id < DKV_DSINK; id++) assert_true(worst[id] > 0.3);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_search)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
