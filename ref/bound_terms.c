/* bound_terms.c: the bound's formulas, a row of pairs at a time. Plain loops that vectorise; same bits at any
 * width. */
#include <math.h>

#include "bound.h"
#include "dtype.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define CLONES
#else
#define CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#endif

#define U64 0x1p-53 /* the oracle's own roundoff */
/* exp(x) - 1 <= x + EXP_SQUARE x^2 on [0, 1]; larger x go through exp */
#define EXP_SQUARE 0.7182818284590453

/* TF32 operands may be rounded or, where fp32 words are fed to the tensor core as they are, cut. */
static double operandError(int32_t format) {
    return format == DUALKV_TF32 ? 2 * dkv_unitRoundoff(format) : dkv_unitRoundoff(format);
}

double dkv_sumError(const dkv_units *t, double n, double steps, double pieces, int64_t fold) {
    double kernel = dkv_stepsError(t->a, fmin(n, steps), pieces, fold);
    return (1 + t->in) * (1 + kernel) * (1 + expm1(n * U64)) - 1;
}

/* Error of a dot product of two rounded operands. */
static double dotError(const dkv_units *t, double n) {
    return (1 + t->in) * (1 + dkv_sumError(t, n, ceil(n / t->a->acc_step), 0, t->a->acc_fold)) - 1;
}

void dkv_makeUnits(const dkv_problem *p, const dualkv_arithmetic *a, dkv_units *t) {
    const int fp64 = a->unit < 0x1p-40;
    *t = (dkv_units){.a = a};
    t->u = a->unit + U64;
    t->us = fmax(a->unit, dkv_unitRoundoff(a->s_format)) + U64;
    t->exp = a->exp_error + 8 * U64;
    t->log = a->log_error + 8 * U64;
    t->tanh = a->tanh_error + 8 * U64;
    t->w = fp64 ? 0 : a->flushes ? 0x1p-126 : 0x1p-149;
    t->w_exp = fp64 ? 0x1p-1022 : 0x1p-126;
    t->in = operandError(a->in_format);
    t->operand = (dkv_underflow(a->in_format) + (a->flushes ? t->w : 0)) / fmax(t->in, 0x1p-24);
    t->dp_round = dkv_unitRoundoff(a->s_format);
    t->p = operandError(a->p_format);
    t->ds = operandError(a->ds_format);
    t->out = dkv_unitRoundoff(a->out_format);
    t->partial = dkv_unitRoundoff(a->partial_format);
    t->w_p = dkv_underflow(a->p_format);
    t->w_ds = dkv_underflow(a->ds_format) + 2 * t->w;
    t->w_out = dkv_underflow(a->out_format) + t->w;
    t->w_partial = dkv_underflow(a->partial_format);
    t->score = dotError(t, p->dqk);
    t->dp = dotError(t, p->dv);
    t->delta = expm1(p->dv * t->u);
    t->scale = fabs((double)p->scale);
    t->cap = p->softcap > 0 ? p->softcap : 0;
}

/* Score with softcap or ALiBi: sigma of z = scale q.k, then of cap tanh(z / cap), then of the bias. */
static double modifiedSigma(const dkv_units *t, double s, double x, double bias, double linear) {
    const double us = t->us, two = us * (2 + us), z = t->cap > 0 ? t->scale * x : fabs(s) + bias;
    double sigma = linear * x + two * z, before = fabs(s + bias);
    if (t->cap > 0) {
        const double h = (sigma * (1 + us) * (1 + us) + two * z) / t->cap, th = h < 0.01 ? h : tanh(h);
        const double y = fmin(fabs((s + bias) / t->cap), 1);
        const double moved = y * th < 1 ? fmin(h, th * (1 - y * y) / (1 - y * th)) : fmin(h, 2);
        const double dt = (moved + t->tanh * (y + moved)) * (1 + us) + us * y;
        sigma = t->cap * dt * (1 + two) + two * before;
    }
    return bias > 0 ? sigma * (1 + us) + us * fabs(s) + (3 * us * (1 + 2 * us)) * bias : sigma;
}

CLONES void dkv_sigmaRow(const dkv_units *t, double slope, double distance, int64_t n, const double *s,
                         const double *x, double *sigma) {
    const double us = t->us, two = us * (2 + us);
    const double linear = t->scale * t->score * (1 + us) * (1 + us);
    const double absolute = t->w * (1 + t->scale * 256);
    if (t->cap <= 0 && slope <= 0) {
        for (int64_t j = 0; j < n; j++) {
            double y = linear * x[j] + two * fabs(s[j]) + absolute;
            sigma[j] = s[j] > -(double)INFINITY ? y : 0;
        }
        return;
    }
    for (int64_t j = 0; j < n; j++) {
        double bias = slope * fabs(distance - (double)j);
        sigma[j] = s[j] > -(double)INFINITY ? modifiedSigma(t, s[j], x[j], bias, linear) + absolute : 0;
    }
}

/* p (exp(x) - 1) where x may be large and p small. */
static double grow(double p, double log_p, double x) {
    return x <= 1 ? p * (x * (1 + EXP_SQUARE * x)) : exp(fmin(log_p + x, 709)) - p;
}

CLONES void dkv_forwardRow(const dkv_units *t, dkv_forward_row *r, int64_t n, const double *s,
                           const double *sigma, double *p) {
    double x[DKV_TILE_KEYS] = {0}, h[DKV_TILE_KEYS];
    const double u = t->u, m = r->max, am = fabs(m), close = 1 + 8 * u;
    const double by_h = (1 + t->exp) * (1 + r->kappa), by_p = t->exp * (1 + r->kappa) + r->kappa, w0 = r->w0;
    for (int64_t j = 0; j < n; j++) {
        double a = fabs(s[j]), y = (sigma[j] + u * (a + (a > am ? a : am)) + 3 * u * (m - s[j])) * close;
        x[j] = s[j] > -(double)INFINITY ? y : 0;
        p[j] = s[j] > -(double)INFINITY ? p[j] : 0;
    }
    double top = dkv_maxOf(x, n);
    if (top <= 1)
        for (int64_t j = 0; j < n; j++) h[j] = p[j] * (x[j] * (1 + EXP_SQUARE * x[j]));
    else
        for (int64_t j = 0; j < n; j++) h[j] = grow(p[j], s[j] - r->lse, x[j]);
    for (int64_t j = 0; j < n; j++) {
        double w = h[j] * by_h + p[j] * by_p + w0;
        p[j] = s[j] > -(double)INFINITY ? w : 0;
    }
    r->sum_h += dkv_sumOf(h, n);
    r->top = top > r->top ? top : r->top;
}

/* Softcap: E and |dS| of dS before its factor f = 1 - t^2 become those of dS. */
static void capFactor(const dkv_units *t, double slope, double distance, int64_t n, const double *s,
                      const double *sigma, double *e, double *ds) {
    for (int64_t j = 0; j < n; j++) {
        if (!(s[j] > -(double)INFINITY)) continue;
        const double y = fmin(fabs((s[j] + slope * fabs(distance - (double)j)) / t->cap), 1);
        const double dt = fmin(sigma[j] / t->cap, 2), f = 1 - y * y, df = dt * (2 * y + dt) + 2 * t->us;
        e[j] = (e[j] * (f + df) + ds[j] * df) * (1 + t->u) + t->u * ds[j] * f;
        ds[j] *= f;
    }
}

CLONES void dkv_backwardRow(const dkv_units *t, const dkv_backward_row *r, int64_t n, const double *s,
                            const double *sigma, const double *z, const double *dp, const double *chain_k,
                            double *wq, double *wk, double *wv) {
    double x[DKV_TILE_KEYS] = {0}, h[DKV_TILE_KEYS], e[DKV_TILE_KEYS], ds[DKV_TILE_KEYS];
    const double u = t->u, close = 1 + 8 * u, al = fabs(r->lse), three = u * (3 + 4 * u), d = r->delta;
    const double l_ds = t->ds, w_ds = t->w_ds, l_p = t->p, w_p = t->w_p + t->w_exp, partial = t->partial;
    const double rel = (1 + t->exp) * (1 + three), rest = (1 + t->exp) * (1 + three) - 1;
    const double by_dp = u + t->dp_round;
    for (int64_t j = 0; j < n; j++) {
        double y = (sigma[j] + r->tol_lse + u * (fabs(s[j]) + al) + 3 * u * fabs(s[j] - r->lse)) * close;
        x[j] = s[j] > -(double)INFINITY ? y : 0;
        wv[j] = s[j] > -(double)INFINITY ? wv[j] : 0;
    }
    if (dkv_maxOf(x, n) <= 1)
        for (int64_t j = 0; j < n; j++) h[j] = wv[j] * (x[j] * (1 + EXP_SQUARE * x[j]));
    else
        for (int64_t j = 0; j < n; j++) h[j] = grow(wv[j], s[j] - r->lse, x[j]);
    for (int64_t j = 0; j < n; j++) {
        double p = wv[j], pe = h[j] * rel + p * rest; /* P's absolute error, the products of dS included */
        double diff = fabs(dp[j] - d), f = t->dp * z[j] + r->base + by_dp * fabs(dp[j]);
        ds[j] = p * diff;
        e[j] = pe * diff + (p + pe) * f + t->w_exp * (diff + f);
    }
    if (t->cap > 0) capFactor(t, r->slope, r->distance, n, s, sigma, e, ds);
    for (int64_t j = 0; j < n; j++) {
        double y = e[j] * (1 + l_ds) + l_ds * ds[j] + w_ds, k = chain_k[j];
        double kk = k + partial * (1 + k), pe = h[j] * rel + wv[j] * rest;
        double q = y * (1 + r->chain) + r->chain * ds[j], key = y * (1 + kk) + kk * ds[j];
        double v = (pe + l_p * (wv[j] + pe)) * (1 + kk) + kk * wv[j] + w_p;
        int sees = s[j] > -(double)INFINITY;
        wq[j] = sees ? q : 0;
        wk[j] = sees ? key : 0;
        wv[j] = sees ? v : 0;
    }
}

double dkv_sinkForward(const dkv_units *t, double sink, double max) {
    const double a = fabs(sink);
    return t->u * (a + fmax(a, fabs(max)) + 3 * (max - sink)) * (1 + 8 * t->u);
}

double dkv_sinkBackward(const dkv_units *t, double sink, double lse, double tol_lse) {
    double x = (tol_lse + t->u * (fabs(sink) + fabs(lse) + 3 * fabs(sink - lse))) * (1 + 8 * t->u);
    return expm1(x) * (1 + t->exp) + t->exp;
}
