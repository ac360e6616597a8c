/* layout.h: packed and replicated layouts, and the expansion E between them.
 *
 * Packed: per group the segments in depth-first order, groups one after another (Tq query rows, Tk key rows).
 * Replicated: one ordinary sequence for each segment that has queries: the tokens it sees, then its own. A key-only
 * prompt has no sequence of its own, and its copies carry no queries.
 * E maps a packed row to its copies; E^T sums gradients back. */
#ifndef DKV_LAYOUT_H
#define DKV_LAYOUT_H

#include "dkv_err.h"
#include "problem.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct dkv_layout {
    dualkv_problem view; /* what a kernel sees; its arrays point into this layout */
    dualkv_segment *segments;
    dualkv_range *ranges;
    float *alibi_slopes; /* [hq] or NULL */
} dkv_layout;

/* Builds the packed layout of a parsed problem. */
int dkv_makeLayout(const dkv_problem *p, dkv_layout *out, dkv_err *err);
/* The replicated layout, itself a problem that any kernel can take: one group for each segment that has queries,
 * in packed order. Where every row is causal over positions (causal, window, chunk, block) and nothing is key-only the
 * group is a single root segment (plain attention); for full and prefix, and below a key-only prompt, it is the chain of
 * the segment's ancestors (each cut to what is seen of it) and the segment, so that copies keep their own region's rule.
 * *q_source [tq] and *k_source [tk] (malloc'ed; the arguments may be NULL) give the packed row that each
 * replicated row copies; *q_own [tq] is 1 where the row is the segment's own (it carries dO, dLSE), 0 on copies. */
int dkv_makeReplicated(const dkv_problem *p, const dkv_layout *packed, dkv_layout *out, int64_t **q_source,
                       int64_t **k_source, uint8_t **q_own, dkv_err *err);
void dkv_freeLayout(dkv_layout *l);

/* Usual geometric ALiBi slopes: 2^(-8(h+1)/n) for a power of two n, interleaved with those of 2n elsewhere. */
void dkv_fillSlopes(int32_t hq, float *slopes);

/* Pairs (query row, key) that the mask lets through, summed over segments (not heads). O(segments); a block mask
 * is counted block by block up to 2^28 block pairs a segment, and above that its expected count is returned.
 * INT64_MAX stands for more. */
int64_t dkv_countPairs(const dkv_problem *p);
/* Useful FLOPs as kernels.md counts them: forward 2 (Dqk + Dv) pairs Hq; backward (6 Dqk + 4 Dv) pairs Hq. */
double dkv_forwardFlops(const dkv_problem *p);
double dkv_backwardFlops(const dkv_problem *p);

#ifdef __cplusplus
}
#endif
#endif
