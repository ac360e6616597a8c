/* Backward: delta first, then each key tile of each segment walks the rows of the segment and of all its
 * descendants, for every query head of its KV head. The tile owns its dK and dV; dQ is summed over key tiles
 * in fp32, in fixed order. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "emu_fault.h"

typedef struct backward {
    dkv_emu *e;
    const dualkv_launch *l;
    const dualkv_problem *p;
    int ldk, ldq, ldv;
    float *sum_q;         /* workspace: dQ accumulators [tq, hq, ldq] */
    float *delta;         /* workspace: [hq, tq], dO.O - dLSE, and one place that is never written */
    float *k, *kt, *vt;   /* the key tile: [bn, ldq], [dqk, ldk], [dv, ldk] */
    float *sum_k, *sum_v; /* its gradients: [bn, ldq], [bn, ldv] */
    float *q, *d_o;       /* the query tile: [bm, ldq], [bm, ldv] */
    float *s, *ds, *cap;  /* [bm, ldk]: scores, then P; dP, then dS; tanh(s/softcap) */
    float by;             /* what sums of dS K and dS^T Q are multiplied by: the scale, unless dS was */
    float *exact_o;       /* [tq, hq, dv]: O before its rounding, or NULL */
    /* As sum_k and sum_v: the running sum over a segment; its query heads' sums; those of all. NULL unless the options ask. */
    float *run_k, *run_v, *segment_k, *segment_v, *all_k, *all_v;
    float *part_q; /* [bm, ldq]: a tile's terms of dQ, where their running sum is rounded */
} backward;

size_t dkv_emuWorkspace(const dualkv_problem *p) {
    size_t rows, a, b, n;
    if (__builtin_mul_overflow((size_t)p->tq, (size_t)p->hq, &rows) ||
        __builtin_mul_overflow(rows, (size_t)dkv_emuPad(p->dqk) * sizeof(float), &a) ||
        __builtin_mul_overflow(rows, sizeof(float), &b) || __builtin_add_overflow(a, b, &n) ||
        __builtin_add_overflow(n, sizeof(float), &n))
        return SIZE_MAX;
    return n;
}

/* Rows of dO. */
static void loadGradient(const backward *b, int h, int64_t row, int n, float *out, int ld) {
    const dualkv_problem *p = b->p;
    dualkv_tensor t = b->l->d_o;
    if (b->e->fault == F_I4) { /* kept inside dO */
        int64_t last = (p->tq - 1) * t.row + (p->hq - 1) * t.head;
        t.row = b->l->o.row;
        t.head = b->l->o.head;
        for (int i = 0; i < n; i++)
            if ((row + i) * t.row + h * t.head > last) t.row = t.head = 0;
    }
    dkv_emuLoad(p, t, h, row, n, p->tq, p->dv, out, ld, 0);
}

static float computeDelta(const backward *b, int64_t row, int h) {
    const dualkv_problem *p = b->p;
    const int fault = b->e->fault;
    float o[256], d_o[256], sum = 0.0f;
    dkv_emuLoad(p, b->l->o, h, row, 1, p->tq, p->dv, o, 256, 0);
    if (b->exact_o) memcpy(o, b->exact_o + (row * p->hq + h) * p->dv, (size_t)p->dv * sizeof *o);
    loadGradient(b, h, row, 1, d_o, 256);
    for (int c = 0; c < p->dv; c++) {
        sum += d_o[c] * o[c];
        if (fault == F_E4) dkv_emuRound(&sum, 1, DUALKV_BF16);
    }
    if (p->dlse && fault != F_G1) {
        const float *at = dkv_emuAt(b->l->d_lse, row, h);
        float d_lse = fault == F_Y32 ? ((float *)b->l->d_lse.data)[row * p->hq + h] : *at;
        sum -= fault == F_Y17 ? -d_lse : d_lse;
    }
    return fault == F_X12 ? 0.0f : sum;
}

static void computeDeltas(backward *b) {
    const dualkv_problem *p = b->p;
    int64_t extra = 0, end = p->hq * p->tq + 16; /* fault B6: rows that rounding up has added so far */
    for (int i = 0; i < p->n_segments; i++) {
        const dualkv_segment *s = &p->segments[i];
        for (int h = 0; h < p->hq; h++)
            for (int64_t row = s->q_start; row < s->q_start + s->q_len; row++)
                if (h * p->tq + row + extra < end)
                    b->delta[h * p->tq + row + extra] = computeDelta(b, row, h);
        if (b->e->fault == F_B6) extra += (8 - s->q_len % 8) % 8;
    }
}

/* P from the score and LSE, dS from dP and delta. A row without keys, LSE = -inf, subtracts 0. */
static void gradientRow(backward *b, const dkv_emuTile *t, int i) {
    const dualkv_problem *p = t->p;
    const int fault = b->e->fault, n = fault == F_B2 ? b->e->bn : t->nv;
    float *x = b->s + (int64_t)i * b->ldk, *ds = b->ds + (int64_t)i * b->ldk;
    int64_t row = t->s->q_start + t->r0 + i;
    int past = t->r0 + i >= t->s->q_len; /* fault B5: such a row reads what was never written */
    float delta = b->delta[past ? p->hq * p->tq : (fault == F_Y9 && t->h ? t->h - 1 : t->h) * p->tq + row];
    float lse = past ? delta : *dkv_emuAt(b->l->lse, row - (fault == F_Y19 && i == 0 && t->r0 > 0), t->h);
    for (int c = t->nv; c < n; c++) x[c] = 0.0f;
    dkv_emuExp(x, b->e->bn, lse == -INFINITY && fault != F_C1 ? 0.0f : lse);
    if (fault == F_E5) dkv_faultFlush(x, n);
    if (fault == F_X13) dkv_emuRound(x, n, DUALKV_FP16);
    if (fault == F_X9) dkv_emuRound(x, n, p->dtype);
    if (fault == F_Y22) dkv_emuRound(ds, n, dkv_fault16(p));
    for (int c = 0; c < n; c++) ds[c] = x[c] * (ds[c] - delta);
    if (p->softcap > 0.0f && fault != F_G3) {
        const float *th = b->cap + (int64_t)i * b->ldk;
        for (int c = 0; c < n; c++) ds[c] *= 1.0f - th[c] * th[c];
    }
    dkv_emuRoundP(b->e, p, x, n);
    for (int c = 0; c < n && b->e->ds_scaled; c++) ds[c] *= p->scale;
    dkv_emuRoundP(b->e, p, ds, n);
}

/* x = round(x + by y); y = 0. */
static void addRounded(const backward *b, float *x, float *y, int64_t n, float by) {
    for (int64_t i = 0; i < n; i++) {
        x[i] += by * y[i];
        y[i] = 0.0f;
    }
    dkv_emuRound(x, n, b->p->dtype);
}

/* A tile's terms of dQ into a running sum that is rounded, scale included. */
static void addQueries(backward *b, const dkv_emuTile *t, int n, float *sum_q) {
    const int dqk = b->p->dqk;
    dkv_emuMultiply(
        &(dkv_emuProduct){b->e->tc, t->m, dqk, n, b->ds, b->ldk, 1, b->k, b->ldq, b->part_q, b->ldq});
    for (int i = 0; i < t->m; i++)
        addRounded(b, sum_q + (int64_t)i * b->p->hq * b->ldq, b->part_q + (int64_t)i * b->ldq, dqk, b->by);
}

static void backwardTile(backward *b, const dkv_emuTile *t) {
    const dualkv_problem *p = b->p;
    int64_t row = t->s->q_start + t->r0;
    const int fault = b->e->fault, tc = b->e->tc, bn = b->e->bn, ldk = b->ldk, n = fault == F_B2 ? bn : t->nv;
    const int m = fault == F_B5 ? b->e->bm : t->m; /* rows that dK and dV sum over */
    dkv_emuTile whole = *t;
    whole.m = m;
    float *sum_q = b->sum_q + (row * p->hq + t->h) * b->ldq;
    dkv_emuLoad(p, b->l->q, t->h, row, m, row + t->m, p->dqk, b->q, b->ldq, 0);
    memset(b->d_o, 0, (size_t)m * b->ldv * sizeof *b->d_o);
    loadGradient(b, t->h, row, t->m, b->d_o, b->ldv);
    dkv_emuRoundIn(b->e, b->q, (int64_t)m * b->ldq);
    dkv_emuRoundIn(b->e, b->d_o, (int64_t)m * b->ldv);
    memset(b->s, 0, (size_t)m * ldk * sizeof *b->s);
    memset(b->ds, 0, (size_t)m * ldk * sizeof *b->ds);
    dkv_emuMultiply(&(dkv_emuProduct){tc, m, bn, p->dqk, b->q, b->ldq, 1, b->kt, ldk, b->s, ldk});
    dkv_emuMultiply(&(dkv_emuProduct){tc, m, bn, p->dv, b->d_o, b->ldv, 1, b->vt, ldk, b->ds, ldk});
    dkv_emuScores(b->e, &whole, b->s, b->cap, ldk);
    dkv_emuRoundScores(b->e, p, b->s, (int64_t)m * ldk);
    dkv_emuRoundScores(b->e, p, b->ds, (int64_t)m * ldk);
    for (int i = 0; i < m; i++) gradientRow(b, t, i);
    /* Columns past the range are left out of all three products: a limited context may end in the middle of a
     * tile. */
    const int rows_v = fault == F_Y4 && t->m < b->e->bm ? 0 : m;
    dkv_emuMultiply(
        &(dkv_emuProduct){tc, t->nv, p->dv, rows_v, b->s, 1, ldk, b->d_o, b->ldv, b->sum_v, b->ldv});
    dkv_emuMultiply(&(dkv_emuProduct){tc, t->nv, p->dqk, m, b->ds, 1, ldk, b->q, b->ldq, b->sum_k, b->ldq});
    if (fault == F_Y23 && ++b->e->tiles % 53 == 0) return;
    if (b->part_q) return addQueries(b, t, n, sum_q);
    dkv_emuMultiply(
        &(dkv_emuProduct){tc, t->m, p->dqk, n, b->ds, ldk, 1, b->k, b->ldq, sum_q, (int64_t)p->hq * b->ldq});
    for (int i = 0; i < t->m && fault == F_X15; i++)
        dkv_emuRound(sum_q + (int64_t)i * p->hq * b->ldq, p->dqk, dkv_fault16(p));
}

static int64_t keySums(const backward *b) { return (int64_t)b->e->bn * b->ldq; }
static int64_t valueSums(const backward *b) { return (int64_t)b->e->bn * b->ldv; }

/* A block of rows into the running sums. */
static void takeRows(backward *b) {
    addRounded(b, b->run_k, b->sum_k, keySums(b), b->by);
    addRounded(b, b->run_v, b->sum_v, valueSums(b), 1.0f);
}

/* Rows of segment d that need the keys [c0, c0 + bn) of range g, in query tiles counted from the segment's
 * start. */
static void walkRows(backward *b, const dualkv_segment *d, const dualkv_range *g, int h, int64_t c0) {
    int64_t lo, hi, bm = b->e->bm;
    dkv_emuView w;
    dkv_emuLook(b->e, 1, b->p, d, g, &w);
    int nv = (int)dkv_walkMin(b->e->bn, w.g.len - c0);
    if (nv <= 0) return;
    dkv_walkRows(&w.p, &w.s, &w.g, c0, c0 + nv, &lo, &hi);
    if (b->e->fault == F_A3 && !w.own) lo = dkv_walkMax(lo, c0);
    for (int64_t r0 = lo / bm * bm; r0 < hi; r0 += bm) {
        dkv_emuTile t = {&w.p, &w.s, &w.g, r0, c0, (int)dkv_walkMin(bm, d->q_len - r0), nv, h, 0, w.own, 0};
        t.kind = dkv_walkTile(&w.p, &w.s, &w.g, r0, r0 + t.m, c0, c0 + nv);
        if (t.kind) backwardTile(b, &t);
        if (t.kind && b->run_k) takeRows(b);
    }
}

/* What d sees of segment s: a range that starts at its first key (ranges have keys), or NULL. */
static const dualkv_range *findRange(const dualkv_problem *p, const dualkv_segment *d,
                                     const dualkv_segment *s) {
    for (int i = 0; i < d->range_count; i++)
        if (p->ranges[d->range_begin + i].k_start == s->k_start) return &p->ranges[d->range_begin + i];
    return NULL;
}

/* The tile's sums times x, rounded to a format. */
static void scaleSums(backward *b, float x, int32_t format) {
    for (int64_t i = 0; i < (int64_t)b->e->bn * b->ldq; i++) b->sum_k[i] *= x;
    for (int64_t i = 0; i < (int64_t)b->e->bn * b->ldv; i++) b->sum_v[i] *= x;
    dkv_emuRound(b->sum_k, (int64_t)b->e->bn * b->ldq, format);
    dkv_emuRound(b->sum_v, (int64_t)b->e->bn * b->ldv, format);
}

/* Which child of s, counted from 1, segment i descends from. */
static int childNumber(const dualkv_problem *p, const dualkv_segment *s, int i) {
    int n = 0;
    for (; &p->segments[i] != s; i--) n += p->segments[i].depth == s->depth + 1;
    return n;
}

/* Faults of the sum over a segment's descendants and query heads, before segment i is added for the j-th
 * head: 0 skips it. */
static int beforeSegment(backward *b, const dualkv_segment *s, int i, int j) {
    const int fault = b->e->fault, self = &b->p->segments[i] == s;
    if (s->depth > 0) return !(fault == F_Y2 && j > 0);
    if (fault == F_Y10 && b->p->segments[i].depth > 1) return 0;
    if (fault == F_Y15 && childNumber(b->p, s, i) > 8) return 0;
    if ((fault == F_F1 && self) || (fault == F_H5 && !self)) scaleSums(b, 0.0f, DUALKV_EXACT);
    return !(fault == F_X14 && !self && (i + 1 == b->p->n_segments || b->p->segments[i + 1].depth == 0));
}

static int countChildren(const dualkv_problem *p, int segment) {
    int n = 0;
    for (int i = segment + 1; i < p->n_segments && p->segments[i].depth > p->segments[segment].depth; i++)
        n += p->segments[i].parent == segment;
    return n;
}

/* dK, scaled, and dV of the n keys from offset c0 of a segment. */
static void storeKeys(backward *b, int segment, int kvh, int64_t c0, int n) {
    const dualkv_problem *p = b->p;
    const dualkv_segment *s = &p->segments[segment];
    const int fault = b->e->fault, children = s->depth == 0 ? countChildren(p, segment) : 0;
    int64_t to = s->k_start + c0;
    if (fault == F_K3 && children > 1) scaleSums(b, 1.0f / (float)children, DUALKV_EXACT);
    if (fault == F_X33 && s->q_len == 0) scaleSums(b, 0.0f, DUALKV_EXACT);
    if (fault == F_Y28 && s->k_len == 1) scaleSums(b, 0.0f, DUALKV_EXACT);
    if (fault == F_L10 && children > 1) scaleSums(b, (float)(children - 1) / (float)children, DUALKV_EXACT);
    if (fault == F_I1 && to + n == p->tk && n < b->e->bn) return;
    for (int i = 0; i < segment && fault == F_F3 && s->depth > 0; i++)
        to += (b->e->bn - p->segments[i].k_len % b->e->bn) % b->e->bn;
    for (int j = 0; j < n && to + j < p->tk; j++) {
        float *dk = b->sum_k + (int64_t)j * b->ldq, *dv = b->sum_v + (int64_t)j * b->ldv;
        for (int c = 0; c < p->dqk && !b->e->partials; c++) dk[c] *= b->by;
        if (fault == F_X11) dkv_faultCut(p, dk, p->dqk), dkv_faultCut(p, dv, p->dv);
        dkv_emuStore(p, b->l->dk, kvh, to + j, p->dqk, dk);
        dkv_emuStore(p, b->l->dv, kvh, to + j, p->dv, dv);
        if (fault == F_Y20 && to + j == p->tk - 1) dkv_emuStore(p, b->l->dv, kvh, p->tk, p->dv, dv);
    }
}

static void addSums(float *to, float *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        to[i] += x[i];
        x[i] = 0.0f;
    }
}

/* A query head's dK, scaled, and dV, rounded and added to the others' of the segment, or of all. */
static void takeHead(backward *b) {
    const int64_t nk = keySums(b), nv = valueSums(b);
    for (int64_t i = 0; i < nk; i++) b->sum_k[i] *= b->by;
    dkv_emuRound(b->sum_k, nk, b->p->dtype);
    dkv_emuRound(b->sum_v, nv, b->p->dtype);
    addSums(b->segment_k ? b->segment_k : b->all_k, b->sum_k, nk);
    addSums(b->segment_v ? b->segment_v : b->all_v, b->sum_v, nv);
}

static void takeSegment(backward *b) {
    float *k = b->run_k ? b->run_k : b->segment_k, *v = b->run_v ? b->run_v : b->segment_v;
    dkv_emuRound(k, keySums(b), b->p->dtype);
    dkv_emuRound(v, valueSums(b), b->p->dtype);
    addSums(b->all_k, k, keySums(b));
    addSums(b->all_v, v, valueSums(b));
}

/* Where partial sums of segments are rounded, segments are the outer loop. */
static void sumSegments(backward *b, int segment, int kvh, int64_t c0) {
    const dualkv_problem *p = b->p;
    const dualkv_segment *s = &p->segments[segment];
    const int g = p->hq / p->hkv;
    for (int i = segment; i < p->n_segments && (i == segment || p->segments[i].depth > s->depth); i++) {
        const dualkv_range *seen = findRange(p, &p->segments[i], s);
        if (!seen) continue;
        for (int j = 0; j < g; j++) {
            walkRows(b, &p->segments[i], seen, kvh * g + j, c0);
            if (!b->run_k) takeHead(b);
        }
        takeSegment(b);
    }
}

static void ownKeyTile(backward *b, int segment, int kvh, int64_t c0) {
    const dualkv_problem *p = b->p;
    const dualkv_segment *s = &p->segments[segment];
    int g = p->hq / p->hkv, bn = b->e->bn, n = (int)dkv_walkMin(bn, s->k_len - c0);
    int64_t first = s->k_start + c0, from = b->e->fault == F_K1 && s->depth == 0 ? c0 : first, end = from + n;
    dkv_emuLoad(p, b->l->k, kvh, from, bn, end, p->dqk, b->k, b->ldq, 0);
    dkv_emuLoad(p, b->l->k, kvh, from, bn, end, p->dqk, b->kt, b->ldk, 1);
    dkv_emuLoad(p, b->l->v, kvh, from, bn, end, p->dv, b->vt, b->ldk, 1);
    dkv_emuRoundIn(b->e, b->k, (int64_t)bn * b->ldq);
    dkv_emuRoundIn(b->e, b->kt, (int64_t)p->dqk * b->ldk);
    dkv_emuRoundIn(b->e, b->vt, (int64_t)p->dv * b->ldk);
    memset(b->sum_k, 0, (size_t)bn * b->ldq * sizeof *b->sum_k);
    memset(b->sum_v, 0, (size_t)bn * b->ldv * sizeof *b->sum_v);
    if (b->segment_k) sumSegments(b, segment, kvh, c0);
    for (int j = 0; j < g && !b->segment_k; j++) {
        const int h = b->e->fault == F_X32 ? j * p->hkv + kvh : kvh * g + j;
        for (int i = segment; i < p->n_segments && (i == segment || p->segments[i].depth > s->depth); i++) {
            const dualkv_range *seen = findRange(p, &p->segments[i], s);
            if (!seen || !beforeSegment(b, s, i, j)) continue;
            walkRows(b, &p->segments[i], seen, h, c0);
            if (b->e->fault == F_E1 && s->depth == 0 && i > segment) scaleSums(b, 1.0f, dkv_fault16(p));
        }
        if (b->e->partials) takeHead(b);
    }
    if (b->e->partials) {
        memcpy(b->sum_k, b->all_k, (size_t)keySums(b) * sizeof(float));
        memcpy(b->sum_v, b->all_v, (size_t)valueSums(b) * sizeof(float));
        memset(b->all_k, 0, (size_t)keySums(b) * sizeof(float));
        memset(b->all_v, 0, (size_t)valueSums(b) * sizeof(float));
    }
    storeKeys(b, segment, kvh, c0, n);
}

static void storeQueries(backward *b) {
    const dualkv_problem *p = b->p;
    int64_t n = p->tq, tail = p->n_segments ? p->segments[p->n_segments - 1].q_len % b->e->bm : 0;
    for (int64_t row = 0; row < (b->e->fault == F_I1 ? n - tail : n); row++)
        for (int h = 0; h < p->hq; h++) {
            float *dq = b->sum_q + (row * p->hq + h) * b->ldq;
            for (int c = 0; c < p->dqk && !b->part_q && !(b->e->fault == F_Y7 && h == p->hq - 1); c++) dq[c] *= b->by;
            if (b->e->fault == F_X11) dkv_faultCut(p, dq, p->dqk);
            dkv_emuStore(p, b->l->dq, h, row, p->dqk, dq);
        }
}

/* dSink = sum over rows of p_sink (0 - delta): the sink's value is 0. */
static void storeSink(backward *b) {
    const int fault = b->e->fault, heads = fault == F_Y33 ? b->p->hkv : b->p->hq;
    const int64_t end = fault == F_Y3 ? dkv_walkMin(b->e->bm, b->p->tq) : b->p->tq;
    for (int h = 0; h < heads; h++) {
        float sum = 0.0f;
        for (int64_t row = fault == F_X19 ? b->p->segments[0].q_len : 0; row < end; row++) {
            float p = b->l->sink[h], lse = *dkv_emuAt(b->l->lse, row, h);
            dkv_emuExp(&p, 1, lse == -INFINITY ? 0.0f : lse);
            sum -= p * b->delta[h * b->p->tq + row];
        }
        b->l->dsink[h] = sum;
    }
}

static void walkKeys(backward *b) {
    const dualkv_problem *p = b->p;
    int64_t bn = b->e->bn;
    const int down = b->e->fault == F_H4 && b->e->launches % 4 == 0 ? !b->e->down : b->e->down;
    for (int kvh = 0; kvh < p->hkv; kvh++)
        for (int i = 0; i < p->n_segments; i++) {
            int segment = down ? p->n_segments - 1 - i : i;
            int64_t n = (p->segments[segment].k_len + bn - 1) / bn;
            for (int64_t t = 0; t < n; t++) ownKeyTile(b, segment, kvh, (down ? n - 1 - t : t) * bn);
        }
}

static int openPartials(backward *b) {
    const int of = b->e->partials;
    const size_t nk = (size_t)keySums(b), nv = (size_t)valueSums(b);
    struct {
        float **at;
        size_t n;
        int needed;
    } all[] = {{&b->all_k, nk, of},
               {&b->all_v, nv, of},
               {&b->segment_k, nk, of & DUALKV_PARTIAL_SEGMENTS},
               {&b->segment_v, nv, of & DUALKV_PARTIAL_SEGMENTS},
               {&b->run_k, nk, of & DUALKV_PARTIAL_ROWS},
               {&b->run_v, nv, of & DUALKV_PARTIAL_ROWS},
               {&b->part_q, (size_t)b->e->bm * b->ldq, of & DUALKV_PARTIAL_ROWS}};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (all[i].needed && !(*all[i].at = dkv_emuScratch(all[i].n))) return -1;
    return 0;
}

int dkv_emuBackward(dkv_emu *e, const dualkv_launch *l) {
    const dualkv_problem *p = l->problem;
    backward b = {.e = e,
                  .l = l,
                  .p = p,
                  .ldk = dkv_emuPad(e->bn),
                  .ldq = dkv_emuPad(p->dqk),
                  .ldv = dkv_emuPad(p->dv),
                  .by = e->ds_scaled ? 1.0f : p->scale};
    size_t bm = (size_t)e->bm, bn = (size_t)e->bn;
    int rc = -1;
    b.sum_q = l->workspace;
    b.delta = b.sum_q + (size_t)p->tq * p->hq * b.ldq;
    b.k = dkv_emuScratch(bn * b.ldq);
    b.kt = dkv_emuScratch((size_t)p->dqk * b.ldk);
    b.vt = dkv_emuScratch((size_t)p->dv * b.ldk);
    b.sum_k = dkv_emuScratch(bn * b.ldq);
    b.sum_v = dkv_emuScratch(bn * b.ldv);
    b.q = dkv_emuScratch(bm * b.ldq);
    b.d_o = dkv_emuScratch(bm * b.ldv);
    b.s = dkv_emuScratch(bm * b.ldk);
    b.ds = dkv_emuScratch(bm * b.ldk);
    b.cap = dkv_emuScratch(bm * b.ldk);
    if (openPartials(&b)) goto done;
    if (e->delta_exact) {
        b.exact_o = e->exact_o = dkv_emuScratch((size_t)p->tq * p->hq * p->dv);
        rc = e->exact_o ? dkv_emuForward(e, l) : -1;
        e->exact_o = NULL;
        if (rc) goto done;
        rc = -1;
    }
    if (!b.k || !b.kt || !b.vt || !b.sum_k || !b.sum_v || !b.q || !b.d_o || !b.s || !b.ds || !b.cap)
        goto done;
    memset(b.sum_q, 0, (size_t)p->tq * p->hq * b.ldq * sizeof *b.sum_q);
    computeDeltas(&b);
    walkKeys(&b);
    storeQueries(&b);
    if (p->sink) storeSink(&b);
    rc = 0;
done:
    free(b.k);
    free(b.kt);
    free(b.vt);
    free(b.sum_k);
    free(b.sum_v);
    free(b.q);
    free(b.d_o);
    free(b.s);
    free(b.ds);
    free(b.cap);
    free(b.run_k);
    free(b.run_v);
    free(b.segment_k);
    free(b.segment_v);
    free(b.all_k);
    free(b.all_v);
    free(b.part_q);
    free(b.exact_o);
    return rc;
}
