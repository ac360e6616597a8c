/* backward.cu: fused backward on 16-bit tensor cores. One block owns BN keys of one segment for one KV head, for the
 * whole walk: its own segment's rows, then those of every descendant, times the query heads of the KV head; so dK and
 * dV need no atomics. Five products a pair of tiles:
 *
 *   S = Q K^T   dP = dO V^T     [BM x BN], 8 warps 2 x 4: 32 x BN/4 each
 *   P = exp(S - LSE), dS = P (dP - delta)  -> shared memory; exponentials between the products of dP
 *   dQ = dS K                   [BM x D], 2 x 4 (4 x 2 at D = 64); added to fp32 memory between the products of dV
 *   dV += P^T dO, dK += dS^T Q  [BN x D], 4 x 2 (2 x 4 at BN = 64); in registers
 *
 *   plan step n + 2 | wait rows n | load rows n + 1 | S | dP, P | dS | wait P, dS | dQ | dV | dK
 *
 * The tensor core truncates, so dK and dV are folded every DKV_FOLD_TILES tiles into an fp32 sum that rounds to
 * nearest (dk_acc, dv_acc: the owner's own rows, in fixed order). Where there are few key tiles the walk is split;
 * split z takes every splits-th run of DKV_SPLIT_RUN tiles, and the conversion pass adds the splits in order.
 * dQ of the plain kernel is summed by atomics; the repeatable way is query_gradient_kernel, one owner a query tile.
 * All three lie in memory as pieces (args.cuh). */
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
    int limit;      /* keys of the tile inside the range */
    int64_t q_start;
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
        int end = a.p.n_segments - (FAULT(a, X14) && w.t > s);
        if (w.t >= end || (w.t > s && a.p.segments[w.t].depth <= a.p.segments[s].depth)) {
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
                w.q_start = t.q_start;
                w.limit = (int)dkv_walkMin(c1 - c0, a.p.ranges[w.g].len - c0);
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

/* What the block does in one step. One thread plans it two steps ahead, in shared memory, so that the walk costs no
 * registers while products run. */
typedef struct dkv_row_step {
    int64_t q, d_o, lse, delta, dq; /* offsets of the tile's first row */
    int vis, rows, limit;           /* vis 0: the walk is over; rows that exist; keys that the rows may see */
    int t, g, r0, head;             /* segment, range, first row in the segment, query head */
} dkv_row_step;
#define RING 4 /* the step that runs, the one being loaded, the one being planned */

/* Plans the step after `last`. */
template <int BN>
static __device__ __forceinline__ void plan_step(const dkv_args &a, int s, int c0, int kvh, int split,
                                                 dkv_row_walker *walker, const dkv_row_step *last, dkv_row_step *step) {
    if (last && walker->r0 + BM < walker->hi && walker->full >= 0 && a.splits == 1) { /* one tile down, as mostly */
        int r0 = walker->r0 += BM, rows = walker->q_len - r0 < BM ? walker->q_len - r0 : BM;
        *step = *last;
        step->q += BM * a.q_row;
        step->d_o += BM * a.do_row;
        step->lse += BM * a.lse_row;
        step->delta += BM;
        step->dq += BM * a.acc_cols;
        step->r0 = r0;
        step->rows = rows;
        step->vis = r0 >= walker->full && rows == BM ? 1 : 2;
        return;
    }
    dkv_row_walker w = *walker;
    w = row_advance<BN>(a, s, c0, split, w);
    *walker = w;
    step->vis = step->rows = 0;
    if (w.t < 0) return;
    int head = kvh * (a.p.hq / a.p.hkv) + w.head;
    int64_t row = w.q_start + w.r0, piece = dkv_virtualTile(a, w.t, DKV_PIECE, 0) + w.r0 / DKV_PIECE;
    step->q = head * a.q_head + row * a.q_row;
    step->d_o = head * a.do_head + row * a.do_row;
    step->lse = head * a.lse_head + row * a.lse_row;
    step->delta = (head - (FAULT(a, Y9) && head > 0)) * a.p.tq + row;
    step->dq = (head * a.q_pieces + piece) * DKV_PIECE * a.acc_cols;
    step->vis = w.vis;
    step->rows = w.q_len - w.r0 < BM ? w.q_len - w.r0 : BM;
    step->limit = w.limit;
    step->t = w.t;
    step->g = w.g;
    step->r0 = w.r0;
    step->head = head;
}

/* Adds this warp's part of a product, from row m0 and column n0 on, to a matrix of pieces, or stores it the first time.
 * Rows from `rows` on add zero. */
template <int MT, int NT, int D>
static __device__ __forceinline__ void fold(const dkv_args &a, float acc[MT][NT][4], float *dst, int m0, int n0,
                                            int rows, bool first) {
    int lane = threadIdx.x % 32;
    dst += m0 * D + n0 * DKV_PIECE + lane * 4;
#pragma unroll
    for (int i = 0; i < MT; i++) {
        int left = rows - m0 - 16 * i;
        if (left > 0) {
            bool low = lane / 4 < left, high = lane / 4 + 8 < left;
#pragma unroll
            for (int j = 0; j < NT; j++) {
                float4 *p = (float4 *)(dst + 16 * i * D + 8 * j * DKV_PIECE);
                float4 old = first ? make_float4(0.f, 0.f, 0.f, 0.f) : *p;
                float sum[4] = {old.x, old.y, old.z, old.w};
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    sum[e] += (e < 2 ? low : high) ? acc[i][j][e] : 0.f;
                    sum[e] = PLANT(a, E1, dkv_faultBf16(sum[e]), sum[e]);
                }
                *p = make_float4(sum[0], sum[1], sum[2], sum[3]);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int j = 0; j < NT; j++) acc[i][j][0] = acc[i][j][1] = acc[i][j][2] = acc[i][j][3] = 0.f;
}

/* p[0..3] += x[0..3] by atomics. */
static __device__ __forceinline__ void add4(const dkv_args &a, float *p, const float x[4]) {
    if (FAULT(a, H1)) {
        for (int e = 0; e < 4; e++) p[e] += x[e];
        return;
    }
#if __CUDA_ARCH__ >= 900
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]));
#else
#pragma unroll
    for (int e = 0; e < 4; e++) asm volatile("red.global.add.f32 [%0], %1;" ::"l"(p + e), "f"(x[e]));
#endif
}

/* P of a plain score. LSE is taken off before base 2: rounded there it would be one error, in proportion to LSE, of the
 * whole row's P. What is left is small where P is not, and so is what fl(log2 e) does to it. */
static __device__ __forceinline__ float plain_weight(const dkv_args &a, float s, float lse) {
    return exp2_flushed(fmaf(s, a.p.scale, -lse) * DKV_LOG2E);
}

/* P and dS of one 16-row by 8 NT piece a warp: s raw products in, P out; dp in, dS (by the natural score of q.k,
 * without scale) out. seen: bit (2 i + h) * 2 NT + 2 j + e. */
template <int MT, int NT, bool PLAIN>
static __device__ __forceinline__ void score_gradient(const dkv_args &a, float s[MT][NT][4], float dp[MT][NT][4],
                                                      const float lse[MT][2], const float delta[MT][2], float slope,
                                                      int64_t ahead, int vis, uint32_t seen) {
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int j = 0; j < NT; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                int h = e / 2;
                float chain = 1.f, p;
                if (PLAIN)
                    p = plain_weight(a, s[i][j][e], lse[i][h]);
                else
                    p = exp2_flushed(DKV_LOG2E * (dkv_score(a, s[i][j][e], slope,
                                                            ahead + 16 * i + 8 * h - 8 * j - e % 2, &chain) -
                                                  lse[i][h]));
                float g = p * (dp[i][j][e] - delta[i][h]);
                if (!PLAIN) g *= chain;
                if (vis == 2 && !(seen >> ((2 * i + h) * 2 * NT + 2 * j + e % 2) & 1)) p = g = 0.f;
                s[i][j][e] = p;
                dp[i][j][e] = g;
            }
}

/* One 16 x 8 accumulator into a swizzled tile. base: of the lane's element for i = j = 0. */
template <typename T, int PITCH>
static __device__ __forceinline__ void store_piece(uint32_t base, const float c[4], int i, int j) {
#pragma unroll
    for (int h = 0; h < 2; h++)
        asm volatile("st.shared.b32 [%0], %1;" ::"r"((base ^ (16 * j)) + (16 * i + 8 * h) * PITCH * 2),
                     "r"(half_ops<T>::pack(c[2 * h], c[2 * h + 1])));
}

template <typename T, int D, int BN, int STAGES> struct backward_smem {
    T k[BN * D], v[BN * D], q[STAGES][BM * D], d_o[STAGES][BM * D], p[BM * BN], ds[BM * BN];
    float lse[STAGES][BM], delta[STAGES][BM];
    dkv_row_step steps[RING];
    dkv_row_walker walker;
};

/* Starts the copies of one step's rows: of Q, of dO, of LSE and delta. */
static __device__ __forceinline__ void load_row_values(const dkv_args &a, float *lse, float *delta,
                                                       const dkv_row_step &st) {
    int r = threadIdx.x % BM;
    const float *src = threadIdx.x < BM ? a.lse + st.lse + r * a.lse_row : a.delta + st.delta + r;
    if (threadIdx.x < 2 * BM) cp_async4((threadIdx.x < BM ? lse : delta) + r, src, r < st.rows);
}

template <typename T, int D, int THREADS, typename S>
static __device__ __forceinline__ void load_rows(const dkv_args &a, S &sm, int stage, const dkv_row_step &st) {
    load_tile<T, BM, D, THREADS>(sm.q[stage], (const T *)a.q + st.q, a.q_row, 0, st.rows, a.p.dqk, a.vec);
    load_tile<T, BM, D, THREADS>(sm.d_o[stage], (const T *)a.d_o + st.d_o, a.do_row, 0, st.rows, a.p.dv, a.vec);
    load_row_values(a, sm.lse[stage], sm.delta[stage], st);
    cp_async_commit();
}

template <typename T, int D, int BN, int STAGES, bool PLAIN, bool DQ>
__global__ void __launch_bounds__(256, 1) backward_kernel(const __grid_constant__ dkv_args a, int64_t tiles) {
    constexpr int THREADS = 256, PLANNER = THREADS - 32; /* a thread of a warp that copies no LSE */
    constexpr int SN = BN / 4, SNT = SN / 8;                    /* S, dP: warp tile 32 x BN/4 */
    constexpr int KM = BN == 128 ? 4 : 2, KD = 8 / KM;          /* dK, dV: warp tile 32 x D/KD */
    constexpr int KNT = D / KD / 8;
    constexpr int QM = D == 64 ? 4 : 2, QD = 8 / QM;            /* dQ: warp tile 64/QM x D/QD */
    constexpr int QMT = 4 / QM, QNT = D / QD / 8;
    extern __shared__ __align__(128) char smem[];
    backward_smem<T, D, BN, STAGES> &sm = *(backward_smem<T, D, BN, STAGES> *)smem;

    /* heads innermost: the prompt's tiles of all heads, the longest walks, start first */
    int64_t tile, id = blockIdx.x / a.p.hkv % tiles;
    int kvh = blockIdx.x % a.p.hkv, split = (int)(blockIdx.x / a.p.hkv / tiles);
    int si = dkv_findSegment(a, id, BN, 1, &tile);
    int64_t k_start = a.p.segments[si].k_start, k_len = a.p.segments[si].k_len;
    if (tile * BN >= k_len) return;
    int c0 = (int)tile * BN, keys = (int)dkv_walkMin(BN, k_len - c0);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int sm0 = warp / 4 * 32, sn0 = warp % 4 * SN, km0 = warp / KD * 32, kn0 = warp % KD * (D / KD);
    int qm0 = warp / QD * 16 * QMT, qn0 = warp % QD * (D / QD);
    /* this lane's addresses as operand A or B of the five products, and of P */
    constexpr uint32_t ROWS = sizeof sm.q[0], DO = sizeof sm.q, V = sizeof sm.k, DS = sizeof sm.p;
    uint32_t a_q = base_a<D, 0>(sm.q, sm0), b_k = base_b<D, 0>(sm.k, sn0), a_pt = base_a<BN, 1>(sm.p, km0),
             b_qt = base_b<D, 1>(sm.q, kn0), a_ds = base_a<BN, 0>(sm.ds, qm0), b_kt = base_b<D, 1>(sm.k, qn0),
             at_p = tile_base<BN>(sm.p, sm0 + lane / 4, sn0) + lane % 4 * 4;

    load_tile<T, BN, D, THREADS>(sm.k, (const T *)a.k + kvh * a.k_head + (k_start + c0) * a.k_row, a.k_row, 0, keys,
                                 a.p.dqk, a.vec);
    load_tile<T, BN, D, THREADS>(sm.v, (const T *)a.v + kvh * a.v_head + (k_start + c0) * a.v_row, a.v_row, 0, keys,
                                 a.p.dv, a.vec);
    if (threadIdx.x == PLANNER) {
        sm.walker = {.t = si - 1, .g = 0, .head = a.p.hq / a.p.hkv - 1};
        plan_step<BN>(a, si, c0, kvh, split, &sm.walker, NULL, &sm.steps[0]);
        if (sm.steps[0].vis) plan_step<BN>(a, si, c0, kvh, split, &sm.walker, &sm.steps[0], &sm.steps[1]);
    }
    __syncthreads();
    float dk[2][KNT][4], dv[2][KNT][4];
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int j = 0; j < KNT; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) dk[i][j][e] = dv[i][j][e] = 0.f;
    bool first = true;
    int since = 0, reach = keys;
#define FOLD(limit)                                                                                                   \
    do {                                                                                                              \
        int64_t at_ = (((int64_t)split * a.p.hkv + kvh) * a.k_pieces + dkv_virtualTile(a, si, DKV_PIECE, 1) +         \
                       c0 / DKV_PIECE) * DKV_PIECE * D;                                                               \
        fold<2, KNT, D>(a, dk, a.dk_acc + at_, km0, kn0, reach, first);                                               \
        fold<2, KNT, D>(a, dv, a.dv_acc + at_, km0, kn0, reach, first);                                               \
        first = FAULT(a, H5);                                                                                         \
        since = 0;                                                                                                    \
        reach = limit;                                                                                                \
    } while (0)

    if (sm.steps[0].vis) load_rows<T, D, THREADS>(a, sm, 0, sm.steps[0]);
    for (int n = 0;; n++) {
        const dkv_row_step &st = sm.steps[n % RING], &next = sm.steps[(n + 1) % RING];
        int vis = st.vis, stage = n % STAGES;
        if (!vis) break;
        cp_async_wait<0>();
        __syncthreads();
        if (threadIdx.x == PLANNER && next.vis)
            plan_step<BN>(a, si, c0, kvh, split, &sm.walker, &next, &sm.steps[(n + 2) % RING]);
        uint32_t mine = ~0u; /* lane l: which of this warp's keys row sm0 + l sees */
        if (vis == 2) {
            int r = sm0 + lane;
            mine = 0;
            if (r < st.rows)
                mine = (uint32_t)dkv_rowBits(a, a.p.segments[st.t], st.g, st.r0 + r + FAULT(a, Z3), c0 + sn0);
        }
        {
            float s[2][SNT][4], dp[2][SNT][4], lse[2][2], delta[2][2];
            const float *lse_at = sm.lse[stage] + sm0 + lane / 4, *delta_at = sm.delta[stage] + sm0 + lane / 4;
            if (STAGES == 2 && a.vec) {
                /* the next step's copies between the products of S; after the last step they read nothing */
                int to = stage ^ 1, rows = next.rows;
                tile_mma_at<T, 2, SNT, D, 0, 0, D, D, true>(s, a_q + stage * ROWS, b_k, [&](int t, int steps) {
                    if (t == steps / 8)
                        load_tile_fast<T, BM, D, THREADS>(sm.q[to], (const T *)a.q + next.q, a.q_row, rows, a.p.dqk);
                    if (t == steps / 4)
                        load_tile_fast<T, BM, D, THREADS>(sm.d_o[to], (const T *)a.d_o + next.d_o, a.do_row, rows,
                                                          a.p.dv);
                    if (t == steps / 2) load_row_values(a, sm.lse[to], sm.delta[to], next);
                });
                cp_async_commit();
            } else {
                if (STAGES == 2) load_rows<T, D, THREADS>(a, sm, stage ^ 1, next);
                tile_mma_at<T, 2, SNT, D, 0, 0, D, D, true>(s, a_q + stage * ROWS, b_k);
            }
#pragma unroll
            for (int i = 0; i < 4; i++) lse[i / 2][i % 2] = lse_at[8 * i];
            if (PLAIN && vis == 1) {
                /* exponentials between the products of dP */
                uint32_t a_do = a_q + DO + stage * ROWS;
                tile_mma_at<T, 2, SNT, D, 0, 0, D, D, true>(dp, a_do, b_k + V, [&](int t, int steps) {
#pragma unroll
                    for (int n = t * 2 * SNT / steps; n < (t + 1) * 2 * SNT / steps; n++) {
                        int i = n / SNT, j = n % SNT;
#pragma unroll
                        for (int e = 0; e < 4; e++)
                            s[i][j][e] = plain_weight(a, s[i][j][e], lse[i][e / 2]);
                        store_piece<T, BN>(at_p, s[i][j], i, j);
                    }
                });
                asm volatile("" ::: "memory"); /* delta only now: registers are short */
#pragma unroll
                for (int i = 0; i < 4; i++) delta[i / 2][i % 2] = delta_at[8 * i];
#pragma unroll
                for (int i = 0; i < 2; i++)
#pragma unroll
                    for (int j = 0; j < SNT; j++) {
#pragma unroll
                        for (int e = 0; e < 4; e++) dp[i][j][e] = s[i][j][e] * (dp[i][j][e] - delta[i][e / 2]);
                        store_piece<T, BN>(at_p + DS, dp[i][j], i, j);
                    }
            } else {
                tile_mma_at<T, 2, SNT, D, 0, 0, D, D, true>(dp, a_q + DO + stage * ROWS, b_k + V);
#pragma unroll
                for (int i = 0; i < 4; i++) delta[i / 2][i % 2] = delta_at[8 * i];
                uint32_t seen = 0;
#pragma unroll
                for (int ih = 0; ih < 4; ih++) {
                    uint32_t bits = __shfl_sync(~0u, mine, 8 * ih + lane / 4) >> (lane % 4 * 2);
#pragma unroll
                    for (int j = 0; j < SNT; j++) seen |= (bits >> (8 * j) & 3) << (ih * 2 * SNT + 2 * j);
                }
                int64_t ahead = PLAIN ? 0
                                      : a.p.segments[st.t].context + st.r0 + sm0 + lane / 4 - a.p.ranges[st.g].pos -
                                            c0 - sn0 - lane % 4 * 2;
                score_gradient<2, SNT, PLAIN>(a, s, dp, lse, delta, a.p.alibi ? a.slopes[st.head] : 0.f, ahead, vis,
                                              seen);
#pragma unroll
                for (int i = 0; i < 2; i++)
#pragma unroll
                    for (int j = 0; j < SNT; j++) {
                        store_piece<T, BN>(at_p, s[i][j], i, j);
                        store_piece<T, BN>(at_p + DS, dp[i][j], i, j);
                    }
            }
        }
        if (!FAULT(a, H2)) __syncthreads();
        /* What sees only part of this tile must not reach its other keys: 0 times an infinite q would be NaN there. */
        if (since == DKV_FOLD_TILES || st.limit != reach) FOLD(st.limit);
        since++;
        if (DQ) {
            float dq[QMT][QNT][4];
            /* Pieces that do not exist go where nobody looks: no branch between the products, and 0 times an infinite k
             * is NaN. */
            float *out[QMT];
#pragma unroll
            for (int i = 0; i < QMT; i++)
                out[i] = a.dq_acc + (qm0 + 16 * i < st.rows ? st.dq : a.p.hq * a.q_pieces * DKV_PIECE * D) +
                         (qm0 + 16 * i) * D + qn0 * DKV_PIECE + lane * 4;
            tile_mma_at<T, QMT, QNT, BN, 0, 1, BN, D, true>(dq, a_ds, b_kt);
            /* its atomics between the products of dV */
            tile_mma_at<T, 2, KNT, BM, 1, 1, BN, D>(dv, a_pt, b_qt + DO + stage * ROWS, [&](int t, int steps) {
#pragma unroll
                for (int n = t * QMT * QNT / steps; n < (t + 1) * QMT * QNT / steps; n++)
                    add4(a, out[n / QNT] + n % QNT * 8 * DKV_PIECE, dq[n / QNT][n % QNT]);
            });
        } else {
            tile_mma_at<T, 2, KNT, BM, 1, 1, BN, D>(dv, a_pt, b_qt + DO + stage * ROWS);
        }
        tile_mma_at<T, 2, KNT, BM, 1, 1, BN, D>(dk, a_pt + DS, b_qt + stage * ROWS);
        if (STAGES == 1) {
            __syncthreads();
            if (next.vis) load_rows<T, D, THREADS>(a, sm, 0, next);
        }
    }
    cp_async_wait<0>();
    FOLD(0);
#undef FOLD
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
    int si = dkv_findSegment(a, id, ROWS, 0, &tile);
    const dualkv_segment s = a.p.segments[si];
    if (tile * ROWS >= s.q_len) return;
    int r0 = (int)tile * ROWS, r1 = (int)dkv_walkMin(r0 + ROWS, s.q_len);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, m0 = 16 * warp;
    float slope = a.p.alibi ? a.slopes[head] : 0.f, lse[1][2], delta[1][2], dq[1][D / 8][4];
    load_tile<T, ROWS, D, THREADS>(sq, (const T *)a.q + head * a.q_head, a.q_row, s.q_start + r0, s.q_start + s.q_len,
                                   a.p.dqk, a.vec);
    load_tile<T, ROWS, D, THREADS>(so, (const T *)a.d_o + head * a.do_head, a.do_row, s.q_start + r0,
                                   s.q_start + s.q_len, a.p.dv, a.vec);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int64_t r = r0 + m0 + lane / 4 + 8 * h;
        bool ok = r < r1;
        lse[0][h] = ok ? a.lse[head * a.lse_head + (s.q_start + r) * a.lse_row] : 0.f;
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
        score_gradient<1, NT, PLAIN>(a, c, dp, lse, delta, slope, ahead, w.vis, seen);
        uint32_t f[BN / 16][1][4];
#pragma unroll
        for (int j = 0; j < NT; j++) {
            f[j / 2][0][(j % 2) * 2] = half_ops<T>::pack(dp[0][j][0], dp[0][j][1]);
            f[j / 2][0][(j % 2) * 2 + 1] = half_ops<T>::pack(dp[0][j][2], dp[0][j][3]);
        }
        tile_mma_reg<T, 1, D / 8, BN, D>(dq, f, sk);
    }
    int64_t piece = head * a.q_pieces + dkv_virtualTile(a, si, DKV_PIECE, 0) + r0 / DKV_PIECE;
    fold<1, D / 8, D>(a, dq, a.dq_acc + piece * DKV_PIECE * D, m0, 0, r1 - r0, true);
}

template <typename T, int D, int BN, int STAGES, bool PLAIN, bool DQ>
static cudaError_t backward_start(const dkv_args &a, cudaStream_t stream) {
    size_t smem = sizeof(backward_smem<T, D, BN, STAGES>);
    int64_t tiles = dkv_virtualTiles(&a.p, BN, 1);
    cudaError_t e = cudaFuncSetAttribute(backward_kernel<T, D, BN, STAGES, PLAIN, DQ>,
                                         cudaFuncAttributeMaxDynamicSharedMemorySize, (int)smem);
    if (e != cudaSuccess) return e;
    unsigned blocks = (unsigned)(tiles * a.p.hkv * a.splits);
    backward_kernel<T, D, BN, STAGES, PLAIN, DQ><<<blocks, 256, smem, stream>>>(a, tiles);
    return cudaGetLastError();
}

size_t dkv_cudaBackwardShared(const dualkv_problem *p) {
    switch (dkv_cudaHeadDim(p)) {
    case 64: return sizeof(backward_smem<__half, 64, 128, 2>);
    case 128: return sizeof(backward_smem<__half, 128, 128, 2>);
    default: return sizeof(backward_smem<__half, 256, 64, 1>);
    }
}

static bool plain_scores(const dkv_args &a) { return a.p.softcap <= 0.f && !a.p.alibi; }

template <typename T, int D, int BN, int STAGES>
static cudaError_t backward_launch(const dkv_args &a, int det, cudaStream_t stream) {
    if (plain_scores(a))
        return det ? backward_start<T, D, BN, STAGES, true, false>(a, stream)
                   : backward_start<T, D, BN, STAGES, true, true>(a, stream);
    return det ? backward_start<T, D, BN, STAGES, false, false>(a, stream)
               : backward_start<T, D, BN, STAGES, false, true>(a, stream);
}

/* Tile sizes: at 256 the accumulators of dK and dV fill the registers at 64 keys, and shared memory holds one stage. */
template <typename T> static cudaError_t backward_dims(const dkv_args &a, int det, cudaStream_t stream) {
    switch (a.acc_cols) {
    case 64: return backward_launch<T, 64, 128, 2>(a, det, stream);
    case 128: return backward_launch<T, 128, 128, 2>(a, det, stream);
    default: return backward_launch<T, 256, 64, 1>(a, det, stream);
    }
}

cudaError_t dkv_cudaBackward16(const dkv_args *a, int det, cudaStream_t stream) {
    if (a->p.tk == 0) return cudaSuccess;
    return a->p.dtype == DUALKV_BF16 ? backward_dims<__nv_bfloat16>(*a, det, stream)
                                     : backward_dims<__half>(*a, det, stream);
}

int dkv_cudaHeadDim(const dualkv_problem *p) {
    int d = p->dqk > p->dv ? p->dqk : p->dv;
    return d <= 64 ? 64 : d <= 128 ? 128 : 256;
}

int dkv_cudaKeyRows(const dualkv_problem *p) { return dkv_cudaHeadDim(p) == 256 ? 64 : 128; }

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
    switch (a.acc_cols) {
    case 64: return query_launch<T, 64, 8>(a, stream);
    case 128: return query_launch<T, 128, 8>(a, stream);
    default: return query_launch<T, 256, 4>(a, stream);
    }
}

cudaError_t dkv_cudaQueryGradient16(const dkv_args *a, cudaStream_t stream) {
    if (a->p.tq == 0) return cudaSuccess;
    return a->p.dtype == DUALKV_BF16 ? query_dims<__nv_bfloat16>(*a, stream) : query_dims<__half>(*a, stream);
}
