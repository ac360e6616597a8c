/* Which keys does each row see? Asked of the kernel itself: with Q = K = 0 all scores are equal, and a V (or
 * dO) that is one-hot by key (or row) lays the weights open, Dv of them a run: O_ic = P_ij, and dV_jc = P_ij.
 * What is found is a hypothesis as any other: the model with these keys must explain the error on the case's
 * own inputs. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../ref/dtype.h"
#include "../ref/mask.h"
#include "../ref/sequence.h"
#include "append.h"
#include "hypothes_model.h"

#define RUNS_MAX 96 /* of the kernel */
#define FAINT 1e-3  /* of a row's largest weight: less is none, and ALiBi may hide it */

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
    if (!m->p->alibi) return 1;
    const int32_t seg = m->q_segment[t];
    const dualkv_segment *s = &m->l->view.segments[seg];
    int64_t pos = m->pos[(int64_t)m->pos_at[seg] * m->tk + j];
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
                    given[(h * m->tq + t) * m->tk + j] =
                        (float)q->work.out.o[(t * p->hq + h) * p->dv + (j - j0)];
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
                for (int k = 0; k < p->hkv; k++)
                    set(q, in.d_o, (t * p->hq + k * g + x) * p->dv + (t - t0), 1);
            if (dkv_outOfTime(q) || q->in->probe(q->in->probe_arg, &in, &q->work.out)) rc = DKV_REFUSED;
            for (int k = 0; k < p->hkv && !rc; k++)
                for (int64_t t = t0; t < m->tq && t < t0 + p->dv; t++)
                    for (int64_t j = 0; j < m->tk; j++) {
                        const int h = k * g + x;
                        given[(h * m->tq + t) * m->tk + j] =
                            (float)q->work.out.dv[(j * p->hkv + k) * p->dv + (t - t0)];
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

typedef struct difference { /* of one row: a run of keys of one segment, all missing, seen or counted too
                               often */
    int32_t seg;
    int64_t first, last; /* keys within the segment */
    int kind;            /* -1 misses, 1 sees, 2 counts twice */
    bool any;
} difference;

/* The first run of keys of a row that are not as they must be. *more: further ones. */
static difference differRow(const dkv_model *m, const float *given, const float *right, int h, int64_t t,
                            bool *more) {
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
    return b->any && a->seg == b->seg && a->kind == b->kind && a->first + first == b->first &&
           a->last + last == b->last;
}

typedef struct pattern { /* rows [r0, r1] of a segment */
    int32_t seg;
    int64_t r0, r1;
    difference d; /* of row r0 */
    bool more, first_moves, last_moves;
} pattern;

static size_t sayPattern(const dkv_model *m, const pattern *x, int h, char *out, size_t n, size_t at) {
    static const char *const verb[] = {"miss", "", "see", "count twice or more"};
    const bool one = x->r0 == x->r1;
    char of[60], who[60];
    nameSegment(m, x->d.seg, of, sizeof of);
    nameSegment(m, x->seg, who, sizeof who);
    if (at) at = dkv_append(out, n, at, "; ");
    if (one) at = dkv_append(out, n, at, "row %lld of %s", (long long)x->r0, who);
    else at = dkv_append(out, n, at, "rows %lld to %lld of %s", (long long)x->r0, (long long)x->r1, who);
    if (h >= 0) at = dkv_append(out, n, at, ", head %d,", h);
    at = dkv_append(out, n, at, " %s%s", verb[x->d.kind + 1],
             !one || x->d.kind == 2 ? ""
             : x->d.kind == -1      ? "es"
                                    : "s");
    if (x->d.first == x->d.last) at = dkv_append(out, n, at, " key %lld of %s", (long long)x->d.first, of);
    else at = dkv_append(out, n, at, " keys %lld to %lld of %s", (long long)x->d.first, (long long)x->d.last, of);
    if (x->first_moves && x->last_moves) at = dkv_append(out, n, at, " and so on, a key further each row");
    else if (x->first_moves) at = dkv_append(out, n, at, ", from a key further each row");
    else if (x->last_moves) at = dkv_append(out, n, at, ", to a key further each row");
    return x->more ? dkv_append(out, n, at, " and others") : at;
}

/* The longest run of rows from r on whose differences follow one pattern. */
static pattern findPattern(const dkv_model *m, const float *given, const float *right, int h, int32_t seg,
                           int64_t r) {
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
    if (said > 3) dkv_append(out, n, at, "; and %d more like these", said - 3);
    return said;
}

/* What a right kernel counts, in the same form. */
static void fillRight(const dkv_model *m, float *right) {
    const dualkv_problem *v = &m->l->view;
    for (int h = 0; h < v->hq; h++)
        for (int64_t t = 0; t < m->tq; t++)
            for (int64_t j = 0; j < m->tk; j++)
                right[(h * m->tq + t) * m->tk + j] = (float)dkv_modelSees(m, t, j);
}

static int guessCoverage(dkv_inquiry *q, bool backward, float *given, const float *right, char *said,
                         size_t n, dkv_err *err) {
    dkv_model *m = q->model;
    char doc[500];
    int rc = backward ? askBackward(q, given, err) : askForward(q, given, err);
    if (rc) return rc == DKV_REFUSED ? 0 : rc;
    countKeys(m, given);
    if (!describeCoverage(m, given, right, doc, sizeof doc)) return 0;
    snprintf(said, n, "%s: %s", backward ? "backward" : "forward", doc);
    m->given = given;
    rc = dkv_tryEdit(q,
                     &(dkv_edit){.family = "visible",
                                 .name = backward ? "keys that backward counts" : "keys that forward counts",
                                 .doc = doc,
                                 .keys = DKV_KEYS_GIVEN},
                     err);
    m->given = NULL;
    return rc;
}

int dkv_guessKeys(dkv_inquiry *q, dkv_err *err) {
    dkv_model *m = q->model;
    const dkv_problem *p = q->in->p;
    const bool forward = q->wrong[DKV_O] || q->wrong[DKV_LSE];
    const bool backward = p->grad && (q->wrong[DKV_DQ] || q->wrong[DKV_DK] || q->wrong[DKV_DV]);
    if (!m || !q->in->probe || !q->in->got->o || !q->in->got->lse || (!forward && !backward)) return 0;
    const int64_t runs_forward = (m->tk + p->dv - 1) / p->dv,
                  runs_backward = (m->tq + p->dv - 1) / p->dv * (p->hq / p->hkv);
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

/* ---- large problems: a few rows ---- */

#define SAMPLE 8 /* rows */

typedef struct sample {
    dkv_model m;         /* of what the words need: tq is the number of rows, k_segment */
    int64_t row[SAMPLE]; /* packed */
    int32_t seg[SAMPLE];
    float *given, *right; /* [hq, SAMPLE, tk] */
} sample;

/* The first wrong row of each segment, and its last, of O, LSE or dQ. */
static void chooseRows(const dkv_inquiry *q, sample *x) {
    const dualkv_problem *v = &q->in->l->view;
    const int id = q->wrong[DKV_LSE] ? DKV_LSE : q->wrong[DKV_O] ? DKV_O : DKV_DQ;
    const double *got = q->n[id] ? dkv_outputAt(q->in->got, (dkv_tensor_id)id) : NULL;
    for (int32_t i = 0; got && i < v->n_segments; i++) {
        int64_t first = -1, last = -1;
        for (int64_t t = v->segments[i].q_start; t < v->segments[i].q_start + v->segments[i].q_len; t++) {
            const int64_t w = q->n[id] / v->tq;
            bool wrong = false;
            for (int64_t c = 0; c < w && !wrong; c++) {
                const int64_t at = id == DKV_LSE ? c * v->tq + t : t * w + c;
                wrong = !(fabs(got[at] - q->clean[id][at]) <= q->noise[id][at]);
            }
            if (wrong && first < 0) first = t;
            if (wrong) last = t;
        }
        for (int k = 0; k < 2 && x->m.tq < SAMPLE; k++)
            if ((k ? last > first : first >= 0)) {
                x->seg[x->m.tq] = i;
                x->row[x->m.tq++] = k ? last : first;
            }
    }
}

/* What the rows must see, from the mask's meaning. */
static int fillSampleRight(const dkv_inquiry *q, sample *x, dkv_err *err) {
    const dkv_problem *p = q->in->p;
    dkv_starts starts = {0};
    int64_t *keys = malloc((size_t)(dkv_longestSequence(p) + 1) * sizeof *keys);
    int rc = keys ? dkv_makeStarts(p, &starts, err) : dkv_fail(err, DKV_EHARNESS, "out of memory");
    for (int64_t s = 0; s < x->m.tq && !rc; s++) {
        const int64_t n = p->nodes[x->seg[s]].context + p->nodes[x->seg[s]].len;
        const int64_t r = x->row[s] - q->in->l->view.segments[x->seg[s]].q_start;
        dkv_fillSequence(p, &starts, x->seg[s], keys);
        for (int h = 0; h < p->hq; h++)
            for (int64_t j = 0; j < n; j++)
                x->right[(h * x->m.tq + s) * x->m.tk + keys[j]] = dkv_maskSees(p, x->seg[s], r, j);
    }
    dkv_freeStarts(&starts);
    free(keys);
    return rc;
}

/* Forward: a one-hot V, Dv keys a run. */
static bool sampleForward(dkv_inquiry *q, sample *x, dkv_inputs *in) {
    const dkv_problem *p = q->in->p;
    const int64_t tk = x->m.tk;
    if ((tk + p->dv - 1) / p->dv > RUNS_MAX) return false;
    for (int64_t j0 = 0; j0 < tk; j0 += p->dv) {
        const int64_t end = j0 + p->dv < tk ? j0 + p->dv : tk;
        memset(in->v, 0, (size_t)(tk * p->hkv * p->dv) * dkv_dtypeSize(p->dtype));
        for (int64_t j = j0; j < end; j++)
            for (int k = 0; k < p->hkv; k++) set(q, in->v, (j * p->hkv + k) * p->dv + (j - j0), 1);
        if (dkv_outOfTime(q) || q->in->probe(q->in->probe_arg, in, &q->work.out)) return false;
        for (int h = 0; h < p->hq; h++)
            for (int64_t s = 0; s < x->m.tq; s++)
                for (int64_t j = j0; j < end; j++)
                    x->given[(h * x->m.tq + s) * tk + j] =
                        (float)q->work.out.o[(x->row[s] * p->hq + h) * p->dv + (j - j0)];
    }
    return true;
}

/* Backward: a dO that is one-hot in the rows, a column each; one query head of each group a run. */
static bool sampleBackward(dkv_inquiry *q, sample *x, dkv_inputs *in) {
    const dkv_problem *p = q->in->p;
    const int g = p->hq / p->hkv;
    if (p->dv < x->m.tq) return false;
    for (int a = 0; a < g; a++) {
        memset(in->d_o, 0, (size_t)(q->in->l->view.tq * p->hq * p->dv) * dkv_dtypeSize(p->dtype));
        for (int64_t s = 0; s < x->m.tq; s++)
            for (int k = 0; k < p->hkv; k++) set(q, in->d_o, (x->row[s] * p->hq + k * g + a) * p->dv + s, 1);
        if (dkv_outOfTime(q) || q->in->probe(q->in->probe_arg, in, &q->work.out)) return false;
        for (int k = 0; k < p->hkv; k++)
            for (int64_t s = 0; s < x->m.tq; s++)
                for (int64_t j = 0; j < x->m.tk; j++)
                    x->given[((k * g + a) * x->m.tq + s) * x->m.tk + j] =
                        (float)q->work.out.dv[(j * p->hkv + k) * p->dv + s];
    }
    return true;
}

static void saySample(sample *x, const char *stage, char *out, size_t n) {
    const bool agree = headsAgree(&x->m, x->given, x->right);
    size_t at = 0;
    int said = 0;
    char words[300] = "";
    for (int h = 0; h < (agree ? 1 : x->m.p->hq); h++)
        for (int64_t s = 0; s < x->m.tq; s++) {
            const int64_t r = x->row[s] - x->m.l->view.segments[x->seg[s]].q_start;
            pattern one = {.seg = x->seg[s], .r0 = r, .r1 = r};
            one.d = differRow(&x->m, x->given, x->right, h, s, &one.more);
            if (one.d.any && said++ < 3)
                at = sayPattern(&x->m, &one, agree ? -1 : h, words, sizeof words, at);
        }
    if (said) snprintf(out, n, "%s, of %d rows asked: %s", stage, (int)x->m.tq, words);
}

static int askSample(dkv_inquiry *q, sample *x, bool backward, dkv_err *err) {
    dkv_inputs in = {0};
    int rc = startProbe(q, &in, err);
    if (!rc && (backward ? sampleBackward(q, x, &in) : sampleForward(q, x, &in))) {
        for (int h = 0; h < x->m.p->hq; h++)
            for (int64_t s = 0; s < x->m.tq; s++)
                countRow(&x->m, h, s, x->given + (h * x->m.tq + s) * x->m.tk);
        saySample(x, backward ? "backward" : "forward", q->coverage[backward], sizeof q->coverage[0]);
    }
    dkv_freeInputs(&in);
    return rc;
}

int dkv_sampleKeys(dkv_inquiry *q, dkv_err *err) {
    const dkv_problem *p = q->in->p;
    const dualkv_problem *v = &q->in->l->view;
    const bool forward = q->wrong[DKV_O] || q->wrong[DKV_LSE];
    const bool backward = p->grad && (q->wrong[DKV_DQ] || q->wrong[DKV_DK] || q->wrong[DKV_DV]);
    sample x = {.m = {.p = p, .l = q->in->l, .tk = v->tk}};
    if (q->model || !q->in->probe || p->alibi || !q->n[DKV_O] || !v->tk || (!forward && !backward)) return 0;
    chooseRows(q, &x);
    if (!x.m.tq) return 0;
    const size_t n = (size_t)(p->hq * x.m.tq * v->tk);
    x.given = calloc(n, sizeof *x.given);
    x.right = calloc(n, sizeof *x.right);
    x.m.k_segment = calloc((size_t)v->tk, sizeof *x.m.k_segment);
    int rc = x.given && x.right && x.m.k_segment ? 0 : dkv_fail(err, DKV_EHARNESS, "out of memory");
    for (int32_t i = 0; i < v->n_segments && !rc; i++)
        for (int64_t j = 0; j < v->segments[i].k_len; j++) x.m.k_segment[v->segments[i].k_start + j] = i;
    if (!rc) rc = fillSampleRight(q, &x, err);
    if (!rc && forward) rc = askSample(q, &x, false, err);
    if (!rc && backward) rc = askSample(q, &x, true, err);
    free(x.given);
    free(x.right);
    free(x.m.k_segment);
    return rc;
}
