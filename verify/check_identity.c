#include <math.h>
#include <stdlib.h>

#include "../ref/dtype.h"
#include "check.h"
#include "spans.h"

/* One side of an identity: a sum, the sum of its terms' bounds, and its own fp64 rounding. */
typedef struct sum {
    double value, allowed, magnitude, terms;
} sum;

/* A negative allowance: nothing is claimed of the element (DKV_UNCLAIMED), so nothing of the sum. */
static void add(sum *s, double term, double allowed) {
    s->value += term;
    s->allowed += allowed < 0 ? INFINITY : allowed;
    s->magnitude += fabs(term);
    s->terms++;
}

static double allowedDifference(const sum *a, const sum *b) {
    return a->allowed + b->allowed + (a->terms + b->terms + 2) * 0x1p-53 * (a->magnitude + b->magnitude);
}

/* Non-finite sums say nothing here: finiteness has its own check. True where the identity is broken. */
static bool broken(const sum *a, const sum *b) {
    double allowed = allowedDifference(a, b);
    if (!isfinite(a->value) || !isfinite(b->value) || !isfinite(allowed)) return false;
    return !(fabs(a->value - b->value) <= allowed);
}

/* The error: a sum of so many terms, and a difference that may cancel. */
double dkv_keyShare(const dkv_case *c, int64_t t, int32_t h, double *error) {
    double lse = c->oracle.truth.lse[h * c->packed.view.tq + t];
    *error = 0;
    if (lse == -INFINITY) return 0;
    if (!c->in.sink) return 1;
    double sink = c->in.sink[h];
    *error = 0x1p-53 * ((double)c->packed.view.max_k_len + 8) * (1 + fabs(lse) + fabs(sink));
    return -expm1(sink - lse);
}

/* `n` elements of an input from element i. */
static void decodeFrom(const void *at, dualkv_dtype t, int64_t i, int64_t n, double *out) {
    dkv_decodeArray((const char *)at + (size_t)i * dkv_dtypeSize(t), t, (size_t)n, out);
}

#define CHUNK 16 /* sums that are made side by side: their terms lie beside each other */

/* Both sides of `n` sums from number `first` on. */
typedef void (*identity_fn)(const dkv_case *c, const dkv_outputs *values, int32_t kvh, int32_t first, int32_t n, sum *a, sum *b);

static void sumDv(const dkv_case *c, const dkv_outputs *values, int32_t kvh, int32_t first, int32_t n, sum *a, sum *b) {
    const dualkv_problem *v = &c->packed.view;
    int32_t g = v->hq / v->hkv;
    double d_o[CHUNK];
    for (int64_t j = 0; j < v->tk; j++) {
        const int64_t at = (j * v->hkv + kvh) * v->dv + first;
        for (int32_t e = 0; e < n; e++) add(&a[e], values->dv[at + e], c->oracle.bound.dv[at + e]);
    }
    for (int64_t t = 0; t < v->tq; t++)
        for (int32_t h = kvh * g; h < (kvh + 1) * g; h++) {
            double error, share = dkv_keyShare(c, t, h, &error);
            decodeFrom(c->in.d_o, c->p->dtype, (t * v->hq + h) * v->dv + first, n, d_o);
            for (int32_t e = 0; e < n; e++) add(&b[e], share == 0 ? 0 : share * d_o[e], error * fabs(d_o[e]));
        }
}

static void euler(const dkv_case *c, const dkv_outputs *values, int32_t kvh, int32_t first, int32_t n, sum *a, sum *b) {
    const dualkv_problem *v = &c->packed.view;
    int32_t g = v->hq / v->hkv;
    double x[DKV_DIM_MAX];
    (void)first;
    (void)n;
    for (int64_t t = 0; t < v->tq; t++)
        for (int32_t h = kvh * g; h < (kvh + 1) * g; h++) {
            const int64_t at = (t * v->hq + h) * v->dqk;
            decodeFrom(c->in.q, c->p->dtype, at, v->dqk, x);
            for (int32_t e = 0; e < v->dqk; e++) add(a, x[e] * values->dq[at + e], fabs(x[e]) * c->oracle.bound.dq[at + e]);
        }
    for (int64_t j = 0; j < v->tk; j++) {
        const int64_t at = (j * v->hkv + kvh) * v->dqk;
        decodeFrom(c->in.k, c->p->dtype, at, v->dqk, x);
        for (int32_t e = 0; e < v->dqk; e++) add(b, x[e] * values->dk[at + e], fabs(x[e]) * c->oracle.bound.dk[at + e]);
    }
}

typedef struct identity_loop {
    const dkv_case *c;
    const dkv_outputs *values;
    identity_fn sides;
    int32_t dims, chunks; /* sums of a KV head, and in how many pieces they are made */
    int64_t broken[DKV_SPANS]; /* the first of the span's sums that is; -1 */
    sum a[DKV_SPANS], b[DKV_SPANS];
} identity_loop;

static void identitySpan(int64_t first, int64_t end, int span, void *arg) {
    identity_loop *w = arg;
    w->broken[span] = -1;
    for (int64_t i = first; i < end && w->broken[span] < 0; i++) {
        const int32_t kvh = (int32_t)(i / w->chunks), from = (int32_t)(i % w->chunks) * CHUNK;
        const int32_t n = w->dims - from < CHUNK ? w->dims - from : CHUNK;
        sum a[CHUNK] = {{0}}, b[CHUNK] = {{0}};
        w->sides(w->c, w->values, kvh, from, n, a, b);
        for (int32_t e = 0; e < n && w->broken[span] < 0; e++) {
            if (!broken(&a[e], &b[e])) continue;
            w->broken[span] = (int64_t)kvh * w->dims + from + e;
            w->a[span] = a[e];
            w->b[span] = b[e];
        }
    }
}

/* The kernel's outputs must keep the identity, and so must the truth: an oracle that does not is not
 * believed. */
static void checkIdentity(dkv_case *c, dkv_finding *f, identity_fn sides, int32_t dims, int32_t needs,
                          const char *words) {
    const dualkv_problem *v = &c->packed.view;
    if (!c->p->grad || c->kernel.d.absent & needs) return;
    dkv_findNothing(f);
    for (int who = 0; who < 2; who++) {
        identity_loop w = {.c = c, .values = who ? &c->got : &c->oracle.truth, .sides = sides, .dims = dims,
                           .chunks = (dims + CHUNK - 1) / CHUNK};
        dkv_eachSpan((int64_t)c->p->hkv * w.chunks, (double)(v->tq * v->hq + v->tk * v->hkv) * v->dv, identitySpan, &w);
        for (int i = 0; i < DKV_SPANS; i++) {
            if (w.broken[i] < 0) continue;
            dkv_find(f, DKV_CHECK_DEFECT, who ? DKV_ST_FAILED : DKV_ST_HARNESS_ERROR,
                     "%s%s: %.9g against %.9g in KV head %d, rounding explains %.3g", who ? "" : "the oracle breaks ",
                     words, w.a[i].value, w.b[i].value, (int)(w.broken[i] / dims), allowedDifference(&w.a[i], &w.b[i]));
            return;
        }
    }
}

void dkv_checkSumDv(dkv_case *c, dkv_finding *f) {
    checkIdentity(c, f, sumDv, c->p->dv, 1 << DKV_DV, "sum of dV over keys = sum of dO over rows");
}

void dkv_checkEuler(dkv_case *c, dkv_finding *f) {
    checkIdentity(c, f, euler, 1, 1 << DKV_DQ | 1 << DKV_DK, "sum of q.dq = sum of k.dk");
}
