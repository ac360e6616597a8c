/* oracle_twin.cu: the twin on the device (ref/oracle_twin.c): what a head needs beforehand, and what is made
 * of its sums. Sums are cut where the CPU cuts them, at 256 keys and at its blocks of rows, so that the
 * statistics of a chain mean the same. */
#include <stdlib.h>
#include <string.h>

#include <new>

#include <thrust/device_ptr.h>
#include <thrust/execution_policy.h>
#include <thrust/scan.h>
#include <thrust/sort.h>

#include "../ref/partials.h"
#include "oracle_twin.cuh"

#define FEW 8192 /* hashes that are compared all with all: sooner done than sorted */

/* --- operands of a head --- */

/* A warp a row: unit row, squared norm (0 where not finite) and its root, squares times weight, magnitudes, what is
 * finite. Any of the outputs may be NULL. */
__global__ void operands_kernel(int64_t rows, int d, const double *x, const float *weight, float *unit,
                                double *norm2, double *root, double *square, double *magnitude, double *finite,
                                double *weighted) {
    const int64_t i = (blockIdx.x * (int64_t)blockDim.x + threadIdx.x) / 32;
    const int lane = threadIdx.x % 32;
    if (i >= rows) return;
    double top = 0, sum = 0;
    int bad = 0;
    for (int c = lane; c < d; c += 32) {
        const double y = fabs(x[i * d + c]);
        top = y > top ? y : top;
        bad |= !isfinite(y);
    }
    top = dkv_warpMax(top);
    bad = __any_sync(~0u, bad);
    for (int c = lane; c < d; c += 32) sum += (x[i * d + c] / top) * (x[i * d + c] / top);
    sum = dkv_warpSum(sum);
    const bool use = top > 0 && !bad;
    const double by = use ? 1 / (sqrt(sum) * top) : 0, w = weight ? (double)weight[i] : 1;
    for (int c = lane; c < d; c += 32) {
        const double y = x[i * d + c], z = isfinite(y) ? y : 0;
        unit[i * d + c] = use ? (float)(y * by) : 0;
        square[i * d + c] = z * z * w;
        magnitude[i * d + c] = fabs(z);
        if (finite) finite[i * d + c] = z;
        if (weighted) weighted[i * d + c] = z * w;
    }
    if (lane) return;
    const double all = use ? sum * top * top : 0;
    norm2[i] = all;
    root[i] = sqrt(all);
}

static int operands(dkv_device_oracle *o, int64_t rows, int d, const double *x, const float *weight,
                    float *unit, double *norm2, double *root, double *square, double *magnitude, double *finite,
                    double *weighted) {
    if (rows == 0) return 0;
    operands_kernel<<<dkv_blocksFor(rows * 32, 256), 256, 0, o->stream>>>(
        rows, d, x, weight, unit, norm2, root, square, magnitude, finite, weighted);
    DKV_TRY_CUDA(cudaGetLastError());
    return 0;
}

/* Mean squares of columns over groups of `per` rows: out [groups, d]. */
__global__ void means_kernel(const double *x, int64_t rows, int64_t per, int d, const double *live, double *out) {
    const int64_t a = blockIdx.x * per, b = a + per < rows ? a + per : rows;
    for (int c = threadIdx.x; c < d; c += blockDim.x) {
        double sum = 0, n = 0;
        for (int64_t i = a; i < b; i++) {
            const double y = x[i * d + c];
            if (live && live[i] == 0) continue;
            sum += isfinite(y) ? y * y : 0;
            n++;
        }
        out[blockIdx.x * (int64_t)d + c] = n > 0 ? sum / n : 0;
    }
}

int dkv_twinMeans(dkv_device_oracle *o, const double *x, int64_t rows, int64_t per, int d, const double *live,
                  double *out) {
    means_kernel<<<dkv_blocksFor(rows, (int)per), 128, 0, o->stream>>>(x, rows, per, d, live, out);
    DKV_TRY_CUDA(cudaGetLastError());
    return 0;
}

__global__ void mean_kernel(const float *x, int64_t rows, int64_t per, double *out) {
    const int64_t a = blockIdx.x * per, b = a + per < rows ? a + per : rows;
    double sum = 0;
    for (int64_t i = a + threadIdx.x; i < b; i += 32) sum += (double)x[i];
    sum = dkv_warpSum(sum);
    if (threadIdx.x == 0) out[blockIdx.x] = sum / (double)(b - a);
}

int dkv_twinMeanOf(dkv_device_oracle *o, const float *x, int64_t rows, int64_t per, double *out) {
    mean_kernel<<<dkv_blocksFor(rows, (int)per), 32, 0, o->stream>>>(x, rows, per, out);
    DKV_TRY_CUDA(cudaGetLastError());
    return 0;
}

/* --- equal rows --- */

typedef struct hashing {
    const void *a, *b, *c;    /* [rows, heads, da], ...; NULL: not there */
    const float *lse, *d_lse; /* [heads, rows] or NULL */
    const int32_t *cls;       /* [rows] */
    int64_t rows;
    int32_t dtype, heads, head0, g, da, db, dc;
} hashing;

__global__ void hash_kernel(hashing k, unsigned long long *out) {
    const int64_t e = (blockIdx.x * (int64_t)blockDim.x + threadIdx.x) / 32, row = e / k.g;
    const int lane = threadIdx.x % 32, head = k.head0 + (int)(e % k.g);
    if (row >= k.rows) return;
    const int64_t vec = row * k.heads + head;
    unsigned long long h = mixed(0x51ED2701ull + (unsigned)k.cls[row]);
    h += hashOf(k.a, k.dtype, vec * k.da, k.da, 1, lane);
    if (k.b) h = mixed(h) + hashOf(k.b, k.dtype, vec * k.db, k.db, 2, lane);
    if (k.c) h = mixed(h) + hashOf(k.c, k.dtype, vec * k.dc, k.dc, 3, lane);
    if (k.lse) h = mixed(h) + __float_as_uint(k.lse[head * k.rows + row]);
    if (k.d_lse) h = mixed(h) + __float_as_uint(k.d_lse[head * k.rows + row]);
    if (lane == 0) out[e] = mixed(h);
}

/* How many of sorted[n] equal each of hash[n]; the mean of x over them, `sums` its running sums in sorted's order (NULL: none). */
__global__ void runs_kernel(int64_t n, const unsigned long long *hash, const unsigned long long *sorted,
                            float *count, const double *sums, double *mean) {
    DKV_GRID_LOOP(i, n) {
        int64_t first, lo = 0, hi = n;
        while (lo < hi) {
            int64_t mid = (lo + hi) / 2;
            if (sorted[mid] < hash[i]) lo = mid + 1;
            else hi = mid;
        }
        first = lo;
        hi = n;
        while (lo < hi) {
            int64_t mid = (lo + hi) / 2;
            if (sorted[mid] <= hash[i]) lo = mid + 1;
            else hi = mid;
        }
        count[i] = (float)(lo - first);
        if (sums) mean[i] = (sums[lo - 1] - (first > 0 ? sums[first - 1] : 0)) / (double)(lo - first);
    }
}

/* The same without an order, for few. */
__global__ void equals_kernel(int64_t n, const unsigned long long *hash, float *count, const double *x, double *mean) {
    DKV_GRID_LOOP(i, n) {
        const unsigned long long mine = hash[i];
        int equal = 0;
        double sum = 0;
        for (int64_t j = 0; j < n; j++) {
            equal += hash[j] == mine;
            if (x && hash[j] == mine) sum += x[j];
        }
        count[i] = (float)equal;
        if (x) mean[i] = sum / equal;
    }
}

/* Memory for thrust that waits for nothing but its stream. */
struct stream_room {
    typedef char value_type;
    cudaStream_t stream;
    char *allocate(ptrdiff_t n) {
        void *x = NULL;
        if (cudaMallocAsync(&x, (size_t)n, stream) != cudaSuccess) throw std::bad_alloc();
        return (char *)x;
    }
    void deallocate(char *x, size_t) { cudaFreeAsync(x, stream); }
};

/* How many of hash[n] equal each; the mean of x[n] over them, unless x is NULL. */
static int countHashes(dkv_device_oracle *o, int64_t n, const unsigned long long *hash, float *count, const double *x,
                       double *mean) {
    dkv_twin_device *t = o->twin;
    if (n <= FEW) {
        equals_kernel<<<dkv_blocksFor(n, 64), 64, 0, o->stream>>>(n, hash, count, x, mean);
        DKV_TRY_CUDA(cudaGetLastError());
        return 0;
    }
    DKV_TRY_CUDA(cudaMemcpyAsync(t->sorted, hash, 8 * (size_t)n, cudaMemcpyDeviceToDevice, o->stream));
    thrust::device_ptr<unsigned long long> p(t->sorted);
    stream_room room = {o->stream};
    if (x) {
        DKV_TRY_CUDA(cudaMemcpyAsync(t->d_lse_sums, x, 8 * (size_t)n, cudaMemcpyDeviceToDevice, o->stream));
        thrust::device_ptr<double> sums(t->d_lse_sums);
        thrust::stable_sort_by_key(thrust::cuda::par_nosync(room).on(o->stream), p, p + n, sums);
        thrust::inclusive_scan(thrust::cuda::par_nosync(room).on(o->stream), sums, sums + n, sums);
    } else {
        thrust::sort(thrust::cuda::par_nosync(room).on(o->stream), p, p + n);
    }
    runs_kernel<<<dkv_blocksFor(n, 256), 256, 0, o->stream>>>(n, hash, t->sorted, count, x ? t->d_lse_sums : NULL, mean);
    DKV_TRY_CUDA(cudaGetLastError());
    return 0;
}

/* dLSE of a KV head's rows, [tq, g]; 0 where it is not finite. */
__global__ void finite_lse_kernel(int64_t tq, int g, int head0, const float *x, double *out) {
    DKV_GRID_LOOP(i, tq * g) {
        const double y = (double)x[(head0 + i % g) * tq + i / g];
        out[i] = isfinite(y) ? y : 0;
    }
}

static int countRuns(dkv_device_oracle *o, const hashing *k, float *count, const double *x, double *mean) {
    dkv_twin_device *t = o->twin;
    const int64_t n = k->rows * k->g;
    if (n == 0) return 0;
    hash_kernel<<<dkv_blocksFor(n * 32, 256), 256, 0, o->stream>>>(*k, t->hash);
    DKV_TRY_CUDA(cudaGetLastError());
    return countHashes(o, n, t->hash, count, x, mean);
}

static int countEqual(dkv_device_oracle *o, int32_t kvh, const void *kernel_o, const float *kernel_lse) {
    const dkv_problem *p = o->p;
    dkv_twin_device *t = o->twin;
    hashing k = {o->in.k,  NULL,   NULL, NULL, NULL,   t->segment_k, o->l->view.tk,
                 p->dtype, p->hkv, kvh,  1,    p->dqk, p->dv,        0};
    DKV_TRY(countRuns(o, &k, t->equal_k, NULL, NULL));
    k.b = o->in.v;
    DKV_TRY(countRuns(o, &k, t->equal_kv, NULL, NULL));
    if (!o->in.d_o) return 0;
    hashing q = {o->in.q,  o->in.d_o, kernel_o,   kernel_lse, o->in.d_lse, t->group_q, o->l->view.tq,
                 p->dtype, p->hq,     kvh * o->g, o->g,       p->dqk,      p->dv,      p->dv};
    if (o->in.d_lse && o->l->view.tq > 0) {
        finite_lse_kernel<<<dkv_blocksFor(o->l->view.tq * o->g, 256), 256, 0, o->stream>>>(
            o->l->view.tq, o->g, kvh * o->g, o->in.d_lse, t->d_lse);
        DKV_TRY_CUDA(cudaGetLastError());
    }
    for (int all = 0; all < (o->in.d_lse ? 2 : 1); all++) {
        const double *x = all ? t->d_lse : NULL;
        if (all) q.d_lse = NULL;
        q.cls = t->group_q;
        DKV_TRY(countRuns(o, &q, t->equal_any[all], x, t->any_d_lse));
        q.cls = t->segment_q;
        DKV_TRY(countRuns(o, &q, t->equal_own[all], x, t->own_d_lse));
    }
    return 0;
}

__global__ void classes_kernel(int64_t n, const unsigned long long *cls, const float *count, unsigned long long *out) {
    unsigned long long rows = 0, alike = 0, capped = 0;
    DKV_GRID_LOOP(i, n) {
        if (cls[i] == 0) continue;
        rows++;
        alike += cls[i] & DKV_CLASS_LEANS ? (unsigned long long)count[i] : 1;
        capped += cls[i] & DKV_CLASS_CAPPED ? (unsigned long long)count[i] : 1;
    }
    for (int s = 16; s; s >>= 1) {
        rows += __shfl_xor_sync(~0u, rows, s);
        alike += __shfl_xor_sync(~0u, alike, s);
        capped += __shfl_xor_sync(~0u, capped, s);
    }
    if (threadIdx.x % 32) return;
    atomicAdd(&out[0], rows);
    atomicAdd(&out[1], alike);
    atomicAdd(&out[2], capped);
}

/* Adds the head's rows, and how many of them err alike. */
static int countClasses(dkv_device_oracle *o) {
    dkv_twin_device *t = o->twin;
    const int64_t n = o->l->view.tq * o->g;
    if (n == 0) return 0;
    DKV_TRY(countHashes(o, n, t->row_class, t->equal_any[0], NULL, NULL));
    classes_kernel<<<256, 256, 0, o->stream>>>(n, t->row_class, t->equal_any[0], t->classes);
    DKV_TRY_CUDA(cudaGetLastError());
    return 0;
}

/* --- memory --- */

typedef struct buffer {
    void *to; /* a pointer */
    int64_t n;
    size_t size;
} buffer;
#define DOUBLES(field, n) \
    { &t->field, n, sizeof(double) }
#define FLOATS(field, n) \
    { &t->field, n, sizeof(float) }

static int take(dkv_device_oracle *o, const buffer *all, size_t n) {
    dkv_twin_device *t = o->twin;
    for (size_t i = 0; i < n; i++) {
        void *x = NULL;
        DKV_TRY_CUDA(cudaMallocAsync(&x, (size_t)(all[i].n < 1 ? 1 : all[i].n) * all[i].size, o->stream));
        t->memory[t->n_memory++] = x;
        memcpy(all[i].to, &x, sizeof x);
    }
    return 0;
}

/* first: the first lane's, with what all share; NULL: this is it. */
static int allocate(dkv_device_oracle *o, const dkv_twin_device *first) {
    const dkv_problem *p = o->p;
    const int64_t tq = o->l->view.tq, tk = o->l->view.tk, mq = tq * o->g, m = o->max_m;
    const int64_t dqk = p->dqk, dv = p->dv, d = dqk > dv ? dqk : dv, most = mq > tk ? mq : tk;
    dkv_twin_device *t = o->twin;
    t->subs = o->ld / DKV_SUB_KEYS;
    t->subm = o->rows / o->sub_rows + 1;
    t->sub_m = o->sub_rows * o->g;
    const int64_t rows = t->subs * m * d, keys = t->subm * o->ld * d, part = rows > keys ? rows : keys;
    const int64_t parts = t->apart ? t->parts : 0, loses = t->anyhow ? t->parts : 0, lost = t->anyhow ? m : 0, sinks = p->sink ? p->hq * tq : 0;
    const buffer all[] = {FLOATS(q1, mq * dqk),
                          FLOATS(o1, mq * dv),
                          FLOATS(k1, tk * dqk),
                          FLOATS(v1, tk * dv),
                          DOUBLES(q_norm, mq),
                          DOUBLES(o_norm, mq),
                          DOUBLES(k_norm, tk),
                          DOUBLES(v_norm, tk),
                          DOUBLES(q_root, mq),
                          DOUBLES(o_root, mq),
                          DOUBLES(k_root, tk),
                          DOUBLES(v_root, tk),
                          DOUBLES(q2, mq * dqk),
                          DOUBLES(o2, mq * dv),
                          DOUBLES(k2, tk * dqk),
                          DOUBLES(v2, tk * dv),
                          DOUBLES(ve, tk * dv),
                          DOUBLES(kf, tk * dqk),
                          FLOATS(equal_k, tk),
                          FLOATS(equal_kv, tk),
                          FLOATS(equal_any[0], mq),
                          FLOATS(equal_own[0], mq),
                          FLOATS(equal_any[1], o->in.d_lse ? mq : 0),
                          FLOATS(equal_own[1], o->in.d_lse ? mq : 0),
                          DOUBLES(d_lse, o->in.d_lse ? mq : 0),
                          DOUBLES(any_d_lse, o->in.d_lse ? mq : 0),
                          DOUBLES(own_d_lse, o->in.d_lse ? mq : 0),
                          DOUBLES(d_lse_sums, o->in.d_lse ? mq : 0),
                          DOUBLES(delta_own, m),
                          DOUBLES(row_class, mq),
                          DOUBLES(top.s, m),
                          DOUBLES(top.vs, m),
                          DOUBLES(top.chain, m),
                          DOUBLES(top.loss, m),
                          DOUBLES(top.keep2, m),
                          DOUBLES(top.equal, m),
                          DOUBLES(top.equal_v, m),
                          DOUBLES(top.key, m),
                          DOUBLES(step.count, t->subs * m),
                          DOUBLES(step.squares, t->subs * m),
                          DOUBLES(step.g, t->subs * m),
                          DOUBLES(step.g2, t->subs * m),
                          DOUBLES(step.ff, t->subs * m),
                          DOUBLES(step.share, t->subs * m),
                          DOUBLES(step.g_first, t->subs * m),
                          DOUBLES(step.f_first, t->subs * m),
                          DOUBLES(p1, t->subs * m),
                          DOUBLES(wsum, t->subs * m),
                          FLOATS(segment_k, tk),
                          FLOATS(segment_q, tq),
                          FLOATS(group_q, tq),
                          DOUBLES(hash, most),
                          DOUBLES(sorted, most),
                          DOUBLES(a1, m * d),
                          DOUBLES(a2, m * d),
                          DOUBLES(chain, m * d),
                          DOUBLES(loss, m * d),
                          DOUBLES(o_exact, m * dv),
                          DOUBLES(o_var, m * dv),
                          DOUBLES(q_mean2, t->subm * d),
                          DOUBLES(o_mean2, t->subm * d),
                          DOUBLES(mean_any[0], t->subm),
                          DOUBLES(mean_own[0], t->subm),
                          DOUBLES(mean_any[1], t->subm),
                          DOUBLES(mean_own[1], t->subm),
                          DOUBLES(k_mean2, t->subm * t->subs * d),
                          DOUBLES(v_mean2, t->subm * t->subs * d),
                          DOUBLES(mean_kv, t->subm * t->subs),
                          DOUBLES(last_mean, t->subm * d),
                          DOUBLES(by, t->subs * m),
                          DOUBLES(fade, t->subs * m),
                          DOUBLES(old, t->subs * m),
                          DOUBLES(count, t->subs * m),
                          DOUBLES(p2, t->subs * m),
                          DOUBLES(col_n, t->subm * o->ld),
                          DOUBLES(col_p2, t->subm * o->ld),
                          DOUBLES(col_ds2, t->subm * o->ld),
                          DOUBLES(part[0], part),
                          DOUBLES(part[1], part),
                          DOUBLES(part[2], part),
                          DOUBLES(part[3], part),
                          DOUBLES(table_max, t->table ? o->slots * m : 0),
                          DOUBLES(late.vs, t->late.on ? m : 0),
                          DOUBLES(late.doubt, t->late.on ? m : 0),
                          DOUBLES(late.above, t->late.on ? t->subs * m : 0),
                          DOUBLES(late.rose, t->late.on ? t->subs * m : 0),
                          DOUBLES(late.table_vs, t->table && t->late.on ? o->slots * m : 0),
                          DOUBLES(dk, parts * tk * dqk),
                          DOUBLES(dk_var, parts * tk * dqk),
                          DOUBLES(dv, parts * tk * dv),
                          DOUBLES(dv_var, parts * tk * dv),
                          DOUBLES(dk_size, loses * tk * dqk),
                          DOUBLES(dk_spread, loses * tk * dqk),
                          DOUBLES(dk_square, loses * tk * dqk),
                          DOUBLES(dv_size, loses * tk * dv),
                          DOUBLES(dv_spread, loses * tk * dv),
                          DOUBLES(dv_square, loses * tk * dv),
                          DOUBLES(key_n, tk),
                          DOUBLES(key_n2, tk),
                          DOUBLES(row_done, m),
                          DOUBLES(size, lost * d),
                          DOUBLES(spread, lost * d),
                          DOUBLES(square, lost * d),
                          DOUBLES(row_n, lost),
                          DOUBLES(row_n2, lost)};
    const buffer shared[] = {DOUBLES(classes, 3), DOUBLES(sink_y, sinks), DOUBLES(sink_v, sinks)};
    const size_t n = sizeof all / sizeof *all, n_shared = sizeof shared / sizeof *shared;
    static_assert(n + n_shared <= sizeof t->memory / sizeof *t->memory, "room for each");
    DKV_TRY(take(o, all, n));
    if (first) t->classes = first->classes, t->sink_y = first->sink_y, t->sink_v = first->sink_v;
    else DKV_TRY(take(o, shared, n_shared));
    if (!o->in.d_lse) t->equal_any[1] = t->equal_any[0], t->equal_own[1] = t->equal_own[0];
    return 0;
}

double dkv_twinBytes(const dkv_device_oracle *o) {
    const dkv_partials part = dkv_partialsOf(&o->a);
    const double d = o->p->dqk + o->p->dv, mq = (double)(o->l->view.tq * o->g), tk = (double)o->l->view.tk;
    const double m = (double)o->max_m, subs = (double)o->ld / DKV_SUB_KEYS, subm = (double)(o->rows / o->sub_rows + 1);
    const double most = fmax(o->p->dqk, o->p->dv), parts = part.heads ? o->g : 1;
    return 8 * (4 * most * fmax(subs * m, subm * (double)o->ld) + mq * (1.5 * d + 10) + tk * (2.5 * d + 5 * parts * d + 10) +
                m * (13 * most + 17 * subs + (double)o->slots + 20) + subm * subs * (d + 1) + 3 * subm * (double)o->ld);
}

/* Which segment and group each row belongs to. */
static int uploadOwners(dkv_device_oracle *o) {
    const dualkv_problem *v = &o->l->view;
    dkv_twin_device *t = o->twin;
    int32_t *x = (int32_t *)malloc(sizeof *x * (size_t)(v->tk + 2 * v->tq + 1));
    if (!x) return dkv_oracleFail(__FILE__, __LINE__, "out of memory");
    int32_t *q = x + v->tk, *g = q + v->tq;
    for (int32_t s = 0; s < v->n_segments; s++) {
        const dualkv_segment *y = &v->segments[s];
        for (int64_t i = 0; i < y->k_len; i++) x[y->k_start + i] = s;
        for (int64_t i = 0; i < y->q_len; i++) q[y->q_start + i] = s, g[y->q_start + i] = y->group;
    }
    cudaError_t e = cudaMemcpyAsync(t->segment_k, x, 4 * (size_t)v->tk, cudaMemcpyHostToDevice, o->stream);
    if (!e) e = cudaMemcpyAsync(t->segment_q, q, 4 * (size_t)v->tq, cudaMemcpyHostToDevice, o->stream);
    if (!e) e = cudaMemcpyAsync(t->group_q, g, 4 * (size_t)v->tq, cudaMemcpyHostToDevice, o->stream);
    if (!e) e = cudaStreamSynchronize(o->stream);
    free(x);
    DKV_TRY_CUDA(e);
    return 0;
}

static void declare(dkv_device_oracle *o) {
    const dualkv_arithmetic *a = &o->a;
    dkv_twin_device *t = o->twin;
    dkv_twin_units *u = &t->u;
    dkv_makeUnits(o->p, a, u);
    const dkv_partials part = dkv_partialsOf(a);
    t->parts = (t->heads = part.heads) ? o->g : 1;
    t->segments = part.segments;
    t->apart = t->parts > 1 || part.segments;
    t->anyhow = u->z.gain > 0 && o->in.d_o;
    t->delta_exact = a->delta_exact != 0;
    t->p_normalised = a->p_normalised != 0;
    t->has_o = a->key_tile > 0 || a->p_normalised || !u->p_rounded;
    t->table =
        u->p_rounded && !a->p_normalised && a->key_tile > 0 && DKV_SUB_KEYS % a->key_tile;
    if (t->table && o->slots == 0) t->table = t->has_o = false;
    t->late.slack = a->max_slack;
    t->late.first = a->sink_first && o->in.sink;
    t->late.on = !a->p_normalised && (a->max_slack > 0 || t->late.first);
    t->late.tiled = a->key_tile > 0;
}

void dkv_closeTwin(dkv_device_oracle *o) {
    dkv_twin_device *t = o->twin;
    if (!t) return;
    for (int i = 0; i < t->n_memory; i++) cudaFreeAsync(t->memory[i], o->stream);
    free(t);
    o->twin = NULL;
}
/* --- the whole --- */

/* dSink of each head, row after row as a kernel sums. */
__global__ void sum_sink_kernel(int hq, int64_t tq, double unit2, const double *y, const double *v,
                                double *twin, double *sigma2) {
    DKV_GRID_LOOP(h, hq) {
        double sum = 0, var = 0;
        for (int64_t i = h * tq; i < (h + 1) * tq; i++) {
            const double old = sum;
            sum -= y[i];
            var += v[i];
            if (old != 0 && y[i] != 0) var += unit2 * sum * sum;
        }
        twin[h] = sum;
        sigma2[h] = var;
    }
}

typedef struct twin_run { /* what the kernel left */
    const void *o;
    const float *lse;
} twin_run;

static int twinHead(dkv_device_oracle *o, int32_t kvh, const void *arg) {
    const void *kernel_o = ((const twin_run *)arg)->o;
    const float *kernel_lse = ((const twin_run *)arg)->lse;
    const dkv_problem *p = o->p;
    const int64_t tq = o->l->view.tq, tk = o->l->view.tk, mq = tq * o->g;
    const bool grad = o->in.d_o != NULL;
    dkv_twin_device *t = o->twin;
    DKV_TRY(dkv_loadHead(o, kvh, o->a.in_format));
    DKV_TRY(countEqual(o, kvh, kernel_o, kernel_lse));
    DKV_TRY(operands(o, mq, p->dqk, o->q, NULL, t->q1, t->q_norm, t->q_root, t->q2, o->aq, NULL, NULL));
    DKV_TRY(operands(o, tk, p->dqk, o->k, t->equal_kv, t->k1, t->k_norm, t->k_root, t->k2, o->ak, t->kf, NULL));
    DKV_TRY(operands(o, tk, p->dv, o->v, t->equal_kv, t->v1, t->v_norm, t->v_root, t->v2, o->av, NULL, t->ve));
    if (grad) DKV_TRY(operands(o, mq, p->dv, o->d_o, NULL, t->o1, t->o_norm, t->o_root, t->o2, o->ado, NULL, NULL));
    DKV_TRY(dkv_twinFitChains(o, p->dqk, o->q, o->k, t->q_norm, t->k_norm, &t->fit_s));
    if (grad) DKV_TRY(dkv_twinFitChains(o, p->dv, o->d_o, o->v, t->o_norm, t->v_norm, &t->fit_dp));
    if (grad) DKV_TRY(dkv_twinZeroKeys(o));
    dkv_scene s = {};
    s.kvh = kvh;
    s.node = -1;
    while (dkv_nextScene(o, &s)) {
        DKV_TRY(dkv_twinForwardBlock(o, &s, kernel_lse));
        if (grad) DKV_TRY(dkv_twinBackwardBlock(o, &s, kernel_o, kernel_lse));
        if (grad && t->segments && s.r1 == s.seg->q_len) DKV_TRY(dkv_twinAddSegment(o, &s));
    }
    if (grad) DKV_TRY(dkv_twinFinishKeys(o, kvh));
    return countClasses(o);
}

/* Where the bound claims nothing, neither does the twin. */
__global__ void drop_unclaimed_kernel(int64_t n, const double *bound, double *sigma2) {
    DKV_GRID_LOOP(e, n) sigma2[e] = bound[e] == DKV_UNCLAIMED ? (double)NAN : sigma2[e];
}

static int dropUnclaimed(dkv_device_oracle *o) {
    for (int id = 0; id < DKV_N_OUTPUTS; id++)
        if (o->count[id] > 0)
            drop_unclaimed_kernel<<<dkv_blocksFor(o->count[id], 256), 256, 0, o->stream>>>(
                o->count[id], o->out[DKV_PART_BOUND][id], o->out[DKV_PART_SIGMA2][id]);
    DKV_TRY_CUDA(cudaGetLastError());
    return 0;
}

static int openTwin(dkv_device_oracle *o, const dkv_twin_device *first) {
    if (o->twin) return 0;
    o->twin = (dkv_twin_device *)calloc(1, sizeof *o->twin);
    if (!o->twin) return dkv_oracleFail(__FILE__, __LINE__, "out of memory");
    declare(o);
    DKV_TRY(allocate(o, first));
    return uploadOwners(o);
}

int dkv_runTwin(dkv_device_oracle *o, const void *kernel_o, const float *kernel_lse) {
    const bool grad = o->in.d_o != NULL;
    if (grad && (!kernel_o || !kernel_lse))
        return dkv_oracleFail(__FILE__, __LINE__, "the twin of gradients needs the kernel's O and LSE");
    DKV_TRY(openTwin(o, NULL));
    for (int i = 1; i < o->lanes; i++) DKV_TRY(openTwin(o->lane[i], o->twin));
    for (int i = 0; i < o->lanes; i++)
        (i ? o->lane[i] : o)->twin->lse_stands_in = kernel_lse && kernel_lse == o->stored_lse;
    for (int part = DKV_PART_TWIN; part <= DKV_PART_SIGMA2; part++)
        for (int id = 0; id < DKV_N_OUTPUTS; id++)
            if (o->count[id] > 0)
                DKV_TRY_CUDA(
                    cudaMemsetAsync(o->out[part][id], 0, sizeof(double) * (size_t)o->count[id], o->stream));
    o->has_twin[DKV_O] = o->twin->has_o;
    o->has_twin[DKV_LSE] = true;
    o->has_twin[DKV_DQ] = o->has_twin[DKV_DK] = o->has_twin[DKV_DV] = grad;
    o->has_twin[DKV_DSINK] = grad && o->p->sink;
    unsigned long long classes[3] = {0, 0, 0};
    DKV_TRY_CUDA(cudaMemsetAsync(o->twin->classes, 0, sizeof classes, o->stream));
    const twin_run run = {kernel_o, kernel_lse};
    DKV_TRY(dkv_eachHead(o, twinHead, &run));
    DKV_TRY_CUDA(cudaMemcpyAsync(classes, o->twin->classes, sizeof classes, cudaMemcpyDeviceToHost, o->stream));
    DKV_TRY_CUDA(cudaStreamSynchronize(o->stream));
    o->alike = dkv_alike{(int64_t)classes[0], (int64_t)classes[1], (int64_t)classes[2]};
    if (o->has_twin[DKV_DSINK]) {
        sum_sink_kernel<<<dkv_blocksFor(o->p->hq, 32), 32, 0, o->stream>>>(
            o->p->hq, o->l->view.tq, o->twin->u.z.unit2, o->twin->sink_y, o->twin->sink_v,
            o->out[DKV_PART_TWIN][DKV_DSINK], o->out[DKV_PART_SIGMA2][DKV_DSINK]);
        DKV_TRY_CUDA(cudaGetLastError());
    }
    return dropUnclaimed(o);
}
