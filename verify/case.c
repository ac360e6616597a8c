#include "case.h"
#include "../ref/clock.h"
#include "check.h"
#include "kernel_hash.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../data/fill.h"
#include "../data/sha256.h"
#include "../ref/dtype.h"
#include "../ref/mask.h"
#include "../ref/partials.h"

static void conclude(dkv_case *c, dkv_status status, const char *why) {
    c->result->status = status;
    snprintf(c->result->why, sizeof c->result->why, "%s", why);
}

static int failHarness(dkv_case *c, const char *why) {
    conclude(c, DKV_ST_HARNESS_ERROR, why);
    return -1;
}

/* ---- the kernel's runs ---- */

/* What runs between two runs of A: first another shape, then A's shape with other data (a kernel that keeps a
 * map of tiles, or a result, gives the wrong one). */
enum { BETWEEN_SHAPE, BETWEEN_DATA, N_BETWEEN };

static int otherProblem(const dkv_problem *p, int which, dkv_problem *b, dkv_err *err) {
    dkv_problem shape = {0};
    int rc = dkv_copyProblem(p, b, err);
    if (!rc && which == BETWEEN_SHAPE) rc = dkv_parseProblem("shape=19+2x7,1/3+5", NULL, &shape, err);
    if (rc) return rc;
    if (which == BETWEEN_SHAPE) {
        dkv_node *own = b->nodes;
        b->nodes = shape.nodes;
        shape.nodes = own;
        b->n_nodes = shape.n_nodes;
        b->n_groups = shape.n_groups;
    }
    b->seed = p->seed + 1;
    b->run = DKV_SINGLE;
    strcpy(b->fill, "normal");
    dkv_freeProblem(&shape);
    return 0;
}

/* Judges the cases between on the same instance, then tells the kernel about A again. */
static dkv_outcome runBetween(dkv_case *c) {
    dkv_case_options options = *c->options;
    dkv_description again;
    options.repeats = 0;
    options.peer = NULL;
    options.strength = false;
    options.nested = true;
    for (int which = 0; which < N_BETWEEN && !c->options->nested; which++) {
        dkv_err err = {0};
        dkv_problem b = {0};
        dkv_result *r = malloc(sizeof *r);
        int rc = r ? otherProblem(c->p, which, &b, &err) : -1;
        if (!rc) dkv_runCase(&b, c->kernel.w, &options, r);
        dkv_freeProblem(&b);
        if (!rc && dkv_statusRow(r->status)->defect && c->between == DKV_ST_PASSED) {
            c->between = r->status;
            snprintf(c->between_why, sizeof c->between_why, "%.300s", r->why);
        }
        bool stopped = !rc && r->stopped;
        free(r);
        if (stopped) return DKV_W_STOPPED;
    }
    return dkv_describeCase(c->kernel.w, c->line, &again);
}

static bool isAbsent(const dkv_case *c, int id) { return c->kernel.d.absent >> id & 1; }

static bool anyPoison(const dkv_run *r) {
    for (int id = 0; id < DKV_N_OUTPUTS; id++)
        if (r->poison[id]) return true;
    return false;
}

/* A repeat that shows nothing new: need not be kept. */
static bool tellsNothing(const dkv_case *c, const dkv_run *r) {
    int64_t n, first;
    return !r->damage.outside && !r->damage.mutated && r->bits == c->run[0].bits && r->launches[0] == c->run[0].launches[0] &&
           r->launches[1] == c->run[0].launches[1] &&
           dkv_firstDifference(c, &c->run[0], r, &n, &first) < 0;
}

/* How often: once; again where asked, where bits are promised, or where poison was found (another pattern
 * tells a NaN that was computed from an element that was never written). Two runs are kept, and the first
 * further one that tells more; then it is enough. */
static dkv_outcome runKernel(dkv_case *c) {
    int wanted = c->p->run == DKV_TWICE || c->p->run == DKV_ABA ? 2 : 1;
    if (c->kernel.d.deterministic && wanted < 1 + c->options->repeats) wanted = 1 + c->options->repeats;
    for (int i = 0; i < wanted && c->n_runs < DKV_RUNS_MAX; i++) {
        if (i == 1 && c->p->run == DKV_ABA) {
            dkv_outcome between = runBetween(c);
            if (between != DKV_W_OK) return between;
        }
        dkv_outcome o = dkv_runSide(&c->kernel, i, &c->run[c->n_runs++]);
        c->result->runs = i + 1;
        if (o != DKV_W_OK) return o;
        if (i >= 2 && tellsNothing(c, &c->run[2])) dkv_freeRun(&c->run[--c->n_runs]);
        if (wanted == 1 && anyPoison(&c->run[0])) wanted = 2;
    }
    c->judged_run = c->p->run == DKV_ABA ? c->n_runs - 1 : 0;
    c->result->seconds_forward = c->run[c->judged_run].seconds[0];
    c->result->seconds_backward = c->run[c->judged_run].seconds[1];
    return DKV_W_OK;
}

/* A kernel that did not come through: its status, or nothing. */
static bool concludeOutcome(dkv_case *c, dkv_outcome o) {
    const char *why = c->kernel.w->why;
    switch (o) {
    case DKV_W_OK: return false;
    case DKV_W_ERROR: conclude(c, DKV_ST_NOT_RUN, why); break;
    case DKV_W_CRASHED: conclude(c, DKV_ST_CRASHED, why); break;
    case DKV_W_TIMEOUT: conclude(c, DKV_ST_TIMEOUT, why); break;
    case DKV_W_STOPPED: c->result->stopped = true; break;
    case DKV_W_HARNESS: conclude(c, DKV_ST_HARNESS_ERROR, why); break;
    }
    return true;
}

/* ---- the oracle ---- */

/* What the oracle is asked about: what the kernel saw; the packed problem where its outputs were summed (side.h). */
typedef struct subject {
    const dkv_problem *p;
    const dkv_layout *l;
    const dkv_inputs *in;
    dualkv_arithmetic a;
    const dkv_outputs *own; /* what the kernel gave, shaped for l */
} subject;

static int subjectOf(const dkv_case *c, const dualkv_arithmetic *a, subject *x, dkv_err *err) {
    const dkv_side *s = &c->kernel;
    *x = (subject){s->p, s->l, s->in, *a, &c->run[c->judged_run].out};
    if (!s->summed) return 0;
    x->p = c->p;
    x->l = &c->packed;
    x->in = &c->in;
    return dkv_sumCopies(a, &x->a, err);
}

/* A sum with an unclaimed term claims nothing: as NaN while bounds are added, back where the truth is finite.
 */
static void markUnclaimed(const dkv_layout *l, const dkv_oracle *o, bool as_nan) {
    int64_t n[DKV_N_OUTPUTS];
    dkv_countOutputs(l, n);
    for (int id = 0; id < DKV_N_OUTPUTS; id++) {
        double *bound = dkv_outputAt(&o->bound, (dkv_tensor_id)id);
        const double *truth = dkv_outputAt(&o->truth, (dkv_tensor_id)id);
        for (int64_t i = 0; i < n[id]; i++) {
            if (as_nan && bound[i] == DKV_UNCLAIMED) bound[i] = NAN;
            if (!as_nan && isnan(bound[i]) && isfinite(truth[i])) bound[i] = DKV_UNCLAIMED;
        }
    }
}

/* Variances of a sum over copies: those of different copies add; copies whose twins are equal (identical responses) round
 * alike, so their deviations add first. So do, about, copies whose `marks` [rows, n_marks] are equal: identical but for
 * their dLSE, of which dV knows nothing; NULL: none are. */
typedef struct copied {
    const int64_t *source;
    int64_t rows, packed_rows, width, n_marks;
    const double *twin, *from, *marks;
    double *to, *last, *run; /* last, run: [packed_rows, width] */
    int64_t *row;            /* [packed_rows]: the copy before; -1: none */
} copied;

static void packVariance(const copied *k) {
    const size_t bytes = (size_t)k->n_marks * sizeof *k->marks;
    for (int64_t i = 0; i < k->packed_rows; i++) k->row[i] = -1;
    for (int64_t i = 0; i < k->packed_rows * k->width; i++) {
        k->to[i] = k->run[i] = 0;
        k->last[i] = NAN;
    }
    for (int64_t t = 0; t < k->rows; t++) {
        const int64_t row = k->source[t], before_t = k->row[row];
        const bool alike = k->marks && before_t >= 0 && !memcmp(k->marks + t * k->n_marks, k->marks + before_t * k->n_marks, bytes);
        k->row[row] = t;
        for (int64_t c = 0; c < k->width; c++) {
            const int64_t at = row * k->width + c, i = t * k->width + c;
            const double sigma = sqrt(k->from[i]), before = alike || k->twin[i] == k->last[at] ? k->run[at] : 0;
            k->last[at] = k->twin[i];
            k->run[at] = before + sigma;
            k->to[at] += k->run[at] * k->run[at] - before * before;
        }
    }
}

static int packVariances(dkv_case *c, const dualkv_arithmetic *a, dkv_err *err) {
    const dkv_side *s = &c->kernel;
    const dualkv_problem *v = &c->packed.view, *w = &s->l->view;
    const dkv_outputs *twin = &c->rep_oracle.twin, *from = &c->rep_oracle.sigma2, *to = &c->oracle.sigma2;
    const int64_t k_width = (int64_t)v->hkv * v->dqk, v_width = (int64_t)v->hkv * v->dv;
    const bool shared = c->p->dlse && dkv_unitRoundoff(a->ds_format) <= a->unit; /* else dS is rounded, each for itself */
    size_t most = (size_t)(v->tk * (k_width > v_width ? k_width : v_width)) + 1;
    if (!v->grad || !twin->dk) return 0;
    double *last = malloc(2 * most * sizeof *last);
    int64_t *row = malloc(((size_t)v->tk + 1) * sizeof *row);
    if (last && row) {
        const copied k = {s->k_source, w->tk, v->tk, k_width, v_width, twin->dk, from->dk, shared ? twin->dv : NULL,
                          to->dk, last, last + most, row};
        const copied of_v = {s->k_source, w->tk, v->tk, v_width, 0, twin->dv, from->dv, NULL, to->dv, last, last + most, row};
        packVariance(&k);
        packVariance(&of_v);
    }
    free(last);
    free(row);
    return last && row ? 0 : dkv_fail(err, DKV_EHARNESS, "out of memory for variances");
}

/* The oracle of a replicated kernel is that of the replicated problem, packed: gradients of copies are each
 * rounded, so their bounds (and variances) add. The truth is the packed one: that is the equivalence. */
static int packOracle(dkv_case *c, const dualkv_arithmetic *a, dkv_err *err) {
    const dkv_side *s = &c->kernel;
    const dkv_outputs *from[3] = {&c->rep_oracle.bound, &c->rep_oracle.twin, &c->rep_oracle.sigma2};
    dkv_outputs *to[3] = {&c->oracle.bound, &c->oracle.twin, &c->oracle.sigma2};
    int rc = 0;
    markUnclaimed(s->l, &c->rep_oracle, true);
    for (int i = 0; i < 3 && !rc; i++)
        if (from[i]->o)
            rc = dkv_packOutputs(&c->packed, &s->rep_layout, s->q_source, s->k_source, s->q_own, from[i], to[i], err);
    if (!rc) rc = packVariances(c, a, err);
    markUnclaimed(s->l, &c->rep_oracle, false);
    markUnclaimed(&c->packed, &c->oracle, false);
    memcpy(c->oracle.has_twin, c->rep_oracle.has_twin, sizeof c->oracle.has_twin);
    c->oracle.alike = c->rep_oracle.alike;
    return rc;
}

/* An O or LSE that the kernel does not give, but used: the truth stands for it in the backward's twin. */
static void standIn(const dkv_case *c, const dkv_oracle *o, const dkv_outputs *own) {
    int64_t n[DKV_N_OUTPUTS];
    dkv_countOutputs(dkv_runLayout(&c->kernel), n);
    for (int id = DKV_O; id <= DKV_LSE; id++)
        if (isAbsent(c, id))
            memcpy(dkv_outputAt(own, (dkv_tensor_id)id), dkv_outputAt(&o->truth, (dkv_tensor_id)id),
                   (size_t)n[id] * sizeof(double));
}

static void dropOracle(dkv_case *c) {
    if (c->rep_remote.room.base) dkv_freeRemoteOracle(&c->rep_remote);
    else if (c->has_rep_oracle) dkv_freeOracle(&c->rep_oracle);
    if (c->remote.room.base) dkv_freeRemoteOracle(&c->remote);
    else if (c->has_oracle) dkv_freeOracle(&c->oracle);
    c->has_oracle = c->has_rep_oracle = false;
}

/* Where the truth stands in for what the kernel did not write, it must be there before the twin. */
static int askInTurn(dkv_case *c, const subject *x, bool twin, const dkv_ref_options *ref, dkv_oracle *o, dkv_err *err) {
    int rc = dkv_oracleBound(x->p, x->l, x->in, &x->a, ref, o, err);
    if (rc || !twin) return rc;
    standIn(c, o, x->own);
    return dkv_oracleTwin(x->p, x->l, x->in, &x->a, ref, x->own->o, x->own->lse, o, err);
}

static int askCpu(dkv_case *c, const subject *x, bool twin, dkv_err *err) {
    const bool spread = dkv_isSpread(&c->kernel);
    const bool both = c->options->remote && c->options->remote->mode == DKV_ORACLE_BOTH;
    const dkv_ref_options ref = {.threads = c->options->threads,
                                 .exact_products = both, /* as on the device */
                                 .lse_stands_in = isAbsent(c, DKV_LSE)};
    dkv_oracle *o = spread ? &c->rep_oracle : &c->oracle;
    int rc = 0;
    if (!c->has_oracle) {
        rc = dkv_allocOracle(&c->packed, &c->oracle, err);
        c->has_oracle = !rc;
        if (!rc && spread) {
            rc = dkv_allocOracle(x->l, &c->rep_oracle, err);
            c->has_rep_oracle = !rc;
        }
    }
    if (!rc && twin && !isAbsent(c, DKV_O) && !isAbsent(c, DKV_LSE))
        rc = dkv_oracleAll(x->p, x->l, x->in, &x->a, &ref, x->own->o, x->own->lse, o, err);
    else if (!rc) rc = askInTurn(c, x, twin, &ref, o, err);
    if (!rc && spread) rc = dkv_refBlocked(c->p, &c->packed, &c->in, &ref, &c->oracle.truth, err);
    return rc;
}

static int ask(dkv_case *c, dkv_question q, const subject *x, dkv_remote_oracle *out, dkv_err *err) {
    const dkv_left left = {x->own->o, x->own->lse, c->kernel.d.absent};
    int rc = dkv_askRemote(c->options->remote, q, x->p, x->l, x->in, &x->a, &left, out, err);
    if (!rc && q == DKV_ASK_TWIN) standIn(c, &out->oracle, x->own);
    c->result->oracle.device_seconds += out->seconds;
    c->result->oracle.flops += out->flops;
    return rc;
}

/* The packed truth into arrays of our own, beside which the rest of the packed oracle is summed. */
static int takeTruth(dkv_case *c, const dkv_outputs *from, dkv_err *err) {
    int64_t n[DKV_N_OUTPUTS];
    int rc = dkv_allocOracle(&c->packed, &c->oracle, err);
    c->has_oracle = !rc;
    dkv_countOutputs(&c->packed, n);
    for (int id = 0; id < DKV_N_OUTPUTS && !rc; id++)
        if (n[id])
            memcpy(dkv_outputAt(&c->oracle.truth, (dkv_tensor_id)id), dkv_outputAt(from, (dkv_tensor_id)id),
                   (size_t)n[id] * sizeof(double));
    return rc;
}

static int askDevice(dkv_case *c, const subject *x, bool twin, dkv_err *err) {
    const dkv_question q = twin ? DKV_ASK_TWIN : DKV_ASK_BOUND;
    const subject packed = {c->p, &c->packed, &c->in, x->a, x->own}; /* asked for the truth alone */
    dkv_remote_oracle truth = {0};
    dropOracle(c);
    if (!dkv_isSpread(&c->kernel)) {
        int rc = ask(c, q, x, &c->remote, err);
        c->oracle = c->remote.oracle;
        c->has_oracle = !rc;
        return rc;
    }
    int rc = ask(c, q, x, &c->rep_remote, err);
    c->rep_oracle = c->rep_remote.oracle;
    c->has_rep_oracle = !rc;
    if (!rc) rc = ask(c, DKV_ASK_TRUTH, &packed, &truth, err);
    if (!rc) rc = takeTruth(c, &truth.oracle.truth, err);
    dkv_freeRemoteOracle(&truth);
    return rc;
}

/* The device must agree with the CPU on what the kernel sees. */
static int askToo(dkv_case *c, const subject *x, bool twin, dkv_err *err) {
    dkv_remote_oracle device = {0};
    int rc = ask(c, twin ? DKV_ASK_TWIN : DKV_ASK_BOUND, x, &device, err);
    if (!rc)
        rc = dkv_compareOracles(x->p, x->l, x->in, &x->a, twin, c->options->threads,
                                dkv_isSpread(&c->kernel) ? &c->rep_oracle : &c->oracle, &device.oracle, err);
    dkv_freeRemoteOracle(&device);
    return rc;
}

int dkv_consultOracle(dkv_case *c, const dualkv_arithmetic *a, bool twin, dkv_err *err) {
    dkv_oracle_use *use = &c->result->oracle;
    const dkv_remote *r = c->options->remote;
    const double start = dkv_now();
    const dkv_phase before = dkv_enterPhase(DKV_PHASE_ORACLE);
    const bool both = r && r->mode == DKV_ORACLE_BOTH;
    subject x;
    int rc = subjectOf(c, a, &x, err);
    bool device = !both && dkv_wantsRemote(r, x.p, c->kernel.d.memory == DUALKV_CUDA, c->options->threads);
    if (!rc && device) rc = askDevice(c, &x, twin, err);
    if (rc == DKV_EREFUSED && device && r->mode == DKV_ORACLE_AUTO) { /* our own choice: the CPU can do it, too */
        snprintf(use->note, sizeof use->note, "%.319s", err->text);
        dropOracle(c);
        device = false;
        rc = 0;
    }
    if (!rc && !device) rc = askCpu(c, &x, twin, err);
    if (!rc && both) rc = askToo(c, &x, twin, err);
    if (!rc && dkv_isSpread(&c->kernel)) rc = packOracle(c, &x.a, err);
    use->by = both ? DKV_ORACLE_BOTH : device ? DKV_ORACLE_CUDA : DKV_ORACLE_CPU;
    use->seconds += dkv_now() - start;
    dkv_enterPhase(before);
    return rc;
}

int dkv_consultTwin(dkv_case *c, const dualkv_arithmetic *a, bool forward, dkv_err *err) {
    const dkv_ref_options ref = {.threads = c->options->threads, .lse_stands_in = isAbsent(c, DKV_LSE)};
    const bool spread = dkv_isSpread(&c->kernel);
    subject x;
    int rc = subjectOf(c, a, &x, err);
    dkv_inputs in = *x.in;
    const dkv_phase before = dkv_enterPhase(DKV_PHASE_ORACLE);
    if (forward) in.d_o = NULL, in.d_lse = NULL;
    if (!rc)
        rc = dkv_oracleTwin(x.p, x.l, &in, &x.a, &ref, x.own->o, x.own->lse, spread ? &c->rep_oracle : &c->oracle, err);
    if (!rc && spread) rc = packOracle(c, &x.a, err);
    dkv_enterPhase(before);
    return rc;
}

static int judgeAll(dkv_case *c, const dualkv_arithmetic *a, dkv_err *err) {
    for (int id = 0; id < DKV_N_OUTPUTS; id++) {
        dkv_judgement *j = &c->result->tensor[id];
        const double *got = dkv_outputAt(&c->got, (dkv_tensor_id)id);
        memset(j, 0, sizeof *j);
        if (!got || isAbsent(c, id)) continue;
        int rc = dkv_judgeTensor(&c->packed, a, &c->oracle, (dkv_tensor_id)id, got, c->options->level,
                                 j, err);
        if (rc) return rc;
    }
    return 0;
}

static bool anyJudged(const dkv_result *r) {
    bool any = false;
    for (int id = 0; id < DKV_N_OUTPUTS; id++) any |= r->tensor[id].present;
    return any;
}

static bool fitsProfile(const dkv_result *r) {
    for (int id = 0; id < DKV_N_OUTPUTS; id++) {
        const dkv_judgement *j = &r->tensor[id];
        if (j->present && (j->failed || j->imprecise || j->biased)) return false;
    }
    return true;
}

#define LEANS_MOST 1e13 /* FLOPs of a case from which on one oracle takes so long that many are not asked */

/* Where no twin speaks, or only that of an arithmetic that was chosen because it fits. */
static int judgeLeans(dkv_case *c, dkv_err *err) {
    const double most = c->options->leans_most > 0 ? c->options->leans_most : LEANS_MOST;
    const bool ask = dkv_forwardFlops(c->p) + (c->p->grad ? dkv_backwardFlops(c->p) : 0) <= most;
    const dkv_result *r = c->result;
    const dkv_fit *fit = c->options->fits ? &c->options->fits->of[c->kernel.p->dtype] : NULL;
    const bool held = c->kernel.d.arithmetic.declared || (fit && fit->known && fit->held);
    unsigned vouched = 0;
    for (int id = 0; id < DKV_N_OUTPUTS; id++) {
        if (r->tensor[id].present && r->tensor[id].failed) return 0;
        vouched |= held && c->oracle.has_twin[id] ? 1u << id : 0;
    }
    return dkv_judgeLeans(c, vouched, held || r->profile[0], ask, err);
}

/* A kernel that declares nothing: the tightest named profile that it fits; if none, it is judged by the
 * loosest bound. */
static int judgeUndeclared(dkv_case *c, dkv_err *err) {
    dkv_result *r = c->result;
    const char *name, *words;
    const dkv_fit *fit = c->options->fits ? &c->options->fits->of[c->kernel.p->dtype] : NULL;
    int rc = 0;
    if (fit && fit->known) {
        r->arithmetic = fit->a;
        rc = dkv_consultOracle(c, &fit->a, true, err);
        if (!rc) rc = judgeAll(c, &fit->a, err);
        if (!rc && anyJudged(r) && fitsProfile(r)) snprintf(r->profile, sizeof r->profile, "%s", fit->words);
        if (rc || fit->held || r->profile[0]) return rc;
    }
    for (int i = 0; !rc && (name = dkv_arithmeticProfile(i, c->kernel.p, &r->arithmetic, &words)); i++) {
        const bool running = dkv_partialsOf(&r->arithmetic).rows; /* of CPUs; not the last */
        if (running && c->kernel.d.memory != DUALKV_HOST) continue;
        rc = dkv_consultOracle(c, &r->arithmetic, true, err);
        if (running && rc == DKV_EREFUSED) { /* the device's oracle does not know it */
            rc = 0;
            continue;
        }
        if (!rc) rc = judgeAll(c, &r->arithmetic, err);
        if (!rc && fitsProfile(r)) {
            if (anyJudged(r)) snprintf(r->profile, sizeof r->profile, "%s", name);
            break;
        }
    }
    for (int id = 0; id < DKV_N_OUTPUTS; id++) r->tensor[id].imprecise = r->tensor[id].biased = false;
    return rc;
}

/* Which bits came out. */
static void nameBits(const dkv_case *c, char out[17]) {
    const dkv_outputs *got = &c->run[c->judged_run].out;
    int64_t n[DKV_N_OUTPUTS];
    uint64_t h = c->run[c->judged_run].bits, word;
    dkv_countOutputs(dkv_runLayout(&c->kernel), n);
    for (int id = 0; id < DKV_N_OUTPUTS; id++) {
        const double *x = dkv_outputAt(got, (dkv_tensor_id)id);
        if (!x || isAbsent(c, id)) continue;
        for (int64_t i = -1; i < n[id]; i++) {
            word = (uint64_t)id + 1; /* a tensor begins with its number */
            if (i >= 0) memcpy(&word, &x[i], sizeof word);
            h = dkv_mixBits(h, word);
        }
    }
    snprintf(out, 17, "%016llx", (unsigned long long)h);
}

static int judgeCase(dkv_case *c, dkv_err *err) {
    dkv_result *r = c->result;
    int rc = dkv_packRun(&c->kernel, &c->packed, &c->run[c->judged_run].out, &c->got, err);
    c->has_got = !rc;
    r->arithmetic = c->kernel.d.arithmetic;
    if (!rc && r->arithmetic.declared) {
        rc = dkv_consultOracle(c, &r->arithmetic, true, err);
        if (!rc) rc = judgeAll(c, &r->arithmetic, err);
    } else if (!rc) {
        rc = judgeUndeclared(c, err);
    }
    if (!rc) rc = judgeLeans(c, err);
    if (!rc) dkv_describeArithmetic(&r->arithmetic, r->arithmetic_words, sizeof r->arithmetic_words);
    r->judged = !rc;
    r->declared = c->kernel.d.arithmetic.declared != 0;
    if (r->judged && c->kernel.d.deterministic) nameBits(c, r->bits);
    return rc;
}

/* ---- the whole ---- */

/* The checks run the kernel again and ask for truth and bound alone; twin and variances, as large as these, go before. They
 * stay for who observes the case. */
static void dropTwin(dkv_case *c) {
    if (c->options->observe) return;
    dkv_oracle *const own[2] = {&c->oracle, &c->rep_oracle};
    dkv_remote_oracle *const remote[2] = {&c->remote, &c->rep_remote};
    for (int i = 0; i < 2; i++) {
        if (remote[i]->room.base) {
            dkv_dropRemoteTwin(remote[i]);
            memset(&own[i]->twin, 0, sizeof own[i]->twin);
            memset(&own[i]->sigma2, 0, sizeof own[i]->sigma2);
        } else {
            dkv_freeOutputs(&own[i]->twin);
            dkv_freeOutputs(&own[i]->sigma2);
        }
        memset(own[i]->has_twin, 0, sizeof own[i]->has_twin);
    }
}

static void runChecks(dkv_case *c) {
    const dkv_check *check;
    c->result->status = DKV_ST_PASSED;
    for (int i = 0; (check = dkv_listCheck(i)); i++) {
        dkv_finding *f = &c->result->finding[i];
        check->run(c, f);
        if (f->state != DKV_CHECK_DEFECT || c->result->status != DKV_ST_PASSED) continue;
        conclude(c, f->status, f->why);
    }
}

static int prepare(dkv_case *c, dkv_err *err) {
    int rc = dkv_maskAdmissible(c->p, err);
    if (!rc) rc = dkv_makeLayout(c->p, &c->packed, err);
    if (!rc) rc = dkv_allocInputs(&c->packed, &c->in, err);
    if (!rc) rc = dkv_fillInputs(c->p, &c->packed, c->options->data_dir, &c->in, err);
    return rc;
}

/* A kernel that declares nothing and fits nothing was held to the loosest bound alone, which a lost response or an
 * ignored dLSE may pass. */
static void admitIgnorance(dkv_case *c) {
    const dkv_result *r = c->result;
    if (r->status != DKV_ST_PASSED || c->kernel.d.arithmetic.declared || r->profile[0] || !anyJudged(r)) return;
    conclude(c, DKV_ST_INCONCLUSIVE, "the kernel declares no arithmetic, and none that is known explains its "
                                     "errors: they are only within what the least precise one allows");
}

/* A verdict on part of the outputs says which part it does not cover. LSE and dSink may be missing from a pass: no line
 * can ask for less of them. */
static void admitAbsence(dkv_case *c) {
    char names[64] = "";
    size_t at = 0;
    const int32_t absent = c->result->absent = c->kernel.d.absent, minor = 1 << DKV_LSE | 1 << DKV_DSINK;
    for (int id = 0; id < DKV_N_OUTPUTS; id++)
        if (isAbsent(c, id))
            at += (size_t)snprintf(names + at, sizeof names - at, "%s%s", at ? ", " : "", dkv_tensorName((dkv_tensor_id)id));
    if (!absent || (c->result->status != DKV_ST_PASSED && c->result->status != DKV_ST_INCONCLUSIVE)) return;
    char why[600];
    snprintf(why, sizeof why, "%.400s%snot judged, for it was not given: %s", c->result->why, c->result->why[0] ? "; " : "",
             names);
    conclude(c, absent & ~minor ? DKV_ST_INCONCLUSIVE : c->result->status, why);
}

/* Where the inputs, or the outputs, come from a file: which, and what was in it. */
static int nameFile(dkv_case *c, const dkv_worker *w, dkv_err *err) {
    const char *name = NULL, *dir = dkv_isFiles(w) ? w->files.dir : dkv_filesDir();
    char path[4200];
    if (dkv_isFiles(w) && w->files.is_open) name = w->files.open.name;
    if (strncmp(c->p->fill, "file:", 5) == 0) name = c->p->fill + 5;
    if (!name || !dir) return 0;
    snprintf(c->result->file, sizeof c->result->file, "%s" DKV_CASE_ENDING, name);
    if (snprintf(path, sizeof path, "%s/%s", dir, c->result->file) >= (int)sizeof path) return 0;
    return dkv_hashFile(path, c->result->file_hash, err);
}

static void runStages(dkv_case *c, dkv_worker *w) {
    dkv_err err = {0};
    dkv_enterPhase(DKV_PHASE_INPUTS);
    const int unfit = dkv_printProblem(c->p, c->result->line, sizeof c->result->line, &err) || prepare(c, &err);
    dkv_enterPhase(DKV_PHASE_OTHER);
    if (unfit) {
        failHarness(c, err.text);
        return;
    }
    c->outcome = dkv_openSide(&c->kernel, w, c->p, c->line, &c->packed, &c->in);
    if (concludeOutcome(c, c->outcome)) return;
    if (c->kernel.d.refused) {
        conclude(c, DKV_ST_UNSUPPORTED, c->kernel.d.reason);
        return;
    }
    if (c->options->ask) return;
    if (c->kernel.d.arithmetic.declared && dkv_checkArithmetic(&c->kernel.d.arithmetic, &err)) {
        conclude(c, DKV_ST_NOT_RUN, err.text);
        return;
    }
    if (nameFile(c, w, &err)) {
        failHarness(c, err.text);
        return;
    }
    c->outcome = runKernel(c);
    if (concludeOutcome(c, c->outcome)) return;
    dkv_enterPhase(DKV_PHASE_JUDGE);
    if (judgeCase(c, &err)) {
        c->result->stopped = dkv_stopRequested != 0;
        failHarness(c, err.text);
        return;
    }
    if (c->options->probes && !c->options->nested) dkv_mapTensors(c);
    dkv_enterPhase(DKV_PHASE_RELEASE);
    dropTwin(c);
    dkv_enterPhase(DKV_PHASE_CHECKS);
    runChecks(c);
    dkv_enterPhase(DKV_PHASE_STRENGTH);
    admitIgnorance(c);
    admitAbsence(c);
    if (c->options->strength && anyJudged(c->result) && dkv_measureStrength(c, &err)) failHarness(c, err.text);
    dkv_enterPhase(DKV_PHASE_OTHER);
    if (c->options->probes && !c->options->nested && dkv_statusRow(c->result->status)->defect) dkv_mapPairs(c, c->options->probes);
    if (c->options->observe) c->options->observe(c, c->options->observe_arg);
}

void dkv_freeCase(dkv_case *c) {
    const dkv_phase before = dkv_enterPhase(DKV_PHASE_RELEASE);
    if (c->has_got) dkv_freePacked(&c->kernel, &c->got);
    dropOracle(c);
    for (int i = 0; i < c->n_runs; i++) dkv_freeRun(&c->run[i]);
    dkv_closeSide(&c->kernel);
    dkv_freeInputs(&c->in);
    dkv_freeLayout(&c->packed);
    dkv_enterPhase(before);
}

/* Another file than the run began with: no one knows which of them did what, and the next process would have the new one. */
static void checkFile(dkv_case *c, const dkv_worker *w) {
    char why[300];
    if (c->options->nested || c->result->stopped || w->spec.kind == DKV_SPEC_ATTACHED) return;
    c->result->changed = dkv_isKernelChanged(w->spec.text, why, sizeof why);
    if (!c->result->changed) return;
    c->result->judged = false;
    c->result->profile[0] = 0;
    conclude(c, DKV_ST_HARNESS_ERROR, why);
}

void dkv_runCase(const dkv_problem *p, dkv_worker *w, const dkv_case_options *options, dkv_result *out) {
    double start = dkv_now();
    dkv_case c = {.p = p, .line = out->line, .options = options, .result = out};
    memset(out, 0, sizeof *out);
    snprintf(out->kernel, sizeof out->kernel, "%s", w->spec.text);
    out->level = options->level;
    if (!options->nested) w->tail[w->tail_n = 0] = 0;
    dkv_phases *others = options->nested ? NULL : dkv_countPhases(&out->phases);
    const dkv_phase before = dkv_enterPhase(DKV_PHASE_OTHER);
    runStages(&c, w);
    checkFile(&c, w);
    snprintf(out->printed, sizeof out->printed, "%s", w->tail);
    out->gpu = w->gpu;
    dkv_freeCase(&c);
    dkv_enterPhase(before);
    if (!options->nested) dkv_countPhases(others);
    out->seconds = dkv_now() - start;
}
