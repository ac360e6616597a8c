/* twin_ride.h: the twin of all tensors on the traversal that truth and bound take, so that scores and dP are there
 * already. The same results as dkv_oracleTwin, bit for bit. */
#ifndef DKV_TWIN_RIDE_H
#define DKV_TWIN_RIDE_H

#include "oracle.h"
#include "tiles.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct dkv_ride dkv_ride;
typedef struct dkv_rider dkv_rider; /* one thread's */

/* May it ride? Not where its scores are others (operands rounded, tiles last first), where it needs more than one
 * walk, or where sums run through a whole head. */
bool dkv_twinRides(const dkv_problem *p, const dkv_inputs *in, const dualkv_arithmetic *a);
/* For so many threads. Kernel's O and LSE as for dkv_oracleTwin: complete before. *ride is closed by the caller,
 * after a failure too. */
int dkv_openRide(const dkv_problem *p, const dkv_layout *l, const dkv_inputs *in, const dualkv_arithmetic *a,
                 const double *kernel_o, const double *kernel_lse, int threads, dkv_oracle *out, dkv_ride **ride,
                 dkv_err *err);
void dkv_closeRide(dkv_ride *ride);
dkv_rider *dkv_riderOf(dkv_ride *ride, int thread);

/* A block: the truth's LSE of its rows is there. Then each of its tiles, with scores (cap: tanh, where softcap is on)
 * and dP [m, n], which it overwrites; and, in turn (dkv_awaitTurn), the tile's sums into keys. */
void dkv_rideBegin(dkv_rider *t, const dkv_head *h, const dkv_block *b);
void dkv_rideTile(dkv_rider *t, const dkv_tile *tile, double *s, double *cap, double *dp);
void dkv_rideKeys(dkv_rider *t);
void dkv_rideEnd(dkv_rider *t);
/* After all blocks, and after the bound. */
int dkv_finishRide(dkv_ride *ride, dkv_err *err);

#ifdef __cplusplus
}
#endif
#endif
