/* Rows of P and dS in double, straight from the definition, one query row at a time. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../ref/mask.h"
#include "../ref/sequence.h"
#include "../ref/tiles.h"
#include "diagnose_impl.h"

int dkv_openPairs(const dkv_diag *d, dkv_pairs *x, dkv_err *err) {
    const dkv_problem *p = d->c->p;
    const size_t n = (size_t)dkv_longestSequence(p) + 1;
    memset(x, 0, sizeof *x);
    x->d = d;
    x->segment = x->kvh = -1;
    x->row = calloc(n, sizeof *x->row);
    x->k = calloc(n * (size_t)p->dqk, sizeof(double));
    x->v = calloc(n * (size_t)p->dv, sizeof(double));
    x->s = calloc(5 * n, sizeof(double));
    x->sees = calloc(n, 1);
    x->q = calloc((size_t)p->dqk, sizeof(double));
    x->d_o = calloc((size_t)p->dv, sizeof(double));
    if (!x->row || !x->k || !x->v || !x->s || !x->sees || !x->q || !x->d_o) {
        dkv_closePairs(x);
        return dkv_fail(err, DKV_EHARNESS, "out of memory for a diagnosis");
    }
    x->slope = x->s + n;
    x->p = x->s + 2 * n;
    x->dp = x->s + 3 * n;
    x->ds = x->s + 4 * n;
    return 0;
}

void dkv_closePairs(dkv_pairs *x) {
    free(x->row);
    free(x->k);
    free(x->v);
    free(x->s);
    free(x->sees);
    free(x->q);
    free(x->d_o);
    memset(x, 0, sizeof *x);
}

/* The keys of a segment's list, in order of position. */
static void loadKeys(dkv_pairs *x, int32_t segment, int32_t kvh) {
    const dkv_case *c = x->d->c;
    const dualkv_problem *v = &c->packed.view;
    const dualkv_segment *s = &v->segments[segment];
    if (x->segment == segment && x->kvh == kvh) return;
    x->segment = segment;
    x->kvh = kvh;
    x->context = s->context;
    x->n = 0;
    for (int32_t i = 0; i < s->range_count; i++) {
        const dualkv_range *g = &v->ranges[s->range_begin + i];
        dkv_decodeRows(c->in.k, c->p->dtype, g->k_start, g->len, v->hkv, kvh, v->dqk, x->k + x->n * v->dqk);
        dkv_decodeRows(c->in.v, c->p->dtype, g->k_start, g->len, v->hkv, kvh, v->dv, x->v + x->n * v->dv);
        for (int64_t j = 0; j < g->len; j++) x->row[x->n++] = g->k_start + j;
    }
}

static double dot(const double *a, const double *b, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

void dkv_pairRow(dkv_pairs *x, int32_t segment, int64_t r, int32_t h, bool own) {
    const dkv_case *c = x->d->c;
    const dkv_problem *p = c->p;
    const dualkv_problem *v = &c->packed.view;
    const int64_t row = v->segments[segment].q_start + r, at = v->segments[segment].context + r;
    const dkv_outputs *o = own ? &x->d->own : &c->oracle.truth;
    const double *ov = o->o + (row * v->hq + h) * v->dv;
    loadKeys(x, segment, h / (v->hq / v->hkv));
    dkv_decodeRows(c->in.q, p->dtype, row, 1, v->hq, h, v->dqk, x->q);
    x->lse = o->lse[h * v->tq + row];
    x->delta = 0;
    if (p->grad) {
        dkv_decodeRows(c->in.d_o, p->dtype, row, 1, v->hq, h, v->dv, x->d_o);
        x->delta = dot(x->d_o, ov, v->dv) - (c->in.d_lse ? (double)c->in.d_lse[h * v->tq + row] : 0);
    }
    for (int64_t j = 0; j < x->n; j++) {
        double s = (double)p->scale * dot(x->q, x->k + j * v->dqk, v->dqk), slope = 1;
        if (p->softcap > 0) {
            double t = tanh(s / (double)p->softcap);
            slope = 1 - t * t;
            s = (double)p->softcap * t;
        }
        if (p->alibi) s -= (double)c->packed.alibi_slopes[h] * (double)(at > j ? at - j : j - at);
        x->s[j] = s;
        x->slope[j] = slope;
        x->sees[j] = dkv_maskSees(p, segment, r, j);
        x->p[j] = x->sees[j] ? exp(s - (x->lse == -INFINITY ? 0 : x->lse)) : 0;
        x->dp[j] = p->grad && x->sees[j] ? dot(x->d_o, x->v + j * v->dv, v->dv) : 0;
        x->ds[j] = x->p[j] * (x->dp[j] - x->delta) * slope;
    }
}
