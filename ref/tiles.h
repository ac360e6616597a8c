/* tiles.h: the one traversal that the blocked reference, the bound and the twin share: for a KV head, blocks of query
 * rows (all query heads of that KV head stacked: row index m = (r - r0) * G + g) against blocks of keys of one range.
 * fp64 operands; scores with every modifier applied and masked pairs at -inf. Uses mask.h (the reference's), never
 * walk.h (the kernels'). Visits blocks without any visible pair never. Single-threaded; one dkv_head a thread. */
#ifndef DKV_TILES_H
#define DKV_TILES_H

#include "tensors.h"

#define DKV_TILE_KEYS 256 /* keys a block; measured, see tiles.c */

typedef struct dkv_head {
    const dkv_problem *p;
    const dkv_layout *l;
    const dkv_inputs *in;
    int32_t kvh, g;   /* KV head; query heads of it */
    int64_t max_m;    /* most stacked rows of a block */
    double *k, *v;    /* [tk, dqk], [tk, dv]: this head, fp64 */
} dkv_head;

/* Rows [r0, r1) of node `node`, m = (r1 - r0) * g stacked rows. */
typedef struct dkv_block {
    int32_t node;
    int64_t r0, r1, m;
    int64_t q_row;    /* packed Q row of r0 */
    double *q, *d_o;  /* [m, dqk], [m, dv] (d_o NULL where grad=off); owned by the block, reused */
} dkv_block;

typedef struct dkv_tile {
    int64_t j0, j1;  /* positions of its keys in the node's key list */
    int64_t k_row;   /* packed K row of j0; the tile lies in one range */
    int64_t n;       /* j1 - j0 <= DKV_TILE_KEYS */
    int vis;         /* 1: every pair visible; 2: some masked */
    int32_t range;   /* index into the segment's ranges */
} dkv_tile;

int dkv_openHead(const dkv_problem *p, const dkv_layout *l, const dkv_inputs *in, int32_t kvh, dkv_head *h,
                 dkv_err *err);
void dkv_closeHead(dkv_head *h);
int dkv_openBlock(const dkv_head *h, dkv_block *b, dkv_err *err); /* allocates for max_m */
void dkv_closeBlock(dkv_block *b);
/* Next block of rows over all nodes with queries; start with node = -1. False at the end. */
bool dkv_nextBlock(const dkv_head *h, dkv_block *b);
/* Next tile of the block in order of position; start with j1 = 0, range = -1. False at the end. */
bool dkv_nextTile(const dkv_head *h, const dkv_block *b, dkv_tile *t);

/* s [m, n] (leading dimension n): final scores, -inf where masked. cap_t [m, n] (or NULL): tanh(s_raw/softcap), untouched
 * where softcap is off. The derivative of the score by q.k is scale * (1 - cap_t^2). */
void dkv_tileScores(const dkv_head *h, const dkv_block *b, const dkv_tile *t, double *s, double *cap_t);

#endif
