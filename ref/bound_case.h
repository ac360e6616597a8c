/* bound_case.h: for the tests of the bound: a small problem with random inputs, the emulated kernel's outputs on it, the
 * oracle. Include after cmocka.h. */
#ifndef DKV_BOUND_CASE_H
#define DKV_BOUND_CASE_H

#include "dtype.h"
#include "emu.h"
#include "mask.h"
#include "oracle.h"
#include "small_problems.h"

typedef struct bound_case {
    dkv_problem p;
    dkv_layout l;
    dkv_inputs in;
    dkv_outputs got;
    dkv_oracle oracle;
    dualkv_arithmetic a;
    int64_t n[DKV_N_OUTPUTS], n_q, n_k, n_v; /* elements; of the inputs too */
    int threads;
} bound_case;

static inline void fill_case(bound_case *c) {
    const int64_t planes = (int64_t)c->p.hq * c->l.view.tq;
    dkv_fillSmallArray(c->in.q, c->p.dtype, c->n_q, c->p.seed, 1, 1);
    dkv_fillSmallArray(c->in.k, c->p.dtype, c->n_k, c->p.seed, 2, 1);
    dkv_fillSmallArray(c->in.v, c->p.dtype, c->n_v, c->p.seed, 3, 1);
    dkv_fillSmallArray(c->in.d_o, c->p.dtype, c->n[DKV_O], c->p.seed, 4, 1);
    dkv_fillSmallArray(c->in.d_lse, DUALKV_FP32, planes, c->p.seed, 5, 1);
    for (int h = 0; c->in.sink && h < c->p.hq; h++) c->in.sink[h] = c->p.sinklogit + 0.25f * (float)h;
}

static inline void close_case(bound_case *c) {
    dkv_freeOracle(&c->oracle);
    dkv_freeOutputs(&c->got);
    dkv_freeInputs(&c->in);
    dkv_freeLayout(&c->l);
    dkv_freeProblem(&c->p);
}

/* False where the mask is not admissible. */
static inline bool open_case(const char *line, bound_case *c) {
    dkv_err err = {0};
    memset(c, 0, sizeof *c);
    if (dkv_parseProblem(line, NULL, &c->p, &err)) fail_msg("%s: %s", line, err.text);
    if (dkv_maskAdmissible(&c->p, &err)) {
        close_case(c);
        return false;
    }
    if (dkv_makeLayout(&c->p, &c->l, &err) || dkv_allocInputs(&c->l, &c->in, &err) ||
        dkv_allocOutputs(&c->l, &c->got, &err) || dkv_allocOracle(&c->l, &c->oracle, &err))
        fail_msg("%s: %s", line, err.text);
    dkv_countOutputs(&c->l, c->n);
    c->n_q = c->l.view.tq * c->p.hq * c->p.dqk;
    c->n_k = c->l.view.tk * c->p.hkv * c->p.dqk;
    c->n_v = c->l.view.tk * c->p.hkv * c->p.dv;
    c->threads = 1;
    fill_case(c);
    return true;
}

static inline void scale_array(void *x, dualkv_dtype t, int64_t n, double by) {
    for (int64_t i = 0; i < n; i++) {
        char *at = (char *)x + i * (int64_t)dkv_dtypeSize(t);
        double v;
        dkv_decodeArray(at, t, 1, &v);
        v *= by;
        dkv_encodeArray(&v, t, 1, at);
    }
}

static inline dualkv_arithmetic profile_of(const bound_case *c, int i) {
    dualkv_arithmetic a;
    assert_non_null(dkv_arithmeticProfile(i, &c->p, &a, NULL));
    return a;
}

static inline dualkv_tensor packed(void *data, int64_t heads, int64_t d) {
    return (dualkv_tensor){data, heads * d, d};
}

/* Outputs of the emulated kernel into c->got, its arithmetic into c->a. */
static inline void run_emu(bound_case *c, const char *options) {
    const dualkv_kernel *k = &dkv_emuKernel;
    const dualkv_problem *v = &c->l.view;
    const dualkv_dtype t = c->p.dtype;
    char err[200] = "";
    void *self = k->open(options, err, sizeof err), *out[DKV_N_OUTPUTS];
    if (!self) fail_msg("%s", err);
    for (int id = 0; id < DKV_N_OUTPUTS; id++) assert_non_null(out[id] = calloc((size_t)c->n[id] + 1, 4));
    size_t room = k->workspace ? k->workspace(self, v, 1) : 0, more = k->workspace ? k->workspace(self, v, 0) : 0;
    room = room > more ? room : more;
    void *work = aligned_alloc(256, (room / 256 + 1) * 256);
    assert_non_null(work);
    c->a = (dualkv_arithmetic){.size = sizeof c->a};
    k->arithmetic(self, v, &c->a);
    dualkv_launch l = {.size = sizeof l, .problem = v, .device_segments = v->segments, .device_ranges = v->ranges,
                       .device_alibi_slopes = v->alibi_slopes, .workspace = work, .workspace_size = room};
    l.q = packed(c->in.q, v->hq, v->dqk);
    l.k = packed(c->in.k, v->hkv, v->dqk);
    l.v = packed(c->in.v, v->hkv, v->dv);
    l.d_o = packed(c->in.d_o, v->hq, v->dv);
    l.d_lse = (dualkv_tensor){c->in.d_lse, 1, v->tq};
    l.sink = c->in.sink;
    l.o = packed(out[DKV_O], v->hq, v->dv);
    l.lse = (dualkv_tensor){out[DKV_LSE], 1, v->tq};
    l.dq = packed(out[DKV_DQ], v->hq, v->dqk);
    l.dk = packed(out[DKV_DK], v->hkv, v->dqk);
    l.dv = packed(out[DKV_DV], v->hkv, v->dv);
    l.dsink = c->in.sink ? out[DKV_DSINK] : NULL;
    if (k->forward(self, &l, err, sizeof err) || (v->grad && k->backward(self, &l, err, sizeof err)))
        fail_msg("%s", err);
    for (int id = 0; id < DKV_N_OUTPUTS; id++) {
        bool wide = id == DKV_LSE || id == DKV_DSINK;
        if (c->n[id])
            dkv_decodeArray(out[id], wide ? DUALKV_FP32 : t, (size_t)c->n[id], dkv_outputAt(&c->got, (dkv_tensor_id)id));
        free(out[id]);
    }
    free(work);
    k->close(self);
}

static inline void run_bound(bound_case *c) {
    dkv_ref_options opt = {.threads = c->threads};
    dkv_err err = {0};
    if (dkv_oracleBound(&c->p, &c->l, &c->in, &c->a, &opt, &c->oracle, &err)) fail_msg("%s", err.text);
}

/* Largest |got - truth| / bound of a tensor (0 for 0/0); its element into *at (may be NULL). */
static inline double worst_ratio(const bound_case *c, dkv_tensor_id id, int64_t *at) {
    const double *x = dkv_outputAt(&c->got, id), *t = dkv_outputAt(&c->oracle.truth, id),
                 *b = dkv_outputAt(&c->oracle.bound, id);
    double worst = 0;
    for (int64_t i = 0; i < c->n[id]; i++) {
        if (x[i] == t[i]) continue;
        double r = fabs(x[i] - t[i]) / b[i];
        if (r <= worst) continue;
        worst = isnan(r) ? (double)INFINITY : r;
        if (at) *at = i;
    }
    return worst;
}

#endif
