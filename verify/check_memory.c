#include "check.h"

static const char *const direction[2] = {"forward", "backward"};

void dkv_checkLaunched(dkv_case *c, dkv_finding *f) {
    if (!c->kernel.d.counts_launches || c->kernel.l->view.tq == 0 || c->kernel.l->view.tk == 0) return;
    dkv_findNothing(f);
    for (int i = 0; i < c->n_runs; i++)
        for (int b = 0; b <= (c->p->grad ? 1 : 0); b++)
            if (c->run[i].launches[b] <= 0)
                dkv_find(f, DKV_CHECK_DEFECT, DKV_ST_NOT_RUN,
                         "%s reported success and launched nothing of its own", direction[b]);
}

void dkv_checkGuards(dkv_case *c, dkv_finding *f) {
    dkv_findNothing(f);
    for (int i = 0; i < c->n_runs; i++)
        if (c->run[i].damage.outside && f->state != DKV_CHECK_DEFECT)
            dkv_find(f, DKV_CHECK_DEFECT, DKV_ST_OUT_OF_BOUNDS, "%s", c->run[i].damage.outside_where);
}

void dkv_checkInputs(dkv_case *c, dkv_finding *f) {
    dkv_findNothing(f);
    for (int i = 0; i < c->n_runs; i++)
        if (c->run[i].damage.mutated && f->state != DKV_CHECK_DEFECT)
            dkv_find(f, DKV_CHECK_DEFECT, DKV_ST_INPUT_MUTATED, "%s", c->run[i].damage.mutated_where);
}

/* Poison under one pattern may be a computed NaN of the same bits; under two different ones it was never
 * written. */
void dkv_checkWritten(dkv_case *c, dkv_finding *f) {
    dkv_findNothing(f);
    for (int id = 0; id < DKV_N_OUTPUTS && c->n_runs > 1; id++) {
        const dkv_run *a = &c->run[0], *b = &c->run[1];
        if (!a->poison[id] || !b->poison[id]) continue;
        int64_t n = a->poison[id] < b->poison[id] ? a->poison[id] : b->poison[id], total[DKV_N_OUTPUTS];
        char where[160];
        dkv_countOutputs(c->kernel.l, total);
        dkv_nameElement(c->kernel.l, (dkv_tensor_id)id, b->first[id], where, sizeof where);
        dkv_find(f, DKV_CHECK_DEFECT, DKV_ST_UNWRITTEN,
                 "%lld of %lld elements of %s were never written, the first at %s", (long long)n,
                 (long long)total[id], dkv_tensorName((dkv_tensor_id)id), where);
        return;
    }
}
