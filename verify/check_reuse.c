/* Other data in the buffers of the last run, then the first Q, K and V again in other buffers, with dO and dLSE of the other
 * sign, and with a forward of the other data between its forward and its backward: a kernel that remembers by address, by the
 * first bytes of a tensor, gradients by Q, K and V, or what its last forward saw, gives what is another's.
 *
 * The other data need no oracle of their own. In the last KV head, and the query heads that use it, the upper half of the
 * channels changes its sign: of Q and K together (no score changes; dQ and dK do their sign), of V and dO together (dP does
 * not change; O and dV do their sign). Where the seed is even, heads are moved on by one besides, so that scores change,
 * too. Truth and bound move along: rounding is symmetric. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../ref/dtype.h"
#include "derive.h"
#include "spans.h"

typedef struct moves {
    int32_t hq, hkv;
    bool rotated;
    bool negated; /* nothing but this: dO and dLSE change their sign, and gradients with them */
} moves;

/* Head whose data head h has, of Q-like (n = hq) and K-like tensors. */
static int32_t sourceHead(const moves *m, int32_t h, bool by_key) {
    int32_t group = m->hq / m->hkv;
    if (!m->rotated || m->negated) return h;
    if (by_key) return (h + 1) % m->hkv;
    return m->hkv > 1 ? (h + group) % m->hq : (h + 1) % m->hq;
}

/* A channel of a head of Q, K, V, dO, or of O and their gradients. `negates`: it is dO, or a gradient. */
static bool flipped(const moves *m, int32_t h, bool by_key, bool negates, int32_t c, int32_t dim) {
    int32_t kvh = by_key ? h : h / (m->hq / m->hkv);
    return m->negated ? negates : kvh == m->hkv - 1 && c >= dim / 2;
}

typedef struct move_loop {
    const moves *m;
    const void *from;
    void *to;
    bool by_key, negates;
    int32_t dim;
    size_t elt;
} move_loop;

static void moveSpan(int64_t first, int64_t end, int span, void *arg) {
    const move_loop *l = arg;
    const moves *m = l->m;
    const bool by_key = l->by_key;
    const int32_t heads = by_key ? m->hkv : m->hq, dim = l->dim;
    const size_t elt = l->elt;
    (void)span;
    for (int64_t t = first; t < end; t++)
        for (int32_t h = 0; h < heads; h++) {
            char *x = (char *)l->to + (size_t)((t * heads + h) * dim) * elt;
            memcpy(x, (const char *)l->from + (size_t)((t * heads + sourceHead(m, h, by_key)) * dim) * elt, (size_t)dim * elt);
            for (int32_t c = 0; c < dim; c++)
                if (flipped(m, h, by_key, l->negates, c, dim)) x[(size_t)(c + 1) * elt - 1] ^= (char)0x80; /* the sign's byte */
        }
}

static void moveVectors(const moves *m, const void *from, void *to, int64_t rows, bool by_key, bool negates, int32_t dim,
                        size_t elt) {
    move_loop l = {m, from, to, by_key, negates, dim, elt};
    if (from) dkv_eachSpan(rows, (double)rows * (by_key ? m->hkv : m->hq) * dim, moveSpan, &l);
}

static int moveInputs(const dkv_side *s, const moves *m, dkv_inputs *out, dkv_err *err) {
    const dkv_layout *l = dkv_runLayout(s); /* s->in is shaped for it */
    const dualkv_problem *v = &l->view;
    const dkv_inputs *in = s->in;
    size_t elt = dkv_dtypeSize((dualkv_dtype)v->dtype);
    int rc = dkv_allocInputs(l, out, err);
    if (rc) return rc;
    moveVectors(m, in->q, out->q, v->tq, false, false, v->dqk, elt);
    moveVectors(m, in->k, out->k, v->tk, true, false, v->dqk, elt);
    moveVectors(m, in->v, out->v, v->tk, true, false, v->dv, elt);
    moveVectors(m, in->d_o, out->d_o, v->tq, false, true, v->dv, elt);
    for (int32_t h = 0; h < v->hq; h++) {
        int32_t from = sourceHead(m, h, false);
        for (int64_t t = 0; in->d_lse && t < v->tq; t++)
            out->d_lse[h * v->tq + t] = (m->negated ? -1 : 1) * in->d_lse[from * v->tq + t];
        if (in->sink) out->sink[h] = in->sink[from];
    }
    return 0;
}

typedef struct moved_loop {
    const dkv_case *c;
    const moves *m;
    const dkv_outputs *got;
    dkv_tensor_id id;
    dkv_tally of[DKV_SPANS];
} moved_loop;

static void movedSpan(int64_t first, int64_t end, int span, void *arg) {
    moved_loop *l = arg;
    const dkv_case *c = l->c;
    const moves *m = l->m;
    const dkv_tensor_id id = l->id;
    const dkv_outputs *got = l->got;
    dkv_tally *t = &l->of[span];
    const dualkv_problem *v = &c->packed.view;
    const double *x = dkv_outputAt(got, id), *truth = dkv_outputAt(&c->oracle.truth, id);
    const double *bound = dkv_outputAt(&c->oracle.bound, id), *own = dkv_outputAt(&c->got, id);
    const bool guessed = !c->kernel.d.arithmetic.declared, negates = id >= DKV_DQ;
    const dkv_vectors g = dkv_vectorsOf(v, id);
    const int32_t dim = (int32_t)g.d;
    for (int64_t r = first; r < end; r++)
        for (int32_t h = 0; h < g.heads; h++) {
            const int64_t at = dkv_vectorAt(&g, r, h), was = dkv_vectorAt(&g, r, sourceHead(m, h, g.keys));
            for (int32_t k = 0; k < dim; k++) {
                const bool flips = m->negated ? negates : !g.by_head && !g.sums && flipped(m, h, g.keys, negates, k, dim);
                double sign = flips ? -1 : 1, want = sign * truth[was + k];
                double allowed = bound[was + k];
                if (!dkv_isClaimed(c, id, want, allowed)) continue;
                if (guessed && !isfinite(own[was + k])) continue; /* said elsewhere */
                dkv_compareValues(guessed ? sign * own[was + k] : want, x[at + k], want, want, guessed ? 2 * allowed : allowed,
                                  id, at + k, t);
            }
        }
}

/* One tensor of a run against the truth, moved along. Where no arithmetic is declared the bound is that of a guess from the
 * kernel's own values: then against those values, each of the two within the bound. */
static void compareMoved(const dkv_case *c, const moves *m, const dkv_outputs *got, dkv_tensor_id id, dkv_tally *t) {
    const dkv_vectors g = dkv_vectorsOf(&c->packed.view, id);
    moved_loop l = {.c = c, .m = m, .got = got, .id = id};
    if (!dkv_outputAt(got, id) || (c->kernel.d.absent >> id & 1)) return;
    dkv_eachSpan(g.rows, (double)g.rows * (double)(g.heads * g.d), movedSpan, &l);
    for (int i = 0; i < DKV_SPANS; i++) dkv_addTally(&l.of[i], t);
}

/* One run with moved inputs (with `between`, a forward of others before its backward), and what it says. */
static bool runMoved(dkv_case *c, const moves *m, const moves *between, int index, const char *what, dkv_finding *f) {
    dkv_side *s = &c->kernel;
    const dkv_inputs *own = s->in;
    dkv_inputs moved = {0}, others = {0};
    dkv_run run = {0};
    dkv_outputs packed = {0};
    dkv_err err = {0};
    dkv_tally t = {0};
    if (moveInputs(s, m, &moved, &err) || (between && moveInputs(s, between, &others, &err))) {
        dkv_find(f, DKV_CHECK_DEFECT, DKV_ST_HARNESS_ERROR, "%.300s", err.text);
        goto done;
    }
    s->in = &moved;
    s->between = between ? &others : NULL;
    dkv_outcome o = dkv_runSide(s, index, &run);
    s->in = own;
    s->between = NULL;
    if (!dkv_cameThrough(c, o, what, f)) goto done;
    if (dkv_packRun(&c->kernel, &c->packed, &run.out, &packed, &err)) {
        dkv_find(f, DKV_CHECK_DEFECT, DKV_ST_HARNESS_ERROR, "%.300s", err.text);
        goto done;
    }
    for (int id = 0; id < DKV_N_OUTPUTS; id++) compareMoved(c, m, &packed, (dkv_tensor_id)id, &t);
    dkv_judgeTally(c, &t, DKV_ST_FAILED, what, NULL, f);
    if (f->state != DKV_CHECK_DEFECT && run.damage.outside)
        dkv_find(f, DKV_CHECK_DEFECT, DKV_ST_OUT_OF_BOUNDS, "with %s: %.120s", what, run.damage.outside_where);
    if (f->state != DKV_CHECK_DEFECT && run.damage.mutated)
        dkv_find(f, DKV_CHECK_DEFECT, DKV_ST_INPUT_MUTATED, "with %s: %.120s", what, run.damage.mutated_where);
done:
    dkv_freePacked(&c->kernel, &packed);
    dkv_freeRun(&run);
    dkv_freeInputs(&moved);
    dkv_freeInputs(&others);
    return f->state != DKV_CHECK_DEFECT;
}

void dkv_checkReuse(dkv_case *c, dkv_finding *f) {
    dkv_side *s = &c->kernel;
    const moves other = {c->p->hq, c->p->hkv, c->p->seed % 2 == 0 && !c->p->alibi, false};
    const moves again = {c->p->hq, c->p->hkv, false, true};
    bool foreign = s->w && s->w->spec.kind != DKV_SPEC_NAME;
    if (c->options->nested || dkv_isFiles(s->w) || (!foreign && !dkv_worthDeriving(c, "reuse"))) return;
    dkv_description told; /* other checks have told the kernel of other problems */
    if (!dkv_cameThrough(c, dkv_describeCase(s->w, c->line, &told), "the case described again", f)) return;
    if (!runMoved(c, &other, NULL, DKV_RUNS_MAX, "other data in the same buffers", f)) return;
    const bool between = s->in->d_o && dkv_takesBetween(s);
    s->w->move = true;
    runMoved(c, &again, between ? &other : NULL, DKV_RUNS_MAX + 1,
             !s->in->d_o ? "the same data in other buffers"
             : between   ? "the same Q, K and V in other buffers, dO with the other sign, another forward before its backward"
                         : "the same Q, K and V in other buffers, dO with the other sign", f);
    s->w->move = false;
}
