#include <stdio.h>
#include <string.h>

#include "check.h"

int dkv_firstDifference(const dkv_case *c, const dkv_run *a, const dkv_run *b, int64_t *n, int64_t *first) {
    int64_t total[DKV_N_OUTPUTS];
    dkv_countOutputs(dkv_runLayout(&c->kernel), total);
    for (int id = 0; id < DKV_N_OUTPUTS; id++) {
        const double *x = dkv_outputAt(&a->out, (dkv_tensor_id)id),
                     *y = dkv_outputAt(&b->out, (dkv_tensor_id)id);
        if (c->kernel.d.absent >> id & 1) continue; /* the poison of each */
        if (!x || !y || memcmp(x, y, (size_t)total[id] * sizeof *x) == 0) continue;
        *n = 0;
        for (int64_t i = 0; i < total[id]; i++)
            if (memcmp(&x[i], &y[i], sizeof *x) != 0 && (*n)++ == 0) *first = i;
        return id;
    }
    return -1;
}

static void compareRuns(dkv_case *c, dkv_finding *f, const char *what) {
    int64_t n = 0, first = 0, total[DKV_N_OUTPUTS];
    char where[160];
    dkv_countOutputs(dkv_runLayout(&c->kernel), total);
    dkv_findNothing(f);
    for (int i = 1; i < c->n_runs; i++) {
        int id = dkv_firstDifference(c, &c->run[0], &c->run[i], &n, &first);
        bool promised = c->kernel.d.deterministic != 0;
        if (id < 0 && c->run[0].bits != c->run[i].bits) {
            dkv_find(f, promised ? DKV_CHECK_DEFECT : DKV_CHECK_NOTE, DKV_ST_NONDETERMINISTIC,
                     "%s: copies of shared rows differ, their sums do not", what);
            return;
        }
        if (id < 0) continue;
        dkv_nameElement(dkv_runLayout(&c->kernel), (dkv_tensor_id)id, first, where, sizeof where);
        dkv_find(f, promised ? DKV_CHECK_DEFECT : DKV_CHECK_NOTE, DKV_ST_NONDETERMINISTIC,
                 "%s: %lld of %lld elements of %s differ, the first at %s (%.9g, then %.9g)", what,
                 (long long)n, (long long)total[id], dkv_tensorName((dkv_tensor_id)id), where,
                 dkv_outputAt(&c->run[0].out, (dkv_tensor_id)id)[first],
                 dkv_outputAt(&c->run[i].out, (dkv_tensor_id)id)[first]);
        return;
    }
}

void dkv_checkRepeat(dkv_case *c, dkv_finding *f) {
    if (c->n_runs < 2 || c->p->run == DKV_ABA) return;
    char what[40];
    snprintf(what, sizeof what, c->result->runs > 2 ? "run %d times" : "run twice", c->result->runs);
    compareRuns(c, f, what);
}

/* The run after the others is also the one whose values are judged, so stale state shows even without a
 * promise. */
void dkv_checkSequence(dkv_case *c, dkv_finding *f) {
    if (c->n_runs < 2 || c->p->run != DKV_ABA) return;
    compareRuns(c, f, "with other cases run between");
    if (f->state != DKV_CHECK_DEFECT && c->between != DKV_ST_PASSED)
        dkv_find(f, DKV_CHECK_DEFECT, c->between, "in a case run between: %s", c->between_why);
}
