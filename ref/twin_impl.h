/* twin_impl.h: what the files of the twin share (oracle_twin.c, twin_forward.c, twin_backward.c). */
#ifndef DKV_TWIN_IMPL_H
#define DKV_TWIN_IMPL_H

#include <float.h>

#include "clones.h"
#include "oracle.h"
#include "partials.h"
#include "twin_noise.h"

/* Sums of gradients of keys: x and its variance, element (row, c) at row * ld + c. `steps`: variance of what roundings
 * under way left (whole steps of their format), `var` then of what came since. NULL: none under way. Where a loss is
 * expected and the terms' order not declared: sums of |terms|, of the squares of each tile's sum, and of the terms', at
 * row * d + c. */
typedef struct dkv_keySum {
    double *x, *var, *steps;
    int64_t ld;
    double *size, *spread, *square;
} dkv_keySum;

/* A sum over keys for each row of the block, [m, d]: its value, its chain's variance and expected loss; first
 * and second moments of its terms' errors; [m]: terms that count, in all and in this tile, and the variance
 * of the tile's terms. */
typedef struct dkv_rowSum {
    double *acc, *chain, *loss, *a1, *a2, *terms, *now, *var;
    double *size, *spread, *square, *n, *n2; /* as of a key's; terms in all, and sum of the squares of each tile's: [m] */
} dkv_rowSum;

/* A row's largest score so far: the variance in use of it, of which its chain's, and what of it all keys of the row share;
 * the loss of q.k that the twin expects;
 * (1 - tanh^2)^2 of its softcap; how many keys (and values) of its segment equal this one. */
typedef struct dkv_topKey {
    double s, vs, chain, common, loss, keep2, equal, equal_v;
    int64_t key;
} dkv_topKey;

/* A row's maximum where it is not the largest score so far (twin_max.c): the variance of the score that it is; whether a
 * kernel's may be another. */
typedef struct dkv_lateMax {
    double vs;
    bool doubt;
} dkv_lateMax;

/* One thread's work on one KV head. Tile arrays are [m, n]. */
typedef struct dkv_twin {
    const dkv_problem *p;
    const dkv_layout *l;
    const dkv_inputs *in;
    const dualkv_arithmetic *a;
    const double *kernel_o, *kernel_lse;
    dkv_oracle *out;
    dkv_twin_units u;
    dkv_rounder round_part;
    dkv_partials part;
    bool table; /* maxima by key tile from a pass of their own */
    bool late;  /* they may be other than the largest score so far */
    dkv_head h;
    dkv_block b;
    dkv_tile t;
    dkv_tile
        *steps; /* [tiles + 1]: what dkv_nextTile continues from to reach each tile; order = last first */
    int64_t n_steps, at_step;
    int64_t n_cuts, first_cut, cuts[DKV_TILE_KEYS + 1]; /* key tiles of the kernel within the tile */
    double ds_more, ds_unit; /* powers of two near the tile's largest dS over P, and dS */
    double p_units[DKV_TILE_KEYS], over_p[DKV_TILE_KEYS]; /* of each key: near its largest P; 1 / (unit2 p_unit^2) */
    bool whole; /* never: */
    bool quick; /* 16 bits: variances of flips by row and column sums, not by products of matrices */
    dkv_quick quick_s, quick_dp;
    dkv_chainFit fit_s, fit_dp;
    float *equal_k, *equal_kv;         /* [tk]: a segment's keys, with V or without */
    float *equal_any[2], *equal_own[2]; /* [tq, g]: a group's, a node's rows; [1]: whatever their dLSE, as dV has it */
    double *any_d_lse, *own_d_lse;      /* [tq, g]: mean dLSE of those rows; where dLSE is given */
    /* of the block */
    float *q1, *o1; /* unit rows of q, dO */
    double *q_norm, *o_norm;
    double *before; /* [m or n, d] */
    dkv_rowSum o, dq;
    float *prod;                                                    /* [m or n, d] of one product */
    double *max, *sum, *sum_var, *lost, *score_var, *lse, *lse_var; /* [m], of forward */
    double *ones; /* [m]: keys of the largest score */
    dkv_topKey *top;                                                /* [m], of forward */
    uint64_t *row_class;                    /* [tq, g]: rows that err alike have the same */
    double *lse_kernel, *delta, *delta_var, *delta_own; /* [m], of backward; own: what subtracting dLSE leaves */
    double *tile_max, *tile_vs;                                     /* [m, key tiles]; vs, late: only where `late` */
    dkv_lateMax *late_max;                                          /* [m] */
    double late_vs[DKV_TILE_KEYS];                                  /* of the row at hand, as late_max.vs of each key tile */
    double *o_kernel;        /* [m, dv]: what backward's delta is made of */
    double *o_exact, *o_var; /* [m, dv]: O before its rounding, and its variance */
    float *q2, *do2, *flat;  /* [m, d]: squares, scaled; magnitudes */
    double q_unit, do_unit;  /* powers of two that they were divided by, before squaring */
    /* of the tile */
    float *k1, *v1, *k2, *v2, *flat_keys;
    double *k_norm, *v_norm, k_unit, v_unit;
    double exact[DKV_TILE_KEYS],
        exact_ref[DKV_TILE_KEYS]; /* forward's exp(s - ref) of the row at hand, and ref */
    bool has_exact;
    double *p_keys;                 /* [m, n]: forward's P */
    float *w_keys;                  /* [m, n]: its variance */
    double *s, *cap, *dp, *vs, *vd; /* vs, vd: variances of score and dP; one row each */
    float *sq, *dot, *tmp, *sq_dp, *dot_dp, *w, *w2;
    double *wide;        /* [m, n] */
    double *col, *col_n; /* [n]: running sum of P over rows, terms that count */
    double *row_ds2, *col_p2, *col_ds2, *col_vp, *col_vds; /* sums of squares, of variances: [m] and [n] */
    double *k_mean2, *v_mean2, *q_mean2,
        *do_mean2;       /* [d]: mean squares over the tile's keys, the block's rows */
    int64_t parts;       /* accumulators of dK and dV: query heads if their partial sums are rounded, else 1 */
    bool apart;          /* they are not the outputs' own arrays */
    int32_t carry;       /* heads, each with keys of its own here, whose running sums are one; 1 but with part.rows */
    bool lse_stands_in;  /* kernel_lse is the truth */
    bool shares;         /* the accumulators are those of another head's twin */
    dkv_keySum *dk, *dv; /* [parts] */
    bool anyhow;             /* a loss is expected of dK and dV, whose terms' order is not declared */
    double *key_n, *key_n2;  /* [tk]: terms of its sums, over all accumulators; sum of the squares of each tile's */
    double *dq_steps;    /* [m, d]: as a keySum's steps */
    int64_t dq_at;       /* the key block that dQ was last added to, over all ranges; -1: none */
    double *sink_sum, *sink_var; /* [g] */
} dkv_twin;

/* Loads the next tile: its keys rounded as declared, unit rows and squares; scores into t->s, their chains
 * into t->sq. In the kernel's order. False at the end of the block. */
bool dkv_twinTile(dkv_twin *t);
void dkv_twinRewind(dkv_twin *t); /* to before the block's first tile */
/* Of row i: variance of each score into t->vs; adds the chains' expected loss to the scores; rounds them if
 * declared. */
void dkv_twinScoreRow(dkv_twin *t, int64_t i);
/* Squares of x [n, d] over *unit^2, a power of two near the largest magnitude; times weight[row] where not
 * NULL. */
void dkv_twinSquares(const double *x, int64_t n, int64_t d, const float *weight, float *out, double *unit);

/* The row's largest score: noted after each tile's scores; then its chain walked, and all that depends on it set
 * right; the row sum's variance by its scores where P is rounded; the row's class. */
void dkv_twinNoteTop(dkv_twin *t, int64_t i);
void dkv_twinRefineTop(dkv_twin *t, int64_t i);
double dkv_twinSumVar(const dkv_twin *t, int64_t i);
double dkv_twinCommonVar(const dkv_twin *t, int64_t i, double keys); /* keys: the row sum without the sink */
void dkv_twinClassify(dkv_twin *t, int64_t i);

/* Only where t->late, but for the last. The row's maximum before any key; then, where there is a table, what its n tiles
 * leave (tile_max, tile_vs: in, their largest scores; out, the maxima in use); the row sum, in units of t->max. */
void dkv_twinStartMax(dkv_twin *t, int64_t i);
void dkv_twinRunTable(dkv_twin *t, int64_t i, int64_t n);
void dkv_twinStartSum(dkv_twin *t, int64_t i);
/* Largest score of key tile e of row i, and its variance. The maxima after each of them; returns what sums are multiplied by. */
double dkv_twinTopOf(const dkv_twin *t, int64_t i, int64_t e, double *vs);
double dkv_twinLateMaxima(dkv_twin *t, int64_t i, double *ref);
/* Adds to w what rounding P leaves where the maximum is in doubt. */
void dkv_twinDoubt(const dkv_twin *t, int64_t n, const double *exact, double fade, float *w);
double dkv_twinLateSumVar(const dkv_twin *t, int64_t i); /* as dkv_twinSumVar, where the largest score is not the maximum */
double dkv_twinUnknownMax(const dkv_twin *t, int64_t i); /* how far a kernel's may be from t->max */

/* How many of x exceed `least`, and the sum of squares. Sum of w x y. */
double dkv_twinCount(const double *x, int64_t n, double least, double *squares);
double dkv_twinWeighted(const float *w, const double *x, const float *y, int64_t n);
double dkv_twinDot(const float *x, const float *y, int64_t n);
double dkv_twinSizes(const double *x, int64_t n, double *squares); /* sum of |x|, and of x^2 */
/* out += by x; out = by x, or |by x|, 0 where that is not finite; x *= by. */
void dkv_twinAddFloats(const float *x, int64_t n, double by, double *out);
void dkv_twinAddScaled(const double *x, int64_t n, double by, double *out);
void dkv_twinFloats(const double *x, int64_t n, double by, float *out);
void dkv_twinMagnitudes(const double *x, int64_t n, double by, float *out);
void dkv_twinWeigh(float *x, int64_t n, float by);

/* dkv_stored of one value, by the format's name. */
static inline double dkv_twinStored(double x, double e2, double h, int32_t format) {
    return dkv_stored(x, dkv_roundTo(x, format), e2, h);
}

static inline double dkv_twinMean(const float *x, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += x[i];
    return n > 0 ? sum / (double)n : 1;
}

/* Mean square of each column of x [n, d] over the rows whose live[row] is not 0 (NULL: all); what is not finite left out. */
void dkv_twinMeans(const double *x, int64_t n, int64_t d, const double *live, double *out);

/* A sum of products went from before[c] to after[c]; squares * mean2[c] = sum of terms squared, about. The
 * variance of its roundings is that of a walk between both ends, whose partial sums grow as the weights do:
 * g_t is the share of the weights' sum after term t, f_t of their squares'. A term that is too small to move
 * the sum rounds nothing. */
typedef struct dkv_chainStep {
    double count, squares, factor; /* terms that round; factor on the variance */
    double fold, done;             /* products to a fold; terms of the sum so far */
    double g, g2, ff, share; /* sums over them of g, g^2, f (1 - f); squares / (sum of weights)^2 */
    double g_first, f_first; /* of the first of them */
} dkv_chainStep;
/* dkv_formulaAdd for each of n terms p * fade of a row's sum; rel: variances of p, over unit2. */
void dkv_twinAddTerms(const dkv_noise *z, dkv_spacing ulp, dkv_formula_sum *s, int64_t n, const double *p,
                      double fade, const double *rel, const float *equal);
/* Weights all alike. */
dkv_chainStep dkv_evenStep(double count, double squares, double factor, double fold, double done);
/* Weights w[n], n <= DKV_TILE_KEYS, of any sign; those up to `least` in size round nothing. */
dkv_chainStep dkv_walkStep(const double *w, int64_t n, double least, double factor, double fold, double done);
/* out[c] += the variance. */
void dkv_twinChain(const dkv_noise *z, dkv_chainStep k, int64_t d, const double *before, const double *after,
                   const double *mean2, double *out);
/* Forward (O, LSE) and backward (dQ; adds to dK, dV, dSink) of one block: begin; for each tile prepare
 * (backward), each row, finish the tile; end. Both take the scores of one tile in one pass, unless backward
 * needs O before its rounding. */
void dkv_twinBeginForward(dkv_twin *t);
void dkv_twinForwardRow(dkv_twin *t, int64_t i); /* reads s and vs of the row */
void dkv_twinForwardTile(dkv_twin *t);
void dkv_twinEndForward(dkv_twin *t);
void dkv_twinBeginBackward(dkv_twin *t);
void dkv_twinBackwardPairs(dkv_twin *t);          /* before the first row of a tile; reads dp */
void dkv_twinBackwardRow(dkv_twin *t, int64_t i); /* reads vs; s becomes P, dp dS */
void dkv_twinBackwardQueries(dkv_twin *t);        /* the tile's terms of dQ; */
void dkv_twinBackwardKeys(dkv_twin *t);           /* of dK and dV, in order of blocks */
void dkv_twinEndBackward(dkv_twin *t);

/* Sums that are rounded under way. Before a tile's terms of dQ are added; after a block's last tile (dK, dV; last_head: of
 * those whose sums are carried on); then, with the head's last block, the outputs' own rounding. */
void dkv_twinPartQueries(dkv_twin *t);
void dkv_twinPartKeys(dkv_twin *t, bool last_head);
void dkv_twinFinishKeys(dkv_twin *t);

/* The same problem with K and V of each query head. Closed by the caller, after a failure too. */
typedef struct dkv_spread {
    dkv_problem p;
    dkv_layout l;
    dkv_inputs in;
    char *k, *v;
} dkv_spread;
int dkv_openSpread(const dkv_problem *p, const dkv_layout *l, const dkv_inputs *in, dkv_spread *x, dkv_err *err);
void dkv_closeSpread(dkv_spread *x);

#endif
