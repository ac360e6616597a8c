/* oracle_twin.cuh: what the files of the device's twin share (oracle_twin*.cu). */
#ifndef DKV_ORACLE_TWIN_CUH
#define DKV_ORACLE_TWIN_CUH

#include <float.h>

#include "../ref/twin_formula.h"
#include "oracle_impl.cuh"

/* Factors measured on sampled chains, by bin of sq. */
typedef struct dkv_twin_fit {
    float var[DKV_CHAIN_BINS], gain[DKV_CHAIN_BINS];
} dkv_twin_fit;

/* Each row's largest score so far (ref/twin_impl.h: dkv_topKey), [max_m] each. */
typedef struct dkv_top_rows {
    double *s, *vs, *chain, *loss, *keep2, *equal, *equal_v;
    int64_t *key;
} dkv_top_rows;

/* Each row's maximum where it is not the largest score so far (ref/twin_impl.h: dkv_lateMax; ref/twin_max.c). */
typedef struct dkv_late_rows {
    double *vs, *doubt;   /* [max_m] */
    double *above, *rose; /* [subs, max_m]: weight of the largest score so far, less 1; whether it is a new one */
    double *table_vs;     /* [slots, max_m], as table_max */
    double slack;
    int32_t on, first, tiled; /* it is so; from the sink; the key tile is declared */
} dkv_late_rows;

/* The chain of each row's products over 256 keys, [subs, max_m] each. */
typedef struct dkv_step_rows {
    double *count, *squares, *g, *g2, *ff, *share, *g_first, *f_first;
} dkv_step_rows;

typedef struct dkv_twin_device {
    dkv_twin_units u;
    dkv_twin_fit fit_s, fit_dp;
    bool table, delta_exact, p_normalised, has_o;
    int32_t parts;      /* accumulators of dK and dV */
    bool lse_stands_in; /* as in ref/twin_impl.h */
    bool anyhow;        /* a loss is expected of gradients, whose terms' order is not declared */
    bool heads, segments, apart; /* each head's, each segment's sums are rounded; the accumulators are not the outputs' own arrays */
    int64_t subs, subm; /* most key tiles of 256 in a tile; most CPU blocks in a block */
    int64_t sub_m;      /* stacked rows of a CPU block */
    /* of the head: unit rows, squared norms, squares (keys': times equal_kv), magnitudes; what is not finite
     * is 0 */
    float *q1, *k1, *v1, *o1;
    double *q_norm, *k_norm, *v_norm, *o_norm;
    double *q_root, *k_root, *v_root, *o_root; /* roots of these */
    double *q2, *k2, *v2, *o2, *ve, *kf;               /* ve: V times equal_kv; kf: K */
    float *equal_k, *equal_kv;               /* [tk]: a segment's keys, with V or without */
    float *equal_any[2], *equal_own[2];      /* [tq, g]: a group's, a node's rows; [1]: whatever their dLSE, as dV has it */
    double *d_lse, *any_d_lse, *own_d_lse, *d_lse_sums; /* [tq, g]: dLSE, its mean over these rows, sums of it */
    double *delta_own;                                  /* [m]: what subtracting dLSE leaves of delta's variance */
    unsigned long long *row_class, *classes; /* [tq, g]: rows that err alike have the same; [3]: as in dkv_alike */
    int32_t *segment_k, *segment_q, *group_q;          /* [tk], [tq], [tq] */
    unsigned long long *hash, *sorted;                 /* [max(tk, tq * g)] */
    /* of the block: [m, d] */
    double *a1, *a2, *chain, *loss, *o_exact, *o_var;
    double *size, *spread, *square, *row_n, *row_n2; /* of dQ, as in dkv_rowSum */
    double *row_done;                       /* [max_m]: terms of the sum so far, where it is folded */
    double *q_mean2, *o_mean2, *mean_any[2], *mean_own[2]; /* [subm, d], [subm] */
    dkv_top_rows top;
    dkv_late_rows late;
    /* of the tile */
    double *k_mean2, *v_mean2, *mean_kv; /* [subm, subs, d], [subm, subs]: over the keys that a CPU block sees */
    double *by, *fade, *old, *count, *p1, *p2, *wsum; /* [subs, max_m] */
    dkv_step_rows step;
    double *col_n, *col_p2, *col_ds2;     /* [subm, ld] */
    double *part[4];                      /* [subs, m, d] or [subm, n, d] */
    double *table_max;                    /* [slots, max_m] */
    double *last_mean;                   /* [subm, d]: v_mean2 of the last key tile */
    /* of the head: sums over rows, [parts, tk, d]; the outputs themselves where not apart */
    double *dk, *dk_var, *dv, *dv_var;
    double *dk_size, *dk_spread, *dk_square, *dv_size, *dv_spread, *dv_square; /* as in dkv_keySum, [parts, tk, d] */
    double *key_n, *key_n2;                            /* [tk] */
    double *sink_y, *sink_v; /* [hq, tq] */
    void *memory[120];
    int n_memory;
} dkv_twin_device;

/* The usual case, for which kernels are compiled apart: P and dS are rounded, scores are neither rounded nor modified,
 * products lose in the mean. */
static inline bool dkv_twinPlain(const dkv_twin_units *u, const dkv_area *t) {
    return u->p_rounded && u->ds_rounded && !u->s_rounded && !(u->softcap > 0) && !t->slopes && u->ds_by == 1 &&
           u->ds_unit2 == 0 && u->z.gain > 0 && u->z.truncates;
}
static __device__ __forceinline__ dkv_twin_units dkv_plainUnits(const dkv_twin_units &units) {
    dkv_twin_units u = units;
    u.p_rounded = u.ds_rounded = u.z.truncates = 1;
    u.s_rounded = 0;
    u.softcap = u.ds_unit2 = 0;
    u.ds_by = 1;
    return u;
}

typedef struct score_view { /* of one tile: scores (final, -inf where masked), caps, chains of the products */
    const double *s, *cap;
    const float *sq, *dot;
    const double *q_norm, *k_norm; /* of the block's first row, of the tile's first key */
    const double *k_root;
} score_view;

/* The twin's score of a pair, and its variance. */
static __device__ __forceinline__ double scoreOf(const dkv_area &t, const dkv_twin_units &u,
                                                 const dkv_twin_fit &fit, const score_view &v, int i, int j,
                                                 double *vs) {
    const int64_t at = (int64_t)i * t.ld + j;
    const int bin = dkv_chainBin(v.sq[at]);
    const double qn = v.q_norm[i], kn = v.k_norm[j], cap = u.softcap > 0 ? v.cap[at] : 0;
    double s = v.s[at];
    *vs = dkv_formulaScoreVar(&u, fit.var[bin], v.sq[at], v.dot[at], qn, kn);
    if (u.z.gain > 0) s += dkv_formulaScoreLoss(&u, fit.gain[bin], v.dot[at], qn, v.k_root[j], cap);
    if (u.softcap > 0 || t.slopes)
        *vs = dkv_formulaScoreModified(&u, *vs, s, s > -DBL_MAX, cap,
                                       t.slopes ? (double)t.slopes[i % t.g] : 0, dkv_biasOf(t, i, j));
    if (u.s_rounded) {
        const double x = s > -DBL_MAX ? fabs(s) : 0, y = dkv_roundBy(u.round_s, x);
        *vs = dkv_flip(x, y, *vs, dkv_spacingAt(u.ulp_s, x));
        s = dkv_roundBy(u.round_s, s);
    }
    return s;
}

#define PER_LANE (DKV_SUB_KEYS / 32)
/* Where parts are added a warp has 128 columns of one row or key, so that what belongs to the part is read and computed once
 * for four of them. */
#define COLUMNS 4
static inline dim3 dkv_columnGrid(int64_t rows, int d) {
    return dim3(dkv_blocksFor(rows * 32, 128), dkv_blocksFor(d, 32 * COLUMNS));
}
/* The sum of x over the lanes before this one. */
static __device__ __forceinline__ double sumBefore(double x, int lane) {
    double sum = x;
    for (int s = 1; s < 32; s <<= 1) {
        const double y = __shfl_up_sync(~0u, sum, s);
        sum += lane >= s ? y : 0;
    }
    return sum - x;
}

typedef struct row_sums { /* [m, d] each */
    double *acc, *chain, *loss, *a1, *a2;
    double *size, *spread, *square, *n, *n2; /* of dQ; NULL: the terms' order is declared, their loss is summed tile by tile */
} row_sums;

typedef struct row_parts { /* of one tile, [subs, m, d]; NULL: none */
    const double *sum, *a1, *a2, *size; /* size: where the terms' order is declared */
    const double *by, *fade, *old, *count, *wsum; /* [subs, max_m]; count: of terms, for what they lose */
    const double *mean2, *alike; /* [subm, subs, d], [subm, subs]; with wsum: a2 / wsum in place of mean2 */
    dkv_step_rows step;
    int64_t max_m;
    int32_t m, d, subs, sub_m;
    double fold, squares_by; /* factor on the step's squares */
    const double *done;      /* [m] */
    bool down;               /* the last part first */
    bool anyhow;             /* terms in an order that is not declared */
} row_parts;

typedef struct row_element {
    double acc, chain, loss, a1, a2;
} row_element;

static __device__ __forceinline__ void fadeElement(const dkv_noise &z, row_element &x, double by, double rel, double old) {
    const double by2 = by * by;
    x.acc *= by;
    x.loss *= by;
    x.a1 = x.a1 * by2 + rel * old * x.acc;
    x.a2 = x.a2 * by2 + rel * x.acc * x.acc;
    x.chain = x.chain * by2 + z.unit2 * x.acc * x.acc + dkv_twinLeast(&z, x.acc);
}

/* A block's rows of a packed [hq, tq] array, as doubles. */
template <typename T>
__global__ void load_lse_kernel(int64_t q_row, int64_t tq, int m, int g, int head0, const T *x, double *out) {
    DKV_GRID_LOOP(i, m) out[i] = (double)x[(head0 + i % g) * tq + q_row + i / g];
}

/* One row's chain over keys [base, base + n) of w [m, ld], a thread a row of the warp's 32 from i0 on; sum, squares: of
 * |w|; weights up to `least` round nothing. Converged warps only. */
static __device__ __forceinline__ dkv_formula_step walkRow(const double *w, int64_t ld, int i0, int m, int base, int n,
                                                           double (*tile)[33], double sum, double squares,
                                                           double least) {
    const int lane = threadIdx.x % 32;
    dkv_formula_step k = {0, squares, 0, 0, 0, 0, 0, 0};
    const bool use = squares > 0 && squares <= DBL_MAX;
    const double by = use ? 1 / sum : 0, by2 = use ? 1 / squares : 0;
    double g = 0, f = 0;
    k.share = use ? squares / (sum * sum) : 0;
    for (int at = 0; at < n; at += 32) {
        __syncwarp();
        for (int row = 0; row < 32; row++)
            tile[row][lane] =
                i0 + row < m && at + lane < n ? w[(int64_t)(i0 + row) * ld + base + at + lane] : 0;
        __syncwarp();
        for (int c = 0; c < 32 && at + c < n; c++) {
            const double x = fabs(tile[lane][c]);
            g += x * by;
            f += x * x * by2;
            if (!use || !(x > least)) continue;
            if (k.count == 0) k.g_first = g, k.f_first = f;
            k.count++;
            k.g += g;
            k.g2 += g * g;
            k.ff += f < 1 ? f * (1 - f) : 0;
        }
    }
    return k;
}

static __device__ __forceinline__ void putStep(const dkv_step_rows &r, int64_t at, const dkv_formula_step &k) {
    r.count[at] = k.count;
    r.squares[at] = k.squares;
    r.g[at] = k.g;
    r.g2[at] = k.g2;
    r.ff[at] = k.ff;
    r.share[at] = k.share;
    r.g_first[at] = k.g_first;
    r.f_first[at] = k.f_first;
}
static __device__ __forceinline__ dkv_formula_step getStep(const dkv_step_rows &r, int64_t at) {
    return dkv_formula_step{r.count[at], r.squares[at], r.g[at],       r.g2[at],
                            r.ff[at],    r.share[at],   r.g_first[at], r.f_first[at]};
}

static __device__ __forceinline__ unsigned long long mixed(unsigned long long h) {
    h = (h ^ h >> 30) * 0xBF58476D1CE4E5B9ull;
    h = (h ^ h >> 27) * 0x94D049BB133111EBull;
    return h ^ h >> 31;
}

/* Adds n elements of a vector to the hash of a warp's row: each with its place, so that the order of adding
 * is nothing. */
static __device__ __forceinline__ unsigned long long hashOf(const void *x, int dtype, int64_t at, int n, unsigned salt,
                                                            int lane) {
    unsigned long long h = 0;
    for (int c = lane; c < n; c += 32) {
        unsigned long long w = dtype == DUALKV_FP32 ? __float_as_uint(((const float *)x)[at + c])
                                                    : ((const uint16_t *)x)[at + c];
        h += mixed(w + (((unsigned long long)salt << 48) | ((unsigned long long)(c + 1) << 32)) *
                           0x9E3779B97F4A7C15ull);
    }
    for (int s = 16; s; s >>= 1) h += __shfl_xor_sync(~0u, h, s);
    return h;
}

/* What the chains of unit rows a [m, d], b [n, d] round: sq, dot [m, n] (leading dimension ld), from
 * checkpoints. */
int dkv_chainTile(dkv_device_oracle *o, int m, int n, int d, int ld, const float *a, const float *b,
                  float *dot, float *sq);
/* Factors on the model of chains of x [tq, g, d] and y [tk, d], measured on samples. */
int dkv_twinFitChains(dkv_device_oracle *o, int d, const double *x, const double *y, const double *x_norm,
                      const double *y_norm, dkv_twin_fit *fit);
/* Scores of a tile and what they are made of; parts of its products; what each addition of a part rounds. */
int dkv_twinLoadTile(dkv_device_oracle *o, const dkv_scene *s, const dkv_area *t, score_view *v);
int dkv_twinPartRows(dkv_device_oracle *o, const dkv_area *t, int d, double alpha, const double *w,
                     const double *x, bool careful, double *part);
int dkv_twinAddRows(dkv_device_oracle *o, const row_parts *k, row_sums sums);
int dkv_twinCountTerms(dkv_device_oracle *o, int64_t n, int64_t parts, int64_t ld, const double *count, double *sum,
                       double *sum2);
static inline row_sums dkv_twinRowSums(const dkv_device_oracle *o, bool of_dq) {
    const dkv_twin_device *x = o->twin;
    row_sums s = {o->acc, x->chain, x->loss, x->a1, x->a2, NULL, NULL, NULL, NULL, NULL};
    if (of_dq && x->anyhow) s.size = x->size, s.spread = x->spread, s.square = x->square, s.n = x->row_n, s.n2 = x->row_n2;
    return s;
}
int dkv_twinZeroSums(dkv_device_oracle *o, int m, int d);
int dkv_twinForwardBlock(dkv_device_oracle *o, dkv_scene *s, const float *lse);
/* The head's sums of dK and dV: at its begin, after a segment's last rows (where segments' sums are rounded), at its end. */
int dkv_twinZeroKeys(dkv_device_oracle *o);
int dkv_twinAddSegment(dkv_device_oracle *o, const dkv_scene *s);
int dkv_twinFinishKeys(dkv_device_oracle *o, int32_t kvh);
int dkv_twinBackwardBlock(dkv_device_oracle *o, dkv_scene *s, const void *kernel_o, const float *kernel_lse);
int dkv_twinMeans(dkv_device_oracle *o, const double *x, int64_t rows, int64_t per, int d, const double *live,
                  double *out);
int dkv_twinMeanOf(dkv_device_oracle *o, const float *x, int64_t rows, int64_t per, double *out);
#endif
