/* Numbers and places fitted to the outputs: factors, offsets, coefficients of the gradients' terms and of
 * their parts, rows and heads that hold others'. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../ref/dtype.h"
#include "hypothes_model.h"
#include "vectors.h"

#define PARTS_MAX 64    /* parts of a tensor that get a number of their own */
#define TERMS_MAX 16    /* coefficients of one fit */
#define INFORMATIVE 4.0 /* times its noise: an element that tells a factor */

typedef dkv_vectors shape;

static shape shapeOf(const dkv_inquiry *q, int id) { return dkv_vectorsOf(&q->in->l->view, (dkv_tensor_id)id); }

/* The clean outputs, into the scratch prediction. */
static void startClean(dkv_inquiry *q) {
    memset(&q->work.damage, 0, sizeof q->work.damage);
    for (int id = 0; id < DKV_N_OUTPUTS; id++)
        if (q->n[id])
            memcpy(dkv_outputAt(&q->work.out, (dkv_tensor_id)id), q->clean[id],
                   (size_t)q->n[id] * sizeof(double));
}

static int add(dkv_inquiry *q, const char *family, const char *name, const char *doc, int32_t mask,
               int parameters, double value, dkv_err *err) {
    if (dkv_isExcluded(q, name)) return 0;
    dkv_guess *g = dkv_addGuess(q, family, name, doc, mask, &q->work);
    if (!g) return dkv_fail(err, DKV_EHARNESS, "out of memory");
    g->parameters = parameters;
    g->value[0] = value;
    if (!g->moves) dkv_dropGuess(q);
    return 0;
}

/* ---- factors and offsets ---- */

typedef enum partition { BY_NOTHING, BY_REGION, BY_HEAD, BY_SEGMENT, N_PARTITIONS } partition;
static const char *const partition_word[] = {"", " by region", " by head", " by segment"};

static int partOf(const dkv_inquiry *q, const shape *s, partition by, int64_t row, int64_t head) {
    if (by == BY_NOTHING) return 0;
    if (by == BY_HEAD) return (int)head;
    const int32_t seg = dkv_segmentOf(q->in->l, s->keys, row);
    return by == BY_SEGMENT ? seg : q->in->l->view.segments[seg].depth > 0;
}

static void namePart(partition by, int part, char *out, size_t n) {
    if (by == BY_REGION) snprintf(out, n, part ? " of responses" : " of prompts");
    else if (by == BY_HEAD) snprintf(out, n, " of head %d", part);
    else if (by == BY_SEGMENT) snprintf(out, n, " of segment %d", part);
    else out[0] = 0;
}

static int compareDoubles(const void *x, const void *y) {
    const double a = *(const double *)x, b = *(const double *)y;
    return a < b ? -1 : a > b;
}

static double roundoffOf(const dkv_inquiry *q, int id) {
    return dkv_unitRoundoff(id == DKV_LSE || id == DKV_DSINK ? DUALKV_FP32 : (int32_t)q->in->p->dtype);
}

/* Median of got/clean (or got - clean) over the informative elements of a part; NAN: too few. Its error: the order statistics
 * between which the median lies but for DKV_FIT_CHANCE, whatever the distribution (Hoeffding), and what functions that err to
 * one side take. */
static double fitPart(const dkv_inquiry *q, int id, const shape *s, const int *part, int which, bool offset,
                      double *scratch, double *error) {
    const double *got = dkv_outputAt(q->in->got, (dkv_tensor_id)id);
    int64_t n = 0;
    for (int64_t row = 0; row < s->rows; row++)
        for (int64_t h = 0; h < s->heads; h++)
            for (int64_t at = dkv_vectorAt(s, row, h), c = 0; part[row * s->heads + h] == which && c < s->d;
                 c++, at++) {
                const double x = q->clean[id][at];
                if (!isfinite(x) || !isfinite(got[at]) || !isfinite(q->noise[id][at])) continue;
                if (offset) scratch[n++] = got[at] - x;
                else if (fabs(x) > INFORMATIVE * q->noise[id][at]) scratch[n++] = got[at] / x;
            }
    if (n < 4) return NAN;
    qsort(scratch, (size_t)n, sizeof *scratch, compareDoubles);
    const dualkv_arithmetic *a = q->in->a;
    const double median = n % 2 ? scratch[n / 2] : (scratch[n / 2 - 1] + scratch[n / 2]) / 2;
    const int64_t ranks = (int64_t)ceil(sqrt((double)n * log(2 / DKV_FIT_CHANCE) / 2)), low = n / 2 - ranks, high = n / 2 + ranks;
    *error = fmax(median - scratch[low > 0 ? low : 0], scratch[high < n ? high : n - 1] - median) +
             (offset ? 1 : fabs(median)) * (a->exp_error + a->log_error + 4 * a->unit);
    return median;
}

/* The number that means something nearest to c, where it lies within c's error; else c. */
static double snap(double c, double error) {
    static const double round[] = {1, 0, -1, 2, 0.5, 3, 4, 0.25, 1.0 / 3, 2.0 / 3, 0.75};
    double best = c, least = INFINITY;
    for (size_t i = 0; i < sizeof round / sizeof *round; i++) {
        const double far = fabs(c - round[i]);
        if (far > error || far >= least) continue;
        best = round[i];
        least = far;
    }
    return best;
}

typedef struct fitted {
    double value[PARTS_MAX], error[PARTS_MAX];
    int parts, distinct; /* numbers that are not "as it must be", equal ones once */
} fitted;

static void countDistinct(fitted *f, double neutral) {
    f->distinct = 0;
    for (int i = 0; i < f->parts; i++) {
        bool known = f->value[i] == neutral;
        for (int j = 0; j < i && !known; j++) known = fabs(f->value[i] - f->value[j]) <= f->error[i] + f->error[j];
        f->distinct += !known;
    }
}

/* One tensor's numbers applied to the scratch prediction. False: nothing to say. */
static bool fitTensor(dkv_inquiry *q, int id, partition by, bool offset, fitted *f, double *scratch,
                      int *part) {
    const shape s = shapeOf(q, id);
    f->parts = 1;
    for (int64_t row = 0; row < s.rows; row++)
        for (int64_t h = 0; h < s.heads; h++) {
            const int p = part[row * s.heads + h] = partOf(q, &s, by, row, h);
            if (p >= f->parts) f->parts = p + 1;
            if (p >= PARTS_MAX) return false;
        }
    for (int i = 0; i < f->parts; i++) {
        f->error[i] = 0;
        double c = fitPart(q, id, &s, part, i, offset, scratch, &f->error[i]);
        if (isnan(c)) c = offset ? 0 : 1;
        f->value[i] = offset ? (fabs(c) <= f->error[i] ? 0 : c) : snap(c, f->error[i]);
    }
    countDistinct(f, offset ? 0 : 1);
    double *out = dkv_outputAt(&q->work.out, (dkv_tensor_id)id);
    for (int64_t row = 0; row < s.rows; row++)
        for (int64_t h = 0; h < s.heads; h++)
            for (int64_t at = dkv_vectorAt(&s, row, h), c = 0; c < s.d; c++, at++) {
                const double x = q->clean[id][at], v = f->value[part[row * s.heads + h]];
                out[at] = offset ? x + v : x * v;
            }
    return f->distinct > 0 && f->distinct <= 4;
}

static size_t sayTensor(const dkv_inquiry *q, int id, partition by, bool offset, const fitted *f, char *doc,
                        size_t n, size_t at) {
    int said = 0;
    for (int i = 0; i < f->parts; i++) {
        char where[40], word[60];
        if (f->value[i] == (offset ? 0 : 1) || at >= n) continue;
        if (++said > 4) continue;
        namePart(by, i, where, sizeof where);
        const double near = f->error[i] + roundoffOf(q, id) * fabs(f->value[i]); /* the factor may have been rounded itself */
        if (offset && fabs(fabs(f->value[i]) - log(2)) <= near)
            snprintf(word, sizeof word, "%cln 2", f->value[i] > 0 ? '+' : '-');
        else if (offset) snprintf(word, sizeof word, "%s%.4g", f->value[i] > 0 ? "+" : "", f->value[i]);
        else if (f->value[i] == 0) snprintf(word, sizeof word, "0");
        else dkv_nameFactor(q->in->p, f->value[i], near / fabs(f->value[i]), word, sizeof word);
        at += (size_t)snprintf(doc + at, n - at, "%s%s%s is %s%s", at ? "; " : "",
                               dkv_tensorName((dkv_tensor_id)id), where,
                               offset ? "off by " : "multiplied by ", word);
    }
    if (said > 4 && at < n) at += (size_t)snprintf(doc + at, n - at, "; and so on");
    return at;
}

/* All wrong tensors of `among`, each with its own numbers. */
static int guessPartition(dkv_inquiry *q, int32_t among, partition by, bool offset, double *scratch,
                          int *part, dkv_err *err) {
    char doc[300] = "", name[96];
    int32_t mask = 0;
    int parameters = 0, tensors = 0;
    double value = 1;
    size_t at = 0, said = 0;
    startClean(q);
    said = (size_t)snprintf(name, sizeof name, "%s%s of", offset ? "offset" : "factor", partition_word[by]);
    for (int id = 0; id < DKV_N_OUTPUTS; id++) {
        fitted f;
        if (!(among >> id & 1) || !q->wrong[id]) continue;
        if (!fitTensor(q, id, by, offset, &f, scratch, part)) continue;
        at = sayTensor(q, id, by, offset, &f, doc, sizeof doc, at);
        mask |= 1 << id;
        parameters += f.distinct + (by != BY_NOTHING);
        value = f.value[0];
        if (said < sizeof name)
            said += (size_t)snprintf(name + said, sizeof name - said, "%s%s", tensors++ ? "," : " ",
                                     dkv_tensorName((dkv_tensor_id)id));
    }
    return mask ? add(q, "factor", name, doc, mask, parameters, value, err) : 0;
}

static int64_t mostElements(const dkv_inquiry *q) {
    int64_t most = 1;
    for (int id = 0; id < DKV_N_OUTPUTS; id++) most = q->n[id] > most ? q->n[id] : most;
    return most;
}

int dkv_guessFactors(dkv_inquiry *q, dkv_err *err) {
    const size_t most = (size_t)mostElements(q);
    double *scratch = malloc(most * sizeof *scratch);
    int *part = malloc(most * sizeof *part), rc = 0, wrong = 0;
    if (!scratch || !part) rc = dkv_fail(err, DKV_EHARNESS, "out of memory");
    for (int id = 0; id < DKV_N_OUTPUTS; id++) wrong += q->wrong[id];
    for (int by = 0; by < N_PARTITIONS && !rc && !dkv_outOfTime(q); by++) {
        if (wrong > 1) rc = guessPartition(q, DKV_ALL_PARTS, (partition)by, false, scratch, part, err);
        for (int id = 0; id < DKV_N_OUTPUTS && !rc; id++)
            if (q->wrong[id]) rc = guessPartition(q, 1 << id, (partition)by, false, scratch, part, err);
        if (!rc && q->wrong[DKV_LSE])
            rc = guessPartition(q, 1 << DKV_LSE, (partition)by, true, scratch, part, err);
    }
    free(scratch);
    free(part);
    return rc;
}

/* ---- coefficients ---- */

/* Least squares, a few unknowns: a [n, n] symmetric, becomes its inverse. least: pivots that are rounding alone. False:
 * singular. */
static bool solve(double a[TERMS_MAX][TERMS_MAX], double b[TERMS_MAX], int n, double least) {
    double inverse[TERMS_MAX][TERMS_MAX] = {{0}};
    for (int i = 0; i < n; i++) inverse[i][i] = 1;
    for (int i = 0; i < n; i++) {
        int best = i;
        for (int r = i + 1; r < n; r++)
            if (fabs(a[r][i]) > fabs(a[best][i])) best = r;
        if (!(fabs(a[best][i]) > least)) return false;
        for (int c = 0; c < n; c++) {
            const double t = a[i][c];
            a[i][c] = a[best][c];
            a[best][c] = t;
            const double v = inverse[i][c];
            inverse[i][c] = inverse[best][c];
            inverse[best][c] = v;
        }
        const double t = b[i];
        b[i] = b[best];
        b[best] = t;
        for (int r = 0; r < n; r++) {
            const double f = r == i ? 0 : a[r][i] / a[i][i];
            for (int c = i; c < n && r != i; c++) a[r][c] -= f * a[i][c];
            for (int c = 0; c < n && r != i; c++) inverse[r][c] -= f * inverse[i][c];
            b[r] -= f * b[i];
        }
    }
    for (int i = 0; i < n; i++) {
        b[i] /= a[i][i];
        for (int c = 0; c < n; c++) inverse[i][c] /= a[i][i];
    }
    for (int i = 0; i < n; i++) memcpy(a[i], inverse[i], (size_t)n * sizeof inverse[i][0]);
    return true;
}

typedef struct term {
    double *x; /* [n of the tensor] what one unit of it adds */
    char word[60];
} term;

typedef struct normal { /* equations */
    double a[TERMS_MAX][TERMS_MAX], b[TERMS_MAX], count; /* elements in it */
    int n;
} normal;

/* Adds the elements [from, to) of one tensor, weighted by their noise. */
static void addElements(const dkv_inquiry *q, int id, const term *t, int64_t from, int64_t to, normal *eq) {
    const double *got = dkv_outputAt(q->in->got, (dkv_tensor_id)id);
    for (int64_t i = from; i < to; i++) {
        const double e = got[i] - q->clean[id][i], n = q->noise[id][i];
        if (!isfinite(e) || !isfinite(n) || n <= 0) continue;
        eq->count++;
        for (int r = 0; r < eq->n; r++) {
            for (int c = 0; c < eq->n; c++) eq->a[r][c] += t[r].x[i] / n * (t[c].x[i] / n);
            eq->b[r] += t[r].x[i] / n * (e / n);
        }
    }
}

/* Solved, scaled to unit diagonal first; b: coefficient of each term beside the 1 that is right, snapped within its error:
 * that of weights 1/noise, where noise is the bound and so no less than a standard deviation. */
static bool finishFit(normal *eq) {
    double scale[TERMS_MAX];
    for (int i = 0; i < eq->n; i++) {
        if (!(eq->a[i][i] > 0)) return false;
        scale[i] = sqrt(eq->a[i][i]);
    }
    for (int r = 0; r < eq->n; r++) {
        for (int c = 0; c < eq->n; c++) eq->a[r][c] /= scale[r] * scale[c];
        eq->b[r] /= scale[r];
    }
    if (!solve(eq->a, eq->b, eq->n, eq->count * 0x1p-52)) return false;
    for (int i = 0; i < eq->n; i++)
        eq->b[i] = snap(1 + eq->b[i] / scale[i], sqrt(2 * log(2 / DKV_FIT_CHANCE) * fabs(eq->a[i][i])) / scale[i]) - 1;
    return true;
}

static void apply(dkv_inquiry *q, int id, const term *t, const normal *eq, int64_t from, int64_t to) {
    double *out = dkv_outputAt(&q->work.out, (dkv_tensor_id)id);
    for (int64_t i = from; i < to; i++)
        for (int r = 0; r < eq->n; r++) out[i] += eq->b[r] * t[r].x[i];
}

static void sayTerms(const term *t, const normal *eq, const char *of, char *doc, size_t n, size_t *at,
                     int *parameters) {
    for (int i = 0; i < eq->n; i++) {
        if (eq->b[i] == 0) continue;
        if (++*parameters <= 2 && *at < n)
            *at += (size_t)snprintf(doc + *at, n - *at, "%s%s%s counts %.3g times", *at ? "; " : "", of,
                                    t[i].word, 1 + eq->b[i]);
    }
}

/* dQ and dK are linear in the terms of dS: how often do delta and dLSE count? */
static int guessGradientTerms(dkv_inquiry *q, dkv_err *err) {
    dkv_model *m = q->model;
    const dkv_edit edit[2] = {{.family = "gradient", .delta = 7}, {.family = "gradient", .d_lse = 1}};
    normal eq = {.n = m->d_lse ? 2 : 1};
    term t[2][DKV_N_OUTPUTS] = {{{0}}};
    char doc[300] = "";
    size_t at = 0;
    int rc = 0, parameters = 0;
    static const int ids[] = {DKV_DQ, DKV_DK, DKV_DSINK};
    for (int e = 0; e < eq.n && !rc; e++) {
        dkv_runModelBackward(m, &edit[e], -1, -1, &m->out);
        for (int k = 0; k < 3 && !rc; k++) {
            const int id = ids[k];
            const double *x = dkv_outputAt(&m->out, (dkv_tensor_id)id),
                         *right = dkv_outputAt(&m->right, (dkv_tensor_id)id);
            t[e][id].x = q->n[id] ? malloc((size_t)q->n[id] * sizeof(double)) : NULL;
            if (q->n[id] && !t[e][id].x) rc = dkv_fail(err, DKV_EHARNESS, "out of memory");
            for (int64_t i = 0; t[e][id].x && i < q->n[id]; i++)
                t[e][id].x[i] = isfinite(x[i] - right[i]) ? x[i] - right[i] : 0;
        }
    }
    int32_t mask = 0;
    for (int k = 0; k < 3 && !rc; k++) {
        const int id = ids[k];
        const term both[2] = {{t[0][id].x, ""}, {t[1][id].x, ""}};
        if (!q->n[id] || !q->wrong[id]) continue;
        mask |= 1 << id;
        addElements(q, id, both, 0, q->n[id], &eq);
    }
    if (!rc && mask && finishFit(&eq)) {
        const term words[2] = {{NULL, "delta"}, {NULL, "the gradient through LSE"}};
        startClean(q);
        for (int k = 0; k < 3; k++) {
            const term both[2] = {{t[0][ids[k]].x, ""}, {t[1][ids[k]].x, ""}};
            if (mask >> ids[k] & 1) apply(q, ids[k], both, &eq, 0, q->n[ids[k]]);
        }
        sayTerms(words, &eq, "", doc, sizeof doc, &at, &parameters);
        if (parameters) rc = add(q, "gradient", "terms of dS", doc, mask, parameters, 1 + eq.b[0], err);
    }
    for (int e = 0; e < 2; e++)
        for (int id = 0; id < DKV_N_OUTPUTS; id++) free(t[e][id].x);
    return rc;
}

/* Parts of dK and dV: of each segment's rows (head < 0), or of each query head. */
static int makeParts(dkv_inquiry *q, int id, bool by_head, term *t, int *n, dkv_err *err) {
    dkv_model *m = q->model;
    const dualkv_problem *v = &m->l->view;
    const int all = by_head ? v->hq : v->n_segments;
    *n = 0;
    for (int i = 0; i < all; i++) {
        if (!by_head && v->segments[i].q_len == 0) continue;
        if (*n == TERMS_MAX) {
            *n = 0; /* too many */
            return 0;
        }
        t[*n].x = malloc((size_t)q->n[id] * sizeof(double));
        if (!t[*n].x) return dkv_fail(err, DKV_EHARNESS, "out of memory");
        dkv_runModelBackward(m, &(dkv_edit){0}, by_head ? -1 : i, by_head ? i : -1, &m->out);
        memcpy(t[*n].x, dkv_outputAt(&m->out, (dkv_tensor_id)id), (size_t)q->n[id] * sizeof(double));
        for (int64_t e = 0; e < q->n[id]; e++)
            if (!isfinite(t[*n].x[e])) t[*n].x[e] = 0;
        if (by_head) snprintf(t[*n].word, sizeof t[*n].word, "query head %d", i);
        else
            snprintf(t[*n].word, sizeof t[*n].word, "%s %d",
                     v->segments[i].depth ? "response" : "the prompt, segment", i);
        ++*n;
    }
    return 0;
}

static void freeParts(term *t) {
    for (int i = 0; i < TERMS_MAX; i++) {
        free(t[i].x);
        t[i].x = NULL;
    }
}

/* Terms that reach the elements [from, to) of the tensor. */
static int chooseTerms(const term *all, int n, int64_t from, int64_t to, term *out) {
    int k = 0;
    for (int i = 0; i < n; i++) {
        bool any = false;
        for (int64_t e = from; e < to && !any; e++) any = all[i].x[e] != 0;
        if (any) out[k++] = all[i];
    }
    return k;
}

typedef enum parts_by {
    PARTS_RESPONSE,
    PARTS_HEAD,
    PARTS_BOTH, /* response and KV head */
    N_PARTS_BY
} parts_by;
static const char *const parts_word[] = {"response", "query head", "response and KV head"};

/* One segment's keys, of KV head `head` alone unless -1. False: nothing fits. */
static bool fitSegment(dkv_inquiry *q, int id, const term *all, int n, int32_t segment, int64_t head,
                       term *t, normal *eq) {
    const dualkv_segment *at = &q->in->l->view.segments[segment];
    const shape s = shapeOf(q, id);
    const int64_t width = s.heads * s.d, skip = head < 0 ? 0 : head * s.d, wide = head < 0 ? width : s.d;
    const int64_t from = at->k_start * width, to = from + at->k_len * width;
    memset(eq, 0, sizeof *eq);
    eq->n = chooseTerms(all, n, from, to, t);
    if (!eq->n || from == to) return false;
    for (int64_t row = from; row < to; row += width) addElements(q, id, t, row + skip, row + skip + wide, eq);
    if (!finishFit(eq)) return false;
    for (int64_t row = from; row < to; row += width) apply(q, id, t, eq, row + skip, row + skip + wide);
    return true;
}

/* dK or dV of each key segment: how often does each segment's, or each query head's, part count? */
static int guessParts(dkv_inquiry *q, int id, parts_by by, dkv_err *err) {
    const dualkv_problem *v = &q->in->l->view;
    term all[TERMS_MAX] = {{0}};
    char doc[300] = "", name[96];
    int n, parameters = 0, rc = makeParts(q, id, by == PARTS_HEAD, all, &n, err);
    size_t at = 0;
    startClean(q);
    for (int32_t i = 0; i < v->n_segments && n && !rc; i++)
        for (int h = by == PARTS_BOTH ? 0 : -1; h < (by == PARTS_BOTH ? v->hkv : 0); h++) {
            term t[TERMS_MAX];
            normal eq;
            char of[90];
            if (!fitSegment(q, id, all, n, i, h, t, &eq)) continue;
            const int said =
                snprintf(of, sizeof of, "in %s of segment %d, ", dkv_tensorName((dkv_tensor_id)id), i);
            if (h >= 0) snprintf(of + said, sizeof of - (size_t)said, "KV head %d, ", h);
            sayTerms(t, &eq, of, doc, sizeof doc, &at, &parameters);
        }
    snprintf(name, sizeof name, "parts of %s by %s", dkv_tensorName((dkv_tensor_id)id), parts_word[by]);
    if (!rc && parameters) rc = add(q, "sum", name, doc, 1 << id, parameters, 0, err);
    freeParts(all);
    return rc;
}

/* Both tensors at once, from the guesses of each. */
static int joinSums(dkv_inquiry *q, parts_by by, dkv_err *err) {
    const dkv_guess *k = NULL, *v = NULL;
    char name[2][96], doc[300], joint[96];
    for (int i = 0; i < 2; i++)
        snprintf(name[i], sizeof name[i], "parts of %s by %s", i ? "dV" : "dK", parts_word[by]);
    for (int g = 0; g < q->n_guesses; g++) {
        if (!strcmp(q->guess[g].name, name[0])) k = &q->guess[g];
        if (!strcmp(q->guess[g].name, name[1])) v = &q->guess[g];
    }
    if (!k || !v || !k->kept[DKV_DK] || !v->kept[DKV_DV]) return 0;
    startClean(q);
    memcpy(q->work.out.dk, k->kept[DKV_DK], (size_t)q->n[DKV_DK] * sizeof(double));
    memcpy(q->work.out.dv, v->kept[DKV_DV], (size_t)q->n[DKV_DV] * sizeof(double));
    snprintf(doc, sizeof doc, "%.140s; %.140s", k->doc, v->doc);
    snprintf(joint, sizeof joint, "parts of dK and dV by %s", parts_word[by]);
    return add(q, "sum", joint, doc, 1 << DKV_DK | 1 << DKV_DV,
               k->parameters > v->parameters ? k->parameters : v->parameters, 0, err);
}

int dkv_guessSums(dkv_inquiry *q, dkv_err *err) {
    int rc = 0;
    if (!q->model || !q->in->p->grad) return 0;
    if (q->wrong[DKV_DQ] || q->wrong[DKV_DK] || q->wrong[DKV_DSINK]) rc = guessGradientTerms(q, err);
    for (int i = 0; i < N_PARTS_BY && !rc; i++) {
        const parts_by by = (parts_by)i;
        if (by == PARTS_BOTH && q->in->l->view.hkv == 1) continue;
        if (q->wrong[DKV_DK] && !dkv_outOfTime(q)) rc = guessParts(q, DKV_DK, by, err);
        if (!rc && q->wrong[DKV_DV] && !dkv_outOfTime(q)) rc = guessParts(q, DKV_DV, by, err);
        if (!rc && q->wrong[DKV_DK] && q->wrong[DKV_DV]) rc = joinSums(q, by, err);
    }
    return rc;
}

/* ---- places ---- */

static int guessShift(dkv_inquiry *q, int id, int64_t by, dkv_err *err) {
    const shape s = shapeOf(q, id);
    const int64_t w = s.by_head ? 1 : s.heads * s.d;
    double *out = dkv_outputAt(&q->work.out, (dkv_tensor_id)id);
    char doc[200], name[96];
    for (int64_t i = 0; i < q->n[id]; i++) {
        const int64_t row = s.by_head ? i % s.rows : i / w, from = row + by;
        out[i] = from >= 0 && from < s.rows ? q->clean[id][i + by * w] : q->clean[id][i];
    }
    snprintf(name, sizeof name, "%s %+d rows", dkv_tensorName((dkv_tensor_id)id), (int)by);
    snprintf(doc, sizeof doc, "a row of %s holds that of %d rows %s", dkv_tensorName((dkv_tensor_id)id),
             (int)(by < 0 ? -by : by), by > 0 ? "on" : "back");
    return add(q, "place", name, doc, 1 << id, 1, (double)by, err);
}

#define NEAR_ROWS 128 /* how far a row is looked for */
#define PLACES_MAX 8  /* distances that rows have moved by */

/* Does row i of what came hold the clean row `from`, which is another? */
static bool holdsRow(const dkv_inquiry *q, int id, int64_t i, int64_t from, int64_t d) {
    const double *got = dkv_outputAt(q->in->got, (dkv_tensor_id)id) + i, *clean = q->clean[id] + from,
                 *right = q->clean[id] + i, *noise = q->noise[id] + from;
    int64_t differ = 0;
    for (int64_t c = 0; c < d; c++) {
        if (!(fabs(got[c] - clean[c]) <= noise[c])) return false;
        differ += fabs(right[c] - clean[c]) > 2 * noise[c];
    }
    return differ * 2 > d;
}

/* Rows that hold rows near them, by whatever distance: each is looked for. */
static int guessMoved(dkv_inquiry *q, int id, dkv_err *err) {
    const shape s = shapeOf(q, id);
    double *out = dkv_outputAt(&q->work.out, (dkv_tensor_id)id);
    int64_t by[PLACES_MAX], count[PLACES_MAX] = {0};
    int n = 0;
    char doc[300], name[96];
    startClean(q);
    for (int64_t row = 0; row < s.rows && n < PLACES_MAX; row++)
        for (int64_t h = 0; h < s.heads; h++)
            for (int64_t k = 1; k <= 2 * NEAR_ROWS; k++) {
                const int64_t move = k % 2 ? -(k + 1) / 2 : k / 2, other = row + move;
                const int64_t at = dkv_vectorAt(&s, row, h), from = dkv_vectorAt(&s, other, h);
                int i = 0;
                if (other < 0 || other >= s.rows || !holdsRow(q, id, at, from, s.d)) continue;
                memcpy(out + at, q->clean[id] + from, (size_t)s.d * sizeof *out);
                while (i < n && by[i] != move) i++;
                if (i == PLACES_MAX) return 0;
                if (i == n) by[n++] = move;
                count[i]++;
                break;
            }
    if (!n) return 0;
    const char *tensor = dkv_tensorName((dkv_tensor_id)id);
    size_t at = (size_t)snprintf(doc, sizeof doc, "rows of %s hold others':", tensor);
    for (int i = 0; i < n && at < sizeof doc; i++)
        at += (size_t)snprintf(doc + at, sizeof doc - at, "%s %lld that of %lld %s", i ? "," : "",
                               (long long)count[i], (long long)llabs(by[i]), by[i] > 0 ? "on" : "back");
    snprintf(name, sizeof name, "rows of %s moved", tensor);
    return add(q, "place", name, doc, 1 << id, n, (double)by[0], err);
}

/* How far one head of what came is from another of the clean result: a count of elements beyond the noise. */
static int64_t headsApart(const dkv_inquiry *q, int id, const shape *s, int64_t h, int64_t other) {
    const double *got = dkv_outputAt(q->in->got, (dkv_tensor_id)id);
    int64_t n = 0;
    for (int64_t row = 0; row < s->rows; row++)
        for (int64_t a = dkv_vectorAt(s, row, h), b = dkv_vectorAt(s, row, other), c = 0; c < s->d; c++, a++, b++)
            n += !(fabs(got[a] - q->clean[id][b]) <= q->noise[id][b]);
    return n;
}

static int guessHeads(dkv_inquiry *q, int id, dkv_err *err) {
    const shape s = shapeOf(q, id);
    double *out = dkv_outputAt(&q->work.out, (dkv_tensor_id)id);
    char doc[300] = "", name[96];
    size_t at = 0;
    int moved = 0;
    for (int64_t h = 0; h < s.heads; h++) {
        int64_t best = h, least = headsApart(q, id, &s, h, h);
        for (int64_t other = 0; other < s.heads && least > 0; other++) {
            const int64_t n = headsApart(q, id, &s, h, other);
            if (n < least / 2) best = other, least = n;
        }
        for (int64_t row = 0; row < s.rows; row++)
            memcpy(out + dkv_vectorAt(&s, row, h), q->clean[id] + dkv_vectorAt(&s, row, best),
                   (size_t)s.d * sizeof *out);
        if (best == h) continue;
        if (++moved <= 4 && at < sizeof doc)
            at += (size_t)snprintf(doc + at, sizeof doc - at, "%shead %d of %s holds head %d's",
                                   at ? "; " : "", (int)h, dkv_tensorName((dkv_tensor_id)id), (int)best);
    }
    snprintf(name, sizeof name, "heads of %s", dkv_tensorName((dkv_tensor_id)id));
    return moved ? add(q, "place", name, doc, 1 << id, moved, 0, err) : 0;
}

/* [rows, heads] taken for [heads, rows]. */
static int guessTransposed(dkv_inquiry *q, int id, dkv_err *err) {
    const shape s = shapeOf(q, id);
    double *out = dkv_outputAt(&q->work.out, (dkv_tensor_id)id);
    char doc[160], name[96];
    for (int64_t row = 0; row < s.rows; row++)
        for (int64_t h = 0; h < s.heads; h++)
            for (int64_t c = 0; c < s.d; c++) {
                const int64_t to = (s.by_head ? row * s.heads + h : h * s.rows + row) * s.d + c;
                out[to] = q->clean[id][dkv_vectorAt(&s, row, h) + c];
            }
    snprintf(name, sizeof name, "%s transposed", dkv_tensorName((dkv_tensor_id)id));
    snprintf(doc, sizeof doc, "%s is stored with rows and heads exchanged",
             dkv_tensorName((dkv_tensor_id)id));
    return s.heads > 1 && s.rows > 1 ? add(q, "place", name, doc, 1 << id, 0, 0, err) : 0;
}

/* Elements that hold something that was there before: zeros, or the results of another case. */
static int guessHolds(dkv_inquiry *q, const char *what, const dkv_outputs *other, dkv_err *err) {
    int32_t mask = 0;
    int64_t found = 0;
    char doc[200];
    startClean(q);
    for (int id = 0; id < DKV_N_OUTPUTS; id++) {
        const double *got = q->n[id] ? dkv_outputAt(q->in->got, (dkv_tensor_id)id) : NULL;
        const double *from = other && q->n[id] ? dkv_outputAt(other, (dkv_tensor_id)id) : NULL;
        double *out = dkv_outputAt(&q->work.out, (dkv_tensor_id)id);
        if (!q->wrong[id] || (other && !from)) continue;
        for (int64_t i = 0; i < q->n[id]; i++) {
            const double x = from ? from[i] : 0;
            if (got[i] != x || !(fabs(q->clean[id][i] - x) > q->noise[id][i])) continue;
            out[i] = x;
            found++;
            mask |= 1 << id;
        }
    }
    snprintf(doc, sizeof doc, "%lld elements hold %s", (long long)found, what);
    return mask ? add(q, "place", other ? "stale" : "zero", doc, mask, 1, (double)found, err) : 0;
}

/* Never written: NaN, as many as still hold the poison. */
static int guessUnwritten(dkv_inquiry *q, dkv_err *err) {
    int32_t mask = 0;
    char doc[200];
    int64_t found = 0;
    startClean(q);
    for (int id = 0; id < DKV_N_OUTPUTS; id++) {
        const double *got = q->n[id] ? dkv_outputAt(q->in->got, (dkv_tensor_id)id) : NULL;
        double *out = dkv_outputAt(&q->work.out, (dkv_tensor_id)id);
        int64_t nan = 0;
        if (!q->in->unwritten || !q->in->unwritten[id] || !q->wrong[id]) continue;
        for (int64_t i = 0; i < q->n[id]; i++) nan += isnan(got[i]) && !isnan(q->clean[id][i]);
        if (nan != q->in->unwritten[id]) continue;
        for (int64_t i = 0; i < q->n[id]; i++)
            if (isnan(got[i])) out[i] = NAN;
        found += nan;
        mask |= 1 << id;
    }
    snprintf(doc, sizeof doc, "%lld elements are never written", (long long)found);
    return mask ? add(q, "place", "unwritten", doc, mask, 1, (double)found, err) : 0;
}

static int guessSwapped(dkv_inquiry *q, dkv_err *err) {
    if (!q->n[DKV_DK] || q->n[DKV_DK] != q->n[DKV_DV] || !q->wrong[DKV_DK] || !q->wrong[DKV_DV]) return 0;
    memcpy(q->work.out.dk, q->clean[DKV_DV], (size_t)q->n[DKV_DV] * sizeof(double));
    memcpy(q->work.out.dv, q->clean[DKV_DK], (size_t)q->n[DKV_DK] * sizeof(double));
    return add(q, "place", "dK and dV exchanged", "dK and dV are exchanged", 1 << DKV_DK | 1 << DKV_DV, 0, 0,
               err);
}

int dkv_guessPlaces(dkv_inquiry *q, dkv_err *err) {
    static const int64_t shifts[] = {1, -1, 2, -2, 16, -16, 32, -32, 64, -64, 128, -128};
    int rc = guessHolds(q, "zero", NULL, err);
    if (!rc && q->in->before) rc = guessHolds(q, "what an earlier case left there", q->in->before, err);
    if (!rc) rc = guessUnwritten(q, err);
    if (!rc) rc = guessSwapped(q, err);
    for (int id = 0; id < DKV_N_OUTPUTS && !rc && !dkv_outOfTime(q); id++) {
        if (!q->wrong[id] || id == DKV_DSINK) continue;
        startClean(q);
        for (size_t i = 0; i < sizeof shifts / sizeof *shifts && !rc; i++)
            rc = guessShift(q, id, shifts[i], err);
        if (!rc && id != DKV_LSE) rc = guessMoved(q, id, err);
        if (!rc) rc = guessHeads(q, id, err);
        if (!rc) rc = guessTransposed(q, id, err);
    }
    return rc;
}
