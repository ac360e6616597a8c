/* twin_formula.h: the twin's formulas for one rounding, one pair, one sum, for host and device. Derivation:
 * TOLERANCE-TWIN.md.
 *
 *   a rounding to nearest of x     ROUND u^2 x^2         E[ulp(x)^2]/12 over log-uniform mantissas
 *   a chain of products            ROUND u^2 sum_t T_t^2, T_t its partial sums
 *   a rounding that may flip       dkv_flip: what is left when both sides round, and one has an error
 * first */
#ifndef DKV_TWIN_FORMULA_H
#define DKV_TWIN_FORMULA_H

#include <float.h>
#include <math.h>

#include "dtype.h"
#include "problem.h"

#define DKV_ROUND_VAR 0.18033688 /* 4/12 E[1/m^2], m log-uniform in [1, 2): 3/(24 ln 2) */
#define DKV_CHAIN_BINS 32          /* of log2 (sum_t T_t^2 / (|a|^2 |b|^2)), -24..7 */
#define DKV_TWIN_ALIKE 0.4
#define DKV_MANTISSA 0.72134752 /* E[1/m], m log-uniform in [1, 2): 1/(2 ln 2) */

typedef struct dkv_noise {
    double unit2;             /* relative variance of one rounding of the vector arithmetic */
    double lse2;              /* the same for fp32, in which LSE and dSink are stored */
    double step2;             /* variance of a chain = step2 * sum of T_t^2 over products */
    double prod2;             /* relative variance of a rounded product (0: products are exact) */
    double prod_p2;           /* the same for products with P or dS */
    double exp2, log2, tanh2; /* relative variances */
    double least2;            /* variance of rounding a result in fp32's subnormal range */
    double flush;             /* results below are flushed to 0; 0: none */
    double stuck;             /* a term below stuck * T leaves the sum T as it is */
    double gain; /* expected loss a product, relative to T_t, of a sum of one sign; 0 to nearest */
    double cut;  /* share of it that the accumulator's own cut takes, whatever the terms' signs */
    double quantum;         /* at which a step cuts its products, in units of the sum's last place; 0: they lose nothing */
    double last_p, last_ds; /* mean logarithm of (a product's last bit / the product) over (the sum's last place / the
                             * sum), of products with P and with dS: dkv_twinLossAnyhow */
    double fold, fold_dq, fold_dkv; /* products after which a chain (of O; of dQ; of dK, dV) is folded into a
                                     * sum rounded to nearest; 0: never */
    int32_t step, truncates;        /* products a step */
} dkv_noise;

/* A truncating step cuts each of its `step` products at a quantum q (in units of the sum's last place), and the sum, a
 * multiple of q, at its last place: q/2 and (1 - q)/2 are lost in the mean, together
 *     acc_gain = 2u E[1/m] (step q/2 + (1 - q)/2) / 2
 * of a sum that grows evenly from 0. q is a power of two, so that the measured loss names it: 1/4 on an H200. */
static inline double dkv_twinQuantum(const dualkv_arithmetic *a, double step) {
    double units = 2 * a->acc_gain / (a->unit * DKV_MANTISSA), q;
    if (step < 2 || !(units > 1)) return 0;
    q = exp2(rint(log2((units - 1) / (step - 1))));
    return q < 1 ? q : 1;
}
static inline double dkv_twinCut(double quantum, double step) { return (1 - quantum) / (step * quantum + 1 - quantum); }

/* The last bit of a product of two numbers of so many digits (mantissas log-uniform; trailing zeros 1 in the mean, each),
 * over the product, beside the last place of a sum over that sum. `format` of 0 digits or fp32's: as exact as fp32. */
static inline double dkv_twinLastBit(const dualkv_arithmetic *a, int32_t format, int32_t input) {
    const double w = dkv_unitRoundoff(format), y = dkv_unitRoundoff(input), unit = a->unit;
    return log((w > 0 ? w : unit) * (y > 0 ? y : unit) / unit) + (3.5 - 1) * 0.69314718055994531;
}

static inline void dkv_makeNoise(const dkv_problem *p, const dualkv_arithmetic *a, dkv_noise *out) {
    dkv_noise z;
    double u2 = a->unit * a->unit, acc2 = a->acc_truncates ? 2 * u2 : a->acc_unit * a->acc_unit;
    int32_t input = a->in_format != DUALKV_EXACT ? a->in_format : (int32_t)p->dtype;
    int wide = p->dtype == DUALKV_FP32 && a->in_format == DUALKV_EXACT && a->unit > 0x1p-30;
    z.step = a->acc_step > 1 ? a->acc_step : 1;
    z.unit2 = DKV_ROUND_VAR * u2;
    z.lse2 = DKV_ROUND_VAR * 0x1p-48;
    z.step2 = DKV_ROUND_VAR * acc2 / z.step;
    z.prod_p2 = z.prod2 = wide && z.step == 1 ? z.unit2 : 0;
    z.exp2 = DKV_ROUND_VAR * a->exp_error * a->exp_error;
    z.log2 = DKV_ROUND_VAR * a->log_error * a->log_error;
    z.tanh2 = DKV_ROUND_VAR * a->tanh_error * a->tanh_error;
    z.least2 = a->unit > 0x1p-30 ? 0x1p-298 / 12 : 0;
    z.flush = a->unit > 0x1p-30 && a->flushes ? 0x1p-126 : 0;
    z.stuck = a->unit;
    z.truncates = a->acc_truncates != 0;
    z.gain = z.truncates ? 2 * a->acc_gain / z.step : 0;
    z.quantum = dkv_twinQuantum(a, (double)z.step);
    z.cut = dkv_twinCut(z.quantum, (double)z.step);
    z.last_p = dkv_twinLastBit(a, a->p_format, input);
    z.last_ds = dkv_twinLastBit(a, a->ds_format, input);
    z.fold = (double)a->acc_fold * z.step;
    z.fold_dq = a->acc_fold_dq > 0 ? (double)a->acc_fold_dq * z.step : z.fold;
    z.fold_dkv = a->acc_fold_dkv > 0 ? (double)a->acc_fold_dkv * z.step : z.fold;
    *out = z;
}

/* Mean square of round(x + e) - y, where y = round(x), h its spacing, e of variance e2. The midpoint is m =
 * h/2 - |x - y| away; up to e = 0.4 h the step h is taken with probability 1/(2 + 7.52 (m^2/e2)^2): over all
 * x its mean is that of a normal e, 0.8 e/h, with a heavier tail, since e often is a sum of rare steps.
 * Beyond, x says nothing: e2 + h^2/6. */
DKV_INLINE double dkv_flip(double x, double y, double e2, double h) {
    double m = 0.5 * h - fabs(x - y), m2 = m * m, h2 = h * h, e4 = e2 * e2;
    return e2 < 0.16 * h2 ? h2 * e4 / (2 * e4 + 7.52 * m2 * m2 + 0x1p-1000) : e2 + h2 * (1.0 / 6);
}

/* ulp of a format as fmax(2^exponent of x, least) * scale. DUALKV_EXACT: 0. */
typedef struct dkv_spacing {
    double least, scale;
} dkv_spacing;

static inline dkv_spacing dkv_makeSpacing(int32_t format) {
    double u = dkv_unitRoundoff(format);
    dkv_spacing f = {u > 0 ? dkv_underflow(format) / u : 0, 2 * u};
    return f;
}

DKV_INLINE double dkv_spacingAt(dkv_spacing f, double x) {
    uint64_t u;
    memcpy(&u, &x, sizeof u);
    u &= 0x7ff0000000000000ull;
    memcpy(&x, &u, sizeof x);
    return (x > f.least ? x : f.least) * f.scale;
}

/* A chain of one product has sq = 1, but for the last bits: a bin begins a little below a power of two. */
DKV_INLINE int dkv_chainBin(float sq) {
    uint32_t u;
    sq *= 1.0001f;
    memcpy(&u, &sq, sizeof u);
    int e = (int)(u >> 23) - 127 + 24;
    return e < 0 ? 0 : e > DKV_CHAIN_BINS - 1 ? DKV_CHAIN_BINS - 1 : e;
}

/* Absolute variance of a result x of the vector arithmetic, subnormal or flushed. */
DKV_INLINE double dkv_twinLeast(const dkv_noise *z, double x) {
    return fabs(x) < z->flush ? x * x : z->least2;
}

/* A sum x = scale * (sum of partial sums of `fold` products each), which are added by additions that flush: of `terms`
 * products, what the flushed additions may have lost, squared. */
DKV_INLINE double dkv_twinFlushed(const dkv_noise *z, double fold, double x, double scale, double terms) {
    double most = z->flush * scale;
    if (!(z->flush > 0) || !(fold > 0)) return 0;
    most *= most * (terms / fold + 1);
    return x * x < most ? x * x : most;
}

/* Mean square of round(x + e) - x, y = round(x), e of variance e2 and h the format's spacing: e2 + h^2/12 over all x.
 * As long as e is small beside h, up to h/4, the rounding of this x is foreseen. */
DKV_INLINE double dkv_stored(double x, double y, double e2, double h) {
    double d = x - y, r = h > 0 ? e2 / (h * h) : 0, w = r < 0.0625 ? 256 * r * r : 1;
    return e2 + (1 - w) * d * d + w * h * h / 12;
}

/* Equal terms lose equally while the sum stays between the same powers of two: a part of their losses adds up
 * before it is squared. Factor on a chain's variance, `equal` being the mean number of equal terms; the part
 * is calibrated. */
DKV_INLINE double dkv_twinAlike(double equal) { return 1 + DKV_TWIN_ALIKE * (equal - 1); }

/* A sum of products went from `before` to `after`; squares * mean2 = sum of terms squared, about. The variance of its
 * roundings is that of a walk between both ends, whose partial sums grow as the weights do: g_t is the share of the
 * weights' sum after term t, f_t of their squares'. A term that is too small to move the sum rounds nothing. */
typedef struct dkv_formula_step {
    double count, squares;   /* terms that round; of the weights */
    double g, g2, ff, share; /* sums over them of g, g^2, f (1 - f); squares / (sum of weights)^2 */
    double g_first, f_first; /* of the first of them */
} dkv_formula_step;

/* Weights all alike. */
DKV_INLINE dkv_formula_step dkv_formulaEven(double n, double squares) {
    dkv_formula_step k;
    k.count = n;
    k.squares = squares;
    k.g = (n + 1) / 2;
    k.g2 = (n + 1) * (2 * n + 1) / (6 * n);
    k.ff = (n + 1) / 6;
    k.share = k.g_first = k.f_first = 1 / n;
    return k;
}

/* The same of the chain since the last fold, of `fold` terms each, after `done` terms of the sum: that chain begins the
 * step with `inside` times the sum so far, in the mean, and with a variance of `path` times a term's mean square. The
 * step's terms go on with it, and beyond its end with the next ones. fold 0: the sum is one chain. */
typedef struct dkv_formula_fold {
    double inside, path, count, g, g2, ff;
    int32_t fresh; /* the chain begins here */
} dkv_formula_fold;

DKV_INLINE dkv_formula_fold dkv_formulaFold(dkv_formula_step k, double fold, double done, int truncates) {
    dkv_formula_fold f;
    const double n = k.count, in = fold > 0 ? done - floor(done / fold) * fold : done;
    f.inside = fold > 0 && done > fold ? in / done : 1;
    f.path = in * (1 - f.inside);
    f.fresh = fold > 0 && in < 1;
    f.count = n;
    f.g = k.g;
    f.g2 = k.g2;
    f.ff = k.ff;
    if (!(fold > 0) || in + n <= fold) return f;
    /* evenly: what is left of this chain, whole ones, and the last */
    const double left = fold - in, whole = floor((n - left) / fold), last = n - left - whole * fold, n2 = n * n;
    const double starts = truncates ? 0 : whole + (last > 0 ? 1 : 0); /* their first terms are added to 0 */
    f.count = left;
    f.g = left * (left + 1) / (2 * n);
    f.g2 = (left * (left + 1) * (2 * left + 1) + whole * fold * (fold + 1) * (2 * fold + 1) +
            last * (last + 1) * (2 * last + 1)) / (6 * n2) - starts / n2;
    f.ff = (left * (left + 1) + whole * fold * (fold + 1) + last * (last + 1)) / (6 * n) - starts / n;
    f.g2 = f.g2 > 0 ? f.g2 : 0;
    f.ff = f.ff > 0 ? f.ff : 0;
    return f;
}

/* The variance of the roundings of a step's terms, whatever the element: what its formula multiplies. `before`: of that
 * squared; `cross`: of before * e, where the step adds e; `square`: of e^2; `random`: of what the terms' squares add up to
 * beside e's share; once with the chain's unit, once (folded_*) with that of the sums that a chain is folded into. */
typedef struct dkv_formula_walk {
    double squares, share;
    double before, mean, cross, square, random, first_square, first_random;
    double folded_before, folded_cross, folded_square, folded_random, least;
    int32_t fresh, none;
} dkv_formula_walk;

DKV_INLINE dkv_formula_walk dkv_formulaWalk(const dkv_noise *z, dkv_formula_step k, double fold, double done) {
    dkv_formula_walk w = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1};
    const double n = k.count, by = fold > 0 ? z->unit2 / fold : 0;
    if (n < 1) return w;
    const dkv_formula_fold f = dkv_formulaFold(k, fold, done, z->truncates);
    w.none = 0;
    w.fresh = f.fresh;
    w.squares = k.squares;
    w.share = k.share;
    w.before = z->step2 * f.count * f.inside * f.inside;
    w.mean = z->step2 * f.count * f.path * k.squares / n;
    w.cross = z->step2 * 2 * f.g * f.inside;
    w.square = z->step2 * f.g2;
    w.random = z->step2 * f.ff;
    if (!z->truncates) {
        w.first_square = z->step2 * k.g_first * k.g_first;
        w.first_random = k.f_first < 1 ? z->step2 * k.f_first * (1 - k.f_first) : 0;
    }
    w.folded_before = by * n;
    w.folded_cross = by * 2 * k.g;
    w.folded_square = by * k.g2;
    w.folded_random = by * k.ff;
    w.least = z->prod_p2 > 0 ? n * z->least2 : 0;
    return w;
}

/* The sum goes from `before` to `after`. */
DKV_INLINE double dkv_formulaWalked(const dkv_formula_walk *w, double before, double after, double mean2) {
    double e = after - before, e2 = e * e, before2 = before * before, cross = before * e;
    double random = w->squares * mean2 - e2 * w->share, near, folds;
    if (w->none) return 0;
    random = random > 0 ? random : 0;
    near = w->before * before2 + w->mean * mean2 + w->cross * cross + w->square * e2 + w->random * random;
    if (before == 0 || w->fresh) near -= w->first_square * e2 + w->first_random * random; /* the first is added to 0 */
    folds = w->folded_before * before2 + w->folded_cross * cross + w->folded_square * e2 + w->folded_random * random;
    return (near > 0 ? near : 0) + (folds > 0 ? folds : 0) + w->least;
}

/* The variance of one element's roundings; `fold` as in the noise, after `done` terms. */
DKV_INLINE double dkv_formulaChain(const dkv_noise *z, dkv_formula_step k, double fold, double done, double before,
                                   double after, double mean2) {
    const dkv_formula_walk w = dkv_formulaWalk(z, k, fold, done);
    return dkv_formulaWalked(&w, before, after, mean2);
}

/* What truncation is expected to take of a sum T_t of terms x_t, where `size` = sum of |terms|: at each step the
 * accumulator's own cut, toward zero, so with the sign of T_t; and the products' cuts, each with the sign of its
 * product, so with that of the terms' sum, as far as their signs agree; both in proportion to |T_t|. Sums that fp32 holds
 * exactly are of few terms of few bits: nothing was cut (and an expected loss would tip every tie of the output's
 * rounding to one side).
 *
 * Terms in the order of the walk, from `before` to `after`: */
DKV_INLINE double dkv_twinLoss(const dkv_noise *z, double fold, double before, double after,
                                  double count, double size) {
    double d = after - before, along = (before * (count - 1) + after * (count + 1)) / 2;
    double same = size > 0 ? d / size : 0;
    if (count < 1 || ((double)(float)before == before && (double)(float)after == after)) return 0;
    if (fold > 0) along = d * (fold < count ? fold : count) / 2;
    same = same < -1 ? -1 : same > 1 ? 1 : same;
    return z->gain * (z->cut * along + (1 - z->cut) * fabs(along) * same);
}

/* Terms in an order that nothing declares (a key's rows: heads outside or inside, last rows first, diagonal blocks
 * before the others): the whole chain of n terms, x its sum, `square` the sum of the terms' squares. On average over all
 * orders the partial sums run evenly to x, and with x their sum is n x / 2.
 *
 * Products of 16-bit numbers have few bits: a cut takes nothing of a number that is a multiple of its place. A cut grows
 * with the sum, f of the way along by f, and takes the more the coarser it is than the last bit there is, b: a cut at C
 * loses (C - b)/2, of a whole C/2. With r = b/C at the end of the chain the part of the loss that is left is
 *     products      integral over f of (f - r)+, twice:     (1 - r)^2           the distribution of a number of two's least
 *     the sum       the same, cut at f (1 - q):              1 - r^2/q, r < q;  (1 - r)^2/(1 - q) beyond
 * both one less a distribution of r over 0..1 (Beta(1, 2); triangular with its top at q), of logarithms that have a mean and
 * a variance. b is spread, too: as the terms are (log-normal: n square/size^2 = exp of the variance), and by mantissas and
 * trailing zeros; of a step's sum it is the least of its products'. Both taken for normal, their difference is. */
typedef struct dkv_twin_lost {
    double mean, var; /* what the chain is expected to lose; by how much that is unsure: half of part (1 - part) */
} dkv_twin_lost;

#define DKV_BITS_VAR 2.0419        /* ln^2 2 (2 + 2 of trailing zeros, 1/12 of each of three mantissas) */
#define DKV_BETA_LN -1.5, 1.25     /* mean and variance of ln r, density 2 (1 - r) */
#define DKV_TOP_LN -1.03790, 0.39586 /* of ln r, r triangular over 0..1 with its top at 1/4 */

/* That a normal number is below 0. */
DKV_INLINE double dkv_twinBelow(double mean, double var) { return 0.5 * erfc(mean / sqrt(2 * var)); }
/* That ln b of `mean`, `var` is below ln r of the others. */
DKV_INLINE double dkv_twinReached(double mean, double var, double of, double of_var) {
    return dkv_twinBelow(mean - of, var + of_var);
}

DKV_INLINE dkv_twin_lost dkv_twinLossAnyhow(const dkv_noise *z, double last, double fold, double x, double n, double size,
                                            double square) {
    dkv_twin_lost lost = {0, 0};
    if (n < 1 || !(fabs(x) <= DBL_MAX) || !(size > 0) || (double)(float)x == x) return lost;
    const double chain = fold > 0 && fold < n ? fold : n, part = chain / n, same = fabs(x) < size ? fabs(x) / size : 1;
    double unlike = n * square / (size * size), bits, whole, sums, products;
    unlike = unlike < n ? unlike : n;
    unlike = unlike > 1 ? log(unlike) : 0;
    /* how far the sums reach: the mean square of a path to x, in which the terms' squares are a bridge */
    bits = last + log(size * part / (chain * sqrt(x * x * part * part + square * part / 2))) - unlike / 2;
    unlike += DKV_BITS_VAR;
    sums = dkv_twinReached(bits - (z->step > 8 ? 1.77 : 1.42) * sqrt(unlike), (z->step > 8 ? 0.29 : 0.37) * unlike, DKV_TOP_LN);
    products = z->quantum > 0 ? dkv_twinReached(bits - log(z->quantum), unlike, DKV_BETA_LN) : 0;
    whole = z->gain * fabs(x) * chain / 2;
    lost.mean = z->cut * sums + (1 - z->cut) * same * products;
    lost.var = (z->cut * sums * (1 - sums) + (1 - z->cut) * same * products * (1 - products)) / 2 * whole;
    lost.var *= lost.var;
    lost.mean *= x < 0 ? -whole : whole;
    return lost;
}

/* How far the partial sums' sum is from that: the variance of a bridge, n^2/12 times what the terms' squares add up to
 * beside x. Of terms within one tile, `squares` their sum of squares; and of tiles, `spread` the sum of their sums'
 * squares, `even` = sum of n_b^2 / n^2 what of x^2 is in it if all are alike. */
DKV_INLINE double dkv_twinPathWithin(const dkv_noise *z, double fold, double n, double squares) {
    double k = z->gain * z->cut * (fold > 0 && fold < n ? fold : n);
    return k * k * squares * (1.0 / 12);
}
DKV_INLINE double dkv_twinPath(const dkv_noise *z, double fold, double x, double n, double size, double spread,
                               double even) {
    double same = size > 0 && fabs(x) < size ? fabs(x) / size : 1, more = spread - x * x * even;
    double k = z->gain * (z->cut + (1 - z->cut) * same) * (fold > 0 && fold < n ? fold : n);
    return more > 0 && even < 1 ? k * k * more / (12 * (1 - even)) : 0;
}

/* What a pair's formulas read of the declared arithmetic. */
typedef struct dkv_twin_units {
    dkv_noise z;
    dkv_rounder round_s, round_p, round_ds, round_out;
    dkv_spacing ulp_s, ulp_p, ulp_ds, ulp_out, ulp_part, ulp_lse, ulp_sum;
    int32_t p_rounded, ds_rounded, s_rounded, scale_exact;
    double scale, softcap; /* softcap 0: off */
    double ds_by, ds_unit2; /* dS is multiplied by this before it is rounded; relative variance of that product */
} dkv_twin_units;

static inline void dkv_makeUnits(const dkv_problem *p, const dualkv_arithmetic *a, dkv_twin_units *u) {
    int e;
    dkv_makeNoise(p, a, &u->z);
    u->round_s = dkv_makeRounder(a->s_format);
    u->round_p = dkv_makeRounder(a->p_format);
    u->round_ds = dkv_makeRounder(a->ds_format);
    u->round_out = dkv_makeRounder(a->out_format);
    u->ulp_s = dkv_makeSpacing(a->s_format);
    u->ulp_p = dkv_makeSpacing(a->p_format);
    u->ulp_ds = dkv_makeSpacing(a->ds_format);
    u->ulp_out = dkv_makeSpacing(a->out_format);
    u->ulp_part = dkv_makeSpacing(a->partial_format);
    u->ulp_lse = dkv_makeSpacing(DUALKV_FP32);
    u->ulp_sum.least = 0;
    u->ulp_sum.scale = 2 * a->unit;
    u->p_rounded = dkv_unitRoundoff(a->p_format) > a->unit;
    u->ds_rounded = dkv_unitRoundoff(a->ds_format) > a->unit;
    u->s_rounded = dkv_unitRoundoff(a->s_format) > a->unit;
    u->scale_exact = frexp(p->scale, &e) == 0.5;
    u->scale = p->scale;
    u->softcap = p->softcap > 0 ? p->softcap : 0;
    u->ds_by = a->ds_scaled && u->scale != 0 ? fabs(u->scale) : 1;
    u->ds_unit2 = a->ds_scaled && !u->scale_exact ? u->z.unit2 : 0;
}

/* Variance of the score of a pair beside what softcap and ALiBi add: sq, dot of unit vectors, norm = |q|^2
 * |k|^2. */
DKV_INLINE double dkv_formulaScoreVar(const dkv_twin_units *t, float fit_var, float sq, float dot,
                                      double q_norm, double k_norm) {
    double raw = dot, rounds = t->scale_exact ? 0 : t->z.unit2;
    return t->z.step2 * q_norm * t->scale * t->scale * fit_var * sq * k_norm +
           rounds * raw * raw * q_norm * k_norm * t->scale * t->scale;
}
/* Expected loss of the score's chain, to be added to the score. k_root: |k|. */
DKV_INLINE double dkv_formulaScoreLoss(const dkv_twin_units *t, float fit_gain, float dot, double q_norm,
                                       double k_root, double cap) {
    double keep = t->softcap > 0 ? 1 - cap * cap : 1;
    return keep * (t->scale * sqrt(q_norm)) * fit_gain * dot * k_root;
}
/* Softcap and ALiBi after the product: one rounding each, and tanh's own error. s: the score; sees: it is not
 * masked. */
DKV_INLINE double dkv_formulaScoreModified(const dkv_twin_units *t, double vs, double s, int sees, double cap,
                                           double slope, double bias) {
    double x = sees ? s : 0, c = t->softcap, u2 = t->z.unit2;
    if (c > 0) {
        double keep = 1 - cap * cap, y = cap * c, raw = fabs(cap) < 1 ? c * atanh(cap) : 0;
        vs = keep * keep * (vs + u2 * raw * raw) + y * y * (t->z.tanh2 + u2);
    }
    return slope != 0 ? vs + u2 * (bias * bias + x * x) : vs;
}

/* A row's class: a hash of what its errors come from, and which of them, never 0. LEANS: most of LSE's noise is the error vs
 * of one score; CAPPED: most of the row's weight is of one score that the softcap has made. */
#define DKV_CLASS_CAPPED 2u
#define DKV_CLASS_LEANS 4u
DKV_INLINE uint64_t dkv_twinClass(uint64_t hash, uint64_t flags) { return (hash & ~(uint64_t)7) | flags | 1; }

/* weight: P of the row's largest score; `same` keys have that score. */
DKV_INLINE uint64_t dkv_twinLeans(double weight, double same, double vs, double lse_var, int capped) {
    const double reach = weight * same < 1 ? weight * same : 1;
    return (reach * reach * vs > lse_var / 2 ? DKV_CLASS_LEANS : 0) | (capped && reach > 0.5 ? DKV_CLASS_CAPPED : 0);
}

/* Whether most of vs is what tanh and its product with the softcap round: then scores that are the same number have the
 * same error, whatever they come from. keep2 = (1 - tanh^2)^2. */
DKV_INLINE int dkv_twinAtCap(const dkv_twin_units *t, double keep2, double vs) {
    return t->softcap * t->softcap * (1 - sqrt(keep2)) * (t->z.tanh2 + t->z.unit2) > vs / 2;
}

/* Spacings of the row sum while a tile is added to `old`. A sum that starts at 1, from the sink, is added to term by term
 * by some kernels, where others sum a tile first: the larger roundings of both. */
DKV_INLINE dkv_spacing dkv_sumSpacing(dkv_spacing ulp, double old, int sink_first) {
    const dkv_spacing binade = {0, 1};
    if (sink_first && old > 0) ulp.least = dkv_spacingAt(binade, old);
    return ulp;
}

/* In place of the variance of a maximum: it is the sink's, no key's. */
#define DKV_SINKS_OWN (-1.0)

/* The maximum in use after a tile (or a sink) whose largest score is x. */
DKV_INLINE double dkv_raisedMax(double max, double x, double slack) {
    return x > max && (max == -INFINITY || x - max > slack) ? x : max;
}

/* Whether a kernel may decide otherwise there: scores of variances var and max_var, the difference computed in fp32. The
 * maxima may then differ by up to slack until a later one is raised whichever it is. */
DKV_INLINE int dkv_raiseDoubtful(double max, double x, double slack, double max_var, double var) {
    const double off = fabs(x - max - slack), near = 0x1p-21 * (fabs(x) + fabs(max) + slack);
    if (!(slack > 0) || !(off < slack)) return 0;
    return off < near || off * off < 72 * (var + max_var);
}

/* What rounding P leaves where the maximum it was taken against is not known: the twin's rounding and the kernel's, whose
 * spacing may be twice as large, h^2/12 + (2h)^2/12. */
#define DKV_DOUBT_VAR (5.0 / 12)
DKV_INLINE double dkv_doubtVar(dkv_spacing ulp, double p, double slack) {
    const double more = exp(slack), h = dkv_spacingAt(ulp, p / more) * more; /* the higher maximum: nearer to underflow */
    return p > 0 ? DKV_DOUBT_VAR * h * h : 0;
}

/* The tensor core's step over n products (tolerance page): products and accumulator aligned to the largest exponent,
 * cut below 2^-25 of it, summed, cut to 24 bits, toward zero. */
DKV_INLINE double dkv_twinStep(double acc, const double *a, const double *b, int64_t n) {
    double top = fabs(acc), sum, quantum, cut;
    for (int64_t c = 0; c < n; c++) top = fabs(a[c] * b[c]) > top ? fabs(a[c] * b[c]) : top;
    if (!(top > 0) || !isfinite(top)) return acc;
    quantum = ldexp(1.0, ilogb(top) - 25);
    sum = trunc(acc / quantum);
    for (int64_t c = 0; c < n; c++) sum += trunc(a[c] * b[c] / quantum);
    if (sum == 0) return 0;
    cut = ldexp(1.0, ilogb(sum) - 23);
    return (cut > 1 ? trunc(sum / cut) * cut : sum) * quantum;
}

/* A chain's variance: its own, and that of a loss which the chains of the same row with other keys share. */
typedef struct dkv_twin_walk {
    double own, common;
} dkv_twin_walk;

/* The chain in truncating steps of z->step products. What the steps lose in proportion to their sums is a loss of the whole
 * chain, `loss` of which is expected; what is left of each step is noise, part of which is in that proportion already. */
DKV_INLINE dkv_twin_walk dkv_twinWalkSteps(const dkv_noise *z, const double *a, const double *b, int64_t d, double loss) {
    double acc = 0, n = 0, sums = 0, squares = 0, along = 0, lost2 = 0, rest, off;
    for (int64_t c = 0; c < d; c += z->step) {
        int64_t m = d - c < z->step ? d - c : z->step;
        double sum = acc, r;
        for (int64_t e = c; e < c + m; e++) sum += a[e] * b[e];
        acc = dkv_twinStep(acc, a + c, b + c, m);
        r = acc - sum;
        n++;
        sums += sum;
        squares += sum * sum;
        along += r * sum;
        lost2 += r * r;
    }
    dkv_twin_walk w = {0, 0};
    if (!(squares > 0)) return w;
    rest = n > 1 ? (lost2 - along * along / squares) * n / (n - 1) * (1 - sums * sums / (n * squares)) : 0;
    off = along / squares * sums - loss;
    w.own = rest > 0 ? rest : 0;
    w.common = off * off;
    return w;
}

/* Variance of the roundings of one chain as declared, in order; in fp32, the sum of their squares. loss: what the twin
 * expects this chain to lose. */
DKV_INLINE dkv_twin_walk dkv_twinWalk(const dkv_noise *z, const double *a, const double *b, int64_t d, double loss) {
    float t = 0;
    dkv_twin_walk w = {0, 0};
    if (z->truncates) return dkv_twinWalkSteps(z, a, b, d, loss);
    for (int64_t c = 0; c < d; c++) {
        double x = a[c] * b[c];
        float y = (float)x, next = t + y;
        double r = (double)t + (double)y - (double)next;
        w.own += (x - (double)y) * (x - (double)y) + r * r;
        t = next;
    }
    return w;
}

/* The row sum over the terms of one key tile, term by term as a kernel adds: variance of the roundings. Where one of
 * both is too small to be seen beside the other it is lost, and what is lost has one sign. Terms that are the same
 * within an eighth of the sum's spacing are rounded the same way while that spacing lasts, and the same argument has
 * the same error of exp: both add up before they are squared. Terms of 1 round nothing. */
typedef struct dkv_formula_sum {
    double part, squares, lost, noise;
    double last, last_u, run, alike, held, together; /* together: of long runs, over tiles added before squared */
    double ones, above; /* terms of the row's largest score, whose weight is 1 + above: above 1 under a maximum raised late */
} dkv_formula_sum;
DKV_INLINE void dkv_formulaAdd(const dkv_noise *z, dkv_spacing ulp, dkv_formula_sum *s, double x,
                               double rel, double equal) {
    double stuck = z->stuck, less = x < s->part ? x : s->part, more = x < s->part ? s->part : x;
    double moves = less > stuck * more ? 1 : 0, u, gap2, off, now;
    s->part += x;
    u = dkv_spacingAt(ulp, s->part);
    s->lost += (1 - moves) * less;
    s->noise += rel * equal;
    s->ones += fabs(x - (1 + s->above)) < 0.5 * stuck * (1 + s->above) ? 1 : 0;
    if (moves == 0 || fabs(x - 1) < 0.5 * stuck) return;
    gap2 = (x - s->last) * (x - s->last);
    if (u != s->last_u || gap2 + 2 * rel > u * u / 64) s->run = s->alike = s->held = 0;
    s->run++;
    s->alike += equal; /* the same number added again loses the same */
    off = x - u * rint(x / u); /* what each addition of this run takes, if the sum is a multiple of u; finer sums take less */
    now = s->run > 1 && 12 * off * off > u * u ? 12 * off * off : u * u;
    now *= s->run * s->run > s->alike ? s->run * s->run : s->alike;
    if (s->run < 8) {
        s->squares += now - s->held;
    } else { /* of one score: so will the next tile's be, and err the same way */
        double before = s->together;
        if (s->run == 8) s->squares -= s->held, s->held = 0;
        s->together += now - s->held;
        s->lost += sqrt(s->together / 12) - sqrt(before / 12);
    }
    s->held = now;
    if (gap2 < stuck * stuck / 16 * x * x) s->noise += 2 * (s->run - 1) * z->exp2 * x * x;
    s->last = x;
    s->last_u = u;
}

typedef struct dkv_twin_pair { /* of the backward pass */
    double p, ds;              /* rounded as declared */
    double w_p, w_ds, w_row;   /* variances of what the roundings leave; w_row: w_ds without delta's part */
} dkv_twin_pair;

typedef struct dkv_twin_row { /* of the backward pass */
    double lse, exp2;         /* exp2: relative variance of P beside its score's */
    double delta, delta_var;
    /* Rows that are equal but for their dLSE err alike in P, dP and dO . O, though dS differs: how many there are to each
     * that is equal in that, too (1: none); the mean of their dLSE, less this row's; what subtracting dLSE leaves of delta_var. */
    double alike, shift, own_var;
} dkv_twin_row;

/* Relative variance of P where the truth stands for an LSE that the kernel used and does not give: its maximum, logarithm and
 * last sum each round at that LSE's place. */
DKV_INLINE double dkv_twinStandsIn(const dkv_twin_units *t, double lse) {
    const double u = dkv_spacingAt(t->ulp_lse, fabs(lse));
    return u * u / 4;
}

/* What rows that are equal but for their dLSE share of dS's variance, P (dP - delta) having the mean delta of them all. */
DKV_INLINE double dkv_formulaShared(double p2, double dev, double vs_slope, double rel_keep, double keep2, double vd,
                                    double last_p, double row) {
    return p2 * dev * dev * (vs_slope + rel_keep) + keep2 * (p2 * vd + last_p * dev * dev) + row;
}

/* p = exp(s - lse), dp; of a pair that is seen. vs, vd: variances of the score and of dP. */
DKV_INLINE __attribute__((always_inline)) dkv_twin_pair dkv_formulaTwinPair(const dkv_twin_units *t,
                                                                            const dkv_twin_row *r, double s, double p,
                                                                            double dp, double cap, double vs, double vd) {
    dkv_twin_pair y;
    const int capped = t->softcap > 0;
    const double unit2 = t->z.unit2, least2 = t->z.least2, flush = t->z.flush, prod = t->z.prod_p2;
    const double per_cap = capped ? 2 / t->softcap : 0, last = capped ? unit2 : 0;
    const double x = s - r->lse, last_p = p < flush ? p * p : least2, dev = dp - r->delta;
    p = p < flush ? 0 : p; /* declared, and for all alike: no noise */
    const double c = capped ? cap : 0, keep = 1 - c * c, keep2 = keep * keep, p2 = p * p;
    const double slope = keep - c * per_cap; /* d log dS / d score, times keep */
    const double rel = unit2 * x * x + r->exp2, vp = p2 * (vs + rel) + last_p, raw = p * dev, ds = raw * keep;
    const double row = p2 * keep2 * r->delta_var, by = t->ds_by;
    double e2 = raw * raw * (slope * slope * vs + keep2 * (rel + unit2) + last * (c * c * c * c + 2 * keep2));
    e2 += keep2 * (p2 * (vd + unit2 * dev * dev) + last_p * dev * dev) + row;
    e2 += fabs(ds) < flush ? ds * ds : least2;
    y.p = t->p_rounded ? dkv_roundBy(t->round_p, p) : p;
    y.w_p = t->p_rounded ? dkv_flip(p, y.p, vp, dkv_spacingAt(t->ulp_p, p)) : vp + prod * p2;
    y.ds = t->ds_rounded ? dkv_roundBy(t->round_ds, ds * by) / by : ds;
    y.w_ds = t->ds_rounded ? dkv_flip(ds, y.ds, e2 + t->ds_unit2 * ds * ds, dkv_spacingAt(t->ulp_ds, fabs(ds * by)) / by)
                           : e2 + prod * ds * ds;
    y.w_row = y.w_ds > row ? y.w_ds - row : 0;
    if (t->ds_rounded || !(r->alike > 1)) return y; /* roundings of different numbers are independent */
    const double mean = dev + r->shift, own = p2 * keep2 * (r->delta_var - r->own_var);
    y.w_ds += r->alike * dkv_formulaShared(p2, mean, slope * slope * vs, keep2 * rel, keep2, vd, last_p, own) -
              dkv_formulaShared(p2, dev, slope * slope * vs, keep2 * rel, keep2, vd, last_p, own);
    return y;
}
#endif
