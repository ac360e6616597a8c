/* Splitting the context and merging by LSE gives the whole. One response's rows see, in three groups of one problem,
 *
 *     A: the first half of the context and their own tokens    B: the other half and their own    C: their own alone
 *
 * so that, with a = exp(L_A) etc., exp(L) = a + b - c and exp(L) O = a O_A + b O_B - c O_C (a sink is in all three: it
 * counts once). The context is a key-only prompt. Each of the three may be off by its own bound; what that makes of the
 * merged value is carried through, first in full: |d exp(L_x)| <= exp(L_x) expm1(bound). */
#include <math.h>
#include <stdlib.h>

#include "../ref/dtype.h"
#include "../ref/mask.h"
#include "derive.h"

static int32_t findResponse(const dkv_problem *p) {
    int32_t found = -1;
    for (int32_t i = 0; i < p->n_nodes; i++) {
        const dkv_node *n = &p->nodes[i];
        if (n->depth && n->len && n->context > 1 && (found < 0 || n->context >= p->nodes[found].context)) found = i;
    }
    return found;
}

static int makeParts(const dkv_case *c, int32_t at, dkv_problem *p, dkv_err *err) {
    const dkv_node *n = &c->p->nodes[at];
    int64_t context[3] = {n->context / 2, n->context - n->context / 2, 0};
    int rc = dkv_deriveProblem(c, p, err);
    if (rc) return rc;
    dkv_node *nodes = calloc(6, sizeof *nodes);
    if (!nodes) return dkv_fail(err, DKV_EHARNESS, "out of memory for segments");
    for (int32_t i = 0; i < 3; i++) {
        nodes[2 * i] = (dkv_node){.parent = -1, .group = i, .key_only = context[i] > 0, .len = context[i]};
        nodes[2 * i + 1] = (dkv_node){.parent = 2 * i, .group = i, .depth = 1, .len = n->len, .context = context[i]};
    }
    free(p->nodes);
    p->nodes = nodes;
    p->n_nodes = 6;
    p->n_groups = 3;
    p->grad = p->dlse = false;
    if (p->layout == DKV_FUSED) p->layout = DKV_CONTIGUOUS; /* keys without queries have no such buffer */
    if (p->mask == DUALKV_PREFIX) p->mask = DUALKV_CAUSAL; /* a key-only prompt has no rows */
    return 0;
}

static void copyParts(const dkv_case *c, int32_t at, dkv_derived *d) {
    const dualkv_problem *v = &c->packed.view;
    const dualkv_segment *s = &v->segments[at], *to = d->c.packed.view.segments;
    int64_t position = 0, half = to[0].k_len;
    for (int32_t r = 0; r < s->range_count; r++) {
        dualkv_range g = v->ranges[s->range_begin + r];
        for (int64_t j = 0; j < g.len && position < s->context; j++, position++) {
            int64_t row = position < half ? to[0].k_start + position : to[2].k_start + position - half;
            dkv_copyTokens(c, d, -1, 0, g.k_start + j, row, 1);
        }
    }
    for (int i = 1; i < 6; i += 2) dkv_copyTokens(c, d, s->q_start, to[i].q_start, s->k_start, to[i].k_start, s->k_len);
}

/* One row and head of the parts, merged; values of `from` (outputs or truths), errors from the bounds. */
typedef struct merged {
    double shift, weight[3], off[3]; /* exp(L_x - shift), sign included; how far off it may be */
    double sum, sum_off;
    bool usable;
} merged;

static merged mergeRow(const dkv_derived *d, const dkv_outputs *from, int64_t r, int32_t h) {
    const dualkv_problem *v = &d->c.packed.view;
    merged m = {.shift = -INFINITY, .usable = true};
    double magnitude = 0;
    int64_t at[3];
    for (int x = 0; x < 3; x++) {
        at[x] = h * v->tq + v->segments[2 * x + 1].q_start + r;
        m.usable &= isfinite(from->lse[at[x]]) && d->c.oracle.bound.lse[at[x]] >= 0 && isfinite(d->c.oracle.bound.lse[at[x]]);
        if (from->lse[at[x]] > m.shift) m.shift = from->lse[at[x]];
    }
    for (int x = 0; x < 3 && m.usable; x++) {
        double e = exp(from->lse[at[x]] - m.shift);
        m.weight[x] = x == 2 ? -e : e;
        m.off[x] = e * (expm1(d->c.oracle.bound.lse[at[x]]) + 8 * 0x1p-53 * (2 + fabs(from->lse[at[x]])));
        m.sum += m.weight[x];
        m.sum_off += m.off[x];
        magnitude += e;
    }
    m.sum_off += 4 * 0x1p-53 * magnitude;
    m.usable = m.usable && m.sum > 2 * m.sum_off; /* else their own tokens take all, and the difference says nothing */
    return m;
}

static double mergeValue(const dkv_derived *d, const dkv_outputs *from, const merged *m, int64_t r, int32_t h, int32_t e,
                         double *off) {
    const dualkv_problem *v = &d->c.packed.view;
    double value = 0, allowed = 0, magnitude = 0;
    for (int x = 0; x < 3; x++) {
        int64_t i = ((v->segments[2 * x + 1].q_start + r) * v->hq + h) * v->dv + e;
        double o = from->o[i], bound = d->c.oracle.bound.o[i];
        if (!isfinite(o) || !isfinite(bound) || bound < 0) bound = INFINITY;
        value += m->weight[x] * o;
        allowed += (fabs(m->weight[x]) + m->off[x]) * bound + m->off[x] * fabs(o);
        magnitude += fabs(m->weight[x] * o);
    }
    *off = (allowed + 4 * 0x1p-53 * magnitude + fabs(value / m->sum) * m->sum_off) / (m->sum - m->sum_off);
    return value / m->sum;
}

static void compareRow(const dkv_case *c, const dkv_derived *d, int64_t row, int64_t r, int32_t h, dkv_tally *t) {
    const dualkv_problem *v = &c->packed.view;
    int64_t l = h * v->tq + row;
    double bound = c->oracle.bound.lse[l], most = dkv_maxFinite(c->p->dtype);
    merged got = mergeRow(d, &d->c.got, r, h), truth = mergeRow(d, &d->c.oracle.truth, r, h);
    if (!got.usable || !truth.usable || !isfinite(bound) || bound < 0 || !isfinite(c->got.lse[l])) return;
    double off = fmax(-log1p(-got.sum_off / got.sum), -log1p(-truth.sum_off / truth.sum));
    dkv_compareValues(c->got.lse[l], got.shift + log(got.sum), c->oracle.truth.lse[l], truth.shift + log(truth.sum),
                      bound + off + 8 * 0x1p-53 * fabs(got.shift), DKV_LSE, l, t);
    for (int32_t e = 0; e < v->dv; e++) {
        int64_t i = (row * v->hq + h) * v->dv + e;
        double off_got, off_truth, now = mergeValue(d, &d->c.got, &got, r, h, e, &off_got);
        double exact = mergeValue(d, &d->c.oracle.truth, &truth, r, h, e, &off_truth);
        bound = c->oracle.bound.o[i];
        double allowed = bound + fmax(off_got, off_truth);
        if (bound < 0 || !isfinite(allowed) || !isfinite(c->got.o[i]) || fabs(c->oracle.truth.o[i]) + bound >= most) continue;
        dkv_compareValues(c->got.o[i], now, c->oracle.truth.o[i], exact, allowed, DKV_O, i, t);
    }
}

void dkv_checkMerge(dkv_case *c, dkv_finding *f) {
    const char *what = "the context cut in two and merged by LSE";
    dkv_err err = {0};
    dkv_problem p = {0};
    dkv_derived d = {0};
    dkv_tally t = {0};
    bool shifts = c->p->alibi || dkv_maskKeys(c->p) != DKV_KEYS_ALL;
    int32_t at = shifts ? -1 : findResponse(c->p); /* masks over positions would see other keys */
    if (at < 0 || c->kernel.d.absent & 1 << DKV_LSE || !dkv_worthDeriving(c, "merge")) return;
    int rc = makeParts(c, at, &p, &err);
    if (!rc) rc = dkv_beginDerived(c, &p, &d, &err);
    if (rc < 0 || rc > 1) dkv_find(f, DKV_CHECK_DEFECT, DKV_ST_HARNESS_ERROR, "%.300s", err.text);
    if (!rc) copyParts(c, at, &d);
    if (!rc && dkv_runDerived(c, &d, what, f)) {
        const dualkv_segment *s = &c->packed.view.segments[at];
        for (int64_t r = 0; r < s->q_len; r++)
            for (int32_t h = 0; h < c->p->hq; h++) compareRow(c, &d, s->q_start + r, r, h, &t);
        dkv_judgeTally(c, &t, DKV_ST_FAILED, what, NULL, f);
    }
    dkv_endDerived(&d);
    dkv_freeProblem(&p);
}
