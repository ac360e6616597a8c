#include "vectors.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "spans.h"

dkv_vectors dkv_vectorsOf(const dualkv_problem *v, dkv_tensor_id id) {
    switch (id) {
    case DKV_O: return (dkv_vectors){v->tq, v->hq, v->dv, .keys = false};
    case DKV_LSE: return (dkv_vectors){v->tq, v->hq, 1, .by_head = true};
    case DKV_DQ: return (dkv_vectors){v->tq, v->hq, v->dqk, .keys = false};
    case DKV_DK: return (dkv_vectors){v->tk, v->hkv, v->dqk, .keys = true};
    case DKV_DV: return (dkv_vectors){v->tk, v->hkv, v->dv, .keys = true};
    default: return (dkv_vectors){1, v->hq, 1, .sums = true};
    }
}

int32_t dkv_segmentOf(const dkv_layout *l, bool keys, int64_t row) {
    const dkv_vectors s = {.keys = keys};
    int32_t low = 0, high = l->view.n_segments - 1;
    while (low < high) { /* the last segment that begins at or before the row, and has any */
        const int32_t mid = (low + high + 1) / 2;
        if (dkv_firstRow(&l->view.segments[mid], &s) <= row) low = mid;
        else high = mid - 1;
    }
    while (low > 0 && !dkv_countRows(&l->view.segments[low], &s)) low--;
    return low;
}

void dkv_markRegions(const dualkv_problem *v, const dkv_vectors *s, uint8_t *region) {
    memset(region, 0, (size_t)s->rows);
    for (int32_t e = 0; e < v->n_segments && !s->sums; e++) {
        const dualkv_segment *seg = &v->segments[e];
        memset(region + dkv_firstRow(seg, s), seg->depth > 0, (size_t)dkv_countRows(seg, s));
    }
}

uint64_t dkv_hashVector(const double *x, int64_t n) {
    uint64_t h = 0x9E3779B97F4A7C15ull, w;
    for (int64_t i = 0; i < n; i++) {
        memcpy(&w, &x[i], sizeof w);
        h = (h ^ w) * 0xD1B54A32D192ED03ull;
        h ^= h >> 31;
    }
    return h;
}

static int compareDoubles(const void *x, const void *y) {
    double a = *(const double *)x, b = *(const double *)y;
    return a < b ? -1 : a > b;
}

int64_t dkv_countDistinct(const double *x, int64_t n, double *work) {
    int64_t m = 0, k = 0;
    for (int64_t i = 0; i < n; i++)
        if (isfinite(x[i])) work[m++] = x[i];
    dkv_sortSpans(work, m, sizeof *work, compareDoubles);
    for (int64_t i = 0; i < m; i++) k += i == 0 || work[i] != work[i - 1];
    return k;
}
