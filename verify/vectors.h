/* vectors.h: the geometry of a packed tensor: rows x heads vectors of d elements; LSE lies [head, row]. */
#ifndef DKV_VECTORS_H
#define DKV_VECTORS_H

#include "../ref/tensors.h"

typedef struct dkv_vectors {
    int64_t rows, heads, d;
    bool keys, by_head, sums; /* rows are keys; LSE-like; dSink: no rows */
} dkv_vectors;

dkv_vectors dkv_vectorsOf(const dualkv_problem *v, dkv_tensor_id id);

static inline int64_t dkv_vectorAt(const dkv_vectors *s, int64_t row, int64_t head) {
    return (s->by_head ? head * s->rows + row : row * s->heads + head) * s->d;
}

/* The segment of a packed query row (or key row). */
int32_t dkv_segmentOf(const dkv_layout *l, bool keys, int64_t row);
static inline int64_t dkv_firstRow(const dualkv_segment *g, const dkv_vectors *s) { return s->keys ? g->k_start : g->q_start; }
static inline int64_t dkv_countRows(const dualkv_segment *g, const dkv_vectors *s) { return s->keys ? g->k_len : g->q_len; }
/* region [rows]: 1 where the row belongs to a response, 0 where to a prompt (and of dSink). */
void dkv_markRegions(const dualkv_problem *v, const dkv_vectors *s, uint8_t *region);
/* Of what a vector holds. */
uint64_t dkv_hashVector(const double *x, int64_t n);
/* Different finite numbers among n; work: room for n. */
int64_t dkv_countDistinct(const double *x, int64_t n, double *work);

#endif
