/* The longest lengths in a problem are promises, not facts: overstated, they change nothing. (Understated ones are outside
 * the contract.) */
#include <string.h>

#include "derive.h"

#define MORE 1000 /* tokens: more than a tile */

void dkv_checkMaxima(dkv_case *c, dkv_finding *f) {
    const dualkv_problem *v = &c->packed.view;
    const char *what = "the longest lengths overstated";
    dkv_side side = {0};
    dkv_run run = {0};
    dkv_outputs packed = {0};
    dkv_tally t = {0};
    dkv_err err = {0};
    if (!dkv_worthDeriving(c, "maxima")) return;
    c->kernel.w->overstate = MORE;
    dkv_outcome o = dkv_openSide(&side, c->kernel.w, c->p, c->line, &c->packed, &c->in);
    c->kernel.w->overstate = 0;
    if (o == DKV_W_OK && side.d.refused) goto done;
    /* Another arithmetic would have another bound. */
    if (o == DKV_W_OK && memcmp(&side.d.arithmetic, &c->kernel.d.arithmetic, sizeof side.d.arithmetic) != 0) goto done;
    if (o == DKV_W_OK) o = dkv_runSide(&side, DKV_RUNS_MAX, &run);
    if (!dkv_cameThrough(c, o, what, f)) goto done;
    if (dkv_packRun(&side, &c->packed, &run.out, &packed, &err)) {
        dkv_find(f, DKV_CHECK_DEFECT, DKV_ST_HARNESS_ERROR, "%.300s", err.text);
        goto done;
    }
    dkv_compareQueries(c, NULL, &packed, 0, 0, v->tq, c->p->grad, &t);
    dkv_compareKeys(c, NULL, &packed, 0, 0, v->tk, &t);
    dkv_judgeTally(c, &t, DKV_ST_FAILED, what, "the longest lengths", f);
    if (run.damage.outside && f->state != DKV_CHECK_DEFECT)
        dkv_find(f, DKV_CHECK_DEFECT, DKV_ST_OUT_OF_BOUNDS, "with %s: %.120s", what, run.damage.outside_where);
done:
    dkv_freePacked(&side, &packed);
    dkv_freeRun(&run);
    dkv_closeSide(&side);
}
