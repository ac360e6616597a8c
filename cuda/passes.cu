/* passes.cu: the passes around backward. Memory bound, deterministic: every sum has one owner and a fixed
 * order. */
#include "args.cuh"
#include "launch.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#define PASS_THREADS 256
#define PASS_BLOCKS 65535 /* blocks at most; each takes every PASS_BLOCKS-th row */

template <typename T> static __device__ __forceinline__ float load_as_float(const T *p) { return (float)*p; }
static __device__ __forceinline__ void store_rounded(__nv_bfloat16 *p, float x) {
    *p = __float2bfloat16_rn(x);
}
static __device__ __forceinline__ void store_rounded(__half *p, float x) { *p = __float2half_rn(x); }

static unsigned pass_blocks(int64_t n) { return (unsigned)(n < PASS_BLOCKS ? n : PASS_BLOCKS); }

/* One warp a (row, head): lane l sums columns l W + 32 W i + (0..W-1), then a butterfly. W elements are one
 * 16-byte load where WIDE. */
template <typename T, bool WIDE>
__global__ void __launch_bounds__(PASS_THREADS)
    delta_kernel(const __grid_constant__ dkv_args a, int64_t items) {
    constexpr int W = WIDE ? 16 / (int)sizeof(T) : 1, WARPS = PASS_THREADS / 32;
    int lane = threadIdx.x % 32;
    for (int64_t w = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32; w < items;
         w += (int64_t)gridDim.x * WARPS) {
        int64_t t = w / a.p.hq;
        int h = (int)(w % a.p.hq);
        const T *o = (const T *)a.o + t * a.o_row + h * a.o_head;
        const T *g = (const T *)a.d_o + t * a.do_row + h * a.do_head;
        float sum = 0.f;
        for (int c = lane * W; c < a.p.dv; c += 32 * W) {
            alignas(16) T x[W], y[W];
            if (WIDE) {
                *(uint4 *)x = *(const uint4 *)(o + c);
                *(uint4 *)y = *(const uint4 *)(g + c);
            } else {
                x[0] = o[c];
                y[0] = g[c];
            }
#pragma unroll
            for (int e = 0; e < W; e++) {
                sum = fmaf(load_as_float(x + e), load_as_float(y + e), sum);
                sum = PLANT(a, E4, dkv_faultBf16(sum), sum);
            }
        }
#pragma unroll
        for (int m = 16; m; m >>= 1) sum += __shfl_xor_sync(~0u, sum, m);
        if (FAULT(a, X12)) sum = 0.f;
        if (lane == 0)
            a.delta[h * a.p.tq + t] = a.d_lse && !FAULT(a, G1) ? sum - a.d_lse[h * a.dlse_head + t * a.dlse_row] : sum;
    }
}

template <typename T> static cudaError_t delta_launch(const dkv_args &a, cudaStream_t stream) {
    int64_t items = a.p.tq * a.p.hq;
    unsigned blocks = pass_blocks((items + PASS_THREADS / 32 - 1) / (PASS_THREADS / 32));
    if (a.vec)
        delta_kernel<T, true><<<blocks, PASS_THREADS, 0, stream>>>(a, items);
    else
        delta_kernel<T, false><<<blocks, PASS_THREADS, 0, stream>>>(a, items);
    return cudaGetLastError();
}

cudaError_t dkv_cudaDelta(const dkv_args *a, size_t clear, cudaStream_t stream) {
    if (a->p.tq == 0) return cudaSuccess;
    if (clear && !FAULT(*a, Z4)) {
        cudaError_t e = cudaMemsetAsync(a->dq_acc, 0, clear, stream);
        if (e != cudaSuccess) return e;
    }
    switch (a->p.dtype) {
    case DUALKV_BF16: return delta_launch<__nv_bfloat16>(*a, stream);
    case DUALKV_FP16: return delta_launch<__half>(*a, stream);
    default: return delta_launch<float>(*a, stream);
    }
}

/* fp32: out[t][h][c] = factor * sum over splits, in order, of acc[split][t][h][c]. */
__global__ void __launch_bounds__(PASS_THREADS)
    scale_kernel(const float *acc, int splits, float factor, float *out, int64_t row, int64_t head, int64_t rows,
                 int heads, int d) {
    int width = heads * d;
    for (int64_t t = blockIdx.x; t < rows; t += gridDim.x)
        for (int i = threadIdx.x; i < width; i += PASS_THREADS) {
            float sum = 0.f;
            for (int z = 0; z < splits; z++) sum += acc[(z * rows + t) * width + i];
            out[t * row + i / d * head + i % d] = sum * factor;
        }
}

/* 16-bit: the same from pieces (args.cuh), one piece of all heads a block. Lanes 2 r and 2 r + 1 take row r of 16
 * columns, 8 each. KEYS: rows are keys. */
template <typename T, bool KEYS>
__global__ void __launch_bounds__(PASS_THREADS)
    convert_kernel(const __grid_constant__ dkv_args a, const float *acc, int splits, float factor, T *out, int64_t row,
                   int64_t head, int heads, int d) {
    int64_t pieces = KEYS ? a.k_pieces : a.q_pieces, size = (int64_t)DKV_PIECE * a.acc_cols, tile;
    int lane = threadIdx.x % 32, r = lane / 2, pairs = (d + 15) / 16;
    for (int64_t id = blockIdx.x; id < pieces; id += gridDim.x) {
        const dualkv_segment &s = a.p.segments[dkv_findSegment(a, id, DKV_PIECE, KEYS, &tile)];
        int64_t start = KEYS ? s.k_start : s.q_start, len = KEYS ? s.k_len : s.q_len, t = tile * DKV_PIECE + r;
        for (int i = threadIdx.x / 32; i < heads * pairs; i += PASS_THREADS / 32) {
            int h = i / pairs, c = (i % pairs * 2 + lane % 2) * 8;
            if (t >= len || c >= d) continue;
            float x[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f};
            for (int z = 0; z < splits; z++) {
                const float *src = acc + (((int64_t)z * heads + h) * pieces + id) * size + c * DKV_PIECE +
                                   r % 8 * 16 + r / 8 * 2;
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    float2 y = *(const float2 *)(src + 4 * e);
                    x[2 * e] += y.x;
                    x[2 * e + 1] += y.y;
                }
            }
            alignas(16) T y[8];
#pragma unroll
            for (int e = 0; e < 8; e++) store_rounded(y + e, x[e] * factor);
            T *dst = out + (start + t) * row + h * head + c;
            if (a.vec)
                *(uint4 *)dst = *(const uint4 *)y;
            else
                for (int e = 0; e < 8 && c + e < d; e++) dst[e] = y[e];
        }
    }
}

static cudaError_t scale_one(const float *acc, int splits, float factor, void *out, int64_t row, int64_t head,
                             int64_t rows, int heads, int d, cudaStream_t stream) {
    if (rows == 0) return cudaSuccess;
    scale_kernel<<<pass_blocks(rows), PASS_THREADS, 0, stream>>>(acc, splits, factor, (float *)out, row, head, rows,
                                                                 heads, d);
    return cudaGetLastError();
}

static cudaError_t scale_all(const dkv_args &a, cudaStream_t s) {
    const dualkv_problem &p = a.p;
    float factor = PLANT(a, Z5, 1.f, p.scale);
    cudaError_t e = scale_one(a.dq_acc, 1, factor, a.dq, a.dq_row, a.dq_head, p.tq, p.hq, p.dqk, s);
    if (e == cudaSuccess)
        e = scale_one(a.dk_acc, a.splits, p.scale, a.dk, a.dk_row, a.dk_head, p.tk, p.hkv, p.dqk, s);
    if (e == cudaSuccess) e = scale_one(a.dv_acc, a.splits, 1.f, a.dv, a.dv_row, a.dv_head, p.tk, p.hkv, p.dv, s);
    return e;
}

template <typename T> static cudaError_t convert_all(const dkv_args &a, cudaStream_t s) {
    const dualkv_problem &p = a.p;
    if (p.tq > 0)
        convert_kernel<T, false><<<pass_blocks(a.q_pieces), PASS_THREADS, 0, s>>>(
            a, a.dq_acc, 1, PLANT(a, Z5, 1.f, p.scale), (T *)a.dq, a.dq_row, a.dq_head, p.hq, p.dqk);
    if (p.tk > 0) {
        convert_kernel<T, true><<<pass_blocks(a.k_pieces), PASS_THREADS, 0, s>>>(
            a, a.dk_acc, a.splits, p.scale, (T *)a.dk, a.dk_row, a.dk_head, p.hkv, p.dqk);
        convert_kernel<T, true><<<pass_blocks(a.k_pieces), PASS_THREADS, 0, s>>>(
            a, a.dv_acc, a.splits, 1.f, (T *)a.dv, a.dv_row, a.dv_head, p.hkv, p.dv);
    }
    return cudaGetLastError();
}

/* dSink_h = -sum_i exp(sink_h - LSE_i) delta_i, one block a head: chains of 64 rows, then of those sums, then
 * a tree. */
#define SINK_THREADS 512
#define SINK_CHAIN 64
__global__ void __launch_bounds__(SINK_THREADS) sink_kernel(const __grid_constant__ dkv_args a) {
    __shared__ float part[SINK_THREADS];
    int h = blockIdx.x;
    float total = 0.f, sink = a.sink[h];
    for (int64_t t0 = threadIdx.x; t0 < PLANT(a, Y3, SINK_CHAIN, a.p.tq); t0 += SINK_THREADS * SINK_CHAIN) {
        float sum = 0.f;
        for (int i = 0; i < SINK_CHAIN; i++) {
            int64_t t = t0 + (int64_t)i * SINK_THREADS;
            if (t >= a.p.tq) break;
            sum = fmaf(expf(sink - a.lse[h * a.lse_head + t * a.lse_row]), a.delta[h * a.p.tq + t], sum);
        }
        total += sum;
    }
    part[threadIdx.x] = total;
    for (int m = SINK_THREADS / 2; m; m >>= 1) {
        __syncthreads();
        if ((int)threadIdx.x < m) part[threadIdx.x] += part[threadIdx.x + m];
    }
    if (threadIdx.x == 0) a.dsink[h] = 0.f - part[0];
}

cudaError_t dkv_cudaConvert(const dkv_args *a, cudaStream_t stream) {
    cudaError_t e = a->p.dtype == DUALKV_BF16   ? convert_all<__nv_bfloat16>(*a, stream)
                    : a->p.dtype == DUALKV_FP16 ? convert_all<__half>(*a, stream)
                                                : scale_all(*a, stream);
    if (e != cudaSuccess || !a->p.sink || !a->dsink) return e;
    sink_kernel<<<(unsigned)a->p.hq, SINK_THREADS, 0, stream>>>(*a);
    return cudaGetLastError();
}
