/* oracle.cu: opening, memory, the traversal, and the table of functions (ref/device_oracle.h). */
#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../ref/partials.h"
#include "../ref/dtype.h"
#include "oracle_impl.cuh"

#define TILE_ROWS \
    4096 /* stacked rows, keys: measured on an H200, where products this large reach dgemm's own speed */
#define TILE_KEYS 8192
#define KEPT_MOST ((int64_t)1 << 29) /* elements of tiles that are kept */
#define POOL_KEPT ((uint64_t)1 << 30) /* bytes that stay ours from one oracle to the next: taking memory anew takes as long
                                         as a small oracle */
#define TABLE_MAX \
    ((int64_t)1 << 28) /* maxima by key tile of one block; beyond, every key tile is taken to raise it */

static char last_error[512];

int dkv_oracleFail(const char *file, int line, const char *fmt, ...) {
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* lanes fail side by side */
    char text[sizeof last_error];
    va_list ap;
    int n = snprintf(text, sizeof text, "%s:%d: ", file, line);
    va_start(ap, fmt);
    vsnprintf(text + n, sizeof text - (size_t)n, fmt, ap);
    va_end(ap);
    (void)cudaGetLastError();
    pthread_mutex_lock(&lock);
    memcpy(last_error, text, sizeof last_error);
    pthread_mutex_unlock(&lock);
    return 1;
}

static const char *oracle_error(void) { return last_error; }

static int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

int dkv_loadBlas(int lanes, const dkv_blas **out) {
    static dkv_blas b;
    static const char *const names[] = {"libcublas.so.13", "libcublas.so.12", "libcublas.so",
                                        "/usr/local/cuda/lib64/libcublas.so"};
    if (!b.library) {
        void *lib = NULL;
        for (size_t i = 0; i < sizeof names / sizeof *names && !lib; i++)
            lib = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
        if (!lib)
            return dkv_oracleFail(__FILE__, __LINE__, "the oracle on the device needs cuBLAS (%s): %s",
                                  names[0], dlerror());
        *(void **)&b.create = dlsym(lib, "cublasCreate_v2");
        *(void **)&b.setStream = dlsym(lib, "cublasSetStream_v2");
        *(void **)&b.dgemm = dlsym(lib, "cublasDgemm_v2");
        *(void **)&b.batched = dlsym(lib, "cublasDgemmStridedBatched");
        if (!b.create || !b.setStream || !b.dgemm || !b.batched) {
            dlclose(lib);
            return dkv_oracleFail(__FILE__, __LINE__, "cuBLAS lacks a function that the oracle needs");
        }
        cudaMemPool_t pool;
        uint64_t kept = POOL_KEPT;
        int device;
        DKV_TRY_CUDA(cudaGetDevice(&device));
        DKV_TRY_CUDA(cudaDeviceGetDefaultMemPool(&pool, device));
        DKV_TRY_CUDA(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &kept));
        b.library = lib;
    }
    for (int i = 0; i < lanes; i++)
        if (!b.handle[i] && b.create(&b.handle[i]) != CUBLAS_STATUS_SUCCESS) {
            b.handle[i] = NULL;
            return dkv_oracleFail(__FILE__, __LINE__, "cuBLAS cannot be initialised");
        }
    *out = &b;
    return 0;
}

/* --- traversal --- */

bool dkv_nextScene(const dkv_device_oracle *o, dkv_scene *s) {
    const dualkv_problem *v = &o->l->view;
    int64_t next = s->node < 0 ? 0 : s->r1;
    while (s->node < 0 || next >= v->segments[s->node].q_len) {
        if (s->node + 1 >= v->n_segments) return false;
        s->node++;
        next = 0;
    }
    s->seg = &v->segments[s->node];
    s->r0 = next;
    s->r1 = min64(next + o->rows, s->seg->q_len);
    s->m = (int32_t)((s->r1 - s->r0) * o->g);
    const int32_t *bad = o->bad_q + s->kvh * (v->tq + 1) + s->seg->q_start;
    s->finite_rows = bad[s->r1] == bad[s->r0];
    return true;
}

bool dkv_finiteKeys(const dkv_device_oracle *o, const dkv_scene *s, const dkv_area *t) {
    const int32_t *bad = o->bad_k + s->kvh * (o->l->view.tk + 1) + t->k_row;
    return bad[t->n] == bad[0];
}

bool dkv_nextArea(const dkv_device_oracle *o, const dkv_scene *s, int32_t *range, dkv_area *t) {
    const dualkv_problem *v = &o->l->view;
    const dkv_mask_view mask = dkv_viewMask(o->p, s->node);
    int32_t r = *range < 0 ? 0 : *range, slot0 = *range < 0 ? 0 : t->slot0, index = *range < 0 ? 0 : t->index + 1;
    int64_t j = *range < 0 ? 0 : t->j0 - t->offset + (t->offset / o->ld + 1) * o->ld;
    for (; r < s->seg->range_count; r++) {
        const dualkv_range *x = &v->ranges[s->seg->range_begin + r];
        for (j = max64(j, x->pos); j < x->pos + x->len; j += o->ld) {
            int64_t j0 = j, j1 = min64(j + o->ld, x->pos + x->len);
            int vis = dkv_pairTrim(&mask, s->r0, s->r1, &j0, &j1);
            if (!vis || j0 >= j1) continue;
            j0 = x->pos + (j0 - x->pos) / DKV_SUB_KEYS * DKV_SUB_KEYS;
            if (vis == 2) vis = dkv_pairBlock(&mask, s->r0, s->r1, j0, j1);
            if (!vis) continue;
            *range = r;
            memset(t, 0, sizeof *t);
            t->mask = mask;
            t->r0 = s->r0;
            t->q_row = s->seg->q_start + s->r0;
            t->j0 = j0;
            t->offset = j0 - x->pos;
            t->k_row = x->k_start + t->offset;
            t->m = s->m;
            t->n = (int32_t)(j1 - j0);
            t->ld = (int32_t)o->ld;
            t->g = o->g;
            t->vis = vis;
            t->slot0 = slot0;
            t->index = index;
            t->sub_rows = (int32_t)o->sub_rows;
            t->scale = o->p->scale;
            t->softcap = o->p->softcap;
            t->slopes = o->slopes ? o->slopes + (int64_t)s->kvh * o->g : NULL;
            return true;
        }
        if (o->a.key_tile > 0) slot0 += (int32_t)((x->len + o->a.key_tile - 1) / o->a.key_tile);
        j = 0;
    }
    return false;
}

bool dkv_nextOrdered(const dkv_device_oracle *o, const dkv_scene *s, int32_t *range, dkv_area *t) {
    if (!o->a.key_order) return dkv_nextArea(o, s, range, t);
    const int32_t before = *range < 0 ? INT32_MAX : t->index;
    dkv_area next = {};
    int32_t at = -1;
    bool found = false;
    while (dkv_nextArea(o, s, &at, &next) && next.index < before) {
        *t = next;
        *range = at;
        found = true;
    }
    return found;
}

int dkv_oracleTick(dkv_device_oracle *o, const dkv_area *t) {
    o->done += (double)t->m * t->n;
    if (!o->set.progress) return 0;
    DKV_TRY_CUDA(cudaStreamSynchronize(o->stream));
    return o->set.progress(o->set.context, o->todo > 0 ? fmin(o->done / o->todo, 1) : 1)
               ? dkv_oracleFail(__FILE__, __LINE__, "interrupted")
               : 0;
}

/* --- products --- */

static int blasCheck(cublasStatus_t s, int line) {
    return s == CUBLAS_STATUS_SUCCESS ? 0 : dkv_oracleFail(__FILE__, line, "cuBLAS: status %d", (int)s);
}

int dkv_gemmNt(dkv_device_oracle *o, const dkv_area *t, int d, double alpha, const double *x, const double *y,
               double *c) {
    const double zero = 0;
    o->flops += 2.0 * t->m * t->n * d;
    return blasCheck(o->blas->dgemm(o->handle, CUBLAS_OP_T, CUBLAS_OP_N, t->n, t->m, d, &alpha, y, d, x, d,
                                    &zero, c, t->ld),
                     __LINE__);
}

/* The slow way, pair by pair, where an operand is not finite and some pairs are masked. */
__global__ void rows_kernel(dkv_area t, int d, double alpha, const double *w, const double *x, double beta,
                            double *c) {
    DKV_GRID_LOOP(e, (int64_t)t.m * d) {
        int i = (int)(e / d), k = (int)(e % d);
        double sum = 0;
        for (int j = 0; j < t.n; j++)
            if (dkv_seesPair(t, i, j)) sum += w[(int64_t)i * t.ld + j] * x[(int64_t)j * d + k];
        c[e] = alpha * sum + (beta != 0 ? beta * c[e] : 0);
    }
}

__global__ void keys_kernel(dkv_area t, int d, double alpha, const double *w, const double *x, double beta,
                            double *c, int64_t ldc) {
    DKV_GRID_LOOP(e, (int64_t)t.n * d) {
        int j = (int)(e / d), k = (int)(e % d);
        double sum = 0, *to = c + j * ldc + k;
        for (int i = 0; i < t.m; i++)
            if (dkv_seesPair(t, i, j)) sum += w[(int64_t)i * t.ld + j] * x[(int64_t)i * d + k];
        *to = alpha * sum + (beta != 0 ? beta * *to : 0);
    }
}

int dkv_gemmRows(dkv_device_oracle *o, const dkv_area *t, int d, double alpha, const double *w,
                 const double *x, double beta, double *c, bool careful) {
    if (careful && t->vis != 1) {
        rows_kernel<<<dkv_blocksFor((int64_t)t->m * d, 128), 128, 0, o->stream>>>(*t, d, alpha, w, x, beta,
                                                                                  c);
        DKV_TRY_CUDA(cudaGetLastError());
        return 0;
    }
    o->flops += 2.0 * t->m * t->n * d;
    return blasCheck(o->blas->dgemm(o->handle, CUBLAS_OP_N, CUBLAS_OP_N, d, t->m, t->n, &alpha, x, d, w,
                                    t->ld, &beta, c, d),
                     __LINE__);
}

int dkv_gemmKeys(dkv_device_oracle *o, const dkv_area *t, int d, double alpha, const double *w,
                 const double *x, double beta, double *c, int64_t ldc, bool careful) {
    if (careful && t->vis != 1) {
        keys_kernel<<<dkv_blocksFor((int64_t)t->n * d, 128), 128, 0, o->stream>>>(*t, d, alpha, w, x, beta, c,
                                                                                  ldc);
        DKV_TRY_CUDA(cudaGetLastError());
        return 0;
    }
    o->flops += 2.0 * t->m * t->n * d;
    return blasCheck(o->blas->dgemm(o->handle, CUBLAS_OP_N, CUBLAS_OP_T, d, t->n, t->m, &alpha, x, d, w,
                                    t->ld, &beta, c, (int)ldc),
                     __LINE__);
}

__global__ void scores_kernel(dkv_area t, double *s, double *cap) {
    DKV_GRID_LOOP(e, (int64_t)t.m * t.n) {
        int i = (int)(e / t.n), j = (int)(e % t.n);
        int64_t at = (int64_t)i * t.ld + j;
        double x = s[at];
        if (t.softcap > 0) {
            double y = tanh(x / t.softcap);
            if (cap) cap[at] = y;
            x = t.softcap * y;
        }
        x -= dkv_biasOf(t, i, j);
        s[at] = dkv_seesPair(t, i, j) ? x : -INFINITY;
    }
}

int dkv_finalScores(dkv_device_oracle *o, const dkv_area *t, double *s, double *cap) {
    if (t->vis == 1 && !(t->softcap > 0) && !t->slopes) return 0;
    scores_kernel<<<dkv_blocksFor((int64_t)t->m * t->n, 256), 256, 0, o->stream>>>(*t, s, cap);
    DKV_TRY_CUDA(cudaGetLastError());
    return 0;
}

int dkv_loadScores(dkv_device_oracle *o, const dkv_scene *s, const dkv_area *t, double *cap, double **scores,
                   double **sizes) {
    const int64_t d = o->p->dqk, q = (s->seg->q_start + s->r0) * o->g * d, k = t->k_row * d;
    double *kept = dkv_keptTile(o, t, 0);
    *scores = kept ? kept : o->work[0];
    if (sizes) *sizes = kept ? dkv_keptTile(o, t, 1) : o->work[2];
    if (kept && t->index < o->filled) return 0;
    DKV_TRY(dkv_gemmNt(o, t, (int)d, t->scale, o->q + q, o->k + k, *scores));
    DKV_TRY(dkv_finalScores(o, t, *scores, cap));
    if (sizes) DKV_TRY(dkv_gemmNt(o, t, (int)d, 1, o->aq + q, o->ak + k, *sizes));
    o->filled = t->index + 1;
    return 0;
}

__global__ void scale_kernel(int64_t n, int d, const double *by, double *acc) {
    DKV_GRID_LOOP(e, n) acc[e] *= by[e / d];
}

int dkv_scaleRows(dkv_device_oracle *o, int m, int d, const double *by, double *acc) {
    scale_kernel<<<dkv_blocksFor((int64_t)m * d, 256), 256, 0, o->stream>>>((int64_t)m * d, d, by, acc);
    DKV_TRY_CUDA(cudaGetLastError());
    return 0;
}

/* --- operands --- */

/* [rows, heads, d] of one head as doubles, rounded to the declared format of operands (f.mask 0: as they
 * are), and |x|. */
__global__ void decode_kernel(const void *in, int dtype, int64_t rows, int64_t heads, int64_t head, int64_t d,
                              dkv_rounder f, double operand, double *out, double *magnitude) {
    DKV_GRID_LOOP(e, rows * d) {
        double x = dkv_decodeOne(in, dtype, ((e / d) * heads + head) * d + e % d);
        if (magnitude) magnitude[e] = dkv_formulaMagnitude(x, operand);
        if (f.mask) {
            double a = fabs(x), c = a > f.floor ? a : f.floor, r;
            c = __longlong_as_double((long long)(((uint64_t)__double_as_longlong(c) & f.mask) + f.add));
            r = (a + c) - c;
            x = copysign(r < f.limit && a < f.limit ? r : a >= f.limit ? (double)INFINITY : x + x, x);
        }
        out[e] = x;
    }
}

static int decode(dkv_device_oracle *o, const void *in, int64_t rows, int32_t kvh, int64_t d, dkv_rounder f,
                  double *out, double *magnitude) {
    if (!in || rows == 0) return 0;
    decode_kernel<<<dkv_blocksFor(rows * d, 256), 256, 0, o->stream>>>(
        in, o->p->dtype, rows, o->p->hkv, kvh, d, f, o->units.operand, out, magnitude);
    DKV_TRY_CUDA(cudaGetLastError());
    return 0;
}

int dkv_loadHead(dkv_device_oracle *o, int32_t kvh, int32_t format) {
    const dkv_problem *p = o->p;
    const int64_t tq = o->l->view.tq, tk = o->l->view.tk;
    const dkv_rounder f = dkv_makeRounder(format);
    DKV_TRY(decode(o, o->in.q, tq, kvh, (int64_t)o->g * p->dqk, f, o->q, o->aq));
    DKV_TRY(decode(o, o->in.d_o, tq, kvh, (int64_t)o->g * p->dv, f, o->d_o, o->ado));
    DKV_TRY(decode(o, o->in.k, tk, kvh, p->dqk, f, o->k, o->ak));
    return decode(o, o->in.v, tk, kvh, p->dv, f, o->v, o->av);
}

/* flag [heads, rows]: 1 where one of the width elements is not finite. */
__global__ void bad_kernel(const void *in, int dtype, int64_t rows, int64_t heads, int64_t width,
                           uint8_t *flag) {
    int64_t warps = (int64_t)gridDim.x * blockDim.x / 32, lane = threadIdx.x % 32;
    for (int64_t w = (blockIdx.x * (int64_t)blockDim.x + threadIdx.x) / 32; w < rows * heads; w += warps) {
        int bad = 0;
        for (int64_t c = lane; c < width; c += 32) bad |= !isfinite(dkv_decodeOne(in, dtype, w * width + c));
        if (__any_sync(~0u, bad) && lane == 0) flag[w % heads * rows + w / heads] = 1;
    }
}

__global__ void bad_lse_kernel(const float *d_lse, int64_t rows, int64_t hq, int64_t g, uint8_t *flag) {
    DKV_GRID_LOOP(e, rows * hq) {
        if (!isfinite(d_lse[e])) flag[e / rows / g * rows + e % rows] = 1;
    }
}

static int countBad(dkv_device_oracle *o, const void *x, const void *y, const float *d_lse, int64_t rows,
                    int64_t wx, int64_t wy, int32_t **out) {
    const int64_t heads = o->p->hkv, n = rows * heads;
    uint8_t *flag, *host = (uint8_t *)malloc((size_t)n + 1);
    int32_t *sums = (int32_t *)malloc(sizeof *sums * (size_t)(heads * (rows + 1)));
    *out = sums;
    if (!host || !sums) return free(host), dkv_oracleFail(__FILE__, __LINE__, "out of memory");
    cudaError_t e = cudaMallocAsync(&flag, (size_t)n + 1, o->stream);
    if (!e) e = cudaMemsetAsync(flag, 0, (size_t)n + 1, o->stream);
    if (!e && n > 0) {
        bad_kernel<<<1024, 256, 0, o->stream>>>(x, o->p->dtype, rows, heads, wx, flag);
        if (y) bad_kernel<<<1024, 256, 0, o->stream>>>(y, o->p->dtype, rows, heads, wy, flag);
        if (d_lse) bad_lse_kernel<<<1024, 256, 0, o->stream>>>(d_lse, rows, o->p->hq, o->g, flag);
        e = cudaMemcpyAsync(host, flag, (size_t)n, cudaMemcpyDeviceToHost, o->stream);
    }
    if (!e) e = cudaStreamSynchronize(o->stream);
    cudaFreeAsync(flag, o->stream);
    for (int64_t h = 0; h < heads && !e; h++) {
        int32_t *s = sums + h * (rows + 1);
        s[0] = 0;
        for (int64_t i = 0; i < rows; i++) s[i + 1] = s[i] + host[h * rows + i];
    }
    free(host);
    DKV_TRY_CUDA(e);
    return 0;
}

/* --- open and close --- */

static int reserve(dkv_device_oracle *o, double **to, int64_t n) {
    DKV_TRY_CUDA(cudaMallocAsync(to, sizeof(double) * (size_t)(n < 1 ? 1 : n), o->stream));
    return 0;
}

/* Key tiles of the longest list of ranges. */
static int64_t mostSlots(const dkv_layout *l, int64_t tile) {
    const dualkv_problem *v = &l->view;
    int64_t most = 0;
    for (int32_t s = 0; s < v->n_segments; s++) {
        int64_t n = 0;
        for (int32_t r = 0; r < v->segments[s].range_count; r++)
            n += (v->ranges[v->segments[s].range_begin + r].len + tile - 1) / tile;
        most = max64(most, n);
    }
    return most;
}

/* Tiles of the longest list of ranges, as far as there may be room; tanh of softcap's scores is not kept. */
static int32_t countKept(const dkv_device_oracle *o) {
    const int64_t tile = o->max_m * o->ld, most = mostSlots(o->l, o->ld);
    /* Last first: what is kept is of the walk's first tiles, not of its last. */
    return o->p->softcap > 0 || o->a.key_order ? 0 : (int32_t)min64(most, KEPT_MOST / tile);
}

static void setGeometry(dkv_device_oracle *o) {
    const dkv_problem *p = o->p;
    const int64_t longest = max64(o->l->view.max_q_len, 1), keys = max64(o->l->view.max_k_len, 1);
    int64_t m = o->set.rows > 0 ? o->set.rows : TILE_ROWS, n = o->set.keys > 0 ? o->set.keys : TILE_KEYS;
    o->g = p->hq / p->hkv;
    o->sub_rows = o->g >= DKV_BLOCK_ROWS ? 1 : DKV_BLOCK_ROWS / o->g;
    o->rows = max64(m / (o->sub_rows * o->g), 1) * o->sub_rows;
    o->rows = min64(o->rows, (longest + o->sub_rows - 1) / o->sub_rows * o->sub_rows);
    o->max_m = o->rows * o->g;
    o->ld = (min64(n, keys) + DKV_SUB_KEYS - 1) / DKV_SUB_KEYS * DKV_SUB_KEYS;
    o->slots = o->a.key_tile > 0 ? mostSlots(o->l, o->a.key_tile) : 0;
    if (o->slots * o->max_m > TABLE_MAX) o->slots = 0;
    o->n_kept = countKept(o);
}

static int uploadRoundings(dkv_device_oracle *o) {
    const int64_t tk = o->l->view.tk;
    double *x = (double *)malloc(sizeof *x * (size_t)(2 * tk + 1));
    if (!x) return dkv_oracleFail(__FILE__, __LINE__, "out of memory");
    dkv_countRoundings(o->l, &o->a, o->g, x, x + tk);
    cudaError_t e = cudaMemcpyAsync(o->through, x, 8 * (size_t)tk, cudaMemcpyHostToDevice, o->stream);
    if (!e) e = cudaMemcpyAsync(o->roundings, x + tk, 8 * (size_t)tk, cudaMemcpyHostToDevice, o->stream);
    if (!e) e = cudaStreamSynchronize(o->stream);
    free(x);
    DKV_TRY_CUDA(e);
    return 0;
}

static int allocate(dkv_device_oracle *o) {
    const dkv_problem *p = o->p;
    const int64_t tq = o->l->view.tq, tk = o->l->view.tk;
    for (int part = 0; part < DKV_N_PARTS; part++)
        for (int id = 0; id < DKV_N_OUTPUTS; id++)
            if (o->count[id] > 0) {
                DKV_TRY(reserve(o, &o->out[part][id], o->count[id]));
                DKV_TRY_CUDA(
                    cudaMemsetAsync(o->out[part][id], 0, sizeof(double) * (size_t)o->count[id], o->stream));
            }
    DKV_TRY(reserve(o, &o->chain_k, tk));
    DKV_TRY(reserve(o, &o->key_n, tk));
    DKV_TRY(reserve(o, &o->through, tk));
    DKV_TRY(reserve(o, &o->roundings, tk));
    DKV_TRY(uploadRoundings(o));
    if (p->sink) {
        DKV_TRY(reserve(o, &o->sink_t, p->hq * tq));
        DKV_TRY(reserve(o, &o->sink_e, p->hq * tq));
        DKV_TRY(reserve(o, &o->sink_s, p->hq * tq));
    }
    if (p->alibi) {
        DKV_TRY_CUDA(cudaMallocAsync(&o->slopes, sizeof(float) * (size_t)p->hq, o->stream));
        DKV_TRY_CUDA(cudaMemcpyAsync(o->slopes, o->l->alibi_slopes, sizeof(float) * (size_t)p->hq,
                                     cudaMemcpyHostToDevice, o->stream));
    }
    return 0;
}

typedef struct own_buffer { /* of a lane, and how many doubles it has */
    double **to;
    int64_t n;
} own_buffer;
#define OWN (15 + DKV_WORK)

static void listOwn(dkv_device_oracle *o, own_buffer all[OWN]) {
    const dkv_problem *p = o->p;
    const int64_t tq = o->l->view.tq, tk = o->l->view.tk, m = o->max_m, d = max64(p->dqk, p->dv);
    const int64_t q = tq * o->g * p->dqk, d_o = tq * o->g * p->dv, k = tk * p->dqk, v = tk * p->dv;
    const own_buffer list[15] = {{&o->q, q},
                                 {&o->aq, q},
                                 {&o->d_o, d_o},
                                 {&o->ado, d_o},
                                 {&o->k, k},
                                 {&o->ak, k},
                                 {&o->v, v},
                                 {&o->av, v},
                                 {&o->acc, m * d},
                                 {&o->acc2, m * d},
                                 {&o->v_max, (o->rows / o->sub_rows + 1) * d},
                                 {&o->table, o->slots * m},
                                 {&o->row_memory, DKV_ROW_ARRAYS * m},
                                 {&o->kept[0], o->n_kept * m * o->ld},
                                 {&o->kept[1], o->n_kept * m * o->ld}};
    memcpy(all, list, sizeof list);
    for (int i = 0; i < DKV_WORK; i++) all[15 + i] = own_buffer{&o->work[i], m * o->ld};
}

int dkv_allocateHead(dkv_device_oracle *o) {
    own_buffer own[OWN];
    const int64_t m = o->max_m;
    listOwn(o, own);
    for (int i = 0; i < OWN; i++) *own[i].to = NULL;
    o->r.seen = NULL;
    for (int i = 0; i < OWN; i++) DKV_TRY(reserve(o, own[i].to, own[i].n));
    double **rows[] = {
        &o->r.max,   &o->r.sum,   &o->r.by,        &o->r.lse,       &o->r.delta,  &o->r.n,     &o->r.steps,
        &o->r.tiles, &o->r.rises, &o->r.cmax,      &o->r.top,       &o->r.last,   &o->r.kappa, &o->r.w0,
        &o->r.sum_h, &o->r.xtop,  &o->r.tol_lse,   &o->r.base,      &o->r.chain,  &o->r.fmax,  &o->r.sum_var,
        &o->r.lost,  &o->r.terms, &o->r.score_var, &o->r.ones, &o->r.delta_var, &o->r.q_norm, &o->r.o_norm};
    static_assert(sizeof rows / sizeof *rows == DKV_ROW_ARRAYS, "one array each");
    for (int i = 0; i < DKV_ROW_ARRAYS; i++) *rows[i] = o->row_memory + i * m;
    DKV_TRY_CUDA(cudaMallocAsync(&o->r.seen, (size_t)m, o->stream));
    return 0;
}

static double ownBytes(const dkv_device_oracle *o) {
    own_buffer own[OWN];
    double all = 0;
    listOwn((dkv_device_oracle *)o, own);
    for (int i = 0; i < OWN; i++) all += 8.0 * (double)own[i].n;
    return all;
}

double dkv_laneBytes(const dkv_device_oracle *o) { return ownBytes(o) + dkv_twinBytes(o); }

static void dropBuffer(const dkv_device_oracle *o, void *x) {
    if (x) cudaFreeAsync(x, o->stream);
}

void dkv_freeHead(dkv_device_oracle *o) {
    own_buffer own[OWN];
    listOwn(o, own);
    for (int i = 0; i < OWN; i++) dropBuffer(o, *own[i].to);
    dropBuffer(o, o->r.seen);
}

static void oracle_close(dkv_device_oracle *o) {
    if (!o) return;
    dkv_closeLanes(o);
    dkv_closeTwin(o);
    for (int part = 0; part < DKV_N_PARTS; part++)
        for (int id = 0; id < DKV_N_OUTPUTS; id++) dropBuffer(o, o->out[part][id]);
    for (double *x : {o->chain_k, o->key_n, o->through, o->roundings, o->sink_t, o->sink_e, o->sink_s}) dropBuffer(o, x);
    dkv_freeHead(o);
    dropBuffer(o, o->slopes);
    free(o->bad_q);
    free(o->bad_k);
    if (o->stream) cudaStreamSynchronize(o->stream);
    if (o->begin) cudaEventDestroy(o->begin);
    if (o->end) cudaEventDestroy(o->end);
    if (o->stream) cudaStreamDestroy(o->stream);
    free(o);
}

static int openAll(dkv_device_oracle *o) {
    const dkv_problem *p = o->p;
    const dualkv_problem *v = &o->l->view;
    DKV_TRY(dkv_loadBlas(1, &o->blas));
    DKV_TRY_CUDA(cudaStreamCreateWithFlags(&o->stream, cudaStreamNonBlocking));
    DKV_TRY_CUDA(cudaEventCreate(&o->begin));
    DKV_TRY_CUDA(cudaEventCreate(&o->end));
    o->handle = o->blas->handle[0];
    DKV_TRY(blasCheck(o->blas->setStream(o->handle, o->stream), __LINE__));
    setGeometry(o);
    DKV_TRY(allocate(o));
    DKV_TRY(dkv_allocateHead(o));
    DKV_TRY(countBad(o, o->in.q, o->in.d_o, p->grad ? o->in.d_lse : NULL, v->tq, (int64_t)o->g * p->dqk,
                     (int64_t)o->g * p->dv, &o->bad_q));
    DKV_TRY(countBad(o, o->in.k, o->in.v, NULL, v->tk, p->dqk, p->dv, &o->bad_k));
    return dkv_openLanes(o);
}

static int oracle_open(const dkv_problem *p, const dkv_layout *l, const dkv_device_inputs *in,
                       const dualkv_arithmetic *a, const dkv_oracle_settings *settings,
                       dkv_device_oracle **out) {
    dkv_err err = {};
    *out = NULL;
    if (dkv_checkArithmetic(a, &err)) return dkv_oracleFail(__FILE__, __LINE__, "%s", err.text);
    const dkv_partials part = dkv_partialsOf(a);
    if (part.rows || part.dq_block)
        return dkv_oracleFail(__FILE__, __LINE__, "it knows no running sums that are rounded once a block");
    if (l->view.tk > INT32_MAX / 2) return dkv_oracleFail(__FILE__, __LINE__, "more than 2^30 keys");
    dkv_device_oracle *o = (dkv_device_oracle *)calloc(1, sizeof *o);
    if (!o) return dkv_oracleFail(__FILE__, __LINE__, "out of memory");
    o->p = p;
    o->l = l;
    o->in = *in;
    if (!p->grad) o->in.d_o = NULL;
    o->a = *a;
    if (settings) o->set = *settings;
    dkv_makeUnits(p, &o->a, &o->units);
    dkv_countOutputs(l, o->count);
    int rc = openAll(o);
    if (rc) oracle_close(o);
    else *out = o;
    return rc;
}

static int64_t oracle_bytes(const dkv_problem *p, const dkv_layout *l) {
    int64_t n[DKV_N_OUTPUTS], all = 0;
    dkv_device_oracle o = {};
    o.p = p;
    o.l = l;
    setGeometry(&o);
    dkv_countOutputs(l, n);
    for (int id = 0; id < DKV_N_OUTPUTS; id++) all += DKV_N_PARTS * 8 * n[id];
    return all + (int64_t)dkv_laneBytes(&o) + ((int64_t)1 << 30);
}

/* --- stages --- */

typedef struct stage {
    int kind; /* 0 truth, 1 bound, 2 twin, 3 gradients */
    const void *o;
    const float *lse;
} stage;

static int runStage(dkv_device_oracle *o, stage s) {
    float ms = 0;
    double pairs = 0;
    for (int32_t n = 0; n < o->p->n_nodes; n++) {
        const dkv_node *x = &o->p->nodes[n];
        pairs += (double)o->l->view.segments[n].q_len * (double)(x->context + x->len) * o->g * o->p->hkv;
    }
    o->done = 0;
    o->todo = 2 * pairs;
    DKV_TRY_CUDA(cudaEventRecord(o->begin, o->stream));
    int rc = s.kind == 2 ? dkv_runTwin(o, s.o, s.lse) : dkv_runTruth(o, s.kind == 1, s.o, s.lse);
    if (rc) return rc;
    DKV_TRY_CUDA(cudaEventRecord(o->end, o->stream));
    DKV_TRY_CUDA(cudaEventSynchronize(o->end));
    DKV_TRY_CUDA(cudaEventElapsedTime(&ms, o->begin, o->end));
    o->seconds += ms / 1e3;
    for (int i = 1; i < o->lanes; i++) o->flops += o->lane[i]->flops, o->lane[i]->flops = 0;
    return 0;
}

static int oracle_truth(dkv_device_oracle *o) { return runStage(o, stage{0, NULL, NULL}); }
static int oracle_bound(dkv_device_oracle *o) {
    o->bounded = true;
    return runStage(o, stage{1, NULL, NULL});
}
static int oracle_twin(dkv_device_oracle *o, const void *kernel_o, const float *kernel_lse) {
    return runStage(o, stage{2, kernel_o, kernel_lse});
}
static int oracle_gradients(dkv_device_oracle *o, const void *kernel_o, const float *kernel_lse) {
    return runStage(o, stage{3, kernel_o, kernel_lse});
}
static int oracle_alikeRows(dkv_device_oracle *o, dkv_alike *out) {
    *out = o->alike;
    return 0;
}
static int oracle_hasTwin(const dkv_device_oracle *o, dkv_tensor_id id) { return o->has_twin[id]; }

static int oracle_read(dkv_device_oracle *o, dkv_oracle_part part, dkv_tensor_id id, double *host) {
    if (!o->out[part][id])
        return dkv_oracleFail(__FILE__, __LINE__, "this problem has no %s", dkv_tensorName(id));
    return dkv_readDoubles(o->out[part][id], o->count[id], host); /* every stage has ended when it returns */
}

__global__ void store_kernel(int64_t n, int dtype, dkv_rounder f, const double *x, void *out) {
    DKV_GRID_LOOP(e, n) {
        const double y = dkv_roundBy(f, x[e]);
        if (dtype == DUALKV_FP32) {
            ((float *)out)[e] = (float)x[e];
        } else if (dtype == DUALKV_BF16) {
            ((uint16_t *)out)[e] = (uint16_t)(__float_as_uint((float)y) >> 16);
        } else {
            const double a = fabs(y); /* exact in fp16 by now */
            const unsigned long long u = (unsigned long long)__double_as_longlong(a);
            const uint32_t normal = (uint32_t)((u >> 42) - (1008u << 10)),
                           small = (uint32_t)((a < 1 ? a : 0) * 0x1p24);
            const uint32_t special = 0x7c00u | ((uint32_t)(u >> 42) & 0x3ffu);
            const uint32_t sign = (uint32_t)((unsigned long long)__double_as_longlong(y) >> 48) & 0x8000u;
            ((uint16_t *)out)[e] = (uint16_t)(sign | (a < 0x1p-14 ? small : a < 65536 ? normal : special));
        }
    }
}

static int oracle_store(dkv_device_oracle *o, dkv_tensor_id id, void *device) {
    const int dtype = id == DKV_LSE || id == DKV_DSINK ? DUALKV_FP32 : o->p->dtype;
    if (o->count[id] == 0) return 0;
    store_kernel<<<dkv_blocksFor(o->count[id], 256), 256, 0, o->stream>>>(
        o->count[id], dtype, dkv_makeRounder(dtype), o->out[DKV_PART_TRUTH][id], device);
    DKV_TRY_CUDA(cudaGetLastError());
    DKV_TRY_CUDA(cudaStreamSynchronize(o->stream));
    if (id == DKV_LSE) o->stored_lse = device;
    return 0;
}

static int oracle_cost(dkv_device_oracle *o, double *seconds, double *flops) {
    *seconds = o->seconds;
    *flops = o->flops;
    return 0;
}

extern "C" __attribute__((visibility("default"))) const dkv_oracle_ops *dkv_oracleOps(void) {
    static const dkv_oracle_ops ops = {
        sizeof(dkv_oracle_ops),
        0,
        oracle_error,
        oracle_bytes,
        oracle_open,
        oracle_close,
        oracle_truth,
        oracle_bound,
        oracle_twin,
        oracle_hasTwin,
        oracle_read,
        oracle_store,
        oracle_cost,
        oracle_gradients,
        oracle_alikeRows,
    };
    return &ops;
}
