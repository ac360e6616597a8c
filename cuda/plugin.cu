/* plugin.cu: the kernels of libdualkv_cuda.so, as the public ABI has them: `cuda`, `cuda-replicated`, which is
 * the same code on independent sequences, and `cuda-fp64` (fp64.cu). Host code only; what a launch needs is worked
 * out from the problem alone, so that `det` gives the same bits on every device of one instruction set. */
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "launch.h"

#define MULTIPROCESSORS 132 /* that splits are made for, whatever device runs them */
#define SPLITS_MAX 16
#define ALIGN_BYTES 256

typedef struct instance {
    int det;
    DKV_FAULT_FIELD
    uint64_t launches;
    char reason[200];
} instance;

static void *plugin_open(const char *options, char *err, size_t n) {
    instance *self = (instance *)calloc(1, sizeof *self);
    if (!self) {
        snprintf(err, n, "out of memory");
        return NULL;
    }
    for (const char *w = options ? options : ""; *w;) {
        size_t len = strcspn(w, ",");
        if (len == 3 && !memcmp(w, "det", 3)) {
            self->det = 1;
        } else if (!TAKE_FAULT(w, len, self)) {
            snprintf(err, n, "unknown option '%.*s' (known: " DKV_KNOWN_OPTIONS ")", (int)len, w);
            free(self);
            return NULL;
        }
        w += len + (w[len] == ',');
    }
    return self;
}

static void plugin_close(void *self) { free(self); }

static int key_rows(const dualkv_problem *p) {
    return p->dtype == DUALKV_FP32 ? DKV_KEY_TILE : dkv_cudaKeyRows(p);
}

/* In how many parts a key tile's walk over its descendants' rows is cut: until the longest part is at most
 * half of what each multiprocessor has to do anyway. Counts rows, masks left out. */
static int count_splits(const dualkv_problem *p) {
    double longest = 0, total = 0;
    for (int i = 0; i < p->n_segments; i++) {
        const dualkv_segment *s = &p->segments[i];
        double rows = 0;
        for (int j = i; s->k_len && j < p->n_segments && (j == i || p->segments[j].depth > s->depth); j++)
            rows += (double)p->segments[j].q_len;
        rows *= p->hq / p->hkv;
        if (rows > longest) longest = rows;
        total += rows * p->hkv * (double)((s->k_len + key_rows(p) - 1) / key_rows(p));
    }
    double part = total / MULTIPROCESSORS / 2;
    if (longest <= DKV_SPLIT_ROWS || longest <= part) return 1;
    double splits = longest / (part > DKV_SPLIT_ROWS ? part : DKV_SPLIT_ROWS);
    return splits >= SPLITS_MAX ? SPLITS_MAX : (int)splits + 1;
}

/* Workspace of backward: where each part begins, in bytes. 0, or 1 where it would not fit 63 bits. */
enum { DELTA, DQ_ACC, DK_ACC, DV_ACC, PARTS };
static int lay_out(const dualkv_problem *p, int splits, int64_t begin[PARTS + 1]) {
    int plain = p->dtype == DUALKV_FP32, cols = dkv_cudaHeadDim(p);
    int64_t q_rows = plain ? p->tq : dkv_virtualTiles(p, DKV_PIECE, 0) * DKV_PIECE,
            k_rows = plain ? p->tk : dkv_virtualTiles(p, DKV_PIECE, 1) * DKV_PIECE;
    const int64_t factors[PARTS][4] = {{p->hq, p->tq, 1, 1},
                                       {q_rows, p->hq, plain ? p->dqk : cols, 1},
                                       {splits, k_rows, p->hkv, plain ? p->dqk : cols},
                                       {splits, k_rows, p->hkv, plain ? p->dv : cols}};
    begin[0] = 0;
    for (int i = 0; i < PARTS; i++) {
        int64_t n = sizeof(float);
        for (int j = 0; j < 4; j++)
            if (__builtin_mul_overflow(n, factors[i][j], &n)) return 1;
        int64_t more = i == DQ_ACC ? 64 * cols * (int64_t)sizeof(float) : 0;
        if (__builtin_add_overflow(n, begin[i] + more + ALIGN_BYTES - 1, &n)) return 1;
        begin[i + 1] = n / ALIGN_BYTES * ALIGN_BYTES;
    }
    return 0;
}

static const char *plugin_refuses(void *handle, const dualkv_problem *p) {
    instance *self = (instance *)handle;
    const int64_t limit = INT32_MAX - 1024;
    int64_t begin[PARTS + 1];
    char *why = self->reason;
    size_t n = sizeof self->reason;
    if (p->dtype < DUALKV_BF16 || p->dtype > DUALKV_FP32) return "element type unknown to this kernel";
    if (p->mask < DUALKV_CAUSAL || p->mask >= DUALKV_BIDIR) return "mask unknown to this kernel";
    if (p->dqk < 1 || p->dqk > 256 || p->dv < 1 || p->dv > 256) {
        snprintf(why, n, "head dims %d:%d, at most 256 are supported", p->dqk, p->dv);
        return why;
    }
    for (int i = 0; i < p->n_segments; i++)
        if (p->segments[i].context + p->segments[i].k_len > limit) {
            snprintf(why, n, "segment %d sees %lld keys, at most %lld are supported", i,
                     (long long)(p->segments[i].context + p->segments[i].k_len), (long long)limit);
            return why;
        }
    if (p->n_ranges > limit) return "more than 2^31 key ranges";
    double splits = p->grad ? count_splits(p) : 1,
           tiles = (double)(p->tq > p->tk ? p->tq : p->tk) / 64 + p->n_segments;
    if (tiles * p->hq > limit || tiles * p->hkv * splits > limit) {
        snprintf(why, n, "%.3g tiles of 64 rows, heads included, more than a grid's 2^31", tiles * p->hq);
        return why;
    }
    if (p->grad && lay_out(p, (int)splits, begin)) return "workspace of more than 2^63 bytes";
    int device, shared;
    if (p->grad && p->dtype != DUALKV_FP32 && cudaGetDevice(&device) == cudaSuccess &&
        cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) == cudaSuccess &&
        (size_t)shared < dkv_cudaBackwardShared(p)) {
        snprintf(why, n, "backward needs %zu bytes of shared memory a block, this device has %d",
                 dkv_cudaBackwardShared(p), shared);
        return why;
    }
    return NULL;
}

/* Exact where the declared fp32 kernel is plain FFMA; the 16-bit ones are mma.sync with what tolerance.md
 * measured: 16 products and the accumulator each cut below 2^-25 of the largest, the sum cut to 24 bits, all
 * toward zero, so that a step errs by less than 16 2^-25 + 2^-23 of it. Errors of ex2.approx, expf, logf:
 * CUDA's and PTX's tables of ulps. */
static void plugin_arithmetic(void *handle, const dualkv_problem *p, dualkv_arithmetic *a) {
    int simple = p->dtype == DUALKV_FP32;
    a->declared = 1;
    a->unit = 0x1p-24;
    a->acc_unit = simple ? 0x1p-24 : 0x1p-21 + 0x1p-23;
    a->acc_truncates = !simple;
    a->acc_step = simple ? 1 : 16;
    a->acc_gain = simple ? 0 : 1.68 * 0x1p-24;
    a->acc_fold = 0;
    a->in_format = a->s_format = a->partial_format = DUALKV_EXACT;
    a->p_format = a->ds_format = simple ? DUALKV_EXACT : p->dtype;
    a->out_format = p->dtype;
    a->key_tile = DKV_KEY_TILE;
    a->exp_error = simple ? 0x1p-23 : 0x1p-22; /* expf 1 ulp, ex2.approx 2 */
    a->log_error = 0x1p-23;
    a->tanh_error = DKV_FINE_TANH_ERROR;
    a->acc_fold_dkv = simple ? DKV_FOLD32_TILES * DKV_KEY_TILE : DKV_FOLD_TILES * 64 / a->acc_step;
    /* ex2.approx.ftz: P below 2^-126 is 0 (a row that leans on its sink may have no other). dQ: plain 16-bit adds a partial
     * a key tile of the backward kernel by atomics, which flush in global memory, too (PTX, atom.add.f32); det: one chain. */
    a->flushes = !simple;
    if (simple)
        a->acc_fold_dq = DKV_FOLD32_TILES * DKV_KEY_TILE;
    else
        a->acc_fold_dq = ((const instance *)handle)->det ? 0 : key_rows(p) / 16;
}

static int plugin_deterministic(void *handle, const dualkv_problem *p) {
    return !p->grad || p->dtype == DUALKV_FP32 || ((const instance *)handle)->det;
}

static size_t plugin_workspace(void *handle, const dualkv_problem *p, int backward) {
    int64_t begin[PARTS + 1];
    (void)handle;
    return backward && !lay_out(p, count_splits(p), begin) ? (size_t)begin[PARTS] : 0;
}

/* Copies a tensor's place; clears *vec where it is not made of whole 16-byte words. */
static void *place(const dualkv_tensor *t, size_t element, int64_t *row, int64_t *head, int *vec) {
    *row = t->row;
    *head = t->head;
    if (((uintptr_t)t->data | (uint64_t)t->row * element | (uint64_t)t->head * element) % 16) *vec = 0;
    return t->data;
}

static void make_args(const instance *self, const dualkv_launch *l, int backward, dkv_args *a) {
    size_t e = l->problem->dtype == DUALKV_FP32 ? 4 : 2;
    int other = 0;
    memset(a, 0, sizeof *a);
    a->p = *l->problem;
    GIVE_FAULT(self, a);
    a->p.scale = PLANT(*a, X6, dkv_faultBf16(a->p.scale), a->p.scale);
    dkv_fineFactor(a->p.scale * DKV_LOG2E_EXACT, &a->scale2, &a->scale2_rest);
    a->p.segments = l->device_segments;
    a->p.ranges = l->device_ranges;
    a->slopes = a->p.alibi_slopes = l->device_alibi_slopes;
    a->sink = l->sink;
    a->vec = a->p.dqk * e % 16 == 0 && a->p.dv * e % 16 == 0;
    a->q = place(&l->q, e, &a->q_row, &a->q_head, &a->vec);
    a->k = place(&l->k, e, &a->k_row, &a->k_head, &a->vec);
    a->v = place(&l->v, e, &a->v_row, &a->v_head, &a->vec);
    a->o = a->o_out = place(&l->o, e, &a->o_row, &a->o_head, &a->vec);
    a->lse = (float *)place(&l->lse, 4, &a->lse_row, &a->lse_head, &other);
    if (!backward) return;
    a->d_o = place(&l->d_o, e, &a->do_row, &a->do_head, &a->vec);
    a->d_lse = (const float *)place(&l->d_lse, 4, &a->dlse_row, &a->dlse_head, &other);
    a->dq = place(&l->dq, e, &a->dq_row, &a->dq_head, &a->vec);
    a->dk = place(&l->dk, e, &a->dk_row, &a->dk_head, &a->vec);
    a->dv = place(&l->dv, e, &a->dv_row, &a->dv_head, &a->vec);
    a->dsink = l->dsink;
}

static int report(cudaError_t e, const char *what, char *err, size_t n) {
    if (e == cudaSuccess) return 0;
    snprintf(err, n, "%s: %s", what, cudaGetErrorString(e));
    return 1;
}

static int plugin_forward(void *handle, const dualkv_launch *l, char *err, size_t n) {
    instance *self = (instance *)handle;
    dkv_args a;
    make_args(self, l, 0, &a);
    self->launches++;
    return report(a.p.dtype == DUALKV_FP32 ? dkv_cudaForward32(&a, (cudaStream_t)l->stream)
                                           : dkv_cudaForward16(&a, (cudaStream_t)l->stream),
                  "forward kernel", err, n);
}

static int plugin_backward(void *handle, const dualkv_launch *l, char *err, size_t n) {
    instance *self = (instance *)handle;
    cudaStream_t stream = (cudaStream_t)l->stream;
    int simple = l->problem->dtype == DUALKV_FP32, det = self->det;
    int64_t begin[PARTS + 1];
    dkv_args a;
    make_args(self, l, 1, &a);
    a.splits = count_splits(l->problem);
    if (lay_out(l->problem, a.splits, begin) || (uint64_t)begin[PARTS] > l->workspace_size) {
        snprintf(err, n, "workspace of %zu bytes is too small", l->workspace_size);
        return 1;
    }
    a.acc_cols = dkv_cudaHeadDim(&a.p);
    a.q_pieces = dkv_virtualTiles(&a.p, DKV_PIECE, 0);
    a.k_pieces = dkv_virtualTiles(&a.p, DKV_PIECE, 1);
    a.delta = (float *)((char *)l->workspace + begin[DELTA]);
    a.dq_acc = (float *)((char *)l->workspace + begin[DQ_ACC]);
    a.dk_acc = (float *)((char *)l->workspace + begin[DK_ACC]);
    a.dv_acc = (float *)((char *)l->workspace + begin[DV_ACC]);
    self->launches += 3 + (!simple && det);
    size_t clear = simple || det ? 0 : (size_t)(begin[DQ_ACC + 1] - begin[DQ_ACC]);
    if (report(dkv_cudaDelta(&a, clear, stream), "delta pass", err, n)) return 1;
    if (report(simple ? dkv_cudaBackward32(&a, stream) : dkv_cudaBackward16(&a, det, stream),
               "backward kernel", err, n))
        return 1;
    if (!simple && det && report(dkv_cudaQueryGradient16(&a, stream), "dQ kernel", err, n)) return 1;
    return report(dkv_cudaConvert(&a, PLANT(a, I3, NULL, stream)), "conversion pass", err, n);
}

static uint64_t plugin_launches(void *handle) { return ((const instance *)handle)->launches; }

#define KERNEL(name, doc, replicated)                                                                        \
    {sizeof(dualkv_kernel),                                                                                  \
     DUALKV_ABI,                                                                                             \
     name,                                                                                                   \
     doc,                                                                                                    \
     DUALKV_CUDA,                                                                                            \
     2,                                                                                                      \
     replicated,                                                                                             \
     0,                                                                                                      \
     plugin_open,                                                                                            \
     plugin_close,                                                                                           \
     plugin_refuses,                                                                                         \
     plugin_arithmetic,                                                                                      \
     plugin_deterministic,                                                                                   \
     plugin_workspace,                                                                                       \
     plugin_forward,                                                                                         \
     plugin_backward,                                                                                        \
     plugin_launches}
static const dualkv_kernel cuda_kernel =
    KERNEL("cuda", "fused shared-prompt attention, mma.sync tensor cores (fp32: plain FFMA); det", 0);
static const dualkv_kernel replicated_kernel =
    KERNEL("cuda-replicated", "the same arithmetic as standard attention on the replicated layout; det", 1);

extern "C" __attribute__((visibility("default"))) const dualkv_kernel *const *dualkv_kernels(uint32_t abi,
                                                                                             int *count) {
    static const dualkv_kernel *const list[] = {&cuda_kernel, &replicated_kernel, &dkv_fp64Kernel};
    *count = abi == DUALKV_ABI ? 3 : 0;
    return abi == DUALKV_ABI ? list : NULL;
}
