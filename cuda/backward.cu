/* backward.cu: fused backward on 16-bit tensor cores. One block owns BN keys of one segment for one KV head, for the whole
 * walk: its own segment's rows, then those of every descendant, times the query heads of the KV head; so dK and dV
 * need no atomics. Five products a pair of tiles:
 *
 *   S = Q K^T, dP = dO V^T   [BM x BN], 2 x 4 warps        P = exp2(S - LSE), dS = P (dP - delta)  -> shared memory
 *   dV += P^T dO, dK += dS^T Q   [BN x D], in registers     dQ = dS K   [BM x D], added to fp32 memory
 *
 * The tensor core truncates, so dK and dV are folded every DKV_FOLD_TILES tiles into an fp32 sum that rounds to
 * nearest (dk_acc, dv_acc: the owner's own rows, in fixed order). Where there are few key tiles the walk is split; split z
 * takes every splits-th run of DKV_SPLIT_RUN tiles, and the conversion pass adds the splits in order.
 * dQ of the plain kernel is summed by atomics; the repeatable way is query_gradient_kernel, one owner a query tile. */
#include "args.cuh"
#include "launch.h"
#include "mma.cuh"

#define DKV_SPLIT_RUN 8
#define BM 64 /* query rows a step, every head dim */

/* Rows that a key tile meets: segments of the subtree in order, query heads, row tiles. */
typedef struct dkv_row_walker {
    int t, g, head; /* segment (-1: past the end), its range that holds the tile, query head inside the KV head */
    int r0, lo, hi; /* row tile, span of rows */
    int q_len;      /* of segment t */
    int full;       /* rows from here on see the whole tile; -1 where only dkv_walkTile can say */
    int vis, n;     /* as dkv_walker; tiles met so far */
} dkv_row_walker;

/* Row of segment t from which on every row sees every key of the tile that ends at offset c1 of range g; INT_MAX where the
 * tile overruns the range, -1 where only dkv_walkTile can say. */
static __device__ __forceinline__ int first_full_row(const dkv_args &a, const dualkv_segment &t, const dualkv_range &g,
                                                     int c1) {
    if (c1 > g.len) return 0x7fffffff;
    if (a.p.mask == DUALKV_FULL || (a.p.mask == DUALKV_PREFIX && t.depth == 0)) return 0;
    if (a.p.mask != DUALKV_CAUSAL && a.p.mask != DUALKV_PREFIX) return -1;
    return (int)dkv_walkMin(0x7fffffff, dkv_walkMax(0, g.pos + c1 - 1 - t.context));
}

/* First segment from t on, in the subtree of s, that sees offset c0 of s's keys; span of rows set. */
static __device__ __forceinline__ void row_segment(const dkv_args &a, int s, int c0, int c1, dkv_row_walker &w) {
    for (;; w.t++) {
        if (w.t >= a.p.n_segments - (FAULT(a, X14) && w.t > s) || (w.t > s && a.p.segments[w.t].depth <= a.p.segments[s].depth)) {
            w.t = -1;
            return;
        }
        const dualkv_segment &t = a.p.segments[w.t];
        for (w.g = (int)t.range_begin; w.g < (int)t.range_begin + t.range_count; w.g++)
            if (a.p.ranges[w.g].k_start == a.p.segments[s].k_start && a.p.ranges[w.g].len > c0) {
                int64_t lo, hi;
                dkv_walkRows(&a.p, &t, &a.p.ranges[w.g], c0, dkv_walkMin(c1, a.p.ranges[w.g].len), &lo, &hi);
                w.lo = (int)lo / BM * BM;
                w.hi = (int)hi;
                w.q_len = (int)t.q_len;
                w.full = first_full_row(a, t, a.p.ranges[w.g], c1);
                if (lo < hi) return;
            }
    }
}

template <int BN>
static __device__ __forceinline__ dkv_row_walker row_advance(const dkv_args &a, int s, int c0, int split,
                                                             dkv_row_walker w) {
    for (;;) {
        w.r0 += BM;
        while (w.r0 >= w.hi) {
            if (++w.head >= a.p.hq / a.p.hkv) {
                w.head = PLANT(a, F1, a.p.hq / a.p.hkv - 1, 0);
                w.t++;
                row_segment(a, s, c0, c0 + BN, w);
                if (w.t < 0) return w;
            }
            w.r0 = w.lo;
        }
        if (w.full >= 0 && (a.p.mask == DUALKV_CAUSAL || a.p.mask == DUALKV_FULL || a.p.mask == DUALKV_PREFIX)) {
            w.vis = w.r0 >= w.full && w.r0 + BM <= w.q_len ? 1 : 2;
        } else {
            const dualkv_range &r = a.p.ranges[w.g];
            w.vis = dkv_walkTile(&a.p, &a.p.segments[w.t], &r, w.r0, dkv_walkMin(w.r0 + BM, w.q_len), c0,
                                 dkv_walkMin(c0 + BN, r.len));
            if (!w.vis) continue;
            if (w.r0 + BM > w.q_len || c0 + BN > r.len) w.vis = 2;
        }
        if (a.splits == 1 || w.n++ / DKV_SPLIT_RUN % a.splits == split) return w;
    }
}

/* Adds this warp's part of a [BN x D] product to fp32 memory rows [row0, row0 + rows), or stores it the first time. */
template <int MT, int NT>
static __device__ __forceinline__ void fold(const dkv_args &a, float acc[MT][NT][4], float *dst, int64_t stride, int m0,
                                            int n0, int rows, int d, bool first) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int r = m0 + 16 * i + lane / 4 + 8 * h;
            if (r < rows) {
#pragma unroll
                for (int j = 0; j < NT; j++)
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        int c = n0 + 8 * j + lane % 4 * 2 + e;
                        float *p = dst + r * stride + c;
                        if (c >= d) continue;
                        float x = first ? acc[i][j][2 * h + e] : *p + acc[i][j][2 * h + e];
                        *p = PLANT(a, E1, dkv_faultBf16(x), x);
                    }
            }
        }
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int j = 0; j < NT; j++) acc[i][j][0] = acc[i][j][1] = acc[i][j][2] = acc[i][j][3] = 0.f;
}

template <int MT, int NT>
static __device__ __forceinline__ void add_dq(const dkv_args &a, float acc[MT][NT][4], float *dst, int64_t stride, int m0,
                                              int n0, int rows, int d) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int r = m0 + 16 * i + lane / 4 + 8 * h;
            if (r >= rows) continue;
#pragma unroll
            for (int j = 0; j < NT; j++) {
                int c = n0 + 8 * j + lane % 4 * 2;
                float *p = dst + r * stride + c;
                if (FAULT(a, H1)) {
                    for (int e = 0; e < 2 && c + e < d; e++) p[e] += acc[i][j][2 * h + e];
                    continue;
                }
#if __CUDA_ARCH__ >= 900
                if (d % 2 == 0) {
                    if (c < d) atomicAdd((float2 *)p, make_float2(acc[i][j][2 * h], acc[i][j][2 * h + 1]));
                    continue;
                }
#endif
                if (c < d) atomicAdd(p, acc[i][j][2 * h]);
                if (c + 1 < d) atomicAdd(p + 1, acc[i][j][2 * h + 1]);
            }
        }
}

/* P and dS of one 16-row by 8 NT piece a warp: s raw products in, P out; dp in, dS (by the natural score of q.k, without
 * scale) out. seen: bit (2 i + h) * 2 NT + 2 j + e. */
template <int MT, int NT, bool PLAIN>
static __device__ __forceinline__ void score_gradient(const dkv_args &a, float s[MT][NT][4], float dp[MT][NT][4],
                                                      const float lse2[MT][2], const float delta[MT][2], float slope2,
                                                      int64_t ahead, int vis, uint32_t seen) {
    float scale2 = a.p.scale * DKV_LOG2E;
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int j = 0; j < NT; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                int h = e / 2;
                float chain = 1.f, p;
                if (PLAIN)
                    p = exp2f(fmaf(s[i][j][e], scale2, -lse2[i][h]));
                else
                    p = exp2f(dkv_score2(a, s[i][j][e], slope2, ahead + 16 * i + 8 * h - 8 * j - e % 2, &chain) -
                              lse2[i][h]);
                float g = p * (dp[i][j][e] - delta[i][h]);
                if (!PLAIN) g *= chain;
                if (vis == 2 && !(seen >> ((2 * i + h) * 2 * NT + 2 * j + e % 2) & 1)) p = g = 0.f;
                s[i][j][e] = p;
                dp[i][j][e] = g;
            }
}

template <typename T, int MT, int NT, int PITCH>
static __device__ __forceinline__ void store_pieces(T *tile, float c[MT][NT][4], int m0, int n0) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int j = 0; j < NT; j++)
#pragma unroll
            for (int h = 0; h < 2; h++)
                *(uint32_t *)(tile + swz<PITCH>(m0 + 16 * i + lane / 4 + 8 * h, n0 + 8 * j + lane % 4 * 2)) =
                    half_ops<T>::pack(c[i][j][2 * h], c[i][j][2 * h + 1]);
}

template <typename T, int DQK, int DV, int BN, int STAGES, bool PLAIN, bool DQ>
__global__ void __launch_bounds__(256, 1) backward_kernel(const __grid_constant__ dkv_args a, int64_t tiles) {
    constexpr int THREADS = 256;
    constexpr int SN = BN / 4, SNT = SN / 8;                    /* S, dP: warp tile 32 x BN/4 */
    constexpr int KM = BN == 128 ? 4 : 2, KD = 8 / KM;          /* dK, dV: warp tile 32 x D/KD */
    constexpr int KNT = DQK / KD / 8, VNT = DV / KD / 8;
    constexpr int QM = DQK == 64 ? 4 : 2, QD = 8 / QM;          /* dQ: warp tile 64/QM x D/QD */
    constexpr int QMT = 4 / QM, QNT = DQK / QD / 8;
    extern __shared__ __align__(128) char smem[];
    T *sk = (T *)smem, *sv = sk + BN * DQK, *sq = sv + BN * DV, *so = sq + STAGES * BM * DQK;
    T *sp = so + STAGES * BM * DV, *sds = sp + BM * BN;

    /* heads innermost: the prompt's tiles of all heads, the longest walks, start first */
    int64_t tile, id = blockIdx.x / a.p.hkv % tiles;
    int kvh = blockIdx.x % a.p.hkv, split = (int)(blockIdx.x / a.p.hkv / tiles), group = a.p.hq / a.p.hkv;
    int si = dkv_findSegment(a, id, BN, 1, &tile);
    int64_t k_start = a.p.segments[si].k_start, k_len = a.p.segments[si].k_len;
    if (tile * BN >= k_len) return;
    int c0 = (int)tile * BN, keys = (int)dkv_walkMin(BN, k_len - c0);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int sm0 = warp / 4 * 32, sn0 = warp % 4 * SN, km0 = warp / KD * 32, kd = warp % KD, qm0 = warp / QD * 16 * QMT, qd = warp % QD;

    const T *q = (const T *)a.q, *d_o = (const T *)a.d_o;
    load_tile<T, BN, DQK, THREADS>(sk, (const T *)a.k + kvh * a.k_head, a.k_row, k_start + c0, k_start + k_len, a.p.dqk,
                                   a.vec);
    load_tile<T, BN, DV, THREADS>(sv, (const T *)a.v + kvh * a.v_head, a.v_row, k_start + c0, k_start + k_len, a.p.dv,
                                  a.vec);
    float dk[2][KNT][4], dv[2][VNT][4];
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
        for (int j = 0; j < KNT; j++) dk[i][j][0] = dk[i][j][1] = dk[i][j][2] = dk[i][j][3] = 0.f;
#pragma unroll
        for (int j = 0; j < VNT; j++) dv[i][j][0] = dv[i][j][1] = dv[i][j][2] = dv[i][j][3] = 0.f;
    }
    float *dk_out = a.dk_acc + (((int64_t)split * a.p.tk + k_start + c0) * a.p.hkv + kvh) * a.p.dqk;
    float *dv_out = a.dv_acc + (((int64_t)split * a.p.tk + k_start + c0) * a.p.hkv + kvh) * a.p.dv;
    int64_t dk_stride = (int64_t)a.p.hkv * a.p.dqk, dv_stride = (int64_t)a.p.hkv * a.p.dv;
    bool first = true;
    int done = 0, since = 0, reach = keys;

    dkv_row_walker w = {si - 1, 0, group - 1, 0, 0, 0, 0, 0, 0, 0};
    w = row_advance<BN>(a, si, c0, split, w);
#define LOAD_ROWS(stage)                                                                                              \
    do {                                                                                                              \
        const dualkv_segment &t_ = a.p.segments[w.t];                                                                 \
        int h_ = kvh * group + w.head;                                                                                \
        load_tile<T, BM, DQK, THREADS>(sq + (stage) * BM * DQK, q + h_ * a.q_head, a.q_row, t_.q_start + w.r0,        \
                                       t_.q_start + t_.q_len, a.p.dqk, a.vec);                                        \
        load_tile<T, BM, DV, THREADS>(so + (stage) * BM * DV, d_o + h_ * a.do_head, a.do_row, t_.q_start + w.r0,      \
                                      t_.q_start + t_.q_len, a.p.dv, a.vec);                                          \
    } while (0)
    if (w.t >= 0) LOAD_ROWS(0);
    cp_async_commit();
    while (w.t >= 0) {
        const dualkv_segment &t = a.p.segments[w.t];
        int r0 = w.r0, vis = w.vis, rows = w.q_len - r0 < BM ? w.q_len - r0 : BM, head = kvh * group + w.head, g = w.g;
        int ti = w.t, stage = done % STAGES;
        int64_t row0 = t.q_start + r0;
        float lse2[2][2], delta[2][2];
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                int r = sm0 + 16 * i + lane / 4 + 8 * h;
                bool ok = r < rows;
                lse2[i][h] = ok ? a.lse[head * a.lse_head + (row0 + r) * a.lse_row] * DKV_LOG2E : 0.f;
                delta[i][h] = ok ? a.delta[(head - (FAULT(a, Y9) && head > 0)) * a.p.tq + row0 + r] : 0.f;
            }
        w = row_advance<BN>(a, si, c0, split, w);
        cp_async_wait<0>();
        __syncthreads();
        if (STAGES == 2 && w.t >= 0) {
            LOAD_ROWS(stage ^ 1);
            cp_async_commit();
        }
        const T *tq = sq + stage * BM * DQK, *to = so + stage * BM * DV;
        {
            float s[2][SNT][4], dp[2][SNT][4];
#pragma unroll
            for (int i = 0; i < 2; i++)
#pragma unroll
                for (int j = 0; j < SNT; j++)
#pragma unroll
                    for (int e = 0; e < 4; e++) s[i][j][e] = dp[i][j][e] = 0.f;
            tile_mma<T, 2, SNT, DQK, 0, 0, DQK, DQK>(s, tq, sm0, sk, sn0);
            tile_mma<T, 2, SNT, DV, 0, 0, DV, DV>(dp, to, sm0, sv, sn0);
            uint32_t seen = ~0u;
            if (vis == 2) {
                seen = 0;
                const dualkv_segment &seg = a.p.segments[ti];
#pragma unroll
                for (int ih = 0; ih < 4; ih++) {
                    int r = sm0 + 16 * (ih / 2) + lane / 4 + 8 * (ih % 2);
                    uint64_t bits = r < rows ? dkv_rowBits(a, seg, g, r0 + r + FAULT(a, Z3), c0 + sn0) >> (lane % 4 * 2) : 0;
#pragma unroll
                    for (int j = 0; j < SNT; j++)
                        seen |= (uint32_t)(bits >> (8 * j) & 3) << (ih * 2 * SNT + 2 * j);
                }
            }
            int64_t ahead = PLAIN ? 0
                                  : a.p.segments[ti].context + r0 + sm0 + lane / 4 - a.p.ranges[g].pos - c0 - sn0 -
                                        lane % 4 * 2;
            score_gradient<2, SNT, PLAIN>(a, s, dp, lse2, delta, a.p.alibi ? a.slopes[head] * DKV_LOG2E : 0.f, ahead, vis,
                                          seen);
            store_pieces<T, 2, SNT, BN>(sp, s, sm0, sn0);
            store_pieces<T, 2, SNT, BN>(sds, dp, sm0, sn0);
        }
        if (!FAULT(a, H2)) __syncthreads();
        /* What sees only part of this tile must not reach its other keys: 0 times an infinite q would be NaN there. */
        int limit = vis == 1 ? keys : (int)dkv_walkMin(keys, a.p.ranges[g].len - c0);
        if (since == DKV_FOLD_TILES || limit != reach) {
            fold<2, KNT>(a, dk, dk_out, dk_stride, km0, kd * (DQK / KD), reach, a.p.dqk, first);
            fold<2, VNT>(a, dv, dv_out, dv_stride, km0, kd * (DV / KD), reach, a.p.dv, first);
            first = FAULT(a, H5);
            since = 0;
            reach = limit;
        }
        since++;
        tile_mma<T, 2, VNT, BM, 1, 1, BN, DV>(dv, sp, km0, to, kd * (DV / KD));
        tile_mma<T, 2, KNT, BM, 1, 1, BN, DQK>(dk, sds, km0, tq, kd * (DQK / KD));
        if (DQ) {
            float dq[QMT][QNT][4];
#pragma unroll
            for (int i = 0; i < QMT; i++)
#pragma unroll
                for (int j = 0; j < QNT; j++) dq[i][j][0] = dq[i][j][1] = dq[i][j][2] = dq[i][j][3] = 0.f;
            tile_mma<T, QMT, QNT, BN, 0, 1, BN, DQK>(dq, sds, qm0, sk, qd * (DQK / QD));
            add_dq<QMT, QNT>(a, dq, a.dq_acc + (row0 * a.p.hq + head) * a.p.dqk, (int64_t)a.p.hq * a.p.dqk, qm0,
                             qd * (DQK / QD), rows, a.p.dqk);
        }
        done++;
        if (STAGES == 1) {
            __syncthreads();
            if (w.t >= 0) LOAD_ROWS(0);
            cp_async_commit();
        }
    }
    cp_async_wait<0>();
    fold<2, KNT>(a, dk, dk_out, dk_stride, km0, kd * (DQK / KD), reach, a.p.dqk, first);
    fold<2, VNT>(a, dv, dv_out, dv_stride, km0, kd * (DV / KD), reach, a.p.dv, first);
#undef LOAD_ROWS
}

/* dQ, one owner a block of 16 WARPS rows: walks the keys as forward does; S, dP and dS stay in registers. */
template <typename T, int D, int WARPS, bool PLAIN>
__global__ void __launch_bounds__(WARPS * 32, 1)
    query_gradient_kernel(const __grid_constant__ dkv_args a, int64_t tiles) {
    constexpr int ROWS = 16 * WARPS, BN = DKV_KEY_TILE, THREADS = 32 * WARPS, NT = BN / 8;
    extern __shared__ __align__(128) char smem[];
    T *sq = (T *)smem, *so = sq + ROWS * D, *sk = so + ROWS * D, *sv = sk + BN * D;
    int64_t tile, id = tiles - 1 - (int64_t)(blockIdx.x % tiles);
    int head = (int)(blockIdx.x / tiles), kvh = head / (a.p.hq / a.p.hkv);
    const dualkv_segment s = a.p.segments[dkv_findSegment(a, id, ROWS, 0, &tile)];
    if (tile * ROWS >= s.q_len) return;
    int r0 = (int)tile * ROWS, r1 = (int)dkv_walkMin(r0 + ROWS, s.q_len);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, m0 = 16 * warp;
    float slope2 = a.p.alibi ? a.slopes[head] * DKV_LOG2E : 0.f, lse2[1][2], delta[1][2], dq[1][D / 8][4];
    load_tile<T, ROWS, D, THREADS>(sq, (const T *)a.q + head * a.q_head, a.q_row, s.q_start + r0, s.q_start + s.q_len,
                                   a.p.dqk, a.vec);
    load_tile<T, ROWS, D, THREADS>(so, (const T *)a.d_o + head * a.do_head, a.do_row, s.q_start + r0,
                                   s.q_start + s.q_len, a.p.dv, a.vec);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int64_t r = r0 + m0 + lane / 4 + 8 * h;
        bool ok = r < r1;
        lse2[0][h] = ok ? a.lse[head * a.lse_head + (s.q_start + r) * a.lse_row] * DKV_LOG2E : 0.f;
        delta[0][h] = ok ? a.delta[head * a.p.tq + s.q_start + r] : 0.f;
    }
#pragma unroll
    for (int j = 0; j < D / 8; j++) dq[0][j][0] = dq[0][j][1] = dq[0][j][2] = dq[0][j][3] = 0.f;

    for (dkv_walker w = dkv_begin<BN>(a, s, r0, r1); w.g < w.end; w = dkv_advance<BN>(a, s, r0, r1, w)) {
        __syncthreads();
        load_keys<T, BN, D, THREADS>(sk, (const T *)a.k + kvh * a.k_head, a.k_row, a.p.ranges[w.g], w.c0, a.p.dqk, a.vec);
        load_keys<T, BN, D, THREADS>(sv, (const T *)a.v + kvh * a.v_head, a.v_row, a.p.ranges[w.g], w.c0, a.p.dv, a.vec);
        cp_async_commit();
        cp_async_wait<0>();
        __syncthreads();
        float c[1][NT][4], dp[1][NT][4];
#pragma unroll
        for (int j = 0; j < NT; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) c[0][j][e] = dp[0][j][e] = 0.f;
        tile_mma<T, 1, NT, D, 0, 0, D, D>(c, sq, m0, sk, 0);
        tile_mma<T, 1, NT, D, 0, 0, D, D>(dp, so, m0, sv, 0);
        uint32_t seen = ~0u;
        if (w.vis == 2) {
            seen = 0;
#pragma unroll
            for (int h = 0; h < 2; h++) {
                int r = r0 + m0 + lane / 4 + 8 * h;
                uint64_t bits = r < r1 ? dkv_rowBits(a, s, w.g, r, w.c0) >> (lane % 4 * 2) : 0;
#pragma unroll
                for (int j = 0; j < NT; j++) seen |= (uint32_t)(bits >> (8 * j) & 3) << (h * 2 * NT + 2 * j);
            }
        }
        int64_t ahead = s.context + r0 + m0 + lane / 4 - a.p.ranges[w.g].pos - w.c0 - lane % 4 * 2;
        score_gradient<1, NT, PLAIN>(a, c, dp, lse2, delta, slope2, ahead, w.vis, seen);
        uint32_t f[BN / 16][1][4];
#pragma unroll
        for (int j = 0; j < NT; j++) {
            f[j / 2][0][(j % 2) * 2] = half_ops<T>::pack(dp[0][j][0], dp[0][j][1]);
            f[j / 2][0][(j % 2) * 2 + 1] = half_ops<T>::pack(dp[0][j][2], dp[0][j][3]);
        }
        tile_mma_reg<T, 1, D / 8, BN, D>(dq, f, sk);
    }
    fold<1, D / 8>(a, dq, a.dq_acc + ((s.q_start + r0) * a.p.hq + head) * a.p.dqk, (int64_t)a.p.hq * a.p.dqk, m0, 0, r1 - r0,
                   a.p.dqk, true);
}

template <typename T, int DQK, int DV, int BN, int STAGES, bool PLAIN, bool DQ>
static cudaError_t backward_start(const dkv_args &a, cudaStream_t stream) {
    size_t smem = sizeof(T) * (BN * DQK + BN * DV + STAGES * BM * (DQK + DV) + 2 * BM * BN);
    int64_t tiles = dkv_virtualTiles(&a.p, BN, 1);
    cudaError_t e = cudaFuncSetAttribute(backward_kernel<T, DQK, DV, BN, STAGES, PLAIN, DQ>,
                                         cudaFuncAttributeMaxDynamicSharedMemorySize, (int)smem);
    if (e != cudaSuccess) return e;
    backward_kernel<T, DQK, DV, BN, STAGES, PLAIN, DQ>
        <<<(unsigned)(tiles * a.p.hkv * a.splits), 256, smem, stream>>>(a, tiles);
    return cudaGetLastError();
}

static bool plain_scores(const dkv_args &a) { return a.p.softcap <= 0.f && !a.p.alibi; }

template <typename T, int D, int BN, int STAGES>
static cudaError_t backward_launch(const dkv_args &a, int det, cudaStream_t stream) {
    if (plain_scores(a))
        return det ? backward_start<T, D, D, BN, STAGES, true, false>(a, stream)
                   : backward_start<T, D, D, BN, STAGES, true, true>(a, stream);
    return det ? backward_start<T, D, D, BN, STAGES, false, false>(a, stream)
               : backward_start<T, D, D, BN, STAGES, false, true>(a, stream);
}

/* Tile sizes: at 256 the accumulators of dK and dV fill the registers at 64 keys, and shared memory holds one stage. */
template <typename T> static cudaError_t backward_dims(const dkv_args &a, int det, cudaStream_t stream) {
    int d = a.p.dqk > a.p.dv ? a.p.dqk : a.p.dv;
    if (d <= 64) return backward_launch<T, 64, 128, 2>(a, det, stream);
    if (d <= 128) return backward_launch<T, 128, 128, 2>(a, det, stream);
    return backward_launch<T, 256, 64, 1>(a, det, stream);
}

cudaError_t dkv_cudaBackward16(const dkv_args *a, int det, cudaStream_t stream) {
    if (a->p.tk == 0) return cudaSuccess;
    return a->p.dtype == DUALKV_BF16 ? backward_dims<__nv_bfloat16>(*a, det, stream)
                                     : backward_dims<__half>(*a, det, stream);
}

int dkv_cudaKeyRows(const dualkv_problem *p) { return p->dqk > 128 || p->dv > 128 ? 64 : 128; }

template <typename T, int D, int WARPS, bool PLAIN>
static cudaError_t query_start(const dkv_args &a, cudaStream_t stream) {
    size_t smem = sizeof(T) * (2 * 16 * WARPS * D + 2 * DKV_KEY_TILE * D);
    int64_t tiles = dkv_virtualTiles(&a.p, 16 * WARPS, 0);
    cudaError_t e = cudaFuncSetAttribute(query_gradient_kernel<T, D, WARPS, PLAIN>,
                                         cudaFuncAttributeMaxDynamicSharedMemorySize, (int)smem);
    if (e != cudaSuccess) return e;
    query_gradient_kernel<T, D, WARPS, PLAIN><<<(unsigned)(tiles * a.p.hq), 32 * WARPS, smem, stream>>>(a, tiles);
    return cudaGetLastError();
}

template <typename T, int D, int WARPS> static cudaError_t query_launch(const dkv_args &a, cudaStream_t stream) {
    return plain_scores(a) ? query_start<T, D, WARPS, true>(a, stream) : query_start<T, D, WARPS, false>(a, stream);
}

template <typename T> static cudaError_t query_dims(const dkv_args &a, cudaStream_t stream) {
    int d = a.p.dqk > a.p.dv ? a.p.dqk : a.p.dv;
    if (d <= 64) return query_launch<T, 64, 8>(a, stream);
    if (d <= 128) return query_launch<T, 128, 8>(a, stream);
    return query_launch<T, 256, 4>(a, stream);
}

cudaError_t dkv_cudaQueryGradient16(const dkv_args *a, cudaStream_t stream) {
    if (a->p.tq == 0) return cudaSuccess;
    return a->p.dtype == DUALKV_BF16 ? query_dims<__nv_bfloat16>(*a, stream) : query_dims<__half>(*a, stream);
}
