/* lanes.h: threads over work items (block of rows, KV head), which the blocked reference and the oracle share.
 *
 * Items are taken in one fixed order, block by block. What belongs to an item's rows is independent of the others;
 * sums into keys (dK, dV) must not depend on the threads' order: an item adds to a key tile only after every earlier
 * item of the same head has left it. Blocks walk keys in ascending packed order, and each thread publishes the row
 * below which it is done. Threads of one head so follow each other tile after tile, and the first never waits.
 * OpenBLAS runs inside each thread, single-threaded. */
#ifndef DKV_LANES_H
#define DKV_LANES_H

#include <pthread.h>

#include "tiles.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct dkv_lanes dkv_lanes;

typedef struct dkv_lane { /* one thread's */
    dkv_lanes *all;
    dkv_head h;
    dkv_block b;
    int64_t block, item; /* index of b; -1 if idle: item = block * hkv + KV head */
    int64_t done;        /* packed key row below which the item adds no more */
} dkv_lane;

struct dkv_lanes {
    int threads;
    int64_t n_items, next;
    dkv_lane **lane; /* [threads], the user's */
    void (*run)(dkv_lane *t); /* one item: h.kvh, b and its operands are set */
    pthread_mutex_t lock;
    pthread_cond_t moved;
};

/* Items of a problem, all heads. */
int64_t dkv_countItems(const dkv_head *h);
/* Threads for so many items: opt's, or as many as cores; not more than `room` bytes allow, at least one. */
int dkv_countThreads(const dkv_ref_options *opt, int64_t n_items, int64_t bytes_each, int64_t room);
int dkv_openLane(dkv_lanes *all, dkv_lane *t, const dkv_problem *p, const dkv_layout *l, const dkv_inputs *in,
                 dkv_err *err);
void dkv_closeLane(dkv_lane *t);
/* Runs all items; all of `lanes` but lock and moved is set. */
void dkv_runLanes(dkv_lanes *lanes);
/* Publishes that this thread adds to no key row below `row`; waits until all earlier items of the head are past
 * `end`. */
void dkv_awaitTurn(dkv_lane *t, int64_t row, int64_t end);

/* run(arg[0..n-1]), each in its own thread, OpenBLAS single-threaded meanwhile. Threads that cannot be started are
 * done without: their arg is not run, so that the others must be able to take its work. */
void dkv_runThreads(int n, void *(*run)(void *), void *const *arg);

#ifdef __cplusplus
}
#endif
#endif
