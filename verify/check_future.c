/* What comes later must not reach what came before: the last tokens of every leaf are changed, and the rows before them
 * (O, LSE, dQ; keys do hear from later rows) stay what they were. */
#include "../ref/mask.h"
#include "derive.h"

/* First token that changes: the last third, so that the row before it stands beside what it must not see. The token count
 * where nothing changes: rows that see their whole segment, and what others see. */
static int64_t firstChanged(const dkv_case *c, int32_t i) {
    const dkv_node *n = &c->p->nodes[i];
    bool leaf = i + 1 >= c->p->n_nodes || c->p->nodes[i + 1].parent != i;
    return leaf && !dkv_maskWhole(c->p, i) && !n->key_only && n->len > 1 ? n->len - (n->len + 2) / 3 : n->len;
}

void dkv_checkFuture(dkv_case *c, dkv_finding *f) {
    const dualkv_problem *v = &c->packed.view;
    dkv_err err = {0};
    dkv_inputs in = {0};
    dkv_side side = {0};
    dkv_run run = {0};
    dkv_outputs packed = {0};
    dkv_tally t = {0};
    bool any = false;
    for (int32_t i = 0; i < c->p->n_nodes && !any; i++) any = firstChanged(c, i) < c->p->nodes[i].len;
    if (!any || !dkv_worthDeriving(c, "future")) return;
    if (dkv_copyInputs(c, &in, &err)) {
        dkv_find(f, DKV_CHECK_DEFECT, DKV_ST_HARNESS_ERROR, "%.300s", err.text);
        goto done;
    }
    for (int32_t i = 0; i < c->p->n_nodes; i++)
        if (firstChanged(c, i) < c->p->nodes[i].len) dkv_negateTokens(c, i, firstChanged(c, i), &in);
    dkv_outcome o = dkv_openSide(&side, c->kernel.w, c->p, c->line, &c->packed, &in);
    if (o == DKV_W_OK) o = dkv_runSide(&side, DKV_RUNS_MAX, &run);
    if (!dkv_cameThrough(c, o, "later tokens changed", f)) goto done;
    if (dkv_packRun(&side, &c->packed, &run.out, &packed, &err)) {
        dkv_find(f, DKV_CHECK_DEFECT, DKV_ST_HARNESS_ERROR, "%.300s", err.text);
        goto done;
    }
    for (int32_t i = 0; i < v->n_segments; i++) {
        int64_t at = v->segments[i].q_start, n = firstChanged(c, i);
        if (v->segments[i].q_len) dkv_compareQueries(c, NULL, &packed, at, at, n, c->p->grad, &t);
    }
    dkv_judgeTally(c, &t, DKV_ST_LEAKED, "with later tokens changed", "later tokens", f);
done:
    dkv_freePacked(&side, &packed);
    dkv_freeRun(&run);
    dkv_closeSide(&side);
    dkv_freeInputs(&in);
}
