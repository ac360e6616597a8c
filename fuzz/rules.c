/* The rules that usual tests judge by, and the kill matrix: which planted faults they would have seen on the
 * cases of the fuzzer. They are treated kindly: their truth is the fp64 oracle's, their inputs are the
 * fuzzer's and not only normal deviates, NaN counts as an objection, and outputs that were never written hold
 * NaN. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../data/fill.h"
#include "../verify/side.h"
#include "power.h"
#include "power_impl.h"

static const struct {
    const char *name, *doc;
} rules[DKV_N_RULES] = {
    {"allclose", "every element within 1e-2 + 1e-2 |truth|"},
    {"nmse", "normalised mean square error of each tensor at most 5e-4"},
    {"peer", "largest error of each tensor at most twice that of a same-precision replicated kernel"},
};

const char *dkv_ruleName(int i) { return i >= 0 && i < DKV_N_RULES ? rules[i].name : NULL; }
const char *dkv_ruleDoc(int i) { return i >= 0 && i < DKV_N_RULES ? rules[i].doc : NULL; }

bool dkv_ruleObjects(dkv_rule rule, const double *got, const double *truth, const double *peer, int64_t n) {
    double square = 0, size = 0, most = 0, peer_most = 0;
    for (int64_t i = 0; i < n; i++) {
        if (!isfinite(truth[i])) continue;
        double e = fabs(got[i] - truth[i]);
        if (!isfinite(e)) return rule != DKV_RULE_PEER || peer;
        if (rule == DKV_RULE_ALLCLOSE && e > 1e-2 + 1e-2 * fabs(truth[i])) return true;
        square += e * e;
        size += truth[i] * truth[i];
        most = fmax(most, e);
        if (peer) peer_most = fmax(peer_most, fabs(peer[i] - truth[i]));
    }
    if (rule == DKV_RULE_NMSE) return square > 5e-4 * size;
    return rule == DKV_RULE_PEER && peer && most > 2 * peer_most;
}

/* One case: its inputs, its truth, its peer; kernels are run on it one after another. */
typedef struct scene {
    dkv_problem p;
    char line[DKV_LINE_MAX + 1];
    dkv_layout l;
    dkv_inputs in;
    dkv_outputs truth, peer;
    bool has_peer;
} scene;

static int openScene(scene *s, const dkv_power *w, uint64_t n, const dkv_sampler *sampler, dkv_err *err) {
    const dkv_ref_options ref = {.threads = 1};
    memset(s, 0, sizeof *s);
    int rc = dkv_sampleCase(sampler, n, &s->p, err);
    if (!rc) rc = dkv_printProblem(&s->p, s->line, sizeof s->line, err);
    if (!rc) rc = dkv_makeLayout(&s->p, &s->l, err);
    if (!rc) rc = dkv_allocInputs(&s->l, &s->in, err);
    if (!rc) rc = dkv_fillInputs(&s->p, &s->l, w->data_dir, &s->in, err);
    if (!rc) rc = dkv_allocOutputs(&s->l, &s->truth, err);
    if (!rc) rc = dkv_refBlocked(&s->p, &s->l, &s->in, &ref, &s->truth, err);
    return rc;
}

static void closeScene(scene *s) {
    dkv_freeOutputs(&s->peer);
    dkv_freeOutputs(&s->truth);
    dkv_freeInputs(&s->in);
    dkv_freeLayout(&s->l);
    dkv_freeProblem(&s->p);
}

/* Outputs of a kernel on the scene, copied; false: refused, crashed, ... */
static bool runKernel(const scene *s, dkv_worker *worker, dkv_outputs *out) {
    dkv_side side;
    dkv_run run = {0};
    dkv_outputs packed = {0};
    dkv_err err;
    int64_t n[DKV_N_OUTPUTS];
    bool done = dkv_openSide(&side, worker, &s->p, s->line, &s->l, &s->in) == DKV_W_OK && !side.d.refused &&
                dkv_runSide(&side, 0, &run) == DKV_W_OK &&
                !dkv_packRun(&side, &s->l, &run.out, &packed, &err) && !dkv_allocOutputs(&s->l, out, &err);
    dkv_countOutputs(&s->l, n);
    for (int id = 0; id < DKV_N_OUTPUTS && done; id++)
        if (n[id])
            memcpy(dkv_outputAt(out, (dkv_tensor_id)id), dkv_outputAt(&packed, (dkv_tensor_id)id),
                   (size_t)n[id] * sizeof(double));
    dkv_freePacked(&side, &packed);
    dkv_freeRun(&run);
    dkv_closeSide(&side);
    return done;
}

/* Which rules object: bit i is rule i. A kernel that does not come through is an objection of all. */
static unsigned judgeScene(const scene *s, dkv_worker *worker) {
    static const dkv_tensor_id looked_at[] = {DKV_O, DKV_DQ, DKV_DK, DKV_DV};
    dkv_outputs got = {0};
    int64_t n[DKV_N_OUTPUTS];
    unsigned objections = 0;
    if (!runKernel(s, worker, &got)) return (1u << DKV_N_RULES) - 1;
    dkv_countOutputs(&s->l, n);
    for (size_t i = 0; i < sizeof looked_at / sizeof *looked_at; i++) {
        const dkv_tensor_id id = looked_at[i];
        for (int r = 0; r < DKV_N_RULES && n[id]; r++)
            if (dkv_ruleObjects((dkv_rule)r, dkv_outputAt(&got, id), dkv_outputAt(&s->truth, id),
                                s->has_peer ? dkv_outputAt(&s->peer, id) : NULL, n[id]))
                objections |= 1u << r;
    }
    dkv_freeOutputs(&got);
    return objections;
}

/* What is left to find of one fault. */
static unsigned missing(const dkv_fault_power *f) {
    unsigned left = 0;
    for (int r = 0; r < DKV_N_RULES; r++) left |= f->hunts[0].found[1 + r] ? 0 : 1u << r;
    return left;
}

/* The faults `part`, part + parts, ...: on each case of the first seed all that some rule has not yet found;
 * and the clean kernel. Where a rule objects to that, its objection to a fault says nothing. */
static int runPart(dkv_power *w, const dkv_sampler *sampler, int part, int parts, dkv_worker *workers,
                   dkv_err *err) {
    dkv_worker *peer = &workers[w->n_faults], *clean = &workers[w->n_faults + 1];
    for (uint64_t n = 0; n < w->cases && !dkv_stopRequested; n++) {
        scene s;
        int rc = openScene(&s, w, n, sampler, err);
        if (!rc) s.has_peer = runKernel(&s, peer, &s.peer);
        unsigned alarms = rc ? 0 : judgeScene(&s, clean);
        for (int r = 0; r < DKV_N_RULES; r++) w->rule_alarms[r] += part ? 0 : alarms >> r & 1;
        for (int i = part; i < w->n_faults && !rc; i += parts) {
            dkv_hunt *h = &w->fault[i].hunts[0];
            unsigned left = missing(&w->fault[i]),
                     seen = left ? judgeScene(&s, &workers[i]) & left & ~alarms : 0;
            for (int r = 0; r < DKV_N_RULES; r++) {
                h->cases[1 + r] += left >> r & 1;
                h->found[1 + r] |= seen >> r & 1;
            }
        }
        closeScene(&s);
        if (rc) return rc;
    }
    return 0;
}

int dkv_runMatrixPart(dkv_power *w, int part, int parts, dkv_err *err) {
    dkv_sampler sampler = {0};
    dkv_worker *workers = calloc((size_t)w->n_faults + 2, sizeof *workers);
    int rc = workers ? dkv_openSampler(w->profile, w->seed, &sampler, err)
                     : dkv_fail(err, DKV_EHARNESS, "out of memory");
    for (int i = 0; i < w->n_faults && !rc; i++) {
        dkv_kernel_spec spec;
        rc = dkv_faultySpec(w, i, &spec, err);
        if (!rc) dkv_initWorker(&workers[i], &spec, w->timeout);
    }
    if (!rc) {
        dkv_initWorker(&workers[w->n_faults], &w->peer, w->timeout);
        dkv_initWorker(&workers[w->n_faults + 1], &w->kernel, w->timeout);
        rc = runPart(w, &sampler, part, parts, workers, err);
    }
    for (int i = 0; workers && i < w->n_faults + 2; i++) dkv_stopWorker(&workers[i]);
    free(workers);
    dkv_closeSampler(&sampler);
    return rc;
}
