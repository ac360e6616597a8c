#include <math.h>
#include <stdio.h>
#include <string.h>

#include "check.h"

static double rmsError(const double *got, const double *truth, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++) {
        double e = got[i] - truth[i];
        if (isfinite(e)) sum += e * e;
    }
    return n ? sqrt(sum / (double)n) : 0;
}

/* The peer's error beside the kernel's. A peer that does not come through is a note, no more. */
void dkv_checkPeer(dkv_case *c, dkv_finding *f) {
    dkv_worker *w = c->options->peer;
    dkv_side side;
    dkv_run run = {0};
    dkv_outputs packed = {0};
    dkv_err err = {0};
    int64_t n[DKV_N_OUTPUTS];
    size_t at = 0;
    if (!w) return;
    dkv_outcome o = dkv_openSide(&side, w, c->p, c->line, &c->packed, &c->in);
    if (o == DKV_W_OK && !side.d.refused) o = dkv_runSide(&side, 0, &run);
    if (o != DKV_W_OK || side.d.refused || dkv_packRun(&side, &c->packed, &run.out, &packed, &err)) {
        dkv_find(f, DKV_CHECK_NOTE, DKV_ST_PASSED, "no peer: %.300s",
                 side.d.refused ? side.d.reason : w->why);
        goto done;
    }
    dkv_findNothing(f);
    dkv_countOutputs(&c->packed, n);
    for (int id = 0; id < DKV_N_OUTPUTS; id++) {
        const double *truth = dkv_outputAt(&c->oracle.truth, (dkv_tensor_id)id);
        const double *got = dkv_outputAt(&c->got, (dkv_tensor_id)id),
                     *peer = dkv_outputAt(&packed, (dkv_tensor_id)id);
        if (!truth || !got || !peer) continue;
        double own = rmsError(got, truth, n[id]), other = rmsError(peer, truth, n[id]);
        c->result->peer[id] = other > 0 ? own / other : 0;
        if (other > 0 && at < sizeof f->why)
            at += (size_t)snprintf(f->why + at, sizeof f->why - at, "%s%s %.2f",
                                   at ? ", " : "error over the peer's: ", dkv_tensorName((dkv_tensor_id)id),
                                   own / other);
    }
    if (at) f->state = DKV_CHECK_NOTE;
done:
    dkv_freePacked(&side, &packed);
    dkv_freeRun(&run);
    dkv_closeSide(&side);
}
