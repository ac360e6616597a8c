/* oracle_bound.c: truth and bound of every element in one traversal (TOLERANCE.md, "Bound"), the twin with them.
 *
 * A work item is a block of rows of one KV head. It walks its key tiles three times: the truth's forward, with the
 * chains and maxima that the formulas need first; the bound's forward; both backwards and the twin. Scores and their
 * sigma are kept from the first walk where they fit. Products of magnitudes run in fp32 where the inputs' range
 * allows, else in fp64; the fp32 results are raised by their own error. dK and dV are summed block after block, in
 * one fixed order, whatever the number of threads. */
#include <cblas.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "bound_formula.h"
#include "clones.h"
#include "dtype.h"
#include "lanes.h"
#include "partials.h"
#include "truth.h"
#include "twin_ride.h"
#include "vexp.h"

#define KEEP_PAIRS ((int64_t)1 << 21) /* pairs a block whose score and sigma are kept: 32 MiB a thread */
#define MEMORY_MAX ((int64_t)512 << 20)
#define FP32_SLACK                                                                                           \
    (1 + 0x1p-13)            /* sums of at most 512 magnitudes in fp32, their weights and operands rounded */
#define FP32_WEIGHT 0x1p-90  /* smaller weights are raised to it, */
#define FP32_OPERAND 0x1p-60 /* smaller operands to it: a product is above fp32's subnormals or nothing */

typedef struct work {
    const dkv_problem *p;
    const dkv_layout *l;
    const dkv_inputs *in;
    dkv_oracle *out;
    dkv_units units;
    dkv_key_chains chains;
    double *chain_k; /* [tk] error of a chain of dK and dV, roundings under way included but for one */
    double *roundings; /* [tk] how many there are in one sum */
    bool fp32;       /* products of magnitudes in fp32 */
    dkv_lanes lanes;
    double *sink;       /* [n_items, g, 2]: error and magnitude of dSink */
    double *truth_sink; /* [n_items, g]: dSink */
    dkv_ride *ride;     /* the twin, or NULL */
} work;

typedef struct pairs { /* what is known of a tile's pairs: score, sigma [m, n] */
    double *s, *sigma;
} pairs;

typedef struct lane { /* one thread's */
    dkv_lane at;
    work *w;
    dkv_truth truth;
    dkv_rider *rider; /* NULL: none */
    dkv_row_chains rows;
    double *kept; /* [2, keep] */
    int64_t keep; /* pairs of the largest block, at most KEEP_PAIRS */
    int64_t used;
    double *s, *sigma, *dp, *wq, *wk, *wv; /* [m, tile] */
    double *p, *ds, *cap;                 /* [m, tile]: the truth's backward; cap: NULL without softcap */
    double *a, *c;                        /* fp64 operands: magnitudes of rows or keys */
    float *qf, *df, *kf, *vf;             /* fp32 magnitudes of the block's and the tile's operands */
    float *wf, *xf;                       /* fp32 weights [m, tile]; product [max(m, tile), max(d, tile)] */
    double *sum;                          /* [max(m, tile), 256]: product in fp64 */
    double *o, *acc_o, *acc_q;            /* [m, dv], [m, dv], [m, dqk] */
    double *v_max;                        /* [dv]: largest finite |V| that the block may see */
    double *lse, *tol_lse, *delta, *base; /* [m] */
    dkv_forward_row *forward;             /* [m] */
} lane;

static int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

/* --- products of magnitudes --- */

static void magnitudes(const double *x, int64_t n, double add, double *y) {
    for (int64_t i = 0; i < n; i++) y[i] = dkv_formulaMagnitude(x[i], add);
}

DKV_CLONES
static void magnitudes32(const double *x, int64_t n, double add, float *y) {
    for (int64_t i = 0; i < n; i++) {
        double a = fabs(x[i]), b = a + add;
        b = b < FP32_OPERAND ? FP32_OPERAND : b;
        b = a > 0 ? b : 0;
        y[i] = (float)(a <= 0x1.fffffep127 ? b : 0);
    }
}

/* Results of fp32 products, raised by their own error. */
DKV_CLONES
static void raise32(const float *restrict x, int64_t n, double *restrict y) {
    for (int64_t i = 0; i < n; i++) y[i] = x[i] * FP32_SLACK;
}

DKV_CLONES
static void addRaised32(const float *restrict x, int64_t n, double *restrict y) {
    for (int64_t i = 0; i < n; i++) y[i] += x[i] * FP32_SLACK;
}

DKV_CLONES
static void addTo(const double *restrict x, int64_t n, double *restrict y) {
    for (int64_t i = 0; i < n; i++) y[i] += x[i];
}

DKV_CLONES
static void weights32(const double *restrict w, int64_t n, float *restrict y) {
    for (int64_t i = 0; i < n; i++) {
        double a = w[i] < FP32_WEIGHT ? FP32_WEIGHT : w[i];
        y[i] = (float)(w[i] > 0 ? a : 0);
    }
}

/* Largest finite |x| of a column so far. */
DKV_CLONES
static void raiseTop(const double *restrict x, int64_t d, double *restrict top) {
    for (int64_t c = 0; c < d; c++) {
        double a = fabs(x[c]);
        a = a <= 0x1.fffffep127 ? a : 0;
        top[c] = a > top[c] ? a : top[c];
    }
}

/* y [m, n] = |x| |k|^T over d */
static void crossMagnitudes(lane *t, const double *x, const float *xf, const double *k, const float *kf,
                            int64_t d, int64_t n, double *y) {
    const int64_t m = t->at.b.m;
    if (t->w->fp32) {
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (int)m, (int)n, (int)d, 1, xf, (int)d, kf,
                    (int)d, 0, t->xf, (int)n);
        raise32(t->xf, m * n, y);
        return;
    }
    magnitudes(x, m * d, t->w->units.operand, t->a);
    magnitudes(k, n * d, t->w->units.operand, t->c);
    cblas_dgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (int)m, (int)n, (int)d, 1, t->a, (int)d, t->c,
                (int)d, 0, y, (int)n);
}

/* The weights in fp32; false where they do not fit. */
static bool narrow(lane *t, const double *w, int64_t n) {
    if (!t->w->fp32 || dkv_maxOf(w, n) > 0x1p60) return false;
    weights32(w, n, t->wf);
    return true;
}

/* acc [m, d] += w [m, n] |x| [n, d] */
static void addToRows(lane *t, const double *w, int64_t n, const double *x, const float *xf, int64_t d,
                      double *acc) {
    const int64_t m = t->at.b.m;
    if (narrow(t, w, m * n)) {
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, (int)m, (int)d, (int)n, 1, t->wf, (int)n, xf,
                    (int)d, 0, t->xf, (int)d);
        addRaised32(t->xf, m * d, acc);
        return;
    }
    magnitudes(x, n * d, t->w->units.operand, t->c);
    cblas_dgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, (int)m, (int)d, (int)n, 1, w, (int)n, t->c, (int)d,
                1, acc, (int)d);
}

/* sum [n, d] = w^T |x|, w [m, n], x [m, d] */
static void sumOverRows(lane *t, const double *w, int64_t n, const double *x, const float *xf, int64_t d) {
    const int64_t m = t->at.b.m;
    if (narrow(t, w, m * n)) {
        cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, (int)n, (int)d, (int)m, 1, t->wf, (int)n, xf,
                    (int)d, 0, t->xf, (int)d);
        raise32(t->xf, n * d, t->sum);
        return;
    }
    magnitudes(x, m * d, t->w->units.operand, t->a);
    cblas_dgemm(CblasRowMajor, CblasTrans, CblasNoTrans, (int)n, (int)d, (int)m, 1, w, (int)n, t->a, (int)d,
                0, t->sum, (int)d);
}

/* --- one tile --- */

static int64_t rangePosition(const lane *t, const dkv_tile *tile) {
    const dualkv_segment *seg = &t->w->l->view.segments[t->at.b.node];
    return t->w->l->view.ranges[seg->range_begin + tile->range].pos;
}

static double slopeOf(const lane *t, int64_t i) {
    return t->w->p->alibi ? t->w->l->alibi_slopes[t->at.h.kvh * t->at.h.g + i % t->at.h.g] : 0;
}

static double distanceOf(const lane *t, const dkv_tile *tile, int64_t i) {
    return (double)(t->w->p->nodes[t->at.b.node].context + t->at.b.r0 + i / t->at.h.g - tile->j0);
}

/* Scores and sigma of a tile: kept, or computed and kept where there is room. Walks of a block meet the same
 * tiles. */
static pairs tilePairs(lane *t, const dkv_tile *tile, bool first, int64_t *at) {
    const int64_t n = tile->n, size = t->at.b.m * n;
    const int d = t->w->p->dqk;
    const bool fits = *at + size <= t->keep;
    pairs x = {fits ? t->kept + *at : t->s, fits ? t->kept + t->keep + *at : t->sigma};
    if (fits) *at += size;
    if (fits && !first) return x;
    if (t->w->fp32) magnitudes32(tile->k, n * d, t->w->units.operand, t->kf);
    dkv_tileScores(&t->at.h, &t->at.b, tile, x.s, NULL);
    crossMagnitudes(t, t->at.b.q, t->qf, tile->k, t->kf, d, n, x.sigma);
    for (int64_t i = 0; i < t->at.b.m; i++)
        dkv_sigmaRow(&t->w->units, slopeOf(t, i), distanceOf(t, tile, i), n, x.s + i * n, x.sigma + i * n,
                     x.sigma + i * n);
    return x;
}

static void walkChains(lane *t) {
    dkv_tile tile = {.range = -1};
    int64_t at = 0;
    dkv_startRowChains(&t->rows, t->at.b.m);
    dkv_truthBeginForward(&t->truth);
    while (dkv_nextTile(&t->at.h, &t->at.b, &tile)) {
        pairs x = tilePairs(t, &tile, true, &at);
        dkv_addRowChains(&t->rows, &tile, tile.j0 - rangePosition(t, &tile), x.s, x.sigma);
        dkv_truthForwardTile(&t->truth, &tile, x.s, t->p);
    }
    dkv_endRowChains(&t->rows, t->w->units.u);
    dkv_truthEndForward(&t->truth);
}

/* A row whose LSE is not finite takes no part: what depends on it is not finite, or (no key) is 0. */
static bool takesPart(const lane *t, int64_t i) { return isfinite(t->lse[i]); }

static double sinkOf(const lane *t, int64_t i) {
    return t->w->in->sink ? t->w->in->sink[t->at.h.kvh * t->at.h.g + i % t->at.h.g] : -(double)INFINITY;
}

static void startForward(lane *t) {
    const dkv_units *u = &t->w->units;
    const bool sink = t->w->in->sink != NULL;
    for (int64_t i = 0; i < t->at.b.m; i++) {
        dkv_forward_row *r = &t->forward[i];
        const dkv_row_chains *c = &t->rows;
        if (sink && c->tiles[i] > 0) {
            c->tiles[i]++;
            c->rises[i]++;
        }
        const double chain = dkv_sumError(u, c->n[i], c->steps[i], c->tiles[i], u->a->acc_fold);
        *r = (dkv_forward_row){.lse = t->lse[i], .max = fmax(c->max[i], sinkOf(t, i))};
        if (!takesPart(t, i)) continue;
        r->kappa = dkv_formulaKappa(u, chain, c->rises[i]);
        r->w0 = dkv_formulaW0(u, u->a->p_normalised, r->max, r->lse);
    }
}

static void walkForward(lane *t) {
    const int64_t dv = t->w->p->dv;
    dkv_tile tile = {.range = -1};
    int64_t at = 0;
    memset(t->acc_o, 0, sizeof(double) * (size_t)(t->at.b.m * dv));
    memset(t->v_max, 0, sizeof(double) * (size_t)dv);
    startForward(t);
    while (dkv_nextTile(&t->at.h, &t->at.b, &tile)) {
        const int64_t n = tile.n;
        pairs x = tilePairs(t, &tile, false, &at);
        for (int64_t j = 0; j < n; j++) raiseTop(tile.v + j * dv, dv, t->v_max);
        for (int64_t i = 0; i < t->at.b.m; i++) {
            double *p = t->wv + i * n;
            if (!takesPart(t, i)) {
                memset(p, 0, sizeof *p * (size_t)n);
                continue;
            }
            dkv_vexpShift(x.s + i * n, t->lse[i], p, (size_t)n);
            dkv_forwardRow(&t->w->units, &t->forward[i], n, x.s + i * n, x.sigma + i * n, p);
        }
        if (t->w->fp32) magnitudes32(tile.v, n * dv, t->w->units.operand, t->vf);
        addToRows(t, t->wv, n, tile.v, t->vf, dv, t->acc_o);
    }
}

/* --- rows: LSE, O, delta --- */

static double rowSumError(const dkv_units *t, const dkv_row_chains *c, int64_t i) {
    return dkv_formulaRowSum(t, t->a->key_tile, c->n[i], c->tiles[i], c->rises[i]);
}

static void finishLse(lane *t, int64_t i, double sum_h, double top) {
    const dkv_units *u = &t->w->units;
    t->tol_lse[i] =
        dkv_formulaLse(u, rowSumError(u, &t->rows, i), sum_h, top, t->forward[i].max, t->lse[i]);
}

/* O's error before its own rounding, and after, for one row. */
static void finishO(lane *t, int64_t i, double sum_h, double *before, double *after) {
    const dkv_units *u = &t->w->units;
    const double sums = expm1(rowSumError(u, &t->rows, i) + 2 * u->u * (1 + u->u));
    const double h = sum_h * (1 + u->exp) + u->exp, kappa = t->forward[i].kappa;
    const double tiny = (t->rows.n[i] + 4) * u->w;
    for (int64_t c = 0; c < t->w->p->dv; c++) {
        double o = fabs(t->o[i * t->w->p->dv + c]), acc = t->acc_o[i * t->w->p->dv + c];
        before[c] = dkv_formulaO(o, acc, t->v_max[c], kappa, t->forward[i].w0, t->rows.n[i], sums, h, tiny);
        after[c] = dkv_formulaOutput(u, before[c], o);
    }
}

/* D, and the error of dP - D that a whole row shares. Where P is normalised first, D may also be the sum of P
 * dP over the keys (as a softmax's own backward has it): the same form with dP's error beside P's. */
static void finishDelta(lane *t, int64_t i, const double *tol) {
    const dkv_units *u = &t->w->units;
    const int64_t dv = t->w->p->dv;
    const double *o = t->o + i * dv, *d_o = t->at.b.d_o + i * dv, *acc = t->acc_o + i * dv;
    const double kappa = t->forward[i].kappa, dp = u->dp + u->dp_round + expm1(t->rows.n[i] * u->u);
    const int64_t head = t->at.h.kvh * t->at.h.g + i % t->at.h.g, row = t->at.b.q_row + i / t->at.h.g;
    const double d_lse = t->w->in->d_lse ? t->w->in->d_lse[head * t->w->l->view.tq + row] : 0;
    double d = 0, e = 0;
    for (int64_t c = 0; c < dv; c++) {
        d += d_o[c] * o[c];
        e += dkv_formulaDelta(u, d_o[c], o[c], tol[c], u->a->p_normalised ? acc[c] * dp / kappa : 0);
    }
    t->delta[i] = d - d_lse;
    t->base[i] = dkv_formulaBase(u, e, t->delta[i], d_lse);
}

static void finishForward(lane *t) {
    const int64_t dv = t->w->p->dv, m = t->at.b.m;
    double before[256];
    for (int64_t i = 0; i < m; i++) {
        double *tol = t->acc_o + i * dv, sum_h = t->forward[i].sum_h, top = t->forward[i].top;
        const double sink = sinkOf(t, i);
        if (!takesPart(t, i)) {
            t->tol_lse[i] = 0;
            memset(tol, 0, sizeof *tol * (size_t)dv);
            continue;
        }
        if (t->w->in->sink) {
            double x = dkv_sinkForward(&t->w->units, sink, t->forward[i].max);
            sum_h += exp(sink - t->lse[i]) * expm1(x);
            top = fmax(top, x);
        }
        sum_h += t->rows.n[i] * t->w->units.w_exp;
        finishLse(t, i, sum_h, top);
        if (t->rows.n[i] > 0) {
            double after[256];
            finishO(t, i, sum_h, before, after);
            if (t->at.b.d_o) finishDelta(t, i, t->w->units.a->delta_exact ? before : after);
            memcpy(tol, after, sizeof *tol * (size_t)dv);
        } else {
            memset(before, 0, sizeof before);
            if (t->at.b.d_o) finishDelta(t, i, before);
            memset(tol, 0, sizeof *tol * (size_t)dv);
        }
    }
    dkv_putRows(&t->at.h, &t->at.b, t->acc_o, dv, t->w->out->bound.o);
    dkv_putLse(&t->at.h, &t->at.b, t->tol_lse, t->w->out->bound.lse);
}

static void sinkRows(lane *t) {
    const dkv_units *u = &t->w->units;
    for (int64_t i = 0; t->w->sink && i < t->at.b.m; i++) {
        double *x = t->w->sink + 2 * (t->at.item * t->at.h.g + i % t->at.h.g), sink = sinkOf(t, i), e, size;
        if (!takesPart(t, i)) continue;
        e = dkv_sinkBackward(u, sink, t->lse[i], t->tol_lse[i]);
        dkv_formulaSinkRow(u, exp(sink - t->lse[i]), e, t->delta[i], t->base[i], &e, &size);
        x[0] += e;
        x[1] += size;
    }
}

/* --- backward --- */

static void addKeySums(const lane *t, const dkv_tile *tile, int64_t d, double *to) {
    const int64_t hkv = t->w->p->hkv;
    for (int64_t j = 0; j < tile->n; j++) {
        addTo(t->sum + j * d, d, to + ((tile->k_row + j) * hkv + t->at.h.kvh) * d);
    }
}

/* A sum's relative error, of which `times` roundings under way add theirs. */
static double rounded(double sum, double roundoff, double times) { return (1 + sum) * pow(1 + roundoff, times) - 1; }

static void backwardRows(lane *t, const dkv_tile *tile, const pairs *x) {
    const dkv_units *u = &t->w->units;
    const int64_t n = tile->n, fold = u->a->acc_fold_dq ? u->a->acc_fold_dq : u->a->acc_fold;
    const double blocks = dkv_queryRoundings(t->w->l, u->a, t->at.b.node);
    for (int64_t i = 0; i < t->at.b.m; i++) {
        double *wq = t->wq + i * n, *wk = t->wk + i * n, *wv = t->wv + i * n;
        if (!takesPart(t, i)) {
            memset(wq, 0, sizeof *wq * (size_t)n);
            memset(wv, 0, sizeof *wv * (size_t)n);
            memset(wk, 0, sizeof *wk * (size_t)n);
            continue;
        }
        const dkv_backward_row r = {t->lse[i],
                                    t->tol_lse[i],
                                    t->delta[i],
                                    t->base[i],
                                    rounded(dkv_sumError(u, t->rows.n[i], t->rows.steps[i], t->rows.tiles[i], fold),
                                            u->partial, blocks),
                                    slopeOf(t, i),
                                    distanceOf(t, tile, i)};
        dkv_backwardRow(u, &r, n, x->s + i * n, x->sigma + i * n, t->p + i * n, wq, t->dp + i * n,
                        t->w->chain_k + tile->k_row, wq, wk, wv);
    }
}

static void walkBackward(lane *t) {
    const int64_t dqk = t->w->p->dqk, dv = t->w->p->dv;
    dkv_tile tile = {.range = -1};
    int64_t at = 0;
    memset(t->acc_q, 0, sizeof(double) * (size_t)(t->at.b.m * dqk));
    sinkRows(t);
    dkv_truthBeginBackward(&t->truth, t->w->truth_sink ? t->w->truth_sink + t->at.item * t->at.h.g : NULL);
    if (t->rider) dkv_rideBegin(t->rider, &t->at.h, &t->at.b);
    while (dkv_nextTile(&t->at.h, &t->at.b, &tile)) {
        const int64_t n = tile.n;
        pairs x = tilePairs(t, &tile, false, &at);
        if (t->w->fp32) {
            magnitudes32(tile.k, n * dqk, t->w->units.operand, t->kf);
            magnitudes32(tile.v, n * dv, t->w->units.operand, t->vf);
        }
        if (t->cap) dkv_tileScores(&t->at.h, &t->at.b, &tile, x.s, t->cap);
        dkv_tileDp(&t->at.h, &t->at.b, &tile, t->dp);
        dkv_truthBackwardRows(&t->truth, &tile, x.s, t->cap, t->dp, t->p, t->ds);
        crossMagnitudes(t, t->at.b.d_o, t->df, tile.v, t->vf, dv, n, t->wq);
        backwardRows(t, &tile, &x);
        if (t->rider) dkv_rideTile(t->rider, &tile, x.s, t->cap, t->dp); /* the last to need them */
        addToRows(t, t->wq, n, tile.k, t->kf, dqk, t->acc_q);
        sumOverRows(t, t->wk, n, t->at.b.q, t->qf, dqk);
        dkv_awaitTurn(&t->at, tile.k_row, tile.k_row + n);
        dkv_truthBackwardKeys(&t->truth, &tile, t->p, t->ds);
        if (t->rider) dkv_rideKeys(t->rider);
        addKeySums(t, &tile, dqk, t->w->out->bound.dk);
        sumOverRows(t, t->wv, n, t->at.b.d_o, t->df, dv);
        addKeySums(t, &tile, dv, t->w->out->bound.dv);
    }
    dkv_truthEndBackward(&t->truth);
    if (t->rider) dkv_rideEnd(t->rider);
}

static void finishBackward(lane *t) {
    const dkv_units *u = &t->w->units;
    const int64_t d = t->w->p->dqk;
    const double lost = dkv_queryRoundings(t->w->l, u->a, t->at.b.node) * u->w_partial * (1 + u->out);
    double x[256];
    for (int64_t i = 0; i < t->at.b.m; i++) {
        double *b = t->acc_q + i * d;
        const int64_t row = t->at.b.q_row + i / t->at.h.g, head = t->at.h.kvh * t->at.h.g + i % t->at.h.g;
        memcpy(x, t->w->out->truth.dq + (row * t->w->p->hq + head) * d, sizeof *x * (size_t)d);
        for (int64_t c = 0; c < d; c++)
            b[c] = t->rows.n[i] > 0 ? dkv_formulaFinish(u, b[c], u->scale, t->rows.n[i], x[c]) + lost : 0;
    }
    dkv_putRows(&t->at.h, &t->at.b, t->acc_q, d, t->w->out->bound.dq);
}

/* --- items, threads --- */

static void runItem(dkv_lane *at) {
    lane *t = (lane *)at;
    if (t->w->fp32) {
        magnitudes32(t->at.b.q, t->at.b.m * t->w->p->dqk, t->w->units.operand, t->qf);
        if (t->at.b.d_o) magnitudes32(t->at.b.d_o, t->at.b.m * t->w->p->dv, t->w->units.operand, t->df);
    }
    walkChains(t);
    dkv_getLse(&t->at.h, &t->at.b, t->w->out->truth.lse, t->lse);
    dkv_getRows(&t->at.h, &t->at.b, t->w->out->truth.o, t->w->p->dv, t->o);
    walkForward(t);
    finishForward(t);
    if (!t->at.b.d_o) return;
    walkBackward(t);
    finishBackward(t);
}

static void closeLane(lane *t) {
    dkv_closeTruth(&t->truth);
    dkv_closeLane(&t->at);
    dkv_closeRowChains(&t->rows);
    free(t->kept);
    free(t->s);
    free(t->a);
    free(t->qf);
    free(t->o);
    free(t->forward);
}

static int openLane(work *w, lane *t, dkv_mutant mutant, dkv_err *err) {
    const int64_t dqk = w->p->dqk, dv = w->p->dv, d = max64(dqk, dv), k = DKV_TILE_KEYS;
    t->w = w;
    int rc = dkv_openLane(&w->lanes, &t->at, w->p, w->l, w->in, err);
    t->at.h.mutant = mutant;
    if (!rc) rc = dkv_openTruth(&t->at.h, &t->at.b, w->in, &w->out->truth, w->in->d_o != NULL, &t->truth, err);
    if (!rc) rc = dkv_openRowChains(w->units.a, t->at.h.max_m, w->l->view.tk, &t->rows, err);
    if (rc) return rc;
    const int64_t m = t->at.h.max_m, big = max64(m, k);
    t->keep = w->l->view.tk < KEEP_PAIRS / m ? w->l->view.tk * m : KEEP_PAIRS;
    t->kept = malloc(sizeof(double) * (size_t)(2 * t->keep));
    t->s = malloc(sizeof(double) * (size_t)(9 * m * k));
    t->a = malloc(sizeof(double) * (size_t)((2 * big + k) * d));
    t->qf = malloc(sizeof(float) * (size_t)(m * (dqk + dv) + k * (dqk + dv) + m * k + big * max64(d, k)));
    t->o = malloc(sizeof(double) * (size_t)(m * (2 * dv + dqk + 4) + dv));
    t->forward = malloc(sizeof *t->forward * (size_t)m);
    if (!t->kept || !t->s || !t->a || !t->qf || !t->o || !t->forward)
        return dkv_fail(err, DKV_EHARNESS, "out of memory: a block of %lld rows", (long long)m);
    t->sigma = t->s + m * k;
    t->dp = t->sigma + m * k;
    t->wq = t->dp + m * k;
    t->wk = t->wq + m * k;
    t->wv = t->wk + m * k;
    t->p = t->wv + m * k;
    t->ds = t->p + m * k;
    t->cap = w->p->softcap > 0 ? t->ds + m * k : NULL;
    t->c = t->a + big * d;
    t->sum = t->c + k * d;
    t->df = t->qf + m * dqk;
    t->kf = t->df + m * dv;
    t->vf = t->kf + k * dqk;
    t->wf = t->vf + k * dv;
    t->xf = t->wf + m * k;
    t->acc_o = t->o + m * dv;
    t->acc_q = t->acc_o + m * dv;
    t->lse = t->acc_q + m * dqk;
    t->tol_lse = t->lse + m;
    t->delta = t->tol_lse + m;
    t->base = t->delta + m;
    t->v_max = t->base + m;
    return DKV_OK;
}

static int runLanes(work *w, dkv_mutant mutant, dkv_err *err) {
    const int n = w->lanes.threads;
    int rc = DKV_OK;
    lane *all = calloc((size_t)n, sizeof *all);
    w->lanes.lane = calloc((size_t)n, sizeof(dkv_lane *));
    w->lanes.run = runItem;
    if (!all || !w->lanes.lane) rc = dkv_fail(err, DKV_EHARNESS, "out of memory");
    for (int i = 0; i < n && !rc; i++) {
        w->lanes.lane[i] = &all[i].at;
        all[i].rider = w->ride ? dkv_riderOf(w->ride, i) : NULL;
        rc = openLane(w, &all[i], mutant, err);
    }
    if (!rc) dkv_runLanes(&w->lanes);
    for (int i = 0; all && i < n; i++) closeLane(&all[i]);
    free(all);
    free(w->lanes.lane);
    return rc;
}

/* --- the whole --- */

/* May this tensor's magnitudes stand in fp32 products? Largest finite magnitude 0 or within 2^-20 and 2^30.
 */
static bool suitsFp32(const void *x, dualkv_dtype t, int64_t n) {
    const size_t size = dkv_dtypeSize(t);
    double y[1024], top = 0;
    for (int64_t i = 0; x && i < n; i += 1024) {
        size_t k = n - i < 1024 ? (size_t)(n - i) : 1024;
        dkv_decodeArray((const char *)x + (size_t)i * size, t, k, y);
        for (size_t j = 0; j < k; j++) {
            double a = fabs(y[j]);
            top = a > top && a <= 0x1.fffffep127 ? a : top;
        }
    }
    return top == 0 || (top >= 0x1p-20 && top <= 0x1p30);
}

static void finishKeys(const work *w) {
    const dkv_units *u = &w->units;
    for (int64_t j = 0; j < w->l->view.tk * w->p->hkv; j++) {
        const double n = w->chains.n[j / w->p->hkv], lost = w->roundings[j / w->p->hkv] * u->w_partial;
        double *k = w->out->bound.dk + j * w->p->dqk, *v = w->out->bound.dv + j * w->p->dv;
        const double *xk = w->out->truth.dk + j * w->p->dqk, *xv = w->out->truth.dv + j * w->p->dv;
        for (int64_t c = 0; c < w->p->dqk; c++)
            k[c] = n > 0 ? dkv_formulaFinish(u, k[c] + lost, u->scale, n, xk[c]) + lost : 0;
        for (int64_t c = 0; c < w->p->dv; c++)
            v[c] = n > 0 ? dkv_formulaFinish(u, v[c] + lost, 1, n, xv[c]) : 0;
    }
}

static void finishSink(const work *w) {
    const int64_t g = w->p->hq / w->p->hkv, blocks = w->lanes.n_items / w->p->hkv;
    dkv_sumSinks(w->p, w->lanes.n_items, w->truth_sink, w->out->truth.dsink);
    for (int64_t h = 0; h < w->p->hq; h++) {
        double e = 0, all = 0;
        for (int64_t b = 0; b < blocks; b++) {
            const double *x = w->sink + 2 * ((b * w->p->hkv + h / g) * g + h % g);
            e += x[0];
            all += x[1];
        }
        w->out->bound.dsink[h] =
            dkv_formulaSinkSum(&w->units, e, all, (double)w->l->view.tq, w->out->truth.dsink[h]);
    }
}

/* Where the truth is not finite neither is the bound: NaN, or infinity. */
static void copyNonFinite(const dkv_layout *l, dkv_oracle *o) {
    int64_t n[DKV_N_OUTPUTS];
    dkv_countOutputs(l, n);
    for (int id = 0; id < DKV_N_OUTPUTS; id++) {
        const double *x = dkv_outputAt(&o->truth, (dkv_tensor_id)id);
        double *b = dkv_outputAt(&o->bound, (dkv_tensor_id)id);
        for (int64_t i = 0; i < n[id]; i++)
            if (!isfinite(x[i]) && !(id == DKV_LSE && x[i] < 0)) b[i] = isnan(x[i]) ? NAN : INFINITY;
    }
}

static int64_t laneBytes(const dkv_head *h) {
    const int64_t m = max64(h->max_m, DKV_TILE_KEYS);
    return dkv_blockBytes(h) + dkv_truthBytes(h) + 16 * KEEP_PAIRS + ((int64_t)32 << 20) +
           8 * m * (11 * DKV_TILE_KEYS + 16 * 256);
}

static int openWork(work *w, const dkv_ref_options *opt, dkv_err *err) {
    const dualkv_problem *v = &w->l->view;
    const dualkv_arithmetic *a = w->units.a;
    const int64_t fold = a->acc_fold_dkv ? a->acc_fold_dkv : a->acc_fold;
    dkv_head h;
    int rc = dkv_openHead(w->p, w->l, w->in, 0, &h, err);
    if (rc) return rc;
    const int64_t n_items = dkv_countItems(&h);
    w->lanes.n_items = n_items;
    w->lanes.threads = dkv_countThreads(opt, n_items, laneBytes(&h), MEMORY_MAX);
    w->fp32 = !(opt && opt->exact_products) && suitsFp32(w->in->q, w->p->dtype, v->tq * v->hq * v->dqk) &&
              suitsFp32(w->in->k, w->p->dtype, v->tk * v->hkv * v->dqk) &&
              suitsFp32(w->in->v, w->p->dtype, v->tk * v->hkv * v->dv) &&
              suitsFp32(w->in->d_o, w->p->dtype, v->tq * v->hq * v->dv);
    if (w->in->d_o && w->in->sink) {
        w->sink = calloc((size_t)max64(n_items, 1) * (size_t)h.g * 2, sizeof *w->sink);
        w->truth_sink = calloc((size_t)max64(n_items, 1) * (size_t)h.g, sizeof *w->truth_sink);
        if (!w->sink || !w->truth_sink) return dkv_fail(err, DKV_EHARNESS, "out of memory");
    }
    if (w->in->d_o) {
        rc = dkv_countKeyChains(&h, a->acc_step, &w->chains, err);
        if (rc) return rc;
        w->chain_k = malloc(sizeof(double) * (size_t)max64(v->tk, 1));
        w->roundings = malloc(sizeof(double) * (size_t)max64(v->tk, 1));
        if (!w->chain_k || !w->roundings) return dkv_fail(err, DKV_EHARNESS, "out of memory");
        dkv_countRoundings(w->l, a, h.g, w->chain_k, w->roundings);
        for (int64_t j = 0; j < v->tk; j++)
            w->chain_k[j] = rounded(
                dkv_sumError(&w->units, w->chains.n[j], w->chains.steps[j], w->chains.pieces[j], fold),
                w->units.partial, fmax(w->chain_k[j] - 1, 0));
    }
    dkv_closeHead(&h);
    return DKV_OK;
}

typedef struct riding { /* what a twin that comes along needs of the kernel */
    const double *o, *lse;
} riding;

static int traverse(const dkv_problem *p, const dkv_layout *l, const dkv_inputs *in, const dualkv_arithmetic *a,
                    const dkv_ref_options *opt, const riding *twin, dkv_oracle *out, dkv_err *err) {
    work w = {.p = p, .l = l, .in = in, .out = out};
    dkv_inputs used = *in;
    int64_t n[DKV_N_OUTPUTS];
    int rc = dkv_checkArithmetic(a, err);
    if (rc) return rc;
    if (!p->grad) used.d_o = NULL;
    w.in = &used;
    dkv_countOutputs(l, n);
    for (int id = 0; id < DKV_N_OUTPUTS; id++) {
        double *b = dkv_outputAt(&out->bound, (dkv_tensor_id)id), *x = dkv_outputAt(&out->truth, (dkv_tensor_id)id);
        if (b) memset(b, 0, sizeof *b * (size_t)n[id]);
        if (x) memset(x, 0, sizeof *x * (size_t)n[id]);
    }
    dkv_makeUnits(p, a, &w.units);
    rc = openWork(&w, opt, err);
    if (!rc && twin) rc = dkv_openRide(p, l, &used, a, twin->o, twin->lse, w.lanes.threads, out, &w.ride, err);
    if (rc) goto done;
    rc = runLanes(&w, opt ? opt->mutant : DKV_MUTANT_NONE, err);
    if (rc) goto done;
    if (used.d_o) finishKeys(&w);
    if (w.sink) finishSink(&w);
    copyNonFinite(l, out);
    rc = dkv_markExempt(p, l, &used, &out->bound, err);
    if (!rc && w.ride) rc = dkv_finishRide(w.ride, err);
done:
    dkv_closeRide(w.ride);
    dkv_freeKeyChains(&w.chains);
    free(w.chain_k);
    free(w.roundings);
    free(w.sink);
    free(w.truth_sink);
    return rc;
}

int dkv_oracleBound(const dkv_problem *p, const dkv_layout *l, const dkv_inputs *in,
                    const dualkv_arithmetic *a, const dkv_ref_options *opt, dkv_oracle *out, dkv_err *err) {
    return traverse(p, l, in, a, opt, NULL, out, err);
}

int dkv_oracleAll(const dkv_problem *p, const dkv_layout *l, const dkv_inputs *in, const dualkv_arithmetic *a,
                  const dkv_ref_options *opt, const double *kernel_o, const double *kernel_lse, dkv_oracle *out,
                  dkv_err *err) {
    const riding twin = {kernel_o, kernel_lse};
    int rc = dkv_checkArithmetic(a, err);
    if (rc) return rc;
    if (p->grad && kernel_o && kernel_lse && !(opt && opt->exact_products) && dkv_twinRides(p, in, a))
        return traverse(p, l, in, a, opt, &twin, out, err);
    rc = dkv_oracleBound(p, l, in, a, opt, out, err);
    return rc ? rc : dkv_oracleTwin(p, l, in, a, opt, kernel_o, kernel_lse, out, err);
}
