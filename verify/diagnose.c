#include "diagnose.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../data/fill.h"
#include "diagnose_impl.h"
#include "diagnose_set.h"
#include "version.h"

static const dkv_stage_row stages[DKV_N_STAGES] = {
    [DKV_STAGE_NONE] = {"none", "nowhere"},
    [DKV_STAGE_SCORES] = {"scores", "forward stage scores (Q K^T, scale, softcap, ALiBi)"},
    [DKV_STAGE_MASK] = {"mask", "forward stage mask and key walk"},
    [DKV_STAGE_SOFTMAX] = {"softmax", "forward stage softmax (running maximum and correction)"},
    [DKV_STAGE_SUM] = {"sum", "forward stage row sum and normalisation"},
    [DKV_STAGE_LSE] = {"lse", "forward stage LSE (row sum, logarithm, sink, store)"},
    [DKV_STAGE_PV] = {"pv", "forward stage P V"},
    [DKV_STAGE_O] = {"o", "forward stage O (P V, rounding, store)"},
    [DKV_STAGE_FORWARD] = {"forward", "forward"},
    [DKV_STAGE_B_SCORES] = {"backward-scores", "backward stage scores"},
    [DKV_STAGE_B_MASK] = {"backward-mask", "backward stage mask and tile walk"},
    [DKV_STAGE_B_P] = {"backward-p", "backward stage P (from scores and LSE)"},
    [DKV_STAGE_DELTA] = {"delta", "backward stage delta (dO O - dLSE)"},
    [DKV_STAGE_DS] = {"ds", "backward stage dP, dS"},
    [DKV_STAGE_DQ] = {"dq", "backward stage dS K"},
    [DKV_STAGE_DK] = {"dk", "backward stage dS^T Q"},
    [DKV_STAGE_DV] = {"dv", "backward stage P^T dO"},
    [DKV_STAGE_REDUCE] = {"reduce", "backward stage sum over rows, heads and responses"},
    [DKV_STAGE_DSINK] = {"dsink", "backward stage dSink"},
    [DKV_STAGE_BACKWARD] = {"backward", "backward"},
};

const dkv_stage_row *dkv_stageRow(dkv_stage s) { return &stages[s]; }

/* ---- repeats ---- */

typedef struct varying { /* tokens of each tensor of other bits in some run */
    uint8_t *tokens[DKV_N_OUTPUTS];
} varying;

static void compareRun(dkv_diag *d, const dkv_outputs *again, varying *vary) {
    const dualkv_problem *v = &d->c->packed.view;
    dkv_repeats *r = &d->out->repeats;
    int64_t n[DKV_N_OUTPUTS];
    bool any = false;
    dkv_countOutputs(&d->c->packed, n);
    for (int id = 0; id < DKV_N_OUTPUTS; id++) {
        const double *a = dkv_outputAt(&d->c->got, (dkv_tensor_id)id),
                     *b = dkv_outputAt(again, (dkv_tensor_id)id);
        const double *bound = dkv_outputAt(&d->c->oracle.bound, (dkv_tensor_id)id);
        const int64_t rows = id == DKV_DSINK ? 1 : id == DKV_DK || id == DKV_DV ? v->tk : v->tq;
        int64_t other = 0;
        for (int64_t i = 0; a && b && i < n[id] && !(d->c->kernel.d.absent >> id & 1); i++) {
            if (memcmp(&a[i], &b[i], sizeof a[i]) == 0 || (isnan(a[i]) && isnan(b[i]))) continue;
            other++;
            double over = isfinite(a[i]) && isfinite(b[i]) ? fabs(a[i] - b[i]) / bound[i] : (double)INFINITY;
            if (over > r->beyond[id]) r->beyond[id] = over;
            if (vary->tokens[id]) vary->tokens[id][id == DKV_LSE ? i % rows : i / (n[id] / rows)] = 1;
        }
        any |= other > 0;
        if (other > r->elements[id]) r->elements[id] = other;
    }
    r->runs++;
    r->differing += any;
}

/* "dQ alone: rows 64-127 of the prompt", "LSE, O and what follows: ..." */
static void sayVarying(dkv_diag *d, const varying *vary) {
    dkv_repeats *r = &d->out->repeats;
    static const dkv_tensor_id order[] = {DKV_LSE, DKV_O, DKV_DV, DKV_DK, DKV_DQ, DKV_DSINK};
    dkv_row_words words = {0};
    size_t at = 0;
    int first = -1;
    for (int i = 0; i < DKV_N_OUTPUTS; i++) {
        if (!r->elements[order[i]]) continue;
        if (first < 0) first = order[i];
        at += (size_t)snprintf(r->where + at, sizeof r->where - at, "%s%s", at ? ", " : "",
                               dkv_tensorName(order[i]));
    }
    if (first < 0 || first == DKV_DSINK || !vary->tokens[first]) return;
    dkv_describeRows(&d->c->packed, first == DKV_DK || first == DKV_DV, vary->tokens[first], &words);
    const bool alone = !strchr(r->where, ',');
    snprintf(r->where + at, sizeof r->where - at, alone ? "%s: %s of %s" : "; of %s %s of %s",
             alone ? "" : dkv_tensorName((dkv_tensor_id)first), words.rows, words.segments);
}

static void repeatRuns(dkv_diag *d) {
    dkv_case *c = d->c;
    dkv_err err = {0};
    dkv_description again; /* checks told the worker of other problems */
    varying vary = {{NULL}};
    int64_t n[DKV_N_OUTPUTS];
    d->out->repeats.runs = 1;
    if (dkv_isFiles(c->kernel.w) || dkv_describeCase(c->kernel.w, c->line, &again) != DKV_W_OK) return;
    dkv_countOutputs(&c->packed, n);
    for (int id = 0; id < DKV_N_OUTPUTS; id++) vary.tokens[id] = n[id] ? calloc((size_t)n[id], 1) : NULL;
    for (int i = 0; i < c->n_runs; i++) { /* those of the checks */
        dkv_outputs packed = {0};
        if (i == c->judged_run || !c->run[i].done ||
            dkv_packRun(&c->kernel, &c->packed, &c->run[i].out, &packed, &err))
            continue;
        compareRun(d, &packed, &vary);
        dkv_freePacked(&c->kernel, &packed);
    }
    for (int i = 0; i < d->o->repeats && dkv_hasTime(d, 0.2); i++) {
        dkv_run run = {0};
        dkv_outputs packed = {0};
        dkv_outcome o = dkv_runSide(&c->kernel, DKV_RUNS_MAX + 1 + i, &run);
        if (o == DKV_W_OK && !dkv_packRun(&c->kernel, &c->packed, &run.out, &packed, &err)) {
            compareRun(d, &packed, &vary);
            dkv_freePacked(&c->kernel, &packed);
        }
        dkv_freeRun(&run);
        if (o != DKV_W_OK) break;
    }
    if (d->out->repeats.differing) sayVarying(d, &vary);
    for (int id = 0; id < DKV_N_OUTPUTS; id++) free(vary.tokens[id]);
}

/* ---- hypotheses ---- */

typedef struct explainer {
    dkv_diag *d;
} explainer;

/* The kernel on other inputs of the same problem. */
static int probe(void *arg, const dkv_inputs *in, const dkv_outputs *out) {
    dkv_diag *d = ((explainer *)arg)->d;
    const dkv_case *c = d->c;
    const dkv_inputs *kept = c->kernel.in;
    dkv_side *side = &d->c->kernel;
    int64_t n[DKV_N_OUTPUTS];
    dkv_run run = {0};
    dkv_description again;
    if (side->d.replicated || dkv_isFiles(side->w) || dkv_describeCase(side->w, c->line, &again) != DKV_W_OK)
        return -1;
    side->in = in;
    dkv_outcome o = dkv_runSide(side, DKV_RUNS_MAX + 64, &run);
    side->in = kept;
    dkv_countOutputs(&c->packed, n);
    for (int id = 0; id < DKV_N_OUTPUTS && o == DKV_W_OK; id++) {
        double *to = dkv_outputAt(out, (dkv_tensor_id)id);
        const double *from = dkv_outputAt(&run.out, (dkv_tensor_id)id);
        if (to && from) memcpy(to, from, (size_t)n[id] * sizeof *to);
    }
    dkv_freeRun(&run);
    d->out->probes++;
    return o == DKV_W_OK ? 0 : -1;
}

static void explain(dkv_diag *d) {
    dkv_case *c = d->c;
    dkv_diagnosis *o = d->out;
    dkv_err err = {0};
    dkv_outputs given = c->got;
    explainer e = {d};
    double **const all[] = {&given.o, &given.lse, &given.dq, &given.dk, &given.dv, &given.dsink};
    for (int id = 0; id < DKV_N_OUTPUTS; id++)
        if (c->kernel.d.absent >> id & 1) *all[id] = NULL;
    const dkv_explain_in in = {
        .p = c->p,
        .l = &c->packed,
        .in = &c->in,
        .a = &c->result->arithmetic,
        .replicated = c->kernel.d.replicated,
        .oracle = &c->oracle,
        .got = &given,
        .again = c->n_runs > 1 && !c->kernel.d.replicated ? &c->run[1].out : NULL,
        .damage = &c->run[c->judged_run].damage,
        .unwritten = c->run[c->judged_run].poison,
        .probe = c->kernel.d.replicated || dkv_isFiles(c->kernel.w) ? NULL : probe,
        .probe_arg = &e,
        .exclude = d->o->exclude,
        .seconds = fmax(10, (d->o->seconds > 0 ? d->o->seconds : 30) - (dkv_now() - d->start)),
        .threads = c->options->threads};
    o->n_hypotheses = dkv_explain(&in, o->hypothesis, DKV_HYPOTHESES_MAX, &err);
    if (o->n_hypotheses >= 0) return;
    o->n_hypotheses = 0;
    snprintf(o->note, sizeof o->note, "no hypotheses: %.300s", err.text);
}

/* ---- the whole ---- */

static bool isValue(dkv_status s) {
    return s == DKV_ST_FAILED || s == DKV_ST_IMPRECISE || s == DKV_ST_BIASED || s == DKV_ST_INCONCLUSIVE ||
           s == DKV_ST_LEAKED || s == DKV_ST_NONDETERMINISTIC || s == DKV_ST_UNWRITTEN ||
           s == DKV_ST_OUT_OF_BOUNDS || s == DKV_ST_INPUT_MUTATED;
}

static void observe(dkv_case *c, void *arg) {
    dkv_diag *d = arg;
    dkv_err err = {0};
    if (c->options->nested) return; /* a case between the runs of ours */
    d->c = c;
    d->start = dkv_now();
    if (!isValue(c->result->status) || !c->has_oracle || !c->has_got) return;
    repeatRuns(d);
    if (dkv_makeMaps(d, &err))
        snprintf(d->out->note, sizeof d->out->note, "%.390s", err.text);
    else {
        dkv_describeMaps(d);
        dkv_findSpots(d);
        if (d->o->what && !dkv_stopRequested) explain(d);
    }
    dkv_freeMaps(d);
}

/* Statuses that are no matter of values have a sentence of their own. */
static const char *sayStatus(const dkv_result *r) {
    switch (r->status) {
    case DKV_ST_PASSED: return "nothing is wrong";
    case DKV_ST_CRASHED: return "the kernel's process died";
    case DKV_ST_TIMEOUT: return "the kernel hangs";
    case DKV_ST_NOT_RUN: return "the kernel did not run";
    case DKV_ST_UNSUPPORTED: return "the kernel refuses this line";
    case DKV_ST_HARNESS_ERROR: return r->stopped ? NULL : "nothing was learned";
    case DKV_ST_OUT_OF_BOUNDS: return "the kernel writes outside its outputs";
    case DKV_ST_UNWRITTEN: return "outputs are not written";
    case DKV_ST_INPUT_MUTATED: return "the kernel changes its inputs";
    case DKV_ST_NONDETERMINISTIC: return "results change from run to run though repeatable ones are promised";
    case DKV_ST_LEAKED: return "NaN or Inf reaches where it must not";
    default: return NULL;
    }
}

static void conclude(dkv_diagnosis *o) {
    const dkv_repeats *r = &o->repeats;
    const char *status = sayStatus(&o->result);
    const size_t n = sizeof o->sentence;
    size_t at = o->interrupted ? (size_t)snprintf(o->sentence, n, "interrupted; so far: ") : 0;
    const size_t begin = at;
    const char *why = o->result.status == DKV_ST_HARNESS_ERROR && o->result.stopped ? "" : o->result.why;
    if (status)
        at += (size_t)snprintf(o->sentence + at, n - at, "%s%s%.400s", status, why[0] ? ": " : "", why);
    else if (!o->n_spots)
        at += (size_t)snprintf(o->sentence + at, n - at, "%.500s", why[0] ? why : "no row of any tensor is off");
    for (int i = 0; i < o->n_spots && at < n; i++) {
        bool first = at == begin;
        at += (size_t)snprintf(o->sentence + at, n - at, "%s%s",
                               first              ? ""
                               : status && i == 0 ? "; where it shows: "
                                                  : "; also ",
                               o->spot[i].sentence);
    }
    bool race = false;
    for (int id = 0; id < DKV_N_OUTPUTS; id++) race |= r->beyond[id] > 1;
    if (race && at < n)
        snprintf(o->sentence + at, n - at,
                 "; a race: %d of %d further runs gave other values, beyond rounding (%s)", r->differing,
                 r->runs - 1, r->where);
    else if (r->differing && o->result.status == DKV_ST_NONDETERMINISTIC && at < n)
        snprintf(o->sentence + at, n - at, "; by rounding: %s", r->where);
}

int dkv_diagnoseLine(const dkv_problem *p, const dkv_kernel_spec *kernel, const dkv_diagnose_options *options,
                     dkv_diagnosis *out, dkv_err *err) {
    dkv_worker w;
    memset(out, 0, sizeof *out);
    snprintf(out->held, sizeof out->held, "%s", options->held ? options->held : "");
    dkv_diag d = {.o = options, .out = out};
    const dkv_case_options with = {.data_dir = options->data_dir,
                                   .level = options->level,
                                   .threads = options->threads,
                                   .repeats = options->repeats,
                                   .strength = true,
                                   .observe = observe,
                                   .observe_arg = &d,
                                   .fits = options->fits};
    dkv_initWorker(&w, kernel, options->timeout);
    dkv_runCase(p, &w, &with, &out->result);
    dkv_stopWorker(&w);
    if (out->result.changed) return dkv_fail(err, DKV_EHARNESS, "%s", out->result.why);
    out->interrupted = dkv_stopRequested && (out->result.stopped || isValue(out->result.status));
    if (out->interrupted && !out->result.judged)
        return dkv_fail(err, DKV_EHARNESS, "interrupted before anything was judged");
    if (out->interrupted) snprintf(out->note, sizeof out->note, "interrupted: what follows is incomplete");
    conclude(out);
    return 0;
}
