/* Forward: a query tile of one segment and head walks its key ranges with an online softmax. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "emu_fault.h"

typedef struct row_state {
    float max, sum; /* of the scores seen so far; sum of exp(score - max) */
    float before;   /* fault D5: LSE of the ranges before this one */
} row_state;

typedef struct forward {
    dkv_emu *e;
    const dualkv_launch *l;
    const dualkv_problem *p;
    int ldk, ldq, ldv; /* floats a row: of bn, dqk, dv */
    float *q;          /* [bm, ldq] */
    float *kt;         /* [dqk, ldk] */
    float *v;          /* [bn, ldv] */
    float *s;          /* [bm, ldk] scores, then P */
    float *o;          /* [bm, ldv] */
    row_state *state;  /* [bm] */
    float *lse;        /* [bm]: of the first of two passes, where P is normalised before it is rounded */
    int second;        /* pass */
} forward;

/* The maximum that a tile's, or a sink's, leaves. */
static float raisedMax(const forward *f, float max, float top) {
    const float slack = (float)f->e->lazy * 0.693147181f;
    return top > max && (max == -INFINITY || top - max > slack) ? top : max;
}

/* New maximum, correction of what was summed, P in place of the scores. A row that has seen nothing subtracts
 * 0, so that exp(-inf - max) is 0 and never NaN. */
static void softmaxRow(forward *f, const dkv_emuTile *t, int i) {
    float *x = f->s + (int64_t)i * f->ldk, *o = f->o + (int64_t)i * f->ldv;
    row_state *st = &f->state[i];
    const int fault = f->e->fault;
    float top = st->max;
    for (int c = 0; c < f->e->bn; c++)
        if (x[c] > top) top = x[c];
    const float max = raisedMax(f, st->max, top);
    float base = max == -INFINITY && !(fault == F_C3 && t->own) ? 0.0f : max, corr = st->max - base;
    const float grown = max - st->max;
    if (fault == F_D4 && t->later) corr = st->max * 1.44269504f - base;
    dkv_emuExp(&corr, 1, 0.0f);
    if (fault == F_D1 && t->later) corr = 1.0f;
    dkv_emuExp(x, f->e->bn, base);
    if (fault == F_E5) dkv_faultFlush(x, f->e->bn);
    if (fault == F_X13) dkv_emuRound(x, f->e->bn, DUALKV_FP16);
    if (fault == F_X8) dkv_emuRound(x, f->e->bn, f->p->dtype);
    float sum = 0.0f;
    const int summed = fault == F_X5 ? f->e->bn : fault == F_Y6 && t->nv == f->e->bn ? t->nv - 1 : t->nv;
    for (int c = 0; c < summed; c++) sum += x[c];
    if (fault == F_D5 && t->later) st->before = st->max + dkv_emuLog(st->sum);
    if (fault == F_E2 && t->later) dkv_emuRound(o, f->p->dv, dkv_fault16(f->p));
    st->sum = st->sum * corr + sum;
    st->max = max;
    if (fault == F_X22 && grown < 1.0f) corr = 1.0f;
    for (int c = 0; c < f->p->dv; c++) o[c] *= corr;
    if (fault == F_Y5) dkv_faultCut(f->p, x, t->nv);
    dkv_emuRoundP(f->e, f->p, x, t->nv);
}

/* The second of two passes: P from the row's LSE. */
static void normalisedRow(const forward *f, const dkv_emuTile *t, int i) {
    float *x = f->s + (int64_t)i * f->ldk;
    dkv_emuExp(x, f->e->bn, f->lse[i] == -INFINITY ? 0.0f : f->lse[i]);
    dkv_emuRoundP(f->e, f->p, x, t->nv);
}

static void forwardTile(forward *f, const dkv_emuTile *t) {
    const dualkv_problem *p = f->p;
    const int fault = f->e->fault, kvh = fault == F_X7 ? t->h % p->hkv : t->h / (p->hq / p->hkv),
              bn = f->e->bn;
    const int dqk = fault == F_B8 && p->dqk > 64   ? p->dqk / 64 * 64
                    : fault == F_Y8 && p->dqk > 1 ? p->dqk / 2 * 2
                                                   : p->dqk;
    const dualkv_tensor k = fault == F_Y31 ? dkv_faultStrides(f->l->k, f->l->v, p->tk, p->hkv) : f->l->k;
    int64_t first = t->g->k_start + t->c0;
    /* K past the range: the neighbour's rows, scored and masked. V past the range: zeros (0 * NaN is NaN). */
    dkv_emuLoad(p, k, kvh, first, bn, p->tk, p->dqk, f->kt, f->ldk, 1);
    dkv_emuLoad(p, f->l->v, kvh, first, bn, fault == F_B3 ? p->tk : first + t->nv, p->dv, f->v, f->ldv, 0);
    dkv_emuRoundIn(f->e, f->kt, (int64_t)p->dqk * f->ldk);
    dkv_emuRoundIn(f->e, f->v, (int64_t)bn * f->ldv);
    memset(f->s, 0, (size_t)t->m * f->ldk * sizeof *f->s);
    dkv_emuMultiply(&(dkv_emuProduct){f->e->tc, t->m, bn, dqk, f->q, f->ldq, 1, f->kt, f->ldk, f->s, f->ldk});
    if (fault == F_D7 && !t->own) dkv_emuRound(f->s, (int64_t)t->m * f->ldk, DUALKV_FP16);
    dkv_emuScores(f->e, t, f->s, NULL, f->ldk);
    dkv_emuRoundScores(f->e, p, f->s, (int64_t)t->m * f->ldk);
    if (fault == F_Y21) dkv_emuRound(f->s, (int64_t)t->m * f->ldk, dkv_fault16(p));
    for (int64_t i = 0; i < (int64_t)t->m * f->ldk && fault == F_Y29; i++)
        if (f->s[i] > 80.0f) f->s[i] = 80.0f;
    for (int i = 0; i < t->m; i++) (f->second ? normalisedRow(f, t, i) : softmaxRow(f, t, i));
    if (f->e->p_normalised && !f->second) return;
    dkv_emuMultiply(
        &(dkv_emuProduct){f->e->tc, t->m, p->dv, bn, f->s, f->ldk, 1, f->v, f->ldv, f->o, f->ldv});
}

/* All tiles of one range that the rows [r0, r0 + m) need, counted from the range's start. */
static void walkRange(forward *f, const dualkv_segment *s, const dualkv_range *g, int h, int64_t r0, int m,
                      int later) {
    dkv_emuView w;
    int64_t lo, hi, bn = f->e->bn;
    dkv_emuLook(f->e, 0, f->p, s, g, &w);
    dkv_walkSpan(&w.p, &w.s, &w.g, r0, r0 + m, &lo, &hi);
    if (lo >= hi) return;
    int64_t first = lo / bn, n = (hi - 1) / bn - first + 1;
    if (f->e->fault == F_X23 && hi == w.g.len && hi % bn == 0) n++;
    for (int64_t i = 0; i < n; i++) {
        int64_t c0 = (f->e->down ? first + n - 1 - i : first + i) * bn;
        if (c0 >= w.g.len) c0 -= bn; /* fault X23 */
        dkv_emuTile t = {&w.p, &w.s, &w.g, r0, c0, m, (int)dkv_walkMin(bn, w.g.len - c0), h, 0, w.own, later};
        t.kind = dkv_walkTile(&w.p, &w.s, &w.g, r0, r0 + m, c0, c0 + t.nv);
        if (!t.kind) continue;
        forwardTile(f, &t);
        later = 0;
    }
}

/* Fault D5. Where exp(b - a) overflows, LSE is infinite and the prefix's weight exp(a - LSE) is 0. */
static void mergeNaively(const forward *f, float before, float *lse, float *o) {
    float w = *lse;
    dkv_emuExp(&w, 1, before);
    if (!isinf(w) || before == -INFINITY) return;
    *lse = before + w;
    memset(o, 0, (size_t)f->p->dv * sizeof *o);
}

static void storeRow(const forward *f, const dualkv_segment *s, int64_t row, int h, const float *o) {
    dualkv_tensor to = f->l->o;
    const int fault = f->e->fault;
    const int dv = fault == F_B8 && f->p->dv > 64 ? f->p->dv / 64 * 64 : f->p->dv;
    if (fault == F_I8 && s->range_count > 1) { /* from the segment's first row on, Dv elements a row */
        to.data = (char *)to.data + s->q_start * to.row * (int64_t)dkv_emuSize(f->p->dtype);
        to.row = f->p->dv < to.row ? f->p->dv : to.row;
        row -= s->q_start;
    }
    dkv_emuStore(f->p, to, h, row, dv, o);
    if (fault == F_X16 && row == f->p->tq - 1) dkv_emuStore(f->p, to, h, row + 1, dv, o);
}

/* The sink is one more logit whose value is 0; O is divided once, at the end. Where P is normalised first, this ends the
 * first pass: LSE is stored, O is not there yet. */
static void finishRow(forward *f, const dualkv_segment *s, int i, int64_t row, int h) {
    row_state st = f->state[i];
    const int fault = f->e->fault;
    float *o = f->o + (int64_t)i * f->ldv, before = st.max + dkv_emuLog(st.sum), lse;
    if (f->p->sink && !f->e->sink_first) {
        float sink = fault == F_Y18 ? f->l->sink[h] * f->p->scale : f->l->sink[h];
        float max = raisedMax(f, st.max, sink), base = max == -INFINITY ? 0.0f : max;
        float part[4] = {st.max, sink};
        dkv_emuExp(part, 4, base);
        st.sum =
            st.sum * part[0] + (fault == F_X18 && s->range_count ? part[1] * (float)s->range_count : part[1]);
        st.max = max;
        for (int c = 0; c < f->p->dv; c++) o[c] *= part[0];
    }
    float inverse = 1.0f / st.sum;
    dkv_emuRound(&inverse, 1, DUALKV_FP16);
    if (st.sum != 0.0f)
        for (int c = 0; c < f->p->dv; c++) o[c] = fault == F_Y12 ? o[c] * inverse : o[c] / st.sum;
    for (int c = 0; c < f->p->dv && fault == F_Y30; c++)
        if (isnan(o[c])) o[c] = 0.0f;
    lse = st.sum == 0.0f ? -INFINITY : st.max + dkv_emuLog(st.sum);
    if (fault == F_C2 && st.sum == 0.0f) lse = -49994.0f;
    if (fault == F_D3 && s->range_count > 1) lse *= 1.44269504f;
    if (fault == F_X10) lse = before;
    if (fault == F_D5 && s->range_count > 1) mergeNaively(f, st.before, &lse, o);
    if (fault == F_X11) dkv_faultCut(f->p, o, f->p->dv);
    f->lse[i] = lse;
    if (f->e->exact_o) {
        memcpy(f->e->exact_o + (row * f->p->hq + h) * f->p->dv, o, (size_t)f->p->dv * sizeof *o);
        return;
    }
    if (!f->e->p_normalised) storeRow(f, s, row, h, o);
    *(fault == F_X30 ? (float *)f->l->lse.data + row * f->p->hq + h : dkv_emuAt(f->l->lse, row, h)) = lse;
}

static void walkRanges(forward *f, const dualkv_segment *s, int h, int64_t r0, int m) {
    for (int i = 0; i < s->range_count; i++) {
        int at = f->e->down ? s->range_count - 1 - i : i;
        walkRange(f, s, &f->p->ranges[s->range_begin + at], h, r0, m, i > 0);
    }
}

static void normalisedRows(forward *f, const dualkv_segment *s, int h, int64_t r0, int m) {
    memset(f->o, 0, (size_t)m * f->ldv * sizeof *f->o);
    f->second = 1;
    walkRanges(f, s, h, r0, m);
    f->second = 0;
    for (int i = 0; i < m; i++) {
        const float *o = f->o + (int64_t)i * f->ldv;
        int64_t row = s->q_start + r0 + i;
        if (f->e->exact_o)
            memcpy(f->e->exact_o + (row * f->p->hq + h) * f->p->dv, o, (size_t)f->p->dv * sizeof *o);
        else
            storeRow(f, s, row, h, o);
    }
}

/* Before any key; a sink that comes first is a key of weight 1. */
static row_state startRow(const forward *f, int h) {
    row_state st = {f->e->fault == F_Y14 ? 0.0f : -INFINITY, 0.0f, -INFINITY};
    if (!f->p->sink || !f->e->sink_first || f->l->sink[h] == -INFINITY) return st;
    st.max = f->e->fault == F_Y18 ? f->l->sink[h] * f->p->scale : f->l->sink[h];
    st.sum = 1.0f + (st.max - st.max); /* NaN of what is not finite */
    return st;
}

static void forwardRows(forward *f, const dualkv_segment *s, int h, int64_t r0) {
    const dualkv_problem *p = f->p;
    int m = (int)dkv_walkMin(f->e->bm, s->q_len - r0);
    if (f->e->fault == F_X20 && m < f->e->bm) return;
    dualkv_tensor q = f->l->q;
    const int64_t high = ((s->q_start + r0) * q.row + h * q.head) / 65536 * 65536;
    if (f->e->fault == F_Y16) q.data = (char *)q.data - high * (int64_t)dkv_emuSize(p->dtype);
    dkv_emuLoad(p, q, h, s->q_start + r0, m, p->tq, p->dqk, f->q, f->ldq, 0);
    dkv_emuRoundIn(f->e, f->q, (int64_t)m * f->ldq);
    if (f->e->fault == F_Y34 && p->dtype == DUALKV_FP32) dkv_faultTf32(f->q, m * f->ldq);
    memset(f->o, 0, (size_t)m * f->ldv * sizeof *f->o);
    for (int i = 0; i < m && !(f->e->fault == F_X21 && h % (p->hq / p->hkv)); i++)
        f->state[i] = startRow(f, h);
    walkRanges(f, s, h, r0, m);
    for (int i = 0; i < m; i++) finishRow(f, s, i, s->q_start + r0 + i, h);
    if (f->e->p_normalised) normalisedRows(f, s, h, r0, m);
}

/* Fault X17. */
static void scaleQueries(const forward *f) {
    const dualkv_problem *p = f->p;
    for (int64_t row = 0; row < p->tq; row++)
        for (int h = 0; h < p->hq; h++) {
            dkv_emuLoad(p, f->l->q, h, row, 1, p->tq, p->dqk, f->q, f->ldq, 0);
            for (int c = 0; c < p->dqk; c++) f->q[c] *= p->scale;
            dkv_emuStore(p, f->l->q, h, row, p->dqk, f->q);
        }
}

int dkv_emuForward(dkv_emu *e, const dualkv_launch *l) {
    const dualkv_problem *p = l->problem;
    forward f = {.e = e,
                 .l = l,
                 .p = p,
                 .ldk = dkv_emuPad(e->bn),
                 .ldq = dkv_emuPad(p->dqk),
                 .ldv = dkv_emuPad(p->dv)};
    size_t bm = (size_t)e->bm, bn = (size_t)e->bn;
    int rc = -1;
    f.q = dkv_emuScratch(bm * f.ldq);
    f.kt = dkv_emuScratch((size_t)p->dqk * f.ldk);
    f.v = dkv_emuScratch(bn * f.ldv);
    f.s = dkv_emuScratch(bm * f.ldk);
    f.o = dkv_emuScratch(bm * f.ldv);
    f.state = calloc(bm, sizeof *f.state);
    f.lse = dkv_emuScratch(bm);
    if (!f.lse || !f.q || !f.kt || !f.v || !f.s || !f.o || !f.state) goto done;
    for (int i = 0; i < p->n_segments; i++)
        for (int h = 0; h < p->hq; h++)
            for (int64_t r0 = 0; r0 < p->segments[i].q_len; r0 += e->bm)
                forwardRows(&f, &p->segments[i], h, r0);
    if (e->fault == F_X17) scaleQueries(&f);
    rc = 0;
done:
    free(f.q);
    free(f.kt);
    free(f.v);
    free(f.s);
    free(f.o);
    free(f.state);
    free(f.lse);
    return rc;
}
