#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "derive.h"
#include "spans.h"

/* The branch that is watched: in the group with most segments, the last one with queries, and its ancestors.
 * All else is changed. */
static int32_t findBranch(const dkv_problem *p, bool *watched) {
    int32_t leaf = -1, last = -1, size = 0, most = 0;
    for (int32_t i = 0; i < p->n_nodes; i++) {
        bool starts = p->nodes[i].parent<0, has_queries = p->nodes[i].len> 0 && !p->nodes[i].key_only;
        size = starts ? 1 : size + (p->nodes[i].len > 0);
        last = has_queries ? i : starts ? -1 : last;
        if (last < 0 || size < most) continue;
        most = size;
        leaf = last;
    }
    for (int32_t i = leaf; i >= 0; i = p->nodes[i].parent) watched[i] = true;
    return leaf;
}

/* Other numbers of the same size in every segment that is not watched. */
static void changeOthers(const dkv_case *c, const bool *watched, dkv_inputs *in) {
    for (int32_t i = 0; i < c->packed.view.n_segments; i++)
        if (!watched[i]) dkv_negateTokens(c, i, 0, in);
}

typedef struct tally {
    int64_t outside, bits;     /* elements beyond the bound; elements whose bits changed */
    dkv_tensor_id id, bits_id; /* of the first of each */
    int64_t first, bits_first;
} tally;

typedef struct compare_loop {
    const dkv_case *c;
    const dkv_outputs *got;
    dkv_tensor_id id;
    int64_t from;
    tally of[DKV_SPANS];
} compare_loop;

static void compareSpan(int64_t begin, int64_t end, int span, void *arg) {
    compare_loop *w = arg;
    const dkv_case *c = w->c;
    const dkv_tensor_id id = w->id;
    tally *t = &w->of[span];
    const double *was = dkv_outputAt(&c->got, id), *now = dkv_outputAt(w->got, id);
    const double *truth = dkv_outputAt(&c->oracle.truth, id), *bound = dkv_outputAt(&c->oracle.bound, id);
    for (int64_t i = w->from + begin; i < w->from + end; i++) {
        if (memcmp(&was[i], &now[i], sizeof *was) != 0 && t->bits++ == 0) {
            t->bits_id = id;
            t->bits_first = i;
        }
        if (!isfinite(truth[i]) || !isfinite(bound[i]) || bound[i] == DKV_UNCLAIMED) continue;
        const bool moved = fabs(was[i] - truth[i]) <= bound[i] || !(fabs(now[i] - was[i]) <= bound[i]);
        if (memcmp(&was[i], &now[i], sizeof *was) == 0 || !moved) continue; /* wrong without the others, too */
        if (!(fabs(now[i] - truth[i]) <= bound[i]) && t->outside++ == 0) {
            t->id = id;
            t->first = i;
        }
    }
}

/* Elements [from, from + n) of a tensor of the watched branch: the truth of the unchanged problem holds for
 * them. */
static void compare(const dkv_case *c, const dkv_outputs *got, dkv_tensor_id id, int64_t from, int64_t n,
                    tally *t) {
    compare_loop w = {.c = c, .got = got, .id = id, .from = from};
    if (c->kernel.d.absent >> id & 1 || !dkv_outputAt(&c->got, id)) return;
    dkv_eachSpan(n, (double)n, compareSpan, &w);
    for (int i = 0; i < DKV_SPANS; i++) {
        const tally *x = &w.of[i];
        if (x->bits && !t->bits) t->bits_id = id, t->bits_first = x->bits_first;
        if (x->outside && !t->outside) t->id = id, t->first = x->first;
        t->bits += x->bits;
        t->outside += x->outside;
    }
}

static void compareBranch(const dkv_case *c, const dkv_outputs *got, const bool *watched, int32_t leaf,
                          tally *t) {
    const dualkv_problem *v = &c->packed.view;
    for (int32_t i = 0; i < v->n_segments; i++) {
        const dualkv_segment *s = &v->segments[i];
        if (!watched[i]) continue;
        compare(c, got, DKV_O, s->q_start * v->hq * v->dv, s->q_len * v->hq * v->dv, t);
        for (int32_t h = 0; h < v->hq; h++) compare(c, got, DKV_LSE, h * v->tq + s->q_start, s->q_len, t);
        compare(c, got, DKV_DQ, s->q_start * v->hq * v->dqk, s->q_len * v->hq * v->dqk, t);
        if (i != leaf) continue; /* ancestors' keys hear from every descendant */
        compare(c, got, DKV_DK, s->k_start * v->hkv * v->dqk, s->k_len * v->hkv * v->dqk, t);
        compare(c, got, DKV_DV, s->k_start * v->hkv * v->dv, s->k_len * v->hkv * v->dv, t);
    }
}

static void judgeTally(const dkv_case *c, const dkv_outputs *got, const tally *t, dkv_finding *f) {
    char where[160];
    dkv_findNothing(f);
    if (t->outside) {
        dkv_nameElement(&c->packed, t->id, t->first, where, sizeof where);
        dkv_find(f, DKV_CHECK_DEFECT, DKV_ST_LEAKED,
                 "other branches' inputs reach this one: with them changed, %s at %s is %.9g instead of "
                 "%.9g; %lld "
                 "elements are wrong",
                 dkv_tensorName(t->id), where, dkv_outputAt(got, t->id)[t->first],
                 dkv_outputAt(&c->oracle.truth, t->id)[t->first], (long long)t->outside);
    } else if (t->bits && c->kernel.d.deterministic) {
        dkv_nameElement(&c->packed, t->bits_id, t->bits_first, where, sizeof where);
        dkv_find(f, DKV_CHECK_NOTE, DKV_ST_PASSED,
                 "bits depend on other branches: %lld elements, the first of %s at %s", (long long)t->bits,
                 dkv_tensorName(t->bits_id), where);
    }
}

/* Runs the kernel on other inputs: in buffers of their own or, where these are large, in those of the case, whose outputs
 * have been taken. */
static dkv_outcome runOther(dkv_case *c, const dkv_inputs *in, dkv_side *side, dkv_run *run) {
    const dkv_inputs *own = c->kernel.in;
    if (!c->kernel.summed && (c->kernel.d.replicated || c->kernel.arena.shadow)) {
        dkv_outcome o = dkv_openSide(side, c->kernel.w, c->p, c->line, &c->packed, in);
        return o == DKV_W_OK ? dkv_runSide(side, DKV_RUNS_MAX, run) : o;
    }
    c->kernel.in = in;
    dkv_outcome o = dkv_runSide(&c->kernel, DKV_RUNS_MAX, run);
    c->kernel.in = own;
    return o;
}

void dkv_checkSiblings(dkv_case *c, dkv_finding *f) {
    bool *watched = calloc((size_t)c->p->n_nodes + 1, sizeof *watched);
    dkv_inputs in = {0};
    dkv_side side = {0};
    dkv_run run = {0};
    dkv_outputs packed = {0};
    dkv_err err = {0};
    tally t = {0};
    int32_t leaf = watched ? findBranch(c->p, watched) : -1, others = 0;
    for (int32_t i = 0; leaf >= 0 && i < c->p->n_nodes; i++) others += !watched[i] && c->p->nodes[i].len > 0;
    if (others == 0 || c->options->nested || dkv_isFiles(c->kernel.w)) goto done;
    if (dkv_copyInputs(c, &in, &err)) {
        dkv_find(f, DKV_CHECK_DEFECT, DKV_ST_HARNESS_ERROR, "%.300s", err.text);
        goto done;
    }
    changeOthers(c, watched, &in);
    dkv_outcome o = runOther(c, &in, &side, &run);
    if (!dkv_cameThrough(c, o, "other branches' inputs changed", f)) goto done;
    if (dkv_packRun(side.w ? &side : &c->kernel, &c->packed, &run.out, &packed, &err)) {
        dkv_find(f, DKV_CHECK_DEFECT, DKV_ST_HARNESS_ERROR, "%.300s", err.text);
        goto done;
    }
    compareBranch(c, &packed, watched, leaf, &t);
    judgeTally(c, &packed, &t, f);
done:
    dkv_freePacked(&side, &packed);
    dkv_freeRun(&run);
    dkv_closeSide(&side);
    dkv_freeInputs(&in);
    free(watched);
}
