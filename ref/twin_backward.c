/* twin_backward.c: dQ, dK, dV, dSink of the twin, one block of rows, given the kernel's own O and LSE.
 *
 * Errors of a pair (independent): P by its score and exp, dP by its chain. Errors of a row: delta, which moves dS by -P
 * times it for all keys alike: in dQ they add up before they are squared, in dK and dV each row has its own. */
#include <cblas.h>
#include <float.h>
#include <string.h>

#include "twin_impl.h"
#include "vexp.h"

/* delta = dO . O - dLSE of the kernel's own O (or of its O before rounding, where it says so). */
static void deltaRow(dkv_twin *t, int64_t i) {
    int64_t d = t->p->dv, head = t->h.kvh * t->h.g + i % t->h.g;
    const double *o = t->o_kernel + i * d, *d_o = t->b.d_o + i * d;
    double sum = 0, var = 0, prod = t->a->delta_exact ? t->z.unit2 : t->z.prod2;
    for (int64_t c = 0; c < d; c++) {
        double x = o[c] * d_o[c], old = sum;
        sum += x;
        var += (old != 0 && x != 0 ? t->z.unit2 * sum * sum : 0) + prod * x * x;
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

/* O before its rounding. Without the key tile P's roundings in it are not known: the truth, and their variance. */
static void exactOutputs(dkv_twin *t) {
    int64_t m = t->b.m, d = t->p->dv;
    double u = dkv_unitRoundoff(t->a->p_format);
    memcpy(t->o_kernel, t->o_exact, sizeof *t->o_kernel * (size_t)(m * d));
    if (t->out->has_twin[DKV_O]) return;
    dkv_getRows(&t->h, &t->b, t->out->truth.o, d, t->o_kernel);
    for (int64_t e = 0; e < m * d; e++)
        t->o_var[e] = DKV_ROUND_VAR * u * u * (t->o_kernel[e] * t->o_kernel[e] + t->v_mean2[e % d] / fmax(t->terms[e / d], 1));
}

/* Row sums that the sink's gradient is made of: -p_sink delta. */
static void sinkRow(dkv_twin *t, int64_t i) {
    int64_t g = i % t->h.g;
    double x = t->in->sink[t->h.kvh * t->h.g + g] - t->lse[i], p = t->lse[i] == -INFINITY ? 0 : exp(x), y = p * t->delta[i];
    double rel = p > 0 ? t->z.exp2 + t->z.unit2 * (x * x + 1) : 0, old = t->sink_sum[g];
    t->sink_sum[g] -= y;
    t->sink_var[g] += p * p * t->delta_var[i] + y * y * rel;
    if (old != 0 && y != 0) t->sink_var[g] += t->z.unit2 * t->sink_sum[g] * t->sink_sum[g];
}

typedef struct pairRow { /* of one row: [n] each */
    const double *s, *dp, *cap;
    double *p, *ds;
    float *w_p, *w_ds, *w_row;
} pairRow;

/* p holds exp(s - LSE): becomes round(P), and ds round(P (dP - delta)); variances of what the roundings leave: w_p of P
 * over unit2 p_unit^2, w_ds of dS over unit2 unit^2, w_row the same without delta's part. Masked pairs are 0 by name. */
DKV_CLONES
static void pairVariances(const dkv_twin *t, int64_t n, const pairRow *r, double lse, double delta, double delta_var,
                          double p_unit, double unit) {
    dkv_rounder f_p = t->round_p, f_ds = t->round_ds;
    dkv_spacing u_p = t->ulp_p, u_ds = t->ulp_ds;
    bool p_rounded = t->p_rounded, ds_rounded = t->ds_rounded, capped = r->cap != NULL;
    double unit2 = t->z.unit2, exp2 = t->z.exp2, over = 1 / (unit2 * p_unit * p_unit);
    double over_ds = 1 / (unit2 * unit * unit), least2 = t->z.least2, flush = t->z.flush;
    double prod = t->z.prod_p2, per_cap = capped ? 2 / (double)t->p->softcap : 0, last = capped ? unit2 : 0;
    const double *vs = t->vs, *vd = t->vd;
    for (int64_t j = 0; j < n; j++) {
        bool sees = r->s[j] > -DBL_MAX;
        double x = sees ? r->s[j] - lse : 0, p = sees ? r->p[j] : 0, last_p = p < flush ? p * p : least2, dev = sees ? r->dp[j] - delta : 0;
        double c = capped && sees ? r->cap[j] : 0, keep = 1 - c * c, slope = keep - c * per_cap; /* d log dS / d score, times keep */
        double rel = unit2 * x * x + exp2, vp = p * p * (vs[j] + rel) + last_p, raw = p * dev, ds = raw * keep, row, e2, part;
        row = p * p * keep * keep * delta_var;
        e2 = raw * raw * (slope * slope * vs[j] + keep * keep * (rel + unit2) + last * (c * c * c * c + 2 * keep * keep));
        e2 += keep * keep * (p * p * (vd[j] + unit2 * dev * dev) + last_p * dev * dev) + row;
        e2 += fabs(ds) < flush ? ds * ds : least2;
        double y = ds_rounded ? dkv_roundBy(f_ds, ds) : ds, q = p_rounded ? dkv_roundBy(f_p, p) : p;
        part = ds_rounded ? dkv_flip(ds, y, e2, dkv_spacingAt(u_ds, fabs(ds))) : e2 + prod * ds * ds;
        vp = p_rounded ? dkv_flip(p, q, vp, dkv_spacingAt(u_p, p)) : vp + prod * p * p;
        r->w_p[j] = (float)(vp * over);
        r->w_ds[j] = (float)(part * over_ds);
        r->w_row[j] = (float)((part > row ? part - row : 0) * over_ds);
        r->ds[j] = y;
        r->p[j] = q;
    }
}

/* Terms that move a sum of P, over a row and over each column so far; and sums of squares. */
static double countTerms(dkv_twin *t, int64_t i, int64_t n, const double *p, const double *ds) {
    double sum = 0, count = 0, squares = 0, stuck = t->z.stuck;
    for (int64_t j = 0; j < n; j++) {
        sum += p[j];
        t->col_n[j] += p[j] > stuck * t->col[j];
        t->col[j] += p[j];
        t->col_p2[j] += p[j] * p[j];
        t->col_ds2[j] += ds[j] * ds[j];
        squares += ds[j] * ds[j];
    }
    for (int64_t j = 0; j < n; j++) count += p[j] > stuck * sum;
    t->row_ds2[i] = squares;
    return count;
}

/* Variance of each dP of row i into vd; the chains' expected loss added to dP. */
static void dpRow(dkv_twin *t, int64_t i) {
    int64_t n = t->t.n;
    const float *sq = t->sq_dp + i * n, *dot = t->dot_dp + i * n;
    double *dp = t->dp + i * n;
    for (int64_t j = 0; j < n; j++) {
        int bin = dkv_chainBin(sq[j]);
        double size = t->o_norm[i] * t->v_norm[j];
        t->vd[j] = t->z.step2 * t->fit_dp.var[bin] * sq[j] * size;
        if (t->z.gain > 0) dp[j] += t->fit_dp.gain[bin] * dot[j] * sqrt(size);
    }
}

/* x += w^T y for rows whose query head is `part` of the KV head's (all where parts = 1), then the chain's variance. */
static void addKeySum(dkv_twin *t, const dkv_keySum *sum, int64_t part, double alpha, const double *w, const double *y,
                      int64_t d, const float *var, const float *y2, double unit,
                      const double *col2, const double *mean2, double alike) {
    int64_t m = t->b.m, n = t->t.n;
    double *x = sum->x + t->t.k_row * sum->ld, *v = sum->var + t->t.k_row * sum->ld;
    for (int64_t j = 0; j < n; j++) memcpy(t->before + j * d, x + j * sum->ld, sizeof *x * (size_t)d);
    if (t->parts > 1) {
        for (int64_t i = 0; i < m; i++) {
            bool mine = i % t->parts == part;
            for (int64_t j = i * n; j < (i + 1) * n; j++) {
                t->wide[j] = mine ? w[j] : 0;
                t->tmp[j] = mine ? var[j] : 0;
            }
        }
        w = t->wide;
        var = t->tmp;
    }
    dkv_addKeys(&t->h, &t->b, &t->t, alpha, w, y, d, t->b.finite, x, sum->ld);
    cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, (int)n, (int)d, (int)m, 1, var, (int)n, y2, (int)d, 0, t->prod,
                (int)d);
    for (int64_t j = 0; j < n; j++)
        for (int64_t c = 0; c < d; c++)
            v[j * sum->ld + c] += t->prod[j * d + c] * unit +
                                  alike * dkv_twinChain(&t->z, t->z.fold_dkv, t->before[j * d + c], x[j * sum->ld + c], t->col_n[j] / (double)t->parts,
                                                alpha * alpha * col2[j] * mean2[c] / (double)t->parts);
}

/* The expected loss of the same chains: sum of |terms| in `prod`. */
static void loseKeySum(dkv_twin *t, const dkv_keySum *sum, double alpha, const double *w, const double *y, int64_t d) {
    int64_t m = t->b.m, n = t->t.n;
    double *x = sum->x + t->t.k_row * sum->ld;
    float *y1 = t->flat;
    for (int64_t e = 0; e < m * n; e++) t->tmp[e] = isfinite(w[e]) ? (float)fabs(alpha * w[e]) : 0;
    for (int64_t e = 0; e < m * d; e++) y1[e] = isfinite(y[e]) ? (float)fabs(y[e]) : 0;
    cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, (int)n, (int)d, (int)m, 1, t->tmp, (int)n, y1, (int)d, 0, t->prod,
                (int)d);
    for (int64_t j = 0; j < n; j++)
        for (int64_t c = 0; c < d; c++)
            x[j * sum->ld + c] -= dkv_twinLoss(&t->z, t->z.fold_dkv, t->before[j * d + c], x[j * sum->ld + c],
                                               t->col_n[j] / (double)t->parts, t->prod[j * d + c]);
}

static void addKeySums(dkv_twin *t, double p_unit, double unit) {
    int64_t m = t->b.m, n = t->t.n, g = t->h.g, dqk = t->p->dqk, dv = t->p->dv;
    const dualkv_segment *seg = &t->l->view.segments[t->b.node];
    const float *equal = (t->t.k_row >= seg->k_start ? t->equal_own : t->equal_any) + t->b.q_row * g;
    double alike = dkv_twinAlike(dkv_twinMean(equal, m));
    double scale = t->p->scale, u2 = t->z.unit2, ds_unit = u2 * unit * unit * scale * scale * t->q_unit * t->q_unit;
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = i * n; j < (i + 1) * n; j++) {
            t->w[j] *= equal[i];
            t->w2[j] *= equal[i];
        }
    for (int64_t e = 0; e < t->parts; e++) {
        addKeySum(t, &t->dv[e], e, 1, t->s, t->b.d_o, dv, t->w, t->do2, u2 * p_unit * p_unit * t->do_unit * t->do_unit, t->col_p2,
                  t->do_mean2, alike);
        if (t->z.gain > 0) loseKeySum(t, &t->dv[e], 1, t->parts > 1 ? t->wide : t->s, t->b.d_o, dv);
        addKeySum(t, &t->dk[e], e, scale, t->dp, t->b.q, dqk, t->w2, t->q2, ds_unit, t->col_ds2, t->q_mean2, alike);
        if (t->z.gain > 0) loseKeySum(t, &t->dk[e], scale, t->parts > 1 ? t->wide : t->dp, t->b.q, dqk);
    }
}

/* dQ so far: the sum, its terms' variance (a2), P k (a1: what delta's error is multiplied by), its chain. */
static void addQueries(dkv_twin *t, double unit) {
    int64_t m = t->b.m, n = t->t.n, d = t->p->dqk;
    double alike = dkv_twinAlike(dkv_twinMean(t->equal_kv + t->t.k_row, n));
    double scale = t->p->scale, var = t->z.unit2 * unit * unit * t->k_unit * t->k_unit * scale * scale;
    memcpy(t->before, t->acc, sizeof(double) * (size_t)(m * d));
    dkv_addRows(&t->h, &t->b, &t->t, scale, t->dp, t->t.k, d, t->t.finite, t->acc, d);
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, (int)m, (int)d, (int)n, 1, t->sq, (int)n, t->k2, (int)d, 0,
                t->prod, (int)d);
    for (int64_t e = 0; e < m * d; e++) t->a2[e] += var * t->prod[e];
    for (int64_t e = 0; e < m * n; e++) t->tmp[e] = isfinite(t->s[e]) ? (float)t->s[e] : 0;
    for (int64_t e = 0; e < n * d; e++) t->k1[e] = isfinite(t->t.k[e]) ? (float)(t->t.k[e] / t->k_unit) : 0;
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, (int)m, (int)d, (int)n, 1, t->tmp, (int)n, t->k1, (int)d, 0,
                t->prod, (int)d);
    for (int64_t e = 0; e < m * d; e++) t->a1[e] += scale * t->k_unit * t->prod[e];
    if (t->z.gain > 0) {
        for (int64_t e = 0; e < m * n; e++) t->tmp[e] = isfinite(t->dp[e]) ? (float)fabs(scale * t->dp[e]) : 0;
        for (int64_t e = 0; e < n * d; e++) t->k1[e] = isfinite(t->t.k[e]) ? (float)fabs(t->t.k[e]) : 0;
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, (int)m, (int)d, (int)n, 1, t->tmp, (int)n, t->k1, (int)d,
                    0, t->prod, (int)d);
    }
    for (int64_t i = 0; i < m; i++)
        for (int64_t c = 0; c < d; c++) {
            int64_t e = i * d + c;
            t->chain[e] += alike * dkv_twinChain(&t->z, t->z.fold_dq, t->before[e], t->acc[e], t->terms[i],
                                         scale * scale * t->row_ds2[i] * t->k_mean2[c]);
            if (t->z.gain > 0) t->loss[e] += dkv_twinLoss(&t->z, t->z.fold_dq, t->before[e], t->acc[e], t->terms[i], t->prod[e]);
        }
}

/* A power of two at or above x. */
static double powerAbove(double x) {
    int e;
    if (!(x > 0) || !isfinite(x)) return 1;
    frexp(x, &e);
    return ldexp(1, e < -500 ? -500 : e > 500 ? 500 : e);
}

/* A power of two near the tile's largest P, so that variances in float keep their range: P may be e^-100 everywhere. */
static double largestP(const dkv_twin *t) {
    double top = -INFINITY;
    for (int64_t i = 0; i < t->b.m; i++) {
        double x = dkv_maxOf(t->s + i * t->t.n, t->t.n) - (t->lse[i] == -INFINITY ? 0 : t->lse[i]);
        top = x > top ? x : top;
    }
    return top > -700 && top < 300 ? powerAbove(exp(top)) : 1;
}

static void backwardTile(dkv_twin *t) {
    int64_t m = t->b.m, n = t->t.n;
    double top = t->do_unit * t->v_unit;
    for (int64_t i = 0; i < m; i++) top = fabs(t->delta[i]) > top && isfinite(t->delta[i]) ? fabs(t->delta[i]) : top;
    double p_unit = largestP(t), unit = powerAbove(top) * p_unit;
    dkv_tileDp(&t->h, &t->b, &t->t, t->dp);
    dkv_chainSquares(&t->z, t->o1, t->v1, m, n, t->p->dv, t->tmp, t->dot_dp, t->sq_dp);
    memset(t->col, 0, sizeof *t->col * (size_t)n);
    memset(t->col_p2, 0, sizeof *t->col * (size_t)n);
    memset(t->col_ds2, 0, sizeof *t->col * (size_t)n);
    memset(t->col_n, 0, sizeof *t->col_n * (size_t)n);
    for (int64_t i = 0; i < m; i++) {
        double *s = t->s + i * n, lse = t->lse[i] == -INFINITY ? 0 : t->lse[i];
        dkv_twinScoreRow(t, i);
        dpRow(t, i);
        pairRow r = {s, t->dp + i * n, t->p->softcap > 0 ? t->cap + i * n : NULL, t->wide + i * n, t->dp + i * n,
                     t->w + i * n, t->w2 + i * n, t->sq + i * n};
        dkv_vexpShift(s, lse, r.p, (size_t)n);
        pairVariances(t, n, &r, lse, t->delta[i], t->delta_var[i], p_unit, unit);
        memcpy(s, r.p, sizeof *s * (size_t)n);
        t->terms[i] = countTerms(t, i, n, s, r.ds);
    }
    addQueries(t, unit);
    addKeySums(t, p_unit, unit);
}

static void finishQueries(dkv_twin *t) {
    int64_t d = t->p->dqk;
    for (int64_t i = 0; i < t->b.m; i++)
        for (int64_t e = i * d; e < (i + 1) * d; e++) {
            double x = t->acc[e] - t->loss[e], u = dkv_spacingAt(t->ulp_out, fabs(x)), var;
            bool stored = t->scale_exact && t->a->out_format == DUALKV_FP32;
            t->acc[e] = x;
            var = t->chain[e] + t->a2[e] + t->delta_var[i] * t->a1[e] * t->a1[e];
            t->chain[e] = dkv_twinStored(x, var, stored ? 0 : u, t->a->out_format);
        }
}

void dkv_twinBackward(dkv_twin *t) {
    int64_t m = t->b.m, d = t->p->dqk;
    double *zeros[] = {t->acc, t->chain, t->loss, t->a1, t->a2};
    dkv_getLse(&t->h, &t->b, t->kernel_lse, t->lse);
    if (t->a->delta_exact) exactOutputs(t);
    else dkv_getRows(&t->h, &t->b, t->kernel_o, t->p->dv, t->o_kernel);
    for (int64_t i = 0; i < m; i++) {
        deltaRow(t, i);
        if (t->in->sink && t->sink_sum) sinkRow(t, i);
    }
    for (size_t e = 0; e < sizeof zeros / sizeof *zeros; e++) memset(zeros[e], 0, sizeof(double) * (size_t)(m * d));
    dkv_twinSquares(t->b.d_o, m, t->p->dv, NULL, t->do2, &t->do_unit);
    dkv_twinSquares(t->b.q, m, d, NULL, t->q2, &t->q_unit);
    dkv_twinMeans(t->b.q, m, d, t->q_mean2);
    dkv_twinMeans(t->b.d_o, m, t->p->dv, t->do_mean2);
    dkv_unitRows(t->b.d_o, m, t->p->dv, t->o1, t->o_norm);
    while (dkv_twinTile(t))
        backwardTile(t);
    finishQueries(t);
    dkv_putRows(&t->h, &t->b, t->acc, d, t->out->twin.dq);
    dkv_putRows(&t->h, &t->b, t->chain, d, t->out->sigma2.dq);
}
