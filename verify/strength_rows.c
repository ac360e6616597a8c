#include "strength_rows.h"

#include <math.h>

#include "../ref/dtype.h"
#include "../ref/mask.h"

#define ROWS 8 /* of a segment: its last, and others evenly */
#define HEADS 2
#define SEGMENTS 64 /* of a case */

static double decodeAt(const void *at, dualkv_dtype t, int64_t i) {
    double x;
    dkv_decodeArray((const char *)at + (size_t)i * dkv_dtypeSize(t), t, 1, &x);
    return x;
}

/* Packed K row of the key at position j of what the segment sees. */
static int64_t keyRow(const dualkv_problem *v, const dualkv_segment *s, int64_t j) {
    for (int32_t r = 0; r < s->range_count; r++) {
        const dualkv_range *g = &v->ranges[s->range_begin + r];
        if (j >= g->pos && j < g->pos + g->len) return g->k_start + j - g->pos;
    }
    return -1;
}

static double scoreOf(const dkv_case *c, int64_t q_row, int64_t k_row, int32_t h, int64_t distance) {
    const dkv_problem *p = c->p;
    int64_t q = (q_row * p->hq + h) * p->dqk, k = (k_row * p->hkv + h / (p->hq / p->hkv)) * p->dqk;
    double s = 0;
    for (int32_t e = 0; e < p->dqk; e++) s += decodeAt(c->in.q, p->dtype, q + e) * decodeAt(c->in.k, p->dtype, k + e);
    s *= p->scale;
    if (p->softcap > 0) s = p->softcap * tanh(s / p->softcap);
    return p->alibi ? s - c->packed.alibi_slopes[h] * (double)distance : s;
}

static void loseKey(dkv_case *c, int slip, int32_t i, int64_t r, int32_t h, int64_t j) {
    const dkv_problem *p = c->p;
    const dualkv_problem *v = &c->packed.view;
    const dualkv_segment *s = &v->segments[i];
    int64_t row = s->q_start + r, k_row = keyRow(v, s, j), position = s->context + r, at = h * v->tq + row;
    int64_t keys = p->mask == DUALKV_CAUSAL ? position + 1 : 0;
    double lse = c->oracle.truth.lse[at];
    if (k_row < 0 || !isfinite(lse)) return;
    double w = exp(scoreOf(c, row, k_row, h, position > j ? position - j : j - position) - lse);
    if (!(w < 1)) w = 1;
    dkv_noteSlip(c, slip, DKV_LSE, i, at, lse + log1p(-w), keys);
    for (int32_t e = 0; e < p->dv; e++) {
        int64_t o = (row * p->hq + h) * p->dv + e;
        double value = decodeAt(c->in.v, p->dtype, (k_row * p->hkv + h / (p->hq / p->hkv)) * p->dv + e);
        dkv_noteSlip(c, slip, DKV_O, i, o, w < 1 ? (c->oracle.truth.o[o] - w * value) / (1 - w) : 0, keys);
    }
}

static void loseInRow(dkv_case *c, int32_t i, int64_t r) {
    int64_t n = c->p->nodes[i].context + c->p->nodes[i].len, first = 0, last = n - 1;
    while (first < n && !dkv_maskSees(c->p, i, r, first)) first++;
    while (last > first && !dkv_maskSees(c->p, i, r, last)) last--;
    for (int32_t h = 0; first < last && h < HEADS && h < c->p->hq; h++) {
        loseKey(c, DKV_SLIP_FIRST, i, r, h, first);
        loseKey(c, DKV_SLIP_LAST, i, r, h, last);
    }
}

void dkv_loseKeys(dkv_case *c, const bool *rows) {
    int32_t n = c->p->n_nodes, step = n / SEGMENTS + 1;
    for (int32_t i = 0; i < n; i += step) {
        int64_t len = c->p->nodes[i].len;
        for (int64_t k = 1; rows[i] && k <= ROWS && k <= len; k++) loseInRow(c, i, len * k / (len < ROWS ? len : ROWS) - 1);
    }
}
