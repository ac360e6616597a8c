/* truth.c: see truth.h. */
#include "truth.h"

#include <cblas.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "vexp.h"

int64_t dkv_truthBytes(const dkv_head *h) {
    int64_t d = h->p->dqk + h->p->dv;
    return (int64_t)sizeof(double) * h->max_m * (d + 4) + h->rows * DKV_TILE_KEYS + h->max_m;
}

void dkv_closeTruth(dkv_truth *t) {
    double **all[] = {&t->o, &t->dq, &t->max, &t->sum, &t->lse, &t->delta};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(*all[i]);
    free(t->sees);
    free(t->seen);
    memset(t, 0, sizeof *t);
}

int dkv_openTruth(const dkv_head *h, const dkv_block *b, const dkv_inputs *in, dkv_outputs *out, bool backward,
                  dkv_truth *t, dkv_err *err) {
    int64_t m = h->max_m;
    *t = (dkv_truth){.h = h, .b = b, .in = in, .out = out};
    struct { double **at; int64_t n; } all[] = {{&t->o, m * h->p->dv}, {&t->dq, backward ? m * h->p->dqk : 0},
                                                {&t->max, m}, {&t->sum, m}, {&t->lse, m}, {&t->delta, m}};
    bool ok = true;
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        size_t bytes = ((size_t)all[i].n * sizeof(double) + 63) & ~(size_t)63;
        ok &= bytes == 0 || (*all[i].at = aligned_alloc(64, bytes)) != NULL;
    }
    ok &= (t->sees = malloc((size_t)(h->rows * DKV_TILE_KEYS))) != NULL;
    ok &= (t->seen = malloc((size_t)m)) != NULL;
    return ok ? DKV_OK : dkv_fail(err, DKV_EHARNESS, "out of memory: a block of %lld rows", (long long)m);
}

/* --- forward --- */

void dkv_truthBeginForward(dkv_truth *t) {
    const dkv_head *h = t->h;
    memset(t->o, 0, sizeof(double) * (size_t)(t->b->m * h->p->dv));
    memset(t->seen, 0, (size_t)t->b->m);
    for (int64_t i = 0; i < t->b->m; i++) {
        t->max[i] = t->in->sink ? t->in->sink[h->kvh * h->g + i % h->g] : -INFINITY;
        t->sum[i] = t->in->sink ? 1 : 0;
    }
}

/* One row of scores becomes exp(s - max so far); o and the sum follow when the maximum moves. A row of
 * -inf alone is shifted by nothing, so that exp(-inf - -inf) never arises. */
static void softmaxRow(dkv_truth *t, int64_t i, int64_t n, int64_t dv, const double *s, double *p) {
    double top = dkv_maxOf(s, n);
    if (top > t->max[i]) {
        double fade, shift = t->max[i] - top;
        dkv_vexp(&shift, &fade, 1);
        t->max[i] = top;
        t->sum[i] *= fade;
        for (int64_t e = 0; e < dv; e++) t->o[i * dv + e] *= fade;
    }
    dkv_vexpShift(s, t->max[i] == -INFINITY ? 0 : t->max[i], p, (size_t)n);
    t->sum[i] += dkv_sumOf(p, n);
}

/* Where operands are not finite, a key that is seen can score -inf: such a row is not a row without keys. */
static void markSeen(dkv_truth *t, const dkv_tile *tile) {
    dkv_tileSees(t->h, t->b, tile, t->sees);
    for (int64_t i = 0; i < t->b->m; i++)
        t->seen[i] |= memchr(t->sees + i / t->h->g * tile->n, 1, (size_t)tile->n) != NULL;
}

void dkv_truthForwardTile(dkv_truth *t, const dkv_tile *tile, const double *s, double *p) {
    const int64_t n = tile->n, dv = t->h->p->dv;
    if (!t->b->finite || !tile->finite) markSeen(t, tile);
    for (int64_t i = 0; i < t->b->m; i++) softmaxRow(t, i, n, dv, s + i * n, p + i * n);
    dkv_addRows(t->h, t->b, tile, 1.0, p, tile->v, dv, tile->finite, t->o, dv);
}

static void finishRow(dkv_truth *t, int64_t i, int64_t dv) {
    double *o = t->o + i * dv;
    if (t->sum[i] == 0 && !t->seen[i]) { /* no key, no sink */
        t->lse[i] = -INFINITY;
        return;
    }
    t->lse[i] = t->sum[i] == 0 ? NAN : t->max[i] + log(t->sum[i]);
    if (t->h->mutant == DKV_MUTANT_LSE) t->lse[i] /= log(2.0);
    for (int64_t e = 0; e < dv; e++) o[e] /= t->sum[i];
}

void dkv_truthEndForward(dkv_truth *t) {
    const int64_t dv = t->h->p->dv;
    for (int64_t i = 0; i < t->b->m; i++) finishRow(t, i, dv);
    dkv_putRows(t->h, t->b, t->o, dv, t->out->o);
    dkv_putLse(t->h, t->b, t->lse, t->out->lse);
}

/* --- backward --- */

/* D = dO . O - dLSE; and the sink's gradient, -p_sink D. */
void dkv_truthBeginBackward(dkv_truth *t, double *dsink) {
    const dkv_head *h = t->h;
    const dkv_block *b = t->b;
    int64_t dv = h->p->dv, tq = h->l->view.tq;
    memset(t->dq, 0, sizeof(double) * (size_t)(b->m * h->p->dqk));
    dkv_getRows(h, b, t->out->o, dv, t->o);
    dkv_getLse(h, b, t->out->lse, t->lse);
    for (int64_t i = 0; i < b->m; i++) {
        int64_t head = h->kvh * h->g + i % h->g;
        double d = cblas_ddot((int)dv, t->o + i * dv, 1, b->d_o + i * dv, 1), sink;
        if (t->in->d_lse) d -= t->in->d_lse[head * tq + b->q_row + i / h->g];
        if (h->mutant == DKV_MUTANT_DELTA) d = 0;
        t->delta[i] = d;
        if (!dsink) continue;
        sink = t->in->sink[head] - t->lse[i];
        dkv_vexp(&sink, &sink, 1);
        dsink[i % h->g] -= sink * d;
    }
}

/* p = exp(s - LSE), ds = p (dp - D), times 1 - tanh^2 where capped. `careful`: masked pairs are set to 0 by
 * name, since 0 times what is not finite is not 0. */
static void gradRow(const dkv_truth *t, int64_t i, int64_t n, const uint8_t *careful, const double *s,
                    const double *cap, const double *dp, double *p, double *ds) {
    double d = t->delta[i];
    dkv_vexpShift(s, t->lse[i] == -INFINITY ? 0 : t->lse[i], p, (size_t)n);
    for (int64_t j = 0; j < n; j++) ds[j] = p[j] * (dp[j] - d);
    for (int64_t j = 0; cap && j < n; j++) ds[j] *= 1 - cap[j] * cap[j];
    for (int64_t j = 0; careful && j < n; j++) {
        p[j] = careful[j] ? p[j] : 0;
        ds[j] = careful[j] ? ds[j] : 0;
    }
}

void dkv_truthBackwardRows(dkv_truth *t, const dkv_tile *tile, const double *s, const double *cap, const double *dp,
                           double *p, double *ds) {
    const dkv_head *h = t->h;
    const dkv_block *b = t->b;
    int64_t n = tile->n, dqk = h->p->dqk;
    bool finite = b->finite && tile->finite;
    for (int64_t i = 0; finite && i < b->m; i++) finite = isfinite(t->delta[i]) && !isnan(t->lse[i]);
    bool careful = tile->vis == 2 && !finite;
    if (careful) dkv_tileSees(h, b, tile, t->sees);
    for (int64_t i = 0; i < b->m; i++)
        gradRow(t, i, n, careful ? t->sees + i / h->g * n : NULL, s + i * n, cap ? cap + i * n : NULL, dp + i * n,
                p + i * n, ds + i * n);
    dkv_addRows(h, b, tile, h->scale, ds, tile->k, dqk, tile->finite, t->dq, dqk);
}

void dkv_truthBackwardKeys(dkv_truth *t, const dkv_tile *tile, const double *p, const double *ds) {
    const dkv_head *h = t->h;
    int64_t dqk = h->p->dqk, dv = h->p->dv, hkv = h->p->hkv, at = tile->k_row * hkv + h->kvh;
    dkv_addKeys(h, t->b, tile, h->scale, ds, t->b->q, dqk, t->b->finite, t->out->dk + at * dqk, hkv * dqk);
    dkv_addKeys(h, t->b, tile, 1.0, p, t->b->d_o, dv, t->b->finite, t->out->dv + at * dv, hkv * dv);
}

void dkv_truthEndBackward(dkv_truth *t) { dkv_putRows(t->h, t->b, t->dq, t->h->p->dqk, t->out->dq); }

void dkv_sumSinks(const dkv_problem *p, int64_t n_items, const double *each, double *dsink) {
    int64_t hkv = p->hkv, g = p->hq / hkv;
    for (int64_t i = 0; i < p->hq; i++) dsink[i] = 0;
    for (int64_t i = 0; i < n_items; i++)
        for (int64_t e = 0; e < g; e++) dsink[i % hkv * g + e] += each[i * g + e];
}
