/* The truth in __float128 (113 bits), row by row on the packed problem, for small cases. Written apart from
 * the naive reference on purpose: each key's owner is found by climbing the tree, probabilities are exp(s -
 * L), and the Jacobian of the softmax takes the sum of p dp over the row where the others use dO.O. */
#include <math.h>
#include <quadmath.h>
#include <stdlib.h>
#include <string.h>

#include "dtype.h"
#include "mask.h"
#include "reference.h"

typedef __float128 quad;

#define PRODUCTS_MAX 5e7 /* some seconds */

typedef struct quad_run {
    const dkv_problem *p;
    const dkv_layout *l;
    double *q, *k, *v, *d_o;     /* decoded, packed */
    quad *dk, *dv, *dsink;       /* sums over rows, packed */
    quad *score, *prob, *factor; /* [longest sequence] of one row; factor: softcap's derivative */
    int64_t *key;                /* [longest sequence] packed key row, -1 where masked */
    int64_t *first;              /* [n_nodes] packed row of each node's first key */
    int64_t tq, tk;
    const float *d_lse, *sink;
    dkv_outputs *out;
} quad_run;

/* Packed row of the key at position j of node n's list. */
static int64_t ownerRow(const quad_run *a, int32_t n, int64_t j) {
    while (j < a->p->nodes[n].context) n = a->p->nodes[n].parent;
    return a->first[n] + j - a->p->nodes[n].context;
}

static quad scoreOf(quad_run *a, int h, const double *q, const double *k, int64_t distance, quad *factor) {
    quad s = 0, cap = a->p->softcap;
    for (int c = 0; c < a->p->dqk; c++) s += (quad)q[c] * k[c];
    s *= a->p->scale;
    *factor = 1;
    if (cap > 0) {
        quad sech = 1 / coshq(s / cap);
        *factor = sech * sech;
        s = cap * tanhq(s / cap);
    }
    if (a->p->alibi) s -= (quad)a->l->alibi_slopes[h] * (quad)(distance < 0 ? -distance : distance);
    return s;
}

/* Fills score, factor and prob of a row; returns its LSE and the number of visible keys. */
static quad softmaxQuad(quad_run *a, int32_t n, int64_t r, int h, int64_t row, int64_t *visible) {
    const dkv_problem *p = a->p;
    const int64_t keys = p->nodes[n].context + p->nodes[n].len;
    const int kvh = h * p->hkv / p->hq;
    quad max = a->sink ? (quad)a->sink[h] : -HUGE_VALQ, sum = 0, lse;
    *visible = 0;
    for (int64_t j = 0; j < keys; j++) {
        if (a->key[j] < 0) continue;
        a->score[j] =
            scoreOf(a, h, a->q + (row * p->hq + h) * p->dqk, a->k + (a->key[j] * p->hkv + kvh) * p->dqk,
                    p->nodes[n].context + r - j, &a->factor[j]);
        if (a->score[j] > max) max = a->score[j];
        ++*visible;
    }
    if (!*visible) return max;
    for (int64_t j = keys - 1; j >= 0; j--)
        if (a->key[j] >= 0) sum += expq(a->score[j] - max);
    if (a->sink) sum += expq((quad)a->sink[h] - max);
    lse = max + logq(sum);
    for (int64_t j = 0; j < keys; j++) a->prob[j] = a->key[j] < 0 ? 0 : expq(a->score[j] - lse);
    return lse;
}

static void rowForward(quad_run *a, int64_t keys, int kvh, double *o) {
    for (int c = 0; c < a->p->dv; c++) {
        quad sum = 0;
        for (int64_t j = 0; j < keys; j++)
            if (a->key[j] >= 0) sum += a->prob[j] * a->v[(a->key[j] * a->p->hkv + kvh) * a->p->dv + c];
        o[c] = (double)sum;
    }
}

/* Reuses score[j] for dp of key j. */
static void rowBackward(quad_run *a, int64_t keys, int h, int64_t row, quad lse, int64_t visible) {
    const dkv_problem *p = a->p;
    const int kvh = h * p->hkv / p->hq;
    const double *q = a->q + (row * p->hq + h) * p->dqk, *d_o = a->d_o + (row * p->hq + h) * p->dv;
    const quad d_lse = a->d_lse ? (quad)a->d_lse[h * a->tq + row] : 0;
    quad mean = 0, dq[256] = {0};
    for (int64_t j = 0; j < keys; j++) {
        if (a->key[j] < 0) continue;
        const double *v = a->v + (a->key[j] * p->hkv + kvh) * p->dv;
        quad dp = 0;
        for (int c = 0; c < p->dv; c++) dp += (quad)d_o[c] * v[c];
        a->score[j] = dp;
        mean += a->prob[j] * dp;
    }
    for (int64_t j = 0; j < keys; j++) {
        if (a->key[j] < 0) continue;
        const int64_t at = a->key[j] * p->hkv + kvh;
        const quad ds = a->p->scale * a->factor[j] * a->prob[j] * (a->score[j] - mean + d_lse);
        for (int c = 0; c < p->dv; c++) a->dv[at * p->dv + c] += a->prob[j] * d_o[c];
        for (int c = 0; c < p->dqk; c++) {
            dq[c] += ds * a->k[at * p->dqk + c];
            a->dk[at * p->dqk + c] += ds * q[c];
        }
    }
    for (int c = 0; c < p->dqk; c++) a->out->dq[(row * p->hq + h) * p->dqk + c] = (double)dq[c];
    if (a->sink && (visible || !isinfq(lse))) a->dsink[h] += expq(a->sink[h] - lse) * (d_lse - mean);
}

static void *decoded(const void *x, dualkv_dtype t, int64_t n) {
    double *out = malloc((size_t)(n > 0 ? n : 1) * sizeof *out);
    if (out) dkv_decodeArray(x, t, (size_t)n, out);
    return out;
}

static int prepareQuad(quad_run *a, const dkv_inputs *in, dkv_err *err) {
    const dkv_problem *p = a->p;
    const bool grad = a->out->dq != NULL;
    int64_t longest = 1;
    double products = 0;
    a->first = calloc((size_t)p->n_nodes + 1, sizeof *a->first);
    if (!a->first) return dkv_fail(err, DKV_EHARNESS, "out of memory in the quad reference");
    for (int32_t n = 0; n < p->n_nodes; n++) {
        const dkv_node *node = &p->nodes[n];
        a->first[n] = a->tk;
        a->tk += node->len;
        if (node->key_only) continue;
        a->tq += node->len;
        products += (double)node->len * (double)(node->context + node->len) * p->hq * (p->dqk + p->dv) *
                    (grad ? 2.5 : 1);
        if (node->context + node->len > longest) longest = node->context + node->len;
    }
    if (products > PRODUCTS_MAX)
        return dkv_fail(err, DKV_EREFUSED, "quad reference: %.2g products, its limit is %.2g", products,
                        PRODUCTS_MAX);
    a->q = decoded(in->q, p->dtype, a->tq * p->hq * p->dqk);
    a->k = decoded(in->k, p->dtype, a->tk * p->hkv * p->dqk);
    a->v = decoded(in->v, p->dtype, a->tk * p->hkv * p->dv);
    a->score = calloc((size_t)longest, sizeof(quad));
    a->prob = calloc((size_t)longest, sizeof(quad));
    a->factor = calloc((size_t)longest, sizeof(quad));
    a->key = calloc((size_t)longest, sizeof *a->key);
    a->dk = calloc((size_t)(a->tk * p->hkv * p->dqk + 1), sizeof(quad));
    a->dv = calloc((size_t)(a->tk * p->hkv * p->dv + 1), sizeof(quad));
    a->dsink = calloc((size_t)p->hq, sizeof(quad));
    if (grad) a->d_o = decoded(in->d_o, p->dtype, a->tq * p->hq * p->dv);
    if (!a->q || !a->k || !a->v || !a->score || !a->prob || !a->factor || !a->key || !a->dk || !a->dv ||
        !a->dsink || (grad && !a->d_o))
        return dkv_fail(err, DKV_EHARNESS, "out of memory in the quad reference");
    return DKV_OK;
}

static void runQuad(quad_run *a) {
    const dkv_problem *p = a->p;
    int64_t row = 0;
    for (int32_t n = 0; n < p->n_nodes; n++) {
        if (p->nodes[n].key_only) continue;
        const int64_t keys = p->nodes[n].context + p->nodes[n].len;
        for (int64_t r = 0; r < p->nodes[n].len; r++, row++) {
            for (int64_t j = 0; j < keys; j++) a->key[j] = dkv_maskSees(p, n, r, j) ? ownerRow(a, n, j) : -1;
            for (int h = 0; h < p->hq; h++) {
                int64_t visible;
                quad lse = softmaxQuad(a, n, r, h, row, &visible);
                a->out->lse[h * a->tq + row] = (double)lse;
                rowForward(a, keys, h * p->hkv / p->hq, a->out->o + (row * p->hq + h) * p->dv);
                if (a->out->dq) rowBackward(a, keys, h, row, lse, visible);
            }
        }
    }
    for (int64_t i = 0; a->out->dk && i < a->tk * p->hkv * p->dqk; i++) a->out->dk[i] = (double)a->dk[i];
    for (int64_t i = 0; a->out->dv && i < a->tk * p->hkv * p->dv; i++) a->out->dv[i] = (double)a->dv[i];
    for (int h = 0; a->out->dsink && h < p->hq; h++) a->out->dsink[h] = (double)a->dsink[h];
}

int dkv_refQuad(const dkv_problem *p, const dkv_layout *l, const dkv_inputs *in, dkv_outputs *out,
                dkv_err *err) {
    quad_run a = {.p = p, .l = l, .d_lse = in->d_lse, .sink = in->sink, .out = out};
    int rc = dkv_maskAdmissible(p, err);
    if (rc) return rc;
    if (!(rc = prepareQuad(&a, in, err))) runQuad(&a);
    void *all[] = {a.q, a.k, a.v, a.d_o, a.score, a.prob, a.factor, a.key, a.dk, a.dv, a.dsink, a.first};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    return rc;
}
