/* bound_terms.c: the bound's formulas, a row of pairs at a time. Plain loops that vectorise; same bits at any
 * width. */
#include <math.h>

#include "bound_formula.h"
#include "clones.h"

DKV_CLONES void dkv_sigmaRow(const dkv_units *t, double slope, double distance, int64_t n, const double *s,
                         const double *x, double *sigma) {
    const dkv_sigma_units y = dkv_formulaSigmaUnits(t);
    if (t->cap <= 0 && slope <= 0) {
        for (int64_t j = 0; j < n; j++) {
            double z = dkv_formulaPlainSigma(y, s[j], x[j]);
            sigma[j] = s[j] > -(double)INFINITY ? z : 0;
        }
        return;
    }
    for (int64_t j = 0; j < n; j++) {
        double bias = slope * fabs(distance - (double)j);
        sigma[j] = s[j] > -(double)INFINITY ? dkv_formulaSigma(t, y, s[j], x[j], slope, bias) : 0;
    }
}

DKV_CLONES void dkv_forwardRow(const dkv_units *t, dkv_forward_row *r, int64_t n, const double *s,
                           const double *sigma, double *p) {
    double x[DKV_TILE_KEYS] = {0}, h[DKV_TILE_KEYS];
    const double u = t->u, m = dkv_formulaLateMax(t, r->max), am = fabs(r->max), close = 1 + 8 * u;
    const double by_h = (1 + t->exp) * (1 + r->kappa), by_p = t->exp * (1 + r->kappa) + r->kappa, w0 = r->w0;
    for (int64_t j = 0; j < n; j++) {
        double y = dkv_formulaForwardX(u, close, m, am, s[j], sigma[j]);
        x[j] = s[j] > -(double)INFINITY ? y : 0;
        p[j] = s[j] > -(double)INFINITY ? p[j] : 0;
    }
    double top = dkv_maxOf(x, n);
    if (top <= 1)
        for (int64_t j = 0; j < n; j++) h[j] = dkv_formulaGrowSmall(p[j], x[j]);
    else
        for (int64_t j = 0; j < n; j++) h[j] = dkv_formulaGrow(p[j], s[j] - r->lse, x[j]);
    for (int64_t j = 0; j < n; j++) {
        double w = dkv_formulaForwardWeight(by_h, by_p, w0, h[j], p[j]);
        p[j] = s[j] > -(double)INFINITY ? w : 0;
    }
    r->sum_h += dkv_sumOf(h, n);
    r->top = top > r->top ? top : r->top;
}

DKV_CLONES void dkv_backwardRow(const dkv_units *t, const dkv_backward_row *r, int64_t n, const double *s,
                            const double *sigma, const double *p, const double *z, const double *dp,
                            const double *chain_k, double *wq, double *wk, double *wv) {
    double x[DKV_TILE_KEYS] = {0}, h[DKV_TILE_KEYS], e[DKV_TILE_KEYS], ds[DKV_TILE_KEYS];
    const dkv_grad_units g = dkv_formulaGradUnits(t, r->lse);
    for (int64_t j = 0; j < n; j++) {
        double y = dkv_formulaBackwardX(g, s[j], sigma[j], r->lse, r->tol_lse);
        x[j] = s[j] > -(double)INFINITY ? y : 0;
        wv[j] = s[j] > -(double)INFINITY ? p[j] : 0;
    }
    if (dkv_maxOf(x, n) <= 1)
        for (int64_t j = 0; j < n; j++) h[j] = dkv_formulaGrowSmall(wv[j], x[j]);
    else
        for (int64_t j = 0; j < n; j++) h[j] = dkv_formulaGrow(wv[j], s[j] - r->lse, x[j]);
    for (int64_t j = 0; j < n; j++)
        dkv_formulaPair(t, g, wv[j], h[j], z[j], dp[j], r->delta, r->base, &e[j], &ds[j]);
    for (int64_t j = 0; t->cap > 0 && j < n; j++)
        if (s[j] > -(double)INFINITY)
            dkv_formulaCap(t, s[j], r->slope * fabs(r->distance - (double)j), sigma[j], &e[j], &ds[j]);
    for (int64_t j = 0; j < n; j++) {
        double q, k, v;
        int sees = s[j] > -(double)INFINITY;
        dkv_formulaWeights(t, g, wv[j], h[j], e[j], ds[j], r->chain, chain_k[j], &q, &k, &v);
        wq[j] = sees ? q : 0;
        wk[j] = sees ? k : 0;
        wv[j] = sees ? v : 0;
    }
}

double dkv_sinkForward(const dkv_units *t, double sink, double max) {
    return dkv_formulaSinkForward(t, sink, max);
}

double dkv_sinkBackward(const dkv_units *t, double sink, double lse, double tol_lse) {
    return dkv_formulaSinkBackward(t, sink, lse, tol_lse);
}
