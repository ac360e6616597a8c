#include <math.h>
#include <stdio.h>
#include <string.h>

#include "../ref/dtype.h"
#include "check.h"
#include "spans.h"

/* Judged in the order in which one depends on another: a wrong LSE explains a wrong dQ. */
static const dkv_tensor_id order[DKV_N_OUTPUTS] = {DKV_LSE, DKV_O, DKV_DV, DKV_DK, DKV_DQ, DKV_DSINK};

typedef struct finite_loop {
    const char *at;
    dualkv_dtype t;
    bool found[DKV_SPANS];
} finite_loop;

static void finiteSpan(int64_t first, int64_t end, int span, void *arg) {
    finite_loop *l = arg;
    double part[512];
    for (int64_t i = first; i < end && !l->found[span]; i += 512) {
        const size_t len = (size_t)(end - i < 512 ? end - i : 512);
        dkv_decodeArray(l->at + (size_t)i * dkv_dtypeSize(l->t), l->t, len, part);
        for (size_t k = 0; k < len; k++) l->found[span] |= !isfinite(part[k]);
    }
}

static bool hasNonFinite(const void *at, dualkv_dtype t, int64_t n) {
    finite_loop l = {.at = at, .t = t};
    bool any = false;
    if (at) dkv_eachSpan(n, (double)n, finiteSpan, &l);
    for (int i = 0; i < DKV_SPANS; i++) any |= l.found[i];
    return any;
}

static bool inputsNonFinite(const dkv_case *c) {
    const dualkv_problem *v = &c->packed.view;
    dualkv_dtype t = c->p->dtype;
    return hasNonFinite(c->in.q, t, v->tq * v->hq * v->dqk) ||
           hasNonFinite(c->in.k, t, v->tk * v->hkv * v->dqk) ||
           hasNonFinite(c->in.v, t, v->tk * v->hkv * v->dv) ||
           hasNonFinite(c->in.d_o, t, v->tq * v->hq * v->dv) ||
           hasNonFinite(c->in.d_lse, DUALKV_FP32, v->tq * v->hq);
}

static bool nonFinite(const dkv_judgement *j) { return j->present && j->all.nonfinite > 0; }
static bool outside(const dkv_judgement *j) { return j->present && (j->failed || j->all.bad > 0); }
static bool beyondTwin(const dkv_judgement *j) { return j->present && (j->imprecise || j->biased); }

/* The sentence of the first tensor for which `is` holds, and the names of the others. */
static const dkv_judgement *firstOf(dkv_case *c, bool (*is)(const dkv_judgement *), char *why, size_t n) {
    const dkv_judgement *first = NULL;
    size_t at = 0;
    int others = 0;
    for (int i = 0; i < DKV_N_OUTPUTS; i++) {
        const dkv_judgement *j = &c->result->tensor[order[i]];
        if (!is(j)) continue;
        if (!first) {
            first = j;
            dkv_explainJudgement(&c->result->arithmetic, order[i], j, why, n);
            at = strlen(why);
        } else {
            const char *before = others++ ? ", " : "; also ";
            if (at < n) at += (size_t)snprintf(why + at, n - at, "%s%s", before, dkv_tensorName(order[i]));
        }
    }
    return first;
}

/* fill=nanresp: rows whose truth is NaN must not look like numbers. (Inf is another matter: Inf - Inf depends
 * on the order of things.) */
static void findHidden(const dkv_case *c, dkv_finding *f) {
    int64_t n[DKV_N_OUTPUTS];
    if (strcmp(c->p->fill, "nanresp") != 0) return;
    dkv_countOutputs(&c->packed, n);
    for (int id = DKV_O; id <= DKV_LSE; id++) {
        const double *truth = dkv_outputAt(&c->oracle.truth, (dkv_tensor_id)id);
        const double *got = dkv_outputAt(&c->got, (dkv_tensor_id)id);
        for (int64_t i = 0; i < n[id]; i++) {
            char where[160];
            if (!isnan(truth[i]) || !isfinite(got[i])) continue;
            dkv_nameElement(&c->packed, (dkv_tensor_id)id, i, where, sizeof where);
            dkv_find(f, DKV_CHECK_DEFECT, DKV_ST_FAILED,
                     "NaN inputs are hidden: %s is %.6g at %s, where NaN is right",
                     dkv_tensorName((dkv_tensor_id)id), got[i], where);
            return;
        }
    }
}

void dkv_checkIsolation(dkv_case *c, dkv_finding *f) {
    char why[380];
    const dkv_judgement *j = firstOf(c, nonFinite, why, sizeof why);
    if (!inputsNonFinite(c)) return;
    dkv_findNothing(f);
    findHidden(c, f);
    if (j)
        dkv_find(f, DKV_CHECK_DEFECT, DKV_ST_LEAKED,
                 "a NaN or Inf of the inputs reached where it must not: %s", why);
}

void dkv_checkFinite(dkv_case *c, dkv_finding *f) {
    char why[400];
    dkv_findNothing(f);
    if (firstOf(c, nonFinite, why, sizeof why)) dkv_find(f, DKV_CHECK_DEFECT, DKV_ST_FAILED, "%s", why);
}

void dkv_checkBound(dkv_case *c, dkv_finding *f) {
    char why[400];
    dkv_findNothing(f);
    if (firstOf(c, outside, why, sizeof why)) dkv_find(f, DKV_CHECK_DEFECT, DKV_ST_FAILED, "%s", why);
}

void dkv_checkTwin(dkv_case *c, dkv_finding *f) {
    char why[400];
    const dkv_judgement *j;
    bool any = false;
    for (int id = 0; id < DKV_N_OUTPUTS; id++)
        any |= c->result->tensor[id].present && c->result->tensor[id].twin;
    if (!any) return;
    dkv_findNothing(f);
    j = firstOf(c, beyondTwin, why, sizeof why);
    if (j) dkv_find(f, DKV_CHECK_DEFECT, j->biased ? DKV_ST_BIASED : DKV_ST_IMPRECISE, "%s", why);
}

void dkv_checkLean(dkv_case *c, dkv_finding *f) {
    char why[380], others[60] = "";
    size_t at = 0;
    const dkv_lean *first = NULL, *open = NULL;
    for (int i = 0; i < DKV_N_OUTPUTS; i++) {
        const dkv_lean *l = &c->result->lean[order[i]];
        if (l->tested && f->state == DKV_NOT_APPLICABLE) dkv_findNothing(f);
        if (l->open && !open) dkv_sayLean(open = l, order[i], why, sizeof why);
        if (!l->found) continue;
        if (!first) dkv_sayLean(first = l, order[i], why, sizeof why);
        else at += (size_t)snprintf(others + at, sizeof others - at, "%s%s", at ? ", " : "; also ", dkv_tensorName(order[i]));
    }
    if (first) dkv_find(f, DKV_CHECK_DEFECT, DKV_ST_BIASED, "%s%s", why, others);
    else if (open) dkv_find(f, DKV_CHECK_NOTE, DKV_ST_PASSED, "%s", why);
}

typedef struct allowed {
    const double *truth, *bound;
} allowed;

static bool isWithin(double got, int64_t at, void *arg) {
    const allowed *a = arg;
    return fabs(got - a->truth[at]) <= a->bound[at] || a->bound[at] == DKV_UNCLAIMED || isnan(a->truth[at]);
}

/* The same where they are in the arena alone, which still holds the last run. */
static void checkSummed(dkv_case *c, dkv_finding *f) {
    allowed a = {c->oracle.truth.o, c->oracle.bound.o};
    double got = 0;
    dkv_findNothing(f);
    const int64_t at = dkv_findCopy(&c->kernel.arena, c->p->dtype, isWithin, &a, &got);
    if (at < 0) return;
    char where[160];
    dkv_nameElement(&c->packed, DKV_O, at, where, sizeof where);
    dkv_find(f, DKV_CHECK_DEFECT, DKV_ST_FAILED, "a copy of O at %s is %.9g instead of %.9g", where, got, a.truth[at]);
}

/* Copies of a shared row in the replicated outputs: each against the truth, at the bound. */
void dkv_checkCopies(dkv_case *c, dkv_finding *f) {
    const dkv_side *s = &c->kernel;
    if (s->summed && c->has_oracle) return checkSummed(c, f);
    if (!s->d.replicated || !c->has_rep_oracle) return;
    const dkv_outputs *got = &c->run[c->judged_run].out, *truth = &c->rep_oracle.truth,
                      *bound = &c->rep_oracle.bound;
    int64_t width = (int64_t)c->p->hq * c->p->dv;
    dkv_findNothing(f);
    for (int64_t t = 0; t < s->l->view.tq; t++) {
        for (int64_t i = s->q_own[t] ? width : 0; i < width; i++) {
            int64_t at = t * width + i;
            if (fabs(got->o[at] - truth->o[at]) <= bound->o[at] || bound->o[at] == DKV_UNCLAIMED ||
                isnan(truth->o[at]))
                continue;
            char where[160];
            dkv_nameElement(&c->packed, DKV_O, s->q_source[t] * width + i, where, sizeof where);
            dkv_find(f, DKV_CHECK_DEFECT, DKV_ST_FAILED, "a copy of O at %s is %.9g instead of %.9g", where,
                     got->o[at], truth->o[at]);
            return;
        }
    }
}
