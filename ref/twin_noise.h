/* twin_noise.h: what the twin samples and counts before a head: chains, equal rows. The formulas themselves are in
 * twin_formula.h, for host and device. */
#ifndef DKV_TWIN_NOISE_H
#define DKV_TWIN_NOISE_H

#include <math.h>

#include "dtype.h"
#include "tiles.h"
#include "twin_formula.h"

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

/* How many rows are equal to row i, itself included, among those of the same class: equal numbers round
 * equally, so that their errors add before they are squared. hash[n], class[n] -> count[n]; mean[n] of x[n] over them,
 * unless x is NULL. DKV_EHARNESS: out of memory. */
int dkv_countEqual(const uint64_t *hash, const int32_t *cls, int64_t n, float *count, const double *x, double *mean,
                   dkv_err *err);
uint64_t dkv_hashBytes(uint64_t h, const void *x, size_t n);

#endif
