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
    double raw[256], sum = 0, var = 0, prod = t->a->delta_exact ? t->u.z.unit2 : t->u.z.prod2;
    const double tiny = t->a->unit > 0x1p-40 ? 0x1p-298 : 0;
    if (t->a->in_format != DUALKV_EXACT) { /* operands of matrix products alone are rounded */
        dkv_decodeRows(t->in->d_o, t->p->dtype, t->b.q_row + i / t->h.g, 1, t->p->hq, head, d, raw);
        d_o = raw;
    }
    for (int64_t c = 0; c < d; c++) {
        double x = o[c] * d_o[c], old = sum;
        sum += x;
        var += (old != 0 && x != 0 ? t->u.z.unit2 * sum * sum : 0) + prod * x * x;
        var += x != 0 && fabs(x) < 0x1p-126 ? tiny : 0; /* a product rounded to fp32's smallest unit */
    }
    if (t->a->delta_exact)
        for (int64_t c = 0; c < d; c++) var += t->o_var[i * d + c] * d_o[c] * d_o[c];
    if (t->in->d_lse) {
        double by = t->in->d_lse[head * t->l->view.tq + t->b.q_row + i / t->h.g];
        sum -= by;
        t->delta_own[i] = by != 0 && isfinite(sum) ? t->u.z.unit2 * sum * sum : 0;
        var += t->delta_own[i];
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
    double rel = p > 0 ? t->u.z.exp2 + t->u.z.unit2 * (x * x + 1) : 0, old = t->sink_sum[g];
    t->sink_sum[g] -= y;
    t->sink_var[g] += p * p * t->delta_var[i] + y * y * rel;
    if (p < 0x1p-126 && t->a->unit > 0x1p-40) /* below fp32's normal numbers p may be anything from 0 on */
        t->sink_var[g] += (p * p + 0x1p-298) * t->delta[i] * t->delta[i];
    if (y != 0 && fabs(y) < 0x1p-126 && t->a->unit > 0x1p-40) t->sink_var[g] += 0x1p-298;
    if (old != 0 && y != 0) t->sink_var[g] += t->u.z.unit2 * t->sink_sum[g] * t->sink_sum[g];
}

typedef struct pairRow { /* of one row: [n] each */
    double *s, *ds;        /* s becomes round(P); ds: dP becomes round(dS) */
    const double *p, *cap; /* p: exp(s - LSE) */
    float *w_p, *w_ds, *w_row;
    dkv_twin_row row;
} pairRow;

/* Variances of what the roundings leave: w_p of P over unit2 p_unit^2 and w_ds of dS over unit2 (ds_more p_unit)^2, of the
 * key; w_row of dS without delta's part over unit2 ds_unit^2. Masked pairs are 0 by name. */
static inline __attribute__((always_inline)) void pairVariancesOf(const dkv_twin *t, int64_t n, const pairRow *r,
                                                                  bool p_rounded, bool ds_rounded, bool capped) {
    const double unit2 = t->u.z.unit2, unit = t->ds_unit, more2 = 1 / (t->ds_more * t->ds_more);
    const double over_row = 1 / (unit2 * unit * unit), *over = t->over_p;
    const double *vs = t->vs, *vd = t->vd, *cap = r->cap, *in_p = r->p;
    double *restrict s = r->s, *restrict dp = r->ds;
    float *restrict w_p = r->w_p, *restrict w_ds = r->w_ds, *restrict w_row = r->w_row;
    const dkv_twin_row row = r->row;
    dkv_twin_units u = t->u;
    u.p_rounded = p_rounded;
    u.ds_rounded = ds_rounded;
    u.softcap = capped ? u.softcap : 0;
#pragma GCC ivdep
    for (int64_t j = 0; j < n; j++) {
        const bool sees = s[j] > -DBL_MAX;
        const dkv_twin_pair x = dkv_formulaTwinPair(&u, &row, s[j], in_p[j], dp[j], capped ? cap[j] : 0, vs[j], vd[j]);
        /* 0 by name: of what is not seen, or a row's LSE and delta, any may be no number */
        w_p[j] = sees ? (float)(x.w_p * over[j]) : 0;
        w_ds[j] = sees ? (float)(x.w_ds * over[j] * more2) : 0;
        w_row[j] = sees ? (float)(x.w_row * over_row) : 0;
        dp[j] = sees ? x.ds : 0;
        s[j] = sees ? x.p : 0;
    }
}

DKV_CLONES
static void pairVariances(const dkv_twin *t, int64_t n, const pairRow *r) {
    bool p = t->u.p_rounded, ds = t->u.ds_rounded, capped = r->cap != NULL;
    if (!p && !ds && !capped) pairVariancesOf(t, n, r, false, false, false);
    else if (p && ds && !capped) pairVariancesOf(t, n, r, true, true, false);
    else pairVariancesOf(t, n, r, p, ds, capped);
}

/* The same in quick mode: no softcap, P and dS rounded, nothing subnormal that matters beside their own
 * spacing. */
DKV_CLONES
static void quickPairs(const dkv_twin *t, int64_t n, const pairRow *r) {
    const double lse = r->row.lse, delta = r->row.delta, delta_var = r->row.delta_var;
    const double by = t->u.ds_by, inv = 1 / by, scaled = t->u.z.unit2 + t->u.ds_unit2;
    dkv_rounder f_p = t->u.round_p, f_ds = t->u.round_ds;
    dkv_spacing u_p = t->u.ulp_p, u_ds = t->u.ulp_ds;
    double unit2 = t->u.z.unit2, exp2 = r->row.exp2, over = 1 / unit2;
    const double *vs = t->vs, *vd = t->vd, *in_p = r->p;
    double *restrict s = r->s, *restrict dp = r->ds;
    float *restrict w_p = r->w_p, *restrict w_ds = r->w_ds;
#pragma GCC ivdep
    for (int64_t j = 0; j < n; j++) {
        bool sees = s[j] > -DBL_MAX;
        double x = sees ? s[j] - lse : 0, p = sees ? in_p[j] : 0, dev = sees ? dp[j] - delta : 0;
        double rel = vs[j] + unit2 * x * x + exp2, p2 = p * p, ds = p * dev;
        double e2 = ds * ds * (rel + scaled) + p2 * ((sees ? vd[j] : 0) + unit2 * dev * dev + delta_var);
        double y = dkv_roundBy(f_ds, ds * by) * inv, q = dkv_roundBy(f_p, p);
        w_p[j] = (float)(dkv_flip(p, q, p2 * rel, dkv_spacingAt(u_p, p)) * over);
        w_ds[j] = (float)(dkv_flip(ds, y, e2, dkv_spacingAt(u_ds, fabs(ds * by)) * inv) * over);
        dp[j] = y;
        s[j] = q;
    }
}

/* Column sums so far of row i's pairs: P, terms that move it, squares. Returns how many terms move the row's
 * sum. */
DKV_CLONES
static double sumPairs(dkv_twin *t, int64_t i, int64_t n, const double *p, const double *ds) {
    double stuck = t->u.z.stuck, squares, *col = t->col, *col_n = t->col_n, *col_p2 = t->col_p2,
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
    double step = t->u.z.step2;
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
        t->vd[j] = t->u.z.step2 * t->fit_dp.var[bin] * sq[j] * size;
        if (t->u.z.gain > 0) dp[j] += t->fit_dp.gain[bin] * dot[j] * sqrt(size);
        if (!t->u.s_rounded) continue;
        double y = dkv_roundBy(t->u.round_s, dp[j]);
        t->vd[j] = dkv_flip(dp[j], y, t->vd[j], dkv_spacingAt(t->u.ulp_s, fabs(dp[j])));
        dp[j] = y;
    }
}

/* The expected loss of the same chains, or what it will be made of: sum of |terms| in `prod`. */
static void loseKeySum(dkv_twin *t, const dkv_keySum *sum, double alpha, const double *w, const double *y,
                       int64_t d) {
    int64_t m = t->b.m, n = t->t.n;
    double *x = sum->x + t->t.k_row * sum->ld;
    float *y1 = t->flat;
    dkv_twinMagnitudes(w, m * n, alpha, t->tmp);
    dkv_twinMagnitudes(y, m * d, 1, y1);
    cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, (int)n, (int)d, (int)m, 1, t->tmp, (int)n, y1,
                (int)d, 0, t->prod, (int)d);
    for (int64_t e = 0, at = t->t.k_row * d; t->anyhow && e < n * d; e++, at++) {
        const double more = x[e / d * sum->ld + e % d] - t->before[e];
        sum->size[at] += t->prod[e];
        sum->spread[at] += more * more;
    }
    for (int64_t j = 0; j < n && !t->anyhow; j++)
        for (int64_t c = 0; c < d; c++)
            x[j * sum->ld + c] -= dkv_twinLoss(&t->u.z, t->u.z.fold_dkv, t->before[j * d + c], x[j * sum->ld + c],
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
        dkv_chainStep step = dkv_evenStep(t->col_n[j] / parts, k.alpha * k.alpha * k.col2[j] / parts, k.alike,
                                          t->u.z.fold_dkv, t->key_n[t->t.k_row + j] / parts);
        dkv_twinChain(&t->u.z, step, d, t->before + j * d, x + j * sum->ld, k.mean2, at);
        if (!t->anyhow) continue;
        dkv_twinAddScaled(k.mean2, d, dkv_twinPathWithin(&t->u.z, t->u.z.fold_dkv, step.count, step.squares), at);
        dkv_twinAddScaled(k.mean2, d, step.squares, sum->square + (t->t.k_row + j) * d);
    }
    if (!(t->u.z.gain > 0)) return;
    loseKeySum(t, sum, k.alpha, k.w, k.y, d);
}

static const float *equalRows(const dkv_twin *t, bool of_dv) {
    const dualkv_segment *seg = &t->l->view.segments[t->b.node];
    return (t->t.k_row >= seg->k_start ? t->equal_own : t->equal_any)[of_dv] + t->b.q_row * t->h.g;
}

void dkv_twinBackwardKeys(dkv_twin *t) {
    int64_t m = t->b.m, n = t->t.n;
    const float *equal = equalRows(t, false), *equal_v = equalRows(t, true);
    double scale = t->p->scale, u2 = t->u.z.unit2, alike = dkv_twinAlike(dkv_twinMean(equal, m)),
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
    for (int64_t j = 0; j < n; j++) {
        t->key_n[t->t.k_row + j] += t->col_n[j];
        t->key_n2[t->t.k_row + j] += t->col_n[j] * t->col_n[j];
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
    double scale = t->p->scale, var = t->u.z.unit2 * t->ds_unit * t->ds_unit * scale * scale,
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
        const double fold = t->u.z.fold_dq, done = t->dq.terms[i];
        dkv_chainStep k = dkv_evenStep(t->dq.now[i], t->row_ds2[i], alike, fold, done);
        if (!t->quick) k = dkv_walkStep(t->dp + i * n, n, t->u.z.stuck * sqrt(t->row_ds2[i]), alike, fold, done);
        t->dq.terms[i] += k.count;
        k.squares *= scale * scale;
        dkv_twinChain(&t->u.z, k, d, t->before + i * d, t->dq.acc + i * d, t->k_mean2, t->dq.chain + i * d);
    }
    if (!(t->u.z.gain > 0)) return;
    dkv_twinMagnitudes(t->dp, m * n, scale, t->tmp);
    dkv_twinMagnitudes(t->t.k, n * d, 1, t->k1);
    tileProduct(t, t->tmp, t->k1, d);
    for (int64_t i = 0; i < m; i++) {
        const double now = t->dq.now[i], within = dkv_twinPathWithin(&t->u.z, t->u.z.fold_dq, now, t->row_ds2[i] * scale * scale);
        t->dq.n[i] += now;
        t->dq.n2[i] += now * now;
        if (!t->part.dq_block) dkv_twinAddScaled(t->k_mean2, d, within, t->dq.chain + i * d);
        dkv_twinAddScaled(t->k_mean2, d, t->row_ds2[i] * scale * scale, t->dq.square + i * d);
        for (int64_t e = i * d; e < (i + 1) * d; e++) {
            const double more = t->dq.acc[e] - t->before[e];
            t->dq.size[e] += t->prod[e];
            t->dq.spread[e] += more * more;
            if (t->part.dq_block)
                t->dq.loss[e] += dkv_twinLoss(&t->u.z, t->u.z.fold_dq, t->before[e], t->dq.acc[e], now, t->prod[e]);
        }
    }
}

/* The whole chain's loss, whatever its order, and how far off that may be. */
static double loseQuery(dkv_twin *t, int64_t i, int64_t e) {
    const double n = t->dq.n[i], x = t->dq.acc[e];
    if (t->part.dq_block || n < 1) return 0;
    const dkv_twin_lost lost =
        dkv_twinLossAnyhow(&t->u.z, t->u.z.last_ds, t->u.z.fold_dq, x, n, t->dq.size[e], t->dq.square[e]);
    t->dq.loss[e] = lost.mean;
    return dkv_twinPath(&t->u.z, t->u.z.fold_dq, x, n, t->dq.size[e], t->dq.spread[e], t->dq.n2[i] / (n * n)) + lost.var;
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
        t->over_p[j] = 1 / (t->u.z.unit2 * unit * unit);
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
        dkv_chainSquares(&t->u.z, t->o1, t->v1, t->b.m, t->t.n, t->p->dv, t->dot_dp, t->sq_dp);
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

static dkv_twin_row pairRowOf(const dkv_twin *t, int64_t i, double lse, double exp2) {
    dkv_twin_row r = {lse, exp2, t->delta[i], t->delta_var[i], 1, 0, 0};
    if (!t->in->d_lse || t->u.ds_rounded) return r;
    const dualkv_segment *seg = &t->l->view.segments[t->b.node];
    const int64_t row = t->b.q_row * t->h.g + i, head = t->h.kvh * t->h.g + i % t->h.g;
    const double *mean = t->t.k_row >= seg->k_start ? t->own_d_lse : t->any_d_lse;
    r.alike = equalRows(t, true)[i] / equalRows(t, false)[i];
    r.shift = mean[row] - t->in->d_lse[head * t->l->view.tq + t->b.q_row + i / t->h.g];
    r.own_var = t->delta_own[i];
    return r;
}

void dkv_twinBackwardRow(dkv_twin *t, int64_t i) {
    int64_t n = t->t.n, at = t->quick ? 0 : i * n; /* quick: the variances of this row alone */
    double *s = t->s + i * n, *dp = t->dp + i * n, lse = t->lse_kernel[i] == -INFINITY ? 0 : t->lse_kernel[i];
    dpRow(t, i);
    pairRow r = {s,
                 dp,
                 t->wide,
                 t->p->softcap > 0 ? t->cap + i * n : NULL,
                 t->w + at,
                 t->w2 + at,
                 t->sq + at,
                 pairRowOf(t, i, lse, t->u.z.exp2 + (t->lse_stands_in ? dkv_twinStandsIn(&t->u, lse) : 0))};
    probabilities(t, s, lse, t->wide);
    if (t->quick)
        quickPairs(t, n, &r);
    else
        pairVariances(t, n, &r);
    t->dq.now[i] = sumPairs(t, i, n, s, dp);
    if (t->quick) sumVariances(t, i, n, equalRows(t, true)[i], equalRows(t, false)[i], t->w, t->w2);
}

void dkv_twinBeginBackward(dkv_twin *t) {
    int64_t m = t->b.m, d = t->p->dqk;
    double *zeros[] = {t->dq.acc, t->dq.chain, t->dq.loss, t->dq.a1, t->dq.a2, t->dq.size, t->dq.spread, t->dq.square};
    dkv_getLse(&t->h, &t->b, t->kernel_lse, t->lse_kernel);
    if (t->a->delta_exact)
        exactOutputs(t);
    else
        dkv_getRows(&t->h, &t->b, t->kernel_o, t->p->dv, t->o_kernel);
    for (int64_t i = 0; i < m; i++) {
        deltaRow(t, i);
        if (t->in->sink && t->sink_sum) sinkRow(t, i);
    }
    for (size_t e = 0; e < (t->u.z.gain > 0 ? 8 : 5); e++) memset(zeros[e], 0, sizeof(double) * (size_t)(m * d));
    memset(t->dq.terms, 0, sizeof(double) * (size_t)m);
    memset(t->dq.n, 0, sizeof(double) * (size_t)m);
    memset(t->dq.n2, 0, sizeof(double) * (size_t)m);
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
    bool stored = t->u.scale_exact && t->a->out_format == DUALKV_FP32;
    double terms = (double)(t->p->nodes[t->b.node].context + t->p->nodes[t->b.node].len);
    for (int64_t i = 0; i < t->b.m; i++)
        for (int64_t e = i * d; e < (i + 1) * d; e++) {
            double path = t->u.z.gain > 0 ? loseQuery(t, i, e) : 0, x = t->dq.acc[e] - t->dq.loss[e];
            double u = stored ? 0 : dkv_spacingAt(t->u.ulp_out, fabs(x)), var = path + t->dq.chain[e] + t->dq.a2[e] + t->delta_var[i] * t->dq.a1[e] * t->dq.a1[e];
            var += dkv_twinFlushed(&t->u.z, t->u.z.fold_dq, x, t->p->scale, terms);
            if (t->part.dq_block) var += t->dq_steps[e];
            t->dq.acc[e] = x;
            t->dq.chain[e] = dkv_twinStored(x, var, u, t->a->out_format);
        }
    dkv_putRows(&t->h, &t->b, t->dq.acc, d, t->out->twin.dq);
    dkv_putRows(&t->h, &t->b, t->dq.chain, d, t->out->sigma2.dq);
}
