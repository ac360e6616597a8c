/* bound_formula.h: the bound's formulas for one pair, one row, one element: the only place where they stand,
 * for the host (bound_terms.c, oracle_bound.c) and for a device. Derivation: TOLERANCE.md, whose symbols the
 * comments use. */
#ifndef DKV_BOUND_FORMULA_H
#define DKV_BOUND_FORMULA_H

#include <math.h>

#include "bound.h"

#ifdef __CUDACC__
#define DKV_FORMULA __host__ __device__ static inline
#else
#define DKV_FORMULA static inline
#endif

#define DKV_U64 0x1p-53 /* the oracle's own roundoff */
/* exp(x) - 1 <= x + EXP_SQUARE x^2 on [0, 1]; larger x go through exp */
#define DKV_EXP_SQUARE 0.7182818284590453
#define DKV_FP32_MAX 0x1.fffffep127

/* dkv_stepsError and dkv_sumError, from what they read of the arithmetic. */
typedef struct dkv_chain_units {
    double acc_unit, unit, in;
    int64_t fold;
} dkv_chain_units;

DKV_FORMULA double dkv_formulaSteps(dkv_chain_units c, double steps, double pieces) {
    double inner = steps, folds = 0;
    if (c.fold > 0 && steps > (double)c.fold) {
        inner = (double)c.fold;
        folds = fmin(steps, ceil(steps / (double)c.fold) + pieces);
    }
    return expm1(inner * c.acc_unit + folds * c.unit);
}

DKV_FORMULA double dkv_formulaSum(dkv_chain_units c, double n, double steps, double pieces) {
    double kernel = dkv_formulaSteps(c, fmin(n, steps), pieces);
    return (1 + c.in) * (1 + kernel) * (1 + expm1(n * DKV_U64)) - 1;
}

/* A magnitude in the products: what is not finite reaches only what is not finite itself. */
DKV_FORMULA double dkv_formulaMagnitude(double x, double add) {
    double a = fabs(x), b = a > 0 ? a + add : 0;
    return a <= DKV_FP32_MAX ? b : 0;
}

/* Score with softcap or ALiBi: sigma of z = scale q.k, then of cap tanh(z / cap), then of the bias. */
DKV_FORMULA double dkv_formulaModified(const dkv_units *t, double s, double x, double bias, double linear) {
    const double us = t->us, two = us * (2 + us), z = t->cap > 0 ? t->scale * x : fabs(s) + bias;
    double sigma = linear * x + two * z, before = fabs(s + bias);
    if (t->cap > 0) {
        const double h = (sigma * (1 + us) * (1 + us) + two * z) / t->cap, th = h < 0.01 ? h : tanh(h);
        const double y = fmin(fabs((s + bias) / t->cap), 1.0);
        const double moved = y * th < 1 ? fmin(h, th * (1 - y * y) / (1 - y * th)) : fmin(h, 2.0);
        const double dt = (moved + t->tanh * (y + moved)) * (1 + us) + us * y;
        sigma = t->cap * dt * (1 + two) + two * before;
    }
    return bias > 0 ? sigma * (1 + us) + us * fabs(s) + (3 * us * (1 + 2 * us)) * bias : sigma;
}

typedef struct dkv_sigma_units {
    double linear, absolute, two;
} dkv_sigma_units;

DKV_FORMULA dkv_sigma_units dkv_formulaSigmaUnits(const dkv_units *t) {
    dkv_sigma_units y = {t->scale * t->score * (1 + t->us) * (1 + t->us), t->w * (1 + t->scale * 256),
                         t->us * (2 + t->us)};
    return y;
}

/* sigma of one score s that is seen; x = sum_c |q||k|; bias = slope |distance|, 0 without ALiBi. */
DKV_FORMULA double dkv_formulaPlainSigma(dkv_sigma_units y, double s, double x) {
    return y.linear * x + y.two * fabs(s) + y.absolute;
}
DKV_FORMULA double dkv_formulaSigma(const dkv_units *t, dkv_sigma_units y, double s, double x, double slope,
                                    double bias) {
    if (t->cap <= 0 && slope <= 0) return dkv_formulaPlainSigma(y, s, x);
    return dkv_formulaModified(t, s, x, bias, y.linear) + y.absolute;
}

/* p (exp(x) - 1); where x is large and p small, from p's logarithm. */
DKV_FORMULA double dkv_formulaGrowSmall(double p, double x) { return p * (x * (1 + DKV_EXP_SQUARE * x)); }
DKV_FORMULA double dkv_formulaGrow(double p, double log_p, double x) {
    return x <= 1 ? dkv_formulaGrowSmall(p, x) : exp(fmin(log_p + x, 709.0)) - p;
}

/* --- forward --- */

/* kappa and w0 of a row, from its chain's error and how often its maximum may rise. */
DKV_FORMULA double dkv_formulaKappa(const dkv_units *u, double chain, double rises) {
    return (1 + u->p) * (1 + chain) * exp((rises + 2) * u->u * (1 + 2 * u->u)) *
               exp(rises * u->exp * (1 + 2 * u->exp)) -
           1;
}
DKV_FORMULA double dkv_formulaW0(const dkv_units *u, int p_normalised, double max, double lse) {
    return u->w_exp + u->w_p * (p_normalised ? 1 : exp(max - lse));
}

/* The maximum that stands in x of exp(s - max): where the one in use may be lower by `slack`, 7 u slack more. */
DKV_FORMULA double dkv_formulaLateMax(const dkv_units *t, double max) { return max + 7.0 / 3 * t->slack; }

/* x of exp(s - max): error of its argument. am = |max|, close = 1 + 8u; m = dkv_formulaLateMax(max). */
DKV_FORMULA double dkv_formulaForwardX(double u, double close, double m, double am, double s, double sigma) {
    double a = fabs(s);
    return (sigma + u * (a + (a > am ? a : am)) + 3 * u * (m - s)) * close;
}
/* The weight whose product with |V| bounds O's error; h = p (e^x - 1). */
DKV_FORMULA double dkv_formulaForwardWeight(double by_h, double by_p, double w0, double h, double p) {
    return h * by_h + p * by_p + w0;
}

/* Relative error of the row's sum beside exp's arguments, as a logarithm: tile by tile, then one to the next.
 */
DKV_FORMULA double dkv_formulaRowSum(const dkv_units *t, double key_tile, double n, double tiles,
                                     double rises) {
    const double in_tile = key_tile > 0 ? fmin(key_tile, n) : 0;
    return (in_tile + tiles + rises) * t->u / (1 - t->u) + rises * t->exp / (1 - t->exp) + n * 0x1p-53;
}

DKV_FORMULA double dkv_formulaLse(const dkv_units *u, double row_sum, double sum_h, double top, double max,
                                  double lse) {
    const double m = fabs(max) + u->slack, ln = lse - max + u->slack;
    double e = fmin(log1p(sum_h), top) + u->exp / (1 - u->exp) + row_sum;
    /* the logarithm is that of the computed sum */
    e += u->log * fmax(1.0, 1.4427 * (ln + e)) +
         (2 * u->u * (m + ln + e) + fmax(u->u, 0x1p-24) * (fabs(lse) + e)) * (1 + 4 * u->u) * (1 + u->log);
    return e + 4 * u->w + 0x1p-149;
}

/* O's error before its own rounding. sums = expm1(row's sum error + ...), h of the row; acc = sum of weights
 * times |V|. */
DKV_FORMULA double dkv_formulaO(double o, double acc, double v_max, double kappa, double w0, double n,
                                double sums, double h, double tiny) {
    double far = (v_max * (1 + kappa) + w0 * n * v_max) * (1 + sums) + o;
    double e = h < 1 ? (acc + h * o) / (1 - h) * (1 + sums) + sums * o : far;
    return fmin(e, far) + tiny;
}
DKV_FORMULA double dkv_formulaOutput(const dkv_units *u, double before, double x) {
    return before * (1 + u->out) + u->out * x + u->w_out;
}
/* One term of delta's error: `tol` of o, `acc` and `by` where P dP may be summed instead. */
DKV_FORMULA double dkv_formulaDelta(const dkv_units *u, double d_o, double o, double tol, double extra) {
    double x = tol + u->delta * (fabs(o) + tol);
    x += extra;
    return fabs(d_o) * (x + u->operand) + u->w;
}
DKV_FORMULA double dkv_formulaBase(const dkv_units *u, double e, double delta, double d_lse) {
    return e + u->u * (2 * fabs(delta) + fabs(d_lse)) * (1 + u->u) + 2 * u->w;
}

/* --- backward --- */

typedef struct dkv_grad_units { /* of one row */
    double u, close, al, rel, rest, by_dp;
} dkv_grad_units;

DKV_FORMULA dkv_grad_units dkv_formulaGradUnits(const dkv_units *t, double lse) {
    dkv_grad_units g;
    g.u = t->u;
    g.close = 1 + 8 * t->u;
    g.al = fabs(lse);
    g.rest = (1 + t->exp) * (1 + t->grad_ops * t->u * (1 + 8 * t->u)) - 1;
    g.rel = 1 + g.rest;
    g.by_dp = t->u + t->dp_round;
    return g;
}
DKV_FORMULA double dkv_formulaBackwardX(dkv_grad_units g, double s, double sigma, double lse,
                                        double tol_lse) {
    return (sigma + tol_lse + g.u * (fabs(s) + g.al) + 3 * g.u * fabs(s - lse)) * g.close;
}
/* E and |dS| of one pair before softcap's factor. */
DKV_FORMULA void dkv_formulaPair(const dkv_units *t, dkv_grad_units g, double p, double h, double z,
                                 double dp, double delta, double base, double *e, double *ds) {
    double pe = h * g.rel + p * g.rest; /* P's absolute error, the products of dS included */
    pe += t->kept_p * (p + pe) + t->w_kept;
    double diff = fabs(dp - delta), f = t->dp * z + base + g.by_dp * fabs(dp);
    *ds = p * diff;
    *e = pe * diff + (p + pe) * f + t->w_exp * (diff + f);
}
/* Softcap: E and |dS| of dS before its factor f = 1 - t^2 become those of dS. */
DKV_FORMULA void dkv_formulaCap(const dkv_units *t, double s, double bias, double sigma, double *e,
                                double *ds) {
    const double y = fmin(fabs((s + bias) / t->cap), 1.0);
    const double dt = fmin(sigma / t->cap, 2.0), f = 1 - y * y, df = dt * (2 * y + dt) + 2 * t->us;
    *e = (*e * (f + df) + *ds * df) * (1 + t->u) + t->u * *ds * f;
    *ds *= f;
}
/* The weights whose products with |K|, |Q|, |dO| bound dQ/scale, dK/scale and dV. */
DKV_FORMULA void dkv_formulaWeights(const dkv_units *t, dkv_grad_units g, double p, double h, double e,
                                    double ds, double chain, double chain_k, double *wq, double *wk,
                                    double *wv) {
    double y = e * (1 + t->ds) + t->ds * ds + t->w_ds;
    double kk = chain_k + t->partial * (1 + chain_k), pe = h * g.rel + p * g.rest;
    *wq = y * (1 + chain) + chain * ds;
    *wk = y * (1 + kk) + kk * ds;
    *wv = (pe + t->p * (p + pe)) * (1 + kk) + kk * p + (t->w_p + t->w_exp);
}

/* (1 + l_out) B + (l_out + 3u)|x| + omega, closed. `scale`: of the sum and of its underflows. */
DKV_FORMULA double dkv_formulaFinish(const dkv_units *u, double sum, double scale, double n, double x) {
    const double three = u->u * (3 + 4 * u->u);
    double b = (scale * (sum + n * u->w)) * (1 + three) + three * fabs(x);
    return b * (1 + u->out) + u->out * fabs(x) + u->w_out;
}

/* --- the sink's logit --- */

DKV_FORMULA double dkv_formulaSinkForward(const dkv_units *t, double sink, double max) {
    const double a = fabs(sink);
    return t->u * (a + fmax(a, fabs(max)) + 3 * (dkv_formulaLateMax(t, max) - sink)) * (1 + 8 * t->u);
}
DKV_FORMULA double dkv_formulaSinkBackward(const dkv_units *t, double sink, double lse, double tol_lse) {
    double x = (tol_lse + t->u * (fabs(sink) + fabs(lse) + 3 * fabs(sink - lse))) * (1 + 8 * t->u);
    return expm1(x) * (1 + t->exp) + t->exp;
}
/* One row's part of dSink: error and magnitude. */
DKV_FORMULA void dkv_formulaSinkRow(const dkv_units *u, double p, double rel, double delta, double base,
                                    double *error, double *size) {
    double d = fabs(delta);
    *error = (p * rel + u->w_exp) * d + (p * (1 + rel) + u->w_exp) * (base + 3 * u->u * d) + u->w;
    *size = p * d;
}
DKV_FORMULA double dkv_formulaSinkSum(const dkv_units *u, double error, double size, double rows,
                                      double dsink) {
    const double chain = expm1(rows * u->u);
    return (error * (1 + chain) + chain * size) * (1 + 0x1p-24) + 0x1p-24 * fabs(dsink) + 0x1p-149;
}
#endif
