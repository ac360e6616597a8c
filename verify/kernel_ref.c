/* The references as kernels of the public ABI: the truth in double precision, outputs rounded to their type.
 * They judge the harness (a correct kernel must pass) and are what `bench` compares with. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../ref/dtype.h"
#include "../ref/reference.h"
#include "kernel.h"
#include "../ref/view.h"

typedef struct instance {
    int replicated; /* the naive reference on replicated sequences */
    uint64_t launches;
} instance;

static void *openRef(const char *options, char *err, size_t n, int replicated) {
    if (options[0]) {
        snprintf(err, n, "takes no option ('%s')", options);
        return NULL;
    }
    instance *s = calloc(1, sizeof *s);
    if (!s) snprintf(err, n, "out of memory");
    else s->replicated = replicated;
    return s;
}

static void *openBlocked(const char *options, char *err, size_t n) { return openRef(options, err, n, 0); }
static void *openNaive(const char *options, char *err, size_t n) { return openRef(options, err, n, 1); }

static const char *refuseNothing(void *self, const dualkv_problem *p) {
    (void)self;
    (void)p;
    return NULL;
}

/* fp64 throughout; O and LSE are rounded between forward and backward, as in any kernel. */
static void declare(void *self, const dualkv_problem *p, dualkv_arithmetic *a) {
    (void)self;
    a->declared = 1;
    a->unit = a->acc_unit = 0x1p-53;
    a->acc_step = 1;
    a->in_format = a->s_format = a->p_format = a->ds_format = a->partial_format = DUALKV_EXACT;
    a->out_format = p->dtype;
    a->p_normalised = 1;
    a->exp_error = a->log_error = a->tanh_error = 0x1p-50;
}

static int isDeterministic(void *self, const dualkv_problem *p) {
    (void)self;
    (void)p;
    return 1;
}

static uint64_t countLaunches(void *self) { return ((instance *)self)->launches; }

/* ---- strided tensors to canonical ones and back ---- */

static void gather(const dualkv_tensor *t, int64_t rows, int64_t heads, int64_t dim, size_t elt, void *to) {
    for (int64_t i = 0; i < rows; i++)
        for (int64_t h = 0; h < heads; h++)
            memcpy((char *)to + (size_t)((i * heads + h) * dim) * elt,
                   (const char *)t->data + (size_t)(i * t->row + h * t->head) * elt, (size_t)dim * elt);
}

static void scatter(const double *from, int64_t rows, int64_t heads, int64_t dim, dualkv_dtype type,
                    const dualkv_tensor *t) {
    size_t elt = dkv_dtypeSize(type);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t h = 0; h < heads; h++)
            dkv_encodeArray(from + (i * heads + h) * dim, type, (size_t)dim,
                            (char *)t->data + (size_t)(i * t->row + h * t->head) * elt);
}

/* LSE-like: canonical [H, T]. */
static void scatterLse(const double *from, const dualkv_problem *v, const dualkv_tensor *t) {
    for (int32_t h = 0; h < v->hq; h++)
        for (int64_t i = 0; i < v->tq; i++) {
            double x = from[h * v->tq + i];
            ((float *)t->data)[i * t->row + h * t->head] = (float)x;
        }
}

static void gatherInputs(const dualkv_launch *l, int backward, dkv_inputs *in) {
    const dualkv_problem *v = l->problem;
    size_t elt = dkv_dtypeSize((dualkv_dtype)v->dtype);
    gather(&l->q, v->tq, v->hq, v->dqk, elt, in->q);
    gather(&l->k, v->tk, v->hkv, v->dqk, elt, in->k);
    gather(&l->v, v->tk, v->hkv, v->dv, elt, in->v);
    if (in->sink) memcpy(in->sink, l->sink, (size_t)v->hq * sizeof *in->sink);
    if (!backward) return;
    gather(&l->d_o, v->tq, v->hq, v->dv, elt, in->d_o);
    for (int32_t h = 0; h < v->hq && in->d_lse; h++)
        for (int64_t i = 0; i < v->tq; i++)
            in->d_lse[h * v->tq + i] = ((const float *)l->d_lse.data)[i * l->d_lse.row + h * l->d_lse.head];
}

/* O and LSE as forward left them. */
static void gatherForward(const dualkv_launch *l, dkv_outputs *out) {
    const dualkv_problem *v = l->problem;
    size_t elt = dkv_dtypeSize((dualkv_dtype)v->dtype);
    for (int64_t i = 0; i < v->tq; i++)
        for (int32_t h = 0; h < v->hq; h++) {
            dkv_decodeArray((const char *)l->o.data + (size_t)(i * l->o.row + h * l->o.head) * elt,
                            (dualkv_dtype)v->dtype, (size_t)v->dv, out->o + (i * v->hq + h) * v->dv);
            out->lse[h * v->tq + i] = ((const float *)l->lse.data)[i * l->lse.row + h * l->lse.head];
        }
}

/* Naive is one piece: its backward forms O and LSE again. */
static int compute(const instance *s, const dualkv_launch *launch, const dkv_problem *p, const dkv_layout *l,
                   const dkv_inputs *in, int backward, dkv_outputs *out, dkv_err *err) {
    const dkv_ref_options opt = {.threads = 1};
    if (s->replicated) return dkv_refNaive(p, l, in, out, err);
    if (!backward) return dkv_refBlockedForward(p, l, in, &opt, out, err);
    gatherForward(launch, out);
    return dkv_refBlockedBackward(p, l, in, &opt, out, err);
}

static int run(void *self, const dualkv_launch *launch, int backward, char *text, size_t n) {
    instance *s = self;
    const dualkv_problem *v = launch->problem;
    dkv_err err = {0};
    dkv_problem p = {0};
    dkv_layout l = {0};
    dkv_inputs in = {0};
    dkv_outputs out = {0};
    int rc = dkv_problemOfView(v, &p, &err);
    if (!rc) {
        p.grad = backward != 0;
        p.dlse = p.dlse && backward;
        rc = dkv_makeLayout(&p, &l, &err);
    }
    if (!rc) rc = dkv_allocInputs(&l, &in, &err);
    if (!rc) rc = dkv_allocOutputs(&l, &out, &err);
    if (!rc) {
        gatherInputs(launch, backward, &in);
        rc = compute(s, launch, &p, &l, &in, backward, &out, &err);
    }
    if (!rc && !backward) {
        scatter(out.o, v->tq, v->hq, v->dv, p.dtype, &launch->o);
        scatterLse(out.lse, v, &launch->lse);
    } else if (!rc) {
        scatter(out.dq, v->tq, v->hq, v->dqk, p.dtype, &launch->dq);
        scatter(out.dk, v->tk, v->hkv, v->dqk, p.dtype, &launch->dk);
        scatter(out.dv, v->tk, v->hkv, v->dv, p.dtype, &launch->dv);
        for (int32_t h = 0; h < v->hq && out.dsink && launch->dsink; h++)
            launch->dsink[h] = (float)out.dsink[h];
    }
    s->launches += !rc;
    if (rc) snprintf(text, n, "%s", err.text);
    dkv_freeOutputs(&out);
    dkv_freeInputs(&in);
    dkv_freeLayout(&l);
    dkv_freeProblem(&p);
    return rc;
}

static int forward(void *self, const dualkv_launch *l, char *err, size_t n) {
    return run(self, l, 0, err, n);
}
static int backward(void *self, const dualkv_launch *l, char *err, size_t n) {
    return run(self, l, 1, err, n);
}

#define REFERENCE(word, line, opener, declares)                                                              \
    {                                                                                                        \
        .size = sizeof(dualkv_kernel), .abi = DUALKV_ABI, .name = word, .doc = line, .memory = DUALKV_HOST,  \
        .alignment = 1, .open = opener, .close = free, .refuses = refuseNothing, .arithmetic = declares,     \
        .deterministic = isDeterministic, .forward = forward, .backward = backward,                          \
        .launches = countLaunches                                                                            \
    }

const dualkv_kernel dkv_refKernel = REFERENCE(
    "ref", "the truth: blocked fp64 on packed tokens, outputs rounded to their type", openBlocked, declare);
const dualkv_kernel dkv_refReplicatedKernel = REFERENCE(
    "ref-replicated", "the truth from its definition: naive fp64 on replicated sequences", openNaive, NULL);
