/* walk.h: which key tiles a query tile walks, and which query rows a key tile needs. Plain C for host and device:
 * every kernel of ours (emu, cuda) takes its tile ranges from here, and the CPU enumerates them exhaustively against the
 * reference mask (ref/test_walk.c). Shares nothing with mask.c.
 *
 * A mask is stated in dkv_walkSees. That is enough where its rows see no later key: what else is here then takes it for
 * any part of the causal one, tiles are looked at pair by pair. Rules of its own in the others make it quicker.
 *
 * A row r of segment s has position s->context + r; the key at offset `off` of range g has position g->pos + off.
 * Every range starts at the first token of some segment, so key tiles counted from a range's start are the same
 * tiles for all descendants of that segment. */
#ifndef DKV_WALK_H
#define DKV_WALK_H

#include "dualkv_kernel.h"

#ifdef __CUDACC__
#define DKV_HD __host__ __device__ static inline
#else
#define DKV_HD static inline
#endif

DKV_HD int64_t dkv_walkMin(int64_t a, int64_t b) { return a < b ? a : b; }
DKV_HD int64_t dkv_walkMax(int64_t a, int64_t b) { return a > b ? a : b; }

/* Do the rows of s see all keys of their segment and its ancestors? */
DKV_HD int dkv_walkWhole(const dualkv_problem *p, const dualkv_segment *s) {
    return p->mask == DUALKV_FULL || (p->mask == DUALKV_PREFIX && s->depth == 0);
}

/* Does row r of segment s see the key at offset `off` of range g? */
DKV_HD int dkv_walkSees(const dualkv_problem *p, const dualkv_segment *s, const dualkv_range *g, int64_t r,
                        int64_t off) {
    int64_t i = s->context + r, j = g->pos + off;
    if (dkv_walkWhole(p, s)) return 1;
    switch (p->mask) {
    case DUALKV_WINDOW: return j <= i && (j > i - p->window || j < p->window_sinks);
    case DUALKV_CHUNK: return j <= i && j / p->chunk == i / p->chunk;
    case DUALKV_BLOCK:
        return j <= i && dualkv_block_kept(p->block_seed, i / p->block, j / p->block, p->block_density);
    default: return j <= i;
    }
}

/* Offsets [*lo, *hi) of range g outside which rows [r0, r1) of segment s see nothing; empty: *lo >= *hi. */
DKV_HD void dkv_walkSpan(const dualkv_problem *p, const dualkv_segment *s, const dualkv_range *g, int64_t r0,
                         int64_t r1, int64_t *lo, int64_t *hi) {
    int64_t first = s->context + r0, last = s->context + r1 - 1; /* positions of the rows */
    *lo = 0;
    *hi = g->len;
    if (r1 <= r0) {
        *hi = 0;
        return;
    }
    if (dkv_walkWhole(p, s)) return;
    *hi = dkv_walkMin(*hi, last + 1 - g->pos);
    if (p->mask == DUALKV_WINDOW && p->window_sinks <= g->pos)
        *lo = dkv_walkMax(0, first - p->window + 1 - g->pos);
    if (p->mask == DUALKV_CHUNK) *lo = dkv_walkMax(0, first / p->chunk * p->chunk - g->pos);
}

/* Rows [*lo, *hi) of segment s outside which no row sees a key at offsets [c0, c1) of range g. */
DKV_HD void dkv_walkRows(const dualkv_problem *p, const dualkv_segment *s, const dualkv_range *g, int64_t c0,
                         int64_t c1, int64_t *lo, int64_t *hi) {
    int64_t first = g->pos + c0, last = g->pos + c1 - 1; /* positions of the keys */
    *lo = 0;
    *hi = s->q_len;
    if (c1 <= c0) {
        *hi = 0;
        return;
    }
    if (dkv_walkWhole(p, s)) return;
    *lo = dkv_walkMax(0, first - s->context);
    if (p->mask == DUALKV_WINDOW && first >= p->window_sinks)
        *hi = dkv_walkMin(*hi, last + p->window - s->context);
    if (p->mask == DUALKV_CHUNK) *hi = dkv_walkMin(*hi, (last / p->chunk + 1) * p->chunk - s->context);
}

#define DKV_WALK_BLOCKS 64 /* block pairs looked at before a tile of a block mask is called mixed */

/* Rows [r0, r1) against offsets [c0, c1) of range g, both not empty: 0 no pair visible, 1 every pair visible, 2 look at
 * each element. May say 2 for 0 or 1, never the reverse. */
DKV_HD int dkv_walkTile(const dualkv_problem *p, const dualkv_segment *s, const dualkv_range *g, int64_t r0,
                        int64_t r1, int64_t c0, int64_t c1) {
    int64_t i0 = s->context + r0, i1 = s->context + r1 - 1, j0 = g->pos + c0, j1 = g->pos + c1 - 1;
    if (dkv_walkWhole(p, s)) return 1;
    if (j0 > i1) return 0;
    int causal = j1 <= i0; /* every pair is on or below the diagonal */
    if (p->mask == DUALKV_WINDOW) {
        if (j1 <= i0 - p->window && j0 >= p->window_sinks) return 0;
        return causal && (j0 > i1 - p->window || j1 < p->window_sinks) ? 1 : 2;
    }
    if (p->mask == DUALKV_CHUNK) {
        if (j1 / p->chunk < i0 / p->chunk) return 0;
        return causal && j0 / p->chunk == i1 / p->chunk ? 1 : 2;
    }
    if (p->mask == DUALKV_BLOCK) {
        int64_t q0 = i0 / p->block, q1 = i1 / p->block, k0 = j0 / p->block, k1 = j1 / p->block;
        int any = 0, all = 1;
        if (q1 - q0 >= DKV_WALK_BLOCKS || (q1 - q0 + 1) * (k1 - k0 + 1) > DKV_WALK_BLOCKS) return 2;
        for (int64_t q = q0; q <= q1; q++)
            for (int64_t k = k0; k <= k1; k++) {
                int kept = dualkv_block_kept(p->block_seed, q, k, p->block_density);
                any |= kept;
                all &= kept;
            }
        return !any ? 0 : causal && all ? 1 : 2;
    }
    return causal && (p->mask == DUALKV_CAUSAL || p->mask == DUALKV_PREFIX) ? 1 : 2;
}

/* Bits of the first n of 64, n clamped to 0..64. */
DKV_HD uint64_t dkv_walkOnes(int64_t n) { return n <= 0 ? 0 : n >= 64 ? ~0ull : (1ull << n) - 1; }

/* Row r of segment s against the 64 offsets from c0 of range g: bit b is set where the key at c0 + b is in the range
 * and visible. The element masks of a tile, a row at a time. */
DKV_HD uint64_t dkv_walkBits(const dualkv_problem *p, const dualkv_segment *s, const dualkv_range *g, int64_t r,
                             int64_t c0) {
    int64_t i = s->context + r, j0 = g->pos + c0, n = g->len - c0;
    if (dkv_walkWhole(p, s)) return dkv_walkOnes(n);
    n = dkv_walkMin(n, i - j0 + 1);
    uint64_t bits = dkv_walkOnes(n);
    switch (p->mask) {
    case DUALKV_CAUSAL:
    case DUALKV_PREFIX: break;
    case DUALKV_WINDOW: bits &= ~dkv_walkOnes(i - p->window + 1 - j0) | dkv_walkOnes(p->window_sinks - j0); break;
    case DUALKV_CHUNK: bits &= ~dkv_walkOnes(i / p->chunk * p->chunk - j0); break;
    case DUALKV_BLOCK: {
        int64_t end, last = dkv_walkMin(n, 64);
        for (int64_t off = 0; off < last; off = end) {
            int64_t kb = (j0 + off) / p->block;
            end = dkv_walkMin(last, (kb + 1) * p->block - j0);
            if (!dualkv_block_kept(p->block_seed, i / p->block, kb, p->block_density))
                bits &= ~(dkv_walkOnes(end) & ~dkv_walkOnes(off));
        }
        break;
    }
    default:
        for (int64_t b = 0; b < dkv_walkMin(n, 64); b++)
            if (!dkv_walkSees(p, s, g, r, c0 + b)) bits &= ~(1ull << b);
    }
    return bits;
}
#endif
