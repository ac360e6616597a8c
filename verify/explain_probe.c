/* Which keys does each row see? Asked of the kernel itself: with Q = K = 0 all scores are equal, and a V (or dO) that is
 * one-hot by key (or row) lays the weights open, Dv of them a run: O_ic = P_ij, and dV_jc = P_ij. What is found is a
 * hypothesis as any other: the model with these keys must explain the error on the case's own inputs. */
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../ref/dtype.h"
#include "hypothes_model.h"

#define RUNS_MAX 96    /* of the kernel */
#define FAINT    1e-3  /* of a row's largest weight: less is none, and ALiBi may hide it */

static void set(const dkv_inquiry *q, void *x, int64_t i, double value) {
    dkv_encodeArray(&value, q->in->p->dtype, 1, (char *)x + (size_t)i * dkv_dtypeSize(q->in->p->dtype));
}

/* Zero Q, K, V, dO, dLSE; the sink as it is. */
static int startProbe(const dkv_inquiry *q, dkv_inputs *in, dkv_err *err) {
    int rc = dkv_allocInputs(q->in->l, in, err);
    if (!rc && q->in->in->sink) memcpy(in->sink, q->in->in->sink, (size_t)q->in->p->hq * sizeof *in->sink);
    return rc;
}

/* What ALiBi leaves of a key's weight. */
static double biasOf(const dkv_model *m, int h, int64_t t, int64_t j) {
    const int32_t seg = m->q_segment[t];
    const dualkv_segment *s = &m->l->view.segments[seg];
    int64_t pos = m->pos[(int64_t)m->pos_at[seg] * m->tk + j];
    if (!m->p->alibi) return 1;
    if (pos < 0) pos = s->context - (s->k_start - j);
    return exp(-m->l->alibi_slopes[h] * fabs((double)(s->context + (t - s->q_start) - pos)));
}

/* Weights become multiplicities, by the smallest of their row: not by LSE, which may be what is wrong. */
static void countRow(const dkv_model *m, int h, int64_t t, float *w) {
    double most = 0, least = INFINITY;
    for (int64_t j = 0; j < m->tk; j++) {
        const double x = fabs(w[j]) / biasOf(m, h, t, j);
        if (isfinite(x) && x > most) most = x;
    }
    for (int64_t j = 0; j < m->tk; j++) {
        const double x = fabs(w[j]) / biasOf(m, h, t, j);
        if (isfinite(x) && x > FAINT * most && x < least) least = x;
    }
    for (int64_t j = 0; j < m->tk; j++) {
        const double x = fabs(w[j]) / biasOf(m, h, t, j), near = floor(x / least + 0.5);
        if (!isfinite(w[j])) w[j] = 1;
        else if (!(x > FAINT * most)) w[j] = biasOf(m, h, t, j) < FAINT ? (float)dkv_modelSees(m, t, j) : 0;
        else w[j] = near <= 4 && fabs(x / least - near) < 0.1 * near ? (float)near : 1;
    }
}

static void countKeys(const dkv_model *m, float *given) {
    for (int h = 0; h < m->p->hq; h++)
        for (int64_t t = 0; t < m->tq; t++) countRow(m, h, t, given + (h * m->tq + t) * m->tk);
}

/* All weights of forward: [hq, tq, tk]. */
static int askForward(dkv_inquiry *q, float *given, dkv_err *err) {
    dkv_model *m = q->model;
    const dkv_problem *p = m->p;
    dkv_inputs in = {0};
    int rc = startProbe(q, &in, err);
    for (int64_t j0 = 0; j0 < m->tk && !rc; j0 += p->dv) {
        memset(in.v, 0, (size_t)(m->tk * p->hkv * p->dv) * dkv_dtypeSize(p->dtype));
        for (int64_t j = j0; j < m->tk && j < j0 + p->dv; j++)
            for (int k = 0; k < p->hkv; k++) set(q, in.v, (j * p->hkv + k) * p->dv + (j - j0), 1);
        if (dkv_outOfTime(q) || q->in->probe(q->in->probe_arg, &in, &q->work.out)) rc = DKV_REFUSED;
        for (int h = 0; h < p->hq && !rc; h++)
            for (int64_t t = 0; t < m->tq; t++)
                for (int64_t j = j0; j < m->tk && j < j0 + p->dv; j++)
                    given[(h * m->tq + t) * m->tk + j] = (float)q->work.out.o[(t * p->hq + h) * p->dv + (j - j0)];
    }
    dkv_freeInputs(&in);
    return rc;
}

/* And of backward: one query head of each group at a time. */
static int askBackward(dkv_inquiry *q, float *given, dkv_err *err) {
    dkv_model *m = q->model;
    const dkv_problem *p = m->p;
    const int g = p->hq / p->hkv;
    dkv_inputs in = {0};
    int rc = startProbe(q, &in, err);
    for (int x = 0; x < g && !rc; x++)
        for (int64_t t0 = 0; t0 < m->tq && !rc; t0 += p->dv) {
            memset(in.d_o, 0, (size_t)(m->tq * p->hq * p->dv) * dkv_dtypeSize(p->dtype));
            for (int64_t t = t0; t < m->tq && t < t0 + p->dv; t++)
                for (int k = 0; k < p->hkv; k++) set(q, in.d_o, (t * p->hq + k * g + x) * p->dv + (t - t0), 1);
            if (dkv_outOfTime(q) || q->in->probe(q->in->probe_arg, &in, &q->work.out)) rc = DKV_REFUSED;
            for (int k = 0; k < p->hkv && !rc; k++)
                for (int64_t t = t0; t < m->tq && t < t0 + p->dv; t++)
                    for (int64_t j = 0; j < m->tk; j++) {
                        const int h = k * g + x;
                        given[(h * m->tq + t) * m->tk + j] = (float)q->work.out.dv[(j * p->hkv + k) * p->dv + (t - t0)];
                    }
        }
    dkv_freeInputs(&in);
    return rc;
}

/* ---- in words ---- */

static void nameSegment(const dkv_model *m, int32_t seg, char *out, size_t n) {
    const dualkv_segment *s = &m->l->view.segments[seg];
    if (s->depth > 0) snprintf(out, n, "response (segment %d)", seg);
    else if (m->l->view.n_groups > 1) snprintf(out, n, "the prompt of group %d", s->group);
    else snprintf(out, n, "the prompt");
}

typedef struct difference { /* of one row: a run of keys of one segment, all missing, seen or counted too often */
    int32_t seg;
    int64_t first, last; /* keys within the segment */
    int kind;            /* -1 misses, 1 sees, 2 counts twice */
    bool any;
} difference;

/* The first run of keys of a row that are not as they must be. *more: further ones. */
static difference differRow(const dkv_model *m, const float *given, const float *right, int h, int64_t t, bool *more) {
    const int64_t at = (h * m->tq + t) * m->tk;
    difference d = {.any = false};
    *more = false;
    for (int64_t j = 0; j < m->tk; j++) {
        if (given[at + j] == right[at + j]) continue;
        const int kind = given[at + j] < right[at + j] ? -1 : right[at + j] > 0 ? 2 : 1;
        const int32_t seg = m->k_segment[j];
        const int64_t key = j - m->l->view.segments[seg].k_start;
        if (!d.any) d = (difference){seg, key, key, kind, true};
        else if (d.seg == seg && d.kind == kind && d.last == key - 1) d.last = key;
        else *more = true;
    }
    return d;
}

/* Does b follow a so many rows on, its first and last key moving with the row or not? */
static bool follows(const difference *a, const difference *b, int64_t first, int64_t last) {
    return b->any && a->seg == b->seg && a->kind == b->kind && a->first + first == b->first && a->last + last == b->last;
}

typedef struct pattern { /* rows [r0, r1] of a segment */
    int32_t seg;
    int64_t r0, r1;
    difference d; /* of row r0 */
    bool more, first_moves, last_moves;
} pattern;

static size_t add(char *out, size_t n, size_t at, const char *fmt, ...) __attribute__((format(printf, 4, 5)));
static size_t add(char *out, size_t n, size_t at, const char *fmt, ...) {
    va_list ap;
    if (at >= n) return at;
    va_start(ap, fmt);
    at += (size_t)vsnprintf(out + at, n - at, fmt, ap);
    va_end(ap);
    return at;
}

static size_t sayPattern(const dkv_model *m, const pattern *x, int h, char *out, size_t n, size_t at) {
    static const char *const verb[] = {"miss", "", "see", "count twice or more"};
    const bool one = x->r0 == x->r1;
    char of[60], who[60];
    nameSegment(m, x->d.seg, of, sizeof of);
    nameSegment(m, x->seg, who, sizeof who);
    if (at) at = add(out, n, at, "; ");
    if (one) at = add(out, n, at, "row %lld of %s", (long long)x->r0, who);
    else at = add(out, n, at, "rows %lld to %lld of %s", (long long)x->r0, (long long)x->r1, who);
    if (h >= 0) at = add(out, n, at, ", head %d,", h);
    at = add(out, n, at, " %s%s", verb[x->d.kind + 1], !one || x->d.kind == 2 ? "" : x->d.kind == -1 ? "es" : "s");
    if (x->d.first == x->d.last) at = add(out, n, at, " key %lld of %s", (long long)x->d.first, of);
    else at = add(out, n, at, " keys %lld to %lld of %s", (long long)x->d.first, (long long)x->d.last, of);
    if (x->first_moves && x->last_moves) at = add(out, n, at, " and so on, a key further each row");
    else if (x->first_moves) at = add(out, n, at, ", from a key further each row");
    else if (x->last_moves) at = add(out, n, at, ", to a key further each row");
    return x->more ? add(out, n, at, " and others") : at;
}

/* The longest run of rows from r on whose differences follow one pattern. */
static pattern findPattern(const dkv_model *m, const float *given, const float *right, int h, int32_t seg, int64_t r) {
    const dualkv_segment *s = &m->l->view.segments[seg];
    pattern best = {.seg = seg, .r0 = r, .r1 = r};
    best.d = differRow(m, given, right, h, s->q_start + r, &best.more);
    const pattern start = best;
    for (int how = 0; how < 4 && best.d.any; how++) {
        pattern x = start;
        bool more;
        x.first_moves = how & 1;
        x.last_moves = how >> 1;
        for (int64_t e = r + 1; e < s->q_len; e++, x.r1++) {
            const difference d = differRow(m, given, right, h, s->q_start + e, &more);
            if (!follows(&x.d, &d, x.first_moves * (e - r), x.last_moves * (e - r))) break;
        }
        if (x.r1 > best.r1) best = x;
    }
    return best;
}

/* Is every head's difference that of the first? */
static bool headsAgree(const dkv_model *m, const float *given, const float *right) {
    const int64_t n = m->tq * m->tk;
    for (int h = 1; h < m->p->hq; h++)
        for (int64_t i = 0; i < n; i++)
            if (given[h * n + i] - right[h * n + i] != given[i] - right[i]) return false;
    return true;
}

/* Patterns in words; how many there are. */
static int describeCoverage(const dkv_model *m, const float *given, const float *right, char *out, size_t n) {
    const dualkv_problem *v = &m->l->view;
    const bool agree = headsAgree(m, given, right);
    int said = 0;
    size_t at = 0;
    out[0] = 0;
    for (int h = 0; h < (agree ? 1 : v->hq); h++)
        for (int32_t i = 0; i < v->n_segments; i++)
            for (int64_t r = 0; r < v->segments[i].q_len;) {
                const pattern x = findPattern(m, given, right, h, i, r);
                if (x.d.any && said++ < 3) at = sayPattern(m, &x, agree ? -1 : h, out, n, at);
                r = x.r1 + 1;
            }
    if (said > 3) add(out, n, at, "; and %d more like these", said - 3);
    return said;
}

/* What a right kernel counts, in the same form. */
static void fillRight(const dkv_model *m, float *right) {
    const dualkv_problem *v = &m->l->view;
    for (int h = 0; h < v->hq; h++)
        for (int64_t t = 0; t < m->tq; t++)
            for (int64_t j = 0; j < m->tk; j++) right[(h * m->tq + t) * m->tk + j] = (float)dkv_modelSees(m, t, j);
}

static int guessCoverage(dkv_inquiry *q, bool backward, float *given, const float *right, char *said, size_t n, dkv_err *err) {
    dkv_model *m = q->model;
    char doc[300];
    int rc = backward ? askBackward(q, given, err) : askForward(q, given, err);
    if (rc) return rc == DKV_REFUSED ? 0 : rc;
    countKeys(m, given);
    if (!describeCoverage(m, given, right, doc, sizeof doc)) return 0;
    snprintf(said, n, "%s: %s", backward ? "backward" : "forward", doc);
    m->given = given;
    rc = dkv_tryEdit(q, &(dkv_edit){.family = "visible", .name = backward ? "keys that backward counts" : "keys that forward counts",
                                    .doc = doc, .keys = DKV_KEYS_GIVEN}, err);
    m->given = NULL;
    return rc;
}

int dkv_guessKeys(dkv_inquiry *q, dkv_err *err) {
    dkv_model *m = q->model;
    const dkv_problem *p = q->in->p;
    const bool forward = q->wrong[DKV_O] || q->wrong[DKV_LSE];
    const bool backward = p->grad && (q->wrong[DKV_DQ] || q->wrong[DKV_DK] || q->wrong[DKV_DV]);
    if (!m || !q->in->probe || !q->in->got->o || !q->in->got->lse || (!forward && !backward)) return 0;
    const int64_t runs_forward = (m->tk + p->dv - 1) / p->dv, runs_backward = (m->tq + p->dv - 1) / p->dv * (p->hq / p->hkv);
    const size_t pairs = (size_t)(p->hq * m->tq * m->tk);
    float *given = calloc(pairs, sizeof *given), *right = calloc(pairs, sizeof *right);
    int rc = given && right ? 0 : dkv_fail(err, DKV_EHARNESS, "out of memory");
    if (!rc) fillRight(m, right);
    if (!rc && forward && runs_forward <= RUNS_MAX)
        rc = guessCoverage(q, false, given, right, q->coverage[0], sizeof q->coverage[0], err);
    if (!rc && backward && runs_backward <= RUNS_MAX && !dkv_outOfTime(q))
        rc = guessCoverage(q, true, given, right, q->coverage[1], sizeof q->coverage[1], err);
    free(given);
    free(right);
    return rc;
}
