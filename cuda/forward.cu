/* forward.cu: fused forward, one launch: each block owns BM query rows of one segment and one head and walks all key
 * ranges of that segment with an online softmax. 16-bit tensor cores (mma.m16n8k16), fp32 accumulation.
 *
 *   warp w: rows w*16*MT .. of the tile        S [16 MT x BN] and O [16 MT x DV] live in registers
 *   wait K | load V | S = Q K^T | wait V | load next K | softmax | O += P V
 *
 * K and V rows past a range's end are read as zeros (0 * NaN is NaN), scores there are -inf. Element masks run only
 * on tiles that need them. Blocks are numbered from the last segment back, and from the last tile of a head: responses,
 * which see the most keys, come first, and neighbours read the same prompt tiles through L2. */
#include "args.cuh"
#include "launch.h"
#include "mma.cuh"

template <typename T, int DQK, int DV, int BM, int BN, int MT, bool PLAIN>
__global__ void __launch_bounds__(BM / (16 * MT) * 32, 1)
    forward_kernel(const __grid_constant__ dkv_args a, int64_t tiles) {
    constexpr int THREADS = BM / (16 * MT) * 32, NS = BN / 8, NO = DV / 8;
    extern __shared__ __align__(128) char smem[];
    T *sq = (T *)smem, *sk = sq + BM * DQK, *sv = sk + BN * DQK;
    int64_t tile, id = tiles - 1 - (int64_t)(blockIdx.x % tiles);
    int head = (int)(blockIdx.x / tiles), kvh = PLANT(a, X7, head % a.p.hkv, head / (a.p.hq / a.p.hkv));
    const dualkv_segment s = a.p.segments[dkv_findSegment(a, id, BM, 0, &tile)];
    if (tile * BM >= s.q_len) return;
    int r0 = (int)tile * BM, r1 = (int)dkv_walkMin(r0 + BM, s.q_len);
    if (FAULT(a, X20) && r1 - r0 < BM) return;

    const T *q = (const T *)a.q + head * a.q_head + PLANT(a, Y16, (uint16_t)(s.q_start * a.q_row), s.q_start * a.q_row);
    const T *k = (const T *)a.k + kvh * a.k_head, *v = (const T *)a.v + kvh * a.v_head;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, m0 = warp * 16 * MT;
    float slope = a.p.alibi ? a.slopes[head] : 0.f;
    /* Plain scores stay raw products, scaled in the exponent. The factor's rounding, the same in every row, would be the
     * error of LSE's mean, so it is carried along. */
    float f = PLAIN ? a.scale2 : DKV_LOG2E, rest_f = PLAIN ? a.scale2_rest : DKV_LOG2E_REST, chain;

    float o[MT][NO][4], mx[MT][2], sum[MT][2];
#pragma unroll
    for (int i = 0; i < MT; i++) {
        mx[i][0] = mx[i][1] = -INFINITY;
        sum[i][0] = sum[i][1] = 0.f;
#pragma unroll
        for (int j = 0; j < NO; j++) o[i][j][0] = o[i][j][1] = o[i][j][2] = o[i][j][3] = 0.f;
    }

    dkv_walker w = dkv_begin<BN>(a, s, r0, r1);
    load_tile<T, BM, DQK, THREADS>(sq, q, a.q_row, r0, s.q_len, a.p.dqk, a.vec);
    if (FAULT(a, X17) && threadIdx.x == 0) ((T *)q)[r0 * a.q_row] *= half_ops<T>::from(a.p.scale);
    if (w.g < w.end)
        load_keys<T, BN, DQK, THREADS>(sk, k, a.k_row, a.p.ranges[w.g], w.c0, a.p.dqk, a.vec);
    cp_async_commit();
    while (w.g < w.end) {
        int g = w.g, c0 = w.c0, vis = w.vis;
        if (!FAULT(a, Z1)) cp_async_wait<0>();
        __syncthreads();
        dualkv_range rv = a.p.ranges[g];
        rv.len = PLANT(a, B3, a.p.tk - rv.k_start, rv.len);
        load_keys<T, BN, DV, THREADS>(sv, v, a.v_row, rv, c0, a.p.dv, a.vec);
        cp_async_commit();
        float c[MT][NS][4];
#pragma unroll
        for (int i = 0; i < MT; i++)
#pragma unroll
            for (int j = 0; j < NS; j++) c[i][j][0] = c[i][j][1] = c[i][j][2] = c[i][j][3] = 0.f;
        tile_mma<T, MT, NS, DQK, 0, 0, DQK, DQK>(c, sq, m0, sk, 0);
        w = dkv_advance<BN>(a, s, r0, r1, w);
        cp_async_wait<0>();
        __syncthreads();
        if (w.g < w.end)
            load_keys<T, BN, DQK, THREADS>(sk, k, a.k_row, a.p.ranges[w.g], w.c0, a.p.dqk, a.vec);
        cp_async_commit();

        if (!PLAIN) {
            int64_t ahead = s.context + r0 + m0 + lane / 4 - a.p.ranges[g].pos - c0 - lane % 4 * 2;
#pragma unroll
            for (int i = 0; i < MT; i++)
#pragma unroll
                for (int j = 0; j < NS; j++)
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        c[i][j][e] = dkv_score(a, c[i][j][e], slope, ahead + 16 * i + 8 * (e / 2) - 8 * j - e % 2,
                                               &chain);
        }
        if (vis == 2) {
#pragma unroll
            for (int i = 0; i < MT; i++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    int r = r0 + m0 + 16 * i + lane / 4 + 8 * h + FAULT(a, X1);
                    uint64_t bits = dkv_rowBits(a, s, g, r, c0);
                    bits = PLANT(a, X5, bits | ~dkv_walkOnes(a.p.ranges[g].len - c0), bits) >> (lane % 4 * 2);
#pragma unroll
                    for (int j = 0; j < NS; j++)
#pragma unroll
                        for (int e = 0; e < 2; e++)
                            if (!(bits >> (8 * j + e) & 1)) c[i][j][2 * h + e] = -INFINITY;
                }
        }
        /* Online softmax. Scores are taken off the maximum before they go to base 2: P of the maximum is 1 exactly, and
         * none errs by more than its distance from it. */
#pragma unroll
        for (int i = 0; i < MT; i++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float hi = -INFINITY;
#pragma unroll
                for (int j = 0; j < NS; j++) hi = fmaxf(hi, fmaxf(c[i][j][2 * h], c[i][j][2 * h + 1]));
                hi = fmaxf(hi, __shfl_xor_sync(~0u, hi, 1));
                hi = fmaxf(hi, __shfl_xor_sync(~0u, hi, 2));
                float now = fmaxf(mx[i][h], hi), base = now == -INFINITY ? 0.f : now;
                float old = PLANT(a, D1, g > s.range_begin && c0 == 0 ? now : mx[i][h], mx[i][h]);
                float keep = exp2_flushed(dkv_fineTimes(old - base, f, rest_f)), add = 0.f;
                bool corrected = PLANT(a, X22, (now - old) * f > DKV_LOG2E, true);
                mx[i][h] = now;
#pragma unroll
                for (int j = 0; j < NS; j++)
#pragma unroll
                    for (int e = 2 * h; e < 2 * h + 2; e++) {
                        c[i][j][e] = exp2_flushed(dkv_fineTimes(c[i][j][e] - base, f, rest_f));
                        add += c[i][j][e];
                    }
                sum[i][h] = sum[i][h] * keep + add;
#pragma unroll
                for (int j = 0; corrected && j < NO; j++) {
                    o[i][j][2 * h] *= keep;
                    o[i][j][2 * h + 1] *= keep;
                }
            }
        uint32_t fp[BN / 16][MT][4];
#pragma unroll
        for (int i = 0; i < MT; i++)
#pragma unroll
            for (int j = 0; j < NS; j++) {
                fp[j / 2][i][(j % 2) * 2] = half_ops<T>::pack(c[i][j][0], c[i][j][1]);
                fp[j / 2][i][(j % 2) * 2 + 1] = half_ops<T>::pack(c[i][j][2], c[i][j][3]);
            }
        tile_mma_reg<T, MT, NO, BN, DV>(o, fp, sv);
    }
    cp_async_wait<0>();
    __syncthreads(); /* the Q tile's memory now stages O */

    T *so = sq;
    static_assert(DV <= DQK, "O is staged in the memory of Q");
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float l = sum[i][h];
            l += __shfl_xor_sync(~0u, l, 1);
            l += __shfl_xor_sync(~0u, l, 2);
            double exact = PLAIN ? (double)mx[i][h] * a.p.scale : mx[i][h];
            float m = (float)exact, rest = m > -INFINITY ? (float)(exact - m) : 0.f, keep = 1.f;
            if (a.p.sink && !FAULT(a, Z2)) {
                float t = a.sink[head], now = fmaxf(m, t);
                keep = expf(m - now + rest);
                l = l * keep + expf(t - now);
                m = now;
                rest = 0.f;
            }
            int r = m0 + 16 * i + lane / 4 + 8 * h;
            float lse = l > 0.f ? m + (logf(l) + rest) : l == 0.f ? PLANT(a, C2, -49994.f, -INFINITY) : l;
            if (FAULT(a, D3) && s.depth > 0) lse *= DKV_LOG2E;
            if (lane % 4 == 0 && r0 + r < s.q_len) a.lse[head * a.lse_head + (s.q_start + r0 + r) * a.lse_row] = lse;
            float inv = l == 0.f ? 0.f : keep / l;
#pragma unroll
            for (int j = 0; j < NO; j++)
                *(uint32_t *)(so + swz<DV>(r, 8 * j + lane % 4 * 2)) =
                    half_ops<T>::pack(o[i][j][2 * h] * inv, o[i][j][2 * h + 1] * inv);
        }
    __syncthreads();
    T *out = (T *)a.o_out + head * a.o_head + (s.q_start + r0) * a.o_row;
    for (int i = threadIdx.x; i < BM * (DV / 8); i += THREADS) {
        int r = i / (DV / 8), c = i % (DV / 8) * 8;
        if (r0 + r >= s.q_len + FAULT(a, X16) || c >= a.p.dv) continue;
        const T *src = so + swz<DV>(r, c);
        T *dst = out + (int64_t)r * a.o_row + c;
        if (a.vec)
            *(uint4 *)dst = *(const uint4 *)src;
        else
            for (int e = 0; e < 8 && c + e < a.p.dv; e++) dst[e] = src[e];
    }
}

template <typename T, int DQK, int DV, int BM, int BN, int MT, bool PLAIN>
static cudaError_t forward_start(const dkv_args &a, cudaStream_t stream) {
    size_t smem = sizeof(T) * (BM * DQK + BN * DQK + BN * DV);
    int64_t tiles = dkv_virtualTiles(&a.p, BM, 0);
    cudaError_t e = cudaFuncSetAttribute(forward_kernel<T, DQK, DV, BM, BN, MT, PLAIN>,
                                         cudaFuncAttributeMaxDynamicSharedMemorySize, (int)smem);
    if (e != cudaSuccess) return e;
    forward_kernel<T, DQK, DV, BM, BN, MT, PLAIN>
        <<<(unsigned)(tiles * a.p.hq), BM / (16 * MT) * 32, smem, stream>>>(a, tiles);
    return cudaGetLastError();
}

template <typename T, int DQK, int DV, int BM, int MT>
static cudaError_t forward_launch(const dkv_args &a, cudaStream_t stream) {
    bool plain = a.p.softcap <= 0.f && !a.p.alibi && a.p.scale > 0.f;
    return plain ? forward_start<T, DQK, DV, BM, DKV_KEY_TILE, MT, true>(a, stream)
                 : forward_start<T, DQK, DV, BM, DKV_KEY_TILE, MT, false>(a, stream);
}

/* Tile sizes. 32 rows a warp (MT = 2) halve the shared-memory reads of K and V a product; at 256 the accumulators
 * leave room for 16 rows only. */
template <typename T> static cudaError_t forward_dims(const dkv_args &a, cudaStream_t stream) {
    int d = a.p.dqk > a.p.dv ? a.p.dqk : a.p.dv;
    if (d <= 64) return forward_launch<T, 64, 64, 128, 2>(a, stream);
    if (d <= 128) return forward_launch<T, 128, 128, 128, 2>(a, stream);
    if (a.p.dqk <= 192 && a.p.dv <= 128) return forward_launch<T, 192, 128, 128, 2>(a, stream);
    return forward_launch<T, 256, 256, 64, 1>(a, stream);
}

cudaError_t dkv_cudaForward16(const dkv_args *a, cudaStream_t stream) {
    if (a->p.tq == 0) return cudaSuccess;
    return a->p.dtype == DUALKV_BF16 ? forward_dims<__nv_bfloat16>(*a, stream) : forward_dims<__half>(*a, stream);
}
