/* tiles.h: the one traversal that the blocked reference, the bound and the twin share: for a KV head,
 * blocks of query rows (all query heads of that KV head stacked: row index m = (r - r0) * G + g) against
 * blocks of keys of one range. fp64 operands; scores with every modifier applied and masked pairs at -inf.
 * Uses mask.h (the reference's), never walk.h (the kernels'). Visits blocks without any visible pair
 * never. Single-threaded; one dkv_head a thread. Memory is that of one block and one tile: operands are
 * decoded as they are met, never for a whole head. */
#ifndef DKV_TILES_H
#define DKV_TILES_H

#include "reference.h"
#include "tensors.h"

#ifdef __cplusplus
extern "C" {
#endif

#define DKV_TILE_KEYS 256  /* keys a tile; measured, see tiles.c */
#define DKV_BLOCK_ROWS 256 /* stacked rows a block, unless one row's query heads are more; measured */

typedef struct dkv_head {
    const dkv_problem *p;
    const dkv_layout *l;
    const dkv_inputs *in;
    int32_t kvh, g;   /* KV head; query heads of it: kvh * g .. */
    int64_t max_m;    /* most stacked rows of a block */
    int64_t rows;     /* most rows of a block: max_m = rows * g */
    int64_t keys;     /* most keys of a tile: DKV_TILE_KEYS, or less where a tile must end with a kernel's block */
    double scale;     /* of the score; the problem's */
    dkv_mutant mutant; /* 0 but in the suite's self-test */
} dkv_head;

/* Rows [r0, r1) of node `node`, m = (r1 - r0) * g stacked rows. */
typedef struct dkv_block {
    int32_t node;
    int64_t r0, r1, m;
    int64_t q_row;    /* packed Q row of r0 */
    bool finite;      /* no NaN or infinity in q, d_o */
    double *q, *d_o;  /* [m, dqk], [m, dv] (d_o NULL where grad=off); owned by the block, reused */
    double *k, *v;    /* the tile's keys, owned by the block */
} dkv_block;

typedef struct dkv_tile {
    int64_t j0, j1;  /* positions of its keys in the node's key list */
    int64_t k_row;   /* packed K row of j0; the tile lies in one range */
    int64_t n;       /* j1 - j0 <= DKV_TILE_KEYS */
    int vis;         /* 1: every pair visible; 2: some masked */
    int32_t range;   /* index into the segment's ranges */
    bool finite;     /* no NaN or infinity in k, v */
    const double *k, *v; /* [n, dqk], [n, dv]: the block's, valid until the next tile */
} dkv_tile;

int dkv_openHead(const dkv_problem *p, const dkv_layout *l, const dkv_inputs *in, int32_t kvh, dkv_head *h,
                 dkv_err *err);
void dkv_closeHead(dkv_head *h);
int dkv_openBlock(const dkv_head *h, dkv_block *b, dkv_err *err); /* allocates for max_m */
void dkv_closeBlock(dkv_block *b);
int64_t dkv_blockBytes(const dkv_head *h); /* what dkv_openBlock allocates */

/* Next block of rows over all nodes with queries; start with node = -1. False at the end. */
bool dkv_nextBlock(const dkv_head *h, dkv_block *b);
/* The two halves of dkv_nextBlock: move on without reading operands; read them. The sequence of blocks is
 * the same for every KV head. */
bool dkv_stepBlock(const dkv_head *h, dkv_block *b);
void dkv_loadBlock(const dkv_head *h, dkv_block *b);

/* Next tile of the block in order of position (and of packed key row); start with j1 = 0, range = -1.
 * False at the end. Keys that no row of the block sees are left out at both ends of a tile. */
bool dkv_nextTile(const dkv_head *h, const dkv_block *b, dkv_tile *t);

/* s [m, n] (leading dimension n): final scores, -inf where masked. cap_t [m, n] (or NULL):
 * tanh(s_raw/softcap), untouched where softcap is off. The derivative of the score by q.k is scale * (1 -
 * cap_t^2). */
void dkv_tileScores(const dkv_head *h, const dkv_block *b, const dkv_tile *t, double *s, double *cap_t);
/* dp [m, n]: dO . V. */
void dkv_tileDp(const dkv_head *h, const dkv_block *b, const dkv_tile *t, double *dp);
/* sees [r1 - r0, n]: 1 where row and key are a visible pair (the same for all query heads). */
void dkv_tileSees(const dkv_head *h, const dkv_block *b, const dkv_tile *t, uint8_t *sees);

/* c [m, d] (leading dimension ldc) += alpha w [m, n] x [n, d], and c [n, d] += alpha w^T x [m, d]. w is 0
 * at masked pairs, and these contribute nothing even where x is not finite: `finite` says that all of x
 * is. */
void dkv_addRows(const dkv_head *h, const dkv_block *b, const dkv_tile *t, double alpha, const double *w,
                 const double *x, int64_t d, bool finite, double *c, int64_t ldc);
void dkv_addKeys(const dkv_head *h, const dkv_block *b, const dkv_tile *t, double alpha, const double *w,
                 const double *x, int64_t d, bool finite, double *c, int64_t ldc);

/* Between the block's stacked rows [m, d] and a packed [tq, hq, d] tensor, or [m] and a [hq, tq] one. */
void dkv_putRows(const dkv_head *h, const dkv_block *b, const double *x, int64_t d, double *packed);
void dkv_getRows(const dkv_head *h, const dkv_block *b, const double *packed, int64_t d, double *x);
void dkv_putLse(const dkv_head *h, const dkv_block *b, const double *x, double *packed);
void dkv_getLse(const dkv_head *h, const dkv_block *b, const double *packed, double *x);

/* Rows of a [rows, heads, d] tensor of the problem's dtype: row0.. of one head into out [n, d]. False if
 * one is not finite. */
bool dkv_decodeRows(const void *in, dualkv_dtype t, int64_t row0, int64_t n, int64_t heads, int64_t head,
                    int64_t d, double *out);

/* max(x), sum(x) over n elements, in an order that depends on n alone. NaN is left out of the maximum. */
double dkv_maxOf(const double *x, int64_t n);
double dkv_sumOf(const double *x, int64_t n);

#ifdef __cplusplus
}
#endif
#endif
