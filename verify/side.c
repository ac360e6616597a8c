#include "side.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "case.h"
#include "phases.h"
#include "../ref/view.h"

static dkv_outcome harness(dkv_side *s, const dkv_err *err) {
    snprintf(s->w->why, sizeof s->w->why, "%s", err->text);
    return DKV_W_HARNESS;
}

double dkv_summedFrom = 0x1p28;

bool dkv_isSummed(const dkv_problem *p) {
    const double rows = dkv_countReplicated(p);
    if (strcmp(p->fill, "duplicated") == 0) return false; /* equal copies err alike, which a sum does not tell */
    return p->dtype != DUALKV_FP32 && rows * (p->hq + (p->grad ? p->hkv : 0)) * (p->dqk + p->dv) > dkv_summedFrom;
}

bool dkv_isSpread(const dkv_side *s) { return s->d.replicated && !s->summed; }
const dkv_layout *dkv_runLayout(const dkv_side *s) { return s->summed ? s->packed : s->l; }

/* The replicated problem, its inputs and the expansion. */
static int replicate(dkv_side *s, const dkv_problem *p, const dkv_layout *packed, const dkv_inputs *in,
                     dkv_err *err) {
    int rc = dkv_makeReplicated(p, packed, &s->rep_layout, &s->q_source, &s->k_source, &s->q_own, err);
    if (!rc) rc = dkv_problemOfView(&s->rep_layout.view, &s->rep, err);
    s->summed = dkv_isSummed(p);
    s->expand = (dkv_expansion){s->q_source, s->k_source, s->q_own, packed->view.tq};
    if (!rc && !s->summed)
        rc = dkv_replicateInputs(packed, &s->rep_layout, s->q_source, s->k_source, s->q_own, in, &s->rep_in,
                                 err);
    s->p = &s->rep;
    s->l = &s->rep_layout;
    if (!s->summed) s->in = &s->rep_in;
    return rc;
}

static bool hasShadow(const dkv_side *s, const dkv_plan *plan) {
    return !s->summed && plan->size < DKV_ARENA_LARGE;
}

/* The problem was seen to fit before; a kernel's workspace is known only now. */
static int checkRoom(const dkv_side *s, const dkv_plan *plan, dkv_err *err) {
    const double gib = 1024.0 * 1024 * 1024, need = (hasShadow(s, plan) ? 2.0 : 1.0) * (double)plan->size / gib;
    if (need < 1) return 0;
    const double room = dkv_availableMemory() / gib;
    if (need <= room) return 0;
    return dkv_fail(err, DKV_EHARNESS, "the kernel's buffers and workspace need %.1f GiB, %.1f GiB are free", need,
                    room);
}

dkv_outcome dkv_openSide(dkv_side *s, dkv_worker *w, const dkv_problem *p, const char *line,
                         const dkv_layout *packed, const dkv_inputs *in) {
    dkv_err err = {0};
    dkv_phase before;
    dkv_plan plan;
    memset(s, 0, sizeof *s);
    s->w = w;
    s->p = p;
    s->l = s->packed = packed;
    s->in = in;
    before = dkv_enterPhase(DKV_PHASE_KERNEL);
    dkv_outcome o = dkv_describeCase(w, line, &s->d);
    dkv_enterPhase(before);
    if (o != DKV_W_OK || s->d.refused) return o;
    if (p->grad && !s->d.has_backward) {
        s->d.refused = 1;
        snprintf(s->d.reason, sizeof s->d.reason, "it has no backward (grad=off checks its forward)");
        return DKV_W_OK;
    }
    before = dkv_enterPhase(DKV_PHASE_INPUTS);
    const int none = s->d.replicated ? replicate(s, p, packed, in, &err) : 0;
    dkv_enterPhase(before);
    if (none) return harness(s, &err);
    bool natural = (p->layout == DKV_CONTIGUOUS || p->layout == DKV_FUSED) && p->seed % 2 == 1;
    int rc = dkv_planBuffers(&s->l->view, p->layout, s->d.alignment, natural, s->d.workspace[0],
                             s->d.workspace[1], &plan, &err);
    if (rc == DKV_EREFUSED) {
        s->d.refused = 1;
        snprintf(s->d.reason, sizeof s->d.reason, "%.390s", err.text);
        return DKV_W_OK;
    }
    if (!rc) rc = checkRoom(s, &plan, &err);
    if (rc || dkv_takeArena(&w->spares, &plan, hasShadow(s, &plan), &s->arena, &err)) return harness(s, &err);
    s->has_arena = true;
    if (getrandom(&s->poison, sizeof s->poison, 0) < 0) s->poison = (uint32_t)(uintptr_t)s->arena.base >> 12;
    return DKV_W_OK;
}

void dkv_closeSide(dkv_side *s) {
    const dkv_phase before = dkv_enterPhase(DKV_PHASE_RELEASE);
    if (s->has_arena && s->w->pid) dkv_giveArena(&s->w->spares, &s->arena);
    else if (s->has_arena) dkv_closeArena(&s->arena);
    if (s->d.replicated) {
        dkv_freeInputs(&s->rep_in);
        dkv_freeLayout(&s->rep_layout);
        dkv_freeProblem(&s->rep);
    }
    free(s->q_source);
    free(s->k_source);
    free(s->q_own);
    memset(s, 0, sizeof *s);
    dkv_enterPhase(before);
}

void dkv_freeRun(dkv_run *r) {
    const dkv_phase before = dkv_enterPhase(DKV_PHASE_RELEASE);
    dkv_freeOutputs(&r->out);
    dkv_enterPhase(before);
}

/* Another forward, after which the buffers are what the run's own left. */
static dkv_outcome runBetween(dkv_side *s) {
    dkv_arena *a = &s->arena;
    const size_t n = (size_t)a->plan.size;
    const bool move = s->w->move;
    uint8_t *held = malloc(2 * n);
    dkv_err err = {0};
    if (!held) {
        dkv_fail(&err, DKV_EHARNESS, "out of memory to hold the kernel's buffers");
        return harness(s, &err);
    }
    memcpy(held, a->base, n);
    memcpy(held + n, a->shadow, n);
    dkv_fillArena(a, a->pattern, s->between, NULL);
    s->w->move = false;
    const dkv_outcome o = dkv_launchCase(s->w, a, 0, NULL, NULL, NULL);
    s->w->move = move;
    s->w->resend = true;
    memcpy(a->base, held, n);
    memcpy(a->shadow, held + n, n);
    a->in = s->in;
    free(held);
    return o;
}

bool dkv_takesBetween(const dkv_side *s) { return s->arena.shadow && s->arena.plan.size <= DKV_ARENA_SMALL; }
static bool hasBetween(const dkv_side *s) { return s->between && dkv_takesBetween(s); }

static dkv_outcome run(dkv_side *s, int index, dkv_run *out) {
    dkv_err err = {0};
    memset(out, 0, sizeof *out);
    if (dkv_allocOutputs(dkv_runLayout(s), &out->out, &err)) return harness(s, &err);
    dkv_fillArena(&s->arena, dkv_poisonPattern(s->poison, index), s->in, s->summed ? &s->expand : NULL);
    for (int backward = 0; backward <= (s->p->grad ? 1 : 0); backward++) {
        dkv_enterPhase(DKV_PHASE_KERNEL);
        dkv_outcome o = backward && hasBetween(s) ? runBetween(s) : DKV_W_OK;
        if (o == DKV_W_OK && backward) dkv_poisonWorkspace(&s->arena);
        if (o == DKV_W_OK)
            o = dkv_launchCase(s->w, &s->arena, backward, &out->seconds[backward], &out->launches[backward], &out->peak);
        s->w->resend = false;
        if (o != DKV_W_OK) return o;
        dkv_enterPhase(DKV_PHASE_GATHER);
        dkv_checkArena(&s->arena, backward, &out->damage);
        if (out->damage.no_room) {
            dkv_fail(&err, DKV_EHARNESS, "out of memory to compare the kernel's buffers with what they held");
            return harness(s, &err);
        }
        if (!s->summed) dkv_gatherOutputs(&s->arena, s->p->dtype, backward, &out->out);
        else if (dkv_sumOutputs(&s->arena, s->p->dtype, backward, s->packed, &out->out, &out->bits, &err))
            return harness(s, &err);
        for (int id = 0; id < DKV_N_OUTPUTS; id++)
            if ((id >= DKV_DQ) == (backward == 1) && !(s->d.absent & 1 << id))
                out->poison[id] = dkv_countPoison(&s->arena, (dkv_tensor_id)id, &out->first[id]);
    }
    out->done = true;
    return DKV_W_OK;
}

dkv_outcome dkv_runSide(dkv_side *s, int index, dkv_run *out) {
    const dkv_phase before = dkv_enterPhase(DKV_PHASE_FILL);
    const dkv_outcome o = run(s, index, out);
    dkv_enterPhase(before);
    return o;
}

int dkv_packRun(const dkv_side *s, const dkv_layout *packed, const dkv_outputs *from, dkv_outputs *to,
                dkv_err *err) {
    if (!dkv_isSpread(s)) {
        *to = *from;
        return 0;
    }
    const dkv_phase before = dkv_enterPhase(DKV_PHASE_GATHER);
    int rc = dkv_allocOutputs(packed, to, err);
    if (!rc) rc = dkv_packOutputs(packed, &s->rep_layout, s->q_source, s->k_source, s->q_own, from, to, err);
    dkv_enterPhase(before);
    return rc;
}

void dkv_freePacked(const dkv_side *s, dkv_outputs *packed) {
    if (dkv_isSpread(s)) dkv_freeOutputs(packed);
    memset(packed, 0, sizeof *packed);
}
