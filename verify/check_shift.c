/* A constant added to V adds it to O (less the sink's share), and leaves LSE and dV alone; dQ and dK as well, where no sink
 * takes a share: dP and delta grow alike. The sum must be exact in the type; where the case's own V has no such constant, a
 * coarser V takes its place. */
#include <math.h>
#include <stdlib.h>

#include "../ref/dtype.h"
#include "derive.h"

#define STEP 0.125 /* a coarse V: multiples of it, up to MOST, so that V and V + CONSTANT have 7 bits */
#define MOST 7.0
#define CONSTANT 1.0

/* V of `from` plus `add`, made coarse first if asked; false where a sum is not exact or not finite. */
static bool addToV(const dkv_case *c, const void *from, void *to, double add, bool coarse) {
    const dualkv_problem *v = &c->packed.view;
    int64_t n = v->tk * v->hkv * v->dv;
    size_t elt = dkv_dtypeSize(c->p->dtype);
    for (int64_t i = 0; i < n; i++) {
        double x, back;
        dkv_decodeArray((const char *)from + (size_t)i * elt, c->p->dtype, 1, &x);
        if (!isfinite(x)) return false;
        if (coarse) x = fmax(-MOST, fmin(MOST, STEP * round(x / STEP)));
        x += add;
        dkv_encodeArray(&x, c->p->dtype, 1, (char *)to + (size_t)i * elt);
        dkv_decodeArray((char *)to + (size_t)i * elt, c->p->dtype, 1, &back);
        if (back != x || back - add + add != back) return false;
    }
    return true;
}

static bool isExact(const dkv_case *c) {
    const dualkv_problem *v = &c->packed.view;
    void *scratch = malloc((size_t)(v->tk * v->hkv * v->dv) * dkv_dtypeSize(c->p->dtype) + 1);
    bool exact = scratch && addToV(c, c->in.v, scratch, CONSTANT, false);
    free(scratch);
    return exact;
}

/* The case with another V, run. 1: nothing to compare. */
static int runWith(dkv_case *c, double add, bool coarse, const char *what, dkv_derived *d, dkv_finding *f) {
    dkv_err err = {0};
    dkv_problem p = {0};
    int rc = dkv_deriveProblem(c, &p, &err);
    if (!rc) rc = dkv_beginDerived(c, &p, d, &err);
    if (!rc) {
        dkv_freeInputs(&d->c.in);
        rc = dkv_copyInputs(c, &d->c.in, &err);
    }
    if (!rc && !addToV(c, c->in.v, d->c.in.v, add, coarse)) return 1;
    if (rc == 1) return 1;
    if (rc) {
        dkv_find(f, DKV_CHECK_DEFECT, DKV_ST_HARNESS_ERROR, "%.300s", err.text);
        return 1;
    }
    return !dkv_runDerived(c, d, what, f);
}

static void compareO(const dkv_case *a, const dkv_case *b, dkv_tally *t) {
    const dualkv_problem *v = &a->packed.view;
    double most = dkv_maxFinite(a->p->dtype);
    for (int64_t row = 0; row < v->tq; row++)
        for (int32_t h = 0; h < v->hq; h++) {
            double error, share = dkv_keyShare(a, row, h, &error);
            for (int64_t i = (row * v->hq + h) * v->dv; i < (row * v->hq + h + 1) * v->dv; i++) {
                double ba = a->oracle.bound.o[i], bb = b->oracle.bound.o[i], was = a->got.o[i], truth = a->oracle.truth.o[i];
                double add = share * CONSTANT, own = error * CONSTANT + 4 * 0x1p-53 * (fabs(truth) + CONSTANT);
                if (!isfinite(ba) || !isfinite(bb) || ba < 0 || bb < 0 || !isfinite(was) || !isfinite(share)) continue;
                if (fabs(truth) + add + ba + bb >= most) continue;
                dkv_compareValues(was + add, b->got.o[i], truth + add, b->oracle.truth.o[i], ba + bb + own, DKV_O, i, t);
            }
        }
}

void dkv_checkShift(dkv_case *c, dkv_finding *f) {
    const dualkv_problem *v = &c->packed.view;
    const char *what = "a constant added to V";
    dkv_derived base = {0}, shifted = {0};
    dkv_tally t = {0};
    if (v->tq == 0 || !dkv_worthDeriving(c, "shift")) return;
    bool exact = isExact(c);
    if (!exact && runWith(c, 0, true, "a coarser V", &base, f)) goto done;
    if (runWith(c, CONSTANT, !exact, what, &shifted, f)) goto done;
    const dkv_case *a = exact ? c : &base.c, *b = &shifted.c;
    compareO(a, b, &t);
    for (int32_t h = 0; h < v->hq; h++) dkv_compareElements(a, b, &b->got, DKV_LSE, h * v->tq, h * v->tq, v->tq, &t);
    dkv_compareElements(a, b, &b->got, DKV_DV, 0, 0, c->p->grad ? v->tk * v->hkv * v->dv : 0, &t);
    if (c->p->grad && !c->in.sink) {
        dkv_compareElements(a, b, &b->got, DKV_DQ, 0, 0, v->tq * v->hq * v->dqk, &t);
        dkv_compareElements(a, b, &b->got, DKV_DK, 0, 0, v->tk * v->hkv * v->dqk, &t);
    }
    dkv_judgeTally(c, &t, DKV_ST_FAILED, what, NULL, f);
done:
    dkv_endDerived(&shifted);
    dkv_endDerived(&base);
}
