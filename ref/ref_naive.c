/* Standard attention on replicated sequences in fp64: each segment's sequence is copied out (E), its own rows
 * are computed forward and backward as in a textbook, the gradients of the copies are added back (E^T). The
 * rows of copies carry no dO and no dLSE, so their gradients are zero and they are not computed. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "dtype.h"
#include "mask.h"
#include "reference.h"
#include "sequence.h"

/* One sequence of n tokens; its last `own` tokens are the segment's. */
typedef struct sequence {
    int32_t node;
    int64_t n, own, q_start; /* q_start: packed row of the first own query */
    int64_t *row;            /* [n] packed key row of each token */
    double *k, *v, *dk, *dv; /* [n, hkv, dqk or dv] */
    double *s, *p, *slope;   /* [n] scores, probabilities, d(score)/d(scale q.k) of one query */
} sequence;

typedef struct naive {
    const dkv_problem *p;
    const dkv_layout *l;
    const dkv_inputs *in;
    dkv_outputs *out;
    dkv_starts starts;
    sequence seq;
} naive;

static void decodeRow(const void *x, dualkv_dtype t, int64_t at, int64_t n, double *out) {
    dkv_decodeArray((const char *)x + (size_t)at * dkv_dtypeSize(t), t, (size_t)n, out);
}

static int allocSequence(naive *a, dkv_err *err) {
    const dkv_problem *p = a->p;
    const int64_t n = dkv_longestSequence(p) + 1;
    const size_t ek = (size_t)p->hkv * (size_t)p->dqk * sizeof(double);
    const size_t ev = (size_t)p->hkv * (size_t)p->dv * sizeof(double);
    sequence *q = &a->seq;
    q->row = calloc((size_t)n, sizeof *q->row);
    q->k = calloc((size_t)n, ek);
    q->v = calloc((size_t)n, ev);
    q->dk = calloc((size_t)n, ek);
    q->dv = calloc((size_t)n, ev);
    q->s = calloc((size_t)n, sizeof(double));
    q->p = calloc((size_t)n, sizeof(double));
    q->slope = calloc((size_t)n, sizeof(double));
    if (!q->row || !q->k || !q->v || !q->dk || !q->dv || !q->s || !q->p || !q->slope)
        return dkv_fail(err, DKV_EHARNESS, "out of memory: a sequence of %lld tokens", (long long)n - 1);
    return DKV_OK;
}

static void freeSequence(sequence *q) {
    void *all[] = {q->row, q->k, q->v, q->dk, q->dv, q->s, q->p, q->slope};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

/* E: the tokens that the node sees, then its own. */
static void expand(naive *a, int32_t node) {
    const dkv_problem *p = a->p;
    const int64_t wk = (int64_t)p->hkv * p->dqk, wv = (int64_t)p->hkv * p->dv;
    sequence *q = &a->seq;
    q->node = node;
    q->own = p->nodes[node].len;
    q->n = p->nodes[node].context + q->own;
    q->q_start = a->starts.q[node];
    dkv_fillSequence(p, &a->starts, node, q->row);
    for (int64_t j = 0; j < q->n; j++) {
        decodeRow(a->in->k, p->dtype, q->row[j] * wk, wk, q->k + j * wk);
        decodeRow(a->in->v, p->dtype, q->row[j] * wv, wv, q->v + j * wv);
    }
    memset(q->dk, 0, (size_t)(q->n * wk) * sizeof(double));
    memset(q->dv, 0, (size_t)(q->n * wv) * sizeof(double));
}

/* E^T: every copy's gradient goes to the packed row that it copies. */
static void contract(naive *a) {
    const int64_t wk = (int64_t)a->p->hkv * a->p->dqk, wv = (int64_t)a->p->hkv * a->p->dv;
    const sequence *q = &a->seq;
    for (int64_t j = 0; j < q->n; j++) {
        for (int64_t c = 0; c < wk; c++) a->out->dk[q->row[j] * wk + c] += q->dk[j * wk + c];
        for (int64_t c = 0; c < wv; c++) a->out->dv[q->row[j] * wv + c] += q->dv[j * wv + c];
    }
}

static double dot(const double *a, const double *b, int n) {
    double s = 0;
    for (int c = 0; c < n; c++) s += a[c] * b[c];
    return s;
}

/* Softmax of own row r, head h: fills seq.p (0 where masked), seq.slope, *sink_p; returns the LSE. */
static double softmaxRow(naive *a, int64_t r, int h, const double *qv, double *sink_p) {
    const dkv_problem *p = a->p;
    sequence *q = &a->seq;
    const int g = h / (p->hq / p->hkv);
    const double scale = p->scale, cap = p->softcap, slope = p->alibi ? a->l->alibi_slopes[h] : 0;
    const double sink = a->in->sink ? a->in->sink[h] : -(double)INFINITY;
    const int64_t at = q->n - q->own + r; /* position of the row */
    double m = sink, sum = 0;
    bool any = false;
    for (int64_t j = 0; j < q->n; j++) {
        if (!dkv_maskSees(p, q->node, r, j)) continue;
        double s = scale * dot(qv, q->k + (j * p->hkv + g) * p->dqk, p->dqk);
        q->slope[j] = 1;
        if (cap > 0) {
            double t = tanh(s / cap);
            q->slope[j] = 1 - t * t;
            s = cap * t;
        }
        if (p->alibi) s -= slope * (double)(at > j ? at - j : j - at);
        q->s[j] = s;
        if (s > m) m = s;
        any = true;
    }
    memset(q->p, 0, (size_t)q->n * sizeof *q->p);
    *sink_p = 0;
    if (!any) {
        if (sink > -(double)INFINITY) *sink_p = 1;
        return sink;
    }
    for (int64_t j = 0; j < q->n; j++)
        if (dkv_maskSees(p, q->node, r, j)) sum += q->p[j] = exp(q->s[j] - m);
    if (a->in->sink) sum += *sink_p = exp(sink - m);
    for (int64_t j = 0; j < q->n; j++) q->p[j] /= sum;
    *sink_p /= sum;
    return m + log(sum);
}

static void forwardRow(naive *a, int64_t r, int g, double *o) {
    const sequence *q = &a->seq;
    const int dv = a->p->dv;
    for (int c = 0; c < dv; c++) o[c] = 0;
    for (int64_t j = 0; j < q->n; j++)
        if (dkv_maskSees(a->p, q->node, r, j))
            for (int c = 0; c < dv; c++) o[c] += q->p[j] * q->v[(j * a->p->hkv + g) * dv + c];
}

/* dQ of the row; adds to the sequence's dK and dV. L = LSE has derivative p, so dLSE joins dP. */
static void backwardRow(naive *a, int64_t r, int h, const double *qv, const double *d_o, double d_lse,
                        double sink_p, const double *o, double *dq) {
    const dkv_problem *p = a->p;
    sequence *q = &a->seq;
    const int g = h / (p->hq / p->hkv), dqk = p->dqk, dv = p->dv;
    const double scale = p->scale, delta = dot(d_o, o, dv);
    for (int c = 0; c < dqk; c++) dq[c] = 0;
    for (int64_t j = 0; j < q->n; j++) {
        if (!dkv_maskSees(p, q->node, r, j)) continue;
        const double *k = q->k + (j * p->hkv + g) * dqk, *v = q->v + (j * p->hkv + g) * dv;
        double *dk = q->dk + (j * p->hkv + g) * dqk, *dvj = q->dv + (j * p->hkv + g) * dv;
        double ds = q->p[j] * (dot(d_o, v, dv) - delta + d_lse) * q->slope[j] * scale;
        for (int c = 0; c < dv; c++) dvj[c] += q->p[j] * d_o[c];
        for (int c = 0; c < dqk; c++) dq[c] += ds * k[c];
        for (int c = 0; c < dqk; c++) dk[c] += ds * qv[c];
    }
    if (a->out->dsink) a->out->dsink[h] += sink_p * (d_lse - delta); /* the sink's value is 0, so is its dP */
}

static void runRow(naive *a, int64_t r, int h) {
    const dkv_problem *p = a->p;
    const int64_t t = a->seq.q_start + r, tq = a->starts.tq, row = t * p->hq + h;
    double qv[256], d_o[256], sink_p;
    decodeRow(a->in->q, p->dtype, row * p->dqk, p->dqk, qv);
    double *o = a->out->o + row * p->dv;
    a->out->lse[h * tq + t] = softmaxRow(a, r, h, qv, &sink_p);
    forwardRow(a, r, h / (p->hq / p->hkv), o);
    if (!a->out->dq) return;
    decodeRow(a->in->d_o, p->dtype, row * p->dv, p->dv, d_o);
    backwardRow(a, r, h, qv, d_o, a->in->d_lse ? a->in->d_lse[h * tq + t] : 0, sink_p, o,
                a->out->dq + row * p->dqk);
}

int dkv_refNaive(const dkv_problem *p, const dkv_layout *l, const dkv_inputs *in, dkv_outputs *out,
                 dkv_err *err) {
    naive a = {.p = p, .l = l, .in = in, .out = out};
    int rc = dkv_maskAdmissible(p, err);
    if (rc) return rc;
    if ((rc = dkv_makeStarts(p, &a.starts, err))) return rc;
    if ((rc = allocSequence(&a, err))) goto done;
    if (out->dk) memset(out->dk, 0, (size_t)(a.starts.tk * p->hkv * p->dqk) * sizeof(double));
    if (out->dv) memset(out->dv, 0, (size_t)(a.starts.tk * p->hkv * p->dv) * sizeof(double));
    if (out->dsink) memset(out->dsink, 0, (size_t)p->hq * sizeof(double));
    for (int32_t n = 0; n < p->n_nodes; n++) {
        if (p->nodes[n].key_only || !p->nodes[n].len) continue;
        expand(&a, n);
        for (int64_t r = 0; r < a.seq.own; r++)
            for (int h = 0; h < p->hq; h++) runRow(&a, r, h);
        if (out->dq) contract(&a);
    }
done:
    freeSequence(&a.seq);
    dkv_freeStarts(&a.starts);
    return rc;
}
