/* sequence.h: the replicated sequence of one node of the problem tree, by parent pointers. For references
 * only; kernels read dualkv_segment and dualkv_range, which another file makes (layout.c). */
#ifndef DKV_SEQUENCE_H
#define DKV_SEQUENCE_H

#include "problem.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Packed rows where each node's own queries and keys begin. */
typedef struct dkv_starts {
    int64_t *q, *k; /* [n_nodes] */
    int64_t tq, tk;
} dkv_starts;

int dkv_makeStarts(const dkv_problem *p, dkv_starts *out, dkv_err *err);
void dkv_freeStarts(dkv_starts *s);

/* Fills rows[0 .. context + len) with the packed key row of each token of node n's sequence, in order of
 * position. */
void dkv_fillSequence(const dkv_problem *p, const dkv_starts *s, int32_t n, int64_t *rows);

/* Tokens of the longest sequence of a node that has queries. */
int64_t dkv_longestSequence(const dkv_problem *p);

#ifdef __cplusplus
}
#endif
#endif
