/* twin_noise.h: variances of the roundings that the twin does not carry (derivation: ref/TOLERANCE-TWIN.md).
 *
 *   a rounding to nearest of x     ROUND_VAR u^2 x^2     E[ulp(x)^2]/12 over log-uniform mantissas
 *   a chain of products            ROUND_VAR u^2 sum_t T_t^2, T_t its partial sums
 *   a rounding that may flip       dkv_flip: what is left when both sides round, and one has an error first
 */
#ifndef DKV_TWIN_NOISE_H
#define DKV_TWIN_NOISE_H

#include <math.h>

#include "dtype.h"
#include "tiles.h"

#define DKV_ROUND_VAR  0.18033688 /* 4/12 E[1/m^2], m log-uniform in [1, 2): 3/(24 ln 2) */
#define DKV_CHAIN_BINS 32         /* of log2 (sum_t T_t^2 / (|a|^2 |b|^2)), -24..7 */

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
    double fold, fold_dq, fold_dkv; /* products after which a chain (of O; of dQ; of dK, dV) is folded into a
                                     * sum rounded to nearest; 0: never */
    int step;                       /* products a step */
    bool truncates;
} dkv_noise;

void dkv_makeNoise(const dkv_problem *p, const dualkv_arithmetic *a, dkv_noise *z);

/* Mean square of round(x + e) - y, where y = round(x), h its spacing, e of variance e2. The midpoint is m =
 * h/2 - |x - y| away; up to e = 0.4 h the step h is taken with probability 1/(2 + 7.52 (m^2/e2)^2): over all
 * x its mean is that of a normal e, 0.8 e/h, with a heavier tail, since e often is a sum of rare steps.
 * Beyond, x says nothing: e2 + h^2/6. */
static inline double dkv_flip(double x, double y, double e2, double h) {
    double m = 0.5 * h - fabs(x - y), m2 = m * m, h2 = h * h, e4 = e2 * e2;
    return e2 < 0.16 * h2 ? h2 * e4 / (2 * e4 + 7.52 * m2 * m2 + 0x1p-1000) : e2 + h2 * (1.0 / 6);
}

/* ulp of a format as fmax(2^exponent of x, least) * scale; for loops. DUALKV_EXACT: 0. */
typedef struct dkv_spacing {
    double least, scale;
} dkv_spacing;
dkv_spacing dkv_makeSpacing(int32_t format);
static inline double dkv_spacingAt(dkv_spacing f, double x) {
    uint64_t u;
    memcpy(&u, &x, sizeof u);
    u &= 0x7ff0000000000000ull;
    memcpy(&x, &u, sizeof x);
    return (x > f.least ? x : f.least) * f.scale;
}

/* One operand of score-like products: rows as unit vectors in float, and their squared norms. Non-finite rows
 * are 0. */
void dkv_unitRows(const double *x, int64_t n, int64_t d, float *out, double *norm2);

/* What the chains of a_i . b_j (rows of unit norm, [m, d] and [n, d]; d <= 256) round: sq [m, n] = sum over the
 * roundings of the partial sum squared, products included, from checkpoints along the chain; dot [m, n] = a_i
 * . b_j. And of one such chain. */
void dkv_chainSquares(const dkv_noise *z, const float *a, const float *b, int64_t m, int64_t n, int64_t d, float *dot,
                      float *sq);
void dkv_chainSquare(const dkv_noise *z, const float *a, const float *b, int64_t d, float *dot, float *sq);

/* The same of one chain, from its sum and both norms squared alone: terms of random size and order. For
 * operands of 16 bits, whose chains only decide which roundings flip. */
typedef struct dkv_quick {
    double sum, terms, first; /* of dot^2; of max(|a|^2 |b|^2/d - dot^2/d, 0) * d; of |a|^2 |b|^2 */
} dkv_quick;
dkv_quick dkv_makeQuick(int64_t d);
static inline double dkv_quickSquares(dkv_quick q, double dot2, double size) {
    double random = size - dot2;
    return q.sum * dot2 + (random > 0 ? q.terms * random : 0) - (q.first < 1 ? q.first * size : q.sum * dot2);
}

/* What chains of these operands really lose: `var` as a factor on the model's variance and `gain` (mean
 * relative error of the sum), by bin of sq. 1 and 0 until measured. */
typedef struct dkv_chainFit {
    float var[DKV_CHAIN_BINS];
    float gain[DKV_CHAIN_BINS];
    double model[DKV_CHAIN_BINS], real[DKV_CHAIN_BINS], drift[DKV_CHAIN_BINS], size[DKV_CHAIN_BINS];
    double count[DKV_CHAIN_BINS];
} dkv_chainFit;
void dkv_startFit(dkv_chainFit *f);
/* Runs the declared chain on a_i . b_j for n sampled pairs ([n, d] each; in the operands' own precision). */
void dkv_sampleFit(const dkv_noise *z, const double *a, const double *b, int64_t n, int64_t d, double weight,
                   bool quick, dkv_chainFit *f);
void dkv_endFit(dkv_chainFit *f);
static inline int dkv_chainBin(float sq) {
    uint32_t u;
    memcpy(&u, &sq, sizeof u);
    int e = (int)(u >> 23) - 127 + 24;
    return e < 0 ? 0 : e > DKV_CHAIN_BINS - 1 ? DKV_CHAIN_BINS - 1 : e;
}

/* How many rows are equal to row i, itself included, among those of the same class: equal numbers round
 * equally, so that their errors add before they are squared. hash[n], class[n] -> count[n]. DKV_EHARNESS: out
 * of memory. */
int dkv_countEqual(const uint64_t *hash, const int32_t *cls, int64_t n, float *count, dkv_err *err);
uint64_t dkv_hashBytes(uint64_t h, const void *x, size_t n);

#endif
