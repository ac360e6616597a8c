/* oracle_twin_chain.cu: what the chains of products over the head dimension round (ref/twin_noise.c), and how far samples of
 * them, run as declared, bear that out. */
#include "oracle_twin.cuh"

#define CHECKPOINTS 8 /* along a chain over the head dimension, as in twin_noise.c; samples as in oracle_twin.c */
#define FIT_ROWS 32
#define FIT_KEYS 64
#define KINDS 3 /* of samples, see sample_kernel */

/* --- chains --- */

typedef struct chain_weights {
    float before[CHECKPOINTS], after[CHECKPOINTS], own;
    int32_t begin[CHECKPOINTS + 1], parts;
} chain_weights;

static chain_weights weightsOf(const dkv_noise *z, int d) {
    chain_weights w = {};
    w.parts = d < CHECKPOINTS ? d : CHECKPOINTS;
    w.own = (float)(z->prod2 / z->step2);
    for (int k = 0; k < w.parts; k++) {
        w.begin[k] = d * k / w.parts;
        int l = d * (k + 1) / w.parts - w.begin[k];
        w.before[k] = (float)(l - 1) / 2;
        w.after[k] = (float)(l + 1) / 2 - (k == 0 ? 1 / (float)l : 0);
    }
    w.begin[w.parts] = d;
    return w;
}

static __device__ __forceinline__ void checkpoint(const chain_weights &w, int k, float x, float &dot,
                                                  float &sq) {
    if (k == 0) {
        dot = x;
        sq = (w.after[0] + w.own) * x * x;
    } else {
        float t = dot + x;
        sq += w.before[k] * dot * dot + w.after[k] * t * t + w.own * x * x;
        dot = t;
    }
}

/* A block of 256 threads has 64 x 64 pairs, a thread 4 x 4 of them. */
#define SIDE 64
#define DEPTH 32 /* head dim / CHECKPOINTS, at most */
typedef float chain_rows[DEPTH][SIDE + 4];

/* Columns [c0, c0 + L) of 64 rows from `first` on: a thread's share, then all of them, transposed. L is 4, 8, 16 or 32. */
template <int L> struct chain_share {
    enum { N = L > 16 ? L / 16 : 1, ALL = L / 4 * SIDE };
    float4 x[N];
    __device__ __forceinline__ void fetch(const float *from, int first, int rows, int d, int c0) {
#pragma unroll
        for (int k = 0; k < N; k++) {
            const int e = threadIdx.x + k * 256, row = first + e / (L / 4), c = e % (L / 4) * 4;
            x[k] = e < ALL && row < rows ? *(const float4 *)(from + (int64_t)row * d + c0 + c) : float4{0, 0, 0, 0};
        }
    }
    __device__ __forceinline__ void put(chain_rows &to) const {
#pragma unroll
        for (int k = 0; k < N; k++) {
            const int e = threadIdx.x + k * 256, row = e / (L / 4), c = e % (L / 4) * 4;
            if (e < ALL) to[c][row] = x[k].x, to[c + 1][row] = x[k].y, to[c + 2][row] = x[k].z, to[c + 3][row] = x[k].w;
        }
    }
};

/* The same of any number of columns. */
static __device__ __forceinline__ void loadChains(const float *x, int first, int rows, int d, int c0, int l,
                                                  chain_rows &to) {
    for (int e = threadIdx.x; e < l * SIDE; e += 256) {
        const int row = e / l, c = e % l;
        to[c][row] = first + row < rows ? x[(int64_t)(first + row) * d + c0 + c] : 0;
    }
}

static __device__ __forceinline__ void addChains(const chain_rows &sa, const chain_rows &sb, int c, int tx, int ty,
                                                 float (&t)[4][4]) {
    const float4 x = *(const float4 *)&sa[c][ty * 4], y = *(const float4 *)&sb[c][tx * 4];
    const float xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) t[i][j] += xs[i] * ys[j];
}

template <int L>
__global__ void __launch_bounds__(256, L > 16 ? 2 : 3) chain_kernel(int m, int n, int d, int ld, __grid_constant__ const chain_weights w,
                                                    const float *a, const float *b, float *dot, float *sq) {
    __shared__ __align__(16) chain_rows sa, sb;
    const int i0 = blockIdx.y * SIDE, j0 = blockIdx.x * SIDE, tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    float t[4][4], dots[4][4], sqs[4][4];
    chain_share<(L > 0 ? L : 4)> next_a, next_b; /* of the next columns, on their way */
    if constexpr (L > 0) {
        next_a.fetch(a, i0, m, d, 0);
        next_b.fetch(b, j0, n, d, 0);
    }
    for (int k = 0; k < w.parts; k++) {
        const int c0 = w.begin[k], l = w.begin[k + 1] - c0;
        __syncthreads();
        if constexpr (L > 0) {
            next_a.put(sa);
            next_b.put(sb);
        } else {
            loadChains(a, i0, m, d, c0, l, sa);
            loadChains(b, j0, n, d, c0, l, sb);
        }
        __syncthreads();
        if constexpr (L > 0) {
            if (k + 1 < w.parts) {
                next_a.fetch(a, i0, m, d, c0 + L);
                next_b.fetch(b, j0, n, d, c0 + L);
            }
        }
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) t[i][j] = 0;
        if constexpr (L > 0) {
#pragma unroll
            for (int c = 0; c < L; c++) addChains(sa, sb, c, tx, ty, t);
        } else {
            for (int c = 0; c < l; c++) addChains(sa, sb, c, tx, ty, t);
        }
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) checkpoint(w, k, t[i][j], dots[i][j], sqs[i][j]);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int row = i0 + ty * 4 + i, col = j0 + tx * 4;
        if (row >= m || col >= n) continue;
        const int64_t at = (int64_t)row * ld + col; /* ld is a multiple of 256 */
        *(float4 *)(dot + at) = float4{dots[i][0], dots[i][1], dots[i][2], dots[i][3]};
        *(float4 *)(sq + at) = float4{sqs[i][0], sqs[i][1], sqs[i][2], sqs[i][3]};
    }
}

int dkv_chainTile(dkv_device_oracle *o, int m, int n, int d, int ld, const float *a, const float *b,
                  float *dot, float *sq) {
    const dim3 grid(dkv_blocksFor(n, SIDE), dkv_blocksFor(m, SIDE));
    const chain_weights w = weightsOf(&o->twin->u.z, d);
    const int whole = d % (4 * CHECKPOINTS) ? 0 : d / CHECKPOINTS;
    switch (whole) {
    case 4: chain_kernel<4><<<grid, 256, 0, o->stream>>>(m, n, d, ld, w, a, b, dot, sq); break;
    case 8: chain_kernel<8><<<grid, 256, 0, o->stream>>>(m, n, d, ld, w, a, b, dot, sq); break;
    case 16: chain_kernel<16><<<grid, 256, 0, o->stream>>>(m, n, d, ld, w, a, b, dot, sq); break;
    case 32: chain_kernel<32><<<grid, 256, 0, o->stream>>>(m, n, d, ld, w, a, b, dot, sq); break;
    default: chain_kernel<0><<<grid, 256, 0, o->stream>>>(m, n, d, ld, w, a, b, dot, sq);
    }
    DKV_TRY_CUDA(cudaGetLastError());
    return 0;
}

/* --- sampled chains --- */

typedef struct sample {
    double model, real, drift, size;
    int32_t bin, used;
} sample;

/* One thread a sampled pair: what its chain, run as declared, loses. Kinds: rows against keys; keys against
 * multiples of themselves, as needles are; half parallel, as the largest of many scores. */
__global__ void sample_kernel(dkv_noise z, chain_weights w, int rows, int keys, int64_t tq,
                              int64_t tk, int g, int d, dkv_rounder round, const double *x, const double *y,
                              const double *x_norm, const double *y_norm, sample *out) {
    const int e = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (e >= KINDS * rows * keys) return;
    const int kind = e / (rows * keys);
    const int64_t i = e / keys % rows, j = e % keys;
    /* the first key: often the sink of attention */
    const int64_t row = (i * tq / rows) * g + i % g, key = j ? (j * tk + i * tk / rows) / keys % tk : 0;
    double a[256], sum = 0, got = 0, na = x_norm[row], nb = y_norm[key];
    const double *b = y + key * d;
    float dot = 0, sq = 0;
    sample s = {0, 0, 0, 0, 0, 0};
    for (int c = 0; c < d; c++)
        a[c] = kind ? dkv_roundBy(round, (1 + (double)i / rows) * b[c]) : x[row * d + c];
    if (kind == 2) {
        const int64_t next = (j + 1) % keys, other = next ? (next * tk + i * tk / rows) / keys % tk : 0;
        for (int c = 0; c < d; c++)
            a[c] = dkv_roundBy(round, a[c] + (1 + (double)(j % 4)) / 2 * y[other * d + c]);
    }
    if (kind) {
        na = 0;
        for (int c = 0; c < d; c++) na += a[c] * a[c];
    }
    const double ua = 1 / sqrt(na), ub = 1 / sqrt(nb);
    for (int k = 0; k < w.parts; k++) {
        float t = 0;
        for (int c = w.begin[k]; c < w.begin[k + 1]; c++) t += (float)(a[c] * ua) * (float)(b[c] * ub);
        checkpoint(w, k, t, dot, sq);
    }
    for (int c = 0; c < d; c++) sum += a[c] * b[c];
    if (z.truncates) {
        for (int c = 0; c < d; c += z.step)
            got = dkv_twinStep(got, a + c, b + c, d - c < z.step ? d - c : z.step);
    } else {
        float t = 0;
        for (int c = 0; c < d; c++) t = __fadd_rn(t, __fmul_rn((float)a[c], (float)b[c]));
        got = t;
    }
    const double weight = kind ? 1 : 8, err = got - sum, unit = weight / (na * nb);
    if (na > 0 && nb > 0 && isfinite(err) && isfinite(unit)) {
        s.bin = dkv_chainBin(sq);
        s.used = 1;
        s.model = weight * z.step2 * sq;
        s.real = err * err * unit;
        s.drift = err * sum * unit;
        s.size = sum * sum * unit;
    }
    out[e] = s;
}

/* Bins with few samples lean on their neighbours, and where nothing was sampled the model stands. */
static void endFit(const sample *bin, dkv_twin_fit *fit) {
    for (int e = 0; e < DKV_CHAIN_BINS; e++) {
        double model = 0, real = 0, drift = 0, size = 0, count = 0;
        fit->var[e] = 1;
        fit->gain[e] = 0;
        for (int w = 0; w < DKV_CHAIN_BINS && count < 64; w++)
            for (int s = -1; s <= (w ? 1 : -1); s += 2) {
                int at = e + s * w;
                if (at < 0 || at >= DKV_CHAIN_BINS) continue;
                model += bin[at].model, real += bin[at].real, count += bin[at].used;
                drift += bin[at].drift, size += bin[at].size;
            }
        if (count < 16 || !(model > 0)) continue;
        fit->gain[e] = size > 0 ? (float)(drift / size) : 0;
        fit->var[e] = (float)((real - (size > 0 ? drift * drift / size : 0)) / model);
    }
}

int dkv_twinFitChains(dkv_device_oracle *o, int d, const double *x, const double *y, const double *x_norm,
                      const double *y_norm, dkv_twin_fit *fit) {
    const dkv_noise *z = &o->twin->u.z;
    const int64_t tq = o->l->view.tq, tk = o->l->view.tk;
    const int rows = (int)(tq < FIT_ROWS ? tq : FIT_ROWS), keys = (int)(tk < FIT_KEYS ? tk : FIT_KEYS);
    sample host[KINDS * FIT_ROWS * FIT_KEYS];
    sample bin[DKV_CHAIN_BINS] = {};
    if (z->unit2 >= 0x1p-80 && rows > 0 && keys > 0) {
        sample *s = (sample *)o->work[0];
        sample_kernel<<<dkv_blocksFor(KINDS * rows * keys, 64), 64, 0, o->stream>>>(
            *z, weightsOf(z, d), rows, keys, tq, tk, o->g, d, dkv_makeRounder(o->p->dtype), x, y, x_norm,
            y_norm, s);
        DKV_TRY_CUDA(cudaGetLastError());
        DKV_TRY_CUDA(cudaMemcpyAsync(host, s, sizeof *s * (size_t)(KINDS * rows * keys),
                                     cudaMemcpyDeviceToHost, o->stream));
        DKV_TRY_CUDA(cudaStreamSynchronize(o->stream));
        for (int e = 0; e < KINDS * rows * keys; e++) {
            sample *to = &bin[host[e].bin];
            if (!host[e].used) continue;
            to->model += host[e].model;
            to->real += host[e].real;
            to->drift += host[e].drift;
            to->size += host[e].size;
            to->used++;
        }
    }
    endFit(bin, fit);
    return 0;
}
