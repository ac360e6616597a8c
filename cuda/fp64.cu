/* fp64.cu: kernel `cuda-fp64`: the truth of the oracle on the device as a kernel of the public ABI, outputs rounded to
 * their type. It is slow, takes memory of its own and waits for its stream, so that no graph can hold it: it is there
 * to be judged by the CPU's oracle like any other kernel. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../ref/view.h"
#include "launch.h"
#include "oracle_impl.cuh"

extern "C" const dkv_oracle_ops *dkv_oracleOps(void);

typedef struct instance {
    uint64_t launches;
    char reason[200];
} instance;

static void *fp64_open(const char *options, char *err, size_t n) {
    if (options && options[0]) {
        snprintf(err, n, "takes no option ('%s')", options);
        return NULL;
    }
    void *self = calloc(1, sizeof(instance));
    if (!self) snprintf(err, n, "out of memory");
    return self;
}

static void fp64_close(void *self) { free(self); }

static void declare(const dualkv_problem *p, dualkv_arithmetic *a) {
    a->declared = 1;
    a->unit = a->acc_unit = 0x1p-53;
    a->acc_step = 1;
    a->in_format = a->s_format = a->p_format = a->ds_format = a->partial_format = DUALKV_EXACT;
    a->out_format = p->dtype;
    a->p_normalised = 1;
    a->exp_error = a->log_error = a->tanh_error = 0x1p-50; /* CUDA's fp64 functions: at most 1, 1, 2 ulp */
}

static void fp64_arithmetic(void *, const dualkv_problem *p, dualkv_arithmetic *a) { declare(p, a); }
static int fp64_deterministic(void *, const dualkv_problem *) { return 1; }
static uint64_t fp64_launches(void *self) { return ((const instance *)self)->launches; }

/* --- strided tensors to canonical ones and back --- */

typedef struct lie { /* how a tensor lies: element (t, h, c) at t * row + h * head + c */
    void *data;
    int64_t row, head;
} lie;

template <typename T> __global__ void move_kernel(lie from, lie to, int64_t rows, int64_t heads, int64_t d) {
    DKV_GRID_LOOP(e, rows * heads * d) {
        const int64_t t = e / d / heads, h = e / d % heads, c = e % d;
        ((T *)to.data)[t * to.row + h * to.head + c] = ((const T *)from.data)[t * from.row + h * from.head + c];
    }
}

static int move(const lie &from, const lie &to, int64_t rows, int64_t heads, int64_t d, int32_t dtype,
                cudaStream_t s) {
    const int64_t n = rows * heads * d;
    if (n == 0) return 0;
    if (dtype == DUALKV_FP32)
        move_kernel<uint32_t><<<dkv_blocksFor(n, 256), 256, 0, s>>>(from, to, rows, heads, d);
    else move_kernel<uint16_t><<<dkv_blocksFor(n, 256), 256, 0, s>>>(from, to, rows, heads, d);
    DKV_TRY_CUDA(cudaGetLastError());
    return 0;
}

/* Canonical tensors of one launch. */
enum { CANON_Q, CANON_K, CANON_V, CANON_DO, CANON_DLSE, CANON_O, CANON_LSE, CANON_DQ, CANON_DK, CANON_DV, N_CANON };
typedef struct canon {
    const dualkv_tensor *from; /* NULL: not of this launch */
    int64_t rows, heads, d;
    int32_t dtype;
    void *data;
} canon;

static lie given(const canon &c) { return lie{c.from->data, c.from->row, c.from->head}; }
static lie own(const canon &c) {
    return c.d ? lie{c.data, c.heads * c.d, c.d} : lie{c.data, 1, c.rows}; /* d 0: LSE-like, [heads, rows] */
}
static int64_t width(const canon &c) { return c.d ? c.d : 1; }

static void listCanon(const dualkv_launch *l, int backward, canon c[N_CANON]) {
    const dualkv_problem *v = l->problem;
    const int64_t tq = v->tq, tk = v->tk, hq = v->hq, hkv = v->hkv;
    const canon all[N_CANON] = {{&l->q, tq, hq, v->dqk, v->dtype, NULL},
                                {&l->k, tk, hkv, v->dqk, v->dtype, NULL},
                                {&l->v, tk, hkv, v->dv, v->dtype, NULL},
                                {backward ? &l->d_o : NULL, tq, hq, v->dv, v->dtype, NULL},
                                {backward && v->dlse ? &l->d_lse : NULL, tq, hq, 0, DUALKV_FP32, NULL},
                                {&l->o, tq, hq, v->dv, v->dtype, NULL},
                                {&l->lse, tq, hq, 0, DUALKV_FP32, NULL},
                                {backward ? &l->dq : NULL, tq, hq, v->dqk, v->dtype, NULL},
                                {backward ? &l->dk : NULL, tk, hkv, v->dqk, v->dtype, NULL},
                                {backward ? &l->dv : NULL, tk, hkv, v->dv, v->dtype, NULL}};
    memcpy(c, all, sizeof all);
}

static bool isOutput(int i, int backward) {
    return backward ? i >= CANON_DQ : i == CANON_O || i == CANON_LSE;
}

static int gather(canon c[N_CANON], int backward, cudaStream_t s) {
    for (int i = 0; i < N_CANON; i++) {
        if (!c[i].from) continue;
        const int64_t n = c[i].rows * c[i].heads * width(c[i]);
        DKV_TRY_CUDA(cudaMalloc(&c[i].data, (size_t)(n > 0 ? n : 1) * (c[i].dtype == DUALKV_FP32 ? 4 : 2)));
        if (!isOutput(i, backward))
            DKV_TRY(move(given(c[i]), own(c[i]), c[i].rows, c[i].heads, width(c[i]), c[i].dtype, s));
    }
    DKV_TRY_CUDA(cudaStreamSynchronize(s));
    return 0;
}

static int compute(const dualkv_launch *l, const dkv_problem *p, const dkv_layout *layout, canon c[N_CANON],
                   int backward) {
    static const dkv_tensor_id id[N_CANON] = {DKV_N_OUTPUTS, DKV_N_OUTPUTS, DKV_N_OUTPUTS, DKV_N_OUTPUTS, DKV_N_OUTPUTS,
                                              DKV_O,         DKV_LSE,       DKV_DQ,        DKV_DK,        DKV_DV};
    const dkv_oracle_ops *ops = dkv_oracleOps();
    const dkv_device_inputs in = {c[CANON_Q].data,  c[CANON_K].data,                  c[CANON_V].data,
                                  c[CANON_DO].data, (const float *)c[CANON_DLSE].data, p->sink ? l->sink : NULL};
    const cudaStream_t s = (cudaStream_t)l->stream;
    dkv_device_oracle *o = NULL;
    dualkv_arithmetic a = {};
    a.size = sizeof a;
    declare(l->problem, &a);
    int rc = ops->open(p, layout, &in, &a, NULL, &o);
    if (!rc) rc = backward ? ops->gradients(o, c[CANON_O].data, (const float *)c[CANON_LSE].data) : ops->truth(o);
    for (int i = 0; i < N_CANON && !rc; i++) {
        if (!c[i].from || !isOutput(i, backward)) continue;
        rc = ops->store(o, id[i], c[i].data) ||
             move(own(c[i]), given(c[i]), c[i].rows, c[i].heads, width(c[i]), c[i].dtype, s);
    }
    if (!rc && backward && l->dsink && p->sink) rc = ops->store(o, DKV_DSINK, l->dsink);
    if (!rc) rc = cudaStreamSynchronize(s) != cudaSuccess;
    ops->close(o);
    return rc;
}

static int run(void *self, const dualkv_launch *l, int backward, char *err, size_t n) {
    canon c[N_CANON] = {};
    dkv_err why = {};
    dkv_problem p = {};
    dkv_layout layout = {};
    cudaStreamCaptureStatus captured = cudaStreamCaptureStatusNone;
    if (cudaStreamIsCapturing((cudaStream_t)l->stream, &captured) || captured != cudaStreamCaptureStatusNone) {
        snprintf(err, n, "it waits for its stream, which no capture allows");
        return 1;
    }
    int rc = dkv_problemOfView(l->problem, &p, &why);
    p.grad = backward != 0;
    p.dlse = p.dlse && backward;
    if (!rc) rc = dkv_makeLayout(&p, &layout, &why);
    if (rc) snprintf(err, n, "%s", why.text);
    if (!rc) {
        listCanon(l, backward, c);
        rc = gather(c, backward, (cudaStream_t)l->stream) || compute(l, &p, &layout, c, backward);
        if (rc) snprintf(err, n, "%s", dkv_oracleOps()->error());
    }
    for (int i = 0; i < N_CANON; i++) cudaFree(c[i].data);
    ((instance *)self)->launches += !rc;
    dkv_freeLayout(&layout);
    dkv_freeProblem(&p);
    return rc;
}

static int fp64_forward(void *self, const dualkv_launch *l, char *err, size_t n) { return run(self, l, 0, err, n); }
static int fp64_backward(void *self, const dualkv_launch *l, char *err, size_t n) { return run(self, l, 1, err, n); }

/* Memory is the device's to refuse. */
static const char *fp64_refuses(void *handle, const dualkv_problem *v) {
    instance *self = (instance *)handle;
    const double gib = 1024.0 * 1024 * 1024;
    const char *reason = NULL;
    dkv_err why = {};
    dkv_problem p = {};
    dkv_layout layout = {};
    size_t left = 0, total = 0;
    if (dkv_problemOfView(v, &p, &why) || dkv_makeLayout(&p, &layout, &why)) {
        snprintf(self->reason, sizeof self->reason, "%.190s", why.text);
        reason = self->reason;
    } else if (cudaMemGetInfo(&left, &total) == cudaSuccess) {
        const double need = (double)dkv_oracleOps()->bytes(&p, &layout);
        if (need > (double)total) {
            snprintf(self->reason, sizeof self->reason, "it needs %.1f GiB, the device has %.1f", need / gib,
                     (double)total / gib);
            reason = self->reason;
        }
    }
    (void)cudaGetLastError();
    dkv_freeLayout(&layout);
    dkv_freeProblem(&p);
    return reason;
}

const dualkv_kernel dkv_fp64Kernel = {sizeof(dualkv_kernel),
                                      DUALKV_ABI,
                                      "cuda-fp64",
                                      "the truth in double precision on the device, outputs rounded to their type",
                                      DUALKV_CUDA,
                                      2,
                                      0,
                                      0,
                                      fp64_open,
                                      fp64_close,
                                      fp64_refuses,
                                      fp64_arithmetic,
                                      fp64_deterministic,
                                      NULL,
                                      fp64_forward,
                                      fp64_backward,
                                      fp64_launches};
