/* The fault catalogue, and other rounding points, applied to the emulated kernel in this process: the same
 * buffers and poison as a kernel under test has, so that stray writes and NaN read past an end come out
 * alike. Backward starts from the O and LSE of the kernel under test. */
#include "hypothes.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../data/fill.h"
#include "../ref/dtype.h"
#include "../ref/emu.h"
#include "../ref/view.h"

#define OPTIONS_MAX 1024

struct dkv_emulator {
    const dualkv_kernel *table;
    char options[OPTIONS_MAX];
    const dkv_problem *p; /* packed or replicated */
    const dkv_layout *l;
    dkv_problem rep;
    dkv_layout rep_layout;
    int64_t *q_source, *k_source;
    uint8_t *q_own;
    dkv_outputs rep_out; /* replicated only */
    dkv_arena arena;
    bool has_arena;
    void *o; /* the kernel's own, for backward: in its dtype */
    float *lse;
};

/* Options of the emulated kernel nearest to what is declared. */
static void chooseOptions(const dkv_explain_in *in, char *out, size_t n) {
    const dualkv_arithmetic *a = in->a;
    const bool tc = a->acc_truncates && in->p->dtype != DUALKV_FP32;
    size_t at = 0;
    int bn = a->key_tile > 0 && a->key_tile <= 1024 ? a->key_tile : 64;
    if (tc && bn % 16) bn = 64;
    at += (size_t)snprintf(out, n, "bn=%d,bm=%d,acc=%s", bn, bn > 64 ? bn : 64, tc ? "tc" : "rn");
    if (a->key_order) at += (size_t)snprintf(out + at, n - at, ",order=down");
    if (a->p_format == DUALKV_EXACT && in->p->dtype != DUALKV_FP32 && !tc)
        at += (size_t)snprintf(out + at, n - at, ",p=exact");
    else if (a->p_normalised) at += (size_t)snprintf(out + at, n - at, ",p=normalised");
    if (a->delta_exact) at += (size_t)snprintf(out + at, n - at, ",delta=exact");
    if (a->partial_format >= 0 && in->p->dtype != DUALKV_FP32)
        at += (size_t)snprintf(out + at, n - at, ",partials=low");
    if (a->s_format >= 0 && in->p->dtype != DUALKV_FP32)
        at += (size_t)snprintf(out + at, n - at, ",scores=low");
    if (a->in_format == DUALKV_TF32 && in->p->dtype == DUALKV_FP32) at += (size_t)snprintf(out + at, n - at, ",in=tf32");
    if (a->max_slack > 0) at += (size_t)snprintf(out + at, n - at, ",lazy=%.0f", a->max_slack * 1.4426950408889634);
    if (a->sink_first) snprintf(out + at, n - at, ",sink=first");
}

/* The caller's options without what is planted in them. */
static void takeOptions(const char *from, char *out, size_t n) {
    size_t at = 0;
    out[0] = 0;
    for (const char *w = from; *w;) {
        const size_t len = strcspn(w, ",");
        if (strncmp(w, "fault=", 6) != 0 && strncmp(w, "undeclared", 10) != 0 && at + len + 2 < n)
            at += (size_t)snprintf(out + at, n - at, "%s%.*s", at ? "," : "", (int)len, w);
        w += len + (w[len] == ',');
    }
}

static int replicate(dkv_inquiry *q, dkv_err *err) {
    struct dkv_emulator *e = q->emu;
    int rc = dkv_makeReplicated(q->in->p, q->in->l, &e->rep_layout, &e->q_source, &e->k_source, &e->q_own,
                                err);
    if (!rc) rc = dkv_problemOfView(&e->rep_layout.view, &e->rep, err);
    if (!rc) rc = dkv_allocOutputs(&e->rep_layout, &e->rep_out, err);
    e->p = &e->rep;
    e->l = &e->rep_layout;
    return rc;
}

/* The kernel's O and LSE as backward reads them, in the emulated kernel's layout. */
static int takeOwn(dkv_inquiry *q, dkv_err *err) {
    struct dkv_emulator *e = q->emu;
    const dualkv_problem *v = &e->l->view;
    const int64_t tq = q->in->l->view.tq, w = (int64_t)v->hq * v->dv;
    const size_t elt = dkv_dtypeSize(q->in->p->dtype);
    const double *o = q->in->got->o, *lse = q->in->got->lse;
    if (!o || !lse) return 0;
    e->o = malloc((size_t)(v->tq * w) * elt + 1);
    e->lse = malloc((size_t)(v->tq * v->hq) * sizeof *e->lse + 1);
    if (!e->o || !e->lse) return dkv_fail(err, DKV_EHARNESS, "out of memory");
    for (int64_t t = 0; t < v->tq; t++) {
        const int64_t from = q->in->replicated ? e->q_source[t] : t;
        dkv_encodeArray(o + from * w, q->in->p->dtype, (size_t)w, (char *)e->o + (size_t)(t * w) * elt);
        for (int h = 0; h < v->hq; h++) e->lse[h * v->tq + t] = (float)lse[h * tq + from];
    }
    return 0;
}

int dkv_openEmulator(dkv_inquiry *q, dkv_err *err) {
    const dkv_explain_in *in = q->in;
    struct dkv_emulator *e = q->emu = calloc(1, sizeof *e);
    dkv_plan plan;
    int rc = 0;
    if (!e) return dkv_fail(err, DKV_EHARNESS, "out of memory");
    e->table = in->replicated ? &dkv_emuReplicatedKernel : &dkv_emuKernel;
    e->p = in->p;
    e->l = in->l;
    if (in->emu) takeOptions(in->emu, e->options, sizeof e->options);
    else chooseOptions(in, e->options, sizeof e->options);
    if (in->replicated) rc = replicate(q, err);
    if (!rc) rc = takeOwn(q, err);
    const bool natural = (in->p->layout == DKV_CONTIGUOUS || in->p->layout == DKV_FUSED) &&
                         in->p->seed % 2 == 1;
    if (!rc)
        rc = dkv_planBuffers(&e->l->view, in->p->layout, e->table->alignment, natural, 0,
                             in->p->grad ? e->table->workspace(NULL, &e->l->view, 1) : 0, &plan, err);
    if (!rc) rc = dkv_openArena(&plan, true, &e->arena, err);
    e->has_arena = !rc;
    return rc;
}

void dkv_closeEmulator(dkv_inquiry *q) {
    struct dkv_emulator *e = q->emu;
    if (!e) return;
    if (e->has_arena) dkv_closeArena(&e->arena);
    if (q->in->replicated) {
        dkv_freeOutputs(&e->rep_out);
        dkv_freeLayout(&e->rep_layout);
        dkv_freeProblem(&e->rep);
    }
    free(e->q_source);
    free(e->k_source);
    free(e->q_own);
    free(e->o);
    free(e->lse);
    free(e);
    q->emu = NULL;
}

/* As forward had left them, in what is there and in what must be there. */
static void putOwn(struct dkv_emulator *e) {
    dkv_arena shadow = e->arena;
    if (!e->o) return;
    shadow.base = shadow.shadow;
    for (int i = 0; i < 2; i++) {
        dkv_putTensor(i ? &shadow : &e->arena, DKV_SLOT_O, e->o);
        dkv_putTensor(i ? &shadow : &e->arena, DKV_SLOT_LSE, e->lse);
    }
}

static int launch(struct dkv_emulator *e, void *self, int backward, dkv_err *err) {
    char why[200];
    dualkv_launch l;
    dkv_makeLaunch(&e->arena.plan, e->arena.base, &e->l->view, backward, &l);
    int rc = (backward ? e->table->backward : e->table->forward)(self, &l, why, sizeof why);
    return rc ? dkv_fail(err, DKV_EHARNESS, "%.199s", why) : 0;
}

/* Another problem on the same instance, where the line has one between (run=aba): what faults keep from it.
 */
static int runBetween(const dkv_inquiry *q, void *self, dkv_err *err) {
    struct dkv_emulator *e = q->emu;
    dkv_problem p = *q->in->p, shape = {0};
    dkv_layout l = {0};
    dkv_inputs in = {0};
    dkv_plan plan;
    dkv_arena arena;
    dualkv_launch launch_other;
    char why[200];
    int rc = dkv_parseProblem("shape=19+2x7,1/3+5", NULL, &shape, err);
    p.nodes = shape.nodes;
    p.n_nodes = shape.n_nodes;
    p.n_groups = shape.n_groups;
    p.run = DKV_SINGLE;
    if (!rc) rc = dkv_makeLayout(&p, &l, err);
    if (!rc) rc = dkv_allocInputs(&l, &in, err);
    if (!rc)
        rc = dkv_planBuffers(&l.view, p.layout, e->table->alignment, true, 0,
                             p.grad ? e->table->workspace(NULL, &l.view, 1) : 0, &plan, err);
    if (!rc && !(rc = dkv_openArena(&plan, true, &arena, err))) {
        dkv_fillArena(&arena, dkv_poisonPattern(0, 0), &in, NULL);
        for (int backward = 0; backward <= (p.grad ? 1 : 0); backward++) {
            dkv_makeLaunch(&arena.plan, arena.base, &l.view, backward, &launch_other);
            (backward ? e->table->backward : e->table->forward)(self, &launch_other, why, sizeof why);
        }
        dkv_closeArena(&arena);
    }
    dkv_freeInputs(&in);
    dkv_freeLayout(&l);
    dkv_freeProblem(&shape);
    return rc;
}

static int runOnce(dkv_inquiry *q, void *self, const dkv_inputs *in, bool own, dkv_prediction *out,
                   dkv_err *err) {
    struct dkv_emulator *e = q->emu;
    const dkv_outputs *to = q->in->replicated ? &e->rep_out : &out->out;
    memset(&out->damage, 0, sizeof out->damage);
    dkv_fillArena(&e->arena, dkv_poisonPattern(0, 0), in, NULL);
    for (int backward = 0; backward <= (q->in->p->grad ? 1 : 0); backward++) {
        if (backward && own) putOwn(e);
        if (backward) dkv_poisonWorkspace(&e->arena);
        int rc = launch(e, self, backward, err);
        if (rc) return rc;
        dkv_checkArena(&e->arena, backward, &out->damage);
        dkv_gatherOutputs(&e->arena, q->in->p->dtype, backward, to);
    }
    return 0;
}

int dkv_emulate(dkv_inquiry *q, const char *options, const dkv_inputs *in, bool own, dkv_prediction *out,
                dkv_err *err) {
    struct dkv_emulator *e = q->emu;
    char all[OPTIONS_MAX + 64], why[200];
    dkv_inputs rep = {0};
    snprintf(all, sizeof all, "%s%s%s", e->options, *e->options && *options ? "," : "", options);
    void *self = e->table->open(all, why, sizeof why);
    if (!self) return DKV_REFUSED;
    int rc = e->table->refuses(self, &e->l->view) ? DKV_REFUSED : 0;
    if (!rc && q->in->replicated)
        rc = dkv_replicateInputs(q->in->l, e->l, e->q_source, e->k_source, e->q_own, in, &rep, err);
    const dkv_inputs *from = q->in->replicated ? &rep : in;
    if (!rc) rc = runOnce(q, self, from, own, out, err);
    if (!rc && q->in->p->run == DKV_ABA) {
        for (int i = 0; i < 2 && !rc; i++) rc = runBetween(q, self, err);
        if (!rc) rc = runOnce(q, self, from, own, out, err);
    }
    e->table->close(self);
    if (!rc && q->in->replicated)
        rc = dkv_packOutputs(q->in->l, e->l, e->q_source, e->k_source, e->q_own, &e->rep_out, &out->out, err);
    if (q->in->replicated) dkv_freeInputs(&rep);
    return rc;
}

static int tryOptions(dkv_inquiry *q, const char *family, const char *name, const char *doc,
                      const char *options, dkv_err *err) {
    if (dkv_isExcluded(q, name)) return 0;
    int rc = dkv_emulate(q, options, q->in->in, true, &q->work, err);
    if (rc == DKV_REFUSED) return 0;
    if (rc) return rc;
    return dkv_addGuess(q, family, name, doc, DKV_ALL_PARTS, &q->work)
               ? 0
               : dkv_fail(err, DKV_EHARNESS, "out of memory");
}

int dkv_guessFaults(dkv_inquiry *q, int rows, dkv_err *err) {
    const dkv_fault *f;
    int rc = 0;
    for (int i = 0; q->catalogue && (f = dkv_listFault(i)) && !rc && !dkv_outOfTime(q); i++) {
        char options[64], name[64];
        if (f->control || dkv_isExcluded(q, f->id)) continue;
        snprintf(options, sizeof options, rows ? "fault=%s,bm=%d" : "fault=%s", f->id, rows);
        snprintf(name, sizeof name, rows ? "%s (query tile %d)" : "%s", f->id, rows);
        rc = tryOptions(q, "fault", name, f->doc, options, err);
    }
    return rc;
}

/* One more or one less rounding; where the kernel has it already, the emulation prints the clean result. */
static const struct {
    const char *name, *options, *doc;
} roundings[] = {
    {"P normalised", "p=normalised", "P is divided by its sum before it is rounded"},
    {"P unrounded", "p=exact", "P and dS are not rounded to the 16-bit type"},
    {"P rounded", "p=rounded", "P and dS are rounded to the 16-bit type"},
    {"delta unrounded", "delta=exact", "delta is formed from O before its rounding"},
    {"delta rounded", "delta=rounded", "delta is formed from the rounded O"},
    {"partials in 16 bit", "partials=low",
     "dK and dV of each query head are rounded to 16 bit before the sum over heads"},
    {"partials exact", "partials=exact", "dK and dV are summed over query heads before they are rounded"},
    {"scores in 16 bit", "scores=low", "scores and dP are rounded to 16 bit"},
    {"scores exact", "scores=exact", "scores and dP are not rounded"},
    {"TF32 operands", "in=tf32", "operands of the products are rounded to TF32"},
    {"fp32 operands", "in=exact", "operands of the products are not rounded"},
    {"truncating sums", "acc=tc", "products are summed as tensor cores do, toward zero"},
    {"sums to nearest", "acc=rn", "products are summed in fp32, to nearest"},
    {"tiles last first", "order=down", "key tiles are walked from the last to the first"},
    {"tiles first first", "order=up", "key tiles are walked from the first to the last"},
    {"key tile 32", "bn=32", "the key tile is 32"},
    {"key tile 64", "bn=64", "the key tile is 64"},
    {"key tile 128", "bn=128", "the key tile is 128"},
};

int dkv_guessRoundings(dkv_inquiry *q, dkv_err *err) {
    int rc = 0;
    for (size_t i = 0; q->catalogue && i < sizeof roundings / sizeof *roundings && !rc && !dkv_outOfTime(q);
         i++)
        rc = tryOptions(q, "arithmetic", roundings[i].name, roundings[i].doc, roundings[i].options, err);
    return rc;
}
