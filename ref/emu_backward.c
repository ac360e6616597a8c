/* Backward: delta first, then each key tile of each segment walks the rows of the segment and of all its descendants,
 * for every query head of its KV head. The tile owns its dK and dV; dQ is summed over key tiles in fp32, in fixed order. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "emu_impl.h"

typedef struct backward {
    dkv_emu *e;
    const dualkv_launch *l;
    const dualkv_problem *p;
    int ldk, ldq, ldv;
    float *sum_q; /* workspace: dQ accumulators [tq, hq, ldq] */
    float *delta; /* workspace: [hq, tq], dO.O - dLSE */
    float *k, *kt, *vt; /* the key tile: [bn, ldq], [dqk, ldk], [dv, ldk] */
    float *sum_k, *sum_v; /* its gradients: [bn, ldq], [bn, ldv] */
    float *q, *d_o;       /* the query tile: [bm, ldq], [bm, ldv] */
    float *s, *ds, *cap;  /* [bm, ldk]: scores, then P; dP, then dS; tanh(s/softcap) */
} backward;

size_t dkv_emuWorkspace(const dualkv_problem *p) {
    size_t rows, a, b, n;
    if (__builtin_mul_overflow((size_t)p->tq, (size_t)p->hq, &rows) ||
        __builtin_mul_overflow(rows, (size_t)dkv_emuPad(p->dqk) * sizeof(float), &a) ||
        __builtin_mul_overflow(rows, sizeof(float), &b) || __builtin_add_overflow(a, b, &n))
        return SIZE_MAX;
    return n;
}

static void computeDelta(backward *b) {
    const dualkv_problem *p = b->p;
    float o[256], d_o[256];
    for (int64_t row = 0; row < p->tq; row++)
        for (int h = 0; h < p->hq; h++) {
            float sum = 0.0f;
            dkv_emuLoad(p, b->l->o, h, row, 1, p->tq, p->dv, o, 256, 0);
            dkv_emuLoad(p, b->l->d_o, h, row, 1, p->tq, p->dv, d_o, 256, 0);
            for (int c = 0; c < p->dv; c++) sum += d_o[c] * o[c];
            if (p->dlse) sum -= *dkv_emuAt(b->l->d_lse, row, h);
            b->delta[h * p->tq + row] = sum;
        }
}

/* P from the score and LSE, dS from dP and delta. A row without keys has LSE = -inf: 0 is subtracted instead. */
static void gradientRow(backward *b, const dkv_emuTile *t, int i) {
    const dualkv_problem *p = b->p;
    float *x = b->s + (int64_t)i * b->ldk, *ds = b->ds + (int64_t)i * b->ldk;
    int64_t row = t->s->q_start + t->r0 + i;
    float lse = *dkv_emuAt(b->l->lse, row, t->h), delta = b->delta[t->h * p->tq + row];
    dkv_emuExp(x, b->e->bn, lse == -INFINITY ? 0.0f : lse);
    for (int c = 0; c < t->nv; c++) ds[c] = x[c] * (ds[c] - delta);
    if (p->softcap > 0.0f) {
        const float *th = b->cap + (int64_t)i * b->ldk;
        for (int c = 0; c < t->nv; c++) ds[c] *= 1.0f - th[c] * th[c];
    }
    dkv_emuRound(x, t->nv, p->dtype);
    dkv_emuRound(ds, t->nv, p->dtype);
}

static void backwardTile(backward *b, const dkv_emuTile *t) {
    const dualkv_problem *p = b->p;
    int64_t row = t->s->q_start + t->r0;
    int tc = b->e->tc, bn = b->e->bn, ldk = b->ldk;
    float *sum_q = b->sum_q + (row * p->hq + t->h) * b->ldq;
    dkv_emuLoad(p, b->l->q, t->h, row, t->m, p->tq, p->dqk, b->q, b->ldq, 0);
    dkv_emuLoad(p, b->l->d_o, t->h, row, t->m, p->tq, p->dv, b->d_o, b->ldv, 0);
    memset(b->s, 0, (size_t)t->m * ldk * sizeof *b->s);
    memset(b->ds, 0, (size_t)t->m * ldk * sizeof *b->ds);
    dkv_emuMultiply(&(dkv_emuProduct){tc, t->m, bn, p->dqk, b->q, b->ldq, 1, b->kt, ldk, b->s, ldk});
    dkv_emuMultiply(&(dkv_emuProduct){tc, t->m, bn, p->dv, b->d_o, b->ldv, 1, b->vt, ldk, b->ds, ldk});
    dkv_emuScores(b->e, t, b->s, b->cap, ldk);
    for (int i = 0; i < t->m; i++) gradientRow(b, t, i);
    /* Columns past the range are left out of all three products: a limited context may end in the middle of a tile. */
    dkv_emuMultiply(&(dkv_emuProduct){tc, t->nv, p->dv, t->m, b->s, 1, ldk, b->d_o, b->ldv, b->sum_v, b->ldv});
    dkv_emuMultiply(&(dkv_emuProduct){tc, t->nv, p->dqk, t->m, b->ds, 1, ldk, b->q, b->ldq, b->sum_k, b->ldq});
    dkv_emuMultiply(&(dkv_emuProduct){tc, t->m, p->dqk, t->nv, b->ds, ldk, 1, b->k, b->ldq, sum_q,
                                      (int64_t)p->hq * b->ldq});
}

/* Rows of segment d that need the keys [c0, c0 + bn) of range g, in query tiles counted from the segment's start. */
static void walkRows(backward *b, const dualkv_segment *d, const dualkv_range *g, int h, int64_t c0) {
    int64_t lo, hi, bm = b->e->bm;
    int nv = (int)dkv_walkMin(b->e->bn, g->len - c0);
    if (nv <= 0) return;
    dkv_walkRows(b->p, d, g, c0, c0 + nv, &lo, &hi);
    for (int64_t r0 = lo / bm * bm; r0 < hi; r0 += bm) {
        dkv_emuTile t = {b->p, d, g, r0, c0, (int)dkv_walkMin(bm, d->q_len - r0), nv, h, 0};
        t.kind = dkv_walkTile(b->p, d, g, r0, r0 + t.m, c0, c0 + nv);
        if (t.kind) backwardTile(b, &t);
    }
}

/* What d sees of segment s: a range that starts at its first key (ranges without keys are left out), or NULL. */
static const dualkv_range *findRange(const dualkv_problem *p, const dualkv_segment *d, const dualkv_segment *s) {
    for (int i = 0; i < d->range_count; i++)
        if (p->ranges[d->range_begin + i].k_start == s->k_start) return &p->ranges[d->range_begin + i];
    return NULL;
}

static void ownKeyTile(backward *b, int segment, int kvh, int64_t c0) {
    const dualkv_problem *p = b->p;
    const dualkv_segment *s = &p->segments[segment];
    int g = p->hq / p->hkv, bn = b->e->bn, n = (int)dkv_walkMin(bn, s->k_len - c0);
    int64_t first = s->k_start + c0, end = first + n;
    dkv_emuLoad(p, b->l->k, kvh, first, bn, end, p->dqk, b->k, b->ldq, 0);
    dkv_emuLoad(p, b->l->k, kvh, first, bn, end, p->dqk, b->kt, b->ldk, 1);
    dkv_emuLoad(p, b->l->v, kvh, first, bn, end, p->dv, b->vt, b->ldk, 1);
    memset(b->sum_k, 0, (size_t)bn * b->ldq * sizeof *b->sum_k);
    memset(b->sum_v, 0, (size_t)bn * b->ldv * sizeof *b->sum_v);
    for (int h = kvh * g; h < (kvh + 1) * g; h++)
        for (int i = segment; i < p->n_segments && (i == segment || p->segments[i].depth > s->depth); i++) {
            const dualkv_range *seen = findRange(p, &p->segments[i], s);
            if (seen) walkRows(b, &p->segments[i], seen, h, c0);
        }
    for (int j = 0; j < n; j++) {
        float *dk = b->sum_k + (int64_t)j * b->ldq;
        for (int c = 0; c < p->dqk; c++) dk[c] *= p->scale;
        dkv_emuStore(p, b->l->dk, kvh, first + j, p->dqk, dk);
        dkv_emuStore(p, b->l->dv, kvh, first + j, p->dv, b->sum_v + (int64_t)j * b->ldv);
    }
}

static void storeQueries(backward *b) {
    const dualkv_problem *p = b->p;
    for (int64_t row = 0; row < p->tq; row++)
        for (int h = 0; h < p->hq; h++) {
            float *dq = b->sum_q + (row * p->hq + h) * b->ldq;
            for (int c = 0; c < p->dqk; c++) dq[c] *= p->scale;
            dkv_emuStore(p, b->l->dq, h, row, p->dqk, dq);
        }
}

/* dSink = sum over rows of p_sink (0 - delta): the sink's value is 0. */
static void storeSink(backward *b) {
    for (int h = 0; h < b->p->hq; h++) {
        float sum = 0.0f;
        for (int64_t row = 0; row < b->p->tq; row++) {
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
    for (int kvh = 0; kvh < p->hkv; kvh++)
        for (int i = 0; i < p->n_segments; i++) {
            int segment = b->e->down ? p->n_segments - 1 - i : i;
            int64_t n = (p->segments[segment].k_len + bn - 1) / bn;
            for (int64_t t = 0; t < n; t++) ownKeyTile(b, segment, kvh, (b->e->down ? n - 1 - t : t) * bn);
        }
}

int dkv_emuBackward(dkv_emu *e, const dualkv_launch *l) {
    const dualkv_problem *p = l->problem;
    backward b = {.e = e, .l = l, .p = p, .ldk = dkv_emuPad(e->bn), .ldq = dkv_emuPad(p->dqk), .ldv = dkv_emuPad(p->dv)};
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
    if (!b.k || !b.kt || !b.vt || !b.sum_k || !b.sum_v || !b.q || !b.d_o || !b.s || !b.ds || !b.cap) goto done;
    memset(b.sum_q, 0, (size_t)p->tq * p->hq * b.ldq * sizeof *b.sum_q);
    computeDelta(&b);
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
    return rc;
}
