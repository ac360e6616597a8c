/* args.cuh: what every kernel launch carries, and how blocks find their work without any table built beforehand.
 *
 * Block number -> (segment, tile): segment s owns the virtual tiles from start(s)/B + s on, where start is its first packed
 * row. That is monotone in s and leaves every segment at least ceil(len/B) tiles, so a binary search over the
 * segments finds the owner; at most one or two tiles a segment are empty and return at once. */
#ifndef DKV_ARGS_CUH
#define DKV_ARGS_CUH

#include "../ref/fine.h"
#include "../ref/walk.h"
#include "fault.cuh"

typedef struct dkv_args {
    dualkv_problem p; /* scalars; arrays point to device memory */
    const void *q, *k, *v, *o, *d_o;
    void *o_out, *dq, *dk, *dv;
    float *lse;
    const float *d_lse, *sink, *slopes;
    float *dsink;
    int64_t q_row, q_head, k_row, k_head, v_row, v_head, o_row, o_head, do_row, do_head;
    int64_t dq_row, dq_head, dk_row, dk_head, dv_row, dv_head, lse_head, lse_row, dlse_head, dlse_row;
    float scale2, scale2_rest; /* scale log2 e, split by dkv_fineFactor */
    int vec; /* all pointers, strides and head dims allow 16-byte accesses */
    /* workspace of backward, fp32 */
    float *delta;         /* [hq, tq] */
    float *dq_acc;        /* fp32: [tq, hq, dqk]; 16-bit: [hq, q_pieces] pieces and 64 rows for the rubbish */
    float *dk_acc, *dv_acc; /* fp32: [splits, tk, hkv, dqk], [.., dv]; 16-bit: [splits, hkv, k_pieces] pieces */
    int splits;
    int acc_cols; /* 16-bit: columns of a piece, 64, 128 or 256 */
    int64_t q_pieces, k_pieces;
    DKV_FAULT_FIELD
} dkv_args;

/* 16-bit gradients are summed in pieces of DKV_PIECE rows x acc_cols columns, counted like virtual tiles, so that a
 * segment begins with a new piece. Inside, as the accumulators of mma.m16n8k16 lie in registers: for every 8 columns,
 * lane 0 .. 31, its 4 elements; a warp reads and adds 512 contiguous bytes. */
#define DKV_PIECE 16

static __device__ __forceinline__ int64_t dkv_virtualTile(const dkv_args &a, int s, int tile_rows, int keys) {
    return (keys ? a.p.segments[s].k_start : a.p.segments[s].q_start) / tile_rows + s;
}

/* The segment that owns virtual tile `id`; *tile: its number inside the segment. */
static __device__ __forceinline__ int dkv_findSegment(const dkv_args &a, int64_t id, int tile_rows, int keys,
                                                      int64_t *tile) {
    int lo = 0, hi = a.p.n_segments - 1;
    while (lo < hi) {
        int mid = (lo + hi + 1) >> 1;
        if (dkv_virtualTile(a, mid, tile_rows, keys) <= id)
            lo = mid;
        else
            hi = mid - 1;
    }
    *tile = id - dkv_virtualTile(a, lo, tile_rows, keys);
    return lo;
}

static inline int64_t dkv_virtualTiles(const dualkv_problem *p, int tile_rows, int keys) {
    return (keys ? p->tk : p->tq) / tile_rows + p->n_segments;
}

/* Natural score of a raw product: scale, softcap, ALiBi. *chain: its derivative by scale*q.k. */
static __device__ __forceinline__ float dkv_score(const dkv_args &a, float raw, float slope, int64_t distance,
                                                  float *chain) {
    float s = raw * a.p.scale;
    *chain = 1.f;
    if (a.p.softcap > 0.f) {
        float t = dkv_fineTanh(s / a.p.softcap);
        s = a.p.softcap * t;
        *chain = 1.f - t * t;
    }
    return a.p.alibi ? s - slope * (float)(distance < 0 ? -distance : distance) : s;
}

/* Up to which offset of range g every row from r0 on sees every key; -1 where only dkv_walkTile can say. */
static __device__ __forceinline__ int dkv_fullBelow(const dkv_args &a, const dualkv_segment &s, const dualkv_range &g,
                                                    int r0) {
    if (a.p.mask == DUALKV_FULL || (a.p.mask == DUALKV_PREFIX && s.depth == 0)) return (int)g.len;
    if (a.p.mask != DUALKV_CAUSAL && a.p.mask != DUALKV_PREFIX) return -1;
    return (int)dkv_walkMax(0, dkv_walkMin(g.len, s.context + r0 + 1 - g.pos));
}

/* Walks the key tiles of a query tile, in order of position. Offsets fit 32 bits: the plugin refuses longer ranges. */
typedef struct dkv_walker {
    int g, end; /* range index, one past the last */
    int c0, hi; /* offset of the tile in the range, end of the span */
    int full;   /* dkv_fullBelow of the range, so that most tiles need no look at memory */
    int vis;    /* 1 every pair visible, 2 look at each */
} dkv_walker;

template <int BN>
static __device__ __forceinline__ dkv_walker dkv_advance(const dkv_args &a, const dualkv_segment &s, int r0, int r1,
                                                         dkv_walker w) {
    w.c0 += BN;
    for (;;) {
        while (w.c0 >= w.hi) {
            if (++w.g >= w.end) return w;
            int64_t lo, hi;
            dkv_walkSpan(&a.p, &s, &a.p.ranges[w.g], r0, r1, &lo, &hi);
            w.full = dkv_fullBelow(a, s, a.p.ranges[w.g], r0);
            w.hi = (int)hi;
            w.c0 = (int)lo / BN * BN;
        }
        if (w.full >= 0) {
            w.vis = w.c0 + BN <= w.full ? 1 : 2;
            return w;
        }
        const dualkv_range *r = &a.p.ranges[w.g];
        w.vis = dkv_walkTile(&a.p, &s, r, r0, r1, w.c0, dkv_walkMin(w.c0 + BN, r->len));
        if (w.vis) {
            if (w.c0 + BN > r->len) w.vis = 2; /* the tile overruns its range */
            return w;
        }
        w.c0 += BN;
    }
}

template <int BN>
static __device__ __forceinline__ dkv_walker dkv_begin(const dkv_args &a, const dualkv_segment &s, int r0, int r1) {
    dkv_walker w = {(int)s.range_begin - 1, (int)s.range_begin + s.range_count, 0, 0, 0, 0};
    return dkv_advance<BN>(a, s, r0, r1, w);
}

static __device__ __noinline__ uint64_t dkv_rowBits(const dkv_args &a, const dualkv_segment &s, int g, int r, int c0) {
    return dkv_walkBits(&a.p, &s, &a.p.ranges[g], r, c0);
}
#endif
