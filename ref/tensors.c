#include "tensors.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "dtype.h"
#include "pages.h"

/* Product of three sizes; INT64_MAX where it overflows (no machine holds that). */
static int64_t times3(int64_t a, int64_t b, int64_t c) {
    int64_t r;
    if (__builtin_mul_overflow(a, b, &r) || __builtin_mul_overflow(r, c, &r)) return INT64_MAX;
    return r;
}

void dkv_countOutputs(const dkv_layout *l, int64_t n[DKV_N_OUTPUTS]) {
    const dualkv_problem *v = &l->view;
    n[DKV_O] = times3(v->tq, v->hq, v->dv);
    n[DKV_LSE] = times3(v->hq, v->tq, 1);
    n[DKV_DQ] = v->grad ? times3(v->tq, v->hq, v->dqk) : 0;
    n[DKV_DK] = v->grad ? times3(v->tk, v->hkv, v->dqk) : 0;
    n[DKV_DV] = v->grad ? times3(v->tk, v->hkv, v->dv) : 0;
    n[DKV_DSINK] = v->grad && v->sink ? v->hq : 0;
}

double *dkv_outputAt(const dkv_outputs *o, dkv_tensor_id id) {
    switch (id) {
    case DKV_O: return o->o;
    case DKV_LSE: return o->lse;
    case DKV_DQ: return o->dq;
    case DKV_DK: return o->dk;
    case DKV_DV: return o->dv;
    case DKV_DSINK: return o->dsink;
    default: return NULL;
    }
}

const char *dkv_tensorName(dkv_tensor_id id) {
    static const char *const name[DKV_N_OUTPUTS] = {"O", "LSE", "dQ", "dK", "dV", "dSink"};
    return id >= 0 && id < DKV_N_OUTPUTS ? name[id] : "?";
}

/* Zeroed arrays of n[i] * size[i] bytes into *to[i]; all or none. want[i] 0: *to[i] = NULL. */
static int allocAll(int count, const int64_t *n, const size_t *size, const bool *want, void **to[],
                    const char *what, dkv_err *err) {
    const double gib = 1024.0 * 1024 * 1024;
    const double have = (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE);
    double need = 0;
    for (int i = 0; i < count; i++) {
        *to[i] = NULL;
        if (want[i]) need += (double)n[i] * (double)size[i];
    }
    if (need > have)
        return dkv_fail(err, DKV_EUSER, "%s need %.1f GiB, this machine has %.1f GiB", what, need / gib,
                        have / gib);
    for (int i = 0; i < count; i++) {
        if (!want[i]) continue;
        *to[i] = calloc(n[i] > 0 ? (size_t)n[i] : 1, size[i]);
        if (*to[i]) {
            dkv_askLargePages(*to[i], (size_t)n[i] * size[i]);
            continue;
        }
        for (int j = 0; j < i; j++) {
            free(*to[j]);
            *to[j] = NULL;
        }
        return dkv_fail(err, DKV_EHARNESS, "out of memory: %s need %.1f GiB", what, need / gib);
    }
    return DKV_OK;
}

int dkv_allocOutputs(const dkv_layout *l, dkv_outputs *out, dkv_err *err) {
    const bool grad = l->view.grad;
    const bool want[DKV_N_OUTPUTS] = {true, true, grad, grad, grad, grad && l->view.sink};
    const size_t size[DKV_N_OUTPUTS] = {8, 8, 8, 8, 8, 8};
    void *p[DKV_N_OUTPUTS], **to[DKV_N_OUTPUTS];
    int64_t n[DKV_N_OUTPUTS];
    for (int i = 0; i < DKV_N_OUTPUTS; i++) to[i] = &p[i];
    memset(out, 0, sizeof *out);
    dkv_countOutputs(l, n);
    int rc = allocAll(DKV_N_OUTPUTS, n, size, want, to, "outputs", err);
    if (rc) return rc;
    out->o = p[DKV_O];
    out->lse = p[DKV_LSE];
    out->dq = p[DKV_DQ];
    out->dk = p[DKV_DK];
    out->dv = p[DKV_DV];
    out->dsink = p[DKV_DSINK];
    return DKV_OK;
}

void dkv_freeOutputs(dkv_outputs *o) {
    free(o->o);
    free(o->lse);
    free(o->dq);
    free(o->dk);
    free(o->dv);
    free(o->dsink);
    memset(o, 0, sizeof *o);
}

int dkv_allocInputs(const dkv_layout *l, dkv_inputs *in, dkv_err *err) {
    const dualkv_problem *v = &l->view;
    const size_t e = dkv_dtypeSize((dualkv_dtype)v->dtype);
    const size_t size[6] = {e, e, e, e, sizeof(float), sizeof(float)};
    const bool want[6] = {true, true, true, v->grad, v->grad && v->dlse, v->sink};
    const int64_t n[6] = {times3(v->tq, v->hq, v->dqk), times3(v->tk, v->hkv, v->dqk),
                          times3(v->tk, v->hkv, v->dv), times3(v->tq, v->hq, v->dv),
                          times3(v->hq, v->tq, 1),      v->hq};
    void *p[6], **to[6];
    for (int i = 0; i < 6; i++) to[i] = &p[i];
    memset(in, 0, sizeof *in);
    int rc = allocAll(6, n, size, want, to, "inputs", err);
    if (rc) return rc;
    in->q = p[0];
    in->k = p[1];
    in->v = p[2];
    in->d_o = p[3];
    in->d_lse = p[4];
    in->sink = p[5];
    return DKV_OK;
}

void dkv_freeInputs(dkv_inputs *in) {
    free(in->q);
    free(in->k);
    free(in->v);
    free(in->d_o);
    free(in->d_lse);
    free(in->sink);
    memset(in, 0, sizeof *in);
}

/* Row t of `out` is row source[t] of `in` (own NULL), or stays zero where own[t] is 0. */
static void copyRows(int64_t rows, const int64_t *source, const uint8_t *own, size_t bytes, const void *in,
                     void *out) {
    for (int64_t t = 0; t < rows; t++)
        if (!own || own[t])
            memcpy((char *)out + (size_t)t * bytes, (const char *)in + (size_t)source[t] * bytes, bytes);
}

int dkv_replicateInputs(const dkv_layout *packed, const dkv_layout *rep, const int64_t *q_source,
                        const int64_t *k_source, const uint8_t *q_own, const dkv_inputs *in, dkv_inputs *out,
                        dkv_err *err) {
    const dualkv_problem *v = &packed->view, *w = &rep->view;
    const size_t e = dkv_dtypeSize((dualkv_dtype)v->dtype);
    int rc = dkv_allocInputs(rep, out, err);
    if (rc) return rc;
    copyRows(w->tq, q_source, NULL, (size_t)v->hq * v->dqk * e, in->q, out->q);
    copyRows(w->tk, k_source, NULL, (size_t)v->hkv * v->dqk * e, in->k, out->k);
    copyRows(w->tk, k_source, NULL, (size_t)v->hkv * v->dv * e, in->v, out->v);
    if (in->d_o && out->d_o) copyRows(w->tq, q_source, q_own, (size_t)v->hq * v->dv * e, in->d_o, out->d_o);
    if (in->d_lse && out->d_lse)
        for (int64_t h = 0; h < v->hq; h++)
            copyRows(w->tq, q_source, q_own, sizeof(float), in->d_lse + h * v->tq, out->d_lse + h * w->tq);
    if (in->sink && out->sink) memcpy(out->sink, in->sink, (size_t)v->hq * sizeof(float));
    return DKV_OK;
}

/* out[source[t]] += in[t] for rows of `width` doubles. */
static void addRows(int64_t rows, const int64_t *source, int64_t width, const double *in, double *out) {
    for (int64_t t = 0; t < rows; t++) {
        const double *a = in + t * width;
        double *b = out + source[t] * width;
        for (int64_t c = 0; c < width; c++) b[c] += a[c];
    }
}

int dkv_packOutputs(const dkv_layout *packed, const dkv_layout *rep, const int64_t *q_source,
                    const int64_t *k_source, const uint8_t *q_own, const dkv_outputs *in, dkv_outputs *out,
                    dkv_err *err) {
    const dualkv_problem *v = &packed->view, *w = &rep->view;
    int64_t n[DKV_N_OUTPUTS];
    dkv_countOutputs(packed, n);
    for (int i = 0; i < DKV_N_OUTPUTS; i++) {
        double *a = dkv_outputAt(in, (dkv_tensor_id)i), *b = dkv_outputAt(out, (dkv_tensor_id)i);
        if (n[i] && b && !a)
            return dkv_fail(err, DKV_EHARNESS, "replicated outputs have no %s",
                            dkv_tensorName((dkv_tensor_id)i));
        if (b) memset(b, 0, (size_t)n[i] * sizeof *b);
    }
    for (int64_t t = 0; t < w->tq; t++) {
        if (!q_own[t]) continue;
        const int64_t row = (int64_t)v->hq * v->dv, s = q_source[t];
        memcpy(out->o + s * row, in->o + t * row, (size_t)row * sizeof(double));
        for (int64_t h = 0; h < v->hq; h++) out->lse[h * v->tq + s] = in->lse[h * w->tq + t];
    }
    if (out->dq) addRows(w->tq, q_source, (int64_t)v->hq * v->dqk, in->dq, out->dq);
    if (out->dk) addRows(w->tk, k_source, (int64_t)v->hkv * v->dqk, in->dk, out->dk);
    if (out->dv) addRows(w->tk, k_source, (int64_t)v->hkv * v->dv, in->dv, out->dv);
    for (int64_t h = 0; out->dsink && h < v->hq; h++) out->dsink[h] = in->dsink[h];
    return DKV_OK;
}
