/* truth.h: the fp64 truth of one block of rows, tile by tile, for the blocked reference and for the oracle, which
 * takes the same scores further. Forward is an online softmax; backward starts from the O and LSE that forward put
 * into the outputs. */
#ifndef DKV_TRUTH_H
#define DKV_TRUTH_H

#include "tiles.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct dkv_truth { /* one thread's; [m] and [m, d] are of the block at hand */
    const dkv_head *h;
    const dkv_block *b;
    const dkv_inputs *in;
    dkv_outputs *out;
    double *o, *dq;                  /* [m, dv], [m, dqk] */
    double *max, *sum, *lse, *delta; /* [m] */
    uint8_t *sees, *seen; /* [rows, tile]; [m] forward: rows that met a key whose score may be -inf */
} dkv_truth;

/* `backward` false: of forward alone. h, b, in, out stay the caller's. */
int dkv_openTruth(const dkv_head *h, const dkv_block *b, const dkv_inputs *in, dkv_outputs *out, bool backward,
                  dkv_truth *t, dkv_err *err);
void dkv_closeTruth(dkv_truth *t);
int64_t dkv_truthBytes(const dkv_head *h); /* what dkv_openTruth allocates */

void dkv_truthBeginForward(dkv_truth *t);
/* s [m, n]: the tile's scores; p [m, n]: scratch, may be s. */
void dkv_truthForwardTile(dkv_truth *t, const dkv_tile *tile, const double *s, double *p);
void dkv_truthEndForward(dkv_truth *t); /* O, LSE into out */

/* Sums the sinks' gradient over the block's rows into dsink [g] (NULL: none). */
void dkv_truthBeginBackward(dkv_truth *t, double *dsink);
/* s, dp [m, n] become p = exp(s - LSE) and ds (p may be s, ds dp); adds to the block's dQ. cap: of dkv_tileScores,
 * NULL where softcap is off. */
void dkv_truthBackwardRows(dkv_truth *t, const dkv_tile *tile, const double *s, const double *cap, const double *dp,
                           double *p, double *ds);
/* Adds the same p and ds to dK and dV: in turn (dkv_awaitTurn). */
void dkv_truthBackwardKeys(dkv_truth *t, const dkv_tile *tile, const double *p, const double *ds);
void dkv_truthEndBackward(dkv_truth *t); /* dQ into out */
/* dsink [hq]: the sum over items, in order, of each item's sums over rows [n_items, g]. */
void dkv_sumSinks(const dkv_problem *p, int64_t n_items, const double *each, double *dsink);

#ifdef __cplusplus
}
#endif
#endif
