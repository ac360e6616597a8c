/* mask_pair.h: the table of masks, and what each means, straight from the definitions (design.md section 3), as inline
 * functions of plain values for host and device: mask.h asks these, and so does the oracle on a device. Kernels have their
 * own (walk.h) and share nothing with it. test_mask_pair.c holds each against a definition of its own. */
#ifndef DKV_MASK_PAIR_H
#define DKV_MASK_PAIR_H

#include <stddef.h>

#include "problem.h"

#ifdef __CUDACC__
#define DKV_MASK_HD __host__ __device__ static inline
#else
#define DKV_MASK_HD static inline
#endif

/* Which rows see their whole segment and all that it sees: the kind of mask that a context limit may not cut (mask.h). */
typedef enum dkv_mask_whole { DKV_WHOLE_NEVER, DKV_WHOLE_ROOT, DKV_WHOLE_ALWAYS } dkv_mask_whole;

/* What the other rows see of the keys up to their own position, and never of later ones: all of them; a run that ends at
 * their own; any of them. A parameter that may be left out lets gaps in where it is given. */
typedef enum dkv_mask_keys { DKV_KEYS_ALL, DKV_KEYS_RUN, DKV_KEYS_GAPS } dkv_mask_keys;

/* A parameter: the field of dkv_problem that holds it (a mask gives the six fields its own meaning), its least value, its
 * name in a certificate, what messages call it, and the words that the fuzzer chooses from (NULL: it draws a length, or a
 * seed). */
#define DKV_TAKES_COUNT(field, least, name, what, draws) {DKV_PARAMETER_COUNT, offsetof(dkv_problem, field), least, name, what, draws, NULL}
#define DKV_TAKES_SHARE(field, name, what, draws) {DKV_PARAMETER_SHARE, offsetof(dkv_problem, field), 0, name, what, draws, NULL}
#define DKV_TAKES_SEED(field) {DKV_PARAMETER_SEED, offsetof(dkv_problem, field), 0, NULL, NULL, NULL, NULL}
/* May be left out (0); with it, suites and the fuzzer count the mask as `variant`. The last one only. */
#define DKV_MAY_TAKE_COUNT(field, variant, name, what, draws) {DKV_PARAMETER_COUNT, offsetof(dkv_problem, field), 0, name, what, draws, variant}
#define DKV_TAKES_NOTHING {DKV_PARAMETER_NONE, 0, 0, NULL, NULL, NULL, NULL}

/* The masks, one row each: number, word, form of the parameters, whole rows, keys of the others, what it is, what it needs
 * (for a message), parameters that tests use, parameters. What a mask means is said in dkv_pairSees, below. */
#define DKV_MASKS(M)                                                                                                   \
    M(CAUSAL, "causal", "", DKV_WHOLE_NEVER, DKV_KEYS_ALL, "a row sees the keys up to its own position", "", "",       \
      DKV_TAKES_NOTHING)                                                                                               \
    M(FULL, "full", "", DKV_WHOLE_ALWAYS, DKV_KEYS_ALL, "a row sees all its ancestors and its whole segment", "", "",  \
      DKV_TAKES_NOTHING)                                                                                               \
    M(PREFIX, "prefix", "", DKV_WHOLE_ROOT, DKV_KEYS_ALL, "the root is bidirectional, the rest causal", "", "",        \
      DKV_TAKES_NOTHING)                                                                                               \
    M(WINDOW, "window", ":W[:S]", DKV_WHOLE_NEVER, DKV_KEYS_RUN, "causal: the last W keys and the first S",            \
      "its size", "1 3 4:2 2:1 100:3", DKV_TAKES_COUNT(window, 1, "window", "a window", NULL),                         \
      DKV_MAY_TAKE_COUNT(window_sinks, "window+first", "window-first", "sinks", NULL))                                 \
    M(CHUNK, "chunk", ":C", DKV_WHOLE_NEVER, DKV_KEYS_RUN, "causal within chunks of C positions", "its size", "1 3 4", \
      DKV_TAKES_COUNT(chunk, 1, "chunk", "a chunk", NULL))                                                             \
    M(BLOCK, "block", ":B:DENSITY:SEED", DKV_WHOLE_NEVER, DKV_KEYS_GAPS,                                               \
      "causal, and blocks of BxB kept with probability DENSITY", "size, density and seed",                             \
      "1:0.5:7 2:0.5:3 3:0.3:9 2:0:1 2:1:5", DKV_TAKES_COUNT(block, 1, "block", "a block", "1 3 4 8 16 16 32 64"),     \
      DKV_TAKES_SHARE(block_density, "density", "a density", "0 0.05 0.3 0.7 1"), DKV_TAKES_SEED(block_seed))          \
    M(BIDIR, "bidir", "", DKV_WHOLE_ALWAYS, DKV_KEYS_ALL,                                                              \
      "everything in the replicated sequence: inadmissible, always refused", "", "", DKV_TAKES_NOTHING)

typedef struct dkv_mask_view { /* of one node */
    int32_t mask;              /* dualkv_mask_kind */
    int32_t root;              /* the node has no parent */
    int64_t context, len;
    int64_t window, window_sinks, chunk, block;
    double density;
    uint64_t seed;
} dkv_mask_view;

static inline dkv_mask_view dkv_viewMask(const dkv_problem *p, int32_t node) {
    const dkv_node *n = &p->nodes[node];
    dkv_mask_view v;
    v.mask = p->mask;
    v.root = n->parent < 0;
    v.context = n->context;
    v.len = n->len;
    v.window = p->window;
    v.window_sinks = p->window_sinks;
    v.chunk = p->chunk;
    v.block = p->block;
    v.density = p->block_density;
    v.seed = p->block_seed;
    return v;
}

DKV_MASK_HD int dkv_pairWhole(const dkv_mask_view *v) {
    switch (v->mask) {
#define M(id, word, form, whole, ...) \
    case DUALKV_##id: return whole == DKV_WHOLE_ALWAYS || (whole == DKV_WHOLE_ROOT && v->root);
        DKV_MASKS(M)
#undef M
    }
    return 0;
}

DKV_MASK_HD int dkv_pairSeesAll(const dkv_mask_view *v) { /* all keys up to the row's position */
    switch (v->mask) {
#define M(id, word, form, whole, keys, ...) \
    case DUALKV_##id: return keys == DKV_KEYS_ALL;
        DKV_MASKS(M)
#undef M
    }
    return 0;
}

/* Does row r see key j? Both exist: 0 <= r < len, 0 <= j < context + len; the row's position is context + r, the key's j. */
DKV_MASK_HD int dkv_pairSees(const dkv_mask_view *v, int64_t r, int64_t j) {
    const int64_t i = v->context + r;
    if (dkv_pairWhole(v)) return 1;
    if (j > i) return 0;
    if (v->mask == DUALKV_WINDOW) return i - j < v->window || j < v->window_sinks;
    if (v->mask == DUALKV_CHUNK) return i / v->chunk == j / v->chunk;
    if (v->mask == DUALKV_BLOCK) return dualkv_block_kept(v->seed, i / v->block, j / v->block, v->density);
    return 1;
}

#define DKV_PAIR_BLOCKS 256 /* pairs of mask blocks examined before the answer is "mixed" */

DKV_MASK_HD int dkv_pairSparse(const dkv_mask_view *v, int64_t first, int64_t last, int64_t a, int64_t b,
                               int below) {
    const int64_t q0 = first / v->block, q1 = last / v->block, k0 = a / v->block, k1 = b / v->block;
    int64_t kept = 0, pairs = 0;
    if (q1 - q0 >= DKV_PAIR_BLOCKS || k1 - k0 >= DKV_PAIR_BLOCKS) return 2;
    pairs = (q1 - q0 + 1) * (k1 - k0 + 1);
    if (pairs > DKV_PAIR_BLOCKS) return 2;
    for (int64_t q = q0; q <= q1; q++)
        for (int64_t k = k0; k <= k1; k++) kept += dualkv_block_kept(v->seed, q, k, v->density);
    if (!kept) return 0;
    return kept == pairs && below ? 1 : 2;
}

/* dkv_maskBlock: rows [r0, r1), keys [j0, j1): 0 no pair visible, 1 all, 2 mixed or not looked at closely, as at a mask
 * without a rule here. */
DKV_MASK_HD int dkv_pairBlock(const dkv_mask_view *v, int64_t r0, int64_t r1, int64_t j0, int64_t j1) {
    const int64_t first = v->context + r0, last = v->context + r1 - 1, a = j0, b = j1 - 1;
    if (r0 >= r1 || j0 >= j1) return 0;
    if (dkv_pairWhole(v)) return 1;
    if (a > last) return 0;
    const int below = b <= first;
    if (v->mask == DUALKV_WINDOW) {
        const int64_t far = a > v->window_sinks ? a : v->window_sinks; /* farthest key that is no sink */
        if (a >= v->window_sinks && first - b >= v->window) return 0;
        return below && (b < far || last - far < v->window) ? 1 : 2;
    }
    if (v->mask == DUALKV_CHUNK) {
        if (b / v->chunk < first / v->chunk) return 0;
        return below && a / v->chunk == last / v->chunk ? 1 : 2;
    }
    if (v->mask == DUALKV_BLOCK) return dkv_pairSparse(v, first, last, a, b, below);
    return below && dkv_pairSeesAll(v) ? 1 : 2;
}

/* Leaves out keys that no row of [r0, r1) sees at both ends of [*j0, *j1), by bisection; a block that is not
 * mixed stays. */
DKV_MASK_HD int dkv_pairTrim(const dkv_mask_view *v, int64_t r0, int64_t r1, int64_t *j0, int64_t *j1) {
    int vis = dkv_pairBlock(v, r0, r1, *j0, *j1);
    if (vis != 2) {
        if (!vis) *j1 = *j0;
        return vis;
    }
    int64_t lo = *j0, hi = *j1, keep = *j1;
    while (lo < hi) { /* smallest end such that [end, j1) is empty; hi always is one */
        int64_t mid = lo + (hi - lo) / 2;
        if (!dkv_pairBlock(v, r0, r1, mid, keep)) hi = mid;
        else lo = mid + 1;
    }
    *j1 = hi;
    if (*j1 == *j0) return 0;
    lo = *j0;
    hi = *j1 - 1;
    while (lo < hi) { /* largest start such that [j0, start) is empty; lo always is one */
        int64_t mid = hi - (hi - lo) / 2;
        if (!dkv_pairBlock(v, r0, r1, *j0, mid)) lo = mid;
        else hi = mid - 1;
    }
    *j0 = lo;
    return 2;
}
#endif
