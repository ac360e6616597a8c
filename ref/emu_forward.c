/* Forward: a query tile of one segment and head walks its key ranges with an online softmax. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "emu_impl.h"

typedef struct row_state {
    float max, sum; /* of the scores seen so far; sum of exp(score - max) */
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
} forward;

/* New maximum, correction of what was summed, P in place of the scores. A row that has seen nothing subtracts 0, so that
 * exp(-inf - max) is 0 and never NaN. */
static void softmaxRow(forward *f, const dkv_emuTile *t, int i) {
    float *x = f->s + (int64_t)i * f->ldk, *o = f->o + (int64_t)i * f->ldv;
    row_state *st = &f->state[i];
    float max = st->max;
    for (int c = 0; c < f->e->bn; c++)
        if (x[c] > max) max = x[c];
    float base = max == -INFINITY ? 0.0f : max, corr = st->max - base;
    dkv_emuExp(&corr, 1, 0.0f);
    dkv_emuExp(x, f->e->bn, base);
    float sum = 0.0f;
    for (int c = 0; c < t->nv; c++) sum += x[c];
    st->sum = st->sum * corr + sum;
    st->max = max;
    for (int c = 0; c < f->p->dv; c++) o[c] *= corr;
    dkv_emuRound(x, t->nv, f->p->dtype);
}

static void forwardTile(forward *f, const dkv_emuTile *t) {
    const dualkv_problem *p = f->p;
    int kvh = t->h / (p->hq / p->hkv), bn = f->e->bn;
    int64_t first = t->g->k_start + t->c0;
    /* K past the range: the neighbour's rows, scored and masked. V past the range: zeros, for 0 * NaN is NaN. */
    dkv_emuLoad(p, f->l->k, kvh, first, bn, p->tk, p->dqk, f->kt, f->ldk, 1);
    dkv_emuLoad(p, f->l->v, kvh, first, bn, first + t->nv, p->dv, f->v, f->ldv, 0);
    memset(f->s, 0, (size_t)t->m * f->ldk * sizeof *f->s);
    dkv_emuMultiply(&(dkv_emuProduct){f->e->tc, t->m, bn, p->dqk, f->q, f->ldq, 1, f->kt, f->ldk, f->s, f->ldk});
    dkv_emuScores(f->e, t, f->s, NULL, f->ldk);
    for (int i = 0; i < t->m; i++) softmaxRow(f, t, i);
    dkv_emuMultiply(&(dkv_emuProduct){f->e->tc, t->m, p->dv, bn, f->s, f->ldk, 1, f->v, f->ldv, f->o, f->ldv});
}

/* All tiles of one range that the rows [r0, r0 + m) need, counted from the range's start. */
static void walkRange(forward *f, const dualkv_segment *s, const dualkv_range *g, int h, int64_t r0, int m) {
    int64_t lo, hi, bn = f->e->bn;
    dkv_walkSpan(f->p, s, g, r0, r0 + m, &lo, &hi);
    if (lo >= hi) return;
    int64_t first = lo / bn, n = (hi - 1) / bn - first + 1;
    for (int64_t i = 0; i < n; i++) {
        int64_t c0 = (f->e->down ? first + n - 1 - i : first + i) * bn;
        dkv_emuTile t = {f->p, s, g, r0, c0, m, (int)dkv_walkMin(bn, g->len - c0), h, 0};
        t.kind = dkv_walkTile(f->p, s, g, r0, r0 + m, c0, c0 + t.nv);
        if (t.kind) forwardTile(f, &t);
    }
}

/* The sink is one more logit whose value is 0; O is divided once, at the end. */
static void finishRow(forward *f, int i, int64_t row, int h) {
    row_state st = f->state[i];
    float *o = f->o + (int64_t)i * f->ldv;
    if (f->p->sink) {
        float sink = f->l->sink[h], max = sink > st.max ? sink : st.max, base = max == -INFINITY ? 0.0f : max;
        float part[4] = {st.max, sink};
        dkv_emuExp(part, 4, base);
        st.sum = st.sum * part[0] + part[1];
        st.max = max;
        for (int c = 0; c < f->p->dv; c++) o[c] *= part[0];
    }
    if (st.sum != 0.0f)
        for (int c = 0; c < f->p->dv; c++) o[c] /= st.sum;
    dkv_emuStore(f->p, f->l->o, h, row, f->p->dv, o);
    *dkv_emuAt(f->l->lse, row, h) = st.sum == 0.0f ? -INFINITY : st.max + dkv_emuLog(st.sum);
}

static void forwardRows(forward *f, const dualkv_segment *s, int h, int64_t r0) {
    const dualkv_problem *p = f->p;
    int m = (int)dkv_walkMin(f->e->bm, s->q_len - r0);
    dkv_emuLoad(p, f->l->q, h, s->q_start + r0, m, p->tq, p->dqk, f->q, f->ldq, 0);
    memset(f->o, 0, (size_t)m * f->ldv * sizeof *f->o);
    for (int i = 0; i < m; i++) f->state[i] = (row_state){-INFINITY, 0.0f};
    for (int i = 0; i < s->range_count; i++) {
        int at = f->e->down ? s->range_count - 1 - i : i;
        walkRange(f, s, &p->ranges[s->range_begin + at], h, r0, m);
    }
    for (int i = 0; i < m; i++) finishRow(f, i, s->q_start + r0 + i, h);
}

int dkv_emuForward(dkv_emu *e, const dualkv_launch *l) {
    const dualkv_problem *p = l->problem;
    forward f = {.e = e, .l = l, .p = p, .ldk = dkv_emuPad(e->bn), .ldq = dkv_emuPad(p->dqk), .ldv = dkv_emuPad(p->dv)};
    size_t bm = (size_t)e->bm, bn = (size_t)e->bn;
    int rc = -1;
    f.q = dkv_emuScratch(bm * f.ldq);
    f.kt = dkv_emuScratch((size_t)p->dqk * f.ldk);
    f.v = dkv_emuScratch(bn * f.ldv);
    f.s = dkv_emuScratch(bm * f.ldk);
    f.o = dkv_emuScratch(bm * f.ldv);
    f.state = calloc(bm, sizeof *f.state);
    if (!f.q || !f.kt || !f.v || !f.s || !f.o || !f.state) goto done;
    for (int i = 0; i < p->n_segments; i++)
        for (int h = 0; h < p->hq; h++)
            for (int64_t r0 = 0; r0 < p->segments[i].q_len; r0 += e->bm) forwardRows(&f, &p->segments[i], h, r0);
    rc = 0;
done:
    free(f.q);
    free(f.kt);
    free(f.v);
    free(f.s);
    free(f.o);
    free(f.state);
    return rc;
}
