/* mma.cuh: the few PTX instructions that the portable kernels are made of (sm_80 and newer), and swizzled shared-memory
 * tiles. A tile [rows][PITCH] of 16-bit elements, PITCH a multiple of 64; the 16-byte chunk c of row r is stored at
 * chunk c ^ (r & 7), so that ldmatrix of 8 rows meets 8 different banks.
 *
 * Fragments of mma.m16n8k16 (lane = 4 g + t): A a0 (row g, k 2t..) a1 (g+8) a2 (g, k+8) a3 (g+8, k+8);
 * B b0 (k 2t.., col g) b1 (k+8); C c0 c1 (row g, cols 2t, 2t+1) c2 c3 (row g+8). */
#ifndef DKV_MMA_CUH
#define DKV_MMA_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include "../ref/dualkv_kernel.h"

static __device__ __forceinline__ uint32_t smem_addr(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }

template <int PITCH> static __device__ __forceinline__ int swz(int row, int col) {
    return row * PITCH + ((((col >> 3) ^ (row & 7)) << 3) | (col & 7));
}

static __device__ __forceinline__ void cp_async16(void *dst, const void *src, bool valid) {
    int n = valid ? 16 : 0; /* 0: the destination is filled with zeros, nothing is read */
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem_addr(dst)), "l"(src), "r"(n));
}
static __device__ __forceinline__ void cp_async4(void *dst, const void *src, bool valid) {
    int n = valid ? 4 : 0;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(smem_addr(dst)), "l"(src), "r"(n));
}
static __device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;"); }
template <int N> static __device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N));
}

/* 2^x; results below 2^-126 are zero. At most 2 ulp off (PTX, ex2.approx.ftz.f32). */
static __device__ __forceinline__ float exp2_flushed(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

static __device__ __forceinline__ void ldsm(uint32_t r[4], uint32_t p) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(p));
}
static __device__ __forceinline__ void ldsm_t(uint32_t r[4], uint32_t p) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(p));
}

template <typename T> struct half_ops;
template <> struct half_ops<__nv_bfloat16> {
    static __device__ __forceinline__ void mma(float c[4], const uint32_t a[4], uint32_t b0, uint32_t b1) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                     "{%0,%1,%2,%3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
    static __device__ __forceinline__ void mma_first(float c[4], const uint32_t a[4], uint32_t b0, uint32_t b1) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
            "{%10,%10,%10,%10};"
            : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.f));
    }
    static __device__ __forceinline__ uint32_t pack(float lo, float hi) {
        __nv_bfloat162 v = __floats2bfloat162_rn(lo, hi);
        return *(uint32_t *)&v;
    }
    static __device__ __forceinline__ float2 unpack(uint32_t v) { return __bfloat1622float2(*(__nv_bfloat162 *)&v); }
    static __device__ __forceinline__ __nv_bfloat16 from(float x) { return __float2bfloat16_rn(x); }
    static __device__ __forceinline__ float to(__nv_bfloat16 x) { return __bfloat162float(x); }
};
template <> struct half_ops<__half> {
    static __device__ __forceinline__ void mma(float c[4], const uint32_t a[4], uint32_t b0, uint32_t b1) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                     "{%0,%1,%2,%3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
    static __device__ __forceinline__ void mma_first(float c[4], const uint32_t a[4], uint32_t b0, uint32_t b1) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
            "{%10,%10,%10,%10};"
            : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.f));
    }
    static __device__ __forceinline__ uint32_t pack(float lo, float hi) {
        __half2 v = __floats2half2_rn(lo, hi);
        return *(uint32_t *)&v;
    }
    static __device__ __forceinline__ float2 unpack(uint32_t v) { return __half22float2(*(__half2 *)&v); }
    static __device__ __forceinline__ __half from(float x) { return __float2half_rn(x); }
    static __device__ __forceinline__ float to(__half x) { return __half2float(x); }
};

/* Byte address of element (row, col) of a swizzled tile, where row & 7 is `r7`. Moving by columns inside a group of 64
 * is an XOR, moving by rows in steps of 8 an addition, so a warp keeps one register an operand. */
template <int PITCH> static __device__ __forceinline__ uint32_t tile_base(const void *tile, int row, int col) {
    return smem_addr(tile) + row * PITCH * 2 + col / 64 * 128 + ((((col >> 3) & 7) ^ (row & 7)) << 4);
}
static __device__ __forceinline__ uint32_t tile_step(uint32_t base, int cols) {
    return (base ^ (cols % 64 * 2)) + cols / 64 * 128;
}

/* Fragments of two n8 columns of B for one k16 step: columns n0 + c (c a multiple of 16, below SPAN) of a tile stored
 * [n][k] (BT = 0) or [k][n] (BT = 1). base: tile_base of the lane's row and column for k = 0, c = 0. */
template <int PITCH, int BT> static __device__ __forceinline__ void load_b(uint32_t f[4], uint32_t base, int k, int c) {
    if (BT)
        ldsm_t(f, tile_step(base, c) + k * PITCH * 2);
    else
        ldsm(f, tile_step(base, k) + c * PITCH * 2);
}
template <int PITCH, int BT> static __device__ __forceinline__ uint32_t base_b(const void *b, int n0) {
    int l = threadIdx.x & 31;
    return BT ? tile_base<PITCH>(b, l & 15, n0 + (l >> 4) * 8)
              : tile_base<PITCH>(b, n0 + (l & 7) + ((l >> 4) << 3), ((l >> 3) & 1) * 8);
}

template <int PITCH, int AT> static __device__ __forceinline__ uint32_t base_a(const void *a, int m0) {
    int l = threadIdx.x & 31;
    return AT ? tile_base<PITCH>(a, (l & 7) + ((l >> 4) << 3), m0 + ((l >> 3) & 1) * 8)
              : tile_base<PITCH>(a, m0 + (l & 15), (l >> 4) * 8);
}

/* Fragments of A for one k16 step, stored [m][k] (AT = 0) or [k][m] (AT = 1). base: of the lane's element for k = 0. */
template <int MT, int AT, int PITCH>
static __device__ __forceinline__ void load_a(uint32_t f[MT][4], uint32_t base, int k) {
#pragma unroll
    for (int i = 0; i < MT; i++) {
        if (AT)
            ldsm_t(f[i], (base ^ (32 * i)) + k * PITCH * 2);
        else
            ldsm(f[i], tile_step(base, k) + 16 * i * PITCH * 2);
    }
}

/* acc[MT][NT] (16 x 8 each) += A B over K; A, B in swizzled tiles. m0, n0: this warp's first row and column, multiples of
 * 16 MT and 8 NT; where the tile's columns are stepped over, that span must not straddle a group of 64 unaligned.
 *   AT = 0: A stored [m][k], 1: stored [k][m].   BT = 0: B stored [n][k], 1: stored [k][n].
 * tile_mma_at: the same from base_a and base_b. FIRST: acc = A B, whatever acc held. Between two steps of 2 MT products
 * `between(t, STEPS)` may issue other work, t = 0 .. STEPS - 1. */
struct no_work {
    __device__ __forceinline__ void operator()(int, int) const {}
};

template <typename T, int MT, int NT, int K, int AT, int BT, int PA, int PB, bool FIRST = false, typename F = no_work>
static __device__ __forceinline__ void tile_mma_at(float acc[MT][NT][4], uint32_t ba, uint32_t bb, F between = F()) {
    static_assert(NT % 2 == 0, "columns come in pairs of 8");
    static_assert(!BT || NT == 4 || NT % 8 == 0, "a span of columns is 32 or whole groups of 64");
    static_assert(!AT || MT <= 2, "a span of rows is 16 or 32");
    /* Fragments are loaded one step ahead (B by pairs of columns, A by k16 steps): two warps a scheduler do not
     * hide ldmatrix behind each other. */
    constexpr int PAIRS = NT / 2, STEPS = K / 16 * PAIRS;
    uint32_t fa[2][MT][4], fb[2][4];
    load_a<MT, AT, PA>(fa[0], ba, 0);
    load_b<PB, BT>(fb[0], bb, 0, 0);
#pragma unroll
    for (int t = 0; t < STEPS; t++) {
        int k = t / PAIRS, j = t % PAIRS * 2;
        if (j == 0 && k + 1 < K / 16) load_a<MT, AT, PA>(fa[(k + 1) & 1], ba, 16 * (k + 1));
        if (t + 1 < STEPS) load_b<PB, BT>(fb[(t + 1) & 1], bb, (t + 1) / PAIRS * 16, (t + 1) % PAIRS * 16);
#pragma unroll
        for (int i = 0; i < MT; i++) {
            if (FIRST && k == 0) {
                half_ops<T>::mma_first(acc[i][j], fa[0][i], fb[t & 1][0], fb[t & 1][1]);
                half_ops<T>::mma_first(acc[i][j + 1], fa[0][i], fb[t & 1][2], fb[t & 1][3]);
            } else {
                half_ops<T>::mma(acc[i][j], fa[k & 1][i], fb[t & 1][0], fb[t & 1][1]);
                half_ops<T>::mma(acc[i][j + 1], fa[k & 1][i], fb[t & 1][2], fb[t & 1][3]);
            }
        }
        between(t, STEPS);
    }
}

template <typename T, int MT, int NT, int K, int AT, int BT, int PA, int PB>
static __device__ __forceinline__ void tile_mma(float acc[MT][NT][4], const T *a, int m0, const T *b, int n0) {
    tile_mma_at<T, MT, NT, K, AT, BT, PA, PB>(acc, base_a<PA, AT>(a, m0), base_b<PB, BT>(b, n0));
}

/* The same with A in registers, fa[K/16][MT][4], and B stored [k][n]. */
template <typename T, int MT, int NT, int K, int PB>
static __device__ __forceinline__ void tile_mma_reg(float acc[MT][NT][4], uint32_t fa[K / 16][MT][4], const T *b) {
    constexpr int PAIRS = NT / 2, STEPS = K / 16 * PAIRS;
    uint32_t bb = base_b<PB, 1>(b, 0), fb[2][4];
    load_b<PB, 1>(fb[0], bb, 0, 0);
#pragma unroll
    for (int t = 0; t < STEPS; t++) {
        int k = t / PAIRS, j = t % PAIRS * 2;
        if (t + 1 < STEPS) load_b<PB, 1>(fb[(t + 1) & 1], bb, (t + 1) / PAIRS * 16, (t + 1) % PAIRS * 16);
#pragma unroll
        for (int i = 0; i < MT; i++) {
            half_ops<T>::mma(acc[i][j], fa[k][i], fb[t & 1][0], fb[t & 1][1]);
            half_ops<T>::mma(acc[i][j + 1], fa[k][i], fb[t & 1][2], fb[t & 1][3]);
        }
    }
}

/* Loads rows [row0, row0 + ROWS) of a [.., D] head slice (row stride `stride` elements) into a swizzled tile; rows at or
 * past `limit` and columns at or past `d` become zeros and are never read. vec: 16-byte loads are allowed
 * (pointers, strides and d multiples of 8 elements). */
template <typename T, int ROWS, int D, int THREADS>
static __device__ __noinline__ void load_tile_slow(T *tile, const T *src, int64_t stride, int rows, int d) {
    for (int i = threadIdx.x; i < ROWS * D; i += THREADS) {
        int r = i / D, c = i % D;
        tile[swz<D>(r, c)] = r < rows && c < d ? src[r * stride + c] : half_ops<T>::from(0.f);
    }
}

template <typename T, int ROWS, int D, int THREADS>
static __device__ __forceinline__ void load_tile_fast(T *tile, const T *src, int64_t stride, int rows, int d) {
    constexpr int WIDTH = D % 128 == 0 ? 16 : 8; /* chunks a pass: a thread keeps its column, steps by whole rows */
    constexpr int STEP = THREADS / WIDTH;
    static_assert(STEP % 8 == 0 && ROWS % STEP == 0 && (D / 8) % WIDTH == 0, "passes cover whole tiles");
    int r = threadIdx.x / WIDTH, c = threadIdx.x % WIDTH * 8;
#pragma unroll
    for (int c0 = 0; c0 < D; c0 += WIDTH * 8) {
        const T *p = src + r * stride + c + c0;
        T *dst = tile + swz<D>(r, c + c0);
        int left = c + c0 < d ? rows - r : 0;
#pragma unroll
        for (int r0 = 0; r0 < ROWS; r0 += STEP) {
            cp_async16(dst + r0 * D, p, r0 < left); /* nothing is read where false: p may lie past the tensor */
            p += STEP * stride;
        }
    }
}

template <typename T, int ROWS, int D, int THREADS>
static __device__ __forceinline__ void load_tile(T *tile, const T *src, int64_t stride, int64_t row0, int64_t limit,
                                                 int d, bool vec) {
    int rows = (int)(limit - row0 < ROWS ? limit - row0 : ROWS);
    src += row0 * stride;
    if (vec)
        load_tile_fast<T, ROWS, D, THREADS>(tile, src, stride, rows, d);
    else
        load_tile_slow<T, ROWS, D, THREADS>(tile, src, stride, rows, d);
}

/* The tile of keys at offset c0 of a range; rows past the range's end become zeros. */
template <typename T, int ROWS, int D, int THREADS>
static __device__ __forceinline__ void load_keys(T *tile, const T *src, int64_t stride, const dualkv_range &r, int c0,
                                                 int d, bool vec) {
    load_tile<T, ROWS, D, THREADS>(tile, src, stride, r.k_start + c0, r.k_start + r.len, d, vec);
}
#endif
