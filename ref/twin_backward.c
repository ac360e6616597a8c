/* twin_backward.c: dQ, dK, dV, dSink of the twin, one block of rows, given the kernel's own O and LSE.
 *
 * Errors of a pair (independent): P by its score and exp, dP by its chain. Errors of a row: delta, which
 * moves dS by -P times it for all keys alike: in dQ they add up before they are squared, in dK and dV each
 * row has its own. */
#include <cblas.h>
#include <float.h>
#include <string.h>

#include "twin_impl.h"
#include "vexp.h"

/* delta = dO . O - dLSE of the kernel's own O (or of its O before rounding, where it says so). */
static void deltaRow(dkv_twin *t, int64_t i) {
    int64_t d = t->p->dv, head = t->h.kvh * t->h.g + i % t->h.g;
    const double *o = t->o_kernel + i * d, *d_o = t->b.d_o + i * d;
    double raw[256], sum = 0, var = 0, prod = t->a->delta_exact ? t->z.unit2 : t->z.prod2;
    const double tiny = t->a->unit > 0x1p-40 ? 0x1p-298 : 0;
    if (t->a->in_format != DUALKV_EXACT) { /* operands of matrix products alone are rounded */
        dkv_decodeRows(t->in->d_o, t->p->dtype, t->b.q_row + i / t->h.g, 1, t->p->hq, head, d, raw);
        d_o = raw;
    }
    for (int64_t c = 0; c < d; c++) {
        double x = o[c] * d_o[c], old = sum;
        sum += x;
        var += (old != 0 && x != 0 ? t->z.unit2 * sum * sum : 0) + prod * x * x;
        var += x != 0 && fabs(x) < 0x1p-126 ? tiny : 0; /* a product rounded to fp32's smallest unit */
    }
    if (t->a->delta_exact)
        for (int64_t c = 0; c < d; c++) var += t->o_var[i * d + c] * d_o[c] * d_o[c];
    if (t->in->d_lse) {
        double by = t->in->d_lse[head * t->l->view.tq + t->b.q_row + i / t->h.g];
        sum -= by;
        var += by != 0 ? t->z.unit2 * sum * sum : 0;
    }
    t->delta[i] = sum;
    t->delta_var[i] = isfinite(var) ? var : 0;
}

/* O before its rounding. Without the key tile P's roundings in it are not known: the truth, and their
 * variance. */
static void exactOutputs(dkv_twin *t) {
    int64_t m = t->b.m, d = t->p->dv;
    double u = dkv_unitRoundoff(t->a->p_format);
    memcpy(t->o_kernel, t->o_exact, sizeof *t->o_kernel * (size_t)(m * d));
    if (t->out->has_twin[DKV_O]) return;
    dkv_getRows(&t->h, &t->b, t->out->truth.o, d, t->o_kernel);
    for (int64_t e = 0; e < m * d; e++)
        t->o_var[e] = DKV_ROUND_VAR * u * u *
                      (t->o_kernel[e] * t->o_kernel[e] + t->v_mean2[e % d] / fmax(t->o.terms[e / d], 1));
}

/* Row sums that the sink's gradient is made of: -p_sink delta. */
static void sinkRow(dkv_twin *t, int64_t i) {
    int64_t g = i % t->h.g;
    double lse = t->lse_kernel[i], x = t->in->sink[t->h.kvh * t->h.g + g] - lse,
           p = lse == -INFINITY ? 0 : exp(x), y = p * t->delta[i];
    double rel = p > 0 ? t->z.exp2 + t->z.unit2 * (x * x + 1) : 0, old = t->sink_sum[g];
    t->sink_sum[g] -= y;
    t->sink_var[g] += p * p * t->delta_var[i] + y * y * rel;
    if (p < 0x1p-126 && t->a->unit > 0x1p-40) /* below fp32's normal numbers p may be anything from 0 on */
        t->sink_var[g] += (p * p + 0x1p-298) * t->delta[i] * t->delta[i];
    if (y != 0 && fabs(y) < 0x1p-126 && t->a->unit > 0x1p-40) t->sink_var[g] += 0x1p-298;
    if (old != 0 && y != 0) t->sink_var[g] += t->z.unit2 * t->sink_sum[g] * t->sink_sum[g];
}

typedef struct pairRow { /* of one row: [n] each */
    double *s, *ds;        /* s becomes round(P); ds: dP becomes round(dS) */
    const double *p, *cap; /* p: exp(s - LSE) */
    float *w_p, *w_ds, *w_row;
    double exp2; /* relative variance of P beside its score's */
} pairRow;

/* Variances of what the roundings leave: w_p of P over unit2 p_unit^2 and w_ds of dS over unit2 (ds_more p_unit)^2, of the
 * key; w_row of dS without delta's part over unit2 ds_unit^2. Masked pairs are 0 by name. */
static inline __attribute__((always_inline)) void pairVariancesOf(const dkv_twin *t, int64_t n, const pairRow *r,
                                                                  double lse, double delta, double delta_var,
                                                                  bool p_rounded, bool ds_rounded, bool capped) {
    dkv_rounder f_p = t->round_p, f_ds = t->round_ds;
    dkv_spacing u_p = t->ulp_p, u_ds = t->ulp_ds;
    double unit = t->ds_unit, unit2 = t->z.unit2, exp2 = r->exp2, more2 = 1 / (t->ds_more * t->ds_more);
    const double *over = t->over_p;
    double over_row = 1 / (unit2 * unit * unit), least2 = t->z.least2, flush = t->z.flush;
    double prod = t->z.prod_p2, per_cap = capped ? 2 / (double)t->p->softcap : 0, last = capped ? unit2 : 0;
    const double *vs = t->vs, *vd = t->vd, *cap = r->cap, *in_p = r->p;
    double *restrict s = r->s, *restrict dp = r->ds;
    float *restrict w_p = r->w_p, *restrict w_ds = r->w_ds, *restrict w_row = r->w_row;
#pragma GCC ivdep
    for (int64_t j = 0; j < n; j++) {
        bool sees = s[j] > -DBL_MAX;
        double x = sees ? s[j] - lse : 0, p = sees ? in_p[j] : 0, last_p = p < flush ? p * p : least2,
               dev = sees ? dp[j] - delta : 0;
        p = p < flush ? 0 : p; /* declared, and for all alike: no noise */
        double c = capped && sees ? cap[j] : 0, keep = 1 - c * c,
               slope = keep - c * per_cap; /* d log dS / d score, times keep */
        double rel = unit2 * x * x + exp2, vp = p * p * (vs[j] + rel) + last_p, raw = p * dev,
               ds = raw * keep, row, e2, part;
        row = p * p * keep * keep * delta_var;
        e2 = raw * raw *
             (slope * slope * vs[j] + keep * keep * (rel + unit2) + last * (c * c * c * c + 2 * keep * keep));
        e2 += keep * keep * (p * p * ((sees ? vd[j] : 0) + unit2 * dev * dev) + last_p * dev * dev) + row;
        e2 += fabs(ds) < flush ? ds * ds : least2;
        double y = ds_rounded ? dkv_roundBy(f_ds, ds) : ds, q = p_rounded ? dkv_roundBy(f_p, p) : p;
        part = ds_rounded ? dkv_flip(ds, y, e2, dkv_spacingAt(u_ds, fabs(ds))) : e2 + prod * ds * ds;
        vp = p_rounded ? dkv_flip(p, q, vp, dkv_spacingAt(u_p, p)) : vp + prod * p * p;
        w_p[j] = (float)(vp * over[j]);
        w_ds[j] = (float)(part * over[j] * more2);
        w_row[j] = (float)((part > row ? part - row : 0) * over_row);
        dp[j] = y;
        s[j] = q;
    }
}

DKV_CLONES
static void pairVariances(const dkv_twin *t, int64_t n, const pairRow *r, double lse, double delta,
                          double delta_var) {
    bool p = t->p_rounded, ds = t->ds_rounded, capped = r->cap != NULL;
    if (!p && !ds && !capped) pairVariancesOf(t, n, r, lse, delta, delta_var, false, false, false);
    else if (p && ds && !capped) pairVariancesOf(t, n, r, lse, delta, delta_var, true, true, false);
    else pairVariancesOf(t, n, r, lse, delta, delta_var, p, ds, capped);
}

/* The same in quick mode: no softcap, P and dS rounded, nothing subnormal that matters beside their own
 * spacing. */
DKV_CLONES
static void quickPairs(const dkv_twin *t, int64_t n, const pairRow *r, double lse, double delta,
                       double delta_var) {
    dkv_rounder f_p = t->round_p, f_ds = t->round_ds;
    dkv_spacing u_p = t->ulp_p, u_ds = t->ulp_ds;
    double unit2 = t->z.unit2, exp2 = r->exp2, over = 1 / unit2;
    const double *vs = t->vs, *vd = t->vd, *in_p = r->p;
    double *restrict s = r->s, *restrict dp = r->ds;
    float *restrict w_p = r->w_p, *restrict w_ds = r->w_ds;
#pragma GCC ivdep
    for (int64_t j = 0; j < n; j++) {
        bool sees = s[j] > -DBL_MAX;
        double x = sees ? s[j] - lse : 0, p = sees ? in_p[j] : 0, dev = sees ? dp[j] - delta : 0;
        double rel = vs[j] + unit2 * x * x + exp2, p2 = p * p, ds = p * dev;
        double e2 = ds * ds * (rel + unit2) + p2 * ((sees ? vd[j] : 0) + unit2 * dev * dev + delta_var);
        double y = dkv_roundBy(f_ds, ds), q = dkv_roundBy(f_p, p);
        w_p[j] = (float)(dkv_flip(p, q, p2 * rel, dkv_spacingAt(u_p, p)) * over);
        w_ds[j] = (float)(dkv_flip(ds, y, e2, dkv_spacingAt(u_ds, fabs(ds))) * over);
        dp[j] = y;
        s[j] = q;
    }
}

/* Column sums so far of row i's pairs: P, terms that move it, squares. Returns how many terms move the row's
 * sum. */
DKV_CLONES
static double sumPairs(dkv_twin *t, int64_t i, int64_t n, const double *p, const double *ds) {
    double stuck = t->z.stuck, squares, *col = t->col, *col_n = t->col_n, *col_p2 = t->col_p2,
           *col_ds2 = t->col_ds2;
#pragma GCC ivdep
    for (int64_t j = 0; j < n; j++) {
        col_n[j] += p[j] > stuck * col[j] ? 1 : 0;
        col[j] += p[j];
        col_p2[j] += p[j] * p[j];
        col_ds2[j] += ds[j] * ds[j];
    }
    double count = dkv_twinCount(p, n, stuck * dkv_sumOf(p, n), &squares);
    (void)dkv_twinCount(ds, n, 0, &t->row_ds2[i]);
    return count;
}

/* Quick mode: the variances of row i's pairs, times the squared length of what they multiply. */
DKV_CLONES
static void sumVariances(dkv_twin *t, int64_t i, int64_t n, float equal_v, float equal, const float *w_p,
                         const float *w_ds) {
    double by_p = equal_v * t->o_norm[i], by_ds = equal * t->q_norm[i], *vp = t->col_vp, *vds = t->col_vds;
#pragma GCC ivdep
    for (int64_t j = 0; j < n; j++) {
        vp[j] += w_p[j] * by_p;
        vds[j] += w_ds[j] * by_ds;
    }
    t->dq.var[i] = dkv_twinWeighted(w_ds, t->k_norm, t->equal_kv + t->t.k_row, n);
}

DKV_CLONES
static void quickDp(const dkv_twin *t, int64_t n, double norm, const double *dp, double *vd) {
    double step = t->z.step2;
    const double *v_norm = t->v_norm;
    const float *fit = t->fit_dp.var;
    dkv_quick q = t->quick_dp;
#pragma GCC ivdep
    for (int64_t j = 0; j < n; j++) {
        double size = norm * v_norm[j], sq = dkv_quickSquares(q, dp[j] * dp[j], size);
        float unit = size > 0 ? (float)(sq / size) : 0;
        vd[j] = step * fit[dkv_chainBin(unit)] * sq;
    }
}

/* Variance of each dP of row i into vd; the chains' expected loss added to dP. */
static void dpRow(dkv_twin *t, int64_t i) {
    int64_t n = t->t.n;
    const float *sq = t->sq_dp + i * n, *dot = t->dot_dp + i * n;
    double *dp = t->dp + i * n;
    if (t->quick) {
        quickDp(t, n, t->o_norm[i], dp, t->vd);
        return;
    }
    for (int64_t j = 0; j < n; j++) {
        int bin = dkv_chainBin(sq[j]);
        double size = t->o_norm[i] * t->v_norm[j];
        t->vd[j] = t->z.step2 * t->fit_dp.var[bin] * sq[j] * size;
        if (t->z.gain > 0) dp[j] += t->fit_dp.gain[bin] * dot[j] * sqrt(size);
        if (!t->s_rounded) continue;
        double y = dkv_roundBy(t->round_s, dp[j]);
        t->vd[j] = dkv_flip(dp[j], y, t->vd[j], dkv_spacingAt(t->ulp_s, fabs(dp[j])));
        dp[j] = y;
    }
}

/* The expected loss of the same chains: sum of |terms| in `prod`. */
static void loseKeySum(dkv_twin *t, const dkv_keySum *sum, double alpha, const double *w, const double *y,
                       int64_t d) {
    int64_t m = t->b.m, n = t->t.n;
    double *x = sum->x + t->t.k_row * sum->ld;
    float *y1 = t->flat;
    dkv_twinMagnitudes(w, m * n, alpha, t->tmp);
    dkv_twinMagnitudes(y, m * d, 1, y1);
    cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, (int)n, (int)d, (int)m, 1, t->tmp, (int)n, y1,
                (int)d, 0, t->prod, (int)d);
    for (int64_t j = 0; j < n; j++)
        for (int64_t c = 0; c < d; c++)
            x[j * sum->ld + c] -= dkv_twinLoss(&t->z, t->z.fold_dkv, t->before[j * d + c], x[j * sum->ld + c],
                                               t->col_n[j] / (double)t->parts, t->prod[j * d + c]);
}

/* One sum over rows into each key: x += alpha w^T y. Variance of its terms: var^T y2 * unit; in quick mode
 * col_var, spread as mean2 is over the columns. */
typedef struct keyTerms {
    const double *w, *y, *mean2, *col2, *col_var; /* [m, n], [m, d], [d], [n], [n] */
    const float *var, *y2;
    const double *units; /* [n]: factor on the variance of each key's terms; NULL: 1 */
    double alpha, unit, alike;
    int64_t d;
} keyTerms;

/* Terms of one query head of the KV head, where each has an accumulator: the others' weights are 0. */
static void splitTerms(dkv_twin *t, int64_t part, keyTerms *k) {
    int64_t n = t->t.n;
    for (int64_t i = 0; i < t->b.m; i++) {
        bool mine = i % t->parts == part;
        for (int64_t j = i * n; j < (i + 1) * n; j++) {
            t->wide[j] = mine ? k->w[j] : 0;
            t->tmp[j] = mine ? k->var[j] : 0;
        }
    }
    k->w = t->wide;
    k->var = t->tmp;
}

static void addKeySum(dkv_twin *t, const dkv_keySum *sum, int64_t part, keyTerms k) {
    int64_t m = t->b.m, n = t->t.n, d = k.d;
    double *x = sum->x + t->t.k_row * sum->ld, *v = sum->var + t->t.k_row * sum->ld, parts = (double)t->parts;
    double all = dkv_sumOf(k.mean2, d);
    for (int64_t j = 0; j < n; j++) memcpy(t->before + j * d, x + j * sum->ld, sizeof *x * (size_t)d);
    if (t->parts > 1) splitTerms(t, part, &k);
    dkv_addKeys(&t->h, &t->b, &t->t, k.alpha, k.w, k.y, d, t->b.finite, x, sum->ld);
    if (!t->quick)
        cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, (int)n, (int)d, (int)m, 1, k.var, (int)n, k.y2,
                    (int)d, 0, t->prod, (int)d);
    for (int64_t j = 0; j < n; j++) {
        double *at = v + j * sum->ld, each = all > 0 ? k.col_var[j] * k.unit / all : 0;
        if (t->quick) dkv_twinAddScaled(k.mean2, d, each, at);
        else dkv_twinAddFloats(t->prod + j * d, d, k.unit * k.units[j] * k.units[j], at);
        dkv_chainStep step =
            dkv_evenStep(t->col_n[j] / parts, k.alpha * k.alpha * k.col2[j] / parts, k.alike, t->z.fold_dkv);
        dkv_twinChain(&t->z, step, d, t->before + j * d, x + j * sum->ld, k.mean2, at);
    }
    if (!(t->z.gain > 0)) return;
    loseKeySum(t, sum, k.alpha, k.w, k.y, d);
}

static const float *equalRows(const dkv_twin *t, bool of_dv) {
    const dualkv_segment *seg = &t->l->view.segments[t->b.node];
    return (t->t.k_row >= seg->k_start ? t->equal_own : t->equal_any)[of_dv] + t->b.q_row * t->h.g;
}

void dkv_twinBackwardKeys(dkv_twin *t) {
    int64_t m = t->b.m, n = t->t.n;
    const float *equal = equalRows(t, false), *equal_v = equalRows(t, true);
    double scale = t->p->scale, u2 = t->z.unit2, alike = dkv_twinAlike(dkv_twinMean(equal, m)),
           alike_v = dkv_twinAlike(dkv_twinMean(equal_v, m));
    double p_var = u2 * (t->quick ? 1 : t->do_unit * t->do_unit);
    double ds_var = u2 * t->ds_more * t->ds_more * scale * scale * (t->quick ? 1 : t->q_unit * t->q_unit);
    for (int64_t i = 0; i < m && !t->quick; i++) {
        if (equal_v[i] != 1) dkv_twinWeigh(t->w + i * n, n, equal_v[i]);
        if (equal[i] != 1) dkv_twinWeigh(t->w2 + i * n, n, equal[i]);
    }
    for (int64_t e = 0; e < t->parts; e++) {
        addKeySum(t, &t->dv[e], e,
                  (keyTerms){t->s, t->b.d_o, t->do_mean2, t->col_p2, t->col_vp, t->w, t->do2, t->p_units,
                             1, p_var, alike_v,
                             t->p->dv});
        addKeySum(t, &t->dk[e], e,
                  (keyTerms){t->dp, t->b.q, t->q_mean2, t->col_ds2, t->col_vds, t->w2, t->q2,
                             t->p_units, scale, ds_var,
                             alike, t->p->dqk});
    }
}

/* Product of float copies of a tile's [m, n] and its keys' [n, d]. */
static void tileProduct(dkv_twin *t, const float *w, const float *x, int64_t d) {
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, (int)t->b.m, (int)d, (int)t->t.n, 1, w,
                (int)t->t.n, x, (int)d, 0, t->prod, (int)d);
}

/* Variance of dQ's terms (a2), and P k (a1): what delta's error is multiplied by. */
static void addQueryTerms(dkv_twin *t) {
    int64_t m = t->b.m, n = t->t.n, d = t->p->dqk;
    double scale = t->p->scale, var = t->z.unit2 * t->ds_unit * t->ds_unit * scale * scale,
           all = dkv_sumOf(t->k_mean2, d);
    if (t->quick) {
        for (int64_t i = 0; i < m && all > 0; i++)
            dkv_twinAddScaled(t->k_mean2, d, var * t->dq.var[i] / all, t->dq.a2 + i * d);
        return;
    }
    tileProduct(t, t->sq, t->k2, d);
    dkv_twinAddFloats(t->prod, m * d, var * t->k_unit * t->k_unit, t->dq.a2);
    dkv_twinFloats(t->s, m * n, 1, t->tmp);
    dkv_twinFloats(t->t.k, n * d, 1 / t->k_unit, t->k1);
    tileProduct(t, t->tmp, t->k1, d);
    dkv_twinAddFloats(t->prod, m * d, scale * t->k_unit, t->dq.a1);
}

void dkv_twinBackwardQueries(dkv_twin *t) {
    int64_t m = t->b.m, n = t->t.n, d = t->p->dqk;
    double alike = dkv_twinAlike(dkv_twinMean(t->equal_kv + t->t.k_row, n)), scale = t->p->scale;
    if (t->part.dq_block) dkv_twinPartQueries(t);
    memcpy(t->before, t->dq.acc, sizeof(double) * (size_t)(m * d));
    dkv_addRows(&t->h, &t->b, &t->t, scale, t->dp, t->t.k, d, t->t.finite, t->dq.acc, d);
    addQueryTerms(t);
    for (int64_t i = 0; i < m; i++) {
        dkv_chainStep k = dkv_evenStep(t->dq.now[i], t->row_ds2[i], alike, t->z.fold_dq);
        if (!t->quick)
            k = dkv_walkStep(t->dp + i * n, n, t->z.stuck * sqrt(t->row_ds2[i]), alike, t->z.fold_dq);
        k.squares *= scale * scale;
        dkv_twinChain(&t->z, k, d, t->before + i * d, t->dq.acc + i * d, t->k_mean2, t->dq.chain + i * d);
    }
    if (!(t->z.gain > 0)) return;
    dkv_twinMagnitudes(t->dp, m * n, scale, t->tmp);
    dkv_twinMagnitudes(t->t.k, n * d, 1, t->k1);
    tileProduct(t, t->tmp, t->k1, d);
    for (int64_t i = 0; i < m; i++)
        for (int64_t e = i * d; e < (i + 1) * d; e++)
            t->dq.loss[e] +=
                dkv_twinLoss(&t->z, t->z.fold_dq, t->before[e], t->dq.acc[e], t->dq.now[i], t->prod[e]);
}

/* A power of two at or above x. */
static double powerAbove(double x) {
    int e;
    if (!(x > 0) || !isfinite(x)) return 1;
    frexp(x, &e);
    return ldexp(1, e < -500 ? -500 : e > 500 ? 500 : e);
}

/* Largest exponent of P of each key over the rows. */
DKV_CLONES
static void largestExponents(const double *restrict s, double lse, int64_t n, double *restrict top) {
#pragma GCC ivdep
    for (int64_t j = 0; j < n; j++) top[j] = s[j] - lse > top[j] ? s[j] - lse : top[j];
}

/* Powers of two near each key's largest P, so that variances in float keep their range: P may be e^-100 for all keys of a
 * tile, or of a response behind a prompt that takes the mass. Returns the largest. */
static double pickKeyUnits(dkv_twin *t) {
    double top[DKV_TILE_KEYS], most = 0;
    for (int64_t j = 0; j < t->t.n; j++) top[j] = -INFINITY;
    for (int64_t i = 0; i < t->b.m; i++)
        largestExponents(t->s + i * t->t.n, t->lse_kernel[i] == -INFINITY ? 0 : t->lse_kernel[i], t->t.n, top);
    for (int64_t j = 0; j < t->t.n; j++) {
        double unit = top[j] > -INFINITY && top[j] < 300 ? powerAbove(exp(fmax(top[j], -250))) : 1;
        most = top[j] > -INFINITY && unit > most ? unit : most;
        t->p_units[j] = unit;
        t->over_p[j] = 1 / (t->z.unit2 * unit * unit);
    }
    return most > 0 ? most : 1;
}

static void clearColumns(dkv_twin *t) {
    double *all[] = {t->col, t->col_n, t->col_p2, t->col_ds2, t->col_vp, t->col_vds};
    for (size_t e = 0; e < sizeof all / sizeof *all; e++) memset(all[e], 0, sizeof(double) * (size_t)t->t.n);
}

/* Powers of two near the largest P, dS over P, and dS, by which float variances are divided. */
static void pickUnits(dkv_twin *t) {
    double top = t->do_unit * t->v_unit;
    t->ds_more = t->ds_unit = 1;
    if (t->quick) return;
    for (int64_t i = 0; i < t->b.m; i++) {
        double x = fabs(t->delta[i]);
        top = x > top && x <= DBL_MAX ? x : top;
    }
    t->ds_more = powerAbove(top);
    t->ds_unit = t->ds_more * pickKeyUnits(t);
}

void dkv_twinBackwardPairs(dkv_twin *t) {
    pickUnits(t);
    if (!t->quick)
        dkv_chainSquares(&t->z, t->o1, t->v1, t->b.m, t->t.n, t->p->dv, t->dot_dp, t->sq_dp);
    clearColumns(t);
}

/* exp(s - LSE): from forward's exp(s - ref) where it was taken just before and both references are near. */
static void probabilities(const dkv_twin *t, const double *s, double lse, double *p) {
    for (int64_t e = 0; e < (t->has_exact ? t->n_cuts : 0); e++)
        if (t->exact_ref[e] != -INFINITY && !(fabs(t->exact_ref[e] - lse) < 300)) {
            dkv_vexpShift(s, lse, p, (size_t)t->t.n);
            return;
        }
    if (!t->has_exact) dkv_vexpShift(s, lse, p, (size_t)t->t.n);
    for (int64_t e = 0; e < (t->has_exact ? t->n_cuts : 0); e++) {
        double by = exp(t->exact_ref[e] - lse);
        for (int64_t j = t->cuts[e]; j < t->cuts[e + 1]; j++) p[j] = t->exact[j] * by;
    }
}

void dkv_twinBackwardRow(dkv_twin *t, int64_t i) {
    int64_t n = t->t.n, at = t->quick ? 0 : i * n; /* quick: the variances of this row alone */
    double *s = t->s + i * n, *dp = t->dp + i * n, lse = t->lse_kernel[i] == -INFINITY ? 0 : t->lse_kernel[i];
    dpRow(t, i);
    const double u = t->lse_stands_in ? dkv_spacingAt(t->ulp_lse, fabs(lse)) : 0; /* maximum, logarithm, sum: u^2/12 each */
    pairRow r = {s,
                 dp,
                 t->wide,
                 t->p->softcap > 0 ? t->cap + i * n : NULL,
                 t->w + at,
                 t->w2 + at,
                 t->sq + at,
                 t->z.exp2 + u * u / 4};
    probabilities(t, s, lse, t->wide);
    if (t->quick)
        quickPairs(t, n, &r, lse, t->delta[i], t->delta_var[i]);
    else
        pairVariances(t, n, &r, lse, t->delta[i], t->delta_var[i]);
    t->dq.now[i] = sumPairs(t, i, n, s, dp);
    if (t->quick) sumVariances(t, i, n, equalRows(t, true)[i], equalRows(t, false)[i], t->w, t->w2);
}

void dkv_twinBeginBackward(dkv_twin *t) {
    int64_t m = t->b.m, d = t->p->dqk;
    double *zeros[] = {t->dq.acc, t->dq.chain, t->dq.loss, t->dq.a1, t->dq.a2};
    dkv_getLse(&t->h, &t->b, t->kernel_lse, t->lse_kernel);
    if (t->a->delta_exact)
        exactOutputs(t);
    else
        dkv_getRows(&t->h, &t->b, t->kernel_o, t->p->dv, t->o_kernel);
    for (int64_t i = 0; i < m; i++) {
        deltaRow(t, i);
        if (t->in->sink && t->sink_sum) sinkRow(t, i);
    }
    for (size_t e = 0; e < sizeof zeros / sizeof *zeros; e++)
        memset(zeros[e], 0, sizeof(double) * (size_t)(m * d));
    if (t->part.dq_block) memset(t->dq_steps, 0, sizeof(double) * (size_t)(m * d));
    t->dq_at = -1;
    if (!t->quick) dkv_twinSquares(t->b.d_o, m, t->p->dv, NULL, t->do2, &t->do_unit);
    if (!t->quick) dkv_twinSquares(t->b.q, m, d, NULL, t->q2, &t->q_unit);
    dkv_unitRows(t->b.d_o, m, t->p->dv, t->o1, t->o_norm);
    /* Rows without a gradient (the prompt's, in a response's copy of it) add nothing to a key, and are no part of the mean. */
    dkv_twinMeans(t->b.d_o, m, t->p->dv, t->o_norm, t->do_mean2);
    dkv_twinMeans(t->b.q, m, d, t->in->d_lse ? NULL : t->o_norm, t->q_mean2);
}

void dkv_twinEndBackward(dkv_twin *t) {
    int64_t d = t->p->dqk;
    bool stored = t->scale_exact && t->a->out_format == DUALKV_FP32;
    double terms = (double)(t->p->nodes[t->b.node].context + t->p->nodes[t->b.node].len);
    for (int64_t i = 0; i < t->b.m; i++)
        for (int64_t e = i * d; e < (i + 1) * d; e++) {
            double x = t->dq.acc[e] - t->dq.loss[e], u = stored ? 0 : dkv_spacingAt(t->ulp_out, fabs(x));
            double var = t->dq.chain[e] + t->dq.a2[e] + t->delta_var[i] * t->dq.a1[e] * t->dq.a1[e];
            var += dkv_twinFlushed(&t->z, t->z.fold_dq, x, t->p->scale, terms);
            if (t->part.dq_block) var += t->dq_steps[e];
            t->dq.acc[e] = x;
            t->dq.chain[e] = dkv_twinStored(x, var, u, t->a->out_format);
        }
    dkv_putRows(&t->h, &t->b, t->dq.acc, d, t->out->twin.dq);
    dkv_putRows(&t->h, &t->b, t->dq.chain, d, t->out->sigma2.dq);
}
