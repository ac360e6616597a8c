#include "partials.h"

#include <string.h>

#include "dtype.h"
#include "mask.h"

dkv_partials dkv_partialsOf(const dualkv_arithmetic *a) {
    dkv_partials p = {0};
    if (!(dkv_unitRoundoff(a->partial_format) > a->unit)) return p;
    p.rows = (a->partial_of & DUALKV_PARTIAL_ROWS) && a->row_block > 0;
    p.segments = p.rows || (a->partial_of & DUALKV_PARTIAL_SEGMENTS);
    p.heads = !p.rows && (a->partial_of == 0 || (a->partial_of & DUALKV_PARTIAL_HEADS));
    p.summed = p.segments && (a->partial_of & DUALKV_PARTIAL_SUMMED);
    p.dq_block = a->dq_block;
    return p;
}

int dkv_sumCopies(const dualkv_arithmetic *a, dualkv_arithmetic *out, dkv_err *err) {
    const dkv_partials p = dkv_partialsOf(a);
    const bool none = !p.heads && !p.segments;
    *out = *a;
    if (!(dkv_unitRoundoff(a->out_format) > a->unit) || (!none && a->partial_format != a->out_format))
        return dkv_fail(err, DKV_EHARNESS,
                        "replicated sequences of this size are judged as one packed problem, which has no words for "
                        "gradients in this format");
    out->partial_format = a->out_format;
    out->partial_of = DUALKV_PARTIAL_SUMMED | (p.rows ? DUALKV_PARTIAL_ROWS : DUALKV_PARTIAL_SEGMENTS) |
                      (p.heads ? DUALKV_PARTIAL_HEADS : 0);
    return DKV_OK;
}

int64_t dkv_rowBlock(const dualkv_arithmetic *a, int64_t rows) {
    if (!dkv_partialsOf(a).rows) return 0;
    if (a->row_from3 > 0 && rows >= a->row_from3) return a->row_block3;
    return a->row_from2 > 0 && rows >= a->row_from2 ? a->row_block2 : a->row_block;
}

static int64_t commonDivisor(int64_t a, int64_t b) {
    while (b) {
        int64_t r = a % b;
        a = b;
        b = r;
    }
    return a;
}

int64_t dkv_commonRows(const dualkv_arithmetic *a, int64_t most) {
    int64_t all = 0, n = most;
    if (!dkv_partialsOf(a).rows) return most;
    all = a->row_block;
    if (a->row_from2 > 0) all = commonDivisor(all, a->row_block2);
    if (a->row_from3 > 0) all = commonDivisor(all, a->row_block3);
    while (n > 1 && all % n) n--;
    return n;
}

static int64_t blocksOf(int64_t n, int64_t size) { return (n + size - 1) / size; }

void dkv_countRoundings(const dkv_layout *l, const dualkv_arithmetic *a, int64_t heads, double *through, double *all) {
    const dkv_partials p = dkv_partialsOf(a);
    const dualkv_problem *v = &l->view;
    const double sums = p.heads ? (double)heads : 0;
    memset(through, 0, sizeof *through * (size_t)v->tk);
    memset(all, 0, sizeof *all * (size_t)v->tk);
    for (int64_t j = 0; j < v->tk && p.heads && !p.segments; j++) through[j] = 1, all[j] = sums;
    for (int32_t s = 0; s < v->n_segments && p.segments; s++) {
        const dualkv_segment *seg = &v->segments[s];
        const int64_t size = dkv_rowBlock(a, seg->q_len);
        for (int32_t r = 0; r < seg->range_count && seg->q_len > 0; r++) {
            const dualkv_range *g = &v->ranges[seg->range_begin + r];
            const bool own = g->k_start == seg->k_start && seg->k_len > 0;
            for (int64_t j = 0; j < g->len; j++) {
                /* Causal masks: a segment's own key is seen from its own row on. */
                const int64_t first = own && dkv_maskRow(v->mask)->whole == DKV_WHOLE_NEVER ? j : 0;
                const double blocks = p.rows ? (double)((blocksOf(seg->q_len, size) - first / size) * heads) : 0;
                const double here = p.rows ? blocks : 1 + p.heads;
                double *most = &through[g->k_start + j];
                *most = here > *most ? here : *most;
                all[g->k_start + j] += p.rows ? blocks : 1 + sums;
            }
        }
    }
}

double dkv_queryRoundings(const dkv_layout *l, const dualkv_arithmetic *a, int32_t segment) {
    const dkv_partials p = dkv_partialsOf(a);
    const dualkv_segment *seg = &l->view.segments[segment];
    double n = 0;
    if (p.dq_block <= 0) return 0;
    for (int32_t r = 0; r < seg->range_count; r++)
        n += (double)blocksOf(l->view.ranges[seg->range_begin + r].len, p.dq_block);
    return n > 0 && a->partial_format == a->out_format ? n - 1 : n;
}
