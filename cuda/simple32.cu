/* simple32.cu: forward and backward in true fp32 (FFMA, no TF32), every head dim, mask and modifier. Plain
 * tiles of 64 x 64 pairs, 256 threads; thread (ty, tx) of 16 x 16 holds rows 4 ty + i and
 *
 *   of scores        keys tx + 16 j                  c[4][4]
 *   of a gradient    columns 64 j + 4 tx + e         acc[4][N], N = columns / 16
 *
 * Operands pass through shared memory: 32 columns of both sides of a score product, 16 rows of the right side
 * of a gradient product. Every output has one owner, so results are the same bits in every run:
 *
 *   forward  a block a query tile and head, walks key tiles          O, LSE
 *   dq       the same                                                dQ
 *   dkdv     a block a key tile, KV head and split of the walk       dK, dV: all descendants and query heads
 *            (prompt tiles of all heads first: they walk the furthest)
 *
 * Gradient accumulators are added to memory every DKV_FOLD32_TILES tiles, so that no chain is longer than 2048
 * products. Pairs that are masked get P = dS = 0 by selection, never by a product with a value that may be
 * NaN. */
#include "args.cuh"
#include "launch.h"

#define TILE DKV_KEY_TILE
#define THREADS 256
#define COLS 32       /* columns staged of a score product */
#define COLS_PITCH 36 /* 4 (mod 32) floats: 8 rows meet 8 banks of 16 bytes */
#define ROWS 16       /* rows staged of a gradient product */
#define P_PITCH 68
static_assert(TILE == 64, "the thread map is drawn for 64 x 64 pairs");

struct shared32 {
    union {
        struct {
            float a[TILE * COLS_PITCH], b[TILE * COLS_PITCH];
        };
        float stage[ROWS * 256];
    };
    float p[TILE * P_PITCH]; /* P or dS, [row][key] */
};

static __device__ __forceinline__ void zero(float *x, int n) {
#pragma unroll
    for (int i = 0; i < n; i++) x[i] = 0.f;
}

/* c = A B^T over d columns; rows past a_rows, b_rows count as zeros and are not read. */
static __device__ __forceinline__ void score_product(float c[4][4], shared32 &sm, const float *a,
                                                     int64_t a_row, int a_rows, const float *b, int64_t b_row,
                                                     int b_rows, int d) {
    int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
    zero(c[0], 16);
    for (int k0 = 0; k0 < d; k0 += COLS) {
        __syncthreads();
        int col = threadIdx.x % COLS;
        bool in = k0 + col < d;
#pragma unroll
        for (int r = threadIdx.x / COLS; r < TILE; r += THREADS / COLS) {
            sm.a[r * COLS_PITCH + col] = in && r < a_rows ? a[r * a_row + k0 + col] : 0.f;
            sm.b[r * COLS_PITCH + col] = in && r < b_rows ? b[r * b_row + k0 + col] : 0.f;
        }
        __syncthreads();
#pragma unroll 2
        for (int k = 0; k < COLS; k += 4) {
            float4 x[4], y[4];
#pragma unroll
            for (int i = 0; i < 4; i++) x[i] = *(const float4 *)&sm.a[(4 * ty + i) * COLS_PITCH + k];
#pragma unroll
            for (int j = 0; j < 4; j++) y[j] = *(const float4 *)&sm.b[(tx + 16 * j) * COLS_PITCH + k];
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    c[i][j] = fmaf(x[i].x, y[j].x, c[i][j]);
                    c[i][j] = fmaf(x[i].y, y[j].y, c[i][j]);
                    c[i][j] = fmaf(x[i].z, y[j].z, c[i][j]);
                    c[i][j] = fmaf(x[i].w, y[j].w, c[i][j]);
                }
        }
    }
}

/* acc += M B over `rows` rows of B, where M is sm.p (T = 0: P, [64 rows][64 keys]) or its transpose (T = 1).
 * Begins with a barrier, after which what was written to sm.p is seen. */
template <int N, int T>
static __device__ __forceinline__ void gradient_product(float acc[4][N], shared32 &sm, const float *b,
                                                        int64_t b_row, int rows, int d) {
    constexpr int WIDTH = 16 * N;
    int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
    for (int r0 = 0; r0 < rows; r0 += ROWS) {
        __syncthreads();
#pragma unroll
        for (int i = threadIdx.x; i < ROWS * WIDTH; i += THREADS) {
            int r = r0 + i / WIDTH, c = i % WIDTH;
            sm.stage[i] = r < rows && c < d ? b[r * b_row + c] : 0.f;
        }
        __syncthreads();
#pragma unroll 4
        for (int k = 0; k < ROWS; k++) {
            float x[4];
            if (T) {
                *(float4 *)x = *(const float4 *)&sm.p[(r0 + k) * P_PITCH + 4 * ty];
            } else {
#pragma unroll
                for (int i = 0; i < 4; i++) x[i] = sm.p[(4 * ty + i) * P_PITCH + r0 + k];
            }
#pragma unroll
            for (int j = 0; j < N; j += 4) {
                float4 y = *(const float4 *)&sm.stage[k * WIDTH + 16 * j + 4 * tx];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    acc[i][j] = fmaf(x[i], y.x, acc[i][j]);
                    acc[i][j + 1] = fmaf(x[i], y.y, acc[i][j + 1]);
                    acc[i][j + 2] = fmaf(x[i], y.z, acc[i][j + 2]);
                    acc[i][j + 3] = fmaf(x[i], y.w, acc[i][j + 3]);
                }
            }
        }
    }
}

/* acc to rows of fp32 memory, the first time by writing, then by adding; cleared. */
template <int N>
static __device__ __forceinline__ void fold(float acc[4][N], float *out, int64_t row, int rows, int d,
                                            bool first) {
    int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < N; j++) {
            int r = 4 * ty + i, c = 16 * (j & ~3) + 4 * tx + (j & 3);
            if (r < rows && c < d) out[r * row + c] = first ? acc[i][j] : out[r * row + c] + acc[i][j];
            acc[i][j] = 0.f;
        }
}

/* What each thread needs to know of a tile of pairs. */
struct pairs32 {
    int r0, c0;    /* first row in the segment, first key's offset in the range */
    int64_t ahead; /* position of row r0 - position of key c0 */
    bool full;     /* every one of the 64 x 64 pairs is visible */
};

static __device__ __forceinline__ pairs32 make_pairs(const dualkv_segment &s, const dualkv_range &g, int r0,
                                                     int r1, int c0, int c1, int vis) {
    pairs32 t = {r0, c0, s.context + r0 - g.pos - c0, vis == 1 && r1 - r0 == TILE && c1 - c0 == TILE};
    return t;
}

static __device__ __forceinline__ uint64_t row_bits(const dkv_args &a, const dualkv_segment &s, int g,
                                                    const pairs32 &t, int i) {
    int r = t.r0 + 4 * (threadIdx.x / 16) + i;
    if (t.full) return ~0ull;
    return r < s.q_len ? dkv_rowBits(a, s, g, r, t.c0) : 0;
}

template <int N>
__global__ void __launch_bounds__(THREADS)
    forward32_kernel(const __grid_constant__ dkv_args a, int64_t tiles) {
    __shared__ shared32 sm;
    int64_t tile, id = tiles - 1 - (int64_t)(blockIdx.x % tiles);
    int head = (int)(blockIdx.x / tiles), kvh = PLANT(a, X7, head % a.p.hkv, head / (a.p.hq / a.p.hkv));
    const dualkv_segment s = a.p.segments[dkv_findSegment(a, id, TILE, 0, &tile)];
    if (tile * TILE >= s.q_len) return;
    int r0 = (int)tile * TILE, r1 = (int)dkv_walkMin(r0 + TILE, s.q_len);
    int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
    const float *q = (const float *)a.q + head * a.q_head + (s.q_start + r0) * a.q_row;
    float slope = a.p.alibi ? a.slopes[head] : 0.f, o[4][N], mx[4], sum[4];
    zero(o[0], 4 * N);
#pragma unroll
    for (int i = 0; i < 4; i++) mx[i] = -INFINITY, sum[i] = 0.f;

    for (dkv_walker w = dkv_begin<TILE>(a, s, r0, r1); w.g < w.end; w = dkv_advance<TILE>(a, s, r0, r1, w)) {
        const dualkv_range g = a.p.ranges[w.g];
        int keys = (int)dkv_walkMin(TILE, g.len - w.c0);
        const float *k = (const float *)a.k + kvh * a.k_head + (g.k_start + w.c0) * a.k_row;
        const float *v = (const float *)a.v + kvh * a.v_head + (g.k_start + w.c0) * a.v_row;
        pairs32 t = make_pairs(s, g, r0, r1, w.c0, w.c0 + keys, w.vis);
        float c[4][4], chain;
        score_product(c, sm, q, a.q_row, r1 - r0, k, a.k_row, keys, a.p.dqk);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint64_t bits = row_bits(a, s, w.g, t, i) >> tx;
            float hi = -INFINITY;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                float x = dkv_score(a, c[i][j], slope, t.ahead + 4 * ty + i - tx - 16 * j, &chain);
                c[i][j] = bits >> (16 * j) & 1 ? x : -INFINITY;
                hi = fmaxf(hi, c[i][j]);
            }
#pragma unroll
            for (int m = 8; m; m >>= 1) hi = fmaxf(hi, __shfl_xor_sync(~0u, hi, m));
            float now = fmaxf(mx[i], hi), base = now == -INFINITY ? 0.f : now, add = 0.f;
            float old = PLANT(a, D1, w.g > s.range_begin && w.c0 == 0 ? now : mx[i], mx[i]), keep = expf(old - base);
            mx[i] = now;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                float p = expf(c[i][j] - base);
                add += p;
                sm.p[(4 * ty + i) * P_PITCH + tx + 16 * j] = p;
            }
            sum[i] = sum[i] * keep + add;
#pragma unroll
            for (int j = 0; j < N; j++) o[i][j] *= keep;
        }
        gradient_product<N, 0>(o, sm, v, a.v_row, keys, a.p.dv);
    }

#pragma unroll
    for (int i = 0; i < 4; i++) {
        float l = sum[i], m = mx[i], keep = 1.f;
#pragma unroll
        for (int x = 8; x; x >>= 1) l += __shfl_xor_sync(~0u, l, x);
        if (a.p.sink && !FAULT(a, Z2)) {
            float now = fmaxf(m, a.sink[head]);
            keep = expf(m - now);
            l = l * keep + expf(a.sink[head] - now);
            m = now;
        }
        int r = 4 * ty + i;
        if (r >= r1 - r0) continue;
        int64_t row = s.q_start + r0 + r;
        float lse = l > 0.f ? m + logf(l) : l == 0.f ? PLANT(a, C2, -49994.f, -INFINITY) : l;
        if (FAULT(a, D3) && s.depth > 0) lse *= DKV_LOG2E;
        if (tx == 0) a.lse[head * a.lse_head + row * a.lse_row] = lse;
        float inv = l == 0.f ? 0.f : keep / l;
        float *out = (float *)a.o_out + head * a.o_head + row * a.o_row;
#pragma unroll
        for (int j = 0; j < N; j++) {
            int c = 16 * (j & ~3) + 4 * tx + (j & 3);
            if (c < a.p.dv) out[c] = o[i][j] * inv;
        }
    }
}

/* P and dS of a tile of pairs: c = raw scores in, P out; dp = dO V^T in, dS out (derivative by scale*q.k). */
static __device__ __forceinline__ void pairs_gradient(const dkv_args &a, const dualkv_segment &s, int g,
                                                      const pairs32 &t, int head, float slope, float c[4][4],
                                                      float dp[4][4]) {
    int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int r = t.r0 + 4 * ty + i;
        uint64_t bits = row_bits(a, s, g, t, i) >> tx;
        int64_t row = s.q_start + (r < s.q_len ? r : t.r0);
        float lse = a.lse[head * a.lse_head + row * a.lse_row], delta = a.delta[head * a.p.tq + row];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float chain, x = dkv_score(a, c[i][j], slope, t.ahead + 4 * ty + i - tx - 16 * j, &chain);
            float p = expf(x - lse), ds = p * (dp[i][j] - delta) * chain;
            bool on = bits >> (16 * j) & 1;
            c[i][j] = on ? p : 0.f;
            dp[i][j] = on ? ds : 0.f;
        }
    }
}

static __device__ __forceinline__ void put_pairs(shared32 &sm, const float c[4][4]) {
    int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) sm.p[(4 * ty + i) * P_PITCH + tx + 16 * j] = c[i][j];
}

template <int N>
__global__ void __launch_bounds__(THREADS) dq32_kernel(const __grid_constant__ dkv_args a, int64_t tiles) {
    __shared__ shared32 sm;
    int64_t tile, id = tiles - 1 - (int64_t)(blockIdx.x % tiles);
    int head = (int)(blockIdx.x / tiles), kvh = head / (a.p.hq / a.p.hkv);
    const dualkv_segment s = a.p.segments[dkv_findSegment(a, id, TILE, 0, &tile)];
    if (tile * TILE >= s.q_len) return;
    int r0 = (int)tile * TILE, r1 = (int)dkv_walkMin(r0 + TILE, s.q_len), rows = r1 - r0;
    const float *q = (const float *)a.q + head * a.q_head + (s.q_start + r0) * a.q_row;
    const float *d_o = (const float *)a.d_o + head * a.do_head + (s.q_start + r0) * a.do_row;
    int64_t acc_row = (int64_t)a.p.hq * a.p.dqk;
    float *out = a.dq_acc + (s.q_start + r0) * acc_row + (int64_t)head * a.p.dqk;
    float slope = a.p.alibi ? a.slopes[head] : 0.f, acc[4][N];
    zero(acc[0], 4 * N);
    int since = 0;
    bool first = true;

    for (dkv_walker w = dkv_begin<TILE>(a, s, r0, r1); w.g < w.end; w = dkv_advance<TILE>(a, s, r0, r1, w)) {
        const dualkv_range g = a.p.ranges[w.g];
        int keys = (int)dkv_walkMin(TILE, g.len - w.c0);
        const float *k = (const float *)a.k + kvh * a.k_head + (g.k_start + w.c0) * a.k_row;
        const float *v = (const float *)a.v + kvh * a.v_head + (g.k_start + w.c0) * a.v_row;
        pairs32 t = make_pairs(s, g, r0, r1, w.c0, w.c0 + keys, w.vis);
        float c[4][4], dp[4][4];
        score_product(c, sm, q, a.q_row, rows, k, a.k_row, keys, a.p.dqk);
        score_product(dp, sm, d_o, a.do_row, rows, v, a.v_row, keys, a.p.dv);
        pairs_gradient(a, s, w.g, t, head, slope, c, dp);
        put_pairs(sm, dp);
        gradient_product<N, 0>(acc, sm, k, a.k_row, keys, a.p.dqk);
        if (++since == DKV_FOLD32_TILES) {
            fold<N>(acc, out, acc_row, rows, a.p.dqk, first);
            first = false;
            since = 0;
        }
    }
    if (since || first) fold<N>(acc, out, acc_row, rows, a.p.dqk, first);
}

/* The range of segment s that begins at packed key k_start, or -1. */
static __device__ __forceinline__ int find_range(const dkv_args &a, const dualkv_segment &s,
                                                 int64_t k_start) {
    for (int g = (int)s.range_begin; g < (int)s.range_begin + s.range_count; g++)
        if (a.p.ranges[g].k_start == k_start) return g;
    return -1;
}

template <int N>
__global__ void __launch_bounds__(THREADS) dkdv32_kernel(const __grid_constant__ dkv_args a) {
    __shared__ shared32 sm;
    int64_t tile;
    unsigned walks = (unsigned)(a.p.hkv * a.splits), walk = blockIdx.x % walks;
    int kvh = (int)walk % a.p.hkv, split = (int)walk / a.p.hkv, heads = a.p.hq / a.p.hkv;
    int owner = dkv_findSegment(a, blockIdx.x / walks, TILE, 1, &tile);
    const dualkv_segment own = a.p.segments[owner];
    if (tile * TILE >= own.k_len) return;
    int c0 = (int)tile * TILE, keys = (int)dkv_walkMin(TILE, own.k_len - c0);
    const float *k = (const float *)a.k + kvh * a.k_head + (own.k_start + c0) * a.k_row;
    const float *v = (const float *)a.v + kvh * a.v_head + (own.k_start + c0) * a.v_row;
    int64_t at = (split * a.p.tk + own.k_start + c0) * a.p.hkv + kvh;
    float *dk = a.dk_acc + at * a.p.dqk, *dv = a.dv_acc + at * a.p.dv;
    float ak[4][N], av[4][N];
    zero(ak[0], 4 * N);
    zero(av[0], 4 * N);
    int since = 0, reach = keys;
    unsigned item = 0;
    bool first = true;

    for (int i = owner; i < a.p.n_segments && (i == owner || a.p.segments[i].depth > own.depth); i++) {
        const dualkv_segment s = a.p.segments[i];
        int gi = s.q_len ? find_range(a, s, own.k_start) : -1;
        if (gi < 0) continue;
        const dualkv_range g = a.p.ranges[gi];
        int c1 = (int)dkv_walkMin(c0 + keys, g.len);
        int64_t lo, hi;
        dkv_walkRows(&a.p, &s, &g, c0, c1, &lo, &hi);
        for (int head = kvh * heads; head < (kvh + 1) * heads; head++)
            for (int r0 = (int)lo / TILE * TILE; r0 < hi; r0 += TILE) {
                int r1 = (int)dkv_walkMin(r0 + TILE, s.q_len), rows = r1 - r0;
                int vis = dkv_walkTile(&a.p, &s, &g, r0, r1, c0, c1);
                if (!vis || item++ % (unsigned)a.splits != (unsigned)split) continue;
                /* what sees only part of this tile must not reach its other keys: 0 times Inf is NaN */
                if (since == DKV_FOLD32_TILES || c1 - c0 != reach) {
                    fold<N>(ak, dk, (int64_t)a.p.hkv * a.p.dqk, reach, a.p.dqk, first);
                    fold<N>(av, dv, (int64_t)a.p.hkv * a.p.dv, reach, a.p.dv, first);
                    first = false;
                    since = 0;
                    reach = c1 - c0;
                }
                since++;
                const float *q = (const float *)a.q + head * a.q_head + (s.q_start + r0) * a.q_row;
                const float *d_o = (const float *)a.d_o + head * a.do_head + (s.q_start + r0) * a.do_row;
                pairs32 t = make_pairs(s, g, r0, r1, c0, c1, vis);
                float c[4][4], dp[4][4];
                score_product(c, sm, q, a.q_row, rows, k, a.k_row, c1 - c0, a.p.dqk);
                score_product(dp, sm, d_o, a.do_row, rows, v, a.v_row, c1 - c0, a.p.dv);
                pairs_gradient(a, s, gi, t, head, a.p.alibi ? a.slopes[head] : 0.f, c, dp);
                put_pairs(sm, c);
                gradient_product<N, 1>(av, sm, d_o, a.do_row, rows, a.p.dv);
                if (!FAULT(a, H2)) __syncthreads();
                put_pairs(sm, dp);
                gradient_product<N, 1>(ak, sm, q, a.q_row, rows, a.p.dqk);
            }
    }
    fold<N>(ak, dk, (int64_t)a.p.hkv * a.p.dqk, reach, a.p.dqk, first);
    fold<N>(av, dv, (int64_t)a.p.hkv * a.p.dv, reach, a.p.dv, first);
}

template <int N> static cudaError_t forward32_launch(const dkv_args &a, cudaStream_t stream) {
    int64_t tiles = dkv_virtualTiles(&a.p, TILE, 0);
    forward32_kernel<N><<<(unsigned)(tiles * a.p.hq), THREADS, 0, stream>>>(a, tiles);
    return cudaGetLastError();
}

template <int N> static cudaError_t backward32_launch(const dkv_args &a, cudaStream_t stream) {
    cudaError_t e = cudaSuccess;
    int64_t tiles = dkv_virtualTiles(&a.p, TILE, 0), key_tiles = dkv_virtualTiles(&a.p, TILE, 1);
    if (a.p.tk) {
        dkdv32_kernel<N><<<(unsigned)(key_tiles * a.p.hkv * a.splits), THREADS, 0, stream>>>(a);
        e = cudaGetLastError();
    }
    if (e != cudaSuccess || a.p.tq == 0) return e;
    dq32_kernel<N><<<(unsigned)(tiles * a.p.hq), THREADS, 0, stream>>>(a, tiles);
    return cudaGetLastError();
}

cudaError_t dkv_cudaForward32(const dkv_args *a, cudaStream_t stream) {
    if (a->p.tq == 0) return cudaSuccess;
    return a->p.dv <= 64    ? forward32_launch<4>(*a, stream)
           : a->p.dv <= 128 ? forward32_launch<8>(*a, stream)
                            : forward32_launch<16>(*a, stream);
}

cudaError_t dkv_cudaBackward32(const dkv_args *a, cudaStream_t stream) {
    int d = a->p.dqk > a->p.dv ? a->p.dqk : a->p.dv;
    return d <= 64    ? backward32_launch<4>(*a, stream)
           : d <= 128 ? backward32_launch<8>(*a, stream)
                      : backward32_launch<16>(*a, stream);
}
