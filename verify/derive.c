#include "derive.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../ref/dtype.h"
#include "spans.h"

#define ALWAYS 1e6 /* FLOPs of forward and backward below which a case is derived from always */
#define NEVER 4e9  /* and above which never */
#define ONE_IN 6   /* of those between */
#define PARALLEL ((int64_t)1 << 24) /* bytes from which on several threads copy */

bool dkv_worthDeriving(const dkv_case *c, const char *check) {
    double flops = dkv_forwardFlops(c->p) + (c->p->grad ? dkv_backwardFlops(c->p) : 0);
    uint64_t h = 0xcbf29ce484222325ull;
    if (c->options->nested || flops > NEVER || dkv_isFiles(c->kernel.w)) return false;
    if (flops < ALWAYS) return true;
    for (const char *s = check; *s; s++) h = (h ^ (uint8_t)*s) * 0x100000001b3ull;
    for (const char *s = c->line; *s; s++) h = (h ^ (uint8_t)*s) * 0x100000001b3ull;
    return (h ^ h >> 29) % ONE_IN == 0;
}

int dkv_deriveProblem(const dkv_case *c, dkv_problem *out, dkv_err *err) {
    int rc = dkv_copyProblem(c->p, out, err);
    if (rc) return rc;
    out->run = DKV_SINGLE;
    strcpy(out->fill, "normal");
    return 0;
}

int dkv_beginDerived(const dkv_case *c, dkv_problem *p, dkv_derived *d, dkv_err *err) {
    dkv_err none = {0};
    memset(d, 0, sizeof *d);
    d->p = *p;
    memset(p, 0, sizeof *p);
    if (dkv_printProblem(&d->p, d->line, sizeof d->line, &none)) return 1;
    d->result = calloc(1, sizeof *d->result);
    if (!d->result) return dkv_fail(err, DKV_EHARNESS, "out of memory for a result");
    d->c = (dkv_case){.p = &d->p, .line = d->line, .options = c->options, .result = d->result};
    int rc = dkv_makeLayout(&d->p, &d->c.packed, err);
    if (!rc) rc = dkv_allocInputs(&d->c.packed, &d->c.in, err);
    if (!rc && d->c.in.sink) memcpy(d->c.in.sink, c->in.sink, (size_t)c->p->hq * sizeof *c->in.sink);
    return rc;
}

void dkv_endDerived(dkv_derived *d) {
    dkv_freeCase(&d->c);
    dkv_freeProblem(&d->p);
    free(d->result);
    memset(d, 0, sizeof *d);
}

/* A run that does not come through is a defect like any other. */
bool dkv_cameThrough(dkv_case *c, dkv_outcome o, const char *what, dkv_finding *f) {
    static const dkv_status status[] = {[DKV_W_ERROR] = DKV_ST_NOT_RUN,
                                        [DKV_W_CRASHED] = DKV_ST_CRASHED,
                                        [DKV_W_TIMEOUT] = DKV_ST_TIMEOUT,
                                        [DKV_W_STOPPED] = DKV_ST_HARNESS_ERROR,
                                        [DKV_W_HARNESS] = DKV_ST_HARNESS_ERROR};
    if (o == DKV_W_OK) return true;
    c->result->stopped |= o == DKV_W_STOPPED;
    dkv_find(f, DKV_CHECK_DEFECT, status[o], "with %s: %.300s", what, c->kernel.w->why);
    return false;
}

/* What explained the case's own errors is a guess from those errors: it promises nothing of another problem. */
static void takeLoosest(const dkv_problem *p, dualkv_arithmetic *a) {
    const char *words;
    for (int i = 0; dkv_arithmeticProfile(i, p, a, &words); i++) continue;
}

bool dkv_runDerived(dkv_case *c, dkv_derived *d, const char *what, dkv_finding *f) {
    dkv_case *e = &d->c;
    dkv_err err = {0};
    dkv_outcome o = dkv_openSide(&e->kernel, c->kernel.w, e->p, e->line, &e->packed, &e->in);
    if (!dkv_cameThrough(c, o, what, f) || e->kernel.d.refused) return false;
    o = dkv_runSide(&e->kernel, DKV_RUNS_MAX, &e->run[0]);
    e->n_runs = 1;
    if (!dkv_cameThrough(c, o, what, f)) return false;
    int rc = dkv_packRun(&e->kernel, &e->packed, &e->run[0].out, &e->got, &err);
    e->has_got = !rc;
    dualkv_arithmetic a = e->kernel.d.arithmetic;
    if (!a.declared) takeLoosest(e->kernel.p, &a);
    if (!rc) rc = dkv_consultOracle(e, &a, false, &err);
    if (rc) dkv_find(f, DKV_CHECK_DEFECT, DKV_ST_HARNESS_ERROR, "with %s: %.300s", what, err.text);
    else if (e->run[0].damage.outside)
        dkv_find(f, DKV_CHECK_DEFECT, DKV_ST_OUT_OF_BOUNDS, "with %s: %.120s", what, e->run[0].damage.outside_where);
    return f->state != DKV_CHECK_DEFECT;
}

/* ---- inputs ---- */

typedef struct copying {
    const char *from;
    char *to;
} copying;

static void copySpan(int64_t first, int64_t end, int span, void *arg) {
    const copying *w = arg;
    (void)span;
    memcpy(w->to + first, w->from + first, (size_t)(end - first));
}

static void copyRows(const void *from, void *to, int64_t at, int64_t row, int64_t n, int64_t width, size_t elt) {
    const int64_t each = width * (int64_t)elt, bytes = n * each;
    if (!from || !to || n <= 0) return;
    copying w = {(const char *)from + at * each, (char *)to + row * each};
    if (bytes < PARALLEL) copySpan(0, bytes, 0, &w);
    else dkv_eachSpan(bytes, (double)bytes / 4, copySpan, &w);
}

void dkv_copyTokens(const dkv_case *c, dkv_derived *d, int64_t q_from, int64_t q_to, int64_t k_from, int64_t k_to, int64_t n) {
    const dkv_problem *p = c->p;
    dkv_inputs *to = &d->c.in;
    int64_t tq = c->packed.view.tq, to_tq = d->c.packed.view.tq;
    size_t elt = dkv_dtypeSize(p->dtype);
    copyRows(c->in.k, to->k, k_from, k_to, n, (int64_t)p->hkv * p->dqk, elt);
    copyRows(c->in.v, to->v, k_from, k_to, n, (int64_t)p->hkv * p->dv, elt);
    if (q_from < 0) return;
    copyRows(c->in.q, to->q, q_from, q_to, n, (int64_t)p->hq * p->dqk, elt);
    copyRows(c->in.d_o, to->d_o, q_from, q_to, n, (int64_t)p->hq * p->dv, elt);
    for (int32_t h = 0; h < p->hq && c->in.d_lse && to->d_lse; h++)
        copyRows(c->in.d_lse, to->d_lse, h * tq + q_from, h * to_tq + q_to, n, 1, sizeof(float));
}

int dkv_copyInputs(const dkv_case *c, dkv_inputs *out, dkv_err *err) {
    const dualkv_problem *v = &c->packed.view;
    size_t elt = dkv_dtypeSize(c->p->dtype);
    int rc = dkv_allocInputs(&c->packed, out, err);
    if (rc) return rc;
    copyRows(c->in.q, out->q, 0, 0, v->tq, (int64_t)v->hq * v->dqk, elt);
    copyRows(c->in.k, out->k, 0, 0, v->tk, (int64_t)v->hkv * v->dqk, elt);
    copyRows(c->in.v, out->v, 0, 0, v->tk, (int64_t)v->hkv * v->dv, elt);
    copyRows(c->in.d_o, out->d_o, 0, 0, v->tq, (int64_t)v->hq * v->dv, elt);
    copyRows(c->in.d_lse, out->d_lse, 0, 0, v->tq, v->hq, sizeof(float));
    copyRows(c->in.sink, out->sink, 0, 0, 1, v->hq, sizeof(float));
    return 0;
}

typedef struct negation { /* the first `signs` of every `width` elements */
    uint8_t *x;
    int64_t elt, width, signs;
} negation;

static void negateSpan(int64_t first, int64_t end, int span, void *arg) {
    const negation *w = arg;
    (void)span;
    for (int64_t t = first; t < end; t++) {
        uint8_t *top = w->x + (t * w->width + 1) * w->elt - 1; /* little endian: the sign is in the last byte */
        for (int64_t i = 0; i < w->signs; i++, top += w->elt) *top ^= 0x80;
    }
}

/* Of `n` vectors from vector `at`. */
static void negate(void *x, size_t elt, int64_t at, int64_t n, int64_t width, int64_t signs) {
    negation w = {x, (int64_t)elt, width, signs};
    if (!x) return;
    w.x += at * width * w.elt;
    dkv_eachSpan(n, (double)n * (double)signs, negateSpan, &w);
}

void dkv_negateTokens(const dkv_case *c, int32_t i, int64_t first, dkv_inputs *in) {
    const dualkv_problem *v = &c->packed.view;
    const dualkv_segment *s = &v->segments[i];
    size_t elt = dkv_dtypeSize(c->p->dtype);
    int64_t q = s->q_start + first, k = s->k_start + first, nq = s->q_len - first, nk = s->k_len - first;
    negate(in->q, elt, q * v->hq, nq * v->hq, v->dqk, v->dqk);
    negate(in->v, elt, k * v->hkv, nk * v->hkv, v->dv, v->dv);
    negate(in->d_o, elt, q * v->hq, nq * v->hq, v->dv, v->dv);
    negate(in->k, elt, k * v->hkv, nk * v->hkv, v->dqk, (v->dqk + 1) / 2);
    for (int32_t h = 0; h < v->hq && in->d_lse; h++) negate(in->d_lse, sizeof(float), h * v->tq + q, nq, 1, 1);
}

/* ---- outputs ---- */

void dkv_compareValues(double was, double now, double truth_was, double truth_now, double allowed, dkv_tensor_id id,
                       int64_t at, dkv_tally *t) {
    bool oracle = !(fabs(truth_was - truth_now) <= allowed);
    t->compared++;
    t->bits += memcmp(&was, &now, sizeof was) != 0;
    if (fabs(was - now) <= allowed && !oracle) return;
    if (t->outside++ > 0 && (t->oracle || !oracle)) return;
    t->oracle = oracle;
    t->id = id;
    t->first = at;
    t->was = oracle ? truth_was : was;
    t->now = oracle ? truth_now : now;
    t->allowed = allowed;
}

void dkv_addTally(const dkv_tally *part, dkv_tally *t) {
    const dkv_tally before = *t;
    if (part->outside && (!t->outside || (part->oracle && !t->oracle))) *t = *part;
    t->compared = before.compared + part->compared;
    t->outside = before.outside + part->outside;
    t->bits = before.bits + part->bits;
}

bool dkv_isClaimed(const dkv_case *c, dkv_tensor_id id, double truth, double bound) {
    int32_t format = id == DKV_LSE || id == DKV_DSINK ? DUALKV_FP32 : (int32_t)c->p->dtype;
    return bound != DKV_UNCLAIMED && isfinite(truth) && isfinite(bound) && fabs(truth) + bound < dkv_maxFinite(format);
}

void dkv_compareElements(const dkv_case *c, const dkv_case *other, const dkv_outputs *got, dkv_tensor_id id, int64_t at,
                         int64_t to, int64_t n, dkv_tally *t) {
    const dkv_oracle *a = &c->oracle, *b = other ? &other->oracle : a;
    const double *was = dkv_outputAt(&c->got, id), *now = dkv_outputAt(got, id);
    const double *truth = dkv_outputAt(&a->truth, id), *bound = dkv_outputAt(&a->bound, id);
    const double *truth2 = dkv_outputAt(&b->truth, id), *bound2 = dkv_outputAt(&b->bound, id);
    if (c->kernel.d.absent >> id & 1) return;
    for (int64_t i = 0; was && now && i < n; i++) {
        int64_t x = at + i, y = to + i;
        if (!dkv_isClaimed(c, id, truth[x], bound[x]) || !dkv_isClaimed(c, id, truth2[y], bound2[y])) continue;
        if (!isfinite(was[x])) continue; /* said elsewhere */
        dkv_compareValues(was[x], now[y], truth[x], truth2[y], bound[x] + bound2[y], id, x, t);
    }
}

void dkv_compareQueries(const dkv_case *c, const dkv_case *other, const dkv_outputs *got, int64_t at, int64_t to, int64_t n,
                        bool dq, dkv_tally *t) {
    int64_t hq = c->p->hq, tq = c->packed.view.tq, to_tq = other ? other->packed.view.tq : tq;
    dkv_compareElements(c, other, got, DKV_O, at * hq * c->p->dv, to * hq * c->p->dv, n * hq * c->p->dv, t);
    for (int64_t h = 0; h < hq; h++) dkv_compareElements(c, other, got, DKV_LSE, h * tq + at, h * to_tq + to, n, t);
    if (dq) dkv_compareElements(c, other, got, DKV_DQ, at * hq * c->p->dqk, to * hq * c->p->dqk, n * hq * c->p->dqk, t);
}

void dkv_compareKeys(const dkv_case *c, const dkv_case *other, const dkv_outputs *got, int64_t at, int64_t to, int64_t n,
                     dkv_tally *t) {
    int64_t k = (int64_t)c->p->hkv * c->p->dqk, v = (int64_t)c->p->hkv * c->p->dv;
    dkv_compareElements(c, other, got, DKV_DK, at * k, to * k, n * k, t);
    dkv_compareElements(c, other, got, DKV_DV, at * v, to * v, n * v, t);
}

void dkv_judgeTally(const dkv_case *c, const dkv_tally *t, dkv_status status, const char *what, const char *bits,
                    dkv_finding *f) {
    char where[160];
    if (t->compared == 0) return;
    dkv_findNothing(f);
    if (t->outside) {
        dkv_nameElement(&c->packed, t->id, t->first, where, sizeof where);
        dkv_find(f, DKV_CHECK_DEFECT, t->oracle ? DKV_ST_HARNESS_ERROR : status,
                 "%s%s: %s at %s is %.9g instead of %.9g, rounding explains %.3g; %lld elements are wrong",
                 t->oracle ? "the oracle disagrees with itself, " : "", what, dkv_tensorName(t->id), where, t->now, t->was,
                 t->allowed, (long long)t->outside);
    } else if (t->bits && bits && c->kernel.d.deterministic) {
        dkv_find(f, DKV_CHECK_NOTE, DKV_ST_PASSED, "bits depend on %s: %lld elements", bits, (long long)t->bits);
    }
}
