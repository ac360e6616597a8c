/* bound.h: what the files of the bound share (bound_terms.c, bound_chains.c, oracle_bound.c). Formulas and
 * their derivation: TOLERANCE.md, whose symbols the comments use. */
#ifndef DKV_BOUND_H
#define DKV_BOUND_H

#include "oracle.h"
#include "tiles.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Declared arithmetic in the form that the formulas use; the oracle's own 2^-53 is added to each unit. */
typedef struct dkv_units {
    const dualkv_arithmetic *a;
    double u, us;          /* an operation of the vector arithmetic; an operation on a score */
    double exp, log, tanh; /* relative errors of the functions */
    double in;             /* relative error of an operand of a product */
    double operand;        /* added to the magnitude of an operand that is not 0: its rounding at underflow */
    double score, dp, delta;            /* error of q.k, dO.v and dO.O relative to the magnitudes summed */
    double dp_round;                    /* dP rounded to s_format */
    double p, ds, out, partial;         /* unit roundoff of P, dS, outputs, partial sums */
    double w_p, w_ds, w_out, w_partial; /* their absolute errors at underflow */
    double grad_ops;                    /* vector operations from exp to dS */
    double kept_p, w_kept;              /* errors of P where dS is formed from a rounded P, else 0 */
    double w;                           /* an operation of the vector arithmetic at underflow */
    double w_exp;                       /* exp's result at underflow: flushed, by anyone, without remark */
    double scale, cap;                  /* |scale|; softcap or 0 */
    double slack;                       /* by which a maximum in use may be below the largest score */
} dkv_units;

void dkv_makeUnits(const dkv_problem *p, const dualkv_arithmetic *a, dkv_units *t);
/* Error of a chain of n products in `steps` steps, operand rounding included, relative to the magnitudes
 * summed. */
double dkv_sumError(const dkv_units *t, double n, double steps, double pieces, int64_t fold);

/* One row of scores s [n] (masked: -inf) and of X_ij = sum_c |q||k| becomes sigma [n] (may be x itself).
 * slope 0: no ALiBi; distance: of the row from the first key, positions. */
void dkv_sigmaRow(const dkv_units *t, double slope, double distance, int64_t n, const double *s,
                  const double *x, double *sigma);

typedef struct dkv_forward_row {
    double lse, max;   /* truth */
    double kappa, w0;  /* relative and absolute error of a weight beside exp's */
    double sum_h, top; /* out, added to: sum of p (e^x - 1); largest x */
} dkv_forward_row;

/* p [n]: exp(s - lse) on entry; on return the weights whose product with |V| bounds O's error. */
void dkv_forwardRow(const dkv_units *t, dkv_forward_row *r, int64_t n, const double *s, const double *sigma,
                    double *p);

typedef struct dkv_backward_row {
    double lse, tol_lse;
    double delta, base;     /* D; error of dP - D that is the same for the whole row */
    double chain;           /* of dQ */
    double slope, distance; /* as dkv_sigmaRow, for softcap with ALiBi */
} dkv_backward_row;

/* Weights of one row: wq, wk, wv [n], whose products with |K|, |Q| and |dO| bound dQ/scale, dK/scale and dV.
 * p [n]: exp(s - lse); z_ij = sum_c |dO||v|; chain_k: of dK and dV, for each key. wq may be z, wk dp. */
void dkv_backwardRow(const dkv_units *t, const dkv_backward_row *r, int64_t n, const double *s,
                     const double *sigma, const double *p, const double *z, const double *dp,
                     const double *chain_k, double *wq, double *wk, double *wv);

/* The same formula for the sink's logit. forward: x of exp(sink - max); backward: relative error of exp(sink
 * - lse). */
double dkv_sinkForward(const dkv_units *t, double sink, double max);
double dkv_sinkBackward(const dkv_units *t, double sink, double lse, double tol_lse);

/* Chains of the sums over rows: for each key, products (rows x query heads), steps and pieces. [tk] each. */
typedef struct dkv_key_chains {
    double *n, *steps, *pieces;
} dkv_key_chains;
int dkv_countKeyChains(const dkv_head *h, int32_t step, dkv_key_chains *c, dkv_err *err);
void dkv_freeKeyChains(dkv_key_chains *c);

/* Chains of the sums over keys of a block's rows, from its tiles in order: products, steps, key tiles and how
 * many of these may raise the running maximum. [m] each. */
typedef struct dkv_row_chains {
    const dualkv_arithmetic *a;
    int64_t m, slots, capacity;                    /* key tiles so far; room of tile_max, in doubles */
    int64_t range, tile;                           /* the last key tile seen */
    int64_t group[DKV_TILE_KEYS];                  /* step that each key of the traversal's tile belongs to */
    double *n, *steps, *tiles, *rises, *max, *top; /* top: largest sigma */
    double *last;                                  /* slot in which the row last saw a key */
    double *tile_max;                              /* [slots, m] */
} dkv_row_chains;
/* keys: the most that a row may see. */
int dkv_openRowChains(const dualkv_arithmetic *a, int64_t max_m, int64_t keys, dkv_row_chains *c, dkv_err *err);
void dkv_closeRowChains(dkv_row_chains *c);
void dkv_startRowChains(dkv_row_chains *c, int64_t m);
/* s, sigma [m, n]; offset: of the tile's first key in its range. */
void dkv_addRowChains(dkv_row_chains *c, const dkv_tile *t, int64_t offset, const double *s,
                      const double *sigma);
void dkv_endRowChains(dkv_row_chains *c, double u);

/* Elements of O, dQ, dK, dV for which nothing is claimed because an input of their own branch is not finite. */
int dkv_markExempt(const dkv_problem *p, const dkv_layout *l, const dkv_inputs *in, dkv_outputs *bound,
                   dkv_err *err);

#ifdef __cplusplus
}
#endif
#endif
